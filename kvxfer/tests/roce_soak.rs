//! Many hand-overs with random faults, over RDMA.
#![allow(missing_docs)]

mod cases {
    kvxfer_cases::soak!(kvxfer_cases::RDMA);
}
