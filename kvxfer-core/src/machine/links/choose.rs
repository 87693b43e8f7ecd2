//! Which transport a link is made with, and what becomes of it when that fails.

use super::super::types::PeerChange;
use super::*;
use crate::transport::LinkPeer;

/// A transport of one session that could not be used.
///
/// Each failure is said once in each direction: who notices says it, and who hears of it says so too. That tells what the
/// peer says of a link that has failed from what it says of the next one.
#[derive(Debug)]
pub(in crate::machine) struct TransportFailure {
    transport: String,
    /// Why it is not tried again; `None` once that has been forgotten.
    excluded: Option<Error>,
    told: u64,
    heard: u64,
}

impl Machine {
    /// Makes the link if there is none and the peer is known to be ready for it.
    pub(in crate::machine) fn open_link(&mut self, now: Time, incarnation: Incarnation) {
        if self.links.contains_key(&incarnation) || self.shutdown_over {
            return;
        }
        let chosen = self.choose_transport(incarnation);
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        let Some(session) = peer.session.as_ref().filter(|session| session.confirmed) else {
            return;
        };
        let (taken, refused) = chosen;
        let transport = taken.clone();
        peer.transport.clone_from(&taken);
        peer.transports_refused.clone_from(&refused);
        self.actions.push_back(Action::Peer {
            peer: incarnation,
            change: PeerChange::Path {
                transport: taken,
                refused,
            },
        });
        let Some(transport) = transport else { return };
        let advert = peer
            .transports
            .iter()
            .find(|(name, _)| *name == transport)
            .map(|(_, advert)| advert.clone())
            .unwrap_or_default();
        let one_sided = self.transports.iter().any(|own| own.name == transport && own.one_sided);
        self.link_epoch += 1;
        self.links.insert(
            incarnation,
            LinkState {
                epoch: self.link_epoch,
                transport: transport.clone(),
                one_sided,
                up: false,
                closing: false,
                failed: false,
                since: now,
            },
        );
        self.actions.push_back(Action::ConnectLink {
            transport: transport.clone(),
            peer: LinkPeer {
                incarnation,
                local: self.incarnation,
                addresses: peer.address.sockets.clone(),
                advert,
                token: session.token,
                dials: session.dialer,
            },
        });
        let messages = std::mem::take(&mut peer.pending_messages)
            .into_iter()
            .filter(|(name, _)| *name == transport)
            .map(|(_, body)| LinkCommand::Message(body));
        let fences = std::mem::take(&mut peer.pending_fences)
            .into_iter()
            .map(|(lane, chunks)| LinkCommand::FenceLane(lane, chunks));
        self.actions.extend(messages.chain(fences).map(|command| Action::Link {
            peer: incarnation,
            command,
        }));
        if one_sided {
            self.admit_open_slots(incarnation);
        }
        self.pump(now, incarnation);
    }

    /// The first transport that both sides have and that has not failed, in the order of the session's dialer; and why
    /// not those before it.
    fn choose_transport(&self, incarnation: Incarnation) -> (Option<String>, Vec<(String, String)>) {
        let Some(peer) = self.peers.get(&incarnation) else {
            return (None, Vec::new());
        };
        let Some(session) = &peer.session else {
            return (None, Vec::new());
        };
        let ours: Vec<&str> = self.transports.iter().map(|own| own.name.as_str()).collect();
        let theirs: Vec<&str> = peer.transports.iter().map(|(name, _)| name.as_str()).collect();
        let (first, second) = if session.dialer {
            (&ours, &theirs)
        } else {
            (&theirs, &ours)
        };
        let mut refused = Vec::new();
        for name in first {
            let why = if !second.contains(name) {
                "the other side does not have it".to_string()
            } else if let Some(error) = peer.excluded(name) {
                error.to_string()
            } else {
                return (Some((*name).to_string()), refused);
            };
            refused.push(((*name).to_string(), why));
        }
        (None, refused)
    }

    /// Whether the link to this peer, or the one that would be made now, reaches its memory by itself.
    pub(in crate::machine) fn path_is_one_sided(&self, incarnation: Incarnation) -> bool {
        match self.links.get(&incarnation).filter(|link| !link.closing) {
            Some(link) => link.one_sided,
            None => {
                let chosen = self.choose_transport(incarnation).0;
                self.transports
                    .iter()
                    .any(|own| own.one_sided && Some(&own.name) == chosen.as_ref())
            }
        }
    }

    pub(in crate::machine) fn transport_adverts(&self) -> Vec<(String, Vec<u8>)> {
        self.transports
            .iter()
            .map(|own| (own.name.clone(), own.advert.clone()))
            .collect()
    }

    // --------------------------------------------------------------------------------------- its failure

    /// The link could not be made.
    pub(in crate::machine) fn on_link_failed(&mut self, now: Time, incarnation: Incarnation, error: Error) {
        let Some(link) = self.links.get(&incarnation) else {
            return;
        };
        let (given_up, busy) = (link.closing && !link.failed, error.kind() == ErrorKind::Busy);
        self.take_back_commands(incarnation, busy);
        if given_up {
            self.link_closed(now, incarnation);
        } else if busy {
            // A limit clears by itself: the same transport is tried again.
            self.links.remove(&incarnation);
            if let Some(peer) = self.peers.get_mut(&incarnation) {
                let transport = peer.transport.take().unwrap_or_default();
                peer.transports_refused = vec![(transport, error.to_string())];
                let refused = peer.transports_refused.clone();
                self.say_no_path(incarnation, refused);
                let wait = self.random.jitter(self.config.backoff_max);
                self.timers.set(TimerKey::Link(incarnation), now + wait);
            }
            self.link_gone(now, incarnation);
        } else {
            self.own_transport_failed(now, incarnation, &error);
            self.link_closed(now, incarnation);
        }
        self.look_at_fences(now);
    }

    /// What was said to a link that was never made must not reach the next one. What the peer is owed by any link of the
    /// same transport is kept for it.
    fn take_back_commands(&mut self, incarnation: Incarnation, keep: bool) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Link { peer, command } if peer == incarnation => {
                    let Some(peer) = self.peers.get_mut(&peer).filter(|_| keep) else {
                        continue;
                    };
                    match command {
                        LinkCommand::FenceLane(lane, chunks) => peer.pending_fences.push((lane, chunks)),
                        LinkCommand::Message(body) => {
                            let transport = peer.transport.clone().unwrap_or_default();
                            peer.pending_messages.push((transport, body));
                        }
                        _ => {}
                    }
                }
                Action::CloseLink { peer } if peer == incarnation => {}
                action => self.actions.push_back(action),
            }
        }
    }

    /// This end of the link cannot go on; it closes itself.
    pub(super) fn own_transport_failed(&mut self, now: Time, incarnation: Incarnation, error: &Error) {
        let Some(link) = self.links.get_mut(&incarnation).filter(|link| !link.closing) else {
            return;
        };
        link.closing = true;
        link.failed = true;
        link.since = now;
        let transport = link.transport.clone();
        if let Some(peer) = self.peers.get_mut(&incarnation) {
            let failure = peer.failure_of(&transport);
            failure.told += 1;
            failure.exclude(error);
        }
        let error = error.clone();
        self.send(now, incarnation, Message::TransportFailed { transport, error });
    }

    /// The peer's end of a link of this transport cannot go on, or it answers that ours does not.
    pub(in crate::machine) fn peer_transport_failed(
        &mut self,
        now: Time,
        incarnation: Incarnation,
        transport: &str,
        error: &Error,
    ) {
        if !self.transports.iter().any(|own| own.name == transport) {
            return;
        }
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        let failure = peer.failure_of(transport);
        failure.heard += 1;
        if failure.heard <= failure.told {
            return;
        }
        failure.told += 1;
        failure.exclude(&at_the_peer(error));
        let answer = Message::TransportFailed {
            transport: transport.to_string(),
            error: error.clone(),
        };
        self.send(now, incarnation, answer);
        let link = self.links.get_mut(&incarnation);
        if let Some(link) = link.filter(|link| !link.closing && link.transport == transport) {
            link.closing = true;
            link.failed = true;
            link.since = now;
            self.actions.push_back(Action::CloseLink { peer: incarnation });
        }
    }

    /// Whether what the peer says of its end of the link is of one that has failed at this end: it has not answered yet.
    pub(super) fn speaks_of_an_earlier_link(&self, incarnation: Incarnation) -> bool {
        self.peers
            .get(&incarnation)
            .is_some_and(|peer| peer.failures.iter().any(|failure| failure.heard < failure.told))
    }

    /// The link has gone: the next transport is tried, if there is one. If not, what needs a link ends with the reason,
    /// and all of them are tried again later.
    pub(super) fn next_link(&mut self, now: Time, incarnation: Incarnation) {
        self.open_link(now, incarnation);
        if self.links.contains_key(&incarnation) {
            return;
        }
        let Some(error) = self.no_transport_left(incarnation) else {
            return;
        };
        let wait = self.random.jitter(self.config.backoff_max);
        self.timers.set(TimerKey::Link(incarnation), now + wait);
        let needing: Vec<TransferId> = self
            .link_transfers
            .iter()
            .filter(|(_, transfer)| transfer.peer == incarnation)
            .map(|(id, _)| *id)
            .collect();
        for id in needing {
            self.transfer_refused(now, id, error.clone());
        }
    }

    /// Why there is no link with a peer, if that is because every transport has failed.
    pub(in crate::machine) fn no_transport_left(&self, incarnation: Incarnation) -> Option<Error> {
        let error = self.peers.get(&incarnation)?.no_transport_left()?;
        Some(error.at(format!("endpoint {incarnation}")))
    }

    pub(in crate::machine) fn on_link_timer(&mut self, now: Time, incarnation: Incarnation) {
        if !self.links.contains_key(&incarnation)
            && let Some(peer) = self.peers.get_mut(&incarnation)
            && peer.no_transport_left().is_some()
        {
            for failure in &mut peer.failures {
                failure.excluded = None;
            }
        }
        self.open_link(now, incarnation);
        self.pump(now, incarnation);
    }

    /// Transports that are not tried with some peer because they failed.
    pub(in crate::machine) fn transports_failed(&self) -> usize {
        let failures = self.peers.values().flat_map(|peer| &peer.failures);
        failures.filter(|failure| failure.excluded.is_some()).count()
    }

    fn say_no_path(&mut self, incarnation: Incarnation, refused: Vec<(String, String)>) {
        self.actions.push_back(Action::Peer {
            peer: incarnation,
            change: PeerChange::Path {
                transport: None,
                refused,
            },
        });
    }
}

impl TransportFailure {
    fn exclude(&mut self, error: &Error) {
        if !mutants::is(Mutant::FallBackToTheFailed) {
            self.excluded = Some(error.clone());
        }
    }
}

impl super::super::peers::Peer {
    fn excluded(&self, transport: &str) -> Option<&Error> {
        let failure = self.failures.iter().find(|failure| failure.transport == transport)?;
        failure.excluded.as_ref()
    }

    /// Bounded by the transports of this endpoint: no other's failures are noted.
    fn failure_of(&mut self, transport: &str) -> &mut TransportFailure {
        let known = self.failures.iter().position(|failure| failure.transport == transport);
        let place = known.unwrap_or_else(|| {
            self.failures.push(TransportFailure {
                transport: transport.to_string(),
                excluded: None,
                told: 0,
                heard: 0,
            });
            self.failures.len() - 1
        });
        &mut self.failures[place]
    }

    /// Why there is no link, if that is because every transport has failed.
    fn no_transport_left(&self) -> Option<Error> {
        let failed: Vec<(&str, &Error)> = self
            .failures
            .iter()
            .filter_map(|failure| Some((failure.transport.as_str(), failure.excluded.as_ref()?)))
            .collect();
        if failed.is_empty() || self.transport.is_some() {
            return None;
        }
        let unsupported = failed.iter().all(|(_, error)| error.kind() == ErrorKind::Unsupported);
        let kind = if unsupported {
            ErrorKind::Unsupported
        } else {
            ErrorKind::Transport
        };
        let why: Vec<String> = failed
            .iter()
            .map(|(transport, error)| format!("{transport}: {error}"))
            .collect();
        Some(
            Error::new(kind, "a link")
                .because(format!(
                    "no transport is left that both sides have ({})",
                    why.join("; ")
                ))
                .remedy("mend what is named, or name another transport behind it at both sides"),
        )
    }
}

fn at_the_peer(error: &Error) -> Error {
    Error::new(error.kind(), "the peer's end of the link").because(error.to_string())
}
