//! Reads `kernels/kernels.def`, the table of all kernels, and writes the host's side of it as Rust source. nvcc reads the same rows as
//! macros. The build script and tests/static/kernels.rs use this file.

use super::arch::Arch;
use std::collections::{BTreeMap, BTreeSet, HashMap};

type Result<T> = std::result::Result<T, String>;

/// How the CTAs of a cluster cooperate, as `ClusterMode` of src/backend/cuda/select/tile.rs names it.
const CLUSTER_MODES: [&str; 3] = ["MulticastA", "MulticastB", "SplitK"];

/// Columns that hold words, and columns whose number may be zero. All others hold positive numbers or constants of `abi.h`.
const WORDS: [&str; 6] = ["family", "arch", "file", "name", "parameters", "cluster mode"];
const MAYBE_ZERO: [&str; 2] = ["mixed", "promotion interval"];

/// A row of the table, with the heading of its columns.
struct Row<'a> {
    columns: Vec<&'a str>,
    arguments: Vec<&'a str>,
    family: &'a str,
    arch: Arch,
}

/// A kernel that a row stands for.
struct Instance<'a> {
    /// The template that it is instantiated from, a family or a norm. Empty for a single entry point.
    template: &'a str,
    /// Its symbol, without `kl_`.
    symbol: String,
    file: &'a str,
    /// Its parameter struct.
    params: &'a str,
}

impl<'a> Row<'a> {
    /// Parses the row on a line of the table, with the heading above it.
    fn parse(line: &'a str, heading: &'a str) -> Result<Self> {
        let arguments = line.strip_prefix("KL_KERNEL(").and_then(|rest| rest.strip_suffix(')'));
        let arguments = arguments.ok_or("expected a row `KL_KERNEL(family, arch, ...)`, a comment or a directive")?;
        let (arguments, columns): (Vec<_>, Vec<_>) = (arguments.split(", ").collect(), heading.split(", ").collect());
        if arguments.len() != columns.len() {
            return Err(format!("{} columns, expected {}: {heading}", arguments.len(), columns.len()));
        }
        for (column, argument) in columns.iter().zip(&arguments) {
            let is_word = !argument.is_empty() && argument.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let is_number = argument.parse().is_ok_and(|n: u32| n > 0 || MAYBE_ZERO.contains(column));
            match WORDS.contains(column) {
                true if !is_word => return Err(format!("{column} is `{argument}`, expected an identifier")),
                false if !(is_number || is_word && argument.starts_with("KL_")) => {
                    return Err(format!("{column} is `{argument}`, expected a positive number"));
                }
                _ => {}
            }
        }
        let arch = Arch::ALL.into_iter().find(|arch| arch.name() == arguments[1]);
        let arch = arch.ok_or_else(|| format!("no kernels are made for `{}`", arguments[1]))?;
        Ok(Self { columns, family: arguments[0], arch, arguments })
    }

    fn find(&self, column: &str) -> Option<&'a str> {
        self.columns.iter().position(|name| *name == column).map(|place| self.arguments[place])
    }

    fn get(&self, column: &str) -> Result<&'a str> {
        self.find(column).ok_or_else(|| format!("rows of {} need a column `{column}`", self.family))
    }

    /// Whether it is a persistent kernel with TMA, which has the whole SM.
    fn is_persistent(&self) -> bool {
        self.find("stages").is_some() && self.find("warps").is_none()
    }

    /// The columns of a norm, or of a head of the wide attention on Hopper.
    fn width(&self) -> Option<u32> {
        let head = self.find("n").filter(|_| self.is_persistent() && self.family.starts_with("attention"));
        self.find("columns").or(head)?.parse().ok()
    }

    /// Threads, and bytes of dynamic shared memory. A persistent kernel takes all that an SM has, other kernels what `kSharedBytes` of the
    /// template says. The emulator compares both with what templates compute.
    fn threads_and_shared(&self) -> Result<(String, String)> {
        if let Some(threads) = self.find("threads") {
            return Ok((threads.into(), self.find("shared bytes").unwrap_or("0").into()));
        }
        if let Some(columns) = self.find("columns") {
            return Ok((format!("{columns} / (8 * {})", self.get("vectors per thread")?), "0".into()));
        }
        if self.is_persistent() {
            // The producer is also a warpgroup. Attention has two consumer warpgroups.
            let consumers = if self.family.starts_with("attention") { "2" } else { self.get("consumer warpgroups")? };
            return Ok((format!("128 * (1 + {consumers})"), format!("KL_{}_SHARED_LIMIT", self.arch.name().to_uppercase())));
        }
        let bytes = if self.family.contains("_fp8_") { 1 } else { 2 };
        let shared = match (self.find("m").zip(self.find("n")), self.find("block k"), self.find("keys per block")) {
            (Some((m, n)), Some(k), _) => format!("{} * ({m} + {n}) * {k} * {bytes}", self.get("stages")?),
            // Queries, 32 keys and values, probabilities, and three f32 for each query.
            (Some((m, n)), None, _) => format!("2 * {n} * ({m} + 2 * 32) + {m} * (2 * 32 + 3 * 4)"),
            // 128 queries, and two stages of keys and values, for heads of 128.
            (None, _, Some(keys)) => format!("128 * 128 * {bytes} + 2 * {keys} * 128 * ({bytes} + 2)"),
            _ => "0".into(),
        };
        Ok((format!("32 * {}", self.get("warps")?), shared))
    }

    /// The fields of the row's kernels in the host's table, except symbol, file and parameters.
    fn fields(&self) -> Result<String> {
        let (threads, shared) = self.threads_and_shared()?;
        // A kernel without a cluster size waits for its predecessor to end.
        let cluster = match (self.find("CTAs per cluster"), self.is_persistent()) {
            (Some(ctas), _) => format!("Some({ctas})"),
            (None, false) => "None".into(),
            (None, true) if self.arch == Arch::Sm90 => "Some(KL_SM90_CLUSTER)".into(),
            (None, true) => "Some(1)".into(),
        };
        let (m, n) = (self.find("m").unwrap_or("0"), self.find("n").or(self.find("columns")).unwrap_or("0"));
        Ok(format!("arch: Arch::{:?}, threads: {threads}, shared: {shared}, cluster: {cluster}, tile: [{m}, {n}]", self.arch))
    }

    fn instances(&self) -> Result<Vec<Instance<'a>>> {
        let family = self.family;
        if family == "entry" {
            let symbol = self.get("name")?.into();
            return Ok(vec![Instance { template: "", symbol, file: self.get("file")?, params: self.get("parameters")? }]);
        }
        if let Some(columns) = self.find("columns") {
            let norms = [("layer_norm", "KlLayerNorm"), ("layer_norm_e4m3", "KlLayerNorm"), ("layer_norm_e2m1", "KlLayerNorm")];
            let norms = norms.into_iter().chain([("rms_norm", "KlRmsNorm")]);
            let instance =
                |(template, params)| Instance { template, symbol: format!("{template}_{columns}"), file: family, params };
            return Ok(norms.map(instance).collect());
        }
        let params = match (family.split('_').next(), self.is_persistent()) {
            (Some("gemm"), true) => "KlGemmTma",
            (Some("gemm"), false) => "KlGemm",
            (Some("conv"), true) => "KlConvSm90",
            (Some("conv"), false) => "KlConv",
            (_, true) => "KlAttentionSm90",
            (_, false) => "KlAttention",
        };
        let promoted = match self.find("promotion interval") {
            None | Some("0") => String::new(),
            Some("1") => "_promoted".into(),
            Some(many) => format!("_promoted_{many}"),
        };
        let name = match self.find("name") {
            Some(name) => name.into(),
            None => format!("{}x{}{promoted}", self.get("m")?, self.get("n")?),
        };
        let mixed = self.find("mixed").filter(|mixed| *mixed != "0").map(|_| "gemm_mixed_sm90");
        let instance = |file| Instance { template: file, symbol: format!("{file}_{name}"), file, params };
        Ok([family].into_iter().chain(mixed).map(instance).collect())
    }

    /// The fields of a GEMM or convolution tile that the row's kernels share. Plans choose such tiles by cost.
    fn tile(&self) -> Result<Option<String>> {
        let Some(cost) = self.find("relative cost") else { return Ok(None) };
        let (m, n, k) = (self.get("m")?, self.get("n")?, self.get("block k")?);
        let (consumers, ctas) =
            if self.is_persistent() { (self.get("consumer warpgroups")?, "1") } else { ("0", self.get("CTAs per SM")?) };
        let cluster = match self.find("cluster mode") {
            Some(mode) if CLUSTER_MODES.contains(&mode) => format!("Some(ClusterMode::{mode})"),
            Some(mode) => return Err(format!("cluster mode is `{mode}`, expected one of {}", CLUSTER_MODES.join(", "))),
            None if self.is_persistent() => "Some(ClusterMode::Single)".into(),
            None => "None".into(),
        };
        // A wgmma has 64 rows.
        if let (Ok(rows), Ok(groups)) = (m.parse(), consumers.parse::<u32>())
            && let unit @ 1.. = 64 * groups
            && !u32::is_multiple_of(rows, unit)
        {
            return Err(format!("{m} rows cannot be divided among {groups} consumer warpgroups, expected a multiple of {unit}"));
        }
        // Tensor cores of compute capability 12.x keep all of a sum. The portable kernel promotes each k-block of e4m3.
        let longest_sum = match (self.find("promotion interval"), self.arch) {
            (Some("0"), _) | (None, Arch::Portable | Arch::Sm90 | Arch::Sm100) => "None".into(),
            (Some(interval), _) => format!("Some({interval} * {k})"),
            (None, Arch::Sm89 | Arch::Sm120) => format!("Some({k})"),
        };
        Ok(Some(format!(
            "arch: Arch::{:?}, block_m: {m}, block_n: {n}, block_k: {k}, ctas_per_sm: {ctas}, consumers: {consumers}, \
             cluster: {cluster}, longest_sum: {longest_sum}, relative_cost: {cost}",
            self.arch
        )))
    }
}

/// The operand types of the GEMMs in a file, as a variant of `GemmOperands`.
fn operands(file: &str) -> &'static str {
    match file.split('_').nth(1) {
        _ if file.starts_with("conv") => "Conv3x3",
        Some("fp8") => "Fp8",
        Some("mixed") => "MixedInput",
        Some("nvfp4") => "Nvfp4",
        _ => "Bf16",
    }
}

/// A symbol as an enum variant: `gemm_bf16_sm90_256x192` becomes `GemmBf16Sm90_256x192`.
fn variant(symbol: &str) -> String {
    symbol.split('_').fold(String::new(), |name, word| {
        let is_digit = |c: char| c.is_ascii_digit();
        let between = if name.ends_with(is_digit) && word.starts_with(is_digit) { "_" } else { "" };
        let (first, rest) = word.split_at(word.len().min(1));
        name + between + &first.to_uppercase() + rest
    })
}

/// The generated parts of the table.
pub struct Table {
    /// The architecture of each kernel file.
    pub archs: HashMap<String, Arch>,
    /// The enum `Kernel` and its rows, for src/backend/cuda/launch.rs.
    pub kernels: String,
    /// The tiles that plans choose from, for src/backend/cuda/select/tile.rs.
    pub tiles: String,
}

/// Reads the table at `path` from its text. `files` are the names of the kernel files. An error names the line.
pub fn read(path: &str, text: &str, files: &[String]) -> Result<Table> {
    let (mut archs, mut lines, mut widths, mut heading) = (HashMap::new(), HashMap::new(), HashMap::new(), "");
    // Kernels are grouped by file, although a row may stand for kernels of two files.
    let mut of_files: Vec<(String, [String; 3])> = Vec::new();
    let (mut templates, mut structs) = (BTreeMap::<String, String>::new(), BTreeSet::new());
    for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line)) {
        heading = line.strip_prefix("//   ").unwrap_or(heading);
        if line.trim().is_empty() || line.starts_with("//") || line.starts_with('#') {
            continue;
        }
        let at = |what: String| format!("{path}:{number}: {what}");
        let row = Row::parse(line, heading).map_err(at)?;
        let (tile, fields) = (row.tile().map_err(at)?, row.fields().map_err(at)?);
        // The host takes the first kernel that is wide enough.
        if let Some(width) = row.width()
            && let Some(last) = widths.insert(row.family, width).filter(|&last| last >= width)
        {
            return Err(at(format!("{width} columns after {last}, expected more")));
        }
        for Instance { template, symbol, file, params } in row.instances().map_err(at)? {
            if !files.iter().any(|name| name == file) {
                return Err(at(format!("there is no kernels/entry/{file}.cu")));
            }
            if archs.insert(file.to_owned(), row.arch).is_some_and(|other| other != row.arch) {
                return Err(at(format!("another row says that {file}.cu is for another architecture")));
            }
            if let Some(other) = lines.insert(symbol.clone(), number) {
                return Err(at(format!("`kl_{symbol}` is already in line {other}")));
            }
            let name = variant(&symbol);
            let place = of_files.iter().position(|(of, _)| of == file).unwrap_or_else(|| {
                of_files.push((file.to_owned(), Default::default()));
                of_files.len() - 1
            });
            let [names, rows, tiles] = &mut of_files[place].1;
            *names += &format!("    {name},\n");
            *rows +=
                &format!("    Row {{ symbol: \"kl_{symbol}\", file: {file:?}, params: size_of::<{params}>(), {fields} }},\n");
            if let Some(tile) = &tile {
                *tiles +=
                    &format!("    Tile {{ {tile}, operands: GemmOperands::{}, kernel: Kernel::{name} }},\n", operands(file));
            }
            *templates.entry(template.to_uppercase()).or_default() += &format!("Kernel::{name}, ");
            structs.insert(params);
        }
    }
    let [names, rows, tiles] = [0, 1, 2].map(|i| of_files.iter().map(|(_, texts)| texts[i].as_str()).collect::<String>());
    let all: String = names.lines().map(|name| format!("        Self::{}\n", name.trim_start())).collect();
    if let Some(file) = files.iter().find(|file| !archs.contains_key(*file)) {
        return Err(format!("{path}: there is no row of kernels/entry/{file}.cu"));
    }
    let templates = templates.iter().filter(|(template, _)| !template.is_empty());
    let templates: String =
        templates.map(|(template, kernels)| format!("    pub const {template}: &[Kernel] = &[{kernels}];\n")).collect();
    let safety = "// SAFETY: `abi.h` fills every gap with a field of its own.";
    let params: String = structs.iter().map(|params| format!("{safety}\nunsafe impl Params for abi::{params} {{}}\n")).collect();
    let kernels = format!(
        "/// A kernel.\n#[derive(Clone, Copy, Debug, PartialEq, Eq)]\n#[allow(missing_docs)]\npub enum Kernel {{\n{names}}}\n\n\
         impl Kernel {{\n    /// All kernels.\n    pub const ALL: &[Self] = &[\n{all}    ];\n}}\n\n\
         /// The rows of the kernels, in the order of the enum.\n#[allow(clippy::identity_op)]\nstatic ROWS: &[Row] = {{\n    use abi::*;\n    &[\n{rows}]}};\n\n\
         /// The kernels of each template, in the order of their rows.\n#[allow(dead_code, missing_docs)]\npub mod templates {{\n    \
         use super::Kernel;\n{templates}}}\n\n{params}"
    );
    Ok(Table { archs, kernels, tiles: format!("#[allow(clippy::identity_op)]\nconst TILES: &[Tile] = &[\n{tiles}];\n") })
}
