//! One fault in each tensor of the tiny model and of the real ones. kiln names the tensor before it reads any weight.

use super::Described;
use common::header::write_sparse;
use common::random::{long, one_in};
use common::scratch::Scratch;
use kiln::error::{Error, Result};
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::{Configs, ModelDefaults, TextConfig, TransformerConfig, VaeConfig, check_fit};
use kiln::internals::names::{Layout, file_tensors};
use rayon::prelude::*;
use std::path::Path;

/// The tensors of a component, named as in its file.
fn tensors(part: Component, configs: &Configs, layout: Layout) -> Vec<Described> {
    configs.manifest(part).iter().flat_map(|spec| file_tensors(part, layout, spec)).map(|s| (s.name, "BF16", s.shape)).collect()
}

fn open(part: Component, path: &Path, tensors: &[Described]) -> Result<Weights> {
    write_sparse(path, tensors);
    Weights::open(part, path)
}

/// A model with one component that a test may change.
struct Model<'a> {
    scratch: Scratch,
    configs: &'a Configs,
}

impl<'a> Model<'a> {
    fn new(configs: &'a Configs) -> Self {
        Self { scratch: Scratch::new(), configs }
    }

    /// The checks before a run, with another file for one component: detects its configuration, compares it with the other components,
    /// checks all tensors. Returns unknown tensors.
    fn with(&self, part: Component, tensors: &[Described]) -> Result<Vec<String>> {
        let weights = open(part, &self.scratch.path().join("changed"), tensors)?;
        let mut configs = self.configs.clone();
        match part {
            Component::Transformer => configs.transformer = TransformerConfig::detect(&weights, None)?,
            Component::TextEncoder => configs.text_encoder = TextConfig::detect(&weights, None, &ModelDefaults::klein())?,
            Component::Vae => configs.vae = VaeConfig::detect(&weights, None)?,
        }
        check_fit(&configs.transformer, &configs.text_encoder)?;
        weights.check(&configs.manifest(part))
    }
}

/// A change to a list of tensors.
type Change<'a> = dyn Fn(&mut Vec<Described>) + 'a;

/// Whether a short run samples a tensor: tensors outside blocks, and tensors of the first, second and tenth block or layer of each
/// kind. All blocks of a kind have the same tensors.
fn is_sampled(name: &str) -> bool {
    let mut numbers = name.split('.').filter_map(|word| word.parse::<usize>().ok());
    numbers.next().is_none_or(|block| [0, 1, 9].contains(&block))
}

/// Tries every fault in every tensor of a component, and returns the number of faults.
fn faults(model: &Model<'_>, part: Component, whole: &[Described]) -> usize {
    assert!(model.with(part, whole).unwrap().is_empty());
    let mut count = 0;
    let sampled = whole.iter().enumerate().filter(|(_, (name, ..))| long() || is_sampled(name));
    let share = if model.configs == &Configs::TINY && part == Component::Transformer { 1 } else { 5 };
    for (i, (name, _, shape)) in one_in(share, &format!("tensors of {part}"), sampled) {
        let with = |change: &Change<'_>| {
            let mut changed = whole.to_vec();
            change(&mut changed);
            model.with(part, &changed)
        };
        let refused = |change: &Change<'_>| with(change).expect_err(name);

        let missing: [&Change<'_>; 2] = [&|t| drop(t.remove(i)), &|t| t[i].0.push_str("_x")];
        for change in missing {
            let error = refused(change);
            let named = matches!(&error, Error::TensorMissing { name: n, want, .. } if n == name && want == shape);
            assert!(named, "{name}: {error}");
        }
        let extra = format!("{name}.bias");
        match with(&|t| t.push((extra.clone(), "BF16", vec![1]))) {
            // Only the transformer may not have unknown tensors; files of the other components also serve other programs.
            Err(Error::TensorUnknown { name: n, .. }) if part == Component::Transformer => assert_eq!(n, extra),
            Ok(unknown) if part != Component::Transformer => assert_eq!(unknown, [extra]),
            other => panic!("{name}: {other:?}"),
        }
        let error = refused(&|t| t[i].1 = "I16");
        assert!(matches!(&error, Error::TensorType { name: n, got, .. } if n == name && got == "I16"), "{name}: {error}");
        let error = refused(&|t| t[i].1 = "I8");
        assert!(matches!(&error, Error::Quantized { name: n, format, .. } if n == name && *format == "INT8"), "{name}: {error}");
        if part == Component::Transformer {
            let error = refused(&|t| t[i].2.push(1));
            assert!(matches!(&error, Error::TensorShape { name: n, .. } if n == name), "{name}: {error}");
        }
        for dim in 0..shape.len() {
            let error = refused(&|t| t[i].2[dim] += 128);
            count += 1;
            let named = match &error {
                // The model may want a 1x1 convolution where the file has a matrix, or the reverse.
                Error::TensorShape { name: n, got, want, .. } => {
                    n == name && shape.starts_with(want) && got[dim] == shape[dim] + 128
                }
                // This dimension is the prompt embeddings' width, so it has to match the text encoder.
                Error::Mismatch { .. } => dim == 1 && (name == "txt_in.weight" || name == "context_embedder.weight"),
                _ => false,
            };
            assert!(named, "{name} {dim}: {error}");
        }
        count += 5;
    }
    count
}

#[test]
fn every_fault_in_every_tensor_is_refused_by_name() {
    let configs = [Configs::TINY, Configs::KLEIN_4B, Configs::KLEIN_9B];
    let layouts = [Layout::Diffusers, Layout::Bfl];
    let parts = configs.iter().flat_map(|configs| Component::ALL.map(|part| (configs, part)));
    let jobs: Vec<_> = parts.flat_map(|(configs, part)| layouts.map(|layout| (configs, part, layout))).collect();
    let counts = jobs.into_par_iter().map(|(configs, part, layout)| {
        // The text encoder has only one layout.
        if part == Component::TextEncoder && layout == Layout::Bfl {
            return 0;
        }
        faults(&Model::new(configs), part, &tensors(part, configs, layout))
    });
    let count: usize = counts.sum();
    assert!(count > if long() { 10_000 } else { 300 }, "{count}");
}

#[test]
fn the_encoder_of_the_other_size_is_refused_by_name() {
    let [small, large] = [Configs::KLEIN_4B, Configs::KLEIN_9B];
    for (configs, other, expected) in [
        (&small, &large, "klein 4B needs Qwen3-4B (hidden 2560), found hidden 4096"),
        (&large, &small, "klein 9B needs Qwen3-8B (hidden 4096), found hidden 2560"),
    ] {
        let error = Model::new(configs)
            .with(Component::TextEncoder, &tensors(Component::TextEncoder, other, Layout::Diffusers))
            .unwrap_err();
        assert_eq!(error.to_string(), format!("text encoder does not fit the transformer: {expected}"));
    }
}
