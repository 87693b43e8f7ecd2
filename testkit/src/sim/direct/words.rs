//! What the two ends of a one-sided link say to each other, and what follows from it.

use kvxfer_core::flow::{Applied, Placement, SendEvent};
use kvxfer_core::mutants::{self, Mutant};

use super::*;

/// A link message.
#[derive(Debug, Clone)]
pub(crate) enum Words {
    Connect {
        qp: QpIndex,
    },
    Accept {
        qp: QpIndex,
    },
    Ready {
        qp: QpIndex,
    },
    /// May I write into this slot?
    Admit(Slot),
    Admitted(Slot),
    Refused(Slot),
    Arrived(Slot),
    Revoke(Slot),
    Revoked(Slot),
    Closing {
        qp: QpIndex,
        close: Close,
        chunks: Vec<ChunkHeader>,
    },
    UserMessage {
        header: ChunkHeader,
        bytes: Vec<u8>,
    },
    LaneDown {
        qp: QpIndex,
    },
}

impl World {
    /// Has the machines carry words to the other end: their content is kept here, its number travels.
    pub(super) fn say(&mut self, link: LinkIndex, words: Words) {
        let number = self.words.len() as u64;
        self.words.push(words);
        self.report(link, LinkEvent::Message(number.to_le_bytes().to_vec()));
    }

    pub(crate) fn hear(&mut self, link: LinkIndex, body: &[u8]) {
        let number = body
            .try_into()
            .map_or(usize::MAX, |bytes| u64::from_le_bytes(bytes) as usize);
        let Some(words) = self.words.get(number).cloned() else {
            self.fail("wire", "a link message does not come back".into());
            return;
        };
        if self.links[link].closed {
            return;
        }
        self.trace(|| format!("link {link} hears {words:?}"));
        match words {
            Words::Connect { qp } => self.qp_accept(link, qp),
            Words::Accept { qp } => self.qp_accepted(link, qp),
            Words::Ready { qp } => self.qp_is_up(qp, 1),
            Words::Admit(slot) => {
                if !self.admit(link, slot) {
                    self.say(link, Words::Refused(slot));
                }
            }
            Words::Admitted(slot) => self.admitted(link, slot),
            Words::Refused(slot) => self.stop_writing(link, slot, false),
            Words::Arrived(slot) => {
                if let Some(direct) = self.direct(link) {
                    direct.permits.remove(&slot);
                }
                self.links[link].sender.slot_arrived(slot.0, slot.1);
            }
            Words::Revoke(slot) => self.stop_writing(link, slot, true),
            Words::Revoked(slot) => self.revocation_answered(link, slot),
            Words::Closing { qp, close, chunks } => {
                let end = self.end_of_qp(qp, link);
                self.qps[qp].ends[end].announced.insert(close, chunks);
                self.match_close(qp, end, close);
            }
            Words::UserMessage { header, bytes } => self.user_message(link, &header, &bytes),
            Words::LaneDown { qp } => {
                let end = self.end_of_qp(qp, link);
                let why = Error::new(ErrorKind::Transport, "a lane").because("the peer has fenced it");
                self.close_qp(qp, end, why);
            }
        }
        self.drain_sender(link);
        self.wake_direct(link);
    }

    // ------------------------------------------------------------------------------------------- receiving

    /// Lets the peer's device into a slot, and says so.
    pub(crate) fn admit(&mut self, link: LinkIndex, slot: Slot) -> bool {
        let (node, peer) = (self.links[link].node, self.links[link].peer.incarnation);
        let admitted = self.nodes[node]
            .body
            .as_ref()
            .is_some_and(|body| body.slots.admit(peer, slot.0, slot.1));
        if admitted {
            if let Some(direct) = self.direct(link) {
                direct.admitted.insert(slot);
            }
            self.coverage.reach(Point::Admitted);
            self.say(link, Words::Admitted(slot));
        }
        admitted
    }

    /// A close counts when both its immediate and its chunks are known.
    pub(super) fn match_close(&mut self, qp: QpIndex, end: usize, close: Close) {
        let side = &mut self.qps[qp].ends[end];
        let Some(link) = side.link else { return };
        if !side.announced.contains_key(&close) {
            self.coverage.reach(Point::ImmediateFirst);
            return;
        }
        if !side.immediates.remove(&close) && !mutants::is(Mutant::CountBeforeImmediate) {
            return;
        }
        let Some(chunks) = side.announced.remove(&close) else {
            return;
        };
        let (node, from) = (side.node, self.links[link].peer.incarnation);
        let Some(slots) = self.nodes[node].body.as_ref().map(|body| Arc::clone(&body.slots)) else {
            return;
        };
        for header in chunks {
            match slots.begin(from, &header) {
                Ok(Placement::Place { .. }) => {
                    let applied = slots.applied(&header);
                    self.counted(link, &header, applied);
                }
                Ok(_) => self.coverage.reach(Point::ChunkScrapped),
                Err(error) => {
                    self.fail("protocol", format!("an honest chunk is refused: {error}"));
                    return;
                }
            }
        }
    }

    fn user_message(&mut self, link: LinkIndex, header: &ChunkHeader, bytes: &[u8]) {
        let (node, from) = (self.links[link].node, self.links[link].peer.incarnation);
        let Some(slots) = self.nodes[node].body.as_ref().map(|body| Arc::clone(&body.slots)) else {
            return;
        };
        match slots.begin(from, header) {
            Ok(Placement::Message) => {
                let applied = slots.message_applied(header, bytes);
                self.counted(link, header, applied);
            }
            Ok(_) => {}
            Err(error) => self.fail("protocol", format!("an honest message is refused: {error}")),
        }
    }

    /// A chunk, or the message, was counted: perhaps it was the last.
    pub(super) fn counted(&mut self, link: LinkIndex, header: &ChunkHeader, applied: Applied) {
        let node = self.links[link].node;
        self.arrivals_seen(node);
        if applied != Applied::Arrived {
            return;
        }
        let slot = (header.slot, header.generation);
        if let Some(direct) = self.direct(link)
            && direct.admitted.remove(&slot)
        {
            self.say(link, Words::Arrived(slot));
        }
        self.report(
            link,
            LinkEvent::SlotArrived {
                slot: slot.0,
                generation: slot.1,
            },
        );
    }

    /// The machine has closed a slot: its writer must stop.
    pub(crate) fn revoke(&mut self, link: LinkIndex, slot: Slot) {
        let Some(direct) = self.direct(link) else { return };
        if !direct.admitted.contains(&slot) || direct.revoked.contains_key(&slot) {
            return;
        }
        direct.revoked.insert(slot, false);
        self.coverage.reach(Point::Revoked);
        self.say(link, Words::Revoke(slot));
        self.device_at(self.now + REVOKE_TIMEOUT, DeviceEvent::RevokeTimeout { link, slot });
    }

    /// The writer has stopped. What its device has had accepted may still be on its way to memory.
    fn revocation_answered(&mut self, link: LinkIndex, slot: Slot) {
        let Some(direct) = self.direct(link) else { return };
        if direct.revoked.get(&slot) != Some(&false) {
            return;
        }
        // Also by lanes that are being fenced, or were replaced.
        let ends = self.qps.iter().flat_map(|qp| &qp.ends);
        let settled = ends.filter(|end| end.link == Some(link)).map(|end| end.settled);
        let at = settled.max().unwrap_or(self.now).max(self.now);
        if at > self.now {
            self.coverage.reach(Point::RevokedFlushed);
        }
        self.device_at(at, DeviceEvent::Quiet { link, slot });
    }

    pub(super) fn slot_is_quiet(&mut self, link: LinkIndex, slot: Slot) {
        let Some(direct) = self.direct(link) else { return };
        if direct.revoked.remove(&slot).is_none() {
            return;
        }
        direct.admitted.remove(&slot);
        let node = self.links[link].node;
        let slots = self.nodes[node].body.as_ref().map(|body| Arc::clone(&body.slots));
        if slots.is_some_and(|slots| slots.remote_quiet(slot.0, slot.1)) {
            self.report(link, LinkEvent::SlotQuiet);
        }
    }

    // --------------------------------------------------------------------------------------------- sending

    /// A transfer for this link: what writes waits until its slot is admitted.
    pub(crate) fn hold_until_admitted(&mut self, link: LinkIndex, spec: SendSpec) -> Option<SendSpec> {
        let slot = (spec.slot, spec.generation);
        let direct = self.direct(link)?;
        if direct.permits.contains(&slot) {
            return Some(spec);
        }
        let first = !direct.held.contains_key(&slot);
        direct.held.entry(slot).or_default().push((spec, Vec::new()));
        if first {
            self.say(link, Words::Admit(slot));
        }
        None
    }

    fn admitted(&mut self, link: LinkIndex, slot: Slot) {
        let Some(direct) = self.direct(link) else { return };
        direct.permits.insert(slot);
        for (spec, parts) in direct.held.remove(&slot).unwrap_or_default() {
            let id = spec.id;
            self.submit_to_sender(link, spec);
            for part in parts {
                self.note_part(link, id, part.stream.length());
                self.links[link].sender.add_part(id, part);
            }
        }
    }

    /// Nothing more is written into the slot; the receiver is told once nothing is outstanding, if it wants to know.
    fn stop_writing(&mut self, link: LinkIndex, slot: Slot, answer: bool) {
        let Some(direct) = self.direct(link) else { return };
        direct.permits.remove(&slot);
        if answer {
            direct.stopping.insert(slot);
        }
        for (spec, _) in direct.held.remove(&slot).unwrap_or_default() {
            self.report(link, LinkEvent::Send(SendEvent::Refused(spec.id)));
        }
        self.links[link].sender.slot_refused(slot.0, slot.1);
        if answer && self.links[link].sender.outstanding(slot.0, slot.1) > 0 {
            self.coverage.reach(Point::RevokedInFlight);
        }
        self.answer_revocations(link);
    }

    /// Slots of which nothing is outstanding any more.
    pub(crate) fn answer_revocations(&mut self, link: LinkIndex) {
        let Some(direct) = self.links[link].direct.as_ref() else {
            return;
        };
        let sender = &self.links[link].sender;
        let quiet = |slot: &&Slot| sender.outstanding(slot.0, slot.1) == 0;
        let done: Vec<Slot> = direct.stopping.iter().filter(quiet).copied().collect();
        for slot in done {
            if let Some(direct) = self.direct(link) {
                direct.stopping.remove(&slot);
            }
            self.say(link, Words::Revoked(slot));
        }
    }
}
