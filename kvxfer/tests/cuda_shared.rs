//! What hand-overs and grants promise, on one host, between the memories of fake GPUs that are mapped by the other side.
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
const IN: &str = "shared";
