//! Claims of this endpoint: matched at all sources, filled, received, decided.

use std::net::SocketAddr;
use std::sync::Arc;

use super::config::{KEY_BYTES_MAX, RETRY_AFTER, SOURCES_MAX};
use super::slots::{SlotKey, SlotOwner, maybe_written, quarantined};
use super::timers::TimerKey;
use super::types::{Action, ClaimOptions, HandleId, Notice, Outcome};
use super::{Ending, Machine};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::TransferId;
use crate::id::{Incarnation, PoolId};
use crate::layout::{PoolLayout, Selection};
use crate::mutants::{self, Mutant};
use crate::plan::{self, Scope, Target};
use crate::time::Time;
use crate::wire::{Access, ClaimMessage, EndpointAddress, Grant, Message, Verdict};

mod progress;
mod pull;

pub(super) use pull::ReadyPart;

/// An open claim.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) key: Vec<u8>,
    pub(super) pool: PoolId,
    options: ClaimOptions,
    deadline: Time,
    /// The deadline was the caller's wish: it is not extended by a match.
    strict: bool,
    hold: Time,
    sources: Vec<Source>,
    selection: Option<Selection>,
    assigned: bool,
    pub(super) ending: Option<Ending>,
    pub(super) since: Time,
}

/// One source rank of a claim.
#[derive(Debug)]
struct Source {
    place: Place,
    /// The session knows of the claim.
    sent: bool,
    matched: Option<Match>,
    need: Need,
    slot: Option<SlotKey>,
    /// What of the pool the slot is for.
    target: Option<Arc<Target>>,
    /// What this endpoint's device reads into it.
    read: Option<TransferId>,
    arrived: bool,
    validating: bool,
    validated: bool,
    /// Slots of earlier attempts that are not fenced yet: nothing is opened over their blocks before they are.
    voided: Vec<SlotKey>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Known(Incarnation),
    Resolving(SocketAddr),
}

#[derive(Debug, Clone)]
struct Match {
    attempt: u32,
    pool: PoolId,
    layout: Arc<PoolLayout>,
}

/// What is needed of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Need {
    /// Not known yet.
    Open,
    /// Nothing: others provide it.
    Nothing,
    /// These layers and heads.
    Scope(Scope),
}

impl Source {
    fn peer(&self) -> Option<Incarnation> {
        match self.place {
            Place::Known(incarnation) => Some(incarnation),
            Place::Resolving(_) => None,
        }
    }

    fn is_done(&self, pull: bool) -> bool {
        match self.need {
            Need::Open => false,
            Need::Nothing => true,
            Need::Scope(_) => self.arrived && (!pull || self.validated || mutants::is(Mutant::SkipValidate)),
        }
    }
}

impl Claim {
    fn source_of(&mut self, peer: Incarnation) -> Option<&mut Source> {
        self.sources.iter_mut().find(|source| source.peer() == Some(peer))
    }

    fn is_done(&self) -> bool {
        self.assigned && self.selection.is_some() && self.sources.iter().all(|source| source.is_done(self.options.pull))
    }

    /// What it waits for.
    pub(super) fn waits_for(&self, machine: &Machine) -> &'static str {
        let ready = |source: &Source| {
            source
                .peer()
                .and_then(|peer| machine.peers.get(&peer))
                .is_some_and(|peer| peer.is_ready())
        };
        if self.ending.is_some() {
            "fence"
        } else if !self.sources.iter().all(ready) {
            "peer"
        } else if self.sources.iter().any(|source| source.matched.is_none()) {
            "offer"
        } else if self.selection.is_none() {
            "blocks"
        } else if self
            .sources
            .iter()
            .any(|source| matches!(source.need, Need::Scope(_)) && source.slot.is_none())
        {
            "credit"
        } else if self.sources.iter().any(|source| source.validating) {
            "validation"
        } else {
            "parts"
        }
    }

    /// Slots that are open or not fenced.
    fn slots(&self) -> impl Iterator<Item = SlotKey> + '_ {
        self.sources
            .iter()
            .flat_map(|source| source.slot.iter().chain(&source.voided).copied())
    }
}

impl Machine {
    pub(super) fn begin_claim(
        &mut self,
        now: Time,
        key: &[u8],
        pool: PoolId,
        addresses: &[EndpointAddress],
        options: ClaimOptions,
    ) -> Result<HandleId> {
        check_key(key)?;
        self.check_new_handle("a claim")?;
        let own = self.pool(pool)?;
        if !own.receives {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("pool {pool}"))
                .because("it is not registered for receiving")
                .remedy("register it with Role::Receive or Role::Both"));
        }
        if addresses.is_empty() || addresses.len() > SOURCES_MAX {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("{} source ranks", addresses.len()))
                    .because(format!("a claim names 1 to {SOURCES_MAX}")),
            );
        }
        if options.members == 0 || options.member >= options.members {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("member {} of {}", options.member, options.members),
            )
            .because("members are numbered from 0"));
        }
        let mut sources: Vec<Source> = Vec::with_capacity(addresses.len());
        for address in addresses {
            let place = self.place_of(address)?;
            if sources.iter().any(|source| source.place == place) {
                return Err(
                    Error::new(ErrorKind::InvalidArgument, "a source rank that is named twice")
                        .remedy("name each source once"),
                );
            }
            if let Place::Known(incarnation) = place {
                self.check_room_on_session(incarnation)?;
            }
            sources.push(Source {
                place,
                sent: false,
                matched: None,
                need: Need::Open,
                slot: None,
                target: None,
                read: None,
                arrived: false,
                validating: false,
                validated: false,
                voided: Vec::new(),
            });
        }
        for address in addresses {
            self.want_peer(now, address)?;
        }
        let id = self.new_handle();
        let deadline = now + options.deadline.unwrap_or(self.config.unmatched_deadline);
        self.timers.set(TimerKey::Deadline(id), deadline);
        let known: Vec<Incarnation> = sources.iter().filter_map(Source::peer).collect();
        let claim = Claim {
            key: key.to_vec(),
            pool,
            strict: options.deadline.is_some(),
            hold: now + self.config.hold_max,
            options,
            deadline,
            sources,
            selection: None,
            assigned: false,
            ending: None,
            since: now,
        };
        self.claims.insert(id, claim);
        for peer in known {
            self.send_claim(now, id, peer);
        }
        Ok(id)
    }

    fn place_of(&self, address: &EndpointAddress) -> Result<Place> {
        match (address.incarnation, address.sockets.first()) {
            (Some(incarnation), _) => Ok(Place::Known(incarnation)),
            (None, Some(socket)) => Ok(self.peer_at(*socket).map_or(Place::Resolving(*socket), Place::Known)),
            (None, None) => Err(Error::new(
                ErrorKind::InvalidArgument,
                "an endpoint address without sockets",
            )),
        }
    }

    pub(super) fn fill_claim(&mut self, now: Time, id: HandleId, selection: Selection) -> Result<()> {
        let claim = self.claims.get(&id).ok_or_else(super::handle_ended)?;
        if claim.ending.is_some() {
            return Err(super::handle_ended());
        }
        if claim.selection.is_some() {
            return Err(Error::new(ErrorKind::InvalidArgument, "a second selection for a claim")
                .because("it was filled before")
                .remedy("claim again for other blocks"));
        }
        self.pool(claim.pool)?.layout.check(&selection)?;
        if let Some(claim) = self.claims.get_mut(&id) {
            claim.selection = Some(selection);
            claim.since = now;
        }
        self.advance_claim(now, id);
        Ok(())
    }

    pub(super) fn decline_claim(&mut self, now: Time, id: HandleId) -> Result<()> {
        let claim = self.claims.get(&id).ok_or_else(super::handle_ended)?;
        if claim.selection.is_some() {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "declining a claim that was filled")
                    .remedy("cancel it: its blocks are in use until that is reported"),
            );
        }
        let error = Error::new(ErrorKind::Declined, "the claim").because("its owner needs nothing of it");
        self.end_claim(now, id, error);
        Ok(())
    }

    // ------------------------------------------------------------------------------------------- its sources

    fn claim_message(&self, now: Time, id: HandleId) -> Option<ClaimMessage> {
        let claim = self.claims.get(&id)?;
        let until = if claim.strict {
            claim.deadline
        } else {
            claim.hold.min(claim.deadline)
        };
        Some(ClaimMessage {
            claim: id.0,
            key: claim.key.clone(),
            set: claim.options.set,
            member: claim.options.member,
            members: claim.options.members,
            pool: claim.pool,
            remaining_ms: until.remaining_ms(now),
            pull: claim.options.pull,
        })
    }

    /// Tells a source of the claim, if there is a session with it.
    fn send_claim(&mut self, now: Time, id: HandleId, peer: Incarnation) {
        if self.peers.get(&peer).is_none_or(|peer| peer.session.is_none()) {
            return;
        }
        let Some(message) = self.claim_message(now, id) else {
            return;
        };
        let Some(claim) = self.claims.get_mut(&id).filter(|claim| claim.ending.is_none()) else {
            return;
        };
        let Some(source) = claim.source_of(peer).filter(|source| !source.sent) else {
            return;
        };
        source.sent = true;
        self.send(now, peer, Message::Claim(message));
    }

    /// A session began: the peer is told of the claims that name it, and of those that ended before.
    pub(super) fn send_claims(&mut self, now: Time, peer: Incarnation) {
        let ends = self
            .peers
            .get_mut(&peer)
            .map(|peer| std::mem::take(&mut peer.unsent_ends))
            .unwrap_or_default();
        for (message, verdict) in ends {
            let claim = message.claim;
            self.send(now, peer, Message::Claim(message));
            self.send(now, peer, Message::ClaimEnded { claim, verdict });
        }
        let claims: Vec<HandleId> = self.claims.keys().copied().collect();
        for id in claims {
            self.send_claim(now, id, peer);
        }
    }

    /// The endpoint at an address became known.
    pub(super) fn claims_resolved(&mut self, now: Time, socket: SocketAddr, peer: Incarnation) {
        let claims: Vec<HandleId> = self.claims.keys().copied().collect();
        for id in claims {
            let Some(claim) = self.claims.get_mut(&id) else {
                continue;
            };
            let twice = claim.source_of(peer).is_some();
            let Some(source) = claim
                .sources
                .iter_mut()
                .find(|source| source.place == Place::Resolving(socket))
            else {
                continue;
            };
            if twice {
                let error = Error::new(ErrorKind::InvalidArgument, "a source rank that is named twice")
                    .because(format!("{socket} is endpoint {peer}"));
                self.end_claim(now, id, error);
                continue;
            }
            source.place = Place::Known(peer);
            self.send_claim(now, id, peer);
        }
    }

    pub(super) fn claims_unresolved(&mut self, now: Time, socket: SocketAddr, error: &Error) {
        let claims: Vec<HandleId> = self
            .claims
            .iter()
            .filter(|(_, claim)| {
                claim
                    .sources
                    .iter()
                    .any(|source| source.place == Place::Resolving(socket))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in claims {
            self.end_claim(now, id, error.clone());
        }
    }

    pub(super) fn claims_lost(&mut self, now: Time, peer: Incarnation, error: &Error) {
        let claims: Vec<HandleId> = self
            .claims
            .iter()
            .filter(|(_, claim)| claim.sources.iter().any(|source| source.peer() == Some(peer)))
            .map(|(id, _)| *id)
            .collect();
        let link = self.closing_link(peer);
        for id in claims {
            self.end_claim(now, id, error.clone());
            if let Some(claim) = self.claims.get_mut(&id)
                && let Some(ending) = claim.ending.as_mut()
                && let Some(link) = link
            {
                ending.links.push(link);
            }
        }
    }

    // ------------------------------------------------------------------------------------- what sources say

    pub(super) fn claim_matched(
        &mut self,
        now: Time,
        peer: Incarnation,
        claim: u64,
        attempt: u32,
        pool: PoolId,
    ) -> Result<()> {
        let advert = self.peers.get(&peer).and_then(|peer| peer.pools.get(&pool)).cloned();
        let Some(claim_state) = self.open_claim(claim) else {
            return Ok(());
        };
        let Some(source) = claim_state.source_of(peer) else {
            return Err(protocol("a match of a claim that does not name this endpoint"));
        };
        if source.matched.is_some() {
            return Err(protocol("a second match of a claim"));
        }
        let Some(advert) = advert.filter(|advert| advert.serves) else {
            let error = Error::new(ErrorKind::NotRegistered, format!("the source's pool {pool}"))
                .because("it is not registered for serving any more");
            self.end_claim(now, HandleId(claim), error);
            return Ok(());
        };
        source.matched = Some(Match {
            attempt,
            pool,
            layout: advert.layout,
        });
        claim_state.since = now;
        if claim_state.sources.iter().all(|source| source.matched.is_some()) {
            self.actions.push_back(Action::Notice {
                handle: HandleId(claim),
                notice: Notice::Matched,
            });
            self.advance_claim(now, HandleId(claim));
        }
        Ok(())
    }

    pub(super) fn claim_restarted(&mut self, now: Time, peer: Incarnation, claim: u64, attempt: u32) -> Result<()> {
        let id = HandleId(claim);
        let Some(claim_state) = self.open_claim(claim) else {
            return Ok(());
        };
        let Some(source) = claim_state.source_of(peer) else {
            return Err(protocol("a restart of a claim that does not name this endpoint"));
        };
        let Some(matched) = source.matched.as_mut() else {
            return Err(protocol("a restart before a match"));
        };
        if attempt <= matched.attempt {
            return Err(protocol("a restart with an attempt that is not newer"));
        }
        matched.attempt = attempt;
        source.validating = false;
        source.validated = false;
        source.arrived = false;
        if mutants::is(Mutant::KeepOldAttempt) {
            if let Some(slot) = source.slot {
                self.grant_claim_slot(now, id, peer, slot);
            }
            return Ok(());
        }
        let read = source.read.take();
        if let Some(slot) = source.slot.take() {
            source.voided.push(slot);
            self.close_slot(slot);
            self.fencing.insert(id);
            let limit = self.fence_limit([peer]);
            self.timers.set(TimerKey::Fence(id), now + limit);
        }
        if let Some(read) = read {
            self.stop_transfer(now, read, None);
        }
        self.actions.push_back(Action::Notice {
            handle: id,
            notice: Notice::Restarted,
        });
        self.look_at_claim_fence(now, id);
        Ok(())
    }

    /// The source refuses, or ends this: the claim fails, unless everything is in place already.
    pub(super) fn claim_ended_by_source(
        &mut self,
        now: Time,
        peer: Incarnation,
        claim: u64,
        error: Error,
    ) -> Result<()> {
        let Some(claim_state) = self.open_claim(claim) else {
            return Ok(());
        };
        if claim_state.source_of(peer).is_none() {
            return Err(protocol("the end of a claim that does not name this endpoint"));
        }
        self.end_claim(now, HandleId(claim), error);
        Ok(())
    }

    pub(super) fn claim_validated(&mut self, now: Time, peer: Incarnation, claim: u64, live: bool) -> Result<()> {
        let id = HandleId(claim);
        let Some(claim_state) = self.open_claim(claim) else {
            return Ok(());
        };
        let Some(source) = claim_state.source_of(peer).filter(|source| source.validating) else {
            return Ok(());
        };
        source.validating = false;
        if live {
            source.validated = true;
            self.advance_claim(now, id);
        } else {
            let error = Error::new(ErrorKind::Retracted, "the source blocks")
                .because("they were taken back while they were read")
                .remedy("recompute the request, or claim it again");
            self.end_claim(now, id, error);
        }
        Ok(())
    }

    pub(super) fn claim_slot_arrived(&mut self, now: Time, id: HandleId, peer: Incarnation, slot: SlotKey) {
        let Some(claim) = self.claims.get(&id) else { return };
        if claim.ending.is_some() {
            return;
        }
        let pull = claim.options.pull;
        let unasked = mutants::is(Mutant::SkipValidateOfReads) && self.path_is_one_sided(peer);
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let Some(source) = claim.source_of(peer) else { return };
        if source.slot != Some(slot) || source.arrived {
            return;
        }
        source.arrived = true;
        let attempt = source.matched.as_ref().map_or(0, |matched| matched.attempt);
        source.validated = unasked;
        if pull && !unasked {
            source.validating = true;
            self.send(
                now,
                peer,
                Message::Validate {
                    id: id.0,
                    claim: true,
                    attempt,
                },
            );
        }
        self.advance_claim(now, id);
    }

    pub(super) fn claim_slot_corrupt(&mut self, now: Time, id: HandleId, slot: SlotKey, error: Error) {
        let current = self
            .claims
            .get(&id)
            .is_some_and(|claim| claim.sources.iter().any(|source| source.slot == Some(slot)));
        if current {
            self.end_claim(now, id, error);
        }
    }
}

/// A key as the protocol takes it.
pub(super) fn check_key(key: &[u8]) -> Result<()> {
    if key.is_empty() || key.len() > KEY_BYTES_MAX {
        return Err(
            Error::new(ErrorKind::InvalidArgument, format!("a key of {} bytes", key.len()))
                .because(format!("keys have 1 to {KEY_BYTES_MAX} bytes"))
                .remedy("use the request id"),
        );
    }
    Ok(())
}

fn protocol(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, what)
}
