//! Finds the weights of one part in a folder: a file or a folder of shards, or the reason why there are none. An entry that
//! only looks like a file is reported with the reason: a link whose target was never downloaded, a pipe, or a folder with a
//! file's name. If several files match, kiln does not guess.

use crate::component::PerComponent;
use crate::error::Remedy;
use crate::files;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The result of the search for a part.
#[derive(Clone, Debug, Default)]
pub(super) enum Sought {
    /// Nothing was found.
    #[default]
    Missing,
    /// A file, or a folder of shards.
    At(PathBuf),
    /// Several files match equally well.
    Several(Vec<PathBuf>),
    /// A matching entry that cannot be used, the reason, and usable alternatives.
    Unusable(PathBuf, String, Vec<PathBuf>),
}

impl Sought {
    /// The path, if the part was found.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            Self::At(path) => Some(path.clone()),
            _ => None,
        }
    }

    /// Continues the search if nothing was found. An unusable match may be the intended one, so it is not silently replaced.
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

/// Describes the parts that were not found, with the remedy. Paths are relative to `folder`.
pub(super) fn describe_faults(parts: &PerComponent<Sought>, folder: Option<&Path>) -> Option<(String, Remedy)> {
    let inside = |path: &Path| folder.and_then(|folder| path.strip_prefix(folder).ok()).unwrap_or(path).display().to_string();
    let (mut missing, mut faults, mut pick, mut replace) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let list = |paths: &[PathBuf]| paths.iter().map(|path| inside(path)).collect::<Vec<String>>().join(", ");
    for (part, sought) in parts.iter() {
        match sought {
            Sought::At(_) => {}
            Sought::Missing => missing.push(part.to_string()),
            Sought::Several(paths) => {
                faults.push(format!("{} files could be the {part}: {}", paths.len(), list(paths)));
                pick.push(part);
            }
            Sought::Unusable(path, why, others) => {
                let usable = if others.is_empty() { String::new() } else { format!(" (usable is {})", list(others)) };
                faults.push(format!("the {part} cannot be used: {}: {why}{usable}", inside(path)));
                if others.is_empty() { &mut replace } else { &mut pick }.push(part);
            }
        }
    }
    if !missing.is_empty() {
        faults.push(format!("there is no {}", missing.join(" and no ")));
    }
    let hint = match (pick.is_empty(), replace.is_empty()) {
        (false, _) => Remedy::PickParts(pick),
        (true, false) => Remedy::ReplaceParts(replace),
        (true, true) => Remedy::CompleteFolder,
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
    search_folder(folder, named, only_one)
}

/// The only safetensors file of a folder.
pub(super) fn only_file(folder: &Path) -> Sought {
    search_folder(folder, |name| name.to_ascii_lowercase().ends_with(".safetensors"), only_one)
}

/// The only one of the usable files, if none was unusable.
fn only_one(mut good: Vec<PathBuf>, bad: Option<Fault>) -> Sought {
    match bad {
        Some((path, why)) => Sought::Unusable(path, why, good),
        None if good.len() == 1 => Sought::At(good.remove(0)),
        None => Sought::Several(good),
    }
}

/// A folder that holds the weights of one part. An index without shards counts too: opening it reports the missing shards.
pub(super) fn folder_of_weights(folder: &Path) -> Sought {
    let named = |name: &str| name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    search_folder(folder, named, |_, _| Sought::At(folder.into()))
}

/// An entry with the name of a part, and why it cannot be used.
type Fault = (PathBuf, String);

/// Searches a folder for matching names. If at least one file is usable, `usable` gets all usable files and the first unusable
/// entry, and gives the result. Otherwise the result says why there is no file.
fn search_folder(
    folder: &Path,
    named: impl Fn(&str) -> bool,
    usable: impl FnOnce(Vec<PathBuf>, Option<Fault>) -> Sought,
) -> Sought {
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
        // A name that is not Unicode cannot match.
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

/// Why an entry of a folder is not a readable file.
fn fault(path: &Path) -> Option<String> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_file() => None,
        Ok(meta) if meta.is_dir() => Some(files::FOLDER.into()),
        Ok(_) => Some(files::IRREGULAR.into()),
        Err(error) => Some(files::absence(path).unwrap_or_else(|| error.to_string())),
    }
}
