//! One push and one pull.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use support::*;

#[test]
fn push_and_pull() {
    let site = Site::open();
    let pair = site.pair();
    println!("link up");
    let memory = pair.left.memory(&[8 << 20]);
    let target = pair.right.memory(&[8 << 20]);
    println!("registered");
    memory.fill(0, 1);
    let source: Arc<dyn kvxfer_core::flow::ByteStream> = Arc::new(Pieces {
        region: 0,
        offsets: (0..512).map(|i| (i * 7 % 512) * 8192).collect(),
        length: 8192,
    });
    let destination: Arc<dyn kvxfer_core::flow::ByteStream> = Arc::new(Pieces {
        region: 0,
        offsets: (0..512).map(|i| (i * 5 % 512) * 8192).collect(),
        length: 8192,
    });
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(destination.clone(), &target, Some(arrival.clone()));
    let began = std::time::Instant::now();
    println!("filled");
    let sent = pair.push(&memory, source, slot, &target, destination);
    arrival.wait(PATIENCE).expect("arrival");
    pair.left_log.arrived(sent.id);
    for i in 0..512u64 {
        let (from, to) = ((i * 7 % 512) * 8192, (i * 5 % 512) * 8192);
        assert_eq!(memory.read(0, from, 8192), target.read(0, to, 8192), "{i}");
    }
    println!("pushed in {:?}", began.elapsed());
    let began = std::time::Instant::now();
    let destination: Arc<dyn kvxfer_core::flow::ByteStream> = Arc::new(Pieces {
        region: 0,
        offsets: vec![4 << 20],
        length: 4 << 20,
    });
    let source: Arc<dyn kvxfer_core::flow::ByteStream> = Arc::new(Pieces {
        region: 0,
        offsets: vec![0],
        length: 4 << 20,
    });
    let arrival = Arc::new(Arrival::default());
    let slot = pair.left.grant(destination.clone(), &memory, Some(arrival.clone()));
    let sent = pair.pull(&memory, slot, destination, &target, source);
    arrival.wait(PATIENCE).expect("arrival");
    pair.left_log.arrived(sent.id);
    assert_eq!(memory.read(0, 4 << 20, 4 << 20), target.read(0, 0, 4 << 20));
    println!("pulled in {:?}", began.elapsed());
    pair.left_link.close();
    pair.right_link.close();
    pair.left_log.closed();
    pair.right_log.closed();
    println!("closed after {:?}", began.elapsed());
}
