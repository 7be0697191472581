//! The definition of the flags. Only checks of a single flag are here; [`super::GenerateRequest`] checks flags against each other.

mod batch;
mod bench;
mod file;
mod generate;
mod help;
mod image;
mod lora;
mod plan;
mod quantised;
mod quantize;
mod selftest;
mod shell;
mod tiny;
mod trace;
mod values;

pub use batch::BatchArgs;
pub use bench::BenchArgs;
pub use file::FileArgs;
pub use image::ImageOptions;
pub use lora::{InspectArgs, LoraArg, LoraArgs, LoraCommand};
pub use plan::PlanArgs;
pub use quantised::QuantisedArgs;
pub use quantize::QuantizeArgs;
pub use selftest::SelftestArgs;
pub use shell::{CompletionsArgs, ManArgs};
pub use tiny::TinyArgs;
pub use trace::TraceArgs;
pub use values::{
    BackendArg, DTypeArg, FormatArg, ImageFormatArg, KleinArg, LayoutArg, LoraModeArg, NoiseArg, Nvfp4LayoutArg, PaddingArg,
    VariantArg, WeightLayoutArg,
};

use crate::terminal::Verbosity;
use clap::{Args, Parser, Subcommand};
use help::{
    BENCH_EXAMPLE, BENCH_EXAMPLES, EXAMPLE, EXAMPLES, INSPECT_EXAMPLES, QUANTIZE_EXAMPLES, RUN_EXAMPLES, SELFTEST_EXAMPLES,
};
use kiln::PerPart;
use kiln::error::{Error, Result};
use kiln::locate::{Environment, LocateRequest};
use kiln::predict::Card;
use std::ffi::OsString;
use std::path::PathBuf;
use values::{card, within};

/// Generates pictures from text with FLUX.2 [klein]: a prompt in, a PNG out
///
/// `kiln PROMPT` is short for `kiln generate PROMPT`.
#[allow(rustdoc::broken_intra_doc_links)] // the comment is a help text, and FLUX.2 [klein] a name
#[derive(Debug, Parser)]
#[command(
    name = "kiln",
    bin_name = "kiln",
    version,
    // The usage line that clap derives for an error lists the flags that were given, as if they were required.
    override_usage = "kiln [OPTIONS] [PROMPT]\n       kiln <COMMAND>",
    args_conflicts_with_subcommands = true,
    arg_required_else_help = true,
    after_help = EXAMPLE,
    after_long_help = EXAMPLES
)]
pub struct Cli {
    /// A command; without one, [`Cli::generate`] is what was asked for.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The flags of `generate`, which need not be named.
    #[command(flatten)]
    pub generate: GenerateArgs,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate pictures; the same as giving only a prompt
    #[command(override_usage = "kiln generate [OPTIONS] [PROMPT]", after_help = EXAMPLE, after_long_help = EXAMPLES)]
    Generate(Box<GenerateArgs>),

    /// Generate a picture for each line of a file or of standard input, with a model that is loaded once
    ///
    /// Every line is answered with a line of JSON on standard output, in order and as soon as it is done: the fields of `kiln
    /// generate --json` and the number of the line, or an `error` with its `hint` and `code`. Errors of a line do not end the run;
    /// the exit code is 1 if there were any.
    #[command(override_usage = "kiln run [OPTIONS] [FILE]", after_help = RUN_EXAMPLES)]
    Run(Box<BatchArgs>),

    /// Print what a picture would take, without computing anything
    ///
    /// For klein 4B, or for the model that is named, by its files' headers: tokens of each part, the schedule, floating-point
    /// operations of each stage, the formats of its layers, bytes of weights and of workspace. Formats and bytes are those on a
    /// GPU: quantised weights that it has no kernels for are counted as they are expanded.
    #[command(override_usage = "kiln plan [OPTIONS]")]
    Plan(Box<PlanArgs>),

    /// Benchmark: a cold picture and warm ones stage by stage, or single kernels
    ///
    /// Loads the model, generates a picture cold and several warm, writes none of them, and prints the time of each stage and the
    /// memory that was planned and used. Cold is the first of this process; its files may still be in the page cache.
    #[command(override_usage = "kiln bench [OPTIONS] [PROMPT]", after_help = BENCH_EXAMPLE, after_long_help = BENCH_EXAMPLES)]
    Bench(Box<BenchArgs>),

    /// Write the model in FP8 or NVFP4, to files as they are published
    ///
    /// A run that was stopped is continued by the same command.
    #[command(override_usage = "kiln quantize [OPTIONS] --to <FORMAT> <IN> <OUT>", after_long_help = QUANTIZE_EXAMPLES)]
    Quantize(Box<QuantizeArgs>),

    /// Look into the files of LoRA and LoKr adapters
    ///
    /// Pictures take them with --lora.
    #[command(override_usage = "kiln lora inspect [OPTIONS] <FILE>", subcommand, after_help = INSPECT_EXAMPLES)]
    Lora(LoraCommand),

    /// Print what kiln can use on this machine: GPUs, driver, kernels, models; check a model
    ///
    /// With --model, or a flag that names a part, the model is checked: whether its files are known ones, by the names, dtypes and
    /// shapes of their tensors; whether every value is finite, and no part of a matrix was never written; and whether the text encoder,
    /// if it is Qwen3-4B, gives the values that were published for it. The files are read once. If a check fails, the exit code is 1,
    /// and a block says what to send us. A file that is not known is no failure.
    #[command(override_usage = "kiln doctor [OPTIONS]")]
    Doctor(Box<DoctorArgs>),

    /// Check that a GPU computes what kiln asks of it, line by line
    ///
    /// Copies, single instructions element by element, and whole GEMMs and attention against naive kernels, then how fast they are.
    /// Takes less than a minute and no model. A check that this GPU has no kernels for says so; one that fails makes the exit code 1.
    /// On GPUs whose own kernels need it (compute capability 12.x) kiln makes the quick checks by itself before it uses these kernels
    /// for the first time, and remembers what came of it for this GPU, driver and build of kiln; this command refreshes that.
    #[command(override_usage = "kiln selftest [OPTIONS]", after_help = SELFTEST_EXAMPLES)]
    Selftest(SelftestArgs),

    /// Write the tiny random model to a new folder, as real models are published
    #[command(override_usage = "kiln tiny [OPTIONS] <DIR>")]
    Tiny(TinyArgs),

    /// Print the completion script of a shell
    ///
    /// For bash: kiln completions bash > ~/.local/share/bash-completion/completions/kiln
    #[command(override_usage = "kiln completions <SHELL>")]
    Completions(CompletionsArgs),

    /// Print a man page, of kiln or of one of its commands
    ///
    /// To read it: kiln man | man -l -
    #[command(override_usage = "kiln man [COMMAND]")]
    Man(ManArgs),
}

impl Command {
    /// The number of CPU threads that the command asks for; 0 means one per core.
    pub fn threads(&self) -> usize {
        let asked = match self {
            Self::Generate(args) => args.run.threads,
            Self::Run(args) => args.run.threads,
            Self::Bench(args) => args.run.threads,
            Self::Quantize(args) => args.threads,
            Self::Plan(_) | Self::Lora(_) | Self::Doctor(_) | Self::Selftest(_) => None,
            Self::Tiny(_) | Self::Completions(_) | Self::Man(_) => None,
        };
        asked.unwrap_or(0)
    }

    /// Whether threads of the command's own start parallel work, and not only the one that runs it.
    pub fn shares_pool(&self) -> bool {
        matches!(self, Self::Run(_))
    }
}

/// Flags of `kiln generate`.
#[derive(Args, Debug)]
// With this the error for `--seed -1` says what a seed is, and not that there is no option `-1`.
#[command(allow_negative_numbers = true)]
pub struct GenerateArgs {
    /// What the picture shows
    #[command(flatten)]
    pub prompt: PromptArgs,

    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// The image file to write: .png, .jpg, .jpeg or .webp [default: PROMPT-SEED.png]
    ///
    /// The default name is made from the prompt's words. With --count, `out.png` becomes `out-1.png`, `out-2.png` and so on. `-`
    /// writes the picture itself to standard output.
    #[arg(short, long, value_name = "PATH", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// How files are written
    #[command(flatten)]
    pub file: FileArgs,

    /// Write intermediate values to a safetensors file
    ///
    /// Its tensors are `token_ids`, `prompt_embeds`, `noise`, `latents.0` (the noise again) to `latents.N`, and `image`, the
    /// picture before it is rounded; with references also `reference.1.tokens` onwards, with guidance `negative_prompt_embeds`.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub dump: Option<PathBuf>,

    /// Print a JSON object per picture instead of its path
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// What the picture is made from and how large
    #[command(flatten)]
    pub image: ImageOptions,

    /// Negative prompt: what the picture should not show; base models only
    #[arg(long, value_name = "PROMPT", help_heading = "Sampling")]
    pub negative: Option<String>,

    /// Seed of the noise [default: random]
    ///
    /// The same seed gives the same picture. A random one is printed.
    #[arg(long, value_name = "N", value_parser = within(0..=u64::MAX), conflicts_with = "noise", help_heading = "Sampling")]
    pub seed: Option<u64>,

    /// How many pictures, with consecutive seeds
    #[arg(long, value_name = "N", value_parser = within(1usize..=10_000), default_value = "1", help_heading = "Sampling")]
    pub count: usize,

    /// Generator of the noise [default: torch-cuda]
    #[arg(long, value_enum, value_name = "KIND", conflicts_with = "noise", help_heading = "Sampling")]
    pub noise_kind: Option<NoiseArg>,

    /// SMs (multiprocessors) of the GPU that torch-cuda reproduces [default: 132]
    #[arg(long, value_name = "N", value_parser = within(1u32..=1024), conflicts_with = "noise", help_heading = "Sampling")]
    pub noise_sms: Option<u32>,

    /// Resident threads per SM of that GPU [default: 2048]
    #[arg(long, value_name = "N", value_parser = within(256u32..=4096), conflicts_with = "noise", help_heading = "Sampling")]
    pub noise_threads: Option<u32>,

    /// Read the initial noise from a safetensors file
    ///
    /// Its tensor `noise` has to be F32, with one row of 128 values for each 16 x 16 pixels. Files of --dump have one.
    #[arg(long, value_name = "FILE", help_heading = "Sampling")]
    pub noise: Option<PathBuf>,

    /// Where and how to compute
    #[command(flatten)]
    pub run: RunArgs,
}

/// Flags that give a prompt.
#[derive(Args, Debug)]
pub struct PromptArgs {
    /// What to show; may be empty
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<OsString>,

    /// What was typed after it, which is a mistake: most likely quotes were forgotten.
    #[arg(hide = true)]
    pub rest: Vec<OsString>,

    /// Read the prompt from a file, or from standard input with `-`
    ///
    /// UTF-8. A byte order mark at its start and one newline at its end are dropped. Standard input that is empty is an error; an
    /// empty prompt is given as "".
    #[arg(long, value_name = "FILE", help_heading = "Input")]
    pub prompt_file: Option<PathBuf>,
}

/// Flags that say where and how to compute.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Backend to compute on
    #[arg(long, value_enum, value_name = "WHERE", default_value = "auto", help_heading = "Run")]
    pub backend: BackendArg,

    /// Which GPU, as `kiln doctor` numbers them [default: 0]
    #[arg(long, value_name = "N", value_parser = within(0usize..=1023), help_heading = "Run")]
    pub device: Option<usize>,

    /// In which formats results are stored, and layers and attention computed
    #[command(flatten)]
    pub quantised: QuantisedArgs,

    /// Let the transformer take the text encoder's place in GPU memory
    ///
    /// Done anyway where both do not fit. The picture is the same; it is there a little later, because loading waits for the
    /// prompt.
    #[arg(long, help_heading = "Run")]
    pub low_memory: bool,

    /// CPU threads, at most one per core [default: one per core]
    #[arg(long, value_name = "N", value_parser = within(1usize..=1024), help_heading = "Run")]
    pub threads: Option<usize>,

    /// A trace of the run
    #[command(flatten)]
    pub trace: TraceArgs,

    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "verbose", help_heading = "Run")]
    pub quiet: bool,

    /// Print more: what became of the flags and of references, and which GPU kernels ran
    #[arg(short, long, help_heading = "Run")]
    pub verbose: bool,
}

impl RunArgs {
    /// How much to print.
    pub fn verbosity(&self) -> Verbosity {
        Verbosity::new(self.quiet, self.verbose)
    }

    /// The index of the GPU to use, should the backend be a GPU.
    pub fn device(&self) -> Result<usize> {
        match self.device {
            Some(_) if self.backend == BackendArg::Cpu => {
                Err(Error::usage("--device is about GPUs, --backend cpu takes none", "leave out one of them"))
            }
            asked => Ok(asked.unwrap_or(0)),
        }
    }
}

/// Flags that name a model.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// Model folder, or repository id in the Hugging Face cache
    ///
    /// A folder as diffusers writes it, ComfyUI's folder of models, or one with a file for each part; or `builtin`, the small
    /// model that kiln has itself, or `tiny`, a random one. Without this option kiln looks at KILN_MODEL, then into the cache.
    #[arg(long, value_name = "PATH|ID", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Transformer to use instead of the model's
    ///
    /// A safetensors file in the BFL or the diffusers layout, or a folder of shards. The same goes for the other parts.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub transformer: Option<PathBuf>,

    /// Text encoder to use instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub text_encoder: Option<PathBuf>,

    /// VAE to use instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// The tokenizer.json to use instead of the model's
    ///
    /// Single files need none: the one they were trained with is built in.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub tokenizer: Option<PathBuf>,

    /// Variant of the model, where names do not tell
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Model")]
    pub variant: Option<VariantArg>,

    /// Order of elements and scales in NVFP4 files, most of which do not tell
    ///
    /// Files of ComfyUI and BFL have one order, those of ModelOpt two others. kiln goes by the names and the metadata in the
    /// file.
    #[arg(long, value_enum, value_name = "ORDER", default_value = "auto", help_heading = "Model")]
    pub nvfp4_layout: Nvfp4LayoutArg,
}

impl ModelArgs {
    /// Whether a model is named by `--model` or by the environment.
    pub fn is_named(&self, environment: &Environment) -> bool {
        self.model.is_some() || environment.kiln_model.is_some()
    }

    /// Whether a flag names a model or a part of one.
    pub fn names_files(&self) -> bool {
        [&self.model, &self.transformer, &self.text_encoder, &self.vae].iter().any(|path| path.is_some())
    }

    /// The request for `locate`.
    pub fn request(&self, environment: Environment) -> LocateRequest {
        let Self { model, transformer, text_encoder, vae, tokenizer, nvfp4_layout, .. } = self;
        LocateRequest {
            model: model.clone(),
            parts: PerPart { transformer: transformer.clone(), text_encoder: text_encoder.clone(), vae: vae.clone() },
            tokenizer: tokenizer.clone(),
            nvfp4_layout: (*nvfp4_layout).into(),
            environment,
        }
    }
}

/// Flags of `kiln doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Which model to look for
    #[command(flatten)]
    pub model: ModelArgs,

    /// Say what would run how on a GPU that is not here: RTX 3090, RTX 4090, RTX 5090, RTX PRO 6000 or H200
    #[arg(long, value_name = "NAME", value_parser = card)]
    pub card: Option<Card>,

    /// Also hash the model's files, and say whether their SHA-256 was published
    #[arg(long, conflicts_with = "card")]
    pub full: bool,

    /// List every kernel of each op, not only the kernel files
    #[arg(short, long)]
    pub verbose: bool,
}

#[cfg(test)]
mod tests {
    use super::shell::COMMANDS;
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from([&["kiln"], line].concat())
    }

    #[test]
    fn the_definition_passes_the_checks_of_clap() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_first_argument_that_names_a_command_is_that_command() {
        let prompt = |line: &[&str]| {
            let cli = parse(line).unwrap();
            let args = match cli.command {
                None => cli.generate,
                Some(Command::Generate(args)) => *args,
                Some(other) => panic!("{other:?}"),
            };
            args.prompt.prompt.unwrap().into_string().unwrap()
        };
        assert_eq!(prompt(&["a fox"]), "a fox");
        assert_eq!(prompt(&["generate", "a fox"]), "a fox");
        assert_eq!(prompt(&["generate", "tiny"]), "tiny");
        // The value of an option is not a command, nor is anything after an option.
        assert_eq!(prompt(&["--model", "tiny", "a fox", "--seed", "3"]), "a fox");
        assert_eq!(prompt(&["--seed", "3", "tiny"]), "tiny");
        assert_eq!(prompt(&["--", "-fox"]), "-fox");
        assert_eq!(prompt(&["--", "tiny"]), "tiny");
        assert!(matches!(parse(&["tiny", "dir"]).unwrap().command, Some(Command::Tiny(_))));
        assert_eq!(parse(&["tinny", "dir"]).unwrap().generate.prompt.rest, ["dir"]);
    }

    #[test]
    fn every_command_has_a_man_page() {
        let mut names = Vec::new();
        for command in Cli::command().get_subcommands() {
            names.push(command.get_name().to_owned());
            names.extend(command.get_subcommands().map(|inner| format!("{}-{}", command.get_name(), inner.get_name())));
        }
        assert_eq!(names, COMMANDS);
    }

    #[test]
    fn numbers_at_their_limits() {
        for (flag, good, bad) in [
            ("--steps", ["1", "1000"], ["0", "1001"]),
            ("--count", ["1", "10000"], ["0", "10001"]),
            ("--threads", ["1", "1024"], ["0", "1025"]),
            ("--quality", ["1", "100"], ["0", "101"]),
            ("--noise-sms", ["1", "1024"], ["0", "1025"]),
            ("--noise-threads", ["256", "4096"], ["255", "4097"]),
            ("--seed", ["0", "18446744073709551615"], ["-1", "18446744073709551616"]),
            ("--guidance", ["0", "100"], ["-0.1", "100.1"]),
            ("--width", ["0", "16384"], ["-512", "1.5"]),
        ] {
            for value in good {
                parse(&["x", flag, value]).unwrap_or_else(|e| panic!("{flag} {value}: {e}"));
            }
            for value in bad.into_iter().chain(["nan", "", "1e999", "inf", "٣", "0x10", "1 "]) {
                let error = parse(&["x", flag, value]).unwrap_err();
                assert_eq!(error.exit_code(), 2, "{flag} {value}");
                assert!(error.to_string().contains("expected a"), "{flag} {value}: {error}");
            }
        }
    }

    #[test]
    fn klein_conflicts_with_named_models() {
        assert!(parse(&["plan", "--klein", "9b", "--variant", "base", "--steps", "3"]).is_ok());
        for wrong in ["--model", "--transformer", "--text-encoder", "--vae", "--tokenizer"] {
            assert_eq!(parse(&["plan", "--klein", "9b", wrong, "x"]).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn bench_measures_images_or_kernels() {
        let bench = |line: &[&str]| -> Result<BenchArgs, clap::Error> {
            match parse(&[&["bench"], line].concat())?.command {
                Some(Command::Bench(args)) => Ok(*args),
                other => panic!("{other:?}"),
            }
        };
        let args = bench(&["a fox", "--json", "--runs", "1000"]).unwrap();
        assert_eq!((args.prompt.prompt.as_deref(), args.runs), (Some("a fox".as_ref()), 1000));
        assert_eq!((args.json, args.kernels), (Some("-".into()), None));
        let args = bench(&["--kernels", "--json=times.json", "--backend", "cpu"]).unwrap();
        assert_eq!((args.kernels.as_deref(), args.json), (Some(""), Some("times.json".into())));
        assert_eq!(bench(&["--kernels=conv", "--quick"]).unwrap().kernels.as_deref(), Some("conv"));
        for wrong in [
            &["--runs", "0"][..],
            &["--runs", "1001"],
            &["--quick"],
            &["--kernels", "a fox"],
            &["--kernels", "--model", "tiny"],
            &["--kernels", "--width", "64"],
            &["--kernels", "--runs", "3"],
            &["--output", "a.png"],
            &["--count", "2"],
        ] {
            assert_eq!(bench(wrong).unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }
}
