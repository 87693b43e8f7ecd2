//! Who goes first on a link: lanes of a fixed rate in virtual time.
#![allow(unreachable_pub, clippy::unwrap_used)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{
    ByteStream, ChunkName, ChunkState, Gate, LaneName, LinkSender, LinkSenderConfig, PartExtent, SendEvent, SendPart,
    SendSpec, TransferId,
};
use kvxfer_core::memory::Segment;
use kvxfer_core::{Generation, SlotId, Time};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

/// Bytes that are nowhere.
#[derive(Debug)]
struct Nowhere(u64);

impl ByteStream for Nowhere {
    fn length(&self) -> u64 {
        self.0
    }

    fn segments(&self, _: u64, _: u64, _: usize, _: &mut Vec<Segment>) -> u64 {
        0
    }
}

/// A link of two lanes of 2 GB/s each, with 100 µs there and back.
pub struct Link {
    pub sender: LinkSender,
    now: Time,
    lanes: Vec<VecDeque<(Time, ChunkName)>>,
    busy_until: Vec<Time>,
    pub sent: BTreeMap<TransferId, u64>,
    pub order: Vec<TransferId>,
    drained: BTreeMap<TransferId, Time>,
}

const BYTES_PER_MICROSECOND: u64 = 2_000;
const ROUND_TRIP: Duration = Duration::from_micros(100);

impl Link {
    pub fn new(config: LinkSenderConfig) -> Link {
        let mut sender = LinkSender::new(LinkSenderConfig { lanes: 2, ..config });
        for index in 0..2 {
            sender.lane_up(LaneName { index, epoch: 1 });
        }
        Link {
            sender,
            now: Time::from_nanos(1),
            lanes: vec![VecDeque::new(), VecDeque::new()],
            busy_until: vec![Time::ZERO; 2],
            sent: BTreeMap::new(),
            order: Vec::new(),
            drained: BTreeMap::new(),
        }
    }

    pub fn submit(&mut self, id: u64, bytes: u64, parts: u64, priority: u8, deadline: Option<Time>) {
        let spec = SendSpec {
            id: TransferId(id),
            slot: SlotId(id as u32),
            generation: Generation(1),
            gate: Gate::new(),
            regions: Arc::new([]),
            message: None,
            priority,
            deadline,
            checksum: false,
            remote: None,
        };
        self.sender.submit(spec).unwrap();
        for part in 0..parts {
            let part = SendPart {
                part: part as u32,
                extent: PartExtent::WHOLE,
                stream: Arc::new(Nowhere(bytes / parts)),
                remote: None,
            };
            self.sender.add_part(TransferId(id), part);
        }
    }

    /// Runs until this transfer is drained, or a number of chunks is sent. Returns how long it took.
    pub fn run(&mut self, until: Option<TransferId>, chunks_max: usize) -> Duration {
        let start = self.now;
        while self.order.len() < chunks_max && until.is_none_or(|id| !self.drained.contains_key(&id)) {
            for index in 0..2u16 {
                while let Some(chunk) = self.sender.next_chunk(index, self.now) {
                    let name = chunk.header.name();
                    *self.sent.entry(chunk.transfer).or_default() += u64::from(name.length);
                    self.order.push(chunk.transfer);
                    let lane = usize::from(index);
                    let begin = self.busy_until[lane].max(self.now);
                    let nanos = u64::from(name.length) * 1000 / BYTES_PER_MICROSECOND;
                    self.busy_until[lane] = begin + Duration::from_nanos(nanos);
                    self.lanes[lane].push_back((self.busy_until[lane] + ROUND_TRIP, name));
                }
            }
            let first = |lane: &usize| self.lanes[*lane].front().map(|(at, _)| *at);
            let Some(lane) = (0..2).filter(|lane| first(lane).is_some()).min_by_key(first) else {
                break;
            };
            let Some((at, name)) = self.lanes[lane].pop_front() else {
                break;
            };
            self.now = self.now.max(at);
            let index = lane as u16;
            self.sender
                .acknowledged(LaneName { index, epoch: 1 }, name, ChunkState::Applied, self.now);
            while let Some(event) = self.sender.poll_event() {
                if let SendEvent::Drained(id) = event {
                    self.drained.insert(id, self.now);
                }
            }
        }
        self.now.since(start)
    }
}

/// A 20 MB hand-off behind a 5 GB one takes at most three times as long as alone.
pub fn small_behind_large() -> TestCaseResult {
    let small = 20_000_000;
    let mut alone = Link::new(LinkSenderConfig::default());
    alone.submit(1, small, 80, 0, None);
    let alone = alone.run(Some(TransferId(1)), usize::MAX);

    let mut shared = Link::new(LinkSenderConfig::default());
    shared.submit(1, 5_000_000_000, 80, 0, None);
    shared.run(None, 500);
    shared.submit(2, small, 80, 0, None);
    let behind = shared.run(Some(TransferId(2)), usize::MAX);
    prop_assert!(behind <= alone * 3, "alone {alone:?}, behind the large one {behind:?}");
    prop_assert!(shared.sent[&TransferId(1)] < 5_000_000_000, "the large one was over");
    Ok(())
}

/// Transfers of one priority get equal shares, whatever the size of their parts.
pub fn equal_shares() -> TestCaseResult {
    let mut link = Link::new(LinkSenderConfig::default());
    for (id, parts) in [(1, 1), (2, 100), (3, 5_000)] {
        link.submit(id, 1 << 30, parts, 3, None);
    }
    for _ in 0..40 {
        let chunks = link.order.len() + 50;
        link.run(None, chunks);
        let sent: Vec<u64> = link.sent.values().copied().collect();
        let (least, most) = (sent.iter().min().unwrap_or(&0), sent.iter().max().unwrap_or(&0));
        prop_assert!(sent.len() == 3 && most - least <= 3 << 20, "{sent:?}");
    }
    Ok(())
}
