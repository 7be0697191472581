//! Single layers of the quantized files: their quantized inputs and their products. The model's outputs do not show a wrong
//! input scale, because its effect is as large as the quantization's own error. These layers show it.

use common::modes::hashed;
use common::quantized::{Change, Content, Form, Layer, RECORDED, hash, weights};
use common::{Goldens, cpu, relative_l2};
use kiln::internals::backend::{Backend, Gemm, Linear, Op, Role, Weight};
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::names::TensorSpec;
use kiln::internals::tensor::nvfp4::{BLOCK, scale_bytes, scale_offset, tiles_along};
use kiln::internals::tensor::{Arena, DType, Nvfp4Layout, Region, Tensor, WeightSlice};

/// Rows of an input.
const ROWS: usize = 8;

/// A layer's recorded input: rows of very different size. The last rows exceed every input scale, the first underflow.
fn input(layer: &Layer) -> Vec<f32> {
    let name = format!("linear.{}", layer.name);
    let size = |row: usize| 16_f32.powi(row as i32 - 4);
    let value = |i: usize| (2.0 * f32::from(hashed(&name, i)) - 255.0) / 256.0 * size(i / layer.cols);
    (0..ROWS * layer.cols).map(value).collect()
}

/// A layer's quantized input and its product.
struct Output {
    /// Hashes of the quantized input: of the elements and of the block scales.
    input: Vec<String>,
    /// Every sixteenth column of the product.
    product: Vec<f32>,
}

fn run(weights: &Weights, layer: &Layer) -> Output {
    let spec = TensorSpec::new(format!("{}.weight", layer.name), &[layer.rows, layer.cols]);
    let weight = weights.weight(&spec).unwrap();
    let (mut be, stored) = (cpu(), weight.input.unwrap());
    let (mut region, mut ws) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    let upload = |part: &WeightSlice| {
        let tensor = region.alloc_stored(part.rows, layer.cols, part.stored()).unwrap();
        be.upload(tensor, Role::Linear, std::slice::from_ref(part)).unwrap();
        tensor
    };
    let parts: Vec<_> = weight.parts.iter().map(upload).collect();
    let linear = Linear { id: None, weight: Weight::stack(&parts).unwrap(), bias: None, input: stored, lora: None };
    let x = ws.alloc_stored(ROWS, layer.cols, stored).unwrap();
    let out = ws.alloc(ROWS, layer.rows, DType::F32).unwrap();
    be.reserve(Region::Arena, ws.peak()).unwrap();
    be.write(x, &input(layer)).unwrap();
    let mut read = |bytes: Tensor| {
        let mut content = vec![0; bytes.len()];
        be.read_bytes(bytes, &mut content).unwrap();
        content
    };
    let mut memory = x.as_bytes();
    let mut input = vec![hash(&read(memory.next().unwrap()))];
    input.extend(memory.next().map(|scales| hash(&without_padding(&read(scales), layer.cols))));
    be.run(Op::Linear(&[Gemm { out, x, w: &linear }])).unwrap();
    let mut product = vec![0.0; out.len()];
    be.read(out, &mut product).unwrap();
    Output { input, product: product.into_iter().step_by(16).collect() }
}

/// Block scales of an input in tiles, with zeros after the last row, where the memory may hold anything.
fn without_padding(scales: &[u8], cols: usize) -> Vec<u8> {
    let mut padded = vec![0; scale_bytes(ROWS, cols)];
    for (row, block) in (0..ROWS).flat_map(|row| (0..cols / BLOCK).map(move |block| (row, block))) {
        let at = scale_offset(row, block, tiles_along(cols));
        padded[at] = scales[at];
    }
    padded
}

/// The largest error of a row, in units of the limit. The error of an f32 sum of k products is about the root of k roundings;
/// the limit is twice that. The product of a zero row must be zero.
fn error(got: &[f32], want: &[f32], k: usize) -> f64 {
    let (cols, allowed) = (want.len() / ROWS, 2.0 * (k as f64).sqrt() * 2_f64.powi(-24));
    let rows = got.chunks_exact(cols).zip(want.chunks_exact(cols)).map(|(got, want)| match want.iter().any(|v| *v != 0.0) {
        true => relative_l2(got, want) / allowed,
        false => {
            if got == want {
                0.0
            } else {
                f64::INFINITY
            }
        }
    });
    rows.fold(0.0, |most, error| if error.is_nan() { f64::INFINITY } else { error.max(most) })
}

/// The worst error of the recorded layers of a file in units of the limit, and whether all their inputs have the recorded
/// elements and scales.
fn compare(file: &str, weights: &Weights) -> (f64, bool) {
    let (content, goldens) = (Content::of(file), Goldens::named("quantized.safetensors"));
    let (mut worst, mut same) = (0_f64, true);
    for (name, sample) in &RECORDED.samples[file] {
        let layer = content.layers.iter().find(|layer| layer.name == *name).unwrap();
        let got = run(weights, layer);
        let error = error(&got.product, &goldens.f32(&format!("linear.{file}.{name}")), layer.cols);
        println!("{file} {name}: {error:.2} of the limit");
        worst = worst.max(error);
        let recorded = sample.input_fnv1a.iter().chain(&sample.input_block_scale_fnv1a).cloned().collect::<Vec<_>>();
        same &= got.input == recorded;
    }
    (worst, same)
}

#[test]
fn inputs_become_the_recorded_elements_and_products_are_the_recorded_ones() {
    for file in ["fp8", "nvfp4"] {
        let (error, same) = compare(file, &weights(Component::Transformer, Content::of(file).file(Form::BFL)));
        assert!(same, "{file}: inputs have other elements");
        assert!(error <= 1.0, "{file}: products differ by {error:.2} times the limit");
    }
}

/// This layer of the other stream; single blocks have only one stream.
pub fn other_stream<'a>(name: &str, all: &'a [Layer]) -> Option<&'a Layer> {
    let other = if name.contains("img") { name.replace("img", "txt") } else { name.replace("txt", "img") };
    all.iter().find(|layer| layer.name == other)
}

#[test]
fn wrong_scales_are_noticed() {
    let changes: [(&str, bool, Change); 4] = [
        ("input scales of the other stream", false, |layer, all| {
            layer.input_scale = other_stream(&layer.name, all).and_then(|other| other.input_scale);
        }),
        ("inverse input scales", false, |layer, _| layer.input_scale = layer.input_scale.map(|scale| 1.0 / scale)),
        ("input scales of one", false, |layer, _| layer.input_scale = Some(1.0)),
        ("inverse weight scales", true, |layer, _| layer.scale = 1.0 / layer.scale),
    ];
    for file in ["fp8", "nvfp4"] {
        for (what, same_input, change) in changes {
            let wrong = Content::of(file).changed(change).file(Form::BFL);
            let (error, same) = compare(file, &weights(Component::Transformer, wrong));
            assert!(error > 1.0 && same == same_input, "{file}, {what}: {error:.2}");
        }
    }
    let right = weights(Component::Transformer, Content::of("nvfp4").file(Form::BFL));
    for wrong in [Nvfp4Layout::MODELOPT, Nvfp4Layout::MODELOPT_SINGLE, Nvfp4Layout { tiled: false, ..Nvfp4Layout::COMFY }] {
        let (error, same) = compare("nvfp4", &right.clone().with_nvfp4_layout(Some(wrong)));
        assert!(error > 1.0 && same, "{wrong:?}: {error:.2}");
    }
}
