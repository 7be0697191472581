//! The checks of `kiln doctor` on a model that flags name: whether its files are known, whether all values are finite and written, and
//! whether the text encoder gives published values. If a check fails, kiln prints a block to send.

use super::{hint, message};
use kiln::device::{Backend, Cpu};
use kiln::error::{Error, Result};
use kiln::inspect::published::{self, Applicability, COLUMNS, Comparison, PROMPT, Rows, TOKENS, VALUES};
use kiln::inspect::{
    FileDigest, Finding, FiniteReport, KnownFile, Likeness, NonFiniteTensor, digests, identify, published_digest,
    refuse_unwritten, scan,
};
use kiln::progress::{Phase, Progress};
use kiln::text::{grouped, shown, shown_line};
use kiln::{Component, Layout, OpenModel};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// How many faulty tensors, or differences from a known file, are listed one by one.
const LISTED: usize = 5;

/// How many faulty tensors the block lists.
const LISTED_IN_BLOCK: usize = 50;

/// The results of the checks.
#[derive(Default)]
pub struct Checks {
    /// Rows of a name and a line. A continuation row has an empty name.
    pub rows: Vec<(&'static str, String)>,
    /// Rows of the block to send. They contain no paths.
    details: Vec<(String, String)>,
    made: usize,
    failed: usize,
}

/// A device that the text encoder runs on, and its name for display.
pub type Device = (String, Box<dyn Backend>);

/// Checks a model. With `full`, hashes its files as well.
pub fn check(model: &OpenModel, device: Device, full: bool, stop: &Arc<AtomicBool>, progress: &dyn Progress) -> Result<Checks> {
    let mut checks = Checks::default();
    checks.detail("model", format!("{}, {}", model.name, model.variant));
    checks.files(model);
    if full {
        checks.digests(&digests(model.weights(), stop, progress)?);
    }
    checks.values(model, stop, progress)?;
    checks.encoder(model, device, stop, progress)?;
    Ok(checks)
}

impl Checks {
    fn row(&mut self, name: &'static str, line: impl Into<String>) {
        // A name is printed only in its first row.
        let known = self.rows.iter().any(|(other, _)| *other == name);
        self.rows.push((if known { "" } else { name }, line.into()));
    }

    fn detail(&mut self, name: impl Into<String>, line: impl Into<String>) {
        self.details.push((name.into(), line.into()));
    }

    /// Counts the outcome of one check.
    fn outcome(&mut self, passed: bool) {
        self.made += 1;
        self.failed += usize::from(!passed);
    }

    /// The block to send and the error to exit with, if a check failed.
    pub fn failure(&self) -> Option<(String, Error)> {
        if self.failed == 0 {
            return None;
        }
        let mut block = format!("--- from here on: kiln doctor, kiln {} ---\n", env!("CARGO_PKG_VERSION"));
        for (name, line) in &self.details {
            let _ = writeln!(block, "{name:<12} {}", shown_line(line));
        }
        block += "--- up to here ---\n";
        Some((block, Error::ModelCheck { failed: self.failed, checks: self.made }))
    }

    /// Compares the files with known ones. An unknown file is no failure.
    fn files(&mut self, model: &OpenModel) {
        let findings = model.weights().each_ref().map(identify);
        let layouts = model.weights().each_ref().map(|weights| match (weights.component(), weights.layout()) {
            (Component::TextEncoder, _) => "Hugging Face's names",
            (_, Layout::Bfl) => "BFL's names",
            (_, Layout::Diffusers) => "diffusers' names",
        });
        for (part, finding) in findings.iter() {
            let (line, more) = described(finding);
            self.row("files", format!("{part}: {line}"));
            more.iter().for_each(|line| self.row("files", format!("  {line}")));
            let Finding { tensors, bytes, files, fingerprint, .. } = finding;
            let sizes = format!("{}, {} bytes, {}", counted(*files, "file"), grouped(*bytes), counted(*tensors, "tensor"));
            self.detail(part.to_string(), format!("{}, {sizes}, fingerprint {fingerprint}", layouts[part]));
            self.detail("", line);
            more.into_iter().for_each(|line| self.detail("", line));
        }
    }

    fn digests(&mut self, files: &[FileDigest]) {
        for FileDigest { part, name, sha256 } in files {
            let known = match published_digest(sha256) {
                Some(file) => format!("published as {}", first_name(file)),
                None => "not published, as far as kiln knows".into(),
            };
            let line = format!("{part}: {} is {sha256}: {known}", shown(name));
            self.row("sha256", line);
            self.detail("sha256", format!("{part}: {sha256}: {known}"));
        }
    }

    /// Checks that all values are finite, and that no matrix has an unwritten part.
    fn values(&mut self, model: &OpenModel, stop: &AtomicBool, progress: &dyn Progress) -> Result<()> {
        let start = Instant::now();
        let report = match scan(model.weights(), stop, progress) {
            Ok(report) => report,
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => {
                self.row("values", format!("FAILED: {}", message(&error)));
                self.detail("values", "could not be read");
                self.outcome(false);
                return Ok(());
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let FiniteReport { bytes, values, faults } = &report;
        let rate =
            format!("{:.1} GB read in {seconds:.1} s, {:.1} GB/s", *bytes as f64 / 1e9, *bytes as f64 / 1e9 / seconds.max(1e-9));
        self.outcome(faults.is_empty());
        if faults.is_empty() {
            self.row("values", format!("all {} are finite; {rate}", grouped(*values)));
            self.detail("values", format!("all {} are finite", grouped(*values)));
        } else {
            let count = grouped(report.count());
            let tensors = counted(faults.len(), "tensor");
            let what = format!("{count} of {} values are not finite, in {tensors}", grouped(*values));
            self.row("values", format!("FAILED: {what}; {rate}"));
            self.detail("values", what);
            let line = |fault: &NonFiniteTensor| {
                let (nan, infinite, first) = (grouped(fault.nan), grouped(fault.infinite), grouped(fault.first));
                let (part, name, dtype) = (fault.part, shown(&fault.name), fault.dtype);
                format!("{part} `{name}`, {dtype}: {nan} NaN, {infinite} infinite, the first is element {first}")
            };
            faults.iter().take(LISTED).for_each(|fault| self.row("values", line(fault)));
            if let Some(more) = faults.len().checked_sub(LISTED).filter(|more| *more > 0) {
                self.row("values", format!("and in {more} more"));
            }
            faults.iter().take(LISTED_IN_BLOCK).for_each(|fault| self.detail("", line(fault)));
            self.row("values", "download the files again; if the same values are wrong then, please report it");
        }
        let written = refuse_unwritten(model.weights());
        self.outcome(written.is_ok());
        match written {
            Ok(()) => self.row("values", "no matrix has a part that is all zeros, as an unwritten one would have"),
            Err(error) => {
                self.row("values", format!("FAILED: {}", message(&error)));
                self.row("values", hint(&error).unwrap_or_default());
                // The message contains a path, which must not leave this machine.
                let detail =
                    if let Error::BadFile { what, detail, .. } = &error { format!("{what}: {detail}") } else { "?".into() };
                self.detail("values", detail);
            }
        }
        Ok(())
    }

    /// Compares the text encoder's output with published values.
    fn encoder(&mut self, model: &OpenModel, device: Device, stop: &Arc<AtomicBool>, progress: &dyn Progress) -> Result<()> {
        let applicability = Applicability::of(&model.configs.text_encoder, &model.weights().text_encoder);
        if applicability == Applicability::OtherEncoder {
            self.row("encoder", "no published values for this encoder: those that kiln knows are of Qwen3-4B");
            self.detail("encoder", "no published values");
            return Ok(());
        }
        let tokens = model.first_tokens(PROMPT, TOKENS.len())?;
        let want = TOKENS.map(|(_, id)| id);
        self.outcome(tokens.ids == want);
        if tokens.ids != want {
            let what =
                format!("the tokens of `{PROMPT}` begin with {:?}, not {want:?}: this is not Qwen3's tokenizer", tokens.ids);
            self.row("encoder", format!("FAILED: {what}"));
            self.detail("encoder", what);
            return Ok(());
        }
        let is_gpu = !device.1.reads_files();
        let mut run = |(name, mut backend): Device| {
            let start = Instant::now();
            progress.begin(Phase::Encode, 1);
            let values = model.first_text_layer(backend.as_mut(), &tokens, COLUMNS);
            progress.end();
            self.judged(&name, values, applicability, start.elapsed().as_secs_f64())
        };
        let mut verdict = run(device)?;
        if verdict == Some(true) {
            return Ok(());
        }
        // If a GPU is off, the CPU shows whether the weights are at fault.
        if is_gpu {
            verdict = run(("the CPU".into(), Box::new(Cpu::shared(stop.clone()))))?;
        }
        let what = match verdict {
            Some(true) => {
                "the CPU gives them: the weights are right, but not the GPU, or what kiln does there; see `kiln selftest`"
            }
            Some(false) => "so these are other weights (a fine-tune?), or kiln does not compute what it should",
            None => return Ok(()),
        };
        self.row("encoder", what);
        self.detail("", what);
        Ok(())
    }

    /// Reports the values that a device computes. Returns whether they match the published ones, or `None` if the encoder failed.
    fn judged(
        &mut self,
        device: &str,
        values: Result<Vec<f32>>,
        applicability: Applicability,
        seconds: f64,
    ) -> Result<Option<bool>> {
        let values = match values {
            Ok(values) => values,
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => {
                self.row("encoder", format!("FAILED: `{PROMPT}` could not be encoded on {device}: {}", message(&error)));
                self.detail("encoder", format!("could not be run on {device}"));
                self.outcome(false);
                return Ok(None);
            }
        };
        let found: Rows = std::array::from_fn(|row| std::array::from_fn(|column| values[row * COLUMNS + column]));
        let Comparison { off, worst, .. } = published::compare(found);
        let whose = "values that an article printed of Qwen3-4B (first tap, columns 0 to 2 of the first four tokens)";
        let is_judged = applicability == Applicability::Published;
        let passed = off.is_empty() || (!is_judged && values.iter().all(|value| value.is_finite()));
        self.outcome(passed);
        let line = match (is_judged, passed) {
            (true, true) => {
                let room = format!(
                    "at most {worst:.2} of the room for rounding, which is 4 % and half a bf16 unit of the row's largest"
                );
                format!("`{PROMPT}` on {device} gives the {} {whose}; {room}; {seconds:.1} s", VALUES.as_flattened().len())
            }
            (true, false) => {
                format!("FAILED: `{PROMPT}` on {device}: {} of the {} {whose} are off", off.len(), VALUES.as_flattened().len())
            }
            (false, true) => format!(
                "`{PROMPT}` on {device}, not judged because this encoder is quantized; compare the {whose}; {seconds:.1} s"
            ),
            (false, false) => format!("FAILED: `{PROMPT}` on {device} gives values that are not finite"),
        };
        self.row("encoder", line.clone());
        self.detail("encoder", line);
        for (row, values) in found.iter().enumerate() {
            let line = format!("{:<12} found {}  published {}", TOKENS[row].0, listed(values), listed(&VALUES[row]));
            if !(is_judged && passed) {
                self.row("encoder", line.clone());
            }
            self.detail("", line);
        }
        Ok(Some(passed))
    }
}

fn listed(values: &[f32]) -> String {
    values.iter().map(|value| format!("{value:>9.2}")).collect::<Vec<_>>().join(" ")
}

/// The first name of a known file. Its digest belongs to this name.
fn first_name(file: &KnownFile) -> &'static str {
    file.name.split(" or ").next().unwrap_or(file.name)
}

/// Names the known file that a part matches or resembles, and lists the differences.
fn described(finding: &Finding) -> (String, Vec<String>) {
    let Finding { tensors, bytes, files, fingerprint, likeness } = finding;
    let mut more = Vec::new();
    let line = match likeness {
        Likeness::Same(file) => {
            let published = match (file.fingerprint, file.is_inferred(), file.bytes) {
                (Some(_), ..) => "; its fingerprint was published",
                (None, true, _) => "; which layers it quantizes was inferred from its size",
                (None, false, Some(_)) => "; its size was published",
                (None, false, None) => ", by its architecture; nothing was published of this file",
            };
            if let Some(published) = file.bytes.filter(|published| *files == 1 && published != bytes) {
                more.push(format!(
                    "it has {} bytes and the published file {}: another header",
                    grouped(*bytes),
                    grouped(published)
                ));
            }
            format!("known: names, dtypes and shapes of all {tensors} tensors match {}{published}", file.name)
        }
        Likeness::SameSize(file) if file.is_inferred() => {
            more.push(format!("kiln has inferred other layers for it; please send us its fingerprint, {fingerprint}"));
            format!("it has the size of {}, {} bytes", file.name, grouped(*bytes))
        }
        Likeness::SameSize(file) => {
            format!("it has the size of {}, {} bytes; its tensors were not published", file.name, grouped(*bytes))
        }
        Likeness::Unknown(nearest) => {
            if let Some((file, differences)) = nearest {
                more.push(format!("the nearest is {}; different in {}:", file.name, counted(differences.len(), "tensor")));
                more.extend(differences.iter().take(LISTED).map(|difference| format!("  {difference}")));
                if differences.len() > LISTED {
                    more.push(format!("  and {} more", differences.len() - LISTED));
                }
            }
            format!("not one of the files that kiln knows (a fine-tune?): {tensors} tensors, fingerprint {fingerprint}")
        }
    };
    (line, more)
}

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::inspect::KNOWN;

    /// What is said of values that the text encoder gives.
    fn judged(values: Result<Vec<f32>>, applicability: Applicability) -> (bool, Checks) {
        let mut checks = Checks::default();
        let passed = checks.judged("GPU 3", values, applicability, 1.25).unwrap() == Some(true);
        assert_eq!((checks.made, checks.failed), (1, usize::from(!passed)));
        assert_eq!(checks.failure().is_some(), !passed);
        (passed, checks)
    }

    fn text(checks: &Checks) -> String {
        checks.rows.iter().map(|(name, line)| format!("{name:<9} {line}\n")).collect()
    }

    #[test]
    fn published_values_are_met_or_shown_next_to_what_was_found() {
        let right = VALUES.as_flattened().to_vec();
        let (passed, checks) = judged(Ok(right.clone()), Applicability::Published);
        assert!(
            passed && text(&checks).starts_with("encoder   `hello` on GPU 3 gives the 12 values that an article"),
            "{}",
            text(&checks)
        );
        assert_eq!(checks.rows.len(), 1);
        let mut wrong = right.clone();
        wrong[4] = 3.5;
        let (passed, checks) = judged(Ok(wrong), Applicability::Published);
        assert!(
            !passed && text(&checks).starts_with("encoder   FAILED: `hello` on GPU 3: 1 of the 12 values"),
            "{}",
            text(&checks)
        );
        let (block, error) = checks.failure().unwrap();
        let row = "user         found     34.25      3.50     -4.56  published     34.25      2.39     -4.56\n";
        assert!(block.contains(row) && text(&checks).contains(row), "{block}");
        assert!(
            block.starts_with("--- from here on: kiln doctor, kiln ") && block.ends_with("\n--- up to here ---\n"),
            "{block}"
        );
        assert_eq!((error.exit_code(), error.to_string().as_str()), (1, "the model failed 1 of 1 checks"));
    }

    #[test]
    fn a_quantized_encoder_is_shown_and_not_judged() {
        let (passed, checks) = judged(Ok(vec![1.0; 12]), Applicability::Quantized);
        assert!(passed && text(&checks).contains("not judged because this encoder is quantized"), "{}", text(&checks));
        assert_eq!(checks.rows.len(), 5);
        let (passed, checks) = judged(Ok(vec![f32::NAN; 12]), Applicability::Quantized);
        assert!(!passed && text(&checks).contains("FAILED: `hello` on GPU 3 gives values that are not finite"));
    }

    #[test]
    fn an_error_of_the_device_is_told_and_no_path_is_sent() {
        let error = Error::bad_file(std::path::Path::new("/home/me/x"), "changed", "size");
        let (passed, checks) = judged(Err(error), Applicability::Published);
        assert!(!passed && text(&checks).contains("/home/me/x"));
        assert!(!checks.failure().unwrap().0.contains("/home"));
        let interrupted = Checks::default().judged("the CPU", Err(Error::Interrupted), Applicability::Published, 0.0);
        assert!(matches!(interrupted, Err(Error::Interrupted)));
    }

    #[test]
    fn likenesses_say_what_they_rest_on() {
        let finding = |likeness, bytes| Finding { tensors: 7, bytes, files: 1, fingerprint: "f00".into(), likeness };
        let named = |name: &str| KNOWN.iter().find(|file| file.name.starts_with(name)).unwrap();
        let fp8 = named("flux-2-klein-4b-fp8");
        let (line, more) = described(&finding(Likeness::Same(fp8), fp8.bytes.unwrap()));
        let want = "known: names, dtypes and shapes of all 7 tensors match flux-2-klein-4b-fp8; its fingerprint was published";
        assert_eq!((line.as_str(), more.len()), (want, 0));
        let (_, more) = described(&finding(Likeness::Same(fp8), 5));
        assert_eq!(more, ["it has 5 bytes and the published file 4,070,624,520: another header"]);
        let (line, _) = described(&finding(Likeness::Same(named("flux-2-klein-base-9b-fp8")), 9_567_278_472));
        assert!(line.ends_with("which layers it quantizes was inferred from its size"), "{line}");
        let (line, _) = described(&finding(Likeness::SameSize(named("qwen_3_8b_fp8mixed")), 8_664_848_742));
        assert_eq!(line, "it has the size of qwen_3_8b_fp8mixed, 8,664,848,742 bytes; its tensors were not published");
        let differences = (0..8).map(|i| format!("`{i}` is missing")).collect();
        let (line, more) = described(&finding(Likeness::Unknown(Some((fp8, differences))), 5));
        assert_eq!(line, "not one of the files that kiln knows (a fine-tune?): 7 tensors, fingerprint f00");
        assert_eq!(
            (more[0].as_str(), more.last().unwrap().trim()),
            ("the nearest is flux-2-klein-4b-fp8; different in 8 tensors:", "and 3 more")
        );
        assert_eq!(first_name(named("flux-2-klein-4b or")), "flux-2-klein-4b");
    }
}
