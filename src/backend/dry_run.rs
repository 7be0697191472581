//! The dry run: a backend that checks every op and adds up its cost, without allocating or accessing any memory.

use super::{Backend, GemmFormats, Op, Role, StepKey};
use crate::error::Result;
use crate::tensor::{ALIGN, Nvfp4Layout, Region, SliceScaling, Tensor, WeightSlice};
use std::ops::Range;

/// A backend that only plans: it checks ops and counts bytes and operations.
#[derive(Debug)]
pub struct DryRun {
    /// Peak use of working memory, in bytes.
    pub arena_bytes: u64,
    /// Bytes of weights that even a backend that reads files in place has to copy.
    pub copied_bytes: u64,
    /// Number of ops run.
    pub ops: u64,
    /// Floating-point operations of all GEMMs, convolutions and attention ops.
    pub flops: u64,
    formats: GemmFormats,
    live: Live,
}

impl DryRun {
    /// An empty plan for a backend that has these quantized GEMMs.
    pub fn new(formats: GemmFormats) -> Self {
        Self { arena_bytes: 0, copied_bytes: 0, ops: 0, flops: 0, formats, live: Live::default() }
    }

    fn touch(&mut self, tensor: Tensor) {
        self.live.touch(tensor);
        self.arena_bytes = self.arena_bytes.max(self.live.end());
    }
}

/// How much of working memory holds data that may still be read. Working memory is allocated and freed like a stack.
#[derive(Clone, Debug, Default)]
pub struct Live(u64);

impl Live {
    /// Counts the end of a tensor in use.
    pub fn touch(&mut self, tensor: Tensor) {
        if tensor.region == Region::Arena {
            self.0 = self.0.max(tensor.extent().end).max(tensor.scale_extent().end);
        }
    }

    /// Ends the use of a range, and of everything allocated behind it.
    pub fn release(&mut self, range: &Range<u64>) {
        self.0 = self.0.min(range.start);
    }

    /// The end of the memory that is in use.
    pub fn end(&self) -> u64 {
        self.0
    }
}

impl Backend for DryRun {
    fn name(&self) -> &'static str {
        "plan"
    }

    fn gemm_formats(&self) -> GemmFormats {
        self.formats
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()> {
        for part in parts.iter().filter(|part| role == Role::UpConv || !part.is_readable_as(to.stored())) {
            self.copied_bytes += to.dtype.bytes(part.rows * to.cols) as u64;
            let is_tiled = matches!(part.scaling, SliceScaling::Blocks16 { layout: Nvfp4Layout { tiled: true, .. }, .. });
            if to.dtype.is_quantized() && !is_tiled {
                let scales = to.scale_extent();
                self.copied_bytes += scales.end - scales.start;
            }
        }
        Ok(())
    }

    fn write(&mut self, to: Tensor, _values: &[f32]) -> Result<()> {
        self.touch(to);
        Ok(())
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        self.touch(from);
        to.fill(0.0);
        Ok(())
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        self.touch(from);
        to.fill(0);
        Ok(())
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        op.check()?;
        op.operands(&mut |t, _| self.touch(t));
        let scratch = op.scratch_bytes(self.formats);
        if scratch > 0 {
            self.arena_bytes = self.arena_bytes.max(self.live.end().next_multiple_of(ALIGN) + scratch);
        }
        self.flops += op.flops();
        self.ops += 1;
        Ok(())
    }

    fn released(&mut self, range: Range<u64>) {
        self.live.release(&range);
    }

    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        body(self)
    }
}
