//! Exif with one entry, the user comment. Galleries look there for the text `parameters` of a JPEG or WebP.

use crate::metadata::ImageMetadata;

/// What begins a user comment in UTF-16.
const UTF_16: &[u8; 8] = b"UNICODE\0";

/// Splits the text of an image into what goes to XMP and what is the user comment.
pub(super) fn split<'a>(text: &'a [(&'a str, String)]) -> (Vec<(&'a str, String)>, Option<&'a str>) {
    let comment = text.iter().find(|(key, _)| *key == ImageMetadata::PARAMETERS).map(|(_, value)| value.as_str());
    (text.iter().filter(|(key, _)| *key != ImageMetadata::PARAMETERS).cloned().collect(), comment)
}

/// A TIFF structure with a user comment, in the byte order that the readers' libraries assume.
pub(super) fn user_comment(text: &str) -> Vec<u8> {
    let comment: Vec<u8> = UTF_16.iter().copied().chain(text.encode_utf16().flat_map(u16::to_be_bytes)).collect();
    let entry = |tag: u16, kind: u16, count: u32, value: u32| {
        [&tag.to_be_bytes()[..], &kind.to_be_bytes(), &count.to_be_bytes(), &value.to_be_bytes()].concat()
    };
    // A folder is a count, its entries of 12 bytes, and where the next folder is: nowhere.
    let folder = |entry: Vec<u8>| [&1_u16.to_be_bytes()[..], &entry, &[0; 4]].concat();
    const HEADER: u32 = 8;
    const FOLDER: u32 = 2 + 12 + 4;
    // The tag of the Exif folder, a 32-bit offset; the tag of the user comment, bytes.
    let first = folder(entry(0x8769, 4, 1, HEADER + FOLDER));
    let second = folder(entry(0x9286, 7, comment.len() as u32, HEADER + 2 * FOLDER));
    [b"MM\0*", &HEADER.to_be_bytes()[..], &first, &second, &comment].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_lead_to_the_comment() {
        let exif = user_comment("é🦀");
        let at = |at: usize| u32::from_be_bytes(exif[at..at + 4].try_into().unwrap()) as usize;
        assert_eq!(&exif[..4], b"MM\0*");
        let first = at(4);
        let second = at(first + 10);
        let (count, comment) = (at(second + 6), at(second + 10));
        assert_eq!(&exif[second + 2..second + 6], [0x92, 0x86, 0, 7]);
        assert_eq!((&exif[comment..comment + 8], comment + count), (&UTF_16[..], exif.len()));
        let units: Vec<u16> = exif[comment + 8..].chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect();
        assert_eq!(String::from_utf16(&units).unwrap(), "é🦀");
    }
}
