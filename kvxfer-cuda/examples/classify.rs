//! Says what CUDA this machine has, and what addresses are: `cargo run -p kvxfer-cuda --example classify [LIBRARY]`.
//! Runs with and without a driver.

use std::process::ExitCode;

use kvxfer_cuda::{Cuda, CudaConfig, probe};

#[allow(clippy::print_stdout)]
fn main() -> ExitCode {
    let config = CudaConfig {
        library: std::env::args().nth(1).unwrap_or_default(),
        ..CudaConfig::default()
    };
    print!("{}", probe(&config));
    let cuda = match Cuda::load(&config) {
        Ok(cuda) => cuda,
        Err(error) => {
            println!("CUDA is not used: {error}");
            return ExitCode::SUCCESS;
        }
    };
    let local = 0u8;
    let heap = vec![0u8; 4096];
    for (what, address) in [
        ("a local variable", &raw const local as u64),
        ("memory of the heap", heap.as_ptr() as u64),
        ("nothing", 0x1000),
    ] {
        match cuda.classify(address) {
            Ok(found) => println!("{what} at {address:#x}: {}", found.kind),
            Err(error) => println!("{what} at {address:#x}: {error}"),
        }
    }
    // SAFETY: host memory is refused before any use.
    match unsafe { cuda.region(heap.as_ptr() as u64, 4096, Box::new(())) } {
        Ok(region) => println!("a region: {region:?}"),
        Err(error) => println!("a region of host memory is refused: {error}"),
    }
    ExitCode::SUCCESS
}
