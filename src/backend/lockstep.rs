//! Runs two backends in lockstep: every op runs on both and the results are compared. The trusted result then replaces the other one, so a
//! difference is reported at the op that caused it and rounding differences do not accumulate.

use super::cuda::Cuda;
use super::{Access, Backend, GemmFormats, Op, Role, StepKey};
use crate::error::{Error, Result};
use crate::tensor::{DType, Region, Scaling, Tensor, WeightSlice, nvfp4};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A trusted backend and one under test.
pub struct Lockstep<A, B> {
    trusted: A,
    tested: B,
    ops: usize,
    /// Largest relative L2 difference that passes, by the dtype of the result.
    limit: fn(DType) -> f64,
}

/// How far two correct implementations of one op may differ. In f32 the order of accumulation differs. In other types each result is
/// rounded once, by at most half a unit in the last place (2^-9 in bf16), so two results differ by at most twice that.
fn default_limit(dtype: DType) -> f64 {
    dtype.format().mantissa.map_or(1e-5, |bits| 2.0 * f64::from(-bits - 2).exp2())
}

/// The first element of a quantized result that no two correct implementations could disagree on so much. Both round by half a step at
/// most. The values that they round differ at most by a bf16 rounding, inside of the op, of the row's largest value. Without this check,
/// single wrong codes would pass the limit on the whole result, which has to allow for every rounding.
fn wrong_element(out: Tensor, want: &[f32], got: &[f32]) -> Option<usize> {
    // The largest step relative to the largest value of this many columns, and an absolute step for subnormal scales or elements.
    let subnormal = (-9.0_f32).exp2();
    let (share, relative, absolute) = match (out.dtype, out.scaling) {
        (DType::E2m1, Scaling::Blocks16 { tensor, .. }) => (nvfp4::BLOCK, 1.0 / 3.0, 6.0 * subnormal * tensor.get()),
        (DType::E4m3, Scaling::Tensor(scale)) => (1, 1.0 / 8.0, subnormal * scale.get()),
        (DType::E4m3, Scaling::Unscaled) => (1, 1.0 / 8.0, subnormal),
        _ => return None,
    };
    let largest = |values: &[f32]| values.iter().fold(0.0, |most: f32, v| most.max(v.abs()));
    let inner = default_limit(DType::Bf16) as f32;
    (0..want.len()).find(|&i| {
        let (row, group) = (i / out.cols * out.cols, i / share * share);
        let both = |range: Range<usize>| largest(&want[range.clone()]).max(largest(&got[range]));
        let allowed = || relative * both(group..group + share) + absolute + inner * both(row..row + out.cols);
        want[i].to_bits() != got[i].to_bits() && (want[i] - got[i]).abs() > allowed()
    })
}

impl<A: Backend, B: Backend> Lockstep<A, B> {
    /// Compares `tested` with `trusted`.
    pub fn new(trusted: A, tested: B) -> Self {
        Self { trusted, tested, ops: 0, limit: default_limit }
    }

    /// Number of ops compared so far.
    pub fn ops(&self) -> usize {
        self.ops
    }

    fn compare(&mut self, op: &'static str, out: Tensor, limit: f64) -> Result<()> {
        let (mut want, mut got) = (vec![0.0; out.len()], vec![0.0; out.len()]);
        self.trusted.read(out, &mut want)?;
        self.tested.read(out, &mut got)?;
        let (mut difference, mut norm, mut worst) = (0.0_f64, 0.0_f64, (0, 0.0_f64));
        for (i, (&w, &g)) in want.iter().zip(&got).enumerate() {
            // Bits are compared first: two equal infinities are no difference, but subtracting them gives NaN.
            let delta = if w.to_bits() == g.to_bits() { 0.0 } else { (f64::from(w) - f64::from(g)).abs() };
            let delta = if delta.is_nan() { f64::INFINITY } else { delta };
            difference += delta * delta;
            norm += f64::from(w) * f64::from(w);
            if delta > worst.1 {
                worst = (i, delta);
            }
        }
        let relative = (difference / norm.max(f64::MIN_POSITIVE)).sqrt();
        let wrong = wrong_element(out, &want, &got);
        if difference > 0.0 && (relative.is_nan() || relative > limit || wrong.is_some()) {
            let (i, cols) = (wrong.unwrap_or(worst.0), out.cols.max(1));
            return Err(Error::Lockstep {
                index: self.ops,
                op,
                left: self.trusted.name(),
                right: self.tested.name(),
                detail: format!(
                    "[{}, {}]: relative difference {relative:.3e}, allowed {limit:.1e}; worst at [{}, {}]: {} {} and {} {}",
                    out.rows,
                    out.cols,
                    i / cols,
                    i % cols,
                    self.trusted.name(),
                    want[i],
                    self.tested.name(),
                    got[i]
                ),
            });
        }
        if !out.dtype.is_quantized() {
            return self.tested.write(out, &want);
        }
        // Encoding decoded values again may give different blocks, so bytes are copied.
        for view in out.as_bytes() {
            let mut bytes = vec![0; view.len()];
            self.trusted.read_bytes(view, &mut bytes)?;
            self.tested.write(view, &bytes.iter().map(|&byte| f32::from(byte)).collect::<Vec<_>>())?;
        }
        Ok(())
    }
}

impl<A: Backend, B: Backend> Backend for Lockstep<A, B> {
    fn name(&self) -> &'static str {
        "lockstep"
    }

    fn gemm_formats(&self) -> GemmFormats {
        self.trusted.gemm_formats().and(self.tested.gemm_formats())
    }

    fn available(&self) -> Result<Option<u64>> {
        self.tested.available()
    }

    fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.trusted.set_cancel(cancel.clone());
        self.tested.set_cancel(cancel);
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()> {
        self.trusted.upload(to, role, parts)?;
        self.tested.upload(to, role, parts)
    }

    fn reads_files(&self) -> bool {
        self.trusted.reads_files() || self.tested.reads_files()
    }

    fn reserve(&mut self, region: Region, bytes: u64) -> Result<()> {
        self.trusted.reserve(region, bytes)?;
        self.tested.reserve(region, bytes)
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        self.trusted.write(to, values)?;
        self.tested.write(to, values)
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        self.trusted.read(from, to)
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        self.trusted.read_bytes(from, to)
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        self.trusted.run(op)?;
        self.tested.run(op)?;
        let mut results = Vec::new();
        op.operands(&mut |t, access| {
            if access != Access::Read {
                results.push(t);
            }
        });
        // Statistics are computed from the stored result, so the limit of the result's dtype applies to them as well.
        let mut limit = results.iter().map(|t| (self.limit)(t.dtype)).fold(0.0, f64::max);
        // A fused kernel may round the normalized image to the type of its input before the multiplication.
        if let Op::NormConv { x, .. } = op {
            limit = limit.max((self.limit)(x.dtype));
        }
        for out in results {
            self.compare(op.name(), out, limit)?;
        }
        self.ops += 1;
        Ok(())
    }

    fn released(&mut self, range: Range<u64>) {
        self.trusted.released(range.clone());
        self.tested.released(range);
    }

    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        body(self)
    }

    /// Values next to the limit may be counted by one of the two only, so the counts are not compared.
    fn take_saturated(&mut self) -> Result<u64> {
        let trusted = self.trusted.take_saturated()?;
        self.tested.take_saturated()?;
        Ok(trusted)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.trusted.synchronize()?;
        self.tested.synchronize()
    }

    fn cuda(&mut self) -> Option<&mut Cuda> {
        self.tested.cuda()
    }
}
