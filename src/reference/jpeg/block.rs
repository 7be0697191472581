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
fn end_of_bands(bits: &mut Bits<'_>, run: usize) -> Result<u32, Flaw> {
    Ok((1 << run) + bits.number(run as u8)? as u32)
}

/// The upper bits of AC coefficients. `ends` counts the blocks, from this one on, that have no more of them.
pub(super) fn ac_first(bits: &mut Bits<'_>, ac: &Codes, ends: &mut u32, band: Band, block: &mut Block) -> Result<(), Flaw> {
    let mut k = band.first;
    while *ends == 0 && k <= band.last {
        let symbol = bits.symbol(ac)?;
        let (run, length) = (usize::from(symbol >> 4), symbol & 15);
        match (run, length) {
            (15, 0) => {
                k += 16;
                if k > band.last + 1 {
                    return Err(Flaw::Code);
                }
            }
            (run, 0) => *ends = end_of_bands(bits, run)?,
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
    *ends = ends.saturating_sub(1);
    Ok(())
}

/// One more bit of AC coefficients: of each that is not zero its own, and the places of those that are no longer zero (G.1.2.3).
pub(super) fn ac_refine(bits: &mut Bits<'_>, ac: &Codes, ends: &mut u32, band: Band, block: &mut Block) -> Result<(), Flaw> {
    let one = 1i16 << band.low;
    let mut k = band.first;
    while *ends == 0 && k <= band.last {
        let symbol = bits.symbol(ac)?;
        let (mut zeros, new) = match (symbol >> 4, symbol & 15) {
            (15, 0) => (15, 0),
            (run, 0) => {
                *ends = end_of_bands(bits, usize::from(run))?;
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
    if *ends > 0 {
        for k in k..=band.last {
            let coefficient = &mut block[at(k)];
            if *coefficient != 0 {
                refine(bits, coefficient, one)?;
            }
        }
        *ends -= 1;
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
