//! PNG files, compressed in parallel.
//!
//! The rows are cut into strips. Each strip is filtered and compressed separately and becomes an IDAT chunk. The strips depend
//! only on the size of the image, so the file does not depend on the number of threads. Decoders see an ordinary file: the parts
//! are joined at byte boundaries into one zlib stream, as pigz does.

use super::deflate::Deflater;
use super::filter::RowFilter;
use super::{Image, Threads};

/// Bytes of a strip before compression. A 1024x1024 image has 64 strips, enough for 16 threads to finish together. A Huffman code
/// per strip costs a strip of this size less than 0.5 %.
const STRIP: usize = 50_000;

/// The first bytes of every file.
pub(super) const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1A\n";

/// The last chunk of every file.
pub(super) const END: &[u8; 12] = b"\0\0\0\0IEND\xAE\x42\x60\x82";

/// zlib's header: a window of 32 KiB, the fastest level.
const ZLIB_HEADER: [u8; 2] = [0x78, 0x01];

/// The modulus of Adler-32.
const ADLER: u32 = 65_521;

/// A compressed strip.
struct Strip {
    /// The strip as an IDAT chunk.
    chunk: Vec<u8>,
    /// The checksum of the uncompressed bytes, and their number.
    adler: u32,
    bytes: usize,
}

/// Encodes an image, with `text` as iTXt chunks.
pub(super) fn encode(image: &Image, text: &[(&str, String)], threads: Threads) -> Vec<u8> {
    let row = 3 * image.width;
    let rows = (STRIP / (row + 1)).max(1);
    let zeros = vec![0; row];
    let new = || (RowFilter::new(row), Deflater::new(), Vec::with_capacity(rows * (row + 1)));
    let strips = threads.map(image.height.div_ceil(rows), new, |(filter, deflater, filtered), index| {
        filtered.clear();
        let (start, end) = (index * rows, ((index + 1) * rows).min(image.height));
        for y in start..end {
            let above = if y == 0 { &zeros[..] } else { &image.pixels[(y - 1) * row..y * row] };
            filter.append(&image.pixels[y * row..(y + 1) * row], above, filtered);
        }
        let chunk = chunk(b"IDAT", |data| {
            if index == 0 {
                data.extend_from_slice(&ZLIB_HEADER);
            }
            deflater.part(filtered, end == image.height, data);
        });
        Strip { chunk, adler: adler32(filtered), bytes: filtered.len() }
    });

    let mut file = SIGNATURE.to_vec();
    file.reserve(strips.iter().map(|strip| strip.chunk.len()).sum::<usize>() + (16 << 10));
    file.extend(chunk(b"IHDR", |data| {
        data.extend_from_slice(&(image.width as u32).to_be_bytes());
        data.extend_from_slice(&(image.height as u32).to_be_bytes());
        // Eight bits each of red, green and blue; the only compression and filter methods that PNG has; not interlaced.
        data.extend_from_slice(&[8, 2, 0, 0, 0]);
    }));
    for (key, value) in text {
        file.extend(chunk(b"iTXt", |data| {
            data.extend_from_slice(key.as_bytes());
            // A zero ends the key. Then: not compressed, no language, no translated key.
            data.extend_from_slice(&[0, 0, 0, 0, 0]);
            data.extend_from_slice(value.as_bytes());
        }));
    }
    let mut adler = 1;
    for strip in &strips {
        file.extend_from_slice(&strip.chunk);
        adler = adler_combine(adler, strip.adler, strip.bytes);
    }
    // The stream's checksum is known only after all strips, so it gets its own chunk.
    file.extend(chunk(b"IDAT", |data| data.extend_from_slice(&adler.to_be_bytes())));
    file.extend(chunk(b"IEND", |_| {}));
    file
}

/// A chunk: length, name, data, checksum of name and data.
fn chunk(name: &[u8; 4], fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut chunk = vec![0; 4];
    chunk.extend_from_slice(name);
    fill(&mut chunk);
    let length = (chunk.len() - 8) as u32;
    chunk[..4].copy_from_slice(&length.to_be_bytes());
    let mut crc = flate2::Crc::new();
    crc.update(&chunk[4..]);
    chunk.extend_from_slice(&crc.sum().to_be_bytes());
    chunk
}

/// Adler-32 (RFC 1950) of bytes at the start of a stream.
fn adler32(bytes: &[u8]) -> u32 {
    let (mut a, mut b) = (1u32, 0u32);
    // The sums of a block stay within 32 bits: 4096 * 65,520 + 255 * 4096 * 4097 / 2 is less than 2^32.
    for block in bytes.chunks(4096) {
        b = b.wrapping_add(a.wrapping_mul(block.len() as u32));
        let (parts, rest) = block.as_chunks::<32>();
        let mut left = block.len() as u32;
        for part in parts {
            // The first of these 32 bytes counts 32 times more often than the byte after the last.
            left -= 32;
            let sum = part.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
            let weighted =
                part.iter().zip(1u32..).fold(0u32, |sum, (byte, i)| sum.wrapping_add(u32::from(*byte).wrapping_mul(33 - i)));
            a = a.wrapping_add(sum);
            b = b.wrapping_add(weighted).wrapping_add(sum.wrapping_mul(left));
        }
        for byte in rest {
            b = b.wrapping_add(u32::from(*byte).wrapping_mul(left));
            a = a.wrapping_add(u32::from(*byte));
            left -= 1;
        }
        (a, b) = (a % ADLER, b % ADLER);
    }
    b << 16 | a
}

/// Adler-32 of two consecutive sequences, from their checksums and the length of the second.
fn adler_combine(first: u32, second: u32, length: usize) -> u32 {
    let halves = |sum: u32| (u64::from(sum & 0xFFFF), u64::from(sum >> 16));
    let ((a1, b1), (a2, b2)) = (halves(first), halves(second));
    let modulus = u64::from(ADLER);
    // The second checksum started at 1 instead of at the first one's sum, and counts its start once per byte.
    let more = a1 + modulus - 1;
    let (a, b) = ((more + a2) % modulus, (b1 + b2 + more % modulus * (length as u64 % modulus)) % modulus);
    (b << 16 | a) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain_adler(bytes: &[u8]) -> u32 {
        let step = |(a, b): (u32, u32), byte: &u8| {
            let a = (a + u32::from(*byte)) % ADLER;
            (a, (b + a) % ADLER)
        };
        let (a, b) = bytes.iter().fold((1, 0), step);
        b << 16 | a
    }

    #[test]
    fn checksums_of_parts_are_those_of_the_whole() {
        assert_eq!(adler32(b"Wikipedia"), 0x11E6_0398);
        for bytes in [vec![255; 200_000], (0..70_001u32).map(|i| (i.wrapping_mul(i) >> 3) as u8).collect()] {
            for split in [0, 1, 31, 32, 33, 4095, 4096, 4097, 65_521, 65_522, bytes.len()] {
                let (first, second) = bytes.split_at(split);
                assert_eq!(adler32(first), plain_adler(first), "{split}");
                let combined = adler_combine(adler32(first), adler32(second), second.len());
                assert_eq!(combined, plain_adler(&bytes), "{split}");
            }
        }
    }
}
