//! What the transport costs: nothing when idle, nothing per descriptor, a bounded number of queue pairs. On fakes, as one
//! test, alone in its process: it counts what the process does.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvxfer_core::flow::Close;
use support::*;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

// The fakes are a library of their own, with an allocator of their own: what they allocate is not counted.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Time on a processor of the engines' threads so far, and how often they went to sleep.
fn engines() -> (Duration, u64) {
    let mut total = (Duration::ZERO, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if !name.starts_with("kvx-rdma") {
            continue;
        }
        let schedule = std::fs::read_to_string(path.join("schedstat")).unwrap();
        let nanos = schedule.split_whitespace().next().unwrap().parse().unwrap();
        let status = std::fs::read_to_string(path.join("status")).unwrap();
        let switches = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        let switches: u64 = switches.unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
        total = (total.0 + Duration::from_nanos(nanos), total.1 + switches);
    }
    total
}

#[test]
fn costs() {
    idle_endpoints_sleep();
    nothing_is_allocated_per_descriptor();
    queue_pairs_are_bounded();
    taking_blocks_back_is_quick();
    two_rails_are_nearly_twice_as_fast();
}

fn idle_endpoints_sleep() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    let stream = range(0, MIB);
    pair.carry(&memory, &stream, &target, &stream);
    pair.fetch(&memory, &stream, &target, &stream);
    std::thread::sleep(Duration::from_millis(200));
    let (before, began) = (engines(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let after = engines();
    let (busy, took) = (after.0 - before.0, began.elapsed());
    println!(
        "two idle engines used {busy:?} in {took:?}, and woke up {} times",
        after.1 - before.1
    );
    assert!(busy < took * 2 / 1000, "0.2% of a core is {:?}", took * 2 / 1000);
    assert!(before.0 > Duration::ZERO, "no engine was found");
    assert!(after.1 - before.1 <= 8, "an idle engine wakes up");
}

/// The same bytes, in 128 and in 16,384 pieces.
fn nothing_is_allocated_per_descriptor() {
    let site = Site::open();
    let pair = site.pair();
    let bytes = 8 * MIB;
    let (memory, target) = (pair.left.memory(&[bytes]), pair.right.memory(&[bytes]));
    let cost = |pieces: u64| {
        let stream = scattered(pieces, 11, bytes / pieces);
        let mut least = u64::MAX;
        for _ in 0..4 {
            let arrival = Arc::new(Arrival::default());
            let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
            arrival.wait(PATIENCE).expect("arrival");
            least = least.min(ALLOCATIONS.load(Ordering::Relaxed) - before);
            pair.left_log.arrived(sent.id);
            pair.left_link.forget(sent.id);
            pair.left_log.clear();
            pair.right_log.clear();
        }
        least
    };
    let (few, many) = (cost(128), cost(16_384));
    println!("128 pieces cost {few} allocations, 16,384 pieces {many}");
    // What there are more of: rounds of posting, each with its close and message.
    assert!(many < few + 16_384 / 16, "{few} and {many}");
}

fn queue_pairs_are_bounded() {
    let site = Site::open();
    let fabric = site.fabric.as_ref().unwrap();
    let alive = || fabric.counter("*", "qps_created") - fabric.counter("*", "qps_destroyed");
    let (left, right) = site.nodes(2, |_| {});
    assert_eq!(
        alive(),
        8,
        "a device that is in use has two, by which it flushes itself"
    );
    let pair = Pair::new(left, right).up();
    let both = || pair.left_link.path().rails.len() == 2 && pair.right_link.path().rails.len() == 2;
    for round in 0..12 {
        until("two rails", both);
        until("one queue pair per rail and side", || alive() == 12);
        site.down(round % 4);
        until("a rail is gone", || !both());
        site.up(round % 4);
    }
    until("two rails", both);
    pair.left_link.close();
    pair.right_link.close();
    pair.left_log.closed();
    pair.right_log.closed();
    assert_eq!(alive(), 8);
    drop(pair);
    assert_eq!(alive(), 0);
    assert_eq!(fabric.counter("*", "misuse"), 0);
}

/// From taking a slot back to its fence, with a peer that lives: the question, what is in flight, and the answer.
fn taking_blocks_back_is_quick() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[256 * KIB]), pair.right.memory(&[256 * KIB]));
    let stream = range(0, 256 * KIB);
    let one_way = Duration::from_millis(5);
    site.delay(one_way);
    let mut times: Vec<Duration> = (0..40)
        .map(|_| {
            let slot = pair.right.grant(stream.clone(), &target, None);
            let sent = pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()));
            let began = Instant::now();
            assert_eq!(pair.right.take_back(&pair.right_link, slot), Close::Waiting);
            let took = began.elapsed();
            pair.left_log.refused(sent.id);
            pair.left_link.forget(sent.id);
            took
        })
        .collect();
    times.sort();
    let (median, most) = (times[20], times[39]);
    println!(
        "taken back within {median:?} (median), {most:?} (most); a round trip is {:?}",
        one_way * 2
    );
    // The session of these tests takes no time: what is in flight, and a flush of the device.
    assert!(median < one_way * 2 * 3, "{median:?}");
}

fn two_rails_are_nearly_twice_as_fast() {
    let site = Site::with(&[("*", "bandwidth_bytes_per_s", "50000000")]);
    let bytes = 32 * MIB;
    let time = |rails: usize| {
        // At this rate the usual window would be a tenth of a second: what is on one rail cannot go to the other.
        let (left, right) = site.nodes(rails, |config| {
            config.window_bytes_min = MIB;
            config.window_bytes_max = 2 * MIB;
        });
        let pair = Pair::new(left, right).up();
        pair.wait_for_rails(rails);
        let (memory, target) = (pair.left.memory(&[bytes]), pair.right.memory(&[bytes]));
        let stream = scattered(bytes / (64 * KIB), 7, 64 * KIB);
        let mut times: Vec<Duration> = (0..3)
            .map(|_| {
                let arrival = Arc::new(Arrival::default());
                let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
                let began = Instant::now();
                pair.push(&memory, stream.clone(), slot, &target, stream.clone());
                arrival.wait(PATIENCE).expect("arrival");
                began.elapsed()
            })
            .collect();
        times.sort();
        times[1]
    };
    let (one, two) = (time(1), time(2));
    let gain = one.as_secs_f64() / two.as_secs_f64();
    println!("one rail {one:?}, two rails {two:?}: {gain:.2} times");
    assert!(gain >= 1.8, "{gain:.2}");
}
