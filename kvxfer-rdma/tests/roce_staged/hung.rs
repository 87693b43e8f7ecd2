//! Copies that never end: whoever waits for them is told, their blocks and buffers are not used again, and others go on.

use std::sync::mpsc;

use kvxfer_core::{Error, Generation, SlotId};

use super::*;

const BYTES: u64 = 256 * KIB;

/// Two nodes whose fences do not take long.
fn joined(site: &Site) -> Pair {
    site.pair_with(|config| {
        slow_to_give_up(config);
        config.fence_limit = ms(site.choose(100, 400));
    })
}

/// A domain whose copies hang from now on.
fn hanging() -> Domain {
    let domain = Domain::new(ms(1));
    domain.0.hang_copies(true);
    domain
}

fn copying(domain: &Domain) {
    until("a copy runs", || domain.0.copies_running() > 0);
}

/// Why the memory of a transfer, or of a slot, has failed.
fn failure(log: &Log) -> Error {
    log.wait("the failure", |event| match event {
        LinkEvent::MemoryFailed { error, .. } | LinkEvent::SlotCorrupt { error, .. } => Some(error.clone()),
        _ => None,
    })
}

fn assert_hung(log: &Log) {
    let error = failure(log);
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{error}");
    assert!(error.to_string().contains("it has not ended"), "{error}");
}

/// The left side's transfer is stopped, as after a verdict.
fn stop(pair: &Pair, sent: &Sent) {
    sent.gate.close();
    pair.left_link.stop(sent.id);
    pair.left_log.quiet(sent.id);
}

/// Other memory of both sides is written, and read, as if nothing had happened: the host's, and another domain's.
fn others_go_on(pair: &Pair) {
    pair.wait_for_rails(1);
    let healthy = Domain::new(ms(1));
    for staged in [false, true] {
        let memory = healthy.memory(&pair.left, staged, &[BYTES]);
        let target = healthy.memory(&pair.right, staged, &[BYTES]);
        let stream = range(0, BYTES);
        memory.fill(0, 5);
        pair.carry(&memory, &stream, &target, &stream);
        target.fill(0, 6);
        pair.fetch(&memory, &stream, &target, &stream);
    }
}

fn in_use(node: &Node) -> u64 {
    node.counter("staging_buffers_in_use")
}

/// Buffers that the left and the right side never get back; those of others come back, a message later.
fn until_in_use(pair: &Pair, lost: (u64, u64)) {
    until("the others' buffers are back", || {
        (in_use(&pair.left), in_use(&pair.right)) == lost
    });
}

/// Not within a time in which all that ends has ended.
fn never_fenced(node: &Node, slot: (SlotId, Generation)) {
    std::thread::sleep(ms(300));
    assert!(
        !node.slots.fenced(slot.0, slot.1),
        "blocks are given back while they may still be written"
    );
}

#[test]
fn a_gather_that_never_ends_costs_its_source_alone() {
    let site = Site::open();
    let (pair, domain) = (joined(&site), hanging());
    let memory = domain.memory(&pair.left, true, &[BYTES]);
    let target = pair.right.memory(&[BYTES]);
    let stream = range(0, BYTES);
    let slot = pair.right.grant(stream.clone(), &target, None);
    let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    copying(&domain);
    // The receiver does not want it any more. It cannot know that nothing was posted: its fence is the queue pair's.
    assert_eq!(pair.right.take_back(&pair.right_link, slot), Close::Waiting);
    target.paint(&stream, 1);
    assert_hung(&pair.left_log);
    stop(&pair, &sent);
    others_go_on(&pair);
    assert!(!sent.gate.fenced(), "a source is given back while it is being read");
    // It ends after all. By then nobody believes it.
    domain.0.hang_copies(false);
    until("the copy has ended", || domain.0.copies_running() == 0);
    others_go_on(&pair);
    assert!(!sent.gate.fenced() && target.is_all(&stream, 1));
    until_in_use(&pair, (1, 0));
}

#[test]
fn a_scatter_that_ends_late_is_waited_for_while_others_go_on() {
    let site = Site::open();
    let (pair, domain) = (joined(&site), hanging());
    let memory = pair.left.memory(&[BYTES]);
    let target = domain.memory(&pair.right, true, &[BYTES]);
    let stream = range(0, BYTES);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    copying(&domain);
    assert_eq!(pair.right.slots.close(slot.0, slot.1), Close::Waiting);
    pair.right_link.revoke(slot.0, slot.1);
    stop(&pair, &sent);
    assert!(sent.gate.fenced(), "the source is not needed any more");
    never_fenced(&pair.right, slot);
    others_go_on(&pair);
    never_fenced(&pair.right, slot);
    domain.0.hang_copies(false);
    until("the slot's fence", || pair.right.slots.fenced(slot.0, slot.1));
    assert!(arrival.wait(Duration::ZERO).is_none());
    assert!(pair.left_log.lost().is_empty() && pair.right_log.lost().is_empty());
    nothing_in_use(&pair);
}

#[test]
fn a_scatter_that_never_ends_outlives_its_rail_and_others_go_on() {
    let site = Site::open();
    let (pair, domain) = (joined(&site), hanging());
    let memory = pair.left.memory(&[BYTES]);
    let target = domain.memory(&pair.right, true, &[BYTES]);
    let stream = range(0, BYTES);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    copying(&domain);
    site.down(1);
    pair.right_log.wait("loss", |event| {
        matches!(event, LinkEvent::LaneLost { .. }).then_some(())
    });
    site.up(1);
    assert_hung(&pair.right_log);
    pair.right.slots.close(slot.0, slot.1);
    pair.right_link.revoke(slot.0, slot.1);
    stop(&pair, &sent);
    others_go_on(&pair);
    never_fenced(&pair.right, slot);
    assert!(arrival.wait(Duration::ZERO).is_none());
    until_in_use(&pair, (0, 1));
}

/// What was asked for and never shown is not waited for by who reads.
#[test]
fn an_exposure_that_is_never_shown_holds_nobody() {
    let site = Site::open();
    let (pair, domain) = (joined(&site), hanging());
    let memory = pair.left.memory(&[BYTES]);
    let target = domain.memory(&pair.right, true, &[BYTES]);
    let stream = range(0, BYTES);
    let slot = pair.left.grant(stream.clone(), &memory, None);
    let sent = pair.pull(&memory, slot, stream.clone(), &target, stream.clone());
    copying(&domain);
    pair.left.take_back(&pair.left_link, slot);
    stop(&pair, &sent);
    assert!(pair.left.slots.fenced(slot.0, slot.1));
    others_go_on(&pair);
    assert!(pair.left_log.lost().is_empty() && pair.right_log.lost().is_empty());
    // The owner's end of the link waits for it, but not for ever.
    pair.close();
    pair.left_log.closed();
    pair.right_log.closed();
    until_in_use(&pair, (0, 1));
}

#[test]
fn what_was_read_and_is_never_put_in_place_is_reported_with_its_link() {
    let site = Site::open();
    let (pair, domain) = (joined(&site), hanging());
    let memory = domain.memory(&pair.left, true, &[BYTES]);
    let target = pair.right.memory(&[BYTES]);
    let stream = range(0, BYTES);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.left.grant(stream.clone(), &memory, Some(arrival.clone()));
    pair.pull(&memory, slot, stream.clone(), &target, stream.clone());
    copying(&domain);
    assert_eq!(pair.left.slots.close(slot.0, slot.1), Close::Waiting);
    pair.left_link.revoke(slot.0, slot.1);
    never_fenced(&pair.left, slot);
    others_go_on(&pair);
    pair.close();
    pair.left_log.closed();
    assert_hung(&pair.left_log);
    never_fenced(&pair.left, slot);
    assert!(arrival.wait(Duration::ZERO).is_none());
}

#[test]
fn a_link_that_closes_does_not_wait_for_ever() {
    let site = Site::open();
    for sides in SIDES {
        let (pair, domain) = (joined(&site), hanging());
        let memory = domain.memory(&pair.left, sides.source, &[BYTES]);
        let target = domain.memory(&pair.right, sides.destination, &[BYTES]);
        let stream = range(0, BYTES);
        let slot = pair.right.grant(stream.clone(), &target, None);
        let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
        copying(&domain);
        pair.close();
        pair.left_log.closed();
        pair.right_log.closed();
        sent.gate.close();
        pair.right.slots.close(slot.0, slot.1);
        // Where both are staged the gather hangs, and nothing is ever written.
        let (source, destination) = (sides.source, !sides.source);
        assert_hung(if source { &pair.left_log } else { &pair.right_log });
        assert_eq!(sent.gate.fenced(), !source, "{sides:?}");
        assert_eq!(pair.right.slots.fenced(slot.0, slot.1), !destination, "{sides:?}");
        assert_eq!(
            (in_use(&pair.left), in_use(&pair.right)),
            (source.into(), destination.into()),
            "{sides:?}"
        );
    }
}

/// Without a word to the links before.
#[test]
fn endpoints_end_under_copies_that_never_do() {
    let site = Site::open();
    for sides in SIDES {
        let (pair, domain) = (joined(&site), hanging());
        let memory = domain.memory(&pair.left, sides.source, &[BYTES]);
        let target = domain.memory(&pair.right, sides.destination, &[BYTES]);
        let stream = range(0, BYTES);
        let slot = pair.right.grant(stream.clone(), &target, None);
        let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
        copying(&domain);
        let slots = pair.right.slots.clone();
        let (ended, end) = mpsc::channel();
        let ending = std::thread::spawn(move || {
            drop((pair, memory, target));
            let _ = ended.send(());
        });
        end.recv_timeout(PATIENCE).expect("the endpoints end");
        ending.join().unwrap();
        sent.gate.close();
        slots.close(slot.0, slot.1);
        let source = sides.source;
        assert_eq!(sent.gate.fenced(), !source, "{sides:?}");
        assert_eq!(slots.fenced(slot.0, slot.1), source, "{sides:?}");
    }
}
