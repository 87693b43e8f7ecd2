//! Offers and claims between endpoints of one process.

use std::time::{Duration, Instant};

use crate::common::*;
use crate::place;
use kvxfer::layout::InnerOrder;
use kvxfer::{ClaimOptions, Destination, ErrorKind, OfferOptions, Role, Selection, Verdict};

suite!($ handover:
    a_request_is_handed_over,
    the_claim_may_come_first_and_nothing_needs_tokio,
    parts_stream_as_they_become_ready,
    many_offers_are_made_ready_in_one_step,
    four_ranks_hand_over_to_two,
    held_tokens_are_not_sent_again,
    an_offer_serves_as_many_readers_as_it_was_opened_for,
    one_members_failure_is_in_the_verdict_and_does_not_hold_the_other,
    a_claim_can_be_declined_before_or_after_the_offer_comes,
    a_dropped_claim_is_cancelled_at_both_sides,
    a_detached_claim_goes_on,
    a_cancelled_offer_ends_its_claim_and_the_key_is_remembered,
    retracted_blocks_never_arrive,
    a_restart_voids_what_came_before,
    bytes_can_be_pulled,
    checksums_do_not_disturb,
    deadlines_end_both_sides,
    tokens_that_nobody_has_are_named,
    pools_that_do_not_fit_are_refused_before_any_byte,
    bad_arguments_are_typed_errors,
);

/// Offers `key` from the first tokens' blocks, whole.
fn offer_all(side: &Side, key: &str, selection: &Selection, options: OfferOptions) -> kvxfer::Offer {
    fill(&side.pool, selection, key, 0);
    let offer = side.endpoint.offer(key, &side.pool, options).unwrap();
    offer.append(selection).unwrap();
    offer.finish(selection.groups[0].token_end).unwrap();
    offer
}

fn a_request_is_handed_over() {
    let (prefill, decode) = pair();
    let source = tokens(100, [9, 3, 7, 1, 0, 20, 11]);
    let destination = tokens(100, [4, 5, 6, 60, 8, 30, 2]);
    poison(&decode.pool, &destination);
    let offer = offer_all(&prefill, "r-1", &source, OfferOptions::default());
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("r-1", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    claim.fill(destination.clone()).unwrap();
    let arrival = claim.arrived().wait(LONG).unwrap();
    verify(&decode.pool, &destination, "r-1", 0);
    // 100 tokens, 8 heads of 8 elements of 2 bytes, K and V, 4 layers.
    assert_eq!(arrival.bytes, 100 * 8 * 8 * 2 * 2 * 4);
    let release = offer.released().wait(LONG).unwrap();
    assert_eq!(release.members.len(), 1);
    assert_eq!(release.members[0].verdict, Verdict::Arrived);
    assert_eq!(release.members[0].peer, decode.endpoint.incarnation());
    let text = prefill.endpoint.explain(&decode.endpoint.address());
    assert!(text.contains(&format!("path: {}", place().over)), "{text}");
}

fn the_claim_may_come_first_and_nothing_needs_tokio() {
    let (prefill, decode) = pair();
    let destination = tokens(32, [1, 2]);
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("early", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    claim.fill(destination.clone()).unwrap();
    eventually("the claim waits for its offer", || {
        claim.waiting_on().is_some_and(|waiting| waiting.what.contains("offer"))
    });
    let offer = offer_all(&prefill, "early", &tokens(32, [5, 6]), OfferOptions::default());
    block_on(claim.arrived()).unwrap();
    verify(&decode.pool, &destination, "early", 0);
    block_on(offer.released()).unwrap();
    assert!(claim.waiting_on().is_none());
}

fn parts_stream_as_they_become_ready() {
    let (prefill, decode) = pair();
    let source = tokens(64, [10, 11, 12, 13]);
    let destination = tokens(64, [0, 1, 2, 3]);
    fill(&prefill.pool, &source, "stream", 0);
    poison(&decode.pool, &destination);
    let offer = prefill
        .endpoint
        .offer("stream", &prefill.pool, OfferOptions::default())
        .unwrap();
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("stream", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    claim.fill(destination.clone()).unwrap();
    // Chunk by chunk, layer by layer, some of it before and some of it after the match.
    for chunk in 0..4u32 {
        let at = chunk * PER_BLOCK;
        offer
            .append(Selection::single(at, at + PER_BLOCK, vec![10 + chunk]))
            .unwrap();
        for layer in 0..LAYERS {
            assert!(claim.arrived().poll().is_none());
            offer.ready(at..at + PER_BLOCK, layer..layer + 1).unwrap();
        }
    }
    offer.finish(64).unwrap();
    claim.arrived().wait(LONG).unwrap();
    verify(&decode.pool, &destination, "stream", 0);
    offer.released().wait(LONG).unwrap();
}

fn many_offers_are_made_ready_in_one_step() {
    let (prefill, decode) = pair();
    let sources = [prefill.endpoint.address()];
    let requests: Vec<(String, Selection, Selection)> = (0..8)
        .map(|n| (format!("step-{n}"), tokens(16, [n]), tokens(16, [63 - n])))
        .collect();
    let mut offers = Vec::new();
    let mut claims = Vec::new();
    for (key, source, destination) in &requests {
        fill(&prefill.pool, source, key, 0);
        let offer = prefill
            .endpoint
            .offer(key, &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(source).unwrap();
        offers.push(offer);
        let claim = decode
            .endpoint
            .claim(key, &decode.pool, &sources, ClaimOptions::default())
            .unwrap();
        claim.fill(destination.clone()).unwrap();
        claims.push(claim);
    }
    let parts: Vec<_> = offers.iter().map(|offer| (offer, 0..16, ..)).collect();
    // Offers are numbered per endpoint: decode must not take these for its own.
    let refused = decode.endpoint.ready_many(&parts).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
    prefill.endpoint.ready_many(&parts).unwrap();
    for offer in &offers {
        offer.finish(16).unwrap();
    }
    for (claim, (key, _, destination)) in claims.iter().zip(&requests) {
        claim.arrived().wait(LONG).unwrap();
        verify(&decode.pool, destination, key, 0);
    }
}

fn four_ranks_hand_over_to_two() {
    let sources: Vec<Side> = (0..4)
        .map(|rank| {
            let layout = layout_of(rank, 4, PER_BLOCK, BLOCKS, InnerOrder::NHD);
            Side::with(&format!("prefill-{rank}"), config(), layout, Role::Serve)
        })
        .collect();
    let addresses: Vec<_> = sources.iter().map(|side| side.endpoint.address()).collect();
    let offers: Vec<_> = sources
        .iter()
        .map(|side| offer_all(side, "tp", &tokens(40, [2, 4, 6]), OfferOptions::default()))
        .collect();
    let destinations: Vec<Side> = (0..2)
        .map(|rank| {
            // Another order and other blocks, as engines differ.
            let layout = layout_of(rank, 2, 8, BLOCKS, InnerOrder::HND);
            Side::with(&format!("decode-{rank}"), config(), layout, Role::Receive)
        })
        .collect();
    let selection = tokens(40, [9, 8, 7, 6, 5]);
    let claims: Vec<_> = destinations
        .iter()
        .zip(0..)
        .map(|(side, member)| {
            poison(&side.pool, &selection);
            let options = ClaimOptions {
                set: Some(77),
                member,
                members: 2,
                ..ClaimOptions::default()
            };
            let claim = side.endpoint.claim("tp", &side.pool, &addresses, options).unwrap();
            claim.fill(selection.clone()).unwrap();
            claim
        })
        .collect();
    for (claim, side) in claims.iter().zip(&destinations) {
        claim.arrived().wait(LONG).unwrap();
        verify(&side.pool, &selection, "tp", 0);
    }
    for offer in &offers {
        let release = offer.released().wait(LONG).unwrap();
        assert_eq!(release.members.len(), 2, "{release:?}");
    }
}

fn held_tokens_are_not_sent_again() {
    let (prefill, decode) = pair();
    let offer = offer_all(&prefill, "prefix", &tokens(64, [1, 2, 3, 4]), OfferOptions::default());
    let held = tokens(32, [20, 21]);
    fill(&decode.pool, &held, "other", 0);
    let wanted = Selection::single(32, 64, vec![22, 23]);
    let claim = decode
        .endpoint
        .claim(
            "prefix",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(wanted.clone()).unwrap();
    let arrival = claim.arrived().wait(LONG).unwrap();
    assert_eq!(arrival.bytes, 32 * 8 * 8 * 2 * 2 * 4);
    verify(&decode.pool, &wanted, "prefix", 0);
    verify(&decode.pool, &held, "other", 0);
    offer.released().wait(LONG).unwrap();
}

fn an_offer_serves_as_many_readers_as_it_was_opened_for() {
    let (prefill, decode) = pair();
    let other = Side::new("decode-2");
    let options = OfferOptions {
        readers: 2,
        ..OfferOptions::default()
    };
    let offer = offer_all(&prefill, "shared", &tokens(16, [0]), options);
    let sources = [prefill.endpoint.address()];
    for side in [&decode, &other] {
        let claim = side
            .endpoint
            .claim("shared", &side.pool, &sources, ClaimOptions::default())
            .unwrap();
        claim.fill(tokens(16, [3])).unwrap();
        claim.arrived().wait(LONG).unwrap();
        verify(&side.pool, &tokens(16, [3]), "shared", 0);
    }
    assert_eq!(offer.released().wait(LONG).unwrap().members.len(), 2);
    let late = other
        .endpoint
        .claim("shared", &other.pool, &sources, ClaimOptions::default())
        .unwrap();
    let error = late.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyClaimed, "{error}");
}

fn one_members_failure_is_in_the_verdict_and_does_not_hold_the_other() {
    let (prefill, decode) = pair();
    let other = Side::new("decode-2");
    let offer = offer_all(&prefill, "set", &tokens(16, [0]), OfferOptions::default());
    let sources = [prefill.endpoint.address()];
    let member = |member| ClaimOptions {
        set: Some(5),
        member,
        members: 2,
        ..ClaimOptions::default()
    };
    let fails = other.endpoint.claim("set", &other.pool, &sources, member(1)).unwrap();
    let arrives = decode.endpoint.claim("set", &decode.pool, &sources, member(0)).unwrap();
    arrives.fill(tokens(16, [3])).unwrap();
    arrives.arrived().wait(LONG).unwrap();
    assert!(offer.released().poll().is_none(), "a member has not ended");
    fails.decline();
    assert_eq!(fails.arrived().wait(LONG).unwrap_err().kind(), ErrorKind::Declined);
    let release = offer.released().wait(LONG).unwrap();
    let verdicts: Vec<bool> = {
        let mut members = release.members.clone();
        members.sort_by_key(|member| member.member);
        members
            .iter()
            .map(|member| member.verdict == Verdict::Arrived)
            .collect()
    };
    assert_eq!(verdicts, [true, false]);
}

fn a_claim_can_be_declined_before_or_after_the_offer_comes() {
    let (prefill, decode) = pair();
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("declined", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    eventually("the claim waits at the source", || {
        claim.waiting_on().is_some_and(|waiting| waiting.what.contains("offer"))
    });
    claim.decline();
    assert_eq!(claim.arrived().wait(LONG).unwrap_err().kind(), ErrorKind::Declined);
    // The offer comes late and learns at once.
    let began = Instant::now();
    let offer = prefill
        .endpoint
        .offer("declined", &prefill.pool, OfferOptions::default())
        .unwrap();
    let error = offer.released().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Declined, "{error}");
    assert!(began.elapsed() < Duration::from_secs(10));
}

fn a_dropped_claim_is_cancelled_at_both_sides() {
    let (prefill, decode) = pair();
    let source = tokens(16, [0]);
    fill(&prefill.pool, &source, "dropped", 0);
    let offer = prefill
        .endpoint
        .offer("dropped", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(&source).unwrap();
    let claim = decode
        .endpoint
        .claim(
            "dropped",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(tokens(32, [1, 2])).unwrap();
    eventually("matched", || {
        claim.waiting_on().is_some_and(|waiting| waiting.what.contains("parts"))
    });
    let end = claim.arrived().clone();
    drop(claim);
    assert_eq!(end.wait(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
    let error = offer.released().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
}

fn a_detached_claim_goes_on() {
    let (prefill, decode) = pair();
    let destination = tokens(16, [1]);
    let claim = decode
        .endpoint
        .claim(
            "detached",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(destination.clone()).unwrap();
    let end = claim.arrived().clone();
    claim.detach();
    offer_all(&prefill, "detached", &tokens(16, [0]), OfferOptions::default()).detach();
    end.wait(LONG).unwrap();
    verify(&decode.pool, &destination, "detached", 0);
}

fn a_cancelled_offer_ends_its_claim_and_the_key_is_remembered() {
    let (prefill, decode) = pair();
    let sources = [prefill.endpoint.address()];
    let offer = prefill
        .endpoint
        .offer("cancelled", &prefill.pool, OfferOptions::default())
        .unwrap();
    let claim = decode
        .endpoint
        .claim("cancelled", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    claim.fill(tokens(16, [1])).unwrap();
    offer.cancel();
    assert_eq!(offer.released().wait(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::NotOffered),
        "{error}"
    );
    let late = decode
        .endpoint
        .claim("cancelled", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    let error = late.arrived().wait(LONG).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::NotOffered),
        "{error}"
    );
}

fn retracted_blocks_never_arrive() {
    let (prefill, decode) = pair();
    let source = tokens(32, [1, 2]);
    fill(&prefill.pool, &source, "preempted", 0);
    let offer = prefill
        .endpoint
        .offer("preempted", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(&source).unwrap();
    let claim = decode
        .endpoint
        .claim(
            "preempted",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(tokens(32, [5, 6])).unwrap();
    offer.ready(0..16, ..).unwrap();
    assert_eq!(offer.retract(&[]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    offer.retract(&[1, 2]).unwrap();
    // From here on the blocks are somebody else's.
    fill(&prefill.pool, &source, "somebody else", 0);
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Retracted, "{error}");
    assert_eq!(offer.released().wait(LONG).unwrap_err().kind(), ErrorKind::Retracted);
    let unknown = prefill
        .endpoint
        .offer("again", &prefill.pool, OfferOptions::default())
        .unwrap();
    assert_eq!(unknown.retract(&[1]).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

fn a_restart_voids_what_came_before() {
    let (prefill, decode) = pair();
    let first = tokens(32, [1, 2]);
    let second = tokens(32, [3, 4]);
    fill(&prefill.pool, &first, "again", 0);
    let offer = prefill
        .endpoint
        .offer("again", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(&first).unwrap();
    let claim = decode
        .endpoint
        .claim(
            "again",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    let destination = tokens(32, [8, 9]);
    claim.fill(destination.clone()).unwrap();
    offer.ready(0..16, ..).unwrap();
    offer.restart().unwrap();
    fill(&prefill.pool, &second, "again", 1);
    offer.append(&second).unwrap();
    offer.finish(32).unwrap();
    claim.arrived().wait(LONG).unwrap();
    verify(&decode.pool, &destination, "again", 1);
    offer.released().wait(LONG).unwrap();
}

fn bytes_can_be_pulled() {
    let (prefill, decode) = pair();
    let source = tokens(48, [1, 2, 3]);
    let destination = tokens(48, [40, 41, 42]);
    let options = ClaimOptions {
        pull: true,
        ..ClaimOptions::default()
    };
    let claim = decode
        .endpoint
        .claim("pulled", &decode.pool, &[prefill.endpoint.address()], options)
        .unwrap();
    claim.fill(destination.clone()).unwrap();
    let offer = offer_all(&prefill, "pulled", &source, OfferOptions::default());
    claim.arrived().wait(LONG).unwrap();
    verify(&decode.pool, &destination, "pulled", 0);
    assert_eq!(
        offer.released().wait(LONG).unwrap().members[0].verdict,
        Verdict::Arrived
    );
}

fn checksums_do_not_disturb() {
    let (prefill, decode) = pair();
    let options = OfferOptions {
        checksum: true,
        ..OfferOptions::default()
    };
    let offer = offer_all(&prefill, "sum", &tokens(48, [1, 2, 3]), options);
    let destination = tokens(48, [40, 41, 42]);
    let claim = decode
        .endpoint
        .claim(
            "sum",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(destination.clone()).unwrap();
    claim.arrived().wait(LONG).unwrap();
    verify(&decode.pool, &destination, "sum", 0);
    offer.released().wait(LONG).unwrap();
}

fn deadlines_end_both_sides() {
    let (prefill, decode) = pair();
    let soon = Some(Duration::from_millis(150));
    // Nobody claims.
    let options = OfferOptions {
        deadline: soon,
        ..OfferOptions::default()
    };
    let offer = prefill.endpoint.offer("unclaimed", &prefill.pool, options).unwrap();
    assert_eq!(offer.released().wait(LONG).unwrap_err().kind(), ErrorKind::Unclaimed);
    // Nobody offers.
    let options = ClaimOptions {
        deadline: soon,
        ..ClaimOptions::default()
    };
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("unoffered", &decode.pool, &sources, options.clone())
        .unwrap();
    claim.fill(tokens(16, [1])).unwrap();
    assert_eq!(claim.arrived().wait(LONG).unwrap_err().kind(), ErrorKind::Unclaimed);
    // Matched, but the rest never comes.
    let source = tokens(16, [1]);
    fill(&prefill.pool, &source, "half", 0);
    let offer = prefill
        .endpoint
        .offer("half", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(&source).unwrap();
    let claim = decode.endpoint.claim("half", &decode.pool, &sources, options).unwrap();
    claim.fill(tokens(32, [1, 2])).unwrap();
    offer.ready(0..16, ..).unwrap();
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert_ne!(error.destination(), Destination::Quarantined);
    let error = offer.released().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
}

fn tokens_that_nobody_has_are_named() {
    let (prefill, decode) = pair();
    let offer = offer_all(&prefill, "short", &tokens(32, [1, 2]), OfferOptions::default());
    let claim = decode
        .endpoint
        .claim(
            "short",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(tokens(48, [1, 2, 3])).unwrap();
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains("32..48"), "{error}");
    assert!(offer.released().wait(LONG).is_err());
}

fn pools_that_do_not_fit_are_refused_before_any_byte() {
    let prefill = Side::new("prefill");
    let decode = Side::with(
        "decode",
        config(),
        {
            use kvxfer::layout::{DType, Geometry, PlaneKind, PlaneSpec, Sharding};
            let mut builder = kvxfer::PoolLayout::builder();
            let geometry = Geometry::attention(DType::Bf16, PER_BLOCK, 8, 16, Sharding::NONE);
            let group = builder.group("attention", geometry, 8);
            for layer in 0..LAYERS {
                builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Key));
                builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Value));
            }
            builder.build().unwrap()
        },
        Role::Receive,
    );
    let before = snapshot(&decode.pool);
    let _offer = offer_all(&prefill, "misfit", &tokens(16, [0]), OfferOptions::default());
    let claim = decode
        .endpoint
        .claim(
            "misfit",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(tokens(16, [0])).unwrap();
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::GeometryMismatch, "{error}");
    assert!(error.to_string().contains("head"), "{error}");
    assert_eq!(before, snapshot(&decode.pool));
}

fn bad_arguments_are_typed_errors() {
    let (prefill, decode) = pair();
    let kind = |result: kvxfer::Result<()>| result.unwrap_err().kind();
    let offer = prefill
        .endpoint
        .offer("key", &prefill.pool, OfferOptions::default())
        .unwrap();
    let again = prefill.endpoint.offer("key", &prefill.pool, OfferOptions::default());
    assert_eq!(kind(again.map(drop)), ErrorKind::DuplicateKey);
    let long = prefill
        .endpoint
        .offer([b'k'; 257], &prefill.pool, OfferOptions::default());
    assert_eq!(kind(long.map(drop)), ErrorKind::InvalidArgument);
    assert_eq!(kind(offer.append(tokens(16, [BLOCKS]))), ErrorKind::OutOfBounds);
    assert_eq!(kind(offer.append(tokens(32, [1, 1]))), ErrorKind::InvalidArgument);
    assert_eq!(kind(offer.append(tokens(16, [1, 2]))), ErrorKind::InvalidArgument);
    assert_eq!(kind(offer.ready(0..16, ..)), ErrorKind::OutOfBounds);
    // What was released cannot be cut off afterwards.
    offer.append(tokens(32, [1, 2])).unwrap();
    offer.ready(0..32, 0..1).unwrap();
    assert_eq!(kind(offer.finish(16)), ErrorKind::InvalidArgument);
    assert_eq!(kind(offer.finish(33)), ErrorKind::OutOfBounds);
    offer.finish(32).unwrap();
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("key", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    assert_eq!(kind(claim.fill(tokens(16, [BLOCKS]))), ErrorKind::OutOfBounds);
    let nobody = decode.endpoint.claim("key", &decode.pool, &[], ClaimOptions::default());
    assert_eq!(kind(nobody.map(drop)), ErrorKind::InvalidArgument);
    let own = [decode.endpoint.address()];
    let own = decode
        .endpoint
        .claim("key", &decode.pool, &own, ClaimOptions::default());
    assert_eq!(kind(own.map(drop)), ErrorKind::InvalidArgument);
}
