//! The flags for image files.

use super::ImageFormatArg;
use super::values::{DetailArg, within};
use clap::Args;

/// The flags for image files.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct FileArgs {
    /// Set the file format [default: from the file name, else png]
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Output")]
    pub format: Option<ImageFormatArg>,

    /// Set the JPEG quality, from 1 to 100 [default: 95]
    #[arg(long, value_name = "N", value_parser = within(1u8..=100), help_heading = "Output")]
    pub quality: Option<u8>,

    /// Choose what images say about how they were made
    ///
    /// `full` is everything that is needed to make an image again, and the text that galleries read. It has digests of the files that
    /// the image was made from, so it shows whether somebody had a certain file. `basic` has prompt and settings.
    #[arg(long, value_enum, value_name = "DETAIL", default_value = "full", help_heading = "Output")]
    pub metadata: DetailArg,

    /// Overwrite existing files
    ///
    /// Only regular files are overwritten, and they keep their permissions. Links, devices and folders are never replaced. Files that the
    /// run reads are never replaced either. --trace overwrites only an earlier trace, and --dump only an earlier dump.
    #[arg(long, help_heading = "Output")]
    pub force: bool,
}
