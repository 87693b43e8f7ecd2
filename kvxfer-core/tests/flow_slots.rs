//! The slot table against its model.

mod flow_common;
#[path = "flow_models/slots.rs"]
mod slots;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use flow_common::{Grid, open};
use kvxfer_core::flow::{
    Applied, ByteStream, ChunkHeader, ChunkState, Close, PartExtent, Placement, SlotSpec, SlotTable,
};
use kvxfer_core::layout::{Arrangement, Model, Selection};
use kvxfer_core::plan::{Scope, Target};
use kvxfer_core::{ErrorKind, Generation, Incarnation, PoolId, SlotId};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn the_table_agrees_with_its_model(ops in slots::ops()) {
        slots::run(&ops)?;
    }
}

const GRID: Grid = Grid {
    layers: 2,
    tokens: 4,
    cell: 8,
    state: 0,
};

fn whole(name: (SlotId, Generation), offset: u64, length: u32) -> ChunkHeader {
    ChunkHeader {
        slot: name.0,
        generation: name.1,
        part: 0,
        extent: PartExtent::WHOLE,
        offset,
        length,
        has_message: false,
        checksummed: false,
    }
}

#[test]
fn a_grant_is_used_by_one_peer_only() {
    let table = SlotTable::new(1);
    let name = open(&table, GRID, None, None);
    let (first, second) = (Incarnation::from_bits(1), Incarnation::from_bits(2));
    let header = whole(name, 0, 8);
    assert!(matches!(table.begin(first, &header), Ok(Placement::Place { .. })));
    let other = whole(name, 8, 8);
    assert!(matches!(
        table.begin(second, &other),
        Ok(Placement::Scrap(ChunkState::Refused))
    ));
    assert!(matches!(table.begin(first, &other), Ok(Placement::Place { .. })));
}

#[test]
fn a_chunk_that_nobody_begun_does_not_count() {
    let table = SlotTable::new(1);
    let name = open(&table, GRID, None, None);
    assert_eq!(table.applied(&whole(name, 0, 8)), Applied::Refused);
    let peer = Incarnation::from_bits(1);
    let header = whole(name, 0, 64);
    assert!(matches!(table.begin(peer, &header), Ok(Placement::Place { .. })));
    table.abandon(&header);
    assert_eq!(table.applied(&header), Applied::Refused);
    assert!(matches!(table.begin(peer, &header), Ok(Placement::Place { .. })));
    assert_eq!(table.applied(&header), Applied::Arrived);
}

#[test]
fn an_admitted_slot_is_not_fenced_until_its_writer_is_quiet() {
    let table = SlotTable::new(2);
    let (first, second) = (Incarnation::from_bits(1), Incarnation::from_bits(2));
    let name = open(&table, GRID, None, None);
    assert!(table.admit(first, name.0, name.1));
    assert!(table.admit(first, name.0, name.1), "twice is harmless");
    assert!(!table.admit(second, name.0, name.1), "it is bound");
    assert_eq!(table.close(name.0, name.1), Close::Waiting);
    assert!(!table.fenced(name.0, name.1) && !table.release(name.0, name.1));
    assert!(!table.admit(first, name.0, name.1), "it is closed");
    assert!(table.remote_quiet(name.0, name.1));
    assert!(table.fenced(name.0, name.1) && table.release(name.0, name.1));
    assert!(!table.remote_quiet(name.0, name.1), "it is gone");
    // Arrival lets go by itself.
    let name = open(&table, GRID, Some(first), None);
    assert!(!table.admit(second, name.0, name.1));
    assert!(table.admit(first, name.0, name.1));
    let header = whole(name, 0, 64);
    assert!(matches!(table.begin(first, &header), Ok(Placement::Place { .. })));
    assert_eq!(table.applied(&header), Applied::Arrived);
    assert!(table.fenced(name.0, name.1) && table.release(name.0, name.1));
}

#[test]
fn an_empty_grant_arrives_with_its_empty_part() {
    let table = SlotTable::new(1);
    let nothing = Grid { tokens: 0, ..GRID };
    assert_eq!(nothing.stream_of(PartExtent::WHOLE).length(), 0);
    let name = open(&table, nothing, None, None);
    let header = whole(name, 0, 0);
    assert!(matches!(
        table.begin(Incarnation::from_bits(1), &header),
        Ok(Placement::Place { .. })
    ));
    assert_eq!(table.applied(&header), Applied::Arrived);
}

#[test]
fn an_arrival_and_a_close_exclude_each_other() {
    for round in 0..200 {
        let table = SlotTable::new(4);
        let name = open(&table, GRID, None, None);
        let header = whole(name, 0, 64);
        let peer = Incarnation::from_bits(1);
        assert!(matches!(table.begin(peer, &header), Ok(Placement::Place { .. })));
        let arrived = AtomicU32::new(0);
        let closed = std::thread::scope(|scope| {
            let closer = scope.spawn(|| table.close(name.0, name.1));
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            if table.applied(&header) == Applied::Arrived {
                arrived.store(1, Ordering::Relaxed);
            }
            closer.join().unwrap()
        });
        let expected = if arrived.into_inner() == 1 {
            Close::AlreadyArrived
        } else {
            Close::Fenced
        };
        assert_eq!(closed, expected);
    }
}

#[test]
fn slots_grow_and_come_back() {
    let table = SlotTable::new(1000);
    let names: Vec<_> = (0..1000).map(|_| open(&table, GRID, None, None)).collect();
    assert_eq!(table.in_use(), 1000);
    assert!(
        table
            .open_target(Box::new(GRID), Arc::new([]), None, kvxfer_core::PoolId(0), None)
            .is_err()
    );
    for name in &names {
        assert!(!table.release(name.0, name.1), "an open slot is not given back");
        assert_eq!(table.close(name.0, name.1), Close::Fenced);
        assert!(table.release(name.0, name.1));
        assert!(!table.release(name.0, name.1));
    }
    assert_eq!(table.in_use(), 0);
    let again = open(&table, GRID, None, None);
    assert!(again.0.0 < 1000 && again.1 > Generation(1));
}

#[test]
fn pieces_of_a_part_are_bounded() {
    let table = SlotTable::new(1);
    let grid = Grid {
        tokens: 1 << 20,
        ..GRID
    };
    let name = open(&table, grid, None, None);
    let peer = Incarnation::from_bits(1);
    let refused = (0..100_000u64).find(|n| {
        let header = whole(name, n * 2, 1);
        match table.begin(peer, &header) {
            Ok(_) => {
                assert_eq!(table.applied(&header), Applied::Counted);
                false
            }
            Err(_) => true,
        }
    });
    assert!(refused.is_some_and(|count| count < 10_000));
}

/// A pool's own targets: every layer that its scope means counts, and layers are parts' to share.
#[test]
fn parts_of_a_real_pool_may_not_overlap() {
    let model = Model::preset("llama-3.1-8b").unwrap();
    let layout = Arc::new(model.layout(0, 4, 16, 8, Arrangement::PER_LAYER_NHD).unwrap());
    let selection = Selection::single(0, 40, vec![5, 1, 2]);
    for layers in [vec![], vec![3, 4, 9]] {
        let scope = Scope { layers, heads: None };
        let last_layer = u16::try_from(scope.layer_count(&layout)).unwrap();
        let target = Target::Selection {
            selection: selection.clone(),
            scope,
        };
        let table = SlotTable::new(1);
        let spec = SlotSpec {
            layout: layout.clone(),
            regions: Arc::new([]),
            target: Arc::new(target),
            writer: None,
            pool: PoolId(3),
            watcher: None,
        };
        let name = table.open(spec).unwrap();
        let part = |part, layers: (u16, u16), tokens: (u32, u32)| ChunkHeader {
            part,
            extent: PartExtent {
                token_start: tokens.0,
                token_end: tokens.1,
                layer_start: layers.0,
                layer_end: layers.1,
                states: false,
            },
            ..whole(name, 0, 512)
        };
        let peer = Incarnation::from_bits(1);
        let begin = |header| table.begin(peer, &header);
        assert!(matches!(begin(part(0, (0, 2), (0, 16))), Ok(Placement::Place { .. })));
        assert!(matches!(
            begin(part(1, (2, last_layer), (0, 16))),
            Ok(Placement::Place { .. })
        ));
        let error = begin(part(2, (last_layer - 1, last_layer), (15, 20))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(
            error.to_string().contains("pool 3") && error.to_string().contains("overlaps"),
            "{error}"
        );
        assert!(matches!(
            begin(part(3, (0, last_layer), (16, 40))),
            Ok(Placement::Place { .. })
        ));
        assert!(
            begin(ChunkHeader {
                part: 4,
                ..whole(name, 0, 16)
            })
            .is_err(),
            "the whole overlaps"
        );
    }
}
