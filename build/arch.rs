//! Which architectures a kernel file is compiled for, and which GPUs run it.

use crate::{Result, watched};

/// The architectures that a kernel file is compiled for unless its name states one. The `f` targets run on the whole family (100
/// and 103, 120 and 121); for every other GPU from 8.0 on the driver compiles the PTX.
pub const PORTABLE: &[&str] = &["80", "89", "90", "100f", "120f"];
pub const PTX: &str = "80";

/// An architecture that kernel files can be named after: `gemm_bf16_sm90.cu` uses instructions that only sm_90a has.
pub struct Arch {
    /// What follows `_sm` in the file's name.
    suffix: &'static str,
    /// What nvcc compiles it for.
    target: [&'static str; 1],
    /// The compute capability that runs it, where `None` stands for every minor version.
    pub capability: (u32, Option<u32>),
}

const SPECIFIC: &[Arch] = &[
    Arch { suffix: "90", target: ["90a"], capability: (9, Some(0)) },
    Arch { suffix: "100", target: ["100f"], capability: (10, None) },
    Arch { suffix: "120", target: ["120f"], capability: (12, None) },
];

/// The one architecture of a kernel file, or `None` if the file is portable.
pub fn specific(name: &str) -> Result<Option<&'static Arch>> {
    let Some((_, suffix)) = name.rsplit_once("_sm").filter(|(_, suffix)| suffix.parse::<u32>().is_ok()) else { return Ok(None) };
    let arch = SPECIFIC.iter().find(|arch| arch.suffix == suffix);
    arch.map(Some).ok_or_else(|| format!("kernels/{name}.cu: no kernels are made for sm_{suffix}"))
}

/// The architectures of a kernel file.
pub fn of_file(name: &str) -> Result<&'static [&'static str]> {
    Ok(specific(name)?.map_or(PORTABLE, |arch| &arch.target))
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
