//! What each named workload moves.
#![allow(clippy::print_stdout)]

use kvxfer_bench::work::Named;

fn main() -> kvxfer_core::Result<()> {
    for workload in [Named::W1, Named::W2, Named::W3, Named::W4, Named::W5] {
        let work = workload.work(1 << 30)?;
        println!(
            "{}: {} pieces of {} bytes in {} planes, {} MiB",
            workload.name(),
            work.pieces(),
            work.bytes() / work.pieces(),
            work.shape.planes,
            work.bytes() >> 20
        );
    }
    Ok(())
}
