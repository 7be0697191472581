//! Adapters: small files that change a model, LoRA (Hu et al. 2021) and LoKr (Yeh et al. 2023), in every spelling that trainers write.
//!
//! `key` takes the names of tensors apart, `place` finds the layer of a model that a name stands for, and `term` is what is added to its
//! weight. A file of which a part finds no layer is an error, because an adapter that is applied in part, or not at all, gives an image
//! without telling.

mod key;
mod merge;
mod metadata;
mod place;
mod term;

pub use merge::Adapters;
pub use place::{Place, Places};
pub use term::{KroneckerFactor, Matrix, Product, Term};

use crate::checkpoint::{Entry, Shard};
use crate::error::{Error, Result};
use crate::tensor::DType;
use key::{Factor, Role};
use metadata::PeftScales;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The hint for a file that cannot be used.
const HINT: &str = "kiln takes LoRA and LoKr of FLUX.2 models; `kiln lora inspect FILE` lists what a file has";

/// A layer of an adapter, and where it belongs.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its name in the file.
    pub name: String,
    /// What it is added to.
    pub place: Place,
    /// What is added.
    pub term: Term,
}

/// An adapter for a model.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The file.
    pub path: PathBuf,
    /// Its layers that the model has.
    pub layers: Vec<Layer>,
    /// Names of those that the model does not have.
    pub unmatched: Vec<String>,
}

/// The tensors of one layer in a file.
#[derive(Default)]
struct Group<'a>(BTreeMap<Factor, (&'a str, &'a Entry)>);

impl Adapter {
    /// Reads an adapter for a model with these layers. Fails if nothing of it fits; what does not is listed.
    pub fn open(path: &Path, places: &Places) -> Result<Self> {
        Self::read(&Shard::open(path)?, places)
    }

    /// The same of a file that is open.
    pub fn read(shard: &Shard, places: &Places) -> Result<Self> {
        let file = AdapterFile::new(shard)?;
        let (mut layers, mut unmatched): (Vec<Layer>, Vec<String>) = Default::default();
        for (name, group) in &file.layers {
            let term = file.term(name, group)?;
            match places.find(name) {
                Some(place) => layers.push(Layer { name: (*name).into(), place: place.clone(), term }),
                None => unmatched.push((*name).into()),
            }
        }
        if layers.is_empty() {
            let near = places.nearest(unmatched.first().map_or("", String::as_str));
            let detail = format!("the model has no layer {}; near is {near}", first_three(&unmatched));
            return Err(file.refused(detail));
        }
        for layer in &layers {
            let (got, want) = (layer.term.shape(), [layer.place.len(), layer.place.cols]);
            if got != want {
                let base = file.likely_base().map_or_else(String::new, |base| format!("; it seems to be for {base}"));
                return Err(file.refused(format!("`{}` is for a layer of {got:?}, the model's has {want:?}{base}", layer.name)));
            }
        }
        file.refuse_twice(&layers)?;
        if let Some(layer) = layers.iter().find(|layer| !layer.term.is_finite()) {
            return Err(file.refused(format!("`{}` has values that are not finite", layer.name)));
        }
        shard.verify()?;
        Ok(Self { path: shard.path().into(), layers, unmatched })
    }
}

/// Up to three names, for a message.
fn first_three(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(3).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// The tensors of a file by layer.
struct AdapterFile<'a> {
    shard: &'a Shard,
    layers: BTreeMap<&'a str, Group<'a>>,
    scales: PeftScales,
}

impl<'a> AdapterFile<'a> {
    fn new(shard: &'a Shard) -> Result<Self> {
        let scales = PeftScales::read(shard)?;
        let mut file = Self { shard, layers: BTreeMap::new(), scales };
        let mut strange = Vec::new();
        for (name, entry) in shard.tensors() {
            match key::split(name) {
                Some((layer, Role::Factor(factor))) => {
                    let before = file.layers.entry(layer).or_default().0.insert(factor, (name, entry));
                    if let Some((other, _)) = before {
                        return Err(file.refused(format!("`{other}` and `{name}` are the same factor")));
                    }
                }
                Some((layer, Role::Unsupported(method))) => {
                    return Err(file.refused(format!("it is {method}, which is not supported: `{layer}` has `{name}`")));
                }
                None => strange.push(name.to_owned()),
            }
        }
        match (file.layers.is_empty(), strange.is_empty()) {
            (true, _) => Err(file.refused("it has no factors of LoRA or LoKr".into())),
            (false, false) => Err(file.refused(format!("it has tensors besides an adapter's: {}", first_three(&strange)))),
            (false, true) => Ok(file),
        }
    }

    fn refused(&self, detail: String) -> Error {
        Error::bad_file(self.shard.path(), "this adapter cannot be used", detail).with_hint(HINT)
    }

    fn matrix(&self, (name, entry): (&str, &Entry)) -> Result<Matrix> {
        let dtype = match entry.dtype.name {
            "BF16" => DType::Bf16,
            "F16" => DType::F16,
            "F32" => DType::F32,
            other => return Err(self.refused(format!("`{name}` is stored as {other}, not as BF16, F16 or F32"))),
        };
        let [rows, cols] = match entry.shape[..] {
            [rows, cols] | [rows, cols, 1, 1] if rows > 0 && cols > 0 => [rows, cols],
            _ => return Err(self.refused(format!("`{name}` has the shape {:?} and is no matrix", entry.shape))),
        };
        let bytes = self.shard.bytes(name).ok_or_else(|| self.refused(format!("`{name}` is not there")))?;
        Ok(Matrix { bytes, dtype, rows, cols })
    }

    /// What a layer adds.
    fn term(&self, layer: &str, Group(factors): &Group<'_>) -> Result<Term> {
        let get = |factor| factors.get(&factor).map(|found| self.matrix(*found)).transpose();
        let incomplete = || self.refused(format!("`{layer}` lacks a factor: it has {}", first_three(&named(factors))));
        let alpha = factors.get(&Factor::Alpha).map(|found| self.alpha(*found)).transpose()?;
        if let (Some(down), Some(up)) = (get(Factor::Down)?, get(Factor::Up)?) {
            if factors.keys().any(|factor| !matches!(factor, Factor::Down | Factor::Up | Factor::Alpha)) {
                return Err(self.refused(format!("`{layer}` is both LoRA and LoKr")));
            }
            if down.rows != up.cols {
                return Err(self.refused(format!("`{layer}` has rank {} in one factor and {} in the other", down.rows, up.cols)));
            }
            let scale = self.lora_scale(layer, alpha, down.rows)?;
            return Ok(Term { product: Product::LowRank { down, up }, scale });
        }
        let factor = |whole, a, b| -> Result<Option<KroneckerFactor>> {
            match (get(whole)?, get(a)?, get(b)?) {
                (Some(whole), None, None) => Ok(Some(KroneckerFactor::Whole(whole))),
                (None, Some(a), Some(b)) if a.cols == b.rows => Ok(Some(KroneckerFactor::Product(a, b))),
                (None, Some(a), Some(b)) => {
                    Err(self.refused(format!("`{layer}` has rank {} in one factor and {} in the other", a.cols, b.rows)))
                }
                (None, None, None) => Ok(None),
                _ => Err(incomplete()),
            }
        };
        let w1 = factor(Factor::W1, Factor::W1a, Factor::W1b)?;
        let w2 = factor(Factor::W2, Factor::W2a, Factor::W2b)?;
        let (Some(w1), Some(w2)) = (w1, w2) else { return Err(incomplete()) };
        // Where both are stored whole there is no rank to divide by, and files have any alpha there, ten thousand million among them.
        let scale = match w2.rank().or(w1.rank()) {
            Some(rank) => alpha.map_or(Ok(1.0), |alpha| self.divided(layer, alpha, rank as f32))?,
            None => 1.0,
        };
        Ok(Term { product: Product::Kronecker(w1, w2), scale })
    }

    /// The value of a tensor of one element.
    fn alpha(&self, (name, entry): (&str, &Entry)) -> Result<f32> {
        if entry.shape.iter().product::<usize>() != 1 {
            return Err(self.refused(format!("`{name}` has the shape {:?} and is no number", entry.shape)));
        }
        let flat = Entry { shape: vec![1, 1], ..entry.clone() };
        Ok(self.matrix((name, &flat))?.values()[0])
    }

    fn lora_scale(&self, layer: &str, alpha: Option<f32>, rank: usize) -> Result<f32> {
        match (alpha, self.scales.of(layer, rank)) {
            (Some(alpha), _) => self.divided(layer, alpha, rank as f32),
            (None, Some((alpha, divisor))) => self.divided(layer, alpha, divisor),
            (None, None) => Ok(1.0),
        }
    }

    /// A scale, which has to be a number that changes something.
    fn divided(&self, layer: &str, alpha: f32, by: f32) -> Result<f32> {
        let scale = alpha / by;
        if !scale.is_finite() || scale == 0.0 {
            return Err(
                self.refused(format!("`{layer}` has an alpha of {alpha}, with which it does nothing or destroys the image"))
            );
        }
        Ok(scale)
    }

    /// Refuses rows of a weight that two layers of the file are added to: one of them is there by mistake.
    fn refuse_twice(&self, layers: &[Layer]) -> Result<()> {
        let mut all: Vec<(&str, usize, usize, &str)> = Vec::new();
        for layer in layers {
            all.extend(
                layer.place.rows.iter().map(|rows| (layer.place.name.as_str(), rows.start, rows.end, layer.name.as_str())),
            );
        }
        all.sort_unstable();
        let twice = all.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2);
        match twice {
            Some([(.., first), (.., second)]) => Err(self.refused(format!("`{first}` and `{second}` are for the same layer"))),
            _ => Ok(()),
        }
    }

    /// The model that the widths of the layers tell of.
    fn likely_base(&self) -> Option<&'static str> {
        let width = |(name, group): (&&str, &Group<'_>)| {
            let flat = name.replace('.', "_");
            let is_wide = ["_img_attn_qkv", "_linear1", "_attn_to_q", "_to_qkv_mlp_proj"].iter().any(|end| flat.ends_with(end));
            let (_, entry) = group.0.get(&Factor::Down).filter(|_| is_wide)?;
            entry.shape.get(1).copied()
        };
        let is_flux1 = self
            .layers
            .keys()
            .any(|name| name.contains("img_mod") || name.contains("_modulation_lin") || name.contains("norm1_linear"));
        match self.layers.iter().find_map(width)? {
            3072 if is_flux1 => Some("FLUX.1"),
            3072 => Some("FLUX.2 [klein] 4B"),
            4096 => Some("FLUX.2 [klein] 9B"),
            6144 => Some("FLUX.2 [dev]"),
            _ => None,
        }
    }
}

/// Names of a group's tensors.
fn named(factors: &BTreeMap<Factor, (&str, &Entry)>) -> Vec<String> {
    factors.values().map(|(name, _)| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests;
