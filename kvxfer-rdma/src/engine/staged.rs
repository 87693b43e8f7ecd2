//! Chunks that go through staging buffers, at both ends of a rail.
//!
//! A chunk whose bytes this side's device does not have is gathered into a bounce, or read into one and scattered from there.
//! A chunk for memory that the peer's device does not have is written to a *landing* of the peer's, for which it is asked;
//! the close names it, and the peer scatters from it before the chunk counts. A landing belongs to one queue pair: it is
//! given to nobody else before it is closed and emptied, or given back and the device flushed, or the queue pair is fenced.

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{
    Applied, ByteStream, ChunkHeader, ChunkState, Direction, Gate, LaneName, Placement, TransferId,
};
use kvxfer_core::memory::staging::Way;
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{Error, ErrorKind};

use crate::counters::add;
use crate::inbound::Regions;
use crate::message::{Landing, LinkMessage, SlotUse};
use crate::outbound::TransferKeys;
use crate::staging::{Buffer, Copying, Taker, copy};

use super::Turn;
use super::expose::Exposure;
use super::lane::Lane;
use super::work::{Current, SentChunk, Side};

/// Chunks of a lane on their way into staging or waiting there, at most.
pub(super) const STAGED_MAX: usize = 32;
/// Pause before a running copy is looked at again; doubles while nothing ends.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_micros(500);

/// A chunk on its way through staging, before it is posted.
pub(super) struct StagedChunk {
    pub(super) transfer: TransferId,
    pub(super) header: ChunkHeader,
    pub(super) direction: Direction,
    pub(super) stream: Arc<dyn ByteStream>,
    pub(super) remote: Arc<dyn ByteStream>,
    pub(super) regions: Regions,
    pub(super) gate: Arc<Gate>,
    pub(super) keys: Arc<TransferKeys>,
    pub(super) needs_bounce: bool,
    pub(super) needs_landing: bool,
    pub(super) landing: Option<Landing>,
    /// The number of the exposure that the peer was asked for.
    pub(super) exposure: Option<u32>,
    pub(super) step: StagedStep,
}

impl StagedChunk {
    /// Whether it waits for a landing, of which any will do.
    fn lacks_landing(&self) -> bool {
        self.direction == Direction::Write && self.needs_landing && self.landing.is_none()
    }
}

/// How far it is.
pub(super) enum StagedStep {
    /// For a landing, then for a bounce.
    Waiting,
    Gathering(Copying),
    /// It can be posted.
    Ready(Option<Buffer>),
}

/// A copy out of a buffer whose end somebody waits for.
pub(super) struct LaneCopy {
    pub(super) copy: Copying,
    pub(super) header: ChunkHeader,
    /// What is read by this side belongs to a transfer; what the peer wrote does not.
    pub(super) read_by: Option<TransferId>,
}

impl Lane {
    pub(super) fn taker(&self) -> Taker {
        (self.link.id, self.rail)
    }

    /// Whether copies of this lane are running.
    pub(super) fn copying(&self) -> bool {
        let gathering = |chunk: &StagedChunk| matches!(chunk.step, StagedStep::Gathering(_));
        let of_pair = self.pair.as_ref().is_some_and(|pair| {
            pair.staged.iter().any(gathering) || pair.exposures.values().any(Exposure::is_gathering)
        });
        of_pair || !self.copies.is_empty()
    }

    /// A copy was started: domains may hold it back until it is asked for.
    pub(super) fn copy_started(&mut self, turn: &Turn<'_>) {
        self.copies_pause = PAUSE_MIN;
        self.copies_due = Some(turn.now);
    }

    // ------------------------------------------------------------------------------------------------- sending

    /// Whether a staged chunk can be posted.
    pub(super) fn has_ready(&self) -> bool {
        let ready = |chunk: &StagedChunk| matches!(chunk.step, StagedStep::Ready(_));
        self.pair.as_ref().is_some_and(|pair| pair.staged.iter().any(ready))
    }

    /// The next staged chunk that can be posted.
    pub(super) fn take_ready(&mut self) -> Option<StagedChunk> {
        let pair = self.pair.as_mut()?;
        let ready = |chunk: &StagedChunk| matches!(chunk.step, StagedStep::Ready(_));
        let place = pair.staged.iter().position(ready)?;
        pair.staged.remove(place)
    }

    /// Moves chunks on that wait for landings and bounces.
    pub(super) fn advance_staged(&mut self, turn: &mut Turn<'_>) {
        if self.pair.as_ref().is_none_or(|pair| pair.staged.is_empty()) {
            return;
        }
        self.sweep_staged(turn);
        self.ask_for_landings();
        self.ask_for_exposures(turn);
        let taker = self.taker();
        let (mut started, mut wants) = (false, false);
        let Some(pair) = &mut self.pair else { return };
        for chunk in &mut pair.staged {
            let waits = matches!(chunk.step, StagedStep::Waiting);
            // The landing comes first: whoever holds a bounce can go on.
            if !waits || (chunk.needs_landing && chunk.landing.is_none()) {
                continue;
            }
            if !chunk.needs_bounce {
                chunk.step = StagedStep::Ready(None);
                self.kicked = true;
                continue;
            }
            match turn.staging.bounces.take(taker) {
                Ok(Some(buffer)) => {
                    chunk.step = match chunk.direction {
                        Direction::Read => StagedStep::Ready(Some(buffer)),
                        Direction::Write => match chunk.gate.enter_owned() {
                            Some(guard) => {
                                started = true;
                                let range = (&*chunk.stream, chunk.header.offset, chunk.header.length);
                                let regions = chunk.regions.clone();
                                StagedStep::Gathering(copy(Way::Gather, regions, range, buffer, guard))
                            }
                            // Closed: the sweep finds it.
                            None => StagedStep::Waiting,
                        },
                    };
                    self.kicked = true;
                }
                Ok(None) => {
                    wants = true;
                    break;
                }
                Err(error) => {
                    self.link.fail(error);
                    break;
                }
            }
        }
        if !wants {
            turn.staging.bounces.withdraw(taker);
        }
        if started {
            self.copy_started(turn);
        }
    }

    /// Gives up what must not go on: its blocks were taken back, or the peer's slot was.
    fn sweep_staged(&mut self, turn: &Turn<'_>) {
        let Some(pair) = &mut self.pair else { return };
        let outbound = &self.link.outbound;
        let mut over = Vec::new();
        let mut index = 0;
        while let Some(chunk) = pair.staged.get(index) {
            let revoked = chunk.direction == Direction::Write && outbound.is_revoking(SlotUse::of(&chunk.header));
            let running = matches!(chunk.step, StagedStep::Gathering(_));
            if running || !(revoked || chunk.gate.is_closed()) {
                index += 1;
                continue;
            }
            let state = if revoked {
                ChunkState::Refused
            } else {
                ChunkState::Missing
            };
            over.extend(pair.staged.remove(index).map(|chunk| (chunk, state)));
        }
        for (chunk, state) in over {
            self.give_up_staged(turn, chunk, state);
        }
    }

    /// A chunk that was never posted.
    pub(super) fn give_up_staged(&mut self, turn: &Turn<'_>, chunk: StagedChunk, state: ChunkState) {
        match chunk.direction {
            Direction::Write => self.landing_unused(chunk.landing),
            Direction::Read => self.exposure_unused(chunk.exposure),
        }
        let (transfer, name) = (chunk.transfer, chunk.header.name());
        drop(chunk);
        let mut sender = self.link.sender.lock();
        sender.completed(self.name(), transfer, name, state, turn.now);
    }

    /// Gives a landing of the peer's back, which nothing is on its way to.
    pub(super) fn landing_unused(&self, landing: Option<Landing>) {
        if let Some(landing) = landing {
            self.link.tell(LinkMessage::LandingsUnused {
                lane: self.name(),
                landings: vec![landing.number],
            });
        }
    }

    fn ask_for_landings(&mut self) {
        let lane = self.name();
        let Some(pair) = &mut self.pair else { return };
        let lacking = |chunk: &&StagedChunk| chunk.lacks_landing();
        let lacking = pair.staged.iter().filter(lacking).count() as u32;
        if let Some(count) = lacking.checked_sub(pair.landings_asked).filter(|count| *count > 0) {
            pair.landings_asked = lacking;
            self.link.tell(LinkMessage::LandingWanted { lane, count });
        }
    }

    /// The peer gives landings.
    pub(super) fn landings_given(&mut self, lane: LaneName, landings: Vec<Landing>) {
        if lane != self.name() {
            // Of a queue pair that is gone: with it they are the peer's again.
            return;
        }
        let Some(pair) = &mut self.pair else { return };
        let mut unused = Vec::new();
        for landing in landings {
            pair.landings_asked = pair.landings_asked.saturating_sub(1);
            let mut chunks = pair.staged.iter_mut();
            match chunks.find(|chunk| chunk.lacks_landing()) {
                Some(chunk) => chunk.landing = Some(landing),
                None => unused.push(landing.number),
            }
        }
        if !unused.is_empty() {
            self.link.tell(LinkMessage::LandingsUnused { lane, landings: unused });
        }
        self.kicked = true;
    }

    /// A staged chunk is posted now. `None` if it came to an end instead.
    pub(super) fn begin_staged(&mut self, turn: &mut Turn<'_>, mut chunk: StagedChunk) -> Option<Current> {
        let next = self.pair.as_ref().map_or(0, |pair| pair.next);
        let header = chunk.header;
        let StagedStep::Ready(bounce) = std::mem::replace(&mut chunk.step, StagedStep::Waiting) else {
            return None;
        };
        let mut landed = None;
        let guard = match chunk.direction {
            // Its bytes have left their blocks.
            Direction::Write if bounce.is_some() => None,
            Direction::Write => match chunk.gate.enter_owned() {
                Some(guard) => Some(guard),
                None => {
                    self.give_up_staged(turn, chunk, ChunkState::Missing);
                    return None;
                }
            },
            Direction::Read => match self.begin_read(&header) {
                Ok((stream, regions, guard)) => {
                    landed = Some((stream, regions));
                    guard
                }
                Err(state) => {
                    self.give_up_staged(turn, chunk, state);
                    return None;
                }
            },
        };
        let list = turn.scratch.list();
        let local = match (&bounce, &landed) {
            (Some(_), _) => Side::dense(chunk.stream, &header, list),
            (None, Some((stream, _))) => Side::new(stream.clone(), &header, list),
            (None, None) => Side::new(chunk.stream, &header, list),
        };
        let list = turn.scratch.list();
        let remote = match chunk.landing {
            Some(_) => Side::dense(chunk.remote, &header, list),
            None => Side::new(chunk.remote, &header, list),
        };
        Some(Current {
            local,
            remote,
            posted: 0,
            sent: SentChunk {
                transfer: chunk.transfer,
                header,
                direction: chunk.direction,
                whole: false,
                guard,
                bounce,
                landing: chunk.landing,
                landed,
                keys: chunk.keys,
                requests: (next, u64::MAX),
            },
        })
    }

    /// What was read is in its bounce: it goes from there into its blocks, and then counts.
    pub(super) fn scatter_read(&mut self, turn: &Turn<'_>, mut chunk: SentChunk) {
        let (Some(buffer), Some(guard), Some((stream, regions))) =
            (chunk.bounce.take(), chunk.guard.take(), chunk.landed.take())
        else {
            return;
        };
        let range = (&*stream, chunk.header.offset, chunk.header.length);
        self.copies.push(LaneCopy {
            copy: copy(Way::Scatter, regions, range, buffer, guard),
            header: chunk.header,
            read_by: Some(chunk.transfer),
        });
        self.copy_started(turn);
    }

    // -------------------------------------------------------------------------------------------------- copies

    /// Looks at the copies that run, and acts on those that have ended.
    pub(super) fn poll_copies(&mut self, turn: &mut Turn<'_>) {
        if !self.copying() {
            self.copies_due = None;
            return;
        }
        let mut ended = self.poll_gathers(turn);
        ended |= self.poll_exposures();
        let mut index = 0;
        while let Some(running) = self.copies.get_mut(index) {
            let result = running.copy.poll();
            let result = result.or_else(|| mutants::is(Mutant::CountBeforeScattered).then(|| running.copy.abandon()));
            match result {
                None => index += 1,
                Some(result) => {
                    let copy = self.copies.swap_remove(index);
                    self.copy_ended(turn, copy, result);
                    ended = true;
                }
            }
        }
        if !self.copying() {
            self.copies_due = None;
            return;
        }
        self.copies_pause = match ended {
            true => PAUSE_MIN,
            false => (self.copies_pause * 2).min(PAUSE_MAX),
        };
        self.copies_due = Some(turn.now + self.copies_pause);
    }

    /// True if one has ended.
    fn poll_gathers(&mut self, turn: &Turn<'_>) -> bool {
        let Some(pair) = &mut self.pair else { return false };
        let (mut ended, mut quiet) = (false, false);
        let mut failed = Vec::new();
        let mut index = 0;
        while let Some(chunk) = pair.staged.get_mut(index) {
            index += 1;
            let StagedStep::Gathering(copy) = &mut chunk.step else {
                continue;
            };
            let result = copy.poll();
            let result = result.or_else(|| mutants::is(Mutant::SendBeforeGathered).then(|| copy.abandon()));
            let Some(result) = result else { continue };
            ended = true;
            let StagedStep::Gathering(copy) = std::mem::replace(&mut chunk.step, StagedStep::Waiting) else {
                continue;
            };
            let (buffer, fenced) = copy.finish();
            quiet |= fenced;
            match result {
                Ok(()) => chunk.step = StagedStep::Ready(Some(buffer)),
                Err(error) => {
                    index -= 1;
                    failed.extend(pair.staged.remove(index).map(|chunk| (chunk, error)));
                }
            }
        }
        for (chunk, error) in failed {
            self.link.memory_failed(chunk.transfer, error);
            self.give_up_staged(turn, chunk, ChunkState::Missing);
        }
        if quiet {
            self.link.emit(LinkEvent::SlotQuiet);
        }
        ended
    }

    fn copy_ended(&mut self, turn: &Turn<'_>, copy: LaneCopy, result: kvxfer_core::Result<()>) {
        let LaneCopy { copy, header, read_by } = copy;
        let link = &self.link;
        let slot = SlotUse::of(&header);
        // Outside before it is counted: counting may end the slot.
        let (buffer, fenced) = copy.finish();
        drop(buffer);
        let state = match result {
            Ok(()) => {
                let applied = link.slots.applied(&header);
                let counters = &link.rails[usize::from(self.rail)].counters;
                match read_by {
                    Some(_) => {
                        if applied == Applied::Arrived {
                            link.emit(LinkEvent::SlotArrived {
                                slot: slot.slot,
                                generation: slot.generation,
                            });
                        }
                    }
                    None => {
                        add(&counters.received_bytes, header.length.into());
                        if applied == Applied::Arrived {
                            link.slot_arrived(slot);
                        }
                    }
                }
                applied.acknowledgement()
            }
            Err(error) => {
                link.slots.abandon(&header);
                link.memory_of_slot_failed(slot, error);
                ChunkState::Refused
            }
        };
        if fenced {
            link.emit(LinkEvent::SlotQuiet);
        }
        if let Some(transfer) = read_by {
            let mut sender = link.sender.lock();
            sender.completed(self.name(), transfer, header.name(), state, turn.now);
        }
    }

    /// Copies that do not end: whoever waits for them is told, and neither their buffers nor their blocks are used again.
    pub(super) fn give_up_copies(&mut self) {
        let hung = || {
            Error::new(
                ErrorKind::ResourceExhausted,
                "a copy between a device's memory and staging",
            )
            .at("rdma")
            .because("it has not ended")
            .remedy("see the device's log; its blocks are quarantined until the process ends")
        };
        let mut transfers: Vec<TransferId> = Vec::new();
        if let Some(pair) = &mut self.pair {
            let running = |chunk: &StagedChunk| matches!(chunk.step, StagedStep::Gathering(_));
            transfers.extend(
                pair.staged
                    .iter()
                    .filter(|chunk| running(chunk))
                    .map(|chunk| chunk.transfer),
            );
            pair.staged.retain(|chunk| !running(chunk));
            // Nobody here waits for these: the peer loses the rail with them.
            pair.exposures.retain(|_, exposure| !exposure.is_gathering());
        }
        for copy in std::mem::take(&mut self.copies) {
            transfers.extend(copy.read_by);
            self.link.memory_of_slot_failed(SlotUse::of(&copy.header), hung());
        }
        for transfer in transfers {
            self.link.memory_failed(transfer, hung());
        }
        self.copies_due = None;
    }
}

impl Lane {
    /// Takes a chunk's place in the slot that it is read into, and enters the slot's gate.
    pub(super) fn begin_read(&self, header: &ChunkHeader) -> Result<ReadPlace, ChunkState> {
        let link = &self.link;
        match link.slots.begin(link.peer.incarnation, header) {
            Ok(Placement::Place { stream, regions, gate }) => {
                let guard = gate.enter_owned();
                if guard.is_none() && !mutants::is(Mutant::ReadWithoutGate) {
                    link.slots.abandon(header);
                    return Err(ChunkState::Refused);
                }
                let guard = guard.filter(|_| !mutants::is(Mutant::ReadWithoutGate));
                Ok((stream, regions, guard))
            }
            Ok(Placement::Scrap(state)) => Err(state),
            Ok(Placement::Message) => Err(ChunkState::Refused),
            Err(error) => {
                tracing::error!(%error, slot = %header.slot, "a read that its own slot does not take");
                Err(ChunkState::Refused)
            }
        }
    }
}

/// Where a chunk is read to, and the fence of that.
pub(super) type ReadPlace = (Arc<dyn ByteStream>, Regions, Option<kvxfer_core::flow::OwnedGateGuard>);
