//! The weights of one part in a folder: which file or folder it is, or why there is none that can be used. A file that seems to
//! be there and is not (a link whose target was never downloaded, a pipe, a folder with a file's name) is named with the reason,
//! and of several that it could be none is guessed.

use crate::files;
use crate::names::PerPart;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// What was found of a part.
#[derive(Clone, Debug, Default)]
pub(super) enum Sought {
    /// Nothing.
    #[default]
    Missing,
    /// A file, or a folder of them.
    At(PathBuf),
    /// Files that are equally good.
    Several(Vec<PathBuf>),
    /// Something that looks like it, why it is not, and what could be meant in its stead.
    Unusable(PathBuf, String, Vec<PathBuf>),
}

impl Sought {
    /// Where it is, if it can be used.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            Self::At(path) => Some(path.clone()),
            _ => None,
        }
    }

    /// Looks further if nothing was found. Something unusable may be what is meant, so nothing takes its place without a word.
    pub fn or_else(self, next: impl FnOnce() -> Self) -> Self {
        match self {
            Self::Missing => next(),
            Self::Unusable(path, why, mut others) => {
                match next() {
                    Self::Missing => {}
                    Self::At(other) => others.push(other),
                    Self::Several(more) | Self::Unusable(_, _, more) => others.extend(more),
                }
                Self::Unusable(path, why, others)
            }
            found => found,
        }
    }
}

/// Says what is wrong with the parts that were not found, and what to do about it. Paths are told as they are inside `folder`, and
/// `expected` is the advice where nothing is there at all.
pub(super) fn complain(parts: &PerPart<Sought>, folder: Option<&Path>, expected: &str) -> Option<(String, String)> {
    let flags = PerPart { transformer: "--transformer", text_encoder: "--text-encoder", vae: "--vae" };
    let inside = |path: &Path| folder.and_then(|folder| path.strip_prefix(folder).ok()).unwrap_or(path).display().to_string();
    let (mut missing, mut faults, mut pick, mut replace) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let list = |paths: &[PathBuf]| paths.iter().map(|path| inside(path)).collect::<Vec<String>>().join(", ");
    for (name, sought) in parts.iter() {
        let flag = flags[name];
        match sought {
            Sought::At(_) => {}
            Sought::Missing => missing.push(name.to_string()),
            Sought::Several(paths) => {
                faults.push(format!("{} files could be the {name}: {}", paths.len(), list(paths)));
                pick.push(flag);
            }
            Sought::Unusable(path, why, others) => {
                let usable = if others.is_empty() { String::new() } else { format!(" (usable is {})", list(others)) };
                faults.push(format!("the {name} cannot be used: {}: {why}{usable}", inside(path)));
                if others.is_empty() { &mut replace } else { &mut pick }.push(flag);
            }
        }
    }
    if !missing.is_empty() {
        faults.push(format!("there is no {}", missing.join(" and no ")));
    }
    let hint = match (pick.is_empty(), replace.is_empty()) {
        (false, _) => format!("pick one with {}", pick.join(" and one with ")),
        (true, false) => format!("put a complete file there, or give another with {}", replace.join(" and ")),
        (true, true) => expected.into(),
    };
    (!faults.is_empty()).then(|| (faults.join("; "), hint))
}

/// The only safetensors file of a folder whose name begins with one of the stems.
pub(super) fn single_file(folder: &Path, stems: &[&str]) -> Sought {
    let named = |name: &str| {
        let name = name.to_ascii_lowercase();
        let fits = |rest: &str| rest.ends_with(".safetensors") && !rest.starts_with(|c: char| c.is_ascii_alphabetic());
        stems.iter().any(|stem| name.strip_prefix(stem).is_some_and(fits))
    };
    look(folder, named, |mut good, bad| match bad {
        Some((path, why)) => Sought::Unusable(path, why, good),
        None if good.len() == 1 => Sought::At(good.remove(0)),
        None => Sought::Several(good),
    })
}

/// A folder that holds the weights of one part. An index alone counts, too: whoever opens it says which shards are missing, and
/// which of its files is meant.
pub(super) fn folder_of_weights(folder: &Path) -> Sought {
    let named = |name: &str| name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    look(folder, named, |_, _| Sought::At(folder.into()))
}

/// Something with a part's name, and why it cannot be used.
type Fault = (PathBuf, String);

/// What `usable` makes of the usable files of these names, of which there is at least one, and of the first that is not; else why
/// there is none.
fn look(folder: &Path, named: impl Fn(&str) -> bool, usable: impl FnOnce(Vec<PathBuf>, Option<Fault>) -> Sought) -> Sought {
    let unusable = |error: std::io::Error| {
        Sought::Unusable(folder.into(), files::absence(folder).unwrap_or_else(|| error.to_string()), Vec::new())
    };
    let entries: Vec<fs::DirEntry> = match fs::read_dir(folder).and_then(Iterator::collect) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound && !files::is_there(folder) => return Sought::Missing,
        Err(error) => return unusable(error),
    };
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for entry in entries {
        // Names that are not Unicode are none of ours.
        if entry.file_name().to_str().is_some_and(&named) {
            match fault(&entry.path()) {
                None => good.push(entry.path()),
                Some(why) => bad.push((entry.path(), why)),
            }
        }
    }
    good.sort();
    bad.sort();
    match bad.into_iter().next() {
        first if !good.is_empty() => usable(good, first),
        Some((path, why)) => Sought::Unusable(path, why, good),
        None => Sought::Missing,
    }
}

/// Why something in a folder is no file to read.
fn fault(path: &Path) -> Option<String> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_file() => None,
        Ok(meta) if meta.is_dir() => Some(files::FOLDER.into()),
        Ok(_) => Some(files::IRREGULAR.into()),
        Err(error) => Some(files::absence(path).unwrap_or_else(|| error.to_string())),
    }
}
