//! The text in an image file: keys and values, wherever the format keeps them.
//!
//! Everything in the file is untrusted. Text that takes too much memory, or is damaged, is left out by name.

use super::ImageMetadata;
use crate::error::Result;
use crate::image::{Tiff, properties};
use crate::reference::{self, RawText};
use flate2::read::ZlibDecoder;
use std::borrow::Cow;
use std::io::Read;
use std::path::Path;

/// Limit on all text of a file, in bytes. kiln's is a few kilobytes, apart from prompts.
const MAX_TEXT: usize = 512 << 10;

/// Limit on the number of texts.
const MAX_TEXTS: usize = 100;

/// Limit on the number of notes.
const MAX_NOTES: usize = 20;

/// The longest key that PNG allows.
const MAX_KEY: usize = 79;

/// The largest compression ratio of deflate.
const MAX_RATIO: usize = 1032;

/// The key of XMP in a PNG.
const XMP: &str = "XML:com.adobe.xmp";

/// The text in an image file.
#[derive(Debug)]
pub struct StoredText<'a> {
    /// The name of the file's format.
    pub format: &'static str,
    texts: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    notes: Vec<String>,
    /// How many bytes of text may follow.
    room: usize,
    /// Texts so far, also those that were left out.
    count: usize,
}

impl<'a> StoredText<'a> {
    /// Reads the text of a file in memory. `origin` is its display name.
    pub fn of_file(bytes: &'a [u8], origin: &Path) -> Result<Self> {
        let mut stored = Self { format: "", texts: Vec::new(), notes: Vec::new(), room: MAX_TEXT, count: 0 };
        stored.format = reference::texts(bytes, origin, &mut |text| stored.read(text))?.name();
        Ok(stored)
    }

    /// The text of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.texts.iter().find(|(name, _)| name == key).map(|(_, text)| &**text)
    }

    /// Keys and texts in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.texts.iter().map(|(key, text)| (&**key, &**text))
    }

    /// What was left out, and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What kiln stored, if it did. The error says why it cannot be read.
    pub fn metadata(&self) -> Option<Result<ImageMetadata, String>> {
        self.get(ImageMetadata::KEY).map(|json| serde_json::from_str(json).map_err(|error| error.to_string()))
    }

    /// Reads a part of the file.
    fn read(&mut self, text: RawText<'a>) {
        match text {
            RawText::Latin1(data) => match keyed(data) {
                Some((key, text)) => self.add(key.into(), text_of(text)),
                None => self.damaged("a tEXt chunk"),
            },
            RawText::Compressed(data) => match keyed(data) {
                Some((key, [0, packed @ ..])) => self.inflate(key, packed),
                _ => self.damaged("a zTXt chunk"),
            },
            RawText::International(data) => self.international(data),
            RawText::Exif(data) => match Tiff::new(data) {
                Some(tiff) => tiff.texts(self.room).into_iter().for_each(|(name, text)| {
                    // Galleries read the comment as `parameters`. Other programs store an object there.
                    let is_parameters = name == "UserComment" && !text.starts_with('{');
                    self.add(if is_parameters { ImageMetadata::PARAMETERS } else { name }.into(), text);
                }),
                None => self.damaged("Exif"),
            },
            RawText::Xmp(data) => self.xmp(data),
        }
    }

    /// Reads an iTXt chunk: a key, whether and how the text is compressed, a language, the key in it, and the text.
    fn international(&mut self, data: &'a [u8]) {
        let split = |bytes: &'a [u8]| {
            let end = bytes.iter().position(|byte| *byte == 0)?;
            Some((&bytes[..end], &bytes[end + 1..]))
        };
        let parts = keyed(data).and_then(|(key, rest)| {
            let ([compressed, 0], rest) = rest.split_first_chunk()? else { return None };
            let (_, rest) = split(rest)?;
            Some((key, *compressed, split(rest)?.1))
        });
        match parts {
            Some((XMP, 0, text)) => self.xmp(text),
            Some((key, 0, text)) => self.add(key.into(), text_of(text)),
            Some((key, 1, packed)) => self.inflate(key, packed),
            _ => self.damaged("an iTXt chunk"),
        }
    }

    /// Reads kiln's properties of XMP.
    fn xmp(&mut self, data: &'a [u8]) {
        match str::from_utf8(data) {
            _ if data.len() > MAX_TEXT => self.too_long("XMP"),
            Ok(packet) => properties(packet, &mut |key, value| self.add(key.into(), value)),
            Err(_) => self.damaged("XMP"),
        }
    }

    /// Adds a compressed text.
    fn inflate(&mut self, key: &'a str, packed: &[u8]) {
        // Room for all of it at once: a vector that grows would take twice as much.
        let mut bytes = Vec::with_capacity(packed.len().saturating_mul(MAX_RATIO).min(self.room + 1));
        match ZlibDecoder::new(packed).take(self.room as u64 + 1).read_to_end(&mut bytes) {
            Ok(_) if bytes.len() > self.room => self.too_long(key),
            Ok(_) => {
                let text = String::from_utf8(bytes).unwrap_or_else(|error| text_of(error.as_bytes()).into_owned());
                self.add(key.into(), text.into());
            }
            Err(_) => self.damaged(&format!("`{key}`")),
        }
    }

    /// Adds a text. The first one of a key counts.
    fn add(&mut self, key: Cow<'a, str>, text: Cow<'a, str>) {
        self.count += 1;
        if self.count > MAX_TEXTS {
            // This is said once, and costs nothing for each of a million more.
            if self.count == MAX_TEXTS + 1 {
                self.note(format!("there are more than {MAX_TEXTS} texts"));
            }
        } else if self.get(&key).is_some() {
            self.note(format!("`{key}` is there twice, and the first counts"));
        } else if text.len() > self.room {
            self.too_long(&key);
        } else {
            self.room -= text.len();
            self.texts.push((key, text));
        }
    }

    fn too_long(&mut self, what: &str) {
        self.note(format!("`{what}` is left out: all text together may have {} KiB", MAX_TEXT >> 10));
    }

    fn damaged(&mut self, what: &str) {
        self.note(format!("{what} is damaged"));
    }

    /// Adds a note, once and unless there are enough.
    fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

/// Splits a key from what follows it.
fn keyed(data: &[u8]) -> Option<(&str, &[u8])> {
    let end = data.iter().take(MAX_KEY + 1).position(|byte| *byte == 0)?;
    // Keys are Latin-1, but nobody uses more than ASCII.
    let key = str::from_utf8(&data[..end]).ok().filter(|key| !key.is_empty())?;
    Some((key, &data[end + 1..]))
}

/// Text in UTF-8, which many programs store whatever the chunk, or in Latin-1.
fn text_of(bytes: &[u8]) -> Cow<'_, str> {
    match str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes.iter().map(|byte| char::from(*byte)).collect(),
    }
}
