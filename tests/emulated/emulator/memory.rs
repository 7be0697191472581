//! Device memory in host memory: an address on the emulated device is a host pointer.

use crate::{kl_emu_allocate, kl_emu_free};
use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Addresses of allocations are multiples of this, as the CUDA driver guarantees.
const ALIGNMENT: usize = 256;
/// Bytes before and after an allocation that belong to none, so an access that misses one allocation does not hit another.
const GUARD: usize = 4096;
/// The value of new memory: NaN in every float type.
const POISON: u8 = 0xff;

/// The allocations of a device. The emulator knows them, and reports every kernel access outside of them.
#[derive(Default)]
pub struct DeviceMemory {
    /// Bytes of each allocation, by its address.
    allocations: RefCell<BTreeMap<u64, u64>>,
}

fn layout(bytes: u64) -> Layout {
    Layout::from_size_align(bytes as usize + 2 * GUARD, ALIGNMENT).expect("a size that fits into memory")
}

impl DeviceMemory {
    /// Total bytes of all allocations.
    pub fn bytes(&self) -> u64 {
        self.allocations.borrow().values().sum()
    }

    /// Allocates memory. Returns `None` if there is not enough.
    pub fn allocate(&self, bytes: u64) -> Option<u64> {
        // SAFETY: the layout is not empty.
        let block = unsafe { std::alloc::alloc(layout(bytes)) };
        if block.is_null() {
            return None;
        }
        // SAFETY: the guards and the allocation between them are in the block.
        let start = unsafe {
            let start = block.add(GUARD);
            start.write_bytes(POISON, bytes as usize);
            start as u64
        };
        // SAFETY: only stores the range.
        unsafe { kl_emu_allocate(start, bytes) };
        self.allocations.borrow_mut().insert(start, bytes);
        Some(start)
    }

    /// Frees an allocation.
    ///
    /// # Panics
    /// If there is no allocation at that address.
    pub fn free(&self, address: u64) {
        let bytes = self.allocations.borrow_mut().remove(&address).expect("freed twice, or never allocated");
        // SAFETY: the block was allocated above with the same layout, and the emulator forgets the range first.
        unsafe {
            kl_emu_free(address);
            std::alloc::dealloc((address as *mut u8).sub(GUARD), layout(bytes));
        }
    }

    /// A pointer to `len` bytes in one allocation.
    fn locate(&self, address: u64, len: usize) -> Result<*mut u8, String> {
        let allocations = self.allocations.borrow();
        let end = address.checked_add(len as u64);
        let inside = |(start, bytes): (&u64, &u64)| end.is_some_and(|end| end <= start + bytes);
        if allocations.range(..=address).next_back().is_some_and(inside) {
            Ok(address as *mut u8)
        } else {
            Err(format!("{len} bytes at {address:#x} are not in an allocation"))
        }
    }

    /// Copies to the device.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let to = self.locate(address, bytes.len())?;
        // SAFETY: the range lies in an allocation, to which there are no references, and no kernel is running.
        unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies from the device.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        let from = self.locate(address, bytes.len())?;
        // SAFETY: as above; an allocation is initialized when it is made.
        unsafe { from.copy_to(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Fills a range with one value.
    pub fn fill(&self, address: u64, value: u8, len: u64) -> Result<(), String> {
        let at = self.locate(address, len as usize)?;
        // SAFETY: as above.
        unsafe { at.write_bytes(value, len as usize) };
        Ok(())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let left: Vec<u64> = self.allocations.borrow().keys().copied().collect();
        left.into_iter().for_each(|address| self.free(address));
    }
}
