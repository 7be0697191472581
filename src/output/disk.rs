//! The changes that a staged output makes on disk, one function each. A process can be killed between any two of them, and in the
//! middle of a write: tests stop the work at every such step.

use super::folder::Folder;
use super::tmpfile;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::Path;

/// Opens a file to read and write it, and creates it if there is none.
pub fn open(folder: &Folder, name: &OsStr) -> io::Result<File> {
    step()?;
    folder.file(name)
}

/// Opens a folder in another one, and creates it if there is none.
pub fn open_folder(folder: &Folder, name: &OsStr) -> io::Result<Folder> {
    match folder.inside(name) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            step()?;
            folder.create_folder(name)?;
            folder.inside(name)
        }
        opened => opened,
    }
}

/// Creates an empty file at a free name.
pub fn create_new(folder: &Folder, name: &OsStr) -> io::Result<()> {
    step()?;
    folder.create_new(name)
}

/// Creates a folder and its missing parents.
pub fn create_folder(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        create_folder(folder)?;
    }
    step()?;
    match fs::create_dir(path) {
        // Another process may have created it just now.
        Err(_) if path.is_dir() => Ok(()),
        done => done,
    }
}

/// Writes bytes to a place in a file.
pub fn write(mut file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let (first, second) = bytes.split_at(if cfg!(test) { bytes.len() / 2 } else { bytes.len() });
    step()?;
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(first)?;
    step()?;
    file.write_all(second)
}

/// Reserves disk space for a file, if the file system can.
pub fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    step()?;
    tmpfile::preallocate(file, bytes)
}

/// Sets the size of a file.
pub fn resize(file: &File, bytes: u64) -> io::Result<()> {
    step()?;
    file.set_len(bytes)
}

/// Gives a file a second name, which must not exist.
pub fn link(folder: &Folder, name: &OsStr, other: &OsStr) -> io::Result<()> {
    step()?;
    #[cfg(test)]
    death::links()?;
    folder.link(name, other)
}

/// Renames a file or folder, and replaces a file or an empty folder with that name.
pub fn rename(folder: &Folder, name: &OsStr, other: &OsStr) -> io::Result<()> {
    step()?;
    folder.rename(name, other)
}

/// Removes a file.
pub fn remove_file(folder: &Folder, name: &OsStr) -> io::Result<()> {
    step()?;
    folder.remove_file(name)
}

/// Removes an empty folder.
pub fn remove_folder(folder: &Folder, name: &OsStr) -> io::Result<()> {
    step()?;
    folder.remove_folder(name)
}

/// Waits until all that was written to a file is on disk.
pub fn sync(file: &File) -> io::Result<()> {
    // A killed process loses nothing that it has written, so tests, which kill thousands, need no sync.
    if cfg!(test) { Ok(()) } else { file.sync_all() }
}

/// Waits until the names in a folder are on disk, if the system can.
pub fn sync_folder(folder: &Path) {
    if !cfg!(test) {
        super::sync_folder(folder);
    }
}

/// The point where tests stop the work.
fn step() -> io::Result<()> {
    #[cfg(test)]
    death::step()?;
    Ok(())
}

/// Simulates the end of a process, for tests: from some step on nothing changes on disk, whatever the rest of the program tries.
#[cfg(test)]
pub mod death {
    use std::cell::Cell;
    use std::io::{self, ErrorKind};

    thread_local! {
        static STEPS_LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
        static HAS_LINKS: Cell<bool> = const { Cell::new(true) };
    }

    /// Runs something on a file system with or without hard links, and stops it after `steps` steps. Also returns whether it was stopped.
    pub fn after<T>(steps: usize, has_links: bool, run: impl FnOnce() -> T) -> (T, bool) {
        STEPS_LEFT.set(steps);
        HAS_LINKS.set(has_links);
        let result = run();
        let died = STEPS_LEFT.get() == 0;
        STEPS_LEFT.set(usize::MAX);
        HAS_LINKS.set(true);
        (result, died)
    }

    pub(super) fn step() -> io::Result<()> {
        match STEPS_LEFT.get() {
            0 => Err(io::Error::other("the process has ended")),
            left => {
                STEPS_LEFT.set(left - 1);
                Ok(())
            }
        }
    }

    pub(super) fn links() -> io::Result<()> {
        if HAS_LINKS.get() { Ok(()) } else { Err(ErrorKind::Unsupported.into()) }
    }
}
