//! Metadata of images.

use crate::images::decode;
use crate::pngs::push_chunk;
use crate::{Reader, check_texts};
use kiln::image::{Format, Image, Threads};
use std::sync::LazyLock;

/// The largest metadata that are searched.
const MOST: usize = 256 << 10;

/// An image whose orientations all differ.
static UPRIGHT: LazyLock<Image> = LazyLock::new(|| {
    let (width, height) = (64, 72);
    let pixels = (0..width * height).flat_map(|at| [at % width, at / width, at % 7].map(|value| 3 * value as u8)).collect();
    Image { width, height, pixels }
});

/// Its file as PNG and as JPEG, and what is read from that.
static FILES: LazyLock<[(Vec<u8>, Image); 2]> = LazyLock::new(|| {
    [Format::Png, Format::Jpeg { quality: 95 }].map(|format| {
        let file = UPRIGHT.encode(format, &[], Threads::One).expect("it has a legal size");
        let image = decode(&file).expect("kiln reads what it writes");
        (file, image)
    })
});

/// Exif, XMP and other segments in a JPEG or a PNG: the image is that without them, turned as they say.
pub fn metadata(data: &[u8]) {
    let mut input = Reader(data);
    let (kind, foreign) = (input.byte(), input.array::<4>());
    let [exif, xmp, other] = [0, 1, 2].map(|_| {
        let length = u16::from_le_bytes(input.array());
        input.take(usize::from(length))
    });
    let (exif, xmp) = ((kind & 2 != 0).then_some(exif), (kind & 4 != 0).then_some(xmp));
    let (file, image) = &FILES[usize::from(kind & 1)];
    let made = if kind & 1 == 0 { in_png(file, exif, xmp, foreign, other) } else { in_jpeg(file, exif, xmp, foreign, other) };
    check_texts(&made);
    let decoded = decode(&made).unwrap_or_else(|error| panic!("metadata make an image unreadable: {error}"));
    // A JPEG has a name in front, which some writers of PNG add as well.
    let exif = exif.map(|exif| if kind & 1 == 0 { exif.to_vec() } else { [b"Exif\0\0", exif].concat() });
    let orientation = exif.filter(|exif| exif.len() <= MOST).and_then(|exif| of_exif(&exif));
    let orientation = orientation.or_else(|| xmp.filter(|xmp| xmp.len() <= MOST).and_then(of_xmp));
    assert!(decoded == turned(image, orientation.unwrap_or(1)), "the image is not turned by {orientation:?}");
}

fn in_png(file: &[u8], exif: Option<&[u8]>, xmp: Option<&[u8]>, foreign: [u8; 4], other: &[u8]) -> Vec<u8> {
    // The signature and IHDR.
    let (header, rest) = file.split_at(8 + 25);
    let mut out = header.to_vec();
    let mut name = foreign.map(|byte| b'a' + byte % 26);
    if &name == b"exif" {
        name[0] = b'x';
    }
    push_chunk(&mut out, &name, other);
    if let Some(exif) = exif {
        push_chunk(&mut out, b"eXIf", exif);
    }
    if let Some(xmp) = xmp {
        push_chunk(&mut out, b"iTXt", &[b"XML:com.adobe.xmp\0\0", xmp].concat());
    }
    for (name, data) in [(b"tEXt", other), (b"zTXt", other), (b"iCCP", other)] {
        push_chunk(&mut out, name, data);
    }
    out.extend(rest);
    out
}

fn in_jpeg(file: &[u8], exif: Option<&[u8]>, xmp: Option<&[u8]>, foreign: [u8; 4], other: &[u8]) -> Vec<u8> {
    let mut out = file[..2].to_vec();
    // APP1 is Exif and XMP, APP0 and APP14 say how colors are stored.
    let marker = [0xE2, 0xE3, 0xEB, 0xED, 0xEF, 0xFE][usize::from(foreign[0]) % 6];
    let mut push = |marker: u8, parts: &[&[u8]]| {
        let data = parts.concat();
        if let Ok(length) = u16::try_from(data.len() + 2) {
            out.extend([0xFF, marker]);
            out.extend(length.to_be_bytes());
            out.extend(data);
        }
    };
    push(marker, &[other]);
    if let Some(exif) = exif {
        push(0xE1, &[b"Exif\0\0", exif]);
    }
    if let Some(xmp) = xmp {
        push(0xE1, &[b"http://ns.adobe.com/xap/1.0/\0", xmp]);
    }
    out.extend(&file[2..]);
    out
}

/// The orientation in the first directory of a TIFF file (TIFF 6.0), with 64-bit arithmetic: the first entry with its tag decides.
fn of_exif(exif: &[u8]) -> Option<u32> {
    let tiff = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let little = tiff.starts_with(b"II*\0");
    if !little && !tiff.starts_with(b"MM\0*") {
        return None;
    }
    let number = |at: u64, size: u64| {
        let bytes = tiff.get(usize::try_from(at).ok()?..usize::try_from(at + size).ok()?)?;
        let add = |sum: u32, byte: &u8| sum << 8 | u32::from(*byte);
        Some(if little { bytes.iter().rev().fold(0, add) } else { bytes.iter().fold(0, add) })
    };
    let directory = u64::from(number(4, 4)?);
    let entries = (0..u64::from(number(directory, 2)?)).map(|entry| directory + 2 + 12 * entry);
    for at in entries {
        if number(at, 2)? == 274 {
            return match (number(at + 2, 2)?, number(at + 4, 4)?) {
                (3, 1) => number(at + 8, 2),
                (4, 1) => number(at + 8, 4),
                _ => None,
            };
        }
    }
    None
}

/// The digit after the first `tiff:Orientation` that has one, as an attribute or as an element.
fn of_xmp(xmp: &[u8]) -> Option<u32> {
    let name = b"tiff:Orientation";
    let values = (0..xmp.len()).filter_map(|at| xmp[at..].strip_prefix(name));
    let digits = values.filter_map(|value| match value {
        [b'>', digit @ b'0'..=b'9', ..] | [b'=', b'"', digit @ b'0'..=b'9', ..] => Some(u32::from(digit - b'0')),
        _ => None,
    });
    digits.into_iter().next()
}

/// The image that is stored in this orientation, upright.
fn turned(image: &Image, orientation: u32) -> Image {
    let (width, height) = (image.width, image.height);
    let (across, down) = if (5..=8).contains(&orientation) { (height, width) } else { (width, height) };
    let mut pixels = Vec::with_capacity(image.pixels.len());
    for y in 0..down {
        for x in 0..across {
            let (right, below) = (across - 1 - x, down - 1 - y);
            let (x, y) = match orientation {
                2 => (right, y),
                3 => (right, below),
                4 => (x, below),
                5 => (y, x),
                6 => (y, right),
                7 => (below, right),
                8 => (below, x),
                _ => (x, y),
            };
            pixels.extend(&image.pixels[3 * (y * width + x)..][..3]);
        }
    }
    Image { width: across, height: down, pixels }
}
