//! What every libFuzzer program has: its entry point, and an allocator that counts, for the limits on memory.

pub use kiln_fuzz_targets as targets;
pub use libfuzzer_sys;

/// Defines the libFuzzer program of a target.
#[macro_export]
macro_rules! program {
    ($target:ident) => {
        #[global_allocator]
        static ALLOCATOR: $crate::targets::Counting = $crate::targets::Counting;

        $crate::libfuzzer_sys::fuzz_target!(|data: &[u8]| $crate::targets::run($crate::targets::$target, data));
    };
}
