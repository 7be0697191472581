//! The metadata of an image: everything it was made from, so that it can be made again.
//!
//! One struct has three forms: keys with plain values, which every viewer of text shows; a JSON object under the key `kiln`, which
//! `kiln replay` reads; and the text `parameters`, which image galleries read.

mod foreign;
mod parameters;
mod stored;

pub use foreign::{Maker, Program};
pub use stored::StoredText;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::marker::PhantomData;

/// Says which images are the same to the byte: it is raised whenever the arithmetic changes the bytes of some image. A test compares image
/// hashes with recorded ones, and fails if they change while the number stays.
pub const ARITHMETIC: u32 = 1;

/// How much is stored in an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// Everything.
    #[default]
    Full,
    /// The prompt and the settings, without digests of files.
    Basic,
    /// Nothing.
    None,
}

/// What an image was made from. Absent values did not apply.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ImageMetadata {
    /// The prompt.
    pub prompt: String,
    /// The seed; absent if the noise came from a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// The model's display name.
    pub model: String,
    /// The identity of its weights, see [`ModelSamples`](crate::inspect::ModelSamples).
    pub model_id: String,
    /// How the model was trained.
    pub variant: String,
    /// Steps of the schedule.
    pub steps: usize,
    /// Width and height of the image.
    pub size: [usize; 2],
    /// Precision of the computation.
    pub precision: String,
    /// The noise levels, if they were given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sigmas: Option<String>,
    /// The padding of the prompt, where it is not the usual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<String>,
    /// The arithmetic of FP8 and NVFP4, as flags and their values.
    #[serde(default, deserialize_with = "few", skip_serializing_if = "Vec::is_empty")]
    pub quantized: Vec<(String, String)>,
    /// Adapters, in the order in which they were applied.
    #[serde(default, deserialize_with = "few", skip_serializing_if = "Vec::is_empty")]
    pub lora: Vec<AdapterMetadata>,
    /// How adapters were applied, if it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora_mode: Option<String>,
    /// Whether the VAE worked in tiles.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vae_tiling: bool,
    /// The guidance scale, if the model takes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance: Option<f32>,
    /// The negative prompt, if it counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub negative: Option<String>,
    /// The edit, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<InitMetadata>,
    /// The SHA-256 of each reference file, in order.
    #[serde(default, deserialize_with = "few", skip_serializing_if = "Vec::is_empty")]
    pub references: Vec<String>,
    /// Where the noise came from.
    pub noise: NoiseMetadata,
    /// The kind of device: the bytes of an image depend on it.
    pub device: String,
    /// The quality of a JPEG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality: Option<u8>,
    /// See [`ARITHMETIC`].
    pub arithmetic: u32,
    /// The program and its version.
    pub version: String,
}

/// An adapter as described in images and JSON.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterMetadata {
    /// The name of the file.
    pub file: String,
    /// The SHA-256 of the file.
    pub sha256: String,
    /// Its scale.
    pub scale: f32,
}

/// The edit that an image came from.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct InitMetadata {
    /// The SHA-256 of the init image's file.
    pub sha256: String,
    /// The share of the schedule that ran.
    pub strength: f64,
    /// The SHA-256 of the mask's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_sha256: Option<String>,
    /// Pixels over which the repainted part fades out, if not everything was repainted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feather: Option<usize>,
    /// Pixels around the mask that were worked on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_crop: Option<usize>,
    /// The part of the image that was worked on: left, top, width, height.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crop: Option<[usize; 4]>,
    /// What was added at the sides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extend: Option<String>,
    /// Whether the init image was a reference, too.
    pub reference: bool,
    /// Whether the size was asked for, to which the init image was scaled.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sized: bool,
}

/// Where noise came from.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NoiseMetadata {
    /// The generator, or `file`.
    pub kind: String,
    /// The number of SMs that `torch-cuda` reproduces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sms: Option<u32>,
    /// The resident threads of an SM that `torch-cuda` reproduces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The SHA-256 of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

impl NoiseMetadata {
    /// The generator as flags and their values.
    pub fn flags(&self) -> impl Iterator<Item = (&'static str, String)> {
        let sms = self.sms.map(|sms| ("noise-sms", sms.to_string()));
        let threads = self.threads.map(|threads| ("noise-threads", threads.to_string()));
        [("noise-kind", self.kind.clone())].into_iter().chain(sms).chain(threads)
    }
}

/// The digits of a digest that plain keys show, enough to tell files apart.
const SHORT: usize = 16;

/// The first digits of a digest.
fn short_digest(digest: &str) -> String {
    digest.chars().take(SHORT).collect()
}

impl ImageMetadata {
    /// The key of the JSON object.
    pub const KEY: &str = "kiln";

    /// The key of the text that galleries read. In a JPEG or WebP it is Exif's user comment.
    pub const PARAMETERS: &str = "parameters";

    /// The keys and values to store.
    pub fn text(&self, detail: Detail) -> Vec<(&'static str, String)> {
        let mut text = match detail {
            Detail::None => return Vec::new(),
            Detail::Basic => return self.keys(false),
            Detail::Full => self.keys(true),
        };
        // No value here can fail to become JSON: floats are finite, and keys are strings.
        text.extend(serde_json::to_string(self).ok().map(|json| (Self::KEY, json)));
        text.push((Self::PARAMETERS, self.parameters()));
        text
    }

    /// Plain keys, in a fixed order. `full` adds what a file of the same name may not show: digests, the device and the arithmetic.
    fn keys(&self, full: bool) -> Vec<(&'static str, String)> {
        let list = |of: &dyn Fn(&AdapterMetadata) -> String| self.lora.iter().map(of).collect::<Vec<_>>().join(", ");
        let mut text = vec![("prompt", self.prompt.clone())];
        text.extend(self.seed.map(|seed| ("seed", seed.to_string())));
        text.extend([
            ("model", self.model.clone()),
            ("variant", self.variant.clone()),
            ("steps", self.steps.to_string()),
            ("size", self.shown_size()),
            ("precision", self.precision.clone()),
        ]);
        text.extend(self.sigmas.clone().map(|sigmas| ("sigmas", sigmas)));
        text.extend(self.padding.clone().map(|padding| ("padding", padding)));
        let flag = |name: &str| QUANTIZED.into_iter().find(|flag| *flag == name);
        text.extend(self.quantized.iter().filter_map(|(name, value)| Some((flag(name)?, value.clone()))));
        if !self.lora.is_empty() {
            text.push(("lora", list(&|adapter| format!("{}:{}", adapter.file, adapter.scale))));
            text.push(("lora-sha256", list(&|adapter| adapter.sha256.clone())));
        }
        text.extend(self.lora_mode.clone().map(|mode| ("lora-mode", mode)));
        text.extend(self.vae_tiling.then(|| ("vae-tiling", "on".into())));
        text.extend(self.guidance.map(|scale| ("guidance", scale.to_string())));
        text.extend(self.negative.clone().map(|negative| ("negative", negative)));
        if let Some(InitMetadata { sha256, strength, mask_sha256, feather, crop, extend, reference, .. }) = &self.init {
            text.extend([("init-sha256", short_digest(sha256)), ("strength", strength.to_string())]);
            text.extend(mask_sha256.iter().map(|digest| ("mask-sha256", short_digest(digest))));
            text.extend(feather.map(|feather| ("feather", feather.to_string())));
            text.extend(crop.map(|crop| ("mask-crop", crop.map(|side| side.to_string()).join(","))));
            text.extend(extend.clone().map(|sides| ("extend", sides)));
            text.extend(reference.then(|| ("init-reference", "on".into())));
        }
        if !self.references.is_empty() {
            text.push(("references", self.references.len().to_string()));
        }
        text.extend(self.noise.flags());
        if full {
            text.extend([("model-id", self.model_id.clone()), ("device", self.device.clone())]);
            let digests = self.references.iter().map(|digest| short_digest(digest)).collect::<Vec<_>>().join(", ");
            text.extend((!digests.is_empty()).then_some(("reference-sha256", digests)));
            text.extend(self.noise.sha256.iter().map(|digest| ("noise-sha256", short_digest(digest))));
            text.extend(self.quality.map(|quality| ("quality", quality.to_string())));
            text.push(("arithmetic", self.arithmetic.to_string()));
        }
        text.push(("version", self.version.clone()));
        text
    }

    fn shown_size(&self) -> String {
        format!("{}x{}", self.size[0], self.size[1])
    }
}

/// Reads a list that is too short to take much memory.
fn few<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    /// More references or adapters than a sequence or a file of metadata has room for.
    const MOST: usize = 1000;

    struct Few<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Few<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MOST} items")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(item) = items.next_element()? {
                if list.len() == MOST {
                    return Err(A::Error::invalid_length(MOST + 1, &self));
                }
                list.push(item);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(Few(PhantomData))
}

/// The flags of FP8 and NVFP4 arithmetic.
pub const QUANTIZED: [&str; 5] = ["quantize", "attention", "fp8-accumulate", "nvfp4-math", "nvfp4-layout"];

#[cfg(test)]
mod tests {
    use super::*;

    /// Metadata with every value.
    pub(super) fn complete() -> ImageMetadata {
        ImageMetadata {
            prompt: "a fox".into(),
            seed: Some(7),
            model: "klein 4B".into(),
            model_id: "k1:0123456789abcdef".into(),
            variant: "base".into(),
            steps: 50,
            size: [1024, 768],
            precision: "bf16".into(),
            sigmas: Some("1,0.5".into()),
            padding: Some("left".into()),
            quantized: vec![("quantize".into(), "fp8".into()), ("attention".into(), "auto".into())],
            lora: vec![
                AdapterMetadata { file: "a.safetensors".into(), sha256: "00ff".into(), scale: 0.8 },
                AdapterMetadata { file: "b:2".into(), sha256: "11".into(), scale: 1.0 },
            ],
            lora_mode: Some("merge".into()),
            vae_tiling: true,
            guidance: Some(4.0),
            negative: Some("blurry".into()),
            init: Some(InitMetadata {
                sha256: "cd".repeat(32),
                strength: 0.6,
                mask_sha256: Some("ef".repeat(32)),
                feather: Some(16),
                mask_crop: Some(64),
                crop: Some([1, 2, 3, 4]),
                extend: Some("left=16".into()),
                reference: true,
                sized: true,
            }),
            references: vec!["12".repeat(32), "34".repeat(32)],
            noise: NoiseMetadata {
                kind: "torch-cuda".into(),
                sms: Some(132),
                threads: Some(2048),
                sha256: Some("56".repeat(32)),
            },
            device: "cuda sm_90".into(),
            quality: Some(95),
            arithmetic: ARITHMETIC,
            version: "kiln 0.1.0".into(),
        }
    }

    #[test]
    fn every_value_is_in_the_json_and_in_the_keys() {
        let metadata = complete();
        let text = metadata.text(Detail::Full);
        let of = |key: &str| text.iter().find(|(name, _)| *name == key).map(|(_, value)| value.as_str());
        let json = of(ImageMetadata::KEY).unwrap();
        assert_eq!(serde_json::from_str::<ImageMetadata>(json).unwrap(), metadata);
        for (key, value) in [
            ("seed", "7"),
            ("size", "1024x768"),
            ("attention", "auto"),
            ("lora", "a.safetensors:0.8, b:2:1"),
            ("lora-sha256", "00ff, 11"),
            ("lora-mode", "merge"),
            ("init-sha256", "cdcdcdcdcdcdcdcd"),
            ("mask-crop", "1,2,3,4"),
            ("reference-sha256", "1212121212121212, 3434343434343434"),
            ("noise-sha256", "5656565656565656"),
            ("model-id", "k1:0123456789abcdef"),
            ("device", "cuda sm_90"),
            ("quality", "95"),
            ("arithmetic", "1"),
        ] {
            assert_eq!(of(key), Some(value), "{key}");
        }
        // Every key once.
        let mut names: Vec<&str> = text.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), text.len());
    }

    #[test]
    fn less_is_stored_if_asked() {
        let metadata = complete();
        let basic: Vec<&str> = metadata.text(Detail::Basic).iter().map(|(name, _)| *name).collect();
        for key in ["kiln", "parameters", "model-id", "device", "reference-sha256", "noise-sha256", "quality", "arithmetic"] {
            assert!(!basic.contains(&key), "{key}");
        }
        assert!(basic.contains(&"prompt") && basic.last() == Some(&"version"));
        assert!(metadata.text(Detail::None).is_empty());
    }
}
