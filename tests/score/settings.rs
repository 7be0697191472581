//! The environment variables of the score.

use std::str::FromStr;

/// The value of a variable, which must be one of these names; `None` if it is not set.
pub fn choice<T: Copy>(variable: &str, named: &[(&str, T)]) -> Option<T> {
    let value = std::env::var(variable).ok()?;
    let found = named.iter().find(|(name, _)| *name == value);
    let names = || named.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    Some(found.unwrap_or_else(|| panic!("{variable} is one of {}, not {value}", names())).1)
}

/// The number that a variable is set to, or `otherwise`.
pub fn number<T: FromStr>(variable: &str, otherwise: T) -> T {
    let parse = |text: String| text.parse().unwrap_or_else(|_| panic!("{variable} is a number, not {text}"));
    std::env::var(variable).map_or(otherwise, parse)
}
