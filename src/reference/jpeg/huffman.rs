//! Huffman decoding (ITU T.81, annex C and F.2.2.3) with a lookup table for short codes.

use super::damaged;
use crate::reference::Fault;

/// Codes of up to this many bits are decoded by one table lookup. Nearly all codes are this short.
const LOOKUP_BITS: u32 = 9;

/// A Huffman table prepared for decoding.
pub(super) struct Codes {
    /// Indexed by the next bits. The upper byte is the length of the code, or 0 if the code is longer. The lower byte is its
    /// symbol.
    lookup: [u16; 1 << LOOKUP_BITS],
    /// For each length, the first left-aligned 16-bit value past its codes.
    ends: [u32; 17],
    /// For each length, the index of its first symbol minus its first code.
    starts: [i32; 17],
    symbols: Vec<u8>,
}

/// A table as the file stores it: the number of codes of each length, and their symbols in order.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    pub(super) counts: &'a [u8; 16],
    pub(super) symbols: &'a [u8],
}

impl Table<'_> {
    /// Assigns the codes. `largest` is the largest valid symbol.
    pub(super) fn codes(&self, largest: u8) -> Result<Codes, Fault> {
        if self.symbols.iter().any(|&symbol| symbol > largest) {
            return Err(damaged("a Huffman table has an invalid symbol"));
        }
        let mut codes = Codes { lookup: [0; 1 << LOOKUP_BITS], ends: [0; 17], starts: [0; 17], symbols: self.symbols.to_vec() };
        let (mut code, mut index) = (0u32, 0usize);
        for (length, &count) in (1..=16u32).zip(self.counts) {
            codes.starts[length as usize] = index as i32 - code as i32;
            for &symbol in self.symbols.get(index..index + usize::from(count)).unwrap_or_default() {
                if length <= LOOKUP_BITS {
                    let first = (code as usize) << (LOOKUP_BITS - length);
                    let range = first..first + (1 << (LOOKUP_BITS - length));
                    // The range is out of bounds if there are too many codes. The check below rejects these tables.
                    codes.lookup.get_mut(range).unwrap_or_default().fill((length as u16) << 8 | u16::from(symbol));
                }
                code += 1;
            }
            index += usize::from(count);
            // No code may consist of ones only (C.2), so the last code of a length has a successor of the same length.
            if count > 0 && code >= 1 << length {
                return Err(damaged("a Huffman table has too many codes"));
            }
            codes.ends[length as usize] = code << (16 - length);
            code <<= 1;
        }
        Ok(codes)
    }
}

impl Codes {
    /// The symbol whose code these bits start with, and the length of the code.
    #[inline(always)]
    pub(super) fn look_up(&self, bits: u16) -> Option<(u8, u32)> {
        let lookup = self.lookup[usize::from(bits >> (16 - LOOKUP_BITS))];
        if lookup > 0xFF { Some((lookup as u8, u32::from(lookup >> 8))) } else { self.search_long(bits) }
    }

    #[cold]
    fn search_long(&self, bits: u16) -> Option<(u8, u32)> {
        // Codes of one length are consecutive numbers, greater than all shorter codes.
        let length = (LOOKUP_BITS + 1..=16).find(|&length| u32::from(bits) < self.ends[length as usize])?;
        let index = i32::from(bits >> (16 - length)) + self.starts[length as usize];
        Some((*self.symbols.get(usize::try_from(index).ok()?)?, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table<'a>(counts: &'a [u8; 16], symbols: &'a [u8]) -> Table<'a> {
        Table { counts, symbols }
    }

    #[test]
    fn codes_are_found_by_their_first_bits() {
        // 00, 01, 100, 101 and 1100000000000000.
        let counts = [0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        let short = table(&counts, &[5, 6, 7, 8, 9]).codes(255).unwrap();
        assert_eq!(short.look_up(0x0000), Some((5, 2)));
        assert_eq!(short.look_up(0x7FFF), Some((6, 2)));
        assert_eq!(short.look_up(0x8000), Some((7, 3)));
        assert_eq!(short.look_up(0xBFFF), Some((8, 3)));
        assert_eq!(short.look_up(0xC000), Some((9, 16)));
        assert_eq!(short.look_up(0xC001), None);
        assert_eq!(short.look_up(0xFFFF), None);
    }

    #[test]
    fn every_code_of_a_full_table_is_found() {
        // One code of each length: ones and a zero.
        let symbols: Vec<u8> = (100..116).collect();
        let codes = table(&[1; 16], &symbols).codes(255).unwrap();
        for length in 1..=16u32 {
            let first = (0xFFFFu32 << (17 - length)) as u16;
            assert_eq!(codes.look_up(first), Some((99 + length as u8, length)));
            let last = first | ((1u32 << (16 - length)) - 1) as u16;
            assert_eq!(codes.look_up(last), Some((99 + length as u8, length)));
        }
        assert_eq!(codes.look_up(0xFFFF), None);
    }

    #[test]
    fn impossible_tables_are_rejected() {
        let one = |length: usize, count| std::array::from_fn(|i| if i + 1 == length { count } else { 0 });
        assert!(table(&one(1, 1), &[0]).codes(15).is_ok());
        // Two codes of one bit would include one of ones only.
        assert!(table(&one(1, 2), &[0, 1]).codes(15).is_err());
        assert!(table(&one(8, 255), &[0; 255]).codes(15).is_ok());
        assert!(table(&one(3, 200), &[0; 200]).codes(15).is_err());
        assert!(table(&one(1, 1), &[16]).codes(15).is_err());
    }
}
