//! Each seeded mistake of the engine must be caught by a scenario that passes without it. On fakes.
#![cfg(feature = "mutants")]
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvxfer_core::PoolId;
use kvxfer_core::flow::{Close, Direction, SlotWatcher};
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::transport::LinkEvent;
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::RdmaConfig;
use kvxfer_testkit::staged::StagedMemory;
use kvxfer_testkit::transport::Ends;
use support::*;

/// What was found to be wrong.
type Verdict = Result<(), String>;

fn check(right: bool, wrong: impl Into<String>) -> Verdict {
    if right { Ok(()) } else { Err(wrong.into()) }
}

fn fabric(site: &Site) -> &FakeFabric {
    site.fabric.as_ref().expect("mutants are hunted on fakes")
}

/// The fence of a silent writer's queue pair ends when it is drained, not when patience does.
fn a_fence_drains() -> Verdict {
    let site = Site::open();
    let pair = site.pair_with(|config| {
        config.revoke = ms(50);
        config.fence_limit = Duration::from_secs(4);
    });
    let (memory, target) = (pair.left.memory(&[256 * KIB]), pair.right.memory(&[256 * KIB]));
    let stream = range(0, 256 * KIB);
    let slot = pair.right.grant(stream.clone(), &target, None);
    site.delay(ms(20));
    pair.hold_after_admission(slot, || {
        pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()))
    });
    let began = Instant::now();
    let close = pair.right.take_back(&pair.right_link, slot);
    let took = began.elapsed();
    check(close == Close::Waiting, format!("closed as {close:?}"))?;
    check(took < ms(2500), format!("the fence took {took:?}"))?;
    let reset = fabric(&site).counter("*", "resets_with_outstanding");
    check(
        reset == 0,
        format!("{reset} queue pairs were reset with work outstanding"),
    )
}

/// What a fenced queue pair's device has accepted is in memory before the blocks are given back.
fn a_fence_flushes() -> Verdict {
    let site = Site::with(&[("*", "late_placement_us", "400000")]);
    let pair = site.pair_with(|config| config.revoke = ms(50));
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    // Without immediates, which would make the device place what it has accepted.
    for _ in 0..65_536 {
        pair.right.grant(range(0, 1), &target, None);
    }
    let slot = pair.right.grant(stream.clone(), &target, None);
    pair.hold_after_admission(slot, || {
        pair.push(&memory, stream.clone(), slot, &target, stream.clone())
    });
    until("accepted", || pair.left.written() == 64 * KIB);
    let close = pair.right.take_back(&pair.right_link, slot);
    check(close == Close::Waiting, format!("closed as {close:?}"))?;
    target.paint(&stream, 1);
    std::thread::sleep(ms(600));
    check(target.is_all(&stream, 1), "blocks were written after their fence")
}

/// At the moment of arrival the bytes are in place.
struct Look {
    memory: Arc<Memory>,
    stream: Stream,
    wrong: Arc<AtomicBool>,
    arrival: Arc<Arrival>,
}

impl SlotWatcher for Look {
    fn arrived(&self, message: Option<Arc<[u8]>>) {
        if !self.memory.is_all(&self.stream, 0xee) {
            self.wrong.store(true, Ordering::SeqCst);
        }
        self.arrival.arrived(message);
    }
}

fn arrivals_are_true() -> Verdict {
    let site = Site::with(&[("*", "bandwidth_bytes_per_s", "4000000")]);
    let pair = site.pair();
    let (count, length) = (8u64, 32 * KIB);
    let (memory, target) = (
        pair.left.memory(&[count * length]),
        Arc::new(pair.right.memory(&[count * length])),
    );
    memory.paint(&range(0, count * length), 0xee);
    let wrong = Arc::new(AtomicBool::new(false));
    let slots: Vec<_> = (0..count)
        .map(|index| {
            let stream = range(index * length, length);
            let arrival = Arc::new(Arrival::default());
            let look: Arc<dyn SlotWatcher> = Arc::new(Look {
                memory: target.clone(),
                stream: stream.clone(),
                wrong: wrong.clone(),
                arrival: arrival.clone(),
            });
            let slot = pair
                .right
                .slots
                .open_target(
                    Box::new(StreamTarget { stream: stream.clone() }),
                    target.regions.clone(),
                    None,
                    PoolId(0),
                    Some(look),
                )
                .unwrap();
            pair.right_link.admit(slot.0, slot.1);
            (stream, slot, arrival)
        })
        .collect();
    std::thread::sleep(ms(50));
    // One after the other, so that the bytes of each come after the close of the one before.
    for (stream, slot, _) in &slots {
        pair.posted(|| pair.push(&memory, stream.clone(), *slot, &target, stream.clone()));
    }
    for (_, _, arrival) in &slots {
        check(arrival.wait(PATIENCE).is_some(), "something did not arrive")?;
    }
    check(!wrong.load(Ordering::SeqCst), "a slot arrived before its bytes")
}

/// A receiver that gives no receives back is not sent more immediates than it has receives for.
fn receives_are_not_overrun() -> Verdict {
    let site = Site::open();
    let pair = site.pair_with(|config| config.receive_depth = 2);
    let (memory, target) = (pair.left.memory(&[16 * KIB]), pair.right.memory(&[16 * KIB]));
    let slots: Vec<_> = (0..16)
        .map(|index| {
            let arrival = Arc::new(Arrival::default());
            let slot = pair
                .right
                .grant(range(index * KIB, KIB), &target, Some(arrival.clone()));
            pair.right_link.admit(slot.0, slot.1);
            (slot, arrival)
        })
        .collect();
    std::thread::sleep(ms(50));
    pair.left_log.hold();
    for (index, (slot, _)) in (0..).zip(&slots) {
        let stream = range(index * KIB, KIB);
        pair.push(&memory, stream.clone(), *slot, &target, stream);
    }
    let written = soon(Duration::from_secs(3), || pair.left.written() == 16 * KIB);
    pair.left_log.release();
    check(written, "not all was written")?;
    for (_, arrival) in &slots {
        check(arrival.wait(PATIENCE).is_some(), "something did not arrive")?;
    }
    let naks = fabric(&site).counter("*", "rnr_naks");
    check(naks == 0, format!("{naks} immediates found no receive"))?;
    check(pair.left_log.lost().is_empty(), "the rail was lost")
}

/// Nothing is written into a slot whose owner does not know that it may be: taking it back does not wait for that.
fn writes_wait_for_admission() -> Verdict {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    let slot = pair.right.grant(stream.clone(), &target, None);
    site.delay(ms(100));
    pair.left_log.hold();
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    std::thread::sleep(ms(30));
    let close = pair.right.slots.close(slot.0, slot.1);
    check(close == Close::Fenced, format!("closed as {close:?}"))?;
    target.paint(&stream, 1);
    std::thread::sleep(ms(300));
    check(
        target.is_all(&stream, 1),
        "blocks were written after they were given back",
    )
}

/// A sender says that it has stopped when nothing of it is under way.
fn stopped_means_stopped() -> Verdict {
    let site = Site::open();
    let pair = site.pair_with(|config| config.revoke = Duration::from_secs(3));
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    let slot = pair.right.grant(stream.clone(), &target, None);
    pair.right_link.admit(slot.0, slot.1);
    site.delay(ms(150));
    pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()));
    let close = pair.right.take_back(&pair.right_link, slot);
    check(close == Close::Waiting, format!("closed as {close:?}"))?;
    target.paint(&stream, 1);
    std::thread::sleep(ms(400));
    check(
        target.is_all(&stream, 1),
        "blocks were written after the sender had stopped",
    )
}

/// The receiver loses a queue pair by itself and makes the next one while it is still being told of the first one's closes.
fn epochs_are_kept_apart() -> Verdict {
    let site = Site::open();
    let (left, right) = site.nodes(1, |config: &mut RdmaConfig| config.retry_count = 0);
    let pair = Pair::joined(left, right, false).up();
    let fabric = fabric(&site);
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    // What is written does not get there, and what is said of it is late.
    fabric.set_now("fake1", "network_hold", "on").unwrap();
    pair.hold_after_admission(slot, || {
        pair.posted(|| pair.push(&memory, stream.clone(), slot, &target, stream.clone()))
    });
    fabric.set_now("fake1", "event", "port_down").unwrap();
    until("the receiver has lost its queue pair", || {
        !pair.right_log.lost().is_empty()
    });
    // It dials anew, which the other side answers only when it is heard again.
    std::thread::sleep(ms(200));
    fabric.set_now("fake1", "network_hold", "off").unwrap();
    // So that what is said of a close comes before its immediate.
    site.delay(ms(50));
    pair.left_log.release();
    check(arrival.wait(Duration::from_secs(5)).is_some(), "it did not arrive")?;
    check(target.is_all(&stream, 0xee), "it arrived without its bytes")?;
    let lost = pair.right_log.lost();
    let others: Vec<_> = lost
        .iter()
        .filter(|(_, _, error)| !error.to_string().contains("went down"))
        .collect();
    check(others.is_empty(), format!("lost more than was taken away: {others:?}"))?;
    let failed = pair.right_log.count(|event| matches!(event, LinkEvent::Failed(_)));
    check(failed == 0, "the link failed")
}

/// Blocks that are being read into are given back when the device is done with them.
fn reads_are_fenced() -> Verdict {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    target.paint(&stream, 0xee);
    let slot = pair.left.grant(stream.clone(), &memory, None);
    site.delay(ms(100));
    pair.posted(|| pair.pull(&memory, slot, stream.clone(), &target, stream.clone()));
    let close = pair.left.take_back(&pair.left_link, slot);
    memory.paint(&stream, 1);
    std::thread::sleep(ms(400));
    check(
        memory.is_all(&stream, 1),
        "blocks were read into after they were given back",
    )?;
    check(close == Close::Waiting, format!("closed as {close:?}"))
}

/// What has arrived is what the memory shows.
fn arrivals_are_shown() -> Verdict {
    let site = Site::open();
    let pair = site.pair();
    let (_, region) = Shown::allocate(64 * KIB);
    let (memory, target) = (pair.left.memory(&[64 * KIB]), pair.right.memory_of(vec![region]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    check(arrival.wait(PATIENCE).is_some(), "it did not arrive")?;
    check(
        target.is_all(&stream, 0xee),
        "the memory does not show what has arrived",
    )
}

/// Nothing is sent from memory that is not what it was.
fn other_memory_is_not_sent() -> Verdict {
    let site = Site::open();
    let pair = site.pair();
    let (seen, region) = Shown::allocate(64 * KIB);
    let (memory, target) = (pair.left.memory_of(vec![region]), pair.right.memory(&[64 * KIB]));
    let stream = range(0, 64 * KIB);
    memory.paint(&stream, 0xee);
    seen.verify_fails.store(true, Ordering::SeqCst);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    check(arrival.wait(ms(500)).is_none(), "other memory was sent")
}

/// Bytes that go through staging at both ends are those that were sent, and no buffer is used for two things at once.
fn staged_bytes_are_true() -> Verdict {
    let site = Site::open();
    let pair = site.pair();
    let domain = StagedMemory::new(ms(20), 7).unwrap();
    let memory = pair.left.memory_of(vec![domain.allocate(MIB).unwrap()]);
    let target = pair.right.memory_of(vec![domain.allocate(MIB).unwrap()]);
    memory.fill(0, 5);
    let stream = range(0, MIB);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(stream.clone(), &target, Some(arrival.clone()));
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    check(arrival.wait(PATIENCE).is_some(), "it did not arrive")?;
    check(memory.bytes(&stream) == target.bytes(&stream), "other bytes arrived")?;
    let misused = domain.violations();
    check(misused.is_empty(), format!("{misused:?}"))
}

/// What was written is settled before blocks are given back, also if none of it has arrived.
fn fences_settle() -> Verdict {
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
    check(close == Close::Waiting, format!("closed as {close:?}"))?;
    check(
        seen.settled() > before,
        "blocks were given back, and what was written to them may appear later",
    )
}

/// What a writer has left in a landing that it gave back is in place before the landing is another writer's.
fn landings_are_flushed() -> Verdict {
    let site = Site::with(&[("*", "late_placement_us", "10000000"), ("*", "flush_scope", "region")]);
    let fabric = fabric(&site);
    let domain = StagedMemory::new(ms(1), 7).unwrap();
    // The right node's one device has two peers.
    let mut configs = [site.config(0), site.config(1), site.config(0)];
    configs
        .iter_mut()
        .for_each(|config| config.revoke = Duration::from_secs(5));
    configs[0].queue_depth = 16;
    let [first, middle, second] = configs;
    let (left, right, other) = (node(1, first), node(2, middle), node(3, second));
    let ends = |from: &Node, token| {
        let ends = Ends::join(
            from,
            right.peer(from, token, true),
            &right,
            from.peer(&right, token, false),
        );
        ends.up();
        ends
    };
    let (of_left, of_other) = (ends(&left, 7), ends(&other, 8));
    let target = right.memory_of(vec![domain.allocate(2 * MIB).unwrap()]);
    let (low, high) = (range(0, MIB), range(MIB, MIB));
    let (theirs, mine) = (left.memory(&[4 * MIB]), other.memory(&[MIB]));
    mine.fill(0, 4);
    let push = |id, node: &Node, ends: &Ends, memory: &Memory, from: Stream, to: &Stream, arrival| {
        let slot = right.grant(to.clone(), &target, arrival);
        let before = node.counter("rail_requests_total");
        let sent = Push::new(id, slot, memory, from)
            .one_sided(Direction::Write, target.keys(), to.clone())
            .submit(&ends.left_link);
        until("posted", || node.counter("rail_requests_total") > before);
        (slot, sent)
    };
    // More pieces than fit the queue: it is revoked in the middle of a chunk, some of which is accepted and not placed.
    fabric.set_now("fake0", "latency_us", "50000").unwrap();
    let (slot, sent) = push(1, &left, &of_left, &theirs, scattered(1024, 3, KIB), &low, None);
    // The receiver's own requests are its flushes.
    fabric.set_now("fake1", "fail", "post_send:ENOMEM:1000000").unwrap();
    right.slots.close(slot.0, slot.1);
    of_left.right_link.revoke(slot.0, slot.1);
    of_left.left_log.refused(sent.id);
    sent.gate.close();
    of_left.left_link.stop(sent.id);
    of_left.left_log.quiet(sent.id);
    // The landing was given back; that it was comes over the relay.
    std::thread::sleep(ms(50));
    fabric.set_now("fake0", "latency_us", "0").unwrap();
    domain.hang_copies(true);
    let arrival = Arc::new(Arrival::default());
    push(2, &other, &of_other, &mine, range(0, MIB), &high, Some(arrival.clone()));
    until("a copy runs", || domain.copies_running() > 0);
    let before = fabric.counter("fake1", "late_bytes_flushed");
    check(before == 0, "the first writer's bytes are in place already")?;
    fabric.set_now("fake1", "fail", "").unwrap();
    until("the flush", || fabric.counter("fake1", "late_bytes_flushed") > 0);
    domain.hang_copies(false);
    check(arrival.wait(PATIENCE).is_some(), "it did not arrive")?;
    check(mine.bytes(&range(0, MIB)) == target.bytes(&high), "other bytes arrived")?;
    let misused = domain.violations();
    check(misused.is_empty(), format!("{misused:?}"))
}

/// Blocks that a copy still writes are not given back, however their link ends.
fn hung_copies_keep_their_blocks() -> Verdict {
    let site = Site::open();
    let pair = site.pair_with(|config| config.fence_limit = ms(100));
    let domain = StagedMemory::new(ms(1), 7).unwrap();
    let memory = pair.left.memory(&[64 * KIB]);
    let target = pair.right.memory_of(vec![domain.allocate(64 * KIB).unwrap()]);
    let stream = range(0, 64 * KIB);
    domain.hang_copies(true);
    let slot = pair.right.grant(stream.clone(), &target, None);
    pair.push(&memory, stream.clone(), slot, &target, stream.clone());
    until("a copy runs", || domain.copies_running() > 0);
    pair.close();
    pair.right_log.closed();
    pair.right.slots.close(slot.0, slot.1);
    check(
        !pair.right.slots.fenced(slot.0, slot.1),
        "blocks were given back while a copy was writing them",
    )
}

type Scenario = (&'static str, fn() -> Verdict);

/// The scenario that must notice.
fn scenario(mutant: Mutant) -> Scenario {
    match mutant {
        Mutant::ResetInsteadOfError => ("a fence drains", a_fence_drains),
        Mutant::SkipFlush => ("a fence flushes", a_fence_flushes),
        Mutant::CountCloses => ("arrivals are true", arrivals_are_true),
        Mutant::IgnoreReceiveCredit => ("receives are not overrun", receives_are_not_overrun),
        Mutant::AdmitLate => ("writes wait for admission", writes_wait_for_admission),
        Mutant::RevokedEarly => ("stopped means stopped", stopped_means_stopped),
        Mutant::IgnoreLinkEpoch => ("epochs are kept apart", epochs_are_kept_apart),
        Mutant::ReadWithoutGate => ("reads are fenced", reads_are_fenced),
        Mutant::SkipSettle => ("arrivals are shown", arrivals_are_shown),
        Mutant::SendBeforeGathered | Mutant::CountBeforeScattered => ("staged bytes are true", staged_bytes_are_true),
        Mutant::SkipSettleOfFence => ("fences settle", fences_settle),
        Mutant::ReuseLandingUnflushed => ("landings are flushed", landings_are_flushed),
        Mutant::ForgetHungCopies => ("hung copies keep their blocks", hung_copies_keep_their_blocks),
        Mutant::SkipVerify => ("other memory is not sent", other_memory_is_not_sent),
        other => panic!("no scenario for {}", other.name()),
    }
}

/// Runs a scenario with a mutant on, or none. A panic is a failure too.
fn run(scenario: fn() -> Verdict, mutant: Option<Mutant>) -> Verdict {
    mutants::set(mutant);
    let verdict = std::panic::catch_unwind(scenario);
    mutants::set(None);
    verdict.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.unwrap_or_else(|| "it panicked".into()))
    })
}

#[test]
fn every_mutant_of_the_engine_is_caught() {
    let mut wrong = Vec::new();
    for &mutant in Mutant::RDMA {
        let (name, test) = scenario(mutant);
        if let Err(why) = run(test, None) {
            wrong.push(format!("{name} fails without a mutant: {why}"));
            continue;
        }
        match run(test, Some(mutant)) {
            Ok(()) => wrong.push(format!("{} is not caught: {name}", mutant.name())),
            Err(why) => println!("{} is caught: {name}: {why}", mutant.name()),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    println!("{} of {} mutants caught", Mutant::RDMA.len(), Mutant::RDMA.len());
}
