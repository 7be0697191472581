//! Images as stacked bars of their stages: the cold image, then warm images of kiln and of other engines.

use super::svg::{Anchor, Canvas, WIDTH, cut, ticks, width_of};
use super::{Engines, Images, Times};
use kiln::text::grouped;

/// The x coordinates of the bars. Labels are on the left, totals on the right.
const LEFT: f64 = 196.0;
const RIGHT: f64 = WIDTH - 150.0;
const BAR: f64 = 28.0;
const PITCH: f64 = 46.0;
/// A narrower piece of a bar could not be seen.
const NARROWEST: f64 = 0.5;

/// Reads the seconds of one stage.
type Stage = fn(&Times) -> Option<f64>;

/// Stages in the order of time, with their names in the table and in the style. Time that an engine does not assign to a stage is `rest`.
const STAGES: [(&str, Stage); 8] = [
    ("open", |t| t.open),
    ("load", |t| t.load),
    ("encode", |t| t.encode),
    ("references", |t| t.references),
    ("denoise", |t| t.denoise),
    ("decode", |t| t.decode),
    ("png", |t| t.png),
    ("rest", |t| Some(t.rest())),
];

/// A bar with its name, a caption, and the times of one image.
struct Bar<'a> {
    name: String,
    about: String,
    times: &'a Times,
    /// The shortest and the longest total, if there are several images.
    range: Option<(f64, f64)>,
}

impl<'a> Bar<'a> {
    /// The image with the median total of several. Medians of the stages would not add up to it.
    fn of_median(name: String, about: impl FnOnce(f64) -> String, images: &'a [Times]) -> Option<Self> {
        let mut sorted: Vec<&Times> = images.iter().collect();
        sorted.sort_by(|a, b| a.total.total_cmp(&b.total));
        let times = *sorted.get(sorted.len().checked_sub(1)? / 2)?;
        let range = (sorted.len() > 1).then(|| (sorted[0].total, sorted[sorted.len() - 1].total));
        Some(Self { name, about: about(times.total), times, range })
    }
}

/// Milliseconds with as many digits as are worth reading.
fn ms(seconds: f64) -> String {
    match 1e3 * seconds {
        small if small < 10.0 => format!("{small:.1}"),
        other => grouped(other.round() as u64),
    }
}

/// Draws bars below a heading on an axis of their own. Returns where they end.
fn panel(canvas: &mut Canvas, top: f64, heading: &str, bars: &[Bar<'_>]) -> f64 {
    canvas.text(LEFT, top, "head", Anchor::Start, heading);
    let longest = bars.iter().flat_map(|bar| [bar.times.total, bar.times.sum()]).fold(0.0, f64::max);
    let ticks = ticks(1e3 * longest, 5);
    let most = ticks.last().copied().unwrap_or(1.0) / 1e3;
    let x = |seconds: f64| LEFT + (RIGHT - LEFT) * seconds / most;
    let (first, bottom) = (top + 14.0, top + 14.0 + PITCH * bars.len() as f64);
    for tick in &ticks {
        let at = x(tick / 1e3);
        canvas.line(&[(at, first), (at, bottom)], if *tick == 0.0 { "axis" } else { "grid" });
        let whole = ticks.iter().all(|tick| tick.fract() == 0.0);
        let label = if whole { grouped(*tick as u64) } else { format!("{tick:.1}") };
        canvas.text(at, bottom + 16.0, "dim", Anchor::Middle, &label);
    }
    canvas.text(RIGHT + 30.0, bottom + 16.0, "dim", Anchor::Start, "milliseconds");
    for (i, bar) in bars.iter().enumerate() {
        let y = first + PITCH * i as f64 + (PITCH - BAR) / 2.0;
        canvas.text(LEFT - 12.0, y + 11.0, "head", Anchor::End, &cut(&bar.name, LEFT - 20.0));
        canvas.text(LEFT - 12.0, y + 26.0, "dim", Anchor::End, &cut(&bar.about, LEFT - 20.0));
        let mut from = 0.0;
        for (stage, of) in STAGES {
            let seconds = of(bar.times).unwrap_or(0.0);
            let (start, width) = (x(from), x(from + seconds) - x(from));
            from += seconds;
            if width < NARROWEST {
                continue;
            }
            canvas.rect(start, y, (width, BAR), stage, &format!("{stage}: {} ms", ms(seconds)));
            let label = ms(seconds);
            if width_of(&label) + 8.0 <= width {
                let class = match stage {
                    "denoise" | "png" | "open" => "inside",
                    // This piece is dark on dark pages.
                    "rest" => "",
                    _ => "dark",
                };
                canvas.text(start + width / 2.0, y + BAR / 2.0 + 4.5, class, Anchor::Middle, &label);
            }
        }
        let end = x(from.max(bar.times.total)) + 8.0;
        canvas.text(
            end,
            y + if bar.range.is_some() { 11.0 } else { 18.5 },
            "head halo",
            Anchor::Start,
            &format!("{} ms", ms(bar.times.total)),
        );
        if let Some((least, most)) = bar.range {
            canvas.text(end, y + 26.0, "dim halo", Anchor::Start, &format!("{} to {}", ms(least), ms(most)));
        }
    }
    bottom + 30.0
}

/// Draws the stages that any of the bars shows.
fn legend(canvas: &mut Canvas, y: f64, images: &[&Times]) {
    let mut x = LEFT;
    for (stage, of) in STAGES.iter().filter(|(_, of)| images.iter().any(|times| of(times).is_some_and(|seconds| seconds > 0.0))) {
        let shown: f64 = images.iter().filter_map(|times| of(times)).sum();
        canvas.rect(x, y - 9.0, (10.0, 10.0), stage, &format!("{stage}: {} ms in all bars", ms(shown)));
        canvas.text(x + 15.0, y, "", Anchor::Start, stage);
        x += 15.0 + width_of(stage) + 16.0;
    }
}

/// The chart.
pub fn draw(own: &Images, compared: &[Engines]) -> String {
    let Images { kiln, model, machine, precision, width, height, steps, .. } = own;
    let name = format!("kiln {kiln}");
    let title = format!("{model}, {width}x{height}, {steps} steps, {precision}");
    let cold = Bar { name: name.clone(), about: "with start and loading".into(), times: &own.cold_s, range: None };
    let count = |images: &[Times]| match images.len() {
        1 => "one image".to_owned(),
        n => format!("median of {n}"),
    };
    let mut warm: Vec<Bar<'_>> = Bar::of_median(name, |_| count(&own.warm_s), &own.warm_s).into_iter().collect();
    let reference = warm.first().map(|bar| bar.times.total);
    for Engines { machine: other, engines, .. } in compared {
        for engine in engines {
            // Times of another machine are not to be compared.
            let here = reference.filter(|_| machine.contains(other.as_str()));
            let about = |total: f64| match here {
                Some(own) => format!("{}, {:.2} x kiln's", count(&engine.images_s), total / own),
                None => format!("{}, {other}", count(&engine.images_s)),
            };
            warm.extend(Bar::of_median(engine.name.clone(), about, &engine.images_s));
        }
    }
    let mut canvas = Canvas::default();
    canvas.text(24.0, 32.0, "title", Anchor::Start, &cut(&title, WIDTH * 0.72));
    canvas.text(24.0, 52.0, "dim", Anchor::Start, &cut(&format!("prompt to PNG on {machine}; less is better"), WIDTH - 48.0));
    let images: Vec<&Times> = std::iter::once(cold.times).chain(warm.iter().map(|bar| bar.times)).collect();
    legend(&mut canvas, 80.0, &images);
    let mut end = panel(&mut canvas, 112.0, "first image of the process", &[cold]);
    if !warm.is_empty() {
        end = panel(&mut canvas, end + 26.0, "the images after it", &warm);
    }
    let summary: Vec<String> = warm.iter().map(|bar| format!("{}: {} ms", bar.name, ms(bar.times.total))).collect();
    let description = format!("first image: {} ms; the images after it: {}", ms(own.cold_s.total), summary.join(", "));
    canvas.finish(end + 10.0, &title, &description)
}
