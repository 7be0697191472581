//! Adapter files with random faults: each is refused by a typed error, or read as what its bytes say.

use super::hostile::tiny;
use common::adapter_files::{KOHYA, PEFT, read};
use common::header::safetensors;
use common::lora::{File, Tensor, pair};
use common::random::{Random, cases};
use kiln::error::Error;
use kiln::internals::adapter::{Adapter, KroneckerFactor, LayerTargets, Matrix, Product, WeightDelta};
use kiln::internals::tensor::DType;
use std::sync::atomic::{AtomicUsize, Ordering};

const WORDS: [&str; 20] = [
    "0",
    "1",
    "-1",
    "4294967296",
    "2305843009213693951",
    "1e99",
    "[]",
    "null",
    "\"",
    "}",
    "\\u0000",
    "F32",
    "F16",
    "BF16",
    "F64",
    "lora_A",
    "lora_up",
    "alpha",
    "lokr_w1",
    ".",
];

/// Small files in several spellings, one of which has settings.
fn valid(random: &mut Random) -> File {
    let dtype = [DType::F32, DType::Bf16, DType::F16][random.below(3)];
    let rank = 1 + random.below(3);
    let alpha = |layer: &str, value: f32| Tensor::new(&format!("{layer}.alpha"), DType::F32, &[], &[value]);
    let layer = "diffusion_model.single_blocks.0.linear2";
    match random.below(4) {
        0 => File::of(pair("transformer.x_embedder", PEFT, [256, 128], rank, dtype))
            .with_metadata("lora_adapter_metadata", r#"{"transformer.r": 2, "transformer.lora_alpha": 3}"#),
        1 => {
            let flat = "lora_unet_double_blocks_1_txt_attn_proj";
            File::of(pair(flat, KOHYA, [256, 256], rank, dtype)).with(alpha(flat, 0.5))
        }
        2 => File::of([
            Tensor::hashed(&format!("{layer}.lokr_w1"), dtype, &[4, 8]),
            Tensor::hashed(&format!("{layer}.lokr_w2_a"), dtype, &[64, rank]),
            Tensor::hashed(&format!("{layer}.lokr_w2_b"), dtype, &[rank, 128]),
            alpha(layer, 2.0),
        ]),
        _ => {
            let mut file = File::of(pair("text_encoder.model.layers.3.self_attn.k_proj", PEFT, [256, 128], rank, dtype));
            file.tensors.extend(pair("transformer_blocks.0.attn.to_q", PEFT, [256, 256], rank, dtype));
            file
        }
    }
}

/// A fault in the header's text, in the values, or in the set of tensors.
fn mutated(random: &mut Random) -> Vec<u8> {
    let mut file = valid(random);
    let at = random.below(file.tensors.len());
    match random.below(8) {
        0 => drop(file.tensors.remove(at)),
        1 => {
            let other = valid(random);
            file.tensors.extend(other.tensors);
        }
        2 => {
            let bytes = &mut file.tensors[at].bytes;
            let byte = random.below(bytes.len());
            bytes[byte] = random.next() as u8;
        }
        3 => file.tensors[at].shape.reverse(),
        4 => file.tensors[at].shape.extend([1, 1]),
        5 => {
            let mut text = file.metadata.pop().map_or_else(|| "{}".into(), |(_, text)| text).into_bytes();
            random.mutate(&mut text, &WORDS);
            file.metadata.push(("lora_adapter_metadata".into(), String::from_utf8_lossy(&text).into_owned()));
        }
        _ => {
            let mut header = file.header().into_bytes();
            random.mutate(&mut header, &WORDS);
            return safetensors(header, &file.data());
        }
    }
    file.bytes()
}

fn f64s(matrix: &Matrix) -> Vec<f64> {
    let values = matrix.bytes.chunks_exact(matrix.dtype.bytes(1)).map(|bytes| {
        let mut value = [0.0];
        matrix.dtype.decode(bytes, &mut value);
        f64::from(value[0])
    });
    values.collect()
}

/// An element of a delta, computed by its definition.
fn element(delta: &WeightDelta, row: usize, col: usize) -> f64 {
    let dot = |a: &Matrix, b: &Matrix, i: usize, j: usize| -> f64 {
        let (x, y) = (f64s(a), f64s(b));
        (0..a.cols).map(|k| x[i * a.cols + k] * y[k * b.cols + j]).sum()
    };
    let of = |factor: &KroneckerFactor, i: usize, j: usize| match factor {
        KroneckerFactor::Whole(whole) => f64s(whole)[i * whole.cols + j],
        KroneckerFactor::Product(a, b) => dot(a, b, i, j),
    };
    let unscaled = match &delta.product {
        Product::Lora { down, up } => dot(up, down, row, col),
        Product::Kronecker(w1, w2) => {
            let [p, q] = w2.shape();
            of(w1, row / p, col / q) * of(w2, row % p, col % q)
        }
    };
    unscaled * f64::from(delta.scale)
}

/// Checks an accepted adapter: it is finite, has the model's shapes, and its delta is the product of its factors.
fn check(adapter: &Adapter, random: &mut Random) {
    assert!(!adapter.layers.is_empty());
    for layer in &adapter.layers {
        let [rows, cols] = layer.delta.shape();
        assert_eq!([rows, cols], [layer.target.len(), layer.target.cols], "{}", layer.name);
        assert!(layer.delta.scale.is_finite() && layer.delta.scale != 0.0, "{}", layer.name);
        let mut added = vec![0.0; rows * cols];
        layer.delta.add_to(1.0, &mut added);
        assert!(added.iter().all(|value| value.is_finite()), "{}", layer.name);
        let (row, col) = (random.below(rows), random.below(cols));
        let (got, want) = (f64::from(added[row * cols + col]), element(&layer.delta, row, col));
        let size = added.iter().fold(0.0, |most: f64, value| most.max(f64::from(value.abs())));
        assert!((got - want).abs() <= 1e-5 * size, "{}: {got} {want}", layer.name);
    }
}

#[test]
fn files_with_faults_are_refused_or_right() {
    let (targets, accepted): (LayerTargets, AtomicUsize) = (tiny(), AtomicUsize::new(0));
    cases("adapter files with faults", 2000, 200_000, |random| {
        let bytes = mutated(random);
        match read(bytes, &targets) {
            Ok(adapter) => {
                accepted.fetch_add(1, Ordering::Relaxed);
                check(&adapter, random);
            }
            Err(error) => assert!(matches!(error, Error::BadFile { .. }), "{error:?}"),
        }
    });
    // Some are accepted and some refused; otherwise nothing was tested.
    let accepted = accepted.into_inner();
    println!("{accepted} accepted");
    assert!(accepted > 200, "{accepted}");
}
