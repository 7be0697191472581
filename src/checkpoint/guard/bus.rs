//! Reads of a mapped file beyond its end raise SIGBUS. A handler maps zeros there and sets a flag, so that the process continues.
//!
//! One handler for the whole process looks a fault's address up in a table of mappings. It may run at any moment in any
//! thread, so it takes no lock and allocates nothing: the table is a static array of atomics, and the rest are two system
//! calls. Faults at other addresses go to the handler that was installed before.
#![allow(unsafe_code)]

use libc::{c_int, c_void, siginfo_t};
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

/// The maximum number of files mapped at once. A model has a few dozen at most.
const SLOTS: usize = 1024;

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];

/// The previous action for the signal, stored before our handler is installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A slot of the table of mappings. Its range is protected by a sequence lock.
#[derive(Debug)]
struct Slot {
    taken: AtomicBool,
    /// The sequence number: odd while the range is being written, and another even number afterwards.
    version: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    /// Set once a part of the mapping was missing when it was read.
    lost: AtomicBool,
}

impl Slot {
    const fn new() -> Self {
        let number = AtomicUsize::new;
        Self { taken: AtomicBool::new(false), version: number(0), start: number(0), len: number(0), lost: AtomicBool::new(false) }
    }

    /// Writes the range. Only the owner of the slot calls this.
    fn set(&self, start: usize, len: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The range, or `None` while it changes. A reader need not wait for its own mapping: it keeps that mapping alive, so a slot
    /// that is changing belongs to another mapping.
    fn range(&self) -> Option<Range<usize>> {
        let version = self.version.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let stable = version.is_multiple_of(2) && version == self.version.load(Ordering::Relaxed);
        stable.then(|| start..start.saturating_add(len))
    }
}

/// Catches faults in one mapping while this lives. It must not outlive the mapping.
#[derive(Debug)]
pub(super) struct Watch(&'static Slot);

impl Watch {
    /// Starts watching a mapping, passed as its bytes.
    pub fn new(mapping: &[u8]) -> io::Result<Self> {
        install()?;
        let take = |slot: &&Slot| slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let slot = TABLE.iter().find(take).ok_or_else(|| io::Error::other(format!("{SLOTS} weight files are already open")))?;
        slot.lost.store(false, Ordering::Relaxed);
        slot.set(mapping.as_ptr().addr(), mapping.len());
        Ok(Self(slot))
    }

    /// True if a part of the mapping was missing when it was read. Since then, all of it reads as zeros.
    pub fn lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.set(0, 0);
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), Option<i32>>> = OnceLock::new();
    let install = || {
        // SAFETY: all zeros is a valid `sigaction`: the default action, no flags, an empty mask.
        let (mut previous, mut action) = unsafe { std::mem::zeroed::<(libc::sigaction, libc::sigaction)>() };
        // SAFETY: with a null new action the call only writes the current one, to a variable of the right type.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error());
        }
        PREVIOUS.get_or_init(|| previous);
        action.sa_sigaction = on_fault as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as libc::sighandler_t;
        // The handler runs on the alternate stack, because it may call the previous handler, which may be Rust's stack overflow
        // handler.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: the action is complete, and its handler does only what a signal handler may.
        if unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error());
        }
        Ok(())
    };
    INSTALLED.get_or_init(install).map_err(|code| code.map_or_else(|| io::ErrorKind::Other.into(), io::Error::from_raw_os_error))
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel calls a handler set with SA_SIGINFO with a valid `info`, whose address field is always initialized.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // A signal sent by a process has no address, and its code is not positive.
    if code <= 0 || !cover(address) {
        pass_on(signal, code, info, context);
    }
}

/// If the address is in a mapping of the table, sets its flag and makes it readable.
fn cover(address: usize) -> bool {
    let found = TABLE.iter().find_map(|slot| Some((slot, slot.range().filter(|range| range.contains(&address))?)));
    let Some((slot, range)) = found else { return false };
    // The flag is set first, so that no reader sees zeros without it.
    slot.lost.store(true, Ordering::Release);
    // The whole mapping is replaced, not one page: everything read from it is discarded anyway, and this way there is only one fault.
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let start = ptr::without_provenance_mut::<c_void>(range.start);
    // SAFETY: the range is a mapping that only this crate uses, only to read numbers from it, and that the faulting reader keeps
    // alive; zeros are valid numbers, too. The call is a plain system call.
    let zeros = unsafe { libc::mmap(start, range.len(), libc::PROT_READ, flags, -1, 0) };
    zeros != libc::MAP_FAILED
}

/// Forwards a signal to the handler that was installed before, or to the default action.
fn pass_on(signal: c_int, code: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let (handler, flags) = PREVIOUS.get().map_or((libc::SIG_DFL, 0), |previous| (previous.sa_sigaction, previous.sa_flags));
    match handler {
        // A fault cannot be ignored; a signal sent by a process can.
        libc::SIG_IGN if code <= 0 => {}
        // SAFETY: a zeroed action is the default one; both calls are allowed in a handler. The signal waits until this
        // handler returns, and then ends the process.
        libc::SIG_DFL | libc::SIG_IGN => unsafe {
            libc::sigaction(signal, &std::mem::zeroed(), ptr::null_mut());
            libc::raise(signal);
        },
        _ if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with this flag, the address points to a function of this type; the arguments come from the kernel.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: without the flag, the address points to a function of this type.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_returns_consistent_ranges_only() {
        let slot = Slot::new();
        assert_eq!(slot.range(), Some(0..0));
        std::thread::scope(|scope| {
            scope.spawn(|| (1..200_000).for_each(|i| slot.set(i << 20, i)));
            for range in (0..200_000).filter_map(|_| slot.range()) {
                assert_eq!(range.start, range.len() << 20, "half of one range and half of another");
            }
        });
        assert_eq!(slot.range(), Some(199_999 << 20..(199_999 << 20) + 199_999));
    }

    #[test]
    fn addresses_are_found_while_they_are_watched() {
        let find = |address: usize| TABLE.iter().any(|slot| slot.range().is_some_and(|range| range.contains(&address)));
        // The handler never reads these bytes; only their addresses matter.
        let bytes = vec![7; 10_000];
        let (first, last) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + 9_999);
        let watch = Watch::new(&bytes).unwrap();
        assert!(find(first) && find(last) && !find(last + 1) && !find(first - 1) && !find(0));
        assert!(!watch.lost());
        drop(watch);
        assert!(!find(first));
        assert!(!cover(first), "what is not watched is not touched");
        assert_eq!(bytes, vec![7; 10_000]);
    }
}
