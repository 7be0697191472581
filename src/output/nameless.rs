//! Files without a name, which Linux has. They are gone when closed, unless they were given a name. On other systems there are
//! none, and creating one fails.

pub use system::{create, link, make_room, room_beside};

#[cfg(target_os = "linux")]
mod system {
    use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, fallocate, fstatvfs, linkat, open};
    use rustix::io::Errno;
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;
    use std::path::Path;

    /// Creates one that belongs to a folder's file system.
    pub fn create(folder: &Path) -> io::Result<File> {
        // The permissions that any new file gets, less what the user's mask takes away.
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        Ok(open(folder, OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, mode)?.into())
    }

    /// Takes the room that it will need, if there is as much. File systems that cannot say let it pass.
    pub fn make_room(file: &File, bytes: u64) -> io::Result<()> {
        match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
            Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Bytes that its file system has left for us, where it says so.
    pub fn room_beside(file: &File) -> Option<u64> {
        let stat = fstatvfs(file).ok().filter(|stat| stat.f_blocks > 0)?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Gives it a name, which must be free.
    pub fn link(file: &File, name: &Path) -> io::Result<()> {
        // By way of /proc everybody may. Without /proc only some may, depending on the system's age.
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

    pub fn make_room(_file: &File, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    pub fn room_beside(_file: &File) -> Option<u64> {
        None
    }

    pub fn link(_file: &File, _name: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
