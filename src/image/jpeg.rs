//! Baseline JPEG files (ITU-T T.81) without subsampling, with Huffman codes made for the image.
//!
//! Every row of blocks ends with a restart marker. So rows are transformed and coded in parallel, and the file does not depend on
//! the number of threads.

use super::huffman::{canonical_codes, code_lengths};
use super::{Image, Threads, exif, xmp};
use crate::error::{Error, Result};
use crate::text::grouped;

/// Samples along one side of a block.
const SIDE: usize = 8;

/// The zigzag order: row-major indices of the coefficients in the order in which they are coded (T.81, figure A.6).
pub(crate) const ZIGZAG: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28, 35, 42,
    49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
];

/// Quantization steps of luminance at quality 50, row by row (T.81, table K.1).
#[rustfmt::skip]
const LUMINANCE: [u16; 64] = [
    16, 11, 10, 16,  24,  40,  51,  61,
    12, 12, 14, 19,  26,  58,  60,  55,
    14, 13, 16, 24,  40,  57,  69,  56,
    14, 17, 22, 29,  51,  87,  80,  62,
    18, 22, 37, 56,  68, 109, 103,  77,
    24, 35, 55, 64,  81, 104, 113,  92,
    49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103,  99,
];

/// Quantization steps of chrominance at quality 50, row by row (T.81, table K.2).
#[rustfmt::skip]
const CHROMINANCE: [u16; 64] = [
    17, 18, 24, 47, 99, 99, 99, 99,
    18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
];

/// cos(k pi / 16).
const COSINES: [f32; 9] =
    [1.0, 0.980_785_3, 0.923_879_5, 0.831_469_6, 0.707_106_77, 0.555_570_2, 0.382_683_43, 0.195_090_32, 0.0];

/// The identifier at the start of an XMP segment.
const XMP_NAME: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";

/// What begins a segment with Exif.
const EXIF_NAME: &[u8] = b"Exif\0\0";

/// The most bytes of a segment, including the two of its length.
const MAX_SEGMENT: usize = 65_535;

/// The symbol for sixteen zeros in a row.
const ZEROS: u8 = 0xF0;

/// The symbol for a block whose remaining coefficients are zero.
const END_OF_BLOCK: u8 = 0;

/// Refuses text that is too long for the XMP segment or the Exif segment of a JPEG. There is one of each.
pub(super) fn check_text(text: &[(&str, String)]) -> Result<()> {
    let (text, comment) = exif::split(text);
    let segments = [
        ("XMP", xmp::packet(&text).len(), XMP_NAME.len()),
        ("Exif", comment.map_or(0, |comment| exif::user_comment(comment).len()), EXIF_NAME.len()),
    ];
    for (name, bytes, more) in segments {
        let limit = MAX_SEGMENT - 2 - more;
        if bytes > limit {
            let (bytes, limit) = (grouped(bytes as u64), grouped(limit as u64));
            let what =
                format!("the prompts are too long for the metadata of a JPEG: {bytes} bytes as {name}, the limit is {limit}");
            return Err(Error::usage(what, "shorten them, store less metadata, or write a PNG or WebP"));
        }
    }
    Ok(())
}

/// Quantized coefficients of a block, in the order of [`ZIGZAG`].
type Block = [i16; 64];

/// How often each symbol occurs: DC and AC of luminance, then of chrominance.
type Histograms = [[u32; 256]; 4];

/// Encodes an image, with `text` as XMP.
pub(super) fn encode(image: &Image, quality: u8, text: &[(&str, String)], threads: Threads) -> Vec<u8> {
    let steps = [scaled(&LUMINANCE, quality), scaled(&CHROMINANCE, quality)];
    let basis = basis();
    let rows = image.height.div_ceil(SIDE);
    let transformed = threads.map(rows, || (), |(), row| transform_row(image, row, &basis, &steps));
    let mut histograms = [[0; 256]; 4];
    for (_, row) in &transformed {
        for (sum, part) in histograms.iter_mut().zip(row) {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
    }
    let codes = histograms.each_ref().map(Code::new);
    let coded = threads.map(rows, || (), |(), row| code_row(&transformed[row].0, &codes));

    let mut file = vec![0xFF, 0xD8];
    // JFIF 1.1 with square pixels and no thumbnail.
    segment(&mut file, 0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0");
    if !text.is_empty() {
        let (text, comment) = exif::split(text);
        // Exif comes first: some readers look no further than the first segment of its kind.
        if let Some(comment) = comment {
            segment(&mut file, 0xE1, &[EXIF_NAME, &exif::user_comment(comment)[..]].concat());
        }
        segment(&mut file, 0xE1, &[XMP_NAME, xmp::packet(&text).as_bytes()].concat());
    }
    for (table, steps) in (0u8..).zip(&steps) {
        segment(&mut file, 0xDB, &[&[table][..], &ZIGZAG.map(|i| steps[usize::from(i)] as u8)].concat());
    }
    let [height, width] = [image.height, image.width].map(|side| (side as u16).to_be_bytes());
    // Three components of 8 bits, none of them subsampled; the second and third share tables.
    let components = [3, 1, 0x11, 0, 2, 0x11, 1, 3, 0x11, 1];
    segment(&mut file, 0xC0, &[&[8][..], &height, &width, &components].concat());
    for (table, code) in [0x00, 0x10, 0x01, 0x11].into_iter().zip(&codes) {
        segment(&mut file, 0xC4, &[&[table][..], &code.counts, &code.symbols].concat());
    }
    segment(&mut file, 0xDD, &(image.width.div_ceil(SIDE) as u16).to_be_bytes());
    segment(&mut file, 0xDA, &[3, 1, 0x00, 2, 0x11, 3, 0x11, 0, 63, 0]);
    for (row, bytes) in coded.iter().enumerate() {
        if row > 0 {
            file.extend_from_slice(&[0xFF, 0xD0 + ((row - 1) % 8) as u8]);
        }
        file.extend_from_slice(bytes);
    }
    file.extend_from_slice(&[0xFF, 0xD9]);
    file
}

/// Appends a marker and its segment.
fn segment(file: &mut Vec<u8>, marker: u8, data: &[u8]) {
    file.extend_from_slice(&[0xFF, marker]);
    file.extend_from_slice(&(data.len() as u16 + 2).to_be_bytes());
    file.extend_from_slice(data);
}

/// A quantization table at a quality, on libjpeg's scale: 50 is the table itself, 100 has steps of 1.
fn scaled(table: &[u16; 64], quality: u8) -> [u16; 64] {
    let quality = u32::from(quality.clamp(1, 100));
    let percent = if quality < 50 { 5000 / quality } else { 200 - 2 * quality };
    table.map(|step| ((u32::from(step) * percent + 50) / 100).clamp(1, 255) as u16)
}

/// The rows of the orthonormal DCT: frequency by position.
fn basis() -> [[f32; SIDE]; SIDE] {
    let cosine = |k: usize| match k % 32 {
        k @ 0..=8 => COSINES[k],
        k @ 9..=16 => -COSINES[16 - k],
        k @ 17..=24 => -COSINES[k - 16],
        k => COSINES[32 - k],
    };
    std::array::from_fn(|u| {
        let scale = if u == 0 { 0.5 * COSINES[4] } else { 0.5 };
        std::array::from_fn(|x| scale * cosine((2 * x + 1) * u))
    })
}

/// Transforms and quantizes a row of blocks: Y, Cb and Cr of the first block, then of the second. Also counts their symbols.
fn transform_row(image: &Image, row: usize, basis: &[[f32; SIDE]; SIDE], steps: &[[u16; 64]; 2]) -> (Vec<Block>, Histograms) {
    let columns = image.width.div_ceil(SIDE);
    let mut blocks = Vec::with_capacity(3 * columns);
    for column in 0..columns {
        let mut planes = [[[0.0; SIDE]; SIDE]; 3];
        for (y, x) in (0..SIDE).flat_map(|y| (0..SIDE).map(move |x| (y, x))) {
            // Blocks beyond the edge repeat the last row and column.
            let (px, py) = ((column * SIDE + x).min(image.width - 1), (row * SIDE + y).min(image.height - 1));
            let at = 3 * (py * image.width + px);
            let [r, g, b] = [0, 1, 2].map(|c| f32::from(image.pixels[at + c]));
            // JFIF's YCbCr, around zero.
            planes[0][y][x] = 0.299 * r + 0.587 * g + 0.114 * b - 128.0;
            planes[1][y][x] = -0.168_735_9 * r - 0.331_264_1 * g + 0.5 * b;
            planes[2][y][x] = 0.5 * r - 0.418_687_6 * g - 0.081_312_4 * b;
        }
        for (component, plane) in planes.iter().enumerate() {
            blocks.push(quantize(&transform(plane, basis), &steps[component.min(1)]));
        }
    }
    let mut histograms = [[0; 256]; 4];
    each_symbol(&blocks, |table, symbol, _, _| histograms[table][usize::from(symbol)] += 1);
    (blocks, histograms)
}

/// The two-dimensional DCT of a block, by its definition as two products of matrices.
fn transform(block: &[[f32; SIDE]; SIDE], basis: &[[f32; SIDE]; SIDE]) -> [[f32; SIDE]; SIDE] {
    let mut columns = [[0.0; SIDE]; SIDE];
    for (out, frequencies) in columns.iter_mut().zip(basis) {
        for (weight, row) in frequencies.iter().zip(block) {
            (0..SIDE).for_each(|x| out[x] += weight * row[x]);
        }
    }
    let mut both = [[0.0; SIDE]; SIDE];
    for (out, row) in both.iter_mut().zip(&columns) {
        for (x, value) in row.iter().enumerate() {
            (0..SIDE).for_each(|u| out[u] += value * basis[u][x]);
        }
    }
    both
}

fn quantize(block: &[[f32; SIDE]; SIDE], steps: &[u16; 64]) -> Block {
    ZIGZAG.map(|at| {
        let i = usize::from(at);
        let value = block[i / SIDE][i % SIDE] / f32::from(steps[i]);
        // Rounds, since the cast of a positive number cuts; coefficients of 8-bit samples are within 1024.
        ((value + 8192.5) as i32 - 8192) as i16
    })
}

/// Calls `symbol` for each symbol in a row of blocks: table, symbol, extra bits and their number. DC restarts with each row.
fn each_symbol(blocks: &[Block], mut symbol: impl FnMut(usize, u8, u16, u8)) {
    let mut last = [0i16; 3];
    for (index, block) in blocks.iter().enumerate() {
        let component = index % 3;
        let table = 2 * component.min(1);
        let (bits, count) = magnitude(block[0] - last[component]);
        last[component] = block[0];
        symbol(table, count, bits, count);
        let mut zeros = 0;
        for &value in &block[1..] {
            if value == 0 {
                zeros += 1;
                continue;
            }
            while zeros > 15 {
                symbol(table + 1, ZEROS, 0, 0);
                zeros -= 16;
            }
            let (bits, count) = magnitude(value);
            symbol(table + 1, zeros << 4 | count, bits, count);
            zeros = 0;
        }
        if zeros > 0 {
            symbol(table + 1, END_OF_BLOCK, 0, 0);
        }
    }
}

/// The bits of a value and their number. A negative value is stored minus one, without its sign.
fn magnitude(value: i16) -> (u16, u8) {
    let count = 16 - value.unsigned_abs().leading_zeros() as u8;
    let bits = if value < 0 { value - 1 } else { value } as u16;
    (bits & ((1u32 << count) - 1) as u16, count)
}

/// A Huffman code: the counts that the file stores, and the codes for encoding.
struct Code {
    /// How many codes have each length from 1 to 16.
    counts: [u8; 16],
    symbols: Vec<u8>,
    /// Bits and length of the code of each symbol.
    codes: Vec<(u16, u8)>,
}

impl Code {
    fn new(histogram: &[u32; 256]) -> Self {
        // No code may consist of ones alone. The last of the longest codes does, so it goes to an extra symbol. That symbol is
        // rarer than all others and is then left out.
        let frequencies: Vec<u32> = histogram.iter().map(|count| 2 * count).chain([1]).collect();
        let lengths = code_lengths(&frequencies, 16);
        let codes = canonical_codes(&lengths).into_iter().zip(lengths.iter().copied()).take(256).collect();
        let mut counts = [0; 16];
        let mut symbols = Vec::new();
        for length in 1..=16u8 {
            let of_length = (0..=255u8).filter(|symbol| lengths[usize::from(*symbol)] == length);
            let before = symbols.len();
            symbols.extend(of_length);
            counts[usize::from(length) - 1] = (symbols.len() - before) as u8;
        }
        Self { counts, symbols, codes }
    }
}

/// The entropy-coded bytes of a row of blocks.
fn code_row(blocks: &[Block], codes: &[Code; 4]) -> Vec<u8> {
    let (mut out, mut pending, mut count) = (Vec::with_capacity(16 * blocks.len()), 0u64, 0u8);
    let mut byte = |byte: u8| {
        out.push(byte);
        // A zero byte shows that a byte of ones is data, not a marker.
        if byte == 0xFF {
            out.push(0);
        }
    };
    each_symbol(blocks, |table, symbol, bits, extra| {
        let (code, length) = codes[table].codes[usize::from(symbol)];
        pending = pending << length | u64::from(code);
        pending = pending << extra | u64::from(bits);
        count += length + extra;
        while count >= 8 {
            count -= 8;
            byte((pending >> count) as u8);
        }
    });
    // Pads the last byte with ones.
    if count > 0 {
        byte((pending << (8 - count)) as u8 | ((1u16 << (8 - count)) - 1) as u8);
    }
    out
}
