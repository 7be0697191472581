//! From the decoder's values to the bytes of a PNG.

use crate::error::{Error, Result};

/// A picture, 8 bits a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Pixels in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Red, green, blue of each pixel, row by row.
    pub pixels: Vec<u8>,
}

impl Image {
    /// Encodes the picture as PNG. `text` is stored as key and value, the value in any script (iTXt); keys are plain ASCII.
    pub fn encode_png(&self, text: &[(&str, String)]) -> Result<Vec<u8>> {
        let (Ok(width), Ok(height)) = (u32::try_from(self.width), u32::try_from(self.height)) else {
            return Err(bug(format!("no PNG is {} x {} pixels", self.width, self.height)));
        };
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        // Measured on a megapixel of shaded noise: 17 times as fast as the default, and 3 % larger.
        encoder.set_compression(png::Compression::Fast);
        let encode = || {
            for (key, value) in text {
                encoder.add_itxt_chunk((*key).to_owned(), value.clone())?;
            }
            let mut writer = encoder.write_header()?;
            writer.write_image_data(&self.pixels)?;
            writer.finish()
        };
        // Memory never refuses a write, so a failure here is a picture or a key that makes no sense.
        encode().map_err(|error: png::EncodingError| bug(error.to_string()))?;
        Ok(bytes)
    }
}

/// A picture that cannot be encoded is a mistake of the code that made it.
fn bug(what: String) -> Error {
    Error::Op { op: "encode_png", what }
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
        assert!(image.encode_png(&[("", "empty key".into())]).is_err());
    }

    #[test]
    fn a_png_reads_back_with_its_text() {
        let (width, height) = (37, 21);
        let pixels: Vec<u8> = (0..width * height * 3).map(|i| (i * i % 251) as u8).collect();
        let image = Image { width, height, pixels };
        let prompt = "a café “sign” 你好 🦀\nsecond line";
        let bytes = image.encode_png(&[("prompt", prompt.into()), ("seed", "42".into())]).unwrap();

        let mut reader = png::Decoder::new(io::Cursor::new(&bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height, info.color_type), (37, 21, png::ColorType::Rgb));
        assert_eq!(pixels, image.pixels);
        let text: Vec<_> =
            reader.info().utf8_text.iter().map(|chunk| (chunk.keyword.as_str(), chunk.get_text().unwrap())).collect();
        assert_eq!(text, [("prompt", prompt.to_owned()), ("seed", "42".to_owned())]);
    }
}
