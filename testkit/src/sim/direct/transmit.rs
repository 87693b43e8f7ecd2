//! Posting, and what the devices then do with it.

use kvxfer_core::flow::{ChunkState, Direction, Payload, Placement};

use super::super::memory::FILLER;
use super::*;

/// Chunks posted in one turn, at most.
const ROUND_MAX: u64 = 3;

impl World {
    /// The engine's turn for one lane: posts what its window takes, and closes it.
    pub(super) fn qp_step(&mut self, link: LinkIndex, index: u16) {
        let Some(direct) = self.direct(link) else { return };
        direct.stepping[usize::from(index)] = false;
        let Some(qp) = direct.lanes[usize::from(index)] else {
            return;
        };
        let end = self.end_of_qp(qp, link);
        if self.qps[qp].ends[end].state != QpState::Up || !self.qps[qp].ends[end].sending {
            return;
        }
        let mut round: Vec<(Slot, Vec<Posted>)> = Vec::new();
        for _ in 0..1 + self.rng.below(ROUND_MAX) {
            let now = self.now;
            let Some(chunk) = self.links[link].sender.next_chunk(index, now) else {
                break;
            };
            self.note_chunk(link, index, &chunk);
            let slot = (chunk.header.slot, chunk.header.generation);
            match &chunk.payload {
                Payload::Message(bytes, range) => {
                    let words = Words::UserMessage {
                        header: chunk.header,
                        bytes: bytes[range.clone()].to_vec(),
                    };
                    self.say(link, words);
                    self.resolve(link, qp, &chunk, ChunkState::Applied);
                }
                Payload::Stream { remote: None, .. } => {
                    self.fail("internal", "a one-sided chunk without the other side's segments".into());
                    return;
                }
                Payload::Stream {
                    remote: Some((remote, _)),
                    gate,
                    ..
                } => {
                    if remote.direction == Direction::Read {
                        self.post_read(link, qp, end, chunk);
                        continue;
                    }
                    match gate.enter_owned() {
                        None => self.resolve(link, qp, &chunk, ChunkState::Missing),
                        Some(guard) => {
                            let posted = Posted {
                                chunk,
                                guard: Some(guard),
                                into: None,
                            };
                            match round.iter_mut().find(|(of, _)| *of == slot) {
                                Some((_, chunks)) => chunks.push(posted),
                                None => round.push((slot, vec![posted])),
                            }
                        }
                    }
                }
            }
        }
        for (slot, chunks) in round {
            self.post_close(link, qp, end, slot, chunks);
        }
        self.drain_sender(link);
        self.wake_direct(link);
    }

    fn resolve(&mut self, link: LinkIndex, qp: QpIndex, chunk: &Chunk, state: ChunkState) {
        let (lane, now) = (self.qps[qp].name, self.now);
        let name = chunk.header.name();
        self.links[link]
            .sender
            .completed(lane, chunk.transfer, name, state, now);
    }

    fn post_close(&mut self, link: LinkIndex, qp: QpIndex, end: usize, slot: Slot, chunks: Vec<Posted>) {
        let side = &mut self.qps[qp].ends[end];
        let number = side.next_close.entry(slot).or_insert(0);
        let close = (slot, *number);
        *number = number.wrapping_add(1);
        let headers: Vec<ChunkHeader> = chunks.iter().map(|posted| posted.chunk.header).collect();
        let count = chunks.len();
        let batch = self.post(qp, end, Some(close), chunks);
        self.say(
            link,
            Words::Closing {
                qp,
                close,
                chunks: headers,
            },
        );
        let mut at = self.now;
        for chunk in 0..count {
            at = at + Duration::from_nanos(self.rng.within(100..40_000));
            self.device_at(at, DeviceEvent::Transmit { qp, end, batch, chunk });
        }
    }

    fn post(&mut self, qp: QpIndex, end: usize, close: Option<Close>, chunks: Vec<Posted>) -> u64 {
        let side = &mut self.qps[qp].ends[end];
        let id = side.next_batch;
        side.next_batch += 1;
        side.posted.push_back(Batch { id, close, chunks });
        self.device_at(self.now + PROGRESS, DeviceEvent::Deadline { qp, end, batch: id });
        id
    }

    /// This side's device shall read a chunk into a slot of this side's.
    fn post_read(&mut self, link: LinkIndex, qp: QpIndex, end: usize, chunk: Chunk) {
        let (node, peer) = (self.links[link].node, self.links[link].peer.incarnation);
        let Some(slots) = self.nodes[node].body.as_ref().map(|body| Arc::clone(&body.slots)) else {
            return;
        };
        let (stream, regions, gate) = match slots.begin(peer, &chunk.header) {
            Ok(Placement::Place { stream, regions, gate }) => (stream, regions, gate),
            Ok(Placement::Scrap(state)) => {
                self.resolve(link, qp, &chunk, state);
                return;
            }
            Ok(Placement::Message) | Err(_) => {
                self.fail("protocol", format!("a chunk to read is refused: {:?}", chunk.header));
                return;
            }
        };
        let Some(guard) = gate.enter_owned() else {
            slots.abandon(&chunk.header);
            self.resolve(link, qp, &chunk, ChunkState::Refused);
            return;
        };
        let posted = Posted {
            chunk,
            guard: Some(guard),
            into: Some(Place { stream, regions }),
        };
        let batch = self.post(qp, end, None, vec![posted]);
        let (from, to) = (self.qps[qp].ends[end].node, self.qps[qp].ends[1 - end].node);
        let at = self.now + self.network_delay(from, to);
        self.device_at(at, DeviceEvent::ReadAtPeer { qp, end, batch });
    }

    // ----------------------------------------------------------------------------------------- the devices

    fn batch(&self, qp: QpIndex, end: usize, id: u64) -> Option<&Batch> {
        self.qps[qp].ends[end].posted.iter().find(|batch| batch.id == id)
    }

    /// The sender's device reads the source and sends it; behind the last chunk of a batch goes its immediate.
    pub(super) fn qp_transmit(&mut self, qp: QpIndex, end: usize, batch: u64, chunk: usize) {
        if self.qps[qp].ends[end].state != QpState::Up || !self.end_lives(qp, end) {
            return;
        }
        let Some(of) = self.batch(qp, end, batch) else { return };
        let (close, last) = (of.close, chunk + 1 == of.chunks.len());
        let Some(posted) = of.chunks.get(chunk) else { return };
        let header = posted.chunk.header;
        let transfer = posted.chunk.transfer;
        let Payload::Stream {
            stream,
            regions,
            remote: Some((remote, there)),
            ..
        } = posted.chunk.payload.clone()
        else {
            return;
        };
        let (node, to) = (self.qps[qp].ends[end].node, self.qps[qp].ends[1 - end].node);
        let (bytes, stamps) = self.read_source(node, &*stream, &regions, header.offset, u64::from(header.length));
        if self.failed() {
            return;
        }
        if let (Some(link), Some(stamp)) = (self.qps[qp].ends[end].link, stamps.first()) {
            self.note_stamp(link, transfer, *stamp);
        }
        let delay = self.lane_delay(node, to, qp);
        let side = &mut self.qps[qp].ends[end];
        side.last_arrival = side.last_arrival.max(self.now + delay);
        let at = side.last_arrival;
        if let Some(regions) = self.regions_of_keys(to, &remote) {
            let bytes = Bytes {
                place: Place { stream: there, regions },
                offset: header.offset,
                bytes,
                stamps,
                read: None,
            };
            self.device_at(
                at,
                DeviceEvent::Arrive {
                    qp,
                    end: 1 - end,
                    bytes,
                },
            );
        }
        if let Some(close) = close.filter(|_| last) {
            self.device_at(
                at,
                DeviceEvent::LastArrives {
                    qp,
                    end: 1 - end,
                    batch,
                    close,
                },
            );
        }
    }

    /// The regions that keys name, if the process that registered them is there.
    fn regions_of_keys(&mut self, node: NodeIndex, remote: &kvxfer_core::flow::Remote) -> Option<Arc<[Arc<Region>]>> {
        let life = self.nodes[node].life;
        let body = self.nodes[node].body.as_ref()?;
        let pool = body.pools.iter().find(|pool| pool.id == remote.pool)?;
        // Keys of a process that is gone name nothing.
        (*remote.keys == *keys_of(node, life, pool.id)).then(|| Arc::clone(&pool.regions))
    }

    /// Bytes reach a device. It takes them if its queue pair is up; from then on they land, whatever happens.
    pub(super) fn qp_arrive(&mut self, qp: QpIndex, end: usize, bytes: Bytes) {
        if !self.takes(qp, end) {
            self.coverage.reach(Point::WriteDropped);
            return;
        }
        let late = if self.rng.percent(self.profile.late_percent) {
            Duration::from_micros(self.rng.within(50..30_000))
        } else {
            Duration::from_nanos(self.rng.within(0..2_000))
        };
        let side = &mut self.qps[qp].ends[end];
        // Writes of a queue pair are visible in order.
        side.settled = side.settled.max(self.now + late);
        let at = side.settled;
        self.device_at(at, DeviceEvent::Land { qp, end, bytes });
    }

    fn takes(&self, qp: QpIndex, end: usize) -> bool {
        self.qps[qp].ends[end].state == QpState::Up && !self.qps[qp].broken && self.end_lives(qp, end)
    }

    pub(super) fn qp_land(&mut self, qp: QpIndex, end: usize, bytes: Bytes) {
        if !self.end_lives(qp, end) {
            return;
        }
        let node = self.qps[qp].ends[end].node;
        if self.qps[qp].ends[end].state != QpState::Up {
            self.coverage.reach(Point::LandedLate);
        }
        self.write_destination(
            node,
            &*bytes.place.stream,
            &bytes.place.regions,
            bytes.offset,
            &bytes.bytes,
            &bytes.stamps,
        );
        if let Some(batch) = bytes.read {
            let at = self.now + self.poll_delay();
            self.device_at(at, DeviceEvent::Completed { qp, end, batch });
        }
    }

    /// The last write of a batch is taken: its sender's device hears of it at once, its receiver's thread once the
    /// bytes are in memory.
    pub(super) fn qp_last_arrives(&mut self, qp: QpIndex, end: usize, batch: u64, close: Close) {
        if !self.takes(qp, end) {
            return;
        }
        self.qps[qp].ends[end].unseen.push(close);
        let ready = self.qps[qp].ends[end].settled.max(self.now) + self.poll_delay();
        self.device_at(ready, DeviceEvent::Immediate { qp, end, close });
        let (node, to) = (self.qps[qp].ends[end].node, self.qps[qp].ends[1 - end].node);
        let at = self.now + self.network_delay(node, to) + self.poll_delay();
        self.device_at(
            at,
            DeviceEvent::Completed {
                qp,
                end: 1 - end,
                batch,
            },
        );
    }

    /// The thread sees an immediate: of its own accord, or when it drains a queue pair that is being fenced.
    pub(super) fn qp_immediate(&mut self, qp: QpIndex, end: usize, close: Close) {
        let side = &mut self.qps[qp].ends[end];
        let Some(place) = side.unseen.iter().position(|unseen| *unseen == close) else {
            return;
        };
        side.unseen.remove(place);
        side.immediates.insert(close);
        self.match_close(qp, end, close);
        if let Some(link) = self.qps[qp].ends[end].link {
            self.drain_sender(link);
        }
    }

    /// The peer's device reads its memory for this side, whatever its process thinks of that.
    pub(super) fn qp_read_at_peer(&mut self, qp: QpIndex, end: usize, batch: u64) {
        if !self.takes(qp, 1 - end) || self.qps[qp].ends[end].state != QpState::Up {
            return;
        }
        let Some(posted) = self.batch(qp, end, batch).and_then(|batch| batch.chunks.first()) else {
            return;
        };
        let header = posted.chunk.header;
        let (
            Some(place),
            Payload::Stream {
                remote: Some((remote, stream)),
                ..
            },
        ) = (posted.into.clone(), posted.chunk.payload.clone())
        else {
            return;
        };
        let (node, peer) = (self.qps[qp].ends[end].node, self.qps[qp].ends[1 - end].node);
        let Some(regions) = self.regions_of_keys(peer, &remote) else {
            return;
        };
        let (bytes, mut stamps) =
            self.look_at_source(peer, &*stream, &regions, header.offset, u64::from(header.length));
        if bytes.len() != header.length as usize {
            self.fail(
                "plan",
                format!("a remote stream gave {} of {} bytes", bytes.len(), header.length),
            );
            return;
        }
        // What is read too late is anybody's: it must not count, and whether it does is seen at the arrival.
        let owner = self.owner_of_stream(node, &*place.stream, &place.regions, header.offset);
        for stamp in &mut stamps {
            if owner.is_none_or(|owner| !self.accepts(owner, *stamp)) {
                *stamp = FILLER;
                self.coverage.reach(Point::ReadTooLate);
            }
        }
        let delay = self.lane_delay(peer, node, qp);
        let bytes = Bytes {
            place,
            offset: header.offset,
            bytes,
            stamps,
            read: Some(batch),
        };
        self.device_at(self.now + delay, DeviceEvent::Arrive { qp, end, bytes });
    }

    // ----------------------------------------------------------------------------------- their completions

    pub(super) fn qp_completed(&mut self, qp: QpIndex, end: usize, batch: u64) {
        let side = &mut self.qps[qp].ends[end];
        let Some(link) = side.link.filter(|_| side.state == QpState::Up) else {
            return;
        };
        let Some(place) = side.posted.iter().position(|of| of.id == batch) else {
            return;
        };
        let Some(batch) = side.posted.remove(place) else { return };
        let node = side.node;
        for mut posted in batch.chunks {
            let left = posted.guard.take().is_some_and(OwnedGateGuard::leave);
            let state = match posted.into {
                None => ChunkState::Applied,
                Some(_) => self.read_ends(link, node, &posted.chunk.header),
            };
            self.resolve(link, qp, &posted.chunk, state);
            if left {
                self.coverage.reach(Point::GateHeld);
                self.report(link, LinkEvent::SlotQuiet);
                self.gates_left(node);
            }
        }
        self.drain_sender(link);
        self.answer_revocations(link);
        self.wake_direct(link);
    }

    fn read_ends(&mut self, link: LinkIndex, node: NodeIndex, header: &ChunkHeader) -> ChunkState {
        let Some(slots) = self.nodes[node].body.as_ref().map(|body| Arc::clone(&body.slots)) else {
            return ChunkState::Refused;
        };
        let applied = slots.applied(header);
        self.coverage.reach(Point::DirectRead);
        self.counted(link, header, applied);
        applied.acknowledgement()
    }

    pub(super) fn qp_deadline(&mut self, qp: QpIndex, end: usize, batch: u64) {
        if self.qps[qp].ends[end].state == QpState::Up && self.batch(qp, end, batch).is_some() {
            let why = Error::new(ErrorKind::Transport, "a batch").because("it made no progress");
            self.close_qp(qp, end, why);
        }
    }
}

/// What a process says of a pool when it registers it.
pub(crate) fn keys_of(node: NodeIndex, life: Life, pool: kvxfer_core::PoolId) -> Vec<u8> {
    format!("{node}.{life}.{pool}").into_bytes()
}
