//! Decompression bombs and similar files: refused or decoded at once, in little memory.

use super::{Chunk, decode, fixture, jpeg_claiming, png, png_header};
use common::cost::{allocated_by, time_of};
use common::random::long;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use std::io::Write;
use std::time::Duration;

/// The most bytes that decoding a bomb may allocate in total.
const MEMORY: usize = 1 << 20;
const TIME: Duration = Duration::from_millis(50);

/// The expected outcome of a bomb.
enum Fate {
    /// It is refused with a message that contains this.
    Refused(&'static str),
    /// It is decoded, because its large part does not belong to the image.
    Decoded,
}
use Fate::{Decoded, Refused};

/// Zeros, compressed.
fn packed_zeros(length: usize) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    let zeros = vec![0; 1 << 20];
    (0..length >> 20).for_each(|_| encoder.write_all(&zeros).unwrap());
    encoder.write_all(&zeros[..length % (1 << 20)]).unwrap();
    encoder.finish().unwrap()
}

/// A PNG of 64 x 64 pixels with more chunks before and after its image data.
fn small_png(before: &[Chunk<'_>], after: &[Chunk<'_>]) -> Vec<u8> {
    let (header, data) = (png_header(64, 64), packed_zeros(64 * (64 * 3 + 1)));
    png(&[&[(b"IHDR", &header[..])], before, &[(b"IDAT", &data)], after, &[(b"IEND", b"")]].concat())
}

/// A PNG that claims a size and has little data.
fn claiming_png(width: u32, height: u32, data: &[u8]) -> Vec<u8> {
    png(&[(b"IHDR", &png_header(width, height)), (b"IDAT", data), (b"IEND", b"")])
}

/// A PNG of 99 megapixels of some depth, color type and order, with little data.
fn claiming_kind(depth: u8, color: u8, interlaced: u8) -> Vec<u8> {
    let mut header = png_header(9_990, 9_990);
    (header[8], header[9], header[12]) = (depth, color, interlaced);
    png(&[(b"IHDR", &header), (b"IDAT", &[0; 100]), (b"IEND", b"")])
}

/// A progressive JPEG whose last scan is repeated many times.
fn many_scans() -> Vec<u8> {
    let whole = fixture("progressive_420.jpg");
    let last = whole.windows(2).rposition(|w| w == [0xFF, 0xDA]).unwrap();
    let end = whole.len() - 2;
    [&whole[..last], &whole[last..end].repeat(10_000), &whole[end..]].concat()
}

#[test]
fn bombs_are_harmless() {
    let jpeg = fixture("baseline_444.jpg");
    let progressive = fixture("progressive_420.jpg");
    let bomb = packed_zeros(100 << 20);
    let profile = [b"icc\0\0", &bomb[..]].concat();
    let text = [b"Comment\0\0", &bomb[..]].concat();
    let international = [b"XML:com.adobe.xmp\0\x01\0\0\0", &bomb[..]].concat();
    let exif = [b"II*\0\x08\0\0\0\xFF\xFF", &[0x12; 300 << 10][..]].concat();
    let app: Vec<u8> = [&[0xFF, 0xE2, 0xFF, 0xFF], &b"ICC_PROFILE\0\x01\xFF"[..], &vec![0; 65_533 - 14]].concat();
    let apps = [&jpeg[..2], &app.repeat(255), &jpeg[2..]].concat();
    let private = vec![0x41; 50 << 20];
    let comment: Vec<u8> = [&[0xFF, 0xFE, 0xFF, 0xFF][..], &vec![0x41; 65_533]].concat();
    let comments = [&jpeg[..2], &comment.repeat(255), &jpeg[2..]].concat();
    // The first quantization table, repeated.
    let table = jpeg.windows(2).position(|w| w == [0xFF, 0xDB]).unwrap();
    let length = 2 + usize::from(u16::from_be_bytes([jpeg[table + 2], jpeg[table + 3]]));
    let tables = [&jpeg[..table], &jpeg[table..table + length].repeat(1_000), &jpeg[table..]].concat();
    let frame: [Chunk<'_>; 2] = [(b"fcTL", &[0xFF; 26]), (b"fdAT", &bomb[..4096])];

    let bombs: Vec<(&str, Vec<u8>, Fate)> = vec![
        ("jpeg of 169 MP", jpeg_claiming(&jpeg[..541.min(jpeg.len())], 13_000, 13_000), Refused("= 169 MP, limit 100 MP")),
        ("jpeg of 4295 MP", jpeg_claiming(&jpeg, 65_535, 65_535), Refused("65535x65535 = 4294 MP, limit 100 MP")),
        ("jpeg of 99 MP in 2 KB", jpeg_claiming(&jpeg, 9_990, 9_990), Refused("cannot hold them")),
        ("progressive of 99 MP in 2 KB", jpeg_claiming(&progressive, 9_990, 9_990), Refused("cannot hold them")),
        ("long jpeg", jpeg_claiming(&jpeg, 16_385, 3_000), Refused("limit 16384 a side")),
        ("10,000 scans", many_scans(), Refused("more than 100 scans")),
        ("16 MB of profile in a jpeg", apps, Decoded),
        ("png of 400 MP", claiming_png(20_000, 20_000, b"x"), Refused("20000x20000 = 400 MP, limit 100 MP")),
        ("png of 65535 squared", claiming_png(65_535, 65_535, b"x"), Refused("limit 100 MP")),
        ("png of 2^31 squared", claiming_png(1 << 31, 1 << 31, b"x"), Refused("limit 100 MP")),
        ("png of 99 MP in 100 bytes", claiming_png(9_990, 9_990, &[0; 100]), Refused("cannot hold them")),
        ("png that unpacks to 100 MiB too much", claiming_png(64, 64, &bomb), Decoded),
        ("profile bomb", small_png(&[(b"iCCP", &profile)], &[]), Decoded),
        ("text bomb", small_png(&[(b"zTXt", &text)], &[(b"zTXt", &text)]), Decoded),
        ("packed XMP", small_png(&[(b"iTXt", &international)], &[]), Decoded),
        ("large exif", small_png(&[(b"eXIf", &exif)], &[(b"eXIf", &exif)]), Decoded),
        ("10,000 texts", small_png(&[(b"tEXt", &b"a\0b"[..])].repeat(10_000), &[]), Decoded),
        ("5,000 frames", small_png(&[(b"acTL", &[0xFF; 8])], &frame.repeat(5_000)), Decoded),
        ("long png", claiming_png(16_385, 64, b"x"), Refused("limit 16384 a side")),
        ("tall png", claiming_png(64, 16_385, b"x"), Refused("limit 16384 a side")),
        ("png of one bit, 99 MP", claiming_kind(1, 0, 0), Refused("cannot hold them")),
        ("png of 16 bits and alpha, 99 MP", claiming_kind(16, 6, 0), Refused("cannot hold them")),
        ("interlaced png of 99 MP", claiming_kind(8, 2, 1), Refused("cannot hold them")),
        ("50 MiB of a private chunk", small_png(&[(b"prVt", &private)], &[]), Decoded),
        ("10,000 empty parts of image data", small_png(&[(b"IDAT", &b""[..])].repeat(10_000), &[]), Decoded),
        ("text of 50 MiB", small_png(&[(b"tEXt", &private)], &[]), Decoded),
        ("a hundred profiles", small_png(&[(b"iCCP", &profile[..])].repeat(100), &[]), Decoded),
        ("16 MB of comments in a jpeg", comments, Decoded),
        ("1,000 tables in a jpeg", tables, Decoded),
        ("progressive of 4295 MP", jpeg_claiming(&progressive, 65_535, 65_535), Refused("limit 100 MP")),
        ("tall jpeg", jpeg_claiming(&jpeg, 2_048, 65_535), Refused("limit 100 MP")),
    ];
    assert!(bombs.len() >= 30, "{}", bombs.len());
    for (name, bytes, fate) in bombs {
        let (result, allocated) = allocated_by(|| decode(&bytes));
        match (result, fate) {
            (Err(error), Refused(why)) => assert!(error.to_string().contains(why), "{name}: {error}"),
            (Ok(reference), Decoded) => assert!(reference.image().width <= 67, "{name}"),
            (Err(error), Decoded) => panic!("{name}: {error}"),
            (Ok(_), Refused(why)) => panic!("{name} must be refused: {why}"),
        }
        assert!(allocated <= MEMORY, "{name}: {allocated} bytes");
        // For an otherwise idle machine.
        if long() {
            let time = time_of(|| drop(decode(&bytes)));
            assert!(time <= TIME, "{name}: {time:?}");
        }
    }
}

#[test]
fn the_allocator_counts() {
    // The control of the memory figures above.
    let (_, allocated) = allocated_by(|| (vec![1u8; 10 << 20], vec![1u8; 1 << 20].len()));
    assert!((11 << 20..12 << 20).contains(&allocated), "{allocated}");
}

#[test]
fn a_file_over_the_limit_is_not_looked_into() {
    let mut bytes = fixture("rgb.png");
    bytes.resize((64 << 20) + 1, 0);
    let error = decode(&bytes).unwrap_err();
    assert_eq!(error.to_string(), "image too large (x): the file is over 64 MiB, which is the limit");
    bytes.truncate(64 << 20);
    decode(&bytes).unwrap();
}
