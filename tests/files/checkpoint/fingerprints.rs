//! Opens the published quantized files that `kiln doctor` knows, and checks that every layer has its stored format.

use super::message;
use common::header::safetensors;
use common::scratch::Scratch;
use common::sha256;
use kiln::inspect::KNOWN;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::TransformerConfig;
use kiln::internals::model::transformer_manifest;
use kiln::internals::tensor::DType;
use std::fs::File;
use std::io::Write;

#[test]
fn published_files_are_opened() {
    let scratch = Scratch::new();
    // A sparse file: the scales, which are all F32 and come first, are one, and all other bytes are zero.
    let open = |header: &[u8], scales: usize, bytes: u64| {
        let path = scratch.path().join("published.safetensors");
        let mut sparse = File::create(&path).unwrap();
        sparse.write_all(header).unwrap();
        sparse.write_all(&1.0_f32.to_le_bytes().repeat(scales)).unwrap();
        sparse.set_len(bytes).unwrap();
        Weights::open(Component::Transformer, &path)
    };
    let files: Vec<_> = KNOWN.iter().filter_map(|file| Some((file.name, file.quantized()?))).collect();
    assert_eq!(files.len(), 10);
    for (file, (sizes, layout)) in &files {
        let scales = layout.tensors.iter().filter(|tensor| tensor.dtype == "F32").count();
        let weights = open(&layout.header, scales, layout.bytes()).unwrap();
        assert_eq!(TransformerConfig::detect(&weights, None).unwrap(), sizes.transformer, "{file}");
        let manifest = transformer_manifest(&sizes.transformer);
        assert!(weights.check(&manifest).unwrap().is_empty(), "{file}");
        for spec in manifest {
            let weight = weights.weight(&spec).unwrap();
            let stored = match layout.tensors.iter().find(|tensor| tensor.name == spec.name).unwrap().dtype {
                "U8" => Some(DType::E2m1),
                "F8_E4M3" => Some(DType::E4m3),
                _ => None,
            };
            assert_eq!(weight.parts.len(), 1);
            assert_eq!(weight.parts[0].dtype, stored.unwrap_or(DType::Bf16), "{file} {}", spec.name);
            assert_eq!(weight.input.map(|input| input.dtype), stored, "{file} {}", spec.name);
        }
    }
    // Files of this model exist in a format that kiln does not read.
    let (_, (_, fp8)) = files.iter().find(|(file, _)| *file == "flux-2-klein-9b-fp8").unwrap();
    let text = std::str::from_utf8(&fp8.header[8..]).unwrap();
    let int8 = safetensors(text.replace("F8_E4M3", "I8").replace("float8_e4m3fn", "int8_tensorwise"), &[]);
    let bytes = fp8.bytes() - fp8.header.len() as u64 + int8.len() as u64;
    let text = message(&open(&int8, 224, bytes).unwrap_err());
    assert!(text.contains("tensor `double_blocks.0.img_attn.proj.weight` is INT8"), "{text}");
}

#[test]
fn digests_are_those_of_the_standard() {
    assert_eq!(sha256::hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_eq!(sha256::hex(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    let long = "a".repeat(1_000_000);
    assert_eq!(sha256::hex(long.as_bytes()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}
