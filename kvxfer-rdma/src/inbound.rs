//! The receiving side's books of one link: slots that the peer may write, and those it was told to stop writing.

use std::collections::HashMap;
use std::sync::Arc;

use kvxfer_core::Time;
use kvxfer_core::memory::Region;
use parking_lot::Mutex;

use crate::message::SlotUse;

/// Slots admitted to the peer. Bounded by the slot table: each is a slot in use.
#[derive(Default)]
pub(crate) struct Inbound {
    admitted: Mutex<HashMap<SlotUse, Admitted>>,
}

struct Admitted {
    admission: Admission,
    regions: Regions,
}

/// A slot's regions: kept until its fence, which settles what was written into them.
pub(crate) type Regions = Arc<[Arc<Region>]>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    /// The peer may write.
    Open,
    /// The peer was told to stop; it has until then to confirm.
    Revoked(Time),
    /// It has confirmed: what its device has handed over is being flushed to memory.
    Flushing,
    /// It did not: its queue pairs are being fenced.
    Fencing,
}

impl Inbound {
    pub(crate) fn admit(&self, slot: SlotUse, regions: Regions) {
        self.admitted.lock().entry(slot).or_insert(Admitted {
            admission: Admission::Open,
            regions,
        });
    }

    /// Whether the peer was admitted already.
    pub(crate) fn has(&self, slot: SlotUse) -> bool {
        self.admitted.lock().contains_key(&slot)
    }

    /// A slot whose fence did not come to its end: its blocks are not given back.
    pub(crate) fn keep(&self, slot: SlotUse, regions: Regions) {
        let admission = Admission::Fencing;
        self.admitted.lock().insert(slot, Admitted { admission, regions });
    }

    /// The slot was closed. False if the peer was never admitted, or has been told already.
    pub(crate) fn revoke(&self, slot: SlotUse, limit: Time) -> bool {
        match self.admitted.lock().get_mut(&slot) {
            Some(admitted) if admitted.admission == Admission::Open => {
                admitted.admission = Admission::Revoked(limit);
                true
            }
            _ => false,
        }
    }

    /// Takes those whose confirmation is late, which are from now on being fenced; and says when the next would be.
    pub(crate) fn late_revocations(&self, now: Time) -> (Vec<SlotUse>, Option<Time>) {
        let mut late = Vec::new();
        let mut next: Option<Time> = None;
        for (slot, admitted) in self.admitted.lock().iter_mut() {
            if let Admission::Revoked(limit) = admitted.admission {
                if limit <= now {
                    admitted.admission = Admission::Fencing;
                    late.push(*slot);
                } else {
                    next = Some(next.map_or(limit, |next| next.min(limit)));
                }
            }
        }
        (late, next)
    }

    /// When the next confirmation is late.
    pub(crate) fn next_revocation(&self) -> Option<Time> {
        let admitted = self.admitted.lock();
        let limit = |admitted: &Admitted| match admitted.admission {
            Admission::Revoked(limit) => Some(limit),
            _ => None,
        };
        admitted.values().filter_map(limit).min()
    }

    /// These are over: those of them that were known.
    pub(crate) fn forget(&self, slots: &[SlotUse]) -> Vec<(SlotUse, Regions)> {
        let mut admitted = self.admitted.lock();
        let known = |slot: &SlotUse| Some((*slot, admitted.remove(slot)?.regions));
        slots.iter().filter_map(known).collect()
    }

    /// The peer says that it has stopped. Whether that is news, and the slot is to be flushed; an error if it was never
    /// told to.
    pub(crate) fn confirmed(&self, slot: SlotUse) -> Result<bool, &'static str> {
        let mut admitted = self.admitted.lock();
        match admitted.get_mut(&slot).map(|admitted| &mut admitted.admission) {
            Some(Admission::Open) => Err("it stops writing into a slot that is open"),
            Some(admission @ Admission::Revoked(_)) => {
                *admission = Admission::Flushing;
                Ok(true)
            }
            // Being fenced already, which ends it; or fenced, or arrived, before its answer came.
            Some(_) | None => Ok(false),
        }
    }

    /// All of them are over.
    pub(crate) fn take_all(&self) -> Vec<(SlotUse, Regions)> {
        let mut admitted = self.admitted.lock();
        admitted.drain().map(|(slot, entry)| (slot, entry.regions)).collect()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.admitted.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use kvxfer_core::{Generation, SlotId};

    use super::*;

    #[test]
    fn a_late_confirmation_is_noticed_once() {
        let slot = SlotUse {
            slot: SlotId(1),
            generation: Generation(2),
        };
        let at = Time::from_nanos;
        let inbound = Inbound::default();
        assert!(!inbound.revoke(slot, at(5)), "it was not admitted");
        inbound.admit(slot, Arc::new([]));
        assert!(inbound.confirmed(slot).is_err(), "it was not asked to stop");
        assert!(inbound.revoke(slot, at(5)));
        assert!(!inbound.revoke(slot, at(9)), "it was told once");
        assert_eq!(inbound.late_revocations(at(4)), (vec![], Some(at(5))));
        assert_eq!(inbound.late_revocations(at(5)), (vec![slot], None));
        assert_eq!(inbound.late_revocations(at(6)), (vec![], None));
        assert_eq!(inbound.confirmed(slot), Ok(false), "its fence ends it");
        assert_eq!(inbound.forget(&[slot, slot]).len(), 1);
        inbound.admit(slot, Arc::new([]));
        assert!(inbound.revoke(slot, at(9)));
        assert_eq!(inbound.confirmed(slot), Ok(true));
        assert_eq!(inbound.late_revocations(at(9)), (vec![], None), "it was in time");
        assert_eq!(inbound.forget(&[slot]).len(), 1);
        assert_eq!(inbound.count(), 0);
    }
}
