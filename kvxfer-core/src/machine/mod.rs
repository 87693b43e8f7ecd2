//! The control plane of one endpoint, sans I/O: sessions, offers, claims, grants, transfers.
//!
//! Driven by method calls with the current time; answers with [`Action`]s, which the driver carries out in order
//! (the runtime in `kvxfer`, the simulator in `kvxfer-testkit`).
// SKELETON (owner: machine). Public signatures are the contract; internals go in submodules.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::flow::{ChunkName, ChunkState, Gate, LaneName, SendPart, SendSpec, SlotTable, SlotWatcher, TransferId};
use crate::id::{Incarnation, PoolId};
use crate::layout::{BlockId, PoolLayout, Selection};
use crate::memory::Region;
use crate::plan::Target;
use crate::time::Time;
use crate::transport::{LinkEvent, LinkPeer};
use crate::wire::{Access, EndpointAddress, Frame, Grant, Verdict};

/// A handle of the application: an offer, a claim, a grant or a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandleId(pub u64);

/// A session connection (not a lane), numbered by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// Limits and deadlines. Every queue has one.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// The endpoint's label.
    pub name: String,
    /// Silence after which a peer is lost (default 2.5 s, so that it is reported within 3 s).
    pub liveness: Duration,
    /// Time between heartbeats of an idle session (default 500 ms).
    pub heartbeat: Duration,
    /// Time a dial and handshake may take (default 1 s), and the longest back-off between dials (default 500 ms).
    pub connect_timeout: Duration,
    /// Longest back-off between dials.
    pub backoff_max: Duration,
    /// How long an ended slot keeps its verdict without acknowledgement (default 30 s).
    pub verdict_retention: Duration,
    /// How long after its deadline a handle's fence may take before it is reported quarantined (default 1 s).
    pub fence_limit: Duration,
    /// Default deadline of an offer nobody claims, and of a claim nothing meets (default 120 s).
    pub unmatched_deadline: Duration,
    /// Longest life of an offer with an open claim (default 600 s).
    pub hold_max: Duration,
    /// How long ended keys are remembered (default 60 s), and how many.
    pub ended_keys_retention: Duration,
    /// How many ended keys are remembered.
    pub ended_keys_max: usize,
    /// Peers, at most.
    pub peers_max: usize,
    /// Offers plus claims plus grants plus transfers open at once, at most.
    pub handles_max: usize,
    /// Claims of peers that wait for their offer, at most.
    pub waiting_claims_max: usize,
    /// Grants active per peer, at most; the rest queue.
    pub grants_per_peer_max: usize,
    /// Messages kept for repetition per session, at most; `Busy` beyond.
    pub unacknowledged_max: usize,
    /// Parts of one offer, at most.
    pub parts_max: u32,
}

impl Default for MachineConfig {
    fn default() -> Self {
        unimplemented!()
    }
}

/// What to do next, for the driver.
pub enum Action {
    /// Open a session connection; answer with [`Machine::dialed`] or [`Machine::dial_failed`].
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
    /// Close the link; [`LinkEvent::Closed`] must come back.
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
    /// [`crate::transport::Link::submit`]; if it fails, feed the error to [`Machine::submit_failed`].
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
    /// Lost: every handle with it has ended or is ending.
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
    /// Higher goes first.
    pub priority: u8,
    /// Payload checksums.
    pub checksum: bool,
}

/// What an endpoint's control plane is made with.
pub struct MachineSetup {
    /// Settings.
    pub config: MachineConfig,
    /// Identity.
    pub incarnation: Incarnation,
    /// What peers are told; `sockets` are the real ones.
    pub address: EndpointAddress,
    /// Transports by name with their adverts, in order of preference.
    pub transports: Vec<(String, Vec<u8>)>,
    /// Slots, shared with the transports.
    pub slots: Arc<SlotTable>,
    /// Seed for session numbers, tokens and jitter.
    pub seed: u128,
}

/// The control plane of one endpoint.
pub struct Machine {
    // owner's
}

#[allow(unused_variables, missing_docs, clippy::too_many_arguments)]
impl Machine {
    pub fn new(setup: MachineSetup) -> Machine {
        unimplemented!()
    }

    // -- pools
    pub fn add_pool(
        &mut self,
        now: Time,
        id: PoolId,
        layout: Arc<PoolLayout>,
        regions: Arc<[Arc<Region>]>,
        serves: bool,
        receives: bool,
    ) -> Result<()> {
        unimplemented!()
    }
    /// `Busy` while anything refers to the pool.
    pub fn remove_pool(&mut self, now: Time, id: PoolId) -> Result<()> {
        unimplemented!()
    }

    // -- source side
    pub fn offer(&mut self, now: Time, key: &[u8], pool: PoolId, options: OfferOptions) -> Result<HandleId> {
        unimplemented!()
    }
    /// Appends blocks: per group, tokens continue where the last append ended.
    pub fn append(&mut self, now: Time, offer: HandleId, selection: &Selection) -> Result<()> {
        unimplemented!()
    }
    /// Releases `tokens` (from..to) of `layers` (indices in the source pool's layer list) for sending.
    pub fn ready(&mut self, now: Time, offer: HandleId, tokens: (u32, u32), layers: (u16, u16)) -> Result<()> {
        unimplemented!()
    }
    /// No more blocks: the request has `token_end` tokens. Everything not yet released is, with state blocks.
    pub fn finish(&mut self, now: Time, offer: HandleId, token_end: u32) -> Result<()> {
        unimplemented!()
    }
    pub fn restart(&mut self, now: Time, offer: HandleId) -> Result<()> {
        unimplemented!()
    }
    /// Closes the offer's gate at once and ends it `Retracted`. The driver waits for the returned gate to be fenced.
    pub fn retract(&mut self, now: Time, offer: HandleId, blocks: &[BlockId]) -> Result<Arc<Gate>> {
        unimplemented!()
    }

    // -- destination side
    pub fn claim(
        &mut self,
        now: Time,
        key: &[u8],
        pool: PoolId,
        sources: &[EndpointAddress],
        options: ClaimOptions,
    ) -> Result<HandleId> {
        unimplemented!()
    }
    pub fn claim_into(&mut self, now: Time, claim: HandleId, selection: Selection) -> Result<()> {
        unimplemented!()
    }
    /// Ends an open claim before it was filled (`Declined` at both sides).
    pub fn decline(&mut self, now: Time, claim: HandleId) -> Result<()> {
        unimplemented!()
    }

    // -- the layer below
    pub fn grant(
        &mut self,
        now: Time,
        pool: PoolId,
        access: Access,
        target: Target,
        options: GrantOptions,
        watcher: Option<Arc<dyn SlotWatcher>>,
    ) -> Result<(HandleId, Grant)> {
        unimplemented!()
    }
    pub fn push(
        &mut self,
        now: Time,
        pool: PoolId,
        source: Target,
        grant: &Grant,
        options: TransferOptions,
    ) -> Result<HandleId> {
        unimplemented!()
    }
    pub fn pull(
        &mut self,
        now: Time,
        grant: &Grant,
        pool: PoolId,
        destination: Target,
        options: TransferOptions,
    ) -> Result<HandleId> {
        unimplemented!()
    }

    /// Sees to it that there is, or soon will be, a session with this peer: `Action::Peer` tells.
    pub fn connect(&mut self, now: Time, address: &EndpointAddress) -> Result<()> {
        unimplemented!()
    }

    // -- any handle
    /// Ends a handle with `Cancelled`; `Complete` follows when it is fenced. Unknown or ended handles: no-op.
    pub fn cancel(&mut self, now: Time, handle: HandleId) {
        unimplemented!()
    }
    pub fn waiting_on(&self, handle: HandleId) -> Option<WaitingOn> {
        unimplemented!()
    }
    /// Takes no new work; open handles go on.
    pub fn drain(&mut self, now: Time) {
        unimplemented!()
    }
    /// Ends everything: handles with `Closed`, sessions with `Goodbye`, links closed.
    pub fn shutdown(&mut self, now: Time) {
        unimplemented!()
    }
    /// Nothing open, nothing retained that still guards memory.
    pub fn is_quiet(&self) -> bool {
        unimplemented!()
    }

    // -- network
    /// A peer's connection was accepted.
    pub fn accepted(&mut self, now: Time, connection: ConnectionId, from: SocketAddr) {
        unimplemented!()
    }
    pub fn dialed(&mut self, now: Time, connection: ConnectionId) {
        unimplemented!()
    }
    pub fn dial_failed(&mut self, now: Time, connection: ConnectionId, error: Error) {
        unimplemented!()
    }
    pub fn frame(&mut self, now: Time, connection: ConnectionId, frame: Frame) {
        unimplemented!()
    }
    pub fn disconnected(&mut self, now: Time, connection: ConnectionId, why: Error) {
        unimplemented!()
    }
    pub fn link_event(&mut self, now: Time, peer: Incarnation, event: LinkEvent) {
        unimplemented!()
    }
    /// The link could not be made or a submit failed.
    pub fn link_failed(&mut self, now: Time, peer: Incarnation, error: Error) {
        unimplemented!()
    }
    pub fn submit_failed(&mut self, now: Time, peer: Incarnation, transfer: TransferId, error: Error) {
        unimplemented!()
    }
    /// Whether a lane with this hello belongs to a live session: its peer.
    pub fn lane_allowed(&self, hello: &crate::wire::lane::LaneHello) -> Result<Incarnation> {
        unimplemented!()
    }

    // -- time and output
    pub fn timer(&mut self, now: Time) {
        unimplemented!()
    }
    pub fn next_timer(&self) -> Option<Time> {
        unimplemented!()
    }
    pub fn poll_action(&mut self) -> Option<Action> {
        unimplemented!()
    }

    // -- looking at it
    /// Counts by name: handles open by kind, sessions, retained verdicts, waiting claims, slots.
    pub fn gauges(&self) -> Vec<(&'static str, u64)> {
        unimplemented!()
    }
    /// What is known of a peer, line by line, for `explain`.
    pub fn explain(&self, peer: Incarnation) -> Vec<String> {
        unimplemented!()
    }
    pub fn peers(&self) -> Vec<(Incarnation, String)> {
        unimplemented!()
    }
}
