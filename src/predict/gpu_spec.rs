//! The GPUs of predictions, as rows of numbers.

use crate::backend::GemmFormats;
use crate::backend::cuda::driver::{DeviceInfo, tensor_flops_per_clock};
use crate::backend::cuda::{Arch, gemm_formats};
use crate::tensor::DType;
use std::borrow::Cow;

/// The properties of a GPU that predictions depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSpec {
    /// The name that the driver gives, without the vendor.
    pub name: Cow<'static, str>,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors (SMs).
    pub multiprocessors: u32,
    /// The SM clock that the driver gives, in kHz.
    pub clock: u32,
    /// Most bytes of shared memory that a CTA may have.
    pub shared: u32,
    /// Bytes per second of its memory.
    pub bandwidth: u64,
    /// Bytes of memory.
    pub memory: u64,
}

/// Most bytes of shared memory that a CTA may have on compute capability 8.6, 8.9 and 12.0.
const SHARED_99_KB: u32 = 99 << 10;

/// The GPUs that predictions are published for, and the GPU that they are checked on. The numbers are from NVIDIA's architecture
/// whitepapers (GA102, Ada, RTX Blackwell) and the data sheets of the H200 and the RTX PRO 6000. The driver gives the clock of the H200.
/// The clock of the RTX PRO 6000 follows from 126 TFLOP/s of its FP32 lanes.
pub const GPU_SPECS: [GpuSpec; 5] = [
    GpuSpec {
        name: Cow::Borrowed("GeForce RTX 3090"),
        capability: (8, 6),
        multiprocessors: 82,
        clock: 1_695_000,
        shared: SHARED_99_KB,
        bandwidth: 936_000_000_000,
        memory: 24 << 30,
    },
    GpuSpec {
        name: Cow::Borrowed("GeForce RTX 4090"),
        capability: (8, 9),
        multiprocessors: 128,
        clock: 2_520_000,
        shared: SHARED_99_KB,
        bandwidth: 1_008_000_000_000,
        memory: 24 << 30,
    },
    GpuSpec {
        name: Cow::Borrowed("GeForce RTX 5090"),
        capability: (12, 0),
        multiprocessors: 170,
        clock: 2_407_000,
        shared: SHARED_99_KB,
        bandwidth: 1_792_000_000_000,
        memory: 32 << 30,
    },
    GpuSpec {
        name: Cow::Borrowed("RTX PRO 6000 Blackwell Workstation Edition"),
        capability: (12, 0),
        multiprocessors: 188,
        clock: 2_617_000,
        shared: SHARED_99_KB,
        bandwidth: 1_792_000_000_000,
        memory: 96 << 30,
    },
    GpuSpec {
        name: Cow::Borrowed("H200"),
        capability: (9, 0),
        multiprocessors: 132,
        clock: 1_980_000,
        shared: DeviceInfo::SM90_SHARED,
        bandwidth: 4_800_000_000_000,
        memory: 141_000_000_000,
    },
];

impl GpuSpec {
    /// Finds a GPU by its whole name, or without `NVIDIA`, `GeForce` and `RTX` at its beginning and `Blackwell` and `Workstation Edition`
    /// at its end. Case and spaces do not matter.
    pub fn named(name: &str) -> Option<&'static Self> {
        let wanted = short_name(name);
        GPU_SPECS.iter().find(|gpu| short_name(&gpu.name) == wanted)
    }

    /// A row made from what the driver tells about a GPU. `None` if it does not tell the memory bandwidth.
    pub fn of_device(device: &DeviceInfo, bandwidth: Option<u64>) -> Option<Self> {
        let DeviceInfo { name, capability, multiprocessors, clock, shared, memory, .. } = device;
        Some(Self {
            name: name.trim_start_matches("NVIDIA ").to_owned().into(),
            capability: *capability,
            multiprocessors: *multiprocessors,
            clock: *clock,
            shared: *shared,
            bandwidth: bandwidth?,
            memory: *memory,
        })
    }

    /// The quantized GEMMs that have kernels for this GPU.
    pub const fn gemm_formats(&self) -> GemmFormats {
        gemm_formats(self.capability)
    }

    /// The architecture of its fastest kernels. The program was built with all of them, and gated kernels have passed their self-test.
    pub fn arch(&self) -> Arch {
        Arch::of(self.capability)
    }

    /// Whether it is a row of `GPU_SPECS`.
    pub fn is_listed(&self) -> bool {
        GPU_SPECS.contains(self)
    }

    /// Floating-point operations per clock of one SM's tensor cores. `None` if they are not known.
    pub fn tensor_flops_per_clock(&self, dtype: DType) -> Option<u32> {
        tensor_flops_per_clock(&self.name, self.capability, dtype)
    }

    /// Floating-point operations per second of the whole GPU's tensor cores, at its clock.
    pub fn tensor_flops(&self, dtype: DType) -> Option<f64> {
        Some(f64::from(self.tensor_flops_per_clock(dtype)?) * self.clocks_per_second())
    }

    /// Clocks per second of all SMs together.
    pub(super) fn clocks_per_second(&self) -> f64 {
        f64::from(self.multiprocessors) * f64::from(self.clock) * 1e3
    }
}

/// A name without the words that all cards share.
fn short_name(name: &str) -> String {
    let name = name.to_lowercase().replace(char::is_whitespace, "");
    let name = ["nvidia", "geforce", "rtx"].iter().fold(&*name, |name, word| name.strip_prefix(word).unwrap_or(name));
    ["workstationedition", "blackwell"].iter().fold(name, |name, word| name.strip_suffix(word).unwrap_or(name)).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_their_names() {
        for name in ["NVIDIA GeForce RTX 4090", "GeForce RTX 4090", "RTX 4090", "rtx4090", "4090"] {
            assert_eq!(GpuSpec::named(name).map(|gpu| gpu.capability), Some((8, 9)), "{name}");
        }
        for name in ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell", "rtx pro 6000", "pro6000"] {
            assert_eq!(GpuSpec::named(name).map(|gpu| gpu.multiprocessors), Some(188), "{name}");
        }
        assert_eq!(GpuSpec::named("NVIDIA H200").map(|gpu| gpu.multiprocessors), Some(132));
        // Cards whose names are similar, but which are not in the table.
        for name in ["RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 409", "", "RTX", "H200 NVL"] {
            assert_eq!(GpuSpec::named(name), None, "{name}");
        }
        for name in
            ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Server Edition", "RTX 6000"]
        {
            assert_eq!(GpuSpec::named(name), None, "{name}");
        }
    }

    /// The vendor's figures: dense, with f32 accumulators.
    #[test]
    fn rows_are_those_of_the_whitepapers() {
        for (name, bf16, e4m3, e2m1) in [
            ("3090", 71.0, None, None),
            ("4090", 165.2, Some(330.3), None),
            ("5090", 209.5, Some(419.0), Some(1676.0)),
            ("PRO 6000", 503.8, Some(1007.6), Some(2015.0)),
        ] {
            let gpu = GpuSpec::named(name).unwrap();
            let is_close = |got: Option<f64>, want: Option<f64>| match (got, want) {
                (Some(got), Some(want)) => (got / 1e12 / want - 1.0).abs() < 0.005,
                (got, want) => got.is_none() && want.is_none(),
            };
            assert!(is_close(gpu.tensor_flops(DType::Bf16), Some(bf16)), "{name}");
            assert!(is_close(gpu.tensor_flops(DType::E4m3), e4m3), "{name}");
            assert!(is_close(gpu.tensor_flops(DType::E2m1), e2m1), "{name}");
        }
    }

    #[test]
    fn a_row_of_another_card_is_what_the_driver_tells() {
        let device = DeviceInfo {
            index: 1,
            name: "NVIDIA A100-SXM4-80GB".into(),
            uuid: [0; 16],
            capability: (8, 0),
            multiprocessors: 108,
            shared: 163 << 10,
            clock: 1_410_000,
            memory: 80 << 30,
            driver: (13, 0),
        };
        let gpu = GpuSpec::of_device(&device, Some(2_039_000_000_000)).unwrap();
        assert_eq!((&*gpu.name, gpu.multiprocessors, gpu.memory), ("A100-SXM4-80GB", 108, 80 << 30));
        assert!((gpu.tensor_flops(DType::Bf16).unwrap() / 1e12 - 312.0).abs() < 1.0);
        assert_eq!(GpuSpec::of_device(&device, None), None);
    }
}
