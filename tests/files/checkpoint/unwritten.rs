//! Preallocated files with an unfinished download: they end with zeros, and kiln notices wherever these begin.

use super::{message, shard};
use common::random::one_in;
use kiln::error::Result;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::Configs;
use kiln::internals::names::{self, Layout, TensorRole, TensorSpec};
use kiln::internals::tensor::DType;
use kiln::internals::tiny;
use std::ops::Range;
use std::path::Path;

/// The tiny model's files, each with the tensors that a run reads.
fn parts() -> [(Component, Vec<u8>, Vec<TensorSpec>); 3] {
    let model = tiny::model(Layout::Diffusers, DType::Bf16).unwrap();
    Component::ALL.map(|part| (part, model.file(part).to_vec(), Configs::TINY.manifest(part)))
}

fn opened(part: Component, bytes: &[u8]) -> Weights {
    Weights::from_shards(part, vec![shard(bytes.to_vec()).unwrap()]).unwrap()
}

/// Checks for unwritten zeros as a run does.
fn look(weights: &Weights, manifest: &[TensorSpec]) -> Result<()> {
    for spec in manifest.iter().filter(|spec| spec.shape.len() > 1) {
        weights.note_used(&spec.name, spec.name.contains("embed_tokens"));
    }
    weights.check_written()
}

/// The byte ranges of the matrices that a run reads.
fn matrices(weights: &Weights, manifest: &[TensorSpec]) -> Vec<Range<usize>> {
    let read = |name: &str| match names::resolve(weights.component(), name) {
        TensorRole::Weight(spelling) => manifest.iter().any(|spec| spec.name == spelling.canonical),
        _ => false,
    };
    let tensors = weights.shards()[0].tensors().filter(|(name, _)| read(name)).map(|(_, entry)| entry);
    tensors.filter(|entry| entry.shape.len() > 1 && entry.shape[0] > 1).map(|entry| entry.range.clone()).collect()
}

#[test]
fn a_download_that_stopped_anywhere_is_noticed() {
    for (part, bytes, manifest) in parts() {
        let whole = opened(part, &bytes);
        look(&whole, &manifest).unwrap();
        let places = matrices(&whole, &manifest);
        let last = places.iter().map(|range| range.start).max().unwrap();
        let first = places.iter().map(|range| range.start).min().unwrap();
        // The cuts are spread from the first matrix to the last.
        for cut in one_in(4, "cuts", (first..=last).step_by((last - first) / 7 + 1)).chain([last]) {
            let mut cut_short = bytes.clone();
            cut_short[cut..].fill(0);
            let text = message(&look(&opened(part, &cut_short), &manifest).unwrap_err());
            assert!(
                text.starts_with("incomplete file (x.safetensors): tensor `") && text.ends_with("download it again"),
                "{text}"
            );
        }
        // A hole in the middle of the file.
        for range in one_in(4, "holes", places.iter().step_by(places.len() / 8 + 1)) {
            let mut holed = bytes.clone();
            holed[range.clone()].fill(0);
            let text = message(&look(&opened(part, &holed), &manifest).unwrap_err());
            assert!(text.contains("` is all zeros / "), "{text}");
        }
    }
}

#[test]
fn trained_weights_are_not_mistaken_for_missing_ones() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/builtin");
    for (part, name) in
        [(Component::Transformer, "transformer"), (Component::TextEncoder, "text_encoder"), (Component::Vae, "vae")]
    {
        let weights = Weights::open(part, &folder.join(name)).unwrap();
        weights.names().for_each(|tensor| weights.note_used(tensor, tensor.contains("embed_tokens")));
        weights.check_written().unwrap();
    }
}
