//! Half blocks: every cell shows two pixels, one above the other. Every terminal with enough colors has them.

use super::area::Area;
use super::way::Colors;
use kiln::image::Image;

/// The character whose upper half has the foreground's color, and whose lower half has the background's.
const UPPER_HALF: &str = "▀";

/// The levels of a channel in the cube of 6 x 6 x 6 colors.
const LEVELS: [u8; 6] = [0, 95, 135, 175, 215, 255];

/// Writes an image, one line for each row of cells. The cursor has to be at the start of a line, and is at the start of the next one
/// afterwards.
pub fn encode(image: &Image, area: Area, colors: Colors) -> Vec<u8> {
    let Image { pixels, .. } = scaled(image, area.columns, area.halves);
    let rows: Vec<&[[u8; 3]]> = pixels.as_chunks().0.chunks(area.columns).collect();
    let mut text = String::new();
    for pair in rows.chunks(2) {
        // Both colors of the last character. A line begins with the terminal's own.
        let (mut upper_now, mut lower_now) = (None, None);
        for column in 0..area.columns {
            let upper = Some(colors.of(pair[0][column]));
            // The last row of an odd number has no lower half.
            let lower = pair.get(1).map(|row| colors.of(row[column]));
            let upper_change = upper.filter(|_| upper != upper_now).map(|color| color.sgr(38));
            let lower_change = lower.filter(|_| lower != lower_now).map(|color| color.sgr(48));
            let changes: Vec<String> = [upper_change, lower_change].into_iter().flatten().collect();
            if !changes.is_empty() {
                text.push_str(&format!("\x1b[{}m", changes.join(";")));
            }
            text.push_str(UPPER_HALF);
            (upper_now, lower_now) = (upper, lower);
        }
        text.push_str("\x1b[0m\n");
    }
    text.into_bytes()
}

/// A color as a terminal takes it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Color {
    True([u8; 3]),
    /// The number of a color of the cube.
    Cube(u8),
}

impl Color {
    /// The parameters that select the color for the foreground, 38, or the background, 48.
    fn sgr(self, ground: u8) -> String {
        match self {
            Self::True([red, green, blue]) => format!("{ground};2;{red};{green};{blue}"),
            Self::Cube(number) => format!("{ground};5;{number}"),
        }
    }
}

impl Colors {
    /// The nearest color that there is.
    fn of(self, pixel: [u8; 3]) -> Color {
        match self {
            Self::True => Color::True(pixel),
            Self::Cube => Color::Cube(pixel.iter().fold(0, |number, &value| 6 * number + level(value)) + 16),
        }
    }
}

/// The number of the nearest level.
fn level(value: u8) -> u8 {
    // The middle between two levels belongs to the upper one.
    LEVELS.windows(2).filter(|pair| u16::from(value) * 2 >= u16::from(pair[0]) + u16::from(pair[1])).count() as u8
}

/// The mean of the pixels that each pixel of the result covers, by the share that it covers of them.
pub fn scaled(image: &Image, width: usize, height: usize) -> Image {
    let (across, down) = (shares(image.width, width), shares(image.height, height));
    let total = (image.width * image.height) as u64;
    let mut pixels = Vec::with_capacity(3 * width * height);
    for (top, rows) in &down {
        for (left, columns) in &across {
            let mut sums = [total / 2; 3];
            for (y, &row_share) in rows.iter().enumerate() {
                let start = 3 * ((top + y) * image.width + left);
                let row = &image.pixels[start..start + 3 * columns.len()];
                for (pixel, &share) in row.as_chunks::<3>().0.iter().zip(columns) {
                    for (sum, &value) in sums.iter_mut().zip(pixel) {
                        *sum += row_share * share * u64::from(value);
                    }
                }
            }
            pixels.extend(sums.map(|sum| (sum / total) as u8));
        }
    }
    Image { width, height, pixels }
}

/// For each of `to` pixels the first of `from` pixels that it covers, and its shares of it and the following ones. They sum to `from`.
fn shares(from: usize, to: usize) -> Vec<(usize, Vec<u64>)> {
    let share = |i: usize| {
        let (start, end) = (i * from, (i + 1) * from);
        let covered = start / to..end.div_ceil(to);
        let overlap = |pixel: usize| (end.min((pixel + 1) * to) - start.max(pixel * to)) as u64;
        (covered.start, covered.map(overlap).collect())
    };
    (0..to).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image whose pixels all differ from their neighbors.
    fn image(width: usize, height: usize) -> Image {
        let pixels = (0..3 * width * height).map(|i| (i * 89 % 256) as u8).collect();
        Image { width, height, pixels }
    }

    /// The colors of a cell: of the upper half, and of the lower one if it is not the terminal's own.
    type Cell = (Vec<u8>, Option<Vec<u8>>);

    /// The colors of all cells, as a terminal would show them.
    fn cells(text: &str) -> Vec<Vec<Cell>> {
        let line = |line: &str| {
            let mut line = line.strip_suffix("\x1b[0m").unwrap();
            let (mut upper, mut lower, mut cells) = (None, None, Vec::new());
            while !line.is_empty() {
                if let Some(rest) = line.strip_prefix("\x1b[") {
                    let (numbers, after) = rest.split_once('m').unwrap();
                    let mut numbers: &[u8] = &numbers.split(';').map(|n| n.parse().unwrap()).collect::<Vec<u8>>();
                    while let [ground, kind, rest @ ..] = numbers {
                        let (color, rest) = rest.split_at(if *kind == 2 { 3 } else { 1 });
                        *(if *ground == 38 { &mut upper } else { &mut lower }) = Some(color.to_vec());
                        numbers = rest;
                    }
                    line = after;
                }
                line = line.strip_prefix(UPPER_HALF).expect("one sequence before a character");
                cells.push((upper.clone().unwrap(), lower.clone()));
            }
            cells
        };
        text.lines().map(line).collect()
    }

    #[test]
    fn cells_have_the_colors_of_the_scaled_image() {
        for (width, height, columns, halves) in [(64, 64, 42, 42), (7, 9, 7, 9), (4, 6, 8, 5), (1, 1, 1, 1), (100, 30, 33, 10)] {
            let image = image(width, height);
            let want = scaled(&image, columns, halves);
            let area = Area { columns, rows: halves.div_ceil(2), halves };
            let pixel = |x: usize, y: usize| &want.pixels[3 * (y * columns + x)..][..3];
            for colors in [Colors::True, Colors::Cube] {
                let text = String::from_utf8(encode(&image, area, colors)).unwrap();
                let rows = cells(&text);
                assert_eq!(rows.len(), area.rows);
                let shown = |pixel: &[u8]| match colors {
                    Colors::True => pixel.to_vec(),
                    Colors::Cube => vec![16 + 36 * level(pixel[0]) + 6 * level(pixel[1]) + level(pixel[2])],
                };
                for (y, row) in rows.iter().enumerate() {
                    assert_eq!(row.len(), columns);
                    for (x, (upper, lower)) in row.iter().enumerate() {
                        assert_eq!(*upper, shown(pixel(x, 2 * y)));
                        assert_eq!(*lower, (2 * y + 1 < halves).then(|| shown(pixel(x, 2 * y + 1))));
                    }
                }
            }
        }
    }

    #[test]
    fn colors_are_written_when_they_change() {
        let row = |colors: [u8; 4]| colors.into_iter().flat_map(|value| [value; 3]).collect::<Vec<_>>();
        let pixels = [row([1, 1, 2, 2]), row([3, 3, 3, 4])].concat();
        let area = Area { columns: 4, rows: 1, halves: 2 };
        let text = encode(&Image { width: 4, height: 2, pixels }, area, Colors::True);
        let want = "\x1b[38;2;1;1;1;48;2;3;3;3m▀▀\x1b[38;2;2;2;2m▀\x1b[48;2;4;4;4m▀\x1b[0m\n";
        assert_eq!(String::from_utf8(text).unwrap(), want);
    }

    #[test]
    fn levels_are_the_nearest() {
        for value in 0..=255_u8 {
            let nearest = LEVELS.iter().map(|level| level.abs_diff(value)).min().unwrap();
            assert_eq!(LEVELS[level(value) as usize].abs_diff(value), nearest, "{value}");
        }
    }

    #[test]
    fn scaling_takes_means() {
        let image = image(6, 4);
        assert_eq!(scaled(&image, 6, 4), image);
        // A flat image stays flat at every size.
        let flat = Image { width: 5, height: 7, pixels: [9, 200, 255].repeat(35) };
        for (width, height) in [(1, 1), (2, 3), (5, 7), (11, 13)] {
            assert_eq!(scaled(&flat, width, height).pixels, [9, 200, 255].repeat(width * height));
        }
        // Three pixels to two: each covers one and a half.
        let three = Image { width: 3, height: 1, pixels: [[0; 3], [90; 3], [240; 3]].concat() };
        assert_eq!(scaled(&three, 2, 1).pixels, [[30; 3], [190; 3]].concat());
        let double: Vec<u8> = [[0; 3], [0; 3], [90; 3], [90; 3], [240; 3], [240; 3]].concat();
        assert_eq!(scaled(&three, 6, 1).pixels, double);
    }
}
