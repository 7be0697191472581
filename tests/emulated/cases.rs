//! Runs the op cases at small sizes, with every kernel and every tile.

use crate::driver::Gpu;
use crate::runner::{Runner, run_seed};
use common::ops::outputs::pairs;
use common::ops::{self, Case, SMALL, tiles};
use common::random::{Random, long};
use kiln::internals::backend::cuda::{Arch, Kernel, KernelChoice};
use std::collections::BTreeSet;
use std::thread;

/// The cases of every run on Hopper, with every tile. Together with [`FP8_ATTENTION`] they launch every kernel.
const EVERY_TIME: &[&str] = &[
    "copy 7x113 bf16 whole",
    "copy 113x128 from f32 to bf16 bf16 slice",
    "silu 113x128 bf16 whole",
    "patchify 3x7 tokens 4 channels bf16 whole",
    "unpatchify 3x7 tokens 4 channels bf16 whole",
    "euler 113x128 bf16 whole",
    "renoise 113x128 to 0.6 in some rows bf16 whole",
    "guidance 113x128 bf16 whole",
    "blend 113x128 at the top bf16 whole",
    "blend 11x27 at the left, 3 channels bf16 whole",
    "attention 130 queries [200] keys 1:1 heads of 384 bf16 whole",
    "preview 3x7 tokens 32 channels bf16 whole",
    "pixels 113x128 bf16 whole",
    "non_finite 113x128 bf16 whole",
    "largest_magnitude 113x128 bf16 whole",
    "largest_magnitude 113x128 with nan bf16 whole",
    "rms_norm 2 rows of 1024 bf16 whole",
    "rms_norm 2 rows of 2040 bf16 whole",
    "rms_norm 2 rows of 3064 bf16 whole",
    "rms_norm 2 rows of 3080 bf16 whole",
    "rms_norm 2 rows of 4104 bf16 whole",
    "rms_norm 2 rows of 6152 bf16 whole",
    "rms_norm 2 rows of 8200 bf16 whole",
    "layer_norm_modulate 1 and 3 rows of 1024 around 4 by 1 bf16 whole",
    "layer_norm_modulate 1 and 3 rows of 2040 around 4 by 1 bf16 whole",
    "layer_norm_modulate 1 and 3 rows of 3064 around 4 by 1 bf16 whole",
    "layer_norm_modulate 1 and 3 rows of 3080 around 4 by 1 bf16 whole",
    "layer_norm_modulate 1 and 3 rows of 4104 around 4 by 1 bf16 whole",
    "layer_norm_modulate 1 and 3 rows of 6152 around 4 by 1 bf16 whole",
    "layer_norm_modulate 1 and 3 rows of 8200 around 4 by 1 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 1024 into e4m3 and clipped e4m3 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 2040 into e4m3 and clipped e4m3 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 3064 into e4m3 and clipped e4m3 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 3080 into e4m3 and clipped e4m3 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 4104 into e4m3 and clipped e4m3 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 6152 into e4m3 and clipped e4m3 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 8200 into e4m3 and clipped e4m3 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 1024 into plain and e4m3 bf16 whole",
    "rms_norm 7 rows of 112 into clipped e4m3 bf16 slice",
    "layer_norm_modulate 5 and 3 rows of 1024 into nvfp4 and clipped nvfp4 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 2032 into nvfp4 and clipped nvfp4 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 3056 into nvfp4 and clipped nvfp4 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 3088 into nvfp4 and clipped nvfp4 bf16 slice",
    "layer_norm_modulate 5 and 3 rows of 3088 into nvfp4 and clipped nvfp4 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 4112 into nvfp4 and clipped nvfp4 bf16 whole",
    "layer_norm_modulate 5 and 3 rows of 6160 into nvfp4 and clipped nvfp4 bf16 whole",
    "layer_norm_modulate 130 and 3 rows of 192 into nvfp4 and clipped nvfp4 bf16 slice",
    "rms_norm 130 rows of 192 into nvfp4 bf16 slice",
    "group_norm 129x128 groups 8 stats given false silu true bf16 whole",
    "group_norm 113x40 groups 5 stats given false silu false bf16 slice",
    "group_norm 129x256 groups 32 in place bf16 whole",
    "group_norm 113x40 groups 5 in place bf16 slice",
    "conv 5x7 3 to 32 same residual true stats some(8) bf16 whole",
    "conv 17x9 40 to 40 same residual false stats some(5) bf16 whole",
    "conv 1x1 40 to 3 up residual true stats none bf16 slice",
    "conv 17x9 40 to 24 same shortcut of 3 stats none bf16 slice",
    "conv 33x17 3 to 128 same residual false stats some(32) bf16 whole",
    "norm_conv 33x19 96 to 3 groups 32 stats given true bf16 whole",
    "norm_conv 47x35 128 to 3 groups 32 stats given false into f32 bf16 whole",
    "norm_conv 5x7 16 to 8 groups 1 stats given true bf16 slice",
    "linear 64x65x64 bias true, two streams bf16 whole",
    "linear 65x64x72 bias true, grouped with 67 rows bf16 whole",
    "linear bf16 3 rows of 640 to 264, rank 16, bias true bf16 whole",
    "linear with weight e4m3 by rows as bf16 bf16 whole",
    "linear with weight mixed as bf16 bf16 whole",
    "conv 5x7 with 32 filters of e4m3 bf16 whole",
    "linear of e4m3 by rows by e4m3 f32 slice",
    "linear of e4m3, bf16, e4m3 by rows by plain f32 slice",
    "linear of e4m3, nvfp4, bf16 by plain f32 slice",
    "linear_swiglu of bf16 and e4m3 by rows by e4m3 into clipped e4m3 f32 slice",
    "linear_gate_residual of e4m3 by e4m3 f32 slice",
    "linear of nvfp4 by nvfp4 f32 slice",
    "linear_swiglu of e4m3 and bf16 by plain into nvfp4 f32 slice",
    "qkv of e4m3, e4m3 by rows, bf16 by plain into e4m3, 2:1 heads of 64 f32 slice",
    "linear_gate_residual 66x64, rows of 584 gate true bias true bf16 whole",
    "linear_gate_residual w4a16 130 rows of 576 to 168, nvfp4, gate true bias false bf16 whole",
    "linear w4a4 65 and 67 rows of 640 to 72 and 136, two streams bf16 whole",
    "linear w4a4 67 rows of 208 to 168, nvfp4, bias true bf16 whole",
    "linear_swiglu w4a4 67 rows of 640 to 192, nvfp4 in one matrix into nvfp4 bf16 whole",
    "linear_gate_residual w4a4 67 rows of 640 to 264, nvfp4, nvfp4, gate true bias true bf16 whole",
    "qkv w4a4 131 rows of 640 interleaved mlp 64, nvfp4 into bf16 and e2m1 bf16 whole",
    "linear_gate_residual w8a8 130 rows of 528 to 168, e4m3 by rows, gate true bias false bf16 whole",
    "qkv 7x113 4:2 heads of 64 halfsplit mlp none bf16 whole",
    "qkv 65x64 2:2 heads of 128 interleaved mlp some(72) without norm bf16 whole",
    "attention into [5, 0, 130] rows apart, 2:1 heads of 128 bf16 whole",
    "attention into [5, 0, 130] rows adjacent, 2:1 heads of 128 bf16 whole",
    "attention into plain and clipped e4m3, 2:1 heads of 128 bf16 whole",
    "attention into nvfp4 with two scales, 2:1 heads of 128 bf16 whole",
    "attention into e4m3 and nvfp4, 2:1 heads of 128 bf16 slice",
    "attention 7 queries [113] keys 4:2 heads of 64 bf16 whole",
    "attention 65 queries [33] keys 2:1 heads of 512 bf16 whole",
    "attention huge 130 queries [400] keys 1:1 heads of 512 bf16 whole",
    "attention bounded 130 queries [129, 0, 7] keys 3:3 heads of 128 bf16 whole",
    "attention huge 130 queries [129, 0, 7] keys 3:3 heads of 128 bf16 whole",
    "attention of e4m3 bounded 130 queries [129, 0, 7] keys 3:3 heads of 128 bf16 whole",
    "attention of e4m3 huge 130 queries [129, 0, 7] keys 3:3 heads of 128 bf16 whole",
    "attention of e4m3 bounded 40 queries [129, 255, 1, 128] keys 2:1 heads of 128 bf16 whole",
    "attention of e4m3 by 0.37 and 0.0071 bounded 130 queries [129, 0, 7, 40] keys 2:1 heads of 128 bf16 whole",
    "attention of e4m3 into e4m3 with two scales, 2:1 heads of 128 bf16 whole",
    "attention of e4m3 into plain and clipped e4m3, 2:1 heads of 128 bf16 whole",
    "attention of e4m3 into e4m3, plain and e4m3, 2:1 heads of 128 bf16 whole",
    "attention_causal 33 queries [33] keys 2:2 heads of 128 bf16 whole",
    "attention_causal 130 queries [130] keys 4:1 heads of 128 bf16 whole",
];

/// The cases of every run with one tile, which the seed draws. With all tiles they would take twice as long as all the above.
const WITH_ONE_TILE: &[&str] = &[
    "linear_swiglu 130x168, rows of 520 bf16 whole",
    "linear w8a16 67 rows of 528 to 424, e4m3, bf16, e4m3 by rows, bias true bf16 whole",
    "linear_swiglu w8a16 67 rows of 528 to 208, e4m3 and bf16 into e4m3 bf16 whole",
    "linear_gate_residual w8a16 130 rows of 528 to 168, e4m3, gate true bias true bf16 whole",
    "qkv w8a16 131 rows of 528 halfsplit mlp 80, e4m3, bf16, e4m3, bf16 into bf16 and e4m3 bf16 whole",
    "linear w4a16 67 rows of 576 to 424, nvfp4, bf16, nvfp4, bias true bf16 whole",
    "linear_swiglu w4a16 67 rows of 576 to 208, nvfp4 in one matrix into e4m3 bf16 whole",
    "qkv w4a16 131 rows of 576 halfsplit mlp 80, nvfp4, e4m3 by rows, bf16, nvfp4 into bf16 and bf16 bf16 whole",
    "linear w8a8 65 and 67 rows of 528 to 72 and 136, two streams bf16 whole",
    "linear_swiglu w8a8 67 rows of 528 to 208, e4m3 and e4m3 by rows into e4m3 bf16 whole",
    "qkv w8a8 131 rows of 528 interleaved mlp 80, e4m3 by rows into e4m3 and e4m3 bf16 whole",
    "qkv 113x64 3:3 heads of 128 interleaved mlp some(129) bf16 whole",
    "conv 7x3 40 to 128 up residual false stats some(16) bf16 whole",
    "conv 19x23 8 to 128 up residual false stats some(32) bf16 whole",
    "conv 19x31 16 to 128 same shortcut of 72 stats some(32) bf16 whole",
    "attention into nvfp4 with two scales, 2:1 heads of 64 bf16 slice",
    "linear_gate_residual bf16 67 rows of 640 to 264, rank 400, gate true bias true bf16 whole",
    "linear w8a8 130 rows of 640 to 168, rank 48, bias true bf16 whole",
    "linear w4a4 130 rows of 640 to 168, rank 48, bias true bf16 whole",
];

/// The cases of every run where portable kernels take e4m3 queries and keys: with and without a maximum, with different scales per segment,
/// and into several formats.
const FP8_ATTENTION: &[&str] = &[
    "attention of e4m3 bounded 130 queries [129, 0, 7] keys 3:3 heads of 128 bf16 whole",
    "attention of e4m3 huge 130 queries [129, 0, 7] keys 3:3 heads of 128 bf16 whole",
    "attention of e4m3 by 0.37 and 0.0071 or 0.013 130 queries [129, 0, 7, 40] keys 2:1 heads of 128 bf16 whole",
    "attention of e4m3 into plain and clipped e4m3, 2:1 heads of 128 bf16 whole",
    "attention of e4m3 into e4m3 and nvfp4, 2:1 heads of 128 bf16 slice",
];

/// A GPU and the kernels to run on it.
struct Plan {
    gpu: Gpu,
    choices: Vec<KernelChoice>,
    /// Whether a case is worth running with a choice.
    wanted: fn(KernelChoice, &str) -> bool,
    /// The cases of every run: those with every choice, and those with one choice that the seed draws.
    every_time: &'static [&'static str],
    with_one_choice: &'static [&'static str],
    /// How many of the other cases a run takes. The seed chooses them.
    drawn: usize,
}

/// The plans, one for each thread.
fn plans() -> Vec<Plan> {
    let sm90 = |choice: &KernelChoice| matches!(choice, KernelChoice::Only(kernel) if kernel.arch() == Arch::Sm90);
    let sm120 = |choice: &KernelChoice| matches!(choice, KernelChoice::Only(kernel) if kernel.arch() == Arch::Sm120);
    let (blackwell, others): (Vec<_>, Vec<_>) = KernelChoice::all().partition(sm120);
    let (hopper, portable): (Vec<_>, Vec<_>) = others.into_iter().partition(sm90);
    let on_hopper = |choices| {
        let (wanted, every_time, with_one_choice) =
            (tiles::runs_with as fn(KernelChoice, &str) -> bool, EVERY_TIME, WITH_ONE_TILE);
        Plan { gpu: Gpu::HOPPER, choices, wanted, every_time, with_one_choice, drawn: 4 }
    };
    // The GPU selects only the kernels of matrix ops. Kernels for FP8 operands exist only from 8.9 on.
    let selected = |gpu: Gpu| {
        const BF16: fn(KernelChoice, &str) -> bool = |_, name| {
            let portable = [Kernel::GemmBf16Sm80_128x128, Kernel::ConvBf16Sm80_128x128, Kernel::AttentionBf16Sm80_4warps];
            portable.iter().any(|&kernel| tiles::has_kernel(name, kernel))
        };
        const FP8: fn(KernelChoice, &str) -> bool = |choice, name| {
            BF16(choice, name) || tiles::has_kernel(name, Kernel::GemmFp8Sm89_128x128) || tiles::is_fp8_attention(name)
        };
        let (wanted, every_time): (_, &[_]) = if gpu.capability < (8, 9) { (BF16, &[]) } else { (FP8, FP8_ATTENTION) };
        Plan { gpu, choices: vec![KernelChoice::Best], wanted, every_time, with_one_choice: &[], drawn: 2 }
    };
    let others = [Gpu::AMPERE, Gpu::ADA, Gpu::BLACKWELL, Gpu::NATIVE_BLACKWELL].map(selected);
    let native = Plan { gpu: Gpu::NATIVE_BLACKWELL, ..on_hopper(blackwell) };
    [on_hopper(portable), on_hopper(hopper), native].into_iter().chain(others).collect()
}

/// The findings of a thread.
#[derive(Default)]
struct Outcome {
    faults: Vec<String>,
    /// The kernels that the cases of every run have launched.
    launched: BTreeSet<&'static str>,
}

impl Plan {
    fn run(&self, seed: u64, only: Option<&str>) -> Outcome {
        let (mut outcome, mut runner, mut random) = (Outcome::default(), Runner::new(self.gpu), Random::new(seed));
        let mut pairs = pairs_of(self, only);
        pairs.sort_by_cached_key(|_| random.next());
        let (every_time, pairs): (Vec<_>, Vec<_>) =
            pairs.into_iter().partition(|(_, case)| self.every_time.contains(&case.name.as_str()));
        let mut taken = BTreeSet::new();
        let mut is_first = |name: &str| self.with_one_choice.contains(&name) && taken.insert(name.to_owned());
        let (once, others): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|(_, case)| is_first(&case.name));
        let drawn = if only.is_none() && !long() { self.drawn } else { others.len() };
        println!("{:?}: {} and {} cases, {drawn} of {} others", self.gpu, every_time.len(), once.len(), others.len());
        for (choice, case) in &every_time {
            outcome.faults.extend(runner.check(seed, *choice, case).err());
        }
        outcome.launched = runner.cuda.launched().filter(|(_, times)| *times > 0).map(|(kernel, _)| kernel.symbol()).collect();
        for (choice, case) in once.iter().chain(others.iter().take(drawn)) {
            outcome.faults.extend(runner.check(seed, *choice, case).err());
        }
        outcome
    }
}

/// The cases of a plan, or only those whose names contain all of these words.
fn pairs_of(plan: &Plan, only: Option<&str>) -> Vec<(KernelChoice, Case)> {
    let words: Vec<&str> = only.unwrap_or_default().split(' ').collect();
    // The widths of the real models take as long as all other cases together.
    let wanted =
        |name: &str| words.iter().all(|word| name.contains(word)) && (long() || only.is_some() || !name.contains(" klein"));
    let choices = plan.choices.iter().copied();
    choices.flat_map(|choice| pairs(choice, SMALL, plan.wanted)).filter(|(_, case)| wanted(&case.name)).collect()
}

/// Runs all plans with a seed, each on a thread of its own.
fn check_all(seed: u64, only: Option<&str>) {
    println!("KILN_TEST_SEED={seed}");
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let threads: Vec<_> = plans().into_iter().map(|plan| scope.spawn(move || plan.run(seed, only))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let faults: Vec<String> = outcomes.iter().flat_map(|outcome| outcome.faults.clone()).collect();
    assert!(faults.is_empty(), "{} cases fail:\n{}", faults.len(), faults.join("\n"));
    // The self-test's kernels have their own tests.
    let of_ops = Kernel::ALL.iter().filter(|kernel| !kernel.file().starts_with("selftest"));
    let missed: Vec<_> = of_ops.filter(|k| !outcomes.iter().any(|o| o.launched.contains(k.symbol()))).collect();
    assert!(missed.is_empty() || only.is_some(), "the cases of every time never launch {missed:?}");
}

#[test]
fn every_kernel_computes_what_it_should() {
    needs_emulator!();
    let names: Vec<String> = ops::cases::all().into_iter().map(|case| case.name).collect();
    let listed = EVERY_TIME.iter().chain(WITH_ONE_TILE).chain(FP8_ATTENTION);
    let unknown: Vec<_> = listed.filter(|name| !names.iter().any(|known| known == *name)).collect();
    assert!(unknown.is_empty(), "no cases are called {unknown:?}");
    let only = std::env::var("KILN_TEST_CASE").ok();
    let seeds = std::env::var("KILN_TEST_SEEDS").map_or(1, |text| text.parse().expect("KILN_TEST_SEEDS is a number"));
    (0..seeds).for_each(|more| check_all(run_seed() + more, only.as_deref()));
}
