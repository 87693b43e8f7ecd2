//! One-sided transfers on a [`LinkSender`]: writes that the peer's slot ends, and reads that a lost lane does not leave in
//! doubt.
#![allow(unreachable_pub, clippy::unwrap_used)]

use std::sync::Arc;

use kvxfer_core::flow::{
    Chunk, ChunkState, Direction, Gate, LaneName, LinkSender, LinkSenderConfig, PartExtent, Remote, SendEvent,
    SendPart, SendSpec, TransferId,
};
use kvxfer_core::{Generation, PoolId, SlotId, Time};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::flow_common::Grid;

const NOW: Time = Time::from_nanos(1);
const LANE: LaneName = LaneName { index: 0, epoch: 1 };
const SLOT: (SlotId, Generation) = (SlotId(3), Generation(2));
const GRID: Grid = Grid {
    layers: 1,
    tokens: 4,
    cell: 256 << 10,
    state: 0,
};

fn sender() -> LinkSender {
    let mut sender = LinkSender::new(LinkSenderConfig {
        lanes: 1,
        ..LinkSenderConfig::default()
    })
    .with_chunk_bytes_max(256 << 10);
    sender.lane_up(LANE);
    sender
}

fn submit(sender: &mut LinkSender, id: u64, direction: Direction) {
    let stream = Arc::new(GRID.stream_of(PartExtent::WHOLE));
    sender
        .submit(SendSpec {
            id: TransferId(id),
            slot: SLOT.0,
            generation: SLOT.1,
            gate: Gate::new(),
            regions: Arc::new([]),
            message: None,
            priority: 0,
            deadline: None,
            checksum: false,
            remote: Some(Remote {
                direction,
                pool: PoolId(1),
                keys: Arc::new([]),
            }),
        })
        .unwrap();
    sender.add_part(
        TransferId(id),
        SendPart {
            part: 0,
            extent: PartExtent::WHOLE,
            stream: stream.clone(),
            remote: Some(stream),
        },
    );
}

fn send(sender: &mut LinkSender, chunks: usize) -> Vec<Chunk> {
    (0..chunks).map_while(|_| sender.next_chunk(0, NOW)).collect()
}

fn events(sender: &mut LinkSender) -> Vec<SendEvent> {
    std::iter::from_fn(|| sender.poll_event()).collect()
}

/// A write and a read whose chunks have the same names: each completion is its own transfer's.
pub fn completions_are_told_apart() -> TestCaseResult {
    let mut sender = sender();
    submit(&mut sender, 1, Direction::Read);
    submit(&mut sender, 2, Direction::Write);
    let chunks = send(&mut sender, 9);
    prop_assert_eq!(chunks.len(), 8);
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 4, "reads are not the peer's slot's");
    for chunk in chunks.iter().filter(|chunk| chunk.transfer == TransferId(2)) {
        sender.completed(LANE, chunk.transfer, chunk.header.name(), ChunkState::Applied, NOW);
    }
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 0);
    prop_assert!(matches!(events(&mut sender)[..], [SendEvent::Drained(TransferId(2))]));
    // The peer's slot arrives: that says nothing of this endpoint's slot with the same name.
    sender.slot_arrived(SLOT.0, SLOT.1);
    sender.slot_arrived(SLOT.0, SLOT.1);
    prop_assert!(matches!(events(&mut sender)[..], [SendEvent::Arrived(TransferId(2))]));
    for chunk in chunks.iter().filter(|chunk| chunk.transfer == TransferId(1)) {
        sender.completed(LANE, chunk.transfer, chunk.header.name(), ChunkState::Applied, NOW);
    }
    prop_assert!(matches!(events(&mut sender)[..], [SendEvent::Drained(TransferId(1))]));
    Ok(())
}

/// Chunks of a lost lane: those that were written are in doubt until the receiver has fenced it, those that were read
/// are read again at once.
pub fn a_lost_lane_leaves_no_read_in_doubt() -> TestCaseResult {
    let mut sender = sender();
    submit(&mut sender, 1, Direction::Read);
    submit(&mut sender, 2, Direction::Write);
    let chunks = send(&mut sender, 9);
    let names = sender.lane_lost(LANE);
    prop_assert_eq!(names.len(), 4, "only the writes");
    prop_assert_eq!(sender.in_doubt(), 4);
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 4);
    let second = LaneName { index: 0, epoch: 2 };
    sender.lane_up(second);
    let again = send(&mut sender, 9);
    prop_assert_eq!(again.len(), 4, "every read, and no write, is sent again");
    prop_assert!(again.iter().all(|chunk| chunk.transfer == TransferId(1)));
    prop_assert!(events(&mut sender).is_empty());
    let states: Vec<_> = names.iter().map(|name| (*name, ChunkState::Missing)).collect();
    sender.lane_fenced(LANE, &states, NOW);
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 0);
    prop_assert_eq!(send(&mut sender, 9).len(), 4);
    prop_assert_eq!(chunks.len(), 8);
    Ok(())
}

/// A slot that is revoked: nothing more is sent into it, and what is out counts until it is done, though its transfer
/// is forgotten.
pub fn a_refused_slot_counts_what_is_out() -> TestCaseResult {
    let mut sender = sender();
    submit(&mut sender, 1, Direction::Write);
    let chunks = send(&mut sender, 3);
    sender.slot_refused(SLOT.0, Generation(9));
    prop_assert!(events(&mut sender).is_empty(), "another use of the slot");
    sender.slot_refused(SLOT.0, SLOT.1);
    prop_assert!(matches!(events(&mut sender)[..], [SendEvent::Refused(TransferId(1))]));
    prop_assert!(send(&mut sender, 1).is_empty(), "a refused slot is sent to");
    sender.forget(TransferId(1));
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 3);
    sender.completed(LANE, TransferId(1), chunks[0].header.name(), ChunkState::Applied, NOW);
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 2);
    let names = sender.lane_lost(LANE);
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 2, "in doubt");
    let states: Vec<_> = names.iter().map(|name| (*name, ChunkState::Refused)).collect();
    sender.lane_fenced(LANE, &states, NOW);
    prop_assert_eq!(sender.outstanding(SLOT.0, SLOT.1), 0);
    // The number may be used again: nothing of the old transfer is left.
    submit(&mut sender, 1, Direction::Write);
    sender.slot_arrived(SLOT.0, SLOT.1);
    prop_assert!(matches!(events(&mut sender)[..], [SendEvent::Arrived(TransferId(1))]));
    Ok(())
}

pub fn all() -> TestCaseResult {
    completions_are_told_apart()?;
    a_lost_lane_leaves_no_read_in_doubt()?;
    a_refused_slot_counts_what_is_out()
}
