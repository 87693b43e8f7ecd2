//! What endpoints promise, over RDMA.
#![allow(missing_docs)]

mod roce_handover {
    kvxfer_cases::handover!(kvxfer_cases::RDMA);
}
mod roce_grants {
    kvxfer_cases::grants!(kvxfer_cases::RDMA);
}
mod roce_faults {
    kvxfer_cases::faults!(kvxfer_cases::RDMA);
}
mod roce_reuse {
    kvxfer_cases::reuse!(kvxfer_cases::RDMA);
}
mod roce_rails {
    kvxfer_cases::rails!(kvxfer_cases::RDMA);
}
