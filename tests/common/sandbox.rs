//! Runs the real program in a temporary folder.

use crate::fnv::fnv1a;
use kiln::internals::names::Layout;
use kiln::internals::tensor::DType;
use kiln::internals::tiny::contents;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Flags that generate an image quickly.
pub const QUICK: [&str; 8] = ["--width", "64", "--height", "64", "--steps", "1", "--precision", "f32"];

/// The program's path: cargo provides it, or else it is two folders above the test, which then runs without cargo.
pub fn program() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| {
        let beside = || std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("kiln").to_str().unwrap().to_owned();
        std::env::var("CARGO_BIN_EXE_kiln").unwrap_or_else(|_| beside())
    });
    &PATH
}

/// The tiny model with prompts of 64 tokens: with 512, encoding the prompt takes most of the time of a small image. It is stored next to
/// the program, because several test processes use it.
pub fn tiny_with_short_prompts() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let files = contents(Layout::Diffusers, DType::Bf16).unwrap();
        let own = (Path::new("kiln.json"), &br#"{"max_text_tokens": 64, "width": 256, "height": 256}"#[..]);
        let files: Vec<_> = files.iter().map(|(name, bytes)| (Path::new(name), &bytes[..])).chain([own]).collect();
        let digest = fnv1a(files.iter().flat_map(|(_, bytes)| bytes.iter().copied()));
        let folder = Path::new(program()).with_file_name(format!("tiny-{digest:016x}"));
        if !folder.is_dir() {
            let unfinished = folder.with_extension(std::process::id().to_string());
            for (name, bytes) in files {
                let path = unfinished.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
            // Another process may have been first.
            if fs::rename(&unfinished, &folder).is_err() {
                fs::remove_dir_all(&unfinished).unwrap();
            }
        }
        folder
    });
    &FOLDER
}

/// A temporary folder that is the program's current folder and home, and the program's default model.
pub struct Sandbox(pub PathBuf, &'static OsStr);

/// How a run ended.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Sandbox {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("kiln-cli-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path, tiny_with_short_prompts().as_os_str())
    }

    /// A folder in which the default model is the program's built-in tiny one.
    pub fn with_tiny() -> Self {
        let mut sandbox = Self::new();
        sandbox.1 = OsStr::new("tiny");
        sandbox
    }

    /// A command that runs the program, isolated from the models of this machine.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.wrapped(program());
        command.args(args);
        command
    }

    /// A command that runs the program without a default model.
    pub fn bare_command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.command(args);
        command.env_remove("KILN_MODEL");
        command
    }

    pub fn bare<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        Run::of(self.bare_command(args))
    }

    /// A command that runs another program in the same environment; that program starts kiln.
    pub fn wrapped(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.0).env("HOME", &self.0).env("KILN_MODEL", self.1);
        for name in ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "RUST_BACKTRACE", "KILN_SHOW"] {
            command.env_remove(name);
        }
        // Results must not depend on the GPU of this machine.
        command.env("CUDA_VISIBLE_DEVICES", "");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// A command that runs the program under a limit that a shell sets with `ulimit`.
    pub fn limited<S: AsRef<OsStr>>(&self, limit: &str, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.wrapped("sh");
        command.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\""), program()]).args(args);
        command
    }

    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        Run::of(self.command(args))
    }

    /// Runs with [`QUICK`] flags, and expects success.
    pub fn quick(&self, args: &[&str]) -> Run {
        self.run(args.iter().chain(&QUICK)).good()
    }

    /// Writes the tiny model to a folder.
    pub fn tiny(&self, folder: &str, flags: &[&str]) {
        let run = self.run(["tiny", folder].iter().chain(flags)).good();
        assert_eq!((run.text(), run.stderr.as_str()), (format!("{folder}\n").as_str(), ""));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a PNG.
    pub fn write_png(&self, name: &str, width: u32, height: u32, pixel: impl Fn(u32, u32) -> [u8; 3]) {
        let mut encoder = png::Encoder::new(fs::File::create(self.path(name)).unwrap(), width, height);
        encoder.set_color(png::ColorType::Rgb);
        let pixels: Vec<u8> = (0..width * height).flat_map(|i| pixel(i % width, i / width)).collect();
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    }

    /// The names of the files and folders in the sandbox.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Run {
    pub fn of(mut command: Command) -> Self {
        let output = command.output().unwrap();
        Self { code: output.status.code(), stdout: output.stdout, stderr: String::from_utf8(output.stderr).unwrap() }
    }

    pub fn good(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    pub fn json(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Sends a signal, `-INT` or `-TERM`.
pub fn send(signal: &str, child: &Child) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// A number with thousands separators, as in messages.
pub fn grouped(number: u64) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", grouped(number / 1000), number % 1000),
    }
}

/// A decoded PNG and its text chunks.
pub struct Png {
    pub width: u32,
    pub height: u32,
    pub pixels: Vec<u8>,
    pub text: BTreeMap<String, String>,
}

impl Png {
    pub fn read(path: &Path) -> Self {
        Self::decode(&fs::read(path).unwrap())
    }

    pub fn decode(file: &[u8]) -> Self {
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        let chunks = reader.info().utf8_text.iter();
        let text = chunks.map(|chunk| (chunk.keyword.clone(), chunk.get_text().unwrap())).collect();
        Self { width: frame.width, height: frame.height, pixels, text }
    }
}
