//! Files that exist already: whether one is the image that a line asks for, so that the line can be skipped.

use kiln::error::Error;
use kiln::image::Format;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes that are read at each end.
const ENDS: usize = Format::FRAME;

/// Whether a path leads to a regular file that is a complete image of this format, as far as its first and last bytes tell. A folder,
/// a pipe, or a file of which a part was copied is none.
pub fn is_image(path: &Path, format: Format) -> bool {
    // A pipe must not be opened, because that could wait forever.
    let is_file = fs::metadata(path).is_ok_and(|meta| meta.is_file());
    is_file && ends(path).is_ok_and(|(first, last, bytes)| format.is_complete(&first, &last, bytes))
}

/// The error for a file that is in the way and not the image.
pub fn in_the_way(path: &Path, format: Format) -> Error {
    let name = match format {
        Format::Png => "PNG",
        Format::Jpeg { .. } => "JPEG",
        Format::WebP => "WebP",
    };
    let why = format!("it exists and is not a complete {name} file; remove it to generate the image");
    Error::Write { path: path.into(), source: io::Error::new(ErrorKind::AlreadyExists, why) }
}

/// The first and the last bytes of a file, and its size.
fn ends(path: &Path) -> io::Result<([u8; ENDS], [u8; ENDS], u64)> {
    let mut file = File::open(path)?;
    let (mut first, mut last) = ([0; ENDS], [0; ENDS]);
    file.read_exact(&mut first)?;
    let start = file.seek(SeekFrom::End(-(ENDS as i64)))?;
    file.read_exact(&mut last)?;
    Ok((first, last, start + ENDS as u64))
}
