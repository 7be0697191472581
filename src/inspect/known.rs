//! Recognizes published files by the names, dtypes and shapes of their tensors.
//!
//! [`KNOWN`] is the list. Its fingerprints, sizes and SHA-256 were published by others who had the files. The tensors of an entry follow
//! from the architecture and from the layers that a file leaves in BF16; a test compares them with each published fingerprint. Files that
//! differ only in values look alike, such as a distilled and a base model in BF16.

use crate::checkpoint::Weights;
use crate::component::Component;
use crate::config::{Configs, Variant};
use crate::files::sha256_of;
use crate::model::{text_file_manifest, vae_manifest};
use crate::names::{self, Layout, TensorRole, TensorSpec};
use crate::quantize::{FileLayout, LayerSpec, Policy, WeightLayout};
use crate::tensor::DType;
use std::collections::BTreeMap;

/// Dtype and shape of each tensor, by name.
pub type Tensors = BTreeMap<String, (&'static str, Vec<usize>)>;

/// A published file, or the shards of one.
#[derive(Debug)]
pub struct KnownFile {
    /// The display name.
    pub name: &'static str,
    /// The part that the file holds.
    pub part: Component,
    /// The file's size, if it was published for a single file.
    pub bytes: Option<u64>,
    /// The fingerprint of the file's header, if one was published; see [`fingerprint`].
    pub fingerprint: Option<&'static str>,
    /// The file's SHA-256, if one was published.
    pub sha256: Option<&'static str>,
    content: Content,
}

/// How the tensors of a file follow from the architecture.
#[derive(Clone, Copy, Debug)]
enum Content {
    /// A transformer in BF16.
    Plain(&'static Configs, Layout),
    /// A transformer with quantized layers, in BFL's layout.
    Quantized(&'static Configs, Variant, DType),
    /// A transformer with quantized layers in BFL's layout. Its layers in BF16 were inferred from its size.
    Inferred(&'static Configs, Variant, DType),
    /// A Qwen3 in BF16, with or without the head that predicts tokens.
    Encoder(&'static Configs, bool),
    /// A VAE whose values have this dtype.
    Vae(Layout, &'static str),
    /// Formats were chosen layer by layer, by no known rule.
    NotKnown,
}

const fn known(name: &'static str, part: Component, content: Content) -> KnownFile {
    KnownFile { name, part, bytes: None, fingerprint: None, sha256: None, content }
}

const fn transformer(name: &'static str, bytes: u64, content: Content) -> KnownFile {
    KnownFile { bytes: Some(bytes), ..known(name, Component::Transformer, content) }
}

const fn encoder(name: &'static str, bytes: u64, content: Content) -> KnownFile {
    KnownFile { bytes: Some(bytes), ..known(name, Component::TextEncoder, content) }
}

impl KnownFile {
    const fn with_fingerprint(self, fingerprint: &'static str) -> Self {
        Self { fingerprint: Some(fingerprint), ..self }
    }

    const fn with_sha256(self, sha256: &'static str) -> Self {
        Self { sha256: Some(sha256), ..self }
    }
}

/// The published files. Sizes and the SHA-256 of \[dev\]'s files are those that the repositories state. The fingerprints and the other
/// SHA-256 come from LatentSlate-Engine (`EnviralDesign/LatentSlate-Engine` at d502d5da), which had the files.
pub static KNOWN: [KnownFile; 30] = {
    use Content::{Encoder, Inferred, NotKnown, Plain, Quantized, Vae};
    use DType::{E2m1 as Nvfp4, E4m3 as Fp8};
    use Layout::{Bfl, Diffusers};
    use Variant::{Base, Distilled};
    const KLEIN_4B: &Configs = &Configs::KLEIN_4B;
    const KLEIN_9B: &Configs = &Configs::KLEIN_9B;
    const DEV: &Configs = &Configs::DEV;
    [
        transformer("flux-2-klein-4b or flux-2-klein-base-4b in bf16", 7_751_105_712, Plain(KLEIN_4B, Bfl))
            .with_sha256("ec3d4e733a771f61c052fb4856c48b336c55eaf2c65487c2a1faeb9bbda7a343"),
        transformer("flux-2-klein-9b, flux-2-klein-base-9b or flux-2-klein-9b-kv in bf16", 18_157_185_168, Plain(KLEIN_9B, Bfl)),
        known(
            "FLUX.2-klein-4B or FLUX.2-klein-base-4B as diffusers stores it",
            Component::Transformer,
            Plain(KLEIN_4B, Diffusers),
        ),
        known("FLUX.2-klein-9B, -base-9B or -9b-kv as diffusers stores it", Component::Transformer, Plain(KLEIN_9B, Diffusers)),
        transformer("flux-2-klein-4b-fp8", 4_070_624_520, Quantized(KLEIN_4B, Distilled, Fp8))
            .with_fingerprint("2ff21124fb997716c2da1597fab0824dc7bedcaf1aa182ade036e46788b79d6b")
            .with_sha256("97ed34fe0567e436200f2faee3939b88f2b5d99f8af2a4dc16532c4245c0ccb6"),
        transformer("flux-2-klein-base-4b-fp8", 4_089_498_488, Quantized(KLEIN_4B, Base, Fp8))
            .with_fingerprint("ab66231a752c13d876075bd31111ca0e6b28a465d9209b972b84820e587fb5a6"),
        transformer("flux-2-klein-9b-fp8", 9_433_061_528, Quantized(KLEIN_9B, Distilled, Fp8))
            .with_fingerprint("c25cec508eb68835ccd5833bb3a9886a1dea9cfb652ecf98b1ecf4d6d332940d")
            .with_sha256("865ba09f5b4c3cbd3468a4bd3acb9fcb2f8740c54317482f0bcd4ed1d3655cee"),
        transformer("flux-2-klein-base-9b-fp8", 9_567_278_472, Inferred(KLEIN_9B, Base, Fp8)),
        transformer("flux-2-klein-9b-kv-fp8", 9_818_935_984, NotKnown),
        transformer("flux-2-klein-4b-nvfp4", 2_460_413_488, Quantized(KLEIN_4B, Distilled, Nvfp4))
            .with_fingerprint("c6683e31192ed861a3068673e41d89555caacdad2e4a3a7357e5e576dcaea9d6")
            .with_sha256("d8c5007b6a3bbbdfd38538bbcef5101a55dfde81894f58d2e3c8701cdef3542b"),
        transformer("flux-2-klein-base-4b-nvfp4", 2_487_544_776, Inferred(KLEIN_4B, Base, Nvfp4)),
        transformer("flux-2-klein-9b-nvfp4", 5_760_960_048, Quantized(KLEIN_9B, Distilled, Nvfp4))
            .with_fingerprint("a222d48e4d796bfdb027b0c8e0eb3c8dc655d0901dbe9a7fdab41b434fb036f8")
            .with_sha256("5c72214496dd278f721a112e1bd1585fffed487bc0831c894bcbf30d12e9ee48"),
        transformer("flux-2-klein-base-9b-nvfp4", 5_809_193_808, Inferred(KLEIN_9B, Base, Nvfp4)),
        transformer("flux2-dev in bf16", 64_446_596_128, Plain(DEV, Bfl)),
        known("FLUX.2-dev as diffusers stores it", Component::Transformer, Plain(DEV, Diffusers)),
        transformer("flux2_dev_fp8mixed", 35_455_599_592, Inferred(DEV, Variant::Dev, Fp8))
            .with_sha256("863a82e4ff950a42a6b0e80bea824828f129eb1a8fbbdbd9e8cb29859127b486"),
        transformer("flux2-dev-nvfp4", 21_035_602_376, Inferred(DEV, Variant::Dev, Nvfp4)),
        encoder("mistral_3_small_flux2_fp8", 18_034_640_095, NotKnown)
            .with_sha256("e3467b7d912a234fb929cdf215dc08efdb011810b44bc21081c4234cc75b370e"),
        encoder("mistral_3_small_flux2_fp4_mixed", 12_275_678_071, NotKnown)
            .with_sha256("1ee1ff334d78228d73049ef0ee4fcd21c1700536b5a45c06547af057f92463a7"),
        encoder("Qwen3-4B in bf16", 8_044_982_048, Encoder(KLEIN_4B, false)),
        encoder("Qwen3-8B in bf16", 16_381_517_176, Encoder(KLEIN_9B, true)),
        encoder("qwen_3_8b_fp8mixed", 8_664_848_742, NotKnown)
            .with_sha256("abad16806e0cbabc54e0325d6565847443fe396d5f0be38bb3cd3fe75a1201d6"),
        encoder("qwen_3_8b_fp4mixed", 6_802_593_327, NotKnown),
        encoder("qwen_3_4b_fp4_flux2", 3_848_213_998, NotKnown),
        encoder("qwen_3_4b_fp8_mixed", 5_631_994_051, NotKnown),
        encoder("qwen_3_4b_fp4_mixed", 3_479_416_193, NotKnown),
        known("FLUX.2's VAE in bf16, as diffusers stores it", Component::Vae, Vae(Diffusers, "BF16")),
        known("FLUX.2's VAE in f32, as diffusers stores it", Component::Vae, Vae(Diffusers, "F32")),
        known("FLUX.2's VAE in bf16, in BFL's layout", Component::Vae, Vae(Bfl, "BF16")),
        known("FLUX.2's VAE in f32, in BFL's layout", Component::Vae, Vae(Bfl, "F32")),
    ]
};

impl KnownFile {
    /// The file's tensors, if they are known.
    pub fn tensors(&self) -> Option<Tensors> {
        let plain = |part, layout, manifest: &[TensorSpec], dtype| {
            let specs = manifest.iter().flat_map(move |spec| names::file_tensors(part, layout, spec));
            specs.map(|spec| (spec.name, (dtype, spec.shape))).collect::<Tensors>()
        };
        Some(match self.content {
            Content::Plain(sizes, layout) => {
                plain(Component::Transformer, layout, &sizes.manifest(Component::Transformer), "BF16")
            }
            Content::Quantized(sizes, variant, format) | Content::Inferred(sizes, variant, format) => {
                let tensors = layout(sizes, variant, format, &[]).tensors.into_iter();
                tensors.map(|tensor| (tensor.name, (tensor.dtype, tensor.shape))).collect()
            }
            Content::Encoder(sizes, has_head) => {
                let config = &sizes.text_encoder;
                let mut tensors = plain(Component::TextEncoder, Layout::Diffusers, &text_file_manifest(config), "BF16");
                if has_head {
                    tensors.insert("lm_head.weight".into(), ("BF16", vec![config.vocab, config.hidden]));
                }
                tensors
            }
            Content::Vae(layout, dtype) => {
                let mut tensors = plain(Component::Vae, layout, &vae_manifest(&Configs::KLEIN_4B.vae), dtype);
                // PyTorch's batch norm counts its updates.
                tensors.insert("bn.num_batches_tracked".into(), ("I64", Vec::new()));
                tensors
            }
            Content::NotKnown => return None,
        })
    }

    /// The sizes and the layout of a transformer whose quantized layers are known.
    pub fn quantized(&self) -> Option<(&'static Configs, FileLayout)> {
        match self.content {
            Content::Quantized(sizes, variant, format) | Content::Inferred(sizes, variant, format) => {
                Some((sizes, layout(sizes, variant, format, &[])))
            }
            _ => None,
        }
    }

    /// Whether the choice of quantized layers was inferred from the file's size.
    pub fn is_inferred(&self) -> bool {
        matches!(self.content, Content::Inferred(..))
    }
}

/// The layout of an official file: the layers that [`Policy`] quantizes, each with an input scale.
fn layout(sizes: &Configs, variant: Variant, format: DType, keep: &[String]) -> FileLayout {
    let policy = Policy::transformer(&sizes.transformer, variant, format, keep);
    let layer = |spec: TensorSpec| {
        let layer = LayerSpec::new(spec.name, spec.layer, spec.shape, &policy);
        LayerSpec { has_input_scale: layer.format.is_some(), ..layer }
    };
    let layers: Vec<LayerSpec> = sizes.manifest(Component::Transformer).into_iter().map(layer).collect();
    FileLayout::new(Component::Transformer, WeightLayout::Comfy, &layers)
}

/// The SHA-256 over one line per tensor in order of name, `name:('DTYPE', (rows, cols))` with the shape as Python prints tuples. Others
/// publish header fingerprints in this form.
pub fn fingerprint(tensors: &Tensors) -> String {
    let tuple = |shape: &[usize]| match shape {
        [only] => format!("({only},)"),
        shape => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    let lines = tensors.iter().map(|(name, (dtype, shape))| format!("{name}:('{dtype}', {})", tuple(shape)));
    sha256_of(lines.collect::<Vec<_>>().join("\n").as_bytes())
}

/// How the files of a part compare with the published ones.
#[derive(Debug)]
pub struct Finding {
    /// The number of tensors.
    pub tensors: usize,
    /// Bytes of all files together.
    pub bytes: u64,
    /// The number of files.
    pub files: usize,
    /// The fingerprint of all tensors under their names in the files.
    pub fingerprint: String,
    /// The published file that they are like.
    pub likeness: Likeness,
}

/// How a part is like a published file.
#[derive(Debug)]
pub enum Likeness {
    /// All names, dtypes and shapes match this file.
    Same(&'static KnownFile),
    /// The size matches this file, whose tensors are not known, or not for certain.
    SameSize(&'static KnownFile),
    /// No published file matches. The nearest one is given with its differences in order of name, unless most tensors differ.
    Unknown(Option<(&'static KnownFile, Vec<String>)>),
}

/// Finds the published file that a part's files are like.
pub fn identify(weights: &Weights) -> Finding {
    let mut all = Tensors::new();
    let mut own = Tensors::new();
    for (name, entry) in weights.shards().iter().flat_map(|shard| shard.tensors()) {
        let tensor = (entry.dtype.name, entry.shape.clone());
        if names::resolve(weights.component(), name) != TensorRole::OtherPart {
            own.insert(names::without_prefix(name).to_owned(), tensor.clone());
        }
        all.insert(name.to_owned(), tensor);
    }
    let shards = weights.shards();
    let bytes = shards.iter().map(|shard| shard.contents().len() as u64).sum();
    let likeness = likeness(weights.component(), &own, Some(bytes).filter(|_| shards.len() == 1));
    Finding { tensors: all.len(), bytes, files: shards.len(), fingerprint: fingerprint(&all), likeness }
}

/// Finds the published file that these tensors are like. `bytes` is the size of a single file; shards have none.
fn likeness(part: Component, tensors: &Tensors, bytes: Option<u64>) -> Likeness {
    let files = || KNOWN.iter().filter(|file| file.part == part);
    let compared = files().filter_map(|file| Some((file, differences(tensors, &file.tensors()?))));
    let nearest = compared.min_by_key(|(_, differences)| differences.len());
    let same_size = || files().find(|file| bytes.is_some() && file.bytes == bytes);
    match nearest {
        Some((file, differences)) if differences.is_empty() => Likeness::Same(file),
        _ if let Some(file) = same_size() => Likeness::SameSize(file),
        nearest => Likeness::Unknown(nearest.filter(|(_, differences)| 2 * differences.len() <= tensors.len())),
    }
}

/// How tensors differ from a published file's, in order of name.
fn differences(found: &Tensors, known: &Tensors) -> Vec<String> {
    let shown = |(dtype, shape): &(&str, Vec<usize>)| format!("{dtype} {shape:?}");
    let mut differences = BTreeMap::new();
    for (name, tensor) in known {
        match found.get(name) {
            None => drop(differences.insert(name, format!("`{name}` is missing"))),
            Some(other) if other != tensor => {
                differences.insert(name, format!("`{name}` is {}, not {}", shown(other), shown(tensor)));
            }
            Some(_) => {}
        }
    }
    let extra = found.iter().filter(|(name, _)| !known.contains_key(*name));
    differences.extend(extra.map(|(name, tensor)| (name, format!("`{name}`, {}, is not in it", shown(tensor)))));
    differences.into_values().collect()
}

/// Finds the published file with this SHA-256.
pub fn published_digest(sha256: &str) -> Option<&'static KnownFile> {
    KNOWN.iter().find(|file| file.sha256 == Some(sha256))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> &'static KnownFile {
        KNOWN.iter().find(|file| file.name == name).unwrap_or_else(|| panic!("{name}"))
    }

    fn elements(dtype: &str, shape: &[usize]) -> u64 {
        let size = match dtype {
            "F32" => 4,
            "BF16" => 2,
            "I64" => 8,
            _ => 1,
        };
        size * shape.iter().product::<usize>() as u64
    }

    /// The rebuilt tensors have the published fingerprints, and the rest of each file's size is plausible for a header.
    #[test]
    fn the_list_agrees_with_what_was_published() {
        for file in &KNOWN {
            let Some(tensors) = file.tensors() else {
                assert!(file.bytes.is_some(), "{}: nothing would recognize it", file.name);
                continue;
            };
            assert!(file.fingerprint.is_none_or(|published| published == fingerprint(&tensors)), "{}", file.name);
            let data: u64 = tensors.values().map(|(dtype, shape)| elements(dtype, shape)).sum();
            if let Some(bytes) = file.bytes {
                let header = bytes.checked_sub(data + 8).unwrap_or_else(|| panic!("{}: {data}", file.name));
                let each = header / tensors.len() as u64;
                assert!(header.is_multiple_of(8) && (80..130).contains(&each), "{}: {header}", file.name);
            }
            // A file that would be written has the size and the header's length to the byte, and no gap between tensors.
            if let Some((_, layout)) = file.quantized() {
                assert_eq!(
                    (Some(layout.bytes()), layout.bytes() - data),
                    (file.bytes, layout.header.len() as u64),
                    "{}",
                    file.name
                );
                assert_eq!(layout.header[..8], (layout.header.len() as u64 - 8).to_le_bytes(), "{}", file.name);
                let ends = layout.tensors.iter().map(|tensor| tensor.range.end);
                let starts = layout.tensors.iter().map(|tensor| tensor.range.start).chain([layout.bytes()]);
                assert!([layout.header.len() as u64].into_iter().chain(ends).eq(starts), "{}", file.name);
            }
        }
        let published = KNOWN.iter().filter(|file| file.fingerprint.is_some()).count();
        assert_eq!((published, KNOWN.iter().filter(|file| file.sha256.is_some()).count()), (5, 9));
    }

    /// No two entries of a part are alike, so the first match is the only one.
    #[test]
    fn entries_can_be_told_apart() {
        let mut prints: Vec<_> = KNOWN.iter().filter_map(|file| Some(fingerprint(&file.tensors()?))).collect();
        let mut sizes: Vec<_> = KNOWN.iter().filter_map(|file| file.bytes).collect();
        for list in [prints.len(), sizes.len()] {
            assert!(list >= 17, "{list}");
        }
        let counts = (prints.len(), sizes.len());
        prints.sort();
        prints.dedup();
        sizes.sort_unstable();
        sizes.dedup();
        assert_eq!((prints.len(), sizes.len()), counts);
        assert_eq!(published_digest(named("flux-2-klein-4b-fp8").sha256.unwrap()).unwrap().name, "flux-2-klein-4b-fp8");
        assert!(published_digest("").is_none());
    }

    #[test]
    fn one_more_layer_in_bf16_is_another_file() {
        let of = |variant, keep: &[String]| {
            let tensors = layout(&Configs::KLEIN_4B, variant, DType::E4m3, keep).tensors.into_iter();
            fingerprint(&tensors.map(|tensor| (tensor.name, (tensor.dtype, tensor.shape))).collect())
        };
        let kept = of(Variant::Distilled, &["double_blocks.0.*_attn.proj".into()]);
        assert_ne!(of(Variant::Distilled, &[]), kept);
        // The base model of this size keeps those two layers.
        assert_eq!(of(Variant::Base, &[]), kept);
    }

    #[test]
    fn every_known_file_is_recognized() {
        for file in &KNOWN {
            let found = match file.tensors() {
                Some(tensors) => likeness(file.part, &tensors, None),
                None => likeness(file.part, &Tensors::new(), file.bytes),
            };
            let (Likeness::Same(found) | Likeness::SameSize(found)) = found else { panic!("{}: {found:?}", file.name) };
            assert_eq!(found.name, file.name);
        }
    }

    #[test]
    fn what_differs_from_the_nearest_is_named() {
        let mut tensors = named("flux-2-klein-4b-fp8").tensors().unwrap();
        tensors.get_mut("img_in.weight").unwrap().1[1] += 1;
        tensors.remove("single_blocks.19.linear2.input_scale");
        tensors.insert("double_blocks.0.extra".into(), ("F32", vec![3]));
        let Likeness::Unknown(Some((file, differences))) = likeness(Component::Transformer, &tensors, Some(1)) else { panic!() };
        assert_eq!(file.name, "flux-2-klein-4b-fp8");
        let want = [
            "`double_blocks.0.extra`, F32 [3], is not in it",
            "`img_in.weight` is BF16 [3072, 129], not BF16 [3072, 128]",
            "`single_blocks.19.linear2.input_scale` is missing",
        ];
        assert_eq!(differences, want);
        // A file of the right size may have other layers than the inferred ones.
        let inferred = named("flux-2-klein-base-4b-nvfp4");
        assert!(inferred.is_inferred() && !file.is_inferred());
        let found = likeness(Component::Transformer, &tensors, inferred.bytes);
        assert!(matches!(found, Likeness::SameSize(file) if file.name == inferred.name), "{found:?}");
        // A file of another kind is not near to any.
        let other: Tensors = [("a".to_owned(), ("BF16", vec![1]))].into();
        assert!(matches!(likeness(Component::Vae, &other, None), Likeness::Unknown(None)));
    }
}
