//! A model's weights on a backend. They have two sides: what reads the prompt, which is needed first, and what makes the picture.
//! The second is brought over after the prompt's ops were issued, and so while a GPU runs them. Where memory is short it takes the
//! place of the first, which then has to come back for the next prompt.

use super::{Configs, LoadOptions};
use crate::backend::{Backend, Plan};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::model::{ContextIn, Loader, TextEncoder, Transformer, Vae};
use crate::progress::{Phase, Progress};
use crate::tensor::{Arena, Region};
use std::sync::Arc;

/// Where weights go and what they come from: transformer, text encoder and VAE, or only their shapes.
pub struct Placing<'a> {
    pub configs: &'a Configs,
    pub sources: [Option<&'a Weights>; 3],
    pub options: LoadOptions,
    /// Whether the backend gets the weights, or is only told of their shapes.
    pub real: bool,
}

/// What reads prompts.
pub type TextSide = (TextEncoder, ContextIn);
/// What makes pictures.
pub type ImageSide = (Transformer, Vae);

/// Bytes of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub text: u64,
    pub image: u64,
}

impl Sizes {
    /// Bytes of both, beside each other or in one place.
    pub fn total(self, shared: bool) -> u64 {
        if shared { self.text.max(self.image) } else { self.text + self.image }
    }

    /// Where the image side begins.
    fn image_at(self, shared: bool) -> u64 {
        if shared { 0 } else { self.text }
    }
}

impl Placing<'_> {
    /// Places both sides where they cost nothing. Also returns what they take, and what of that even a backend that reads files
    /// has to copy.
    pub fn both(&self) -> Result<(TextSide, ImageSide, Sizes, Sizes)> {
        let mut plan = Plan::new();
        let (text, text_bytes) = self.text(&mut plan, &mut |_| ())?;
        let (sizes, copied) = (Sizes { text: text_bytes, image: 0 }, Sizes { text: plan.copied_bytes, image: 0 });
        let (image, image_bytes) = self.image(&mut plan, sizes.image_at(self.options.low_memory), &mut |_| ())?;
        let copied = Sizes { image: plan.copied_bytes - copied.text, ..copied };
        Ok((text, image, Sizes { image: image_bytes, ..sizes }, copied))
    }

    /// Places what reads prompts; `loaded` is told the bytes of each weight. Also returns how many bytes all take.
    fn text(&self, be: &mut dyn Backend, loaded: &mut dyn FnMut(u64)) -> Result<(TextSide, u64)> {
        let ((c, t, _), [transformer, text, _]) = (self.configs, self.sources);
        let (mut region, precision) = (Arena::new(Region::Weights), self.options.precision);
        let text = TextEncoder::load(&mut Loader::new(be, &mut region, text, precision, loaded).wary(self.real), t)?;
        let context = ContextIn::load(&mut Loader::new(be, &mut region, transformer, precision, loaded).wary(self.real), c)?;
        Ok(((text, context), region.peak()))
    }

    /// Places what makes pictures from byte `at` on, likewise.
    fn image(&self, be: &mut dyn Backend, at: u64, loaded: &mut dyn FnMut(u64)) -> Result<(ImageSide, u64)> {
        let ((c, _, v), [transformer, _, vae]) = (self.configs, self.sources);
        let (mut region, LoadOptions { precision, references, .. }) = (Arena::starting_at(Region::Weights, at), self.options);
        let transformer = Loader::new(be, &mut region, transformer, precision, loaded);
        let transformer = Transformer::load(&mut transformer.wary(self.real), c)?;
        let vae = Loader::new(be, &mut region, vae, precision, loaded);
        let vae = Vae::load(&mut vae.wary(self.real), v, references)?;
        Ok(((transformer, vae), region.peak() - at))
    }
}

/// A model's files, and which of their weights are on the backend.
pub struct Store {
    /// Transformer, text encoder, VAE.
    pub files: Arc<[Weights; 3]>,
    pub configs: Configs,
    pub options: LoadOptions,
    pub sizes: Sizes,
    /// Whether all of a side is there.
    pub text: bool,
    pub image: bool,
}

impl Store {
    fn placing(&self) -> Placing<'_> {
        Placing { configs: &self.configs, sources: self.files.each_ref().map(Some), options: self.options, real: true }
    }

    /// Fails if a file changed since it was opened.
    pub fn verify(&self) -> Result<()> {
        self.files.iter().try_for_each(Weights::verify)
    }

    /// Brings what reads prompts to the backend, if it is not there.
    pub fn bring_text(&mut self, be: &mut dyn Backend, progress: &dyn Progress) -> Result<()> {
        if self.text {
            return Ok(());
        }
        if self.image && self.options.low_memory {
            progress.warn("to save memory, the text encoder is loaded again for every prompt");
            self.image = false;
        }
        progress.begin(Phase::Load, self.sizes.text);
        self.placing().text(be, &mut |bytes| progress.advance(bytes))?;
        self.verify()?;
        progress.end();
        self.text = true;
        Ok(())
    }

    /// Brings what makes pictures to the backend, if it is not there, and waits for it.
    pub fn bring_image(&mut self, be: &mut dyn Backend, progress: &dyn Progress) -> Result<()> {
        if self.image {
            return Ok(());
        }
        if self.options.low_memory {
            self.text = false;
        }
        progress.begin(Phase::Load, self.sizes.image);
        let at = self.sizes.image_at(self.options.low_memory);
        self.placing().image(be, at, &mut |bytes| progress.advance(bytes))?;
        self.verify()?;
        be.synchronize()?;
        progress.end();
        self.image = true;
        Ok(())
    }
}
