//! Parses the report of ptxas on each kernel (`-Xptxas -v`), for the build script and tests/static/kernels.rs.

/// The heading of the resource table. Numbers after the registers are bytes. They are left out if all are zero.
pub const HEADING: &str = "# file kernel: architecture registers[/stack/spills/shared]";

/// The resources of one kernel on one architecture.
#[derive(Default)]
pub struct Usage {
    pub kernel: String,
    pub arch: String,
    pub registers: u32,
    pub stack: u32,
    /// Spill stores and loads together.
    pub spill: u32,
    pub shared: u32,
}

impl Usage {
    fn cell(&self) -> String {
        let Self { arch, registers, stack, spill, shared, .. } = self;
        match (stack, spill, shared) {
            (0, 0, 0) => format!("{arch} {registers}"),
            _ => format!("{arch} {registers}/{stack}/{spill}/{shared}"),
        }
    }
}

/// The rows of a file in the resource table, one for each of its kernels.
pub fn rows(file: &str, usages: &[Usage]) -> Vec<String> {
    let kernels = usages.chunk_by(|a, b| a.kernel == b.kernel);
    let cells = |usages: &[Usage]| usages.iter().map(Usage::cell).collect::<Vec<_>>().join(", ");
    kernels.map(|usages| format!("{file} {}: {}", usages[0].kernel, cells(usages))).collect()
}

/// Whether a line is informational; all other lines are warnings and errors.
pub fn is_information(line: &str) -> bool {
    line.starts_with("ptxas info") || line.contains("bytes stack frame")
}

/// Whether a line says that `wgmma` instructions are serialized, or that `setmaxnreg` is ignored. ptxas prints the latter with and
/// without quotes.
pub fn is_loss(line: &str) -> bool {
    line.contains("wgmma.mma_async instructions are serialized") || line.replace('\'', "").contains("setmaxnreg ignored")
}

/// The kernels of a report, sorted by name.
pub fn usages(report: &str) -> Result<Vec<Usage>, String> {
    let mut found: Vec<Usage> = Vec::new();
    for line in report.lines() {
        if let Some((_, entry)) = line.split_once("Compiling entry function '") {
            let (kernel, arch) = entry.split_once("' for '").ok_or_else(|| format!("ptxas said `{line}`"))?;
            found.push(Usage { kernel: kernel.into(), arch: arch.trim_end_matches('\'').into(), ..Usage::default() });
        } else if let Some(usage) = found.last_mut() {
            // The numbers of a function that was not inlined count toward the kernel above it.
            usage.stack += before(line, " bytes stack frame");
            usage.spill += before(line, " bytes spill stores") + before(line, " bytes spill loads");
            usage.registers = usage.registers.max(before(line, " registers"));
            usage.shared += before(line, " bytes smem");
        }
    }
    if let Some(usage) = found.iter().find(|usage| usage.registers == 0) {
        return Err(format!("ptxas did not say how many registers `{}` takes", usage.kernel));
    }
    // The sort is stable, so the architectures stay in the order in which they were compiled.
    found.sort_by(|a, b| a.kernel.cmp(&b.kernel));
    Ok(found)
}

/// The number in front of these words, or 0 if the line does not contain them.
fn before(line: &str, words: &str) -> u32 {
    let text = line.split_once(words).map_or("", |(text, _)| text);
    text.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}
