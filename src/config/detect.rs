//! Detects configurations from tensor shapes, and compares them with a `config.json`.

use super::{
    ConfigFile, Configs, HEAD_DIM, ModelDefaults, SIZES, TextConfig, TextFamily, TransformerConfig, VaeConfig, supported,
    supported_encoders,
};
use crate::checkpoint::Weights;
use crate::error::{Error, Result};
use crate::names::{LayerId, LayerRole, block_index, spell};
use std::collections::BTreeSet;

/// The largest accepted dimension. It keeps products of a few dimensions from overflowing.
const MAX_SIZE: usize = 1 << 20;

/// Channels of the sinusoidal timestep embedding.
const TIME_CHANNELS: usize = 256;

impl TransformerConfig {
    /// Reads the sizes from the tensors, and the rest from `config` if there is one.
    pub fn detect(weights: &Weights, config: Option<&ConfigFile>) -> Result<Self> {
        let modulations = [LayerRole::ImageModulation, LayerRole::TextModulation, LayerRole::SingleModulation];
        let extent = |role: LayerRole, dim: usize| weights.shape(&role.only().canonical())?.get(dim).copied();
        let foreign = |detail: String| {
            Error::bad_file(weights.path(), "not a FLUX.2 transformer", detail).with_hint(format!("kiln runs {}", supported()))
        };
        // FLUX.2 shares modulations between all blocks. In FLUX.1 each block has its own.
        if modulations.iter().all(|role| weights.shape(&role.only().canonical()).is_none()) {
            let name = spell(weights.component(), weights.layout(), &modulations[0].only().canonical()).concat();
            return Err(foreign(format!("it has no `{name}`")));
        }
        // The width is a majority over several tensors, so that a single one with a wrong shape is reported by its name later.
        let votes = [(LayerRole::ImageIn, 0), (LayerRole::TextIn, 0), (LayerRole::ImageOut, 1)];
        let votes = votes.into_iter().chain(modulations.map(|role| (role, 1)));
        let hidden = majority(votes.filter_map(|(role, dim)| extent(role, dim)));
        let hidden = size(weights, "width", hidden)?;
        if !hidden.is_multiple_of(HEAD_DIM) {
            return Err(foreign(format!("its width {hidden} is not a multiple of {HEAD_DIM}")));
        }
        // Only one tensor shows the text width. If it is missing, kiln assumes the text width of a known model, and the check of all
        // tensors then reports the missing one.
        let mut known = SIZES.iter().map(|size| &size.configs.transformer);
        let expected = known.find(|known| known.hidden == hidden).map(|known| known.context);
        let context = extent(LayerRole::TextIn, 1).or(expected);
        let context = size(weights, "text width", context)?;

        let blocks = ["double_blocks.", "single_blocks."].map(|kind| count(weights, kind));
        let mut found = Self::sized(hidden, blocks, context);
        found.guidance_embed = weights.names().any(|name| name.starts_with("guidance_in."));
        if let Some(config) = config {
            found.compare(config)?;
        }
        Ok(found)
    }

    fn compare(&mut self, config: &ConfigFile) -> Result<()> {
        config.require_text("_class_name", "Flux2Transformer2DModel")?;
        check_quantization(config)?;
        config.require("in_channels", self.channels)?;
        config.require("out_channels", self.channels)?;
        config.require("timestep_guidance_channels", TIME_CHANNELS)?;
        config.expect("num_layers", self.double_blocks)?;
        config.expect("num_single_layers", self.single_blocks)?;
        config.require("attention_head_dim", HEAD_DIM)?;
        config.expect("num_attention_heads", self.heads)?;
        config.expect("joint_attention_dim", self.context)?;
        config.require("patch_size", 1)?;
        if config.positive("mlp_ratio")?.is_some_and(|ratio| ratio != 3.0) {
            return Err(config.unsupported("mlp_ratio", "3.0"));
        }
        // A configuration without the key has a guidance embedding.
        let guidance = config.flag("guidance_embeds")?.unwrap_or(true);
        if guidance != self.guidance_embed {
            return Err(config.mismatch("guidance_embeds", &guidance, &self.guidance_embed));
        }
        if let Some(axes) = config.list::<4>("axes_dims_rope")? {
            let total = axes.iter().try_fold(0usize, |sum, &axis| sum.checked_add(axis));
            if total != Some(HEAD_DIM) || axes.iter().any(|axis| axis % 2 != 0) {
                return Err(config.unsupported("axes_dims_rope", "four even numbers with sum 128"));
            }
            self.rope_axes = axes;
        }
        self.rope_theta = config.rope_base("rope_theta")?.unwrap_or(self.rope_theta);
        self.eps = config.small("eps")?.unwrap_or(self.eps);
        Ok(())
    }
}

impl TextConfig {
    /// Reads the sizes from the tensors, and the rest from `config` if there is one. `defaults` decides the text layers and the length of
    /// a padded prompt.
    pub fn detect(weights: &Weights, config: Option<&ConfigFile>, defaults: &ModelDefaults) -> Result<Self> {
        let foreign = |detail: String| {
            let error = Error::bad_file(weights.path(), "not a text encoder of FLUX.2", detail);
            error.with_hint(supported_encoders())
        };
        let known = || SIZES.iter().map(|size| &size.configs.text_encoder).chain([&Configs::TINY_DEV.text_encoder]);
        // A size is a majority over all layers, so that a missing or misshapen tensor is reported by its name later.
        let extent = |layer: LayerId, dim: usize| weights.shape(&layer.canonical())?.get(dim).copied();
        let deepest = known().map(|known| known.layers).max().unwrap_or_default();
        let layer = |role: LayerRole, dim: usize| majority((0..deepest).filter_map(|n| extent(role.of_block(n), dim)));
        // A vision-language model's configuration contains its language model's.
        let inner = config.map(|config| config.inner("text_config")).transpose()?.flatten();
        let text = inner.as_ref().or(config);
        let kind = config.map(|config| config.text("model_type")).transpose()?.flatten();
        let own_kind = text.map(|config| config.text("model_type")).transpose()?.flatten();
        let says = |kind: &str| format!("its configuration says `{kind}`");
        // Without query and key norms, only the configuration or the width shows that a model is not an encoder of FLUX.2.
        let width = layer(LayerRole::EncoderInputNorm, 0);
        let family = match layer(LayerRole::EncoderQueryNorm, 0) {
            Some(_) => TextFamily::Qwen3,
            None if kind.is_some_and(|kind| TextFamily::Mistral3.spec().model_types.contains(&kind)) => TextFamily::Mistral3,
            None if kind.is_none() && known().any(|own| own.family == TextFamily::Mistral3 && Some(own.hidden) == width) => {
                TextFamily::Mistral3
            }
            None => {
                let missing = format!("it has no `{}`", LayerRole::EncoderQueryNorm.of_block(0));
                return Err(foreign(kind.filter(|kind| *kind != "qwen3").map_or(missing, says)));
            }
        };
        if let Some(kind) = [kind, own_kind].into_iter().flatten().find(|kind| !family.spec().model_types.contains(kind)) {
            return Err(foreign(says(kind)));
        }
        // A model with another output head, or with none, has the same encoder layers.
        let list = |config: &ConfigFile| config.take("architectures", "a list of classes", |list| list.as_array().cloned());
        let classes = config.map(list).transpose()?.flatten();
        let is_known = |class: &serde_json::Value| class.as_str().is_some_and(|class| family.spec().classes.contains(&class));
        if let Some(class) = classes.into_iter().flatten().find(|class| !is_known(class)) {
            return Err(foreign(format!("its configuration says {class}")));
        }
        let embedding = |dim: usize| extent(LayerRole::TokenTable.only(), dim);
        let votes = [embedding(1), layer(LayerRole::EncoderDown, 0), layer(LayerRole::EncoderInputNorm, 0)];
        let hidden = size(weights, "width", majority(votes.into_iter().flatten()))?;
        // Only the embedding shows the vocabulary size. A configuration confirms it. Without one, encoders of a known width have a known
        // vocabulary, and an embedding of another size is reported as wrong.
        let is_known = |known: &&Self| config.is_none() && known.hidden == hidden && known.family == family;
        let expected = known().find(is_known).map(|known| known.vocab);
        let vocab = size(weights, "vocabulary", expected.or(embedding(0)))?;
        let intermediate = size(weights, "MLP width", layer(LayerRole::EncoderDown, 1))?;
        let query = size(weights, "query width", layer(LayerRole::EncoderOut, 1))?;
        let stacked = size(weights, "attention width", layer(LayerRole::EncoderQkv, 0))?;
        let (heads, kv_heads) = (query / HEAD_DIM, stacked.saturating_sub(query) / (2 * HEAD_DIM));
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let detail = format!("its attention has {heads} heads over {kv_heads} key heads of {HEAD_DIM}");
            return Err(foreign(format!("{detail}; query heads have to be a multiple of key heads")));
        }
        let layers = count(weights, "model.layers.");
        let mut found = Self::sized(family, hidden, layers, [heads, kv_heads], intermediate, vocab);
        found.text_layers = defaults.text_layers.unwrap_or(family.spec().text_layers);
        found.max_tokens = defaults.max_text_tokens;
        let whole = text.map(|config| config.whole("num_hidden_layers")).transpose()?.flatten();
        defaults.check_depth(found.layers, whole)?;
        if let Some(config) = text {
            found.compare(config)?;
        }
        Ok(found)
    }

    fn compare(&mut self, config: &ConfigFile) -> Result<()> {
        config.expect("hidden_size", self.hidden)?;
        config.expect("num_attention_heads", self.heads)?;
        config.expect("num_key_value_heads", self.kv_heads)?;
        config.require("head_dim", HEAD_DIM)?;
        config.expect("intermediate_size", self.intermediate)?;
        config.expect("vocab_size", self.vocab)?;
        // Files cut down to the layers in use keep the whole encoder's configuration.
        if let Some(layers) = config.whole("num_hidden_layers")?.filter(|layers| *layers < self.layers) {
            return Err(config.mismatch("num_hidden_layers", &layers, &self.layers));
        }
        config.require_text("hidden_act", "silu")?;
        config.require_flag("attention_bias", false)?;
        // The window size itself is not checked, because it has no effect if no layer uses a window.
        config.require_flag("use_sliding_window", false)?;
        // Mistral's configuration has no such switch.
        let window = config.whole("sliding_window")?.filter(|_| self.family == TextFamily::Mistral3);
        if window.is_some_and(|window| window < self.max_tokens) {
            return Err(config.unsupported("sliding_window", "null"));
        }
        config.require_all("layer_types", "full_attention")?;
        check_quantization(config)?;
        config.require_none("rope_scaling")?;
        if config.positive("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(config.unsupported("partial_rotary_factor", "1.0"));
        }
        // Older files have RoPE's base at the top level, newer ones in `rope_parameters`.
        let rope = config.inner("rope_parameters")?;
        if rope.as_ref().is_some_and(|rope| !is_plain_rope(rope)) {
            return Err(config.unsupported("rope_parameters", "a rotation of type `default`"));
        }
        let nested = rope.map(|rope| rope.rope_base("rope_theta")).transpose()?.flatten();
        let top = config.rope_base("rope_theta")?;
        if let (Some(top), Some(nested)) = (top, nested)
            && top != nested
        {
            return Err(config.unsupported("rope_theta", &format!("{nested:?}, as in `rope_parameters`")));
        }
        self.rope_theta = top.or(nested).unwrap_or(self.rope_theta);
        self.eps = config.small("rms_norm_eps")?.unwrap_or(self.eps);
        Ok(())
    }
}

impl VaeConfig {
    /// Reads the sizes from the tensors, and the rest from `config` if there is one.
    pub fn detect(weights: &Weights, config: Option<&ConfigFile>) -> Result<Self> {
        // All convolutions of a level share one number of output channels. It is a majority over them, so that a single wrong one is
        // reported by its name later.
        let channels = |stem: &str| {
            let blocks = (0..3).flat_map(|block| [1, 2].map(|conv| format!("{stem}.resnets.{block}.conv{conv}.weight")));
            let votes = blocks.filter_map(|name| weights.shape(&name)?.first().copied());
            size(weights, &format!("width in `{stem}`"), majority(votes))
        };
        let (mut encoder, mut decoder) = ([0; 4], [0; 4]);
        for level in 0..4 {
            encoder[level] = channels(&format!("encoder.down_blocks.{level}"))?;
            decoder[3 - level] = channels(&format!("decoder.up_blocks.{level}"))?;
        }
        let mut found = Self::sized(encoder, decoder);
        if let Some(odd) = encoder.iter().chain(&decoder).find(|width| !width.is_multiple_of(found.groups)) {
            let detail = format!("{odd} channels do not form {} groups", found.groups);
            return Err(Error::bad_file(weights.path(), "not a FLUX.2 autoencoder", detail));
        }
        if let Some(config) = config {
            found.compare(config)?;
        }
        Ok(found)
    }

    fn compare(&mut self, config: &ConfigFile) -> Result<()> {
        config.require_text("_class_name", "AutoencoderKLFlux2")?;
        config.require_text("act_fn", "silu")?;
        config.require("in_channels", 3)?;
        config.require("out_channels", 3)?;
        for switch in ["mid_block_add_attention", "use_quant_conv", "use_post_quant_conv"] {
            config.require_flag(switch, true)?;
        }
        config.require_all("down_block_types", "DownEncoderBlock2D")?;
        config.require_all("up_block_types", "UpDecoderBlock2D")?;
        if config.list::<2>("patch_size")?.is_some_and(|patch| patch != [2, 2]) {
            return Err(config.unsupported("patch_size", "[2,2]"));
        }
        config.require("latent_channels", self.latent)?;
        config.require("norm_num_groups", self.groups)?;
        config.require("layers_per_block", 2)?;
        let both = config.list::<4>("block_out_channels")?;
        if let Some(encoder) = both.filter(|encoder| *encoder != self.encoder) {
            return Err(config.mismatch("block_out_channels", &encoder, &self.encoder));
        }
        let own = config.list::<4>("decoder_block_out_channels")?;
        if let Some(decoder) = own.or(both).filter(|decoder| *decoder != self.decoder) {
            let key = if own.is_some() { "decoder_block_out_channels" } else { "block_out_channels" };
            return Err(config.mismatch(key, &decoder, &self.decoder));
        }
        self.stats_eps = config.small("batch_norm_eps")?.unwrap_or(self.stats_eps);
        self.tile = config.tile("sample_size")?.unwrap_or(self.tile);
        Ok(())
    }
}

/// Whether RoPE parameters describe plain RoPE over all channels, with no setting other than the base.
fn is_plain_rope(rope: &ConfigFile) -> bool {
    rope.keys().filter_map(|key| Some((key, rope.get(key)?))).all(|(key, value)| match key {
        // Older files call this key `type`.
        "rope_type" | "type" => value.as_str() == Some("default"),
        "partial_rotary_factor" => value.as_f64() == Some(1.0),
        "rope_theta" => true,
        _ => false,
    })
}

/// Fails if a scheduler's configuration describes a schedule other than klein's, which depends on the number of steps and the image size.
/// Settings that this schedule does not use, such as a constant shift, may have any value.
pub fn check_scheduler(config: &ConfigFile) -> Result<()> {
    config.require_text("_class_name", "FlowMatchEulerDiscreteScheduler")?;
    config.require("num_train_timesteps", 1000)?;
    config.require_flag("use_dynamic_shifting", true)?;
    config.require_text("time_shift_type", "exponential")?;
    config.require_none("shift_terminal")?;
    for switch in ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas", "stochastic_sampling"] {
        config.require_flag(switch, false)?;
    }
    Ok(())
}

/// Fails if the configuration describes a quantized model. ModelOpt's are allowed: their tensors say all that is needed.
fn check_quantization(config: &ConfigFile) -> Result<()> {
    let key = "quantization_config";
    match config.inner(key)? {
        Some(settings) if settings.text("quant_method")? != Some("modelopt") => {
            Err(config.unsupported(key, "none, or ModelOpt's"))
        }
        _ => Ok(()),
    }
}

/// Checks that a dimension was found and is within bounds.
fn size(weights: &Weights, what: &str, found: Option<usize>) -> Result<usize> {
    let detail = match found {
        Some(size) if (1..=MAX_SIZE).contains(&size) => return Ok(size),
        Some(size) => format!("its {what} is {size}"),
        None => format!("the tensors that show its {what} are missing"),
    };
    let error = Error::bad_file(weights.path(), "unknown architecture", format!("{}: {detail}", weights.component()));
    Err(error.with_hint(format!("this is no {} of FLUX.2 [klein]", weights.component())))
}

/// The most frequent value; the first one in a tie.
fn majority(votes: impl Iterator<Item = usize>) -> Option<usize> {
    let votes: Vec<usize> = votes.collect();
    let count = |value: usize| votes.iter().filter(|vote| **vote == value).count();
    votes.iter().copied().rev().max_by_key(|vote| count(*vote))
}

/// The number of blocks. A gap in the block numbers is reported later as a missing tensor.
fn count(weights: &Weights, prefix: &str) -> usize {
    weights.names().filter_map(|name| block_index(name, prefix)).collect::<BTreeSet<_>>().len()
}
