//! Pushes into and pulls from a peer's grant.

use std::sync::Arc;

use super::config::{BIND_AFTER, PLAN_LATER_BYTES};
use super::links::{LinkPhase, RemoteSide, TransferOwner};
use super::slots::{SlotKey, SlotOwner, maybe_written, quarantined, unknown};
use super::timers::TimerKey;
use super::types::{EventId, HandleId, Outcome, TransferOptions};
use super::withheld;
use super::{Ending, Machine, UseOwner};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{Gate, MESSAGE_BYTES_MAX, PartExtent, SendPart, SendSpec, TransferId};
use crate::id::{GrantName, Incarnation, PoolId};
use crate::mutants::{self, Mutant};
use crate::plan::{self, Target};
use crate::time::Time;
use crate::wire::{Access, Grant, Message, Verdict};

mod pull;

fn spent(grant: GrantName) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("grant {grant}"))
        .because("it is being used, or was")
        .remedy("a grant is good for one transfer: ask for another")
}

/// What a grant is good for.
struct GrantedBlocks {
    pool: PoolId,
    geometry_hash: u64,
    target: Arc<Target>,
}

/// An open push.
pub(super) struct Push {
    pub(super) peer: Incarnation,
    pub(super) pool: PoolId,
    grant: GrantName,
    /// What the grant names: its owner's pool, and the blocks there.
    theirs: GrantedBlocks,
    source: Arc<Target>,
    options: TransferOptions,
    deadline: Time,
    gate: Arc<Gate>,
    transfer: Option<TransferId>,
    bytes: u64,
    stage: PushStage,
    /// It does not begin before this has happened.
    held: Option<EventId>,
    /// Why it stops, if it was told to.
    ending: Option<Error>,
    verdict: Option<Verdict>,
    pub(super) since: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PushStage {
    /// For a session.
    Peer,
    /// For the acknowledgement of the last byte.
    Sending,
    /// For the owner's verdict.
    Asking,
}

/// An open pull.
#[derive(Debug)]
pub(super) struct Pull {
    pub(super) peer: Incarnation,
    pub(super) pool: PoolId,
    grant: Grant,
    target: Arc<Target>,
    deadline: Time,
    slot: Option<SlotKey>,
    /// What this endpoint's device reads into it.
    transfer: Option<TransferId>,
    bytes: u64,
    arrived: bool,
    validating: bool,
    ending: Option<Ending>,
    pub(super) since: Time,
}

impl Push {
    pub(super) fn waits_for(&self) -> &'static str {
        match (self.stage, &self.ending) {
            (_, Some(_)) => "fence",
            (PushStage::Peer, _) if self.held.is_some() => "event",
            (PushStage::Peer, _) => "peer",
            (PushStage::Sending, _) => "acknowledgement",
            (PushStage::Asking, _) => "verdict",
        }
    }
}

impl Pull {
    pub(super) fn waits_for(&self) -> &'static str {
        if self.ending.is_some() {
            "fence"
        } else if self.slot.is_none() {
            "peer"
        } else if self.validating {
            "validation"
        } else {
            "parts"
        }
    }
}

impl Machine {
    // ------------------------------------------------------------------------------------------------ push

    pub(super) fn begin_push(
        &mut self,
        now: Time,
        pool: PoolId,
        source: Target,
        grant: &Grant,
        options: TransferOptions,
    ) -> Result<HandleId> {
        self.check_new_handle("a push")?;
        let own = self.pool(pool)?;
        if !own.serves {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("pool {pool}"))
                .because("it is not registered for serving")
                .remedy("register it with Role::Serve or Role::Both"));
        }
        let bytes = source.bytes(&own.layout)?;
        if options
            .message
            .as_ref()
            .is_some_and(|message| message.len() > MESSAGE_BYTES_MAX)
        {
            return Err(Error::new(ErrorKind::InvalidArgument, "a user message")
                .because(format!("it has more than {MESSAGE_BYTES_MAX} bytes"))
                .remedy("send large payloads as blocks"));
        }
        self.check_grant(grant, Access::Write)?;
        if self.uses.contains_key(&grant.name) || self.spent.contains(&grant.name) {
            return Err(spent(grant.name));
        }
        let peer = grant.name.incarnation;
        self.check_room_on_session(peer)?;
        self.want_grant_owner(now, grant)?;
        let id = self.new_handle();
        let deadline = deadline_of(now, grant, &options);
        let held = options.after.filter(|_| !mutants::is(Mutant::IgnoreEvent));
        self.pushes.insert(
            id,
            Push {
                peer,
                pool,
                grant: grant.name,
                theirs: GrantedBlocks {
                    pool: grant.pool,
                    geometry_hash: grant.geometry_hash,
                    target: Arc::new(grant.target.clone()),
                },
                source: Arc::new(source),
                options,
                deadline,
                gate: Gate::new(),
                transfer: None,
                bytes: 0,
                stage: PushStage::Peer,
                held,
                ending: None,
                verdict: None,
                since: now,
            },
        );
        self.uses.insert(grant.name, UseOwner::Push(id));
        self.timers.set(TimerKey::Deadline(id), deadline);
        if let Some(event) = held {
            self.awaited.add(event, id);
        } else if bytes >= PLAN_LATER_BYTES {
            // Planned at the next turn, off the caller's thread: it does not notice the moment.
            self.timers.set(TimerKey::Bind(id), now);
        } else if self.has_session(peer)
            && let Err(error) = self.start_push(now, id)
        {
            // Nothing has begun: the caller hears of it at once.
            self.pushes.remove(&id);
            self.uses.remove(&grant.name);
            self.forget_timers(id);
            return Err(error);
        }
        Ok(id)
    }

    /// There is a session: the blocks of both sides are known.
    fn start_push(&mut self, now: Time, id: HandleId) -> Result<()> {
        let Some(push) = self.pushes.get(&id).filter(|push| push.held.is_none()) else {
            return Ok(());
        };
        let peer = push.peer;
        let own = self.pool(push.pool)?;
        let Some(layout) = self.grant_layout(peer, push.theirs.pool, push.theirs.geometry_hash)? else {
            return Ok(());
        };
        let target = push.theirs.target.clone();
        let stream = plan::source_stream(&own.layout, &push.source, &layout, &target, PartExtent::WHOLE)?;
        let (name, gate, regions) = (push.grant, push.gate.clone(), own.regions.clone());
        let (options, deadline) = (push.options.clone(), push.deadline);
        let remote = RemoteSide {
            pool: push.theirs.pool,
            written: Some((layout, target)),
        };
        let transfer = self.begin_transfer(peer, TransferOwner::Push(id), remote, |id| SendSpec {
            id,
            slot: name.slot,
            generation: name.generation,
            gate,
            regions,
            message: options.message,
            priority: options.priority,
            deadline: Some(deadline),
            checksum: options.checksum,
            remote: None,
        });
        if let Some(push) = self.pushes.get_mut(&id) {
            push.bytes = stream.length();
            push.transfer = Some(transfer);
            push.stage = PushStage::Sending;
            push.since = now;
        }
        self.timers.set(TimerKey::Bind(id), now + BIND_AFTER);
        let part = SendPart {
            part: 0,
            extent: PartExtent::WHOLE,
            stream,
            remote: None,
        };
        self.add_part(now, transfer, part);
        Ok(())
    }

    /// A session began: transfers that waited for it start.
    pub(super) fn start_transfers(&mut self, now: Time, peer: Incarnation) {
        let pushes: Vec<HandleId> = self
            .pushes
            .iter()
            .filter(|(_, push)| push.peer == peer && push.stage == PushStage::Peer && push.ending.is_none())
            .map(|(id, _)| *id)
            .collect();
        for id in pushes {
            if let Err(error) = self.start_push(now, id) {
                self.finish_push(now, id, Err(error));
            }
        }
        let pulls: Vec<HandleId> = self
            .pulls
            .iter()
            .filter(|(_, pull)| pull.peer == peer && pull.slot.is_none() && pull.ending.is_none())
            .map(|(id, _)| *id)
            .collect();
        for id in pulls {
            if let Err(error) = self.start_pull(now, id) {
                self.finish_pull(now, id, Err(error));
            }
        }
    }

    /// The push lasts: the grant's owner is told who uses it, and tells the verdict when there is one.
    pub(super) fn on_bind_timer(&mut self, now: Time, id: HandleId) {
        if let Some(push) = self.pushes.get(&id)
            && push.stage == PushStage::Sending
        {
            let (peer, grant) = (push.peer, push.grant);
            self.send(now, peer, Message::Ask { grant });
            return;
        }
        let planned_later = self
            .pushes
            .get(&id)
            .is_some_and(|push| push.stage == PushStage::Peer && push.ending.is_none() && self.has_session(push.peer));
        if planned_later && let Err(error) = self.start_push(now, id) {
            self.finish_push(now, id, Err(error));
        }
    }

    /// What the push waited for has happened: it begins at the next turn, as one that is planned later does.
    pub(super) fn push_event(&mut self, now: Time, id: HandleId, result: &Result<()>) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        push.held = None;
        push.since = now;
        match result {
            Ok(()) => self.timers.set(TimerKey::Bind(id), now),
            Err(error) => self.end_push(now, id, withheld::failed(error)),
        }
    }

    /// The receiver's data plane says that all bytes are in place.
    pub(super) fn push_arrived(&mut self, now: Time, id: HandleId) {
        if let Some(push) = self.pushes.get_mut(&id) {
            push.transfer = None;
            push.verdict = Some(Verdict::Arrived);
        }
        self.settle_push(now, id);
    }

    /// The receiver's slot takes no more: its owner knows why.
    pub(super) fn push_refused(&mut self, now: Time, id: HandleId) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        push.transfer = None;
        if push.stage == PushStage::Asking {
            return;
        }
        push.stage = PushStage::Asking;
        push.since = now;
        let (peer, grant) = (push.peer, push.grant);
        self.send(now, peer, Message::Ask { grant });
    }

    pub(super) fn push_is_quiet(&mut self, id: HandleId) {
        if let Some(push) = self.pushes.get_mut(&id) {
            push.transfer = None;
            self.fences_changed = true;
        }
    }

    pub(super) fn push_verdict(&mut self, now: Time, id: HandleId, verdict: Verdict) {
        if let Some(push) = self.pushes.get_mut(&id) {
            push.verdict = Some(verdict);
            push.gate.close();
            let transfer = push.transfer.take();
            if let Some(transfer) = transfer {
                self.stop_transfer(now, transfer, None);
            }
        }
        self.settle_push(now, id);
    }

    /// Ends a push from this side: posts nothing more, then asks.
    pub(super) fn end_push(&mut self, now: Time, id: HandleId, error: Error) {
        let Some(push) = self.pushes.get_mut(&id).filter(|push| push.ending.is_none()) else {
            return;
        };
        push.gate.close();
        push.ending = Some(error.clone());
        push.since = now;
        let begun = push.stage != PushStage::Peer;
        let (peer, grant, transfer) = (push.peer, push.grant, push.transfer);
        if let Some(event) = push.held.take() {
            self.awaited.remove(event, id);
        }
        self.fencing.insert(id);
        self.timers.clear(TimerKey::Deadline(id));
        self.timers.clear(TimerKey::Bind(id));
        let limit = self.fence_limit([peer]);
        self.timers.set(TimerKey::Fence(id), now + limit);
        if begun {
            if let Some(transfer) = transfer {
                self.stop_transfer(now, transfer, None);
            }
            self.send(now, peer, Message::GrantEnded { grant, error });
        } else {
            if let Some(push) = self.pushes.get_mut(&id) {
                push.verdict = Some(Verdict::Failed(error.clone()));
            }
            self.tell_unused(now, peer, grant, error);
        }
        self.fences_changed = true;
    }

    /// A grant was spent, and nothing of it was asked for: its owner shall not wait for its deadline. If there is no session
    /// yet, it is told in the first.
    fn tell_unused(&mut self, now: Time, peer: Incarnation, grant: GrantName, error: Error) {
        if self.has_session(peer) {
            self.send(now, peer, Message::GrantEnded { grant, error });
        } else if let Some(peer) = self.peers.get_mut(&peer)
            && peer.unsent_grant_ends.len() < self.config.waiting_claims_max
        {
            peer.unsent_grant_ends.push((grant, error));
        }
    }

    /// A session began: the peer is told of its grants whose use ended before.
    pub(super) fn send_grant_ends(&mut self, now: Time, peer: Incarnation) {
        let known = self.peers.get_mut(&peer);
        let ends = known.map(|peer| std::mem::take(&mut peer.unsent_grant_ends));
        for (grant, error) in ends.unwrap_or_default() {
            self.send(now, peer, Message::GrantEnded { grant, error });
        }
    }

    /// Reports the end once there is a verdict and nothing reads the source.
    pub(super) fn settle_push(&mut self, now: Time, id: HandleId) {
        let Some(push) = self.pushes.get(&id) else { return };
        let Some(verdict) = push.verdict.clone() else { return };
        if !push.gate.close() {
            let limit = self.fence_limit([push.peer]);
            if self.fencing.insert(id) {
                self.timers.set(TimerKey::Fence(id), now + limit);
            }
            return;
        }
        let bytes = push.bytes;
        let result = match verdict {
            Verdict::Arrived => Ok(Outcome::Transferred { bytes }),
            // Its own reason, not the owner's echo of it.
            Verdict::Failed(error) => Err(push.ending.clone().unwrap_or(error)),
            Verdict::Unknown => Err(unknown(
                format!("the push into grant {}", push.grant),
                "its owner does not remember it",
            )),
        };
        self.finish_push(now, id, result);
    }

    pub(super) fn push_not_fenced(&mut self, now: Time, id: HandleId) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        let error = push.ending.clone().unwrap_or_else(|| {
            Error::new(ErrorKind::Internal, "the push")
                .because("a data thread or device did not let go of the source blocks")
        });
        let error = if !push.gate.close() {
            self.sources_quarantined += 1;
            self.quarantined_pools.insert(push.pool);
            quarantined(&error)
        } else {
            match &push.verdict {
                Some(Verdict::Failed(_)) => error,
                // Nothing was heard of the owner: its bytes may all have arrived.
                _ => unknown(
                    format!("the push into grant {}", push.grant),
                    format!("it was ended ({error}) and its owner did not answer"),
                ),
            }
        };
        self.finish_push(now, id, Err(error));
    }

    fn finish_push(&mut self, now: Time, id: HandleId, result: Result<Outcome>) {
        let Some(push) = self.pushes.remove(&id) else { return };
        push.gate.close();
        if let Some(event) = push.held {
            self.awaited.remove(event, id);
        }
        self.uses.remove(&push.grant);
        self.spend(now, push.grant);
        self.forget_timers(id);
        if push.stage != PushStage::Peer {
            match push.transfer {
                Some(transfer) => self.stop_transfer(now, transfer, Some(push.grant)),
                None => self.acknowledge_verdict(now, push.peer, push.grant),
            }
        }
        self.complete(id, result);
    }

    /// Remembers a grant that was used, for as long as its owner may still say of it that it has arrived.
    fn spend(&mut self, now: Time, grant: GrantName) {
        let (retention, count_max) = (self.config.verdict_retention, self.config.unacknowledged_max);
        if self.spent.insert(grant) {
            self.spent_since.push_back((now, grant));
        }
        while let Some((since, oldest)) = self.spent_since.front().copied()
            && (now.since(since) > retention || self.spent_since.len() > count_max)
        {
            self.spent.remove(&oldest);
            self.spent_since.pop_front();
        }
    }

    pub(super) fn pushes_lost(&mut self, now: Time, peer: Incarnation, error: &Error, replaced: bool) {
        let pushes: Vec<HandleId> = self
            .pushes
            .iter()
            .filter(|(_, push)| push.peer == peer)
            .map(|(id, _)| *id)
            .collect();
        for id in pushes {
            let Some(push) = self.pushes.get_mut(&id) else { continue };
            push.gate.close();
            let queued = push
                .transfer
                .take()
                .and_then(|transfer| self.link_transfers.get(&transfer))
                .is_some_and(|transfer| transfer.phase == LinkPhase::Queued);
            if replaced && push.stage == PushStage::Asking {
                continue;
            }
            if push.verdict.is_none() {
                let told = push.ending.clone().unwrap_or_else(|| error.clone());
                let may_have_arrived =
                    push.stage != PushStage::Peer && !queued && !mutants::is(Mutant::SayLostForUnknown);
                if may_have_arrived {
                    push.verdict = Some(Verdict::Unknown);
                    push.ending = None;
                } else {
                    push.verdict = Some(Verdict::Failed(told));
                }
            }
            self.settle_push(now, id);
        }
    }

    /// The peer has lost the session but lives: pushes cannot go on, and their outcome is asked for in the next.
    pub(super) fn ask_for_pushes(&mut self, now: Time, peer: Incarnation) -> Vec<Message> {
        let mut asks = Vec::new();
        for push in self.pushes.values_mut().filter(|push| push.peer == peer) {
            if push.stage == PushStage::Peer || push.verdict.is_some() {
                continue;
            }
            push.stage = PushStage::Asking;
            push.since = now;
            let error = push.ending.clone().unwrap_or_else(|| {
                Error::new(ErrorKind::PeerLost, "the session").because("the receiver has forgotten it")
            });
            asks.push(Message::GrantEnded {
                grant: push.grant,
                error,
            });
        }
        asks
    }

    // ------------------------------------------------------------------------------------------- its grant

    fn check_grant(&self, grant: &Grant, access: Access) -> Result<()> {
        if grant.access != access {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("grant {}", grant.name))
                .because(format!("it is good for {:?}, not for {access:?}", grant.access)));
        }
        if grant.name.incarnation == self.incarnation {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("grant {}", grant.name))
                .because("it is this endpoint's own")
                .remedy("copy between pools of one process without kvxfer"));
        }
        Ok(())
    }

    /// A session with the grant's owner: with that incarnation, wherever the address points.
    fn want_grant_owner(&mut self, now: Time, grant: &Grant) -> Result<()> {
        self.want_peer_as(now, &grant.address, Some(grant.name.incarnation))
    }

    /// The layout of the grant's pool, as its owner has told it; `None` if the grant has overtaken that news: what waits
    /// for it is started by it.
    fn grant_layout(
        &self,
        peer: Incarnation,
        pool: PoolId,
        geometry_hash: u64,
    ) -> Result<Option<Arc<crate::layout::PoolLayout>>> {
        let owner = self.peers.get(&peer);
        let advert = owner.and_then(|owner| owner.pools.get(&pool));
        if advert.is_none() && owner.is_some_and(|owner| owner.pools_told < Some(pool)) {
            return Ok(None);
        }
        let Some(advert) = advert else {
            return Err(
                Error::new(ErrorKind::NotRegistered, format!("pool {pool} of endpoint {peer}"))
                    .because("its owner has closed it"),
            );
        };
        super::check_geometry(&advert.layout, geometry_hash, pool)?;
        Ok(Some(advert.layout.clone()))
    }
}

fn deadline_of(now: Time, grant: &Grant, options: &TransferOptions) -> Time {
    let granted = now + std::time::Duration::from_millis(grant.remaining_ms);
    options.deadline.map_or(granted, |deadline| granted.min(now + deadline))
}
