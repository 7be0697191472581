//! What people do wrong first, and what they are told: one table, each row with the exact exit code, the exact first line of
//! the error and the exact hint, run with the real program. Nothing may be left on disk or changed.
#![cfg(unix)]

#[path = "common/mistake.rs"]
mod mistake;
#[path = "common/sandbox.rs"]
mod sandbox;

use kiln::checkpoint::Part;
use kiln::config::{TextConfig, TransformerConfig, VaeConfig};
use kiln::image::Image;
use kiln::names::{Layout, TensorSpec, file_tensors, text_manifest, transformer_manifest, vae_manifest};
use mistake::{CHANGING, Change, Help, Is, Nothing, Row, check, row};
use sandbox::{QUICK, Sandbox, grouped};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Files that every row can use: the tiny model, and a picture of somebody's.
fn prepared() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    write(&sandbox, "there.png", "mine");
    sandbox
}

fn write(sandbox: &Sandbox, name: &str, bytes: impl AsRef<[u8]>) -> u64 {
    fs::write(sandbox.path(name), &bytes).unwrap();
    bytes.as_ref().len() as u64
}

/// A table can only be trusted if it can fail: a good run is no error, and a row that is wrong in one place is told from a
/// right one.
#[test]
fn the_table_can_fail() {
    let sandbox = prepared();
    let exists = "output exists (there.png); not overwritten";
    let hint = "use --force or another name";
    let right = || row("x -q -o there.png", 5, exists, Is(hint));
    right().check(&sandbox).unwrap();
    for (wrong, what) in [
        (Row { code: 3, ..right() }, "exit code is"),
        (Row { first: "output exists (there.png)".into(), ..right() }, "error is"),
        (Row { hint: String::new(), ..right() }, "error is"),
        (Row { help: true, ..right() }, "error is"),
    ] {
        assert!(wrong.check(&sandbox).unwrap_err().contains(what));
    }
    let line = format!("x -q -o new.png {}", QUICK.join(" "));
    let report = row(&line, 5, exists, Is(hint)).check(&sandbox).unwrap_err();
    for what in ["exit code is\n  Some(0)", "standard output is\n  new.png", "files were left or changed"] {
        assert!(report.contains(what), "{report}");
    }
    let rewrites: Change = |sandbox| {
        write(sandbox, "there.png", "ours");
    };
    let report = right().meanwhile(rewrites).check(&sandbox).unwrap_err();
    assert!(report.contains("files were left or changed"), "{report}");
}

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
                Is("the download was answered with a page, perhaps a login; download the file itself"),
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
                "invalid safetensors header (zeros.safetensors): header is 0 bytes, the shortest possible has 2",
                Nothing,
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
            // No model at all.
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

/// A file with the header of a real model, over data that is a hole in the file and takes no room.
fn sparse(sandbox: &Sandbox, name: &str, part: Part, layout: Layout, manifest: &[TensorSpec]) {
    let mut end = 0;
    let entries = manifest.iter().flat_map(|spec| file_tensors(part, layout, spec)).map(|TensorSpec { name, shape, .. }| {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        format!("\"{name}\":{{\"dtype\":\"BF16\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}")
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    let mut file = File::create_new(sandbox.path(name)).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

#[test]
fn parts_of_different_models() {
    let sandbox = prepared();
    let transformer = |name: &str, config: &TransformerConfig| {
        sparse(&sandbox, name, Part::Transformer, Layout::Bfl, &transformer_manifest(config));
    };
    let encoder = |name: &str, config: &TextConfig| {
        sparse(&sandbox, name, Part::TextEncoder, Layout::Diffusers, &text_manifest(config));
    };
    transformer("4b.safetensors", &TransformerConfig::klein_4b());
    transformer("9b.safetensors", &TransformerConfig::klein_9b());
    let dev =
        TransformerConfig { hidden: 6144, heads: 48, context: 15_360, guidance_embed: true, ..TransformerConfig::klein_9b() };
    transformer("dev.safetensors", &TransformerConfig { single_blocks: 48, ..dev });
    encoder("qwen4.safetensors", &TextConfig::klein_4b());
    encoder("qwen8.safetensors", &TextConfig::klein_9b());
    sparse(&sandbox, "vae.safetensors", Part::Vae, Layout::Bfl, &vae_manifest(&VaeConfig::klein_4b()));
    // FLUX.1 has half the channels in its latents, and modulations in every block.
    let older = VaeConfig { latent: 16, ..VaeConfig::klein_4b() };
    sparse(&sandbox, "ae.safetensors", Part::Vae, Layout::Bfl, &vae_manifest(&older));
    let older =
        [TensorSpec::new("img_in.weight", &[3072, 64]), TensorSpec::new("double_blocks.0.img_mod.lin.weight", &[18432, 3072])];
    sparse(&sandbox, "flux1.safetensors", Part::Transformer, Layout::Bfl, &older);

    let line = |transformer: &str, encoder: &str, vae: &str| {
        format!("x -q --transformer {transformer}.safetensors --text-encoder {encoder}.safetensors --vae {vae}.safetensors")
    };
    let misfit = "text encoder does not fit the transformer";
    check(
        &sandbox,
        &[
            row(
                &line("4b", "qwen8", "vae"),
                3,
                format!("{misfit}: klein 4B needs Qwen3-4B (hidden 2560), found hidden 4096"),
                Is("this looks like the 9B encoder"),
            ),
            row(
                &line("9b", "qwen4", "vae"),
                3,
                format!("{misfit}: klein 9B needs Qwen3-8B (hidden 4096), found hidden 2560"),
                Is("this looks like the 4B encoder"),
            ),
            row(
                &line("dev", "qwen4", "vae"),
                3,
                format!("{misfit}: it needs features of width 15360, found hidden 2560 x 3"),
                Is("this looks like the 4B encoder"),
            ),
            row(
                &line("flux1", "qwen4", "vae"),
                3,
                "not a FLUX.2 transformer (flux1.safetensors): it has no `double_stream_modulation_img.lin.weight`",
                Is("kiln runs FLUX.2 [klein] 4B and 9B"),
            ),
            row(
                &line("4b", "qwen4", "ae"),
                3,
                "wrong shape (ae.safetensors): tensor `encoder.conv_out.weight` is [32, 512, 3, 3], this model needs \
                 [64, 512, 3, 3]",
                Is("this file is incomplete or belongs to another model; kiln runs FLUX.2 [klein] 4B and 9B"),
            ),
            // Mixed up on the command line.
            row(
                &line("vae", "qwen4", "4b"),
                3,
                "not a FLUX.2 transformer (vae.safetensors): it has no `double_stream_modulation_img.linear.weight`",
                Is("kiln runs FLUX.2 [klein] 4B and 9B"),
            ),
            row(
                &line("4b", "vae", "qwen4"),
                3,
                "not a Qwen3 text encoder (vae.safetensors): it has no `model.layers.0.self_attn.q_norm.weight`",
                Is("klein 4B needs Qwen3-4B, klein 9B needs Qwen3-8B"),
            ),
            row(
                &line("4b", "qwen4", "9b"),
                3,
                "unknown architecture (9b.safetensors): vae: the tensors that tell its width in `encoder.down_blocks.0` are missing",
                Is("this is no vae of FLUX.2 [klein]"),
            ),
        ],
    );
}

/// A safetensors file of this header, with so many zero bytes behind it.
fn crafted(sandbox: &Sandbox, name: &str, header: &str, data: usize) {
    write(sandbox, name, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat());
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
    // The sum of these ends, and the length of the header, is over 64 bits.
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
fn outputs_that_cannot_be_written() {
    let sandbox = prepared();
    symlink("nowhere", sandbox.path("dangling.png")).unwrap();
    for name in ["folder.png", "full", "locked"] {
        fs::create_dir(sandbox.path(name)).unwrap();
    }
    let quick = |line: &str| format!("{line} {}", QUICK.join(" "));
    let exists = |name: &str| format!("output exists ({name}); not overwritten");
    let cannot = |name: &str, why: &str| format!("cannot write ({name}): {why}");
    let force = Is("use --force or another name");
    let format = "kiln writes PNG files, named .png";
    let mut rows = vec![
        row("x -q -o there.png", 5, exists("there.png"), force),
        row("x -q -o new.png --dump there.png", 5, exists("there.png"), force),
        row("x -q -o dangling.png", 5, exists("dangling.png"), force),
        row("x -q -o /dev/full", 5, exists("/dev/full"), force),
        row("x -q -o /dev/full --force", 5, cannot("/dev/full", "this is not a regular file"), Nothing),
        row("x -q -o folder.png --force", 5, cannot("folder.png", "this is a folder"), Nothing),
        row("x -q -o no/new.png", 5, cannot("no/new.png", "there is no such folder"), Nothing),
        row("x -q -o there.png/new.png", 5, cannot("there.png/new.png", "there is no such folder"), Nothing),
        row("x -q -o new.jpg", 5, cannot("new.jpg", format), Nothing),
        row("x -q -o new.v2", 5, cannot("new.v2", format), Nothing),
        row("x -q -o -", 5, cannot("-", "standard output is for names of pictures, not for pictures"), Nothing),
        // Blocks of 512 bytes; the picture has about 12 thousand.
        row(&quick("x -q -o new.png"), 5, cannot("new.png", "File too large (os error 27); nothing was written"), Nothing)
            .within("ulimit -f 8"),
    ];
    // Not every machine lets everybody mount things.
    let may_mount = "mount -t tmpfs none full";
    let mut probe = sandbox.wrapped("unshare");
    if probe.args(["--map-root-user", "--mount", "sh", "-c", may_mount]).output().is_ok_and(|output| output.status.success()) {
        let full = "No space left on device (os error 28); nothing was written";
        rows.extend([
            row(&quick("x -q -o full/new.png"), 5, cannot("full/new.png", full), Nothing)
                .within("mount -t tmpfs -o size=8k none full"),
            row("x -q -o locked/new.png", 5, cannot("locked/new.png", "Read-only file system (os error 30)"), Nothing)
                .within("mount -t tmpfs -o ro none locked"),
        ]);
    } else {
        let _ = writeln!(std::io::stderr(), "skipped: a full and a read-only disk");
    }
    check(&sandbox, &rows);
}

#[test]
fn numbers_that_cannot_be() {
    let sandbox = prepared();
    let sides = |width: &str, height: &str| {
        format!("--width {width} --height {height}: sides must be multiples of 16, at least 64, and within the token limit")
    };
    let invalid = |flag: &str, value: &str, kind: &str, need: &str| {
        row(
            &format!("x -q --{flag} {value}"),
            2,
            format!("invalid value '{value}' for '--{flag} <{kind}>': expected {need}"),
            Help,
        )
    };
    let pixels = |value: &str| invalid("width", value, "PIXELS", "a number of pixels, such as 1024");
    let (steps, seed) = ("a whole number from 1 to 1000", "a whole number from 0 to 18446744073709551615");
    check(
        &sandbox,
        &[
            row("x -q --width 0", 2, sides("0", "256"), Is("try --width 64 --height 256")),
            row("x -q --width 1000 --height 1001", 2, sides("1000", "1001"), Is("try --width 992 --height 1008")),
            row("x -q --height 1000000000", 2, sides("256", "1000000000"), Is("try --width 256 --height 16384")),
            // What is advised has to be possible.
            row(
                "x -q --width 1000000000 --height 1000000000",
                2,
                sides("1000000000", "1000000000"),
                Is("try --width 3616 --height 3616"),
            ),
            row(
                "x -q --width 4096 --height 4096",
                2,
                "too many tokens: 512 text + 65536 image = 66048, the limit is 52000",
                Is("lower --width and --height"),
            ),
            pixels("-512"),
            pixels("1e9"),
            pixels("NaN"),
            pixels("18446744073709551616"),
            invalid("steps", "0", "N", steps),
            invalid("steps", "1000000", "N", steps),
            invalid("seed", "-1", "N", seed),
            invalid("seed", "18446744073709551616", "N", seed),
            invalid("guidance", "NaN", "SCALE", "a number from 0 to 100"),
        ],
    );
}

#[test]
fn prompts_that_are_none() {
    let sandbox = prepared();
    write(&sandbox, "latin.txt", b"a caf\xe9 by the sea");
    write(&sandbox, "long.txt", "x".repeat(40_000));
    let given = |bytes: &[u8], first: &str, hint| {
        let mut row = row("", 2, first, hint);
        row.args = vec![OsString::from_vec(bytes.to_vec())];
        row
    };
    let shorten = Is("shorten it; models read a few hundred tokens at most");
    check(
        &sandbox,
        &[
            given(b"seventeen letters\xff", "prompt is not valid UTF-8 at byte 17", Nothing),
            row("--prompt-file latin.txt", 2, "prompt is not valid UTF-8 at byte 5 (latin.txt)", Nothing),
            given(&[b'x'; 32_769], "prompt too long: it has 32769 bytes, the limit is 32768", shorten),
            row("--prompt-file long.txt", 2, "prompt too long (long.txt): the limit is 32768 bytes", shorten),
            row("--prompt-file none.txt", 3, "cannot read (none.txt): No such file or directory (os error 2)", Nothing),
        ],
    );
}

/// A PNG header that claims a size, with the checksum that it needs, and nothing behind it.
fn claiming(width: u32, height: u32) -> Vec<u8> {
    let header = [b"IHDR", &width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut crc = flate2::Crc::new();
    crc.update(&header);
    [b"\x89PNG\r\n\x1A\n\0\0\0\x0D", &header[..], &crc.sum().to_be_bytes()].concat()
}

#[test]
fn references_that_are_none() {
    let sandbox = prepared();
    write(&sandbox, "me.png", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic");
    write(&sandbox, "me.jpg", b"RIFF\x10\0\0\0WEBPVP8 ");
    write(&sandbox, "scan.jpeg", b"%PDF-1.7\n");
    write(&sandbox, "note.png", "a note under a wrong name");
    write(&sandbox, "empty.png", "");
    write(&sandbox, "bomb.png", claiming(20_000, 20_000));
    write(&sandbox, "strip.png", claiming(16_385, 4_000));
    let jpeg = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/references/baseline_420.jpg")).unwrap();
    let half = write(&sandbox, "half.jpg", &jpeg[..jpeg.len() / 2]);
    // The frame header has length, depth, height, width.
    let frame = jpeg.windows(3).position(|w| w == [0xFF, 0xC0, 0]).unwrap();
    let mut bomb = jpeg.clone();
    bomb[frame + 5..frame + 9].copy_from_slice(&[13_000u16.to_be_bytes(), 13_000u16.to_be_bytes()].concat());
    write(&sandbox, "bomb.jpg", bomb);
    for (name, width, height) in [("dot.png", 1, 1), ("line.png", 1, 8000)] {
        let image = Image { width, height, pixels: vec![0; width * height * 3] };
        write(&sandbox, name, image.encode_png(&[]).unwrap());
    }
    let whole = Image { width: 64, height: 64, pixels: vec![9; 64 * 64 * 3] }.encode_png(&[]).unwrap();
    let short = write(&sandbox, "half.png", &whole[..whole.len() / 2]);

    let of = |file: &str, first: String, hint| row(&format!("x -q --reference {file}"), 3, first, hint);
    let unreadable =
        |file: &str, detail: &str| of(file, format!("cannot read image ({file}): {detail}"), Is("convert to PNG or JPEG"));
    let ends = |file: &str, length: u64| {
        of(file, format!("damaged image ({file}): the file ends after {length} bytes, before the image does"), Nothing)
    };
    let large = |file: &str, detail: &str| of(file, format!("image too large ({file}): {detail}"), Nothing);
    let small = |file: &str, size: &str| {
        let limits = "sides must be at least 64 and the ratio at most 8:1";
        of(file, format!("image too small or too narrow ({file}): {size}; {limits}"), Nothing)
    };
    check(
        &sandbox,
        &[
            unreadable("me.png", "content is HEIC, not PNG"),
            unreadable("me.jpg", "content is WebP, not JPEG"),
            unreadable("scan.jpeg", "content is PDF, not JPEG"),
            unreadable("note.png", "content is text, not PNG"),
            unreadable("empty.png", "the file is empty"),
            unreadable("model", "this is a folder"),
            of("none.png", "cannot read (none.png): No such file or directory (os error 2)".into(), Nothing),
            ends("half.jpg", half),
            ends("half.png", short),
            large("bomb.png", "20000x20000 = 400 MP, limit 100 MP"),
            large("bomb.jpg", "13000x13000 = 169 MP, limit 100 MP"),
            large("strip.png", "16385x4000, limit 16384 a side"),
            small("dot.png", "1x1"),
            small("line.png", "1x8000"),
        ],
    );
}
