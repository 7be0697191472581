//! The global allocator: the system allocator, which exits the process with an error message when memory is exhausted.
//!
//! By default Rust would abort, which ends in a signal instead of an exit code and gives no advice. Code that can handle a failed
//! allocation declares it ([`kiln::memory::fallible`]) and gets a null pointer. Exiting leaves no partial output file: see `output.rs`.
#![allow(unsafe_code)] // an allocator cannot be written without it

use crate::cli::SAVE_MEMORY;
use kiln::memory::is_fallible;
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code for too little memory, as in [`kiln::error::Error::exit_code`].
const CODE: i32 = 4;

struct ExitOnFailure;

#[global_allocator]
static ALLOCATOR: ExitOnFailure = ExitOnFailure;

// SAFETY: every call is forwarded to the system allocator unchanged, and so is its result.
unsafe impl GlobalAlloc for ExitOnFailure {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        checked(unsafe { System.realloc(ptr, layout, size) }, size)
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

fn checked(ptr: *mut u8, size: usize) -> *mut u8 {
    if ptr.is_null() && !is_fallible() {
        exit(size);
    }
    ptr
}

/// Sets options of malloc, before there are other threads.
pub fn configure() {
    // SAFETY: each sets an option of malloc, and there are no other threads yet. One that fails leaves the default.
    #[cfg(target_env = "gnu")]
    unsafe {
        if kiln::memory::address_limit().is_some() {
            // By default glibc reserves 64 MiB of address space for each thread, which exhausts the limit on a machine with many cores.
            libc::mallopt(libc::M_ARENA_MAX, 1);
        } else {
            // Keeps the memory of an image's noise, pixels and file for the next image. Otherwise the system takes it back and provides it
            // again page by page, which takes milliseconds for large images. Larger blocks are still returned.
            libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 20);
        }
    }
}

/// Reports the failed allocation and exits the process. It neither allocates nor takes a lock, which another thread may hold forever.
#[cold]
fn exit(size: usize) -> ! {
    static EXITING: AtomicBool = AtomicBool::new(false);
    // Several threads may fail at the same time: the first one reports and exits for all of them.
    if EXITING.swap(true, Ordering::Relaxed) {
        // SAFETY: `sleep` only waits.
        unsafe { libc::sleep(10) };
    }
    let mut buffer = [0; 256];
    let text = message(size, &mut buffer);
    // SAFETY: these are plain system calls on initialized bytes that we own. Whether the bytes arrive no longer matters. `_exit`
    // ends the process at once, without running anything that could allocate.
    unsafe {
        // On a terminal there may be an unfinished progress line.
        if libc::isatty(libc::STDERR_FILENO) == 1 {
            libc::write(libc::STDERR_FILENO, c"\n".as_ptr().cast(), 1);
        }
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        libc::_exit(CODE)
    }
}

/// Formats the error and its hint into a buffer on the stack.
fn message(size: usize, buffer: &mut [u8; 256]) -> &[u8] {
    let room = buffer.len();
    let mut rest = &mut buffer[..];
    // A test checks that the longest message fits.
    let _ = write!(rest, "error: not enough memory: an allocation of {size} bytes failed\n\nhint: {SAVE_MEMORY}\n");
    let left = rest.len();
    &buffer[..room - left]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_message_fits() {
        let mut buffer = [0; 256];
        let text = std::str::from_utf8(message(usize::MAX, &mut buffer)).unwrap();
        let first = "error: not enough memory: an allocation of 18446744073709551615 bytes failed";
        assert_eq!(text, format!("{first}\n\nhint: {SAVE_MEMORY}\n"));
    }

    #[test]
    fn a_fallible_allocation_returns_an_error() {
        let asked = kiln::memory::fallible(|| Vec::<u8>::new().try_reserve_exact(isize::MAX as usize));
        assert!(asked.is_err());
    }

    #[test]
    fn the_exit_code_is_that_of_the_memory_error() {
        assert_eq!(CODE, i32::from(kiln::error::Error::Memory { need: 1 }.exit_code()));
    }
}
