//! The receiving half of a lane: headers are checked, payload is scattered straight into the granted blocks.

mod copies;
mod references;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use kvxfer_core::flow::{ChunkHeader, ChunkName, ChunkState, LaneName, MESSAGE_BYTES_MAX, Placement};
use kvxfer_core::memory::Segment;
use kvxfer_core::memory::staging::needs_staging;
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::wire::lane::{HEADER_BYTES, LaneHeader, TRAILER_BYTES, Trailer};
use kvxfer_core::{Error, ErrorKind};

use crate::counters::{DirectionCounters, add};
use crate::error::TcpError;
use crate::link::LinkCore;
use crate::look_ahead::{LOOK_AHEAD_BYTES, LookAhead};
use crate::placed::{Placed, copy_into, digest_pieces, scatter};
use crate::staging::{StagingBuffer, StagingPool};
use crate::sys;
use copies::{End, SCATTERS_MAX, Scatter};
use references::{Body, BodyOf, References};

/// Up to this much payload left, a call reads as far ahead as it can: small chunks come in bunches.
const BUNCH_BYTES: u32 = 32 << 10;
/// What is read and thrown away goes here, over and over.
pub(crate) const SCRAP_BYTES: usize = 64 << 10;

/// The receiving half of a lane. Only its data thread touches it.
pub(crate) struct Reader {
    socket: Arc<OwnedFd>,
    lane: LaneName,
    ahead: LookAhead,
    chunk: Option<InChunk>,
    /// What follows a header that is no chunk's bytes.
    body: Option<Body>,
    scatters: VecDeque<Scatter>,
    /// Those of them that have not been polled.
    fresh: usize,
    references: References,
    /// The socket may have more.
    pub(crate) readable: bool,
    /// The connection is ending: its end is still to be read.
    pub(crate) ending: bool,
    /// A staging buffer is needed and none is free.
    pub(crate) starved: bool,
    /// Acknowledgements to send, encoded.
    pub(crate) acks: Vec<u8>,
    /// Acknowledgements received, to be given to the sender.
    pub(crate) acknowledged: Vec<(ChunkName, ChunkState)>,
    /// Of those, what may have been referred to.
    pub(crate) settled_references: Vec<ChunkName>,
    /// References of this side's that the peer did not take.
    pub(crate) declined: Vec<ChunkName>,
    /// Those that it has followed and asks about.
    pub(crate) asked: Vec<ChunkName>,
    pieces: Vec<libc::iovec>,
    segments: Vec<Segment>,
}

/// What a data thread lends to a reader's turn.
pub(crate) struct Lent<'a> {
    pub(crate) link: &'a LinkCore,
    pub(crate) counters: &'a DirectionCounters,
    pub(crate) staging: &'a Arc<StagingPool>,
    pub(crate) scrap: *mut u8,
}

struct InChunk {
    header: ChunkHeader,
    sink: Sink,
    /// Payload bytes that have come.
    received: u32,
    digest: Option<Digest>,
}

enum Sink {
    Place(Placed),
    Staged {
        to: Placed,
        buffer: Option<StagingBuffer>,
        /// Payload byte that the buffer begins with.
        from: u32,
    },
    Message(Vec<u8>),
    /// Thrown away; what to answer.
    Scrap(ChunkState),
}

impl Reader {
    pub(crate) fn new(socket: Arc<OwnedFd>, lane: LaneName) -> Reader {
        Reader {
            socket,
            lane,
            ahead: LookAhead::new(),
            chunk: None,
            body: None,
            scatters: VecDeque::new(),
            fresh: 0,
            references: References::default(),
            // Bytes may have come before the socket was watched.
            readable: true,
            ending: false,
            starved: false,
            acks: Vec::new(),
            acknowledged: Vec::new(),
            settled_references: Vec::new(),
            declined: Vec::new(),
            asked: Vec::new(),
            pieces: Vec::new(),
            segments: Vec::new(),
        }
    }

    /// Reads and places, up to about `budget` bytes or until the socket is dry.
    pub(crate) fn turn(&mut self, lent: &Lent<'_>, budget: usize) -> Result<(), TcpError> {
        let mut moved = 0;
        self.starved = false;
        loop {
            self.take_ahead(lent)?;
            if moved >= budget || !self.wants_turn() {
                return Ok(());
            }
            moved += self.receive(lent)?;
        }
    }

    /// Whether a further turn would move anything.
    pub(crate) fn wants_turn(&self) -> bool {
        self.readable && !self.starved && self.has_room()
    }

    /// The connection is gone. The chunk under way will not come; copies under way go on, see
    /// [`drain_copies`](Self::drain_copies).
    pub(crate) fn shut(&mut self, link: &LinkCore) {
        self.readable = false;
        self.body = None;
        self.references.lose(link);
        if let Some(chunk) = self.chunk.take() {
            match chunk.sink {
                Sink::Place(_) => link.slots.abandon(&chunk.header),
                Sink::Staged { .. } => self.scatters.push_back(Scatter {
                    job: None,
                    end: Some((chunk.header, End::Abandoned(ChunkState::Missing))),
                    slot: chunk.header,
                }),
                Sink::Message(_) | Sink::Scrap(_) => {}
            }
        }
    }

    /// Takes everything that the look-ahead holds.
    fn take_ahead(&mut self, lent: &Lent<'_>) -> Result<(), TcpError> {
        loop {
            match &mut self.chunk {
                None if self.body.is_some() => {
                    if !self.take_body(lent)? {
                        return Ok(());
                    }
                }
                None => {
                    let Some(bytes) = self.ahead.peek::<HEADER_BYTES>() else {
                        return Ok(());
                    };
                    let header = LaneHeader::decode(bytes);
                    self.ahead.consume(HEADER_BYTES);
                    match header.map_err(|error| self.peer_error(lent.link, error))? {
                        LaneHeader::Ack(name, state) => self.acknowledged.push((name, state)),
                        LaneHeader::Chunk(header) => self.begin(lent, header)?,
                        LaneHeader::Export { number, bytes } => {
                            self.body = Some(Body::new(BodyOf::Export(number), bytes));
                        }
                        LaneHeader::Reference { chunk, bytes } => {
                            self.body = Some(Body::new(BodyOf::Reference(chunk), bytes));
                        }
                        LaneHeader::Imported { number } => lent.link.exports.imported(number),
                        LaneHeader::Declined(name) => self.declined.push(name),
                        LaneHeader::Validate(name) => self.asked.push(name),
                        LaneHeader::Validated(name, counts) => self.validated(lent, name, counts)?,
                    }
                }
                Some(chunk) if chunk.received < chunk.header.length => {
                    if self.ahead.is_empty() || !self.place_ahead(lent)? {
                        return Ok(());
                    }
                }
                Some(_) => {
                    if self.scatters.len() >= SCATTERS_MAX {
                        return Ok(());
                    }
                    let Some(bytes) = self.ahead.peek::<TRAILER_BYTES>() else {
                        return Ok(());
                    };
                    let trailer = Trailer::decode(bytes);
                    self.ahead.consume(TRAILER_BYTES);
                    let trailer = trailer.map_err(|error| self.peer_error(lent.link, error))?;
                    self.end(lent, trailer)?;
                }
            }
        }
    }

    fn begin(&mut self, lent: &Lent<'_>, header: ChunkHeader) -> Result<(), TcpError> {
        let link = lent.link;
        let placement = link
            .slots
            .begin(link.peer.incarnation, &header)
            .map_err(|error| self.peer_error(link, error))?;
        let mut checked = header.checksummed;
        let sink = match placement {
            Placement::Place { stream, regions, gate } => {
                let staged = needs_staging(&regions);
                let to = Placed { stream, regions, gate };
                if staged {
                    self.import_for(link, &to);
                    Sink::Staged {
                        to,
                        buffer: None,
                        from: 0,
                    }
                } else {
                    Sink::Place(to)
                }
            }
            Placement::Message => {
                // The slot table has checked it; this is the line of defence before an allocation.
                let length = (header.length as usize).min(MESSAGE_BYTES_MAX);
                Sink::Message(Vec::with_capacity(length))
            }
            Placement::Scrap(state) => {
                checked = false;
                Sink::Scrap(state)
            }
        };
        self.chunk = Some(InChunk {
            header,
            sink,
            received: 0,
            digest: checked.then(|| Digest::new(CrcAlgorithm::Crc64Nvme)),
        });
        Ok(())
    }

    /// Places payload that was read ahead. False if it has to wait for a staging buffer or for the link.
    fn place_ahead(&mut self, lent: &Lent<'_>) -> Result<bool, TcpError> {
        let Some(chunk) = &mut self.chunk else { return Ok(false) };
        let bytes = self.ahead.bytes();
        let bytes = &bytes[..bytes.len().min((chunk.header.length - chunk.received) as usize)];
        match &mut chunk.sink {
            Sink::Place(to) => {
                let Some(_open) = lent.link.open.enter() else {
                    return Ok(false);
                };
                match to.gate.enter_owned() {
                    None => {
                        lent.link.slots.abandon(&chunk.header);
                        chunk.refuse();
                    }
                    Some(guard) => {
                        let placed = copy_into(to, &chunk.header, chunk.received, bytes, &mut self.segments);
                        if guard.leave() {
                            lent.link.emit(LinkEvent::SlotQuiet);
                        }
                        placed.map_err(|error| peer_error(lent.link, self.lane, error))?;
                    }
                }
            }
            Sink::Staged { buffer, from, .. } => {
                if buffer.is_none() {
                    *from = chunk.received;
                    *buffer = lent.staging.take();
                }
                let Some(buffer) = buffer else {
                    self.starved = true;
                    return Ok(false);
                };
                // SAFETY: the buffer holds a chunk, `received - from` plus the rest is at most one; no copy of it runs.
                unsafe {
                    let to = buffer.pointer().add((chunk.received - *from) as usize);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
                }
            }
            Sink::Message(message) => message.extend_from_slice(bytes),
            Sink::Scrap(_) => {}
        }
        if let Some(digest) = &mut chunk.digest {
            digest.update(bytes);
        }
        let length = bytes.len();
        chunk.received += length as u32;
        add(&lent.counters.bytes, length as u64);
        self.ahead.consume(length);
        Ok(true)
    }

    /// One call: the payload that is left, and what follows it. Returns the bytes received.
    fn receive(&mut self, lent: &Lent<'_>) -> Result<usize, TcpError> {
        let link = lent.link;
        let Some(_open) = link.open.enter() else {
            self.readable = false;
            return Ok(0);
        };
        self.pieces.clear();
        let mut guard = None;
        let mut payload = 0usize;
        let mut ahead_max = LOOK_AHEAD_BYTES;
        if let Some(chunk) = &mut self.chunk
            && chunk.received < chunk.header.length
        {
            let left = (chunk.header.length - chunk.received).min(link.config.call_bytes_max);
            if let Sink::Place(to) = &chunk.sink {
                guard = to.gate.enter_owned();
                if guard.is_none() {
                    link.slots.abandon(&chunk.header);
                    chunk.refuse();
                }
            }
            payload = match &mut chunk.sink {
                Sink::Place(to) => to
                    .pieces(
                        &chunk.header,
                        chunk.received,
                        left,
                        &mut self.segments,
                        &mut self.pieces,
                    )
                    .map_err(|error| peer_error(link, self.lane, error))?,
                Sink::Staged { buffer, from, .. } => {
                    if buffer.is_none() {
                        *from = chunk.received;
                        *buffer = lent.staging.take();
                    }
                    let Some(buffer) = buffer else {
                        self.starved = true;
                        return Ok(0);
                    };
                    self.pieces.push(libc::iovec {
                        // SAFETY: at most one chunk from `from` on, which is what the buffer holds.
                        iov_base: unsafe { buffer.pointer().add((chunk.received - *from) as usize) }.cast(),
                        iov_len: left as usize,
                    });
                    left as usize
                }
                Sink::Message(message) => {
                    let spare = message.spare_capacity_mut();
                    let length = spare.len().min(left as usize);
                    self.pieces.push(libc::iovec {
                        iov_base: spare.as_mut_ptr().cast(),
                        iov_len: length,
                    });
                    length
                }
                Sink::Scrap(_) => {
                    let mut rest = left as usize;
                    while rest > 0 {
                        let length = rest.min(SCRAP_BYTES);
                        self.pieces.push(libc::iovec {
                            iov_base: lent.scrap.cast(),
                            iov_len: length,
                        });
                        rest -= length;
                    }
                    left as usize
                }
            };
            let rest = chunk.header.length - chunk.received - payload as u32;
            ahead_max = match rest {
                0 if payload as u32 > BUNCH_BYTES => TRAILER_BYTES + HEADER_BYTES,
                0 => LOOK_AHEAD_BYTES,
                _ => 0,
            };
        }
        if let Some(body) = &mut self.body {
            let (piece, length) = body.room();
            self.pieces.push(piece);
            payload = length;
            ahead_max = HEADER_BYTES;
        }
        let ahead = self.ahead.room(ahead_max);
        if ahead.iov_len > 0 {
            self.pieces.push(ahead);
        }
        let wanted = payload + ahead.iov_len;
        add(&lent.counters.calls, 1);
        // SAFETY: the pieces lie in regions whose gate `guard` holds, in a staging buffer with no copy under way, in the
        // spare capacity of a vector (a message's or a body's), in scrap, or in the room of the look-ahead; all outlive the call and no reference
        // to them exists.
        let result = unsafe { sys::receive_vectored(self.socket.as_fd(), &self.pieces) };
        let received = match &result {
            Ok(received) => *received,
            Err(_) => 0,
        };
        let placed = received.min(payload);
        if let Some(body) = &mut self.body {
            // SAFETY: the call wrote `placed` bytes into the room that the body gave.
            unsafe { body.received(placed) };
        }
        if let Some(chunk) = &mut self.chunk
            && placed > 0
        {
            if let Sink::Message(message) = &mut chunk.sink {
                // SAFETY: the call wrote `placed` bytes into the spare capacity.
                unsafe { message.set_len(message.len() + placed) };
            }
            if let Some(digest) = &mut chunk.digest {
                // SAFETY: the pieces are still readable: gate and buffers are held.
                unsafe { digest_pieces(digest, &self.pieces, placed) };
            }
            chunk.received += placed as u32;
            add(&lent.counters.bytes, placed as u64);
        }
        self.pieces.clear();
        if guard.is_some_and(|guard| guard.leave()) {
            link.emit(LinkEvent::SlotQuiet);
        }
        match result {
            Ok(0) => Err(TcpError::Ended {
                place: link.place(self.lane),
            }),
            Ok(received) => {
                self.ahead.received(received - placed);
                // A short read means that the socket is dry, and a new edge follows, unless the end is what is left.
                self.readable = received == wanted || self.ending;
                Ok(received)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(source) => Err(TcpError::Call {
                call: "recvmsg",
                place: link.place(self.lane),
                source,
            }),
        }
    }

    /// The trailer has come: the chunk is whole.
    fn end(&mut self, lent: &Lent<'_>, trailer: Trailer) -> Result<(), TcpError> {
        let link = lent.link;
        let Some(chunk) = self.chunk.take() else { return Ok(()) };
        let header = chunk.header;
        add(&lent.counters.chunks, 1);
        let matches = match &chunk.digest {
            Some(digest) if trailer.valid => digest.finalize() == trailer.checksum,
            _ => true,
        };
        match chunk.sink {
            Sink::Scrap(state) => self.answer(link, &header, state),
            Sink::Message(_) | Sink::Place(_) | Sink::Staged { .. } if !matches => {
                if let Sink::Staged { .. } = chunk.sink {
                    self.scatters.push_back(Scatter {
                        job: None,
                        end: Some((header, End::Abandoned(ChunkState::Missing))),
                        slot: header,
                    });
                } else {
                    link.slots.abandon(&header);
                }
                let error = Error::new(
                    ErrorKind::Corrupt,
                    format!("{} bytes at {} of part {}", header.length, header.offset, header.part),
                )
                .because("their checksum is not the sender's")
                .remedy("check the memory and the network of both machines");
                return Err(self.corrupt(link, &header, error));
            }
            Sink::Message(message) => {
                let state = if trailer.valid {
                    link.slots.message_applied(&header, &message).acknowledgement()
                } else {
                    ChunkState::Missing
                };
                self.answer(link, &header, state);
            }
            Sink::Place(_) => {
                let state = link.slots.placed(&header, trailer.valid);
                self.answer(link, &header, state);
            }
            Sink::Staged { to, buffer, from } => {
                let mut end = if trailer.valid {
                    End::Placed
                } else {
                    End::Abandoned(ChunkState::Missing)
                };
                let mut job = None;
                if let (End::Placed, Some(buffer)) = (end, buffer) {
                    job = scatter(&to, &header, from..header.length, buffer);
                    if job.is_none() && from < header.length {
                        end = End::Abandoned(ChunkState::Refused);
                    }
                }
                self.fresh += 1;
                self.scatters.push_back(Scatter {
                    job,
                    end: Some((header, end)),
                    slot: header,
                });
                self.answer_without_copies(link);
            }
        }
        Ok(())
    }

    /// Acknowledges a chunk, and says so if it was the slot's last.
    fn answer(&mut self, link: &LinkCore, header: &ChunkHeader, state: ChunkState) {
        self.acks
            .extend_from_slice(&LaneHeader::Ack(header.name(), state).encode());
        if state == ChunkState::Arrived {
            link.emit(LinkEvent::SlotArrived {
                slot: header.slot,
                generation: header.generation,
            });
        }
    }

    /// Closes the slot, says why, and gives the error that ends the lane.
    fn corrupt(&self, link: &LinkCore, header: &ChunkHeader, source: Error) -> TcpError {
        let source = self.end_slot(link, header, source);
        TcpError::Peer {
            place: link.place(self.lane),
            source: Box::new(source),
        }
    }

    /// Closes the slot and says why.
    fn end_slot(&self, link: &LinkCore, header: &ChunkHeader, error: Error) -> Error {
        let error = error.at(link.place(self.lane).to_string());
        link.slots.corrupt(header.slot, header.generation);
        link.emit(LinkEvent::SlotCorrupt {
            slot: header.slot,
            generation: header.generation,
            error: error.clone(),
        });
        error
    }

    fn peer_error(&self, link: &LinkCore, source: Error) -> TcpError {
        peer_error(link, self.lane, source)
    }
}

fn peer_error(link: &LinkCore, lane: LaneName, source: Error) -> TcpError {
    TcpError::Peer {
        place: link.place(lane),
        source: Box::new(source),
    }
}

impl InChunk {
    /// The slot was closed: the rest goes to scrap.
    fn refuse(&mut self) {
        self.sink = Sink::Scrap(ChunkState::Refused);
        self.digest = None;
    }
}
