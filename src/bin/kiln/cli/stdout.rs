//! Standard output, which carries results only; everything else goes to standard error.

use kiln::error::{Error, Result};
use kiln::text::harmless_json;
use serde::Serialize;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The name of standard output in error messages.
pub const STDOUT: &str = "standard output";

/// The name of standard output on the command line.
pub const DASH: &str = "-";

/// Writes a result and flushes it, so that the reader of a pipe gets it at once.
pub fn print(out: &mut dyn Write, result: &[u8]) -> Result<()> {
    out.write_all(result).and_then(|()| out.flush()).map_err(|source| Error::Write { path: STDOUT.into(), source })
}

/// Writes a line about a file that was written. The files are the result, so a reader that closed the pipe is no reason to write no
/// more of them: `kiln run` and `kiln generate` finish their work.
pub fn print_line(out: &mut dyn Write, line: &[u8]) -> Result<()> {
    match print(out, line) {
        Err(error) if reader_left(&error) => Ok(()),
        printed => printed,
    }
}

/// Whether an error only says that the reader of standard output closed the pipe.
pub fn reader_left(error: &Error) -> bool {
    matches!(error, Error::Write { path, source } if path == Path::new(STDOUT) && source.kind() == ErrorKind::BrokenPipe)
}

/// A result as one line of JSON, which may hold text of files and go to a terminal.
pub fn json_line(result: &impl Serialize) -> Result<Vec<u8>> {
    let line = serde_json::to_string(result).map_err(|e| Error::Op { op: "json", what: e.to_string() })?;
    Ok((harmless_json(&line) + "\n").into_bytes())
}

/// The bytes of a path, which need not be valid UTF-8, and a newline.
pub fn line_of(path: &Path) -> Vec<u8> {
    [path.as_os_str().as_encoded_bytes(), b"\n"].concat()
}
