//! What is finished of an output, so that a run that was stopped can be continued: the request it belongs to, what calibration
//! measured, and every layer whose bytes are on disk. A journal is used only for the same request, and only as far as the bytes
//! have the checksums that it states.

use super::encode::Finished;
use crate::checkpoint::Identity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    /// What is written.
    pub request: Record,
    /// The bits of the largest magnitude of each layer's input, by the canonical name of its weight, once they were measured.
    pub calibration: Option<BTreeMap<String, u32>>,
    /// The layers that are on disk, for every file, by the name of their weight.
    pub finished: Vec<BTreeMap<String, Finished>>,
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

    /// Whether these are the bytes of a journal, of any version, and not of some other file. It may be damaged.
    pub fn is_one(bytes: &[u8]) -> bool {
        bytes.starts_with(BEGINNING)
    }

    /// Reads a journal. A damaged one is as good as none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let journal: Self = serde_json::from_slice(bytes).ok()?;
        (journal.finished.len() == journal.request.files.len()).then_some(journal)
    }

    /// Its bytes.
    pub fn bytes(&self) -> Vec<u8> {
        // All keys are texts and no number is a float, so there is nothing that could fail.
        serde_json::to_vec(self).expect("a journal can be serialised")
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
    use super::*;

    #[test]
    fn a_damaged_journal_is_none() {
        let file = FileRecord { path: "x".into(), bytes: 7, header: 1 };
        let record =
            Record { version: "1".into(), inputs: Vec::new(), copies: Vec::new(), files: vec![file], calibration: "none".into() };
        let journal = Journal::new(record.clone());
        let bytes = journal.bytes();
        assert!(Journal::is_one(&bytes) && Journal::is_one(&bytes[..40]));
        assert!([&b""[..], b"{}", b"\0\0", &bytes[1..]].iter().all(|other| !Journal::is_one(other)));
        assert_eq!(Journal::parse(&bytes).as_ref(), Some(&journal));
        for length in 0..bytes.len() {
            assert_eq!(Journal::parse(&bytes[..length]), None);
        }
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(Journal::parse(text.replace("\"finished\":[{}]", "\"finished\":[]").as_bytes()), None);
        assert_eq!(Journal::parse(text.replace("\"bytes\":7", "\"bytes\":-7").as_bytes()), None);
        assert_eq!(record.difference(&record), None);
        let other = Record { calibration: "constants".into(), ..record.clone() };
        assert_eq!(record.difference(&other), Some("with another calibration"));
    }
}
