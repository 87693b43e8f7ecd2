//! What goes into and comes out of a [`Machine`](super::Machine): handles, options, actions, outcomes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::MachineConfig;
use crate::error::{Error, Result};
use crate::flow::{ChunkName, ChunkState, LaneName, SendPart, SendSpec, SlotTable, TransferId};
use crate::id::{Generation, Incarnation, SlotId};
use crate::layout::PoolLayout;
use crate::memory::Region;
use crate::time::Time;
use crate::transport::LinkPeer;
use crate::wire::{EndpointAddress, Frame, Verdict};

/// A handle of the application: an offer, a claim, a grant or a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandleId(pub u64);

/// Something outside that parts and pushes can wait for, such as the end of a kernel. The driver numbers events and says
/// once of each how it went, with [`Machine::event_happened`](super::Machine::event_happened); no number is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u64);

/// A session connection (not a lane). The machine numbers those it dials, from `1 << 63` up; the driver numbers those
/// it accepts, from below that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// What to do next, for the driver.
pub enum Action {
    /// Open a session connection; answer with [`Machine::dialed`](super::Machine::dialed) or [`Machine::dial_failed`](super::Machine::dial_failed).
    Dial {
        /// Number to answer with; the connection has it from now on.
        connection: ConnectionId,
        /// Where to, in order of preference.
        addresses: Vec<SocketAddr>,
        /// Give up at.
        deadline: Time,
    },
    /// Send a frame on a connection (frames of one connection stay in order).
    Send {
        /// Which.
        connection: ConnectionId,
        /// What.
        frame: Frame,
    },
    /// Close a connection after what was sent on it is flushed (or 100 ms).
    Disconnect {
        /// Which.
        connection: ConnectionId,
    },
    /// Make a link of this transport to a ready peer.
    ConnectLink {
        /// The transport both sides chose.
        transport: String,
        /// To whom.
        peer: LinkPeer,
    },
    /// Close the link; [`LinkEvent::Closed`](crate::transport::LinkEvent::Closed) must come back.
    CloseLink {
        /// To whom.
        peer: Incarnation,
    },
    /// Tell the link.
    Link {
        /// To whom.
        peer: Incarnation,
        /// What.
        command: LinkCommand,
    },
    /// A handle has ended: deliver it, once.
    Complete {
        /// Which.
        handle: HandleId,
        /// How.
        result: Result<Outcome>,
    },
    /// Something short of an end happened to a handle that has events on.
    Notice {
        /// Which.
        handle: HandleId,
        /// What.
        notice: Notice,
    },
    /// A peer came, was lost, drained: for logs, `explain` and endpoint events.
    Peer {
        /// Which.
        peer: Incarnation,
        /// What.
        change: PeerChange,
    },
}

/// A command to a link.
pub enum LinkCommand {
    /// [`crate::transport::Link::submit`]; if it fails, feed the error to [`Machine::submit_failed`](super::Machine::submit_failed).
    Submit(SendSpec),
    /// Add a part.
    AddPart(TransferId, SendPart),
    /// Stop.
    Stop(TransferId),
    /// Forget.
    Forget(TransferId),
    /// Fence a lane as its receiver.
    FenceLane(LaneName, Vec<ChunkName>),
    /// The peer fenced a lane.
    LaneFenced(LaneName, Vec<(ChunkName, ChunkState)>),
    /// [`crate::transport::Link::admit`].
    Admit(SlotId, Generation),
    /// [`crate::transport::Link::revoke`].
    Revoke(SlotId, Generation),
    /// [`crate::transport::Link::message`].
    Message(Vec<u8>),
}

/// How a handle ended well.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// A claim: every byte selected is in place.
    Arrived {
        /// Bytes placed.
        bytes: u64,
    },
    /// A grant: written (or read) once.
    Granted {
        /// Bytes.
        bytes: u64,
        /// The user message.
        message: Option<Arc<[u8]>>,
    },
    /// An offer: its blocks may be reused. Each member's verdict (an offer with a failed member still ends here
    /// if it was released; `Complete` carries an error only if no member arrived).
    Released {
        /// One per claim.
        members: Vec<MemberVerdict>,
    },
    /// A push or pull: the bytes are in place.
    Transferred {
        /// Bytes.
        bytes: u64,
    },
}

/// How one claim of an offer ended.
#[derive(Debug, Clone)]
pub struct MemberVerdict {
    /// The claimant.
    pub peer: Incarnation,
    /// Its set.
    pub set: u128,
    /// Its number in the set.
    pub member: u16,
    /// How.
    pub verdict: Verdict,
}

/// What happens between a handle's beginning and its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// The claim met its offer at all sources (or the offer got a claim).
    Matched,
    /// A restart voided earlier progress.
    Restarted,
}

/// What happened to a peer.
#[derive(Debug, Clone)]
pub enum PeerChange {
    /// A session is ready.
    Ready {
        /// Its label.
        name: String,
        /// Where it is.
        address: EndpointAddress,
        /// The session went on from before.
        resumed: bool,
    },
    /// The connection broke; it is being made anew.
    Interrupted {
        /// Why.
        why: String,
    },
    /// Lost, refused, or never reached: every handle with it has ended or is ending.
    Lost(Error),
    /// It takes no new work.
    Draining,
    /// No transport both sides have (or it is being tried): why not more.
    Path {
        /// The transport taken.
        transport: Option<String>,
        /// Why better ones were not.
        refused: Vec<(String, String)>,
    },
}

/// What an open handle waits for, and since when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingOn {
    /// offer, blocks, credit, event, rail, peer, parts, fence, …
    pub what: String,
    /// Since.
    pub since: Time,
}

/// Options of an offer.
#[derive(Debug, Clone)]
pub struct OfferOptions {
    /// Claim sets served.
    pub readers: u16,
    /// Ends with `Unclaimed` if no claim came by then; `DeadlineExceeded` later.
    pub deadline: Option<Duration>,
    /// Higher goes first.
    pub priority: u8,
    /// Payload checksums.
    pub checksum: bool,
}

/// Options of a claim.
#[derive(Debug, Clone)]
pub struct ClaimOptions {
    /// The set of claims this belongs to; drawn by the driver if the application gave none.
    pub set: u128,
    /// Its number in the set, and their count.
    pub member: u16,
    /// How many endpoints of the set contact each offer.
    pub members: u16,
    /// Deadline for the whole.
    pub deadline: Option<Duration>,
    /// Pull instead of push.
    pub pull: bool,
}

/// Options of a grant.
#[derive(Debug, Clone, Default)]
pub struct GrantOptions {
    /// Deadline.
    pub deadline: Option<Duration>,
    /// Only this peer may use it.
    pub holder: Option<Incarnation>,
}

/// Options of a push or pull.
#[derive(Debug, Clone, Default)]
pub struct TransferOptions {
    /// Deadline; the grant's own counts too.
    pub deadline: Option<Duration>,
    /// User message (push only), delivered with the arrival.
    pub message: Option<Arc<[u8]>>,
    /// Nothing of the source is read before this has happened (push only).
    pub after: Option<EventId>,
    /// Higher goes first.
    pub priority: u8,
    /// Payload checksums.
    pub checksum: bool,
}

/// A pool of this endpoint, as its control plane needs to know it.
#[derive(Debug, Clone)]
pub struct PoolSetup {
    /// What the memory means.
    pub layout: Arc<PoolLayout>,
    /// The memory.
    pub regions: Arc<[Arc<Region>]>,
    /// Peers may be sent its blocks, or read them.
    pub serves: bool,
    /// Peers may write its blocks.
    pub receives: bool,
    /// What each one-sided transport said when the regions were registered with it.
    pub keys: Vec<(String, Vec<u8>)>,
}

/// A transport that this endpoint has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportOffer {
    /// Its name.
    pub name: String,
    /// What peers need to know to connect.
    pub advert: Vec<u8>,
    /// It writes and reads the peer's memory itself.
    pub one_sided: bool,
}

/// What an endpoint's control plane is made with.
pub struct MachineSetup {
    /// Settings.
    pub config: MachineConfig,
    /// Identity.
    pub incarnation: Incarnation,
    /// What peers are told; `sockets` are the real ones.
    pub address: EndpointAddress,
    /// Transports, in order of preference.
    pub transports: Vec<TransportOffer>,
    /// Slots, shared with the transports.
    pub slots: Arc<SlotTable>,
    /// Seed for session numbers, tokens and jitter.
    pub seed: u128,
}
