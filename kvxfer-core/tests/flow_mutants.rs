//! Each seeded defect of the data plane must be caught by the models that hold its promises:
//! `cargo test -p kvxfer-core --features mutants --test flow_mutants`.
#![cfg(feature = "mutants")]

#[path = "flow_models/fair.rs"]
mod fair;
mod flow_common;
#[path = "flow_models/link.rs"]
mod link;
#[path = "flow_models/one_sided.rs"]
mod one_sided;
#[path = "flow_models/slots.rs"]
mod slots;

use kvxfer_core::mutants::{self, Mutant};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Which check catches which mutant: the names of those that failed.
fn caught_by(mutant: Option<Mutant>) -> Vec<&'static str> {
    mutants::set(mutant);
    let mut caught = Vec::new();
    if runner().run(&slots::ops(), |ops| slots::run(&ops)).is_err() {
        caught.push("slots");
    }
    if runner().run(&any::<u64>(), link::run).is_err() {
        caught.push("link");
    }
    if fair::small_behind_large().is_err() || fair::equal_shares().is_err() {
        caught.push("fair");
    }
    if one_sided::all().is_err() {
        caught.push("one_sided");
    }
    mutants::set(None);
    caught
}

fn runner() -> TestRunner {
    let config = Config {
        cases: 1000,
        failure_persistence: None,
        max_shrink_iters: 0,
        ..Config::default()
    };
    // The same cases each time: a mutant that gets away gets away again.
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

#[test]
fn each_mutant_is_caught_and_the_original_is_not() {
    assert_eq!(caught_by(None), [""; 0], "without a mutant");
    let data_plane = [
        Mutant::SkipFence,
        Mutant::IgnoreGeneration,
        Mutant::AckEarly,
        Mutant::CountTwice,
        Mutant::ReuseSlotEarly,
        Mutant::IgnoreWriter,
        Mutant::LoseOverlapCheck,
        Mutant::AcceptInvalidTrailer,
        Mutant::CancelWinsOverArrived,
        Mutant::ResendWithoutFence,
        Mutant::DropInDoubt,
        Mutant::ForgetMessage,
        Mutant::StarveSmall,
        Mutant::UnboundedWindow,
        Mutant::QuietEarly,
        Mutant::AdmitWithoutGate,
        Mutant::TakeLostReads,
    ];
    let mut lost = Vec::new();
    for mutant in data_plane {
        let caught = caught_by(Some(mutant));
        eprintln!("{}: caught by {caught:?}", mutant.name());
        if caught.is_empty() {
            lost.push(mutant.name());
        }
    }
    assert_eq!(lost, [""; 0], "mutants that got away");
}
