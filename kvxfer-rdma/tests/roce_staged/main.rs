//! Pools whose memory no device is given: everything goes through staging buffers. On fakes, or on soft-RoCE.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod hung;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvxfer_core::ErrorKind;
use kvxfer_core::flow::Close;
use kvxfer_core::memory::Region;
use kvxfer_core::transport::LinkEvent;
use kvxfer_testkit::staged::StagedMemory;
use support::*;

/// Which sides' memory is staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sides {
    source: bool,
    destination: bool,
}

const SIDES: [Sides; 3] = [
    Sides {
        source: true,
        destination: false,
    },
    Sides {
        source: false,
        destination: true,
    },
    Sides {
        source: true,
        destination: true,
    },
];

/// A domain without a host view whose copies take up to this long; says at its end whether staging was misused.
struct Domain(Arc<StagedMemory>);

impl Domain {
    fn new(delay: Duration) -> Domain {
        Domain(StagedMemory::new(delay, 7).unwrap())
    }

    /// Memory of a node: this domain's, or the host's.
    fn memory(&self, node: &Node, staged: bool, lengths: &[u64]) -> Memory {
        let allocate = |length: &u64| match staged {
            true => self.0.allocate(*length).unwrap(),
            false => Region::allocate(*length).unwrap(),
        };
        node.memory_of(lengths.iter().map(allocate).collect())
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.0.violations(), Vec::<String>::new());
        }
    }
}

/// All buffers are back where they came from.
fn nothing_in_use(pair: &Pair) {
    until("staging buffers come back", || {
        pair.left.counter("staging_buffers_in_use") + pair.right.counter("staging_buffers_in_use") == 0
    });
}

#[test]
fn every_byte_goes_where_it_belongs() {
    let site = Site::open();
    for sides in SIDES {
        let domain = Domain::new(ms(2));
        let pair = site.pair();
        let bytes = 6 * MIB;
        let memory = domain.memory(&pair.left, sides.source, &[bytes]);
        let target = domain.memory(&pair.right, sides.destination, &[bytes]);
        let lengths = [1, 100, 4 * KIB + 1, 64 * KIB, MIB, 3 * MIB];
        for (round, length) in (0u64..).zip(lengths) {
            memory.fill(0, round + 1);
            target.paint(&range(0, bytes), 0xdd);
            let count = bytes / length;
            let (from, to) = match count {
                0..3 => (range(0, length), range(bytes - length, length)),
                _ => {
                    let count = count.min(1009);
                    let place = |step: u64| move |index: u64| index * step % count * length;
                    let odd = (0..count).map(place(1));
                    let other = (0..count).rev().map(place(1));
                    (pieces(odd, length), pieces(other, length))
                }
            };
            pair.carry(&memory, &from, &target, &to);
        }
        assert!(domain.0.copies_done() > 0, "nothing was staged");
        nothing_in_use(&pair);
    }
}

#[test]
fn a_pool_may_mix_memory_of_both_kinds() {
    let site = Site::open();
    let pair = site.pair();
    let domain = Domain::new(ms(1));
    let mixed = |node: &Node| {
        let regions = vec![
            Region::allocate(2 * MIB).unwrap(),
            domain.0.allocate(2 * MIB).unwrap(),
            Region::allocate(2 * MIB).unwrap(),
        ];
        node.memory_of(regions)
    };
    let (memory, target) = (mixed(&pair.left), mixed(&pair.right));
    let stream = |turn: u32| -> Stream {
        let segment = |index: u64| kvxfer_core::memory::Segment {
            region: (index as u32 + turn) % 3,
            offset: index / 3 * 10_000,
            length: 10_000,
        };
        Arc::new(Scattered((0..300).map(segment).collect()))
    };
    for round in 0..3 {
        (0..3).for_each(|region| memory.fill(region, round + region as u64));
        pair.carry(&memory, &stream(0), &target, &stream(round as u32));
    }
    nothing_in_use(&pair);
}

#[test]
fn two_that_send_to_each_other_with_one_buffer_to_send_from_do_not_wait_for_ever() {
    let site = Site::open();
    let domain = Domain::new(ms(1));
    let pair = site.pair_with(|config| config.staging_bytes_max = 4 * MIB);
    let bytes = site.choose(24, 6) * MIB;
    let left = domain.memory(&pair.left, true, &[2 * bytes]);
    let right = domain.memory(&pair.right, true, &[2 * bytes]);
    left.fill(0, 1);
    right.fill(0, 2);
    let (low, high) = (range(0, bytes), range(bytes, bytes));
    let (to_left, to_right) = (Arc::new(Arrival::default()), Arc::new(Arrival::default()));
    let into_left = pair.left.grant(high.clone(), &left, Some(to_left.clone()));
    let into_right = pair.right.grant(high.clone(), &right, Some(to_right.clone()));
    pair.left().push(pair.next_id(), &left, &low, into_right, &right, &high);
    pair.right().push(pair.next_id(), &right, &low, into_left, &left, &high);
    for arrival in [to_left, to_right] {
        arrival.wait(3 * PATIENCE).expect("arrival");
    }
    assert!(left.bytes(&low) == right.bytes(&high) && right.bytes(&low) == left.bytes(&high));
    for node in [&pair.left, &pair.right] {
        assert!(node.counter("staging_allocated_bytes") <= 4 * MIB);
    }
    nothing_in_use(&pair);
}

#[test]
fn many_at_once_both_ways() {
    let site = Site::open();
    let domain = Domain::new(ms(3));
    let pair = site.pair();
    let (count, each) = (site.choose(24, 8), 700 * KIB);
    let left = domain.memory(&pair.left, true, &[2 * count * each]);
    let right = domain.memory(&pair.right, true, &[2 * count * each]);
    left.fill(0, 1);
    right.fill(0, 2);
    let mut waiting = Vec::new();
    for index in 0..count {
        let (from, to) = (range(index * each, each), range((count + index) * each, each));
        let arrivals = [Arc::new(Arrival::default()), Arc::new(Arrival::default())];
        let into_right = pair.right.grant(to.clone(), &right, Some(arrivals[0].clone()));
        let into_left = pair.left.grant(to.clone(), &left, Some(arrivals[1].clone()));
        pair.left().push(pair.next_id(), &left, &from, into_right, &right, &to);
        pair.right().push(pair.next_id(), &right, &from, into_left, &left, &to);
        waiting.extend(arrivals);
    }
    for arrival in waiting {
        arrival.wait(3 * PATIENCE).expect("arrival");
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
    }
    let (low, high) = (range(0, count * each), range(count * each, count * each));
    assert!(left.bytes(&low) == right.bytes(&high) && right.bytes(&low) == left.bytes(&high));
    nothing_in_use(&pair);
}

#[test]
fn reads_go_through_staging_at_either_end() {
    let site = Site::open();
    for sides in SIDES {
        let pair = site.pair();
        let domain = Domain::new(ms(2));
        let bytes = 5 * MIB;
        let memory = domain.memory(&pair.left, sides.destination, &[bytes]);
        let target = domain.memory(&pair.right, sides.source, &[bytes]);
        for (round, length) in (0u64..).zip([64 * KIB, 1000, MIB, 5 * MIB]) {
            target.fill(0, round + 1);
            let stream = scattered(bytes / length, 1, length);
            pair.fetch(&memory, &stream, &target, &stream);
        }
        assert!(domain.0.copies_done() > 0, "nothing was staged");
        nothing_in_use(&pair);
    }
}

/// What does not fit a message is refused, to that transfer alone.
#[test]
fn reads_of_too_many_small_pieces_are_refused() {
    let site = Site::open();
    let pair = site.pair();
    let domain = Domain::new(ms(1));
    let (memory, target) = (pair.left.memory(&[MIB]), domain.memory(&pair.right, true, &[MIB]));
    let tiny = pieces((0..8192).map(|index| index * 5 % 8192 * 128), 128);
    let slot = pair.left.grant(range(0, MIB), &memory, None);
    let sent = pair.pull(&memory, slot, range(0, MIB), &target, tiny);
    let error = pair.left_log.wait("the failure", |event| match event {
        LinkEvent::MemoryFailed { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    sent.gate.close();
    pair.left_link.stop(sent.id);
    pair.left_log.quiet(sent.id);
    pair.left.take_back(&pair.left_link, slot);
    target.fill(0, 9);
    pair.fetch(&memory, &range(0, MIB), &target, &range(0, MIB));
    nothing_in_use(&pair);
}

/// A pool that goes while it is read: the reader is told why, and nothing is copied out of it any more.
#[test]
fn reads_of_a_pool_that_is_gone_fail_with_the_reason() {
    let site = Site::open();
    let pair = site.pair();
    let domain = Domain::new(ms(1));
    let (memory, target) = (pair.left.memory(&[MIB]), domain.memory(&pair.right, true, &[MIB]));
    let keys = target.keys();
    drop(target);
    let slot = pair.left.grant(range(0, MIB), &memory, None);
    let sent = Push::new(77, slot, &memory, range(0, MIB))
        .one_sided(kvxfer_core::flow::Direction::Read, keys, range(0, MIB))
        .submit(&pair.left_link);
    let error = pair.left_log.wait("the failure", |event| match event {
        LinkEvent::MemoryFailed { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::NotRegistered, "{error}");
    assert!(
        error.to_string().contains("no pool in use that serves has it"),
        "{error}"
    );
    sent.gate.close();
    pair.left_link.stop(sent.id);
    pair.left_log.quiet(sent.id);
    pair.left.take_back(&pair.left_link, slot);
    nothing_in_use(&pair);
}

/// Takes slots back while they are being read into, through buffers and copies at either end, and uses the blocks again.
#[test]
fn blocks_taken_back_are_never_read_into_again() {
    for sides in SIDES {
        let site = Site::with(&[("*", "late_placement_us", "1500"), ("*", "order", "shuffled")]);
        let pair = site.pair();
        let domain = Domain::new(ms(3));
        let (rounds, areas, bytes) = (site.choose(100, 20), 4u64, 256 * KIB);
        let memory = domain.memory(&pair.left, sides.destination, &[areas * bytes]);
        let target = domain.memory(&pair.right, sides.source, &[bytes]);
        let source = scattered(16, 7, bytes / 16);
        target.paint(&source, 0xee);
        let paint = |round: u64| (round % 200) as u8;
        site.delay(site.choose(Duration::from_micros(300), ms(3)));
        for round in 0..rounds {
            let stream = range(round % areas * bytes, bytes);
            if round >= areas {
                assert!(
                    memory.is_all(&stream, paint(round - areas)),
                    "read into after it was taken back: {round}"
                );
            }
            let slot = pair.left.grant(stream.clone(), &memory, None);
            let sent = pair.pull(&memory, slot, stream.clone(), &target, source.clone());
            std::thread::sleep(Duration::from_micros(round % 12 * 700));
            pair.left.take_back(&pair.left_link, slot);
            sent.gate.close();
            pair.left_link.stop(sent.id);
            pair.left_log.quiet(sent.id);
            memory.paint(&stream, paint(round));
            assert!(pair.left.slots.release(slot.0, slot.1));
            pair.left_log.clear();
        }
        nothing_in_use(&pair);
    }
}

#[test]
fn checksums_see_staged_bytes() {
    let site = Site::open();
    for sides in SIDES {
        let domain = Domain::new(ms(1));
        let pair = site.pair();
        let memory = domain.memory(&pair.left, sides.source, &[3 * MIB]);
        let target = domain.memory(&pair.right, sides.destination, &[3 * MIB]);
        memory.fill(0, 5);
        let (from, to) = (scattered(192, 7, 16 * KIB), scattered(192, 5, 16 * KIB));
        pair.carry_with(&memory, &from, &target, &to, |spec| spec.checksum = true);
        let corrupt = pair
            .right_log
            .count(|event| matches!(event, LinkEvent::SlotCorrupt { .. }));
        assert_eq!(corrupt, 0);
    }
}

/// Takes slots back while their bytes are on their way, in buffers and copies at either end, and uses the blocks again.
#[test]
fn blocks_taken_back_are_never_written_again() {
    for sides in SIDES {
        let site = Site::with(&[("*", "late_placement_us", "1500"), ("*", "order", "shuffled")]);
        let pair = site.pair();
        let domain = Domain::new(ms(3));
        let (rounds, areas, bytes) = (site.choose(150, 30), 4u64, 256 * KIB);
        let memory = domain.memory(&pair.left, sides.source, &[bytes]);
        let target = domain.memory(&pair.right, sides.destination, &[areas * bytes]);
        let source = scattered(16, 7, bytes / 16);
        memory.paint(&source, 0xee);
        let paint = |round: u64| (round % 200) as u8;
        site.delay(site.choose(Duration::from_micros(300), ms(3)));
        let mut waited = 0;
        for round in 0..rounds {
            let stream = range(round % areas * bytes, bytes);
            if round >= areas {
                assert!(
                    target.is_all(&stream, paint(round - areas)),
                    "written after it was taken back: {round}"
                );
            }
            let slot = pair.right.grant(stream.clone(), &target, None);
            let sent = pair.push(&memory, source.clone(), slot, &target, stream.clone());
            // At every stage of it.
            std::thread::sleep(Duration::from_micros(round % 12 * 500));
            if round % 2 == 1 {
                sent.gate.close();
                pair.left_link.stop(sent.id);
            }
            let close = pair.right.take_back(&pair.right_link, slot);
            waited += u64::from(close == Close::Waiting);
            if round % 2 == 0 {
                sent.gate.close();
                pair.left_link.stop(sent.id);
            }
            pair.left_log.quiet(sent.id);
            // The source is free as well.
            until("the source's fence", || sent.gate.fenced());
            target.paint(&stream, paint(round));
            assert!(pair.right.slots.release(slot.0, slot.1));
            pair.left_log.clear();
            pair.right_log.clear();
        }
        println!("{sides:?}: {waited} of {rounds} were under way");
        assert!(
            waited * 4 > rounds,
            "{sides:?}: only {waited} of {rounds} were under way"
        );
        nothing_in_use(&pair);
    }
}

#[test]
fn a_silent_writers_landings_are_fenced_with_its_queue_pair() {
    let site = Site::with(&[("*", "late_placement_us", "50000"), ("*", "flush_scope", "region")]);
    let pair = site.pair_with(|config| {
        slow_to_give_up(config);
        config.staging_bytes_max = 4 * MIB;
    });
    let domain = Domain::new(ms(1));
    let memory = domain.memory(&pair.left, true, &[256 * KIB]);
    let target = domain.memory(&pair.right, true, &[256 * KIB]);
    let stream = range(0, 256 * KIB);
    memory.paint(&stream, 0xee);
    for round in 0..3 {
        pair.wait_for_rails(1);
        site.delay(ms(site.choose(20, 60)));
        let slot = pair.right.grant(stream.clone(), &target, None);
        pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()));
        pair.left_log.hold();
        let close = pair.right.take_back(&pair.right_link, slot);
        assert_eq!(close, Close::Waiting);
        target.paint(&stream, round);
        pair.left_log.release();
        std::thread::sleep(ms(100));
        assert!(target.is_all(&stream, round), "written after its fence");
        site.clear();
        // The one landing is used by others, with what they write.
        pair.wait_for_rails(1);
        let other = domain.memory(&pair.left, true, &[256 * KIB]);
        other.fill(0, u64::from(round));
        pair.carry(&other, &stream, &target, &stream);
    }
    nothing_in_use(&pair);
}

#[test]
fn what_was_on_a_lost_rail_is_sent_again() {
    let site = Site::open();
    let all = SIDES.map(|sides| [(sides, false), (sides, true)]);
    for (sides, read) in all.into_iter().flatten() {
        let pair = site.pair_with(slow_to_give_up);
        let domain = Domain::new(ms(4));
        let bytes = site.choose(6, 2) * MIB;
        let memory = domain.memory(&pair.left, sides.source, &[bytes]);
        let target = domain.memory(&pair.right, sides.destination, &[bytes]);
        let (from, to) = (scattered(64, 7, bytes / 64), scattered(64, 5, bytes / 64));
        for (round, device) in (1..).zip([0usize, 1, 1]) {
            pair.wait_for_rails(1);
            memory.fill(0, round);
            target.fill(0, round + 100);
            site.delay(ms(site.choose(10, 100)));
            let arrival = Arc::new(Arrival::default());
            let start = || match read {
                true => {
                    let slot = pair.left.grant(from.clone(), &memory, Some(arrival.clone()));
                    pair.pull(&memory, slot, from.clone(), &target, to.clone())
                }
                false => {
                    let slot = pair.right.grant(to.clone(), &target, Some(arrival.clone()));
                    pair.push(&memory, from.clone(), slot, &target, to.clone())
                }
            };
            let sent = pair.posted(start);
            site.down(device);
            pair.left_log.wait("loss", |event| {
                matches!(event, LinkEvent::LaneLost { .. }).then_some(())
            });
            site.up(device);
            site.clear();
            arrival
                .wait(2 * PATIENCE)
                .unwrap_or_else(|| panic!("no arrival: {:?}, {:?}", pair.left_log.tail(), pair.right_log.tail()));
            pair.left_log.arrived(sent.id);
            assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
            assert!(memory.bytes(&from) == target.bytes(&to), "{sides:?}, read: {read}");
            pair.left_log.clear();
            pair.right_log.clear();
        }
        nothing_in_use(&pair);
    }
}

#[test]
fn a_link_that_closes_waits_for_its_copies() {
    let site = Site::open();
    for sides in SIDES {
        let domain = Domain::new(ms(60));
        let pair = site.pair();
        let memory = domain.memory(&pair.left, sides.source, &[8 * MIB]);
        let target = domain.memory(&pair.right, sides.destination, &[8 * MIB]);
        let stream = range(0, 8 * MIB);
        let slot = pair.right.grant(stream.clone(), &target, None);
        let sent = pair.push(&memory, stream.clone(), slot, &target, stream);
        std::thread::sleep(ms(15));
        pair.close();
        pair.left_log.closed();
        sent.gate.close();
        assert!(sent.gate.fenced(), "the source is still being read");
        pair.right_log.closed();
        pair.right.slots.close(slot.0, slot.1);
        assert!(
            pair.right.slots.fenced(slot.0, slot.1),
            "the destination is still being written"
        );
        nothing_in_use(&pair);
    }
}

#[test]
fn copies_that_fail_end_what_they_were_for_alone() {
    let site = Site::open();
    for sides in &SIDES[..2] {
        let pair = site.pair();
        let domain = Domain::new(ms(1));
        let (failing, region) = Failing::allocate(&domain.0, 2 * MIB);
        let good = if sides.source { &pair.right } else { &pair.left }.memory(&[2 * MIB]);
        let bad = if sides.source { &pair.left } else { &pair.right }.memory_of(vec![region]);
        let (memory, target) = if sides.source { (&bad, &good) } else { (&good, &bad) };
        let stream = range(0, 2 * MIB);
        failing.fails.store(true, Ordering::SeqCst);
        let arrival = Arc::new(Arrival::default());
        let slot = pair.right.grant(stream.clone(), target, Some(arrival.clone()));
        let sent = pair.push(memory, stream.clone(), slot, target, stream.clone());
        let log = if sides.source { &pair.left_log } else { &pair.right_log };
        let error = log.wait("the failure", |event| match event {
            LinkEvent::MemoryFailed { error, .. } | LinkEvent::SlotCorrupt { error, .. } => Some(error.clone()),
            _ => None,
        });
        assert!(error.to_string().contains("the copy failed"), "{error}");
        sent.gate.close();
        pair.left_link.stop(sent.id);
        pair.left_log.quiet(sent.id);
        pair.right.slots.close(slot.0, slot.1);
        pair.right_link.revoke(slot.0, slot.1);
        until("the slot's fence", || pair.right.slots.fenced(slot.0, slot.1));
        assert!(arrival.wait(Duration::ZERO).is_none() && sent.gate.fenced());
        // Everything goes on.
        failing.fails.store(false, Ordering::SeqCst);
        memory.fill(0, 3);
        pair.carry(memory, &stream, target, &stream);
        nothing_in_use(&pair);
    }
}

#[test]
fn a_peer_that_keeps_its_landings_leaves_others_theirs() {
    let site = Site::open();
    let domain = Domain::new(ms(1));
    let small = |config: &mut kvxfer_rdma::RdmaConfig| config.staging_bytes_max = 8 * MIB;
    // The right node's one device has two peers.
    let mut configs = [site.config(0), site.config(1), site.config(0)];
    configs.iter_mut().for_each(small);
    let [first, middle, second] = configs;
    let (left, right, other) = (node(1, first), node(2, middle), node(3, second));
    let ends = |from: &Node, token| {
        let ends = kvxfer_testkit::transport::Ends::join(
            from,
            right.peer(from, token, true),
            &right,
            from.peer(&right, token, false),
        );
        ends.up();
        ends
    };
    let (of_left, of_other) = (ends(&left, 7), ends(&other, 8));
    let target = domain.memory(&right, true, &[16 * MIB]);
    let source = domain.memory(&left, true, &[8 * MIB]);
    let (low, high) = (range(0, 8 * MIB), range(8 * MIB, 8 * MIB));
    // It asks for landings, and then is silent.
    let slot = right.grant(low.clone(), &target, None);
    of_left.right_link.admit(slot.0, slot.1);
    std::thread::sleep(ms(50));
    of_left.right_log.hold();
    Push::new(1, slot, &source, low.clone())
        .one_sided(kvxfer_core::flow::Direction::Write, target.keys(), low.clone())
        .submit(&of_left.left_link);
    until("landings are given", || right.counter("staging_buffers_in_use") > 0);
    let source = domain.memory(&other, true, &[8 * MIB]);
    source.fill(0, 4);
    let arrival = Arc::new(Arrival::default());
    let slot = right.grant(high.clone(), &target, Some(arrival.clone()));
    Push::new(2, slot, &source, low.clone())
        .one_sided(kvxfer_core::flow::Direction::Write, target.keys(), high.clone())
        .submit(&of_other.left_link);
    let arrived = arrival.wait(PATIENCE);
    of_left.right_log.release();
    assert!(arrived.is_some(), "a silent peer held all landings");
    assert!(source.bytes(&low) == target.bytes(&high));
    of_left.close();
    of_other.close();
}
