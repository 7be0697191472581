//! Weight files that change while they are mapped: an error that says so, or the right image. The program never dies of a signal,
//! and never generates an image from other weights.
#![cfg(target_os = "linux")]

use common::moments::{in_pairs, moment, number};
use common::random::long;
use common::sandbox::{QUICK, Sandbox, grouped};
use common::{opened, small_job, tiny_weights};
use kiln::error::{Error, Result};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::{Component, PerComponent};
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Engine, LoadOptions, OpenModel};
use kiln::internals::tensor::{Bytes, DType, Precision};
use kiln::internals::tiny;
use kiln::progress::Silent;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

const CHANGED: &str = "weight file changed while it was being read";
const HINT: &str = "nothing was written; start again when the file is complete";

/// The parts of the tiny model as `kiln tiny --layout bfl` writes them, with the flags that name them.
const FILES: [(&str, &str); 3] =
    [("--transformer", "flux-2-klein-tiny.safetensors"), ("--text-encoder", "qwen.safetensors"), ("--vae", "ae.safetensors")];

/// Makes a file look old: systems with coarse clocks would give it and a change right after it the same time.
fn age(path: &Path) {
    write(path).set_modified(SystemTime::UNIX_EPOCH).unwrap();
}

fn write(path: &Path) -> File {
    OpenOptions::new().write(true).open(path).unwrap()
}

/// A change of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Emptied,
    CutToAPage,
    CutByAPage,
    Overwritten,
    Rewritten,
    Longer,
    Deleted,
    Replaced,
    Forbidden,
}

impl Fate {
    const ALL: [Self; 9] = [
        Self::Emptied,
        Self::CutToAPage,
        Self::CutByAPage,
        Self::Overwritten,
        Self::Rewritten,
        Self::Longer,
        Self::Deleted,
        Self::Replaced,
        Self::Forbidden,
    ];

    /// Whether a mapping of the file keeps its bytes.
    fn is_harmless(self) -> bool {
        matches!(self, Self::Deleted | Self::Replaced | Self::Forbidden)
    }

    fn befall(self, path: &Path) {
        let len = fs::metadata(path).unwrap().len();
        match self {
            Self::Emptied => write(path).set_len(0).unwrap(),
            Self::CutToAPage => write(path).set_len(4096).unwrap(),
            Self::CutByAPage => write(path).set_len(len - 4096).unwrap(),
            Self::Overwritten => {
                let mut file = write(path);
                file.seek(SeekFrom::Start(len / 2)).unwrap();
                // In bf16 these bytes are large values of both signs.
                file.write_all(&vec![0xc5; len as usize / 2]).unwrap();
            }
            Self::Rewritten => {
                // A download that starts again truncates the file and then writes the same bytes.
                let bytes = fs::read(path).unwrap();
                let mut file = File::create(path).unwrap();
                for chunk in bytes.chunks(bytes.len() / 4) {
                    std::thread::sleep(Duration::from_millis(1));
                    file.write_all(chunk).unwrap();
                }
            }
            Self::Longer => OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap(),
            Self::Deleted => fs::remove_file(path).unwrap(),
            Self::Replaced => {
                let other = path.with_extension("new");
                fs::write(&other, b"another file").unwrap();
                fs::rename(other, path).unwrap();
            }
            Self::Forbidden => fs::set_permissions(path, Permissions::from_mode(0o000)).unwrap(),
        }
    }
}

fn assert_changed(error: &Error, path: &Path, detail: &str) {
    assert_eq!(error.exit_code(), 3);
    assert_eq!(error.to_string(), format!("{CHANGED} ({}): {detail}", path.display()));
    assert_eq!(error.hint().as_deref(), Some(HINT));
}

#[test]
fn every_change_is_named() {
    let sandbox = Sandbox::new();
    let vae = tiny::model(Layout::Bfl, DType::Bf16).unwrap().vae;
    let len = vae.len() as u64;
    for fate in Fate::ALL {
        let path = sandbox.path(&format!("{fate:?}.safetensors"));
        fs::write(&path, &*vae).unwrap();
        age(&path);
        let shard = Shard::open(&path).unwrap();
        shard.verify().unwrap();
        fate.befall(&path);
        let detail = match fate {
            Fate::Emptied => format!("size {} -> 0", grouped(len)),
            Fate::CutToAPage => format!("size {} -> 4,096", grouped(len)),
            Fate::CutByAPage => format!("size {} -> {}", grouped(len), grouped(len - 4096)),
            Fate::Longer => format!("size {} -> {}", grouped(len), grouped(len + 4)),
            Fate::Overwritten | Fate::Rewritten => "it was written to".into(),
            Fate::Deleted | Fate::Replaced | Fate::Forbidden => {
                shard.verify().unwrap();
                let all = shard.tensors().all(|(name, entry)| shard.bytes(name).unwrap()[..] == vae[entry.range.clone()]);
                assert!(all, "{fate:?} files keep their bytes");
                continue;
            }
        };
        assert_changed(&shard.verify().unwrap_err(), &path, &detail);
        // Reading on is still possible, whatever the values.
        let sum: u64 = shard.tensors().flat_map(|(name, _)| shard.bytes(name).unwrap().to_vec()).map(u64::from).sum();
        assert!(sum > 0 || matches!(fate, Fate::Emptied | Fate::CutToAPage | Fate::CutByAPage), "{fate:?}");
        assert_changed(&shard.verify().unwrap_err(), &path, &detail);
    }
    // Weights in memory cannot change.
    Shard::from_bytes("memory", vae).unwrap().verify().unwrap();
}

/// Size, content and modification time are restored, so that only the SIGBUS handler knows of the truncation.
#[test]
fn a_truncation_that_was_undone_is_noticed_by_the_signal_handler() {
    let sandbox = Sandbox::new();
    let path = sandbox.path("x.safetensors");
    let bytes = tiny::model(Layout::Bfl, DType::Bf16).unwrap().vae;
    fs::write(&path, &*bytes).unwrap();
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let (reader, other) = (Shard::open(&path).unwrap(), Shard::open(&path).unwrap());
    let all = |shard: &Shard| shard.tensors().flat_map(|(name, _)| shard.bytes(name).unwrap().to_vec()).collect::<Vec<u8>>();
    let right = all(&other);

    write(&path).set_len(0).unwrap();
    // Without `verify` below these zeros would be taken for weights.
    assert!(all(&reader).iter().all(|&byte| byte == 0), "zeros for everything");
    let mut file = write(&path);
    file.write_all(&bytes).unwrap();
    file.set_modified(modified).unwrap();

    assert_changed(&reader.verify().unwrap_err(), &path, "part of it was missing when it was read");
    assert!(all(&reader).iter().all(|&byte| byte == 0), "and it stays so");
    // A mapping that was not read meanwhile is not affected.
    other.verify().unwrap();
    assert_eq!(all(&other), right);
    // The slots of closed mappings are free again, and their marks are cleared.
    drop(reader);
    for _ in 0..3000 {
        Shard::open(&path).unwrap().verify().unwrap();
    }
}

/// The tiny model with another transformer.
fn open(transformer: Shard) -> OpenModel {
    let tiny = tiny::model(Layout::Bfl, DType::Bf16).unwrap();
    let transformer = Weights::from_shards(Component::Transformer, vec![transformer]).unwrap();
    opened(PerComponent { transformer, ..tiny_weights(&tiny) }, Variant::Distilled, ModelDefaults::klein())
}

fn load(model: OpenModel) -> Result<Engine> {
    let cpu = Cpu::new(1, Arc::default()).unwrap();
    Engine::load(Box::new(cpu), model, LoadOptions { precision: Precision::F32, ..LoadOptions::DEFAULT }, &Silent)
}

/// The pixels of the image, or none if the run failed before.
fn generate(engine: &mut Engine) -> (Option<Vec<u8>>, Result<()>) {
    let mut pixels = None;
    let done = engine.generate(&small_job(), &Silent, &mut |output| {
        pixels = Some(output.image.pixels);
        Ok(())
    });
    (pixels, done)
}

#[test]
fn no_image_is_generated_from_truncated_weights() {
    let sandbox = Sandbox::new();
    let bytes = tiny::model(Layout::Bfl, DType::Bf16).unwrap().transformer;
    let path = sandbox.path("x.safetensors");
    let mapped = || {
        fs::write(&path, &*bytes).unwrap();
        Shard::open(&path).unwrap()
    };

    // The change comes after the file was mapped, before it was read.
    for fate in [Fate::Emptied, Fate::CutToAPage, Fate::CutByAPage] {
        let model = open(mapped());
        fate.befall(&path);
        let now = fs::metadata(&path).unwrap().len();
        let detail = format!("size {} -> {}", grouped(bytes.len() as u64), grouped(now));
        assert_changed(&model.verify().unwrap_err(), &path, &detail);
        assert_changed(&load(model).err().unwrap(), &path, &detail);
    }
    // The change comes after loading.
    let mut engine = load(open(mapped())).unwrap();
    Fate::CutToAPage.befall(&path);
    let (pixels, done) = generate(&mut engine);
    assert!(pixels.is_none() && done.is_err_and(|error| error.to_string().starts_with(CHANGED)));

    // The control: with zeros for half of the transformer, in memory, there is an image, and it is wrong. A tensor of nothing but
    // zeros would be noticed.
    let mut zeros = bytes.to_vec();
    let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    zeros[header..].chunks_exact_mut(64).for_each(|numbers| numbers[..32].fill(0));
    let from = |bytes| load(open(Shard::from_bytes("memory", bytes).unwrap())).unwrap();
    let (wrong, done) = generate(&mut from(Bytes::new(Arc::new(zeros))));
    done.unwrap();
    let (right, done) = generate(&mut from(bytes));
    done.unwrap();
    assert!(wrong.is_some() && wrong != right);
}

/// A sandbox with weight files, one of which will be changed.
struct Prepared {
    sandbox: Sandbox,
    victim: PathBuf,
    args: Vec<String>,
}

fn prepare(model: &Path, victim: usize) -> Prepared {
    let sandbox = Sandbox::new();
    let path = sandbox.path(FILES[victim].1);
    fs::copy(model.join(FILES[victim].1), &path).unwrap();
    age(&path);
    let mut args: Vec<String> =
        ["x", "--seed", "5", "-o", "out.png", "--threads", "1"].iter().chain(&QUICK).map(|s| s.to_string()).collect();
    let file = |name: &str| model.join(name).display().to_string();
    for (index, (flag, name)) in FILES.iter().enumerate() {
        args.extend([flag.to_string(), if index == victim { name.to_string() } else { file(name) }]);
    }
    args.extend(["--tokenizer".into(), file("tokenizer.json")]);
    Prepared { sandbox, victim: path, args }
}

/// How a run ended.
struct End {
    code: Option<i32>,
    stderr: String,
    png: Option<Vec<u8>>,
    others: Vec<String>,
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = self.png.as_ref().map(Vec::len);
        write!(f, "code {:?}, image of {size:?} bytes, also {:?}\n{}", self.code, self.others, self.stderr)
    }
}

/// Runs the program and calls `disturb` while it runs: at once, or after it reported that its files are mapped.
fn disturbed(prepared: &Prepared, mapped: bool, disturb: impl FnOnce()) -> End {
    let mut child = prepared.sandbox.command(&prepared.args).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    let mut stderr = String::new();
    if mapped {
        reader.read_line(&mut stderr).unwrap();
    }
    disturb();
    reader.read_to_string(&mut stderr).unwrap();
    let code = child.wait().unwrap().code();
    let (png, others) = prepared
        .sandbox
        .names()
        .into_iter()
        .filter(|name| !name.contains("safetensors"))
        .partition::<Vec<_>, _>(|name| name == "out.png");
    End { code, stderr, png: png.first().map(|name| fs::read(prepared.sandbox.path(name)).unwrap()), others }
}

/// Between two lines of `kiln run` nothing depends on who is faster: the second is refused.
#[test]
fn a_change_between_two_images_is_refused() {
    let shared = Sandbox::new();
    shared.tiny("model", &["--layout", "bfl"]);
    for (victim, fate) in [Fate::CutByAPage, Fate::Overwritten, Fate::Rewritten].into_iter().enumerate() {
        let Prepared { sandbox, victim, args } = prepare(&shared.path("model"), victim);
        // The flags behind the prompt, the seed and the output.
        let mut command = sandbox.command(["run"].into_iter().chain(args[5..].iter().map(String::as_str)));
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (mut stdin, mut answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()).lines());
        let mut ask = |line: &str| {
            stdin.write_all(line.as_bytes()).unwrap();
            answers.next().unwrap().unwrap()
        };
        assert!(ask("one\n").contains("\"path\":\"one-"), "{fate:?}");
        fate.befall(&victim);
        let answer = ask("two\n");
        assert!(answer.contains(CHANGED) && answer.contains("\"code\":3"), "{fate:?}: {answer}");
        drop(stdin);
        assert_eq!(child.wait().unwrap().code(), Some(1));
        assert!(!sandbox.names().iter().any(|name| name.starts_with("two")), "{:?}", sandbox.names());
    }
}

#[test]
fn changes_at_any_moment_end_well() {
    let shared = Sandbox::new();
    shared.tiny("model", &["--layout", "bfl"]);
    let model = shared.path("model");

    // Two undisturbed runs at a time give the right image, and the duration of a run.
    let undisturbed = in_pairs(2, |_| {
        let mut start = Instant::now();
        let end = disturbed(&prepare(&model, 0), true, || start = Instant::now());
        assert_eq!(end.code, Some(0), "{end:?}");
        (end.png.unwrap(), start.elapsed())
    });
    let right = &undisturbed[0].0;
    let duration = undisturbed[0].1.max(undisturbed[1].1);
    assert_eq!(right, &undisturbed[1].0);

    // Mostly harmful changes; a run with a harmless one takes its full time.
    let (harmless, harmful): (Vec<_>, Vec<_>) = Fate::ALL.into_iter().partition(|fate| fate.is_harmless());
    let rounds = if long() { 20 } else { 2 };
    let fates = [harmful.repeat(rounds), harmless.repeat(rounds / 2)].concat();
    in_pairs(fates.len(), |index| {
        let fate = fates[index];
        let prepared = prepare(&model, number(index, FILES.len()));
        // Every other change comes at once.
        let delay = if index % 2 == 0 { Duration::ZERO } else { moment(index, duration) };
        let end = disturbed(&prepared, true, || {
            std::thread::sleep(delay);
            fate.befall(&prepared.victim);
        });
        let context = format!("{fate:?} {} after {delay:?} of {duration:?}: {end:?}", prepared.victim.display());
        assert!(end.others.is_empty(), "{context}");
        if end.code == Some(0) {
            assert!(end.png.as_ref() == Some(right), "another image: {context}");
        } else {
            assert!(end.code == Some(3) && end.png.is_none() && !fate.is_harmless(), "{context}");
            let file = prepared.victim.file_name().unwrap().display().to_string();
            let error = end.stderr.lines().skip_while(|line| !line.starts_with("error: ")).collect::<Vec<_>>();
            assert!(error[0].starts_with(&format!("error: {CHANGED} ({file}): ")), "{context}");
            assert_eq!(error[1..], ["", &format!("hint: {HINT}")], "{context}");
        }
    });

    // While files are being opened, several errors are right.
    in_pairs(4 * rounds, |index| {
        let fate = [Fate::Emptied, Fate::CutToAPage, Fate::CutByAPage, Fate::Longer][index % 4];
        let prepared = prepare(&model, index % FILES.len());
        let end = disturbed(&prepared, false, || {
            std::thread::sleep(moment(index, Duration::from_millis(20)));
            fate.befall(&prepared.victim);
        });
        let whole = end.code == Some(0) && end.png.as_ref() == Some(right);
        let refused = end.code == Some(3) && end.png.is_none() && end.stderr.contains("error: ");
        assert!((whole || refused) && end.others.is_empty(), "{fate:?} {end:?}");
    });
}

/// A SIGBUS outside of our mappings ends the process as it would without our handler.
#[test]
fn other_bus_errors_are_passed_on() {
    const NAME: &str = "KILN_TEST_BUS_ERROR";
    if std::env::var_os(NAME).is_some() {
        die_of_a_bus_error();
    }
    let sandbox = Sandbox::new();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "guard::other_bus_errors_are_passed_on"]).env(NAME, "").current_dir(&sandbox.0);
    let output = command.output().unwrap();
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
}

#[allow(unsafe_code)]
fn die_of_a_bus_error() -> ! {
    fs::write("x.safetensors", &*tiny::model(Layout::Bfl, DType::Bf16).unwrap().vae).unwrap();
    let _ours = Shard::open(Path::new("x.safetensors")).unwrap();
    let file = File::create_new("y").unwrap();
    file.set_len(4096).unwrap();
    // SAFETY: reading it after the truncation raises SIGBUS, which is to end this process.
    let foreign = unsafe { memmap2::Mmap::map(&File::open("y").unwrap()) }.unwrap();
    file.set_len(0).unwrap();
    unreachable!("read {}", std::hint::black_box(&foreign)[0]);
}
