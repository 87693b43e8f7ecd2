//! Links: what is sent over lanes, read by devices, and lost.

use super::*;

impl World {
    pub(super) fn lane(&mut self, from: usize, to: usize) -> LaneName {
        let epoch = *self.lanes.entry((from, to)).or_insert(1);
        LaneName { index: 0, epoch }
    }

    /// The link of this node cannot go on.
    pub(crate) fn fail_link(&mut self, node: usize, other: usize) {
        let peer = self.nodes[other].incarnation;
        let event = LinkEvent::Failed(Error::new(ErrorKind::Transport, "the device").because("it is gone"));
        self.push(self.now, Event::Link { node, peer, event });
        self.end_link(node, peer);
    }

    pub(super) fn end_link(&mut self, index: usize, peer: Incarnation) {
        let soon = self.now + HOP;
        self.nodes[index].links.remove(&peer);
        if self.stuck.contains(&index) {
            return;
        }
        let event = LinkEvent::Closed;
        self.push(
            soon,
            Event::Link {
                node: index,
                peer,
                event,
            },
        );
        if let Some(other) = self.node_of(peer) {
            for pair in [(index, other), (other, index)] {
                *self.lanes.entry(pair).or_insert(1) += 1;
            }
            self.lose_lane(other, index);
        }
    }

    pub(super) fn command(&mut self, index: usize, peer: Incarnation, command: LinkCommand) {
        let now = self.now;
        let Some(sender) = self.nodes[index].links.get_mut(&peer) else {
            return;
        };
        match command {
            LinkCommand::Submit(spec) => {
                let id = spec.id;
                if let Err(error) = sender.submit(spec) {
                    self.nodes[index].machine.submit_failed(now, peer, id, error);
                }
            }
            LinkCommand::AddPart(id, part) => sender.add_part(id, part),
            LinkCommand::Stop(id) => sender.stop(id),
            LinkCommand::Forget(id) => sender.forget(id),
            LinkCommand::LaneFenced(lane, chunks) => sender.lane_fenced(lane, &chunks, now),
            LinkCommand::FenceLane(lane, chunks) => {
                // In-flight chunks carry their lane's epoch: those of an older one are dropped on delivery.
                let states = self.nodes[index].slots.chunk_states(peer, &chunks);
                let chunks = chunks.into_iter().zip(states).collect();
                let event = LinkEvent::LaneFenced { lane, chunks };
                self.push(
                    now,
                    Event::Link {
                        node: index,
                        peer,
                        event,
                    },
                );
            }
            LinkCommand::Admit(slot, generation) => {
                self.nodes[index].told.push(Told::Admit(slot, generation));
                self.nodes[index].slots.admit(peer, slot, generation);
            }
            LinkCommand::Revoke(slot, generation) => {
                self.nodes[index].told.push(Told::Revoke(slot, generation));
                let writer = self.node_of(peer);
                if writer.is_some_and(|writer| !self.deaf.contains(&writer)) {
                    let event = Event::Quiet {
                        node: index,
                        peer,
                        slot: (slot, generation),
                    };
                    self.push(now + HOP + HOP, event);
                }
            }
            LinkCommand::Message(body) => self.nodes[index].told.push(Told::Message(body)),
        }
    }

    pub(super) fn pump(&mut self, index: usize) {
        let peers: Vec<Incarnation> = self.nodes[index].links.keys().copied().collect();
        for peer in peers {
            let Some(other) = self.node_of(peer) else { continue };
            let lane = self.lane(index, other);
            loop {
                let now = self.now;
                let Some(sender) = self.nodes[index].links.get_mut(&peer) else {
                    break;
                };
                while let Some(event) = sender.poll_event() {
                    let event = LinkEvent::Send(event);
                    self.sequence += 1;
                    self.events.push(Queued {
                        at: now,
                        sequence: self.sequence,
                        event: Event::Link {
                            node: index,
                            peer,
                            event,
                        },
                    });
                }
                let Some(chunk) = sender.next_chunk(0, now) else { break };
                let one_sided = self.nodes[index]
                    .link_transports
                    .get(&peer)
                    .is_some_and(|name| name == DIRECT);
                let mut written = None;
                if let Payload::Stream { remote, .. } = &chunk.payload {
                    assert_eq!(remote.is_some(), one_sided, "the other side's segments");
                    if let Some((remote, stream)) = remote {
                        assert_eq!(*remote.keys, [other as u8], "the other side's keys");
                        if remote.direction == Direction::Read {
                            let event = Event::Read {
                                node: index,
                                from: other,
                                lane,
                                chunk,
                            };
                            self.push(now + HOP + HOP, event);
                            continue;
                        }
                        written = Some(segments_of(&**stream, &chunk.header));
                    }
                }
                let (header, bytes) = read(chunk);
                self.push(
                    now + HOP,
                    Event::Chunk {
                        from: index,
                        to: other,
                        lane,
                        header,
                        bytes,
                        written,
                    },
                );
            }
        }
    }

    /// A node's device reads a chunk from another's memory into its own.
    pub(super) fn device_read(&mut self, node: usize, from: usize, lane: LaneName, chunk: &Chunk) {
        let (now, peer) = (self.now, self.nodes[from].incarnation);
        if self.lane(node, from) != lane || !self.nodes[node].links.contains_key(&peer) || !self.nodes[node].alive {
            return;
        }
        let Payload::Stream {
            remote: Some((_, remote)),
            ..
        } = &chunk.payload
        else {
            panic!("a read without the other side's segments");
        };
        let mut bytes = Vec::new();
        for segment in segments_of(&**remote, &chunk.header) {
            let mut piece = vec![0; segment.length as usize];
            self.nodes[from].region.copy_out(segment.offset, &mut piece).unwrap();
            bytes.extend(piece);
        }
        let header = chunk.header;
        let (state, arrived) = self.nodes[node].place(peer, &header, Some(bytes), None);
        if let Some(sender) = self.nodes[node].links.get_mut(&peer) {
            sender.completed(lane, chunk.transfer, header.name(), state, now);
        }
        if arrived {
            let event = LinkEvent::SlotArrived {
                slot: header.slot,
                generation: header.generation,
            };
            self.push(now, Event::Link { node, peer, event });
        }
    }
}

pub(super) fn segments_of(stream: &dyn kvxfer_core::flow::ByteStream, header: &ChunkHeader) -> Vec<Segment> {
    let mut segments = Vec::new();
    stream.segments(header.offset, u64::from(header.length), usize::MAX, &mut segments);
    segments
}

/// Reads a chunk's bytes inside its gate; `None` if the gate was closed.
fn read(chunk: Chunk) -> (ChunkHeader, Option<Vec<u8>>) {
    let header = chunk.header;
    let bytes = match chunk.payload {
        Payload::Message(message, range) => Some(message[range].to_vec()),
        Payload::Stream {
            stream, regions, gate, ..
        } => gate.enter().map(|_inside| {
            let mut segments = Vec::new();
            let mut bytes = Vec::new();
            stream.segments(header.offset, u64::from(header.length), usize::MAX, &mut segments);
            for segment in segments {
                let mut piece = vec![0; segment.length as usize];
                regions[segment.region as usize]
                    .copy_out(segment.offset, &mut piece)
                    .unwrap();
                bytes.extend(piece);
            }
            assert_eq!(bytes.len(), header.length as usize);
            bytes
        }),
    };
    (header, bytes)
}
