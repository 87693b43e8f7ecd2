//! The control plane's machines, joined in memory: every message and every ending.

mod handoff;
mod sessions;
mod transfers;
mod world;
