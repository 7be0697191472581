//! The flags for image files.

use super::ImageFormatArg;
use super::values::within;
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

    /// Overwrite existing files
    ///
    /// Only regular files are overwritten, and they keep their permissions. Links, devices and folders are never replaced. Files that the
    /// run reads are never replaced either. --trace overwrites only an earlier trace, and --dump only an earlier dump.
    #[arg(long, help_heading = "Output")]
    pub force: bool,
}
