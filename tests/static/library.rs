//! Compares the library's public items with the list in `docs/library.md`. The test reads the source as rustfmt writes it: an item
//! begins at the margin with `pub`, and its methods are indented by four spaces.

use super::library;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The lines of `docs/library.md` that enclose the list.
const BEGIN: &str = "<!-- public items -->\n";
const END: &str = "<!-- end of public items -->\n";

/// The names that a `use` tree such as `a::{B, c as D}` exports, each with its path.
fn names(tree: &str) -> Vec<(String, String)> {
    let (path, list) = match tree.split_once("::{") {
        Some((path, list)) => (path, list.trim_end_matches(['}', ','])),
        None => tree.rsplit_once("::").unwrap_or(("", tree)),
    };
    let name = |item: &str| {
        let (from, to) = item.split_once(" as ").unwrap_or((item, item));
        (format!("{path}::{from}"), to.to_owned())
    };
    list.split(',').map(str::trim).filter(|item| !item.is_empty()).map(name).collect()
}

/// The item that a line defines: its kind and its name.
fn item(line: &str) -> Option<(&str, &str)> {
    let mut words = line.strip_prefix("pub ")?.split([' ', '(', '<', ':', '{', ';']).skip_while(|word| {
        // `const` is a kind unless a function follows.
        ["unsafe", "async"].contains(word) || *word == "const" && line.contains("const fn ")
    });
    Some((words.next()?, words.next()?))
}

/// The library's source: the text of every file, by module path. It includes the crate of number formats, which modules of the same
/// names re-export.
struct Source(BTreeMap<String, String>);

impl Source {
    fn new() -> Self {
        let mut files = BTreeMap::<String, String>::new();
        for (path, text) in library() {
            let path = path.strip_prefix("numerics/").filter(|path| *path != "lib.rs").unwrap_or(&path);
            let module = path.trim_end_matches(".rs").replace('/', "::");
            files.entry(module).or_default().push_str(&text);
        }
        Self(files)
    }

    /// The methods of a type or trait, defined in a module or in one below it.
    fn methods(&self, module: &str, name: &str) -> BTreeSet<String> {
        let root = module.split("::").next().unwrap_or(module);
        let files = self.0.iter().filter(|(path, _)| path.split("::").next() == Some(root));
        let is_block = |line: &str| {
            let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            let of_type = line.starts_with("impl") && !line.contains(" for ");
            (of_type || line.starts_with("pub trait ")) && line.ends_with('{') && words.any(|word| word == name)
        };
        let mut found = BTreeSet::new();
        for (_, text) in files {
            let mut inside = None;
            for line in text.lines() {
                match (inside, line) {
                    (None, line) if is_block(line) => inside = Some(line.starts_with("pub trait ")),
                    (Some(_), "}") => inside = None,
                    (Some(is_trait), line) => {
                        let line = line.strip_prefix("    ").unwrap_or_default();
                        let line = if is_trait && line.starts_with("fn ") { format!("pub {line}") } else { line.to_owned() };
                        found.extend(item(&line).filter(|(kind, _)| *kind == "fn").map(|(_, name)| name.to_owned()));
                    }
                    _ => {}
                }
            }
        }
        found
    }

    /// Adds the public items of a module and of its public modules to a list, by the path that callers use.
    fn list(&self, module: &str, text: &str, at: &str, list: &mut BTreeMap<String, BTreeMap<String, BTreeSet<String>>>) {
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        let (mut lines, mut hidden) = (text.lines(), false);
        while let Some(line) = lines.next() {
            // An attribute that hides an item may come before other attributes.
            let skip = hidden;
            hidden = line.contains("feature = \"internals\"") || hidden && line.starts_with("#[");
            let mut statement = line.to_owned();
            while statement.starts_with("pub use ") && !statement.ends_with(';') {
                statement.push_str(lines.next().unwrap_or(";").trim_start());
            }
            let block: Vec<&str> = match line.starts_with("pub mod ") && line.ends_with('{') {
                true => {
                    lines.by_ref().take_while(|line| *line != "}").map(|line| line.strip_prefix("    ").unwrap_or(line)).collect()
                }
                false => Vec::new(),
            };
            if skip || !line.starts_with("pub ") {
                continue;
            }
            let own = list.entry(at.to_owned()).or_default();
            if let Some(tree) = statement.strip_prefix("pub use ") {
                for (path, name) in names(tree.trim_end_matches(';')) {
                    let path = path.trim_start_matches("crate::");
                    let path = if path == tree || module.is_empty() { path.to_owned() } else { format!("{module}::{path}") };
                    own.insert(name.clone(), self.methods(&path, &name));
                }
            } else if let Some(("mod", name)) = item(line) {
                let (inner, below) = (format!("{module}::{name}"), format!("{at}::{name}"));
                let inner = inner.trim_start_matches("::");
                let text = if block.is_empty() { self.0[inner].clone() } else { block.join("\n") };
                self.list(if block.is_empty() { inner } else { "" }, &text, &below, list);
            } else if let Some((_, name)) = item(line) {
                own.insert(name.to_owned(), self.methods(module, name));
            }
        }
    }
}

/// The list in the document.
fn listed() -> String {
    let source = Source::new();
    let mut list = BTreeMap::new();
    source.list("", &source.0["lib"], "kiln", &mut list);
    let mut text = String::new();
    for (module, items) in list {
        text.push_str(&format!("\n`{module}`\n\n"));
        for (name, methods) in items {
            let methods: Vec<String> = methods.into_iter().map(|method| format!("`{method}`")).collect();
            let colon = if methods.is_empty() { "" } else { ": " };
            text.push_str(&format!("- `{name}`{colon}{}\n", methods.join(", ")));
        }
    }
    text.push('\n');
    text
}

#[test]
fn the_document_lists_every_public_item() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/library.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let ((head, rest), list) = (text.split_once(BEGIN).unwrap(), listed());
    let (found, tail) = rest.split_once(END).unwrap();
    if std::env::var_os("KILN_UPDATE_LIBRARY").is_some() {
        return std::fs::write(&path, format!("{head}{BEGIN}{list}{END}{tail}")).unwrap();
    }
    let [documented, public] = [found, &list].map(|text| text.lines().collect::<BTreeSet<_>>());
    let differences: Vec<_> = public.symmetric_difference(&documented).collect();
    assert!(found == list, "KILN_UPDATE_LIBRARY=1 writes the list of docs/library.md; these lines differ: {differences:#?}");
}

#[test]
fn items_are_found_however_they_are_written() {
    assert_eq!(item("pub const fn new(a: u8) -> Self {"), Some(("fn", "new")));
    assert_eq!(item("pub const LIMIT: usize = 1;"), Some(("const", "LIMIT")));
    assert_eq!(item("pub struct Cuda<T> {"), Some(("struct", "Cuda")));
    assert_eq!(item("pub(crate) struct Hidden;"), None);
    let found: Vec<_> = names("a::{B, c as D,}").into_iter().map(|(path, name)| format!("{path}={name}")).collect();
    assert_eq!(found, ["a::B=B", "a::c=D"]);
    assert_eq!(names("a::b::C"), [("a::b::C".to_owned(), "C".to_owned())]);
}

#[test]
fn only_tests_and_benchmarks_go_through_the_door() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    ["src/bin", "examples", "program"].iter().for_each(|folder| super::sources(&root.join(folder), &["rs", "toml"], &mut files));
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let through = super::code(&text).find(|(_, line)| line.contains("internals"));
        assert!(through.is_none(), "{} looks inside the library: {through:?}", path.display());
    }
}
