//! NVFP4 weights multiplied as bf16 and as FP8: the formats of a model's layers, and that the result equals the equivalent
//! file's.

use common::quantized::{Content, Form, Layer, SHORT, engine, goldens::PLAIN_INPUTS, model, weights};
use common::wrapped;
use common::{cpu, run, small_job};
use kiln::error::Error;
use kiln::internals::backend::GemmFormats;
use kiln::internals::component::Component;
use kiln::internals::model::{AttentionFormat, Nvfp4Math};
use kiln::internals::pipeline::{Job, LoadOptions, OpenModel, estimate};
use kiln::internals::tensor::formats::{e2m1, e4m3, to_e4m3};
use kiln::internals::tensor::nvfp4::BLOCK;
use kiln::internals::tensor::{DType, Precision};
use kiln_program::cli::formats::format_lines;

fn open(content: &Content, form: Form) -> OpenModel {
    model(weights(Component::Transformer, content.file(form)), None, SHORT)
}

fn options(nvfp4_math: Nvfp4Math) -> LoadOptions {
    LoadOptions { nvfp4_math, ..LoadOptions::DEFAULT }
}

/// All outputs of a run.
fn dump(model: OpenModel, options: LoadOptions, gemms: GemmFormats) -> Vec<u8> {
    let backend = wrapped::with_formats(cpu(), gemms);
    let job = Job { record: true, ..small_job() };
    run(&mut engine(Box::new(backend), model, options), &job).unwrap().record.unwrap().to_safetensors().unwrap()
}

/// The FP8 file that equals a re-encoded NVFP4 file. Each weight has one scale: the tensor scale times the smallest power of
/// two that leaves room for six times the largest block scale. The input scale is multiplied by six.
fn reencoded(layer: &mut Layer, _: &[Layer]) {
    let blocks = layer.blocks.take().unwrap();
    let largest = 6.0 * blocks.iter().map(|scale| e4m3(*scale)).fold(0.0, f32::max);
    let power = (-16..8).map(|exponent| 2f32.powi(exponent)).find(|power| largest <= 448.0 * power).unwrap();
    let nibbles = layer.codes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    // The product of element, scale and power is exact in f32.
    layer.codes = nibbles.enumerate().map(|(i, code)| to_e4m3(e2m1(code) * e4m3(blocks[i / BLOCK]) / power)).collect();
    layer.scale *= power;
    layer.input_scale = layer.input_scale.map(|scale| 6.0 * scale);
}

#[test]
fn re_encoded_weights_are_those_of_an_fp8_file() {
    let nvfp4 = Content::of("nvfp4");
    let fp8 = nvfp4.changed(reencoded);
    let math = options(Nvfp4Math::Fp8);
    let right = dump(open(&fp8, Form::BFL), LoadOptions::DEFAULT, GemmFormats::ALL);
    let formats = open(nvfp4, Form::BFL).formats(math, GemmFormats::ALL).unwrap();
    let blocks: Vec<_> = formats
        .layers
        .iter()
        .filter(|layer| layer.id.component() == Component::Transformer && layer.id.block.is_some())
        .collect();
    assert!(blocks.iter().all(|layer| layer.input == DType::E4m3 && layer.why.is_none()));
    assert!(blocks.iter().flat_map(|layer| &layer.parts).all(|part| (part.stored, part.held) == (DType::E2m1, DType::E4m3)));
    assert!(formats.attention.iter().all(|block| block.heads == DType::E4m3), "attention has FP8 queries and keys");
    assert_eq!(format_lines(&formats)[0], "transformer double blocks, single blocks: nvfp4 as fp8 (w8a8)");
    assert_eq!((formats.nvfp4_math(), formats.expansion()), (Some(Nvfp4Math::Fp8), None));
    assert!(dump(open(nvfp4, Form::BFL), math, GemmFormats::ALL) == right, "to the bit");
    // This holds for any order of the file, and if parts of a weight are separate layers.
    assert!(dump(open(nvfp4, Form::MODELOPT_SINGLE), math, GemmFormats::ALL) == right);
    let (split, fp8_split) = (nvfp4.with_names_of_diffusers(), fp8.with_names_of_diffusers());
    let own = split.changed(reencoded);
    assert!(own.layers.iter().zip(&fp8_split.layers).all(|(a, b)| a.name == b.name));
    let split_right = dump(open(&own, Form::BARE), LoadOptions::DEFAULT, GemmFormats::ALL);
    assert!(dump(open(&split, Form::MODELOPT), math, GemmFormats::ALL) == split_right);
    for other in [Nvfp4Math::Auto, Nvfp4Math::Bf16] {
        assert!(dump(open(nvfp4, Form::BFL), options(other), GemmFormats::ALL) != right, "{other:?}");
    }

    // The plan equals an FP8 model's memory.
    let planned = |content: &Content, options| {
        estimate(open(content, Form::BFL).estimate_request(options, GemmFormats::ALL), &small_job()).unwrap()
    };
    let (as_fp8, of_fp8) = (planned(nvfp4, math), planned(&fp8, LoadOptions::DEFAULT));
    assert_eq!((as_fp8.weight_bytes, as_fp8.arena_bytes), (of_fp8.weight_bytes, of_fp8.arena_bytes));
    // On the CPU these weights are copies.
    let copied: u64 = nvfp4.layers.iter().map(|layer| (layer.rows * layer.cols) as u64).sum();
    assert_eq!(as_fp8.copied_bytes - of_fp8.copied_bytes, copied);
}

#[test]
fn plain_inputs_are_those_of_a_device_without_others() {
    let open = || open(Content::of("nvfp4"), Form::BFL);
    let right = dump(open(), LoadOptions::DEFAULT, PLAIN_INPUTS);
    assert!(dump(open(), options(Nvfp4Math::Bf16), GemmFormats::ALL) == right, "to the bit");
    assert!(dump(open(), LoadOptions::DEFAULT, GemmFormats::ALL) != right, "the inputs matter");
    let line = |math, gemms| format_lines(&open().formats(options(math), gemms).unwrap()).remove(0);
    let blocks = |what: &str| format!("transformer double blocks, single blocks: nvfp4 {what}");
    assert_eq!(line(Nvfp4Math::Auto, GemmFormats::ALL), blocks("(w4a4)"));
    assert_eq!(line(Nvfp4Math::Bf16, GemmFormats::ALL), blocks("(w4a16: as asked)"));
    assert_eq!(line(Nvfp4Math::Auto, PLAIN_INPUTS), blocks("(w4a16: no GEMM of quantized inputs here)"));
}

#[test]
fn only_layers_with_an_input_scale_are_re_encoded() {
    fn without_input_scale(layer: &mut Layer, _: &[Layer]) {
        if layer.name.ends_with("linear2") {
            layer.input_scale = None;
        }
    }
    let content = Content::of("nvfp4").changed(without_input_scale);
    let encoder = Content::of("fp8mixed").file(Form::COMFY);
    let transformer = weights(Component::Transformer, content.file(Form::BFL));
    let model = model(transformer, Some(weights(Component::TextEncoder, encoder)), SHORT);
    let lines = format_lines(&model.formats(options(Nvfp4Math::Fp8), GemmFormats::ALL).unwrap());
    assert_eq!(lines[0], "transformer double blocks, single blocks (linear1): nvfp4 as fp8 (w8a8)");
    assert_eq!(lines[1], "transformer single blocks (linear2): nvfp4 (w4a16: as the file asks)");
    assert!(lines.iter().any(|line| line.starts_with("text encoder") && line.contains("nvfp4 (w4a16)")), "{lines:?}");

    // Files without NVFP4 do not change.
    let fp8 = open(Content::of("fp8"), Form::BFL);
    let [asked, auto] = [Nvfp4Math::Fp8, Nvfp4Math::Auto].map(|math| fp8.formats(options(math), GemmFormats::ALL).unwrap());
    assert_eq!((format_lines(&asked), asked.nvfp4_math()), (format_lines(&auto), None));
}

#[test]
fn fp8_that_cannot_be_had_is_an_error() {
    let model = open(Content::of("nvfp4"), Form::BFL);
    for (precision, gemms, why) in [
        (Precision::F32, GemmFormats::ALL, "nothing is quantized in f32 precision"),
        (Precision::Bf16, GemmFormats { w8a8: false, ..GemmFormats::ALL }, "this device has no FP8 GEMM"),
    ] {
        let of = |nvfp4_math| {
            let attention = AttentionFormat::Auto;
            model.formats(LoadOptions { precision, attention, nvfp4_math, ..LoadOptions::DEFAULT }, gemms)
        };
        let error = of(Nvfp4Math::Fp8).unwrap_err();
        assert!(matches!(error, Error::Usage { .. }));
        assert_eq!(error.to_string(), format!("NVFP4 weights cannot be multiplied as FP8: {why}"));
        assert_eq!(error.hint().unwrap(), "leave open what they are multiplied as; kiln then uses what the device supports");
        assert!(of(Nvfp4Math::Bf16).is_ok() && of(Nvfp4Math::Auto).is_ok());
    }
    // A model without NVFP4 needs no such GEMM.
    let fp8 = open(Content::of("fp8"), Form::BFL);
    assert!(fp8.formats(options(Nvfp4Math::Fp8), GemmFormats::NONE).is_ok());
}
