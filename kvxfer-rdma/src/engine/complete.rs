//! Completions: what the device says has been done, and what follows from it.

use kvxfer_core::Time;
use kvxfer_core::flow::{Applied, ChunkState, Direction};
use kvxfer_core::transport::LinkEvent;

use crate::counters::add;
use crate::error::RdmaError;
use crate::message::{LinkMessage, SlotUse};
use crate::verbs::{Completion, ErrorClass};

use super::Turn;
use super::lane::{Lane, Pair};
use super::work::{Marker, SentChunk, StandsFor};

/// Work request ids of receives have this bit; those of sends are their numbers on the queue pair.
pub(super) const RECEIVE: u64 = 1 << 63;

impl Pair {
    /// Sorts one completion; its consequences follow in the lane's turn.
    pub(super) fn take(&mut self, completion: &Completion, now: Time, place: impl FnOnce() -> String) {
        if completion.wr_id & RECEIVE == 0 {
            // What the peer sends says nothing of what this side has posted.
            self.last_progress = now;
        } else {
            self.receives = self.receives.saturating_sub(1);
        }
        if !completion.status.is_success() {
            // What was flushed says nothing; what failed first says why.
            if completion.status.class() != ErrorClass::Flushed {
                let error = RdmaError::Completion {
                    place: place(),
                    status: completion.status,
                    vendor: completion.vendor_error,
                };
                let error: kvxfer_core::Error = error.into();
                if completion.status.class() == ErrorClass::RemoteAccess && completion.wr_id & RECEIVE == 0 {
                    self.refused_request.get_or_insert((completion.wr_id, error.clone()));
                }
                self.failure.get_or_insert(error);
            } else {
                let error = RdmaError::Lost {
                    place: place(),
                    why: "its queue pair is in the error state".into(),
                };
                self.failure.get_or_insert_with(|| error.into());
            }
            if completion.wr_id & RECEIVE == 0 {
                // Those before it are done with too: completions come in order.
                while let Some(marker) = self.markers.pop_front_if(|marker| marker.number <= completion.wr_id) {
                    self.flushed.push(marker);
                }
            }
            return;
        }
        if completion.wr_id & RECEIVE != 0 {
            if let Some(immediate) = completion.immediate {
                self.immediates.push(immediate);
            } else {
                // A receive that no immediate consumed: nothing of ours does that.
                self.owed += 1;
            }
            return;
        }
        while let Some(marker) = self.markers.pop_front_if(|marker| marker.number <= completion.wr_id) {
            self.room += i64::from(marker.requests);
            self.completed.push(marker);
        }
    }

    /// Whether no work request is outstanding any more.
    pub(super) fn drained(&self) -> bool {
        self.markers.is_empty() && self.receives == 0 && !self.torn
    }
}

impl Lane {
    /// Acts on what has completed.
    pub(super) fn take_completed(&mut self, turn: &mut Turn<'_>) {
        let Some(pair) = &mut self.pair else { return };
        if !pair.completed.is_empty() {
            let mut completed = std::mem::take(&mut pair.completed);
            for marker in completed.drain(..) {
                self.marker_completed(turn, marker);
            }
            if let Some(pair) = &mut self.pair {
                pair.completed = completed;
            }
        }
        let Some(pair) = &mut self.pair else { return };
        if !pair.immediates.is_empty() {
            let mut immediates = std::mem::take(&mut pair.immediates);
            for immediate in immediates.drain(..) {
                self.immediate(turn, immediate);
            }
            if let Some(pair) = &mut self.pair {
                pair.immediates = immediates;
            }
        }
    }

    fn marker_completed(&mut self, turn: &mut Turn<'_>, marker: Marker) {
        match marker.stands_for {
            StandsFor::Part => {}
            StandsFor::Probe => self.probed(turn),
            StandsFor::Close { mut chunks, closing } => {
                if let Some(closing) = closing {
                    self.link.tell(LinkMessage::Closing(closing));
                }
                for chunk in chunks.drain(..) {
                    self.chunk_completed(turn, chunk);
                }
                turn.scratch.give_back(chunks);
            }
            StandsFor::Chunk(chunk) => self.chunk_completed(turn, chunk),
        }
    }

    fn chunk_completed(&mut self, turn: &Turn<'_>, mut chunk: SentChunk) {
        if chunk.direction == Direction::Read {
            self.exposure_read(chunk.landing.take());
        }
        if chunk.direction == Direction::Read && chunk.whole && chunk.bounce.is_some() {
            let counters = &self.link.rails[usize::from(self.rail)].counters;
            add(&counters.read_bytes, chunk.header.length.into());
            self.scatter_read(turn, chunk);
            return;
        }
        if !chunk.whole {
            // One that is whole was closed, and so handed over.
            self.landing_unused(chunk.landing.take());
        }
        let link = &self.link;
        let counters = &link.rails[usize::from(self.rail)].counters;
        // Outside before it is counted: counting may end the slot.
        let left = chunk.leave();
        let made_fence = *left.as_ref().unwrap_or(&false);
        let state = match (chunk.direction, chunk.whole && left.is_ok()) {
            (Direction::Write, true) => {
                add(&counters.written_bytes, chunk.header.length.into());
                ChunkState::Applied
            }
            // Revoked, or not inside what the peer has registered: neither gets better by trying again.
            (Direction::Write, false) => ChunkState::Refused,
            (Direction::Read, true) => {
                add(&counters.read_bytes, chunk.header.length.into());
                let applied = link.slots.applied(&chunk.header);
                if applied == Applied::Arrived {
                    link.emit(LinkEvent::SlotArrived {
                        slot: chunk.header.slot,
                        generation: chunk.header.generation,
                    });
                }
                applied.acknowledgement()
            }
            (Direction::Read, false) => {
                link.slots.abandon(&chunk.header);
                ChunkState::Refused
            }
        };
        if let Err(error) = left {
            link.memory_of_slot_failed(SlotUse::of(&chunk.header), error);
        }
        if made_fence {
            link.emit(LinkEvent::SlotQuiet);
        }
        let name = chunk.header.name();
        link.sender
            .lock()
            .completed(self.name(), chunk.transfer, name, state, turn.now);
    }
}
