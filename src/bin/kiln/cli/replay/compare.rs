//! Compares an image that was made again with the original.

use kiln::DecodedReference;
use kiln::error::Result;
use kiln::image::Image;
use kiln::metadata::{ImageMetadata, StoredText};
use kiln::text::grouped;
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;

/// Keys that describe where an image was made, and not how.
const PLACE: [&str; 5] = ["model", "model_id", "device", "arithmetic", "version"];

/// What differs between two images.
pub struct Comparison {
    /// Pixels that differ, of all.
    pub differ: usize,
    all: usize,
    /// The largest difference of a channel.
    pub largest: u8,
    /// Settings that differ.
    pub keys: Vec<String>,
    /// The sizes, if they differ.
    sizes: Option<[(usize, usize); 2]>,
}

impl Comparison {
    pub fn is_identical(&self) -> bool {
        self.differ == 0 && self.keys.is_empty()
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { differ, all, largest, keys, sizes } = self;
        if let Some([(width, height), (new_width, new_height)]) = sizes {
            return write!(f, "it has {width}x{height} pixels, and the new image has {new_width}x{new_height}");
        }
        if *differ > 0 {
            let levels = if *largest == 1 { "level" } else { "levels" };
            write!(f, "{} of {} pixels, at most {largest} {levels}", grouped(*differ as u64), grouped(*all as u64))?;
        }
        if !keys.is_empty() {
            write!(f, "{}settings: {}", if *differ > 0 { "; " } else { "" }, keys.join(", "))?;
        }
        Ok(())
    }
}

/// Compares pixels, and what kiln stored. Text that other programs added does not count.
pub fn compare(original: (&[u8], &Path), new: (&[u8], &Path), metadata: &ImageMetadata) -> Result<Comparison> {
    let decoded = |(bytes, path): (&[u8], &Path)| DecodedReference::from_bytes(bytes, path);
    let (then, now) = (decoded(original)?, decoded(new)?);
    let mut found = pixels(then.image(), now.image());
    // Without full metadata there is nothing to compare.
    if let Some(Ok(new)) = StoredText::of_file(new.0, new.1)?.metadata() {
        found.keys = keys(metadata, &new);
    }
    Ok(found)
}

fn pixels(then: &Image, now: &Image) -> Comparison {
    let all = then.width * then.height;
    let sizes = [then, now].map(|image| (image.width, image.height));
    if sizes[0] != sizes[1] {
        return Comparison { differ: all, all, largest: 255, keys: Vec::new(), sizes: Some(sizes) };
    }
    let (mut differ, mut largest) = (0, 0);
    for (a, b) in then.pixels.as_chunks::<3>().0.iter().zip(now.pixels.as_chunks::<3>().0) {
        let most = a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or_default();
        differ += usize::from(most > 0);
        largest = largest.max(most);
    }
    Comparison { differ, all, largest, keys: Vec::new(), sizes: None }
}

/// The settings that differ.
fn keys(then: &ImageMetadata, now: &ImageMetadata) -> Vec<String> {
    let members = |metadata: &ImageMetadata| {
        let mut metadata = metadata.clone();
        // An adapter is the same by any name.
        metadata.lora.iter_mut().for_each(|adapter| adapter.file.clear());
        match serde_json::to_value(metadata) {
            Ok(Value::Object(members)) => members,
            _ => Map::new(),
        }
    };
    let (then, now) = (members(then), members(now));
    let names = then.keys().chain(now.keys().filter(|key| !then.contains_key(*key)));
    names.filter(|key| !PLACE.contains(&key.as_str()) && then.get(*key) != now.get(*key)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(pixels: Vec<u8>) -> Image {
        Image { width: pixels.len() / 3, height: 1, pixels }
    }

    #[test]
    fn pixels_that_differ_are_counted() {
        let found = pixels(&image(vec![1, 2, 3, 4, 5, 6, 7, 8, 9]), &image(vec![1, 2, 3, 4, 7, 5, 7, 8, 0]));
        assert_eq!((found.differ, found.largest, found.is_identical()), (2, 9, false));
        assert_eq!(found.to_string(), "2 of 3 pixels, at most 9 levels");
        let one = pixels(&image(vec![1; 3]), &image(vec![1, 1, 2]));
        assert_eq!(one.to_string(), "1 of 1 pixels, at most 1 level");
        let same = pixels(&image(vec![1; 6]), &image(vec![1; 6]));
        assert!(same.is_identical());
        let small = pixels(&image(vec![1; 6]), &image(vec![1; 3]));
        assert_eq!(small.to_string(), "it has 2x1 pixels, and the new image has 1x1");
    }

    #[test]
    fn settings_count_and_places_do_not() {
        let then = ImageMetadata { steps: 4, version: "kiln 0.1.0".into(), ..ImageMetadata::default() };
        let now = ImageMetadata { version: "kiln 0.2.0".into(), device: "cuda sm_90".into(), ..then.clone() };
        assert_eq!(keys(&then, &now), [""; 0]);
        let other = ImageMetadata { steps: 5, negative: Some("x".into()), ..now };
        assert_eq!(keys(&then, &other), ["steps", "negative"]);
        assert_eq!(keys(&other, &then), ["negative", "steps"]);
    }
}
