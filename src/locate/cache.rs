//! The layout of the Hugging Face cache: `models--org--name/refs/main` names a revision, `snapshots/<revision>` holds its files.

use super::Embedded;
use crate::files;
use crate::text::shown;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Limit on the size of a reference; a revision is a hash of 40 characters.
const MAX_REFERENCE: u64 = 256;

/// The environment variables that name models, and the embedded model. Callers pass them as a value, so that a search depends
/// only on its arguments.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// `KILN_MODEL`: the model to use if none is named.
    pub kiln_model: Option<PathBuf>,
    /// `HF_HUB_CACHE`: the folder of the cache.
    pub hf_hub_cache: Option<PathBuf>,
    /// `HF_HOME`: the folder whose subfolder `hub` is the cache.
    pub hf_home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`: the folder of the user's caches.
    pub xdg_cache_home: Option<PathBuf>,
    /// `HOME`: the user's home folder.
    pub home: Option<PathBuf>,
    /// The embedded model.
    pub built_in: Option<Embedded>,
}

impl Environment {
    /// The environment of this process, with an embedded model.
    pub fn of_process(built_in: Option<Embedded>) -> Self {
        // An empty variable counts as unset.
        let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            kiln_model: path("KILN_MODEL"),
            hf_hub_cache: path("HF_HUB_CACHE"),
            hf_home: path("HF_HOME"),
            xdg_cache_home: path("XDG_CACHE_HOME"),
            home: path("HOME"),
            built_in,
        }
    }

    /// The folder of the user's caches.
    pub fn caches(&self) -> Option<PathBuf> {
        self.xdg_cache_home.clone().or_else(|| self.home.as_ref().map(|home| home.join(".cache")))
    }

    /// The folder of the cache.
    fn hub(&self) -> Option<PathBuf> {
        self.hf_hub_cache
            .clone()
            .or_else(|| self.hf_home.as_ref().map(|home| home.join("hub")))
            .or_else(|| self.caches().map(|caches| caches.join("huggingface").join("hub")))
    }

    /// Whether the cache would be in a home folder that does not exist or is not accessible, as is common for services.
    fn home_is_inaccessible(&self) -> bool {
        let named = [&self.hf_hub_cache, &self.hf_home, &self.xdg_cache_home].iter().any(|folder| folder.is_some());
        !named && self.home.as_deref().is_some_and(|home| obstacle(home).is_some())
    }
}

/// True for `org/name`.
pub(super) fn is_repository_id(text: &str) -> bool {
    let plain = |name: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        !name.is_empty() && name.len() <= 96 && !name.starts_with(['.', '-']) && name.chars().all(allowed)
    };
    text.split_once('/').is_some_and(|(org, name)| plain(org) && plain(name))
}

/// The message for a cache that exists but is not accessible.
pub(super) const NO_CACHE: &str = "the Hugging Face cache cannot be used";

/// Why a repository has no usable snapshot.
pub(super) enum NoSnapshot {
    /// The repository is not in the cache.
    Absent(String),
    /// The repository is in the cache, but it cannot be used for this reason.
    Begun(String),
    /// The cache itself is not accessible.
    NoCache(PathBuf, String),
}

impl NoSnapshot {
    /// The reason as text.
    pub fn what(self) -> String {
        match self {
            Self::Absent(what) | Self::Begun(what) => what,
            Self::NoCache(folder, why) => format!("{NO_CACHE} ({}): {why}", folder.display()),
        }
    }
}

/// Why the content of a folder is not accessible, or `None` if it is.
fn obstacle(folder: &Path) -> Option<String> {
    let error = folder.join(".").metadata().err()?;
    Some(files::absence(folder).unwrap_or_else(|| error.to_string()))
}

/// The entries of a folder; none if it does not exist.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, NoSnapshot> {
    let read = || std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<PathBuf>>>();
    match read() {
        Ok(paths) => Ok(paths),
        Err(_) if !files::is_there(folder) => Ok(Vec::new()),
        Err(error) => {
            let why = files::absence(folder).unwrap_or_else(|| error.to_string());
            Err(NoSnapshot::Begun(format!("a folder cannot be read ({}): {why}", folder.display())))
        }
    }
}

/// The folder of a repository's current revision.
pub(super) fn snapshot(environment: &Environment, id: &str) -> Result<PathBuf, NoSnapshot> {
    let none = || NoSnapshot::Absent("it is not a folder, and there is no Hugging Face cache: HOME is not set".into());
    let hub = environment.hub().ok_or_else(none)?;
    let absent = || NoSnapshot::Absent(format!("neither a folder nor in the Hugging Face cache ({})", hub.display()));
    // An existing ancestor may be a link to a disk that is not mounted, which is an error. A cache that was never created is not
    // an error, and neither is a missing home folder.
    if environment.home_is_inaccessible() {
        return Err(absent());
    }
    let nearest = hub.ancestors().find(|folder| !folder.as_os_str().is_empty() && files::is_there(folder));
    if let Some((folder, why)) = nearest.and_then(|folder| Some((folder, obstacle(folder)?))) {
        return Err(NoSnapshot::NoCache(folder.into(), why));
    }
    let repository = hub.join(format!("models--{}", id.replace('/', "--")));
    if !files::is_there(&repository) {
        return Err(absent());
    }
    if let Some(why) = obstacle(&repository) {
        return Err(NoSnapshot::Begun(format!("its folder cannot be used ({}): {why}", repository.display())));
    }
    let (snapshots, references) = (repository.join("snapshots"), repository.join("refs"));
    let mut revisions = entries(&snapshots)?;
    revisions.retain(|revision| !revision.is_file());
    // Requesting a file that a repository does not have also leaves a folder and a reference. Only a download leaves blobs.
    if revisions.is_empty() {
        let what = format!("the Hugging Face cache has no files of it ({})", repository.display());
        let begun = !entries(&repository.join("blobs"))?.is_empty();
        return Err(if begun { NoSnapshot::Begun(what) } else { NoSnapshot::Absent(what) });
    }
    let reference = references.join("main");
    let damaged = |how: &str| NoSnapshot::Begun(format!("the Hugging Face cache has a reference that {how}"));
    if let Some(why) = obstacle(&references).filter(|_| files::is_there(&references)) {
        return Err(damaged(&format!("cannot be read ({}): {why}", references.display())));
    }
    match files::read(&reference, MAX_REFERENCE) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let revision = text.trim();
            // A revision is a hash; anything else could be a path that leads out of the folder.
            if revision.is_empty() || !revision.bytes().all(|b| b.is_ascii_alphanumeric()) {
                return Err(damaged(&format!("names no revision ({}): `{}`", reference.display(), shown(revision))));
            }
            let folder = snapshots.join(revision);
            match obstacle(&folder) {
                None => Ok(folder),
                Some(why) => {
                    Err(damaged(&format!("names a revision without files ({}): `{revision}`: {why}", reference.display())))
                }
            }
        }
        // Without a reference, a single revision is unambiguous.
        Err(error) if error.kind() == ErrorKind::NotFound && !files::is_there(&reference) => match &revisions[..] {
            [only] => match obstacle(only) {
                None => Ok(only.clone()),
                Some(why) => Err(NoSnapshot::Begun(format!("a revision cannot be used ({}): {why}", only.display()))),
            },
            _ => Err(NoSnapshot::Begun(format!("the Hugging Face cache has several revisions ({})", snapshots.display()))),
        },
        Err(error) => Err(damaged(&format!("cannot be read ({}): {error}", reference.display()))),
    }
}
