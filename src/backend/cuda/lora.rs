//! LoRA branches. A layer with weight `W + up down` is `x W^T + (x down^T) up^T`. A kernel computes `x down^T`, which has few columns, into
//! scratch before the GEMM. The GEMM adds the second product before its epilogue.

use super::abi::{self, KlMat, KlReduction};
use super::context::{KernelChoice, OpContext};
use super::launch::Kernel;
use super::params::{NONE, bytes, dtype_code, is_async_copyable, naive_grid};
use crate::backend::{Linear, LoraBranch};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The kernels of `x down^T`, the fastest first.
pub fn kernels() -> [Kernel; 2] {
    [Kernel::LoraDown, Kernel::NaiveGemm]
}

/// A layer's LoRA branch as GEMMs take it: `x down^T` and `up`. Both are absent if the layer has no branch.
#[derive(Clone, Copy)]
pub struct LoraMats {
    pub down_out: KlMat,
    pub up: KlMat,
}

impl LoraMats {
    pub const NONE: Self = Self { down_out: NONE, up: NONE };

    /// Whether the layer has a LoRA branch.
    pub const fn exists(&self) -> bool {
        self.down_out.data != 0
    }

    /// Whether tensor cores can multiply the branch. True without a branch.
    pub fn is_multiplied(&self) -> bool {
        let step = abi::KL_LORA_DOWN_STEP;
        let fits = |m: &KlMat| is_async_copyable(m, abi::KL_BF16) && m.cols.is_multiple_of(step);
        !self.exists() || fits(&self.down_out) && fits(&self.up)
    }

    /// `up` from row `first` on.
    pub fn up_from(&self, first: usize) -> KlMat {
        let offset = bytes(first as u64 * self.up.stride, self.up.dtype);
        if self.exists() { KlMat { data: self.up.data + offset, rows: self.up.rows - first as u32, ..self.up } } else { NONE }
    }
}

/// Computes `x down^T` for the layers that have a LoRA branch.
pub fn reduce<'a>(cx: &OpContext, op: &'static str, layers: impl Iterator<Item = (Tensor, &'a Linear)>) -> Result<Vec<LoraMats>> {
    let layers: Vec<(Tensor, Option<LoraBranch>)> = layers.map(|(x, layer)| (x, layer.lora)).collect();
    let sizes = layers.iter().map(|(x, lora)| lora.map_or(0, |lora| lora.down_out_bytes(*x)));
    let (needed, (begin, room)) = (sizes.sum::<u64>(), cx.memory.op_scratch());
    if needed > room {
        return Err(Error::Op { op, what: format!("no room for {needed} bytes of LoRA products") });
    }
    let mut next = begin + room - needed;
    let (mut loras, mut reductions) = (Vec::with_capacity(layers.len()), Vec::new());
    for (x, lora) in layers {
        let Some(lora) = lora else {
            loras.push(LoraMats::NONE);
            continue;
        };
        let cols = lora.down.rows as u32;
        let dtype = dtype_code(lora.down_out_type(x));
        let (x_mat, down) = (cx.mat(x, op)?, cx.mat(lora.down, op)?);
        let down_out = KlMat { data: next, scales: 0, stride: u64::from(cols), rows: x_mat.rows, cols, dtype, scale: 1.0 };
        next += lora.down_out_bytes(x);
        loras.push(LoraMats { down_out, up: cx.mat(lora.up, op)? });
        reductions.push(KlReduction { out: down_out, x: x_mat, down });
    }
    // Streams that use the same kernel share a launch.
    for group in reductions.chunk_by(|a, b| is_multiplied(cx, a) == is_multiplied(cx, b)) {
        if is_multiplied(cx, &group[0]) {
            group.chunks(abi::KL_STREAMS as usize).try_for_each(|streams| launch(cx, streams))?;
        } else {
            group.iter().try_for_each(|reduction| naive(cx, reduction))?;
        }
    }
    Ok(loras)
}

/// Whether tensor cores compute `x down^T`.
fn is_multiplied(cx: &OpContext, KlReduction { out, x, down }: &KlReduction) -> bool {
    let types = [abi::KL_BF16, abi::KL_E4M3, abi::KL_E2M1];
    cx.choice != KernelChoice::Naive
        && cx.kernels.has(Kernel::LoraDown)
        && types.contains(&x.dtype)
        && is_async_copyable(x, x.dtype)
        && is_async_copyable(down, abi::KL_BF16)
        && out.dtype == abi::KL_BF16
        && out.cols.is_multiple_of(abi::KL_LORA_DOWN_STEP)
}

fn launch(cx: &OpContext, streams: &[KlReduction]) -> Result<()> {
    let mut stream = [KlReduction { out: NONE, x: NONE, down: NONE }; abi::KL_STREAMS as usize];
    stream[..streams.len()].copy_from_slice(streams);
    let most = |size: fn(&KlReduction) -> u32| streams.iter().map(size).max().unwrap_or(0);
    let rows = most(|s| s.out.rows).div_ceil(abi::KL_LORA_DOWN_ROWS);
    let cols = most(|s| s.out.cols).div_ceil(abi::KL_LORA_DOWN_COLS);
    cx.kernels.launch(Kernel::LoraDown, [rows, cols, streams.len() as u32], &abi::KlLoraDown { stream })
}

fn naive(cx: &OpContext, &KlReduction { out, x, down }: &KlReduction) -> Result<()> {
    let p = abi::KlNaiveGemm {
        out,
        x,
        w: [down; 2],
        bias: NONE,
        gate: NONE,
        down_out: NONE,
        up: [NONE; 2],
        saturated: cx.memory.saturated(),
        first: [0; 2],
        epilogue: abi::KL_STORE,
        unused: 0,
    };
    cx.kernels.launch(Kernel::NaiveGemm, naive_grid(&p.out), &p)
}
