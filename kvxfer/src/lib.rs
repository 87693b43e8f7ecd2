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
//! Below offers and claims there are grants: [`Pool::grant`] permits a peer to write certain blocks once,
//! [`Endpoint::push`] does so, with a message if wanted; [`Pool::serve`] and [`Endpoint::pull`] are the same for reading.
#![deny(unsafe_op_in_unsafe_fn)]

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

pub use completion::{Completion, CompletionFuture};
pub use config::Config;
pub use control::PeerState;
pub use endpoint::{Builder, Endpoint, PeerInfo};
pub use events::{Event, EventKind, Events};
pub use handle::{Arrival, Claim, Delivery, GrantHandle, Offer, Release, Transfer};
pub use options::{ClaimOptions, GrantOptions, OfferOptions, PullOptions, PushOptions};
pub use pool::{Pool, Role};
