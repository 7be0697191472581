//! Split files as ComfyUI uses them: a diffusion model, a text encoder and a VAE, each in a file of its own, with several
//! spellings of tensor names. The PNG equals the PNG of the diffusers folder with the same weights, byte for byte.

use common::header::safetensors;
use common::quantized::{Content, Form};
use common::sandbox::{QUICK, Sandbox};
use kiln::internals::names::Layout;
use kiln::internals::tensor::{DType, Nvfp4Layout};
use kiln::internals::tiny;
use serde_json::{Map, Value, json};
use std::fs;

/// Renames the tensors of a safetensors file. Matrices of the VAE's attention under original names are 1x1 convolutions.
fn renamed(file: &[u8], rename: impl Fn(&str) -> String) -> Vec<u8> {
    let (length, rest) = file.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let entries = header.into_iter().map(|(name, mut entry)| {
        let name = rename(&name);
        if let Some(shape) = entry["shape"].as_array_mut()
            && shape.len() == 2
            && name.contains(".attn_1.")
        {
            shape.extend([1.into(), 1.into()]);
        }
        (name, entry)
    });
    let header = serde_json::to_vec(&entries.collect::<Map<_, _>>()).unwrap();
    safetensors(header, data)
}

/// The latent-diffusion name of a tensor of diffusers' VAE. Written out here, and not taken from the tables under test.
fn original_name(name: &str) -> String {
    let mut name = name.to_owned();
    for level in 0..4 {
        name = name.replace(&format!("encoder.down_blocks.{level}."), &format!("encoder.down.{level}."));
        name = name.replace(&format!("decoder.up_blocks.{level}."), &format!("decoder.up.{}.", 3 - level));
    }
    for (diffusers, original) in [
        ("mid_block.resnets.0.", "mid.block_1."),
        ("mid_block.resnets.1.", "mid.block_2."),
        ("mid_block.attentions.0.", "mid.attn_1."),
        (".resnets.", ".block."),
        ("downsamplers.0.", "downsample."),
        ("upsamplers.0.", "upsample."),
        ("conv_shortcut", "nin_shortcut"),
        ("conv_norm_out", "norm_out"),
        ("group_norm", "norm"),
        ("to_q", "q"),
        ("to_k", "k"),
        ("to_v", "v"),
        ("to_out.0", "proj_out"),
    ] {
        name = name.replace(diffusers, original);
    }
    name
}

/// The latent-diffusion names if the convolutions around the latents are inside of encoder and decoder.
fn original_name_inside(name: &str) -> String {
    match original_name(name) {
        name if name.starts_with("quant_conv") => format!("encoder.{name}"),
        name if name.starts_with("post_quant_conv") => format!("decoder.{name}"),
        name => name,
    }
}

/// The tiny model's files, as different programs write them.
struct Files {
    transformer: Vec<u8>,
    text_encoder: Vec<u8>,
    /// In single precision, with values that bfloat16 does not hold, under diffusers' names.
    vae: Vec<u8>,
}

impl Files {
    fn new() -> Self {
        let half = tiny::model(Layout::Bfl, DType::Bf16).unwrap();
        let mut vae = tiny::model(Layout::Diffusers, DType::F32).unwrap().vae.to_vec();
        let data = 8 + u64::from_le_bytes(*vae.first_chunk().unwrap()) as usize;
        // A bit in the lower half of each f32, which bf16 does not have.
        vae[data..].chunks_exact_mut(4).for_each(|number| number[1] |= 0x40);
        Self { transformer: half.transformer.to_vec(), text_encoder: half.text_encoder.to_vec(), vae }
    }

    fn prefixed(&self) -> Vec<u8> {
        renamed(&self.transformer, |name| format!("model.diffusion_model.{name}"))
    }
}

/// Generates the same image with other files, and returns the PNG.
fn generate(sandbox: &Sandbox, flags: &[&str]) -> Vec<u8> {
    // The identity of the weights is another one for each layout.
    sandbox.quick(&[&["x", "--seed", "5", "--force", "-o", "out.png", "--metadata", "basic"], flags].concat());
    fs::read(sandbox.path("out.png")).unwrap()
}

/// A sandbox with the diffusers folder, whose VAE is replaced.
fn prepared(files: &Files) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.tiny("diffusers", &[]);
    fs::write(sandbox.path("diffusers/vae/diffusion_pytorch_model.safetensors"), &files.vae).unwrap();
    fs::copy(sandbox.path("diffusers/tokenizer/tokenizer.json"), sandbox.path("tokenizer.json")).unwrap();
    sandbox
}

#[test]
fn split_files_generate_the_image_of_the_diffusers_folder() {
    let files = Files::new();
    let sandbox = prepared(&files);
    let right = generate(&sandbox, &["--model", "diffusers"]);
    sandbox.tiny("own", &[]);
    let own = generate(&sandbox, &["--model", "own"]);
    assert!(own != right, "the added bits matter, so that files of other numbers would be found out");
    let write = |name: &str, bytes: &[u8]| fs::write(sandbox.path(name), bytes).unwrap();
    write("flux-2-klein.safetensors", &files.transformer);
    write("prefixed.safetensors", &files.prefixed());
    // Some files call the gain of a norm `scale`, others `weight`.
    let weight = |name: &str| name.strip_suffix(".scale").map_or(name.into(), |stem| format!("{stem}.weight"));
    let weights = renamed(&files.transformer, weight);
    assert!(weights != files.transformer);
    write("weights.safetensors", &weights);
    write("qwen_3_4b.safetensors", &files.text_encoder);
    write("diffusers.safetensors", &files.vae);
    write("original.safetensors", &renamed(&files.vae, original_name));
    write("inside.safetensors", &renamed(&files.vae, original_name_inside));
    for (transformer, vae) in [
        ("flux-2-klein", "diffusers"),
        ("prefixed", "original"),
        ("prefixed", "inside"),
        ("weights", "original"),
        ("weights", "diffusers"),
    ] {
        let [transformer, vae] = [transformer, vae].map(|name| format!("{name}.safetensors"));
        let parts = ["--transformer", &transformer, "--vae", &vae];
        let rest = ["--text-encoder", "qwen_3_4b.safetensors", "--tokenizer", "tokenizer.json"];
        assert!(generate(&sandbox, &[parts, rest].concat()) == right, "{transformer} {vae}");
    }
}

#[test]
fn the_folder_of_models_is_a_model() {
    let files = Files::new();
    let sandbox = prepared(&files);
    let right = generate(&sandbox, &["--model", "diffusers"]);
    let write = |name: &str, bytes: &[u8]| {
        let path = sandbox.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    write("models/diffusion_models/flux-2-klein-4b.safetensors", &files.prefixed());
    write("models/text_encoders/qwen_3_4b.safetensors", &files.text_encoder);
    write("models/vae/flux2-vae.safetensors", &renamed(&files.vae, original_name));
    // The folders hold files of other models, too.
    write("models/diffusion_models/wan2.2_ti2v_5B.safetensors", b"");
    write("models/text_encoders/t5xxl_fp16.safetensors", b"");
    write("models/vae/wan2.2_vae.safetensors", b"");
    let flags = ["--model", "models", "--tokenizer", "tokenizer.json"];
    assert!(generate(&sandbox, &flags) == right);

    // With two candidates for a part neither is guessed.
    write("models/diffusion_models/flux-2-klein-9b.safetensors", b"");
    let run = sandbox.run(["x", "-q", "-o", "new.png"].iter().chain(&flags).chain(&QUICK));
    assert_eq!(run.code, Some(3));
    let both = "2 files could be the transformer: diffusion_models/flux-2-klein-4b.safetensors, \
        diffusion_models/flux-2-klein-9b.safetensors";
    let told = format!("error: no model found (models): {both}\n\nhint: pick one with --transformer\n");
    assert_eq!(run.stderr, told);
}

/// Generates an image in bf16, in which activations are quantized, and returns the PNG. It says nothing about flags.
fn generate_bf16(sandbox: &Sandbox, flags: &[&str]) -> Vec<u8> {
    let size = ["x", "--seed", "5", "--width", "64", "--height", "64", "--steps", "1", "--precision", "bf16"];
    sandbox
        .run(size.iter().chain(&["--force", "-o", "out.png", "--metadata", "none", "--tokenizer", "tokenizer.json"]).chain(flags))
        .good();
    fs::read(sandbox.path("out.png")).unwrap()
}

/// The folder of models with files as ComfyUI's users have them, quantized by layer, against the same weights in other files.
#[test]
fn quantized_split_files_generate_the_same_image() {
    let files = Files::new();
    let sandbox = prepared(&files);
    let write = |name: &str, bytes: &[u8]| {
        let path = sandbox.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let (fp8, nvfp4, mixed) = (Content::of("fp8"), Content::of("nvfp4"), Content::of("fp8mixed"));
    let prefixed = Form { prefix: "model.diffusion_model.", ..Form::COMFY };
    write("models/diffusion_models/flux-2-klein-4b-fp8.safetensors", &fp8.file(prefixed));
    write("models/text_encoders/qwen_3_8b_fp8mixed.safetensors", &mixed.file(Form::COMFY));
    write("models/vae/flux2-vae.safetensors", &files.vae);
    let right = generate_bf16(&sandbox, &["--model", "models"]);
    write("fp8", &fp8.file(Form::BFL));
    write("nvfp4", &nvfp4.file(Form::BFL));
    write("nvfp4-low-first", &nvfp4.file(Form { nvfp4: Nvfp4Layout::MODELOPT_SINGLE, ..Form::BFL }));
    write("mixed", &mixed.file(Form { prefix: "text_encoders.qwen3_8b.transformer.", ..Form::BFL }));
    let with = |flags: &[&str]| generate_bf16(&sandbox, &[&["--model", "diffusers"], flags].concat());
    assert!(with(&["--transformer", "fp8", "--text-encoder", "mixed"]) == right, "single files");
    assert!(with(&["--transformer", "fp8"]) != right, "the format of the text encoder matters");

    let right = with(&["--transformer", "nvfp4"]);
    assert!(with(&["--transformer", "nvfp4-low-first"]) != right, "the order cannot be told");
    let named = ["--transformer", "nvfp4-low-first", "--nvfp4-layout", "modelopt-single"];
    assert!(with(&named) == right, "the order is named");
}

#[test]
fn a_tensor_of_another_name_is_refused_by_its_own() {
    let files = Files::new();
    let sandbox = prepared(&files);
    let misspelled = |wrong: &str| {
        let wrong = wrong.to_owned();
        move |name: &str| if name == wrong { format!("{name}_") } else { name.to_owned() }
    };
    let qkv = "model.diffusion_model.double_blocks.1.txt_attn.qkv.weight";
    let conv = "decoder.up.3.block.2.conv1.weight";
    let up = "model.layers.26.mlp.up_proj.weight";
    fs::write(sandbox.path("transformer"), renamed(&files.prefixed(), misspelled(qkv))).unwrap();
    fs::write(sandbox.path("vae"), renamed(&renamed(&files.vae, original_name), misspelled(conv))).unwrap();
    fs::write(sandbox.path("text-encoder"), renamed(&files.text_encoder, misspelled(up))).unwrap();
    for (part, name, shape) in
        [("transformer", qkv, json!([768, 256])), ("vae", conv, json!([64, 64, 3, 3])), ("text-encoder", up, json!([384, 128]))]
    {
        let run = sandbox.run(["x", "-q", "-o", "new.png", "--model", "diffusers", &format!("--{part}"), part]);
        let shape = shape.to_string().replace(',', ", ");
        let line = format!("error: missing tensor ({part}): `{name}`, this model needs it as {shape}");
        assert_eq!((run.code, run.stderr.lines().next()), (Some(3), Some(line.as_str())), "{part}");
        assert!(!sandbox.path("new.png").exists());
    }
}
