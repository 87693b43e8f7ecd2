//! Endpoints joined in memory: real machines, slot tables and link senders; a network that delivers in order after a
//! fixed delay, until a test cuts, blocks or holds it.
#![allow(dead_code)] // Each test binary uses its own part of it.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{
    Chunk, ChunkHeader, ChunkName, ChunkState, Direction, LaneName, LinkSender, LinkSenderConfig, Payload, Placement,
    SlotTable,
};
use kvxfer_core::layout::{DType, Geometry, PlaneKind, PlaneSpec, PoolLayout, Selection, Sharding};
use kvxfer_core::machine::*;
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::plan::{Scope, Target};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::wire::{EndpointAddress, Frame, body_length, decode, encode};
use kvxfer_core::{Error, ErrorKind, Generation, Incarnation, PoolId, Result, SlotId, Time};

mod handles;
mod links;
mod node;

pub(crate) use handles::{claim_options, offer_options};
pub(crate) use node::{Node, blocks, layout, target};

pub(crate) const POOL: PoolId = PoolId(1);
pub(crate) const BLOCK: u64 = 64;
pub(crate) const TOKENS_PER_BLOCK: u32 = 4;
const HOP: Duration = Duration::from_micros(100);

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) nodes: Vec<Node>,
    events: BinaryHeap<Queued>,
    sequence: u64,
    // Ends of session connections.
    ends: BTreeMap<(usize, ConnectionId), (usize, ConnectionId)>,
    accepted: u64,
    lanes: BTreeMap<(usize, usize), u32>,
    /// Pairs between which nothing new goes through.
    pub(crate) blocked: BTreeSet<(usize, usize)>,
    /// Chunks to these nodes are kept back.
    pub(crate) held: BTreeSet<usize>,
    /// Nodes whose links never close.
    pub(crate) stuck: BTreeSet<usize>,
    /// Session frames are dropped from these nodes (while their connection stays up).
    pub(crate) mute: BTreeSet<usize>,
    /// Nodes that do not answer when they are told to stop writing.
    pub(crate) deaf: BTreeSet<usize>,
    /// Transports with which these nodes cannot make a link.
    pub(crate) broken: BTreeSet<(usize, &'static str)>,
    /// Frames delivered twice.
    pub(crate) echo: bool,
    kept: Vec<Event>,
    pub(crate) trace: bool,
}

/// What a one-sided link is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Told {
    Admit(SlotId, Generation),
    Revoke(SlotId, Generation),
    Message(Vec<u8>),
}

/// One that writes and reads the peer's memory itself, and one that does not.
pub(crate) const DIRECT: &str = "direct";
pub(crate) const MEMORY: &str = "memory";

struct Queued {
    at: Time,
    sequence: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.sequence == other.sequence
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

enum Event {
    Dial {
        from: usize,
        connection: ConnectionId,
        to: SocketAddr,
    },
    Dialed {
        node: usize,
        connection: ConnectionId,
    },
    Frame {
        node: usize,
        connection: ConnectionId,
        bytes: Vec<u8>,
    },
    Gone {
        node: usize,
        connection: ConnectionId,
    },
    Link {
        node: usize,
        peer: Incarnation,
        event: LinkEvent,
    },
    Chunk {
        from: usize,
        to: usize,
        lane: LaneName,
        header: ChunkHeader,
        bytes: Option<Vec<u8>>,
        // Where a one-sided link writes it.
        written: Option<Vec<Segment>>,
    },
    Read {
        node: usize,
        from: usize,
        lane: LaneName,
        chunk: Chunk,
    },
    Quiet {
        node: usize,
        peer: Incarnation,
        slot: (SlotId, Generation),
    },
    Ack {
        to: usize,
        from: usize,
        lane: LaneName,
        chunk: ChunkName,
        state: ChunkState,
    },
}

impl World {
    pub(crate) fn new(count: usize) -> World {
        World::with(count, |_| {}, |_| layout(0..2, 16))
    }

    /// Endpoints that have these transports, in this order.
    pub(crate) fn over(count: usize, transports: &[&str]) -> World {
        World::with_transports(count, |_| {}, |_| layout(0..2, 16), transports)
    }

    pub(crate) fn with(
        count: usize,
        configure: impl Fn(&mut MachineConfig),
        layout: impl Fn(usize) -> PoolLayout,
    ) -> World {
        World::with_transports(count, configure, layout, &[MEMORY])
    }

    pub(crate) fn with_transports(
        count: usize,
        configure: impl Fn(&mut MachineConfig),
        layout: impl Fn(usize) -> PoolLayout,
        transports: &[&str],
    ) -> World {
        let mut world = World {
            now: Time::from_nanos(1_000_000_000),
            nodes: Vec::new(),
            events: BinaryHeap::new(),
            sequence: 0,
            ends: BTreeMap::new(),
            accepted: 0,
            lanes: BTreeMap::new(),
            blocked: BTreeSet::new(),
            held: BTreeSet::new(),
            stuck: BTreeSet::new(),
            mute: BTreeSet::new(),
            deaf: BTreeSet::new(),
            broken: BTreeSet::new(),
            echo: false,
            kept: Vec::new(),
            trace: std::env::var_os("TRACE").is_some(),
        };
        for index in 0..count {
            let mut config = MachineConfig {
                name: format!("node-{index}"),
                ..MachineConfig::default()
            };
            configure(&mut config);
            let bits = 1 + index as u128;
            let node = Node::new(index, bits << 100, config, layout(index), world.now, transports);
            world.nodes.push(node);
        }
        world
    }

    pub(crate) fn address(&self, node: usize) -> EndpointAddress {
        EndpointAddress {
            sockets: vec![self.nodes[node].socket],
            incarnation: Some(self.nodes[node].incarnation),
            rank: Default::default(),
        }
    }

    /// Kills a node: its connections and lanes break, and nothing answers at its address.
    pub(crate) fn kill(&mut self, node: usize) {
        self.nodes[node].alive = false;
        self.nodes[node].links.clear();
        self.break_connections(|end| end == node);
        for other in 0..self.nodes.len() {
            self.lose_lane(other, node);
        }
    }

    /// Starts another incarnation at a killed node's address.
    pub(crate) fn restart(&mut self, node: usize) {
        let bits = self.nodes[node].incarnation.bits() + 1;
        let layout = PoolLayout::clone(&self.nodes[node].layout);
        let config = MachineConfig {
            name: format!("node-{node}"),
            ..MachineConfig::default()
        };
        self.nodes[node] = Node::new(node, bits, config, layout, self.now, &[MEMORY]);
    }

    /// Breaks the session connections between two nodes; frames under way are lost.
    pub(crate) fn cut(&mut self, a: usize, b: usize) {
        let ends: Vec<(usize, ConnectionId)> = self
            .ends
            .iter()
            .filter(|((from, _), (to, _))| (*from, *to) == (a, b) || (*from, *to) == (b, a))
            .map(|(end, _)| *end)
            .collect();
        for end in ends {
            self.break_end(end);
        }
    }

    pub(crate) fn block(&mut self, a: usize, b: usize) {
        self.blocked.insert((a, b));
        self.blocked.insert((b, a));
        self.cut(a, b);
    }

    pub(crate) fn unblock(&mut self) {
        self.blocked.clear();
    }

    fn break_connections(&mut self, touches: impl Fn(usize) -> bool) {
        let ends: Vec<(usize, ConnectionId)> = self
            .ends
            .iter()
            .filter(|((from, _), (to, _))| touches(*from) || touches(*to))
            .map(|(end, _)| *end)
            .collect();
        for end in ends {
            self.break_end(end);
        }
    }

    fn break_end(&mut self, end: (usize, ConnectionId)) {
        if self.ends.remove(&end).is_some() {
            let (node, connection) = end;
            self.push(self.now, Event::Gone { node, connection });
        }
    }

    /// The lane from `node` to `other` is lost; what is under way on it never counts.
    pub(crate) fn lose_lane(&mut self, node: usize, other: usize) {
        let peer = self.nodes[other].incarnation;
        let lane = self.lane(node, other);
        if let Some(sender) = self.nodes[node].links.get_mut(&peer) {
            let chunks = sender.lane_lost(lane);
            let error = Error::new(ErrorKind::Transport, "lane");
            let event = LinkEvent::LaneLost { lane, chunks, error };
            self.push(self.now, Event::Link { node, peer, event });
            *self.lanes.get_mut(&(node, other)).unwrap() += 1;
            let up = self.lane(node, other);
            if self.nodes[other].links.contains_key(&self.nodes[node].incarnation) {
                self.nodes[node].links.get_mut(&peer).unwrap().lane_up(up);
            }
        }
    }

    fn push(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.events.push(Queued {
            at,
            sequence: self.sequence,
            event,
        });
    }

    fn node_at(&self, socket: SocketAddr) -> Option<usize> {
        self.nodes.iter().position(|node| node.socket == socket && node.alive)
    }

    fn node_of(&self, incarnation: Incarnation) -> Option<usize> {
        self.nodes
            .iter()
            .position(|node| node.incarnation == incarnation && node.alive)
    }

    /// Runs for so long.
    pub(crate) fn run(&mut self, duration: Duration) {
        let until = self.now + duration;
        for _ in 0..2_000_000 {
            self.act();
            let timers = self.nodes.iter().filter(|node| node.alive);
            let timer = timers.filter_map(|node| node.machine.next_timer()).min();
            let event = self.events.peek().map(|queued| queued.at);
            let next = match (timer, event) {
                (Some(a), Some(b)) => a.min(b),
                (Some(a), None) | (None, Some(a)) => a,
                (None, None) => break,
            };
            if next > until {
                break;
            }
            self.now = self.now.max(next);
            if event.is_some_and(|event| event <= self.now) {
                let queued = self.events.pop().unwrap();
                self.deliver(queued.event);
            } else {
                let now = self.now;
                for node in self.nodes.iter_mut().filter(|node| node.alive) {
                    if node.machine.next_timer().is_some_and(|at| at <= now) {
                        node.machine.timer(now);
                    }
                }
            }
        }
        self.act();
        self.now = self.now.max(until);
    }

    pub(crate) fn run_ms(&mut self, ms: u64) {
        self.run(Duration::from_millis(ms));
    }

    /// Lets chunks through again.
    pub(crate) fn release(&mut self, node: usize) {
        self.held.remove(&node);
        for event in std::mem::take(&mut self.kept) {
            self.push(self.now, event);
        }
    }

    /// Carries out what the machines want, and moves what the links have.
    fn act(&mut self) {
        for index in 0..self.nodes.len() {
            while self.nodes[index].alive {
                let Some(action) = self.nodes[index].machine.poll_action() else {
                    break;
                };
                self.carry_out(index, action);
            }
            self.pump(index);
        }
    }

    fn carry_out(&mut self, index: usize, action: Action) {
        let soon = self.now + HOP;
        match action {
            Action::Dial {
                connection, addresses, ..
            } => self.push(
                soon,
                Event::Dial {
                    from: index,
                    connection,
                    to: addresses[0],
                },
            ),
            Action::Send { connection, frame } => {
                if self.trace {
                    eprintln!("{:?} {index} {frame:?}", self.now.as_nanos() / 1000);
                }
                let Some(&(node, other)) = self.ends.get(&(index, connection)) else {
                    return;
                };
                if self.mute.contains(&index) {
                    return;
                }
                let bytes = encode(&frame).unwrap();
                let repeat = self.echo && matches!(frame, Frame::Message { .. });
                for _ in 0..1 + usize::from(repeat) {
                    let bytes = bytes.clone();
                    self.push(
                        soon,
                        Event::Frame {
                            node,
                            connection: other,
                            bytes,
                        },
                    );
                }
            }
            Action::Disconnect { connection } => {
                // The other end still gets what was sent before.
                if let Some(other) = self.ends.remove(&(index, connection)) {
                    let (node, connection) = other;
                    self.push(soon, Event::Gone { node, connection });
                }
            }
            Action::ConnectLink { transport, peer } => {
                if self
                    .broken
                    .iter()
                    .any(|(node, name)| *node == index && *name == transport)
                {
                    let error = Error::new(ErrorKind::Unsupported, format!("a link over {transport}"));
                    let now = self.now;
                    self.nodes[index].machine.link_failed(now, peer.incarnation, error);
                    return;
                }
                self.nodes[index].link_transports.insert(peer.incarnation, transport);
                self.nodes[index]
                    .links
                    .insert(peer.incarnation, LinkSender::new(LinkSenderConfig::default()));
                let local = self.nodes[index].incarnation;
                let Some(other) = self.node_of(peer.incarnation) else {
                    return;
                };
                let same = self.nodes[other].link_transports.get(&local)
                    == self.nodes[index].link_transports.get(&peer.incarnation);
                if self.nodes[other].links.contains_key(&local) && same {
                    for (from, to) in [(index, other), (other, index)] {
                        let lane = self.lane(from, to);
                        let peer = self.nodes[to].incarnation;
                        if let Some(sender) = self.nodes[from].links.get_mut(&peer) {
                            sender.lane_up(lane);
                        }
                        let event = LinkEvent::Up;
                        self.push(
                            soon,
                            Event::Link {
                                node: from,
                                peer,
                                event,
                            },
                        );
                    }
                }
            }
            Action::CloseLink { peer } => self.end_link(index, peer),
            Action::Link { peer, command } => self.command(index, peer, command),
            Action::Complete { handle, result } => {
                if self.trace {
                    eprintln!("{:?} {index} {handle:?} ends: {result:?}", self.now.as_nanos() / 1000);
                }
                self.nodes[index].ended.push((handle, result));
            }
            Action::Notice { handle, notice } => self.nodes[index].notices.push((handle, notice)),
            Action::Peer { peer, change } => {
                if self.trace {
                    eprintln!("{:?} {index} {peer:?}: {change:?}", self.now.as_nanos() / 1000);
                }
                self.nodes[index].changes.push((peer, change));
            }
        }
    }

    fn deliver(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Dial { from, connection, to } => {
                let target = self.node_at(to).filter(|to| !self.blocked.contains(&(from, *to)));
                let Some(node) = target else {
                    let error = Error::new(ErrorKind::Transport, "connect").because("refused");
                    self.nodes[from].machine.dial_failed(now, connection, error);
                    return;
                };
                self.accepted += 1;
                let other = ConnectionId(self.accepted);
                self.ends.insert((from, connection), (node, other));
                self.ends.insert((node, other), (from, connection));
                let socket = self.nodes[from].socket;
                self.nodes[node].machine.accepted(now, other, socket);
                self.push(now + HOP, Event::Dialed { node: from, connection });
            }
            Event::Dialed { node, connection } => {
                if self.ends.contains_key(&(node, connection)) && self.nodes[node].alive {
                    self.nodes[node].machine.dialed(now, connection);
                }
            }
            Event::Frame {
                node,
                connection,
                bytes,
            } => {
                if self.ends.contains_key(&(node, connection)) && self.nodes[node].alive {
                    let (header, body) = bytes.split_first_chunk().unwrap();
                    assert_eq!(body_length(header).unwrap(), body.len());
                    let frame = decode(header, body).unwrap();
                    self.nodes[node].machine.frame(now, connection, frame);
                }
            }
            Event::Gone { node, connection } => {
                self.ends.remove(&(node, connection));
                if self.nodes[node].alive {
                    let error = Error::new(ErrorKind::Transport, "connection").because("it broke");
                    self.nodes[node].machine.disconnected(now, connection, error);
                }
            }
            Event::Link { node, peer, event } => {
                if self.nodes[node].alive {
                    self.nodes[node].machine.link_event(now, peer, event);
                }
            }
            Event::Chunk {
                from,
                to,
                lane,
                header,
                bytes,
                written,
            } => {
                if self.held.contains(&to) {
                    self.kept.push(Event::Chunk {
                        from,
                        to,
                        lane,
                        header,
                        bytes,
                        written,
                    });
                    return;
                }
                let peer = self.nodes[from].incarnation;
                let linked = self.nodes[to].links.contains_key(&peer);
                if self.lane(from, to) != lane || !linked || !self.nodes[to].alive {
                    return;
                }
                let (state, arrived) = self.nodes[to].place(peer, &header, bytes, written);
                if arrived {
                    let event = LinkEvent::SlotArrived {
                        slot: header.slot,
                        generation: header.generation,
                    };
                    self.push(now, Event::Link { node: to, peer, event });
                }
                let chunk = header.name();
                self.push(
                    now + HOP,
                    Event::Ack {
                        to: from,
                        from: to,
                        lane,
                        chunk,
                        state,
                    },
                );
            }
            Event::Read {
                node,
                from,
                lane,
                chunk,
            } => {
                if self.held.contains(&node) {
                    self.kept.push(Event::Read {
                        node,
                        from,
                        lane,
                        chunk,
                    });
                    return;
                }
                self.device_read(node, from, lane, &chunk);
            }
            Event::Quiet { node, peer, slot } => {
                if self.nodes[node].alive && self.nodes[node].slots.remote_quiet(slot.0, slot.1) {
                    self.nodes[node].machine.link_event(now, peer, LinkEvent::SlotQuiet);
                }
            }
            Event::Ack {
                to,
                from,
                lane,
                chunk,
                state,
            } => {
                let peer = self.nodes[from].incarnation;
                if let Some(sender) = self.nodes[to].links.get_mut(&peer) {
                    sender.acknowledged(lane, chunk, state, now);
                }
            }
        }
    }
}
