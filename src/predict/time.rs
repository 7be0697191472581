//! Predicts the time of an op with a roofline: tensor cores and memory work at the same time, and the slower one decides.
//!
//! For each floating-point operation of an SM, a kernel's main loop takes the clocks of the tensor cores and overhead cycles, in which they
//! wait for copies, barriers, softmax. Overhead was measured with the portable kernels on an H200, and is assumed to be equal on every SM.
//! It matters less on GeForce cards, whose tensor cores are five times slower.

use super::gpu_spec::GpuSpec;
use crate::backend::cuda::{Arch, has_two_attention_ctas};
use crate::backend::{Access, Linear, Op};
use crate::tensor::{DType, Tensor};

/// FLOP per clock and SM that an H200 reached at 1.98 GHz, counting whole waves of tiles. Sources: for the portable kernels
/// bench/results/2026-11-15-h200, kernels.txt and step-1024-by-op.txt; for the others hopper-*.txt, 2026-11-16-h200, peers-fp8.txt and
/// 2026-11-17-h200, conv.txt.
mod h200 {
    /// The rate of `mma.sync` alone, as a share of the peak of `wgmma`: an assumption, which docs/kernels.md discusses.
    pub const MMA_SYNC: f64 = 0.63 * 4096.0;
    /// The portable GEMM with tiles of 256x128.
    pub const GEMM: f64 = 1680.0;
    /// The portable convolution with tiles of 256x128, without epilogues.
    pub const CONV: f64 = 1424.0;
    /// The portable attention with heads of 128.
    pub const ATTENTION: f64 = 1167.0;
    /// The portable attention with a head of 512, with 64 queries in a tile.
    pub const WIDE_ATTENTION: f64 = 793.0;
    /// The Hopper GEMM in bf16 and in e4m3, and Hopper attention with queries and keys in bf16 and in e4m3.
    pub const GEMM_SM90: f64 = 3072.0;
    pub const GEMM_FP8_SM90: f64 = 5660.0;
    pub const ATTENTION_SM90: f64 = 3011.0;
    pub const ATTENTION_FP8_SM90: f64 = 3393.0;
    /// The Hopper attention with a head of 512.
    pub const WIDE_ATTENTION_SM90: f64 = 2051.0;
    /// The Hopper convolution, without epilogues: 128 and 512 channels have this rate in common.
    pub const CONV_SM90: f64 = 3172.0;
}

/// Speed with tiles of 128x128 relative to 256x128. GPUs with little shared memory use them (bench/LOG.md, 22).
const SMALL_TILES: f64 = 0.89;
/// Speed of attention with a head of 512 and 32 queries in a tile, relative to 64 (bench/LOG.md, 26).
const SMALL_WIDE_TILES: f64 = 0.9;
/// Speed of attention with one CTA of eight warps on an SM, relative to two CTAs of four warps (LOG.md, 84).
const ONE_ATTENTION_CTA: f64 = 0.82;
/// Bytes of shared memory for the larger tile of GEMMs, and of attention with a head of 512.
const LARGE_TILE_SHARED: u32 = 147_456;
const LARGE_WIDE_TILE_SHARED: u32 = 135_936;
/// Time that a GEMM loses to filling pipelines, uneven shares and the fix-up of Stream-K, as the FLOP that would take an SM as long: 14 us
/// on an H200, where 9 to 18 were seen with 512 rows.
const GEMM_FILL: f64 = 48e6;
/// Clocks of an SM for the epilogue of a 256x128 convolution tile, with and without group-norm statistics.
const CONV_EPILOGUE_STATS: f64 = 30e3;
const CONV_EPILOGUE: f64 = 8e3;
/// Clocks of an SM for the epilogue of the Hopper convolution, with and without group-norm statistics.
const CONV_SM90_EPILOGUE_STATS: f64 = 12.2e3;
const CONV_SM90_EPILOGUE: f64 = 6.9e3;
/// The share of the nominal rate that GEMMs of compute capability 12.x reach with the block-scaled MMA: an assumption, which
/// docs/kernels.md discusses.
const BLOCK_SCALED_SHARE: f64 = 0.7;
/// FADD lanes of an SM. They add partial sums of e4m3 products to f32 registers after every `PROMOTION_K` of K.
const LANES: f64 = 128.0;
const PROMOTION_K: f64 = 128.0;
/// The share of memory bandwidth that norms and element-wise kernels reach: 3.1 to 3.7 of 4.8 TB/s on an H200.
const MEMORY_SHARE: f64 = 0.72;
/// The seconds that a kernel in a CUDA graph takes in addition to its work.
const START: f64 = 2e-6;

/// Tile sizes: rows and columns of an MMA tile, queries of an attention tile.
const TILE_COLS: usize = 128;
const FEWEST_ROWS: usize = 64;
const ATTENTION_QUERIES: usize = 128;
const HEAD: usize = 128;

/// Predicts the time of ops on a GPU.
#[derive(Clone, Debug)]
pub struct Predictor {
    gpu: GpuSpec,
    arch: Arch,
    /// FLOP per clock and SM of `mma.sync`, in bf16, in e4m3 and, if it is block-scaled, in e2m1.
    bf16: f64,
    e4m3: f64,
    e2m1: Option<f64>,
}

impl Predictor {
    /// Predicts times of an architecture's kernels. `None` for a GPU whose `mma.sync` rate is not known.
    pub fn new(gpu: &GpuSpec, arch: Arch) -> Option<Self> {
        let peak = |dtype| gpu.tensor_flops_per_clock(dtype).map(f64::from);
        let bf16 = match gpu.capability {
            (9, 0) => h200::MMA_SYNC,
            // On datacenter Blackwell the rate is far below the peak, and nothing was measured.
            (10, _) => return None,
            _ => peak(DType::Bf16)?,
        };
        let e2m1 = if arch == Arch::Sm120 { Some(peak(DType::E2m1)?) } else { None };
        let e4m3 = match gpu.capability {
            // Block-scaled e4m3 has half the rate of e2m1, on GeForce cards, too.
            _ if e2m1.is_some() => e2m1? / 2.0,
            // Hopper turns e4m3 into an MMA of f16. Older GPUs have no e4m3 MMA, and multiply nothing in e4m3.
            (9, 0) | (8, ..9) => bf16,
            _ => peak(DType::E4m3)?,
        };
        Some(Self { gpu: gpu.clone(), arch, bf16, e4m3, e2m1 })
    }

    /// The GPU.
    pub fn gpu(&self) -> &GpuSpec {
        &self.gpu
    }

    /// The seconds that an op takes. Activations are assumed to be bf16 or quantized: tensor cores do not take f32.
    pub fn seconds(&self, op: &Op<'_>) -> f64 {
        match *op {
            Op::Linear(streams) | Op::LinearSwiglu(streams) => self.gemm(op, &mut streams.iter().map(|s| (s.x, s.w))),
            Op::LinearGateResidual(streams) => self.gemm(op, &mut streams.iter().map(|s| (s.x, s.w))),
            Op::Qkv(streams) => self.gemm(op, &mut streams.iter().map(|s| (s.x, s.w))),
            Op::Attention { q, kv, head_dim, causal, .. } => {
                let keys = kv.iter().map(|s| s.k.rows).sum();
                START + self.attention(q, keys, head_dim, causal).max(self.transfer(operand_bytes(op)))
            }
            Op::Conv { out, w, sampling, shortcut, stats, .. } => {
                let tile_rows = if self.has_large_tiles() { 256 } else { 128 };
                let tiles = out.rows.div_ceil(tile_rows) * out.cols.div_ceil(TILE_COLS);
                let k = w.weight.cols / sampling.phases() + shortcut.map_or(0, |s| s.x.cols);
                if self.arch == Arch::Sm90 {
                    let epilogue = if stats.is_some() { CONV_SM90_EPILOGUE_STATS } else { CONV_SM90_EPILOGUE };
                    let clocks = tiles as f64 * (2.0 * (tile_rows * TILE_COLS * k) as f64 / h200::CONV_SM90 + epilogue);
                    return START + (clocks / self.gpu.clocks_per_second()).max(self.transfer(operand_bytes(op)));
                }
                let epilogue = if stats.is_some() { CONV_EPILOGUE_STATS } else { CONV_EPILOGUE };
                let clocks = self.clocks(h200::CONV, self.tile_speed()) * 2.0 * (tile_rows * TILE_COLS * k) as f64
                    + epilogue * tile_rows as f64 / 256.0;
                START + self.waves(tiles, clocks).max(self.transfer(operand_bytes(op)))
            }
            _ => START + self.transfer(operand_bytes(op)),
        }
    }

    fn has_large_tiles(&self) -> bool {
        self.gpu.shared >= LARGE_TILE_SHARED
    }

    fn tile_speed(&self) -> f64 {
        if self.has_large_tiles() { 1.0 } else { SMALL_TILES }
    }

    /// Clocks of an SM for one FLOP in bf16, by a portable kernel that reached `measured` on an H200. `speed` is the relative speed of the
    /// tiles that fit this GPU's shared memory.
    fn clocks(&self, measured: f64, speed: f64) -> f64 {
        1.0 / self.bf16 + overhead(measured * speed)
    }

    /// Clocks of an SM for one FLOP of a GEMM with operands of this type.
    fn gemm_clocks(&self, dtype: DType) -> f64 {
        if let Some(e2m1) = self.e2m1 {
            return match dtype {
                DType::E2m1 => 1.0 / (BLOCK_SCALED_SHARE * e2m1),
                DType::E4m3 => 1.0 / (BLOCK_SCALED_SHARE * self.e4m3),
                // The large tile fits: its stages are smaller than in the portable GEMM.
                _ => self.clocks(h200::GEMM, 1.0),
            };
        }
        match (self.arch, dtype) {
            (Arch::Sm90, DType::Bf16) => 1.0 / h200::GEMM_SM90,
            (Arch::Sm90, _) => 1.0 / h200::GEMM_FP8_SM90,
            (_, DType::Bf16) => self.clocks(h200::GEMM, self.tile_speed()),
            // Twice the FLOP need as many bytes to be copied and loaded. A partial sum of 128 products is 256 FLOP.
            _ => 1.0 / self.e4m3 + overhead(h200::GEMM * self.tile_speed()) / 2.0 + 1.0 / (LANES * 2.0 * PROMOTION_K),
        }
    }

    fn gemm(&self, op: &Op<'_>, streams: &mut dyn Iterator<Item = (Tensor, &Linear)>) -> f64 {
        let (mut clocks, mut expansion, mut moved, mut slowest) = (0.0, 0.0, operand_bytes(op), 0.0_f64);
        for (x, w) in streams {
            let rows = x.rows.next_multiple_of(FEWEST_ROWS);
            for part in w.weight.parts() {
                let multiplied = if w.input.dtype.is_quantized() { part.dtype } else { DType::Bf16 };
                let of_flop = self.gemm_clocks(multiplied);
                clocks += 2.0 * (rows * part.len()) as f64 * of_flop;
                slowest = slowest.max(of_flop);
                if part.dtype.is_quantized() && multiplied == DType::Bf16 {
                    // The expansion kernel reads codes and writes bf16, which the GEMM reads instead of the codes.
                    let (codes, bf16) = (part.bytes() as f64, DType::Bf16.bytes(part.len()) as f64);
                    expansion += codes + bf16;
                    moved += bf16 - codes;
                }
            }
        }
        // The fill was measured on the H200 with bf16, and is assumed to be the same for FP8.
        let fill = GEMM_FILL * if self.e2m1.is_some() { slowest } else { self.gemm_clocks(DType::Bf16) };
        let compute = clocks / self.gpu.clocks_per_second() + fill / (f64::from(self.gpu.clock) * 1e3);
        let expand = if expansion > 0.0 { START + self.transfer(expansion) } else { 0.0 };
        START + compute.max(self.transfer(moved)) + expand
    }

    fn attention(&self, q: Tensor, keys: usize, head_dim: usize, causal: bool) -> f64 {
        let (heads, wide) = (q.cols / head_dim.max(1), head_dim > HEAD);
        let dense = 4.0 * (q.len() * keys) as f64;
        if self.arch == Arch::Sm90 {
            let rate = match q.dtype {
                _ if wide => h200::WIDE_ATTENTION_SM90,
                DType::E4m3 => h200::ATTENTION_FP8_SM90,
                _ => h200::ATTENTION_SM90,
            };
            return dense / rate / self.gpu.clocks_per_second() / if causal { 2.0 } else { 1.0 };
        }
        let (queries, clocks) = match (wide, self.gpu.shared >= LARGE_WIDE_TILE_SHARED) {
            // Queries by keys in e4m3, and softmax by values in bf16: half of the FLOP each. Two CTAs always fit.
            (false, _) if q.dtype == DType::E4m3 => {
                let tensor_cores = (1.0 / self.e4m3 + 1.0 / self.bf16) / 2.0;
                (ATTENTION_QUERIES, tensor_cores + overhead(h200::ATTENTION))
            }
            (false, _) if has_two_attention_ctas(self.gpu.shared) => (ATTENTION_QUERIES, self.clocks(h200::ATTENTION, 1.0)),
            (false, _) => (ATTENTION_QUERIES, self.clocks(h200::ATTENTION, ONE_ATTENTION_CTA)),
            (true, true) => (64, self.clocks(h200::WIDE_ATTENTION, 1.0)),
            (true, false) => (32, self.clocks(h200::WIDE_ATTENTION, SMALL_WIDE_TILES)),
        };
        let tile = 4.0 * (queries * keys * head_dim) as f64 * clocks;
        let tiles = heads * q.rows.div_ceil(queries);
        match causal {
            false => self.waves(tiles, tile),
            // Tiles see between none and all of the keys. The tile that sees all takes as long as without a mask.
            true => (self.waves(tiles, tile) / 2.0).max(self.waves(1, tile)),
        }
    }

    /// The seconds of `tiles` tiles that take `clocks` of an SM each. The last wave takes as long as a full one.
    fn waves(&self, tiles: usize, clocks: f64) -> f64 {
        tiles.div_ceil(self.gpu.multiprocessors.max(1) as usize) as f64 * clocks / (f64::from(self.gpu.clock) * 1e3)
    }

    /// The seconds in which memory moves this many bytes.
    fn transfer(&self, bytes: f64) -> f64 {
        bytes / (MEMORY_SHARE * self.gpu.bandwidth as f64)
    }
}

/// Overhead cycles of an SM for one FLOP, in which tensor cores wait, of a portable kernel that reached `measured` on an H200.
fn overhead(measured: f64) -> f64 {
    1.0 / measured - 1.0 / h200::MMA_SYNC
}

/// Bytes of an op's operands, each moved once, or twice if it is read and written.
fn operand_bytes(op: &Op<'_>) -> f64 {
    let mut bytes = 0;
    op.operands(&mut |tensor, access| bytes += tensor.bytes() * if access == Access::Update { 2 } else { 1 });
    bytes as f64
}
