//! Links to peers, the transfers on them, and the relay of lane fences.

use std::sync::Arc;

use super::Machine;
use super::config::RETRY_AFTER;
use super::timers::TimerKey;
use super::types::{Action, HandleId, LinkCommand};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{ChunkName, ChunkState, Direction, LaneName, SendEvent, SendPart, SendSpec, TransferId};
use crate::id::{GrantName, Incarnation, PoolId};
use crate::layout::PoolLayout;
use crate::mutants::{self, Mutant};
use crate::plan::Target;
use crate::time::Time;
use crate::transport::LinkEvent;
use crate::wire::Message;
use crate::wire::lane::LaneHello;

mod choose;
mod one_sided;

pub(super) use choose::TransportFailure;

/// The link to one peer, from `ConnectLink` to `LinkEvent::Closed`. It may outlive the session it was made for.
#[derive(Debug)]
pub(super) struct LinkState {
    /// Which link to this peer it is.
    pub(super) epoch: u64,
    pub(super) transport: String,
    /// Its transport writes and reads the peer's memory itself.
    pub(super) one_sided: bool,
    /// A lane is, or was, up.
    pub(super) up: bool,
    /// `CloseLink` was said, or it failed and closes itself.
    pub(super) closing: bool,
    /// It failed: what it was given goes to the next one.
    failed: bool,
    pub(super) since: Time,
}

/// Whose bytes a transfer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransferOwner {
    /// A claim of this peer, served by an offer.
    Member(Incarnation, u64),
    /// A push.
    Push(HandleId),
    /// A read grant that is being read.
    Serve(HandleId),
    /// What this endpoint's device reads of a source, for a claim.
    ClaimRead(HandleId, Incarnation),
    /// What this endpoint's device reads, for a pull.
    PullRead(HandleId),
}

/// How far a transfer is on its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkPhase {
    /// It has no part yet.
    Empty,
    /// It waits for others to end.
    Queued,
    /// The link has it.
    Active,
    /// The link was told to stop.
    Stopping,
}

/// A transfer on the way to a link, or on it.
pub(super) struct LinkTransfer {
    pub(super) peer: Incarnation,
    pub(super) owner: TransferOwner,
    pub(super) phase: LinkPhase,
    // Without what only one-sided links need: that is made for the link which gets it.
    spec: SendSpec,
    remote: RemoteSide,
    // Kept, so that a link without room, or the next link, can be asked again.
    parts: Vec<SendPart>,
    // Acknowledged to the owner of the slot once nothing of this transfer is outstanding.
    acknowledge: Option<GrantName>,
}

/// The other side of a transfer, for links that reach it themselves.
#[derive(Debug, Clone)]
pub(super) struct RemoteSide {
    /// The peer's pool.
    pub(super) pool: PoolId,
    /// What of it is written. What is read, the parts say.
    pub(super) written: Option<(Arc<PoolLayout>, Arc<Target>)>,
}

impl LinkTransfer {
    /// How many parts it has, and the last one's number.
    pub(super) fn parts_so_far(&self) -> (usize, Option<u32>) {
        (self.parts.len(), self.parts.last().map(|part| part.part))
    }
}

impl Machine {
    /// Closes the link. What it touches is fenced once `LinkEvent::Closed` has come.
    pub(super) fn close_link(&mut self, now: Time, incarnation: Incarnation) {
        let Some(link) = self.links.get_mut(&incarnation) else {
            return;
        };
        if link.closing {
            return;
        }
        link.closing = true;
        link.since = now;
        self.actions.push_back(Action::CloseLink { peer: incarnation });
    }

    /// The number of the link that is being closed, if one is.
    pub(super) fn closing_link(&self, incarnation: Incarnation) -> Option<(Incarnation, u64)> {
        let link = self.links.get(&incarnation).filter(|link| link.closing)?;
        Some((incarnation, link.epoch))
    }

    /// Whether that link touches blocks no more.
    pub(super) fn link_is_closed(&self, link: (Incarnation, u64)) -> bool {
        self.links.get(&link.0).is_none_or(|state| state.epoch != link.1)
    }

    pub(super) fn on_link_event(&mut self, now: Time, incarnation: Incarnation, event: LinkEvent) {
        match event {
            LinkEvent::Up => {
                if let Some(link) = self.links.get_mut(&incarnation) {
                    link.up = true;
                    link.since = now;
                }
            }
            LinkEvent::Send(event) => self.send_event(now, event),
            LinkEvent::LaneLost { lane, chunks, .. } => {
                if self.links.get(&incarnation).is_some_and(|link| !link.closing) {
                    self.send(now, incarnation, Message::FenceLane { lane, chunks });
                }
            }
            LinkEvent::LaneFenced { lane, chunks } => {
                if self.links.get(&incarnation).is_some_and(|link| !link.closing) {
                    self.send(now, incarnation, Message::LaneFenced { lane, chunks });
                }
            }
            LinkEvent::SlotQuiet => {}
            LinkEvent::Message(body) => self.tell_other_end(now, incarnation, body),
            LinkEvent::Failed(error) => self.own_transport_failed(now, incarnation, &error),
            LinkEvent::SlotArrived { slot, generation } => self.slot_arrived(now, (slot, generation)),
            LinkEvent::SlotCorrupt {
                slot,
                generation,
                error,
            } => self.slot_corrupt(now, (slot, generation), error),
            LinkEvent::MemoryFailed { transfer, error } => self.transfer_memory_failed(now, transfer, error),
            LinkEvent::Closed => self.link_closed(now, incarnation),
        }
        self.look_at_fences(now);
    }

    /// Nothing of the link touches blocks any more, at either end.
    fn link_closed(&mut self, now: Time, incarnation: Incarnation) {
        let Some(link) = self.links.remove(&incarnation) else {
            return;
        };
        self.slots_quiet(incarnation);
        if !link.closing || link.failed {
            self.link_gone(now, incarnation);
        }
        self.next_link(now, incarnation);
    }

    /// A link went that nobody closed: what it was given goes to the next one, what it was stopping has stopped.
    fn link_gone(&mut self, now: Time, incarnation: Incarnation) {
        let given: Vec<(TransferId, LinkPhase)> = self
            .link_transfers
            .iter()
            .filter(|(_, transfer)| transfer.peer == incarnation)
            .map(|(id, transfer)| (*id, transfer.phase))
            .collect();
        for (id, phase) in given {
            match phase {
                LinkPhase::Active => self.requeue(id),
                LinkPhase::Stopping => self.send_event(now, SendEvent::Quiet(id)),
                LinkPhase::Empty | LinkPhase::Queued => {}
            }
        }
    }

    /// Relays the sender's wish: its lane was lost.
    pub(super) fn fence_lane(
        &mut self,
        incarnation: Incarnation,
        lane: LaneName,
        chunks: Vec<ChunkName>,
    ) -> Result<()> {
        if self.speaks_of_an_earlier_link(incarnation) {
            return Ok(());
        }
        if self.links.get(&incarnation).is_some_and(|link| !link.closing) {
            self.actions.push_back(Action::Link {
                peer: incarnation,
                command: LinkCommand::FenceLane(lane, chunks),
            });
        } else if let Some(peer) = self.peers.get_mut(&incarnation) {
            if peer.pending_fences.len() >= FENCES_PENDING_MAX {
                return Err(Error::new(ErrorKind::Protocol, "lane fences").because("too many are pending"));
            }
            peer.pending_fences.push((lane, chunks));
        }
        Ok(())
    }

    /// Relays the receiver's answer.
    pub(super) fn lane_fenced(
        &mut self,
        incarnation: Incarnation,
        lane: LaneName,
        chunks: Vec<(ChunkName, ChunkState)>,
    ) {
        if self.links.get(&incarnation).is_some_and(|link| !link.closing)
            && !self.speaks_of_an_earlier_link(incarnation)
        {
            self.actions.push_back(Action::Link {
                peer: incarnation,
                command: LinkCommand::LaneFenced(lane, chunks),
            });
        }
    }

    pub(super) fn check_lane(&self, hello: &LaneHello) -> Result<Incarnation> {
        let place = || format!("lane {}.{} of {}", hello.lane.index, hello.lane.epoch, hello.from);
        if hello.to != self.incarnation {
            return Err(Error::new(ErrorKind::StalePeer, "a lane for another endpoint")
                .at(place())
                .because(format!("it is meant for {}, this is {}", hello.to, self.incarnation)));
        }
        let session = self.peers.get(&hello.from).and_then(|peer| peer.session.as_ref());
        match session {
            Some(session) if session.token == hello.token => Ok(hello.from),
            Some(_) => Err(Error::new(ErrorKind::Unauthenticated, "a lane of another session")
                .at(place())
                .because("its token is not that of the session")),
            None => Err(Error::new(ErrorKind::PeerLost, "a lane without a session")
                .at(place())
                .because("there is no session with that endpoint")),
        }
    }

    // ------------------------------------------------------------------------------------------ transfers

    /// A transfer without parts yet.
    pub(super) fn begin_transfer(
        &mut self,
        peer: Incarnation,
        owner: TransferOwner,
        remote: RemoteSide,
        make: impl FnOnce(TransferId) -> SendSpec,
    ) -> TransferId {
        let id = TransferId(self.next_transfer);
        self.next_transfer += 1;
        let transfer = LinkTransfer {
            peer,
            owner,
            phase: LinkPhase::Empty,
            spec: make(id),
            remote,
            parts: Vec::new(),
            acknowledge: None,
        };
        self.link_transfers.insert(id, transfer);
        id
    }

    /// Gives a part to the transfer, and the transfer to the link when its turn comes.
    pub(super) fn add_part(&mut self, now: Time, id: TransferId, part: SendPart) {
        let Some(transfer) = self.link_transfers.get_mut(&id) else {
            return;
        };
        transfer.parts.push(part.clone());
        let peer = transfer.peer;
        match transfer.phase {
            LinkPhase::Active => match self.part_for_link(id, part) {
                Ok(part) => self.actions.push_back(Action::Link {
                    peer,
                    command: LinkCommand::AddPart(id, part),
                }),
                Err(error) => self.transfer_refused(now, id, error),
            },
            LinkPhase::Empty => {
                transfer.phase = LinkPhase::Queued;
                let place = (u8::MAX - transfer.spec.priority, id);
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.queue.insert(place);
                }
                self.pump(now, peer);
            }
            LinkPhase::Queued | LinkPhase::Stopping => {}
        }
    }

    /// Gives waiting transfers to the link, as many as may be active.
    pub(super) fn pump(&mut self, now: Time, incarnation: Incarnation) {
        // What is refused on the way makes room for the next: that is this loop's, not one inside it.
        if std::mem::replace(&mut self.pumping, true) {
            return;
        }
        self.pump_all(now, incarnation);
        self.pumping = false;
    }

    fn pump_all(&mut self, now: Time, incarnation: Incarnation) {
        loop {
            if self.links.get(&incarnation).is_none_or(|link| link.closing)
                || self.timers.is_set(TimerKey::Link(incarnation))
            {
                return;
            }
            let Some(peer) = self.peers.get_mut(&incarnation) else {
                return;
            };
            if peer.active >= self.config.grants_per_peer_max {
                return;
            }
            let Some((_, id)) = peer.queue.pop_first() else { return };
            let Some(transfer) = self.link_transfers.get_mut(&id) else {
                continue;
            };
            transfer.phase = LinkPhase::Active;
            peer.active += 1;
            if transfer.owner.direction() == Direction::Read && !self.path_is_one_sided(incarnation) {
                self.ask_instead_of_reading(now, id);
                continue;
            }
            if let Err(error) = self.give_to_link(incarnation, id) {
                self.transfer_refused(now, id, error);
            }
        }
    }

    fn give_to_link(&mut self, incarnation: Incarnation, id: TransferId) -> Result<()> {
        let Some(transfer) = self.link_transfers.get(&id) else {
            return Ok(());
        };
        let mut spec = transfer.spec.clone();
        let parts = transfer.parts.clone();
        spec.remote = self.remote_for_link(id)?;
        let parts: Vec<SendPart> = parts
            .into_iter()
            .map(|part| self.part_for_link(id, part))
            .collect::<Result<_>>()?;
        let submit = std::iter::once(LinkCommand::Submit(spec));
        let commands = submit.chain(parts.into_iter().map(|part| LinkCommand::AddPart(id, part)));
        self.actions.extend(commands.map(|command| Action::Link {
            peer: incarnation,
            command,
        }));
        Ok(())
    }

    /// The link cannot take a transfer, and never will: its owner ends with the reason.
    fn transfer_refused(&mut self, now: Time, id: TransferId, error: Error) {
        let Some(owner) = self.link_transfers.get(&id).map(|transfer| transfer.owner) else {
            return;
        };
        self.transfer_is_over(now, id);
        match owner {
            TransferOwner::Member(peer, claim) => {
                self.member_transfer_over(peer, claim, id);
                self.end_member_from_source(now, peer, claim, error);
            }
            TransferOwner::Push(handle) => {
                self.push_is_quiet(handle);
                self.end_push(now, handle, error);
            }
            TransferOwner::Serve(handle) => {
                self.serve_transfer_over(now, handle);
                self.end_serve(now, handle, error);
            }
            TransferOwner::ClaimRead(handle, source) => {
                self.claim_read_over(handle, source, id);
                self.end_claim(now, handle, error);
            }
            TransferOwner::PullRead(handle) => {
                self.pull_read_over(handle);
                self.end_pull(now, handle, error);
            }
        }
    }

    /// The memory of a transfer that is on its link failed: its owner ends with the reason, which stops it.
    fn transfer_memory_failed(&mut self, now: Time, id: TransferId, error: Error) {
        let Some(transfer) = self.link_transfers.get(&id) else {
            return;
        };
        if transfer.phase != LinkPhase::Active {
            return;
        }
        match transfer.owner {
            TransferOwner::Member(peer, claim) => self.end_member_from_source(now, peer, claim, error),
            TransferOwner::Push(handle) => self.end_push(now, handle, error),
            TransferOwner::Serve(handle) => self.end_serve(now, handle, error),
            TransferOwner::ClaimRead(handle, _) => self.end_claim(now, handle, error),
            TransferOwner::PullRead(handle) => self.end_pull(now, handle, error),
        }
    }

    /// Stops a transfer. `acknowledge` names the grant whose verdict is acknowledged once nothing is outstanding.
    pub(super) fn stop_transfer(&mut self, now: Time, id: TransferId, acknowledge: Option<GrantName>) {
        let Some(transfer) = self.link_transfers.get_mut(&id) else {
            return;
        };
        transfer.acknowledge = acknowledge;
        match transfer.phase {
            LinkPhase::Empty | LinkPhase::Queued => self.transfer_is_over(now, id),
            LinkPhase::Active => {
                transfer.phase = LinkPhase::Stopping;
                self.actions.push_back(Action::Link {
                    peer: transfer.peer,
                    command: LinkCommand::Stop(id),
                });
            }
            LinkPhase::Stopping => {}
        }
    }

    /// Lets go of a transfer: nothing of it is outstanding.
    pub(super) fn transfer_is_over(&mut self, now: Time, id: TransferId) {
        let Some(transfer) = self.link_transfers.remove(&id) else {
            return;
        };
        let place = (u8::MAX - transfer.spec.priority, id);
        if let Some(peer) = self.peers.get_mut(&transfer.peer) {
            match transfer.phase {
                LinkPhase::Active | LinkPhase::Stopping => {
                    peer.active = peer.active.saturating_sub(1);
                    self.actions.push_back(Action::Link {
                        peer: transfer.peer,
                        command: LinkCommand::Forget(id),
                    });
                }
                LinkPhase::Empty | LinkPhase::Queued => {
                    peer.queue.remove(&place);
                }
            }
        }
        if let Some(grant) = transfer.acknowledge {
            self.acknowledge_verdict(now, transfer.peer, grant);
        }
        self.pump(now, transfer.peer);
    }

    pub(super) fn on_submit_failed(&mut self, now: Time, incarnation: Incarnation, id: TransferId, error: Error) {
        let Some(transfer) = self.link_transfers.get(&id) else {
            return;
        };
        match transfer.phase {
            LinkPhase::Stopping => self.transfer_is_over(now, id),
            LinkPhase::Active if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Closed) => {
                self.timers.set_earlier(TimerKey::Link(incarnation), now + RETRY_AFTER);
                self.requeue(id);
            }
            LinkPhase::Active => self.transfer_refused(now, id, error),
            LinkPhase::Empty | LinkPhase::Queued => {}
        }
        self.look_at_fences(now);
    }

    fn requeue(&mut self, id: TransferId) {
        let Some(transfer) = self.link_transfers.get_mut(&id) else {
            return;
        };
        transfer.phase = LinkPhase::Queued;
        if let Some(peer) = self.peers.get_mut(&transfer.peer) {
            peer.active = peer.active.saturating_sub(1);
            peer.queue.insert((u8::MAX - transfer.spec.priority, id));
        }
    }

    /// The link to this peer is being closed for good: none of its transfers goes on.
    pub(super) fn link_transfers_lost(&mut self, incarnation: Incarnation) {
        self.link_transfers.retain(|_, transfer| transfer.peer != incarnation);
        if let Some(peer) = self.peers.get_mut(&incarnation) {
            peer.active = 0;
            peer.queue.clear();
            peer.pending_fences.clear();
            peer.pending_messages.clear();
        }
    }

    fn send_event(&mut self, now: Time, event: SendEvent) {
        let (SendEvent::Arrived(id) | SendEvent::Refused(id) | SendEvent::Drained(id) | SendEvent::Quiet(id)) = event;
        let Some(transfer) = self.link_transfers.get(&id) else {
            return;
        };
        let (owner, stopping) = (transfer.owner, transfer.phase == LinkPhase::Stopping);
        if let SendEvent::Drained(_) = event {
            if mutants::is(Mutant::SourceDecidesArrival) && !stopping {
                self.take_for_arrived(now, owner);
            }
            return;
        }
        let arrived = matches!(event, SendEvent::Arrived(_));
        self.transfer_is_over(now, id);
        match owner {
            // The owner of the destination says how it ended.
            TransferOwner::Member(peer, claim) => self.member_transfer_over(peer, claim, id),
            TransferOwner::Push(handle) if arrived => self.push_arrived(now, handle),
            TransferOwner::Push(handle) if !stopping => self.push_refused(now, handle),
            TransferOwner::Push(handle) => self.push_is_quiet(handle),
            TransferOwner::Serve(handle) => self.serve_transfer_over(now, handle),
            TransferOwner::ClaimRead(handle, source) => self.claim_read_over(handle, source, id),
            TransferOwner::PullRead(handle) => self.pull_read_over(handle),
        }
    }

    /// A defect on purpose: see [`Mutant::SourceDecidesArrival`].
    fn take_for_arrived(&mut self, now: Time, owner: TransferOwner) {
        match owner {
            TransferOwner::Member(peer, claim) => self.member_ended(now, peer, claim, crate::wire::Verdict::Arrived),
            TransferOwner::Push(handle) => self.push_arrived(now, handle),
            TransferOwner::Serve(_) | TransferOwner::ClaimRead(..) | TransferOwner::PullRead(_) => {}
        }
    }
}

/// Lane fences kept while the link is being made, at most.
const FENCES_PENDING_MAX: usize = 256;
