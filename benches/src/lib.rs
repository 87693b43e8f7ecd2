//! `kvxfer-bench`: demonstrates, measures, replays and diagnoses kvxfer.

pub mod memory;
pub mod raw;
pub mod rng;
pub mod stamps;
pub mod work;

use std::process::ExitCode;

/// Runs the command.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
