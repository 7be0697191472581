//! Adapter files through the public interface: hostile, damaged and foreign ones.

mod hostile;
mod mutations;
