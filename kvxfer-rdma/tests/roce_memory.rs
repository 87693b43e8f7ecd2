//! Memory that has to be settled after devices have written it, and looked at before it is used.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvxfer_core::ErrorKind;
use kvxfer_core::flow::{Close, SendEvent};
use kvxfer_core::transport::LinkEvent;
use support::*;

/// What a log says of a slot whose memory has failed.
fn slot_failure(log: &Log) -> Option<ErrorKind> {
    let events = log.events.lock();
    events.iter().find_map(|event| match event {
        LinkEvent::SlotCorrupt { error, .. } => Some(error.kind()),
        _ => None,
    })
}

/// What it says of a transfer whose memory has failed.
fn transfer_failure(log: &Log) -> Option<ErrorKind> {
    let events = log.events.lock();
    events.iter().find_map(|event| match event {
        LinkEvent::MemoryFailed { error, .. } => Some(error.kind()),
        _ => None,
    })
}

fn refused(log: &Log) -> bool {
    log.count(|event| matches!(event, LinkEvent::Send(SendEvent::Refused(_)))) > 0
}

#[test]
fn what_is_written_is_settled_before_it_arrives() {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(4 * MIB);
    let (memory, target) = (pair.left.memory(&[4 * MIB]), pair.right.memory_of(vec![region]));
    for round in 0..20 {
        memory.fill(0, round + 1);
        let stream = scattered(64, 13, 64 * KIB);
        pair.carry(&memory, &stream, &target, &scattered(64, 29, 64 * KIB));
    }
    assert!(seen.settled() >= 20);
    assert_eq!(seen.verified(), 20, "once for each slot");
}

#[test]
fn what_is_read_is_settled_before_it_arrives() {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(4 * MIB);
    let (memory, target) = (pair.left.memory_of(vec![region]), pair.right.memory(&[4 * MIB]));
    for round in 0..20 {
        target.fill(0, round + 1);
        let stream = scattered(64, 13, 64 * KIB);
        pair.fetch(&memory, &stream, &target, &scattered(64, 29, 64 * KIB));
    }
    assert!(seen.settled() >= 20);
    assert_eq!(seen.verified(), 20, "once for each transfer");
}

#[test]
fn a_fence_settles_what_has_landed() {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(64 * KIB);
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory_of(vec![region]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    let slot = pair.right.grant(stream.clone(), &target, None);
    site.delay(ms(30));
    pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()));
    let before = seen.settled();
    let close = pair.right.take_back(&pair.right_link, slot);
    assert_eq!(close, Close::Waiting);
    assert!(seen.settled() > before, "it was given back without being settled");
}

#[test]
fn what_cannot_be_settled_never_arrives_and_is_not_given_back() {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(64 * KIB);
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory_of(vec![region]));
    let stream = range(0, 64 * KIB);
    seen.settle_fails.store(true, Ordering::SeqCst);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    until("the slot has failed", || {
        slot_failure(&pair.right_log) == Some(ErrorKind::ResourceExhausted)
    });
    pair.right_link.revoke(slot.0, slot.1);
    assert!(arrival.wait(ms(300)).is_none());
    assert!(!pair.right.slots.fenced(slot.0, slot.1), "its fence cannot be made");
    assert_eq!(pair.right.counter("rdma_admitted_slots"), 1);
    // The link goes on for others.
    let other = pair.right.memory(&[64 * KIB]);
    pair.carry(&memory, &stream, &other, &stream);
}

#[test]
fn a_read_that_cannot_be_settled_never_arrives() {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(64 * KIB);
    let (memory, target) = (pair.left.memory_of(vec![region]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    seen.settle_fails.store(true, Ordering::SeqCst);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.left.grant(stream.clone(), &memory, Some(arrival.clone()));
    pair.pull(&memory, slot, stream.clone(), &target, stream.clone());
    until("the slot has failed", || {
        slot_failure(&pair.left_log) == Some(ErrorKind::ResourceExhausted)
    });
    assert!(arrival.wait(ms(200)).is_none());
    assert!(!pair.left.slots.fenced(slot.0, slot.1));
}

#[test]
fn other_memory_under_a_sources_address_ends_its_transfer_alone() {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(64 * KIB);
    let (memory, target) = (pair.left.memory_of(vec![region]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    seen.verify_fails.store(true, Ordering::SeqCst);
    let slot = pair.right.grant(stream.clone(), &target, None);
    let sent = pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    until("the transfer has failed", || {
        transfer_failure(&pair.left_log) == Some(ErrorKind::NotRegistered)
    });
    sent.gate.close();
    pair.left_link.stop(sent.id);
    pair.left_log.quiet(sent.id);
    pair.right.take_back(&pair.right_link, slot);
    assert!(target.is_all(&stream, 0), "some of it was sent");
    seen.verify_fails.store(false, Ordering::SeqCst);
    pair.carry(&memory, &stream, &target, &stream);
}

#[test]
fn other_memory_under_a_destinations_address_is_never_written() {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(64 * KIB);
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory_of(vec![region]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    seen.verify_fails.store(true, Ordering::SeqCst);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    until("the slot has failed", || {
        slot_failure(&pair.right_log) == Some(ErrorKind::NotRegistered)
    });
    until("the sender has heard", || refused(&pair.left_log));
    assert!(arrival.wait(Duration::ZERO).is_none() && pair.right.slots.fenced(slot.0, slot.1));
    assert!(target.is_all(&stream, 0), "it was written");
    seen.verify_fails.store(false, Ordering::SeqCst);
    pair.carry(&memory, &stream, &target, &stream);
}
