//! Making a stream allocates a few words per plane, whatever the number of blocks; expanding it allocates nothing.
#![allow(clippy::unwrap_used)] // Helpers outside test functions unwrap too.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use kvxfer_core::flow::PartExtent;
use kvxfer_core::layout::{Arrangement, Model, PoolLayout, Selection};
use kvxfer_core::plan::{Plan, RunLimits, Target, source_stream};

struct Counting;

thread_local! {
    static COUNT: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

fn count(bytes: usize) {
    // A thread that is ending has no counter any more, and nothing is measured there.
    let _ = COUNT.try_with(|count| {
        let (calls, total) = count.get();
        count.set((calls + 1, total + bytes as u64));
    });
}

// SAFETY: every call goes to the system allocator unchanged; counting touches only a thread-local cell.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocation calls and bytes of `run` on this thread.
fn allocations<T>(run: impl FnOnce() -> T) -> (T, u64, u64) {
    let before = COUNT.get();
    let result = run();
    let after = COUNT.get();
    (result, after.0 - before.0, after.1 - before.1)
}

fn side(blocks: u32, arrangement: Arrangement) -> (Arc<PoolLayout>, Arc<Target>) {
    let model = Model::preset("llama-3.1-70b").unwrap();
    let layout = model.layout(0, 4, 16, 4 * blocks, arrangement).unwrap();
    let list = (0..blocks).map(|block| block * 3).collect();
    (
        Arc::new(layout),
        Arc::new(Selection::single(0, blocks * 16, list).into()),
    )
}

#[test]
fn streams_cost_per_plane_and_expansion_costs_nothing() {
    let mut costs = Vec::new();
    for blocks in [16, 128, 4096] {
        let source = side(blocks, Arrangement::PER_LAYER_NHD);
        let destination = side(blocks, Arrangement::PER_LAYER_NHD);
        let (stream, calls, bytes) = allocations(|| {
            source_stream(&source.0, &source.1, &destination.0, &destination.1, PartExtent::WHOLE).unwrap()
        });
        costs.push((calls, bytes));
        let mut out = Vec::with_capacity(512);
        let (segments, calls, _) = allocations(|| {
            let (mut offset, mut segments) = (0, 0);
            while offset < stream.length() {
                out.clear();
                offset += stream.segments(offset, 1 << 20, 512, &mut out);
                segments += out.len() as u64;
            }
            segments
        });
        assert_eq!(segments, 160 * u64::from(blocks));
        assert_eq!(calls, 0, "expanding {blocks} blocks allocated");
    }
    assert!(
        costs.iter().all(|&cost| cost == costs[0]),
        "cost grows with blocks: {costs:?}"
    );
    assert!(costs[0].0 <= 24 && costs[0].1 <= 16 * 1024, "{costs:?}");
}

#[test]
fn runs_allocate_only_their_window() {
    let source = side(128, Arrangement::PER_LAYER_NHD);
    let destination = side(128, Arrangement::FUSED_NHD);
    let plan = Plan::new(&source.0, &source.1, &destination.0, &destination.1, PartExtent::WHOLE).unwrap();
    let (runs, calls, _) = allocations(|| plan.runs(RunLimits::default()).count());
    assert!(runs >= 160);
    assert!(calls <= 2, "{calls} allocations for {runs} runs");
}
