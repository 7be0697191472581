//! Requested adapters: locates and opens their files, and describes them to the user and in the metadata of images.

mod library;

pub use library::Library;

use super::args::{LoraArg, LoraArgs};
use crate::terminal::Terminal;
use kiln::error::Result;
use kiln::locate::{Environment, locate_adapter};
use kiln::lora::{Adapter, AdapterMode, Adapters, LayerTargets, Product};
use kiln::metadata::AdapterMetadata;
use kiln::progress::Progress;
use kiln::text::shown;
use kiln::{AdapterUse, Formats};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The files of adapters, and their scales.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterFiles {
    files: Vec<(PathBuf, f32)>,
    /// Whether layers that the model does not have are left out.
    partial: bool,
}

impl AdapterFiles {
    /// Locates the files that flags name.
    pub fn locate(args: &LoraArgs, environment: &Environment) -> Result<Self> {
        let locate = |lora: &LoraArg| Ok((locate_adapter(&lora.file, environment)?, lora.scale));
        let files = args.lora.iter().map(locate).collect::<Result<_>>()?;
        Ok(Self { files, partial: args.lora_partial })
    }

    /// Opens the files for a model with these layers.
    pub fn open(&self, targets: impl FnOnce() -> LayerTargets) -> Result<Adapters> {
        if self.files.is_empty() {
            return Ok(Adapters::default());
        }
        let targets = targets();
        let open = |(path, scale): &(PathBuf, f32)| Ok((open_adapter(path, self.partial, &targets)?, *scale));
        self.files.iter().map(open).collect::<Result<_>>().map(Adapters)
    }
}

/// Opens a file. Every layer has to fit the model unless `partial` is set.
pub fn open_adapter(path: &Path, partial: bool, targets: &LayerTargets) -> Result<Adapter> {
    if partial { Adapter::open(path, targets) } else { Adapter::open_whole(path, targets) }
}

/// Describes adapters in the order in which they are applied.
pub fn applied(adapters: &Adapters) -> Vec<AdapterMetadata> {
    let tell = |(adapter, scale): &(Adapter, f32)| AdapterMetadata {
        file: file_name(&adapter.path),
        sha256: adapter.digest.clone(),
        scale: *scale,
    };
    adapters.0.iter().map(tell).collect()
}

/// How adapters are applied, where it is not left to kiln. Both ways give the same image but for rounding.
pub fn mode_name(mode: AdapterMode) -> Option<&'static str> {
    match mode {
        AdapterMode::Auto => None,
        AdapterMode::Merge => Some("merge"),
        AdapterMode::Branch => Some("branch"),
    }
}

/// Prints a line for each adapter and, with `--verbose`, its layers.
pub fn announce_adapters(adapters: &Adapters, formats: &Formats, terminal: &Terminal) {
    for (line, details) in descriptions(adapters, formats) {
        terminal.say(&line);
        details.iter().for_each(|line| terminal.detail(line));
    }
}

/// A line for each adapter, and lines about its layers.
pub fn descriptions(adapters: &Adapters, formats: &Formats) -> Vec<(String, Vec<String>)> {
    let uses = formats.adapter_uses(adapters);
    let tell = |((adapter, scale), used): (&(Adapter, f32), &AdapterUse)| describe(adapter, *scale, &how_applied(used));
    adapters.0.iter().zip(&uses).map(tell).collect()
}

/// The text for layers whose weights are not merged with adapters.
pub const AS_BRANCHES: &str = "as branches";

/// A line about an adapter, and lines about its layers.
pub fn describe(adapter: &Adapter, scale: f32, how: &str) -> (String, Vec<String>) {
    let Adapter { layers, unmatched, path, .. } = adapter;
    let is_lokr = layers.iter().any(|layer| matches!(layer.delta.product, Product::Kronecker(..)));
    let method = if is_lokr { "LoKr" } else { "LoRA" };
    let ranks = ranks(layers.iter().map(|layer| layer.delta.rank()));
    let all = layers.len() + unmatched.len();
    let left_out = if unmatched.is_empty() { "" } else { "; the model does not have the others" };
    let line = format!("{method} {}: {} of {all} layers, {ranks}, scale {scale}, {how}{left_out}", file_name(path), layers.len());
    let place = |layer: &kiln::lora::Layer| {
        let target = &layer.target;
        let rows: Vec<String> = target.rows.iter().map(|rows| format!("{}..{}", rows.start, rows.end)).collect();
        let rank = layer.delta.rank().map_or_else(|| "whole".into(), |rank| format!("rank {rank}"));
        let (part, name, rows) = (target.id.component(), target.id, rows.join(" and "));
        format!("  {} -> {part} {name} rows {rows}, {rank}, scale {}", shown(&layer.name), layer.delta.scale)
    };
    let missing = |name: &String| format!("  {} is left out: the model has no such layer", shown(name));
    (line, layers.iter().map(place).chain(unmatched.iter().map(missing)).collect())
}

/// How the layers of an adapter are applied.
fn how_applied(used: &AdapterUse) -> String {
    match (used.merged, used.branches) {
        (0, 0) => "without effect".into(),
        (_, 0) => "merged".into(),
        (0, _) => AS_BRANCHES.into(),
        (merged, branches) => format!("{merged} merged and {branches} {AS_BRANCHES}"),
    }
}

/// The ranks of layers in words. Layers whose factors are stored whole have none.
pub fn ranks(ranks: impl Iterator<Item = Option<usize>>) -> String {
    let ranks: BTreeSet<Option<usize>> = ranks.collect();
    let known: Vec<usize> = ranks.iter().copied().flatten().collect();
    match (&known[..], ranks.contains(&None)) {
        ([], _) => "no rank".into(),
        ([only], false) => format!("rank {only}"),
        ([first, .., last], false) => format!("ranks {first} to {last}"),
        ([only], true) => format!("rank {only} or none"),
        ([first, .., last], true) => format!("ranks {first} to {last} or none"),
    }
}

/// The name of a file, for display.
fn file_name(path: &Path) -> String {
    shown(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_told_briefly() {
        let of = |list: &[Option<usize>]| ranks(list.iter().copied());
        assert_eq!(of(&[Some(4), Some(4)]), "rank 4");
        assert_eq!(of(&[Some(8), Some(4), Some(16)]), "ranks 4 to 16");
        assert_eq!(of(&[None]), "no rank");
        assert_eq!(of(&[None, Some(4)]), "rank 4 or none");
    }
}
