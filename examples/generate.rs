//! Generates an image on the CPU: `cargo run --example generate -- [MODEL [PROMPT]]`. MODEL is a folder, a repository in the
//! Hugging Face cache, or (the default) `tiny`, a random model that needs no files and generates noise.
#![allow(clippy::print_stdout)] // this program's output is its purpose

use kiln::device::Cpu;
use kiln::progress::Silent;
use kiln::{Engine, Job, LoadOptions, output};
use std::path::Path;
use std::sync::Arc;

fn main() -> kiln::Result<()> {
    let mut args = std::env::args().skip(1);
    let model = kiln::open(args.next().as_deref().unwrap_or("tiny"))?;
    let prompt = args.next().unwrap_or("a red fox in the snow".into());

    let job = Job::new(&prompt, 7, &model.defaults, model.variant)?;
    let mut engine = Engine::load(Box::new(Cpu::shared(Arc::default())), model, LoadOptions::default(), &Silent)?;
    engine.generate(&job, &Silent, &mut |generated| {
        let path = Path::new("generated.png");
        output::save_new(path, &generated.image.encode_png(&[("prompt", prompt.clone())])?, true)?;
        println!("{}", path.display());
        Ok(())
    })
}
