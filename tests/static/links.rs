//! Links of the documents: a relative path leads to a file, an anchor to a heading.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// The Markdown files of the project, by their path below its root.
pub fn pages() -> BTreeMap<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in [".github", "bench", "docs", "models", "tools", "tests"] {
        super::sources(&root.join(folder), &["md"], &mut files);
    }
    files
        .extend(std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "md")));
    let read = |path: PathBuf| (path.strip_prefix(root).unwrap().to_owned(), std::fs::read_to_string(&path).unwrap());
    files.into_iter().map(read).collect()
}

/// The lines of a page that are not code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        fenced ^= line.starts_with("```");
        !fenced && !line.starts_with("    ")
    })
}

/// The anchors that GitHub gives to the headings of a page.
fn anchors(text: &str) -> Vec<String> {
    let mut found = Vec::<String>::new();
    for heading in prose(text).filter(|line| line.starts_with('#')) {
        let kept = |c: char| c.is_alphanumeric() || [' ', '-', '_'].contains(&c);
        let title: String = heading.trim_start_matches('#').trim().to_lowercase().chars().filter(|&c| kept(c)).collect();
        let anchor = title.replace(' ', "-");
        let again = found.iter().filter(|other| **other == anchor).count();
        found.push(if again == 0 { anchor } else { format!("{anchor}-{again}") });
    }
    found
}

/// The targets of a page's links and images.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(text) {
        // What is between backticks is code.
        let line: String = line.split('`').step_by(2).collect();
        found.extend(line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())));
        found.extend(line.split("src=\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
    }
    found.retain(|target| !target.contains("://") && !target.starts_with("mailto:"));
    found
}

/// A path without `.` and `..`, as a link's target below the root.
fn resolved(page: &Path, target: &str) -> PathBuf {
    let mut path = page.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => assert!(path.pop(), "{} links above the project: {target}", page.display()),
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path
}

/// What is wrong with the links of some pages; `exists` tells whether the project has a file or folder.
fn broken(pages: &BTreeMap<PathBuf, String>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for (page, text) in pages {
        for target in links(text) {
            let (file, anchor) = target.split_once('#').map_or((target.as_str(), None), |(file, anchor)| (file, Some(anchor)));
            let path = if file.is_empty() { page.clone() } else { resolved(page, file) };
            let heading =
                anchor.is_none_or(|anchor| pages.get(&path).is_some_and(|text| anchors(text).iter().any(|a| a == anchor)));
            if !exists(&path) || !heading {
                wrong.push(format!("{}: {target}", page.display()));
            }
        }
    }
    wrong
}

#[test]
fn links_lead_somewhere() {
    let (root, pages) = (Path::new(env!("CARGO_MANIFEST_DIR")), pages());
    assert!(pages.len() > 20, "only {} pages were looked at", pages.len());
    let wrong = broken(&pages, |path| root.join(path).exists());
    assert!(wrong.is_empty(), "links that lead nowhere:\n{}", wrong.join("\n"));
}

#[test]
fn broken_links_are_found() {
    let page = "# A\n\n## What `this` is, now\n[a](#what-this-is-now) [b](#gone) [c](b.md#a) [d](b.md#x) `[e](f)` [g](../h.md)\n";
    let pages =
        BTreeMap::from([("d/a.md".into(), page.to_owned()), ("d/b.md".into(), "# A\n# A\n[1](#a-1) [2](#a-2)".to_owned())]);
    let wrong = broken(&pages, |path| pages.contains_key(path));
    assert_eq!(wrong, ["d/a.md: #gone", "d/a.md: b.md#x", "d/a.md: ../h.md", "d/b.md: #a-2"]);
}
