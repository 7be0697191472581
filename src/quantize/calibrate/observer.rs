//! Finds the largest input magnitudes of layers while a backend runs them.

use crate::backend::{Backend, GemmFormats, Observer, Op};
use crate::error::{Error, Result};
use crate::names::LayerId;
use crate::tensor::{ALIGN, DType, Region, Scaling, Tensor};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The largest input magnitude of each layer.
pub type Largest = Rc<RefCell<BTreeMap<LayerId, f32>>>;

/// Observes the largest inputs of layers within steps.
pub struct LargestInputs {
    /// The watched layers in the order of the model.
    layers: Vec<LayerId>,
    largest: Largest,
    /// One value per layer, in working memory after the stages' memory; `None` before it is reserved.
    found: Option<Tensor>,
    in_step: bool,
    /// Frees the memory of mapped files that were read.
    release: Box<dyn Fn()>,
}

impl LargestInputs {
    /// An observer without layers. `release` frees the memory of mapped files that were read.
    pub fn new(release: Box<dyn Fn()>) -> Self {
        let (layers, largest) = (Vec::new(), Largest::default());
        Self { layers, largest, found: None, in_step: false, release }
    }

    /// Adds layers to watch. Returns the largest magnitudes, which are updated after every step. They are zero for layers that no step ran.
    pub fn watch(&mut self, layers: impl Iterator<Item = LayerId>) -> Largest {
        self.layers.extend(layers);
        self.largest.borrow_mut().extend(self.layers.iter().map(|layer| (*layer, 0.0)));
        self.largest.clone()
    }

    /// The values of all layers.
    fn found(&self) -> Result<Tensor> {
        self.found.ok_or_else(|| Error::Op { op: "step", what: "no working memory was reserved".into() })
    }

    /// Updates the largest magnitudes after a step.
    fn collect<B: Backend + ?Sized>(&mut self, be: &mut B) -> Result<()> {
        let mut values = vec![0.0; self.layers.len()];
        be.read(self.found()?, &mut values)?;
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

impl<B: Backend + ?Sized> Observer<B> for LargestInputs {
    /// Turns off quantized inputs, because the scales are for unquantized ones. Also turns off formats whose weights each GEMM
    /// expands: the backend would expand them into working memory after the part in use, where the observed values are.
    fn gemm_formats(&self, be: &B) -> GemmFormats {
        let GemmFormats { w8a16, w4a16, expands, .. } = be.gemm_formats();
        GemmFormats { w8a16: w8a16 && !expands, w4a16: w4a16 && !expands, ..GemmFormats::NONE }
    }

    fn working_bytes(&mut self, bytes: u64) -> u64 {
        let (offset, count) = (bytes.next_multiple_of(ALIGN), self.layers.len());
        let (region, dtype, scaling) = (Region::Arena, DType::F32, Scaling::Unscaled);
        let found = Tensor { region, dtype, offset, rows: 1, cols: count, stride: count, scaling };
        self.found = Some(found);
        found.extent().end
    }

    fn run(&mut self, be: &mut B, op: Op<'_>) -> Result<()> {
        let (mut inputs, mut multiplies) = (Vec::new(), false);
        op.layers(&mut |x, w| {
            multiplies = true;
            let layer = self.layers.iter().position(|layer| self.in_step && Some(*layer) == w.id);
            inputs.extend(layer.map(|layer| (x, layer)));
        });
        for (x, layer) in inputs {
            let largest = self.found()?.cols(layer..layer + 1);
            be.run(Op::LargestMagnitude { largest, x })?;
        }
        be.run(op)?;
        // The machine may not have memory for the whole model. Pages that are read again are still in the page cache, unless
        // something else needs the memory.
        if multiplies && be.reads_files() {
            (self.release)();
        }
        Ok(())
    }

    fn begin_step(&mut self, be: &mut B) -> Result<()> {
        let found = self.found()?;
        be.write(found, &vec![0.0; found.cols])?;
        self.in_step = true;
        Ok(())
    }

    fn end_step(&mut self, be: &mut B, done: Result<()>) -> Result<()> {
        self.in_step = false;
        done?;
        self.collect(be)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::backend::{Gemm, Linear, Observed, Role, StepKey};
    use crate::names::LayerRole;
    use crate::tensor::{Arena, Bytes, WeightSlice};
    use std::sync::Arc;

    /// Inputs outside of steps and of other layers do not count. Rows of a watched layer do.
    #[test]
    fn watched_layers_are_those_of_steps() {
        let cpu = Box::new(Cpu::new(1, Arc::default()).unwrap());
        let mut observed = Observed::new(cpu, LargestInputs::new(Box::new(|| {})));
        let (mut weights, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        let mut layer = |role: LayerRole, rows: usize| {
            let weight = weights.alloc(rows, 3, DType::F32).unwrap();
            let zeros = Bytes::new(Arc::new(vec![0_u8; 12 * rows]));
            observed.upload(weight, Role::Linear, &[WeightSlice::plain(zeros, DType::F32, rows)]).unwrap();
            Linear { id: Some(role.only()), ..Linear::new(weight, None) }
        };
        let (before, a) = (layer(LayerRole::ImageIn, 2), layer(LayerRole::TextIn, 4));
        let (b, after) = (layer(LayerRole::TimeIn, 6), Linear { id: None, ..layer(LayerRole::TimeOut, 8) });
        let largest = observed.observer.watch([a, b].into_iter().filter_map(|layer| layer.id));
        let (x, out) = (arena.alloc(1, 3, DType::F32).unwrap(), arena.alloc(1, 8, DType::F32).unwrap());
        observed.reserve(Region::Arena, arena.peak()).unwrap();
        let multiply = |be: &mut dyn Backend, layer: Linear, values: [f32; 3]| {
            be.write(x, &values).unwrap();
            be.run(Op::Linear(&[Gemm { out: out.cols(0..layer.weight.rows()), x, w: &layer }])).unwrap();
        };
        multiply(&mut observed, a, [9.0, 9.0, 9.0]);
        let mut step = |layers: &[(Linear, [f32; 3])]| {
            let result = observed.step(StepKey("test"), &mut |be| {
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
