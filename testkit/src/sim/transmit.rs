//! What a lane's thread does: one bounded call at a time, passing the gates as a transport's threads must.
//!
//! A chunk is sent in pieces and placed in pieces, at different virtual times. A piece's call begins by entering the
//! gate; its bytes are copied when the call ends, which may be much later (the thread was not running). That is the
//! worst that a kernel can do to an engine that reuses blocks, and what fences are for.

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{
    Applied, ByteStream, Chunk, ChunkHeader, ChunkName, ChunkState, Gate, MESSAGE_PART, OwnedGateGuard, Payload,
    Placement, SlotTable,
};
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::wire::lane::{HEADER_BYTES, LaneHeader, TRAILER_BYTES, Trailer};
use kvxfer_core::{Error, ErrorKind};

use super::coverage::Point;
use super::lanes::{LaneIndex, LinkIndex};
use super::ledger::What;
use super::memory::{FILLER, Stamp};
use super::workload::{AppEvent, Early};
use super::world::{Event, World};
use crate::rng::mix;

/// Items that a socket's buffers hold; beyond, the sender's call would block.
const SOCKET_ITEMS: usize = 12;

/// Part numbers from here on are forged.
const FORGED_PART: u32 = 1 << 24;

/// What travels on a lane.
pub(crate) enum Item {
    /// A header in wire form.
    Header([u8; HEADER_BYTES]),
    /// Payload, with a hidden stamp per byte that says whose it is. The stamps are the oracle's: nothing in the
    /// system under test sees them.
    Bytes(Vec<u8>, Vec<Stamp>),
    /// A trailer in wire form.
    Trailer([u8; TRAILER_BYTES]),
}

impl Item {
    pub(crate) fn is_ack(&self) -> bool {
        matches!(self, Item::Header(bytes) if matches!(LaneHeader::decode(bytes), Ok(LaneHeader::Ack(..))))
    }

    /// Whether it carries bytes with such a stamp.
    pub(crate) fn is_payload_of(&self, owned: &dyn Fn(&Stamp) -> bool) -> bool {
        matches!(self, Item::Bytes(_, stamps) if stamps.first().is_some_and(owned))
    }
}

/// A chunk being sent.
pub(crate) struct Sending {
    pub(crate) chunk: Chunk,
    sent: u32,
    checksum: u64,
}

/// A chunk being received.
pub(crate) struct Receiving {
    header: ChunkHeader,
    to: To,
    done: u32,
    checksum: u64,
}

impl Receiving {
    /// The lane is lost in the middle of it.
    pub(crate) fn abandon(&self, slots: &SlotTable) {
        if matches!(self.to, To::Memory { .. }) {
            slots.abandon(&self.header);
        }
    }
}

enum To {
    Memory {
        stream: Arc<dyn ByteStream>,
        regions: Arc<[Arc<Region>]>,
        gate: Arc<Gate>,
        /// The gate was found closed: the rest goes to scrap.
        cut: bool,
    },
    Message(Vec<u8>),
    Scrap(ChunkState),
}

/// A call the thread is inside of, holding a gate.
pub(crate) enum Call {
    Send {
        guard: OwnedGateGuard,
        length: u32,
    },
    Place {
        guard: OwnedGateGuard,
        bytes: Vec<u8>,
        stamps: Vec<Stamp>,
    },
}

impl World {
    /// The thread looks at its socket: what can be read, what can be written.
    pub(crate) fn lane_step(&mut self, lane: LaneIndex, end: usize) {
        let receive_first = self.rng.percent(50);
        for turn in 0..2 {
            let progressed = if (turn == 0) == receive_first {
                self.receive_step(lane, end)
            } else {
                self.send_step(lane, end)
            };
            let side = &self.lanes[lane].ends[end];
            if !side.up || side.call.is_some() || self.failed() {
                return;
            }
            if progressed {
                let at = self.now + Duration::from_nanos(self.rng.within(200..2_000));
                self.wake_lane(lane, end, at);
                return;
            }
        }
        // Nothing to do: woken by what arrives, or by new work.
        if let Some(ready) = self.lanes[lane].pipes[1 - end].next_ready() {
            self.wake_lane(lane, end, ready.max(self.now));
        }
    }

    /// A call returns: now its bytes are copied, and its gate is left.
    pub(crate) fn lane_call_ends(&mut self, lane: LaneIndex, end: usize) {
        match self.lanes[lane].ends[end].call.take() {
            Some(Call::Send { guard, length }) => self.end_send(lane, end, guard, length),
            Some(Call::Place { guard, bytes, stamps }) => self.end_place(lane, end, guard, &bytes, &stamps),
            None => return,
        }
        self.after_call(lane, end);
        self.wake_lane(lane, end, self.now);
    }

    fn send_step(&mut self, lane: LaneIndex, end: usize) -> bool {
        if self.lanes[lane].pipes[end].len() >= SOCKET_ITEMS {
            return false;
        }
        if self.lanes[lane].ends[end].sending.is_some() {
            self.send_piece(lane, end);
            return true;
        }
        if let Some((name, state)) = self.lanes[lane].ends[end].acks.pop_front() {
            self.put(lane, end, Item::Header(LaneHeader::Ack(name, state).encode()));
            return true;
        }
        let (Some(link), index) = (self.lanes[lane].ends[end].link, self.lanes[lane].name.index) else {
            return false;
        };
        let now = self.now;
        let Some(chunk) = self.links[link].sender.next_chunk(index, now) else {
            return false;
        };
        self.drain_sender(link);
        self.trace(|| {
            let header = &chunk.header;
            format!(
                "lane {lane} end {end} begins chunk slot {}.{} part {} at {}+{}",
                header.slot, header.generation, header.part, header.offset, header.length
            )
        });
        if chunk.header.checksummed {
            self.coverage.reach(Point::Checksummed);
        }
        self.note_chunk(link, index, &chunk);
        self.put(lane, end, Item::Header(LaneHeader::Chunk(chunk.header).encode()));
        self.lanes[lane].ends[end].sending = Some(Sending {
            chunk,
            sent: 0,
            checksum: 0,
        });
        true
    }

    /// Begins the next call for the chunk, or ends the chunk.
    fn send_piece(&mut self, lane: LaneIndex, end: usize) {
        let Some(sending) = self.lanes[lane].ends[end].sending.as_mut() else {
            return;
        };
        let left = sending.chunk.header.length - sending.sent;
        if left == 0 {
            let trailer = Trailer {
                valid: true,
                checksum: sending.checksum,
            };
            self.end_chunk(lane, end, trailer);
            return;
        }
        match &sending.chunk.payload {
            Payload::Message(bytes, range) => {
                let bytes = bytes[range.clone()].to_vec();
                sending.sent = sending.chunk.header.length;
                sending.checksum = checksum(0, &bytes);
                let stamps = vec![FILLER; bytes.len()];
                self.put(lane, end, Item::Bytes(bytes, stamps));
            }
            Payload::Stream { gate, .. } => match gate.enter_owned() {
                Some(guard) => {
                    let length = 1 + self.rng.below(u64::from(left)) as u32;
                    let length = if self.rng.percent(50) { left } else { length };
                    self.end_midway(lane, end);
                    self.begin_call(lane, end, Call::Send { guard, length });
                }
                None => {
                    let stamp = self.stamp_of_transfer(lane, end);
                    self.coverage.reach(Point::ChunkInvalid);
                    self.put(
                        lane,
                        end,
                        Item::Bytes(vec![0; left as usize], vec![stamp; left as usize]),
                    );
                    self.end_chunk(
                        lane,
                        end,
                        Trailer {
                            valid: false,
                            checksum: 0,
                        },
                    );
                }
            },
        }
    }

    fn end_chunk(&mut self, lane: LaneIndex, end: usize, trailer: Trailer) {
        let sent = self.lanes[lane].ends[end].sending.take();
        self.put(lane, end, Item::Trailer(trailer.encode()));
        if let Some(sent) = sent
            && trailer.valid
            && self.rng.below(10_000) < self.profile.forge_permyriad
        {
            self.forge_chunk(lane, end, sent.chunk.header);
        }
    }

    /// A peer that breaks the protocol sends the chunk again, with other bytes, as one of another part.
    fn forge_chunk(&mut self, lane: LaneIndex, end: usize, mut header: ChunkHeader) {
        if header.part == MESSAGE_PART || header.length == 0 {
            return;
        }
        header.part += FORGED_PART;
        header.checksummed = false;
        let bytes = vec![0xF0; header.length as usize];
        let stamps = vec![FILLER; bytes.len()];
        let trailer = Trailer {
            valid: true,
            checksum: 0,
        };
        self.put(lane, end, Item::Header(LaneHeader::Chunk(header).encode()));
        self.put(lane, end, Item::Bytes(bytes, stamps));
        self.put(lane, end, Item::Trailer(trailer.encode()));
    }

    /// Now and then the application takes a source back just while a thread reads it.
    fn end_midway(&mut self, lane: LaneIndex, end: usize) {
        if self.rng.below(10_000) >= self.profile.midway_permyriad {
            return;
        }
        let stamp = self.stamp_of_transfer(lane, end);
        let Some(serial) = self
            .stamps
            .get(stamp as usize)
            .map(|of| of.serial)
            .filter(|serial| *serial != 0)
        else {
            return;
        };
        let node = self.lanes[lane].ends[end].node;
        let how = if matches!(self.ledger[serial as usize].what, What::Offer(_)) && self.rng.percent(50) {
            Early::Retract
        } else {
            Early::Cancel
        };
        self.coverage.reach(Point::EndedMidway);
        self.app_at(self.now, node, AppEvent::EndEarly { serial, how });
    }

    fn begin_call(&mut self, lane: LaneIndex, end: usize, call: Call) {
        let long = self.rng.below(10_000);
        let stuck = self.profile.stuck_permyriad;
        let duration = if long < stuck {
            Duration::from_millis(self.rng.within(200..3_500))
        } else if long < stuck + 200 {
            Duration::from_micros(self.rng.within(200..20_000))
        } else {
            Duration::from_nanos(self.rng.within(500..20_000))
        };
        self.lanes[lane].ends[end].call = Some(call);
        self.queue.push(self.now + duration, Event::LaneCallEnds { lane, end });
    }

    fn end_send(&mut self, lane: LaneIndex, end: usize, guard: OwnedGateGuard, length: u32) {
        let Some(sending) = self.lanes[lane].ends[end].sending.as_ref() else {
            return;
        };
        let Payload::Stream { stream, regions, .. } = &sending.chunk.payload else {
            return;
        };
        let (stream, regions) = (Arc::clone(stream), Arc::clone(regions));
        let transfer = sending.chunk.transfer;
        let offset = sending.chunk.header.offset + u64::from(sending.sent);
        let node = self.lanes[lane].ends[end].node;
        let (bytes, stamps) = self.read_source(node, &*stream, &regions, offset, u64::from(length));
        if bytes.len() != length as usize {
            self.fail(
                "plan",
                format!("a source stream gave {} of {length} bytes at {offset}", bytes.len()),
            );
            return;
        }
        if let Some(link) = self.lanes[lane].ends[end].link {
            self.note_stamp(link, transfer, stamps[0]);
            if guard.leave() {
                self.coverage.reach(Point::GateHeld);
                self.report(link, LinkEvent::SlotQuiet);
                self.gates_left(node);
            }
        }
        if let Some(sending) = self.lanes[lane].ends[end].sending.as_mut() {
            sending.sent += length;
            sending.checksum = checksum(sending.checksum, &bytes);
        }
        self.put(lane, end, Item::Bytes(bytes, stamps));
    }

    fn put(&mut self, lane: LaneIndex, end: usize, mut item: Item) {
        let (from, to) = (self.lanes[lane].ends[end].node, self.lanes[lane].ends[1 - end].node);
        let delay = self.lane_delay(from, to, lane);
        if let Item::Bytes(bytes, stamps) = &mut item
            && self.rng.below(10_000) < self.profile.corrupt_permyriad
            && self.lanes[lane].ends[end]
                .sending
                .as_ref()
                .is_some_and(|sending| sending.chunk.header.checksummed)
        {
            let at = self.rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 0x40;
            stamps[at] = FILLER;
        }
        if let Some(ready) = self.lanes[lane].pipes[end].put(self.now + delay, item)
            && self.lanes[lane].ends[1 - end].up
        {
            self.wake_lane(lane, 1 - end, ready);
        }
    }

    fn receive_step(&mut self, lane: LaneIndex, end: usize) -> bool {
        let now = self.now;
        let full = self.lanes[lane].pipes[1 - end].len() >= SOCKET_ITEMS;
        let Some(item) = self.lanes[lane].pipes[1 - end].take(now) else {
            return false;
        };
        if full && self.lanes[lane].ends[1 - end].up {
            // The peer's call finds room again.
            self.wake_lane(lane, 1 - end, now);
        }
        match item {
            Item::Header(bytes) => self.receive_header(lane, end, &bytes),
            Item::Bytes(bytes, stamps) => self.receive_bytes(lane, end, bytes, stamps),
            Item::Trailer(bytes) => self.receive_trailer(lane, end, &bytes),
        }
        true
    }

    fn receive_header(&mut self, lane: LaneIndex, end: usize, bytes: &[u8; HEADER_BYTES]) {
        let Some(link) = self.lanes[lane].ends[end].link else {
            return;
        };
        match LaneHeader::decode(bytes) {
            Ok(LaneHeader::Ack(name, state)) => {
                let (lane_name, now) = (self.lanes[lane].name, self.now);
                self.trace(|| format!("lane {lane} end {end} is told {name:?} {state:?}"));
                self.links[link].sender.acknowledged(lane_name, name, state, now);
                self.drain_sender(link);
                self.wake_link(link);
            }
            Ok(LaneHeader::Chunk(header)) => self.begin_chunk(lane, end, link, header),
            Ok(header) => self.fail("wire", format!("nobody here refers to memory: {header:?}")),
            Err(error) => self.fail("wire", format!("a lane header does not come back: {error}")),
        }
    }

    fn begin_chunk(&mut self, lane: LaneIndex, end: usize, link: LinkIndex, header: ChunkHeader) {
        let node = self.lanes[lane].ends[end].node;
        let from = self.links[link].peer.incarnation;
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let to = match body.slots.begin(from, &header) {
            Ok(Placement::Place { stream, regions, gate }) => To::Memory {
                stream,
                regions,
                gate,
                cut: false,
            },
            Ok(Placement::Message) => To::Message(Vec::new()),
            Ok(Placement::Scrap(state)) => {
                self.coverage.reach(Point::ChunkScrapped);
                To::Scrap(state)
            }
            Err(error) if header.part >= FORGED_PART && header.part != MESSAGE_PART => {
                self.coverage.reach(Point::Forged);
                self.close_lane(lane, end, error);
                return;
            }
            Err(error) => {
                self.fail("protocol", format!("an honest chunk is refused: {error}"));
                return;
            }
        };
        self.lanes[lane].ends[end].receiving = Some(Receiving {
            header,
            to,
            done: 0,
            checksum: 0,
        });
    }

    fn receive_bytes(&mut self, lane: LaneIndex, end: usize, mut bytes: Vec<u8>, mut stamps: Vec<Stamp>) {
        let split = self
            .rng
            .percent(40)
            .then(|| 1 + self.rng.below(bytes.len() as u64) as usize);
        let now = self.now;
        let Some(receiving) = self.lanes[lane].ends[end].receiving.as_mut() else {
            return;
        };
        match &mut receiving.to {
            To::Message(message) => message.extend_from_slice(&bytes),
            To::Scrap(_) => {}
            To::Memory { cut: true, .. } => {}
            To::Memory { gate, cut, .. } => match gate.enter_owned() {
                Some(guard) => {
                    if let Some(split) = split
                        && split < bytes.len()
                    {
                        let rest = Item::Bytes(bytes.split_off(split), stamps.split_off(split));
                        self.lanes[lane].pipes[1 - end].put_back(now, rest);
                    }
                    self.begin_call(lane, end, Call::Place { guard, bytes, stamps });
                    return;
                }
                None => {
                    *cut = true;
                    self.coverage.reach(Point::PlacementCut);
                }
            },
        }
        receiving.done += bytes.len() as u32;
        receiving.checksum = checksum(receiving.checksum, &bytes);
    }

    fn end_place(&mut self, lane: LaneIndex, end: usize, guard: OwnedGateGuard, bytes: &[u8], stamps: &[Stamp]) {
        let node = self.lanes[lane].ends[end].node;
        let Some(receiving) = self.lanes[lane].ends[end].receiving.as_mut() else {
            return;
        };
        let To::Memory { stream, regions, .. } = &receiving.to else {
            return;
        };
        let (stream, regions) = (Arc::clone(stream), Arc::clone(regions));
        let offset = receiving.header.offset + u64::from(receiving.done);
        receiving.done += bytes.len() as u32;
        receiving.checksum = checksum(receiving.checksum, bytes);
        self.write_destination(node, &*stream, &regions, offset, bytes, stamps);
        let link = self.lanes[lane].ends[end].link;
        if guard.leave()
            && let Some(link) = link
        {
            self.coverage.reach(Point::GateHeld);
            self.report(link, LinkEvent::SlotQuiet);
            self.gates_left(node);
        }
    }

    fn receive_trailer(&mut self, lane: LaneIndex, end: usize, bytes: &[u8; TRAILER_BYTES]) {
        let trailer = match Trailer::decode(bytes) {
            Ok(trailer) => trailer,
            Err(error) => {
                self.fail("wire", format!("a trailer does not come back: {error}"));
                return;
            }
        };
        let node = self.lanes[lane].ends[end].node;
        let (Some(receiving), Some(link)) = (
            self.lanes[lane].ends[end].receiving.take(),
            self.lanes[lane].ends[end].link,
        ) else {
            return;
        };
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let slots = Arc::clone(&body.slots);
        let header = receiving.header;
        let corrupt = header.checksummed
            && trailer.valid
            && trailer.checksum != receiving.checksum
            && !matches!(receiving.to, To::Memory { cut: true, .. } | To::Scrap(_));
        if corrupt {
            self.coverage.reach(Point::Corrupted);
            let error = Error::new(ErrorKind::Corrupt, "a chunk's payload")
                .at(format!("lane {:?}", self.lanes[lane].name))
                .because("its checksum is not the sender's");
            if matches!(receiving.to, To::Memory { .. }) {
                slots.abandon(&header);
            }
            slots.corrupt(header.slot, header.generation);
            self.report(
                link,
                LinkEvent::SlotCorrupt {
                    slot: header.slot,
                    generation: header.generation,
                    error: error.clone(),
                },
            );
            self.close_lane(lane, end, error);
            return;
        }
        let scrap = matches!(receiving.to, To::Scrap(_));
        let state = match receiving.to {
            To::Scrap(state) => state,
            To::Message(_) if !trailer.valid => ChunkState::Missing,
            To::Message(message) => slots.message_applied(&header, &message).acknowledgement(),
            To::Memory { cut, .. } => {
                let state = slots.placed(&header, trailer.valid && !cut);
                if cut { ChunkState::Refused } else { state }
            }
        };
        self.trace(|| format!("lane {lane} end {end} answers {:?} {state:?}", name_of(&header)));
        self.lanes[lane].ends[end].acks.push_back((name_of(&header), state));
        self.arrivals_seen(node);
        if state == Applied::Arrived.acknowledgement() && !scrap {
            self.report(
                link,
                LinkEvent::SlotArrived {
                    slot: header.slot,
                    generation: header.generation,
                },
            );
        }
    }
}

/// The segments of a stretch of a stream.
pub(crate) fn segments_of(stream: &dyn ByteStream, offset: u64, length: u64) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut covered = 0;
    while covered < length {
        let got = stream.segments(offset + covered, length - covered, segments.len() + 8, &mut segments);
        if got == 0 {
            break;
        }
        covered += got;
    }
    segments
}

fn name_of(header: &ChunkHeader) -> ChunkName {
    ChunkName {
        slot: header.slot,
        generation: header.generation,
        part: header.part,
        offset: header.offset,
        length: header.length,
    }
}

fn checksum(sum: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(sum, |sum, byte| mix(sum ^ u64::from(*byte)))
}
