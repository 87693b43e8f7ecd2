//! What hand-overs and grants promise, over TCP, between the memories of fake GPUs.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

#[path = "cases/faults.rs"]
mod cases;
mod common;
#[path = "cases/grants.rs"]
mod grants;
#[path = "cases/handover.rs"]
mod handover;

/// What their bytes go over.
const OVER: &str = "tcp";
/// Where their pools are.
const IN: &str = "both";

#[test]
fn defects_on_purpose_are_caught() {
    for defect in ["no_completion", "wrong_context"] {
        assert!(
            common::gpus::fails_under("handover::a_request_is_handed_over", defect),
            "{defect}"
        );
    }
}
