//! Host mistakes: a parameter, launch or tensor map that the kernel does not expect.

use crate::driver::{Emulated, Gpu, Sabotage};
use crate::runner::Runner;
use common::ops::cases;
use kiln::internals::backend::cuda::driver::{Driver, Launch, MapSpec, Swizzle};
use kiln::internals::backend::cuda::{Kernel, KernelChoice};

/// A GEMM that the host calls with a mistake.
struct Target {
    gpu: Gpu,
    kernel: Kernel,
    case: &'static str,
}

/// Its tensor maps describe activations, weights, results and a residual.
const HOPPER: Target = Target {
    gpu: Gpu::HOPPER,
    kernel: Kernel::GemmBf16Sm90_128x192,
    case: "linear_gate_residual 66x64, rows of 584 gate true bias true bf16 whole",
};
/// Its tensor maps describe activations and weights. Two elements of these are one element of a map.
const NVFP4: Target = Target {
    gpu: Gpu::NATIVE_BLACKWELL,
    kernel: Kernel::GemmNvfp4Sm120_256x128,
    case: "linear_swiglu w4a4 67 rows of 640 to 192, nvfp4 in one matrix into nvfp4 bf16 whole",
};

impl Target {
    /// Runs the case with a mistake and returns the report.
    fn with(&self, sabotage: Option<Sabotage>) -> Result<(), String> {
        let case = cases::all().into_iter().find(|case| case.name == self.case).expect("the case is in the table");
        let mut runner = Runner::new(self.gpu);
        runner.driver.set_sabotage(sabotage);
        runner.run(KernelChoice::Only(self.kernel), &case, 1, true).map(drop)
    }

    /// Runs the case with each mistake and checks that the report contains its message.
    fn check<T>(&self, mistakes: &[(&str, T, &str)], sabotage: impl Fn(&T) -> Sabotage) {
        self.with(None).unwrap();
        for (mistake, change, message) in mistakes {
            let found = self.with(Some(sabotage(change))).expect_err(mistake);
            assert!(found.contains(message), "{mistake}: {found}");
        }
    }
}

#[test]
fn a_wrong_tensor_map_is_found() {
    needs_emulator!();
    type Change = fn(&mut MapSpec);
    let mistakes: &[(&str, Change, &str)] = &[
        ("a box of half the rows", |map| map.tile[1] /= 2, ""),
        ("a box wider than its swizzle", |map| map.tile[0] *= 2, "the rows of a box fit the swizzle"),
        ("no swizzle", |map| map.swizzle = Swizzle::None, ""),
        ("another swizzle", |map| map.swizzle = Swizzle::Bytes32, "the rows of a box fit the swizzle"),
        ("a pitch that is no multiple of 16 bytes", |map| map.pitch[0] += 2, "pitches are multiples of 16"),
        ("the pitch of wider rows", |map| map.pitch[0] += 16, ""),
        ("an address that is no multiple of 16", |map| map.address += 8, "the address is a multiple of 16"),
        ("more rows than there are", |map| map.size[1] += 1 << 20, ""),
    ];
    HOPPER.check(mistakes, |change| Sabotage::Map(*change));
    let mistakes: &[(&str, Change, &str)] = &[
        ("a box of half the rows", |map| map.tile[1] /= 2, "bytes are missing"),
        ("a box of as many columns as there are elements", |map| map.tile[0] *= 2, "the rows of a box fit the swizzle"),
        ("rows of as many bytes as there are elements", |map| map.pitch[0] *= 2, "relative error"),
        ("no swizzle", |map| map.swizzle = Swizzle::None, "relative error"),
        ("the swizzle of Hopper's rows", |map| map.swizzle = Swizzle::Bytes128, "relative error"),
    ];
    NVFP4.check(mistakes, |change| Sabotage::Map(*change));
}

#[test]
fn a_wrong_launch_is_found() {
    needs_emulator!();
    type Change = fn(&mut Launch, &mut Vec<u8>);
    let mistakes: &[(&str, Change, &str)] = &[
        ("less shared memory than the template computes", |launch, _| launch.shared /= 2, "its template computes 384 and"),
        ("a warpgroup less", |launch, _| launch.threads -= 128, ""),
        ("more threads than the launch bounds", |launch, _| launch.threads += 128, "invalid launch of"),
        ("a cluster less", |launch, _| launch.grid[0] -= launch.cluster, ""),
        ("a cluster that is cut", |launch, _| launch.grid[0] -= 1, "invalid launch of"),
        ("a tensor map that is not there", |_, params| params[..128].fill(0), "are not an encoded tensor map"),
    ];
    HOPPER.check(mistakes, |change| Sabotage::Launch(*change));
}

/// The real driver does the same when it loads kernels.
#[test]
fn a_parameter_of_another_size_is_refused() {
    needs_emulator!();
    let driver = Emulated::new(Gpu::HOPPER);
    let module = driver.load(b"pointwise").unwrap();
    let refused = |symbol: &str, params, shared| driver.function(module, symbol, params, shared).unwrap_err().to_string();
    assert!(refused("kl_map", 1, 0).contains("the host has 1"));
    assert!(refused("kl_maps", 1, 0).contains("is not in pointwise"));
    let params = kiln_emulator::entry("pointwise", "kl_map").unwrap().param_bytes as usize;
    assert!(driver.function(module, "kl_map", params, 1024).is_ok());
    assert!(refused("kl_map", params, 1 << 20).contains("bytes of shared memory"));
}
