//! Calibration: what the linear layers of the transformer's blocks take as input, observed while a model draws.

use crate::engine::Model;
use crate::fixture;
use crate::render::render;
use common::cpu;
use common::fnv::fnv1a;
use common::wrapped::Wrapped;
use kiln::error::Result;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, Linear, Op};
use kiln::internals::checkpoint::Weights;
use kiln::internals::config::TransformerConfig;
use kiln::internals::model::transformer_manifest;
use kiln::internals::names::TensorSpec;
use kiln::internals::tensor::Tensor;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

/// The largest magnitude of every layer's input, by the layer's name.
pub type Largest = BTreeMap<String, f32>;

/// The weights of the linear layers of the transformer's blocks, which are those that the files of Black Forest Labs quantise,
/// and all other tensors.
pub fn block_linears(weights: &Weights) -> (Vec<TensorSpec>, Vec<TensorSpec>) {
    let config = TransformerConfig::detect(weights, None).unwrap();
    let is_block = |spec: &TensorSpec| ["double_blocks.", "single_blocks."].iter().any(|blocks| spec.name.starts_with(blocks));
    transformer_manifest(&config).into_iter().partition(|spec| is_block(spec) && spec.shape.len() == 2)
}

/// The name of the layer with this weight.
pub fn layer_name(spec: &TensorSpec) -> &str {
    spec.name.strip_suffix(".weight").unwrap()
}

/// The values of a weight.
pub fn values(weights: &Weights, spec: &TensorSpec) -> Vec<f32> {
    let mut values = vec![0.0; spec.shape.iter().product()];
    let mut rest = &mut values[..];
    for part in weights.weight(spec).unwrap().parts {
        for row in 0..part.rows {
            let (now, later) = rest.split_at_mut(part.cols());
            part.decode(row, now);
            rest = later;
        }
    }
    values
}

fn hash(values: &[f32]) -> u64 {
    fnv1a(values.iter().flat_map(|value| value.to_le_bytes()))
}

/// Observes the inputs of layers. Ops do not name the layers, so each is recognised by the values of its weight.
struct Observer {
    names: HashMap<u64, String>,
    /// Where weights lie that were seen before, and the names of their layers.
    known: Vec<(Range<u64>, Option<String>)>,
    largest: Rc<RefCell<Largest>>,
}

impl Observer {
    /// The layer that these rows belong to, or `None` if it is not observed.
    fn name(&mut self, layer: &Linear, be: &mut Cpu) -> Result<Option<String>> {
        let parts = layer.weight.parts();
        let at = parts[0].offset;
        if let Some((_, name)) = self.known.iter().find(|(extent, _)| extent.contains(&at)) {
            return Ok(name.clone());
        }
        let mut values = vec![0.0; layer.weight.len()];
        let mut rest = &mut values[..];
        for part in parts {
            let (now, later) = rest.split_at_mut(part.len());
            be.read(*part, now)?;
            rest = later;
        }
        let name = self.names.get(&hash(&values)).cloned();
        self.known.push((at..parts.iter().map(|part| part.extent().end).max().unwrap(), name.clone()));
        Ok(name)
    }

    fn observe(&mut self, op: Op<'_>, be: &mut Cpu) -> Result<()> {
        let mut layers: Vec<(Tensor, &Linear)> = match op {
            Op::Linear(streams) | Op::LinearSwiglu(streams) => streams.iter().map(|s| (s.x, s.w)).collect(),
            Op::LinearGateResidual(streams) => streams.iter().map(|s| (s.x, s.w)).collect(),
            Op::Qkv(streams) => streams.iter().map(|s| (s.x, s.w)).collect(),
            _ => return Ok(()),
        };
        // The last block takes only some rows of a weight for some tokens, which are recognised once all of it was.
        layers.sort_by_key(|(_, layer)| Reverse(layer.weight.rows()));
        for (x, layer) in layers {
            let Some(name) = self.name(layer, be)? else { continue };
            let mut values = vec![0.0; x.len()];
            be.read(x, &mut values)?;
            let mut all = self.largest.borrow_mut();
            let largest = all.entry(name).or_default();
            *largest = values.iter().fold(*largest, |most, value| most.max(value.abs()));
        }
        Ok(())
    }
}

/// What the model is calibrated on: prompts, and an edit of these of the fixture's rendered scenes. The score asks for none of
/// them.
const PROMPTS: [&str; 2] = [
    "a red star on the left on a blue background",
    "a cyan square at the top, a pink triangle on the left and a large brown heart at the bottom on white and green stripes",
];
const EDIT: (&str, [usize; 2]) = ("put the cross of image 1 on the background of image 2", [0, 8]);

/// The largest inputs while the model in this folder draws a few images, on the CPU in bf16.
pub fn calibrate(folder: &Path, weights: &Weights) -> Largest {
    let (specs, largest) = (block_linears(weights).0, Rc::default());
    let names: HashMap<_, _> = specs.iter().map(|spec| (hash(&values(weights, spec)), layer_name(spec).to_owned())).collect();
    assert_eq!(names.len(), specs.len(), "layers with the same weight cannot be told apart");
    let mut observer = Observer { names, known: Vec::new(), largest: Rc::clone(&largest) };
    let backend = Wrapped::after_op(cpu(), move |_, op, be| observer.observe(op, be));
    let (mut model, scenes) = (Model::on(Box::new(backend), folder), fixture().renders);
    for (seed, prompt) in (0..).zip(PROMPTS) {
        model.draw(prompt, &[], seed);
    }
    model.draw(EDIT.0, &EDIT.1.map(|i| render(&scenes[i])), 0);
    drop(model);
    largest.take()
}
