//! Quantizes plain weights at load. Nothing is calibrated, so input scales are constants.

use super::formats::PlainInput;
use super::nvfp4_math::{self, Nvfp4Math};
use crate::backend::GemmFormats;
use crate::error::{Error, Remedy, Result};
use crate::names::{LayerId, LayerRole};
use crate::tensor::{DType, Precision, Scale, Stored};

/// The op that writes the input of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Producer {
    /// A modulated layer norm.
    Norm,
    /// Attention. Each result is a mean of values.
    Attention,
    /// SwiGLU, whose results are products, or SwiGLU next to attention.
    Swiglu,
}

impl LayerId {
    /// The op that writes the layer's input, for layers of the transformer's blocks. It can write the input quantized. All other
    /// layers have plain inputs.
    pub const fn producer(self) -> Option<Producer> {
        match self.role {
            LayerRole::Qkv(_) | LayerRole::MlpIn(_) | LayerRole::Linear1 => Some(Producer::Norm),
            LayerRole::AttentionOut(_) => Some(Producer::Attention),
            LayerRole::MlpOut(_) | LayerRole::Linear2 => Some(Producer::Swiglu),
            _ => None,
        }
    }

    /// Whether a request to quantize weights covers this linear layer. It covers all layers of the blocks, though published files
    /// keep a few of them wider, and all of the text encoder. Embedders, modulations and output layers stay as stored.
    pub const fn is_quantized_on_request(self) -> bool {
        self.block.is_some()
    }
}

impl Producer {
    /// The constant scale of an input in this format, if inputs are quantized to it.
    pub fn input_scale(self, format: DType) -> Option<Scale> {
        let [plain, swiglu] = format.format().target?.input_scales?;
        Some(if self == Self::Swiglu { swiglu } else { plain })
    }
}

/// How the input of a layer that is quantized at load is stored, or why it stays plain. It is an error if the backend has no GEMM
/// for such weights: expanding them again would leave only the quantization error.
pub(super) fn input(
    format: DType,
    producer: Option<Producer>,
    gemms: GemmFormats,
    precision: Precision,
    math: Nvfp4Math,
) -> Result<std::result::Result<Stored, PlainInput>> {
    let is_nvfp4 = format == DType::E2m1;
    let input = match producer {
        None => Err(PlainInput::Model),
        _ if precision == Precision::F32 => Err(PlainInput::Precision),
        _ if is_nvfp4 && math == Nvfp4Math::Fp8 => {
            return Err(nvfp4_math::refused("they are quantized when they are loaded, and not re-encoded"));
        }
        _ if is_nvfp4 && math == Nvfp4Math::Bf16 => Err(PlainInput::Asked),
        Some(producer) => match producer.input_scale(format) {
            None => Err(PlainInput::Model),
            Some(_) if !gemms.takes(format, format) => Err(PlainInput::Device),
            Some(scale) => Ok(Stored::scaled(format, scale)),
        },
    };
    match input {
        Err(_) if !gemms.takes(format, precision.activations()) => {
            Err(refused(format, "this device has no GEMM for such weights"))
        }
        input => Ok(input),
    }
}

/// The error for a model that cannot be quantized at load.
pub(super) fn refused(format: DType, why: &str) -> Error {
    let what = format!("the weights cannot be quantized to {} at load: {why}", format.label());
    Error::Usage { what, hint: Some(Remedy::AsStored) }
}
