//! Submitting allocates per block list, never per descriptor: a counting allocator watches the caller's thread.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use kvxfer::{Endpoint, GrantOptions, PushOptions, Role};
use kvxfer_core::layout::{DType, Geometry, PlaneKind, PlaneSpec, PoolLayout, Sharding};

thread_local! {
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator; the counter is a plain thread-local cell that
// itself allocates nothing (it is const-initialised and has no destructor).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size() as u64));
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        BYTES.with(|bytes| bytes.set(bytes.get() + size as u64));
        // SAFETY: the caller's contract is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WAIT: Duration = Duration::from_secs(30);

fn layout(layers: u32, blocks: u32) -> PoolLayout {
    let mut builder = PoolLayout::builder();
    // Blocks of 64 bytes: even the largest push here is small enough to be planned by the call itself.
    let geometry = Geometry::attention(DType::Bf16, 16, 1, 2, Sharding::Heads { rank: 0, size: 1 });
    let group = builder.group("attention", geometry, 2 * blocks);
    for layer in 0..layers {
        for kind in [PlaneKind::Key, PlaneKind::Value] {
            builder.plane(PlaneSpec::new(group, layer.to_string(), kind));
        }
    }
    builder.build().unwrap()
}

/// The least that a push of so many blocks in so many layers allocates on the caller's thread.
fn submit_bytes(layers: u32, blocks: u32) -> i64 {
    let build = |name: &str| {
        let builder = Endpoint::builder().name(name).transports(["tcp"]);
        builder.listen("127.0.0.1:0".parse().unwrap()).build().unwrap()
    };
    let (from, to) = (build("from"), build("to"));
    let source = from.allocate(layout(layers, blocks), Role::Both).unwrap();
    let destination = to.allocate(layout(layers, blocks), Role::Both).unwrap();
    from.connect(&to.address(), WAIT).unwrap();
    // Scattered: no two blocks can be moved as one.
    let blocks: Vec<u32> = (0..blocks).map(|index| index * 2).collect();
    let least = (0..10).map(|_| {
        let selection = kvxfer_bench::work::selection(source.layout(), &blocks);
        let grant = destination.grant(selection.clone(), GrantOptions::default()).unwrap();
        let before = BYTES.with(Cell::get);
        let transfer = from
            .push(&source, selection, grant.grant(), PushOptions::default())
            .unwrap();
        let bytes = BYTES.with(Cell::get) - before;
        transfer.done().wait(WAIT).unwrap();
        grant.arrived().wait(WAIT).unwrap();
        bytes
    });
    least.min().unwrap() as i64
}

#[test]
fn submitting_allocates_nothing_per_descriptor() {
    // Lists of blocks and lists of planes may be copied; their product, the descriptors, must not appear. What grows
    // with both at once is this difference of differences.
    let (few_layers, many_layers, few_blocks, many_blocks) = (2, 160, 64, 256);
    let small = submit_bytes(few_layers, few_blocks);
    let layers = submit_bytes(many_layers, few_blocks);
    let blocks = submit_bytes(few_layers, many_blocks);
    let both = submit_bytes(many_layers, many_blocks);
    assert!(small > 0, "the counter must see the caller's own allocations");
    let together = both - layers - blocks + small;
    let descriptors = i64::from(2 * (many_layers - few_layers) * (many_blocks - few_blocks));
    // One byte per descriptor would be 60,672; lists that grow by doubling may be off by their rounding.
    assert!(
        together.abs() < descriptors / 8,
        "{small} bytes, {layers} with more layers, {blocks} with more blocks, {both} with both: {together} more than their sum"
    );
    assert!(both < 64 << 10, "{both} bytes for 81,920 descriptors");
}
