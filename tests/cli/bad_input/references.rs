//! Reference images.

use super::*;
use kiln::image::Image;
use std::path::Path;

/// A PNG of nothing but a header with this size, and its checksum.
fn claiming(width: u32, height: u32) -> Vec<u8> {
    let header = [b"IHDR", &width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut crc = flate2::Crc::new();
    crc.update(&header);
    [b"\x89PNG\r\n\x1A\n\0\0\0\x0D", &header[..], &crc.sum().to_be_bytes()].concat()
}

#[test]
fn references_that_are_none() {
    let sandbox = prepared();
    write(&sandbox, "me.png", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic");
    write(&sandbox, "me.jpg", b"RIFF\x10\0\0\0WEBPVP8 ");
    write(&sandbox, "scan.jpeg", b"%PDF-1.7\n");
    write(&sandbox, "note.png", "a note under a wrong name");
    write(&sandbox, "empty.png", "");
    write(&sandbox, "bomb.png", claiming(20_000, 20_000));
    write(&sandbox, "strip.png", claiming(16_385, 4_000));
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/references");
    let jpeg = fs::read(fixtures.join("baseline_420.jpg")).unwrap();
    let half = write(&sandbox, "half.jpg", &jpeg[..jpeg.len() / 2]);
    // A frame header begins with length, sample precision, height and width.
    let frame = jpeg.windows(3).position(|w| w == [0xFF, 0xC0, 0]).unwrap();
    let mut bomb = jpeg.clone();
    bomb[frame + 5..frame + 9].copy_from_slice(&[13_000u16.to_be_bytes(), 13_000u16.to_be_bytes()].concat());
    write(&sandbox, "bomb.jpg", bomb);
    // The marker of the frame header, its precision, and the sampling factors of luma and chroma.
    for (name, at, value) in [("coded.jpg", 1, 0xC9), ("deep.jpg", 4, 12), ("blocks.jpg", 11, 0x44), ("ratio.jpg", 14, 0x31)] {
        let mut other = jpeg.clone();
        other[frame + at] = value;
        write(&sandbox, name, other);
    }
    // Truncated in the data and at the start of the last scan, with an EOI marker at the end.
    write(&sandbox, "closed.jpg", [&jpeg[..jpeg.len() / 2], &[0xFF, 0xD9]].concat());
    let progressive = fs::read(fixtures.join("progressive_420.jpg")).unwrap();
    let last = progressive.windows(2).rposition(|w| w == [0xFF, 0xDA]).unwrap();
    write(&sandbox, "coarse.jpg", [&progressive[..last], &[0xFF, 0xD9]].concat());
    for (name, width, height) in [("dot.png", 1, 1), ("line.png", 1, 8000)] {
        let image = Image { width, height, pixels: vec![0; width * height * 3] };
        write(&sandbox, name, image.encode_png(&[]).unwrap());
    }
    let whole = Image { width: 64, height: 64, pixels: vec![9; 64 * 64 * 3] }.encode_png(&[]).unwrap();
    let short = write(&sandbox, "half.png", &whole[..whole.len() / 2]);

    let of = |file: &str, first: String, hint| row(&format!("x -q --reference {file}"), 3, first, hint);
    let unreadable =
        |file: &str, detail: &str| of(file, format!("cannot read image ({file}): {detail}"), Is("convert to PNG, JPEG or WebP"));
    let ends = |file: &str, length: u64| {
        of(file, format!("damaged image ({file}): the file ends after {length} bytes, before the image does"), Nothing)
    };
    let damaged = |file: &str, detail: &str| of(file, format!("damaged image ({file}): {detail}"), Nothing);
    let large = |file: &str, detail: &str| of(file, format!("image too large ({file}): {detail}"), Nothing);
    let small = |file: &str, size: &str| {
        let limits = "sides must be at least 64 and the ratio at most 8:1";
        of(file, format!("image too small or too narrow ({file}): {size}; {limits}"), Nothing)
    };
    check(
        &sandbox,
        &[
            unreadable("me.png", "content is HEIC, not PNG"),
            ends("me.jpg", 16),
            unreadable("scan.jpeg", "content is PDF, not JPEG"),
            unreadable("note.png", "content is text, not PNG"),
            unreadable("empty.png", "the file is empty"),
            of("model", "cannot read image (model): it is a folder".into(), Nothing),
            of("none.png", "cannot read (none.png): No such file or directory (os error 2)".into(), Nothing),
            ends("half.jpg", half),
            ends("half.png", short),
            unreadable("coded.jpg", "content is a rare kind of JPEG (lossless, hierarchical or arithmetic)"),
            unreadable("deep.jpg", "content is a JPEG of 12 bits a sample, not 8"),
            unreadable("ratio.jpg", "content is a JPEG with the rare sampling 2:3 across"),
            damaged("blocks.jpg", "a scan has 18 blocks in an MCU, limit 10"),
            damaged("closed.jpg", "its image data ends before the image does"),
            damaged("coarse.jpg", "scans are missing: a part of component 1 of 3"),
            large("bomb.png", "20000x20000 = 400 MP, limit 100 MP"),
            large("bomb.jpg", "13000x13000 = 169 MP, limit 100 MP"),
            large("strip.png", "16385x4000, limit 16384 a side"),
            small("dot.png", "1x1"),
            small("line.png", "1x8000"),
        ],
    );
}
