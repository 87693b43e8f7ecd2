//! Two transports over loopback: moves scattered blocks, verifies them, and says how fast.
//!
//! `cargo run --release -p kvxfer-tcp --example pair -- [block bytes] [blocks] [repetitions]`
#![allow(clippy::print_stdout)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::sync::Arc;
use std::time::Instant;

use kvxfer_tcp::TcpConfig;
use support::*;

fn main() {
    let arguments: Vec<u64> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let argument = |index: usize, default| arguments.get(index).copied().unwrap_or(default);
    let (block, blocks, repetitions) = (argument(0, 64 << 10), argument(1, 1024), argument(2, 5));
    let pool = (2 * block * blocks).max(1 << 20);

    let pair = Pair::new(TcpConfig::default()).up();
    println!("path: {:?}", pair.left_link.path());
    let (source, destination) = (host(pool), host(pool));
    for repetition in 0..repetitions {
        let from = Arc::new(random_pieces(repetition * 2 + 1, pool, blocks as usize, block));
        let to = Arc::new(random_pieces(repetition * 2 + 2, pool, blocks as usize, block));
        let bytes = pattern(repetition + 1, from.bytes() as usize);
        write_stream(&source, &*from, &bytes);
        let arrival = Arc::new(Arrival::default());
        let slot = pair.right.grant(to.clone(), &destination, Some(arrival.clone()));
        let start = Instant::now();
        let Sent { id, .. } = Push::new(repetition, slot, &source, from).submit(&pair.left_link);
        assert!(arrival.wait(PATIENCE).is_some(), "the blocks did not arrive");
        let seconds = start.elapsed().as_secs_f64();
        pair.left_log.arrived(id);
        pair.left_link.forget(id);
        assert!(
            read_stream(&destination, &*to) == bytes,
            "other bytes arrived than were sent"
        );
        println!(
            "{blocks} blocks of {block} bytes: {:.1} ms, {:.2} GB/s, verified",
            seconds * 1e3,
            bytes.len() as f64 / seconds / 1e9
        );
    }
}
