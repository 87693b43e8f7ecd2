//! Rails that go down and come back while a transfer is under way: with another one left, and with none.

use std::time::{Duration, Instant};

use crate::common::*;
use kvxfer::{GrantOptions, Path, PoolLayout, PushOptions, Role, Selection, Transfer};

suite!($ rails:
    a_rail_that_goes_down_is_left_and_rejoins,
    the_only_rail_may_be_down_for_a_while,
    rails_that_stay_down_are_left_for_the_next_transport_named,
    rails_that_stay_down_are_an_error_if_nothing_else_is_named,
);

const BLOCK_BYTES: u32 = 1 << 20;

/// Enough to be under way for some time.
fn blocks() -> u32 {
    site::site().count(128, 40)
}

fn sides(rails: usize) -> Option<(Side, Side)> {
    sides_with(rails, |_| {})
}

fn sides_with(rails: usize, change: impl Fn(&mut kvxfer::Config)) -> Option<(Side, Side)> {
    let site = site::site();
    let side = |name, side| {
        let mut config = config_on(side);
        if rails == 2 {
            config.devices = site.two_devices(side)?;
            config.rdma.rail_pairs = vec!["index".into()];
        }
        change(&mut config);
        let layout = PoolLayout::opaque(BLOCK_BYTES, blocks()).unwrap();
        Some(Side::with(name, config, layout, Role::Both))
    };
    Some((side("sender", 0)?, side("receiver", 1)?))
}

fn all() -> Selection {
    Selection::single(0, blocks(), (0..blocks()).collect())
}

fn mark(side: &Side, first: u8) {
    for block in 0..blocks() {
        let bytes = vec![first.wrapping_add(block as u8); BLOCK_BYTES as usize];
        put(&side.pool, 0, block, 0, &bytes).unwrap();
    }
}

fn assert_marked(side: &Side, first: u8) {
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    for block in 0..blocks() {
        get(&side.pool, 0, block, 0, &mut bytes).unwrap();
        let wrong = bytes.iter().position(|&byte| byte != first.wrapping_add(block as u8));
        assert_eq!(wrong, None, "block {block}");
    }
}

/// Starts a push of everything; `meanwhile` is called when it is under way.
fn push(sender: &Side, receiver: &Side, first: u8, meanwhile: impl FnOnce(&Transfer)) -> Path {
    mark(sender, first);
    mark(receiver, first ^ 0x80);
    let granted = receiver.pool.grant(all(), GrantOptions::default()).unwrap();
    let transfer = sender
        .endpoint
        .push(&sender.pool, all(), granted.grant(), PushOptions::default())
        .unwrap();
    eventually("it is under way", || {
        under_way(&sender.endpoint, "sent") > 0.0 || transfer.done().is_done()
    });
    meanwhile(&transfer);
    transfer.done().wait(LONG).unwrap();
    granted.arrived().wait(LONG).unwrap();
    assert_marked(receiver, first);
    transfer.path().unwrap()
}

fn rails_up(side: &Side, peer: &Side) -> usize {
    let text = side.endpoint.explain(&peer.endpoint.address());
    let line = text
        .lines()
        .find(|line| line.starts_with("path: rdma"))
        .unwrap_or_default();
    line.split(", ")
        .nth(1)
        .and_then(|words| words.split(' ').next()?.parse().ok())
        .unwrap_or(0)
}

fn losses(side: &Side) -> f64 {
    metric_sum(&side.endpoint, "kvxfer_rail_losses_total", "")
}

fn a_rail_that_goes_down_is_left_and_rejoins() {
    let site = site::site_with(site::SLOW);
    let Some((sender, receiver)) = sides(2) else {
        println!("skipped: two wires are needed, KVXFER_TEST_DEVICES names one");
        return;
    };
    let _delay = site.delay(5);
    sender.endpoint.connect(&receiver.endpoint.address(), LONG).unwrap();
    eventually("both rails are up", || rails_up(&sender, &receiver) == 2);
    push(&sender, &receiver, 1, |_| {});
    for rail in ["rail=\"0\"", "rail=\"1\""] {
        let bytes = metric_sum(&receiver.endpoint, "kvxfer_rail_bytes_total", rail);
        assert!(
            bytes > f64::from(BLOCK_BYTES * blocks()) / 5.0,
            "{rail} carried {bytes} bytes"
        );
    }
    // At either side: on fakes the peer's port, which the sender's device hears nothing of.
    for (round, side) in [(0, 0), (1, 1), (2, 0)] {
        let device = site.device(side);
        let (before, in_doubt) = (
            losses(&sender),
            metric_sum(&sender.endpoint, "kvxfer_rail_in_doubt_chunks_total", ""),
        );
        let mut down = None;
        push(&sender, &receiver, 20 + 3 * round, |transfer| {
            down = Some(site.down(&device));
            assert!(!transfer.done().is_done(), "it was too fast for this test");
            if site.is_real() {
                // Software devices do not even talk to themselves while their link is down: what was in doubt on the
                // rail cannot be flushed, and waits for it.
                std::thread::sleep(Duration::from_millis(400));
                down = None;
            }
        });
        assert!(losses(&sender) > before, "the rail was not lost");
        let doubts = metric_sum(&sender.endpoint, "kvxfer_rail_in_doubt_chunks_total", "") - in_doubt;
        println!("{doubts} chunks were in doubt");
        if site.is_real() {
            eventually("the rail rejoins", || {
                rails_up(&sender, &receiver) == 2 && rails_up(&receiver, &sender) == 2
            });
            down = Some(site.down(&device));
        }
        eventually("one rail is left", || rails_up(&sender, &receiver) == 1);
        let text = sender.endpoint.explain(&receiver.endpoint.address());
        assert!(text.contains("not up: rail "), "{text}");
        push(&sender, &receiver, 21 + 3 * round, |_| {});
        drop(down);
        eventually("the rail rejoins", || {
            rails_up(&sender, &receiver) == 2 && rails_up(&receiver, &sender) == 2
        });
        push(&sender, &receiver, 22 + 3 * round, |_| {});
    }
    if let Some(fabric) = &site.fabric {
        assert_eq!(fabric.counter("*", "resets_with_outstanding"), 0);
        assert_eq!(fabric.counter("*", "misuse"), 0);
    }
    assert!(metric_sum(&sender.endpoint, "kvxfer_rail_in_doubt_chunks_total", "") > 0.0);
    assert_eq!(
        metric_sum(&sender.endpoint, "kvxfer_control_transports_failed", ""),
        0.0
    );
}

fn the_only_rail_may_be_down_for_a_while() {
    let site = site::site_with(site::SLOW);
    let (sender, receiver) = sides(1).unwrap();
    let _delay = site.delay(5);
    sender.endpoint.connect(&receiver.endpoint.address(), LONG).unwrap();
    push(&sender, &receiver, 1, |_| {});
    for (round, side) in [(0, 0), (1, 1)] {
        let device = site.device(side);
        let before = losses(&sender);
        push(&sender, &receiver, 20 + round, |transfer| {
            let down = site.down(&device);
            assert!(!transfer.done().is_done(), "it was too fast for this test");
            let until = Instant::now() + Duration::from_millis(1500);
            while Instant::now() < until {
                assert!(
                    !transfer.done().is_done(),
                    "it ended while the only rail was down: {:?}",
                    transfer.done().poll()
                );
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(losses(&sender) > before, "the rail was not lost");
            drop(down);
        });
        eventually("the rail is back", || rails_up(&sender, &receiver) == 1);
    }
}

fn rails_that_stay_down_are_left_for_the_next_transport_named() {
    let site = site::site_with(site::SLOW);
    let (sender, receiver) = sides_with(1, |config| {
        config.transports = vec!["rdma".into(), "tcp".into()];
        config.rdma.outage_ms = 300;
    })
    .unwrap();
    let _delay = site.delay(5);
    let mut down = None;
    let path = push(&sender, &receiver, 1, |transfer| {
        down = Some(site.down(&site.device(0)));
        assert!(!transfer.done().is_done(), "it was too fast for this test");
    });
    assert_eq!(path.transport, "tcp");
    for (from, to) in [(&sender, &receiver), (&receiver, &sender)] {
        let text = from.endpoint.explain(&to.endpoint.address());
        assert!(
            text.contains("not rdma: ") && text.contains("no rail came back"),
            "{text}"
        );
    }
}

fn rails_that_stay_down_are_an_error_if_nothing_else_is_named() {
    let site = site::site_with(site::SLOW);
    let (sender, receiver) = sides_with(1, |config| config.rdma.outage_ms = 300).unwrap();
    let _delay = site.delay(5);
    mark(&sender, 1);
    let granted = receiver.pool.grant(all(), GrantOptions::default()).unwrap();
    let transfer = sender
        .endpoint
        .push(&sender.pool, all(), granted.grant(), PushOptions::default())
        .unwrap();
    eventually("it is under way", || under_way(&sender.endpoint, "sent") > 0.0);
    let down = site.down(&site.device(0));
    let error = transfer.done().wait(LONG).unwrap_err();
    assert!(
        matches!(error.kind(), kvxfer::ErrorKind::Transport | kvxfer::ErrorKind::Unknown),
        "{error}"
    );
    assert!(error.to_string().contains("no rail came back"), "{error}");
    granted.cancel();
    let error = granted.arrived().wait(LONG).unwrap_err();
    assert_ne!(error.destination(), kvxfer::Destination::Quarantined, "{error}");
    mark(&receiver, 0x80);
    drop(down);
    // By itself, with new queue pairs.
    eventually("a rail comes up again", || rails_up(&sender, &receiver) == 1);
    assert_marked(&receiver, 0x80);
    push(&sender, &receiver, 3, |_| {});
}
