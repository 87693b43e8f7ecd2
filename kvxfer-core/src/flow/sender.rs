//! The sending side of one link: which transfer's chunk goes on a lane next, and what becomes of it.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::fmt;

use super::lane_window::LaneWindow;
use super::transfer::Transfer;
use super::{
    CHUNK_BYTES_MAX, Chunk, ChunkName, ChunkState, LANE_CHUNKS_MAX, LaneName, LinkSenderConfig, MESSAGE_BYTES_MAX,
    SendEvent, SendPart, SendSpec, TransferId,
};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Generation, SlotId};
use crate::mutants::{self, Mutant};
use crate::time::Time;

/// The sending side of one link: deficit round robin over transfers, at most [`CHUNK_BYTES_MAX`] per chunk, a window
/// per lane (about 2 ms at the measured rate, at least 2 MiB), resumption behind a fence.
///
/// A higher priority goes first, always. Within a priority each transfer that has something to send gets one turn of
/// 1 MiB per round, those with the earliest deadlines first, so that a small transfer waits for at most one round.
/// Choosing a chunk is O(log transfers) and allocates nothing once the queues have their size.
pub struct LinkSender {
    config: LinkSenderConfig,
    // A chunk's bytes, at most; also what a transfer may send in one round, so that each turn sends something.
    chunk_bytes_max: u32,
    transfers: HashMap<TransferId, Transfer>,
    // One-sided transfers that write, by the peer's slot.
    writes: BTreeSet<(SlotId, Generation, TransferId)>,
    lanes: Vec<Lane>,
    lanes_up: u64,
    // Highest priority first; one for each priority ever used (at most 256).
    classes: Vec<Class>,
    // Transfers that have a turn in some class.
    turns: usize,
    tickets: u64,
    submissions: u64,
    // Transfers with a place on the link.
    active: u32,
    // Transfers with work and without a place: by priority, then first come.
    waiting: BinaryHeap<(u8, Reverse<u64>, TransferId)>,
    doubts: Vec<Doubt>,
    events: VecDeque<SendEvent>,
}

struct Lane {
    epoch: u32,
    up: bool,
    window: LaneWindow,
    // In the order of sending; acknowledgements come in the same order.
    outstanding: VecDeque<Outstanding>,
}

#[derive(Clone, Copy)]
struct Outstanding {
    transfer: TransferId,
    chunk: ChunkName,
    // The chunk is read into a slot of this endpoint: it says nothing of the peer's slot with the same name.
    read: bool,
}

/// A lost lane whose chunks are in doubt until the receiver has fenced it.
struct Doubt {
    lane: LaneName,
    chunks: VecDeque<Outstanding>,
}

struct Class {
    priority: u8,
    // Turns of this round and of the next. A turn whose ticket its transfer no longer has is stale.
    current: BinaryHeap<Reverse<Turn>>,
    next: BinaryHeap<Reverse<Turn>>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    urgency: (u64, u64),
    ticket: u64,
    transfer: TransferId,
}

impl LinkSender {
    /// A sender without lanes up.
    pub fn new(config: LinkSenderConfig) -> Self {
        let lane = || Lane {
            epoch: 0,
            up: false,
            window: LaneWindow::new(
                config.window_bytes_min,
                config.window_bytes_max,
                config.window_chunks_max.min(LANE_CHUNKS_MAX),
                u64::from(CHUNK_BYTES_MAX),
            ),
            outstanding: VecDeque::new(),
        };
        LinkSender {
            transfers: HashMap::new(),
            writes: BTreeSet::new(),
            lanes: (0..config.lanes).map(|_| lane()).collect(),
            lanes_up: 0,
            classes: Vec::new(),
            turns: 0,
            tickets: 0,
            submissions: 0,
            active: 0,
            waiting: BinaryHeap::new(),
            doubts: Vec::new(),
            events: VecDeque::new(),
            chunk_bytes_max: CHUNK_BYTES_MAX,
            config,
        }
    }

    /// The same with smaller chunks, at least of one byte: for tests that want many chunks of little memory.
    #[must_use]
    pub fn with_chunk_bytes_max(mut self, bytes: u32) -> Self {
        self.chunk_bytes_max = bytes.clamp(1, CHUNK_BYTES_MAX);
        for lane in &mut self.lanes {
            lane.window = LaneWindow::new(
                self.config.window_bytes_min,
                self.config.window_bytes_max,
                self.config.window_chunks_max,
                u64::from(self.chunk_bytes_max),
            );
        }
        self
    }

    /// Takes a transfer without parts.
    ///
    /// # Errors
    /// `Busy` at the limit; `InvalidArgument` for a message that is too long or an id in use.
    pub fn submit(&mut self, spec: SendSpec) -> Result<()> {
        let id = spec.id;
        let refused = |kind, why: String| Error::new(kind, format!("transfer {}", id.0)).because(why);
        if self.transfers.len() >= self.config.transfers_max as usize {
            return Err(refused(
                ErrorKind::Busy,
                format!("the link has {} transfers", self.config.transfers_max),
            )
            .remedy("wait for transfers to end, or raise the limit `transfers_max`"));
        }
        let length = spec.message.as_ref().map_or(0, |message| message.len());
        if length > MESSAGE_BYTES_MAX {
            return Err(refused(
                ErrorKind::InvalidArgument,
                format!("its message has {length} bytes, at most {MESSAGE_BYTES_MAX} are carried"),
            )
            .remedy("send the message's content as blocks"));
        }
        if self.transfers.contains_key(&id) {
            return Err(
                refused(ErrorKind::InvalidArgument, "it is on this link already".into()).remedy("number it anew")
            );
        }
        self.submissions += 1;
        let (slot, generation, one_sided) = (spec.slot, spec.generation, spec.remote.is_some());
        let transfer = Transfer::new(spec, self.submissions);
        if one_sided && !transfer.is_read() {
            self.writes.insert((slot, generation, id));
        }
        self.transfers.insert(id, transfer);
        self.settle(id);
        Ok(())
    }

    /// Adds a part. Unknown transfers are ignored (they have ended), as are part numbers given before.
    pub fn add_part(&mut self, id: TransferId, part: SendPart) {
        if let Some(transfer) = self.transfers.get_mut(&id) {
            transfer.add_part(part);
            self.settle(id);
        }
    }

    /// Stops a transfer (its gate is closed by the caller). `Quiet` follows when nothing is outstanding on a lane that
    /// is up, and the transfer is forgotten. A transfer that is not known is quiet already, and said to be so.
    pub fn stop(&mut self, id: TransferId) {
        match self.transfers.get_mut(&id) {
            None => self.events.push_back(SendEvent::Quiet(id)),
            Some(transfer) => {
                transfer.stopping = true;
                transfer.drop_work();
                self.settle(id);
            }
        }
    }

    /// A transfer's memory has failed: nothing more of it is started. It waits to be stopped.
    pub fn halt(&mut self, id: TransferId) {
        if let Some(transfer) = self.transfers.get_mut(&id) {
            transfer.halt();
            self.settle(id);
        }
    }

    /// Forgets a transfer that has arrived or been refused.
    pub fn forget(&mut self, id: TransferId) {
        if let Some(mut transfer) = self.transfers.remove(&id) {
            self.leave(&mut transfer);
            self.admit();
        }
    }

    /// The next chunk for a lane, if its window is open and something waits. It is outstanding from now on.
    pub fn next_chunk(&mut self, lane: u16, now: Time) -> Option<Chunk> {
        if !self.has_work(lane) {
            return None;
        }
        // From the start each time: ending one transfer's turn may admit another, of a higher priority.
        while let Some((class, id)) = self.first_turn() {
            if let Some(chunk) = self.chunk_from(class, id, lane, now) {
                return Some(chunk);
            }
        }
        None
    }

    /// An acknowledgement read from a lane. One that the lane does not owe is ignored.
    pub fn acknowledged(&mut self, lane: LaneName, chunk: ChunkName, state: ChunkState, now: Time) {
        self.sent_chunk_is(lane, |sent| sent.chunk == chunk, state, now);
    }

    /// The same for one-sided links, where this side's device says what became of a chunk. It is found by its transfer
    /// too: a chunk that is read into a slot of this endpoint may have the name of one that is written into the peer's.
    pub fn completed(&mut self, lane: LaneName, transfer: TransferId, chunk: ChunkName, state: ChunkState, now: Time) {
        self.sent_chunk_is(
            lane,
            |sent| sent.transfer == transfer && sent.chunk == chunk,
            state,
            now,
        );
    }

    /// One-sided links: the peer says that its slot has arrived. Ends what writes into it with `Arrived`.
    pub fn slot_arrived(&mut self, slot: SlotId, generation: Generation) {
        self.end_writes(slot, generation, ChunkState::Arrived);
    }

    /// One-sided links: the peer says that its slot is closed, gone or another's. Ends what writes into it with
    /// `Refused`: nothing more is sent. What is on its way stays [`outstanding`](Self::outstanding).
    pub fn slot_refused(&mut self, slot: SlotId, generation: Generation) {
        self.end_writes(slot, generation, ChunkState::Refused);
    }

    /// One-sided links: chunks written into this slot of the peer's that may not have landed yet: outstanding on a lane, or
    /// in doubt. Those of transfers that were forgotten count too.
    pub fn outstanding(&self, slot: SlotId, generation: Generation) -> u32 {
        let on_lanes = self.lanes.iter().flat_map(|lane| &lane.outstanding);
        let in_doubt = self.doubts.iter().flat_map(|doubt| &doubt.chunks);
        let named = |sent: &&Outstanding| !sent.read && sent.chunk.slot == slot && sent.chunk.generation == generation;
        on_lanes.chain(in_doubt).filter(named).count() as u32
    }

    /// A lane's connection is up.
    pub fn lane_up(&mut self, lane: LaneName) {
        let Some(entry) = self.lanes.get(usize::from(lane.index)) else {
            return;
        };
        if entry.up {
            // Its end was missed: what was on it is in doubt.
            let before = LaneName {
                index: lane.index,
                epoch: entry.epoch,
            };
            self.lane_lost(before);
        }
        if let Some(entry) = self.lanes.get_mut(usize::from(lane.index)) {
            entry.up = true;
            entry.epoch = lane.epoch;
            self.lanes_up += 1;
        }
    }

    /// A lane's connection is gone and its thread has left it: its outstanding chunks, now in doubt until
    /// [`lane_fenced`](Self::lane_fenced). Chunks that are read are neither returned nor in doubt: it was this side's
    /// device that would have placed them, and it has let go of the lane. They are read again.
    pub fn lane_lost(&mut self, lane: LaneName) -> Vec<ChunkName> {
        let Some(entry) = self.lanes.get_mut(usize::from(lane.index)) else {
            return Vec::new();
        };
        if !entry.up || entry.epoch != lane.epoch {
            return Vec::new();
        }
        entry.up = false;
        entry.window.clear();
        self.lanes_up -= 1;
        let outstanding = std::mem::take(&mut entry.outstanding);
        let (reads, chunks): (VecDeque<_>, VecDeque<_>) = outstanding.into_iter().partition(|sent| sent.read);
        for sent in &reads {
            if let Some(transfer) = self.transfers.get_mut(&sent.transfer) {
                transfer.outstanding -= 1;
            }
            let applied = mutants::is(Mutant::TakeLostReads);
            self.resolve(
                sent,
                if applied {
                    ChunkState::Applied
                } else {
                    ChunkState::Missing
                },
            );
        }
        let names = chunks.iter().map(|sent| sent.chunk).collect();
        for sent in &chunks {
            if let Some(transfer) = self.transfers.get_mut(&sent.transfer) {
                transfer.outstanding -= 1;
                transfer.in_doubt += 1;
            }
        }
        for sent in &chunks {
            self.settle(sent.transfer);
        }
        if mutants::is(Mutant::ResendWithoutFence) {
            for sent in &chunks {
                self.resolve_doubt(sent, ChunkState::Missing);
            }
        } else if !chunks.is_empty() {
            self.doubts.push(Doubt { lane, chunks });
        }
        names
    }

    /// The receiver has fenced the lane and says what became of the chunks in doubt. What is missing is sent again, and
    /// so is what the receiver does not mention: nothing of it can land any more.
    pub fn lane_fenced(&mut self, lane: LaneName, chunks: &[(ChunkName, ChunkState)], _now: Time) {
        let Some(place) = self.doubts.iter().position(|doubt| doubt.lane == lane) else {
            return;
        };
        let doubt = self.doubts.swap_remove(place);
        for (index, sent) in doubt.chunks.iter().enumerate() {
            // The answer has the question's order; else look for it.
            let same = |answer: &&(ChunkName, ChunkState)| answer.0 == sent.chunk;
            let answer = chunks.get(index).filter(same).or_else(|| chunks.iter().find(same));
            self.resolve_doubt(sent, answer.map_or(ChunkState::Missing, |answer| answer.1));
        }
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<SendEvent> {
        self.events.pop_front()
    }

    /// Whether a lane could get a chunk now.
    pub fn has_work(&self, lane: u16) -> bool {
        let open = |lane: &Lane| lane.up && lane.window.is_open();
        self.turns > 0 && self.lanes.get(usize::from(lane)).is_some_and(open)
    }

    /// Transfers known.
    pub fn transfers(&self) -> usize {
        self.transfers.len()
    }

    /// Bytes and chunks in flight on a lane, and its window in bytes: for counters.
    pub fn lane_load(&self, lane: u16) -> LaneLoad {
        self.lanes
            .get(usize::from(lane))
            .map_or_else(LaneLoad::default, |lane| {
                let (bytes, chunks) = lane.window.in_flight();
                LaneLoad {
                    bytes,
                    chunks,
                    window_bytes: lane.window.bytes(),
                }
            })
    }

    /// Chunks in doubt: on lost lanes that are not fenced yet.
    pub fn in_doubt(&self) -> usize {
        self.doubts.iter().map(|doubt| doubt.chunks.len()).sum()
    }

    /// The highest class in which somebody has a turn, and the transfer whose turn it is.
    fn first_turn(&mut self) -> Option<(usize, TransferId)> {
        (0..self.classes.len()).find_map(|class| Some((class, self.turn_of(class)?)))
    }

    /// The transfer whose turn it is in a class.
    fn turn_of(&mut self, class: usize) -> Option<TransferId> {
        let class = &mut self.classes[class];
        loop {
            let Some(Reverse(turn)) = class.current.peek() else {
                if class.next.is_empty() {
                    return None;
                }
                std::mem::swap(&mut class.current, &mut class.next);
                continue;
            };
            let transfer = self.transfers.get(&turn.transfer);
            if transfer.is_some_and(|transfer| transfer.turn == Some(turn.ticket)) {
                return Some(turn.transfer);
            }
            class.current.pop();
        }
    }

    /// The chunk of the transfer whose turn it is; `None` if its turn is over.
    fn chunk_from(&mut self, class: usize, id: TransferId, lane: u16, now: Time) -> Option<Chunk> {
        let transfer = self.transfers.get_mut(&id)?;
        if !transfer.may_start(now) {
            self.settle(id);
            return None;
        }
        let length = transfer.next_length(self.lanes_up, self.chunk_bytes_max);
        if transfer.deficit < u64::from(length) && !mutants::is(Mutant::StarveSmall) {
            transfer.deficit += u64::from(self.chunk_bytes_max);
            let class = &mut self.classes[class];
            if let Some(turn) = class.current.pop() {
                class.next.push(turn);
            }
            return None;
        }
        transfer.deficit = transfer.deficit.saturating_sub(u64::from(length));
        let chunk = transfer.take_chunk(length);
        let read = transfer.is_read();
        if let Some(chunk) = &chunk {
            let lane = &mut self.lanes[usize::from(lane)];
            lane.window.sent(length, now);
            lane.outstanding.push_back(Outstanding {
                transfer: id,
                chunk: chunk.header.name(),
                read,
            });
        }
        self.settle(id);
        chunk
    }

    /// What became of a chunk that is outstanding on a lane.
    fn sent_chunk_is(&mut self, lane: LaneName, is_it: impl Fn(&Outstanding) -> bool, state: ChunkState, now: Time) {
        let Some(entry) = self.lanes.get_mut(usize::from(lane.index)) else {
            return;
        };
        if !entry.up || entry.epoch != lane.epoch {
            return;
        }
        let Some(place) = entry.outstanding.iter().position(is_it) else {
            return;
        };
        let Some(sent) = entry.outstanding.remove(place) else {
            return;
        };
        entry.window.acknowledged(sent.chunk.length, now);
        if let Some(transfer) = self.transfers.get_mut(&sent.transfer) {
            transfer.outstanding -= 1;
        }
        self.resolve(&sent, state);
    }

    /// Ends every transfer that writes into this slot of the peer's.
    fn end_writes(&mut self, slot: SlotId, generation: Generation, state: ChunkState) {
        let first = (slot, generation, TransferId(0));
        let last = (slot, generation, TransferId(u64::MAX));
        let ids: Vec<TransferId> = self.writes.range(first..=last).map(|write| write.2).collect();
        for id in ids {
            self.end(id, state);
            self.settle(id);
        }
    }

    fn resolve_doubt(&mut self, sent: &Outstanding, state: ChunkState) {
        if let Some(transfer) = self.transfers.get_mut(&sent.transfer) {
            transfer.in_doubt -= 1;
            self.resolve(sent, state);
        }
    }

    fn resolve(&mut self, sent: &Outstanding, state: ChunkState) {
        let Some(transfer) = self.transfers.get_mut(&sent.transfer) else {
            return;
        };
        transfer.resolve(&sent.chunk, state);
        self.end(sent.transfer, state);
        self.settle(sent.transfer);
    }

    /// Reports the end of a transfer, once, if this state of its slot is one.
    fn end(&mut self, id: TransferId, state: ChunkState) {
        let end = match state {
            ChunkState::Arrived => SendEvent::Arrived(id),
            ChunkState::Refused => SendEvent::Refused(id),
            ChunkState::Applied | ChunkState::Missing => return,
        };
        if let Some(transfer) = self.transfers.get_mut(&id)
            && !transfer.ended
        {
            transfer.ended = true;
            transfer.drop_work();
            self.events.push_back(end);
        }
    }

    /// Brings a transfer's turn, place and events in line with what it has to do.
    fn settle(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if transfer.drained() {
            self.events.push_back(SendEvent::Drained(id));
        }
        if transfer.stopping && (transfer.outstanding == 0 || mutants::is(Mutant::QuietEarly)) {
            self.events.push_back(SendEvent::Quiet(id));
            self.forget(id);
            return;
        }
        if !transfer.has_work() {
            transfer.deficit = 0;
            if transfer.turn.take().is_some() {
                self.turns -= 1;
            }
            if transfer.active && transfer.outstanding == 0 {
                transfer.active = false;
                self.active -= 1;
                self.admit();
            }
        } else if transfer.active {
            self.give_turn(id);
        } else if !transfer.queued {
            transfer.queued = true;
            let place = (transfer.spec.priority, Reverse(transfer.sequence), id);
            self.waiting.push(place);
            self.admit();
        }
    }

    /// Gives free places to waiting transfers.
    fn admit(&mut self) {
        while self.active < self.config.transfers_active_max.max(1) {
            let Some((_, _, id)) = self.waiting.pop() else {
                return;
            };
            let Some(transfer) = self.transfers.get_mut(&id) else {
                continue;
            };
            transfer.queued = false;
            if transfer.has_work() && !transfer.active {
                transfer.active = true;
                self.active += 1;
                self.give_turn(id);
            }
        }
    }

    /// Puts a transfer that has work into the next round of its class, unless it has a turn.
    fn give_turn(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if transfer.turn.is_some() {
            return;
        }
        self.tickets += 1;
        self.turns += 1;
        transfer.turn = Some(self.tickets);
        transfer.deficit = u64::from(self.chunk_bytes_max);
        let turn = Turn {
            urgency: transfer.urgency(),
            ticket: self.tickets,
            transfer: id,
        };
        let priority = transfer.spec.priority;
        let place = self.classes.partition_point(|class| class.priority > priority);
        if self.classes.get(place).is_none_or(|class| class.priority != priority) {
            let class = Class {
                priority,
                current: BinaryHeap::new(),
                next: BinaryHeap::new(),
            };
            self.classes.insert(place, class);
        }
        self.classes[place].next.push(Reverse(turn));
    }

    /// Takes a transfer that is being forgotten out of the counts.
    fn leave(&mut self, transfer: &mut Transfer) {
        let spec = &transfer.spec;
        self.writes.remove(&(spec.slot, spec.generation, spec.id));
        if transfer.turn.take().is_some() {
            self.turns -= 1;
        }
        if std::mem::take(&mut transfer.active) {
            self.active -= 1;
        }
    }
}

/// How loaded a lane is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaneLoad {
    /// Bytes sent and not acknowledged.
    pub bytes: u64,
    /// Chunks sent and not acknowledged.
    pub chunks: u32,
    /// Bytes that may be in flight.
    pub window_bytes: u64,
}

impl fmt::Debug for LinkSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkSender")
            .field("transfers", &self.transfers.len())
            .field("active", &self.active)
            .field("turns", &self.turns)
            .field("lanes_up", &self.lanes_up)
            .field("in_doubt", &self.in_doubt())
            .finish_non_exhaustive()
    }
}
