//! Opening files that others wrote: regular ones only, and small ones read whole.
//!
//! A pipe without a writer would hang whoever opens it, a device may never end, and a folder fails in words that explain
//! nothing. All are refused by the same rule, and after opening, so that nothing can take the file's place in between.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens a regular file for reading.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        // Opening a pipe then does not wait for a writer, nor a terminal for anybody. Regular files do not care.
        options.custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32);
    }
    let file = options.open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(ErrorKind::InvalidInput, if kind.is_dir() { "it is a folder" } else { "it is not a regular file" }))
}

/// Reads a regular file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // A byte more than may be used is enough to tell that it is too long, even if the file grows meanwhile.
    if open(path)?.take(limit + 1).read_to_end(&mut bytes)? as u64 > limit {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
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
        assert_eq!(read(&folder.join("none"), 5).unwrap_err().kind(), ErrorKind::NotFound);
        #[cfg(target_os = "linux")]
        {
            let pipe = folder.join("pipe");
            rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
            for path in [&pipe, Path::new("/dev/zero"), Path::new("/dev/null")] {
                assert_eq!(read(path, 5).unwrap_err().to_string(), "it is not a regular file", "{}", path.display());
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
