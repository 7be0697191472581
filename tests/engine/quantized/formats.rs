//! The formats in which layers are held in memory, and how much memory they take.

use common::quantized::goldens::PLAIN_INPUTS;
use common::quantized::{Content, Form, Layer, SHORT, engine, model, plain_tensors, weights};
use common::{cpu, run, small_job};
use kiln::internals::backend::GemmFormats;
use kiln::internals::component::Component;
use kiln::internals::model::{LayerFormat, PartFormat, PlainInput};
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Formats, Job, LoadOptions, OpenModel, estimate};
use kiln::internals::tensor::nvfp4::BLOCK;
use kiln::internals::tensor::{DType, Precision};

fn open(content: &Content, form: Form) -> OpenModel {
    model(weights(Component::Transformer, content.file(form)), None, SHORT)
}

fn options(precision: Precision) -> LoadOptions {
    LoadOptions { precision, ..LoadOptions::DEFAULT }
}

fn is_block(layer: &LayerFormat) -> bool {
    layer.id.component() == Component::Transformer && layer.id.block.is_some()
}

/// Bytes of a layer in a format.
fn bytes(layer: &Layer, dtype: DType) -> u64 {
    let elements = (layer.rows * layer.cols) as u64;
    // An NVFP4 element takes half a byte, and each block one more byte.
    if dtype == DType::E2m1 { elements / 2 + elements / BLOCK as u64 } else { dtype.bytes(1) as u64 * elements }
}

#[test]
fn layers_are_held_as_the_backend_multiplies_them() {
    use DType::{Bf16, E2m1, E4m3, F32};
    for (file, stored) in [("fp8", E4m3), ("nvfp4", E2m1)] {
        let content = Content::of(file);
        let model = open(content, Form::BFL);
        for (gemms, precision, held, input, why) in [
            (GemmFormats::ALL, Precision::Bf16, stored, stored, None),
            (PLAIN_INPUTS, Precision::Bf16, stored, Bf16, Some(PlainInput::Device)),
            (GemmFormats::NONE, Precision::Bf16, Bf16, Bf16, Some(PlainInput::Device)),
            (GemmFormats::ALL, Precision::F32, stored, F32, Some(PlainInput::Precision)),
            (GemmFormats::NONE, Precision::F32, F32, F32, Some(PlainInput::Precision)),
        ] {
            let Formats { layers, .. } = model.formats(options(precision), gemms).unwrap();
            let (blocks, rest): (Vec<_>, Vec<_>) = layers.into_iter().partition(is_block);
            assert_eq!(blocks.len(), content.layers.len());
            for layer in blocks {
                let own = content.layers.iter().find(|own| layer.id.canonical() == format!("{}.weight", own.name)).unwrap();
                let (stored_bytes, held_bytes) = (bytes(own, stored), bytes(own, held));
                let parts = vec![PartFormat { stored, held, stored_bytes, held_bytes }];
                let want = LayerFormat { parts, input, why, ..layer.clone() };
                assert_eq!((&layer, layer.weight.cols()), (&want, own.cols), "{file} {precision:?} {gemms:?}");
            }
            for layer in rest {
                assert!(layer.parts.iter().all(|part| (part.stored, part.held) == (Bf16, Bf16)), "{}", layer.id);
                assert_eq!(layer.why, None, "{}", layer.id);
            }
        }
    }
}

/// The bytes of all weights, as planned.
fn planned(content: &Content, gemms: GemmFormats) -> u64 {
    estimate(open(content, Form::BFL).estimate_request(options(Precision::Bf16), gemms), &small_job()).unwrap().weight_bytes
}

#[test]
fn quantized_weights_take_the_memory_of_their_elements_and_scales() {
    let plain = Content { layers: Vec::new(), plain: plain_tensors(Component::Transformer, Layout::Bfl) };
    let bf16 = planned(&plain, GemmFormats::ALL);
    for (file, dtype) in [("fp8", DType::E4m3), ("nvfp4", DType::E2m1)] {
        let content = Content::of(file);
        let saved: u64 = content.layers.iter().map(|layer| bytes(layer, DType::Bf16) - bytes(layer, dtype)).sum();
        println!("{file}: {} of {bf16} bytes", bf16 - saved);
        assert_eq!(planned(content, GemmFormats::ALL), bf16 - saved, "{file}");
        assert_eq!(planned(content, GemmFormats::NONE), bf16, "{file}, expanded");
    }
}

/// Some files leave some layers in bf16, as klein base 4B's file does with these layers.
#[test]
fn layers_may_be_bf16_anywhere() {
    let is_plain = |name: &str| name.starts_with("double_blocks.0.") && name.ends_with(".proj");
    for file in ["fp8", "nvfp4"] {
        let whole = Content::of(file);
        let content = whole.with_plain_layers(is_plain);
        assert_eq!(content.layers.len() + 2, whole.layers.len());
        let Formats { layers, .. } = open(&content, Form::BFL).formats(options(Precision::Bf16), GemmFormats::ALL).unwrap();
        let in_bf16 = layers.iter().filter(|layer| is_block(layer) && layer.parts[0].stored == DType::Bf16);
        let in_bf16: Vec<String> = in_bf16.map(|layer| layer.id.canonical()).collect();
        assert_eq!(in_bf16, ["double_blocks.0.img_attn.proj.weight", "double_blocks.0.txt_attn.proj.weight"]);
        let dump = |content: &Content, form: Form| {
            let mut engine = engine(Box::new(cpu()), open(content, form), LoadOptions::DEFAULT);
            run(&mut engine, &Job { record: true, ..small_job() }).unwrap().record.unwrap().to_safetensors().unwrap()
        };
        let right = dump(&content, Form::BFL);
        assert!(dump(&content, Form::COMFY) == right, "{file}");
        assert!(dump(whole, Form::BFL) != right, "{file}: the layers matter");
    }
}
