//! Which slots the peer may write into one-sidedly, and which of the peer's this side may: what waits for that, begins
//! with it or is refused with it.

use std::sync::Arc;

use kvxfer_core::Error;
use kvxfer_core::Result;
use kvxfer_core::flow::SendEvent;
use kvxfer_core::transport::LinkEvent;

use super::LinkCore;
use crate::engine::Task;
use crate::error::RdmaError;
use crate::inbound::Regions;
use crate::memory;
use crate::message::{LinkMessage, SlotUse};
use crate::outbound::Wish;

impl LinkCore {
    /// Lets the peer write into a slot, and tells it; if it has asked, also that it may not. Memory that is not the host's
    /// is looked at first, by an engine.
    pub(super) fn admit_slot(self: &Arc<Self>, slot: SlotUse, asked: bool) {
        let Some(regions) = self.slots.regions(slot.slot, slot.generation) else {
            if asked {
                self.tell(LinkMessage::Refused(slot));
            }
            return;
        };
        if memory::is_plain(&*regions) || self.inbound.has(slot) {
            self.admit_or_refuse(slot, regions, asked);
        } else {
            self.engine(0).push(Task::Admit(self.clone(), slot, asked));
        }
    }

    /// The same on an engine.
    pub(crate) fn verify_and_admit(&self, slot: SlotUse, asked: bool) {
        let Some(regions) = self.slots.regions(slot.slot, slot.generation) else {
            if asked {
                self.tell(LinkMessage::Refused(slot));
            }
            return;
        };
        match memory::verify(&*regions) {
            Ok(()) => self.admit_or_refuse(slot, regions, asked),
            Err(error) => {
                self.memory_of_slot_failed(slot, error);
                self.tell(LinkMessage::Refused(slot));
            }
        }
    }

    fn admit_or_refuse(&self, slot: SlotUse, regions: Regions, asked: bool) {
        if self.admit_here(slot, regions) {
            self.tell(LinkMessage::Admitted(slot));
        } else if asked {
            self.tell(LinkMessage::Refused(slot));
        }
    }

    /// A slot's own memory cannot be used: it ends with the reason, and never arrives.
    pub(crate) fn memory_of_slot_failed(&self, slot: SlotUse, error: Error) {
        tracing::warn!(slot = %slot.slot, generation = %slot.generation, %error, "a slot's memory has failed");
        self.slots.corrupt(slot.slot, slot.generation);
        self.emit(LinkEvent::SlotCorrupt {
            slot: slot.slot,
            generation: slot.generation,
            error,
        });
    }

    /// Lets the peer write into a slot. False if the slot is closed, gone or another's, or the link has ended.
    fn admit_here(&self, slot: SlotUse, regions: Regions) -> bool {
        if !self.slots.admit(self.peer.incarnation, slot.slot, slot.generation) {
            return false;
        }
        self.inbound.admit(slot, regions);
        // Either the link's end sees the slot in the books, or this sees that it has ended.
        let ended = self.ended();
        if ended && self.all_fenced() {
            self.quiet(self.inbound.forget(&[slot]));
        }
        !ended
    }

    /// The receiver has admitted the slot: what waited for that begins.
    pub(super) fn begin_admitted(self: &Arc<Self>, slot: SlotUse) -> Result<()> {
        let mut refused = Vec::new();
        {
            // Together: a part that is added meanwhile finds the transfer either waiting or with the sender.
            let mut sender = self.sender.lock();
            let waiting = self.outbound.admitted(slot);
            for wish in waiting.map_err(|why| Error::from(RdmaError::peer(self, why)))? {
                let Wish { spec, parts } = wish;
                let id = spec.id;
                match sender.submit(spec) {
                    Ok(()) => parts.into_iter().for_each(|part| sender.add_part(id, part)),
                    Err(error) => {
                        // It was let in when it was submitted; only a defect can refuse it now.
                        tracing::error!(%error, transfer = id.0, "an admitted transfer was refused");
                        refused.push(id);
                    }
                }
            }
        }
        for id in refused {
            self.outbound.forget(id);
            self.emit(LinkEvent::Send(SendEvent::Refused(id)));
        }
        self.kick_those_with_work();
        Ok(())
    }

    pub(super) fn refuse_slot(&self, slot: SlotUse) {
        self.refuse(self.outbound.refused(slot));
        self.outbound.slot_ended(slot);
    }

    pub(super) fn refuse(&self, wishes: Vec<Wish>) {
        for wish in wishes {
            self.outbound.forget(wish.spec.id);
            self.emit(LinkEvent::Send(SendEvent::Refused(wish.spec.id)));
        }
    }

    /// The last byte of a slot is in place: its owner was told by the slot table, now the rest is.
    pub(crate) fn slot_arrived(&self, slot: SlotUse) {
        self.emit(LinkEvent::SlotArrived {
            slot: slot.slot,
            generation: slot.generation,
        });
        self.inbound.forget(&[slot]);
        self.tell(LinkMessage::Arrived(slot));
    }
}
