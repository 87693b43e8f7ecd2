//! Nothing is allocated per chunk in steady state, on either side.

mod flow_common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use flow_common::{Grid, open};
use kvxfer_core::flow::{
    Gate, LaneName, LinkSender, LinkSenderConfig, PartExtent, Placement, SendPart, SendSpec, SlotTable, TransferId,
};
use kvxfer_core::wire::lane::LaneHeader;
use kvxfer_core::{Incarnation, Time};

struct Counting;

std::thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator; counting touches only a constant-initialised cell.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_chunk_allocates_nothing() {
    let grid = Grid {
        layers: 1,
        tokens: 1 << 20,
        cell: 1 << 14,
        state: 0,
    };
    let table = SlotTable::new(16);
    let mut sender = LinkSender::new(LinkSenderConfig::default());
    let lanes = [0, 1].map(|index| LaneName { index, epoch: 1 });
    lanes.into_iter().for_each(|lane| sender.lane_up(lane));
    for id in 0..3 {
        let (slot, generation) = open(&table, grid, None, None);
        let spec = SendSpec {
            id: TransferId(id),
            slot,
            generation,
            gate: Gate::new(),
            regions: Arc::new([]),
            message: None,
            priority: 0,
            deadline: None,
            checksum: false,
            remote: None,
        };
        sender.submit(spec).unwrap();
        let part = SendPart {
            part: 0,
            extent: PartExtent::WHOLE,
            stream: Arc::new(grid.stream_of(PartExtent::WHOLE)),
            remote: None,
        };
        sender.add_part(TransferId(id), part);
    }
    let peer = Incarnation::from_bits(1);
    let mut in_flight = Vec::with_capacity(1024);
    let mut now = Time::ZERO;
    let mut pass = |chunks: u32| {
        let before = ALLOCATIONS.with(Cell::get);
        for _ in 0..chunks {
            now = Time::from_nanos(now.as_nanos() + 50_000);
            for lane in lanes {
                while let Some(chunk) = sender.next_chunk(lane.index, now) {
                    in_flight.push((lane, LaneHeader::Chunk(chunk.header).encode()));
                }
            }
            let (lane, bytes) = in_flight.remove(0);
            let Ok(LaneHeader::Chunk(header)) = LaneHeader::decode(&bytes) else {
                panic!("no chunk");
            };
            let Ok(Placement::Place { gate, .. }) = table.begin(peer, &header) else {
                panic!("{header:?} is not let in");
            };
            assert!(gate.enter().is_some_and(|guard| !guard.leave()));
            let state = table.placed(&header, true);
            sender.acknowledged(lane, header.name(), state, now);
            assert!(sender.poll_event().is_none());
        }
        ALLOCATIONS.with(Cell::get) - before
    };
    assert!(pass(500) > 0, "the first ones do, or this counts nothing");
    assert_eq!(pass(2000), 0);
}
