//! Backends against each other: the plan predicts memory, ops and flops of a run, lockstep finds a planted fault, and the goldens
//! notice a wrong model.

mod common;

use common::wrapped::Wrapped;
use common::{Goldens, cases, cpu, engine_on, relative_l2, run, saving_memory_changes_nothing, short_engine};
use kiln::backend::cpu::Cpu;
use kiln::backend::{Access, Backend, Lockstep, Op};
use kiln::config::{HEAD_DIM, TextConfig, Variant};
use kiln::error::{Error, Result};
use kiln::pipeline::{Job, LoadOptions};
use kiln::sequence::Pixels;
use kiln::tensor::Precision;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const OPTIONS: LoadOptions = LoadOptions { precision: Precision::F32, references: true, low_memory: false };

#[test]
fn the_plan_equals_the_run() {
    for precision in [Precision::F32, Precision::Bf16] {
        for case in cases() {
            let (high, ops, flops) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
            let seen = (high.clone(), ops.clone(), flops.clone());
            let backend = Wrapped::after_op(cpu(), move |_, op, cpu| {
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
            assert_eq!(plan.flops(), flops.load(Ordering::Relaxed), "{}: flops", case.name);
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
        // A count may be zero, which scales nothing.
        values.iter_mut().for_each(|v| *v += size.max(1e-3));
        cpu.write(row, &values)
    }
}

#[test]
fn lockstep_is_clean_on_a_correct_backend() {
    let compared = Arc::new(AtomicUsize::new(0));
    for precision in [Precision::F32, Precision::Bf16] {
        let count = compared.clone();
        let tested = Wrapped::after_op(Cpu::new(1, Arc::new(AtomicBool::new(false))).unwrap(), move |_, _, _| {
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
    let listing = Wrapped::after_op(cpu(), move |_, op, _| {
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
        let tested = Wrapped::after_op(cpu(), corrupt(target, named.clone()));
        let mut engine = short_engine(Box::new(Lockstep::new(cpu(), tested)), Variant::Distilled, OPTIONS);
        match run(&mut engine, &job) {
            Err(Error::Lockstep { index, op, left, right, .. }) => {
                assert_eq!((index, op, left, right), (target, *named.lock().unwrap(), "cpu", "wrapped"));
            }
            other => panic!("fault in op {target} (`{}`) was not found: {:?}", named.lock().unwrap(), other.map(|p| p.seed)),
        }
    }
    assert!(kinds.len() >= 14, "only {kinds:?} were tried");
}

#[test]
fn non_finite_latents_are_an_error() {
    let mut engine = engine_on(
        Box::new(Wrapped::after_op(cpu(), |_, op, cpu| match op {
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

/// A non-finite value of the text encoder is reported as such, for either prompt, and not as one of the steps after it.
#[test]
fn non_finite_prompt_embeddings_are_told_from_a_step() {
    let mut job = Job { size: Pixels::new(64, 64).unwrap(), steps: 1, guidance: 4.0, record: false, ..cases()[0].job() };
    job.references.clear();
    // Only the text encoder has RMS norms, two in a layer.
    let norms = 2 * TextConfig::tiny().used_layers();
    for (prompt, want) in [(0, "encoding the prompt"), (1, "encoding the negative prompt")] {
        let seen = AtomicUsize::new(0);
        let wrapped = Wrapped::after_op(cpu(), move |_, op, cpu| match op {
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

/// The control of the goldens: a model with wrong positions must fail them, in f32 and even at the tolerance of bf16.
#[test]
fn goldens_notice_wrong_rope() {
    let (case, goldens) = (cases().remove(0), Goldens::open());
    let tokens = (case.width / 16) * (case.height / 16);
    // The RoPE table holds cosines, then sines: an angle of zero for every image token, as if all had the same position.
    let backend = Wrapped::before_write(cpu(), move |to, values| {
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
    let backend = Wrapped::after_op(Cpu::new(0, stop).unwrap(), move |index, _, _| {
        flag.store(index == 40, Ordering::Relaxed);
        Ok(())
    });
    let mut engine = engine_on(Box::new(backend), Variant::Distilled, Precision::F32);
    assert!(matches!(run(&mut engine, &cases()[0].job()), Err(Error::Interrupted)));
}
