//! `kiln show`: images on the terminal, and what their files say about how they were made.

use super::stdout::{json_line, print};
use super::{Process, Subcommand, message};
use crate::draw::{Canvas, Facts, Screen, Way, write};
use crate::terminal::{Terminal, Verbosity};
use clap::Args;
use kiln::DecodedReference;
use kiln::error::{Error, Result};
use kiln::image::{Image, Threads};
use kiln::metadata::{ImageMetadata, Maker, StoredText};
use kiln::text::{grouped, shown, shown_line, shown_path};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The most lines of a text that are printed.
const LINES: usize = 100;

/// Show images on the terminal, and how they were made
///
/// kiln prints the prompt, the settings and the digests that an image file holds. It recognizes AUTOMATIC1111's web UI,
/// stable-diffusion.cpp, ComfyUI, InvokeAI and mflux, and prints prompt and seed of their images. The image is drawn above if standard
/// output is a terminal that can show it.
#[derive(Args, Debug)]
#[command(override_usage = "kiln show [OPTIONS] <FILE>...")]
pub struct ShowFileArgs {
    /// Show these PNG, JPEG or WebP files
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,

    /// Print a JSON object per image, and draw nothing
    #[arg(long)]
    pub json: bool,
}

/// What `--json` prints for an image.
#[derive(Serialize)]
struct FileLine<'a> {
    path: &'a str,
    format: &'a str,
    width: usize,
    height: usize,
    /// The program that made it, if it is known.
    program: Option<&'a str>,
    prompt: Option<&'a str>,
    negative: Option<&'a str>,
    seed: Option<u64>,
    /// What kiln stored.
    metadata: Option<ImageMetadata>,
    /// All text of the file.
    text: BTreeMap<&'a str, &'a str>,
    /// What was left out, and why.
    notes: Vec<String>,
}

/// An image file and what it says.
struct Shown<'a> {
    path: &'a Path,
    image: &'a Image,
    text: StoredText<'a>,
    maker: Option<Maker>,
    metadata: Option<ImageMetadata>,
    notes: Vec<String>,
}

impl<'a> Shown<'a> {
    fn new(path: &'a Path, bytes: &'a [u8], image: &'a Image) -> Result<Self> {
        let text = StoredText::of_file(bytes, path)?;
        let (maker, mut notes) = (Maker::of(&text), text.notes().to_vec());
        let metadata = match text.metadata() {
            Some(Ok(metadata)) => Some(metadata),
            Some(Err(why)) => {
                notes.push(format!("`{}` cannot be read: {why}", ImageMetadata::KEY));
                None
            }
            None => None,
        };
        Ok(Self { path, image, text, maker, metadata, notes })
    }

    /// A line about the file, then its texts.
    fn lines(&self) -> Vec<u8> {
        let program = self.maker.as_ref().map_or_else(String::new, |maker| format!(", made by {}", maker.program.name()));
        let Image { width, height, .. } = self.image;
        let mut lines = format!("{}: {}, {width}x{height}{program}\n", shown_path(self.path), self.text.format);
        let mut push = |key: &str, text: &str| lines.push_str(&indented(key, text));
        let own = self.metadata.is_some();
        if let Some(Maker { prompt, negative, seed, .. }) = self.maker.as_ref().filter(|_| !self.has_plain_keys()) {
            let told = [("prompt", prompt), ("negative", negative), ("seed", seed)];
            told.iter().filter_map(|(key, text)| Some((key, text.as_deref()?))).for_each(|(key, text)| push(key, text));
        }
        // Both say again what the plain keys say.
        let repeated = |key: &str| own && [ImageMetadata::KEY, ImageMetadata::PARAMETERS].contains(&key);
        for (key, text) in self.text.iter().filter(|(key, _)| !repeated(key)) {
            // Other programs store workflows of thousands of lines.
            match text.contains("{\"") && !own {
                true => push(key, &format!("({} bytes of JSON; --json prints them)", grouped(text.len() as u64))),
                false => push(key, text),
            }
        }
        self.notes.iter().for_each(|note| push("note", note));
        lines.into_bytes()
    }

    /// Whether prompt and seed are texts of their own, as kiln stores them.
    fn has_plain_keys(&self) -> bool {
        self.maker.as_ref().is_some_and(|maker| maker.prompt.as_deref() == self.text.get("prompt"))
    }

    fn json(self) -> Result<Vec<u8>> {
        let Self { path, image: Image { width, height, .. }, text, maker, metadata, notes } = self;
        let told = |of: fn(&Maker) -> &Option<String>| maker.as_ref().and_then(|maker| of(maker).as_deref());
        json_line(&FileLine {
            path: &path.to_string_lossy(),
            format: text.format,
            width: *width,
            height: *height,
            program: maker.as_ref().map(|maker| maker.program.name()),
            prompt: told(|maker| &maker.prompt),
            negative: told(|maker| &maker.negative),
            seed: told(|maker| &maker.seed).and_then(|seed| seed.parse().ok()),
            metadata,
            text: text.iter().collect(),
            notes,
        })
    }
}

impl Subcommand for ShowFileArgs {
    fn run(self: Box<Self>, Process { out, .. }: Process<'_>) -> Result<()> {
        let way = if self.json { None } else { Way::best(&Facts::of_stdout()).ok() };
        let mut failed: Option<Error> = None;
        for path in &self.files {
            if let Err(error) = show(path, self.json, way, out) {
                // The program prints the last error when it ends.
                if let Some(earlier) = failed.replace(error) {
                    Terminal::new(Verbosity::Normal).say(&format!("error: {}", message(&earlier)));
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// Prints an image file.
fn show(path: &Path, json: bool, way: Option<Way>, out: &mut dyn Write) -> Result<()> {
    let bytes = DecodedReference::read(path)?;
    let decoded = DecodedReference::from_bytes(&bytes, path)?;
    let image = decoded.image();
    let shown = Shown::new(path, &bytes, image)?;
    if json {
        return print(out, &shown.json()?);
    }
    let lines = shown.lines();
    if let Some((way, screen)) = way.zip(Screen::of_stdout()) {
        let rows = lines.iter().filter(|byte| **byte == b'\n').count();
        let drawn = Canvas::new(way, (image.width, image.height)).draw(image, screen.leaving(rows), Threads::All)?;
        // An image that the terminal does not take is no reason to keep its text back.
        let _ = write(&drawn, &mut &mut *out);
    }
    print(out, &lines)
}

/// A key and its text. Lines after the first are indented below it.
fn indented(key: &str, text: &str) -> String {
    let (mut lines, mut told) = (text.lines(), 0);
    let mut all = format!("  {}: {}\n", shown(key), shown_line(lines.next().unwrap_or_default()));
    for line in lines.by_ref().take(LINES) {
        all.push_str(&format!("    {}\n", shown_line(line)));
        told += 1;
    }
    if told == LINES && lines.next().is_some() {
        all.push_str("    …\n");
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_text_are_indented_and_escaped() {
        assert_eq!(indented("seed", "7"), "  seed: 7\n");
        assert_eq!(indented("prompt", "a\n\nb\u{1b}[2J\r"), "  prompt: a\n    \n    b\\u{1b}[2J\\r\n");
        assert_eq!(indented("\u{1b}key", ""), "  \\u{1b}key: \n");
        let long = indented("x", &"y\n".repeat(500));
        assert_eq!((long.lines().count(), long.ends_with("    …\n")), (LINES + 2, true));
    }
}
