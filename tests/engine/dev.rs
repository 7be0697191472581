//! FLUX.2 \[dev\]: its tiny configuration against diffusers, the effect of single mistakes, and how kiln tells it from klein.

use common::adapter_files::{Factor, PEFT, file, lora, read};
use common::dev::{Dev, dev, model, model_of, model_with, tokenizer};
use common::modes::hashed;
use common::quantized::{Content, Form, Plain, SHORT, plain_tensors, weights as weights_in, written};
use common::random::long;
use common::wrapped;
use common::{Goldens, cpu, relative_l2, run, small_job};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, GemmFormats, Op, Projection, Rope, RopeStyle, Softmax};
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::{ConfigFile, Configs, ModelDefaults, TextConfig, TextFamily, TransformerConfig, Variant};
use kiln::internals::model::{Loader, TextEncoder, text_manifest};
use kiln::internals::names::{Layout, file_tensors};
use kiln::internals::pipeline::{Engine, EstimateRequest, Job, LoadOptions, estimate};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{Arena, DType, Precision, Region, Tensor};
use kiln::internals::tiny;
use kiln::internals::tokenizer::{Padding, PromptFormat, Tokens};
use kiln::progress::{Phase, Silent};
use safetensors::tensor::Dtype;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

const PROMPT: &str = "a red fox in the snow";
const LENGTH: usize = 512;
const PAD: u32 = 11;

#[test]
fn every_stage_equals_diffusers() {
    // The other cases differ from these only by the side of zeros, the guidance or their size.
    let wanted = |name: &str| long() || ["left", "right", "left_zeros", "reference", "long", "turbo_lora"].contains(&name);
    common::dev::f32_equals_diffusers(&|| Box::new(cpu()), wanted);
}

#[test]
fn bf16_is_as_close_as_diffusers_in_bf16() {
    let wanted = |name: &str| long() || ["left", "reference", "turbo_lora"].contains(&name);
    common::dev::bf16_is_as_close_as_diffusers_in_bf16(&|| Box::new(cpu()), wanted);
}

/// The weights of a text encoder with this configuration, including all of its layers.
fn weights(config: &TextConfig) -> Weights {
    let [first, second, _] = config.text_layers;
    let all = TextConfig { text_layers: [first, second, config.layers], ..config.clone() };
    tiny::weights_of(Component::TextEncoder, &text_manifest(&all), DType::Bf16).unwrap()
}

/// The prompt embeddings that a text encoder computes from tokens on a backend, in f32.
fn embed(be: &mut dyn Backend, config: &TextConfig, tokens: &Tokens) -> Vec<f32> {
    let (mut region, mut ws) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    be.reserve(Region::Weights, 64 << 20).unwrap();
    let (weights, mut ignore) = (weights(config), |_| ());
    let encoder =
        TextEncoder::load(&mut Loader::new(be, &mut region, Some(&weights), Precision::F32, &mut ignore), config).unwrap();
    be.reserve(Region::Arena, 64 << 20).unwrap();
    let features = ws.alloc(tokens.ids.len(), config.features(), DType::F32).unwrap();
    encoder.forward(be, &mut ws, features, tokens).unwrap();
    let mut values = vec![0.0; features.len()];
    be.read(features, &mut values).unwrap();
    values
}

fn tokens(padding: Padding) -> Tokens {
    tokenizer().encode_padded(PROMPT, LENGTH, padding).unwrap()
}

/// Tokens of these ids, after `pad` padding tokens.
fn padded(ids: &[u32], pad: u32) -> Tokens {
    let before = vec![pad; LENGTH - ids.len()];
    Tokens { ids: [&before, ids].concat(), real: ids.len(), padding: Padding::Left, cut: 0 }
}

#[test]
fn the_residual_stream_is_that_of_transformers() {
    let (Dev { residual, .. }, goldens) = (dev(), Goldens::named("dev.safetensors"));
    let width = Configs::TINY_DEV.text_encoder.hidden;
    for (side, padding) in [("left", Padding::Left), ("right", Padding::Right)] {
        let want = goldens.f32(&format!("residual.{side}"));
        for (text_layers, found) in [([1, 2, 10], [1, 2, 3]), ([2, 10, 30], [2, 3, 4])] {
            let config = TextConfig { text_layers, ..Configs::TINY_DEV.text_encoder };
            assert_eq!(found.map(|at| residual.layers[at]), text_layers);
            let got = embed(&mut cpu(), &config, &tokens(padding));
            for (tap, at) in found.into_iter().enumerate() {
                for (i, row) in ["first", "last", "pad"].iter().enumerate() {
                    let row = residual.rows[side][*row];
                    let got = &got[row * 3 * width + tap * width..][..width];
                    let error = relative_l2(got, &want[(at * 3 + i) * width..][..width]);
                    assert!(error < 1e-5, "{side}, after {} layers, row {row}: {error:.2e}", text_layers[tap]);
                }
            }
        }
    }
}

/// Padding before a prompt depends on nothing: all its rows are equal to the bit, and equal to another prompt's padding.
#[test]
fn padding_before_a_prompt_is_one_constant() {
    let config = Configs::TINY_DEV.text_encoder;
    let rows = |prompt: &str| {
        let tokens = tokenizer().encode_padded(prompt, LENGTH, Padding::Left).unwrap();
        let first = tokens.rows().start;
        let all = embed(&mut cpu(), &config, &tokens);
        all[..first * config.features()].chunks_exact(config.features()).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let (one, other) = (rows(PROMPT), rows("Snow in a red fox, and more of it"));
    assert_eq!((one.len(), other.len()), (LENGTH - 194, LENGTH - 206));
    assert!(one.iter().chain(&other).all(|row| *row == one[0]));
}

/// Permutes an attention's query heads so that each uses the key head of its number modulo the number of key heads.
fn modulo_heads(inner: &mut Cpu, op: Op<'_>) -> kiln::error::Result<()> {
    let Op::Attention { out, q, kv, head_dim, .. } = op else { return inner.run(op) };
    let (heads, kv_heads) = (q.cols / head_dim, kv[0].k.cols / head_dim);
    let mut order: Vec<usize> = (0..heads).collect();
    order.sort_by_key(|head| (head % kv_heads, *head));
    let permuted = |inner: &mut Cpu, tensor: Tensor, back: bool| {
        let mut values = vec![0.0; tensor.len()];
        inner.read(tensor, &mut values)?;
        let before = values.clone();
        for (row, from) in values.chunks_exact_mut(tensor.cols).zip(before.chunks_exact(tensor.cols)) {
            for (place, &head) in order.iter().enumerate() {
                let (to, from_head) = if back { (head, place) } else { (place, head) };
                row[to * head_dim..][..head_dim].copy_from_slice(&from[from_head * head_dim..][..head_dim]);
            }
        }
        inner.write(tensor, &values)
    };
    permuted(inner, q, false)?;
    inner.run(op)?;
    permuted(inner, out[0], true)
}

/// The embeddings with a language model's final norm applied to the last tap of some rows.
fn with_final_norm(right: &[f32], rows: Range<usize>) -> Vec<f32> {
    let TextConfig { hidden, eps, .. } = Configs::TINY_DEV.text_encoder;
    let gain: Vec<f32> = (0..hidden).map(|i| 1.0 + (f32::from(hashed("model.norm.weight", i) & 127) - 64.0) / 128.0).collect();
    let mut all = right.to_vec();
    for row in all.chunks_exact_mut(3 * hidden).skip(rows.start).take(rows.len()) {
        let tap = &mut row[2 * hidden..];
        let mean = tap.iter().map(|v| v * v).sum::<f32>() / hidden as f32;
        tap.iter_mut().zip(&gain).for_each(|(v, gain)| *v *= gain / (mean + eps).sqrt());
    }
    all
}

/// The embeddings with a mistake; `None` if the mistake is not one of the encoder.
fn mistaken(name: &str, right: &[f32]) -> Option<Vec<f32>> {
    let config = Configs::TINY_DEV.text_encoder;
    let plain = |config: &TextConfig, tokens: &Tokens| Some(embed(&mut cpu(), config, tokens));
    let with = |instead: fn(&mut Cpu, Op<'_>) -> kiln::error::Result<()>| {
        Some(embed(&mut wrapped::instead(cpu(), instead), &config, &tokens(Padding::Left)))
    };
    let left = tokens(Padding::Left);
    let ids = &left.ids[left.rows()];
    let text = |text: &str| text.bytes().map(|byte| 1000 + u32::from(byte)).collect::<Vec<_>>();
    let newline = 2 + PromptFormat::MISTRAL.before["<s>[SYSTEM_PROMPT]".len()..].find('\n').unwrap();
    let inst = ids.iter().position(|id| *id == 3).unwrap();
    match name {
        "theta" => plain(&TextConfig { rope_theta: 1e6, ..config }, &left),
        "eps" => plain(&TextConfig { eps: 1e-6, ..config }, &left),
        "taps_early" => plain(&TextConfig { text_layers: [9, 19, 29], ..config }, &left),
        "taps_late" => plain(&TextConfig { text_layers: [11, 21, 31], ..config }, &left),
        "adjacent" => with(|inner, op| match op {
            Op::Qkv([s]) => {
                let rope = Rope { style: RopeStyle::Interleaved, ..s.rope };
                inner.run(Op::Qkv(&[Projection { rope, ..*s }]))
            }
            op => inner.run(op),
        }),
        "kv_modulo" => with(modulo_heads),
        "scale" => with(|inner, op| match op {
            Op::Attention { out, q, kv, head_dim, causal, .. } => {
                let softmax = Softmax::Natural { scale: 0.25 };
                inner.run(Op::Attention { out, q, kv, head_dim, causal, softmax })
            }
            op => inner.run(op),
        }),
        "not_causal" => with(|inner, op| match op {
            Op::Attention { out, q, kv, head_dim, softmax, .. } => {
                inner.run(Op::Attention { out, q, kv, head_dim, causal: false, softmax })
            }
            op => inner.run(op),
        }),
        "pad_id" => plain(&config, &padded(ids, 0)),
        "no_bos" => plain(&config, &padded(&ids[1..], PAD)),
        "two_bos" => plain(&config, &padded(&[&[1], ids].concat(), PAD)),
        "newline" => {
            let mut ids = ids.to_vec();
            assert_eq!(ids[newline], 1010);
            ids[newline] = 1032;
            plain(&config, &padded(&ids, PAD))
        }
        "space" => plain(&config, &padded(&[&ids[..=inst], &text(" "), &ids[inst + 1..]].concat(), PAD)),
        "no_system" => plain(&config, &padded(&[&[1], &ids[inst..]].concat(), PAD)),
        "zero_pads" => plain(&config, &tokens(Padding::LeftZeros)),
        "right_pads" => plain(&config, &tokens(Padding::Right)),
        "interleaved" => {
            let (width, features) = (config.hidden, config.features());
            let one = |(i, _): (usize, &f32)| {
                let (row, col) = (i / features, i % features);
                right[row * features + col % 3 * width + col / 3]
            };
            Some(right.iter().enumerate().map(one).collect())
        }
        "final_norm" => Some(with_final_norm(right, left.rows())),
        "final_norm_pads" => Some(with_final_norm(right, 0..LENGTH)),
        "right" => {
            let mut rows = right.to_vec();
            rows.rotate_left(left.rows().start * config.features());
            Some(rows)
        }
        // Padding rows that would attend, which this encoder never computes; and a case without a mistake.
        "not_causal_pads" | "average_pads" | "offset" => None,
        other => panic!("{other} is not tested"),
    }
}

#[test]
fn single_mistakes_are_far_beyond_the_limit() {
    let right = embed(&mut cpu(), &Configs::TINY_DEV.text_encoder, &tokens(Padding::Left));
    let mut tested = 0;
    for mistake in dev().mistakes {
        let Some(wrong) = mistaken(&mistake.name, &right) else { continue };
        let error = relative_l2(&wrong, &right);
        println!("{}: {error:.5}, recorded {}", mistake.name, mistake.relative_l2);
        assert!((error / mistake.relative_l2 - 1.0).abs() < 0.01, "{}: {error}, not {}", mistake.name, mistake.relative_l2);
        assert!(error > 100.0 * 1e-5, "{} would pass", mistake.name);
        tested += 1;
    }
    assert_eq!(tested, 20);
}

/// Defaults that cut prompts early, for tests that compare images. This saves most of the text encoder's work.
fn short() -> ModelDefaults {
    ModelDefaults { max_text_tokens: SHORT, ..ModelDefaults::klein() }
}

/// A guidance scale of zero is an input like any other, and does not make this a model without guidance.
#[test]
fn guidance_is_an_input() {
    let image = |guidance: f32, variant: Variant| {
        let mut model = model_with(short());
        model.variant = variant;
        let mut engine = Engine::load(Box::new(cpu()), model, LoadOptions::DEFAULT, &Silent).unwrap();
        run(&mut engine, &Job { guidance, padding: Padding::Left, ..small_job() }).unwrap().image
    };
    let four = image(4.0, Variant::Dev);
    assert!(four == image(4.0, Variant::Dev) && four != image(0.0, Variant::Dev) && four != image(3.5, Variant::Dev));
    // The scale is not a factor of classifier-free guidance, which would run each step twice.
    let mut engine = Engine::load(Box::new(cpu()), model_with(short()), LoadOptions::DEFAULT, &Silent).unwrap();
    let ops = |engine: &mut Engine, guidance| engine.plan(&Job { guidance, ..small_job() }).unwrap().ops;
    assert_eq!(ops(&mut engine, 4.0), ops(&mut engine, 0.0));
}

#[test]
fn dev_is_told_by_its_tensors() {
    let open = model();
    assert_eq!(open.configs.transformer, Configs::TINY_DEV.transformer);
    let text = &open.configs.text_encoder;
    assert_eq!((text.family, text.text_layers, text.eps, text.rope_theta), (TextFamily::Mistral3, [10, 20, 30], 1e-5, 1e9));
    assert_eq!((text.heads, text.kv_heads), (8, 2));
    let detected = |config: &TransformerConfig| Variant::detect(config, None, &["flux2-klein-base-kv"]).unwrap();
    assert_eq!(detected(&Configs::DEV.transformer), Variant::Dev);
    let defaults = ModelDefaults::klein();
    assert_eq!((defaults.steps(Variant::Dev), defaults.guide(Variant::Dev, None).chosen), (50, Some(4.0)));
    assert_eq!(Variant::Dev.spec().padding, Padding::Left);
}

/// A vision-language model's configuration contains the configuration of its language model. A window shorter than a prompt is refused.
#[test]
fn configurations_of_mistral_are_compared() {
    let config = Configs::TINY_DEV.text_encoder;
    let weights = weights(&config);
    let of = |window: &str, kind: &str| {
        let json = format!(
            r#"{{"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": {{
                "model_type": "{kind}", "hidden_size": 128, "num_hidden_layers": 31, "num_attention_heads": 8, "head_dim": 128,
                "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": 1280, "hidden_act": "silu", "rms_norm_eps": 1e-5,
                "rope_theta": 1000000000.0, "sliding_window": {window}}}}}"#
        );
        let file = ConfigFile::parse(Path::new("config.json"), json.as_bytes()).unwrap();
        TextConfig::detect(&weights, Some(&file), &ModelDefaults::klein())
    };
    assert_eq!(of("null", "mistral").unwrap(), config);
    assert_eq!(of("4096", "mistral").unwrap(), config);
    assert!(of("256", "mistral").unwrap_err().to_string().contains("sliding_window"));
    assert!(of("null", "llama").unwrap_err().to_string().contains("its configuration says `llama`"));
    assert_eq!(TextConfig::detect(&weights, None, &ModelDefaults::klein()).unwrap(), config);
}

/// The layers of the Turbo adapter: its one file has two prefixes and two spellings.
fn turbo_layers() -> Vec<(String, [usize; 2])> {
    const H: usize = 6144;
    let global = [
        ("img_in", [H, 128]),
        ("txt_in", [H, 15360]),
        ("time_in.in_layer", [H, 256]),
        ("time_in.out_layer", [H, H]),
        ("guidance_in.in_layer", [H, 256]),
        ("guidance_in.out_layer", [H, H]),
        ("double_stream_modulation_img.lin", [6 * H, H]),
        ("double_stream_modulation_txt.lin", [6 * H, H]),
        ("single_stream_modulation.lin", [3 * H, H]),
        ("final_layer.linear", [128, H]),
    ];
    let mut layers: Vec<_> = global.iter().map(|(name, shape)| (format!("diffusion_model.{name}"), *shape)).collect();
    for block in 0..48 {
        layers.push((format!("diffusion_model.single_blocks.{block}.linear1"), [9 * H, H]));
        layers.push((format!("diffusion_model.single_blocks.{block}.linear2"), [H, 4 * H]));
    }
    let attention = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"];
    for block in 0..8 {
        layers.extend(attention.map(|layer| (format!("transformer.transformer_blocks.{block}.attn.{layer}"), [H, H])));
    }
    layers
}

#[test]
fn all_layers_of_the_turbo_adapter_are_matched() {
    let layers = turbo_layers();
    assert_eq!(layers.len(), 170);
    let factors: Vec<Factor> = layers.iter().flat_map(|(name, shape)| lora(name, PEFT, *shape, 1)).collect();
    let adapter = read(file(&factors, DType::Bf16, &[]), &Configs::DEV.layer_targets()).unwrap();
    assert_eq!((adapter.layers.len(), adapter.unmatched.len()), (170, 0));
    // klein 9B has blocks of the same names, but another width.
    let refused = read(file(&factors, DType::Bf16, &[]), &Configs::KLEIN_9B.layer_targets()).unwrap_err();
    assert!(refused.to_string().contains("FLUX.2 [dev]"), "{refused}");
}

/// Memory of \[dev\] at its published sizes, with all weights resident and with weights that replace each other.
#[test]
fn the_plan_has_the_sizes_of_the_published_model() {
    let job = Job { size: Pixels::new(1024, 1024).unwrap(), steps: 50, padding: Padding::Left, ..small_job() };
    let configs = Configs::DEV;
    let estimate = |options| estimate(EstimateRequest::new(&configs, Variant::Dev, options, GemmFormats::ALL), &job).unwrap();
    let plain = estimate(LoadOptions::DEFAULT);
    // Weights of the transformer, 30 layers of the encoder and the VAE's decoder; tensors are aligned.
    let weights = 64_446_562_304 + 33_345_331_200;
    assert!((weights..weights + (200 << 20)).contains(&plain.weight_bytes), "{}", plain.weight_bytes);
    assert_eq!(plain.table_bytes, 131_072 * 5120 * 2);
    // The transformer replaces the smaller encoder; `txt_in` is loaded together with the encoder.
    let least = 64_446_562_304 - 188_743_680;
    assert!((least..least + (200 << 20)).contains(&plain.low_memory_weight_bytes), "{}", plain.low_memory_weight_bytes);
    // 282.6 TFLOP per step.
    let denoise = plain.stages.iter().find(|(phase, _)| *phase == Phase::Denoise).unwrap().1 as f64 / 50e12;
    assert!((denoise - 282.6).abs() < 3.0, "{denoise}");
    for (format, least, most) in [(DType::E4m3, 32.0e9, 55.0e9), (DType::E2m1, 18.0e9, 33.0e9)] {
        let quantized = estimate(LoadOptions { quantize: Some(format), ..LoadOptions::DEFAULT });
        let (low, all) = (quantized.low_memory_weight_bytes as f64, quantized.weight_bytes as f64);
        println!("{format:?}: {low:e} bytes, all at once {all:e}");
        assert!(low > least && all < most && low < all, "{format:?}: {low:e} {all:e}");
    }
}

/// The tensors of the tiny text encoder with a prefix, and the extra tensors of real files. Values do not matter.
fn file_of_encoder(prefix: &str, vocabulary: &[u8]) -> Weights {
    let config = Configs::TINY_DEV.text_encoder;
    let [first, second, _] = config.text_layers;
    let plain = |name: String, shape: Vec<usize>| {
        let bytes = vec![0x3f; 2 * shape.iter().product::<usize>()];
        Plain { name, dtype: Dtype::BF16, shape, bytes }
    };
    let manifest = text_manifest(&TextConfig { text_layers: [first, second, config.layers], ..config });
    let specs = manifest.iter().flat_map(|spec| file_tensors(Component::TextEncoder, Layout::Diffusers, spec));
    let rest = |name: &str| name.strip_prefix("model.").unwrap().to_owned();
    let mut tensors: Vec<Plain> = specs.map(|spec| plain(format!("{prefix}{}", rest(&spec.name)), spec.shape)).collect();
    for name in ["vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"] {
        tensors.push(plain(name.into(), vec![3, 5]));
    }
    // An odd length, so that the following tensor is not aligned.
    tensors.push(Plain {
        name: "tekken_model".into(),
        dtype: Dtype::U8,
        shape: vec![vocabulary.len()],
        bytes: vocabulary.to_vec(),
    });
    weights_in(Component::TextEncoder, written(&tensors, HashMap::new()))
}

#[test]
fn every_spelling_of_the_encoder_is_read() {
    let config = Configs::TINY_DEV.text_encoder;
    for prefix in ["language_model.model.", "model.language_model.", "model.", "text_encoders.mistral3_24b.transformer.model."] {
        let weights = file_of_encoder(prefix, b"{}   ");
        assert_eq!(TextConfig::detect(&weights, None, &ModelDefaults::klein()).unwrap(), config, "{prefix}");
        // kiln reads neither layers after the last tap nor tensors outside the language model.
        assert_eq!(weights.check(&text_manifest(&config)).unwrap(), Vec::<String>::new(), "{prefix}");
        assert_eq!(&weights.vocabulary().unwrap()[..], b"{}   ");
    }
}

/// The latents after a step of the tiny model with another transformer.
fn latents(transformer: &Content, form: Form) -> Vec<f32> {
    let open = model_of(weights_in(Component::Transformer, transformer.file(form)), short());
    assert_eq!(open.configs.transformer, Configs::TINY_DEV.transformer);
    let mut engine = Engine::load(Box::new(cpu()), open, LoadOptions::DEFAULT, &Silent).unwrap();
    let job = Job { guidance: 4.0, padding: Padding::Left, record: true, ..small_job() };
    run(&mut engine, &job).unwrap().record.unwrap().latents.pop().unwrap()
}

/// Layer formats as published: ComfyUI's FP8 file has the attention of double blocks in bf16, the NVFP4 file its text half. A reader that
/// confused plain and quantized layers would not come close to the model in bf16.
#[test]
fn files_with_some_layers_in_bf16_are_read() {
    let plain = |content: &Content| {
        // klein's tensors and the guidance's tensors; the latter copy the time's.
        let time =
            plain_tensors(Component::Transformer, Layout::Bfl).into_iter().filter(|tensor| tensor.name.starts_with("time_in."));
        let guidance = time.map(|tensor| Plain { name: tensor.name.replace("time_in.", "guidance_in."), ..tensor });
        Content { plain: content.plain.iter().cloned().chain(guidance).collect(), ..content.clone() }
    };
    let bf16 = latents(&plain(&Content::of("fp8").with_plain_layers(|_| true)), Form::BARE);
    for (file, form, kept, most) in [("fp8", Form::COMFY, "_attn.", [0.15, 0.08]), ("nvfp4", Form::BFL, ".txt_attn.", [0.45; 2])]
    {
        let error = |content: &Content| relative_l2(&latents(&plain(content), form), &bf16);
        let (all, mixed) = (Content::of(file), Content::of(file).with_plain_layers(|layer| layer.contains(kept)));
        assert!(all.layers.len() > mixed.layers.len() && !mixed.layers.is_empty());
        let (all, mixed) = (error(all), error(&mixed));
        println!("{file}: {all:.3}, with {kept} in bf16 {mixed:.3}");
        assert!(mixed > 1e-3 && mixed != all && all < most[0] && mixed < most[1], "{file}: {all} {mixed}");
    }
}
