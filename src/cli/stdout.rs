//! Standard output, which only results go to.

use crate::error::{Error, Result};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// What standard output is called in errors.
pub const STDOUT: &str = "standard output";

/// What standard output is called on the command line.
pub const DASH: &str = "-";

/// Writes a result and flushes it, because whoever reads along wants it at once.
pub fn print(out: &mut dyn Write, result: &[u8]) -> Result<()> {
    out.write_all(result).and_then(|()| out.flush()).map_err(|source| Error::Write { path: STDOUT.into(), source })
}

/// Whether an error only says that whoever read standard output has seen enough.
pub fn reader_left(error: &Error) -> bool {
    matches!(error, Error::Write { path, source } if path == Path::new(STDOUT) && source.kind() == ErrorKind::BrokenPipe)
}

/// A path as bytes, whatever they are, and a newline.
pub fn line_of(path: &Path) -> Vec<u8> {
    [path.as_os_str().as_encoded_bytes(), b"\n"].concat()
}
