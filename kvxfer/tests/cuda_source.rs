//! What hand-overs and grants promise, over TCP, out of the memory of a fake GPU into the host's.
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
const IN: &str = "source";
