//! Detects the format of a file by its first bytes. File extensions are unreliable: phones store HEIC as `.jpg`, and servers send
//! web pages.

use super::Fault;
use crate::files::{Magic, format_name, has_bytes};
use std::path::Path;

/// The formats that kiln decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Png,
    Jpeg,
    WebP,
}

impl Kind {
    /// The format's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
        }
    }
}

/// Formats that kiln only recognizes.
const OTHERS: [Magic; 15] = [
    (0, b"GIF8", "GIF"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"%PDF", "PDF"),
    (0, b"8BPS", "Photoshop"),
    (0, b"\0\0\x01\0", "ICO"),
    (0, b"\xFF\x0A", "JPEG XL"),
    (4, b"JXL \r\n", "JPEG XL"),
    (4, b"jP  \r\n", "JPEG 2000"),
    (0, b"\xFF\x4F\xFF\x51", "JPEG 2000"),
    (0, b"qoif", "QOI"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"version https://git-lfs", "a Git LFS pointer"),
];

/// Detects how to decode a file. Rejects unsupported formats by name.
pub(super) fn of(bytes: &[u8], origin: &Path) -> Result<Kind, Fault> {
    if bytes.starts_with(b"\x89PNG") {
        return Ok(Kind::Png);
    }
    if bytes.starts_with(b"\xFF\xD8\xFF") {
        return Ok(Kind::Jpeg);
    }
    if has_bytes(bytes, 0, b"RIFF") && has_bytes(bytes, 8, b"WEBP") {
        return Ok(Kind::WebP);
    }
    if bytes.is_empty() {
        return Err(Fault::Unreadable("the file is empty".into()));
    }
    // The message names the format of the extension, because the user expects that format.
    let extension = origin.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
    let wanted = match extension.as_str() {
        "png" => "PNG",
        "jpg" | "jpeg" => "JPEG",
        "webp" => "WebP",
        _ => "PNG, JPEG or WebP",
    };
    Err(Fault::Unreadable(format!("content is {}, not {wanted}", name(bytes))))
}

/// The format name of a file that kiln does not decode.
fn name(bytes: &[u8]) -> &'static str {
    if let Some(name) = format_name(&OTHERS, bytes) {
        return name;
    }
    // Text can begin with "BM" as well; the reserved fields of a bitmap are zero.
    if has_bytes(bytes, 0, b"BM") && has_bytes(bytes, 6, &[0; 4]) {
        return "BMP";
    }
    if has_bytes(bytes, 4, b"ftyp") {
        return media_name(bytes);
    }
    let start = &bytes[..bytes.len().min(512)];
    let markup = start.trim_ascii_start().starts_with(b"<");
    if start.windows(4).any(|word| word == b"<svg") {
        "SVG"
    } else if start.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace()) {
        "unknown"
    } else if markup {
        "a web page or XML"
    } else {
        "text"
    }
}

/// Names the format of an ISO base media file by the brands in its first box. The major brand is often a generic image brand, so
/// all brands are searched.
fn media_name(bytes: &[u8]) -> &'static str {
    let length = bytes.first_chunk().map_or(0, |length| u32::from_be_bytes(*length) as usize);
    let brands = bytes.get(8..length.min(bytes.len()).min(256)).unwrap_or_default();
    let has = |wanted: &[&[u8; 4]]| brands.chunks_exact(4).any(|brand| wanted.iter().any(|w| brand == *w));
    if has(&[b"avif", b"avis"]) {
        "AVIF"
    } else if has(&[b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"]) {
        "HEIC"
    } else {
        "a video"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_decides_and_the_message_names_both() {
        assert_eq!(of(b"\x89PNG\r\n\x1A\n", Path::new("a.jpg")).unwrap(), Kind::Png);
        assert_eq!(of(b"\xFF\xD8\xFF\xE0", Path::new("a.png")).unwrap(), Kind::Jpeg);
        assert_eq!(of(b"RIFF\x10\0\0\0WEBPVP8 ", Path::new("a.jpg")).unwrap(), Kind::WebP);
        let cases: [(&[u8], &str, &str); 15] = [
            (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "me.png", "content is HEIC, not PNG"),
            (b"\0\0\0\x1Cftypmif1\0\0\0\0mif1avif", "me.JPG", "content is AVIF, not JPEG"),
            (b"\0\0\0\x14ftypisom\0\0\0\0mp41", "me", "content is a video, not PNG, JPEG or WebP"),
            (b"\0\0\0\x02ftyp", "me.webp", "content is a video, not WebP"),
            (b"%PDF-1.7", "me.png", "content is PDF, not PNG"),
            (b"GIF89a", "me.png", "content is GIF, not PNG"),
            (b"BM\x36\0\0\0\0\0\0\0", "me.png", "content is BMP, not PNG"),
            (b"BMW is a car", "me.png", "content is text, not PNG"),
            (b"II*\0", "me.png", "content is TIFF, not PNG"),
            (b"MM\0*", "me.png", "content is TIFF, not PNG"),
            (b"  <!DOCTYPE html><html>", "me.png", "content is a web page or XML, not PNG"),
            (b"<?xml version='1.0'?><svg>", "me.png", "content is SVG, not PNG"),
            (b"caf\xC3\xA9\n", "me.png", "content is text, not PNG"),
            (b"\x00\x01\x02", "me.png", "content is unknown, not PNG"),
            (b"", "me.png", "the file is empty"),
        ];
        for (bytes, origin, message) in cases {
            let Err(Fault::Unreadable(detail)) = of(bytes, Path::new(origin)) else { panic!("{message}") };
            assert_eq!(detail, message);
        }
    }
}
