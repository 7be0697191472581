//! Weights give the same tensors in every file form, to the byte, in every stage.

use common::quantized::{Content, Form, Plain, SHORT, engine, model, plain_tensors, weights};
use common::{cpu, run, small_job};
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Job, LoadOptions};
use kiln::internals::tensor::{Bytes, DType, Nvfp4Layout};
use std::sync::{Arc, LazyLock};

/// All stages of a small image, as bytes.
fn dump(transformer: Weights, text_encoder: Option<Weights>) -> Vec<u8> {
    let mut engine = engine(Box::new(cpu()), model(transformer, text_encoder, SHORT), LoadOptions::DEFAULT);
    let image = run(&mut engine, &Job { record: true, ..small_job() }).unwrap();
    image.record.unwrap().to_safetensors().unwrap()
}

fn of_transformer(file: Vec<u8>) -> Vec<u8> {
    dump(weights(Component::Transformer, file), None)
}

/// All stages with a file of Black Forest Labs, as bytes.
fn right(file: &str) -> &'static [u8] {
    static FP8: LazyLock<Vec<u8>> = LazyLock::new(|| of_transformer(Content::of("fp8").file(Form::BFL)));
    static NVFP4: LazyLock<Vec<u8>> = LazyLock::new(|| of_transformer(Content::of("nvfp4").file(Form::BFL)));
    if file == "fp8" { &FP8 } else { &NVFP4 }
}

fn of_encoder(file: Vec<u8>) -> Vec<u8> {
    let transformer = Content { layers: Vec::new(), plain: plain_tensors(Component::Transformer, Layout::Bfl) }.file(Form::BARE);
    dump(weights(Component::Transformer, transformer), Some(weights(Component::TextEncoder, file)))
}

#[test]
fn every_declaration_gives_the_same_model() {
    let prefixed = |form: Form| Form { prefix: "model.diffusion_model.", ..form };
    let forms = [
        ("declared by tensors", Form::COMFY),
        ("declared by tensors, with a prefix", prefixed(Form::COMFY)),
        ("declared by both, with another prefix", Form { prefix: "net.", settings: true, ..Form::BFL }),
        // The weights' dtypes and their companion tensors identify the format.
        ("not declared", Form::BARE),
    ];
    let forms_of_fp8 = [
        ("metadata, with a prefix", prefixed(Form::BFL)),
        ("legacy marker", Form::LEGACY),
        ("legacy marker, with a prefix", prefixed(Form::LEGACY)),
    ];
    for file in ["fp8", "nvfp4"] {
        let content = Content::of(file);
        let more = forms_of_fp8.iter().filter(|_| file == "fp8");
        for (what, form) in forms.iter().chain(more) {
            assert!(of_transformer(content.file(*form)) == right(file), "{file}, {what}");
        }
    }
    assert!(right("fp8") != right("nvfp4"), "other weights are other images");
}

/// Settings of 19 bytes lie between the weights, so the models above were read from odd addresses.
#[test]
fn files_of_comfyui_have_weights_at_odd_places() {
    let file = Content::of("nvfp4").file(Form::COMFY);
    let shard = Shard::from_bytes("odd", Bytes::new(Arc::new(file.clone()))).unwrap();
    let packed = shard.tensors().filter(|(name, entry)| entry.dtype.name == "U8" && name.ends_with(".weight"));
    let odd = packed.filter(|(name, _)| (shard.bytes(name).unwrap().as_ptr() as usize - file_start(&shard)) % 2 == 1);
    assert!(odd.count() > 4, "the file has no weights at odd places");
}

/// The address of a file's first tensor, which is a multiple of eight bytes.
fn file_start(shard: &Shard) -> usize {
    shard.tensors().map(|(name, _)| shard.bytes(name).unwrap().as_ptr() as usize).min().unwrap()
}

/// In diffusers' names queries, keys and values are separate tensors, each with the scales of the whole.
#[test]
fn layers_in_parts_give_the_same_model() {
    for file in ["fp8", "nvfp4"] {
        let (right, split) = (right(file), Content::of(file).with_names_of_diffusers());
        assert!(of_transformer(split.file(Form::COMFY)) == right, "{file}, settings");
        assert!(of_transformer(split.file(Form::BFL)) == right, "{file}, metadata");
        if file == "nvfp4" {
            assert!(of_transformer(split.file(Form::MODELOPT)) == right, "ModelOpt's folder");
            // Without the mark in the metadata, the names identify the order.
            assert!(of_transformer(split.file(Form { modelopt: false, ..Form::MODELOPT })) == right, "ModelOpt's order");
        }
    }
}

/// The bytes do not show the order of NVFP4, so there is an override.
#[test]
fn a_file_that_looks_like_another_is_right_with_the_override_only() {
    let (content, right) = (Content::of("nvfp4"), right("nvfp4"));
    assert!(of_transformer(content.file(Form::MODELOPT_SINGLE)) == right, "ModelOpt's single file");
    let split = content.with_names_of_diffusers();
    for (what, content, form, order) in [
        ("ModelOpt's order under original names", content, Form::BFL, Nvfp4Layout::MODELOPT),
        ("ComfyUI's order with ModelOpt's mark", content, Form::MODELOPT_SINGLE, Nvfp4Layout::COMFY),
        ("ComfyUI's order under names of diffusers", &split, Form::BARE, Nvfp4Layout::COMFY),
    ] {
        let weights = weights(Component::Transformer, content.file(Form { nvfp4: order, ..form }));
        assert!(dump(weights.clone(), None) != right, "{what} without the override");
        assert!(dump(weights.with_nvfp4_layout(Some(order)), None) == right, "{what}");
    }
}

/// A text encoder whose layers have three formats.
#[test]
fn a_mixed_text_encoder_is_the_same_in_every_form() {
    let content = Content::of("fp8mixed");
    let right = of_encoder(content.file(Form::COMFY));
    let bundled = "text_encoders.qwen3_8b.transformer.";
    for (what, form) in [
        ("metadata", Form::BFL),
        ("both", Form { settings: true, ..Form::BFL }),
        ("bundled", Form { prefix: bundled, ..Form::COMFY }),
    ] {
        assert!(of_encoder(content.file(form)) == right, "{what}");
    }
    // As in ComfyUI, a text encoder's input scales are not used.
    let scaled = content.changed(|layer, _| layer.input_scale = Some(0.01));
    assert!(of_encoder(scaled.file(Form::COMFY)) == right, "with input scales");
    let plain = Content { layers: Vec::new(), plain: plain_tensors(Component::TextEncoder, Layout::Bfl) };
    assert!(of_encoder(plain.file(Form::BARE)) != right, "bf16 is another model");
}

/// FP8 without any scale, including norms, as a plain conversion of all tensors leaves it. The values are exact in bf16.
#[test]
fn raw_fp8_is_the_model_of_its_values() {
    let raw: Vec<Plain> =
        plain_tensors(Component::Transformer, Layout::Bfl).iter().map(|tensor| tensor.in_fp8(DType::E4m3)).collect();
    let expanded = raw.iter().map(|tensor| {
        let bytes = DType::Bf16.encoded(&DType::E4m3.decoded(&tensor.bytes));
        Plain { dtype: safetensors::Dtype::BF16, bytes, ..tensor.clone() }
    });
    let expanded = Content { layers: Vec::new(), plain: expanded.collect() };
    let raw = Content { layers: Vec::new(), plain: raw };
    assert!(of_transformer(raw.file(Form::BARE)) == of_transformer(expanded.file(Form::BARE)));
}
