//! Parses the names of an adapter's tensors: which layer a tensor belongs to, as its trainer spells it, and which factor it is.

/// A factor of an adapter's layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Factor {
    /// LoRA's first matrix, `[rank, in]`.
    Down,
    /// LoRA's second matrix, `[out, rank]`.
    Up,
    /// LoRA's alpha: the scale times the rank.
    Alpha,
    /// LoKr's small factor, whole or as a product of two.
    W1,
    /// The first matrix of `W1` as a product.
    W1a,
    /// The second matrix of `W1` as a product.
    W1b,
    /// LoKr's large factor, whole or as a product of two.
    W2,
    /// The first matrix of `W2` as a product.
    W2a,
    /// The second matrix of `W2` as a product.
    W2b,
}

/// The role of a tensor in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A factor.
    Factor(Factor),
    /// A tensor of a method that is not supported, with the method's name.
    Unsupported(&'static str),
}

use Factor::{Alpha, Down, Up, W1, W1a, W1b, W2, W2a, W2b};
use Role::{Factor as Is, Unsupported};

/// Name endings and their roles. `.weight` may follow; after PEFT's endings the name of the adapter may, too.
const ENDINGS: &[(&str, Role)] = &[
    (".lora_A", Is(Down)),
    (".lora_B", Is(Up)),
    (".lora_down", Is(Down)),
    (".lora_up", Is(Up)),
    ("_lora.down", Is(Down)),
    ("_lora.up", Is(Up)),
    (".lora.down", Is(Down)),
    (".lora.up", Is(Up)),
    (".lora_linear_layer.down", Is(Down)),
    (".lora_linear_layer.up", Is(Up)),
    (".alpha", Is(Alpha)),
    (".lokr_w1", Is(W1)),
    (".lokr_w1_a", Is(W1a)),
    (".lokr_w1_b", Is(W1b)),
    (".lokr_w2", Is(W2)),
    (".lokr_w2_a", Is(W2a)),
    (".lokr_w2_b", Is(W2b)),
    (".lokr_t2", Unsupported("LoKr of a convolution (lokr_t2)")),
    (".lora_mid", Unsupported("LoRA of a convolution (lora_mid)")),
    (".dora_scale", Unsupported("DoRA")),
    (".lora_magnitude_vector", Unsupported("DoRA")),
    (".lora_B.bias", Unsupported("LoRA with a bias")),
    (".lora_up.bias", Unsupported("LoRA with a bias")),
    (".hada_w1_a", Unsupported("LoHa")),
    (".hada_w1_b", Unsupported("LoHa")),
    (".hada_w2_a", Unsupported("LoHa")),
    (".hada_w2_b", Unsupported("LoHa")),
    (".hada_t1", Unsupported("LoHa")),
    (".hada_t2", Unsupported("LoHa")),
    (".oft_blocks", Unsupported("OFT")),
    (".oft_diag", Unsupported("OFT")),
    (".oft_R", Unsupported("OFT")),
    (".boft_R", Unsupported("BOFT")),
    (".a1", Unsupported("GLoRA")),
    (".a2", Unsupported("GLoRA")),
    (".b1", Unsupported("GLoRA")),
    (".b2", Unsupported("GLoRA")),
    (".diff", Unsupported("a difference of whole weights")),
    (".diff_b", Unsupported("a difference of whole weights")),
    (".w_norm", Unsupported("a norm of its own")),
    (".b_norm", Unsupported("a norm of its own")),
    (".set_weight", Unsupported("weights in place of the model's")),
    (".reshape_weight", Unsupported("weights of another shape")),
];

/// Splits a tensor's name into its layer and its role. `None` if no trainer names adapter tensors like this.
pub fn split(name: &str) -> Option<(&str, Role)> {
    let ending = |name| {
        let found = ENDINGS.iter().filter_map(|(ending, role)| Some((str::strip_suffix(name, ending)?, *role)));
        found.filter(|(layer, _)| !layer.is_empty()).min_by_key(|(layer, _)| layer.len())
    };
    let bare = name.strip_suffix(".weight").unwrap_or(name);
    if let Some(found) = ending(bare) {
        return Some(found);
    }
    // PEFT puts the adapter's name in between, mostly `default`.
    let (bare, adapter) = bare.rsplit_once('.')?;
    let is_peft = [".lora_A", ".lora_B", ".lora_magnitude_vector"].iter().any(|ending| bare.ends_with(ending));
    if is_peft && !adapter.is_empty() { ending(bare) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_however_they_are_spelled() {
        for (name, layer, role) in [
            (
                "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",
                "diffusion_model.double_blocks.0.img_attn.qkv",
                Is(Down),
            ),
            (
                "base_model.model.single_blocks.3.linear1.lora_B.default.weight",
                "base_model.model.single_blocks.3.linear1",
                Is(Up),
            ),
            ("x.y.lora_A.my_adapter.weight", "x.y", Is(Down)),
            ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "lora_unet_double_blocks_0_img_attn_qkv", Is(Down)),
            ("lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight", "lora_unet_double_blocks_0_img_attn_qkv", Is(Up)),
            ("lora_unet_double_blocks_0_img_attn_qkv.alpha", "lora_unet_double_blocks_0_img_attn_qkv", Is(Alpha)),
            ("transformer_blocks.0.attn.to_q_lora.down.weight", "transformer_blocks.0.attn.to_q", Is(Down)),
            ("transformer_blocks.0.attn.to_q.lora.up.weight", "transformer_blocks.0.attn.to_q", Is(Up)),
            ("a.b.lora_linear_layer.down.weight", "a.b", Is(Down)),
            ("a.b.lora_A", "a.b", Is(Down)),
            ("lycoris_transformer_blocks_0_attn_to_q.lokr_w1", "lycoris_transformer_blocks_0_attn_to_q", Is(W1)),
            ("d.lokr_w2_a", "d", Is(W2a)),
            ("d.lokr_w2_b", "d", Is(W2b)),
            ("d.lokr_t2", "d", Unsupported("LoKr of a convolution (lokr_t2)")),
            ("d.dora_scale", "d", Unsupported("DoRA")),
            ("d.lora_magnitude_vector.default.weight", "d", Unsupported("DoRA")),
            ("d.lora_B.bias", "d", Unsupported("LoRA with a bias")),
            ("d.hada_w1_a", "d", Unsupported("LoHa")),
            ("d.diff_b", "d", Unsupported("a difference of whole weights")),
        ] {
            assert_eq!(split(name), Some((layer, role)), "{name}");
        }
        for name in ["double_blocks.0.img_attn.qkv.weight", "img_in.weight", "weight", ".lora_A.weight", "", "lora_A"] {
            assert_eq!(split(name), None, "{name}");
        }
    }
}
