//! The control plane of one endpoint, sans I/O: sessions, offers, claims, grants, transfers.
//!
//! Driven by method calls with the current time; answers with [`Action`]s, which the driver carries out in order
//! (the runtime in `kvxfer`, the simulator in `kvxfer-testkit`). After every call the driver drains
//! [`Machine::poll_action`] and arms one timer at [`Machine::next_timer`].
//!
//! Everything is deterministic: the same calls in the same order give the same actions, bit for bit.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::flow::{Gate, SlotTable, SlotWatcher, TransferId};
use crate::id::{GrantName, Incarnation, PoolId};
use crate::layout::{BlockId, Selection};
use crate::mutants::{self, Mutant};
use crate::plan::Target;
use crate::time::Time;
use crate::transport::LinkEvent;
use crate::wire::lane::LaneHello;
use crate::wire::{Access, EndpointAddress, Frame, Grant, Message};

mod claim;
mod config;
mod connection;
mod fences;
mod grant;
mod handles;
mod handshake;
mod keys;
mod links;
mod member;
mod member_grant;
mod messages;
mod offer;
mod offer_end;
mod peers;
mod pools;
mod random;
mod released;
mod report;
mod session;
mod slots;
mod timers;
mod transfer;
mod types;
mod withheld;

pub use config::{KEY_BYTES_MAX, MachineConfig, SOURCES_MAX, VERSIONS};
pub use types::{
    Action, ClaimOptions, ConnectionId, EventId, GrantOptions, HandleId, LinkCommand, MachineSetup, MemberVerdict,
    Notice, OfferOptions, Outcome, PeerChange, PoolSetup, TransferOptions, TransportOffer, WaitingOn,
};

use claim::Claim;
use connection::{Connection, Purpose, Stage};
use fences::Ending;
use grant::{Serve, WriteGrant};
use keys::Keys;
use links::{LinkState, LinkTransfer};
use member::RemoteClaim;
use offer::Offer;
use peers::{Peer, Resolving};
use pools::{check_geometry, pool_unknown};
use random::Random;
use slots::{SlotKey, SlotUse};
use timers::{TimerKey, Timers};
use transfer::{Pull, Push};
use withheld::Awaited;

/// Connections that this side dials are numbered from here; accepted ones, by the driver, from below.
const DIALED_FROM: u64 = 1 << 63;
/// Slot numbers of read grants, which have no slot in the table.
const READ_SLOTS_FROM: u32 = 1 << 31;

/// The control plane of one endpoint.
pub struct Machine {
    config: MachineConfig,
    incarnation: Incarnation,
    address: EndpointAddress,
    transports: Vec<TransportOffer>,
    slots: Arc<SlotTable>,
    random: Random,
    timers: Timers,
    actions: VecDeque<Action>,
    draining: bool,
    shutdown: Option<Time>,
    shutdown_over: bool,

    pools: BTreeMap<PoolId, PoolSetup>,
    connections: BTreeMap<ConnectionId, Connection>,
    next_connection: u64,
    peers: BTreeMap<Incarnation, Peer>,
    resolving: BTreeMap<SocketAddr, Resolving>,
    links: BTreeMap<Incarnation, LinkState>,
    link_epoch: u64,
    link_transfers: BTreeMap<TransferId, LinkTransfer>,
    next_transfer: u64,
    /// Transfers are being given to a link.
    pumping: bool,

    next_handle: u64,
    offers: BTreeMap<HandleId, Offer>,
    live_keys: BTreeMap<Vec<u8>, HandleId>,
    keys: Keys,
    remote_claims: BTreeMap<(Incarnation, u64), RemoteClaim>,
    claims: BTreeMap<HandleId, Claim>,
    /// Events that parts of offers and pushes wait for.
    awaited: Awaited,
    /// Claims that found no slot.
    starved: BTreeSet<HandleId>,
    /// Slots of ended claims, until the source has noted the end.
    ended_claims: BTreeMap<(Incarnation, u64), SlotKey>,
    grants: BTreeMap<HandleId, WriteGrant>,
    serves: BTreeMap<HandleId, Serve>,
    serve_names: BTreeMap<GrantName, HandleId>,
    next_read: u64,
    pushes: BTreeMap<HandleId, Push>,
    pulls: BTreeMap<HandleId, Pull>,
    /// Peers' grants that this side writes into.
    uses: BTreeMap<GrantName, UseOwner>,
    /// Peers' grants that pushes of this side have used: none is good for a second. Oldest first, with their times.
    spent: BTreeSet<GrantName>,
    spent_since: VecDeque<(Time, GrantName)>,
    slot_uses: BTreeMap<SlotKey, SlotUse>,
    /// Handles whose end, or next step, waits for a fence.
    fencing: BTreeSet<HandleId>,
    fences_changed: bool,
    sources_quarantined: usize,
    quarantined_pools: BTreeSet<PoolId>,
}

/// Who uses a peer's grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UseOwner {
    Push(HandleId),
    Member(Incarnation, u64),
}

impl Machine {
    /// An endpoint's control plane with nothing open.
    pub fn new(setup: MachineSetup) -> Machine {
        let config = setup.config;
        let keys = Keys::new(
            config.ended_keys_retention,
            config.ended_keys_max,
            config.waiting_claims_max,
        );
        let mut address = setup.address;
        address.incarnation = Some(setup.incarnation);
        Machine {
            incarnation: setup.incarnation,
            address,
            transports: setup.transports,
            slots: setup.slots,
            random: Random::new(setup.seed),
            timers: Timers::default(),
            actions: VecDeque::new(),
            draining: false,
            shutdown: None,
            shutdown_over: false,
            pools: BTreeMap::new(),
            connections: BTreeMap::new(),
            next_connection: 0,
            peers: BTreeMap::new(),
            resolving: BTreeMap::new(),
            links: BTreeMap::new(),
            link_epoch: 0,
            link_transfers: BTreeMap::new(),
            next_transfer: 1,
            pumping: false,
            next_handle: 1,
            offers: BTreeMap::new(),
            live_keys: BTreeMap::new(),
            keys,
            remote_claims: BTreeMap::new(),
            claims: BTreeMap::new(),
            awaited: Awaited::default(),
            starved: BTreeSet::new(),
            ended_claims: BTreeMap::new(),
            grants: BTreeMap::new(),
            serves: BTreeMap::new(),
            serve_names: BTreeMap::new(),
            next_read: 0,
            pushes: BTreeMap::new(),
            pulls: BTreeMap::new(),
            uses: BTreeMap::new(),
            spent: BTreeSet::new(),
            spent_since: VecDeque::new(),
            slot_uses: BTreeMap::new(),
            fencing: BTreeSet::new(),
            fences_changed: false,
            sources_quarantined: 0,
            quarantined_pools: BTreeSet::new(),
            config,
        }
    }

    // ------------------------------------------------------------------------------------------ source side

    /// Opens an offer under a key. Claims that wait for it are met at once.
    ///
    /// # Errors
    /// `DuplicateKey` while an offer with the key is open, `Busy` at the limit of handles, `InvalidArgument`,
    /// `NotRegistered`, `Closed`.
    pub fn offer(&mut self, now: Time, key: &[u8], pool: PoolId, options: OfferOptions) -> Result<HandleId> {
        let result = self.begin_offer(now, key, pool, options);
        self.settle(now);
        result
    }

    /// Appends blocks: per group, tokens continue where the last append ended.
    ///
    /// # Errors
    /// `InvalidArgument` or `OutOfBounds` for blocks that do not continue the offer, `Closed` if it has ended.
    pub fn append(&mut self, now: Time, offer: HandleId, selection: &Selection) -> Result<()> {
        self.append_to_offer(now, offer, selection)
    }

    /// Releases `tokens` (from..to) of `layers` (indices in the source pool's layer list; an end beyond the last means
    /// the last) for sending.
    ///
    /// # Errors
    /// `OutOfBounds` for tokens without blocks or layers that do not exist, `InvalidArgument` for tokens that were
    /// released before, `Busy` for too many parts, `Closed` if the offer has ended.
    pub fn ready(&mut self, now: Time, offer: HandleId, tokens: (u32, u32), layers: (u16, u16)) -> Result<()> {
        let result = self.release_part(now, offer, tokens, layers, None);
        self.settle(now);
        result
    }

    /// No more blocks: the request has `token_end` tokens. Everything not yet released is, with state blocks.
    ///
    /// # Errors
    /// `OutOfBounds` for more tokens than were appended, `InvalidArgument` if it was finished, `Closed`.
    pub fn finish(&mut self, now: Time, offer: HandleId, token_end: u32) -> Result<()> {
        let result = self.finish_offer_input(now, offer, token_end, None);
        self.settle(now);
        result
    }

    /// Voids all progress: blocks, parts and `finish` are forgotten and given anew. Bytes of earlier attempts never
    /// count, except at members that had arrived before they heard of it. Blocks of the earlier attempt may be
    /// overwritten once [`voided_gates`](Self::voided_gates) are fenced.
    ///
    /// # Errors
    /// `Closed` if the offer has ended.
    pub fn restart(&mut self, now: Time, offer: HandleId) -> Result<()> {
        let result = self.restart_offer(now, offer);
        self.settle(now);
        result
    }

    /// The gates of an offer's earlier attempts that were not fenced when it was last restarted.
    pub fn voided_gates(&self, offer: HandleId) -> Vec<Arc<Gate>> {
        self.gates_of_earlier_attempts(offer)
    }

    /// Closes the offer's gate at once and ends it `Retracted`. The driver waits for the returned gate to be fenced:
    /// from then on nothing read from its blocks counts.
    ///
    /// # Errors
    /// `InvalidArgument` for blocks that are not the offer's, `Closed` if it has ended.
    pub fn retract(&mut self, now: Time, offer: HandleId, blocks: &[BlockId]) -> Result<Arc<Gate>> {
        let result = self.retract_offer(now, offer, blocks);
        self.settle(now);
        result
    }

    // ------------------------------------------------------------------------------------- destination side

    /// Opens a claim that names all source ranks.
    ///
    /// # Errors
    /// `InvalidArgument`, `NotRegistered`, `Busy` at a limit, `Closed`.
    pub fn claim(
        &mut self,
        now: Time,
        key: &[u8],
        pool: PoolId,
        sources: &[EndpointAddress],
        options: ClaimOptions,
    ) -> Result<HandleId> {
        let result = self.begin_claim(now, key, pool, sources, options);
        self.settle(now);
        result
    }

    /// Says where the claim's bytes go.
    ///
    /// # Errors
    /// `InvalidArgument` or `OutOfBounds` for a selection that does not fit the pool, or a second one; `Closed` if the
    /// claim has ended.
    pub fn claim_into(&mut self, now: Time, claim: HandleId, selection: Selection) -> Result<()> {
        let result = self.fill_claim(now, claim, selection);
        self.settle(now);
        result
    }

    /// Ends an open claim before it was filled (`Declined` at both sides).
    ///
    /// # Errors
    /// `InvalidArgument` if it was filled, `Closed` if it has ended.
    pub fn decline(&mut self, now: Time, claim: HandleId) -> Result<()> {
        let result = self.decline_claim(now, claim);
        self.settle(now);
        result
    }

    // ------------------------------------------------------------------------------------- the layer below

    /// Makes a grant of blocks, to be written or read once.
    ///
    /// # Errors
    /// `InvalidArgument`, `OutOfBounds`, `NotRegistered`, `Busy` (handles or slots), `Closed`.
    pub fn grant(
        &mut self,
        now: Time,
        pool: PoolId,
        access: Access,
        target: Target,
        options: GrantOptions,
        watcher: Option<Arc<dyn SlotWatcher>>,
    ) -> Result<(HandleId, Grant)> {
        self.begin_grant(now, pool, access, target, options, watcher)
    }

    /// Writes blocks of a pool into a peer's grant.
    ///
    /// # Errors
    /// `InvalidArgument`, `OutOfBounds`, `GeometryMismatch`, `NotRegistered`, `Busy`, `Closed`. What is found wrong
    /// only once there is a session ends the handle instead.
    pub fn push(
        &mut self,
        now: Time,
        pool: PoolId,
        source: Target,
        grant: &Grant,
        options: TransferOptions,
    ) -> Result<HandleId> {
        let result = self.begin_push(now, pool, source, grant, options);
        self.settle(now);
        result
    }

    /// Reads a peer's grant into blocks of a pool.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn pull(
        &mut self,
        now: Time,
        grant: &Grant,
        pool: PoolId,
        destination: Target,
        options: TransferOptions,
    ) -> Result<HandleId> {
        let result = self.begin_pull(now, grant, pool, destination, options);
        self.settle(now);
        result
    }

    // -------------------------------------------------------------------------------------------- any handle

    /// Ends a handle with `Cancelled`; `Complete` follows when it is fenced. Unknown or ended handles: no-op.
    pub fn cancel(&mut self, now: Time, handle: HandleId) {
        let error = Error::new(ErrorKind::Cancelled, "the handle").because("its owner cancelled it");
        self.end_handle(now, handle, error);
        self.settle(now);
    }

    /// What an open handle waits for; `None` once it has ended.
    pub fn waiting_on(&self, handle: HandleId) -> Option<WaitingOn> {
        self.waits_for(handle)
    }

    /// Makes a session with an endpoint, and a link, if there is none (prewarming). [`PeerChange::Ready`] follows if
    /// there was no session, or [`PeerChange::Lost`] with the reason; nothing of an endpoint that is not known by its
    /// incarnation and never answers.
    ///
    /// # Errors
    /// `InvalidArgument` for an address without sockets or this endpoint's own, `Busy` at the limit of peers, `Closed`.
    pub fn connect(&mut self, now: Time, address: &EndpointAddress) -> Result<()> {
        self.check_open("a connection")?;
        let result = self.want_peer(now, address);
        // Whoever connects wants it tried, not told how it went the last time.
        if let Some(peer) = address.incarnation.filter(|peer| self.why_no_link(*peer).is_some()) {
            self.on_link_timer(now, peer);
        }
        self.settle(now);
        result
    }

    /// Takes no new work; open handles go on.
    pub fn drain(&mut self, now: Time) {
        if !self.draining {
            self.draining = true;
            self.tell_all(now, &Message::Draining);
        }
    }

    /// Ends everything: handles with `Closed`, sessions with `Goodbye`, links closed. Bounded: what has not ended by
    /// itself after [`MachineConfig::fence_limit`] (or the liveness time, where links are one-sided) is ended as if all peers were lost.
    pub fn shutdown(&mut self, now: Time) {
        if self.shutdown.is_some() {
            return;
        }
        self.draining = true;
        self.shutdown = Some(now);
        let limit = self.fence_limit(self.links.keys().copied());
        self.timers.set(TimerKey::Shutdown, now + limit + limit / 4);
        for handle in self.open_handles() {
            let error = Error::new(ErrorKind::Closed, "the handle").because("the endpoint was closed");
            self.end_handle(now, handle, error);
        }
        self.settle(now);
    }

    /// Nothing open, nothing retained that still guards memory.
    pub fn is_quiet(&self) -> bool {
        self.open_handles().is_empty()
            && self.fencing.is_empty()
            && self.link_transfers.is_empty()
            && (self.shutdown.is_none() || (self.shutdown_over && self.links.is_empty()))
    }

    // ----------------------------------------------------------------------------------------------- network

    /// A peer's connection was accepted. Its number is the driver's, below `1 << 63`.
    pub fn accepted(&mut self, now: Time, connection: ConnectionId, from: SocketAddr) {
        self.on_accepted(now, connection, from);
    }

    /// A dial has connected.
    pub fn dialed(&mut self, now: Time, connection: ConnectionId) {
        self.on_dialed(now, connection);
    }

    /// A dial has failed.
    pub fn dial_failed(&mut self, now: Time, connection: ConnectionId, error: Error) {
        self.on_disconnected(now, connection, error);
        self.settle(now);
    }

    /// A frame came on a connection.
    pub fn frame(&mut self, now: Time, connection: ConnectionId, frame: Frame) {
        self.on_frame(now, connection, frame);
        self.settle(now);
    }

    /// A connection has gone. Not to be said of connections that the machine disconnected, but harmless.
    pub fn disconnected(&mut self, now: Time, connection: ConnectionId, why: Error) {
        self.on_disconnected(now, connection, why);
        self.settle(now);
    }

    /// A link reports.
    pub fn link_event(&mut self, now: Time, peer: Incarnation, event: LinkEvent) {
        self.on_link_event(now, peer, event);
        self.settle(now);
    }

    /// The link could not be made.
    pub fn link_failed(&mut self, now: Time, peer: Incarnation, error: Error) {
        self.on_link_failed(now, peer, error);
        self.settle(now);
    }

    /// The link did not take a transfer.
    pub fn submit_failed(&mut self, now: Time, peer: Incarnation, transfer: TransferId, error: Error) {
        self.on_submit_failed(now, peer, transfer, error);
        self.settle(now);
    }

    /// Whether a lane with this hello belongs to a live session: its peer.
    ///
    /// # Errors
    /// `StalePeer` if it is meant for another incarnation, `Unauthenticated` if its token is wrong, `PeerLost` if there
    /// is no session.
    pub fn lane_allowed(&self, hello: &LaneHello) -> Result<Incarnation> {
        self.check_lane(hello)
    }

    // --------------------------------------------------------------------------------------- time and output

    /// Does what is due.
    pub fn timer(&mut self, now: Time) {
        while let Some(key) = self.timers.due(now) {
            match key {
                TimerKey::Redial(peer) => self.dial_peer(now, peer),
                TimerKey::Resolve(socket) => self.on_resolve_timer(now, socket),
                TimerKey::Heartbeat(peer) => self.on_heartbeat_timer(now, peer),
                TimerKey::Liveness(peer) => self.on_liveness_timer(now, peer),
                TimerKey::Link(peer) => self.on_link_timer(now, peer),
                TimerKey::Handshake(connection) => self.on_handshake_timer(now, connection),
                TimerKey::Deadline(handle) => self.on_deadline(now, handle),
                TimerKey::Fence(handle) => self.on_fence_timer(now, handle),
                TimerKey::Bind(handle) => self.on_bind_timer(now, handle),
                TimerKey::Retain(slot) => self.release_slot(now, slot),
                TimerKey::Waiting(peer, claim) => self.on_waiting_timer(peer, claim),
                TimerKey::Keys => {
                    if let Some(next) = self.keys.forget(now) {
                        self.timers.set(TimerKey::Keys, next);
                    }
                }
                TimerKey::Starved => self.on_starved_timer(now),
                TimerKey::FencePoll => self.look_at_fences(now),
                TimerKey::Shutdown => self.force_shutdown(now),
            }
            self.settle(now);
        }
    }

    /// When [`timer`](Self::timer) has something to do next.
    pub fn next_timer(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Whether [`poll_action`](Self::poll_action) has something.
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// The next thing for the driver to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    // --------------------------------------------------------------------------------------- looking at it

    /// Counts by name: handles open by kind, sessions, retained verdicts, waiting claims, slots.
    pub fn gauges(&self) -> Vec<(&'static str, u64)> {
        self.counts()
    }

    /// What is known of a peer, line by line, for `explain`.
    pub fn explain(&self, peer: Incarnation) -> Vec<String> {
        self.explain_peer(peer)
    }

    /// Why there is a session with a peer and no link, if that is because every transport has failed. All of them are
    /// tried again from time to time.
    pub fn why_no_link(&self, peer: Incarnation) -> Option<Error> {
        self.no_transport_left(peer)
    }

    /// Peers with a session, and their labels.
    pub fn peers(&self) -> Vec<(Incarnation, String)> {
        self.peers
            .iter()
            .filter(|(_, peer)| peer.session.is_some())
            .map(|(incarnation, peer)| (*incarnation, peer.name.clone()))
            .collect()
    }
}

fn handle_ended() -> Error {
    Error::new(ErrorKind::Closed, "the handle").because("it has ended")
}
