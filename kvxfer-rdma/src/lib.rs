//! The RDMA transport: one-sided writes and reads over verbs.
//!
//! # Layers
//! * [`sys`] is libibverbs as it is: types and functions generated from rdma-core's headers, found at run time.
//! * [`verbs`] owns its objects, destroys them in order, and turns what they refuse into errors that name the verb, the
//!   device, the errno and, where it can be told, the limit that was hit and what to do.
//! * Around it, [`probe`] says what a machine has and why something of it cannot be used; [`gid`] and [`topology`] are
//!   pure: which address, which ports, which pairs; [`registry`] registers pools on every device and finds keys.
//! * The engine moves bytes.
//!
//! # With and without RDMA
//! Nothing is linked: `libibverbs.so.1` (or the library that `rdma.library` names) is loaded when the transport is
//! asked for. Without it, with it but without devices, and with devices that cannot be used the answer is a
//! [`probe::Availability`], never a panic:
//!
//! ```
//! use kvxfer_rdma::probe::{ProbeOptions, probe};
//! let found = probe(&ProbeOptions::default());
//! match found.refusal() {
//!     None => println!("{} usable ports", found.usable().count()),
//!     Some(error) => println!("{error}"),
//! }
//! ```
//!
//! InfiniBand and RoCE (version 2, and 1 if both ends have nothing else) are used. iWARP devices are refused: they have no
//! writes with immediates, and their queue pairs connect only through the RDMA connection manager.
//!
//! # Trust
//! A peer with a live session reaches, on its queue pairs, every pool whose keys it was told: it can write pools that
//! receive and read pools that serve, and nothing else. Pools that only receive cannot be read: the reads that flush
//! writes after a fence use keys of their own, which no peer is told ([`registry`]). Staging buffers that peers write are on
//! the way into pools that receive, those that peers read hold only bytes of pools that serve: what a peer could do with the
//! key of one that it was once given is nothing that it could not do with the pools' own.

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
mod memory;
mod message;
mod outbound;
pub mod probe;
mod rails;
mod random;
pub mod registry;
mod staging;
pub mod sys;
mod text;
pub mod topology;
mod transport;
pub mod verbs;

pub use config::{RAILS_MAX, RECEIVE_DEPTH_MAX, RdmaConfig};
pub use error::RdmaError;
pub use topology::Pairing;
pub use transport::RdmaTransport;
