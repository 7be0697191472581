//! Images in one place of a terminal.

use super::area::{Area, Screen};
use super::way::Way;
use super::{blocks, iterm2, kitty};
use kiln::error::Result;
use kiln::image::{Format, Image, Threads};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::thread::sleep;
use std::time::Duration;

/// Remembers the cursor, which inline images move in ways that differ between terminals.
const SAVE: &[u8] = b"\x1b7";
const RESTORE: &[u8] = b"\x1b8";

/// How long tmux takes to move the cursor of the terminal around it.
const TMUX: Duration = Duration::from_millis(50);

/// A place on a terminal, on which one image after the other is drawn.
///
/// The methods return bytes for [`write`], which belong together. Before each the cursor has to be at the start of the line below
/// the image, where it is afterwards as well. The line is free for a progress line.
pub struct Canvas {
    way: Way,
    /// Width and height of the finished image, which decide the area for all.
    size: (usize, usize),
    /// The number of the image, by which the terminal knows it.
    id: u32,
    shown: Option<Shown>,
}

/// The image that is on the terminal.
struct Shown {
    screen: Screen,
    area: Area,
    /// The bytes that draw it, without the room for it.
    bytes: Vec<u8>,
    /// Whether it is hidden right now.
    hidden: bool,
}

impl Canvas {
    /// A canvas for images that end in one of this width and height.
    pub fn new(way: Way, size: (usize, usize)) -> Self {
        // Images of earlier runs are still on the screen, and another image with the number of one of them would replace it.
        let id = RandomState::new().hash_one(std::process::id()) as u32 | 1;
        Self { way, size, id, shown: None }
    }

    /// Whether the canvas is for images that are drawn in this way and end in one of this width and height.
    pub fn is_for(&self, way: Way, size: (usize, usize)) -> bool {
        (self.way, self.size) == (way, size)
    }

    /// Draws an image, in the place of the previous one if the terminal still has the same size. `threads` encode it.
    pub fn draw(&mut self, image: &Image, screen: Screen, threads: Threads) -> Result<Vec<u8>> {
        let area = Area::fit(self.size, screen, self.way);
        let bytes = match self.way {
            Way::Kitty { wrapped } => kitty::encode(&image.encode(Format::Png, &[], threads)?, self.id, area, wrapped),
            Way::Iterm2 => iterm2::encode(&image.encode(Format::Png, &[], threads)?, area),
            Way::Blocks(colors) => blocks::encode(image, area, colors),
        };
        // In a terminal of another size, lines are elsewhere.
        let in_place = self.shown.take().is_some_and(|shown| shown.screen == screen && !shown.hidden);
        let text = self.placed(&bytes, area, in_place);
        self.shown = Some(Shown { screen, area, bytes, hidden: false });
        Ok(text)
    }

    /// Lines that the image takes.
    pub fn lines(&self) -> usize {
        self.shown.as_ref().filter(|shown| !shown.hidden).map_or(0, |shown| shown.area.rows)
    }

    /// Takes the image away, so that a line of text can take its place.
    pub fn hide(&mut self) -> Vec<u8> {
        let bytes = self.erased();
        self.shown.iter_mut().for_each(|shown| shown.hidden = true);
        bytes
    }

    /// Draws the image that [`Canvas::hide`] took away.
    pub fn show_again(&mut self) -> Vec<u8> {
        let text = match &self.shown {
            Some(shown) if shown.hidden => self.placed(&shown.bytes, shown.area, false),
            _ => return Vec::new(),
        };
        self.shown.iter_mut().for_each(|shown| shown.hidden = false);
        text
    }

    /// Ends the drawing. The image stays, or makes room for what comes next.
    pub fn finish(self, keep: bool) -> Vec<u8> {
        if keep { Vec::new() } else { self.erased() }
    }

    /// Moves to where an image belongs, draws it, and moves to the line below.
    fn placed(&self, bytes: &[u8], area: Area, in_place: bool) -> Vec<u8> {
        let up = format!("\x1b[{}A", area.rows);
        match self.way {
            // Blocks are lines of text, which make their room.
            Way::Blocks(_) if in_place => [up.as_bytes(), bytes].concat(),
            Way::Blocks(_) => bytes.to_vec(),
            // Other images need the room first: a terminal may not scroll for them.
            Way::Kitty { .. } | Way::Iterm2 => {
                let room = if in_place { String::new() } else { "\n".repeat(area.rows) };
                let down = format!("\x1b[{}B", area.rows);
                [room.as_bytes(), up.as_bytes(), SAVE, bytes, RESTORE, down.as_bytes()].concat()
            }
        }
    }

    /// Clears the image's lines, and moves to the first of them.
    fn erased(&self) -> Vec<u8> {
        let lines = self.lines();
        if lines == 0 {
            return Vec::new();
        }
        let deleted = match self.way {
            Way::Kitty { wrapped } => kitty::delete(self.id, wrapped),
            Way::Iterm2 | Way::Blocks(_) => Vec::new(),
        };
        [&deleted, format!("\x1b[{lines}A\x1b[J").as_bytes()].concat()
    }
}

/// Writes bytes of a canvas to a terminal.
pub fn write(bytes: &[u8], stream: &mut impl Write) -> io::Result<()> {
    let (marker, mut rest) = (kitty::WRAPPED, bytes);
    // tmux passes on what is wrapped at once. The cursor around it follows only when tmux has read all that there is, so an image that
    // comes at once would be at another place.
    if let Some(start) = bytes.windows(marker.len()).position(|window| window == marker) {
        stream.write_all(&bytes[..start])?;
        stream.flush()?;
        sleep(TMUX);
        rest = &bytes[start..];
    }
    stream.write_all(rest)?;
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that keeps what is written at once apart.
    #[derive(Default)]
    struct Pieces(Vec<Vec<u8>>);

    impl Write for Pieces {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.push(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_image_in_tmux_comes_after_the_cursor() {
        let image = Image { width: 64, height: 64, pixels: vec![7; 3 * 64 * 64] };
        let screen = Screen { columns: 80, rows: 24, pixels: None };
        for wrapped in [false, true] {
            let bytes = Canvas::new(Way::Kitty { wrapped }, (64, 64)).draw(&image, screen, Threads::One).unwrap();
            let mut stream = Pieces::default();
            write(&bytes, &mut stream).unwrap();
            assert_eq!(stream.0.concat(), bytes);
            match &stream.0[..] {
                [all] => assert!(!wrapped && all.len() == bytes.len()),
                [before, after] => {
                    assert!(wrapped && after.starts_with(kitty::WRAPPED));
                    assert_eq!(before, b"\n\n\n\n\x1b[4A\x1b7");
                }
                pieces => panic!("{} pieces", pieces.len()),
            }
        }
    }
}
