//! Memory that the receiver copies out of by itself, on one host: what goes so, what does not, and what may go wrong while it
//! does.
#![allow(clippy::unwrap_used)]

#[cfg(feature = "mutants")]
#[path = "references/mutants.rs"]
mod mutants;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvxfer_core::flow::{Close, SendEvent};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{ErrorKind, Generation, SlotId};
use kvxfer_tcp::TcpConfig;
use kvxfer_testkit::rng::Rng;
use kvxfer_testkit::staged::StagedMemory;
use kvxfer_testkit::transport::Ends;
use support::*;

const MIB: usize = 1 << 20;
const POOL: u64 = 8 << 20;
/// Several chunks on each lane.
const BYTES: u64 = 4 << 20;
/// Longer than whatever a test does while a copy runs.
const SLOW: Duration = Duration::from_millis(100);

struct Case {
    pair: Pair,
    here: Arc<StagedMemory>,
    there: Arc<StagedMemory>,
    source: Memory,
    destination: Memory,
    next: AtomicU64,
}

type Slot = (SlotId, Generation);

impl Case {
    /// `delay` is the longest that a copy at the destination takes.
    fn new(delay: Duration) -> Case {
        Case::through(delay, None)
    }

    fn through(delay: Duration, proxy: Option<&Proxy>) -> Case {
        #[cfg(feature = "mutants")]
        mutants::switch_on();
        let here = StagedMemory::new(Duration::from_micros(100), 1).unwrap();
        let there = StagedMemory::new(delay, 2).unwrap();
        here.sharing().allow(Duration::ZERO);
        there.sharing().allow(Duration::from_millis(1));
        let pair = match proxy {
            Some(proxy) => Pair::with(TcpConfig::default(), v4(), Some(&|target| proxy.to(target))).up(),
            None => Pair::new(TcpConfig::default()).up(),
        };
        let source = pair
            .left
            .memory_of(vec![here.allocate(POOL).unwrap(), here.allocate(POOL).unwrap()]);
        let destination = pair.right.memory_of(vec![there.allocate(POOL).unwrap()]);
        source.fill(0, 1);
        source.fill(1, 2);
        Case {
            pair,
            here,
            there,
            source,
            destination,
            next: AtomicU64::new(1),
        }
    }

    /// The source's pool is closed and registered again.
    fn registered_anew(self) -> Case {
        let regions: Vec<Arc<Region>> = self.source.regions.to_vec();
        let Case {
            pair,
            here,
            there,
            source,
            destination,
            next,
        } = self;
        drop(source);
        let source = pair.left.memory_of(regions);
        Case {
            pair,
            here,
            there,
            source,
            destination,
            next,
        }
    }

    /// Pushes until nothing is sent as bytes any more: the receiver has mapped the source.
    fn mapped(self) -> Case {
        until("the source to be mapped", || {
            let before = self.pair.left.moved("sent");
            self.pushes_verify();
            self.pair.left.moved("sent") == before
        });
        self
    }

    fn streams(&self) -> (u64, Stream, Stream) {
        let id = self.next.fetch_add(1, Ordering::SeqCst);
        let count = (BYTES / 8192) as usize;
        let from = Arc::new(random_pieces(id, POOL, count, 8192));
        let to = Arc::new(random_pieces(id + 1000, POOL, count, 8192));
        (id, from, to)
    }

    fn pushes_verify(&self) {
        let (id, from, to) = self.streams();
        let slot = self.pair.right.grant(to.clone(), &self.destination, None);
        let sent = Push::new(id, slot, &self.source, from.clone()).submit(&self.pair.left_link);
        self.pair.left_log.arrived(sent.id);
        assert!(self.destination.bytes(&to) == self.source.bytes(&from));
        assert!(self.pair.right.slots.release(slot.0, slot.1));
        self.pair.left_link.forget(sent.id);
    }

    /// A push whose copies at the destination have been started and are not over.
    fn push_in_the_middle(&self) -> (Sent, Slot, Stream, Stream) {
        let (id, from, to) = self.streams();
        self.destination.paint(&to, 0xAA);
        let before = self.there.sharing().copies();
        let slot = self.pair.right.grant(to.clone(), &self.destination, None);
        let sent = Push::new(id, slot, &self.source, from.clone()).submit(&self.pair.left_link);
        until("copies to be under way", || self.there.sharing().copies() > before);
        (sent, slot, from, to)
    }

    /// The slot has not arrived, and it counts no more bytes than are those that the source had.
    fn only_what_was_counts(&self, slot: Slot, to: &Stream, meant: &[u8]) {
        let progress = self.pair.right.slots.progress(slot.0, slot.1).unwrap();
        assert!(!progress.arrived, "{progress:?}");
        let there = self.destination.bytes(to);
        let right = there.iter().zip(meant).filter(|(there, meant)| there == meant).count() as u64;
        // Of other bytes one in 256 is right by chance.
        assert!(
            progress.applied_bytes <= right,
            "{progress:?}, but {right} bytes are right"
        );
    }

    fn referred(&self, node: &Node, direction: &'static str) -> u64 {
        node.counter_where("rail_referred_bytes_total", |labels| {
            labels.contains(&("direction", direction.into()))
        })
    }

    fn ends_well(&self) {
        assert_eq!(self.pair.left_log.lost().len() + self.pair.right_log.lost().len(), 0);
        self.no_rule_broken();
    }

    fn no_rule_broken(&self) {
        for domain in [&self.here, &self.there] {
            assert_eq!(domain.violations(), Vec::<String>::new());
        }
    }
}

#[test]
fn what_is_mapped_is_referred_to_and_nothing_of_it_is_staged() {
    let case = Case::new(Duration::from_micros(200)).mapped();
    let (staged, copies) = (case.here.copies_done(), case.there.sharing().copies());
    let (sent, received) = (
        case.referred(&case.pair.left, "sent"),
        case.referred(&case.pair.right, "received"),
    );
    for _ in 0..5 {
        case.pushes_verify();
    }
    assert_eq!(case.here.copies_done(), staged, "nothing is copied at the source");
    assert!(case.there.sharing().copies() > copies);
    assert_eq!(case.referred(&case.pair.left, "sent") - sent, 5 * BYTES);
    assert_eq!(case.referred(&case.pair.right, "received") - received, 5 * BYTES);
    let notes = case.pair.left_link.path().notes;
    assert!(notes[0].contains("2 of our 2 device regions"), "{notes:?}");
    let notes = case.pair.right_link.path().notes;
    assert!(notes[0].contains("2 of the peer's 2 device regions"), "{notes:?}");
    case.ends_well();
}

#[test]
fn a_first_push_does_not_wait_for_the_mapping() {
    let case = Case::new(Duration::from_micros(200));
    case.there.sharing().allow(Duration::from_secs(3600));
    case.pushes_verify();
    case.pushes_verify();
    assert_eq!(case.there.sharing().copies(), 0);
    case.ends_well();
}

#[test]
fn random_segments_over_several_regions() {
    let case = Case::new(Duration::from_micros(200)).mapped();
    let mut rng = Rng::new(11);
    for round in 0..30u64 {
        let count = 1 + rng.below(60) as usize;
        let length = 1 + rng.below(40_000);
        let of = |region: u32, seed: u64, count: usize| Pieces {
            region,
            ..random_pieces(seed, POOL, count, length)
        };
        let (first, second) = (of(0, round, count), of(1, round + 100, count));
        let expected: Vec<u8> = [&first, &second]
            .into_iter()
            .flat_map(|pieces| read_stream(&case.source, pieces))
            .collect();
        let from = Arc::new(Chained(first, second));
        let to = Arc::new(random_pieces(round + 200, POOL, 2 * count, length));
        let slot = case.pair.right.grant(to.clone(), &case.destination, None);
        let sent = Push::new(5000 + round, slot, &case.source, from).submit(&case.pair.left_link);
        case.pair.left_log.arrived(sent.id);
        assert!(read_stream(&case.destination, &*to) == expected, "round {round}");
    }
    assert!(case.there.sharing().copies() > 0);
    case.ends_well();
}

/// One stream behind another.
#[derive(Debug)]
struct Chained(Pieces, Pieces);

impl kvxfer_core::flow::ByteStream for Chained {
    fn length(&self) -> u64 {
        self.0.bytes() + self.1.bytes()
    }

    fn segments(&self, offset: u64, want: u64, max: usize, out: &mut Vec<kvxfer_core::memory::Segment>) -> u64 {
        let first = self.0.bytes();
        let before = out.len();
        let mut covered = 0;
        if offset < first {
            covered = self.0.segments(offset, want.min(first - offset), max, out);
            if covered < want.min(first - offset) {
                return covered;
            }
        }
        let room = max - (out.len() - before);
        if covered < want && room > 0 {
            covered += self.1.segments(offset + covered - first, want - covered, room, out);
        }
        covered
    }
}

#[test]
fn a_source_taken_back_while_it_is_copied_never_counts() {
    let case = Case::new(SLOW).mapped();
    let (sent, slot, from, to) = case.push_in_the_middle();
    let meant = case.source.bytes(&from);
    sent.gate.close();
    case.pair.left_link.stop(sent.id);
    until("the source's fence", || sent.gate.fenced());
    // From here on the source is somebody else's.
    case.source.paint(&from, 0x55);
    case.pair.left_log.quiet(sent.id);
    case.only_what_was_counts(slot, &to, &meant);
    let stray = case.destination.bytes(&to).iter().filter(|&&byte| byte == 0x55).count();
    assert!(stray > MIB / 2, "copies went on after the fence");
    case.pair.right.take_back(&case.pair.right_link, slot);
    assert!(case.pair.right.slots.release(slot.0, slot.1));
    case.pushes_verify();
    case.ends_well();
}

#[test]
fn a_slot_closed_while_it_is_copied_into_is_fenced_after_the_copies() {
    let case = Case::new(SLOW).mapped();
    let (sent, slot, _, to) = case.push_in_the_middle();
    assert_eq!(case.pair.right.slots.close(slot.0, slot.1), Close::Waiting);
    until("the fence", || case.pair.right.slots.fenced(slot.0, slot.1));
    case.destination.paint(&to, 0x77);
    case.pair.left_log.refused(sent.id);
    sent.gate.close();
    case.pair.left_link.stop(sent.id);
    case.pair.left_log.quiet(sent.id);
    assert!(case.destination.is_all(&to, 0x77), "a late write");
    assert!(case.pair.right.slots.release(slot.0, slot.1));
    case.pushes_verify();
    case.ends_well();
}

#[test]
fn what_cannot_be_mapped_or_copied_is_sent_as_bytes() {
    let case = Case::new(Duration::from_micros(200));
    case.there.sharing().refuse_imports(usize::MAX >> 1);
    for _ in 0..4 {
        case.pushes_verify();
    }
    assert_eq!(case.there.sharing().copies(), 0);
    case.ends_well();

    let case = Case::new(Duration::from_micros(200)).mapped();
    let copies = case.there.sharing().copies();
    case.there.fail_copies(1);
    case.pushes_verify();
    assert!(case.there.sharing().copies() > copies);
    let before = case.pair.left.moved("sent");
    case.pushes_verify();
    assert_eq!(
        case.pair.left.moved("sent"),
        before,
        "the next one is referred to again"
    );
    case.ends_well();
}

#[test]
fn what_is_recalled_is_sent_as_bytes_after_the_copies_under_way() {
    let case = Case::new(SLOW).mapped();
    let (sent, slot, from, to) = case.push_in_the_middle();
    let exported = &case.source.registered.exported;
    assert_eq!(exported.len(), 2);
    assert!(exported[0].importers() > 0);
    exported.iter().for_each(|exported| exported.recall());
    assert!(exported[0].importers() > 0, "copies are under way");
    case.pair.left_log.arrived(sent.id);
    assert!(case.destination.bytes(&to) == case.source.bytes(&from));
    until("the copies to end", || {
        exported.iter().all(|exported| exported.importers() == 0)
    });
    assert!(case.pair.right.slots.release(slot.0, slot.1));
    let copies = case.there.sharing().copies();
    case.pushes_verify();
    assert_eq!(case.there.sharing().copies(), copies);
    case.ends_well();
}

#[test]
fn a_pool_that_is_registered_again_is_mapped_again() {
    let case = Case::new(Duration::from_micros(200)).mapped();
    let regions: Vec<Arc<Region>> = case.source.regions.to_vec();
    let case = Case {
        source: case.pair.left.memory_of(regions.clone()),
        ..case
    };
    // The old registration went only after the new one had come: it is the same export.
    let still_referred_to = |case: &Case| {
        let before = case.pair.left.moved("sent");
        case.pushes_verify();
        assert_eq!(case.pair.left.moved("sent"), before);
    };
    still_referred_to(&case);
    // A registration that recalls what another still has does not take it from that one.
    let other = case.pair.left.memory_of(regions);
    let exported = &other.registered.exported;
    assert!(exported.iter().all(|exported| exported.importers() > 0));
    exported.iter().for_each(|exported| exported.recall());
    assert!(exported.iter().all(|exported| exported.importers() == 0));
    still_referred_to(&case);
    drop(other);
    still_referred_to(&case);
    let case = case.registered_anew().mapped();
    case.ends_well();
}

#[test]
fn lanes_lost_in_the_middle_lose_nothing() {
    let proxy = Proxy::new(v4());
    let case = Case::through(Duration::from_millis(20), Some(&proxy)).mapped();
    for _ in 0..5 {
        let (sent, slot, from, to) = case.push_in_the_middle();
        proxy.cut();
        case.pair.left_log.arrived(sent.id);
        assert!(case.destination.bytes(&to) == case.source.bytes(&from));
        assert!(case.pair.right.slots.release(slot.0, slot.1));
    }
    assert!(case.pair.left_log.lost().len() >= 5);
    let case = case.mapped();
    case.no_rule_broken();
}

#[test]
fn a_lane_lost_while_the_source_is_taken_back_leaves_nothing_that_counts() {
    let proxy = Proxy::new(v4());
    let case = Case::through(SLOW, Some(&proxy)).mapped();
    let (sent, slot, from, to) = case.push_in_the_middle();
    let meant = case.source.bytes(&from);
    sent.gate.close();
    case.pair.left_link.stop(sent.id);
    proxy.cut();
    case.source.paint(&from, 0x55);
    case.pair.left_log.wait("the end", |event| {
        matches!(event, LinkEvent::Send(SendEvent::Quiet(id)) if *id == sent.id).then_some(())
    });
    std::thread::sleep(2 * SLOW);
    case.only_what_was_counts(slot, &to, &meant);
    case.pair.right.take_back(&case.pair.right_link, slot);
    case.no_rule_broken();
}

#[test]
fn checksummed_transfers_and_host_memory_go_as_bytes() {
    let case = Case::new(Duration::from_micros(200)).mapped();
    let (id, from, to) = case.streams();
    let before = case.pair.left.moved("sent");
    let slot = case.pair.right.grant(to.clone(), &case.destination, None);
    let push = Push::new(id, slot, &case.source, from.clone()).checksum();
    let sent = push.submit(&case.pair.left_link);
    case.pair.left_log.arrived(sent.id);
    assert!(case.destination.bytes(&to) == case.source.bytes(&from));
    assert_eq!(case.pair.left.moved("sent") - before, BYTES);

    let host = case.pair.right.memory(&[POOL]);
    let (id, from, to) = case.streams();
    let before = case.pair.left.moved("sent");
    let slot = case.pair.right.grant(to.clone(), &host, None);
    let sent = Push::new(id, slot, &case.source, from.clone()).submit(&case.pair.left_link);
    case.pair.left_log.arrived(sent.id);
    assert!(host.bytes(&to) == case.source.bytes(&from));
    assert_eq!(case.pair.left.moved("sent") - before, BYTES, "declined, and sent");
    case.ends_well();
}

#[test]
fn a_peer_on_another_host_is_told_nothing() {
    let here = StagedMemory::new(Duration::from_micros(100), 1).unwrap();
    here.sharing().allow(Duration::ZERO);
    let (left, right) = (
        Node::new(0xa, TcpConfig::default(), v4()),
        Node::new(0xb, TcpConfig::default(), v4()),
    );
    let (mut to_right, mut to_left) = (right.peer(&left, TOKEN, true), left.peer(&right, TOKEN, false));
    let mut far = to_right.advert.clone();
    *far.last_mut().unwrap() ^= 1;
    (to_right.advert, to_left.advert) = (far.clone(), far);
    let source = left.memory_of(vec![here.allocate(POOL).unwrap()]);
    let destination = right.memory_of(vec![here.allocate(POOL).unwrap()]);
    source.fill(0, 1);
    let ends = Ends::join(&left, to_right, &right, to_left);
    ends.up();
    let stream: Stream = Arc::new(random_pieces(1, POOL, 512, 8192));
    for id in 1..4 {
        let slot = right.grant(stream.clone(), &destination, None);
        let sent = Push::new(id, slot, &source, stream.clone()).submit(&ends.left_link);
        ends.left_log.arrived(sent.id);
        assert!(destination.bytes(&stream) == source.bytes(&stream));
    }
    assert_eq!(here.sharing().copies(), 0);
    assert!(ends.left_link.path().notes.is_empty());
    ends.close();
}

#[test]
fn memory_that_became_other_memory_is_noticed() {
    let case = Case::new(Duration::from_micros(200)).mapped();
    case.here.replace(&case.source.regions[0]);
    let (id, from, to) = case.streams();
    let slot = case.pair.right.grant(to, &case.destination, None);
    let sent = Push::new(id, slot, &case.source, from).submit(&case.pair.left_link);
    let error = case.pair.left_log.wait("the failure", |event| match event {
        LinkEvent::MemoryFailed { transfer, error } if *transfer == sent.id => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::NotRegistered, "{error}");
    assert!(!case.pair.right.slots.progress(slot.0, slot.1).unwrap().arrived);
    case.ends_well();
}

#[test]
fn closing_in_the_middle_ends_all_touching() {
    let case = Case::new(SLOW).mapped();
    let (_, _, _, to) = case.push_in_the_middle();
    case.pair.right_link.close();
    case.pair.right_log.closed();
    case.destination.paint(&to, 0x77);
    std::thread::sleep(SLOW);
    assert!(case.destination.is_all(&to, 0x77), "a late write");
    case.no_rule_broken();
}

/// What is done to a push at some moment of it.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Nothing,
    /// The source's owner takes its blocks back, and gives them to somebody else.
    TakeBack,
    /// The destination's owner does.
    Close,
    CutLanes,
    FailCopy,
    Recall,
}

#[test]
fn whatever_happens_meanwhile_what_counts_is_what_was_meant() {
    let proxy = Proxy::new(v4());
    let mut case = Case::through(Duration::from_millis(3), Some(&proxy)).mapped();
    let mut rng = Rng::new(77);
    let mut ends = [0u32; 2];
    for round in 0..60 {
        let fault = [
            Fault::Nothing,
            Fault::TakeBack,
            Fault::Close,
            Fault::CutLanes,
            Fault::FailCopy,
            Fault::Recall,
        ][rng.below(6) as usize];
        let (id, from, to) = case.streams();
        case.source.fill(0, id);
        case.destination.paint(&to, 0xAA);
        let meant = case.source.bytes(&from);
        let slot = case.pair.right.grant(to.clone(), &case.destination, None);
        let sent = Push::new(id, slot, &case.source, from.clone()).submit(&case.pair.left_link);
        std::thread::sleep(Duration::from_micros(rng.below(6_000)));
        match fault {
            Fault::Nothing => {}
            Fault::TakeBack => {
                sent.gate.close();
                case.pair.left_link.stop(sent.id);
                until("the source's fence", || sent.gate.fenced());
                case.source.paint(&from, 0x55);
            }
            Fault::Close => {
                if case.pair.right.take_back(&case.pair.right_link, slot) != Close::AlreadyArrived {
                    case.destination.paint(&to, 0x77);
                }
            }
            Fault::CutLanes => {
                proxy.cut();
            }
            Fault::FailCopy => case.there.fail_copies(1),
            Fault::Recall => case.source.registered.exported[0].recall(),
        }
        let arrived = case.pair.left_log.wait("an end", |event| match event {
            LinkEvent::Send(SendEvent::Arrived(other)) if *other == sent.id => Some(true),
            LinkEvent::Send(SendEvent::Quiet(other) | SendEvent::Refused(other)) if *other == sent.id => Some(false),
            LinkEvent::MemoryFailed { transfer, .. } if *transfer == sent.id => Some(false),
            _ => None,
        });
        ends[usize::from(arrived)] += 1;
        let what = format!("round {round}: {fault:?}, arrived: {arrived}");
        if arrived {
            assert!(case.destination.bytes(&to) == meant, "{what}");
        } else {
            match fault {
                Fault::Close => {}
                Fault::TakeBack => case.only_what_was_counts(slot, &to, &meant),
                // The copy that failed may have been one from staging.
                Fault::FailCopy => {}
                _ => panic!("{what}"),
            }
            sent.gate.close();
            case.pair.left_link.stop(sent.id);
            case.pair.right.take_back(&case.pair.right_link, slot);
            if matches!(fault, Fault::Close) {
                std::thread::sleep(Duration::from_millis(6));
                assert!(case.destination.is_all(&to, 0x77), "{what}: a late write");
            }
        }
        case.there.fail_copies(0);
        assert!(case.pair.right.slots.release(slot.0, slot.1));
        if matches!(fault, Fault::Recall) {
            case = case.registered_anew();
        }
    }
    assert!(ends[0] > 5 && ends[1] > 20, "{ends:?}");
    case.no_rule_broken();
}
