//! A decoder of Huffman-coded JPEG, sequential and progressive (ITU T.81), in every layout of scans and samplings.
//!
//! It makes the same pixels as libjpeg-turbo does for Pillow, to the bit: T.81 leaves the roundings of the inverse transform to
//! the decoder, and upsampling and colours are not its subject at all. And unlike libjpeg it never fills in what is missing. Data
//! that ends before its scan does, codes and marks that make no sense, scans that never come: each is a fault.
//!
//! The path of a sample: [`bits`] and [`huffman`] decode symbols, [`block`] makes coefficients of them in the order that [`scan`]
//! walks, [`idct`] makes samples, [`upsample`] brings them to the size of the image and [`colour`] to RGB. A sequential scan has
//! all of a block at once, so its samples are made on the way; only progressive images are kept as coefficients.

mod bits;
mod block;
mod colour;
mod frame;
mod huffman;
mod idct;
mod scan;
mod tables;
mod upsample;

use super::{Fault, buffer};
use block::Block;
use colour::Colours;
pub(super) use colour::Notes;
use frame::Component;
pub(super) use frame::Frame;
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

    let colours = Colours::of(frame, notes);
    let mut pixels = buffer(frame.width * frame.height * 3)?;
    let mut upsamplers = (frame.components.iter().zip(&stored))
        .map(|(component, stored)| Upsampler::new(frame, component, &stored.samples))
        .collect::<Result<Vec<_>, _>>()?;
    for (y, out) in pixels.chunks_exact_mut(frame.width * 3).enumerate() {
        let mut rows: [&[u8]; 4] = [&[]; 4];
        for (row, upsampler) in rows.iter_mut().zip(&mut upsamplers) {
            *row = upsampler.row(y);
        }
        colours.convert(&rows[..frame.components.len()], out);
    }
    Ok(pixels)
}

/// What is known of a component.
struct Stored {
    /// Its size in blocks.
    blocks: (usize, usize),
    /// The bit down to which each coefficient is known, in coded order; all of it at 0.
    known: [Option<u8>; 64],
    /// In the order of rows; all zero, which no table is, until its first scan.
    quantisers: Block,
    /// Of a progressive image, until all of its scans are read; block after block.
    coefficients: Vec<i16>,
    /// Whole blocks, in rows.
    samples: Vec<u8>,
}

impl Stored {
    fn new(component: &Component, progressive: bool) -> Result<Self, Fault> {
        let values = component.count() * 64;
        let (coefficients, samples) = if progressive { (values, 0) } else { (0, values) };
        Ok(Self {
            blocks: component.blocks,
            known: [None; 64],
            quantisers: [0; 64],
            coefficients: buffer(coefficients)?,
            samples: buffer(samples)?,
        })
    }

    /// The coefficients of a block of a progressive image.
    fn block(&mut self, (x, y): (usize, usize)) -> &mut Block {
        &mut self.coefficients.as_chunks_mut().0[y * self.blocks.0 + x]
    }

    /// Makes the samples of a block.
    #[inline(always)]
    fn transform(&mut self, coefficients: &Block, (x, y): (usize, usize)) {
        let stride = self.blocks.0 * 8;
        idct::block(coefficients, &self.quantisers, &mut self.samples[y * 8 * stride + x * 8..], stride);
    }

    /// Makes samples of the coefficients that are stored, and drops these.
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

/// What can be wrong with coded data. Small, because it is part of every result on the way of a symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// It ends too early.
    Short,
    /// A code that its table does not have, or that makes no sense where it stands.
    Code,
    /// No restart mark, or not the right one.
    Restart,
}

impl Flaw {
    fn fault(self) -> Fault {
        damaged(match self {
            Self::Short => "its image data ends before the image does",
            Self::Code => "its image data has a code that makes no sense",
            Self::Restart => "its image data has no restart mark where one belongs",
        })
    }
}

fn damaged(what: impl Into<String>) -> Fault {
    Fault::Damaged(what.into())
}
