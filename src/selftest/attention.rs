//! Tests attention against the naive kernel on the same GPU.

use super::Outcome;
use super::gemms::{Random, run_both};
use crate::backend::cuda::{Cuda, Kernel};
use crate::backend::{Backend, KvSegment, Op, Softmax};
use crate::error::Result;
use crate::tensor::{Arena, DType, Region, Scale, Stored, Tensor};

const HEAD_DIM: usize = 128;

/// Size of an attention op.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Number of queries, which is also the number of keys.
    pub tokens: usize,
    /// Number of heads, each of 128.
    pub heads: usize,
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tokens, {} heads", self.tokens, self.heads)
    }
}

/// How far results may be apart, relative to their norm. Each kernel rounds its result to bf16 once, and the kernel under test also rounds
/// its probabilities. A rounding is at most 2^-9 and 2^-9 / sqrt(3) in the mean. Three of them are 2^-9, and this is twice that.
const LIMIT: f64 = 1.0 / 256.0;
/// How far a head of a query may be apart, where nothing averages: relative to the largest norm of a value.
const HEAD_LIMIT: f64 = 1.0 / 256.0;

fn values(cuda: &mut Cuda, t: Tensor) -> Result<Vec<f32>> {
    let mut values = vec![0.0; t.len()];
    cuda.read(t, &mut values)?;
    Ok(values)
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

/// The first fault of a result, if it has one.
fn fault(got: &[f32], naive: &[f32], largest_value: f64, cols: usize) -> Option<String> {
    if naive.iter().all(|value| *value == naive[0]) {
        // Two kernels that do nothing also agree.
        return Some(format!("all values of the naive kernel are {}", naive[0]));
    }
    let difference = |(a, b): (&f32, &f32)| f64::from(*a) - f64::from(*b);
    let (heads, naive_heads) = (got.as_chunks::<HEAD_DIM>().0, naive.as_chunks::<HEAD_DIM>().0);
    for (i, (got, naive)) in heads.iter().zip(naive_heads).enumerate() {
        let error = norm(got.iter().zip(naive).map(difference));
        let limit = HEAD_LIMIT * (largest_value + norm(naive.iter().map(|v| f64::from(*v))));
        // NaN exceeds every limit.
        if error.partial_cmp(&limit).is_none_or(std::cmp::Ordering::is_gt) {
            let (query, head) = (i * HEAD_DIM / cols, i * HEAD_DIM % cols / HEAD_DIM);
            return Some(format!("query {query}, head {head} is off by {error:.1e}, more than {limit:.1e}"));
        }
    }
    let error = norm(got.iter().zip(naive).map(difference)) / norm(naive.iter().map(|v| f64::from(*v)));
    (error > LIMIT).then(|| format!("relative error {error:.1e}, more than {LIMIT:.1e}"))
}

/// Attention of one size, with queries and keys of bf16 or e4m3.
pub fn attention(cuda: &mut Cuda, heads: DType, size: Size) -> Result<Outcome> {
    if !cuda.gemm_formats().takes_heads(heads) {
        return Ok(Outcome::NotHere);
    }
    let (mut arena, cols) = (Arena::new(Region::Arena), size.heads * HEAD_DIM);
    let stored = Stored::scaled(heads, Scale::ONE);
    let [q, k] = [arena.alloc_stored(size.tokens, cols, stored)?, arena.alloc_stored(size.tokens, cols, stored)?];
    let v = arena.alloc(size.tokens, cols, DType::Bf16)?;
    let out = [arena.alloc(size.tokens, cols, DType::Bf16)?, arena.alloc(size.tokens, cols, DType::Bf16)?];
    cuda.reserve(Region::Arena, arena.peak())?;
    let mut random = Random(4);
    // Multiples of an eighth, which both types can store. Logits are exponents of two of up to about eight.
    for t in [q, k, v] {
        let values: Vec<f32> = (0..t.len()).map(|_| random.integer(7) / 8.0).collect();
        cuda.write(t, &values)?;
    }
    let mut kernels = Vec::new();
    // No logit is larger than the product of the largest norms, 128 times (7 / 8)^2. The infinite bound selects the kernels for unbounded
    // logits.
    for bound in [98.0, f32::INFINITY] {
        out.iter().try_for_each(|t| cuda.fill_with_nan(*t))?;
        let softmax = if bound.is_finite() { "max-free softmax" } else { "online softmax" };
        let each = |which: usize, run: &mut dyn FnMut(&str, Op<'_>) -> Result<()>| {
            let (out, kv) = ([out[which]], [KvSegment { k, v }]);
            let op =
                Op::Attention { out: &out, q, kv: &kv, head_dim: HEAD_DIM, causal: false, softmax: Softmax::Base2 { bound } };
            run(softmax, op)
        };
        match run_both(cuda, Kernel::NaiveAttention, &each)? {
            Err(why) => return Ok(Outcome::Failed(why)),
            Ok(files) => kernels.push(files),
        }
        let (got, naive) = (values(cuda, out[0])?, values(cuda, out[1])?);
        let largest = (7.0 / 8.0) * (HEAD_DIM as f64).sqrt();
        if let Some(fault) = fault(&got, &naive, largest, cols) {
            return Ok(Outcome::Failed(format!("{softmax}: {fault}")));
        }
    }
    kernels.dedup();
    Ok(Outcome::passed(kernels.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_head_is_found_among_many() {
        let naive: Vec<f32> = (0..512 * 2 * HEAD_DIM).map(|i| ((i * 7919) % 201) as f32 / 1000.0 - 0.1).collect();
        let mut got = naive.clone();
        got.iter_mut().for_each(|v| *v *= 1.0 + 1.0 / 512.0);
        assert_eq!(fault(&got, &naive, 10.0, 256), None);
        got[300 * 256 + 128..][..128].reverse();
        assert!(fault(&got, &naive, 10.0, 256).unwrap().starts_with("query 300, head 1 is off by "));
        got[0] = f32::NAN;
        assert!(fault(&got, &naive, 10.0, 256).unwrap().starts_with("query 0, head 0 is off by NaN"));
        let scaled: Vec<f32> = naive.iter().map(|v| v * 1.01).collect();
        assert!(fault(&scaled, &naive, 10.0, 256).unwrap().starts_with("relative error 1.0e-2"));
    }
}
