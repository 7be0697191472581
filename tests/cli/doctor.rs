//! What `kiln doctor` says about the files of a model: right ones, ones with values that are not finite, incomplete ones, and ones
//! with the headers of the published files.

use common::header::write_sparse;
use common::sandbox::{Run, Sandbox};
use common::sha256;
use kiln::inspect::{KNOWN, Likeness, Tensors, fingerprint, identify};
use kiln::internals::backend::Backend;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::pipeline::{Engine, GeneratedImage, Job, LoadOptions, OpenModel};
use kiln::internals::sequence::Pixels;
use kiln::locate::Found;
use kiln::progress::Silent;
use std::fs::{self};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const TRANSFORMER: &str = "model/transformer/diffusion_pytorch_model.safetensors";

/// Changes the bytes of a tensor.
fn change(path: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let range = Shard::open(path).unwrap().entry(tensor).unwrap().range.clone();
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes[range]);
    fs::write(path, bytes).unwrap();
}

/// Expects that checks failed, and returns the block between the marks.
fn failed(run: &Run, message: &str) -> String {
    assert_eq!(run.code, Some(1), "{}{}", run.text(), run.stderr);
    let hint = "\n\nhint: please report it, with what is printed between the marks\n";
    assert!(run.stderr.ends_with(&format!("error: {message}{hint}")), "{}", run.stderr);
    let text = run.text();
    let start = text.find("\n--- from here on: kiln doctor, kiln ").expect(text);
    assert!(text.ends_with("\n--- up to here ---\n"), "{text}");
    let block = text[start..].to_owned();
    assert!(!block.contains(".safetensors") && !block.contains('/'), "it has a path: {block}");
    block
}

#[test]
fn a_sound_model_is_told_so() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let run = sandbox.run(["doctor", "--model", "model"]).good();
    let text = run.text();
    let unknown = "files     transformer: not one of the files that kiln knows (a fine-tune?): ";
    assert!(text.contains(unknown) && !text.contains("nearest"), "{text}");
    assert!(text.contains("values    all ") && text.contains(" are finite; "), "{text}");
    assert!(text.contains("\n          no matrix has a part that is all zeros"), "{text}");
    assert!(text.contains("encoder   no published values for this encoder: those that kiln knows are of Qwen3-4B\n"), "{text}");
    assert!(!text.contains("---") && !text.contains("sha256") && !text.contains("FAILED"), "{text}");
    // Neither a model that was found and not named is read, nor one with --gpu.
    let mut found = sandbox.command(["doctor"]);
    found.env("KILN_MODEL", "model");
    for run in [Run::of(found).good(), sandbox.run(["doctor", "--model", "model", "--gpu", "4090"]).good()] {
        assert!(run.text().contains("\nvalues    not checked; `kiln doctor --model PATH` "), "{}", run.text());
    }
    assert!(!sandbox.run(["doctor", "--model", "tiny"]).good().text().contains("\nvalues "));
}

#[test]
fn whole_files_are_hashed_if_asked() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    let text = sandbox.run(["doctor", "--model", "model", "--full"]).good().text().to_owned();
    let files = ["flux-2-klein-tiny.safetensors", "qwen.safetensors", "ae.safetensors"];
    for (part, file) in ["transformer", "text encoder", "vae"].iter().zip(files) {
        let digest = sha256::hex(&fs::read(sandbox.path(&format!("model/{file}"))).unwrap());
        let line = format!("{part}: {file} is {digest}: not published, as far as kiln knows\n");
        assert!(text.contains(&line), "{text}");
    }
    assert_eq!(sandbox.run(["doctor", "--full", "--gpu", "4090"]).code, Some(2));
}

#[test]
fn values_that_are_not_finite_fail_the_model() {
    for (dtype, size, nan) in [("bf16", 2, &[0xC0, 0x7F][..]), ("f32", 4, &[0, 0, 0xC0, 0x7F])] {
        let sandbox = Sandbox::new();
        sandbox.tiny("model", &["--dtype", dtype]);
        let path = sandbox.path(TRANSFORMER);
        change(&path, "x_embedder.weight", |bytes| bytes[1000 * size..1001 * size].copy_from_slice(nan));
        let block = failed(&sandbox.run(["doctor", "--model", "model"]), "the model failed 1 of 2 checks");
        let name = dtype.to_uppercase();
        let line = format!("transformer `x_embedder.weight`, {name}: 1 NaN, 0 infinite, the first is element 1,000\n");
        assert!(block.contains(&line) && block.contains(" values are not finite, in 1 tensor\n"), "{block}");
        // More tensors than are listed.
        let names: Vec<String> = Shard::open(&path).unwrap().tensors().map(|(name, _)| name.to_owned()).collect();
        names.iter().take(9).for_each(|name| change(&path, name, |bytes| bytes[..size].copy_from_slice(nan)));
        let run = sandbox.run(["doctor", "--model", "model"]);
        assert!(run.text().contains("          and in 5 more\n"), "{}", run.text());
        assert!(failed(&run, "the model failed 1 of 2 checks").contains(&names[8]));
    }
}

#[test]
fn codes_of_fp8_and_scales_of_nvfp4_are_looked_at() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    for (format, tensor) in [("fp8", "single_blocks.1.linear2.weight"), ("nvfp4", "single_blocks.1.linear2.weight_scale")] {
        let to = ["--to", format, "--no-calibration", "-q", "--part", "transformer"];
        let file = format!("{format}.safetensors");
        sandbox.run(["quantize", "model", file.as_str()].iter().chain(&to)).good();
        let doctor = || sandbox.run(["doctor", "--model", "model", "--variant", "distilled", "--transformer", file.as_str()]);
        assert!(doctor().good().text().contains("values    all "));
        change(&sandbox.path(&file), tensor, |bytes| bytes[5] = 0xFF);
        let block = failed(&doctor(), "the model failed 1 of 2 checks");
        assert!(
            block.contains(&format!("transformer `{tensor}`, F8_E4M3: 1 NaN, 0 infinite, the first is element 5\n")),
            "{block}"
        );
    }
}

#[test]
fn incomplete_files_fail_the_model() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let path = sandbox.path(TRANSFORMER);
    let whole = fs::read(&path).unwrap();
    change(&path, "transformer_blocks.1.ff.linear_in.weight", |bytes| bytes.fill(0));
    let run = sandbox.run(["doctor", "--model", "model"]);
    assert!(run.text().contains("          FAILED: incomplete file ("), "{}", run.text());
    assert!(run.text().contains("          what is not downloaded yet reads as zeros; download it again\n"), "{}", run.text());
    let block = failed(&run, "the model failed 1 of 2 checks");
    assert!(block.contains("incomplete file: tensor `transformer_blocks.1.ff.linear_in.weight` is all zeros\n"), "{block}");
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let run = sandbox.run(["doctor", "--model", "model"]);
    assert!(run.code == Some(3) && run.stderr.starts_with("error: truncated file ("), "{}", run.stderr);
    assert!(run.text().contains("model     truncated file (") && run.text().contains("\nspeed "), "{}", run.text());
}

/// A sparse file of these tensors, in the order of their names.
fn sparse(path: &Path, tensors: &Tensors) {
    let described = |(name, (dtype, shape)): (&String, &(_, Vec<usize>))| (name.clone(), *dtype, shape.clone());
    write_sparse(path, &tensors.iter().map(described).collect::<Vec<_>>());
}

/// Files of the real sizes, without their values, are recognized; with one tensor changed, that one is named.
#[test]
fn headers_of_published_files_are_recognized() {
    let sandbox = Sandbox::new();
    let path = sandbox.path("file.safetensors");
    let plain = |tensors: &Tensors| tensors.values().all(|(dtype, _)| ["BF16", "F32", "I64"].contains(dtype));
    let mut recognized = 0;
    for file in &KNOWN {
        // Quantized files need scales, which a file of zeros does not have.
        let Some(mut tensors) = file.tensors().filter(plain) else { continue };
        sparse(&path, &tensors);
        let finding = identify(&Weights::open(file.part, &path).unwrap());
        assert!(matches!(finding.likeness, Likeness::Same(found) if found.name == file.name), "{finding:?}");
        assert_eq!((finding.tensors, finding.files, finding.fingerprint), (tensors.len(), 1, fingerprint(&tensors)));
        recognized += 1;
        let name = tensors.keys().find(|name| name.ends_with(".weight")).unwrap().clone();
        tensors.get_mut(&name).unwrap().1[0] += 1;
        sparse(&path, &tensors);
        let finding = identify(&Weights::open(file.part, &path).unwrap());
        let Likeness::Unknown(Some((nearest, differences))) = finding.likeness else { panic!("{finding:?}") };
        assert_eq!((nearest.name, differences.len()), (file.name, 1));
        assert!(differences[0].starts_with(&format!("`{name}` is ")), "{differences:?}");
    }
    assert_eq!(recognized, 12);
}

/// The first tap of four tokens alone equals the tap in a whole prompt: later tokens and layers do not change it.
#[test]
fn the_first_text_layer_is_that_of_a_whole_run() {
    let model = || OpenModel::open(&Found::Tiny, None).unwrap();
    let cpu = || Box::new(Cpu::shared(Arc::new(AtomicBool::new(false))));
    let job = Job { size: Pixels::new(64, 64).unwrap(), steps: 1, record: true, ..job("hello") };
    let mut record = None;
    let mut engine = Engine::load(cpu(), model(), LoadOptions::DEFAULT, &Silent).unwrap();
    let mut sink = |image: GeneratedImage| {
        record = image.record;
        Ok(())
    };
    engine.generate(&job, &Silent, &mut sink).unwrap();
    let record = record.unwrap();
    let (rows, columns) = (4, 5);
    let model = model();
    let tokens = model.first_tokens("hello", rows).unwrap();
    assert_eq!(tokens.ids, record.token_ids[..rows]);
    let mut backend: Box<dyn Backend> = cpu();
    let found = model.first_text_layer(backend.as_mut(), &tokens, columns).unwrap();
    let width = model.configs.text_encoder.features();
    let want: Vec<f32> = (0..rows).flat_map(|row| record.prompt_embeds[row * width..][..columns].to_vec()).collect();
    // Sums may be added in another order with fewer rows, which bf16 rounds to a neighbor at most a few times.
    for (found, want) in found.iter().zip(&want) {
        assert!((found - want).abs() <= 0.02 * want.abs().max(0.1), "{found} {want}");
    }
    assert_eq!(found.len(), want.len());
    assert!(want.iter().any(|value| value.abs() > 0.05), "{want:?}");
}

fn job(prompt: &str) -> Job {
    Job::new(prompt, 1, &ModelDefaults::klein(), Variant::Distilled).unwrap()
}
