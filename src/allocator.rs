//! The program's allocator: the system's, and where that has nothing left, the end of the process with a word about it.
//!
//! Otherwise Rust would abort, which is a signal and no exit code, and says nothing of what to do. Those who can do without the
//! memory they ask for say so ([`kiln::memory::fallible`]) and get their no. A file being written has no name yet at that moment,
//! or one that a kill would leave as well: see `output.rs`.
#![allow(unsafe_code)] // an allocator cannot be written without it

use kiln::memory::{HINT, is_fallible};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code for too little memory, as in [`kiln::error::Error::exit_code`].
const CODE: i32 = 4;

struct ExitOnFailure;

#[global_allocator]
static ALLOCATOR: ExitOnFailure = ExitOnFailure;

// SAFETY: every call is passed on to the system allocator unchanged, and so is its answer.
unsafe impl GlobalAlloc for ExitOnFailure {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is passed on.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is passed on.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise is passed on.
        checked(unsafe { System.realloc(ptr, layout, size) }, size)
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

fn checked(ptr: *mut u8, size: usize) -> *mut u8 {
    if ptr.is_null() && !is_fallible() {
        exit(size);
    }
    ptr
}

/// Where addresses are limited, lets all threads take memory from one place. By itself the C library reserves 64 MiB of addresses
/// for each, which on a large machine is all there are.
pub fn save_addresses() {
    #[cfg(target_env = "gnu")]
    if kiln::memory::address_limit().is_some() {
        // SAFETY: a setting, made before there are other threads. If it is not taken, more is reserved.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Says what was asked for and ends the process. No memory is asked for meanwhile, and no lock, which others may hold for good.
#[cold]
fn exit(size: usize) -> ! {
    static EXITING: AtomicBool = AtomicBool::new(false);
    // Where it is short for one it is for others: the first speaks, and ends them all.
    if EXITING.swap(true, Ordering::Relaxed) {
        // SAFETY: only waits.
        unsafe { libc::sleep(10) };
    }
    let mut buffer = [0; 256];
    let text = message(size, &mut buffer);
    // SAFETY: plain system calls on bytes that are ours and initialised. Whether they arrive no longer matters. The process ends at
    // once, with nothing run on the way that could ask for memory.
    unsafe {
        // On a terminal a line of progress may be in the way.
        if libc::isatty(libc::STDERR_FILENO) == 1 {
            libc::write(libc::STDERR_FILENO, c"\n".as_ptr().cast(), 1);
        }
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        libc::_exit(CODE)
    }
}

/// The error and its hint, in a place that is there already.
fn message(size: usize, buffer: &mut [u8; 256]) -> &[u8] {
    let room = buffer.len();
    let mut rest = &mut buffer[..];
    // A test shows that all of it fits.
    let _ = write!(rest, "error: not enough memory: an allocation of {size} bytes failed\n\nhint: {HINT}\n");
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
        assert_eq!(text, format!("{first}\n\nhint: {HINT}\n"));
    }

    #[test]
    fn whoever_can_do_without_gets_a_no() {
        let asked = kiln::memory::fallible(|| Vec::<u8>::new().try_reserve_exact(isize::MAX as usize));
        assert!(asked.is_err());
    }

    #[test]
    fn the_code_is_that_of_the_error() {
        assert_eq!(CODE, i32::from(kiln::error::Error::Memory { need: 1 }.exit_code()));
    }
}
