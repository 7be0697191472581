//! Tensors, from the crate of number formats, and the allocation of working memory. An [`Arena`] only computes offsets, so a dry run and
//! the real run give the same ones.

pub use kiln_numerics::tensor::*;

use self::formats::Format;
use crate::error::{Error, Result};
use std::ops::Range;

/// A bump allocator of offsets. It holds no memory: [`Arena::peak`] is the size that a backend has to reserve.
#[derive(Clone, Debug)]
pub struct Arena {
    region: Region,
    top: u64,
    peak: u64,
}

/// Alignment of every allocation, which suffices for vector loads, shared-memory swizzles and TMA tensor maps.
pub const ALIGN: u64 = 1024;

// Sizes come from files and flags. Overflow is checked here, so that [`Tensor`] can do unchecked arithmetic on the sizes of allocated
// tensors.
#[deny(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
impl Arena {
    /// An empty arena over one region.
    pub fn new(region: Region) -> Self {
        Self::starting_at(region, 0)
    }

    /// An arena that starts at `offset`, such as the end of another one.
    pub fn starting_at(region: Region, offset: u64) -> Self {
        Self { region, top: offset, peak: offset }
    }

    /// Allocates a contiguous matrix of plain values.
    pub fn alloc(&mut self, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        self.alloc_stored(rows, cols, Stored::plain(dtype))
    }

    /// Allocates a contiguous matrix and its format's scales.
    pub fn alloc_stored(&mut self, rows: usize, cols: usize, stored: Stored) -> Result<Tensor> {
        let Format { block, block_bytes, .. } = stored.dtype.format();
        let bits = (rows as u64).checked_mul(cols as u64).and_then(|n| {
            let bits = u128::from(n).checked_mul(8)?.checked_mul(*block_bytes as u128)?.div_ceil(*block as u128);
            u64::try_from(bits).ok()
        });
        let offset = self.take(bits.map(|bits| bits.div_ceil(8)))?;
        let scaling = match stored.scales {
            Scales::Unscaled => Scaling::Unscaled,
            Scales::Tensor(scale) => Scaling::Tensor(scale),
            Scales::Rows => Scaling::Rows(self.take((rows as u64).checked_mul(4))?),
            Scales::Blocks16(tensor) => {
                let down = rows.div_ceil(nvfp4::TILE_ROWS) as u64;
                let tiles = down.checked_mul(nvfp4::tiles_along(cols) as u64);
                let scales = self.take(tiles.and_then(|tiles| tiles.checked_mul(nvfp4::TILE_BYTES as u64)))?;
                Scaling::Blocks16 { scales, tensor }
            }
        };
        Ok(Tensor { region: self.region, dtype: stored.dtype, offset, rows, cols, stride: cols, scaling })
    }

    /// Allocates consecutive row ranges of one matrix, each with its own format. The ranges are adjacent in memory if their formats share
    /// an element type and have no scales in memory.
    pub fn alloc_ranges(&mut self, ranges: &[(usize, Stored)], cols: usize) -> Result<Vec<Tensor>> {
        let adjacent = |stored: &Stored| matches!(stored.scales, Scales::Unscaled | Scales::Tensor(_));
        let dtype = ranges.first().map(|(_, stored)| stored.dtype);
        if !ranges.iter().all(|(_, stored)| adjacent(stored) && Some(stored.dtype) == dtype) {
            return ranges.iter().map(|&(rows, stored)| self.alloc_stored(rows, cols, stored)).collect();
        }
        let Some(dtype) = dtype else { return Ok(Vec::new()) };
        let rows = ranges.iter().try_fold(0_usize, |sum, (rows, _)| sum.checked_add(*rows));
        let rows = rows.ok_or(Error::Memory { need: u64::MAX })?;
        let mut rest = self.alloc(rows, cols, dtype)?;
        let mut all = Vec::with_capacity(ranges.len());
        for &(rows, stored) in ranges {
            let scaling = if let Scales::Tensor(scale) = stored.scales { Scaling::Tensor(scale) } else { Scaling::Unscaled };
            all.push(Tensor { scaling, ..rest.rows(0..rows) });
            rest = rest.rows(rows..rest.rows);
        }
        Ok(all)
    }

    /// Returns the offset of newly allocated bytes. `None` means more bytes than can be counted.
    fn take(&mut self, bytes: Option<u64>) -> Result<u64> {
        let end = bytes.and_then(|b| self.top.checked_add(b)).and_then(|e| e.checked_next_multiple_of(ALIGN));
        let end = end.ok_or(Error::Memory { need: u64::MAX })?;
        let offset = self.top;
        self.top = end;
        self.peak = self.peak.max(end);
        Ok(offset)
    }

    /// Raises the top to `mark` if it is lower.
    pub fn extend_to(&mut self, mark: u64) {
        self.top = self.top.max(mark);
        self.peak = self.peak.max(mark);
    }

    /// The current top, to return to with [`Arena::reset`].
    pub fn mark(&self) -> u64 {
        self.top
    }

    /// Frees everything allocated since the mark and returns the freed byte range.
    pub fn reset(&mut self, mark: u64) -> Range<u64> {
        let freed = mark..self.top;
        self.top = mark;
        freed
    }

    /// Peak use in bytes.
    pub fn peak(&self) -> u64 {
        self.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_one_buffer_overlap_only_where_they_share_columns() {
        let mut arena = Arena::new(Region::Arena);
        let joined = arena.alloc(10, 1024, DType::Bf16).unwrap();
        let (left, right) = (joined.cols(0..256), joined.cols(256..1024));
        assert!(!left.overlaps(right) && !right.overlaps(left));
        assert!(joined.cols(0..257).overlaps(right));
        assert!(left.overlaps(joined));
        assert!(!joined.rows(0..5).overlaps(joined.rows(5..10)));
        assert!(joined.rows(0..6).cols(0..8).overlaps(joined.rows(5..10)));
        assert!(!joined.rows(0..6).cols(0..8).overlaps(joined.rows(5..10).cols(8..16)));
        assert!(!joined.rows(5..10).cols(0..8).overlaps(joined.rows(0..6).cols(8..16)));
    }

    #[test]
    fn arena_keeps_its_peak_and_reuses_freed_space() {
        let mut arena = Arena::new(Region::Arena);
        let a = arena.alloc(1, 1, DType::F32).unwrap();
        let mark = arena.mark();
        let b = arena.alloc(100, 100, DType::F32).unwrap();
        assert_eq!((a.offset, b.offset), (0, ALIGN));
        assert_eq!(arena.reset(mark), ALIGN..ALIGN + 40_960);
        assert_eq!(arena.alloc(1, 1, DType::F32).unwrap().offset, ALIGN);
        assert_eq!(arena.peak(), ALIGN + 40_960);
        assert!(arena.alloc(usize::MAX, usize::MAX, DType::F32).is_err());
    }

    fn scale(value: f32) -> Scale {
        Scale::new(value).unwrap()
    }

    /// An arena with an earlier allocation.
    fn used() -> Arena {
        Arena::starting_at(Region::Weights, 7 * ALIGN)
    }

    #[test]
    fn formats_take_the_bytes_of_their_elements_and_scales() {
        // Elements, then scales, each aligned: rows, columns, format, bytes of the elements, bytes of the scales.
        let cases = [
            (3, 1000, Stored::plain(DType::F32), 12_000, 0),
            (3, 1000, Stored::plain(DType::E5m2), 3000, 0),
            (3, 1000, Stored::fp8(scale(0.5)), 3000, 0),
            (3, 1000, Stored { dtype: DType::E4m3, scales: Scales::Rows }, 3000, 12),
            (1, 16, Stored::nvfp4(scale(0.5)), 8, 512),
            (128, 64, Stored::nvfp4(scale(0.5)), 4096, 512),
            (129, 80, Stored::nvfp4(scale(0.5)), 5160, 2048),
            (27_648, 3072, Stored::nvfp4(scale(0.5)), 42_467_328, 5_308_416),
            (0, 64, Stored::nvfp4(scale(0.5)), 0, 0),
        ];
        for (rows, cols, stored, elements, scales) in cases {
            let mut arena = used();
            let tensor = arena.alloc_stored(rows, cols, stored).unwrap();
            assert_eq!((tensor.rows, tensor.cols, tensor.stride, tensor.region), (rows, cols, cols, Region::Weights));
            assert_eq!(tensor.stored(), stored);
            assert_eq!(tensor.extent(), 7 * ALIGN..7 * ALIGN + elements, "{tensor:?}");
            let (at, range) = ((7 * ALIGN + elements).next_multiple_of(ALIGN), tensor.scale_extent());
            assert_eq!(range.end - range.start, scales, "{tensor:?}");
            if scales > 0 {
                assert_eq!(range.start, at, "{tensor:?}");
            }
            assert_eq!(arena.peak(), (at + scales).next_multiple_of(ALIGN), "{tensor:?}");
        }
    }

    #[test]
    fn sizes_that_cannot_be_counted_are_refused() {
        const MOST: usize = usize::MAX;
        let e4m3 = Stored::plain(DType::E4m3);
        let by_rows = Stored { scales: Scales::Rows, ..e4m3 };
        let (fp4, start) = (Stored::nvfp4(Scale::ONE), 0);
        // Too many elements, too many bytes; then the elements could be counted, but not the scales or the end of them.
        let cases =
            [(MOST, 2, e4m3, start), (MOST / 8, 2, e4m3, start), (MOST / 2, 0, by_rows, start), (MOST / 4, 1, fp4, start)];
        let at_the_end = [(1, 1, e4m3, u64::MAX - ALIGN + 1), (1, 1, by_rows, u64::MAX - 2 * ALIGN + 1)];
        for (rows, cols, stored, start) in cases.into_iter().chain(at_the_end) {
            let result = Arena::starting_at(Region::Arena, start).alloc_stored(rows, cols, stored);
            assert!(matches!(result, Err(Error::Memory { need: u64::MAX })), "{rows}x{cols} {stored:?}: {result:?}");
        }
        assert!(Arena::new(Region::Arena).alloc_ranges(&[(MOST, e4m3), (1, e4m3)], 0).is_err());
    }

    #[test]
    fn slices_keep_the_scales_of_their_elements() {
        let mut arena = used();
        let one = arena.alloc_stored(300, 200, Stored::fp8(scale(0.25))).unwrap();
        let part = one.rows(10..30).cols(50..70);
        assert_eq!((part.offset, part.rows, part.cols, part.stride), (one.offset + 10 * 200 + 50, 20, 20, 200));
        assert_eq!((part.scaling, part.scale_extent()), (Scaling::Tensor(scale(0.25)), 0..0));
        assert_eq!(part.extent(), part.offset..part.offset + 19 * 200 + 20);

        let by_rows = arena.alloc_stored(300, 200, Stored { dtype: DType::E4m3, scales: Scales::Rows }).unwrap();
        let first = by_rows.scale_extent().start;
        assert_eq!(by_rows.rows(10..30).cols(50..70).rows(3..7).scale_extent(), first + 13 * 4..first + 17 * 4);

        // Tiles of 128 rows by 64 columns, five to a row of them.
        let blocks = arena.alloc_stored(300, 320, Stored::nvfp4(scale(0.5))).unwrap();
        let first = blocks.scale_extent().start;
        assert_eq!(blocks.scale_extent(), first..first + 15 * 512);
        let part = blocks.rows(128..300).cols(64..240);
        assert_eq!((part.offset, part.stride), (blocks.offset + (128 * 320 + 64) / 2, 320));
        assert_eq!(part.extent(), part.offset..part.offset + (171 * 320 + 176) / 2);
        // From the second tile of the second row of tiles to the fourth of the third, including the tiles in between.
        assert_eq!(part.scaling, Scaling::Blocks16 { scales: first + 6 * 512, tensor: scale(0.5) });
        assert_eq!(part.scale_extent(), first + 6 * 512..first + 14 * 512);
        assert_eq!(part.rows(128..172).cols(128..176), blocks.rows(256..300).cols(192..240));
        assert_eq!(part.rows(0..0).scale_extent(), first + 6 * 512..first + 6 * 512);
    }

    #[test]
    fn slices_inside_a_tile_are_refused() {
        let tensor = used().alloc_stored(256, 128, Stored::nvfp4(Scale::ONE)).unwrap();
        let refused = |slice: fn(Tensor) -> Tensor| std::panic::catch_unwind(|| slice(tensor)).is_err();
        assert!(refused(|t| t.rows(1..128)) && refused(|t| t.rows(64..128)) && refused(|t| t.rows(127..256)));
        assert!(refused(|t| t.cols(16..64)) && refused(|t| t.cols(32..128)) && refused(|t| t.cols(2..64)));
        assert!(refused(|t| t.rows(128..257)) && refused(|t| t.cols(64..129)));
        // The end may lie inside a tile.
        assert!(!refused(|t| t.rows(128..129).cols(64..80)));
    }

    #[test]
    fn a_quantized_tensor_is_bytes_and_tiles() {
        let mut arena = used();
        let fp8 = arena.alloc_stored(30, 200, Stored::fp8(scale(0.25))).unwrap().rows(1..30).cols(8..20);
        let bytes: Vec<Tensor> = fp8.as_bytes().collect();
        assert_eq!(bytes, [Tensor { dtype: DType::U8, scaling: Scaling::Unscaled, ..fp8 }]);

        let fp4 = arena.alloc_stored(300, 320, Stored::nvfp4(scale(0.5))).unwrap().rows(128..300).cols(64..240);
        let (region, scales) = (Region::Weights, fp4.scale_extent());
        let plain = |offset, rows, cols, stride| Tensor {
            region,
            dtype: DType::U8,
            offset,
            rows,
            cols,
            stride,
            scaling: Scaling::Unscaled,
        };
        let bytes: Vec<Tensor> = fp4.as_bytes().collect();
        assert_eq!(bytes, [plain(fp4.offset, 172, 88, 160), plain(scales.start, 2, 3 * 512, 5 * 512)]);
        // The tiles end at the end of the scales.
        assert_eq!(bytes[1].extent(), scales);
    }

    #[test]
    fn quantized_slices_overlap_only_where_they_share_elements() {
        let mut arena = Arena::new(Region::Arena);
        let fp4 = arena.alloc_stored(256, 256, Stored::nvfp4(Scale::ONE)).unwrap();
        let fp8 = arena.alloc_stored(256, 128, Stored::fp8(Scale::ONE)).unwrap();
        assert!(!fp4.overlaps(fp8) && !fp8.overlaps(fp4));
        assert!(!fp4.cols(0..64).overlaps(fp4.cols(64..256)) && fp4.cols(0..66).overlaps(fp4.cols(64..256)));
        assert!(!fp4.rows(0..128).overlaps(fp4.rows(128..256)) && fp4.rows(0..129).overlaps(fp4.rows(128..256)));
        assert!(!fp8.cols(0..3).overlaps(fp8.cols(3..128)) && fp8.cols(0..4).overlaps(fp8.cols(3..128)));
        // Views the same bytes as elements of another size: row lengths are equal, so columns can be compared.
        let same = Tensor { dtype: DType::U8, cols: 64, stride: 128, scaling: Scaling::Unscaled, ..fp4 };
        assert!(same.overlaps(fp4.cols(64..128)) && !same.overlaps(fp4.cols(128..256)));
    }

    #[test]
    fn ranges_of_rows_are_adjacent_if_their_bytes_can_be() {
        let rows = |tensors: &[Tensor]| tensors.iter().map(|tensor| (tensor.offset, tensor.rows)).collect::<Vec<_>>();
        let (fp8, other, bf16) = (Stored::fp8(scale(0.5)), Stored::fp8(scale(0.25)), Stored::plain(DType::Bf16));

        // One dtype, but separate scales: one matrix, whose rows are not aligned one by one.
        let mut arena = used();
        let ranges = arena.alloc_ranges(&[(3, fp8), (0, other), (5, other), (2, Stored::plain(DType::E4m3))], 100).unwrap();
        let start = 7 * ALIGN;
        assert_eq!(rows(&ranges), [(start, 3), (start + 300, 0), (start + 300, 5), (start + 800, 2)]);
        let stored: Vec<Stored> = ranges.iter().map(|tensor| tensor.stored()).collect();
        assert_eq!(stored, [fp8, other, other, Stored::plain(DType::E4m3)]);
        assert_eq!(arena.peak(), start + ALIGN);
        let plain = used().alloc_ranges(&[(3, bf16), (5, bf16)], 100).unwrap();
        let whole = used().alloc(8, 100, DType::Bf16).unwrap();
        assert_eq!(plain, [whole.rows(0..3), whole.rows(3..8)]);

        // Dtypes of different sizes, and scales in memory: ranges are allocated one after the other.
        let fp4 = Stored::nvfp4(Scale::ONE);
        for formats in [[fp8, bf16], [fp4, fp4], [fp4, fp8], [bf16, Stored { dtype: DType::E4m3, scales: Scales::Rows }]] {
            let (mut arena, mut single) = (used(), used());
            let ranges = arena.alloc_ranges(&[(130, formats[0]), (5, formats[1])], 160).unwrap();
            assert_eq!(ranges[0], single.alloc_stored(130, 160, formats[0]).unwrap(), "{formats:?}");
            assert_eq!(ranges[1], single.alloc_stored(5, 160, formats[1]).unwrap(), "{formats:?}");
            assert_eq!((ranges.len(), arena.peak()), (2, single.peak()), "{formats:?}");
        }
        assert_eq!(used().alloc_ranges(&[], 100).unwrap(), []);
    }
}
