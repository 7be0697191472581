//! Dumps the intermediate tensors of a run to a safetensors file, for comparison with other engines, and reads noise from one.

use crate::checkpoint::Shard;
use crate::error::{Error, Remedy, Result};
use crate::files::sha256_of;
use crate::noise::CHANNELS;
use crate::tensor::DType;
use safetensors::tensor::{Dtype, TensorView};
use std::path::Path;

/// The intermediate tensors of a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Token ids of the padded prompt.
    pub token_ids: Vec<u32>,
    /// Prompt embeddings, one row per token.
    pub prompt_embeds: Vec<f32>,
    /// Embeddings of the negative prompt, if there is one.
    pub negative_prompt_embeds: Option<Vec<f32>>,
    /// Tokens of each reference image, one row of 128 values per token.
    pub references: Vec<Vec<f32>>,
    /// Tokens of the init image, if it is encoded.
    pub init: Option<Vec<f32>>,
    /// For each token of the canvas whether it keeps the init image, if some do.
    pub keep: Option<Vec<bool>>,
    /// The noise of the seed, one row of 128 values per token.
    pub noise: Vec<f32>,
    /// Where denoising starts, which is the noise unless there is an init image, then the latents after each step.
    pub latents: Vec<Vec<f32>>,
    /// The decoded image before it is rounded to bytes, `[3, height, width]`, nominally within -1..1.
    pub image: Vec<f32>,
    /// Width of the image.
    pub width: usize,
    /// Height of the image.
    pub height: usize,
}

impl Record {
    /// Serializes the tensors `token_ids`, `prompt_embeds`, `noise`, `latents.0` (where denoising starts) to `latents.n` and `image`,
    /// and if present `negative_prompt_embeds`, `reference.1.tokens` onwards, `init.tokens` and `mask.tokens` (1 is repainted).
    pub fn to_safetensors(&self) -> Result<Vec<u8>> {
        let bytes = |values: &[f32]| DType::F32.encoded(values);
        let ids: Vec<u8> = self.token_ids.iter().flat_map(|id| (*id as i32).to_le_bytes()).collect();
        let rows = self.token_ids.len();
        let mut tensors = vec![
            ("token_ids".to_string(), Dtype::I32, vec![rows], ids),
            ("prompt_embeds".into(), Dtype::F32, vec![rows, self.prompt_embeds.len() / rows.max(1)], bytes(&self.prompt_embeds)),
            ("image".into(), Dtype::F32, vec![3, self.height, self.width], bytes(&self.image)),
        ];
        if let Some(embeds) = &self.negative_prompt_embeds {
            tensors.push(("negative_prompt_embeds".into(), Dtype::F32, vec![rows, embeds.len() / rows.max(1)], bytes(embeds)));
        }
        let shape = |values: &[f32]| vec![values.len() / CHANNELS, CHANNELS];
        for (j, tokens) in self.references.iter().enumerate() {
            tensors.push((format!("reference.{}.tokens", j + 1), Dtype::F32, shape(tokens), bytes(tokens)));
        }
        if let Some(init) = &self.init {
            tensors.push(("init.tokens".into(), Dtype::F32, shape(init), bytes(init)));
        }
        if let Some(keep) = &self.keep {
            let repainted = keep.iter().map(|keep| u8::from(!keep)).collect();
            tensors.push(("mask.tokens".into(), Dtype::U8, vec![keep.len()], repainted));
        }
        tensors.push(("noise".into(), Dtype::F32, shape(&self.noise), bytes(&self.noise)));
        for (i, latents) in self.latents.iter().enumerate() {
            tensors.push((format!("latents.{i}"), Dtype::F32, shape(latents), bytes(latents)));
        }
        let failed = |e: safetensors::SafeTensorError| Error::Op { op: "dump", what: e.to_string() };
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), data)?)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed)?;
        safetensors::serialize(views, None).map_err(failed)
    }
}

/// Whether a file is a dump.
pub fn is_dump(path: &Path) -> bool {
    Shard::open(path).is_ok_and(|shard| shard.entry("latents.0").is_some() && shard.entry("token_ids").is_some())
}

/// Noise from a file.
#[derive(Clone, Debug, PartialEq)]
pub struct NoiseFile {
    /// One row of 128 values for each token.
    pub values: Vec<f32>,
    /// The SHA-256 of the file, as hexadecimal digits.
    pub sha256: String,
}

/// Reads the tensor `noise` of a file: F32, `[tokens, 128]`.
pub fn read_noise(path: &Path, tokens: usize) -> Result<NoiseFile> {
    let shard = Shard::open(path)?;
    let wrong = |detail: String| Error::bad_file(path, "wrong noise", detail);
    let missing = || wrong("there is no tensor `noise`".into());
    let entry = shard.entry("noise").ok_or_else(missing)?;
    if entry.shape != [tokens, CHANNELS] {
        let detail = format!("tensor `noise` is {:?}, an image of this size needs {:?}", entry.shape, [tokens, CHANNELS]);
        return Err(wrong(detail).with_hint(Remedy::SizeOfNoise));
    }
    if entry.dtype.name != "F32" {
        return Err(wrong(format!("tensor `noise` is {}, it must be F32", entry.dtype.name)));
    }
    let bytes = shard.bytes("noise").ok_or_else(missing)?;
    let (values, sha256) = (DType::F32.decoded(&bytes), sha256_of(shard.contents()));
    shard.verify()?;
    match values.iter().filter(|v| !v.is_finite()).count() {
        0 => Ok(NoiseFile { values, sha256 }),
        count => Err(wrong(format!("{count} of its values are not finite"))),
    }
}
