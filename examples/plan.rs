//! Prints what an image would cost, without reading a weight: `cargo run --example plan -- [MODEL [WIDTH HEIGHT]]`. MODEL is a
//! folder, a repository in the Hugging Face cache, or (the default) `tiny`, a random model that needs no files.
#![allow(clippy::print_stdout)] // this program's output is its purpose

use kiln::device::gemm_formats;
use kiln::{Job, LoadOptions, Pixels, estimate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let model = kiln::open(args.first().map_or("tiny", String::as_str))?;

    let mut job = Job::new("any prompt costs the same", 0, &model.defaults, model.variant)?;
    if let [_, width, height] = &args[..] {
        job.size = Pixels::new(width.parse()?, height.parse()?)?;
    }
    // On a Hopper GPU, which multiplies FP8 weights as stored.
    let plan = estimate(model.estimate_request(LoadOptions::default(), gemm_formats((9, 0))), &job)?;
    println!("{}, {}x{}, {} steps", model.name, job.size.width(), job.size.height(), job.steps);
    println!("{} text tokens and {} image tokens", plan.text_tokens, plan.canvas_tokens);
    for (stage, flops) in &plan.stages {
        println!("{stage:?}: {:.3} GFLOP", *flops as f64 / 1e9);
    }
    println!("{} bytes of weights, {} bytes of workspace", plan.weight_bytes, plan.arena_bytes);
    Ok(())
}
