//! PNG files.

use crate::images::decode;
use crate::{Reader, check_file_error, check_texts};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use kiln::image::Image;
use png::{BitDepth, ColorType};
use std::io::{Cursor, Write};

const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1A\n";

/// A PNG. An input that begins like one is a file, whose checksums are corrected. Any other says what is in one: its size, its kind of
/// pixels, a palette, and its rows before compression. An accepted file is the image that the `png` crate alone reads from it, converted by
/// the definition of each kind of pixels.
pub fn png(data: &[u8]) {
    let (file, made) = match data.strip_prefix(SIGNATURE) {
        Some(chunks) => ([SIGNATURE, &checked(chunks)].concat(), false),
        None => (composed(data), true),
    };
    check_texts(&file);
    let (image, reference) = (decode(&file), reference(&file));
    match (image, reference) {
        (Ok(image), Some(reference)) => assert!(image == reference, "the pixels differ from the png crate's"),
        (Ok(_), None) => panic!("the png crate refuses this"),
        (Err(error), reference) => {
            check_file_error(&error);
            assert!(!made || reference.is_none(), "the png crate reads this: {error}");
        }
    }
}

/// Appends a chunk.
pub(crate) fn push_chunk(file: &mut Vec<u8>, name: &[u8], data: &[u8]) {
    let mut crc = flate2::Crc::new();
    crc.update(name);
    crc.update(data);
    file.extend((data.len() as u32).to_be_bytes());
    file.extend(name.iter().chain(data));
    file.extend(crc.sum().to_be_bytes());
}

/// The chunks with correct checksums.
fn checked(chunks: &[u8]) -> Vec<u8> {
    let mut out = chunks.to_vec();
    let mut at = 0;
    while let Some(length) = out.get(at..at + 4) {
        let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        let end = at + 8 + length;
        let Some(body) = out.get(at + 4..end) else { break };
        let mut crc = flate2::Crc::new();
        crc.update(body);
        let Some(place) = out.get_mut(end..end + 4) else { break };
        place.copy_from_slice(&crc.sum().to_be_bytes());
        at = end + 4;
    }
    out
}

/// Makes a file: a size, a kind of pixels, a palette, and rows, each with a filter.
fn composed(data: &[u8]) -> Vec<u8> {
    const KINDS: [(u8, u8); 15] = [
        (0, 1),
        (0, 2),
        (0, 4),
        (0, 8),
        (0, 16),
        (2, 8),
        (2, 16),
        (3, 1),
        (3, 2),
        (3, 4),
        (3, 8),
        (4, 8),
        (4, 16),
        (6, 8),
        (6, 16),
    ];
    let mut input = Reader(data);
    let [width, height] = input.array().map(|byte: u8| 64 + usize::from(byte % 40));
    let (color, depth) = KINDS[usize::from(input.byte()) % KINDS.len()];
    let interlaced = input.byte() & 1;
    let entries = usize::from(input.byte()).max(1);
    let palette = Reader(input.take(3 * entries)).repeated(3 * entries.min(1 << depth.min(8)));
    let samples = match color {
        2 => 3,
        4 => 2,
        6 => 4,
        _ => 1,
    };
    // Where each pass of Adam7 begins, and its steps.
    let passes: &[[usize; 4]] = match interlaced {
        0 => &[[0, 0, 1, 1]],
        _ => &[[0, 0, 8, 8], [4, 0, 8, 8], [0, 4, 4, 8], [2, 0, 4, 4], [0, 2, 2, 4], [1, 0, 2, 2], [0, 1, 1, 2]],
    };
    let mut lengths = Vec::new();
    for [x, y, right, down] in passes {
        let row = ((width - x).div_ceil(*right) * samples * usize::from(depth)).div_ceil(8);
        lengths.extend(vec![1 + row; (height - y).div_ceil(*down)]);
    }
    let mut rows = input.repeated(lengths.iter().sum());
    lengths.iter().fold(0, |at, length| {
        rows[at] %= 5;
        at + length
    });
    let mut packed = ZlibEncoder::new(Vec::new(), Compression::fast());
    let packed = packed.write_all(&rows).and_then(|()| packed.finish()).expect("writing to memory succeeds");
    let mut file = SIGNATURE.to_vec();
    let sides = [width, height].map(|side| (side as u32).to_be_bytes());
    push_chunk(&mut file, b"IHDR", &[&sides.concat()[..], &[depth, color, 0, 0, interlaced]].concat());
    if color == 3 {
        push_chunk(&mut file, b"PLTE", &palette);
    }
    push_chunk(&mut file, b"IDAT", &packed);
    push_chunk(&mut file, b"IEND", b"");
    file
}

/// The image as the `png` crate reads it, without any of its conversions. Colors that a palette lacks are black.
fn reference(file: &[u8]) -> Option<Image> {
    let mut options = png::DecodeOptions::default();
    options.set_ignore_adler32(false);
    options.set_ignore_text_chunk(true);
    options.set_ignore_iccp_chunk(true);
    let mut decoder = png::Decoder::new_with_options(Cursor::new(file), options);
    decoder.set_transformations(png::Transformations::IDENTITY);
    let mut reader = decoder.read_info().ok()?;
    let mut stored = vec![0; reader.output_buffer_size().filter(|size| *size <= 64 << 20)?];
    let frame = reader.next_frame(&mut stored).ok()?;
    let palette = reader.info().palette.as_deref().unwrap_or_default();
    let (width, height) = (frame.width as usize, frame.height as usize);
    let bits = frame.bit_depth as usize;
    let sample = |row: &[u8], at: usize| match frame.bit_depth {
        BitDepth::Sixteen => row[2 * at],
        BitDepth::Eight => row[at],
        _ => row[at * bits / 8] >> (8 - bits - at * bits % 8) & ((1 << bits) - 1),
    };
    let scaled = |value: u8| if bits < 8 { value * (255 / ((1 << bits) - 1)) } else { value };
    let mut pixels = Vec::with_capacity(3 * width * height);
    for row in stored.chunks_exact(frame.line_size).take(height) {
        for x in 0..width {
            pixels.extend(match frame.color_type {
                ColorType::Grayscale => [scaled(sample(row, x)); 3],
                ColorType::GrayscaleAlpha => [sample(row, 2 * x); 3],
                ColorType::Rgb => [0, 1, 2].map(|channel| sample(row, 3 * x + channel)),
                ColorType::Rgba => [0, 1, 2].map(|channel| sample(row, 4 * x + channel)),
                ColorType::Indexed => {
                    let entry = palette.get(3 * usize::from(sample(row, x))..);
                    entry.and_then(|entry| entry.first_chunk().copied()).unwrap_or_default()
                }
            });
        }
    }
    Some(Image { width, height, pixels })
}
