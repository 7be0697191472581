//! Ways to resolve an error, as data. The library knows no flags: each front end words a remedy itself and can name its flags. The
//! [`Display`](fmt::Display) form serves callers without a front end.

use crate::component::Component;
use crate::text::amount;
use std::fmt;

/// One way to resolve an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Advice that reads the same in every front end.
    Advice(String),
    /// Any one of these remedies helps.
    AnyOf(Vec<Remedy>),
    /// Generate a smaller image.
    SmallerImage,
    /// Generate an image of this size, the nearest legal one.
    LegalSize {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
    },
    /// Generate an image of this size, the largest of about the same shape that fits into memory.
    SizeThatFits {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Memory that it needs.
        bytes: u64,
    },
    /// Generate an image of the size that the noise was recorded for.
    SizeOfNoise,
    /// Let the VAE work in tiles. The job then fits into memory.
    VaeTiling {
        /// Bytes that the job then needs.
        bytes: u64,
    },
    /// Give fewer reference images.
    FewerReferences,
    /// Close other programs.
    ClosePrograms,
    /// Close other programs that use the GPU.
    CloseGpuPrograms,
    /// Raise this process's memory limit.
    AllowMemory,
    /// Generate a smaller image, close other programs or raise the limit: the remedies for a failed allocation.
    SaveMemory,
    /// Run on the CPU.
    CpuBackend,
    /// Run on the CPU if the fault happens again.
    CpuBackendIfAgain,
    /// Apply this remedy, or run on the CPU.
    RepairGpu(Box<Remedy>),
    /// List the GPUs of this machine and name one of them.
    ListGpus,
    /// Report a bug in kiln, together with the request.
    ReportBug,
    /// Allow existing files to be replaced, or choose another name.
    Overwrite,
    /// Discard what an earlier run left unfinished, or choose another name.
    Restart,
    /// Discard what an earlier run left, because it cannot be continued, or choose another name.
    BeginAnew,
    /// Name a model folder.
    NameModel,
    /// Name a model, or the folder of another Hugging Face cache.
    NameModelOrCache,
    /// Finish a partial download, or use one of the program's own models.
    FinishDownload {
        /// The repository.
        repository: String,
        /// The name of the program's own model; absent if parts of another model were given.
        own: Option<&'static str>,
    },
    /// Give the weights of each part as a separate file.
    NameParts,
    /// Complete the folder, or give the weights of each part as a separate file.
    CompleteFolder,
    /// Pick one of several files, for each of these parts.
    PickParts(Vec<Component>),
    /// Put a complete file there, or name another one, for each of these parts.
    ReplaceParts(Vec<Component>),
    /// Leave the model's variant to its files.
    AnyVariant,
    /// State the order in which the file stores NVFP4.
    Nvfp4Layout,
    /// Leave the format of attention to the model and the device.
    AnyAttention,
    /// Let the device choose the type in which NVFP4 is multiplied.
    AnyNvfp4Math,
    /// Load the weights as they are stored, or name files that are not quantized.
    AsStored,
    /// Apply the file as an adapter, to the model it was made for.
    ApplyAdapter,
    /// List the file's contents: it is not a usable adapter.
    InspectAdapter,
    /// Use an adapter without the layers that do not fit.
    PartOfAdapter,
    /// Merge adapters with the weights when the model is loaded.
    MergeAdapters,
    /// Load the model with unmerged adapters, so that jobs can use others.
    UnmergedAdapters,
}

/// Joins alternatives as in "a, b, or c".
pub fn alternatives(ways: &[String]) -> String {
    match ways {
        [rest @ .., last] if !rest.is_empty() => format!("{}, or {last}", rest.join(", ")),
        ways => ways.concat(),
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |parts: &[Component]| parts.iter().map(Component::to_string).collect::<Vec<_>>().join(" and the ");
        match self {
            Self::Advice(text) => f.write_str(text),
            Self::AnyOf(ways) => {
                let ways: Vec<String> = ways.iter().map(Self::to_string).collect();
                write!(f, "try to {}", alternatives(&ways))
            }
            Self::SmallerImage => f.write_str("lower the width and height"),
            Self::LegalSize { width, height } => write!(f, "try {width}x{height}"),
            Self::SizeThatFits { width, height, bytes } => write!(f, "use {width}x{height} ({})", amount(*bytes)),
            Self::SizeOfNoise => f.write_str("use the width and height it was made for"),
            Self::VaeTiling { bytes } => write!(f, "let the VAE work in tiles ({})", amount(*bytes)),
            Self::FewerReferences => f.write_str("give fewer references"),
            Self::ClosePrograms => f.write_str("close other programs"),
            Self::CloseGpuPrograms => f.write_str("close other programs that use the GPU"),
            Self::AllowMemory => f.write_str("allow this one more memory"),
            Self::SaveMemory => {
                let ways = [Self::SmallerImage, Self::ClosePrograms, Self::AllowMemory].map(|way| way.to_string());
                f.write_str(&alternatives(&ways))
            }
            Self::CpuBackend => f.write_str("use the CPU backend"),
            Self::CpuBackendIfAgain => f.write_str("if it happens again, the CPU backend runs without the GPU"),
            Self::RepairGpu(way) => write!(f, "{way}; the CPU backend runs without one"),
            Self::ListGpus => f.write_str("list the GPUs of this machine"),
            Self::ReportBug => f.write_str("this is a bug in kiln; please report it with the request that caused it"),
            Self::Overwrite => f.write_str("allow it to be replaced, or use another name"),
            Self::Restart => f.write_str("repeat that request to continue it, discard it to begin anew, or use another name"),
            Self::BeginAnew => f.write_str("discard it to begin anew, or use another name"),
            Self::NameModel => f.write_str("name a model folder"),
            Self::NameModelOrCache => f.write_str("name a model, or another cache with HF_HUB_CACHE"),
            Self::FinishDownload { repository, own } => {
                write!(f, "finish the download, for example with `hf download {repository}`")?;
                own.map_or(Ok(()), |own| write!(f, "; `{own}` is kiln's own small model"))
            }
            Self::NameParts => f.write_str("give a single file as the transformer, with a text encoder and a vae"),
            Self::CompleteFolder => write!(f, "{EXPECTED}, or give the transformer, the text encoder and the vae"),
            Self::PickParts(parts) => write!(f, "pick the {}", names(parts)),
            Self::AnyVariant => f.write_str("leave its variant open, also in kiln.json; the weights show it"),
            Self::Nvfp4Layout => f.write_str("if the file stores NVFP4 in another order, name its layout"),
            Self::AnyAttention => f.write_str("leave its format open; kiln then uses FP8 where it can"),
            Self::AnyNvfp4Math => f.write_str("leave open what they are multiplied as; kiln then uses what the device supports"),
            Self::AsStored => f.write_str("load them as stored, or name files that hold them in bf16, f16 or f32"),
            Self::ApplyAdapter => f.write_str("name the model that it was made for, and apply it as an adapter"),
            Self::InspectAdapter => f.write_str("use LoRA or LoKr of a FLUX.2 model"),
            Self::PartOfAdapter => f.write_str("use an adapter made for this model, or allow a part of this one"),
            Self::MergeAdapters => f.write_str("merge them with the weights when the model is loaded"),
            Self::UnmergedAdapters => f.write_str("load the model with unmerged adapters, or without any"),
            Self::ReplaceParts(parts) => write!(f, "put a complete file there, or give another {}", names(parts)),
        }
    }
}

/// The expected contents of a model folder.
pub const EXPECTED: &str = "expected transformer/, text_encoder/, vae/ and tokenizer/tokenizer.json there";

impl From<&str> for Remedy {
    fn from(advice: &str) -> Self {
        Self::Advice(advice.into())
    }
}

impl From<String> for Remedy {
    fn from(advice: String) -> Self {
        Self::Advice(advice)
    }
}
