//! The three parts of a model: descriptors of their weights, and a forward pass written over
//! [`Backend`](crate::backend::Backend). Nothing here knows which backend runs it, and no state is kept between calls.

mod attention;
mod bounds;
mod formats;
mod loader;
mod manifest;
mod nvfp4_math;
mod quantize;
mod table;
mod text_encoder;
mod transformer;
mod vae;

pub use attention::{AttentionFormat, BlockFormat, PlainHeads};
pub use formats::{LayerFormat, PartFormat, PlainInput};
pub use loader::Loader;
pub use manifest::{text_file_manifest, text_manifest, transformer_manifest, vae_manifest};
pub use nvfp4_math::Nvfp4Math;
pub use text_encoder::TextEncoder;
#[cfg(feature = "internals")]
pub use transformer::Modulation;
pub use transformer::{ContextIn, ReferenceTokens, StepInput, Transformer};
pub use vae::Vae;

use crate::backend::Linear;
use crate::error::Result;
use crate::tensor::{Arena, Tensor};

/// Allocates the inputs of linear layers: one range of consecutive rows per layer, in the format that the layer needs.
fn alloc_for(ws: &mut Arena, cols: usize, layers: &[(usize, &Linear)]) -> Result<Vec<Tensor>> {
    let ranges: Vec<_> = layers.iter().map(|(rows, layer)| (*rows, layer.input)).collect();
    ws.alloc_ranges(&ranges, cols)
}
