//! Records the finished work of an output, so that a stopped run can be continued: its request, the calibration results, and
//! every layer whose bytes are on disk. A journal is used only for the same request, and only for bytes that match its
//! checksums. It has a line for each entry, of JSON, a tab and the CRC-32 of the JSON. Lines are only added.

use super::encode::Finished;
use crate::checkpoint::Identity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A journal.
#[derive(Clone, Debug, PartialEq)]
pub struct Journal {
    /// The request of the output.
    pub request: Record,
    /// The bits of the largest input magnitude of each layer, by the canonical name of its weight; `None` until they are measured.
    pub calibration: Option<BTreeMap<String, u32>>,
    /// The layers on disk, for each file, by the name of their weight.
    pub finished: Vec<BTreeMap<String, Finished>>,
}

/// A line of a journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// The first line.
    Request(Record),
    /// The calibration results.
    Calibration(BTreeMap<String, u32>),
    /// A layer that is on disk: the index of its file, the name of its weight, and its result.
    Finished(usize, String, Finished),
}

impl Entry {
    /// The entry as a line.
    pub fn line(&self) -> Vec<u8> {
        // All keys are strings and no number is a float, so serializing cannot fail.
        line_of(serde_json::to_vec(self).expect("an entry can be serialized"))
    }

    /// Reads a line. `None` if it is damaged.
    fn parse(line: &[u8]) -> Option<Self> {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let at = line.iter().rposition(|byte| *byte == b'\t')?;
        let (json, checksum) = (&line[..at], &line[at + 1..]);
        (checksum == checksum_of(json).as_bytes()).then(|| serde_json::from_slice(json).ok())?
    }
}

/// A line with this JSON.
pub fn line_of(mut json: Vec<u8>) -> Vec<u8> {
    let checksum = checksum_of(&json);
    json.push(b'\t');
    json.extend_from_slice(checksum.as_bytes());
    json.push(b'\n');
    json
}

fn checksum_of(json: &[u8]) -> String {
    let mut crc = flate2::Crc::new();
    crc.update(json);
    format!("{:08x}", crc.sum())
}

/// Everything that the output's bytes depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The version of the program.
    pub version: String,
    /// The files that are read, for weights and for calibration.
    pub inputs: Vec<Identity>,
    /// The files that are copied.
    pub copies: Vec<CopyRecord>,
    /// The files to write.
    pub files: Vec<FileRecord>,
    /// The way inputs of layers are scaled.
    pub calibration: String,
}

/// A file to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// The path in the output folder. A single file has one too, though only its target counts.
    pub path: PathBuf,
    /// The size in bytes.
    pub bytes: u64,
    /// The CRC-32 of the header, which states every layer's name, format and storage.
    pub header: u32,
}

/// A file that is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRecord {
    /// The path in the output folder.
    pub to: PathBuf,
    /// The original.
    pub from: Identity,
}

/// The first bytes of every journal: the request comes first, and begins with its version.
const BEGINNING: &[u8] = br#"{"request":{"version":"#;

impl Journal {
    /// The journal of an output without finished work.
    pub fn new(request: Record) -> Self {
        let finished = vec![BTreeMap::new(); request.files.len()];
        Self { request, calibration: None, finished }
    }

    /// Whether these bytes are a journal of any version, rather than another file. The journal may be damaged or cut off.
    pub fn is_one(bytes: &[u8]) -> bool {
        bytes.starts_with(BEGINNING) || BEGINNING.starts_with(bytes)
    }

    /// Reads the lines of a journal. `None` if one is damaged.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut entries = bytes.split_inclusive(|byte| *byte == b'\n').map(Entry::parse);
        let Some(Some(Entry::Request(request))) = entries.next() else { return None };
        let mut journal = Self::new(request);
        entries.try_for_each(|entry| journal.add(entry?))?;
        Some(journal)
    }

    /// Adds an entry. `None` for a second request, or for a file that is not part of the request.
    pub fn add(&mut self, entry: Entry) -> Option<()> {
        match entry {
            Entry::Request(_) => return None,
            Entry::Calibration(measured) => self.calibration = Some(measured),
            Entry::Finished(file, weight, finished) => {
                self.finished.get_mut(file)?.insert(weight, finished);
            }
        }
        Some(())
    }

    /// Whether the journal holds no work that would have to be repeated.
    pub fn is_empty(&self) -> bool {
        self.calibration.is_none() && self.finished.iter().all(BTreeMap::is_empty)
    }
}

impl Record {
    /// How another request differs from this one; `None` if it does not.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.version != other.version {
            Some("by another version of kiln")
        } else if self.inputs != other.inputs || self.copies != other.copies {
            Some("from other files, or they have changed")
        } else if self.files != other.files {
            Some("with another format or layout, or other layers")
        } else if self.calibration != other.calibration {
            Some("with another calibration")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::encode::ErrorSums;
    use super::*;

    #[test]
    fn a_damaged_journal_is_none() {
        let file = FileRecord { path: "x".into(), bytes: 7, header: 1 };
        let record =
            Record { version: "1".into(), inputs: Vec::new(), copies: Vec::new(), files: vec![file], calibration: "none".into() };
        let first = Entry::Request(record.clone()).line();
        assert!((0..=first.len()).all(|length| Journal::is_one(&first[..length])));
        assert!([&b"{}"[..], b"\0\0", &first[1..]].iter().all(|other| !Journal::is_one(other)));
        let mut journal = Journal::new(record.clone());
        assert_eq!(Journal::parse(&first).as_ref(), Some(&journal));
        let layer = Finished { scale_bits: Some(1), input_scale_bits: None, error: ErrorSums::default(), checksums: vec![7] };
        let measured = Entry::Calibration([("y".into(), 2)].into());
        let mut bytes = first.clone();
        for entry in [measured.clone(), Entry::Finished(0, "y".into(), layer.clone())] {
            bytes.extend(entry.line());
            journal.add(entry).unwrap();
        }
        assert_eq!(Journal::parse(&bytes).as_ref(), Some(&journal));
        let whole = [first.len(), first.len() + measured.line().len()];
        for length in 0..bytes.len() {
            // A line without its line feed counts as whole, if nothing else is missing.
            let is_whole = whole.iter().any(|whole| [*whole, whole - 1].contains(&length)) || length == bytes.len() - 1;
            assert_eq!(Journal::parse(&bytes[..length]).is_some(), is_whole, "{length}");
        }
        for other in [Entry::Request(record.clone()), Entry::Finished(1, "y".into(), layer)] {
            assert_eq!(Journal::parse(&[first.clone(), other.line()].concat()), None);
        }
        // Whatever bit changes, the line no longer counts. The line feed at the end may be missing.
        for bit in 0..8 * (bytes.len() - 1) {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Journal::parse(&changed), None, "bit {bit}");
        }
        let text = String::from_utf8(serde_json::to_vec(&Entry::Request(record.clone())).unwrap()).unwrap();
        assert!(Journal::parse(&line_of(text.clone().into_bytes())).is_some());
        assert_eq!(Journal::parse(&line_of(text.replace("\"bytes\":7", "\"bytes\":-7").into_bytes())), None);
        assert_eq!(record.difference(&record), None);
        let other = Record { calibration: "constants".into(), ..record.clone() };
        assert_eq!(record.difference(&other), Some("with another calibration"));
    }
}
