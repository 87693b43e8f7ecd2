//! Links that reach the peer's memory themselves: who is let in and stopped, reads, and the way to another transport.

use std::time::Duration;

use kvxfer_core::ErrorKind;
use kvxfer_core::error::Destination;
use kvxfer_core::machine::*;
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::wire::{Access, Verdict};

use crate::handoff::{members, pulled};
use crate::transfers::{grant, grant_with, pull, push};
use crate::world::*;

fn direct(count: usize) -> World {
    World::over(count, &[DIRECT, MEMORY])
}

fn admitted(world: &World, node: usize) -> usize {
    let admit = |told: &&Told| matches!(told, Told::Admit(..));
    world.nodes[node].told.iter().filter(admit).count()
}

fn revoked(world: &World, node: usize) -> usize {
    let revoke = |told: &&Told| matches!(told, Told::Revoke(..));
    world.nodes[node].told.iter().filter(revoke).count()
}

/// Which transport a node uses with the other, as it says.
fn path(world: &World, node: usize) -> (Option<String>, Vec<String>) {
    let last = world.nodes[node]
        .changes
        .iter()
        .rev()
        .find_map(|(_, change)| match change {
            PeerChange::Path { transport, refused } => Some((transport.clone(), refused.clone())),
            _ => None,
        });
    let (transport, refused) = last.unwrap();
    (transport, refused.into_iter().map(|(name, _)| name).collect())
}

#[test]
fn a_slot_is_admitted_when_it_is_opened_and_let_go_when_it_arrives() {
    let mut world = direct(2);
    world.nodes[0].paint(3, 30);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    world.run_ms(20);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(9), Some(30));
    assert_eq!((admitted(&world, 1), revoked(&world, 1)), (1, 0));
    // A grant whose writer is not known is admitted by the links.
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let transfer = push(&mut world, 0, 3, &name, TransferOptions::default());
    world.run_ms(10);
    world.ok(0, transfer);
    world.ok(1, handle);
    assert_eq!(admitted(&world, 1), 1);
    // One that is made for a holder, by the machine.
    let holder = Some(world.nodes[0].incarnation);
    let options = GrantOptions {
        holder,
        ..GrantOptions::default()
    };
    let (handle, _) = grant_with(&mut world, 1, Access::Write, 2, options);
    world.run_ms(1);
    assert_eq!(admitted(&world, 1), 2);
    world.cancel(1, handle);
    world.run_ms(10);
    assert_eq!(world.error(1, handle), ErrorKind::Cancelled);
    assert_eq!(revoked(&world, 1), 1);
    world.run_ms(31_000);
    world.assert_clean();
}

#[test]
fn an_end_waits_until_the_writer_is_quiet() {
    let mut world = direct(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.held.insert(1);
    world.deaf.insert(0);
    world.fill(1, claim, blocks([9]));
    world.run_ms(20);
    world.cancel(1, claim);
    // Past the limit for links whose receiver places.
    world.run_ms(2_000);
    assert_eq!(revoked(&world, 1), 1);
    assert!(world.ended(1, claim).is_none(), "the writer may still write");
    let Some(&Told::Revoke(slot, generation)) = world.nodes[1].told.last() else {
        panic!("{:?}", world.nodes[1].told);
    };
    assert!(world.nodes[1].slots.remote_quiet(slot, generation));
    let (now, peer) = (world.now, world.nodes[0].incarnation);
    world.nodes[1].machine.link_event(now, peer, LinkEvent::SlotQuiet);
    world.run_ms(10);
    assert_eq!(world.error(1, claim), ErrorKind::Cancelled);
    assert_eq!(world.error(0, offer), ErrorKind::Cancelled);
    world.release(1);
    world.assert_clean();
}

#[test]
fn a_writer_that_is_never_quiet_costs_the_blocks() {
    let mut world = direct(2);
    world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.held.insert(1);
    world.deaf.insert(0);
    world.fill(1, claim, blocks([9]));
    world.run_ms(20);
    world.cancel(1, claim);
    world.run_ms(2_600);
    match world.ended(1, claim) {
        Some(Err(error)) => assert_eq!(error.destination(), Destination::Quarantined),
        other => panic!("{other:?}"),
    }
    assert_eq!(world.gauge(1, "slots_quarantined"), 1);
}

#[test]
fn a_closed_link_writes_no_more() {
    let mut world = direct(2);
    world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.held.insert(1);
    world.fill(1, claim, blocks([9]));
    world.run_ms(20);
    world.kill(0);
    world.run_ms(2_700);
    match world.ended(1, claim) {
        Some(Err(error)) => {
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert_eq!(error.destination(), Destination::Written);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(world.gauge(1, "slots_quarantined"), 0);
}

#[test]
fn a_pulled_claim_is_read_by_its_own_device() {
    let mut world = direct(2);
    for block in 3..7 {
        world.nodes[0].paint(block, block as u8 * 10);
    }
    let offer = world.offer(0, "r");
    let claim = world.claim_with(1, "r", &[0], pulled(1));
    world.fill(1, claim, blocks([9, 2, 4, 7]));
    world.run_ms(5);
    let now = world.now;
    let machine = &mut world.nodes[0].machine;
    machine.append(now, offer, &blocks([3, 4, 5, 6])).unwrap();
    machine.ready(now, offer, (0, 6), (0, 2)).unwrap();
    world.run_ms(5);
    assert!(world.ended(1, claim).is_none());
    let now = world.now;
    world.nodes[0].machine.ready(now, offer, (6, 12), (0, 1)).unwrap();
    world.nodes[0].machine.finish(now, offer, 16).unwrap();
    world.run_ms(10);
    assert!(matches!(world.ok(1, claim), Outcome::Arrived { bytes: 512 }));
    assert_eq!(members(world.ok(0, offer))[0].verdict, Verdict::Arrived);
    let colours: Vec<_> = [9, 2, 4, 7].map(|block| world.nodes[1].colour(block)).into();
    assert_eq!(colours, [Some(30), Some(40), Some(50), Some(60)]);
    // Nobody was let in, and the source sent nothing.
    assert_eq!((admitted(&world, 1), revoked(&world, 1)), (0, 0));
    world.assert_clean();
}

#[test]
fn blocks_taken_back_while_they_are_read_never_arrive() {
    let mut world = direct(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim_with(1, "r", &[0], pulled(1));
    world.held.insert(1);
    world.fill(1, claim, blocks([9]));
    world.run_ms(5);
    let now = world.now;
    let gate = world.nodes[0].machine.retract(now, offer, &[3]).unwrap();
    assert!(gate.fenced(), "nobody at the source reads them");
    // The read ends, and the source is asked, before its word is there.
    world.release(1);
    world.run_ms(20);
    assert_eq!(world.error(1, claim), ErrorKind::Retracted);
    assert_eq!(world.error(0, offer), ErrorKind::Retracted);
    world.assert_clean();
}

#[test]
fn a_restart_voids_what_was_read() {
    let mut world = direct(2);
    world.nodes[0].paint(3, 30);
    world.nodes[0].paint(4, 40);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim_with(1, "r", &[0], pulled(1));
    world.held.insert(1);
    world.fill(1, claim, blocks([9]));
    world.run_ms(5);
    let now = world.now;
    world.nodes[0].machine.restart(now, offer).unwrap();
    world.fill_offer(0, offer, blocks([4]));
    world.run_ms(5);
    world.release(1);
    world.run_ms(20);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(9), Some(40));
    world.assert_clean();
}

#[test]
fn a_cancelled_pull_stops_reading() {
    let mut world = direct(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim_with(1, "r", &[0], pulled(1));
    world.held.insert(1);
    world.fill(1, claim, blocks([9]));
    world.run_ms(5);
    assert_eq!(world.gauge(1, "link_transfers"), 1);
    world.cancel(1, claim);
    world.run_ms(5);
    assert_eq!(world.error(1, claim), ErrorKind::Cancelled);
    assert_eq!(world.error(0, offer), ErrorKind::Cancelled);
    world.release(1);
    world.run_ms(5);
    world.assert_clean();
}

#[test]
fn a_read_grant_is_read_by_the_readers_device_once() {
    let mut world = direct(3);
    world.nodes[1].paint(2, 22);
    let (handle, name) = grant(&mut world, 1, Access::Read, 2);
    let transfer = pull(&mut world, 0, &name, 7);
    let second = pull(&mut world, 2, &name, 7);
    world.run_ms(10);
    assert!(matches!(world.ok(0, transfer), Outcome::Transferred { bytes: 128 }));
    assert!(matches!(world.ok(1, handle), Outcome::Granted { bytes: 128, .. }));
    assert_eq!(world.nodes[0].colour(7), Some(22));
    assert_eq!(world.error(2, second), ErrorKind::NotOffered);
    assert_eq!(admitted(&world, 0) + admitted(&world, 2), 0);
    world.assert_clean();
}

#[test]
fn a_cancelled_read_grant_ends_its_pull() {
    let mut world = direct(2);
    let (handle, name) = grant(&mut world, 1, Access::Read, 2);
    world.held.insert(0);
    let transfer = pull(&mut world, 0, &name, 7);
    world.run_ms(5);
    world.cancel(1, handle);
    world.release(0);
    world.run_ms(10);
    assert_eq!(world.error(0, transfer), ErrorKind::Cancelled);
    assert_eq!(world.error(1, handle), ErrorKind::Cancelled);
    world.assert_clean();
}

#[test]
fn a_transport_that_cannot_be_used_is_said_and_the_next_is_taken() {
    for node in 0..2 {
        let mut world = direct(2);
        world.broken.insert((node, DIRECT));
        world.nodes[0].paint(3, 30);
        let offer = world.full_offer(0, "r", blocks([3]));
        let claim = world.claim(1, "r", &[0]);
        world.fill(1, claim, blocks([9]));
        world.run_ms(20);
        world.ok(1, claim);
        world.ok(0, offer);
        for end in 0..2 {
            let expected = (Some(MEMORY.to_string()), vec![DIRECT.to_string()]);
            assert_eq!(path(&world, end), expected, "node {end}");
            let peer = world.nodes[1 - end].incarnation;
            let lines = world.nodes[end].machine.explain(peer);
            assert!(lines.iter().any(|line| line.starts_with("not direct: ")), "{lines:?}");
        }
        world.assert_clean();
    }
}

#[test]
fn what_a_failed_link_was_given_goes_to_the_next() {
    for failing in 0..2 {
        let mut world = direct(2);
        for block in 0..4 {
            world.nodes[0].paint(block, 10 + block as u8);
        }
        let (granted, write) = grant(&mut world, 1, Access::Write, 8);
        let (served, read) = grant(&mut world, 0, Access::Read, 1);
        let push = push(&mut world, 0, 0, &write, TransferOptions::default());
        let pull = pull(&mut world, 1, &read, 9);
        let offers = [
            world.full_offer(0, "pushed", blocks([2])),
            world.full_offer(0, "pulled", blocks([3])),
        ];
        world.held.insert(1);
        let claims = [
            world.claim(1, "pushed", &[0]),
            world.claim_with(1, "pulled", &[0], pulled(7)),
        ];
        world.fill(1, claims[0], blocks([10]));
        world.fill(1, claims[1], blocks([11]));
        world.run_ms(5);
        world.fail_link(failing, 1 - failing);
        world.run_ms(5);
        world.release(1);
        world.run_ms(50);
        for handle in [push, served, offers[0], offers[1]] {
            world.ok(0, handle);
        }
        for handle in [pull, granted, claims[0], claims[1]] {
            world.ok(1, handle);
        }
        let colours: Vec<_> = (8..12).map(|block| world.nodes[1].colour(block)).collect();
        assert_eq!(colours, [Some(10), Some(11), Some(12), Some(13)]);
        assert_eq!(path(&world, 0).0.as_deref(), Some(MEMORY));
        assert_eq!(path(&world, 1).0.as_deref(), Some(MEMORY));
        world.assert_clean();
    }
}

#[test]
fn both_ends_may_fail_at_once() {
    let mut world = direct(2);
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    world.held.insert(1);
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.run_ms(5);
    world.fail_link(0, 1);
    world.fail_link(1, 0);
    world.run_ms(5);
    world.release(1);
    world.run_ms(20);
    world.ok(0, transfer);
    world.ok(1, handle);
    assert_eq!(path(&world, 0).0.as_deref(), Some(MEMORY));
    assert_eq!(path(&world, 1).0.as_deref(), Some(MEMORY));
    world.assert_clean();
}

#[test]
fn the_one_transport_that_is_named_is_not_replaced_silently() {
    let mut world = World::over(2, &[DIRECT]);
    world.broken.insert((0, DIRECT));
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.run_ms(20);
    assert_eq!(world.error(0, transfer), ErrorKind::Unsupported);
    assert_eq!(world.error(1, handle), ErrorKind::Unsupported);
    assert_eq!(path(&world, 0), (None, vec![DIRECT.to_string()]));
    // It is tried again, and may work then.
    world.broken.clear();
    world.run_ms(1_500);
    assert_eq!(path(&world, 0).0.as_deref(), Some(DIRECT));
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.run_ms(20);
    world.ok(0, transfer);
    world.ok(1, handle);
    world.assert_clean();
}

#[test]
fn a_pool_that_is_not_registered_with_the_transport_is_refused() {
    let mut world = direct(2);
    let (now, pool) = (world.now, kvxfer_core::PoolId(2));
    let setup = PoolSetup {
        layout: world.nodes[1].layout.clone(),
        regions: vec![world.nodes[1].region.clone()].into(),
        serves: true,
        receives: true,
        keys: Vec::new(),
    };
    let machine = &mut world.nodes[1].machine;
    machine.add_pool(now, pool, setup).unwrap();
    let (options, blocks_wanted) = (GrantOptions::default(), target(blocks([2])));
    let (_, name) = machine
        .grant(now, pool, Access::Write, blocks_wanted, options, None)
        .unwrap();
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.run_ms(20);
    match world.ended(0, transfer) {
        Some(Err(error)) => {
            assert_eq!(error.kind(), ErrorKind::NotRegistered);
            assert!(error.to_string().contains(DIRECT), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_two_ends_of_a_link_talk_in_order_and_only_to_each_other() {
    let mut world = direct(2);
    let address = world.address(1);
    let now = world.now;
    world.nodes[0].machine.connect(now, &address).unwrap();
    // Before the session is there nothing can be said; then, at once.
    world.run_ms(5);
    let said = |world: &mut World, from: usize, word: u8| {
        let (now, peer) = (world.now, world.nodes[1 - from].incarnation);
        let event = LinkEvent::Message(vec![word]);
        world.nodes[from].machine.link_event(now, peer, event);
    };
    for word in 0..5 {
        said(&mut world, 0, word);
        said(&mut world, 1, word + 10);
    }
    world.run_ms(5);
    let heard = |world: &World, node: usize| -> Vec<u8> {
        let words = world.nodes[node].told.iter();
        words
            .filter_map(|told| match told {
                Told::Message(body) => Some(body[0]),
                _ => None,
            })
            .collect()
    };
    assert_eq!(heard(&world, 1), [0, 1, 2, 3, 4]);
    assert_eq!(heard(&world, 0), [10, 11, 12, 13, 14]);
    // After a failure at one end, the other's words of the failed link come too late.
    world.fail_link(0, 1);
    world.run(Duration::from_micros(1));
    said(&mut world, 1, 99);
    world.run_ms(5);
    said(&mut world, 0, 42);
    world.run_ms(5);
    assert_eq!(heard(&world, 0), [10, 11, 12, 13, 14]);
    assert_eq!(
        heard(&world, 1),
        [0, 1, 2, 3, 4, 42],
        "the next link's words are its own"
    );
    let why = world.nodes[1].changes.iter().any(|(_, change)| {
        matches!(change, PeerChange::Path { refused, .. }
            if refused.iter().any(|(name, why)| name == DIRECT && why.contains("it is gone")))
    });
    assert!(why, "the other end's reason is said here");
}

/// The cases above must fail under the defects that they are there for.
#[cfg(feature = "mutants")]
#[test]
fn the_mutants_of_one_sided_links_are_caught() {
    use kvxfer_core::mutants::{self, Mutant};
    let cases: [(Mutant, fn()); 4] = [
        (Mutant::ForgetRevoke, an_end_waits_until_the_writer_is_quiet),
        (Mutant::AdmitWithoutGate, an_end_waits_until_the_writer_is_quiet),
        (
            Mutant::FallBackToTheFailed,
            what_a_failed_link_was_given_goes_to_the_next,
        ),
        (
            Mutant::SkipValidateOfReads,
            blocks_taken_back_while_they_are_read_never_arrive,
        ),
    ];
    for (mutant, case) in cases {
        mutants::set(Some(mutant));
        let caught = std::panic::catch_unwind(case).is_err();
        mutants::set(None);
        assert!(caught, "{} got away", mutant.name());
    }
}
