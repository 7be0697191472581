//! The flags that draw images on the terminal.

use crate::draw::{Facts, NamedWay, Way};
use crate::terminal::{Terminal, Verbosity};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use kiln::progress::Progress;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The variable that stands for `--show`.
const VARIABLE: &str = "KILN_SHOW";

/// The flag that draws finished images.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct ShowArgs {
    /// Draw each finished image on the terminal
    ///
    /// kiln draws above the progress line on standard error, in the protocol of kitty or iTerm2 or with colored half blocks. It draws only
    /// if standard error is a terminal that is known to show images or enough colors, and not with --quiet, NO_COLOR or CI. KILN_SHOW=1
    /// is the same as this option.
    #[arg(long, help_heading = "Output")]
    pub show: bool,
}

impl ShowArgs {
    /// Lets a terminal draw finished images, if it is asked for and can.
    pub fn apply(self, terminal: Terminal, verbosity: Verbosity) -> Terminal {
        let by_variable = std::env::var_os(VARIABLE).is_some_and(|value| is_on(&value));
        if !self.show && !by_variable {
            return terminal;
        }
        match Way::best(&Facts::of_stderr(verbosity == Verbosity::Quiet)) {
            Ok(way) => terminal.showing(way),
            Err(why) => {
                let note = format!("note: no image is drawn here: {why}");
                // The variable is for all runs, on terminals or not.
                if self.show {
                    terminal.say(&note)
                } else {
                    terminal.detail(&note)
                }
                terminal
            }
        }
    }
}

/// Whether the value of a variable turns something on.
fn is_on(value: &OsStr) -> bool {
    !value.is_empty() && value != "0"
}

/// The flags for previews.
#[derive(Args, Clone, Debug, Default)]
pub struct PreviewArgs {
    /// Show the image while it is denoised, on the terminal or in a .png file
    ///
    /// `auto`, which is also the value if none is given, takes the best way that the terminal has. It draws nothing where there is none, or
    /// if the image is done in a moment. `kitty`, `iterm2` and `blocks` take that way without looking at the environment. A file is
    /// replaced at most five times a second, and ends as the finished image. kiln replaces an existing file only if it is a preview, or
    /// with --force.
    #[arg(
        long,
        value_name = "WHERE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "auto",
        value_parser = PreviewTarget::parser(),
        help_heading = "Output"
    )]
    pub preview: Option<PreviewTarget>,

    /// Choose how previews are made [default: fast]
    #[arg(long, value_enum, value_name = "KIND", requires = "preview", help_heading = "Output")]
    pub preview_kind: Option<PreviewKind>,
}

/// Where previews go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PreviewTarget {
    /// To the terminal, in the best way that it has.
    Auto,
    /// To the terminal, in this way.
    Way(NamedWay),
    /// To a PNG file.
    File(PathBuf),
}

impl PreviewTarget {
    /// Reads the value of `--preview`.
    pub fn parse(value: OsString) -> Result<Self, String> {
        match value.to_str() {
            Some("auto") => return Ok(Self::Auto),
            Some("kitty") => return Ok(Self::Way(NamedWay::Kitty)),
            Some("iterm2") => return Ok(Self::Way(NamedWay::Iterm2)),
            Some("blocks") => return Ok(Self::Way(NamedWay::Blocks)),
            _ => {}
        }
        match Path::new(&value).extension() {
            Some(extension) if extension.eq_ignore_ascii_case("png") => Ok(Self::File(value.into())),
            _ => Err("expected auto, kitty, iterm2, blocks or a file named .png".into()),
        }
    }

    /// The parser of the flag. File names are any bytes.
    fn parser() -> impl TypedValueParser<Value = Self> {
        OsStringValueParser::new().try_map(Self::parse)
    }
}

/// Values of `--preview-kind`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)] // the comments are help texts
pub enum PreviewKind {
    /// Small, and at almost no cost
    #[default]
    Fast,
    /// As large as the image, decoded by the VAE
    Full,
}

impl From<PreviewKind> for kiln::progress::PreviewKind {
    fn from(kind: PreviewKind) -> Self {
        match kind {
            PreviewKind::Fast => Self::Fast,
            PreviewKind::Full => Self::Full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        prompt: Option<String>,
        #[command(flatten)]
        preview: PreviewArgs,
    }

    fn parse(line: &str) -> Result<(Option<String>, PreviewArgs), clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| (line.prompt, line.preview))
    }

    #[test]
    fn previews_go_to_the_terminal_or_a_file() {
        let target = |line: &str| parse(line).unwrap().1.preview;
        assert_eq!(target("kiln fox"), None);
        assert_eq!(target("kiln fox --preview"), Some(PreviewTarget::Auto));
        assert_eq!(target("kiln --preview=auto fox"), Some(PreviewTarget::Auto));
        assert_eq!(target("kiln --preview=kitty"), Some(PreviewTarget::Way(NamedWay::Kitty)));
        assert_eq!(target("kiln --preview=iterm2"), Some(PreviewTarget::Way(NamedWay::Iterm2)));
        assert_eq!(target("kiln --preview=blocks"), Some(PreviewTarget::Way(NamedWay::Blocks)));
        for name in ["a.png", "b/c.PNG", "kitty.png", "a=b.png"] {
            assert_eq!(target(&format!("kiln --preview={name}")), Some(PreviewTarget::File(name.into())));
        }
        // A prompt may follow, so it is never the value.
        assert_eq!(parse("kiln --preview blocks").unwrap().0.as_deref(), Some("blocks"));
        for wrong in ["", "sixel", "Kitty", "a.jpg", "png", ".png"] {
            let error = parse(&format!("kiln --preview={wrong}")).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong}");
            assert!(wrong.is_empty() || error.to_string().contains("a file named .png"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_kind_is_about_previews() {
        let kind = |line: &str| parse(line).map(|(_, preview)| preview.preview_kind.unwrap_or_default());
        assert_eq!(kind("kiln fox --preview").unwrap(), PreviewKind::Fast);
        assert_eq!(kind("kiln fox --preview --preview-kind full").unwrap(), PreviewKind::Full);
        assert_eq!(kind("kiln fox --preview --preview-kind fast").unwrap(), PreviewKind::Fast);
        assert_eq!(kind("kiln fox --preview-kind full").unwrap_err().exit_code(), 2);
        assert_eq!(kind("kiln fox --preview --preview-kind half").unwrap_err().exit_code(), 2);
    }

    #[test]
    fn a_variable_is_on_unless_it_is_empty_or_zero() {
        for (value, want) in [("1", true), ("yes", true), ("0", false), ("", false)] {
            assert_eq!(is_on(OsStr::new(value)), want, "{value}");
        }
    }
}
