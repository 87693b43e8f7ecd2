//! What goes wrong between honest peers: cancels, lost lanes, slow and dead peers, closing in traffic.
// Helpers of tests unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvxfer_core::ErrorKind;
use kvxfer_core::flow::{Close, SendEvent, TransferId};
use kvxfer_core::transport::{Link, LinkEvent, Transport};
use kvxfer_tcp::TcpConfig;
use support::*;

in_every_world!(
    a_cancelled_grant_is_fenced_at_once_and_its_blocks_can_be_reused,
    a_source_taken_back_midway_never_counts,
    a_lost_lane_is_resumed_behind_its_fence,
    a_lane_that_dies_again_and_again_loses_nothing,
    a_stalled_peer_delays_no_other,
    closing_in_traffic_ends_all_touching,
);

const MIB: usize = 1 << 20;

fn a_cancelled_grant_is_fenced_at_once_and_its_blocks_can_be_reused(world: &World) {
    let proxy = world.proxy();
    let pair = world.through(small_buffers(), &proxy);
    let pool = 16 * MIB as u64;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let from = Arc::new(random_pieces(1, pool, 1000, 8192));
    let to = Arc::new(random_pieces(2, pool, 1000, 8192));
    write_stream(&source, &*from, &pattern(1, 8_192_000));
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(to.clone(), &destination, Some(arrival.clone()));
    proxy.stall_after(700_000);
    let Sent { id, gate } = Push::new(1, slot, &source, from.clone()).submit(&pair.left_link);
    proxy.stalled();

    // Bytes are outstanding, in the middle of a chunk, and the receiver takes its blocks back.
    let close = pair.right.slots.close(slot.0, slot.1);
    if close == Close::Waiting {
        pair.right_log.wait("fence", |event| {
            (matches!(event, LinkEvent::SlotQuiet) && pair.right.slots.fenced(slot.0, slot.1)).then_some(())
        });
    } else {
        assert_eq!(close, Close::Fenced);
    }
    assert!(pair.right.slots.fenced(slot.0, slot.1));
    let reused = pattern(99, 8_192_000);
    write_stream(&destination, &*to, &reused);

    // The rest comes, and is thrown away.
    let passed = proxy.passed();
    proxy.resume();
    pair.left_log.refused(id);
    assert!(proxy.passed() > passed, "bytes were outstanding");
    gate.close();
    pair.left_link.stop(id);
    pair.left_log.quiet(id);
    assert!(read_stream(&destination, &*to) == reused, "a late write");
    assert!(arrival.wait(Duration::ZERO).is_none());
    assert!(pair.right.slots.release(slot.0, slot.1));

    // The lanes are clean: the next grant of the same blocks arrives over them.
    let bytes = pattern(3, 8_192_000);
    write_stream(&source, &*from, &bytes);
    let slot = pair.right.grant(to.clone(), &destination, None);
    let Sent { id, .. } = Push::new(2, slot, &source, from).submit(&pair.left_link);
    pair.left_log.arrived(id);
    assert!(read_stream(&destination, &*to) == bytes);
    assert_eq!(pair.left_log.lost().len() + pair.right_log.lost().len(), 0);
}

fn a_source_taken_back_midway_never_counts(world: &World) {
    let proxy = world.proxy();
    let pair = world.through(small_buffers(), &proxy);
    let pool = 16 * MIB as u64;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let from = Arc::new(random_pieces(1, pool, 4, 2 * MIB as u64));
    let to = Arc::new(random_pieces(2, pool, 4, 2 * MIB as u64));
    write_stream(&source, &*from, &pattern(1, 8 * MIB));
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(to.clone(), &destination, Some(arrival.clone()));
    proxy.stall_after(300_000);
    let Sent { id, gate } = Push::new(1, slot, &source, from.clone()).submit(&pair.left_link);
    proxy.stalled();
    gate.close();
    pair.left_link.stop(id);
    let end = Instant::now() + Duration::from_secs(2);
    while !gate.fenced() {
        assert!(Instant::now() < end, "nobody stays inside a closed gate");
        std::thread::sleep(Duration::from_millis(1));
    }
    // From here on the source is somebody else's.
    let reused = pattern(42, pool as usize);
    source[0].copy_in(0, &reused).unwrap();
    assert_eq!(
        pair.left_log
            .count(|event| matches!(event, LinkEvent::Send(SendEvent::Quiet(_)))),
        0,
        "chunks are out"
    );
    proxy.resume();
    pair.left_log.quiet(id);

    // Chunks that were begun were filled up and did not count; whole ones carry the bytes of before.
    let progress = pair.right.slots.progress(slot.0, slot.1).unwrap();
    assert!(
        !progress.arrived && progress.applied_bytes < 8 * MIB as u64,
        "{progress:?}"
    );
    assert!(arrival.wait(Duration::ZERO).is_none());
    assert_eq!(pair.right.slots.close(slot.0, slot.1), Close::Fenced);
    assert!(pair.right.slots.release(slot.0, slot.1));
    let slot = pair.right.grant(to.clone(), &destination, None);
    let Sent { id, .. } = Push::new(2, slot, &source, from.clone()).submit(&pair.left_link);
    pair.left_log.arrived(id);
    assert!(read_stream(&destination, &*to) == read_stream(&source, &*from));
    assert_eq!(
        pair.left_log.lost().len() + pair.right_log.lost().len(),
        0,
        "the lanes stayed clean"
    );
}

fn a_lost_lane_is_resumed_behind_its_fence(world: &World) {
    let proxy = world.proxy();
    let pair = world.through(small_buffers(), &proxy);
    let pool = 16 * MIB as u64;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let from = Arc::new(random_pieces(1, pool, 1000, 8192));
    let to = Arc::new(random_pieces(2, pool, 1000, 8192));
    let bytes = pattern(1, 8_192_000);
    write_stream(&source, &*from, &bytes);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(to.clone(), &destination, Some(arrival.clone()));
    proxy.stall_after(500_000);
    pair.left_log.hold();
    pair.right_log.hold();
    let Sent { id, .. } = Push::new(1, slot, &source, from).submit(&pair.left_link);
    proxy.stalled();
    proxy.cut_one();
    proxy.resume();
    pair.left_log.wait("loss", |event| {
        matches!(event, LinkEvent::LaneLost { chunks, .. } if !chunks.is_empty()).then_some(())
    });
    // Without the receiver's fence nothing of the lost lane is sent again, however much else goes through.
    assert!(
        arrival.wait(Duration::from_millis(300)).is_none(),
        "sent again without a fence"
    );
    pair.left_log.release();
    pair.right_log.release();
    assert!(arrival.wait(PATIENCE).is_some());
    assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
    pair.left_log.arrived(id);
    assert!(read_stream(&destination, &*to) == bytes);
    let lost = pair.left_log.lost();
    assert_eq!(lost[0].2.kind(), ErrorKind::Transport, "{:?}", lost[0].2);
    let name = lost[0].0;
    let fenced = pair.right_log.wait("fence", |event| match event {
        LinkEvent::LaneFenced { lane, chunks } if *lane == name => Some(chunks.len()),
        _ => None,
    });
    assert_eq!(
        fenced, lost[0].1,
        "the answer is about the chunks that were asked about"
    );
    // The lane comes back by itself, with a higher epoch.
    let end = Instant::now() + PATIENCE;
    while pair.left_link.path().rails.len() < 2 {
        assert!(Instant::now() < end, "the lane is not dialed again");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn a_lane_that_dies_again_and_again_loses_nothing(world: &World) {
    let proxy = world.proxy();
    let pair = world.through(small_buffers(), &proxy);
    let pool = 16 * MIB as u64;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let from = Arc::new(random_pieces(1, pool, 1500, 8192));
    let to = Arc::new(random_pieces(2, pool, 1500, 8192));
    let bytes = pattern(1, 1500 * 8192);
    write_stream(&source, &*from, &bytes);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(to.clone(), &destination, Some(arrival.clone()));
    proxy.stall_after(400_000);
    let Sent { id, .. } = Push::new(1, slot, &source, from)
        .message(b"still once")
        .submit(&pair.left_link);
    let mut cuts = 0;
    for round in 0..6 {
        proxy.stalled();
        cuts += proxy.cut();
        proxy.stall_after(900_000 + 100_000 * round);
    }
    proxy.resume();
    assert!(cuts >= 6);
    let message = arrival.wait(PATIENCE).expect("the arrival");
    assert_eq!(message.as_deref(), Some(&b"still once"[..]));
    pair.left_log.arrived(id);
    assert!(read_stream(&destination, &*to) == bytes);
    assert!(!pair.left_log.lost().is_empty() && !pair.right_log.lost().is_empty());
}

fn a_stalled_peer_delays_no_other(world: &World) {
    let config = TcpConfig {
        data_threads: 1,
        staging_buffers_max: 3,
        ..small_buffers()
    };
    // The left node sends to the right one, which stalls in the middle of chunks, and to `c`, over one thread; `c` receives from both.
    let proxy = world.proxy();
    let pair = world.through(config.clone(), &proxy);
    let pool = 16 * MIB as u64;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let from = Arc::new(random_pieces(1, pool, 8, MIB as u64));
    let to = Arc::new(random_pieces(2, pool, 8, MIB as u64));
    let bytes = pattern(1, 8 * MIB);
    write_stream(&source, &*from, &bytes);
    let slot = pair.right.grant(to.clone(), &destination, None);
    proxy.stall_after(1_500_000);
    let Sent { id: stalled, .. } = Push::new(1, slot, &source, from.clone()).submit(&pair.left_link);
    proxy.stalled();

    let c = Node::new(0xc, config, world.ip);
    let log_c = Arc::new(Log::default());
    let log_ac = Arc::new(Log::default());
    let _link_ca = c.transport.connect(pair.left.peer(&c, 9, false), log_c).unwrap();
    let link_ac = pair
        .left
        .transport
        .connect(c.peer(&pair.left, 9, true), log_ac.clone())
        .unwrap();
    let second = world.regions(pool);
    for id in 10..16 {
        let slot = c.grant(to.clone(), &second, None);
        let Sent { id, .. } = Push::new(id, slot, &source, from.clone()).submit(&link_ac);
        log_ac.arrived(id);
        assert!(read_stream(&second, &*to) == bytes);
    }
    assert!(
        pair.right
            .slots
            .progress(slot.0, slot.1)
            .is_some_and(|progress| !progress.arrived)
    );
    proxy.resume();
    pair.left_log.arrived(stalled);
    assert!(read_stream(&destination, &*to) == bytes);
    link_ac.close();
}

fn closing_in_traffic_ends_all_touching(world: &World) {
    let proxy = world.proxy();
    let pair = world.through(small_buffers(), &proxy);
    let pool = 32 * MIB as u64;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let from = Arc::new(random_pieces(1, pool, 16, MIB as u64));
    let to = Arc::new(random_pieces(2, pool, 16, MIB as u64));
    let slot = pair.right.grant(to.clone(), &destination, None);
    proxy.stall_after(2_000_000);
    let Sent { id, gate } = Push::new(1, slot, &source, from.clone()).submit(&pair.left_link);
    proxy.stalled();
    pair.right_link.close();
    pair.right_log.closed();
    let reused = pattern(5, 16 * MIB);
    write_stream(&destination, &*to, &reused);
    proxy.resume();
    std::thread::sleep(Duration::from_millis(50));
    assert!(
        read_stream(&destination, &*to) == reused,
        "a write after the link had closed"
    );

    pair.left_link.close();
    pair.left_log.closed();
    // Nobody is inside: closing finds the gate fenced.
    assert!(gate.close());
    let error = pair
        .left_link
        .submit(Push::new(2, slot, &source, from).spec)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert_eq!(pair.left_log.count(|event| matches!(event, LinkEvent::Closed)), 1);
    assert_eq!(pair.right_log.count(|event| matches!(event, LinkEvent::Closed)), 1);
    assert_eq!(
        pair.left_log
            .count(|event| matches!(event, LinkEvent::Send(SendEvent::Arrived(_)))),
        0
    );
    assert_eq!((pair.left.transport.links(), pair.right.transport.links()), (0, 0));
    let _ = id;
}

#[test]
fn a_small_transfer_does_not_wait_for_a_large_one() {
    let pair = Pair::new(TcpConfig::default()).up();
    let (large, small) = (256 * MIB as u64, 64 << 10);
    let (source, destination) = (host(large), host(large));
    let (small_source, small_destination) = (host(small), host(small));
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(
        Arc::new(random_pieces(2, large, 256, MIB as u64)),
        &destination,
        Some(arrival.clone()),
    );
    let start = Instant::now();
    let from = Arc::new(random_pieces(1, large, 256, MIB as u64));
    let Sent { id: big, .. } = Push::new(1, slot, &source, from).submit(&pair.left_link);
    std::thread::sleep(Duration::from_millis(5));
    let mut waits = Vec::new();
    for id in 100..110 {
        let piece = || Arc::new(random_pieces(1, small, 1, small));
        let slot = pair.right.grant(piece(), &small_destination, None);
        let sent = Instant::now();
        let Sent { id, .. } = Push::new(id, slot, &small_source, piece()).submit(&pair.left_link);
        pair.left_log.arrived(id);
        waits.push(sent.elapsed());
        if arrival.wait(Duration::ZERO).is_some() {
            break;
        }
    }
    pair.left_log.arrived(big);
    let all = start.elapsed();
    assert!(waits[0] < all / 3, "a small transfer took {:?} of {all:?}", waits[0]);
}

#[test]
fn a_corrupt_byte_is_caught_and_ends_the_grant() {
    // A relay that flips one bit, once, in the middle of a payload.
    let target = Node::new(0xb, TcpConfig::default(), v4());
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = relay.local_addr().unwrap();
    let to = target.address;
    std::thread::spawn(move || {
        let flipped = Arc::new(std::sync::atomic::AtomicBool::new(false));
        while let Ok((client, _)) = relay.accept() {
            let Ok(server) = std::net::TcpStream::connect(to) else {
                return;
            };
            for (mut from, mut to, forward) in [
                (client.try_clone().unwrap(), server.try_clone().unwrap(), true),
                (server, client, false),
            ] {
                let flipped = flipped.clone();
                std::thread::spawn(move || {
                    use std::io::{Read, Write};
                    let (mut bytes, mut at) = (vec![0; 10_000], 0);
                    while let Ok(length @ 1..) = from.read(&mut bytes) {
                        if forward && at > 50_000 && !flipped.swap(true, Ordering::SeqCst) {
                            bytes[length / 2] ^= 4;
                        }
                        at += length;
                        if to.write_all(&bytes[..length]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    let source = Node::new(0xa, TcpConfig::default(), v4());
    let pair = Pair::between(source, target, Some(&|_| address), 1).up();
    let (source, destination) = (host(1 << 20), host(1 << 20));
    let piece = || Arc::new(random_pieces(1, 1 << 20, 1, 200_000));
    let slot = pair.right.grant(piece(), &destination, None);
    let Sent { id, gate } = Push::new(1, slot, &source, piece()).checksum().submit(&pair.left_link);
    let error = pair.right_log.wait("corruption", |event| match event {
        LinkEvent::SlotCorrupt { slot: bad, error, .. } if *bad == slot.0 => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("lane"), "{error}");
    assert!(!pair.right.slots.progress(slot.0, slot.1).unwrap().arrived);
    // Its lane was closed, and what is sent again finds the slot closed.
    let error = pair.right_log.wait("loss", |event| match event {
        LinkEvent::LaneLost { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    pair.left_log.refused(id);
    gate.close();
}

#[test]
fn an_address_that_does_not_answer_is_tried_again() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = closed.local_addr().unwrap();
    drop(closed);
    let a = Node::new(0xa, TcpConfig::default(), v4());
    let b = Node::new(0xb, TcpConfig::default(), v4());
    let mut peer = b.peer(&a, 3, true);
    // The second address answers.
    peer.addresses.insert(0, dead);
    let (left_log, right_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let _link_b = b.transport.connect(a.peer(&b, 3, false), right_log.clone()).unwrap();
    let _link_a = a.transport.connect(peer, left_log.clone()).unwrap();
    left_log.up();
    right_log.up();
}

#[test]
fn lanes_may_come_before_their_link() {
    let a = Node::new(0xa, TcpConfig::default(), v4());
    let b = Node::new(0xb, TcpConfig::default(), v4());
    let (left_log, right_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let _link_a = a.transport.connect(b.peer(&a, 4, true), left_log.clone()).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let _link_b = b.transport.connect(a.peer(&b, 4, false), right_log.clone()).unwrap();
    left_log.up();
    right_log.up();
}

#[test]
fn limits_and_misuse_are_typed_errors() {
    let a = Node::new(
        0xa,
        TcpConfig {
            links_max: 1,
            transfers_max: 2,
            ..TcpConfig::default()
        },
        v4(),
    );
    let b = Node::new(0xb, TcpConfig::default(), v6());
    let log = Arc::new(Log::default());
    let link = a.transport.connect(b.peer(&a, 1, true), log.clone()).unwrap();
    let kind = |result: kvxfer_core::Result<Arc<dyn Link>>| result.err().map(|error| error.kind());
    assert_eq!(
        kind(a.transport.connect(b.peer(&a, 2, true), log.clone())),
        Some(ErrorKind::Busy)
    );
    let mut peer = a.peer(&b, 2, true);
    peer.advert = vec![0];
    assert_eq!(kind(b.transport.connect(peer, log.clone())), Some(ErrorKind::Protocol));
    let regions = host(4096);
    let push = |id| {
        let slot = (kvxfer_core::SlotId(0), kvxfer_core::Generation(1));
        link.submit(Push::new(id, slot, &regions, Arc::new(random_pieces(1, 4096, 1, 1))).spec)
    };
    push(1).unwrap();
    push(2).unwrap();
    assert_eq!(push(3).unwrap_err().kind(), ErrorKind::Busy);
    link.stop(TransferId(1));
    log.quiet(TransferId(1));
    push(3).unwrap();
    a.transport.shutdown();
    assert_eq!(push(4).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(
        kind(a.transport.connect(b.peer(&a, 7, true), log)),
        Some(ErrorKind::Closed)
    );
}
