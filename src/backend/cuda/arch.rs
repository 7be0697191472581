//! The GPU architectures that kernels are written for. The build script also includes this file: it compiles kernels for them.

/// The oldest GPUs that run a kernel, or the only ones. A GPU that runs kernels of several architectures is fastest with the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Every GPU from compute capability 8.0 on (`mma.sync`).
    Portable,
    /// Every GPU whose `mma.sync` multiplies FP8.
    Sm89,
    /// Only Hopper (TMA, `wgmma` and clusters).
    Sm90,
    /// Only datacenter Blackwell.
    Sm100,
    /// Only compute capability 12.x (TMA and block-scaled `mma.sync`).
    Sm120,
}

impl Arch {
    /// All architectures, in the order of the enum.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Sm89, Self::Sm90, Self::Sm100, Self::Sm120];

    /// The architecture of the fastest kernels that a GPU of this compute capability runs.
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

    /// Whether a GPU of this compute capability runs kernels of this architecture.
    pub fn runs_on(self, capability: (u32, u32)) -> bool {
        match self {
            Self::Portable => true,
            Self::Sm89 => capability >= (8, 9),
            Self::Sm90 => capability == (9, 0),
            Self::Sm100 => capability.0 == 10,
            Self::Sm120 => capability.0 == 12,
        }
    }

    /// Whether the kernels were written without a GPU to run them on. Such kernels may be chosen after a self-test on this GPU has passed.
    pub const fn is_gated(self) -> bool {
        matches!(self, Self::Sm120)
    }
}
