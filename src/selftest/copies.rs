//! Tests copies between host and device, through tensor maps and bulk copies, in kernels that overlap, and in a captured graph.

use super::Outcome;
use crate::backend::cuda::{CopyBy, Cuda};
use crate::backend::{Backend, Op};
use crate::error::Result;
use crate::tensor::{Arena, DType, Region, Tensor};

/// Sides that are not multiples of a box's sides.
const ROWS: usize = 200;
const COLS: usize = 328;
/// The sides padded to whole boxes.
const PADDED: [usize; 2] = [256, 384];

/// A bf16 matrix of small integers, and `others` that are padded to whole boxes and filled with NaN, in freshly reserved working memory.
struct Matrices {
    x: Tensor,
    others: Vec<Tensor>,
}

fn values(seed: usize) -> Vec<f32> {
    (0..ROWS * COLS).map(|i| ((i + 17 * seed) % 251) as f32).collect()
}

impl Matrices {
    fn new(cuda: &mut Cuda, others: usize) -> Result<Self> {
        let mut arena = Arena::new(Region::Arena);
        let x = arena.alloc(ROWS, COLS, DType::Bf16)?;
        let others = (0..others).map(|_| arena.alloc(PADDED[0], PADDED[1], DType::Bf16)).collect::<Result<Vec<_>>>()?;
        cuda.reserve(Region::Arena, arena.peak())?;
        cuda.write(x, &values(0))?;
        others.iter().try_for_each(|t| cuda.fill_with_nan(*t))?;
        Ok(Self { x, others })
    }
}

/// The part of a padded matrix that holds values.
fn inside(t: Tensor) -> Tensor {
    t.rows(0..ROWS).cols(0..COLS)
}

/// What is wrong with a matrix that should hold the values of a seed, with zeros in its padding.
fn fault(cuda: &mut Cuda, t: Tensor, seed: usize) -> Result<Option<String>> {
    let (want, mut got) = (values(seed), vec![0.0; t.len()]);
    cuda.read(t, &mut got)?;
    let wrong = got.iter().enumerate().find_map(|(i, &got)| {
        let (row, col) = (i / t.cols, i % t.cols);
        let want = if row < ROWS && col < COLS { want[row * COLS + col] } else { 0.0 };
        (got != want).then(|| format!("[{row}, {col}] of [{ROWS}, {COLS}] is {got}, not {want}"))
    });
    Ok(wrong)
}

/// Copies from the host to the device, on the device, and back.
pub fn copy(cuda: &mut Cuda) -> Result<Outcome> {
    let matrices = Matrices::new(cuda, 1)?;
    let out = inside(matrices.others[0]);
    cuda.run(Op::Copy { out, x: matrices.x })?;
    Ok(Outcome::unless(fault(cuda, out, 0)?))
}

/// One kernel that copies in this way. Boxes must fill the padding with zeros.
pub fn copy_by(cuda: &mut Cuda, by: CopyBy) -> Result<Outcome> {
    if !cuda.has_copy(by) {
        return Ok(Outcome::NotHere);
    }
    let matrices = Matrices::new(cuda, 1)?;
    let padded = matrices.others[0];
    let out = if by == CopyBy::Bulk { inside(padded) } else { padded };
    cuda.copy_by(by, out, matrices.x)?;
    Ok(Outcome::unless(fault(cuda, out, 0)?))
}

/// A way to copy whose kernels may start before the previous one has ended. If there is none, the op.
fn overlapping(cuda: &Cuda) -> CopyBy {
    if cuda.has_copy(CopyBy::Box128) { CopyBy::Box128 } else { CopyBy::Op }
}

/// Copies that each read the result of the previous one.
fn chain(matrices: &Matrices, length: usize) -> Vec<(Tensor, Tensor)> {
    let at = |i: usize| inside(matrices.others[i % matrices.others.len()]);
    (0..length).map(|i| (at(i), if i == 0 { matrices.x } else { at(i - 1) })).collect()
}

/// Kernels that start before the previous one has ended, and read its result.
pub fn overlap(cuda: &mut Cuda) -> Result<Outcome> {
    let by = overlapping(cuda);
    if by == CopyBy::Op {
        return Ok(Outcome::NotHere);
    }
    let matrices = Matrices::new(cuda, 3)?;
    let chain = chain(&matrices, 8);
    chain.iter().try_for_each(|(out, x)| cuda.copy_by(by, *out, *x))?;
    Ok(Outcome::unless(fault(cuda, chain[chain.len() - 1].0, 0)?))
}

/// A captured graph of overlapping kernels, launched twice on different values.
pub fn graph(cuda: &mut Cuda) -> Result<Outcome> {
    let (by, matrices) = (overlapping(cuda), Matrices::new(cuda, 2)?);
    let chain = chain(&matrices, 2);
    let (graph, last) = (cuda.capture_copies(by, &chain)?, chain[chain.len() - 1].0);
    for seed in 1..=2 {
        cuda.write(matrices.x, &values(seed))?;
        cuda.launch_copies(&graph)?;
        if let Some(fault) = fault(cuda, last, seed)? {
            return Ok(Outcome::Failed(format!("launch {seed}: {fault}")));
        }
    }
    Ok(Outcome::unless(None))
}
