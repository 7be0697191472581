//! What was asked for, checked as far as it can be before a model is opened.

use super::args::{BackendArg, GenerateArgs, NoiseArg, PromptArgs, ShapeArgs};
use super::names::{DASH, Target};
use super::run::STDOUT;
use crate::config::{Conventions, Variant};
use crate::dump::read_noise;
use crate::error::{Error, Result};
use crate::locate::{Environment, Found, locate};
use crate::noise::{CHANNELS, NoiseKind};
use crate::output::{Planned, check_writable};
use crate::pipeline::Noise;
use crate::reference::{DecodedReference, PreparedReference};
use crate::sequence::{Grid, Pixels, SequencePlan};
use crate::tensor::Precision;
use crate::terminal::Verbosity;
use crate::text::shown_path;
use crate::tokenizer::{MAX_PROMPT_BYTES, SHORTEN, check_length};
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

/// Pictures to make. Only what depends on the model's files is still open.
#[derive(Debug)]
pub struct GenerateRequest {
    /// The prompt.
    pub prompt: String,
    /// The model.
    pub found: Found,
    /// How its pictures are made where nothing else is asked for.
    pub conventions: Conventions,
    /// Whether a model was named, or this is what was found.
    pub named: bool,
    /// Overrides what the model's files say about themselves.
    pub variant: Option<Variant>,
    /// Images to start from.
    pub references: Vec<OpenReference>,
    /// What the picture should not show, if that was said.
    pub negative: Option<String>,
    /// Size of the pictures.
    pub size: Pixels,
    /// Steps, if not the variant's own.
    pub steps: Option<usize>,
    /// Guidance, if not the variant's own.
    pub guidance: Option<f32>,
    /// One for each picture.
    pub seeds: Vec<u64>,
    /// Where noise comes from.
    pub noise: Noise,
    /// Names of the pictures.
    pub target: Target,
    /// Where values along the way go.
    pub dump: Option<PathBuf>,
    /// Replace files.
    pub force: bool,
    /// What results are rounded to.
    pub precision: Precision,
    /// Where to compute.
    pub backend: BackendArg,
    /// Which GPU.
    pub device: usize,
    /// Save GPU memory whether or not it is short.
    pub low_memory: bool,
    /// Print objects, not paths.
    pub json: bool,
    /// How much to tell.
    pub verbosity: Verbosity,
}

impl GenerateRequest {
    /// Checks flags against each other, the environment and the file system. `stdin` is read if the prompt comes from there;
    /// `random` is the seed where none is given.
    pub fn new(args: GenerateArgs, environment: Environment, stdin: &mut dyn Read, random: u64) -> Result<Self> {
        let request = Self::unsaved(args, environment, stdin, random)?;
        request.check_outputs(0)?;
        Ok(request)
    }

    /// The same for pictures that nobody keeps.
    pub fn unsaved(args: GenerateArgs, environment: Environment, stdin: &mut dyn Read, random: u64) -> Result<Self> {
        let seed = args.seed.unwrap_or(random);
        let seeds: Vec<u64> = (0..args.count as u64).map(|i| seed.wrapping_add(i)).collect();
        let to_stdout = args.output.as_deref() == Some(Path::new(DASH));
        if seeds.len() > 1 {
            for (given, flag) in [(args.noise.is_some(), "--noise"), (args.dump.is_some(), "--dump"), (to_stdout, "--output -")] {
                if given {
                    let what = format!("{flag} is about one picture, --count {} asks for more", seeds.len());
                    return Err(Error::usage(what, format!("leave out --count, or {flag}")));
                }
            }
        }
        if to_stdout && args.json {
            return Err(Error::usage(
                "the picture and its JSON would both go to standard output",
                "leave out --json, or name a file",
            ));
        }
        if args.dump.as_deref() == Some(Path::new(DASH)) {
            return Err(Error::usage("--dump writes a file, not standard output", "name a file, such as run.safetensors"));
        }
        let kind = noise_kind(&args)?;
        let prompt = prompt(&args.prompt, stdin)?;
        if let Some(negative) = &args.negative {
            check_length(negative.len())?;
            check_nul(negative, "negative prompt", None)?;
        }
        let named = args.model.is_named(&environment);
        let variant = args.model.variant.map(Variant::from);
        let found = locate(&args.model.request(environment))?;
        let conventions = found.conventions()?;
        let references = open_references(&args.shape.reference, &conventions)?;
        let size = canvas(&args.shape, &references, &conventions)?;
        let grids: Vec<Grid> = references.iter().map(|r| r.prepared.grid()).collect();
        SequencePlan::new(conventions.max_text_tokens, size.grid(), &grids)?;
        let noise = match &args.noise {
            Some(path) => Noise::Given(read_noise(path, size.grid().tokens())?),
            None => Noise::Drawn(kind),
        };
        Ok(Self {
            target: Target::new(args.output, &prompt, seeds.len()),
            prompt,
            found,
            conventions,
            named,
            variant,
            references,
            negative: args.negative,
            size,
            steps: args.shape.steps,
            guidance: args.shape.guidance,
            seeds,
            noise,
            dump: args.dump,
            force: args.force,
            precision: args.run.precision.into(),
            backend: args.run.backend,
            device: args.run.device()?,
            low_memory: args.run.low_memory,
            json: args.json,
            verbosity: Verbosity::new(args.run.quiet, args.run.verbose),
        })
    }

    /// Refuses now what could not be written after minutes of work. `features` are the numbers that text makes, as far as is known.
    pub fn check_outputs(&self, features: usize) -> Result<()> {
        // As large as a picture that does not compress, with its text.
        let (pixels, rows) = (self.size.width() * self.size.height(), self.size.height());
        let bytes = (3 * pixels + rows + self.prompt.len()) as u64 + (16 << 10);
        let mut files = Vec::with_capacity(self.seeds.len() + 1);
        for path in self.seeds.iter().enumerate().filter_map(|(i, &seed)| self.target.path(i, self.seed(seed))) {
            check_format(&path)?;
            if let Some(dump) = &self.dump
                && same_place(&path, dump)
            {
                let what = format!("the picture and --dump would be the same file ({})", shown_path(&path));
                return Err(Error::usage(what, "give one of them another name"));
            }
            files.push(Planned { path, bytes });
        }
        if self.target == Target::Stdout {
            check_stdout()?;
        }
        // The noise twice, the latents of each step, the raw picture and the text features.
        let latents = (self.steps.unwrap_or(1) + 2) * self.size.grid().tokens() * CHANNELS;
        let bytes = 4 * (latents + 3 * pixels + features) as u64;
        files.extend(self.dump.clone().map(|path| Planned { path, bytes }));
        check_writable(&files, self.force)
    }

    /// The seed of a picture as it is told: none where the noise comes from a file, whatever number was drawn.
    pub fn seed(&self, drawn: u64) -> Option<u64> {
        matches!(self.noise, Noise::Drawn(_)).then_some(drawn)
    }
}

/// An image to start from and the file it came from.
#[derive(Debug)]
pub struct OpenReference {
    /// The file.
    pub path: PathBuf,
    /// Its pixels, brought to size.
    pub prepared: PreparedReference,
}

/// Reads the images to start from.
pub fn open_references(paths: &[PathBuf], conventions: &Conventions) -> Result<Vec<OpenReference>> {
    let prepare = |path| Ok(DecodedReference::open(path)?.prepare(conventions.max_reference_pixels));
    paths.iter().map(|path| Ok(OpenReference { path: path.clone(), prepared: prepare(path)? })).collect()
}

/// Size of the picture: what was asked for, else that of the first reference, else the model's own.
pub fn canvas(asked: &ShapeArgs, references: &[OpenReference], conventions: &Conventions) -> Result<Pixels> {
    let first = references.first().map(|r| (r.prepared.width, r.prepared.height));
    let (width, height) = first.unwrap_or((conventions.width, conventions.height));
    Pixels::new(asked.width.unwrap_or(width), asked.height.unwrap_or(height))
}

/// A seed nobody chose: half of the random key that the standard library gives every hash map. 32 bits are short enough to type.
pub fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish() >> 32
}

fn noise_kind(args: &GenerateArgs) -> Result<NoiseKind> {
    let card = args.noise_sms.map(|_| "--noise-sms").or(args.noise_threads.map(|_| "--noise-threads"));
    let cpu = |kind: NoiseKind| match card {
        Some(flag) => {
            Err(Error::usage(format!("{flag} describes a GPU, --noise-kind {kind} imitates none"), format!("leave out {flag}")))
        }
        None => Ok(kind),
    };
    match args.noise_kind {
        Some(NoiseArg::TorchCpu) => cpu(NoiseKind::TorchCpu),
        Some(NoiseArg::TorchCpuLegacy) => cpu(NoiseKind::TorchCpuLegacy),
        Some(NoiseArg::TorchCuda) | None => Ok(match NoiseKind::HOPPER {
            NoiseKind::TorchCuda { sms, threads } => {
                NoiseKind::TorchCuda { sms: args.noise_sms.unwrap_or(sms), threads: args.noise_threads.unwrap_or(threads) }
            }
            other => other,
        }),
    }
}

fn prompt(args: &PromptArgs, stdin: &mut dyn Read) -> Result<String> {
    if let (Some(prompt), Some(rest)) = (&args.prompt, args.rest.first()) {
        let what = format!("there is more than one prompt: `{}` and `{}`", prompt.display(), rest.display());
        return Err(Error::usage(what, "put the whole prompt in quotes"));
    }
    let bytes = match (&args.prompt, &args.prompt_file) {
        (Some(prompt), None) => prompt.as_encoded_bytes().to_vec(),
        (None, Some(path)) => {
            let mut bytes = Vec::new();
            // A little more than may be used is enough to tell that it is too long, whatever the file is.
            let limit = (BYTE_ORDER_MARK.len() + MAX_PROMPT_BYTES) as u64 + 3;
            let standard = path == Path::new(DASH);
            let read = if standard {
                stdin.take(limit).read_to_end(&mut bytes)
            } else {
                File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes))
            };
            read.map_err(|e| Error::read(path, e))?;
            // A program whose standard input is closed finds an empty one, and so does one after a command that failed.
            if standard && bytes.is_empty() {
                return Err(Error::usage("standard input is empty, so there is no prompt", "an empty prompt is given as \"\""));
            }
            if bytes.starts_with(b"\xFF\xFE") || bytes.starts_with(b"\xFE\xFF") {
                return Err(Error::usage(format!("prompt is UTF-16, not UTF-8 ({})", path.display()), SAVE));
            }
            if bytes.starts_with(BYTE_ORDER_MARK) {
                bytes.drain(..BYTE_ORDER_MARK.len());
            }
            // Editors end files with a newline that nobody means.
            if bytes.last() == Some(&b'\n') {
                bytes.pop();
                bytes.pop_if(|byte| *byte == b'\r');
            }
            bytes
        }
        (Some(_), Some(_)) => return Err(Error::usage("there are two prompts", "give PROMPT or --prompt-file, not both")),
        (None, None) => {
            return Err(Error::usage(
                "there is no prompt",
                "give one in quotes, or --prompt-file FILE; `kiln --help` has examples",
            ));
        }
    };
    let file = args.prompt_file.as_ref().map(|path| format!(" ({})", path.display()));
    let file = file.as_deref();
    // First, because the limit on reading may have cut a character.
    match file {
        // How long it is was not found out.
        Some(file) if bytes.len() > MAX_PROMPT_BYTES => {
            return Err(Error::usage(format!("prompt too long{file}: the limit is {MAX_PROMPT_BYTES} bytes"), SHORTEN));
        }
        _ => check_length(bytes.len())?,
    }
    let prompt = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let what = format!("prompt is not valid UTF-8 at byte {at}{}", file.unwrap_or_default());
        Error::Usage { what, hint: file.map(|_| SAVE.into()) }
    })?;
    check_nul(&prompt, "prompt", file)?;
    Ok(prompt)
}

/// What some editors begin UTF-8 files with, and nobody means to say.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// What to do about a file in another encoding.
const SAVE: &str = "save it as UTF-8";

/// Refuses the one character that a PNG's text cannot hold. A file that has one is most likely UTF-16.
fn check_nul(text: &str, what: &str, file: Option<&str>) -> Result<()> {
    match text.find('\0') {
        Some(at) => {
            let hint = if file.is_some() { SAVE } else { "leave it out" };
            Err(Error::usage(format!("{what} has a NUL character at byte {at}{}", file.unwrap_or_default()), hint))
        }
        None => Ok(()),
    }
}

/// Refuses names of other formats, and extensions that nobody would open as a picture. No extension at all is fine.
fn check_format(path: &Path) -> Result<()> {
    let refused = |why: &str| Error::Write { path: path.into(), source: io::Error::new(io::ErrorKind::InvalidInput, why) };
    if ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|own| path == Path::new(own)) {
        return Err(refused("this is standard output, which is called `-`"));
    }
    match path.extension() {
        Some(extension) if !extension.eq_ignore_ascii_case("png") => Err(refused("kiln writes PNG files, named .png")),
        _ => Ok(()),
    }
}

/// Refuses a standard output that cannot take a picture.
fn check_stdout() -> Result<()> {
    let why = if io::stdout().is_terminal() {
        "a terminal cannot show a picture; redirect standard output, or name a file"
    } else if is_lost() {
        "it is closed, so nobody would get the picture"
    } else {
        return Ok(());
    };
    Err(Error::Write { path: STDOUT.into(), source: io::Error::new(io::ErrorKind::InvalidInput, why) })
}

/// Whether standard output was closed when the program started. Rust's runtime then puts the null device in its place, open for
/// reading as well, which a shell's redirection never is.
fn is_lost() -> bool {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{OFlags, fcntl_getfl, fstat, stat};
        let (stdout, null) = (fstat(io::stdout()), stat("/dev/null"));
        let is_null =
            stdout.is_ok_and(|stdout| null.is_ok_and(|null| stdout.st_rdev == null.st_rdev && stdout.st_ino == null.st_ino));
        is_null && fcntl_getfl(io::stdout()).is_ok_and(|flags| flags & OFlags::ACCMODE == OFlags::RDWR)
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Whether two paths that may not exist yet name the same file.
fn same_place(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        (folder.canonicalize().ok(), path.file_name().map(|name| name.to_owned()))
    };
    a == b || place(a) == place(b)
}

#[cfg(test)]
mod tests {
    use super::super::args::Command;
    use super::super::parse;
    use super::*;
    use std::ffi::OsString;

    fn request(line: &[&str], stdin: &[u8]) -> Result<GenerateRequest> {
        let output = std::env::temp_dir().join("kiln-request.png").into_os_string();
        let args = ["kiln", "--model", "tiny", "-o"].map(OsString::from).into_iter().chain([output]);
        let args = args.chain(line.iter().map(OsString::from));
        let Ok(Command::Generate(args)) = parse(args) else { panic!("{line:?}") };
        GenerateRequest::new(*args, Environment::default(), &mut &*stdin, 99)
    }

    #[test]
    fn defaults() {
        let request = request(&["a fox"], b"").unwrap();
        assert_eq!((request.prompt.as_str(), &*request.seeds), ("a fox", &[99][..]));
        assert_eq!((request.size.width(), request.size.height()), (256, 256));
        assert!(matches!(request.noise, Noise::Drawn(NoiseKind::HOPPER)));
        assert_eq!((request.steps, request.guidance), (None, None));
        assert_eq!((request.precision, request.verbosity), (Precision::Bf16, Verbosity::Normal));
        assert!(request.named && !request.force && !request.json);
    }

    #[test]
    fn seeds_follow_each_other_around_the_end() {
        let request = request(&["x", "--seed", "18446744073709551615", "--count", "3"], b"").unwrap();
        assert_eq!(request.seeds, [u64::MAX, 0, 1]);
        assert_ne!(random_seed(), random_seed());
    }

    #[test]
    fn prompts_from_files_lose_one_newline() {
        for (bytes, prompt) in [
            ("a fox\n", "a fox"),
            ("a fox\r\n", "a fox"),
            ("a\n\n", "a\n"),
            ("\n", ""),
            ("\r", "\r"),
            ("é", "é"),
            ("\u{feff}a fox\n", "a fox"),
            ("\u{feff}", ""),
            // Only the first is a mark.
            ("\u{feff}\u{feff}a", "\u{feff}a"),
            ("a\u{feff}", "a\u{feff}"),
        ] {
            assert_eq!(request(&["--prompt-file", "-"], bytes.as_bytes()).unwrap().prompt, prompt);
        }
        let longest = "x".repeat(MAX_PROMPT_BYTES);
        for text in [format!("{longest}\r\n"), format!("\u{feff}{longest}\r\n")] {
            assert_eq!(request(&["--prompt-file", "-"], text.as_bytes()).unwrap().prompt, longest);
        }
        let error = request(&["--prompt-file", "-"], format!("{longest}x").as_bytes()).unwrap_err();
        assert!(error.to_string().starts_with("prompt too long"), "{error}");
        // A character that is cut by the limit on reading is not blamed.
        let error = request(&["--prompt-file", "-"], "é".repeat(MAX_PROMPT_BYTES).as_bytes()).unwrap_err();
        assert!(error.to_string().starts_with("prompt too long"), "{error}");
    }

    #[test]
    fn prompts_in_other_encodings_are_refused() {
        let error = |line: &[&str], stdin: &[u8]| request(line, stdin).unwrap_err();
        let file = |stdin: &[u8]| error(&["--prompt-file", "-"], stdin).to_string();
        let utf16 = |mark: &[u8], bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            mark.iter().copied().chain("a fox é 狐\n".encode_utf16().flat_map(bytes)).collect()
        };
        for stdin in [utf16(b"\xff\xfe", u16::to_le_bytes), utf16(b"\xfe\xff", u16::to_be_bytes)] {
            assert_eq!(file(&stdin), "prompt is UTF-16, not UTF-8 (-)");
        }
        // Without a mark it is a text full of NUL characters, if it is one at all.
        assert_eq!(file(b"a\0 \0f\0o\0x\0"), "prompt has a NUL character at byte 1 (-)");
        assert_eq!(file(b"\0a\0 \0f\0o\0x"), "prompt has a NUL character at byte 0 (-)");
        assert!(file(&utf16(b"", u16::to_le_bytes)).starts_with("prompt is not valid UTF-8 at byte "));
        assert_eq!(error(&["--prompt-file", "-"], b"a\0").hint().unwrap(), "save it as UTF-8");
        assert_eq!(error(&["a\0b"], b"").to_string(), "prompt has a NUL character at byte 1");
        assert_eq!(error(&["x", "--negative", "ab\0"], b"").to_string(), "negative prompt has a NUL character at byte 2");
        // Nothing at all was not said by anybody.
        let error = error(&["--prompt-file", "-"], b"");
        assert_eq!(error.to_string(), "standard input is empty, so there is no prompt");
        assert_eq!((error.exit_code(), request(&[""], b"").unwrap().prompt.as_str()), (2, ""));
    }

    #[test]
    fn the_card_belongs_to_torch_cuda() {
        let kind = |line: &[&str]| -> Result<NoiseKind> {
            match request(&[&["x"], line].concat(), b"")?.noise {
                Noise::Drawn(kind) => Ok(kind),
                Noise::Given(_) => panic!(),
            }
        };
        assert_eq!(kind(&["--noise-sms", "108"]).unwrap(), NoiseKind::TorchCuda { sms: 108, threads: 2048 });
        let line = ["--noise-kind", "torch-cuda", "--noise-threads", "1536"];
        assert_eq!(kind(&line).unwrap(), NoiseKind::TorchCuda { sms: 132, threads: 1536 });
        assert_eq!(kind(&["--noise-kind", "torch-cpu"]).unwrap(), NoiseKind::TorchCpu);
        let error = kind(&["--noise-kind", "torch-cpu-legacy", "--noise-threads", "1536"]).unwrap_err();
        assert_eq!(error.to_string(), "--noise-threads describes a GPU, --noise-kind torch-cpu-legacy imitates none");
    }
}
