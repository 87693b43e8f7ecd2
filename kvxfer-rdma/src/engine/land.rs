//! Landings: buffers that the peer writes in place of blocks that no device was given.

use std::sync::Arc;

use kvxfer_core::flow::{ByteStream, ChunkHeader, Gate, LaneName};
use kvxfer_core::memory::staging::Way;
use kvxfer_core::mutants::{self, Mutant};

use crate::error::RdmaError;
use crate::inbound::Regions;
use crate::message::{LANDINGS_MAX, Landing, LinkMessage};
use crate::staging::{Buffer, copy};

use super::Turn;
use super::lane::{Lane, Received};
use super::staged::LaneCopy;

impl Lane {
    /// The peer wants landings.
    pub(super) fn landings_wanted(&mut self, lane: LaneName, count: u32) {
        if lane != self.name() {
            return;
        }
        let Some(pair) = &mut self.pair else { return };
        pair.landings_wanted = pair.landings_wanted.saturating_add(count);
        if pair.landings_wanted as usize > LANDINGS_MAX {
            let error = RdmaError::peer(&self.link, format!("it wants more than {LANDINGS_MAX} landings"));
            self.link.fail(error.into());
        }
        self.kicked = true;
    }

    /// Gives the peer landings: not more than its share, which is the shelf's to know. What it has comes back in a turn of
    /// this lane, which then gets here again.
    pub(super) fn grant_landings(&mut self, turn: &Turn<'_>) {
        let (taker, lane) = (self.taker(), self.name());
        let Some(pair) = &mut self.pair else { return };
        let shelf = &turn.staging.landings;
        if pair.landings_wanted == 0 {
            shelf.withdraw(taker);
            return;
        }
        let mut landings = Vec::new();
        while pair.landings_wanted > 0 {
            match shelf.take(taker) {
                Ok(Some(buffer)) => {
                    let number = pair.next_landing;
                    pair.next_landing += 1;
                    pair.landings_wanted -= 1;
                    landings.push(Landing {
                        number,
                        address: buffer.address(),
                        key: buffer.rkey(),
                    });
                    pair.received.landings.insert(number, buffer);
                }
                Ok(None) => break,
                Err(error) => {
                    self.link.fail(error);
                    break;
                }
            }
        }
        if !landings.is_empty() {
            self.link.tell(LinkMessage::Landings { lane, landings });
        }
    }

    /// The peer gives landings back. It has written nothing to them that could still be under way at its end; what the
    /// device here has accepted is flushed before they are used again.
    pub(super) fn landings_given_back(&mut self, lane: LaneName, numbers: &[u32]) {
        for number in numbers {
            if let Some(buffer) = self.take_landing(lane.epoch, *number)
                && !mutants::is(Mutant::ReuseLandingUnflushed)
            {
                self.unflushed.landings.push(buffer);
            }
        }
        self.kicked = true;
    }

    /// A landing of a queue pair, present or past.
    pub(super) fn take_landing(&mut self, epoch: u32, number: u32) -> Option<Buffer> {
        let received = match &mut self.pair {
            Some(pair) if epoch == self.epoch => &mut pair.received,
            _ => &mut self.past.iter_mut().find(|(past, _)| *past == epoch)?.1,
        };
        received.landings.remove(&number)
    }

    /// What the peer has written to a landing goes into its blocks, and then counts.
    pub(super) fn scatter_landed(
        &mut self,
        turn: &Turn<'_>,
        header: ChunkHeader,
        (stream, regions, gate): (&dyn ByteStream, Regions, &Arc<Gate>),
        buffer: Buffer,
    ) {
        let Some(guard) = gate.enter_owned() else {
            self.link.slots.abandon(&header);
            return;
        };
        let range = (stream, header.offset, header.length);
        self.copies.push(LaneCopy {
            copy: copy(Way::Scatter, regions, range, buffer, guard),
            header,
            read_by: None,
        });
        self.copy_started(turn);
    }

    /// Closes and immediates of a queue pair that nobody asks about any more. Its landings are free, unless something of
    /// it may still land.
    pub(super) fn let_go_of(&mut self, epoch: u32, received: Received) {
        let lane = LaneName {
            index: self.rail,
            epoch,
        };
        if self.link.is_unfinished(lane) {
            let landings = received.landings.into_values();
            self.quarantined.extend(landings.map(|buffer| (epoch, buffer)));
        }
    }

    /// The lane ends: what may still be written is never used again.
    pub(super) fn quarantine(&mut self) {
        while let Some((epoch, received)) = self.past.pop_front() {
            self.let_go_of(epoch, received);
        }
        let lane = self.name();
        if self.link.is_unfinished(lane) {
            let back = self
                .unflushed
                .landings
                .drain(..)
                .chain(self.flushing.landings.drain(..));
            self.quarantined.extend(back.map(|buffer| (lane.epoch, buffer)));
        }
        for (_, buffer) in self.quarantined.drain(..) {
            buffer.quarantine();
        }
    }
}
