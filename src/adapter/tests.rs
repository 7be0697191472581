//! Adapters made here, against deltas that are computed in f64 element by element.

use super::*;
use crate::config::TransformerConfig;
use crate::model::transformer_manifest;
use crate::part::Part;
use crate::tensor::Bytes;
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// A transformer with two blocks of each kind.
fn config() -> TransformerConfig {
    TransformerConfig { hidden: 128, double_blocks: 2, single_blocks: 2, ..TransformerConfig::klein_4b() }
}

fn places() -> Places {
    Places::new([(Part::Transformer, &transformer_manifest(&config())[..])])
}

/// Values that depend on the name and the index.
fn values(name: &str, count: usize) -> Vec<f32> {
    let mut state = name.bytes().fold(1_u32, |state, byte| state.wrapping_mul(31).wrapping_add(u32::from(byte))) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 16_777_216.0 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// A tensor of a file.
#[derive(Clone)]
struct Given(String, Vec<usize>, Vec<f32>);

fn given(name: impl Into<String>, shape: &[usize]) -> Given {
    let name = name.into();
    let drawn = values(&name, shape.iter().product());
    Given(name, shape.to_vec(), drawn)
}

fn shard_with(tensors: &[Given], metadata: Option<(&str, &str)>) -> Shard {
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|Given(_, _, values)| DType::F32.encoded(values)).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|(Given(name, shape, _), bytes)| (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    let metadata = metadata.map(|(key, value)| HashMap::from([(key.to_owned(), value.to_owned())]));
    Shard::from_bytes("adapter", Bytes::new(Arc::new(serialize(views, metadata).unwrap()))).unwrap()
}

fn read(tensors: &[Given]) -> Result<Adapter> {
    Adapter::read(&shard_with(tensors, None), &places())
}

fn refusal(tensors: &[Given]) -> String {
    read(tensors).map(|adapter| adapter.layers.len()).unwrap_err().to_string()
}

/// Both factors of a layer.
fn pair(layer: &str, [down, up]: [&str; 2], [rows, cols]: [usize; 2], rank: usize) -> [Given; 2] {
    [given(format!("{layer}{down}"), &[rank, cols]), given(format!("{layer}{up}"), &[rows, rank])]
}

const PEFT: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
const KOHYA: [&str; 2] = [".lora_down.weight", ".lora_up.weight"];

fn delta(adapter: &Adapter, layer: usize) -> Vec<f32> {
    let term = &adapter.layers[layer].term;
    let mut to = vec![0.0; term.shape().iter().product()];
    term.add_to(1.0, &mut to);
    to
}

#[test]
fn a_layer_is_the_product_of_its_factors_times_alpha_over_rank() {
    let layer = "lora_unet_single_blocks_1_linear2";
    let mut tensors = pair(layer, KOHYA, [128, 512], 4).to_vec();
    tensors.push(Given(format!("{layer}.alpha"), vec![], vec![2.0]));
    let adapter = read(&tensors).unwrap();
    assert_eq!((adapter.layers.len(), adapter.layers[0].place.name.as_str()), (1, "single_blocks.1.linear2.weight"));
    let (got, (down, up)) = (delta(&adapter, 0), (&tensors[0].2, &tensors[1].2));
    for (i, got) in got.iter().enumerate() {
        let (row, col) = (i / 512, i % 512);
        let want: f64 = (0..4).map(|k| f64::from(up[row * 4 + k]) * f64::from(down[k * 512 + col])).sum::<f64>() * 0.5;
        assert!((f64::from(*got) - want).abs() < 1e-6, "{i}: {got} {want}");
    }
}

#[test]
fn scales_of_peft_are_in_the_metadata() {
    let tensors = pair("transformer.transformer_blocks.0.attn.to_k", PEFT, [128, 128], 4);
    let scale = |settings: &str| {
        let shard = shard_with(&tensors, Some(("lora_adapter_metadata", settings)));
        Adapter::read(&shard, &places()).map(|adapter| adapter.layers[0].term.scale)
    };
    assert_eq!(scale(r#"{"transformer.r": 4, "transformer.lora_alpha": 8}"#).unwrap(), 2.0);
    assert_eq!(scale(r#"{"transformer.lora_alpha": 8, "transformer.use_rslora": true}"#).unwrap(), 4.0);
    let pattern = r#"{"transformer.lora_alpha": 8, "transformer.alpha_pattern": {"transformer_blocks.0.attn.to_k": 1}}"#;
    assert_eq!(scale(pattern).unwrap(), 0.25);
    assert_eq!(scale("{}").unwrap(), 1.0);
    assert!(scale("[").unwrap_err().to_string().contains("settings"));
    assert!(scale(r#"{"transformer.lora_alpha": 0}"#).unwrap_err().to_string().contains("alpha of 0"));
}

#[test]
fn kronecker_products_ignore_alpha_where_both_factors_are_whole() {
    let layer = "diffusion_model.double_blocks.1.txt_attn.proj";
    let part = |name: &str, shape: &[usize]| given(format!("{layer}.{name}"), shape);
    let alpha = |value: f32| Given(format!("{layer}.alpha"), vec![1], vec![value]);
    let whole = [part("lokr_w1", &[4, 4]), part("lokr_w2", &[32, 32]), alpha(9_999_999_999.0)];
    let adapter = read(&whole).unwrap();
    let got = delta(&adapter, 0);
    for (i, got) in got.iter().enumerate() {
        let (row, col) = (i / 128, i % 128);
        let want = f64::from(whole[0].2[row / 32 * 4 + col / 32]) * f64::from(whole[1].2[row % 32 * 32 + col % 32]);
        assert!((f64::from(*got) - want).abs() < 1e-6, "{i}");
    }
    let split = [part("lokr_w1", &[4, 4]), part("lokr_w2_a", &[32, 2]), part("lokr_w2_b", &[2, 32]), alpha(1.0)];
    assert_eq!(read(&split).unwrap().layers[0].term.scale, 0.5);
}

#[test]
fn files_that_do_not_fit_are_refused_and_say_why() {
    let qkv = "diffusion_model.double_blocks.0.img_attn.qkv";
    let good = pair(qkv, PEFT, [384, 128], 4);
    assert!(read(&good).is_ok());
    let with = |more: Given| [good.to_vec(), vec![more]].concat();
    for (tensors, text) in [
        (vec![good[0].clone()], "lacks a factor"),
        (with(given(format!("{qkv}.dora_scale"), &[384, 1])), "it is DoRA"),
        (with(given(format!("{qkv}.hada_w1_a"), &[4, 4])), "it is LoHa"),
        (with(given(format!("{qkv}.lora_A.other.weight"), &[4, 128])), "the same factor"),
        (with(given("something.weight", &[4])), "tensors besides"),
        (with(given(format!("{qkv}.alpha"), &[2])), "no number"),
        (with(Given(format!("{qkv}.alpha"), vec![], vec![0.0])), "alpha of 0"),
        (with(Given(format!("{qkv}.alpha"), vec![], vec![f32::NAN])), "alpha of NaN"),
        (pair(qkv, PEFT, [384, 256], 4).to_vec(), "the model's has [384, 128]"),
        (
            vec![given(format!("{qkv}.lora_A.weight"), &[4, 128]), given(format!("{qkv}.lora_B.weight"), &[384, 8])],
            "rank 4 in one factor and 8",
        ),
        (
            vec![given(format!("{qkv}.lora_A.weight"), &[4, 128]), given(format!("{qkv}.lora_B.weight"), &[384, 4, 3])],
            "no matrix",
        ),
        (pair("diffusion_model.double_blocks.7.img_attn.qkv", PEFT, [384, 128], 4).to_vec(), "near is `double_blocks."),
        (vec![given("img_in.weight", &[4, 4])], "no factors"),
        (
            [good.to_vec(), pair("transformer.transformer_blocks.0.attn.to_v", PEFT, [128, 128], 2).to_vec()].concat(),
            "for the same layer",
        ),
    ] {
        let said = refusal(&tensors);
        assert!(said.contains(text), "{said}: {text}");
    }
    let mut spoilt = good.to_vec();
    spoilt[1].2[17] = f32::INFINITY;
    assert!(refusal(&spoilt).contains("not finite"));
    // A file of another size of the model.
    assert!(refusal(&pair(qkv, PEFT, [12288, 4096], 1)).contains("FLUX.2 [klein] 9B"));
}

#[test]
fn what_the_model_does_not_have_is_listed() {
    let tensors = [
        pair("diffusion_model.double_blocks.0.img_attn.qkv", PEFT, [384, 128], 4),
        pair("diffusion_model.double_blocks.9.img_attn.qkv", PEFT, [384, 128], 4),
    ];
    let adapter = read(&tensors.concat()).unwrap();
    assert_eq!(
        (adapter.layers.len(), &adapter.unmatched[..]),
        (1, &["diffusion_model.double_blocks.9.img_attn.qkv".to_owned()][..])
    );
}
