//! The 8-bit and 4-bit formats, bit for bit.
//!
//! `tests/fixtures/fp8_vectors.json` and `nvfp4_vectors.json` were computed by comfy-kitchen 0.2.40, eager backend, and hold
//! entries of ModelOpt 0.47.0. Entries named `cuda` emulate the CUDA kernels of comfy-kitchen, which its users run.
//! Hexadecimal texts are little-endian memory, row-major.

mod elements;
mod fp8;
mod nvfp4;
mod products;
mod quantizing;
mod reencoding;

use kiln::internals::backend::Backend;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::tensor::{Arena, Bytes, DType, Region, Scale, Stored, Tensor, WeightSlice};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The contents of `fp8_vectors.json`.
#[derive(Deserialize)]
struct Fp8Vectors {
    e4m3_decode: Vec<Value>,
    e5m2_decode: Vec<Value>,
    e4m3_encode_tests: Vec<Value>,
    cases: Vec<Value>,
    linear: Products,
}

/// The contents of `nvfp4_vectors.json`.
#[derive(Deserialize)]
struct Nvfp4Vectors {
    e2m1_decode: Vec<Value>,
    e2m1_encode_tests: Vec<Value>,
    cases: Vec<Value>,
    gemm: Products,
}

/// Products of one input with one weight, for several input scales.
#[derive(Deserialize)]
struct Products {
    weight_case: String,
    x_shape: [usize; 2],
    x_bf16_hex: String,
    runs: Vec<Value>,
}

fn fp8_vectors() -> Fp8Vectors {
    serde_json::from_str(include_str!("../fixtures/fp8_vectors.json")).unwrap()
}

fn nvfp4_vectors() -> Nvfp4Vectors {
    serde_json::from_str(include_str!("../fixtures/nvfp4_vectors.json")).unwrap()
}

fn hex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2));
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// An entry's bytes, by their name.
fn memory(entry: &Value, name: &str) -> Vec<u8> {
    hex(entry[name].as_str().unwrap_or_else(|| panic!("no {name}")))
}

/// An entry's float, whose bits are stored as `0x...`.
fn float(entry: &Value, name: &str) -> f32 {
    let text = entry[name].as_str().unwrap_or_else(|| panic!("no {name}"));
    f32::from_bits(u32::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap())
}

fn scale(entry: &Value, name: &str) -> Scale {
    Scale::new(float(entry, name)).unwrap()
}

fn shape(entry: &Value, name: &str) -> [usize; 2] {
    serde_json::from_value(entry[name].clone()).unwrap()
}

/// The case with this name.
fn named<'a>(cases: &'a [Value], name: &str) -> &'a Value {
    cases.iter().find(|case| case["name"] == name).unwrap_or_else(|| panic!("no case {name}"))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn f32_bits(bytes: &[u8]) -> Vec<u32> {
    bits(&DType::F32.decoded(bytes))
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// The number of bytes that differ.
fn differences(a: &[u8], b: &[u8]) -> u64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).filter(|(a, b)| a != b).count() as u64
}

fn bytes(data: Vec<u8>) -> Bytes {
    Bytes::new(Arc::new(data))
}

/// The values of a weight slice, and these values rounded to bf16.
fn expanded(part: &WeightSlice) -> (Vec<f32>, Vec<u8>) {
    let (mut values, mut halves) = (vec![0.0; part.rows * part.cols()], vec![0; 2 * part.rows * part.cols()]);
    for row in 0..part.rows {
        part.decode(row, &mut values[row * part.cols()..][..part.cols()]);
        part.convert(row, Stored::plain(DType::Bf16), &mut halves[2 * row * part.cols()..][..2 * part.cols()]);
    }
    (values, halves)
}

fn cpu() -> Cpu {
    Cpu::new(1, Arc::new(AtomicBool::new(false))).unwrap()
}

/// The elements of a tensor as bytes, and its tiles of block scales if there are any.
fn stored_bytes(cpu: &mut Cpu, tensor: Tensor) -> Vec<Vec<u8>> {
    let read = tensor.as_bytes().map(|tensor| {
        let mut bytes = vec![0; tensor.len()];
        cpu.read_bytes(tensor, &mut bytes).unwrap();
        bytes
    });
    read.collect()
}

/// The bytes that the CPU backend stores for these values.
fn quantized(values: &[f32], cols: usize, stored: Stored) -> Vec<Vec<u8>> {
    let (mut cpu, mut arena) = (cpu(), Arena::new(Region::Arena));
    let tensor = arena.alloc_stored(values.len() / cols, cols, stored).unwrap();
    cpu.reserve(Region::Arena, arena.peak()).unwrap();
    cpu.write(tensor, values).unwrap();
    stored_bytes(&mut cpu, tensor)
}
