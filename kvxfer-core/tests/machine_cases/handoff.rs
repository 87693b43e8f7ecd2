//! Offers and claims: matching, streaming, and every way they end.

use std::time::Duration;

use kvxfer_core::ErrorKind;
use kvxfer_core::machine::*;
use kvxfer_core::wire::Verdict;

use crate::world::*;

fn paint(world: &World, node: usize, colours: &[(u32, u8)]) {
    for &(block, colour) in colours {
        world.nodes[node].paint(block, colour);
    }
}

pub(crate) fn members(outcome: Outcome) -> Vec<MemberVerdict> {
    match outcome {
        Outcome::Released { members } => members,
        other => panic!("{other:?}"),
    }
}

fn failed(member: &MemberVerdict) -> ErrorKind {
    match &member.verdict {
        Verdict::Failed(error) => error.kind(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_offer_meets_a_claim() {
    let mut world = World::new(2);
    paint(&world, 0, &[(3, 30), (5, 50)]);
    let offer = world.full_offer(0, "r", blocks([3, 5]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9, 2]));
    world.run_ms(20);
    assert!(matches!(world.ok(1, claim), Outcome::Arrived { bytes: 256 }));
    assert_eq!(world.nodes[1].colour(9), Some(30));
    assert_eq!(world.nodes[1].colour(2), Some(50));
    let members = members(world.ok(0, offer));
    assert_eq!((members.len(), &members[0].verdict), (1, &Verdict::Arrived));
    assert!(world.nodes[1].notices.contains(&(claim, Notice::Matched)));
    assert!(world.nodes[0].notices.contains(&(offer, Notice::Matched)));
    world.assert_clean();
}

#[test]
fn a_claim_waits_for_its_offer_and_then_for_its_blocks() {
    let mut world = World::new(2);
    let claim = world.claim(1, "r", &[0]);
    let waits = |world: &World| world.nodes[1].machine.waiting_on(claim).map(|waiting| waiting.what);
    assert_eq!(waits(&world).as_deref(), Some("peer"));
    world.run_ms(5);
    assert_eq!(waits(&world).as_deref(), Some("offer"));
    assert_eq!(world.gauge(0, "waiting_claims"), 1);
    paint(&world, 0, &[(0, 7)]);
    let offer = world.full_offer(0, "r", blocks([0]));
    world.run_ms(5);
    assert_eq!(waits(&world).as_deref(), Some("blocks"));
    world.held.insert(1);
    world.fill(1, claim, blocks([1]));
    world.run_ms(5);
    assert_eq!(waits(&world).as_deref(), Some("parts"));
    world.release(1);
    world.run_ms(5);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(waits(&world), None);
    assert_eq!(world.nodes[1].colour(1), Some(7));
    world.assert_clean();
}

#[test]
fn parts_are_streamed_before_and_after_the_grant() {
    let mut world = World::new(2);
    paint(&world, 0, &[(0, 1), (1, 2), (2, 3)]);
    let offer = world.offer(0, "r");
    let now = world.now;
    let first = |world: &mut World, tokens, layers| world.nodes[0].machine.ready(now, offer, tokens, layers);
    world.nodes[0].machine.append(now, offer, &blocks([0])).unwrap();
    first(&mut world, (0, 4), (0, 1)).unwrap();
    assert_eq!(
        first(&mut world, (3, 4), (0, 2)).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    assert_eq!(
        first(&mut world, (4, 8), (0, 2)).unwrap_err().kind(),
        ErrorKind::OutOfBounds
    );
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([5, 6, 7]));
    world.run_ms(5);
    assert!(world.ended(1, claim).is_none());
    let mut more = blocks([9, 1, 2]);
    more.groups[0].first_token = 4;
    more.groups[0].blocks.remove(0);
    let now = world.now;
    world.nodes[0].machine.append(now, offer, &more).unwrap();
    world.nodes[0].machine.ready(now, offer, (0, 8), (1, 2)).unwrap();
    world.run_ms(5);
    let now = world.now;
    world.nodes[0].machine.finish(now, offer, 12).unwrap();
    world.run_ms(5);
    world.ok(1, claim);
    let colours: Vec<_> = [5, 6, 7].map(|block| world.nodes[1].colour(block)).into();
    assert_eq!(colours, [Some(1), Some(2), Some(3)]);
    world.ok(0, offer);
    world.assert_clean();
}

#[test]
fn a_decline_before_the_offer_ends_it_at_once() {
    let mut world = World::new(2);
    let claim = world.claim(1, "r", &[0]);
    world.run_ms(5);
    let now = world.now;
    world.nodes[1].machine.decline(now, claim).unwrap();
    world.run_ms(5);
    assert_eq!(world.error(1, claim), ErrorKind::Declined);
    let offer = world.offer(0, "r");
    world.run_ms(0);
    assert_eq!(world.error(0, offer), ErrorKind::Declined);
    world.assert_clean();
}

#[test]
fn a_decline_without_a_session_still_reaches_the_source() {
    let mut world = World::new(2);
    let claim = world.claim(1, "r", &[0]);
    let now = world.now;
    world.nodes[1].machine.decline(now, claim).unwrap();
    world.run_ms(0);
    assert_eq!(world.error(1, claim), ErrorKind::Declined);
    let offer = world.offer(0, "r");
    world.run_ms(5);
    assert_eq!(world.error(0, offer), ErrorKind::Declined);
    world.assert_clean();
}

#[test]
fn either_side_cancels_midway() {
    for from_source in [false, true] {
        let mut world = World::new(2);
        let offer = world.full_offer(0, "r", blocks([3, 5]));
        let claim = world.claim(1, "r", &[0]);
        world.fill(1, claim, blocks([9, 2]));
        world.held.insert(1);
        world.run_ms(5);
        assert!(world.ended(1, claim).is_none() && world.ended(0, offer).is_none());
        if from_source {
            world.cancel(0, offer);
        } else {
            world.cancel(1, claim);
        }
        world.run_ms(5);
        assert_eq!(world.error(1, claim), ErrorKind::Cancelled);
        assert_eq!(world.error(0, offer), ErrorKind::Cancelled);
        // What was on its way lands nowhere.
        world.nodes[1].paint(9, 99);
        paint(&world, 0, &[(3, 1)]);
        world.release(1);
        world.run_ms(5);
        assert_eq!(world.nodes[1].colour(9), Some(99));
        world.assert_clean();
    }
}

#[test]
fn an_arrival_wins_over_a_crossing_cancel() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    world.run(Duration::from_micros(950));
    while world.gauge(1, "slots_in_use") == 0 {
        world.run(Duration::from_micros(50));
    }
    // The bytes are on their way; the source cancels before it hears that they are in place.
    world.run(Duration::from_micros(150));
    world.cancel(0, offer);
    world.run_ms(5);
    let arrived = matches!(world.ended(1, claim), Some(Ok(_)));
    let released = matches!(world.ended(0, offer), Some(Ok(_)));
    assert_eq!(arrived, released);
    world.assert_clean();
}

#[test]
fn retracted_blocks_never_count() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3, 5]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9, 2]));
    world.held.insert(1);
    world.run_ms(5);
    let now = world.now;
    let foreign = world.nodes[0].machine.retract(now, offer, &[4]).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::InvalidArgument);
    let gate = world.nodes[0].machine.retract(now, offer, &[5]).unwrap();
    assert!(gate.fenced());
    world.run_ms(5);
    assert_eq!(world.error(1, claim), ErrorKind::Retracted);
    assert_eq!(world.error(0, offer), ErrorKind::Retracted);
    let late = world.claim_with(1, "r", &[0], claim_options(77));
    world.run_ms(5);
    assert_eq!(world.error(1, late), ErrorKind::Retracted);
    world.release(1);
    world.assert_clean();
}

#[test]
fn a_restart_voids_earlier_bytes() {
    let mut world = World::new(2);
    paint(&world, 0, &[(0, 1), (1, 1), (2, 2), (3, 2)]);
    let offer = world.offer(0, "r");
    let now = world.now;
    world.nodes[0].machine.append(now, offer, &blocks([0, 1])).unwrap();
    world.nodes[0].machine.ready(now, offer, (0, 4), (0, 2)).unwrap();
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([5, 6]));
    world.run_ms(5);
    assert_eq!(world.nodes[1].colour(5), Some(1));
    let now = world.now;
    world.nodes[0].machine.restart(now, offer).unwrap();
    assert!(
        world.nodes[0]
            .machine
            .voided_gates(offer)
            .iter()
            .all(|gate| gate.fenced())
    );
    world.fill_offer(0, offer, blocks([2, 3]));
    world.run_ms(5);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(5), Some(2));
    assert_eq!(world.nodes[1].colour(6), Some(2));
    assert!(world.nodes[1].notices.contains(&(claim, Notice::Restarted)));
    world.assert_clean();
}

#[test]
fn two_sources_fill_one_claim() {
    let mut world = World::with(
        3,
        |_| {},
        |node| match node {
            0 => layout(0..2, 16),
            1 => layout(2..4, 16),
            _ => layout(0..4, 16),
        },
    );
    paint(&world, 0, &[(3, 8)]);
    paint(&world, 1, &[(4, 8)]);
    let first = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(2, "r", &[0, 1]);
    world.fill(2, claim, blocks([9]));
    world.run_ms(5);
    assert!(world.ended(2, claim).is_none());
    let second = world.full_offer(1, "r", blocks([4]));
    world.run_ms(5);
    assert!(matches!(world.ok(2, claim), Outcome::Arrived { bytes: 256 }));
    assert_eq!(world.nodes[2].colour(9), Some(8));
    world.ok(0, first);
    world.ok(1, second);
    world.assert_clean();
}

#[test]
fn a_source_that_is_not_needed_is_told() {
    let mut world = World::new(3);
    paint(&world, 0, &[(3, 8)]);
    let first = world.full_offer(0, "r", blocks([3]));
    let second = world.full_offer(1, "r", blocks([3]));
    let claim = world.claim(2, "r", &[0, 1]);
    world.fill(2, claim, blocks([9]));
    world.run_ms(10);
    world.ok(2, claim);
    world.ok(0, first);
    world.ok(1, second);
    world.assert_clean();
}

#[test]
fn a_claim_of_nothing_arrives_at_once() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([]));
    world.run_ms(10);
    assert!(matches!(world.ok(1, claim), Outcome::Arrived { bytes: 0 }));
    world.ok(0, offer);
    world.assert_clean();
}

#[test]
fn an_offer_serves_its_readers_and_no_more() {
    let mut world = World::new(4);
    let now = world.now;
    let options = OfferOptions {
        readers: 2,
        ..offer_options()
    };
    let offer = world.nodes[0].machine.offer(now, b"r", POOL, options).unwrap();
    let duplicate = world.nodes[0].machine.offer(now, b"r", POOL, offer_options());
    assert_eq!(duplicate.unwrap_err().kind(), ErrorKind::DuplicateKey);
    let claims: Vec<_> = (1..4).map(|node| world.claim(node, "r", &[0])).collect();
    world.run_ms(5);
    assert_eq!(world.error(3, claims[2]), ErrorKind::AlreadyClaimed);
    world.fill_offer(0, offer, blocks([3]));
    world.fill(1, claims[0], blocks([1]));
    world.run_ms(5);
    world.ok(1, claims[0]);
    assert!(world.ended(0, offer).is_none());
    world.fill(2, claims[1], blocks([1]));
    world.run_ms(5);
    world.ok(2, claims[1]);
    assert_eq!(members(world.ok(0, offer)).len(), 2);
    let late = world.claim(3, "r", &[0]);
    world.run_ms(5);
    assert_eq!(world.error(3, late), ErrorKind::AlreadyClaimed);
    world.assert_clean();
}

#[test]
fn an_offer_waits_for_all_members_and_one_failure_holds_nobody() {
    let mut world = World::new(3);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claims: Vec<_> = (0..2)
        .map(|member| {
            let options = ClaimOptions {
                member,
                members: 2,
                ..claim_options(5)
            };
            world.claim_with(1 + usize::from(member), "r", &[0], options)
        })
        .collect();
    world.fill(1, claims[0], blocks([1]));
    world.run_ms(10);
    world.ok(1, claims[0]);
    assert!(world.ended(0, offer).is_none());
    world.cancel(2, claims[1]);
    world.run_ms(10);
    let members = members(world.ok(0, offer));
    assert_eq!(members[0].verdict, Verdict::Arrived);
    assert_eq!(failed(&members[1]), ErrorKind::Cancelled);
    world.assert_clean();
}

#[test]
fn what_is_not_met_expires() {
    let mut world = World::new(2);
    let now = world.now;
    let deadline = Some(Duration::from_millis(50));
    let options = OfferOptions {
        deadline,
        ..offer_options()
    };
    let offer = world.nodes[0].machine.offer(now, b"a", POOL, options.clone()).unwrap();
    let met = world.nodes[0].machine.offer(now, b"c", POOL, options).unwrap();
    let claim_until = |set| ClaimOptions {
        deadline,
        ..claim_options(set)
    };
    let unmet = world.claim_with(1, "b", &[0], claim_until(1));
    let unfilled = world.claim_with(1, "c", &[0], claim_until(2));
    world.run_ms(49);
    assert!(world.ended(1, unmet).is_none());
    world.run_ms(10);
    assert_eq!(world.error(0, offer), ErrorKind::Unclaimed);
    assert_eq!(world.error(1, unmet), ErrorKind::Unclaimed);
    assert_eq!(world.error(1, unfilled), ErrorKind::DeadlineExceeded);
    assert_eq!(world.error(0, met), ErrorKind::DeadlineExceeded);
    let late = world.claim(1, "a", &[0]);
    world.run_ms(5);
    assert_eq!(world.error(1, late), ErrorKind::NotOffered);
    world.assert_clean();
}

#[test]
fn more_tokens_than_there_are_is_an_error_at_both_ends() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9, 2]));
    world.run_ms(10);
    assert_eq!(world.error(1, claim), ErrorKind::InvalidArgument);
    assert_eq!(world.error(0, offer), ErrorKind::InvalidArgument);
    world.assert_clean();
}

#[test]
fn another_geometry_is_refused_before_any_byte() {
    let mut world = World::with(
        2,
        |_| {},
        |node| match node {
            0 => layout(0..2, 16),
            _ => layout(1..4, 16),
        },
    );
    world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.run_ms(10);
    assert_eq!(world.error(1, claim), ErrorKind::GeometryMismatch);
    world.assert_clean();
}

#[test]
fn claims_wait_for_slots() {
    let mut world = World::new(2);
    let grants: Vec<_> = (0..64)
        .map(|_| {
            let now = world.now;
            let target = target(blocks([0]));
            let access = kvxfer_core::wire::Access::Write;
            world.nodes[1]
                .machine
                .grant(now, POOL, access, target, GrantOptions::default(), None)
                .unwrap()
                .0
        })
        .collect();
    world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    world.run_ms(50);
    let waits = world.nodes[1].machine.waiting_on(claim).unwrap().what;
    assert_eq!(waits, "credit");
    for grant in grants {
        world.cancel(1, grant);
    }
    // Their verdicts are kept for as long as a sender might ask.
    world.run_ms(29_000);
    assert!(world.ended(1, claim).is_none());
    world.run_ms(2_000);
    world.ok(1, claim);
    world.assert_clean();
}

#[test]
fn limits_say_busy() {
    let mut world = World::with(
        2,
        |config| {
            config.handles_max = 2;
            config.waiting_claims_max = 1;
        },
        |_| layout(0..1, 16),
    );
    let first = world.claim(1, "a", &[0]);
    let second = world.claim(1, "b", &[0]);
    let now = world.now;
    let addresses = [world.address(0)];
    let third = world.nodes[1]
        .machine
        .claim(now, b"c", POOL, &addresses, claim_options(1));
    assert_eq!(third.unwrap_err().kind(), ErrorKind::Busy);
    world.run_ms(5);
    assert_eq!(world.error(1, second), ErrorKind::Busy);
    world.cancel(1, first);
    world.assert_clean();
}

#[test]
fn grants_beyond_the_limit_queue_at_the_sender() {
    let mut world = World::with(2, |config| config.grants_per_peer_max = 2, |_| layout(0..1, 16));
    world.held.insert(1);
    let pairs: Vec<_> = (0..6)
        .map(|index| {
            let key = format!("r{index}");
            world.full_offer(0, &key, blocks([index]));
            let claim = world.claim_with(1, &key, &[0], claim_options(u128::from(index)));
            world.fill(1, claim, blocks([index]));
            claim
        })
        .collect();
    world.run_ms(10);
    assert_eq!(world.gauge(0, "link_transfers_queued"), 4);
    world.release(1);
    world.run_ms(10);
    for claim in pairs {
        world.ok(1, claim);
    }
    world.assert_clean();
}

pub(crate) fn pulled(set: u128) -> ClaimOptions {
    ClaimOptions {
        pull: true,
        ..claim_options(set)
    }
}

#[test]
fn a_pull_arrives_once_validated() {
    let mut world = World::new(2);
    paint(&world, 0, &[(3, 30), (5, 50)]);
    let offer = world.full_offer(0, "r", blocks([3, 5]));
    let claim = world.claim_with(1, "r", &[0], pulled(1));
    world.fill(1, claim, blocks([9, 2]));
    world.run_ms(20);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(9), Some(30));
    assert_eq!(world.nodes[1].colour(2), Some(50));
    world.assert_clean();
}

#[test]
fn a_pull_of_retracted_blocks_never_arrives() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim_with(1, "r", &[0], pulled(1));
    world.fill(1, claim, blocks([9]));
    world.held.insert(1);
    world.run_ms(5);
    // The bytes are in place, the question is under way, and the blocks are taken back.
    world.release(1);
    world.run(Duration::from_micros(20));
    assert!(world.ended(1, claim).is_none());
    assert_eq!(world.nodes[1].machine.waiting_on(claim).unwrap().what, "validation");
    let now = world.now;
    world.nodes[0].machine.retract(now, offer, &[3]).unwrap();
    world.run_ms(5);
    assert_eq!(world.error(1, claim), ErrorKind::Retracted);
    assert_eq!(world.error(0, offer), ErrorKind::Retracted);
    world.assert_clean();
}

#[test]
fn a_key_may_be_offered_again() {
    let mut world = World::new(2);
    for round in 0..3 {
        paint(&world, 0, &[(3, round)]);
        let offer = world.full_offer(0, "r", blocks([3]));
        let claim = world.claim_with(1, "r", &[0], claim_options(u128::from(round)));
        world.fill(1, claim, blocks([9]));
        world.run_ms(10);
        world.ok(1, claim);
        world.ok(0, offer);
        assert_eq!(world.nodes[1].colour(9), Some(round));
    }
    world.assert_clean();
}
