//! Every op of the CPU backend against naive f64 loops, and operands that every backend must refuse. The table of cases and the
//! tolerances are in `common/ops`.

#[path = "common/ops/mod.rs"]
mod ops;

use kiln::backend::cpu::Cpu;
use kiln::backend::{Backend, Conv, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, Op, Role, Sampling, Softmax};
use kiln::error::Error;
use kiln::tensor::{Arena, Bytes, DType, Region, Tensor, WeightPart};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn cpu(threads: usize) -> Cpu {
    Cpu::new(threads, Arc::new(AtomicBool::new(false))).unwrap()
}

#[test]
fn every_op_matches_a_naive_loop() {
    ops::check_some(&mut cpu(0), |name| !is_klein(name));
}

#[test]
fn every_op_matches_a_naive_loop_at_klein_widths() {
    ops::check_some(&mut cpu(0), is_klein);
}

fn is_klein(name: &str) -> bool {
    name.contains("klein")
}

/// The table covers every op, also one that is added later.
#[test]
fn the_table_names_every_op() {
    let names: Vec<String> = ops::cases::all().into_iter().map(|c| c.name).collect();
    for op in kiln::backend::OP_NAMES {
        let op = if op.starts_with("qkv") { "qkv" } else { op };
        assert!(names.iter().any(|name| name.split(' ').next() == Some(op)), "no case for {op}");
    }
}

/// The cases that are small enough for compute-sanitizer have every op in every dtype and layout.
#[test]
fn the_small_cases_name_every_op() {
    let small: Vec<_> = ops::cases::all().into_iter().filter(|c| ops::is_within(ops::SMALL, &c.name)).collect();
    for op in kiln::backend::OP_NAMES {
        let op = if op.starts_with("qkv") { "qkv" } else { op };
        let variants: HashSet<_> = small
            .iter()
            .filter(|c| c.name.split(' ').next() == Some(op))
            .map(|c| (c.storage, c.fit == ops::Fit::Slice))
            .collect();
        assert_eq!(variants.len(), 4, "{op}");
    }
}

/// Work is partitioned by shapes alone, so the number of threads changes no bit of any result.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut machines = [1, 2, 3].map(|threads| (cpu(threads), ops::Weights::default()));
    // The cases at klein widths take long and are partitioned in the same way.
    for case in ops::cases::all().into_iter().filter(|case| !is_klein(&case.name)) {
        let [one, two, three] = machines.each_mut().map(|(cpu, weights)| {
            let results = ops::run(cpu, weights, &case, false, &mut Vec::new());
            results.into_iter().flatten().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(one == two && one == three, "{}: not the same bits on 1, 2 and 3 threads", case.name);
    }
}

#[test]
fn unpatchify_undoes_patchify() {
    let (width, height, channels) = (5, 3, 8);
    let (mut cpu, mut arena) = (cpu(2), Arena::new(Region::Arena));
    let x = arena.alloc(4 * width * height, channels, DType::F32).unwrap();
    let tokens = arena.alloc(width * height, 4 * channels, DType::F32).unwrap();
    let back = arena.alloc(4 * width * height, channels, DType::F32).unwrap();
    let [mean, var] = [(); 2].map(|()| arena.alloc(1, 4 * channels, DType::F32).unwrap());
    cpu.reserve(arena.peak()).unwrap();
    let values: Vec<f32> = (0..x.len()).map(|i| (i as f32 * 0.37).sin()).collect();
    let spread: Vec<f32> = (0..4 * channels).map(|i| 0.5 + i as f32 / 8.0).collect();
    cpu.write(x, &values).unwrap();
    cpu.write(mean, &spread).unwrap();
    cpu.write(var, &spread).unwrap();
    let stats = LatentStats { mean, var, eps: 1e-4 };
    cpu.run(Op::Patchify { out: tokens, x, stats: &stats, width }).unwrap();
    cpu.run(Op::Unpatchify { out: back, x: tokens, stats: &stats, width }).unwrap();
    let mut got = vec![0.0; back.len()];
    cpu.read(back, &mut got).unwrap();
    for (i, (got, want)) in got.iter().zip(&values).enumerate() {
        assert!((got - want).abs() < 1e-6, "element {i}: {got} {want}");
    }
}

fn matrix(arena: &mut Arena, rows: usize, cols: usize) -> Tensor {
    arena.alloc(rows, cols, DType::F32).unwrap()
}

/// Operands of mismatched shapes, and outputs that alias inputs, are an error and never a wrong result.
#[test]
fn mismatched_operands_are_rejected() {
    let (mut cpu, mut arena) = (cpu(1), Arena::new(Region::Arena));
    let (a, b, c) = (matrix(&mut arena, 4, 8), matrix(&mut arena, 4, 8), matrix(&mut arena, 8, 8));
    let (row, short, bytes) = (matrix(&mut arena, 1, 8), matrix(&mut arena, 1, 7), arena.alloc(4, 1, DType::U8).unwrap());
    let half = arena.alloc(1, 8, DType::Bf16).unwrap();
    cpu.reserve(arena.peak()).unwrap();
    let (w, biased) = (Linear::new(c, None), Linear::new(c, Some(short)));
    let conv = Conv { weight: matrix(&mut Arena::new(Region::Weights), 8, 72), bias: row };
    let norm = GroupNorm { weight: row, bias: row, groups: 3, eps: 1e-6 };
    let kv = |k, v| KvSegment { k, v };
    let (good, uneven, none) = ([kv(c, c); 2], [kv(c, c.rows(0..7))], [kv(c.rows(0..0), c.rows(0..0))]);
    let same = Sampling::Same;
    let outside = Tensor { offset: arena.peak(), ..a };
    let image =
        |out, x, width, height, sampling| Op::Conv { out, x, w: &conv, width, height, sampling, residual: None, stats: None };
    let result = [a];
    let attention = |q, kv, head_dim, causal| {
        let softmax = Softmax::Natural { scale: 1.0 };
        Op::Attention { out: &result, q, kv, head_dim, causal, softmax }
    };
    let refused: &[(&str, Op<'_>)] = &[
        ("another number of rows", Op::Copy { out: a, x: c }),
        ("another number of columns", Op::Silu { out: a, x: b.cols(0..7) }),
        ("the result is the input", Op::Silu { out: a, x: a }),
        ("the result overlaps the input", Op::Copy { out: c.rows(0..4), x: c.rows(3..7) }),
        ("columns overlap", Op::Copy { out: c.cols(0..4), x: c.cols(3..7) }),
        ("outside working memory", Op::Copy { out: outside, x: b }),
        ("partly outside", Op::Copy { out: a, x: Tensor { offset: arena.peak() - 4, ..b } }),
        ("a result among the weights", Op::Copy { out: Tensor { region: Region::Weights, ..a }, x: b }),
        ("a weight nobody uploaded", Op::Copy { out: a, x: Tensor { region: Region::Weights, ..b } }),
        ("rows that overlap each other", Op::Copy { out: Tensor { stride: 4, ..a }, x: b }),
        ("misaligned", Op::Copy { out: a, x: Tensor { offset: b.offset + 2, ..b } }),
        ("bytes as values", Op::Copy { out: a.cols(0..1), x: bytes }),
        ("a norm weight too short", Op::RmsNorm { out: a, x: b, weight: short, eps: 0.0 }),
        ("a norm weight in bf16", Op::RmsNorm { out: a, x: b, weight: half, eps: 0.0 }),
        ("inner sizes differ", Op::Linear(&[Gemm { out: a, x: b.cols(0..7), w: &w }])),
        ("bias too short", Op::Linear(&[Gemm { out: a, x: b, w: &biased }])),
        ("two streams, one result", Op::Linear(&[Gemm { out: a, x: b, w: &w }, Gemm { out: a, x: b, w: &w }])),
        ("odd gates and ups", Op::LinearSwiglu(&[Gemm { out: a, x: b, w: &w }])),
        ("gate too short", Op::LinearGateResidual(&[GatedGemm { into: a, x: b, w: &w, gate: Some(short) }])),
        ("heads do not divide", attention(b, &good, 3, false)),
        ("values unlike keys", attention(b, &uneven, 8, false)),
        ("no keys", attention(b, &none, 8, false)),
        ("no segment", attention(b, &[], 8, false)),
        ("a mask over segments", attention(b, &good, 8, true)),
        ("another number of pixels", image(a, b, 3, 2, same)),
        ("an odd side halved", image(a.rows(0..1), b, 4, 1, Sampling::Down)),
        ("groups do not divide", Op::GroupNorm { out: a, x: b, norm: &norm, stats: None, silu: false }),
        ("latents in bf16", Op::Euler { latents: half, velocity: row, dt: 1.0 }),
        ("shapes differ", Op::Guidance { out: a, cond: b, uncond: c, scale: 1.0 }),
    ];
    for (what, op) in refused {
        match cpu.run(*op) {
            Err(Error::Op { .. }) => {}
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn mismatched_weights_are_rejected() {
    let mut cpu = cpu(1);
    let mut arena = Arena::new(Region::Weights);
    let part = |bytes: usize| [WeightPart::plain(Bytes::new(Arc::new(vec![0u8; bytes])), DType::F32, 4)];
    let to = matrix(&mut arena, 4, 8);
    for bytes in [0, 96, 124, 130, 160] {
        assert!(matches!(cpu.upload(to, Role::Linear, &part(bytes)), Err(Error::Op { .. })), "{bytes} bytes");
    }
}

/// An upload over part of another weight invalidates all of it: reading the rest is an error.
#[test]
fn an_uploaded_weight_replaces_the_previous_one() {
    let (mut cpu, mut weights, mut arena) = (cpu(1), Arena::new(Region::Weights), Arena::new(Region::Arena));
    let (to, out) = (matrix(&mut weights, 4, 8), matrix(&mut arena, 4, 8));
    cpu.reserve(arena.peak()).unwrap();
    let fill = |cpu: &mut Cpu, to: Tensor, value: f32| {
        let bytes = Bytes::new(Arc::new(value.to_le_bytes().repeat(to.len())));
        cpu.upload(to, Role::Linear, &[WeightPart::plain(bytes, DType::F32, to.rows)]).unwrap();
    };
    let read = |cpu: &mut Cpu, x: Tensor| {
        let (out, mut values) = (out.rows(0..x.rows), vec![0.0; x.len()]);
        cpu.run(Op::Copy { out, x }).and_then(|()| cpu.read(out, &mut values)).map(|()| values)
    };
    fill(&mut cpu, to, 1.0);
    fill(&mut cpu, to, 2.0);
    assert_eq!(read(&mut cpu, to).unwrap(), [2.0; 32]);
    fill(&mut cpu, to.rows(1..3), 3.0);
    assert_eq!(read(&mut cpu, to.rows(1..3)).unwrap(), [3.0; 16]);
    for gone in [to, to.rows(0..1), to.rows(3..4)] {
        assert!(matches!(read(&mut cpu, gone), Err(Error::Op { .. })), "{gone:?}");
    }
    fill(&mut cpu, to, 4.0);
    assert_eq!(read(&mut cpu, to).unwrap(), [4.0; 32]);
}
