//! Open folders, in which no name is followed if it is a link. Paths inside a folder are opened name by name, so another process
//! cannot put a link in the place of a folder between a check and its use. Systems without `openat` check each name before its use.

pub use system::Folder;

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};

/// An entry of a folder.
#[derive(Debug)]
pub struct Entry {
    pub name: OsString,
    pub kind: Kind,
}

/// What a name in a folder stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Folder,
    /// A link, a device or anything else that kiln does not write.
    Other,
}

/// The error for a link, or for anything else than a file and a folder.
pub fn link() -> io::Error {
    let why = "this is a link or a device, through which kiln does not write; move it away";
    io::Error::new(ErrorKind::InvalidInput, why)
}

/// Fails unless this is a regular file with a single name: a change would also show under the other names.
fn checked(file: File) -> io::Result<File> {
    let meta = file.metadata()?;
    if !meta.is_file() || has_other_names(&meta) { Err(link()) } else { Ok(file) }
}

fn has_other_names(meta: &Metadata) -> bool {
    #[cfg(unix)]
    {
        std::os::unix::fs::MetadataExt::nlink(meta) > 1
    }
    #[cfg(not(unix))]
    {
        let _ = meta;
        false
    }
}

#[cfg(target_os = "linux")]
mod system {
    use super::{Entry, File, Kind, OsStr, checked, io, link};
    use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, linkat, mkdirat, openat, renameat, statat, unlinkat};
    use rustix::io::Errno;
    use std::ffi::OsString;
    use std::os::fd::OwnedFd;
    use std::os::unix::ffi::OsStringExt;
    use std::path::Path;

    #[derive(Debug)]
    pub struct Folder(OwnedFd);

    impl Folder {
        /// Opens the folder at a path that the user named, which may contain links.
        pub fn open(path: &Path) -> io::Result<Self> {
            Ok(Self(openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?))
        }

        /// Opens a folder in this one.
        pub fn inside(&self, name: &OsStr) -> io::Result<Self> {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Ok(Self(openat(&self.0, name, flags, Mode::empty()).map_err(|error| self.reason(name, error))?))
        }

        /// Opens a file to read and write it, and creates it if there is none.
        pub fn file(&self, name: &OsStr) -> io::Result<File> {
            // Opening a pipe or a device must neither wait nor have an effect on the terminal.
            let flags = OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
            self.opened(name, flags).and_then(checked)
        }

        /// Creates an empty file at a free name.
        pub fn create_new(&self, name: &OsStr) -> io::Result<()> {
            self.opened(name, OFlags::CREATE | OFlags::EXCL).map(drop)
        }

        fn opened(&self, name: &OsStr, flags: OFlags) -> io::Result<File> {
            // The default permissions of a new file, to which the umask is applied.
            let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
            let file = openat(&self.0, name, flags | OFlags::RDWR | OFlags::CLOEXEC, mode);
            Ok(file.map_err(|error| self.reason(name, error))?.into())
        }

        /// What the system's error means if the name is a link.
        fn reason(&self, name: &OsStr, error: Errno) -> io::Error {
            match error {
                Errno::LOOP | Errno::NOTDIR if self.kind(name).is_ok_and(|kind| kind == Kind::Other) => link(),
                other => other.into(),
            }
        }

        /// What a name stands for.
        pub fn kind(&self, name: &OsStr) -> io::Result<Kind> {
            let mode = statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode;
            Ok(match FileType::from_raw_mode(mode) {
                FileType::RegularFile => Kind::File,
                FileType::Directory => Kind::Folder,
                _ => Kind::Other,
            })
        }

        pub fn entries(&self) -> io::Result<Vec<Entry>> {
            let mut entries = Vec::new();
            for entry in Dir::read_from(&self.0)? {
                let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
                if name != "." && name != ".." {
                    entries.push(Entry { kind: self.kind(&name)?, name });
                }
            }
            Ok(entries)
        }

        pub fn create_folder(&self, name: &OsStr) -> io::Result<()> {
            Ok(mkdirat(&self.0, name, Mode::RWXU | Mode::RWXG | Mode::RWXO)?)
        }

        pub fn remove_file(&self, name: &OsStr) -> io::Result<()> {
            Ok(unlinkat(&self.0, name, AtFlags::empty())?)
        }

        pub fn remove_folder(&self, name: &OsStr) -> io::Result<()> {
            Ok(unlinkat(&self.0, name, AtFlags::REMOVEDIR)?)
        }

        /// Gives a file a second name, which must not exist.
        pub fn link(&self, name: &OsStr, other: &OsStr) -> io::Result<()> {
            Ok(linkat(&self.0, name, &self.0, other, AtFlags::empty())?)
        }

        /// Renames a file or folder, and replaces a file or an empty folder with that name.
        pub fn rename(&self, name: &OsStr, other: &OsStr) -> io::Result<()> {
            Ok(renameat(&self.0, name, &self.0, other)?)
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::{Entry, File, Kind, OsStr, checked, io, link};
    use std::fs::{self, OpenOptions};
    use std::path::{Path, PathBuf};

    #[derive(Debug)]
    pub struct Folder(PathBuf);

    impl Folder {
        pub fn open(path: &Path) -> io::Result<Self> {
            fs::metadata(path).map(|_| Self(path.into()))
        }

        pub fn inside(&self, name: &OsStr) -> io::Result<Self> {
            match self.kind(name)? {
                Kind::Folder => Ok(Self(self.0.join(name))),
                _ => Err(link()),
            }
        }

        pub fn file(&self, name: &OsStr) -> io::Result<File> {
            if self.kind(name).is_ok_and(|kind| kind == Kind::Other) {
                return Err(link());
            }
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(self.0.join(name)).and_then(checked)
        }

        pub fn create_new(&self, name: &OsStr) -> io::Result<()> {
            super::super::create_new(&self.0.join(name)).map(drop)
        }

        pub fn kind(&self, name: &OsStr) -> io::Result<Kind> {
            let kind = fs::symlink_metadata(self.0.join(name))?.file_type();
            Ok(if kind.is_file() {
                Kind::File
            } else if kind.is_dir() {
                Kind::Folder
            } else {
                Kind::Other
            })
        }

        pub fn entries(&self) -> io::Result<Vec<Entry>> {
            let names = fs::read_dir(&self.0)?.map(|entry| Ok(entry?.file_name()));
            names.map(|name| name.and_then(|name| Ok(Entry { kind: self.kind(&name)?, name }))).collect()
        }

        pub fn create_folder(&self, name: &OsStr) -> io::Result<()> {
            fs::create_dir(self.0.join(name))
        }

        pub fn remove_file(&self, name: &OsStr) -> io::Result<()> {
            fs::remove_file(self.0.join(name))
        }

        pub fn remove_folder(&self, name: &OsStr) -> io::Result<()> {
            fs::remove_dir(self.0.join(name))
        }

        pub fn link(&self, name: &OsStr, other: &OsStr) -> io::Result<()> {
            fs::hard_link(self.0.join(name), self.0.join(other))
        }

        pub fn rename(&self, name: &OsStr, other: &OsStr) -> io::Result<()> {
            fs::rename(self.0.join(name), self.0.join(other))
        }
    }
}
