//! Locates an adapter's file: a file, a folder's only file, or a file of a repository in the Hugging Face cache.

use super::cache::{self, Environment};
use super::parts::{Sought, only_file};
use crate::error::{Error, Remedy, Result};
use crate::files;
use std::path::{Component, Path, PathBuf};

/// The file for a name: the file of that path, the only safetensors file in that folder, or `owner/name` or
/// `owner/name/file` in the Hugging Face cache.
pub fn locate_adapter(name: &Path, environment: &Environment) -> Result<PathBuf> {
    if name.is_dir() {
        return in_folder(name, name);
    }
    // A dangling link or an inaccessible path is not a repository id.
    if files::is_there(name) {
        return match files::absence(name) {
            None => Ok(name.into()),
            Some(why) => Err(none(name, why, None)),
        };
    }
    let Some((id, inside)) = repository(name) else {
        let hint = "name a safetensors file, a folder with one, or a repository in the Hugging Face cache as owner/name";
        return Err(none(name, "the file does not exist", Some(hint.into())));
    };
    let download = || Some(Remedy::Advice(format!("download it first, for example with `hf download {id}`, or name a file")));
    let snapshot = cache::snapshot(environment, &id).map_err(|missing| none(name, missing.what(), download()))?;
    let Some(inside) = inside else { return in_folder(name, &snapshot) };
    let file = snapshot.join(&inside);
    match files::absence(&file) {
        None if file.is_dir() => in_folder(name, &file),
        None => Ok(file),
        Some(why) => {
            let file = inside.display();
            let hint = format!("`hf download {id} {file}` completes it, or name another file of it");
            Err(none(name, format!("{id} is in the Hugging Face cache, but not its {file}: {why}"), Some(hint.into())))
        }
    }
}

/// The repository id, and the file in it, if the name has that form.
fn repository(name: &Path) -> Option<(String, Option<PathBuf>)> {
    let parts: Vec<&str> = name
        .components()
        .map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        })
        .collect::<Option<_>>()?;
    let [owner, repository, inside @ ..] = &parts[..] else { return None };
    let id = format!("{owner}/{repository}");
    // `owner/x.safetensors` is most likely the path of a missing file. Within a repository a name has three components or more.
    let is_file = |name: &str| name.to_ascii_lowercase().ends_with(".safetensors");
    let known = cache::is_repository_id(&id) && !is_file(repository);
    known.then(|| (id, (!inside.is_empty()).then(|| inside.iter().collect())))
}

/// The only safetensors file of a folder. Errors show `name`.
fn in_folder(name: &Path, folder: &Path) -> Result<PathBuf> {
    let inside = |path: &Path| path.strip_prefix(folder).unwrap_or(path).display().to_string();
    match only_file(folder) {
        Sought::At(file) => Ok(file),
        Sought::Missing => Err(none(name, "the folder has no safetensors file", None)),
        Sought::Several(files) => {
            let list: Vec<String> = files.iter().map(|file| inside(file)).collect();
            let hint = format!("name one of them, as in {}", name.join(&list[0]).display());
            Err(none(name, format!("the folder has {} safetensors files: {}", list.len(), list.join(", ")), Some(hint.into())))
        }
        Sought::Unusable(path, why, _) => Err(none(name, format!("{}: {why}", inside(&path)), None)),
    }
}

fn none(path: &Path, what: impl Into<String>, hint: Option<Remedy>) -> Error {
    Error::NoAdapter { path: path.into(), what: what.into(), hint }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn names_of_repositories_are_recognized() {
        let of = |name: &str| repository(Path::new(name)).map(|(id, file)| (id, file.map(|file| file.display().to_string())));
        let some = |id: &str, file: Option<&str>| Some((id.to_owned(), file.map(String::from)));
        assert_eq!(of("owner/name"), some("owner/name", None));
        assert_eq!(of("owner/name/style.safetensors"), some("owner/name", Some("style.safetensors")));
        assert_eq!(of("owner/name/a/b.safetensors"), some("owner/name", Some("a/b.safetensors")));
        for path in
            ["style.safetensors", "loras/style.safetensors", "/a/b", "./a/b", "../a/b", "a/../b", "a/.b", "a b/c", "a", ""]
        {
            assert_eq!(of(path), None, "{path}");
        }
    }

    #[test]
    fn files_are_found_by_path_folder_and_repository() {
        let folder = std::env::temp_dir().join(format!("kiln-locate-adapter-{}", std::process::id()));
        let hub = folder.join("hub");
        let snapshot = hub.join("models--me--styles/snapshots/abc");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(folder.join("empty")).unwrap();
        fs::write(snapshot.join("a.safetensors"), b"").unwrap();
        let environment = Environment { hf_hub_cache: Some(hub), ..Environment::default() };
        let find = |name: &str| locate_adapter(Path::new(name), &environment);
        let at = |path: &str| locate_adapter(&folder.join(path), &environment);
        assert_eq!(find("me/styles").unwrap(), snapshot.join("a.safetensors"));
        assert_eq!(find("me/styles/a.safetensors").unwrap(), snapshot.join("a.safetensors"));
        assert_eq!(locate_adapter(&snapshot, &environment).unwrap(), snapshot.join("a.safetensors"));
        assert_eq!(locate_adapter(&snapshot.join("a.safetensors"), &environment).unwrap(), snapshot.join("a.safetensors"));
        let said = |found: Result<PathBuf>| {
            let error = found.unwrap_err();
            assert_eq!(error.exit_code(), 3);
            format!("{error}; {}", error.hint().unwrap_or_default())
        };
        assert!(said(find("me/none")).contains("neither a folder nor in the Hugging Face cache"));
        assert!(said(find("me/none")).contains("`hf download me/none`"));
        assert!(said(find("me/styles/b.safetensors")).contains("but not its b.safetensors: it does not exist"));
        assert!(said(find("none.safetensors")).contains("the file does not exist"));
        assert!(said(at("empty")).contains("no safetensors file"));
        fs::write(snapshot.join("b.SafeTensors"), b"").unwrap();
        fs::write(snapshot.join("adapter_config.json"), b"{}").unwrap();
        assert!(
            said(find("me/styles"))
                .contains("2 safetensors files: a.safetensors, b.SafeTensors; name one of them, as in me/styles/a")
        );
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", folder.join("empty/c.safetensors")).unwrap();
            assert!(said(at("empty")).contains("c.safetensors: it is a link to something that is not there"));
            assert!(said(at("empty/c.safetensors")).contains("it is a link to something that is not there"));
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
