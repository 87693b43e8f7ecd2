//! Connections from their first byte to a session that is ready: hello, refusal, simultaneous open, resumption.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::config::{ACKNOWLEDGE_EVERY, HANDSHAKES_MAX, VERSIONS};
use super::peers::{Peer, PeerPool, lost};
use super::session::{Receipt, Session};
use super::timers::TimerKey;
use super::types::{Action, ConnectionId, PeerChange};
use super::{Connection, DIALED_FROM, Machine, Purpose, Stage};
use crate::error::{Error, ErrorKind};
use crate::id::Incarnation;
use crate::mutants::{self, Mutant};
use crate::time::Time;
use crate::wire::{AuthOffer, Frame, Hello, Message, Resume};

mod establish;

/// How a connection's handshake ended.
struct Agreement {
    connection: ConnectionId,
    peer: Incarnation,
    hello: Box<Hello>,
    resumed: bool,
    number: u128,
    token: u128,
    /// Highest number that the peer has received.
    received: u64,
    dialed: bool,
}

impl Machine {
    pub(super) fn start_dial(&mut self, now: Time, purpose: Purpose, addresses: Vec<SocketAddr>) -> ConnectionId {
        let connection = ConnectionId(DIALED_FROM | self.next_connection);
        self.next_connection += 1;
        // A peer that is not reached is said to be so when `liveness` is over, not when the last dial is.
        let latest = match purpose {
            Purpose::Resolve(socket) => self.resolving.get(&socket).map(|peer| peer.since),
            Purpose::Peer(_) | Purpose::Accepted => None,
        };
        let deadline = now + self.config.connect_timeout;
        let deadline = latest.map_or(deadline, |since| deadline.min((since + self.config.liveness).max(now)));
        let peer = match purpose {
            Purpose::Peer(incarnation) => Some(incarnation),
            _ => None,
        };
        let token = self.random.u128();
        self.connections.insert(
            connection,
            Connection {
                stage: Stage::Dialing,
                purpose,
                from: None,
                peer,
                token,
                hello: None,
                resumed: false,
                pools_said: BTreeSet::new(),
                began: now,
            },
        );
        self.timers.set(TimerKey::Handshake(connection), deadline);
        self.actions.push_back(Action::Dial {
            connection,
            addresses,
            deadline,
        });
        connection
    }

    pub(super) fn on_accepted(&mut self, now: Time, connection: ConnectionId, from: SocketAddr) {
        let handshakes = self.connections.len().saturating_sub(self.peers.len());
        if self.connections.contains_key(&connection) || handshakes >= HANDSHAKES_MAX {
            self.actions.push_back(Action::Disconnect { connection });
            return;
        }
        self.connections.insert(
            connection,
            Connection {
                stage: Stage::Hello,
                purpose: Purpose::Accepted,
                from: Some(from),
                peer: None,
                token: 0,
                hello: None,
                resumed: false,
                pools_said: BTreeSet::new(),
                began: now,
            },
        );
        self.timers
            .set(TimerKey::Handshake(connection), now + self.config.connect_timeout);
    }

    pub(super) fn on_dialed(&mut self, now: Time, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else {
            // Given up meanwhile.
            self.actions.push_back(Action::Disconnect { connection: id });
            return;
        };
        if connection.stage != Stage::Dialing {
            return;
        }
        connection.stage = Stage::Hello;
        connection.began = now;
        let (expects, token) = (connection.peer, connection.token);
        let hello = self.hello(expects, token);
        self.note_pools_said(id);
        self.actions.push_back(Action::Send {
            connection: id,
            frame: Frame::Hello(Box::new(hello)),
        });
    }

    /// The pools that a hello on this connection has named.
    fn note_pools_said(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.pools_said = self.pools.keys().copied().collect();
        }
    }

    /// A connection is gone, whoever closed it.
    pub(super) fn on_disconnected(&mut self, now: Time, id: ConnectionId, why: Error) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        self.timers.clear(TimerKey::Handshake(id));
        match connection.purpose {
            Purpose::Resolve(socket) if connection.stage != Stage::Established => {
                self.resolve_later(now, socket, why);
                return;
            }
            _ => {}
        }
        let Some(incarnation) = connection.peer else { return };
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        if peer.connection == Some(id) {
            peer.connection = None;
            let dialer = peer.session.as_ref().is_some_and(|session| session.dialer);
            self.actions.push_back(Action::Peer {
                peer: incarnation,
                change: PeerChange::Interrupted { why: why.to_string() },
            });
            if dialer {
                // The side that dialed first dials first again; the other one a little later.
                peer.last_error = Some(why);
                self.dial_peer(now, incarnation);
            } else {
                self.dial_later(now, incarnation, why);
            }
        } else if peer.dial == Some(id) {
            peer.dial = None;
            self.dial_failed_with(now, incarnation, why);
        } else if peer.parked == Some(id) {
            peer.parked = None;
        } else if peer.connection.is_none() && peer.dial.is_none() && !self.timers.is_set(TimerKey::Redial(incarnation))
        {
            // The peer's own attempt, for which ours was given up.
            self.dial_later(now, incarnation, why);
        }
    }

    fn dial_failed_with(&mut self, now: Time, incarnation: Incarnation, why: Error) {
        let parked = self.peers.get_mut(&incarnation).and_then(|peer| peer.parked.take());
        if let Some(parked) = parked
            && let Some(connection) = self.connections.get_mut(&parked)
            && let Some(hello) = connection.hello.take()
        {
            self.accept_hello(now, parked, hello);
            return;
        }
        self.dial_later(now, incarnation, why);
    }

    /// Closes a connection without further consequences.
    pub(super) fn drop_connection(&mut self, id: ConnectionId) {
        if self.connections.remove(&id).is_some() {
            self.timers.clear(TimerKey::Handshake(id));
            self.actions.push_back(Action::Disconnect { connection: id });
        }
    }

    /// Closes a connection of which nothing good came.
    pub(super) fn give_up_connection(&mut self, now: Time, id: ConnectionId, why: Error) {
        if self.connections.contains_key(&id) {
            self.actions.push_back(Action::Disconnect { connection: id });
            self.on_disconnected(now, id, why);
        }
    }

    pub(super) fn on_handshake_timer(&mut self, now: Time, id: ConnectionId) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        if connection.stage == Stage::Established {
            return;
        }
        let why = Error::new(ErrorKind::Unreachable, "the handshake").because(format!(
            "it did not finish within {} ms",
            self.config.connect_timeout.as_millis()
        ));
        self.give_up_connection(now, id, why);
    }

    pub(super) fn on_frame(&mut self, now: Time, id: ConnectionId, frame: Frame) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        match (frame, connection.stage) {
            (Frame::Skipped, _) => {}
            (Frame::Hello(hello), Stage::Hello) => match connection.purpose {
                Purpose::Accepted => self.hello_of_dialer(now, id, hello),
                _ => self.hello_of_acceptor(now, id, hello),
            },
            (Frame::Refuse(error), Stage::Hello | Stage::Ready) if connection.purpose != Purpose::Accepted => {
                self.refused(now, id, error);
            }
            (
                Frame::Ready {
                    session,
                    resumed,
                    received,
                },
                Stage::Ready,
            ) => match connection.purpose {
                Purpose::Accepted => self.ready_of_dialer(now, id, session, resumed, received),
                _ => self.ready_of_acceptor(now, id, session, resumed, received),
            },
            (
                Frame::Message {
                    sequence,
                    acknowledged,
                    message,
                },
                Stage::Established,
            ) => self.message_frame(now, id, sequence, acknowledged, *message),
            (_, stage) => {
                let error = Error::new(ErrorKind::Protocol, "a frame that does not belong there")
                    .because(format!("the connection is in stage {stage:?}"));
                self.broken(now, id, error);
            }
        }
    }

    /// The peer broke the protocol: closes the session, or the connection if there is none yet.
    fn broken(&mut self, now: Time, id: ConnectionId, error: Error) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        match connection.peer {
            Some(peer) if connection.stage == Stage::Established => self.protocol_broken(now, peer, error),
            _ => self.give_up_connection(now, id, error),
        }
    }

    fn hello(&self, expects: Option<Incarnation>, token: u128) -> Hello {
        let resume = expects
            .and_then(|peer| self.peers.get(&peer))
            .and_then(|peer| peer.session.as_ref())
            .map(|session| Resume {
                session: session.number,
                received: session.received,
            });
        Hello {
            versions: VERSIONS,
            incarnation: self.incarnation,
            name: self.config.name.clone(),
            expects,
            address: self.address.clone(),
            resume,
            token,
            transports: self.transport_adverts(),
            pools: self.pool_adverts(),
            auth: AuthOffer::None,
            liveness_ms: u32::try_from(self.config.liveness.as_millis()).unwrap_or(u32::MAX),
        }
    }

    // ------------------------------------------------------------------------------------------ accepting

    fn hello_of_dialer(&mut self, now: Time, id: ConnectionId, hello: Box<Hello>) {
        if let Err(refusal) = self.check_hello(&hello) {
            self.actions.push_back(Action::Send {
                connection: id,
                frame: Frame::Refuse(refusal),
            });
            self.drop_connection(id);
            return;
        }
        let from = self.connections.get(&id).and_then(|connection| connection.from);
        self.note_restarts(now, &hello, from);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.peer = Some(hello.incarnation);
        let wins = self.incarnation < hello.incarnation;
        let Some(peer) = self.peers.get_mut(&hello.incarnation) else {
            self.accept_hello(now, id, hello);
            return;
        };
        match peer.dial {
            Some(_) if wins => {
                // Simultaneous open, and ours goes first: theirs waits in case ours fails.
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.stage = Stage::Parked;
                    connection.hello = Some(hello);
                }
                if let Some(before) = peer.parked.replace(id) {
                    self.drop_connection(before);
                }
            }
            Some(ours) => {
                peer.dial = None;
                self.drop_connection(ours);
                self.accept_hello(now, id, hello);
            }
            None => self.accept_hello(now, id, hello),
        }
    }

    fn accept_hello(&mut self, now: Time, id: ConnectionId, hello: Box<Hello>) {
        // Whoever dials again has given up what it dialed before. What is still under way of that must not begin a
        // session behind the back of this one, which is offered from what is known now.
        let given_up = |(other, connection): (&ConnectionId, &Connection)| {
            let same = *other != id
                && connection.purpose == Purpose::Accepted
                && connection.stage == Stage::Ready
                && connection.peer == Some(hello.incarnation);
            same.then_some(*other)
        };
        for other in self.connections.iter().filter_map(given_up).collect::<Vec<_>>() {
            self.drop_connection(other);
        }
        let known = self
            .peers
            .get(&hello.incarnation)
            .and_then(|peer| peer.session.as_ref());
        let (number, received) = known.map_or((0, 0), |session| (session.number, session.received));
        let resumed = known.is_some() && hello.resume.map(|resume| resume.session) == Some(number);
        let answer = self.hello(Some(hello.incarnation), 0);
        self.note_pools_said(id);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.stage = Stage::Ready;
        connection.token = hello.token;
        connection.resumed = resumed;
        connection.began = now;
        connection.hello = Some(hello);
        self.timers
            .set(TimerKey::Handshake(id), now + self.config.connect_timeout);
        self.actions.push_back(Action::Send {
            connection: id,
            frame: Frame::Hello(Box::new(answer)),
        });
        self.actions.push_back(Action::Send {
            connection: id,
            frame: Frame::Ready {
                session: if resumed { number } else { 0 },
                resumed,
                received: if resumed { received } else { 0 },
            },
        });
    }

    fn ready_of_dialer(&mut self, now: Time, id: ConnectionId, number: u128, resumed: bool, received: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let Some(hello) = connection.hello.take() else { return };
        let (peer, token, began, offered) = (
            hello.incarnation,
            connection.token,
            connection.began,
            connection.resumed,
        );
        let known = self.peers.get(&peer);
        let session = known.and_then(|peer| peer.session.as_ref());
        let agreed = resumed == offered && (!resumed || session.is_some_and(|session| session.number == number));
        let overtaken = known.is_some_and(|peer| peer.connection.is_some() && peer.established > began);
        if !agreed || overtaken || (!resumed && number == 0) {
            let why = Error::new(ErrorKind::Protocol, "the handshake").because("the session changed meanwhile");
            self.give_up_connection(now, id, why);
            return;
        }
        self.establish(
            now,
            Agreement {
                connection: id,
                peer,
                hello,
                resumed,
                number,
                token,
                received,
                dialed: false,
            },
        );
    }

    // -------------------------------------------------------------------------------------------- dialing

    fn hello_of_acceptor(&mut self, now: Time, id: ConnectionId, hello: Box<Hello>) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let purpose = connection.purpose;
        if let Purpose::Peer(expected) = purpose
            && hello.incarnation != expected
            && !mutants::is(Mutant::AcceptOtherIncarnation)
        {
            self.refused(now, id, stale(expected, hello.incarnation, &hello.name));
            return;
        }
        if let Err(refusal) = self.check_hello(&hello) {
            self.refused(now, id, refusal);
            return;
        }
        if !mutants::is(Mutant::AcceptOtherIncarnation) {
            self.note_restarts(now, &hello, None);
        }
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let actual = hello.incarnation;
        if let Purpose::Resolve(socket) = purpose {
            // From here on this is a dial of a known peer.
            let address = crate::wire::EndpointAddress {
                incarnation: Some(actual),
                ..hello.address.clone()
            };
            connection.purpose = Purpose::Peer(actual);
            connection.peer = Some(actual);
            connection.stage = Stage::Ready;
            connection.hello = Some(hello);
            self.resolving.remove(&socket);
            self.timers.clear(TimerKey::Resolve(socket));
            if self.peers.contains_key(&actual) {
                self.drop_connection(id);
            } else {
                let mut peer = Peer::new(now, address, self.config.heartbeat);
                peer.dial = Some(id);
                self.peers.insert(actual, peer);
                self.timers.set(TimerKey::Liveness(actual), now + self.config.liveness);
            }
            self.claims_resolved(now, socket, actual);
            return;
        }
        if mutants::is(Mutant::AcceptOtherIncarnation) {
            // Goes on as if the endpoint there were the expected one.
            let expected = connection.peer.unwrap_or(actual);
            let mut hello = hello;
            hello.incarnation = expected;
            connection.hello = Some(hello);
        } else {
            connection.hello = Some(hello);
        }
        connection.stage = Stage::Ready;
    }

    fn ready_of_acceptor(&mut self, now: Time, id: ConnectionId, number: u128, resumed: bool, received: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let Some(hello) = connection.hello.take() else { return };
        let (incarnation, token) = (hello.incarnation, connection.token);
        let Some(peer) = self.peers.get(&incarnation) else {
            self.drop_connection(id);
            return;
        };
        let session = peer.session.as_ref();
        if peer.connection.is_some() || (resumed && session.is_none_or(|session| session.number != number)) {
            let why = Error::new(ErrorKind::Protocol, "the handshake").because("the session changed meanwhile");
            self.give_up_connection(now, id, why);
            return;
        }
        let number = if resumed { number } else { self.random.u128() | 1 };
        let ours = session.filter(|_| resumed).map_or(0, |session| session.received);
        self.actions.push_back(Action::Send {
            connection: id,
            frame: Frame::Ready {
                session: number,
                resumed,
                received: ours,
            },
        });
        self.establish(
            now,
            Agreement {
                connection: id,
                peer: incarnation,
                hello,
                resumed,
                number,
                token,
                received,
                dialed: true,
            },
        );
    }

    /// The endpoint that we dialed will not have us.
    fn refused(&mut self, now: Time, id: ConnectionId, error: Error) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        if error.kind() == ErrorKind::Busy {
            self.give_up_connection(now, id, error);
            return;
        }
        match connection.purpose {
            Purpose::Peer(incarnation) => self.end_peer(now, incarnation, error),
            Purpose::Resolve(socket) => self.resolving_failed(now, socket, error),
            Purpose::Accepted => self.drop_connection(id),
        }
    }
}

/// The error of whoever means an earlier life of an endpoint.
pub(super) fn stale(expected: Incarnation, actual: Incarnation, name: &str) -> Error {
    Error::new(ErrorKind::StalePeer, format!("endpoint {expected}"))
        .at(name.to_string())
        .because(format!("endpoint {actual} is at that address now"))
        .remedy("use the address that the restarted endpoint publishes")
}
