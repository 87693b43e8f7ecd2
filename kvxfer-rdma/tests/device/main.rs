//! The verbs layer and the registry on devices: the fake ones, or those of the library that `KVXFER_RDMA_LIBRARY` names
//! (`libibverbs.so.1`: the system's, for soft-RoCE and hardware; without a usable port every test says that it is
//! skipped). What only fake devices can be made to do is in `faults`.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod ends;
mod faults;
mod registry;
mod transfers;
