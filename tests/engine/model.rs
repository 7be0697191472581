//! Compares the whole pipeline on the tiny model with outputs recorded from diffusers, on the CPU.

use common::{cpu, goldens};

#[test]
fn f32_equals_diffusers() {
    goldens::f32_equals_diffusers(&|| Box::new(cpu()));
}

#[test]
fn bf16_is_at_least_as_close_as_diffusers_in_bf16() {
    goldens::bf16_is_as_close_as_diffusers_in_bf16(&|| Box::new(cpu()));
}
