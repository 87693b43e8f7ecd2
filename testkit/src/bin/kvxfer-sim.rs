//! Runs the simulator over many seeds on all cores, or one seed with a trace, or the seeded mutants.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use clap::Parser;
use kvxfer_testkit::sim::{Coverage, Outcome, run_seed};
use parking_lot::Mutex;

/// A run of fewer seeds need not reach every point.
const SEEDS_FOR_COVERAGE: u64 = 3_000;
/// Failures printed, at most.
const FAILURES_SHOWN: usize = 20;

/// Endpoints under seeded schedules of delay, loss, death and changed minds.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Run only this seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Print everything that happens (with --seed).
    #[arg(long)]
    trace: bool,
    /// Run the seeded defects instead: each must be caught.
    #[arg(long)]
    mutants: bool,
    /// Only this mutant.
    #[arg(long)]
    mutant: Option<String>,
    /// Seeds given to each mutant, at most.
    #[arg(long, default_value_t = 10_000)]
    mutant_seeds: u64,
    /// Threads; all cores if not given.
    #[arg(long)]
    threads: Option<usize>,
    /// Go on after the first failures.
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let threads = arguments
        .threads
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1);
    let passed = match arguments.seed {
        _ if arguments.mutants || arguments.mutant.is_some() => mutants::run(&arguments, threads),
        Some(seed) => one(seed, arguments.trace),
        None => many(&arguments, threads),
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn one(seed: u64, trace: bool) -> bool {
    let outcome = run_seed(seed, trace);
    println!("seed {seed}: {} events, digest {:016x}", outcome.events, outcome.digest);
    for (point, count) in outcome.coverage.iter().filter(|(_, count)| *count > 0) {
        println!("  {count:>6}  {}", point.words());
    }
    report(&outcome);
    println!(
        "sim: {} passed, {} failed",
        u32::from(outcome.failure.is_none()),
        u32::from(outcome.failure.is_some())
    );
    outcome.failure.is_none()
}

fn many(arguments: &Arguments, threads: usize) -> bool {
    let began = Instant::now();
    let next = AtomicU64::new(arguments.first);
    let end = arguments.first + arguments.seeds;
    let stop = AtomicBool::new(false);
    let sum = Mutex::new((Coverage::new(), 0u64, 0u64, 0u64));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let outcome = run_seed(seed, false);
                    let mut sum = sum.lock();
                    sum.0.add_run(&outcome.coverage);
                    sum.1 += outcome.events;
                    if outcome.failure.is_none() {
                        sum.2 += 1;
                        continue;
                    }
                    sum.3 += 1;
                    report(&outcome);
                    if sum.3 as usize >= FAILURES_SHOWN && !arguments.keep_going {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let (coverage, events, passed, mut failed) = sum.into_inner();
    println!("coverage (seeds that reached each point):");
    for (point, count) in coverage.iter() {
        println!("  {count:>6}  {}", point.words());
    }
    let unreached: Vec<&str> = coverage
        .iter()
        .filter(|(_, count)| *count == 0)
        .map(|(point, _)| point.words())
        .collect();
    if !unreached.is_empty() && arguments.seeds >= SEEDS_FOR_COVERAGE {
        println!("never reached, so never checked: {}", unreached.join("; "));
        failed += unreached.len() as u64;
    }
    println!("{events} events in {:.1} s", began.elapsed().as_secs_f64());
    println!("sim: {passed} passed, {failed} failed");
    failed == 0
}

fn report(outcome: &Outcome) {
    if let Some(failure) = &outcome.failure {
        println!(
            "seed {} FAILED promise {}: {}\n  replay: cargo run --release -p kvxfer-testkit --bin kvxfer-sim -- --seed {} --trace",
            outcome.seed, failure.promise, failure.words, outcome.seed
        );
    }
}

#[cfg(not(feature = "mutants"))]
mod mutants {
    use super::Arguments;

    pub(super) fn run(_: &Arguments, _: usize) -> bool {
        println!("the mutants are not in this build: add --features mutants");
        false
    }
}

#[cfg(feature = "mutants")]
mod mutants {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use kvxfer_core::mutants::{Mutant, set};
    use kvxfer_testkit::sim::{Failure, run_seed};
    use parking_lot::Mutex;

    use super::Arguments;

    /// Runs each mutant over seeds until one catches it, and prints which oracle did.
    pub(super) fn run(arguments: &Arguments, threads: usize) -> bool {
        // A mutant may well trip over an assertion: that is caught, and said in the table.
        std::panic::set_hook(Box::new(|_| {}));
        let chosen = |mutant: &&Mutant| arguments.mutant.as_deref().is_none_or(|name| name == mutant.name());
        let (mut passed, mut failed) = (0, 0);
        println!("{:<26} {:>6} {:>6}  caught by", "mutant", "seed", "s");
        for mutant in Mutant::ALL.iter().filter(chosen) {
            let began = Instant::now();
            let caught = hunt(*mutant, arguments, threads);
            let seconds = began.elapsed().as_secs_f64();
            match caught {
                Some((seed, failure)) => {
                    passed += 1;
                    let words: String = failure.words.chars().take(150).collect();
                    println!(
                        "{:<26} {seed:>6} {seconds:>6.1}  {}: {words}",
                        mutant.name(),
                        failure.promise
                    );
                }
                None => {
                    failed += 1;
                    println!("{:<26} {:>6} {seconds:>6.1}  SURVIVED", mutant.name(), "-");
                }
            }
        }
        println!("mutants: {passed} passed, {failed} failed");
        failed == 0 && passed > 0
    }

    /// The lowest seed that catches the mutant.
    fn hunt(mutant: Mutant, arguments: &Arguments, threads: usize) -> Option<(u64, Failure)> {
        let next = AtomicU64::new(arguments.first);
        let end = arguments.first + arguments.mutant_seeds;
        let best: Mutex<Option<(u64, Failure)>> = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    set(Some(mutant));
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        let limit = best.lock().as_ref().map_or(end, |(seed, _)| *seed);
                        if seed >= limit {
                            return;
                        }
                        let Some(failure) = run_seed(seed, false).failure else {
                            continue;
                        };
                        // Caught is what honest code does not do.
                        set(None);
                        let honest = run_seed(seed, false).failure.is_none();
                        set(Some(mutant));
                        if honest {
                            let mut best = best.lock();
                            if best.as_ref().is_none_or(|(other, _)| seed < *other) {
                                *best = Some((seed, failure));
                            }
                        }
                    }
                });
            }
        });
        best.into_inner()
    }
}
