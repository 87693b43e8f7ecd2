//! What copies of device memory cost the processor, in instructions, which a loaded machine does not change.
//!
//! The same copies are made under valgrind with two numbers of pieces; the difference, without what the fake driver itself executed,
//! is the cost of the pieces between them: listed, queued, handed to the driver, seen to end. Build it as it is used:
//! `cargo test --release -p kvxfer-cuda --test cost`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::*;
use kvxfer_core::memory::Segment;
use kvxfer_testkit::cost;

/// Pieces of the two runs, and their bytes; a chunk of them is one copy.
const FEW: u64 = 2_560;
const MANY: u64 = 20_480;
const PIECE_BYTES: u64 = 8 << 10;
const CHUNK_PIECES: usize = 128;
/// Instructions for a piece that is gathered and scattered, at most, in a release build.
const LIMIT: i64 = 300;
/// Names the number of pieces, in the process that is measured.
const PIECES_VARIABLE: &str = "KVXFER_COST_PIECES";

fn copy(pieces: u64) {
    let bench = Bench::new();
    let region = bench.region(2 * MANY * PIECE_BYTES);
    let domain = region.domain().clone();
    let regions = [region];
    let chunk_bytes = CHUNK_PIECES as u64 * PIECE_BYTES;
    let staging = Staging::pinned(&domain, 8 * chunk_bytes).unwrap();
    let segments: Vec<Segment> = (0..pieces)
        .map(|piece| segment(0, 2 * piece * PIECE_BYTES, PIECE_BYTES))
        .collect();
    for window in segments.chunks(8 * CHUNK_PIECES) {
        for into in [false, true] {
            let tickets: Vec<_> = window
                .chunks(CHUNK_PIECES)
                .enumerate()
                .map(|(index, chunk)| {
                    let view = staging.part(index as u64 * chunk_bytes, chunk.len() as u64 * PIECE_BYTES);
                    match into {
                        false => domain.start_gather(&regions, chunk, view).unwrap(),
                        true => domain.start_scatter(view, &regions, chunk).unwrap(),
                    }
                })
                .collect();
            for ticket in tickets {
                wait(&*domain, ticket).unwrap();
            }
        }
    }
    drop(staging);
    drop(regions);
    drop(domain);
    bench.end();
}

#[test]
#[ignore = "the process that the other test measures"]
fn measured() {
    if let Ok(count) = std::env::var(PIECES_VARIABLE) {
        copy(count.parse().unwrap());
    }
}

#[test]
fn a_copied_piece_costs_few_instructions() {
    if cfg!(debug_assertions) {
        println!("skipped: the limit of {LIMIT} instructions holds for release builds");
        return;
    }
    if let Some(why) = cost::cannot_count() {
        println!("skipped: {why}");
        return;
    }
    // The fake driver moves the bytes with the C library's functions.
    let is_fake = |object: &str| {
        ["libcuda", "fake_cuda", "libc.so"]
            .iter()
            .any(|name| object.contains(name))
    };
    let cost = |pieces: u64| cost::instructions("measured", (PIECES_VARIABLE, &pieces.to_string()), is_fake) as i64;
    let per_piece = (cost(MANY) - cost(FEW)) / (MANY - FEW) as i64;
    println!("{per_piece} instructions per 8 KiB piece, gathered and scattered");
    assert!(
        per_piece <= LIMIT,
        "{per_piece} instructions per piece, at most {LIMIT} are allowed"
    );
}
