//! Generates the Rust bindings of `kernels/abi.h` and compares them with the file in the tree. Normal builds use that file and need no
//! libclang.

use std::path::Path;

use crate::{Result, read, watched, write};

const CHECKED_IN: &str = "src/backend/cuda/abi.rs";

const HEAD: &str = "\
//! The Rust side of `kernels/abi.h`, written by bindgen; CONTRIBUTING.md says how. Not to be edited.

#![allow(missing_docs)]

/// A struct with the layout that the C compiler gives it: its size and alignment, and the offset of each field.
macro_rules! layout {
    ($name:ident: $size:literal bytes, aligned to $align:literal; $($offset:literal => $field:ident: $type:ty),*) => {
        #[repr(C, align($align))]
        #[derive(Debug, Copy, Clone)]
        pub struct $name { $(pub $field: $type),* }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    };
}";

/// The length of lines, less the room that the end of a row may need.
const WIDTH: usize = 130 - 2;

/// The text with which bindgen begins the assertions about a struct.
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
        // The libclang wheel has no headers of its own, but any compiler's freestanding <stdint.h> will do.
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
    let text = with_short_layouts(&bindings.to_string()).ok_or("bindgen's layout assertions have an unknown form")?;
    write(file, &text)?;
    Ok(text)
}

/// Replaces each struct's definition, and its assertion for each layout number, with a single row.
fn with_short_layouts(source: &str) -> Option<String> {
    let mut parts = source.split(ASSERTIONS);
    let (mut short, mut definition) = parts.next()?.split_once("#[repr(C)]\n")?;
    let mut text = short.to_owned();
    for part in parts {
        let (assertions, rest) = part.split_once("};\n")?;
        // The number is taken from `["Offset of field: KlMat::scales"][… - 8usize];`.
        let mut numbers =
            assertions.split_terminator(";\n").map(|assertion| assertion.rsplit_once(" - ")?.1.strip_suffix("usize]"));
        let (size, align) = (numbers.next()??, numbers.next()??);
        let (name, fields) = definition.split_once("pub struct ")?.1.split_once(" {\n")?;
        let mut line = format!("layout!({name}: {size} bytes, aligned to {align};");
        let mut separator = "";
        for (field, offset) in fields.lines().filter_map(|line| line.trim().strip_prefix("pub ")).zip(numbers) {
            let next = format!(" {} => {}", offset?, field.trim_end_matches(','));
            line += separator;
            if line.len() + next.len() > WIDTH {
                text += &line;
                text += "\n";
                line = "   ".into();
            }
            line += &next;
            separator = ",";
        }
        (short, definition) = rest.split_once("#[repr(C)]\n").unwrap_or((rest, ""));
        text += &format!("{line});\n{short}");
    }
    Some(text)
}

/// The folder of the C compiler's own headers.
fn compiler_headers() -> Result<String> {
    let compiler = cc::Build::new().try_get_compiler().map_err(|e| e.to_string())?;
    let output = compiler.to_command().arg("-print-file-name=include").output().map_err(|e| format!("C compiler: {e}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
