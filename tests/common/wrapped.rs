//! Backends, in most tests the CPU's, with hooks to observe or change results after each op.

use kiln::error::Result;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, GemmFormats, Observed, Observer, Op};
use kiln::internals::tensor::Tensor;

/// A backend with hooks.
pub type Wrapped<B = Cpu> = Observed<B, Hooks<B>>;

/// Called before host data is written, and may change it.
pub type BeforeWrite = Box<dyn FnMut(Tensor, &mut Vec<f32>)>;

/// Runs an op on a backend.
type Run<B> = Box<dyn FnMut(&mut B, Op<'_>) -> Result<()>>;

/// The hooks of each op and each write.
pub struct Hooks<B = Cpu> {
    run: Run<B>,
    pub before_write: BeforeWrite,
    pub formats: GemmFormats,
}

impl<B: Backend> Observer<B> for Hooks<B> {
    fn gemm_formats(&self, _be: &B) -> GemmFormats {
        self.formats
    }

    fn write(&mut self, be: &mut B, to: Tensor, values: &[f32]) -> Result<()> {
        let mut values = values.to_vec();
        (self.before_write)(to, &mut values);
        be.write(to, &values)
    }

    fn run(&mut self, be: &mut B, op: Op<'_>) -> Result<()> {
        (self.run)(be, op)
    }
}

/// Calls `run` in place of each op. `run` may run that op or another one.
pub fn instead<B: Backend>(inner: B, run: impl FnMut(&mut B, Op<'_>) -> Result<()> + 'static) -> Wrapped<B> {
    let formats = inner.gemm_formats();
    Observed::new(Box::new(inner), Hooks { run: Box::new(run), before_write: Box::new(|_, _| ()), formats })
}

/// Calls `after_op` after each op, with its number and the backend that ran it.
pub fn after_op<B: Backend>(inner: B, mut after_op: impl FnMut(usize, Op<'_>, &mut B) -> Result<()> + 'static) -> Wrapped<B> {
    let mut ops = 0;
    instead(inner, move |be, op| {
        be.run(op)?;
        after_op(ops, op, be)?;
        ops += 1;
        Ok(())
    })
}

/// Calls `before_write` before host data is written.
pub fn before_write(inner: Cpu, before_write: impl FnMut(Tensor, &mut Vec<f32>) + 'static) -> Wrapped {
    let mut wrapped = instead(inner, Cpu::run);
    wrapped.observer.before_write = Box::new(before_write);
    wrapped
}

/// A backend that offers only these quantized GEMMs.
pub fn with_formats(inner: Cpu, formats: GemmFormats) -> Wrapped {
    let mut wrapped = instead(inner, Cpu::run);
    wrapped.observer.formats = formats;
    wrapped
}
