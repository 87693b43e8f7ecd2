//! What hand-overs and grants promise, over RDMA, between the memories of fake GPUs that network devices reach, where what
//! they write is not seen before it is flushed.
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
const IN: &str = "direct";

#[test]
fn a_missing_flush_is_caught() {
    assert!(common::gpus::fails_under(
        "handover::a_request_is_handed_over",
        "no_flush"
    ));
}
