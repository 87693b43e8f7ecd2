//! The simulated link: lanes as connections, made and lost, with epochs, fences and redialing. The decisions are
//! core's (`LinkSender`, `SlotTable`, `Machine`); here is only what a transport's sockets and threads would do.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kvxfer_core::flow::{ChunkName, ChunkState, LaneName, LinkSender, SendEvent, SendSpec, TransferId};
use kvxfer_core::machine::LinkCommand;
use kvxfer_core::transport::{LinkEvent, LinkPeer};
use kvxfer_core::wire::lane::LaneHello;
use kvxfer_core::{Error, ErrorKind, Incarnation};

use super::coverage::Point;
use super::direct::{DIRECT, Direct};
use super::queue::Pipe;
use super::transmit::{Call, Item, Receiving, Sending};
use super::world::{Event, Life, NodeIndex, World};

pub(crate) type LinkIndex = usize;
pub(crate) type LaneIndex = usize;

/// One side of a link.
pub(crate) struct Link {
    pub(crate) node: NodeIndex,
    pub(crate) life: Life,
    pub(crate) peer: LinkPeer,
    pub(crate) sender: LinkSender,
    /// If it is one-sided: then it has queue pairs, and no connections.
    pub(crate) direct: Option<Direct>,
    /// The connection of each lane, while there is one at this side.
    pub(crate) lanes: Vec<Option<LaneIndex>>,
    /// Highest epoch dialed, accepted or fenced, by lane.
    pub(crate) epochs: Vec<u32>,
    /// Chunks of lost lanes that the receiver has not fenced yet.
    pub(crate) doubts: BTreeMap<LaneName, Vec<ChunkName>>,
    attempts: u32,
    pub(crate) up_reported: bool,
    pub(crate) closed: bool,
    pub(crate) closed_reported: bool,
}

/// One connection of a lane, with what is under way on it.
pub(crate) struct Lane {
    pub(crate) name: LaneName,
    hello: LaneHello,
    /// The dialer's end, then the acceptor's.
    pub(crate) ends: [LaneEnd; 2],
    /// What each end has sent.
    pub(crate) pipes: [Pipe<Item>; 2],
}

/// One end of a lane: a socket and the thread that owns it.
pub(crate) struct LaneEnd {
    pub(crate) node: NodeIndex,
    pub(crate) life: Life,
    /// `None` before the acceptor has found its link.
    pub(crate) link: Option<LinkIndex>,
    pub(crate) up: bool,
    closed: bool,
    closing: Option<Error>,
    fences: Vec<Vec<ChunkName>>,
    pub(crate) acks: VecDeque<(ChunkName, ChunkState)>,
    pub(crate) sending: Option<Sending>,
    pub(crate) receiving: Option<Receiving>,
    /// The call the thread is inside of.
    pub(crate) call: Option<Call>,
    step_at: Option<kvxfer_core::Time>,
}

impl LaneEnd {
    fn new(node: NodeIndex, life: Life, link: Option<LinkIndex>) -> LaneEnd {
        LaneEnd {
            node,
            life,
            link,
            up: false,
            closed: false,
            closing: None,
            fences: Vec::new(),
            acks: VecDeque::new(),
            sending: None,
            receiving: None,
            call: None,
            step_at: None,
        }
    }

    pub(crate) fn sending_transfer(&self) -> Option<TransferId> {
        self.sending.as_ref().map(|sending| sending.chunk.transfer)
    }
}

impl World {
    pub(crate) fn connect_link(&mut self, node: NodeIndex, transport: &str, peer: LinkPeer) {
        let lanes = self.profile.lanes;
        let one_sided = transport == DIRECT;
        if one_sided && self.rng.percent(self.profile.unusable_device_percent) {
            self.coverage.reach(Point::DeviceUnusable);
            let error = Error::new(ErrorKind::Unsupported, "the device").because("it has no port that is up");
            let incarnation = peer.incarnation;
            self.note_device_failed(node, incarnation);
            self.with_machine(node, |machine, now| machine.link_failed(now, incarnation, error));
            return;
        }
        let life = self.nodes[node].life;
        let Some(body) = self.nodes[node].body.as_mut() else {
            return;
        };
        let dials = peer.dials;
        let incarnation = peer.incarnation;
        if body.links.contains_key(&incarnation) {
            self.fail(
                "internal",
                format!("node {node} was told to make a second link to {incarnation:?}"),
            );
            return;
        }
        let link = self.links.len();
        body.links.insert(incarnation, link);
        self.links.push(Link {
            node,
            life,
            peer,
            sender: LinkSender::new(self.profile.sender.clone()).with_chunk_bytes_max(self.profile.chunk_bytes_max),
            direct: one_sided.then(|| Direct::new(lanes)),
            lanes: vec![None; if one_sided { 0 } else { lanes as usize }],
            epochs: vec![0; lanes as usize],
            doubts: BTreeMap::new(),
            attempts: 0,
            up_reported: false,
            closed: false,
            closed_reported: false,
        });
        if one_sided {
            self.connect_direct(link);
        } else if dials {
            for index in 0..lanes {
                let at = self.now + self.short_delay();
                self.queue.push(at, Event::LaneDial { link, index });
            }
        }
    }

    pub(crate) fn lane_dial(&mut self, link: LinkIndex, index: u16) {
        let side = &mut self.links[link];
        if side.closed || side.lanes[index as usize].is_some() {
            return;
        }
        side.epochs[index as usize] += 1;
        let name = LaneName {
            index,
            epoch: side.epochs[index as usize],
        };
        let hello = LaneHello {
            from: side.peer.local,
            to: side.peer.incarnation,
            token: side.peer.token,
            lane: name,
        };
        let (node, life) = (side.node, side.life);
        let addresses = side.peer.addresses.clone();
        let lane = self.lanes.len();
        side.lanes[index as usize] = Some(lane);
        let target = addresses.first().and_then(|socket| self.node_at(*socket));
        let target_node = target.unwrap_or(node);
        let target_life = self.nodes[target_node].life;
        self.lanes.push(Lane {
            name,
            hello,
            ends: [
                LaneEnd::new(node, life, Some(link)),
                LaneEnd::new(target_node, target_life, None),
            ],
            pipes: [Pipe::new(), Pipe::new()],
        });
        let alive = target.is_some_and(|target| self.nodes[target].body.is_some());
        let at = self.now + self.network_delay(node, target_node);
        if alive && !self.rng.percent(self.profile.lane_refusal_percent) {
            self.queue.push(at, Event::LaneArrive { lane });
        } else {
            self.queue.push(at, Event::LaneAnswer { lane, accepted: false });
        }
    }

    pub(crate) fn lane_arrives(&mut self, lane: LaneIndex) {
        let (node, dialer) = (self.lanes[lane].ends[1].node, self.lanes[lane].ends[0].node);
        let accepted = self.accept_lane(lane, node);
        self.trace(|| format!("node {node} lane {lane} from node {dialer}: accepted {accepted}"));
        let at = self.now + self.network_delay(node, dialer);
        self.queue.push(at, Event::LaneAnswer { lane, accepted });
    }

    fn accept_lane(&mut self, lane: LaneIndex, node: NodeIndex) -> bool {
        let bytes = self.lanes[lane].hello.encode();
        let hello = match LaneHello::decode(&bytes) {
            Ok(hello) => hello,
            Err(error) => {
                self.fail("wire", format!("a lane's hello does not come back: {error}"));
                return false;
            }
        };
        let Some(body) = self.nodes[node].body.as_ref() else {
            return false;
        };
        let Ok(incarnation) = body.machine.lane_allowed(&hello) else {
            return false;
        };
        let Some(link) = body.links.get(&incarnation).copied() else {
            return false;
        };
        let index = hello.lane.index as usize;
        let side = &mut self.links[link];
        if side.closed || index >= side.lanes.len() || hello.lane.epoch <= side.epochs[index] {
            return false;
        }
        side.epochs[index] = hello.lane.epoch;
        if let Some(older) = side.lanes[index] {
            let why =
                Error::new(ErrorKind::Transport, format!("lane {index}")).because("a newer connection replaces it");
            let end = self.end_of(older, link);
            self.close_lane(older, end, why);
        }
        self.links[link].lanes[index] = Some(lane);
        self.lanes[lane].ends[1].link = Some(link);
        self.lane_is_up(lane, 1);
        true
    }

    pub(crate) fn lane_answers(&mut self, lane: LaneIndex, accepted: bool) {
        let Some(link) = self.lanes[lane].ends[0].link else {
            return;
        };
        if self.lanes[lane].ends[0].closed {
            return;
        }
        if accepted {
            self.lane_is_up(lane, 0);
            return;
        }
        self.lanes[lane].ends[0].closed = true;
        let index = self.lanes[lane].name.index;
        self.links[link].lanes[index as usize] = None;
        self.redial_lane(link, index);
    }

    fn redial_lane(&mut self, link: LinkIndex, index: u16) {
        let side = &mut self.links[link];
        if side.closed || !side.peer.dials {
            return;
        }
        side.attempts = (side.attempts + 1).min(5);
        let backoff = Duration::from_millis(10 << side.attempts) + self.short_delay();
        self.queue.push(self.now + backoff, Event::LaneDial { link, index });
    }

    fn lane_is_up(&mut self, lane: LaneIndex, end: usize) {
        let name = self.lanes[lane].name;
        self.lanes[lane].ends[end].up = true;
        let Some(link) = self.lanes[lane].ends[end].link else {
            return;
        };
        let side = &mut self.links[link];
        side.attempts = 0;
        side.sender.lane_up(name);
        if !side.up_reported {
            side.up_reported = true;
            self.report(link, LinkEvent::Up);
        }
        self.wake_link(link);
        self.wake_lane(lane, end, self.now);
        if self.rng.below(1000) < self.profile.lane_loss_permille {
            let life = Duration::from_micros(self.rng.within(50..self.profile.lane_life_us_max));
            self.queue.push(self.now + life, Event::LaneBreaks { lane });
        }
    }

    /// The connection breaks in the network: bytes under way are lost, and each side notices in its own time.
    pub(crate) fn lane_breaks(&mut self, lane: LaneIndex) {
        for end in 0..2 {
            if !self.lanes[lane].ends[end].up || self.lanes[lane].ends[end].closed {
                continue;
            }
            self.cut_lane_pipe(lane, end);
            let slow = self.rng.percent(10);
            let notice = Duration::from_micros(if slow {
                self.rng.within(1..900_000)
            } else {
                self.rng.within(1..4_000)
            });
            let why = Error::new(ErrorKind::Transport, format!("lane {:?}", self.lanes[lane].name))
                .because("the connection was reset");
            self.queue.push(self.now + notice, Event::LaneBroken { lane, end, why });
        }
    }

    fn cut_lane_pipe(&mut self, lane: LaneIndex, end: usize) {
        let under_way = self.lanes[lane].pipes[end].len() as u64;
        let survivors = if under_way == 0 {
            0
        } else {
            self.rng.below(under_way + 1) as usize
        };
        let acks = self.lanes[lane].pipes[end]
            .iter()
            .skip(survivors)
            .filter(|item| item.is_ack())
            .count();
        if acks > 0 {
            self.coverage.reach(Point::AckLost);
        }
        self.lanes[lane].pipes[end].cut(survivors);
    }

    /// This end's thread closes its socket: at once, or when it is back from the call it is in.
    pub(crate) fn close_lane(&mut self, lane: LaneIndex, end: usize, why: Error) {
        let side = &mut self.lanes[lane].ends[end];
        if side.closed {
            return;
        }
        if side.call.is_some() {
            side.closing.get_or_insert(why);
            return;
        }
        side.closed = true;
        let was_up = std::mem::replace(&mut side.up, false);
        side.sending = None;
        side.closing = None;
        let (node, received) = (side.node, side.receiving.take());
        if let (Some(received), Some(body)) = (received, self.nodes[node].body.as_ref()) {
            received.abandon(&body.slots);
        }
        let side = &mut self.lanes[lane].ends[end];
        if !side.acks.is_empty() {
            self.coverage.reach(Point::AckLost);
        }
        self.lanes[lane].ends[end].acks.clear();
        let name = self.lanes[lane].name;
        let link = self.lanes[lane].ends[end].link;
        self.hang_up(lane, end);
        let Some(link) = link else {
            return;
        };
        let index = name.index as usize;
        if self.links[link].lanes[index] == Some(lane) {
            self.links[link].lanes[index] = None;
        }
        for chunks in std::mem::take(&mut self.lanes[lane].ends[end].fences) {
            self.answer_fence(link, name, &chunks);
        }
        if self.links[link].closed {
            self.link_maybe_closed(link);
            return;
        }
        if was_up {
            let chunks = self.links[link].sender.lane_lost(name);
            self.links[link].doubts.insert(name, chunks.clone());
            self.coverage.reach(Point::LaneLost);
            if !chunks.is_empty() {
                self.coverage.reach(Point::LaneInDoubt);
            }
            self.trace(|| {
                format!(
                    "lane {lane} end {end} lost with {} chunks in doubt: {why}",
                    chunks.len()
                )
            });
            self.report(
                link,
                LinkEvent::LaneLost {
                    lane: name,
                    chunks,
                    error: why,
                },
            );
            self.drain_sender(link);
        }
        self.redial_lane(link, name.index);
    }

    /// What the other end sees of a socket closed here: the rest of what was sent, or less, and then the end.
    fn hang_up(&mut self, lane: LaneIndex, end: usize) {
        let now = self.now;
        let (node, other_node) = (self.lanes[lane].ends[end].node, self.lanes[lane].ends[1 - end].node);
        let delay = self.network_delay(node, other_node);
        if self.rng.percent(50) {
            self.cut_lane_pipe(lane, end);
        }
        let last = self.lanes[lane].pipes[end].finish(now);
        self.lanes[lane].pipes[1 - end].cut(0);
        let other = &self.lanes[lane].ends[1 - end];
        if !other.closed {
            let why = Error::new(ErrorKind::Transport, format!("lane {:?}", self.lanes[lane].name))
                .because("the peer closed the connection");
            self.queue.push(
                last.max(now + delay),
                Event::LaneBroken {
                    lane,
                    end: 1 - end,
                    why,
                },
            );
        }
    }

    /// The thread has read what there was, and then the end of the connection.
    pub(crate) fn lane_broken(&mut self, lane: LaneIndex, end: usize, why: Error) {
        let side = &self.lanes[lane].ends[end];
        if side.closed || !side.up {
            if !side.closed && end == 0 && !side.up {
                // Broken before the answer came.
                self.lane_answers(lane, false);
            }
            return;
        }
        let unread = self.lanes[lane].pipes[1 - end].next_ready().is_some();
        if (side.call.is_some() || unread) && self.rng.percent(80) {
            // Readable bytes come before the end of the connection, unless it was reset.
            self.wake_lane(lane, end, self.now);
            let again = self.now + Duration::from_micros(20);
            self.queue.push(again, Event::LaneBroken { lane, end, why });
            return;
        }
        self.close_lane(lane, end, why);
    }

    fn answer_fence(&mut self, link: LinkIndex, lane: LaneName, chunks: &[ChunkName]) {
        let node = self.links[link].node;
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let from = self.links[link].peer.incarnation;
        let states: Vec<(ChunkName, ChunkState)> = chunks
            .iter()
            .copied()
            .zip(body.slots.chunk_states(from, chunks))
            .collect();
        for (_, state) in &states {
            match state {
                ChunkState::Applied | ChunkState::Arrived => self.coverage.reach(Point::InDoubtApplied),
                ChunkState::Missing => self.coverage.reach(Point::InDoubtResent),
                ChunkState::Refused => {}
            }
        }
        self.report(link, LinkEvent::LaneFenced { lane, chunks: states });
    }

    fn fence_lane(&mut self, link: LinkIndex, name: LaneName, chunks: Vec<ChunkName>) {
        let index = name.index as usize;
        if index >= self.links[link].lanes.len() {
            self.fail(
                "internal",
                format!("a fence for lane {name:?} that the link does not have"),
            );
            return;
        }
        let epoch = &mut self.links[link].epochs[index];
        *epoch = (*epoch).max(name.epoch);
        let open = self.links[link].lanes[index].filter(|lane| self.lanes[*lane].name == name);
        match open {
            Some(lane) => {
                let end = self.end_of(lane, link);
                self.lanes[lane].ends[end].fences.push(chunks);
                let why = Error::new(ErrorKind::Transport, format!("lane {name:?}")).because("the peer lost it");
                self.close_lane(lane, end, why);
            }
            None => self.answer_fence(link, name, &chunks),
        }
    }

    pub(crate) fn link_command(&mut self, node: NodeIndex, peer: Incarnation, command: LinkCommand) {
        let link = self.nodes[node]
            .body
            .as_ref()
            .and_then(|body| body.links.get(&peer).copied());
        let Some(link) = link else {
            if let LinkCommand::Submit(spec) = command {
                let error = Error::new(ErrorKind::Closed, "the link").at(format!("peer {peer:?}"));
                self.with_machine(node, |machine, now| machine.submit_failed(now, peer, spec.id, error));
            }
            return;
        };
        let Some(command) = self.direct_command(link, command) else {
            self.drain_sender(link);
            self.wake_link(link);
            return;
        };
        match command {
            LinkCommand::Submit(spec) => self.submit_to_sender(link, spec),
            LinkCommand::AddPart(id, part) => {
                self.note_part(link, id, part.stream.length());
                self.links[link].sender.add_part(id, part);
            }
            LinkCommand::Stop(id) => {
                self.note_gone(link, id);
                self.links[link].sender.stop(id);
            }
            LinkCommand::Forget(id) => {
                self.note_gone(link, id);
                self.links[link].sender.forget(id);
            }
            LinkCommand::FenceLane(lane, chunks) => self.fence_lane(link, lane, chunks),
            LinkCommand::LaneFenced(lane, chunks) => {
                let now = self.now;
                self.links[link].doubts.remove(&lane);
                self.links[link].sender.lane_fenced(lane, &chunks, now);
                self.answer_revocations(link);
            }
            LinkCommand::Admit(..) | LinkCommand::Revoke(..) | LinkCommand::Message(_) => {}
        }
        self.drain_sender(link);
        self.wake_link(link);
    }

    pub(crate) fn submit_to_sender(&mut self, link: LinkIndex, spec: SendSpec) {
        let (id, node, peer) = (spec.id, self.links[link].node, self.links[link].peer.incarnation);
        self.note_submit(link, &spec);
        if let Err(error) = self.links[link].sender.submit(spec) {
            self.with_machine(node, |machine, now| machine.submit_failed(now, peer, id, error));
        }
    }

    pub(crate) fn close_link(&mut self, node: NodeIndex, peer: Incarnation) {
        let known = self.nodes[node]
            .body
            .as_ref()
            .and_then(|body| body.links.get(&peer).copied());
        if let Some(link) = known.filter(|link| self.links[*link].direct.is_some()) {
            self.close_direct(link);
            return;
        }
        let link = self.nodes[node].body.as_mut().and_then(|body| body.links.remove(&peer));
        let Some(link) = link else {
            // Nothing of it touches blocks: there is none.
            self.report_to(node, peer, LinkEvent::Closed);
            return;
        };
        self.links[link].closed = true;
        for lane in self.links[link].lanes.clone().into_iter().flatten() {
            let end = self.end_of(lane, link);
            let why = Error::new(ErrorKind::Closed, "the link");
            self.close_lane(lane, end, why);
        }
        self.link_maybe_closed(link);
    }

    fn link_maybe_closed(&mut self, link: LinkIndex) {
        let side = &mut self.links[link];
        if side.closed && !side.closed_reported && side.lanes.iter().all(Option::is_none) {
            side.closed_reported = true;
            self.report(link, LinkEvent::Closed);
        }
    }

    /// Everything of a dead process: its sockets close, or its host is gone and nobody is told.
    pub(crate) fn kill_lanes(&mut self, node: NodeIndex, told: bool) {
        for lane in 0..self.lanes.len() {
            for end in 0..2 {
                let side = &mut self.lanes[lane].ends[end];
                if side.node != node || side.closed || (end == 1 && side.link.is_none()) {
                    continue;
                }
                side.closed = true;
                side.up = false;
                // A dead process holds no gate.
                side.call = None;
                side.sending = None;
                side.receiving = None;
                if told {
                    self.hang_up(lane, end);
                } else {
                    self.lanes[lane].pipes[end].cut(0);
                    self.lanes[lane].pipes[1 - end].cut(0);
                }
            }
        }
    }

    /// Takes up what was begun before the call returned: see `transmit`.
    pub(crate) fn after_call(&mut self, lane: LaneIndex, end: usize) {
        if let Some(why) = self.lanes[lane].ends[end].closing.take() {
            self.close_lane(lane, end, why);
        }
    }

    pub(crate) fn wake_link(&mut self, link: LinkIndex) {
        self.wake_direct(link);
        for lane in self.links[link].lanes.clone().into_iter().flatten() {
            let end = self.end_of(lane, link);
            if self.lanes[lane].ends[end].up && self.links[link].sender.has_work(self.lanes[lane].name.index) {
                self.wake_lane(lane, end, self.now);
            }
        }
    }

    /// The thread of this end looks at its socket no later than `at`.
    pub(crate) fn wake_lane(&mut self, lane: LaneIndex, end: usize, at: kvxfer_core::Time) {
        let side = &mut self.lanes[lane].ends[end];
        if side.closed || side.step_at.is_some_and(|step| step <= at) {
            return;
        }
        side.step_at = Some(at);
        self.queue.push(at, Event::LaneStep { lane, end, at });
    }

    /// Whether this wake-up is the one that was meant.
    pub(crate) fn lane_woken(&mut self, lane: LaneIndex, end: usize, at: kvxfer_core::Time) -> bool {
        let side = &mut self.lanes[lane].ends[end];
        if side.step_at != Some(at) {
            return false;
        }
        side.step_at = None;
        !side.closed && side.up && side.call.is_none()
    }

    pub(crate) fn end_of(&self, lane: LaneIndex, link: LinkIndex) -> usize {
        usize::from(self.lanes[lane].ends[0].link != Some(link))
    }

    /// A lane of the link that is in the middle of a chunk of this transfer.
    fn lane_that_sends(&self, link: LinkIndex, id: TransferId) -> Option<LaneIndex> {
        self.links[link]
            .lanes
            .iter()
            .flatten()
            .copied()
            .find(|lane| self.lanes[*lane].ends[self.end_of(*lane, link)].sending_transfer() == Some(id))
    }

    /// Hands the sender's events to the control plane.
    pub(crate) fn drain_sender(&mut self, link: LinkIndex) {
        while let Some(event) = self.links[link].sender.poll_event() {
            if let SendEvent::Quiet(id) = event
                && self.is_posted(link, id)
            {
                let words = format!("{id:?} is said to be quiet while a device has work of it");
                self.fail("3 no false read", words);
            }
            if let SendEvent::Quiet(id) = event
                && let Some(lane) = self.lane_that_sends(link, id)
            {
                self.fail(
                    "3 no false read",
                    format!("{id:?} is said to be quiet while lane {lane} is sending a chunk of it"),
                );
            }
            self.report(link, LinkEvent::Send(event));
        }
        let transfers = self.links[link].sender.transfers();
        if transfers > self.profile.sender.transfers_max as usize {
            self.fail("7 bounded", format!("{transfers} transfers in one link"));
        }
    }

    pub(crate) fn report(&mut self, link: LinkIndex, event: LinkEvent) {
        let (node, life, peer) = (
            self.links[link].node,
            self.links[link].life,
            self.links[link].peer.incarnation,
        );
        if self.nodes[node].life == life {
            self.report_to(node, peer, event);
        }
    }
}
