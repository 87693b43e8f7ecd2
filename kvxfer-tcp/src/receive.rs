//! The receiving half of a lane: headers are checked, payload is scattered straight into the granted blocks.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use kvxfer_core::flow::{CHUNK_BYTES_MAX, ChunkHeader, ChunkName, ChunkState, LaneName, MESSAGE_BYTES_MAX, Placement};
use kvxfer_core::memory::Segment;
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::wire::lane::{HEADER_BYTES, LaneHeader, TRAILER_BYTES, Trailer};
use kvxfer_core::{Error, ErrorKind};

use crate::counters::{DirectionCounters, add};
use crate::error::TcpError;
use crate::link::LinkCore;
use crate::look_ahead::{LOOK_AHEAD_BYTES, LookAhead};
use crate::placed::{Placed, copy_into, digest_pieces, scatter};
use crate::staging::{CopyJob, StagingBuffer, StagingPool, needs_staging};
use crate::sys;

/// Up to this much payload left, a call reads as far ahead as it can: small chunks come in bunches.
const BUNCH_BYTES: u32 = 32 << 10;
/// What is read and thrown away goes here, over and over.
pub(crate) const SCRAP_BYTES: usize = 64 << 10;
/// Copies into blocks that a lane has under way, at most.
const SCATTERS_MAX: usize = 4;
/// Copies of a lane that wait for each other, at most.
const FRESH_MAX: usize = 3;

/// The receiving half of a lane. Only its data thread touches it.
pub(crate) struct Reader {
    socket: Arc<OwnedFd>,
    lane: LaneName,
    ahead: LookAhead,
    chunk: Option<InChunk>,
    scatters: VecDeque<Scatter>,
    /// Those of them that have not been polled.
    fresh: usize,
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

/// A copy into blocks under way, and the end of its chunk if it is the last of it.
struct Scatter {
    job: Option<CopyJob>,
    end: Option<(ChunkHeader, End)>,
    slot: ChunkHeader,
}

/// How a staged chunk ends once its copies have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// All its bytes are placed.
    Placed,
    /// It does not count.
    Abandoned(ChunkState),
}

impl Reader {
    pub(crate) fn new(socket: Arc<OwnedFd>, lane: LaneName) -> Reader {
        Reader {
            socket,
            lane,
            ahead: LookAhead::new(),
            chunk: None,
            scatters: VecDeque::new(),
            fresh: 0,
            // Bytes may have come before the socket was watched.
            readable: true,
            ending: false,
            starved: false,
            acks: Vec::new(),
            acknowledged: Vec::new(),
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
        self.readable && !self.starved && self.scatters.len() < SCATTERS_MAX
    }

    /// Polls copies into blocks; counts the chunks that they complete. True if one has ended. A copy that fails ends its
    /// slot with the reason; the lane goes on.
    pub(crate) fn poll_copies(&mut self, link: &LinkCore) -> bool {
        let mut moved = false;
        self.fresh = 0;
        while let Some(front) = self.scatters.front_mut() {
            let mut failed = false;
            if let Some(job) = &mut front.job {
                let Some(outcome) = job.poll() else {
                    return moved;
                };
                if front.job.take().is_some_and(|job| job.finish().1) {
                    link.emit(LinkEvent::SlotQuiet);
                }
                if let Err(error) = outcome {
                    failed = true;
                    let slot = front.slot;
                    self.end_slot(link, &slot, error);
                }
            }
            moved = true;
            let Some(front) = self.scatters.pop_front() else {
                return moved;
            };
            if let Some((header, end)) = front.end {
                let state = match end {
                    End::Placed if failed => {
                        link.slots.abandon(&header);
                        ChunkState::Refused
                    }
                    End::Placed => link.slots.placed(&header, true),
                    End::Abandoned(state) => {
                        link.slots.abandon(&header);
                        state
                    }
                };
                self.answer(link, &header, state);
            }
        }
        moved
    }

    /// Chunks that wait for no copy are answered at once. Copies are not polled here: a turn may start several, which
    /// their device is to get together.
    fn answer_without_copies(&mut self, link: &LinkCore) {
        if self.scatters.front().is_some_and(|front| front.job.is_none()) {
            self.poll_copies(link);
        }
    }

    /// Whether copies into blocks may wait for another, so that a device gets them together: one is coming, or was full
    /// (a transfer's last chunks are its lanes' shares of the rest), and there is room for it.
    pub(crate) fn copies_can_wait(&self) -> bool {
        let coming = self
            .chunk
            .as_ref()
            .is_some_and(|chunk| chunk.received < chunk.header.length);
        let was_full = || {
            let last = self.scatters.back().and_then(|scatter| scatter.end);
            last.is_some_and(|(header, _)| header.length == CHUNK_BYTES_MAX)
        };
        (1..FRESH_MAX).contains(&self.fresh)
            && self.scatters.len() < SCATTERS_MAX
            && !self.starved
            && (coming || was_full())
    }

    /// Whether a copy into blocks is under way.
    pub(crate) fn copying(&self) -> bool {
        !self.scatters.is_empty()
    }

    /// Gives a part-filled staging buffer back by placing what it holds. Called when another lane needs one, so that
    /// a stalled peer holds none.
    pub(crate) fn flush_staging(&mut self) {
        if let Some(InChunk {
            header,
            sink: Sink::Staged { to, buffer, from },
            received,
            ..
        }) = &mut self.chunk
            && *received > *from
            && self.scatters.len() < SCATTERS_MAX
            && let Some(buffer) = buffer.take()
        {
            let span = *from..*received;
            *from = *received;
            let job = scatter(to, header, span, buffer);
            self.fresh += 1;
            self.scatters.push_back(Scatter {
                job,
                end: None,
                slot: *header,
            });
        }
    }

    /// The connection is gone. The chunk under way will not come; copies under way go on, see
    /// [`drain_copies`](Self::drain_copies).
    pub(crate) fn shut(&mut self, link: &LinkCore) {
        self.readable = false;
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

    /// After [`shut`](Self::shut): whether a copy into blocks still runs. Chunks that were whole are counted.
    pub(crate) fn drain_copies(&mut self, link: &LinkCore) -> bool {
        self.poll_copies(link);
        self.acks.clear();
        self.copying()
    }

    /// Takes everything that the look-ahead holds.
    fn take_ahead(&mut self, lent: &Lent<'_>) -> Result<(), TcpError> {
        loop {
            match &mut self.chunk {
                None => {
                    let Some(bytes) = self.ahead.peek::<HEADER_BYTES>() else {
                        return Ok(());
                    };
                    let header = LaneHeader::decode(bytes);
                    self.ahead.consume(HEADER_BYTES);
                    match header.map_err(|error| self.peer_error(lent.link, error))? {
                        LaneHeader::Ack(name, state) => self.acknowledged.push((name, state)),
                        LaneHeader::Chunk(header) => self.begin(lent, header)?,
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
        let ahead = self.ahead.room(ahead_max);
        if ahead.iov_len > 0 {
            self.pieces.push(ahead);
        }
        let wanted = payload + ahead.iov_len;
        add(&lent.counters.calls, 1);
        // SAFETY: the pieces lie in regions whose gate `guard` holds, in a staging buffer with no copy under way, in the
        // spare capacity of a vector, in scrap, or in the room of the look-ahead; all outlive the call and no reference
        // to them exists.
        let result = unsafe { sys::receive_vectored(self.socket.as_fd(), &self.pieces) };
        let received = match &result {
            Ok(received) => *received,
            Err(_) => 0,
        };
        let placed = received.min(payload);
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
        let name = ChunkName {
            slot: header.slot,
            generation: header.generation,
            part: header.part,
            offset: header.offset,
            length: header.length,
        };
        self.acks.extend_from_slice(&LaneHeader::Ack(name, state).encode());
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
