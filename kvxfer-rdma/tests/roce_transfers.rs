//! What is pushed and pulled arrives whole, whatever its shape and whatever is scarce. On fakes, or on soft-RoCE.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvxfer_core::ErrorKind;
use kvxfer_core::flow::{Close, LaneName, SendPart};
use kvxfer_core::memory::Segment;
use kvxfer_core::transport::LinkEvent;
use kvxfer_rdma::RdmaConfig;
use support::*;

/// Pushes pieces and pulls them back, both scattered.
fn both_ways(site: &Site, change: impl Fn(&mut RdmaConfig), count: u64, length: u64) {
    let pair = site.pair_with(change);
    let memory = pair.left.memory(&[count * length]);
    let target = pair.right.memory(&[count * length]);
    memory.fill(0, count);
    let (source, destination) = (scattered(count, 7, length), scattered(count, 11, length));
    pair.carry(&memory, &source, &target, &destination);
    target.fill(0, length);
    pair.fetch(&memory, &destination, &target, &source);
    assert_eq!(pair.left_log.lost().len() + pair.right_log.lost().len(), 0);
}

#[test]
fn blocks_of_8_kib() {
    let site = Site::open();
    both_ways(&site, |_| {}, site.choose(20_480, 512), 8 * KIB);
}

#[test]
fn blocks_of_64_kib() {
    let site = Site::open();
    both_ways(&site, |_| {}, site.choose(256, 64), 64 * KIB);
}

#[test]
fn blocks_of_1_mib() {
    let site = Site::open();
    both_ways(&site, |_| {}, site.choose(31, 4), MIB);
}

#[test]
fn odd_lengths() {
    let site = Site::open();
    both_ways(&site, |_| {}, 333, 1237);
}

#[test]
fn short_queues() {
    let site = Site::open();
    let few = |config: &mut RdmaConfig| {
        config.queue_depth = 16;
        config.receive_depth = 2;
    };
    both_ways(&site, few, site.choose(2048, 256), 8 * KIB);
}

#[test]
fn one_segment_and_one_read_at_a_time() {
    let site = Site::with(&[
        ("*", "max_sge", "1"),
        ("*", "max_sge_rd", "1"),
        ("*", "max_qp_rd_atom", "1"),
    ]);
    both_ways(&site, |_| {}, 256, 8 * KIB);
}

#[test]
fn small_path_mtu() {
    let site = Site::open();
    both_ways(&site, |config| config.mtu = Some(256), 64, 8 * KIB);
}

/// Many registrations per region, whose edges no block respects, and different ones on both sides.
#[test]
fn blocks_across_registrations_and_regions() {
    let site = Site::open();
    let pair = site.pair_with(|config| config.registration_bytes_max = Some(16 * KIB));
    let lengths = [100_000, 7 * KIB, 300_001];
    let (memory, target) = (pair.left.memory(&lengths), pair.right.memory(&lengths));
    (0..3).for_each(|region| memory.fill(region, region as u64 + 1));
    let segment = |region, offset, length| Segment { region, offset, length };
    let source: Stream = Arc::new(Scattered(vec![
        segment(2, 1, 99_999),
        segment(0, 50_000, 50_000),
        segment(1, 0, 7 * KIB),
        segment(2, 200_000, 100_001),
    ]));
    let destination: Stream = Arc::new(Scattered(vec![
        segment(0, 0, 100_000),
        segment(2, 77_777, 150_000),
        segment(1, 1, 7 * KIB - 1),
        segment(2, 0, 1),
    ]));
    assert_eq!(source.length(), destination.length());
    pair.carry(&memory, &source, &target, &destination);
    (0..3).for_each(|region| target.fill(region, region as u64 + 9));
    pair.fetch(&memory, &source, &target, &destination);
}

#[test]
fn parts_in_any_order_and_late() {
    let site = Site::open();
    let pair = site.pair();
    let (parts, length) = (16u32, 48 * KIB as u32);
    let bytes = u64::from(parts * length);
    let (memory, target) = (pair.left.memory(&[bytes]), pair.right.memory(&[bytes]));
    memory.fill(0, 3);
    let (all, placed) = (scattered(48, 5, bytes / 48), scattered(48, 7, bytes / 48));
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(placed.clone(), &target, Some(arrival.clone()));
    let id = pair.next_id();
    let window = |stream: &Stream, part: u32| -> Stream {
        Arc::new(Window {
            stream: stream.clone(),
            start: u64::from(part * length),
            length: length.into(),
        })
    };
    let part = |number: u32| SendPart {
        part: number,
        extent: tokens(number * length, (number + 1) * length),
        stream: window(&all, number),
        remote: Some(window(&placed, number)),
    };
    let mut order: Vec<u32> = (0..parts).map(|number| number * 5 % parts).collect();
    let last = order.pop().unwrap();
    let spec = pair.spec(id, &memory, slot, &target);
    pair.left_link.submit(spec).unwrap();
    for (count, number) in order.into_iter().enumerate() {
        pair.left_link.add_part(id, part(number));
        if count % 4 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    until("all but the last part", || {
        pair.right.slots.progress(slot.0, slot.1).unwrap().applied_bytes == bytes - u64::from(length)
    });
    assert!(arrival.wait(Duration::ZERO).is_none(), "arrived without its last part");
    pair.left_link.add_part(id, part(last));
    arrival.wait(PATIENCE).expect("arrival");
    pair.left_log.arrived(id);
    assert!(memory.bytes(&all) == target.bytes(&placed));
}

#[test]
fn many_at_once_both_ways() {
    let site = Site::open();
    let pair = site.pair();
    let count = site.choose(200, 24);
    let length = 40_000u64;
    let area = count * length;
    // Of each side: what it sends, what it gets pushed, what it pulls.
    let memories = [pair.left.memory(&[3 * area]), pair.right.memory(&[3 * area])];
    for (side, memory) in memories.iter().enumerate() {
        memory.fill(0, side as u64 + 5);
    }
    let (source, pushed, pulled) = (
        |index: u64| range(index * length, length),
        |index: u64| range(area + index * length, length),
        |index: u64| range(2 * area + index * length, length),
    );
    let mut open = Vec::new();
    for index in 0..count {
        for (side, (from, to)) in [(pair.left(), pair.right()), (pair.right(), pair.left())]
            .into_iter()
            .enumerate()
        {
            let (memory, target) = (&memories[side], &memories[1 - side]);
            let arrival = Arc::new(Arrival::default());
            let slot = to.node.grant(pushed(index), target, Some(arrival.clone()));
            let sent = from.push(pair.next_id(), memory, &source(index), slot, target, &pushed(index));
            open.push((arrival, from, sent.id));
        }
        let arrival = Arc::new(Arrival::default());
        let slot = pair.left.grant(pulled(index), &memories[0], Some(arrival.clone()));
        let sent = pair.pull(&memories[0], slot, pulled(index), &memories[1], source(index));
        open.push((arrival, pair.left(), sent.id));
    }
    for (arrival, from, id) in open {
        arrival.wait(PATIENCE).expect("arrival");
        from.log.arrived(id);
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
    }
    for index in 0..count {
        assert!(
            memories[0].bytes(&source(index)) == memories[1].bytes(&pushed(index)),
            "to the right: {index}"
        );
        assert!(
            memories[1].bytes(&source(index)) == memories[0].bytes(&pushed(index)),
            "to the left: {index}"
        );
        assert!(
            memories[1].bytes(&source(index)) == memories[0].bytes(&pulled(index)),
            "pulled: {index}"
        );
    }
    assert_eq!(pair.left_log.lost().len() + pair.right_log.lost().len(), 0);
}

/// A small transfer is not kept waiting by a large one that was there first.
#[test]
fn a_small_one_passes_a_large_one() {
    let site = Site::with(&[("*", "bandwidth_bytes_per_s", "100000000")]);
    let pair = site.pair_with(|config| {
        config.window_bytes_min = 4 << 20;
        config.window_bytes_max = 4 << 20;
    });
    let large = site.choose(48, 24) * MIB;
    let (memory, target) = (pair.left.memory(&[large + MIB]), pair.right.memory(&[large + MIB]));
    let (large, small) = (range(0, large), range(large, 64 * KIB));
    let (first, second) = (Arc::new(Arrival::default()), Arc::new(Arrival::default()));
    let large_slot = pair.right.grant(large.clone(), &target, Some(first.clone()));
    let small_slot = pair.right.grant(small.clone(), &target, Some(second.clone()));
    pair.push(&memory, large.clone(), large_slot, &target, large);
    until("the large one has begun", || pair.left.written() > 0);
    pair.push(&memory, small.clone(), small_slot, &target, small);
    second.wait(PATIENCE).expect("arrival of the small one");
    let progress = pair.right.slots.progress(large_slot.0, large_slot.1).unwrap();
    assert!(!progress.arrived, "the large one was first");
    first.wait(PATIENCE).expect("arrival of the large one");
}

#[test]
fn user_messages_come_with_the_arrival() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[256 * KIB]), pair.right.memory(&[256 * KIB]));
    memory.fill(0, 1);
    for length in [1, 1000, 64 << 10] {
        let message: Arc<[u8]> = pattern(9, length).into();
        let stream = range(0, 100_000);
        let arrival = Arc::new(Arrival::default());
        let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
        let sent = pair.push_with(&memory, stream.clone(), slot, &target, stream, |spec| {
            spec.message = Some(message.clone());
        });
        let got = arrival.wait(PATIENCE).expect("arrival").expect("a message");
        assert!(*got == *message, "another message");
        pair.left_log.arrived(sent.id);
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn checksums_hold_and_a_flipped_bit_is_caught() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[512 * KIB]), pair.right.memory(&[512 * KIB]));
    memory.fill(0, 1);
    let (source, destination) = (scattered(60, 7, 8 * KIB), scattered(60, 11, 8 * KIB));
    pair.carry_with(&memory, &source, &target, &destination, |spec| spec.checksum = true);

    // What was written and what was said of it are kept apart until a bit has changed in memory.
    target.paint(&destination, 0);
    let slot = pair.right.grant(destination.clone(), &target, None);
    let before = pair.left.counter("rail_closes_total");
    let closes = |pair: &Pair| pair.left.counter("rail_closes_total") + pair.left.counter("rail_session_closes_total");
    let sent = pair.hold_after_admission(slot, || {
        pair.push_with(&memory, source.clone(), slot, &target, destination.clone(), |spec| {
            spec.checksum = true
        })
    });
    until("all is written", || {
        closes(&pair) > before && memory.bytes(&source) == target.bytes(&destination)
    });
    let mut byte = target.read(0, 3 * 8 * KIB + 17, 1);
    byte[0] ^= 1;
    target.regions[0].copy_in(3 * 8 * KIB + 17, &byte).unwrap();
    pair.left_log.release();
    let error = pair.right_log.wait("corruption", |event| match event {
        LinkEvent::SlotCorrupt { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("rail 0"), "{error}");
    assert!(!pair.right.slots.progress(slot.0, slot.1).unwrap().arrived);
    pair.right_link.revoke(slot.0, slot.1);
    until("quiet", || pair.right.slots.fenced(slot.0, slot.1));
    pair.left_log.refused(sent.id);
    // The rail that brought it comes back, and works.
    pair.carry_with(&memory, &source, &target, &destination, |spec| spec.checksum = true);
}

/// Immediates have 16 bits for the slot: others are closed over the session.
#[test]
fn slots_beyond_what_an_immediate_can_name() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[256 * KIB]), pair.right.memory(&[256 * KIB]));
    memory.fill(0, 4);
    for _ in 0..65_536 {
        pair.right.grant(range(0, 1), &target, None);
    }
    let stream = range(0, 200_000);
    pair.carry(&memory, &stream, &target, &stream);
    assert!(pair.left.counter("rail_session_closes_total") > 0);
    assert_eq!(pair.left.counter("rail_closes_total"), 0);
}

/// While the receiver gives no credit back, closes go over the session, and nothing is lost by it.
#[test]
fn closes_without_credit() {
    let site = Site::with(&[("*", "late_placement_us", "20000")]);
    let pair = site.pair_with(|config| config.receive_depth = 2);
    let length = 16 * KIB;
    let count = 12;
    let (memory, target) = (
        pair.left.memory(&[count * length]),
        pair.right.memory(&[count * length]),
    );
    memory.fill(0, 4);
    let stream = |index| range(index * length, length);
    let open: Vec<_> = (0..count)
        .map(|index| {
            let arrival = Arc::new(Arrival::default());
            let slot = pair.right.grant(stream(index), &target, Some(arrival.clone()));
            pair.right_link.admit(slot.0, slot.1);
            (arrival, slot)
        })
        .collect();
    pair.left_log.hold();
    for (index, (_, slot)) in (0..).zip(&open) {
        pair.push(&memory, stream(index), *slot, &target, stream(index));
        until("posted", || pair.left.written() == (index + 1) * length);
    }
    assert_eq!(pair.left.counter("rail_closes_total"), 2);
    assert_eq!(pair.left.counter("rail_session_closes_total"), count - 2);
    assert!(open.iter().all(|(arrival, _)| arrival.wait(Duration::ZERO).is_none()));
    pair.left_log.release();
    for (arrival, _) in &open {
        arrival.wait(PATIENCE).expect("arrival");
    }
    assert!(memory.read(0, 0, 192 << 10) == target.read(0, 0, 192 << 10));
    assert_eq!(pair.left_log.lost().len() + pair.right_log.lost().len(), 0);
    if let Some(fabric) = &site.fabric {
        assert_eq!(fabric.counter("*", "rnr_naks"), 0);
    }
}

/// A close's number has eight bits. Closes over the session take none: else an immediate could get the number of one that
/// is not matched yet.
#[test]
fn close_numbers_stay_apart() {
    let site = Site::open();
    let pair = site.pair_with(|config| config.receive_depth = 8);
    let (immediates, over_session, length) = (8u32, 250u32, 64u32);
    let parts = immediates + over_session + 2;
    let bytes = u64::from(parts * length);
    let (memory, target) = (pair.left.memory(&[bytes]), pair.right.memory(&[bytes]));
    memory.fill(0, 4);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(range(0, bytes), &target, Some(arrival.clone()));
    pair.right_link.admit(slot.0, slot.1);
    std::thread::sleep(Duration::from_millis(50));
    let id = pair.next_id();
    pair.left_log.hold();
    pair.left_link.submit(pair.spec(id, &memory, slot, &target)).unwrap();
    let add = |number: u32| {
        let stream = range(u64::from(number * length), length.into());
        pair.left_link.add_part(
            id,
            SendPart {
                part: number,
                extent: tokens(number * length, (number + 1) * length),
                stream: stream.clone(),
                remote: Some(stream),
            },
        );
    };
    for number in 0..immediates + over_session {
        add(number);
        until("written", || pair.left.written() == u64::from((number + 1) * length));
    }
    assert_eq!(pair.left.counter("rail_session_closes_total"), over_session.into());
    // Two are matched and their receives given back: two more immediates go, while six are unmatched.
    pair.left_log.release_some(2);
    until("two are counted", || {
        pair.right.slots.progress(slot.0, slot.1).unwrap().applied_bytes == u64::from(2 * length)
    });
    std::thread::sleep(Duration::from_millis(100));
    for number in parts - 2..parts {
        add(number);
        until("written", || pair.left.written() == u64::from((number + 1) * length));
    }
    assert_eq!(pair.left.counter("rail_closes_total"), u64::from(immediates) + 2);
    std::thread::sleep(Duration::from_millis(100));
    pair.left_log.release();
    arrival.wait(PATIENCE).expect("arrival");
    assert!(memory.bytes(&range(0, bytes)) == target.bytes(&range(0, bytes)));
    assert_eq!(pair.right_log.lost().len(), 0);
}

/// The time without progress counts from when something was posted, not from when something last completed.
#[test]
fn a_rail_that_was_idle_is_not_stalled() {
    let site = Site::open();
    let pair = site.pair_with(|config| config.progress = Duration::from_millis(600));
    let length = 32 * KIB;
    let (memory, target) = (pair.left.memory(&[8 * length]), pair.right.memory(&[8 * length]));
    memory.fill(0, 4);
    let stream = |index| range(index * length, length);
    pair.carry(&memory, &stream(0), &target, &stream(0));
    let open: Vec<_> = (0..8)
        .map(|index| {
            let arrival = Arc::new(Arrival::default());
            let slot = pair.right.grant(stream(index), &target, Some(arrival.clone()));
            pair.right_link.admit(slot.0, slot.1);
            (arrival, slot)
        })
        .collect();
    std::thread::sleep(Duration::from_millis(800));
    site.delay(Duration::from_millis(100));
    // As one part of each, so that several closes are posted at once.
    for (index, (_, slot)) in (0..).zip(&open) {
        pair.push(&memory, stream(index), *slot, &target, stream(index));
    }
    for (arrival, _) in &open {
        arrival.wait(PATIENCE).expect("arrival");
    }
    assert_eq!(pair.left_log.lost().len(), 0, "{:?}", pair.left_log.lost());
    site.clear();
}

#[test]
fn two_rails_share_the_work() {
    let site = Site::open();
    if site.rails() < 2 {
        println!("skipped: there is one pair of devices");
        return;
    }
    // What fits one rail's window may all go over that rail.
    let (left, right) = site.nodes(2, |config| {
        config.window_bytes_min = 1 << 20;
        config.window_bytes_max = 1 << 20;
    });
    let pair = Pair::new(left, right).up();
    pair.wait_for_rails(2);
    let count = site.choose(64, 24);
    let (memory, target) = (
        pair.left.memory(&[count * 256 * KIB]),
        pair.right.memory(&[count * 256 * KIB]),
    );
    memory.fill(0, 8);
    let (source, destination) = (scattered(count, 7, 256 * KIB), scattered(count, 5, 256 * KIB));
    for _ in 0..3 {
        target.paint(&destination, 0);
        pair.carry(&memory, &source, &target, &destination);
    }
    for rail in ["0", "1"] {
        let carried = pair.left.counter_where("rail_bytes_total", |labels| {
            labels.contains(&("rail", rail.into())) && labels.contains(&("direction", "sent".into()))
        });
        assert!(carried > count * 256 * KIB / 4, "rail {rail} carried {carried}");
    }
    target.fill(0, 9);
    pair.fetch(&memory, &source, &target, &destination);
}

/// A path is named, and nothing is left of a link that was closed.
#[test]
fn a_link_is_named_and_ends() {
    let site = Site::open();
    let pair = site.pair();
    let path = pair.left_link.path();
    assert_eq!(
        (path.transport.as_ref(), path.rails.len(), path.rails_configured),
        ("rdma", 1, 1)
    );
    assert!(path.rails[0].contains("->"), "{path:?}");
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory(&[64 * KIB]));
    let slot = pair.right.grant(range(0, 4096), &target, None);
    pair.carry(&memory, &range(0, 64 * KIB), &target, &range(0, 64 * KIB));
    pair.left_link.close();
    pair.right_link.close();
    pair.left_log.closed();
    pair.right_log.closed();
    assert_eq!((pair.left.transport.links(), pair.right.transport.links()), (0, 0));
    let error = pair
        .left_link
        .submit(pair.spec(pair.next_id(), &memory, slot, &target))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert_eq!(pair.right.slots.close(slot.0, slot.1), Close::Fenced);
    assert_eq!(
        pair.left_log.lost(),
        Vec::<(LaneName, usize, _)>::new(),
        "closing is no loss"
    );
    if let Some(fabric) = &site.fabric {
        drop(pair);
        assert_eq!(fabric.counter("*", "qps_created"), fabric.counter("*", "qps_destroyed"));
        assert_eq!(
            (fabric.counter("*", "misuse"), fabric.counter("*", "cq_overruns")),
            (0, 0)
        );
    }
}

/// A slot is admitted while parts are being added: none is lost between waiting and being sent.
#[test]
fn parts_added_while_the_slot_is_admitted() {
    let site = Site::open();
    let pair = site.pair();
    let length = 4 * KIB;
    let (memory, target) = (pair.left.memory(&[length]), pair.right.memory(&[length]));
    let stream = range(0, length);
    for round in 0..site.choose(3000u64, 300) {
        memory.fill(0, round);
        pair.carry(&memory, &stream, &target, &stream);
        pair.left_log.clear();
        pair.right_log.clear();
    }
}
