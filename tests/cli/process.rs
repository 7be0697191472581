//! The real program under limits of threads, address space, stack and disk space. Every run generates its image, or ends with
//! exit code 4, one line of error and a hint. No run dies of a signal, and none leaves a file.
#![cfg(target_os = "linux")]
#![allow(clippy::print_stderr)] // what was skipped

use common::moments::{in_pairs, moment};
use common::random::long;
use common::sandbox::{QUICK, Run, Sandbox, send};
use kiln::threads::cores;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The number of threads of a run that is generating an image.
fn threads_of(mut command: Command) -> usize {
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    lines.find(|line| line.starts_with("encoding text")).expect("it encodes");
    let threads = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().count();
    child.kill().unwrap();
    child.wait().unwrap();
    threads
}

/// There is one thread pool, which includes the main thread, with at most one thread per core.
#[test]
fn there_are_as_many_threads_as_asked_for() {
    let sandbox = Sandbox::new();
    // A GPU's driver has threads of its own.
    let args = ["x", "-o", "out.png", "--width", "64", "--height", "64", "--steps", "1000", "--backend", "cpu"];
    for (flags, want) in [(&["--threads", "1"][..], 1), (&["--threads", "1024"], cores()), (&[], cores())] {
        let mut command = sandbox.command(args.iter().chain(flags));
        // This variable is about the global pool, which kiln does not use.
        command.env("RAYON_NUM_THREADS", "100000");
        assert_eq!(threads_of(command), want, "{flags:?}");
    }
}

/// A system that allows no more threads. The limit does not apply to root, so root runs it as another user.
#[test]
fn one_thread_is_enough() {
    let sandbox = Sandbox::new();
    fs::set_permissions(&sandbox.0, fs::Permissions::from_mode(0o777)).unwrap();
    // The build folder may not be readable by others.
    fs::copy(env!("CARGO_BIN_EXE_kiln"), sandbox.path("kiln")).unwrap();
    let root = Run::of({
        let mut command = sandbox.wrapped("id");
        command.arg("-u");
        command
    });
    let limit = match root.text().trim() {
        "0" => "setpriv --reuid=65534 --clear-groups prlimit --nproc=1",
        _ => "prlimit --nproc=1",
    };
    let limited = |line: &str| {
        let mut command = sandbox.wrapped("sh");
        command.args(["-c", line]);
        Run::of(command)
    };
    if limited(&format!("{limit} ./kiln --version")).code != Some(0) {
        eprintln!("skipped: threads cannot be limited here");
        return;
    }
    sandbox.quick(&["x", "--seed", "5", "-q", "-o", "want.png"]);
    let command = |name: &str| format!("{limit} ./kiln x --seed 5 --threads 8 -v -o {name} {}", QUICK.join(" "));
    let run = limited(&command("out.png")).good();
    assert!(run.stderr.contains("\nbackend cpu, 1 threads\n"), "{}", run.stderr);
    // On a terminal a thread redraws the progress line, and it cannot be started either.
    let drawn = limited(&format!("command -v script > /dev/null || exit 77; script -qec '{}' /dev/null", command("drawn.png")));
    let images = match drawn.code {
        Some(77) => vec!["out.png"],
        _ => {
            assert_eq!(drawn.code, Some(0), "{}", drawn.text());
            vec!["out.png", "drawn.png"]
        }
    };
    for name in images {
        assert!(fs::read(sandbox.path(name)).unwrap() == fs::read(sandbox.path("want.png")).unwrap(), "{name}: another image");
    }
}

#[test]
fn a_small_stack_is_enough() {
    let sandbox = Sandbox::new();
    for kilobytes in [16, 128] {
        let args = ["x", "-q", "--force", "-o", "out.png", "--model", "tiny", "--backend", "cpu"];
        let mut command = sandbox.limited(&format!("-s {kilobytes}"), args.iter().chain(&QUICK));
        // The environment is on the stack, too; a large one would leave nothing for the program.
        command.env_clear();
        assert_eq!(Run::of(command).good().stderr, "");
    }
}

/// Limits of address space with models that are computed, embedded and mapped. Below about 35 MB plus its kernels the program
/// itself cannot be loaded, and the system ends it before `main`.
#[test]
fn too_little_memory_is_reported() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let limit = |megabytes: usize| format!("-v {}", megabytes << 10);
    // The least limit depends on the kernels that are embedded.
    let starts = |megabytes: &usize| Run::of(sandbox.limited(&limit(*megabytes), ["--version"])).code == Some(0);
    let least = (20..200).find(starts).expect("the program starts in 200 MB");
    let beyond: Vec<usize> = match long() {
        true => (0..80).chain((80..=900).step_by(20)).collect(),
        false => vec![1, 3, 10, 25, 40, 55, 165, 865],
    };
    let (mut done, mut refused) = (0, 0);
    for megabytes in beyond.into_iter().map(|more| least + more) {
        let limit = limit(megabytes);
        for model in ["tiny", "builtin", "model"] {
            // Limits of kiln, and not of a GPU's driver.
            let args = ["x", "-q", "-o", "out.png", "--model", model, "--backend", "cpu"];
            let run = Run::of(sandbox.limited(&limit, args.iter().chain(&QUICK)));
            match run.code {
                Some(0) => done += 1,
                code => {
                    let context = format!("{model} in {megabytes} MB: {code:?}\n{}", run.stderr);
                    assert_eq!((code, run.text()), (Some(4), ""), "{context}");
                    let (first, hint) = run.stderr.split_once("\n\nhint: ").unwrap_or_else(|| panic!("{context}"));
                    let told = first.starts_with("error: not enough memory: ") || first.starts_with("error: cannot read (model/");
                    assert!(told && first.lines().count() == 1 && hint.lines().count() == 1, "{context}");
                    refused += 1;
                }
            }
            let _ = fs::remove_file(sandbox.path("out.png"));
            assert_eq!(sandbox.names(), ["model"], "{model} in {megabytes} MB");
        }
    }
    assert!(done > 0 && refused > 0, "{done} images, {refused} refusals: the limits are not around what is needed");
}

/// A file that is too large for the address space is not reported as a bad file.
#[test]
fn a_file_that_cannot_be_mapped_is_a_lack_of_memory() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    // A sparse file takes no disk space.
    let file = fs::File::options().write(true).open(sandbox.path("model/qwen.safetensors")).unwrap();
    file.set_len(8 << 30).unwrap();
    let args = ["x", "-q", "-o", "out.png", "--model", "model"];
    let run = Run::of(sandbox.limited("-v 4000000", args.iter().chain(&QUICK)));
    let first = "error: cannot read (model/qwen.safetensors): Cannot allocate memory (os error 12)";
    assert_eq!((run.code, run.stderr), (Some(4), format!("{first}\n\nhint: {}\n", kiln_program::cli::SAVE_MEMORY)));
}

/// Every file below a folder, with its length.
fn listing(folder: &Path) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap()) {
        match entry.metadata().unwrap() {
            meta if meta.is_dir() => found.extend(listing(&entry.path())),
            meta => found.push((entry.path(), meta.len())),
        }
    }
    found.sort();
    found
}

/// `kiln tiny` writes a whole model or nothing.
#[test]
fn a_tiny_model_is_whole_or_not_there() {
    let control = Sandbox::new();
    let start = Instant::now();
    control.tiny("model", &[]);
    let took = start.elapsed();
    let whole = |sandbox: &Sandbox| -> Vec<(PathBuf, u64)> {
        let local = |(path, len): (PathBuf, u64)| (path.strip_prefix(&sandbox.0).unwrap().to_owned(), len);
        listing(&sandbox.path("model")).into_iter().map(local).collect()
    };
    assert_eq!(control.names(), ["model"]);

    // With this limit, in blocks of 512 bytes, one file fits and the next does not. The folder may exist before.
    let sandbox = Sandbox::new();
    for there in [false, true] {
        if there {
            fs::create_dir(sandbox.path("model")).unwrap();
        }
        let run = Run::of(sandbox.limited("-f 4000", ["tiny", "model"]));
        assert_eq!((run.code, run.text()), (Some(5), ""), "{}", run.stderr);
        assert!(run.stderr.starts_with("error: cannot write (model/"), "{}", run.stderr);
        assert_eq!(sandbox.names(), if there { vec!["model"] } else { vec![] });
        assert_eq!(whole(&sandbox), []);
    }
    sandbox.tiny("model", &[]);
    assert_eq!(whole(&sandbox), whole(&control));
    // The current folder is filled and not replaced.
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("model")).unwrap();
    let inode = || fs::metadata(sandbox.path("model")).unwrap().ino();
    let before = inode();
    Run::of({
        let mut command = sandbox.command(["tiny", "."]);
        command.current_dir(sandbox.path("model"));
        command
    })
    .good();
    assert_eq!((inode(), whole(&sandbox)), (before, whole(&control)));

    in_pairs(12, |index| {
        let sandbox = Sandbox::new();
        let mut child = sandbox.command(["tiny", "model"]).spawn().unwrap();
        if index % 3 == 0 {
            // When the first of it is there, under a temporary name.
            while sandbox.names().is_empty() && child.try_wait().unwrap().is_none() {
                std::thread::yield_now();
            }
        } else {
            std::thread::sleep(moment(index, took.mul_f64(1.5)));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let placed = sandbox.path("model").exists();
        assert_eq!(whole(&sandbox), if placed { whole(&control) } else { Vec::new() });
    });

    // After SIGINT and SIGTERM nothing partial is left.
    in_pairs(12, |index| {
        let sandbox = Sandbox::new();
        let mut child = sandbox.command(["tiny", "model"]).spawn().unwrap();
        std::thread::sleep(moment(index, took.mul_f64(1.2)));
        let signal = if index % 2 == 0 { "-INT" } else { "-TERM" };
        send(signal, &child);
        child.wait().unwrap();
        let names = sandbox.names();
        assert!(names.is_empty() || names == ["model"], "{signal}: {names:?}");
        assert_eq!(whole(&sandbox), if names.is_empty() { Vec::new() } else { whole(&control) });
    });
}
