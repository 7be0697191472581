//! Calibration: its results, what they do not depend on, which inputs it refuses, and that the resulting scales hold every value.

use common::quantized::{Content, Form, SHORT, engine, model, plain_tensors, weights};
use common::sandbox::Sandbox;
use common::wrapped;
use common::{cpu, run, short_model};
use kiln::error::{Error, Result};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, Op, RopeStyle};
use kiln::internals::component::Component;
use kiln::internals::config::{Configs, ModelDefaults, Variant};
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Job, LoadOptions, OpenModel};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::DType::{E2m1 as Nvfp4, E4m3 as Fp8};
use kiln::internals::tensor::Tensor;
use kiln::locate::{LocateRequest, locate};
use kiln::progress::{Phase, Progress, Silent};
use kiln::quantize::calibrate::{Calibration, calibrate, input_scale, read_prompts};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

type Found = BTreeMap<String, f32>;

fn calibration(prompts: &[&str], steps: usize) -> Calibration {
    let prompts = prompts.iter().map(|prompt| (*prompt).to_owned()).collect();
    Calibration { prompts, size: Pixels::new(64, 64).unwrap(), steps }
}

/// Whether a layer is in a block.
fn in_block(name: &str) -> bool {
    name.starts_with("double_blocks.") || name.starts_with("single_blocks.")
}

fn found(backend: impl Backend + 'static, model: OpenModel, calibration: &Calibration) -> Result<Found> {
    calibrate(Box::new(backend), "here", model, calibration, &in_block, &Silent)
}

/// Reads the inputs of the layers of the tiny model's blocks after each op, and keeps their largest magnitudes. The order of ops
/// alone identifies a layer.
fn by_order(found: Rc<RefCell<Found>>) -> impl FnMut(usize, Op<'_>, &mut Cpu) -> Result<()> {
    let config = Configs::TINY.transformer;
    let (mut block, mut next) = (0_usize, VecDeque::<Vec<String>>::new());
    move |_, op, cpu| {
        let inputs: Vec<Tensor> = match op {
            Op::Qkv(streams) => streams.iter().map(|s| s.x).collect(),
            Op::LinearSwiglu(streams) => streams.iter().map(|s| s.x).collect(),
            Op::LinearGateResidual(streams) => streams.iter().map(|s| s.x).collect(),
            _ => return Ok(()),
        };
        // The text encoder's heads have another rotation style.
        if matches!(op, Op::Qkv(streams) if streams[0].rope.style == RopeStyle::Interleaved) {
            assert!(next.is_empty());
            next = match block.checked_sub(config.double_blocks) {
                None => ["attn.qkv", "attn.proj", "mlp.0", "mlp.2"]
                    .map(|layer| ["txt", "img"].map(|stream| format!("double_blocks.{block}.{stream}_{layer}.weight")).into())
                    .into(),
                Some(i) => [("linear1", inputs.len()), ("linear2", 1)]
                    .map(|(layer, streams)| vec![format!("single_blocks.{i}.{layer}.weight"); streams])
                    .into(),
            };
            block = (block + 1) % (config.double_blocks + config.single_blocks);
        }
        let Some(names) = next.pop_front() else { return Ok(()) };
        assert_eq!(names.len(), inputs.len(), "{names:?}");
        for (name, x) in names.into_iter().zip(inputs) {
            let mut values = vec![0.0; x.len()];
            cpu.read(x, &mut values)?;
            let mut found = found.borrow_mut();
            let largest = found.entry(name).or_insert(0.0);
            *largest = values.iter().fold(*largest, |most, value| most.max(value.abs()));
        }
        Ok(())
    }
}

#[test]
fn the_largest_inputs_are_found() {
    for (variant, steps) in [(Variant::Distilled, 2), (Variant::Base, 1), (Variant::Kv, 1)] {
        let read = Rc::<RefCell<Found>>::default();
        let backend = wrapped::after_op(cpu(), by_order(read.clone()));
        let found = found(backend, short_model(variant), &calibration(&["a", "a longer prompt"], steps)).unwrap();
        assert_eq!(found, read.take(), "{variant:?}");
        assert_eq!(found.len(), 2 * 8 + 2 * 2);
        assert!(found.values().all(|largest| *largest > 0.0 && largest.is_finite()));
    }
}

#[test]
fn neither_order_nor_threads_matter() {
    let with = |threads: usize, prompts: &[&str]| {
        let cpu = Cpu::new(threads, Arc::default()).unwrap();
        found(cpu, short_model(Variant::Distilled), &calibration(prompts, 2)).unwrap()
    };
    let all = with(1, &["one", "two words", "and three"]);
    assert_eq!(all, with(3, &["and three", "one", "two words"]));
    // The maxima over all prompts are the largest of each prompt's maxima.
    let mut each = with(2, &["one"]);
    for prompt in ["two words", "and three"] {
        let more = with(2, &[prompt]);
        assert_ne!(more, all, "one prompt alone has all maxima");
        each.iter_mut().for_each(|(name, largest)| *largest = largest.max(more[name]));
    }
    assert_eq!(all, each);
}

/// With these scales no value of the FP8 model is out of range, and with much smaller scales many are.
#[test]
fn calibrated_scales_hold_every_value() {
    let plain = Content { layers: Vec::new(), plain: plain_tensors(Component::Transformer, Layout::Bfl) };
    let open = |content: &Content, form| model(weights(Component::Transformer, content.file(form)), None, SHORT);
    let calibration = calibration(&["one", "two words"], 2);
    let found = found(cpu(), open(&plain, Form::BARE), &calibration).unwrap();
    let saturated = |factor: f32| {
        let mut content = Content::of("fp8").clone();
        for layer in &mut content.layers {
            let largest = found[&format!("{}.weight", layer.name)];
            layer.input_scale = Some(input_scale(Fp8, largest).unwrap().get() * factor);
        }
        let model = open(&content, Form::BFL);
        let job = Job::new("", 0, &model.defaults, model.variant).unwrap();
        let job = Job { size: calibration.size, steps: calibration.steps, ..job };
        let mut engine = engine(Box::new(cpu()), model, LoadOptions::DEFAULT);
        let mut count = |prompt: &String| run(&mut engine, &Job { prompt: prompt.clone(), ..job.clone() }).unwrap().saturated;
        calibration.prompts.iter().map(&mut count).sum::<u64>()
    };
    assert_eq!(saturated(1.0), 0);
    assert!(saturated(1.0 / 16.0) > 0);
}

#[test]
fn the_built_in_model_is_calibrated() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/models/builtin");
    let model =
        OpenModel::open(&locate(&LocateRequest { model: Some(folder.into()), ..Default::default() }).unwrap(), None).unwrap();
    let c = model.configs.transformer.clone();
    let calibration = Calibration { steps: 1, ..Calibration::quick(&model.defaults, model.variant).unwrap() };
    let found = found(cpu(), model, &calibration).unwrap();
    assert_eq!(found.len(), 8 * c.double_blocks + 2 * c.single_blocks);
}

/// Inputs that are zero or not finite, from attention that computes such values.
#[test]
fn a_layer_without_a_scale_is_named() {
    for (value, want) in [(0.0, "its input is zero for every prompt"), (f32::NAN, "its input is not finite")] {
        let spoil = move |_: usize, op: Op<'_>, cpu: &mut Cpu| match op {
            Op::Attention { out, causal: false, .. } => out.iter().try_for_each(|&o| cpu.write(o, &vec![value; o.len()])),
            _ => Ok(()),
        };
        let result = found(wrapped::after_op(cpu(), spoil), short_model(Variant::Distilled), &calibration(&["x"], 1));
        match result {
            Err(ref error @ Error::Calibration { ref layer, what }) => {
                assert_eq!((layer.as_str(), what), ("double_blocks.0.img_attn.proj.weight", want));
                assert_eq!(error.exit_code(), 7);
                assert!(error.hint().is_some());
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn nothing_is_run_for_nothing() {
    let stopped = Cpu::new(0, Arc::new(AtomicBool::new(true))).unwrap();
    let calibration = calibration(&["x"], 1);
    let none = |_: &str| false;
    let found = calibrate(Box::new(stopped), "here", short_model(Variant::Distilled), &calibration, &none, &Silent);
    assert_eq!(found.unwrap(), Found::new());
    // With layers to observe, the same backend stops.
    let stopped = Cpu::new(0, Arc::new(AtomicBool::new(true))).unwrap();
    let result = self::found(stopped, short_model(Variant::Distilled), &calibration);
    assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
    let result = self::found(cpu(), short_model(Variant::Distilled), &self::calibration(&[], 1));
    assert!(matches!(result, Err(Error::Usage { .. })), "{result:?}");
}

/// Records each phase until its end, with its announced and its completed work.
#[derive(Default)]
struct Phases {
    ended: RefCell<Vec<(Phase, u64, u64)>>,
    running: RefCell<Option<(Phase, u64, u64)>>,
}

impl Progress for Phases {
    fn begin(&self, phase: Phase, total: u64) {
        assert_eq!(self.running.replace(Some((phase, total, 0))), None);
    }

    fn advance(&self, amount: u64) {
        self.running.borrow_mut().as_mut().unwrap().2 += amount;
    }

    fn end(&self) {
        self.ended.borrow_mut().push(self.running.take().unwrap());
    }
}

#[test]
fn steps_of_all_prompts_are_one_phase() {
    let phases = Phases::default();
    let model = short_model(Variant::Distilled);
    calibrate(Box::new(cpu()), "here", model, &calibration(&["a", "b", "c"], 2), &in_block, &phases).unwrap();
    let ended = phases.ended.take();
    let order: Vec<Phase> = ended.iter().map(|(phase, ..)| *phase).collect();
    assert_eq!(order, [Phase::Load, Phase::Encode, Phase::Load, Phase::Calibrate]);
    assert_eq!(ended[3], (Phase::Calibrate, 6, 6));
}

#[test]
fn input_scales_leave_two_octaves() {
    let scale = |format, largest: f32| input_scale(format, largest).map(|scale| scale.get());
    for (largest, fp8, nvfp4) in [
        (112.0, 1.0, 0.25),
        (112.000_01, 2.0, 0.25),
        (672.0, 8.0, 1.0),
        (672.000_06, 8.0, 2.0),
        (1.0, 2.0_f32.powi(-6), 2.0_f32.powi(-9)),
        (f32::MAX, 2.0_f32.powi(122), 2.0_f32.powi(119)),
    ] {
        assert_eq!((scale(Fp8, largest), scale(Nvfp4, largest)), (Some(fp8), Some(nvfp4)), "{largest}");
    }
    for bits in (0x0080_0000..0x7f80_0000_u32).step_by(99_991) {
        for (format, top) in [(Fp8, 448.0), (Nvfp4, 2688.0)] {
            let largest = f32::from_bits(bits);
            let scale = f64::from(scale(format, largest).unwrap());
            let needed = 4.0 * f64::from(largest) / top;
            assert!(scale.log2().fract() == 0.0 && needed <= scale && scale < 2.0 * needed, "{largest}: {scale}");
        }
    }
    for none in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(scale(Fp8, none), None, "{none}");
    }
}

#[test]
fn prompts_are_lines() {
    let sandbox = Sandbox::new();
    let read = |text: &[u8]| {
        let path = sandbox.path("prompts.txt");
        std::fs::write(&path, text).unwrap();
        read_prompts(&path)
    };
    assert_eq!(read("\u{feff}one\r\n\n  two words \n \nthree".as_bytes()).unwrap(), ["one", "two words", "three"]);
    for wrong in [&b""[..], b" \n\n", b"a\0b", b"a\nb\xff"] {
        assert!(matches!(read(wrong), Err(Error::BadFile { .. })), "{wrong:?}");
    }
    assert!(matches!(read(&vec![b'x'; (1 << 20) + 1]), Err(Error::Read { .. })));
    assert!(matches!(read_prompts(&sandbox.path("none")), Err(Error::Read { .. })));
}

#[test]
fn there_are_prompts_of_many_kinds() {
    let klein = ModelDefaults::klein();
    let thorough = Calibration::thorough(&klein, Variant::Distilled).unwrap();
    assert_eq!(thorough.to_string(), "16 prompts at 512x512, 4 steps each");
    let quick = Calibration::quick(&klein, Variant::Base).unwrap();
    assert_eq!(quick.to_string(), "2 prompts at 128x128, 2 steps each");
    assert_eq!(quick.prompts, thorough.prompts[..2]);
    assert_eq!(Calibration::thorough(&klein, Variant::Base).unwrap().steps, Variant::Base.spec().steps);
    let mut distinct = thorough.prompts.clone();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), 16);
    let small = ModelDefaults { width: 96, height: 64, ..klein };
    assert_eq!(Calibration::quick(&small, Variant::Distilled).unwrap().size, Pixels::new(96, 64).unwrap());
}
