//! The bit reader of entropy-coded data, between one marker and the next (ITU T.81, B.1.1.5 and F.2.2.5).
//!
//! Missing bits are never filled in: a code that would need them is a [`Flaw`].

use super::Flaw;
use super::huffman::Codes;

/// A position in the entropy-coded data of a scan.
pub(super) struct Bits<'a> {
    data: &'a [u8],
    at: usize,
    /// The bit buffer. Its top `count` bits are valid. Lower bits may already be set, but are not counted yet.
    ahead: u64,
    count: u32,
}

impl<'a> Bits<'a> {
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0, ahead: 0, count: 0 }
    }

    /// Refills the buffer to more than 56 bits, or up to the next marker.
    fn fill(&mut self) {
        const HIGH: u64 = 0x8080_8080_8080_8080;
        const ONES: u64 = 0x0101_0101_0101_0101;
        if let Some(bytes) = self.data.get(self.at..).and_then(|rest| rest.first_chunk()) {
            let word = u64::from_be_bytes(*bytes);
            // The word has no byte FF if and only if its complement has no zero byte.
            if (!word).wrapping_sub(ONES) & word & HIGH == 0 {
                self.ahead |= word >> self.count;
                let bytes = (63 - self.count) / 8;
                self.at += bytes as usize;
                self.count += bytes * 8;
                return;
            }
        }
        while self.count <= 56 {
            let (byte, length) = match self.data.get(self.at..) {
                // A data byte FF is followed by a stuffed zero; FF followed by anything else is a marker.
                Some([0xFF, 0, ..]) => (0xFF, 2),
                Some([0xFF, ..] | []) | None => return,
                Some([byte, ..]) => (*byte, 1),
            };
            self.ahead |= u64::from(byte) << (56 - self.count);
            self.count += 8;
            self.at += length;
        }
    }

    /// Consumes `length` bits (1 to 16).
    fn take(&mut self, length: u32) -> Result<(), Flaw> {
        self.count = self.count.checked_sub(length).ok_or(Flaw::Short)?;
        self.ahead <<= length;
        Ok(())
    }

    /// Decodes the next symbol (DECODE of F.2.2.3). Afterwards at least 15 more bits are buffered, if the data has them.
    #[inline(always)]
    pub(super) fn symbol(&mut self, codes: &Codes) -> Result<u8, Flaw> {
        if self.count < 32 {
            self.fill();
        }
        let (symbol, length) =
            codes.look_up((self.ahead >> 48) as u16).ok_or(if self.count < 16 { Flaw::Short } else { Flaw::Code })?;
        self.take(length)?;
        Ok(symbol)
    }

    /// The next `length` bits, at most 15, as a number (RECEIVE of F.2.2.4). They must follow a symbol, because decoding the
    /// symbol has buffered them.
    #[inline(always)]
    pub(super) fn number(&mut self, length: u8) -> Result<i32, Flaw> {
        if length == 0 {
            return Ok(0);
        }
        let number = (self.ahead >> (64 - u32::from(length))) as i32;
        self.take(u32::from(length))?;
        Ok(number)
    }

    /// The next `length` bits as a signed number (EXTEND of F.2.2.1): a number whose top bit is zero is negative.
    #[inline(always)]
    pub(super) fn signed(&mut self, length: u8) -> Result<i32, Flaw> {
        let number = self.number(length)?;
        let limit = (1 << length) >> 1;
        Ok(if number < limit { number - 2 * limit + 1 } else { number })
    }

    /// The next bit.
    #[inline(always)]
    pub(super) fn bit(&mut self) -> Result<bool, Flaw> {
        if self.count == 0 {
            self.fill();
        }
        let bit = self.ahead >> 63 == 1;
        self.take(1)?;
        Ok(bit)
    }

    /// Skips a restart marker. It must follow the padding of the current byte and have this number.
    pub(super) fn restart(&mut self, number: u8) -> Result<(), Flaw> {
        self.fill();
        let rest = self.data.get(self.at..).unwrap_or_default();
        let filling = rest.iter().take_while(|&&byte| byte == 0xFF).count();
        if rest.is_empty() {
            return Err(Flaw::Short);
        }
        if self.count >= 8 || filling == 0 || rest.get(filling) != Some(&(0xD0 | number)) {
            return Err(Flaw::Restart);
        }
        (self.at, self.ahead, self.count) = (self.at + filling + 1, 0, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuffed_zeros_are_not_data_and_markers_end_it() {
        let mut bits = Bits::new(&[0xA5, 0xFF, 0, 0x0F, 0xFF, 0xD0, 0x80, 0xFF, 0xFF, 0xD1, 0x40]);
        let read: u32 = (0..24).fold(0, |sum, _| sum << 1 | u32::from(bits.bit().unwrap()));
        assert_eq!(read, 0xA5_FF_0F);
        assert_eq!(bits.bit(), Err(Flaw::Short));
        assert_eq!(bits.restart(1), Err(Flaw::Restart));
        bits.restart(0).unwrap();
        assert_eq!(bits.bit(), Ok(true));
        // The rest of a byte is padding, and fill bytes FF may precede a marker. A whole byte of data is an error.
        bits.restart(1).unwrap();
        assert_eq!((bits.bit(), bits.bit()), (Ok(false), Ok(true)));
        assert_eq!(Bits::new(&[0x12, 0xFF, 0xD0]).restart(0), Err(Flaw::Restart));
        assert_eq!(Bits::new(&[]).restart(0), Err(Flaw::Short));
    }

    #[test]
    fn words_and_single_bytes_read_the_same_bits() {
        // The reader takes words of eight bytes, but single bytes around an FF. The data has both at all relative positions.
        let plain: Vec<u8> = (0..200u32).map(|i| if i % 23 == 7 || i % 41 < 2 { 0xFF } else { (i * 89 + 3) as u8 }).collect();
        let coded: Vec<u8> = plain.iter().flat_map(|&b| if b == 0xFF { vec![b, 0] } else { vec![b] }).collect();
        for length in 1..=15u8 {
            let mut bits = Bits::new(&coded);
            for i in 0..plain.len() * 8 / usize::from(length) {
                let at = i * usize::from(length);
                let want = (at..at + usize::from(length)).fold(0, |sum, b| sum << 1 | i32::from(plain[b / 8] >> (7 - b % 8) & 1));
                bits.fill();
                assert_eq!(bits.number(length), Ok(want), "{length} bits at {at}");
            }
        }
    }

    #[test]
    fn numbers_have_signs() {
        let signed = |byte: u8, length| {
            let data = [byte];
            let mut bits = Bits::new(&data);
            bits.fill();
            bits.signed(length)
        };
        assert_eq!([signed(0, 1), signed(0x80, 1), signed(0, 3), signed(0x60, 3)], [Ok(-1), Ok(1), Ok(-7), Ok(-4)]);
        assert_eq!([signed(0x80, 3), signed(0xE0, 3), signed(0xFE, 0), signed(0, 9)], [Ok(4), Ok(7), Ok(0), Err(Flaw::Short)]);
    }
}
