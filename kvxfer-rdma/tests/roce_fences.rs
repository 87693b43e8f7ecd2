//! What was taken back, or never was the peer's, is neither written nor read any more. On fakes, or on soft-RoCE.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::flow::{Close, Direction, Remote};
use kvxfer_core::transport::Transport;
use kvxfer_core::{Error, ErrorKind, PoolId};
use support::*;

/// Takes slots back while bytes for them are on their way, and uses their blocks again at once: thousands of times.
#[test]
fn blocks_taken_back_are_never_written_again() {
    let site = Site::with(&[("*", "late_placement_us", "1500"), ("*", "order", "shuffled")]);
    take_back_and_reuse(&site, &site.pair());
}

/// The same without immediates, which would make a device place what it has accepted.
#[test]
fn blocks_taken_back_are_never_written_late() {
    let site = Site::with(&[("*", "late_placement_us", "3000"), ("*", "order", "shuffled")]);
    let Some(fabric) = site.fakes() else { return };
    let pair = site.pair();
    no_immediates(&pair);
    take_back_and_reuse(&site, &pair);
    assert!(fabric.counter("*", "late_bytes_flushed") > 0, "nothing was late");
}

/// From now on the right side's slots have numbers that no immediate can carry.
fn no_immediates(pair: &Pair) {
    let tiny = pair.right.memory(&[1]);
    for _ in 0..65_536 {
        pair.right.grant(range(0, 1), &tiny, None);
    }
}

fn take_back_and_reuse(site: &Site, pair: &Pair) {
    let (rounds, areas) = (site.choose(2000, 200), 8u64);
    let (count, length) = (16u64, 4 * KIB);
    let bytes = count * length;
    let (memory, target) = (pair.left.memory(&[bytes]), pair.right.memory(&[areas * bytes]));
    let source = scattered(count, 7, length);
    memory.paint(&source, 0xee);
    let area = |round: u64| {
        pieces(
            (0..count).map(move |index| round % areas * bytes + index * 5 % count * length),
            length,
        )
    };
    let paint = |round: u64| (round % 200) as u8;
    site.delay(site.choose(Duration::from_micros(300), ms(3)));
    let mut in_flight = 0;
    for round in 0..rounds {
        let stream = area(round);
        if round >= areas {
            assert!(
                target.is_all(&stream, paint(round - areas)),
                "written after it was taken back: {round}"
            );
        }
        let (posted, written) = (pair.left.counter("rail_requests_total"), pair.left.written());
        let slot = pair.right.grant(stream.clone(), &target, None);
        let sent = pair.push(&memory, source.clone(), slot, &target, stream.clone());
        assert!(
            soon(PATIENCE, || pair.left.counter("rail_requests_total") > posted),
            "round {round}: nothing posted: {:?}, {:?}, {:?}, {:?}",
            pair.left_log.tail(),
            pair.right_log.tail(),
            pair.left_link.path(),
            pair.right.slots.progress(slot.0, slot.1)
        );
        // In turn: only the receiver gives up; the sender does, and then the receiver.
        if round % 2 == 1 {
            sent.gate.close();
            pair.left_link.stop(sent.id);
        }
        in_flight += u64::from(pair.left.written() == written);
        let close = pair.right.take_back(&pair.right_link, slot);
        assert_ne!(close, Close::Gone);
        target.paint(&stream, paint(round));
        if round % 2 == 1 {
            pair.left_log.quiet(sent.id);
            assert!(sent.gate.fenced());
        } else if close == Close::Waiting {
            pair.left_log.refused(sent.id);
        }
        pair.left_link.forget(sent.id);
        assert!(pair.right.slots.release(slot.0, slot.1));
        pair.left_log.clear();
        pair.right_log.clear();
    }
    std::thread::sleep(ms(50));
    for round in rounds - areas..rounds {
        assert!(
            target.is_all(&area(round), paint(round)),
            "written after it was taken back: {round}"
        );
    }
    println!("{in_flight} of {rounds} were taken back with bytes outstanding");
    assert!(
        in_flight >= rounds * 8 / 10,
        "only {in_flight} of {rounds} had bytes outstanding"
    );
}

/// A peer that says nothing any more while its device writes: its queue pairs are fenced, and when it wakes up it can
/// write nothing of old.
#[test]
fn a_silent_writer_is_fenced() {
    let site = Site::open();
    let pair = site.pair_with(slow_to_give_up);
    // Longer than the writer is waited for: its bytes are on their way when it is fenced.
    fence_a_silent_writer(&site, &pair, ms(300));
}

/// Here the receiver's device has everything, and it is not in memory yet.
#[test]
fn a_silent_writer_is_fenced_and_the_device_flushed() {
    let site = Site::with(&[("*", "late_placement_us", "350000")]);
    let Some(fabric) = site.fakes() else { return };
    let pair = site.pair_with(slow_to_give_up);
    no_immediates(&pair);
    fence_a_silent_writer(&site, &pair, Duration::ZERO);
    assert!(fabric.counter("*", "late_bytes_flushed") > 0, "nothing was late");
}

fn fence_a_silent_writer(site: &Site, pair: &Pair, delay: Duration) {
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    let stream = scattered(128, 7, 8 * KIB);
    for round in 0..3u8 {
        pair.wait_for_rails(1);
        memory.paint(&stream, 0xee);
        if !delay.is_zero() {
            site.delay(delay);
        }
        let slot = pair.right.grant(stream.clone(), &target, None);
        let (posted, written) = (pair.left.counter("rail_requests_total"), pair.left.written());
        let sent = pair.hold_after_admission(slot, || {
            pair.push(&memory, stream.clone(), slot, &target, stream.clone())
        });
        until("posted", || pair.left.counter("rail_requests_total") > posted);
        assert!(
            delay.is_zero() || pair.left.written() == written,
            "nothing was outstanding"
        );
        let began = Instant::now();
        assert_eq!(pair.right.take_back(&pair.right_link, slot), Close::Waiting);
        let took = began.elapsed();
        println!("fenced after {took:?}");
        assert!(took < Duration::from_secs(3) && took >= ms(100), "{took:?}");
        assert!(
            delay.is_zero() || pair.left.written() == written,
            "nothing was outstanding"
        );
        target.paint(&stream, round);
        std::thread::sleep(ms(400));
        assert!(target.is_all(&stream, round), "written after it was fenced");
        let lost = pair.right_log.lost();
        assert_eq!((lost.len(), lost[0].0.epoch), (1, u32::from(round) + 1), "{lost:?}");
        assert!(lost[0].2.to_string().contains("did not confirm"), "{}", lost[0].2);

        // It wakes up.
        site.clear();
        pair.left_log.release();
        pair.left_log.refused(sent.id);
        pair.wait_for_rails(1);
        assert!(target.is_all(&stream, round), "written after it was fenced");
        memory.fill(0, round.into());
        pair.carry(&memory, &stream, &target, &stream);
        pair.left_log.clear();
        pair.right_log.clear();
    }
}

/// Writes of a slot that ended meanwhile are counted as strays, and the rail stays.
#[test]
fn closes_of_an_ended_slot_are_dropped() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[256 * KIB]), pair.right.memory(&[256 * KIB]));
    memory.fill(0, 1);
    let stream = range(0, 128 * KIB);
    let slot = pair.right.grant(stream.clone(), &target, None);
    let sent = pair.hold_after_admission(slot, || {
        pair.push(&memory, stream.clone(), slot, &target, stream.clone())
    });
    until("written", || pair.left.written() == 128 * KIB);
    assert_eq!(pair.right.slots.close(slot.0, slot.1), Close::Waiting);
    pair.right_link.revoke(slot.0, slot.1);
    std::thread::sleep(ms(50));
    assert!(
        !pair.right.slots.fenced(slot.0, slot.1),
        "its writer has not said that it stopped"
    );
    pair.left_log.release();
    until("fenced", || pair.right.slots.fenced(slot.0, slot.1));
    pair.left_log.refused(sent.id);
    assert_eq!(pair.right.counter("rail_stray_closes_total"), 1);
    assert_eq!(pair.left_log.lost().len() + pair.right_log.lost().len(), 0);
    pair.carry(&memory, &stream, &target, &stream);
}

/// Links are closed while bytes are outstanding: both ends end, and then nothing of either lands or is read.
#[test]
fn closing_with_transfers_outstanding() {
    let site = Site::with(&[("*", "late_placement_us", "30000")]);
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[2 * MIB]), pair.right.memory(&[2 * MIB]));
    memory.paint(&range(0, 2 * MIB), 0xee);
    let (pushed, pulled) = (scattered(128, 7, 8 * KIB), range(MIB, 512 * KIB));
    site.delay(ms(60));
    let slot = pair.right.grant(pushed.clone(), &target, None);
    let reading = pair.left.grant(pulled.clone(), &memory, None);
    let posted = pair.left.counter("rail_requests_total");
    let written = pair.left.written();
    let push = pair.push(&memory, pushed.clone(), slot, &target, pushed.clone());
    pair.pull(&memory, reading, pulled.clone(), &target, pulled.clone());
    until("posted", || pair.left.counter("rail_requests_total") > posted + 1);
    assert_eq!(pair.right.slots.close(slot.0, slot.1), Close::Waiting);
    pair.left.slots.close(reading.0, reading.1);
    push.gate.close();
    assert_eq!(pair.left.written(), written, "nothing was outstanding");
    pair.right_link.close();
    pair.left_link.close();
    pair.right_log.closed();
    pair.left_log.closed();
    assert!(push.gate.fenced(), "the source may still be read");
    assert!(
        pair.right.slots.fenced(slot.0, slot.1),
        "the destination may still be written"
    );
    assert!(
        pair.left.slots.fenced(reading.0, reading.1),
        "the destination may still be read into"
    );
    target.paint(&pushed, 1);
    memory.paint(&pulled, 2);
    std::thread::sleep(ms(200));
    assert!(
        target.is_all(&pushed, 1) && memory.is_all(&pulled, 2),
        "written after the link had ended"
    );
    site.clear();
}

/// A source that is taken back while it is being read by the device: quiet means that it is read no more.
#[test]
fn a_source_taken_back_is_read_no_more() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[4 * MIB]), pair.right.memory(&[4 * MIB]));
    let stream = scattered(64, 7, 64 * KIB);
    for round in 0..site.choose(50, 5) {
        memory.paint(&stream, 1);
        target.paint(&stream, 0);
        site.delay(ms(5));
        let slot = pair.right.grant(stream.clone(), &target, None);
        let sent = pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()));
        sent.gate.close();
        pair.left_link.stop(sent.id);
        pair.left_log.quiet(sent.id);
        assert!(sent.gate.fenced());
        memory.paint(&stream, 9);
        pair.right.take_back(&pair.right_link, slot);
        assert!(!target.bytes(&stream).contains(&9), "read after it was quiet: {round}");
        pair.left_log.clear();
    }
    site.clear();
}

/// Pools that are closed while a transfer uses them: their registrations live as long as that.
#[test]
fn a_pool_dropped_under_a_transfer() {
    let site = Site::open();
    let pair = site.pair();
    let target = pair.right.memory(&[MIB]);
    let stream = scattered(128, 7, 8 * KIB);
    site.delay(ms(40));
    for _ in 0..5 {
        let arrival = Arc::new(Arrival::default());
        let memory = pair.left.memory(&[MIB]);
        memory.fill(0, 6);
        let expected = memory.bytes(&stream);
        let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
        let sent = pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()));
        drop(memory);
        arrival.wait(PATIENCE).expect("arrival");
        assert!(target.bytes(&stream) == expected);
        pair.left_log.arrived(sent.id);
        pair.left_link.forget(sent.id);
        assert_eq!(pair.left_log.lost().len(), 0);
    }
    site.clear();
    until("registrations are given up", || pair.left.counter("rdma_regions") == 0);
}

/// Keys of memory that is gone, and places outside of what is registered.
#[test]
fn memory_that_the_peer_does_not_have() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[256 * KIB]), pair.right.memory(&[256 * KIB]));
    memory.paint(&range(0, 256 * KIB), 0xee);
    let stale = {
        let gone = pair.right.memory(&[256 * KIB]);
        gone.keys()
    };
    std::thread::sleep(ms(200));
    let stream = range(0, 128 * KIB);
    target.paint(&stream, 1);
    for direction in [Direction::Write, Direction::Read] {
        pair.wait_for_rails(1);
        let slot = match direction {
            Direction::Write => pair.right.grant(stream.clone(), &target, None),
            Direction::Read => pair.left.grant(stream.clone(), &memory, None),
        };
        let sent = pair.push_with(&memory, stream.clone(), slot, &target, stream.clone(), |spec| {
            spec.remote = Some(Remote {
                direction,
                pool: PoolId(7),
                keys: stale.clone(),
            });
        });
        pair.left_log.refused(sent.id);
        let says = |error: &Error| error.kind() == ErrorKind::Protocol && error.to_string().contains("stale");
        // The loss follows once the queue pair is gone.
        until("the loss that says why", || {
            pair.left_log.lost().iter().any(|(_, _, error)| says(error))
        });
        assert!(target.is_all(&stream, 1) && memory.is_all(&stream, 0xee));
        pair.left_link.forget(sent.id);
        pair.left_log.clear();
        pair.right_log.clear();
    }
    // Outside of the region: never posted.
    pair.wait_for_rails(1);
    let outside = range(200 * KIB, 128 * KIB);
    let slot = pair.right.grant(stream.clone(), &target, None);
    let sent = pair.push(&memory, stream.clone(), slot, &target, outside);
    pair.left_log.refused(sent.id);
    pair.carry(&memory, &stream, &target, &stream);
    assert_eq!(pair.left_log.lost().len(), 0);
    // Keys that are none.
    let mut spec = pair.spec(pair.next_id(), &memory, slot, &target);
    spec.remote = Some(Remote {
        direction: Direction::Write,
        pool: PoolId(8),
        keys: vec![0xff; 100].into(),
    });
    assert_eq!(pair.left_link.submit(spec).unwrap_err().kind(), ErrorKind::Unsupported);
}

/// An endpoint that starts anew under the same name is another peer: links to the old one do not come back to it.
#[test]
fn a_peer_that_restarts() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    let stream = range(0, MIB);
    pair.carry(&memory, &stream, &target, &stream);
    let stale = target.keys();
    drop(target);
    pair.right.transport.shutdown();
    let right = node(3, site.config(1));
    let target = right.memory(&[MIB]);
    target.paint(&stream, 1);
    // The old link loses its rail and finds no other end.
    let slot = pair.right.slots.clone();
    drop(slot);
    let id = pair.next_id();
    let gone = right.grant(stream.clone(), &target, None);
    let mut spec = pair.spec(id, &memory, gone, &target);
    spec.remote = Some(Remote {
        direction: Direction::Write,
        pool: PoolId(0),
        keys: stale,
    });
    let _ = pair.left_link.submit(spec);
    std::thread::sleep(ms(300));
    assert!(target.is_all(&stream, 1), "written with an old key");
    pair.left_link.close();
    pair.left_log.closed();
}
