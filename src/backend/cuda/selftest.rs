//! A short test of whether a GPU computes what is asked of it, in every way that kernels are launched.

use super::Cuda;
use super::abi;
use super::driver::{MapSpec, Swizzle};
use super::graph::CapturedGraph;
use super::launch::Kernel;
use crate::backend::{Backend, Op};
use crate::error::{Error, Result};
use crate::tensor::{Arena, DType, Region, Tensor};

impl Cuda {
    /// Sends values to the GPU, copies them there, and compares what comes back. Names what was tried.
    pub fn self_test(&mut self) -> Result<Vec<&'static str>> {
        let mut arena = Arena::new(Region::Arena);
        let [x, a, b] = [(); 3].map(|()| arena.alloc(200, 328, DType::Bf16));
        let (x, a, b) = (x?, a?, b?);
        self.reserve(arena.peak())?;
        let values: Vec<f32> = (0..x.len()).map(|i| (i % 251) as f32).collect();
        self.write(x, &values)?;
        self.run(Op::Copy { out: b, x })?;
        self.expect(b, &values, "copy")?;
        let mut tried = vec!["copy"];
        if self.context.kernels.has(Kernel::Selftest) {
            // The second copy reads what the first one writes, and may start before that has ended.
            let twice = |cuda: &Self| cuda.selftest_copy(a, x).and_then(|()| cuda.selftest_copy(b, a));
            self.clear([a, b])?;
            twice(self)?;
            self.expect(b, &values, "tensor map, cluster and overlap")?;
            self.clear([a, b])?;
            CapturedGraph::capture(&self.driver, self.stream.1, || twice(self))?.launch(self.stream.1)?;
            self.expect(b, &values, "graph")?;
            tried.extend(["tensor map", "cluster", "overlap", "graph"]);
        }
        Ok(tried)
    }

    fn selftest_copy(&self, out: Tensor, x: Tensor) -> Result<()> {
        let tile = abi::KL_SELFTEST_TILE;
        let spec = MapSpec {
            address: self.rows(x, "selftest")?.address,
            dtype: x.dtype,
            size: [x.cols as u64, x.rows as u64],
            pitch: x.dtype.bytes(x.stride) as u64,
            tile: [tile; 2],
            swizzle: Swizzle::Bytes128,
        };
        let p = abi::KlSelftest {
            x: self.context.kernels.tensor_map(spec)?,
            out: self.context.mat(out, "selftest")?,
            unused: [0; _],
        };
        let pairs = p.out.cols.div_ceil(tile).next_multiple_of(abi::KL_SELFTEST_CLUSTER);
        self.context.kernels.launch(Kernel::Selftest, [pairs, p.out.rows.div_ceil(tile), 1], &p)
    }

    fn clear(&self, tensors: [Tensor; 2]) -> Result<()> {
        tensors.into_iter().try_for_each(|t| {
            let rows = self.rows(t, "selftest")?;
            self.driver.fill(self.stream.1, rows.address, 0, rows.width)
        })
    }

    fn expect(&mut self, t: Tensor, values: &[f32], what: &str) -> Result<()> {
        let mut got = vec![0.0; t.len()];
        self.read(t, &mut got)?;
        if got == values {
            return Ok(());
        }
        Err(Error::Device { call: "self-test", status: format!("{what}: wrong values came back") })
    }
}
