//! Plain weights that are quantised when a model is loaded. Nothing is calibrated, so the scales of inputs are constants.

use super::formats::PlainInput;
use super::nvfp4_math::{self, Nvfp4Math};
use crate::backend::GemmFormats;
use crate::error::{Error, Remedy, Result};
use crate::names::{LayerId, LayerRole};
use crate::tensor::quantise::QuantisedFormat;
use crate::tensor::{Precision, Scale, Stored};

/// The op that writes the input of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Producer {
    /// A modulated layer norm.
    Norm,
    /// Attention, of which each result is a mean of values.
    Attention,
    /// SwiGLU, whose results are products, or SwiGLU and attention side by side.
    Swiglu,
}

impl LayerId {
    /// The op that writes what the layer multiplies, for layers of the transformer's blocks. There it can write inputs quantised; those of
    /// all other layers stay as they are.
    pub const fn producer(self) -> Option<Producer> {
        match self.role {
            LayerRole::Qkv(_) | LayerRole::MlpIn(_) | LayerRole::Linear1 => Some(Producer::Norm),
            LayerRole::AttentionOut(_) => Some(Producer::Attention),
            LayerRole::MlpOut(_) | LayerRole::Linear2 => Some(Producer::Swiglu),
            _ => None,
        }
    }

    /// Whether the weight of this linear layer is quantised if that is asked for: all of the blocks, of which published files keep a few
    /// wider, and all of the text encoder. Embedders, modulations and output layers stay as the checkpoint has them.
    pub const fn is_quantised_on_request(self) -> bool {
        self.block.is_some()
    }
}

impl Producer {
    /// The scale of such an input in e4m3. That has fifteen octaves of one precision, so a scale only has to keep the largest value
    /// in range, and may leave several octaves of room: norms and attention stay far below 448, and the results of SwiGLU, of which
    /// FLUX.2's largest are about 160, below 3584. What is beyond is counted and reported.
    pub const fn fp8_scale(self) -> Scale {
        match self {
            Self::Norm | Self::Attention => Scale::ONE,
            Self::Swiglu => Scale::power_of_two(3),
        }
    }

    /// The scale of such an input in NVFP4. The scales of its blocks follow its values; they are e4m3, so that again this only has to
    /// keep the largest value in range: 168 behind norms and attention, 2688 behind SwiGLU. Blocks are as precise as others down to a
    /// largest value of 0.006 and 0.09.
    pub const fn nvfp4_scale(self) -> Scale {
        match self {
            Self::Norm | Self::Attention => Scale::power_of_two(-4),
            Self::Swiglu => Scale::ONE,
        }
    }
}

/// How the input of a layer is stored whose weight is quantised when it is loaded, or why it stays plain. It is an error if the
/// backend has no GEMM of such weights at all: expanding them again would leave nothing of quantising but its errors.
pub(super) fn input(
    format: QuantisedFormat,
    producer: Option<Producer>,
    gemms: GemmFormats,
    precision: Precision,
    math: Nvfp4Math,
) -> Result<std::result::Result<Stored, PlainInput>> {
    let weight = format.dtype();
    let input = match (format, producer) {
        (_, None) => Err(PlainInput::Model),
        _ if precision == Precision::F32 => Err(PlainInput::Precision),
        (QuantisedFormat::Nvfp4, Some(_)) if math == Nvfp4Math::Fp8 => {
            return Err(nvfp4_math::refused("they are quantised when they are loaded, and not re-encoded"));
        }
        (QuantisedFormat::Nvfp4, Some(_)) if math == Nvfp4Math::Bf16 => Err(PlainInput::Asked),
        _ if !gemms.takes(weight, weight) => Err(PlainInput::Device),
        (QuantisedFormat::Nvfp4, Some(producer)) => Ok(Stored::nvfp4(producer.nvfp4_scale())),
        (QuantisedFormat::Fp8, Some(producer)) => Ok(Stored::fp8(producer.fp8_scale())),
    };
    match input {
        Err(_) if !gemms.takes(weight, precision.activations()) => {
            Err(refused(format, "this device has no GEMM of such weights"))
        }
        input => Ok(input),
    }
}

/// The error for a model that cannot be quantised so.
pub(super) fn refused(format: QuantisedFormat, why: &str) -> Error {
    let what = format!("the weights cannot be quantised to {} at load: {why}", format.name());
    Error::Usage { what, hint: Some(Remedy::AsStored) }
}
