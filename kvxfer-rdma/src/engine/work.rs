//! What is on a queue pair: signalled work requests and what each of them stands for.

use std::sync::Arc;

use kvxfer_core::Result;
use kvxfer_core::flow::{ByteStream, ChunkHeader, Direction, OwnedGateGuard, TransferId};
use kvxfer_core::memory::Segment;

use crate::inbound::Regions;
use crate::memory::Touched;
use crate::message::{Closing, Landing, SlotUse};
use crate::outbound::TransferKeys;
use crate::staging::Buffer;
use crate::verbs::Sge;

/// Segments expanded at a time: enough that expanding costs nothing per segment, few enough to stay in the first cache.
pub(crate) const SEGMENTS_MAX: usize = 256;

/// A signalled work request. Its completion also completes the unsignalled ones before it.
pub(crate) struct Marker {
    /// Its number on the queue pair.
    pub(crate) number: u64,
    /// Work requests since the marker before it, itself included: so many places its completion frees.
    pub(crate) requests: u32,
    pub(crate) stands_for: StandsFor,
}

pub(crate) enum StandsFor {
    /// The write that finds out whether the rail works.
    Probe,
    /// Nothing by itself: more of a chunk follows.
    Part,
    /// A close: its chunks' writes are complete.
    Close {
        chunks: Vec<SentChunk>,
        /// To be told now, since no immediate told it.
        closing: Option<Closing>,
    },
    /// A chunk that was read, or one that was given up midway.
    Chunk(SentChunk),
}

/// A chunk whose work requests are posted.
pub(crate) struct SentChunk {
    pub(crate) transfer: TransferId,
    pub(crate) header: ChunkHeader,
    pub(crate) direction: Direction,
    /// All of it is posted; else it was given up midway and does not count.
    pub(crate) whole: bool,
    /// Inside the fence of the blocks on this side, for as long as the device may touch them.
    pub(crate) guard: Option<OwnedGateGuard>,
    /// The staging buffer that stands for this side's blocks.
    pub(crate) bounce: Option<Buffer>,
    /// The peer's, that stands for its blocks.
    pub(crate) landing: Option<Landing>,
    /// What is read into, if that has to be settled, or is reached through a bounce.
    pub(crate) landed: Option<(Arc<dyn ByteStream>, Regions)>,
    /// The registrations that its work requests name: the device may read them again until it is done, also after the
    /// transfer has arrived and is forgotten.
    pub(crate) keys: Arc<TransferKeys>,
    /// Its work requests' numbers, first and last.
    pub(crate) requests: (u64, u64),
}

impl SentChunk {
    /// Makes what was read visible, and leaves the fence. True if that made it; an error means that the blocks are never
    /// given back.
    pub(crate) fn leave(&mut self) -> Result<bool> {
        let Some(guard) = self.guard.take() else {
            return Ok(false);
        };
        if let (Some((stream, regions)), None) = (&self.landed, &self.bounce) {
            let mut touched = Touched::new(regions.len());
            touched.add(&**stream, self.header.offset, self.header.length);
            if let Err(error) = touched.settle(regions) {
                tracing::error!(%error, "what was read could not be settled: its blocks are quarantined");
                std::mem::forget(guard);
                return Err(error);
            }
        }
        Ok(guard.leave())
    }

    pub(crate) fn has_request(&self, number: u64) -> bool {
        (self.requests.0..=self.requests.1).contains(&number)
    }
}

/// The chunk that is being posted.
pub(crate) struct Current {
    pub(crate) sent: SentChunk,
    pub(crate) local: Side,
    pub(crate) remote: Side,
    /// Bytes posted.
    pub(crate) posted: u32,
}

/// One side's segments of the chunk, expanded as they are needed.
pub(crate) struct Side {
    stream: Arc<dyn ByteStream>,
    // Next byte of the stream to expand, and the end of the chunk in it.
    read: u64,
    end: u64,
    segments: Vec<Segment>,
    next: usize,
    used: u64,
}

impl Side {
    pub(crate) fn new(stream: Arc<dyn ByteStream>, header: &ChunkHeader, mut segments: Vec<Segment>) -> Side {
        segments.clear();
        Side {
            stream,
            read: header.offset,
            end: header.offset + u64::from(header.length),
            segments,
            next: 0,
            used: 0,
        }
    }

    /// The chunk's bytes as one piece from the start of a staging buffer, which has no region.
    pub(crate) fn dense(stream: Arc<dyn ByteStream>, header: &ChunkHeader, segments: Vec<Segment>) -> Side {
        let mut side = Side::new(stream, header, segments);
        side.read = side.end;
        side.segments.push(Segment {
            region: 0,
            offset: 0,
            length: header.length.into(),
        });
        side
    }

    /// What is left of the segment that comes next.
    #[inline]
    pub(crate) fn peek(&mut self) -> Option<Segment> {
        if self.next == self.segments.len() {
            self.expand()?;
        }
        let segment = self.segments[self.next];
        Some(Segment {
            region: segment.region,
            offset: segment.offset + self.used,
            length: segment.length - self.used,
        })
    }

    #[inline]
    pub(crate) fn take(&mut self, length: u64) {
        self.used += length;
        if self.used >= self.segments[self.next].length {
            self.next += 1;
            self.used = 0;
        }
    }

    fn expand(&mut self) -> Option<()> {
        self.segments.clear();
        self.next = 0;
        self.used = 0;
        let length = self.end - self.read;
        if length == 0 {
            return None;
        }
        let got = self
            .stream
            .segments(self.read, length, SEGMENTS_MAX, &mut self.segments);
        self.read += got;
        (got > 0).then_some(())
    }

    pub(crate) fn stream(&self) -> &dyn ByteStream {
        &*self.stream
    }
}

/// A transfer's chunks that were posted in this turn and are not closed yet.
pub(crate) struct OpenClose {
    pub(crate) slot: SlotUse,
    pub(crate) transfer: TransferId,
    pub(crate) chunks: Vec<SentChunk>,
    /// CRC64-NVME so far, if the transfer wants checksums.
    pub(crate) checksum: Option<crc_fast::Digest>,
}

/// Lists that are used over and over, so that posting allocates nothing.
pub(crate) struct Scratch {
    pub(crate) gathered: Vec<Sge>,
    lists: Vec<Vec<Segment>>,
    chunks: Vec<Vec<SentChunk>>,
}

impl Scratch {
    pub(crate) fn new(segments: usize) -> Scratch {
        Scratch {
            gathered: Vec::with_capacity(segments),
            lists: Vec::new(),
            chunks: Vec::new(),
        }
    }

    pub(crate) fn list(&mut self) -> Vec<Segment> {
        self.lists.pop().unwrap_or_else(|| Vec::with_capacity(SEGMENTS_MAX))
    }

    /// Takes a chunk's lists back.
    pub(crate) fn recycle(&mut self, local: Side, remote: Side) {
        self.lists.push(local.segments);
        self.lists.push(remote.segments);
    }

    pub(crate) fn chunk_list(&mut self) -> Vec<SentChunk> {
        self.chunks.pop().unwrap_or_default()
    }

    /// Takes a list back.
    pub(crate) fn give_back(&mut self, list: Vec<SentChunk>) {
        if self.chunks.len() < 64 {
            self.chunks.push(list);
        }
    }
}
