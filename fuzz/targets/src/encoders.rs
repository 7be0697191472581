//! Image files that kiln writes.

use crate::Reader;
use crate::images::{compare, decode};
use image_webp::WebPDecoder;
use jpeg_decoder::Decoder;
use kiln::image::{Format, Image, Threads};
use std::io::Cursor;

/// An image and its text in a format, which the first byte names. Another decoder reads the same pixels and the same text from the file, and
/// nearly the same pixels from a JPEG of quality 95.
pub fn encode(data: &[u8]) {
    let mut input = Reader(data);
    let kind = input.byte();
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

    match kind % 3 {
        0 => check_png(&file(Format::Png), &image, &text),
        1 => check_webp(&file(Format::WebP), &image),
        _ => [quality, 95].into_iter().for_each(|quality| check_jpeg(&file(Format::Jpeg { quality }), quality, &image)),
    }
}

/// Whether kiln reads an image of this size.
fn is_readable(image: &Image) -> bool {
    image.width.min(image.height) >= 64
}

fn check_png(file: &[u8], image: &Image, text: &[(&str, String)]) {
    let mut reader = png::Decoder::new(Cursor::new(file)).read_info().expect("a PNG");
    let mut pixels = vec![0; image.pixels.len()];
    reader.next_frame(&mut pixels).expect("a whole PNG");
    assert!(pixels == image.pixels, "the PNG has other pixels");
    reader.finish().expect("a whole PNG");
    let texts = &reader.info().utf8_text;
    let stored: Vec<_> = texts.iter().map(|chunk| (&*chunk.keyword, chunk.get_text().expect("UTF-8"))).collect();
    assert!(text.iter().all(|(key, value)| stored.contains(&(*key, value.clone()))), "{stored:?}");
    if is_readable(image) {
        assert!(decode(file).is_ok_and(|read| read == *image), "kiln does not read its own PNG");
    }
}

fn check_webp(file: &[u8], image: &Image) {
    let mut decoder = WebPDecoder::new(Cursor::new(file)).expect("a WebP");
    assert_eq!(decoder.dimensions(), (image.width as u32, image.height as u32));
    let mut pixels = vec![0; image.pixels.len()];
    decoder.read_image(&mut pixels).expect("a whole WebP");
    assert!(pixels == image.pixels, "the WebP has other pixels");
}

fn check_jpeg(file: &[u8], quality: u8, image: &Image) {
    let reference = Decoder::new(file).decode().expect("a JPEG");
    if quality >= 95 {
        // Steps are at most 12, and errors of half a step are at most as large on average.
        let errors = reference.iter().zip(&image.pixels).map(|(a, b)| u64::from(a.abs_diff(*b)));
        let mean = errors.sum::<u64>() as f64 / reference.len() as f64;
        assert!(mean <= 8.0, "a JPEG of quality {quality} is {mean} off");
    }
    if is_readable(image) {
        compare(file, &decode(file).expect("kiln reads what it writes"));
    }
}
