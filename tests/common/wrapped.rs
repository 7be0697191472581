//! A backend that forwards everything to another one, in most tests the CPU backend, with hooks to observe or change results after
//! each op.

use kiln::error::Result;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, GemmFormats, Op, Role, StepKey};
use kiln::internals::tensor::{Tensor, WeightPart};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Called after op number `usize` with the op and the backend that ran it.
pub type AfterOp<B = Cpu> = Box<dyn FnMut(usize, Op<'_>, &mut B) -> Result<()>>;

/// Called in place of an op, which it may run, or another one.
pub type Instead<B = Cpu> = Box<dyn FnMut(Op<'_>, &mut B) -> Result<()>>;

/// Called before host data is written, and may change it.
pub type BeforeWrite = Box<dyn FnMut(Tensor, &mut Vec<f32>)>;

pub struct Wrapped<B = Cpu> {
    pub inner: B,
    pub instead: Instead<B>,
    pub after_op: AfterOp<B>,
    pub before_write: BeforeWrite,
    formats: GemmFormats,
    ops: usize,
}

impl<B: Backend> Wrapped<B> {
    pub fn new(inner: B) -> Self {
        let formats = inner.gemm_formats();
        let instead: Instead<B> = Box::new(|op, inner| inner.run(op));
        Self { inner, instead, after_op: Box::new(|_, _, _| Ok(())), before_write: Box::new(|_, _| ()), formats, ops: 0 }
    }

    pub fn instead(inner: B, instead: impl FnMut(Op<'_>, &mut B) -> Result<()> + 'static) -> Self {
        Self { instead: Box::new(instead), ..Self::new(inner) }
    }

    pub fn after_op(inner: B, after_op: impl FnMut(usize, Op<'_>, &mut B) -> Result<()> + 'static) -> Self {
        Self { after_op: Box::new(after_op), ..Self::new(inner) }
    }

    pub fn before_write(inner: B, before_write: impl FnMut(Tensor, &mut Vec<f32>) + 'static) -> Self {
        Self { before_write: Box::new(before_write), ..Self::new(inner) }
    }

    /// The same with these quantised GEMMs only.
    pub fn with_formats(self, formats: GemmFormats) -> Self {
        Self { formats, ..self }
    }
}

impl<B: Backend> Backend for Wrapped<B> {
    fn name(&self) -> &'static str {
        "wrapped"
    }

    fn gemm_formats(&self) -> GemmFormats {
        self.formats
    }

    fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.inner.set_cancel(cancel);
    }

    fn reserve_weights(&mut self, bytes: u64) -> Result<()> {
        self.inner.reserve_weights(bytes)
    }

    fn reads_files(&self) -> bool {
        self.inner.reads_files()
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightPart]) -> Result<()> {
        self.inner.upload(to, role, parts)
    }

    fn reserve_kept(&mut self, bytes: u64) -> Result<()> {
        self.inner.reserve_kept(bytes)
    }

    fn reserve_adapters(&mut self, bytes: u64) -> Result<()> {
        self.inner.reserve_adapters(bytes)
    }

    fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.inner.reserve(bytes)
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        let mut values = values.to_vec();
        (self.before_write)(to, &mut values);
        self.inner.write(to, &values)
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        self.inner.read(from, to)
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        self.inner.read_bytes(from, to)
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        (self.instead)(op, &mut self.inner)?;
        (self.after_op)(self.ops, op, &mut self.inner)?;
        self.ops += 1;
        Ok(())
    }

    fn released(&mut self, range: Range<u64>) {
        self.inner.released(range);
    }

    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        body(self)
    }

    fn take_saturated(&mut self) -> Result<u64> {
        self.inner.take_saturated()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}
