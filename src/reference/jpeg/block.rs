//! Decodes the coefficients of one block with the five procedures of Huffman-coded JPEG: the sequential procedure (ITU T.81,
//! F.2), and the first scans and refinement scans of DC and AC coefficients in progressive images (G.1.2).

use super::Flaw;
use super::bits::Bits;
use super::huffman::Codes;
use crate::image::ZIGZAG;
use kiln_numerics::idct::Block;

/// The spectral selection of a progressive scan and the lowest bit that it codes.
#[derive(Clone, Copy)]
pub(super) struct Band {
    pub(super) first: usize,
    pub(super) last: usize,
    /// The successive approximation bit position: values are multiples of 2 to this power.
    pub(super) low: u8,
}

/// The row-major index of a coefficient, from its zigzag index.
#[inline(always)]
fn at(coded: usize) -> usize {
    usize::from(ZIGZAG[coded & 63])
}

/// Decodes a block of a sequential scan. `block` must be all zeros.
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
                // ZRL: sixteen zeros.
                15 if k + 16 <= 64 => k += 16,
                _ => return Err(Flaw::Code),
            }
            continue;
        }
        k += run;
        if k > 63 {
            return Err(Flaw::Code);
        }
        // The value has at most 15 bits, so it fits.
        block[at(k)] = bits.signed(length)? as i16;
        k += 1;
    }
    Ok(())
}

/// Decodes a DC coefficient, which is coded as the difference from the previous one.
#[inline(always)]
fn difference(bits: &mut Bits<'_>, dc: &Codes, previous: &mut i16) -> Result<i16, Flaw> {
    let length = bits.symbol(dc)?;
    let value = i32::from(*previous) + bits.signed(length)?;
    *previous = i16::try_from(value).map_err(|_| Flaw::Code)?;
    Ok(*previous)
}

/// The coefficient for a value whose lower bits are not yet known.
#[inline(always)]
fn shifted(value: i32, low: u8) -> Result<i16, Flaw> {
    i16::try_from(value << low).map_err(|_| Flaw::Code)
}

/// Decodes the upper bits of a DC coefficient.
pub(super) fn dc_first(bits: &mut Bits<'_>, dc: &Codes, previous: &mut i16, low: u8, block: &mut Block) -> Result<(), Flaw> {
    block[0] = shifted(i32::from(difference(bits, dc, previous)?), low)?;
    Ok(())
}

/// Decodes one more bit of a DC coefficient.
pub(super) fn dc_refine(bits: &mut Bits<'_>, low: u8, block: &mut Block) -> Result<(), Flaw> {
    block[0] |= i16::from(bits.bit()?) << low;
    Ok(())
}

/// Decodes the length of an end-of-band run (EOBRUN): `2^run` plus the next `run` bits (G.1.2.2).
fn eob_run_length(bits: &mut Bits<'_>, run: usize) -> Result<u32, Flaw> {
    Ok((1 << run) + bits.number(run as u8)? as u32)
}

/// Decodes the upper bits of AC coefficients. `eob_run` is the number of blocks, including this one, without further upper bits.
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

/// Decodes one more bit of AC coefficients: a correction bit for each nonzero coefficient, and the positions of coefficients that
/// become nonzero (G.1.2.3).
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
        // Skip the zeros of the run; the next zero is the position of the new coefficient.
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

/// Moves a coefficient away from zero if the next bit is set.
#[inline(always)]
fn refine(bits: &mut Bits<'_>, coefficient: &mut i16, one: i16) -> Result<(), Flaw> {
    if bits.bit()? {
        // The coefficient is a multiple of twice `one`, so it cannot overflow.
        *coefficient = coefficient.wrapping_add(if *coefficient > 0 { one } else { -one });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::huffman::Table;
    use super::*;

    /// A code table in which the code of a symbol is its index in eight bits.
    fn codes(symbols: &[u8]) -> Codes {
        let counts = std::array::from_fn(|i| if i == 7 { symbols.len() as u8 } else { 0 });
        Table { counts: &counts, symbols }.codes(255).unwrap()
    }

    /// The symbols of the tests: EOB, ZRL, a value after 15 and after no zeros, an EOB run of 8 to 15 blocks, a value of two
    /// bits.
    const SYMBOLS: [u8; 6] = [0x00, 0xF0, 0xF1, 0x01, 0x30, 0x02];
    const WHOLE: Band = Band { first: 1, last: 63, low: 0 };

    fn whole(data: &[u8]) -> Result<Block, Flaw> {
        let mut block = [0; 64];
        let (dc, ac) = (codes(&[0, 8, 15]), codes(&SYMBOLS));
        sequential(&mut Bits::new(data), &dc, &ac, &mut 0, &mut block).map(|()| block)
    }

    #[test]
    fn a_block_is_a_dc_difference_and_runs_of_zeros() {
        // A DC difference of 8 bits, a value without zeros before it, another value 16 positions later, EOB.
        let block = whole(&[1, 200, 3, 0b1000_0001, 0b0000_0000, 0, 0]).unwrap();
        let set: Vec<(usize, i16)> = (0..64).map(|k| (k, block[at(k)])).filter(|&(_, v)| v != 0).collect();
        assert_eq!(set, [(0, 200), (1, 1), (17, -1)]);
        // A block filled by ZRL needs no EOB.
        assert_eq!(whole(&[0, 1, 1, 1, 0]), Ok([0; 64]));
    }

    #[test]
    fn runs_beyond_the_block_and_unknown_symbols_are_rejected() {
        for data in [&[0, 1, 1, 1, 1][..], &[0, 1, 1, 1, 2, 0x80], &[0, 4], &[9], &[0, 9]] {
            let padded = [data, &[0; 8]].concat();
            assert_eq!(whole(&padded), Err(Flaw::Code), "{data:?}");
        }
        for data in [&[][..], &[1], &[0], &[0, 1, 1], &[0, 5]] {
            assert_eq!(whole(data), Err(Flaw::Short), "{data:?}");
        }
        // Differences whose sum exceeds the range of a coefficient.
        let (dc, mut previous, mut block) = (codes(&[15]), 0, [0; 64]);
        let data = [0, 0xFF, 0, 0xFE, 0x01, 0xFF, 0, 0xFC, 0x03];
        let mut bits = Bits::new(&data);
        assert_eq!(dc_first(&mut bits, &dc, &mut previous, 0, &mut block), Ok(()));
        assert_eq!(previous, i16::MAX);
        assert_eq!(dc_first(&mut Bits::new(&data), &dc, &mut previous, 0, &mut block), Err(Flaw::Code));
        assert_eq!(dc_first(&mut Bits::new(&data), &dc, &mut 0, 1, &mut block), Err(Flaw::Code));
    }

    #[test]
    fn eob_runs_span_blocks_in_first_and_refinement_scans() {
        let (ac, mut eob_run, mut blocks) = (codes(&SYMBOLS), 0, [[0; 64]; 9]);
        let band = Band { low: 1, ..WHOLE };
        // The first block has a value and starts an EOB run of 8 + 0 blocks; the ninth has a value and a run of one.
        let data = [3, 0b1000_0010, 0b0000_0000, 0b0011_0000, 0b0000_0000, 0];
        let mut bits = Bits::new(&data);
        for block in &mut blocks {
            ac_first(&mut bits, &ac, &mut eob_run, band, block).unwrap();
        }
        assert_eq!((blocks[0][at(1)], blocks[8][at(1)], eob_run), (2, -2, 0));
        assert!(blocks[1..8].iter().all(|block| block == &[0; 64]));
        // The refinement has no new values: one EOB run covers all blocks, with a correction bit for the first and the ninth.
        let mut bits = Bits::new(&[4, 0b0011_1000, 0, 0]);
        for block in &mut blocks {
            ac_refine(&mut bits, &ac, &mut eob_run, WHOLE, block).unwrap();
        }
        assert_eq!((blocks[0][at(1)], blocks[8][at(1)], eob_run), (3, -3, 0));
    }

    #[test]
    fn invalid_refinements_are_rejected() {
        let ac = codes(&SYMBOLS);
        let refined = |data: &[u8], band| ac_refine(&mut Bits::new(data), &ac, &mut 0, band, &mut [0; 64]);
        // A new value of two bits, runs beyond the band, a code that does not exist.
        assert_eq!(refined(&[5, 0, 0], WHOLE), Err(Flaw::Code));
        assert_eq!(refined(&[1, 0, 0], Band { last: 15, ..WHOLE }), Err(Flaw::Code));
        assert_eq!(refined(&[2, 0, 0], Band { last: 15, ..WHOLE }), Err(Flaw::Code));
        assert_eq!(refined(&[9, 0, 0], WHOLE), Err(Flaw::Code));
        assert_eq!(refined(&[1, 0, 0, 0], Band { last: 16, ..WHOLE }), Ok(()));
    }
}
