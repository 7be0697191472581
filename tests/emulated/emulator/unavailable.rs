//! The functions of emulator.h for a build without a C++ compiler. There is no kernel, and every call that can fail says why.

use crate::{Launch, TensorMap};
use std::ffi::{c_char, c_void};

const NO_COMPILER: *const c_char = c"the emulator was built without a C++ compiler".as_ptr();

pub unsafe fn kl_emu_kernel(_: *const c_char, _: *const c_char, _: *mut u64, _: *mut u32) -> i32 {
    -1
}

pub unsafe fn kl_emu_launch(_: i32, _: *const Launch, _: *const c_void, _: u64) -> *const c_char {
    NO_COMPILER
}

pub unsafe fn kl_emu_finish() -> *const c_char {
    NO_COMPILER
}

pub unsafe fn kl_emu_step_limit(_: u64) {}

pub unsafe fn kl_emu_patience(_: f64) {}

pub unsafe fn kl_emu_allocate(_: u64, _: u64) {}

pub unsafe fn kl_emu_free(_: u64) {}

pub unsafe fn kl_emu_tensor_map(_: *mut u64, _: *const TensorMap) -> *const c_char {
    NO_COMPILER
}

pub unsafe fn kl_emu_selftest() -> *const c_char {
    NO_COMPILER
}
