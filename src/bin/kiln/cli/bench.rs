//! `kiln bench`: the time and memory that images take, stage by stage, or the speed of single kernels.

mod chart;
mod images;
mod kernels;
mod share;

use super::args::{ImageOptions, LoraArgs, ModelArgs, PromptArgs, RunArgs, within};
use super::generate::GenerateArgs;
use super::outputs::refuse_same;
use super::request::ImageRequest;
use super::stdout::{DASH, json_line, line_of, print};
use super::trace::TraceFile;
use super::{Process, Subcommand};
use crate::terminal::{Terminal, Verbosity};
use chart::Recorded;
use clap::{Args, Id};
use kiln::error::{Error, Result};
use kiln::locate::Environment;
use kiln::output::{PlannedFile, check_writable, save_new};
use kiln::selftest::Records;
use kiln::text::shown_path;
use kiln::trace;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The default prompt. Prompts are padded to the same length, so the choice does not affect the timing.
const PROMPT: &str = "a red fox in the snow";

/// The end of `kiln bench -h`.
const EXAMPLE: &str = "Example: kiln bench --width 1024 --height 1024 --runs 10";

/// The end of `kiln bench --help`.
const EXAMPLES: &str = "\
Examples:
  kiln bench
      The model, size and steps that `kiln PROMPT` would use: one image cold, five warm.

  kiln bench --model ~/models/FLUX.2-klein-4B --width 1024 --height 1024 --runs 10
  kiln bench \"make it night\" --reference photo.jpg --steps 8
      The flags that decide how long an image takes are the same as in `kiln generate`.

  kiln bench --json | jq .warm_s[].total
  kiln bench --json=times.json
      JSON with every single time: on standard output, or in a new file in addition to the table.

  kiln bench --runs 10 --json=times.json --svg times.svg
  kiln bench --from times.json --svg both.svg --compare diffusers.json
      A chart of the stages. Later, without measuring again, one that includes another engine.

  kiln bench --runs 1 --trace run.json
      A timeline, thread by thread and kernel by kernel, for ui.perfetto.dev.

  kiln bench --model ~/models/FLUX.2-klein-4B --share
      The table, and a block to paste into an issue: card, driver, figures and predictions.

  kiln bench --kernels
  kiln bench --kernels=attention --json=attention.json
      Single ops at klein 4B's shapes: time, rate, share of the ceiling. Needs no model.

Close other programs that use the GPU: they slow kiln down, and kiln counts their memory as well.";

/// These arguments, and all options of an image. clap makes no group of arguments some of which are in a struct of their own.
fn with_image_options(others: &[&'static str]) -> Vec<Id> {
    let options = ImageOptions::augment_args(clap::Command::new(""));
    let ids = options.get_arguments().map(|argument| argument.get_id().clone());
    others.iter().map(|name| Id::from(*name)).chain(ids).collect()
}

/// Benchmark images stage by stage, or single kernels
///
/// kiln loads the model, generates one cold image and several warm ones, and writes none of them. It prints the time of each
/// stage, and the memory that was planned and used. The cold image is the first of this process. The model's files may still be
/// in the page cache.
#[derive(Args, Debug)]
#[command(override_usage = "kiln bench [OPTIONS] [PROMPT]", after_help = EXAMPLE, after_long_help = EXAMPLES)]
#[command(allow_negative_numbers = true)]
pub struct BenchArgs {
    /// What the images show; any prompt takes the same time
    #[command(flatten)]
    pub prompt: PromptArgs,

    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// Time single ops at klein 4B's shapes instead of images
    ///
    /// With NAME, kiln times only ops whose name contains NAME. No model is needed. Each row shows which share of its ceiling an
    /// op reaches. For memory-bound ops the ceiling is a copy of as many bytes in the same run. For GEMM, convolution and
    /// attention on a GPU the ceiling is the peak of the tensor cores. The CPU gets smaller shapes.
    #[arg(
        long,
        value_name = "NAME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with_all = with_image_options(&["PromptArgs", "ModelArgs", "LoraArgs", "runs", "low_memory", "attention", "trace"]),
        help_heading = "Measuring"
    )]
    pub kernels: Option<String>,

    /// Check that every op can be timed; the figures mean nothing
    ///
    /// Use this flag with --kernels. Shapes are tiny, and each op runs in few batches.
    #[arg(long, requires = "kernels", help_heading = "Measuring")]
    pub quick: bool,

    /// Generate this many warm images
    #[arg(long, value_name = "N", value_parser = within(1usize..=1000), default_value = "5", help_heading = "Measuring")]
    pub runs: usize,

    /// Print JSON instead of a table, or write it to a new file
    ///
    /// The JSON has every single time. With FILE, kiln prints the table as well. bench/README.md in the sources describes the fields.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-",
        help_heading = "Measuring"
    )]
    pub json: Option<PathBuf>,

    /// Draw the results to a new SVG file
    ///
    /// The chart shows images stage by stage, or kernels below their ceilings.
    #[arg(long, value_name = "FILE", help_heading = "Measuring")]
    pub svg: Option<PathBuf>,

    /// Add another engine or run to the --svg chart; may be given several times
    ///
    /// FILE comes from tools/bench_beside_diffusers.py or from --json. Size and steps have to be the same.
    #[arg(long, value_name = "FILE", requires = "svg", conflicts_with = "kernels", help_heading = "Measuring")]
    pub compare: Vec<PathBuf>,

    /// Measure nothing, and draw the results of a --json file with --svg
    #[arg(
        long,
        value_name = "FILE",
        requires = "svg",
        conflicts_with_all = with_image_options(&["PromptArgs", "ModelArgs", "LoraArgs", "runs", "kernels", "json", "share", "trace"]),
        help_heading = "Measuring"
    )]
    pub from: Option<PathBuf>,

    /// Time an image for each line `SEED PROMPT` of standard input
    ///
    /// Another program can take turns with kiln this way. The first line of output is the JSON of a cold image, with the prompt
    /// and seed that kiln would use without this flag. Each further line has the times of one image, from prompt to PNG.
    #[arg(
        long,
        conflicts_with_all = ["kernels", "json", "share", "svg", "runs"],
        help_heading = "Measuring"
    )]
    pub on_request: bool,

    /// Keep encoded prompts and images on the GPU, as kiln run does
    ///
    /// Without this flag, each image encodes its prompt, its references and its init image again.
    #[arg(long, conflicts_with_all = ["kernels", "from"], help_heading = "Measuring")]
    pub keep: bool,

    /// Also print a block to paste into an issue
    ///
    /// The block has the card, driver, figures and predictions. It has no paths, no prompt, and no name of the machine or its user.
    #[arg(long, conflicts_with = "kernels", help_heading = "Measuring")]
    pub share: bool,

    /// What the images are made from and how large
    #[command(flatten)]
    pub image: ImageOptions,

    /// Where and how to compute
    #[command(flatten)]
    pub run: RunArgs,
}

impl Subcommand for BenchArgs {
    fn threads(&self) -> Option<usize> {
        self.run.threads
    }

    fn run(self: Box<Self>, Process { environment, signals, out }: Process<'_>) -> Result<()> {
        let run = self.run.clone();
        TraceFile::record(&run, "kiln bench", None, || {
            let request = BenchRequest::new(*self, environment, &mut io::stdin())?;
            let terminal = signals.terminal(request.verbosity);
            bench(request, &signals.stop, &terminal, &mut io::stdin().lock(), out)
        })
    }
}

/// What to measure.
#[derive(Debug)]
pub struct BenchRequest {
    subject: Subject,
    /// The file for JSON, if any; `-` is standard output, where JSON replaces the table.
    json: Option<PathBuf>,
    /// The file for a chart, and the results to compare with in it.
    svg: Option<PathBuf>,
    compare: Vec<Recorded>,
    /// How much to print.
    pub verbosity: Verbosity,
}

/// The subject of a measurement.
#[derive(Debug)]
enum Subject {
    /// A cold image and `runs` warm ones; `share` adds a block to paste.
    Images { subject: Box<images::Measurement>, runs: usize, share: bool },
    /// A cold image, and one for each line of standard input.
    OnRequest(Box<images::Measurement>),
    /// Recorded results to draw.
    Recorded(Box<Recorded>),
    /// The ops whose names contain `filter`, on the backend that `run` selects.
    Kernels { filter: String, quick: bool, run: RunArgs, records: Records },
}

impl BenchRequest {
    /// Checks flags against each other, the environment and the file system.
    pub fn new(args: BenchArgs, environment: Environment, stdin: &mut dyn Read) -> Result<Self> {
        let started = Instant::now();
        let _span = trace::span("read the request");
        let BenchArgs {
            mut prompt,
            model,
            lora,
            kernels,
            quick,
            runs,
            json,
            svg,
            compare,
            from,
            on_request,
            keep,
            share,
            image,
            run,
        } = args;
        let verbosity = run.verbosity();
        if share && json.as_deref() == Some(Path::new(DASH)) {
            let what = "--share adds a block to the table, and --json prints JSON in its place";
            return Err(Error::usage(what, "write --json=FILE to have both"));
        }
        let json_file = json.as_deref().filter(|path| *path != Path::new(DASH));
        check_files(&[(json_file, "--json"), (svg.as_deref(), "--svg"), (run.trace.trace.as_deref(), "--trace")])?;
        if let (Some(_), None, Some(word)) = (&json, json_file, &prompt.prompt)
            && Path::new(word).extension().is_some_and(|extension| extension == "json")
        {
            let file = shown_path(Path::new(word));
            return Err(Error::usage(
                format!("`{file}` would be the prompt, not the file of --json"),
                format!("write --json={file}"),
            ));
        }
        let compare: Vec<Recorded> = compare.iter().map(|path| Recorded::read(path)).collect::<Result<_>>()?;
        let this = |subject| Self { subject, json, svg, compare, verbosity };
        if let Some(path) = from {
            return Ok(this(Subject::Recorded(Box::new(Recorded::read(&path)?))));
        }
        if let Some(filter) = kernels {
            kernels::check(&filter)?;
            let records = Records::below(environment.caches().as_deref());
            return Ok(this(Subject::Kernels { filter, quick, run, records }));
        }
        if prompt.prompt.is_none() && prompt.prompt_file.is_none() {
            prompt.prompt = Some(OsString::from(PROMPT));
        }
        let args = GenerateArgs::without_files(prompt, model, lora, image, None, run);
        let (request, setup) = ImageRequest::from_args(&args, environment, stdin, 0)?;
        let subject = Box::new(images::Measurement { request, setup, started, keep });
        Ok(this(match on_request {
            true => Subject::OnRequest(subject),
            false => Subject::Images { subject, runs, share },
        }))
    }
}

/// Refuses files that cannot be written now rather than after the measurement. Each comes with the flag that names it.
fn check_files(files: &[(Option<&Path>, &str)]) -> Result<()> {
    let files: Vec<(&Path, &str)> = files.iter().filter_map(|(path, flag)| Some(((*path)?, *flag))).collect();
    for (i, (path, flag)) in files.iter().enumerate() {
        files[i + 1..].iter().try_for_each(|(other, name)| refuse_same(path, flag, other, name))?;
        if *path == Path::new(DASH) {
            return Err(Error::usage(format!("{flag} writes a file, not standard output"), "name a file"));
        }
        check_writable(&[PlannedFile { path: (*path).into(), bytes: 0 }], false).map_err(without_force_hint)?;
    }
    Ok(())
}

/// Runs the measurement and writes a table or JSON to `out`. No image is kept. `requests` is the input of `--on-request`.
pub fn bench(
    request: BenchRequest,
    stop: &Arc<AtomicBool>,
    terminal: &Terminal,
    requests: &mut dyn BufRead,
    out: &mut dyn Write,
) -> Result<()> {
    let BenchRequest { subject, json, svg, compare, .. } = request;
    let files = (json.as_deref(), svg.as_deref().map(|path| (path, compare)));
    match subject {
        Subject::Images { subject, runs, share } => {
            let report = images::measure(*subject, runs, stop, terminal)?;
            let block = if share { format!("\n{}", report.share_block()) } else { String::new() };
            publish(&report, report.table() + &block, files, out)
        }
        Subject::OnRequest(subject) => images::serve(*subject, stop, terminal, requests, out),
        Subject::Recorded(recorded) => {
            let (_, Some((path, compare))) = files else { return Ok(()) };
            save_chart(path, &chart::draw_recorded(*recorded, compare)?)?;
            print(out, &line_of(path))
        }
        Subject::Kernels { filter, quick, run, records } => {
            let report = kernels::measure(&filter, quick, &run, &records, stop, terminal)?;
            publish(&report, report.table(), files, out)
        }
    }
}

/// A file for JSON; a file for a chart, and the results to compare with in it.
type Files<'a> = (Option<&'a Path>, Option<(&'a Path, Vec<Recorded>)>);

fn save_chart(path: &Path, chart: &str) -> Result<()> {
    save_new(path, chart.as_bytes(), false).map_err(without_force_hint)
}

/// Writes the table, the JSON, or both, and the chart, as requested.
fn publish(report: &impl Serialize, table: String, (json, svg): Files<'_>, out: &mut dyn Write) -> Result<()> {
    let chart = svg.map(|(path, compare)| chart::draw(report, compare).and_then(|chart| save_chart(path, &chart)));
    let printed = match json {
        Some(path) if path == Path::new(DASH) => print(out, &json_line(report)?),
        Some(path) => {
            // The file is written first, so that the results are kept even if the table cannot be printed.
            save_new(path, &json_line(report)?, false).map_err(without_force_hint)?;
            print(out, table.as_bytes())
        }
        None => print(out, table.as_bytes()),
    };
    // Prints measured results even if the chart could not be drawn.
    printed.and(chart.unwrap_or(Ok(())))
}

/// Replaces the error whose hint recommends `--force`, which `kiln bench` does not have.
pub fn without_force_hint(error: Error) -> Error {
    match error {
        Error::OutputExists { path } => {
            let source = io::Error::new(ErrorKind::AlreadyExists, "it exists, and is not overwritten; give another name");
            Error::Write { path, source }
        }
        other => other,
    }
}
