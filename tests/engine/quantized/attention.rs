//! Attention with e4m3 queries and keys: its blocks, factors and bounds, and its effect on accuracy. Also counts activations
//! that saturate in FP8.

use common::quantized::{Content, Form, Layer, SHORT, engine, model, weights};
use common::wrapped;
use common::{cpu, relative_l2, run, small_job};
use kiln::error::Error;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, GemmFormats, Modulated, Op, Softmax};
use kiln::internals::component::Component;
use kiln::internals::config::{HEAD_DIM, Variant};
use kiln::internals::model::{AttentionFormat, PlainHeads};
use kiln::internals::pipeline::{GeneratedImage, Job, LoadOptions, OpenModel, ReferenceInput};
use kiln::internals::sequence::Grid;
use kiln::internals::tensor::formats::{e4m3, to_e4m3};
use kiln::internals::tensor::{Arena, DType, Precision, Region, Scale, Stored, Tensor};
use std::cell::RefCell;
use std::f32::consts::LOG2_E;
use std::rc::Rc;

fn open(content: &Content) -> OpenModel {
    model(weights(Component::Transformer, content.file(Form::BFL)), None, SHORT)
}

fn options(attention: AttentionFormat) -> LoadOptions {
    LoadOptions { attention, ..LoadOptions::DEFAULT }
}

fn values(be: &mut Cpu, tensor: Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.len()];
    be.read(tensor, &mut values).unwrap();
    values
}

/// An attention op that ran, and the projection before it.
#[derive(Clone, Debug, PartialEq)]
struct Attended {
    q: Stored,
    /// Formats of the keys and values of each segment.
    kv: Vec<(Stored, Stored)>,
    /// The factors of queries and keys.
    scales: (f32, f32),
    bound: f32,
    /// The largest score of any query and key.
    largest: f32,
}

/// The largest score of the queries and keys of an attention, over all heads.
fn largest_score(be: &mut Cpu, q: Tensor, keys: &[Tensor]) -> f32 {
    let (queries, mut largest) = (values(be, q), f32::MIN);
    for &k in keys {
        let keys = values(be, k);
        for (q, k) in queries.chunks(q.cols).flat_map(|q| keys.chunks(k.cols).map(move |k| (q, k))) {
            let heads = q.chunks(HEAD_DIM).zip(k.chunks(HEAD_DIM));
            largest = heads.map(|(q, k)| q.iter().zip(k).map(|(q, k)| q * k).sum()).fold(largest, f32::max);
        }
    }
    largest
}

/// Runs a job, and collects every attention of the transformer.
fn attended(model: OpenModel, options: LoadOptions, gemms: GemmFormats, job: &Job) -> (Vec<Attended>, GeneratedImage) {
    let (found, scales) = (Rc::new(RefCell::new(Vec::new())), RefCell::new((0.0, 0.0)));
    let list = found.clone();
    let mut backend = wrapped::after_op(cpu(), move |_, op, be| {
        match op {
            Op::Qkv(streams) => {
                *scales.borrow_mut() = (streams[0].q_scale, streams[0].k_scale);
                assert!(streams.iter().all(|s| (s.q_scale, s.k_scale) == *scales.borrow()), "streams of one block");
            }
            // The attention of the text encoder and of the VAE has another softmax.
            Op::Attention { q, kv, softmax: Softmax::Base2 { bound }, .. } => {
                let keys: Vec<Tensor> = kv.iter().map(|segment| segment.k).collect();
                list.borrow_mut().push(Attended {
                    q: q.stored(),
                    kv: kv.iter().map(|segment| (segment.k.stored(), segment.v.stored())).collect(),
                    scales: *scales.borrow(),
                    bound,
                    largest: largest_score(be, q, &keys),
                });
            }
            _ => {}
        }
        Ok(())
    });
    backend.observer.formats = gemms;
    let image = run(&mut engine(Box::new(backend), model, options), job).unwrap();
    (found.take(), image)
}

const FP8: Stored = Stored::fp8(Scale::ONE);
const BF16: Stored = Stored::plain(DType::Bf16);

/// Whether attention is in e4m3 throughout, with the factors and the bound of its format.
fn is_fp8(attention: &Attended) -> bool {
    let heads = attention.q;
    assert!(attention.kv.iter().all(|kv| *kv == (heads, BF16)), "{attention:?}");
    assert!(heads == FP8 || heads == BF16, "{attention:?}");
    let (whole, (q, k)) = (LOG2_E / (HEAD_DIM as f32).sqrt(), attention.scales);
    let want = if heads == FP8 { (whole.sqrt(), whole.sqrt()) } else { (whole, 1.0) };
    assert_eq!((q, k), want, "{attention:?}");
    assert!(attention.largest <= attention.bound && attention.bound.is_finite(), "{attention:?}");
    heads == FP8
}

#[test]
fn blocks_with_quantized_inputs_attend_in_fp8() {
    // The tiny model has two blocks of each kind. A double block needs both streams.
    let whole = Content::of("fp8");
    let plain = |name: &'static str| whole.with_plain_layers(move |layer| layer == name);
    for (content, attention, gemms, want) in [
        (whole.clone(), AttentionFormat::Auto, GemmFormats::ALL, [true; 4]),
        (whole.clone(), AttentionFormat::Fp8, GemmFormats::ALL, [true; 4]),
        (whole.clone(), AttentionFormat::Bf16, GemmFormats::ALL, [false; 4]),
        (whole.clone(), AttentionFormat::Auto, GemmFormats { qk8: false, ..GemmFormats::ALL }, [false; 4]),
        (whole.clone(), AttentionFormat::Auto, GemmFormats { w8a8: false, ..GemmFormats::ALL }, [false; 4]),
        (plain("double_blocks.1.txt_attn.qkv"), AttentionFormat::Auto, GemmFormats::ALL, [true, false, true, true]),
        (plain("single_blocks.0.linear1"), AttentionFormat::Auto, GemmFormats::ALL, [true, true, false, true]),
        (Content::of("nvfp4").clone(), AttentionFormat::Auto, GemmFormats::ALL, [true; 4]),
        (Content::of("nvfp4").clone(), AttentionFormat::Auto, GemmFormats { w4a4: false, ..GemmFormats::ALL }, [false; 4]),
    ] {
        let model = open(&content);
        let formats = model.formats(options(attention), gemms).unwrap().attention;
        let planned: Vec<bool> = formats.iter().map(|block| block.heads == DType::E4m3).collect();
        assert_eq!(planned, want, "{attention:?} {gemms:?}");
        assert!(formats.iter().all(|block| block.why.is_none() == (block.heads == DType::E4m3) && block.values == DType::Bf16));
        let (found, image) = attended(model, options(attention), gemms, &small_job());
        assert_eq!(found.iter().map(is_fp8).collect::<Vec<_>>(), want, "{attention:?} {gemms:?}");
        assert_eq!(image.saturated, 0);
    }
}

/// In e4m3 the bound on scores is larger. If e4m3 needs a running maximum and bf16 does not, bf16 is faster.
#[test]
fn blocks_stay_in_bf16_where_only_that_needs_no_maximum() {
    // The gain of a double block is the larger gain of its streams.
    for (norms, small, block) in [
        ("double_blocks.1.txt_attn.norm.", "double_blocks.1.img_attn.norm.", 1),
        ("double_blocks.0.img_attn.norm.", "double_blocks.0.txt_attn.norm.", 0),
        ("single_blocks.0.norm.", "none", 2),
    ] {
        // With 4,608 keys softmax needs no maximum up to gains of 2.497 in bf16 and 2.379 in e4m3.
        for (gain, attention, is_plain) in [
            (2.375, AttentionFormat::Auto, false),
            (2.4375, AttentionFormat::Auto, true),
            (2.4375, AttentionFormat::Fp8, false),
            (2.5, AttentionFormat::Auto, false),
        ] {
            let mut content = Content::of("fp8").clone();
            for (names, gain) in [(norms, gain), (small, 1.0)] {
                let norms = content.plain.iter_mut().filter(|tensor| tensor.name.starts_with(names));
                norms.for_each(|norm| norm.bytes = DType::Bf16.encoded(&[gain; HEAD_DIM]));
            }
            let model = open(&content);
            let planned = model.formats(options(attention), GemmFormats::ALL).unwrap().attention;
            let why = |i| (is_plain && i == block).then_some(PlainHeads::MaxFree);
            let want: Vec<_> = (0..4).map(why).collect();
            assert_eq!(planned.iter().map(|block| block.why).collect::<Vec<_>>(), want, "{norms} {gain} {attention:?}");
            let (found, _) = attended(model, options(attention), GemmFormats::ALL, &small_job());
            let want: Vec<bool> = want.iter().map(Option::is_none).collect();
            assert_eq!(found.iter().map(is_fp8).collect::<Vec<_>>(), want, "{norms} {gain} {attention:?}");
        }
    }
}

#[test]
fn bf16_attention_is_that_of_a_backend_without_another() {
    let images = [
        (AttentionFormat::Bf16, GemmFormats::ALL),
        (AttentionFormat::Auto, GemmFormats { qk8: false, ..GemmFormats::ALL }),
        (AttentionFormat::Auto, GemmFormats::ALL),
    ];
    let job = Job { record: true, ..small_job() };
    let images = images.map(|(attention, gemms)| {
        let (_, image) = attended(open(Content::of("fp8")), options(attention), gemms, &job);
        image.record.unwrap().to_safetensors().unwrap()
    });
    assert!(images[0] == images[1], "to the bit");
    assert!(images[0] != images[2], "the format matters");
}

#[test]
fn cached_keys_have_the_format_of_their_block() {
    let content = Content::of("fp8").with_plain_layers(|layer| layer == "double_blocks.0.txt_attn.qkv");
    let mut model = open(&content);
    model.variant = Variant::Kv;
    let grid = Grid { width: 4, height: 4 };
    let pixels = (0..3 * 256 * grid.tokens()).map(|i| ((i * 7919) % 257) as f32 / 128.0 - 1.0).collect::<Vec<f32>>().into();
    let job = Job { references: vec![ReferenceInput { grid, pixels }], ..small_job() };
    let options = LoadOptions { references: true, ..LoadOptions::DEFAULT };
    // The plan uses the same formats. If its memory were too small, an op would fail.
    let (found, _) = attended(model, options, GemmFormats::ALL, &job);
    // While references are encoded, the last block has no queries. That run leaves out the text stream, but the block has one.
    let blocks: Vec<bool> = found.iter().map(is_fp8).collect();
    assert_eq!(blocks, [false, true, true, false, true, true, true]);
    let segments: Vec<usize> = found.iter().map(|attention| attention.kv.len()).collect();
    assert_eq!(segments, [1, 1, 1, 2, 2, 2, 2]);
}

#[test]
fn fp8_attention_that_cannot_be_had_is_an_error() {
    let whole = Content::of("fp8");
    let mixed = whole.with_plain_layers(|layer| layer == "single_blocks.1.linear1");
    for (content, precision, gemms, want, why) in [
        (whole, Precision::F32, GemmFormats::ALL, "nothing is quantized in f32 precision", PlainHeads::Precision),
        (whole, Precision::Bf16, GemmFormats::NONE, "this device has no kernel for it", PlainHeads::Device),
        (&mixed, Precision::Bf16, GemmFormats::ALL, "the inputs of `single_blocks.1` are not quantized", PlainHeads::Inputs),
    ] {
        let model = open(content);
        let of = |attention| model.formats(LoadOptions { precision, attention, ..LoadOptions::DEFAULT }, gemms);
        let error = of(AttentionFormat::Fp8).unwrap_err();
        assert!(matches!(error, Error::Usage { .. }));
        assert_eq!(error.to_string(), format!("FP8 attention is impossible: {want}"));
        assert_eq!(error.hint().unwrap(), "leave its format open; kiln then uses FP8 where it can");
        let formats = of(AttentionFormat::Auto).unwrap().attention;
        assert_eq!(formats.last().unwrap().why, Some(why));
    }
}

/// Plain attention of one head in f64.
fn plain_attention(q: &[Vec<f32>], k: &[Vec<f32>], v: &[Vec<f32>]) -> Vec<f32> {
    let mut out = Vec::new();
    for q in q {
        let score = |k: &Vec<f32>| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>().exp2();
        let scores: Vec<f64> = k.iter().map(score).collect();
        let sum: f64 = scores.iter().sum();
        let column = |i: usize| scores.iter().zip(v).map(|(p, v)| p * f64::from(v[i])).sum::<f64>() / sum;
        out.extend((0..HEAD_DIM).map(|i| column(i) as f32));
    }
    out
}

/// The first head of a matrix, row by row.
fn head(values: &[f32], cols: usize) -> Vec<Vec<f32>> {
    values.chunks(cols).map(|row| row[..HEAD_DIM].to_vec()).collect()
}

/// Up to the first attention both runs are equal, so that it differs only by the rounding of queries and keys. The difference is
/// the one that plain arithmetic gives, and at most twice as large.
#[test]
fn the_error_is_that_of_rounding_queries_and_keys() {
    /// Queries, keys, values and results of the first head of the first attention.
    fn first(attention: AttentionFormat) -> [Vec<Vec<f32>>; 4] {
        let found = Rc::new(RefCell::new(None));
        let first = found.clone();
        let backend = wrapped::after_op(cpu(), move |_, op, be| {
            let is_first = first.borrow().is_none();
            if let (Op::Attention { out, q, kv, softmax: Softmax::Base2 { .. }, .. }, true) = (op, is_first) {
                let heads = [q, kv[0].k, kv[0].v, out[0]].map(|tensor| head(&values(be, tensor), tensor.cols));
                *first.borrow_mut() = Some(heads);
            }
            Ok(())
        });
        // The results are not quantized, so only queries and keys are.
        let content = Content::of("fp8").with_plain_layers(|layer| layer.ends_with("_attn.proj"));
        run(&mut engine(Box::new(backend), open(&content), options(attention)), &small_job()).unwrap();
        found.take().unwrap()
    }
    let [q, k, v, out] = first(AttentionFormat::Bf16);
    let [q8, k8, v8, out8] = first(AttentionFormat::Auto);
    assert_eq!(v, v8, "values are as they were");
    let scale = (LOG2_E / (HEAD_DIM as f32).sqrt()).sqrt();
    let rounded = |rows: &[Vec<f32>], factor: f32| -> Vec<Vec<f32>> {
        rows.iter().map(|row| row.iter().map(|v| e4m3(to_e4m3(v * factor))).collect()).collect()
    };
    // Queries in bf16 have the whole factor, keys have none.
    let (q_plain, k_plain) = (rounded(&q, 1.0 / scale), rounded(&k, scale));
    let rows = out.len();
    let (exact, plain) = (plain_attention(&q[..rows], &k, &v), plain_attention(&q_plain[..rows], &k_plain, &v));
    let allowed = relative_l2(&plain, &exact);
    let (error, bf16) = (relative_l2(&out8.concat(), &exact), relative_l2(&out.concat(), &exact));
    println!("attention in e4m3: {error:.2e}, plain {allowed:.2e}; in bf16 {bf16:.2e}");
    assert!(error <= 2.0 * allowed && error >= allowed / 2.0, "{error:.2e}, plain {allowed:.2e}");
    assert!(bf16 < allowed / 4.0, "{bf16:.2e}");
    // The stored codes equal plain rounding, except where rounding to bf16 first moves a value across a tie. The step of bf16 is
    // a 32nd of e4m3's step.
    for (got, want) in [(&q8, &q_plain), (&k8, &k_plain)] {
        let pairs: Vec<_> = got.iter().flatten().zip(want.iter().flatten()).collect();
        let other = pairs.iter().filter(|(got, want)| got != want).count();
        assert!(other as f64 <= pairs.len() as f64 / 16.0, "{other} of {}", pairs.len());
    }
}

/// Values on both sides of the limit: 464 is halfway from 448 to the next element, if there were one.
#[test]
fn values_that_do_not_fit_are_counted() {
    let (rows, scale) = (37, 0.25);
    let below = [0.0, 1.0, -448.0, 463.99, -463.99, f32::NAN];
    let beyond = [464.0, -464.0, 464.01, 1e9, -1e30, f32::INFINITY, f32::NEG_INFINITY];
    // More columns than one conversion takes.
    let elements: Vec<f32> = below.iter().chain(&beyond).copied().cycle().take(1300).collect();
    let planted = elements.iter().filter(|v| beyond.contains(v)).count() * rows;
    for (stored, factor, want) in [
        (FP8, 1.0, planted),
        (Stored::plain(DType::E4m3), 1.0, planted),
        (Stored::fp8(Scale::new(scale).unwrap()), scale, planted),
        (Stored::fp8(Scale::new(scale).unwrap()), scale / 1e30, 2 * 100 * rows),
        (BF16, 1.0, 0),
    ] {
        let (mut be, mut ws) = (cpu(), Arena::new(Region::Arena));
        let cols = elements.len();
        let [shift, modulation] = [(); 2].map(|()| ws.alloc(1, cols, DType::F32).unwrap());
        let (x, out) = (ws.alloc(rows, cols, DType::F32).unwrap(), ws.alloc_stored(rows, cols, stored).unwrap());
        be.reserve(Region::Arena, ws.peak()).unwrap();
        be.write(shift, &elements.iter().map(|v| v * factor).collect::<Vec<_>>()).unwrap();
        be.write(modulation, &vec![0.0; cols]).unwrap();
        be.write(x, &vec![1.0; rows * cols]).unwrap();
        assert_eq!(be.take_saturated().unwrap(), 0);
        // The norm of a constant row is zero, so the result is the shift.
        let streams = [Modulated { out, x, shift, scale: modulation }];
        for _ in 0..2 {
            be.run(Op::LayerNormModulate { streams: &streams, eps: 1e-6 }).unwrap();
        }
        assert_eq!(be.take_saturated().unwrap(), 2 * want as u64, "{stored:?} {factor}");
        assert_eq!(be.take_saturated().unwrap(), 0, "only once");
    }
}

/// With an input scale that is far too small every input of that layer saturates and is counted, in every step, image by image.
#[test]
fn an_image_tells_how_many_activations_did_not_fit() {
    fn too_small(layer: &mut Layer, _: &[Layer]) {
        if layer.name == "double_blocks.0.img_attn.qkv" {
            layer.input_scale = Some(1e-12);
        }
    }
    let model = open(&Content::of("fp8").changed(too_small));
    let hidden = model.configs.transformer.hidden;
    let mut engine = engine(Box::new(cpu()), model, LoadOptions::DEFAULT);
    let job = Job { steps: 2, seeds: vec![3, 4], ..small_job() };
    let mut counts = Vec::new();
    engine
        .generate(&job, &kiln::progress::Silent, &mut |image| {
            counts.push(image.saturated);
            Ok(())
        })
        .unwrap();
    let each = (job.steps * job.size.grid().tokens() * hidden) as u64;
    assert_eq!(counts, [each, each]);
}
