//! Manifests: every tensor a model of a given configuration has, with its shape.

use crate::config::{HEAD_DIM, TextConfig, TransformerConfig, VaeConfig};

/// Width of the sinusoidal embedding of a time.
const SINUSOID: usize = 256;
/// Channels of a pixel.
const RGB: usize = 3;

/// One tensor that a model needs, under its canonical name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Canonical name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Rows of the matrices that are stacked in it, and that another layout may store apart. One entry if it is a single one.
    pub stack: Vec<usize>,
}

impl TensorSpec {
    /// A tensor that is a single matrix, vector or kernel.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), stack: shape.iter().take(1).copied().collect() }
    }

    /// A matrix of `stack` times rows of `columns` elements.
    fn stacked(name: String, stack: &[usize], columns: usize) -> Self {
        Self { name, shape: vec![stack.iter().sum(), columns], stack: stack.to_vec() }
    }
}

/// The transformer's tensors.
pub fn transformer_manifest(config: &TransformerConfig) -> Vec<TensorSpec> {
    let (h, mlp) = (config.hidden, config.mlp());
    let one = TensorSpec::new;
    let mut list = vec![
        one("img_in.weight", &[h, config.channels]),
        one("txt_in.weight", &[h, config.context]),
        one("time_in.in_layer.weight", &[h, SINUSOID]),
        one("time_in.out_layer.weight", &[h, h]),
        one("double_stream_modulation_img.lin.weight", &[6 * h, h]),
        one("double_stream_modulation_txt.lin.weight", &[6 * h, h]),
        one("single_stream_modulation.lin.weight", &[3 * h, h]),
        one("final_layer.adaLN_modulation.1.weight", &[2 * h, h]),
        one("final_layer.linear.weight", &[config.channels, h]),
    ];
    if config.guidance_embed {
        list.push(one("guidance_in.in_layer.weight", &[h, SINUSOID]));
        list.push(one("guidance_in.out_layer.weight", &[h, h]));
    }
    for block in 0..config.double_blocks {
        for stream in ["img", "txt"] {
            let name = |rest: &str| format!("double_blocks.{block}.{stream}_{rest}");
            list.push(TensorSpec::stacked(name("attn.qkv.weight"), &[h; 3], h));
            list.push(TensorSpec::new(name("attn.norm.query_norm.scale"), &[HEAD_DIM]));
            list.push(TensorSpec::new(name("attn.norm.key_norm.scale"), &[HEAD_DIM]));
            list.push(TensorSpec::new(name("attn.proj.weight"), &[h, h]));
            list.push(TensorSpec::new(name("mlp.0.weight"), &[2 * mlp, h]));
            list.push(TensorSpec::new(name("mlp.2.weight"), &[h, mlp]));
        }
    }
    for block in 0..config.single_blocks {
        let name = |rest: &str| format!("single_blocks.{block}.{rest}");
        list.push(TensorSpec::new(name("linear1.weight"), &[3 * h + 2 * mlp, h]));
        list.push(TensorSpec::new(name("linear2.weight"), &[h, h + mlp]));
        list.push(TensorSpec::new(name("norm.query_norm.scale"), &[HEAD_DIM]));
        list.push(TensorSpec::new(name("norm.key_norm.scale"), &[HEAD_DIM]));
    }
    list
}

/// The text encoder's tensors, up to the last layer that is read.
pub fn text_manifest(config: &TextConfig) -> Vec<TensorSpec> {
    text_layers(config, config.used_layers())
}

/// The text encoder's tensors up to a given number of layers.
pub(crate) fn text_layers(config: &TextConfig, layers: usize) -> Vec<TensorSpec> {
    let (h, mlp) = (config.hidden, config.intermediate);
    let (q, kv) = (config.heads * HEAD_DIM, config.kv_heads * HEAD_DIM);
    let mut list = vec![TensorSpec::new("model.embed_tokens.weight", &[config.vocab, h])];
    for layer in 0..layers {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        list.push(TensorSpec::new(name("input_layernorm"), &[h]));
        list.push(TensorSpec::stacked(name("self_attn.qkv_proj"), &[q, kv, kv], h));
        list.push(TensorSpec::new(name("self_attn.q_norm"), &[HEAD_DIM]));
        list.push(TensorSpec::new(name("self_attn.k_norm"), &[HEAD_DIM]));
        list.push(TensorSpec::new(name("self_attn.o_proj"), &[h, q]));
        list.push(TensorSpec::new(name("post_attention_layernorm"), &[h]));
        list.push(TensorSpec::stacked(name("mlp.gate_up_proj"), &[mlp, mlp], h));
        list.push(TensorSpec::new(name("mlp.down_proj"), &[h, mlp]));
    }
    list
}

/// The VAE's tensors, encoder and decoder, with the statistics of the latents.
pub fn vae_manifest(config: &VaeConfig) -> Vec<TensorSpec> {
    let mut list = Vec::new();
    let latent = config.latent;
    let patched = config.patched();

    let [first, .., last] = config.encoder;
    conv(&mut list, "encoder.conv_in", RGB, first, 3);
    let mut width = first;
    for (level, &out) in config.encoder.iter().enumerate() {
        for block in 0..2 {
            resnet(&mut list, &format!("encoder.down_blocks.{level}.resnets.{block}"), width, out);
            width = out;
        }
        if level < 3 {
            conv(&mut list, &format!("encoder.down_blocks.{level}.downsamplers.0.conv"), out, out, 3);
        }
    }
    middle(&mut list, "encoder", last);
    affine(&mut list, "encoder.conv_norm_out", last);
    // Mean and log-variance.
    conv(&mut list, "encoder.conv_out", last, 2 * latent, 3);
    conv(&mut list, "quant_conv", 2 * latent, 2 * latent, 1);

    let [first, .., last] = config.decoder;
    conv(&mut list, "post_quant_conv", latent, latent, 1);
    conv(&mut list, "decoder.conv_in", latent, last, 3);
    middle(&mut list, "decoder", last);
    let mut width = last;
    for (level, &out) in config.decoder.iter().rev().enumerate() {
        for block in 0..3 {
            resnet(&mut list, &format!("decoder.up_blocks.{level}.resnets.{block}"), width, out);
            width = out;
        }
        if level < 3 {
            conv(&mut list, &format!("decoder.up_blocks.{level}.upsamplers.0.conv"), out, out, 3);
        }
    }
    affine(&mut list, "decoder.conv_norm_out", first);
    conv(&mut list, "decoder.conv_out", first, RGB, 3);

    list.push(TensorSpec::new("bn.running_mean", &[patched]));
    list.push(TensorSpec::new("bn.running_var", &[patched]));
    list
}

fn affine(list: &mut Vec<TensorSpec>, name: &str, channels: usize) {
    list.push(TensorSpec::new(format!("{name}.weight"), &[channels]));
    list.push(TensorSpec::new(format!("{name}.bias"), &[channels]));
}

fn conv(list: &mut Vec<TensorSpec>, name: &str, from: usize, to: usize, side: usize) {
    list.push(TensorSpec::new(format!("{name}.weight"), &[to, from, side, side]));
    list.push(TensorSpec::new(format!("{name}.bias"), &[to]));
}

fn resnet(list: &mut Vec<TensorSpec>, name: &str, from: usize, to: usize) {
    affine(list, &format!("{name}.norm1"), from);
    conv(list, &format!("{name}.conv1"), from, to, 3);
    affine(list, &format!("{name}.norm2"), to);
    conv(list, &format!("{name}.conv2"), to, to, 3);
    if from != to {
        conv(list, &format!("{name}.conv_shortcut"), from, to, 1);
    }
}

fn middle(list: &mut Vec<TensorSpec>, side: &str, channels: usize) {
    resnet(list, &format!("{side}.mid_block.resnets.0"), channels, channels);
    affine(list, &format!("{side}.mid_block.attentions.0.group_norm"), channels);
    for projection in ["to_q", "to_k", "to_v", "to_out.0"] {
        let name = format!("{side}.mid_block.attentions.0.{projection}");
        list.push(TensorSpec::new(format!("{name}.weight"), &[channels, channels]));
        list.push(TensorSpec::new(format!("{name}.bias"), &[channels]));
    }
    resnet(list, &format!("{side}.mid_block.resnets.1"), channels, channels);
}
