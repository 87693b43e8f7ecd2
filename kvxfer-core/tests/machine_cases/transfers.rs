//! Grants, pushes and pulls without offers and claims.

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::error::Destination;
use kvxfer_core::flow::{ChunkHeader, PartExtent, Placement};
use kvxfer_core::machine::*;
use kvxfer_core::wire::{Access, Grant};
use kvxfer_core::{ErrorKind, Incarnation};

use crate::world::*;

pub(crate) fn grant(world: &mut World, node: usize, access: Access, block: u32) -> (HandleId, Grant) {
    grant_with(world, node, access, block, GrantOptions::default())
}

pub(crate) fn grant_with(
    world: &mut World,
    node: usize,
    access: Access,
    block: u32,
    options: GrantOptions,
) -> (HandleId, Grant) {
    let now = world.now;
    world.nodes[node]
        .machine
        .grant(now, POOL, access, target(blocks([block])), options, None)
        .unwrap()
}

pub(crate) fn push(world: &mut World, node: usize, block: u32, grant: &Grant, options: TransferOptions) -> HandleId {
    let now = world.now;
    world.nodes[node]
        .machine
        .push(now, POOL, target(blocks([block])), grant, options)
        .unwrap()
}

pub(crate) fn pull(world: &mut World, node: usize, grant: &Grant, block: u32) -> HandleId {
    let now = world.now;
    let options = TransferOptions::default();
    world.nodes[node]
        .machine
        .pull(now, grant, POOL, target(blocks([block])), options)
        .unwrap()
}

#[test]
fn a_push_carries_a_message() {
    let mut world = World::new(2);
    world.nodes[0].paint(1, 11);
    for round in 0..3u8 {
        let (handle, name) = grant(&mut world, 1, Access::Write, 2);
        let message: Arc<[u8]> = vec![round; 5].into();
        let options = TransferOptions {
            message: Some(message.clone()),
            ..TransferOptions::default()
        };
        let transfer = push(&mut world, 0, 1, &name, options);
        let second =
            world.nodes[0]
                .machine
                .push(world.now, POOL, target(blocks([1])), &name, TransferOptions::default());
        assert_eq!(second.unwrap_err().kind(), ErrorKind::InvalidArgument);
        world.run_ms(10);
        assert!(matches!(world.ok(0, transfer), Outcome::Transferred { bytes: 128 }));
        match world.ok(1, handle) {
            Outcome::Granted {
                bytes: 128,
                message: Some(got),
            } => assert_eq!(got, message),
            other => panic!("{other:?}"),
        }
        assert_eq!(world.nodes[1].colour(2), Some(11));
    }
    world.assert_clean();
}

#[test]
fn a_cancelled_grant_ends_its_push() {
    let mut world = World::new(3);
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.held.insert(1);
    world.run_ms(5);
    world.cancel(1, handle);
    world.run_ms(5);
    assert_eq!(world.error(1, handle), ErrorKind::Cancelled);
    world.release(1);
    world.run_ms(5);
    assert_eq!(world.error(0, transfer), ErrorKind::Cancelled);
    let now = world.now;
    let options = TransferOptions::default();
    let again = world.nodes[0]
        .machine
        .push(now, POOL, target(blocks([1])), &name, options);
    assert_eq!(again.unwrap_err().kind(), ErrorKind::InvalidArgument);
    world.run_ms(1_000);
    // The verdict was acknowledged: nothing is remembered of the grant.
    let other = push(&mut world, 2, 1, &name, TransferOptions::default());
    world.run_ms(10);
    assert_eq!(world.error(2, other), ErrorKind::Unknown);
    world.assert_clean();
}

#[test]
fn a_lasting_push_hears_the_verdict_on_the_session() {
    let mut world = World::new(2);
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.held.insert(1);
    world.run_ms(300);
    world.cancel(1, handle);
    world.run_ms(5);
    assert_eq!(world.error(0, transfer), ErrorKind::Cancelled);
    world.release(1);
    world.assert_clean();
}

#[test]
fn a_cancelled_or_late_push_ends_its_grant() {
    for late in [false, true] {
        let mut world = World::new(2);
        let (handle, name) = grant(&mut world, 1, Access::Write, 2);
        let options = TransferOptions {
            deadline: late.then(|| Duration::from_millis(50)),
            ..TransferOptions::default()
        };
        let transfer = push(&mut world, 0, 1, &name, options);
        world.held.insert(1);
        world.run_ms(5);
        if !late {
            world.cancel(0, transfer);
        }
        world.run_ms(60);
        let kind = if late {
            ErrorKind::DeadlineExceeded
        } else {
            ErrorKind::Cancelled
        };
        assert_eq!(world.error(0, transfer), kind);
        assert_eq!(world.error(1, handle), kind);
        world.release(1);
        world.assert_clean();
    }
}

/// Whoever ends what he has not begun, because there is no session yet, has spent the grant all the same.
#[test]
fn what_is_ended_before_the_first_session_ends_its_grant() {
    for access in [Access::Write, Access::Read] {
        for late in [false, true] {
            let mut world = World::new(2);
            let (handle, name) = grant(&mut world, 1, access, 2);
            let transfer = match access {
                Access::Write => push(&mut world, 0, 1, &name, TransferOptions::default()),
                Access::Read => pull(&mut world, 0, &name, 7),
            };
            if late {
                // The connection is on its way.
                world.block(0, 1);
                world.run_ms(1);
            }
            world.cancel(0, transfer);
            world.run_ms(1);
            assert_eq!(world.error(0, transfer), ErrorKind::Cancelled);
            world.unblock();
            world.run_ms(3000);
            assert_eq!(world.error(1, handle), ErrorKind::Cancelled, "{access:?} {late}");
            world.assert_clean();
        }
    }
}

#[test]
fn a_push_that_arrived_is_not_undone() {
    let mut world = World::new(2);
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    while world.ended(1, handle).is_none() {
        world.run(Duration::from_micros(20));
    }
    assert!(world.ended(0, transfer).is_none());
    world.cancel(0, transfer);
    world.run_ms(5);
    world.ok(1, handle);
    world.ok(0, transfer);
    world.assert_clean();
}

#[test]
fn only_the_holder_uses_a_grant() {
    let mut world = World::new(3);
    let holder = Some(world.nodes[2].incarnation);
    let options = GrantOptions {
        holder,
        ..GrantOptions::default()
    };
    let (handle, name) = grant_with(&mut world, 1, Access::Write, 2, options);
    let thief = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.run_ms(10);
    assert_eq!(world.error(0, thief), ErrorKind::AlreadyClaimed);
    let transfer = push(&mut world, 2, 1, &name, TransferOptions::default());
    world.run_ms(10);
    world.ok(2, transfer);
    world.ok(1, handle);
    world.assert_clean();
}

#[test]
fn a_grant_expires() {
    let mut world = World::new(2);
    let options = GrantOptions {
        deadline: Some(Duration::from_millis(30)),
        ..GrantOptions::default()
    };
    let (handle, name) = grant_with(&mut world, 1, Access::Write, 2, options);
    assert_eq!(name.remaining_ms, 30);
    world.run_ms(31);
    assert_eq!(world.error(1, handle), ErrorKind::DeadlineExceeded);
    let transfer = push(&mut world, 0, 1, &name, TransferOptions::default());
    world.run_ms(10);
    assert_eq!(world.error(0, transfer), ErrorKind::DeadlineExceeded);
    world.assert_clean();
}

#[test]
fn verdicts_are_kept_for_a_while() {
    let mut world = World::new(2);
    let (handle, _) = grant(&mut world, 1, Access::Write, 2);
    world.cancel(1, handle);
    world.run_ms(29_000);
    assert_eq!(world.gauge(1, "slots_retained"), 1);
    world.run_ms(2_000);
    assert_eq!(world.gauge(1, "slots_in_use"), 0);
}

#[test]
fn a_read_grant_is_pulled_once() {
    let mut world = World::new(3);
    world.nodes[1].paint(2, 22);
    let (handle, name) = grant(&mut world, 1, Access::Read, 2);
    let transfer = pull(&mut world, 0, &name, 7);
    world.run_ms(10);
    assert!(matches!(world.ok(0, transfer), Outcome::Transferred { bytes: 128 }));
    assert!(matches!(
        world.ok(1, handle),
        Outcome::Granted {
            bytes: 128,
            message: None
        }
    ));
    assert_eq!(world.nodes[0].colour(7), Some(22));
    let now = world.now;
    let options = TransferOptions::default();
    let again = world.nodes[0]
        .machine
        .pull(now, &name, POOL, target(blocks([7])), options);
    assert_eq!(again.unwrap_err().kind(), ErrorKind::InvalidArgument);
    let other = pull(&mut world, 2, &name, 7);
    world.run_ms(10);
    assert_eq!(world.error(2, other), ErrorKind::NotOffered);
    world.assert_clean();
}

#[test]
fn a_read_is_ended_from_either_side() {
    for from_owner in [false, true] {
        let mut world = World::new(2);
        let (handle, name) = grant(&mut world, 1, Access::Read, 2);
        let transfer = pull(&mut world, 0, &name, 7);
        world.held.insert(0);
        world.run_ms(5);
        if from_owner {
            world.cancel(1, handle);
        } else {
            world.cancel(0, transfer);
        }
        world.run_ms(5);
        assert_eq!(world.error(0, transfer), ErrorKind::Cancelled);
        assert_eq!(world.error(1, handle), ErrorKind::Cancelled);
        world.release(0);
        world.assert_clean();
    }
}

#[test]
fn a_write_grant_is_not_read_and_ones_own_is_not_used() {
    let mut world = World::new(2);
    let (_, name) = grant(&mut world, 1, Access::Write, 2);
    let now = world.now;
    let options = TransferOptions::default();
    let wrong = world.nodes[0]
        .machine
        .pull(now, &name, POOL, target(blocks([1])), options.clone());
    assert_eq!(wrong.unwrap_err().kind(), ErrorKind::InvalidArgument);
    let own = world.nodes[1]
        .machine
        .push(now, POOL, target(blocks([1])), &name, options);
    assert_eq!(own.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_pool_in_use_stays() {
    let mut world = World::new(2);
    let (handle, _) = grant(&mut world, 1, Access::Write, 2);
    let now = world.now;
    let busy = world.nodes[1].machine.remove_pool(now, POOL).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    world.cancel(1, handle);
    world.run_ms(1);
    let now = world.now;
    world.nodes[1].machine.remove_pool(now, POOL).unwrap();
    let gone = world.nodes[1].machine.remove_pool(now, POOL).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotRegistered);
}

#[test]
fn a_thread_that_does_not_leave_quarantines_the_blocks() {
    let mut world = World::new(2);
    let (handle, name) = grant(&mut world, 1, Access::Write, 2);
    let header = ChunkHeader {
        slot: name.name.slot,
        generation: name.name.generation,
        part: 0,
        extent: PartExtent::WHOLE,
        offset: 0,
        length: 128,
        has_message: false,
        checksummed: false,
    };
    let writer = Incarnation::from_bits(99);
    let Ok(Placement::Place { gate, .. }) = world.nodes[1].slots.begin(writer, &header) else {
        panic!("the slot is open");
    };
    let inside = gate.enter_owned().unwrap();
    world.cancel(1, handle);
    world.run_ms(900);
    assert!(world.ended(1, handle).is_none());
    assert_eq!(world.nodes[1].machine.waiting_on(handle).unwrap().what, "fence");
    world.run_ms(200);
    match world.ended(1, handle) {
        Some(Err(error)) => assert_eq!(error.destination(), Destination::Quarantined),
        other => panic!("{other:?}"),
    }
    assert_eq!(world.gauge(1, "slots_quarantined"), 1);
    drop(inside);
    world.run_ms(60_000);
    assert_eq!(world.gauge(1, "slots_in_use"), 1);
    let now = world.now;
    let busy = world.nodes[1].machine.remove_pool(now, POOL).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy);
}

#[test]
fn an_end_waits_for_the_thread_inside() {
    let mut world = World::new(2);
    world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.held.insert(1);
    world.fill(1, claim, blocks([9]));
    world.run_ms(10);
    let header = ChunkHeader {
        slot: kvxfer_core::SlotId(0),
        generation: kvxfer_core::Generation(1),
        part: 0,
        extent: PartExtent {
            token_start: 0,
            token_end: 4,
            layer_start: 0,
            layer_end: 2,
            states: true,
        },
        offset: 0,
        length: 128,
        has_message: false,
        checksummed: false,
    };
    let writer = world.nodes[0].incarnation;
    let Ok(Placement::Place { gate, .. }) = world.nodes[1].slots.begin(writer, &header) else {
        panic!("the slot is open");
    };
    let inside = gate.enter_owned().unwrap();
    world.cancel(1, claim);
    world.run_ms(100);
    assert!(world.ended(1, claim).is_none());
    drop(inside);
    world.run_ms(20);
    assert_eq!(world.error(1, claim), ErrorKind::Cancelled);
    world.release(1);
    world.assert_clean();
}
