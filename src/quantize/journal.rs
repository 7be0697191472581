//! What is finished of an output, so that a run that was stopped can be continued: the request it belongs to, what calibration
//! measured, and every layer whose bytes are on disk. A journal is used only for the same request, and only as far as the bytes
//! have the checksums that it states. It has a line of JSON for each of these, and lines are only added.

use super::encode::Finished;
use crate::checkpoint::Identity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A journal.
#[derive(Clone, Debug, PartialEq)]
pub struct Journal {
    /// What is written.
    pub request: Record,
    /// The bits of the largest magnitude of each layer's input, by the canonical name of its weight, once they were measured.
    pub calibration: Option<BTreeMap<String, u32>>,
    /// The layers that are on disk, for every file, by the name of their weight.
    pub finished: Vec<BTreeMap<String, Finished>>,
}

/// A line of a journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// The first line.
    Request(Record),
    /// What calibration measured.
    Calibration(BTreeMap<String, u32>),
    /// A layer that is on disk: the number of its file, the name of its weight, and what became of it.
    Finished(usize, String, Finished),
}

impl Entry {
    /// Its line.
    pub fn line(&self) -> Vec<u8> {
        // All keys are texts and no number is a float, so there is nothing that could fail.
        let mut line = serde_json::to_vec(self).expect("an entry can be serialized");
        line.push(b'\n');
        line
    }
}

/// Everything that the bytes of an output depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The version of the program.
    pub version: String,
    /// The files that are read: those of the weights, and those of calibration.
    pub inputs: Vec<Identity>,
    /// The files that are copied.
    pub copies: Vec<CopyRecord>,
    /// The files that are written.
    pub files: Vec<FileRecord>,
    /// How inputs of layers are scaled.
    pub calibration: String,
}

/// A file that is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its path in the folder of the output; a single file has it, too, though only its target counts.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// The CRC-32 of its header, which names every layer, its format and how that is stored.
    pub header: u32,
}

/// A file that is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRecord {
    /// Its path in the folder of the output.
    pub to: PathBuf,
    /// The original.
    pub from: Identity,
}

/// What every journal begins with: the request comes first, and its version first in it.
const BEGINNING: &[u8] = br#"{"request":{"version":"#;

impl Journal {
    /// The journal of an output of which nothing is finished.
    pub fn new(request: Record) -> Self {
        let finished = vec![BTreeMap::new(); request.files.len()];
        Self { request, calibration: None, finished }
    }

    /// Whether these are the bytes of a journal, of any version, and not of some other file. It may be damaged, or end anywhere.
    pub fn is_one(bytes: &[u8]) -> bool {
        bytes.starts_with(BEGINNING) || BEGINNING.starts_with(bytes)
    }

    /// Reads the lines of a journal. A damaged one is as good as none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut entries = bytes.split_inclusive(|byte| *byte == b'\n').map(serde_json::from_slice);
        let Some(Ok(Entry::Request(request))) = entries.next() else { return None };
        let mut journal = Self::new(request);
        entries.try_for_each(|entry| journal.add(entry.ok()?))?;
        Some(journal)
    }

    /// Notes something. There is none for a second request, or for a file that is not part of the request.
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

    /// Whether there is nothing in it that would have to be done again.
    pub fn is_empty(&self) -> bool {
        self.calibration.is_none() && self.finished.iter().all(BTreeMap::is_empty)
    }
}

impl Record {
    /// What is different in another request; `None` if nothing is.
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
            // A line without its end counts as one, if nothing else of it is missing.
            let is_whole = whole.iter().any(|whole| [*whole, whole - 1].contains(&length)) || length == bytes.len() - 1;
            assert_eq!(Journal::parse(&bytes[..length]).is_some(), is_whole, "{length}");
        }
        for other in [Entry::Request(record.clone()), Entry::Finished(1, "y".into(), layer)] {
            assert_eq!(Journal::parse(&[first.clone(), other.line()].concat()), None);
        }
        let text = String::from_utf8(first).unwrap();
        assert_eq!(Journal::parse(text.replace("\"bytes\":7", "\"bytes\":-7").as_bytes()), None);
        assert_eq!(record.difference(&record), None);
        let other = Record { calibration: "constants".into(), ..record.clone() };
        assert_eq!(record.difference(&other), Some("with another calibration"));
    }
}
