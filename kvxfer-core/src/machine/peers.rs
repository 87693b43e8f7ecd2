//! Peers: dialing them, hearing of them, losing them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::config::{BACKOFF_FIRST, VERDICT_ACKS_MAX};
use super::links::TransportFailure;
use super::session::Session;
use super::timers::TimerKey;
use super::types::{Action, ConnectionId, PeerChange};
use super::{Machine, Purpose, Stage};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{ChunkName, LaneName, TransferId};
use crate::id::{GrantName, Incarnation, PoolId};
use crate::layout::PoolLayout;
use crate::mutants::{self, Mutant};
use crate::time::Time;
use crate::wire::{ClaimMessage, EndpointAddress, Frame, Message, PoolAdvert, Verdict};

/// A pool of a peer.
#[derive(Debug, Clone)]
pub(super) struct PeerPool {
    pub(super) layout: Arc<PoolLayout>,
    pub(super) serves: bool,
    pub(super) receives: bool,
    /// By transport: what its one-sided paths need to know of the pool.
    pub(super) keys: Vec<(String, Arc<[u8]>)>,
}

impl PeerPool {
    pub(super) fn of(advert: PoolAdvert) -> PeerPool {
        PeerPool {
            layout: Arc::new(advert.layout),
            serves: advert.serves,
            receives: advert.receives,
            keys: advert
                .keys
                .into_iter()
                .map(|(name, keys)| (name, keys.into()))
                .collect(),
        }
    }

    /// What this transport needs to know of the pool, if it was registered with it.
    pub(super) fn keys_of(&self, transport: &str) -> Option<Arc<[u8]>> {
        let keys = self.keys.iter().find(|(name, _)| name == transport);
        keys.map(|(_, keys)| keys.clone())
    }
}

/// What is known of another endpoint while there is a session with it, or one is being made.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) address: EndpointAddress,
    pub(super) pools: BTreeMap<PoolId, PeerPool>,
    /// The highest pool id it has told of: a grant for a higher one has overtaken the news.
    pub(super) pools_told: Option<PoolId>,
    pub(super) transports: Vec<(String, Vec<u8>)>,
    pub(super) session: Option<Session>,
    /// The connection that the session runs on.
    pub(super) connection: Option<ConnectionId>,
    pub(super) established: Time,
    /// A connection of ours in handshake.
    pub(super) dial: Option<ConnectionId>,
    /// A connection of the peer's that waits for ours to fail (simultaneous open).
    pub(super) parked: Option<ConnectionId>,
    pub(super) backoff: Duration,
    pub(super) trying_since: Time,
    pub(super) last_heard: Time,
    pub(super) last_sent: Time,
    pub(super) heartbeat: Duration,
    pub(super) draining: bool,
    pub(super) last_error: Option<Error>,
    /// Set when the peer must go at the next opportunity: it broke a bound.
    pub(super) doomed: Option<Error>,
    /// Verdicts noted and not yet acknowledged.
    pub(super) verdict_acks: Vec<GrantName>,
    /// Claims that ended before there was a session to tell them on.
    pub(super) unsent_ends: Vec<(ClaimMessage, Verdict)>,
    /// Grants of the peer's whose use ended before there was a session to tell it on.
    pub(super) unsent_grant_ends: Vec<(GrantName, Error)>,
    /// Transfers given to the link.
    pub(super) active: usize,
    /// Transfers that wait for one of those to end, by inverted priority and age.
    pub(super) queue: BTreeSet<(u8, TransferId)>,
    /// Lane fences asked for while the link was not there.
    pub(super) pending_fences: Vec<(LaneName, Vec<ChunkName>)>,
    /// What the peer's end of the link said while this end was not there, with the transport.
    pub(super) pending_messages: Vec<(String, Vec<u8>)>,
    /// Transports of this session that could not be used.
    pub(super) failures: Vec<TransportFailure>,
    pub(super) transport: Option<String>,
    pub(super) transports_refused: Vec<(String, String)>,
}

impl Peer {
    pub(super) fn new(now: Time, address: EndpointAddress, heartbeat: Duration) -> Peer {
        Peer {
            name: String::new(),
            address,
            pools: BTreeMap::new(),
            pools_told: None,
            transports: Vec::new(),
            session: None,
            connection: None,
            established: now,
            dial: None,
            parked: None,
            backoff: BACKOFF_FIRST,
            trying_since: now,
            last_heard: now,
            last_sent: now,
            heartbeat,
            draining: false,
            last_error: None,
            doomed: None,
            verdict_acks: Vec::new(),
            unsent_ends: Vec::new(),
            unsent_grant_ends: Vec::new(),
            active: 0,
            queue: BTreeSet::new(),
            pending_fences: Vec::new(),
            pending_messages: Vec::new(),
            failures: Vec::new(),
            transport: None,
            transports_refused: Vec::new(),
        }
    }

    /// Whether the session runs on a connection now.
    pub(super) fn is_ready(&self) -> bool {
        self.session.is_some() && self.connection.is_some()
    }
}

/// An address whose endpoint is not known yet.
#[derive(Debug)]
pub(super) struct Resolving {
    pub(super) address: EndpointAddress,
    pub(super) connection: Option<ConnectionId>,
    pub(super) since: Time,
    pub(super) backoff: Duration,
    pub(super) last_error: Option<Error>,
}

impl Machine {
    /// Sees to it that there is, or soon will be, a session with the endpoint at this address.
    pub(super) fn want_peer(&mut self, now: Time, address: &EndpointAddress) -> Result<()> {
        self.want_peer_as(now, address, address.incarnation)
    }

    /// As [`want_peer`](Self::want_peer), of this incarnation whatever the address says.
    pub(super) fn want_peer_as(
        &mut self,
        now: Time,
        address: &EndpointAddress,
        incarnation: Option<Incarnation>,
    ) -> Result<()> {
        if address.sockets.is_empty() {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "an endpoint address without sockets")
                    .remedy("pass the address that the peer's endpoint.address() gave"),
            );
        }
        let Some(incarnation) = incarnation else {
            return self.want_resolved(now, address);
        };
        if incarnation == self.incarnation {
            return Err(Error::new(ErrorKind::InvalidArgument, "this endpoint's own address")
                .at(format!("endpoint {}", self.config.name))
                .because("an endpoint has no session with itself")
                .remedy("copy between pools of one process without kvxfer"));
        }
        if self.peers.contains_key(&incarnation) {
            return Ok(());
        }
        self.check_room_for_peer()?;
        let mut address = address.clone();
        address.incarnation = Some(incarnation);
        self.peers
            .insert(incarnation, Peer::new(now, address, self.config.heartbeat));
        self.timers
            .set(TimerKey::Liveness(incarnation), now + self.config.liveness);
        self.dial_peer(now, incarnation);
        Ok(())
    }

    pub(super) fn has_session(&self, incarnation: Incarnation) -> bool {
        self.peers.get(&incarnation).is_some_and(|peer| peer.session.is_some())
    }

    pub(super) fn check_room_for_peer(&self) -> Result<()> {
        if self.peers.len() + self.resolving.len() < self.config.peers_max {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "one more peer")
            .because(format!("{} peers are the limit", self.config.peers_max))
            .remedy("retry when a peer has gone, or raise limits.peers_max"))
    }

    fn want_resolved(&mut self, now: Time, address: &EndpointAddress) -> Result<()> {
        let socket = address.sockets[0];
        if self.resolving.contains_key(&socket) {
            return Ok(());
        }
        self.check_room_for_peer()?;
        self.resolving.insert(
            socket,
            Resolving {
                address: address.clone(),
                connection: None,
                since: now,
                backoff: BACKOFF_FIRST,
                last_error: None,
            },
        );
        self.dial_resolving(now, socket);
        Ok(())
    }

    /// The known peer that listens at this socket, if there is one.
    pub(super) fn peer_at(&self, socket: SocketAddr) -> Option<Incarnation> {
        self.peers
            .iter()
            .find(|(_, peer)| peer.session.is_some() && peer.address.sockets.contains(&socket))
            .map(|(incarnation, _)| *incarnation)
    }

    pub(super) fn dial_peer(&mut self, now: Time, incarnation: Incarnation) {
        let Some(peer) = self.peers.get(&incarnation) else {
            return;
        };
        if peer.connection.is_some() || peer.dial.is_some() || peer.address.sockets.is_empty() {
            return;
        }
        let addresses = peer.address.sockets.clone();
        let connection = self.start_dial(now, Purpose::Peer(incarnation), addresses);
        if let Some(peer) = self.peers.get_mut(&incarnation) {
            peer.dial = Some(connection);
        }
    }

    pub(super) fn dial_resolving(&mut self, now: Time, socket: SocketAddr) {
        let Some(resolving) = self.resolving.get(&socket) else {
            return;
        };
        if resolving.connection.is_some() {
            return;
        }
        let addresses = resolving.address.sockets.clone();
        let connection = self.start_dial(now, Purpose::Resolve(socket), addresses);
        if let Some(resolving) = self.resolving.get_mut(&socket) {
            resolving.connection = Some(connection);
        }
    }

    /// The next dial, after a back-off that doubles.
    pub(super) fn dial_later(&mut self, now: Time, incarnation: Incarnation, error: Error) {
        let backoff_max = self.config.backoff_max;
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        peer.last_error = Some(error);
        let wait = self.random.jitter(peer.backoff);
        peer.backoff = (peer.backoff * 2).min(backoff_max);
        self.timers.set(TimerKey::Redial(incarnation), now + wait);
    }

    pub(super) fn resolve_later(&mut self, now: Time, socket: SocketAddr, error: Error) {
        let (liveness, backoff_max) = (self.config.liveness, self.config.backoff_max);
        let Some(resolving) = self.resolving.get_mut(&socket) else {
            return;
        };
        resolving.connection = None;
        if now >= resolving.since + liveness {
            let unreachable = unreachable(&resolving.address, Some(&error));
            self.resolving_failed(now, socket, unreachable);
            return;
        }
        resolving.last_error = Some(error);
        let wait = self.random.jitter(resolving.backoff);
        resolving.backoff = (resolving.backoff * 2).min(backoff_max);
        let at = (now + wait).min(resolving.since + liveness);
        self.timers.set(TimerKey::Resolve(socket), at);
    }

    pub(super) fn resolving_failed(&mut self, now: Time, socket: SocketAddr, error: Error) {
        if let Some(resolving) = self.resolving.remove(&socket)
            && let Some(connection) = resolving.connection
        {
            self.drop_connection(connection);
        }
        self.timers.clear(TimerKey::Resolve(socket));
        self.claims_unresolved(now, socket, &error);
    }

    /// Sends a message on the session with this peer. Without a session there is nobody to tell.
    pub(super) fn send(&mut self, now: Time, to: Incarnation, message: Message) {
        let kept_max = self.config.unacknowledged_max.saturating_mul(4).saturating_add(4096);
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let Some(session) = peer.session.as_mut() else { return };
        let sequence = session.push(message.clone());
        if session.kept() > kept_max && peer.doomed.is_none() {
            peer.doomed = Some(
                Error::new(ErrorKind::PeerLost, format!("endpoint {to}"))
                    .because(format!("it left {} messages unacknowledged", session.kept())),
            );
            self.timers.set(TimerKey::Liveness(to), now);
        }
        if let Some(connection) = peer.connection {
            session.acknowledged_to_peer = session.received;
            peer.last_sent = now;
            let frame = Frame::Message {
                sequence,
                acknowledged: session.received,
                message: Box::new(message),
            };
            self.actions.push_back(Action::Send { connection, frame });
        }
    }

    /// Says only what has been received.
    pub(super) fn send_heartbeat(&mut self, now: Time, to: Incarnation) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let (Some(session), Some(connection)) = (peer.session.as_mut(), peer.connection) else {
            return;
        };
        session.acknowledged_to_peer = session.received;
        peer.last_sent = now;
        let frame = Frame::Message {
            sequence: 0,
            acknowledged: session.received,
            message: Box::new(Message::Heartbeat),
        };
        self.actions.push_back(Action::Send { connection, frame });
    }

    /// Notes that a verdict was taken note of; its owner is told with the next batch.
    pub(super) fn acknowledge_verdict(&mut self, now: Time, owner: Incarnation, grant: GrantName) {
        let Some(peer) = self.peers.get_mut(&owner) else { return };
        if peer.session.is_none() {
            return;
        }
        peer.verdict_acks.push(grant);
        if peer.verdict_acks.len() >= VERDICT_ACKS_MAX {
            self.flush_verdict_acks(now, owner);
        }
    }

    pub(super) fn flush_verdict_acks(&mut self, now: Time, owner: Incarnation) {
        let Some(peer) = self.peers.get_mut(&owner) else { return };
        if peer.verdict_acks.is_empty() || peer.session.is_none() {
            return;
        }
        let grants = std::mem::take(&mut peer.verdict_acks);
        self.send(now, owner, Message::VerdictAck { grants });
    }

    pub(super) fn on_heartbeat_timer(&mut self, now: Time, incarnation: Incarnation) {
        self.flush_verdict_acks(now, incarnation);
        let Some(peer) = self.peers.get(&incarnation) else {
            return;
        };
        if peer.session.is_none() {
            return;
        }
        let heartbeat = peer.heartbeat;
        if peer.connection.is_some() && now >= peer.last_sent + heartbeat {
            self.send_heartbeat(now, incarnation);
        }
        let next = self
            .peers
            .get(&incarnation)
            .map_or(now, |peer| peer.last_sent.max(now.min(peer.last_sent + heartbeat)))
            + heartbeat;
        self.timers
            .set(TimerKey::Heartbeat(incarnation), next.max(now + heartbeat / 4));
    }

    pub(super) fn on_liveness_timer(&mut self, now: Time, incarnation: Incarnation) {
        let liveness = self.config.liveness;
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        if let Some(error) = peer.doomed.take() {
            self.end_peer(now, incarnation, error);
            return;
        }
        if peer.session.is_none() {
            if now >= peer.trying_since + liveness {
                let error = unreachable(&peer.address, peer.last_error.as_ref());
                self.end_peer(now, incarnation, error);
            } else {
                let at = peer.trying_since + liveness;
                self.timers.set(TimerKey::Liveness(incarnation), at);
            }
            return;
        }
        if mutants::is(Mutant::NeverLost) {
            return;
        }
        if now >= peer.last_heard + liveness {
            let why = match &peer.last_error {
                Some(error) if peer.connection.is_none() => error.to_string(),
                _ => format!(
                    "nothing was heard of it for {} ms",
                    now.since(peer.last_heard).as_millis()
                ),
            };
            let error = lost(incarnation, &peer.name, why);
            self.end_peer(now, incarnation, error);
            return;
        }
        let (suspect, lost) = (peer.last_heard + liveness / 2, peer.last_heard + liveness);
        match peer.connection {
            // Heartbeats are missing: the connection may be dead without our being told. A new one resumes the session.
            Some(connection) if now >= suspect => {
                self.timers.set(TimerKey::Liveness(incarnation), lost);
                let why = Error::new(ErrorKind::Transport, "the session's connection")
                    .because(format!("nothing was heard on it for {} ms", (liveness / 2).as_millis()));
                self.give_up_connection(now, connection, why);
            }
            Some(_) => self.timers.set(TimerKey::Liveness(incarnation), suspect),
            None => self.timers.set(TimerKey::Liveness(incarnation), lost),
        }
    }

    /// The peer is gone: ends its session, its link, and every handle with it.
    pub(super) fn end_peer(&mut self, now: Time, incarnation: Incarnation, error: Error) {
        let Some(mut peer) = self.peers.remove(&incarnation) else {
            return;
        };
        let connections = [peer.connection.take(), peer.dial.take(), peer.parked.take()];
        for connection in connections.into_iter().flatten() {
            self.drop_connection(connection);
        }
        self.drop_handshakes_with(incarnation);
        for key in [
            TimerKey::Redial(incarnation),
            TimerKey::Heartbeat(incarnation),
            TimerKey::Liveness(incarnation),
            TimerKey::Link(incarnation),
        ] {
            self.timers.clear(key);
        }
        self.end_handles_with(now, incarnation, &error, false);
        // Also of a peer that was never reached: whoever connects ahead of time waits for this.
        self.actions.push_back(Action::Peer {
            peer: incarnation,
            change: PeerChange::Lost(error),
        });
    }

    /// Fences everything of a session that has gone, and ends every handle with it; except, if the session was
    /// `replaced` by a new one, those whose outcome will be asked for there.
    pub(super) fn end_handles_with(&mut self, now: Time, incarnation: Incarnation, error: &Error, replaced: bool) {
        self.close_link(now, incarnation);
        self.claims_lost(now, incarnation, error);
        self.grants_lost(now, incarnation, error);
        self.pulls_lost(now, incarnation, error);
        self.remote_claims_lost(now, incarnation, error, replaced);
        self.pushes_lost(now, incarnation, error, replaced);
        self.serves_lost(now, incarnation, error);
        self.link_transfers_lost(incarnation);
    }

    /// Closes the session because its peer broke the protocol.
    pub(super) fn protocol_broken(&mut self, now: Time, incarnation: Incarnation, error: Error) {
        self.end_peer(now, incarnation, error);
    }

    /// Closes all connections in handshake with this peer.
    fn drop_handshakes_with(&mut self, incarnation: Incarnation) {
        let handshakes: Vec<ConnectionId> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.peer == Some(incarnation) && connection.stage != Stage::Established)
            .map(|(id, _)| *id)
            .collect();
        for connection in handshakes {
            self.drop_connection(connection);
        }
    }
}

/// The error of a peer that had a session.
pub(super) fn lost(incarnation: Incarnation, name: &str, why: impl Into<String>) -> Error {
    Error::new(ErrorKind::PeerLost, format!("endpoint {name} ({incarnation})"))
        .because(why)
        .remedy("retry with another replica, or with its new address once it is back")
}

/// The error of an address that never had a session.
pub(super) fn unreachable(address: &EndpointAddress, cause: Option<&Error>) -> Error {
    let sockets: Vec<String> = address.sockets.iter().map(SocketAddr::to_string).collect();
    let error = Error::new(ErrorKind::Unreachable, format!("endpoint at {}", sockets.join(" or ")));
    match cause {
        // The kind of a refusal is more telling than that no session came of it.
        Some(cause) if cause.kind() == ErrorKind::Busy => cause.clone(),
        Some(cause) => error
            .because(cause.to_string())
            .remedy("check the address, and that the peer listens and its port is open"),
        None => error
            .because("it does not answer")
            .remedy("check the address, and that the peer listens and its port is open"),
    }
}
