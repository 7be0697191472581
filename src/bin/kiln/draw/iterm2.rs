//! iTerm2's inline images, which WezTerm and mintty have as well.

use super::area::Area;
use kiln::base64;

/// Shows a PNG at the cursor, which moves in ways that differ between terminals. The terminal keeps the shape within the area.
pub fn encode(png: &[u8], area: Area) -> Vec<u8> {
    let (size, Area { columns, rows, .. }) = (png.len(), area);
    let keys = format!("\x1b]1337;File=inline=1;size={size};width={columns};height={rows};preserveAspectRatio=1:");
    [keys.as_bytes(), &base64::encode(png), b"\x07"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_in_one_sequence() {
        let area = Area { columns: 7, rows: 3, halves: 6 };
        let png: Vec<u8> = (0..10_000).map(|i| (i % 253) as u8).collect();
        let text = String::from_utf8(encode(&png, area)).unwrap();
        let (keys, file) = text.strip_suffix('\x07').unwrap().split_once(':').unwrap();
        assert_eq!(keys, "\x1b]1337;File=inline=1;size=10000;width=7;height=3;preserveAspectRatio=1");
        assert_eq!(base64::decode(file.as_bytes()).unwrap(), png);
    }
}
