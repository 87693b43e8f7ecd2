//! What hand-overs and grants promise, over RDMA, between the memories of fake GPUs that network devices do not reach.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

#[path = "cases/faults.rs"]
mod cases;
mod common;
#[path = "cases/grants.rs"]
mod grants;
#[path = "cases/handover.rs"]
mod handover;
#[path = "cases/reuse.rs"]
mod reuse;

/// What their bytes go over.
const OVER: &str = "rdma";
/// Where their pools are.
const IN: &str = "both";

#[test]
fn copies_that_are_not_waited_for_are_caught() {
    let test = "handover::a_request_is_handed_over";
    assert!(common::gpus::fails_under(test, "no_completion"));
}
