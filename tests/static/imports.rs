//! Which file uses which, as far as the tokens of the source tell: `use` trees, inline paths, `super::` and `self::`, child
//! modules, and names that a module hands on. Macros are not expanded, and glob imports are not followed.

use std::collections::{BTreeMap, BTreeSet};

/// The crate's modules and what they import.
pub struct Crate {
    files: Vec<Parsed>,
    /// The file of each module, by its path from the crate's root.
    modules: BTreeMap<Vec<String>, usize>,
}

struct Parsed {
    path: String,
    module: Vec<String>,
    tokens: Vec<String>,
    /// Absolute paths of everything that is named, each with the name that a `use` gives it here.
    paths: Vec<(Vec<String>, Option<String>)>,
}

impl Crate {
    /// Reads files, given by their path below `src` and their text.
    pub fn new(sources: &[(String, String)]) -> Self {
        let mut files: Vec<Parsed> = sources
            .iter()
            .map(|(path, text)| {
                let tokens = without_tests(tokens(text));
                Parsed { path: path.clone(), module: module_of(path), tokens, paths: Vec::new() }
            })
            .collect();
        // The program's own root shares its path with the library's, and nothing uses what is in it.
        let libraries = files.iter().enumerate().filter(|(_, file)| file.path != "main.rs");
        let modules: BTreeMap<_, _> = libraries.map(|(i, file)| (file.module.clone(), i)).collect();
        for file in &mut files {
            file.paths = absolute_paths(&file.tokens, &file.module, &modules);
        }
        Self { files, modules }
    }

    /// Whether a file has a token such as `unsafe` outside of comments, texts and tests.
    pub fn with_token(&self, token: &str) -> Vec<&str> {
        self.files.iter().filter(|file| file.tokens.iter().any(|t| t == token)).map(|file| file.path.as_str()).collect()
    }

    /// Every file with the paths of all it names, from the crate's root.
    pub fn named(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.files.iter().flat_map(|file| file.paths.iter().map(|(path, _)| (file.path.as_str(), path.as_slice())))
    }

    /// Pairs of files of which the first uses something that the second defines.
    pub fn uses(&self) -> BTreeSet<(&str, &str)> {
        let mut found = BTreeSet::new();
        for (user, file) in self.files.iter().enumerate() {
            for (path, _) in &file.paths {
                if let Some(used) = self.definition(path, 0).filter(|used| *used != user) {
                    found.insert((file.path.as_str(), self.files[used].path.as_str()));
                }
            }
        }
        found
    }

    /// The file that defines what a path names. A module that hands a name on is passed through.
    fn definition(&self, path: &[String], depth: usize) -> Option<usize> {
        let length = (0..=path.len()).rev().find(|&n| self.modules.contains_key(&path[..n]))?;
        let file = self.modules[&path[..length]];
        let Some(name) = path.get(length) else { return Some(file) };
        let handed_on = self.files[file].paths.iter().find(|(_, alias)| alias.as_ref() == Some(name));
        match handed_on {
            Some((target, _)) if depth < 8 => {
                let target = [target, &path[length + 1..]].concat();
                // What is not found in the crate comes from a library; it is defined nowhere here.
                self.definition(&target, depth + 1)
            }
            _ if length == 0 => None,
            _ => Some(file),
        }
    }

    /// Circles of files: each is a list of files of which every one is reached from every other.
    ///
    /// A child that uses what its parent module itself defines does not count: the two are read together.
    pub fn circles(&self) -> Vec<Vec<&str>> {
        let is_parent = |child: &str, parent: &str| {
            let (child, parent) = (module_of(child), module_of(parent));
            child.len() > parent.len() && child.starts_with(&parent)
        };
        let mut next: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (user, used) in self.uses() {
            if !is_parent(user, used) {
                next.entry(user).or_default().push(used);
            }
        }
        let reached = |from: &str| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
            while let Some(file) = open.pop() {
                for &used in next.get(file).into_iter().flatten() {
                    if seen.insert(used) {
                        open.push(used);
                    }
                }
            }
            seen
        };
        let reach: BTreeMap<&str, BTreeSet<&str>> = next.keys().map(|&file| (file, reached(file))).collect();
        let mut circles: Vec<Vec<&str>> = Vec::new();
        for (&file, from_here) in &reach {
            if from_here.contains(file) && !circles.iter().any(|circle| circle.contains(&file)) {
                let there_and_back = |other: &&&str| reach.get(**other).is_some_and(|back| back.contains(file));
                circles.push(from_here.iter().filter(there_and_back).copied().collect());
            }
        }
        circles
    }
}

/// `a/b.rs` and `a/b/mod.rs` are the module `a::b`; the files at the root are `crate` itself.
fn module_of(path: &str) -> Vec<String> {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if ["lib", "main"].contains(&path) { Vec::new() } else { path.split('/').map(String::from).collect() }
}

/// Words and punctuation, without comments and texts. `::` is one token.
fn tokens(text: &str) -> Vec<String> {
    let mut rest = text;
    let mut found = Vec::new();
    while let Some(c) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = text_literal(rest) {
            length
        } else if c.is_alphanumeric() || c == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            found.push(rest[..length].to_owned());
            length
        } else if rest.starts_with("::") {
            found.push("::".into());
            2
        } else {
            if !c.is_whitespace() {
                found.push(c.into());
            }
            c.len_utf8()
        };
        rest = &rest[length..];
    }
    found
}

/// The length of the text or character that the source begins with, if it does.
fn text_literal(source: &str) -> Option<usize> {
    let body = source.strip_prefix('b').or(source.strip_prefix('c')).unwrap_or(source);
    let prefix = source.len() - body.len();
    if let Some(raw) = body.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let start = raw[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", "#".repeat(hashes));
        let length = start.find(&end).map_or(start.len(), |at| at + end.len());
        return Some(prefix + 1 + hashes + 1 + length);
    }
    if let Some(text) = body.strip_prefix('"') {
        let mut escaped = false;
        let end = text.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        return Some(prefix + 1 + end.map_or(text.len(), |end| end + 1));
    }
    // A character, and not a lifetime.
    let character = body.strip_prefix('\'')?;
    let length = match character.strip_prefix('\\') {
        Some(escape) => 1 + escape.char_indices().skip(1).find(|(_, c)| *c == '\'')?.0,
        None => character.chars().next()?.len_utf8(),
    };
    character[length..].starts_with('\'').then_some(prefix + 1 + length + 1)
}

/// The tokens without items that only tests have.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    let mark = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at..].starts_with(&mark.map(String::from)) {
            at = end_of_item(&tokens, at + mark.len());
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// Behind the item that starts here: its `;`, or the brace that closes its body.
fn end_of_item(tokens: &[String], start: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(start) {
        match token.as_str() {
            "{" => depth += 1,
            "}" if depth <= 1 => return at + 1,
            "}" => depth -= 1,
            ";" if depth == 0 => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Everything that a file names, from the crate's root, with the name that a `use` gives it.
fn absolute_paths(
    tokens: &[String],
    module: &[String],
    modules: &BTreeMap<Vec<String>, usize>,
) -> Vec<(Vec<String>, Option<String>)> {
    let mut found: Vec<(Vec<String>, Option<String>)> = Vec::new();
    // Modules that are written out inside the file, with the depth of their braces.
    let (mut inner, mut depth): (Vec<(String, usize)>, usize) = (Vec::new(), 0);
    let mut at = 0;
    while at < tokens.len() {
        let token = tokens[at].as_str();
        match token {
            "{" => {
                if at >= 2 && tokens[at - 2] == "mod" {
                    inner.push((tokens[at - 1].clone(), depth));
                }
                depth += 1;
            }
            "}" => {
                depth = depth.saturating_sub(1);
                if inner.last().is_some_and(|(_, opened)| *opened == depth) {
                    inner.pop();
                }
            }
            _ => {}
        }
        let here: Vec<String> = module.iter().chain(inner.iter().map(|(name, _)| name)).cloned().collect();
        let starts_path = is_name(token) && !matches!(at.checked_sub(1).map(|b| tokens[b].as_str()), Some("::" | "."));
        if token == "use" {
            let mut trees = Vec::new();
            at = use_tree(tokens, at + 1, &[], &mut trees);
            for (path, name) in trees {
                if let Some(path) = absolute(&path, &here, modules) {
                    found.push((path, Some(name)));
                }
            }
            continue;
        }
        if starts_path && tokens.get(at + 1).is_some_and(|next| next == "::") {
            let mut path = vec![tokens[at].clone()];
            while tokens.get(at + 1).is_some_and(|next| next == "::") && tokens.get(at + 2).is_some_and(|next| is_name(next)) {
                path.push(tokens[at + 2].clone());
                at += 2;
            }
            // A path may begin with a name that a `use` has brought in.
            let imported = found.iter().find(|(_, name)| name.as_ref() == Some(&path[0]));
            let path = match imported {
                Some((target, _)) => Some([target, &path[1..]].concat()),
                None => absolute(&path, &here, modules),
            };
            found.extend(path.map(|path| (path, None)));
        }
        at += 1;
    }
    found
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Reads the tree of a `use` from `at` on: every path in it, and the name that it gets. Returns where it ends.
fn use_tree(tokens: &[String], mut at: usize, prefix: &[String], found: &mut Vec<(Vec<String>, String)>) -> usize {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(at) {
        match token.as_str() {
            "::" => at += 1,
            "{" => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    at = use_tree(tokens, at, &path, found);
                    if tokens.get(at).is_some_and(|token| token == ",") {
                        at += 1;
                    }
                }
                return at + 1;
            }
            "as" => {
                let name = tokens.get(at + 1).cloned().unwrap_or_default();
                found.push((path, name));
                return at + 2;
            }
            "self" if !path.is_empty() => at += 1,
            "*" => {
                found.push((path, "*".into()));
                return at + 1;
            }
            name if is_name(name) => {
                path.push(token.clone());
                at += 1;
            }
            _ => break,
        }
    }
    if path.len() > prefix.len() || tokens.get(at.wrapping_sub(1)).is_some_and(|token| token == "self") {
        let name = path.last().cloned().unwrap_or_default();
        found.push((path, name));
    }
    at
}

/// A path from the crate's root; none if it leads outside. The program names its library by `kiln`.
fn absolute(path: &[String], here: &[String], modules: &BTreeMap<Vec<String>, usize>) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" | "kiln" => Some(rest.to_vec()),
        "self" => Some([here, rest].concat()),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            Some([&here[..here.len().checked_sub(ups)?], &path[ups..]].concat())
        }
        name => {
            let child: Vec<String> = here.iter().cloned().chain([name.to_owned()]).collect();
            modules.contains_key(&child).then(|| [&child[..], rest].concat())
        }
    }
}
