//! What waits for an event of the application's: parts of offers, and pushes.

use std::time::Duration;

use kvxfer_core::layout::Selection;
use kvxfer_core::machine::*;
use kvxfer_core::wire::Access;
use kvxfer_core::{Error, ErrorKind, Result};

use crate::handoff::pulled;
use crate::transfers::{grant, push};
use crate::world::*;

const FIRST: EventId = EventId(1);
const SECOND: EventId = EventId(2);
const ALL_LAYERS: (u16, u16) = (0, u16::MAX);

fn append(world: &mut World, offer: HandleId, selection: Selection) {
    let now = world.now;
    world.nodes[0].machine.append(now, offer, &selection).unwrap();
}

fn ready_after(world: &mut World, offer: HandleId, tokens: (u32, u32), event: EventId) -> Result<()> {
    let now = world.now;
    world.nodes[0]
        .machine
        .ready_after(now, offer, tokens, ALL_LAYERS, event)
}

fn finish(world: &mut World, offer: HandleId, tokens: u32) {
    let now = world.now;
    world.nodes[0].machine.finish(now, offer, tokens).unwrap();
}

fn happened(world: &mut World, event: EventId) {
    let now = world.now;
    world.nodes[0].machine.event_happened(now, event, &Ok(()));
}

fn failed(world: &mut World, event: EventId) {
    let now = world.now;
    let error = Error::new(ErrorKind::Transport, "a kernel").because("it failed");
    world.nodes[0].machine.event_happened(now, event, &Err(error));
}

fn waits(world: &World, node: usize, handle: HandleId) -> String {
    world.nodes[node].machine.waiting_on(handle).unwrap().what
}

#[test]
fn a_part_is_sent_once_its_event_has_happened() {
    for pull in [false, true] {
        let mut world = World::new(2);
        let offer = world.offer(0, "r");
        append(&mut world, offer, blocks([3, 5]));
        ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
        let options = if pull { pulled(1) } else { claim_options(1) };
        let claim = world.claim_with(1, "r", &[0], options);
        world.fill(1, claim, blocks([9, 2]));
        // What is left is given at once; what waits is not.
        world.nodes[0].paint(5, 50);
        finish(&mut world, offer, 8);
        world.run_ms(10);
        assert!(world.ended(1, claim).is_none());
        assert_eq!(waits(&world, 0, offer), "event");
        assert_eq!(world.gauge(0, "events_awaited"), 1);
        assert!(world.nodes[0].machine.awaits(FIRST));
        if !pull {
            assert_eq!(world.nodes[1].colour(2), Some(50));
        }
        // The kernel writes the block, late.
        world.nodes[0].paint(3, 30);
        happened(&mut world, FIRST);
        world.run_ms(10);
        assert!(matches!(world.ok(1, claim), Outcome::Arrived { bytes: 256 }));
        assert_eq!(world.nodes[1].colour(9), Some(30));
        assert_eq!(world.nodes[1].colour(2), Some(50));
        world.ok(0, offer);
        assert_eq!(world.gauge(0, "events_awaited"), 0);
        world.assert_clean();
    }
}

#[test]
fn what_happened_before_the_claim_is_given_to_it() {
    let mut world = World::new(2);
    let offer = world.offer(0, "r");
    append(&mut world, offer, blocks([3, 5]));
    ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
    ready_after(&mut world, offer, (4, 8), SECOND).unwrap();
    world.nodes[0].paint(3, 30);
    happened(&mut world, FIRST);
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9, 2]));
    world.run_ms(10);
    assert_eq!(world.nodes[1].colour(9), Some(30));
    assert!(world.ended(1, claim).is_none());
    world.nodes[0].paint(5, 50);
    happened(&mut world, SECOND);
    world.run_ms(10);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(2), Some(50));
    world.assert_clean();
}

#[test]
fn a_withheld_part_is_checked_counted_and_reserved() {
    let mut world = World::new(2);
    let offer = world.offer(0, "r");
    append(&mut world, offer, blocks([3, 5]));
    ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
    let kind = |result: Result<()>| result.unwrap_err().kind();
    let now = world.now;
    let again = world.nodes[0].machine.ready(now, offer, (2, 4), ALL_LAYERS);
    assert_eq!(kind(again), ErrorKind::InvalidArgument);
    assert_eq!(
        kind(ready_after(&mut world, offer, (0, 4), SECOND)),
        ErrorKind::InvalidArgument
    );
    assert_eq!(
        kind(ready_after(&mut world, offer, (4, 12), SECOND)),
        ErrorKind::OutOfBounds
    );
    assert!(!world.nodes[0].machine.awaits(SECOND), "a refused call leaves nothing");
    // Fewer tokens than were released, withheld or not.
    let now = world.now;
    let short = world.nodes[0].machine.finish(now, offer, 3);
    assert_eq!(kind(short), ErrorKind::InvalidArgument);
    let now = world.now;
    world.nodes[0].machine.finish_after(now, offer, 8, SECOND).unwrap();
    assert!(world.nodes[0].machine.awaits(SECOND));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9, 2]));
    world.nodes[0].paint(3, 30);
    happened(&mut world, FIRST);
    world.run_ms(10);
    assert!(world.ended(1, claim).is_none());
    world.nodes[0].paint(5, 50);
    happened(&mut world, SECOND);
    world.run_ms(10);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(2), Some(50));
    world.assert_clean();
}

#[test]
fn the_limit_of_parts_counts_withheld_ones() {
    let mut world = World::with(2, |config| config.parts_max = 1, |_| layout(0..2, 16));
    let offer = world.offer(0, "r");
    append(&mut world, offer, blocks([3, 5]));
    ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
    let more = ready_after(&mut world, offer, (4, 8), SECOND);
    assert_eq!(more.unwrap_err().kind(), ErrorKind::Busy);
    world.cancel(0, offer);
    world.run_ms(10);
    assert_eq!(world.error(0, offer), ErrorKind::Cancelled);
    assert_eq!(world.gauge(0, "events_awaited"), 0);
    world.assert_clean();
}

#[test]
fn one_event_opens_parts_of_several_offers() {
    let mut world = World::new(2);
    let offers = ["a", "b"].map(|key| world.offer(0, key));
    let claims = ["a", "b"].map(|key| world.claim(1, key, &[0]));
    for (at, (offer, claim)) in offers.into_iter().zip(claims).enumerate() {
        let at = at as u32;
        append(&mut world, offer, blocks([3 + at]));
        ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
        world.fill(1, claim, blocks([8 + at]));
        finish(&mut world, offer, 4);
    }
    world.run_ms(10);
    world.nodes[0].paint(3, 30);
    world.nodes[0].paint(4, 40);
    happened(&mut world, FIRST);
    world.run_ms(10);
    for (offer, claim) in offers.into_iter().zip(claims) {
        world.ok(1, claim);
        world.ok(0, offer);
    }
    assert_eq!(world.nodes[1].colour(8), Some(30));
    assert_eq!(world.nodes[1].colour(9), Some(40));
    world.assert_clean();
}

#[test]
fn a_restart_voids_what_is_withheld_and_late_events_of_it_open_nothing() {
    let mut world = World::new(2);
    let offer = world.offer(0, "r");
    append(&mut world, offer, blocks([3]));
    ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    world.run_ms(10);
    let now = world.now;
    world.nodes[0].machine.restart(now, offer).unwrap();
    assert!(!world.nodes[0].machine.awaits(FIRST));
    append(&mut world, offer, blocks([7]));
    ready_after(&mut world, offer, (0, 4), SECOND).unwrap();
    finish(&mut world, offer, 4);
    happened(&mut world, FIRST);
    world.run_ms(10);
    assert!(
        world.ended(1, claim).is_none(),
        "an event of an earlier attempt opens nothing"
    );
    failed(&mut world, FIRST);
    world.run_ms(10);
    assert!(world.ended(0, offer).is_none(), "nor does it end anything");
    world.nodes[0].paint(7, 70);
    happened(&mut world, SECOND);
    world.run_ms(20);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(9), Some(70));
    world.assert_clean();
}

#[test]
fn ending_an_offer_drops_what_is_withheld() {
    for how in 0..3 {
        let mut world = World::new(2);
        let offer = world.offer(0, "r");
        append(&mut world, offer, blocks([3]));
        ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
        let claim = world.claim(1, "r", &[0]);
        world.fill(1, claim, blocks([9]));
        world.run_ms(10);
        let now = world.now;
        let kind = match how {
            0 => {
                world.cancel(0, offer);
                ErrorKind::Cancelled
            }
            1 => {
                world.nodes[0].machine.retract(now, offer, &[3]).unwrap();
                ErrorKind::Retracted
            }
            _ => {
                world.cancel(1, claim);
                ErrorKind::Cancelled
            }
        };
        world.run_ms(10);
        assert_eq!(world.error(0, offer), kind);
        assert_eq!(world.error(1, claim), kind);
        assert_eq!(world.gauge(0, "events_awaited"), 0);
        happened(&mut world, FIRST);
        world.assert_clean();
    }
}

#[test]
fn a_failed_event_ends_its_offer_and_its_claims() {
    let mut world = World::new(2);
    let offer = world.offer(0, "r");
    append(&mut world, offer, blocks([3, 5]));
    ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
    ready_after(&mut world, offer, (4, 8), SECOND).unwrap();
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9, 2]));
    world.run_ms(10);
    failed(&mut world, SECOND);
    world.run_ms(10);
    for (node, handle) in [(0, offer), (1, claim)] {
        assert_eq!(world.error(node, handle), ErrorKind::Transport);
        let error = world.ended(node, handle).unwrap().clone().unwrap_err();
        assert!(
            error.to_string().contains("the event that the blocks waited for"),
            "{error}"
        );
        assert!(error.to_string().contains("a kernel: it failed"), "{error}");
    }
    assert_eq!(world.gauge(0, "events_awaited"), 0);
    happened(&mut world, FIRST);
    world.assert_clean();
}

#[test]
fn an_offer_whose_event_never_happens_ends_at_its_deadline() {
    let mut world = World::new(2);
    let now = world.now;
    let options = OfferOptions {
        deadline: Some(Duration::from_millis(100)),
        ..offer_options()
    };
    let offer = world.nodes[0].machine.offer(now, b"r", POOL, options).unwrap();
    append(&mut world, offer, blocks([3]));
    ready_after(&mut world, offer, (0, 4), FIRST).unwrap();
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    world.run_ms(200);
    assert_eq!(world.error(0, offer), ErrorKind::DeadlineExceeded);
    let error = world.ended(0, offer).unwrap().clone().unwrap_err();
    assert!(error.to_string().contains("it waited for: event"), "{error}");
    assert_eq!(world.error(1, claim), ErrorKind::DeadlineExceeded);
    assert_eq!(world.nodes[1].colour(9), Some(0), "nothing of it was sent");
    world.assert_clean();
}

#[test]
fn a_push_is_held_until_its_event() {
    let mut world = World::new(2);
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let options = TransferOptions {
        after: Some(FIRST),
        message: Some(vec![1, 2].into()),
        ..TransferOptions::default()
    };
    let transfer = push(&mut world, 0, 1, &name, options);
    world.run_ms(10);
    assert_eq!(waits(&world, 0, transfer), "event");
    assert_eq!(world.nodes[1].colour(2), Some(0));
    world.nodes[0].paint(1, 11);
    happened(&mut world, FIRST);
    world.run_ms(10);
    assert!(matches!(world.ok(0, transfer), Outcome::Transferred { bytes: 128 }));
    world.ok(1, handle);
    assert_eq!(world.nodes[1].colour(2), Some(11));
    world.assert_clean();
}

#[test]
fn a_push_whose_event_comes_before_its_session_waits_for_the_peer() {
    let mut world = World::new(2);
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    world.block(0, 1);
    let options = TransferOptions {
        after: Some(FIRST),
        ..TransferOptions::default()
    };
    let transfer = push(&mut world, 0, 1, &name, options);
    world.nodes[0].paint(1, 11);
    happened(&mut world, FIRST);
    world.run_ms(10);
    assert_eq!(waits(&world, 0, transfer), "peer");
    world.unblock();
    world.run_ms(1_000);
    world.ok(0, transfer);
    world.ok(1, handle);
    assert_eq!(world.nodes[1].colour(2), Some(11));
    world.assert_clean();
}

#[test]
fn a_held_push_ends_at_once() {
    for how in 0..2 {
        let mut world = World::new(2);
        let (handle, name) = grant(&mut world, 1, Access::Write, 2);
        let options = TransferOptions {
            after: Some(FIRST),
            ..TransferOptions::default()
        };
        let transfer = push(&mut world, 0, 1, &name, options);
        world.run_ms(10);
        let kind = if how == 0 {
            world.cancel(0, transfer);
            ErrorKind::Cancelled
        } else {
            failed(&mut world, FIRST);
            ErrorKind::Transport
        };
        world.run(Duration::ZERO);
        assert_eq!(world.error(0, transfer), kind);
        assert_eq!(world.gauge(0, "events_awaited"), 0);
        happened(&mut world, FIRST);
        world.run_ms(10);
        assert_eq!(world.error(1, handle), kind, "the grant's owner hears of it");
        assert_eq!(world.nodes[1].colour(2), Some(0));
        world.assert_clean();
    }
}

#[test]
fn a_pull_waits_for_no_event() {
    let mut world = World::new(2);
    let (handle, name) = grant(&mut world, 1, Access::Read, 2);
    let options = TransferOptions {
        after: Some(FIRST),
        ..TransferOptions::default()
    };
    let now = world.now;
    let refused = world.nodes[0]
        .machine
        .pull(now, &name, POOL, target(blocks([1])), options);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert!(!world.nodes[0].machine.awaits(FIRST));
    world.cancel(1, handle);
    world.assert_clean();
}
