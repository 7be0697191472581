//! Adapter files from the outside: hostile, damaged and foreign ones.

mod hostile;
mod mutations;
