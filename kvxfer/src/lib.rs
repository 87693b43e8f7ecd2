//! kvxfer moves the KV cache of large-language-model requests from prefill to decode workers.
//!
//! An [`Endpoint`] is one process's half. A prefill worker *offers* a request's blocks under a key and releases them
//! part by part as its model computes them; a decode worker *claims* the key and says which of its blocks the bytes
//! go to. The library connects, plans the copy between the two layouts, moves the bytes straight from pool to pool,
//! and tells both sides once they are in place.
//!
//! What it promises: success is reported after the last byte is in the receiver's memory; once the end of a handle has
//! been reported, none of its bytes lands any more; every handle ends exactly once; a dead peer is an error within
//! seconds; nothing grows without a limit.
//!
//! ```
//! use std::time::Duration;
//! use kvxfer::{ClaimOptions, Endpoint, OfferOptions, PoolLayout, Role, Selection};
//!
//! # let wait = Duration::from_secs(10);
//! # let here = || "127.0.0.1:0".parse().expect("an address");
//! // Two workers; here in one process. Their pools hold 64 blocks of 4 KiB.
//! let prefill = Endpoint::builder().name("prefill-0").listen(here()).transports(["tcp"]).build()?;
//! let decode = Endpoint::builder().name("decode-0").listen(here()).transports(["tcp"]).build()?;
//! let source = prefill.allocate(PoolLayout::opaque(4096, 64)?, Role::Serve)?;
//! let destination = decode.allocate(PoolLayout::opaque(4096, 64)?, Role::Receive)?;
//!
//! // Decode: claims the request from the prefill worker's published address, and says where it goes.
//! let claim = decode.claim("request-17", &destination, &[prefill.address()], ClaimOptions::default())?;
//! claim.fill(Selection::whole_blocks(1, vec![8, 9]))?;
//!
//! // Prefill: offers it, and lets it go block by block as the model computes it.
//! let offer = prefill.offer("request-17", &source, OfferOptions::default())?;
//! for (token, block) in [(0, 40), (1, 23)] {
//!     source.copy_in(0, block, 0, &[block as u8; 4096])?;
//!     offer.append(Selection::single(token, token + 1, vec![block]))?;
//!     offer.ready(token..token + 1, ..)?;
//! }
//! offer.finish(2)?;
//!
//! // Both learn how it ended: by waiting, polling, `.await` or an event.
//! assert_eq!(claim.arrived().wait(wait)?.bytes, 8192);
//! let mut bytes = [0; 4096];
//! destination.copy_out(0, 9, 0, &mut bytes)?;
//! assert_eq!(bytes, [23; 4096]);
//! offer.released().wait(wait)?; // the source blocks may be reused
//! # Ok::<(), kvxfer::Error>(())
//! ```
//!
//! Below offers and claims there are grants: [`Pool::grant`] permits a peer to write certain blocks once,
//! [`Endpoint::push`] does so, with a message if wanted; [`Pool::serve`] and [`Endpoint::pull`] are the same for reading.
#![deny(unsafe_op_in_unsafe_fn)]

mod after;
mod clock;
mod completion;
pub mod config;
mod control;
mod endpoint;
mod events;
mod handle;
mod interfaces;
mod metrics;
mod options;
mod pool;
mod random;
mod transports;

pub use kvxfer_core::error::Destination;
pub use kvxfer_core::layout::{self, BlockDescriptor, BlockId, GroupSelection, PoolLayout, Selection};
pub use kvxfer_core::machine::{HandleId, MemberVerdict, WaitingOn};
pub use kvxfer_core::memory::{self, Region};
pub use kvxfer_core::plan::{Scope, Target};
pub use kvxfer_core::transport::Path;
pub use kvxfer_core::wire::{Access, EndpointAddress, Grant, RankCoordinates, Verdict};
pub use kvxfer_core::{Error, ErrorKind, Generation, GrantName, Incarnation, PoolId, Result, SlotId, Time};
pub use kvxfer_cuda::{self as cuda, Cuda};

pub use after::{After, Happening};
pub use completion::{Completion, CompletionFuture};
pub use config::Config;
pub use control::PeerState;
pub use endpoint::{Builder, Endpoint, PeerInfo};
pub use events::{Event, EventKind, Events};
pub use handle::{Arrival, Claim, Delivery, GrantHandle, Offer, Release, Transfer};
pub use options::{ClaimOptions, GrantOptions, OfferOptions, PullOptions, PushOptions};
pub use pool::{Pool, Role};
