//! Whatever breaks: nothing lands late, nothing arrives twice, and what can go on goes on. On fakes, or on soft-RoCE.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvxfer_core::flow::{Close, Direction, Remote, SlotTable};
use kvxfer_core::transport::{LinkEvent, Transport};
use kvxfer_core::{Error, ErrorKind, PoolId};
use kvxfer_rdma::{RdmaConfig, RdmaTransport};
use support::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Whether all bytes of a stream are this one.
fn is_all(memory: &Memory, stream: &Stream, byte: u8) -> bool {
    memory.bytes(stream).iter().all(|&other| other == byte)
}

fn rail_is_up(pair: &Pair) {
    until("the rail is up", || {
        pair.left_link.path().rails.len() == 1 && pair.right_link.path().rails.len() == 1
    });
}

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
                is_all(&target, &stream, paint(round - areas)),
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
            is_all(&target, &area(round), paint(round)),
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

fn slow_to_give_up(config: &mut RdmaConfig) {
    config.revoke = ms(100);
    // 0.54 s each: packets that are only late are not lost.
    config.timeout = 17;
    config.progress = Duration::from_secs(3);
}

fn fence_a_silent_writer(site: &Site, pair: &Pair, delay: Duration) {
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    let stream = scattered(128, 7, 8 * KIB);
    for round in 0..3u8 {
        rail_is_up(pair);
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
        assert!(is_all(&target, &stream, round), "written after it was fenced");
        let lost = pair.right_log.lost();
        assert_eq!((lost.len(), lost[0].0.epoch), (1, u32::from(round) + 1), "{lost:?}");
        assert!(lost[0].2.to_string().contains("did not confirm"), "{}", lost[0].2);

        // It wakes up.
        site.clear();
        pair.left_log.release();
        pair.left_log.refused(sent.id);
        rail_is_up(pair);
        assert!(is_all(&target, &stream, round), "written after it was fenced");
        memory.fill(0, round.into());
        pair.carry(&memory, &stream, &target, &stream);
        pair.left_log.clear();
        pair.right_log.clear();
    }
}

/// A link that goes down under a transfer, on either side, and comes back.
#[test]
fn a_port_that_goes_down_and_comes_back() {
    let site = Site::open();
    let pair = site.pair_with(slow_to_give_up);
    let (count, length) = (64, site.choose(64, 8) * KIB);
    let (memory, target) = (
        pair.left.memory(&[count * length]),
        pair.right.memory(&[count * length]),
    );
    let (source, destination) = (scattered(count, 7, length), scattered(count, 5, length));
    for (device, read) in [(0, false), (1, false), (0, true), (1, true)] {
        rail_is_up(&pair);
        memory.fill(0, device as u64 + 1);
        target.fill(0, device as u64 + 7);
        site.delay(ms(site.choose(30, 150)));
        let arrival = Arc::new(Arrival::default());
        let posted = pair.left.counter("rail_requests_total");
        let sent = if read {
            let slot = pair.left.grant(source.clone(), &memory, Some(arrival.clone()));
            pair.pull(&memory, slot, source.clone(), &target, destination.clone())
        } else {
            let slot = pair.right.grant(destination.clone(), &target, Some(arrival.clone()));
            pair.push(&memory, source.clone(), slot, &target, destination.clone())
        };
        until("posted", || pair.left.counter("rail_requests_total") > posted);
        site.down(device);
        pair.left_log.wait("loss", |event| {
            matches!(event, LinkEvent::LaneLost { .. }).then_some(())
        });
        assert!(arrival.wait(ms(100)).is_none(), "it arrived over a link that is down");
        site.up(device);
        arrival.wait(PATIENCE).expect("arrival");
        pair.left_log.arrived(sent.id);
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
        assert!(
            memory.bytes(&source) == target.bytes(&destination),
            "device {device}, read: {read}"
        );
        pair.left_log.clear();
        pair.right_log.clear();
    }
    site.clear();
}

/// Packets vanish and nobody says so.
#[test]
fn a_network_that_swallows_everything() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    memory.fill(0, 2);
    let stream = scattered(128, 7, 8 * KIB);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    site.lose_everything();
    let began = Instant::now();
    let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    let error = pair.left_log.wait("loss", |event| match event {
        LinkEvent::LaneLost { error, chunks, .. } if !chunks.is_empty() => Some(error.clone()),
        _ => None,
    });
    assert!(began.elapsed() < Duration::from_secs(3), "after {:?}", began.elapsed());
    assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
    assert!(arrival.wait(ms(50)).is_none());
    site.clear();
    arrival.wait(PATIENCE).expect("arrival");
    pair.left_log.arrived(sent.id);
    assert!(memory.bytes(&stream) == target.bytes(&stream));
    assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
}

/// A device that reports nothing any more, although it does its work.
#[test]
fn completions_that_do_not_come() {
    let site = Site::open();
    let Some(fabric) = site.fakes() else { return };
    let pair = site.pair_with(|config| config.progress = ms(300));
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    memory.fill(0, 2);
    let stream = range(0, MIB);
    pair.carry(&memory, &range(0, 1), &target, &range(0, 1));
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    fabric.set_now("fake0", "completions", "withhold").unwrap();
    let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    let error = pair.left_log.wait("loss", |event| match event {
        LinkEvent::LaneLost { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert!(
        error.to_string().contains("nothing was completed for 300 ms"),
        "{error}"
    );
    fabric.set_now("fake0", "completions", "deliver").unwrap();
    arrival.wait(PATIENCE).expect("arrival");
    pair.left_log.arrived(sent.id);
    assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
    assert!(memory.bytes(&stream) == target.bytes(&stream));
    until("the rail is back", || pair.left_link.path().rails.len() == 1);
    pair.carry(&memory, &stream, &target, &stream);
}

/// A peer's device that stays silent gives no sign of life on its own side either: what is received is no progress of
/// what was sent.
#[test]
fn receiving_is_not_progress_of_sending() {
    let site = Site::open();
    let Some(fabric) = site.fakes() else { return };
    let pair = site.pair_with(|config| config.progress = ms(400));
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    let stream = range(0, 64 * KIB);
    let slot = pair.right.grant(stream.clone(), &target, None);
    // What the left side writes is not reported as done; what the right side writes comes.
    fabric.set_now("fake0", "complete_with", "off").unwrap();
    fabric.set_now("fake1", "retry_exceeded", "off").unwrap();
    fabric.set_now("fake0", "retry_exceeded", "off").unwrap();
    fabric.set_now("fake1", "network_hold", "on").unwrap();
    let began = Instant::now();
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    let lost = || !pair.left_log.lost().is_empty();
    let mut arrived = 0;
    while !lost() && began.elapsed() < Duration::from_secs(5) {
        let back = pair.left.grant(range(0, 64), &memory, None);
        pair.right()
            .push(pair.next_id(), &target, &range(0, 64), back, &memory, &range(0, 64));
        until("the other direction, or the end", || {
            let progress = pair.left.slots.progress(back.0, back.1).unwrap();
            arrived += u64::from(progress.arrived);
            progress.arrived || lost()
        });
        std::thread::sleep(ms(20));
    }
    println!("{arrived} came the other way");
    assert!(lost(), "never noticed");
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "noticed after {:?}",
        began.elapsed()
    );
    fabric.set_now("fake1", "network_hold", "off").unwrap();
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
        rail_is_up(&pair);
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
        assert!(is_all(&target, &stream, 1) && is_all(&memory, &stream, 0xee));
        pair.left_link.forget(sent.id);
        pair.left_log.clear();
        pair.right_log.clear();
    }
    // Outside of the region: never posted.
    rail_is_up(&pair);
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

/// No rail comes up: the link says so in time, and why.
#[test]
fn a_peer_that_cannot_be_reached() {
    let site = Site::open();
    let (left, right) = site.nodes(1, |config| {
        config.setup_limit = ms(1500);
        config.connect_timeout = ms(600);
    });
    site.lose_everything();
    let began = Instant::now();
    let pair = Pair::new(left, right);
    for log in [&pair.left_log, &pair.right_log] {
        let error = log.wait("failure", |event| match event {
            LinkEvent::Failed(error) => Some(error.clone()),
            _ => None,
        });
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        assert_eq!(error.kind(), ErrorKind::Transport);
        let text = error.to_string();
        assert!(text.contains("no rail came up") && text.contains("rail 0"), "{text}");
        log.closed();
        assert_eq!(log.count(|event| matches!(event, LinkEvent::Up)), 0);
    }
    site.clear();
}

/// A peer that never answers on the session.
#[test]
fn a_peer_that_does_not_answer() {
    let site = Site::open();
    let (left, right) = site.nodes(1, |config| config.setup_limit = ms(500));
    let nobody = Arc::new(Log::default());
    let link = left
        .transport
        .connect(right.peer(&left, 1, true), nobody.clone())
        .unwrap();
    let error = nobody.wait("failure", |event| match event {
        LinkEvent::Failed(error) => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::Transport);
    nobody.closed();
    assert_eq!(left.transport.links(), 0);
    drop(link);
}

#[test]
fn devices_that_are_not_there() {
    let site = Site::open();
    let error = |change: &dyn Fn(&mut RdmaConfig)| -> Error {
        let mut config = site.config(0);
        change(&mut config);
        RdmaTransport::new(config, SlotTable::new(4))
            .err()
            .expect("it was made")
    };
    let missing = error(&|config| config.devices = vec!["mlx5_17".into()]);
    assert_eq!(missing.kind(), ErrorKind::Unsupported, "{missing}");
    assert!(missing.to_string().contains("mlx5_17"), "{missing}");
    let library = error(&|config| config.library = Some("/nonexistent/libibverbs.so.1".into()));
    assert_eq!(library.kind(), ErrorKind::Unsupported, "{library}");
    assert!(
        library.to_string().contains("/nonexistent/libibverbs.so.1"),
        "{library}"
    );
    site.down(0);
    std::thread::sleep(ms(50));
    let down = error(&|_| {});
    assert_eq!(down.kind(), ErrorKind::Unsupported, "{down}");
    assert!(down.to_string().to_lowercase().contains("down"), "{down}");
    site.up(0);
}

#[test]
fn devices_that_cannot_be_used() {
    for (key, value, said) in [
        ("gids", "none", "gid"),
        ("transport", "iwarp", "iwarp"),
        ("fail", "open_device:EPERM", "EPERM"),
        ("fail", "alloc_pd:ENOMEM", "ENOMEM"),
        ("max_qp_wr", "4", "too few"),
    ] {
        let site = Site::with(&[("*", key, value)]);
        if site.fakes().is_none() {
            return;
        }
        let error = RdmaTransport::new(site.config(0), SlotTable::new(4)).err().expect(key);
        let text = error.to_string();
        assert!(
            matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::ResourceExhausted),
            "{key}: {text}"
        );
        assert!(text.to_lowercase().contains(&said.to_lowercase()), "{key}: {text}");
    }
}

/// Memory that may not be locked: the pool is refused, and what is there goes on.
#[test]
fn memory_that_may_not_be_locked() {
    let site = Site::open();
    let Some(fabric) = site.fakes() else { return };
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory(&[64 * KIB]));
    fabric.set_now("fake0", "memlock_bytes", "100000").unwrap();
    let region = kvxfer_core::memory::Region::allocate(MIB).unwrap();
    let access = kvxfer_core::transport::RegionAccess {
        serves: true,
        receives: true,
    };
    let error = pair
        .left
        .transport
        .register(&[region], access)
        .err()
        .expect("it was registered");
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{error}");
    assert!(error.to_string().contains("ENOMEM"), "{error}");
    pair.carry(&memory, &range(0, 64 * KIB), &target, &range(0, 64 * KIB));
}

/// A device that dies: the link over it has failed, on both sides all is quiet that can be.
#[test]
fn a_device_that_dies() {
    let site = Site::open();
    let Some(fabric) = site.fakes() else { return };
    for device in 0..2 {
        let pair = site.pair();
        let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
        let stream = range(0, MIB);
        pair.carry(&memory, &stream, &target, &stream);
        let (mine, others) = match device {
            0 => (&pair.left_log, &pair.right_log),
            _ => (&pair.right_log, &pair.left_log),
        };
        let event = format!("device_fatal #{device}");
        fabric.set_now(&format!("fake{device}"), "event", &event).unwrap();
        let error = mine.wait("failure", |event| match event {
            LinkEvent::Failed(error) => Some(error.clone()),
            _ => None,
        });
        assert!(error.to_string().contains("fatal"), "{error}");
        mine.closed();
        others.wait("loss", |event| {
            matches!(event, LinkEvent::LaneLost { .. }).then_some(())
        });
        pair.left_link.close();
        pair.right_link.close();
        others.closed();
    }
}

/// A queue pair that fails by itself is replaced.
#[test]
fn a_request_that_fails() {
    let site = Site::open();
    let Some(fabric) = site.fakes() else { return };
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[MIB]), pair.right.memory(&[MIB]));
    memory.fill(0, 1);
    let stream = scattered(128, 7, 8 * KIB);
    // Before or after it was carried out: the sender cannot know.
    for (status, kind) in [
        ("RETRY_EXC_ERR:1", ErrorKind::Transport),
        ("RETRY_EXC_ERR:1:after", ErrorKind::Transport),
        ("RNR_RETRY_EXC_ERR:1", ErrorKind::Transport),
        ("GENERAL_ERR:1:after", ErrorKind::Transport),
        ("FATAL_ERR:1", ErrorKind::Transport),
    ] {
        rail_is_up(&pair);
        target.paint(&stream, 0);
        let arrival = Arc::new(Arrival::default());
        let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
        fabric.set_now("fake0", "complete_with", status).unwrap();
        let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
        arrival.wait(PATIENCE).expect("arrival");
        pair.left_log.arrived(sent.id);
        assert!(memory.bytes(&stream) == target.bytes(&stream), "{status}");
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
        until("the loss is told", || !pair.left_log.lost().is_empty());
        assert_eq!(pair.left_log.lost()[0].2.kind(), kind, "{status}");
        fabric.set_now("fake0", "complete_with", "off").unwrap();
        pair.left_log.clear();
    }
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
        is_all(&target, &pushed, 1) && is_all(&memory, &pulled, 2),
        "written after the link had ended"
    );
    site.clear();
}

/// One of two rails goes: its work goes on over the other, and it joins in again.
#[test]
fn one_of_two_rails_goes_and_comes_back() {
    let site = Site::open();
    if site.rails() < 2 {
        println!("skipped: there is one pair of devices");
        return;
    }
    let (left, right) = site.nodes(2, slow_to_give_up);
    let pair = Pair::new(left, right).up();
    let both = || pair.left_link.path().rails.len() == 2 && pair.right_link.path().rails.len() == 2;
    let (count, length) = (64, site.choose(128, 16) * KIB);
    let (memory, target) = (
        pair.left.memory(&[count * length]),
        pair.right.memory(&[count * length]),
    );
    let (source, destination) = (scattered(count, 7, length), scattered(count, 5, length));
    // An rxe device whose own interface is down cannot be flushed before that is up again: so only the sender's there.
    for device in site.choose([0, 3], [0, 2]) {
        until("two rails", both);
        site.delay(ms(site.choose(20, 100)));
        memory.fill(0, device as u64);
        target.paint(&destination, 0);
        let arrival = Arc::new(Arrival::default());
        let posted = pair.left.counter("rail_requests_total");
        let slot = pair.right.grant(destination.clone(), &target, Some(arrival.clone()));
        let sent = pair.push(&memory, source.clone(), slot, &target, destination.clone());
        until("posted", || pair.left.counter("rail_requests_total") > posted + 2);
        site.down(device);
        arrival.wait(PATIENCE).expect("arrival over the other rail");
        pair.left_log.arrived(sent.id);
        assert!(memory.bytes(&source) == target.bytes(&destination));
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
        site.clear();
        until("the loss of a rail", || !pair.left_log.lost().is_empty());
        assert_eq!(pair.left_link.path().rails.len(), 1, "{:?}", pair.left_link.path());
        pair.carry(&memory, &source, &target, &destination);
        site.up(device);
        until("two rails again", both);
        pair.left_log.clear();
        pair.right_log.clear();
    }
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
        let posted = pair.left.counter("rail_requests_total");
        let slot = pair.right.grant(stream.clone(), &target, None);
        let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
        until("posted", || pair.left.counter("rail_requests_total") > posted);
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
        let posted = pair.left.counter("rail_requests_total");
        let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
        until("posted", || pair.left.counter("rail_requests_total") > posted);
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
    let right = Node::new(3, site.config(1));
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
    assert!(is_all(&target, &stream, 1), "written with an old key");
    pair.left_link.close();
    pair.left_log.closed();
}
