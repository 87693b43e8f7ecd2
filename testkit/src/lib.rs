//! What the tests of kvxfer are made of: a deterministic simulator, a kind of memory the CPU cannot touch,
//! verification patterns, two ends of a transport without a control plane, and helpers for tests with real processes.
//! Used by tests and benchmarks only.

pub mod cost;
#[cfg(feature = "gpus")]
pub mod gpus;
pub mod pattern;
pub mod process;
pub mod rng;
pub mod sim;
pub mod staged;
pub mod touch;
pub mod transport;
