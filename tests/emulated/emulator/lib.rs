//! Runs kiln's CUDA kernels on the CPU. The C++ in this folder compiles `kernels/entry/*.cu` unchanged and executes them with a fiber per
//! GPU thread. This crate is a safe interface to it. CONTRIBUTING.md lists what is emulated and checked.
//!
//! The state of the emulator belongs to the thread that calls it, so tests can run in parallel.

mod memory;
pub mod planted;
#[cfg(no_emulator)]
mod unavailable;

pub use memory::DeviceMemory;

use std::ffi::{CStr, CString, c_char};
use std::time::Duration;

/// An entry point of a kernel file.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    index: i32,
    /// Bytes of its parameter; it has only one.
    pub param_bytes: u64,
    /// The most threads of a CTA, by the kernel's launch bounds.
    pub max_threads: u32,
}

/// How a kernel is launched.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Threads per CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// CTAs per cluster; 1 for none.
    pub cluster: u32,
    /// 1 if the kernel may start before its predecessor has ended.
    pub overlap: u32,
    /// The compute capability of the GPU, ten times the major version plus the minor one.
    pub capability: u32,
}

/// The fields of a tensor map.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    /// Address of the first element.
    pub address: u64,
    /// Bytes per element.
    pub element_bytes: u32,
    /// Number of dimensions, 2 or 3.
    pub rank: u32,
    /// Elements along each dimension, the contiguous one first.
    pub size: [u64; 3],
    /// Bytes from one element to the next along each dimension except the first.
    pub pitch: [u64; 2],
    /// Elements of a box, along each dimension.
    pub tile: [u32; 3],
    /// Bytes within which the 16-byte chunks of a box are permuted: 0, 32, 64 or 128.
    pub swizzle: u32,
}

/// Whether the build found a C++ compiler for the emulator. If not, there are no kernels and every call fails.
pub const AVAILABLE: bool = !cfg!(no_emulator);

#[cfg(no_emulator)]
use unavailable::*;

// SAFETY: the declarations match emulator.h.
#[cfg(not(no_emulator))]
unsafe extern "C" {
    fn kl_emu_kernel(module: *const c_char, symbol: *const c_char, param_bytes: *mut u64, max_threads: *mut u32) -> i32;
    fn kl_emu_launch(kernel: i32, launch: *const Launch, params: *const std::ffi::c_void, seed: u64) -> *const c_char;
    fn kl_emu_finish() -> *const c_char;
    fn kl_emu_step_limit(steps: u64);
    fn kl_emu_patience(seconds: f64);
    fn kl_emu_allocate(address: u64, bytes: u64);
    fn kl_emu_free(address: u64);
    fn kl_emu_tensor_map(out: *mut u64, map: *const TensorMap) -> *const c_char;
    fn kl_emu_selftest() -> *const c_char;
}

/// The outcome of a call, which returned null or a message that is valid until the next call.
///
/// # Safety
/// `message` was returned by the emulator, and nothing has called it since.
unsafe fn outcome(message: *const c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the emulator returns null or a valid C string.
    Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
}

/// The entry point of this name in a module: a kernel file of the product or of the tests, or one of [`planted::BUGS`].
pub fn entry(module: &str, symbol: &str) -> Option<Entry> {
    let (module, symbol) = (CString::new(module).ok()?, CString::new(symbol).ok()?);
    let mut entry = Entry { index: 0, param_bytes: 0, max_threads: 0 };
    // SAFETY: the texts and both results outlive the call.
    entry.index = unsafe { kl_emu_kernel(module.as_ptr(), symbol.as_ptr(), &mut entry.param_bytes, &mut entry.max_threads) };
    (entry.index >= 0).then_some(entry)
}

/// Queues a kernel and runs what was queued before it. `seed` draws the order of everything that hardware leaves open.
///
/// # Panics
/// If `params` has another size than the kernel's parameter.
pub fn launch(entry: Entry, launch: &Launch, params: &[u8], seed: u64) -> Result<(), String> {
    assert_eq!(params.len() as u64, entry.param_bytes);
    // SAFETY: the parameter has the kernel's size and is copied before the call returns. Every access of a kernel is checked against
    // the allocations that `DeviceMemory` has registered.
    unsafe { outcome(kl_emu_launch(entry.index, launch, params.as_ptr().cast(), seed)) }
}

/// Runs everything that is queued.
pub fn finish() -> Result<(), String> {
    // SAFETY: takes no argument; kernels are checked as above.
    unsafe { outcome(kl_emu_finish()) }
}

/// Limits the steps of this thread's later launches: memory accesses and turns of the scheduler. A launch that takes more fails. The
/// default limit is 2^32.
pub fn set_step_limit(steps: u64) {
    // SAFETY: only stores the number.
    unsafe { kl_emu_step_limit(steps) }
}

/// Limits the CPU time that this thread may spend without a step before the process ends. The default is a minute.
pub fn set_patience(patience: Duration) {
    // SAFETY: only stores the number.
    unsafe { kl_emu_patience(patience.as_secs_f64()) }
}

/// Encodes a tensor map.
pub fn tensor_map(map: &TensorMap) -> Result<[u64; 16], String> {
    let mut encoded = [0; 16];
    // SAFETY: both outlive the call, and a map has sixteen words.
    unsafe { outcome(kl_emu_tensor_map(encoded.as_mut_ptr(), map)) }?;
    Ok(encoded)
}

/// Checks the models of tensor-core arithmetic against exact arithmetic and published results.
pub fn selftest() -> Result<(), String> {
    // SAFETY: takes no argument.
    unsafe { outcome(kl_emu_selftest()) }
}
