//! A minimal SVG writer for charts. Text stays text, and colors follow the reader's light or dark scheme. GitHub shows charts of this
//! width without scaling.

use std::fmt::Write as _;

/// Width of a chart in pixels.
pub const WIDTH: f64 = 860.0;

/// Colors and sizes of the classes that charts use. The hues are Okabe and Ito's, which color-blind readers can tell apart. Grays
/// mark everything but the work itself.
const STYLE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.head{font-weight:600}.dim{fill:#59636e}.inside{fill:#fff}.dark{fill:#1f2328}
.halo{paint-order:stroke;stroke:#fff;stroke-width:3px}
.end{text-anchor:end}.middle{text-anchor:middle}
.page{fill:#fff}.grid{stroke:#d1d9e0;stroke-width:1}.axis{stroke:#818b98;stroke-width:1}.roof{stroke:#59636e;stroke-width:1.5;fill:none}
.open{fill:#818b98}.load{fill:#afb8c1}.encode{fill:#56b4e9}.references{fill:#cc79a7}.denoise{fill:#0072b2}.decode{fill:#e69f00}
.png{fill:#009e73}.rest{fill:#d1d9e0}.copy{fill:#0072b2}.peak{fill:#e69f00}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.dim{fill:#9198a1}.inside{fill:#fff}.dark{fill:#1f2328}
.page{fill:#0d1117}.halo{stroke:#0d1117}.grid{stroke:#2a313a}.axis{stroke:#656c76}.roof{stroke:#9198a1}.denoise,.copy{fill:#2b8cc9}.rest{fill:#3d444d}
}";

/// A drawing, from top to bottom.
#[derive(Default)]
pub struct Canvas {
    body: String,
}

/// Where a text stands relative to its point.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// Escapes markup, and replaces characters that XML forbids.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The estimated width of a text at 12 pixels. Fonts differ, so it errs on the wide side.
pub fn width_of(text: &str) -> f64 {
    text.chars().map(|c| if c.is_ascii() { 6.4 } else { 12.0 }).sum()
}

/// Shortens a text to at most `pixels`.
pub fn cut(text: &str, pixels: f64) -> String {
    if width_of(text) <= pixels {
        return text.to_owned();
    }
    let mut width = width_of(".") * 2.0;
    let kept = text.chars().take_while(|c| {
        width += width_of(c.encode_utf8(&mut [0; 4]));
        width <= pixels
    });
    kept.collect::<String>().trim_end().to_owned() + "…"
}

/// Formats a coordinate. Tenths of a pixel are enough, and keep files small.
fn at(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

impl Canvas {
    /// Writes a text in a class of the style.
    pub fn text(&mut self, x: f64, y: f64, class: &str, anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " middle",
            Anchor::End => " end",
        };
        let class = format!("{class}{anchor}");
        let class = if class.is_empty() { class } else { format!(" class=\"{}\"", class.trim_start()) };
        let _ = writeln!(self.body, "<text x=\"{}\" y=\"{}\"{class}>{}</text>", at(x), at(y), escaped(text));
    }

    /// Draws a rectangle; `title` is shown when the pointer is over it.
    pub fn rect(&mut self, x: f64, y: f64, (width, height): (f64, f64), class: &str, title: &str) {
        let place = format!("x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"", at(x), at(y), at(width), at(height));
        let _ = writeln!(self.body, "<rect {place} class=\"{class}\"><title>{}</title></rect>", escaped(title));
    }

    /// Draws a point, round or square.
    pub fn point(&mut self, x: f64, y: f64, round: bool, class: &str, title: &str) {
        let shape = match round {
            true => format!("circle cx=\"{}\" cy=\"{}\" r=\"4\"", at(x), at(y)),
            false => format!("rect x=\"{}\" y=\"{}\" width=\"7\" height=\"7\"", at(x - 3.5), at(y - 3.5)),
        };
        let name = if round { "circle" } else { "rect" };
        let _ = writeln!(self.body, "<{shape} class=\"{class}\"><title>{}</title></{name}>", escaped(title));
    }

    /// Draws a line through points.
    pub fn line(&mut self, points: &[(f64, f64)], class: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{},{}", at(*x), at(*y))).collect();
        let _ = writeln!(self.body, "<polyline points=\"{}\" class=\"{class}\"/>", points.join(" "));
    }

    /// The file: the drawing on a page of this height, with a title and a description for screen readers.
    pub fn finish(self, height: f64, title: &str, description: &str) -> String {
        let (width, height) = (at(WIDTH), at(height));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             role=\"img\">\n<title>{}</title>\n<desc>{}</desc>\n<style>{STYLE}</style>\n\
             <rect width=\"{width}\" height=\"{height}\" class=\"page\"/>\n{}</svg>\n",
            escaped(title),
            escaped(description),
            self.body
        )
    }
}

/// Round numbers from 0 up to at least `most`, about `count` of them.
pub fn ticks(most: f64, count: usize) -> Vec<f64> {
    let rough = most / count as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough * 0.999).unwrap_or(rough);
    (0..).map(|i| f64::from(i) * step).take_while(|tick| *tick < most + 0.999 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_end() {
        for (most, count, want) in [
            (2.2, 5, vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5]),
            (0.31, 4, vec![0.0, 0.1, 0.2, 0.3, 0.4]),
            (100.0, 5, vec![0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
            (7e-9, 4, vec![0.0, 2e-9, 4e-9, 6e-9, 8e-9]),
        ] {
            let found = ticks(most, count);
            assert_eq!(found.len(), want.len(), "{most}: {found:?}");
            assert!(found.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6 * most), "{most}: {found:?}");
        }
    }

    #[test]
    fn texts_are_cut_and_escaped() {
        assert_eq!(escaped("<a href='x'>&\"\u{1b}\u{ffff}é"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\u{fffd}\u{fffd}é");
        assert_eq!(cut("short", 100.0), "short");
        let long = cut("a name that is far too long to be shown", 100.0);
        assert!(long.ends_with('…') && width_of(&long) <= 105.0, "{long}");
    }
}
