//! The architectures that kernel files are compiled for.

#[path = "../src/backend/cuda/arch.rs"]
#[allow(dead_code)]
mod shared;
pub use shared::Arch;

use crate::{Result, watched};

/// The architectures that a portable kernel file is compiled for. The `f` targets run on the whole family (100 and 103, 120 and 121). For
/// every other GPU from 8.0 on the driver compiles the PTX.
pub const PORTABLE: &[&str] = &["80", "89", "90", "100f", "120f"];
pub const PTX: &str = "80";

/// The architectures that a kernel file is compiled for, and the PTX for later GPUs. Only Hopper has the instructions of `90a`.
pub const fn targets(arch: Arch) -> (&'static [&'static str], Option<&'static str>) {
    match arch {
        Arch::Portable => (PORTABLE, Some(PTX)),
        Arch::Sm89 => (&["89", "90", "120f"], Some("89")),
        Arch::Sm90 => (&["90a"], None),
        Arch::Sm100 => (&["100f"], None),
        Arch::Sm120 => (&["120f"], None),
    }
}

/// The architectures that `KILN_CUDA_ARCHS` lists, by number. `None` stands for all.
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

/// The architectures that the user has chosen.
pub fn pick(archs: &[&'static str], chosen: Option<&[u32]>) -> Vec<&'static str> {
    archs.iter().copied().filter(|arch| chosen.is_none_or(|c| c.contains(&number(arch)))).collect()
}
