//! The addresses that the server listens on: TCP, and a Unix socket for programs of the same user.

use kiln::error::{Error, Result};
use kiln::text::shown_path;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A Unix socket that listens.
pub struct Socket {
    pub listener: UnixListener,
    pub file: SocketFile,
}

/// The file of a socket, and the lock that says whose it is. The file goes with this value. A process that was killed leaves the file but
/// not its lock, so the next one replaces it.
pub struct SocketFile {
    pub path: PathBuf,
    _lock: File,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Binds a TCP address.
pub fn tcp(address: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).and_then(|listener| {
        // The standard library's 128 would make a burst of clients wait for a second.
        rustix::net::listen(&listener, BACKLOG)?;
        listener.set_nonblocking(true).map(|()| listener)
    });
    bound.map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::AddrInUse => "another program has this port; choose one with --listen, or 0 for a free one",
            ErrorKind::PermissionDenied => "ports below 1024 are the system's; choose one with --listen",
            ErrorKind::AddrNotAvailable => "this machine does not have the address; use 127.0.0.1 or 0.0.0.0",
            _ => "choose another address with --listen",
        };
        Error::usage(format!("cannot listen on {address}: {error}"), hint)
    })
}

/// Where the socket of a user is.
pub fn usual_socket(runtime: Option<&Path>, caches: Option<&Path>) -> Option<PathBuf> {
    runtime.map(|folder| folder.join("kiln.sock")).or_else(|| Some(caches?.join("kiln/run/kiln.sock")))
}

/// Binds a Unix socket that only this user can reach. `None` if another server has it.
pub fn socket(path: &Path) -> Result<Option<Socket>> {
    let failed = |what: &str, error: std::io::Error| {
        Error::usage(format!("{what} ({}): {error}", shown_path(path)), "name another place with --socket, or `none`")
    };
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| failed("cannot make the folder of the socket", error))?;
    }
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&lock_path);
    let lock = lock.map_err(|error| failed("cannot make the lock of the socket", error))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(failed("cannot lock the socket", error.into())),
    }
    // What is no socket was put there by somebody else. A socket that answers belongs to a program without our lock.
    if let Ok(there) = fs::symlink_metadata(path) {
        use std::os::unix::fs::FileTypeExt;
        if !there.file_type().is_socket() {
            return Err(failed("this is no socket", ErrorKind::AlreadyExists.into()));
        }
        if UnixStream::connect(path).is_ok() {
            return Ok(None);
        }
        fs::remove_file(path).map_err(|error| failed("cannot remove the socket of a server that is gone", error))?;
    }
    let listener = UnixListener::bind(path).map_err(|error| failed("cannot listen on the socket", error))?;
    let socket = Socket { listener, file: SocketFile { path: path.into(), _lock: lock } };
    let narrowed = fs::set_permissions(path, Permissions::from_mode(0o600));
    narrowed.and_then(|()| socket.listener.set_nonblocking(true)).map_err(|error| failed("cannot protect the socket", error))?;
    Ok(Some(socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_has_one_owner_and_outlives_none() {
        let folder = std::env::temp_dir().join(format!("kiln-socket-{}", std::process::id()));
        let path = folder.join("deep/kiln.sock");
        let first = socket(&path).unwrap().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(socket(&path).unwrap().is_none());
        drop(first);
        assert!(!path.exists());
        // A process that was killed leaves its file.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists() && socket(&path).unwrap().is_some());
        // A program that has no lock, and a file.
        let other = UnixListener::bind(&path).unwrap();
        assert!(socket(&path).unwrap().is_none());
        drop(other);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert!(socket(&path).is_err() && fs::read(&path).unwrap() == b"precious");
        fs::remove_dir_all(folder).unwrap();
    }
}
