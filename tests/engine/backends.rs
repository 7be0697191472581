//! Compares backends with each other: the plan predicts a run's memory, ops and flops, lockstep finds a planted fault, and the
//! goldens notice a wrong model.

use common::wrapped;
use common::{Goldens, cases, cpu, engine_on, relative_l2, run, saving_memory_changes_nothing, short_engine};
use kiln::error::{Error, Result};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Access, Backend, Lockstep, Op};
use kiln::internals::config::{Configs, HEAD_DIM, Variant};
use kiln::internals::pipeline::{Job, LoadOptions};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{Arena, DType, Precision, Region, Scale, Stored, Tensor};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const OPTIONS: LoadOptions = LoadOptions { precision: Precision::F32, references: true, ..LoadOptions::DEFAULT };

#[test]
fn the_plan_equals_the_run() {
    for precision in [Precision::F32, Precision::Bf16] {
        for case in cases() {
            let (high, ops, flops) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
            let seen = (high.clone(), ops.clone(), flops.clone());
            let backend = wrapped::after_op(cpu(), move |_, op, cpu| {
                seen.0.store(cpu.high_water(), Ordering::Relaxed);
                seen.1.fetch_add(1, Ordering::Relaxed);
                seen.2.fetch_add(op.flops(), Ordering::Relaxed);
                Ok(())
            });
            let mut engine = short_engine(Box::new(backend), case.variant(), LoadOptions { precision, ..OPTIONS });
            let plan = engine.plan(&case.job()).unwrap();
            run(&mut engine, &case.job()).unwrap();
            assert_eq!(plan.arena_bytes, high.load(Ordering::Relaxed), "{}: working memory", case.name);
            assert_eq!(plan.ops, ops.load(Ordering::Relaxed), "{}: ops", case.name);
            assert_eq!(plan.flops, flops.load(Ordering::Relaxed), "{}: flops", case.name);
        }
    }
}

#[test]
fn low_memory_changes_no_image() {
    saving_memory_changes_nothing(&|| Box::new(cpu()));
}

/// Changes one row in the middle of the result of op number `target`.
fn corrupt(target: usize, named: Arc<Mutex<&'static str>>) -> impl FnMut(usize, Op<'_>, &mut Cpu) -> Result<()> {
    move |index, op, cpu| {
        if index != target {
            return Ok(());
        }
        *named.lock().unwrap() = op.name();
        let mut outs = Vec::new();
        op.operands(&mut |t, access| outs.extend((access != Access::Read).then_some(t)));
        let row = outs[0].rows(outs[0].rows / 2..outs[0].rows / 2 + 1);
        let mut values = vec![0.0; row.cols];
        cpu.read(row, &mut values)?;
        let size = values.iter().map(|v| v.abs()).fold(0.0, f32::max);
        // A count may be zero, and scaling zero would change nothing.
        values.iter_mut().for_each(|v| *v += size.max(1e-3));
        cpu.write(row, &values)
    }
}

#[test]
fn lockstep_is_clean_on_a_correct_backend() {
    let compared = Arc::new(AtomicUsize::new(0));
    for precision in [Precision::F32, Precision::Bf16] {
        let count = compared.clone();
        let tested = wrapped::after_op(Cpu::new(1, Arc::new(AtomicBool::new(false))).unwrap(), move |_, _, _| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        let options = LoadOptions { precision, ..OPTIONS };
        let mut engine = short_engine(Box::new(Lockstep::new(cpu(), tested)), Variant::Base, options);
        let case = cases().into_iter().find(|c| c.name == "base").unwrap();
        run(&mut engine, &case.job()).unwrap();
    }
    assert!(compared.load(Ordering::Relaxed) > 500);
}

#[test]
fn lockstep_names_the_op_of_a_planted_fault() {
    let job = Job { steps: 1, size: Pixels::new(64, 64).unwrap(), ..cases()[0].job() };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let list = seen.clone();
    let listing = wrapped::after_op(cpu(), move |_, op, _| {
        list.lock().unwrap().push(op.name());
        Ok(())
    });
    run(&mut short_engine(Box::new(listing), Variant::Distilled, OPTIONS), &job).unwrap();
    let all = seen.lock().unwrap().clone();
    // One fault in every kind of op, at its first occurrence.
    let mut kinds = all.clone();
    kinds.sort_unstable();
    kinds.dedup();
    for target in kinds.iter().map(|kind| all.iter().position(|name| name == kind).unwrap()) {
        let named = Arc::new(Mutex::new(""));
        let tested = wrapped::after_op(cpu(), corrupt(target, named.clone()));
        let mut engine = short_engine(Box::new(Lockstep::new(cpu(), tested)), Variant::Distilled, OPTIONS);
        match run(&mut engine, &job) {
            Err(Error::Lockstep { index, op, left, right, .. }) => {
                assert_eq!((index, op, left, right), (target, *named.lock().unwrap(), "cpu", "observed"));
            }
            other => panic!("fault in op {target} (`{}`) was not found: {:?}", named.lock().unwrap(), other.map(|p| p.seed)),
        }
    }
    assert!(kinds.len() >= 14, "only {kinds:?} were tried");
}

/// Adds to a byte of the elements (0) or of the block scales (1) of a tensor.
fn add_to_byte(cpu: &mut Cpu, t: Tensor, view: usize, at: usize, steps: u8) -> Result<()> {
    let view = t.as_bytes().nth(view).unwrap();
    let mut bytes = vec![0; view.len()];
    cpu.read_bytes(view, &mut bytes)?;
    bytes[at] += steps;
    cpu.write(view, &bytes.iter().map(|&byte| f32::from(byte)).collect::<Vec<_>>())
}

/// Two correct backends may round a value to two adjacent codes. Lockstep finds a larger difference, even in one element among
/// many. Accepted differences are made equal to the byte, because decoded values would not always encode to the same code again.
#[test]
fn lockstep_compares_quantized_results_by_element() {
    let (rows, cols) = (130, 192);
    let (mut arena, scale) = (Arena::new(Region::Arena), |value| Scale::new(value).unwrap());
    let [fp8, nvfp4] =
        [Stored::fp8(scale(0.0123)), Stored::nvfp4(scale(0.0011))].map(|f| arena.alloc_stored(rows, cols, f).unwrap());
    let [x, y, gain] = [rows, rows, 1].map(|rows| arena.alloc(rows, cols, DType::F32).unwrap());
    let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin() + (i as f32 * 0.011).cos()).collect();
    // The tested backend changes the first result. The second op shows which bytes the trusted backend then has.
    let run = |out: Tensor, fault: Option<(usize, usize, u8)>| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let tested = wrapped::after_op(cpu(), {
            let seen = seen.clone();
            move |index, _, cpu| {
                if let (0, Some((view, at, steps))) = (index, fault) {
                    add_to_byte(cpu, out, view, at, steps)?;
                }
                for view in out.as_bytes().filter(|_| index == 1) {
                    let mut bytes = vec![0; view.len()];
                    cpu.read_bytes(view, &mut bytes)?;
                    seen.lock().unwrap().push(bytes);
                }
                Ok(())
            }
        });
        let mut both = Lockstep::new(cpu(), tested);
        both.reserve(Region::Arena, arena.peak()).unwrap();
        both.write(x, &values).unwrap();
        both.write(gain, &vec![1.0; cols]).unwrap();
        both.run(Op::RmsNorm { out, x, weight: gain, eps: 1e-6 })?;
        both.run(Op::Copy { out: y, x })?;
        let trusted = out.as_bytes().map(|view| {
            let mut bytes = vec![0; view.len()];
            both.read_bytes(view, &mut bytes).map(|()| bytes)
        });
        assert!(trusted.collect::<Result<Vec<_>>>()? == *seen.lock().unwrap(), "{out:?} {fault:?}: not the same bytes");
        Ok(())
    };
    for (out, fault, found) in [
        (fp8, None, false),
        (nvfp4, None, false),
        (fp8, Some((0, 777, 1)), false),
        (nvfp4, Some((0, 777, 1)), false),
        (nvfp4, Some((1, 777, 1)), false),
        (fp8, Some((0, 777, 4)), true),
        (nvfp4, Some((0, 777, 4)), true),
        // Twice the scale.
        (nvfp4, Some((1, 777, 8)), true),
    ] {
        match run(out, fault) {
            Ok(()) => assert!(!found, "{out:?} {fault:?} was not found"),
            Err(Error::Lockstep { index: 0, op: "rms_norm", .. }) => assert!(found, "{out:?} {fault:?}"),
            Err(other) => panic!("{out:?} {fault:?}: {other}"),
        }
    }
}

#[test]
fn non_finite_latents_are_an_error() {
    let mut engine = engine_on(
        Box::new(wrapped::after_op(cpu(), |_, op, cpu| match op {
            Op::Euler { latents, .. } => cpu.write(latents.rows(0..1), &vec![f32::NAN; latents.cols]),
            _ => Ok(()),
        })),
        Variant::Distilled,
        Precision::F32,
    );
    let job = cases()[0].job();
    match run(&mut engine, &job) {
        Err(Error::NotFinite { stage, count }) => assert_eq!((stage.as_str(), count), ("denoising step 1 of 4", 128)),
        other => panic!("{:?}", other.map(|p| p.seed)),
    }
}

/// A non-finite value of the text encoder is reported as the text encoder's, for either prompt, and not as a later step's.
#[test]
fn non_finite_prompt_embeddings_are_told_from_a_step() {
    let mut job = Job { size: Pixels::new(64, 64).unwrap(), steps: 1, guidance: 4.0, record: false, ..cases()[0].job() };
    job.references.clear();
    // Only the text encoder has RMS norms, two in a layer.
    let norms = 2 * Configs::TINY.text_encoder.used_layers();
    for (prompt, want) in [(0, "encoding the prompt"), (1, "encoding the negative prompt")] {
        let seen = AtomicUsize::new(0);
        let wrapped = wrapped::after_op(cpu(), move |_, op, cpu| match op {
            Op::RmsNorm { out, .. } if seen.fetch_add(1, Ordering::Relaxed) == prompt * norms => {
                cpu.write(out.rows(0..1), &vec![f32::INFINITY; out.cols])
            }
            _ => Ok(()),
        });
        let mut engine = short_engine(Box::new(wrapped), Variant::Base, OPTIONS);
        match run(&mut engine, &job) {
            Err(Error::NotFinite { stage, count }) => assert!(stage == want && count > 0, "{stage} {count}"),
            other => panic!("{want}: {:?}", other.map(|p| p.seed)),
        }
    }
}

/// The control of the goldens: a model with wrong positions must fail them, in f32 and even at bf16's tolerance.
#[test]
fn goldens_notice_wrong_rope() {
    let (case, goldens) = (cases().remove(0), Goldens::open());
    let tokens = (case.width / 16) * (case.height / 16);
    // The RoPE table holds cosines, then sines. An angle of zero for every image token gives all tokens the same position.
    let backend = wrapped::before_write(cpu(), move |to, values| {
        if to.cols == HEAD_DIM && to.rows == 512 + tokens {
            for row in values.chunks_exact_mut(HEAD_DIM).skip(512) {
                row[..HEAD_DIM / 2].fill(1.0);
                row[HEAD_DIM / 2..].fill(0.0);
            }
        }
    });
    let mut engine = engine_on(Box::new(backend), Variant::Distilled, Precision::F32);
    let record = run(&mut engine, &case.job()).unwrap().record.unwrap();
    let error = relative_l2(record.latents.last().unwrap(), &goldens.f32("square.latents"));
    assert!(error > 5.0 * case.bf16_exact_time_relative_l2.latents, "only {error}");
}

#[test]
fn an_interrupt_stops_between_ops() {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let backend = wrapped::after_op(Cpu::new(0, stop).unwrap(), move |index, _, _| {
        flag.store(index == 40, Ordering::Relaxed);
        Ok(())
    });
    let mut engine = engine_on(Box::new(backend), Variant::Distilled, Precision::F32);
    assert!(matches!(run(&mut engine, &cases()[0].job()), Err(Error::Interrupted)));
}
