//! Tests GEMMs with every epilogue against the naive kernel on the same GPU.
//!
//! Operands are small integers times powers of two. Sums are exact in any order, with no more places than tensor cores keep for FP8, so a
//! difference before the last rounding is a fault.

use super::Outcome;
use super::compare::{Agreement, difference};
use super::instructions::{judge_places, kept};
use crate::backend::cuda::{Cuda, Kernel, KernelChoice};
use crate::backend::{Backend, Fp8Accumulate, GatedGemm, Gemm, Linear, Op, Projection, QkNorm, Role, Rope, RopeStyle};
use crate::error::Result;
use crate::tensor::{
    Arena, Bytes, DType, Nvfp4Layout, Region, Scale, Scaling, SliceScaling, Stored, Tensor, WeightSlice, formats, nvfp4,
};
use std::sync::Arc;

/// Rows, columns and K of a GEMM.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Rows of the input.
    pub rows: usize,
    /// Columns of each output, whole heads.
    pub cols: usize,
    /// Columns of the input.
    pub k: usize,
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}", self.rows, self.cols, self.k)
    }
}

/// The operand types of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// bf16 by bf16.
    Bf16,
    /// e4m3 by e4m3.
    W8A8,
    /// NVFP4 by NVFP4.
    W4A4,
}

const HEAD_DIM: usize = 128;
/// The exponent of the scale of inputs. All scales here are powers of two.
const INPUT_EXPONENT: i8 = -3;
/// Exponents of the scales of results, which are below 200.
const RESULT_E4M3: i8 = -1;
const RESULT_NVFP4: i8 = -4;
/// Parts of the weight: queries, keys, values, gate and up.
const PARTS: usize = 5;

impl Format {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::W8A8, Self::W4A4];

    /// The format's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::W8A8 => "W8A8",
            Self::W4A4 => "W4A4",
        }
    }

    const fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::W8A8 => DType::E4m3,
            Self::W4A4 => DType::E2m1,
        }
    }

    /// How a matrix with a scale of 2^exponent is stored.
    const fn stored(self, exponent: i8) -> Stored {
        Stored::scaled(self.dtype(), Scale::power_of_two(exponent))
    }

    /// The exponent of a weight scale that makes results about one.
    fn weight_exponent(self, k: usize) -> i8 {
        // The standard deviation of a product of two elements, with the integers below.
        let product: f32 = match self {
            Self::Bf16 => 24.0,
            Self::W8A8 => 4.0,
            Self::W4A4 => 16.0,
        };
        -(product * (k as f32).sqrt()).log2().floor() as i8 - INPUT_EXPONENT
    }

    /// Stored elements and block scales, pseudo-random by `seed`.
    fn elements(self, rows: usize, cols: usize, exponent: i8, seed: u64) -> (Vec<u8>, Vec<u8>) {
        let mut random = Random(seed);
        let len = rows * cols;
        match self {
            Self::Bf16 => {
                let unit = 2f32.powi(exponent.into());
                (DType::Bf16.encoded(&(0..len).map(|_| random.integer(8) * unit).collect::<Vec<_>>()), Vec::new())
            }
            Self::W8A8 => ((0..len).map(|_| formats::to_e4m3(random.integer(3))).collect(), Vec::new()),
            Self::W4A4 => {
                let codes = (0..len / 2).map(|_| random.below(256) as u8).collect();
                let scale = |_| formats::to_e4m3([0.5, 1.0, 1.5, 2.0][random.below(4)]);
                (codes, (0..nvfp4::scale_bytes(rows, cols)).map(scale).collect())
            }
        }
    }
}

/// A linear congruential generator.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }

    /// A random integer of at most this magnitude.
    pub fn integer(&mut self, most: usize) -> f32 {
        self.below(2 * most + 1) as f32 - most as f32
    }
}

/// The operands of all ops of one format and shape.
struct Operands {
    x: Tensor,
    layer: Linear,
    norm: QkNorm,
    rope: Rope,
    gate: Tensor,
}

/// Two results of an op: from the kernel under test and from the naive kernel.
type Results = [Tensor; 2];

struct Ops {
    shape: Shape,
    operands: Operands,
    linear: Results,
    gated: Results,
    /// SwiGLU into every format that a GEMM takes, by its name.
    swiglu: Vec<(&'static str, Results)>,
    heads: [Results; 3],
    mlp: Results,
}

fn twice(arena: &mut Arena, shape: Shape, stored: Stored) -> Result<Results> {
    Ok([arena.alloc_stored(shape.rows, shape.cols, stored)?, arena.alloc_stored(shape.rows, shape.cols, stored)?])
}

impl Ops {
    /// Allocates all tensors and fills the operands.
    fn new(cuda: &mut Cuda, format: Format, shape: Shape) -> Result<Self> {
        let Shape { rows, cols, k } = shape;
        let (mut weights, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        let (input, exponent) = (format.stored(INPUT_EXPONENT), format.weight_exponent(k));
        let weight = weights.alloc_stored(PARTS * cols, k, format.stored(exponent))?;
        let bias = weights.alloc(1, PARTS * cols, DType::F32)?;
        let [q, key] = [weights.alloc(1, HEAD_DIM, DType::F32)?, weights.alloc(1, HEAD_DIM, DType::F32)?];
        let x = arena.alloc_stored(rows, k, input)?;
        let (table, gate) = (arena.alloc(rows, HEAD_DIM, DType::F32)?, arena.alloc(1, cols, DType::Bf16)?);
        let plain = Stored::plain(DType::Bf16);
        let formats = cuda.gemm_formats();
        let stored = [
            ("bf16", Some(plain)),
            ("e4m3", formats.w8a8.then(|| Format::W8A8.stored(RESULT_E4M3))),
            ("NVFP4", formats.w4a4.then(|| Format::W4A4.stored(RESULT_NVFP4))),
        ];
        let stored = stored.into_iter().filter_map(|(name, stored)| Some((name, stored?)));
        let ops = Self {
            shape,
            operands: Operands {
                x,
                layer: Linear { input, ..Linear::new(weight, Some(bias)) },
                norm: QkNorm { q, k: key, eps: 1e-6 },
                rope: Rope { table, style: RopeStyle::Interleaved },
                gate,
            },
            linear: twice(&mut arena, shape, plain)?,
            gated: twice(&mut arena, shape, plain)?,
            swiglu: stored.map(|(name, stored)| Ok((name, twice(&mut arena, shape, stored)?))).collect::<Result<_>>()?,
            heads: [twice(&mut arena, shape, plain)?, twice(&mut arena, shape, plain)?, twice(&mut arena, shape, plain)?],
            mlp: twice(&mut arena, shape, plain)?,
        };
        cuda.reserve(Region::Weights, weights.peak())?;
        cuda.reserve(Region::Arena, arena.peak())?;
        ops.fill(cuda, format, exponent, bias)?;
        Ok(ops)
    }

    fn fill(&self, cuda: &mut Cuda, format: Format, exponent: i8, bias: Tensor) -> Result<()> {
        let Operands { x, layer, norm, rope, gate } = &self.operands;
        let mut random = Random(1);
        if let Some(weight) = layer.weight.single() {
            let (codes, scales) = format.elements(weight.rows, weight.cols, exponent, 2);
            let scaling = match weight.scaling {
                Scaling::Tensor(scale) => SliceScaling::Tensor(scale),
                Scaling::Blocks16 { tensor, .. } => {
                    SliceScaling::Blocks16 { scales: Bytes::new(Arc::new(scales)), tensor, layout: Nvfp4Layout::COMFY }
                }
                _ => SliceScaling::Unscaled,
            };
            let part = WeightSlice::plain(Bytes::new(Arc::new(codes)), format.dtype(), weight.rows);
            cuda.upload(weight, Role::Linear, &[WeightSlice { scaling, ..part }])?;
        }
        // Multiples of the unit of products.
        let unit = 2f32.powi(i32::from(exponent) + i32::from(INPUT_EXPONENT));
        let biases: Vec<f32> = (0..bias.cols).map(|_| random.integer(64) * unit).collect();
        let gains: Vec<f32> = (0..HEAD_DIM).map(|_| 1.0 + random.integer(8) / 16.0).collect();
        for (to, values) in [(bias, &biases), (norm.q, &gains), (norm.k, &gains)] {
            let bytes = Bytes::new(Arc::new(DType::F32.encoded(values)));
            cuda.upload(to, Role::Vector, &[WeightSlice::plain(bytes, DType::F32, 1)])?;
        }
        let (codes, scales) = format.elements(x.rows, x.cols, INPUT_EXPONENT, 3);
        for (to, bytes) in x.as_bytes().zip([codes, scales]) {
            cuda.write(to, &bytes.iter().map(|byte| f32::from(*byte)).collect::<Vec<_>>())?;
        }
        let half = HEAD_DIM / 2;
        let angle = |i: usize| ((i / HEAD_DIM + 1) as f32 * 0.37 * (1 + i % half) as f32).rem_euclid(std::f32::consts::TAU);
        let turn = |i: usize| if i % HEAD_DIM < half { angle(i).cos() } else { angle(i).sin() };
        cuda.write(rope.table, &(0..rope.table.len()).map(turn).collect::<Vec<_>>())?;
        cuda.write(*gate, &(0..gate.len()).map(|_| random.integer(3) / 2.0).collect::<Vec<_>>())?;
        // Both kernels add to the same residual.
        let residual: Vec<f32> = (0..self.gated[0].len()).map(|_| random.integer(128) / 32.0).collect();
        self.gated.iter().try_for_each(|to| cuda.write(*to, &residual))?;
        let results = [self.linear, self.mlp].into_iter().chain(self.heads).chain(self.swiglu.iter().map(|(_, r)| *r));
        results.flatten().try_for_each(|t| cuda.fill_with_nan(t))
    }

    /// Passes every op and its name to `run`, with the results of one of the two kernels.
    fn each(&self, which: usize, run: &mut dyn FnMut(&str, Op<'_>) -> Result<()>) -> Result<()> {
        let Operands { x, layer, norm, rope, gate } = self.operands;
        let cols = self.shape.cols;
        let unbiased = Linear { bias: None, ..layer };
        run("linear", Op::Linear(&[Gemm { out: self.linear[which], x, w: &layer.rows(0..cols) }]))?;
        for (name, results) in &self.swiglu {
            let w = unbiased.rows(cols..3 * cols);
            run(&format!("SwiGLU into {name}"), Op::LinearSwiglu(&[Gemm { out: results[which], x, w: &w }]))?;
        }
        let w = layer.rows(2 * cols..3 * cols);
        let gated = GatedGemm { into: self.gated[which], x, w: &w, gate: Some(gate) };
        run("gate and residual", Op::LinearGateResidual(&[gated]))?;
        let [q, k, v] = self.heads.map(|results| results[which]);
        let mlp = Some(self.mlp[which]);
        let (norm, q_scale, k_scale) = (Some(norm), 1.0, 1.0);
        run("QKV and MLP", Op::Qkv(&[Projection { x, w: &unbiased, norm, q_scale, k_scale, rope, q: Some(q), k, v, mlp }]))
    }

    /// What is wrong with the first wrong result.
    fn fault(&self, cuda: &mut Cuda) -> Result<Option<String>> {
        let swiglu = self.swiglu.iter().map(|(name, results)| (format!("SwiGLU into {name}"), *results, Agreement::Rounded));
        let [q, k, v] = self.heads;
        let all = [("linear", self.linear, Agreement::Exact), ("gate and residual", self.gated, Agreement::Exact)];
        let qkv = [("queries", q, Agreement::Heads), ("keys", k, Agreement::Heads), ("values", v, Agreement::Exact)];
        let mlp = [("MLP half", self.mlp, Agreement::Rounded)];
        let named = all.into_iter().chain(qkv).chain(mlp).map(|(name, results, how)| (name.to_owned(), results, how));
        for (name, [got, naive], agreement) in named.chain(swiglu) {
            if let Some(what) = difference(cuda, got, naive, agreement)? {
                return Ok(Some(format!("{name}: {what}")));
            }
        }
        Ok(None)
    }
}

/// Passes ops to a function one by one, with the results of one of the two kernels.
type Each<'a> = dyn Fn(usize, &mut dyn FnMut(&str, Op<'_>) -> Result<()>) -> Result<()> + 'a;

/// Runs ops with the best kernels and with the naive ones. Returns the files of the best kernels, or which op has no kernel but `naive`:
/// then there is nothing to compare.
pub fn run_both(cuda: &mut Cuda, naive: Kernel, each: &Each<'_>) -> Result<Result<String, String>> {
    let (mut files, mut alone) = (Vec::new(), None);
    each(0, &mut |name, op| {
        let before: Vec<(Kernel, u64)> = cuda.launched().collect();
        cuda.run(op)?;
        for ((kernel, _), _) in cuda.launched().zip(&before).filter(|((_, now), (_, then))| now > then) {
            if kernel == naive {
                alone.get_or_insert_with(|| format!("{name}: only the naive kernel computes it here"));
            }
            if !files.contains(&kernel.file()) {
                files.push(kernel.file());
            }
        }
        Ok(())
    })?;
    cuda.set_choice(KernelChoice::Naive);
    let done = each(1, &mut |_, op| cuda.run(op));
    cuda.set_choice(KernelChoice::Best);
    done?;
    Ok(alone.map_or_else(|| Ok(files.join(", ")), Err))
}

/// Tests all epilogues of a GEMM.
pub fn product(cuda: &mut Cuda, format: Format, shape: Shape) -> Result<Outcome> {
    if !cuda.gemm_formats().takes(format.dtype(), format.dtype()) {
        return Ok(Outcome::NotHere);
    }
    let ops = Ops::new(cuda, format, shape)?;
    match run_both(cuda, Kernel::NaiveGemm, &|which, run| ops.each(which, run))? {
        Err(why) => Ok(Outcome::Failed(why)),
        Ok(files) => Ok(ops.fault(cuda)?.map_or_else(|| Outcome::passed(files), Outcome::Failed)),
    }
}

/// How many places below its largest term a sum of e4m3 products keeps in a GEMM that does not promote. Each row of the result is 2^16 -
/// 2^16 + 2^(16 - n), with its own n.
pub fn sums_of_gemm(cuda: &mut Cuda) -> Result<Outcome> {
    const K: usize = 128;
    const LARGE: f32 = 256.0;
    // The powers of two that e4m3 has, from 2^8 to 2^-9. The largest and the smallest are the factors in the weight's columns.
    const POWERS: usize = 18;
    const FACTORS: [f32; 2] = [LARGE, 1.0 / 512.0];
    if !cuda.gemm_formats().w8a8 {
        return Ok(Outcome::NotHere);
    }
    let (mut weights, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    let stored = Stored::fp8(Scale::ONE);
    let (weight, x) = (weights.alloc_stored(HEAD_DIM, K, stored)?, arena.alloc_stored(POWERS, K, stored)?);
    let out = arena.alloc(POWERS, HEAD_DIM, DType::Bf16)?;
    cuda.reserve(Region::Weights, weights.peak())?;
    cuda.reserve(Region::Arena, arena.peak())?;
    let power = |row: usize| 2f32.powi(8 - row as i32);
    let rows = |rows: usize, small: &dyn Fn(usize) -> f32, sign: f32| -> Vec<f32> {
        let row = |row| [LARGE, sign * LARGE, small(row)].into_iter().chain(std::iter::repeat_n(0.0, K - 3));
        (0..rows).flat_map(row).collect()
    };
    let codes = DType::E4m3.encoded(&rows(HEAD_DIM, &|col| FACTORS[col % 2], -1.0));
    let part = WeightSlice::plain(Bytes::new(Arc::new(codes)), DType::E4m3, HEAD_DIM);
    cuda.upload(weight, Role::Linear, &[WeightSlice { scaling: SliceScaling::Tensor(Scale::ONE), ..part }])?;
    cuda.write(x, &rows(POWERS, &power, 1.0))?;
    cuda.set_fp8_accumulate(Fp8Accumulate::Fast);
    let done = cuda.run(Op::Linear(&[Gemm { out, x, w: &Linear { input: stored, ..Linear::new(weight, None) } }]));
    cuda.set_fp8_accumulate(Fp8Accumulate::Auto);
    done?;
    let mut got = vec![0.0; out.len()];
    cuda.read(out, &mut got)?;
    // From 2^15 on: down to 2^-1 with the larger factor, and farther with the smaller one.
    let place = |n: usize| if n < POWERS { (n, 0) } else { (n - POWERS + 1, 1) };
    let of = |n: usize| (got[place(n).0 * HEAD_DIM + place(n).1], power(place(n).0) * FACTORS[place(n).1]);
    let found: Vec<(f32, f32)> = (1..2 * POWERS - 1).map(of).collect();
    let published = if cuda.device().capability < (10, 0) { 13 } else { 25 };
    Ok(judge_places(kept(&found), found.len(), published))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No sum has more places than f32, and no FP8 sum has more than Hopper keeps. The test allows six times the standard deviation, in
    /// multiples of the unit of elements.
    #[test]
    fn sums_are_exact() {
        for (format, product, multiple, places) in
            [(Format::Bf16, 24.0, 1.0, 24), (Format::W8A8, 4.0, 1.0, 13), (Format::W4A4, 16.0, 1.0 / 16.0, 24)]
        {
            for k in [256.0, 640.0, 3072.0_f32] {
                let largest = 6.0 * product * k.sqrt() / multiple;
                assert!(largest < (1 << places) as f32, "{format:?}, {k}: {largest}");
            }
        }
    }

    #[test]
    fn elements_have_the_spread_that_scales_are_chosen_by() {
        for (format, product) in [(Format::Bf16, 24.0_f32), (Format::W8A8, 4.0), (Format::W4A4, 16.0)] {
            let (codes, scales) = format.elements(128, 64, 0, 7);
            let mut values = format.dtype().decoded(&codes);
            for (i, value) in values.iter_mut().enumerate().filter(|_| !scales.is_empty()) {
                *value *= formats::e4m3(scales[nvfp4::scale_offset(i / 64, i % 64 / nvfp4::BLOCK, 1)]);
            }
            let square = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
            assert!((square / product - 1.0).abs() < 0.1, "{format:?}: {square}");
        }
    }
}
