//! Generates images on a GPU from many threads: `cargo run --release --example gpu -- [MODEL [PROMPT...]]`. MODEL is a folder, a
//! repository in the Hugging Face cache, or (the default) `tiny`. The engine lives on a thread of its own, so that any thread may ask
//! it for an image. Without a GPU the example says why there is none.
#![allow(clippy::print_stdout)] // this program's output is its purpose

use kiln::output::save_new;
use kiln::progress::Silent;
use kiln::service::Service;
use kiln::{Engine, Job, LoadOptions};
use std::path::PathBuf;
use std::sync::Arc;

fn main() -> kiln::Result<()> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or("tiny".into());
    let mut prompts: Vec<String> = args.collect();
    if prompts.is_empty() {
        prompts = ["a red fox in the snow", "a lighthouse at night"].map(String::from).into();
    }
    let build = move || {
        let model = kiln::open(&name)?;
        let (defaults, variant) = (model.defaults.clone(), model.variant);
        let engine = Engine::load(Box::new(kiln::open_gpu(0)?), model, LoadOptions::default(), &Silent)?;
        Ok((engine, (defaults, variant)))
    };
    let (service, (defaults, variant)) = match Service::start(build) {
        Ok(started) => started,
        Err(error @ kiln::Error::NoGpu { .. }) => {
            println!("{error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    // Submits all jobs before the first image is ready; each ticket waits for its own image.
    let jobs = prompts.iter().zip(7..).map(|(prompt, seed)| Job::new(prompt, seed, &defaults, variant));
    let tickets = jobs.map(|job| Ok(service.submit(job?, Arc::new(Silent)))).collect::<kiln::Result<Vec<_>>>()?;
    for (i, (ticket, prompt)) in tickets.into_iter().zip(prompts).enumerate() {
        for generated in ticket.wait()? {
            let path = PathBuf::from(format!("gpu-{i}.png"));
            save_new(&path, &generated.image.encode_png(&[("prompt", prompt.clone())])?, true)?;
            println!("{}", path.display());
        }
    }
    Ok(())
}
