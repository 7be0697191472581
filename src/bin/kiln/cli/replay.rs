//! `kiln replay`: makes an image again from what its file says, and compares.
//!
//! What the file says becomes flags of `kiln generate`, and so do the flags that change something. So there is one way to generate an
//! image, and a setting that can be given can be replayed.

mod compare;
mod find;
mod recorded;

use super::args::ModelArgs;
use super::generate::{GenerateOptions, Original};
use super::stdout::{DASH, json_line, print};
use super::{Cli, Process, Subcommand};
use crate::terminal::Terminal;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches, Parser};
use compare::compare;
use find::Searched;
use kiln::error::{Error, Result};
use kiln::inspect::ModelSamples;
use kiln::locate::{Environment, locate};
use kiln::metadata::{ARITHMETIC, ImageMetadata, Maker, StoredText};
use kiln::progress::Progress;
use kiln::text::shown_path;
use kiln::{DecodedReference, OpenModel, Variant};
use recorded::recorded;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The kind of fault of a file that cannot be replayed.
const FAULT: &str = "cannot make this image again";

/// The only value of a character that XML could not hold.
const LOST: char = char::REPLACEMENT_CHARACTER;

/// The flags, for the help and the parser.
#[derive(Args, Debug)]
struct Flags {
    /// Make this image again
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Use another prompt
    #[arg(long, value_name = "TEXT", help_heading = "Input")]
    prompt: Option<OsString>,

    /// Use another model than the one that made the image
    #[arg(long, help_heading = "Model")]
    any_model: bool,

    /// The flags of `kiln generate`. Each replaces what the file says.
    #[command(flatten)]
    options: GenerateOptions,
}

/// The arguments of `kiln replay`.
#[derive(Debug)]
pub struct ReplayArgs {
    flags: Flags,
    /// The flags that were given.
    given: Given,
}

/// Flags of a command line.
#[derive(Debug, Default)]
struct Given(Vec<(String, Vec<OsString>)>);

impl Given {
    fn has(&self, flag: &str) -> bool {
        self.0.iter().any(|(name, _)| name == flag)
    }

    /// Leaves out a flag.
    fn without(mut self, flag: &str) -> Self {
        self.0.retain(|(name, _)| name != flag);
        self
    }

    /// The words of the command line.
    fn words(&self) -> impl Iterator<Item = OsString> {
        self.0.iter().flat_map(|(name, values)| {
            let bare = values.is_empty().then(|| format!("--{name}").into());
            bare.into_iter().chain(values.iter().map(|value| word(name, value)))
        })
    }
}

/// A flag and its value as one word, so that no value is taken for a flag.
fn word(name: &str, value: &OsStr) -> OsString {
    let mut word = OsString::from(format!("--{name}="));
    word.push(value);
    word
}

impl FromArgMatches for ReplayArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let command = GenerateOptions::augment_args(Command::new("generate"));
        let given = command.get_arguments().filter_map(|arg| {
            let id = arg.get_id().as_str();
            let values = || matches.get_raw(id).into_iter().flatten().map(OsStr::to_owned).collect();
            let takes_values = arg.get_action().takes_values();
            (matches.value_source(id) == Some(ValueSource::CommandLine))
                .then(|| Some((arg.get_long()?.to_owned(), if takes_values { values() } else { Vec::new() })))?
        });
        Ok(Self { given: Given(given.collect()), flags: Flags::from_arg_matches(matches)? })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ReplayArgs {
    fn augment_args(command: Command) -> Command {
        Flags::augment_args(command)
            .about("Make an image of kiln again, or variations of it")
            .long_about(ABOUT)
            .override_usage("kiln replay [OPTIONS] <FILE>")
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// The help of the command.
const ABOUT: &str = "Make an image of kiln again, or variations of it\n\n\
    kiln reads how FILE was made and makes the image again: fox.png becomes fox-replay.png. It prints `identical`, or how many pixels \
    differ. kiln looks for references, masks, noise and adapters next to FILE and in the current folder, by their digests. A flag \
    that changes something makes a variation, which is not compared. Examples are --seed, --prompt, --steps and --count.";

/// Flags that leave the pixels alone, so that the result can be compared.
const HARMLESS: [&str; 21] = [
    "output",
    "metadata",
    "force",
    "json",
    "show",
    "preview",
    "preview-kind",
    "dump",
    "model",
    "transformer",
    "text-encoder",
    "vae",
    "tokenizer",
    "lora-partial",
    "backend",
    "device",
    "low-memory",
    "threads",
    "trace",
    "quiet",
    "verbose",
];

/// What `--json` prints at the end.
#[derive(serde::Serialize)]
struct Verdict {
    identical: bool,
    pixels_differ: usize,
    largest_difference: u8,
    /// Keys of the metadata that differ.
    keys: Vec<String>,
}

impl Subcommand for ReplayArgs {
    fn threads(&self) -> Option<usize> {
        self.flags.options.run.threads
    }

    fn run(self: Box<Self>, process: Process<'_>) -> Result<()> {
        let Self { flags: Flags { file, prompt, any_model, options }, given } = *self;
        let bytes = DecodedReference::read(&file)?;
        let (metadata, format) = stored(&bytes, &file)?;
        let lossy_text = format != "PNG" && metadata.prompt.contains(LOST);
        if lossy_text && prompt.is_none() {
            let what = "the file's format could not hold a character of its prompt";
            return Err(Error::bad_file(&file, FAULT, what).with_hint("give the prompt with --prompt"));
        }
        let mut searched = Searched::new(&file);
        let plan = recorded(&metadata, &given, &mut searched);
        let mut missing = plan.missing;
        let mut is_another_model = false;
        let model = match model_of(&options.model, &process.environment, &metadata)? {
            Matched::As(name) => name,
            Matched::Not { found } => {
                let ImageMetadata { model, model_id, .. } = &metadata;
                if !any_model {
                    missing.push(format!("the model is {found}, and {model} ({model_id}) is needed (--model, or --any-model)"));
                }
                is_another_model = true;
                None
            }
        };
        if !missing.is_empty() {
            let hint =
                "name the files with these flags, or copy them next to the image; a file that was saved again is another file";
            return Err(Error::bad_file(&file, FAULT, missing.join("; ")).with_hint(hint));
        }

        let output = options.output.clone().unwrap_or_else(|| replay_name(&file, format));
        let another_prompt = prompt.as_deref().is_some_and(|prompt| prompt != OsStr::new(&metadata.prompt));
        let is_variation = plan.changed || !given.is_harmless() || is_another_model || another_prompt;
        let mut words: Vec<OsString> = vec!["kiln".into(), "generate".into()];
        words.extend(plan.words);
        words.extend(model.map(|name| word("model", OsStr::new(name))));
        words.extend(given.without("output").words());
        words.push(word("output", output.as_os_str()));
        words.extend(["--".into(), prompt.unwrap_or_else(|| metadata.prompt.clone().into())]);
        let args = Cli::try_parse_from(words).map_err(|error| unusable(&file, &error))?.command;
        let Some(super::Command::Generate(args)) = args else {
            return Err(Error::Op { op: "replay", what: "the flags are of another command".into() });
        };
        if metadata.arithmetic != ARITHMETIC {
            let (then, now) = (metadata.arithmetic, ARITHMETIC);
            let what = format!("{} computed with arithmetic {then}, this kiln has {now}, and bytes may differ", metadata.version);
            Terminal::new(options.run.verbosity()).warn(&what);
        }
        let Process { environment, signals, out } = process;
        let original = Original { path: file.clone(), device: metadata.device.clone() };
        args.carry_out("kiln replay", Process { environment, signals, out }, Some(original))?;
        if is_variation || output == Path::new(DASH) {
            return Ok(());
        }
        report(&file, &bytes, &metadata, &output, options.json, out)
    }
}

impl Given {
    /// Whether the flags leave the pixels alone.
    fn is_harmless(&self) -> bool {
        self.0.iter().all(|(name, _)| HARMLESS.contains(&&**name) || recorded::FILES.contains(&&**name))
    }
}

/// Compares the new file with the original, and prints what was found.
fn report(file: &Path, bytes: &[u8], metadata: &ImageMetadata, output: &Path, json: bool, out: &mut dyn Write) -> Result<()> {
    let made = DecodedReference::read(output)?;
    let found = compare((bytes, file), (&made, output), metadata)?;
    let line = match json {
        true => json_line(&Verdict {
            identical: found.is_identical(),
            pixels_differ: found.differ,
            largest_difference: found.largest,
            keys: found.keys.clone(),
        })?,
        false if found.is_identical() => b"identical\n".to_vec(),
        false => Vec::new(),
    };
    print(out, &line)?;
    if found.is_identical() { Ok(()) } else { Err(Error::NotIdentical { path: file.into(), how: found.to_string() }) }
}

/// What kiln stored in a file, and the name of the file's format.
fn stored(bytes: &[u8], file: &Path) -> Result<(ImageMetadata, &'static str)> {
    let text = StoredText::of_file(bytes, file)?;
    let why = match (text.metadata(), Maker::of(&text)) {
        (Some(Ok(metadata)), _) => return Ok((metadata, text.format)),
        (Some(Err(why)), _) => format!("its metadata cannot be read: {why}"),
        (None, Some(Maker { program: kiln::metadata::Program::Kiln, .. })) => {
            "it does not say which model and files it was made from".into()
        }
        (None, Some(maker)) => format!("it was made by {}", maker.program.name()),
        (None, None) => "it does not say how it was made".into(),
    };
    let hint = format!("`kiln show {}` prints what it says", shown_path(file));
    Err(Error::bad_file(file, FAULT, why).with_hint(hint))
}

/// An error about metadata that no command line can express.
fn unusable(file: &Path, error: &clap::Error) -> Error {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    Error::bad_file(file, FAULT, line.strip_prefix("error: ").unwrap_or(line))
}

/// Whether the model is the one that made the image.
enum Matched {
    /// It is, by this name, or as flags and environment say.
    As(Option<&'static str>),
    /// It is another.
    Not { found: String },
}

/// Finds the model that made an image: the one that flags, the environment and the cache lead to, else one that needs no files.
fn model_of(args: &ModelArgs, environment: &Environment, metadata: &ImageMetadata) -> Result<Matched> {
    let variant = args.variant.map(Variant::from).or_else(|| metadata.variant.parse().ok());
    let identify = |model: Option<&str>| -> Result<(String, String)> {
        let mut request = args.request(environment.clone());
        request.model = model.map(PathBuf::from).or(request.model);
        let found = locate(&request)?;
        let model = OpenModel::open(&found, variant)?;
        Ok((ModelSamples::new(&found, &model)?.id()?, model.name))
    };
    let first = identify(None);
    if first.as_ref().is_ok_and(|(id, _)| *id == metadata.model_id) {
        return Ok(Matched::As(None));
    }
    if !args.names_files() {
        for name in [kiln::locate::BUILT_IN, kiln::locate::TINY] {
            if identify(Some(name)).is_ok_and(|(id, _)| id == metadata.model_id) {
                return Ok(Matched::As(Some(name)));
            }
        }
    }
    first.map(|(id, name)| Matched::Not { found: format!("{name} ({id})") })
}

/// The name of the new file: `fox.png` becomes `fox-replay.png`. The extension follows from the format.
fn replay_name(file: &Path, format: &str) -> PathBuf {
    let extension = match format {
        "PNG" => "png",
        "JPEG" => "jpg",
        _ => "webp",
    };
    let mut name = file.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-replay.{extension}"));
    file.with_file_name(name)
}
