//! The values of the tiny model, which are hashed from the names of its tensors.

use crate::tensor::DType;

/// The values of one tensor as little-endian bytes.
pub fn values(name: &str, shape: &[usize], dtype: DType) -> Vec<u8> {
    let hash = fnv1a(name);
    let rule = Rule::of(name, shape);
    let value = |index: usize| rule.value((splitmix64(hash, index as u64) >> 56) as u32);
    // This loop is serial because the tensors are generated in parallel.
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    dtype.encoded(&values)
}

/// How a byte of the hash becomes a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    /// Around 1: scales of norms, and variances.
    Scale,
    /// Around 2: qk-norm scales of the transformer, so that attention is sharp and a wrong position changes the result.
    SharpScale,
    /// Small, around 0: biases and means.
    Bias,
    /// Around 0, with a spread that lets a matrix preserve the magnitude of its input.
    Matrix { step: f32 },
}

impl Rule {
    fn of(name: &str, shape: &[usize]) -> Self {
        if shape.len() < 2 {
            let sharp = [".norm_q.weight", ".norm_k.weight", ".norm_added_q.weight", ".norm_added_k.weight"];
            if sharp.iter().any(|end| name.ends_with(end)) {
                return Self::SharpScale;
            }
            let scale = name.ends_with(".weight") || name.ends_with(".running_var");
            return if scale { Self::Scale } else { Self::Bias };
        }
        // Values are uniform in (-1, 1) times a power of two, so their variance is a third of its square. The power is chosen so
        // that an output, a sum over all inputs, has about the magnitude of one input.
        let inputs: usize = shape[1..].iter().product();
        let mut step = 1.0 / 256.0;
        let mut reach = 4;
        while reach < inputs {
            reach *= 4;
            step /= 2.0;
        }
        Self::Matrix { step }
    }

    #[inline]
    fn value(self, byte: u32) -> f32 {
        let odd = (2 * byte) as f32 - 255.0;
        match self {
            Self::Scale => 1.0 + ((byte & 127) as f32 - 64.0) / 128.0,
            Self::SharpScale => 2.0 * Self::Scale.value(byte),
            Self::Bias => odd / 2048.0,
            Self::Matrix { step } => odd * step,
        }
    }
}

/// The FNV-1a hash of a name.
fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// The `index`-th output of the SplitMix64 generator that starts at `hash`.
#[inline]
fn splitmix64(hash: u64, index: u64) -> u64 {
    let mut z = hash.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_match_published_values() {
        assert_eq!(fnv1a(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a("a"), 0xAF63_DC4C_8601_EC8C);
        assert_eq!(splitmix64(0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(splitmix64(0, 1), 0x6E78_9E6A_A1B9_65F4);
    }

    #[test]
    fn spread_follows_the_number_of_inputs() {
        for (inputs, exponent) in [(1, 0), (4, 0), (5, 1), (16, 1), (17, 2), (256, 3), (576, 4), (1024, 4)] {
            let step = 2f32.powi(-8 - exponent);
            assert_eq!(Rule::of("x.weight", &[7, inputs]), Rule::Matrix { step }, "{inputs}");
        }
        assert_eq!(Rule::of("conv.weight", &[8, 64, 3, 3]), Rule::of("x.weight", &[8, 576]));
        assert_eq!(Rule::of("norm.weight", &[8]), Rule::Scale);
        assert_eq!(Rule::of("attn.norm_added_q.weight", &[8]), Rule::SharpScale);
        assert_eq!(Rule::of("self_attn.q_norm.weight", &[8]), Rule::Scale);
        assert_eq!(Rule::of("bn.running_var", &[8]), Rule::Scale);
        assert_eq!(Rule::of("bn.running_mean", &[8]), Rule::Bias);
    }

    #[test]
    fn every_value_is_exact_in_both_half_types() {
        let widest = Rule::of("x.weight", &[1, 4608]);
        for rule in [Rule::Scale, Rule::SharpScale, Rule::Bias, Rule::of("x.weight", &[1, 1]), widest] {
            for byte in 0..256 {
                let value = rule.value(byte);
                assert_eq!(half::bf16::from_f32(value).to_f32(), value);
                assert_eq!(half::f16::from_f32(value).to_f32(), value);
            }
        }
    }
}
