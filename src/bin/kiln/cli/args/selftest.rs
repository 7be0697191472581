//! The flags of `kiln selftest`.

use super::values::within;
use clap::Args;

/// Flags of `kiln selftest`.
#[derive(Args, Debug, Default)]
#[command(allow_negative_numbers = true)]
pub struct SelftestArgs {
    /// Which GPU, as `kiln doctor` numbers them [default: 0]
    #[arg(long, value_name = "N", value_parser = within(0usize..=1023))]
    pub device: Option<usize>,

    /// Only what takes less than a second: no large GEMM, no rates
    #[arg(long)]
    pub quick: bool,

    /// Print a JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}
