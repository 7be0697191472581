//! Adapters: small files that change a model, LoRA (Hu et al. 2021) and LoKr (Yeh et al. 2023), in every spelling that trainers write.
//!
//! `key` splits tensor names, `target` finds the model layer that a name stands for, and `delta` holds what is added to that layer's
//! weight. A layer that the model does not have is an error by default: an adapter applied in part, or not at all, would silently give a
//! wrong image. `contents` lists what a file holds, without a model.

mod base;
mod branch;
mod contents;
mod delta;
mod key;
mod merge;
mod metadata;
mod notes;
mod spelling;
mod target;

pub use contents::{Contents, LayerContents};
pub use delta::{KroneckerFactor, Matrix, Product, WeightDelta};
pub use merge::{AdapterMode, AdapterSet, Adapters, MAX_RANK, Merger};
pub use notes::Notes;
pub use spelling::Spelling;
pub use target::{LayerTarget, LayerTargets};

use crate::checkpoint::{Entry, Shard};
use crate::error::{Error, Remedy, Result};
use crate::tensor::DType;
use key::{Factor, Role};
use metadata::PeftScales;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A layer of an adapter, and the model layer it changes.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The layer's name in the file.
    pub name: String,
    /// The rows of the model's weight that it is added to.
    pub target: LayerTarget,
    /// The matrix that is added.
    pub delta: WeightDelta,
}

/// An adapter for a model.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The adapter's file.
    pub path: PathBuf,
    /// Layers that the model has.
    pub layers: Vec<Layer>,
    /// Names of layers that the model does not have.
    pub unmatched: Vec<String>,
    /// The SHA-256 of the file, as hexadecimal digits.
    pub digest: String,
    /// The open file; values are read from it when they are needed.
    file: Option<Shard>,
}

/// How many of an adapter's layers have to fit the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coverage {
    /// At least one layer.
    Component,
    /// All layers.
    Whole,
}

/// The tensors of one layer in a file.
#[derive(Default)]
struct Group<'a>(BTreeMap<Factor, (&'a str, &'a Entry)>);

impl Adapter {
    /// Reads an adapter for a model with these layers. Fails if no layer fits; `unmatched` lists the layers that do not.
    pub fn open(path: &Path, targets: &LayerTargets) -> Result<Self> {
        Self::read(&Shard::open(path)?, targets)
    }

    /// Reads an adapter for a model with these layers. Fails if any layer does not fit.
    pub fn open_whole(path: &Path, targets: &LayerTargets) -> Result<Self> {
        Self::gather(&Shard::open(path)?, targets, Coverage::Whole)
    }

    /// Reads an adapter from an open file, as [`Adapter::open`] does.
    pub fn read(shard: &Shard, targets: &LayerTargets) -> Result<Self> {
        Self::gather(shard, targets, Coverage::Component)
    }

    fn gather(shard: &Shard, targets: &LayerTargets, coverage: Coverage) -> Result<Self> {
        // Both read the whole file, which may have some hundred megabytes.
        let (digest, adapter) = rayon::join(|| shard.sha256(), || Self::placed(shard, targets, coverage));
        let adapter = adapter?;
        shard.verify()?;
        Ok(Self { digest, ..adapter })
    }

    /// Fails if the file changed since it was opened.
    pub fn verify(&self) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), Shard::verify)
    }

    fn placed(shard: &Shard, targets: &LayerTargets, coverage: Coverage) -> Result<Self> {
        let file = AdapterFile::new(shard)?.supported()?;
        let (mut layers, mut unmatched): (Vec<Layer>, Vec<String>) = Default::default();
        for (name, group) in &file.layers {
            let delta = file.delta(name, group)?;
            match targets.find(name) {
                Some(target) => layers.push(Layer { name: (*name).into(), target: target.clone(), delta }),
                None => unmatched.push((*name).into()),
            }
        }
        let base = || file.likely_base().map_or_else(String::new, |base| format!("; it seems to be for {base}"));
        let no_layer = || {
            let near = targets.nearest(unmatched.first().map_or("", String::as_str));
            format!("the model has no layer {}; the nearest is {near}{}", first_three(&unmatched), base())
        };
        if layers.is_empty() {
            return Err(file.refused(no_layer()));
        }
        for layer in &layers {
            let (got, want) = (layer.delta.shape(), [layer.target.len(), layer.target.cols]);
            if got != want {
                return Err(file.refused(format!(
                    "`{}` is for a layer of {got:?}, the model's has {want:?}{}",
                    layer.name,
                    base()
                )));
            }
        }
        if coverage == Coverage::Whole && !unmatched.is_empty() {
            let all = layers.len() + unmatched.len();
            let detail = format!("only {} of its {all} layers fit: {}", layers.len(), no_layer());
            return Err(file.refused(detail).with_hint(Remedy::PartOfAdapter));
        }
        file.refuse_twice(&layers)?;
        if let Some(layer) = layers.iter().find(|layer| !layer.delta.is_finite()) {
            return Err(file.refused(format!("`{}` has values that are not finite", layer.name)));
        }
        Ok(Self { path: shard.path().into(), layers, unmatched, digest: String::new(), file: Some(shard.clone()) })
    }
}

/// Up to three names, for an error message.
fn first_three(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(3).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// The tensors of a file by layer.
struct AdapterFile<'a> {
    shard: &'a Shard,
    layers: BTreeMap<&'a str, Group<'a>>,
    /// Layers of methods that are not supported: the method, and a tensor of it.
    unsupported: BTreeMap<&'a str, (&'static str, &'a str)>,
    /// Tensors that belong to no layer.
    unrecognized: Vec<String>,
    scales: PeftScales,
}

impl<'a> AdapterFile<'a> {
    fn new(shard: &'a Shard) -> Result<Self> {
        let scales = PeftScales::read(shard)?;
        let (layers, unsupported, unrecognized) = Default::default();
        let mut file = Self { shard, layers, unsupported, unrecognized, scales };
        for (name, entry) in shard.tensors() {
            match key::split(name) {
                Some((layer, Role::Factor(factor))) => {
                    let before = file.layers.entry(layer).or_default().0.insert(factor, (name, entry));
                    if let Some((other, _)) = before {
                        return Err(file.refused(format!("`{other}` and `{name}` are the same factor")));
                    }
                }
                Some((layer, Role::Unsupported(method))) => {
                    file.unsupported.entry(layer).or_insert((method, name));
                }
                None => file.unrecognized.push(name.to_owned()),
            }
        }
        Ok(file)
    }

    /// Fails if the file holds anything other than LoRA and LoKr.
    fn supported(self) -> Result<Self> {
        if let Some((layer, (method, tensor))) = self.unsupported.first_key_value() {
            return Err(self.refused(format!("it is {method}, which is not supported: `{layer}` has `{tensor}`")));
        }
        match (self.layers.is_empty(), self.unrecognized.is_empty()) {
            (true, _) => Err(self.refused("it has no factors of LoRA or LoKr".into())),
            (false, false) => {
                Err(self.refused(format!("it has tensors that are not part of an adapter: {}", first_three(&self.unrecognized))))
            }
            (false, true) => Ok(self),
        }
    }

    fn refused(&self, detail: String) -> Error {
        Error::bad_file(self.shard.path(), "this adapter cannot be used", detail).with_hint(Remedy::InspectAdapter)
    }

    fn matrix(&self, (name, entry): (&str, &Entry)) -> Result<Matrix> {
        let stored_as = entry.dtype.name;
        let refused = || self.refused(format!("`{name}` is stored as {stored_as}, not as BF16, F16 or F32"));
        let dtype = DType::plain_stored_as(stored_as).ok_or_else(refused)?;
        let [rows, cols] = match entry.shape[..] {
            [rows, cols] | [rows, cols, 1, 1] if rows > 0 && cols > 0 => [rows, cols],
            _ => return Err(self.refused(format!("`{name}` has the shape {:?} and is no matrix", entry.shape))),
        };
        let bytes = self.shard.bytes(name).ok_or_else(|| self.refused(format!("`{name}` is not there")))?;
        Ok(Matrix { bytes, dtype, rows, cols })
    }

    /// The delta of a layer.
    fn delta(&self, layer: &str, Group(factors): &Group<'_>) -> Result<WeightDelta> {
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
            return Ok(WeightDelta { product: Product::Lora { down, up }, scale });
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
        // If both factors are stored whole, there is no rank to divide by. Files then have any alpha, ten thousand million among them.
        let scale = match w2.rank().or(w1.rank()) {
            Some(rank) => alpha.map_or(Ok(1.0), |alpha| self.divided(layer, alpha, rank as f32))?,
            None => 1.0,
        };
        Ok(WeightDelta { product: Product::Kronecker(w1, w2), scale })
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

    /// The scale `alpha / by`. Fails if the result is too far from the scales of trained adapters, which are around one.
    fn divided(&self, layer: &str, alpha: f32, by: f32) -> Result<f32> {
        let scale = alpha / by;
        if !(1e-10..=1e5).contains(&scale.abs()) {
            return Err(self.refused(format!("`{layer}` has an alpha of {alpha:?}, which has no effect or destroys the image")));
        }
        Ok(scale)
    }

    /// Fails if two layers of the file are added to the same rows of a weight: one of them is a mistake.
    fn refuse_twice(&self, layers: &[Layer]) -> Result<()> {
        let mut all: Vec<(String, usize, usize, &str)> = Vec::new();
        for Layer { name, target, .. } in layers {
            all.extend(target.rows.iter().map(|rows| (target.id.canonical(), rows.start, rows.end, name.as_str())));
        }
        all.sort_unstable();
        let twice = all.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2);
        match twice {
            Some([(.., first), (.., second)]) => Err(self.refused(format!("`{first}` and `{second}` are for the same layer"))),
            _ => Ok(()),
        }
    }

    /// The model that the layers were probably made for, as far as they tell.
    fn likely_base(&self) -> Option<String> {
        let deltas = self.layers.iter().filter_map(|(name, group)| Some((*name, self.delta(name, group).ok()?.shape())));
        base::likely(deltas)
    }
}

/// Names of a group's tensors.
fn named(factors: &BTreeMap<Factor, (&str, &Entry)>) -> Vec<String> {
    factors.values().map(|(name, _)| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    //! Adapters made here, compared with deltas that are computed in f64 element by element.

    use super::*;
    use crate::config::{Configs, TransformerConfig};
    use crate::model::transformer_manifest;
    use crate::tensor::Bytes;
    use safetensors::tensor::{Dtype, TensorView, serialize};
    use std::collections::HashMap;
    use std::sync::Arc;

    /// A transformer with two blocks of each kind.
    fn config() -> TransformerConfig {
        TransformerConfig { hidden: 128, double_blocks: 2, single_blocks: 2, ..Configs::KLEIN_4B.transformer }
    }

    fn targets() -> LayerTargets {
        LayerTargets::new(&transformer_manifest(&config()))
    }

    /// Values that depend on the name and the index.
    fn values(name: &str, count: usize) -> Vec<f32> {
        let mut state = name.bytes().fold(1_u32, |state, byte| state.wrapping_mul(31).wrapping_add(u32::from(byte))) | 1;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0 - 0.5
        };
        (0..count).map(|_| next()).collect()
    }

    /// A tensor of a file.
    #[derive(Clone)]
    struct Given(String, Vec<usize>, Vec<f32>);

    fn given(name: impl Into<String>, shape: &[usize]) -> Given {
        let name = name.into();
        let drawn = values(&name, shape.iter().product());
        Given(name, shape.to_vec(), drawn)
    }

    fn shard_with(tensors: &[Given], metadata: Option<(&str, &str)>) -> Shard {
        let bytes: Vec<Vec<u8>> = tensors.iter().map(|Given(_, _, values)| DType::F32.encoded(values)).collect();
        let views = tensors
            .iter()
            .zip(&bytes)
            .map(|(Given(name, shape, _), bytes)| (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
        let metadata = metadata.map(|(key, value)| HashMap::from([(key.to_owned(), value.to_owned())]));
        Shard::from_bytes("adapter", Bytes::new(Arc::new(serialize(views, metadata).unwrap()))).unwrap()
    }

    fn read(tensors: &[Given]) -> Result<Adapter> {
        Adapter::read(&shard_with(tensors, None), &targets())
    }

    fn refusal(tensors: &[Given]) -> String {
        read(tensors).map(|adapter| adapter.layers.len()).unwrap_err().to_string()
    }

    /// Both factors of a layer.
    fn pair(layer: &str, [down, up]: [&str; 2], [rows, cols]: [usize; 2], rank: usize) -> [Given; 2] {
        [given(format!("{layer}{down}"), &[rank, cols]), given(format!("{layer}{up}"), &[rows, rank])]
    }

    const PEFT: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
    const KOHYA: [&str; 2] = [".lora_down.weight", ".lora_up.weight"];

    fn delta(adapter: &Adapter, layer: usize) -> Vec<f32> {
        let delta = &adapter.layers[layer].delta;
        let mut to = vec![0.0; delta.shape().iter().product()];
        delta.add_to(1.0, &mut to);
        to
    }

    #[test]
    fn a_layer_is_the_product_of_its_factors_times_alpha_over_rank() {
        let layer = "lora_unet_single_blocks_1_linear2";
        let mut tensors = pair(layer, KOHYA, [128, 512], 4).to_vec();
        tensors.push(Given(format!("{layer}.alpha"), vec![], vec![2.0]));
        let adapter = read(&tensors).unwrap();
        assert_eq!(
            (adapter.layers.len(), adapter.layers[0].target.id.canonical().as_str()),
            (1, "single_blocks.1.linear2.weight")
        );
        let (got, (down, up)) = (delta(&adapter, 0), (&tensors[0].2, &tensors[1].2));
        for (i, got) in got.iter().enumerate() {
            let (row, col) = (i / 512, i % 512);
            let want: f64 = (0..4).map(|k| f64::from(up[row * 4 + k]) * f64::from(down[k * 512 + col])).sum::<f64>() * 0.5;
            assert!((f64::from(*got) - want).abs() < 1e-6, "{i}: {got} {want}");
        }
    }

    #[test]
    fn scales_of_peft_are_in_the_metadata() {
        let tensors = pair("transformer.transformer_blocks.0.attn.to_k", PEFT, [128, 128], 4);
        let scale = |settings: &str| {
            let shard = shard_with(&tensors, Some(("lora_adapter_metadata", settings)));
            Adapter::read(&shard, &targets()).map(|adapter| adapter.layers[0].delta.scale)
        };
        assert_eq!(scale(r#"{"transformer.r": 4, "transformer.lora_alpha": 8}"#).unwrap(), 2.0);
        assert_eq!(scale(r#"{"transformer.lora_alpha": 8, "transformer.use_rslora": true}"#).unwrap(), 4.0);
        let pattern = r#"{"transformer.lora_alpha": 8, "transformer.alpha_pattern": {"transformer_blocks.0.attn.to_k": 1}}"#;
        assert_eq!(scale(pattern).unwrap(), 0.25);
        assert_eq!(scale("{}").unwrap(), 1.0);
        assert!(scale("[").unwrap_err().to_string().contains("settings"));
        assert!(scale(r#"{"transformer.lora_alpha": 0}"#).unwrap_err().to_string().contains("alpha of 0"));
    }

    #[test]
    fn kronecker_products_ignore_alpha_where_both_factors_are_whole() {
        let layer = "diffusion_model.double_blocks.1.txt_attn.proj";
        let part = |name: &str, shape: &[usize]| given(format!("{layer}.{name}"), shape);
        let alpha = |value: f32| Given(format!("{layer}.alpha"), vec![1], vec![value]);
        let whole = [part("lokr_w1", &[4, 4]), part("lokr_w2", &[32, 32]), alpha(9_999_999_999.0)];
        let adapter = read(&whole).unwrap();
        let got = delta(&adapter, 0);
        for (i, got) in got.iter().enumerate() {
            let (row, col) = (i / 128, i % 128);
            let want = f64::from(whole[0].2[row / 32 * 4 + col / 32]) * f64::from(whole[1].2[row % 32 * 32 + col % 32]);
            assert!((f64::from(*got) - want).abs() < 1e-6, "{i}");
        }
        let split = [part("lokr_w1", &[4, 4]), part("lokr_w2_a", &[32, 2]), part("lokr_w2_b", &[2, 32]), alpha(1.0)];
        assert_eq!(read(&split).unwrap().layers[0].delta.scale, 0.5);
    }

    #[test]
    fn files_that_do_not_fit_are_refused_and_say_why() {
        let qkv = "diffusion_model.double_blocks.0.img_attn.qkv";
        let good = pair(qkv, PEFT, [384, 128], 4);
        assert!(read(&good).is_ok());
        let with = |more: Given| [good.to_vec(), vec![more]].concat();
        for (tensors, text) in [
            (vec![good[0].clone()], "lacks a factor"),
            (with(given(format!("{qkv}.dora_scale"), &[384, 1])), "it is DoRA"),
            (with(given(format!("{qkv}.hada_w1_a"), &[4, 4])), "it is LoHa"),
            (with(given(format!("{qkv}.lora_A.other.weight"), &[4, 128])), "the same factor"),
            (with(given("something.weight", &[4])), "tensors that are not part of an adapter"),
            (with(given(format!("{qkv}.alpha"), &[2])), "no number"),
            (with(Given(format!("{qkv}.alpha"), vec![], vec![0.0])), "alpha of 0.0"),
            (with(Given(format!("{qkv}.alpha"), vec![], vec![f32::NAN])), "alpha of NaN"),
            (with(Given(format!("{qkv}.alpha"), vec![], vec![1e38])), "alpha of 1e38, which has no effect or destroys the image"),
            (with(Given(format!("{qkv}.alpha"), vec![], vec![-1e-30])), "alpha of -1e-30"),
            (pair(qkv, PEFT, [384, 256], 4).to_vec(), "the model's has [384, 128]"),
            (
                vec![given(format!("{qkv}.lora_A.weight"), &[4, 128]), given(format!("{qkv}.lora_B.weight"), &[384, 8])],
                "rank 4 in one factor and 8",
            ),
            (
                vec![given(format!("{qkv}.lora_A.weight"), &[4, 128]), given(format!("{qkv}.lora_B.weight"), &[384, 4, 3])],
                "no matrix",
            ),
            (pair("diffusion_model.double_blocks.7.img_attn.qkv", PEFT, [384, 128], 4).to_vec(), "nearest is `double_blocks."),
            (vec![given("img_in.weight", &[4, 4])], "no factors"),
            (
                [good.to_vec(), pair("transformer.transformer_blocks.0.attn.to_v", PEFT, [128, 128], 2).to_vec()].concat(),
                "for the same layer",
            ),
        ] {
            let said = refusal(&tensors);
            assert!(said.contains(text), "{said}: {text}");
        }
        let mut spoiled = good.to_vec();
        spoiled[1].2[17] = f32::INFINITY;
        assert!(refusal(&spoiled).contains("not finite"));
        // Files for other models: of another size, with blocks that this one does not have, and with other layers.
        assert!(refusal(&pair(qkv, PEFT, [12288, 4096], 1)).contains("it seems to be for FLUX.2 [klein] 9B"));
        let absent = pair("lora_unet_single_blocks_30_linear2", KOHYA, [6144, 6144], 1);
        assert!(refusal(&absent).contains("nearest is `single_blocks.0.linear2`; it seems to be for FLUX.2 [dev]"));
        let other = pair("transformer.transformer_blocks.0.norm1.linear", PEFT, [18432, 3072], 1);
        assert!(refusal(&other).contains("it seems to be for FLUX.1"), "{}", refusal(&other));
    }

    #[test]
    fn what_the_model_does_not_have_is_listed() {
        let tensors = [
            pair("diffusion_model.double_blocks.0.img_attn.qkv", PEFT, [384, 128], 4),
            pair("diffusion_model.double_blocks.9.img_attn.qkv", PEFT, [384, 128], 4),
        ];
        let adapter = read(&tensors.concat()).unwrap();
        assert_eq!(
            (adapter.layers.len(), &adapter.unmatched[..]),
            (1, &["diffusion_model.double_blocks.9.img_attn.qkv".to_owned()][..])
        );
        let shard = shard_with(&tensors.concat(), None);
        let error = Adapter::gather(&shard, &targets(), Coverage::Whole).map(|adapter| adapter.layers.len()).unwrap_err();
        let said = "only 1 of its 2 layers fit: the model has no layer `diffusion_model.double_blocks.9.img_attn.qkv`; \
                    the nearest is `double_blocks.";
        assert!(error.to_string().contains(said), "{error}");
        assert_eq!(error.remedy(), Some(Remedy::PartOfAdapter));
        assert!(Adapter::gather(&shard_with(&tensors[0], None), &targets(), Coverage::Whole).is_ok());
    }

    #[test]
    fn contents_are_listed_whether_they_can_be_used_or_not() {
        let qkv = "diffusion_model.double_blocks.0.img_attn.qkv";
        let mut tensors = pair(qkv, PEFT, [9216, 3072], 2).to_vec();
        tensors.push(given(format!("{qkv}.dora_scale"), &[9216, 1]));
        tensors.extend(pair("lora_unet_single_blocks_1_linear2", KOHYA, [3072, 12288], 3));
        tensors.push(Given("lora_unet_single_blocks_1_linear2.alpha".into(), vec![], vec![1.5]));
        tensors.push(given("lora_unet_single_blocks_2_linear2.lora_down.weight", &[2, 12288]));
        tensors.push(given("a.hada_w1_a", &[2, 2]));
        tensors.push(given("strange.weight", &[2]));
        let contents = Contents::read(&shard_with(&tensors, Some(("trigger_word", "ohwx")))).unwrap();
        let list: Vec<_> = contents.layers.iter().map(|layer| (layer.method, layer.supported, layer.rank, layer.scale)).collect();
        assert_eq!(
            list,
            [
                ("LoHa", false, None, None),
                ("DoRA", false, Some(2), Some(1.0)),
                ("LoRA", true, Some(3), Some(0.5)),
                ("LoRA", true, None, None)
            ]
        );
        assert_eq!((contents.layers[2].alpha, contents.layers[2].shape), (Some(1.5), Some([3072, 12288])));
        assert!(contents.layers[3].fault.as_ref().unwrap().contains("lacks a factor"));
        assert!(contents.layers[0].fault.is_none());
        assert_eq!(
            (contents.base.as_deref(), &contents.others[..]),
            (Some("FLUX.2 [klein] 4B"), &["strange.weight".to_owned()][..])
        );
        assert_eq!((contents.notes.triggers, contents.dtypes), (vec!["ohwx".to_owned()], vec!["F32"]));
        assert_eq!(contents.digest.len(), 64);
        let error = Contents::read(&shard_with(&[given("img_in.weight", &[4, 4])], None)).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("no factors"), "{error}");
    }
}
