//! Checks of the compiled kernels: the resources of each kernel against `kernels/resources.txt`, one image per file, and the instructions
//! that each architecture's kernels were written for. Also checks `kernels/kernels.def`, the table of kernel instantiations.

#![allow(clippy::print_stdout)] // says why a test was skipped, with --nocapture

use arch::Arch;
use kiln::internals::backend::cuda::Kernel;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../../build/ptxas.rs"]
mod ptxas;
#[path = "../../build/kernels.rs"]
mod table;

mod arch {
    pub use kiln::device::Arch;
}

#[allow(missing_docs, dead_code)]
mod built {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

const HEADINGS: [&str; 4] = ["registers", "bytes of stack", "bytes of spills", "bytes of shared memory"];

/// A table of resources: the compiler, and numbers for each file, kernel and architecture.
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
        let mut rows = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (kernel, cells) = line.split_once(": ").unwrap_or_else(|| panic!("`{line}` is no row"));
            for cell in cells.split(", ") {
                let (arch, numbers) = cell.split_once(' ').unwrap_or_else(|| panic!("`{line}`: `{cell}`"));
                let mut found = [0; 4];
                for (to, number) in found.iter_mut().zip(numbers.split('/')) {
                    *to = number.parse().unwrap_or_else(|_| panic!("`{line}`: `{number}`"));
                }
                rows.insert(format!("{kernel} {arch}"), found);
            }
        }
        Self { nvcc: nvcc.into(), archs: archs.into(), rows }
    }

    /// The kernels of a file that is compiled for one architecture: each name with its numbers.
    fn of_file(&self, file: &str) -> Vec<(&str, [u32; 4])> {
        let rows = self.rows.iter().filter_map(|(name, numbers)| Some((name.strip_prefix(file)?.strip_prefix(' ')?, *numbers)));
        rows.filter_map(|(rest, numbers)| Some((rest.split(' ').next()?, numbers))).collect()
    }

    /// The persistent kernels with a stack or spills. These would stall the tensor cores, so no table may allow them.
    fn persistent_spills(&self) -> Vec<String> {
        let kernels = persistent_files().flat_map(|file| self.of_file(file));
        kernels
            .filter(|(_, [_, stack, spills, _])| stack + spills > 0)
            .map(|(kernel, [_, stack, spills, _])| format!("{kernel}: {stack} bytes of stack, {spills} of spills, may have none"))
            .collect()
    }
}

/// The files whose kernels use `wgmma`.
fn sm90_files() -> BTreeSet<&'static str> {
    let files = Kernel::ALL.iter().filter(|kernel| kernel.arch() == Arch::Sm90).map(|kernel| kernel.file());
    files.filter(|file| !file.starts_with("selftest")).collect()
}

/// The GEMMs of compute capability 12.x, and their MMA.
const SM120_GEMMS: [(&str, &str); 3] = [
    ("gemm_nvfp4_sm120", "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"),
    ("gemm_fp8_sm120", "QMMA.SF.16832.F32.E4M3.E4M3.E8"),
    ("gemm_bf16_sm120", "HMMA.16816.F32.BF16"),
];

fn persistent_files() -> impl Iterator<Item = &'static str> {
    sm90_files().into_iter().chain(SM120_GEMMS.into_iter().map(|(file, _)| file))
}

/// Lists where a build exceeds the table.
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
    faults.extend(built.persistent_spills());
    // A build for fewer architectures lacks rows for the others.
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
        "{}\n\nif this is meant: KILN_UPDATE_RESOURCES=1 cargo test --test static kernels, and say why in the change",
        faults.join("\n")
    );
}

#[test]
fn persistent_kernels_do_not_spill() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/resources.txt");
    let mut table = Table::parse(&std::fs::read_to_string(path).unwrap());
    assert!(persistent_files().all(|file| !table.of_file(file).is_empty()), "the table has none of these kernels");
    assert!(table.persistent_spills().is_empty(), "{:?}", table.persistent_spills());

    table.rows.insert("gemm_bf16_sm90 kl_gemm_bf16_sm90_1x1 sm_90a".into(), [168, 8, 16, 0]);
    let spills = "kl_gemm_bf16_sm90_1x1: 8 bytes of stack, 16 of spills, may have none";
    assert_eq!(faults(&table, &table), [spills], "though the table allows it");
}

/// The instructions of each kernel in a listing of cuobjdump, with their addresses: `HGMMA.64x128x16.F32.BF16 R24, ...` of
/// `/*1ad0*/ @P0 HGMMA.64x128x16.F32.BF16 R24, ... ;`.
fn addressed_instructions(listing: &str) -> BTreeMap<&str, Vec<(u64, &str)>> {
    fn instruction(line: &str) -> Option<(u64, &str)> {
        let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
        let (address, text) = (u64::from_str_radix(address, 16).ok()?, rest.split_once(';')?.0.trim());
        Some((address, if text.starts_with('@') { text.split_once(' ')?.1.trim_start() } else { text }))
    }
    let kernels = listing.split("Function : ").skip(1).map(|part| part.split_once('\n').unwrap_or((part, "")));
    kernels.map(|(kernel, code)| (kernel.trim(), code.lines().filter_map(instruction).collect())).collect()
}

/// The instructions of each kernel in a listing, without addresses.
fn instructions(listing: &str) -> BTreeMap<&str, Vec<&str>> {
    let kernels = addressed_instructions(listing).into_iter();
    kernels.map(|(kernel, codes)| (kernel, codes.into_iter().map(|(_, code)| code).collect())).collect()
}

/// The shortest loop around an instruction that begins with `mma`, from a backward branch's target to the branch. If there are several, the
/// loop with the most MMAs: LoRA branches are added by a loop of their own.
fn loop_around<'a>(codes: &[(u64, &'a str)], mma: &str) -> Vec<&'a str> {
    let loops = codes.iter().filter_map(|&(from, code)| {
        let to = code.strip_prefix("BRA")?.rsplit_once("0x").and_then(|(_, to)| u64::from_str_radix(to.trim_end(), 16).ok())?;
        (to <= from).then_some(to..=from)
    });
    let loops: Vec<_> = loops.collect();
    let mmas: Vec<u64> = codes.iter().filter(|(_, code)| code.starts_with(mma)).map(|(address, _)| *address).collect();
    let around = |at: &u64| loops.iter().filter(|range| range.contains(at)).min_by_key(|range| range.end() - range.start());
    let most = mmas.iter().filter_map(around).max_by_key(|range| mmas.iter().filter(|at| range.contains(at)).count());
    let most = most.unwrap_or_else(|| panic!("{mma} is in no loop"));
    codes.iter().filter(|(address, _)| most.contains(address)).map(|(_, code)| *code).collect()
}

/// The opcodes of each kernel, such as `HGMMA`.
fn opcodes(listing: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let opcode = |code: &'_ str| -> usize { code.find(['.', ' ']).unwrap_or(code.len()) };
    instructions(listing)
        .into_iter()
        .map(|(kernel, codes)| (kernel, codes.into_iter().map(|code| &code[..opcode(code)]).collect()))
        .collect()
}

/// Counts the exponentials between the wait for Q K^T and the wait for the previous block's P V, in the loop over KV blocks. The compiler
/// may move the second wait to the front, which is correct but slow.
fn exp2_during_mma(codes: &[&str]) -> usize {
    // The loop's P V comes before the last KV block's. Only V is transposed.
    let values = |code: &str| code.starts_with("HGMMA") && code.contains(".tnspB");
    let first = codes.iter().position(|code| values(code));
    let after = &codes[first.unwrap_or(codes.len())..];
    let mut waits = after.split(|code| code.starts_with("WARPGROUP.DEPBAR"));
    waits.nth(1).map_or(0, |between| between.iter().filter(|code| code.starts_with("MUFU.EX2")).count())
}

/// Whether kernels were built for an architecture and can be disassembled. cuobjdump calls nvdisasm.
fn can_list(arch: &str) -> bool {
    if !built::ARCHS.contains(&arch) {
        println!("skipped: built without kernels for {arch}");
        return false;
    }
    let tools = Path::new(env!("KILN_KERNEL_TOOLS"));
    let missing = ["cuobjdump", "nvdisasm"].into_iter().find(|tool| !tools.join(tool).is_file());
    if let Some(missing) = missing {
        let required = std::env::var("KILN_REQUIRE_CUDA").is_ok_and(|value| !["", "0"].contains(&value.as_str()));
        assert!(!required, "KILN_REQUIRE_CUDA=1, but there is no {missing} with nvcc; tools/get_nvcc installs one");
        println!("skipped: no {missing} with nvcc");
    }
    missing.is_none()
}

/// The machine code of a file's kernels for an architecture.
fn listing(file: &str, arch: &str) -> String {
    let image = Path::new(env!("OUT_DIR")).join(format!("{file}.fatbin"));
    let cuobjdump = Path::new(env!("KILN_KERNEL_TOOLS")).join("cuobjdump");
    let output = Command::new(cuobjdump).args(["-sass", "-arch", arch]).arg(image).output().unwrap();
    assert!(output.status.success(), "cuobjdump: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn sm90_kernels_use_wgmma() {
    if !can_list("sm_90") {
        return;
    }
    let built = Table::parse(&std::fs::read_to_string(env!("KILN_KERNEL_RESOURCES")).unwrap());

    for file in sm90_files() {
        let listing = listing(file, "sm_90a");
        let kernels = opcodes(&listing);
        assert!(kernels.keys().copied().eq(built.of_file(file).iter().map(|(kernel, _)| *kernel)), "{:?}", kernels.keys());
        for (kernel, opcodes) in &kernels {
            let mma = if file.contains("_fp8_") { "QGMMA" } else { "HGMMA" };
            assert!(opcodes.contains(mma), "{kernel} has no wgmma on its type");
            assert!(!opcodes.contains("LDL") && !opcodes.contains("STL"), "{kernel} uses local memory");
        }
        if ["attention_bf16_sm90", "attention_fp8_sm90"].contains(&file) {
            // A warpgroup has 64 queries by 128 keys, which is 64 logits for each thread.
            for (kernel, codes) in instructions(&listing) {
                let count = exp2_during_mma(&codes);
                assert!(count >= 64, "{kernel}: {count} exponentials are computed while an MMA is in flight");
                // Q K^T over a head of 128 is eight MMAs of bf16 or four of e4m3, P V over 128 keys eight of bf16. Each appears twice, in
                // the loop and for the first or the last KV block.
                let mmas = ["QGMMA", "HGMMA"].map(|mma| codes.iter().filter(|code| code.starts_with(mma)).count());
                assert_eq!(
                    mmas,
                    if file == "attention_fp8_sm90" { [8, 16] } else { [0, 32] },
                    "{kernel}: MMAs of e4m3 and of bf16"
                );
            }
        }
        if file == "attention_wide_bf16_sm90" {
            for (kernel, codes) in instructions(&listing) {
                // 64 queries by 64 keys are 32 logits for each thread.
                let count = exp2_during_mma(&codes);
                assert!(count >= 32, "{kernel}: {count} exponentials are computed while an MMA is in flight");
                // Q K^T over two stages is eight MMAs, P V over 128 keys also eight. Each appears twice, in the loop and for the first or
                // the last KV block.
                let mmas = codes.iter().filter(|code| code.starts_with("HGMMA")).count();
                assert_eq!(mmas, 32, "{kernel}");
            }
        }
    }

    // The listing of a kernel without wgmma shows none, so the check can fail.
    let portable = listing("gemm_bf16_sm80", "sm_90");
    let portable = &opcodes(&portable)["kl_gemm_bf16_sm80_256x128"];
    assert!(portable.contains("HMMA") && !portable.contains("HGMMA"), "{portable:?}");
    let spills = built.rows["gemm_bf16_sm80 kl_gemm_bf16_sm80_256x128 sm_90"][2] > 0;
    assert_eq!(portable.contains("LDL") && portable.contains("STL"), spills, "{portable:?}");
}

/// The main loop of a GEMM by mma.sync: a warp's work on one k-block, which is two steps along K.
#[test]
fn sm120_main_loops_multiply_all_the_time() {
    if !can_list("sm_120f") {
        return;
    }
    for (file, mma) in SM120_GEMMS {
        let listing = listing(file, "sm_120f");
        let kernels = addressed_instructions(&listing);
        assert_eq!(kernels.keys().copied().collect::<Vec<_>>(), ["128x128", "256x128"].map(|tile| format!("kl_{file}_{tile}")));
        for (kernel, codes) in &kernels {
            let count =
                |codes: &[&str], opcode: &str| codes.iter().filter(|code| code.split(['.', ' ']).next() == Some(opcode)).count();
            let all: Vec<&str> = codes.iter().map(|(_, code)| *code).collect();
            for opcode in ["LDL", "STL", "CALL"] {
                assert_eq!(count(&all, opcode), 0, "{kernel}: {opcode}");
            }
            // Operands come by TMA, and block scales by bulk copies.
            assert!(count(&all, "UTMALDG") > 0, "{kernel} has no TMA loads");
            let nvfp4 = file == "gemm_nvfp4_sm120";
            assert_eq!(count(&all, "UBLKCP") > 0, nvfp4, "{kernel}: bulk copies");
            // Sixteen fragments of eight columns for each of the warp's sixteen rows, four matrices per load. The scales of A are a word
            // for each step; the scales of B are a pair of words for each half of the columns.
            let tiles = if kernel.ends_with("_256x128") { 2 } else { 1 };
            let main_loop = loop_around(codes, mma);
            let mmas = main_loop.iter().filter(|code| code.starts_with(mma)).count();
            assert_eq!([mmas, count(&main_loop, "LDSM")], [2 * 16 * tiles, 2 * (8 + tiles)], "{kernel}: MMAs and loads");
            let pairs = main_loop.iter().filter(|code| code.starts_with("LDS.64 ")).count();
            let loads = [count(&main_loop, "LDS") - pairs, pairs];
            assert_eq!(loads, if nvfp4 { [2, 4] } else { [0, 0] }, "{kernel}: loads of scales");
        }
    }
}

#[test]
fn a_loop_is_found_in_a_listing() {
    let codes = [
        (0x00, "MOV R0, R1"),
        (0x10, "LDSM.16.M88.4 R4, [R2]"),
        (0x20, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3"),
        (0x30, "BRA 0x20"),
        (0x40, "OMMA.SF.16864 R4, R8, R12, R4, R16, R17, URZ"),
        (0x50, "OMMA.SF.16864 R4, R8, R12, R4, R16, R17, URZ"),
        (0x60, "BRA.U UP0, 0x10"),
        (0x70, "BRA 0x0"),
        (0x80, "BRA 0x80"),
    ];
    let found = loop_around(&codes, "OMMA");
    assert_eq!((found.len(), found[0], found[5]), (6, codes[1].1, codes[6].1));
    assert_eq!(loop_around(&codes, "LDSM"), found);
    assert_eq!(loop_around(&codes, "MOV").len(), 8);
    let two = [(0x00, "HMMA 1"), (0x10, "BRA 0x0"), (0x20, "HMMA 2"), (0x30, "HMMA 3"), (0x40, "BRA 0x20"), (0x50, "BRA 0x0")];
    assert_eq!(loop_around(&two, "HMMA"), ["HMMA 2", "HMMA 3", "BRA 0x20"]);
}

#[test]
fn sass_listings_are_parsed() {
    let listing = "\
\tcode for sm_90a
\t\tFunction : kl_one
\t.headerflags\t@\"EF_CUDA_SM90\"
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000fe20000000800 */
        /*0060*/              @!P1 STL.64 [R1], R2 ;                   /* 0x0000000201007387 */
                                                                       /* 0x000fea0003800000 */
\t\t..........

\t\tFunction : kl_two
        /*1ad0*/              @UP0 HGMMA.64x160x16.F32.BF16 R24, gdesc[UR12], R24, UP0 ; /* 0x026000000c1879f0 */
        /*1ae0*/                   EXIT ;                              /* 0x000000000000794d */
";
    let read = opcodes(listing);
    assert_eq!(read.keys().copied().collect::<Vec<_>>(), ["kl_one", "kl_two"]);
    assert_eq!(read["kl_one"], BTreeSet::from(["LDC", "STL"]));
    assert_eq!(read["kl_two"], BTreeSet::from(["EXIT", "HGMMA"]));
    assert_eq!(instructions(listing)["kl_two"], ["HGMMA.64x160x16.F32.BF16 R24, gdesc[UR12], R24, UP0", "EXIT"]);
}

#[test]
fn a_wait_that_comes_too_early_is_noticed() {
    let qk = "HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], R88";
    let pv = "HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR4].tnspB, R24";
    let (barrier, wait, exp2) = ("BAR.ARV R9, 0x100", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MUFU.EX2 R4, R4");
    let first = [qk, barrier, wait, exp2, exp2];
    let count = |rest: &[&str]| exp2_during_mma(&[&first, rest].concat());
    assert_eq!(count(&[qk, pv, barrier, wait, exp2, exp2, exp2, wait]), 3);
    assert_eq!(count(&[qk, pv, barrier, wait, wait, exp2, exp2, exp2]), 0);
    assert_eq!(count(&[]), 0);
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
fn every_excess_is_reported() {
    let rows = "norm kl_norm: sm_80 40/0/0/512, sm_90 38/16/8/512\n";
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
fn ptxas_reports_are_parsed() {
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
    let rows = ptxas::rows("file", &ptxas::usages(report).unwrap());
    assert_eq!(rows, ["file kl_one: sm_80 14/0/0/256", "file kl_two: sm_100f 32/504/1140/0"]);
    assert!(report.lines().all(ptxas::is_information), "nothing in it is an error");
    assert!(ptxas::usages("Compiling entry function 'kl_one' for 'sm_80'").is_err(), "a report that ends early");
    assert!(!report.lines().any(ptxas::is_loss), "nothing in it is a loss");
    let losses = "\
ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program dependence on \
compiler-inserted WG.AR in divergent path in the function 'kl_one'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : setmaxnreg ignored to maintain minimum register requirements.
";
    assert!(losses.lines().all(ptxas::is_loss));
}

#[test]
fn images_are_fat_binaries() {
    for (name, image) in built::IMAGES {
        assert_eq!(image.get(..4), Some(&0xba55_ed50_u32.to_le_bytes()[..]), "{name}");
    }
    assert_eq!(built::NVCC.is_empty(), built::ARCHS.is_empty());
    assert_eq!(built::NVCC.is_empty(), env!("KILN_KERNEL_RESOURCES").is_empty());
}

/// The kernels that the host launches are exactly the compiled ones.
#[test]
fn every_kernel_is_in_the_table_of_resources() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/resources.txt");
    let table = Table::parse(&std::fs::read_to_string(path).unwrap());
    let compiled: BTreeSet<_> =
        table.rows.keys().filter_map(|name| name.rsplit_once(' ')).map(|(kernel, _)| kernel.to_owned()).collect();
    let launched: BTreeSet<_> = Kernel::ALL.iter().map(|kernel| format!("{} {}", kernel.file(), kernel.symbol())).collect();
    assert_eq!(launched.len(), Kernel::ALL.len(), "a kernel is named twice");
    // The other test may not have written the table yet.
    if std::env::var_os("KILN_UPDATE_RESOURCES").is_none() {
        assert_eq!(launched, compiled);
    }
}

/// The committed table, with a row and its heading at the end.
fn with_row(heading: &str, row: &str) -> Result<table::Table, String> {
    let folder = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/entry")).unwrap();
    let stem = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
    let files: Vec<_> = folder.filter_map(|entry| stem(entry.unwrap().path())).collect();
    table::read("kernels.def", &format!("{TABLE}//   family, arch, {heading}\n{row}\n"), &files)
}

const TABLE: &str = include_str!("../../kernels/kernels.def");
/// The heading of rows of a Hopper GEMM, and a row.
const SM90: &str = "m, n, block k, consumer warpgroups, stages, cluster mode, promotion interval, relative cost";
const SM90_ROW: &str = "KL_KERNEL(gemm_bf16_sm90, sm90, 64, 16, 64, 1, 8, MulticastB, 0, 110)";
/// The heading of rows of a portable GEMM.
const SM80: &str = "m, n, block k, warps, stages, CTAs per SM, relative cost";

#[test]
fn a_row_is_all_that_a_new_tile_takes() {
    let table::Table { archs, kernels, tiles } = with_row("", "").unwrap();
    let before = kernels + &tiles;
    assert_eq!(["naive", "gemm_fp8_sm89"].map(|file| archs[file]), [Arch::Portable, Arch::Sm89]);
    let has = |heading: &str, row: &str, parts: &[&str]| {
        let table = with_row(heading, &format!("KL_KERNEL({row})")).unwrap();
        let after = table.kernels + &table.tiles;
        parts.iter().for_each(|part| assert!(!before.contains(part) && after.contains(part), "{row}: no {part}"));
    };
    has(
        SM90,
        "gemm_bf16_sm90, sm90, 64, 16, 64, 1, 8, MulticastB, 0, 110",
        &[
            "    GemmBf16Sm90_64x16,\n",
            "        Self::GemmBf16Sm90_64x16,\n",
            "Row { symbol: \"kl_gemm_bf16_sm90_64x16\", file: \"gemm_bf16_sm90\", params: size_of::<KlGemmTma>(), arch: Arch::Sm90, \
             threads: 128 * (1 + 1), shared: KL_SM90_SHARED_LIMIT, cluster: Some(KL_SM90_CLUSTER), tile: [64, 16] },",
            "Tile { arch: Arch::Sm90, block_m: 64, block_n: 16, block_k: 64, ctas_per_sm: 1, consumers: 1, \
             cluster: Some(ClusterMode::MulticastB), longest_sum: None, relative_cost: 110, operands: GemmOperands::Bf16, \
             kernel: Kernel::GemmBf16Sm90_64x16 },",
        ],
    );
    has(
        SM90,
        "gemm_fp8_sm90, sm90, 64, 16, 128, 1, 8, MulticastB, 1, 110",
        &["kl_gemm_fp8_sm90_64x16_promoted", "block_n: 16, block_k: 128", "Kernel::GemmFp8Sm90_64x16Promoted }"],
    );
    has(
        &SM90.replace("promotion interval", "mixed"),
        "gemm_bf16_sm90, sm90, 64, 16, 64, 1, 8, SplitK, 1, 110",
        &["kl_gemm_bf16_sm90_64x16", "operands: GemmOperands::MixedInput, kernel: Kernel::GemmMixedSm90_64x16 }"],
    );
    has(
        SM80,
        "gemm_bf16_sm80, sm80, 32, 128, 64, 4, 3, 5, 500",
        &[
            "kl_gemm_bf16_sm80_32x128",
            "threads: 32 * 4, shared: 3 * (32 + 128) * 64 * 2, cluster: None",
            "ctas_per_sm: 5, consumers: 0",
        ],
    );
    has("m, n, block k, warps, stages", "conv_bf16_sm80, sm80, 64, 128, 64, 4, 3", &["Kernel::ConvBf16Sm80_64x128, ]"]);
    has(
        "name, stages, CTAs per cluster",
        "attention_bf16_sm90, sm90, alone, 3, 4",
        &["AttentionBf16Sm90Alone", "cluster: Some(4)"],
    );
    has("m, n, warps, CTAs per SM", "attention_wide_bf16_sm80, sm80, 16, 512, 2, 3", &["tile: [16, 512]"]);
    let norms = ["kl_layer_norm_16384", "LayerNormE4m3_16384", "LayerNormE2m1_16384", "kl_rms_norm_16384", "tile: [0, 16384]"];
    has("columns, vectors per thread", "norm_rows, sm80, 16384, 4", &norms);
}

#[test]
fn faults_of_the_table_are_named() {
    let fault = |heading: &str, row: &str| {
        let line = TABLE.lines().count() + 2;
        with_row(heading, row).err().unwrap().strip_prefix(&format!("kernels.def:{line}: ")).unwrap().to_owned()
    };
    let sm90 = |changed: &str, to: &str| {
        assert!(SM90_ROW.contains(changed));
        fault(SM90, &SM90_ROW.replace(changed, to))
    };
    let other = TABLE.lines().position(|line| line.contains("(gemm_bf16_sm90, sm90, 128, 192,")).unwrap() + 1;
    let no_row = "expected a row `KL_KERNEL(family, arch, ...)`, a comment or a directive";
    for (changed, to, what) in [
        (", 110", "", &format!("9 columns, expected 10: family, arch, {SM90}")[..]),
        ("MulticastB", "Both", "cluster mode is `Both`, expected one of MulticastA, MulticastB, SplitK"),
        ("64, 16", "128, 192", &format!("`kl_gemm_bf16_sm90_128x192` is already in line {other}")),
        ("gemm_bf16_sm90", "gemm_f16_sm90", "there is no kernels/entry/gemm_f16_sm90.cu"),
        (", sm90", ", sm91", "no kernels are made for `sm91`"),
        (", sm90", ", sm80", "another row says that gemm_bf16_sm90.cu is for another architecture"),
        (" 8,", " 0,", "stages is `0`, expected a positive number"),
        (" 8,", " 2 * 4,", "stages is `2 * 4`, expected a positive number"),
        ("MulticastB", "", "cluster mode is ``, expected an identifier"),
        ("64, 1,", "64, 3,", "64 rows cannot be divided among 3 consumer warpgroups, expected a multiple of 192"),
        (")", "", no_row),
        ("KL_KERNEL", "KL_TILE", no_row),
    ] {
        assert_eq!(sm90(changed, to), what);
    }
    let lacking = fault("m, n, block k, stages, relative cost", "KL_KERNEL(gemm_bf16_sm90, sm90, 64, 16, 64, 8, 100)");
    assert_eq!(lacking, "rows of gemm_bf16_sm90 need a column `consumer warpgroups`");
    let narrow = fault("columns, vectors per thread", "KL_KERNEL(norm_rows, sm80, 8000, 2)");
    assert_eq!(narrow, "8000 columns after 8192, expected more");
    assert_eq!(
        table::read("kernels.def", "", &["naive".into()]).err().unwrap(),
        "kernels.def: there is no row of kernels/entry/naive.cu"
    );
}
