//! What became of the linear layers of a model when it was loaded.

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
    /// Those of its weight, which is stored in one part or in several, in row order.
    pub parts: Vec<PartFormat>,
    /// The type of its input.
    pub input: DType,
    /// Why the input of quantized weights is not quantized, if it is not.
    pub why: Option<PlainInput>,
    /// Whether the weight has what adapters add to it.
    pub merged: bool,
}

/// Why the input of a layer whose weights are quantized is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainInput {
    /// No op before the layer could store it quantized, or the model was made for inputs as they are, as text encoders are.
    Model,
    /// The checkpoint does not ask for it.
    File,
    /// The parts of the weight ask for different formats of the one input that they have.
    Parts,
    /// In f32 nothing is rounded that need not be.
    Precision,
    /// The backend has no GEMM of these weights and the input that the checkpoint asks for.
    Device,
    /// Plain inputs were asked for.
    Asked,
    /// The weights are expanded, because an adapter is merged with them.
    Adapter,
}

/// The formats of consecutive rows of a weight: in the checkpoint, and on the backend. Without a checkpoint they are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartFormat {
    /// The type in which the checkpoint stores them.
    pub stored: DType,
    /// The type in which the backend holds them.
    pub held: DType,
    /// Bytes in the checkpoint, with scales.
    pub stored_bytes: u64,
    /// Bytes on the backend, with scales.
    pub held_bytes: u64,
}
