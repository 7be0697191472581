//! Generates the Rust bindings of `kernels/abi.h` and compares them with the file in the tree, so that other builds need no
//! libclang.

use std::path::Path;

use crate::{Result, read, watched, write};

const CHECKED_IN: &str = "src/backend/cuda/abi.rs";

const HEAD: &str = "\
//! The Rust side of `kernels/abi.h`, written by bindgen; CONTRIBUTING.md says how. Not to be edited.

#![allow(missing_docs)]";

/// Fails if the file in the tree differs from what bindgen generates. `KILN_UPDATE_ABI=1` writes it instead.
pub fn check(out: &Path) -> Result<()> {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    println!("cargo::rerun-if-changed={CHECKED_IN}");
    let generated = generate(&out.join("abi.rs"))?;
    if watched("KILN_UPDATE_ABI").is_some() {
        return write(Path::new(CHECKED_IN), &generated);
    }
    if read(Path::new(CHECKED_IN)).ok().as_ref() == Some(&generated) {
        return Ok(());
    }
    Err(format!(
        "{CHECKED_IN} is not what kernels/abi.h gives ({} is)\n\
         to update it: KILN_UPDATE_ABI=1 cargo check --features bindgen",
        out.join("abi.rs").display()
    ))
}

fn generate(file: &Path) -> Result<String> {
    let bindings = bindgen::Builder::default()
        .header("kernels/abi.h")
        // The libclang wheel has no headers of its own, but the freestanding <stdint.h> of any compiler will do.
        .clang_args(["-ffreestanding", "-isystem", &compiler_headers()?])
        .allowlist_type("Kl.*")
        .allowlist_var("KL_.*")
        .use_core()
        .layout_tests(true)
        .disable_header_comment()
        .raw_line(HEAD)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .formatter(bindgen::Formatter::Rustfmt)
        .rustfmt_configuration_file(Some(std::path::absolute("rustfmt.toml").map_err(|e| e.to_string())?))
        .generate()
        .map_err(|e| format!("kernels/abi.h: {e}"))?;
    bindings.write_to_file(file).map_err(|e| format!("{}: {e}", file.display()))?;
    read(file)
}

/// The folder of the C compiler's own headers.
fn compiler_headers() -> Result<String> {
    let compiler = cc::Build::new().try_get_compiler().map_err(|e| e.to_string())?;
    let output = compiler.to_command().arg("-print-file-name=include").output().map_err(|e| format!("C compiler: {e}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
