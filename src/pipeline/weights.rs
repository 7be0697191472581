//! A model's weights on a backend. They have two sides: the text side, which encodes prompts and is needed first, and the image
//! side, which denoises and decodes. The image side is loaded after the prompt's ops are issued, so loading overlaps with a GPU
//! running them. The VAE is loaded after the ops of the first step, unless it encodes references. In low-memory mode the image
//! side overwrites the text side, which is then loaded again for the next prompt.

use super::branches::Branches;
use super::job::LoadOptions;
use crate::adapter::Adapters;
use crate::backend::{Backend, DryRun, GemmFormats};
use crate::checkpoint::{ReadAhead, Weights};
use crate::component::{Component, PerComponent};
use crate::config::Configs;
use crate::error::Result;
use crate::model::{ContextIn, LayerFormat, Loader, TextEncoder, Transformer, Vae};
use crate::progress::{Phase, Progress};
use crate::tensor::{Arena, Region};
use crate::trace::{self, Span};
use std::sync::Arc;

/// Places weights in the memory of a backend.
pub struct WeightPlacement<'a> {
    pub configs: &'a Configs,
    /// The files of each part. Without files only shapes are placed.
    pub sources: PerComponent<Option<&'a Weights>>,
    pub options: LoadOptions,
    /// The adapters, merged into weights or placed as LoRA branches.
    pub adapters: &'a Adapters,
    /// Offset of the scratch space for merging, in the adapter region.
    pub merged_at: u64,
    /// Whether to load the weights. Otherwise a dry run gets only their shapes.
    pub real: bool,
}

/// The networks that encode prompts.
pub struct TextSide {
    pub encoder: TextEncoder,
    pub context: ContextIn,
    /// The formats of the linear layers.
    pub formats: Vec<LayerFormat>,
}

/// The networks that denoise and decode.
pub struct ImageSide {
    pub transformer: Transformer,
    pub vae: Vae,
    /// The formats of the linear layers.
    pub formats: Vec<LayerFormat>,
}

/// Bytes of the text side and of the two networks of the image side, in placement order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub text: u64,
    pub transformer: u64,
    pub vae: u64,
}

impl Sizes {
    /// Bytes of both sides. They are placed one after the other or, if `shared`, in the same memory.
    pub fn total(self, shared: bool) -> u64 {
        let image = self.transformer + self.vae;
        if shared { self.text.max(image) } else { self.text + image }
    }

    /// The offset of the image side in bytes.
    fn image_at(self, shared: bool) -> u64 {
        if shared { 0 } else { self.text }
    }

    /// The offset of the VAE.
    fn vae_at(self, shared: bool) -> u64 {
        self.image_at(shared) + self.transformer
    }
}

impl TextSide {
    /// Attaches LoRA branches to the layers of the text side.
    pub fn attach(&mut self, branches: &Branches) {
        let layers = self.encoder.layers_mut().chain([self.context.layer_mut()]);
        branches.attach(layers);
    }
}

impl ImageSide {
    /// Attaches LoRA branches to the layers of the image side.
    pub fn attach(&mut self, branches: &Branches) {
        branches.attach(self.transformer.layers_mut());
    }
}

impl WeightPlacement<'_> {
    /// Places both sides on the dry-run backend, as a backend with these GEMMs would. Also returns their bytes, and how many of
    /// those bytes even a backend that reads files in place has to copy.
    pub fn both(&self, gemms: GemmFormats) -> Result<(TextSide, ImageSide, Sizes, Sizes)> {
        let mut plan = DryRun::new(gemms);
        let (text, text_bytes) = self.text(&mut plan, &mut |_| ())?;
        let side = |text: u64| Sizes { text, ..Sizes::default() };
        let (mut sizes, mut copied) = (side(text_bytes), side(plan.copied_bytes));
        let shared = self.options.low_memory;
        let (transformer, formats, bytes) = self.transformer(&mut plan, sizes.image_at(shared), &mut |_| ())?;
        (sizes.transformer, copied.transformer) = (bytes, plan.copied_bytes - copied.text);
        let (vae, bytes) = self.vae(&mut plan, sizes.vae_at(shared), &mut |_| ())?;
        (sizes.vae, copied.vae) = (bytes, plan.copied_bytes - copied.text - copied.transformer);
        Ok((text, ImageSide { transformer, vae, formats }, sizes, copied))
    }

    fn loader<'a>(
        &'a self,
        part: Component,
        be: &'a mut dyn Backend,
        region: &'a mut Arena,
        loaded: &'a mut dyn FnMut(u64),
    ) -> Loader<'a> {
        let LoadOptions { precision, attention, nvfp4_math, quantize, adapters, .. } = self.options;
        let loader = Loader::new(be, region, self.sources[part], precision, loaded);
        let loader = loader.with_attention(attention).with_nvfp4_math(nvfp4_math).with_quantize(quantize);
        let loader = loader.with_adapters(self.adapters, adapters, self.merged_at);
        if self.real { loader.verify_written() } else { loader.shapes_only() }
    }

    /// The trace span for loading a part. Placing shapes is too short for one.
    fn span(&self, what: &'static str) -> Option<Span> {
        self.real.then(|| trace::span(what))
    }

    /// Places the text side. Calls `loaded` with the bytes of each weight. Also returns the total bytes.
    fn text(&self, be: &mut dyn Backend, loaded: &mut dyn FnMut(u64)) -> Result<(TextSide, u64)> {
        let configs = self.configs;
        let mut region = Arena::new(Region::Weights);
        let mut loader = self.loader(Component::TextEncoder, be, &mut region, loaded);
        let span = self.span("upload the text encoder");
        let encoder = TextEncoder::load(&mut loader, &configs.text_encoder)?;
        drop(span);
        let mut formats = loader.formats();
        let mut loader = self.loader(Component::Transformer, be, &mut region, loaded);
        let _span = self.span("upload the transformer's first layer for text");
        let context = ContextIn::load(&mut loader, &configs.transformer)?;
        formats.extend(loader.formats());
        Ok((TextSide { encoder, context, formats }, region.peak()))
    }

    /// Places the transformer from byte `at` on. Calls `loaded` with the bytes of each weight. Also returns the formats of its
    /// layers, and the total bytes.
    fn transformer(
        &self,
        be: &mut dyn Backend,
        at: u64,
        loaded: &mut dyn FnMut(u64),
    ) -> Result<(Transformer, Vec<LayerFormat>, u64)> {
        let mut region = Arena::starting_at(Region::Weights, at);
        let mut loader = self.loader(Component::Transformer, be, &mut region, loaded);
        let _span = self.span("upload the transformer");
        let transformer = Transformer::load(&mut loader, &self.configs.transformer)?;
        let formats = loader.formats();
        Ok((transformer, formats, region.peak() - at))
    }

    /// Places the VAE from byte `at` on. Calls `loaded` with the bytes of each weight. Also returns the total bytes.
    fn vae(&self, be: &mut dyn Backend, at: u64, loaded: &mut dyn FnMut(u64)) -> Result<(Vae, u64)> {
        let mut region = Arena::starting_at(Region::Weights, at);
        let mut loader = self.loader(Component::Vae, be, &mut region, loaded);
        let _span = self.span("upload the VAE");
        let vae = Vae::load(&mut loader, &self.configs.vae, self.options.references)?.with_tiling(self.options.vae_tiling);
        Ok((vae, region.peak() - at))
    }
}

/// A model's files, and which of their weights are on the backend.
pub struct Store {
    pub files: Arc<PerComponent<Weights>>,
    pub configs: Configs,
    pub options: LoadOptions,
    pub sizes: Sizes,
    /// The model's adapters.
    pub adapters: Adapters,
    /// The LoRA branches in use. A job may have other ones than the model.
    pub branches: Arc<Branches>,
    /// Whether all of the text side is on the backend.
    pub text: bool,
    /// Whether the transformer is on the backend.
    pub transformer: bool,
    /// Whether the VAE is on the backend.
    pub vae: bool,
    /// Reads the files before they are needed. Dropped with the last weights.
    pub read_ahead: Option<ReadAhead>,
}

impl Store {
    fn placement(&self) -> WeightPlacement<'_> {
        let sources = self.files.each_ref().map(Some);
        let (adapters, merged_at) = (&self.adapters, self.branches.branch_bytes);
        WeightPlacement { configs: &self.configs, sources, options: self.options, adapters, merged_at, real: true }
    }

    /// Fails if a file has changed since it was opened.
    fn verify(&self) -> Result<()> {
        self.files.values().try_for_each(Weights::verify)?;
        self.adapters.verify()
    }

    /// Loads the text side, unless it is on the backend. A dry run has placed it in the same memory, but did not know the scales
    /// of weights that are quantized at load. So the loaded text side replaces the one in `side`.
    pub fn load_text(&mut self, side: &mut TextSide, be: &mut dyn Backend, progress: &dyn Progress) -> Result<()> {
        if self.text {
            return Ok(());
        }
        if self.transformer && self.options.low_memory {
            progress.warn("to save memory, the text encoder is loaded again for every prompt");
            (self.transformer, self.vae) = (false, false);
        }
        progress.begin(Phase::Load, self.sizes.text);
        (*side, _) = self.placement().text(be, &mut |bytes| progress.advance(bytes))?;
        side.attach(&self.branches);
        self.verify()?;
        if side.formats.iter().any(|layer| layer.merged) {
            // Ops may prefetch weights before earlier ops, such as merging, have ended.
            be.synchronize()?;
        }
        progress.end();
        self.text = true;
        Ok(())
    }

    /// Loads the transformer, unless it is on the backend, and waits until that is done.
    pub fn load_transformer(&mut self, side: &mut ImageSide, be: &mut dyn Backend, progress: &dyn Progress) -> Result<()> {
        if self.transformer {
            return Ok(());
        }
        if self.options.low_memory {
            self.text = false;
        }
        progress.begin(Phase::Load, self.sizes.transformer);
        let at = self.sizes.image_at(self.options.low_memory);
        (side.transformer, side.formats, _) = self.placement().transformer(be, at, &mut |bytes| progress.advance(bytes))?;
        side.attach(&self.branches);
        self.verify()?;
        be.synchronize()?;
        progress.end();
        self.transformer = true;
        Ok(())
    }

    /// Loads the VAE, unless it is on the backend. The VAE is never quantized, so the one that the dry run placed is kept.
    pub fn load_vae(&mut self, be: &mut dyn Backend) -> Result<()> {
        if self.vae {
            return Ok(());
        }
        self.placement().vae(be, self.sizes.vae_at(self.options.low_memory), &mut |_| ())?;
        self.verify()?;
        self.vae = true;
        self.read_ahead = None;
        Ok(())
    }
}
