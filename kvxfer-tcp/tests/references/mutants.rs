//! Each seeded mistake must be caught by a test that passes without it.

use std::process::Command;

use kvxfer_core::mutants::{self, Mutant};

/// Says to a child which one is meant.
const VARIABLE: &str = "KVXTEST_MUTANT";

const CAUGHT: &[(Mutant, &str)] = &[
    (
        Mutant::CountUnasked,
        "a_source_taken_back_while_it_is_copied_never_counts",
    ),
    (
        Mutant::CountTakenBack,
        "a_source_taken_back_while_it_is_copied_never_counts",
    ),
    (
        Mutant::ImportWithoutGate,
        "a_slot_closed_while_it_is_copied_into_is_fenced_after_the_copies",
    ),
    (
        Mutant::CountAfterLoss,
        "a_lane_lost_while_the_source_is_taken_back_leaves_nothing_that_counts",
    ),
];

/// Data threads that are started from here on have it.
pub(super) fn switch_on() {
    let named = std::env::var(VARIABLE).unwrap_or_default();
    let mutant = Mutant::TCP.iter().find(|mutant| mutant.name() == named);
    mutants::set(mutant.copied());
}

#[test]
fn each_is_caught() {
    assert!(
        Mutant::TCP
            .iter()
            .all(|mutant| CAUGHT.iter().any(|(caught, _)| caught == mutant))
    );
    for (mutant, test) in CAUGHT {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--test-threads=1"]);
        let output = command.env(VARIABLE, mutant.name()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("1 failed"), "{mutant:?} was not caught: {said}");
    }
}
