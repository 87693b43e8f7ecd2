//! The RDMA transport: one-sided writes and reads over verbs.
//!
//! Three layers: [`sys`] is libibverbs as it is, loaded at run time; [`verbs`] owns its objects and turns what it
//! refuses into errors that name the verb and the device; the engine moves bytes.

mod advert;
mod checksum;
mod clock;
mod config;
mod counters;
mod device;
mod engine;
mod error;
pub mod gid;
mod inbound;
mod link;
mod message;
mod outbound;
pub mod probe;
mod rails;
mod random;
pub mod registry;
pub mod sys;
mod text;
pub mod topology;
mod transport;
pub mod verbs;

pub use config::{RAILS_MAX, RECEIVE_DEPTH_MAX, RdmaConfig};
pub use error::RdmaError;
pub use topology::Pairing;
pub use transport::RdmaTransport;
