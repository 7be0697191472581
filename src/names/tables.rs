//! The spelling tables and the pattern syntax.
//!
//! A pattern is a dotted name in which some components are placeholders:
//! `<n>` the number of a block or level, `<3-n>` the same level counted from the other end, `<block>` a resnet within a level,
//! `<side>` encoder or decoder, `<op>` an operation of a resnet, `<leaf>` weight or bias.

use super::layer::LayerRole::{self, *};
use super::layer::Stream::{Image, Text};

/// One canonical tensor and its names in the other layout.
pub(super) struct Row {
    /// The role of the tensor's layer; `None` in the VAE.
    pub role: Option<LayerRole>,
    /// Pattern of the canonical name, which is also the spelling of one of the layouts.
    pub canonical: &'static str,
    /// Patterns of the other layout in row order: one for a renamed tensor, several for a split one, none if the name is equal.
    pub other: &'static [&'static str],
    /// The other layout stores the two halves of the rows in reverse order.
    pub swapped: bool,
}

const fn row(canonical: &'static str, other: &'static [&'static str]) -> Row {
    Row { role: None, canonical, other, swapped: false }
}

const fn layer(role: LayerRole, canonical: &'static str, other: &'static [&'static str]) -> Row {
    Row { role: Some(role), ..row(canonical, other) }
}

pub(super) const TRANSFORMER: &[Row] = &[
    layer(ImageIn, "img_in.weight", &["x_embedder.weight"]),
    layer(TextIn, "txt_in.weight", &["context_embedder.weight"]),
    layer(TimeIn, "time_in.in_layer.weight", &["time_guidance_embed.timestep_embedder.linear_1.weight"]),
    layer(TimeOut, "time_in.out_layer.weight", &["time_guidance_embed.timestep_embedder.linear_2.weight"]),
    layer(GuidanceIn, "guidance_in.in_layer.weight", &["time_guidance_embed.guidance_embedder.linear_1.weight"]),
    layer(GuidanceOut, "guidance_in.out_layer.weight", &["time_guidance_embed.guidance_embedder.linear_2.weight"]),
    layer(ImageModulation, "double_stream_modulation_img.lin.weight", &["double_stream_modulation_img.linear.weight"]),
    layer(TextModulation, "double_stream_modulation_txt.lin.weight", &["double_stream_modulation_txt.linear.weight"]),
    layer(SingleModulation, "single_stream_modulation.lin.weight", &["single_stream_modulation.linear.weight"]),
    layer(
        Qkv(Image),
        "double_blocks.<n>.img_attn.qkv.weight",
        &[
            "transformer_blocks.<n>.attn.to_q.weight",
            "transformer_blocks.<n>.attn.to_k.weight",
            "transformer_blocks.<n>.attn.to_v.weight",
        ],
    ),
    layer(QueryNorm(Image), "double_blocks.<n>.img_attn.norm.query_norm.scale", &["transformer_blocks.<n>.attn.norm_q.weight"]),
    layer(KeyNorm(Image), "double_blocks.<n>.img_attn.norm.key_norm.scale", &["transformer_blocks.<n>.attn.norm_k.weight"]),
    layer(AttentionOut(Image), "double_blocks.<n>.img_attn.proj.weight", &["transformer_blocks.<n>.attn.to_out.0.weight"]),
    layer(MlpIn(Image), "double_blocks.<n>.img_mlp.0.weight", &["transformer_blocks.<n>.ff.linear_in.weight"]),
    layer(MlpOut(Image), "double_blocks.<n>.img_mlp.2.weight", &["transformer_blocks.<n>.ff.linear_out.weight"]),
    layer(
        Qkv(Text),
        "double_blocks.<n>.txt_attn.qkv.weight",
        &[
            "transformer_blocks.<n>.attn.add_q_proj.weight",
            "transformer_blocks.<n>.attn.add_k_proj.weight",
            "transformer_blocks.<n>.attn.add_v_proj.weight",
        ],
    ),
    layer(
        QueryNorm(Text),
        "double_blocks.<n>.txt_attn.norm.query_norm.scale",
        &["transformer_blocks.<n>.attn.norm_added_q.weight"],
    ),
    layer(KeyNorm(Text), "double_blocks.<n>.txt_attn.norm.key_norm.scale", &["transformer_blocks.<n>.attn.norm_added_k.weight"]),
    layer(AttentionOut(Text), "double_blocks.<n>.txt_attn.proj.weight", &["transformer_blocks.<n>.attn.to_add_out.weight"]),
    layer(MlpIn(Text), "double_blocks.<n>.txt_mlp.0.weight", &["transformer_blocks.<n>.ff_context.linear_in.weight"]),
    layer(MlpOut(Text), "double_blocks.<n>.txt_mlp.2.weight", &["transformer_blocks.<n>.ff_context.linear_out.weight"]),
    layer(Linear1, "single_blocks.<n>.linear1.weight", &["single_transformer_blocks.<n>.attn.to_qkv_mlp_proj.weight"]),
    layer(Linear2, "single_blocks.<n>.linear2.weight", &["single_transformer_blocks.<n>.attn.to_out.weight"]),
    layer(SingleQueryNorm, "single_blocks.<n>.norm.query_norm.scale", &["single_transformer_blocks.<n>.attn.norm_q.weight"]),
    layer(SingleKeyNorm, "single_blocks.<n>.norm.key_norm.scale", &["single_transformer_blocks.<n>.attn.norm_k.weight"]),
    // The rows are (shift, scale) in the BFL layout and (scale, shift) in diffusers. Other modulations have one order in both.
    Row { swapped: true, ..layer(FinalModulation, "final_layer.adaLN_modulation.1.weight", &["norm_out.linear.weight"]) },
    layer(ImageOut, "final_layer.linear.weight", &["proj_out.weight"]),
];

pub(super) const TEXT_ENCODER: &[Row] = &[
    layer(TokenTable, "model.embed_tokens.weight", &[]),
    layer(EncoderInputNorm, "model.layers.<n>.input_layernorm.weight", &[]),
    layer(
        EncoderQkv,
        "model.layers.<n>.self_attn.qkv_proj.weight",
        &[
            "model.layers.<n>.self_attn.q_proj.weight",
            "model.layers.<n>.self_attn.k_proj.weight",
            "model.layers.<n>.self_attn.v_proj.weight",
        ],
    ),
    layer(EncoderQueryNorm, "model.layers.<n>.self_attn.q_norm.weight", &[]),
    layer(EncoderKeyNorm, "model.layers.<n>.self_attn.k_norm.weight", &[]),
    layer(EncoderOut, "model.layers.<n>.self_attn.o_proj.weight", &[]),
    layer(EncoderMlpNorm, "model.layers.<n>.post_attention_layernorm.weight", &[]),
    layer(
        EncoderGateUp,
        "model.layers.<n>.mlp.gate_up_proj.weight",
        &["model.layers.<n>.mlp.gate_proj.weight", "model.layers.<n>.mlp.up_proj.weight"],
    ),
    layer(EncoderDown, "model.layers.<n>.mlp.down_proj.weight", &[]),
];

pub(super) const VAE: &[Row] = &[
    row("<side>.conv_in.<leaf>", &[]),
    row("<side>.conv_out.<leaf>", &[]),
    row("<side>.conv_norm_out.<leaf>", &["<side>.norm_out.<leaf>"]),
    row("quant_conv.<leaf>", &["encoder.quant_conv.<leaf>"]),
    row("post_quant_conv.<leaf>", &["decoder.post_quant_conv.<leaf>"]),
    row("encoder.down_blocks.<n>.resnets.<block>.<op>.<leaf>", &["encoder.down.<n>.block.<block>.<op>.<leaf>"]),
    row("encoder.down_blocks.<n>.resnets.<block>.conv_shortcut.<leaf>", &["encoder.down.<n>.block.<block>.nin_shortcut.<leaf>"]),
    row("encoder.down_blocks.<n>.downsamplers.0.conv.<leaf>", &["encoder.down.<n>.downsample.conv.<leaf>"]),
    row("decoder.up_blocks.<n>.resnets.<block>.<op>.<leaf>", &["decoder.up.<3-n>.block.<block>.<op>.<leaf>"]),
    row("decoder.up_blocks.<n>.resnets.<block>.conv_shortcut.<leaf>", &["decoder.up.<3-n>.block.<block>.nin_shortcut.<leaf>"]),
    row("decoder.up_blocks.<n>.upsamplers.0.conv.<leaf>", &["decoder.up.<3-n>.upsample.conv.<leaf>"]),
    row("<side>.mid_block.resnets.0.<op>.<leaf>", &["<side>.mid.block_1.<op>.<leaf>"]),
    row("<side>.mid_block.resnets.1.<op>.<leaf>", &["<side>.mid.block_2.<op>.<leaf>"]),
    row("<side>.mid_block.attentions.0.group_norm.<leaf>", &["<side>.mid.attn_1.norm.<leaf>"]),
    row("<side>.mid_block.attentions.0.to_q.<leaf>", &["<side>.mid.attn_1.q.<leaf>"]),
    row("<side>.mid_block.attentions.0.to_k.<leaf>", &["<side>.mid.attn_1.k.<leaf>"]),
    row("<side>.mid_block.attentions.0.to_v.<leaf>", &["<side>.mid.attn_1.v.<leaf>"]),
    row("<side>.mid_block.attentions.0.to_out.0.<leaf>", &["<side>.mid.attn_1.proj_out.<leaf>"]),
    row("bn.running_mean", &[]),
    row("bn.running_var", &[]),
];

/// The variable components of a name.
#[derive(Default)]
pub(super) struct Captured<'a> {
    pub number: usize,
    pub block: usize,
    pub side: &'a str,
    pub op: &'a str,
    pub leaf: &'a str,
}

/// Matches a whole name against a pattern.
pub(super) fn matches<'a>(pattern: &str, name: &'a str) -> Option<Captured<'a>> {
    let mut captured = Captured::default();
    let mut components = name.split('.');
    for wanted in pattern.split('.') {
        let found = components.next()?;
        match wanted {
            "<n>" => captured.number = number(found)?,
            "<3-n>" => captured.number = 3usize.checked_sub(number(found)?)?,
            "<block>" => captured.block = number(found)?,
            "<side>" if matches!(found, "encoder" | "decoder") => captured.side = found,
            "<op>" if matches!(found, "norm1" | "conv1" | "norm2" | "conv2") => captured.op = found,
            "<leaf>" if matches!(found, "weight" | "bias") => captured.leaf = found,
            literal if literal == found => {}
            _ => return None,
        }
    }
    components.next().is_none().then_some(captured)
}

/// Inserts captured components into another pattern.
pub(super) fn fill(pattern: &str, captured: &Captured<'_>) -> String {
    let components: Vec<String> = pattern
        .split('.')
        .map(|component| match component {
            "<n>" => captured.number.to_string(),
            // A level outside 0..=3 has no counterpart; `<none>` occurs in no file, so it is reported as missing.
            "<3-n>" => 3usize.checked_sub(captured.number).map_or_else(|| "<none>".into(), |level| level.to_string()),
            "<block>" => captured.block.to_string(),
            "<side>" => captured.side.into(),
            "<op>" => captured.op.into(),
            "<leaf>" => captured.leaf.into(),
            literal => literal.into(),
        })
        .collect();
    components.join(".")
}

/// Parses a decimal number below 10,000 without leading zeros: each number has one spelling, so each tensor has one name.
pub(super) fn number(text: &str) -> Option<usize> {
    let plain = (1..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    if !plain || (text.len() > 1 && text.starts_with('0')) {
        return None;
    }
    text.parse().ok()
}
