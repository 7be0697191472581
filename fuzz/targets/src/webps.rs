//! WebP files.

use crate::{check_file_error, check_texts};
use common::cost::peak_of;
use image_webp::WebPDecoder;
use kiln::DecodedReference;
use kiln::edit::Mask;
use std::io::Cursor;
use std::path::Path;

/// Bytes before the first chunk.
const HEADER: usize = 12;

/// A WebP. The length in its header is corrected, and may be missing with the header. An accepted file is the image that the `image-webp`
/// crate alone reads from it, and as a mask it has that size.
pub fn webp(data: &[u8]) {
    let chunks = if data.starts_with(b"RIFF") { data.get(HEADER..).unwrap_or_default() } else { data };
    let file = [b"RIFF", &(4 + chunks.len() as u32).to_le_bytes()[..], b"WEBP", chunks].concat();
    check_texts(&file);
    let (image, peak) = peak_of(|| DecodedReference::from_bytes(&file, Path::new("x")));
    let image = match image {
        Ok(decoded) => decoded.image().clone(),
        Err(error) => return check_file_error(&error),
    };
    let pixels = image.width * image.height;
    // The image, the library's copy of it, and its codes.
    assert!(peak <= (64 << 20) + 16 * pixels as isize, "{peak} bytes for {pixels} pixels");
    let Ok(mut reference) = WebPDecoder::new(Cursor::new(&file)) else { return };
    let Some(bytes) = reference.output_buffer_size() else { return };
    let mut samples = vec![0; bytes];
    // A file with transparency that is damaged is an image without it.
    if bytes % pixels == 0 && reference.read_image(&mut samples).is_ok() {
        let channels = bytes / pixels;
        let same = samples.chunks_exact(channels).zip(image.pixels.chunks_exact(3)).all(|(a, b)| a[..3] == *b);
        // Orientations change the order of pixels.
        let is_turned =
            reference.exif_metadata().is_ok_and(|exif| exif.is_some()) || reference.xmp_metadata().is_ok_and(|xmp| xmp.is_some());
        assert!(same || is_turned, "the pixels differ from the image-webp crate's");
    }
    if let Err(error) = Mask::from_bytes(&file, Path::new("x")) {
        check_file_error(&error);
    }
}
