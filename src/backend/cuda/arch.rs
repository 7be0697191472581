//! The GPU architectures that kernels are written for. The build script, which compiles kernels for them, includes this file.

/// The oldest GPUs that run a kernel, or the only ones. Where a GPU runs kernels of several, the last is the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Every GPU from compute capability 8.0 on (`mma.sync`).
    Portable,
    /// Every GPU whose `mma.sync` multiplies FP8.
    Sm89,
    /// Hopper alone (TMA, `wgmma` and clusters).
    Sm90,
    /// Datacenter Blackwell alone.
    Sm100,
    /// Compute capability 12.x alone (TMA and block-scaled `mma.sync`).
    Sm120,
}

impl Arch {
    /// All architectures, in the order of the enum.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Sm89, Self::Sm90, Self::Sm100, Self::Sm120];

    /// The fastest architecture of kernels that a GPU of this compute capability runs.
    pub fn of(capability: (u32, u32)) -> Self {
        Self::ALL.into_iter().rfind(|arch| arch.runs_on(capability)).unwrap_or(Self::Portable)
    }

    /// The name in kernel symbols and kernel files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "sm80",
            Self::Sm89 => "sm89",
            Self::Sm90 => "sm90",
            Self::Sm100 => "sm100",
            Self::Sm120 => "sm120",
        }
    }

    /// Whether a GPU of this compute capability runs the kernels.
    pub fn runs_on(self, capability: (u32, u32)) -> bool {
        match self {
            Self::Portable => true,
            Self::Sm89 => capability >= (8, 9),
            Self::Sm90 => capability == (9, 0),
            Self::Sm100 => capability.0 == 10,
            Self::Sm120 => capability.0 == 12,
        }
    }

    /// Whether the kernels were written without a GPU to run them on. They are chosen after a self-test has passed on the GPU at hand.
    pub const fn is_gated(self) -> bool {
        matches!(self, Self::Sm120)
    }
}
