//! Nothing leaks and nothing wakes up for nothing. One test, alone in its process: it counts what the process has.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::transport::Transport;
use kvxfer_tcp::TcpConfig;
use support::*;

/// Descriptors, and threads by name.
fn resources() -> (usize, Vec<String>) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut threads: Vec<String> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_string())
        .collect();
    threads.sort();
    (descriptors, threads)
}

/// How often data threads went to sleep so far.
fn switches() -> u64 {
    let mut total = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        let Ok(name) = std::fs::read_to_string(path.join("comm")) else {
            continue;
        };
        if !name.starts_with("kvx-data") {
            continue;
        }
        let status = std::fs::read_to_string(path.join("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        total += line
            .and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
            .unwrap();
    }
    total
}

#[test]
fn nothing_leaks_and_idle_endpoints_sleep() {
    idle_endpoints_sleep();
    let cycle = |round: u64| {
        let world = World::new(v4(), if round % 2 == 1 { Kind::staged() } else { Kind::Host });
        let proxy = world.proxy();
        let pair = world.through(small_buffers(), &proxy);
        let pool = 8 << 20;
        let (source, destination) = (world.regions(pool), world.regions(pool));
        let piece = |seed| Arc::new(random_pieces(seed, pool, 4, 1 << 20));
        let slot = pair.right.grant(piece(2), &destination, None);
        proxy.stall_after(600_000);
        let Sent { id, gate } = Push::new(1, slot, &source, piece(1)).submit(&pair.left_link);
        proxy.stalled();
        match round % 4 {
            0 => {
                proxy.cut();
                proxy.resume();
                pair.left_log.arrived(id);
            }
            1 => pair.left_link.close(),
            2 => {
                gate.close();
                pair.left_link.stop(id);
                proxy.resume();
                pair.left_log.quiet(id);
            }
            _ => {
                pair.left.transport.shutdown();
                pair.right.transport.shutdown();
            }
        }
        if round.is_multiple_of(2) {
            pair.left_link.close();
            pair.right_link.close();
            for log in [&pair.left_log, &pair.right_log] {
                log.closed();
            }
        }
    };
    (0..4).for_each(cycle);
    settle();
    let before = resources();
    (4..16).for_each(cycle);
    let mut after = resources();
    let end = Instant::now() + Duration::from_secs(5);
    while after != before && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
        after = resources();
    }
    assert_eq!(after, before);
}

fn idle_endpoints_sleep() {
    let pair = Pair::new(TcpConfig::default()).up();
    let (source, destination) = (host(1 << 20), host(1 << 20));
    let piece = || Arc::new(random_pieces(1, 1 << 20, 8, 65_536));
    let slot = pair.right.grant(piece(), &destination, None);
    let Sent { id, .. } = Push::new(1, slot, &source, piece()).submit(&pair.left_link);
    pair.left_log.arrived(id);
    pair.left_link.forget(id);
    std::thread::sleep(Duration::from_millis(100));
    let before = switches();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(switches(), before, "an idle data thread woke up");
}

fn settle() {
    // Threads of relays that were cut end a little later.
    std::thread::sleep(Duration::from_millis(300));
}
