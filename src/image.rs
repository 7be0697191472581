//! Generated images and their encoding as PNG, JPEG and WebP.

mod deflate;
mod exif;
mod filter;
mod huffman;
mod jpeg;
mod png;
mod webp;
mod xmp;

pub(crate) use exif::Tiff;
pub(crate) use jpeg::ZIGZAG;
pub(crate) use xmp::properties;

use crate::error::{Error, Result};
use crate::trace;
use rayon::prelude::*;

/// A file format, and how an image is encoded in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lossless; readable by every program.
    Png,
    /// Lossy, without subsampling of colors.
    Jpeg {
        /// From 1 to 100, on the scale of libjpeg.
        quality: u8,
    },
    /// Lossless.
    WebP,
}

/// Which threads encode. The file is the same either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// All threads of rayon's current pool.
    All,
    /// Only the calling thread. For threads outside the pool, which the pool may be waiting for.
    One,
}

impl Threads {
    /// The results of `work` for 0 to `count`, in order. `new` makes the working state of a thread.
    fn map<S, T: Send>(
        self,
        count: usize,
        new: impl Fn() -> S + Send + Sync,
        work: impl Fn(&mut S, usize) -> T + Send + Sync,
    ) -> Vec<T> {
        match self {
            Self::All => (0..count).into_par_iter().map_init(new, work).collect(),
            Self::One => {
                let mut state = new();
                (0..count).map(|index| work(&mut state, index)).collect()
            }
        }
    }
}

impl Format {
    /// The quality of a JPEG that shows no artifacts next to the original.
    pub const DEFAULT_QUALITY: u8 = 95;

    /// The quality of a JPEG.
    pub const fn quality(self) -> Option<u8> {
        match self {
            Self::Jpeg { quality } => Some(quality),
            Self::Png | Self::WebP => None,
        }
    }

    /// An upper bound on the size in bytes of an encoded image, without its text.
    pub fn max_bytes(self, width: usize, height: usize) -> u64 {
        // Incompressible data is stored unmodified, with at most a few more bytes per row. A JPEG of quality 100 can be larger.
        let pixels = width as u64 * height as u64;
        match self {
            Self::Png | Self::WebP => 3 * pixels + 18 * height as u64 + (16 << 10),
            Self::Jpeg { .. } => 6 * pixels + 16 * height as u64 + (16 << 10),
        }
    }

    /// How many bytes at each end tell whether a file is complete.
    pub const FRAME: usize = 12;

    /// Whether a file of `bytes` bytes begins and ends as a complete one of this format. A file that was copied in part does not.
    pub fn is_complete(self, first: &[u8; Self::FRAME], last: &[u8; Self::FRAME], bytes: u64) -> bool {
        match self {
            Self::Png => first.starts_with(png::SIGNATURE) && last == png::END,
            Self::Jpeg { .. } => first.starts_with(&[0xFF, 0xD8, 0xFF]) && last.ends_with(&[0xFF, 0xD9]),
            Self::WebP => {
                let [r, i, f1, f2, size @ .., w, e, b, p] = *first;
                [r, i, f1, f2, w, e, b, p] == *b"RIFFWEBP" && u64::from(u32::from_le_bytes(size)) + 8 == bytes
            }
        }
    }

    /// Refuses text that the format has no room for.
    pub fn check_text(self, text: &[(&str, String)]) -> Result<()> {
        match self {
            Self::Jpeg { .. } => jpeg::check_text(text),
            Self::Png | Self::WebP => Ok(()),
        }
    }
}

/// An RGB image, 8 bits per channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Red, green, blue of each pixel, row by row.
    pub pixels: Vec<u8>,
}

impl Image {
    /// The mean color of a flat image: one whose channels all have a standard deviation of less than one level.
    pub fn flat_color(&self) -> Option<[u8; 3]> {
        let pixels = (self.pixels.len() / 3).max(1) as f64;
        let mut color = [0; 3];
        for (channel, level) in color.iter_mut().enumerate() {
            let values = || self.pixels.iter().skip(channel).step_by(3).map(|&value| f64::from(value));
            let mean = values().sum::<f64>() / pixels;
            let mut squares = 0.0;
            for value in values() {
                squares += (value - mean).powi(2);
                // The sum only grows, so the first rows of most images are enough to see that they are not flat.
                if squares >= pixels {
                    return None;
                }
            }
            *level = mean.round() as u8;
        }
        Some(color)
    }

    /// Encodes the image as PNG with all threads. See [`Image::encode`].
    pub fn encode_png(&self, text: &[(&str, String)]) -> Result<Vec<u8>> {
        self.encode(Format::Png, text, Threads::All)
    }

    /// Encodes the image. `text` is stored as iTXt chunks in a PNG and as XMP in a JPEG or WebP, except `parameters`, which is the user
    /// comment of Exif there. Keys have to begin with an ASCII
    /// letter, after which there may be digits and hyphens; values can be any Unicode text without NUL.
    pub fn encode(&self, format: Format, text: &[(&str, String)], threads: Threads) -> Result<Vec<u8>> {
        let _span = trace::span("encode the image file");
        let Self { width, height, pixels } = self;
        let longest = match format {
            Format::Png => i32::MAX as usize,
            Format::Jpeg { .. } => 65_535,
            Format::WebP => 16_384,
        };
        if *width == 0 || *height == 0 || *width.max(height) > longest {
            return Err(bug(format!("no such file is {width} x {height} pixels")));
        }
        if width.checked_mul(*height).and_then(|count| count.checked_mul(3)) != Some(pixels.len()) {
            return Err(bug(format!("{} values for {width} x {height} pixels", pixels.len())));
        }
        for (key, value) in text {
            let is_word = key.starts_with(|c: char| c.is_ascii_alphabetic())
                && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
                && key.len() < 80;
            if !is_word || value.contains('\0') {
                return Err(bug(format!("text that cannot be stored under `{key}`")));
            }
        }
        format.check_text(text)?;
        match format {
            Format::Png => Ok(png::encode(self, text, threads)),
            Format::Jpeg { quality } => Ok(jpeg::encode(self, quality, text, threads)),
            Format::WebP => webp::encode(self, text),
        }
    }
}

/// An image that cannot be encoded is a bug in the code that created it.
fn bug(what: String) -> Error {
    Error::Op { op: "encode", what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn a_wrong_number_of_values_is_a_bug() {
        assert_eq!(Image { width: 2, height: 2, pixels: vec![0; 11] }.encode_png(&[]).unwrap_err().exit_code(), 70);
        assert!(Image { width: 0, height: 0, pixels: vec![] }.encode_png(&[]).is_err());
        let image = Image { width: 1, height: 1, pixels: vec![0; 3] };
        for (key, value) in [("", "x"), ("two words", "x"), ("<b>", "x"), ("9", "x"), ("key", "\0")] {
            assert!(image.encode_png(&[(key, value.into())]).is_err(), "{key} {value:?}");
        }
        let wide = Image { width: 70_000, height: 1, pixels: vec![0; 3 * 70_000] };
        assert!(wide.encode_png(&[]).is_ok());
        assert!([Format::WebP, Format::Jpeg { quality: 90 }].iter().all(|f| wide.encode(*f, &[], Threads::One).is_err()));
    }

    #[test]
    fn a_file_that_was_cut_is_not_complete() {
        let image = Image { width: 5, height: 3, pixels: (0..45).collect() };
        for format in [Format::Png, Format::Jpeg { quality: 90 }, Format::WebP] {
            let file = image.encode(format, &[("prompt", "x".into())], Threads::One).unwrap();
            let is_complete =
                |file: &[u8]| format.is_complete(file.first_chunk().unwrap(), file.last_chunk().unwrap(), file.len() as u64);
            assert!(is_complete(&file), "{format:?}");
            (12..file.len()).for_each(|bytes| assert!(!is_complete(&file[..bytes]), "{format:?}: {bytes} bytes"));
            // A file that was to be filled later.
            let unfilled = [&file[..file.len() / 2], &vec![0; file.len() - file.len() / 2]].concat();
            assert!(!is_complete(&unfilled) || format == Format::WebP, "{format:?}");
            let others = [Format::Png, Format::Jpeg { quality: 90 }, Format::WebP].into_iter().filter(|other| *other != format);
            others.for_each(|other| assert!(!other.is_complete(file.first_chunk().unwrap(), file.last_chunk().unwrap(), 0)));
        }
    }

    #[test]
    fn flat_images_are_detected() {
        let of = |pixel: fn(usize) -> [u8; 3]| {
            let pixels = (0..64 * 64).flat_map(pixel).collect();
            Image { width: 64, height: 64, pixels }.flat_color()
        };
        assert_eq!(of(|_| [128, 127, 200]), Some([128, 127, 200]));
        assert_eq!(of(|i| [128 + (i % 2) as u8, 127, 200]), Some([129, 127, 200]));
        // A deviation in one channel, or in one spot, is enough.
        assert_eq!(of(|i| [128, 127, 200 + (i % 4) as u8]), None);
        assert_eq!(of(|i| if i < 8 { [255; 3] } else { [0; 3] }), None);
        assert_eq!(of(|i| [0, (i / 64 * 4) as u8, 0]), None);
    }

    #[test]
    fn a_png_reads_back_with_its_text() {
        let (width, height) = (37, 21);
        let pixels: Vec<u8> = (0..width * height * 3).map(|i| (i * i % 251) as u8).collect();
        let image = Image { width, height, pixels };
        let prompt = "a café “sign” 你好 🦀\nsecond line";
        let bytes = image.encode_png(&[("prompt", prompt.into()), ("seed", "42".into())]).unwrap();

        let mut reader = ::png::Decoder::new(io::Cursor::new(&bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height, info.color_type), (37, 21, ::png::ColorType::Rgb));
        assert_eq!(pixels, image.pixels);
        let text: Vec<_> =
            reader.info().utf8_text.iter().map(|chunk| (chunk.keyword.as_str(), chunk.get_text().unwrap())).collect();
        assert_eq!(text, [("prompt", prompt.to_owned()), ("seed", "42".to_owned())]);
    }
}
