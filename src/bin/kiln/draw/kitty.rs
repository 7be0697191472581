//! Kitty's graphics protocol, which Ghostty and Konsole have as well. An image is a PNG in base64, in chunks.

use super::area::Area;
use kiln::base64;

/// The most characters of a chunk.
const CHUNK: usize = 4096;

/// How a command begins that tmux passes on.
pub const WRAPPED: &[u8] = b"\x1bPtmux;";

/// Shows a PNG at the cursor, which stays where it is. An image with the same number is replaced.
pub fn encode(png: &[u8], id: u32, area: Area, wrapped: bool) -> Vec<u8> {
    let text = base64::encode(png);
    let mut bytes = Vec::with_capacity(text.len() + text.len() / 64 + 128);
    let count = text.len().div_ceil(CHUNK);
    for (i, chunk) in text.chunks(CHUNK).enumerate() {
        let more = u8::from(i + 1 < count);
        // Without q=2 in every chunk the terminal answers, and the answers appear as typed text.
        let keys = match i {
            0 => format!("a=T,f=100,i={id},p=1,q=2,C=1,c={},r={},m={more};", area.columns, area.rows),
            _ => format!("q=2,m={more};"),
        };
        push(&mut bytes, keys.as_bytes(), chunk, wrapped);
    }
    bytes
}

/// Removes an image from the screen and from the terminal's memory.
pub fn delete(id: u32, wrapped: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    push(&mut bytes, format!("a=d,d=I,i={id},q=2").as_bytes(), b"", wrapped);
    bytes
}

/// Appends a command. tmux passes on what is wrapped for it, in which every ESC is doubled.
fn push(bytes: &mut Vec<u8>, keys: &[u8], payload: &[u8], wrapped: bool) {
    let (wrapper, start, end): (&[u8], &[u8], &[u8]) = match wrapped {
        false => (b"", b"\x1b_G", b"\x1b\\"),
        true => (WRAPPED, b"\x1b\x1b_G", b"\x1b\x1b\\\x1b\\"),
    };
    for part in [wrapper, start, keys, payload, end] {
        bytes.extend_from_slice(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Unwraps what was wrapped for tmux.
    fn unwrapped(text: &str) -> String {
        let parts = text.strip_prefix("\x1bPtmux;").unwrap().split("\x1b\\\x1bPtmux;").collect::<Vec<_>>().join("");
        parts.strip_suffix("\x1b\\").unwrap().replace("\x1b\x1b", "\x1b")
    }

    /// The keys and the payload of every command.
    fn commands(text: &str) -> Vec<(&str, &str)> {
        let inner = text.strip_prefix("\x1b_G").unwrap().strip_suffix("\x1b\\").unwrap();
        inner.split("\x1b\\\x1b_G").map(|command| command.split_once(';').unwrap_or((command, ""))).collect()
    }

    #[test]
    fn chunks_join_to_the_file() {
        let area = Area { columns: 7, rows: 3, halves: 6 };
        for length in [1, 3, 3071, 3072, 3073, 9217] {
            let png: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8).collect();
            let plain = String::from_utf8(encode(&png, 42, area, false)).unwrap();
            let chunks = commands(&plain);
            let text: String = chunks.iter().map(|(_, chunk)| *chunk).collect();
            assert_eq!(base64::decode(text.as_bytes()).unwrap(), png);
            assert_eq!(chunks.len(), (length * 4_usize).div_ceil(3 * 4096).max(1));
            for (i, (keys, chunk)) in chunks.iter().enumerate() {
                let last = i + 1 == chunks.len();
                let start = if i == 0 { "a=T,f=100,i=42,p=1,q=2,C=1,c=7,r=3," } else { "q=2," };
                assert_eq!(*keys, format!("{start}m={}", u8::from(!last)));
                assert!(chunk.len() <= 4096 && (last || chunk.len() == 4096), "{}", chunk.len());
            }
            let wrapped = String::from_utf8(encode(&png, 42, area, true)).unwrap();
            assert_eq!(wrapped.matches("\x1bPtmux;").count(), chunks.len());
            assert_eq!(unwrapped(&wrapped), plain);
        }
    }

    #[test]
    fn an_image_is_deleted_by_its_number() {
        assert_eq!(delete(9, false), b"\x1b_Ga=d,d=I,i=9,q=2\x1b\\");
        assert_eq!(delete(9, true), b"\x1bPtmux;\x1b\x1b_Ga=d,d=I,i=9,q=2\x1b\x1b\\\x1b\\");
    }
}
