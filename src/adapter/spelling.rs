//! Recognizes how trainers spell layer names of adapters.

/// A spelling of layer names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Spelling {
    /// `transformer.transformer_blocks.0.attn.to_q`.
    Diffusers,
    /// `transformer_blocks.0.attn.to_q`.
    DiffusersBare,
    /// `diffusion_model.transformer_blocks.0.attn.to_q`, and names that a converter has cut off at the front.
    DiffusersConverted,
    /// `diffusion_model.double_blocks.0.img_attn.qkv`.
    Bfl,
    /// `double_blocks.0.img_attn.qkv`.
    BflBare,
    /// `base_model.model.` in front of any of these.
    Peft,
    /// `lora_unet_double_blocks_0_img_attn_qkv`.
    Kohya,
    /// `lora_transformer_transformer_blocks_0_attn_to_q`, or `transformer.double_blocks.0.img_attn.qkv.0` for one of the three.
    OneTrainer,
    /// `lycoris_transformer_blocks_0_attn_to_q`.
    Lycoris,
    /// None of these.
    Unknown,
}

impl Spelling {
    /// The spelling of a layer name.
    pub fn of(layer: &str) -> Self {
        let prefixed = |prefixes: &[&str]| prefixes.iter().any(|prefix| layer.starts_with(prefix));
        let has = |words: &[&str]| words.iter().any(|word| layer.contains(word));
        let is_bfl =
            has(&["double_blocks", "single_blocks.", "img_in", "txt_in", "time_in.", "final_layer.", "_modulation_img.lin"]);
        let is_diffusers = has(&["transformer_blocks.", "x_embedder", "context_embedder", "time_guidance_embed.", "norm_out."]);
        match () {
            () if prefixed(&["lora_unet_", "lora_te"]) => Self::Kohya,
            () if prefixed(&["lora_transformer_", "lora_text_encoder_"]) => Self::OneTrainer,
            () if prefixed(&["lycoris_"]) => Self::Lycoris,
            () if prefixed(&["base_model.model."]) => Self::Peft,
            () if prefixed(&["transformer."]) && has(&[".double_blocks.", ".single_blocks."]) => Self::OneTrainer,
            () if prefixed(&["transformer.", "text_encoder."]) => Self::Diffusers,
            () if has(&["sformer_blocks."]) && !has(&["transformer_blocks."]) => Self::DiffusersConverted,
            () if prefixed(&["diffusion_model.", "model.diffusion_model."]) && is_diffusers => Self::DiffusersConverted,
            () if prefixed(&["diffusion_model.", "model.diffusion_model.", "text_encoders."]) => Self::Bfl,
            () if is_diffusers => Self::DiffusersBare,
            () if is_bfl => Self::BflBare,
            () => Self::Unknown,
        }
    }

    /// The display name of the spelling, with programs that use it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Diffusers => "diffusers (diffusers, SimpleTuner)",
            Self::DiffusersBare => "diffusers without a prefix (DiffSynth)",
            Self::DiffusersConverted => "diffusers, converted",
            Self::Bfl => "BFL (ai-toolkit, ComfyUI)",
            Self::BflBare => "BFL without a prefix",
            Self::Peft => "PEFT",
            Self::Kohya => "Kohya (sd-scripts, musubi-tuner)",
            Self::OneTrainer => "OneTrainer",
            Self::Lycoris => "LyCORIS (SimpleTuner, older ai-toolkit)",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_have_names() {
        for (layer, spelling) in [
            ("transformer.transformer_blocks.0.attn.to_q", Spelling::Diffusers),
            ("transformer.single_transformer_blocks.7.attn.to_qkv_mlp_proj", Spelling::Diffusers),
            ("transformer.norm_out.linear", Spelling::Diffusers),
            ("text_encoder.model.layers.3.self_attn.q_proj", Spelling::Diffusers),
            ("transformer_blocks.0.attn.to_v", Spelling::DiffusersBare),
            ("single_transformer_blocks.7.attn.to_out", Spelling::DiffusersBare),
            ("diffusion_model.transformer_blocks.0.attn.to_k", Spelling::DiffusersConverted),
            ("sformer_blocks.0.attn.to_k", Spelling::DiffusersConverted),
            ("diffusion_model.double_blocks.0.img_attn.qkv", Spelling::Bfl),
            ("diffusion_model.double_blocks.0.img_attn_qkv", Spelling::Bfl),
            ("diffusion_model.final_layer.adaLN_modulation.1", Spelling::Bfl),
            ("double_blocks.0.img_attn.qkv", Spelling::BflBare),
            ("single_blocks.0.linear1", Spelling::BflBare),
            ("base_model.model.double_blocks.0.img_attn.qkv", Spelling::Peft),
            ("lora_unet_double_blocks_0_img_attn_qkv", Spelling::Kohya),
            ("lora_te_model_layers_3_mlp_up_proj", Spelling::Kohya),
            ("lora_transformer_transformer_blocks_0_attn_to_q", Spelling::OneTrainer),
            ("transformer.double_blocks.0.img_attn.qkv.1", Spelling::OneTrainer),
            ("transformer.single_blocks.7.linear1.3", Spelling::OneTrainer),
            ("lycoris_transformer_blocks_0_attn_to_q", Spelling::Lycoris),
            ("down_blocks.0.attentions.0", Spelling::Unknown),
        ] {
            assert_eq!(Spelling::of(layer), spelling, "{layer}");
        }
    }
}
