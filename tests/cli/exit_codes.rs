//! Every exit code that the help lists, reached with the real program: its messages, and that no image is written.
#![cfg(target_os = "linux")]

use common::sandbox::{QUICK, Run, Sandbox, send};
use kiln::internals::checkpoint::Shard;
use std::fs;
use std::io::{BufRead, BufReader, Read};

/// Overwrites the first element of a tensor, in a file of bf16.
fn plant(sandbox: &Sandbox, file: &str, tensor: &str, value: f32) {
    let path = sandbox.path(file);
    let place = Shard::open(&path).unwrap().entry(tensor).unwrap().range.start;
    let mut bytes = fs::read(&path).unwrap();
    bytes[place..place + 2].copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
    fs::write(&path, bytes).unwrap();
}

/// Sends a signal to a run that is denoising.
fn stopped(sandbox: &Sandbox, signal: &str) -> Run {
    let mut child = sandbox.command(["x", "-o", "out.png", "--steps", "1000"]).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    let mut stderr = String::new();
    while !stderr.starts_with("encoding text") {
        stderr.clear();
        assert_ne!(reader.read_line(&mut stderr).unwrap(), 0, "the run ended by itself");
    }
    send(signal, &child);
    stderr.clear();
    reader.read_to_string(&mut stderr).unwrap();
    let output = child.wait_with_output().unwrap();
    Run { code: output.status.code(), stdout: output.stdout, stderr }
}

/// Without a GPU there is nothing to test. The hint matches `kiln doctor`, because neither command has `--backend`.
#[test]
fn a_self_test_takes_a_gpu() {
    let sandbox = Sandbox::new();
    for flags in [&["selftest"][..], &["selftest", "--quick", "--json", "--device", "1"]] {
        let run = sandbox.run(flags);
        assert_eq!((run.code, run.text()), (Some(6), ""), "{}", run.stderr);
        assert!(run.stderr.starts_with("error: no GPU to test: "), "{}", run.stderr);
        let hint = run.stderr.split_once("\n\nhint: ").unwrap_or_else(|| panic!("{}", run.stderr)).1;
        let doctor = sandbox.run(["doctor", "--model", "tiny"]).good();
        assert!(doctor.text().contains(hint.trim()), "{hint}{}", doctor.text());
        assert!(sandbox.names().is_empty(), "nothing is remembered");
    }
    let help = sandbox.run(["selftest", "--help"]).good();
    for text in ["exit code 1", "--quick", "--device <N>", "--json", "not on this GPU", "paste into an issue"] {
        assert!(help.text().contains(text), "{text}: {}", help.text());
    }
}

#[test]
fn every_exit_code_is_reached() {
    let sandbox = Sandbox::new();
    let run = |line: &str| sandbox.run(line.split(' ').chain(["-o", "out.png"]).chain(QUICK));
    let large = ["x", "-q", "-o", "out.png", "--threads", "1", "--width", "2048", "--height", "2048"];
    // One non-finite value in one tensor of each part, and the stage that reports it.
    let planted = |folder: &str, file: &str, tensor: &str, value: f32| {
        sandbox.tiny(folder, &["--layout", "bfl"]);
        plant(&sandbox, &format!("{folder}/{file}.safetensors"), tensor, value);
        run(&format!("x -q --model {folder}"))
    };
    let not_finite = "values that are not finite; no image was written\n";
    let mut codes = Vec::new();
    for (run, code, begin, end) in [
        (run("x -q --steps 0"), 2, "error: invalid value '0'", "try '--help'.\n"),
        (run("x -q --model none"), 3, "error: no model found (none): ", "--text-encoder and --vae\n"),
        (
            Run::of(sandbox.limited("-v 1000000", large)),
            4,
            "error: not enough memory: this job needs ",
            " MiB), close other programs, or allow this one more memory\n",
        ),
        (sandbox.run(["x", "-q", "-o", "no/out.png"]), 5, "error: cannot write (no/out.png): ", "no such folder\n"),
        (sandbox.run(["x", "-q", "--backend", "cuda"]), 6, "error: no usable GPU: ", "; --backend cpu runs without one\n"),
        (
            planted("a", "flux-2-klein-tiny", "img_in.weight", f32::NAN),
            7,
            "error: denoising step 1 of 1 produced 2048 ",
            not_finite,
        ),
        (
            planted("b", "qwen", "model.layers.3.mlp.down_proj.weight", f32::INFINITY),
            7,
            "error: encoding the prompt produced ",
            not_finite,
        ),
        (planted("c", "ae", "decoder.conv_out.bias", f32::NAN), 7, "error: decoding produced 4096 ", not_finite),
        // Progress may have been printed before.
        (stopped(&sandbox, "-INT"), 130, "", "error: interrupted\n"),
        (stopped(&sandbox, "-TERM"), 143, "", "error: interrupted\n"),
    ] {
        assert_eq!((run.code, run.text()), (Some(code), ""), "{}", run.stderr);
        assert!(run.stderr.starts_with(begin) && run.stderr.ends_with(end), "{code}: {}", run.stderr);
        assert!(run.stderr.lines().count() <= 3 && !run.stderr.contains("backtrace"), "{code}: {}", run.stderr);
        assert!(!sandbox.path("out.png").exists(), "{code}");
        codes.push(code);
    }
    // The control: the same command writes an image where nothing is wrong.
    run("x -q").good();
    assert!(sandbox.path("out.png").exists());
    codes.insert(0, 0);
    // Exit code 1 takes a GPU that fails: `tests/emulated` has one.
    codes.insert(1, 1);
    codes.dedup();
    // Exit code 70 is a panic. No way to one is known, so a unit test of `program.rs` checks the report.
    codes.insert(codes.len() - 2, 70);

    let help = sandbox.run(["--help"]).good();
    let (_, listed) = help.text().split_once("Exit codes:").unwrap();
    let listed: Vec<i32> = listed.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    assert_eq!(codes, listed);
}
