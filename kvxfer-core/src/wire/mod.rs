//! The wire format: session frames (fixed header, `postcard` body), lane headers, addresses and grants.
//!
//! Every length has a cap, every parser is total: any bytes give a value or a typed error, never a panic. The format is
//! described byte by byte in `docs/protocol.md`.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::flow::{ChunkName, ChunkState, LaneName, PartExtent};
use crate::id::{GrantName, Incarnation, PoolId};
use crate::layout::PoolLayout;
use crate::plan::Target;

mod address;
mod check;
mod crc;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod grant;
pub mod lane;
pub mod limits;
pub mod reference;

pub use frame::{FRAME_HEADER_BYTES, PROTOCOL_VERSIONS, body_length, decode, encode, is_session};
pub use limits::FRAME_BODY_BYTES_MAX;

/// What an engine publishes so that others can find an endpoint. Text and byte forms under 128 bytes.
///
/// The text is `kvx1:<incarnation, 32 hex digits>@<socket>[,<socket>][;t<rank>/<size>][;p<rank>/<size>]`, with ranks
/// left out where they are `0/1`. A bare `host:port` has no incarnation. An address whose text would be longer than
/// [`limits::ADDRESS_TEXT_MAX`] (two long IPv6 sockets with ranks) is written as `kvx1=<its bytes in base32>`. IPv6
/// flow labels are not carried.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EndpointAddress {
    /// Where it listens, best first; at most 2.
    pub sockets: Vec<SocketAddr>,
    /// Who it is. `None` only for a bare `host:port`, which is for tools.
    pub incarnation: Option<Incarnation>,
    /// Rank coordinates (tensor-parallel rank and size, pipeline rank and size).
    pub rank: RankCoordinates,
}

/// Where an endpoint stands in its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankCoordinates {
    /// Tensor-parallel rank and size.
    pub tensor: (u16, u16),
    /// Pipeline-parallel rank and size.
    pub pipeline: (u16, u16),
}

impl Default for RankCoordinates {
    fn default() -> Self {
        RankCoordinates {
            tensor: (0, 1),
            pipeline: (0, 1),
        }
    }
}

/// Which way a grant's bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// The holder may write into the owner's blocks.
    Write,
    /// The holder may read the owner's blocks.
    Read,
}

/// The receiver's permission to write (or the owner's to read) exactly these blocks, once. Serialisable: this is
/// what engines pass around.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its name.
    pub name: GrantName,
    /// Where its owner is found.
    pub address: EndpointAddress,
    /// Write or read.
    pub access: Access,
    /// The owner's pool.
    pub pool: PoolId,
    /// Hash of that pool's geometry, compared before any use.
    pub geometry_hash: u64,
    /// The blocks.
    pub target: Target,
    /// Milliseconds it is good for, counted from when it was made or re-sent.
    pub remaining_ms: u64,
}

/// The verdict on a claim, grant or member, as its destination's owner decided it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The bytes are in place.
    Arrived,
    /// They are not, and none lands any more.
    Failed(Error),
    /// The owner does not remember.
    Unknown,
}

/// A pool as told to peers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolAdvert {
    /// Its id.
    pub id: PoolId,
    /// Its layout (validated again by whoever parses it).
    pub layout: PoolLayout,
    /// May be read by peers.
    pub serves: bool,
    /// May be written by peers.
    pub receives: bool,
    /// By transport: what its one-sided paths need to know of the pool's regions.
    pub keys: Vec<(String, Vec<u8>)>,
}

/// First frame of either side on a session connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Protocol versions spoken, lowest and highest.
    pub versions: (u16, u16),
    /// Who speaks.
    pub incarnation: Incarnation,
    /// Its label.
    pub name: String,
    /// Whom the dialer wants, if it knows: anybody else answers `StalePeer`.
    pub expects: Option<Incarnation>,
    /// Where the speaker listens.
    pub address: EndpointAddress,
    /// Session it would resume, and the sequence number of the last message it received there.
    pub resume: Option<Resume>,
    /// Secret that proves lanes belong to this session (the dialer's counts).
    pub token: u128,
    /// Transport adverts by name, in order of preference.
    pub transports: Vec<(String, Vec<u8>)>,
    /// Pools at this time; deltas follow as messages.
    pub pools: Vec<PoolAdvert>,
    /// What proves identity: `None` today; psk and mTLS have their place here.
    pub auth: AuthOffer,
    /// Silence after which the speaker declares a peer lost, in milliseconds.
    pub liveness_ms: u32,
}

/// What a session resumes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The session's number, drawn by the dialer of its first connection.
    pub session: u128,
    /// Highest sequence number received.
    pub received: u64,
}

/// How a side would prove itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AuthOffer {
    /// Not at all.
    None,
}

/// Everything that can follow the handshake, each kind idempotent under the session's sequence numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Nothing but the acknowledgement in the frame header.
    Heartbeat,
    /// A pool came.
    PoolAdded(PoolAdvert),
    /// A pool went.
    PoolRemoved(PoolId),
    /// Destination to source: a claim looks for its offer.
    Claim(ClaimMessage),
    /// Source to destination: the claim met its offer.
    Matched {
        /// The claim's number at its owner.
        claim: u64,
        /// The offer's attempt.
        attempt: u32,
        /// The source's pool.
        pool: PoolId,
    },
    /// Source to destination: the claim will not be served.
    ClaimRefused {
        /// The claim's number.
        claim: u64,
        /// Why.
        error: Error,
    },
    /// Destination to source: where to write (push).
    ClaimGrant {
        /// The claim's number.
        claim: u64,
        /// The attempt it is for.
        attempt: u32,
        /// The grant.
        grant: Grant,
    },
    /// Destination to source: what shall be read (pull); the source announces parts with `PartReady`.
    ClaimPull {
        /// The claim's number.
        claim: u64,
        /// The attempt.
        attempt: u32,
        /// The destination's own slot and blocks.
        grant: Grant,
    },
    /// Destination to source: nothing is needed from this rank.
    ClaimNothing {
        /// The claim's number.
        claim: u64,
    },
    /// Destination to source: the claim has ended.
    ClaimEnded {
        /// The claim's number.
        claim: u64,
        /// How.
        verdict: Verdict,
    },
    /// Source to destination: the verdict is noted; its slot may be reused.
    ClaimEndedAck {
        /// The claim's number.
        claim: u64,
    },
    /// Source to destination: the offer was restarted; progress before `attempt` is void.
    Restarted {
        /// The claim's number.
        claim: u64,
        /// The new attempt.
        attempt: u32,
    },
    /// Source to destination: the source ends this (cancelled, retracted, expired, incomplete). The destination
    /// decides, and answers with `ClaimEnded`.
    SourceEnded {
        /// The claim's number.
        claim: u64,
        /// Why.
        error: Error,
    },
    /// Source to destination (pull): a part may be read.
    PartReady {
        /// The claim's number.
        claim: u64,
        /// The attempt.
        attempt: u32,
        /// The part's number.
        part: u32,
        /// The part's extent.
        extent: PartExtent,
        /// The source's blocks, for a reader that reads them itself (one-sided links).
        source: Option<Target>,
    },
    /// Destination to source (pull): read this part into that slot.
    ReadPart {
        /// The claim's number.
        claim: u64,
        /// The attempt.
        attempt: u32,
        /// The part's number.
        part: u32,
    },
    /// Holder of a read grant to its owner: send those blocks into this slot of mine.
    Read {
        /// The reader's number for this.
        read: u64,
        /// The read grant.
        grant: GrantName,
        /// Where to: the reader's own write grant.
        into: Grant,
    },
    /// Owner to reader: the read will not be served.
    ReadRefused {
        /// The reader's number.
        read: u64,
        /// Why.
        error: Error,
    },
    /// Reader to owner: are the bytes that I read still what was meant? The source stays pinned until the answer.
    Validate {
        /// The reader's number: a claim's or a read's.
        id: u64,
        /// Whether `id` is a claim's.
        claim: bool,
        /// The attempt (claims).
        attempt: u32,
    },
    /// Owner to reader.
    Validated {
        /// The reader's number.
        id: u64,
        /// Whether `id` is a claim's.
        claim: bool,
        /// They are.
        live: bool,
    },
    /// Sender to owner of a grant: I use it (binds the grant to this session), or stop using it.
    GrantEnded {
        /// The grant.
        grant: GrantName,
        /// Why the sender stops.
        error: Error,
    },
    /// Sender to owner of a slot: what became of it?
    Ask {
        /// The grant.
        grant: GrantName,
    },
    /// Owner to sender.
    Verdict {
        /// The grant.
        grant: GrantName,
        /// What became of it.
        verdict: Verdict,
    },
    /// Sender to owner: verdicts noted; their slots may be reused.
    VerdictAck {
        /// The grants.
        grants: Vec<GrantName>,
    },
    /// Sender to receiver: fence this lane and say what became of these chunks.
    FenceLane {
        /// The lane.
        lane: LaneName,
        /// Outstanding on it.
        chunks: Vec<ChunkName>,
    },
    /// Receiver to sender.
    LaneFenced {
        /// The lane.
        lane: LaneName,
        /// What became of them.
        chunks: Vec<(ChunkName, ChunkState)>,
    },
    /// This endpoint takes no new work.
    Draining,
    /// This endpoint closes: every handle with it ends now.
    Goodbye,
    /// Holder of a read grant to its owner: those blocks are being read, by the reader's device.
    ReadDirect {
        /// The reader's number for this.
        read: u64,
        /// The read grant.
        grant: GrantName,
    },
    /// From one end of a link to the other, in the transport's own form.
    Link {
        /// The transport.
        transport: String,
        /// At most [`limits::LINK_MESSAGE_BYTES_MAX`].
        body: Vec<u8>,
    },
    /// The speaker's end of the link could not be made or kept: both sides try the next transport they share.
    TransportFailed {
        /// The transport.
        transport: String,
        /// Why.
        error: Error,
    },
}

/// A claim as it crosses the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimMessage {
    /// Its number at its owner.
    pub claim: u64,
    /// The key, at most 256 bytes.
    pub key: Vec<u8>,
    /// The set of claims it belongs to (one reader of the offer).
    pub set: u128,
    /// Its number in the set.
    pub member: u16,
    /// How many endpoints of the set contact this offer.
    pub members: u16,
    /// The destination's pool.
    pub pool: PoolId,
    /// Milliseconds until it expires.
    pub remaining_ms: u64,
    /// Bytes are pulled instead of pushed.
    pub pull: bool,
}

/// A session frame, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Handshake.
    Hello(Box<Hello>),
    /// Handshake refused, with the reason.
    Refuse(Error),
    /// Handshake done at this side: whether the session was resumed (else it is new), and from which message on.
    Ready {
        /// The session's number.
        session: u128,
        /// The session was known here and goes on.
        resumed: bool,
        /// Highest sequence number received there (0 if new).
        received: u64,
    },
    /// A message, numbered.
    Message {
        /// Its number in this direction, from 1; heartbeats have 0 and are not repeated.
        sequence: u64,
        /// Highest number received in the other direction.
        acknowledged: u64,
        /// The message.
        message: Box<Message>,
    },
    /// A frame of an unknown kind that its sender flagged optional: skip it.
    Skipped,
}
