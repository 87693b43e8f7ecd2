//! The receiving side's slots: found without a lock, each changed under its own.

use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::slot::{LiveSlot, Notify, Phase, PoolTarget, SlotTarget};
use super::{Applied, ChunkHeader, ChunkName, ChunkState, Close, Placement, SlotProgress, SlotSpec, SlotWatcher};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Generation, Incarnation, PoolId, SlotId};
use crate::memory::Region;
use crate::mutants::{self, Mutant};

/// Slots of the first segment; each further segment has twice as many as the one before.
const FIRST_SEGMENT: u64 = 64;
/// Enough segments for every `u32`.
const SEGMENTS: usize = 27;

/// The receiving side's slots. Shared by the control plane and all data threads.
///
/// Finding a slot takes no lock: slots live in segments that are added as the table grows and never move. Each slot has
/// a small lock of its own, under which everything about it is decided; that is what makes an arrival and a crossing
/// cancel exclude each other. An idle table has no slot in memory.
///
/// # The life of a chunk
/// [`begin`](Self::begin) with the header decides. For [`Placement::Place`], place the bytes inside the gate, and then
/// call exactly one of [`applied`](Self::applied) (all bytes placed and the trailer valid) and
/// [`abandon`](Self::abandon) (anything else: trailer invalid, checksum wrong, lane lost midway), from the thread that
/// placed them and after it has left the gate. Until then no other copy of the chunk is let in.
pub struct SlotTable {
    segments: [OnceLock<Box<[Mutex<Entry>]>>; SEGMENTS],
    allocation: Mutex<Allocation>,
    slots_max: u32,
}

#[derive(Default)]
struct Entry {
    // Of the slot's present use, or of its last.
    generation: u32,
    live: Option<Box<LiveSlot>>,
}

#[derive(Default)]
struct Allocation {
    free: Vec<u32>,
    // Slots from here on have never been used.
    next: u32,
    in_use: usize,
}

impl SlotTable {
    /// A table of at most `slots_max` slots; `Busy` beyond.
    pub fn new(slots_max: u32) -> Arc<SlotTable> {
        Arc::new(SlotTable {
            segments: [const { OnceLock::new() }; SEGMENTS],
            allocation: Mutex::default(),
            slots_max,
        })
    }

    /// Opens a slot with a new generation.
    ///
    /// # Errors
    /// `Busy` if `slots_max` slots are in use; whatever [`Target::bytes`](crate::plan::Target::bytes) says.
    pub fn open(&self, spec: SlotSpec) -> Result<(SlotId, Generation)> {
        let target = Box::new(PoolTarget {
            layout: spec.layout,
            target: spec.target,
        });
        self.open_target(target, spec.regions, spec.writer, spec.pool, spec.watcher)
    }

    /// [`open`](Self::open), for any target: tests and tools that have no pool.
    ///
    /// # Errors
    /// `Busy` if `slots_max` slots are in use; whatever the target says of its bytes.
    pub fn open_target(
        &self,
        target: Box<dyn SlotTarget>,
        regions: Arc<[Arc<Region>]>,
        writer: Option<Incarnation>,
        pool: PoolId,
        watcher: Option<Arc<dyn SlotWatcher>>,
    ) -> Result<(SlotId, Generation)> {
        let live = Box::new(LiveSlot::new(target, regions, writer, pool, watcher)?);
        let id = self.allocate(pool)?;
        let mut entry = self.entry_at(id).lock();
        if entry.generation == 0 || !mutants::is(Mutant::ReuseSlotEarly) {
            // A slot whose generations are used up was never put back in the list of free ones.
            entry.generation += 1;
        }
        entry.live = Some(live);
        Ok((SlotId(id), Generation(entry.generation)))
    }

    /// Checks a chunk header before any byte is placed.
    ///
    /// # Errors
    /// `Protocol`: the peer broke the protocol (out of the stream, overlapping extent, too many parts), and the lane
    /// must be closed. Nothing was reserved.
    pub fn begin(&self, from: Incarnation, header: &ChunkHeader) -> Result<Placement> {
        match self.live(header.slot, header.generation) {
            Some(mut live) => live.get().begin(from, header),
            None => Ok(Placement::Scrap(ChunkState::Refused)),
        }
    }

    /// Counts a chunk whose bytes have all been placed and whose trailer said valid.
    pub fn applied(&self, header: &ChunkHeader) -> Applied {
        let Some(mut live) = self.live(header.slot, header.generation) else {
            return Applied::Refused;
        };
        let (applied, notify) = live.get().applied(header);
        drop(live);
        tell(notify);
        applied
    }

    /// A chunk that [`begin`](Self::begin) let in will not be applied: another copy of it may be let in.
    pub fn abandon(&self, header: &ChunkHeader) {
        if let Some(mut live) = self.live(header.slot, header.generation) {
            live.get().abandon(header);
        }
    }

    /// [`applied`](Self::applied) or [`abandon`](Self::abandon) by what the trailer said, and the acknowledgement to
    /// send.
    pub fn placed(&self, header: &ChunkHeader, valid: bool) -> ChunkState {
        if !valid && !mutants::is(Mutant::AcceptInvalidTrailer) {
            self.abandon(header);
            return ChunkState::Missing;
        }
        self.applied(header).acknowledgement()
    }

    /// Takes a piece of the user message, whose trailer said valid.
    pub fn message_applied(&self, header: &ChunkHeader, bytes: &[u8]) -> Applied {
        let Some(mut live) = self.live(header.slot, header.generation) else {
            return Applied::Refused;
        };
        let (applied, notify) = live.get().message_applied(header, bytes);
        drop(live);
        tell(notify);
        applied
    }

    /// Lets a peer's device write into the slot by itself (one-sided transports), and binds the slot to that peer as
    /// [`begin`](Self::begin) does. From now on the peer counts as somebody inside the slot's gate, until the slot
    /// arrives or [`remote_quiet`](Self::remote_quiet) says otherwise: [`close`](Self::close) answers `Waiting`. False if
    /// the slot is closed, gone, has arrived or is another peer's. Admitting the same peer again is harmless.
    pub fn admit(&self, from: Incarnation, slot: SlotId, generation: Generation) -> bool {
        self.live(slot, generation)
            .is_some_and(|mut live| live.get().admit(from))
    }

    /// The admitted peer's device is known to write no more into the slot: the peer said so, or its lanes to this endpoint
    /// are fenced. It must be admitted anew before it writes again, so call this for an open slot only when the link
    /// itself has ended. True if the slot has ended and is fenced now; false too if it is gone.
    pub fn remote_quiet(&self, slot: SlotId, generation: Generation) -> bool {
        self.live(slot, generation)
            .is_some_and(|mut live| live.get().remote_quiet())
    }

    /// Closes the slot, unless it has arrived.
    pub fn close(&self, slot: SlotId, generation: Generation) -> Close {
        let Some(mut live) = self.live(slot, generation) else {
            return Close::Gone;
        };
        let live = live.get();
        match live.phase() {
            Phase::Arrived if !mutants::is(Mutant::CancelWinsOverArrived) => Close::AlreadyArrived,
            _ if live.close() => Close::Fenced,
            _ => Close::Waiting,
        }
    }

    /// Closes a slot whose bytes were found not to be those that were sent. As [`close`](Self::close); the transport
    /// reports [`LinkEvent::SlotCorrupt`](crate::transport::LinkEvent::SlotCorrupt), naming the lane.
    pub fn corrupt(&self, slot: SlotId, generation: Generation) -> Close {
        self.close(slot, generation)
    }

    /// Whether no byte of this use of the slot can land any more: it was closed or has arrived and nobody is inside, or
    /// it is gone.
    pub fn fenced(&self, slot: SlotId, generation: Generation) -> bool {
        self.live(slot, generation).is_none_or(|mut live| {
            let live = live.get();
            live.phase() != Phase::Open && live.gate().fenced()
        })
    }

    /// Which of these chunks of this peer have been applied, and whether the slot has arrived: the answer to a lane
    /// fence, to be asked after the lane's thread has left it. A slot that another peer writes is `Refused`.
    pub fn chunk_states(&self, from: Incarnation, chunks: &[ChunkName]) -> Vec<ChunkState> {
        let state = |chunk: &ChunkName| match self.live(chunk.slot, chunk.generation) {
            Some(mut live) => live.get().chunk_state(from, chunk),
            None => ChunkState::Refused,
        };
        chunks.iter().map(state).collect()
    }

    /// The regions of an open slot, by the index that its streams' segments have. `None` if it has ended or is gone.
    pub fn regions(&self, slot: SlotId, generation: Generation) -> Option<Arc<[Arc<Region>]>> {
        let mut live = self.live(slot, generation)?;
        let live = live.get();
        (live.phase() == Phase::Open).then(|| live.regions().clone())
    }

    /// Bytes applied so far, whether arrived, and the message. `None` if the slot is gone.
    pub fn progress(&self, slot: SlotId, generation: Generation) -> Option<SlotProgress> {
        self.live(slot, generation).map(|mut live| live.get().progress())
    }

    /// Gives the slot back: its next use has a higher generation. Only after its verdict is acknowledged. True if it
    /// was given back: a slot that is open or not fenced is kept, since bytes may still land.
    pub fn release(&self, slot: SlotId, generation: Generation) -> bool {
        let Some(cell) = self.find(slot) else {
            return false;
        };
        let mut entry = cell.lock();
        let done = |live: &LiveSlot| live.phase() != Phase::Open && live.gate().fenced();
        if entry.generation != generation.0 || !entry.live.as_deref().is_some_and(done) {
            return false;
        }
        let live = entry.live.take();
        let reusable = entry.generation < u32::MAX;
        drop(entry);
        // Outside the lock: it may be the last to hold the pool's memory.
        drop(live);
        let mut allocation = self.allocation.lock();
        allocation.in_use -= 1;
        if reusable {
            allocation.free.push(slot.0);
        }
        true
    }

    /// Slots in use.
    pub fn in_use(&self) -> usize {
        self.allocation.lock().in_use
    }

    fn allocate(&self, pool: PoolId) -> Result<u32> {
        let mut allocation = self.allocation.lock();
        let id = match allocation.free.pop() {
            Some(id) => id,
            None if allocation.next < self.slots_max => {
                allocation.next += 1;
                allocation.next - 1
            }
            None => {
                return Err(Error::new(ErrorKind::Busy, "one more grant")
                    .at(format!("pool {pool}"))
                    .because(format!("all {} slots are in use", self.slots_max))
                    .remedy("wait for grants to end, or raise limits.slots_max"));
            }
        };
        allocation.in_use += 1;
        Ok(id)
    }

    /// The slot's place, made if it is not there yet.
    fn entry_at(&self, id: u32) -> &Mutex<Entry> {
        let (segment, index) = place(id);
        let make = || (0..FIRST_SEGMENT << segment).map(|_| Mutex::default()).collect();
        &self.segments[segment].get_or_init(make)[index]
    }

    fn find(&self, slot: SlotId) -> Option<&Mutex<Entry>> {
        let (segment, index) = place(slot.0);
        self.segments[segment].get()?.get(index)
    }

    /// This use of the slot, locked, if it is in use.
    fn live(&self, slot: SlotId, generation: Generation) -> Option<Live<'_>> {
        let entry = self.find(slot)?.lock();
        let named = entry.generation == generation.0 || mutants::is(Mutant::IgnoreGeneration);
        (named && entry.live.is_some()).then_some(Live { entry })
    }
}

/// A slot in use, locked.
struct Live<'a> {
    // `live` is `Some`.
    entry: MutexGuard<'a, Entry>,
}

impl Live<'_> {
    #[allow(clippy::expect_used)]
    fn get(&mut self) -> &mut LiveSlot {
        self.entry
            .live
            .as_mut()
            .expect("checked when this was made, under the same lock")
    }
}

impl Applied {
    /// What the sender is told.
    pub const fn acknowledgement(self) -> ChunkState {
        match self {
            Applied::Counted => ChunkState::Applied,
            Applied::Arrived => ChunkState::Arrived,
            Applied::Refused => ChunkState::Refused,
        }
    }
}

/// Tells the watcher, without locks held.
fn tell(notify: Notify) {
    if let Some((watcher, message)) = notify {
        watcher.arrived(message);
    }
}

/// Segment and index of a slot.
fn place(id: u32) -> (usize, usize) {
    let segment = (u64::from(id) / FIRST_SEGMENT + 1).ilog2();
    let first = FIRST_SEGMENT * ((1 << segment) - 1);
    (segment as usize, (u64::from(id) - first) as usize)
}

impl fmt::Debug for SlotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotTable({} of {} in use)", self.in_use(), self.slots_max)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_slot_has_a_place_of_its_own() {
        assert_eq!(place(0), (0, 0));
        assert_eq!(place(63), (0, 63));
        assert_eq!(place(64), (1, 0));
        assert_eq!(place(191), (1, 127));
        assert_eq!(place(192), (2, 0));
        let (segment, index) = place(u32::MAX);
        assert!(segment < SEGMENTS && (index as u64) < FIRST_SEGMENT << segment);
    }

    #[test]
    fn an_idle_table_is_small() {
        let table = SlotTable::new(1 << 20);
        assert!(size_of::<SlotTable>() < 2048);
        assert!(table.segments.iter().all(|segment| segment.get().is_none()));
        assert_eq!(size_of::<Mutex<Entry>>(), 24);
    }
}
