//! The calls the CUDA backend makes, as a trait: the real driver is one implementation, and tests run the backend on a stand-in
//! that can refuse any of them. Addresses are device addresses; handles are whatever the driver says they are.

use crate::error::Result;
use crate::tensor::DType;
use std::ptr::NonNull;

/// What is known of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory that a block may have.
    pub shared: u32,
    /// The highest clock they run at, in kHz.
    pub clock: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Newest CUDA version the driver speaks, major and minor.
    pub driver: (u32, u32),
}

impl DeviceInfo {
    /// Operations of one multiprocessor's tensor cores in a clock: dense products of bf16, summed in f32. From the vendor's
    /// descriptions of each architecture; none where they are not known.
    pub fn tensor_flops_per_clock(&self) -> Option<u32> {
        // What is sold for games sums in f32 at half the rate of the same chip in a workstation.
        let whole = if self.name.contains("GeForce") { 512 } else { 1024 };
        match self.capability {
            (8, 0) => Some(2048),
            (8, 6 | 9) | (12, 0) => Some(whole),
            (9, 0) => Some(4096),
            (10, 0 | 3) => Some(8192),
            _ => None,
        }
    }

    /// The same for the whole GPU in a second, at its highest clock: what no kernel can pass, and none holds for long.
    pub fn tensor_flops(&self) -> Option<f64> {
        let per_clock = f64::from(self.tensor_flops_per_clock()?);
        Some(per_clock * f64::from(self.multiprocessors) * f64::from(self.clock) * 1e3)
    }
}

/// Loaded kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module(pub u64);

/// One kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub u64);

/// A queue of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub u64);

/// A point in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// A recorded sequence of launches, ready to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel.
    pub function: Function,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Blocks of a cluster; 1 for none.
    pub cluster: u32,
    /// Start before the kernel before it is done; the kernel waits for it where it has to.
    pub overlap: bool,
}

/// Rows of bytes in device memory, `pitch` bytes from row to row.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Address of the first.
    pub address: u64,
    /// Bytes from the start of one row to the start of the next.
    pub pitch: u64,
    /// Bytes of a row.
    pub width: u64,
}

/// What a tensor map says: a matrix, and the box of it that one copy brings to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapSpec {
    /// Address of the first element.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Columns and rows.
    pub size: [u64; 2],
    /// Bytes from row to row.
    pub pitch: u64,
    /// Columns and rows of a box.
    pub tile: [u32; 2],
    /// How a row of a box is spread over the banks of shared memory.
    pub swizzle: Swizzle,
}

/// How the 16-byte chunks of a box are exchanged, so that columns can be read without conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Not at all.
    None,
    /// Within 32 bytes, by the third bit of the row.
    Bytes32,
    /// Within 64 bytes, by the second and third bit of the row.
    Bytes64,
    /// Within 128 bytes, by the row's last three bits.
    Bytes128,
}

/// A GPU. Work is queued on streams and done in order; an error may belong to work that was queued long before.
pub trait Driver {
    /// Which GPU this is.
    fn device(&self) -> &DeviceInfo;

    /// Bytes of device memory that can still be had.
    fn free_memory(&self) -> Result<u64>;

    /// Allocates device memory.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Gives device memory back.
    fn free(&self, address: u64);

    /// Allocates host memory that the device can copy from by itself.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Gives such memory back.
    fn free_pinned(&self, memory: NonNull<u8>);

    /// Loads kernels.
    fn load(&self, image: &[u8]) -> Result<Module>;

    /// Gives kernels back.
    fn unload(&self, module: Module);

    /// Finds a kernel, checks that its only parameter has `params` bytes and allows it `shared` bytes of dynamic memory.
    fn function(&self, module: Module, symbol: &str, params: usize, shared: u32) -> Result<Function>;

    /// Makes a stream.
    fn stream(&self) -> Result<Stream>;

    /// Gives a stream back.
    fn destroy_stream(&self, stream: Stream);

    /// Waits until everything queued on a stream is done.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Makes an event.
    fn event(&self) -> Result<Event>;

    /// Gives an event back.
    fn destroy_event(&self, event: Event);

    /// Sets an event behind everything queued on a stream.
    fn record_event(&self, event: Event, stream: Stream) -> Result<()>;

    /// Waits for the event's point, where it was set last; not at all if it never was.
    fn synchronize_event(&self, event: Event) -> Result<()>;

    /// What is queued on a stream from now on is done after the event's point, where it was set last.
    fn wait_event(&self, stream: Stream, event: Event) -> Result<()>;

    /// Queues a copy to the device. Pinned memory must stay as it is until the stream is synchronised.
    fn copy_in(&self, stream: Stream, to: Rows, from: &[u8]) -> Result<()>;

    /// Copies from the device and waits for it.
    fn copy_out(&self, stream: Stream, from: Rows, to: &mut [u8]) -> Result<()>;

    /// Queues filling `len` bytes with one value.
    fn fill(&self, stream: Stream, at: u64, value: u8, len: u64) -> Result<()>;

    /// Queues a kernel; `params` are the bytes of its parameter.
    fn launch(&self, stream: Stream, launch: &Launch, params: &[u8]) -> Result<()>;

    /// Encodes a tensor map.
    fn tensor_map(&self, spec: &MapSpec) -> Result<[u64; 16]>;

    /// From now on, what is queued on the stream is recorded instead.
    fn begin_capture(&self, stream: Stream) -> Result<()>;

    /// Ends recording.
    fn end_capture(&self, stream: Stream) -> Result<Graph>;

    /// Queues everything that was recorded.
    fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()>;

    /// Gives a recording back.
    fn destroy_graph(&self, graph: Graph);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The makers' own figures, which use a clock that is sometimes below the highest.
    #[test]
    fn tensor_cores_do_what_their_makers_say() {
        for (name, capability, multiprocessors, clock, tera) in [
            ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1_410_000, 312.0),
            ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1_695_000, 71.0),
            ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2_520_000, 165.2),
            ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2_505_000, 364.2),
            ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1_830_000, 989.4),
            ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2_407_000, 209.5),
        ] {
            let (index, memory, driver) = (0, 0, (13, 0));
            let device = DeviceInfo { index, name: name.into(), capability, multiprocessors, shared: 0, clock, memory, driver };
            let got = device.tensor_flops().unwrap() / 1e12;
            assert!((got / tera - 1.0).abs() < 0.005, "{name}: {got}");
            assert_eq!(DeviceInfo { capability: (7, 5), ..device }.tensor_flops(), None);
        }
    }
}
