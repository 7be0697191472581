//! Tensors so large that 32-bit offsets wrap around. The last rows of the whole must equal the same rows computed alone, bit for bit.

use super::cuda;
use kiln::internals::backend::cuda::{Cuda, KernelChoice};
use kiln::internals::backend::{Backend, Conv, Gemm, GroupNorm, KvSegment, Linear, Modulated, Op, Role, Sampling, Softmax};
use kiln::internals::tensor::{Arena, Bytes, DType, Region, Tensor, WeightSlice};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// More rows than the longest sequence. With these columns there are more elements than a signed 32-bit number can count.
const ROWS: usize = 59_000;
const COLS: usize = 36_864;

fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn last(t: Tensor, rows: usize) -> Tensor {
    t.rows(t.rows - rows..t.rows)
}

/// Runs an op on everything and on the last rows alone, and compares the last rows.
fn same(be: &mut dyn Backend, name: &str, whole: Op<'_>, alone: Op<'_>, results: (Tensor, Tensor)) {
    be.run(whole).unwrap();
    be.run(alone).unwrap();
    let [mut a, mut b] = [results.0, results.1].map(|t| vec![0.0; t.len()]);
    be.read(results.0, &mut a).unwrap();
    be.read(results.1, &mut b).unwrap();
    assert!(b.iter().all(|v| v.is_finite()), "{name}: not finite");
    assert!(b.iter().any(|v| *v != b[0]), "{name}: all values are the same");
    assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}: the last rows differ");
}

pub fn last_rows_are_right() {
    rows_of_two_dimensions();
    long_attention();
    pixels();
}

/// Compares the last rows of long sequences with the naive kernel on those rows alone. The square of one of the lengths exceeds a signed
/// 32-bit number. The naive kernel adds in another order, so the results agree to the precision of bf16.
fn long_attention() {
    let (d, heads, rows) = (128, 2, 3);
    for tokens in [46_341, 52_000] {
        let mut cuda = cuda();
        let mut arena = Arena::new(Region::Arena);
        let [q, k, v, out] = std::array::from_fn(|_| arena.alloc(tokens, heads * d, DType::Bf16).unwrap());
        let alone = arena.alloc(rows, heads * d, DType::Bf16).unwrap();
        cuda.reserve(Region::Arena, arena.peak()).unwrap();
        let scale = 1.0 / (d as f32).sqrt();
        // Q is scaled by log2(e) / sqrt(d). Logits are exponents of two and at most 4 sqrt(d) log2(e).
        for (t, seed, scale) in [(q, 1, 4.0 * LOG2_E * scale), (k, 2, 1.0), (v, 3, 1.0)] {
            let values: Vec<f32> = noise(t.len(), seed).into_iter().map(|v| scale * v).collect();
            cuda.write(t, &values).unwrap();
        }
        let kv = [KvSegment { k, v }];
        let (alone, out) = ([alone], [out]);
        let attention = |out, q, bound| {
            let softmax = Softmax::Base2 { bound };
            Op::Attention { out, q, kv: &kv, head_dim: d, causal: false, softmax }
        };
        let read = |cuda: &mut Cuda, t: Tensor| {
            let mut values = vec![0.0; t.len()];
            cuda.read(t, &mut values).unwrap();
            values
        };
        cuda.set_choice(KernelChoice::Naive);
        cuda.run(attention(&alone, last(q, rows), f32::INFINITY)).unwrap();
        let want = read(&mut cuda, alone[0]);
        cuda.set_choice(KernelChoice::Best);
        for bound in [f32::INFINITY, 4.0 * LOG2_E * (d as f32).sqrt()] {
            cuda.run(attention(&out, q, bound)).unwrap();
            let got = read(&mut cuda, last(out[0], rows));
            let square = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v) * f64::from(v)).sum::<f64>();
            let error = square(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / square(&mut want.iter().copied());
            // Both results are rounded once.
            assert!(error.sqrt() <= 2.0f64.powi(-8), "{tokens} tokens, bound {bound}: {:.1e}", error.sqrt());
        }
    }
}

fn rows_of_two_dimensions() {
    let mut cuda = cuda();
    let be: &mut dyn Backend = &mut cuda;
    let (mut region, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    be.reserve(Region::Weights, 64 << 20).unwrap();
    let k = 16;
    let weight = region.alloc(COLS, k, DType::Bf16).unwrap();
    let bytes: Vec<u8> = noise(weight.len(), 5).into_iter().flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect();
    be.upload(weight, Role::Linear, &[WeightSlice::plain(Bytes::new(Arc::new(bytes)), DType::Bf16, weight.rows)]).unwrap();
    for dtype in [DType::Bf16, DType::F32] {
        arena.reset(0);
        let mut place = |rows, cols, dtype| arena.alloc(rows, cols, dtype).unwrap();
        let (x, out) = (place(ROWS, COLS, dtype), place(ROWS, COLS, dtype));
        let (row, shift, scale) = (place(1, COLS, dtype), place(1, COLS, DType::F32), place(1, COLS, DType::F32));
        let (narrow, norm) = (place(ROWS, k, dtype), place(1, COLS, DType::F32));
        be.reserve(Region::Arena, arena.peak()).unwrap();
        be.write(last(x, 1), &noise(COLS, 1)).unwrap();
        for (t, seed) in [(shift, 2), (scale, 3), (norm, 4)] {
            be.write(t, &noise(COLS, seed)).unwrap();
        }
        be.write(narrow, &noise(narrow.len(), 6)).unwrap();
        let end = last(x, 1);
        let results = (last(out, 1), row);
        same(be, "copy", Op::Copy { out, x }, Op::Copy { out: row, x: end }, results);
        same(be, "silu", Op::Silu { out, x }, Op::Silu { out: row, x: end }, results);
        let rms = |out, x| Op::RmsNorm { out, x, weight: norm, eps: 1e-6 };
        same(be, "rms_norm", rms(out, x), rms(row, end), results);
        let [whole, alone] = [(out, x), (row, end)].map(|(out, x)| [Modulated { out, x, shift, scale }]);
        let ln = |streams| Op::LayerNormModulate { streams, eps: 1e-6 };
        same(be, "layer_norm", ln(&whole), ln(&alone), results);
        let w = Linear::new(weight, None);
        let [whole, alone] = [(out, narrow), (row, last(narrow, 1))].map(|(out, x)| [Gemm { out, x, w: &w }]);
        same(be, "linear", Op::Linear(&whole), Op::Linear(&alone), results);
        // Keys and values are at the end of the large buffers, queries all over them.
        be.write(last(x, 7), &noise(7 * COLS, 7)).unwrap();
        be.write(last(out, 7), &noise(7 * COLS, 8)).unwrap();
        let (d, heads) = (128, COLS - 128..COLS);
        let kv = [KvSegment { k: last(x, 5).cols(heads.clone()), v: last(x, 5).cols(0..d) }];
        let softmax = Softmax::Natural { scale: 0.1 };
        let attention = |out, q| Op::Attention { out, q, kv: &kv, head_dim: d, causal: false, softmax };
        let (q, o, alone) = (out.cols(heads.clone()), out.cols(d..2 * d), row.cols(0..d));
        same(be, "attention", attention(&[o], q), attention(&[alone], last(q, 1)), (last(o, 1), alone));
    }
}

/// Checks an image of exactly 2^31 values, and the convolution that reads it.
fn pixels() {
    let mut cuda = cuda();
    let be: &mut dyn Backend = &mut cuda;
    let (side, channels, rows) = (4096, 128, 3);
    let (mut region, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    be.reserve(Region::Weights, 1 << 20).unwrap();
    let (weight, bias) = (region.alloc(8, 9 * channels, DType::Bf16).unwrap(), region.alloc(1, 8, DType::F32).unwrap());
    let bytes: Vec<u8> = noise(weight.len(), 5).into_iter().flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect();
    be.upload(weight, Role::Conv, &[WeightSlice::plain(Bytes::new(Arc::new(bytes)), DType::Bf16, weight.rows)]).unwrap();
    be.upload(bias, Role::Vector, &[WeightSlice::plain(Bytes::new(Arc::new(vec![0; 32])), DType::F32, 1)]).unwrap();
    let mut place = |rows, cols, dtype| arena.alloc(rows, cols, dtype).unwrap();
    let (x, out) = (place(side * side, channels, DType::Bf16), place(side * side, channels, DType::Bf16));
    let (few, strip) = (place(side * side, 8, DType::Bf16), place(rows * side, 8, DType::Bf16));
    let alone = place(rows * side, channels, DType::Bf16);
    let (vector, stats) = (place(1, channels, DType::F32), place(32, 2, DType::F32));
    be.reserve(Region::Arena, arena.peak()).unwrap();
    be.write(last(x, (rows + 1) * side), &noise((rows + 1) * side * channels, 1)).unwrap();
    be.write(vector, &noise(channels, 2)).unwrap();
    be.write(stats, &noise(64, 3).iter().map(|v| v.abs() + 0.1).collect::<Vec<_>>()).unwrap();
    let norm = GroupNorm { weight: vector, bias: vector, groups: 32, eps: 1e-6 };
    let group = |out, x| Op::GroupNorm { out, x, norm: &norm, stats: Some(stats), silu: true };
    same(be, "group_norm", group(out, x), group(alone, last(x, rows * side)), (last(out, rows * side), alone));
    // The strip's first row has no row above it, so the comparison leaves it out.
    let w = Conv { weight, bias };
    let (width, sampling, residual, shortcut, stats) = (side, Sampling::Same, None, None, None);
    let conv = |out, x, height| Op::Conv { out, x, w: &w, width, height, sampling, residual, shortcut, stats };
    let keep = (rows - 1) * side;
    same(be, "conv", conv(few, x, side), conv(strip, last(x, rows * side), rows), (last(few, keep), last(strip, keep)));
}
