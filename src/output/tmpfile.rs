//! Unnamed temporary files (`O_TMPFILE`), which only Linux has. Closing one deletes it, unless it was linked to a name. On other
//! systems creating one fails.

pub use system::{create, free_bytes, link, preallocate};

#[cfg(target_os = "linux")]
mod system {
    use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, fallocate, fstatvfs, linkat, open};
    use rustix::io::Errno;
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;
    use std::path::Path;

    /// Creates an unnamed file on a folder's file system.
    pub fn create(folder: &Path) -> io::Result<File> {
        // The default permissions of a new file, to which the umask is applied.
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        Ok(open(folder, OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, mode)?.into())
    }

    /// Preallocates disk space for the file. File systems that do not support this are assumed to have enough.
    pub fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
        match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
            Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Free bytes of the file system for unprivileged users, if it reports them.
    pub fn free_bytes(file: &File) -> Option<u64> {
        let stat = fstatvfs(file).ok().filter(|stat| stat.f_blocks > 0)?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Links the file to a name that must not exist.
    pub fn link(file: &File, name: &Path) -> io::Result<()> {
        // Linking through /proc needs no privileges. Without /proc some kernel versions require a capability.
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(match linkat(CWD, own, CWD, name, AtFlags::SYMLINK_FOLLOW) {
            Err(Errno::NOENT) => linkat(file, "", CWD, name, AtFlags::EMPTY_PATH),
            done => done,
        }?)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::fs::File;
    use std::io;
    use std::path::Path;

    pub fn create(_folder: &Path) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn preallocate(_file: &File, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    pub fn free_bytes(_file: &File) -> Option<u64> {
        None
    }

    pub fn link(_file: &File, _name: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
