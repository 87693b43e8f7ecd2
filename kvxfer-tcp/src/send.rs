//! The sending half of a lane: acknowledgements and chunks, several to a call, gathered straight from the regions.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::{io, slice};

use crc_fast::{CrcAlgorithm, Digest};
use kvxfer_core::flow::{
    ByteStream, Chunk, ChunkName, ChunkState, Gate, LaneName, OwnedGateGuard, Payload,
};
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::wire::lane::{HEADER_BYTES, LaneHeader, TRAILER_BYTES, Trailer};
use kvxfer_core::{Error, Time};

use crate::counters::add;
use crate::error::TcpError;
use crate::link::LinkCore;
use crate::staging::{CopyJob, Direction, StagingBuffer, StagingPool, needs_staging};
use crate::sys;

/// Messages in a lane's queue, at most: enough to fill a call with small ones.
const QUEUE_MAX: usize = 128;
/// Chunks of a lane that are staged or being staged, at most.
const STAGED_MAX: usize = 2;
/// What a chunk is filled up with when its source was taken back midway.
static FILLER: [u8; 64 << 10] = [0; 64 << 10];

/// What a call to [`Writer::send`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// There was nothing to send.
    Nothing,
    /// Everything that was gathered was sent; there may be more.
    All,
    /// The socket takes no more now.
    Blocked,
}

/// The sending half of a lane. The lane's data thread and submitting threads take turns with it, never waiting.
pub(crate) struct Writer {
    connection: Option<Connection>,
    queue: VecDeque<Item>,
    /// Payload bytes in the queue that are not sent.
    queued_bytes: u64,
    /// The socket took all it was given last time.
    pub(crate) writable: bool,
    /// A source's gate became fenced when we left it: somebody may wait for that.
    pub(crate) gate_fenced: bool,
    /// The sender may have events: a chunk was settled here.
    pub(crate) settled: bool,
    /// A staged chunk waits for a staging buffer and none is free.
    pub(crate) starved: bool,
    /// What a submitting thread ran into; the data thread acts on it.
    pub(crate) failed: Option<TcpError>,
    scratch: Scratch,
}

struct Connection {
    socket: Arc<OwnedFd>,
    name: LaneName,
    staging: Arc<StagingPool>,
}

/// Room for one call's pieces, reused.
#[derive(Default)]
struct Scratch {
    pieces: Vec<libc::iovec>,
    segments: Vec<Segment>,
    guards: Vec<OwnedGateGuard>,
}

// SAFETY: the pointers in `pieces` are only used during one call of `Writer::send`, which clears them; between calls
// the struct holds capacity only.
unsafe impl Send for Scratch {}

enum Item {
    /// Acknowledgements, encoded.
    Acks { bytes: Vec<u8>, sent: usize },
    Chunk(Box<OutChunk>),
}

struct OutChunk {
    header: [u8; HEADER_BYTES],
    trailer: [u8; TRAILER_BYTES],
    name: ChunkName,
    payload: OutPayload,
    /// Bytes of header, payload and trailer that the socket took.
    sent: u64,
    valid: bool,
    checksum: Option<Checksum>,
}

struct Checksum {
    digest: Digest,
    /// Payload bytes it covers.
    covered: u64,
}

enum OutPayload {
    Host(Source),
    Staged { source: Source, from: u64, stage: Stage },
    Message { bytes: Arc<[u8]>, start: usize },
    /// The source was taken back.
    Filler,
}

struct Source {
    stream: Arc<dyn ByteStream>,
    regions: Arc<[Arc<Region>]>,
    gate: Arc<Gate>,
}

enum Stage {
    /// For a buffer, and for its turn.
    Waiting,
    Copying(CopyJob),
    /// Holds the payload from `from` on.
    Ready(StagingBuffer),
}

impl Writer {
    pub(crate) fn new() -> Writer {
        Writer {
            connection: None,
            queue: VecDeque::new(),
            queued_bytes: 0,
            writable: false,
            gate_fenced: false,
            settled: false,
            starved: false,
            failed: None,
            scratch: Scratch::default(),
        }
    }

    /// A connection is up.
    pub(crate) fn open(&mut self, socket: Arc<OwnedFd>, name: LaneName, staging: Arc<StagingPool>) {
        debug_assert!(self.queue.is_empty(), "the lane was torn down before");
        self.connection = Some(Connection { socket, name, staging });
        self.writable = true;
        self.failed = None;
    }

    /// The connection is gone. Copies out of blocks that still run are kept; see [`copying`](Self::copying).
    pub(crate) fn shut(&mut self) {
        self.connection = None;
        self.writable = false;
        self.queue.retain(|item| match item {
            Item::Chunk(chunk) => chunk.is_copying(),
            Item::Acks { .. } => false,
        });
        self.queued_bytes = 0;
    }

    /// After [`shut`](Self::shut): lets go of copies that have ended. True while one runs.
    pub(crate) fn drain_copies(&mut self) -> bool {
        let mut fenced = false;
        let mut kept = VecDeque::new();
        for item in self.queue.drain(..) {
            let Item::Chunk(mut chunk) = item else { continue };
            let OutPayload::Staged { stage, .. } = &mut chunk.payload else { continue };
            match std::mem::replace(stage, Stage::Waiting) {
                Stage::Copying(mut job) => {
                    if job.poll().is_none() {
                        *stage = Stage::Copying(job);
                        kept.push_back(Item::Chunk(chunk));
                    } else {
                        fenced |= job.finish().1;
                    }
                }
                Stage::Waiting | Stage::Ready(_) => {}
            }
        }
        self.queue = kept;
        self.gate_fenced |= fenced;
        !self.queue.is_empty()
    }

    /// Whether a copy out of blocks is running or waits to be started.
    pub(crate) fn copying(&self) -> bool {
        self.queue.iter().any(|item| match item {
            Item::Chunk(chunk) => matches!(
                chunk.payload,
                OutPayload::Staged {
                    stage: Stage::Copying(_) | Stage::Waiting,
                    ..
                }
            ),
            Item::Acks { .. } => false,
        })
    }

    /// Whether a submitting thread may send by itself: up, nothing under way, and room in the socket.
    pub(crate) fn idle(&self) -> bool {
        self.connection.is_some() && self.queue.is_empty() && self.writable && self.failed.is_none()
    }

    /// Bytes of acknowledgements that wait.
    pub(crate) fn ack_backlog(&self) -> usize {
        self.queue
            .iter()
            .map(|item| match item {
                Item::Acks { bytes, sent } => bytes.len() - sent,
                Item::Chunk(_) => 0,
            })
            .sum()
    }

    /// Queues acknowledgements, ahead of all chunks that have not begun.
    pub(crate) fn acknowledge(&mut self, acks: &mut Vec<u8>) {
        if acks.is_empty() || self.connection.is_none() {
            acks.clear();
            return;
        }
        let at = match self.queue.front() {
            Some(Item::Chunk(chunk)) if chunk.sent > 0 => 1,
            _ => 0,
        };
        match self.queue.get_mut(at) {
            Some(Item::Acks { bytes, .. }) => {
                bytes.extend_from_slice(acks);
                acks.clear();
            }
            _ => self.queue.insert(
                at,
                Item::Acks {
                    bytes: std::mem::take(acks),
                    sent: 0,
                },
            ),
        }
    }

    /// Gathers what waits, at most one call's worth, and hands it to the socket.
    pub(crate) fn send(&mut self, link: &LinkCore, lane: u16, now: Time) -> Result<Sent, TcpError> {
        if self.connection.is_none() {
            return Ok(Sent::Nothing);
        }
        self.fill(link, lane, now);
        // From here to the end of the call the link cannot count as closed.
        let Some(_open) = link.open.enter() else {
            return Ok(Sent::Nothing);
        };
        let Some(connection) = &self.connection else {
            return Ok(Sent::Nothing);
        };
        let place = link.place(connection.name);
        let scratch = &mut self.scratch;
        let mut left = u64::from(link.config.call_bytes_max);
        let mut index = 0;
        let mut failed = None;
        while index < self.queue.len() && left > 0 && scratch.pieces.len() + 3 < sys::IOVECS_MAX {
            match &mut self.queue[index] {
                Item::Acks { bytes, sent } => scratch.pieces.push(piece(&bytes[*sent..])),
                Item::Chunk(chunk) => match chunk.gather(scratch, &mut left) {
                    Ok(Gathered::Whole) => {}
                    Ok(Gathered::Part) => break,
                    Ok(Gathered::TakenBack) => {
                        let Some(Item::Chunk(chunk)) = self.queue.remove(index) else { break };
                        self.queued_bytes -= u64::from(chunk.name.length);
                        settle_missing(link, connection.name, chunk.name, now);
                        self.settled = true;
                        continue;
                    }
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                },
            }
            index += 1;
        }
        let bytes: usize = scratch.pieces.iter().map(|piece| piece.iov_len).sum();
        let result = if failed.is_none() && !scratch.pieces.is_empty() {
            add(&link.lanes[usize::from(lane)].counters.sent.calls, 1);
            // SAFETY: the pieces lie in the queue's items (not touched until after the call), in `FILLER`, or in regions
            // that the items keep alive and whose gates are held by `guards`.
            unsafe { sys::send_vectored(connection.socket.as_fd(), &scratch.pieces) }
        } else {
            Ok(0)
        };
        scratch.pieces.clear();
        for guard in scratch.guards.drain(..) {
            self.gate_fenced |= guard.leave();
        }
        if let Some(source) = failed {
            return Err(TcpError::Copy { place, source });
        }
        match result {
            Ok(_) if bytes == 0 => Ok(Sent::Nothing),
            Ok(sent) => {
                self.advance(link, lane, sent as u64);
                // A short write means that the socket is full; the next edge says when it is not.
                self.writable = sent == bytes;
                Ok(if sent == bytes { Sent::All } else { Sent::Blocked })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                Ok(Sent::Blocked)
            }
            Err(source) => Err(TcpError::Call {
                call: "sendmsg",
                place,
                source,
            }),
        }
    }

    /// Moves staged chunks on: starts and polls copies. True if one can be sent that could not before. An error is the
    /// memory domain's.
    pub(crate) fn pump_copies(&mut self, link: &LinkCore, now: Time) -> Result<bool, TcpError> {
        self.starved = false;
        let Some(connection) = &self.connection else {
            return Ok(false);
        };
        let mut freed = false;
        let mut index = 0;
        while index < self.queue.len() {
            let Item::Chunk(chunk) = &mut self.queue[index] else {
                index += 1;
                continue;
            };
            let before = chunk.is_ready();
            let (pumped, fenced) = chunk.pump(&connection.staging);
            self.gate_fenced |= fenced;
            match pumped {
                Ok(true) => {
                    freed |= !before && chunk.is_ready();
                    self.starved |= chunk.is_waiting();
                    index += 1;
                }
                Ok(false) => {
                    let Some(Item::Chunk(chunk)) = self.queue.remove(index) else { break };
                    self.queued_bytes -= u64::from(chunk.name.length);
                    settle_missing(link, connection.name, chunk.name, now);
                    self.settled = true;
                    freed = true;
                }
                Err(source) => {
                    return Err(TcpError::Copy {
                        place: link.place(connection.name),
                        source,
                    });
                }
            }
        }
        Ok(freed)
    }

    /// Gives staging buffers back while the socket takes nothing: their bytes are gathered again when it does. Called
    /// when other lanes need buffers, so that a stalled peer holds none.
    pub(crate) fn release_staging(&mut self) {
        if self.writable {
            return;
        }
        for item in &mut self.queue {
            let Item::Chunk(chunk) = item else { continue };
            let done = chunk.payload_sent();
            if let OutPayload::Staged { from, stage, .. } = &mut chunk.payload
                && matches!(stage, Stage::Ready(_))
            {
                *from = done;
                *stage = Stage::Waiting;
            }
        }
    }

    fn fill(&mut self, link: &LinkCore, lane: u16, now: Time) {
        while self.queued_bytes < u64::from(link.config.call_bytes_max)
            && self.queue.len() < QUEUE_MAX
            && self.staged() < STAGED_MAX
        {
            let Some(chunk) = link.sender.lock().next_chunk(lane, now) else {
                return;
            };
            self.queued_bytes += u64::from(chunk.header.length);
            self.queue.push_back(Item::Chunk(Box::new(OutChunk::new(chunk))));
        }
    }

    fn staged(&self) -> usize {
        self.queue
            .iter()
            .filter(|item| matches!(item, Item::Chunk(chunk) if matches!(chunk.payload, OutPayload::Staged { .. })))
            .count()
    }

    fn advance(&mut self, link: &LinkCore, lane: u16, mut bytes: u64) {
        let counters = &link.lanes[usize::from(lane)].counters.sent;
        let mut payload = 0;
        let mut chunks = 0;
        while bytes > 0 {
            let done = match self.queue.front_mut() {
                Some(Item::Acks { bytes: acks, sent }) => {
                    let step = bytes.min((acks.len() - *sent) as u64);
                    *sent += step as usize;
                    bytes -= step;
                    *sent == acks.len()
                }
                Some(Item::Chunk(chunk)) => {
                    let before = chunk.payload_sent();
                    let step = bytes.min(chunk.total() - chunk.sent);
                    chunk.sent += step;
                    bytes -= step;
                    payload += chunk.payload_sent() - before;
                    let done = chunk.sent == chunk.total();
                    chunks += u64::from(done);
                    done
                }
                None => break,
            };
            if done {
                self.queue.pop_front();
            }
        }
        self.queued_bytes -= payload;
        add(&counters.bytes, payload);
        add(&counters.chunks, chunks);
    }
}

/// What [`OutChunk::gather`] came to.
enum Gathered {
    /// All of the chunk is in the call.
    Whole,
    /// Some is not: nothing may follow it in this call.
    Part,
    /// Its source was taken back before any of it was sent: it need not be sent at all.
    TakenBack,
}

impl OutChunk {
    fn new(chunk: Chunk) -> OutChunk {
        let header = chunk.header;
        let payload = match chunk.payload {
            Payload::Stream { stream, regions, gate } => {
                let staged = needs_staging(&regions);
                let source = Source { stream, regions, gate };
                if staged {
                    OutPayload::Staged {
                        source,
                        from: 0,
                        stage: Stage::Waiting,
                    }
                } else {
                    OutPayload::Host(source)
                }
            }
            Payload::Message(bytes, range) => OutPayload::Message {
                bytes,
                start: range.start,
            },
        };
        OutChunk {
            header: LaneHeader::Chunk(header).encode(),
            trailer: [0; TRAILER_BYTES],
            name: ChunkName {
                slot: header.slot,
                generation: header.generation,
                part: header.part,
                offset: header.offset,
                length: header.length,
            },
            payload,
            sent: 0,
            valid: true,
            checksum: header.checksummed.then(|| Checksum {
                digest: Digest::new(CrcAlgorithm::Crc64Nvme),
                covered: 0,
            }),
        }
    }

    fn total(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.name.length) + TRAILER_BYTES as u64
    }

    fn payload_sent(&self) -> u64 {
        self.sent
            .saturating_sub(HEADER_BYTES as u64)
            .min(u64::from(self.name.length))
    }

    fn is_copying(&self) -> bool {
        matches!(
            self.payload,
            OutPayload::Staged {
                stage: Stage::Copying(_),
                ..
            }
        )
    }

    /// Whether nothing but the socket holds it up.
    fn is_ready(&self) -> bool {
        !matches!(
            self.payload,
            OutPayload::Staged {
                stage: Stage::Waiting | Stage::Copying(_),
                ..
            }
        )
    }

    fn is_waiting(&self) -> bool {
        matches!(
            self.payload,
            OutPayload::Staged {
                stage: Stage::Waiting,
                ..
            }
        )
    }

    /// The source is gone: the rest is filler and the trailer says so.
    fn take_back(&mut self) {
        self.valid = false;
        self.payload = OutPayload::Filler;
    }

    /// Adds what is left of the chunk to the call, up to `left` payload bytes.
    fn gather(&mut self, scratch: &mut Scratch, left: &mut u64) -> Result<Gathered, Error> {
        let done = self.payload_sent();
        let want = u64::from(self.name.length) - done;
        let mark = scratch.pieces.len();
        if let Some(rest) = self.header.get(self.sent as usize..) {
            if !rest.is_empty() {
                scratch.pieces.push(piece(rest));
            }
        }
        let mut covered = 0;
        if want > 0 {
            covered = match self.gather_payload(scratch, done, want.min(*left))? {
                Some(covered) => covered,
                None if self.sent == 0 => {
                    scratch.pieces.truncate(mark);
                    return Ok(Gathered::TakenBack);
                }
                None => {
                    self.take_back();
                    gather_filler(scratch, want.min(*left))
                }
            };
        }
        if covered == 0 && want > 0 {
            // Still being staged. The header waits for its payload, so that the call is worth making.
            scratch.pieces.truncate(mark);
            return Ok(Gathered::Part);
        }
        *left -= covered;
        if covered < want {
            return Ok(Gathered::Part);
        }
        let trailer_sent = self.sent.saturating_sub(HEADER_BYTES as u64 + u64::from(self.name.length)) as usize;
        if trailer_sent == 0 {
            let checksum = self.checksum.as_ref().map_or(0, |checksum| checksum.digest.finalize());
            self.trailer = Trailer {
                valid: self.valid,
                checksum: if self.valid { checksum } else { 0 },
            }
            .encode();
        }
        scratch.pieces.push(piece(&self.trailer[trailer_sent..]));
        Ok(Gathered::Whole)
    }

    /// Adds payload from `done` on. `None` if the source was taken back; 0 if it is not staged yet.
    fn gather_payload(&mut self, scratch: &mut Scratch, done: u64, want: u64) -> Result<Option<u64>, Error> {
        let first = scratch.pieces.len();
        let covered = match &self.payload {
            OutPayload::Host(source) => {
                let Some(guard) = source.gate.enter_owned() else {
                    return Ok(None);
                };
                scratch.guards.push(guard);
                source.gather(self.name.offset + done, want, scratch)?
            }
            OutPayload::Staged { from, stage, source } => {
                // The bytes were read while the gate was open; but what is retracted since must not count.
                if source.gate.is_closed() && !matches!(stage, Stage::Copying(_)) {
                    return Ok(None);
                }
                match stage {
                    Stage::Ready(buffer) => {
                        scratch.pieces.push(libc::iovec {
                            // SAFETY: `from <= done < length`, and the buffer holds the payload from `from` on.
                            iov_base: unsafe { buffer.pointer().add((done - from) as usize) }.cast(),
                            iov_len: want as usize,
                        });
                        want
                    }
                    Stage::Waiting | Stage::Copying(_) => return Ok(Some(0)),
                }
            }
            OutPayload::Message { bytes, start } => {
                let from = start + done as usize;
                scratch.pieces.push(piece(&bytes[from..from + want as usize]));
                want
            }
            OutPayload::Filler => return Ok(Some(gather_filler(scratch, want))),
        };
        if let Some(checksum) = &mut self.checksum {
            // SAFETY: the pieces from `first` on are readable while the gate is held or the buffer kept, as for the
            // call itself.
            unsafe { checksum.extend(done, &scratch.pieces[first..]) };
        }
        Ok(Some(covered))
    }

    /// Moves a staged payload on. False if its source was taken back before any of it was sent. The second value
    /// says whether a gate became fenced.
    fn pump(&mut self, staging: &Arc<StagingPool>) -> (Result<bool, Error>, bool) {
        let length = u64::from(self.name.length);
        let OutPayload::Staged { source, from, stage } = &mut self.payload else {
            return (Ok(true), false);
        };
        match stage {
            Stage::Ready(_) => (Ok(true), false),
            Stage::Waiting => {
                let Some(guard) = source.gate.enter_owned() else {
                    if self.sent == 0 {
                        return (Ok(false), false);
                    }
                    self.take_back();
                    return (Ok(true), false);
                };
                let Some(buffer) = staging.take() else {
                    return (Ok(true), guard.leave());
                };
                let want = length - *from;
                let mut segments = Vec::new();
                let covered = source
                    .stream
                    .segments(self.name.offset + *from, want, usize::MAX, &mut segments);
                if covered != want {
                    return (Err(short_stream(covered, want)), guard.leave());
                }
                let regions = source.regions.clone();
                *stage = Stage::Copying(CopyJob::start(Direction::Gather, regions, &segments, buffer, guard));
                (Ok(true), false)
            }
            Stage::Copying(job) => {
                let Some(outcome) = job.poll() else {
                    return (Ok(true), false);
                };
                let Stage::Copying(job) = std::mem::replace(stage, Stage::Waiting) else {
                    return (Ok(true), false);
                };
                let (buffer, fenced) = job.finish();
                match outcome {
                    Ok(()) => {
                        *stage = Stage::Ready(buffer);
                        (Ok(true), fenced)
                    }
                    Err(error) => (Err(error), fenced),
                }
            }
        }
    }
}

impl Source {
    fn gather(&self, offset: u64, want: u64, scratch: &mut Scratch) -> Result<u64, Error> {
        // One place is kept for the trailer.
        let room = sys::IOVECS_MAX - 1 - scratch.pieces.len();
        scratch.segments.clear();
        let covered = self.stream.segments(offset, want, room, &mut scratch.segments);
        if covered == 0 || covered > want {
            return Err(short_stream(covered, want));
        }
        for segment in &scratch.segments {
            let view = self.regions[segment.region as usize]
                .host_view(segment.offset, segment.length)
                .ok_or_else(|| {
                    Error::new(kvxfer_core::ErrorKind::Internal, "a segment outside its region")
                        .because(format!("{segment:?}"))
                })?;
            scratch.pieces.push(libc::iovec {
                iov_base: view.pointer.cast(),
                iov_len: view.length,
            });
        }
        Ok(covered)
    }
}

impl Checksum {
    /// Takes the bytes of these pieces, the first of which is payload byte `done`, as far as they are new.
    ///
    /// # Safety
    /// The pieces must be readable.
    unsafe fn extend(&mut self, done: u64, pieces: &[libc::iovec]) {
        let mut skip = (self.covered - done) as usize;
        for piece in pieces {
            if skip >= piece.iov_len {
                skip -= piece.iov_len;
                continue;
            }
            // SAFETY: inside the piece, which the caller vouches for.
            let bytes = unsafe { slice::from_raw_parts(piece.iov_base.cast::<u8>().add(skip), piece.iov_len - skip) };
            skip = 0;
            self.digest.update(bytes);
            self.covered += bytes.len() as u64;
        }
    }
}

fn gather_filler(scratch: &mut Scratch, want: u64) -> u64 {
    let mut left = want as usize;
    while left > 0 && scratch.pieces.len() < sys::IOVECS_MAX - 1 {
        let step = left.min(FILLER.len());
        scratch.pieces.push(piece(&FILLER[..step]));
        left -= step;
    }
    want - left as u64
}

fn piece(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// The chunk never went out: it can be given to any lane again, or never.
fn settle_missing(link: &LinkCore, lane: LaneName, chunk: ChunkName, now: Time) {
    link.sender.lock().acknowledged(lane, chunk, ChunkState::Missing, now);
}

fn short_stream(covered: u64, want: u64) -> Error {
    Error::new(kvxfer_core::ErrorKind::Internal, "a stream shorter than its chunk")
        .because(format!("it gave {covered} of {want} bytes"))
        .remedy("report this: the plan and the header disagree")
}
