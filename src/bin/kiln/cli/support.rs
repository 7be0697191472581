//! Explains which kernels multiply which formats on a GPU, and why a format takes a slower way.

use kiln::device::{Arch, GemmFormats};

/// The first compute capabilities whose tensor cores multiply FP8 and FP4.
const FP8_CORES: (u32, u32) = (8, 9);
const FP4_CORES: (u32, u32) = (10, 0);

/// A row for each format and stage: its name, and how it runs on a GPU with this compute capability, these GEMMs and this kernel
/// architecture.
pub fn support(formats: GemmFormats, capability: (u32, u32), arch: Arch) -> [(&'static str, String); 6] {
    let hopper = arch == Arch::Sm90;
    let (gemm, sums) = match hopper {
        true => ("wgmma", "sums as --fp8-accumulate asks"),
        false => ("mma.sync", "exact sums"),
    };
    let (major, minor) = capability;
    let card = format!("compute capability {major}.{minor}");
    let expanded = |kept: bool, why: &str| match (kept && formats.expands, hopper) {
        (true, true) => format!("weights stay quantized and are expanded to bf16 while a GEMM runs{why}"),
        (true, false) => format!("weights stay quantized and are expanded to bf16 before each GEMM{why}"),
        (false, _) => format!("weights are expanded to bf16 when they are loaded: there is no kernel for them{why}"),
    };
    let native = arch == Arch::Sm120;
    let quantized = if native { "block-scaled mma.sync" } else { gemm };
    let missing = |cores: (u32, u32), name: &str| match capability < cores {
        true => format!(": {card} has no {name} tensor cores"),
        false if major == 12 => format!(": the kernel for its {name} tensor cores is used once a self-test has passed"),
        false => format!(": there is no kernel for its {name} tensor cores"),
    };
    let fp8 = match formats.w8a8 {
        // The instruction that takes block scales has twice the rate there.
        true if major == 12 && !native => {
            format!("FP8 by FP8 on tensor cores ({quantized}, {sums}), at half the rate of {card}'s block-scaled MMA")
        }
        true => format!("FP8 by FP8 on tensor cores ({quantized}, {sums})"),
        false => expanded(formats.w8a16, &missing(FP8_CORES, "FP8")),
    };
    let nvfp4 = match formats.w4a4 {
        true => format!("NVFP4 by NVFP4 on tensor cores ({quantized})"),
        false => expanded(formats.w4a16, &missing(FP4_CORES, "FP4")),
    };
    let text = expanded(formats.w8a16 && formats.w4a16, "; their inputs are always bf16");
    let attention = match formats.qk8 {
        true => format!("{gemm}, bf16; queries and keys of blocks with quantized inputs in FP8"),
        false => format!("{gemm}, bf16{}", missing(FP8_CORES, "FP8")),
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

/// Which formats of a model run fast on a GPU with these GEMMs, or on the CPU.
pub fn speed_class(gpu: Option<GemmFormats>) -> &'static str {
    match gpu {
        Some(GemmFormats { w4a4: true, .. }) => "nvfp4 is fastest, then fp8, then bf16",
        Some(GemmFormats { w8a8: true, .. }) => "fp8 is fastest, then bf16; nvfp4 only saves memory",
        Some(_) => "bf16; fp8 and nvfp4 only save memory",
        None => "minutes for an image of a FLUX.2 model on the CPU, seconds with `builtin`; fp8 and nvfp4 only save memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::device::gemm_formats;

    fn line(capability: (u32, u32), formats: GemmFormats, name: &str) -> String {
        let arch = if capability.0 == 12 && !formats.w4a4 { Arch::Sm89 } else { Arch::of(capability) };
        let rows = support(formats, capability, arch);
        rows.into_iter().find(|(what, _)| *what == name).unwrap_or_else(|| panic!("{name}")).1
    }

    #[test]
    fn each_card_says_what_it_lacks() {
        let fp8 = |capability| line(capability, gemm_formats(capability), "FP8 transformer");
        let nvfp4 = |capability| line(capability, gemm_formats(capability), "NVFP4 transformer");
        let before = "weights stay quantized and are expanded to bf16 before each GEMM";
        assert_eq!(fp8((8, 6)), format!("{before}: compute capability 8.6 has no FP8 tensor cores"));
        assert_eq!(nvfp4((8, 9)), format!("{before}: compute capability 8.9 has no FP4 tensor cores"));
        assert_eq!(nvfp4((10, 0)), format!("{before}: there is no kernel for its FP4 tensor cores"));
        assert_eq!(fp8((8, 9)), "FP8 by FP8 on tensor cores (mma.sync, exact sums)");
        assert!(fp8((9, 0)).contains("(wgmma, ") && nvfp4((9, 0)).contains(" while a GEMM runs: "), "{}", nvfp4((9, 0)));
    }

    /// Compute capability 12.x has kernels of its own, which are on where NVFP4 is multiplied.
    #[test]
    fn native_kernels_are_named_where_they_are_on() {
        let native = gemm_formats((12, 0));
        let portable = GemmFormats { w4a4: false, ..native };
        let fp8 = |formats| line((12, 0), formats, "FP8 transformer");
        let nvfp4 = |formats| line((12, 0), formats, "NVFP4 transformer");
        assert_eq!(fp8(native), "FP8 by FP8 on tensor cores (block-scaled mma.sync, exact sums)");
        assert_eq!(nvfp4(native), "NVFP4 by NVFP4 on tensor cores (block-scaled mma.sync)");
        assert!(fp8(portable).ends_with(", at half the rate of compute capability 12.0's block-scaled MMA"), "{}", fp8(portable));
        assert!(nvfp4(portable).ends_with(" is used once a self-test has passed"), "{}", nvfp4(portable));
        assert_eq!(line((12, 0), native, "bf16"), "bf16 by bf16 on tensor cores (mma.sync)");
    }

    #[test]
    fn the_fastest_format_comes_first() {
        let class = |capability| speed_class(Some(gemm_formats(capability)));
        assert!(class((12, 0)).starts_with("nvfp4 is fastest, then fp8"));
        assert!(class((8, 9)).starts_with("fp8 is fastest") && class((9, 0)) == class((8, 9)));
        assert!(class((8, 6)).starts_with("bf16; ") && speed_class(None).starts_with("minutes "));
    }

    /// The lines follow the formats, and not the card alone: a build may lack kernels.
    #[test]
    fn lines_are_of_the_formats_that_run() {
        let at_load = "weights are expanded to bf16 when they are loaded: there is no kernel for them";
        for name in ["FP8 transformer", "NVFP4 transformer", "FP8 and NVFP4 text encoder"] {
            let line = line((8, 9), GemmFormats::NONE, name);
            assert!(line.starts_with(at_load), "{line}");
        }
        let attention = |capability| line(capability, gemm_formats(capability), "attention");
        for (capability, gemm) in [((8, 9), "mma.sync"), ((9, 0), "wgmma"), ((12, 0), "mma.sync")] {
            assert_eq!(attention(capability), format!("{gemm}, bf16; queries and keys of blocks with quantized inputs in FP8"));
        }
        assert_eq!(attention((8, 6)), "mma.sync, bf16: compute capability 8.6 has no FP8 tensor cores");
        assert_eq!(attention((10, 0)), "mma.sync, bf16: there is no kernel for its FP8 tensor cores");
    }
}
