//! Runs one op on a backend and compares it with the formula: `cargo run --example op`. Any op runs this way on any [`Backend`].
#![allow(clippy::print_stdout)] // this program's output is its purpose

use kiln::DType;
use kiln::device::{Backend, Cpu};
use kiln::ops::{Arena, Bytes, Op, Region, Role, WeightSlice};
use std::sync::Arc;

fn main() -> kiln::Result<()> {
    const ROWS: usize = 2;
    const COLS: usize = 8;
    let eps = 1e-6;
    let gain: Vec<f32> = (0..COLS).map(|c| 1.0 + c as f32 / 8.0).collect();
    let x: Vec<f32> = (0..ROWS * COLS).map(|i| (i as f32 - 5.0) / 4.0).collect();

    // Tensors are descriptors. Arenas hand out offsets in one of a backend's two regions, weights and workspace.
    let mut be = Cpu::shared(Arc::default());
    let (mut weights, mut workspace) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    let weight = weights.alloc(1, COLS, DType::F32)?;
    let (input, output) = (workspace.alloc(ROWS, COLS, DType::F32)?, workspace.alloc(ROWS, COLS, DType::F32)?);

    be.reserve(Region::Weights, weights.peak())?;
    let bytes: Vec<u8> = gain.iter().flat_map(|value| value.to_le_bytes()).collect();
    be.upload(weight, Role::Vector, &[WeightSlice::plain(Bytes::new(Arc::new(bytes)), DType::F32, 1)])?;
    be.reserve(Region::Arena, workspace.peak())?;
    be.write(input, &x)?;
    be.run(Op::RmsNorm { out: output, x: input, weight, eps })?;
    let mut y = [0.0; ROWS * COLS];
    be.read(output, &mut y)?;

    for (row, (y, x)) in y.chunks(COLS).zip(x.chunks(COLS)).enumerate() {
        let rms = (x.iter().map(|x| x * x).sum::<f32>() / COLS as f32 + eps).sqrt();
        let error = (0..COLS).map(|c| (y[c] - x[c] / rms * gain[c]).abs()).fold(0.0, f32::max);
        println!("row {row}: {y:.3?}, largest error {error:.1e}");
        assert!(error < 1e-5, "row {row} is off by {error}");
    }
    Ok(())
}
