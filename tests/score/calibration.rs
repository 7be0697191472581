//! Calibration: what the linear layers of the transformer's blocks take as input, observed while a model draws.

use crate::engine::Model;
use crate::fixture;
use crate::render::render;
use common::cpu;
use common::wrapped;
use kiln::error::Result;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, Op};
use kiln::internals::checkpoint::Weights;
use kiln::internals::config::TransformerConfig;
use kiln::internals::model::transformer_manifest;
use kiln::internals::names::{LayerId, TensorSpec};
use kiln::internals::tensor::Tensor;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::rc::Rc;

/// The largest magnitude of every layer's input, by the layer's name.
pub type Largest = BTreeMap<String, f32>;

/// The weights of the linear layers of the transformer's blocks, which the files of Black Forest Labs quantize, and all other
/// tensors.
pub fn block_linears(weights: &Weights) -> (Vec<TensorSpec>, Vec<TensorSpec>) {
    let config = TransformerConfig::detect(weights, None).unwrap();
    let is_block = |spec: &TensorSpec| spec.layer.is_some_and(|layer| layer.block.is_some());
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

/// Observes the inputs of layers.
struct Observer {
    names: HashMap<LayerId, String>,
    largest: Rc<RefCell<Largest>>,
}

impl Observer {
    fn observe(&mut self, op: Op<'_>, be: &mut Cpu) -> Result<()> {
        let mut inputs: Vec<(Tensor, &String)> = Vec::new();
        op.layers(&mut |x, layer| inputs.extend(layer.id.and_then(|id| Some((x, self.names.get(&id)?)))));
        for (x, name) in inputs {
            let mut values = vec![0.0; x.len()];
            be.read(x, &mut values)?;
            let mut all = self.largest.borrow_mut();
            let largest = all.entry(name.clone()).or_default();
            *largest = values.iter().fold(*largest, |most, value| most.max(value.abs()));
        }
        Ok(())
    }
}

/// The calibration's prompts. They also serve for an edit of the fixture's rendered scenes. The score uses none of these
/// prompts.
const PROMPTS: [&str; 2] = [
    "a red star on the left on a blue background",
    "a cyan square at the top, a pink triangle on the left and a large brown heart at the bottom on white and green stripes",
];
const EDIT: (&str, [usize; 2]) = ("put the cross of image 1 on the background of image 2", [0, 8]);

/// The largest inputs while the model in this folder draws a few images, on the CPU in bf16.
pub fn calibrate(folder: &Path, weights: &Weights) -> Largest {
    let (specs, largest) = (block_linears(weights).0, Rc::default());
    let names = specs.iter().map(|spec| (spec.layer.unwrap(), layer_name(spec).to_owned())).collect();
    let mut observer = Observer { names, largest: Rc::clone(&largest) };
    let backend = wrapped::after_op(cpu(), move |_, op, be| observer.observe(op, be));
    let (mut model, scenes) = (Model::on(Box::new(backend), folder), fixture().renders);
    for (seed, prompt) in (0..).zip(PROMPTS) {
        model.draw(prompt, &[], seed);
    }
    model.draw(EDIT.0, &EDIT.1.map(|i| render(&scenes[i])), 0);
    drop(model);
    largest.take()
}
