//! What endpoints promise, with pools in the memory of fake GPUs.
#![allow(missing_docs)]

/// Over TCP, out of a GPU's memory into the host's.
mod cuda_source {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::TCP.on_gpus("source");

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod faults {
        kvxfer_cases::faults!(super::HERE);
    }
}

/// Over TCP, out of the host's memory into a GPU's.
mod cuda_destination {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::TCP.on_gpus("destination");

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod faults {
        kvxfer_cases::faults!(super::HERE);
    }
}

/// Over TCP, between GPUs' memories.
mod cuda_both {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::TCP.on_gpus("both");

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod faults {
        kvxfer_cases::faults!(super::HERE);
    }

    #[test]
    fn defects_on_purpose_are_caught() {
        super::assert_caught(module_path!(), &["no_completion", "wrong_context"]);
    }
}

/// On one host, between GPUs' memories that the other side has mapped.
mod cuda_mapped {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::TCP.on_gpus("both").mapped();

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod faults {
        kvxfer_cases::faults!(super::HERE);
    }

    #[test]
    fn copies_that_are_not_waited_for_are_caught() {
        super::assert_caught(module_path!(), &["no_completion"]);
    }
}

/// Over RDMA, between GPUs' memories that network devices reach, where what they write is not seen before it is flushed.
mod cuda_direct {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::RDMA.on_gpus("both").directly();

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod faults {
        kvxfer_cases::faults!(super::HERE);
    }
    mod reuse {
        kvxfer_cases::reuse!(super::HERE);
    }

    #[test]
    fn a_missing_flush_is_caught() {
        super::assert_caught(module_path!(), &["no_flush"]);
    }
}

/// Over RDMA, between GPUs' memories that network devices do not reach.
mod cuda_staged {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::RDMA.on_gpus("both");

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod faults {
        kvxfer_cases::faults!(super::HERE);
    }
    mod reuse {
        kvxfer_cases::reuse!(super::HERE);
    }

    #[test]
    fn copies_that_are_not_waited_for_are_caught() {
        super::assert_caught(module_path!(), &["no_completion"]);
    }
}

/// Over RDMA, out of a GPU's memory that network devices reach into the host's.
mod cuda_direct_source {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::RDMA.on_gpus("source").directly();

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod reuse {
        kvxfer_cases::reuse!(
            super::HERE,
            claims_are_aborted_and_their_blocks_reused,
            blocks_retracted_while_they_are_read_never_arrive
        );
    }
}

/// Over RDMA, out of the host's memory into a GPU's that network devices reach, where what they write is not seen before it is
/// flushed.
mod cuda_direct_destination {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::RDMA.on_gpus("destination").directly();

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod reuse {
        kvxfer_cases::reuse!(
            super::HERE,
            claims_are_aborted_and_their_blocks_reused,
            pulls_are_aborted_and_their_blocks_reused
        );
    }
}

/// Over RDMA, out of a GPU's memory that network devices do not reach into the host's.
mod cuda_staged_source {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::RDMA.on_gpus("source");

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod reuse {
        kvxfer_cases::reuse!(
            super::HERE,
            claims_are_aborted_and_their_blocks_reused,
            blocks_retracted_while_they_are_read_never_arrive
        );
    }
}

/// Over RDMA, out of the host's memory into a GPU's that network devices do not reach.
mod cuda_staged_destination {
    use kvxfer_cases::Place;

    const HERE: Place = kvxfer_cases::RDMA.on_gpus("destination");

    mod handover {
        kvxfer_cases::handover!(super::HERE);
    }
    mod grants {
        kvxfer_cases::grants!(super::HERE);
    }
    mod reuse {
        kvxfer_cases::reuse!(
            super::HERE,
            claims_are_aborted_and_their_blocks_reused,
            pulls_are_aborted_and_their_blocks_reused
        );
    }
}

/// A hand-over, in that module, fails under each.
fn assert_caught(module: &str, defects: &[&str]) {
    let test = format!("{module}::handover::a_request_is_handed_over");
    for defect in defects {
        assert!(kvxfer_cases::fails_under(&test, defect), "{defect}");
    }
}
