//! Weights of other formats and other models, damaged ones, and files that change during a run.

use super::*;
use common::quantized::{Plain, plain_tensors, written};
use kiln::internals::config::{Configs, supported, supported_encoders};
use safetensors::Dtype;
use std::collections::HashMap;

#[test]
fn files_that_are_no_weights() {
    let sandbox = prepared();
    let lfs = "version https://git-lfs.github.com/spec/v1\n\
        oid sha256:ec3d4e733a771f61c052fb4856c48b336c55eaf2c65487c2a1faeb9bbda7a343\nsize 7751105712\n";
    write(&sandbox, "pointer.safetensors", lfs);
    write(&sandbox, "page.safetensors", "<!DOCTYPE html><html><title>Sign in</title></html>");
    write(&sandbox, "empty.safetensors", "");
    write(&sandbox, "zeros.safetensors", [0; 4096]);
    write(&sandbox, "model.ckpt", b"\x80\x02}q\x00(X\x05\x00\x00\x00state");
    write(&sandbox, "model.pt", b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00archive/data.pkl");
    write(&sandbox, "model.gguf", b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00");
    fs::create_dir(sandbox.path("nothing")).unwrap();
    let whole = fs::read(sandbox.path("model/flux-2-klein-tiny.safetensors")).unwrap();
    let (have, all) = (write(&sandbox, "cut.safetensors", &whole[..whole.len() / 3]), whole.len() as u64);
    write(&sandbox, "begun.safetensors", &whole[..100]);
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap());

    let foreign = "not a safetensors file";
    let unsupported = "unsupported weight format";
    let pickle = "Python pickle, which can run code and is never loaded";
    let use_safetensors = Is("use a .safetensors file");
    let expected = "expected transformer/, text_encoder/, vae/ and tokenizer/tokenizer.json there, or give --transformer, \
        --text-encoder and --vae";
    let part = |flag: &str, file: &str| format!("x -q --model model --{flag} {file}");
    check(
        &sandbox,
        &[
            row(
                &part("transformer", "pointer.safetensors"),
                3,
                format!("{foreign} (pointer.safetensors): it is a {}-byte Git LFS pointer", lfs.len()),
                Is("run git lfs pull, or download the 7,751,105,712-byte file itself"),
            ),
            row(
                &part("vae", "page.safetensors"),
                3,
                format!("{foreign} (page.safetensors): it is a web page"),
                Is("the server sent a page, perhaps a login; download the file itself"),
            ),
            row(
                &part("vae", "empty.safetensors"),
                3,
                format!("{foreign} (empty.safetensors): it is empty"),
                Is("download the file again"),
            ),
            row(
                &part("vae", "zeros.safetensors"),
                3,
                format!("{foreign} (zeros.safetensors): it begins with zeros, like a file whose download is incomplete"),
                Is("wait for the download, or download the file again"),
            ),
            row(
                &part("transformer", "cut.safetensors"),
                3,
                format!("truncated file (cut.safetensors): has {} bytes, its header describes {}", grouped(have), grouped(all)),
                Nothing,
            )
            .hint(format!("download again; {} bytes are missing", grouped(all - have))),
            row(
                &part("transformer", "begun.safetensors"),
                3,
                format!("truncated file (begun.safetensors): has 100 bytes, its header describes at least {}", grouped(header)),
                Nothing,
            )
            .hint(format!("download again; at least {} bytes are missing", grouped(header - 100))),
            row(&part("transformer", "model.ckpt"), 3, format!("{unsupported} (model.ckpt): {pickle}"), use_safetensors),
            row(
                &part("transformer", "model.pt"),
                3,
                format!("{unsupported} (model.pt): a zip archive, probably a PyTorch checkpoint: {pickle}"),
                use_safetensors,
            ),
            row(&part("transformer", "model.gguf"), 3, format!("{unsupported} (model.gguf): GGUF"), use_safetensors),
            // There is no model.
            row("x -q --model models/klein/4b", 3, "no model found (models/klein/4b): the folder does not exist", Is(expected)),
            row(
                "x -q --model models/klein",
                3,
                "no model found (models/klein): neither a folder nor in the Hugging Face cache ($HOME/.cache/huggingface/hub)",
                Is("download it first, for example with `hf download`, or name a folder"),
            ),
            row(
                "x -q --model nothing",
                3,
                "no model found (nothing): there is no transformer and no text encoder and no vae",
                Is(expected),
            ),
            row(
                "x -q --model model.gguf",
                3,
                "no model found (model.gguf): it is a file, not a folder",
                Is("give a single file as --transformer, with --text-encoder and --vae"),
            ),
            row(&part("vae", "none"), 3, "no model found (none): it does not exist", Nothing),
        ],
    );
}

#[test]
fn parts_of_different_models() {
    let sandbox = prepared();
    let transformer = |name: &str, config: &TransformerConfig| {
        sparse(&sandbox, name, Component::Transformer, Layout::Bfl, &transformer_manifest(config));
    };
    let encoder = |name: &str, config: &TextConfig| {
        sparse(&sandbox, name, Component::TextEncoder, Layout::Diffusers, &text_manifest(config));
    };
    transformer("4b.safetensors", &Configs::KLEIN_4B.transformer);
    transformer("9b.safetensors", &Configs::KLEIN_9B.transformer);
    transformer("dev.safetensors", &Configs::DEV.transformer);
    encoder("qwen4.safetensors", &Configs::KLEIN_4B.text_encoder);
    encoder("qwen8.safetensors", &Configs::KLEIN_9B.text_encoder);
    sparse(&sandbox, "vae.safetensors", Component::Vae, Layout::Bfl, &vae_manifest(&Configs::KLEIN_4B.vae));
    // FLUX.1 has half as many latent channels, and a modulation in every block.
    let older = VaeConfig { latent: 16, ..Configs::KLEIN_4B.vae };
    sparse(&sandbox, "ae.safetensors", Component::Vae, Layout::Bfl, &vae_manifest(&older));
    let older =
        [TensorSpec::new("img_in.weight", &[3072, 64]), TensorSpec::new("double_blocks.0.img_mod.lin.weight", &[18432, 3072])];
    sparse(&sandbox, "flux1.safetensors", Component::Transformer, Layout::Bfl, &older);

    let misfit = |detail: &str| format!("text encoder does not fit the transformer: {detail}");
    let no_flux2 = |file: &str, tensor: &str| format!("not a FLUX.2 transformer ({file}.safetensors): it has no `{tensor}`");
    let runs = &*format!("kiln runs {}", supported()).leak();
    let rows = [
        (
            ["4b", "qwen8", "vae"],
            misfit("klein 4B needs Qwen3-4B (hidden 2560), found hidden 4096"),
            "this looks like the encoder of klein 9B",
        ),
        (
            ["9b", "qwen4", "vae"],
            misfit("klein 9B needs Qwen3-8B (hidden 4096), found hidden 2560"),
            "this looks like the encoder of klein 4B",
        ),
        (
            ["dev", "qwen4", "vae"],
            misfit("[dev] needs Mistral Small 3 (hidden 5120), found hidden 2560"),
            "this looks like the encoder of klein 4B",
        ),
        (["flux1", "qwen4", "vae"], no_flux2("flux1", "double_stream_modulation_img.lin.weight"), runs),
        (
            ["4b", "qwen4", "ae"],
            "wrong shape (ae.safetensors): tensor `encoder.conv_out.weight` is [32, 512, 3, 3], this model needs [64, 512, 3, 3]"
                .into(),
            format!("this file is incomplete or belongs to another model; {runs}").leak(),
        ),
        // The files of two flags are swapped.
        (["vae", "qwen4", "4b"], no_flux2("vae", "double_stream_modulation_img.linear.weight"), runs),
        (
            ["4b", "vae", "qwen4"],
            "not a text encoder of FLUX.2 (vae.safetensors): it has no `model.layers.0.self_attn.q_norm.weight`".into(),
            supported_encoders().leak(),
        ),
        (
            ["4b", "qwen4", "9b"],
            "unknown architecture (9b.safetensors): vae: the tensors that show its width in `encoder.down_blocks.0` are missing"
                .into(),
            "this is no vae of FLUX.2 [klein]",
        ),
    ];
    check(
        &sandbox,
        &rows.map(|([transformer, encoder, vae], first, hint)| {
            let line = format!(
                "x -q --transformer {transformer}.safetensors --text-encoder {encoder}.safetensors --vae {vae}.safetensors"
            );
            row(&line, 3, first, Is(hint))
        }),
    );
}

#[test]
fn crafted_weights() {
    let sandbox = prepared();
    let tensor = |name: &str, length: u64, [begin, end]: [u64; 2]| {
        format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{length}],\"data_offsets\":[{begin},{end}]}}")
    };
    let file = |name: &str, tensors: &[String], data| crafted(&sandbox, name, &format!("{{{}}}", tensors.join(",")), data);
    file("overlap.safetensors", &[tensor("a", 16, [0, 16]), tensor("b", 16, [8, 24])], 24);
    file("hole.safetensors", &[tensor("a", 16, [0, 16]), tensor("b", 8, [24, 32])], 32);
    file("twice.safetensors", &[tensor("a", 8, [0, 8]), tensor("a", 8, [8, 16])], 16);
    file("more.safetensors", &[tensor("a", 8, [0, 8])], 11);
    file("shape.safetensors", &[tensor("a", 9, [0, 8])], 8);
    // The end of the last tensor plus the length of the header exceeds 64 bits.
    let huge = (1 << 61) - 1;
    let huge: Vec<String> = (0..8).map(|i| tensor(&format!("t{i}"), huge, [i * huge, (i + 1) * huge])).collect();
    file("huge.safetensors", &huge, 8);
    write(&sandbox, "long.safetensors", [&99_000_051u64.to_le_bytes()[..], b"{\"a\":"].concat());
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    crafted(&sandbox, "deep.safetensors", &deep, 0);

    let invalid = |name: &str, detail: &str| {
        let first = format!("invalid safetensors header ({name}.safetensors): {detail}");
        row(&format!("x -q --model model --transformer {name}.safetensors"), 3, first, Nothing)
    };
    check(
        &sandbox,
        &[
            invalid("overlap", "tensor `a` [0,16) overlaps `b` [8,24)"),
            invalid("hole", "8 bytes before tensor `b` [24,32) belong to no tensor"),
            invalid("twice", "tensor `a` is there twice at line 1 column 56"),
            invalid("more", "3 bytes follow the last tensor"),
            invalid("shape", "tensor `a`: shape [9] of U8 needs 9 bytes, data_offsets [0,8] give 8"),
            invalid("huge", "describes 18,446,744,073,709,551,608 bytes of data, more than any file can have"),
            invalid("long", "header is 99,000,051 bytes, limit 4,194,304"),
            invalid("deep", "tensor `a`: invalid type: sequence, expected a string at line 1 column 6"),
        ],
    );
}

#[test]
fn weights_that_change() {
    let sandbox = prepared();
    let model = sandbox.path("model/flux-2-klein-tiny.safetensors");
    let line = "x -o out.png --steps 1000 --width 64 --height 64 --model model --transformer changing.safetensors";
    let changed = "weight file changed while it was being read (changing.safetensors)";
    let hint = Is("nothing was written; start again when the file is complete");
    let length = grouped(fs::metadata(&model).unwrap().len());
    let changes: [(String, Change); 2] = [
        (format!("size {length} -> 4,096"), |sandbox| {
            File::options().write(true).open(sandbox.path(CHANGING)).unwrap().set_len(4096).unwrap();
        }),
        ("it was written to".into(), |sandbox| {
            let mut file = File::options().write(true).open(sandbox.path(CHANGING)).unwrap();
            file.write_all(b"once more").unwrap();
        }),
    ];
    for (detail, change) in changes {
        fs::copy(&model, sandbox.path(CHANGING)).unwrap();
        check(&sandbox, &[row(line, 3, format!("{changed}: {detail}"), hint).meanwhile(change)]);
    }
}

#[test]
fn quantized_weights() {
    let sandbox = prepared();
    let layer = "double_blocks.0.img_attn.proj";
    let named = |suffix: &str| format!("{layer}.{suffix}");
    let (replaced, other): (Vec<Plain>, Vec<Plain>) =
        plain_tensors(Component::Transformer, Layout::Bfl).into_iter().partition(|tensor| tensor.name == named("weight"));
    let [rows, cols] = replaced[0].shape[..] else { panic!("not a matrix") };
    // The tiny transformer with another layer, and perhaps a declaration of it.
    let file = |name: &str, tensors: &[Plain], declared: &str| {
        let metadata = [("_quantization_metadata".to_owned(), declared.to_owned())];
        let metadata = if declared.is_empty() { HashMap::new() } else { metadata.into() };
        write(&sandbox, name, written(&[&other, tensors].concat(), metadata));
    };
    let scale = |suffix, value| Plain::scalar(named(suffix), value);
    let tensor = |suffix, dtype, shape: [usize; 2], bytes| Plain { name: named(suffix), dtype, shape: shape.into(), bytes };
    let codes = || tensor("weight", Dtype::F8_E4M3, [rows, cols], vec![0x38; rows * cols]);
    let packed = || tensor("weight", Dtype::U8, [rows, cols / 2], vec![0x22; rows * cols / 2]);
    let blocks = |first: u8| {
        let mut scales = vec![0x38; rows * cols / 16];
        scales[0] = first;
        tensor("weight_scale", Dtype::F8_E4M3, [rows, cols / 16], scales)
    };
    let fp8 = format!(r#"{{"layers": {{"{layer}": {{"format": "float8_e4m3fn"}}}}}}"#);
    file("nan", &[codes(), scale("weight_scale", f32::NAN)], "");
    file("without", &[codes()], &fp8);
    file("other", &[packed()], &fp8.replace("float8_e4m3fn", "mxfp8"));
    file("broken", &[codes()], "{");
    file("absent", &[codes(), scale("weight_scale", 1.0)], &fp8.replace("blocks.0", "blocks.7"));
    file("zero", &[packed(), blocks(0), scale("weight_scale_2", 1.0)], "");
    // Files without declarations that have lost scales: of one layer with an input scale, of one of two layers, and of all.
    let all = || tensor("weight", Dtype::F8_E4M3, [rows, cols], vec![0x7e; rows * cols]);
    let neighbor = other.iter().find(|tensor| tensor.name == "double_blocks.1.img_attn.proj.weight").unwrap();
    let scaled = Plain { dtype: Dtype::F8_E4M3, bytes: vec![0x38; neighbor.bytes.len() / 2], ..neighbor.clone() };
    let others: Vec<Plain> = other.iter().filter(|tensor| tensor.name != neighbor.name).cloned().collect();
    let both = [scaled, Plain::scalar("double_blocks.1.img_attn.proj.weight_scale".into(), 1.0), codes()];
    file("lost", &[codes(), scale("input_scale", 1.0)], "");
    write(&sandbox, "lost-one", written(&[others, both.into()].concat(), HashMap::new()));
    file("lost-all", &[all()], "");
    file("huge", &[codes(), scale("weight_scale", 1e9)], "");
    file("tiny-scale", &[codes(), scale("weight_scale", 1e-45)], "");
    file("negative", &[packed(), blocks(0x80), scale("weight_scale_2", 1.0)], "");

    let damaged = Is("the file is damaged, or quantized in a nonstandard way; download it again, or use another one");
    let invalid = |name: &str, detail: String| format!("invalid quantization ({name}): {detail}");
    let order = Is("if the file stores NVFP4 in another order, name it with --nvfp4-layout");
    let not_finite = format!("tensor `{layer}.weight_scale` is NaN, a scale is positive and finite");
    let metadata = "metadata `_quantization_metadata`: EOF while parsing an object at line 1 column 1".into();
    let first_block = |what: &str| format!("tensor `{layer}.weight_scale` is {what}, at block 0 of row 0");
    let absent = "layer `double_blocks.7.img_attn.proj` is declared as FP8 (E4M3), but has no weight".into();
    let lost = format!("tensor `{layer}.weight` is FP8, but has no tensor with its scale");
    let lost_all = format!("tensor `{layer}.weight` is FP8 and has elements of 448, but no tensor with its scale");
    let beyond = |what: &str| format!("tensor `{layer}.weight_scale` is {what} for a scale");
    let unsupported = format!("unsupported quantization (other): tensor `{layer}.weight` is MXFP8");
    // The faults of block scales are found when the weights are loaded.
    let line = |name: &str| format!("x -q --model model --transformer {name} --backend cpu --width 64 --height 64 --steps 1");
    let zero = "zero over elements that are not";
    check(
        &sandbox,
        &[
            row(&line("nan"), 3, invalid("nan", not_finite), damaged),
            row(
                &line("without"),
                3,
                invalid("without", format!("tensor `{layer}.weight` is FP8, but has no tensor with its scale")),
                damaged,
            ),
            row(&line("lost"), 3, invalid("lost", lost.clone()), damaged),
            row(&line("lost-one"), 3, invalid("lost-one", lost), damaged),
            row(&line("lost-all"), 3, invalid("lost-all", lost_all), damaged),
            row(&line("huge"), 3, invalid("huge", beyond("1000000000, too large")), damaged),
            row(&line("tiny-scale"), 3, invalid("tiny-scale", beyond("1e-45, too small")), damaged),
            row(&line("other"), 3, unsupported, Is("use the BF16, FP8 or NVFP4 checkpoint of the same model")),
            row(&line("broken"), 3, invalid("broken", metadata), damaged),
            row(&line("absent"), 3, invalid("absent", absent), damaged),
            row(&line("zero"), 3, invalid("zero", first_block(zero)), order),
            row(&format!("{} --nvfp4-layout modelopt", line("zero")), 3, invalid("zero", first_block(zero)), order),
            row(&line("negative"), 3, invalid("negative", first_block("negative")), damaged),
        ],
    );
}
