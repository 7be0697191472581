//! The journal of `kiln quantize`.

use common::cost::peak_of;
use kiln::quantize::{Entry, Journal, line_of};

/// A journal. What an accepted one says is written and read again; cut after any line it is a journal, and one line more than it has is not.
///
/// The lines of an input are JSON. Each gets its checksum here, which no mutation would find.
pub fn journal(data: &[u8]) {
    assert!(data.is_empty() || Journal::parse(data).is_none_or(|journal| !journal.request.version.is_empty()));
    let lines = data.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let file: Vec<u8> = lines.flat_map(|line| line_of(line.to_vec())).collect();
    let (journal, peak) = peak_of(|| Journal::parse(&file));
    assert!(peak <= (1 << 16) + 64 * file.len() as isize, "{peak} bytes for a file of {}", file.len());
    let Some(journal) = journal else { return };
    let mut lines = vec![Entry::Request(journal.request.clone()).line()];
    lines.extend(journal.calibration.clone().map(|measured| Entry::Calibration(measured).line()));
    for (file, layers) in journal.finished.iter().enumerate() {
        lines.extend(layers.iter().map(|(weight, done)| Entry::Finished(file, weight.clone(), done.clone()).line()));
    }
    let written = lines.concat();
    assert!(Journal::is_one(&written));
    assert_eq!(Journal::parse(&written).as_ref(), Some(&journal));
    assert_eq!(journal.is_empty(), lines.len() == 1);
    assert_eq!(journal.request.difference(&journal.request), None);
    assert!((1..lines.len()).all(|count| Journal::parse(&lines[..count].concat()).is_some()));
    assert_eq!(Journal::parse(&[&written[..], &lines[0]].concat()), None, "a second request");
    assert_eq!(Journal::parse(&written[..written.len() - 2]), None, "a line cut short");
}
