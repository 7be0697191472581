//! A memory-mapped weight file, and the check that it did not change since it was opened.
//!
//! A mapping always shows the current file, so a process that changes the file changes the weights of a run in progress:
//! - if it is truncated, the next read beyond its end raises SIGBUS, which ends the process;
//! - if it is written to, the run silently reads other numbers;
//! - if it is deleted, or replaced by another file of its name, nothing happens: the mapping keeps the old file.
//!
//! Replacing a file (the last case) is the right way to update it, and is not an error. For truncation, a signal handler maps
//! zeros in place of the missing pages and sets a flag (on Linux only). [`Mapped::verify`] reports the flag and changes of size
//! or modification time. Callers verify after they used the bytes and before they show any result.
//!
//! A writer that restores size and modification time is not detected. The change time (ctime) cannot be restored, but checking it
//! does not help: replacing a file also changes the old file's ctime.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
mod bus;
#[cfg(not(target_os = "linux"))]
mod bus {
    //! This system has no signal handler; `bus.rs` has the one for Linux.

    #[derive(Debug)]
    pub(super) struct Watch;

    impl Watch {
        pub fn new(_mapping: &[u8]) -> std::io::Result<Self> {
            Ok(Self)
        }

        pub fn lost(&self) -> bool {
            false
        }
    }
}

use crate::error::{Error, Result};
use crate::text::grouped;
use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::SystemTime;

/// A mapped file.
#[derive(Debug)]
pub(super) struct Mapped {
    /// This field comes before the mapping because fields are dropped in order: once unmapped, the addresses may be reused.
    watch: bus::Watch,
    map: Mmap,
    /// The file is kept open for its metadata, because its path may name another file by now.
    file: File,
    stamp: Stamp,
}

impl Mapped {
    /// Maps an open file that is not empty.
    pub fn new(path: &Path, file: File) -> Result<Self> {
        let attempt = || {
            // The stamp is taken before the mapping, so that a change in between is noticed.
            let stamp = Stamp::of(&file)?;
            let len = usize::try_from(stamp.len).map_err(|_| io::ErrorKind::FileTooLarge)?;
            // SAFETY: the mapping is read-only, and its bytes are only ever read as plain numbers, for which every bit pattern
            // is valid; the header, whose text must not change after validation, is copied out first. Other processes cannot be
            // kept from writing to the file, but then everything read from it is discarded: see `verify`.
            let map = unsafe { MmapOptions::new().len(len).map(&file) }?;
            let watch = bus::Watch::new(&map)?;
            Ok((watch, map, stamp))
        };
        let (watch, map, stamp) = attempt().map_err(|error: io::Error| Error::read(path, error))?;
        Ok(Self { watch, map, file, stamp })
    }

    /// When the file was last modified before it was mapped, if the file system stores times.
    pub fn modified(&self) -> Option<SystemTime> {
        self.stamp.modified
    }

    /// Frees the memory of the pages that were read. Reading them again maps them again.
    pub fn release(&self) {
        // SAFETY: the mapping is read-only and of a file, so no change can be lost: a page that is read again has the file's
        // content, as it does whenever the system reclaims the page. If the system refuses, it only keeps the pages longer.
        #[cfg(unix)]
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    /// Fails if anything read so far may differ from the content of the file when it was mapped. `path` is for the message.
    pub fn verify(&self, path: &Path) -> Result<()> {
        let detail = match Stamp::of(&self.file) {
            Err(error) => error.to_string(),
            Ok(now) if now.len != self.stamp.len => format!("size {} -> {}", grouped(self.stamp.len), grouped(now.len)),
            Ok(now) if now.modified != self.stamp.modified => "it was written to".into(),
            Ok(_) if self.watch.lost() => "part of it was missing when it was read".into(),
            Ok(_) => return Ok(()),
        };
        let error = Error::bad_file(path, "weight file changed while it was being read", detail);
        Err(error.with_hint("nothing was written; start again when the file is complete"))
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// Size and modification time, which change with a file's content.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    len: u64,
    /// `None` if the file system does not store times.
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { len: meta.len(), modified: meta.modified().ok() })
    }
}
