//! Compares the quantized models with recorded outputs, on the CPU.

use common::cpu;
use common::quantized::goldens;
use common::wrapped;
use kiln::internals::backend::{Backend, GemmFormats};

/// The CPU backend, with some of its quantized GEMMs.
fn cpu_with(formats: GemmFormats) -> Box<dyn Backend> {
    Box::new(wrapped::with_formats(cpu(), formats))
}

#[test]
fn f32_equals_the_expanded_model() {
    goldens::f32_equals_the_expanded_model(&cpu_with);
}

#[test]
fn bf16_is_at_least_as_close_as_comfyui() {
    goldens::bf16_is_as_close_as_comfyui(&cpu_with);
}

#[test]
fn fp8_attention_adds_its_own_error() {
    goldens::fp8_attention_adds_its_own_error(&cpu_with);
}

#[test]
fn expanded_weights_are_at_least_as_close_as_comfyui() {
    goldens::expanded_weights_are_as_close_as_comfyui(&cpu_with);
}
