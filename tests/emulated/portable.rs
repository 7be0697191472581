//! Generates images with the built-in model on emulated GPUs, in every weight format: on GPUs with only the portable kernels, and with the
//! kernels of compute capability 12.x.

use crate::driver::{Emulated, Gpu};
use crate::runner::{cuda_with, run_seed};
use common::random::long;
use common::{cpu, run, small_job};
use kiln::internals::backend::{Backend, Lockstep};
use kiln::internals::pipeline::{Engine, Job, LoadOptions, OpenModel};
use kiln::internals::tensor::DType::{self, E2m1 as Nvfp4, E4m3 as Fp8};
use kiln::locate::{LocateRequest, locate};
use kiln::progress::Silent;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/builtin");

/// The kernels for quantized operands that a format takes on a GPU, or prefixes of their names.
struct Path {
    gpu: Gpu,
    format: Option<DType>,
    kernels: &'static [&'static str],
}

const EXPANDED: &[&str] = &["kl_expand"];
/// FP8 kernels. The text encoder's inputs stay in bf16, so its weights are expanded even so.
const FP8: &[&str] = &["kl_expand", "kl_gemm_fp8_sm89", "kl_attention_fp8_sm89"];
const NATIVE_FP8: &[&str] = &["kl_expand", "kl_gemm_bf16_sm120", "kl_gemm_fp8_sm120", "kl_attention_fp8_sm120"];
const NATIVE_NVFP4: &[&str] = &["kl_expand", "kl_gemm_bf16_sm120", "kl_gemm_nvfp4_sm120", "kl_attention_fp8_sm120"];

const PATHS: &[Path] = &[
    Path { gpu: Gpu::AMPERE, format: None, kernels: &[] },
    Path { gpu: Gpu::AMPERE, format: Some(Fp8), kernels: EXPANDED },
    Path { gpu: Gpu::AMPERE, format: Some(Nvfp4), kernels: EXPANDED },
    Path { gpu: Gpu::ADA, format: None, kernels: &[] },
    Path { gpu: Gpu::ADA, format: Some(Fp8), kernels: FP8 },
    Path { gpu: Gpu::ADA, format: Some(Nvfp4), kernels: EXPANDED },
    Path { gpu: Gpu::BLACKWELL, format: None, kernels: &[] },
    Path { gpu: Gpu::BLACKWELL, format: Some(Fp8), kernels: FP8 },
    Path { gpu: Gpu::BLACKWELL, format: Some(Nvfp4), kernels: EXPANDED },
    Path { gpu: Gpu::NATIVE_BLACKWELL, format: None, kernels: &["kl_gemm_bf16_sm120"] },
    Path { gpu: Gpu::NATIVE_BLACKWELL, format: Some(Fp8), kernels: NATIVE_FP8 },
    Path { gpu: Gpu::NATIVE_BLACKWELL, format: Some(Nvfp4), kernels: NATIVE_NVFP4 },
];

impl Path {
    /// Checks that every op of an image is within rounding of the CPU backend's result.
    fn check(&self) {
        let driver = Emulated::new(self.gpu);
        driver.set_seed(run_seed());
        let mut cuda = cuda_with(&driver, None).unwrap();
        cuda.enable_gated(self.gpu.native);
        let backend: Box<dyn Backend> = Box::new(Lockstep::new(cpu(), cuda));
        let found = locate(&LocateRequest { model: Some(FOLDER.into()), ..LocateRequest::default() }).unwrap();
        let model = OpenModel::open(&found, None).unwrap();
        let options = LoadOptions { quantize: self.format, ..LoadOptions::DEFAULT };
        let mut engine = Engine::load(backend, model, options, &Silent).unwrap();
        let steps = if long() { 2 } else { 1 };
        let job = Job { prompt: "a red circle".into(), steps, ..small_job() };
        let again = format!("{:?} {:?}: again with KILN_TEST_SEED={}", self.gpu, self.format, run_seed());
        run(&mut engine, &job).unwrap_or_else(|e| panic!("{e}\n  {again}"));
        let launched: Vec<&str> = engine.launches().into_iter().map(|(name, _)| name).collect();
        const SM89: [&str; 2] = ["kl_gemm_fp8_sm89", "kl_attention_fp8_sm89"];
        const SM120: [&str; 4] = ["kl_gemm_bf16_sm120", "kl_gemm_fp8_sm120", "kl_gemm_nvfp4_sm120", "kl_attention_fp8_sm120"];
        let known = ["kl_expand"].into_iter().chain(SM89).chain(SM120);
        let is_launched = |known: &&str| launched.iter().any(|name| name.starts_with(known));
        let quantized: Vec<&str> = known.filter(is_launched).collect();
        assert_eq!(quantized, self.kernels, "{again}");
        assert!(!launched.iter().any(|name| name.contains("sm90")), "{launched:?}");
    }
}

#[test]
fn the_built_in_model_runs_on_every_gpu() {
    needs_emulator!();
    let drawn = run_seed() as usize % PATHS.len();
    PATHS.iter().enumerate().filter(|(index, _)| *index == drawn || long()).for_each(|(_, path)| path.check());
}
