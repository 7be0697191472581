//! Where the fragments of `mma.sync` hold the elements of a 16x8 product: the lane, the register and the bits.
//!
//! All forms have one layout, by bytes. A register has 32 bits of consecutive elements along K. The four lanes of a quad have consecutive
//! registers of one row. The registers of A go eight rows down first, and then farther along K.

use crate::backend::cuda::{Fragments, LANES};
use crate::tensor::DType;

/// Rows and columns of a product.
pub const ROWS: usize = 16;
pub const COLS: usize = 8;
/// The first word of A, B, the scales and the accumulators in a lane.
const A: usize = 0;
const B: usize = 4;
const SCALES: usize = 6;
const D: usize = 8;
/// Blocks along K that have a scale.
pub const BLOCKS: usize = 4;

/// A place in the registers of a warp: the lane, the word in the lane, and its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub lane: usize,
    word: usize,
    bit: usize,
    bits: usize,
}

impl Place {
    /// The number of the register in its operand.
    pub const fn register(self) -> usize {
        match self.word {
            word @ A..B => word - A,
            word @ B..SCALES => word - B,
            word @ SCALES..D => word - SCALES,
            word => word - D,
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { lane, bit, bits, .. } = *self;
        write!(f, "lane {lane}")?;
        // A lane has one word of scales for each operand.
        if !(SCALES..D).contains(&self.word) {
            write!(f, ", register {}", self.register())?;
        }
        if bits == 32 { Ok(()) } else { write!(f, ", bits {bit} to {}", bit + bits - 1) }
    }
}

/// The layout of operands of one type.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The type of elements.
    pub dtype: DType,
}

impl Layout {
    /// Elements along K.
    pub const fn k(self) -> usize {
        self.dtype.elements(32)
    }

    /// The place of the element at this K, in a word of a quad's lanes.
    const fn place(self, quad: usize, word: usize, k: usize) -> Place {
        let (bits, per_register) = (self.dtype.bits(), self.dtype.elements(4));
        Place { lane: 4 * quad + k / per_register % 4, word, bit: k % per_register * bits, bits }
    }

    /// Half of K: the elements in one register of each lane of a quad.
    const fn half(self) -> usize {
        self.k() / 2
    }

    /// The place of an element of A.
    pub const fn a(self, row: usize, k: usize) -> Place {
        self.place(row % 8, A + row / 8 + 2 * (k / self.half()), k)
    }

    /// The place of an element of B.
    pub const fn b(self, col: usize, k: usize) -> Place {
        self.place(col, B + k / self.half(), k)
    }
}

/// The place of an element of the result.
pub const fn d(row: usize, col: usize) -> Place {
    Place { lane: 4 * (row % 8) + col / 2, word: D + 2 * (row / 8) + col % 2, bit: 0, bits: 32 }
}

/// The place of the scale of a block of A, with this selector.
pub const fn scale_a(selector: u32, row: usize, block: usize) -> Place {
    Place { lane: 4 * (row % 8) + 2 * selector as usize + row / 8, word: SCALES, bit: 8 * block, bits: 8 }
}

/// The place of the scale of a block of B, with this selector.
pub const fn scale_b(selector: u32, col: usize, block: usize) -> Place {
    Place { lane: 4 * col + selector as usize, word: SCALES + 1, bit: 8 * block, bits: 8 }
}

/// Fragments of zeros, with scales of 448 in all lanes, so that reading scales of an unselected lane shows in the result.
pub const EMPTY: Fragments = {
    let mut lane = [0; D + 4];
    (lane[SCALES], lane[SCALES + 1]) = (0x7e7e_7e7e, 0x7e7e_7e7e);
    [lane; LANES]
};

/// Writes a code to the bits of a place.
pub fn set(fragments: &mut Fragments, place: Place, code: u32) {
    let Place { lane, word, bit, bits } = place;
    let mask = (u32::MAX >> (32 - bits)) << bit;
    let register = &mut fragments[lane][word];
    *register = *register & !mask | code << bit & mask;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const TYPES: [DType; 3] = [DType::Bf16, DType::E4m3, DType::E2m1];

    fn pairs(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..rows).flat_map(move |row| (0..cols).map(move |col| (row, col)))
    }

    /// Checks that the places cover all bits of the registers, each once.
    fn covers(places: impl Iterator<Item = Place>, registers: usize) {
        let (mut seen, mut bits) = (BTreeSet::new(), 0);
        for place in places {
            assert!(place.lane < LANES && place.register() < registers && place.bit + place.bits <= 32, "{place:?}");
            assert!(seen.insert(place), "{place:?} twice");
            bits += place.bits;
        }
        assert_eq!(bits, registers * LANES * 32);
    }

    #[test]
    fn layouts_are_bijections() {
        for dtype in TYPES {
            let layout = Layout { dtype };
            covers(pairs(ROWS, layout.k()).map(|(row, k)| layout.a(row, k)), 4);
            covers(pairs(COLS, layout.k()).map(|(col, k)| layout.b(col, k)), 2);
        }
        covers(pairs(ROWS, COLS).map(|(row, col)| d(row, col)), 4);
        // Each selector takes other lanes: the two selectors of A cover all lanes, and so do the four of B.
        let a = (0..2).flat_map(|s| pairs(ROWS, BLOCKS).map(move |(row, block)| scale_a(s, row, block)));
        covers(a, 1);
        let b: BTreeSet<Place> =
            (0..4).flat_map(|s| pairs(COLS, BLOCKS).map(move |(col, block)| scale_b(s, col, block))).collect();
        assert_eq!(b.len(), LANES * BLOCKS);
    }

    /// The PTX manual's figures of m16n8k16, m16n8k32 and m16n8k64: (lane, register, bit) of some elements.
    #[test]
    fn places_are_those_of_the_manual() {
        let of = |place: Place| (place.lane, place.register(), place.bit);
        let [bf16, e4m3, e2m1] = TYPES.map(|dtype| Layout { dtype });
        assert_eq!([bf16.k(), e4m3.k(), e2m1.k()], [16, 32, 64]);
        assert_eq!(
            [bf16.a(0, 0), bf16.a(9, 3), bf16.a(7, 15), bf16.a(15, 8)].map(of),
            [(0, 0, 0), (5, 1, 16), (31, 2, 16), (28, 3, 0)]
        );
        assert_eq!([bf16.b(0, 1), bf16.b(7, 14), bf16.b(3, 9)].map(of), [(0, 0, 16), (31, 1, 0), (12, 1, 16)]);
        assert_eq!([e4m3.a(0, 5), e4m3.a(8, 16), e4m3.a(15, 31)].map(of), [(1, 0, 8), (0, 3, 0), (31, 3, 24)]);
        assert_eq!([e4m3.b(2, 0), e4m3.b(2, 30)].map(of), [(8, 0, 0), (11, 1, 16)]);
        // a_i: row g + 8 (i % 2), k = 8 t + 0..7 + 32 (i / 2); b_i: column g, k = 8 t + 0..7 + 32 i.
        assert_eq!([e2m1.a(3, 17), e2m1.a(11, 39), e2m1.a(12, 62)].map(of), [(14, 0, 4), (12, 3, 28), (19, 3, 24)]);
        assert_eq!([e2m1.b(5, 8), e2m1.b(5, 63)].map(of), [(21, 0, 0), (23, 1, 28)]);
        assert_eq!([d(0, 1), d(8, 0), d(15, 7)].map(of), [(0, 1, 0), (0, 2, 0), (31, 3, 0)]);
        assert_eq!([scale_a(0, 3, 0), scale_a(1, 11, 2)].map(of), [(12, 0, 0), (15, 0, 16)]);
        assert_eq!([scale_b(0, 5, 1), scale_b(3, 5, 3)].map(|place| (place.lane, place.bit)), [(20, 8), (23, 24)]);
    }

    #[test]
    fn a_place_is_set_alone() {
        let mut fragments = EMPTY;
        let layout = Layout { dtype: DType::E2m1 };
        set(&mut fragments, layout.a(3, 17), 0xf);
        set(&mut fragments, scale_b(1, 2, 1), 0x38);
        assert_eq!((fragments[14][0], fragments[9][7]), (0xf0, 0x7e7e_387e));
        set(&mut fragments, layout.a(3, 17), 0);
        set(&mut fragments, scale_b(1, 2, 1), 0x7e);
        assert_eq!(fragments, EMPTY);
    }
}
