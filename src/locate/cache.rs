//! The layout of the Hugging Face cache: `models--org--name/refs/main` names a revision, `snapshots/<revision>` holds its files.

use super::Embedded;
use crate::files;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Longest reference read; a revision is a hash of 40 characters.
const MAX_REFERENCE: u64 = 256;

/// What the process knows about models: its variables, and one it may carry. Kept apart from it, so that a search depends on its
/// arguments alone.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// `KILN_MODEL`: the model to use where none is named.
    pub kiln_model: Option<PathBuf>,
    /// `HF_HUB_CACHE`: the cache itself.
    pub hf_hub_cache: Option<PathBuf>,
    /// `HF_HOME`: the folder that holds the cache as `hub`.
    pub hf_home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`: the user's caches.
    pub xdg_cache_home: Option<PathBuf>,
    /// `HOME`: the user's folder.
    pub home: Option<PathBuf>,
    /// The model that is part of the program.
    pub built_in: Option<Embedded>,
}

impl Environment {
    /// That of this process, and the model it carries.
    pub fn of_process(built_in: Option<Embedded>) -> Self {
        // An empty variable is as good as none.
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

    /// The cache's folder.
    fn hub(&self) -> Option<PathBuf> {
        let in_caches = |caches: &Path| caches.join("huggingface").join("hub");
        self.hf_hub_cache
            .clone()
            .or_else(|| self.hf_home.as_ref().map(|home| home.join("hub")))
            .or_else(|| self.xdg_cache_home.as_deref().map(in_caches))
            .or_else(|| self.home.as_ref().map(|home| in_caches(&home.join(".cache"))))
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

/// Why a repository has no folder of files.
pub(super) struct NoSnapshot {
    /// Something of it is in the cache.
    pub begun: bool,
    /// What is wrong.
    pub what: String,
}

/// The folder of a repository's current revision, or what is wrong.
pub(super) fn snapshot(environment: &Environment, id: &str) -> Result<PathBuf, NoSnapshot> {
    let absent = |what: String| NoSnapshot { begun: false, what };
    let begun = |what: String| NoSnapshot { begun: true, what };
    let hub = environment.hub();
    let hub = hub.ok_or_else(|| absent("it is not a folder, and there is no Hugging Face cache: HOME is not set".into()))?;
    let repository = hub.join(format!("models--{}", id.replace('/', "--")));
    if !repository.is_dir() {
        return Err(absent(format!("neither a folder nor in the Hugging Face cache ({})", hub.display())));
    }
    let (snapshots, reference) = (repository.join("snapshots"), repository.join("refs").join("main"));
    match files::read(&reference, MAX_REFERENCE) {
        Ok(bytes) => {
            let revision = String::from_utf8(bytes).unwrap_or_default();
            let revision = revision.trim();
            // A revision is a hash; anything else must not lead out of the folder.
            let plain = !revision.is_empty() && revision.bytes().all(|b| b.is_ascii_alphanumeric());
            let folder = snapshots.join(revision);
            if plain && folder.is_dir() {
                return Ok(folder);
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound && !files::is_there(&reference) => {}
        Err(error) => {
            return Err(begun(format!(
                "the Hugging Face cache has a reference that cannot be read ({}): {error}",
                reference.display()
            )));
        }
    }
    let entries = std::fs::read_dir(&snapshots).into_iter().flatten().flatten();
    let mut folders = entries.map(|entry| entry.path()).filter(|path| path.is_dir());
    match (folders.next(), folders.next()) {
        (Some(only), None) => Ok(only),
        // Asking for a file that a repository does not have leaves a folder, too. Only a download has files in it.
        (None, _) => Err(NoSnapshot {
            begun: std::fs::read_dir(repository.join("blobs")).is_ok_and(|mut blobs| blobs.next().is_some()),
            what: format!("the Hugging Face cache has no files of it ({})", repository.display()),
        }),
        (Some(_), Some(_)) => Err(begun(format!("the Hugging Face cache has several revisions ({})", snapshots.display()))),
    }
}
