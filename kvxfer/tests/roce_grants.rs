//! The layer below, over RDMA.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

#[path = "cases/grants.rs"]
mod cases;
mod common;

/// What their bytes go over.
const OVER: &str = "rdma";
/// Where their pools are.
const IN: &str = "host";
