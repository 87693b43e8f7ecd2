//! The verbs layer and the registry on devices: whatever the library named by `KVXFER_RDMA_LIBRARY` (else the system's) has.
//! On soft-RoCE, on hardware, or on the fake verbs; where there is no usable port, every test says that it is skipped.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod ends;
mod registry;
mod transfers;
