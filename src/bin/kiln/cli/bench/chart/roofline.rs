//! Single ops against their ceilings: a roofline of ops that multiply, and the share of its ceiling that each op reaches.

use super::svg::{Anchor, Canvas, WIDTH, cut};
use super::{Kernels, Row};
use kiln::text::grouped;

/// The box of the roofline plot.
const LEFT: f64 = 76.0;
const RIGHT: f64 = WIDTH - 30.0;
const TOP: f64 = 96.0;
const BOTTOM: f64 = 356.0;
/// The x coordinates of 0 % and 100 % in the bar chart.
const BARS: f64 = 452.0;
const FULL: f64 = WIDTH - 172.0;
const PITCH: f64 = 19.0;

/// A rate with its unit.
fn rate(value: f64, unit: &str) -> String {
    match value {
        large if large >= 1e12 => format!("{:.1} T{unit}", large / 1e12),
        other => format!("{:.1} G{unit}", other / 1e9),
    }
}

impl Row {
    /// The share of its ceiling, and the class that draws it.
    fn share(&self) -> Option<(f64, &'static str)> {
        self.of_copy.map(|share| (share, "copy")).or(self.of_tensor_cores.map(|share| (share, "peak")))
    }

    /// The achieved rate, in the unit of its ceiling.
    fn rate(&self) -> String {
        match (self.of_copy, self.flops) {
            (None, flops) if flops > 0 => rate(flops as f64 / self.median_s, "FLOP/s"),
            _ => rate(self.bytes as f64 / self.median_s, "B/s"),
        }
    }

    /// Bytes per second of the copy that alternated with this row.
    fn copy_rate(&self) -> Option<f64> {
        let seconds = self.copy_seconds.as_deref().filter(|seconds| !seconds.is_empty())?;
        Some(self.bytes as f64 / kiln::microbench::median(seconds))
    }

    fn name(&self) -> String {
        format!("{} {} {}", self.op, self.shape, self.format.as_deref().unwrap_or_default()).trim_end().to_owned()
    }
}

/// The powers of ten that values lie between.
fn decades(values: impl Iterator<Item = f64>) -> Option<(i32, i32)> {
    let (least, most) = values.fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), v| (least.min(v), most.max(v)));
    (most > 0.0 && least.is_finite()).then(|| (least.log10().floor() as i32, (most.log10() + 1e-9).ceil() as i32))
}

/// Draws ops that multiply by arithmetic intensity, below the memory bandwidth and the tensor core peaks. Returns false if there are none.
fn roofline(canvas: &mut Canvas, own: &Kernels) -> bool {
    let points: Vec<(&Row, f64, f64)> = own
        .rows
        .iter()
        .filter(|row| row.flops > 0 && row.bytes > 0)
        .map(|row| (row, row.flops as f64 / row.bytes as f64, row.flops as f64 / row.median_s))
        .collect();
    let bandwidth = own.rows.iter().filter_map(Row::copy_rate).reduce(f64::max);
    let peaks: Vec<(&str, f64)> = [("bf16", own.tensor_flops), ("e4m3", own.tensor_flops_e4m3), ("e2m1", own.tensor_flops_e2m1)]
        .into_iter()
        .filter_map(|(name, peak)| Some((name, peak?)))
        .collect();
    let xs = decades(points.iter().map(|(_, x, _)| *x));
    let ys = decades(points.iter().map(|(_, _, y)| *y).chain(peaks.iter().map(|(_, peak)| *peak)));
    let (Some((first, last)), Some((low, high))) = (xs, ys) else { return false };
    let x = |value: f64| LEFT + (RIGHT - LEFT) * (value.log10() - f64::from(first)) / f64::from((last - first).max(1));
    let y = |value: f64| BOTTOM - (BOTTOM - TOP) * (value.log10() - f64::from(low)) / f64::from((high - low).max(1));
    for decade in first..=first + (last - first).max(1) {
        let at = x(10f64.powi(decade));
        canvas.line(&[(at, TOP), (at, BOTTOM)], "grid");
        canvas.text(at, BOTTOM + 17.0, "dim", Anchor::Middle, &plain(decade));
    }
    for decade in low..=low + (high - low).max(1) {
        let at = y(10f64.powi(decade));
        canvas.line(&[(LEFT, at), (RIGHT, at)], "grid");
        canvas.text(LEFT - 8.0, at + 4.0, "dim", Anchor::End, &plain(decade - 12));
    }
    canvas.text((LEFT + RIGHT) / 2.0, BOTTOM + 36.0, "dim", Anchor::Middle, "arithmetic intensity, FLOP per byte");
    canvas.text(LEFT - 52.0, TOP - 12.0, "dim", Anchor::Start, "TFLOP/s");
    let (left, floor) = (10f64.powi(first), 10f64.powi(low));
    let right = 10f64.powi(first + (last - first).max(1));
    for (name, peak) in &peaks {
        // A roof begins where memory allows it, or at the edge.
        let ridge = bandwidth.map_or(left, |bandwidth| peak / bandwidth).clamp(left, right);
        canvas.line(&[(x(ridge), y(*peak)), (RIGHT, y(*peak))], "roof");
        canvas.text(RIGHT, y(*peak) - 6.0, "dim", Anchor::End, &format!("{name} peak, {}", rate(*peak, "FLOP/s")));
    }
    if let Some(bandwidth) = bandwidth {
        let top = peaks.iter().map(|(_, peak)| *peak).fold(0.0, f64::max);
        let top = if top > 0.0 { top } else { 10f64.powi(high) };
        // The slope enters the plot where it leaves the axis below or the one on the left.
        let (from, to) = ((floor / bandwidth).max(left), (top / bandwidth).min(right));
        if from < to {
            canvas.line(&[(x(from), y(from * bandwidth)), (x(to), y(to * bandwidth))], "roof");
            // No op is above the slope, so there is room for its name.
            let middle = (from * to).sqrt();
            let label = format!("copy, {}", rate(bandwidth, "B/s"));
            canvas.text(x(middle) - 12.0, y(middle * bandwidth) - 6.0, "dim", Anchor::End, &label);
        }
    }
    for (row, intensity, achieved) in points {
        let plain = row.flops_e4m3 == 0 && row.flops_e2m1 == 0;
        let class = row.share().map_or("rest", |(_, class)| class);
        let title = format!("{}: {:.0} FLOP per byte, {}", row.name(), intensity, rate(achieved, "FLOP/s"));
        canvas.point(x(intensity), y(achieved), plain, class, &title);
    }
    true
}

/// A power of ten as people write it.
fn plain(decade: i32) -> String {
    match decade {
        0..=5 => grouped(10u64.pow(decade as u32)),
        -3..0 => format!("{:.*}", decade.unsigned_abs() as usize, 10f64.powi(decade)),
        _ => format!("1e{decade}"),
    }
}

/// Explains colors and shapes.
fn legend(canvas: &mut Canvas, y: f64, own: &Kernels) {
    let mut x = 24.0;
    let has = |class: &str| own.rows.iter().any(|row| row.share().is_some_and(|(_, of)| of == class));
    for (class, text) in
        [("copy", "bound by memory, against a copy of as many bytes"), ("peak", "against the peak of the tensor cores")]
    {
        if has(class) {
            canvas.rect(x, y - 9.0, (10.0, 10.0), class, text);
            canvas.text(x + 15.0, y, "", Anchor::Start, text);
            x += 15.0 + 6.2 * text.len() as f64 + 22.0;
        }
    }
    if own.rows.iter().any(|row| row.flops_e4m3 > 0 || row.flops_e2m1 > 0) {
        canvas.text(x, y, "dim", Anchor::Start, "square: FP8 or NVFP4");
    }
}

/// The chart.
pub fn draw(own: &Kernels) -> String {
    let title = format!("kiln {}, kernels: {}, {}", own.kiln, own.scale, own.precision);
    let mut canvas = Canvas::default();
    canvas.text(24.0, 30.0, "title", Anchor::Start, &cut(&title, WIDTH * 0.72));
    canvas.text(24.0, 50.0, "dim", Anchor::Start, &cut(&own.machine, WIDTH - 48.0));
    let top = if roofline(&mut canvas, own) { BOTTOM + 84.0 } else { 92.0 };
    legend(&mut canvas, top - 12.0, own);
    let (first, bottom) = (top + 28.0, top + 28.0 + PITCH * own.rows.len() as f64);
    for percent in [0, 25, 50, 75, 100] {
        let x = BARS + (FULL - BARS) * f64::from(percent) / 100.0;
        canvas.line(&[(x, first - 2.0), (x, bottom)], if percent == 0 { "axis" } else { "grid" });
        canvas.text(x, first - 8.0, "dim", Anchor::Middle, &format!("{percent}"));
    }
    canvas.text(BARS - 18.0, first - 8.0, "dim", Anchor::End, "share of the ceiling, %");
    for (i, row) in own.rows.iter().enumerate() {
        let (y, base) = (first + PITCH * i as f64 + 2.5, first + PITCH * i as f64 + 13.5);
        canvas.text(24.0, base, "", Anchor::Start, &cut(&row.op, 132.0));
        canvas.text(160.0, base, "dim", Anchor::Start, &cut(&row.shape, 244.0));
        canvas.text(BARS - 10.0, base, "dim", Anchor::End, row.format.as_deref().unwrap_or_default());
        if let Some((share, class)) = row.share() {
            // A row may be a little faster than its copy.
            let width = (FULL - BARS) * share.clamp(0.0, 1.04);
            let title = format!("{}: {:.1} %, {}", row.name(), 100.0 * share, row.rate());
            canvas.rect(BARS, y, (width.max(0.5), PITCH - 5.0), class, &title);
            canvas.text(FULL + 52.0, base, "", Anchor::End, &format!("{:.0} %", 100.0 * share));
        }
        canvas.text(WIDTH - 24.0, base, "dim", Anchor::End, &row.rate());
    }
    let description = format!("share of the ceiling that each of {} ops reaches", own.rows.len());
    canvas.finish(bottom + 20.0, &title, &description)
}
