//! `kvxfer-bench`: demonstrates, measures, replays and diagnoses kvxfer.

mod control;
mod doctor;
pub mod memory;
pub mod raw;
pub mod rng;
pub mod stamps;
mod statistics;
mod terminal;
mod trace;
mod usage;
pub mod work;

use std::process::ExitCode;

/// Runs the command.
pub fn main() -> ExitCode {
    let _ = doctor::run(false);
    ExitCode::SUCCESS
}
