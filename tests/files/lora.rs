//! Adapter files from the outside: hostile, damaged and foreign ones.

mod hostile;
mod mutations;

use kiln::error::Error;

/// The error and its hint in one line.
fn message(error: &Error) -> String {
    assert_eq!(error.exit_code(), 3, "{error}");
    match kiln::cli::hint(error) {
        Some(hint) => format!("{} / {hint}", kiln::cli::message(error)),
        None => kiln::cli::message(error),
    }
}
