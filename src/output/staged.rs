//! Large outputs that take minutes to write, and that a second run can continue: they grow in `OUT.part` beside the target, with a
//! journal of what is finished in `OUT.part.json`, and get their name when they are complete.
//!
//! Only one process at a time works on an output: it holds a lock on `OUT.part`, which ends with the process. Nobody else touches
//! the journal.

use super::{
    Planned, check_target, check_writable, create_new, folder_of, keep_access, name_error, refused, sync_folder, tmpfile,
};
use super::{save_new, write_error};
use crate::error::{Error, Result};
use crate::files;
use crate::text::grouped;
use flate2::Crc;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The largest journal that is read, in bytes.
const MAX_JOURNAL: u64 = 16 << 20;

/// Bytes that are read at a time.
const BUFFER: usize = 4 << 20;

/// An output in the making, locked by this process.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    /// Where it grows: a file, or a folder.
    path: PathBuf,
    journal: PathBuf,
    is_journal: IsJournal,
    /// What an earlier run noted, if there was one.
    earlier: Option<Vec<u8>>,
    is_folder: bool,
    /// The file that it is going to replace, if any.
    replaced: Option<Metadata>,
    /// Holds the lock. There is none for a folder where the system cannot lock one.
    lock: Option<File>,
}

/// Tells a journal, even a damaged one, from files of others that have its name.
pub type IsJournal = fn(&[u8]) -> bool;

/// Why a file or folder beside the target is left alone.
const FOREIGN: &str = "this would be written first, but there is something of that name which kiln did not begin; move it away";

impl Staged {
    /// Where an output grows until it is complete.
    pub fn path_of(target: &Path) -> PathBuf {
        beside(target.components().as_path(), ".part")
    }

    /// Begins or continues an output. An existing target is an error, unless it is a file and `force` allows that it is replaced.
    pub fn open(target: &Path, is_folder: bool, force: bool, is_journal: IsJournal) -> Result<Self> {
        // `a/b/` is a valid name for a folder.
        let target = if is_folder { target.components().as_path() } else { target };
        if target.file_name().is_none() {
            return Err(refused(target, ErrorKind::InvalidInput, "this is not the name of a file or folder"));
        }
        let (path, journal) = (Self::path_of(target), beside(target, ".part.json"));
        let error = |source| write_error(&path, source);
        let lock = loop {
            if is_same_file(&path, target) || files::is_there(&journal) && !files::is_there(&path) {
                settle(target, &path, &journal, is_folder, is_journal).map_err(error)?;
            }
            check(target, is_folder, force)?;
            if read_journal(&journal, is_journal)?.is_none() && holds_data(&path).map_err(error)? {
                return Err(refused(&path, ErrorKind::AlreadyExists, FOREIGN));
            }
            let lock = open_locked(&path, is_folder).map_err(error)?;
            // Another process may have finished and named what was opened, just before it was locked.
            if lock.as_ref().is_none_or(|lock| is_at(lock, &path)) && !is_same_file(&path, target) {
                break lock;
            }
        };
        let replaced = check(target, is_folder, force)?;
        let mut earlier = read_journal(&journal, is_journal)?;
        if earlier.is_some() && !holds_data(&path).map_err(error)? {
            // Another process has given the output its name since, and left this.
            fs::remove_file(&journal).map_err(|error| write_error(&journal, error))?;
            earlier = None;
        }
        Ok(Self { target: target.into(), path, journal, is_journal, earlier, is_folder, replaced, lock })
    }

    /// The journal of an earlier run, which may be damaged.
    pub fn earlier(&self) -> Option<&[u8]> {
        self.earlier.as_deref()
    }

    /// Replaces the journal.
    pub fn save_journal(&self, bytes: &[u8]) -> Result<()> {
        save_new(&self.journal, bytes, true)
    }

    /// Removes what an earlier run left.
    pub fn clear(&self) -> Result<()> {
        let cleared = match &self.lock {
            Some(file) if !self.is_folder => file.set_len(0),
            _ => fs::read_dir(&self.path).and_then(|entries| {
                entries.into_iter().try_for_each(|entry| {
                    let entry = entry?;
                    if entry.file_type()?.is_dir() { fs::remove_dir_all(entry.path()) } else { fs::remove_file(entry.path()) }
                })
            }),
        };
        cleared.map_err(|error| write_error(&self.path, error))
    }

    /// Fails if the disk has no room for so many bytes more than the output already takes.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        let free = self.lock.as_ref().and_then(tmpfile::free_bytes);
        let taken = allocated(&self.path);
        match free {
            Some(free) if free.saturating_add(taken) < bytes => {
                let (need, free) = (grouped(bytes - taken), grouped(free));
                let why = format!("this needs {need} bytes, {free} are free; nothing was written");
                Err(refused(&self.target, ErrorKind::StorageFull, &why))
            }
            _ => Ok(()),
        }
    }

    /// A file of the output: the one at this path in a folder, or the output itself. It has its full size from the start, with
    /// disk space for all of it if the file system can reserve some.
    pub fn file(&self, name: &Path, bytes: u64) -> Result<StagedFile> {
        let (path, shown) = match self.is_folder {
            true => (self.path.join(name), self.target.join(name)),
            false => (self.path.clone(), self.target.clone()),
        };
        let open = || {
            fs::create_dir_all(folder_of(&path))?;
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
            tmpfile::preallocate(&file, bytes)?;
            file.set_len(bytes)?;
            Ok(file)
        };
        let file = open().map_err(|error| write_error(&shown, error))?;
        Ok(StagedFile { file, shown })
    }

    /// Removes everything from a folder but these files.
    pub fn retain(&self, names: &BTreeSet<&Path>) -> Result<()> {
        retain(&self.path, Path::new(""), names).map_err(|error| write_error(&self.path, error))
    }

    /// Gives the output its name and removes the journal. Everything in it has to be on disk already.
    pub fn publish(self) -> Result<()> {
        let error = |source| name_error(&self.target, source);
        if let (Some(file), Some(replaced)) = (&self.lock, &self.replaced) {
            keep_access(file, replaced);
        }
        if self.is_folder {
            let folders = fs::read_dir(&self.path).into_iter().flatten().flatten().map(|entry| entry.path());
            folders.filter(|path| path.is_dir()).chain([self.path.clone()]).for_each(|folder| sync_folder(&folder));
        }
        if self.is_folder || self.replaced.is_some() {
            // An empty folder is replaced, one that holds something is not.
            fs::rename(&self.path, &self.target).map_err(error)?;
        } else {
            match fs::hard_link(&self.path, &self.target) {
                Ok(()) => {
                    // The lock is on the first name, which therefore goes last.
                    sync_folder(folder_of(&self.target));
                    let _ = fs::remove_file(&self.journal);
                    return fs::remove_file(&self.path).map_err(error);
                }
                Err(exists) if exists.kind() == ErrorKind::AlreadyExists => return Err(error(exists)),
                // File systems without hard links fail with various errors. Creating a file is exclusive there, too.
                Err(_) => {
                    create_new(&self.target).map_err(error)?;
                    fs::rename(&self.path, &self.target).map_err(error)?;
                }
            }
        }
        sync_folder(folder_of(&self.target));
        // The output is there. What this cannot remove, because another process has begun already or for another reason, the next
        // one removes.
        let _ = settle(&self.target, &self.path, &self.journal, self.is_folder, self.is_journal);
        Ok(())
    }

    /// Removes the output and its journal.
    pub fn discard(self) {
        // The error that led here matters more than one of these. Bytes without a journal would be in the way of the next run, so
        // they go first, and the name, which keeps others out, goes last.
        if self.clear().is_ok() {
            let _ = fs::remove_file(&self.journal);
            let _ = remove(&self.path, self.is_folder);
        }
    }

    /// Where the output grows.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A file of an output in the making.
#[derive(Debug)]
pub struct StagedFile {
    file: File,
    /// The path that it is going to have, for messages.
    shown: PathBuf,
}

impl StagedFile {
    /// Writes bytes to a place in the file.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let written = self.file.seek(SeekFrom::Start(offset)).and_then(|_| self.file.write_all(bytes));
        written.map_err(|error| write_error(&self.shown, error))
    }

    /// The CRC-32 of bytes of the file.
    pub fn checksum(&mut self, range: Range<u64>) -> Result<u32> {
        let mut read = || {
            self.file.seek(SeekFrom::Start(range.start))?;
            let (mut sum, mut left) = (Crc::new(), range.end - range.start);
            let mut buffer = vec![0; BUFFER.min(left as usize)];
            while left > 0 {
                let part = &mut buffer[..BUFFER.min(left as usize)];
                self.file.read_exact(part)?;
                sum.update(part);
                left -= part.len() as u64;
            }
            Ok(sum.sum())
        };
        read().map_err(|error| write_error(&self.shown, error))
    }

    /// Waits until everything that was written is on disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|error| write_error(&self.shown, error))
    }
}

/// A path with something appended to its last component.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = path.file_name().unwrap_or_default().into();
    name.push(suffix);
    path.with_file_name(name)
}

/// Checks that the target may be written, and returns the metadata of a file that it replaces.
fn check(target: &Path, is_folder: bool, force: bool) -> Result<Option<Metadata>> {
    if !is_folder {
        check_writable(&[Planned { path: target.into(), bytes: 0 }], force)?;
        return check_target(target, force);
    }
    let occupied = match fs::read_dir(target) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(write_error(target, error)),
    };
    match occupied {
        true => Err(refused(target, ErrorKind::DirectoryNotEmpty, "the folder is not empty")),
        false => Ok(None),
    }
}

/// The bytes of the journal, if there is one.
fn read_journal(journal: &Path, is_journal: IsJournal) -> Result<Option<Vec<u8>>> {
    match files::read(journal, MAX_JOURNAL) {
        Ok(bytes) if is_journal(&bytes) => Ok(Some(bytes)),
        Ok(_) => Err(refused(journal, ErrorKind::AlreadyExists, FOREIGN)),
        Err(error) if error.kind() == ErrorKind::NotFound && !files::is_there(journal) => Ok(None),
        Err(error) => Err(Error::read(journal, error)),
    }
}

/// Removes what is left of the work on an output that has its name: the journal, and the name under which a file grew, which it
/// has until it is sure of the new one. Fails if another process is at work.
fn settle(target: &Path, path: &Path, journal: &Path, is_folder: bool, is_journal: IsJournal) -> io::Result<()> {
    // Creates an empty one if there is none, so that nobody begins in the meantime.
    let lock = open_locked(path, is_folder)?;
    let is_mine = lock.as_ref().is_none_or(|lock| is_at(lock, path));
    if !is_mine || holds_data(path)? && !is_same_file(path, target) {
        return Ok(());
    }
    if let Ok(Some(_)) = read_journal(journal, is_journal) {
        fs::remove_file(journal)?;
    }
    remove(path, is_folder)
}

/// Removes a file, or a folder with what is left in it.
fn remove(path: &Path, is_folder: bool) -> io::Result<()> {
    if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Removes everything from a folder but files of these names, which begin with `prefix`.
fn retain(folder: &Path, prefix: &Path, names: &BTreeSet<&Path>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), prefix.join(entry.file_name()));
        match entry.file_type()?.is_dir() {
            true if names.iter().any(|kept| kept.starts_with(&name)) => retain(&path, &name, names)?,
            true => fs::remove_dir_all(path)?,
            false if names.contains(name.as_path()) => {}
            false => fs::remove_file(path)?,
        }
    }
    Ok(())
}

/// Opens what grows, creating it if need be, and locks it.
fn open_locked(path: &Path, is_folder: bool) -> io::Result<Option<File>> {
    let file = if is_folder {
        fs::create_dir_all(path)?;
        if !cfg!(unix) {
            return Ok(None);
        }
        File::open(path)?
    } else {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?
    };
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(io::Error::new(ErrorKind::ResourceBusy, "another process is writing this; wait for it, or use another name"))
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() != ErrorKind::Unsupported => Err(error),
        _ => Ok(Some(file)),
    }
}

/// Whether these are two names of one file. Links are not followed: a link is of no use without what it leads to.
fn is_same_file(path: &Path, other: &Path) -> bool {
    let file = |path: &Path| fs::symlink_metadata(path).ok().filter(Metadata::is_file);
    matches!((file(path), file(other)), (Some(one), Some(other)) if is_same(&one, &other))
}

/// Whether both describe the same file or folder. Only Unix tells.
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        (one.dev(), one.ino()) == (other.dev(), other.ino())
    }
    #[cfg(not(unix))]
    {
        let _ = (one, other);
        false
    }
}

/// Whether an open file or folder is still the one of this path.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        matches!((file.metadata(), fs::metadata(path)), (Ok(open), Ok(there)) if is_same(&open, &there))
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

/// Whether there is a file with content at a path, or anywhere in a folder there.
fn holds_data(path: &Path) -> io::Result<bool> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if !meta.is_dir() {
        return Ok(!meta.is_file() || meta.len() > 0);
    }
    for entry in fs::read_dir(path)? {
        if holds_data(&entry?.path())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Bytes of disk that a file takes, or all files in a folder.
fn allocated(path: &Path) -> u64 {
    #[cfg(unix)]
    if let Ok(meta) = fs::symlink_metadata(path) {
        use std::os::unix::fs::MetadataExt;
        let entries = if meta.is_dir() { fs::read_dir(path).into_iter().flatten().flatten().collect() } else { Vec::new() };
        return 512 * meta.blocks() + entries.iter().map(|entry| allocated(&entry.path())).sum::<u64>();
    }
    let _ = path;
    0
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Only who holds the lock removes a journal, so that nobody removes that of a process which has just begun.
    #[test]
    fn the_journal_of_another_process_stays() {
        let folder = std::env::temp_dir().join(format!("kiln-staged-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let target = folder.join("out");
        let journal = beside(&target, ".part.json");
        for is_folder in [false, true] {
            let begun = Staged::open(&target, is_folder, true, |bytes| bytes == b"journal").unwrap();
            begun.save_journal(b"journal").unwrap();
            let settle = || settle(&target, &begun.path, &journal, is_folder, begun.is_journal);
            assert_eq!(settle().unwrap_err().kind(), ErrorKind::ResourceBusy);
            begun.file(Path::new("x"), 1).unwrap();
            drop(begun.lock.as_ref().unwrap().unlock());
            // What the process has left when it was killed is for the next one.
            settle().unwrap();
            assert_eq!(fs::read(&journal).unwrap(), b"journal");
            begun.clear().unwrap();
            settle().unwrap();
            assert!(fs::read_dir(&folder).unwrap().next().is_none());
        }
        fs::remove_dir(folder).unwrap();
    }
}
