//! The primitives under our own lock-free code, exchanged for loom's when its model checker runs.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicUsize, Ordering};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicUsize, Ordering};
