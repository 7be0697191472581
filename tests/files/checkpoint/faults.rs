//! Tensors that appear twice, under other names, or in addition to the tensors of the model.

use super::{Described, described, message, shard, zeros};
use kiln::error::{Error, Result};
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::Configs;
use kiln::internals::names::{Layout, TensorSpec, file_tensors};
use kiln::internals::tensor::DType;
use kiln::internals::tiny;

/// The tensors of a tiny component in a file of this layout.
fn tensors(part: Component, layout: Layout) -> Vec<Described> {
    manifest(part).iter().flat_map(|spec| file_tensors(part, layout, spec)).map(|s| (s.name, "BF16", s.shape)).collect()
}

fn manifest(part: Component) -> Vec<TensorSpec> {
    Configs::TINY.manifest(part)
}

fn open(part: Component, tensors: &[Described]) -> Result<Weights> {
    Weights::from_shards(part, vec![shard(zeros(tensors))?])
}

#[test]
fn extras_outside_the_transformer_are_returned_and_known_ones_passed_over() {
    let mut text = tensors(Component::TextEncoder, Layout::Diffusers);
    for unused in ["lm_head.weight", "model.norm.weight", "model.layers.27.mlp.up_proj.weight", "model.layers.35.self_attn.x"] {
        text.push(described(unused, "BF16", &[1]));
    }
    text.push(described("tekken_model", "U8", &[3]));
    text.push(described("spiece_model", "U8", &[3]));
    let weights = open(Component::TextEncoder, &text).unwrap();
    assert_eq!(weights.check(&manifest(Component::TextEncoder)).unwrap(), ["spiece_model"]);

    let mut vae = tensors(Component::Vae, Layout::Bfl);
    vae.push(described("bn.num_batches_tracked", "I64", &[]));
    vae.push(described("loss.logvar", "BF16", &[1]));
    assert_eq!(open(Component::Vae, &vae).unwrap().check(&manifest(Component::Vae)).unwrap(), ["loss.logvar"]);
}

#[test]
fn two_spellings_of_one_weight_are_refused() {
    for (first, second) in [
        ("img_in.weight", "x_embedder.weight"),
        ("double_blocks.0.img_attn.qkv.weight", "transformer_blocks.0.attn.to_k.weight"),
        ("norm_out.linear.weight", "final_layer.adaLN_modulation.1.weight"),
        ("single_blocks.0.norm.key_norm.scale", "single_blocks.0.norm.key_norm.weight"),
    ] {
        let error = open(Component::Transformer, &[described(first, "BF16", &[2]), described(second, "BF16", &[2])]).unwrap_err();
        let text = message(&error);
        assert!(text.starts_with("duplicate tensor (x.safetensors)"), "{text}");
        assert!(text.contains(first) && text.contains(second), "{text}");
    }
}

#[test]
fn both_layouts_hold_the_same_weights() {
    for dtype in [DType::Bf16, DType::F16, DType::F32] {
        let diffusers = tiny::model(Layout::Diffusers, dtype).unwrap();
        let original = tiny::model(Layout::Bfl, dtype).unwrap();
        for part in [Component::Transformer, Component::TextEncoder, Component::Vae] {
            let (a, b) = (diffusers.weights(part).unwrap(), original.weights(part).unwrap());
            for weights in [&a, &b] {
                assert!(weights.check(&manifest(part)).unwrap().is_empty());
            }
            if part != Component::TextEncoder {
                assert_eq!((a.layout(), b.layout()), (Layout::Diffusers, Layout::Bfl));
            }
            for spec in manifest(part) {
                let rows = |weights: &Weights| {
                    let parts = weights.weight(&spec).unwrap().parts;
                    assert!(parts.iter().all(|p| p.dtype == dtype));
                    let rows = if spec.shape.len() > 1 { spec.shape[0] } else { 1 };
                    assert_eq!(parts.iter().map(|p| p.rows).sum::<usize>(), rows);
                    parts.iter().map(|p| &p.bytes[..]).collect::<Vec<_>>().concat()
                };
                assert!(rows(&a) == rows(&b), "{}", spec.name);
                assert_eq!(rows(&a).len(), dtype.bytes(spec.shape.iter().product()));
            }
        }
    }
}

#[test]
fn rows_are_stacked_and_swapped_as_the_layouts_say() {
    let model = tiny::model(Layout::Diffusers, DType::Bf16).unwrap();
    let weights = model.weights(Component::Transformer).unwrap();
    let file = |name: &str| weights.shards()[0].bytes(name).unwrap();
    let h = Configs::TINY.transformer.hidden;
    let parts = weights.weight(&TensorSpec::new("final_layer.adaLN_modulation.1.weight", &[2 * h, h])).unwrap().parts;
    let stored = file("norm_out.linear.weight");
    let (scale, shift) = stored.split_at(stored.len() / 2);
    assert!(parts[0].bytes[..] == *shift && parts[1].bytes[..] == *scale);
    let parts = weights.weight(&TensorSpec::new("double_blocks.1.txt_attn.qkv.weight", &[3 * h, h])).unwrap().parts;
    for (part, name) in parts.iter().zip(["add_q_proj", "add_k_proj", "add_v_proj"]) {
        assert!(part.bytes[..] == file(&format!("transformer_blocks.1.attn.{name}.weight"))[..]);
    }
    // If the caller does not know the parts, whole shapes are compared.
    assert!(matches!(
        weights.weight(&TensorSpec::new("double_blocks.1.txt_attn.qkv.weight", &[2 * h, h])),
        Err(Error::TensorShape { .. })
    ));
    assert!(matches!(weights.weight(&TensorSpec::new("nothing.weight", &[1])), Err(Error::TensorMissing { .. })));
}

#[test]
fn prefixes_of_all_in_one_files_are_seen_through() {
    let mut all: Vec<Described> = Vec::new();
    for (part, layout, prefix) in [
        (Component::Transformer, Layout::Bfl, "model.diffusion_model."),
        (Component::TextEncoder, Layout::Diffusers, "text_encoders.qwen3_4b.transformer."),
        (Component::Vae, Layout::Bfl, "vae."),
    ] {
        all.extend(tensors(part, layout).into_iter().map(|(name, element, shape)| (format!("{prefix}{name}"), element, shape)));
    }
    for part in [Component::Transformer, Component::TextEncoder, Component::Vae] {
        assert!(open(part, &all).unwrap().check(&manifest(part)).unwrap().is_empty());
    }
    let lost = all.iter().position(|(name, ..)| name.ends_with("single_blocks.1.linear2.weight")).unwrap();
    let (name, ..) = all.remove(lost);
    let error = open(Component::Transformer, &all).unwrap().check(&manifest(Component::Transformer)).unwrap_err();
    assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
}
