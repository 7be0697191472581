//! Reads `kernels/kernels.def`, the table of all kernels, and writes the host's side of it as Rust source. nvcc reads the same rows as
//! macros. For the build script and tests/static/kernels.rs.

use super::arch::Arch;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

/// How the CTAs of a cluster cooperate, as `ClusterMode` of src/backend/cuda/select/tile.rs names it.
const CLUSTER_MODES: [&str; 3] = ["MulticastA", "MulticastB", "SplitK"];

type Result<T> = std::result::Result<T, String>;

/// An entry point as Rust source.
struct Kernel {
    symbol: String,
    file: String,
    /// What its row is instantiated from: a kernel file, or a norm.
    template: String,
    /// Its row of the host's table.
    row: String,
    /// The tile that plans choose by cost, if it has one.
    tile: Option<String>,
}

/// A row of the table, with the heading of its columns.
struct Row<'a> {
    columns: Vec<&'a str>,
    arguments: Vec<&'a str>,
    family: &'a str,
    arch: Arch,
}

impl<'a> Row<'a> {
    /// The row on a line of the table, below a heading.
    fn parse(line: &'a str, heading: &'a str) -> Result<Self> {
        let arguments = line.strip_prefix("KL_KERNEL(").and_then(|rest| rest.strip_suffix(')'));
        let arguments: Vec<_> =
            arguments.ok_or("expected a row `KL_KERNEL(family, arch, ...)`, a comment or a directive")?.split(", ").collect();
        let columns: Vec<_> = heading.split(", ").collect();
        if arguments.len() != columns.len() {
            return Err(format!("{} columns, expected {}: {heading}", arguments.len(), columns.len()));
        }
        let is_word = |argument: &&str| !argument.is_empty() && argument.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if let Some(wrong) = arguments.iter().position(|argument| !is_word(argument)) {
            return Err(format!("{} is `{}`, expected a number or an identifier", columns[wrong], arguments[wrong]));
        }
        let arch = Arch::ALL.into_iter().find(|arch| arch.name() == arguments[1]);
        let arch = arch.ok_or_else(|| format!("no kernels are made for `{}`", arguments[1]))?;
        Ok(Self { columns, family: arguments[0], arch, arguments })
    }

    fn find(&self, column: &str) -> Option<&'a str> {
        self.columns.iter().position(|name| *name == column).map(|place| self.arguments[place])
    }

    fn text(&self, column: &str) -> Result<&'a str> {
        self.find(column).ok_or_else(|| format!("rows of {} need a column `{column}`", self.family))
    }

    fn number(&self, column: &str) -> Result<u32> {
        let text = self.text(column)?;
        match text.parse() {
            Ok(0) if column != "promotion interval" => Err(format!("{column} is `0`, expected more")),
            Ok(number) => Ok(number),
            Err(_) => Err(format!("{column} is `{text}`, expected a number")),
        }
    }

    /// The argument of a column that is a number or a constant of `abi.h`.
    fn constant(&self, column: &str) -> Result<String> {
        let text = self.text(column)?;
        Ok(if text.starts_with(|c: char| c.is_ascii_digit()) { text.into() } else { format!("abi::{text}") })
    }

    /// Whether it is a persistent kernel with TMA, which has an SM for itself.
    fn is_persistent(&self) -> bool {
        self.find("stages").is_some() && self.find("warps").is_none()
    }

    fn is_attention(&self) -> bool {
        self.family.starts_with("attention")
    }

    /// The columns of a norm, or of a head of the wide attention on Hopper.
    fn width(&self) -> Result<Option<u32>> {
        let wide = self.is_persistent() && self.family.starts_with("attention_wide");
        Ok(match self.find("columns") {
            Some(_) => Some(self.number("columns")?),
            None if wide => Some(self.number("n")?),
            None => None,
        })
    }

    fn threads(&self) -> Result<String> {
        Ok(match (self.find("threads"), self.find("columns")) {
            (Some(_), _) => self.constant("threads")?,
            (_, Some(_)) => (self.number("columns")? / (8 * self.number("vectors per thread")?)).to_string(),
            // The producer is a warpgroup as well. Attention has two that consume.
            _ if self.is_persistent() && self.is_attention() => (128 * 3).to_string(),
            _ if self.is_persistent() => (128 * (1 + self.number("consumer warpgroups")?)).to_string(),
            _ => format!("32 * {}", self.constant("warps")?),
        })
    }

    /// Bytes of dynamic shared memory: what an SM has for a persistent kernel, and what `kSharedBytes` of the template says elsewhere.
    fn shared(&self) -> Result<String> {
        if self.is_persistent() {
            return Ok(format!("abi::KL_{}_SHARED_LIMIT", self.arch.name().to_uppercase()));
        }
        let element = if self.family.contains("_fp8_") { 1 } else { 2 };
        Ok(match (self.find("block k"), self.find("keys per block")) {
            (Some(k), _) => {
                let rows = self.number("m")? + self.number("n")?;
                format!("{} * {rows} * {k} * {element}", self.number("stages")?)
            }
            // 128 queries, and two stages of keys and values with heads of 128.
            (_, Some(keys)) => format!("128 * 128 * {element} + 2 * {keys} * 128 * ({element} + 2)"),
            // Queries, 32 keys and values, probabilities, and three f32 a query.
            _ if self.is_attention() => {
                let (m, n) = (self.number("m")?, self.number("n")?);
                format!("2 * {n} * ({m} + 2 * 32) + {m} * (2 * 32 + 3 * 4)")
            }
            _ if self.find("shared bytes").is_some() => self.constant("shared bytes")?,
            _ => "0".into(),
        })
    }

    /// The CTAs of a cluster; none for a kernel that waits for its predecessor to end.
    fn cluster(&self) -> Result<String> {
        Ok(match self.find("CTAs per cluster") {
            Some(_) => format!("Some({})", self.constant("CTAs per cluster")?),
            None if !self.is_persistent() => "None".into(),
            None if self.arch == Arch::Sm90 => "Some(abi::KL_SM90_CLUSTER)".into(),
            None => "Some(1)".into(),
        })
    }

    /// Its kernels: their template, the rest of their symbols, their file and their parameter struct.
    fn symbols(&self) -> Result<Vec<(&'a str, String, &'a str, &'a str)>> {
        let family = self.family;
        if family == "entry" {
            return Ok(vec![("", self.text("name")?.into(), self.text("file")?, self.text("parameters")?)]);
        }
        if let Some(columns) = self.find("columns") {
            let norm = |name, params| (name, format!("{name}_{columns}"), family, params);
            let layer_norms = ["layer_norm", "layer_norm_e4m3", "layer_norm_e2m1"].map(|name| norm(name, "KlLayerNorm"));
            return Ok(layer_norms.into_iter().chain([norm("rms_norm", "KlRmsNorm")]).collect());
        }
        let params = match (family.split('_').next(), self.is_persistent()) {
            (Some("gemm"), true) => "KlGemmTma",
            (Some("gemm"), false) => "KlGemm",
            (Some("conv"), true) => "KlConvSm90",
            (Some("conv"), false) => "KlConv",
            (_, true) => "KlAttentionSm90",
            (_, false) => "KlAttention",
        };
        let instance = match (self.find("name"), self.find("promotion interval")) {
            (Some(name), _) => name.to_owned(),
            (None, promotion) => {
                let suffix = match promotion {
                    None | Some("0") => String::new(),
                    Some("1") => "_promoted".into(),
                    Some(many) => format!("_promoted_{many}"),
                };
                format!("{}x{}{suffix}", self.number("m")?, self.number("n")?)
            }
        };
        let mixed = (self.find("mixed") == Some("1")).then_some("gemm_mixed_sm90");
        Ok([family].into_iter().chain(mixed).map(|file| (file, format!("{file}_{instance}"), file, params)).collect())
    }

    /// Its kernels as Rust source.
    fn kernels(&self) -> Result<Vec<Kernel>> {
        let (arch, threads, shared, cluster) = (self.arch, self.threads()?, self.shared()?, self.cluster()?);
        let size = match self.find("columns") {
            Some(columns) => format!("[1, {columns}]"),
            None if self.find("m").is_some() => format!("[{}, {}]", self.number("m")?, self.number("n")?),
            None => "[0, 0]".into(),
        };
        let tile = self.tile()?;
        let kernel = |(template, symbol, file, params): (&str, String, &str, &str)| Kernel {
            row: format!(
                "symbol: \"kl_{symbol}\", file: {file:?}, arch: Arch::{arch:?}, params: size_of::<abi::{params}>(), \
                 threads: {threads}, shared: {shared}, cluster: {cluster}, tile: {size}"
            ),
            tile: tile
                .as_ref()
                .map(|tile| format!("{tile}, operands: GemmOperands::{}, kernel: Kernel::{}", operands(file), variant(&symbol))),
            symbol,
            file: file.into(),
            template: template.into(),
        };
        Ok(self.symbols()?.into_iter().map(kernel).collect())
    }

    /// The tile of a GEMM or a convolution that a plan chooses by cost, without its kernel and what that multiplies.
    fn tile(&self) -> Result<Option<String>> {
        if self.find("relative cost").is_none() {
            return Ok(None);
        }
        let (m, n, k) = (self.number("m")?, self.number("n")?, self.number("block k")?);
        let consumers = if self.is_persistent() { self.number("consumer warpgroups")? } else { 0 };
        let cluster = match self.find("cluster mode") {
            Some(mode) if !CLUSTER_MODES.contains(&mode) => {
                return Err(format!("cluster mode is `{mode}`, expected one of {}", CLUSTER_MODES.join(", ")));
            }
            Some(mode) => format!("Some(ClusterMode::{mode})"),
            None if self.is_persistent() => "Some(ClusterMode::Single)".into(),
            None => "None".into(),
        };
        // A wgmma has 64 rows.
        if consumers > 0 && !m.is_multiple_of(64 * consumers) {
            let unit = 64 * consumers;
            return Err(format!(
                "{m} rows cannot be divided among {consumers} consumer warpgroups, expected a multiple of {unit}"
            ));
        }
        // Tensor cores of compute capability 12.x keep all of a sum; the portable kernel promotes each k-block of e4m3.
        let longest_sum = match (self.find("promotion interval"), self.arch) {
            (Some(_), _) => Some(self.number("promotion interval")? * k).filter(|&sum| sum > 0),
            (None, Arch::Sm89 | Arch::Sm120) => Some(k),
            _ => None,
        };
        let ctas = if self.is_persistent() { 1 } else { self.number("CTAs per SM")? };
        Ok(Some(format!(
            "arch: Arch::{:?}, block_m: {m}, block_n: {n}, block_k: {k}, ctas_per_sm: {ctas}, consumers: {consumers}, \
             cluster: {cluster}, longest_sum: {longest_sum:?}, relative_cost: {}",
            self.arch,
            self.number("relative cost")?
        )))
    }
}

/// What a GEMM of a file multiplies, a variant of `GemmOperands`.
fn operands(file: &str) -> &'static str {
    match file.split('_').nth(1) {
        _ if file.starts_with("conv") => "Conv3x3",
        Some("fp8") => "Fp8",
        Some("mixed") => "MixedInput",
        Some("nvfp4") => "Nvfp4",
        _ => "Bf16",
    }
}

/// A symbol as a variant of an enum: `GemmBf16Sm90_256x192` of `gemm_bf16_sm90_256x192`.
fn variant(symbol: &str) -> String {
    let mut name = String::new();
    for word in symbol.split('_') {
        if name.ends_with(|c: char| c.is_ascii_digit()) && word.starts_with(|c: char| c.is_ascii_digit()) {
            name.push('_');
        }
        name.extend(word.chars().take(1).map(|c| c.to_ascii_uppercase()).chain(word.chars().skip(1)));
    }
    name
}

/// The table as the build uses it.
pub struct Table {
    /// The architecture of each kernel file.
    pub archs: HashMap<String, Arch>,
    /// The enum `Kernel` and its rows, for src/backend/cuda/launch.rs.
    pub kernels: String,
    /// The tiles that plans choose from, for src/backend/cuda/select/tile.rs.
    pub tiles: String,
}

/// Reads the text of the table at `path`; `files` are the names of the kernel files. A fault is reported with its line.
pub fn read(path: &str, text: &str, files: &[String]) -> Result<Table> {
    let (mut archs, mut seen) = (HashMap::new(), HashMap::new());
    let (mut heading, mut widths, mut kernels) = ("", HashMap::new(), Vec::new());
    for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line)) {
        heading = line.strip_prefix("//   ").unwrap_or(heading);
        if line.trim().is_empty() || line.starts_with("//") || line.starts_with('#') {
            continue;
        }
        let at = |what: String| format!("{path}:{number}: {what}");
        let row = Row::parse(line, heading).map_err(at)?;
        // The host takes the first that is wide enough.
        if let Some(columns) = row.width().map_err(at)?
            && let Some(last) = widths.insert(row.family, columns).filter(|&last| last >= columns)
        {
            return Err(at(format!("{columns} columns after {last}, expected more")));
        }
        for kernel in row.kernels().map_err(at)? {
            let Kernel { symbol, file, .. } = &kernel;
            if !files.contains(file) {
                return Err(at(format!("there is no kernels/entry/{file}.cu")));
            }
            if archs.insert(file.clone(), row.arch).is_some_and(|other| other != row.arch) {
                return Err(at(format!("another row says that {file}.cu is for another architecture")));
            }
            if let Some(other) = seen.insert(symbol.clone(), number) {
                return Err(at(format!("`kl_{symbol}` is already in line {other}")));
            }
            kernels.push(kernel);
        }
    }
    match files.iter().find(|file| !archs.contains_key(*file)) {
        Some(file) => Err(format!("{path}: there is no row of kernels/entry/{file}.cu")),
        None => Ok(source(archs, &kernels)),
    }
}

fn source(archs: HashMap<String, Arch>, kernels: &[Kernel]) -> Table {
    let (mut names, mut all, mut rows, mut tiles, mut templates) = <(String, String, String, String, String)>::default();
    for Kernel { symbol, row, tile, .. } in kernels {
        let name = variant(symbol);
        let _ = writeln!(names, "    {name},");
        let _ = writeln!(all, "        Self::{name},");
        let _ = writeln!(rows, "    Row {{ {row} }},");
        if let Some(tile) = tile {
            let _ = writeln!(tiles, "    Tile {{ {tile} }},");
        }
    }
    let instances = kernels.iter().filter(|kernel| !kernel.template.is_empty());
    let by_template = instances.fold(BTreeMap::<_, String>::new(), |mut found, kernel| {
        *found.entry(kernel.template.to_uppercase()).or_default() += &format!("Kernel::{}, ", variant(&kernel.symbol));
        found
    });
    for (template, kernels) in by_template {
        let _ = writeln!(templates, "    pub const {template}: &[Kernel] = &[{kernels}];");
    }
    let kernels = format!(
        "/// A kernel.\n#[derive(Clone, Copy, Debug, PartialEq, Eq)]\n#[allow(missing_docs)]\npub enum Kernel {{\n{names}}}\n\n\
         impl Kernel {{\n    /// All kernels.\n    pub const ALL: &[Self] = &[\n{all}    ];\n}}\n\n\
         /// The rows of the kernels, in the order of the enum.\nstatic ROWS: &[Row] = &[\n{rows}];\n\n\
         /// The kernels of each template, in the order of their rows.\n#[allow(dead_code, missing_docs)]\npub mod templates {{\n    \
         use super::Kernel;\n{templates}}}\n"
    );
    Table { archs, kernels, tiles: format!("const TILES: &[Tile] = &[\n{tiles}];\n") }
}
