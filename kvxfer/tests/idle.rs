//! What an endpoint costs while it does nothing. One test, so that nothing else runs in this process.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::time::Duration;

use kvxfer_cases::common::*;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Clock ticks (of 10 ms) that the library's threads have used, and how many threads there are.
fn ticks() -> (u64, usize) {
    let mut ticks = 0;
    let mut threads = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        let (name, rest) = stat.split_once('(').unwrap().1.rsplit_once(") ").unwrap();
        if name.starts_with("kvx-") {
            let fields: Vec<&str> = rest.split(' ').collect();
            ticks += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
            threads += 1;
        }
    }
    (ticks, threads)
}

#[test]
fn an_idle_endpoint_costs_next_to_nothing() {
    let before = resident_bytes();
    let a = endpoint("a");
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown <= 8 << 20, "an idle endpoint takes {grown} bytes");
    let b = endpoint("b");
    a.connect(&b.address(), LONG).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let wakeups = metric(&a, "kvxfer_control_wakeups_total");
    let (used, threads) = ticks();
    assert!(threads >= 4, "{threads} threads named kvx-*");
    std::thread::sleep(Duration::from_secs(3));
    let wakeups = metric(&a, "kvxfer_control_wakeups_total") - wakeups;
    let (now, _) = ticks();
    // Two endpoints for 3 s: busy loops would take 300 ticks and more, and thousands of wake-ups.
    assert!(now - used <= 6, "{} ticks in 3 s", now - used);
    assert!(wakeups <= 80.0, "{wakeups} wake-ups in 3 s");
    drop((a, b));
    assert_eq!(ticks().1, 0, "threads are left");
}
