//! What the stages of an image leave on the host.

use crate::dump::Record;
use crate::sequence::Pixels;
use crate::tokenizer::Tokens;

/// The results of the stages on the host. Everything but the pixels and the count is kept only if the job asks for a record.
#[derive(Clone, Default)]
pub struct Values {
    pub prompt_embeds: Vec<f32>,
    pub negative_prompt_embeds: Option<Vec<f32>>,
    pub references: Vec<Vec<f32>>,
    pub latents: Vec<Vec<f32>>,
    /// One row of three channels per pixel, before and after rounding to bytes.
    pub image: Vec<f32>,
    pub pixels: Vec<u8>,
    /// How many activations did not fit into FP8.
    pub saturated: u64,
}

impl Values {
    /// The record of an image of this size.
    pub fn into_record(self, prompt: &Tokens, size: Pixels) -> Record {
        let pixels = size.width() * size.height();
        let image = (0..3).flat_map(|c| (0..pixels).map(move |p| 3 * p + c)).map(|i| self.image[i]).collect();
        Record {
            token_ids: prompt.ids.clone(),
            prompt_embeds: self.prompt_embeds,
            negative_prompt_embeds: self.negative_prompt_embeds,
            references: self.references,
            latents: self.latents,
            image,
            width: size.width(),
            height: size.height(),
        }
    }
}
