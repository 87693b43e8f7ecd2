//! The ends of lanes and links: queue pairs are fenced, not just closed.

use kvxfer_core::flow::{ChunkState, SendEvent};
use kvxfer_core::machine::LinkCommand;

use super::*;

impl World {
    /// A queue pair goes into the error state: it takes nothing more. It is fenced once everything that its device
    /// has taken is in memory and its thread has seen all completions.
    pub(super) fn close_qp(&mut self, qp: QpIndex, end: usize, why: Error) {
        let side = &mut self.qps[qp].ends[end];
        if matches!(side.state, QpState::Error | QpState::Gone) {
            return;
        }
        side.state = QpState::Error;
        side.why = Some(why);
        let drained = self.now + Duration::from_micros(self.rng.within(1..500));
        let at = self.qps[qp].ends[end].settled.max(drained);
        self.device_at(at, DeviceEvent::Fenced { qp, end });
    }

    pub(super) fn qp_fenced(&mut self, qp: QpIndex, end: usize) {
        let name = self.qps[qp].name;
        // Draining: what had come counts.
        for close in self.qps[qp].ends[end].unseen.clone() {
            self.qp_immediate(qp, end, close);
        }
        let side = &mut self.qps[qp].ends[end];
        let Some(link) = side.link else { return };
        side.state = QpState::Gone;
        let (node, was_sending) = (side.node, std::mem::replace(&mut side.sending, false));
        let posted = std::mem::take(&mut side.posted);
        let fences = std::mem::take(&mut side.fences);
        let why = side
            .why
            .take()
            .unwrap_or_else(|| Error::new(ErrorKind::Transport, "a lane"));
        // What is outstanding has left the source, or never will; what was being read is not placed any more.
        let slots = self.nodes[node].body.as_ref().map(|body| Arc::clone(&body.slots));
        let mut left = false;
        for posted in posted.into_iter().flat_map(|batch| batch.chunks) {
            if let (Some(slots), Some(_)) = (&slots, &posted.into) {
                self.coverage.reach(Point::DirectReadLost);
                slots.abandon(&posted.chunk.header);
            }
            left |= posted.guard.is_some_and(OwnedGateGuard::leave);
        }
        if left {
            self.coverage.reach(Point::GateHeld);
            self.report(link, LinkEvent::SlotQuiet);
            self.gates_left(node);
        }
        let index = usize::from(name.index);
        if let Some(direct) = self.direct(link)
            && direct.lanes[index] == Some(qp)
        {
            direct.lanes[index] = None;
        }
        for chunks in fences {
            self.answer_direct_fence(link, name, &chunks);
        }
        if was_sending {
            let chunks = self.links[link].sender.lane_lost(name);
            self.links[link].doubts.insert(name, chunks.clone());
            self.coverage.reach(Point::DirectLaneLost);
            if !chunks.is_empty() {
                self.coverage.reach(Point::LaneInDoubt);
            }
            if !self.links[link].closed {
                self.report(
                    link,
                    LinkEvent::LaneLost {
                        lane: name,
                        chunks,
                        error: why,
                    },
                );
            }
        }
        self.lanes_may_be_fenced(link);
        if self.links[link].closed {
            self.direct_maybe_closed(link);
            return;
        }
        if self.links[link].peer.dials {
            let at = self.now + Duration::from_millis(self.rng.within(5..40));
            let index = name.index;
            self.device_at(at, DeviceEvent::Dial { link, index });
        }
        self.drain_sender(link);
        self.wake_direct(link);
    }

    fn answer_direct_fence(&mut self, link: LinkIndex, lane: LaneName, chunks: &[ChunkName]) {
        let (node, from) = (self.links[link].node, self.links[link].peer.incarnation);
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let states = body.slots.chunk_states(from, chunks);
        let states: Vec<(ChunkName, ChunkState)> = chunks.iter().copied().zip(states).collect();
        for (_, state) in &states {
            match state {
                ChunkState::Applied | ChunkState::Arrived => self.coverage.reach(Point::DirectInDoubtApplied),
                ChunkState::Missing => self.coverage.reach(Point::DirectInDoubtResent),
                ChunkState::Refused => {}
            }
        }
        self.report(link, LinkEvent::LaneFenced { lane, chunks: states });
    }

    fn fence_direct_lane(&mut self, link: LinkIndex, name: LaneName, chunks: Vec<ChunkName>) {
        let index = usize::from(name.index);
        let epoch = &mut self.links[link].epochs[index];
        *epoch = (*epoch).max(name.epoch);
        // Also one that was replaced and is not fenced yet.
        let open = self.qps.iter().position(|qp| {
            qp.name == name
                && qp
                    .ends
                    .iter()
                    .any(|end| end.link == Some(link) && end.state != QpState::Gone)
        });
        match open {
            Some(qp) => {
                let end = self.end_of_qp(qp, link);
                self.qps[qp].ends[end].fences.push(chunks);
                let why = Error::new(ErrorKind::Transport, format!("lane {name:?}")).because("the peer lost it");
                self.close_qp(qp, end, why);
            }
            None => self.answer_direct_fence(link, name, &chunks),
        }
    }

    // ---------------------------------------------------------------------------------------- revocation

    /// The writer does not answer: every lane to it is fenced.
    pub(super) fn revoke_timeout(&mut self, link: LinkIndex, slot: Slot) {
        let Some(direct) = self.direct(link) else { return };
        match direct.revoked.get_mut(&slot) {
            Some(fencing) => *fencing = true,
            None => return,
        }
        let qps: Vec<QpIndex> = direct.lanes.iter().flatten().copied().collect();
        self.coverage.reach(Point::RevokeUnanswered);
        for qp in qps {
            let end = self.end_of_qp(qp, link);
            if self.qps[qp].ends[end].state == QpState::Up {
                self.say(link, Words::LaneDown { qp });
            }
            let why = Error::new(ErrorKind::Transport, "a lane").because("its writer does not stop");
            self.close_qp(qp, end, why);
        }
        self.lanes_may_be_fenced(link);
    }

    /// Once no queue pair from before is left, the slots that were revoked in vain are quiet.
    fn lanes_may_be_fenced(&mut self, link: LinkIndex) {
        let draining = |end: &QpEnd| end.link == Some(link) && end.state == QpState::Error;
        if self.qps.iter().any(|qp| qp.ends.iter().any(draining)) {
            return;
        }
        let Some(direct) = self.direct(link) else { return };
        let quiet: Vec<Slot> = direct
            .revoked
            .iter()
            .filter(|(_, fencing)| **fencing)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in quiet {
            self.coverage.reach(Point::RevokeFenced);
            self.slot_is_quiet(link, slot);
        }
    }

    // ---------------------------------------------------------------------------------------- the whole link

    /// Takes a command; gives back what is not special to one-sided links.
    pub(crate) fn direct_command(&mut self, link: LinkIndex, command: LinkCommand) -> Option<LinkCommand> {
        if self.links[link].direct.is_none() {
            return Some(command);
        }
        match command {
            LinkCommand::Submit(spec) => {
                let writes = spec
                    .remote
                    .as_ref()
                    .is_some_and(|remote| remote.direction == kvxfer_core::flow::Direction::Write);
                let spec = if writes {
                    self.hold_until_admitted(link, spec)?
                } else {
                    spec
                };
                return Some(LinkCommand::Submit(spec));
            }
            LinkCommand::AddPart(id, part) => {
                let held = self.direct(link)?.held.values_mut().flatten();
                match held.into_iter().find(|(spec, _)| spec.id == id) {
                    Some((_, parts)) => parts.push(part),
                    None => return Some(LinkCommand::AddPart(id, part)),
                }
            }
            LinkCommand::Stop(id) | LinkCommand::Forget(id) => {
                let mut found = false;
                for held in self.direct(link)?.held.values_mut() {
                    let before = held.len();
                    held.retain(|(spec, _)| spec.id != id);
                    found |= held.len() < before;
                }
                if !found {
                    return Some(command);
                }
                if matches!(command, LinkCommand::Stop(_)) {
                    self.report(link, LinkEvent::Send(SendEvent::Quiet(id)));
                }
            }
            LinkCommand::FenceLane(lane, chunks) => self.fence_direct_lane(link, lane, chunks),
            LinkCommand::LaneFenced(..) => return Some(command),
            LinkCommand::Admit(slot, generation) => {
                self.admit(link, (slot, generation));
            }
            LinkCommand::Revoke(slot, generation) => self.revoke(link, (slot, generation)),
            LinkCommand::Message(body) => self.hear(link, &body),
        }
        None
    }

    /// Whether a device has work of this transfer.
    pub(crate) fn is_posted(&self, link: LinkIndex, id: kvxfer_core::flow::TransferId) -> bool {
        let ends = self.qps.iter().flat_map(|qp| &qp.ends);
        ends.filter(|end| end.link == Some(link))
            .flat_map(|end| end.posted.iter().flat_map(|batch| &batch.chunks))
            .any(|posted| posted.chunk.transfer == id)
    }

    pub(crate) fn close_direct(&mut self, link: LinkIndex) {
        if std::mem::replace(&mut self.links[link].closed, true) {
            return;
        }
        let qps: Vec<QpIndex> = (0..self.qps.len())
            .filter(|qp| self.qps[*qp].ends.iter().any(|end| end.link == Some(link)))
            .collect();
        for qp in qps {
            let end = self.end_of_qp(qp, link);
            self.close_qp(qp, end, Error::new(ErrorKind::Closed, "the link"));
        }
        self.direct_maybe_closed(link);
    }

    /// Closed once all its queue pairs are fenced: the machine then knows that no slot is written any more.
    fn direct_maybe_closed(&mut self, link: LinkIndex) {
        let open = |end: &QpEnd| end.link == Some(link) && end.state != QpState::Gone;
        let side = &self.links[link];
        if !side.closed || side.closed_reported || self.qps.iter().any(|qp| qp.ends.iter().any(open)) {
            return;
        }
        let (node, peer) = (side.node, side.peer.incarnation);
        self.links[link].closed_reported = true;
        if let Some(body) = self.nodes[node].body.as_mut()
            && body.links.get(&peer) == Some(&link)
        {
            body.links.remove(&peer);
        }
        self.report(link, LinkEvent::Closed);
    }

    pub(crate) fn note_device_failed(&mut self, node: NodeIndex, peer: kvxfer_core::Incarnation) {
        let life = self.nodes[node].life;
        self.oracle.devices_failed.insert((node, life, peer));
    }

    pub(super) fn device_fails(&mut self, node: NodeIndex) {
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let links: Vec<LinkIndex> = body.links.values().copied().collect();
        for link in links {
            if self.links[link].closed || self.links[link].direct.is_none() {
                continue;
            }
            self.coverage.reach(Point::DeviceFailed);
            if self.qps.iter().any(|qp| {
                qp.ends
                    .iter()
                    .any(|end| end.link == Some(link) && !end.posted.is_empty())
            }) {
                self.coverage.reach(Point::DeviceFailedInFlight);
            }
            self.trace(|| format!("node {node} link {link}: the device fails"));
            self.note_device_failed(node, self.links[link].peer.incarnation);
            let error = Error::new(ErrorKind::Transport, "the device").because("it is gone");
            self.report(link, LinkEvent::Failed(error));
            self.close_direct(link);
        }
    }
}
