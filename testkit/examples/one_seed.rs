//! Runs one seed of the simulator twice: it passes, and the two runs are the same.
//!
//! `cargo run -p kvxfer-testkit --example one_seed -- SEED`
#![allow(clippy::print_stdout)]

use kvxfer_testkit::sim::run_seed;

fn main() {
    let seed = std::env::args()
        .nth(1)
        .map_or(17, |word| word.parse().expect("a seed is a number"));
    let (first, again) = (run_seed(seed, false), run_seed(seed, false));
    assert_eq!(first.digest, again.digest, "a seed determines its run");
    match first.failure {
        None => println!("seed {seed}: {} events, every promise kept", first.events),
        Some(failure) => panic!("seed {seed} broke promise {}: {}", failure.promise, failure.words),
    }
}
