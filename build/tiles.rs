//! Reads `kernels/tiles.def`, the table of all instantiations of kernel templates, and writes the host's side of it as Rust source: the
//! rows of the kernel table and the tiles of each kernel. nvcc reads the same rows as macros. For the build script and tests/static/kernels.rs.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

type Result<T> = std::result::Result<T, String>;

/// A macro of the table: its name, and what its arguments are.
struct Family {
    name: &'static str,
    columns: &'static str,
    read: fn(&mut Tables, &Row<'_>) -> Result<()>,
}

impl Family {
    fn columns(&self) -> impl Iterator<Item = &'static str> {
        self.columns.split(", ")
    }
}

/// All macros of the table.
const FAMILIES: &[Family] = &[
    Family {
        name: "KL_GEMM_SM90",
        columns: SM90_COLUMNS,
        read: |tables, row| tables.hopper_gemm(row, "KlGemmTma", "Sm90_", "Bf16", 0),
    },
    Family {
        name: "KL_GEMM_FP8_SM90",
        columns: "file, m, n, block k, consumer warpgroups, stages, cluster mode, promotion interval, threads, shared bytes, relative cost",
        read: |tables, row| match row.number("promotion interval") {
            0 => tables.hopper_gemm(row, "KlGemmTma", "Fp8_", "Fp8", 0),
            1 => tables.hopper_gemm(row, "KlGemmTma", "Fp8Promoted", "Fp8", 1),
            many => tables.hopper_gemm(row, "KlGemmTma", &format!("Fp8Promoted{many}_"), "Fp8", many),
        },
    },
    Family {
        name: "KL_GEMM_MIXED_SM90",
        columns: SM90_COLUMNS,
        read: |tables, row| tables.hopper_gemm(row, "KlGemmTma", "Mixed", "MixedInput", 0),
    },
    Family {
        name: "KL_CONV_SM90",
        columns: SM90_COLUMNS,
        read: |tables, row| tables.hopper_gemm(row, "KlConvSm90", "Conv", "Conv3x3", 0),
    },
    Family {
        name: "KL_GEMM_NVFP4_SM120",
        columns: SM120_COLUMNS,
        read: |tables, row| tables.sm120_gemm(row, "Nvfp4Sm120_", "Nvfp4"),
    },
    Family { name: "KL_GEMM_FP8_SM120", columns: SM120_COLUMNS, read: |tables, row| tables.sm120_gemm(row, "Fp8Sm120_", "Fp8") },
    Family {
        name: "KL_GEMM_BF16_SM120",
        columns: SM120_COLUMNS,
        read: |tables, row| tables.sm120_gemm(row, "Bf16Sm120_", "Bf16"),
    },
    Family { name: "KL_GEMM_MMA", columns: MMA_COLUMNS, read: |tables, row| tables.portable_gemm(row, "Mma", "Bf16", None) },
    Family {
        name: "KL_GEMM_FP8_MMA",
        columns: MMA_COLUMNS,
        read: |tables, row| tables.portable_gemm(row, "Fp8Mma", "Fp8", Some(row.number("block k"))),
    },
    Family {
        name: "KL_CONV_MMA",
        columns: "file, m, n, block k, warps, stages, CTAs per SM, threads, shared bytes",
        read: Tables::conv_mma,
    },
    Family {
        name: "KL_ATTENTION_SM90",
        columns: "file, symbol, name, stages, CTAs per cluster, type of queries and keys, running maximum, causal, threads, shared bytes",
        read: Tables::attention_sm90,
    },
    Family {
        name: "KL_ATTENTION_WIDE_SM90",
        columns: "file, head, stages, threads, shared bytes",
        read: Tables::attention_wide_sm90,
    },
    Family {
        name: "KL_ATTENTION_WIDE",
        columns: "file, queries per CTA, threads, CTAs per SM, shared bytes",
        read: Tables::attention_wide,
    },
    Family {
        name: "KL_ROW_NORM",
        columns: "file, columns, threads, vectors per thread, CTAs per SM of the layer norm, CTAs per SM of the RMS norm",
        read: Tables::row_norm,
    },
];

/// The columns of the GEMMs of Hopper, of compute capability 12.x and of every GPU.
const SM90_COLUMNS: &str = "file, m, n, block k, consumer warpgroups, stages, cluster mode, threads, shared bytes, relative cost";
const SM120_COLUMNS: &str = "file, m, n, block k, consumer warpgroups, stages, threads, shared bytes, relative cost";
const MMA_COLUMNS: &str = "file, m, n, block k, warps, stages, CTAs per SM, threads, shared bytes, relative cost";

/// How the CTAs of a cluster cooperate, as `ClusterMode` of src/backend/cuda/select/tile.rs names it.
const CLUSTER_MODES: [&str; 3] = ["MulticastA", "MulticastB", "SplitK"];

/// The element types of queries and keys, as the kernels name them.
const QK_TYPES: [&str; 2] = ["bf16", "e4m3"];

/// The columns whose arguments are identifiers, and those that are 0 or 1. All others are positive numbers.
const WORDS: [&str; 5] = ["file", "symbol", "name", "cluster mode", "type of queries and keys"];
const FLAGS: [&str; 2] = ["running maximum", "causal"];

/// A row of the table.
struct Row<'a> {
    family: &'static Family,
    arguments: Vec<&'a str>,
    /// The comment directly above the row, or nothing.
    purpose: &'a str,
}

impl<'a> Row<'a> {
    /// The row on a line of the table, of which `above` is the line before.
    fn parse(line: &'a str, above: &'a str) -> Result<Self> {
        let code = line.split_once("//").map_or(line, |(code, _)| code).trim_end();
        let (name, arguments) = code
            .strip_suffix(')')
            .and_then(|code| code.split_once('('))
            .ok_or("expected a row `MACRO(argument, ...)`, a comment or a directive")?;
        let family = FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
            let known: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
            format!("`{name}` is none of {}", known.join(", "))
        })?;
        let arguments: Vec<_> = arguments.split(',').map(str::trim).collect();
        let expected = family.columns().count();
        if arguments.len() != expected {
            return Err(format!("{name} has {} arguments, expected {expected}: {}", arguments.len(), family.columns));
        }
        for (column, argument) in family.columns().zip(&arguments) {
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let (valid, expected) = match argument.parse::<u32>() {
                _ if WORDS.contains(&column) => (!argument.is_empty() && argument.chars().all(is_word), "an identifier"),
                number if FLAGS.contains(&column) => (matches!(number, Ok(0 | 1)), "0 or 1"),
                number if column == "promotion interval" => (number.is_ok(), "a number"),
                number => (number.is_ok_and(|number| number > 0), "a positive number"),
            };
            if !valid {
                return Err(format!("{column} is `{argument}`, expected {expected}"));
            }
        }
        // The heading of the columns is indented further than other comments.
        let purpose = above.strip_prefix("// ").filter(|comment| !comment.starts_with(' ')).unwrap_or("");
        Ok(Self { family, arguments, purpose })
    }

    /// The argument of a column; no other name is asked for than those of the family.
    fn text(&self, column: &str) -> &'a str {
        let place = self.family.columns().position(|name| name == column);
        self.arguments[place.unwrap_or_else(|| panic!("{} has no column `{column}`", self.family.name))]
    }

    /// The argument of a column of numbers.
    fn number(&self, column: &str) -> u32 {
        self.text(column).parse().expect("parse has checked it")
    }
}

/// The host's side of the table as Rust source.
pub struct Source {
    /// The rows of the kernel table, for src/backend/cuda/launch.rs.
    pub kernels: String,
    /// The tiles of each kernel, for src/backend/cuda/tiles.rs.
    pub tiles: String,
}

/// The entry point of an instantiation, with what its launch needs.
struct Kernel {
    /// Its name in the enum `Kernel`.
    name: String,
    file: String,
    symbol: String,
    /// Its parameter struct.
    params: &'static str,
    threads: u32,
    shared: u32,
    /// The CTAs of a cluster; none for kernels that are not for Hopper.
    cluster: Option<String>,
}

/// The host's tables: all kernels, and for each kernel family the Rust source of its rows.
#[derive(Default)]
struct Tables {
    kernels: Vec<Kernel>,
    gemm_tiles: String,
    conv_tiles: String,
    hopper_wide_attentions: String,
    /// The head of the last of them.
    wide_head: u32,
    wide_attentions: String,
    row_norms: String,
    /// The columns of the last row norm.
    norm_columns: u32,
}

impl Tables {
    /// A Hopper GEMM with the parameter struct `params`; the names of its tiles begin with `prefix`, `operands` is a variant of
    /// `GemmOperands`. Accumulators are promoted after `interval` k-blocks, if that is not zero.
    fn hopper_gemm(&mut self, row: &Row<'_>, params: &'static str, prefix: &str, operands: &str, interval: u32) -> Result<()> {
        let (m, n, consumers) = (row.number("m"), row.number("n"), row.number("consumer warpgroups"));
        let mode = row.text("cluster mode");
        if !CLUSTER_MODES.contains(&mode) {
            return Err(format!("cluster mode is `{mode}`, expected one of {}", CLUSTER_MODES.join(", ")));
        }
        // A wgmma has 64 rows.
        if !m.is_multiple_of(64 * consumers) {
            return Err(format!(
                "{m} rows cannot be divided among {consumers} consumer warpgroups, expected a multiple of {}",
                64 * consumers
            ));
        }
        let suffix = match interval {
            0 => String::new(),
            1 => "_promoted".into(),
            many => format!("_promoted_{many}"),
        };
        let symbol = format!("kl_{}_{m}x{n}{suffix}", row.text("file"));
        let cluster = Some("abi::KL_SM90_CLUSTER".to_owned());
        let more = format!(
            "ctas_per_sm: 1, consumers: {consumers}, cluster: Some(ClusterMode::{mode}), operands: GemmOperands::{operands}, \
             longest_sum: {:?}",
            (interval > 0).then_some(interval * row.number("block k"))
        );
        self.gemm(row, prefix, symbol, params, cluster, &more);
        Ok(())
    }

    /// A GEMM of compute capability 12.x, with names and operands as for a Hopper GEMM. Its tensor cores keep all of a sum.
    fn sm120_gemm(&mut self, row: &Row<'_>, prefix: &str, operands: &str) -> Result<()> {
        let (m, n, consumers) = (row.number("m"), row.number("n"), row.number("consumer warpgroups"));
        let more = format!(
            "ctas_per_sm: 1, consumers: {consumers}, cluster: Some(ClusterMode::Single), operands: GemmOperands::{operands}, \
             longest_sum: Some({})",
            row.number("block k")
        );
        self.gemm(row, prefix, format!("kl_{}_{m}x{n}", row.text("file")), "KlGemmTma", Some("1".into()), &more);
        Ok(())
    }

    /// A portable GEMM, with names and operands as for a Hopper GEMM.
    fn portable_gemm(&mut self, row: &Row<'_>, prefix: &str, operands: &str, longest_sum: Option<u32>) -> Result<()> {
        let more = format!(
            "ctas_per_sm: {}, consumers: 0, cluster: None, operands: GemmOperands::{operands}, longest_sum: {longest_sum:?}",
            row.number("CTAs per SM")
        );
        self.gemm(row, prefix, format!("kl_{}_{}", row.text("file"), row.number("m")), "KlGemm", None, &more);
        Ok(())
    }

    /// The kernel and the tile of a GEMM.
    fn gemm(&mut self, row: &Row<'_>, prefix: &str, symbol: String, params: &'static str, cluster: Option<String>, more: &str) {
        let (m, n, k) = (row.number("m"), row.number("n"), row.number("block k"));
        let (name, cost) = (format!("{prefix}{m}x{n}"), row.number("relative cost"));
        let arch = match row.text("file").rsplit_once("_sm") {
            Some((_, number)) => format!("Sm{number}"),
            None => "Portable".into(),
        };
        let _ = writeln!(
            self.gemm_tiles,
            "    Tile {{ arch: Arch::{arch}, block_m: {m}, block_n: {n}, block_k: {k}, {more}, \
             kernel: Kernel::Gemm{name}, relative_cost: {cost} }},"
        );
        self.kernel(row, format!("Gemm{name}"), symbol, params, row.number("shared bytes"), cluster);
    }

    fn conv_mma(&mut self, row: &Row<'_>) -> Result<()> {
        let (m, n) = (row.number("m"), row.number("n"));
        let (name, symbol) = (format!("ConvMma{m}x{n}"), format!("kl_{}_{m}", row.text("file")));
        let _ = writeln!(self.conv_tiles, "    ConvTile {{ block_m: {m}, block_n: {n}, kernel: Kernel::{name} }},");
        self.kernel(row, name, symbol, "KlConv", row.number("shared bytes"), None);
        Ok(())
    }

    fn attention_sm90(&mut self, row: &Row<'_>) -> Result<()> {
        let (name, element) = (format!("AttentionSm90{}", row.text("name")), row.text("type of queries and keys"));
        if !QK_TYPES.contains(&element) {
            return Err(format!("type of queries and keys is `{element}`, expected one of {}", QK_TYPES.join(", ")));
        }
        let cluster = Some(row.number("CTAs per cluster").to_string());
        self.kernel(row, name, row.text("symbol").to_owned(), "KlAttentionSm90", row.number("shared bytes"), cluster);
        Ok(())
    }

    fn attention_wide_sm90(&mut self, row: &Row<'_>) -> Result<()> {
        let head = row.number("head");
        // The first that is wide enough is taken.
        if head <= self.wide_head {
            return Err(format!("a head of {head} after {}, expected a wider one", self.wide_head));
        }
        self.wide_head = head;
        let (name, symbol) = (format!("AttentionWideSm90_{head}"), format!("kl_{}_{head}", row.text("file")));
        let _ = writeln!(self.hopper_wide_attentions, "    WideHead {{ head: {head}, kernel: Kernel::{name} }},");
        let cluster = Some("abi::KL_SM90_CLUSTER".to_owned());
        self.kernel(row, name, symbol, "KlAttentionSm90", row.number("shared bytes"), cluster);
        Ok(())
    }

    fn attention_wide(&mut self, row: &Row<'_>) -> Result<()> {
        let queries = row.number("queries per CTA");
        let name = format!("AttentionWide{queries}");
        let _ = writeln!(self.wide_attentions, "    WideAttention {{ block_q: {queries}, kernel: Kernel::{name} }},");
        self.kernel(row, name, format!("kl_attention_wide_{queries}"), "KlAttention", row.number("shared bytes"), None);
        Ok(())
    }

    fn row_norm(&mut self, row: &Row<'_>) -> Result<()> {
        let columns = row.number("columns");
        // The first that is wide enough is taken.
        if columns <= self.norm_columns {
            return Err(format!("{columns} columns after {}, expected more", self.norm_columns));
        }
        self.norm_columns = columns;
        let _ = writeln!(
            self.row_norms,
            "    RowNorm {{\n        max_columns: {columns},\n        layer_norm: Kernel::LayerNorm{columns},\n        \
             layer_norm_e4m3: Kernel::LayerNormE4m3{columns},\n        layer_norm_e2m1: Kernel::LayerNormE2m1{columns},\n        \
             rms_norm: Kernel::RmsNorm{columns},\n    }},"
        );
        for (name, symbol, params) in [
            ("LayerNorm", "layer_norm", "KlLayerNorm"),
            ("LayerNormE4m3", "layer_norm_e4m3", "KlLayerNorm"),
            ("LayerNormE2m1", "layer_norm_e2m1", "KlLayerNorm"),
            ("RmsNorm", "rms_norm", "KlRmsNorm"),
        ] {
            self.kernel(row, format!("{name}{columns}"), format!("kl_{symbol}_{columns}"), params, 0, None);
        }
        Ok(())
    }

    fn kernel(
        &mut self,
        row: &Row<'_>,
        name: String,
        symbol: String,
        params: &'static str,
        shared: u32,
        cluster: Option<String>,
    ) {
        let (file, threads) = (row.text("file").to_owned(), row.number("threads"));
        self.kernels.push(Kernel { name, file, symbol, params, threads, shared, cluster });
    }

    fn source(&self) -> Source {
        let mut rows = String::new();
        for Kernel { name, file, symbol, params, threads, shared, cluster } in &self.kernels {
            let _ = write!(rows, "            {name} = {file:?} {symbol:?} ({params}) {threads}, shared {shared}");
            if let Some(cluster) = cluster {
                let _ = write!(rows, ", overlap in clusters of {cluster}");
            }
            rows.push_str(";\n");
        }
        let kernels = format!(
            "/// Calls a macro with the rows of the kernel table in braces and, after them, one for each instantiation of a template.\n\
             macro_rules! with_instantiations {{\n    ($table:ident {{ $($rows:tt)* }}) => {{\n        $table! {{\n            \
             $($rows)*\n{rows}        }}\n    }};\n}}\n"
        );
        let Self { gemm_tiles, conv_tiles, hopper_wide_attentions, wide_attentions, row_norms, .. } = self;
        let tiles = format!(
            "/// The tiles of GEMMs and of the Hopper convolution, the fastest first.\n\
             pub const GEMM_TILES: &[Tile] = &[\n{gemm_tiles}];\n\n\
             /// The tiles of the portable convolution, the largest first.\n\
             pub const CONV_TILES: &[ConvTile] = &[\n{conv_tiles}];\n\n\
             /// The Hopper kernels of attention with a wide head, the narrowest first.\n\
             pub const HOPPER_WIDE_ATTENTIONS: &[WideHead] = &[\n{hopper_wide_attentions}];\n\n\
             /// The portable kernels of attention with a wide head, the largest tile first.\n\
             pub const WIDE_ATTENTIONS: &[WideAttention] = &[\n{wide_attentions}];\n\n\
             /// The row norms that keep a row in registers, the narrowest first.\n\
             pub const ROW_NORMS: &[RowNorm] = &[\n{row_norms}];\n"
        );
        Source { kernels, tiles }
    }
}

/// The Rust source of the host's tables, from the text of the table at `path`; `files` are the names of the kernel files. A fault is
/// reported with its line.
pub fn generate(path: &str, text: &str, files: &[String]) -> Result<Source> {
    let mut tables = Tables::default();
    let mut seen: HashMap<String, usize> = HashMap::new();
    let (mut above, mut rows) = ("", HashSet::new());
    for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line)) {
        let previous = std::mem::replace(&mut above, line);
        if line.trim().is_empty() || line.starts_with("//") || line.starts_with('#') {
            continue;
        }
        let at = |what: String| format!("{path}:{number}: {what}");
        let row = Row::parse(line, previous).map_err(at)?;
        rows.insert(row.family.name);
        let first = tables.kernels.len();
        (row.family.read)(&mut tables, &row).map_err(at)?;
        let file = row.text("file");
        if !files.iter().any(|name| name == file) {
            return Err(at(format!("there is no kernels/entry/{file}.cu")));
        }
        for kernel in &tables.kernels[first..] {
            for name in [&kernel.symbol, &kernel.name] {
                if let Some(other) = seen.insert(name.clone(), number) {
                    return Err(at(format!("`{name}` is already in line {other}")));
                }
            }
        }
    }
    match FAMILIES.iter().find(|family| !rows.contains(family.name)) {
        Some(family) => Err(format!("{path}: there is no row of {}, expected at least one", family.name)),
        None => Ok(tables.source()),
    }
}
