//! The driver calls of the CUDA backend, as a trait. The real driver is one implementation. Tests run the backend on a stand-in that can
//! refuse any call. Addresses are device addresses; handles are opaque to the backend.

use super::abi;
use crate::error::Result;
use crate::tensor::DType;
use std::ptr::NonNull;
use std::time::Duration;

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its index.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// A number that identifies the GPU.
    pub uuid: [u8; 16],
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors (SMs).
    pub multiprocessors: u32,
    /// Most bytes of shared memory that a CTA may have.
    pub shared: u32,
    /// The highest clock of the SMs, in kHz.
    pub clock: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Newest CUDA version that the driver supports, major and minor.
    pub driver: (u32, u32),
}

impl DeviceInfo {
    /// Most bytes of shared memory that a CTA may have on compute capability 9.0.
    pub const SM90_SHARED: u32 = abi::KL_SM90_SHARED_LIMIT;

    /// Most bytes of shared memory that a CTA may have on compute capability 12.x.
    pub const SM120_SHARED: u32 = abi::KL_SM120_SHARED_LIMIT;

    /// Floating-point operations per clock of one SM's tensor cores, see `tensor_flops_per_clock`.
    pub fn tensor_flops_per_clock(&self, dtype: DType) -> Option<u32> {
        tensor_flops_per_clock(&self.name, self.capability, dtype)
    }

    /// Floating-point operations per second of the whole GPU at its highest clock: an upper limit that no kernel sustains for long.
    pub fn tensor_flops(&self, dtype: DType) -> Option<f64> {
        let per_clock = f64::from(self.tensor_flops_per_clock(dtype)?);
        Some(per_clock * f64::from(self.multiprocessors) * f64::from(self.clock) * 1e3)
    }
}

/// Floating-point operations per clock of one SM's tensor cores, on a GPU of this name and compute capability. They count dense products of
/// two operands of this type (bf16, e4m3 or e2m1) with f32 accumulators. The numbers are from the vendor's descriptions of each
/// architecture. `None` if they are not known.
pub fn tensor_flops_per_clock(name: &str, capability: (u32, u32), dtype: DType) -> Option<u32> {
    // GeForce cards accumulate in f32 at half the rate of workstation cards with the same chip.
    let whole = if name.contains("GeForce") { 512 } else { 1024 };
    let bf16 = match capability {
        (8, 0) => 2048,
        (8, 6 | 9) | (12, 0) => whole,
        (9, 0) => 4096,
        (10, 0 | 3) => 8192,
        _ => return None,
    };
    match dtype {
        DType::Bf16 => Some(bf16),
        // Every architecture that multiplies e4m3 does so at twice the rate.
        DType::E4m3 if capability >= (8, 9) => Some(2 * bf16),
        // The block-scaled MMA runs at its full rate on all cards of compute capability 12.x.
        DType::E2m1 if capability.0 == 12 => Some(4096),
        DType::E2m1 if capability.0 == 10 => Some(4 * bf16),
        _ => None,
    }
}

/// A loaded module of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module(pub u64);

/// A kernel of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub u64);

/// A stream: a queue whose work is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub u64);

/// An event: a point in a stream that others can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// An executable CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);

/// A kernel launch: the kernel and its launch configuration.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel.
    pub function: Function,
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// CTAs of a cluster; 1 without clusters.
    pub cluster: u32,
    /// Programmatic dependent launch: the kernel may start before the previous one has ended, and waits for it when it has to.
    pub overlap: bool,
}

/// Rows of bytes in device memory, `pitch` bytes from row to row.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Address of the first row.
    pub address: u64,
    /// Bytes from the start of one row to the start of the next.
    pub pitch: u64,
    /// Bytes of a row.
    pub width: u64,
}

/// What a tensor map describes: a matrix or an image, and the box that one TMA copy moves between global and shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapSpec {
    /// Address of the first element.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Columns, rows and lines. The columns of an image are its channels, its rows are the pixels of a line. A matrix is one line.
    pub size: [u64; 3],
    /// Bytes from row to row and from line to line.
    pub pitch: [u64; 2],
    /// Columns, rows and lines of a box.
    pub tile: [u32; 3],
    /// How the box is laid out in shared memory.
    pub swizzle: Swizzle,
}

impl MapSpec {
    /// Number of dimensions: two for a matrix, three for an image.
    pub fn rank(&self) -> u32 {
        if self.pitch[1] == 0 { 2 } else { 3 }
    }
}

/// How the 16-byte chunks of a box are permuted in shared memory, so that columns can be read without bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Not permuted.
    None,
    /// Within 32 bytes, by bit 2 of the row.
    Bytes32,
    /// Within 64 bytes, by bits 1 and 2 of the row.
    Bytes64,
    /// Within 128 bytes, by the three lowest bits of the row.
    Bytes128,
}

/// A GPU. Work is queued on streams and done in order; an error may belong to work that was queued long before.
pub trait Driver {
    /// Which GPU this is.
    fn device(&self) -> &DeviceInfo;

    /// Bytes of device memory that are free.
    fn free_memory(&self) -> Result<u64>;

    /// Bytes per second that the device moves to or from its memory at most. `None` if the driver does not tell.
    fn memory_bandwidth(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Allocates device memory.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Frees device memory.
    fn free(&self, address: u64);

    /// Allocates pinned (page-locked) host memory, from which the device copies without help of the host.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Frees pinned memory.
    fn free_pinned(&self, memory: NonNull<u8>);

    /// Loads a module from a fat binary.
    fn load(&self, image: &[u8]) -> Result<Module>;

    /// Unloads a module.
    fn unload(&self, module: Module);

    /// Finds a kernel, checks that its only parameter has `params` bytes, and allows it `shared` bytes of dynamic shared memory.
    fn function(&self, module: Module, symbol: &str, params: usize, shared: u32) -> Result<Function>;

    /// Creates a stream.
    fn stream(&self) -> Result<Stream>;

    /// Destroys a stream.
    fn destroy_stream(&self, stream: Stream);

    /// Waits until everything queued on a stream is done.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Creates an event.
    fn event(&self) -> Result<Event>;

    /// Creates an event that keeps the time at which it was reached.
    fn timed_event(&self) -> Result<Event>;

    /// The time between two timed events. Both must have been reached.
    fn elapsed(&self, from: Event, to: Event) -> Result<Duration>;

    /// Destroys an event.
    fn destroy_event(&self, event: Event);

    /// Records an event behind everything queued on a stream.
    fn record_event(&self, event: Event, stream: Stream) -> Result<()>;

    /// Makes the host wait until the event's last recording has been reached. Returns at once if it was never recorded.
    fn synchronize_event(&self, event: Event) -> Result<()>;

    /// Makes work queued on a stream from now on wait for the event's last recording.
    fn wait_event(&self, stream: Stream, event: Event) -> Result<()>;

    /// Queues a copy to the device. Pinned memory must not change until the copy has ended.
    fn copy_in(&self, stream: Stream, to: Rows, from: &[u8]) -> Result<()>;

    /// Copies from the device and waits for it.
    fn copy_out(&self, stream: Stream, from: Rows, to: &mut [u8]) -> Result<()>;

    /// Queues filling `len` bytes with one value.
    fn fill(&self, stream: Stream, at: u64, value: u8, len: u64) -> Result<()>;

    /// Queues a kernel launch; `params` are the bytes of the kernel's parameter.
    fn launch(&self, stream: Stream, launch: &Launch, params: &[u8]) -> Result<()>;

    /// Encodes a tensor map.
    fn tensor_map(&self, spec: &MapSpec) -> Result<[u64; 16]>;

    /// Captures, instead of running, what is queued on the stream from now on.
    fn begin_capture(&self, stream: Stream) -> Result<()>;

    /// Ends the capture and instantiates the graph.
    fn end_capture(&self, stream: Stream) -> Result<Graph>;

    /// Queues the launches of a captured graph.
    fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()>;

    /// Destroys a graph.
    fn destroy_graph(&self, graph: Graph);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vendor's own figures, which use a clock that is sometimes below the highest.
    #[test]
    fn tensor_core_peaks_are_those_of_the_data_sheets() {
        for (name, capability, multiprocessors, clock, bf16, e4m3, e2m1) in [
            ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1_410_000, 312.0, None, None),
            ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1_695_000, 71.0, None, None),
            ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2_520_000, 165.2, Some(330.3), None),
            ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2_505_000, 364.2, Some(728.5), None),
            ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1_830_000, 989.4, Some(1978.9), None),
            ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2_407_000, 209.5, Some(419.0), Some(1676.0)),
        ] {
            let (index, memory, driver) = (0, 0, (13, 0));
            let (own, uuid) = (name.to_owned(), [0; 16]);
            let device = DeviceInfo { index, name: own, uuid, capability, multiprocessors, shared: 0, clock, memory, driver };
            for (dtype, teraflops) in [(DType::Bf16, Some(bf16)), (DType::E4m3, e4m3), (DType::F32, None), (DType::E2m1, e2m1)] {
                let got = device.tensor_flops(dtype).map(|flops| flops / 1e12);
                let close = got.zip(teraflops).is_some_and(|(got, expected): (f64, f64)| (got / expected - 1.0).abs() < 0.005);
                assert!(close || (got.is_none() && teraflops.is_none()), "{name}, {dtype:?}: {got:?}");
            }
            let older = DeviceInfo { capability: (7, 5), ..device };
            assert_eq!([DType::Bf16, DType::E4m3].map(|dtype| older.tensor_flops(dtype)), [None; 2]);
        }
    }
}
