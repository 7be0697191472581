//! The formats of a model's linear layers after loading.

use crate::backend::Weight;
use crate::names::LayerId;
use crate::tensor::DType;

/// The formats of a linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerFormat {
    /// The layer.
    pub id: LayerId,
    /// The weight on the backend.
    pub weight: Weight,
    /// The formats of the weight's parts, in row order. A checkpoint may store a weight in one part or several.
    pub parts: Vec<PartFormat>,
    /// The type of its input.
    pub input: DType,
    /// Why the input of quantized weights is not quantized, if it is not.
    pub why: Option<PlainInput>,
    /// Whether adapters are merged into the weight.
    pub merged: bool,
}

/// Why a layer with quantized weights has an unquantized input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainInput {
    /// No op before the layer can write it quantized, or the model expects unquantized inputs, as text encoders do.
    Model,
    /// The checkpoint does not ask for it.
    File,
    /// The parts of the weight share one input, but ask for different formats.
    Parts,
    /// f32 precision rounds nothing that need not be rounded.
    Precision,
    /// The backend has no GEMM for these weights and the input format that the checkpoint asks for.
    Device,
    /// Plain inputs were requested.
    Asked,
    /// The weights are expanded because an adapter is merged into them.
    Adapter,
}

/// The formats of consecutive weight rows, in the checkpoint and on the backend. Without a checkpoint the two are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartFormat {
    /// The type of the rows in the checkpoint.
    pub stored: DType,
    /// The type of the rows on the backend.
    pub held: DType,
    /// Bytes in the checkpoint, with scales.
    pub stored_bytes: u64,
    /// Bytes on the backend, with scales.
    pub held_bytes: u64,
}
