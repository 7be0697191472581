//! kiln.
fn main() {}
