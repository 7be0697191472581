//! Reads the lines of `kiln run` on a thread of its own.

use super::line::MAX_LINE_BYTES;
use kiln::error::{Error, Result};
use kiln::threads;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// The most lines that are read before they are planned.
const READ_AHEAD: usize = 16;

/// The source of lines.
pub type Source = Box<dyn Read + Send>;

/// A line as it was read.
pub struct RawLine {
    pub number: u64,
    /// The bytes without the newline; `None` if the line is too long.
    pub bytes: Option<Vec<u8>>,
}

/// Starts the thread that reads lines. It ends after the last line or with the process, because nothing interrupts a read from a
/// terminal or a pipe.
pub fn read_lines(source: Source) -> Result<Receiver<io::Result<RawLine>>> {
    let (sender, receiver) = sync_channel(READ_AHEAD);
    let work = move || {
        if let Err(error) = send_lines(&mut BufReader::new(source), &sender) {
            let _ = sender.send(Err(error));
        }
    };
    let thread = std::thread::Builder::new().stack_size(threads::STACK).spawn(work);
    thread.map(|_| receiver).map_err(|error| Error::Threads { count: 1, why: error.to_string() })
}

fn send_lines(source: &mut dyn BufRead, sender: &SyncSender<io::Result<RawLine>>) -> io::Result<()> {
    for number in 1.. {
        let mut bytes = Vec::new();
        // One byte over the limit, plus a newline, reveals longer lines.
        let read = source.take(MAX_LINE_BYTES as u64 + 2).read_until(b'\n', &mut bytes)?;
        if read == 0 {
            break;
        }
        if bytes.pop_if(|byte| *byte == b'\n').is_some() {
            bytes.pop_if(|byte| *byte == b'\r');
        } else if bytes.len() > MAX_LINE_BYTES {
            source.skip_until(b'\n')?;
        }
        // Some editors begin a file with a mark that is not part of the text.
        if number == 1 && bytes.starts_with("\u{feff}".as_bytes()) {
            bytes.drain(..3);
        }
        let bytes = Some(bytes).filter(|bytes| bytes.len() <= MAX_LINE_BYTES);
        if sender.send(Ok(RawLine { number, bytes })).is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[u8]) -> Vec<(u64, Option<String>)> {
        let (sender, receiver) = sync_channel(100);
        send_lines(&mut &*text, &sender).unwrap();
        drop(sender);
        let own = |line: RawLine| (line.number, line.bytes.map(|bytes| String::from_utf8(bytes).unwrap()));
        receiver.into_iter().map(|line| own(line.unwrap())).collect()
    }

    #[test]
    fn lines_lose_their_ends_and_have_a_limit() {
        let some = |number, text: &str| (number, Some(text.to_owned()));
        assert_eq!(lines(b"a\r\nb\n\n\xef\xbb\xbfc\rd"), [some(1, "a"), some(2, "b"), some(3, ""), some(4, "\u{feff}c\rd")]);
        assert_eq!(lines(b"\xef\xbb\xbfa\n"), [some(1, "a")]);
        assert_eq!(lines(b""), []);
        let longest = "x".repeat(MAX_LINE_BYTES);
        for end in ["", "\n"] {
            assert_eq!(lines(format!("{longest}{end}").as_bytes()), [some(1, &longest)]);
        }
        for more in ["x", "xx", "xxx", "x\r", &longest] {
            let text = format!("{longest}{more}\nnext");
            assert_eq!(lines(text.as_bytes()), [(1, None), some(2, "next")], "{} more", more.len());
        }
    }
}
