//! Generates the Rust bindings of `kernels/abi.h` and compares them with the file in the tree, so that other builds need no
//! libclang.

use std::path::Path;

use crate::{Result, read, watched, write};

const CHECKED_IN: &str = "src/backend/cuda/abi.rs";

const HEAD: &str = "\
//! The Rust side of `kernels/abi.h`, written by bindgen; CONTRIBUTING.md says how. Not to be edited.

#![allow(missing_docs)]

macro_rules! layout {
    ($name:ident: $size:literal bytes, aligned to $align:literal; $($field:ident at $offset:literal),*) => {
        const _: () = {
            assert!(size_of::<$name>() == $size && align_of::<$name>() == $align);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    };
}";

/// The length of lines, less what may follow the last field of a row.
const WIDTH: usize = 130 - 2;

/// How bindgen begins the assertions about a struct.
const ASSERTIONS: &str = "#[allow(clippy::unnecessary_operation, clippy::identity_op)]\nconst _: () = {\n";

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
        .layout_tests(true)
        .disable_header_comment()
        .raw_line(HEAD)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .formatter(bindgen::Formatter::Rustfmt)
        .rustfmt_configuration_file(Some(std::path::absolute("rustfmt.toml").map_err(|e| e.to_string())?))
        .generate()
        .map_err(|e| format!("kernels/abi.h: {e}"))?;
    let text = with_short_layouts(&bindings.to_string()).ok_or("bindgen has another form of assertions about layouts")?;
    write(file, &text)?;
    Ok(text)
}

/// The source with one row for the layout of each struct, in place of an assertion for each number of it.
fn with_short_layouts(source: &str) -> Option<String> {
    let mut parts = source.split(ASSERTIONS);
    let mut short = parts.next()?.to_owned();
    for part in parts {
        let (assertions, rest) = part.split_once("};\n")?;
        // `["Offset of field: KlMat::scales"][… - 8usize];`, of which the name and the number are taken.
        let mut numbers = assertions.split_terminator(";\n").map(|assertion| {
            let (what, number) = (assertion.split('"').nth(1)?, assertion.rsplit_once(" - ")?.1);
            Some((what.rsplit([' ', ':']).next()?, number.strip_suffix("usize]")?))
        });
        let ((name, size), (_, align)) = (numbers.next()??, numbers.next()??);
        let mut line = format!("layout!({name}: {size} bytes, aligned to {align};");
        let mut separator = "";
        for field in numbers {
            let (field, offset) = field?;
            let next = format!(" {field} at {offset}");
            line += separator;
            if line.len() + next.len() > WIDTH {
                short += &line;
                short += "\n";
                line = "   ".into();
            }
            line += &next;
            separator = ",";
        }
        short += &format!("{line});\n{rest}");
    }
    Some(short)
}

/// The folder of the C compiler's own headers.
fn compiler_headers() -> Result<String> {
    let compiler = cc::Build::new().try_get_compiler().map_err(|e| e.to_string())?;
    let output = compiler.to_command().arg("-print-file-name=include").output().map_err(|e| format!("C compiler: {e}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
