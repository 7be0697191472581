//! A backend that forwards everything to another one and finds the largest magnitude of what layers multiply.

use crate::backend::{Backend, GemmFormats, Op, Role, StepKey};
use crate::error::{Error, Result};
use crate::names::LayerId;
use crate::tensor::{ALIGN, DType, Region, Scaling, Tensor, WeightPart};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The largest magnitude of the input of each layer.
pub type Largest = Rc<RefCell<BTreeMap<LayerId, f32>>>;

/// Finds the largest inputs of layers within steps.
pub struct Observer {
    inner: Box<dyn Backend>,
    /// The watched layers in the order of the model.
    layers: Vec<LayerId>,
    largest: Largest,
    /// One value for each layer, in working memory behind that of the stages; none before it was reserved.
    found: Option<Tensor>,
    in_step: bool,
    /// Gives back the memory of mapped files that were read.
    release: Box<dyn Fn()>,
}

impl Observer {
    /// An observer that watches no layer yet. `release` gives back the memory of mapped files that were read.
    pub fn new(inner: Box<dyn Backend>, release: Box<dyn Fn()>) -> Self {
        let (layers, largest) = (Vec::new(), Largest::default());
        Self { inner, layers, largest, found: None, in_step: false, release }
    }

    /// Watches layers. Returns the largest magnitudes, which are updated after every step; a layer that no step has run has zero.
    pub fn watch(&mut self, layers: impl Iterator<Item = LayerId>) -> Largest {
        self.layers.extend(layers);
        self.largest.borrow_mut().extend(self.layers.iter().map(|layer| (*layer, 0.0)));
        self.largest.clone()
    }

    /// The values of all layers.
    fn found(&self) -> Result<Tensor> {
        self.found.ok_or_else(|| Error::Op { op: "step", what: "no working memory was reserved".into() })
    }

    /// Takes over what a step found.
    fn collect(&mut self) -> Result<()> {
        let mut values = vec![0.0; self.layers.len()];
        self.inner.read(self.found()?, &mut values)?;
        let mut largest = self.largest.borrow_mut();
        for (layer, &value) in self.layers.iter().zip(&values) {
            if !value.is_finite() {
                return Err(Error::Calibration { layer: layer.canonical(), what: "its input is not finite" });
            }
            largest.entry(*layer).and_modify(|most| *most = most.max(value));
        }
        Ok(())
    }
}

impl Backend for Observer {
    fn name(&self) -> &'static str {
        "observer"
    }

    /// No quantised inputs, because it is plain ones that scales are chosen for. Nor are weights expanded by each GEMM, for which a
    /// backend takes working memory behind that which is in use, where the values are.
    fn gemm_formats(&self) -> GemmFormats {
        let GemmFormats { w8a16, w4a16, expands, .. } = self.inner.gemm_formats();
        GemmFormats { w8a16: w8a16 && !expands, w4a16: w4a16 && !expands, ..GemmFormats::NONE }
    }

    fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.inner.set_cancel(cancel);
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightPart]) -> Result<()> {
        self.inner.upload(to, role, parts)
    }

    fn available(&self) -> Result<Option<u64>> {
        self.inner.available()
    }

    fn launches(&self) -> Vec<(&'static str, u64)> {
        self.inner.launches()
    }

    fn reserve_weights(&mut self, bytes: u64) -> Result<()> {
        self.inner.reserve_weights(bytes)
    }

    fn reads_files(&self) -> bool {
        self.inner.reads_files()
    }

    fn reserve_kept(&mut self, bytes: u64) -> Result<()> {
        self.inner.reserve_kept(bytes)
    }

    fn reserve_adapters(&mut self, bytes: u64) -> Result<()> {
        self.inner.reserve_adapters(bytes)
    }

    fn reserve(&mut self, bytes: u64) -> Result<()> {
        let (offset, count) = (bytes.next_multiple_of(ALIGN), self.layers.len());
        let (region, dtype, scaling) = (Region::Arena, DType::F32, Scaling::Unscaled);
        let found = Tensor { region, dtype, offset, rows: 1, cols: count, stride: count, scaling };
        self.found = Some(found);
        self.inner.reserve(found.extent().end)
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        self.inner.write(to, values)
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        self.inner.read(from, to)
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        self.inner.read_bytes(from, to)
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        let (mut inputs, mut multiplies) = (Vec::new(), false);
        op.layers(&mut |x, w| {
            multiplies = true;
            let layer = self.layers.iter().position(|layer| self.in_step && Some(*layer) == w.id);
            inputs.extend(layer.map(|layer| (x, layer)));
        });
        for (x, layer) in inputs {
            let largest = self.found()?.cols(layer..layer + 1);
            self.inner.run(Op::LargestMagnitude { largest, x })?;
        }
        self.inner.run(op)?;
        // Whoever quantises a model need not have memory for all of it. Pages that are read again are still in the page cache,
        // unless something else needs the memory.
        if multiplies && self.inner.reads_files() {
            (self.release)();
        }
        Ok(())
    }

    fn released(&mut self, range: Range<u64>) {
        self.inner.released(range);
    }

    /// Steps are not captured: what was found is read after each.
    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        let found = self.found()?;
        self.inner.write(found, &vec![0.0; found.cols])?;
        self.in_step = true;
        let result = body(self);
        self.in_step = false;
        result?;
        self.collect()
    }

    fn take_saturated(&mut self) -> Result<u64> {
        self.inner.take_saturated()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::backend::{Gemm, Linear};
    use crate::names::LayerRole;
    use crate::tensor::{Arena, Bytes};

    /// What a watched layer multiplies outside of steps does not count, and neither do other layers. Rows of a watched one do.
    #[test]
    fn watched_layers_are_those_of_steps() {
        let mut observer = Observer::new(Box::new(Cpu::new(1, Arc::default()).unwrap()), Box::new(|| {}));
        let (mut weights, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        let mut layer = |role: LayerRole, rows: usize| {
            let weight = weights.alloc(rows, 3, DType::F32).unwrap();
            let zeros = Bytes::new(Arc::new(vec![0_u8; 12 * rows]));
            observer.upload(weight, Role::Linear, &[WeightPart::plain(zeros, DType::F32, rows)]).unwrap();
            Linear { id: Some(role.only()), ..Linear::new(weight, None) }
        };
        let (before, a) = (layer(LayerRole::ImageIn, 2), layer(LayerRole::TextIn, 4));
        let (b, after) = (layer(LayerRole::TimeIn, 6), Linear { id: None, ..layer(LayerRole::TimeOut, 8) });
        let largest = observer.watch([a, b].into_iter().filter_map(|layer| layer.id));
        let (x, out) = (arena.alloc(1, 3, DType::F32).unwrap(), arena.alloc(1, 8, DType::F32).unwrap());
        observer.reserve(arena.peak()).unwrap();
        let multiply = |be: &mut dyn Backend, layer: Linear, values: [f32; 3]| {
            be.write(x, &values).unwrap();
            be.run(Op::Linear(&[Gemm { out: out.cols(0..layer.weight.rows()), x, w: &layer }])).unwrap();
        };
        multiply(&mut observer, a, [9.0, 9.0, 9.0]);
        let mut step = |layers: &[(Linear, [f32; 3])]| {
            let result = observer.step(StepKey("test"), &mut |be| {
                layers.iter().for_each(|(layer, values)| multiply(be, *layer, *values));
                Ok(())
            });
            result.map(|()| largest.borrow().values().copied().collect::<Vec<_>>())
        };
        assert_eq!(step(&[(before, [7.0; 3]), (after, [8.0; 3])]).unwrap(), [0.0, 0.0]);
        assert_eq!(step(&[(a, [1.0, -2.0, 0.5]), (b.rows(2..5), [3.0; 3]), (b, [0.0, 1.0, 2.0])]).unwrap(), [2.0, 3.0]);
        assert_eq!(step(&[(a, [1.0; 3]), (b, [-4.0; 3])]).unwrap(), [2.0, 4.0]);
        let result = step(&[(b, [0.0, f32::NEG_INFINITY, 1.0])]);
        assert!(matches!(&result, Err(Error::Calibration { layer, .. }) if *layer == b.id.unwrap().canonical()), "{result:?}");
    }
}
