//! Results of the small cases in one file: recorded on a GPU, and compared with the emulator's results.

use super::{Case, Weights, cases, is_within, tiles};
use half::bf16;
use kiln::internals::backend::cuda::{Cuda, KernelChoice};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

/// The cases that `wanted` selects for a kernel choice and whose names have no number above `limit`.
pub fn pairs(choice: KernelChoice, limit: usize, wanted: impl Fn(KernelChoice, &str) -> bool) -> Vec<(KernelChoice, Case)> {
    let cases = cases::all().into_iter().filter(|case| is_within(limit, &case.name) && wanted(choice, &case.name));
    cases.map(|case| (choice, case)).collect()
}

/// The cases of every kernel choice that makes a difference.
pub fn all_pairs(limit: usize) -> Vec<(KernelChoice, Case)> {
    KernelChoice::all().flat_map(|choice| pairs(choice, limit, tiles::runs_with)).collect()
}

/// The name of a case's result in the file.
fn key(choice: KernelChoice, case: &Case, result: usize) -> String {
    format!("{choice:?} | {} | {result}", case.name)
}

/// Encodes values in bf16 if that changes none of them, otherwise in f32. All bf16 results fit in bf16.
fn encode(values: &[f32]) -> (Dtype, Vec<u8>) {
    if values.iter().all(|v| v.to_bits() & 0xffff == 0) {
        (Dtype::BF16, values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect())
    } else {
        (Dtype::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
}

fn decode(view: &TensorView<'_>) -> Vec<f32> {
    let bytes = view.data();
    match view.dtype() {
        Dtype::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
    }
}

/// Runs the cases and writes their results, along with the GPU properties that kernels and schedules depend on. Returns the number of
/// results.
pub fn record(cuda: &mut Cuda, limit: usize, file: &Path) -> usize {
    let (mut weights, mut results) = (Weights::default(), Vec::new());
    for (choice, case) in all_pairs(limit) {
        cuda.set_choice(choice);
        let values = super::run(cuda, &mut weights, &case, false, &mut Vec::new());
        results.extend(values.iter().enumerate().map(|(i, values)| (key(choice, &case, i), values.len(), encode(values))));
    }
    let views = results.iter().map(|(key, len, (dtype, bytes))| (key, TensorView::new(*dtype, vec![*len], bytes).unwrap()));
    let device = cuda.device();
    let properties = [
        ("name", device.name.clone()),
        ("major", device.capability.0.to_string()),
        ("minor", device.capability.1.to_string()),
        ("sms", device.multiprocessors.to_string()),
        ("shared", device.shared.to_string()),
        ("limit", limit.to_string()),
    ];
    let properties = properties.map(|(name, value)| (name.to_owned(), value)).into();
    safetensors::serialize_to_file(views, Some(properties), file).unwrap();
    results.len()
}

/// A file that [`record`] wrote.
pub struct Recorded {
    bytes: Vec<u8>,
    properties: HashMap<String, String>,
}

impl Recorded {
    pub fn open(file: &Path) -> Self {
        let bytes = std::fs::read(file).unwrap();
        let properties = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap();
        Self { bytes, properties }
    }

    /// A property of the GPU.
    pub fn property(&self, name: &str) -> &str {
        &self.properties[name]
    }

    /// A property of the GPU that is a number.
    pub fn number(&self, name: &str) -> u32 {
        self.property(name).parse().unwrap()
    }

    /// The tensors of the file.
    pub fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }
}

/// A case's recorded results.
pub fn results(tensors: &SafeTensors<'_>, choice: KernelChoice, case: &Case) -> Vec<Vec<f32>> {
    (0..).map_while(|i| tensors.tensor(&key(choice, case, i)).ok()).map(|view| decode(&view)).collect()
}
