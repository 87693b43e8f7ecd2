//! A chunk on its way out: its header, its payload wherever it comes from, and its trailer.

use std::slice;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use kvxfer_core::flow::{ByteStream, Chunk, ChunkName, Gate, OwnedGateGuard, Payload, TransferId};
use kvxfer_core::memory::staging::{Way, needs_staging};
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::wire::lane::{HEADER_BYTES, LaneHeader, TRAILER_BYTES, Trailer};
use kvxfer_core::{Error, ErrorKind};

use crate::staging::{CopyJob, StagingBuffer, StagingPool, copy};
use crate::sys;

/// What a chunk is filled up with when its source was taken back midway.
static FILLER: [u8; 64 << 10] = [0; 64 << 10];

/// Room for one call's pieces, reused.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) pieces: Vec<libc::iovec>,
    segments: Vec<Segment>,
    pub(crate) guards: Vec<OwnedGateGuard>,
}

// SAFETY: the pointers in `pieces` are only used during one call of `Writer::send`, which clears them; between calls
// the struct holds capacity only.
unsafe impl Send for Scratch {}

pub(crate) struct OutChunk {
    header: [u8; HEADER_BYTES],
    trailer: [u8; TRAILER_BYTES],
    pub(crate) transfer: TransferId,
    pub(crate) name: ChunkName,
    payload: OutPayload,
    /// Bytes of header, payload and trailer that the socket took.
    pub(crate) sent: u64,
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
    Staged {
        source: Source,
        from: u64,
        stage: Stage,
    },
    Message {
        bytes: Arc<[u8]>,
        start: usize,
    },
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
    Copying(Box<CopyJob>),
    /// Holds the payload from `from` on.
    Ready(StagingBuffer),
}

/// What [`OutChunk::gather`] came to.
pub(crate) enum Gathered {
    /// All of the chunk is in the call.
    Whole,
    /// Some is not: nothing may follow it in this call.
    Part,
    /// Its source was taken back before any of it was sent: it need not be sent at all.
    TakenBack,
}

impl OutChunk {
    pub(crate) fn new(chunk: Chunk) -> OutChunk {
        let header = chunk.header;
        let payload = match chunk.payload {
            Payload::Stream {
                stream, regions, gate, ..
            } => {
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
            transfer: chunk.transfer,
            name: header.name(),
            payload,
            sent: 0,
            valid: true,
            checksum: header.checksummed.then(|| Checksum {
                digest: Digest::new(CrcAlgorithm::Crc64Nvme),
                covered: 0,
            }),
        }
    }

    pub(crate) fn total(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.name.length) + TRAILER_BYTES as u64
    }

    pub(crate) fn payload_sent(&self) -> u64 {
        self.sent
            .saturating_sub(HEADER_BYTES as u64)
            .min(u64::from(self.name.length))
    }

    pub(crate) fn is_copying(&self) -> bool {
        matches!(
            self.payload,
            OutPayload::Staged {
                stage: Stage::Copying(_),
                ..
            }
        )
    }

    pub(crate) fn is_waiting(&self) -> bool {
        matches!(
            self.payload,
            OutPayload::Staged {
                stage: Stage::Waiting,
                ..
            }
        )
    }

    pub(crate) fn is_staged(&self) -> bool {
        matches!(self.payload, OutPayload::Staged { .. })
    }

    /// The connection is gone: lets go of a copy if it has ended, and says whether that made a fence. `None` while it
    /// runs.
    pub(crate) fn end_copy(&mut self) -> Option<bool> {
        let OutPayload::Staged { stage, .. } = &mut self.payload else {
            return Some(false);
        };
        if let Stage::Copying(job) = stage {
            // Its outcome matters to nobody any more.
            let _ = job.poll()?;
        }
        match std::mem::replace(stage, Stage::Waiting) {
            Stage::Copying(job) => Some(job.finish().1),
            Stage::Waiting | Stage::Ready(_) => Some(false),
        }
    }

    /// Gives a staging buffer back; what is left to send is gathered again.
    pub(crate) fn release(&mut self) {
        let done = self.payload_sent();
        if let OutPayload::Staged { from, stage, .. } = &mut self.payload
            && matches!(stage, Stage::Ready(_))
        {
            *from = done;
            *stage = Stage::Waiting;
        }
    }

    /// The source is gone: the rest is filler and the trailer says so.
    fn take_back(&mut self) {
        self.valid = false;
        self.payload = OutPayload::Filler;
    }

    /// Adds what is left of the chunk to the call, up to `left` payload bytes.
    pub(crate) fn gather(&mut self, scratch: &mut Scratch, left: &mut u64) -> Result<Gathered, Error> {
        let done = self.payload_sent();
        let want = u64::from(self.name.length) - done;
        let mark = scratch.pieces.len();
        if let Some(rest @ [_, ..]) = self.header.get(self.sent as usize..) {
            scratch.pieces.push(piece(rest));
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
        let trailer_sent = self
            .sent
            .saturating_sub(HEADER_BYTES as u64 + u64::from(self.name.length)) as usize;
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

    /// Starts copying a payload that waits for it, if there is a buffer.
    pub(crate) fn start_copy(&mut self, staging: &Arc<StagingPool>) -> Pumped {
        let OutPayload::Staged { source, from, stage } = &mut self.payload else {
            return Pumped::default();
        };
        if !matches!(stage, Stage::Waiting) {
            return Pumped::default();
        }
        let Some(guard) = source.gate.enter_owned() else {
            return self.source_is_gone(None);
        };
        let Some(buffer) = staging.take() else {
            return Pumped {
                fenced: guard.leave(),
                ..Pumped::default()
            };
        };
        let want = u64::from(self.name.length) - *from;
        let mut segments = Vec::new();
        let covered = source
            .stream
            .segments(self.name.offset + *from, want, usize::MAX, &mut segments);
        if covered != want {
            let fenced = guard.leave();
            return Pumped {
                fenced,
                ..self.source_is_gone(Some(short_stream(covered, want)))
            };
        }
        let regions = source.regions.clone();
        *stage = Stage::Copying(Box::new(copy(
            Way::Gather,
            regions,
            &segments,
            buffer,
            (&source.gate, guard),
        )));
        Pumped::default()
    }

    /// Looks at the copy under way, if one is.
    pub(crate) fn poll_copy(&mut self) -> Pumped {
        let OutPayload::Staged { stage, .. } = &mut self.payload else {
            return Pumped::default();
        };
        let Stage::Copying(job) = stage else {
            return Pumped::default();
        };
        let Some(outcome) = job.poll() else {
            return Pumped::default();
        };
        let Stage::Copying(job) = std::mem::replace(stage, Stage::Waiting) else {
            return Pumped::default();
        };
        let (buffer, fenced) = job.finish();
        match outcome {
            Ok(()) => {
                *stage = Stage::Ready(buffer);
                Pumped {
                    fenced,
                    ..Pumped::default()
                }
            }
            Err(error) => {
                drop(buffer);
                Pumped {
                    fenced,
                    ..self.source_is_gone(Some(error))
                }
            }
        }
    }

    /// The source cannot be read any more. What is on its way is filled up; what has not begun need not be sent at all.
    fn source_is_gone(&mut self, failed: Option<Error>) -> Pumped {
        let unsent = self.sent == 0;
        if !unsent {
            self.take_back();
        }
        Pumped {
            taken_back: unsent,
            failed,
            fenced: false,
        }
    }
}

/// What became of a chunk that is staged.
#[derive(Default)]
pub(crate) struct Pumped {
    /// Its source is gone before any of it was sent: the chunk is to be dropped.
    pub(crate) taken_back: bool,
    /// Its source could not be read.
    pub(crate) failed: Option<Error>,
    /// A gate became fenced.
    pub(crate) fenced: bool,
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
                    Error::new(ErrorKind::Internal, "a segment outside its region").because(format!("{segment:?}"))
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

pub(crate) fn piece(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

fn short_stream(covered: u64, want: u64) -> Error {
    Error::new(ErrorKind::Internal, "a stream shorter than its chunk")
        .because(format!("it gave {covered} of {want} bytes"))
        .remedy("report this: the plan and the header disagree")
}
