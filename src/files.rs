//! Opens untrusted files: only regular ones, with a size limit for files that are read whole.
//!
//! Opening a pipe without a writer would block, a device may be endless, and reading a folder fails with an obscure message. One
//! check rejects all of them. It runs after opening, so that the file cannot be replaced in between.

use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// The message for a folder in place of a file.
pub const FOLDER: &str = "it is a folder";

/// The message for pipes, sockets and devices.
pub const IRREGULAR: &str = "it is not a regular file";

/// A file format by its magic number: the offset of the number, its bytes, and the name of the format.
pub type Magic = (usize, &'static [u8], &'static str);

/// Whether a file has these bytes at this offset.
pub fn has_bytes(file: &[u8], offset: usize, bytes: &[u8]) -> bool {
    file.get(offset..).is_some_and(|rest| rest.starts_with(bytes))
}

/// The name of the first format whose magic number the file has.
pub fn format_name(formats: &[Magic], file: &[u8]) -> Option<&'static str> {
    formats.iter().find(|(offset, bytes, _)| has_bytes(file, *offset, bytes)).map(|(.., name)| *name)
}

/// The SHA-256 of some bytes, as hexadecimal digits.
pub fn sha256_of(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Opens a regular file for reading.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        // These flags keep opening a pipe from waiting for a writer, and keep a terminal from becoming the controlling one. They
        // have no effect on regular files.
        options.custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32);
    }
    let file = options.open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(ErrorKind::InvalidInput, if kind.is_dir() { FOLDER } else { IRREGULAR }))
}

/// Reads a regular file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte over the limit is enough to detect a file that is too long, even if it grows meanwhile.
    if open(path)?.take(limit + 1).read_to_end(&mut bytes)? as u64 > limit {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
}

/// Whether a path exists, including dangling links. An inaccessible path counts as existing: reading it then reports the reason.
pub fn is_there(path: &Path) -> bool {
    match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    }
}

/// Why a path cannot be followed to a file or folder, or `None` if it can.
pub fn absence(path: &Path) -> Option<String> {
    let error = path.metadata().err()?;
    Some(match error.kind() {
        ErrorKind::NotFound if path.symlink_metadata().is_ok() => "it is a link to something that is not there".into(),
        ErrorKind::NotFound => "it does not exist".into(),
        _ => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read_and_no_more_than_asked_for() {
        let folder = std::env::temp_dir().join(format!("kiln-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("file");
        std::fs::write(&file, b"12345").unwrap();
        assert_eq!(read(&file, 5).unwrap(), b"12345");
        assert_eq!(read(&file, 4).unwrap_err().to_string(), "it is longer than 4 bytes");
        assert_eq!(read(&folder, 5).unwrap_err().to_string(), "it is a folder");
        let none = folder.join("none");
        assert_eq!(read(&none, 5).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(is_there(&file) && is_there(&folder) && !is_there(&none) && !is_there(&file.join("x")));
        assert_eq!((absence(&file), absence(&none).as_deref()), (None, Some("it does not exist")));
        assert!(absence(&file.join("x")).unwrap().contains("(os error"));
        #[cfg(target_os = "linux")]
        {
            let pipe = folder.join("pipe");
            rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
            for path in [&pipe, Path::new("/dev/zero"), Path::new("/dev/null")] {
                assert_eq!(read(path, 5).unwrap_err().to_string(), "it is not a regular file", "{}", path.display());
            }
            let link = folder.join("link");
            std::os::unix::fs::symlink("nowhere", &link).unwrap();
            assert!(is_there(&link));
            assert_eq!(absence(&link).unwrap(), "it is a link to something that is not there");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
