//! The sending side's books of one link: which of the peer's slots may be written, what waits for that, and what each
//! transfer needs to know of both sides' memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use kvxfer_core::flow::{Direction, Remote, SendPart, SendSpec, TransferId};
use kvxfer_core::memory::Region;
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::{Error, ErrorKind, PoolId, Result};
use parking_lot::Mutex;

use crate::memory;
use crate::message::SlotUse;
use crate::registry::{RegionKeys, Registry, RemoteRegions};

/// Slots of the peer that this side knows of, at most: more than any slot table has.
const SLOTS_MAX: usize = 1 << 17;

#[derive(Default)]
pub(crate) struct Outbound {
    books: Mutex<Books>,
    // Slots being revoked: looked at without the lock, since there are none most of the time.
    revoking: AtomicUsize,
}

#[derive(Default)]
struct Books {
    slots: HashMap<SlotUse, SlotState>,
    wishes: HashMap<TransferId, Wish>,
    keys: HashMap<TransferId, (SlotUse, Arc<TransferKeys>)>,
    pools: HashMap<PoolId, (Arc<[u8]>, Arc<RemoteRegions>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    /// The peer was asked.
    Asked,
    /// The peer has admitted it.
    Open,
    /// The peer wants to hear when nothing is under way any more.
    Revoking,
}

/// A transfer that waits for its slot to be admitted.
pub(crate) struct Wish {
    pub(crate) spec: SendSpec,
    pub(crate) parts: Vec<SendPart>,
}

/// Both sides' memory, as a transfer's chunks see it.
pub(crate) struct TransferKeys {
    /// By region of the transfer's own pool.
    pub(crate) local: Vec<Arc<RegionKeys>>,
    /// The peer's pool.
    pub(crate) remote: Arc<RemoteRegions>,
    /// Its own memory is the host's, which asks for nothing.
    pub(crate) plain: bool,
    // Of all regions of a side: some are not known to its devices; all can be seen by its processor.
    local_staged: bool,
    local_visible: bool,
    remote_staged: bool,
    remote_visible: bool,
    // Whether its own memory still is what it was, looked at once.
    verified: OnceLock<bool>,
}

impl TransferKeys {
    /// Looks, once, whether the transfer's own memory still is what it was. The error is given to the first who asks.
    ///
    /// # Errors
    /// `Some` with the domain's error for the first, `None` for the others.
    pub(crate) fn verify(&self) -> Result<(), Option<Error>> {
        if self.plain {
            return Ok(());
        }
        let mut failure = None;
        let good = *self.verified.get_or_init(|| {
            failure = memory::verify(self.local.iter().map(|keys| keys.region())).err();
            failure.is_none()
        });
        if good { Ok(()) } else { Err(failure) }
    }

    /// Whether this side's bytes go through a bounce: its devices do not have them, or a checksum has to see them.
    pub(crate) fn needs_bounce(&self, direction: Direction, checksummed: bool) -> bool {
        self.local_staged || (direction == Direction::Write && checksummed && !self.local_visible)
    }

    /// The same of the peer's side: a landing to write, or an exposure to read.
    pub(crate) fn needs_landing(&self, direction: Direction, checksummed: bool) -> bool {
        self.remote_staged || (direction == Direction::Write && checksummed && !self.remote_visible)
    }
}

/// What becomes of a transfer that was submitted.
pub(crate) enum Entry {
    /// It goes to the sender now.
    Now(Box<SendSpec>),
    /// It waits, and the peer is to be asked.
    Ask(SlotUse),
    /// It waits for an answer that is on its way.
    Wait,
}

impl Outbound {
    /// Finds the keys of both sides.
    pub(crate) fn resolve(
        &self,
        remote: &Remote,
        regions: &Arc<[Arc<Region>]>,
        registry: &Registry,
    ) -> Result<Arc<TransferKeys>> {
        let local = regions
            .iter()
            .map(|region| {
                registry.local(region).ok_or_else(|| {
                    Error::new(ErrorKind::NotRegistered, format!("{region:?}"))
                        .at("rdma")
                        .because("it is not registered with the devices")
                        .remedy("register the pool before using it")
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let known = self.books.lock().pools.get(&remote.pool).cloned();
        let parsed = match known.filter(|(keys, _)| Arc::ptr_eq(keys, &remote.keys) || *keys == remote.keys) {
            Some((_, parsed)) => parsed,
            None => {
                let parsed = Arc::new(RemoteRegions::parse(&remote.keys)?);
                let entry = (remote.keys.clone(), parsed.clone());
                self.books.lock().pools.insert(remote.pool, entry);
                parsed
            }
        };
        Ok(Arc::new(TransferKeys {
            plain: memory::is_plain(&**regions),
            local_staged: local.iter().any(|keys| keys.is_staged()),
            local_visible: local.iter().all(|keys| keys.is_visible()),
            remote_staged: parsed.is_staged(),
            remote_visible: parsed.is_visible(),
            local,
            remote: parsed,
            verified: OnceLock::new(),
        }))
    }

    /// Takes a transfer.
    pub(crate) fn submit(&self, spec: SendSpec, keys: Arc<TransferKeys>, limit: usize) -> Result<Entry> {
        let slot = SlotUse {
            slot: spec.slot,
            generation: spec.generation,
        };
        let reads = spec
            .remote
            .as_ref()
            .is_some_and(|remote| remote.direction == Direction::Read);
        let mut books = self.books.lock();
        if books.keys.len() >= limit {
            return Err(Error::new(ErrorKind::Busy, format!("transfer {}", spec.id.0))
                .at("rdma")
                .because(format!("the link has {limit} transfers"))
                .remedy("wait for transfers to end, or raise the limit `transfers_max`"));
        }
        books.keys.insert(spec.id, (slot, keys));
        if reads {
            return Ok(Entry::Now(Box::new(spec)));
        }
        let entry = match books.slots.get(&slot) {
            Some(SlotState::Open) => return Ok(Entry::Now(Box::new(spec))),
            Some(SlotState::Asked) => Entry::Wait,
            // A slot is closed for good: what comes for it now is refused by the answer.
            Some(SlotState::Revoking) => Entry::Ask(slot),
            None if mutants::is(Mutant::AdmitLate) => return Ok(Entry::Now(Box::new(spec))),
            None => {
                books.slots.insert(slot, SlotState::Asked);
                Entry::Ask(slot)
            }
        };
        let wish = Wish {
            spec,
            parts: Vec::new(),
        };
        books.wishes.insert(wish.spec.id, wish);
        Ok(entry)
    }

    /// Keeps a part of a transfer that waits; gives it back if the transfer does not.
    pub(crate) fn add_part(&self, id: TransferId, part: SendPart) -> Option<SendPart> {
        match self.books.lock().wishes.get_mut(&id) {
            Some(wish) => {
                wish.parts.push(part);
                None
            }
            None => Some(part),
        }
    }

    /// The peer has admitted the slot: what waited for it.
    pub(crate) fn admitted(&self, slot: SlotUse) -> Result<Vec<Wish>, String> {
        let mut books = self.books.lock();
        if books.slots.len() >= SLOTS_MAX {
            return Err(format!("it admits more than {SLOTS_MAX} slots"));
        }
        match books.slots.entry(slot).or_insert(SlotState::Open) {
            SlotState::Revoking => return Ok(Vec::new()),
            state => *state = SlotState::Open,
        }
        Ok(take_wishes(&mut books, slot))
    }

    /// What waited for a slot that will not be admitted.
    pub(crate) fn refused(&self, slot: SlotUse) -> Vec<Wish> {
        take_wishes(&mut self.books.lock(), slot)
    }

    /// The peer has closed the slot.
    pub(crate) fn revoke(&self, slot: SlotUse) {
        let before = self.books.lock().slots.insert(slot, SlotState::Revoking);
        if before != Some(SlotState::Revoking) {
            self.revoking.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(crate) fn any_revoking(&self) -> bool {
        self.revoking.load(Ordering::SeqCst) > 0
    }

    /// Whether the peer has closed the slot: nothing more may be posted for it.
    pub(crate) fn is_revoking(&self, slot: SlotUse) -> bool {
        self.any_revoking() && self.books.lock().slots.get(&slot) == Some(&SlotState::Revoking)
    }

    /// Takes the revoked slots of which nothing is under way.
    pub(crate) fn take_revoked(&self, is_done: impl Fn(SlotUse) -> bool) -> Vec<SlotUse> {
        let mut books = self.books.lock();
        let done: Vec<SlotUse> = books
            .slots
            .iter()
            .filter(|(slot, state)| **state == SlotState::Revoking && is_done(**slot))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in &done {
            books.slots.remove(slot);
        }
        self.revoking.fetch_sub(done.len(), Ordering::SeqCst);
        done
    }

    /// The slot has arrived, or was refused: it is not written again.
    pub(crate) fn slot_ended(&self, slot: SlotUse) {
        let mut books = self.books.lock();
        if books
            .slots
            .get(&slot)
            .is_some_and(|state| *state != SlotState::Revoking)
        {
            books.slots.remove(&slot);
        }
    }

    /// Lets go of a transfer that waits.
    pub(crate) fn withdraw(&self, id: TransferId) {
        self.books.lock().wishes.remove(&id);
    }

    /// Lets go of a transfer.
    pub(crate) fn forget(&self, id: TransferId) {
        let mut books = self.books.lock();
        books.wishes.remove(&id);
        books.keys.remove(&id);
    }

    pub(crate) fn keys(&self, id: TransferId) -> Option<Arc<TransferKeys>> {
        self.books.lock().keys.get(&id).map(|(_, keys)| keys.clone())
    }
}

fn take_wishes(books: &mut Books, slot: SlotUse) -> Vec<Wish> {
    let ids: Vec<TransferId> = books
        .wishes
        .iter()
        .filter(|(_, wish)| (wish.spec.slot, wish.spec.generation) == (slot.slot, slot.generation))
        .map(|(id, _)| *id)
        .collect();
    ids.into_iter().filter_map(|id| books.wishes.remove(&id)).collect()
}
