//! The RDMA transport: one-sided writes and reads over verbs.
//!
//! Three layers: [`sys`] is libibverbs as it is, loaded at run time; [`verbs`] owns its objects and turns what it
//! refuses into errors that name the verb and the device; the engine moves bytes.

pub mod gid;
pub mod probe;
pub mod registry;
pub mod sys;
mod text;
pub mod topology;
pub mod verbs;
