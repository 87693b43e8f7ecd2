//! A model of the slot table: what each operation must answer, kept as plain sets of bytes.
#![allow(unreachable_pub, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer_core::flow::{
    Applied, ByteStream, ChunkHeader, ChunkState, Close, Gate, MESSAGE_PART, OwnedGateGuard, PartExtent, Placement,
    SlotTable, SlotWatcher,
};
use kvxfer_core::{ErrorKind, Generation, Incarnation, SlotId};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::flow_common::{Grid, open};

const GRID: Grid = Grid {
    layers: 3,
    tokens: 8,
    cell: 4,
    state: 4,
};
/// Chunks begin at multiples of this.
const CHUNK: u64 = 16;
const MESSAGE: &[u8] = b"eight by";

#[derive(Debug, Clone)]
pub enum Op {
    Open {
        restricted: bool,
        message: bool,
    },
    Begin {
        slot: usize,
        part: u32,
        chunk: u64,
        peer: u8,
    },
    /// A header that is wrong in itself or against what came before.
    BeginWrong {
        slot: usize,
        part: u32,
        wrong: u8,
    },
    BeginStale {
        slot: usize,
    },
    BeginMessage {
        slot: usize,
        second_half: bool,
    },
    Finish {
        placing: usize,
        valid: bool,
    },
    /// Everything that is missing but one chunk.
    Fill {
        slot: usize,
        but: u64,
    },
    Close {
        slot: usize,
    },
    Release {
        slot: usize,
    },
    /// The peer's device may write by itself.
    Admit {
        slot: usize,
        peer: u8,
    },
    /// It writes no more.
    Quiet {
        slot: usize,
    },
    Ask {
        slot: usize,
        part: u32,
        chunk: u64,
    },
}

pub fn ops() -> impl Strategy<Value = Vec<Op>> {
    let slot = 0..3usize;
    let op = prop_oneof![
        2 => (any::<bool>(), any::<bool>()).prop_map(|(restricted, message)| Op::Open { restricted, message }),
        14 => (slot.clone(), 0..4u32, 0..4u64, 0..8u8)
            .prop_map(|(slot, part, chunk, peer)| Op::Begin { slot, part, chunk, peer }),
        2 => (slot.clone(), 0..4u32, 0..6u8).prop_map(|(slot, part, wrong)| Op::BeginWrong { slot, part, wrong }),
        1 => slot.clone().prop_map(|slot| Op::BeginStale { slot }),
        3 => (slot.clone(), any::<bool>()).prop_map(|(slot, second_half)| Op::BeginMessage { slot, second_half }),
        14 => (0..8usize, prop::bool::weighted(0.85)).prop_map(|(placing, valid)| Op::Finish { placing, valid }),
        2 => (slot.clone(), 0..12u64).prop_map(|(slot, but)| Op::Fill { slot, but }),
        1 => slot.clone().prop_map(|slot| Op::Close { slot }),
        2 => slot.clone().prop_map(|slot| Op::Release { slot }),
        2 => (slot.clone(), 0..8u8).prop_map(|(slot, peer)| Op::Admit { slot, peer }),
        1 => slot.clone().prop_map(|slot| Op::Quiet { slot }),
        2 => (slot, 0..4u32, 0..4u64).prop_map(|(slot, part, chunk)| Op::Ask { slot, part, chunk }),
    ];
    prop::collection::vec(op, 1..160)
}

/// A slot as it must be.
struct Model {
    name: (SlotId, Generation),
    writer: Option<Incarnation>,
    message: bool,
    phase: Phase,
    // Part number and byte of its stream.
    applied: BTreeSet<(u32, u64)>,
    known_parts: BTreeSet<u32>,
    message_seen: bool,
    message_halves: [bool; 2],
    watcher: Arc<Count>,
    gate: Option<Arc<Gate>>,
    admitted: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Open,
    Arrived,
    Closed,
}

/// A chunk whose bytes a lane is placing, inside the gate.
struct Placing {
    slot: (SlotId, Generation),
    header: ChunkHeader,
    guard: OwnedGateGuard,
}

#[derive(Default)]
struct Count(AtomicU32);

impl SlotWatcher for Count {
    fn arrived(&self, _message: Option<Arc<[u8]>>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn parts() -> Vec<PartExtent> {
    GRID.quarters(5, 2)
}

fn peer(n: u8) -> Incarnation {
    Incarnation::from_bits(1 + u128::from(n))
}

impl Model {
    fn header(&self, part: u32, offset: u64, length: u32) -> ChunkHeader {
        ChunkHeader {
            slot: self.name.0,
            generation: self.name.1,
            part,
            extent: parts()[part as usize],
            offset,
            length,
            has_message: self.message,
            checksummed: false,
        }
    }

    fn chunk(&self, part: u32, chunk: u64) -> Option<ChunkHeader> {
        let length = GRID.stream_of(parts()[part as usize]).length();
        let offset = chunk * CHUNK;
        (offset < length).then(|| self.header(part, offset, (length - offset).min(CHUNK) as u32))
    }

    fn bytes(header: &ChunkHeader) -> impl Iterator<Item = (u32, u64)> {
        let part = header.part;
        (header.offset..header.offset + u64::from(header.length)).map(move |byte| (part, byte))
    }

    fn is_whole(&self) -> bool {
        self.applied.len() as u64 == GRID.total() && (!self.message_seen || self.message_halves == [true, true])
    }
}

pub fn run(ops: &[Op]) -> TestCaseResult {
    let table = SlotTable::new(3);
    let mut slots: Vec<Model> = Vec::new();
    let mut placing: Vec<Placing> = Vec::new();
    let mut generations: BTreeMap<SlotId, Generation> = BTreeMap::new();
    for op in ops {
        step(&table, &mut slots, &mut placing, &mut generations, op)?;
        check(&table, &slots, &placing)?;
    }
    // Everybody leaves: whatever was closed is fenced then.
    while !placing.is_empty() {
        finish(&table, &mut slots, &mut placing, 0, false)?;
    }
    for slot in &mut slots {
        if slot.phase == Phase::Closed && slot.admitted {
            prop_assert!(
                !table.fenced(slot.name.0, slot.name.1),
                "fenced with a writer that is admitted"
            );
        }
        quiet(&table, slot, false)?;
        let fenced = table.fenced(slot.name.0, slot.name.1);
        prop_assert_eq!(fenced, slot.phase != Phase::Open);
    }
    Ok(())
}

fn step(
    table: &SlotTable,
    slots: &mut Vec<Model>,
    placing: &mut Vec<Placing>,
    generations: &mut BTreeMap<SlotId, Generation>,
    op: &Op,
) -> TestCaseResult {
    match *op {
        Op::Open { restricted, message } => {
            if slots.len() == 3 {
                let full = table.open_target(Box::new(GRID), Arc::new([]), None, kvxfer_core::PoolId(1), None);
                prop_assert_eq!(full.unwrap_err().kind(), ErrorKind::Busy);
                return Ok(());
            }
            let watcher = Arc::new(Count::default());
            let writer = restricted.then(|| peer(0));
            let name = open(table, GRID, writer, Some(watcher.clone()));
            let before = generations.insert(name.0, name.1);
            prop_assert!(
                before.is_none_or(|before| before < name.1),
                "a generation was used twice"
            );
            slots.push(Model {
                name,
                writer,
                message,
                phase: Phase::Open,
                applied: BTreeSet::new(),
                known_parts: BTreeSet::new(),
                message_seen: false,
                message_halves: [false; 2],
                watcher,
                gate: None,
                admitted: false,
            });
        }
        Op::Begin {
            slot,
            part,
            chunk,
            peer: from,
        } => {
            let Some(slot) = slots.get_mut(slot) else { return Ok(()) };
            // Mostly the right peer.
            let from = peer(if from == 7 { 1 } else { 0 });
            if let Some(header) = slot.chunk(part, chunk) {
                begin(table, slot, placing, from, header)?;
            }
        }
        Op::BeginWrong { slot, part, wrong } => {
            let Some(slot) = slots.get_mut(slot) else { return Ok(()) };
            let Some(header) = slot.chunk(part, 0) else {
                return Ok(());
            };
            begin_wrong(table, slot, header, wrong)?;
        }
        Op::BeginStale { slot } => {
            let Some(slot) = slots.get(slot) else { return Ok(()) };
            for generation in [slot.name.1.0.wrapping_sub(1), slot.name.1.0 + 1] {
                let mut header = slot.header(0, 0, 16);
                header.generation = Generation(generation);
                let placement = table.begin(peer(0), &header).unwrap();
                prop_assert!(
                    matches!(placement, Placement::Scrap(ChunkState::Refused)),
                    "a stale chunk got in"
                );
                prop_assert_eq!(table.applied(&header), Applied::Refused);
            }
        }
        Op::BeginMessage { slot, second_half } => {
            let Some(slot) = slots.get_mut(slot) else { return Ok(()) };
            message(table, slot, second_half)?;
        }
        Op::Finish { placing: index, valid } => {
            if !placing.is_empty() {
                let index = index % placing.len();
                finish(table, slots, placing, index, valid)?;
            }
        }
        Op::Fill { slot, but } => {
            let chunks = (0..4).flat_map(|part| (0..4).map(move |chunk| (part, chunk)));
            for (nth, (part, chunk)) in chunks.enumerate() {
                let Some(model) = slots.get_mut(slot) else {
                    return Ok(());
                };
                let header = model.chunk(part, chunk).filter(|_| nth as u64 != but);
                let begun = placing.len();
                if let Some(header) = header {
                    begin(table, model, placing, peer(0), header)?;
                }
                if placing.len() > begun {
                    finish(table, slots, placing, begun, true)?;
                }
            }
        }
        Op::Close { slot } => {
            let Some(slot) = slots.get_mut(slot) else { return Ok(()) };
            let inside = slot.admitted || placing.iter().any(|placing| placing.slot == slot.name);
            let expected = match slot.phase {
                Phase::Arrived => Close::AlreadyArrived,
                _ if inside => Close::Waiting,
                _ => Close::Fenced,
            };
            prop_assert_eq!(table.close(slot.name.0, slot.name.1), expected);
            if slot.phase == Phase::Open {
                slot.phase = Phase::Closed;
            }
            prop_assert!(
                slot.gate.as_ref().is_none_or(|gate| gate.enter().is_none()),
                "closed, and entered"
            );
        }
        Op::Release { slot } => {
            let Some(model) = slots.get(slot) else { return Ok(()) };
            let inside = model.admitted || placing.iter().any(|placing| placing.slot == model.name);
            let may = model.phase != Phase::Open && !inside;
            prop_assert_eq!(table.release(model.name.0, model.name.1), may);
            if may {
                let gone = slots.remove(slot);
                prop_assert_eq!(table.close(gone.name.0, gone.name.1), Close::Gone);
                prop_assert!(table.fenced(gone.name.0, gone.name.1));
            }
        }
        Op::Admit { slot, peer: from } => {
            let Some(slot) = slots.get_mut(slot) else { return Ok(()) };
            let from = peer(if from == 7 { 1 } else { 0 });
            let may = slot.phase == Phase::Open && slot.writer.is_none_or(|writer| writer == from);
            prop_assert_eq!(table.admit(from, slot.name.0, slot.name.1), may);
            prop_assert!(
                !table.admit(from, slot.name.0, Generation(slot.name.1.0 + 1)),
                "a use of the slot that is to come was admitted"
            );
            if may {
                slot.writer = Some(from);
                slot.admitted = true;
            }
        }
        Op::Quiet { slot } => {
            let Some(slot) = slots.get_mut(slot) else { return Ok(()) };
            let inside = placing.iter().any(|placing| placing.slot == slot.name);
            quiet(table, slot, inside)?;
        }
        Op::Ask { slot, part, chunk } => {
            let Some(slot) = slots.get(slot) else { return Ok(()) };
            let Some(header) = slot.chunk(part, chunk) else {
                return Ok(());
            };
            let expected = match slot.phase {
                Phase::Arrived => ChunkState::Arrived,
                Phase::Closed => ChunkState::Refused,
                Phase::Open if Model::bytes(&header).all(|byte| slot.applied.contains(&byte)) => ChunkState::Applied,
                Phase::Open => ChunkState::Missing,
            };
            prop_assert_eq!(
                table.chunk_states(slot.writer.unwrap_or(peer(0)), &[header.name()]),
                [expected]
            );
        }
    }
    Ok(())
}

fn quiet(table: &SlotTable, slot: &mut Model, inside: bool) -> TestCaseResult {
    let (id, generation) = slot.name;
    prop_assert_eq!(table.remote_quiet(id, generation), slot.phase != Phase::Open && !inside);
    slot.admitted = false;
    Ok(())
}

fn begin(
    table: &SlotTable,
    slot: &mut Model,
    placing: &mut Vec<Placing>,
    from: Incarnation,
    header: ChunkHeader,
) -> TestCaseResult {
    let same = |placing: &Placing| placing.slot == slot.name && placing.header == header;
    let expected = match slot.phase {
        _ if slot.writer.is_some_and(|writer| writer != from) => Some(ChunkState::Refused),
        Phase::Arrived => Some(ChunkState::Arrived),
        Phase::Closed => Some(ChunkState::Refused),
        Phase::Open if Model::bytes(&header).all(|byte| slot.applied.contains(&byte)) => Some(ChunkState::Applied),
        Phase::Open if placing.iter().any(same) => Some(ChunkState::Missing),
        Phase::Open => None,
    };
    match (table.begin(from, &header).unwrap(), expected) {
        (Placement::Scrap(state), Some(expected)) => prop_assert_eq!(state, expected),
        (Placement::Place { stream, gate, .. }, None) => {
            prop_assert_eq!(stream.length(), GRID.stream_of(header.extent).length());
            let guard = gate.enter_owned();
            prop_assert!(guard.is_some(), "an open slot's gate is closed");
            slot.gate = Some(gate);
            if let Some(guard) = guard {
                placing.push(Placing {
                    slot: slot.name,
                    header,
                    guard,
                });
            }
        }
        (got, expected) => prop_assert!(false, "{header:?}: got {got:?}, expected {expected:?}"),
    }
    if slot.phase == Phase::Open && expected != Some(ChunkState::Refused) {
        slot.writer = Some(from);
        slot.known_parts.insert(header.part);
        slot.message_seen |= header.has_message;
    }
    Ok(())
}

/// Each of these breaks the protocol, and must leave no trace.
fn begin_wrong(table: &SlotTable, slot: &Model, good: ChunkHeader, wrong: u8) -> TestCaseResult {
    if slot.phase != Phase::Open || slot.writer.is_some_and(|writer| writer != peer(0)) {
        return Ok(());
    }
    let known = slot.known_parts.contains(&good.part);
    let mut bad = good;
    match wrong {
        0 => bad.offset = GRID.stream_of(good.extent).length(),
        1 => bad.length = u32::MAX,
        2 => bad.offset = u64::MAX - 3,
        // The whole overlaps any part; as a known part's extent it contradicts.
        3 if known || !slot.known_parts.is_empty() => bad.extent = PartExtent::WHOLE,
        4 if known => {
            // The same tokens under another number.
            bad.part = 77;
        }
        5 => {
            bad.part = 78;
            bad.extent.token_start = GRID.tokens + 1;
            bad.extent.token_end = GRID.tokens + 2;
            bad.extent.states = false;
        }
        _ => return Ok(()),
    }
    match table.begin(peer(0), &bad) {
        Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Protocol),
        Ok(placement) => prop_assert!(false, "{bad:?} was let in: {placement:?}"),
    }
    Ok(())
}

fn message(table: &SlotTable, slot: &mut Model, second_half: bool) -> TestCaseResult {
    let half = usize::from(second_half);
    let range = half * 4..half * 4 + 4;
    let header = ChunkHeader {
        part: MESSAGE_PART,
        extent: PartExtent {
            token_start: 0,
            token_end: MESSAGE.len() as u32,
            layer_start: 0,
            layer_end: 0,
            states: false,
        },
        offset: range.start as u64,
        length: 4,
        has_message: true,
        ..slot.header(0, 0, 0)
    };
    if !slot.message {
        return Ok(());
    }
    let expected = match slot.phase {
        _ if slot.writer.is_some_and(|writer| writer != peer(0)) => Some(ChunkState::Refused),
        Phase::Arrived => Some(ChunkState::Arrived),
        Phase::Closed => Some(ChunkState::Refused),
        Phase::Open if slot.message_halves[half] => Some(ChunkState::Applied),
        Phase::Open => None,
    };
    match (table.begin(peer(0), &header).unwrap(), expected) {
        (Placement::Scrap(state), Some(expected)) => prop_assert_eq!(state, expected),
        (Placement::Message, None) => {
            slot.writer = Some(peer(0));
            slot.message_seen = true;
            slot.message_halves[half] = true;
            let applied = table.message_applied(&header, &MESSAGE[range]);
            arrived_if_whole(slot, applied)?;
        }
        (got, expected) => prop_assert!(false, "message: got {got:?}, expected {expected:?}"),
    }
    Ok(())
}

fn finish(
    table: &SlotTable,
    slots: &mut [Model],
    placing: &mut Vec<Placing>,
    index: usize,
    valid: bool,
) -> TestCaseResult {
    let done = placing.remove(index);
    let closed = slots
        .iter()
        .any(|slot| slot.name == done.slot && slot.phase == Phase::Closed);
    let admitted = slots.iter().any(|slot| slot.name == done.slot && slot.admitted);
    let others = placing.iter().any(|placing| placing.slot == done.slot);
    prop_assert_eq!(
        done.guard.leave(),
        closed && !others && !admitted,
        "the last to leave a closed gate is told"
    );
    let state = table.placed(&done.header, valid);
    let Some(slot) = slots.iter_mut().find(|slot| slot.name == done.slot) else {
        prop_assert!(false, "a slot was released with somebody inside");
        return Ok(());
    };
    if !valid {
        prop_assert_eq!(state, ChunkState::Missing);
        return Ok(());
    }
    match slot.phase {
        Phase::Open => {
            slot.applied.extend(Model::bytes(&done.header));
            let applied = match state {
                ChunkState::Applied => Applied::Counted,
                ChunkState::Arrived => Applied::Arrived,
                _ => Applied::Refused,
            };
            arrived_if_whole(slot, applied)
        }
        phase => {
            prop_assert_eq!(
                phase,
                Phase::Closed,
                "a chunk was still being placed when its slot had arrived"
            );
            prop_assert_eq!(state, ChunkState::Refused);
            Ok(())
        }
    }
}

fn arrived_if_whole(slot: &mut Model, applied: Applied) -> TestCaseResult {
    let expected = if slot.is_whole() {
        Applied::Arrived
    } else {
        Applied::Counted
    };
    prop_assert_eq!(applied, expected);
    if expected == Applied::Arrived {
        slot.phase = Phase::Arrived;
        slot.admitted = false;
    }
    Ok(())
}

fn check(table: &SlotTable, slots: &[Model], placing: &[Placing]) -> TestCaseResult {
    prop_assert_eq!(table.in_use(), slots.len());
    for slot in slots {
        let progress = table.progress(slot.name.0, slot.name.1).unwrap();
        prop_assert_eq!(progress.applied_bytes, slot.applied.len() as u64);
        prop_assert_eq!(progress.arrived, slot.phase == Phase::Arrived);
        let told = slot.watcher.0.load(Ordering::Relaxed);
        prop_assert_eq!(told, u32::from(slot.phase == Phase::Arrived));
        if slot.phase == Phase::Arrived && slot.message_seen {
            prop_assert_eq!(progress.message.as_deref(), Some(MESSAGE));
        }
        prop_assert_eq!(progress.admitted, slot.admitted);
        let inside = slot.admitted || placing.iter().any(|placing| placing.slot == slot.name);
        let fenced = slot.phase != Phase::Open && !inside;
        prop_assert_eq!(table.fenced(slot.name.0, slot.name.1), fenced);
    }
    Ok(())
}
