//! The table of token embeddings. It stays in host memory, in the mapped file: a prompt needs only a few rows, which are not
//! worth hundreds of megabytes of GPU memory.

use crate::error::{Error, Result};
use crate::tensor::{DType, WeightSlice};

/// A table with one row per token of the vocabulary.
pub struct TokenTable {
    /// The rows of the table, in order; none in a dry run.
    parts: Vec<WeightSlice>,
    rows: usize,
    cols: usize,
}

impl TokenTable {
    pub fn new(parts: Vec<WeightSlice>, rows: usize, cols: usize) -> Self {
        Self { parts, rows, cols }
    }

    /// Bytes of the stored table. Without a checkpoint, bytes in bfloat16.
    pub fn bytes(&self) -> u64 {
        match &*self.parts {
            [] => DType::Bf16.bytes(self.rows * self.cols) as u64,
            parts => parts.iter().map(WeightSlice::stored_bytes).sum(),
        }
    }

    /// The embeddings of these tokens, in order; zeros in a dry run.
    pub fn rows(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut values = vec![0.0; ids.len() * self.cols];
        for (&id, to) in ids.iter().zip(values.chunks_exact_mut(self.cols.max(1))) {
            let mut row = id as usize;
            if row >= self.rows {
                return Err(Error::Op { op: "token table", what: format!("token id {id} in a vocabulary of {}", self.rows) });
            }
            for part in &self.parts {
                if row < part.rows {
                    part.decode(row, to);
                    break;
                }
                row -= part.rows;
            }
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Bytes;
    use std::sync::Arc;

    #[test]
    fn rows_are_found_in_every_part() {
        let part = |first: usize, rows: usize| {
            let values: Vec<f32> = (0..2 * rows).map(|i| (2 * first + i) as f32).collect();
            WeightSlice::plain(Bytes::new(Arc::new(DType::Bf16.encoded(&values))), DType::Bf16, rows)
        };
        let table = TokenTable::new(vec![part(0, 3), part(3, 2)], 5, 2);
        assert_eq!(table.rows(&[4, 0, 2, 3, 4]).unwrap(), [8.0, 9.0, 0.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        assert!(table.rows(&[0, 5]).is_err());
        assert_eq!([table.bytes(), TokenTable::new(Vec::new(), 5, 2).bytes()], [20, 20]);
        assert_eq!(TokenTable::new(Vec::new(), 5, 2).rows(&[1]).unwrap(), [0.0; 2]);
    }
}
