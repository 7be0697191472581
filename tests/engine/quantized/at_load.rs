//! Plain models quantized at load compute the same as the equivalent quantized file.

use common::quantized::{Content, Form, Plain, SHORT, engine, goldens::PLAIN_INPUTS, model, plain_tensors, weights, written};
use common::{cpu, run, small_job};
use kiln::error::Error;
use kiln::internals::backend::GemmFormats;
use kiln::internals::component::Component;
use kiln::internals::model::Nvfp4Math;
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Job, LoadOptions, OpenModel, estimate};
use kiln::internals::tensor::formats::to_e4m3;
use kiln::internals::tensor::nvfp4::{BLOCK, encode_block, scale_bytes, scale_offset, tiles_along};
use kiln::internals::tensor::{DType, Precision};
use kiln_program::cli::formats::format_lines;
use safetensors::tensor::Dtype;
use serde_json::{Map, json};
use std::collections::HashMap;

const FORMATS: [DType; 2] = [DType::E4m3, DType::E2m1];

fn options(quantize: DType) -> LoadOptions {
    LoadOptions { quantize: Some(quantize), ..LoadOptions::DEFAULT }
}

/// All outputs of a run.
fn dump(model: OpenModel, options: LoadOptions) -> Vec<u8> {
    let job = Job { record: true, ..small_job() };
    run(&mut engine(Box::new(cpu()), model, options), &job).unwrap().record.unwrap().to_safetensors().unwrap()
}

/// Whether a tensor is the weight of a linear layer in a block.
fn is_linear(tensor: &Plain) -> bool {
    let blocks = ["double_blocks.", "single_blocks.", "transformer_blocks.", "single_transformer_blocks.", "model.layers."];
    tensor.shape.len() == 2 && blocks.iter().any(|blocks| tensor.name.starts_with(blocks))
}

/// The constant input scale of a layer, larger for products of SwiGLU.
fn input_scale(layer: &str, format: DType) -> f32 {
    let of_swiglu = ["_mlp.2", ".linear2", ".linear_out"].iter().any(|end| layer.ends_with(end));
    let [plain, swiglu] = if format == DType::E4m3 { [1.0, 8.0] } else { [0.0625, 1.0] };
    if of_swiglu || layer.starts_with("single") && layer.ends_with("attn.to_out") { swiglu } else { plain }
}

/// The tensors of a quantized layer in a file. FP8 has row scales.
fn quantized(weight: &Plain, format: DType, part: Component) -> Vec<Plain> {
    let (layer, &[rows, cols]) = (weight.name.strip_suffix(".weight").unwrap(), &weight.shape[..]) else { unreachable!() };
    let (named, values) = (|suffix: &str| format!("{layer}.{suffix}"), weight.values());
    let largest = |values: &[f32]| values.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
    let fp8 = Dtype::F8_E4M3;
    let mut tensors = match format {
        DType::E4m3 => {
            let scales: Vec<f32> = values.chunks(cols).map(|row| largest(row) / 448.0).collect();
            let codes = values.iter().enumerate().map(|(i, value)| to_e4m3(value / scales[i / cols])).collect();
            vec![
                Plain { name: named("weight"), dtype: fp8, shape: vec![rows, cols], bytes: codes },
                Plain {
                    name: named("weight_scale"),
                    dtype: Dtype::F32,
                    shape: vec![rows, 1],
                    bytes: DType::F32.encoded(&scales),
                },
            ]
        }
        _ => {
            let scale = largest(&values) / 2688.0;
            let (mut codes, mut tiles) = (vec![0; rows * cols / 2], vec![0; scale_bytes(rows, cols)]);
            for (i, (values, codes)) in values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2)).enumerate() {
                let at = scale_offset(i / (cols / BLOCK), i % (cols / BLOCK), tiles_along(cols));
                tiles[at] = encode_block(values, scale, codes);
            }
            let shape = vec![rows.next_multiple_of(128), (cols / BLOCK).next_multiple_of(4)];
            vec![
                Plain { name: named("weight"), dtype: Dtype::U8, shape: vec![rows, cols / 2], bytes: codes },
                Plain { name: named("weight_scale"), dtype: fp8, shape, bytes: tiles },
                Plain::scalar(named("weight_scale_2"), scale),
            ]
        }
    };
    tensors.extend((part == Component::Transformer).then(|| Plain::scalar(named("input_scale"), input_scale(layer, format))));
    tensors
}

/// The file of a component of the tiny model with quantized layers.
fn file(part: Component, layout: Layout, format: DType) -> Vec<u8> {
    let (mut tensors, mut layers) = (Vec::new(), Map::new());
    for tensor in plain_tensors(part, layout) {
        if !is_linear(&tensor) {
            tensors.push(tensor);
            continue;
        }
        layers.insert(tensor.name.strip_suffix(".weight").unwrap().into(), json!({ "format": format.format().declared }));
        tensors.extend(quantized(&tensor, format, part));
    }
    let metadata = json!({ "format_version": "1.0", "layers": layers }).to_string();
    written(&tensors, HashMap::from([("_quantization_metadata".into(), metadata)]))
}

fn plain(layout: Layout) -> OpenModel {
    let file = |part| written(&plain_tensors(part, layout), HashMap::new());
    let [transformer, encoder] = [Component::Transformer, Component::TextEncoder].map(|part| weights(part, file(part)));
    model(transformer, Some(encoder), SHORT)
}

fn quantized_model(layout: Layout, format: DType) -> OpenModel {
    let [transformer, encoder] =
        [Component::Transformer, Component::TextEncoder].map(|part| weights(part, file(part, layout, format)));
    model(transformer, Some(encoder), SHORT)
}

#[test]
fn results_are_those_of_the_quantized_file() {
    let as_stored = dump(plain(Layout::Bfl), LoadOptions::DEFAULT);
    // The original layout has queries, keys and values in one matrix, diffusers' layout in three.
    for (format, layout) in FORMATS.into_iter().flat_map(|format| [(format, Layout::Bfl), (format, Layout::Diffusers)]) {
        let right = dump(quantized_model(layout, format), LoadOptions::DEFAULT);
        assert!(dump(plain(layout), options(format)) == right, "{format:?} {layout:?}: to the bit");
        assert!(right != as_stored, "quantizing makes a difference");
        // The plan equals the quantized model's memory. On the CPU these weights and their scales are copies.
        let planned =
            |model: OpenModel, options| estimate(model.estimate_request(options, GemmFormats::ALL), &small_job()).unwrap();
        let (at_load, of_file) =
            (planned(plain(layout), options(format)), planned(quantized_model(layout, format), LoadOptions::DEFAULT));
        assert_eq!((at_load.weight_bytes, at_load.arena_bytes), (of_file.weight_bytes, of_file.arena_bytes));
        let held = |layer: &kiln::internals::model::LayerFormat| layer.parts.iter().map(|part| part.held_bytes).sum::<u64>();
        let is_quantized = |layer: &&kiln::internals::model::LayerFormat| layer.parts[0].held.is_quantized();
        let copied: u64 = at_load.formats.layers.iter().filter(is_quantized).map(held).sum();
        assert_eq!(at_load.copied_bytes - of_file.copied_bytes, copied, "{format:?} {layout:?}");
    }
}

/// In low-memory mode the text encoder is quantized again for every prompt. In f32 precision inputs stay in f32.
#[test]
fn in_low_memory_and_in_f32_as_well() {
    for (format, changed) in [
        (DType::E2m1, LoadOptions { low_memory: true, ..LoadOptions::DEFAULT }),
        (DType::E4m3, LoadOptions { precision: Precision::F32, ..LoadOptions::DEFAULT }),
    ] {
        let right = dump(quantized_model(Layout::Bfl, format), changed);
        assert!(dump(plain(Layout::Bfl), LoadOptions { quantize: Some(format), ..changed }) == right, "{format:?} {changed:?}");
    }
}

#[test]
fn lines_tell_what_was_quantized() {
    let model = plain(Layout::Diffusers);
    let lines = |format, gemms| format_lines(&model.formats(options(format), gemms).unwrap());
    let blocks = |words: &str| format!("transformer double blocks, single blocks: bf16 quantized at load to {words}");
    let rest = "transformer img_in, txt_in, time_in, modulations, final layer: bf16";
    let encoder = |words: &str| format!("text encoder: bf16 quantized at load to {words}");
    let fp8 = lines(DType::E4m3, GemmFormats::ALL);
    assert_eq!(fp8, [&blocks("fp8 (w8a8)"), rest, &encoder("fp8 (w8a16)"), "attention: q and k fp8, v bf16"]);
    let nvfp4 = lines(DType::E2m1, GemmFormats::ALL);
    assert_eq!(nvfp4, [&blocks("nvfp4 (w4a4)"), rest, &encoder("nvfp4 (w4a16)"), "attention: q and k fp8, v bf16"]);
    let without = lines(DType::E4m3, PLAIN_INPUTS);
    assert_eq!(without[0], blocks("fp8 (w8a16: no GEMM of quantized inputs here)"));
    let formats = |format| model.formats(options(format), GemmFormats::ALL).unwrap();
    assert_eq!(FORMATS.map(|format| formats(format).quantized_at_load()), [Some(DType::E4m3), Some(DType::E2m1)]);
    // Without calibration the block scales follow the inputs; plain inputs are the other choice.
    assert_eq!(formats(DType::E2m1).nvfp4_math(), Some(Nvfp4Math::Auto));
    let plain_inputs = LoadOptions { nvfp4_math: Nvfp4Math::Bf16, ..options(DType::E2m1) };
    assert_eq!(format_lines(&model.formats(plain_inputs, GemmFormats::ALL).unwrap())[0], blocks("nvfp4 (w4a16: as asked)"));
    let reencoded = LoadOptions { nvfp4_math: Nvfp4Math::Fp8, ..options(DType::E2m1) };
    let refused = model.formats(reencoded, GemmFormats::ALL).unwrap_err().to_string();
    assert!(refused.ends_with("they are quantized when they are loaded, and not re-encoded"), "{refused}");
    assert_eq!(model.formats(LoadOptions::DEFAULT, GemmFormats::ALL).unwrap().quantized_at_load(), None);
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let refused = |model: &OpenModel, format: DType, gemms: GemmFormats, why: &str| {
        let error = model.formats(options(format), gemms).unwrap_err();
        assert!(matches!(error, Error::Usage { .. }));
        assert_eq!(error.to_string(), format!("the weights cannot be quantized to {} at load: {why}", format.label()));
        assert_eq!(error.hint().unwrap(), "load them as stored, or name files that hold them in bf16, f16 or f32");
    };
    let plain = plain(Layout::Bfl);
    let none = "this device has no GEMM for such weights";
    refused(&plain, DType::E4m3, GemmFormats::NONE, none);
    refused(&plain, DType::E4m3, GemmFormats { w8a16: false, ..GemmFormats::ALL }, none);
    refused(&plain, DType::E2m1, GemmFormats { w4a16: false, ..GemmFormats::ALL }, none);
    // One quantized layer is enough, in either component.
    let transformer = Content::of("fp8").with_plain_layers(|layer| layer != "single_blocks.1.linear2");
    let transformer = weights(Component::Transformer, transformer.file(Form::BFL));
    let why = "`single_blocks.1.linear2.weight` is stored as e4m3 already";
    refused(&model(transformer, None, SHORT), DType::E4m3, GemmFormats::ALL, why);
    let transformer =
        weights(Component::Transformer, written(&plain_tensors(Component::Transformer, Layout::Bfl), HashMap::new()));
    let encoder = weights(Component::TextEncoder, file(Component::TextEncoder, Layout::Bfl, DType::E2m1));
    let why = "`model.layers.0.self_attn.qkv_proj.weight` is stored as e2m1 already";
    refused(&model(transformer, Some(encoder), SHORT), DType::E2m1, GemmFormats::ALL, why);
}

/// A value that no scale fits is an error when the weight is loaded. A dry run reads no values.
#[test]
fn values_that_are_not_finite_are_refused() {
    for (format, value) in FORMATS.into_iter().flat_map(|format| [(format, f32::NAN), (format, f32::NEG_INFINITY)]) {
        let mut tensors = plain_tensors(Component::TextEncoder, Layout::Bfl);
        let tensor = tensors.iter_mut().find(|tensor| tensor.name.ends_with("layers.1.mlp.down_proj.weight")).unwrap();
        let at = tensor.bytes.len() / 2 - 4;
        DType::Bf16.encode(&[value], &mut tensor.bytes[at..at + 2]);
        let encoder = weights(Component::TextEncoder, written(&tensors, HashMap::new()));
        let transformer =
            weights(Component::Transformer, written(&plain_tensors(Component::Transformer, Layout::Bfl), HashMap::new()));
        let model = model(transformer, Some(encoder), SHORT);
        assert!(model.formats(options(format), GemmFormats::ALL).is_ok());
        let loaded = kiln::internals::pipeline::Engine::load(Box::new(cpu()), model, options(format), &kiln::progress::Silent);
        let error = loaded.err().unwrap().to_string();
        assert!(error.contains("values that are not finite"), "{format:?} {value}: {error}");
    }
}
