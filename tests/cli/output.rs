//! Files on disk however a run ends: the whole image or nothing, and no existing file is lost.
#![cfg(unix)]

use common::moments::{in_pairs, moment, number};
use common::random::long;
use common::sandbox::{QUICK, Run, Sandbox, send};
use kiln::output::save_new;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// The bytes that the helper process saves: as many as an image has, without repetition.
fn contents() -> &'static [u8] {
    static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| (0..300_000u32).flat_map(u32::to_le_bytes).collect());
    &BYTES
}

/// The environment variable that names the helper's task. The helper waits for a byte on standard input.
const TASK: &str = "KILN_TEST_TASK";

/// Not a test but a process that saves files, for the tests below to race and to kill. A real run generates for a second and
/// saves for a millisecond; the helper only saves.
#[test]
#[ignore = "a helper for the other tests"]
fn helper() {
    let Ok(task) = std::env::var(TASK) else { return };
    let bytes = contents();
    std::io::stdin().read_exact(&mut [0]).unwrap();
    let names = (0..).map(|i| format!("{i}.png"));
    match task.as_str() {
        "once" => {
            let code = save_new(Path::new("one.png"), bytes, false).map_or_else(|error| error.exit_code(), |()| 0);
            std::process::exit(code.into());
        }
        "save" => names.for_each(|name| save_new(name.as_ref(), bytes, false).unwrap()),
        "replace" => names.for_each(|_| save_new("one.png".as_ref(), bytes, true).unwrap()),
        // The naive way: writing to the target itself.
        "direct" => names.for_each(|name| {
            let mut file = fs::File::create_new(name).unwrap();
            bytes.chunks(8192).for_each(|chunk| file.write_all(chunk).unwrap());
            file.sync_all().unwrap();
        }),
        other => panic!("{other}"),
    }
}

/// Starts the helper, in a shell that prepares its environment.
fn start_helper(task: &str, folder: &Path, setup: &str) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{setup} && exec \"$0\" \"$@\"")]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "output::helper", "--ignored"]).env(TASK, task).current_dir(folder);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Whether the file system supports O_TMPFILE; without it a killed process leaves a temporary file.
fn has_tmpfiles(folder: &Path) -> bool {
    #[cfg(target_os = "linux")]
    let has = {
        use rustix::fs::{Mode, OFlags, open};
        open(folder, OFlags::TMPFILE | OFlags::WRONLY, Mode::RUSR).is_ok()
    };
    #[cfg(not(target_os = "linux"))]
    let has = !folder.exists();
    if !has {
        let _ = writeln!(std::io::stderr(), "skipped: no files without a name in {}", folder.display());
    }
    has
}

/// How many images a helper has left, how many of them are not whole, and how many files with other names.
fn left(sandbox: &Sandbox) -> (usize, usize, usize) {
    let (images, others): (Vec<_>, Vec<_>) = sandbox.names().into_iter().partition(|name| name.ends_with(".png"));
    let partial = images.iter().filter(|name| fs::read(sandbox.path(name)).unwrap() != contents()).count();
    (images.len(), partial, others.len())
}

/// Runs helpers next to a whole image. The system kills each one when its file reaches a random length below the full length.
fn killed_while_writing(task: &str) -> Vec<(usize, usize, usize)> {
    in_pairs(8, |index| {
        let sandbox = Sandbox::new();
        fs::write(sandbox.path("one.png"), contents()).unwrap();
        let blocks = number(index, contents().len() / 512);
        let mut child = start_helper(task, &sandbox.0, &format!("ulimit -c 0 && ulimit -f {blocks}"));
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGXFSZ), "{task}, {blocks} blocks: {status}");
        left(&sandbox)
    })
}

/// Kills helpers at random moments after their first image.
fn killed_at_random(task: &str, kills: usize) -> Vec<(usize, usize, usize)> {
    in_pairs(kills, |index| {
        let sandbox = Sandbox::new();
        let mut child = start_helper(task, &sandbox.0, "true");
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        while !sandbox.names().iter().any(|name| name.ends_with(".png")) {
            assert_eq!(child.try_wait().unwrap(), None, "{task}: it ended by itself");
            std::thread::yield_now();
        }
        std::thread::sleep(moment(index, Duration::from_millis(30)));
        child.kill().unwrap();
        child.wait().unwrap();
        left(&sandbox)
    })
}

#[test]
fn a_killed_process_leaves_whole_files_and_nothing_else() {
    if !has_tmpfiles(&Sandbox::new().0) {
        return;
    }
    assert_eq!(killed_while_writing("save"), [(1, 0, 0); 8], "images, parts of images, and others");
    let all = killed_at_random("save", if long() { 40 } else { 12 });
    assert!(all.iter().all(|(_, partial, others)| (*partial, *others) == (0, 0)), "{all:?}");
    // Replacing uses a temporary name, which a kill may leave behind; the target is whole in any case.
    let all = [killed_while_writing("replace"), killed_at_random("replace", if long() { 20 } else { 8 })].concat();
    assert!(all.iter().all(|(images, partial, _)| (*images, *partial) == (1, 0)), "{all:?}");
    // The control: writing to the target itself leaves a part.
    assert_eq!(killed_while_writing("direct"), [(2, 1, 0); 8]);
}

#[test]
fn a_killed_run_leaves_an_image_or_nothing() {
    let shared = Sandbox::new();
    if !has_tmpfiles(&shared.0) {
        return;
    }
    shared.quick(&["x", "--seed", "5", "-o", "out.png", "--threads", "1"]);
    let right = fs::read(shared.path("out.png")).unwrap();
    in_pairs(if long() { 12 } else { 6 }, |index| {
        let sandbox = Sandbox::new();
        let args = ["x", "--seed", "5", "-o", "out.png", "--threads", "1"];
        let mut child = sandbox.command(args.iter().chain(&QUICK)).spawn().unwrap();
        if index % 3 == 0 {
            std::thread::sleep(moment(index, Duration::from_millis(800)));
        } else {
            // The kill comes when the image is about to be saved.
            let lines = BufReader::new(child.stderr.take().unwrap()).lines();
            lines.map_while(Result::ok).find(|line| line.starts_with("decoding")).expect("it decodes");
            std::thread::sleep(moment(index, Duration::from_millis(6)));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let names = sandbox.names();
        assert!(names.is_empty() || names == ["out.png"], "{names:?}");
        names.iter().for_each(|name| assert!(fs::read(sandbox.path(name)).unwrap() == right, "run {index} left a part"));
    });
}

#[test]
fn one_of_many_processes_wins() {
    for round in 0..10 {
        let sandbox = Sandbox::new();
        let mut children: Vec<Child> = (0..16).map(|_| start_helper("once", &sandbox.0, "true")).collect();
        children.iter_mut().for_each(|child| child.stdin.take().unwrap().write_all(b"\n").unwrap());
        let codes: Vec<_> = children.iter_mut().map(|child| child.wait().unwrap().code()).collect();
        let count = |code: i32| codes.iter().filter(|other| **other == Some(code)).count();
        assert_eq!((count(0), count(5)), (1, 15), "round {round}: {codes:?}");
        assert_eq!(sandbox.names(), ["one.png"]);
        assert!(fs::read(sandbox.path("one.png")).unwrap() == contents());
    }
}

#[test]
fn existing_files_stay_as_they_are() {
    let sandbox = Sandbox::new();
    let path = |name: &str| sandbox.path(name);
    fs::write(path("file.png"), "mine").unwrap();
    fs::write(path("locked.png"), "mine").unwrap();
    fs::set_permissions(path("locked.png"), fs::Permissions::from_mode(0o444)).unwrap();
    symlink("file.png", path("link.png")).unwrap();
    symlink("nowhere", path("dangling.png")).unwrap();
    symlink("/dev/full", path("full.png")).unwrap();
    fs::create_dir(path("folder.png")).unwrap();
    let state = || {
        let of = |name: String| {
            let meta = fs::symlink_metadata(path(&name)).unwrap();
            // Devices have no end, so only files are read.
            let text = meta.is_file().then(|| fs::read(path(&name)).unwrap());
            (name, meta.ino(), meta.mode(), meta.mtime_nsec(), meta.len(), text)
        };
        sandbox.names().into_iter().map(of).collect::<Vec<_>>()
    };
    let before = state();
    let refused = |args: &[&str], message: String| {
        let run = sandbox.run(["x", "-q"].iter().chain(args));
        assert_eq!((run.code, run.stdout.len()), (Some(5), 0), "{args:?}: {}", run.stderr);
        assert!(run.stderr.starts_with(&format!("error: {message}")), "{args:?}: {}", run.stderr);
        assert_eq!(state(), before, "{args:?}");
    };
    for name in ["file.png", "locked.png"] {
        refused(&["-o", name], format!("output exists ({name}); not overwritten\n"));
    }
    for name in ["link.png", "dangling.png", "full.png"] {
        let message = format!("cannot write ({name}): this is a symbolic link; name the file that it leads to\n");
        refused(&["-o", name], message.clone());
        refused(&["-o", name, "--force"], message);
    }
    for flags in [&["-o", "folder.png"][..], &["-o", "folder.png", "--force"]] {
        refused(flags, "cannot write (folder.png): this is a folder\n".into());
    }
    refused(&["-o", "/dev/full/out.png"], "cannot write (/dev/full/out.png): ".into());

    // A file that appears during the run is kept, too.
    let mut child = sandbox.command(["x", "-o", "late.png"].iter().chain(&QUICK)).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut String::new()).unwrap();
    fs::write(path("late.png"), "mine").unwrap();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert!(rest.contains("\nerror: output exists (late.png); not overwritten\n"), "{rest}");
    assert_eq!(fs::read(path("late.png")).unwrap(), b"mine");
}

/// Runs the program in an environment that a shell prepares, with its output in folder `out`, and lists the files there
/// afterwards. Mounts end with the shell.
#[cfg(target_os = "linux")]
fn in_shell(sandbox: &Sandbox, setup: &str) -> Run {
    let program = env!("CARGO_BIN_EXE_kiln");
    let script = format!("{setup} && {{ \"$0\" x -q -o out/out.png \"$@\"; code=$?; ls -A out; exit $code; }}");
    let mut command = sandbox.wrapped("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &script, program]).args(QUICK);
    Run::of(command)
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("out")).unwrap();
    let mut tried = 0;
    for (setup, reason) in [
        ("true", ""),
        // Blocks of 512 bytes; the image has about 12 thousand.
        ("ulimit -f 8", "File too large"),
        ("ulimit -f 0", "File too large"),
        ("mount -t tmpfs -o size=8k none out", "No space left on device"),
        ("mount -t tmpfs -o size=1m,nr_inodes=1 none out", "No space left on device"),
    ] {
        let run = in_shell(&sandbox, setup);
        if reason.is_empty() {
            // Mounting may not be permitted on this machine.
            if run.code != Some(0) {
                let _ = writeln!(std::io::stderr(), "skipped: no surroundings to try: {}", run.stderr);
                return;
            }
            assert_eq!(run.text(), "out/out.png\nout.png\n");
            fs::remove_file(sandbox.path("out/out.png")).unwrap();
            continue;
        }
        if run.stderr.starts_with("mount:") {
            let _ = writeln!(std::io::stderr(), "skipped: {}", run.stderr);
            continue;
        }
        assert_eq!(run.code, Some(5), "{setup}: {}", run.stderr);
        assert!(run.stderr.starts_with(&format!("error: cannot write (out/out.png): {reason}")), "{setup}: {}", run.stderr);
        assert_eq!(run.text(), "", "{setup}: nothing is left");
        tried += 1;
    }
    assert!(tried >= 2);
    assert!(fs::read_dir(sandbox.path("out")).unwrap().next().is_none());
}

/// Errors are reported also when standard output is closed.
#[test]
fn errors_are_reported_without_a_standard_output() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.command(["x", "-q", "-o", "no/out.png"]).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(output.stderr, b"error: cannot write (no/out.png): there is no such folder\n");
}

#[test]
fn a_dash_is_standard_output() {
    let sandbox = Sandbox::new();
    sandbox.quick(&["x", "--seed", "7", "-o", "file.png"]);
    let run = Command::output(&mut sandbox.command(["x", "--seed", "7", "-o", "-"].iter().chain(&QUICK))).unwrap();
    assert_eq!(run.status.code(), Some(0));
    assert_eq!(run.stdout, fs::read(sandbox.path("file.png")).unwrap());
    assert!(String::from_utf8(run.stderr).unwrap().contains("seed 7"));
    // The image goes to the pipe, so a closed pipe is an error.
    let mut child = sandbox.command(["x", "-q", "-o", "-"].iter().chain(&QUICK)).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert!(output.stderr.starts_with(b"error: cannot write (-): Broken pipe"));
    // A closed standard output is an error before any work; `/dev/null` is accepted.
    for (end, code, told) in [
        (">&-", 5, "error: cannot write (standard output): it is closed, so nobody would get the image\n"),
        ("> /dev/null", 0, ""),
    ] {
        let mut command = sandbox.wrapped("sh");
        command.args(["-c", &format!("\"$0\" \"$@\" {end}"), env!("CARGO_BIN_EXE_kiln"), "x", "-q", "-o", "-"]).args(QUICK);
        let run = Run::of(command);
        assert_eq!((run.code, run.stderr.as_str()), (Some(code), told), "{end}");
    }
    assert_eq!(sandbox.names(), ["file.png"]);
}

/// `kiln ... | true`: the image files matter, not the printed names.
#[test]
fn all_images_are_written_even_if_nobody_reads_standard_output() {
    let sandbox = Sandbox::new();
    for json in [&[][..], &["--json"]] {
        let args = ["x", "-q", "-o", "out.png", "--count", "3", "--force"];
        let mut child = sandbox.command(args.iter().chain(&QUICK).chain(json)).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
        assert_eq!(sandbox.names(), ["out-1.png", "out-2.png", "out-3.png"]);
    }
}

#[test]
fn an_image_whose_dump_fails_is_reported() {
    let sandbox = Sandbox::new();
    let args = ["x", "-o", "out.png", "--dump", "run.safetensors"];
    let mut child = sandbox.command(args.iter().chain(&QUICK)).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    lines.find(|line| line.starts_with("encoding text")).expect("it encodes");
    // Another process creates the file after the check that it does not exist.
    fs::write(sandbox.path("run.safetensors"), "mine").unwrap();
    let rest: Vec<String> = lines.collect();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(5), &b"out.png\n"[..]), "{rest:?}");
    assert!(rest.iter().any(|line| line == "error: output exists (run.safetensors); not overwritten"), "{rest:?}");
    assert_eq!(sandbox.names(), ["out.png", "run.safetensors"]);
    assert_eq!(fs::read(sandbox.path("run.safetensors")).unwrap(), b"mine");

    // A dump that is known to exceed the limit is refused before the run. In bytes the image has about 12 thousand, the dump 800
    // thousand, mostly prompt embeddings; the limit is 200 blocks of 512.
    let args = ["x", "-q", "-o", "two.png", "--dump", "two.safetensors"];
    let run = Run::of(sandbox.limited("-f 200", args.iter().chain(&QUICK)));
    assert_eq!((run.code, run.text()), (Some(5), ""), "{}", run.stderr);
    assert!(run.stderr.starts_with("error: cannot write (two.safetensors): File too large"), "{}", run.stderr);
    assert_eq!(sandbox.names(), ["out.png", "run.safetensors"]);
}

/// The first signal takes effect after the current op, which may take long. The second one ends the process at once.
#[test]
fn a_second_signal_ends_a_run_at_once() {
    let sandbox = Sandbox::new();
    let args = ["x", "-o", "out.png", "--width", "64", "--height", "64", "--steps", "1000", "--threads", "1"];
    let mut child = sandbox.command(args).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    lines.find(|line| line.starts_with("encoding text")).expect("it encodes");
    // Signals that come while a process is stopped are handled before it goes on, so that no op ends between the two. They are of two
    // kinds because one kind can only be pending once.
    for signal in ["-STOP", "-INT", "-TERM", "-CONT"] {
        send(signal, &child);
    }
    let status = child.wait().unwrap();
    assert!(matches!(status.code(), Some(130 | 143)), "{status}");
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
    // The first signal alone would have ended the run with this line.
    assert!(!lines.any(|line| line == "error: interrupted"));
}

#[test]
fn a_run_can_be_stopped_at_any_moment() {
    let moments = if long() { 200 } else { 12 };
    let stop = |index: usize| {
        let sandbox = Sandbox::new();
        let (name, code, number_of_signal) = if index % 6 == 5 { ("-TERM", 143, 15) } else { ("-INT", 130, 2) };
        // Every fourth run is short enough to end by itself at about that time.
        let steps = if index % 4 == 3 { "1" } else { "1000" };
        let args = ["x", "-o", "out.png", "--width", "64", "--height", "64", "--steps", steps, "--threads", "1"];
        let mut child = sandbox.command(args).spawn().unwrap();
        std::thread::sleep(moment(index, Duration::from_millis(1000)));
        let start = Instant::now();
        send(name, &child);
        let status = child.wait().unwrap();
        let took = start.elapsed();
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        if stderr.is_empty() {
            // The signal came before the handler was installed.
            assert_eq!(status.signal(), Some(number_of_signal));
        } else if status.code() == Some(0) {
            assert_eq!((steps, sandbox.names()), ("1", vec!["out.png".to_owned()]), "{stderr}");
            return took;
        } else {
            assert_eq!(status.code(), Some(code), "{stderr}");
            assert!(stderr.ends_with("error: interrupted\n"), "{stderr}");
        }
        assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
        took
    };
    in_pairs(moments, |index| {
        let mut took = stop(index);
        // How soon a run stops is for a machine with nothing else to do. There a run that is slow to stop is slow every time.
        if long() {
            (0..3).for_each(|_| took = if took < Duration::from_secs(1) { took } else { stop(index) });
            assert!(took < Duration::from_secs(1), "run {index} took {took:?} to stop");
        }
    });
}
