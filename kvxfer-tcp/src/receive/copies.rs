//! Copies from staging into blocks: under way by themselves, looked at in order, and counted when they have ended.

use kvxfer_core::flow::{CHUNK_BYTES_MAX, ChunkHeader, ChunkState};
use kvxfer_core::transport::LinkEvent;

use super::{InChunk, Reader, Sink};
use crate::link::LinkCore;
use crate::placed::scatter;
use crate::staging::CopyJob;

/// Copies into blocks that a lane has under way, at most.
pub(super) const SCATTERS_MAX: usize = 4;
/// Copies of a lane that wait for each other, at most.
const FRESH_MAX: usize = 3;

/// A copy into blocks under way, and the end of its chunk if it is the last of it.
pub(super) struct Scatter {
    pub(super) job: Option<CopyJob>,
    pub(super) end: Option<(ChunkHeader, End)>,
    pub(super) slot: ChunkHeader,
}

/// How a staged chunk ends once its copies have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// All its bytes are placed.
    Placed,
    /// It does not count.
    Abandoned(ChunkState),
}

impl Reader {
    /// Polls copies into blocks; counts the chunks that they complete. True if one has ended. A copy that fails ends its
    /// slot with the reason; the lane goes on.
    pub(crate) fn poll_copies(&mut self, link: &LinkCore) -> bool {
        let mut moved = self.poll_references(link);
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
    pub(super) fn answer_without_copies(&mut self, link: &LinkCore) {
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
            && self.has_room()
            && !self.starved
            && !self.references.copying()
            && (coming || was_full())
    }

    /// Whether a copy into blocks is under way.
    pub(crate) fn copying(&self) -> bool {
        !self.scatters.is_empty() || self.references.copying()
    }

    /// Whether another copy may be begun.
    pub(super) fn has_room(&self) -> bool {
        self.scatters.len() < SCATTERS_MAX && self.references.have_room()
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

    /// After [`shut`](Self::shut): whether a copy into blocks still runs. Chunks that were whole are counted.
    pub(crate) fn drain_copies(&mut self, link: &LinkCore) -> bool {
        self.poll_copies(link);
        self.acks.clear();
        self.copying()
    }
}
