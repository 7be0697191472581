//! How large an image is on a terminal.

use super::way::Way;

/// Rows of the terminal that an image leaves free: for the progress line, the line after the run, and one of what stood before.
const FREE_ROWS: usize = 3;

/// The cell of a terminal that does not tell its size in pixels. Most cells are about twice as high as wide.
const USUAL_CELL: (f64, f64) = (8.0, 16.0);

/// How much worse a smaller image is, compared with one of another shape.
const SIZE_COUNTS: f64 = 0.2;

/// The size of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// Cells of a row.
    pub columns: usize,
    /// Cells of a column.
    pub rows: usize,
    /// Width and height in pixels, if the terminal tells.
    pub pixels: Option<(usize, usize)>,
}

impl Screen {
    /// The size of the terminal that standard error is, as the system knows it. The terminal is not asked.
    pub fn of_stderr() -> Option<Self> {
        Self::of(std::io::stderr())
    }

    /// The size of the terminal that standard output is.
    pub fn of_stdout() -> Option<Self> {
        Self::of(std::io::stdout())
    }

    #[cfg(unix)]
    fn of(stream: impl std::os::fd::AsFd) -> Option<Self> {
        let size = rustix::termios::tcgetwinsize(stream).ok()?;
        let given = |number: u16| Some(usize::from(number)).filter(|&number| number > 0);
        let pixels = given(size.ws_xpixel).zip(given(size.ws_ypixel));
        Some(Self { columns: given(size.ws_col)?, rows: given(size.ws_row)?, pixels })
    }

    /// Without a system call that tells, there is no size.
    #[cfg(not(unix))]
    fn of<T>(_stream: T) -> Option<Self> {
        None
    }

    /// The terminal without this many rows, for text below an image. At least half of the rows stay.
    pub fn leaving(self, rows: usize) -> Self {
        let left = self.rows.saturating_sub(rows).max(self.rows / 2).max(1);
        let pixels = self.pixels.map(|(width, height)| (width, height * left / self.rows.max(1)));
        Self { rows: left, pixels, ..self }
    }

    /// Width and height of a cell in pixels.
    fn cell(self) -> (f64, f64) {
        self.pixels.map_or(USUAL_CELL, |(width, height)| (width as f64 / self.columns as f64, height as f64 / self.rows as f64))
    }
}

/// The cells that an image takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Cells of a row.
    pub columns: usize,
    /// Rows, the last of which may be covered in part.
    pub rows: usize,
    /// Half rows, which are the pixels of [`Way::Blocks`].
    pub halves: usize,
}

impl Area {
    /// A large area that an image of `width` x `height` pixels fills without being enlarged. It keeps its shape, as far as cells allow.
    pub fn fit((width, height): (usize, usize), screen: Screen, way: Way) -> Self {
        let (cell_width, cell_height) = screen.cell();
        let (width, height) = (width.max(1) as f64, height.max(1) as f64);
        let most_rows = screen.rows.saturating_sub(FREE_ROWS).max(1);
        // How many rows an image takes for each of its columns.
        let rows_per_column = height / width * cell_width / cell_height;
        let own_columns = match way {
            // A pixel is as wide as a cell.
            Way::Blocks(_) => width,
            Way::Kitty { .. } | Way::Iterm2 => width / cell_width,
        };
        let columns = own_columns.min(screen.columns as f64).min(most_rows as f64 / rows_per_column);
        let columns = (columns as usize).max(1);
        let within = |halves: f64| (halves as usize).clamp(1, 2 * most_rows);
        let of_halves = |halves: usize| Self { columns, rows: halves.div_ceil(2), halves };
        match way {
            Way::Blocks(_) => of_halves(within((2.0 * columns as f64 * rows_per_column).round())),
            // The terminal keeps the shape. A rounding error must not cost a row.
            Way::Iterm2 => of_halves(within(2.0 * (columns as f64 * rows_per_column - 1e-9).ceil())),
            Way::Kitty { .. } => Self::whole_cells(columns, rows_per_column, most_rows),
        }
    }

    /// The area of whole cells in which the shape changes least, a little smaller if that helps. Not all versions of kitty keep the shape
    /// by themselves.
    fn whole_cells(most_columns: usize, rows_per_column: f64, most_rows: usize) -> Self {
        let area = |columns: usize| {
            let exact = columns as f64 * rows_per_column;
            let rows = (exact.round() as usize).clamp(1, most_rows);
            let bent = (rows as f64 / exact).ln().abs();
            let lost = 1.0 - columns as f64 / most_columns as f64;
            (bent + SIZE_COUNTS * lost, Self { columns, rows, halves: 2 * rows })
        };
        let least = (most_columns * 3).div_ceil(4);
        let areas = (least..most_columns).rev().map(area);
        areas.fold(area(most_columns), |best, next| if next.0 < best.0 { next } else { best }).1
    }
}

#[cfg(test)]
mod tests {
    use super::super::way::Colors;
    use super::*;

    const BLOCKS: Way = Way::Blocks(Colors::True);
    const KITTY: Way = Way::Kitty { wrapped: false };

    fn screen(columns: usize, rows: usize) -> Screen {
        Screen { columns, rows, pixels: None }
    }

    fn cells(size: (usize, usize), screen: Screen, way: Way) -> (usize, usize) {
        let area = Area::fit(size, screen, way);
        (area.columns, area.rows)
    }

    #[test]
    fn images_fit_and_are_not_enlarged() {
        // 21 rows are free, so 42 half rows.
        assert_eq!(cells((1024, 1024), screen(80, 24), BLOCKS), (42, 21));
        assert_eq!(cells((1024, 512), screen(80, 24), BLOCKS), (80, 20));
        assert_eq!(cells((64, 64), screen(200, 60), BLOCKS), (64, 32));
        assert_eq!(cells((64, 64), screen(200, 60), KITTY), (8, 4));
        assert_eq!(cells((1024, 1024), screen(200, 60), KITTY), (114, 57));
        assert_eq!(cells((1024, 1024), screen(80, 24), Way::Iterm2), (42, 21));
        // Cells of 10 x 18 pixels.
        let known = Screen { columns: 100, rows: 50, pixels: Some((1000, 900)) };
        // 80 columns are 44.4 rows, and 79 are 43.9.
        assert_eq!(cells((800, 800), known, KITTY), (79, 44));
        assert_eq!(cells((800, 800), known, Way::Iterm2), (80, 45));
        assert_eq!(cells((805, 800), known, Way::Iterm2), (80, 45));
        assert_eq!(Area::fit((90, 90), known, BLOCKS).halves, 93);
        assert_eq!(Area::fit((64, 63), screen(200, 60), BLOCKS).halves, 63);
    }

    #[test]
    fn text_below_an_image_has_room() {
        let known = Screen { columns: 100, rows: 50, pixels: Some((1000, 1000)) };
        assert_eq!(known.leaving(20), Screen { columns: 100, rows: 30, pixels: Some((1000, 600)) });
        assert_eq!(known.leaving(1000).rows, 25);
        assert_eq!(screen(80, 1).leaving(5).rows, 1);
    }

    #[test]
    fn whole_cells_keep_the_shape() {
        for size in [(256, 256), (1024, 1024), (1360, 768), (768, 1360), (1000, 999), (832, 1248)] {
            for (columns, rows, cell) in [(80, 24, (9, 18)), (100, 30, (10, 21)), (200, 60, (7, 15)), (120, 40, (8, 17))] {
                let screen = Screen { columns, rows, pixels: Some((columns * cell.0, rows * cell.1)) };
                let Area { columns, rows, .. } = Area::fit(size, screen, KITTY);
                let bent = (columns * cell.0) as f64 / (rows * cell.1) as f64 * size.1 as f64 / size.0 as f64;
                assert!((bent - 1.0).abs() < 0.02, "{size:?} {screen:?}: {columns} x {rows} is bent by {bent}");
            }
        }
    }

    #[test]
    fn narrow_images_have_a_column() {
        let tall = Area::fit((64, 16_384), screen(80, 24), KITTY);
        assert_eq!(tall, Area { columns: 1, rows: 21, halves: 42 });
        let wide = Area::fit((16_384, 64), screen(80, 24), KITTY);
        assert_eq!(wide, Area { columns: 80, rows: 1, halves: 2 });
        assert_eq!(cells((16_384, 64), screen(80, 24), BLOCKS), (80, 1));
        assert_eq!(cells((1, 1), screen(20, 8), KITTY), (1, 1));
        assert_eq!(cells((0, 0), screen(1, 1), BLOCKS), (1, 1));
    }

    #[test]
    fn every_area_is_within_its_screen() {
        for (columns, rows) in [(20, 8), (80, 24), (211, 57)] {
            for pixels in [None, Some((columns * 7, rows * 15)), Some((columns * 10, rows * 10))] {
                for size in [(64, 64), (1360, 768), (768, 1360), (64, 4096), (4096, 64), (513, 511)] {
                    for way in [BLOCKS, KITTY, Way::Iterm2] {
                        let screen = Screen { columns, rows, pixels };
                        let area = Area::fit(size, screen, way);
                        assert!((1..=columns).contains(&area.columns), "{size:?} {screen:?} {area:?}");
                        assert!((1..=rows - FREE_ROWS).contains(&area.rows), "{size:?} {screen:?} {area:?}");
                        assert_eq!(area.halves.div_ceil(2), area.rows);
                    }
                }
            }
        }
    }
}
