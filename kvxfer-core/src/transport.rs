//! The seam between the runtime and the ways of moving bytes. A transport moves bytes and reports; it holds no policy.

pub mod counters;
mod in_turn;
mod links;

use std::net::SocketAddr;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::flow::{ChunkName, ChunkState, LaneName, SendEvent, SendPart, SendSpec, TransferId};
use crate::id::{Generation, Incarnation, SlotId};
use crate::memory::{Exported, Region};

pub use counters::Counter;
pub use in_turn::InTurn;
pub use links::Links;

/// What a transport can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Reads and writes happen without the peer's processor.
    pub one_sided: bool,
    /// Regions without a host view are moved through staging.
    pub staged: bool,
}

/// A way of moving bytes. Object-safe; shared by all links.
pub trait Transport: Send + Sync {
    /// Its name in configuration, logs and counters: `tcp`, `rdma`, …
    fn name(&self) -> &'static str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Makes a pool's regions known. May be slow: called when a pool is registered, never on the submit path.
    ///
    /// # Errors
    /// Whatever the device refuses, with the limit and the need. Nothing stays registered then.
    fn register(&self, regions: &[Arc<Region>], access: RegionAccess) -> Result<Registered>;

    /// What a peer needs to know to connect, carried in Hello. At most 1 KiB.
    fn advertise(&self) -> Vec<u8>;

    /// Starts a link. Returns at once; [`LinkEvent::Up`] follows.
    ///
    /// # Errors
    /// `Busy` at the limit of links, `Protocol` for an unreadable advert.
    fn connect(&self, peer: LinkPeer, events: Arc<dyn LinkWatcher>) -> Result<Arc<dyn Link>>;

    /// Bytes of data-plane memory (staging, scrap) in use, and counters, as the transport names them.
    fn counters(&self) -> Vec<Counter>;

    /// Stops all threads within a bounded time. Links are dead after it.
    fn shutdown(&self);
}

/// What a pool's regions are registered for: the least rights that its role needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionAccess {
    /// Peers may read them.
    pub serves: bool,
    /// Peers may write them.
    pub receives: bool,
}

/// A pool's regions, registered.
pub struct Registered {
    /// What peers need to know to reach them one-sidedly, in the transport's own form; empty for transports whose
    /// receiver places. At most [`crate::wire::limits::POOL_KEYS_BYTES_MAX`].
    pub keys: Vec<u8>,
    /// What devices refused and what is done instead, for people; empty if nothing was.
    pub notes: Vec<String>,
    /// What other endpoints on this host may have mapped: the pool's memory may be freed once none of it has importers.
    pub exported: Vec<Arc<dyn Exported>>,
    /// Keeps the registration; it is given up once this is dropped and no transfer uses it any more.
    pub hold: Box<dyn std::any::Any + Send + Sync>,
}

/// Whom a link goes to, and who of the two dials.
#[derive(Debug, Clone)]
pub struct LinkPeer {
    /// The peer.
    pub incarnation: Incarnation,
    /// We ourselves.
    pub local: Incarnation,
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
    /// Its transport's advert.
    pub advert: Vec<u8>,
    /// Secret of this session: a lane that knows it belongs to it.
    pub token: u128,
    /// Whether this side dials the lanes (the one that dialed the session does).
    pub dials: bool,
}

/// A transport's connection to one peer. No call blocks; none allocates in proportion to descriptors.
///
/// # One-sided links
/// Their transfers have a [`Remote`](crate::flow::Remote). One that *writes* posts nothing before the peer's end has
/// admitted the slot; it counts at the receiver by [`SlotTable::begin`](crate::flow::SlotTable::begin) and
/// [`applied`](crate::flow::SlotTable::applied) for each of its chunks, without anybody placing them.
///
/// One that *reads* is run by the destination, into a slot of its own that the spec names. For each chunk:
/// `SlotTable::begin`, from the link's peer; what that scraps (another link may have placed it) is completed at once with
/// the state it gives. Then enter the slot's gate, read, leave the gate, `applied`, and complete the chunk with what that
/// says. A chunk whose lane is lost is abandoned before the lane is reported lost. If `begin` says that the peer broke the
/// protocol, close the slot with [`SlotTable::corrupt`](crate::flow::SlotTable::corrupt) and say
/// [`LinkEvent::SlotCorrupt`].
pub trait Link: Send + Sync {
    /// Starts a transfer without parts. `Busy` at the limit; `Closed` if the link is closing or has failed: the transfer
    /// is given to the next one. Any other error ends its handle.
    ///
    /// # Errors
    /// `Busy`, `Closed`.
    fn submit(&self, spec: SendSpec) -> Result<()>;

    /// Adds a part to a transfer.
    fn add_part(&self, id: TransferId, part: SendPart);

    /// Stops a transfer whose gate the caller has closed; [`SendEvent::Quiet`] follows.
    fn stop(&self, id: TransferId);

    /// Lets go of an ended transfer.
    fn forget(&self, id: TransferId);

    /// Receiving side: takes the lane out of use and, once its thread has left it, answers with
    /// [`LinkEvent::LaneFenced`].
    fn fence_lane(&self, lane: LaneName, chunks: Vec<ChunkName>);

    /// Sending side: the peer's answer to a fence that [`LinkEvent::LaneLost`] asked for.
    fn lane_fenced(&self, lane: LaneName, chunks: Vec<(ChunkName, ChunkState)>);

    /// Receiving side, one-sided links: the peer may write into this slot from now on. The link takes part in the
    /// slot's fence ([`SlotTable::admit`](crate::flow::SlotTable::admit)) and tells the peer.
    fn admit(&self, _slot: SlotId, _generation: Generation) {}

    /// Receiving side, one-sided links: the slot was closed. The link stops the peer's writes into it, or fences the
    /// peer's lanes if it does not answer; makes sure that what the device has taken is in memory; calls
    /// [`SlotTable::remote_quiet`](crate::flow::SlotTable::remote_quiet) and then says [`LinkEvent::SlotQuiet`]. Slots
    /// that this link has not admitted are ignored.
    fn revoke(&self, _slot: SlotId, _generation: Generation) {}

    /// What the peer's end of this link said with [`LinkEvent::Message`]: in order, each once.
    fn message(&self, _body: Vec<u8>) {}

    /// Closes at once: after it returns no call is started that reads or writes blocks; [`LinkEvent::Closed`]
    /// follows when none is running either.
    fn close(&self);

    /// The path, for people: transport, devices, rails.
    fn path(&self) -> Path;
}

/// A path, for people and counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// The transport's name.
    pub transport: String,
    /// Lanes or rails up, each by name (`127.0.0.1:4000-127.0.0.1:7700`).
    pub rails: Vec<String>,
    /// Why others are not up, as far as it is known.
    pub rails_down: Vec<String>,
    /// Of how many.
    pub rails_configured: usize,
    /// What else is to be known of it: memory that devices refused and that goes through staging, and why; memory that is
    /// copied without the rails, because both ends are on one host.
    pub notes: Vec<String>,
}

/// What a link reports. Called on data threads: must not block, must not call back into the link.
pub trait LinkWatcher: Send + Sync {
    /// Something happened.
    fn link_event(&self, peer: Incarnation, event: LinkEvent);
}

/// What happened on a link.
#[derive(Debug, Clone)]
pub enum LinkEvent {
    /// At least one lane is up: transfers run.
    Up,
    /// A transfer moved on.
    Send(SendEvent),
    /// A lane is lost; the peer must fence it and say what became of these chunks (maybe none).
    LaneLost {
        /// Which.
        lane: LaneName,
        /// Outstanding on it.
        chunks: Vec<ChunkName>,
        /// Why.
        error: Error,
    },
    /// Answer to [`Link::fence_lane`].
    LaneFenced {
        /// Which.
        lane: LaneName,
        /// What became of the chunks asked about.
        chunks: Vec<(ChunkName, ChunkState)>,
    },
    /// A data thread left a closed slot's gate as the last: look at [`SlotTable::fenced`](crate::flow::SlotTable::fenced).
    SlotQuiet,
    /// A slot has arrived (its watcher was told first).
    SlotArrived {
        /// The slot.
        slot: SlotId,
        /// Which use.
        generation: Generation,
    },
    /// Bytes arrived for a slot that are not those that were sent: it was closed with
    /// [`SlotTable::corrupt`](crate::flow::SlotTable::corrupt), and the lane, which the error names, with it.
    SlotCorrupt {
        /// The slot.
        slot: SlotId,
        /// Which use.
        generation: Generation,
        /// `Corrupt`.
        error: Error,
    },
    /// A transfer's own memory cannot be read, or written if it is one that reads: a device's copy failed, or the memory is
    /// not what it was. The link has let go of what it could not do ([`LinkSender::halt`](crate::flow::LinkSender::halt));
    /// the transfer is to be stopped.
    MemoryFailed {
        /// Which.
        transfer: TransferId,
        /// Why.
        error: Error,
    },
    /// For the peer's end of this link ([`Link::message`]): the session carries it, in order. At most
    /// [`crate::wire::limits::LINK_MESSAGE_BYTES_MAX`].
    Message(Vec<u8>),
    /// The link could not be made, or cannot go on: another transport is to be tried. The link closes itself;
    /// [`LinkEvent::Closed`] follows.
    Failed(Error),
    /// After [`Link::close`] or [`LinkEvent::Failed`]: nothing of this link touches blocks any more, nor does the peer's
    /// device by its lanes. Every slot that it had admitted counts as quiet from here on.
    Closed,
}
