//! The checks of `kiln selftest` on emulated GPUs, with faults that single checks find and name, and the gate that depends on them.

use crate::driver::{Emulated, Gpu, Sabotage};
use crate::runner::cuda_with;
use common::random::long;
use kiln::error::Error;
use kiln::internals::backend::cuda::driver::{MapSpec, Swizzle};
use kiln::internals::backend::cuda::{Cuda, Kernel};
use kiln::selftest::{self, Extent, Gate, Key, Line, Outcome, Records, Shape, Size, Verdict, gate};
use kiln_emulator::planted::{self, Expect};
use kiln_program::cli::selftest::{SelftestArgs, test as selftest_on};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Sizes that an emulator computes in a second.
const SMALL: Extent<'_> =
    Extent { shapes: &[Shape { rows: 40, cols: 128, k: 256 }], attention: Size { tokens: 40, heads: 2 }, burst: false };
/// Only checks that do not depend on sizes: instructions and copies.
const NONE: Extent<'_> = Extent { shapes: &[], attention: Size { tokens: 1, heads: 1 }, burst: false };

fn run(cuda: &mut Cuda, extent: &Extent<'_>) -> Vec<Line> {
    selftest::run(cuda, extent, &mut |_| Ok(())).unwrap()
}

/// A backend on a GPU with all of its kernels.
fn open(gpu: Gpu, bug: Option<&'static str>) -> Cuda {
    let mut cuda = cuda_with(&Emulated::new(gpu), bug).unwrap();
    cuda.enable_gated(true);
    cuda
}

fn failed(lines: &[Line]) -> Vec<String> {
    lines.iter().filter(|line| line.failed()).map(|line| format!("{}: {}", line.name, line.outcome)).collect()
}

/// The name of a check, without the size.
fn kind(line: &Line) -> &str {
    let end = if line.name.starts_with("GEMM ") { line.name.rfind(' ') } else { line.name.find(", 40 tokens") };
    &line.name[..end.unwrap_or(line.name.len())]
}

/// Every GPU has the checks of its architecture, and all of them pass.
#[test]
fn every_check_passes() {
    needs_emulator!();
    let tma = ["tensor map, 128-byte swizzle", "tensor map, 64-byte swizzle", "bulk copy", "overlap"];
    let block_scaled = ["mma e4m3, block-scaled", "mma nvf4", "sums e4m3, block-scaled", "sums nvf4", "GEMM W4A4"];
    let fp8 = ["mma e4m3", "sums e4m3", "sums W8A8 GEMM", "GEMM W8A8", "attention e4m3 q and k"];
    let mut launched = BTreeSet::new();
    // The checks that each GPU lacks, and how many places its sums keep.
    for (gpu, absent, places) in [
        (Gpu::AMPERE, [&tma[..], &["cluster"], &fp8, &block_scaled].concat(), vec![("sums bf16", 24)]),
        (Gpu::ADA, [&tma[..], &["cluster"], &block_scaled].concat(), vec![("sums e4m3", 13), ("sums W8A8 GEMM", 13)]),
        (Gpu::HOPPER, block_scaled.to_vec(), vec![("sums bf16", 25), ("sums e4m3", 25), ("sums W8A8 GEMM", 13)]),
        (Gpu::BLACKWELL, vec!["cluster"], vec![("sums e4m3", 25), ("sums e4m3, block-scaled", 25), ("sums nvf4", 35)]),
    ] {
        // At the gate's sizes, in a long run.
        let extent = if long() { Extent { attention: SMALL.attention, ..Extent::QUICK } } else { SMALL };
        let mut cuda = open(gpu, None);
        let lines = run(&mut cuda, &extent);
        launched.extend(cuda.launched().filter(|(_, times)| *times > 0).map(|(kernel, _)| kernel.symbol()));
        let name = format!("{:?}", gpu.capability);
        lines.iter().for_each(|line| println!("{name} {:<48} {}", line.name, line.outcome));
        assert!(failed(&lines).is_empty(), "{name}: {:?}", failed(&lines));
        let mut found: Vec<&str> = lines.iter().filter(|line| line.outcome == Outcome::NotHere).map(kind).collect();
        found.dedup();
        assert!(found.iter().all(|kind| absent.contains(kind)), "{name}: {found:?}");
        assert_eq!(found.len(), absent.len(), "{name}: {found:?}");
        for (sums, places) in places {
            let line = lines.iter().find(|line| line.name == sums).unwrap();
            assert_eq!(line.outcome, Outcome::Passed(format!("{places} places")), "{name}, {sums}");
        }
    }
    let own = Kernel::ALL.iter().filter(|kernel| kernel.file().starts_with("selftest"));
    let missed: Vec<_> = own.filter(|kernel| !launched.contains(kernel.symbol())).collect();
    assert!(missed.is_empty(), "never launched: {missed:?}");
}

/// A fault makes one check fail. The check names the lane and the register.
#[test]
fn a_fault_is_found_by_its_check_alone() {
    needs_emulator!();
    let gpus = [Gpu::ADA, Gpu::HOPPER, Gpu::BLACKWELL];
    for bug in planted::BUGS {
        let Expect::Check(capability, check, detail) = bug.expect else { continue };
        let gpu = gpus.into_iter().find(|gpu| gpu.capability == capability).unwrap();
        let faults = failed(&run(&mut open(gpu, Some(bug.name)), &NONE));
        assert_eq!(faults.len(), 1, "{}: {faults:?}", bug.name);
        assert!(faults[0].starts_with(&format!("{check}: FAILED ({detail}")), "{}: {faults:?}", bug.name);
    }
    // Tensor maps without the swizzle that the kernel expects: of 64 bytes, and of 128 bytes, which chains of copies also use.
    let narrow = |map: &mut MapSpec| without_swizzle(map, 32);
    let wide = |map: &mut MapSpec| without_swizzle(map, 64);
    for (change, names, place) in [
        (Sabotage::Map(narrow), &["tensor map, 64-byte swizzle"][..], "[2, 0]"),
        (Sabotage::Map(wide), &["tensor map, 128-byte swizzle", "cluster", "overlap", "graph"], "[1, 0]"),
    ] {
        let driver = Emulated::new(Gpu::HOPPER);
        let mut cuda = cuda_with(&driver, None).unwrap();
        driver.set_sabotage(Some(change));
        let faults = failed(&run(&mut cuda, &NONE));
        assert_eq!(faults.len(), names.len(), "{faults:?}");
        assert!(faults.iter().zip(names).all(|(fault, name)| fault.starts_with(&format!("{name}: FAILED ("))), "{faults:?}");
        assert!(faults[0].contains(&format!("({place} of [200, 328] is ")), "{faults:?}");
    }
}

/// Removes the swizzle from boxes of 64 rows by `cols` columns.
fn without_swizzle(map: &mut MapSpec, cols: u32) {
    if map.tile == [cols, 64, 1] {
        map.swizzle = Swizzle::None;
    }
}

/// A folder for records. It is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("kiln-gate-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn native_kernels_pass_the_gate_once() {
    needs_emulator!();
    let folder = Folder::new("once");
    let records = Records::below(Some(&folder.0));
    let open = |gpu, bug| cuda_with(&Emulated::new(gpu), bug).unwrap();
    let native = |cuda: &Cuda| cuda.launched().any(|(kernel, _)| kernel.is_gated());
    // A GPU that needs no self-test leaves no trace.
    assert_eq!(gate(&mut open(Gpu::HOPPER, None), &NONE, &records).unwrap(), Gate::Open);
    assert!(std::fs::read_dir(&folder.0).unwrap().next().is_none());

    let mut cuda = open(Gpu::BLACKWELL, None);
    assert!(!native(&cuda), "off until they are proven");
    assert!(matches!(gate(&mut cuda, &NONE, &records).unwrap(), Gate::Ran(Verdict::Passed, _)));
    assert!(native(&cuda));
    let mut again = open(Gpu::BLACKWELL, None);
    assert_eq!(gate(&mut again, &NONE, &records).unwrap(), Gate::Recorded(Verdict::Passed));
    assert!(native(&again) && again.launched().all(|(_, times)| times == 0), "nothing is run again");
    // A damaged record does not count, nor does a record of other kernels. The module with a bug is a different module image.
    std::fs::write(records.path(&Key::of(&cuda)).unwrap(), "{").unwrap();
    let mut wrong = open(Gpu::BLACKWELL, Some("scales_of_other_lanes"));
    assert_ne!(Key::of(&wrong), Key::of(&cuda));
    let Gate::Ran(Verdict::Failed(what), _) = gate(&mut wrong, &NONE, &records).unwrap() else { panic!("it passed") };
    assert!(what.starts_with("mma nvf4: a[0][0] (lane 0, register 0"), "{what}");
    assert!(!native(&wrong));
    let mut wrong = open(Gpu::BLACKWELL, Some("scales_of_other_lanes"));
    assert_eq!(gate(&mut wrong, &NONE, &records).unwrap(), Gate::Recorded(Verdict::Failed(what)));
    assert!(!native(&wrong));
    // A self-test that did not end keeps the kernels off, too.
    records.save(&Key::of(&cuda), Verdict::Begun).unwrap();
    let mut begun = open(Gpu::BLACKWELL, None);
    assert_eq!(gate(&mut begun, &NONE, &records).unwrap(), Gate::Recorded(Verdict::Begun));
    assert!(!native(&begun));
    // If nothing can be stored, the self-test runs and its result is not remembered.
    let nowhere = Records::below(Some(&folder.0.join("kiln").join("none").join("\0")));
    assert!(matches!(gate(&mut begun, &NONE, &nowhere).unwrap(), Gate::Ran(Verdict::Passed, _)));
    assert!(native(&begun) && nowhere.find(&Key::of(&begun)).is_none());
}

/// Checks what `kiln selftest` prints, and the error it ends with.
#[test]
fn the_command_prints_a_line_for_each_check() {
    needs_emulator!();
    let folder = Folder::new("command");
    let records = Records::below(Some(&folder.0));
    let test = |bug, json| {
        let (cuda, mut out) = (cuda_with(&Emulated::new(Gpu::BLACKWELL), bug).unwrap(), Vec::new());
        let args = SelftestArgs { device: None, quick: true, json };
        let key = Key::of(&cuda);
        let done = selftest_on(cuda, &args, &NONE, &records, Some("580.1".into()), &mut out);
        (String::from_utf8(out).unwrap(), done, records.find(&key))
    };
    let (text, done, verdict) = test(None, false);
    done.unwrap();
    assert_eq!(verdict, Some(Verdict::Passed));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("--- from here on: kiln selftest --quick, kiln "), "{text}");
    assert_eq!(lines[1], "card         emulated compute 12.0");
    assert!(text.contains("\ndriver       580.1, CUDA 13.0\n") && text.contains(" selftest_sm120"), "{text}");
    assert!(lines.iter().any(|line| line.starts_with("copy ") && line.ends_with(" ok")), "{text}");
    assert!(lines.iter().any(|line| line.starts_with("cluster ") && line.ends_with(" not on this GPU")), "{text}");
    assert!(lines[lines.len() - 2].contains(" ok, 0 failed, ") && lines[lines.len() - 1] == "--- up to here ---", "{text}");

    let (text, done, verdict) = test(Some("scales_of_other_lanes"), false);
    let error = done.unwrap_err();
    assert!(matches!(error, Error::SelfTest { failed: 1, .. }) && error.exit_code() == 1, "{error}");
    assert!(matches!(verdict, Some(Verdict::Failed(what)) if what.starts_with("mma nvf4: ")));
    assert!(text.lines().any(|line| line.starts_with("mma nvf4 ") && line.contains(" FAILED (a[0][0] (lane 0")), "{text}");

    let (text, done, _) = test(Some("scales_of_other_lanes"), true);
    assert!(done.is_err());
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["passed"], &json["capability"], &json["quick"]), (&false.into(), &"12.0".into(), &true.into()));
    let checks = json["checks"].as_array().unwrap();
    let named = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap();
    assert_eq!(named("mma nvf4")["outcome"], "failed");
    assert_eq!((&named("copy")["outcome"], &named("cluster")["outcome"]), (&"ok".into(), &"not on this GPU".into()));
}
