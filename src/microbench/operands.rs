//! The operands of benchmarked ops: formats, allocation and values.

use crate::backend::{Backend, Linear, Modulated, Op, Role, repeat_rows};
use crate::error::Result;
use crate::tensor::{Arena, Bytes, DType, Nvfp4Layout, Region, Scale, Scaling, SliceScaling, Stored, Tensor, WeightSlice, nvfp4};
use std::sync::Arc;

/// The storage formats of a row's operands.
#[derive(Clone, Copy, Debug)]
pub struct RowFormat {
    /// Type of plain activations.
    pub activations: DType,
    /// Type of the weights of linear layers: bf16, e4m3 with a scale, or e2m1 with NVFP4 scales.
    pub weights: DType,
    /// Type in which the inputs of linear layers are stored: the type of activations, e4m3 (queries and keys are e4m3 then, too), or e2m1
    /// with NVFP4 scales.
    pub inputs: DType,
}

/// The operands of all sets of a row. Descriptors are collected first, and memory is allocated when all are known.
pub struct Operands {
    formats: RowFormat,
    weights: Arena,
    arena: Arena,
    placed: Vec<(Tensor, Role)>,
    inputs: Vec<Tensor>,
    /// e4m3 inputs, each with the scale for random values of about one.
    e4m3: Vec<(Tensor, Scale)>,
    /// NVFP4 inputs.
    nvfp4: Vec<Tensor>,
}

/// Period of the random values. It is a prime, so that rows differ.
const PERIOD: usize = 1_000_003;

/// Scale of the e4m3 inputs of linear layers: values up to seven.
const INPUT_SCALE: f32 = 1.0 / 64.0;
/// Scale of NVFP4 inputs: values up to ten, as block scales go up to 448 and elements to six.
const NVFP4_INPUT_SCALE: f32 = 1.0 / 256.0;
/// The largest magnitude of weights, in all formats.
const WEIGHT_SIZE: f32 = 0.1;
/// Size of queries and keys. They have a scale of one and about a third of the size of other values, which gives scores of the usual size.
const HEAD_SIZE: f32 = 0.33;
/// Rows that are normalized at a time to make NVFP4 inputs: whole scale tiles.
const NVFP4_ROWS: usize = 8 * nvfp4::TILE_ROWS;
/// Columns of the norm that makes e4m3 inputs.
const FILL_COLS: usize = 1024;

fn scale(value: f32) -> Scale {
    Scale::new(value).unwrap_or(Scale::ONE)
}

impl Operands {
    pub fn new(formats: RowFormat) -> Self {
        let (weights, arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        Self { formats, weights, arena, placed: Vec::new(), inputs: Vec::new(), e4m3: Vec::new(), nvfp4: Vec::new() }
    }

    /// Allocates a result.
    pub fn output(&mut self, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        self.arena.alloc(rows, cols, dtype)
    }

    pub fn input(&mut self, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        let tensor = self.arena.alloc(rows, cols, dtype)?;
        self.inputs.push(tensor);
        Ok(tensor)
    }

    pub fn activations(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.input(rows, cols, self.formats.activations)
    }

    /// Allocates a result with the dtype of activations.
    pub fn results(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.output(rows, cols, self.formats.activations)
    }

    /// The format in which linear layers expect their inputs.
    fn input_format(&self) -> Stored {
        let dtype = self.formats.inputs;
        Stored::scaled(dtype, scale(if dtype == DType::E2m1 { NVFP4_INPUT_SCALE } else { INPUT_SCALE }))
    }

    /// The format in which queries and keys are stored.
    fn head_format(&self) -> Stored {
        match self.formats.inputs {
            DType::E4m3 => Stored::fp8(Scale::ONE),
            _ => Stored::plain(self.formats.activations),
        }
    }

    /// Allocates an input of a linear layer.
    pub fn layer_input(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.input_stored(rows, cols, self.input_format(), INPUT_SCALE)
    }

    /// Allocates a result that is the input of a linear layer.
    pub fn layer_output(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.arena.alloc_stored(rows, cols, self.input_format())
    }

    /// Allocates queries or keys that are read.
    pub fn heads(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.input_stored(rows, cols, self.head_format(), 1.0 / HEAD_SIZE)
    }

    /// Allocates queries or keys that are written.
    pub fn head_output(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.arena.alloc_stored(rows, cols, self.head_format())
    }

    fn input_stored(&mut self, rows: usize, cols: usize, stored: Stored, fill: f32) -> Result<Tensor> {
        if !stored.dtype.is_quantized() {
            return self.input(rows, cols, stored.dtype);
        }
        let tensor = self.arena.alloc_stored(rows, cols, stored)?;
        match stored.dtype {
            DType::E2m1 => self.nvfp4.push(tensor),
            _ => self.e4m3.push((tensor, scale(fill))),
        }
        Ok(tensor)
    }

    pub fn weight(&mut self, rows: usize, cols: usize, dtype: DType, role: Role) -> Result<Tensor> {
        self.weight_stored(rows, cols, Stored::plain(dtype), role)
    }

    fn weight_stored(&mut self, rows: usize, cols: usize, stored: Stored, role: Role) -> Result<Tensor> {
        let tensor = self.weights.alloc_stored(rows, cols, stored)?;
        self.placed.push((tensor, role));
        Ok(tensor)
    }

    pub fn linear(&mut self, rows: usize, cols: usize) -> Result<Linear> {
        let dtype = self.formats.weights;
        let stored = Stored::scaled(dtype, scale(WEIGHT_SIZE / dtype.format().largest));
        let weight = self.weight_stored(rows, cols, stored, Role::Linear)?;
        Ok(Linear { input: self.input_format(), ..Linear::new(weight, None) })
    }

    /// Allocates a norm weight, a bias or a variance, with values around one.
    pub fn vector(&mut self, cols: usize) -> Result<Tensor> {
        self.weight(1, cols, DType::F32, Role::Vector)
    }

    /// Bytes of all operands.
    pub fn bytes(&self) -> u64 {
        self.weights.peak() + self.arena.peak()
    }

    /// Reserves memory and initializes the operands that ops read.
    pub fn fill(&mut self, be: &mut dyn Backend) -> Result<()> {
        let noise = noise();
        let times = |factor: f32| noise.iter().map(|v| factor * v).collect::<Vec<_>>();
        let weights = DType::Bf16.encoded(&times(WEIGHT_SIZE));
        // The codes of quantized weights, and the block scales of NVFP4.
        let (codes, blocks) = match self.formats.weights {
            DType::E4m3 => (DType::E4m3.encoded(&times(448.0)), Vec::new()),
            DType::E2m1 => {
                let positive: Vec<f32> = noise.iter().map(|v| 448.0 * v.abs()).collect();
                // A whole number of bytes, each with two elements.
                (DType::E2m1.encoded(&times(6.0)[..PERIOD - 1]), DType::E4m3.encoded(&positive))
            }
            _ => (Vec::new(), Vec::new()),
        };
        let vectors = DType::F32.encoded(&noise.iter().map(|v| 1.0 + 0.5 * v).collect::<Vec<_>>());
        be.reserve(Region::Weights, self.weights.peak())?;
        for &(to, role) in &self.placed {
            // Each weight gets its own bytes, because the CPU backend reads them in place.
            let block = match to.dtype {
                DType::F32 => &vectors,
                DType::E4m3 | DType::E2m1 => &codes,
                _ => &weights,
            };
            let owned = |block: &[u8], len: usize| Bytes::new(Arc::new(repeated(block, len)));
            // Files store nine taps of every filter, and an upsampling convolution makes sixteen of them.
            let stored = if role == Role::UpConv { to.len() / 16 * 9 } else { to.len() };
            let bytes = owned(block, to.dtype.bytes(stored));
            let scaling = match to.scaling {
                Scaling::Tensor(scale) => SliceScaling::Tensor(scale),
                Scaling::Blocks16 { tensor, .. } => {
                    let scales = owned(&blocks, nvfp4::scale_bytes(to.rows, to.cols));
                    SliceScaling::Blocks16 { scales, tensor, layout: Nvfp4Layout::COMFY }
                }
                _ => SliceScaling::Unscaled,
            };
            be.upload(to, role, &[WeightSlice { scaling, ..WeightSlice::plain(bytes, to.dtype, to.rows) }])?;
        }
        let source = self.norm_source()?;
        let rows = self.nvfp4.iter().map(|t| t.rows).max().unwrap_or(0).min(NVFP4_ROWS);
        let widths: Vec<usize> = self.nvfp4.iter().map(|t| t.cols).collect();
        let sources = widths.into_iter().map(|cols| self.modulated(rows, cols)).collect::<Result<Vec<_>>>()?;
        be.reserve(Region::Arena, self.arena.peak())?;
        for &to in &self.inputs {
            // The host uploads only some rows. The rest are copies.
            let filled = (PERIOD / to.cols).clamp(1, to.rows);
            be.write(to.rows(0..filled), &repeated(&noise, filled * to.cols))?;
            repeat_rows(be, to, filled)?;
        }
        if let Some(source) = source {
            self.e4m3.iter().try_for_each(|&(to, scale)| normalize_into(be, to, scale, source))?;
        }
        for (to, source) in self.nvfp4.iter().zip(sources) {
            for first in (0..to.rows).step_by(NVFP4_ROWS) {
                let out = to.rows(first..to.rows.min(first + NVFP4_ROWS));
                let streams = [Modulated { out, x: source.x.rows(0..out.rows), ..source }];
                be.run(Op::LayerNormModulate { streams: &streams, eps: 1e-6 })?;
            }
        }
        be.synchronize()
    }

    /// Allocates the operands of the norm that makes e4m3 inputs, if there are any: only ops can write e4m3.
    fn norm_source(&mut self) -> Result<Option<Modulated>> {
        let Some(longest) = self.e4m3.iter().map(|(tensor, _)| tensor.len()).max() else { return Ok(None) };
        let rows = longest.div_ceil(FILL_COLS).min(PERIOD / FILL_COLS);
        self.modulated(rows, FILL_COLS).map(Some)
    }

    /// Allocates the operands of a norm.
    fn modulated(&mut self, rows: usize, cols: usize) -> Result<Modulated> {
        let (x, shift) = (self.activations(rows, cols)?, self.activations(1, cols)?);
        Ok(Modulated { out: x, x, shift, scale: shift })
    }
}

/// Fills an e4m3 tensor with normalized values, stored with `scale`. It is treated as one long row, cut into rows as long as in `source`.
fn normalize_into(be: &mut dyn Backend, to: Tensor, scale: Scale, source: Modulated) -> Result<()> {
    let (cols, scaling) = (FILL_COLS.min(to.len()), Scaling::Tensor(scale));
    let whole = Tensor { rows: to.len() / cols, cols, stride: cols, scaling, ..to };
    let rest = Tensor { offset: to.offset + whole.len() as u64, rows: 1, cols: to.len() - whole.len(), ..whole };
    let mut norm = |out: Tensor| {
        let of = |t: Tensor| t.rows(0..t.rows.min(out.rows)).cols(0..out.cols);
        let streams = [Modulated { out, x: of(source.x), shift: of(source.shift), scale: of(source.scale) }];
        be.run(Op::LayerNormModulate { streams: &streams, eps: 1e-6 })
    };
    let mut first = 0;
    while first < whole.rows {
        let end = whole.rows.min(first + source.x.rows);
        norm(whole.rows(first..end))?;
        first = end;
    }
    if rest.is_empty() { Ok(()) } else { norm(rest) }
}

/// `len` values that repeat a block.
fn repeated<T: Copy>(block: &[T], len: usize) -> Vec<T> {
    let mut values = Vec::with_capacity(len);
    while values.len() < len {
        values.extend_from_slice(&block[..block.len().min(len - values.len())]);
    }
    values
}

/// Values in -1..1 from a linear congruential generator.
fn noise() -> Vec<f32> {
    let mut state = 1u32;
    (0..PERIOD)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}
