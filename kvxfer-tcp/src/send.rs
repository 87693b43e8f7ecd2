//! The sending half of a lane: acknowledgements and chunks, several to a call, gathered straight from the regions.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kvxfer_core::flow::{ChunkName, ChunkState, LaneName, TransferId};
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::wire::lane::LaneHeader;
use kvxfer_core::{Error, ErrorKind, Time};

use crate::counters::add;
use crate::error::TcpError;
use crate::exports::{OutReference, ReferredTo};
use crate::link::LinkCore;
use crate::out_chunk::{Gathered, OutChunk, Pumped, Scratch, piece};
use crate::staging::StagingPool;
use crate::sys;

/// Messages in a lane's queue, at most: enough to fill a call with small ones.
const QUEUE_MAX: usize = 128;
/// Chunks of a lane that are staged or being staged, at most. Once no more than half of them are left, the others are
/// taken: these are copied while those are sent, and a device gets several at a time.
const STAGED_MAX: usize = 6;
/// What a call to [`Writer::send`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// There was nothing to send.
    Nothing,
    /// Everything there was has been sent.
    All,
    /// Everything that was gathered has been sent, and there is more.
    More,
    /// The socket takes no more now.
    Blocked,
}

/// The sending half of a lane. The lane's data thread and submitting threads take turns with it, never waiting.
pub(crate) struct Writer {
    connection: Option<Connection>,
    queue: VecDeque<Item>,
    /// Payload bytes in the queue that are not sent.
    queued_bytes: u64,
    /// References that are sent and not settled: whether they count is asked for once they were followed.
    referred: HashMap<ChunkName, ReferredTo>,
    /// The socket took all it was given last time.
    pub(crate) writable: bool,
    /// A source's gate became fenced when we left it: somebody may wait for that.
    pub(crate) gate_fenced: bool,
    /// The sender may have events: a chunk was settled here.
    pub(crate) settled: bool,
    /// A staged chunk waits for a staging buffer and none is free.
    pub(crate) starved: bool,
    /// Transfers whose source could not be read, to be reported.
    pub(crate) memory_failed: Vec<(TransferId, Error)>,
    /// What a submitting thread ran into; the data thread acts on it.
    pub(crate) failed: Option<TcpError>,
    scratch: Scratch,
}

struct Connection {
    socket: Arc<OwnedFd>,
    name: LaneName,
    staging: Arc<StagingPool>,
}

enum Item {
    /// Acknowledgements, encoded.
    Acks {
        bytes: Vec<u8>,
        sent: usize,
    },
    Chunk(Box<OutChunk>),
    Reference(Box<OutReference>),
}

impl Item {
    /// Some of it is sent: it must not be cut in two.
    fn has_begun(&self) -> bool {
        match self {
            Item::Acks { .. } => false,
            Item::Chunk(chunk) => chunk.sent > 0,
            Item::Reference(reference) => reference.sent > 0,
        }
    }
}

/// Who fills the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filler {
    DataThread,
    /// Makes no reference: that may ask a device's driver.
    Submitter,
}

impl Writer {
    pub(crate) fn new() -> Writer {
        Writer {
            connection: None,
            queue: VecDeque::new(),
            queued_bytes: 0,
            referred: HashMap::new(),
            writable: false,
            gate_fenced: false,
            settled: false,
            starved: false,
            memory_failed: Vec::new(),
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
            Item::Acks { .. } | Item::Reference(_) => false,
        });
        self.queued_bytes = 0;
        // The peer may still be reading; nobody will tell it that it counts.
        self.referred.clear();
    }

    /// After [`shut`](Self::shut): lets go of copies that have ended. True while one runs.
    pub(crate) fn drain_copies(&mut self) -> bool {
        let mut fenced = false;
        let mut kept = VecDeque::new();
        for item in self.queue.drain(..) {
            let Item::Chunk(mut chunk) = item else { continue };
            match chunk.end_copy() {
                Some(left_fenced) => fenced |= left_fenced,
                None => kept.push_back(Item::Chunk(chunk)),
            }
        }
        self.queue = kept;
        self.gate_fenced |= fenced;
        !self.queue.is_empty()
    }

    /// Whether a copy out of blocks is running or waits to be started.
    pub(crate) fn copying(&self) -> bool {
        self.queue.iter().any(|item| match item {
            // A socket that takes nothing is no reason to hold staging.
            Item::Chunk(chunk) => chunk.is_copying() || (chunk.is_waiting() && self.writable),
            Item::Acks { .. } | Item::Reference(_) => false,
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
                Item::Chunk(_) | Item::Reference(_) => 0,
            })
            .sum()
    }

    /// Queues acknowledgements, ahead of all chunks that have not begun.
    pub(crate) fn acknowledge(&mut self, acks: &mut Vec<u8>) {
        if acks.is_empty() || self.connection.is_none() {
            acks.clear();
            return;
        }
        let at = usize::from(self.queue.front().is_some_and(Item::has_begun));
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

    /// Answers whether what the peer has copied counts: whether its source is still what it was.
    ///
    /// # Errors
    /// It asks about what was not referred to.
    pub(crate) fn validate(
        &mut self,
        link: &LinkCore,
        asked: &mut Vec<ChunkName>,
        acks: &mut Vec<u8>,
    ) -> Result<(), TcpError> {
        for name in asked.drain(..) {
            let Some(source) = self.referred.remove(&name) else {
                let error = Error::new(ErrorKind::Protocol, format!("a question about {name:?}"))
                    .because("it was not referred to, or was asked about before");
                return Err(self.peer_error(link, error));
            };
            // Whoever closes the gate after this finds that the copy was made before.
            let guard = source.gate.enter_owned();
            let counts = guard.is_some() || mutants::is(Mutant::CountTakenBack);
            self.gate_fenced |= guard.is_some_and(|guard| guard.leave());
            acks.extend_from_slice(&LaneHeader::Validated(name, counts).encode());
        }
        Ok(())
    }

    /// Takes what the peer did not: its bytes are sent.
    ///
    /// # Errors
    /// It declines what was not referred to.
    pub(crate) fn declined(&mut self, link: &LinkCore, names: &mut Vec<ChunkName>, now: Time) -> Result<(), TcpError> {
        for name in names.drain(..) {
            let (Some(source), Some(connection)) = (self.referred.remove(&name), &self.connection) else {
                let error =
                    Error::new(ErrorKind::Protocol, format!("{name:?} was declined")).because("it was not referred to");
                return Err(self.peer_error(link, error));
            };
            link.exports.send_as_bytes(source.transfer);
            settle_missing(link, connection.name, name, now);
            self.settled = true;
        }
        Ok(())
    }

    /// What the peer has acknowledged it asks nothing about any more.
    pub(crate) fn settle_references(&mut self, names: &mut Vec<ChunkName>) {
        for name in names.drain(..) {
            self.referred.remove(&name);
        }
    }

    /// Whether there are references that are not settled.
    pub(crate) fn has_referred(&self) -> bool {
        !self.referred.is_empty()
    }

    fn peer_error(&self, link: &LinkCore, source: Error) -> TcpError {
        let name = self.connection.as_ref().map(|connection| connection.name);
        TcpError::Peer {
            place: link.place(name.unwrap_or(LaneName { index: 0, epoch: 0 })),
            source: Box::new(source),
        }
    }

    /// Gathers what waits, at most one call's worth, and hands it to the socket.
    pub(crate) fn send(&mut self, link: &LinkCore, lane: u16, filler: Filler, now: Time) -> Result<Sent, TcpError> {
        if self.connection.is_none() {
            return Ok(Sent::Nothing);
        }
        self.fill(link, lane, filler, now);
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
                Item::Reference(reference) if reference.sent == 0 && reference.source.gate.is_closed() => {
                    let name = reference.name;
                    self.queue.remove(index);
                    settle_missing(link, connection.name, name, now);
                    self.settled = true;
                    continue;
                }
                Item::Reference(reference) => scratch.pieces.push(piece(&reference.bytes[reference.sent..])),
                Item::Chunk(chunk) => match chunk.gather(scratch, &mut left) {
                    Ok(Gathered::Whole) => {}
                    Ok(Gathered::Part) => break,
                    Ok(Gathered::TakenBack) => {
                        let Some(Item::Chunk(chunk)) = self.queue.remove(index) else {
                            break;
                        };
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
            return Err(TcpError::Copy {
                place,
                source: Box::new(source),
            });
        }
        match result {
            Ok(_) if bytes == 0 => Ok(Sent::Nothing),
            Ok(sent) => {
                self.advance(link, lane, sent as u64);
                // A short write means that the socket is full; the next edge says when it is not.
                self.writable = sent == bytes;
                Ok(if sent < bytes {
                    Sent::Blocked
                } else if self.queue.is_empty() && !link.sender.lock().has_work(lane) {
                    Sent::All
                } else {
                    Sent::More
                })
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

    /// Starts copies for staged chunks, while the socket takes anything. Copies are polled by themselves
    /// ([`poll_copies`](Self::poll_copies)), after all lanes have started theirs, so that a device gets them together.
    pub(crate) fn start_copies(&mut self, link: &LinkCore, now: Time) {
        self.starved = false;
        if !self.writable {
            return;
        }
        let Some(staging) = self.connection.as_ref().map(|connection| connection.staging.clone()) else {
            return;
        };
        self.each_chunk(link, now, |chunk| chunk.start_copy(&staging));
        self.starved = self
            .queue
            .iter()
            .any(|item| matches!(item, Item::Chunk(chunk) if chunk.is_waiting()));
    }

    /// Looks at copies under way. True if one has ended.
    pub(crate) fn poll_copies(&mut self, link: &LinkCore, now: Time) -> bool {
        let before = self.copies();
        self.each_chunk(link, now, OutChunk::poll_copy);
        self.copies() != before
    }

    fn copies(&self) -> usize {
        let copying = |item: &&Item| matches!(item, Item::Chunk(chunk) if chunk.is_copying());
        self.queue.iter().filter(copying).count()
    }

    fn each_chunk(&mut self, link: &LinkCore, now: Time, mut act: impl FnMut(&mut OutChunk) -> Pumped) {
        let Some(name) = self.connection.as_ref().map(|connection| connection.name) else {
            return;
        };
        let mut index = 0;
        while let Some(item) = self.queue.get_mut(index) {
            let Item::Chunk(chunk) = item else {
                index += 1;
                continue;
            };
            let pumped = act(chunk);
            self.gate_fenced |= pumped.fenced;
            if let Some(error) = pumped.failed {
                link.sender.lock().halt(chunk.transfer);
                let place = link.place(name).to_string();
                self.memory_failed.push((chunk.transfer, error.at(place)));
            }
            if !pumped.taken_back {
                index += 1;
                continue;
            }
            let chunk = chunk.name;
            self.queue.remove(index);
            self.queued_bytes -= u64::from(chunk.length);
            settle_missing(link, name, chunk, now);
            self.settled = true;
        }
    }

    /// Gives staging buffers back while the socket takes nothing: their bytes are gathered again when it does. Called
    /// when other lanes need buffers, so that a stalled peer holds none.
    pub(crate) fn release_staging(&mut self) {
        if self.writable {
            return;
        }
        for item in &mut self.queue {
            let Item::Chunk(chunk) = item else { continue };
            chunk.release();
        }
    }

    fn fill(&mut self, link: &LinkCore, lane: u16, filler: Filler, now: Time) {
        let Some(staging) = self.connection.as_ref().map(|connection| connection.staging.clone()) else {
            return;
        };
        // Staged chunks are taken ahead of the socket: they have a copy to make first.
        if self.staged() > STAGED_MAX / 2 {
            return;
        }
        let wanted = |writer: &Writer| match writer.staged() {
            0 => writer.queued_bytes < u64::from(link.config.call_bytes_max),
            staged => staged < STAGED_MAX,
        };
        while self.queue.len() < QUEUE_MAX && wanted(self) {
            let Some(chunk) = link.sender.lock().next_chunk(lane, now) else {
                return;
            };
            let mut descriptions = Vec::new();
            let reference = match filler {
                Filler::DataThread => link.exports.refer(&chunk, &staging, &mut descriptions),
                Filler::Submitter => None,
            };
            if !descriptions.is_empty() {
                let bytes = descriptions;
                self.queue.push_back(Item::Acks { bytes, sent: 0 });
            }
            let item = match reference {
                Some(reference) => Item::Reference(Box::new(reference)),
                None => {
                    self.queued_bytes += u64::from(chunk.header.length);
                    Item::Chunk(Box::new(OutChunk::new(chunk)))
                }
            };
            self.queue.push_back(item);
        }
    }

    fn staged(&self) -> usize {
        self.queue
            .iter()
            .filter(|item| matches!(item, Item::Chunk(chunk) if chunk.is_staged()))
            .count()
    }

    fn advance(&mut self, link: &LinkCore, lane: u16, mut bytes: u64) {
        let counters = &link.lanes[usize::from(lane)].counters.sent;
        let mut payload = 0;
        let mut referred = 0;
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
                Some(Item::Reference(reference)) => {
                    let step = bytes.min((reference.bytes.len() - reference.sent) as u64);
                    reference.sent += step as usize;
                    bytes -= step;
                    reference.sent == reference.bytes.len()
                }
                None => break,
            };
            if done && let Some(Item::Reference(reference)) = self.queue.pop_front() {
                chunks += 1;
                referred += u64::from(reference.name.length);
                self.referred.insert(reference.name, reference.source);
            }
        }
        self.queued_bytes -= payload;
        add(&counters.bytes, payload);
        add(&counters.referred, referred);
        add(&counters.chunks, chunks);
    }
}

/// The chunk never went out: it can be given to any lane again, or never.
fn settle_missing(link: &LinkCore, lane: LaneName, chunk: ChunkName, now: Time) {
    link.sender.lock().acknowledged(lane, chunk, ChunkState::Missing, now);
}
