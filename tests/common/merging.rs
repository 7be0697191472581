//! Merges adapters in a backend's own memory and compares the result with the host's.

use super::adapter_files::{Factor, adapters, lokr, lora_of_all};
use super::quantized::{SHORT, model, plain_tensors, weights, written};
use half::bf16;
use kiln::internals::adapter::{AdapterMode, Adapters, Merger};
use kiln::internals::backend::Backend;
use kiln::internals::component::Component;
use kiln::internals::config::Configs;
use kiln::internals::model::{ContextIn, Loader, Transformer, transformer_manifest};
use kiln::internals::names::Layout;
use kiln::internals::tensor::{ALIGN, Arena, DType, Precision, Region, WeightSlice};
use std::collections::HashMap;

/// Offset of the scratch space for factors. Something else lies before it.
const ROOM_AT: u64 = 3 * ALIGN;
/// The error of sums in f32 whose terms are below one.
const SUM_ERROR: f32 = 1e-6;

/// The tiny transformer with LoRA of a rank that is padded, plus a LoKr. Both sides round a sum in f32 once, so they may differ only if
/// that sum is next to the middle of two bf16 values.
pub fn backend_merges_as_the_host(be: &mut dyn Backend) {
    assert!(!be.reads_files(), "this backend does not merge");
    let config = Configs::TINY.transformer;
    let manifest = transformer_manifest(&config);
    let open = model(
        weights(Component::Transformer, written(&plain_tensors(Component::Transformer, Layout::Diffusers), HashMap::new())),
        None,
        SHORT,
    );
    let kronecker = lokr("transformer.single_transformer_blocks.0.attn.to_out", ([16, 4], Some(2)), ([16, 256], Some(3)));
    let given: [(&[Factor], f32); 2] = [(&lora_of_all(&manifest, 20), 0.25), (&kronecker, -0.5)];
    let added = adapters(&open, given);
    let source = &open.weights().transformer;

    be.reserve(Region::Weights, 64 << 20).unwrap();
    let room = manifest.iter().filter_map(|spec| <[usize; 2]>::try_from(&spec.shape[..]).ok()).map(|shape| {
        let mut room = Arena::new(Region::Adapters);
        Adapters::place_factors(&mut room, Adapters::padded(20 + 2 * 3), shape).unwrap();
        room.peak()
    });
    be.reserve(Region::Adapters, ROOM_AT + room.max().unwrap()).unwrap();
    let (mut region, mut ignore) = (Arena::new(Region::Weights), |_| ());
    let mut loader = Loader::new(be, &mut region, Some(source), Precision::Bf16, &mut ignore).with_adapters(
        &added,
        AdapterMode::Auto,
        ROOM_AT,
    );
    ContextIn::load(&mut loader, &config).unwrap();
    Transformer::load(&mut loader, &config).unwrap();
    let merged: Vec<_> = loader.formats().into_iter().filter(|format| format.merged).collect();
    assert!(merged.len() > 20, "only {} layers were merged", merged.len());

    let (mut merger, mut differing, mut changed, mut all) = (Merger::default(), 0, 0, 0);
    for format in merged {
        let spec = manifest.iter().find(|spec| spec.layer == Some(format.id)).unwrap();
        let stored = source.weight(spec).unwrap().parts;
        let decoded = |parts: &[WeightSlice]| -> Vec<f32> {
            let mut values = Vec::new();
            for part in parts {
                for row in 0..part.rows {
                    let first = values.len();
                    values.resize(first + part.cols(), 0.0);
                    part.decode(row, &mut values[first..]);
                }
            }
            values
        };
        let (before, want) = (decoded(&stored), decoded(&merger.merged(&added, format.id, &stored, DType::Bf16)));
        let mut got = vec![0.0; format.weight.rows() * format.weight.cols()];
        be.read(format.weight.parts()[0], &mut got).unwrap();
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let steps = [got, want].map(|value| i32::from(ordered(bf16::from_f32(*value))));
            // Where a sum is almost zero, its error is still the error of its terms.
            let is_close = (steps[0] - steps[1]).abs() <= 1 || (got - want).abs() < SUM_ERROR;
            assert!(is_close, "{} at {i}: {got}, the host has {want}", spec.name);
            differing += usize::from(got != want);
            changed += usize::from(*want != before[i]);
        }
        all += want.len();
    }
    println!("{differing} of {all} values differ by a step of bf16; {changed} were changed");
    assert!(changed > all / 2 && differing < all / 1000);
}

/// The number of a bf16 value in the order of all bf16 values.
fn ordered(value: bf16) -> i16 {
    let bits = value.to_bits() as i16;
    if bits < 0 { i16::MIN.wrapping_sub(bits) } else { bits }
}
