//! The control plane's machines, joined in memory: every message and every ending.
#![allow(clippy::unwrap_used)] // The helpers of tests are tests.

mod events;
mod handoff;
mod one_sided;
mod sessions;
mod transfers;
mod world;
