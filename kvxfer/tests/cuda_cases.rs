//! What endpoints promise, with pools in the memory of fake GPUs.
#![allow(missing_docs)]

kvxfer_cases::tests_at! {
    /// Over TCP, out of a GPU's memory into the host's.
    cuda_source, TCP.on_gpus("source") => handover, grants, faults;

    /// Over TCP, out of the host's memory into a GPU's.
    cuda_destination, TCP.on_gpus("destination") => handover, grants, faults;

    /// Over TCP, between GPUs' memories.
    cuda_both, TCP.on_gpus("both") => handover, grants, faults;

    /// On one host, between GPUs' memories that the other side has mapped.
    cuda_mapped, TCP.on_gpus("both").mapped() => handover, grants, faults;

    /// Over RDMA, between GPUs' memories that network devices reach, where what they write is not seen before it is flushed.
    cuda_direct, RDMA.on_gpus("both").directly() => handover, grants, faults, reuse;

    /// Over RDMA, between GPUs' memories that network devices do not reach.
    cuda_staged, RDMA.on_gpus("both") => handover, grants, faults, reuse;

    /// Over RDMA, out of a GPU's memory that network devices reach into the host's.
    cuda_direct_source, RDMA.on_gpus("source").directly() => handover, grants, reuse(
        claims_are_aborted_and_their_blocks_reused,
        blocks_retracted_while_they_are_read_never_arrive
    );

    /// Over RDMA, out of the host's memory into a GPU's that network devices reach, where what they write is not seen before
    /// it is flushed.
    cuda_direct_destination, RDMA.on_gpus("destination").directly() => handover, grants, reuse(
        claims_are_aborted_and_their_blocks_reused,
        pulls_are_aborted_and_their_blocks_reused
    );

    /// Over RDMA, out of a GPU's memory that network devices do not reach into the host's.
    cuda_staged_source, RDMA.on_gpus("source") => handover, grants, reuse(
        claims_are_aborted_and_their_blocks_reused,
        blocks_retracted_while_they_are_read_never_arrive
    );

    /// Over RDMA, out of the host's memory into a GPU's that network devices do not reach.
    cuda_staged_destination, RDMA.on_gpus("destination") => handover, grants, reuse(
        claims_are_aborted_and_their_blocks_reused,
        pulls_are_aborted_and_their_blocks_reused
    );
}

/// A hand-over in that place fails under each.
fn assert_caught(place: &str, defects: &[&str]) {
    let test = format!("cuda_cases::{place}::handover::a_request_is_handed_over");
    for defect in defects {
        assert!(kvxfer_cases::fails_under(&test, defect), "{place}: {defect}");
    }
}

#[test]
fn defects_on_purpose_are_caught() {
    assert_caught("cuda_both", &["no_completion", "wrong_context"]);
}

#[test]
fn copies_that_are_not_waited_for_are_caught() {
    assert_caught("cuda_mapped", &["no_completion"]);
    assert_caught("cuda_staged", &["no_completion"]);
}

#[test]
fn a_missing_flush_is_caught() {
    assert_caught("cuda_direct", &["no_flush"]);
}
