//! Compares the emulator's results with a GPU's. `gpu outputs FILE` records the GPU's results; then, on any machine:
//!
//!     KILN_GPU_OUTPUTS=FILE cargo test --release --test emulated agreement -- --ignored --nocapture
//!
//! The emulated GPU has as many SMs as the real one, because the number of SMs decides the schedules and so the order of additions.

use crate::driver::Gpu;
use crate::runner::Runner;
use common::ops::outputs::{Recorded, all_pairs, record, results};
use kiln::internals::backend::cuda::Kernel;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Ops whose results are each one rounding of a few values: any difference is an error.
const EXACT: [&str; 9] =
    ["copy", "euler", "renoise", "guidance", "blend", "non_finite", "largest_magnitude", "preview", "pixels"];

/// The largest difference of other results, in bf16 steps.
const STEPS: f64 = 1.0;

/// The largest difference of e4m3 results, in bf16 steps. e4m3 has four binary places less, and next to a tie both sides may differ.
const STEPS_E4M3: f64 = 16.0;

/// The smallest step is taken this far below the largest result. The error of a sum is relative to its terms, and not to what is left of
/// them where they cancel.
const CANCELED: f32 = 256.0;

/// The smallest step of attention, which rounds probabilities to bf16. The hardware's exp2 is an approximation that is not published to the
/// bit, so one in some thousand probabilities is rounded to its neighbor. That moves the result by a bf16 step of that key's value, however
/// much is left of the values after averaging. So the step of the largest result counts.
const CANCELED_ATTENTION: f32 = 1.0;

/// The cases of one kernel.
#[derive(Default)]
struct Row {
    cases: usize,
    equal: usize,
    values: usize,
    equal_values: usize,
    /// In bf16 steps.
    largest: f64,
}

/// The largest difference, in bf16 steps. The smallest step belongs to a value `canceled` times smaller than the largest one.
fn steps(got: &[f32], want: &[f32], canceled: f32) -> f64 {
    let largest = want.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
    let step = |v: f32| f64::from(f32::from_bits(v.abs().max(largest / canceled).to_bits() & 0x7f80_0000)) / 128.0;
    let difference = |(&g, &w): (&f32, &f32)| if g.to_bits() == w.to_bits() { 0.0 } else { f64::from(g - w).abs() / step(w) };
    got.iter().zip(want).map(difference).fold(0.0, |most, d| if d.is_nan() { f64::INFINITY } else { most.max(d) })
}

/// Compares a file with the emulator's results. Returns a row for each kernel, and the cases that differ too much.
fn compare(recorded: &Recorded) -> (BTreeMap<&'static str, Row>, Vec<String>) {
    let capability = (recorded.number("major"), recorded.number("minor"));
    let mut runner =
        Runner::new(Gpu { capability, sms: recorded.number("sms"), shared: recorded.number("shared"), native: false });
    let tensors = recorded.tensors();
    let (mut rows, mut wrong): (BTreeMap<&str, Row>, _) = (BTreeMap::new(), Vec::new());
    for (seed, (choice, case)) in all_pairs(recorded.number("limit") as usize).into_iter().enumerate() {
        let before: Vec<(Kernel, u64)> = runner.cuda.launched().collect();
        let got = runner.run(choice, &case, seed as u64, false).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let want = results(&tensors, choice, &case);
        let shapes = |results: &[Vec<f32>]| results.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(shapes(&got), shapes(&want), "{} with {choice:?} was not recorded like this", case.name);
        // A case counts for the first kernel in the table that it launches.
        let launched = runner.cuda.launched().zip(before).find(|((_, now), (_, then))| now > then).map(|((kernel, _), _)| kernel);
        let row = rows.entry(launched.map_or("none", Kernel::symbol)).or_default();
        let canceled = if case.name.starts_with("attention") { CANCELED_ATTENTION } else { CANCELED };
        let off = got.iter().zip(&want).map(|(got, want)| steps(got, want, canceled)).fold(0.0, f64::max);
        let exact = EXACT.iter().any(|op| case.name.starts_with(op));
        let e4m3 = case.name.split_once(" into ").is_some_and(|(_, formats)| formats.contains("e4m3"));
        let allowed = match (exact, e4m3) {
            (true, _) => 0.0,
            (false, false) => STEPS,
            (false, true) => STEPS_E4M3,
        };
        if off > allowed {
            wrong.push(format!("{} with {choice:?}: {off:.2} steps", case.name));
        }
        let values = || got.iter().flatten().zip(want.iter().flatten());
        row.cases += 1;
        row.equal += usize::from(off == 0.0);
        row.values += values().count();
        row.equal_values += values().filter(|(got, want)| got.to_bits() == want.to_bits()).count();
        row.largest = row.largest.max(off);
    }
    (rows, wrong)
}

#[test]
#[ignore = "takes results that were recorded on a GPU"]
fn agreement_with_a_gpu() {
    let file = PathBuf::from(std::env::var_os("KILN_GPU_OUTPUTS").expect("KILN_GPU_OUTPUTS names a file of `gpu outputs`"));
    let recorded = Recorded::open(&file);
    let (rows, wrong) = compare(&recorded);
    println!("| kernel | cases | equal to the bit | values | equal to the bit | largest difference, bf16 steps |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (kernel, Row { cases, equal, values, equal_values, largest }) in rows {
        println!("| `{kernel}` | {cases} | {equal} | {values} | {equal_values} | {largest:.3} |");
    }
    assert!(wrong.is_empty(), "{} cases differ from {}:\n{}", wrong.len(), recorded.property("name"), wrong.join("\n"));
}

/// The emulator agrees with itself for other seeds than the recording's, and a single wrong value is noticed.
#[test]
fn results_are_recorded_and_compared() {
    needs_emulator!();
    let file = std::env::temp_dir().join(format!("kiln-outputs-{}.safetensors", std::process::id()));
    let count = record(&mut Runner::new(Gpu::HOPPER).cuda, 3, &file);
    let recorded = Recorded::open(&file);
    std::fs::remove_file(&file).unwrap();
    let (rows, wrong) = compare(&recorded);
    assert!(wrong.is_empty() && rows.values().all(|row| row.cases == row.equal && row.values == row.equal_values), "{wrong:?}");
    assert!(rows.len() > 10 && count >= rows.values().map(|row| row.cases).sum());
    assert_eq!(steps(&[1.0, 0.5], &[1.0, 0.5], CANCELED), 0.0);
    assert_eq!(steps(&[1.0, 0.5 + 1.0 / 256.0], &[1.0, 0.5], CANCELED), 1.0);
    assert_eq!(steps(&[1.0, 0.5 + 1.0 / 256.0], &[1.0, 0.5], CANCELED_ATTENTION), 0.5);
    assert_eq!(steps(&[1.0, f32::NAN], &[1.0, 0.5], CANCELED), f64::INFINITY);
}
