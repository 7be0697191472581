//! Requests: the values of the flags, checked as far as possible before a model is opened.

use super::adapters::AdapterFiles;
use super::args::{BackendArg, ImageOptions, NoiseArg, PromptArgs, QuantizedArgs};
use super::edit::PreparedEdit;
use super::generate::{GenerateArgs, GenerateOptions};
use super::report::flag;
use super::stdout::DASH;
use kiln::device::Fp8Accumulate;
use kiln::error::{Error, Result};
use kiln::locate::{Environment, Found, locate};
use kiln::lora::{AdapterMode, Adapters};
use kiln::selftest::Records;
use kiln::{
    DecodedReference, Grid, LoadOptions, MAX_PROMPT_BYTES, ModelDefaults, Noise, NoiseFile, NoiseKind, Pixels, PreparedReference,
    SHORTEN, SequenceLayout, Variant, check_length, read_noise,
};
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Images to generate. Defaults that depend on the model's files are not resolved yet.
#[derive(Clone, Debug)]
pub struct ImageRequest {
    /// The prompt.
    pub prompt: String,
    /// The negative prompt, if one was given.
    pub negative: Option<String>,
    /// Where the images start, and what of that is repainted.
    pub edit: Option<PreparedEdit>,
    /// The files of the prompt and of the noise.
    pub texts: Vec<PathBuf>,
    /// The reference images, resized and cropped for the model.
    pub references: Vec<PreparedReference>,
    /// Size of the images.
    pub size: Pixels,
    /// The requested guidance. The variant decides what it leaves open.
    pub options: ImageOptions,
    /// One seed for each image.
    pub seeds: Vec<u64>,
    /// The source of the noise.
    pub noise: Noise,
    /// The SHA-256 of the file of the noise, if it comes from one.
    pub noise_sha256: Option<String>,
    /// Whether intermediate values are kept.
    pub record: bool,
    /// Adapters of these images, if they differ from the model's.
    pub adapters: Option<Arc<Adapters>>,
}

/// The model that generates the images, and the device it runs on.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The model.
    pub found: Found,
    /// Whether the user named the model; if not, it was found by the default search.
    pub named: bool,
    /// The model's adapters.
    pub adapters: AdapterFiles,
    /// The model's defaults for size, steps and guidance.
    pub defaults: ModelDefaults,
    /// The variant, if it overrides the one in the model's files.
    pub variant: Option<Variant>,
    /// The backend to use.
    pub backend: BackendArg,
    /// The index of the GPU to use.
    pub device: usize,
    /// How a GPU sums FP8 products.
    pub accumulate: Fp8Accumulate,
    /// How to load the model.
    pub options: LoadOptions,
    /// Where self-tests of GPUs are recorded.
    pub records: Records,
    /// Notes to print before anything is opened.
    pub notes: Vec<String>,
    /// The kind of device that the image was made on before, if it is made again.
    pub made_on: Option<String>,
}

impl ImageRequest {
    /// A request for one image with an empty prompt. The options are checked against each other.
    pub fn new(options: ImageOptions, defaults: &ModelDefaults) -> Result<Self> {
        let edit = PreparedEdit::open(&options.edit, (options.width, options.height), defaults)?;
        let prepare = |path: &PathBuf| Ok(DecodedReference::open(path)?.prepare(defaults.max_reference_pixels));
        let references = options.references.iter().map(prepare).collect::<Result<_>>()?;
        Self::of_images(options, edit, references, defaults)
    }

    /// A request for one image with an empty prompt, whose images are read.
    pub fn of_images(
        options: ImageOptions,
        edit: Option<PreparedEdit>,
        references: Vec<PreparedReference>,
        defaults: &ModelDefaults,
    ) -> Result<Self> {
        // The default is the size of the first reference, or without references the model's own size.
        let first = references.first().map(|reference| (reference.width, reference.height));
        let size = match &edit {
            Some(edit) => edit.edit.canvas,
            None => options.size(first.unwrap_or((defaults.width, defaults.height)), defaults.width * defaults.height)?,
        };
        let request = Self {
            prompt: String::new(),
            negative: None,
            edit,
            texts: Vec::new(),
            references,
            size,
            options,
            seeds: vec![0],
            noise: Noise::Drawn(NoiseKind::HOPPER),
            noise_sha256: None,
            record: false,
            adapters: None,
        };
        let grids: Vec<Grid> = request.reference_grids().collect();
        SequenceLayout::new(defaults.max_text_tokens, size.grid(), &grids)?;
        Ok(request)
    }

    /// The sizes of all reference images, the init image among them if it is one.
    fn reference_grids(&self) -> impl Iterator<Item = Grid> {
        let edit = self.edit.iter().map(|edit| &edit.edit);
        let init = edit.clone().filter(|edit| edit.start.is_reference).map(|edit| edit.start.init.grid);
        let bare = edit.filter_map(|edit| edit.reference.as_ref()).map(|reference| reference.grid);
        init.chain(bare).chain(self.references.iter().map(PreparedReference::grid))
    }

    /// The files that are read, other than the model's. No output may replace them.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let edit = self.edit.iter().flat_map(|edit| &edit.files);
        edit.chain(&self.options.references).chain(&self.texts).map(PathBuf::as_path)
    }

    /// The size of the finished images.
    pub fn finished_size(&self) -> (usize, usize) {
        self.edit.as_ref().map_or((self.size.width(), self.size.height()), |edit| edit.edit.summary.size)
    }

    /// Checks flags against each other, the environment and the file system, except for the output files. `stdin` is read if the
    /// prompt comes from there; `random` is the seed to use if none is given.
    pub fn from_args(args: &GenerateArgs, environment: Environment, stdin: &mut dyn Read, random: u64) -> Result<(Self, Setup)> {
        let GenerateArgs { prompt: of_prompt, options: args } = args;
        let seed = args.seed.unwrap_or(random);
        let Some(last) = seed.checked_add(args.count as u64 - 1) else {
            let what = format!("--count {} from --seed {seed} on goes beyond the largest seed, {}", args.count, u64::MAX);
            return Err(Error::usage(what, "lower --seed or --count"));
        };
        let seeds: Vec<u64> = (seed..=last).collect();
        let to_stdout = args.output.as_deref() == Some(Path::new(DASH));
        if seeds.len() > 1 {
            for (given, flag) in [(args.noise.is_some(), "--noise"), (args.dump.is_some(), "--dump"), (to_stdout, "--output -")] {
                if given {
                    let what = format!("{flag} is about one image, --count {} asks for more", seeds.len());
                    return Err(Error::usage(what, format!("leave out --count, or {flag}")));
                }
            }
        }
        if to_stdout && args.json {
            return Err(Error::usage(
                "the image and its JSON would both go to standard output",
                "leave out --json, or name a file",
            ));
        }
        if args.dump.as_deref() == Some(Path::new(DASH)) {
            return Err(Error::usage("--dump writes a file, not standard output", "name a file, such as run.safetensors"));
        }
        args.image.check(flag)?;
        let kind = noise_kind(args)?;
        let prompt = prompt(of_prompt, stdin)?;
        if let Some(negative) = &args.negative {
            check_length(negative.len())?;
            check_nul(negative, "negative prompt", None)?;
        }
        let named = args.model.is_named(&environment);
        let variant = args.model.variant.map(Variant::from);
        let records = Records::below(environment.caches().as_deref());
        let adapters = AdapterFiles::locate(&args.lora, &environment)?;
        let found = locate(&args.model.request(environment))?;
        let defaults = found.defaults()?;
        let shape = Self::new(args.image.clone(), &defaults)?;
        let (noise, noise_sha256) = match &args.noise {
            Some(path) => {
                let NoiseFile { values, sha256 } = read_noise(path, shape.size.grid().tokens())?;
                (Noise::Given(values), Some(sha256))
            }
            None => (Noise::Drawn(kind), None),
        };
        let texts = of_prompt.prompt_file.iter().chain(&args.noise).cloned().collect();
        let (negative, record) = (args.negative.clone(), args.dump.is_some());
        let request = Self { texts, prompt, negative, seeds, noise, noise_sha256, record, ..shape };
        let setup = Setup {
            found,
            named,
            adapters,
            defaults,
            variant,
            backend: args.run.backend,
            device: args.run.device()?,
            accumulate: args.run.quantized.fp8_accumulate.into(),
            options: LoadOptions {
                adapters: args.lora.lora_mode.into(),
                ..request.load_options(args.run.low_memory, &args.run.quantized)
            },
            records,
            notes: Vec::new(),
            made_on: None,
        };
        Ok((request, setup))
    }

    /// The options for loading a model for these images.
    pub fn load_options(&self, low_memory: bool, quantized: &QuantizedArgs) -> LoadOptions {
        LoadOptions {
            precision: quantized.precision.into(),
            references: self.edit.is_some() || !self.references.is_empty(),
            low_memory,
            attention: quantized.attention.into(),
            nvfp4_math: quantized.nvfp4_math.into(),
            vae_tiling: self.options.vae_tiling,
            quantize: quantized.quantize,
            adapters: AdapterMode::Auto,
        }
    }
}

/// A random seed of 32 bits, short enough to type. The randomness comes from the keys of the standard library's hash maps.
pub fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish() >> 32
}

fn noise_kind(args: &GenerateOptions) -> Result<NoiseKind> {
    let gpu_flag = args.noise_sms.map(|_| "--noise-sms").or(args.noise_threads.map(|_| "--noise-threads"));
    let cpu = |kind: NoiseKind| match gpu_flag {
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
            // Reading slightly more than the limit suffices to detect a prompt that is too long, however large the file is.
            let limit = (BYTE_ORDER_MARK.len() + MAX_PROMPT_BYTES) as u64 + 3;
            let standard = path == Path::new(DASH);
            let read = if standard {
                stdin.take(limit).read_to_end(&mut bytes)
            } else {
                File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes))
            };
            read.map_err(|e| Error::read(path, e))?;
            // Empty standard input usually means that it was closed, or that the command before the pipe failed.
            if standard && bytes.is_empty() {
                return Err(Error::usage("standard input is empty, so there is no prompt", "an empty prompt is given as \"\""));
            }
            if bytes.starts_with(b"\xFF\xFE") || bytes.starts_with(b"\xFE\xFF") {
                return Err(Error::usage(format!("prompt is UTF-16, not UTF-8 ({})", path.display()), SAVE));
            }
            if bytes.starts_with(BYTE_ORDER_MARK) {
                bytes.drain(..BYTE_ORDER_MARK.len());
            }
            // Editors end files with a newline that is not part of the prompt.
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
    // The length is checked before the encoding, because the read limit may have cut a character in two.
    match file {
        // The file was not read to its end, so its length is unknown.
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

/// The byte order mark that some editors write at the start of UTF-8 files; it is not part of the text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The hint for a file in another encoding.
const SAVE: &str = "save it as UTF-8";

/// Refuses NUL, the one character that a text chunk of a PNG cannot hold. A file that contains it is most likely UTF-16.
pub fn check_nul(text: &str, what: &str, file: Option<&str>) -> Result<()> {
    match text.find('\0') {
        Some(at) => {
            let hint = if file.is_some() { SAVE } else { "leave it out" };
            Err(Error::usage(format!("{what} has a NUL character at byte {at}{}", file.unwrap_or_default()), hint))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Command, parse};
    use super::*;
    use kiln::{AttentionFormat, Nvfp4Math, Precision};
    use std::ffi::OsString;

    fn request_and_setup(line: &[&str], stdin: &[u8]) -> Result<(ImageRequest, Setup)> {
        let args = ["kiln", "--model", "tiny"].iter().chain(line).map(OsString::from);
        let Ok(Command::Generate(args)) = parse(args) else { panic!("{line:?}") };
        ImageRequest::from_args(&args, Environment::default(), &mut &*stdin, 99)
    }

    fn request(line: &[&str], stdin: &[u8]) -> Result<ImageRequest> {
        request_and_setup(line, stdin).map(|(request, _)| request)
    }

    #[test]
    fn defaults() {
        let (request, setup) = request_and_setup(&["a fox"], b"").unwrap();
        assert_eq!((request.prompt.as_str(), &*request.seeds), ("a fox", &[99][..]));
        assert_eq!((request.size.width(), request.size.height()), (256, 256));
        assert!(matches!(request.noise, Noise::Drawn(NoiseKind::HOPPER)));
        assert_eq!((request.options.steps, request.options.guidance), (None, None));
        assert!(!request.record && request.negative.is_none() && request.references.is_empty());
        let LoadOptions { precision, references, low_memory, attention, nvfp4_math, vae_tiling, quantize, adapters } =
            setup.options;
        assert_eq!((precision, references, setup.device), (Precision::Bf16, false, 0));
        assert!(!low_memory && !vae_tiling);
        assert_eq!((attention, setup.accumulate), (AttentionFormat::Auto, Fp8Accumulate::Auto));
        assert_eq!((nvfp4_math, quantize, adapters), (Nvfp4Math::Auto, None, AdapterMode::Auto));
        assert!(setup.adapters == AdapterFiles::default() && request.adapters.is_none());
        assert!(setup.named && matches!(setup.found, Found::Tiny) && setup.notes.is_empty());
    }

    #[test]
    fn consecutive_seeds_end_at_the_largest() {
        let seeds =
            |count: &str| request(&["x", "--seed", "18446744073709551614", "--count", count], b"").map(|request| request.seeds);
        assert_eq!(seeds("2").unwrap(), [u64::MAX - 1, u64::MAX]);
        assert_eq!(seeds("3").unwrap_err().exit_code(), 2);
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
            // Only the first is a byte order mark.
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
        // A character that the read limit cuts in two is not reported as invalid UTF-8.
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
        // UTF-16 without a byte order mark is either valid UTF-8 with many NUL characters, or not valid UTF-8.
        assert_eq!(file(b"a\0 \0f\0o\0x\0"), "prompt has a NUL character at byte 1 (-)");
        assert_eq!(file(b"\0a\0 \0f\0o\0x"), "prompt has a NUL character at byte 0 (-)");
        assert!(file(&utf16(b"", u16::to_le_bytes)).starts_with("prompt is not valid UTF-8 at byte "));
        assert_eq!(error(&["--prompt-file", "-"], b"a\0").hint().unwrap(), "save it as UTF-8");
        assert_eq!(error(&["a\0b"], b"").to_string(), "prompt has a NUL character at byte 1");
        assert_eq!(error(&["x", "--negative", "ab\0"], b"").to_string(), "negative prompt has a NUL character at byte 2");
        // Empty standard input is an error, but an empty prompt argument is not.
        let error = error(&["--prompt-file", "-"], b"");
        assert_eq!(error.to_string(), "standard input is empty, so there is no prompt");
        assert_eq!((error.exit_code(), request(&[""], b"").unwrap().prompt.as_str()), (2, ""));
    }

    #[test]
    fn flags_that_describe_a_gpu_require_torch_cuda() {
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
