//! A deterministic simulator: two to five endpoints' state machines under a seeded schedule of delay, loss,
//! reordering, stall, crash, restart and applications that change their minds, with the promises checked after each
//! step.
//!
//! What is simulated is what a transport and a runtime do: sockets, threads, clocks. What decides is core's own code,
//! unchanged: `Machine`, `SlotTable`, `LinkSender`, the planner and the wire format. A run is a function of its seed.

mod claims;
mod coverage;
mod direct;
mod events;
mod faults;
mod lanes;
mod ledger;
mod memory;
mod net;
mod offers;
mod oracle;
mod profile;
mod queue;
mod raw;
mod transmit;
mod verdicts;
mod verify;
mod workload;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kvxfer_core::{GrantName, Incarnation, Time};

pub use coverage::{Coverage, Point};
pub use oracle::Promise;
pub use world::Failure;

use crate::rng::Rng;
use ledger::{Record, Shape, What};
use memory::StampOf;
use profile::Profile;
use queue::Queue;
use world::{Node, World};

/// What a run came to.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The seed, to replay it.
    pub seed: u64,
    /// Why it failed, if it did.
    pub failure: Option<Failure>,
    /// What it exercised.
    pub coverage: Coverage,
    /// Events carried out.
    pub events: u64,
    /// A digest of the whole run: equal for equal seeds.
    pub digest: u64,
}

/// Runs one seed. With `trace` everything that happens is printed.
pub fn run_seed(seed: u64, trace: bool) -> Outcome {
    let mut world = new_world(seed, trace);
    let finished = catch_unwind(AssertUnwindSafe(|| {
        world.begin();
        world.run();
    }));
    if finished.is_err() {
        world.failure.get_or_insert(Failure {
            promise: "panic",
            words: "something panicked; the message is above".into(),
        });
    }
    Outcome {
        seed,
        failure: world.failure.clone(),
        coverage: world.coverage.clone(),
        events: world.events,
        digest: world.digest,
    }
}

fn new_world(seed: u64, trace: bool) -> World {
    let mut rng = Rng::new(seed);
    let profile = Profile::new(&mut rng);
    let nodes = (0..profile.nodes())
        .map(|node| Node::new(node, if node < profile.sources { "prefill" } else { "decode" }))
        .collect();
    let mut world = World {
        now: Time::ZERO,
        rng,
        profile,
        queue: Queue::new(),
        nodes,
        incarnations: BTreeMap::new(),
        connections: Vec::new(),
        links: Vec::new(),
        lanes: Vec::new(),
        qps: Vec::new(),
        words: Vec::new(),
        ledger: vec![nobody()],
        stamps: vec![StampOf { serial: 0, attempt: 0 }],
        workload: workload::Workload::default(),
        oracle: oracle::Oracle::default(),
        coverage: Coverage::new(),
        failure: None,
        partitions: BTreeMap::new(),
        next_accepted: 1,
        events: 0,
        trace_on: trace,
        done: false,
        digest: seed,
    };
    world.profile.horizon = Duration::from_secs(16);
    world
}

/// The record with number 0: who owns what nobody owns.
fn nobody() -> Record {
    Record {
        node: 0,
        life: u32::MAX,
        pool: 0,
        handle: kvxfer_core::machine::HandleId(u64::MAX),
        what: What::ReadGrant {
            name: GrantName {
                incarnation: Incarnation::from_bits(0),
                slot: kvxfer_core::SlotId(0),
                generation: kvxfer_core::Generation(0),
            },
        },
        shape: Shape::Descriptors(Vec::new()),
        blocks: Vec::new(),
        opened: Time::ZERO,
        must_end: Time::ZERO,
        ended: None,
        arrived: None,
        released: true,
        died: Some(Time::ZERO),
        ending: true,
        quarantined: false,
        came_from: Default::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_hundred_seeds_keep_the_promises() {
        for seed in 0..250 {
            let outcome = run_seed(seed, false);
            assert!(outcome.failure.is_none(), "seed {seed}: {:?}", outcome.failure);
        }
    }

    #[test]
    fn equal_seeds_give_equal_runs() {
        for seed in 1_000..1_010 {
            let (first, second) = (run_seed(seed, false), run_seed(seed, false));
            assert_eq!(
                (first.digest, first.events),
                (second.digest, second.events),
                "seed {seed}"
            );
        }
    }

    #[cfg(feature = "mutants")]
    #[test]
    fn a_skipped_fence_is_caught() {
        use kvxfer_core::mutants::{Mutant, set};
        set(Some(Mutant::SkipFence));
        let caught = (0..300).any(|seed| {
            run_seed(seed, false)
                .failure
                .is_some_and(|failure| failure.promise.starts_with('2'))
        });
        set(None);
        assert!(caught);
    }
}
