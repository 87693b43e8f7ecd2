//! What hand-overs and grants promise, over TCP, out of the host's memory into that of a fake GPU.
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
const IN: &str = "destination";
