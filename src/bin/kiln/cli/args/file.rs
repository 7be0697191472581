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
    /// Only regular files are overwritten, and they keep their permissions. Links, devices and folders are never replaced, nor are files
    /// that the run reads. --trace replaces only a trace, and --dump only a dump.
    #[arg(long, help_heading = "Output")]
    pub force: bool,
}
