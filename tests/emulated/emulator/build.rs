//! Compiles the emulator and, against it, every `kernels/entry/*.cu`, the tests' kernels and every planted bug, into one static library.
//!
//! Kernels are compiled with ThreadSanitizer's instrumentation, which calls a function for every memory access. The emulator defines these
//! functions. A unit is compiled again only if it, a header or the compiler has changed.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

#[path = "../../../build/parallel.rs"]
mod parallel;
#[path = "planted.rs"]
#[allow(dead_code)]
mod planted;
use planted::Planted;

type Result<T> = std::result::Result<T, String>;

const COMMON_FLAGS: &[&str] = &["-std=c++17", "-Wall", "-Wextra", "-Werror", "-g1"];
const RUNTIME_FLAGS: &[&str] = &["-O2"];
/// Like nvcc, these flags let kernels reinterpret memory and contract a multiplication and an addition to an FMA. Like nvcc, they also do
/// not warn about its pragmas, signed-unsigned comparisons, and parameters that only some instantiations use.
const KERNEL_FLAGS: &[&str] = &[
    "-O1",
    "-fno-strict-aliasing",
    "-ffp-contract=fast",
    "-fsanitize=thread,alignment",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
    "-Wno-sign-compare",
    "-Wno-parentheses",
    "-Wno-unused-parameter",
];

fn main() {
    if let Err(message) = build() {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }
}

fn build() -> Result<()> {
    let emulator = PathBuf::from(env::var("CARGO_MANIFEST_DIR").map_err(|e| format!("CARGO_MANIFEST_DIR: {e}"))?);
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    let kernels = emulator.ancestors().nth(3).ok_or("the emulator is not where it was")?.join("kernels");
    let tests = emulator.parent().ok_or("the emulator is not where it was")?.to_owned();
    println!("cargo::rerun-if-changed={}", tests.display());
    println!("cargo::rerun-if-changed={}", kernels.display());
    let unwanted = is_set("KILN_EMULATOR", "none");
    let Some(compiler) = (if unwanted { None } else { compiler(&out) }) else {
        if is_set("KILN_REQUIRE_EMULATOR", "1") {
            return Err("KILN_REQUIRE_EMULATOR=1, but there is no C++ compiler".into());
        }
        if !unwanted {
            println!("cargo::warning=no C++ compiler: the kernels are not emulated");
        }
        println!("cargo::rustc-cfg=no_emulator");
        return Ok(());
    };
    let tree = Tree::new([emulator, tests, kernels, out], &compiler)?;
    let mut units = Vec::new();
    for source in files(&tree.emulator, &["cpp"])? {
        units.push(tree.runtime_unit(&source)?);
    }
    for source in files(&tree.kernels, &["cu"])? {
        units.push(tree.module_unit(&stem(&source), &source, None)?);
    }
    // The tests' own kernels, which are not part of the product.
    for source in files(&tree.tests, &["cu"])? {
        units.push(tree.module_unit(&stem(&source), &source, Some(&tree.tests))?);
    }
    for bug in planted::BUGS {
        units.push(tree.planted_unit(bug)?);
    }
    let stale: Vec<_> = units.iter().filter(|unit| !unit.is_current()).collect();
    parallel::compile_all(&stale, |unit| unit.compile(&compiler))?;
    let mut archive = cc::Build::new();
    archive.cpp(true).objects(units.iter().map(|unit| &unit.object));
    // Kernels register themselves and nothing refers to them, so the linker must keep the whole archive.
    archive.link_lib_modifier("+whole-archive").try_compile("kiln_emulated").map_err(|e| e.to_string())
}

/// Whether an environment variable has this value; cargo runs the script again when it changes.
fn is_set(name: &str, value: &str) -> bool {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).is_ok_and(|is| is == value)
}

/// The C++ compiler, if a working one is found.
fn compiler(out: &Path) -> Option<cc::Tool> {
    let tool = cc::Build::new().cpp(true).warnings(false).opt_level(0).debug(false).try_get_compiler().ok()?;
    let (source, object) = (out.join("probe.cpp"), out.join("probe.o"));
    write(&source, "#include <vector>\n").ok()?;
    let status = tool.to_command().arg("-c").arg(&source).arg("-o").arg(&object).output().ok()?.status;
    status.success().then_some(tool)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Writes a file and creates its folder.
fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(folder).and_then(|()| fs::write(path, text)).map_err(|e| format!("{}: {e}", path.display()))
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The files below a folder with one of these extensions, sorted.
fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))? {
        let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
        if path.is_dir() {
            found.extend(files(&path, extensions)?);
        } else if path.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// A file to compile, and its outputs.
struct Unit {
    source: PathBuf,
    arguments: Vec<String>,
    object: PathBuf,
    /// The file that holds the object's cache key. It is written last.
    stamp: PathBuf,
    key: String,
}

impl Unit {
    fn is_current(&self) -> bool {
        self.object.exists() && read(&self.stamp).is_ok_and(|key| key == self.key)
    }

    fn compile(&self, compiler: &cc::Tool) -> Result<()> {
        let _ = fs::remove_file(&self.stamp);
        let mut command: Command = compiler.to_command();
        command.args(&self.arguments).arg("-c").arg(&self.source).arg("-o").arg(&self.object);
        let output = command.output().map_err(|e| format!("{}: {e}", compiler.path().display()))?;
        if !output.status.success() {
            return Err(format!("{} failed:\n{}", stem(&self.source), String::from_utf8_lossy(&output.stderr)));
        }
        write(&self.stamp, &self.key)
    }
}

/// The folders, and the common part of all cache keys.
struct Tree {
    emulator: PathBuf,
    /// The folder of the tests, which contains the emulator.
    tests: PathBuf,
    kernels: PathBuf,
    out: PathBuf,
    /// Hash of compiler and headers. Every key covers every header: there are few, and a list of includes would have to be maintained.
    common: u64,
    runtime_flags: Vec<String>,
    kernel_flags: Vec<String>,
}

impl Tree {
    fn new([emulator, tests, kernels, out]: [PathBuf; 4], compiler: &cc::Tool) -> Result<Self> {
        let mut hasher = DefaultHasher::new();
        let version = compiler.to_command().arg("--version").output().map_err(|e| e.to_string())?;
        (compiler.path(), version.stdout).hash(&mut hasher);
        for folder in [&emulator, &kernels] {
            for header in files(folder, &["h", "cuh", "def"])? {
                (&header, read(&header)?).hash(&mut hasher);
            }
        }
        let strings = |flags: &[&str]| flags.iter().map(|flag| flag.to_string()).collect::<Vec<_>>();
        let (mut runtime_flags, mut kernel_flags) = (strings(RUNTIME_FLAGS), strings(KERNEL_FLAGS));
        // Without FMA instructions, results would sometimes differ from a GPU's by a rounding.
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            runtime_flags.push("-march=x86-64-v3".into());
            kernel_flags.push("-march=x86-64-v3".into());
        }
        if compiler.is_like_gnu() {
            // Only memory accesses matter.
            kernel_flags.extend(strings(&["--param", "tsan-instrument-func-entry-exit=0"]));
        }
        Ok(Self { emulator, tests, kernels, out, common: hasher.finish(), runtime_flags, kernel_flags })
    }

    /// A unit. Its sources are searched in `first`, the emulator and the kernels, in this order. Its key includes the files in `first`.
    fn unit(&self, source: &Path, name: &str, flags: &[String], first: Option<&Path>, depends: &str) -> Result<Unit> {
        let mut hasher = DefaultHasher::new();
        let mut arguments: Vec<String> = COMMON_FLAGS.iter().map(|flag| flag.to_string()).chain(flags.iter().cloned()).collect();
        let own = [self.emulator.clone(), self.emulator.join("include"), self.kernels.clone()];
        arguments
            .extend(first.into_iter().chain(own.iter().map(PathBuf::as_path)).map(|folder| format!("-I{}", folder.display())));
        (self.common, &arguments, read(source)?, depends).hash(&mut hasher);
        for file in first.map(|folder| files(folder, &["cu", "cuh", "def"])).transpose()?.unwrap_or_default() {
            read(&file)?.hash(&mut hasher);
        }
        let file = |extension: &str| self.out.join(format!("{name}.{extension}"));
        let key = format!("{:016x}", hasher.finish());
        Ok(Unit { source: source.to_owned(), arguments, object: file("o"), stamp: file("key"), key })
    }

    /// A source of the emulator itself.
    fn runtime_unit(&self, source: &Path) -> Result<Unit> {
        self.unit(source, &format!("emulator_{}", stem(source)), &self.runtime_flags, None, "")
    }

    /// A kernel file as a module of that name. Kernel files define types with the same names, so each is in an unnamed namespace.
    fn module_unit(&self, module: &str, kernel_file: &Path, first: Option<&Path>) -> Result<Unit> {
        let text = format!(
            "#define KL_EMULATED_MODULE \"{module}\"\n#include \"emulated.h\"\nnamespace {{\n#include <{}>\n}}\n",
            kernel_file.strip_prefix(&self.kernels).or(kernel_file.strip_prefix(&self.tests)).unwrap_or(kernel_file).display()
        );
        let wrapper = self.out.join(format!("module_{module}.cpp"));
        write(&wrapper, &text)?;
        let depends = read(kernel_file)?;
        self.unit(&wrapper, &format!("module_{module}"), &self.kernel_flags, first, &depends)
    }

    /// A kernel file with a bug, as a module with only the bug's `kernels.def` rows. Changed sources come first on the include path.
    fn planted_unit(&self, bug: &Planted) -> Result<Unit> {
        let folder = self.out.join("planted").join(bug.name);
        // The folder may hold files that an earlier version of the bug has changed.
        let _ = fs::remove_dir_all(&folder);
        let (table, row) = (read(&self.kernels.join("kernels.def"))?, format!(", {}", bug.row));
        let is_row = |line: &&str| line.starts_with("KL_KERNEL(");
        let only_tile: Vec<&str> = table.lines().filter(|line| !is_row(line) || line.contains(&row)).collect();
        if !only_tile.iter().any(is_row) {
            return Err(format!("planted bug {}: no row of kernels.def has {row}", bug.name));
        }
        write(&folder.join("kernels.def"), &only_tile.join("\n"))?;
        let text = read(&self.kernels.join(bug.source))?;
        if text.matches(bug.find).count() != 1 {
            return Err(format!("planted bug {}: kernels/{} does not have this text once:\n{}", bug.name, bug.source, bug.find));
        }
        write(&folder.join(bug.source), &text.replacen(bug.find, bug.replace, 1))?;
        let kernel_file = self.kernels.join("entry").join(format!("{}.cu", bug.kernel_file));
        self.module_unit(bug.name, &kernel_file, Some(&folder))
    }
}
