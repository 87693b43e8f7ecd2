//! What RDMA goes over ends while bytes are under way: an endpoint, a session's connection, a device; and both sides
//! begin at once.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Barrier;
use std::time::Duration;

use kvxfer::{
    ClaimOptions, Config, ErrorKind, GrantHandle, GrantOptions, OfferOptions, PoolLayout, PullOptions, PushOptions,
    Role, Selection, Transfer,
};
use kvxfer_cases::common::*;
use rustix::net::Shutdown;

const BLOCK_BYTES: u32 = 256 << 10;
const BIG_BLOCKS: u32 = 64;

fn big_side(name: &str, config: Config) -> Side {
    Side::with(
        name,
        config,
        PoolLayout::opaque(BLOCK_BYTES, BIG_BLOCKS).unwrap(),
        Role::Both,
    )
}

fn all() -> Selection {
    Selection::single(0, BIG_BLOCKS, (0..BIG_BLOCKS).collect())
}

fn mark(side: &Side, mark: u8) {
    let bytes = vec![mark; BLOCK_BYTES as usize];
    for block in 0..BIG_BLOCKS {
        side.pool.copy_in(0, block, 0, &bytes).unwrap();
    }
}

fn unlike(side: &Side, mark: u8) -> usize {
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    let unlike = |block: &u32| {
        side.pool.copy_out(0, *block, 0, &mut bytes).unwrap();
        bytes.iter().any(|&byte| byte != mark)
    };
    (0..BIG_BLOCKS).filter(unlike).count()
}

/// A push, or a pull, of everything from `from` to `to` that is under way: the grant, and the transfer of who moves.
fn begun(from: &Side, to: &Side, pull: bool) -> (GrantHandle, Transfer) {
    let (granted, transfer, mover, direction) = if pull {
        let granted = from.pool.serve(all(), GrantOptions::default()).unwrap();
        let transfer = to
            .endpoint
            .pull(granted.grant(), &to.pool, all(), PullOptions::default())
            .unwrap();
        (granted, transfer, to, "read")
    } else {
        let granted = to.pool.grant(all(), GrantOptions::default()).unwrap();
        let transfer = from
            .endpoint
            .push(&from.pool, all(), granted.grant(), PushOptions::default())
            .unwrap();
        (granted, transfer, from, "sent")
    };
    eventually("it is under way", || under_way(&mover.endpoint, direction) > 0.0);
    (granted, transfer)
}

#[test]
fn endpoints_are_dropped_while_bytes_are_under_way() {
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(5);
    for round in 0..site.count(16, 8) {
        let (pull, first) = (round % 2 == 1, round / 2 % 2 == 0);
        let (from, to) = (big_side("sender", config()), big_side("receiver", config()));
        mark(&from, 7);
        let (granted, transfer) = begun(&from, &to, pull);
        // With its pool: the memory goes too, and must not be written or read after that.
        let (left, granted_is_left) = if first {
            drop(from);
            (to, !pull)
        } else {
            drop(to);
            (from, pull)
        };
        let (gone, stays) = if granted_is_left {
            (
                transfer.done().wait(LONG).map(drop),
                granted.arrived().wait(LONG).map(drop),
            )
        } else {
            (
                granted.arrived().wait(LONG).map(drop),
                transfer.done().wait(LONG).map(drop),
            )
        };
        if let Err(error) = gone {
            assert!(
                matches!(error.kind(), ErrorKind::Closed | ErrorKind::Unknown),
                "{error}"
            );
        }
        if let Err(error) = stays {
            let kind = error.kind();
            assert!(
                matches!(
                    kind,
                    ErrorKind::PeerLost | ErrorKind::Closed | ErrorKind::Cancelled | ErrorKind::Unknown
                ),
                "{error}"
            );
            assert_ne!(error.destination(), kvxfer::Destination::Quarantined, "{error}");
            mark(&left, 9);
            std::thread::sleep(Duration::from_millis(10));
            assert_eq!(unlike(&left, 9), 0, "round {round}: a byte landed after the end");
        }
    }
    if let Some(fabric) = &site.fabric {
        assert_eq!(fabric.counter("*", "misuse"), 0);
        assert_eq!(fabric.counter("*", "qps_created"), fabric.counter("*", "qps_destroyed"));
    }
}

/// Breaks the connections that an endpoint of this process has accepted at this address. Returns how many.
fn break_accepted(listens: SocketAddr) -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = descriptors.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let mut broken = 0;
    for number in numbers.collect::<Vec<_>>() {
        // SAFETY: used for two questions, each of which says so if the descriptor is gone or is something else; and no
        // other socket of this process has this local port.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        let is_ours = rustix::net::getsockname(socket).is_ok_and(|name| SocketAddr::try_from(name) == Ok(listens));
        if is_ours && rustix::net::getpeername(socket).is_ok() {
            broken += usize::from(rustix::net::shutdown(socket, Shutdown::Both).is_ok());
        }
    }
    broken
}

#[test]
fn sessions_that_break_lose_nothing_of_what_the_devices_do() {
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(2);
    let (prefill, decode) = (Side::new("prefill"), Side::new("decode"));
    let listens = [&prefill, &decode].map(|side| side.endpoint.address().sockets[0]);
    let rounds = site.count(150, 40);
    let mut broken = 0;
    for n in 0..rounds {
        let key = format!("k-{n}");
        let source = tokens(100, [9, 3, 7, 1, 0, 20, 11]);
        let destination = tokens(100, [4, 5, 6, 60, 8, 30, 2]);
        fill(&prefill.pool, &source, &key, 0);
        poison(&decode.pool, &destination);
        let offer = prefill
            .endpoint
            .offer(&key, &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(&source).unwrap();
        let options = ClaimOptions {
            pull: n % 3 == 2,
            ..ClaimOptions::default()
        };
        let sources = [prefill.endpoint.address()];
        let claim = decode.endpoint.claim(&key, &decode.pool, &sources, options).unwrap();
        claim.fill(destination.clone()).unwrap();
        offer.ready(0..48, ..).unwrap();
        // Somewhere on the way.
        std::thread::sleep(Duration::from_micros(u64::from(n * 7919 % 3000)));
        if n % 2 == 0 {
            broken += listens.map(break_accepted).iter().sum::<usize>();
        }
        offer.finish(100).unwrap();
        claim.arrived().wait(LONG).unwrap();
        verify(&decode.pool, &destination, &key, 0);
        offer.released().wait(LONG).unwrap();
    }
    println!("{broken} connections were broken in {rounds} hand-overs");
    assert!(broken > rounds as usize / 4);
    // The devices were not touched by that.
    assert_eq!(metric_sum(&prefill.endpoint, "kvxfer_rail_losses_total", ""), 0.0);
}

#[test]
fn both_sides_may_begin_at_once() {
    for round in 0..site::site().count(20, 6) {
        let (a, b) = pair();
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            for (from, to, mark) in [(&a, &b, 0), (&b, &a, 1)] {
                let barrier = &barrier;
                scope.spawn(move || {
                    let blocks = tokens(16, [3 + mark]);
                    let key = format!("{round}-{mark}");
                    fill(&from.pool, &blocks, &key, 0);
                    let granted = to.pool.grant(blocks.clone(), GrantOptions::default()).unwrap();
                    barrier.wait();
                    let transfer = from
                        .endpoint
                        .push(&from.pool, blocks.clone(), granted.grant(), PushOptions::default())
                        .unwrap();
                    transfer.done().wait(LONG).unwrap();
                    granted.arrived().wait(LONG).unwrap();
                    verify(&to.pool, &blocks, &key, 0);
                });
            }
        });
        for side in [&a, &b] {
            assert_eq!(metric_sum(&side.endpoint, "kvxfer_links", "rdma"), 1.0);
        }
    }
}

#[test]
fn a_device_that_goes_away_leaves_its_work_to_the_next_transport_named() {
    let site = site::site_with(site::SLOW);
    let both = |side| {
        let mut config = config_on(side);
        config.transports = vec!["rdma".into(), "tcp".into()];
        config
    };
    let (from, to) = (big_side("sender", both(0)), big_side("receiver", both(1)));
    if site.is_real() {
        println!("skipped: only fake devices go away under their users");
        return;
    }
    let (from_2, to_2) = (big_side("sender", both(2)), big_side("receiver", both(3)));
    for (pull, device, from, to) in [(false, 0, &from, &to), (true, 3, &from_2, &to_2)] {
        mark(from, 7);
        mark(to, 1);
        let (granted, transfer) = begun(from, to, pull);
        assert!(site.unplug(&site.device(device)));
        transfer.done().wait(LONG).unwrap();
        granted.arrived().wait(LONG).unwrap();
        assert_eq!(unlike(to, 7), 0);
        let text = from.endpoint.explain(&to.endpoint.address());
        assert!(text.contains("path: tcp") && text.contains("not rdma: "), "{text}");
    }
}

#[test]
fn a_device_that_goes_away_is_an_error_if_nothing_else_is_named() {
    let site = site::site_with(site::SLOW);
    let (from, to) = (big_side("sender", config_on(0)), big_side("receiver", config_on(1)));
    mark(&from, 7);
    let (granted, transfer) = begun(&from, &to, false);
    if !site.unplug(&site.device(0)) {
        return;
    }
    let error = transfer.done().wait(LONG).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Transport | ErrorKind::Unknown),
        "{error}"
    );
    assert!(error.to_string().contains("rdma"), "{error}");
    // The receiver's blocks are its own again, once it takes them back.
    granted.cancel();
    let error = granted.arrived().wait(LONG).unwrap_err();
    assert_ne!(error.destination(), kvxfer::Destination::Quarantined, "{error}");
    mark(&to, 9);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(unlike(&to, 9), 0, "a byte landed after the end");
}
