//! Large outputs that take minutes to write, and that a second run can continue. They grow in `OUT.tmp` next to the target. A journal
//! in `OUT.tmp.json` lists what is finished. They get their name when they are complete.
//!
//! The journal exists before `OUT.tmp` and is removed after it. It is never replaced; kiln only appends lines. So a killed process
//! can leave few states:
//!
//! - the journal alone: nothing is begun, or the output has its name. The next run starts over, or removes the journal.
//! - both: the output is unfinished, and the next run continues it.
//! - both, and the target is a second name of `OUT.tmp`: the output is complete. The next run removes `OUT.tmp` and the journal.
//! - the journal, and an empty target: without hard links kiln takes the name first. The next run replaces that file.
//!
//! kiln leaves an `OUT.tmp` without a journal alone, because it did not create it. Only one process at a time works on an output: it
//! holds a lock on the journal, which ends with the process.

use super::folder::{self, Entry, Folder, Kind};
use super::{
    NO_FOLDER, check_name, check_target, disk, folder_of, is_same, keep_access, name_error, refused, tmpfile, write_error,
};
use crate::error::Result;
use crate::files;
use crate::text::grouped;
use flate2::Crc;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The largest journal that is read, in bytes.
const MAX_JOURNAL: u64 = 16 << 20;

/// Bytes that are read at a time.
const BUFFER: usize = 4 << 20;

/// An unfinished output, locked by this process. Dropping it removes the journal if `OUT.tmp` is gone.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    /// The path at which the output grows: a file, or a folder.
    path: PathBuf,
    journal: PathBuf,
    /// The folder of all three. They are changed by their names in it, so that no link in their place is followed.
    parent: Folder,
    /// The open journal, which holds the lock.
    file: File,
    /// Valid bytes of the journal.
    length: u64,
    /// The journal of an earlier run, if there was one.
    earlier: Option<Vec<u8>>,
    is_folder: bool,
    /// The file that the output will replace, if any.
    replaced: Option<Metadata>,
}

/// Tells journals, even damaged or incomplete ones, from other files with that name.
pub type IsJournal = fn(&[u8]) -> bool;

/// The reason to leave a file or folder next to the target alone.
const FOREIGN: &str = "kiln writes here first, but this exists and kiln did not begin it; move it away";

impl Staged {
    /// The path at which an output grows until it is complete.
    pub fn path_of(target: &Path) -> PathBuf {
        with_suffix(target.components().as_path(), ".tmp")
    }

    /// The path of an output's journal, until the output is complete.
    pub fn journal_of(target: &Path) -> PathBuf {
        with_suffix(target.components().as_path(), ".tmp.json")
    }

    /// Begins or continues an output. An existing target is an error, unless it is a file and `force` allows replacing it.
    pub fn open(target: &Path, is_folder: bool, force: bool, is_journal: IsJournal) -> Result<Self> {
        // `a/b/` is a valid name for a folder.
        let target = if is_folder { target.components().as_path() } else { target };
        if target.file_name().is_none() {
            return Err(refused(target, ErrorKind::InvalidInput, "this is not the name of a file or folder"));
        }
        let (path, journal) = (Self::path_of(target), Self::journal_of(target));
        let foreign = |path: &Path| Err(refused(path, ErrorKind::AlreadyExists, FOREIGN));
        let (parent, file, is_new) = loop {
            let is_new = match fs::symlink_metadata(&journal) {
                Ok(meta) if !meta.is_file() => return foreign(&journal),
                Ok(_) => false,
                // Refuses before it creates anything. It does not look for OUT.tmp here but under the lock: before that another
                // process may create it.
                Err(_) => {
                    check(target, is_folder, force)?;
                    disk::create_folder(folder_of(target)).map_err(|error| write_error(target, error))?;
                    true
                }
            };
            let parent = Folder::open(folder_of(target)).map_err(|error| write_error(target, error))?;
            let opened = disk::open(&parent, name_of(&journal));
            let file = opened.map_err(|error| write_error(if is_new { target } else { &journal }, error))?;
            lock(&file).map_err(|error| write_error(&path, error))?;
            // Another process may have finished just before the lock, and removed the opened journal.
            if is_at(&file, &journal) {
                break (parent, file, is_new);
            }
        };
        let mut bytes = Vec::new();
        (&file).take(MAX_JOURNAL + 1).read_to_end(&mut bytes).map_err(|error| write_error(&journal, error))?;
        if !is_journal(&bytes) || bytes.len() as u64 > MAX_JOURNAL {
            return foreign(&journal);
        }
        // Without a journal, OUT.tmp is not from kiln.
        if bytes.is_empty() && files::is_there(&path) {
            let _ = disk::remove_file(&parent, name_of(&journal));
            return foreign(&path);
        }
        if parent.kind(name_of(&path)).is_ok_and(|kind| kind == Kind::Other) {
            return Err(write_error(&path, folder::link()));
        }
        // The process may have been killed in the middle of a line. Drops that line.
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        let length = bytes.len() as u64;
        let (earlier, replaced) = (None, None);
        let mut staged = Self { target: target.into(), path, journal, parent, file, length, earlier, is_folder, replaced };
        if is_same_file(&staged.path, target) {
            let removed = disk::remove_file(&staged.parent, name_of(&staged.path));
            removed.map_err(|error| write_error(&staged.path, error))?;
        }
        let is_claimed = !is_new && !is_folder && is_empty_file(target);
        staged.replaced = check(target, is_folder, force || is_claimed)?;
        staged.earlier = files::is_there(&staged.path).then_some(bytes);
        Ok(staged)
    }

    /// The journal of an earlier run: all complete lines. It may be damaged.
    pub fn earlier(&self) -> Option<&[u8]> {
        self.earlier.as_deref()
    }

    /// Removes what an earlier run left, and starts a journal with this line.
    pub fn begin(&mut self, line: &[u8]) -> Result<()> {
        // Removes the old output first: without a journal it would look like somebody else's.
        self.remove().map_err(|error| write_error(&self.path, error))?;
        self.length = 0;
        self.append(line)?;
        disk::sync_folder(folder_of(&self.journal));
        Ok(())
    }

    /// Adds lines to the journal.
    pub fn append(&mut self, lines: &[u8]) -> Result<()> {
        let append = || {
            // Removes partial lines of this run or an earlier one.
            disk::resize(&self.file, self.length)?;
            disk::write(&self.file, self.length, lines)?;
            disk::sync(&self.file)
        };
        append().map_err(|error| write_error(&self.journal, error))?;
        self.length += lines.len() as u64;
        Ok(())
    }

    /// Removes the output as far as it exists. A link in it is removed itself.
    fn remove(&self) -> io::Result<()> {
        let name = name_of(&self.path);
        match self.parent.kind(name) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Ok(Kind::Folder) if self.is_folder => {
                empty(&self.parent.inside(name)?)?;
                disk::remove_folder(&self.parent, name)
            }
            Ok(Kind::Other) => Err(folder::link()),
            _ => disk::remove_file(&self.parent, name),
        }
    }

    /// Fails if the disk has no room for `bytes` more than the output already takes.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        let free = tmpfile::free_bytes(&self.file);
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

    /// A file of the output: the one at this path in a folder, or the output itself. It has its full size from the start. If the file
    /// system can reserve disk space, all of it is reserved.
    pub fn file(&self, name: &Path, bytes: u64) -> Result<StagedFile> {
        let shown = if self.is_folder { self.target.join(name) } else { self.target.clone() };
        let open = || {
            let file = match self.is_folder {
                true => self.open_in_folder(name)?,
                false => disk::open(&self.parent, name_of(&self.path))?,
            };
            disk::preallocate(&file, bytes)?;
            disk::resize(&file, bytes)?;
            Ok(file)
        };
        let file = open().map_err(|error: io::Error| match error.kind() {
            // A link has to be moved away from where it is.
            ErrorKind::InvalidInput if self.is_folder => write_error(&self.path.join(name), error),
            ErrorKind::InvalidInput => write_error(&self.path, error),
            _ => write_error(&shown, error),
        })?;
        Ok(StagedFile { file, shown })
    }

    /// Opens a file in the folder, and creates the folders on the way to it.
    fn open_in_folder(&self, name: &Path) -> io::Result<File> {
        let mut folder = disk::open_folder(&self.parent, name_of(&self.path))?;
        for part in name.parent().into_iter().flatten() {
            folder = disk::open_folder(&folder, part)?;
        }
        disk::open(&folder, name_of(name))
    }

    /// Removes everything from the folder except these files.
    pub fn retain(&self, names: &BTreeSet<&Path>) -> Result<()> {
        let retain = || retain(&self.parent.inside(name_of(&self.path))?, Path::new(""), names);
        retain().map_err(|error| write_error(&self.path, error))
    }

    /// Gives the output its name and removes the journal. Everything in it has to be on disk already.
    pub fn publish(self) -> Result<()> {
        let error = |source| name_error(&self.target, source);
        let (parent, name, target) = (&self.parent, name_of(&self.path), name_of(&self.target));
        if self.replaced.is_some() {
            check_target(&self.target, true)?;
        }
        let grown = parent.kind(name).map_err(error)?;
        if grown != if self.is_folder { Kind::Folder } else { Kind::File } {
            return Err(write_error(&self.path, folder::link()));
        }
        if let Some(replaced) = &self.replaced {
            let _ = parent.file(name).map(|file| keep_access(&file, replaced));
        }
        if self.is_folder {
            let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
            let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path());
            folders.chain([self.path.clone()]).for_each(|folder| disk::sync_folder(&folder));
        }
        if self.is_folder || self.replaced.is_some() {
            // An empty folder is replaced. A folder with content is an error.
            disk::rename(parent, name, target).map_err(error)?;
        } else {
            match disk::link(parent, name, target) {
                Ok(()) => {
                    disk::sync_folder(folder_of(&self.target));
                    disk::remove_file(parent, name).map_err(error)?;
                }
                Err(exists) if exists.kind() == ErrorKind::AlreadyExists => return Err(error(exists)),
                // File systems without hard links fail with various errors. There, creating a file is exclusive too.
                Err(_) => {
                    disk::create_new(parent, target).map_err(error)?;
                    disk::rename(parent, name, target).map_err(|source| {
                        // The error of the first step matters more.
                        let _ = disk::remove_file(parent, target);
                        error(source)
                    })?;
                }
            }
        }
        // The journal is removed when the name is on disk.
        disk::sync_folder(folder_of(&self.target));
        Ok(())
    }

    /// Removes the output and its journal.
    pub fn discard(self) {
        // The error that led here matters more than an error of the removal.
        let _ = self.remove();
    }

    /// The path at which the output grows.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // The lock is still held. The next run removes what cannot be removed here.
        if !files::is_there(&self.path) {
            let _ = disk::remove_file(&self.parent, name_of(&self.journal));
        }
    }
}

/// A file of an unfinished output.
#[derive(Debug)]
pub struct StagedFile {
    file: File,
    /// The file's final path, for messages.
    shown: PathBuf,
}

impl StagedFile {
    /// Writes bytes to a place in the file.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        disk::write(&self.file, offset, bytes).map_err(|error| write_error(&self.shown, error))
    }

    /// The CRC-32 of a byte range of the file.
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
        disk::sync(&self.file).map_err(|error| write_error(&self.shown, error))
    }
}

/// The last component of a path.
fn name_of(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// A path with something appended to its last component.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = path.file_name().unwrap_or_default().into();
    name.push(suffix);
    path.with_file_name(name)
}

/// Checks that the target may be written, and returns the metadata of a file that it replaces.
fn check(target: &Path, is_folder: bool, force: bool) -> Result<Option<Metadata>> {
    if !is_folder {
        check_name(target)?;
        if !folder_of(target).is_dir() {
            return Err(refused(target, ErrorKind::NotFound, NO_FOLDER));
        }
        return check_target(target, force);
    }
    if target.is_symlink() {
        let why = "this is a symbolic link; name the folder that it leads to";
        return Err(refused(target, ErrorKind::InvalidInput, why));
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

/// Removes everything from a folder except files with these names, which begin with `prefix`. A link is an error.
fn retain(folder: &Folder, prefix: &Path, names: &BTreeSet<&Path>) -> io::Result<()> {
    for Entry { name, kind } in folder.entries()? {
        let path = prefix.join(&name);
        match kind {
            Kind::Folder if names.iter().any(|kept| kept.starts_with(&path)) => retain(&folder.inside(&name)?, &path, names)?,
            Kind::Folder => {
                empty(&folder.inside(&name)?)?;
                disk::remove_folder(folder, &name)?;
            }
            Kind::File if names.contains(path.as_path()) => {}
            Kind::File => disk::remove_file(folder, &name)?,
            Kind::Other => return Err(folder::link()),
        }
    }
    Ok(())
}

/// Removes everything from a folder. Links are removed themselves.
fn empty(folder: &Folder) -> io::Result<()> {
    for Entry { name, kind } in folder.entries()? {
        if kind == Kind::Folder {
            empty(&folder.inside(&name)?)?;
            disk::remove_folder(folder, &name)?;
        } else {
            disk::remove_file(folder, &name)?;
        }
    }
    Ok(())
}

/// Locks a journal.
fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(io::Error::new(ErrorKind::ResourceBusy, "another process is writing this; wait for it, or use another name"))
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() != ErrorKind::Unsupported => Err(error),
        _ => Ok(()),
    }
}

/// Whether this is an empty file. A link to one is not.
fn is_empty_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == 0)
}

/// Whether these are two names of one file. Links are not followed: a link is useless without its destination.
fn is_same_file(path: &Path, other: &Path) -> bool {
    let file = |path: &Path| fs::symlink_metadata(path).ok().filter(Metadata::is_file);
    matches!((file(path), file(other)), (Some(one), Some(other)) if is_same(&one, &other))
}

/// Whether an open file or folder still has this path.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        matches!((file.metadata(), fs::symlink_metadata(path)), (Ok(open), Ok(there)) if is_same(&open, &there))
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

/// Bytes of disk that a file takes, or all files in a folder together.
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
mod tests;
