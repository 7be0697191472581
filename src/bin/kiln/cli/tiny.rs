//! `kiln tiny`: writes the tiny random model in a layout in which real models are published.

use super::args::TinyArgs;
use super::stdout::{line_of, print};
use kiln::error::{Error, Result};
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::AtomicBool;

/// Writes the tiny model to a new folder and the folder's path to `out`. Setting `stop` interrupts it.
pub fn tiny(args: &TinyArgs, stop: &AtomicBool, out: &mut dyn Write) -> Result<()> {
    let folder = &args.folder;
    let refused = |source| Error::Write { path: folder.clone(), source };
    let occupied = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(refused(error)),
    };
    if occupied {
        return Err(refused(io::Error::new(ErrorKind::DirectoryNotEmpty, "the folder is not empty")));
    }
    kiln::write_tiny_model(folder, args.layout.into(), args.dtype.into(), stop)?;
    print(out, &line_of(folder))
}
