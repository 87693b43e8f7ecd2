//! `kvxfer-bench`: demonstrates, measures, replays and diagnoses kvxfer.
//!
//! The library part is what the command, its tests and the Criterion benches share: workloads, memory, the checks, and
//! the plain-socket baseline.

mod cli;
mod control;
mod demo;
mod doctor;
mod figures;
mod gpu_check;
mod measure;
mod measured;
pub mod memory;
mod node;
mod perftest;
pub mod raw;
mod replay;
pub mod rng;
mod run;
mod side;
pub mod stamps;
mod statistics;
mod terminal;
mod trace;
mod usage;
mod way;
pub mod work;

use std::process::ExitCode;

/// Runs the command that the program's arguments name.
pub fn main() -> ExitCode {
    // The child processes speak on standard output, so what the library logs goes to standard error.
    if std::env::var_os("RUST_LOG").is_some() {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .init();
    }
    cli::main()
}
