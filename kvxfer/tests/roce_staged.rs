//! Pools in memory that no RDMA device can be given, over RDMA.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::sync::Arc;
use std::time::Duration;

use kvxfer::{ClaimOptions, Destination, ErrorKind, GrantOptions, OfferOptions, PullOptions, PushOptions, Role};
use kvxfer_cases::common::*;
use kvxfer_testkit::staged::StagedMemory;

/// An endpoint whose pool is in this domain.
fn side(name: &str, domain: &Arc<StagedMemory>) -> Side {
    let mut config = config();
    config.deadlines.fence_limit_ms = 500;
    let endpoint = endpoint_with(name, config);
    let layout = layout();
    let regions = layout.region_lengths().iter();
    let regions = regions.map(|length| domain.allocate(*length).unwrap()).collect();
    // SAFETY: the regions' own memory, which they keep.
    let pool = unsafe { endpoint.register(layout, regions, Role::Both) }.unwrap();
    let used = gpus::Used::by(name);
    Side { pool, endpoint, used }
}

#[test]
fn hand_overs_pushes_and_pulls_go_through_staging_and_explain_says_why() {
    let domain = StagedMemory::new(Duration::from_millis(2), 5).unwrap();
    for (source_staged, destination_staged) in [(true, false), (false, true), (true, true)] {
        let make = |name, staged| match staged {
            true => side(name, &domain),
            false => Side::new(name),
        };
        let (prefill, decode) = (make("prefill", source_staged), make("decode", destination_staged));
        let (source, destination) = (
            tokens(100, [9, 3, 7, 1, 0, 20, 11]),
            tokens(100, [4, 5, 6, 60, 8, 30, 2]),
        );
        for round in 0..5 {
            let key = format!("r-{round}");
            fill(&prefill.pool, &source, &key, 0);
            poison(&decode.pool, &destination);
            let offer = prefill
                .endpoint
                .offer(&key, &prefill.pool, OfferOptions::default())
                .unwrap();
            offer.append(&source).unwrap();
            offer.finish(100).unwrap();
            let sources = [prefill.endpoint.address()];
            let claim = decode
                .endpoint
                .claim(&key, &decode.pool, &sources, ClaimOptions::default())
                .unwrap();
            claim.fill(destination.clone()).unwrap();
            claim.arrived().wait(LONG).unwrap();
            verify(&decode.pool, &destination, &key, 0);
            offer.released().wait(LONG).unwrap();
        }
        fill(&prefill.pool, &source, "pushed", 0);
        let granted = decode.pool.grant(destination.clone(), GrantOptions::default()).unwrap();
        let pushed = prefill
            .endpoint
            .push(&prefill.pool, source.clone(), granted.grant(), PushOptions::default());
        granted.arrived().wait(LONG).unwrap();
        pushed.unwrap().done().wait(LONG).unwrap();
        verify(&decode.pool, &destination, "pushed", 0);
        fill(&prefill.pool, &source, "served", 0);
        poison(&decode.pool, &destination);
        let served = prefill.pool.serve(source.clone(), GrantOptions::default()).unwrap();
        let pulled = decode.endpoint.pull(
            served.grant(),
            &decode.pool,
            destination.clone(),
            PullOptions::default(),
        );
        pulled.unwrap().done().wait(LONG).unwrap();
        verify(&decode.pool, &destination, "served", 0);
        for (side, other, staged) in [
            (&prefill, &decode, source_staged),
            (&decode, &prefill, destination_staged),
        ] {
            let text = side.endpoint.explain(&other.endpoint.address());
            assert!(text.contains("path: rdma"), "{text}");
            assert_eq!(
                text.contains("goes through staging: dmabuf: its domain makes none"),
                staged,
                "{text}"
            );
        }
        let in_use = || {
            let of = |side: &Side| metric_sum(&side.endpoint, "kvxfer_staging_buffers_in_use", "");
            of(&prefill) + of(&decode)
        };
        eventually("buffers come back", || in_use() == 0.0);
    }
    assert!(domain.copies_done() > 0);
    assert_eq!(domain.violations(), Vec::<String>::new());
}

/// It is said where a copy runs that does not end; its blocks are given to nobody, and everything else goes on and ends.
#[test]
fn copies_that_never_end_cost_their_blocks_alone() {
    for source_staged in [true, false] {
        let domain = StagedMemory::new(Duration::from_millis(1), 5).unwrap();
        let make = |name, staged| match staged {
            true => side(name, &domain),
            false => Side::new(name),
        };
        let (prefill, decode) = (make("prefill", source_staged), make("decode", !source_staged));
        let (source, destination) = (tokens(48, [9, 3, 7]), tokens(48, [4, 5, 6]));
        fill(&prefill.pool, &source, "hung", 0);
        domain.hang_copies(true);
        let offer = prefill
            .endpoint
            .offer("hung", &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(&source).unwrap();
        offer.finish(48).unwrap();
        let sources = [prefill.endpoint.address()];
        let claim = decode
            .endpoint
            .claim("hung", &decode.pool, &sources, ClaimOptions::default())
            .unwrap();
        claim.fill(destination.clone()).unwrap();
        eventually("a copy runs", || domain.copies_running() > 0);
        claim.cancel();
        offer.cancel();
        let error = claim.arrived().wait(LONG).unwrap_err();
        let quarantined = error.destination() == Destination::Quarantined;
        assert_eq!(quarantined, !source_staged, "{error}");
        let released = offer.released().wait(LONG);
        let (there, side) = match source_staged {
            true => ("kvxfer_control_sources_quarantined", &prefill),
            false => ("kvxfer_control_slots_quarantined", &decode),
        };
        assert_eq!(metric(&side.endpoint, there), 1.0, "{released:?}");
        // The pool stays as long as that.
        assert_eq!(side.pool.close().unwrap_err().kind(), ErrorKind::Busy);
        let [from, to] = [&prefill, &decode].map(|side| side.endpoint.allocate(layout(), Role::Both).unwrap());
        fill(&from, &source, "other", 0);
        let granted = to.grant(destination.clone(), GrantOptions::default()).unwrap();
        let pushed = prefill
            .endpoint
            .push(&from, source.clone(), granted.grant(), PushOptions::default());
        pushed.unwrap().done().wait(LONG).unwrap();
        granted.arrived().wait(LONG).unwrap();
        verify(&to, &destination, "other", 0);
        drop((granted, claim, offer, from, to));
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop((prefill, decode));
            let _ = ended.send(());
        });
        end.recv_timeout(LONG).expect("the endpoints end");
        assert_eq!(domain.violations(), Vec::<String>::new());
    }
}
