//! The results of an image's stages on the host.

use crate::dump::Record;
use crate::sequence::Pixels;
use crate::tokenizer::Tokens;

/// The results of the stages on the host. Without a record, only the pixels and the count are kept.
#[derive(Clone, Default)]
pub struct Values {
    /// The content of the record. Until the end its image has one row of three channels per pixel.
    pub record: Record,
    /// The image rounded to bytes, in the same order.
    pub pixels: Vec<u8>,
    /// How many activations did not fit into FP8.
    pub saturated: u64,
}

impl Values {
    /// The record of an image of this size.
    pub fn into_record(self, prompt: &Tokens, size: Pixels) -> Record {
        let (width, height, values) = (size.width(), size.height(), self.record.image);
        let image = (0..3).flat_map(|c| (0..width * height).map(move |p| 3 * p + c)).map(|i| values[i]).collect();
        Record { token_ids: prompt.ids.clone(), image, width, height, ..self.record }
    }
}
