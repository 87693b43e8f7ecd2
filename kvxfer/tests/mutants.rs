//! Defects on purpose, in the transport's engine: the tests of what RDMA promises at the endpoint must fail under each.
//! Runs with the feature `mutants`, on fakes.
#![cfg(feature = "mutants")]
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::print_stdout)]

mod rails {
    kvxfer_cases::rails!(kvxfer_cases::RDMA);
}
mod reuse {
    kvxfer_cases::reuse!(kvxfer_cases::RDMA);
}

use std::process::Command;

use kvxfer_core::mutants::Mutant;

/// Which test must fail under which mutant.
const CAUGHT: &[(Mutant, &str)] = &[
    (
        Mutant::RevokedEarly,
        "reuse::claims_are_aborted_and_their_blocks_reused",
    ),
    (
        Mutant::RevokedEarly,
        "reuse::grants_are_cancelled_and_their_blocks_reused",
    ),
    (
        Mutant::ForgetRevoke,
        "reuse::grants_are_cancelled_and_their_blocks_reused",
    ),
    (
        Mutant::ReadWithoutGate,
        "reuse::pulls_are_aborted_and_their_blocks_reused",
    ),
    (
        Mutant::ResetInsteadOfError,
        "rails::a_rail_that_goes_down_is_left_and_rejoins",
    ),
];

/// Runs one test of this binary in a process of its own. Whether it passes.
fn passes(test: &str, mutant: Option<Mutant>) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored", "--test-threads=1"]);
    if let Some(mutant) = mutant {
        command.env(kvxfer_cases::common::site::MUTANT, mutant.name());
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // A process that died, or ran nothing, has not caught anything.
    assert!(
        said.contains("1 passed") || said.contains("1 failed"),
        "{test} under {mutant:?}: {}\n{said}",
        output.status
    );
    output.status.success()
}

#[test]
fn each_is_caught() {
    let mut escaped = Vec::new();
    for (mutant, test) in CAUGHT {
        let caught = !passes(test, Some(*mutant));
        println!(
            "{}: {test}: {}",
            mutant.name(),
            if caught { "caught" } else { "not caught" }
        );
        if !caught {
            escaped.push((mutant.name(), test));
        }
    }
    assert!(escaped.is_empty(), "{escaped:?}");
}
