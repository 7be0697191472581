//! Runs every kernel on an emulated GPU: the sources of `kernels/` compiled for the CPU, under the real CUDA backend. What hardware leaves
//! open happens in a random order, and what hardware does not allow is an error. It needs no GPU and no nvcc, only a C++ compiler.
//!
//! Each case has a seed of its own, derived from the seed of the run. A failure says how to repeat it:
//!
//!     KILN_TEST_SEED=1234 KILN_TEST_CASE="linear 64x64x64" cargo test --test emulated every_kernel
//!
//! A run takes a list of cases that launch every kernel, and some others that its seed chooses. With `KILN_TEST_LONG=1` it takes all cases.
//! `KILN_TEST_SEEDS=50` runs them with fifty seeds, one after the other.

#![allow(clippy::print_stdout)] // seeds, figures and why a test was skipped, with --nocapture

/// Returns from a test if there is no emulator.
macro_rules! needs_emulator {
    () => {
        if !crate::available() {
            return;
        }
    };
}

mod agreement;
mod block_scaled;
mod cases;
mod driver;
mod faults;
mod fp8;
mod host;
mod image;
mod instructions;
mod layouts;
mod planted;
mod policies;
mod portable;
mod quantized;
mod runner;
mod selftest;

/// Whether there is an emulator.
fn available() -> bool {
    if !kiln_emulator::AVAILABLE {
        println!("skipped: built without the emulator, which takes a C++ compiler");
    }
    kiln_emulator::AVAILABLE
}

#[test]
fn tensor_core_arithmetic_is_that_of_the_published_models() {
    needs_emulator!();
    kiln_emulator::selftest().unwrap();
}
