//! Which kernels a case can run with. Matrix ops have several, and tests run each one that makes a difference.

use kiln::internals::backend::cuda::{Arch, GemmOperands, Kernel, KernelChoice, Tile};

/// Whether a case is of attention, which has its own kernels for some GPUs.
pub fn is_attention(name: &str) -> bool {
    name.starts_with("attention")
}

/// Whether queries and keys are e4m3, in heads that have kernels.
pub fn is_fp8_attention(name: &str) -> bool {
    name.starts_with("attention of e4m3 ") && name.contains(" heads of 128 bf16 ")
}

/// Whether a case multiplies matrices.
pub fn is_matrix_op(name: &str) -> bool {
    ["linear", "qkv", "attention", "conv"].iter().any(|op| name.starts_with(op))
}

/// The operands of a case's GEMM.
fn operands(name: &str) -> GemmOperands {
    if name.starts_with("conv") {
        return GemmOperands::Conv3x3;
    }
    let named = [
        (" w8a16 ", GemmOperands::MixedInput),
        (" w4a16 ", GemmOperands::MixedInput),
        (" w8a8 ", GemmOperands::Fp8),
        (" w4a4 ", GemmOperands::Nvfp4),
    ];
    named.into_iter().find(|(kind, _)| name.contains(kind)).map_or(GemmOperands::Bf16, |(_, operands)| operands)
}

/// Whether a kernel makes a difference to a case. Persistent kernels matter only to GEMMs of their own operands. A case that takes the
/// naive kernels is the same with every choice. The host takes longer for the widths of the real models than for all the rest, so these
/// cases run only with tiles that a real model takes.
pub fn has_kernel(name: &str, kernel: Kernel) -> bool {
    let operands = operands(name);
    // Attention, and convolutions by portable kernels, have no GEMM tile.
    let Some(Tile { operands: own, arch, .. }) = Tile::of(kernel) else {
        let wide = kernel.file().starts_with("attention_wide");
        let computes = match is_attention(kernel.file()) {
            true => is_attention(name) && !(wide && name.contains("heads of 128")),
            false => operands == GemmOperands::Conv3x3,
        };
        return computes && (on_tensor_cores(name) || kernel == Kernel::AttentionBf16Sm80_8warps);
    };
    let (once, tile) = (kernel == Kernel::GemmBf16Sm80_64x128, Tile::of(kernel));
    if is_attention(name) || operands == GemmOperands::Conv3x3 && own != operands {
        return once && !is_attention(name);
    }
    // Except on Hopper, bf16 kernels take weights that an earlier kernel has expanded.
    let expanded = operands == GemmOperands::MixedInput && own == GemmOperands::Bf16 && arch != Arch::Sm90;
    // NVFP4 inputs have no portable kernel other than the naive one.
    if own != operands && !expanded && !(once && operands == GemmOperands::Nvfp4) {
        return false;
    }
    let usual = matches!(kernel, Kernel::GemmBf16Sm90_256x192 | Kernel::GemmBf16Sm90_128x256);
    let persistent = tile.is_some_and(Tile::is_persistent);
    is_matrix_op(name) && (once || on_tensor_cores(name)) && (!persistent || usual || !name.contains(" klein"))
}

/// Whether a case runs on tensor cores. f32 and GEMMs whose rows are not aligned to 16 bytes take the naive kernels. e4m3 attention has one
/// kernel, whatever the tile.
fn on_tensor_cores(name: &str) -> bool {
    let words: Vec<&str> = name.split([' ', 'x', ',']).collect();
    // "linear 64x65x66 ..." or "linear 64x66, rows of 65 ...".
    let k = words.iter().position(|word| *word == "of").map_or(2, |of| of + 1);
    let aligned = !name.starts_with("linear") || words[k].parse::<usize>().is_ok_and(|k| k.is_multiple_of(8));
    aligned
        && [" bf16 whole", " bf16 slice"].iter().any(|end| name.ends_with(end))
        && !(is_attention(name) && name.contains(" e4m3"))
}

/// Whether a case runs with this choice, in tests that run every case with all of its kernels.
pub fn runs_with(choice: KernelChoice, name: &str) -> bool {
    match choice {
        KernelChoice::Best => !is_matrix_op(name) || is_attention(name),
        KernelChoice::Naive => false,
        KernelChoice::Only(kernel) => has_kernel(name, kernel),
    }
}
