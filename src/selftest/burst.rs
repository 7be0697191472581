//! How fast GEMMs and attention are at klein's shapes, compared with the nominal rate of the tensor cores. These rates are not for
//! publication: they are measured in a moment, at the clocks of that moment.

use super::{Check, Outcome, check};
use crate::backend::cuda::Cuda;
use crate::backend::{Backend, OpKind};
use crate::error::Result;
use crate::microbench::{Peaks, Protocol, Row, Scale, rows};
use crate::tensor::{DType, Precision};
use std::rc::Rc;
use std::time::Duration;

const PROTOCOL: Protocol = Protocol { rounds: 5, batch: Duration::from_millis(20), rotated: 0 };

/// Whether a row is the fused projection of a single block, its output layer, or attention: these take most of the time of an image.
fn is_wanted(row: &Row) -> bool {
    let shape = row.shape.as_str();
    matches!(
        (row.op, shape),
        (OpKind::QkvMlp, "4608x27648x3072")
            | (OpKind::LinearGateResidual, "4608x3072x12288")
            | (OpKind::Attention, "4608 tokens, 24 heads of 128")
    )
}

fn measure(cuda: &mut Cuda, row: &Row) -> Result<Outcome> {
    let peak = |dtype| cuda.device().tensor_flops(dtype);
    let e2m1 = peak(DType::E2m1);
    // The block-scaled MMA multiplies e4m3 at half the e2m1 rate. `mma.sync` without scales may be slower.
    let e4m3 = if cuda.gemm_formats().w4a4 { e2m1.map(|flops| flops / 2.0) } else { peak(DType::E4m3) };
    let peaks = Peaks { bf16: peak(DType::Bf16), e4m3, e2m1 };
    let figure = row.measure(cuda, &PROTOCOL)?.held_to(peaks);
    let rate = format!("{:.0} TFLOP/s", figure.work.flops as f64 / figure.median_s / 1e12);
    let share = figure.of_tensor_cores.map(|share| format!(", {:.0} % of nominal", 100.0 * share));
    Ok(Outcome::passed(rate + &share.unwrap_or_default()))
}

/// One check for each rate. It fails only if the rate cannot be measured.
pub fn checks(cuda: &Cuda) -> Result<Vec<Check>> {
    let rows = rows(Scale::Klein, Precision::Bf16, cuda.gemm_formats())?;
    // Weights that are expanded count as bf16 GEMMs.
    let rows = rows.into_iter().filter(|row| is_wanted(row) && !["W8A16", "W4A16"].contains(&row.format));
    let named = |row: Row| {
        let (name, row) = (format!("burst {} {} {}", row.op.name(), row.shape, row.format), Rc::new(row));
        check(name, move |cuda| measure(cuda, &row))
    };
    Ok(rows.map(named).collect())
}
