//! The flags for image files.

use super::ImageFormatArg;
use super::values::within;
use clap::Args;

/// The flags for image files.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct FileArgs {
    /// File format [default: by the name of the file, else png]
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Output")]
    pub format: Option<ImageFormatArg>,

    /// Quality of a JPEG, from 1 to 100 [default: 95]
    #[arg(long, value_name = "N", value_parser = within(1u8..=100), help_heading = "Output")]
    pub quality: Option<u8>,

    /// Replace files that exist
    ///
    /// Only regular files are replaced, and they keep their permissions; links, devices and folders never are.
    #[arg(long, help_heading = "Output")]
    pub force: bool,
}
