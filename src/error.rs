//! One error type for the whole crate. A message says what went wrong and where; [`Error::hint`] says what to do about it;
//! [`Error::exit_code`] is what the process ends with.

use std::path::{Path, PathBuf};

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, by cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option or the prompt is not usable.
    #[error("{what}")]
    Usage {
        /// What is wrong.
        what: String,
        /// What to do instead.
        hint: Option<String>,
    },

    /// No model where one was asked for.
    #[error("no model found ({}): {what}", .path.display())]
    NoModel {
        /// Where it was looked for.
        path: PathBuf,
        /// What was found instead.
        what: String,
        /// What to do instead.
        hint: Option<String>,
    },

    /// A file could not be read.
    #[error("cannot read ({}): {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },

    /// A file was read, and is not what it should be.
    #[error("{what} ({}): {detail}", .path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What kind of fault.
        what: &'static str,
        /// What was found.
        detail: String,
        /// What to do instead.
        hint: Option<String>,
    },

    /// The checkpoint lacks a tensor.
    #[error("missing tensor ({}): `{name}`, this model needs it as {want:?}", .path.display())]
    TensorMissing {
        /// File or folder.
        path: PathBuf,
        /// Tensor name, as the file's own layout spells it.
        name: String,
        /// The shape the model needs.
        want: Vec<usize>,
    },

    /// A tensor has another shape than the model needs.
    #[error("wrong shape ({}): tensor `{name}` is {got:?}, this model needs {want:?}", .path.display())]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// Tensor name in the file.
        name: String,
        /// Shape in the file.
        got: Vec<usize>,
        /// Shape needed.
        want: Vec<usize>,
    },

    /// A tensor's element type is not one kiln computes with.
    #[error("wrong type ({}): tensor `{name}` is {got}, this model needs BF16, F16 or F32", .path.display())]
    TensorType {
        /// The file.
        path: PathBuf,
        /// Tensor name in the file.
        name: String,
        /// Type in the file.
        got: String,
    },

    /// A tensor belongs to a quantised checkpoint.
    #[error("quantised weights are not supported yet ({}): tensor `{name}` is {format}", .path.display())]
    Quantised {
        /// The file.
        path: PathBuf,
        /// Tensor name in the file.
        name: String,
        /// Which format it is.
        format: &'static str,
    },

    /// The transformer file holds a tensor that no FLUX.2 transformer has.
    #[error("unknown tensor ({}): `{name}` is not part of a FLUX.2 transformer", .path.display())]
    TensorUnknown {
        /// The file.
        path: PathBuf,
        /// Tensor name in the file.
        name: String,
    },

    /// Parts of a model that do not belong together.
    #[error("{part} does not fit the transformer: {detail}")]
    Mismatch {
        /// Which part.
        part: &'static str,
        /// Needed and found.
        detail: String,
        /// What it looks like.
        hint: Option<String>,
    },

    /// The joint sequence is longer than the engine plans for.
    #[error("too many tokens: {text} text + {image} image = {}, the limit is {limit}", .text + .image)]
    TooManyTokens {
        /// Text tokens.
        text: usize,
        /// Image and reference tokens.
        image: usize,
        /// The limit.
        limit: usize,
    },

    /// Memory for the run could not be had.
    #[error("not enough memory: this job needs {need} bytes of working memory and they could not be reserved")]
    Memory {
        /// Bytes asked for.
        need: u64,
    },

    /// A GPU's memory does not suffice.
    #[error("not enough GPU memory: this job needs {}, {} is free on {device}", gib(*.need), gib(*.have))]
    DeviceMemory {
        /// Bytes asked for.
        need: u64,
        /// Bytes there are.
        have: u64,
        /// Which GPU.
        device: String,
        /// Ways to get by with less.
        ways: String,
    },

    /// No GPU can be used.
    #[error("no usable GPU: {what}")]
    NoGpu {
        /// Why.
        what: String,
        /// What to do about it.
        hint: String,
    },

    /// The GPU or its driver reported a fault.
    #[error("the GPU failed: {call}: {status}")]
    Device {
        /// The call, or the kernel.
        call: &'static str,
        /// What the driver says.
        status: String,
    },

    /// The output file is already there.
    #[error("output exists ({}); not overwritten", .path.display())]
    OutputExists {
        /// The file.
        path: PathBuf,
    },

    /// The output could not be written.
    #[error("cannot write ({}): {source}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },

    /// A stage produced NaN or infinity.
    #[error("{stage} produced {count} values that are not finite; no image was written")]
    NotFinite {
        /// Which stage and step.
        stage: String,
        /// How many values.
        count: usize,
    },

    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,

    /// Two backends disagree about an op.
    #[error("lockstep: op {index} `{op}` differs between `{left}` and `{right}`: {detail}")]
    Lockstep {
        /// Ops run before this one.
        index: usize,
        /// The op.
        op: &'static str,
        /// Name of the trusted backend.
        left: &'static str,
        /// Name of the backend under test.
        right: &'static str,
        /// Where and by how much.
        detail: String,
    },

    /// An op was called with operands that do not fit each other. Always a bug in kiln.
    #[error("internal error: op `{op}`: {what}")]
    Op {
        /// The op.
        op: &'static str,
        /// What does not fit.
        what: String,
    },
}

/// Bytes in the unit that cards are sold by.
pub fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

impl Error {
    /// A usage error with a hint.
    pub fn usage(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), hint: Some(hint.into()) }
    }

    /// A fault in a file's content.
    pub fn bad_file(path: &Path, what: &'static str, detail: impl Into<String>) -> Self {
        Self::BadFile { path: path.into(), what, detail: detail.into(), hint: None }
    }

    /// Adds a hint to a [`Error::BadFile`]; other errors are returned as they are.
    pub fn with_hint(mut self, text: impl Into<String>) -> Self {
        if let Self::BadFile { hint, .. } = &mut self {
            *hint = Some(text.into());
        }
        self
    }

    /// A file that could not be opened or read.
    pub fn read(path: &Path, source: std::io::Error) -> Self {
        Self::Read { path: path.into(), source }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Usage { hint, .. } | Self::NoModel { hint, .. } | Self::BadFile { hint, .. } | Self::Mismatch { hint, .. } => {
                hint.clone()
            }
            Self::TensorMissing { .. } | Self::TensorShape { .. } | Self::TensorUnknown { .. } => {
                Some("this file is incomplete or belongs to another model; kiln runs FLUX.2 [klein] 4B and 9B".into())
            }
            Self::Quantised { .. } => Some("use the BF16 checkpoint of the same model".into()),
            Self::TooManyTokens { .. } => Some("lower --width and --height".into()),
            Self::Memory { .. } => Some("lower --width and --height".into()),
            Self::DeviceMemory { ways, .. } => Some(format!("try to {ways}")),
            Self::NoGpu { hint, .. } => Some(format!("{hint}; --backend cpu runs without one")),
            Self::Device { .. } => Some("if it happens again, --backend cpu runs without the GPU".into()),
            Self::OutputExists { .. } => Some("use --force or another name".into()),
            Self::Op { .. } | Self::Lockstep { .. } => {
                Some("this is a bug in kiln; please report it with the command line".into())
            }
            _ => None,
        }
    }

    /// The process exit code: 2 usage, 3 bad input file, 4 not enough memory, 5 output not written, 6 no usable GPU or a fault of
    /// it, 7 numeric fault, 130 interrupted, 70 a bug of ours.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage { .. } | Self::TooManyTokens { .. } => 2,
            Self::NoModel { .. }
            | Self::Read { .. }
            | Self::BadFile { .. }
            | Self::TensorMissing { .. }
            | Self::TensorShape { .. }
            | Self::TensorType { .. }
            | Self::Quantised { .. }
            | Self::TensorUnknown { .. }
            | Self::Mismatch { .. } => 3,
            Self::Memory { .. } | Self::DeviceMemory { .. } => 4,
            Self::OutputExists { .. } | Self::Write { .. } => 5,
            Self::NoGpu { .. } | Self::Device { .. } => 6,
            Self::NotFinite { .. } => 7,
            Self::Interrupted => 130,
            Self::Lockstep { .. } | Self::Op { .. } => 70,
        }
    }
}
