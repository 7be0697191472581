//! How large an image is on a terminal.

use super::way::Way;

/// Rows of the terminal that an image leaves free: for the progress line, the line after the run, and one of what stood before.
const FREE_ROWS: usize = 3;

/// The cell of a terminal that does not tell its size in pixels. Most cells are about twice as high as wide.
const USUAL_CELL: (f64, f64) = (8.0, 16.0);

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
    /// Whether the image is so narrow that its shape is not kept, because no terminal has half a column.
    pub squeezed: bool,
}

impl Area {
    /// The largest area that an image of `width` x `height` pixels fills without being enlarged. It keeps its shape.
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
        let squeezed = columns < 1.0;
        let columns = (columns as usize).max(1);
        let (whole, halves) = (columns as f64 * rows_per_column, 2.0 * columns as f64 * rows_per_column);
        // A rounding error must not cost a row.
        let halves = match way {
            Way::Blocks(_) => halves.round(),
            Way::Kitty { .. } | Way::Iterm2 => 2.0 * (whole - 1e-9).ceil(),
        };
        let halves = (halves as usize).clamp(1, 2 * most_rows);
        Self { columns, rows: halves.div_ceil(2), halves, squeezed: squeezed && halves == 2 * most_rows }
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
        assert_eq!(cells((800, 800), known, KITTY), (80, 45));
        assert_eq!(cells((805, 800), known, KITTY), (80, 45));
        assert_eq!(Area::fit((90, 90), known, BLOCKS).halves, 93);
        assert_eq!(Area::fit((64, 63), screen(200, 60), BLOCKS).halves, 63);
    }

    #[test]
    fn narrow_images_have_a_column() {
        let tall = Area::fit((64, 16_384), screen(80, 24), KITTY);
        assert_eq!(tall, Area { columns: 1, rows: 21, halves: 42, squeezed: true });
        let wide = Area::fit((16_384, 64), screen(80, 24), KITTY);
        assert_eq!(wide, Area { columns: 80, rows: 1, halves: 2, squeezed: false });
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
