//! Text encoder values that others published: the only outside reference for a first run with real weights.
//!
//! They come from an article on klein: Qwen3-4B in bf16, the prompt `hello`, the prompt embeddings of the first four tokens,
//! columns 0 to 2, which are in the first text layer. Attention is causal, so later tokens do not change a token's row. Only four
//! tokens and the layers up to the first text layer have to run.

use crate::checkpoint::Weights;
use crate::config::{Configs, TextConfig};
use crate::tensor::DType;

/// The prompt.
pub const PROMPT: &str = "hello";

/// The first tokens of the prompt in its chat template: their text and their ids.
pub const TOKENS: [(&str, u32); 4] = [("<|im_start|>", 151_644), ("user", 872), ("\\n", 198), ("hello", 14_990)];

/// The number of columns that were published.
pub const COLUMNS: usize = 3;

/// The first columns of the first text layer, one row per token.
pub type Rows = [[f32; COLUMNS]; TOKENS.len()];

/// The published values.
pub const VALUES: Rows = [[-768.0, 6.09, -25.75], [34.25, 2.39, -4.56], [29.25, 2.98, -2.06], [21.0, 0.31, -1.05]];

/// The allowed error in proportion to the value. A residual stream in bf16 is rounded after each of the eighteen sublayers up to
/// the first text layer, by 2^-9 to 2^-8 of its value at most: by 3.5 % if most of these roundings go the same way.
const RELATIVE: f32 = 0.04;

/// Half a unit of the second decimal, to which the article rounds.
const PRINTED: f32 = 0.005;

/// The allowed error of a value. In addition to the above, a sublayer's output has an error in proportion to the row's largest
/// values, because it is a sum of products of rounded values. This error reaches all columns, small ones too. It is taken as half
/// a bf16 unit of the largest published value of the row, which for the first token is the massive activation of -768.
pub fn room(row: usize, column: usize) -> f32 {
    let largest = VALUES[row].iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    // bf16 has seven bits behind the leading one.
    let unit = 2.0_f32.powi(largest.log2().floor() as i32 - 7);
    RELATIVE * VALUES[row][column].abs() + unit / 2.0 + PRINTED
}

/// Whether there are published values for a text encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applicability {
    /// The values are for this encoder.
    Published,
    /// The values are for this encoder, but it is quantized, which changes them by an unpublished amount.
    Quantized,
    /// The values are for another encoder.
    OtherEncoder,
}

impl Applicability {
    /// Whether the published values are for this text encoder.
    pub fn of(config: &TextConfig, weights: &Weights) -> Self {
        let mut tensors = weights.shards().iter().flat_map(|shard| shard.tensors());
        if *config != Configs::KLEIN_4B.text_encoder {
            Self::OtherEncoder
        } else if tensors.all(|(_, entry)| DType::plain_stored_as(entry.dtype.name).is_some()) {
            Self::Published
        } else {
            Self::Quantized
        }
    }
}

/// Computed values compared with the published ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The computed values.
    pub found: Rows,
    /// Rows and columns of values that differ by more than the allowed error, or are not finite.
    pub off: Vec<(usize, usize)>,
    /// The largest error relative to its allowed error; NaN if a value is NaN.
    pub worst: f32,
}

/// Compares values with the published ones.
pub fn compare(found: Rows) -> Comparison {
    let (mut off, mut worst) = (Vec::new(), 0.0_f32);
    for (row, values) in found.iter().enumerate() {
        for (column, value) in values.iter().enumerate() {
            let share = (value - VALUES[row][column]).abs() / room(row, column);
            if share.is_nan() || share > 1.0 {
                off.push((row, column));
            }
            worst = if share.is_nan() || worst.is_nan() { f32::NAN } else { worst.max(share) };
        }
    }
    Comparison { found, off, worst }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Shard;
    use crate::component::Component;
    use crate::names::Layout;
    use crate::tensor::Bytes;
    use crate::tiny;
    use crate::tokenizer::Tokenizer;
    use half::bf16;
    use std::sync::Arc;

    fn changed(change: impl Fn(usize, usize, f32) -> f32) -> Comparison {
        compare(std::array::from_fn(|row| std::array::from_fn(|column| change(row, column, VALUES[row][column]))))
    }

    #[test]
    fn the_tokens_are_those_of_the_tokenizer() {
        let tokens = Tokenizer::qwen3().unwrap().encode(PROMPT, TOKENS.len()).unwrap();
        assert_eq!(tokens.ids, TOKENS.map(|(_, id)| id));
        assert_eq!(tokens.real, TOKENS.len());
    }

    #[test]
    fn only_the_plain_encoder_is_judged() {
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            let weights = tiny::model(Layout::Diffusers, dtype).unwrap().weights(Component::TextEncoder).unwrap();
            assert_eq!(Applicability::of(&Configs::KLEIN_4B.text_encoder, &weights), Applicability::Published);
            for config in [
                Configs::KLEIN_9B.text_encoder,
                Configs::TINY.text_encoder,
                TextConfig { eps: 1e-5, ..Configs::KLEIN_4B.text_encoder },
            ] {
                assert_eq!(Applicability::of(&config, &weights), Applicability::OtherEncoder);
            }
        }
        let header = r#"{"model.layers.0.mlp.down_proj.weight":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[0,1]}}"#;
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0]].concat();
        let shard = Shard::from_bytes("x", Bytes::new(Arc::new(file))).unwrap();
        let weights = Weights::from_shards(Component::TextEncoder, vec![shard]).unwrap();
        assert_eq!(Applicability::of(&Configs::KLEIN_4B.text_encoder, &weights), Applicability::Quantized);
    }

    #[test]
    fn right_values_and_their_neighbors_are_accepted() {
        assert_eq!(changed(|_, _, value| value).off, []);
        // The article's values were rounded to bf16 and then to two decimals.
        assert_eq!(changed(|_, _, value| bf16::from_f32(value).to_f32()).off, []);
        for factor in [0.97, 1.03] {
            assert_eq!(changed(|_, _, value| factor * value).off, []);
        }
        // A small column may be off by the rounding error of its row's large column.
        assert_eq!(changed(|row, column, value| if (row, column) == (3, 1) { value + 0.06 } else { value }).off, []);
    }

    #[test]
    fn wrong_values_are_found_wherever_they_are() {
        for wrong in (0..TOKENS.len()).flat_map(|row| (0..COLUMNS).map(move |column| (row, column))) {
            for value in
                [-VALUES[wrong.0][wrong.1], f32::NAN, f32::INFINITY, VALUES[wrong.0][wrong.1] + 5.0 * room(wrong.0, wrong.1)]
            {
                let found = changed(|row, column, right| if (row, column) == wrong { value } else { right });
                assert_eq!(found.off, [wrong], "{value}");
                assert!(found.worst.is_nan() || found.worst > 1.0);
            }
        }
        // An increase by a tenth is off in every row, though not in every small column.
        let scaled = changed(|_, _, value| 1.1 * value);
        assert!((0..4).all(|row| scaled.off.contains(&(row, 0))), "{:?}", scaled.off);
        // With other layers, tokens or columns, at most a value or two would fit by chance.
        assert!(changed(|row, column, _| VALUES[(row + 1) % 4][column]).off.len() >= 9);
        assert!(changed(|row, column, _| VALUES[row][(column + 1) % 3]).off.len() >= 11);
        assert_eq!(changed(|_, _, _| f32::NAN).off.len(), 12);
        assert!(changed(|_, _, _| 0.0).off.len() >= 11);
    }

    /// The allowed error is a few per cent of a large value, and never large enough to allow a wrong sign.
    #[test]
    fn the_room_is_what_rounding_can_explain() {
        for (row, values) in VALUES.iter().enumerate() {
            for (column, value) in values.iter().enumerate() {
                assert!(room(row, column) < 0.45 * value.abs(), "{row} {column}");
            }
            assert!(room(row, 0) < 0.05 * values[0].abs());
        }
        assert!((room(0, 0) - (0.04 * 768.0 + 2.0 + 0.005)).abs() < 1e-4);
    }
}
