//! Loads all kernels of a job before its first op runs. A missing kernel is noticed then and not in the middle of an image, and no kernel
//! is loaded while others run.

use super::Cuda;
use crate::backend::{Backend, GemmFormats, Op, Role, StepKey};
use crate::error::Result;
use crate::tensor::{Tensor, WeightSlice};
use std::collections::HashSet;
use std::ops::Range;

/// A GPU on which nothing runs: ops only find their kernels.
pub struct KernelPreload<'a> {
    cuda: &'a mut Cuda,
    /// Steps that have been gone through. A later step with the same key would have the same ops, and is skipped.
    steps: HashSet<StepKey>,
}

impl<'a> KernelPreload<'a> {
    pub fn new(cuda: &'a mut Cuda) -> Self {
        Self { cuda, steps: HashSet::new() }
    }
}

impl Backend for KernelPreload<'_> {
    fn name(&self) -> &'static str {
        self.cuda.name()
    }

    fn gemm_formats(&self) -> GemmFormats {
        self.cuda.gemm_formats()
    }

    fn reads_files(&self) -> bool {
        self.cuda.reads_files()
    }

    fn upload(&mut self, _to: Tensor, _role: Role, _parts: &[WeightSlice]) -> Result<()> {
        Ok(())
    }

    fn write(&mut self, to: Tensor, _values: &[f32]) -> Result<()> {
        self.cuda.live.touch(to);
        Ok(())
    }

    fn read(&mut self, _from: Tensor, _to: &mut [f32]) -> Result<()> {
        Ok(())
    }

    fn read_bytes(&mut self, _from: Tensor, _to: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        op.check()?;
        op.operands(&mut |tensor, _| self.cuda.live.touch(tensor));
        self.cuda.issue(op)
    }

    fn released(&mut self, range: Range<u64>) {
        self.cuda.live.release(&range);
    }

    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        if self.steps.insert(key) { body(self) } else { Ok(()) }
    }
}
