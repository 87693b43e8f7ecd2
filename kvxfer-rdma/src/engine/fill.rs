//! Posting: chunks become work requests, as many as the queue pair and the window take, with one doorbell per batch.

use kvxfer_core::flow::{Chunk, ChunkState, Direction, Payload};
use kvxfer_core::memory::Segment;
use kvxfer_core::mutants::{self, Mutant};

use crate::checksum;
use crate::counters::add;
use crate::error::RdmaError;
use crate::message::{CLOSE_CHUNKS_MAX, ClosedChunk, Closing, LinkMessage, SlotUse};
use crate::staging::BUFFER_BYTES;
use crate::verbs::{Operation, Request, Sge};

use super::Turn;
use super::lane::{Lane, Pair};
use super::staged::{STAGED_MAX, StagedChunk, StagedStep};
use super::work::{Current, Marker, OpenClose, SentChunk, Side, StandsFor};

/// One work request's bytes, at most: 1 MiB.
const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Turns of posting in a row before the engine looks at other lanes and at completions.
const ROUNDS_MAX: usize = 64;

/// The part of a registration from where it was last looked up to its end.
#[derive(Default)]
struct Registration {
    region: u32,
    start: u64,
    end: u64,
    /// Of `start`.
    address: u64,
    key: u32,
}

impl Registration {
    fn new(segment: &Segment, address: u64, key: u32, bytes: u64) -> Registration {
        Registration {
            region: segment.region,
            start: segment.offset,
            end: segment.offset + bytes,
            address,
            key,
        }
    }

    /// A staging buffer.
    fn whole(address: u64, key: u32) -> Registration {
        Registration {
            region: 0,
            start: 0,
            end: BUFFER_BYTES as u64,
            address,
            key,
        }
    }

    #[inline]
    fn covers(&self, region: u32, offset: u64) -> bool {
        region == self.region && (self.start..self.end).contains(&offset)
    }

    #[inline]
    fn address(&self, offset: u64) -> u64 {
        self.address + (offset - self.start)
    }
}

/// A chunk that was begun.
enum Begun {
    /// It can be posted.
    Current(Box<Current>),
    /// It goes through staging first.
    Staged(Box<StagedChunk>),
}

/// How far a chunk could be posted.
enum Step {
    /// All of it.
    Done,
    /// The batch or the queue is full.
    Full,
    /// It must not go on: its blocks were taken back, or nobody wants them any more.
    GivenUp,
}

impl Lane {
    /// Posts what the windows and the queue take, and closes what was posted.
    pub(super) fn fill(&mut self, turn: &mut Turn<'_>) {
        self.advance_staged(turn);
        let fresh = self.half_empty();
        let idle = self.pair.as_ref().is_none_or(|pair| pair.current.is_none());
        if idle && !fresh && !self.has_ready() {
            return;
        }
        let mut more = true;
        for _ in 0..ROUNDS_MAX {
            let Some(pair) = self.pair.as_mut() else { return };
            if pair.current.is_none() && !self.next_chunk(turn, fresh) {
                more = false;
                break;
            }
            let Some(pair) = self.pair.as_mut() else { return };
            let Some(mut current) = pair.current.take() else {
                continue;
            };
            // A place is kept for each close that must follow.
            let reserve = pair.open.len() as i64 + 1;
            match self.step(turn, &mut current, reserve) {
                Step::Done => self.chunk_posted(turn, current),
                Step::GivenUp => self.give_up(turn, current),
                Step::Full => {
                    let (had, room) = (turn.batch.len(), self.room());
                    if let Some(pair) = &mut self.pair {
                        pair.current = Some(current);
                    }
                    if !self.post(turn) {
                        return;
                    }
                    if had == 0 || room <= reserve {
                        // Completions make room, and a turn.
                        more = false;
                        break;
                    }
                }
            }
        }
        self.close_open(turn);
        self.post(turn);
        self.advance_staged(turn);
        self.kicked |= more;
    }

    /// Whether it is worth posting. What is posted together is closed together, and each close costs both sides a
    /// message and the peer a completion: so the window is filled up when half of it is empty, not chunk by chunk.
    fn half_empty(&self) -> bool {
        let load = self.link.sender.lock().lane_load(self.rail);
        load.bytes * 2 <= load.window_bytes
    }

    fn room(&self) -> i64 {
        self.pair.as_ref().map_or(0, |pair| pair.room)
    }

    /// Takes the next chunk that can be posted. False if there is none. New ones are begun only if `fresh`.
    fn next_chunk(&mut self, turn: &mut Turn<'_>, fresh: bool) -> bool {
        loop {
            let Some(pair) = self.pair.as_ref() else { return false };
            if pair.room <= pair.open.len() as i64 + 2 {
                return false;
            }
            let full = pair.staged.len() >= STAGED_MAX;
            if let Some(staged) = self.take_ready() {
                let Some(current) = self.begin_staged(turn, staged) else {
                    continue;
                };
                if let Some(pair) = &mut self.pair {
                    pair.current = Some(current);
                }
                return true;
            }
            if !fresh || full {
                return false;
            }
            let chunk = self.link.sender.lock().next_chunk(self.rail, turn.now);
            let Some(chunk) = chunk else { return false };
            match self.begin(turn, &chunk) {
                Ok(Begun::Current(current)) => {
                    if let Some(pair) = &mut self.pair {
                        pair.current = Some(*current);
                    }
                    return true;
                }
                Ok(Begun::Staged(staged)) => {
                    if let Some(pair) = &mut self.pair {
                        pair.staged.push_back(*staged);
                    }
                }
                Err(state) => {
                    self.link.sender.lock().completed(
                        self.name(),
                        chunk.transfer,
                        chunk.header.name(),
                        state,
                        turn.now,
                    );
                }
            }
        }
    }

    /// Enters the fences that a chunk needs, or says what became of it. One that goes through staging enters them later.
    fn begin(&mut self, turn: &mut Turn<'_>, chunk: &Chunk) -> Result<Begun, ChunkState> {
        let header = chunk.header;
        let link = &self.link;
        let next = self.pair.as_ref().map_or(0, |pair| pair.next);
        let (stream, regions, gate, remote, remote_stream) = match &chunk.payload {
            Payload::Message(message, range) => {
                link.tell(LinkMessage::UserMessage {
                    slot: SlotUse::of(&header),
                    bytes: message[range.clone()].to_vec(),
                });
                // The session does not lose it.
                return Err(ChunkState::Applied);
            }
            Payload::Stream {
                stream,
                regions,
                gate,
                remote: Some((remote, remote_stream)),
            } => (stream, regions, gate, remote, remote_stream),
            Payload::Stream { .. } => {
                tracing::error!(transfer = chunk.transfer.0, "a chunk without the peer's segments");
                return Err(ChunkState::Refused);
            }
        };
        let Some(keys) = link.keys(chunk.transfer) else {
            return Err(ChunkState::Missing);
        };
        if let Err(error) = keys.verify() {
            if let Some(error) = error {
                link.memory_failed(chunk.transfer, error);
            }
            return Err(ChunkState::Missing);
        }
        let direction = remote.direction;
        if direction == Direction::Write && link.outbound.is_revoking(SlotUse::of(&header)) {
            return Err(ChunkState::Refused);
        }
        let needs_bounce = keys.needs_bounce(direction, header.checksummed);
        let needs_landing = keys.needs_landing(direction, header.checksummed);
        if (needs_bounce || needs_landing) && header.length > 0 {
            return Ok(Begun::Staged(Box::new(StagedChunk {
                transfer: chunk.transfer,
                header,
                direction,
                stream: stream.clone(),
                remote: remote_stream.clone(),
                regions: regions.clone(),
                gate: gate.clone(),
                keys,
                needs_bounce,
                needs_landing,
                landing: None,
                exposure: None,
                step: StagedStep::Waiting,
            })));
        }
        let (stream, guard, landed) = match direction {
            // Closed: the transfer is being stopped.
            Direction::Write => (
                stream.clone(),
                Some(gate.enter_owned().ok_or(ChunkState::Missing)?),
                None,
            ),
            Direction::Read => {
                let (stream, regions, guard) = self.begin_read(&header)?;
                let landed = (!keys.plain).then(|| (stream.clone(), regions));
                (stream, guard, landed)
            }
        };
        Ok(Begun::Current(Box::new(Current {
            local: Side::new(stream, &header, turn.scratch.list()),
            remote: Side::new(remote_stream.clone(), &header, turn.scratch.list()),
            posted: 0,
            sent: SentChunk {
                transfer: chunk.transfer,
                header,
                direction,
                whole: false,
                guard,
                bounce: None,
                landing: None,
                landed,
                keys,
                requests: (next, u64::MAX),
            },
        })))
    }

    /// Turns a chunk's segments into work requests until it is done or nothing more fits.
    fn step(&mut self, turn: &mut Turn<'_>, current: &mut Current, reserve: i64) -> Step {
        let Some(pair) = self.pair.as_mut() else {
            return Step::GivenUp;
        };
        let Some(peer) = &pair.peer else { return Step::GivenUp };
        let slot = SlotUse::of(&current.sent.header);
        if current.posted > 0 && self.link.outbound.is_revoking(slot) {
            return Step::GivenUp;
        }
        let device = turn.device;
        let remote_device = self.link.peer_advert.device_of(peer.own_port);
        let (operation, segments_max) = match current.sent.direction {
            Direction::Write => (Operation::Write, device.send_segments as usize),
            Direction::Read => (Operation::Read, device.read_segments as usize),
        };
        let total = current.sent.header.length;
        let mut room = pair.room - reserve;
        // Pieces in a row are mostly in the same registrations: looking them up is most of what a piece costs.
        let (mut near, mut far) = (Registration::default(), Registration::default());
        while current.posted < total {
            if room <= 0 || turn.batch.is_full() || turn.batch.segments_left() < segments_max {
                return Step::Full;
            }
            let Some(remote) = current.remote.peek() else {
                return Step::GivenUp;
            };
            if !far.covers(remote.region, remote.offset) {
                far = match &current.sent.landing {
                    Some(landing) => Registration::whole(landing.address, landing.key),
                    None => {
                        let keys = &current.sent.keys.remote;
                        let Some(place) = keys.locate(remote.region, remote.offset, 1, remote_device) else {
                            return Step::GivenUp;
                        };
                        Registration::new(&remote, place.address, place.rkey, place.until_edge)
                    }
                };
            }
            let wanted = remote
                .length
                .min(far.end - remote.offset)
                .min(REQUEST_BYTES_MAX)
                .min(device.message_bytes_max);
            turn.scratch.gathered.clear();
            let mut gathered = 0;
            while gathered < wanted && turn.scratch.gathered.len() < segments_max {
                let Some(local) = current.local.peek() else { break };
                if !near.covers(local.region, local.offset) {
                    near = match &current.sent.bounce {
                        Some(bounce) => Registration::whole(bounce.address(), bounce.lkey()),
                        None => {
                            let keys = &current.sent.keys.local[local.region as usize];
                            let Some(place) = keys.local(device.index, local.offset) else {
                                return Step::GivenUp;
                            };
                            Registration::new(&local, place.address, place.lkey, place.until_edge)
                        }
                    };
                }
                let length = local.length.min(near.end - local.offset).min(wanted - gathered);
                turn.scratch.gathered.push(Sge {
                    address: near.address(local.offset),
                    length: length as u32,
                    lkey: near.key,
                });
                current.local.take(length);
                gathered += length;
            }
            if gathered == 0 {
                return Step::GivenUp;
            }
            current.remote.take(gathered);
            current.posted += gathered as u32;
            let last_of_read = operation == Operation::Read && current.posted == total;
            let request = Request {
                wr_id: pair.next,
                operation,
                remote_address: far.address(remote.offset),
                rkey: far.key,
                signalled: last_of_read,
                fence: false,
            };
            if !turn.batch.push(request, &turn.scratch.gathered) {
                // It was looked at before: the batch has room for a request with as many segments as can be.
                return Step::GivenUp;
            }
            pair.next += 1;
            pair.unsignalled += 1;
            room -= 1;
            pair.room -= 1;
        }
        Step::Done
    }

    /// All of a chunk is in the batch.
    fn chunk_posted(&mut self, turn: &mut Turn<'_>, mut current: Current) {
        let Some(pair) = &mut self.pair else { return };
        current.sent.whole = true;
        current.sent.requests.1 = pair.next - 1;
        let header = current.sent.header;
        let counters = &self.link.rails[usize::from(self.rail)].counters;
        let posted = match current.sent.direction {
            Direction::Write => &counters.posted_writes,
            Direction::Read => &counters.posted_reads,
        };
        add(posted, header.length.into());
        if current.sent.direction == Direction::Read {
            turn.scratch.recycle(current.local, current.remote);
            pair.mark(StandsFor::Chunk(current.sent));
            return;
        }
        let transfer = current.sent.transfer;
        let place = pair.open.iter().position(|open| open.transfer == transfer);
        let place = place.unwrap_or_else(|| {
            pair.open.push(OpenClose {
                slot: SlotUse::of(&header),
                transfer,
                chunks: turn.scratch.chunk_list(),
                checksum: header.checksummed.then(checksum::new),
            });
            pair.open.len() - 1
        });
        let open = &mut pair.open[place];
        if let (Some(digest), Some(bounce)) = (&mut open.checksum, &current.sent.bounce) {
            bounce.feed(digest, header.length);
        } else if let Some(digest) = &mut open.checksum {
            let keys = &current.sent.keys.local;
            checksum::feed(digest, current.local.stream(), header.offset, header.length, |region| {
                keys.get(region as usize).map(|keys| keys.region())
            });
        }
        turn.scratch.recycle(current.local, current.remote);
        open.chunks.push(current.sent);
        if open.chunks.len() == CLOSE_CHUNKS_MAX {
            let open = pair.open.swap_remove(place);
            self.close_chunks(turn, open);
        }
    }

    /// A chunk is left midway: it counts for nothing once what was posted of it is done.
    fn give_up(&mut self, turn: &mut Turn<'_>, mut current: Current) {
        let Some(pair) = &mut self.pair else { return };
        current.sent.requests.1 = pair.next.saturating_sub(1);
        turn.scratch.recycle(current.local, current.remote);
        // A marker of its own: the work requests before it are complete when it is.
        pair.push_marker(turn, None, StandsFor::Chunk(current.sent));
    }

    /// Closes what is open.
    fn close_open(&mut self, turn: &mut Turn<'_>) {
        while let Some(open) = self.pair.as_mut().and_then(|pair| pair.open.pop()) {
            self.close_chunks(turn, open);
        }
    }

    fn close_chunks(&mut self, turn: &mut Turn<'_>, open: OpenClose) {
        let name = self.name();
        let Some(pair) = &mut self.pair else { return };
        let credit = pair.credits > 0 || mutants::is(Mutant::IgnoreReceiveCredit);
        let immediate = credit && open.slot.fits_immediate();
        let closing = Closing {
            lane: name,
            slot: open.slot,
            close: pair.next_close,
            over_session: !immediate,
            has_message: open.chunks.first().is_some_and(|chunk| chunk.header.has_message),
            checksum: open.checksum.map(|digest| digest.finalize()),
            chunks: open
                .chunks
                .iter()
                .map(|chunk| ClosedChunk {
                    part: chunk.header.part,
                    extent: chunk.header.extent,
                    offset: chunk.header.offset,
                    length: chunk.header.length,
                    landing: chunk.landing.map(|landing| landing.number),
                })
                .collect(),
        };
        if immediate {
            // Only these are told apart by their number: were closes over the session counted too, a later immediate could
            // come to the number of one that is not matched yet.
            pair.next_close = pair.next_close.wrapping_add(1);
        }
        let counters = &self.link.rails[usize::from(self.rail)].counters;
        let chunks = open.chunks;
        if immediate {
            pair.credits = pair.credits.saturating_sub(1);
            add(&counters.closes, 1);
            pair.push_marker(
                turn,
                Some(closing.immediate()),
                StandsFor::Close { chunks, closing: None },
            );
            self.link.tell(LinkMessage::Closing(closing));
        } else {
            add(&counters.closes_over_session, 1);
            let closing = Some(closing);
            pair.push_marker(turn, None, StandsFor::Close { chunks, closing });
        }
    }

    /// Rings the doorbell for what is in the batch. False if the queue pair took not all of it.
    pub(super) fn post(&mut self, turn: &mut Turn<'_>) -> bool {
        if turn.batch.is_empty() {
            return true;
        }
        let Some(pair) = &mut self.pair else {
            turn.batch.clear();
            return false;
        };
        if pair.unsignalled > 0 {
            // So that its completion is known, and with it that of those before it.
            turn.batch.signal_last();
            pair.mark(StandsFor::Part);
        }
        let counters = &self.link.rails[usize::from(self.rail)].counters;
        add(&counters.requests, turn.batch.len() as u64);
        add(&counters.doorbells, 1);
        let Some(queue_pair) = &mut pair.queue_pair else {
            return false;
        };
        if let Err(error) = queue_pair.post_send(turn.batch) {
            pair.torn = true;
            self.fail(RdmaError::from(error.source).into());
            return false;
        }
        true
    }
}

impl Pair {
    /// The last work request is signalled, and stands for this.
    fn mark(&mut self, stands_for: StandsFor) {
        if self.markers.is_empty() {
            // The progress that is waited for begins now, not at the last completion, which may be long ago.
            self.last_progress = crate::clock::now();
        }
        self.markers.push_back(Marker {
            number: self.next - 1,
            requests: self.unsignalled,
            stands_for,
        });
        self.unsignalled = 0;
    }

    /// Adds an empty write, signalled, with or without an immediate.
    pub(super) fn push_marker(&mut self, turn: &mut Turn<'_>, immediate: Option<u32>, stands_for: StandsFor) {
        let Some(peer) = &self.peer else { return };
        if turn.batch.is_full() {
            // Post what is there: a batch is at least as large as what a lane may have outstanding.
            tracing::error!("a batch without room for a marker");
        }
        let request = Request {
            wr_id: self.next,
            operation: immediate.map_or(Operation::Write, Operation::WriteWithImmediate),
            remote_address: peer.probe_address,
            rkey: peer.probe_key,
            signalled: true,
            fence: false,
        };
        turn.batch.push(request, &[]);
        self.next += 1;
        self.unsignalled += 1;
        self.room -= 1;
        self.mark(stands_for);
    }
}
