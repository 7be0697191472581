//! A process can be killed at any step, any number of times. The next run still ends with only the output.

use super::*;
use crate::error::Error;
use crate::output::disk::death;
use std::collections::VecDeque;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};

const HEADER: &[u8] = b"journal\n";
const LAYER: &[u8] = b"layer\n";

/// The content of an output file. Each byte stands for a layer.
const BYTES: &[u8] = b"12";

/// A command, and the state in which it starts.
#[derive(Clone, Copy, Debug, Default)]
struct Case {
    is_folder: bool,
    force: bool,
    /// The command discards what an earlier run left.
    restart: bool,
    /// The file system has no hard links.
    no_links: bool,
    /// An earlier run was stopped.
    is_begun: bool,
    /// The target exists: a file, or an empty folder.
    is_there: bool,
    /// The target's folder does not exist.
    is_deep: bool,
    /// The first run fails at its second layer and discards its work.
    fails: bool,
}

/// Everything in a folder, by path: the bytes of a file, and whether it has several names.
type State = Vec<(PathBuf, Option<(Vec<u8>, bool)>)>;

/// A folder for a test, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("kiln-staged-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // In memory, creating thousands of folders takes a quarter of the time.
        let folders = [PathBuf::from("/dev/shm"), std::env::temp_dir()].map(|folder| folder.join(&name));
        Self(folders.into_iter().find(|path| fs::create_dir(path).is_ok()).unwrap())
    }

    fn state(&self) -> State {
        fn list(folder: &Path, root: &Path, state: &mut State) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let meta = fs::symlink_metadata(&path).unwrap();
                let name = path.strip_prefix(root).unwrap().to_owned();
                state.push((name, meta.is_file().then(|| (fs::read(&path).unwrap(), meta.nlink() > 1))));
                if meta.is_dir() {
                    list(&path, root, state);
                }
            }
        }
        let mut state = State::new();
        list(&self.0, &self.0, &mut state);
        state.sort();
        state
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn is_journal(bytes: &[u8]) -> bool {
    bytes.starts_with(HEADER) || HEADER.starts_with(bytes)
}

impl Case {
    fn target(&self, scratch: &Scratch) -> PathBuf {
        scratch.0.join(if self.is_deep { "a/b/out" } else { "out" })
    }

    /// The files of the output.
    fn names(&self) -> &[&str] {
        if self.is_folder { &["x/1", "2"] } else { &["out"] }
    }

    /// Creates the state before the first run.
    fn prepare(&self, scratch: &Scratch) {
        let target = self.target(scratch);
        match (self.is_there, self.is_folder) {
            (true, true) => fs::create_dir(&target).unwrap(),
            (true, false) => fs::write(&target, "old").unwrap(),
            _ => {}
        }
        if self.is_begun {
            let mut staged = Staged::open(&target, self.is_folder, self.force, is_journal).unwrap();
            staged.begin(HEADER).unwrap();
            for name in self.names().iter().chain(&["x/other", "y/z"]) {
                staged.file(Path::new(name), 3).unwrap().write_at(0, b"111").unwrap();
            }
            staged.append(LAYER).unwrap();
        }
    }

    /// Writes an output or continues it, as quantizing does.
    fn run(&self, target: &Path, fails: bool) -> Result<()> {
        let mut staged = Staged::open(target, self.is_folder, self.force, is_journal)?;
        let earlier = staged.earlier().filter(|lines| !self.restart && lines.starts_with(HEADER));
        let done = earlier.map(|lines| lines[HEADER.len()..].len() / LAYER.len());
        if done.is_none() {
            staged.begin(HEADER)?;
        }
        let written = self.write(&mut staged, done.unwrap_or(0), fails);
        if matches!(written, Err(Error::Interrupted)) {
            staged.discard();
            return written;
        }
        written.and_then(|()| staged.publish())
    }

    fn write(&self, staged: &mut Staged, done: usize, fails: bool) -> Result<()> {
        let open = |name: &&str| staged.file(Path::new(name), BYTES.len() as u64);
        let mut files = self.names().iter().map(open).collect::<Result<Vec<_>>>()?;
        for (at, byte) in BYTES.iter().enumerate() {
            if fails && at == 1 {
                return Err(Error::Interrupted);
            }
            let at = at as u64;
            for file in &mut files {
                let mut sum = Crc::new();
                sum.update(&[*byte]);
                let is_written = at < done as u64 && file.checksum(at..at + 1)? == sum.sum();
                // Finished layers are on disk, unless the run was discarding them.
                assert!(is_written || at >= done as u64 || self.fails, "{self:?}");
                if !is_written {
                    file.write_at(at, &[*byte])?;
                }
            }
            if at >= done as u64 {
                staged.append(LAYER)?;
            }
        }
        if self.is_folder {
            staged.retain(&self.names().iter().map(Path::new).collect())?;
        }
        Ok(())
    }

    /// Runs the command again and again, each time up to a step. Returns whether the last run was killed.
    fn killed(&self, scratch: &Scratch, kills: &[usize]) -> bool {
        self.prepare(scratch);
        let target = self.target(scratch);
        let run =
            |(i, steps): (usize, &usize)| death::after(*steps, !self.no_links, || self.run(&target, self.fails && i == 0)).1;
        kills.iter().enumerate().map(run).fold(true, |_, died| died)
    }

    /// Whether the output is complete.
    fn is_complete(&self, target: &Path) -> bool {
        let paths = self.names().iter().map(|name| if self.is_folder { target.join(name) } else { target.into() });
        paths.into_iter().all(|path| fs::read(path).is_ok_and(|bytes| bytes == BYTES))
    }

    /// Fails if the target is neither complete nor in its state before the first run.
    fn check_target(&self, target: &Path, what: &str) {
        let is_before = match fs::symlink_metadata(target) {
            Err(_) => true,
            Ok(meta) if meta.is_dir() => self.is_there && fs::read_dir(target).unwrap().next().is_none(),
            // A file system without hard links takes the name first.
            Ok(meta) if meta.len() == 0 => self.no_links && !self.is_there,
            Ok(_) => self.is_there && fs::read(target).unwrap() == b"old",
        };
        assert!(is_before || self.is_complete(target), "{what}");
    }

    /// Runs the command to its end. Fails unless only the output is left.
    fn finish(&self, scratch: &Scratch, what: &str) {
        let target = self.target(scratch);
        self.check_target(&target, what);
        let is_taken = self.is_complete(&target) && !self.force;
        let (result, _) = death::after(usize::MAX, !self.no_links, || self.run(&target, false));
        match result {
            Err(Error::OutputExists { .. }) => assert!(is_taken && !self.is_folder, "{what}"),
            Err(Error::Write { source, .. }) if source.kind() == ErrorKind::DirectoryNotEmpty => {
                assert!(is_taken && self.is_folder, "{what}");
            }
            result => assert!(result.is_ok() && !is_taken, "{what}: {result:?}"),
        }
        assert!(self.is_complete(&target), "{what}");
        let mut names: Vec<_> = scratch.state().into_iter().map(|(name, _)| scratch.0.join(name)).collect();
        names.retain(|name| !target.starts_with(name));
        let files = ["2", "x", "x/1"].map(|name| target.join(name));
        assert_eq!(names, if self.is_folder { files.to_vec() } else { Vec::new() }, "{what}");
    }

    /// Kills the command at every step, and again at every step from each state that this leaves, until there is no new state.
    /// Returns the number of states.
    fn explore(&self) -> usize {
        let (mut seen, mut new) = (BTreeSet::new(), VecDeque::from([Vec::new()]));
        while let Some(kills) = new.pop_front() {
            for steps in 0.. {
                let scratch = Scratch::new();
                let kills: Vec<usize> = kills.iter().copied().chain([steps]).collect();
                let died = self.killed(&scratch, &kills);
                if seen.insert(scratch.state()) {
                    self.finish(&scratch, &format!("{self:?} {kills:?}"));
                    new.push_back(kills);
                }
                if !died {
                    break;
                }
            }
        }
        seen.len()
    }
}

#[test]
fn a_process_that_is_killed_at_any_step_leaves_nothing_that_the_next_run_does_not_remove() {
    let file = Case::default();
    let folder = Case { is_folder: true, ..file };
    for case in [
        file,
        Case { no_links: true, ..file },
        Case { force: true, ..file },
        Case { force: true, is_there: true, ..file },
        Case { is_begun: true, ..file },
        Case { is_begun: true, restart: true, no_links: true, ..file },
        Case { is_begun: true, restart: true, force: true, is_there: true, ..file },
        Case { fails: true, ..file },
        folder,
        Case { is_there: true, ..folder },
        Case { is_deep: true, ..folder },
        Case { is_begun: true, ..folder },
        Case { is_begun: true, restart: true, ..folder },
        Case { fails: true, ..folder },
    ] {
        let states = case.explore();
        assert!(states > 5, "{case:?}: {states}");
    }
}

/// Another process does not touch the journal and the output of a running one.
#[test]
fn a_process_at_work_is_not_disturbed() {
    for (is_folder, force) in [(false, false), (false, true), (true, false)] {
        let scratch = Scratch::new();
        let target = scratch.0.join("out");
        let open = || Staged::open(&target, is_folder, force, is_journal);
        let mut begun = open().unwrap();
        let refused = || {
            let before = scratch.state();
            let Error::Write { source, path } = open().unwrap_err() else { panic!() };
            assert_eq!((source.kind(), path), (ErrorKind::ResourceBusy, Staged::path_of(&target)));
            assert_eq!(scratch.state(), before);
        };
        refused();
        begun.begin(HEADER).unwrap();
        refused();
        begun.file(Path::new("x"), 1).unwrap();
        refused();
        // The target may change in the meantime.
        if is_folder { fs::create_dir_all(target.join("x")) } else { fs::write(&target, "") }.unwrap();
        refused();
    }
}

/// One process at a time writes, even if one locks a journal that another just removed. Each replaces a file; one writes a folder.
#[test]
fn one_of_many_processes_writes_an_output_at_a_time() {
    for round in 0..100 {
        let is_folder = round % 2 == 1;
        let case = Case { is_folder, force: !is_folder, ..Case::default() };
        let scratch = Scratch::new();
        let target = case.target(&scratch);
        let run = || loop {
            match case.run(&target, false) {
                Err(Error::Write { source, .. }) if source.kind() == ErrorKind::ResourceBusy => std::thread::yield_now(),
                Err(Error::Write { source, .. }) if source.kind() == ErrorKind::DirectoryNotEmpty => return 0,
                result => {
                    result.unwrap();
                    return 1;
                }
            }
        };
        let wins: usize = std::thread::scope(|scope| {
            let processes = [(); 4].map(|()| scope.spawn(run));
            processes.into_iter().map(|process| process.join().unwrap()).sum()
        });
        assert_eq!(wins, if is_folder { 1 } else { 4 }, "{case:?}");
        case.finish(&scratch, "many");
    }
}

/// An unfinished output stays if something else has taken its name, and so does the other file.
#[test]
fn an_output_that_another_one_has_replaced_is_kept() {
    for is_folder in [false, true] {
        let scratch = Scratch::new();
        let case = Case { is_folder, is_begun: true, ..Case::default() };
        case.prepare(&scratch);
        let target = case.target(&scratch);
        if is_folder { fs::create_dir_all(target.join("mine")) } else { fs::write(&target, "mine") }.unwrap();
        let before = scratch.state();
        assert!(Staged::open(&target, is_folder, false, is_journal).is_err());
        assert_eq!(scratch.state(), before);
    }
}

/// Links in the place of what kiln writes are neither followed nor replaced, whenever they appear.
#[test]
fn no_link_is_followed() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new();
    let (others, target) = (scratch.0.join("others"), scratch.0.join("out"));
    fs::create_dir(&others).unwrap();
    fs::write(others.join("1"), "mine").unwrap();
    let path = Staged::path_of(&target);
    let all_there = || {
        assert_eq!(fs::read(others.join("1")).unwrap(), b"mine");
        assert_eq!(fs::read_dir(&others).unwrap().count(), 1);
    };
    let begin = |is_folder| {
        let mut staged = Staged::open(&target, is_folder, true, is_journal).unwrap();
        staged.begin(HEADER).unwrap();
        staged
    };
    let is_link = |result: Result<()>, at: &Path| {
        let Err(Error::Write { source, path }) = result else { panic!("{result:?}") };
        assert!(source.to_string().starts_with("this is a link"), "{source}");
        assert_eq!(path, at);
        all_there();
    };
    // In an unfinished folder: in the place of a folder, of a file, and of the whole. A second name is as good as a link.
    for (name, to) in [("x", others.clone()), ("x/1", others.join("1")), ("x/1", scratch.0.join("nowhere"))] {
        let staged = begin(true);
        drop(staged.file(Path::new("2"), 2).unwrap());
        fs::create_dir_all(path.join(name).parent().unwrap()).unwrap();
        symlink(to, path.join(name)).unwrap();
        is_link(staged.file(Path::new("x/1"), 2).map(drop), &path.join("x/1"));
        is_link(staged.retain(&BTreeSet::from([Path::new("x/1")])), &path);
        // What is discarded is the link.
        staged.discard();
        all_there();
        assert!(!files::is_there(&path));
    }
    let staged = begin(true);
    drop(staged.file(Path::new("2"), 2).unwrap());
    fs::hard_link(others.join("1"), path.join("1")).unwrap();
    is_link(staged.file(Path::new("1"), 2).map(drop), &path.join("1"));
    staged.discard();
    for (is_folder, to) in [(true, others.clone()), (false, others.join("1")), (false, scratch.0.join("nowhere"))] {
        let staged = begin(is_folder);
        symlink(&to, &path).unwrap();
        is_link(staged.file(Path::new("1"), 2).map(drop), &if is_folder { path.join("1") } else { path.clone() });
        assert!(staged.check_space(1).is_ok());
        is_link(staged.publish(), &path);
        // It is there when the next run begins.
        is_link(Staged::open(&target, is_folder, true, is_journal).map(drop), &path);
        assert!(path.is_symlink());
        fs::remove_file(&path).unwrap();
        fs::remove_file(Staged::journal_of(&target)).unwrap();
    }
    // A target that becomes a link is not replaced.
    fs::write(&target, "old").unwrap();
    let staged = begin(false);
    drop(staged.file(Path::new("out"), 2).unwrap());
    fs::remove_file(&target).unwrap();
    symlink(others.join("1"), &target).unwrap();
    assert!(staged.publish().unwrap_err().to_string().contains("this is a symbolic link"));
    assert!(target.is_symlink());
    all_there();
}
