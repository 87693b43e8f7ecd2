//! What can be wrong with memory that the CPU cannot touch: copies that fail, addresses that became other memory. One
//! transfer ends with the reason, the lanes and everybody else go on.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{Close, TransferId};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::{LinkEvent, Transport};
use kvxfer_core::{Error, ErrorKind};
use kvxfer_tcp::TcpConfig;
use kvxfer_testkit::staged::StagedMemory;
use support::*;

const POOL: u64 = 8 << 20;
/// 4 MiB in pieces: several chunks on each lane.
const PIECES: (usize, u64) = (1024, 4096);

fn staged_pool(domain: &Arc<StagedMemory>) -> Arc<[Arc<Region>]> {
    Arc::new([domain.allocate(POOL).unwrap()])
}

fn domain(seed: u64) -> Arc<StagedMemory> {
    StagedMemory::new(Duration::from_micros(300), seed).unwrap()
}

struct Case {
    pair: Pair,
    here: Arc<StagedMemory>,
    there: Arc<StagedMemory>,
    source: Arc<[Arc<Region>]>,
    destination: Arc<[Arc<Region>]>,
}

impl Case {
    fn new() -> Case {
        let (here, there) = (domain(1), domain(2));
        Case {
            pair: Pair::new(TcpConfig::default()).up(),
            source: staged_pool(&here),
            destination: staged_pool(&there),
            here,
            there,
        }
    }

    /// Pushes 4 MiB. The transfer, and the slot that it goes to.
    fn push(&self, id: u64) -> (Sent, Slot) {
        let from = Arc::new(random_pieces(id, POOL, PIECES.0, PIECES.1));
        let to = Arc::new(random_pieces(id + 100, POOL, PIECES.0, PIECES.1));
        let slot = self.pair.right.grant(to, &self.destination, None);
        (
            Push::new(id, slot, &self.source, from).submit(&self.pair.left_link),
            slot,
        )
    }

    fn pushes_verify(&self, id: u64) {
        let from = Arc::new(random_pieces(id, POOL, PIECES.0, PIECES.1));
        let to = Arc::new(random_pieces(id + 100, POOL, PIECES.0, PIECES.1));
        let bytes = pattern(id, from.bytes() as usize);
        write_stream(&self.source, &*from, &bytes);
        let slot = self.pair.right.grant(to.clone(), &self.destination, None);
        let sent = Push::new(id, slot, &self.source, from).submit(&self.pair.left_link);
        self.pair.left_log.arrived(sent.id);
        assert!(read_stream(&self.destination, &*to) == bytes);
    }

    /// Nothing was lost but the one transfer, and no staging rule was broken.
    fn ends_well(self) {
        assert_eq!(self.pair.left_log.lost().len() + self.pair.right_log.lost().len(), 0);
        for domain in [&self.here, &self.there] {
            assert_eq!(domain.violations(), Vec::<String>::new());
            assert!(domain.pinned_bytes() > 0, "the staged path was not taken");
        }
        self.pair.left.transport.shutdown();
        self.pair.right.transport.shutdown();
        let Case { pair, here, there, .. } = self;
        drop(pair);
        until("staging to be unpinned", || {
            here.pinned_bytes() + there.pinned_bytes() == 0
        });
    }
}

type Slot = (kvxfer_core::SlotId, kvxfer_core::Generation);

fn memory_failed(case: &Case, id: TransferId) -> Error {
    case.pair.left_log.wait("the failure", |event| match event {
        LinkEvent::MemoryFailed { transfer, error } if *transfer == id => Some(error.clone()),
        _ => None,
    })
}

fn slot_failed(case: &Case, slot: Slot) -> Error {
    case.pair.right_log.wait("the failure", |event| match event {
        LinkEvent::SlotCorrupt {
            slot: id,
            generation,
            error,
        } if (*id, *generation) == slot => Some(error.clone()),
        _ => None,
    })
}

fn stopped(case: &Case, sent: &Sent) {
    sent.gate.close();
    case.pair.left_link.stop(sent.id);
    case.pair.left_log.quiet(sent.id);
    until("the source to be left", || sent.gate.fenced());
}

#[test]
fn a_copy_out_that_fails_ends_its_transfer_only() {
    let case = Case::new();
    case.pushes_verify(1);
    case.here.fail_copies(1);
    let (sent, slot) = case.push(2);
    let error = memory_failed(&case, sent.id);
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{error}");
    assert!(error.to_string().contains("a device copy"), "{error}");
    stopped(&case, &sent);
    let progress = case.pair.right.slots.progress(slot.0, slot.1).unwrap();
    assert!(!progress.arrived, "{progress:?}");
    case.pushes_verify(3);
    case.ends_well();
}

#[test]
fn every_copy_out_failing_does_not_go_round_in_circles() {
    let case = Case::new();
    case.pushes_verify(1);
    case.here.fail_copies(u32::MAX);
    let (sent, _) = case.push(2);
    memory_failed(&case, sent.id);
    // Whatever was copied already has come to its end after this; nothing is tried again.
    std::thread::sleep(Duration::from_millis(20));
    let copies = case.here.copies_done();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(case.here.copies_done(), copies);
    stopped(&case, &sent);
    case.here.fail_copies(0);
    case.pushes_verify(3);
    case.ends_well();
}

#[test]
fn a_copy_in_that_fails_ends_its_slot_only() {
    let case = Case::new();
    case.pushes_verify(1);
    case.there.fail_copies(1);
    let (sent, slot) = case.push(2);
    let error = slot_failed(&case, slot);
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{error}");
    case.pair.left_log.refused(sent.id);
    stopped(&case, &sent);
    assert!(matches!(
        case.pair.right.slots.close(slot.0, slot.1),
        Close::Fenced | Close::Waiting
    ));
    until("the slot's fence", || case.pair.right.slots.fenced(slot.0, slot.1));
    let progress = case.pair.right.slots.progress(slot.0, slot.1).unwrap();
    assert!(!progress.arrived, "{progress:?}");
    case.pushes_verify(3);
    case.ends_well();
}

#[test]
fn memory_that_became_other_memory_is_noticed_on_either_side() {
    let case = Case::new();
    case.pushes_verify(1);
    case.here.replace(&case.source[0]);
    let (sent, _) = case.push(2);
    assert_eq!(memory_failed(&case, sent.id).kind(), ErrorKind::NotRegistered);
    stopped(&case, &sent);

    let other = Case::new();
    other.pushes_verify(1);
    let before = other.there.copies_done();
    other.there.replace(&other.destination[0]);
    let (sent, slot) = other.push(2);
    assert_eq!(slot_failed(&other, slot).kind(), ErrorKind::NotRegistered);
    other.pair.left_log.refused(sent.id);
    stopped(&other, &sent);
    assert_eq!(
        other.there.copies_done(),
        before,
        "nothing was written to memory that is somebody else's"
    );
    case.ends_well();
    other.ends_well();
}

#[test]
fn a_region_is_verified_once_for_a_transfer_and_data_thread() {
    let case = Case::new();
    for id in 1..=3 {
        case.pushes_verify(id);
        assert!(case.here.verified() <= id * case.pair.left_link.path().rails_configured as u64);
    }
    assert!(case.here.verified() >= 3 && case.there.verified() >= 3);
    case.ends_well();
}
