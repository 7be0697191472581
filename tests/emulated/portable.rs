//! The built-in model makes an image on emulated GPUs that have the portable kernels alone, in every format of its weights.

use crate::available;
use crate::common::{cpu, run, small_job};
use crate::driver::{Emulated, Gpu};
use crate::random::long;
use crate::runner::{cuda_with, run_seed};
use kiln::backend::{Backend, Lockstep};
use kiln::locate::{LocateRequest, locate};
use kiln::pipeline::{Engine, Job, LoadOptions, OpenModel};
use kiln::progress::Silent;
use kiln::tensor::quantise::QuantisedFormat;
use kiln::tensor::quantise::QuantisedFormat::{Fp8, Nvfp4};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/builtin");

/// The kernels for quantised operands that one format takes on one GPU, and whether it runs every time.
struct Path {
    gpu: Gpu,
    format: Option<QuantisedFormat>,
    kernels: &'static [&'static str],
    every_time: bool,
}

const EXPANDED: &[&str] = &["kl_expand"];
/// Of the text encoder, whose inputs stay in bf16, weights are expanded all the same.
const FP8: &[&str] = &["kl_attention_fp8_sm89", "kl_expand", "kl_gemm_fp8_sm89_128"];

const PATHS: &[Path] = &[
    Path { gpu: Gpu::AMPERE, format: None, kernels: &[], every_time: false },
    Path { gpu: Gpu::AMPERE, format: Some(Fp8), kernels: EXPANDED, every_time: false },
    Path { gpu: Gpu::AMPERE, format: Some(Nvfp4), kernels: EXPANDED, every_time: false },
    Path { gpu: Gpu::ADA, format: None, kernels: &[], every_time: false },
    Path { gpu: Gpu::ADA, format: Some(Fp8), kernels: FP8, every_time: true },
    Path { gpu: Gpu::ADA, format: Some(Nvfp4), kernels: EXPANDED, every_time: false },
    Path { gpu: Gpu::BLACKWELL, format: None, kernels: &[], every_time: false },
    Path { gpu: Gpu::BLACKWELL, format: Some(Fp8), kernels: FP8, every_time: false },
    Path { gpu: Gpu::BLACKWELL, format: Some(Nvfp4), kernels: EXPANDED, every_time: false },
];

impl Path {
    /// Every op of an image is within rounding of what the CPU backend computes.
    fn check(&self) {
        let driver = Emulated::new(self.gpu);
        driver.set_seed(run_seed());
        let cuda = cuda_with(&driver, None).unwrap();
        let backend: Box<dyn Backend> = Box::new(Lockstep::new(cpu(), cuda));
        let found = locate(&LocateRequest { model: Some(FOLDER.into()), ..LocateRequest::default() }).unwrap();
        let model = OpenModel::open(&found, None).unwrap();
        let options = LoadOptions { quantise: self.format, ..LoadOptions::DEFAULT };
        let mut engine = Engine::load(backend, model, options, &Silent).unwrap();
        let steps = if long() { 2 } else { 1 };
        let job = Job { prompt: "a red circle".into(), steps, ..small_job() };
        let again = format!("{:?} {:?}: again with KILN_TEST_SEED={}", self.gpu, self.format, run_seed());
        run(&mut engine, &job).unwrap_or_else(|e| panic!("{e}\n  {again}"));
        let launched: Vec<&str> = engine.backend().launches().into_iter().map(|(name, _)| name).collect();
        let is_quantised =
            |name: &str| name == "kl_expand" || ["gemm", "attention"].iter().any(|op| name.starts_with(&format!("kl_{op}_fp8_")));
        let quantised: Vec<&str> = launched.iter().copied().filter(|name| is_quantised(name)).collect();
        assert_eq!(quantised, self.kernels, "{again}");
        assert!(!launched.iter().any(|name| name.contains("sm90")), "{launched:?}");
    }
}

#[test]
fn the_built_in_model_runs_on_portable_kernels() {
    if available() {
        PATHS.iter().filter(|path| path.every_time || long()).for_each(Path::check);
    }
}
