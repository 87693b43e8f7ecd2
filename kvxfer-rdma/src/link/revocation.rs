//! Slots that are taken back: the peer is asked to stop writing into them, its queue pairs are fenced if it does not
//! answer, and devices are flushed, until nothing can land in them any more.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvxfer_core::flow::LaneName;
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{Error, ErrorKind, Time};

use super::{LinkCore, Mail, Rail};
use crate::inbound::Regions;
use crate::memory;
use crate::message::{LinkMessage, SlotUse};

/// Queue pairs that exist, and who waits for which of them to be gone.
#[derive(Default)]
pub(super) struct Fences {
    live: BTreeSet<LaneName>,
    /// Lanes whose fence did not finish: what they may write is never given back.
    unfinished: BTreeSet<LaneName>,
    waiting: Vec<(BTreeSet<LaneName>, Vec<SlotUse>)>,
}

/// A slot whose writer has stopped, and how many devices are still to be flushed.
#[derive(Debug)]
pub(crate) struct Flushing {
    slot: SlotUse,
    devices_left: AtomicUsize,
}

impl LinkCore {
    pub(crate) fn lane_born(&self, lane: LaneName) {
        self.fences.lock().live.insert(lane);
    }

    /// A queue pair is destroyed; `flushed` if also everything it had accepted is in memory.
    pub(crate) fn lane_gone(&self, lane: LaneName, flushed: bool) {
        let mut quiet = Vec::new();
        {
            let mut fences = self.fences.lock();
            fences.live.remove(&lane);
            if !flushed {
                fences.unfinished.insert(lane);
                return;
            }
            fences.unfinished.remove(&lane);
            fences.waiting.retain_mut(|(lanes, slots)| {
                lanes.remove(&lane);
                if lanes.is_empty() {
                    quiet.append(slots);
                }
                !lanes.is_empty()
            });
        }
        self.quiet(self.inbound.forget(&quiet));
    }

    /// Whether it cannot be said that nothing of a lane lands any more.
    pub(crate) fn is_unfinished(&self, lane: LaneName) -> bool {
        self.fences.lock().unfinished.contains(&lane)
    }

    /// Whether that can be said of all lanes.
    pub(super) fn all_fenced(&self) -> bool {
        self.fences.lock().unfinished.is_empty()
    }

    /// Peers that did not confirm in time that they stopped writing: their queue pairs are fenced. Returns when to look
    /// again.
    pub(crate) fn check_revocations(self: &Arc<Self>, now: Time) -> Option<Time> {
        let (late, next) = self.inbound.late_revocations(now);
        if !late.is_empty() {
            let mut fences = self.fences.lock();
            let mut lanes = fences.live.clone();
            lanes.extend(fences.unfinished.iter().copied());
            let none = lanes.is_empty();
            if !none {
                fences.waiting.push((lanes, late.clone()));
            }
            drop(fences);
            tracing::warn!(peer = %self.peer.incarnation, slots = late.len(), "the peer did not confirm that it stopped writing: fencing its queue pairs");
            if none {
                self.quiet(self.inbound.forget(&late));
            } else {
                let error = Error::new(ErrorKind::Transport, "the rail was fenced")
                    .at(format!("rdma to {}", self.peer.incarnation))
                    .because(format!(
                        "the peer did not confirm within {} ms that it stopped writing",
                        self.config.revoke.as_millis()
                    ));
                for rail in &self.rails {
                    rail.mail.lock().push_back(Mail::Fail(error.clone()));
                    self.kick(rail);
                }
            }
        }
        next
    }

    /// The peer writes no more into a slot. What it wrote has been handed over to our devices, which may still be on their
    /// way to memory with it: they are flushed, then the slot is quiet.
    pub(super) fn flush_revoked(self: &Arc<Self>, slot: SlotUse) {
        let mut engines = BTreeSet::new();
        let first_of_engine = |rail: &&Rail| rail.place.get().is_some_and(|place| engines.insert(place.engine));
        let rails: Vec<&Rail> = self.rails.iter().filter(first_of_engine).collect();
        let flushing = Arc::new(Flushing {
            slot,
            devices_left: AtomicUsize::new(rails.len().max(1)),
        });
        for rail in &rails {
            rail.mail.lock().push_back(Mail::Flush(flushing.clone()));
            self.kick(rail);
        }
        if rails.is_empty() {
            self.device_flushed(&flushing);
        }
    }

    /// A device is flushed; with the last one the slot is quiet.
    pub(crate) fn device_flushed(&self, flushing: &Flushing) {
        if flushing.devices_left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.quiet(self.inbound.forget(&[flushing.slot]));
        }
    }

    /// The held gates of these slots are let go, after what was written into them is settled.
    pub(super) fn quiet(&self, slots: Vec<(SlotUse, Regions)>) {
        let mut any = false;
        for (slot, regions) in slots {
            if !mutants::is(Mutant::SkipSettleOfFence)
                && let Err(error) = memory::settle(&*regions)
            {
                // What was written may still appear in the memory: it is not given back.
                tracing::error!(slot = %slot.slot, generation = %slot.generation, %error, "what was written into a slot could not be settled: its blocks are quarantined");
                self.inbound.keep(slot, regions);
                continue;
            }
            any |= self.slots.remote_quiet(slot.slot, slot.generation);
        }
        if any {
            self.emit(LinkEvent::SlotQuiet);
        }
    }

    /// Slots whose writing was revoked, and of which nothing is under way any more: the peer is told.
    pub(crate) fn confirm_revocations(&self) {
        if !self.outbound.any_revoking() {
            return;
        }
        let sender = self.sender.lock();
        let done = self.outbound.take_revoked(|slot| {
            sender.outstanding(slot.slot, slot.generation) == 0 || mutants::is(Mutant::RevokedEarly)
        });
        drop(sender);
        for slot in done {
            self.tell(LinkMessage::Revoked(slot));
        }
    }
}
