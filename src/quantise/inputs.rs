//! Scales of the inputs of layers, which files store as `input_scale`.

use crate::tensor::minifloat::{E2M1_MAX, E4M3_MAX};
use crate::tensor::quantise::QuantisedFormat;

/// What other prompts may have beyond those of a calibration: two octaves. FP8 and the block scales of NVFP4 have the same
/// precision over many octaves, so that head room costs next to nothing.
const HEAD_ROOM: f64 = 4.0;

/// The scale of an input whose largest magnitude was measured: the smallest power of two with which four times that magnitude is
/// within the range of the format. `None` if there is none in f32.
pub fn measured_scale(largest: f32, format: QuantisedFormat) -> Option<f32> {
    let range = match format {
        QuantisedFormat::Fp8 => E4M3_MAX,
        QuantisedFormat::Nvfp4 => E4M3_MAX * E2M1_MAX,
    };
    let least = HEAD_ROOM * f64::from(largest) / f64::from(range);
    (f32::MIN_EXP - 1..f32::MAX_EXP).map(|exponent| 2_f32.powi(exponent)).find(|power| f64::from(*power) >= least)
}

/// The scale of an input that was not measured, by what makes it: FP8 has fifteen octaves of equal precision, so that a constant
/// with enough room above does as well as any other. The results of norms and attention stay far below 448, the products of a
/// SwiGLU below eight times that. NVFP4 without a scale takes the largest value of the moment, which no constant replaces.
pub fn constant_scale(layer: &str, format: QuantisedFormat) -> Option<f32> {
    let from_swiglu = layer.ends_with("_mlp.2") || layer.ends_with(".linear2");
    (format == QuantisedFormat::Fp8).then_some(if from_swiglu { 8.0 } else { 1.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use QuantisedFormat::{Fp8, Nvfp4};

    #[test]
    fn constants_follow_the_producer_of_the_input() {
        for (layer, scale) in [
            ("double_blocks.0.img_attn.qkv", 1.0),
            ("double_blocks.0.txt_attn.proj", 1.0),
            ("double_blocks.0.txt_mlp.0", 1.0),
            ("double_blocks.4.img_mlp.2", 8.0),
            ("single_blocks.0.linear1", 1.0),
            ("single_blocks.19.linear2", 8.0),
        ] {
            assert_eq!(constant_scale(layer, Fp8), Some(scale), "{layer}");
            assert_eq!(constant_scale(layer, Nvfp4), None);
        }
    }

    #[test]
    fn measured_scales_are_powers_of_two_with_two_octaves_of_head_room() {
        for (largest, fp8, nvfp4) in [
            (112.0, 1.0, 0.25),
            (112.1, 2.0, 0.25),
            (168.0, 2.0, 0.25),
            (169.0, 2.0, 0.5),
            (56.0, 0.5, 0.125),
            (672.0, 8.0, 1.0),
            (f32::MIN_POSITIVE, f32::MIN_POSITIVE, f32::MIN_POSITIVE),
        ] {
            assert_eq!((measured_scale(largest, Fp8), measured_scale(largest, Nvfp4)), (Some(fp8), Some(nvfp4)), "{largest}");
        }
        assert_eq!(measured_scale(f32::NAN, Fp8), None);
        assert_eq!(measured_scale(f32::INFINITY, Fp8), None);
    }
}
