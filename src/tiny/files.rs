//! Writes the tiny model to a folder in the layouts of real models.

use super::{TOKENIZER, TinyModel, model};
use crate::config::{Configs, HEAD_DIM, TextConfig, TransformerConfig, VaeConfig};
use crate::error::{Error, Result};
use crate::names::Layout;
use crate::output::save_folder;
use crate::tensor::{Bytes, DType};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes a complete model or nothing: a diffusers folder, or single files in the original layout. Returns
/// [`Error::Interrupted`] once `stop` is set.
pub fn write_to(folder: &Path, layout: Layout, dtype: DType, stop: &AtomicBool) -> Result<()> {
    let check = || if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) };
    let files = contents(layout, dtype)?;
    save_folder(folder, |folder| {
        files.iter().try_for_each(|(name, bytes)| check().and_then(|()| write(folder, name, bytes)))?;
        check()
    })
}

/// The files of the model's folder, by path.
pub fn contents(layout: Layout, dtype: DType) -> Result<Vec<(&'static str, Bytes)>> {
    let TinyModel { transformer, text_encoder, vae: decoder } = model(layout, dtype)?;
    let tokenizer = Bytes::new(Arc::new(TOKENIZER));
    if layout == Layout::Bfl {
        return Ok(vec![
            ("flux-2-klein-tiny.safetensors", transformer),
            ("qwen.safetensors", text_encoder),
            ("ae.safetensors", decoder),
            ("tokenizer.json", tokenizer),
        ]);
    }
    let mut files = vec![
        ("transformer/diffusion_pytorch_model.safetensors", transformer),
        ("text_encoder/model.safetensors", text_encoder),
        ("vae/diffusion_pytorch_model.safetensors", decoder),
        ("tokenizer/tokenizer.json", tokenizer),
    ];
    for (name, value) in [
        ("model_index.json", index()),
        ("transformer/config.json", transformer_config(&Configs::TINY.transformer)),
        ("text_encoder/config.json", text_encoder_config(&Configs::TINY.text_encoder, dtype)),
        ("vae/config.json", vae(&Configs::TINY.vae)),
        ("scheduler/scheduler_config.json", scheduler()),
    ] {
        files.push((name, Bytes::new(Arc::new(format!("{value:#}\n").into_bytes()))));
    }
    Ok(files)
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = folder.join(name);
    let parent = path.parent().unwrap_or(folder);
    std::fs::create_dir_all(parent)
        .and_then(|()| std::fs::write(&path, bytes))
        .map_err(|source| Error::Write { path: path.clone(), source })
}

fn index() -> Value {
    json!({
        "_class_name": "Flux2KleinPipeline",
        "is_distilled": true,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    })
}

// Epsilons are literals, because the configuration's f32, converted to the file's double, would not be exactly 1e-6.
fn transformer_config(config: &TransformerConfig) -> Value {
    json!({
        "_class_name": "Flux2Transformer2DModel",
        "attention_head_dim": HEAD_DIM,
        "axes_dims_rope": config.rope_axes,
        "eps": 1e-6,
        "guidance_embeds": config.guidance_embed,
        "in_channels": config.channels,
        "joint_attention_dim": config.context,
        "mlp_ratio": 3.0,
        "num_attention_heads": config.heads,
        "num_layers": config.double_blocks,
        "num_single_layers": config.single_blocks,
        "out_channels": null,
        "patch_size": 1,
        "rope_theta": config.rope_theta as u64,
        "timestep_guidance_channels": 256,
    })
}

fn text_encoder_config(config: &TextConfig, dtype: DType) -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": false,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": config.rope_theta as u64,
        "tie_word_embeddings": true,
        "torch_dtype": match dtype { DType::Bf16 => "bfloat16", DType::F16 => "float16", _ => "float32" },
        "vocab_size": config.vocab,
    })
}

fn vae(config: &VaeConfig) -> Value {
    json!({
        "_class_name": "AutoencoderKLFlux2",
        "act_fn": "silu",
        "batch_norm_eps": 1e-4,
        "block_out_channels": config.encoder,
        "down_block_types": vec!["DownEncoderBlock2D"; 4],
        "force_upcast": true,
        "in_channels": 3,
        "latent_channels": config.latent,
        "layers_per_block": 2,
        "mid_block_add_attention": true,
        "norm_num_groups": config.groups,
        "out_channels": 3,
        "patch_size": [2, 2],
        "up_block_types": vec!["UpDecoderBlock2D"; 4],
        "use_post_quant_conv": true,
        "use_quant_conv": true,
    })
}

fn scheduler() -> Value {
    json!({
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "time_shift_type": "exponential",
        "use_dynamic_shifting": true,
    })
}
