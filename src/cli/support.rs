//! What runs how on a GPU: which kernels multiply which formats, and why where that is not by the shortest way.

use crate::backend::GemmFormats;
use crate::predict::KernelFamily;

/// The first compute capabilities whose tensor cores multiply FP8 and FP4.
const FP8_CORES: (u32, u32) = (8, 9);
const FP4_CORES: (u32, u32) = (10, 0);

/// A row for each format and stage: its name, and how it runs on a GPU of this compute capability that has these GEMMs and kernels.
pub fn support(formats: GemmFormats, capability: (u32, u32), family: KernelFamily) -> [(&'static str, String); 6] {
    let hopper = family == KernelFamily::Hopper;
    let (gemm, sums) = match hopper {
        true => ("wgmma", "sums as asked"),
        false => ("mma.sync", "partial sums promoted to f32"),
    };
    let (major, minor) = capability;
    let card = format!("compute capability {major}.{minor}");
    let expanded = |kept: bool, why: &str| match (kept && formats.expands, hopper) {
        (true, true) => format!("weights stay as they are and are expanded to bf16 while a GEMM runs{why}"),
        (true, false) => format!("weights stay as they are and are expanded to bf16 before each GEMM{why}"),
        (false, _) => format!("weights are expanded to bf16 when they are loaded: there is no kernel for them{why}"),
    };
    let missing = |cores: (u32, u32), name: &str| match capability < cores {
        true => format!(": {card} has no {name} tensor cores"),
        false => format!(": there is no kernel for its {name} tensor cores"),
    };
    let fp8 = match formats.w8a8 {
        // The vendor halves the rate of this instruction there; only its form with block scales has the whole.
        true if capability.0 == 12 => format!("FP8 by FP8 on tensor cores ({gemm}, {sums}), at the rate of bf16 on {card}"),
        true => format!("FP8 by FP8 on tensor cores ({gemm}, {sums})"),
        false => expanded(formats.w8a16, &missing(FP8_CORES, "FP8")),
    };
    let nvfp4 = match formats.w4a4 {
        true => format!("NVFP4 by NVFP4 on tensor cores ({gemm})"),
        false => expanded(formats.w4a16, &missing(FP4_CORES, "FP4")),
    };
    let text = expanded(formats.w8a16 && formats.w4a16, "; their inputs are always bf16");
    let attention = match formats.qk8 {
        true => format!("{gemm}, bf16; queries and keys of blocks with FP8 inputs in FP8"),
        false => format!("{gemm}, bf16: FP8 queries and keys are for Hopper"),
    };
    [
        ("bf16", format!("bf16 by bf16 on tensor cores ({gemm})")),
        ("FP8 transformer", fp8),
        ("NVFP4 transformer", nvfp4),
        ("FP8 and NVFP4 text encoder", text),
        ("attention", attention),
        ("VAE", "mma.sync, bf16".into()),
    ]
}
