//! The kernels of a self-test: single instructions and copies that no op could test alone. The checks are in [`crate::selftest`].

use super::Cuda;
use super::abi;
use super::dispatch::dispatch;
use super::driver::{MapSpec, Rows, Swizzle};
use super::graph::CapturedGraph;
use super::launch::Kernel;
use crate::backend::{Backend, Op};
use crate::error::Result;
use crate::tensor::{Arena, DType, Region, Tensor};

/// An MMA instruction: `mma.sync` with a result of 16x8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mma {
    /// bf16 by bf16.
    Bf16,
    /// e4m3 by e4m3.
    E4m3,
    /// e4m3 by e4m3, block-scaled, with scales that are one.
    E4m3Scaled,
    /// e2m1 by e2m1, block-scaled.
    Nvf4 {
        /// Which lanes supply the scales of A: the selectors of both operands.
        selectors: [u32; 2],
    },
}

impl Mma {
    const fn kernel(self) -> Kernel {
        match self {
            Self::Bf16 => Kernel::SelftestMmaBf16,
            Self::E4m3 => Kernel::SelftestMmaE4m3,
            Self::E4m3Scaled => Kernel::SelftestMmaE4m3Scaled,
            Self::Nvf4 { .. } => Kernel::SelftestMmaNvf4,
        }
    }
}

/// Lanes of a warp.
pub const LANES: usize = 32;

/// The words of each lane of a warp for an MMA: four registers of A, two of B, the scales of A and of B, four accumulators.
pub type Fragments = [[u32; abi::KL_FRAGMENT_WORDS as usize]; LANES];

/// How a matrix is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyBy {
    /// By `Op::Copy`.
    Op,
    /// Through tensor map boxes with rows of 128 bytes and a swizzle of 128 bytes.
    Box128,
    /// Through tensor map boxes with rows of 64 bytes and a swizzle of 64 bytes.
    Box64,
    /// By bulk copies of rows.
    Bulk,
    /// As `Box128`, in clusters of two CTAs. Each CTA stores what the other has loaded.
    Cluster,
}

/// Copies that were captured as a CUDA graph.
pub struct CopyGraph(CapturedGraph);

fn words_to_bytes(words: impl Iterator<Item = u32>) -> Vec<u8> {
    words.flat_map(u32::to_le_bytes).collect()
}

impl Cuda {
    /// Whether there is a kernel with this instruction.
    pub fn has_mma(&self, mma: Mma) -> bool {
        self.context.kernels.has(mma.kernel())
    }

    /// The kernel for this way to copy, if there is one.
    fn copy_kernel(&self, by: CopyBy) -> Option<Kernel> {
        let kernels: &[Kernel] = match by {
            CopyBy::Op => &[Kernel::Map],
            CopyBy::Cluster => &[Kernel::SelftestClusterSm90],
            CopyBy::Box128 | CopyBy::Box64 | CopyBy::Bulk => &[Kernel::SelftestCopySm90, Kernel::SelftestCopySm120],
        };
        kernels.iter().copied().find(|kernel| self.context.kernels.has(*kernel))
    }

    /// Whether there is a kernel for this way to copy.
    pub fn has_copy(&self, by: CopyBy) -> bool {
        self.copy_kernel(by).is_some()
    }

    /// Whether this GPU has kernels that are off until a self-test has passed on it, see [`Cuda::enable_gated`].
    pub fn has_gated_kernels(&self) -> bool {
        self.loaded().any(Kernel::is_gated)
    }

    /// The kernels that this GPU can run, including those that may not be chosen.
    pub fn loaded(&self) -> impl Iterator<Item = Kernel> {
        Kernel::ALL.iter().copied().filter(|kernel| self.context.kernels.can_run(*kernel))
    }

    /// A hash of the loaded kernel images, which identifies the build.
    pub fn fingerprint(&self) -> u64 {
        self.context.kernels.fingerprint()
    }

    /// Reserves working memory for byte buffers of these lengths, and writes the first buffer.
    fn buffers<const N: usize>(&mut self, first: &[u8], others: [usize; N]) -> Result<(u64, [Rows; N])> {
        let mut arena = Arena::new(Region::Arena);
        let from = arena.alloc(1, first.len(), DType::U8)?;
        let to = others.map(|len| arena.alloc(1, len, DType::U8));
        self.reserve(Region::Arena, arena.peak())?;
        let from = self.rows(from, "self-test")?;
        self.driver.copy_in(self.stream.1, from, first)?;
        let mut rows = [from; N];
        for (row, tensor) in rows.iter_mut().zip(to) {
            *row = self.rows(tensor?, "self-test")?;
        }
        Ok((from.address, rows))
    }

    fn fetch(&self, from: Rows) -> Result<Vec<u8>> {
        let mut bytes = vec![0; from.width as usize];
        self.driver.copy_out(self.stream.1, from, &mut bytes)?;
        Ok(bytes)
    }

    /// Runs one MMA for each case, and returns the accumulators of each lane. Working memory is lost.
    pub fn multiply_fragments(&mut self, mma: Mma, cases: &[Fragments]) -> Result<Vec<[[f32; 4]; LANES]>> {
        const WARPS: u32 = abi::KL_SELFTEST_THREADS / LANES as u32;
        let bytes = words_to_bytes(cases.iter().flatten().flatten().copied());
        let (fragments, [results]) = self.buffers(&bytes, [cases.len() * LANES * 16])?;
        let [selector_a, selector_b] = if let Mma::Nvf4 { selectors } = mma { selectors } else { [0; 2] };
        let count = cases.len() as u32;
        let p = abi::KlFragments { fragments, results: results.address, cases: count, selector_a, selector_b, unused: 0 };
        self.context.kernels.launch(mma.kernel(), [count.div_ceil(WARPS), 1, 1], &p)?;
        let values = DType::F32.decoded(&self.fetch(results)?);
        Ok(values.as_chunks::<4>().0.as_chunks::<LANES>().0.to_vec())
    }

    /// Values as codes of e4m3 and of e2m1, each with the code of its negative. Working memory is lost.
    pub fn convert(&mut self, values: &[f32]) -> Result<Vec<([u8; 2], [u8; 2])>> {
        let bytes = DType::F32.encoded(values);
        let (from, [e4m3, e2m1]) = self.buffers(&bytes, [2 * values.len(), values.len()])?;
        let p = abi::KlConversions { values: from, e4m3: e4m3.address, e2m1: e2m1.address, count: values.len() as u64 };
        self.context.kernels.launch(
            Kernel::SelftestConvert,
            [(values.len() as u32).div_ceil(abi::KL_SELFTEST_THREADS), 1, 1],
            &p,
        )?;
        let (pairs, nibbles) = (self.fetch(e4m3)?, self.fetch(e2m1)?);
        Ok(pairs.as_chunks().0.iter().zip(nibbles).map(|(pair, byte)| (*pair, [byte >> 4, byte & 15])).collect())
    }

    /// Queues a copy of bf16 values. `out` may have more rows and columns than `x`. Boxes fill them with zeros.
    pub fn copy_by(&self, by: CopyBy, out: Tensor, x: Tensor) -> Result<()> {
        let Some(kernel) = self.copy_kernel(by).filter(|_| by != CopyBy::Op) else {
            return dispatch(&self.context, Op::Copy { out, x });
        };
        let (how, cols, swizzle) = match by {
            CopyBy::Box64 => (abi::KL_TEST_BOX_64, 32, Swizzle::Bytes64),
            CopyBy::Bulk => (abi::KL_TEST_BULK, 64, Swizzle::Bytes128),
            _ => (abi::KL_TEST_BOX_128, 64, Swizzle::Bytes128),
        };
        let spec = MapSpec {
            address: self.rows(x, "self-test")?.address,
            dtype: x.dtype,
            size: [x.cols as u64, x.rows as u64, 1],
            pitch: [x.dtype.bytes(x.stride) as u64, 0],
            tile: [cols, abi::KL_SELFTEST_TILE, 1],
            swizzle,
        };
        let p = abi::KlTestCopy {
            map: self.context.kernels.tensor_map(spec)?,
            from: self.context.mat(x, "self-test")?,
            out: self.context.mat(out, "self-test")?,
            how,
            unused: [0; _],
        };
        let across = p.out.cols.div_ceil(cols).next_multiple_of(kernel.cluster());
        self.context.kernels.launch(kernel, [across, p.out.rows.div_ceil(abi::KL_SELFTEST_TILE), 1], &p)
    }

    /// Captures copies without running them. Each pair is a destination and a source.
    pub fn capture_copies(&self, by: CopyBy, copies: &[(Tensor, Tensor)]) -> Result<CopyGraph> {
        let issue = || copies.iter().try_for_each(|(out, x)| self.copy_by(by, *out, *x));
        let capture = || CapturedGraph::capture(&self.driver, self.stream.1, issue).map(CopyGraph);
        match self.context.kernels.timeline() {
            Some(timeline) => timeline.untimed(capture),
            None => capture(),
        }
    }

    /// Queues captured copies.
    pub fn launch_copies(&self, graph: &CopyGraph) -> Result<()> {
        graph.0.launch(self.stream.1)
    }

    /// Fills a tensor and its scales with NaN, to reveal elements that a kernel does not write.
    pub fn fill_with_nan(&self, tensor: Tensor) -> Result<()> {
        tensor.as_bytes().try_for_each(|bytes| {
            let rows = self.rows(bytes, "self-test")?;
            self.driver.fill(self.stream.1, rows.address, 0xff, rows.width)
        })
    }
}
