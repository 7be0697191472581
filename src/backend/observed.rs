//! A backend with an observer that watches, or changes, its ops, uploads and transfers.

use super::{Backend, GemmFormats, Op, Role, StepKey, cuda};
use crate::error::Result;
use crate::tensor::{Region, Tensor, WeightSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Callbacks that run in place of a backend. Each has to call the backend itself, and may do anything before and after.
pub trait Observer<B: Backend + ?Sized> {
    /// The quantized GEMMs that models may use.
    fn gemm_formats(&self, be: &B) -> GemmFormats {
        be.gemm_formats()
    }

    /// Bytes of working memory to allocate for ops that use `bytes`.
    fn working_bytes(&mut self, bytes: u64) -> u64 {
        bytes
    }

    /// Uploads a weight.
    fn upload(&mut self, be: &mut B, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()> {
        be.upload(to, role, parts)
    }

    /// Writes host values.
    fn write(&mut self, be: &mut B, to: Tensor, values: &[f32]) -> Result<()> {
        be.write(to, values)
    }

    /// Reads a tensor back.
    fn read(&mut self, be: &mut B, from: Tensor, to: &mut [f32]) -> Result<()> {
        be.read(from, to)
    }

    /// Runs an op.
    fn run(&mut self, be: &mut B, op: Op<'_>) -> Result<()> {
        be.run(op)
    }

    /// Called when a step begins.
    fn begin_step(&mut self, _be: &mut B) -> Result<()> {
        Ok(())
    }

    /// Called when a step has ended, with its result.
    fn end_step(&mut self, _be: &mut B, done: Result<()>) -> Result<()> {
        done
    }
}

/// A function that runs ops observes only ops.
impl<B: Backend + ?Sized, F: FnMut(&mut B, Op<'_>) -> Result<()>> Observer<B> for F {
    fn run(&mut self, be: &mut B, op: Op<'_>) -> Result<()> {
        self(be, op)
    }
}

/// A backend with its observer.
pub struct Observed<B: ?Sized, O> {
    /// The backend that runs the ops.
    pub inner: Box<B>,
    /// The observer, which is called in the backend's place.
    pub observer: O,
}

impl<B: Backend + ?Sized, O: Observer<B>> Observed<B, O> {
    /// Wraps a backend in an observer.
    pub fn new(inner: Box<B>, observer: O) -> Self {
        Self { inner, observer }
    }
}

impl<B: Backend + ?Sized, O: Observer<B>> Backend for Observed<B, O> {
    fn name(&self) -> &'static str {
        "observed"
    }

    fn gemm_formats(&self) -> GemmFormats {
        self.observer.gemm_formats(&self.inner)
    }

    fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.inner.set_cancel(cancel);
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()> {
        self.observer.upload(&mut self.inner, to, role, parts)
    }

    fn available(&self) -> Result<Option<u64>> {
        self.inner.available()
    }

    fn reads_files(&self) -> bool {
        self.inner.reads_files()
    }

    fn reserve(&mut self, region: Region, bytes: u64) -> Result<()> {
        let bytes = if region == Region::Arena { self.observer.working_bytes(bytes) } else { bytes };
        self.inner.reserve(region, bytes)
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        self.observer.write(&mut self.inner, to, values)
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        self.observer.read(&mut self.inner, from, to)
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        self.inner.read_bytes(from, to)
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        self.observer.run(&mut self.inner, op)
    }

    fn released(&mut self, range: Range<u64>) {
        self.inner.released(range);
    }

    /// Runs the ops of a step without capturing them, so that the observer sees each op every time.
    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        self.observer.begin_step(&mut self.inner)?;
        let done = body(self);
        self.observer.end_step(&mut self.inner, done)
    }

    fn take_saturated(&mut self) -> Result<u64> {
        self.inner.take_saturated()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }

    fn cuda(&mut self) -> Option<&mut cuda::Cuda> {
        self.inner.cuda()
    }
}
