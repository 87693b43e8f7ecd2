//! What the software above the device costs, in instructions, which a loaded machine does not change.
//!
//! A fake device in mode `instant` completes everything at once and copies nothing. The same push is run under valgrind with
//! two sizes; the difference, without what the fake itself executed, is the cost of the blocks between them. Build it as
//! it is used: `cargo test --release -p kvxfer-rdma --test cost`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::sync::Arc;

use kvxfer_core::flow::PartExtent;
use kvxfer_core::layout::{Arrangement, Model, Selection};
use kvxfer_core::plan::{Target, source_stream};
use kvxfer_testkit::cost;
use support::*;

/// Blocks of the pools, and of the requests that the two runs move: each is 160 pieces of 8 KiB, half of them keys.
const POOL: u32 = 136;
const FEW: u32 = 16;
const MANY: u32 = 128;
const PIECES_PER_BLOCK: u32 = 160;
/// Instructions per piece, at most, in a release build.
const LIMIT: u64 = 350;
/// Names the number of blocks, in the process that is measured.
const BLOCKS_VARIABLE: &str = "KVXFER_COST_BLOCKS";

/// Scattered blocks of a request, in an order that leaves nothing to merge.
fn request(blocks: u32, step: u32) -> Arc<Target> {
    let scattered = (0..blocks).map(|index| (index * step) % POOL).collect();
    Arc::new(Selection::single(0, blocks * 16, scattered).into())
}

/// One request of Llama-3.1-70B at a tensor-parallel size of 4.
fn push(blocks: u32) {
    let site = Site::with(&[("*", "mode", "instant")]);
    let pair = site.pair();
    let model = Model::preset("llama-3.1-70b").unwrap();
    let layout = Arc::new(model.layout(0, 4, 16, POOL, Arrangement::PER_LAYER_NHD).unwrap());
    let memory = pair.left.memory(layout.region_lengths());
    let target = pair.right.memory(layout.region_lengths());
    // 136 is 8 times 17: both steps visit every block once.
    let (have, wanted) = (request(blocks, 55), request(blocks, 33));
    let stream = wanted.stream(&layout, PartExtent::WHOLE).unwrap();
    assert_eq!(stream.length(), u64::from(blocks * PIECES_PER_BLOCK) * 8192);
    let source = source_stream(&layout, &have, &layout, &wanted, PartExtent::WHOLE).unwrap();
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    let sent = pair.push(&memory, source, slot, &target, stream);
    arrival.wait(PATIENCE * 6).unwrap();
    pair.left_log.arrived(sent.id);
}

#[test]
#[ignore = "the process that the other test measures"]
fn measured() {
    if let Ok(count) = std::env::var(BLOCKS_VARIABLE) {
        push(count.parse().unwrap());
    }
}

#[test]
fn a_posted_piece_costs_few_instructions() {
    if cfg!(debug_assertions) {
        println!("skipped: the limit of {LIMIT} instructions holds for release builds");
        return;
    }
    if let Some(why) = cost::cannot_count() {
        println!("skipped: {why}");
        return;
    }
    let cost = |count| instructions(count) as i64;
    let per_block = (cost(MANY) - cost(FEW)) / i64::from((MANY - FEW) * PIECES_PER_BLOCK);
    println!("{per_block} instructions per posted 8 KiB piece: planned, posted, completed, counted at the receiver");
    assert!(
        per_block <= LIMIT as i64,
        "{per_block} instructions per piece, at most {LIMIT} are allowed"
    );
}

/// Instructions that a run of so many blocks executes outside the fake device's library.
fn instructions(count: u32) -> u64 {
    let is_fake = |object: &str| object.contains("libibverbs") || object.contains("fake_verbs");
    cost::instructions("measured", (BLOCKS_VARIABLE, &count.to_string()), is_fake)
}
