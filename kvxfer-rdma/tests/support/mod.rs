//! Two RDMA endpoints without a control plane, and the transfers between them.
// Each test binary uses a part of it.
#![allow(dead_code, unreachable_pub, unused_imports, clippy::unwrap_used, missing_docs)]

mod failing;
mod shown;
mod site;

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvxfer_core::flow::{Direction, SendSpec, SlotTable, TransferId};
use kvxfer_core::transport::Link;
use kvxfer_core::{Generation, SlotId};
use kvxfer_rdma::{RdmaConfig, RdmaTransport};
use kvxfer_testkit::transport::{self, Ends};

pub use failing::*;
pub use kvxfer_testkit::transport::*;
pub use shown::*;
pub use site::*;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// Milliseconds.
pub const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// One endpoint.
pub type Node = transport::Node<RdmaTransport>;

/// Makes an endpoint with these bits as its incarnation.
pub fn node(bits: u128, config: RdmaConfig) -> Node {
    logs();
    let slots = SlotTable::new(1 << 17);
    let transport = RdmaTransport::new(config, slots.clone()).unwrap();
    Node::new(bits, slots, Arc::new(transport))
}

/// Logs to the test's output as `RUST_LOG` says.
pub fn logs() {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_test_writer()
        .try_init();
}

/// One end of a pair, to start transfers from.
#[derive(Clone, Copy)]
pub struct End<'a> {
    pub node: &'a Node,
    pub link: &'a Arc<dyn Link>,
    pub log: &'a Log,
}

impl End<'_> {
    /// Starts to write `source` into a slot of the other side.
    pub fn push(
        &self,
        id: TransferId,
        memory: &Memory,
        source: &Stream,
        slot: (SlotId, Generation),
        target: &Memory,
        destination: &Stream,
    ) -> Sent {
        Push::new(id.0, slot, memory, source.clone())
            .one_sided(Direction::Write, target.keys(), destination.clone())
            .submit(self.link)
    }
}

/// Two nodes and the link between them.
pub struct Pair {
    // Before the nodes: nothing is carried between their ends while these go.
    ends: Ends,
    pub left: Node,
    pub right: Node,
    next: AtomicU64,
}

impl Deref for Pair {
    type Target = Ends;

    fn deref(&self) -> &Ends {
        &self.ends
    }
}

impl Pair {
    /// Joins them; the left one dials.
    pub fn new(left: Node, right: Node) -> Pair {
        Pair::joined(left, right, true)
    }

    /// Joins them; the left one dials, or the right one.
    pub fn joined(left: Node, right: Node, left_dials: bool) -> Pair {
        let to_right = right.peer(&left, 7, left_dials);
        let to_left = left.peer(&right, 7, !left_dials);
        Pair {
            ends: Ends::join(&left, to_right, &right, to_left),
            left,
            right,
            next: AtomicU64::new(1),
        }
    }

    pub fn up(self) -> Pair {
        self.ends.up();
        self
    }

    /// Waits until both ends have so many rails.
    pub fn wait_for_rails(&self, rails: usize) {
        until("the rails are up", || {
            self.left_link.path().rails.len() == rails && self.right_link.path().rails.len() == rails
        });
    }

    pub fn left(&self) -> End<'_> {
        End {
            node: &self.left,
            link: &self.left_link,
            log: &self.left_log,
        }
    }

    pub fn right(&self) -> End<'_> {
        End {
            node: &self.right,
            link: &self.right_link,
            log: &self.right_log,
        }
    }

    /// A transfer's number.
    pub fn next_id(&self) -> TransferId {
        TransferId(self.next.fetch_add(1, Ordering::SeqCst))
    }

    /// Writes `source` of the left side into blocks of the right side, waits until it has arrived, and compares.
    pub fn carry(&self, memory: &Memory, source: &Stream, target: &Memory, destination: &Stream) {
        self.carry_with(memory, source, target, destination, |_| {});
    }

    pub fn carry_with(
        &self,
        memory: &Memory,
        source: &Stream,
        target: &Memory,
        destination: &Stream,
        change: impl FnOnce(&mut SendSpec),
    ) {
        let arrival = Arc::new(Arrival::default());
        let slot = self.right.grant(destination.clone(), target, Some(arrival.clone()));
        let sent = self.push_with(memory, source.clone(), slot, target, destination.clone(), change);
        self.arrived_once(&arrival, &sent);
        assert!(memory.bytes(source) == target.bytes(destination), "other bytes arrived");
        self.left_link.forget(sent.id);
        assert!(self.right.slots.fenced(slot.0, slot.1) && self.right.slots.release(slot.0, slot.1));
    }

    /// The same by reading: the left side's blocks get what is in the right side's.
    pub fn fetch(&self, memory: &Memory, destination: &Stream, target: &Memory, source: &Stream) {
        let arrival = Arc::new(Arrival::default());
        let slot = self.left.grant(destination.clone(), memory, Some(arrival.clone()));
        let sent = self.pull(memory, slot, destination.clone(), target, source.clone());
        self.arrived_once(&arrival, &sent);
        assert!(memory.bytes(destination) == target.bytes(source), "other bytes arrived");
        self.left_link.forget(sent.id);
        assert!(self.left.slots.release(slot.0, slot.1));
    }

    /// Waits until both sides know of the arrival of what the left side has started.
    fn arrived_once(&self, arrival: &Arrival, sent: &Sent) {
        arrival
            .wait(PATIENCE)
            .unwrap_or_else(|| panic!("no arrival: {:?}", self.left_log.tail()));
        self.left_log.arrived(sent.id);
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
    }

    /// What the left side is asked for to write into a slot of the right side, all but its bytes.
    pub fn spec(&self, id: TransferId, memory: &Memory, slot: (SlotId, Generation), target: &Memory) -> SendSpec {
        Push::new(id.0, slot, memory, range(0, 0))
            .one_sided(Direction::Write, target.keys(), range(0, 0))
            .spec
    }

    /// Starts a transfer into a slot that the left side knows to be admitted, with all that the left side says from then
    /// on held.
    pub fn hold_after_admission(&self, slot: (SlotId, Generation), start: impl FnOnce() -> Sent) -> Sent {
        self.right_link.admit(slot.0, slot.1);
        // The relay is quick, but asynchronous.
        std::thread::sleep(ms(50));
        self.left_log.hold();
        start()
    }

    /// Starts a transfer from the left side and waits until its device has been given some of it.
    pub fn posted(&self, start: impl FnOnce() -> Sent) -> Sent {
        let before = self.left.counter("rail_requests_total");
        let sent = start();
        until("posted", || self.left.counter("rail_requests_total") > before);
        sent
    }

    /// Starts to write `source` of the left side into a slot of the right side.
    pub fn push(
        &self,
        memory: &Memory,
        source: Stream,
        slot: (SlotId, Generation),
        target: &Memory,
        destination: Stream,
    ) -> Sent {
        self.push_with(memory, source, slot, target, destination, |_| {})
    }

    pub fn push_with(
        &self,
        memory: &Memory,
        source: Stream,
        slot: (SlotId, Generation),
        target: &Memory,
        destination: Stream,
        change: impl FnOnce(&mut SendSpec),
    ) -> Sent {
        let mut push =
            Push::new(self.next_id().0, slot, memory, source).one_sided(Direction::Write, target.keys(), destination);
        change(&mut push.spec);
        push.submit(&self.left_link)
    }

    /// Starts to read the right side's `source` into a slot of the left side.
    pub fn pull(
        &self,
        memory: &Memory,
        slot: (SlotId, Generation),
        destination: Stream,
        target: &Memory,
        source: Stream,
    ) -> Sent {
        Push::new(self.next_id().0, slot, memory, destination)
            .one_sided(Direction::Read, target.keys(), source)
            .submit(&self.left_link)
    }
}
