//! Where a prompt is padded, and with what.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// How a prompt is padded to its length. Programs pad FLUX.2 \[dev\] prompts differently, which changes the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Padding {
    /// Padding tokens after the prompt, which attend to it: klein, and \[dev\] in diffusers with transformers 5.
    Right,
    /// Padding tokens before the prompt, which attend to nothing: \[dev\] in the programs of Black Forest Labs, and in diffusers with
    /// transformers 4.
    Left,
    /// Zero embeddings before the prompt, as in ComfyUI.
    LeftZeros,
    /// Zero embeddings after the prompt, as in stable-diffusion.cpp.
    RightZeros,
}

impl Padding {
    /// All paddings.
    pub const ALL: [Self; 4] = [Self::Right, Self::Left, Self::LeftZeros, Self::RightZeros];

    /// Whether the padding is before the prompt.
    pub const fn is_left(self) -> bool {
        matches!(self, Self::Left | Self::LeftZeros)
    }
}

impl fmt::Display for Padding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Right => "right",
            Self::Left => "left",
            Self::LeftZeros => "left-zeros",
            Self::RightZeros => "right-zeros",
        })
    }
}

impl FromStr for Padding {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|padding| padding.to_string() == text);
        found.ok_or_else(|| Error::usage(format!("unknown padding `{text}`"), "use left, right, left-zeros or right-zeros"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paddings_round_trip_through_text() {
        for padding in Padding::ALL {
            assert_eq!(padding.to_string().parse::<Padding>().unwrap(), padding);
        }
        assert_eq!("middle".parse::<Padding>().unwrap_err().exit_code(), 2);
    }
}
