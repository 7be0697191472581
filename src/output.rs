//! Atomic output files: a file appears complete or not at all.
//!
//! An image can take minutes to generate, so writing it must be reliable: the target is checked before any work starts, an
//! existing file is never replaced unless asked, and the target never holds a partial image.
//!
//! Linux has unnamed temporary files (`O_TMPFILE`). The bytes are written to one of those, which is linked to its name as the
//! last step, so a process that is killed leaves nothing behind, and exactly one of several writers succeeds. On other systems
//! the bytes are written to a named temporary file next to the target, which a killed process leaves behind.

mod disk;
mod folder;
mod staged;
mod tmpfile;

pub use staged::{IsJournal, Staged, StagedFile};

use crate::error::{Error, Result};
use crate::text::grouped;
use crate::trace;
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The reason if the target folder does not exist.
const NO_FOLDER: &str = "there is no such folder";

/// An output file, and its largest size.
#[derive(Clone, Debug)]
pub struct PlannedFile {
    /// The target.
    pub path: PathBuf,
    /// Upper bound on the size in bytes, as far as kiln knows it.
    pub bytes: u64,
}

/// Checks before any work whether [`save_new`] will probably succeed for all files: folders exist and are writable, the disk has
/// space for all files together, and each target does not exist, or with `force` is a replaceable file.
pub fn check_writable(files: &[PlannedFile], force: bool) -> Result<()> {
    // For each folder: its largest file and the total size. Thousands of targets are checked one by one, but disk space is
    // queried once per folder.
    let mut folders: BTreeMap<&Path, (&PlannedFile, u64)> = BTreeMap::new();
    for file in files {
        let path = file.path.as_path();
        check_name(path)?;
        let folder = folder_of(path);
        if !folders.contains_key(folder) && !folder.is_dir() {
            return Err(refused(path, ErrorKind::NotFound, NO_FOLDER));
        }
        check_target(path, force)?;
        let (longest, total) = folders.entry(folder).or_insert((file, 0));
        if file.bytes > longest.bytes {
            *longest = file;
        }
        *total = total.saturating_add(file.bytes);
    }
    // Folders may share a disk, so all preallocated space is held until the end.
    let mut held = Vec::new();
    for (folder, (longest, total)) in folders {
        match tmpfile::create(folder) {
            Ok(file) => {
                tmpfile::preallocate(&file, longest.bytes).map_err(|error| unwritten(&longest.path, &error))?;
                // Only the largest file is preallocated. The rest is compared with the free space, because on an in-memory file
                // system it would take up real memory.
                let rest = total - longest.bytes;
                if let Some(free) = tmpfile::free_bytes(&file).filter(|free| *free < rest) {
                    let (need, free) = (grouped(total), grouped(free + longest.bytes));
                    let why = format!("all files together need up to {need} bytes, {free} are free; nothing was written");
                    return Err(refused(&longest.path, ErrorKind::StorageFull, &why));
                }
                held.push(file);
            }
            Err(_) => Temp::claim(&longest.path, create_new).map(drop)?,
        }
    }
    Ok(())
}

/// Writes a whole file or nothing. Unless `force` is set, an existing file is an error, even if it is created during the write.
pub fn save_new(path: &Path, bytes: &[u8], force: bool) -> Result<()> {
    let _span = trace::span_of("write file", || format!("{} bytes", bytes.len()));
    let replaced = check_target(path, force)?;
    if !place_tmpfile(path, bytes, force, replaced.as_ref())? {
        place_named(path, bytes, force, replaced.as_ref())?;
    }
    sync_folder(folder_of(path));
    Ok(())
}

/// Creates a folder with everything that `fill` writes to its folder, or nothing. An empty folder may already exist.
pub(crate) fn save_folder(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let error = |source| write_error(path, source);
    let there = match fs::canonicalize(path) {
        Ok(there) => Some(there),
        Err(missing) if missing.kind() == ErrorKind::NotFound => None,
        Err(other) => return Err(error(other)),
    };
    let claim = |neighbor: &Path| match Temp::claim(neighbor, |name| fs::create_dir(name)) {
        Ok((temp, ())) => Ok(temp),
        // The error names the path that the user knows.
        Err(Error::Write { source, .. }) => Err(error(source)),
        Err(other) => Err(other),
    };
    // The temporary folder is inside the target if the target must not be replaced, or if nothing can be created next to it.
    let inside = |folder: &Path| claim(&folder.join("any"));
    let (temp, kept) = match there.as_deref() {
        Some(folder) if has_to_stay(folder) => (inside(folder)?, Some(folder)),
        Some(folder) => match claim(folder) {
            Ok(temp) => (temp, None),
            Err(_) => (inside(folder)?, Some(folder)),
        },
        None => {
            fs::create_dir_all(folder_of(path)).map_err(error)?;
            (claim(path)?, None)
        }
    };
    let target = there.as_deref().unwrap_or(path);
    fill(&temp.path).map_err(|failure| match failure {
        Error::Write { path: at, source } => {
            // The error names the path that the user knows.
            let known = at.strip_prefix(&temp.path).map(|name| path.join(name));
            Error::Write { path: known.unwrap_or(at), source }
        }
        other => other,
    })?;
    match kept {
        None => {
            // The new folder keeps the permissions of the replaced one.
            if let Some(replaced) = there.as_deref().and_then(|folder| fs::metadata(folder).ok()) {
                let _ = File::open(&temp.path).map(|folder| keep_access(&folder, &replaced));
            }
            fs::rename(&temp.path, target).map_err(error)?;
        }
        Some(folder) => {
            for entry in fs::read_dir(&temp.path).map_err(error)? {
                let entry = entry.map_err(error)?;
                fs::rename(entry.path(), folder.join(entry.file_name())).map_err(error)?;
            }
        }
    }
    Ok(())
}

/// Whether a folder must not be replaced by another one: a process working in it would be left in a deleted folder, and a mount
/// point cannot be replaced.
fn has_to_stay(folder: &Path) -> bool {
    #[cfg(unix)]
    let mounted = {
        use std::os::unix::fs::MetadataExt;
        let disk = |folder: &Path| fs::metadata(folder).ok().map(|meta| meta.dev());
        disk(folder) != disk(folder.parent().unwrap_or(folder))
    };
    #[cfg(not(unix))]
    let mounted = false;
    mounted || std::env::current_dir().is_ok_and(|current| current == folder)
}

/// Writes to an unnamed temporary file and links it to the target. Returns false if that is not supported here.
fn place_tmpfile(path: &Path, bytes: &[u8], force: bool, replaced: Option<&Metadata>) -> Result<bool> {
    // Systems and file systems without O_TMPFILE fail with various errors. If the folder itself is the problem, the attempt with
    // a named file reports it. The link below fails in the same ways.
    let Ok(file) = tmpfile::create(folder_of(path)) else { return Ok(false) };
    fill(&file, path, bytes, replaced)?;
    let placed = if force {
        // A link never replaces an existing file, but a rename does.
        Temp::claim(path, |name| tmpfile::link(&file, name)).and_then(|(temp, ())| temp.replace(path))
    } else {
        tmpfile::link(&file, path).map_err(|error| name_error(path, error))
    };
    match placed {
        Ok(()) => Ok(true),
        Err(Error::OutputExists { path }) => Err(Error::OutputExists { path }),
        Err(_) => Ok(false),
    }
}

/// Writes to a named temporary file next to the target, and then gives it the target's name.
fn place_named(path: &Path, bytes: &[u8], force: bool, replaced: Option<&Metadata>) -> Result<()> {
    let (temp, file) = Temp::claim(path, create_new)?;
    fill(&file, path, bytes, replaced)?;
    if force {
        return temp.replace(path);
    }
    match fs::hard_link(&temp.path, path).map_err(|error| name_error(path, error)) {
        // File systems without hard links fail with various errors. Any other problem is reported by the next attempt.
        Err(Error::Write { .. }) => claim_and_replace(temp, path),
        done => done,
    }
}

/// Replaces a hard link followed by removal on file systems without hard links: creating an empty file at the target is
/// exclusive, and replacing it by the finished file is atomic. A process that is killed in between leaves an empty file, never a
/// partial one.
fn claim_and_replace(temp: Temp, path: &Path) -> Result<()> {
    create_new(path).map_err(|error| name_error(path, error))?;
    temp.replace(path).inspect_err(|_| {
        // The original error matters more than a failure to remove the empty file.
        let _ = fs::remove_file(path);
    })
}

/// Writes all bytes and syncs them to disk before the file gets its name: after a power failure, a name without data would be a
/// partial file. A replaced file's owner and permissions are kept.
fn fill(mut file: &File, target: &Path, bytes: &[u8], replaced: Option<&Metadata>) -> Result<()> {
    if let Some(replaced) = replaced {
        keep_access(file, replaced);
    }
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|error| unwritten(target, &error))
}

/// Gives a file or folder the owner and permissions of the one it replaces, as far as the system allows. Failures are ignored,
/// because the content matters more. The owner is set first, because changing it clears some permissions.
fn keep_access(file: &File, replaced: &Metadata) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, fchown};
        let _ = fchown(file, Some(replaced.uid()), Some(replaced.gid()));
    }
    let _ = file.set_permissions(replaced.permissions());
}

/// Syncs a folder, so that a new name in it is on disk. Not every system supports that. Failures are ignored, because the file
/// exists in any case: only a power failure within the next seconds could undo it.
fn sync_folder(folder: &Path) {
    if cfg!(unix) {
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
    }
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Fails if a path cannot name a file.
fn check_name(path: &Path) -> Result<()> {
    let name = path.as_os_str().as_encoded_bytes();
    // `a/b/` and `a/b` have the same components, but the former is not a valid name for a file.
    if path.file_name().is_none() || name.last().is_some_and(|&byte| std::path::is_separator(byte.into())) {
        return Err(refused(path, ErrorKind::InvalidInput, "this is not the name of a file"));
    }
    Ok(())
}

/// The metadata of the file that a target replaces, if any. An existing target is an error without `force`. Even with `force`, it
/// has to be a regular file: a symbolic link would lose its destination, and replacing `/dev/null` or `/dev/stdout` by an image
/// would break the system.
fn check_target(path: &Path, force: bool) -> Result<Option<Metadata>> {
    // Reads the metadata of a link itself, not of its destination.
    let meta = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(write_error(path, error)),
        Ok(meta) => meta,
    };
    let kind = meta.file_type();
    if kind.is_dir() {
        Err(refused(path, ErrorKind::IsADirectory, "this is a folder"))
    } else if kind.is_symlink() {
        Err(refused(path, ErrorKind::InvalidInput, "this is a symbolic link; name the file that it leads to"))
    } else if !kind.is_file() {
        Err(refused(path, ErrorKind::InvalidInput, "this is not a regular file"))
    } else if !force {
        Err(Error::OutputExists { path: path.into() })
    } else {
        Ok(Some(meta))
    }
}

/// Fails if a path leads to one of these files, by this name or another: replacing it would destroy what is being read.
pub fn refuse_replaced(path: &Path, read: &[&Path]) -> Result<()> {
    let Ok(there) = fs::metadata(path) else { return Ok(()) };
    if read.iter().any(|other| fs::metadata(other).is_ok_and(|other| is_same(&there, &other))) {
        return Err(refused(path, ErrorKind::InvalidInput, "this is one of the files that are read; use another name"));
    }
    Ok(())
}

/// Whether both describe one file or folder. Only Unix can tell.
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

/// A temporary file or folder next to the target, on the same file system, which is removed when dropped.
struct Temp {
    path: PathBuf,
}

impl Temp {
    /// Finds a free name with `make`, which fails if a name is taken. Errors show the target, because the user knows that path.
    fn claim<T>(target: &Path, make: impl Fn(&Path) -> io::Result<T>) -> Result<(Self, T)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = folder_of(target);
        // Another machine on a shared disk can have a process with the same id, and a killed process leaves its file behind.
        let mut attempts = 100;
        loop {
            // The name is independent of the target's, which may already have the maximum length.
            let path = folder.join(format!(".kiln-{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
            match make(&path) {
                Ok(made) => return Ok((Self { path }, made)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && attempts > 0 => attempts -= 1,
                Err(error) => return Err(write_error(target, error)),
            }
        }
    }

    /// Renames the file to the target and replaces whatever has that name.
    fn replace(self, target: &Path) -> Result<()> {
        // On success the old name no longer exists, so `drop` has nothing to remove.
        fs::rename(&self.path, target).map_err(|source| write_error(target, source))
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        // A failure cannot be reported from here, and only leaves a stray temporary file or folder.
        let _ = fs::remove_file(&self.path).or_else(|_| fs::remove_dir_all(&self.path));
    }
}

/// The folder of a file; the current one for a bare name.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn write_error(path: &Path, source: io::Error) -> Error {
    Error::Write { path: path.into(), source }
}

/// The error for a new file that could not get the target's name.
fn name_error(path: &Path, source: io::Error) -> Error {
    match source.kind() {
        ErrorKind::AlreadyExists => Error::OutputExists { path: path.into() },
        _ => write_error(path, source),
    }
}

/// The error of a failed write. It says that nothing was written, so that nobody looks for a partial file on a full disk.
fn unwritten(path: &Path, error: &io::Error) -> Error {
    refused(path, error.kind(), &format!("{error}; nothing was written"))
}

fn refused(path: &Path, kind: ErrorKind, why: &str) -> Error {
    write_error(path, io::Error::new(kind, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty folder, removed at the end of the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kiln-output-{test}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn check(path: &Path, force: bool) -> Result<()> {
        check_writable(&[PlannedFile { path: path.into(), bytes: 1 }], force)
    }

    #[test]
    fn a_file_is_written_once_and_replaced_only_by_force() {
        let scratch = Scratch::new("once");
        let path = scratch.0.join("out.png");
        check(&path, false).unwrap();
        assert!(scratch.names().is_empty(), "the check leaves nothing behind");
        save_new(&path, b"first", false).unwrap();

        for error in [check(&path, false).unwrap_err(), save_new(&path, b"second", false).unwrap_err()] {
            assert!(matches!(error, Error::OutputExists { .. }), "{error}");
            assert_eq!(error.exit_code(), 5);
        }
        assert_eq!(fs::read(&path).unwrap(), b"first");
        check(&path, true).unwrap();
        save_new(&path, b"third", true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"third");
        assert_eq!(scratch.names(), ["out.png"], "no temporary file stays");
    }

    #[test]
    fn one_of_many_writers_wins() {
        let scratch = Scratch::new("race");
        for round in 0..20 {
            let path = scratch.0.join(format!("{round}.png"));
            let wins: usize = std::thread::scope(|scope| {
                let path = &path;
                let spawn = |i: u8| scope.spawn(move || save_new(path, &[i; 10_000], false).is_ok());
                let writers: Vec<_> = (0..8).map(spawn).collect();
                writers.into_iter().map(|writer| usize::from(writer.join().unwrap())).sum()
            });
            assert_eq!(wins, 1);
        }
        assert_eq!(scratch.names().len(), 20);
    }

    #[test]
    fn without_tmpfile_a_named_temporary_file_is_used() {
        let scratch = Scratch::new("named");
        let path = scratch.0.join("out.png");
        place_named(&path, b"first", false, None).unwrap();
        assert!(matches!(place_named(&path, b"second", false, None).unwrap_err(), Error::OutputExists { .. }));
        assert_eq!(fs::read(&path).unwrap(), b"first");
        place_named(&path, b"third", true, None).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"third");
        assert_eq!(scratch.names(), ["out.png"], "no temporary file stays");
        // Both ways fail for the same targets, and give the same permissions.
        assert!(!place_tmpfile(&scratch.0.join("no/out.png"), b"x", false, None).unwrap());
        if place_tmpfile(&path, b"fourth", true, None).unwrap() {
            let mode = |name: &str| fs::metadata(scratch.0.join(name)).unwrap().permissions();
            place_named(&scratch.0.join("other.png"), b"x", false, None).unwrap();
            assert_eq!(mode("out.png"), mode("other.png"));
            assert_eq!(fs::read(&path).unwrap(), b"fourth");
        }
    }

    #[test]
    fn without_hard_links_the_name_is_claimed_first() {
        let scratch = Scratch::new("claim");
        let path = scratch.0.join("out.png");
        let claim = || Temp::claim(&path, create_new).unwrap();
        let (temp, mut file) = claim();
        file.write_all(b"whole").unwrap();
        claim_and_replace(temp, &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        let error = claim_and_replace(claim().0, &path).unwrap_err();
        assert!(matches!(error, Error::OutputExists { .. }), "{error}");
        assert_eq!(scratch.names(), ["out.png"]);
    }

    #[test]
    fn a_folder_appears_complete_or_not_at_all() {
        let scratch = Scratch::new("folder");
        let two = |folder: &Path| {
            fs::create_dir(folder.join("sub")).unwrap();
            fs::write(folder.join("sub/a"), "a").unwrap();
            fs::write(folder.join("b"), "b").unwrap();
            Ok(())
        };
        let full = |folder: &Path| {
            two(folder)?;
            Err(write_error(&folder.join("c"), ErrorKind::StorageFull.into()))
        };
        fs::create_dir(scratch.0.join("empty")).unwrap();
        for (name, before) in [("new", &["empty"][..]), ("empty", &["empty", "new"])] {
            let path = scratch.0.join(name);
            let error = save_folder(&path, full).unwrap_err();
            assert!(error.to_string().starts_with(&format!("cannot write ({}/c)", path.display())), "{error}");
            assert_eq!(scratch.names(), before, "nothing is left");
            save_folder(&path, two).unwrap();
            assert_eq!((fs::read(path.join("sub/a")).unwrap(), fs::read(path.join("b")).unwrap()), (b"a".into(), b"b".into()));
        }
        assert_eq!(scratch.names(), ["empty", "new"]);
        // A folder that is not empty is left unchanged.
        fs::remove_file(scratch.0.join("new/b")).unwrap();
        assert!(save_folder(&scratch.0.join("new"), two).is_err() && !scratch.0.join("new/b").exists());
        assert_eq!(scratch.names(), ["empty", "new"]);
    }

    #[test]
    fn targets_that_cannot_be_files() {
        let scratch = Scratch::new("bad");
        let folder = scratch.0.join("folder");
        fs::create_dir(&folder).unwrap();
        fs::write(scratch.0.join("file"), b"").unwrap();
        let too_long = scratch.0.join("x".repeat(300));
        let slash = PathBuf::from(format!("{}/", scratch.0.join("new").display()));
        let (missing, below_file) = (scratch.0.join("no/out.png"), scratch.0.join("file/out.png"));
        for path in [&folder, &too_long, &slash, &missing, &below_file, Path::new(""), Path::new("..")] {
            for force in [false, true] {
                let error = check(path, force).unwrap_err();
                assert!(matches!(error, Error::Write { .. }), "{error}");
                assert!(save_new(path, b"x", force).is_err(), "{}", path.display());
            }
        }
        assert_eq!(scratch.names(), ["file", "folder"]);
    }

    #[test]
    fn all_files_together_need_disk_space() {
        let scratch = Scratch::new("room");
        let planned = |count: usize, bytes: u64| -> Vec<PlannedFile> {
            (0..count).map(|i| PlannedFile { path: scratch.0.join(format!("{i}.png")), bytes }).collect()
        };
        check_writable(&planned(10_000, 1), false).unwrap();
        // The largest file fits, and so would each one alone.
        if let Some(free) = tmpfile::create(&scratch.0).ok().and_then(|file| tmpfile::free_bytes(&file)) {
            let error = check_writable(&planned(10_000, free / 5_000), false).unwrap_err();
            assert!(error.to_string().contains("all files together need up to "), "{error}");
            assert_eq!(error.exit_code(), 5);
        }
        assert!(scratch.names().is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn only_files_are_replaced() {
        let scratch = Scratch::new("link");
        fs::write(scratch.0.join("real.png"), "mine").unwrap();
        for (link, target) in [("dangling.png", "nowhere"), ("link.png", "real.png"), ("device.png", "/dev/null")] {
            std::os::unix::fs::symlink(target, scratch.0.join(link)).unwrap();
        }
        let links = ["dangling.png", "link.png", "device.png"].map(|name| scratch.0.join(name));
        for path in links.iter().map(PathBuf::as_path).chain(["/dev/null", "/dev/stdout"].map(Path::new)) {
            for force in [false, true] {
                for error in [check(path, force).unwrap_err(), save_new(path, b"x", force).unwrap_err()] {
                    assert!(matches!(error, Error::Write { .. }), "{error}");
                    assert_eq!(error.hint(), None, "force would be no help");
                }
            }
        }
        assert!(links.iter().all(|link| fs::symlink_metadata(link).unwrap().is_symlink()));
        assert_eq!(fs::read(scratch.0.join("real.png")).unwrap(), b"mine");
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_is_replaced_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Scratch::new("folder-mode");
        let folder = scratch.0.join("folder");
        for wanted in [0o700, 0o2775, 0o755] {
            fs::create_dir(&folder).unwrap();
            fs::set_permissions(&folder, fs::Permissions::from_mode(wanted)).unwrap();
            save_folder(&folder, |folder| {
                fs::write(folder.join("file"), b"x").unwrap();
                Ok(())
            })
            .unwrap();
            assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o7777, wanted);
            assert_eq!(scratch.names(), ["folder"]);
            fs::remove_dir_all(&folder).unwrap();
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_is_replaced_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Scratch::new("mode");
        let path = scratch.0.join("out.png");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        for wanted in [0o600, 0o640, 0o444, 0o666] {
            fs::write(&path, b"").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(wanted)).unwrap();
            save_new(&path, b"whole", true).unwrap();
            assert_eq!((mode(), fs::read(&path).unwrap()), (wanted, b"whole".to_vec()));
            let replaced = fs::metadata(&path).unwrap();
            place_named(&path, b"named", true, Some(&replaced)).unwrap();
            assert_eq!((mode(), fs::read(&path).unwrap()), (wanted, b"named".to_vec()));
            fs::remove_file(&path).unwrap();
        }
    }
}
