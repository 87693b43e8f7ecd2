//! The receiving side of a rail: closes are matched with what they cover, and what they cover is counted.

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{Applied, ByteStream, ChunkHeader, Gate, Placement};
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{Error, ErrorKind};

use crate::checksum;
use crate::counters::add;
use crate::error::RdmaError;
use crate::inbound::Regions;
use crate::memory::{self, Touched};
use crate::message::{Closing, LinkMessage};
use crate::staging::Buffer;

use super::Turn;
use super::lane::{Lane, Received};

/// Closes told whose immediates have not come, per queue pair, at most: the peer has no more credits than that.
const CLOSINGS_MAX: usize = 4096;
/// Closes without an immediate that wait for a flush, per rail, at most.
const UNFLUSHED_MAX: usize = 65_536;
/// Pause after a flush failed: while a port is down, its device may not even reach itself.
const FLUSH_PAUSE: Duration = Duration::from_millis(100);

impl Lane {
    /// The peer says what a close covers.
    pub(super) fn closing_told(&mut self, turn: &mut Turn<'_>, closing: Closing) {
        if closing.over_session {
            // Its writes are complete at the sender, on whatever queue pair they were; they may still be on their way to
            // memory here.
            if self.unflushed.closings.len() >= UNFLUSHED_MAX {
                self.link
                    .fail(RdmaError::peer(&self.link, "it closes faster than this side can flush".into()).into());
                return;
            }
            self.unflushed.closings.push(closing);
            self.kicked = true;
            return;
        }
        let epoch = match mutants::is(Mutant::IgnoreLinkEpoch) {
            true => self.epoch,
            false => closing.lane.epoch,
        };
        let received = if epoch == self.epoch && self.pair.is_some() {
            self.pair.as_mut().map(|pair| &mut pair.received)
        } else {
            let past = self.past.iter_mut().find(|(past, _)| *past == epoch);
            past.map(|(_, received)| received)
        };
        // Of an epoch whose fence has been answered: its sender knows that it did not count.
        let Some(received) = received else { return };
        let immediate = closing.immediate();
        if received.immediates.remove(&immediate) {
            self.count(turn, closing);
            self.matched(epoch);
        } else if received.closings.len() >= CLOSINGS_MAX || received.closings.contains_key(&immediate) {
            self.link
                .fail(RdmaError::peer(&self.link, "it closes more than it has credits for".into()).into());
        } else {
            received.closings.insert(immediate, closing);
        }
    }

    /// An immediate came: everything posted before it on this queue pair is in memory.
    pub(super) fn immediate(&mut self, turn: &mut Turn<'_>, immediate: u32) {
        let epoch = self.epoch;
        let Some(pair) = &mut self.pair else { return };
        let closing = match mutants::is(Mutant::CountCloses) {
            true => take_any(&mut pair.received),
            false => pair.received.closings.remove(&immediate),
        };
        match closing {
            Some(closing) => {
                self.count(turn, closing);
                self.matched(epoch);
            }
            None => {
                pair.received.immediates.insert(immediate);
            }
        }
    }

    /// A close is matched: its receive may be used again.
    fn matched(&mut self, epoch: u32) {
        if epoch == self.epoch
            && let Some(pair) = &mut self.pair
        {
            pair.owed += 1;
            self.kicked = true;
        }
    }

    /// Posts receives that were used, and gives the peer credit for them.
    pub(super) fn receive(&mut self, turn: &mut Turn<'_>) {
        let depth = turn.device.receive_depth;
        let lane = self.name();
        let Some(pair) = &mut self.pair else { return };
        if pair.owed < (depth / 4).max(1) {
            return;
        }
        let count = std::mem::take(&mut pair.owed);
        // Posted before they are told.
        let Some(queue_pair) = &mut pair.queue_pair else { return };
        match queue_pair.post_receives(super::complete::RECEIVE, count) {
            Ok(()) => {
                pair.receives += count;
                self.link.tell(LinkMessage::Credits { lane, count });
            }
            Err(error) => self.fail(RdmaError::from(error).into()),
        }
    }

    /// Counts closes that came over the session, and lets go of slots that the peer writes no more, once the device is
    /// flushed.
    pub(super) fn settle_flushed(&mut self, turn: &mut Turn<'_>) {
        let key = (self.link.id, self.rail);
        if self.flush_asked {
            match turn.flusher.answer(key) {
                None => return,
                Some(true) => {
                    let flushed = std::mem::take(&mut self.flushing);
                    flushed
                        .closings
                        .into_iter()
                        .for_each(|closing| self.count(turn, closing));
                    // Nothing lands in these any more.
                    drop(flushed.landings);
                    flushed.revoked.iter().for_each(|slot| self.link.device_flushed(slot));
                    self.lanes_flushed(&flushed.lanes);
                }
                Some(false) => {
                    self.unflush();
                    self.flush_again = Some(turn.now + FLUSH_PAUSE);
                }
            }
            self.flush_asked = false;
        }
        if self.flush_again.is_some_and(|at| turn.now < at) {
            return;
        }
        self.flush_again = None;
        // A device that is gone for good is not flushed any more; with the last one the link ends.
        if !self.unflushed.is_empty() && !self.device_dead {
            self.flushing = std::mem::take(&mut self.unflushed);
            turn.flusher.ask(key);
            self.flush_asked = true;
        }
    }

    /// What had asked for a flush that was not made has to ask again.
    pub(super) fn unflush(&mut self) {
        self.flushing.append(&mut self.unflushed);
        self.unflushed = std::mem::take(&mut self.flushing);
    }

    /// What a close covers is in place, or in landings: it is counted, or copied into place first.
    fn count(&mut self, turn: &mut Turn<'_>, closing: Closing) {
        let link = self.link.clone();
        let counters = &link.rails[usize::from(self.rail)].counters;
        let mut taken: Vec<Taken> = Vec::with_capacity(closing.chunks.len());
        let mut digest = closing.checksum.map(|_| checksum::new());
        // All chunks of a close are one slot's, and a slot's regions are all asked at once.
        let mut plain = None;
        let mut landed: Option<(Touched, Regions)> = None;
        for (header, chunk) in closing.headers().zip(&closing.chunks) {
            let landing = match chunk.landing {
                None => None,
                Some(number) => match self.take_landing(closing.lane.epoch, number) {
                    Some(buffer) => Some(buffer),
                    None => {
                        self.abandon(&taken);
                        if closing.lane == self.name() {
                            let why = format!("it closes landing {number}, which it does not have");
                            link.fail(RdmaError::peer(&link, why).into());
                        }
                        add(&counters.stray_closes, 1);
                        return;
                    }
                },
            };
            match link.slots.begin(link.peer.incarnation, &header) {
                Ok(Placement::Place { stream, regions, gate }) => {
                    let plain = *plain.get_or_insert_with(|| memory::is_plain(&*regions));
                    if let (Some(digest), Some(buffer)) = (&mut digest, &landing) {
                        buffer.feed(digest, header.length);
                    } else if let Some(digest) = &mut digest
                        && let Some(_inside) = gate.enter()
                    {
                        checksum::feed(digest, &*stream, header.offset, header.length, |region| {
                            regions.get(region as usize)
                        });
                    }
                    if !plain && landing.is_none() && header.length > 0 {
                        let (touched, _) = landed.get_or_insert_with(|| (Touched::new(regions.len()), regions.clone()));
                        touched.add(&*stream, header.offset, header.length);
                    }
                    let landing = landing.map(|buffer| Landed {
                        buffer,
                        stream,
                        regions,
                        gate,
                    });
                    taken.push(Taken { header, landing });
                }
                // An ended slot, or what is in place already: dropped.
                Ok(Placement::Scrap(_) | Placement::Message) => {
                    digest = None;
                    add(&counters.stray_closes, 1);
                }
                Err(error) => {
                    self.abandon(&taken);
                    // Not the rail's fault: the peer does not keep to the protocol.
                    link.fail(error);
                    return;
                }
            }
        }
        if let (Some(digest), Some(sent)) = (digest, closing.checksum)
            && digest.finalize() != sent
        {
            self.corrupt(&closing, &taken);
            return;
        }
        if let Some((touched, regions)) = landed {
            if link.is_staged(&regions) {
                self.abandon(&taken);
                let why = "it closes what it cannot have written: the pool goes through staging".to_owned();
                link.fail(RdmaError::peer(&link, why).into());
                return;
            }
            if let Err(error) = touched.settle(&regions) {
                self.abandon(&taken);
                link.memory_of_slot_failed(closing.slot, error);
                return;
            }
        }
        for Taken { header, landing } in taken {
            if let Some(landed) = landing {
                let place = (&*landed.stream, landed.regions, &landed.gate);
                self.scatter_landed(turn, header, place, landed.buffer);
                continue;
            }
            add(&counters.received_bytes, header.length.into());
            if link.slots.applied(&header) == Applied::Arrived {
                link.slot_arrived(closing.slot);
            }
        }
    }

    fn abandon(&self, taken: &[Taken]) {
        for chunk in taken {
            self.link.slots.abandon(&chunk.header);
        }
    }

    fn corrupt(&mut self, closing: &Closing, taken: &[Taken]) {
        let error = Error::new(
            ErrorKind::Corrupt,
            format!("slot {}.{}", closing.slot.slot, closing.slot.generation),
        )
        .at(self.text())
        .because("the bytes that arrived are not those that were sent: their CRC64 differs")
        .remedy("send it again; if it happens again on this rail, take the port out of use and test the machine");
        self.abandon(taken);
        let slot = closing.slot;
        self.link.slots.corrupt(slot.slot, slot.generation);
        self.link.emit(LinkEvent::SlotCorrupt {
            slot: slot.slot,
            generation: slot.generation,
            error: error.clone(),
        });
        self.fail(error);
    }
}

/// A chunk of a close that the slot takes.
struct Taken {
    header: ChunkHeader,
    /// Where its bytes are, if they are not in place.
    landing: Option<Landed>,
}

struct Landed {
    buffer: Buffer,
    stream: Arc<dyn ByteStream>,
    regions: Regions,
    gate: Arc<Gate>,
}

/// The mutant's way: any close will do.
fn take_any(received: &mut Received) -> Option<Closing> {
    let key = *received.closings.keys().next()?;
    received.closings.remove(&key)
}
