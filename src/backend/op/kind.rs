//! Op kinds, by which messages, reports and filters name ops.

use super::Op;

/// One row for each kind: the ops it covers, its variant and its name. The first row that fits an op counts.
macro_rules! kinds {
    ($($op:pat $(if $guard:expr)? => $kind:ident $name:literal,)*) => {
        /// What an op computes, without its operands.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "`Op` describes what each one computes")]
        pub enum OpKind {
            $($kind,)*
        }

        impl OpKind {
            /// Every kind of op.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// A short name for messages and reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }

        impl Op<'_> {
            /// The kind of the op.
            pub fn kind(&self) -> OpKind {
                match self {
                    $($op $(if $guard)? => OpKind::$kind,)*
                }
            }
        }
    };
}

kinds! {
    Op::Copy { .. } => Copy "copy",
    Op::Silu { .. } => Silu "silu",
    Op::RmsNorm { .. } => RmsNorm "rms_norm",
    Op::LayerNormModulate { .. } => LayerNormModulate "layer_norm_modulate",
    Op::Linear(_) => Linear "linear",
    Op::LinearSwiglu(_) => LinearSwiglu "linear_swiglu",
    Op::LinearGateResidual(_) => LinearGateResidual "linear_gate_residual",
    Op::Qkv(streams) if streams.iter().all(|stream| stream.mlp.is_none()) => Qkv "qkv_norm_rope",
    Op::Qkv(_) => QkvMlp "qkv_mlp",
    Op::Attention { causal: false, .. } => Attention "attention",
    Op::Attention { .. } => AttentionCausal "attention_causal",
    Op::Conv { .. } => Conv "conv",
    Op::GroupNorm { .. } => GroupNorm "group_norm",
    Op::NormConv { .. } => NormConv "norm_conv",
    Op::Patchify { .. } => Patchify "patchify",
    Op::Unpatchify { .. } => Unpatchify "unpatchify",
    Op::Euler { .. } => Euler "euler",
    Op::Renoise { .. } => Renoise "renoise",
    Op::Guidance { .. } => Guidance "guidance",
    Op::Blend { .. } => Blend "blend",
    Op::NonFinite { .. } => NonFinite "non_finite",
    Op::LargestMagnitude { .. } => LargestMagnitude "largest_magnitude",
    Op::Preview { .. } => Preview "preview",
    Op::Pixels { .. } => Pixels "pixels",
}
