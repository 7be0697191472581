//! Image files that kiln writes.

use crate::Reader;
use crate::images::{compare, decode};
use image_webp::WebPDecoder;
use jpeg_decoder::Decoder;
use kiln::image::{Format, Image, Threads};
use std::io::Cursor;

/// An image and its text, in each format. Other decoders read the same pixels and the same text from the files: from a JPEG of quality 95
/// nearly the same.
pub fn encode(data: &[u8]) {
    let mut input = Reader(data);
    // Most are small, because large ones take long.
    let [width, height] = input.array().map(|byte: u8| 1 + usize::from(byte) % if byte < 192 { 24 } else { 72 });
    let quality = 1 + input.byte() % 100;
    let length = usize::from(input.byte());
    let text = String::from_utf8_lossy(input.take(length)).replace('\0', "");
    let image = Image { width, height, pixels: input.repeated(3 * width * height) };
    let text = [("prompt", text), ("seed", "7".to_owned())];
    let file = |format: Format| {
        let file = image.encode(format, &text, Threads::One).expect("the image and its text are legal");
        assert!(file.len() as u64 <= format.max_bytes(width, height) + 4096, "{format:?} takes {} bytes", file.len());
        file
    };

    let png = file(Format::Png);
    let mut reader = png::Decoder::new(Cursor::new(&png)).read_info().expect("a PNG");
    let mut pixels = vec![0; image.pixels.len()];
    reader.next_frame(&mut pixels).expect("a whole PNG");
    assert!(pixels == image.pixels, "the PNG has other pixels");
    reader.finish().expect("a whole PNG");
    let texts = &reader.info().utf8_text;
    let stored: Vec<_> = texts.iter().map(|chunk| (&*chunk.keyword, chunk.get_text().expect("UTF-8"))).collect();
    assert!(text.iter().all(|(key, value)| stored.contains(&(*key, value.clone()))), "{stored:?}");

    let webp = file(Format::WebP);
    let mut decoder = WebPDecoder::new(Cursor::new(&webp)).expect("a WebP");
    assert_eq!(decoder.dimensions(), (width as u32, height as u32));
    pixels.fill(0);
    decoder.read_image(&mut pixels).expect("a whole WebP");
    assert!(pixels == image.pixels, "the WebP has other pixels");

    for quality in [quality, 95] {
        let jpeg = file(Format::Jpeg { quality });
        let reference = Decoder::new(&jpeg[..]).decode().expect("a JPEG");
        if quality >= 95 {
            // Rounding to steps of at most 12 moves a value by less than half of what 64 steps add up to.
            let errors = reference.iter().zip(&image.pixels).map(|(a, b)| u64::from(a.abs_diff(*b)));
            let mean = errors.sum::<u64>() as f64 / reference.len() as f64;
            assert!(mean <= 8.0, "a JPEG of quality {quality} is {mean} off");
        }
        if width.min(height) >= 64 {
            compare(&jpeg, &decode(&jpeg).expect("kiln reads what it writes"));
        }
    }
    if width.min(height) >= 64 {
        assert!(decode(&png).is_ok_and(|read| read == image), "kiln does not read its own PNG");
    }
}
