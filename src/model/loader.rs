//! Loads the tensors of a model, or lists them.

use super::attention::{AttentionFormat, BlockAttention};
use super::bounds::{NormGain, QkGain};
use super::formats::{LayerFormat, PartFormat, PlainInput};
use super::nvfp4_math::{Nvfp4Math, refused};
use super::quantize;
use super::table::TokenTable;
use crate::adapter::{AdapterMode, Adapters, MAX_RANK, Merger};
use crate::backend::{Backend, Conv, GatedGemm, GemmFormats, GroupNorm, Linear, Op, QkNorm, Role, Weight};
use crate::checkpoint::{Weights, may_be_zero};
use crate::error::{Error, Remedy, Result};
use crate::names::{LayerId, TensorSpec};
use crate::tensor::formats::Format;
use crate::tensor::quantize::largest_magnitude;
use crate::tensor::{Arena, Bytes, DType, Precision, Region, Scale, ScaleKind, Scaling, Stored, Tensor, WeightSlice};
use std::sync::Arc;

/// Provides the tensors that a model's `load` names. Every tensor's name and shape is spelled once, in `load`, and serves two
/// purposes: with weights or a dry run the tensors are placed on a backend, and for a manifest they are only listed.
pub struct Loader<'a> {
    target: Target<'a>,
    precision: Precision,
    attention: AttentionFormat,
    nvfp4_math: Nvfp4Math,
    quantize: Option<DType>,
}

/// What the loader does with the tensors.
enum Target<'a> {
    /// Places them on a backend.
    Backend(Upload<'a>),
    /// Lists them in loading order and places nothing.
    Manifest(&'a mut Vec<TensorSpec>),
}

/// Places checkpoint tensors on a backend. Without a checkpoint it places only shapes, which is enough for a dry run.
struct Upload<'a> {
    backend: &'a mut dyn Backend,
    region: &'a mut Arena,
    source: Option<&'a Weights>,
    loaded: &'a mut dyn FnMut(u64),
    /// Whether to check weights for parts that were never written.
    verify_written: bool,
    /// Whether only shapes and formats matter. Weights to quantize then need not be read for their scales.
    shapes_only: bool,
    /// The adapters to apply to weights.
    adapters: Option<Added<'a>>,
    merger: Merger,
    formats: Vec<LayerFormat>,
}

/// Adapters and how to apply them.
#[derive(Clone, Copy)]
struct Added<'a> {
    adapters: &'a Adapters,
    mode: AdapterMode,
    /// Offset of the scratch space for merging, in [`Region::Adapters`].
    room_at: u64,
}

impl<'a> Loader<'a> {
    /// Creates a loader that places weights of `source` into `region`. It calls `loaded` with the bytes of each weight it places.
    pub fn new(
        backend: &'a mut dyn Backend,
        region: &'a mut Arena,
        source: Option<&'a Weights>,
        precision: Precision,
        loaded: &'a mut dyn FnMut(u64),
    ) -> Self {
        let (verify_written, shapes_only, adapters, merger, formats) = (false, false, None, Merger::default(), Vec::new());
        let target =
            Target::Backend(Upload { backend, region, source, loaded, verify_written, shapes_only, adapters, merger, formats });
        Self { target, precision, attention: AttentionFormat::Auto, nvfp4_math: Nvfp4Math::Auto, quantize: None }
    }

    /// Sets the requested format of queries and keys.
    pub fn with_attention(self, attention: AttentionFormat) -> Self {
        Self { attention, ..self }
    }

    /// Sets how NVFP4 weights are multiplied.
    pub fn with_nvfp4_math(self, nvfp4_math: Nvfp4Math) -> Self {
        Self { nvfp4_math, ..self }
    }

    /// Sets the format that plain weights of transformer blocks and text encoders are quantized to, if any.
    pub fn with_quantize(self, quantize: Option<DType>) -> Self {
        Self { quantize, ..self }
    }

    /// Sets the adapters and how they are applied. `room_at` is the offset in [`Region::Adapters`] of the scratch space for the
    /// [factors](Adapters::factors) of a weight.
    pub fn with_adapters(self, adapters: &'a Adapters, mode: AdapterMode, room_at: u64) -> Self {
        self.with(|upload| upload.adapters = Some(Added { adapters, mode, room_at }))
    }

    /// Checks weights as they are used. A matrix with a part that was never written is an error.
    pub fn verify_written(self) -> Self {
        self.with(|upload| upload.verify_written = true)
    }

    /// Reads no weights. Tensors that are quantized then have a scale of one instead of one from their values. A dry run does not
    /// depend on it.
    pub fn shapes_only(self) -> Self {
        self.with(|upload| upload.shapes_only = true)
    }

    fn with(mut self, change: impl FnOnce(&mut Upload<'a>)) -> Self {
        if let Target::Backend(upload) = &mut self.target {
            change(upload);
        }
        self
    }

    /// Lists the tensors that `load` asks for, with their shapes, in that order.
    pub(super) fn record<T>(load: impl FnOnce(&mut Loader<'_>) -> Result<T>) -> Vec<TensorSpec> {
        let mut list = Vec::new();
        let target = Target::Manifest(&mut list);
        let (attention, nvfp4_math) = (AttentionFormat::Auto, Nvfp4Math::Auto);
        let mut loader = Loader { target, precision: Precision::Bf16, attention, nvfp4_math, quantize: None };
        // Nothing is allocated or read, so nothing can fail.
        load(&mut loader).map(drop).expect("recording a manifest does not fail");
        list
    }

    /// The precision of activations.
    pub(super) fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the formats of the loaded linear layers.
    pub fn formats(self) -> Vec<LayerFormat> {
        match self.target {
            Target::Backend(upload) => upload.formats,
            Target::Manifest(_) => Vec::new(),
        }
    }

    /// Loads a plain tensor as a matrix: its first dimension by the product of the others.
    fn place(&mut self, spec: TensorSpec, role: Role) -> Result<Tensor> {
        match &mut self.target {
            Target::Backend(upload) => upload.place(&spec, role, self.precision),
            Target::Manifest(list) => Ok(listed(list, spec)),
        }
    }

    /// Loads a linear layer without its bias. Some layers may have a quantized input, if the checkpoint asks for it. All other
    /// inputs have the precision of activations.
    fn layer(&mut self, spec: TensorSpec) -> Result<Linear> {
        match &mut self.target {
            Target::Backend(upload) => match self.quantize.filter(|_| spec.layer.is_some_and(LayerId::is_quantized_on_request)) {
                Some(format) => upload.quantized_layer(&spec, self.precision, (format, self.nvfp4_math)),
                None => upload.layer(&spec, self.precision, self.nvfp4_math),
            },
            Target::Manifest(list) => Ok(Linear { id: spec.layer, ..Linear::new(listed(list, spec), None) }),
        }
    }

    pub(super) fn vector(&mut self, name: &str, n: usize) -> Result<Tensor> {
        self.place(TensorSpec::new(name, &[n]), Role::Vector)
    }

    pub(super) fn norm(&mut self, id: LayerId, n: usize) -> Result<Tensor> {
        self.place(TensorSpec::norm(id, n), Role::Vector)
    }

    /// Loads the table of token embeddings, which stays in host memory.
    pub(super) fn table(&mut self, id: LayerId, rows: usize, cols: usize) -> Result<TokenTable> {
        let spec = TensorSpec::linear(id, &[rows], cols);
        match &mut self.target {
            Target::Backend(upload) => {
                let parts = upload.stored(&spec)?;
                upload.note_used(&spec, true)?;
                Ok(TokenTable::new(parts, rows, cols))
            }
            Target::Manifest(list) => {
                list.push(spec);
                Ok(TokenTable::new(Vec::new(), rows, cols))
            }
        }
    }

    /// Loads a linear layer without bias. Its rows may belong to several layers, which a checkpoint may store separately.
    pub(super) fn linear(&mut self, id: LayerId, stack: &[usize], input: usize) -> Result<Linear> {
        self.layer(TensorSpec::linear(id, stack, input))
    }

    /// Loads a linear layer with bias. `name` is the name of the layer.
    pub(super) fn linear_bias(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        self.biased(name, &[out, input])
    }

    /// Loads a 1x1 convolution, which is a linear layer over the channels of each pixel.
    pub(super) fn conv_1x1(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        self.biased(name, &[out, input, 1, 1])
    }

    fn biased(&mut self, name: &str, shape: &[usize]) -> Result<Linear> {
        let layer = self.layer(TensorSpec::new(format!("{name}.weight"), shape))?;
        Ok(Linear { bias: Some(self.vector(&format!("{name}.bias"), shape[0])?), ..layer })
    }

    pub(super) fn conv(&mut self, name: &str, out: usize, input: usize) -> Result<Conv> {
        self.filters(name, out, input, Role::Conv)
    }

    /// Loads a convolution after nearest-neighbor upsampling by two.
    pub(super) fn up_conv(&mut self, name: &str, out: usize, input: usize) -> Result<Conv> {
        self.filters(name, out, input, Role::UpConv)
    }

    fn filters(&mut self, name: &str, out: usize, input: usize, role: Role) -> Result<Conv> {
        let weight = self.place(TensorSpec::new(format!("{name}.weight"), &[out, input, 3, 3]), role)?;
        Ok(Conv { weight, bias: self.vector(&format!("{name}.bias"), out)? })
    }

    pub(super) fn group_norm(&mut self, name: &str, channels: usize, groups: usize, eps: f32) -> Result<GroupNorm> {
        let weight = self.vector(&format!("{name}.weight"), channels)?;
        Ok(GroupNorm { weight, bias: self.vector(&format!("{name}.bias"), channels)?, groups, eps })
    }

    pub(super) fn qk_norm(&mut self, q: LayerId, k: LayerId, head_dim: usize, eps: f32) -> Result<QkNorm> {
        Ok(QkNorm { q: self.norm(q, head_dim)?, k: self.norm(k, head_dim)?, eps })
    }

    /// The attention of a block. `layers` compute its queries and keys, and a norm with this gain normalizes them.
    pub(super) fn attention(&self, layers: &[&Linear], gain: &QkGain) -> Result<BlockAttention> {
        let gemms = match &self.target {
            Target::Backend(upload) => upload.backend.gemm_formats(),
            Target::Manifest(_) => GemmFormats::NONE,
        };
        BlockAttention::new(self.attention, gemms, self.precision, layers, gain)
    }

    /// The gains of a block's query norm and key norm.
    pub(super) fn qk_gain(&self, q: LayerId, k: LayerId, head_dim: usize) -> Result<QkGain> {
        let gain = |id| match &self.target {
            Target::Backend(upload) => Ok(NormGain::of(&upload.stored(&TensorSpec::norm(id, head_dim))?)),
            Target::Manifest(_) => Ok(NormGain::default()),
        };
        Ok(QkGain { q: gain(q)?, k: gain(k)? })
    }
}

/// The size of a tensor as a matrix: its first dimension by the product of the others.
fn extent(spec: &TensorSpec) -> (usize, usize) {
    match &spec.shape[..] {
        [n] => (1, *n),
        [rows, rest @ ..] => (*rows, rest.iter().product()),
        [] => (1, 1),
    }
}

/// Adds a tensor to a manifest. The returned descriptor has the tensor's shape, but no memory.
fn listed(list: &mut Vec<TensorSpec>, spec: TensorSpec) -> Tensor {
    let (rows, cols) = extent(&spec);
    list.push(spec);
    Tensor { region: Region::Weights, dtype: DType::Bf16, offset: 0, rows, cols, stride: cols, scaling: Scaling::Unscaled }
}

/// The type of a matrix of plain elements. f32 precision keeps the stored type, which every op reads exactly, but expands
/// quantized values.
fn plain_dtype(parts: &[WeightSlice], precision: Precision) -> DType {
    match precision {
        Precision::Bf16 => DType::Bf16,
        Precision::F32 => {
            let stored = parts.first().map_or(DType::Bf16, |part| part.dtype);
            if parts.iter().all(|part| part.dtype == stored) && !stored.is_quantized() { stored } else { DType::F32 }
        }
    }
}

/// The formats of a weight that was loaded from these parts. A dry run without a checkpoint has no parts.
fn part_formats(parts: &[WeightSlice], weight: &Weight) -> Vec<PartFormat> {
    let held = |tensor: Tensor| (tensor.dtype, tensor.bytes());
    if parts.is_empty() {
        // A checkpoint would hold plain values.
        let format = |tensor: &Tensor| {
            let stored = if tensor.dtype.is_quantized() { DType::Bf16 } else { tensor.dtype };
            let stored_bytes = stored.bytes(tensor.len()) as u64;
            PartFormat { stored, held: tensor.dtype, stored_bytes, held_bytes: tensor.bytes() }
        };
        return weight.parts().iter().map(format).collect();
    }
    let mut first = 0;
    let mut format = |part: &WeightSlice| {
        // One tensor holds all parts if they are expanded to the same type.
        let rows = weight.slice(first..first + part.rows);
        first += part.rows;
        let (held, held_bytes) = held(rows.parts()[0]);
        PartFormat { stored: part.dtype, held, stored_bytes: part.stored_bytes(), held_bytes }
    };
    parts.iter().map(&mut format).collect()
}

/// Joins several tensors into one weight.
fn stacked(spec: &TensorSpec, tensors: &[Tensor]) -> Result<Weight> {
    Weight::stack(tensors).ok_or_else(|| Error::Op { op: "load", what: format!("the parts of `{}`", spec.name) })
}

impl Upload<'_> {
    fn place(&mut self, spec: &TensorSpec, role: Role, precision: Precision) -> Result<Tensor> {
        let parts = self.stored(spec)?;
        let dtype = match (role, precision) {
            // Vectors are few and always f32. So are sums of filter taps in f32 precision: the type of the taps would round them.
            (Role::Vector, _) | (Role::UpConv, Precision::F32) => DType::F32,
            (Role::Linear | Role::Conv | Role::UpConv, _) => plain_dtype(&parts, precision),
        };
        let (rows, cols) = match (role, extent(spec)) {
            (Role::UpConv, (rows, cols)) => (rows, cols / 9 * 16),
            (Role::Linear | Role::Conv | Role::Vector, extent) => extent,
        };
        let tensor = self.upload(role, [rows, cols], Stored::plain(dtype), &parts)?;
        if !may_be_zero(&spec.name) {
            self.note_used(spec, false)?;
        }
        Ok(tensor)
    }

    fn layer(&mut self, spec: &TensorSpec, precision: Precision, math: Nvfp4Math) -> Result<Linear> {
        let is_produced = spec.layer.and_then(LayerId::producer).is_some();
        let (rows, cols) = extent(spec);
        let (parts, wanted, inputs_differ) = match self.source {
            Some(source) => {
                let weight = source.weight(spec)?;
                (weight.parts, weight.input, weight.inputs_differ)
            }
            None => Default::default(),
        };
        let gemms = self.backend.gemm_formats();
        // A layer that asks for an NVFP4 input has only NVFP4 parts.
        let reencoded = math.fp8_input(wanted.filter(|_| is_produced), gemms, precision)?;
        let input = match (wanted, reencoded) {
            (_, Some(input)) => Ok(input),
            _ if !is_produced => Err(PlainInput::Model),
            _ if precision == Precision::F32 => Err(PlainInput::Precision),
            (None, _) if inputs_differ => Err(PlainInput::Parts),
            (None, _) => Err(PlainInput::File),
            (Some(input), _) if input.dtype == DType::E2m1 && math == Nvfp4Math::Bf16 => Err(PlainInput::Asked),
            (Some(input), _) if !parts.iter().all(|part| gemms.takes(part.dtype, input.dtype)) => Err(PlainInput::Device),
            (Some(input), _) => Ok(input),
        };
        let is_quantized = parts.iter().any(|part| part.dtype.is_quantized());
        let why = input.err().filter(|_| is_quantized);
        let plain = Stored::plain(precision.activations());
        let input = input.unwrap_or(plain);
        let is_kept = |part: &WeightSlice| part.dtype.is_quantized() && gemms.takes(part.dtype, input.dtype);
        let stays = reencoded.is_some() || parts.iter().any(is_kept);
        if self.merges(spec, stays)? {
            let weight = match self.merged_by_backend(spec, &parts, plain)? {
                Some(merged) => merged,
                None => {
                    let merged = self.merged(spec, &parts, plain.dtype);
                    self.upload(Role::Linear, [rows, cols], plain, &merged)?
                }
            };
            let weight = Weight::new(weight);
            let why = is_quantized.then_some(PlainInput::Adapter);
            return self.loaded_layer(spec, &parts, weight, plain, why, true);
        }
        let weight = if stays {
            // Every part has its own tensor: in the file's format, re-encoded or expanded.
            let each = parts.iter().map(|part| {
                let one = std::slice::from_ref(part);
                let stored = match reencoded {
                    Some(_) => part.as_fp8().ok_or_else(|| refused(&format!("the scale of `{}` is beyond f32", spec.name)))?,
                    None if is_kept(part) => part.stored(),
                    None => Stored::plain(plain_dtype(one, precision)),
                };
                self.upload(Role::Linear, [part.rows, cols], stored, one)
            });
            stacked(spec, &each.collect::<Result<Vec<_>>>()?)?
        } else {
            Weight::new(self.upload(Role::Linear, [rows, cols], Stored::plain(plain_dtype(&parts, precision)), &parts)?)
        };
        self.loaded_layer(spec, &parts, weight, input, why, false)
    }

    /// Loads a layer and quantizes its weight, each part with its own scales.
    fn quantized_layer(&mut self, spec: &TensorSpec, precision: Precision, (format, math): (DType, Nvfp4Math)) -> Result<Linear> {
        let refused = |why: String| quantize::refused(format, &why);
        let (parts, (rows, cols)) = (self.stored(spec)?, extent(spec));
        if let Some(part) = parts.iter().find(|part| part.dtype.is_quantized()) {
            return Err(refused(format!("`{}` is stored as {} already", spec.name, part.dtype.name())));
        }
        let Format { block, scales, .. } = format.format();
        if !cols.is_multiple_of(*block) {
            return Err(refused(format!("`{}` has {cols} columns, which is not a multiple of {block}", spec.name)));
        }
        let producer = spec.layer.and_then(LayerId::producer);
        let input = quantize::input(format, producer, self.backend.gemm_formats(), precision, math)?;
        let merges = self.merges(spec, true)?;
        let own = if merges && !self.shapes_only { self.merged(spec, &parts, DType::F32) } else { parts.clone() };
        let stored = |part: &[WeightSlice]| {
            let has_tensor_scale = *scales == ScaleKind::Blocks && !self.shapes_only;
            let scale = if has_tensor_scale { format.scale_for(largest_magnitude(part)) } else { Some(Scale::ONE) };
            let scale = scale.ok_or_else(|| refused(format!("`{}` has values that are not finite", spec.name)))?;
            Ok(Stored::by_rows(format, scale))
        };
        let parts_of = match &own[..] {
            [] => vec![(rows, &own[..])],
            parts => parts.iter().map(|part| (part.rows, std::slice::from_ref(part))).collect(),
        };
        let formats = parts_of.iter().map(|(_, part)| stored(part)).collect::<Result<Vec<_>>>()?;
        let each =
            parts_of.iter().zip(formats).map(|(&(rows, part), stored)| self.upload(Role::Linear, [rows, cols], stored, part));
        let weight = stacked(spec, &each.collect::<Result<Vec<_>>>()?)?;
        let (why, input) = (input.err(), input.unwrap_or(Stored::plain(precision.activations())));
        self.loaded_layer(spec, &parts, weight, input, why, merges)
    }

    /// Whether adapters are merged into a layer's weight. Otherwise they become a LoRA branch, or there are none. `stays` says
    /// whether some of the weight stays quantized if not merged.
    fn merges(&self, spec: &TensorSpec, stays: bool) -> Result<bool> {
        let (Some(Added { adapters, mode, .. }), Some(id)) = (self.adapters, spec.layer) else { return Ok(false) };
        let Some(rank) = adapters.rank(id, extent(spec).into())? else { return Ok(false) };
        match mode {
            AdapterMode::Merge => Ok(true),
            AdapterMode::Auto => Ok(!stays || rank > MAX_RANK),
            AdapterMode::Branch if rank <= MAX_RANK => Ok(false),
            AdapterMode::Branch => Err(Error::Usage {
                what: format!("adapters add a rank of {rank} to `{}`; a LoRA branch has at most {MAX_RANK}", spec.name),
                hint: Some(Remedy::MergeAdapters),
            }),
        }
    }

    /// Uploads a weight and merges its adapters on the backend, if the backend has its own memory. The GEMM runs while the next
    /// weight is copied. `None` if the weight needs a conversion before its upload, or has adapters of too high a rank.
    fn merged_by_backend(&mut self, spec: &TensorSpec, parts: &[WeightSlice], to: Stored) -> Result<Option<Tensor>> {
        let (Some(Added { adapters, room_at, .. }), Some(id)) = (self.adapters, spec.layer) else { return Ok(None) };
        if self.shapes_only || self.source.is_none() || self.backend.reads_files() {
            return Ok(None);
        }
        let shape: [usize; 2] = extent(spec).into();
        let is_added = |rank: &usize| Adapters::is_added_in_place(*rank, parts.iter().map(|part| [part.dtype, to.dtype]));
        let Some(rank) = adapters.rank(id, shape)?.filter(is_added) else { return Ok(None) };
        let (rank, mut room) = (Adapters::padded(rank), Arena::starting_at(Region::Adapters, room_at));
        let tensors = Adapters::place_factors(&mut room, rank, shape)?;
        let weight = self.upload(Role::Linear, shape, to, parts)?;
        let factors = adapters.factors(id, rank, shape);
        for (tensor, values) in tensors.into_iter().zip(&factors) {
            self.backend.write(tensor, values)?;
        }
        let [up, down] = tensors;
        let down = Linear { input: Stored::plain(down.dtype), ..Linear::new(down, None) };
        self.backend.run(Op::LinearGateResidual(&[GatedGemm { into: weight, x: up, w: &down, gate: None }]))?;
        Ok(Some(weight))
    }

    /// A weight with its adapters merged. A dry run has no values: its result is parts of another type, which count as copied.
    fn merged(&mut self, spec: &TensorSpec, parts: &[WeightSlice], to: DType) -> Vec<WeightSlice> {
        match (self.adapters.filter(|_| !self.shapes_only), spec.layer) {
            (Some(Added { adapters, .. }), Some(id)) => self.merger.merged(adapters, id, parts, to),
            _ => {
                let other = if to == DType::F32 { DType::Bf16 } else { DType::F32 };
                vec![WeightSlice::plain(Bytes::new(Arc::new([])), other, extent(spec).0)]
            }
        }
    }

    /// Records the formats of a layer that was loaded from these parts.
    fn loaded_layer(
        &mut self,
        spec: &TensorSpec,
        parts: &[WeightSlice],
        weight: Weight,
        input: Stored,
        why: Option<PlainInput>,
        merged: bool,
    ) -> Result<Linear> {
        self.note_used(spec, false)?;
        if let Some(id) = spec.layer {
            let parts = part_formats(parts, &weight);
            self.formats.push(LayerFormat { id, weight, parts, input: input.dtype, why, merged });
        }
        Ok(Linear { id: spec.layer, weight, bias: None, input, lora: None })
    }

    /// Allocates a tensor and uploads the parts that it consists of.
    fn upload(&mut self, role: Role, [rows, cols]: [usize; 2], stored: Stored, parts: &[WeightSlice]) -> Result<Tensor> {
        let tensor = self.region.alloc_stored(rows, cols, stored)?;
        if self.source.is_some() {
            self.backend.upload(tensor, role, parts)?;
        }
        (self.loaded)(tensor.bytes());
        Ok(tensor)
    }

    /// Checks the scales of weights that are used, and marks the weights for the check for parts that were never written.
    fn note_used(&mut self, spec: &TensorSpec, is_table: bool) -> Result<()> {
        let Some(source) = self.source.filter(|_| self.verify_written) else { return Ok(()) };
        source.check_scales(&spec.name)?;
        source.note_used(&spec.name, is_table);
        // A backend that copies has just read all of it. For files used in place, the first ops read the pages.
        if self.backend.reads_files() { Ok(()) } else { source.check_written() }
    }

    /// A tensor as stored in the checkpoint; empty without a checkpoint.
    fn stored(&self, spec: &TensorSpec) -> Result<Vec<WeightSlice>> {
        let Some(source) = self.source else { return Ok(Vec::new()) };
        Ok(source.weight(spec)?.parts)
    }
}
