//! The command line. A request passes through one module after the other: `args` and the file of a command define the flags,
//! `request` checks them, `session` opens the device and the model, `settings` resolves defaults, `report` informs the user, and
//! `outputs` writes the files. In a request every number is legal and every input file was checked.

mod adapters;
pub mod args;
pub mod batch;
pub mod bench;
mod completions;
mod device;
mod doctor;
mod edit;
pub mod formats;
pub mod generate;
mod help;
mod hint;
mod lora;
mod names;
mod outputs;
mod plan;
mod previews;
mod process;
mod quantize;
mod replay;
mod report;
mod request;
pub mod selftest;
#[cfg(feature = "serve")]
mod serve;
mod session;
mod settings;
mod show;
mod stdout;
mod support;
mod tiny;
mod trace;
mod writer;

pub use hint::{REPORT_BUG, SAVE_MEMORY, hint, message};
pub use process::{Process, Signals};
pub use stdout::{STDOUT, reader_left};

// What the server is made of.
#[cfg(feature = "serve")]
pub use self::{
    adapters::Library,
    edit::PreparedEdit,
    outputs::Origin,
    report::{field, flat_image_warning, ignored_settings, saturation_warning, unknown_words_note},
    request::{ImageRequest, Setup, random_seed},
    session::Session,
    settings::{ModelProfile, Settings},
};

use args::PlanArgs;
use batch::BatchArgs;
use bench::BenchArgs;
use clap::{FromArgMatches, Parser};
use completions::{CompletionsArgs, ManArgs, definition};
use doctor::DoctorArgs;
use generate::GenerateArgs;
use help::{EXAMPLE, EXAMPLES};
use kiln::error::Result;
use kiln::text::shown;
use lora::LoraCommand;
use quantize::QuantizeArgs;
use replay::ReplayArgs;
use selftest::SelftestArgs;
#[cfg(feature = "serve")]
use serve::ServeArgs;
use show::ShowFileArgs;
use std::ffi::OsString;
use tiny::TinyArgs;

/// Generate images from text with FLUX.2 [klein]
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
    /// The command. Without one, [`Cli::generate`] holds the flags.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The flags of `generate`, whose name is optional.
    #[command(flatten)]
    pub generate: GenerateArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
#[allow(missing_docs)] // the help is on the arguments of each
pub enum Command {
    Generate(Box<GenerateArgs>),
    Run(Box<BatchArgs>),
    #[cfg(feature = "serve")]
    Serve(Box<ServeArgs>),
    Show(Box<ShowFileArgs>),
    Replay(Box<ReplayArgs>),
    Plan(Box<PlanArgs>),
    Bench(Box<BenchArgs>),
    Quantize(Box<QuantizeArgs>),
    #[command(subcommand)]
    Lora(Box<LoraCommand>),
    Doctor(Box<DoctorArgs>),
    Selftest(Box<SelftestArgs>),
    Tiny(Box<TinyArgs>),
    Completions(Box<CompletionsArgs>),
    Man(Box<ManArgs>),
}

impl Command {
    /// The command that runs.
    pub fn subcommand(self) -> Box<dyn Subcommand> {
        match self {
            Self::Generate(args) => args,
            Self::Run(args) => args,
            #[cfg(feature = "serve")]
            Self::Serve(args) => args,
            Self::Show(args) => args,
            Self::Replay(args) => args,
            Self::Plan(args) => args,
            Self::Bench(args) => args,
            Self::Quantize(args) => args,
            Self::Lora(args) => args,
            Self::Doctor(args) => args,
            Self::Selftest(args) => args,
            Self::Tiny(args) => args,
            Self::Completions(args) => args,
            Self::Man(args) => args,
        }
    }
}

/// A command with its arguments.
pub trait Subcommand {
    /// The number of CPU threads to use. `None` means one per core.
    fn threads(&self) -> Option<usize> {
        None
    }

    /// Whether other threads than the one that runs the command start parallel work.
    fn shares_pool(&self) -> bool {
        false
    }

    /// Runs the command.
    fn run(self: Box<Self>, process: Process<'_>) -> Result<()>;
}

/// Parses the arguments of a process, beginning with its own name. A request for help or the version is returned as an error, too;
/// the error holds the text to print and the exit code.
///
/// If the first argument names a command, it is that command; otherwise all arguments are flags of `generate`. So a prompt that is
/// spelled like a command needs `kiln generate`, and the value of an option is never mistaken for a command.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let matches = definition().try_get_matches_from(&args).map_err(|error| {
        // clap quotes arguments unescaped, including control characters. Parsing the escaped arguments gives the same error with
        // a text that is safe to print.
        let harmless = args.iter().map(|arg| OsString::from(shown(&arg.to_string_lossy())));
        if error.use_stderr() { definition().try_get_matches_from(harmless).err().unwrap_or(error) } else { error }
    })?;
    let Cli { command, generate } = Cli::from_arg_matches(&matches)?;
    Ok(command.unwrap_or_else(|| Command::Generate(Box::new(generate))))
}

#[cfg(test)]
mod tests {
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
            &["--kernels", "--init", "a.png"],
            &["--kernels", "--runs", "3"],
            &["--output", "a.png"],
            &["--count", "2"],
        ] {
            assert_eq!(bench(wrong).unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }
}
