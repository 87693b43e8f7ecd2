//! A link in small steps: one [`LinkSender`], lanes that lose, stall and reorder against each other, and the peer's
//! [`SlotTable`]. After each step the data plane's promises are checked against what was really sent and placed.
#![allow(unreachable_pub, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{
    Applied, Chunk, ChunkHeader, ChunkName, ChunkState, Gate, IntervalSet, LaneName, LinkSender, LinkSenderConfig,
    MESSAGE_PART, Payload, Placement, SendEvent, SendPart, SendSpec, SlotTable, TransferId,
};
use kvxfer_core::{Generation, Incarnation, SlotId, Time};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::flow_common::{Grid, Numbers, open};

const SENDER: Incarnation = Incarnation::from_bits(7);

/// Runs the schedule of this seed.
pub fn run(seed: u64) -> TestCaseResult {
    let mut world = World::new(seed);
    for _ in 0..400 {
        world.step()?;
        world.check()?;
    }
    world.settle()
}

struct World {
    numbers: Numbers,
    now: Time,
    config: LinkSenderConfig,
    sender: LinkSender,
    table: Arc<SlotTable>,
    lanes: Vec<Lane>,
    // Connections that the sender has given up and whose bytes the receiver still reads, until it fences them.
    zombies: Vec<Connection>,
    transfers: BTreeMap<TransferId, Transfer>,
    // Chunks outstanding or in doubt: they must not be sent again.
    out: BTreeSet<(u64, u32, u64)>,
    next_transfer: u64,
}

struct Lane {
    index: u16,
    epoch: u32,
    connection: Option<Connection>,
}

/// One connection: chunks one way, acknowledgements the other, each in order.
struct Connection {
    name: LaneName,
    chunks: VecDeque<Sent>,
    placing: Option<Placing>,
    acks: VecDeque<(ChunkName, ChunkState)>,
    in_doubt: Vec<ChunkName>,
}

struct Sent {
    chunk: Chunk,
    valid: bool,
}

struct Placing {
    header: ChunkHeader,
    valid: bool,
}

struct Transfer {
    slot: (SlotId, Generation),
    grid: Grid,
    parts: Vec<(u32, SendPart)>,
    unsent: VecDeque<SendPart>,
    gate: Arc<Gate>,
    message: Option<Arc<[u8]>>,
    deadline: Option<Time>,
    closed: bool,
    stopped: bool,
    quiet: bool,
    arrived_here: bool,
    arrived_there: bool,
    refused: bool,
    // What the receiver really placed, by part.
    placed: BTreeMap<u32, IntervalSet>,
    message_placed: bool,
}

impl World {
    fn new(seed: u64) -> World {
        let mut numbers = Numbers(seed);
        let lanes = 1 + numbers.below(3) as u16;
        let config = LinkSenderConfig {
            lanes,
            window_bytes_min: (1 + numbers.below(3)) << 20,
            window_bytes_max: 4 << 20,
            window_chunks_max: 1 + numbers.below(8) as u32,
            transfers_active_max: 1 + numbers.below(4) as u32,
            transfers_max: 8,
        };
        World {
            sender: LinkSender::new(config.clone()),
            config,
            numbers,
            now: Time::from_nanos(1),
            table: SlotTable::new(64),
            lanes: (0..lanes)
                .map(|index| Lane {
                    index,
                    epoch: 0,
                    connection: None,
                })
                .collect(),
            zombies: Vec::new(),
            transfers: BTreeMap::new(),
            out: BTreeSet::new(),
            next_transfer: 0,
        }
    }

    fn step(&mut self) -> TestCaseResult {
        self.now = self.now + Duration::from_micros(self.numbers.below(400));
        match self.numbers.below(40) {
            0 | 1 => self.submit(),
            2..=4 => self.add_part(),
            5 => self.lose_lane()?,
            6 | 7 => self.fence()?,
            8 => self.close_slot(),
            9 => self.stop(),
            10..=12 => self.connect(),
            13 => self.forget(),
            14..=22 => self.send()?,
            23..=34 => self.receive()?,
            _ => self.acknowledge(),
        }
        self.events()
    }

    fn submit(&mut self) {
        let grid = Grid {
            layers: 1 + self.numbers.below(3) as u16,
            tokens: 2 + self.numbers.below(6) as u32,
            cell: [4, 4096, 1 << 18][self.numbers.below(3) as usize],
            state: self.numbers.below(2) * 100,
        };
        let slot = open(&self.table, grid, Some(SENDER), None);
        self.next_transfer += 1;
        let id = TransferId(self.next_transfer);
        let message: Option<Arc<[u8]>> = match self.numbers.below(4) {
            0 => Some(Arc::from(&b"a message"[..])),
            1 => Some(Arc::from(&b""[..])),
            _ => None,
        };
        let late = self.numbers.one_in(8);
        let deadline = late.then(|| self.now + Duration::from_micros(self.numbers.below(20_000)));
        let gate = Gate::new();
        let spec = SendSpec {
            id,
            slot: slot.0,
            generation: slot.1,
            gate: gate.clone(),
            regions: Arc::new([]),
            message: message.clone(),
            priority: self.numbers.below(2) as u8,
            deadline,
            checksum: false,
            remote: None,
        };
        let full = self.sender.transfers() >= 8;
        let taken = self.sender.submit(spec);
        assert_eq!(taken.is_err(), full);
        let parts: Vec<_> = grid
            .quarters(1 + self.numbers.below(u64::from(grid.tokens) - 1) as u32, 1)
            .into_iter()
            .enumerate()
            .map(|(number, extent)| SendPart {
                part: number as u32,
                extent,
                stream: Arc::new(grid.stream_of(extent)),
                remote: None,
            })
            .filter(|part| part.stream.length() > 0)
            .collect();
        if full {
            self.table.close(slot.0, slot.1);
            assert!(self.table.release(slot.0, slot.1));
            return;
        }
        let transfer = Transfer {
            slot,
            grid,
            parts: parts.iter().map(|part| (part.part, part.clone())).collect(),
            unsent: parts.into(),
            gate,
            message,
            deadline,
            closed: false,
            stopped: false,
            quiet: false,
            arrived_here: false,
            arrived_there: false,
            refused: false,
            placed: BTreeMap::new(),
            message_placed: false,
        };
        self.transfers.insert(id, transfer);
    }

    fn pick(&mut self) -> Option<TransferId> {
        let count = self.transfers.len() as u64;
        let nth = self.numbers.below(count.max(1)) as usize;
        self.transfers.keys().nth(nth).copied()
    }

    fn add_part(&mut self) {
        let Some(id) = self.pick() else { return };
        let part = self
            .transfers
            .get_mut(&id)
            .and_then(|transfer| transfer.unsent.pop_front());
        if let Some(part) = part {
            self.sender.add_part(id, part);
        }
    }

    fn stop(&mut self) {
        let Some(id) = self.pick() else { return };
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if !transfer.stopped {
            transfer.stopped = true;
            transfer.gate.close();
            self.sender.stop(id);
        }
    }

    fn close_slot(&mut self) {
        let Some(id) = self.pick() else { return };
        if self.numbers.one_in(3)
            && let Some(transfer) = self.transfers.get_mut(&id)
        {
            self.table.close(transfer.slot.0, transfer.slot.1);
            transfer.closed |= !transfer.arrived_there;
        }
    }

    fn forget(&mut self) {
        let Some(id) = self.pick() else { return };
        let ended = self.transfers.get(&id).is_some_and(|transfer| {
            transfer.quiet || ((transfer.arrived_here || transfer.refused) && !transfer.stopped)
        });
        // Its chunks must be gone, for this test to know what it sees.
        let slot = self.transfers.get(&id).map(|transfer| transfer.slot);
        let out = self.out.iter().any(|(transfer, ..)| *transfer == id.0);
        if let (true, false, Some(slot)) = (ended, out, slot) {
            self.sender.forget(id);
            self.transfers.remove(&id);
            self.table.close(slot.0, slot.1);
            assert!(self.table.release(slot.0, slot.1));
        }
    }

    fn connect(&mut self) {
        let lane = self.numbers.below(self.lanes.len() as u64) as usize;
        let lane = &mut self.lanes[lane];
        if lane.connection.is_none() {
            lane.epoch += 1;
            let name = LaneName {
                index: lane.index,
                epoch: lane.epoch,
            };
            lane.connection = Some(Connection {
                name,
                chunks: VecDeque::new(),
                placing: None,
                acks: VecDeque::new(),
                in_doubt: Vec::new(),
            });
            self.sender.lane_up(name);
        }
    }

    fn lose_lane(&mut self) -> TestCaseResult {
        let lane = self.numbers.below(self.lanes.len() as u64) as usize;
        let Some(mut connection) = self.lanes[lane].connection.take() else {
            return Ok(());
        };
        connection.in_doubt = self.sender.lane_lost(connection.name);
        prop_assert!(self.sender.lane_lost(connection.name).is_empty(), "lost twice");
        // Some of the last bytes may never leave.
        let kept = self.numbers.below(connection.chunks.len() as u64 + 1) as usize;
        connection.chunks.truncate(kept);
        self.zombies.push(connection);
        Ok(())
    }

    /// The receiver takes a lost lane out of use and answers.
    fn fence(&mut self) -> TestCaseResult {
        if self.zombies.is_empty() {
            return Ok(());
        }
        let nth = self.numbers.below(self.zombies.len() as u64) as usize;
        let connection = self.zombies.swap_remove(nth);
        if let Some(placing) = connection.placing {
            self.table.abandon(&placing.header);
        }
        let states = self.table.chunk_states(SENDER, &connection.in_doubt);
        let mut answer: Vec<_> = connection.in_doubt.iter().copied().zip(states).collect();
        match self.numbers.below(4) {
            0 => answer.reverse(),
            1 => answer.retain(|(_, state)| *state != ChunkState::Missing),
            _ => {}
        }
        for chunk in &connection.in_doubt {
            let key = self.key(chunk);
            self.out.remove(&key);
        }
        self.sender.lane_fenced(connection.name, &answer, self.now);
        Ok(())
    }

    fn send(&mut self) -> TestCaseResult {
        let index = self.numbers.below(self.lanes.len() as u64) as u16;
        self.send_on(index).map(|_| ())
    }

    fn send_on(&mut self, index: u16) -> Result<bool, TestCaseError> {
        let had_work = self.sender.has_work(index);
        let before = self.sender.lane_load(index);
        let Some(chunk) = self.sender.next_chunk(index, self.now) else {
            return Ok(false);
        };
        prop_assert!(had_work, "a chunk came of a lane without work");
        let after = self.sender.lane_load(index);
        prop_assert!(
            after.bytes <= before.window_bytes || after.chunks == 1,
            "{after:?} over {before:?}"
        );
        prop_assert!(after.chunks <= self.config.window_chunks_max);
        prop_assert!(chunk.header.length <= 1 << 20);
        let Some(transfer) = self.transfers.get(&chunk.transfer) else {
            prop_assert!(false, "a chunk of a forgotten transfer");
            return Ok(false);
        };
        prop_assert!(
            !transfer.stopped && !transfer.gate.is_closed(),
            "a stopped transfer sends"
        );
        prop_assert!(transfer.deadline.is_none_or(|deadline| deadline > self.now), "too late");
        prop_assert!(!transfer.arrived_here && !transfer.refused, "an ended transfer sends");
        let key = self.key(&chunk.header.name());
        prop_assert!(
            self.out.insert(key),
            "{key:?} is sent while a copy of it is out or in doubt"
        );
        match (&chunk.payload, chunk.header.part) {
            (Payload::Message(message, range), MESSAGE_PART) => {
                prop_assert_eq!(range.len(), chunk.header.length as usize);
                prop_assert_eq!(Some(message), transfer.message.as_ref());
            }
            (Payload::Stream { stream, .. }, _) => {
                prop_assert!(chunk.header.offset + u64::from(chunk.header.length) <= stream.length());
                prop_assert!(chunk.header.length > 0);
            }
            (payload, part) => prop_assert!(false, "{payload:?} for part {part}"),
        }
        let valid = !transfer.gate.is_closed();
        let Some(connection) = &mut self.lanes[usize::from(index)].connection else {
            prop_assert!(false, "a chunk for a lane that is down");
            return Ok(false);
        };
        connection.chunks.push_back(Sent { chunk, valid });
        Ok(true)
    }

    /// The receiver reads a header, or ends a chunk, on some connection.
    fn receive(&mut self) -> TestCaseResult {
        let count = self.lanes.len() + self.zombies.len();
        let nth = self.numbers.below(count as u64) as usize;
        self.receive_on(nth).map(|_| ())
    }

    fn receive_on(&mut self, nth: usize) -> Result<bool, TestCaseError> {
        let lanes = self.lanes.len();
        let connection = if nth < lanes {
            self.lanes[nth].connection.take()
        } else {
            Some(self.zombies.swap_remove(nth - lanes))
        };
        let Some(mut connection) = connection else {
            return Ok(false);
        };
        let moved = self.receive_from(&mut connection);
        if nth < lanes {
            self.lanes[nth].connection = Some(connection);
        } else {
            self.zombies.push(connection);
        }
        moved
    }

    fn receive_from(&mut self, connection: &mut Connection) -> Result<bool, TestCaseError> {
        if let Some(placing) = connection.placing.take() {
            let state = self.placed(&placing)?;
            connection.acks.push_back((placing.header.name(), state));
            return Ok(true);
        }
        let Some(sent) = connection.chunks.pop_front() else {
            return Ok(false);
        };
        let header = sent.chunk.header;
        // The sender's gate may have closed while the chunk was on its way out.
        let closed = self
            .transfers
            .get(&sent.chunk.transfer)
            .is_none_or(|transfer| transfer.gate.is_closed());
        let valid = sent.valid && !(closed && self.numbers.one_in(2));
        match self.table.begin(SENDER, &header) {
            Err(error) => prop_assert!(false, "{error}"),
            Ok(Placement::Scrap(state)) => connection.acks.push_back((header.name(), state)),
            Ok(Placement::Place { .. }) => connection.placing = Some(Placing { header, valid }),
            Ok(Placement::Message) => {
                let Payload::Message(message, range) = &sent.chunk.payload else {
                    prop_assert!(false, "no message");
                    return Ok(false);
                };
                let applied = self.table.message_applied(&header, &message[range.clone()]);
                if applied != Applied::Refused
                    && let Some(transfer) = self.transfers.get_mut(&sent.chunk.transfer)
                {
                    transfer.message_placed = true;
                }
                self.arrived(&header, applied.acknowledgement())?;
                connection.acks.push_back((header.name(), applied.acknowledgement()));
            }
        }
        Ok(true)
    }

    fn placed(&mut self, placing: &Placing) -> Result<ChunkState, TestCaseError> {
        let header = &placing.header;
        if placing.valid
            && let Some(transfer) = self.owner(header.slot)
            && !transfer.closed
        {
            let range = header.offset..header.offset + u64::from(header.length);
            let added = transfer.placed.entry(header.part).or_default().insert(range);
            prop_assert_eq!(added, u64::from(header.length), "bytes were placed twice");
        }
        let state = self.table.placed(header, placing.valid);
        if !placing.valid {
            prop_assert_eq!(state, ChunkState::Missing);
        }
        self.arrived(header, state)?;
        Ok(state)
    }

    /// If the table says that the slot has arrived, everything must have been placed.
    fn arrived(&mut self, header: &ChunkHeader, state: ChunkState) -> TestCaseResult {
        let Some(transfer) = self.owner(header.slot) else {
            return Ok(());
        };
        if state == ChunkState::Arrived {
            transfer.arrived_there = true;
            let bytes: u64 = transfer.placed.values().map(IntervalSet::total).sum();
            prop_assert_eq!(bytes, transfer.grid.total(), "arrived before it was whole");
            prop_assert!(
                transfer.message.is_none() || transfer.message_placed,
                "arrived without its message"
            );
        }
        Ok(())
    }

    fn acknowledge(&mut self) {
        let nth = self.numbers.below(self.lanes.len() as u64) as usize;
        self.acknowledge_on(nth);
    }

    fn acknowledge_on(&mut self, nth: usize) -> bool {
        let Some(connection) = &mut self.lanes[nth].connection else {
            return false;
        };
        let Some((chunk, state)) = connection.acks.pop_front() else {
            return false;
        };
        let name = connection.name;
        let key = self.key(&chunk);
        self.out.remove(&key);
        self.sender.acknowledged(name, chunk, state, self.now);
        // Nonsense is ignored: twice, of another epoch, of a lane that is not there.
        self.sender.acknowledged(name, chunk, state, self.now);
        let stale = LaneName {
            epoch: name.epoch + 9,
            ..name
        };
        self.sender.acknowledged(stale, chunk, state, self.now);
        true
    }

    fn events(&mut self) -> TestCaseResult {
        while let Some(event) = self.sender.poll_event() {
            let (SendEvent::Arrived(id) | SendEvent::Refused(id) | SendEvent::Drained(id) | SendEvent::Quiet(id)) =
                event;
            let outstanding = self
                .lanes
                .iter()
                .filter_map(|lane| lane.connection.as_ref())
                .any(|connection| self.owes(connection, id));
            let Some(transfer) = self.transfers.get_mut(&id) else {
                prop_assert!(false, "{event:?} of a forgotten transfer");
                return Ok(());
            };
            prop_assert!(!transfer.quiet, "{event:?} after Quiet");
            match event {
                SendEvent::Arrived(_) => {
                    prop_assert!(!transfer.arrived_here && !transfer.refused, "two ends");
                    prop_assert!(transfer.arrived_there, "the sender knew before the receiver");
                    transfer.arrived_here = true;
                }
                SendEvent::Refused(_) => {
                    prop_assert!(!transfer.arrived_here && !transfer.refused, "two ends");
                    prop_assert!(transfer.closed, "an open slot refused");
                    transfer.refused = true;
                }
                SendEvent::Drained(_) => {
                    let given = transfer.parts.len() - transfer.unsent.len();
                    for (number, part) in &transfer.parts[..given] {
                        let placed = transfer.placed.get(number).map_or(0, IntervalSet::total);
                        prop_assert_eq!(placed, part.stream.length(), "drained with bytes missing");
                    }
                }
                SendEvent::Quiet(_) => {
                    prop_assert!(transfer.stopped && !outstanding, "quiet with chunks outstanding");
                    transfer.quiet = true;
                }
            }
        }
        Ok(())
    }

    /// Whether the sender still waits for an acknowledgement of this transfer's on this connection.
    fn owes(&self, connection: &Connection, id: TransferId) -> bool {
        let slot = self.transfers.get(&id).map(|transfer| transfer.slot.0);
        let of = |name: ChunkName| Some(name.slot) == slot;
        connection.chunks.iter().any(|sent| of(sent.chunk.header.name()))
            || connection.acks.iter().any(|(name, _)| of(*name))
            || connection
                .placing
                .as_ref()
                .is_some_and(|placing| of(placing.header.name()))
    }

    fn check(&self) -> TestCaseResult {
        for lane in &self.lanes {
            let load = self.sender.lane_load(lane.index);
            let up = lane.connection.is_some();
            prop_assert!(up || load.chunks == 0);
            prop_assert!(up || !self.sender.has_work(lane.index));
        }
        let doubts: usize = self.zombies.iter().map(|zombie| zombie.in_doubt.len()).sum();
        prop_assert!(self.sender.in_doubt() <= doubts);
        Ok(())
    }

    /// Nothing is lost any more: everything that was given and not ended must arrive.
    fn settle(&mut self) -> TestCaseResult {
        let ids: Vec<_> = self.transfers.keys().copied().collect();
        for id in ids {
            while let Some(part) = self
                .transfers
                .get_mut(&id)
                .and_then(|transfer| transfer.unsent.pop_front())
            {
                self.sender.add_part(id, part);
            }
        }
        loop {
            let mut moved = false;
            while !self.zombies.is_empty() {
                self.fence()?;
                moved = true;
            }
            for nth in 0..self.lanes.len() {
                if self.lanes[nth].connection.is_none() {
                    self.connect();
                    moved = true;
                }
                moved |= self.send_on(nth as u16)?;
                moved |= self.receive_on(nth)?;
                moved |= self.acknowledge_on(nth);
            }
            self.events()?;
            self.check()?;
            if !moved {
                break;
            }
        }
        for (id, transfer) in &self.transfers {
            let late = transfer.deadline.is_some_and(|deadline| deadline <= self.now);
            let expected = !transfer.closed && !transfer.stopped && !late;
            prop_assert!(
                transfer.arrived_here || !expected,
                "{id:?} never arrived: {:?}, {:?}, placed {:?}",
                self.sender,
                self.table.progress(transfer.slot.0, transfer.slot.1),
                transfer.placed
            );
            prop_assert_eq!(
                transfer.arrived_here,
                transfer.arrived_there && !transfer.quiet || transfer.arrived_here
            );
            prop_assert_eq!(transfer.stopped, transfer.quiet, "{:?} stopped and not quiet", id);
        }
        for lane in &self.lanes {
            let load = self.sender.lane_load(lane.index);
            prop_assert_eq!((load.bytes, load.chunks), (0, 0));
        }
        prop_assert_eq!(self.sender.in_doubt(), 0);
        prop_assert!(self.out.is_empty());
        Ok(())
    }

    fn owner(&mut self, slot: SlotId) -> Option<&mut Transfer> {
        self.transfers.values_mut().find(|transfer| transfer.slot.0 == slot)
    }

    fn key(&self, chunk: &ChunkName) -> (u64, u32, u64) {
        let owner = self
            .transfers
            .iter()
            .find(|(_, transfer)| transfer.slot == (chunk.slot, chunk.generation));
        (owner.map_or(0, |(id, _)| id.0), chunk.part, chunk.offset)
    }
}
