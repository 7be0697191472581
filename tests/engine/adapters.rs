//! Adapters on a whole model: merged into its weights, or computed as branches.

use common::adapter_files::{Factor, PEFT, adapters, lokr, lora, lora_of_all};
use common::quantized::{Content, Form, Plain, SHORT, engine, model, plain_tensors, weights, written};
use common::{cpu, relative_l2, run, small_job};
use kiln::error::{Error, Result};
use kiln::internals::adapter::{AdapterMode, Adapters};
use kiln::internals::backend::GemmFormats;
use kiln::internals::component::Component;
use kiln::internals::config::Configs;
use kiln::internals::dump::Record;
use kiln::internals::model::{text_manifest, transformer_manifest};
use kiln::internals::names::{LayerRole, Layout, Stream};
use kiln::internals::pipeline::{Engine, Job, LoadOptions, OpenModel, estimate};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{ALIGN, DType, Precision};
use kiln::progress::Silent;
use kiln_program::cli::formats::format_lines;
use safetensors::tensor::Dtype;
use std::collections::HashMap;
use std::sync::Arc;

const MODES: [AdapterMode; 3] = [AdapterMode::Auto, AdapterMode::Merge, AdapterMode::Branch];

fn options(precision: Precision, adapters: AdapterMode) -> LoadOptions {
    LoadOptions { precision, adapters, ..LoadOptions::DEFAULT }
}

/// The tiny model in bf16, whose queries, keys and values are three matrices.
fn plain() -> OpenModel {
    let file = |part| written(&plain_tensors(part, Layout::Diffusers), HashMap::new());
    model(
        weights(Component::Transformer, file(Component::Transformer)),
        Some(weights(Component::TextEncoder, file(Component::TextEncoder))),
        SHORT,
    )
}

/// The tiny model with a quantized transformer.
fn quantized(format: &str) -> OpenModel {
    model(weights(Component::Transformer, Content::of(format).file(Form::BFL)), None, SHORT)
}

/// The transformer of a model with all its weights decoded to f32.
fn dequantized(quantized: &OpenModel) -> OpenModel {
    let tensor = |spec: &kiln::internals::names::TensorSpec| {
        let mut values = Vec::new();
        for part in quantized.weights().transformer.weight(spec).unwrap().parts {
            for row in 0..part.rows {
                let mut decoded = vec![0.0; part.cols()];
                part.decode(row, &mut decoded);
                values.extend(decoded);
            }
        }
        Plain { name: spec.name.clone(), dtype: Dtype::F32, shape: spec.shape.clone(), bytes: DType::F32.encoded(&values) }
    };
    let tensors: Vec<Plain> = transformer_manifest(&Configs::TINY.transformer).iter().map(tensor).collect();
    model(weights(Component::Transformer, written(&tensors, HashMap::new())), None, SHORT)
}

/// LoRA for all linear layers of the transformer.
fn of_transformer(rank: usize) -> Vec<Factor> {
    lora_of_all(&transformer_manifest(&Configs::TINY.transformer), rank)
}

/// LoRA for some of these layers: queries alone, halves stored in reverse order, and others.
fn other() -> Vec<Factor> {
    let layers = [
        ("transformer.transformer_blocks.1.attn.to_q", [256, 256]),
        ("transformer.norm_out.linear", [512, 256]),
        ("transformer.single_transformer_blocks.0.attn.to_out", [256, 1024]),
        ("text_encoder.model.layers.3.self_attn.k_proj", [256, 128]),
    ];
    layers.iter().flat_map(|(layer, shape)| lora(layer, PEFT, *shape, 20)).collect()
}

fn with(mut model: OpenModel, given: &[(&[Factor], f32)]) -> OpenModel {
    model.adapters = adapters(&model, given.iter().copied());
    model
}

fn job() -> Job {
    Job { record: true, ..small_job() }
}

fn record(model: OpenModel, options: LoadOptions) -> Record {
    run(&mut engine(Box::new(cpu()), model, options), &job()).unwrap().record.unwrap()
}

fn bytes(record: &Record) -> Vec<u8> {
    record.to_safetensors().unwrap()
}

/// The relative difference of the last latents.
fn difference(got: &Record, want: &Record) -> f64 {
    relative_l2(got.latents.last().unwrap(), want.latents.last().unwrap())
}

#[test]
fn a_branch_adds_what_is_merged() {
    let all = [of_transformer(4), lora_of_all(&text_manifest(&Configs::TINY.text_encoder), 3)].concat();
    let given: [(&[Factor], f32); 2] = [(&all, 0.1), (&other(), -0.05)];
    let [merged, beside] =
        [AdapterMode::Merge, AdapterMode::Branch].map(|mode| record(with(plain(), &given), options(Precision::F32, mode)));
    let without = record(plain(), options(Precision::F32, AdapterMode::Auto));
    let (effect, error) = (difference(&merged, &without), difference(&beside, &merged));
    println!("f32: {error:.2e} of an effect of {effect:.2e}");
    assert!(effect > 1e-2 && error < 1e-5, "{effect} {error}");
    assert!(relative_l2(&merged.prompt_embeds, &without.prompt_embeds) > 1e-2);
    assert!(relative_l2(&beside.prompt_embeds, &merged.prompt_embeds) < 1e-5);
    // In bf16 both round, and the branch at most twice as much.
    let [plain_error, branch_error] = [AdapterMode::Merge, AdapterMode::Branch]
        .map(|mode| difference(&record(with(plain(), &given), options(Precision::Bf16, mode)), &merged));
    println!("bf16: merged {plain_error:.2e}, branch {branch_error:.2e}");
    assert!(plain_error > 1e-4 && branch_error < 2.0 * plain_error, "{plain_error} {branch_error}");
    // By default, plain weights are merged.
    let uses = |mode| {
        let model = with(plain(), &given);
        let formats = model.formats(options(Precision::Bf16, mode), GemmFormats::ALL).unwrap();
        formats.adapter_uses(&model.adapters).iter().map(|of| (of.layers, of.merged, of.branches)).collect::<Vec<_>>()
    };
    let layers = all.len() / 2;
    for mode in [AdapterMode::Auto, AdapterMode::Merge] {
        assert_eq!(uses(mode), [(layers, layers, 0), (4, 4, 0)]);
    }
    assert_eq!(uses(AdapterMode::Branch), [(layers, 0, layers), (4, 0, 4)]);
}

#[test]
fn two_adapters_are_their_sum() {
    // Two adapters equal one whose factors are the concatenation of both.
    let name = "double_blocks.0.img_mlp.0";
    let [a, b] = [3, 5].map(|rank| lora(&format!("{name}.{rank}"), PEFT, [1536, 256], rank));
    let named = |factors: &[Factor]| -> Vec<Factor> {
        factors.iter().zip(PEFT).map(|(factor, end)| Factor { name: format!("{name}{end}"), ..factor.clone() }).collect()
    };
    let down = [&a[0].values[..], &b[0].values].concat();
    let scaled = |values: &[f32], by: f32| values.iter().map(|value| by * value).collect::<Vec<_>>();
    let up = (0..1536).flat_map(|row| [scaled(&a[1].values[3 * row..][..3], 0.25), scaled(&b[1].values[5 * row..][..5], -0.5)]);
    let both = [
        Factor { name: format!("{name}{}", PEFT[0]), shape: vec![8, 256], values: down },
        Factor { name: format!("{name}{}", PEFT[1]), shape: vec![1536, 8], values: up.flatten().collect() },
    ];
    let (a, b) = (named(&a), named(&b));
    for mode in [AdapterMode::Merge, AdapterMode::Branch] {
        let of = |given: &[(&[Factor], f32)]| record(with(plain(), given), options(Precision::F32, mode));
        let (sum, single) = (of(&[(&a, 0.25), (&b, -0.5)]), of(&[(&both, 1.0)]));
        assert!(difference(&sum, &single) < 1e-5, "{mode:?}: {}", difference(&sum, &single));
        assert!(difference(&sum, &of(&[(&a, 0.25)])) > 1e-3, "{mode:?}");
    }
}

#[test]
fn without_strength_nothing_changes() {
    for (model, precision, modes) in [
        (plain as fn() -> OpenModel, Precision::F32, &[AdapterMode::Merge, AdapterMode::Branch][..]),
        (|| quantized("fp8"), Precision::Bf16, &[AdapterMode::Merge]),
    ] {
        let without = bytes(&record(model(), options(precision, AdapterMode::Auto)));
        for &mode in modes {
            let with = with(model(), &[(&of_transformer(4), 0.0), (&other(), -0.0)]);
            let planned = estimate(with.estimate_request(options(precision, mode), GemmFormats::ALL), &job()).unwrap();
            assert_eq!(planned, estimate(model().estimate_request(options(precision, mode), GemmFormats::ALL), &job()).unwrap());
            assert!(bytes(&record(with, options(precision, mode))) == without, "{precision:?} {mode:?}");
        }
    }
}

/// A set of adapters, as jobs name them.
fn set(model: &OpenModel, given: &[(&[Factor], f32)]) -> Option<Arc<Adapters>> {
    Some(Arc::new(adapters(model, given.iter().copied())))
}

#[test]
fn jobs_can_have_adapters_of_their_own() {
    let (a, b) = (of_transformer(4), other());
    for (open, options) in [
        (plain as fn() -> OpenModel, LoadOptions { low_memory: true, ..options(Precision::Bf16, AdapterMode::Branch) }),
        (|| quantized("nvfp4"), options(Precision::Bf16, AdapterMode::Branch)),
    ] {
        let model = with(open(), &[(&b, 0.125)]);
        let sets = [
            None,
            set(&model, &[(&a, 0.1)]),
            set(&model, &[]),
            set(&model, &[(&a, 0.1), (&b, 0.2)]),
            set(&model, &[(&b, 0.125)]),
        ];
        let jobs = sets.map(|adapters| Job { adapters, ..job() });
        let fresh: Vec<_> = jobs
            .iter()
            .take(4)
            .map(|job| run(&mut engine(Box::new(cpu()), with(open(), &[(&b, 0.125)]), options), job).unwrap())
            .map(|generated| (generated.image, bytes(&generated.record.unwrap())))
            .collect();
        assert!((0..4).all(|i| (0..i).all(|j| fresh[i].0 != fresh[j].0)), "the sets make a difference");
        assert!(fresh[2].1 == bytes(&record(open(), LoadOptions { adapters: AdapterMode::Auto, ..options })), "none");
        let mut engine = engine(Box::new(cpu()), model, options);
        engine.cache_results(64 << 20, &jobs[0]).unwrap();
        // Without a record the engine caches the prompt, but not for other adapters.
        for i in [0, 1, 0, 2, 1, 4] {
            assert_eq!(run(&mut engine, &Job { record: false, ..jobs[i].clone() }).unwrap().image, fresh[i % 4].0, "set {i}");
        }
        assert!(bytes(&run(&mut engine, &jobs[3]).unwrap().record.unwrap()) == fresh[3].1);
    }
}

#[test]
fn merged_adapters_cannot_be_replaced() {
    // Quantized block layers have branches; other layers are merged.
    let model = with(quantized("nvfp4"), &[(&of_transformer(4), 0.1)]);
    let [others, same] = [set(&model, &[(&other(), 1.0)]), set(&model, &[(&of_transformer(4), 0.1)])];
    let mut engine = engine(Box::new(cpu()), model, options(Precision::Bf16, AdapterMode::Auto));
    let first = run(&mut engine, &job()).unwrap().image;
    let refused = run(&mut engine, &Job { adapters: others, ..job() }).unwrap_err();
    assert!(matches!(&refused, Error::Usage { what, .. } if what.contains("are merged into")), "{refused}");
    assert!(refused.hint().unwrap().contains("unmerged adapters"));
    // The next job equals the first, also if it names the model's own adapters.
    assert_eq!(run(&mut engine, &job()).unwrap().image, first);
    assert_eq!(run(&mut engine, &Job { adapters: same, ..job() }).unwrap().image, first);
}

#[test]
fn quantized_weights_stay_as_they_are() {
    let (a, b) = (of_transformer(4), other());
    let given: [(&[Factor], f32); 2] = [(&a, 0.1), (&b, 0.1)];
    for (format, modes) in [("fp8", &MODES[..]), ("nvfp4", &MODES[..1])] {
        // In f32, inputs are not quantized, so only the weights differ.
        let wide = |mode| options(Precision::F32, mode);
        let want = record(with(dequantized(&quantized(format)), &given), wide(AdapterMode::Merge));
        let without = record(dequantized(&quantized(format)), wide(AdapterMode::Merge));
        for &mode in modes {
            let error = difference(&record(with(quantized(format), &given), wide(mode)), &want);
            println!("{format} {mode:?}: {error:.2e} of an effect of {:.2e}", difference(&without, &want));
            assert!(error < 1e-5 && difference(&without, &want) > 1e-2, "{format} {mode:?}: {error}");
        }
        // In bf16 the errors equal the quantized model's errors without adapters.
        let narrow = options(Precision::Bf16, AdapterMode::Auto);
        let usual = difference(&record(quantized(format), narrow), &without);
        let error = difference(&record(with(quantized(format), &given), narrow), &want);
        println!("{format} in bf16: {error:.2e}, without adapters {usual:.2e}");
        assert!(error < 2.0 * usual, "{format}: {error} {usual}");

        // Quantized block layers have a branch, plain layers are merged.
        let model = with(quantized(format), &given);
        let formats = model.formats(narrow, GemmFormats::ALL).unwrap();
        for layer in &formats.layers {
            let is_named = a
                .iter()
                .chain(&b)
                .any(|factor| layer.id.canonical().strip_suffix(".weight").is_some_and(|l| factor.name.contains(l)));
            let is_other = [LayerRole::EncoderQkv.of_block(3), LayerRole::FinalModulation.only()].contains(&layer.id);
            assert!(!layer.merged || is_named || is_other);
            assert!(!(layer.merged && layer.parts.iter().any(|part| part.held.is_quantized())), "{}", layer.id);
        }
        let uses = formats.adapter_uses(&model.adapters);
        assert!(uses[0].branches > 0 && uses[0].merged > 0 && uses[0].branches + uses[0].merged == uses[0].layers, "{uses:?}");
        // A backend without such GEMMs expands the weights, and merges them.
        let none = model.formats(narrow, GemmFormats::NONE).unwrap().adapter_uses(&model.adapters);
        assert!(none.iter().all(|of| of.merged == of.layers && of.branches == 0), "{none:?}");
        // Merging expands the weights, and kiln says so.
        let lines = format_lines(&model.formats(options(Precision::Bf16, AdapterMode::Merge), GemmFormats::ALL).unwrap());
        assert!(lines.iter().any(|line| line.contains("expanded to bf16 (merged with an adapter)")), "{lines:?}");
    }
}

#[test]
fn what_is_too_wide_for_a_branch_is_merged() {
    let name = "single_blocks.1.linear2";
    let narrow = |mode| options(Precision::Bf16, mode);
    let merged = |model: &OpenModel, mode| -> Result<Vec<String>> {
        let formats = model.formats(narrow(mode), GemmFormats::ALL)?;
        Ok(formats.layers.into_iter().filter(|layer| layer.merged).map(|layer| layer.id.canonical()).collect())
    };
    // Full factors have the rank of the weight itself, here at most 256.
    let whole = lokr(name, ([4, 8], None), ([64, 128], None));
    let model = with(quantized("fp8"), &[(&whole, 0.05)]);
    assert_eq!(merged(&model, AdapterMode::Auto).unwrap(), [""; 0]);
    let [merge, beside] = [AdapterMode::Merge, AdapterMode::Branch]
        .map(|mode| record(with(quantized("fp8"), &[(&whole, 0.05)]), options(Precision::F32, mode)));
    assert!(difference(&beside, &merge) < 1e-5);
    // Five of these factors are too many.
    let five = || with(quantized("fp8"), &[(&whole[..], 0.05); 5]);
    assert_eq!(merged(&five(), AdapterMode::Auto).unwrap(), [format!("{name}.weight")]);
    let lines = format_lines(&five().formats(narrow(AdapterMode::Auto), GemmFormats::ALL).unwrap());
    assert!(lines.iter().any(|line| line.contains("1 fp8 expanded to bf16 (merged with an adapter)")), "{lines:?}");
    let refused = merged(&five(), AdapterMode::Branch).unwrap_err();
    let want = "adapters add a rank of 1280 to `single_blocks.1.linear2.weight`; a LoRA branch has at most 1024";
    assert_eq!((refused.to_string().as_str(), refused.hint().is_some()), (want, true));
    let mut engine = engine(Box::new(cpu()), quantized("fp8"), narrow(AdapterMode::Auto));
    let job = Job { adapters: Some(Arc::new(five().adapters)), ..job() };
    assert_eq!(run(&mut engine, &job).unwrap_err().to_string(), want);
    // Five adapters equal one of five times the strength.
    let sum = record(five(), options(Precision::F32, AdapterMode::Auto));
    let one = record(with(quantized("fp8"), &[(&whole, 0.25)]), options(Precision::F32, AdapterMode::Branch));
    assert!(difference(&sum, &one) < 1e-5);
}

#[test]
fn weights_that_are_quantized_at_load() {
    let given: [(&[Factor], f32); 1] = [(&of_transformer(4), 0.1)];
    for format in [DType::E4m3, DType::E2m1] {
        let options = |precision, mode| LoadOptions { quantize: Some(format), ..options(precision, mode) };
        let model = with(plain(), &given);
        let uses = |mode| {
            let formats = model.formats(options(Precision::Bf16, mode), GemmFormats::ALL).unwrap();
            assert!(formats.quantized_at_load().is_some());
            let of = formats.adapter_uses(&model.adapters).remove(0);
            (of.merged, of.branches)
        };
        // The blocks have twenty layers.
        assert_eq!(uses(AdapterMode::Auto).1, 20);
        assert_eq!(uses(AdapterMode::Merge).1, 0);
        assert_eq!(uses(AdapterMode::Branch).0, 0);
        if format == DType::E2m1 {
            continue;
        }
        // Both equal the model with its adapter, up to the error of quantizing it.
        let of = |mode| record(with(plain(), &given), options(Precision::F32, mode));
        let want = record(with(plain(), &given), LoadOptions { quantize: None, ..options(Precision::F32, AdapterMode::Merge) });
        let [merged, beside] = [AdapterMode::Merge, AdapterMode::Auto].map(|mode| difference(&of(mode), &want));
        println!("{format:?}: merged before {merged:.2e}, branch {beside:.2e}");
        assert!(beside < 1.2 * merged && merged < 0.5, "{format:?}: {beside} {merged}");
    }
}

#[test]
fn memory_is_as_planned() {
    let (a, job) = (of_transformer(20), Job { size: Pixels::new(128, 64).unwrap(), ..small_job() });
    for (precision, size) in [(Precision::Bf16, 2), (Precision::F32, 4)] {
        let estimate = |model: &OpenModel, mode, job: &Job| {
            estimate(model.estimate_request(options(precision, mode), GemmFormats::ALL), job).unwrap()
        };
        let (without, with) = (plain(), with(plain(), &[(&a, 0.1)]));
        let none = estimate(&without, AdapterMode::Branch, &job);
        let beside = estimate(&with, AdapterMode::Branch, &job);
        // Ranks are padded to 32, and matrices to the memory alignment.
        let linear = transformer_manifest(&Configs::TINY.transformer).into_iter().filter(|spec| spec.shape.len() == 2);
        let region: u64 = linear
            .flat_map(|spec| [32 * spec.shape[1], 32 * spec.shape[0]])
            .map(|elements| (elements as u64 * size).next_multiple_of(ALIGN))
            .sum();
        assert_eq!((none.adapter_bytes, beside.adapter_bytes), (0, region));
        assert_eq!(beside.weight_bytes - none.weight_bytes, region);
        assert_eq!(beside.low_memory_weight_bytes - none.low_memory_weight_bytes, region);
        assert_eq!(beside.copied_bytes - none.copied_bytes, region);
        assert!(beside.stages[1].1 > none.stages[1].1, "its products count");
        // A job that names the same adapters has the same plan.
        let own = Job { adapters: Some(Arc::new(with.adapters.clone())), ..job.clone() };
        assert_eq!(estimate(&without, AdapterMode::Branch, &own), beside);
        // A merged weight has the size of the weight it replaces, and is copied. In f32 it is no longer bf16. A GPU that merges also holds
        // both factors of one weight at a time in f32.
        let merged = estimate(&with, AdapterMode::Merge, &job);
        let linear = transformer_manifest(&Configs::TINY.transformer).into_iter().filter(|spec| spec.shape.len() == 2);
        let factors = |spec: kiln::internals::names::TensorSpec| -> u64 {
            spec.shape.iter().map(|side| (4 * 32 * *side as u64).next_multiple_of(ALIGN)).sum()
        };
        let room = if precision == Precision::Bf16 { linear.map(factors).max().unwrap() } else { 0 };
        assert_eq!((merged.adapter_bytes, merged.arena_bytes), (room, none.arena_bytes));
        let held: u64 =
            merged.formats.layers.iter().filter(|l| l.merged).flat_map(|l| &l.parts).map(|part| part.held_bytes).sum();
        assert_eq!(merged.copied_bytes - none.copied_bytes, held + room);
        assert_eq!(merged.weight_bytes - none.weight_bytes, held - held / (size / 2) + room);
        for mode in MODES {
            let planned = estimate(&with, mode, &job).arena_bytes;
            let mut model = plain();
            model.adapters = with.adapters.clone();
            let mut engine = engine(Box::new(cpu()), model, options(precision, mode));
            assert_eq!(engine.plan(&job).unwrap().arena_bytes.next_multiple_of(ALIGN), planned.next_multiple_of(ALIGN));
            engine.check_memory(&job).unwrap();
        }
    }
}

#[test]
fn adapters_of_another_model_are_refused() {
    let layer = lora("double_blocks.0.img_mlp.0", PEFT, [1536, 256], 4);
    // A weight of another shape, and a weight that the model does not have.
    for id in [LayerRole::MlpOut(Stream::Image).of_block(0), LayerRole::MlpIn(Stream::Image).of_block(7)] {
        for mode in MODES {
            let mut model = with(plain(), &[(&layer, 1.0)]);
            model.adapters.0[0].0.layers[0].target.id = id;
            let error = Engine::load(Box::new(cpu()), model, options(Precision::F32, mode), &Silent).err().unwrap().to_string();
            assert!(error.contains("an adapter was opened for another model"), "{id} {mode:?}: {error}");
        }
    }
}
