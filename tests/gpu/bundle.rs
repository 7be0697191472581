//! Commands that only the `run` script of `tools/gpu_bundle` uses: planted bugs, a GPU with little free memory, a NaN in a weight.

use kiln::error::{Error, Result};
use kiln::internals::backend::cuda::System;
use kiln::internals::backend::cuda::driver::{Driver, Launch};
use kiln::internals::checkpoint::Shard;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Values per buffer of `planted.cu`, and threads per CTA.
const COUNT: u32 = 64;

/// Launches the kernel of the compiled `planted.cu` with the bug for this sanitizer, once. The launch may fail, since the bug may be fatal.
pub fn planted(tool: &str, image: &Path) -> Result<()> {
    let image = std::fs::read(image).map_err(|e| Error::read(image, e))?;
    let driver = System::open(0)?;
    let (module, stream) = (driver.load(&image)?, driver.stream()?);
    let addresses = [driver.allocate(u64::from(COUNT) * 4)?, driver.allocate(u64::from(COUNT) * 4)?];
    let params: Vec<u8> = addresses.iter().flat_map(|address| address.to_ne_bytes()).collect();
    let function = driver.function(module, &format!("planted_{tool}"), params.len(), 0)?;
    let launch = Launch { function, grid: [1, 1, 1], threads: COUNT, shared: 0, cluster: 1, overlap: false };
    let done = driver.launch(stream, &launch, &params).and_then(|()| driver.synchronize(stream));
    addresses.into_iter().for_each(|address| driver.free(address));
    driver.destroy_stream(stream);
    driver.unload(module);
    done
}

/// Allocates all GPU memory except about `left` bytes, prints how much is left, and keeps it until the process is ended.
pub fn ballast(left: u64) -> Result<()> {
    let driver = System::open(0)?;
    // Free memory need not be contiguous.
    let mut piece = driver.free_memory()?.saturating_sub(left);
    while piece >= 1 << 20 {
        match driver.allocate(piece) {
            Ok(_) => piece = driver.free_memory()?.saturating_sub(left),
            Err(Error::DeviceMemory { .. }) => piece /= 2,
            Err(error) => return Err(error),
        }
    }
    println!("ballast: {} bytes left", driver.free_memory()?);
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}

/// Overwrites the first value of a bf16 tensor in a file with NaN.
pub fn spoil(file: &Path, tensor: &str) {
    let place = Shard::open(file).unwrap().entry(tensor).expect("no such tensor").range.start;
    let mut bytes = std::fs::read(file).unwrap();
    bytes[place..place + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    std::fs::write(file, bytes).unwrap();
}
