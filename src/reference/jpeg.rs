//! A decoder of Huffman-coded JPEG, sequential and progressive (ITU T.81), with any scan layout and chroma subsampling.
//!
//! The pixels are bit-identical to libjpeg-turbo's as used by Pillow. T.81 leaves the roundings of the inverse DCT to the
//! decoder, and does not cover upsampling and color conversion at all. Unlike libjpeg, this decoder never fills in missing data.
//! Truncated scans, invalid codes and markers, and missing scans are errors.
//!
//! The stages: [`bits`] and [`huffman`] decode symbols, [`block`] assembles the coefficients of a block, in the order in which
//! [`scan`] visits the blocks, [`idct`] computes samples, [`upsample`] scales them to the size of the image and [`color`]
//! converts them to RGB. A sequential scan has all coefficients of a block at once, so its samples are computed immediately; only
//! progressive images are stored as coefficients.

mod bits;
mod block;
mod color;
mod frame;
mod huffman;
mod scan;
mod tables;
mod upsample;

use super::{Fault, buffer};
use color::Colors;
pub(super) use color::Notes;
use frame::Component;
pub(super) use frame::Frame;
use kiln_numerics::idct::{self, Block};
pub(super) use scan::Scan;
pub(super) use tables::Tables;
use upsample::Upsampler;

/// Decodes the scans of an image to RGB.
pub(super) fn decode(frame: &Frame, scans: &[Scan<'_>], notes: Notes) -> Result<Vec<u8>, Fault> {
    let mut stored = frame.components.iter().map(|c| Stored::new(c, frame.progressive)).collect::<Result<Vec<_>, _>>()?;
    for scan in scans {
        scan.decode(frame, &mut stored)?;
    }
    if let Some(at) = stored.iter().position(|component| component.known != [Some(0); 64]) {
        let what = if stored[at].known == [None; 64] { "all" } else { "a part" };
        return Err(damaged(format!("scans are missing: {what} of component {} of {}", at + 1, stored.len())));
    }
    stored.iter_mut().try_for_each(Stored::finish)?;

    let colors = Colors::of(frame, notes);
    let mut pixels = buffer(frame.width * frame.height * 3)?;
    let mut upsamplers = (frame.components.iter().zip(&stored))
        .map(|(component, stored)| Upsampler::new(frame, component, &stored.samples))
        .collect::<Result<Vec<_>, _>>()?;
    for (y, out) in pixels.chunks_exact_mut(frame.width * 3).enumerate() {
        let mut rows: [&[u8]; 4] = [&[]; 4];
        for (row, upsampler) in rows.iter_mut().zip(&mut upsamplers) {
            *row = upsampler.row(y);
        }
        colors.convert(&rows[..frame.components.len()], out);
    }
    Ok(pixels)
}

/// The decoded data of a component.
struct Stored {
    /// The size in blocks.
    blocks: (usize, usize),
    /// The lowest known bit of each coefficient, in zigzag order. A coefficient is complete at 0.
    known: [Option<u8>; 64],
    /// The quantization table in row-major order. Before the component's first scan it is all zero, which no valid table is.
    quantizers: Block,
    /// The coefficients of a progressive image, block after block, until all of its scans are decoded.
    coefficients: Vec<i16>,
    /// The samples of whole blocks, row by row.
    samples: Vec<u8>,
}

impl Stored {
    fn new(component: &Component, progressive: bool) -> Result<Self, Fault> {
        let values = component.count() * 64;
        let (coefficients, samples) = if progressive { (values, 0) } else { (0, values) };
        Ok(Self {
            blocks: component.blocks,
            known: [None; 64],
            quantizers: [0; 64],
            coefficients: buffer(coefficients)?,
            samples: buffer(samples)?,
        })
    }

    /// The coefficients of a block of a progressive image.
    fn block(&mut self, (x, y): (usize, usize)) -> &mut Block {
        &mut self.coefficients.as_chunks_mut().0[y * self.blocks.0 + x]
    }

    /// Computes the samples of a block.
    #[inline(always)]
    fn transform(&mut self, coefficients: &Block, (x, y): (usize, usize)) {
        let stride = self.blocks.0 * 8;
        idct::block(coefficients, &self.quantizers, &mut self.samples[y * 8 * stride + x * 8..], stride);
    }

    /// Computes samples from the stored coefficients and drops the coefficients.
    fn finish(&mut self) -> Result<(), Fault> {
        let coefficients = std::mem::take(&mut self.coefficients);
        if self.samples.is_empty() {
            self.samples = buffer(coefficients.len())?;
        }
        for (i, block) in coefficients.as_chunks().0.iter().enumerate() {
            self.transform(block, (i % self.blocks.0, i / self.blocks.0));
        }
        Ok(())
    }
}

/// An error in entropy-coded data. It is small because it is part of the result of every symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// The data ends too early.
    Short,
    /// A code that is not in its table, or that is invalid in its place.
    Code,
    /// A missing restart marker, or one with the wrong number.
    Restart,
}

impl Flaw {
    fn fault(self) -> Fault {
        damaged(match self {
            Self::Short => "its image data ends before the image does",
            Self::Code => "its image data has an invalid code",
            Self::Restart => "its image data lacks a restart marker",
        })
    }
}

fn damaged(what: impl Into<String>) -> Fault {
    Fault::Damaged(what.into())
}
