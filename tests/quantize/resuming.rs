//! Work that is stopped, by a signal or by the end of the process, leaves no half file and can be continued: the result is the same
//! as that of one run, to the byte.

use super::sandbox::{Run, Sandbox, send};
use super::{At, Observer, options, target, write};
use kiln::error::{Error, Remedy};
use kiln::names::Layout;
use kiln::output::Staged;
use kiln::part::Part;
use kiln::quantise::{Options, PartSource, Target, WeightLayout};
use kiln::tensor::DType;
use kiln::tensor::quantise::QuantisedFormat::{Fp8, Nvfp4};
use kiln::tiny;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Says to the test below that it is a child process: the input, the output and the point at which it ends.
const CHILD: &str = "KILN_TEST_QUANTIZE_CHILD";

/// Bytes after which the journal is saved here: every few layers.
const OFTEN: u64 = 300_000;

fn source(folder: &Path) -> PartSource {
    PartSource::open(Part::Transformer, &folder.join("transformer"), None).unwrap()
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
    command.args(["--exact", "resuming::child", "--test-threads", "1"]);
    command.env(CHILD, format!("{}\n{}\n{at}", folder.display(), out.display()));
    !command.output().unwrap().status.success()
}

#[test]
fn a_process_that_ends_at_any_point_leaves_no_half_file_and_is_continued() {
    let sandbox = Sandbox::new();
    let folder = tiny_in(&sandbox);
    let out = sandbox.path("out.safetensors");
    let (part, journal) = (sandbox.path("out.safetensors.part"), sandbox.path("out.safetensors.part.json"));
    // Each run continues the one before it, and gets a little further.
    let mut layers = Vec::new();
    for at in ["1", "20", "30", "40", "50", "end"] {
        assert!(killed(&folder, &out, at), "{at}");
        assert!(!out.exists() && part.exists() && journal.exists(), "{at}: {:?}", sandbox.names());
        let copies = [(&part, sandbox.path("copy.safetensors.part")), (&journal, sandbox.path("copy.safetensors.part.json"))];
        copies.iter().for_each(|(from, to)| assert!(fs::copy(from, to).unwrap() > 0));
        let copy = sandbox.path("copy.safetensors");
        let observer = Observer::new(At::Never);
        let report = write(&source(&folder), &options(Fp8, &[]), &target(&copy, OFTEN), &observer).unwrap();
        assert!(fs::read(&copy).unwrap() == *WHOLE, "{at}");
        assert_eq!((report.files[0].layers.len(), observer.warnings.take()), (20, Vec::new()), "{at}");
        layers.push(observer.layers.take().len());
        assert_eq!(sandbox.names(), ["copy.safetensors", "out.safetensors.part", "out.safetensors.part.json", "tiny"]);
        fs::remove_file(copy).unwrap();
    }
    // What was finished is not quantised again: of twenty layers all at first, and none at the end.
    assert_eq!((layers[0], layers[layers.len() - 1]), (20, 0), "{layers:?}");
    assert!(layers.is_sorted_by(|a, b| a >= b) && layers[3] < 20 && layers[3] > 0, "{layers:?}");
}

#[test]
fn the_program_can_be_killed_at_any_moment() {
    let sandbox = Sandbox::new();
    let command = |out: &str| sandbox.command(["quantize", "tiny", out, "--to", "nvfp4", "--no-calibration", "-q"]);
    let start = Instant::now();
    Run::of(command("whole")).good();
    let duration = start.elapsed();
    let mut killed = 0;
    for i in 1..=6 {
        let mut child = command("out").spawn().unwrap();
        std::thread::sleep(duration.mul_f64(f64::from(i) / 7.0).min(Duration::from_secs(2)));
        send("-KILL", &child);
        killed += usize::from(!child.wait().unwrap().success());
        if sandbox.path("out").exists() {
            break;
        }
    }
    if !sandbox.path("out").exists() {
        Run::of(command("out")).good();
    }
    assert!(killed > 0, "{duration:?}");
    for file in ["transformer/flux-2-klein-nvfp4.safetensors", "text_encoder/qwen_3_nvfp4.safetensors", "model_index.json"] {
        assert!(
            fs::read(sandbox.path("out").join(file)).unwrap() == fs::read(sandbox.path("whole").join(file)).unwrap(),
            "{file}"
        );
    }
    // A process that is killed between giving the name and removing the journal leaves the latter, until the next run.
    let _ = sandbox.run(["quantize", "tiny", "out", "--to", "nvfp4", "--no-calibration"]);
    assert_eq!(sandbox.names(), ["out", "whole"]);
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
    assert_eq!(sandbox.names(), ["out.safetensors.part", "out.safetensors.part.json", "tiny"]);
    let (result, second) = run(At::Never);
    result.unwrap();
    assert!(first > 0 && second > 0 && first + second == 20, "{first} {second}");
    assert!(fs::read(&out).unwrap() == *WHOLE);
    assert_eq!(sandbox.names(), ["out.safetensors", "tiny"]);
}

/// Begins a file and leaves it unfinished.
fn begun(sandbox: &Sandbox) -> (PathBuf, PathBuf) {
    let (folder, out) = (tiny_in(sandbox), sandbox.path("out.safetensors"));
    let result = write(&source(&folder), &options(Fp8, &[]), &target(&out, 0), &Observer::new(At::Stop(60)));
    assert!(matches!(result, Err(Error::Interrupted)));
    (folder, out)
}

#[test]
fn damage_is_noticed_and_repaired() {
    // A journal that cannot be read counts as none.
    let sandbox = Sandbox::new();
    let (folder, out) = begun(&sandbox);
    let journal = sandbox.path("out.safetensors.part.json");
    let text = fs::read(&journal).unwrap();
    fs::write(&journal, &text[..text.len() - 1]).unwrap();
    let observer = Observer::new(At::Never);
    write(&source(&folder), &options(Fp8, &[]), &target(&out, OFTEN), &observer).unwrap();
    assert!(fs::read(&out).unwrap() == *WHOLE);
    assert_eq!(observer.layers.take().len(), 20);
    let warnings = observer.warnings.take();
    assert!(warnings.len() == 1 && warnings[0].ends_with("is of no use (it is damaged): starting anew"), "{warnings:?}");

    // A layer that is not what the journal says is written again, whichever of its bytes is wrong.
    let whole = kiln::checkpoint::Shard::open(&out).unwrap();
    let place = |tensor: &str| whole.entry(tensor).unwrap().range.end - 1;
    for tensor in ["double_blocks.0.img_attn.qkv.weight", "double_blocks.0.img_attn.qkv.weight_scale", "img_in.weight"] {
        let sandbox = Sandbox::new();
        let (folder, out) = begun(&sandbox);
        let part = sandbox.path("out.safetensors.part");
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
    let before = (sandbox.names(), fs::read(sandbox.path("out.safetensors.part.json")).unwrap());
    for (other, why) in [
        (options(Nvfp4, &[]), "with another format or layout, or other layers"),
        (options(Fp8, &["single_blocks.1.*"]), "with another format or layout, or other layers"),
        (Options { layout: WeightLayout::Diffusers, ..options(Fp8, &[]) }, "with another format or layout, or other layers"),
        (Options { calibration: Some("x".into()), ..options(Fp8, &[]) }, "with another calibration"),
    ] {
        let error = write(&source(&folder), &other, &target(&out, OFTEN), &Observer::new(At::Never)).unwrap_err();
        assert!(error.to_string().ends_with(&format!("out.safetensors.part` was begun {why}")), "{error}");
        assert_eq!((error.remedy(), error.exit_code()), (Some(Remedy::Restart), 2));
    }
    let weights = folder.join("transformer/diffusion_pytorch_model.safetensors");
    let file = fs::File::options().write(true).open(&weights).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.set_modified(modified + Duration::from_secs(1)).unwrap();
    let error = write(&source(&folder), &options(Fp8, &[]), &target(&out, OFTEN), &Observer::new(At::Never)).unwrap_err();
    assert!(error.to_string().ends_with("was begun from other files, or they have changed"), "{error}");
    assert_eq!((sandbox.names(), fs::read(sandbox.path("out.safetensors.part.json")).unwrap()), before);
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
        let other = Staged::open(&out, is_folder, false).unwrap();
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
    // What is called like an unfinished output, but has no journal, is somebody else's.
    for (name, file) in [("a.safetensors", "a.safetensors.part"), ("b", "b.part/file")] {
        let file = sandbox.path(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "mine").unwrap();
        let error = run(&sandbox.path(name), name == "b").unwrap_err();
        assert!(error.contains("kiln did not begin"), "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"mine");
    }
}
