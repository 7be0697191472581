//! Work that is stopped, by a signal or by the end of the process, leaves no half file and can be continued. The result equals
//! the result of one run, to the byte.

use super::{At, Observer, options, target, write};
use common::sandbox::{Run, Sandbox};
use kiln::error::{Error, Remedy};
use kiln::internals::component::Component;
use kiln::internals::config::Variant;
use kiln::internals::names::Layout;
use kiln::internals::pipeline::OpenModel;
use kiln::internals::tensor::DType::{self, E2m1 as Nvfp4, E4m3 as Fp8};
use kiln::internals::tiny;
use kiln::locate::{LocateRequest, locate};
use kiln::output::Staged;
use kiln::quantize::{ComponentSource, FilePlan, Options, Target, WeightLayout, calibration_inputs, copies, line_of};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Says to the test below that it is a child process: the input, the output and the point at which it ends.
const CHILD: &str = "KILN_TEST_QUANTIZE_CHILD";

/// Bytes after which the journal is saved here: every few layers.
const OFTEN: u64 = 300_000;

fn source(folder: &Path) -> ComponentSource {
    ComponentSource::open(Component::Transformer, &folder.join("transformer"), None).unwrap()
}

/// The tiny model in a folder.
fn tiny_in(sandbox: &Sandbox) -> PathBuf {
    let folder = sandbox.path("tiny");
    tiny::write_to(&folder, Layout::Diffusers, DType::Bf16, &AtomicBool::new(false)).unwrap();
    folder
}

/// The file that one run writes.
static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let sandbox = Sandbox::new();
    let path = sandbox.path("whole.safetensors");
    write(&source(&tiny_in(&sandbox)), &options(Fp8, &[]), &target(&path, u64::MAX), &Observer::new(At::Never)).unwrap();
    assert_eq!(sandbox.names(), ["tiny", "whole.safetensors"]);
    fs::read(path).unwrap()
});

/// Not a test of its own, but the process that another test starts and that ends in the middle of its work.
#[test]
fn child() {
    let Ok(asked) = std::env::var(CHILD) else { return };
    let [folder, out, at] = asked.split('\n').collect::<Vec<_>>()[..] else { panic!("{asked}") };
    let at = at.parse().map_or(At::AbortAtEnd, At::Abort);
    let _ = write(&source(Path::new(folder)), &options(Fp8, &[]), &target(Path::new(out), OFTEN), &Observer::new(at));
}

/// Runs the child until it ends itself. Returns whether it did.
fn killed(folder: &Path, out: &Path, at: &str) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "quantize::resuming::child", "--test-threads", "1"]);
    command.env(CHILD, format!("{}\n{}\n{at}", folder.display(), out.display()));
    !command.output().unwrap().status.success()
}

#[test]
fn a_process_that_ends_at_any_point_leaves_no_half_file_and_is_continued() {
    let sandbox = Sandbox::new();
    let folder = tiny_in(&sandbox);
    let out = sandbox.path("out.safetensors");
    let (part, journal) = (sandbox.path("out.safetensors.tmp"), sandbox.path("out.safetensors.tmp.json"));
    // Each run continues the one before it, and gets a little further.
    let mut layers = Vec::new();
    for at in ["1", "20", "30", "40", "50", "end"] {
        assert!(killed(&folder, &out, at), "{at}");
        assert!(!out.exists() && part.exists() && journal.exists(), "{at}: {:?}", sandbox.names());
        let copies = [(&part, sandbox.path("copy.safetensors.tmp")), (&journal, sandbox.path("copy.safetensors.tmp.json"))];
        copies.iter().for_each(|(from, to)| assert!(fs::copy(from, to).unwrap() > 0));
        let copy = sandbox.path("copy.safetensors");
        let observer = Observer::new(At::Never);
        let report = write(&source(&folder), &options(Fp8, &[]), &target(&copy, OFTEN), &observer).unwrap();
        assert!(fs::read(&copy).unwrap() == *WHOLE, "{at}");
        assert_eq!((report.files[0].layers.len(), observer.warnings.take()), (20, Vec::new()), "{at}");
        layers.push(observer.layers.take().len());
        assert_eq!(sandbox.names(), ["copy.safetensors", "out.safetensors.tmp", "out.safetensors.tmp.json", "tiny"]);
        fs::remove_file(copy).unwrap();
    }
    // What was finished is not quantized again: of twenty layers all at first, and none at the end.
    assert_eq!((layers[0], layers[layers.len() - 1]), (20, 0), "{layers:?}");
    assert!(layers.is_sorted_by(|a, b| a >= b) && layers[3] < 20 && layers[3] > 0, "{layers:?}");
}

/// All files below a path, or the file itself, with their bytes.
fn files(path: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    if path.is_file() {
        return vec![(PathBuf::new(), fs::read(path).unwrap())];
    }
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    let below = |entry: fs::DirEntry| {
        let name = PathBuf::from(entry.file_name());
        files(&entry.path()).into_iter().map(move |(path, bytes)| (name.join(path), bytes)).collect::<Vec<_>>()
    };
    let mut files: Vec<_> = entries.flat_map(below).collect();
    files.sort();
    files
}

/// Kills the program as soon as it has reached some point. The signal may come later, and on a busy machine too late, so the checks
/// hold at every moment. Tests of `output::Staged` end a process at each of its steps.
#[test]
fn the_program_can_be_killed_at_any_moment() {
    let sandbox = Sandbox::new();
    let folder = [".tmp.json", ".tmp", ".tmp/text_encoder", ".tmp/vae", ".tmp/model_index.json", ""];
    for (whole, out, points) in
        [("whole", "out", &folder[..]), ("whole.safetensors", "out.safetensors", &[".tmp.json", ".tmp", ""])]
    {
        let command = |out: &str| sandbox.command(["quantize", "tiny", out, "--to", "nvfp4", "--no-calibration", "-q"]);
        Run::of(command(whole)).good();
        let whole = files(&sandbox.path(whole));
        let is_complete = || sandbox.path(out).exists() && files(&sandbox.path(out)) == whole;
        for point in points {
            let mut child = command(out).spawn().unwrap();
            let reached = sandbox.path(&format!("{out}{point}"));
            while !reached.exists() && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_micros(100));
            }
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(is_complete() || !sandbox.path(out).exists(), "{out}{point}");
        }
        let was_complete = is_complete();
        let run = Run::of(command(out));
        assert_eq!(run.code, Some(if was_complete { 5 } else { 0 }), "{}", run.stderr);
        assert!(is_complete(), "{out}");
        let names = sandbox.names();
        assert!(names.iter().all(|name| [out, "whole", "whole.safetensors", "out"].contains(&name.as_str())), "{names:?}");
    }
}

#[test]
fn a_run_that_is_asked_to_stop_keeps_what_is_finished() {
    let sandbox = Sandbox::new();
    let folder = tiny_in(&sandbox);
    let out = sandbox.path("out.safetensors");
    let run = |at: At| {
        let observer = Observer::new(at);
        let result = write(&source(&folder), &options(Fp8, &[]), &target(&out, u64::MAX), &observer);
        (result.map(drop), observer.layers.take().len())
    };
    // Nothing is finished yet, so nothing is kept.
    let (result, layers) = run(At::Stop(1));
    assert!(matches!(result, Err(Error::Interrupted)) && layers == 0);
    assert_eq!(sandbox.names(), ["tiny"]);
    let (result, first) = run(At::Stop(40));
    assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
    assert_eq!(sandbox.names(), ["out.safetensors.tmp", "out.safetensors.tmp.json", "tiny"]);
    let (result, second) = run(At::Never);
    result.unwrap();
    assert!(first > 0 && second > 0 && first + second == 20, "{first} {second}");
    assert!(fs::read(&out).unwrap() == *WHOLE);
    assert_eq!(sandbox.names(), ["out.safetensors", "tiny"]);
}

/// Begins a file and leaves it unfinished.
fn begun(sandbox: &Sandbox) -> (PathBuf, PathBuf) {
    let folder = tiny_in(sandbox);
    begun_as(sandbox, &folder, "out.safetensors")
}

/// Begins the output for a model of this name and leaves it unfinished.
fn begun_as(sandbox: &Sandbox, folder: &Path, out: &str) -> (PathBuf, PathBuf) {
    let (folder, out) = (folder.to_owned(), sandbox.path(out));
    let result = write(&source(&folder), &options(Fp8, &[]), &target(&out, 0), &Observer::new(At::Stop(60)));
    assert!(matches!(result, Err(Error::Interrupted)));
    (folder, out)
}

#[test]
fn damage_is_noticed_and_repaired() {
    // A journal that cannot be read counts as none. A line without an end is one that a process was writing when it was killed, and
    // only that one is lost.
    let mut again = Vec::new();
    let cut: [fn(&mut Vec<u8>); 5] = [
        |_| (),
        // The end of the last line that is about a quantized layer, which is what the observer counts.
        |text| {
            let all = String::from_utf8(text.clone()).unwrap();
            let is_quantized = |line: &&str| line.contains("\"scale_bits\":") && !line.contains("\"scale_bits\":null");
            let last = all.lines().rfind(is_quantized).unwrap();
            text.truncate(all.find(last).unwrap() + last.len());
        },
        |text| text.extend(b"{\"fin"),
        |text| text.truncate(40),
        |text| text.extend(b"x\n"),
    ];
    for (cut, is_damaged) in cut.into_iter().zip([false, false, false, true, true]) {
        let sandbox = Sandbox::new();
        let (folder, out) = begun(&sandbox);
        let journal = sandbox.path("out.safetensors.tmp.json");
        let mut text = fs::read(&journal).unwrap();
        cut(&mut text);
        fs::write(&journal, text).unwrap();
        let observer = Observer::new(At::Never);
        write(&source(&folder), &options(Fp8, &[]), &target(&out, OFTEN), &observer).unwrap();
        assert!(fs::read(&out).unwrap() == *WHOLE);
        again.push(observer.layers.take().len());
        let warnings = observer.warnings.take();
        assert_eq!(warnings.len(), usize::from(is_damaged), "{warnings:?}");
        assert!(warnings.iter().all(|text| text.ends_with("is damaged or of another version: starting anew")), "{warnings:?}");
    }
    let all = again[0];
    assert!(all < 20 && again == [all, all + 1, all, 20, 20], "{again:?}");

    // A layer that is not what the journal says is written again, whichever of its bytes is wrong.
    let sandbox = Sandbox::new();
    let out = sandbox.path("whole.safetensors");
    fs::write(&out, &*WHOLE).unwrap();
    let whole = kiln::internals::checkpoint::Shard::open(&out).unwrap();
    let place = |tensor: &str| whole.entry(tensor).unwrap().range.end - 1;
    for tensor in ["double_blocks.0.img_attn.qkv.weight", "double_blocks.0.img_attn.qkv.weight_scale", "img_in.weight"] {
        let sandbox = Sandbox::new();
        let (folder, out) = begun(&sandbox);
        let part = sandbox.path("out.safetensors.tmp");
        let mut bytes = fs::read(&part).unwrap();
        bytes[place(tensor)] ^= 1;
        // The header is always written again.
        bytes[40] ^= 1;
        fs::write(&part, bytes).unwrap();
        let observer = Observer::new(At::Never);
        write(&source(&folder), &options(Fp8, &[]), &target(&out, OFTEN), &observer).unwrap();
        assert!(fs::read(&out).unwrap() == *WHOLE, "{tensor}");
        let warnings = observer.warnings.take();
        assert!(warnings.len() == 1 && warnings[0].contains("writing it again"), "{tensor}: {warnings:?}");
    }
}

#[test]
fn another_request_is_refused_until_the_first_is_discarded() {
    let sandbox = Sandbox::new();
    let (folder, out) = begun(&sandbox);
    let before = (sandbox.names(), fs::read(sandbox.path("out.safetensors.tmp.json")).unwrap());
    for (other, why) in [
        (options(Nvfp4, &[]), "with another format or layout, or other layers"),
        (options(Fp8, &["single_blocks.1.*"]), "with another format or layout, or other layers"),
        (Options { layout: WeightLayout::Diffusers, ..options(Fp8, &[]) }, "with another format or layout, or other layers"),
        (Options { calibration: Some("x".into()), ..options(Fp8, &[]) }, "with another calibration"),
    ] {
        let error = write(&source(&folder), &other, &target(&out, OFTEN), &Observer::new(At::Never)).unwrap_err();
        assert!(error.to_string().ends_with(&format!("out.safetensors.tmp` was begun {why}")), "{error}");
        assert_eq!((error.remedy(), error.exit_code()), (Some(Remedy::Restart), 2));
    }
    let weights = folder.join("transformer/diffusion_pytorch_model.safetensors");
    let file = fs::File::options().write(true).open(&weights).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.set_modified(modified + Duration::from_secs(1)).unwrap();
    let error = write(&source(&folder), &options(Fp8, &[]), &target(&out, OFTEN), &Observer::new(At::Never)).unwrap_err();
    assert!(error.to_string().ends_with("was begun from other files, or they have changed"), "{error}");
    assert_eq!((sandbox.names(), fs::read(sandbox.path("out.safetensors.tmp.json")).unwrap()), before);
    let anew = Target { restart: true, ..target(&out, OFTEN) };
    let observer = Observer::new(At::Never);
    write(&source(&folder), &options(Fp8, &[]), &anew, &observer).unwrap();
    assert!(fs::read(&out).unwrap() == *WHOLE && observer.layers.take().len() == 20);
}

#[test]
fn only_one_process_writes_and_nothing_else_is_touched() {
    let sandbox = Sandbox::new();
    let folder = tiny_in(&sandbox);
    let run = |out: &Path, is_folder: bool| {
        let target = Target { is_folder, ..target(out, OFTEN) };
        write(&source(&folder), &options(Fp8, &[]), &target, &Observer::new(At::Never))
            .map(drop)
            .map_err(|error| error.to_string())
    };
    for is_folder in [false, true] {
        let out = sandbox.path(if is_folder { "folder" } else { "out.safetensors" });
        let other = Staged::open(&out, is_folder, false, |_| true).unwrap();
        let error = run(&out, is_folder).unwrap_err();
        assert!(error.ends_with("another process is writing this; wait for it, or use another name"), "{error}");
        // Nothing has so much room.
        let error = other.check_space(1 << 60).unwrap_err();
        assert!(error.to_string().ends_with("are free; nothing was written") && error.exit_code() == 5, "{error}");
        assert!(other.check_space(1).is_ok());
        drop(other);
        run(&out, is_folder).unwrap();
        let error = run(&out, is_folder).unwrap_err();
        let want = if is_folder { "the folder is not empty" } else { "not overwritten" };
        assert!(error.ends_with(want), "{error}");
    }
    // A file that is named like an unfinished output, but has no journal, is somebody else's.
    for (name, file) in [("a.safetensors", "a.safetensors.tmp"), ("b", "b.tmp/file")] {
        let file = sandbox.path(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "mine").unwrap();
        let error = run(&sandbox.path(name), name == "b").unwrap_err();
        assert!(error.contains("kiln did not begin"), "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"mine");
    }
}

/// A process that ends after it has linked the file to its name leaves both names and the journal, and one that ends a step later
/// leaves the journal. The file is complete, and what comes next must not write to it.
#[cfg(unix)]
#[test]
fn a_process_that_ends_while_it_gives_the_name_leaves_a_whole_file() {
    let sandbox = Sandbox::new();
    let (folder, out) = begun(&sandbox);
    let (part, journal) = (sandbox.path("out.safetensors.tmp"), sandbox.path("out.safetensors.tmp.json"));
    let noted = fs::read(&journal).unwrap();
    let run = |target: Target, at: At| write(&source(&folder), &options(Fp8, &[]), &target, &Observer::new(at)).map(drop);
    run(target(&out, OFTEN), At::Never).unwrap();
    for (has_both, force, restart) in
        [(true, true, true), (true, true, false), (true, false, false), (false, true, true), (false, false, false)]
    {
        if has_both {
            fs::hard_link(&out, &part).unwrap();
        }
        fs::write(&journal, &noted).unwrap();
        let result = run(Target { force, restart, ..target(&out, OFTEN) }, At::Stop(1));
        assert!(
            matches!((force, &result), (true, Err(Error::Interrupted)) | (false, Err(Error::OutputExists { .. }))),
            "{result:?}"
        );
        assert!(fs::read(&out).unwrap() == *WHOLE, "{has_both} {force} {restart}");
        assert_eq!(sandbox.names(), ["out.safetensors", "tiny"], "{has_both} {force} {restart}");
    }
    // Where there are no hard links, the name is taken first.
    let (_, taken) = begun_as(&sandbox, &folder, "taken.safetensors");
    fs::write(&taken, "").unwrap();
    run(target(&taken, OFTEN), At::Never).unwrap();
    assert!(fs::read(&taken).unwrap() == *WHOLE);
    assert_eq!(sandbox.names(), ["out.safetensors", "taken.safetensors", "tiny"]);
    // A link to what is unfinished is not the finished file.
    let (_, out) = begun_as(&sandbox, &folder, "other.safetensors");
    let part = sandbox.path("other.safetensors.tmp");
    std::os::unix::fs::symlink(&part, &out).unwrap();
    let unfinished = fs::read(&part).unwrap();
    run(target(&out, OFTEN), At::Never).unwrap_err();
    assert!(fs::read(&part).unwrap() == unfinished);
}

/// A file that has the name of a journal, but is none, is somebody else's.
#[test]
fn a_file_that_is_no_journal_is_left_alone() {
    let sandbox = Sandbox::new();
    let (folder, out) = begun(&sandbox);
    let (part, journal) = (sandbox.path("out.safetensors.tmp"), sandbox.path("out.safetensors.tmp.json"));
    let (noted, unfinished) = (fs::read(&journal).unwrap(), fs::read(&part).unwrap());
    let run = |restart: bool| {
        let target = Target { restart, ..target(&out, OFTEN) };
        write(&source(&folder), &options(Fp8, &[]), &target, &Observer::new(At::Never)).map(drop)
    };
    fs::write(&journal, "{\"mine\": 1}").unwrap();
    for there in [true, false] {
        if !there {
            fs::remove_file(&part).unwrap();
        }
        let before = sandbox.names();
        for restart in [false, true] {
            let error = run(restart).unwrap_err().to_string();
            assert!(error.contains("out.safetensors.tmp.json") && error.contains("kiln did not begin"), "{error}");
        }
        assert_eq!((sandbox.names(), fs::read(&journal).unwrap()), (before, b"{\"mine\": 1}".to_vec()));
        assert!(!there || fs::read(&part).unwrap() == unfinished);
    }
    // A journal without an output, of a process that ended after it had given the name, is not in the way.
    fs::write(&journal, noted).unwrap();
    run(false).unwrap();
    assert_eq!(sandbox.names(), ["out.safetensors", "tiny"]);
}

/// Unfinished output stays if something else has taken its name, and kiln names it.
#[test]
fn unfinished_work_whose_name_is_taken_is_named() {
    let sandbox = Sandbox::new();
    begun(&sandbox);
    fs::create_dir(sandbox.path("out.tmp")).unwrap();
    fs::copy(sandbox.path("out.safetensors.tmp.json"), sandbox.path("out.tmp.json")).unwrap();
    fs::create_dir_all(sandbox.path("out/mine")).unwrap();
    fs::write(sandbox.path("out.safetensors"), "mine").unwrap();
    let before = sandbox.names();
    for out in ["out.safetensors", "out"] {
        let run = sandbox.run(["quantize", "tiny", out, "--to", "fp8", "--no-calibration"]);
        assert_eq!(run.code, Some(5), "{}", run.stderr);
        let note =
            format!("note: `{out}.tmp` and `{out}.tmp.json` stay: the same command continues them once OUT is moved away\n");
        assert!(run.stderr.starts_with(&note), "{}", run.stderr);
    }
    assert_eq!(sandbox.names(), before);
}

/// Plans a folder with the quantized transformer of the tiny model, and everything else that is copied there.
fn plan_of(folder: &Path, vae: Option<PathBuf>, reads_tokenizer: Option<&Path>) -> FilePlan {
    let mut request = LocateRequest { model: Some(folder.into()), ..Default::default() };
    request.parts.vae = vae;
    request.tokenizer = reads_tokenizer.map(Into::into);
    let found = locate(&request).unwrap();
    let model = OpenModel::open(&found, Some(Variant::Distilled)).unwrap();
    let parts = [Component::Transformer, Component::TextEncoder];
    let read = calibration_inputs(&found, model.weights(), &parts[..1], model.variant).unwrap();
    if reads_tokenizer.is_some() {
        // A single file: nothing is copied.
        return FilePlan::new(&[source(folder)], Vec::new(), &options(Fp8, &[])).unwrap().calibrated_by(read);
    }
    let copies = copies(&found, model.weights(), &parts[..1], model.variant).unwrap();
    FilePlan::new(&[source(folder)], copies, &options(Fp8, &[])).unwrap()
}

#[test]
fn other_files_to_copy_or_to_calibrate_with_are_another_request() {
    let sandbox = Sandbox::new();
    let folder = tiny_in(&sandbox);
    let run = |plan: &FilePlan, out: &str, at: At| {
        let target = Target { is_folder: out == "out", ..target(&sandbox.path(out), OFTEN) };
        let observer = Observer::new(at);
        plan.write(&target, &mut || Ok(BTreeMap::new()), &observer, &observer.stop).map(drop)
    };
    let refused = |plan: &FilePlan, out: &str| {
        let error = run(plan, out, At::Never).unwrap_err().to_string();
        assert!(error.ends_with("was begun from other files, or they have changed"), "{error}");
    };
    let copy_of = |from: &str, to: &str| {
        let to = sandbox.path(to);
        fs::copy(folder.join(from), &to).unwrap();
        to
    };
    // A folder with another VAE.
    assert!(matches!(run(&plan_of(&folder, None, None), "out", At::Stop(60)), Err(Error::Interrupted)));
    let vae = copy_of("vae/diffusion_pytorch_model.safetensors", "other.safetensors");
    refused(&plan_of(&folder, Some(vae), None), "out");
    // Whatever else is found where the folder grows does not get into it.
    for name in ["vae/other.safetensors", "old/file", "file"] {
        let path = sandbox.path("out.tmp").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "old").unwrap();
    }
    run(&plan_of(&folder, None, None), "out", At::Never).unwrap();
    let names = |folder: &str| {
        let entries = fs::read_dir(sandbox.path(folder)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let parts = ["kiln.json", "model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae"];
    assert_eq!(names("out"), parts);
    assert_eq!(names("out/vae"), ["config.json", "diffusion_pytorch_model.safetensors"]);

    // A single file whose layers were calibrated with other tokens, or with a text encoder that has changed since.
    let tokenizer = folder.join("tokenizer/tokenizer.json");
    let other = copy_of("tokenizer/tokenizer.json", "other.json");
    let out = "out.safetensors";
    assert!(matches!(run(&plan_of(&folder, None, Some(&tokenizer)), out, At::Stop(60)), Err(Error::Interrupted)));
    refused(&plan_of(&folder, None, Some(&other)), out);
    let encoder = fs::File::options().write(true).open(folder.join("text_encoder/model.safetensors")).unwrap();
    let modified = encoder.metadata().unwrap().modified().unwrap();
    encoder.set_modified(modified + Duration::from_secs(1)).unwrap();
    refused(&plan_of(&folder, None, Some(&tokenizer)), out);
    encoder.set_modified(modified).unwrap();
    // No layer depends on the VAE.
    let vae = fs::File::options().write(true).open(folder.join("vae/diffusion_pytorch_model.safetensors")).unwrap();
    vae.set_modified(modified + Duration::from_secs(1)).unwrap();
    run(&plan_of(&folder, None, Some(&tokenizer)), out, At::Never).unwrap();
}

/// A journal whose calibration gives a layer no scale cannot be continued, and says so before any work.
#[test]
fn a_journal_with_unusable_calibration_is_refused() {
    let sandbox = Sandbox::new();
    let (folder, out) = (tiny_in(&sandbox), sandbox.path("out.safetensors"));
    let calibrated = Options { calibration: Some("x".into()), ..options(Fp8, &[]) };
    let plan = |options: &Options| FilePlan::new(&[source(&folder)], Vec::new(), options).unwrap();
    let run = |options: &Options, at: At, restart: bool| {
        let plan = plan(options);
        let measured: BTreeMap<String, f32> = plan.measured().into_iter().map(|layer| (layer.into(), 3.0)).collect();
        let (observer, target) = (Observer::new(at), Target { restart, ..target(&out, OFTEN) });
        plan.write(&target, &mut || Ok(measured.clone()), &observer, &observer.stop).map(drop)
    };
    assert!(matches!(run(&calibrated, At::Stop(60), false), Err(Error::Interrupted)));
    let journal = sandbox.path("out.safetensors.tmp.json");
    let noted = fs::read_to_string(&journal).unwrap();
    let (three, layer) = (3.0_f32.to_bits(), "double_blocks.0.img_attn.qkv");
    let entry = format!("\"{layer}.weight\":{three}");
    assert!(noted.contains(&entry), "{noted}");
    // A journal with the right checksum of every line, which damage does not have.
    let checked = |text: &str| -> String {
        let lines = text.lines().map(|line| line.split('\t').next().unwrap_or_default().as_bytes().to_vec());
        String::from_utf8(lines.flat_map(line_of).collect()).unwrap()
    };
    assert_eq!(checked(&noted), noted);
    let refused = |text: String, detail: &str| {
        let text = checked(&text);
        fs::write(&journal, &text).unwrap();
        let error = run(&calibrated, At::Never, false).unwrap_err();
        assert_eq!((error.exit_code(), error.remedy()), (3, Some(Remedy::BeginAnew)), "{error}");
        assert!(error.to_string().ends_with(&format!("out.safetensors.tmp.json): {detail}")), "{error}");
        assert_eq!(fs::read_to_string(&journal).unwrap(), text);
    };
    let no_result = format!("its calibration has no usable result for `{layer}`");
    for value in [f32::NAN, f32::INFINITY, 0.0, -3.0, 1e30, 1e-30] {
        refused(noted.replace(&entry, &format!("\"{layer}.weight\":{}", value.to_bits())), &no_result);
    }
    refused(noted.replace(&entry, &format!("\"other\":{three}")), &no_result);
    // What is begun anew is measured anew.
    run(&calibrated, At::Never, true).unwrap();
    assert_eq!(sandbox.names(), ["out.safetensors", "tiny"]);
    // Results that nobody asked for.
    fs::remove_file(&out).unwrap();
    assert!(matches!(run(&options(Fp8, &[]), At::Stop(60), false), Err(Error::Interrupted)));
    let noted = fs::read_to_string(&journal).unwrap() + &format!("{{\"calibration\":{{{entry}}}}}\n");
    fs::write(&journal, checked(&noted)).unwrap();
    let error = run(&options(Fp8, &[]), At::Never, false).unwrap_err().to_string();
    assert!(error.ends_with("it has calibration results, but its request has no calibration"), "{error}");
}
