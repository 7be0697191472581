//! The block of `kiln bench --share`: measured and predicted times, to send to others. It has nothing of the user's: no paths, no
//! prompt, no name of the machine.

use super::super::device::describe_gpu;
use kiln::device::DeviceInfo;
use kiln::predict::{GpuSpec, Predictor};
use kiln::text::{amount, shown, shown_line};
use std::fmt::Write as _;

/// The contents of the block.
pub struct Shared<'a> {
    /// The GPU; none on the CPU.
    pub device: Option<&'a DeviceInfo>,
    /// The machine if there is no GPU.
    pub machine: &'a str,
    /// The driver's release, if it reports one.
    pub release: Option<String>,
    /// Model, size, steps and precision.
    pub subject: String,
    /// The formats of the layers.
    pub formats: &'a [String],
    /// The kernels that ran.
    pub kernels: Vec<&'static str>,
    /// Bytes of device memory: measured (on a GPU only), and planned.
    pub memory: (Option<u64>, u64),
    /// Stages with measured and predicted seconds.
    pub stages: Vec<(&'static str, f64, Option<f64>)>,
    /// The predictor, or why there is none.
    pub predictor: Result<&'a Predictor, &'a str>,
}

impl Shared<'_> {
    /// The block.
    pub fn block(&self) -> String {
        let mut text = format!("--- from here on: kiln bench --share, kiln {} ---\n", env!("CARGO_PKG_VERSION"));
        let mut row = |name: &str, value: &str| {
            let _ = writeln!(text, "{name:<12} {}", shown_line(value));
        };
        match self.device {
            Some(device) => describe_gpu(device, self.release.as_deref(), &mut row),
            None => row("cpu", self.machine),
        }
        row("model", &self.subject);
        for (i, line) in self.formats.iter().enumerate() {
            row(if i == 0 { "formats" } else { "" }, line);
        }
        if !self.kernels.is_empty() {
            row("kernels", &self.kernels.join(" "));
        }
        match self.memory {
            (Some(measured), planned) => row("memory", &format!("{} measured, {} planned", amount(measured), amount(planned))),
            (None, planned) => row("memory", &format!("{} planned", amount(planned))),
        }
        let _ = writeln!(text, "\n{:<12} {:>12} {:>12} {:>12}", "ms", "measured", "predicted", "ratio");
        for (name, measured, predicted) in &self.stages {
            let (predicted, ratio) = match predicted {
                Some(seconds) => (format!("{:.1}", 1e3 * seconds), format!("{:.2}", measured / seconds)),
                None => ("-".into(), "-".into()),
            };
            let _ = writeln!(text, "{name:<12} {:>12.1} {predicted:>12} {ratio:>12}", 1e3 * measured);
        }
        let _ = writeln!(text, "\n{}", self.note());
        text.push_str("--- up to here ---\n");
        text
    }

    /// Where the predictions come from.
    fn note(&self) -> String {
        let predictor = match self.predictor {
            Ok(predictor) => predictor,
            Err(why) => return format!("There is no prediction: {why}."),
        };
        let GpuSpec { name, bandwidth, .. } = predictor.gpu();
        let row = match predictor.gpu().is_listed() {
            true => format!("for {}, as listed in docs/kernels.md", shown(name)),
            false => format!(
                "for a card that is not in docs/kernels.md, from what its driver reports ({:.0} GB/s of memory bandwidth)",
                *bandwidth as f64 / 1e9
            ),
        };
        format!("The prediction is {row}; it was never measured. A ratio above 1 is slower than predicted.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, capability: (u32, u32)) -> DeviceInfo {
        DeviceInfo {
            index: 0,
            name: name.into(),
            uuid: [0; 16],
            capability,
            multiprocessors: 128,
            shared: 99 << 10,
            clock: 2_520_000,
            memory: 24 << 30,
            driver: (13, 0),
        }
    }

    fn shared<'a>(device: &'a DeviceInfo, predictor: Result<&'a Predictor, &'a str>, formats: &'a [String]) -> Shared<'a> {
        Shared {
            device: Some(device),
            machine: "unused",
            release: Some("580.159.04".into()),
            subject: "FLUX.2 [klein] 4B (distilled), 1024x1024, 4 steps, bf16".into(),
            formats,
            kernels: vec!["kl_gemm_bf16_sm80_128x128"],
            memory: (Some(15 << 30), 14 << 30),
            stages: vec![("encode", 0.05, Some(0.025)), ("a step", 0.3, Some(0.25)), ("total", 2.0, None)],
            predictor,
        }
    }

    #[test]
    fn figures_stand_next_to_predictions() {
        let (device, formats) = (device("NVIDIA GeForce RTX 4090", (8, 9)), ["all bf16".to_owned()]);
        let gpu = GpuSpec::named(&device.name).unwrap();
        let predictor = Predictor::new(gpu, gpu.arch()).unwrap();
        let block = shared(&device, Ok(&predictor), &formats).block();
        let cells = |name: &str| {
            let line = block.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {block}"));
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(cells("encode"), ["50.0", "25.0", "2.00"]);
        assert_eq!(cells("a step"), ["300.0", "250.0", "1.20"]);
        assert_eq!(cells("total"), ["2000.0", "-", "-"]);
        for line in [
            "card         NVIDIA GeForce RTX 4090",
            "             compute capability 8.9, 128 SMs, 2.520 GHz at most",
            "driver       580.159.04, CUDA 13.0",
            "memory       15.0 GiB measured, 14.0 GiB planned",
        ] {
            assert!(block.lines().any(|l| l == line), "{line}: {block}");
        }
        assert!(block.contains("for GeForce RTX 4090, as listed in docs/kernels.md; it was never measured"), "{block}");
    }

    #[test]
    fn what_is_not_known_is_said() {
        let (device, formats) = (device("NVIDIA Q\u{1b}[2J", (8, 9)), []);
        let gpu = GpuSpec::of_device(&device, Some(700_000_000_000)).unwrap();
        let predictor = Predictor::new(&gpu, gpu.arch()).unwrap();
        let block = Shared { release: None, ..shared(&device, Ok(&predictor), &formats) }.block();
        assert!(block.contains("a card that is not in docs/kernels.md, from what its driver reports (700 GB/s"), "{block}");
        assert!(block.contains("\ndriver       release unknown, CUDA 13.0\n") && !block.contains('\u{1b}'), "{block}");
        let block = shared(&device, Err("nobody knows"), &formats).block();
        assert!(block.contains("\nThere is no prediction: nobody knows.\n"), "{block}");
        let block =
            Shared { device: None, machine: "8 threads", memory: (None, 1 << 30), ..shared(&device, Err("x"), &formats) }.block();
        assert!(block.contains("\ncpu          8 threads\n") && block.contains("\nmemory       1.0 GiB planned\n"), "{block}");
        assert!(!block.contains("driver"), "{block}");
    }
}
