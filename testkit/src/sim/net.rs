//! The session network: connections that deliver frames in order, late, or not at all.

use kvxfer_core::machine::ConnectionId;
use kvxfer_core::wire::{self, FRAME_HEADER_BYTES, Frame, Message};
use kvxfer_core::{Error, ErrorKind, Incarnation, Time};
use std::net::SocketAddr;
use std::time::Duration;

use super::coverage::Point;
use super::ledger::What;
use super::queue::Pipe;
use super::world::{Event, Life, NodeIndex, World};

pub(crate) type ConnectionIndex = usize;

/// Messages kept per direction, to be given to the receiver once more.
const REPEATED_MAX: usize = 4;

/// A session connection.
pub(crate) struct Connection {
    /// The dialer's end, then the acceptor's.
    pub(crate) ends: [ConnectionEnd; 2],
    pipes: [Pipe<Frame>; 2],
    /// Messages that each end has been given.
    delivered: [Vec<Frame>; 2],
}

pub(crate) struct ConnectionEnd {
    pub(crate) node: NodeIndex,
    pub(crate) life: Life,
    id: ConnectionId,
    open: bool,
}

impl World {
    pub(crate) fn dial(&mut self, node: NodeIndex, connection: ConnectionId, addresses: &[SocketAddr], deadline: Time) {
        let target = addresses.first().and_then(|socket| self.node_at(*socket));
        let life = self.nodes[node].life;
        let at = self.now + self.network_delay(node, target.unwrap_or(node));
        self.trace(|| format!("node {node} dials {addresses:?} as {connection:?}"));
        if let Some(target) = target {
            *self.oracle.dialing.entry((node, target)).or_default() += 1;
            if self.oracle.dialing.get(&(target, node)).is_some_and(|count| *count > 0) {
                self.coverage.reach(Point::SimultaneousOpen);
            }
        }
        self.queue.push(
            at,
            Event::DialArrives {
                node,
                life,
                connection,
                target,
                deadline,
            },
        );
    }

    pub(crate) fn dial_arrives(
        &mut self,
        node: NodeIndex,
        life: Life,
        connection: ConnectionId,
        target: Option<NodeIndex>,
        deadline: Time,
    ) {
        if let Some(target) = target
            && let Some(count) = self.oracle.dialing.get_mut(&(node, target))
        {
            *count = count.saturating_sub(1);
        }
        let listening = target.filter(|target| self.nodes[*target].body.as_ref().is_some_and(|body| !body.closing));
        let late = self.now > deadline;
        let Some(target) = listening.filter(|_| !late && !self.rng.percent(self.profile.dial_failure_percent)) else {
            let quick = self.now + self.short_delay();
            // One slow failure after another is as bad as a dead peer.
            let refused = self.rng.percent(70) || self.profile.must_arrive();
            let at = if refused && !late { quick } else { deadline.max(quick) };
            self.queue.push(at, Event::DialFails { node, life, connection });
            return;
        };
        let accepted = ConnectionId(self.next_accepted);
        self.next_accepted += 1;
        let index = self.connections.len();
        self.connections.push(Connection {
            ends: [
                ConnectionEnd {
                    node,
                    life,
                    id: connection,
                    open: false,
                },
                ConnectionEnd {
                    node: target,
                    life: self.nodes[target].life,
                    id: accepted,
                    open: false,
                },
            ],
            pipes: [Pipe::new(), Pipe::new()],
            delivered: [Vec::new(), Vec::new()],
        });
        self.queue.push(self.now, Event::Accepted { connection: index });
        let back = self.now + self.network_delay(node, target);
        self.queue.push(back, Event::Dialed { connection: index });
        if self.rng.below(1000) < self.profile.session_break_permille {
            let life = Duration::from_micros(self.rng.within(100..self.profile.session_life_us_max));
            self.queue
                .push(self.now + life, Event::ConnectionBreaks { connection: index });
        }
    }

    pub(crate) fn dial_fails(&mut self, node: NodeIndex, connection: ConnectionId) {
        self.coverage.reach(Point::DialFailed);
        let error = Error::new(ErrorKind::Transport, "dialing").because("the connection was refused");
        self.trace(|| format!("node {node} dial {connection:?} failed"));
        self.with_machine(node, |machine, now| machine.dial_failed(now, connection, error));
    }

    pub(crate) fn dialed(&mut self, index: ConnectionIndex) {
        let (node, id) = self.open_end(index, 0);
        self.trace(|| format!("node {node} dialed {id:?} (connection {index})"));
        self.with_machine(node, |machine, now| machine.dialed(now, id));
    }

    pub(crate) fn accepted(&mut self, index: ConnectionIndex) {
        let (node, id) = self.open_end(index, 1);
        let from: SocketAddr = ([127, 0, 0, 1], 50_000 + (index % 10_000) as u16).into();
        self.trace(|| format!("node {node} accepted {id:?} (connection {index})"));
        self.with_machine(node, |machine, now| machine.accepted(now, id, from));
    }

    fn open_end(&mut self, index: ConnectionIndex, end: usize) -> (NodeIndex, ConnectionId) {
        let side = &mut self.connections[index].ends[end];
        side.open = true;
        let (node, id) = (side.node, side.id);
        if let Some(body) = self.nodes[node].body.as_mut() {
            body.connections.insert(id, (index, end));
        }
        (node, id)
    }

    pub(crate) fn send_frame(&mut self, node: NodeIndex, id: ConnectionId, frame: Frame) {
        let place = self.nodes[node]
            .body
            .as_ref()
            .and_then(|body| body.connections.get(&id).copied());
        let Some((index, end)) = place else {
            return;
        };
        self.trace(|| format!("node {node} sends on connection {index}: {}", words_of(&frame)));
        self.note_sent(node, &frame);
        let frame = self.through_the_wire(frame);
        let (from, to) = (node, self.connections[index].ends[1 - end].node);
        let at = self.now + self.network_delay(from, to);
        if let Some(ready) = self.connections[index].pipes[end].put(at, frame) {
            self.queue.push(
                ready,
                Event::Frames {
                    connection: index,
                    end: 1 - end,
                },
            );
        }
    }

    /// Now and then a frame really is encoded and decoded.
    fn through_the_wire(&mut self, frame: Frame) -> Frame {
        if !self.rng.percent(25) {
            return frame;
        }
        let back = wire::encode(&frame).and_then(|bytes| {
            let (header, body) = bytes.split_at(FRAME_HEADER_BYTES);
            let mut fixed = [0; FRAME_HEADER_BYTES];
            fixed.copy_from_slice(header);
            wire::body_length(&fixed)?;
            wire::decode(&fixed, body)
        });
        match back {
            Ok(back) if back == frame => back,
            Ok(back) => {
                self.fail("wire", format!("{} came back as {}", words_of(&frame), words_of(&back)));
                frame
            }
            Err(error) => {
                self.fail("wire", format!("{} does not come back: {error}", words_of(&frame)));
                frame
            }
        }
    }

    pub(crate) fn frames_ready(&mut self, index: ConnectionIndex, end: usize) {
        let now = self.now;
        while let Some(frame) = self.connections[index].pipes[1 - end].take(now) {
            let side = &self.connections[index].ends[end];
            let (node, id) = (side.node, side.id);
            if !side.open {
                continue;
            }
            if let Frame::Message { .. } = frame {
                self.remember(index, end, &frame);
            }
            let from = self.incarnation_at(index, 1 - end);
            self.give_frame(node, id, from, frame);
            if self.failed() {
                return;
            }
        }
    }

    /// Who the process at this end is, or was: what the dead said before still arrives.
    fn incarnation_at(&self, index: ConnectionIndex, end: usize) -> Option<Incarnation> {
        let side = &self.connections[index].ends[end];
        self.incarnations.get(&(side.node, side.life)).copied()
    }

    fn runs_at(&self, index: ConnectionIndex, end: usize) -> bool {
        let side = &self.connections[index].ends[end];
        let node = &self.nodes[side.node];
        node.life == side.life && node.body.is_some()
    }

    /// Whether a connection that this node has open really leads to that process, alive or not.
    pub(crate) fn is_connected_to(&self, node: NodeIndex, peer: Incarnation) -> bool {
        let Some(body) = self.nodes[node].body.as_ref() else {
            return false;
        };
        body.connections.values().any(|(index, end)| {
            let other = &self.connections[*index].ends[1 - end];
            self.incarnations.get(&(other.node, other.life)) == Some(&peer)
        })
    }

    fn give_frame(&mut self, node: NodeIndex, id: ConnectionId, from: Option<Incarnation>, frame: Frame) {
        self.trace(|| format!("node {node} gets on {id:?}: {}", words_of(&frame)));
        self.note_received(node, from, &frame);
        self.with_machine(node, |machine, now| machine.frame(now, id, frame));
    }

    fn remember(&mut self, index: ConnectionIndex, end: usize, frame: &Frame) {
        let (repeat, stale) = self.profile.repeat_permille;
        let delivered = &mut self.connections[index].delivered[end];
        if delivered.len() == REPEATED_MAX {
            delivered.remove(0);
        }
        delivered.push(frame.clone());
        let roll = self.rng.below(1000);
        if roll < repeat + stale {
            let later = Duration::from_micros(self.rng.within(1..600_000));
            self.queue.push(
                self.now + later,
                Event::Inject {
                    connection: index,
                    end,
                    stale: roll >= repeat,
                },
            );
        }
    }

    /// Gives a message once more, as a resumed session might, or on a connection that is gone.
    pub(crate) fn inject(&mut self, index: ConnectionIndex, end: usize, stale: bool) {
        let side = &self.connections[index].ends[end];
        let sender = &self.nodes[self.connections[index].ends[1 - end].node];
        // The dead and the stopped send nothing: what they repeat would be taken for a sign of life.
        let silent = sender.stalled || !self.runs_at(index, 1 - end);
        if side.open == stale || (silent && !stale) {
            return;
        }
        let (node, id) = (side.node, side.id);
        let count = self.connections[index].delivered[end].len() as u64;
        let pick = self.rng.below(count) as usize;
        let frame = self.connections[index].delivered[end][pick].clone();
        self.coverage.reach(if stale {
            Point::StaleFrame
        } else {
            Point::DuplicateFrame
        });
        // It is old news for the oracle.
        self.give_frame(node, id, None, frame);
    }

    pub(crate) fn disconnect(&mut self, node: NodeIndex, id: ConnectionId) {
        let place = self.nodes[node]
            .body
            .as_mut()
            .and_then(|body| body.connections.remove(&id));
        let Some((index, end)) = place else {
            return;
        };
        self.trace(|| format!("node {node} closes connection {index}"));
        self.connections[index].ends[end].open = false;
        self.hang_up_connection(index, end);
    }

    fn hang_up_connection(&mut self, index: ConnectionIndex, end: usize) {
        let (from, to) = (
            self.connections[index].ends[end].node,
            self.connections[index].ends[1 - end].node,
        );
        let delay = self.network_delay(from, to);
        let now = self.now;
        let last = self.connections[index].pipes[end].finish(now);
        self.connections[index].pipes[1 - end].cut(0);
        self.queue.push(
            last.max(now + delay),
            Event::Disconnected {
                connection: index,
                end: 1 - end,
            },
        );
    }

    pub(crate) fn disconnected(&mut self, index: ConnectionIndex, end: usize) {
        self.frames_ready(index, end);
        let side = &mut self.connections[index].ends[end];
        if !side.open {
            return;
        }
        side.open = false;
        let (node, id) = (side.node, side.id);
        self.connections[index].pipes[end].cut(usize::MAX);
        if let Some(body) = self.nodes[node].body.as_mut() {
            body.connections.remove(&id);
        }
        let why = Error::new(ErrorKind::Transport, "the session's connection").because("the other side closed it");
        self.trace(|| format!("node {node} sees connection {index} end"));
        self.with_machine(node, |machine, now| machine.disconnected(now, id, why));
    }

    pub(crate) fn connection_breaks(&mut self, index: ConnectionIndex) {
        if !self.connections[index].ends.iter().any(|end| end.open) {
            return;
        }
        self.coverage.reach(Point::SessionBroken);
        self.trace(|| format!("connection {index} breaks"));
        // A connection that dies unnoticed is replaced by the side that noticed. If two in a row do, one at each side,
        // only liveness is left: where all must arrive, that is spared.
        let (a, b) = (
            self.connections[index].ends[0].node,
            self.connections[index].ends[1].node,
        );
        let first = self.oracle.half_opened.insert((a.min(b), a.max(b)));
        let unnoticed = if self.rng.percent(15) && (first || !self.profile.must_arrive()) {
            Some(self.rng.below(2) as usize)
        } else {
            None
        };
        for end in 0..2 {
            let under_way = self.connections[index].pipes[end].len() as u64;
            let survivors = self.rng.below(under_way + 1) as usize;
            self.connections[index].pipes[end].cut(survivors);
            if unnoticed == Some(end) {
                self.coverage.reach(Point::HalfOpen);
                continue;
            }
            let notice = Duration::from_micros(self.rng.within(1..3_000));
            self.queue
                .push(self.now + notice, Event::Disconnected { connection: index, end });
        }
    }

    /// All connections of a dead process.
    pub(crate) fn kill_connections(&mut self, node: NodeIndex, told: bool) {
        for index in 0..self.connections.len() {
            for end in 0..2 {
                let side = &mut self.connections[index].ends[end];
                if side.node != node || !std::mem::replace(&mut side.open, false) {
                    continue;
                }
                if told {
                    self.hang_up_connection(index, end);
                } else {
                    self.connections[index].pipes[0].cut(0);
                    self.connections[index].pipes[1].cut(0);
                }
            }
        }
    }

    /// What the oracle learns from a message on its way.
    fn note_sent(&mut self, node: NodeIndex, frame: &Frame) {
        let Frame::Message { message, .. } = frame else {
            return;
        };
        if let Message::Claim(claim) = &**message {
            let found = self.ledger.iter().position(|record| {
                record.node == node
                    && record.life == self.nodes[node].life
                    && matches!(&record.what, What::Claim(own)
                        if own.set == claim.set && own.member == claim.member && own.key == claim.key)
            });
            if let (Some(serial), Some(body)) = (found, self.nodes[node].body.as_mut()) {
                body.claim_numbers.insert(claim.claim, serial as u32);
            }
        }
    }

    fn note_received(&mut self, node: NodeIndex, from: Option<Incarnation>, frame: &Frame) {
        let Frame::Message { message, .. } = frame else {
            return;
        };
        match (&**message, from) {
            (Message::Validated { live: false, .. } | Message::ReadRefused { .. }, _) => {
                self.coverage.reach(Point::PullRefused);
            }
            (Message::Validated { id, claim, live: true }, Some(from)) => {
                if let Some(body) = self.nodes[node].body.as_mut() {
                    body.validated.insert((*claim, *id, from));
                }
            }
            (Message::Matched { claim, attempt, .. } | Message::Restarted { claim, attempt }, Some(from)) => {
                self.attempt_told(node, *claim, from, *attempt);
            }
            _ => {}
        }
    }

    /// The claim's owner knows of this attempt: bytes of earlier ones no longer count for it.
    fn attempt_told(&mut self, node: NodeIndex, claim: u64, from: Incarnation, attempt: u32) {
        let serial = self.nodes[node]
            .body
            .as_ref()
            .and_then(|body| body.claim_numbers.get(&claim).copied());
        let Some(serial) = serial else {
            return;
        };
        if let What::Claim(claim) = &mut self.ledger[serial as usize].what {
            let told = claim.attempts_told.entry(from).or_insert(attempt);
            *told = (*told).max(attempt);
        }
    }
}

fn words_of(frame: &Frame) -> String {
    match frame {
        Frame::Hello(hello) => format!(
            "Hello from {:?} expecting {:?}, resume {:?}",
            hello.incarnation, hello.expects, hello.resume
        ),
        Frame::Message {
            sequence,
            acknowledged,
            message,
        } => format!("{sequence}/{acknowledged} {message:?}"),
        other => format!("{other:?}"),
    }
}
