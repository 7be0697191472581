//! Opens the files of a model and checks that they are complete and match each other. No weight is read yet.

use crate::adapter::{Adapters, LayerTargets};
use crate::checkpoint::{ReadAhead, Weights};
use crate::component::{Component, PerComponent};
use crate::config::{
    ConfigFile, Configs, ModelDefaults, TextConfig, TextFamily, TransformerConfig, VaeConfig, Variant, check_fit,
    check_scheduler, display_name,
};
use crate::error::{Error, Result};
use crate::locate::{Embedded, Found, ModelFiles};
use crate::memory;
use crate::names::{LayerRole, Layout, TensorSpec};
use crate::tensor::DType;
use crate::tiny;
use crate::tokenizer::{self, Tokenizer};
use crate::trace;
use std::path::{Path, PathBuf};

impl Configs {
    /// The layers that adapters can change.
    pub fn layer_targets(&self) -> LayerTargets {
        let [transformer, text] = [Component::Transformer, Component::TextEncoder].map(|part| self.manifest(part));
        LayerTargets::new(transformer.iter().chain(&text))
    }
}

/// The files of a model, opened and checked.
pub struct OpenModel {
    pub(super) weights: PerComponent<Weights>,
    pub(super) tokenizer: Tokenizer,
    /// The sizes of the model's parts.
    pub configs: Configs,
    /// How the model was trained.
    pub variant: Variant,
    /// The default size, steps and guidance, and other facts that the tensors do not show.
    pub defaults: ModelDefaults,
    /// The display name.
    pub name: String,
    /// Warnings about the files.
    pub warnings: Vec<String>,
    /// The adapters to load the model with.
    pub adapters: Adapters,
    /// Reads the weights before they are needed, if read-ahead is on.
    pub(super) read_ahead: Option<ReadAhead>,
}

/// The parts of a model, checked.
struct CheckedParts {
    weights: PerComponent<Weights>,
    configs: Configs,
    manifests: PerComponent<Vec<TensorSpec>>,
    warnings: Vec<String>,
}

impl OpenModel {
    /// Opens the model that was found and checks that every tensor exists and has the right shape. `variant` overrides the
    /// variant that the files and their names imply.
    pub fn open(found: &Found, variant: Option<Variant>) -> Result<Self> {
        Self::open_for(found, variant, false)
    }

    /// Opens the model, and starts reading the weights in the background for a backend that will copy them.
    pub fn open_and_read_ahead(found: &Found, variant: Option<Variant>) -> Result<Self> {
        Self::open_for(found, variant, true)
    }

    fn open_for(found: &Found, variant: Option<Variant>, ahead: bool) -> Result<Self> {
        let _span = trace::span("open the model");
        match found {
            Found::Files(files) => Self::files(files, variant, ahead),
            Found::BuiltIn(model) => Self::embedded(*model, variant),
            Found::Tiny => Self::tiny(variant, found.defaults()?),
        }
    }

    fn files(files: &ModelFiles, variant: Option<Variant>, ahead: bool) -> Result<Self> {
        let read = |path: Option<PathBuf>| path.as_deref().map(ConfigFile::read).transpose();
        let parts = || {
            let open = |part| Ok(Weights::open(part, &files.parts[part])?.with_nvfp4_layout(files.nvfp4_layout));
            let weights = PerComponent::try_from_fn(open)?;
            let configs = PerComponent::try_from_fn(|part| read(ModelFiles::config_of(&files.parts[part])))?;
            read(files.scheduler())?.as_ref().map_or(Ok(()), check_scheduler)?;
            let parts = CheckedParts::new(weights, configs.each_ref().map(Option::as_ref), &files.defaults)?;
            let read_ahead = ahead.then(|| parts.read_ahead()).transpose()?.flatten();
            Ok((parts, read_ahead))
        };
        let tokenizer = || match &files.tokenizer {
            Some(path) => Tokenizer::open(path),
            None => Tokenizer::qwen3(),
        };
        // The two are independent, and parsing a vocabulary takes as long as starting a driver.
        let (parts, tokenizer) = rayon::join(parts, tokenizer);
        let ((parts, read_ahead), mut tokenizer) = (parts?, tokenizer?);
        if parts.configs.text_encoder.family == TextFamily::Mistral3 && files.tokenizer.is_none() {
            tokenizer = parts.mistral_tokenizer()?;
        }
        let variant = match variant.or(files.defaults.variant) {
            Some(variant) => variant,
            None => {
                let file = files.parts.transformer.file_name().unwrap_or_default().to_string_lossy();
                Variant::detect(&parts.configs.transformer, read(files.index.clone())?.as_ref(), &[&file, &files.origin])?
            }
        };
        Ok(Self { read_ahead, ..Self::of_parts(parts, tokenizer, variant, files.defaults.clone())? })
    }

    fn embedded(model: Embedded, variant: Option<Variant>) -> Result<Self> {
        let folders = PerComponent { transformer: "transformer", text_encoder: "text_encoder", vae: "vae" };
        let weights = PerComponent::try_from_fn(|part| {
            let stem = if part == Component::TextEncoder { "model" } else { "diffusion_pytorch_model" };
            model.weights(part, &format!("{}/{stem}.safetensors", folders[part]))
        })?;
        let configs = PerComponent::try_from_fn(|part| model.config(&format!("{}/config.json", folders[part])))?;
        let defaults = model.defaults()?;
        let parts = CheckedParts::new(weights, configs.each_ref().map(Some), &defaults)?;
        let variant = match variant.or(defaults.variant) {
            Some(variant) => variant,
            None => Variant::detect(&parts.configs.transformer, Some(&model.config("model_index.json")?), &[])?,
        };
        Self::of_parts(parts, model.tokenizer()?, variant, defaults)
    }

    fn tiny(variant: Option<Variant>, defaults: ModelDefaults) -> Result<Self> {
        let model = tiny::model(Layout::Diffusers, DType::Bf16)?;
        let tokenizer = Tokenizer::from_json(tiny::TOKENIZER, Path::new("built-in tokenizer"))?;
        let weights = PerComponent::try_from_fn(|part| model.weights(part))?;
        let variant = variant.unwrap_or(Variant::Distilled);
        let mut model = Self::check(weights, PerComponent::default(), tokenizer, variant, defaults)?;
        model.name = "tiny random model (built in, not trained)".into();
        Ok(model)
    }

    /// Checks that the parts are complete and match each other. `files` are their `config.json` files, if they have any.
    pub fn check(
        weights: PerComponent<Weights>,
        files: PerComponent<Option<&ConfigFile>>,
        tokenizer: Tokenizer,
        variant: Variant,
        defaults: ModelDefaults,
    ) -> Result<Self> {
        Self::of_parts(CheckedParts::new(weights, files, &defaults)?, tokenizer, variant, defaults)
    }

    fn of_parts(parts: CheckedParts, tokenizer: Tokenizer, variant: Variant, defaults: ModelDefaults) -> Result<Self> {
        let CheckedParts { weights, configs, warnings, .. } = parts;
        variant.check(&configs.transformer)?;
        let (own, needed) = (tokenizer.format().family, configs.text_encoder.family.spec().name);
        if own != needed {
            let detail = format!("it is one of {own}, the text encoder is {needed}");
            return Err(Error::Mismatch { part: "tokenizer", detail, hint: Some(tokenizer::HINT.into()) });
        }
        let name = defaults.name.clone().unwrap_or_else(|| display_name(&configs.transformer, variant));
        let adapters = Adapters::default();
        Ok(Self { weights, tokenizer, configs, variant, defaults, name, warnings, adapters, read_ahead: None })
    }

    /// The weights of the model's parts.
    pub fn weights(&self) -> &PerComponent<Weights> {
        &self.weights
    }

    /// The layers that adapters can change.
    pub fn layer_targets(&self) -> LayerTargets {
        self.configs.layer_targets()
    }

    /// The files in use, for display.
    pub fn files_in_use(&self) -> PerComponent<String> {
        self.weights.each_ref().map(Weights::source)
    }

    /// Fails if one of the files has changed since it was opened.
    pub fn verify(&self) -> Result<()> {
        self.weights.values().try_for_each(Weights::verify)
    }
}

impl CheckedParts {
    /// Checks that the parts are complete and match each other.
    fn new(weights: PerComponent<Weights>, files: PerComponent<Option<&ConfigFile>>, defaults: &ModelDefaults) -> Result<Self> {
        let _span = trace::span("check tensors");
        let mut configs = Configs {
            transformer: TransformerConfig::detect(&weights.transformer, files.transformer)?,
            text_encoder: TextConfig::detect(&weights.text_encoder, files.text_encoder, defaults)?,
            vae: VaeConfig::detect(&weights.vae, files.vae)?,
        };
        if let Some(own) = &defaults.preview {
            configs.vae.preview = Some(own.clone());
        }
        check_fit(&configs.transformer, &configs.text_encoder)?;
        let (channels, patched) = (configs.transformer.channels, configs.vae.patched());
        if patched != channels {
            let detail = format!("image tokens have {channels} channels there and {patched} here");
            return Err(Error::Mismatch { part: "VAE", detail, hint: None });
        }
        let manifests = PerComponent::from_fn(|part| configs.manifest(part));
        let mut warnings = Vec::new();
        for (part, weights) in weights.iter() {
            let extra = weights.check(&manifests[part])?;
            if let Some(first) = extra.first() {
                let more = if extra.len() > 1 { format!(" and {} more", extra.len() - 1) } else { String::new() };
                warnings.push(format!("{}: unknown tensor `{first}`{more}, ignored", weights.path().display()));
            }
        }
        Ok(Self { weights, configs, manifests, warnings })
    }

    /// The tokenizer of Mistral's text encoder, whose file may contain its vocabulary. That vocabulary has to match the built-in one.
    fn mistral_tokenizer(&self) -> Result<Tokenizer> {
        let weights = &self.weights.text_encoder;
        match weights.vocabulary() {
            Some(json) => Tokenizer::from_tekken(&json, weights.path()),
            None => Tokenizer::mistral(),
        }
    }

    /// Starts to read the weights in loading order. If memory is short, it does not: the first weights would be dropped again
    /// before they are needed.
    fn read_ahead(&self) -> Result<Option<ReadAhead>> {
        let mut all = Vec::new();
        for part in [Component::TextEncoder, Component::Transformer, Component::Vae] {
            // A prompt needs only a few rows of the token embeddings.
            for spec in self.manifests[part].iter().filter(|spec| spec.layer != Some(LayerRole::TokenTable.only())) {
                all.extend(self.weights[part].weight(spec)?.parts.into_iter().map(|part| part.bytes));
            }
        }
        let total: u64 = all.iter().map(|bytes| bytes.len() as u64).sum();
        let fits = memory::available().is_none_or(|free| total <= free / 2);
        Ok(fits.then(|| ReadAhead::start(all)))
    }
}
