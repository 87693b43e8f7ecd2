//! Sessions: made, broken, resumed, refused, lost.

use std::time::Duration;

use kvxfer_core::machine::*;
use kvxfer_core::wire::lane::LaneHello;
use kvxfer_core::wire::{Access, EndpointAddress, Frame, Message, Verdict};
use kvxfer_core::{Error, ErrorKind};

use crate::world::*;

fn readies(world: &World, node: usize) -> Vec<bool> {
    let resumed = |change: &PeerChange| match change {
        PeerChange::Ready { resumed, .. } => Some(*resumed),
        _ => None,
    };
    world.nodes[node]
        .changes
        .iter()
        .filter_map(|(_, change)| resumed(change))
        .collect()
}

fn losses(world: &World, node: usize) -> Vec<ErrorKind> {
    world.nodes[node]
        .changes
        .iter()
        .filter_map(|(_, change)| match change {
            PeerChange::Lost(error) => Some(error.kind()),
            _ => None,
        })
        .collect()
}

fn connect(world: &mut World, node: usize, to: usize) {
    let address = world.address(to);
    let now = world.now;
    world.nodes[node].machine.connect(now, &address).unwrap();
}

fn raw_grant(world: &mut World, node: usize, block: u32) -> (HandleId, kvxfer_core::wire::Grant) {
    let now = world.now;
    let target = target(blocks([block]));
    world.nodes[node]
        .machine
        .grant(now, POOL, Access::Write, target, GrantOptions::default(), None)
        .unwrap()
}

#[test]
fn simultaneous_opens_make_one_session() {
    for (a, b) in [(0, 1), (1, 0)] {
        let mut world = World::new(2);
        connect(&mut world, a, b);
        connect(&mut world, b, a);
        connect(&mut world, a, b);
        world.run_ms(50);
        for node in 0..2 {
            assert_eq!(readies(&world, node), [false]);
            assert_eq!(world.gauge(node, "sessions"), 1);
            assert_eq!(world.gauge(node, "connections"), 1);
        }
        world.run_ms(10_000);
        assert!(losses(&world, 0).is_empty() && losses(&world, 1).is_empty());
        let name = &world.nodes[a].machine.peers()[0].1;
        assert_eq!(name, &format!("node-{b}"));
        assert!(!world.nodes[a].machine.explain(world.nodes[b].incarnation).is_empty());
    }
}

#[test]
fn a_session_resumes_with_what_was_lost() {
    let mut world = World::new(2);
    world.nodes[0].paint(3, 33);
    connect(&mut world, 1, 0);
    world.run_ms(10);
    for round in 0..8u32 {
        // The break comes at another point of the exchange each time.
        let key = format!("r{round}");
        let offer = world.full_offer(0, &key, blocks([3]));
        let claim = world.claim_with(1, &key, &[0], claim_options(9));
        world.fill(1, claim, blocks([round]));
        world.run(Duration::from_micros(u64::from(round) * 97));
        world.cut(0, 1);
        world.run_ms(200);
        world.ok(1, claim);
        world.ok(0, offer);
        assert_eq!(world.nodes[1].colour(round), Some(33));
    }
    assert_eq!(
        readies(&world, 0),
        [false, true, true, true, true, true, true, true, true]
    );
    world.assert_clean();
}

#[test]
fn messages_that_come_twice_count_once() {
    let mut world = World::new(2);
    world.echo = true;
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    world.run_ms(20);
    world.ok(1, claim);
    world.ok(0, offer);
    world.assert_clean();
}

#[test]
fn a_dead_peer_is_lost_in_time() {
    let mut world = World::new(3);
    let offer = world.offer(0, "r");
    let claim = world.claim(1, "r", &[0]);
    let other = world.claim(1, "s", &[2]);
    world.fill(1, claim, blocks([9]));
    world.run_ms(100);
    world.kill(0);
    world.run_ms(3_000);
    assert_eq!(world.error(1, claim), ErrorKind::PeerLost);
    assert!(world.ended(1, other).is_none());
    assert_eq!(losses(&world, 1), [ErrorKind::PeerLost]);
    let _ = offer;
}

#[test]
fn silence_is_noticed_on_a_connection_that_stays_up() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.run_ms(100);
    world.mute.insert(1);
    world.run_ms(3_000);
    assert_eq!(world.error(0, offer), ErrorKind::PeerLost);
    world.mute.clear();
    world.run_ms(3_000);
    assert_eq!(world.error(1, claim), ErrorKind::PeerLost);
    world.assert_clean();
}

#[test]
fn a_sender_that_cannot_know_says_so() {
    let mut world = World::new(2);
    let whole = world.full_offer(0, "whole", blocks([3]));
    let part = world.offer(0, "part");
    let now = world.now;
    world.nodes[0].machine.append(now, part, &blocks([4, 5])).unwrap();
    world.nodes[0].machine.ready(now, part, (0, 4), (0, 2)).unwrap();
    for key in ["whole", "part"] {
        let claim = world.claim(1, key, &[0]);
        let wanted = if key == "whole" { blocks([8]) } else { blocks([9, 10]) };
        world.fill(1, claim, wanted);
    }
    let (_, name) = raw_grant(&mut world, 1, 2);
    let now = world.now;
    let push = world.nodes[0]
        .machine
        .push(now, POOL, target(blocks([1])), &name, TransferOptions::default())
        .unwrap();
    world.held.insert(1);
    world.run_ms(10);
    world.kill(1);
    world.run_ms(3_000);
    assert_eq!(world.error(0, whole), ErrorKind::Unknown);
    assert_eq!(world.error(0, part), ErrorKind::PeerLost);
    assert_eq!(world.error(0, push), ErrorKind::Unknown);
}

#[test]
fn a_restarted_peer_is_stale() {
    let mut world = World::new(2);
    let old = world.address(0);
    let claim = world.claim(1, "r", &[0]);
    world.run_ms(50);
    world.kill(0);
    world.restart(0);
    world.run_ms(50);
    assert_eq!(world.error(1, claim), ErrorKind::StalePeer);
    let now = world.now;
    let late = world.nodes[1]
        .machine
        .claim(now, b"r", POOL, &[old], claim_options(3))
        .unwrap();
    world.run_ms(5);
    assert_eq!(world.error(1, late), ErrorKind::StalePeer);
    let fresh = world.claim(1, "r", &[0]);
    let offer = world.full_offer(0, "r", blocks([3]));
    world.fill(1, fresh, blocks([9]));
    world.run_ms(20);
    world.ok(1, fresh);
    world.ok(0, offer);
    world.assert_clean();
}

#[test]
fn a_peer_that_comes_back_under_its_address_ends_its_old_self() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.run_ms(50);
    world.kill(1);
    world.restart(1);
    // The new one dials first.
    connect(&mut world, 1, 0);
    world.run_ms(50);
    assert_eq!(world.error(0, offer), ErrorKind::StalePeer);
    let _ = claim;
}

#[test]
fn an_address_that_does_not_answer_is_unreachable() {
    let mut world = World::new(2);
    world.nodes[0].alive = false;
    let claim = world.claim(1, "r", &[0]);
    world.run_ms(2_400);
    assert!(world.ended(1, claim).is_none());
    world.run_ms(200);
    assert_eq!(world.error(1, claim), ErrorKind::Unreachable);
    assert_eq!(world.gauge(1, "peers"), 0);
    assert_eq!(losses(&world, 1), [ErrorKind::Unreachable]);
}

#[test]
fn a_bare_address_is_for_tools() {
    let mut world = World::new(2);
    let bare = EndpointAddress {
        incarnation: None,
        ..world.address(0)
    };
    let offer = world.full_offer(0, "r", blocks([3]));
    let now = world.now;
    for (set, late) in [(1, false), (2, true)] {
        let addresses = [bare.clone()];
        let claim = world.nodes[1]
            .machine
            .claim(now, b"r", POOL, &addresses, claim_options(set))
            .unwrap();
        world.run_ms(50);
        if late {
            assert_eq!(world.error(1, claim), ErrorKind::AlreadyClaimed);
        } else {
            world.fill(1, claim, blocks([9]));
            world.run_ms(50);
            world.ok(1, claim);
            world.ok(0, offer);
        }
    }
    world.nodes[0].alive = false;
    let nobody = EndpointAddress {
        sockets: vec!["127.0.0.9:1".parse().unwrap()],
        ..bare
    };
    let now = world.now;
    let claim = world.nodes[1]
        .machine
        .claim(now, b"r", POOL, &[nobody], claim_options(3))
        .unwrap();
    world.run_ms(3_000);
    assert_eq!(world.error(1, claim), ErrorKind::Unreachable);
}

#[test]
fn a_goodbye_ends_everything_at_once() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    let waiting = world.claim(1, "s", &[0]);
    world.run_ms(50);
    let now = world.now;
    world.nodes[0].machine.shutdown(now);
    world.run_ms(50);
    assert_eq!(world.error(0, offer), ErrorKind::Closed);
    assert_eq!(world.error(1, claim), ErrorKind::Closed);
    assert_eq!(world.error(1, waiting), ErrorKind::PeerLost);
    assert!(world.nodes[0].machine.is_quiet());
    let now = world.now;
    let late = world.nodes[0].machine.offer(now, b"t", POOL, offer_options());
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Closed);
    let claim = world.claim(1, "r", &[0]);
    world.run_ms(50);
    assert_eq!(world.error(1, claim), ErrorKind::Closed);
}

#[test]
fn a_shutdown_is_bounded() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    world.held.insert(1);
    world.run_ms(50);
    world.block(0, 1);
    let now = world.now;
    world.nodes[0].machine.shutdown(now);
    world.run_ms(1_300);
    assert!(world.ended(0, offer).is_some());
    assert!(world.nodes[0].machine.is_quiet());
}

#[test]
fn a_draining_endpoint_serves_what_is_open() {
    let mut world = World::new(2);
    let offer = world.full_offer(0, "r", blocks([3]));
    connect(&mut world, 1, 0);
    world.run_ms(10);
    let now = world.now;
    world.nodes[0].machine.drain(now);
    world.run_ms(10);
    assert!(
        world.nodes[1]
            .changes
            .iter()
            .any(|(_, change)| matches!(change, PeerChange::Draining))
    );
    let now = world.now;
    let late = world.nodes[0].machine.offer(now, b"s", POOL, offer_options());
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Closed);
    let claim = world.claim(1, "r", &[0]);
    let hopeless = world.claim(1, "s", &[0]);
    world.fill(1, claim, blocks([9]));
    world.run_ms(20);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.error(1, hopeless), ErrorKind::NotOffered);
    world.assert_clean();
}

#[test]
fn a_lost_lane_is_fenced_and_its_chunks_sent_again() {
    let mut world = World::new(2);
    world.nodes[0].paint(3, 33);
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.held.insert(1);
    world.fill(1, claim, blocks([9]));
    world.run_ms(10);
    world.lose_lane(0, 1);
    world.run_ms(10);
    world.release(1);
    world.run_ms(10);
    world.ok(1, claim);
    world.ok(0, offer);
    assert_eq!(world.nodes[1].colour(9), Some(33));
    world.assert_clean();
}

#[test]
fn lanes_belong_to_a_session() {
    let mut world = World::new(2);
    connect(&mut world, 1, 0);
    world.run_ms(10);
    let hello = LaneHello {
        from: world.nodes[1].incarnation,
        to: world.nodes[0].incarnation,
        token: 5,
        lane: kvxfer_core::flow::LaneName { index: 0, epoch: 1 },
    };
    let kind = |hello: &LaneHello| world.nodes[0].machine.lane_allowed(hello).unwrap_err().kind();
    assert_eq!(kind(&hello), ErrorKind::Unauthenticated);
    let stale = LaneHello {
        to: hello.from,
        ..hello
    };
    assert_eq!(kind(&stale), ErrorKind::StalePeer);
    let stranger = LaneHello {
        from: hello.to,
        ..hello
    };
    assert_eq!(kind(&stranger), ErrorKind::PeerLost);
}

/// One side has given the session up, the other has not: its undecided pushes and members are asked for.
#[test]
fn a_forgotten_session_is_replaced_and_outcomes_are_asked_for() {
    let mut world = World::with(
        2,
        |config| {
            if config.name == "node-0" {
                config.liveness = Duration::from_secs(20);
            }
        },
        |_| layout(0..2, 16),
    );
    let offer = world.full_offer(0, "r", blocks([3]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9]));
    let (granted, name) = raw_grant(&mut world, 1, 2);
    world.held.insert(1);
    let now = world.now;
    let push = world.nodes[0]
        .machine
        .push(now, POOL, target(blocks([1])), &name, TransferOptions::default())
        .unwrap();
    world.run_ms(300);
    world.block(0, 1);
    world.run_ms(3_000);
    assert_eq!(world.error(1, claim), ErrorKind::PeerLost);
    assert_eq!(world.error(1, granted), ErrorKind::PeerLost);
    assert!(world.ended(0, offer).is_none() && world.ended(0, push).is_none());
    world.unblock();
    world.run_ms(3_000);
    // Both learn the owner's verdict instead of guessing.
    assert_eq!(world.error(0, offer), ErrorKind::PeerLost);
    assert_eq!(world.error(0, push), ErrorKind::PeerLost);
    world.release(1);
    world.assert_clean();
}

#[test]
fn other_versions_transports_and_selves_are_refused() {
    let mut world = World::new(2);
    let id = ConnectionId(4);
    let from = "127.0.0.5:1".parse().unwrap();
    let now = world.now;
    // Node 1's own hello, captured.
    connect(&mut world, 1, 0);
    let dial = match world.nodes[1].machine.poll_action() {
        Some(Action::Dial { connection, .. }) => connection,
        _ => panic!("a dial"),
    };
    world.nodes[1].machine.dialed(now, dial);
    let hello = match world.nodes[1].machine.poll_action() {
        Some(Action::Send {
            frame: Frame::Hello(hello),
            ..
        }) => hello,
        _ => panic!("a hello"),
    };
    let mut refusal = |change: &dyn Fn(&mut kvxfer_core::wire::Hello)| {
        let mut hello = hello.clone();
        change(&mut hello);
        let machine = &mut world.nodes[0].machine;
        machine.accepted(now, id, from);
        machine.frame(now, id, Frame::Hello(hello));
        let mut kind = None;
        while let Some(action) = machine.poll_action() {
            if let Action::Send {
                frame: Frame::Refuse(error),
                ..
            } = action
            {
                kind = Some(error.kind());
            }
        }
        kind
    };
    assert_eq!(refusal(&|hello| hello.versions = (7, 9)), Some(ErrorKind::Unsupported));
    assert_eq!(refusal(&|hello| hello.transports.clear()), Some(ErrorKind::Unsupported));
    let other = Some(kvxfer_core::Incarnation::from_bits(3));
    assert_eq!(refusal(&|hello| hello.expects = other), Some(ErrorKind::StalePeer));
    let own = hello.expects.unwrap();
    assert_eq!(
        refusal(&|hello| hello.incarnation = own),
        Some(ErrorKind::InvalidArgument)
    );
    assert_eq!(refusal(&|_| {}), None);
}

#[test]
fn nonsense_closes_the_session_and_nothing_panics() {
    let nonsense = [
        Message::Restarted { claim: 1, attempt: 0 },
        Message::Matched {
            claim: 1,
            attempt: 1,
            pool: POOL,
        },
        Message::ReadPart {
            claim: 5,
            attempt: 1,
            part: 3,
        },
        Message::ClaimEnded {
            claim: 77,
            verdict: Verdict::Arrived,
        },
        Message::ClaimEndedAck { claim: 77 },
        Message::Validated {
            id: 3,
            claim: false,
            live: true,
        },
        Message::ClaimRefused {
            claim: 1,
            error: Error::new(ErrorKind::NotOffered, "x"),
        },
        Message::Goodbye,
    ];
    for message in nonsense {
        let mut world = World::new(2);
        let claim = world.claim(1, "r", &[0]);
        world.full_offer(0, "r", blocks([3]));
        world.run_ms(50);
        let now = world.now;
        let mine = world.nodes[0].incarnation;
        // Node 0's connection at node 1.
        for connection in 0..4u64 {
            let connection = ConnectionId((1 << 63) | connection);
            let frame = Frame::Message {
                sequence: 3,
                acknowledged: 1,
                message: Box::new(message.clone()),
            };
            world.nodes[1].machine.frame(now, connection, frame);
        }
        world.run_ms(3_000);
        let _ = (claim, mine);
    }
}
