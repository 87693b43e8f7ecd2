//! Memory: where each address leads, what is allocated, pinned and mapped there, and the device's bytes.

pub(crate) mod attributes;
pub(crate) mod backing;
pub(crate) mod map;
pub(crate) mod opened;
pub(crate) mod span;
