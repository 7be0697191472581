//! How NVFP4 weights are multiplied.

use crate::backend::GemmFormats;
use crate::error::{Error, Remedy, Result};
use crate::tensor::{DType, Precision, Scale, Scales, Stored};

/// How a transformer's NVFP4 weights are multiplied in layers for which the checkpoint asks for NVFP4 inputs. Other layers always
/// have plain inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nvfp4Math {
    /// By NVFP4 inputs if the backend has such a GEMM, otherwise by plain inputs.
    #[default]
    Auto,
    /// By plain inputs: weights keep the values of the checkpoint.
    Bf16,
    /// Re-encoded as e4m3 and multiplied by e4m3 inputs. It is an error if the backend has no such GEMM.
    Fp8,
}

impl Nvfp4Math {
    /// The name that users type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }

    /// The input of a layer to be re-encoded. `wanted` is the input that the checkpoint asks for. `None` if the layer is not re-encoded.
    pub(super) fn fp8_input(self, wanted: Option<Stored>, gemms: GemmFormats, precision: Precision) -> Result<Option<Stored>> {
        let (Self::Fp8, Some(Stored { scales: Scales::Blocks16(scale), .. })) = (self, wanted) else { return Ok(None) };
        if precision == Precision::F32 {
            return Err(refused("nothing is quantized in f32 precision"));
        }
        if !gemms.takes(DType::E4m3, DType::E4m3) {
            return Err(refused("this device has no FP8 GEMM"));
        }
        // Both scales are the largest input divided by the format's largest value. For NVFP4 that value is the largest block
        // scale, the largest value of e4m3, times six.
        let scale = Scale::new(6.0 * scale.get()).ok_or_else(|| refused("an input scale is beyond f32"))?;
        Ok(Some(Stored::fp8(scale)))
    }
}

/// The error for a layer that cannot be re-encoded.
pub(super) fn refused(why: &str) -> Error {
    Error::Usage { what: format!("NVFP4 weights cannot be multiplied as FP8: {why}"), hint: Some(Remedy::AnyNvfp4Math) }
}
