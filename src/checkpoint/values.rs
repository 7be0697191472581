//! Checks all values of a file before they are copied or quantized into another one: a fault would only show when that file is used.

use super::shard::Shard;
use super::zeros;
use crate::component::Component;
use crate::error::{Error, Result};
use crate::names::{self, Companion, TensorRole};
use kiln_numerics::scan::non_finite;
use rayon::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that one thread checks at a time; a multiple of every element size.
const BLOCK: usize = 1 << 20;

impl Shard {
    /// Fails if a weight of this part, or its scales, are zero where no trained ones are, whether a run reads them or not. This reads a
    /// few places of each.
    pub fn check_written(&self, part: Component) -> Result<()> {
        for (name, entry) in self.tensors() {
            let role = names::resolve(part, name);
            let is_read = matches!(role, TensorRole::Weight(_) | TensorRole::Quantization(_, Companion::WeightScale));
            if let Some(bytes) = self.bytes(name).filter(|_| is_read && !zeros::may_be_zero(name)) {
                // A file that was truncated after it was opened also reads as zeros; then the error says that it changed.
                let checked = zeros::refuse(self.path(), name, entry, &bytes, names::is_table(name));
                checked.map_err(|error| self.verify().err().unwrap_or(error))?;
            }
        }
        Ok(())
    }

    /// Fails if a value is NaN or infinite. This reads the whole file. Returns [`Error::Interrupted`] once `stop` is set.
    pub fn check_finite(&self, stop: &AtomicBool) -> Result<()> {
        for (name, entry) in self.tensors() {
            let bytes = self.bytes(name);
            let blocks = bytes.as_deref().unwrap_or_default().par_chunks(BLOCK);
            if blocks.any(|block| stop.load(Ordering::Relaxed) || non_finite(entry.dtype.name, block).first.is_some()) {
                if stop.load(Ordering::Relaxed) {
                    return Err(Error::Interrupted);
                }
                return Err(not_finite(self, name));
            }
            self.release();
        }
        Ok(())
    }
}

fn not_finite(shard: &Shard, name: &str) -> Error {
    let error = Error::bad_file(shard.path(), "damaged weights", format!("tensor `{name}` has values that are not finite"));
    shard.verify().err().unwrap_or(error.with_hint("the file is damaged; download it again"))
}
