//! Exif, a TIFF structure. kiln writes one entry, the user comment: galleries look there for the text `parameters` of a JPEG or WebP.
//! It reads any entry.

use crate::metadata::ImageMetadata;
use std::borrow::Cow;

/// What begins a user comment in UTF-16.
const UTF_16: &[u8; 8] = b"UNICODE\0";

/// Splits the text of an image into what goes to XMP and what is the user comment.
pub(super) fn split<'a>(text: &'a [(&'a str, String)]) -> (Vec<(&'a str, String)>, Option<&'a str>) {
    let comment = text.iter().find(|(key, _)| *key == ImageMetadata::PARAMETERS).map(|(_, value)| value.as_str());
    (text.iter().filter(|(key, _)| *key != ImageMetadata::PARAMETERS).cloned().collect(), comment)
}

/// The tags of the Exif folder and of the user comment in it.
const EXIF: u16 = 0x8769;
const USER_COMMENT: u16 = 0x9286;

/// Entries of the first folder in which programs store text.
const NAMED: [(u16, &str); 4] = [(0x010E, "ImageDescription"), (0x010F, "Make"), (0x0110, "Model"), (0x0131, "Software")];

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
    // The types are a 32-bit offset and bytes.
    let first = folder(entry(EXIF, 4, 1, HEADER + FOLDER));
    let second = folder(entry(USER_COMMENT, 7, comment.len() as u32, HEADER + 2 * FOLDER));
    [b"MM\0*", &HEADER.to_be_bytes()[..], &first, &second, &comment].concat()
}

/// A TIFF structure from an untrusted file: every offset may be wrong. What is wrong is not there.
pub(crate) struct Tiff<'a> {
    bytes: &'a [u8],
    little: bool,
}

/// An entry of a folder.
struct Entry {
    kind: u16,
    count: u32,
    /// Where the value is, or where its offset is.
    at: usize,
}

impl<'a> Tiff<'a> {
    /// Reads the header.
    pub(crate) fn new(bytes: &'a [u8]) -> Option<Self> {
        // PNG stores the structure alone, but some writers add the prefix that JPEG has.
        let bytes = bytes.strip_prefix(b"Exif\0\0").unwrap_or(bytes);
        match bytes.get(..4)? {
            b"II*\0" => Some(Self { bytes, little: true }),
            b"MM\0*" => Some(Self { bytes, little: false }),
            _ => None,
        }
    }

    /// The number in an entry of the first folder.
    pub(crate) fn number(&self, tag: u16) -> Option<u32> {
        let entry = self.entry(self.offset(4)?, tag)?;
        // A single value of 16 or 32 bits is stored in the entry itself.
        match (entry.kind, entry.count) {
            (3, 1) => self.u16_at(entry.at).map(u32::from),
            (4, 1) => self.u32_at(entry.at),
            _ => None,
        }
    }

    /// The texts of the structure with their names, if they have at most `limit` bytes.
    pub(crate) fn texts(&self, limit: usize) -> Vec<(&'static str, Cow<'a, str>)> {
        let Some(first) = self.offset(4) else { return Vec::new() };
        let named = NAMED.into_iter().filter_map(|(tag, name)| {
            let text = self.bytes_of(first, tag, limit)?;
            Some((name, String::from_utf8_lossy(text.split(|byte| *byte == 0).next()?)))
        });
        let exif = self.entry(first, EXIF).and_then(|entry| self.offset(entry.at));
        let comment = exif.and_then(|exif| self.bytes_of(exif, USER_COMMENT, limit)).map(|bytes| self.comment(bytes));
        named.chain(comment.map(|comment| ("UserComment", comment))).collect()
    }

    /// A user comment without the eight bytes that name its encoding, which some programs leave out.
    fn comment(&self, bytes: &'a [u8]) -> Cow<'a, str> {
        let named = |encoding: &[u8; 8]| bytes.strip_prefix(encoding);
        let Some(text) = named(UTF_16) else {
            let text = named(b"ASCII\0\0\0").or_else(|| named(&[0; 8])).unwrap_or(bytes);
            return String::from_utf8_lossy(text);
        };
        // Many writers use another byte order than the structure's. Nearly all texts have more zeros in the upper byte.
        let zeros = |first: usize| text.iter().skip(first).step_by(2).filter(|byte| **byte == 0).count();
        let little = match (zeros(0), zeros(1)) {
            (upper, lower) if upper == lower => self.little,
            (upper, lower) => lower > upper,
        };
        let unit = |pair: &[u8; 2]| if little { u16::from_le_bytes(*pair) } else { u16::from_be_bytes(*pair) };
        let units = text.as_chunks().0.iter().map(unit).filter(|unit| *unit != 0xFEFF);
        char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    }

    /// The bytes of a text, at most `limit`.
    fn bytes_of(&self, folder: usize, tag: u16, limit: usize) -> Option<&'a [u8]> {
        let Entry { kind, count, at } = self.entry(folder, tag)?;
        let count = usize::try_from(count).ok().filter(|count| *count <= limit && matches!(kind, 1 | 2 | 7))?;
        let start = if count <= 4 { at } else { self.offset(at)? };
        self.bytes.get(start..start.checked_add(count)?)
    }

    /// The first entry with a tag.
    fn entry(&self, folder: usize, tag: u16) -> Option<Entry> {
        let entries = usize::from(self.u16_at(folder)?);
        for entry in 0..entries {
            let at = folder.checked_add(2 + entry * 12)?;
            if self.u16_at(at)? == tag {
                let (kind, count) = (self.u16_at(at.checked_add(2)?)?, self.u32_at(at.checked_add(4)?)?);
                return Some(Entry { kind, count, at: at.checked_add(8)? });
            }
        }
        None
    }

    fn offset(&self, at: usize) -> Option<usize> {
        usize::try_from(self.u32_at(at)?).ok()
    }

    fn u16_at(&self, at: usize) -> Option<u16> {
        let bytes = *self.bytes.get(at..)?.first_chunk()?;
        Some(if self.little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    }

    fn u32_at(&self, at: usize) -> Option<u32> {
        let bytes = *self.bytes.get(at..)?.first_chunk()?;
        Some(if self.little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) })
    }
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

    #[test]
    fn texts_are_read_in_both_byte_orders() {
        let written = user_comment("a fox, é🦀");
        let texts = |bytes: &[u8], limit| -> Vec<(&str, String)> {
            let tiff = Tiff::new(bytes).unwrap();
            tiff.texts(limit).into_iter().map(|(name, text)| (name, text.into_owned())).collect()
        };
        let want = vec![("UserComment", "a fox, é🦀".to_owned())];
        assert_eq!(texts(&written, 100), want);
        assert_eq!(texts(&[&b"Exif\0\0"[..], &written].concat(), 100), want);
        assert_eq!(texts(&written, 20), [], "longer than the limit");
        // Little-endian UTF-16 in a big-endian structure, as some writers have it.
        let start = written.len() - 2 * "a fox, é🦀".encode_utf16().count();
        let mut mixed = written.clone();
        mixed[start..].as_chunks_mut::<2>().0.iter_mut().for_each(|pair| pair.reverse());
        assert_eq!(texts(&mixed, 100), want);
        // Two texts in the first folder, one of them short enough to be in the entry itself.
        let entry = |tag: u16, count: u32, value: [u8; 4]| {
            [&tag.to_le_bytes()[..], &2_u16.to_le_bytes(), &count.to_le_bytes(), &value].concat()
        };
        let little =
            [&b"II*\0\x08\0\0\0\x02\0"[..], &entry(0x010F, 4, *b"abc\0"), &entry(0x0110, 6, [34, 0, 0, 0]), b"prompt"].concat();
        assert_eq!(texts(&little, 100), [("Make", "abc".to_owned()), ("Model", "prompt".into())]);
    }

    #[test]
    fn wrong_offsets_lead_nowhere() {
        let whole = user_comment("a fox");
        for cut in 0..whole.len() {
            assert_eq!(Tiff::new(&whole[..cut]).map_or(0, |tiff| tiff.texts(100).len()), 0, "{cut}");
        }
        for at in 0..whole.len() - 3 {
            for value in [0, 7, whole.len() as u32, u32::MAX - 1, u32::MAX] {
                let mut bad = whole.clone();
                bad[at..at + 4].copy_from_slice(&value.to_be_bytes());
                let texts = Tiff::new(&bad).map(|tiff| tiff.texts(100)).unwrap_or_default();
                assert!(texts.iter().all(|(_, text)| text.len() <= 3 * 100), "{at} {value}");
            }
        }
    }
}
