//! The tables of a scan: quantization tables, Huffman tables and the restart interval (ITU T.81, B.2.4).

use super::damaged;
use super::huffman::{Codes, Table};
use crate::image::ZIGZAG;
use crate::reference::Fault;

/// The tables in force at a position in a file. They are parsed only when a scan uses them, so unused tables cost nothing.
#[derive(Clone, Copy, Default)]
pub(in crate::reference) struct Tables<'a> {
    quantizers: [Option<Quantizers<'a>>; 4],
    dc: [Option<Table<'a>>; 4],
    ac: [Option<Table<'a>>; 4],
    /// The restart interval in MCUs, 0 for none.
    pub(super) restart: usize,
}

/// The 64 values of a quantization table in zigzag order.
#[derive(Clone, Copy)]
enum Quantizers<'a> {
    Byte(&'a [u8; 64]),
    Word(&'a [u8; 128]),
}

impl<'a> Tables<'a> {
    /// Reads a segment of quantization tables (DQT).
    pub(in crate::reference) fn read_quantizers(&mut self, mut segment: &'a [u8]) -> Result<(), Fault> {
        let broken = || damaged("a quantization table is broken");
        while let Some((&kind, rest)) = segment.split_first() {
            let place = self.quantizers.get_mut(usize::from(kind & 15)).ok_or_else(broken)?;
            (*place, segment) = match kind >> 4 {
                0 => rest.split_first_chunk().map(|(table, rest)| (Some(Quantizers::Byte(table)), rest)),
                1 => rest.split_first_chunk().map(|(table, rest)| (Some(Quantizers::Word(table)), rest)),
                _ => None,
            }
            .ok_or_else(broken)?;
        }
        Ok(())
    }

    /// Reads a segment of Huffman tables (DHT).
    pub(in crate::reference) fn read_codes(&mut self, mut segment: &'a [u8]) -> Result<(), Fault> {
        let broken = || damaged("a Huffman table is broken");
        while let Some((&kind, rest)) = segment.split_first() {
            let class = match kind >> 4 {
                0 => &mut self.dc,
                1 => &mut self.ac,
                _ => return Err(broken()),
            };
            let place = class.get_mut(usize::from(kind & 15)).ok_or_else(broken)?;
            let (counts, rest) = rest.split_first_chunk().ok_or_else(broken)?;
            let length = counts.iter().map(|&count| usize::from(count)).sum::<usize>();
            let (symbols, rest) = rest.split_at_checked(length).filter(|_| length <= 256).ok_or_else(broken)?;
            (*place, segment) = (Some(Table { counts, symbols }), rest);
        }
        Ok(())
    }

    /// Reads a segment with the restart interval (DRI).
    pub(in crate::reference) fn read_restart(&mut self, segment: &[u8]) -> Result<(), Fault> {
        let distance = segment.try_into().map_err(|_| damaged("its restart interval is broken"))?;
        self.restart = usize::from(u16::from_be_bytes(distance));
        Ok(())
    }

    /// Returns a quantization table in row-major order. Only the low 16 bits of a dequantized value are kept, as in
    /// libjpeg-turbo, so the conversion to `i16` does not matter.
    pub(super) fn quantizers(&self, index: u8) -> Result<[i16; 64], Fault> {
        let table = self.quantizers.get(usize::from(index)).copied().flatten();
        let table = table.ok_or_else(|| damaged(format!("its quantization table {index} is missing")))?;
        let mut out = [0; 64];
        for (coded, &at) in ZIGZAG.iter().enumerate() {
            out[usize::from(at)] = match table {
                Quantizers::Byte(table) => i16::from(table[coded]),
                Quantizers::Word(table) => i16::from_be_bytes([table[coded * 2], table[coded * 2 + 1]]),
            };
        }
        if out.contains(&0) {
            return Err(damaged(format!("its quantization table {index} has a zero")));
        }
        Ok(out)
    }

    /// The Huffman table of DC coefficients: a symbol is the number of bits of a difference.
    pub(super) fn dc(&self, index: u8) -> Result<Codes, Fault> {
        Self::codes(&self.dc, index, 15)
    }

    /// The Huffman table of AC coefficients: a symbol is a run of zeros and the number of bits of a value.
    pub(super) fn ac(&self, index: u8) -> Result<Codes, Fault> {
        Self::codes(&self.ac, index, 255)
    }

    fn codes(tables: &[Option<Table<'_>>; 4], index: u8, largest: u8) -> Result<Codes, Fault> {
        let table = tables.get(usize::from(index)).and_then(Option::as_ref);
        table.ok_or_else(|| damaged(format!("its Huffman table {index} is missing")))?.codes(largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_zigzag_runs_along_diagonals() {
        // Figure A.6: along the diagonals, the odd ones downwards.
        let mut order: Vec<(usize, usize)> = (0..64).map(|at| (at / 8, at % 8)).collect();
        order.sort_by_key(|&(y, x)| (x + y, if (x + y) % 2 == 1 { y } else { x }));
        assert!(order.iter().zip(ZIGZAG).all(|(&(y, x), at)| y * 8 + x == usize::from(at)));
    }

    #[test]
    fn broken_tables_are_rejected_and_the_last_definition_counts() {
        let bytes: Vec<u8> = [&[0][..], &[1; 64], &[0x11], &[2; 128], &[0], &[3; 64]].concat();
        let mut tables = Tables::default();
        tables.read_quantizers(&bytes).unwrap();
        assert_eq!(tables.quantizers(0).unwrap(), [3; 64]);
        assert_eq!(tables.quantizers(1).unwrap(), [0x0202; 64]);
        assert!(tables.quantizers(2).is_err() && tables.quantizers(9).is_err());
        for bad in [&bytes[..64], &[&[4][..], &[1; 64]].concat(), &[&[0x20][..], &[1; 64]].concat()] {
            assert!(Tables::default().read_quantizers(bad).is_err());
        }
        let codes = [&[0x10, 1][..], &[0; 15], &[7]].concat();
        tables.read_codes(&codes).unwrap();
        assert!(tables.ac(0).is_ok() && tables.dc(0).is_err() && tables.ac(1).is_err());
        for bad in [&codes[..17], &[&[0x20][..], &codes[1..]].concat(), &[&[4][..], &codes[1..]].concat()] {
            assert!(Tables::default().read_codes(bad).is_err());
        }
        assert!(tables.read_restart(&[0, 1, 2]).is_err());
    }
}
