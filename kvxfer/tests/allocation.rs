//! Submitting costs per block list, not per descriptor: counted by an allocator.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvxfer::layout::{Arrangement, Model};
use kvxfer::{ClaimOptions, GrantOptions, OfferOptions, PoolLayout, PushOptions, Role, Selection};
use kvxfer_cases::common::*;

thread_local! {
    static COUNTED: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator; counting touches only a thread-local cell, which
// neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

fn count(size: usize) {
    let _ = COUNTED.try_with(|counted| {
        if let Some((count, bytes)) = counted.get() {
            counted.set(Some((count + 1, bytes + size as u64)));
        }
    });
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations and bytes of a call, on this thread.
fn counted<R>(call: impl FnOnce() -> R) -> (R, u64, u64) {
    COUNTED.set(Some((0, 0)));
    let result = call();
    let (count, bytes) = COUNTED.take().unwrap();
    (result, count, bytes)
}

/// The shape of Llama-3.1-70B at tensor-parallel 4, with few blocks: 160 planes of 8 KiB blocks.
fn llama() -> PoolLayout {
    let model = Model::preset("llama-3.1-70b").unwrap();
    let layout = model.layout(0, 4, 16, 160, Arrangement::PER_LAYER_NHD).unwrap();
    assert_eq!(layout.planes().len(), 160);
    assert_eq!(layout.planes()[0].block_length, 8192);
    layout
}

fn scattered(blocks: u32) -> Selection {
    Selection::single(0, blocks * 16, (0..blocks).map(|n| n * 37 % 160).collect())
}

#[test]
fn nothing_is_allocated_per_descriptor() {
    let sender = Side::with("sender", config(), llama(), Role::Serve);
    let receiver = Side::with("receiver", config(), llama(), Role::Receive);
    sender.endpoint.connect(&receiver.endpoint.address(), LONG).unwrap();
    let push = |blocks: u32| {
        let granted = receiver.pool.grant(scattered(blocks), GrantOptions::default()).unwrap();
        let source = scattered(blocks);
        let (transfer, count, bytes) = counted(|| {
            sender
                .endpoint
                .push(&sender.pool, source, granted.grant(), PushOptions::default())
                .unwrap()
        });
        transfer.done().wait(LONG).unwrap();
        granted.arrived().wait(LONG).unwrap();
        (count, bytes)
    };
    // Tables grow to their working size first.
    for _ in 0..4 {
        push(128);
    }
    let least = |blocks: u32| (0..5).map(|_| push(blocks)).min().unwrap();
    let (small, small_bytes) = least(8);
    let (large, large_bytes) = least(128);
    println!("push of 8 blocks: {small} allocations, {small_bytes} bytes; of 128: {large}, {large_bytes}");
    // 128 blocks in 160 planes are 20,480 descriptors; 16 bytes each would be 320 KiB.
    assert!(large <= small + 8, "{large} allocations against {small}");
    assert!(large <= 64, "{large} allocations");
    assert!(
        large_bytes <= small_bytes + 120 * 64,
        "{large_bytes} bytes against {small_bytes}"
    );

    // The same for filling a claim and finishing an offer.
    let hand_over = |key: &str, blocks: u32| {
        let offer = sender
            .endpoint
            .offer(key, &sender.pool, OfferOptions::default())
            .unwrap();
        offer.append(scattered(blocks)).unwrap();
        let claim = receiver
            .endpoint
            .claim(
                key,
                &receiver.pool,
                &[sender.endpoint.address()],
                ClaimOptions::default(),
            )
            .unwrap();
        let selection = scattered(blocks);
        let ((), fill, fill_bytes) = counted(|| claim.fill(selection).unwrap());
        let ((), finish, finish_bytes) = counted(|| offer.finish(blocks * 16).unwrap());
        claim.arrived().wait(LONG).unwrap();
        offer.released().wait(LONG).unwrap();
        (fill + finish, fill_bytes + finish_bytes)
    };
    for n in 0..3 {
        hand_over(&format!("warm-{n}"), 128);
    }
    let least = |blocks: u32| {
        (0..5)
            .map(|n| hand_over(&format!("{blocks}-{n}"), blocks))
            .min()
            .unwrap()
    };
    let (small, small_bytes) = least(8);
    let (large, large_bytes) = least(128);
    println!("hand-over of 8 blocks: {small} allocations, {small_bytes} bytes; of 128: {large}, {large_bytes}");
    assert!(large <= small + 16, "{large} allocations against {small}");
    assert!(
        large_bytes <= small_bytes + 120 * 128,
        "{large_bytes} bytes against {small_bytes}"
    );
}
