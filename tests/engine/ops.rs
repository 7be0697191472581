//! Compares every op of the CPU backend with naive f64 loops, and checks the operands that every backend must refuse.
//! `common/ops` has the table of cases and the tolerances.

use common::ops;
use common::ops::formats::{Codes, pack, quantize};
use common::ops::fp8_sums::Fp8Sums;
use common::ops::oracle::Real;
use common::wrapped;
use kiln::error::Error;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{
    Backend, Conv, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, Lockstep, LoraBranch, Modulated, Op, OpKind,
    Projection, Role, Rope, RopeStyle, Sampling, Seam, Shortcut, Softmax, Weight,
};
use kiln::internals::tensor::{Arena, Bytes, DType, Region, Scale, Scales, Scaling, SliceScaling, Stored, Tensor, WeightSlice};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn cpu(threads: usize) -> Cpu {
    Cpu::new(threads, Arc::new(AtomicBool::new(false))).unwrap()
}

#[test]
fn every_op_matches_a_naive_loop() {
    let cases = ops::cases::all().into_iter().filter(|case| !is_klein(&case.name));
    ops::check(&mut cpu(0), ops::drawn(10, "ops", cases));
}

#[test]
fn every_op_matches_a_naive_loop_at_klein_widths() {
    let cases = ops::cases::all().into_iter().filter(|case| is_klein(&case.name));
    ops::check(&mut cpu(0), ops::drawn_of_each_op(10, "ops at klein widths", cases));
}

#[test]
fn every_quantized_operand_matches_a_naive_loop() {
    // The table of all ops has the other cases.
    ops::check(&mut cpu(0), ops::quantized::all().into_iter().filter(|case| !ops::quantized::has_kernels(&case.name)));
}

/// The published model's figures for factors of 1.125.
#[test]
fn coherent_sums_of_tensor_cores_come_out_too_small() {
    let sum = |k: usize| {
        let (mut sums, factors) = ([Fp8Sums(0.0)], vec![Fp8Sums(1.125); k]);
        Fp8Sums::add_products(&mut sums, &factors, &factors);
        sums[0].0
    };
    // The sum is exact while it fits into thirteen places.
    assert_eq!(sum(128), 162.0);
    assert_eq!(sum(12288), 13115.0);
}

/// Exact results where the cases allow either code: values between two codes, with their neighbors, and the ends of the range.
#[test]
fn ties_go_to_the_even_code() {
    let codes = Codes::of(DType::E4m3);
    let magnitudes: Vec<f32> = (0..0x7f).map(|code| codes.decode(code) as f32).collect();
    let middles = magnitudes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let mut values: Vec<f32> = middles.flat_map(|v| [v, v.next_up(), v.next_down()]).chain(magnitudes.iter().copied()).collect();
    values.extend([448.0, 464.0, 465.0, 1e9, f32::MIN_POSITIVE]);
    // A block with a scale of one, and a block with the scale of zeros.
    let block = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, 0.26, 0.74, 1.26, 1.74, 2.4, 3.6, 4.9];
    let blocks: Vec<f32> = [block, block.map(|v: f32| -v), [0.0; 16]].concat();
    values.extend(values.clone().iter().map(|v| -v));
    for (format, values) in [(Stored::fp8(Scale::ONE), values), (Stored::nvfp4(Scale::ONE), blocks)] {
        let (mut cpu, mut arena) = (cpu(1), Arena::new(Region::Arena));
        let t = arena.alloc_stored(1, values.len(), format).unwrap();
        cpu.reserve(Region::Arena, arena.peak()).unwrap();
        cpu.write(t, &values).unwrap();
        let want = quantize(values.iter().copied().map(f64::from), format);
        let bytes = t.as_bytes().next().unwrap();
        let mut got = vec![0; bytes.len()];
        cpu.read_bytes(bytes, &mut got).unwrap();
        let want = if t.dtype == DType::E2m1 { pack(&want.codes, true) } else { want.codes };
        assert_eq!(got, want, "{format:?}");
    }
}

/// Two backends that agree pass every comparison by element.
#[test]
fn lockstep_is_clean_on_quantized_operands() {
    let mut both = Lockstep::new(cpu(1), cpu(2));
    let (mut weights, cases) = (ops::Weights::default(), ops::quantized::all());
    for case in &cases {
        ops::run(&mut both, &mut weights, case, false, &mut Vec::new());
    }
    assert_eq!(both.ops(), cases.len());
}

/// The control of the quantized cases: a code or scale that is one step off, or a changed byte next to the result, is a fault.
#[test]
fn a_wrong_code_is_found() {
    /// Changes the last bit of a byte of the elements (0) or of the block scales (1).
    fn change(cpu: &mut Cpu, out: Tensor, view: usize, place: u64) {
        let view = out.as_bytes().nth(view).unwrap();
        let byte = Tensor { offset: view.offset + place, rows: 1, cols: 1, ..view };
        let mut value = [0];
        cpu.read_bytes(byte, &mut value).unwrap();
        cpu.write(byte, &[f32::from(value[0] ^ 1)]).unwrap();
    }
    let faults = |name: &str, place: Option<(usize, u64)>| {
        let case = ops::quantized::all().into_iter().find(|case| case.name == name).expect(name);
        let mut cpu = wrapped::after_op(cpu(1), move |_, op, cpu| {
            if let (Op::RmsNorm { out, .. }, Some((view, place))) = (op, place) {
                change(cpu, out, view, place);
            }
            Ok(())
        });
        let mut faults = Vec::new();
        ops::run(&mut cpu, &mut ops::Weights::default(), &case, true, &mut faults);
        faults
    };
    // A row of seven blocks: the eighth scale of the second tile is padding.
    let [e4m3, strided, nvfp4] =
        ["e4m3 f32 whole", "e4m3 f32 slice", "nvfp4 f32 whole"].map(|rest| format!("rms_norm 7 rows of 112 into {rest}"));
    let found: &[(&str, (usize, u64), &str)] = &[
        (&e4m3, (0, 0), "[0, 0] of [7, 112] has the code"),
        (&e4m3, (0, 783), "[6, 111] of [7, 112] has the code"),
        (&strided, (0, 112), "is no result"),
        (&nvfp4, (0, 5), "[0, 11] of [7, 112] has the code"),
        (&nvfp4, (1, 16 + 512 + 1), "the block at [1, 80] of [7, 112] has the scale"),
        (&nvfp4, (1, 512 + 3), "is no result"),
        (&nvfp4, (1, 16 * 7), "is no result"),
    ];
    for (name, place, want) in found {
        assert_eq!(faults(name, None), [""; 0]);
        let faults = faults(name, Some(*place));
        assert!(faults.iter().any(|fault| fault.contains(want)), "{name} {place:?}: {faults:?}");
    }
}

/// The control of counted saturation: a lost count, or an extra one.
#[test]
fn a_wrong_count_is_found() {
    let name = "layer_norm_modulate 7 and 3 rows of 112 into e4m3 and clipped e4m3 f32 whole";
    let case = ops::cases::all().into_iter().find(|case| case.name == name).expect(name);
    let faults = |change: fn(&mut Cpu)| {
        let mut cpu = wrapped::after_op(cpu(1), move |_, _, cpu| {
            change(cpu);
            Ok(())
        });
        let mut faults = Vec::new();
        ops::run(&mut cpu, &mut ops::Weights::default(), &case, true, &mut faults);
        faults
    };
    assert_eq!(faults(|_| ()), [""; 0]);
    let lost = faults(|cpu| assert!(cpu.take_saturated().unwrap() > 100));
    assert!(lost.len() == 1 && lost[0].contains("0 values are counted as out of range"), "{lost:?}");
    let more = faults(|cpu| {
        // An op with one more such value, in the case's memory, which is restored afterwards.
        let (region, scaling) = (Region::Arena, Scaling::Unscaled);
        let at = |offset, dtype| Tensor { region, dtype, offset, rows: 1, cols: 1, stride: 1, scaling };
        let places @ [x, weight, out] = [at(0, DType::F32), at(256, DType::F32), at(512, DType::E4m3)];
        let mut before = [[0.0]; 3];
        places.iter().zip(&mut before).for_each(|(&place, value)| cpu.read(place, value).unwrap());
        cpu.write(x, &[1.0]).unwrap();
        cpu.write(weight, &[1e9]).unwrap();
        cpu.run(Op::RmsNorm { out, x, weight, eps: 0.0 }).unwrap();
        places.iter().zip(&before).for_each(|(&place, value)| cpu.write(place, value).unwrap());
    });
    assert!(more.len() == 1 && more[0].contains("are counted as out of range"), "{more:?}");
}

fn is_klein(name: &str) -> bool {
    name.contains("klein")
}

/// The table covers every op, including ops that are added later.
#[test]
fn the_table_names_every_op() {
    let names: Vec<String> = ops::cases::all().into_iter().map(|c| c.name).collect();
    for op in OpKind::ALL.iter().map(|op| op.name()) {
        let op = if op.starts_with("qkv") { "qkv" } else { op };
        assert!(names.iter().any(|name| name.split(' ').next() == Some(op)), "no case for {op}");
    }
}

/// The cases that are small enough for compute-sanitizer cover every op in every dtype and layout.
#[test]
fn the_small_cases_name_every_op() {
    let small: Vec<_> = ops::cases::all().into_iter().filter(|c| ops::is_within(ops::SMALL, &c.name)).collect();
    for op in OpKind::ALL.iter().map(|op| op.name()) {
        let op = if op.starts_with("qkv") { "qkv" } else { op };
        let variants: HashSet<_> = small
            .iter()
            .filter(|c| c.name.split(' ').next() == Some(op))
            .map(|c| (c.storage, c.fit == ops::Fit::Slice))
            .collect();
        assert_eq!(variants.len(), 4, "{op}");
    }
    let rank = "linear_gate_residual w4a16 67 rows of 640 to 264, rank 400, gate true bias true bf16 whole";
    assert!(ops::is_within(ops::SMALL, rank) && !ops::is_within(130, rank) && !ops::is_within(60, rank));
    assert!(ops::is_within(130, &rank.replace("400", "96")));
}

/// Shapes alone determine how work is partitioned, so the number of threads changes no bit of any result.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut machines = [1, 2, 3].map(|threads| (cpu(threads), ops::Weights::default()));
    // The cases at klein widths take long, and are partitioned in the same way.
    let plain = ops::cases::all().into_iter().filter(|case| !is_klein(&case.name));
    for case in ops::drawn(12, "ops by threads", plain.chain(ops::quantized::all())) {
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
    cpu.reserve(Region::Arena, arena.peak()).unwrap();
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

/// Operands of mismatched shapes, and outputs that alias inputs, are an error and never give a wrong result.
#[test]
fn mismatched_operands_are_rejected() {
    let (mut cpu, mut arena) = (cpu(1), Arena::new(Region::Arena));
    let (a, b, c) = (matrix(&mut arena, 4, 8), matrix(&mut arena, 4, 8), matrix(&mut arena, 8, 8));
    let (row, short, bytes) = (matrix(&mut arena, 1, 8), matrix(&mut arena, 1, 7), arena.alloc(4, 1, DType::U8).unwrap());
    let half = arena.alloc(1, 8, DType::Bf16).unwrap();
    cpu.reserve(Region::Arena, arena.peak()).unwrap();
    let (w, biased) = (Linear::new(c, None), Linear::new(c, Some(short)));
    let conv = Conv { weight: matrix(&mut Arena::new(Region::Weights), 8, 72), bias: row };
    let norm = GroupNorm { weight: row, bias: row, groups: 3, eps: 1e-6 };
    let one_group = GroupNorm { groups: 1, ..norm };
    let kv = |k, v| KvSegment { k, v };
    let (good, uneven, none) = ([kv(c, c); 2], [kv(c, c.rows(0..7))], [kv(c.rows(0..0), c.rows(0..0))]);
    let same = Sampling::Same;
    let outside = Tensor { offset: arena.peak(), ..a };
    let image = |out, x, width, height, sampling| {
        let (residual, shortcut, stats) = (None, None, None);
        Op::Conv { out, x, w: &conv, width, height, sampling, residual, shortcut, stats }
    };
    let beside = |residual, x, w, sampling| {
        let (shortcut, stats) = (Some(Shortcut { x, w }), None);
        Op::Conv { out: a, x: b, w: &conv, width: 2, height: 2, sampling, residual, shortcut, stats }
    };
    let lora = Linear { lora: Some(LoraBranch { down: short.cols(0..1), up: short.cols(0..1) }), ..w };
    let normed = |out, width, norm| Op::NormConv { out, x: b, norm, stats: None, w: &conv, width, height: 2 };
    let eight = GroupNorm { groups: 8, ..norm };
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
        ("filters that are not in phase form", image(c.rows(0..4), b.rows(0..1), 1, 1, Sampling::Up)),
        ("a shortcut and a residual", beside(Some(c.rows(0..4)), c.rows(4..8), &w, same)),
        ("a shortcut of another size", beside(None, c.rows(4..7), &w, same)),
        ("a shortcut of other channels", beside(None, c.rows(4..8).cols(0..7), &w, same)),
        ("a shortcut with a LoRA branch", beside(None, c.rows(4..8), &lora, same)),
        ("a shortcut that is overwritten", beside(None, a, &w, same)),
        ("a norm with other groups", normed(a, 2, &norm)),
        ("another number of normalized pixels", normed(a, 3, &eight)),
        ("the result is normalized", normed(b, 2, &eight)),
        ("an odd side halved", image(a.rows(0..1), b, 4, 1, Sampling::Down)),
        ("groups do not divide", Op::GroupNorm { out: a, x: b, norm: &norm, stats: None, silu: false }),
        ("statistics of what changes", Op::GroupNorm { out: b, x: b, norm: &one_group, stats: None, silu: false }),
        ("latents in bf16", Op::Euler { latents: half, velocity: row, dt: 1.0 }),
        ("shapes differ", Op::Guidance { out: a, cond: b, uncond: c, scale: 1.0 }),
        ("overlaps of two sizes", Op::Blend { into: a, from: b.rows(0..1), seam: Seam::Top }),
        ("a part of a pixel", Op::Blend { into: a, from: b, seam: Seam::Left { channels: 3 } }),
    ];
    for (what, op) in refused {
        match cpu.run(*op) {
            Err(Error::Op { .. }) => {}
            other => panic!("{what}: {other:?}"),
        }
    }
}

/// The rules of quantized operands: a valid op passes, and each mistake breaks one rule.
#[test]
fn quantized_operands_keep_their_rules() {
    let (mut arena, mut weights) = (Arena::new(Region::Arena), Arena::new(Region::Weights));
    let scale = |value| Scale::new(value).unwrap();
    let (fp8, nvfp4) = (Stored::fp8(scale(0.5)), Stored::nvfp4(scale(0.25)));
    let mut place = |rows, cols, format| arena.alloc_stored(rows, cols, format).unwrap();
    let (x, x8, x4) = (place(4, 64, Stored::plain(DType::Bf16)), place(4, 64, fp8), place(4, 64, nvfp4));
    let [out, into, shift, gate] = [4, 4, 1, 1].map(|rows| place(rows, 64, Stored::plain(DType::Bf16)));
    let [result8, row8, latents8] = [4, 1, 4].map(|rows| place(rows, 64, fp8));
    let (result4, angles) = (place(4, 64, nvfp4), place(4, 32, Stored::plain(DType::F32)));
    let (half5, rows8) =
        (Stored { dtype: DType::E5m2, scales: Scales::Unscaled }, Stored { dtype: DType::E4m3, scales: Scales::Rows });
    let (half5, rows8) = (place(4, 64, half5), place(4, 64, rows8));
    let (wide4, head4) = (place(4, 128, nvfp4), place(4, 32, nvfp4));
    let mut place = |rows, cols, format| weights.alloc_stored(rows, cols, format).unwrap();
    let (w8, w4, wide) = (place(64, 64, fp8), place(64, 64, nvfp4), place(64, 128, fp8));
    let (gain, norm8) = (place(1, 64, Stored::plain(DType::F32)), place(1, 64, fp8));
    let [down, up] = [(3, 64), (64, 3)].map(|(rows, cols)| place(rows, cols, Stored::plain(DType::Bf16)));
    let (down8, up8) = (place(3, 64, fp8), place(64, 3, fp8));

    let layer = |weight, input| Linear { input, ..Linear::new(weight, None) };
    let plain = Stored::plain(DType::Bf16);
    let (w8a8, w8a16, w4a4) = (layer(w8, fp8), layer(w8, plain), layer(w4, nvfp4));
    let lora = |down, up| Linear { lora: Some(LoraBranch { down, up }), ..w8a8 };
    let (good, short, long) = (lora(down, up), lora(down.cols(0..63), up), lora(down, up.rows(0..63)));
    let (ranks, quantized) = (lora(down, up.cols(0..2)), [lora(down8, up), lora(down, up8)]);
    let other_scale = layer(w8, Stored::fp8(scale(0.75)));
    let halves = Linear { weight: Weight::stack(&[w8.rows(0..32), w8.rows(32..64)]).unwrap(), ..w8a8 };
    assert!(Weight::stack(&[w8, wide]).is_none(), "parts of different widths");
    assert!(Weight::stack(&[w8; 5]).is_none() && Weight::stack(&[]).is_none(), "too many parts, or none");

    let unscaled = Tensor { scaling: Scaling::Unscaled, ..x4 };
    let scaled = Tensor { scaling: Scaling::Tensor(scale(0.5)), ..x };
    let in_blocks = Tensor { scaling: x4.scaling, ..x8 };
    let narrow = |t: Tensor| t.cols(0..40);
    let gemm = |out, x, w| [Gemm { out, x, w }];
    let kv = [KvSegment { k: x, v: x }];
    let (results, whole, whole4) = ([result8.rows(0..1), result4.rows(0..3)], [out], [result4]);
    let softmax = Softmax::Base2 { bound: 1.0 };
    let attention = |out, q, causal, softmax| Op::Attention { out, q, kv: &kv, head_dim: 32, causal, softmax };
    let heads = |q_scale, k_scale| Projection {
        x: x8,
        w: &w8a8,
        norm: None,
        q_scale,
        k_scale,
        rope: Rope { table: angles, style: RopeStyle::HalfSplit },
        q: None,
        k: out.cols(0..32),
        v: out.cols(32..64),
        mlp: None,
    };
    let gated = |into, gate| [GatedGemm { into, x: x8, w: &w8a8, gate: Some(gate) }];
    let modulated = |out, shift| [Modulated { out, x, shift, scale: gate }];
    let both = |first, second| [first, second].map(|out| Modulated { out, x, shift, scale: gate });
    // Equal elements with their block scales elsewhere.
    let scales_at = |t: Tensor, place| Tensor { scaling: Scaling::Blocks16 { scales: place, tensor: scale(0.25) }, ..t };
    let [scales, own] = [x4, result4].map(|t| t.scale_extent().start);
    let segments = [(x4, x), (x, x4)].map(|(k, v)| [KvSegment { k, v }]);
    let over = |kv| Op::Attention { out: &whole, q: x, kv, head_dim: 32, causal: false, softmax };
    let small = Op::Attention { out: &whole4, q: x, kv: &kv, head_dim: 8, causal: false, softmax };
    let narrow_rope = Rope { table: angles.cols(0..16), style: RopeStyle::HalfSplit };
    let queries4 = Projection { q: Some(head4), k: out.cols(0..16), v: out.cols(16..32), rope: narrow_rope, ..heads(0.5, 0.5) };
    let (keys4, values4) = (Projection { k: head4, ..heads(0.5, 0.5) }, Projection { v: head4, ..heads(0.5, 0.5) });
    let norm = |out, weight| Op::RmsNorm { out, x, weight, eps: 0.0 };

    let accepted: &[(&str, Op<'_>)] = &[
        ("W8A8", Op::Linear(&gemm(out, x8, &w8a8))),
        ("W8A16", Op::Linear(&gemm(out, x, &w8a16))),
        ("W4A4", Op::Linear(&gemm(out, x4, &w4a4))),
        ("two parts", Op::Linear(&gemm(out, x8, &halves))),
        ("low rank", Op::Linear(&gemm(out, x8, &good))),
        ("a gate", Op::LinearGateResidual(&gated(into, gate))),
        ("a norm into e4m3", norm(result8, gain)),
        ("a norm into NVFP4", norm(result4, gain)),
        ("a modulation into e4m3", Op::LayerNormModulate { streams: &modulated(result8, shift), eps: 0.0 }),
        (
            "halves of one NVFP4 tensor",
            Op::LayerNormModulate { streams: &both(wide4.cols(0..64), wide4.cols(64..128)), eps: 0.0 },
        ),
        ("attention into two formats", attention(&results, x, false, softmax)),
        ("attention into NVFP4", attention(&whole4, x, false, softmax)),
        ("heads", Op::Qkv(&[heads(0.5, 0.5)])),
    ];
    for (what, op) in accepted {
        op.check().unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    let refused: &[(&str, &str, Op<'_>)] = &[
        ("e4m3 copied", "quantized values", Op::Copy { out, x: x8 }),
        ("a copy into e4m3", "quantized values", Op::Copy { out: result8, x }),
        ("e4m3 activated", "quantized values", Op::Silu { out, x: x8 }),
        ("a norm of e4m3", "quantized values", Op::RmsNorm { out, x: x8, weight: gain, eps: 0.0 }),
        ("a norm weight in e4m3", "shapes", norm(out, norm8)),
        ("a modulation by e4m3", "quantized values", Op::LayerNormModulate { streams: &modulated(out, row8), eps: 0.0 }),
        ("guidance into e4m3", "quantized values", Op::Guidance { out: result8, cond: x, uncond: x, scale: 1.0 }),
        ("a blend of e4m3", "quantized values", Op::Blend { into, from: x8, seam: Seam::Top }),
        ("latents in e4m3", "shapes", Op::Euler { latents: latents8, velocity: x, dt: 1.0 }),
        ("a linear layer into e4m3", "quantized values", Op::Linear(&gemm(result8, x8, &w8a8))),
        ("a residual stream in e4m3", "quantized values", Op::LinearGateResidual(&gated(result8, gate))),
        ("a gate in e4m3", "shapes", Op::LinearGateResidual(&gated(into, row8))),
        ("NVFP4 without scales", "scales", norm(unscaled, gain)),
        ("bf16 with a scale", "scales", norm(scaled, gain)),
        ("e4m3 with blocks", "scales", norm(in_blocks, gain)),
        ("activations in e5m2", "scales", norm(half5, gain)),
        ("activations with scales of rows", "scales", norm(rows8, gain)),
        ("part of a block", "scales", Op::RmsNorm { out: narrow(x4), x: narrow(x), weight: gain.cols(0..40), eps: 0.0 }),
        ("rows that end inside of a block", "scales", norm(Tensor { stride: 72, ..x4 }, gain)),
        ("another scale than the layer's", "shapes", Op::Linear(&gemm(out, x8, &other_scale))),
        ("plain inputs of a W8A8 layer", "shapes", Op::Linear(&gemm(out, x, &w8a8))),
        ("e4m3 inputs of a W8A16 layer", "shapes", Op::Linear(&gemm(out, x8, &w8a16))),
        ("e4m3 inputs of a W4A4 layer", "shapes", Op::Linear(&gemm(out, x8, &w4a4))),
        ("low rank of another width", "shapes", Op::Linear(&gemm(out, x8, &short))),
        ("low rank of another height", "shapes", Op::Linear(&gemm(out, x8, &long))),
        ("two ranks", "shapes", Op::Linear(&gemm(out, x8, &ranks))),
        ("a quantized first matrix of low rank", "shapes", Op::Linear(&gemm(out, x8, &quantized[0]))),
        ("a quantized second matrix of low rank", "shapes", Op::Linear(&gemm(out, x8, &quantized[1]))),
        ("scales over their own elements", "scales", norm(scales_at(result4, result4.offset), gain)),
        ("scales over the end of their own elements", "scales", norm(scales_at(result4, result4.extent().end - 1), gain)),
        ("scales over the input", "operands overlap", norm(scales_at(result4, x.offset), gain)),
        (
            "a result over the scales of the input",
            "operands overlap",
            Op::Linear(&gemm(Tensor { offset: scales, ..out }, x4, &w4a4)),
        ),
        (
            "two results with the same scales",
            "operands overlap",
            Op::LayerNormModulate { streams: &both(result4, scales_at(x4, own)), eps: 0.0 },
        ),
        (
            "scales over another result",
            "operands overlap",
            Op::LayerNormModulate { streams: &both(result4, scales_at(x4, result4.offset)), eps: 0.0 },
        ),
        ("queries in e2m1", "heads in e2m1", attention(&whole, x4, false, softmax)),
        ("keys in e2m1", "heads in e2m1", over(&segments[0])),
        ("values in e2m1", "heads in e2m1", over(&segments[1])),
        ("projected queries in e2m1", "heads in e2m1", Op::Qkv(&[queries4])),
        ("projected keys in e2m1", "heads in e2m1", Op::Qkv(&[keys4])),
        ("projected values in e2m1", "heads in e2m1", Op::Qkv(&[values4])),
        ("heads of half a block", "blocks across heads", small),
        ("a mask over outputs", "a causal mask over several outputs", attention(&results, x, true, softmax)),
        ("fewer rows than queries", "shapes", attention(&results[..1], x, false, softmax)),
        ("no bound", "softmax", attention(&results, x, false, Softmax::Base2 { bound: f32::NAN })),
        ("a negative bound", "softmax", attention(&results, x, false, Softmax::Base2 { bound: -1.0 })),
        ("a softmax scale of zero", "softmax", attention(&results, x, false, Softmax::Natural { scale: 0.0 })),
        ("a scale of queries of zero", "scales", Op::Qkv(&[heads(0.0, 0.5)])),
        ("a negative scale of keys", "scales", Op::Qkv(&[heads(0.5, -0.5)])),
        ("a scale of keys that is NaN", "scales", Op::Qkv(&[heads(0.5, f32::NAN)])),
    ];
    for (what, rule, op) in refused {
        match op.check() {
            Err(Error::Op { what: why, .. }) => assert!(why.starts_with(&format!("{rule} in ")), "{what}: {why}"),
            other => panic!("{what}: {other:?}"),
        }
    }
    assert!([0.0, -1.0, f32::NAN, f32::INFINITY].iter().all(|&value| Scale::new(value).is_none()), "scales are positive");
}

/// Memory outside a view's description is an error on the CPU, and never a panic.
#[test]
fn views_that_do_not_fit_memory_are_rejected() {
    let (mut cpu, mut arena, mut weights) = (cpu(1), Arena::new(Region::Arena), Arena::new(Region::Weights));
    let by_rows = arena.alloc_stored(4, 16, Stored { dtype: DType::E4m3, scales: Scales::Rows }).unwrap();
    let (out, to) = (matrix(&mut arena, 4, 8), matrix(&mut weights, 4, 8));
    cpu.reserve(Region::Arena, arena.peak()).unwrap();
    // Only weights have row scales, and weights are uploaded.
    let written = cpu.write(by_rows, &[1.0; 64]);
    assert!(matches!(written, Err(Error::Op { op: "write", .. })), "{written:?}");

    // Two parts of two rows each, in separate places.
    let part = |first: u8| {
        let bytes: Vec<u8> = (0..16).flat_map(|i| f32::from(first + i).to_le_bytes()).collect();
        WeightSlice::plain(Bytes::new(Arc::new(bytes)), DType::F32, 2)
    };
    cpu.upload(to, Role::Linear, &[part(0), part(16)]).unwrap();
    let mut copied = |rows, cols| {
        let [out, x] = [out, to].map(|t| Tensor { rows, cols, stride: cols, ..t });
        let mut values = vec![0.0; rows * cols];
        cpu.run(Op::Copy { out, x }).and_then(|()| cpu.read(out, &mut values)).map(|()| values)
    };
    let count: Vec<f32> = (0..32_u8).map(f32::from).collect();
    for (rows, cols) in [(4, 8), (8, 4), (2, 16)] {
        assert_eq!(copied(rows, cols).unwrap(), count, "{rows} rows of {cols}");
    }
    for (rows, cols) in [(2, 12), (3, 10), (1, 32)] {
        let result = copied(rows, cols);
        assert!(matches!(result, Err(Error::Op { .. })), "{rows} rows of {cols}: {result:?}");
    }
}

#[test]
fn mismatched_weights_are_rejected() {
    let mut cpu = cpu(1);
    let mut arena = Arena::new(Region::Weights);
    let part = |bytes: usize| [WeightSlice::plain(Bytes::new(Arc::new(vec![0u8; bytes])), DType::F32, 4)];
    let to = matrix(&mut arena, 4, 8);
    for bytes in [0, 96, 124, 130, 160] {
        assert!(matches!(cpu.upload(to, Role::Linear, &part(bytes)), Err(Error::Op { .. })), "{bytes} bytes");
    }
    ops::mistakes::check(&mut cpu);
}

/// Quantized weights are not converted: a tensor has the format of its only part.
#[test]
fn quantized_weights_keep_their_format() {
    let (mut cpu, mut arena, scale) = (cpu(1), Arena::new(Region::Weights), |value| Scale::new(value).unwrap());
    let bytes = |count: usize| Bytes::new(Arc::new(vec![0u8; count]));
    let part = |rows, scaling| WeightSlice { bytes: bytes(rows * 16), dtype: DType::E4m3, rows, scaling };
    let mut place = |scales| arena.alloc_stored(4, 16, Stored { dtype: DType::E4m3, scales }).unwrap();
    let (one, tensor, rows) = (place(Scales::Unscaled), place(Scales::Tensor(scale(0.5))), place(Scales::Rows));
    let of_rows = || SliceScaling::Rows(bytes(16));
    let halves = || SliceScaling::Tensor(scale(0.5));
    for (to, parts) in
        [(one, vec![part(4, SliceScaling::Unscaled)]), (tensor, vec![part(4, halves())]), (rows, vec![part(4, of_rows())])]
    {
        cpu.upload(to, Role::Linear, &parts).unwrap();
    }
    let refused = [
        ("another scale", tensor, vec![part(4, SliceScaling::Tensor(scale(0.25)))]),
        ("no scale", tensor, vec![part(4, SliceScaling::Unscaled)]),
        ("a scale too many", one, vec![part(4, halves())]),
        ("scales of rows", tensor, vec![part(4, of_rows())]),
        ("two parts with scales", rows, vec![part(2, SliceScaling::Rows(bytes(8))), part(2, SliceScaling::Rows(bytes(8)))]),
        ("e5m2 as e4m3", one, vec![WeightSlice { dtype: DType::E5m2, ..part(4, SliceScaling::Unscaled) }]),
        ("bf16 as e4m3", one, vec![WeightSlice::plain(bytes(128), DType::Bf16, 4)]),
    ];
    for (what, to, parts) in refused {
        assert!(matches!(cpu.upload(to, Role::Linear, &parts), Err(Error::Op { op: "upload", .. })), "{what}");
    }
}

/// An upload over part of another weight invalidates all of it: reading the rest is an error.
#[test]
fn an_uploaded_weight_replaces_the_previous_one() {
    let (mut cpu, mut weights, mut arena) = (cpu(1), Arena::new(Region::Weights), Arena::new(Region::Arena));
    let (to, out) = (matrix(&mut weights, 4, 8), matrix(&mut arena, 4, 8));
    cpu.reserve(Region::Arena, arena.peak()).unwrap();
    let fill = |cpu: &mut Cpu, to: Tensor, value: f32| {
        let bytes = Bytes::new(Arc::new(value.to_le_bytes().repeat(to.len())));
        cpu.upload(to, Role::Linear, &[WeightSlice::plain(bytes, DType::F32, to.rows)]).unwrap();
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
