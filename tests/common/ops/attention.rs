//! The cases of attention: logits of every magnitude, several KV segments, causal masks, queries and keys in e4m3, and results in several
//! row ranges with formats of their own.

use super::cases::{BF16, Table};
use super::oracle::{self, Rounding};
use super::{Check, Expected, Mat, Operand, Rig, fp8_sums, stored};
use kiln::internals::backend::{KvSegment, Op, Softmax};
use kiln::internals::tensor::DType::{Bf16, E4m3};
use kiln::internals::tensor::{Scale, Stored, Tensor};
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// Queries, keys of each KV segment, query heads, KV heads, head dimension, causal mask.
pub type Shape = (usize, &'static [usize], usize, usize, usize, bool);

/// The magnitude of the logits, and the bound that the test passes to the op.
#[derive(Clone, Copy, PartialEq)]
pub enum Scores {
    /// A few keys dominate, so that the running maximum of online softmax matters.
    Usual,
    /// Nearly as large as usual, with a bound.
    Bounded,
    /// As large as norm gains of ten make them.
    Huge,
    /// All equal and with a bound, near the largest logits that the max-free softmax supports.
    Highest,
    /// All equal and with a bound, near the smallest logits that the max-free softmax supports.
    Lowest,
}

/// How queries and keys are stored.
#[derive(Clone, Copy)]
pub enum Heads {
    /// Like the values.
    Plain,
    /// In e4m3 with these scales: one for queries, and two that alternate between key segments.
    E4m3 { q: f32, k: [f32; 2] },
}

impl Heads {
    /// As the model stores them.
    pub const UNSCALED: Self = Self::E4m3 { q: 1.0, k: [1.0; 2] };
    /// Query and key scales, whose product is the factor of all logits.
    const SCALED: Self = Self::E4m3 { q: 0.37, k: [0.0071; 2] };
    /// Two key scales, so the factor of a logit depends on its segment.
    const MIXED: Self = Self::E4m3 { q: 0.37, k: [0.0071, 0.013] };

    /// The text for case names.
    fn name(self) -> String {
        match self {
            Self::Plain => String::new(),
            Self::E4m3 { q: 1.0, k: [1.0, 1.0] } => " of e4m3".into(),
            Self::E4m3 { q, k: [first, second] } if first == second => format!(" of e4m3 by {q} and {first}"),
            Self::E4m3 { q, k: [first, second] } => format!(" of e4m3 by {q} and {first} or {second}"),
        }
    }

    fn queries(self, rig: &Rig<'_>) -> Stored {
        match self {
            Self::Plain => rig.plain(),
            Self::E4m3 { q, .. } => fp8(q),
        }
    }

    fn keys(self, rig: &Rig<'_>, segment: usize) -> Stored {
        match self {
            Self::Plain => rig.plain(),
            Self::E4m3 { k, .. } => fp8(k[segment % 2]),
        }
    }
}

/// e4m3 with this scale.
pub fn fp8(scale: f32) -> Stored {
    Stored::fp8(Scale::new(scale).unwrap())
}

/// All cases.
pub fn all(table: &mut Table) {
    let shapes: [Shape; 19] = [
        (1, &[1], 1, 1, 128, false),
        (1, &[129], 4, 2, 128, false),
        (113, &[1], 2, 2, 64, false),
        (7, &[113], 4, 2, 64, false),
        (257, &[600], 2, 2, 128, false),
        (130, &[129, 0, 7], 3, 3, 128, false),
        (7, &[0, 1031], 1, 1, 128, false),
        (113, &[512, 1], 1, 1, 512, false),
        (1, &[1], 1, 1, 512, false),
        (65, &[33], 2, 1, 512, false),
        (257, &[600], 1, 1, 512, false),
        // A single head, narrower than the kernels for wide heads expect.
        (130, &[200], 1, 1, 384, false),
        (70, &[130], 1, 1, 456, false),
        (65, &[33], 1, 1, 136, false),
        (1, &[1], 1, 1, 64, true),
        (129, &[129], 4, 2, 128, true),
        (130, &[7], 2, 1, 64, true),
        (7, &[113], 2, 1, 64, true),
        (601, &[601], 1, 1, 64, true),
    ];
    shapes.into_iter().for_each(|shape| attend(table, shape, Scores::Usual, Heads::Plain));
    // Shapes for three kinds of kernels: on whole tiles, with split tiles, and with bounded logits.
    let more: [Shape; 6] = [
        (1, &[1], 1, 1, 128, false),
        (257, &[600], 2, 2, 128, false),
        (130, &[129, 0, 7], 3, 3, 128, false),
        (40, &[129, 255, 1, 128], 2, 1, 128, false),
        (513, &[1409], 1, 1, 128, false),
        (300, &[300], 2, 2, 128, false),
    ];
    let masked: [Shape; 4] =
        [(130, &[130], 4, 1, 128, true), (300, &[26], 8, 2, 128, true), (33, &[33], 2, 2, 128, true), (1, &[1], 4, 1, 128, true)];
    for scores in [Scores::Bounded, Scores::Huge] {
        more.into_iter().for_each(|shape| attend(table, shape, scores, Heads::Plain));
    }
    // A wide head: whole tiles, and row maxima that rise. The keys of the last KV block fill one half of it, or reach into both.
    attend(table, (128, &[256], 1, 1, 512, false), Scores::Usual, Heads::Plain);
    attend(table, (130, &[400], 1, 1, 512, false), Scores::Huge, Heads::Plain);
    for head in [384, 512] {
        attend(table, (5, &[600], 1, 1, head, false), Scores::Huge, Heads::Plain);
    }
    for heads in [Heads::Plain, Heads::UNSCALED] {
        for scores in [Scores::Highest, Scores::Lowest] {
            attend(table, (130, &[129, 0, 300], 2, 1, 128, false), scores, heads);
        }
    }
    more[1..4].iter().for_each(|&shape| attend(table, shape, Scores::Bounded, Heads::UNSCALED));
    attend(table, (1, &[129], 4, 2, 128, false), Scores::Bounded, Heads::UNSCALED);
    // Sums of e4m3 products are exact in f32, unless the queries are multiplied by the logit factor first.
    let variants = std::mem::replace(&mut table.variants, BF16);
    more[1..4].iter().for_each(|&shape| attend(table, shape, Scores::Huge, Heads::UNSCALED));
    table.variants = variants;
    for scores in [Scores::Usual, Scores::Huge] {
        masked.into_iter().for_each(|shape| attend(table, shape, scores, Heads::Plain));
    }
    // Scales must also count where logits are bounded. Keys with several scales, masks and other heads take the naive kernel.
    for heads in [Heads::SCALED, Heads::MIXED] {
        for scores in [Scores::Usual, Scores::Bounded] {
            attend(table, (130, &[129, 0, 7, 40], 2, 1, 128, false), scores, heads);
        }
    }
    attend(table, (33, &[33], 2, 2, 128, true), Scores::Usual, Heads::SCALED);
    attend(table, (7, &[113], 4, 2, 64, false), Scores::Usual, Heads::UNSCALED);
    ranges(table);
}

/// Row ranges of a result, each in its own format; `None` is the format of the case.
pub type Ranges = Vec<(usize, Option<Stored>)>;

fn ranges(table: &mut Table) {
    for (rows, d) in [(vec![5, 0, 130], 128), (vec![1, 7], 64)] {
        for (layout, adjacent) in [("apart", false), ("adjacent", true)] {
            let plain = rows.iter().map(|&rows| (rows, None)).collect();
            into_ranges(table, &format!("{rows:?} rows {layout}"), plain, d, Heads::Plain, adjacent);
        }
    }
    let (fine, other, clipped) = (fp8(0.0123), fp8(0.0071), fp8(0.000_31));
    let all: [(&str, Ranges); 7] = [
        ("e4m3", vec![(130, Some(fine))]),
        ("clipped e4m3", vec![(37, Some(clipped))]),
        ("e4m3 twice", vec![(5, Some(fine)), (0, Some(fine)), (131, Some(fine))]),
        // The ranges share rows of one warp, and of one tile.
        ("e4m3 with two scales", vec![(5, Some(fine)), (131, Some(other))]),
        ("plain and clipped e4m3", vec![(70, None), (59, Some(clipped))]),
        ("e4m3 and plain", vec![(131, Some(other)), (6, None)]),
        // More ranges than a launch takes.
        ("e4m3, plain and e4m3", vec![(19, Some(fine)), (129, None), (3, Some(other))]),
    ];
    for (name, ranges) in all {
        for (heads, d) in [(Heads::Plain, 64), (Heads::Plain, 128), (Heads::UNSCALED, 128)] {
            into_ranges(table, name, ranges.clone(), d, heads, false);
        }
    }
}

/// Keys and values of a case: tensors, and their values on the host.
struct KeyValues {
    tensors: Vec<KvSegment>,
    hosts: Vec<(Mat, Mat)>,
}

impl KeyValues {
    /// KV segments of these numbers of keys; keys are `f` of values in -1..1.
    fn new(rig: &mut Rig<'_>, keys: &[usize], cols: usize, heads: Heads, f: impl Fn(f32) -> f32) -> Self {
        let segment = |(i, &rows): (usize, &usize)| {
            let format = heads.keys(rig, i);
            (rig.input_stored(format, rows, cols, &f), rig.input(rows, cols, |v| v))
        };
        let segments: Vec<(Operand, Operand)> = keys.iter().enumerate().map(segment).collect();
        let tensors = segments.iter().map(|(k, v)| KvSegment { k: k.t, v: v.t }).collect();
        Self { tensors, hosts: segments.into_iter().map(|(k, v)| (k.host, v.host)).collect() }
    }
}

/// Adds a case with one result, in the format of the case.
pub fn attend(table: &mut Table, (queries, keys, q_heads, k_heads, d, causal): Shape, scores: Scores, heads: Heads) {
    let mask = if causal { "_causal" } else { "" };
    let kind = match scores {
        Scores::Usual => "",
        Scores::Bounded => " bounded",
        Scores::Huge => " huge",
        Scores::Highest => " highest",
        Scores::Lowest => " lowest",
    };
    let name = format!("attention{mask}{}{kind} {queries} queries {keys:?} keys {q_heads}:{k_heads} heads of {d}", heads.name());
    table.add(name, move |rig| {
        let (alike, unknown) =
            (matches!(scores, Scores::Highest | Scores::Lowest), matches!(scores, Scores::Usual | Scores::Huge));
        let usual = 1.0 / (d as f32).sqrt();
        let large = match scores {
            Scores::Usual => 6.0,
            Scores::Bounded => 4.0,
            Scores::Huge => 100.0,
            Scores::Highest | Scores::Lowest => 96.0 * LN_2 * usual,
        };
        // Inputs are at most one before they are scaled.
        let softmax = if unknown { Softmax::Natural { scale: usual } } else { Softmax::Base2 { bound: LOG2_E * large / usual } };
        let scale = softmax.natural_scale();
        let large = large * usual / scale * if scores == Scores::Lowest { -1.0 } else { 1.0 };
        let value = move |v| if alike { 1.0 } else { v };
        let q = rig.input_stored(heads.queries(rig), queries, q_heads * d, move |v| large * value(v));
        let out = rig.output(queries, q_heads * d);
        let kv = KeyValues::new(rig, keys, k_heads * d, heads, value);
        let attended = Attended::new(&q, &kv, (d, scale), causal);
        let op = Op::Attention { out: &[out], q: q.t, kv: &kv.tensors, head_dim: d, causal, softmax };
        rig.run(op, &[(out, Box::new(|format| attended.expected(format, 0..queries)))]);
    });
}

/// Adds a case with results in several row ranges, adjacent in one buffer or in a buffer each.
pub fn into_ranges(table: &mut Table, name: &str, ranges: Ranges, d: usize, heads: Heads, adjacent: bool) {
    table.add(format!("attention{} into {name}, 2:1 heads of {d}", heads.name()), move |rig| {
        let (rows, cols) = (ranges.iter().map(|range| range.0).sum(), 2 * d);
        // Both kinds of softmax store their results in ranges.
        let bound = if matches!(heads, Heads::Plain) { f32::INFINITY } else { d as f32 / 2.0 };
        let softmax = Softmax::Base2 { bound };
        let q = rig.input_stored(heads.queries(rig), rows, cols, |v| 0.5 * v);
        let kv = KeyValues::new(rig, &[40, 27], d, heads, |v| v);
        let whole = adjacent.then(|| rig.output(rows, cols));
        let mut first = 0;
        let mut place = |&(rows, format): &(usize, Option<Stored>)| {
            first += rows;
            whole.map_or_else(
                || rig.output_stored(format.unwrap_or(rig.plain()), rows, cols),
                |whole| whole.rows(first - rows..first),
            )
        };
        let out: Vec<Tensor> = ranges.iter().map(&mut place).collect();
        let attended = &Attended::new(&q, &kv, (d, softmax.natural_scale()), false);
        let mut first = 0;
        let mut checks: Vec<Check<'_>> = Vec::new();
        for &out in &out {
            let range = first..first + out.rows;
            first = range.end;
            checks.push((out, Box::new(move |format| attended.expected(format, range.clone()))));
        }
        let op = Op::Attention { out: &out, q: q.t, kv: &kv.tensors, head_dim: d, causal: false, softmax };
        rig.run(op, &checks);
    });
}

/// The host's values of a case.
struct Attended<'a> {
    q: &'a Operand,
    kv: &'a KeyValues,
    /// The head dimension, and the factor of logits.
    shape: (usize, f32),
    causal: bool,
}

impl<'a> Attended<'a> {
    fn new(q: &'a Operand, kv: &'a KeyValues, shape: (usize, f32), causal: bool) -> Self {
        Self { q, kv, shape, causal }
    }

    fn compute<R: oracle::Real>(&self, rounding: Rounding<R>) -> Vec<R> {
        oracle::attention(&self.q.host, &self.kv.hosts, self.shape, self.causal, rounding)
    }

    /// The expected rows of the result in a format.
    fn expected(&self, format: Stored, rows: Range<usize>) -> Expected {
        let exact = self.compute::<f64>(Rounding::none());
        let whole = if self.kv.tensors[0].v.dtype == Bf16 {
            // Tensor cores take P in bf16. They add e4m3 products with the precision of `fp8_sums::add`.
            let score = (self.q.t.dtype == E4m3).then_some(fp8_sums::add as fn(f64, &[f64]) -> f64);
            Expected::with_naive(format, exact, self.compute(Rounding { p: |p| f64::from(stored(p as f32, Bf16)), score }))
        } else {
            Expected::new(format, exact, || self.compute(Rounding::none()))
        };
        let cols = self.q.host.cols;
        let some = |values: Vec<f64>| values[rows.start * cols..rows.end * cols].to_vec();
        Expected { exact: some(whole.exact), naive: some(whole.naive), slack: whole.slack }
    }
}
