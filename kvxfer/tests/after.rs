//! Parts and pushes that wait for something, without any GPU.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use kvxfer::{ClaimOptions, Error, ErrorKind, GrantOptions, Happening, OfferOptions, PushOptions, Result, Selection};
use kvxfer_cases::common::*;

type Then = Box<dyn FnOnce(Result<()>) + Send>;

/// Happens when the test says so.
struct Switch(Sender<Then>);

impl Happening for Switch {
    fn watch(self: Box<Self>, then: Then) {
        self.0.send(then).unwrap();
    }
}

fn switch() -> (Switch, Receiver<Then>) {
    let (sender, receiver) = channel();
    (Switch(sender), receiver)
}

fn happens(receiver: &Receiver<Then>, result: Result<()>) {
    let then = receiver.try_recv().unwrap();
    // On a foreign thread, as it will be.
    std::thread::spawn(move || then(result)).join().unwrap();
}

fn kernel_failed() -> Error {
    Error::new(ErrorKind::Transport, "a kernel").because("it failed")
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "{what} did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_step_of_several_requests_waits_for_one_event() {
    let (prefill, decode) = pair();
    let keys = ["a", "b", "c"];
    let selections: Vec<Selection> = (0..3).map(|at| tokens(32, [2 * at, 2 * at + 1])).collect();
    let offers: Vec<_> = keys
        .iter()
        .zip(&selections)
        .map(|(key, selection)| {
            let offer = prefill
                .endpoint
                .offer(key, &prefill.pool, OfferOptions::default())
                .unwrap();
            offer.append(selection).unwrap();
            offer
        })
        .collect();
    let sources = [prefill.endpoint.address()];
    let claims: Vec<_> = keys
        .iter()
        .zip(&selections)
        .map(|(key, selection)| {
            poison(&decode.pool, selection);
            let claim = decode
                .endpoint
                .claim(key, &decode.pool, &sources, ClaimOptions::default())
                .unwrap();
            claim.fill(selection.clone()).unwrap();
            claim
        })
        .collect();
    let (happening, told) = switch();
    let after = prefill.endpoint.after(happening);
    let step: Vec<_> = offers.iter().map(|offer| (offer, 0..16, ..)).collect();
    prefill.endpoint.ready_many_after(&step, &after).unwrap();
    for offer in &offers {
        offer.finish_after(32, &after).unwrap();
        wait_until("the claim", || offer.waiting_on().unwrap().what == "event");
        let again = offer.ready_after(0..16, .., &after).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::InvalidArgument);
    }
    assert!(after.outcome().is_none());
    assert!(claims.iter().all(|claim| claim.arrived().poll().is_none()));
    // The kernels are done only now.
    for (key, selection) in keys.iter().zip(&selections) {
        fill(&prefill.pool, selection, key, 1);
    }
    happens(&told, Ok(()));
    for ((key, selection), (claim, offer)) in keys.iter().zip(&selections).zip(claims.iter().zip(&offers)) {
        claim.arrived().wait(LONG).unwrap();
        check(&decode.pool, selection, key, 1).unwrap();
        offer.released().wait(LONG).unwrap();
    }
    assert_eq!(after.outcome(), Some(Ok(())));
}

#[test]
fn what_has_happened_is_waited_for_no_more() {
    let (prefill, decode) = pair();
    let selection = tokens(16, [3]);
    fill(&prefill.pool, &selection, "r", 1);
    let (happening, told) = switch();
    let after = prefill.endpoint.after(happening);
    happens(&told, Ok(()));
    let offer = prefill
        .endpoint
        .offer("r", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(&selection).unwrap();
    offer.ready_after(0..16, .., &after).unwrap();
    offer.finish_after(16, &after).unwrap();
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("r", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    claim.fill(selection.clone()).unwrap();
    claim.arrived().wait(LONG).unwrap();
    check(&decode.pool, &selection, "r", 1).unwrap();
}

#[test]
fn what_fails_or_is_dropped_ends_what_waits_for_it() {
    for how in 0..3 {
        let (prefill, decode) = pair();
        let selection = tokens(16, [3]);
        poison(&decode.pool, &selection);
        let (happening, told) = switch();
        let after = prefill.endpoint.after(happening);
        if how == 0 {
            // Before anything waits for it.
            happens(&told, Err(kernel_failed()));
        }
        let offer = prefill
            .endpoint
            .offer("r", &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(&selection).unwrap();
        let sources = [prefill.endpoint.address()];
        let claim = decode
            .endpoint
            .claim("r", &decode.pool, &sources, ClaimOptions::default())
            .unwrap();
        claim.fill(selection.clone()).unwrap();
        offer.ready_after(0..16, .., &after).unwrap();
        match how {
            0 => {}
            1 => happens(&told, Err(kernel_failed())),
            _ => drop(told),
        }
        let kind = if how == 2 {
            ErrorKind::Closed
        } else {
            ErrorKind::Transport
        };
        let error = offer.released().wait(LONG).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(
            error.to_string().contains("the event that the blocks waited for"),
            "{error}"
        );
        let error = claim.arrived().wait(LONG).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::Closed | ErrorKind::Transport | ErrorKind::NotOffered
            ),
            "{error}"
        );
        assert!(untouched(&decode.pool, &selection));
    }
}

/// Whether a poisoned destination is as it was.
fn untouched(pool: &kvxfer::Pool, selection: &Selection) -> bool {
    check(pool, selection, "r", 1).is_err()
}

#[test]
fn a_push_is_held_and_can_be_cancelled() {
    let (prefill, decode) = pair();
    for held in [true, false] {
        let selection = tokens(16, [3]);
        poison(&decode.pool, &selection);
        let grant = decode.pool.grant(selection.clone(), GrantOptions::default()).unwrap();
        let (happening, told) = switch();
        let options = PushOptions {
            after: Some(prefill.endpoint.after(happening)),
            message: Some(b"done".to_vec().into()),
            ..PushOptions::default()
        };
        let push = prefill
            .endpoint
            .push(&prefill.pool, selection.clone(), grant.grant(), options)
            .unwrap();
        assert_eq!(push.waiting_on().unwrap().what, "event");
        if held {
            push.cancel();
            // Nothing is to be fenced: it has ended when the call returns.
            assert_eq!(push.done().poll().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
            happens(&told, Ok(()));
            continue;
        }
        fill(&prefill.pool, &selection, "p", 1);
        happens(&told, Ok(()));
        push.done().wait(LONG).unwrap();
        assert_eq!(
            grant.arrived().wait(LONG).unwrap().message.as_deref(),
            Some(&b"done"[..])
        );
        check(&decode.pool, &selection, "p", 1).unwrap();
    }
}

#[test]
fn a_large_push_is_planned_after_its_event() {
    const BLOCK: u32 = 1 << 20;
    let layout = || kvxfer::PoolLayout::opaque(BLOCK, 16).unwrap();
    let (prefill, decode) = (
        Side::with("prefill", config(), layout(), kvxfer::Role::Both),
        Side::with("decode", config(), layout(), kvxfer::Role::Both),
    );
    let blocks = Selection::whole_blocks(1, (0..16).collect());
    let grant = decode.pool.grant(blocks.clone(), GrantOptions::default()).unwrap();
    let (happening, told) = switch();
    let options = PushOptions {
        after: Some(prefill.endpoint.after(happening)),
        ..PushOptions::default()
    };
    let push = prefill
        .endpoint
        .push(&prefill.pool, blocks, grant.grant(), options)
        .unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(push.done().poll().is_none());
    prefill.pool.copy_in(0, 15, 0, &[7; 64]).unwrap();
    happens(&told, Ok(()));
    push.done().wait(LONG).unwrap();
    let mut bytes = [0; 64];
    decode.pool.copy_out(0, 15, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 64]);
}

#[test]
fn another_endpoints_is_refused() {
    let (prefill, decode) = pair();
    let (happening, _told) = switch();
    let after = decode.endpoint.after(happening);
    let selection = tokens(16, [3]);
    let offer = prefill
        .endpoint
        .offer("r", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(&selection).unwrap();
    let kind = |result: Result<()>| result.unwrap_err().kind();
    assert_eq!(kind(offer.ready_after(0..16, .., &after)), ErrorKind::InvalidArgument);
    assert_eq!(kind(offer.finish_after(16, &after)), ErrorKind::InvalidArgument);
    let step = [(&offer, 0..16, ..)];
    assert_eq!(
        kind(prefill.endpoint.ready_many_after(&step, &after)),
        ErrorKind::InvalidArgument
    );
    let grant = decode.pool.grant(selection.clone(), GrantOptions::default()).unwrap();
    let options = PushOptions {
        after: Some(after),
        ..PushOptions::default()
    };
    let push = prefill.endpoint.push(&prefill.pool, selection, grant.grant(), options);
    assert_eq!(push.unwrap_err().kind(), ErrorKind::InvalidArgument);
    // Nothing of it was taken.
    offer.ready(0..16, ..).unwrap();
}

#[test]
fn closing_the_endpoint_ends_what_waits() {
    let (prefill, _decode) = pair();
    let (happening, told) = switch();
    let after = prefill.endpoint.after(happening);
    let offer = prefill
        .endpoint
        .offer("r", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(tokens(16, [3])).unwrap();
    offer.ready_after(0..16, .., &after).unwrap();
    prefill.endpoint.close(LONG).unwrap();
    assert_eq!(offer.released().poll().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    happens(&told, Ok(()));
}
