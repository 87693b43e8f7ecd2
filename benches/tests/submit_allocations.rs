//! Submitting allocates per block list, never per descriptor: a counting allocator watches the caller's thread.

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

const BLOCKS: u32 = 64;
const WAIT: Duration = Duration::from_secs(30);

fn layout(layers: u32) -> PoolLayout {
    let mut builder = PoolLayout::builder();
    let geometry = Geometry::attention(DType::Bf16, 16, 1, 8, Sharding::Heads { rank: 0, size: 1 });
    let group = builder.group("attention", geometry, 2 * BLOCKS);
    for layer in 0..layers {
        for kind in [PlaneKind::Key, PlaneKind::Value] {
            builder.plane(PlaneSpec::new(group, layer.to_string(), kind));
        }
    }
    builder.build().unwrap()
}

/// The least that a push of the same block list allocates on the caller's thread, over so many layers.
fn submit_bytes(layers: u32) -> u64 {
    let build = |name: &str| {
        let builder = Endpoint::builder().name(name).transports(["tcp"]);
        builder.listen("127.0.0.1:0".parse().unwrap()).build().unwrap()
    };
    let (from, to) = (build("from"), build("to"));
    let source = from.allocate(layout(layers), Role::Both).unwrap();
    let destination = to.allocate(layout(layers), Role::Both).unwrap();
    from.connect(&to.address(), WAIT).unwrap();
    // Scattered: no two blocks can be moved as one.
    let blocks: Vec<u32> = (0..BLOCKS).map(|index| index * 2).collect();
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
    least.min().unwrap()
}

#[test]
fn submitting_allocates_nothing_per_descriptor() {
    // 64 blocks in 4 and in 320 planes: 256 and 20,480 descriptors.
    let (few, many) = (submit_bytes(2), submit_bytes(160));
    assert!(few > 0, "the counter must see the caller's own allocations");
    // A descriptor takes at least 16 bytes: 20,224 more of them would be 323,584. A layer index takes 2 bytes, and lists
    // of those may be copied some times.
    let per_layer = (many.saturating_sub(few)) / 158;
    assert!(
        per_layer <= 64 && many < few + 20_224,
        "{few} bytes for 256 descriptors, {many} for 20,480: {per_layer} per layer"
    );
}
