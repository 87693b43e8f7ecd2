//! Whatever breaks, networks, devices, rails or peers: nothing arrives twice, and what can go on goes on. On fakes, or on
//! soft-RoCE.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvxfer_core::flow::SlotTable;
use kvxfer_core::transport::{LinkEvent, Transport};
use kvxfer_core::{Error, ErrorKind};
use kvxfer_rdma::{RdmaConfig, RdmaTransport};
use support::*;

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
        pair.wait_for_rails(1);
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
        pair.wait_for_rails(1);
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
