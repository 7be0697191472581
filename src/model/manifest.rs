//! Manifests: the canonical name and shape of every tensor in a model of a given configuration. A recording [`Loader`] collects
//! them from the `load` functions, so they cannot differ from what is loaded.
//!
//! Tensors are in the order of the data flow. Checkpoints are checked in this order, so it decides which of several missing
//! tensors an error names.

use super::transformer::{ContextIn, Transformer};
use super::vae::{Decoder, Encoder, latent_stats};
use super::{Loader, TextEncoder};
use crate::component::Component;
use crate::config::{Configs, TextConfig, TransformerConfig, VaeConfig};
use crate::names::TensorSpec;

impl Configs {
    /// The tensors of a part.
    pub fn manifest(&self, part: Component) -> Vec<TensorSpec> {
        match part {
            Component::Transformer => transformer_manifest(&self.transformer),
            Component::TextEncoder => text_manifest(&self.text_encoder),
            Component::Vae => vae_manifest(&self.vae),
        }
    }
}

/// The transformer's tensors.
pub fn transformer_manifest(config: &TransformerConfig) -> Vec<TensorSpec> {
    let mut list = Loader::record(|loader| Transformer::load(loader, config));
    // The prompt's projection is loaded with the text encoder. Its place is after the image's projection, which comes first.
    list.splice(1..1, Loader::record(|loader| ContextIn::load(loader, config)));
    list
}

/// The text encoder's tensors, up to the last layer that is read.
pub fn text_manifest(config: &TextConfig) -> Vec<TensorSpec> {
    Loader::record(|loader| TextEncoder::load(loader, config))
}

/// The text encoder's tensors in published files, which have all layers.
pub fn text_file_manifest(config: &TextConfig) -> Vec<TensorSpec> {
    let [first, second, _] = config.text_layers;
    let mut list = text_manifest(&TextConfig { text_layers: [first, second, config.layers], ..config.clone() });
    list.push(TensorSpec::new("model.norm.weight", &[config.hidden]));
    list
}

/// The VAE's tensors, encoder and decoder, with the statistics of the latents.
pub fn vae_manifest(config: &VaeConfig) -> Vec<TensorSpec> {
    Loader::record(|loader| {
        Encoder::load(loader, config)?;
        Decoder::load(loader, config)?;
        latent_stats(loader, config)
    })
}
