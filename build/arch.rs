//! Which architectures a kernel file is compiled for, and which GPUs run it.

use crate::{Result, watched};

/// The architectures that a kernel file is compiled for unless its name states one. The `f` targets run on the whole family (100
/// and 103, 120 and 121); for every other GPU from 8.0 on the driver compiles the PTX.
pub const PORTABLE: &[&str] = &["80", "89", "90", "100f", "120f"];
pub const PTX: &str = "80";

/// An architecture that kernel files can be named after: `gemm_bf16_sm90.cu` uses instructions that only sm_90a has, and
/// `gemm_fp8_sm89.cu` one that every GPU from 8.9 on has.
pub struct Arch {
    /// What follows `_sm` in the file's name.
    suffix: &'static str,
    /// What nvcc compiles it for.
    targets: &'static [&'static str],
    /// The PTX that is compiled as well, for later GPUs.
    pub ptx: Option<&'static str>,
    /// The first compute capability that runs it, and the last.
    pub capabilities: [(u32, u32); 2],
}

const SPECIFIC: &[Arch] = &[
    Arch { suffix: "89", targets: &["89", "90", "120f"], ptx: Some("89"), capabilities: [(8, 9), (u32::MAX, 0)] },
    Arch { suffix: "90", targets: &["90a"], ptx: None, capabilities: [(9, 0), (9, 0)] },
    Arch { suffix: "100", targets: &["100f"], ptx: None, capabilities: [(10, 0), (10, u32::MAX)] },
    Arch { suffix: "120", targets: &["120f"], ptx: None, capabilities: [(12, 0), (12, u32::MAX)] },
];

/// The architecture that a kernel file is named after, or `None` if the file is portable.
pub fn specific(name: &str) -> Result<Option<&'static Arch>> {
    let Some((_, suffix)) = name.rsplit_once("_sm").filter(|(_, suffix)| suffix.parse::<u32>().is_ok()) else { return Ok(None) };
    let arch = SPECIFIC.iter().find(|arch| arch.suffix == suffix);
    arch.map(Some).ok_or_else(|| format!("kernels/entry/{name}.cu: no kernels are made for sm_{suffix}"))
}

/// The architectures of a kernel file, and its PTX.
pub fn of_file(name: &str) -> Result<(&'static [&'static str], Option<&'static str>)> {
    Ok(specific(name)?.map_or((PORTABLE, Some(PTX)), |arch| (arch.targets, arch.ptx)))
}

/// The architectures that `KILN_CUDA_ARCHS` lists, by number; `None` stands for all.
pub fn chosen() -> Result<Option<Vec<u32>>> {
    let Some(list) = watched("KILN_CUDA_ARCHS") else { return Ok(None) };
    let known: Vec<_> = PORTABLE.iter().map(|arch| number(arch)).collect();
    let parse = |item: &str| item.trim().parse().ok().filter(|n| known.contains(n));
    let chosen: Option<Vec<u32>> = list.split(',').map(parse).collect();
    chosen.map(Some).ok_or_else(|| format!("KILN_CUDA_ARCHS=`{list}` is not a comma-separated list of some of {known:?}"))
}

/// The number of an architecture: 90 of `90a`.
fn number(arch: &str) -> u32 {
    arch.trim_end_matches(char::is_alphabetic).parse().expect("architectures start with a number")
}

/// Those of the architectures that are chosen.
pub fn pick(archs: &[&'static str], chosen: Option<&[u32]>) -> Vec<&'static str> {
    archs.iter().copied().filter(|arch| chosen.is_none_or(|c| c.contains(&number(arch)))).collect()
}
