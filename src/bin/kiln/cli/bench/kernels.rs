//! Times single ops and compares their rates with the machine's peak.

use super::super::args::RunArgs;
use super::super::device::select_backend;
use crate::terminal::Terminal;
use kiln::device::{DeviceInfo, OpKind};
use kiln::error::{Error, Result};
use kiln::microbench::{Figure, Peaks, Protocol, Scale, rows};
use kiln::selftest::Records;
use kiln::{DType, Precision};
use serde::Serialize;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The results of a measurement. `bench/README.md` describes its JSON fields.
#[derive(Serialize)]
pub struct Report {
    kiln: &'static str,
    kind: &'static str,
    backend: &'static str,
    machine: String,
    precision: &'static str,
    scale: &'static str,
    /// Peak rates of the tensor cores at their highest clock, if rows are compared with them.
    #[serde(flatten)]
    peaks: Peaks,
    /// How these peaks were derived, for display.
    #[serde(skip)]
    ceilings: Vec<String>,
    rounds: usize,
    rows: Vec<Figure>,
}

/// Refuses a filter that matches no op.
pub fn check(filter: &str) -> Result<()> {
    let names: Vec<_> = OpKind::ALL.iter().map(|op| op.name()).collect();
    if names.iter().any(|op| op.contains(filter)) {
        return Ok(());
    }
    Err(Error::usage(format!("no op has `{filter}` in its name"), format!("the ops are {}", names.join(", "))))
}

/// Times every op with `filter` in its name.
pub fn measure(
    filter: &str,
    quick: bool,
    run: &RunArgs,
    records: &Records,
    stop: &Arc<AtomicBool>,
    terminal: &Terminal,
) -> Result<Report> {
    let mut selected = select_backend(run.backend, run.device()?, run.quantized.fp8_accumulate.into(), records, stop)?;
    selected.announce(terminal);
    let precision: Precision = run.quantized.precision.into();
    let (scale, protocol) = match (quick, &selected.device) {
        (true, _) => (Scale::Quick, Protocol::QUICK),
        (false, Some(_)) => (Scale::Klein, Protocol::FULL),
        (false, None) => (Scale::Processor, Protocol::FULL),
    };
    // In f32, GEMMs run on the CUDA cores, so the peak of the tensor cores does not apply.
    let device = selected.device.as_ref().filter(|_| precision == Precision::Bf16);
    let peak = |dtype| device.and_then(|device| device.tensor_flops(dtype));
    let peaks = Peaks { bf16: peak(DType::Bf16), e4m3: peak(DType::E4m3), e2m1: peak(DType::E2m1) };
    let mut figures = Vec::new();
    let formats = selected.backend.gemm_formats();
    for row in rows(scale, precision, formats)?.into_iter().filter(|row| row.op.name().contains(filter)) {
        terminal.say(&format!("timing {} {} {}", row.op.name(), row.shape, row.format));
        figures.push(row.measure(selected.backend.as_mut(), &protocol)?.held_to(peaks));
    }
    let multiplies = |flops: fn(&Figure) -> u64, dtype| figures.iter().any(|figure| flops(figure) > 0).then_some(dtype);
    let quantized = [multiplies(|f| f.work.flops_e4m3, DType::E4m3), multiplies(|f| f.work.flops_e2m1, DType::E2m1)];
    let types = [Some(DType::Bf16)].into_iter().chain(quantized);
    Ok(Report {
        kiln: env!("CARGO_PKG_VERSION"),
        kind: "kernels",
        backend: selected.name,
        precision: precision.name(),
        scale: scale.name(),
        peaks,
        ceilings: types.flatten().filter_map(|dtype| ceiling(device?, dtype)).collect(),
        machine: selected.machine,
        rounds: protocol.rounds,
        rows: figures,
    })
}

/// Describes the peak that GEMMs of a type are compared with.
fn ceiling(device: &DeviceInfo, dtype: DType) -> Option<String> {
    let (flops, per_clock) = (device.tensor_flops(dtype)?, device.tensor_flops_per_clock(dtype)?);
    let (major, minor) = device.capability;
    Some(format!(
        "peak, {}: {:.1} TFLOP/s = {} multiprocessors x {per_clock} FLOP a clock (known of compute {major}.{minor}) x {:.3} GHz",
        dtype.name(),
        flops / 1e12,
        device.multiprocessors,
        f64::from(device.clock) / 1e6
    ))
}

impl Report {
    pub fn table(&self) -> String {
        let mut text = format!("kiln {}, {}, {}, {}, {}\n", self.kiln, self.backend, self.machine, self.scale, self.precision);
        text.push_str("copy: as many bytes read and written, alternating with the row\n");
        self.ceilings.iter().for_each(|line| {
            let _ = writeln!(text, "{line}");
        });
        text.push('\n');
        self.rows.iter().for_each(|figure| {
            let _ = writeln!(text, "{}", figure.line());
        });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_printed_with_its_factors() {
        let name = "NVIDIA H200".into();
        let (index, memory, driver) = (0, 0, (13, 0));
        let device = DeviceInfo {
            index,
            name,
            uuid: [0; 16],
            capability: (9, 0),
            multiprocessors: 132,
            shared: DeviceInfo::SM90_SHARED,
            clock: 1_980_000,
            memory,
            driver,
        };
        for (dtype, peak) in [(DType::Bf16, "bf16: 1070.5"), (DType::E4m3, "e4m3: 2141.1")] {
            let per_clock = if dtype == DType::Bf16 { 4096 } else { 8192 };
            let factors = format!("132 multiprocessors x {per_clock} FLOP a clock (known of compute 9.0) x 1.980 GHz");
            assert_eq!(ceiling(&device, dtype), Some(format!("peak, {peak} TFLOP/s = {factors}")));
        }
        assert_eq!(ceiling(&DeviceInfo { capability: (8, 0), ..device.clone() }, DType::E4m3), None);
        assert_eq!(ceiling(&DeviceInfo { capability: (7, 5), ..device }, DType::Bf16), None);
    }
}
