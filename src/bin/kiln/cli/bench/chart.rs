//! Draws results in the JSON format of `kiln bench`, from this run or from a file.

mod roofline;
mod stages;
mod svg;

use kiln::error::{Error, Result};
use kiln::read_file;
use kiln::text::shown_line;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The size limit for result files. Other programs write unchecked JSON of a few kilobytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Results that can be drawn. `bench/README.md` describes these fields.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Results {
    #[serde(alias = "pictures")] // in files that older versions wrote
    Images(Images),
    Kernels(Kernels),
    #[serde(rename = "beside")]
    Engines(Engines),
}

#[derive(Deserialize)]
struct Images {
    kiln: String,
    model: String,
    machine: String,
    precision: String,
    width: usize,
    height: usize,
    steps: usize,
    cold_s: Times,
    warm_s: Vec<Times>,
}

/// Results of other engines.
#[derive(Deserialize)]
struct Engines {
    machine: String,
    width: usize,
    height: usize,
    steps: usize,
    engines: Vec<Engine>,
}

#[derive(Deserialize)]
struct Engine {
    name: String,
    images_s: Vec<Times>,
}

/// The known seconds of an image.
#[derive(Deserialize)]
struct Times {
    open: Option<f64>,
    load: Option<f64>,
    encode: Option<f64>,
    references: Option<f64>,
    denoise: Option<f64>,
    decode: Option<f64>,
    png: Option<f64>,
    total: f64,
}

impl Times {
    fn stages(&self) -> impl Iterator<Item = f64> {
        [self.open, self.load, self.encode, self.references, self.denoise, self.decode, self.png].into_iter().flatten()
    }

    /// The time between stages.
    fn rest(&self) -> f64 {
        (self.total - self.stages().sum::<f64>()).max(0.0)
    }

    /// The length of the bar. Overlapping stages are longer than the total.
    fn sum(&self) -> f64 {
        self.stages().sum::<f64>() + self.rest()
    }

    fn is_sound(&self) -> bool {
        // A day is more than any image takes, and a chart of it still has sensible numbers.
        let sound = |seconds: f64| (0.0..86_400.0).contains(&seconds);
        self.stages().all(sound) && sound(self.total) && self.total > 0.0
    }
}

#[derive(Deserialize)]
struct Kernels {
    kiln: String,
    machine: String,
    precision: String,
    scale: String,
    tensor_flops: Option<f64>,
    tensor_flops_e4m3: Option<f64>,
    tensor_flops_e2m1: Option<f64>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    op: String,
    shape: String,
    format: Option<String>,
    flops: u64,
    #[serde(default)]
    flops_e4m3: u64,
    #[serde(default)]
    flops_e2m1: u64,
    bytes: u64,
    median_s: f64,
    of_copy: Option<f64>,
    of_tensor_cores: Option<f64>,
    copy_seconds: Option<Vec<f64>>,
}

impl Row {
    fn is_sound(&self) -> bool {
        let positive = |value: f64| value > 0.0 && value.is_finite();
        let shares = [self.of_copy, self.of_tensor_cores].into_iter().flatten();
        positive(self.median_s)
            && shares.into_iter().all(|share| (0.0..1e3).contains(&share))
            && self.copy_seconds.iter().flatten().all(|seconds| positive(*seconds))
    }
}

impl Results {
    fn is_sound(&self) -> bool {
        match self {
            Self::Images(own) => own.cold_s.is_sound() && own.warm_s.iter().all(Times::is_sound),
            Self::Engines(other) => other.engines.iter().flat_map(|engine| &engine.images_s).all(Times::is_sound),
            Self::Kernels(own) => {
                let peaks = [own.tensor_flops, own.tensor_flops_e4m3, own.tensor_flops_e2m1].into_iter().flatten();
                peaks.into_iter().all(|peak| peak > 0.0 && peak.is_finite()) && own.rows.iter().all(Row::is_sound)
            }
        }
    }
}

/// Recorded results.
pub struct Recorded {
    path: PathBuf,
    results: Results,
}

// Messages need only the path.
impl std::fmt::Debug for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Recorded").field(&self.path).finish()
    }
}

impl Recorded {
    /// Reads a file of `kiln bench --json`, or results of other engines.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_file(path, MAX_FILE_BYTES).map_err(|source| Error::read(path, source))?;
        let refused = |what: String| Error::bad_file(path, "no benchmark results", shown_line(&what));
        let results: Results = serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))?;
        if !results.is_sound() {
            return Err(refused("it has impossible times or rates".into()));
        }
        Ok(Self { path: path.into(), results })
    }

    /// Converts the results to results of other engines. Images of kiln are named after the file.
    fn engines(self) -> Result<Engines> {
        match self.results {
            Results::Engines(engines) => Ok(engines),
            Results::Images(Images { machine, width, height, steps, warm_s, .. }) => {
                let name = self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                Ok(Engines { machine, width, height, steps, engines: vec![Engine { name, images_s: warm_s }] })
            }
            Results::Kernels(_) => Err(Error::bad_file(&self.path, "no image results", "it has kernel results")),
        }
    }
}

/// Draws the results of this run from its JSON report.
pub fn draw(report: &impl Serialize, compared: Vec<Recorded>) -> Result<String> {
    let json = |error: serde_json::Error| Error::Op { op: "svg", what: error.to_string() };
    let own = serde_json::from_value(serde_json::to_value(report).map_err(json)?).map_err(json)?;
    draw_results(own, compared)
}

/// Draws recorded results.
pub fn draw_recorded(own: Recorded, compared: Vec<Recorded>) -> Result<String> {
    if let (Results::Engines(_), path) = (&own.results, &own.path) {
        return Err(Error::bad_file(path, "no kiln results", "it has results of other engines, which only --compare takes"));
    }
    draw_results(own.results, compared)
}

fn draw_results(own: Results, compared: Vec<Recorded>) -> Result<String> {
    match own {
        Results::Kernels(own) => Ok(roofline::draw(&own)),
        Results::Images(own) => {
            let mut others = Vec::with_capacity(compared.len());
            for recorded in compared {
                let path = recorded.path.clone();
                let other = recorded.engines()?;
                let of = |width: usize, height: usize, steps: usize| format!("{width}x{height} in {steps} steps");
                if (other.width, other.height, other.steps) != (own.width, own.height, own.steps) {
                    let (theirs, ours) = (of(other.width, other.height, other.steps), of(own.width, own.height, own.steps));
                    return Err(Error::bad_file(&path, "other images", format!("it has {theirs}, these are {ours}")));
                }
                others.push(other);
            }
            Ok(stages::draw(&own, &others))
        }
        Results::Engines(_) => Err(Error::Op { op: "svg", what: "results of other engines alone".into() }),
    }
}
