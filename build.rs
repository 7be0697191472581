//! Compiles `kernels/entry/*.cu` to fat binaries that the program embeds, and checks `src/backend/cuda/abi.rs` against `kernels/abi.h`.
//!
//! Without nvcc the table of images is empty and everything else works. CONTRIBUTING.md lists the environment variables.

// Build scripts pass instructions to cargo on stdout.
#![allow(clippy::print_stdout)]

use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

#[cfg(feature = "bindgen")]
#[path = "build/abi.rs"]
mod abi;
#[path = "build/arch.rs"]
mod arch;
#[path = "build/kernels.rs"]
mod kernels;
#[path = "build/parallel.rs"]
mod parallel;
#[path = "build/ptxas.rs"]
mod ptxas;

use arch::Arch;

type Result<T> = std::result::Result<T, String>;

const FLAGS: &[&str] = &["-std=c++17", "-I.", "-O3", "-lineinfo", "-fatbin", "-Werror", "all-warnings", "-Xptxas", "-v"];

/// The table of all kernels.
const TABLE: &str = "kernels/kernels.def";

/// The oldest nvcc release that has the `f` targets and the current layout of a tensor map.
const OLDEST_NVCC: (u32, u32) = (13, 0);

fn main() {
    if let Err(message) = build() {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }
}

fn build() -> Result<()> {
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=kernels");
    #[cfg(feature = "bindgen")]
    abi::check(&out)?;
    let sources = kernel_files()?;
    let table = kernels::read(TABLE, &read(Path::new(TABLE))?, &sources)?;
    write(&out.join("table.rs"), &table.kernels)?;
    write(&out.join("tiles.rs"), &table.tiles)?;

    let Some(nvcc) = Nvcc::find()? else {
        println!("cargo::rustc-env=KILN_KERNEL_RESOURCES=");
        println!("cargo::rustc-env=KILN_KERNEL_TOOLS=");
        return write(&out.join("kernels.rs"), &image_table(&[], &[], ""));
    };
    let chosen = arch::chosen()?;
    let mut kernels = Vec::new();
    for name in &sources {
        kernels.extend(Kernel::new(name, table.archs[name], chosen.as_deref(), &nvcc, &out)?);
    }
    let stale: Vec<_> = kernels.iter().filter(|kernel| !kernel.is_current()).collect();
    parallel::compile_all(&stale, |kernel| kernel.compile(&nvcc))?;
    refuse_losses(&kernels)?;

    // The names that nvcc has for the architectures.
    let mut targets: Vec<_> = arch::pick(arch::PORTABLE, chosen.as_deref()).iter().map(|arch| format!("sm_{arch}")).collect();
    if chosen.is_none() {
        targets.push(format!("compute_{}", arch::PTX));
    }
    let resources = out.join("resources.txt");
    write(&resources, &resource_table(&kernels, &targets, &nvcc.version)?)?;
    println!("cargo::rustc-env=KILN_KERNEL_RESOURCES={}", resources.display());
    // The disassembler is installed next to the compiler.
    println!("cargo::rustc-env=KILN_KERNEL_TOOLS={}", nvcc.path.parent().unwrap_or(Path::new("")).display());
    write(&out.join("kernels.rs"), &image_table(&kernels, &targets, &nvcc.version))
}

/// Reads an environment variable that the result depends on. Cargo runs the script again when it changes.
fn watched(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// The files of `kernels/` and its folders with one of these extensions, sorted.
fn files_with(extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let (mut folders, mut files) = (vec![PathBuf::from("kernels")], Vec::new());
    while let Some(folder) = folders.pop() {
        let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The names of the files with entry points, without their extension.
fn kernel_files() -> Result<Vec<String>> {
    Ok(files_with(&["cu"])?.iter().filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect())
}

struct Nvcc {
    path: PathBuf,
    version: String,
    /// The host compiler, which nvcc preprocesses with. Without it nvcc looks for gcc on the path, and fails if there is none.
    host: PathBuf,
}

impl Nvcc {
    /// The first nvcc in a fixed list of places. A missing nvcc is no error, but one that does not work is.
    fn find() -> Result<Option<Self>> {
        let required = watched("KILN_REQUIRE_CUDA").is_some_and(|value| value != "0");
        let stated = watched("KILN_NVCC");
        let path = match stated.as_deref() {
            Some("none") => None,
            Some(path) => Some(PathBuf::from(path)),
            None => usual_places().into_iter().find(|path| path.is_file()),
        };
        // Kernels are compiled inside their folder, where a relative path would be wrong.
        let path = path.map(std::path::absolute).transpose().map_err(|e| format!("nvcc: {e}"))?;
        match path {
            Some(path) => Self::check(path).map(Some),
            None if required => Err("KILN_REQUIRE_CUDA=1, but there is no nvcc; tools/get_nvcc installs one".into()),
            None if stated.is_some() => Ok(None),
            None => {
                println!(
                    "cargo::warning=no nvcc (looked at KILN_NVCC, CUDA_HOME, CUDA_PATH, PATH, the active virtualenv, .venv, \
                     /usr/local/cuda): building without CUDA kernels; tools/get_nvcc installs one"
                );
                Ok(None)
            }
        }
    }

    fn check(path: PathBuf) -> Result<Self> {
        println!("cargo::rerun-if-changed={}", path.display());
        let shown = path.display();
        let output = Command::new(&path).arg("--version").output().map_err(|e| format!("{shown}: {e}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        // "Cuda compilation tools, release 13.0, V13.0.88"
        let version = text.split(", V").nth(1).and_then(|rest| rest.split_whitespace().next());
        let version = version.filter(|_| output.status.success()).ok_or_else(|| {
            format!("{shown} --version does not say its release:\n{text}{}", String::from_utf8_lossy(&output.stderr))
        })?;
        let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
        let (major, minor) = OLDEST_NVCC;
        if (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < OLDEST_NVCC {
            return Err(format!(
                "{shown} is release {version}; the kernels need {major}.{minor} or newer\n\
                 name another with KILN_NVCC (tools/get_nvcc installs one), or build without kernels: KILN_NVCC=none"
            ));
        }
        let host = cc::Build::new().cpp(true).try_get_compiler().map_err(|e| format!("no C++ compiler for nvcc: {e}"))?;
        Ok(Self { version: version.to_owned(), host: host.path().to_owned(), path })
    }
}

/// The places to look for nvcc, in order.
fn usual_places() -> Vec<PathBuf> {
    let mut places = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        places.extend(watched(name).map(|home| Path::new(&home).join("bin/nvcc")));
    }
    places.extend(watched("PATH").iter().flat_map(env::split_paths).map(|folder| folder.join("nvcc")));
    for environment in [watched("VIRTUAL_ENV").map(PathBuf::from), Some(PathBuf::from(".venv"))].into_iter().flatten() {
        // The folder is lib/python3.11, or another version.
        let pythons = fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        places.extend(pythons.map(|python| python.path().join("site-packages/nvidia/cu13/bin/nvcc")));
    }
    places.push("/usr/local/cuda/bin/nvcc".into());
    places
}

/// A kernel file and the outputs of its compilation.
struct Kernel {
    name: String,
    arguments: Vec<String>,
    image: PathBuf,
    /// The output of ptxas.
    report: PathBuf,
    /// Holds the cache key of image and report. It is written last, so if it matches, both are complete.
    stamp: PathBuf,
    key: String,
}

impl Kernel {
    /// Returns `None` if none of the file's architectures is selected.
    fn new(name: &str, arch: Arch, chosen: Option<&[u32]>, nvcc: &Nvcc, out: &Path) -> Result<Option<Self>> {
        let (all, ptx) = arch::targets(arch);
        let archs = arch::pick(all, chosen);
        if archs.is_empty() {
            return Ok(None);
        }
        let mut arguments: Vec<String> = FLAGS.iter().map(|flag| flag.to_string()).collect();
        arguments.extend(archs.iter().map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}")));
        if let Some(ptx) = ptx.filter(|_| chosen.is_none()) {
            arguments.push(format!("-gencode=arch=compute_{ptx},code=compute_{ptx}"));
        }
        // Every header is in the key of every file: there are few headers, and a list of includes would need maintenance.
        let mut hasher = DefaultHasher::new();
        (&arguments, &nvcc.path, &nvcc.version, &nvcc.host, read(&Path::new("kernels/entry").join(format!("{name}.cu")))?)
            .hash(&mut hasher);
        for header in files_with(&["h", "cuh", "def"])? {
            (&header, read(&header)?).hash(&mut hasher);
        }
        let file = |extension: &str| out.join(format!("{name}.{extension}"));
        let (image, report, stamp) = (file("fatbin"), file("ptxas"), file("key"));
        Ok(Some(Self { name: name.to_owned(), arguments, image, report, stamp, key: format!("{:016x}", hasher.finish()) }))
    }

    fn is_current(&self) -> bool {
        self.image.exists() && self.report.exists() && read(&self.stamp).is_ok_and(|key| key == self.key)
    }

    fn compile(&self, nvcc: &Nvcc) -> Result<()> {
        let _ = fs::remove_file(&self.stamp);
        let mut command = Command::new(&nvcc.path);
        command.current_dir("kernels").arg("-ccbin").arg(&nvcc.host).args(&self.arguments);
        command.arg("-o").arg(&self.image).arg(format!("entry/{}.cu", self.name));
        let output = command.output().map_err(|e| format!("{}: {e}", nvcc.path.display()))?;
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            let errors: Vec<_> = said.lines().filter(|line| !ptxas::is_information(line)).collect();
            return Err(format!("nvcc failed on kernels/entry/{}.cu:\n{}", self.name, errors.join("\n")));
        }
        write(&self.report, &said)?;
        write(&self.stamp, &self.key)
    }
}

/// Fails if ptxas reports a loss of performance. ptxas only prints an informational message, and the kernel's results are right, so nothing
/// else would fail.
fn refuse_losses(kernels: &[Kernel]) -> Result<()> {
    let mut errors = Vec::new();
    for kernel in kernels {
        let report = read(&kernel.report)?;
        let losses: Vec<_> = report.lines().filter(|line| ptxas::is_loss(line)).collect();
        if !losses.is_empty() {
            errors.push(format!("kernels/entry/{}.cu would be slow; ptxas says:\n{}", kernel.name, losses.join("\n")));
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

/// The resources of each kernel on each architecture. tests/static/kernels.rs compares them with kernels/resources.txt.
fn resource_table(kernels: &[Kernel], targets: &[String], version: &str) -> Result<String> {
    let mut table = format!("# nvcc {version} for {}\n{}\n", targets.join(" "), ptxas::HEADING);
    for kernel in kernels {
        for row in ptxas::rows(&kernel.name, &ptxas::usages(&read(&kernel.report)?)?) {
            let _ = writeln!(table, "{row}");
        }
    }
    Ok(table)
}

/// The Rust source of the table of embedded images.
fn image_table(kernels: &[Kernel], targets: &[String], version: &str) -> String {
    let mut rows = String::new();
    for Kernel { name, .. } in kernels {
        let _ = writeln!(rows, "    ({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))),");
    }
    format!(
        "/// Every kernel file's name, with its image for all architectures. Empty in a build without nvcc.\n\
         pub static IMAGES: &[(&str, &[u8])] = &[\n{rows}];\n\n\
         /// The architectures of portable kernels, as nvcc spells them; `compute_80` is the PTX for every other card.\n\
         pub static ARCHS: &[&str] = &{targets:?};\n\n\
         /// The release of nvcc; empty in a build without it.\n\
         pub static NVCC: &str = {version:?};\n"
    )
}
