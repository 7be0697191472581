//! Runs the VAE on overlapping tiles of an image, which bounds its working memory. Overlaps are blended. Tiles and blending match
//! diffusers' `enable_tiling`.

use crate::backend::{Backend, Op, Seam, scope};
use crate::error::Result;
use crate::tensor::{Arena, DType, Tensor};
use std::ops::Range;

/// The network that runs on a tile. It gets the result and the input, one row per pixel, and the width and height of the input.
pub(super) type Network<'a> = dyn Fn(&mut dyn Backend, &mut Arena, Tensor, Tensor, [usize; 2]) -> Result<()> + 'a;

/// The tiles of an image, in pixels of the network's input.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tiles {
    columns: Vec<Range<usize>>,
    rows: Vec<Range<usize>>,
}

impl Tiles {
    /// The tiles of an image with a side longer than `side`, the longest tile side; none if both sides are at most `side`. A tile
    /// begins three quarters of `side` after the one before it. The last one ends with the image, however narrow it is.
    pub(super) fn new(width: usize, height: usize, side: usize) -> Option<Self> {
        let along = |length: usize| (0..length).step_by(side * 3 / 4).map(|start| start..length.min(start + side)).collect();
        (width > side || height > side).then(|| Self { columns: along(width), rows: along(height) })
    }

    /// Runs a network on each tile and joins the results.
    pub(super) fn run(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        out: Tensor,
        x: Tensor,
        scale: Scale,
        network: &Network<'_>,
    ) -> Result<()> {
        let (width, channels) = (self.columns.last().map_or(0, |last| last.end), out.cols);
        let (out, x, x_channels, x_dtype) = (in_rows(out, scale.of(width)), in_rows(x, width), x.cols, x.dtype);
        let rows = || self.rows.iter().enumerate().map(|(i, range)| Span::new(range, self.rows.get(i + 1), scale));
        let columns = || self.columns.iter().enumerate().map(|(i, range)| Span::new(range, self.columns.get(i + 1), scale));
        scope(be, ws, |be, ws| {
            // Blended rows and columns that later tiles need: the last rows of earlier tiles, one matrix for each column of
            // tiles, and the last columns of the previous tile.
            let (tallest, widest) =
                (rows().map(|r| r.overlap).max().unwrap_or(0), columns().map(|c| c.overlap).max().unwrap_or(0));
            let mut strip = |rows: usize, width: usize| Ok(in_rows(ws.alloc(rows * width, channels, DType::F32)?, width));
            let above = columns().map(|c| strip(tallest, c.len())).collect::<Result<Vec<_>>>()?;
            let left = strip(rows().map(|r| r.len()).max().unwrap_or(0), widest)?;
            // The last tile of a row or column has no overlap, so these are zero when the next row or column begins.
            let (mut from_above, mut from_left) = (0, 0);
            for row in rows() {
                for (column, &above) in columns().zip(&above) {
                    scope(be, ws, |be, ws| {
                        let tile = ws.alloc(row.len() * column.len(), channels, DType::F32)?;
                        let (from, to) = (column.source.start * x_channels, column.source.end * x_channels);
                        scope(be, ws, |be, ws| {
                            let size = [column.source.len(), row.source.len()];
                            let input = ws.alloc(size[0] * size[1], x_channels, x_dtype)?;
                            let part = x.rows(row.source.clone()).cols(from..to);
                            be.run(Op::Copy { out: in_rows(input, size[0]), x: part })?;
                            network(be, ws, tile, input, size)
                        })?;
                        let tile = in_rows(tile, column.len());
                        if from_above > 0 {
                            let (into, from) = (tile.rows(0..from_above), above.rows(0..from_above));
                            be.run(Op::Blend { into, from, seam: Seam::Top })?;
                        }
                        if from_left > 0 {
                            let (into, from) = (tile.cols(0..from_left * channels), left.rows(0..tile.rows));
                            be.run(Op::Blend { into, from: from.cols(0..into.cols), seam: Seam::Left { channels } })?;
                        }
                        let kept = |span: &Span| span.out.start..span.out.end - span.overlap;
                        let place = out.rows(kept(&row)).cols(kept(&column).start * channels..kept(&column).end * channels);
                        be.run(Op::Copy { out: place, x: tile.rows(0..place.rows).cols(0..place.cols) })?;
                        if row.overlap > 0 {
                            let last = tile.rows(tile.rows - row.overlap..tile.rows);
                            be.run(Op::Copy { out: above.rows(0..row.overlap), x: last })?;
                        }
                        if column.overlap > 0 {
                            let last = tile.cols(tile.cols - column.overlap * channels..tile.cols);
                            be.run(Op::Copy { out: left.rows(0..tile.rows).cols(0..last.cols), x: last })?;
                        }
                        Ok(())
                    })?;
                    from_left = column.overlap;
                }
                from_above = row.overlap;
            }
            Ok(())
        })
    }
}

/// How the network scales each side: result pixels per input pixel, or input pixels per result pixel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scale {
    /// The scale of the decoder.
    Up(usize),
    /// The scale of the encoder.
    Down(usize),
}

impl Scale {
    fn of(self, pixels: usize) -> usize {
        match self {
            Self::Up(factor) => pixels * factor,
            Self::Down(factor) => pixels / factor,
        }
    }
}

/// One side of a tile.
struct Span {
    /// The tile's pixels in the input.
    source: Range<usize>,
    /// The tile's pixels in the result.
    out: Range<usize>,
    /// Pixels of the result that the next tile also has.
    overlap: usize,
}

impl Span {
    fn new(source: &Range<usize>, next: Option<&Range<usize>>, scale: Scale) -> Self {
        let out = scale.of(source.start)..scale.of(source.end);
        Self { source: source.clone(), overlap: next.map_or(0, |next| out.end - scale.of(next.start)), out }
    }

    fn len(&self) -> usize {
        self.out.len()
    }
}

/// An image with one row per pixel, as a matrix with one row per row of pixels.
fn in_rows(image: Tensor, width: usize) -> Tensor {
    let cols = width * image.cols;
    Tensor { rows: image.rows / width.max(1), cols, stride: cols, ..image }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_begin_every_three_quarters() {
        let tiles = Tiles::new(256, 200, 128).unwrap();
        assert_eq!(tiles.columns, [0..128, 96..224, 192..256]);
        assert_eq!(tiles.rows, [0..128, 96..200, 192..200]);
        // One long side is enough: the other side is then tiled as well, even if it is no longer than a tile.
        assert_eq!(Tiles::new(129, 128, 128).unwrap().rows, [0..128, 96..128]);
        assert_eq!(Tiles::new(128, 128, 128), None);
    }

    #[test]
    fn overlaps_are_what_two_tiles_have_in_common() {
        let tiles = Tiles::new(200, 1, 128).unwrap();
        let spans: Vec<_> = (0..3).map(|i| Span::new(&tiles.columns[i], tiles.columns.get(i + 1), Scale::Up(8))).collect();
        let found: Vec<_> = spans.iter().map(|span| (span.out.clone(), span.overlap)).collect();
        assert_eq!(found, [(0..1024, 256), (768..1600, 64), (1536..1600, 0)]);
    }
}
