//! The frame header: the size of an image and the sampling factors of its components (ITU T.81, A.1.1 and B.2.2).

use super::damaged;
use crate::reference::{Fault, check_size};

/// The content of a frame header.
pub(in crate::reference) struct Frame {
    pub(in crate::reference) width: usize,
    pub(in crate::reference) height: usize,
    /// Whether the coefficients are spread over several progressive scans.
    pub(super) progressive: bool,
    /// The largest sampling factors, horizontal and vertical.
    pub(super) sampling: (usize, usize),
    pub(super) components: Vec<Component>,
}

/// A component: luma, chroma or a color channel.
pub(super) struct Component {
    pub(super) id: u8,
    /// The sampling factors, horizontal and vertical.
    pub(super) sampling: (usize, usize),
    /// The index of the component's quantization table.
    pub(super) quantizers: u8,
    /// The size in samples.
    pub(super) size: (usize, usize),
    /// The size in blocks of 8 x 8 samples.
    pub(super) blocks: (usize, usize),
}

impl Frame {
    /// Parses the header and rejects unsupported images and sizes.
    pub(in crate::reference) fn read(segment: &[u8], progressive: bool) -> Result<Self, Fault> {
        let (&[depth, h0, h1, w0, w1, count], list) =
            segment.split_first_chunk().ok_or_else(|| damaged("its header is too short"))?;
        if depth != 8 {
            return Err(Fault::Unreadable(format!("content is a JPEG of {depth} bits a sample, not 8")));
        }
        let (width, height) = (usize::from(u16::from_be_bytes([w0, w1])), usize::from(u16::from_be_bytes([h0, h1])));
        check_size(width, height)?;
        if !matches!(count, 1 | 3 | 4) || list.len() != usize::from(count) * 3 {
            return Err(damaged(format!("its header has {count} components in {} bytes", list.len())));
        }
        let factors = |c: &[u8]| (usize::from(c[1] >> 4), usize::from(c[1] & 15));
        let sampling = list.chunks_exact(3).map(factors).fold((0, 0), |max, f| (max.0.max(f.0), max.1.max(f.1)));
        let mut components = Vec::with_capacity(usize::from(count));
        for c in list.chunks_exact(3) {
            let (h, v) = factors(c);
            if !(1..=4).contains(&h) || !(1..=4).contains(&v) {
                return Err(damaged("its header has impossible sampling factors"));
            }
            for (factor, max, way) in [(h, sampling.0, "across"), (v, sampling.1, "down")] {
                if max % factor != 0 {
                    return Err(Fault::Unreadable(format!("content is a JPEG with the rare sampling {factor}:{max} {way}")));
                }
            }
            // The subsampling ratio of a component is its sampling factor to the largest factor.
            let size = ((width * h).div_ceil(sampling.0), (height * v).div_ceil(sampling.1));
            let blocks = (size.0.div_ceil(8), size.1.div_ceil(8));
            components.push(Component { id: c[0], sampling: (h, v), quantizers: c[2], size, blocks });
        }
        Ok(Self { width, height, progressive, sampling, components })
    }

    /// Number of blocks in all components.
    pub(in crate::reference) fn blocks(&self) -> usize {
        self.components.iter().map(Component::count).sum()
    }
}

impl Component {
    /// Number of blocks in the component.
    pub(super) fn count(&self) -> usize {
        self.blocks.0 * self.blocks.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_subsampled_by_their_factors() {
        let header = [8, 0, 75, 0, 99, 3, 1, 0x41, 0, 2, 0x22, 1, 3, 0x12, 1];
        let frame = Frame::read(&header, false).unwrap();
        let sizes: Vec<_> = frame.components.iter().map(|c| (c.size, c.blocks)).collect();
        assert_eq!(sizes, [((99, 38), (13, 5)), ((50, 75), (7, 10)), ((25, 75), (4, 10))]);
        assert_eq!((frame.sampling, frame.blocks()), ((4, 2), 65 + 70 + 40));
    }

    #[test]
    fn fractional_sampling_ratios_are_rejected_by_name() {
        let refusal = |luma, chroma| {
            let header = [8, 0, 75, 0, 99, 3, 1, luma, 0, 2, chroma, 1, 3, 0x11, 1];
            match Frame::read(&header, false) {
                Err(Fault::Unreadable(why) | Fault::Damaged(why)) => why,
                _ => String::new(),
            }
        };
        assert_eq!(refusal(0x31, 0x21), "content is a JPEG with the rare sampling 2:3 across");
        assert_eq!(refusal(0x13, 0x14), "content is a JPEG with the rare sampling 3:4 down");
        assert_eq!(refusal(0x01, 0x11), "its header has impossible sampling factors");
        assert_eq!(refusal(0x51, 0x11), "its header has impossible sampling factors");
        assert_eq!(refusal(0x42, 0x21), "");
    }
}
