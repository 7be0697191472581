//! Compares the results of two kernels. The permitted difference follows from their arithmetic alone.

use crate::backend::Backend;
use crate::backend::cuda::Cuda;
use crate::error::Result;
use crate::tensor::{Scaling, Tensor, nvfp4};

/// How far two results computed from the same operands may be apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Not at all: with these operands, everything before the last rounding is exact.
    Exact,
    /// By one step of the format, and in few values: arithmetic before the last rounding has the precision of f32.
    Rounded,
    /// Heads after qk-norm and RoPE, with pairs of adjacent elements. The naive kernel also rounds them to bf16 before that.
    Heads,
}

/// One in this many values may differ if only f32 arithmetic differs. Its error, below 2^-18 of a value, moves one in 2^9 across the middle
/// between two values of bf16, the finest of the formats. This is four times as many.
const SHARE: usize = 128;

/// How far heads may be apart after rounding products and normalized heads to bf16, relative to a pair of a head. Each kernel rounds the
/// result once. The naive kernel also rounds the pair and its divisor before.
const HEADS: f32 = 4.5 / 512.0;

/// The values of a tensor, and for each its largest distance to the format's neighboring values.
fn values(cuda: &mut Cuda, t: Tensor) -> Result<(Vec<f32>, Vec<f32>)> {
    let mut values = vec![0.0; t.len()];
    cuda.read(t, &mut values)?;
    let steps = match t.scaling {
        Scaling::Blocks16 { .. } => {
            // The largest magnitude of a block has the largest code, six, and the next code is four. A block whose scale was rounded the
            // other way has other values between them.
            let largest = |block: &[f32]| block.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
            values.chunks(nvfp4::BLOCK).flat_map(|block| vec![largest(block) / 3.0; block.len()]).collect()
        }
        Scaling::Tensor(scale) => values.iter().map(|v| (v.abs() / 8.0).max(scale.get() / 512.0)).collect(),
        _ => values.iter().map(|v| v.abs() / 128.0).collect(),
    };
    Ok((values, steps))
}

/// What is wrong with a result, compared with the result of a naive kernel.
pub fn difference(cuda: &mut Cuda, got: Tensor, naive: Tensor, agreement: Agreement) -> Result<Option<String>> {
    let ((found, steps), (wanted, naive_steps)) = (values(cuda, got)?, values(cuda, naive)?);
    if wanted.iter().all(|value| *value == wanted[0]) {
        // Two kernels that do nothing also agree.
        return Ok(Some(format!("all values of the naive kernel are {}", wanted[0])));
    }
    let place = |i: usize| format!("[{}, {}] of [{}, {}]", i / got.cols, i % got.cols, got.rows, got.cols);
    let allowed = |i: usize| match agreement {
        Agreement::Exact => 0.0,
        Agreement::Rounded => steps[i].max(naive_steps[i]),
        Agreement::Heads => HEADS * wanted[i & !1].hypot(wanted[i | 1]),
    };
    // NaN exceeds every limit.
    let is_wrong = |&i: &usize| (found[i] - wanted[i]).abs().partial_cmp(&allowed(i)).is_none_or(std::cmp::Ordering::is_gt);
    if let Some(i) = (0..found.len()).find(is_wrong) {
        let count = (0..found.len()).filter(is_wrong).count();
        let limit = if agreement == Agreement::Exact { String::new() } else { format!(" within {:.1e}", allowed(i)) };
        let (found, wanted) = (found[i], wanted[i]);
        return Ok(Some(format!("{} is {found}, not {wanted}{limit}; {count} are wrong", place(i))));
    }
    let differ = found.iter().zip(&wanted).filter(|(a, b)| a != b).count();
    let few = agreement != Agreement::Rounded || differ <= found.len() / SHARE;
    Ok((!few).then(|| format!("{differ} of {} values differ by a rounding, more than f32 arithmetic explains", found.len())))
}
