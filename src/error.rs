//! One error type for the whole crate. The message says what went wrong and where. [`Error::hint`] says what to do about it.
//! [`Error::exit_code`] is the exit code of a process that fails with it.

mod remedy;

pub use remedy::{EXPECTED, Remedy, alternatives};

use crate::config::supported;
use crate::tensor::DType;
use crate::text::{amount, gib, shown, shown_path, shown_text};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, by cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option or the prompt cannot be used.
    #[error("{}", shown_text(.what))]
    Usage {
        /// The problem.
        what: String,
        /// A remedy, if there is one.
        hint: Option<Remedy>,
    },

    /// No model was found in the named place.
    #[error("no model found ({}): {}", shown_path(.path), shown_text(.what))]
    NoModel {
        /// The path that was searched.
        path: PathBuf,
        /// The reason.
        what: String,
        /// A remedy, if there is one.
        hint: Option<Remedy>,
    },

    /// No adapter was found in the named place.
    #[error("no LoRA found ({}): {}", shown_path(.path), shown_text(.what))]
    NoAdapter {
        /// The path that was searched.
        path: PathBuf,
        /// The reason.
        what: String,
        /// A remedy, if there is one.
        hint: Option<Remedy>,
    },

    /// The user named some parts of a model, and the other parts were not found.
    #[error("no model found: {}", shown_text(.what))]
    IncompleteModel {
        /// The parts that are missing or cannot be used.
        what: String,
        /// A remedy, if there is one.
        hint: Option<Remedy>,
    },

    /// An image cannot have this size.
    #[error("{width}x{height}: {rule}")]
    ImageSize {
        /// Requested width in pixels.
        width: usize,
        /// Requested height in pixels.
        height: usize,
        /// The rule for legal sizes.
        rule: String,
        /// The nearest legal width and height.
        nearest: (usize, usize),
    },

    /// A file could not be read.
    #[error("cannot read ({}): {}", shown_path(.path), shown_text(&.source.to_string()))]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },

    /// The content of a file is not valid.
    #[error("{what} ({}): {}", shown_path(.path), shown_text(.detail))]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The kind of fault.
        what: &'static str,
        /// The details.
        detail: String,
        /// A remedy, if there is one.
        hint: Option<Remedy>,
    },

    /// The checkpoint lacks a tensor.
    #[error("missing tensor ({}): `{}`, this model needs it as {want:?}", shown_path(.path), shown(.name))]
    TensorMissing {
        /// The file, or the folder of shards.
        path: PathBuf,
        /// The tensor's name in the file's own layout.
        name: String,
        /// The shape the model needs.
        want: Vec<usize>,
    },

    /// A tensor has another shape than the model needs.
    #[error("wrong shape ({}): tensor `{}` is {}, this model needs {want:?}", shown_path(.path), shown(.name), shown(&format!("{:?}", .got)))]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// Shape in the file.
        got: Vec<usize>,
        /// Shape needed.
        want: Vec<usize>,
    },

    /// A tensor's element type is not one kiln computes with.
    #[error(
        "wrong type ({}): tensor `{}` is {}, this model needs {}",
        shown_path(.path), shown(.name), shown(.got), DType::weight_types()
    )]
    TensorType {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// Type in the file.
        got: String,
    },

    /// A tensor is quantized in a format that is not supported.
    #[error("unsupported quantization ({}): tensor `{}` is {format}", shown_path(.path), shown(.name))]
    Quantized {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// The quantization format.
        format: &'static str,
    },

    /// The transformer file holds a tensor that no FLUX.2 transformer has.
    #[error("unknown tensor ({}): `{}` is not part of a FLUX.2 transformer", shown_path(.path), shown(.name))]
    TensorUnknown {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
    },

    /// The parts of a model do not belong together.
    #[error("{part} does not fit the transformer: {}", shown_text(.detail))]
    Mismatch {
        /// The part that does not fit the transformer.
        part: &'static str,
        /// The mismatch.
        detail: String,
        /// A likely cause or a remedy, if there is one.
        hint: Option<Remedy>,
    },

    /// The joint sequence of text and image tokens is longer than the engine supports.
    #[error("too many tokens: {text} text + {image} image = {}, the limit is {limit}", .text + .image)]
    TooManyTokens {
        /// Text tokens.
        text: usize,
        /// Image and reference tokens.
        image: usize,
        /// The limit.
        limit: usize,
    },

    /// The working memory of a job could not be allocated.
    #[error("not enough memory: this job needs {need} bytes of working memory, which could not be reserved")]
    Memory {
        /// Requested bytes.
        need: u64,
    },

    /// A job needs more host memory than is free.
    #[error("not enough memory: this job needs {}, {} is free", amount(*.need), amount(*.have))]
    HostMemory {
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        have: u64,
        /// Ways to need less.
        ways: Vec<Remedy>,
    },

    /// Threads could not be started.
    #[error("cannot start {count} threads: {}", shown_text(.why))]
    Threads {
        /// The number of threads.
        count: usize,
        /// The system's message.
        why: String,
    },

    /// A job needs more GPU memory than is free.
    #[error("not enough GPU memory: this job needs {}, {} is free on {}", gib(*.need), gib(*.have), shown_text(.device))]
    DeviceMemory {
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        have: u64,
        /// The GPU.
        device: String,
        /// Ways to need less.
        ways: Vec<Remedy>,
    },

    /// No GPU can be used.
    #[error("no usable GPU: {}", shown_text(.what))]
    NoGpu {
        /// The cause.
        what: String,
        /// The remedy.
        hint: Remedy,
    },

    /// The GPU or its driver reported a fault.
    #[error("the GPU failed: {call}: {}", shown_text(.status))]
    Device {
        /// The driver call or the kernel that failed.
        call: &'static str,
        /// The driver's message.
        status: String,
    },

    /// There is no GPU for a self-test.
    #[error("no GPU to test: {}", shown_text(.what))]
    NoGpuToTest {
        /// The cause.
        what: String,
        /// The remedy.
        hint: Remedy,
    },

    /// A self-test found that a GPU computes wrong results.
    #[error("the self-test failed: {failed} of {checks} checks")]
    SelfTest {
        /// Checks that failed.
        failed: usize,
        /// All checks.
        checks: usize,
    },

    /// A model failed checks of its files or of its text encoder's output.
    #[error("the model failed {failed} of {checks} checks")]
    ModelCheck {
        /// Checks that failed.
        failed: usize,
        /// All checks.
        checks: usize,
    },

    /// An image that was made again differs from the original.
    #[error("differs ({}): {}", shown_path(.path), shown_text(.how))]
    NotIdentical {
        /// The original.
        path: PathBuf,
        /// How much differs.
        how: String,
    },

    /// Some of many requests failed. Each failed request was answered with its own error.
    #[error("{failed} of {lines} lines failed")]
    Lines {
        /// Lines that failed.
        failed: u64,
        /// All answered lines.
        lines: u64,
    },

    /// The output file exists already.
    #[error("output exists ({}); not overwritten", shown_path(.path))]
    OutputExists {
        /// The file.
        path: PathBuf,
    },

    /// The output could not be written.
    #[error("cannot write ({}): {}", shown_path(.path), shown_text(&.source.to_string()))]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },

    /// A stage produced NaN or infinity.
    #[error("{} produced {count} values that are not finite; no image was written", shown(.stage))]
    NotFinite {
        /// The stage and its step.
        stage: String,
        /// The number of values that are not finite.
        count: usize,
    },

    /// The input of a layer has no magnitude from which to choose a scale.
    #[error("cannot calibrate `{}`: {what}", shown(.layer))]
    Calibration {
        /// The canonical name of the layer's weight.
        layer: String,
        /// The fault of the layer's input.
        what: &'static str,
    },

    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,

    /// Two backends disagree about an op.
    #[error("lockstep: op {index} `{op}` differs between `{left}` and `{right}`: {}", shown_text(.detail))]
    Lockstep {
        /// The number of ops that ran before this one.
        index: usize,
        /// The op.
        op: &'static str,
        /// Name of the trusted backend.
        left: &'static str,
        /// Name of the backend under test.
        right: &'static str,
        /// Where the results differ, and by how much.
        detail: String,
    },

    /// An op was called with operands that do not fit together, which is always a bug in kiln.
    #[error("internal error: op `{op}`: {}", shown_text(.what))]
    Op {
        /// The op.
        op: &'static str,
        /// The mismatch.
        what: String,
    },
}

impl Error {
    /// Makes a usage error with a hint.
    pub fn usage(what: impl Into<String>, hint: impl Into<Remedy>) -> Self {
        Self::Usage { what: what.into(), hint: Some(hint.into()) }
    }

    /// Makes an error for a file's content.
    pub fn bad_file(path: &Path, what: &'static str, detail: impl Into<String>) -> Self {
        Self::BadFile { path: path.into(), what, detail: detail.into(), hint: None }
    }

    /// Adds a hint to a [`Error::BadFile`] or [`Error::NoModel`]. Other errors are returned unchanged.
    pub fn with_hint(mut self, remedy: impl Into<Remedy>) -> Self {
        if let Self::BadFile { hint, .. } | Self::NoModel { hint, .. } = &mut self {
            *hint = Some(remedy.into());
        }
        self
    }

    /// Makes an error for a file that could not be opened or read.
    pub fn read(path: &Path, source: std::io::Error) -> Self {
        Self::Read { path: path.into(), source }
    }

    /// A way to resolve the error.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Usage { hint, .. }
            | Self::NoModel { hint, .. }
            | Self::NoAdapter { hint, .. }
            | Self::IncompleteModel { hint, .. }
            | Self::BadFile { hint, .. }
            | Self::Mismatch { hint, .. } => hint.clone(),
            Self::ImageSize { nearest: (width, height), .. } => Some(Remedy::LegalSize { width: *width, height: *height }),
            Self::TensorMissing { .. } | Self::TensorShape { .. } | Self::TensorUnknown { .. } => {
                Some(format!("this file is incomplete or belongs to another model; kiln runs {}", supported()).into())
            }
            Self::Quantized { .. } => Some("use the BF16, FP8 or NVFP4 checkpoint of the same model".into()),
            Self::TooManyTokens { .. } => Some(Remedy::SmallerImage),
            Self::Memory { .. } => Some(Remedy::SaveMemory),
            Self::Read { source, .. } if source.kind() == ErrorKind::OutOfMemory => Some(Remedy::SaveMemory),
            Self::Threads { .. } => Some("use fewer threads, or allow more threads or more memory".into()),
            Self::HostMemory { ways, .. } | Self::DeviceMemory { ways, .. } => Some(Remedy::AnyOf(ways.clone())),
            Self::NoGpu { hint, .. } => Some(Remedy::RepairGpu(Box::new(hint.clone()))),
            Self::Device { .. } => Some(Remedy::CpuBackendIfAgain),
            Self::NoGpuToTest { hint, .. } => Some(hint.clone()),
            Self::SelfTest { .. } | Self::ModelCheck { .. } => {
                Some("please report it, with what is printed between the marks".into())
            }
            Self::OutputExists { .. } => Some(Remedy::Overwrite),
            Self::Calibration { .. } => Some("calibrate with other prompts, or leave this layer in BF16".into()),
            Self::Op { .. } | Self::Lockstep { .. } => Some(Remedy::ReportBug),
            _ => None,
        }
    }

    /// The remedy in words that suit any front end.
    pub fn hint(&self) -> Option<String> {
        self.remedy().map(|remedy| shown_text(&remedy.to_string()))
    }

    /// The process exit code: 1 a failed self-test, model check, line of a batch or replay; 2 usage; 3 bad input file; 4 not enough
    /// memory; 5 output not written; 6 no usable GPU or a GPU fault; 7 numeric fault; 70 a bug in kiln; 130 interrupted.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::SelfTest { .. } | Self::ModelCheck { .. } | Self::Lines { .. } | Self::NotIdentical { .. } => 1,
            Self::Usage { .. } | Self::ImageSize { .. } | Self::TooManyTokens { .. } => 2,
            // Memory can also run out while a file is read or mapped, which is not the file's fault.
            Self::Read { source, .. } if source.kind() == ErrorKind::OutOfMemory => 4,
            Self::NoModel { .. }
            | Self::NoAdapter { .. }
            | Self::IncompleteModel { .. }
            | Self::Read { .. }
            | Self::BadFile { .. }
            | Self::TensorMissing { .. }
            | Self::TensorShape { .. }
            | Self::TensorType { .. }
            | Self::Quantized { .. }
            | Self::TensorUnknown { .. }
            | Self::Mismatch { .. } => 3,
            Self::Memory { .. } | Self::HostMemory { .. } | Self::Threads { .. } | Self::DeviceMemory { .. } => 4,
            Self::OutputExists { .. } | Self::Write { .. } => 5,
            Self::NoGpu { .. } | Self::NoGpuToTest { .. } | Self::Device { .. } => 6,
            Self::NotFinite { .. } | Self::Calibration { .. } => 7,
            Self::Interrupted => 130,
            Self::Lockstep { .. } | Self::Op { .. } => 70,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// One error of every kind, with `foreign` for each text that comes from outside the program.
    fn one_of_each_kind(foreign: &str) -> Vec<Error> {
        let (text, path) = (|| foreign.to_owned(), || PathBuf::from(foreign));
        let hint = || Some(Remedy::Advice(text()));
        let source = || io::Error::other(text());
        let (part, format, shape) = ("text encoder", "NVFP4", vec![1; 3]);
        let (want, got) = (shape.clone(), vec![usize::MAX; 1000]);
        vec![
            Error::Usage { what: text(), hint: hint() },
            Error::NoModel { path: path(), what: text(), hint: hint() },
            Error::IncompleteModel { what: text(), hint: hint() },
            Error::ImageSize { width: 1, height: 2, rule: "even".into(), nearest: (2, 2) },
            Error::Read { path: path(), source: source() },
            Error::BadFile { path: path(), what: "damaged", detail: text(), hint: hint() },
            Error::TensorMissing { path: path(), name: text(), want: want.clone() },
            Error::TensorShape { path: path(), name: text(), got, want },
            Error::TensorType { path: path(), name: text(), got: text() },
            Error::Quantized { path: path(), name: text(), format },
            Error::TensorUnknown { path: path(), name: text() },
            Error::Mismatch { part, detail: text(), hint: hint() },
            Error::TooManyTokens { text: 1, image: 2, limit: 3 },
            Error::Memory { need: 1 },
            Error::HostMemory { need: 2, have: 1, ways: vec![Remedy::Advice(text())] },
            Error::Threads { count: 2, why: text() },
            Error::DeviceMemory { need: 2, have: 1, device: text(), ways: vec![Remedy::Advice(text())] },
            Error::NoGpu { what: text(), hint: text().into() },
            Error::Device { call: "cuInit", status: text() },
            Error::OutputExists { path: path() },
            Error::Write { path: path(), source: source() },
            Error::NotFinite { stage: text(), count: 1 },
            Error::Interrupted,
            Error::Lockstep { index: 0, op: "copy", left: "cpu", right: "cuda", detail: text() },
            Error::Op { op: "copy", what: text() },
            Error::Calibration { layer: text(), what: "its input is zero" },
            Error::NoGpuToTest { what: text(), hint: text().into() },
            Error::SelfTest { failed: 1, checks: 2 },
            Error::ModelCheck { failed: 1, checks: 2 },
            Error::Lines { failed: 1, lines: 2 },
            Error::NoAdapter { path: path(), what: text(), hint: hint() },
            Error::NotIdentical { path: path(), how: text() },
        ]
    }

    #[test]
    fn error_messages_escape_foreign_text() {
        // The match has no wildcard arm, so a new kind of error does not compile until it joins the list.
        let kind = |error: &Error| match error {
            Error::Usage { .. } => 0,
            Error::NoModel { .. } => 1,
            Error::IncompleteModel { .. } => 2,
            Error::ImageSize { .. } => 3,
            Error::Read { .. } => 4,
            Error::BadFile { .. } => 5,
            Error::TensorMissing { .. } => 6,
            Error::TensorShape { .. } => 7,
            Error::TensorType { .. } => 8,
            Error::Quantized { .. } => 9,
            Error::TensorUnknown { .. } => 10,
            Error::Mismatch { .. } => 11,
            Error::TooManyTokens { .. } => 12,
            Error::Memory { .. } => 13,
            Error::HostMemory { .. } => 14,
            Error::Threads { .. } => 15,
            Error::DeviceMemory { .. } => 16,
            Error::NoGpu { .. } => 17,
            Error::Device { .. } => 18,
            Error::OutputExists { .. } => 19,
            Error::Write { .. } => 20,
            Error::NotFinite { .. } => 21,
            Error::Interrupted => 22,
            Error::Lockstep { .. } => 23,
            Error::Op { .. } => 24,
            Error::Calibration { .. } => 25,
            Error::NoGpuToTest { .. } => 26,
            Error::SelfTest { .. } => 27,
            Error::ModelCheck { .. } => 28,
            Error::Lines { .. } => 29,
            Error::NoAdapter { .. } => 30,
            Error::NotIdentical { .. } => 31,
        };
        let long = "\u{1b}]0;x\u{7}\n".repeat(100_000);
        for foreign in ["\u{1b}[2J\r\nhint: a planted line\u{202e}", &long] {
            let errors = one_of_each_kind(foreign);
            assert_eq!(errors.iter().map(kind).collect::<Vec<_>>(), (0..=31).collect::<Vec<_>>());
            for error in errors {
                for text in [error.to_string(), error.hint().unwrap_or_default()] {
                    assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{text:?}");
                    assert!(text.chars().count() < 10_000, "{} characters", text.chars().count());
                }
            }
        }
    }

    #[test]
    fn out_of_memory_is_not_reported_as_a_bad_file() {
        let read = |source: io::Error| Error::read(Path::new("x"), source);
        let short = read(ErrorKind::OutOfMemory.into());
        assert_eq!((short.exit_code(), short.remedy()), (4, Some(Remedy::SaveMemory)));
        let gone = read(ErrorKind::NotFound.into());
        assert_eq!((gone.exit_code(), gone.hint()), (3, None));
    }
}
