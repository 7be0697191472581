//! The coefficients of one block, by the five procedures of Huffman-coded JPEG: all at once (ITU T.81, F.2), and first values and
//! refinements of DC and AC coefficients in progressive scans (G.1.2).

use super::Flaw;
use super::bits::Bits;
use super::huffman::Codes;
use super::tables::ZIGZAG;

/// The coefficients of a block in the order of rows.
pub(super) type Block = [i16; 64];

/// The coefficients a progressive scan has, and the bit it ends at.
#[derive(Clone, Copy)]
pub(super) struct Band {
    pub(super) first: usize,
    pub(super) last: usize,
    /// The successive approximation: values are multiples of 2 to this power.
    pub(super) low: u8,
}

/// The place of a coefficient in a block.
#[inline(always)]
fn at(coded: usize) -> usize {
    usize::from(ZIGZAG[coded & 63])
}

/// Decodes a block of a sequential scan into zeros.
#[inline(always)]
pub(super) fn sequential(bits: &mut Bits<'_>, dc: &Codes, ac: &Codes, previous: &mut i16, block: &mut Block) -> Result<(), Flaw> {
    block[0] = difference(bits, dc, previous)?;
    let mut k = 1;
    while k < 64 {
        let symbol = bits.symbol(ac)?;
        let (run, length) = (usize::from(symbol >> 4), symbol & 15);
        if length == 0 {
            match run {
                0 => break,
                // Sixteen zeros.
                15 if k + 16 <= 64 => k += 16,
                _ => return Err(Flaw::Code),
            }
            continue;
        }
        k += run;
        if k > 63 {
            return Err(Flaw::Code);
        }
        // Fifteen bits at most, so it fits.
        block[at(k)] = bits.signed(length)? as i16;
        k += 1;
    }
    Ok(())
}

/// A DC coefficient, coded as the difference from the one before it.
#[inline(always)]
fn difference(bits: &mut Bits<'_>, dc: &Codes, previous: &mut i16) -> Result<i16, Flaw> {
    let length = bits.symbol(dc)?;
    let value = i32::from(*previous) + bits.signed(length)?;
    *previous = i16::try_from(value).map_err(|_| Flaw::Code)?;
    Ok(*previous)
}

/// A value as the coefficient it is, before its lower bits are known.
#[inline(always)]
fn shifted(value: i32, low: u8) -> Result<i16, Flaw> {
    i16::try_from(value << low).map_err(|_| Flaw::Code)
}

/// The upper bits of a DC coefficient.
pub(super) fn dc_first(bits: &mut Bits<'_>, dc: &Codes, previous: &mut i16, low: u8, block: &mut Block) -> Result<(), Flaw> {
    block[0] = shifted(i32::from(difference(bits, dc, previous)?), low)?;
    Ok(())
}

/// One more bit of a DC coefficient.
pub(super) fn dc_refine(bits: &mut Bits<'_>, low: u8, block: &mut Block) -> Result<(), Flaw> {
    block[0] |= i16::from(bits.bit()?) << low;
    Ok(())
}

/// How many blocks end here: `2^run` and as many bits more (G.1.2.2).
fn eob_run_length(bits: &mut Bits<'_>, run: usize) -> Result<u32, Flaw> {
    Ok((1 << run) + bits.number(run as u8)? as u32)
}

/// The upper bits of AC coefficients. `eob_run` counts the blocks, from this one on, that have no more of them.
pub(super) fn ac_first(bits: &mut Bits<'_>, ac: &Codes, eob_run: &mut u32, band: Band, block: &mut Block) -> Result<(), Flaw> {
    let mut k = band.first;
    while *eob_run == 0 && k <= band.last {
        let symbol = bits.symbol(ac)?;
        let (run, length) = (usize::from(symbol >> 4), symbol & 15);
        match (run, length) {
            (15, 0) => {
                k += 16;
                if k > band.last + 1 {
                    return Err(Flaw::Code);
                }
            }
            (run, 0) => *eob_run = eob_run_length(bits, run)?,
            (run, length) => {
                k += run;
                if k > band.last {
                    return Err(Flaw::Code);
                }
                block[at(k)] = shifted(bits.signed(length)?, band.low)?;
                k += 1;
            }
        }
    }
    *eob_run = eob_run.saturating_sub(1);
    Ok(())
}

/// One more bit of AC coefficients: of each that is not zero its own, and the places of those that are no longer zero (G.1.2.3).
pub(super) fn ac_refine(bits: &mut Bits<'_>, ac: &Codes, eob_run: &mut u32, band: Band, block: &mut Block) -> Result<(), Flaw> {
    let one = 1i16 << band.low;
    let mut k = band.first;
    while *eob_run == 0 && k <= band.last {
        let symbol = bits.symbol(ac)?;
        let (mut zeros, new) = match (symbol >> 4, symbol & 15) {
            (15, 0) => (15, 0),
            (run, 0) => {
                *eob_run = eob_run_length(bits, usize::from(run))?;
                break;
            }
            (run, 1) => (run, if bits.bit()? { one } else { -one }),
            _ => return Err(Flaw::Code),
        };
        // Over the zeros of the run; the next zero is the place.
        loop {
            if k > band.last {
                return Err(Flaw::Code);
            }
            let coefficient = &mut block[at(k)];
            k += 1;
            if *coefficient != 0 {
                refine(bits, coefficient, one)?;
            } else if zeros == 0 {
                *coefficient = new;
                break;
            } else {
                zeros -= 1;
            }
        }
    }
    if *eob_run > 0 {
        for k in k..=band.last {
            let coefficient = &mut block[at(k)];
            if *coefficient != 0 {
                refine(bits, coefficient, one)?;
            }
        }
        *eob_run -= 1;
    }
    Ok(())
}

/// Moves a coefficient away from zero if the next bit says so.
#[inline(always)]
fn refine(bits: &mut Bits<'_>, coefficient: &mut i16, one: i16) -> Result<(), Flaw> {
    if bits.bit()? {
        // A coefficient is a multiple of twice `one` here, so there is room for one more.
        *coefficient = coefficient.wrapping_add(if *coefficient > 0 { one } else { -one });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::huffman::Table;
    use super::*;

    /// Codes of eight bits, which are the symbols' indices.
    fn codes(symbols: &[u8]) -> Codes {
        let counts = std::array::from_fn(|i| if i == 7 { symbols.len() as u8 } else { 0 });
        Table { counts: &counts, symbols }.codes(255).unwrap()
    }

    /// Symbols of the tests: end, sixteen zeros, a value after 15 and after no zeros, three zeros and no value, two bits.
    const SYMBOLS: [u8; 6] = [0x00, 0xF0, 0xF1, 0x01, 0x30, 0x02];
    const WHOLE: Band = Band { first: 1, last: 63, low: 0 };

    fn whole(data: &[u8]) -> Result<Block, Flaw> {
        let mut block = [0; 64];
        let (dc, ac) = (codes(&[0, 8, 15]), codes(&SYMBOLS));
        sequential(&mut Bits::new(data), &dc, &ac, &mut 0, &mut block).map(|()| block)
    }

    #[test]
    fn a_block_is_a_difference_and_runs_of_zeros() {
        // A difference of 8 bits, a value at once, one 16 later, the end.
        let block = whole(&[1, 200, 3, 0b1000_0001, 0b0000_0000, 0, 0]).unwrap();
        let set: Vec<(usize, i16)> = (0..64).map(|k| (k, block[at(k)])).filter(|&(_, v)| v != 0).collect();
        assert_eq!(set, [(0, 200), (1, 1), (17, -1)]);
        // Zeros up to the very end need no symbol of their own.
        assert_eq!(whole(&[0, 1, 1, 1, 0]), Ok([0; 64]));
    }

    #[test]
    fn runs_beyond_the_block_and_unknown_symbols_are_refused() {
        for data in [&[0, 1, 1, 1, 1][..], &[0, 1, 1, 1, 2, 0x80], &[0, 4], &[9], &[0, 9]] {
            let padded = [data, &[0; 8]].concat();
            assert_eq!(whole(&padded), Err(Flaw::Code), "{data:?}");
        }
        for data in [&[][..], &[1], &[0], &[0, 1, 1], &[0, 5]] {
            assert_eq!(whole(data), Err(Flaw::Short), "{data:?}");
        }
        // Differences that add up to more than a coefficient can be.
        let (dc, mut previous, mut block) = (codes(&[15]), 0, [0; 64]);
        let data = [0, 0xFF, 0, 0xFE, 0x01, 0xFF, 0, 0xFC, 0x03];
        let mut bits = Bits::new(&data);
        assert_eq!(dc_first(&mut bits, &dc, &mut previous, 0, &mut block), Ok(()));
        assert_eq!(previous, i16::MAX);
        assert_eq!(dc_first(&mut Bits::new(&data), &dc, &mut previous, 0, &mut block), Err(Flaw::Code));
        assert_eq!(dc_first(&mut Bits::new(&data), &dc, &mut 0, 1, &mut block), Err(Flaw::Code));
    }

    #[test]
    fn blocks_may_end_together_and_be_refined_together() {
        let (ac, mut eob_run, mut blocks) = (codes(&SYMBOLS), 0, [[0; 64]; 9]);
        let band = Band { low: 1, ..WHOLE };
        // A value in the first block; it and seven more end, for 8 + 0; the ninth has a value and ends alone.
        let data = [3, 0b1000_0010, 0b0000_0000, 0b0011_0000, 0b0000_0000, 0];
        let mut bits = Bits::new(&data);
        for block in &mut blocks {
            ac_first(&mut bits, &ac, &mut eob_run, band, block).unwrap();
        }
        assert_eq!((blocks[0][at(1)], blocks[8][at(1)], eob_run), (2, -2, 0));
        assert!(blocks[1..8].iter().all(|block| block == &[0; 64]));
        // One more bit each: nothing new, so all end at once, followed by the bit of the first and of the ninth block.
        let mut bits = Bits::new(&[4, 0b0011_1000, 0, 0]);
        for block in &mut blocks {
            ac_refine(&mut bits, &ac, &mut eob_run, WHOLE, block).unwrap();
        }
        assert_eq!((blocks[0][at(1)], blocks[8][at(1)], eob_run), (3, -3, 0));
    }

    #[test]
    fn refinements_that_make_no_sense_are_refused() {
        let ac = codes(&SYMBOLS);
        let refined = |data: &[u8], band| ac_refine(&mut Bits::new(data), &ac, &mut 0, band, &mut [0; 64]);
        // A new value of two bits, a run beyond the band, a code that is none.
        assert_eq!(refined(&[5, 0, 0], WHOLE), Err(Flaw::Code));
        assert_eq!(refined(&[1, 0, 0], Band { last: 15, ..WHOLE }), Err(Flaw::Code));
        assert_eq!(refined(&[2, 0, 0], Band { last: 15, ..WHOLE }), Err(Flaw::Code));
        assert_eq!(refined(&[9, 0, 0], WHOLE), Err(Flaw::Code));
        assert_eq!(refined(&[1, 0, 0, 0], Band { last: 16, ..WHOLE }), Ok(()));
    }
}
