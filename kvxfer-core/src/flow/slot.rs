//! One slot: what has been placed of one grant, and when it is whole.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::extent::TakenExtents;
use super::interval::{Coverage, IntervalSet};
use super::{
    Applied, ByteStream, CHUNK_BYTES_MAX, ChunkHeader, ChunkName, ChunkState, Gate, MESSAGE_BYTES_MAX, MESSAGE_PART,
    OwnedGateGuard, PartExtent, Placement, SlotProgress, SlotWatcher,
};
use crate::error::{Destination as Blocks, Error, ErrorKind, Result};
use crate::id::{Incarnation, PoolId};
use crate::layout::PoolLayout;
use crate::memory::Region;
use crate::mutants::{self, Mutant};
use crate::plan::Target;

/// Parts of one slot, at most. A part needs some 100 bytes while it is filled and 32 after.
pub const PARTS_PER_SLOT_MAX: usize = 16_384;
/// Separate intervals of one part's applied bytes, at most. Honest peers have as many as chunks in doubt.
const RUNS_PER_PART_MAX: usize = 4_096;
/// Chunks of one part being placed at once, at most: one for each lane.
const PLACING_PER_PART_MAX: usize = 256;

/// Where a slot's bytes go: the part of a [`Target`] that the slot table needs.
pub trait SlotTarget: Send + Sync {
    /// Bytes of the whole grant.
    ///
    /// # Errors
    /// As [`Target::bytes`].
    fn bytes(&self) -> Result<u64>;

    /// How many layers an extent can name; the rest of its layer range is cut off.
    fn layers(&self) -> u16;

    /// The stream of one part.
    ///
    /// # Errors
    /// As [`Target::stream`].
    fn stream(&self, extent: PartExtent) -> Result<Arc<dyn ByteStream>>;
}

/// A [`Target`] in its pool.
pub(super) struct PoolTarget {
    pub(super) layout: Arc<PoolLayout>,
    pub(super) target: Arc<Target>,
}

impl SlotTarget for PoolTarget {
    fn bytes(&self) -> Result<u64> {
        self.target.bytes(&self.layout)
    }

    fn layers(&self) -> u16 {
        match &*self.target {
            Target::Selection { scope, .. } => u16::try_from(scope.layer_count(&self.layout)).unwrap_or(u16::MAX),
            // The descriptors are one layer, taken as a whole.
            Target::Descriptors(_) => 1,
        }
    }

    fn stream(&self, extent: PartExtent) -> Result<Arc<dyn ByteStream>> {
        self.target.stream(&self.layout, extent)
    }
}

/// How a slot stands. It leaves `Open` once and for all, under its lock: that is what makes arrival and cancel exclude
/// each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Open,
    Arrived,
    Closed,
}

/// A slot in use.
pub(super) struct LiveSlot {
    target: Option<Box<dyn SlotTarget>>,
    regions: Arc<[Arc<Region>]>,
    // Whoever may write: given at opening, else the first peer that does (a grant is used once).
    writer: Option<Incarnation>,
    pool: PoolId,
    watcher: Option<Arc<dyn SlotWatcher>>,
    gate: Arc<Gate>,
    // The writer's device may write by itself: it counts as somebody inside until it is known to be quiet.
    admitted: Option<OwnedGateGuard>,
    phase: Phase,
    total_bytes: u64,
    applied_bytes: u64,
    announced_bytes: u64,
    parts: BTreeMap<u32, Part>,
    taken: TakenExtents,
    expects_message: bool,
    message: Option<MessageAssembly>,
    whole_message: Option<Arc<[u8]>>,
}

struct Part {
    extent: PartExtent,
    length: u64,
    // `None` once all its bytes are placed.
    filling: Option<Filling>,
}

struct Filling {
    stream: Arc<dyn ByteStream>,
    applied: IntervalSet,
    // Chunks whose header was read and whose bytes are on their way: no second copy may be placed at the same time.
    placing: Vec<(u64, u32)>,
}

struct MessageAssembly {
    bytes: Vec<u8>,
    got: IntervalSet,
}

/// What whoever holds the slot's lock must tell the watcher after letting it go.
pub(super) type Notify = Option<(Arc<dyn SlotWatcher>, Option<Arc<[u8]>>)>;

impl LiveSlot {
    pub(super) fn new(
        target: Box<dyn SlotTarget>,
        regions: Arc<[Arc<Region>]>,
        writer: Option<Incarnation>,
        pool: PoolId,
        watcher: Option<Arc<dyn SlotWatcher>>,
    ) -> Result<LiveSlot> {
        let total_bytes = target.bytes()?;
        let layers = u32::from(target.layers());
        Ok(LiveSlot {
            target: Some(target),
            regions,
            writer,
            pool,
            watcher,
            gate: Gate::new(),
            admitted: None,
            phase: Phase::Open,
            total_bytes,
            applied_bytes: 0,
            announced_bytes: 0,
            parts: BTreeMap::new(),
            taken: TakenExtents::new(layers),
            expects_message: false,
            message: None,
            whole_message: None,
        })
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// None once it has ended.
    pub(super) fn regions(&self) -> &Arc<[Arc<Region>]> {
        &self.regions
    }

    pub(super) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    pub(super) fn progress(&self) -> SlotProgress {
        SlotProgress {
            applied_bytes: self.applied_bytes,
            total_bytes: self.total_bytes,
            arrived: self.phase == Phase::Arrived,
            message: self.whole_message.clone(),
            writer: self.writer,
            admitted: self.admitted.is_some(),
        }
    }

    /// Lets a peer's device write by itself from now on. False if the slot is not open, or another peer's.
    pub(super) fn admit(&mut self, from: Incarnation) -> bool {
        let writer = self.writer.unwrap_or(from);
        if self.phase != Phase::Open || (writer != from && !mutants::is(Mutant::IgnoreWriter)) {
            return false;
        }
        self.writer = Some(writer);
        if self.admitted.is_none() && !mutants::is(Mutant::AdmitWithoutGate) {
            self.admitted = self.gate.enter_owned();
        }
        true
    }

    /// The admitted peer's device writes no more, until it is admitted anew. True if the slot has ended and is fenced.
    pub(super) fn remote_quiet(&mut self) -> bool {
        self.admitted = None;
        self.phase != Phase::Open && self.gate.fenced()
    }

    /// Decides about a chunk before any byte of it is placed.
    pub(super) fn begin(&mut self, from: Incarnation, header: &ChunkHeader) -> Result<Placement> {
        let writer = self.writer.unwrap_or(from);
        if writer != from && !mutants::is(Mutant::IgnoreWriter) {
            return Ok(Placement::Scrap(ChunkState::Refused));
        }
        match self.phase {
            Phase::Open => {}
            Phase::Arrived => return Ok(Placement::Scrap(ChunkState::Arrived)),
            Phase::Closed => return Ok(Placement::Scrap(ChunkState::Refused)),
        }
        let placement = if header.part == MESSAGE_PART {
            self.begin_message(header)?
        } else {
            self.begin_bytes(header)?
        };
        // Only a header that was right in itself binds the slot and announces a message.
        self.writer = Some(writer);
        self.expects_message |= header.has_message;
        Ok(placement)
    }

    fn begin_bytes(&mut self, header: &ChunkHeader) -> Result<Placement> {
        if header.length > CHUNK_BYTES_MAX {
            return Err(self.broken(
                header,
                format!("its {} bytes are over the {CHUNK_BYTES_MAX} of a chunk", header.length),
            ));
        }
        if !self.parts.contains_key(&header.part) {
            self.add_part(header)?;
        }
        let pool = self.pool;
        let broken = |why: String| broken(pool, header, why);
        let Some(part) = self.parts.get_mut(&header.part) else {
            return Err(broken("its part could not be added".into()));
        };
        if part.extent != header.extent {
            return Err(broken(format!(
                "it says that the part is {:?}, an earlier chunk said {:?}",
                header.extent, part.extent
            )));
        }
        let range = match header.offset.checked_add(u64::from(header.length)) {
            Some(end) if end <= part.length => header.offset..end,
            _ => return Err(broken(format!("the part's stream has {} bytes", part.length))),
        };
        if range.is_empty() && part.length != 0 {
            return Err(broken("it is empty and its part is not".into()));
        }
        let Some(filling) = &mut part.filling else {
            return Ok(Placement::Scrap(ChunkState::Applied));
        };
        match filling.applied.coverage(range.clone()) {
            // Partly in place: an earlier link cut the part into other chunks. The same bytes are placed once more, which
            // does no harm while the slot is open, and only what is new counts.
            Coverage::None | Coverage::Partial => {}
            Coverage::Full if mutants::is(Mutant::CountTwice) => {}
            Coverage::Full => return Ok(Placement::Scrap(ChunkState::Applied)),
        }
        let overlaps =
            |&&(offset, length): &&(u64, u32)| offset < range.end && range.start < offset + u64::from(length);
        match filling.placing.iter().find(overlaps) {
            None => {}
            // A copy of it is being placed by another lane. If that fails, this one is sent again.
            Some(&other) if other == (header.offset, header.length) => {
                return Ok(Placement::Scrap(ChunkState::Missing));
            }
            Some(_) => return Err(broken("it overlaps a chunk that is being placed".into())),
        }
        if filling.applied.runs() >= RUNS_PER_PART_MAX || filling.placing.len() >= PLACING_PER_PART_MAX {
            return Err(broken(format!(
                "the part's bytes are in more than {RUNS_PER_PART_MAX} pieces or {PLACING_PER_PART_MAX} chunks at once"
            )));
        }
        filling.placing.push((header.offset, header.length));
        let stream = Arc::clone(&filling.stream);
        if mutants::is(Mutant::AckEarly) {
            self.count(header);
        }
        Ok(Placement::Place {
            stream,
            regions: Arc::clone(&self.regions),
            gate: Arc::clone(&self.gate),
        })
    }

    fn begin_message(&mut self, header: &ChunkHeader) -> Result<Placement> {
        // The message's length travels where a part's last token does.
        let total = header.extent.token_end;
        let end = header.offset.checked_add(u64::from(header.length));
        if !header.has_message
            || total as usize > MESSAGE_BYTES_MAX
            || end.is_none_or(|end| end > u64::from(total))
            || (header.length == 0 && total != 0)
        {
            return Err(self.broken(
                header,
                format!("a user message of {total} bytes (at most {MESSAGE_BYTES_MAX}) has no such piece"),
            ));
        }
        if let Some(whole) = &self.whole_message {
            if whole.len() != total as usize {
                return Err(self.broken(header, format!("the message had {} bytes before", whole.len())));
            }
            return Ok(Placement::Scrap(ChunkState::Applied));
        }
        let assembly = self.message.get_or_insert_with(|| MessageAssembly {
            bytes: vec![0; total as usize],
            got: IntervalSet::new(),
        });
        if assembly.bytes.len() != total as usize {
            let before = assembly.bytes.len();
            return Err(self.broken(header, format!("the message had {before} bytes before")));
        }
        match assembly.got.coverage(span(header.offset, header.length)) {
            Coverage::None => Ok(Placement::Message),
            Coverage::Full => Ok(Placement::Scrap(ChunkState::Applied)),
            Coverage::Partial => Err(self.broken(header, "some of its bytes are in place and some are not".into())),
        }
    }

    fn add_part(&mut self, header: &ChunkHeader) -> Result<()> {
        if self.parts.len() >= PARTS_PER_SLOT_MAX {
            return Err(self.broken(
                header,
                format!("the slot has {PARTS_PER_SLOT_MAX} parts, the most there can be"),
            ));
        }
        let extent = header.extent;
        if extent.token_start > extent.token_end || extent.layer_start > extent.layer_end {
            return Err(self.broken(header, format!("its extent {extent:?} ends before it begins")));
        }
        if self.taken.overlaps(&extent) && !mutants::is(Mutant::LoseOverlapCheck) {
            return Err(self.broken(header, format!("its extent {extent:?} overlaps another part's")));
        }
        let stream = match &self.target {
            Some(target) => target
                .stream(extent)
                .map_err(|error| self.broken(header, format!("the grant has no such part: {error}")))?,
            None => return Err(self.broken(header, "the slot has ended".into())),
        };
        let length = stream.length();
        let announced_bytes = self.announced_bytes.saturating_add(length);
        if announced_bytes > self.total_bytes && !mutants::is(Mutant::LoseOverlapCheck) {
            return Err(self.broken(
                header,
                format!(
                    "its parts come to {announced_bytes} bytes, the grant has {}",
                    self.total_bytes
                ),
            ));
        }
        self.announced_bytes = announced_bytes;
        self.taken.take(&extent);
        let filling = Filling {
            stream,
            applied: IntervalSet::new(),
            placing: Vec::new(),
        };
        self.parts.insert(
            header.part,
            Part {
                extent,
                length,
                filling: Some(filling),
            },
        );
        Ok(())
    }

    /// Counts a chunk whose bytes are placed.
    pub(super) fn applied(&mut self, header: &ChunkHeader) -> (Applied, Notify) {
        match self.phase {
            Phase::Open => {}
            Phase::Arrived if mutants::is(Mutant::AckEarly) => return (Applied::Arrived, self.notify()),
            Phase::Arrived | Phase::Closed => return (Applied::Refused, None),
        }
        if !self.end_placing(header) {
            // Nobody begun it: counting it would be counting what may not be there.
            return (Applied::Refused, None);
        }
        self.count(header);
        self.arrive_if_whole()
    }

    /// A chunk that was begun will not be applied: another copy of it may be.
    pub(super) fn abandon(&mut self, header: &ChunkHeader) {
        self.end_placing(header);
    }

    /// Takes a piece of the user message.
    pub(super) fn message_applied(&mut self, header: &ChunkHeader, bytes: &[u8]) -> (Applied, Notify) {
        if self.phase != Phase::Open || bytes.len() != header.length as usize {
            return (Applied::Refused, None);
        }
        if self.whole_message.is_some() {
            // Another lane brought the same piece meanwhile.
            return (Applied::Counted, None);
        }
        let Some(assembly) = &mut self.message else {
            return (Applied::Refused, None);
        };
        let range = span(header.offset, header.length);
        let Some(place) = usize::try_from(range.start)
            .ok()
            .and_then(|start| assembly.bytes.get_mut(start..start.checked_add(bytes.len())?))
        else {
            return (Applied::Refused, None);
        };
        place.copy_from_slice(bytes);
        assembly.got.insert(range);
        if assembly.got.total() == assembly.bytes.len() as u64 {
            self.whole_message = self.message.take().map(|assembly| assembly.bytes.into());
        }
        self.arrive_if_whole()
    }

    /// Closes the slot unless it has arrived; the gate's answer follows from [`Gate::close`].
    pub(super) fn close(&mut self) -> bool {
        self.phase = Phase::Closed;
        self.let_go();
        self.gate.close()
    }

    pub(super) fn chunk_state(&self, from: Incarnation, chunk: &ChunkName) -> ChunkState {
        if self.writer.is_some_and(|writer| writer != from) && !mutants::is(Mutant::IgnoreWriter) {
            return ChunkState::Refused;
        }
        match self.phase {
            Phase::Open => {}
            Phase::Arrived => return ChunkState::Arrived,
            Phase::Closed => return ChunkState::Refused,
        }
        let range = span(chunk.offset, chunk.length);
        let applied = if chunk.part == MESSAGE_PART {
            self.whole_message.is_some()
                || self
                    .message
                    .as_ref()
                    .is_some_and(|assembly| assembly.got.coverage(range) == Coverage::Full)
        } else {
            self.parts
                .get(&chunk.part)
                .is_some_and(|part| match (&part.filling, range.end <= part.length) {
                    (Some(filling), true) => filling.applied.coverage(range) == Coverage::Full,
                    (None, inside) => inside,
                    _ => false,
                })
        };
        if applied {
            ChunkState::Applied
        } else {
            ChunkState::Missing
        }
    }

    /// Ends the reservation that `begin` made. False if there was none.
    fn end_placing(&mut self, header: &ChunkHeader) -> bool {
        let Some(filling) = self.parts.get_mut(&header.part).and_then(|part| part.filling.as_mut()) else {
            return false;
        };
        let name = (header.offset, header.length);
        match filling.placing.iter().position(|&placing| placing == name) {
            Some(index) => {
                filling.placing.swap_remove(index);
                true
            }
            None => false,
        }
    }

    fn count(&mut self, header: &ChunkHeader) {
        let Some(part) = self.parts.get_mut(&header.part) else {
            return;
        };
        let Some(filling) = &mut part.filling else {
            return;
        };
        let added = filling.applied.insert(span(header.offset, header.length));
        self.applied_bytes += if mutants::is(Mutant::CountTwice) {
            u64::from(header.length)
        } else {
            added
        };
        // Under the mutants a chunk can be counted while it is being placed: its part must stay.
        if filling.applied.total() == part.length && filling.placing.is_empty() && !mutants::is(Mutant::CountTwice) {
            part.filling = None;
        }
    }

    fn arrive_if_whole(&mut self) -> (Applied, Notify) {
        let message_whole = !self.expects_message || self.whole_message.is_some() || mutants::is(Mutant::ForgetMessage);
        // A slot of no bytes arrives with its empty part or its message, which is why this is only asked after one.
        if self.applied_bytes < self.total_bytes || !message_whole {
            return (Applied::Counted, None);
        }
        self.phase = Phase::Arrived;
        if !mutants::is(Mutant::AckEarly) && !mutants::is(Mutant::CountTwice) {
            // Nobody is inside: every byte is applied, and a byte is either applied or being placed, never both. That
            // holds for an admitted writer too: what it wrote is counted by its closes, and all are counted.
            self.admitted = None;
            self.gate.close();
            self.let_go();
        }
        (Applied::Arrived, self.notify())
    }

    fn notify(&self) -> Notify {
        self.watcher
            .as_ref()
            .map(|watcher| (Arc::clone(watcher), self.whole_message.clone()))
    }

    /// Gives back what only an open slot needs: a verdict may be kept for long.
    fn let_go(&mut self) {
        self.target = None;
        self.regions = Arc::new([]);
        self.parts.clear();
        self.taken = TakenExtents::new(0);
        self.message = None;
    }

    fn broken(&self, header: &ChunkHeader, why: String) -> Error {
        broken(self.pool, header, why)
    }
}

fn span(offset: u64, length: u32) -> Range<u64> {
    offset..offset.saturating_add(u64::from(length))
}

fn broken(pool: PoolId, header: &ChunkHeader, why: String) -> Error {
    Error::new(
        ErrorKind::Protocol,
        format!(
            "a chunk of {} bytes at offset {} of part {}",
            header.length, header.offset, header.part
        ),
    )
    .at(format!("slot {}.{}, pool {pool}", header.slot, header.generation))
    .because(why)
    .remedy("the lane is closed; check that both ends run the same version and saw the same grant")
    .destination_is(Blocks::Untouched)
}

impl fmt::Debug for LiveSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveSlot")
            .field("phase", &self.phase)
            .field("applied_bytes", &self.applied_bytes)
            .field("total_bytes", &self.total_bytes)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}
