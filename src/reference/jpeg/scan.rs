//! A scan: its components and coefficients, and the walk over its MCUs (ITU T.81, A.2, B.2.3, E.2 and G.1.1).

use super::bits::Bits;
use super::block::{self, Band};
use super::frame::Frame;
use super::huffman::Codes;
use super::tables::Tables;
use super::{Flaw, Stored, damaged};
use crate::reference::Fault;
use kiln_numerics::idct::Block;

/// Limit on the blocks per MCU in a scan of several components (B.2.3).
const MAX_BLOCKS: usize = 10;

/// A scan as the file stores it.
pub(in crate::reference) struct Scan<'a> {
    /// The scan header.
    pub(in crate::reference) header: &'a [u8],
    /// The entropy-coded data, including restart markers, up to the next other marker.
    pub(in crate::reference) data: &'a [u8],
    /// The tables in force.
    pub(in crate::reference) tables: Tables<'a>,
}

/// The content of a scan header.
struct Header {
    parts: Vec<Part>,
    band: Band,
    /// The lowest bit of the preceding scans of these coefficients, or `None` for their first scan.
    high: Option<u8>,
}

/// A component of a scan.
struct Part {
    component: usize,
    /// The component's blocks per MCU, horizontally and vertically.
    blocks: (usize, usize),
    dc: u8,
    ac: u8,
}

/// The decoder state carried from block to block and reset at a restart marker.
#[derive(Default)]
struct Carried {
    /// The last DC coefficient of each part.
    dc: [i16; 4],
    /// Number of blocks, starting with the next one, without further coefficients (EOBRUN).
    eob_run: u32,
}

impl Header {
    fn read(bytes: &[u8], frame: &Frame) -> Result<Self, Fault> {
        let broken = || damaged("the header of a scan is broken");
        let (&count, rest) = bytes.split_first().ok_or_else(broken)?;
        let (list, &[first, last, approximation]) = rest.split_last_chunk().ok_or_else(broken)?;
        if !(1..=4).contains(&count) || list.len() != usize::from(count) * 2 {
            return Err(broken());
        }
        let mut parts: Vec<Part> = Vec::with_capacity(4);
        for pair in list.chunks_exact(2) {
            // Components come in the order of the frame, each at most once.
            let from = parts.last().map_or(0, |part| part.component + 1);
            let found = frame.components.iter().skip(from).position(|component| component.id == pair[0]);
            let component = from + found.ok_or_else(|| damaged("a scan names a component out of order"))?;
            // In a scan of a single component, an MCU is one block.
            let blocks = if count == 1 { (1, 1) } else { frame.components[component].sampling };
            parts.push(Part { component, blocks, dc: pair[1] >> 4, ac: pair[1] & 15 });
        }
        let blocks = parts.iter().map(|part| part.blocks.0 * part.blocks.1).sum::<usize>();
        if blocks > MAX_BLOCKS {
            return Err(damaged(format!("a scan has {blocks} blocks in an MCU, limit {MAX_BLOCKS}")));
        }
        let (first, last, high, low) = (usize::from(first), usize::from(last), approximation >> 4, approximation & 15);
        let right = if frame.progressive {
            let band = if first == 0 { last == 0 } else { (first..64).contains(&last) && count == 1 };
            // A refinement scan adds exactly one bit.
            band && low <= 13 && (high == 0 || high == low + 1)
        } else {
            (first, last, approximation) == (0, 63, 0)
        };
        if !right {
            return Err(damaged("a scan has an impossible range of coefficients or bits"));
        }
        Ok(Self { parts, band: Band { first, last, low }, high: (high > 0).then_some(high) })
    }

    /// Records that these coefficients are known down to this scan's lowest bit, and checks that the scan comes next in order.
    fn note(&self, stored: &mut [Stored]) -> Result<(), Fault> {
        for part in &self.parts {
            for known in &mut stored[part.component].known[self.band.first..=self.band.last] {
                match (self.high, *known) {
                    (None, Some(_)) => return Err(damaged("a scan repeats coefficients of an earlier one")),
                    (Some(high), known) if known != Some(high) => {
                        return Err(damaged("scans are missing: one refines bits that no earlier one has"));
                    }
                    _ => *known = Some(self.band.low),
                }
            }
        }
        Ok(())
    }
}

impl Scan<'_> {
    /// Decodes the scan into samples or coefficients.
    pub(super) fn decode(&self, frame: &Frame, stored: &mut [Stored]) -> Result<(), Fault> {
        let header = Header::read(self.header, frame)?;
        header.note(stored)?;
        let Header { parts, band, high } = &header;
        for part in parts {
            // If a table is redefined, a component uses the table in force at its first scan.
            let quantizers = &mut stored[part.component].quantizers;
            if quantizers[0] == 0 {
                *quantizers = self.tables.quantizers(frame.components[part.component].quantizers)?;
            }
        }
        let codes = |wanted: bool, of: &dyn Fn(&Part) -> Result<Codes, Fault>| {
            parts.iter().filter(|_| wanted).map(of).collect::<Result<Vec<_>, _>>()
        };
        let dc = codes(band.first == 0 && high.is_none(), &|part| self.tables.dc(part.dc))?;
        let ac = codes(band.last > 0, &|part| self.tables.ac(part.ac))?;
        if !frame.progressive {
            let mut coefficients: Block = [0; 64];
            return self.walk(frame, parts, |bits, carried, part, place| {
                block::sequential(bits, &dc[part], &ac[part], &mut carried.dc[part], &mut coefficients)?;
                if let Some(place) = place {
                    stored[parts[part].component].transform(&coefficients, place);
                }
                coefficients = [0; 64];
                Ok(())
            });
        }
        let band = *band;
        match (band.first, high) {
            (0, None) => self.walk_stored(frame, parts, stored, |bits, carried, part, block| {
                block::dc_first(bits, &dc[part], &mut carried.dc[part], band.low, block)
            }),
            (0, Some(_)) => self.walk_stored(frame, parts, stored, |bits, _, _, block| block::dc_refine(bits, band.low, block)),
            (_, None) => self.walk_stored(frame, parts, stored, |bits, carried, part, block| {
                block::ac_first(bits, &ac[part], &mut carried.eob_run, band, block)
            }),
            (_, Some(_)) => self.walk_stored(frame, parts, stored, |bits, carried, part, block| {
                block::ac_refine(bits, &ac[part], &mut carried.eob_run, band, block)
            }),
        }
    }

    /// Calls `decode` for each block with the coefficients decoded so far.
    fn walk_stored(
        &self,
        frame: &Frame,
        parts: &[Part],
        stored: &mut [Stored],
        mut decode: impl FnMut(&mut Bits<'_>, &mut Carried, usize, &mut Block) -> Result<(), Flaw>,
    ) -> Result<(), Fault> {
        // Blocks that only pad an MCU are not stored. They need no values from earlier scans.
        let mut filling: Block = [0; 64];
        self.walk(frame, parts, |bits, carried, part, place| {
            let stored = &mut stored[parts[part].component];
            let block = match place {
                Some(place) => stored.block(place),
                None => &mut filling,
            };
            decode(bits, carried, part, block)
        })
    }

    /// Calls `decode` for each block with the index of its part and its position in the component. The position is `None` for
    /// blocks outside the component, which only pad an MCU.
    #[inline(always)]
    fn walk(
        &self,
        frame: &Frame,
        parts: &[Part],
        mut decode: impl FnMut(&mut Bits<'_>, &mut Carried, usize, Option<(usize, usize)>) -> Result<(), Flaw>,
    ) -> Result<(), Fault> {
        let mcus = match parts {
            [part] => frame.components[part.component].blocks,
            _ => (frame.width.div_ceil(8 * frame.sampling.0), frame.height.div_ceil(8 * frame.sampling.1)),
        };
        let (mut bits, mut carried) = (Bits::new(self.data), Carried::default());
        // The number of MCUs up to the next restart marker, and the number in that marker.
        let (mut left, mut number) = (self.tables.restart, 0);
        for (my, mx) in (0..mcus.1).flat_map(|y| (0..mcus.0).map(move |x| (y, x))) {
            if self.tables.restart > 0 {
                if left == 0 {
                    bits.restart(number).map_err(Flaw::fault)?;
                    carried = Carried::default();
                    (left, number) = (self.tables.restart, (number + 1) % 8);
                }
                left -= 1;
            }
            for (index, part) in parts.iter().enumerate() {
                let size = frame.components[part.component].blocks;
                for (by, bx) in (0..part.blocks.1).flat_map(|y| (0..part.blocks.0).map(move |x| (y, x))) {
                    let (x, y) = (mx * part.blocks.0 + bx, my * part.blocks.1 + by);
                    let place = (x < size.0 && y < size.1).then_some((x, y));
                    decode(&mut bits, &mut carried, index, place).map_err(Flaw::fault)?;
                }
            }
        }
        // Data between the last MCU and the next marker is ignored, as in other decoders.
        Ok(())
    }
}
