//! Runs only the first layers of the text encoder, to examine its values.

use super::inputs::download;
use super::job::LoadOptions;
use super::open::OpenModel;
use crate::backend::{Backend, DryRun};
use crate::config::TextConfig;
use crate::error::Result;
use crate::model::{Loader, TextEncoder};
use crate::tensor::{Arena, Region};
use crate::tokenizer::Tokens;

impl OpenModel {
    /// The first `length` tokens of a prompt in its chat template.
    pub fn first_tokens(&self, prompt: &str, length: usize) -> Result<Tokens> {
        self.tokenizer.encode(prompt, length)
    }

    /// The first columns of the first text layer, one row per token. No token may be padding. Loads nothing else of the model,
    /// and drops weights that the backend held.
    pub fn first_text_layer(&self, be: &mut dyn Backend, tokens: &Tokens, columns: usize) -> Result<Vec<f32>> {
        let config = &self.configs.text_encoder;
        // The encoder ends with its last text layer, so all three are set to the first one.
        let config = TextConfig { text_layers: [config.text_layers[0]; 3], max_tokens: tokens.ids.len(), ..config.clone() };
        let (weights, precision) = (Some(&self.weights.text_encoder), LoadOptions::DEFAULT.precision);
        let activations = precision.activations();

        let (mut plan, mut region, mut ws) =
            (DryRun::new(be.gemm_formats()), Arena::new(Region::Weights), Arena::new(Region::Arena));
        let encoder =
            TextEncoder::load(&mut Loader::new(&mut plan, &mut region, weights, precision, &mut |_| ()).shapes_only(), &config)?;
        let features = ws.alloc(tokens.ids.len(), config.features(), activations)?;
        encoder.forward(&mut plan, &mut ws, features, tokens)?;
        be.reserve(Region::Weights, region.peak())?;
        be.reserve(Region::Arena, ws.peak().max(plan.arena_bytes))?;

        let mut region = Arena::new(Region::Weights);
        let encoder = TextEncoder::load(&mut Loader::new(be, &mut region, weights, precision, &mut |_| ()), &config)?;
        let mut ws = Arena::new(Region::Arena);
        let features = ws.alloc(tokens.ids.len(), config.features(), activations)?;
        encoder.forward(be, &mut ws, features, tokens)?;
        let values = download(be, features.cols(0..columns))?;
        self.verify()?;
        Ok(values)
    }
}
