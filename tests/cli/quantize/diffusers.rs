//! Files that are laid out for diffusers: other bytes, and for NVFP4 the values of the file for ComfyUI. kiln reads them without
//! a flag.

use super::round_trip::values;
use super::{At, Observer, builtin, options, target};
use common::ops::formats::Codes;
use common::sandbox::{Png, Sandbox};
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;
use kiln::internals::config::{TransformerConfig, Variant};
use kiln::internals::model::transformer_manifest;
use kiln::internals::names::{Layout, TensorSpec};
use kiln::internals::tensor::DType::{E2m1 as Nvfp4, E4m3 as Fp8};
use kiln::internals::tensor::nvfp4::{scale_offset, tiles_along};
use kiln::internals::tensor::{DType, SliceScaling};
use kiln::internals::tiny;
use kiln::quantize::{ComponentSource, FilePlan, Options, Report, WeightLayout};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A transformer, and the tensors that are read of it.
fn transformer(path: &Path) -> (ComponentSource, Weights, Vec<TensorSpec>) {
    let weights = Weights::open(Component::Transformer, path).unwrap();
    let config = TransformerConfig::detect(&weights, None).unwrap();
    let specs = transformer_manifest(&config);
    (ComponentSource::Transformer(weights.clone(), config, Variant::Distilled), weights, specs)
}

/// Writes a transformer whose inputs were measured: as one, two, three and so on.
fn write(source: &ComponentSource, format: DType, layout: WeightLayout, path: &Path) -> (Shard, Weights, Report) {
    let options = Options { layout, calibration: Some("by the tests".into()), ..options(format, &[]) };
    let plan = FilePlan::new(std::slice::from_ref(source), Vec::new(), &options).unwrap();
    let mut calibrate = || Ok(plan.measured().into_iter().map(str::to_owned).zip((1_u8..).map(f32::from)).collect());
    let observer = Observer::new(At::Never);
    let report = plan.write(&target(path, u64::MAX), &mut calibrate, &observer, &observer.stop).unwrap();
    (Shard::open(path).unwrap(), Weights::open(Component::Transformer, path).unwrap(), report)
}

/// The transformer that is part of the program, and the tiny one in the layout of single files and in f32.
fn transformers(sandbox: &Sandbox) -> [(ComponentSource, Weights, Vec<TensorSpec>); 2] {
    let folder = sandbox.path("tiny");
    tiny::write_to(&folder, Layout::Bfl, DType::F32, &AtomicBool::new(false)).unwrap();
    [builtin().join("transformer"), folder.join("flux-2-klein-tiny.safetensors")].map(|path| transformer(&path))
}

#[test]
fn nvfp4_has_the_values_of_the_file_for_comfyui() {
    let sandbox = Sandbox::new();
    for (i, (source, _, specs)) in transformers(&sandbox).into_iter().enumerate() {
        let path = |name: &str| sandbox.path(&format!("{i}-{name}.safetensors"));
        let (comfy, comfy_weights, comfy_report) = write(&source, Nvfp4, WeightLayout::Comfy, &path("comfy"));
        let (file, weights, report) = write(&source, Nvfp4, WeightLayout::Diffusers, &path("diffusers"));
        // The file has the markers that kiln reads, and none that ComfyUI reads.
        let metadata: Vec<(&str, &str)> = file.metadata().iter().map(|(key, value)| (key.as_ref(), value.as_ref())).collect();
        assert_eq!(metadata, [("nvfp4_layout", "modelopt")]);
        assert!(weights.check(&specs).unwrap().is_empty());
        for spec in &specs {
            let (want, got) = (comfy_weights.weight(spec).unwrap(), weights.weight(spec).unwrap());
            assert_eq!(values(&want.parts), values(&got.parts), "{}", spec.name);
            assert_eq!(want.input, got.input, "{}", spec.name);
        }
        let mut quantized = 0;
        for (report, comfy_report) in report.files[0].layers.iter().zip(&comfy_report.files[0].layers) {
            let (name, [rows, cols]) = (&report.name, report.shape);
            assert_eq!((name, report.error(), report.scale), (&comfy_report.name, comfy_report.error(), comfy_report.scale));
            if report.format != Nvfp4 {
                continue;
            }
            let bytes = |file: &Shard, suffix: &str| file.bytes(&format!("{name}.{suffix}")).unwrap();
            let shape = |suffix: &str| file.entry(&format!("{name}.{suffix}")).unwrap().shape.clone();
            assert_eq!((shape("weight"), shape("weight_scale")), (vec![rows, cols / 2], vec![rows, cols / 16]), "{name}");
            let swapped: Vec<u8> = bytes(&comfy, "weight").iter().map(|pair| pair.rotate_left(4)).collect();
            assert_eq!(swapped, bytes(&file, "weight")[..], "{name}");
            let (tiled, scales) = (bytes(&comfy, "weight_scale"), bytes(&file, "weight_scale"));
            for (at, scale) in scales.iter().enumerate() {
                let (row, block) = (at / (cols / 16), at % (cols / 16));
                assert_eq!(*scale, tiled[scale_offset(row, block, tiles_along(cols))], "{name} {row} {block}");
            }
            // diffusers insists on both.
            for suffix in ["weight_scale_2", "input_scale"] {
                assert!(shape(suffix).is_empty() && bytes(&file, suffix)[..] == bytes(&comfy, suffix)[..], "{name}.{suffix}");
            }
            quantized += 1;
        }
        assert!(quantized >= 16, "{quantized}");
    }
}

#[test]
fn fp8_has_a_scale_for_each_row() {
    let sandbox = Sandbox::new();
    let e4m3 = Codes::of(DType::E4m3);
    for (i, (source, original, specs)) in transformers(&sandbox).into_iter().enumerate() {
        let path = sandbox.path(&format!("{i}.safetensors"));
        let (file, weights, report) = write(&source, Fp8, WeightLayout::Diffusers, &path);
        assert!(file.metadata().is_empty());
        let layers = &report.files[0].layers;
        let mut quantized = 0;
        for spec in &specs {
            let (plain, stored) = (values(&original.weight(spec).unwrap().parts), weights.weight(spec).unwrap());
            let read = values(&stored.parts);
            let layer = spec.name.trim_end_matches(".weight");
            let Some(report) = layers.iter().find(|report| report.name == layer) else {
                assert_eq!(plain, read, "{layer}");
                continue;
            };
            assert!(matches!(stored.parts[..], [ref part] if matches!(part.scaling, SliceScaling::Rows(_))), "{layer}");
            assert!(stored.input.is_some(), "{layer}");
            let [rows, cols] = report.shape;
            assert_eq!(file.entry(&format!("{layer}.weight_scale")).unwrap().shape, [rows], "{layer}");
            let (codes, scales) =
                ["weight", "weight_scale"].map(|suffix| file.bytes(&format!("{layer}.{suffix}")).unwrap()).into();
            let mut largest_scale = 0.0_f32;
            let (mut errors, mut squares) = (0.0, 0.0);
            for row in 0..rows {
                let largest = plain[row * cols..][..cols].iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                let scale = if largest == 0.0 { 1.0 } else { largest / 448.0 };
                assert_eq!(scales[4 * row..][..4], scale.to_le_bytes(), "{layer} row {row}");
                largest_scale = largest_scale.max(largest / 448.0);
                for at in row * cols..(row + 1) * cols {
                    assert_eq!(codes[at], e4m3.encode(f64::from(plain[at] / scale)), "{layer} {at}");
                    assert_eq!(read[at], e4m3.decode(codes[at]) as f32 * scale, "{layer} {at}");
                    errors += (f64::from(read[at]) - f64::from(plain[at])).powi(2);
                    squares += f64::from(plain[at]).powi(2);
                }
            }
            assert_eq!(report.scale, largest_scale, "{layer}");
            assert!((report.error() / (errors / squares).sqrt() - 1.0).abs() < 1e-9, "{layer}");
            quantized += 1;
        }
        assert_eq!(quantized, layers.len());
    }
}

#[test]
fn models_for_diffusers_generate_the_same_images() {
    let sandbox = Sandbox::new();
    let image = |model: &str| {
        let out = format!("{model}.png");
        let size = ["--width", "64", "--height", "64", "--steps", "1", "--seed", "7", "-q"];
        sandbox.bare(["a large red star on a blue background", "--model", model, "-o", &out].iter().chain(&size)).good();
        Png::read(&sandbox.path(&out)).pixels
    };
    let quantized = |format: &str, layout: &str| {
        let out = format!("{format}-{layout}");
        let line = format!("quantize builtin {out} --to {format} --layout {layout} --calibration-steps 1 --calibration-size 64");
        let run = sandbox.bare(line.split(' ').collect::<Vec<_>>()).good();
        let note = "note: diffusers reads no quantized text encoders; this one is laid out for kiln and ComfyUI\n";
        assert_eq!(run.stderr.contains(note), layout == "diffusers", "{}", run.stderr);
        image(&out)
    };
    let plain = image("builtin");
    assert!(quantized("nvfp4", "comfy") == quantized("nvfp4", "diffusers"));
    let fp8 = quantized("fp8", "diffusers");
    let difference = plain.iter().zip(&fp8).map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>() / plain.len() as f64;
    // The image differs only by rounding. A model of noise would be further away.
    assert!(difference > 0.0 && difference < 30.0, "{difference}");
}
