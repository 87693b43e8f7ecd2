//! Slots of this endpoint from the machine's side: who they are open for, their verdicts, when they are given back.

use std::sync::Arc;

use super::Machine;
use super::timers::TimerKey;
use super::types::HandleId;
use crate::error::{Destination, Error, ErrorKind, Result};
use crate::flow::{Close, SlotSpec, SlotWatcher};
use crate::id::{Generation, GrantName, Incarnation, PoolId, SlotId};
use crate::mutants::{self, Mutant};
use crate::plan::Target;
use crate::time::Time;
use crate::wire::{Message, Verdict};

/// A use of a slot.
pub(super) type SlotKey = (SlotId, Generation);

/// For what a slot is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotOwner {
    /// A claim's bytes from one of its sources.
    Claim(HandleId, Incarnation),
    /// A write grant.
    Grant(HandleId),
    /// A pull.
    Pull(HandleId),
}

/// One use of a slot, from its opening until its verdict is acknowledged.
#[derive(Debug)]
pub(super) struct SlotUse {
    pub(super) owner: SlotOwner,
    pub(super) pool: PoolId,
    /// Who writes, once known.
    pub(super) peer: Option<Incarnation>,
    /// Who wants to be told the verdict.
    asked: Vec<Incarnation>,
    /// The writer has said that it needs no verdict, or there is no writer but this endpoint's own device.
    acknowledged: bool,
    /// It is filled by a pull: the peer's device is not let in.
    pulled: bool,
    /// Set when it has ended.
    pub(super) verdict: Option<Verdict>,
    /// It could not be fenced: it is never given back.
    pub(super) quarantined: bool,
}

/// Peers that wait for one verdict, at most: one is the rule.
const ASKED_MAX: usize = 4;

impl Machine {
    pub(super) fn open_slot(
        &mut self,
        owner: SlotOwner,
        writer: Option<Incarnation>,
        pulled: bool,
        pool: PoolId,
        target: Arc<Target>,
        watcher: Option<Arc<dyn SlotWatcher>>,
    ) -> Result<SlotKey> {
        let Some(own) = self.pools.get(&pool) else {
            return Err(super::pool_unknown(pool));
        };
        let key = self.slots.open(SlotSpec {
            layout: own.layout.clone(),
            regions: own.regions.clone(),
            target,
            writer,
            pool,
            watcher,
        })?;
        self.slot_uses.insert(
            key,
            SlotUse {
                owner,
                pool,
                peer: writer,
                asked: Vec::new(),
                acknowledged: false,
                pulled,
                verdict: None,
                quarantined: false,
            },
        );
        if let Some(writer) = writer.filter(|_| !pulled) {
            self.admit_slot(writer, key);
        }
        Ok(key)
    }

    /// Whether anybody but this endpoint has to take note of the slot's verdict.
    pub(super) fn slot_has_no_writer(&mut self, slot: SlotKey, nobody: bool) {
        if let Some(used) = self.slot_uses.get_mut(&slot) {
            used.acknowledged = nobody;
        }
    }

    /// The slots that are open for this peer to write.
    pub(super) fn slots_written_by(&self, writer: Incarnation) -> Vec<SlotKey> {
        self.slot_uses
            .iter()
            .filter(|(_, used)| used.verdict.is_none() && !used.pulled)
            .filter(|(slot, _)| {
                let progress = self.slots.progress(slot.0, slot.1);
                progress.is_some_and(|progress| progress.writer == Some(writer) && !progress.arrived)
            })
            .map(|(slot, _)| *slot)
            .collect()
    }

    pub(super) fn grant_name(&self, slot: SlotKey) -> GrantName {
        GrantName {
            incarnation: self.incarnation,
            slot: slot.0,
            generation: slot.1,
        }
    }

    /// Closes a slot, and stops whoever writes into it by itself. True if it had arrived.
    pub(super) fn close_slot(&mut self, slot: SlotKey) -> bool {
        match self.slots.close(slot.0, slot.1) {
            Close::AlreadyArrived => return true,
            Close::Gone => return false,
            Close::Fenced | Close::Waiting => {}
        }
        let bound = self.slots.progress(slot.0, slot.1).and_then(|progress| progress.writer);
        let used = self.slot_uses.get(&slot).and_then(|used| used.peer);
        if let Some(writer) = bound.or(used) {
            self.revoke_slot(writer, slot);
        }
        false
    }

    /// Whether no byte lands in a slot that was closed, or has arrived.
    pub(super) fn slot_is_fenced(&self, slot: SlotKey) -> bool {
        self.slots.fenced(slot.0, slot.1) || mutants::is(Mutant::ReportCancelBeforeFence)
    }

    /// The verdict on a slot that is fenced: kept until it is acknowledged, or for so long.
    pub(super) fn end_slot(&mut self, now: Time, slot: SlotKey, verdict: Verdict) {
        let Some(used) = self.slot_uses.get_mut(&slot) else {
            return;
        };
        if used.verdict.is_some() {
            return;
        }
        used.verdict = Some(verdict.clone());
        let (acknowledged, asked) = (used.acknowledged, std::mem::take(&mut used.asked));
        let grant = self.grant_name(slot);
        let writer = self.slots.progress(slot.0, slot.1).and_then(|progress| progress.writer);
        for peer in asked {
            let verdict = match writer {
                // It asked before another began to write.
                Some(writer) if writer != peer => Verdict::Failed(used_by_another(grant)),
                _ => verdict.clone(),
            };
            self.send(now, peer, Message::Verdict { grant, verdict });
        }
        if acknowledged || mutants::is(Mutant::ReleaseSlotBeforeAck) {
            self.release_slot(now, slot);
        } else {
            self.timers
                .set(TimerKey::Retain(slot), now + self.config.verdict_retention);
        }
    }

    /// The slot could not be fenced in time: its blocks are lost until the endpoint ends.
    pub(super) fn quarantine_slot(&mut self, now: Time, slot: SlotKey, error: &Error) {
        let grant = self.grant_name(slot);
        let Some(used) = self.slot_uses.get_mut(&slot) else {
            return;
        };
        used.quarantined = true;
        let verdict = Verdict::Failed(error.clone());
        used.verdict = Some(verdict.clone());
        for peer in std::mem::take(&mut used.asked) {
            let verdict = verdict.clone();
            self.send(now, peer, Message::Verdict { grant, verdict });
        }
    }

    /// Gives a slot back: its next use has a higher generation.
    pub(super) fn release_slot(&mut self, now: Time, slot: SlotKey) {
        let Some(used) = self.slot_uses.get(&slot).filter(|used| !used.quarantined) else {
            return;
        };
        if let SlotOwner::Claim(claim, source) = used.owner
            && self.ended_claims.get(&(source, claim.0)) == Some(&slot)
        {
            self.ended_claims.remove(&(source, claim.0));
        }
        self.slot_uses.remove(&slot);
        self.timers.clear(TimerKey::Retain(slot));
        self.slots.release(slot.0, slot.1);
        if !self.starved.is_empty() {
            self.timers.set(TimerKey::Starved, now);
        }
    }

    /// The peer needs no verdict on this slot (any more).
    pub(super) fn slot_acknowledged(&mut self, now: Time, from: Incarnation, slot: SlotKey) {
        let writer = self.slots.progress(slot.0, slot.1).and_then(|progress| progress.writer);
        let Some(used) = self.slot_uses.get_mut(&slot) else {
            return;
        };
        if writer.or(used.peer).is_some_and(|peer| peer != from) {
            return;
        }
        used.acknowledged = true;
        if used.verdict.is_some() {
            self.release_slot(now, slot);
        }
    }

    /// A sender asks what became of a grant, and binds it to its session if that is still open.
    pub(super) fn asked(&mut self, now: Time, from: Incarnation, grant: GrantName) {
        let slot = (grant.slot, grant.generation);
        let writer = self.slots.progress(slot.0, slot.1).and_then(|progress| progress.writer);
        let used = (grant.incarnation == self.incarnation)
            .then(|| self.slot_uses.get_mut(&slot))
            .flatten();
        let verdict = match used {
            None => Verdict::Unknown,
            // A grant is used once: what became of it is said to its user only.
            Some(used) if writer.or(used.peer).is_some_and(|peer| peer != from) => {
                Verdict::Failed(used_by_another(grant))
            }
            Some(SlotUse {
                verdict: Some(verdict), ..
            }) => verdict.clone(),
            Some(used) => {
                used.peer = Some(from);
                if used.asked.len() < ASKED_MAX && !used.asked.contains(&from) {
                    used.asked.push(from);
                }
                return;
            }
        };
        self.send(now, from, Message::Verdict { grant, verdict });
    }

    /// A sender stops using a grant: its owner decides, and answers.
    pub(super) fn sender_stopped(&mut self, now: Time, from: Incarnation, grant: GrantName, error: Error) {
        if self.serve_unused(now, from, grant, &error) {
            return;
        }
        self.asked(now, from, grant);
        if grant.incarnation != self.incarnation {
            return;
        }
        let Some(used) = self.slot_uses.get(&(grant.slot, grant.generation)) else {
            return;
        };
        if let SlotOwner::Grant(handle) = used.owner
            && used.verdict.is_none()
            && used.peer == Some(from)
        {
            self.end_grant(now, handle, error);
        }
    }

    /// All bytes of a slot are in place.
    pub(super) fn slot_arrived(&mut self, now: Time, slot: SlotKey) {
        let Some(used) = self.slot_uses.get(&slot) else { return };
        if used.verdict.is_some() {
            return;
        }
        match used.owner {
            SlotOwner::Claim(handle, source) => self.claim_slot_arrived(now, handle, source, slot),
            SlotOwner::Grant(handle) => self.grant_arrived(now, handle),
            SlotOwner::Pull(handle) => self.pull_slot_arrived(now, handle),
        }
    }

    /// Bytes came that are not those that were sent: the data plane has closed the slot.
    pub(super) fn slot_corrupt(&mut self, now: Time, slot: SlotKey, error: Error) {
        let Some(used) = self.slot_uses.get(&slot).filter(|used| used.verdict.is_none()) else {
            return;
        };
        match used.owner {
            SlotOwner::Claim(handle, _) => self.claim_slot_corrupt(now, handle, slot, error),
            SlotOwner::Grant(handle) => self.end_grant(now, handle, error),
            SlotOwner::Pull(handle) => self.end_pull(now, handle, error),
        }
    }

    /// Slots whose verdict is kept.
    pub(super) fn slots_retained(&self) -> usize {
        self.slot_uses
            .values()
            .filter(|used| used.verdict.is_some() && !used.quarantined)
            .count()
    }

    /// Slots that are never given back.
    pub(super) fn slots_quarantined(&self) -> usize {
        self.slot_uses.values().filter(|used| used.quarantined).count()
    }
}

/// A grant is used once.
fn used_by_another(grant: GrantName) -> Error {
    Error::new(ErrorKind::AlreadyClaimed, format!("grant {grant}"))
        .because("another endpoint uses it")
        .remedy("ask its owner for a grant of its own")
}

/// The same end, with the destination lost to a thread or device that did not let go of it.
pub(super) fn quarantined(error: &Error) -> Error {
    error.clone().destination_is(Destination::Quarantined)
}

/// The same end, with what is known of a destination that was open for writing.
pub(super) fn maybe_written(error: &Error) -> Error {
    if error.destination() == Destination::Untouched {
        error.clone().destination_is(Destination::Written)
    } else {
        error.clone()
    }
}

/// The error of an outcome that nobody knows.
pub(super) fn unknown(what: impl Into<String>, why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unknown, what)
        .because(why)
        .remedy("ask the receiver whether the bytes arrived, or send them again to other blocks")
        .destination_is(Destination::Written)
}
