//! The names of image files.

use super::stdout::DASH;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The maximum length, in bytes, of the part of a name that comes from the prompt.
const SLUG: usize = 48;

/// Where the images of one run go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// One image, on standard output.
    Stdout,
    /// One image, at a given path.
    One(PathBuf),
    /// Several images: `out.png` stands for `out-1.png`, `out-2.png` and so on.
    Numbered(PathBuf),
    /// Images named after the prompt, in the current folder; the seed in the name distinguishes them.
    Prompt {
        /// The words of the prompt.
        slug: String,
        /// The file name extension.
        extension: &'static str,
    },
}

impl Target {
    /// The target for `count` images of a prompt; `given` is the path of `--output`, where `-` is standard output. Without one,
    /// names end with `extension`.
    pub fn new(given: Option<PathBuf>, prompt: &str, count: usize, extension: &'static str) -> Self {
        match given {
            Some(path) if path == Path::new(DASH) => Self::Stdout,
            Some(path) if count > 1 => Self::Numbered(path),
            Some(path) => Self::One(path),
            None => Self::Prompt { slug: slug(prompt), extension },
        }
    }

    /// The path of image `index`, counted from 0, or `None` for standard output. An image with noise from a file has no seed.
    pub fn path(&self, index: usize, seed: Option<u64>) -> Option<PathBuf> {
        match self {
            Self::Stdout => None,
            Self::One(path) => Some(path.clone()),
            Self::Numbered(path) => Some(numbered(path, index + 1)),
            Self::Prompt { slug, extension } => {
                let id = seed.map_or("noise".into(), |seed| seed.to_string());
                Some(format!("{}-{id}.{extension}", stem(slug)).into())
            }
        }
    }
}

/// A file name from the prompt's words and a unique `id`.
pub fn content_name(prompt: &str, id: &str, extension: &str) -> PathBuf {
    format!("{}-{id}.{extension}", stem(&slug(prompt))).into()
}

/// The words of a prompt, or `kiln` if there are none.
fn stem(slug: &str) -> &str {
    if slug.is_empty() { "kiln" } else { slug }
}

/// Puts a number before the extension.
fn numbered(path: &Path, number: usize) -> PathBuf {
    let is_folder = path.as_os_str().as_encoded_bytes().last().is_some_and(|&byte| std::path::is_separator(byte.into()));
    let Some(stem) = path.file_stem().filter(|_| !is_folder) else {
        // The path does not name a file. It is returned unchanged, and the check of outputs refuses it.
        return path.into();
    };
    let mut name = OsString::from(stem);
    name.push(format!("-{number}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Joins the ASCII words of a prompt, as many as fit into [`SLUG`] bytes.
fn slug(prompt: &str) -> String {
    let mut slug = String::new();
    for word in prompt.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()) {
        if slug.is_empty() {
            // A first word that is too long by itself is cut. It is ASCII, so any byte is a character boundary.
            slug.push_str(&word[..word.len().min(SLUG)]);
        } else if slug.len() + 1 + word.len() <= SLUG {
            slug.push('-');
            slug.push_str(word);
        } else {
            break;
        }
    }
    slug.make_ascii_lowercase();
    slug
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_prompts() {
        let long = "w".repeat(60);
        for (prompt, name) in [
            ("a red fox in the snow", "a-red-fox-in-the-snow-7.png"),
            ("  A *Red* fox, 2024! ", "a-red-fox-2024-7.png"),
            ("../../etc/passwd", "etc-passwd-7.png"),
            ("café au lait", "caf-au-lait-7.png"),
            ("", "kiln-7.png"),
            ("狐 🦊", "kiln-7.png"),
            (&long, &format!("{}-7.png", &long[..48])),
            // 48 characters fit exactly; one word more does not.
            (&format!("{} bc", "a".repeat(45)), &format!("{}-bc-7.png", "a".repeat(45))),
            (&format!("{} bcd e", "a".repeat(45)), &format!("{}-7.png", "a".repeat(45))),
        ] {
            assert_eq!(Target::new(None, prompt, 1, "png").path(0, Some(7)).unwrap(), Path::new(name), "{prompt}");
        }
        assert_eq!(Target::new(None, "fox", 2, "png").path(1, Some(8)).unwrap(), Path::new("fox-8.png"));
        assert_eq!(Target::new(None, "fox", 1, "png").path(0, None).unwrap(), Path::new("fox-noise.png"));
        assert_eq!(Target::new(None, "fox", 1, "jpg").path(0, Some(8)).unwrap(), Path::new("fox-8.jpg"));
        assert_eq!(Target::new(Some("-".into()), "fox", 1, "png").path(0, Some(8)), None);
    }

    #[test]
    fn numbers_come_before_the_extension() {
        for (given, name) in [
            ("out.png", "out-2.png"),
            ("a.b/out", "a.b/out-2"),
            ("/x/out.v1.PNG", "/x/out.v1-2.PNG"),
            (".png", ".png-2"),
            ("..", ".."),
            ("folder/", "folder/"),
        ] {
            assert_eq!(Target::new(Some(given.into()), "p", 2, "png").path(1, Some(7)).unwrap(), Path::new(name), "{given}");
            assert_eq!(Target::new(Some(given.into()), "p", 1, "png").path(0, Some(7)).unwrap(), Path::new(given));
        }
    }

    #[cfg(unix)]
    #[test]
    fn names_need_not_be_unicode() {
        use std::os::unix::ffi::OsStringExt;
        let name = |bytes: &[u8]| PathBuf::from(OsString::from_vec(bytes.to_vec()));
        assert_eq!(Target::new(Some(name(b"\xff.png")), "p", 3, "png").path(2, Some(7)).unwrap(), name(b"\xff-3.png"));
    }
}
