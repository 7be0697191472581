//! Images on a terminal: [`Way`] chooses how, from the environment alone, and [`Canvas`] makes the bytes that draw one image after the
//! other in one place. This module knows terminals and nothing about models.
//!
//! Nothing is ever asked of the terminal. A question takes raw mode, hangs where nobody answers, and late answers are typed into the
//! shell. The cursor stays visible and the screen stays the usual one, so a run that ends early leaves nothing to restore.

pub mod area;
pub mod blocks;
mod canvas;
mod iterm2;
mod kitty;
pub mod way;

pub use area::Screen;
pub use canvas::{Canvas, write};
pub use way::{Facts, NamedWay, Way};
