//! Benchmarks the CPU ops at shapes of klein 4B: `cargo bench --bench kernels -- [FILTER] [--json FILE]`. `kiln bench --kernels`
//! does the same, and also on a GPU. This program can alternate with another one (`--serve`). `bench/README.md` describes how
//! runs are recorded.
#![allow(clippy::print_stdout)] // this program's output is its purpose

use clap::Parser;
use kiln::internals::backend::Backend;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::tensor::Precision;
use kiln::microbench::{Protocol, Row, Scale, rows};
use std::fs::File;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// Benchmarks the CPU ops at shapes of klein 4B.
#[derive(Parser)]
#[command(bin_name = "cargo bench --bench kernels --")]
struct Args {
    /// Run only rows whose name contains this text.
    filter: Option<String>,
    /// Also write one JSON object per row, with the seconds of every batch.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Worker threads (0: one per core).
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// For every line on stdin, time one run of the first row with exactly this name and print its seconds. Used by comparisons
    /// that alternate with another program.
    #[arg(long, value_name = "ROW", conflicts_with_all = ["filter", "json"])]
    serve: Option<String>,
    /// Passed by `cargo bench` and ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let args = Args::parse();
    let mut cpu = Cpu::new(args.threads, Arc::default())?;
    let mut all = rows(Scale::Processor, Precision::Bf16, cpu.gemm_formats())?.into_iter();
    if let Some(name) = &args.serve {
        let row = all.find(|row| row.op.name() == name).ok_or("no row has that name")?;
        return serve(&row, &mut cpu);
    }
    let filter = args.filter.unwrap_or_default();
    let wanted: Vec<Row> = all.filter(|row| row.op.name().contains(&filter)).collect();
    if wanted.is_empty() {
        return Err("no row has that name".into());
    }
    let mut json = args.json.map(File::create).transpose()?;
    for row in wanted {
        let figure = row.measure(&mut cpu, &Protocol::FULL)?;
        println!("{}", figure.line());
        if let Some(file) = &mut json {
            writeln!(file, "{}", serde_json::to_string(&figure)?)?;
        }
    }
    Ok(())
}

fn serve(row: &Row, cpu: &mut dyn Backend) -> Result<()> {
    let prepared = row.prepare(cpu, 1)?;
    prepared.warm_up(cpu)?;
    println!("ready {}", row.work.flops);
    for _line in std::io::stdin().lock().lines() {
        println!("{}", prepared.seconds(cpu, 1)?);
    }
    Ok(())
}
