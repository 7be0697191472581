//! The compiled kernels: what each takes of a multiprocessor is held to `kernels/resources.txt`, and each file has its image.

#![allow(clippy::print_stdout)] // why a test was skipped, shown with --nocapture

use std::collections::BTreeMap;
use std::path::Path;

#[path = "../build/ptxas.rs"]
mod ptxas;

#[allow(missing_docs, dead_code)]
mod built {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

const HEADINGS: [&str; 4] = ["registers", "bytes of stack", "bytes of spills", "bytes of shared memory"];

/// A table of resources: which compiler made it, and a row for each file, kernel and architecture.
#[derive(Clone)]
struct Table {
    nvcc: String,
    archs: String,
    rows: BTreeMap<String, [u32; 4]>,
}

impl Table {
    fn parse(text: &str) -> Self {
        let first = text.lines().next().and_then(|line| line.strip_prefix("# nvcc ")?.split_once(" for "));
        let (nvcc, archs) = first.expect("the first line names the compiler and the architectures");
        let row = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            let (name, numbers) = words.split_at_checked(3).unwrap_or_else(|| panic!("`{line}` is no row"));
            let numbers: Vec<u32> = numbers.iter().map(|n| n.parse().unwrap_or_else(|_| panic!("`{line}`: `{n}`"))).collect();
            (name.join(" "), numbers.try_into().unwrap_or_else(|_| panic!("`{line}` has not four numbers")))
        };
        let rows = text.lines().filter(|line| !line.starts_with('#')).map(row).collect();
        Self { nvcc: nvcc.into(), archs: archs.into(), rows }
    }
}

/// Where a build exceeds what is allowed.
fn faults(built: &Table, allowed: &Table) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, numbers) in &built.rows {
        let Some(limits) = allowed.rows.get(name) else {
            faults.push(format!("{name}: not in the table"));
            continue;
        };
        for ((number, limit), what) in numbers.iter().zip(limits).zip(HEADINGS) {
            if number > limit {
                faults.push(format!("{name}: {number} {what}, the table allows {limit}"));
            }
        }
    }
    // A build for fewer architectures says nothing about the others.
    if built.archs == allowed.archs {
        let gone = allowed.rows.keys().filter(|name| !built.rows.contains_key(*name));
        faults.extend(gone.map(|name| format!("{name}: in the table, but there is no such kernel")));
    }
    faults
}

#[test]
fn kernels_take_no_more_than_the_table_allows() {
    let Some(built_path) = Some(env!("KILN_KERNEL_RESOURCES")).filter(|path| !path.is_empty()) else {
        println!("skipped: built without kernels");
        return;
    };
    let table_path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/resources.txt");
    let built_text = std::fs::read_to_string(built_path).unwrap();
    let built = Table::parse(&built_text);
    let allowed = Table::parse(&std::fs::read_to_string(&table_path).unwrap());
    if std::env::var_os("KILN_UPDATE_RESOURCES").is_some() {
        // Only a build for all architectures has PTX.
        assert!(built.archs.contains("compute_"), "this build is for {} alone: unset KILN_CUDA_ARCHS", built.archs);
        std::fs::write(&table_path, built_text).unwrap();
        return;
    }
    if built.nvcc != allowed.nvcc {
        println!("skipped: built by nvcc {}, the table is for {}", built.nvcc, allowed.nvcc);
        return;
    }
    let faults = faults(&built, &allowed);
    assert!(
        faults.is_empty(),
        "{}\n\nif this is meant: KILN_UPDATE_RESOURCES=1 cargo test --test kernels, and say why in the change",
        faults.join("\n")
    );
}

#[test]
fn the_table_is_for_the_pinned_compiler() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let table = Table::parse(&std::fs::read_to_string(folder.join("resources.txt")).unwrap());
    let pinned = std::fs::read_to_string(folder.join("toolchain.txt")).unwrap();
    let line = format!("nvidia-cuda-nvcc=={}", table.nvcc);
    assert!(pinned.lines().any(|pin| pin == line), "kernels/toolchain.txt has no line `{line}`");
}

#[test]
fn every_excess_is_a_fault() {
    let rows = "norm kl_norm sm_80 40 0 0 512\nnorm kl_norm sm_90 38 16 8 512\n";
    let allowed = Table::parse(&format!("# nvcc 13.0.88 for sm_80 sm_90\n{}\n{rows}", ptxas::HEADING));
    let with = |name: &str, numbers: [u32; 4]| {
        let mut built = allowed.clone();
        built.rows.insert(name.into(), numbers);
        faults(&built, &allowed)
    };
    let none: [&str; 0] = [];
    assert_eq!(faults(&allowed, &allowed), none);
    assert_eq!(with("norm kl_norm sm_90", [36, 0, 0, 0]), none, "less is fine");
    assert_eq!(with("norm kl_norm sm_90", [39, 16, 8, 512]), ["norm kl_norm sm_90: 39 registers, the table allows 38"]);
    assert_eq!(
        with("norm kl_norm sm_80", [40, 8, 16, 512]),
        [
            "norm kl_norm sm_80: 8 bytes of stack, the table allows 0",
            "norm kl_norm sm_80: 16 bytes of spills, the table allows 0"
        ]
    );
    assert_eq!(with("norm kl_other sm_80", [8, 0, 0, 0]), ["norm kl_other sm_80: not in the table"]);

    let mut built = allowed.clone();
    built.rows.remove("norm kl_norm sm_80");
    assert_eq!(faults(&built, &allowed), ["norm kl_norm sm_80: in the table, but there is no such kernel"]);
    built.archs = "sm_90".into();
    assert_eq!(faults(&built, &allowed), none, "a build for sm_90 alone");
}

#[test]
fn what_ptxas_says_is_read() {
    let report = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kl_two' for 'sm_100f'
ptxas info    : Function properties for kl_two
    488 bytes stack frame, 572 bytes spill stores, 560 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 488 bytes cumulative stack size, 424 bytes cmem[0]
ptxas info    : Compile time = 24.626 ms
ptxas info    : Function properties for not_inlined
    16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'kl_one' for 'sm_80'
ptxas info    : Function properties for kl_one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 256 bytes smem, 424 bytes cmem[0]
";
    let rows: Vec<_> = ptxas::usages(report).unwrap().iter().map(|usage| usage.row("file")).collect();
    let numbers = |row: &str| row.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(numbers(&rows[0]), "file kl_one sm_80 14 0 0 256");
    assert_eq!(numbers(&rows[1]), "file kl_two sm_100f 32 504 1140 0");
    assert!(report.lines().all(ptxas::is_information), "nothing in it is an error");
    assert!(ptxas::usages("Compiling entry function 'kl_one' for 'sm_80'").is_err(), "a report that ends early");
}

#[test]
fn images_are_fat_binaries() {
    for (name, image) in built::IMAGES {
        assert_eq!(image.get(..4), Some(&0xba55_ed50_u32.to_le_bytes()[..]), "{name}");
    }
    assert_eq!(built::NVCC.is_empty(), built::ARCHS.is_empty());
    assert_eq!(built::NVCC.is_empty(), env!("KILN_KERNEL_RESOURCES").is_empty());
}
