//! Giving a queue pair up: to the error state (never to reset, which loses completions and lets old packets match), until
//! everything posted has its completion, then destroyed, then the device flushed. Only after that nothing of it can land.

use kvxfer_core::Error;
use kvxfer_core::flow::{ChunkState, Direction, LaneName};
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::transport::LinkEvent;

use crate::counters::add;
use crate::error::RdmaError;
use crate::message::{LinkMessage, reason};
use crate::verbs::QueuePair;

use super::Turn;
use super::lane::{Lane, Pair, Stage};
use super::work::{SentChunk, StandsFor};

impl Lane {
    /// Begins to give the queue pair up. Nothing happens if that has begun, or if there is none.
    pub(super) fn fail(&mut self, error: Error) {
        let setting_up = match self.stage {
            Stage::Connecting { .. } | Stage::Probing { .. } => true,
            Stage::Up => false,
            _ => return,
        };
        let Some(pair) = &self.pair else { return };
        let to_error = match &pair.queue_pair {
            Some(queue_pair) if mutants::is(Mutant::ResetInsteadOfError) => queue_pair.to_reset(),
            Some(queue_pair) => queue_pair.to_error(),
            None => Ok(()),
        };
        if let Err(refused) = to_error {
            // It may be in that state already, or its device gone: destroying it settles the rest.
            tracing::debug!(rail = self.text(), error = %refused, "to the error state");
        }
        if setting_up || !self.link.closing() {
            self.link.rail_failed(self.name(), &error);
        }
        self.shown(None);
        add(&self.link.rails[usize::from(self.rail)].counters.losses, 1);
        self.kicked = true;
        self.stage = Stage::Draining {
            error,
            limit: crate::clock::now() + self.link.config.fence_limit,
        };
    }

    /// Takes the steps of a fence that are due.
    pub(super) fn advance(&mut self, turn: &mut Turn<'_>) {
        if let Stage::Draining { error, limit } = &self.stage {
            let drained = self.pair.as_ref().is_none_or(Pair::drained);
            if drained || *limit <= turn.now {
                if !drained {
                    tracing::warn!(
                        rail = self.text(),
                        "the queue pair did not drain in time: it is destroyed as it is"
                    );
                }
                let error = error.clone();
                self.destroy_pair(turn, error);
            }
        }
        if let Stage::Flushing { limit, .. } = &self.stage {
            let late = *limit <= turn.now;
            let key = (self.link.id, self.rail);
            if self.destroyed.is_none()
                && let Some(flushed) = turn.flusher.answer(key).or(late.then_some(false))
            {
                self.flush_asked = false;
                self.destroyed = Some((flushed, turn.now + self.link.config.fence_limit * 2));
            }
            if let Some((flushed, limit)) = self.destroyed {
                // What came before the end counts, and is copied before anybody is told of the end.
                self.take_completed(turn);
                if self.copying() && limit <= turn.now {
                    tracing::error!(
                        rail = self.text(),
                        "copies have not ended: their blocks are quarantined"
                    );
                    self.give_up_copies();
                }
                if !self.copying() {
                    self.destroyed = None;
                    self.gone(turn, flushed || mutants::is(Mutant::SkipFlush));
                }
            }
        } else {
            self.settle_flushed(turn);
        }
    }

    fn destroy_pair(&mut self, turn: &mut Turn<'_>, error: Error) {
        let key = (self.link.id, self.rail);
        // One asked for before the queue pair was destroyed says nothing about it.
        turn.flusher.withdraw(key);
        self.unflush();
        self.flush_asked = true;
        let text = self.text();
        let destroyed = self.pair.as_mut().is_none_or(|pair| pair.destroy(&text));
        self.undestroyed = !destroyed;
        if !destroyed || mutants::is(Mutant::SkipFlush) {
            turn.flusher.answer_without(key, destroyed);
        } else {
            turn.flusher.ask(key);
        }
        self.stage = Stage::Flushing {
            error,
            limit: turn.now + self.link.config.fence_limit * 2,
        };
    }

    /// The queue pair is destroyed, and (if `flushed`) all it had accepted is in memory: everything about it is settled.
    fn gone(&mut self, turn: &mut Turn<'_>, flushed: bool) {
        let Stage::Flushing { mut error, .. } = std::mem::replace(&mut self.stage, Stage::Idle) else {
            return;
        };
        let name = self.name();
        let link = self.link.clone();
        let mut quiet = false;
        let mut refused = Vec::new();
        if let Some(mut pair) = self.pair.take() {
            // Never posted: they hold nothing but buffers.
            pair.staged.clear();
            self.exposures_gone(std::mem::take(&mut pair.exposures), flushed);
            for chunk in pair.chunks_left() {
                if pair
                    .refused_request
                    .as_ref()
                    .is_some_and(|(number, _)| chunk.has_request(*number))
                {
                    refused.push((chunk.transfer, chunk.direction, chunk.header));
                }
                quiet |= self.drop_chunk(chunk, flushed);
            }
            if let Some((_, refusal)) = pair.refused_request.take() {
                // The better reason, also if the peer was quicker to say that it lost the rail.
                error = refusal;
            }
            self.keep_received(std::mem::take(&mut pair.received));
        }
        let mut sender = link.sender.lock();
        // The peer does not let this side have that memory: trying again on another queue pair would come to the same.
        for (transfer, _, header) in refused.iter().filter(|(_, direction, _)| *direction == Direction::Read) {
            sender.completed(name, *transfer, header.name(), ChunkState::Refused, turn.now);
        }
        let chunks = sender.lane_lost(name);
        for (_, _, header) in refused
            .iter()
            .filter(|(_, direction, _)| *direction == Direction::Write)
        {
            sender.slot_refused(header.slot, header.generation);
        }
        drop(sender);
        add(
            &link.rails[usize::from(self.rail)].counters.in_doubt,
            chunks.len() as u64,
        );
        if quiet {
            link.emit(LinkEvent::SlotQuiet);
        }
        link.lane_gone(name, flushed);
        self.epoch_floor = self.epoch_floor.max(self.epoch);
        if link.closing() {
            self.stage = Stage::Ended;
            return;
        }
        link.tell(LinkMessage::LaneDown {
            lane: name,
            why: reason(error.to_string()),
        });
        // What was told of the lane's closes comes before the question what became of them.
        link.flush();
        link.emit(LinkEvent::LaneLost {
            lane: name,
            chunks,
            error,
        });
        if flushed {
            // Also for those before it.
            let mut lanes = std::mem::take(&mut self.unflushed.lanes);
            lanes.push(name);
            self.lanes_flushed(&lanes);
        } else {
            tracing::error!(
                rail = self.text(),
                "the device could not be flushed: what it may still write is quarantined"
            );
            if !self.undestroyed {
                self.unflushed.lanes.push(name);
                self.flush_again = Some(turn.now);
            }
        }
        self.after_loss(turn);
    }

    /// The device was flushed after these queue pairs were destroyed: nothing of them lands any more.
    pub(super) fn lanes_flushed(&mut self, lanes: &[LaneName]) {
        for lane in lanes {
            self.link.lane_gone(*lane, true);
        }
        self.quarantined
            .retain(|(epoch, _)| !lanes.iter().any(|lane| lane.epoch == *epoch));
        for (lane, chunks) in std::mem::take(&mut self.fences) {
            let made = if lanes.contains(&lane) {
                &mut self.answers
            } else {
                &mut self.fences
            };
            made.push((lane, chunks));
        }
        self.answer_fences();
    }

    /// A chunk that was outstanding when the queue pair went. True if leaving its fence made it.
    fn drop_chunk(&mut self, mut chunk: SentChunk, flushed: bool) -> bool {
        if chunk.direction == Direction::Read {
            self.link.slots.abandon(&chunk.header);
        }
        if !flushed {
            // The device may still touch it.
            let epoch = self.epoch;
            self.quarantined
                .extend(chunk.bounce.take().map(|bounce| (epoch, bounce)));
        }
        chunk.leave().unwrap_or(false)
    }

    /// At the end of the engine: whatever was outstanding.
    pub(super) fn destroy(&mut self) {
        let Some(mut pair) = self.pair.take() else { return };
        pair.destroy(&self.text());
        self.shown(None);
        for chunk in pair.chunks_left() {
            self.drop_chunk(chunk, false);
        }
        self.fail_quietly(RdmaError::Closed {
            peer: self.link.peer.incarnation,
        });
    }

    fn fail_quietly(&mut self, error: RdmaError) {
        tracing::debug!(rail = self.text(), %error, "rail ended with its engine");
        self.stage = Stage::Ended;
    }
}

impl Pair {
    /// Destroys the queue pair: the device does not touch memory for it any more, but for what it has accepted.
    ///
    /// False if the device does not let go of it: then nothing can be said of the memory that it may touch.
    pub(super) fn destroy(&mut self, place: &str) -> bool {
        match self.queue_pair.take().map(QueuePair::destroy) {
            Some(Err(error)) => {
                tracing::error!(rail = place, %error, "a queue pair could not be destroyed");
                false
            }
            Some(Ok(())) | None => true,
        }
    }

    /// Everything on it that has not completed.
    fn chunks_left(&mut self) -> Vec<SentChunk> {
        let mut left = Vec::new();
        let markers = self
            .markers
            .drain(..)
            .chain(self.flushed.drain(..))
            .chain(self.completed.drain(..));
        for marker in markers {
            match marker.stands_for {
                StandsFor::Close { chunks, .. } => left.extend(chunks),
                StandsFor::Chunk(chunk) => left.push(chunk),
                StandsFor::Probe | StandsFor::Part => {}
            }
        }
        left.extend(self.current.take().map(|current| current.sent));
        left.extend(self.open.drain(..).flat_map(|open| open.chunks));
        left
    }
}
