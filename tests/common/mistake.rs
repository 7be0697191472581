//! One user mistake and the program's response: the exact exit code, the exact text, and no file written or changed.

use crate::sandbox::{Run, Sandbox, program};
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The text after the first line of an error.
#[derive(Clone, Copy, Debug)]
pub enum Hint {
    Nothing,
    Is(&'static str),
    /// A pointer to `--help`, which describes the flags.
    Help,
}
pub use Hint::{Help, Is, Nothing};

/// The file that a test changes while the program uses it.
pub const CHANGING: &str = "changing.safetensors";

/// Changes the sandbox while the program runs.
pub type Change = fn(&Sandbox);

/// One mistake and the expected response.
pub struct Row {
    pub args: Vec<OsString>,
    /// Shell commands that prepare the environment.
    pub setup: &'static str,
    /// The change to make once the program has opened its files.
    pub meanwhile: Option<Change>,
    pub code: i32,
    /// The first line, without `error: `.
    pub first: String,
    pub hint: String,
    pub help: bool,
}

/// Makes a row of the table; `line` is split at spaces.
pub fn row(line: &str, code: i32, first: impl Into<String>, hint: Hint) -> Row {
    let (hint, help) = match hint {
        Nothing => (String::new(), false),
        Is(hint) => (hint.to_owned(), false),
        Help => (String::new(), true),
    };
    let args = line.split(' ').map(OsString::from).collect();
    Row { args, setup: "", meanwhile: None, code, first: first.into(), hint, help }
}

impl Row {
    /// Replaces the hint, for one with figures in it.
    pub fn hint(self, hint: String) -> Self {
        Self { hint, ..self }
    }

    pub fn within(self, setup: &'static str) -> Self {
        Self { setup, ..self }
    }

    pub fn meanwhile(self, change: Change) -> Self {
        Self { meanwhile: Some(change), ..self }
    }

    /// Runs the program and describes every difference from the expected response.
    pub fn check(&self, sandbox: &Sandbox) -> Result<(), String> {
        // This file is changed by the test, not by the program.
        let ours = |entry: &Entry| self.meanwhile.is_none() || !entry.path.ends_with(CHANGING);
        let files = || state(&sandbox.0).into_iter().filter(ours).collect::<Vec<_>>();
        let before = files();
        let run = match self.meanwhile {
            None if self.setup.is_empty() => sandbox.run(&self.args),
            None => self.run_within(sandbox),
            Some(change) => self.run_and(sandbox, change),
        };
        let mut wrong = Vec::new();
        let mut expect = |what: &str, got: String, want: String| {
            if got != want {
                wrong.push(format!("{what} is\n  {got}\nand should be\n  {want}"));
            }
        };
        expect("exit code", format!("{:?}", run.code), format!("{:?}", Some(self.code)));
        expect("standard output", run.text().into(), String::new());
        let rest = match (self.help, self.hint.as_str()) {
            (true, _) => "\nFor more information, try '--help'.\n".into(),
            (false, "") => String::new(),
            (false, hint) => format!("\nhint: {hint}\n"),
        };
        let home = sandbox.0.display().to_string();
        let stderr = run.stderr.replace(&home, "$HOME");
        // Progress before the error is not part of it.
        let told = self.meanwhile.and_then(|_| stderr.find("error: ")).unwrap_or(0);
        expect("error", stderr[told..].into(), format!("error: {}\n{rest}", self.first));
        if files() != before {
            wrong.push("files were left or changed".into());
        }
        let line: Vec<_> =
            self.args.iter().map(|arg| arg.display().to_string()).map(|arg| arg.chars().take(80).collect()).collect();
        if wrong.is_empty() { Ok(()) } else { Err(format!("kiln {}\n{}", <[String]>::join(&line, " "), wrong.join("\n"))) }
    }

    /// Runs the program in an environment that a shell prepares. Mounts end with the shell.
    fn run_within(&self, sandbox: &Sandbox) -> Run {
        let script = format!("{} && exec \"$0\" \"$@\"", self.setup);
        let mounts = self.setup.contains("mount");
        let mut command = sandbox.wrapped(if mounts { "unshare" } else { "sh" });
        command.args(if mounts { &["--map-root-user", "--mount", "sh"][..] } else { &[] });
        command.args(["-c", &script, program()]).args(&self.args);
        Run::of(command)
    }

    /// Runs the program and makes a change after its first line of output. The program prints that line once its files are open.
    fn run_and(&self, sandbox: &Sandbox, change: Change) -> Run {
        let mut child = sandbox.command(&self.args).spawn().unwrap();
        let mut reader = BufReader::new(child.stderr.take().unwrap());
        let mut stderr = String::new();
        reader.read_line(&mut stderr).unwrap();
        change(sandbox);
        reader.read_to_string(&mut stderr).unwrap();
        let output = child.wait_with_output().unwrap();
        Run { code: output.status.code(), stdout: output.stdout, stderr }
    }
}

/// A file, with the metadata that a write would change.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    path: PathBuf,
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

/// Everything below a folder, in order.
fn state(folder: &Path) -> Vec<Entry> {
    let mut list = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            list.extend(state(&path));
        }
        let modified = (meta.mtime(), meta.mtime_nsec());
        // Checking whether a folder is writable changes its modification time.
        list.push(Entry { inode: meta.ino(), length: meta.len(), modified: if meta.is_dir() { (0, 0) } else { modified }, path });
    }
    list.sort();
    list
}

/// Checks all rows and lists those that fail.
pub fn check(sandbox: &Sandbox, rows: &[Row]) {
    let wrong: Vec<String> = rows.iter().filter_map(|row| row.check(sandbox).err()).collect();
    assert!(wrong.is_empty(), "{} of {} rows:\n\n{}", wrong.len(), rows.len(), wrong.join("\n\n"));
}
