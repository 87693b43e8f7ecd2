//! Pools that come and go under RDMA: keys are known while the memory is registered, and no longer.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::time::Duration;

use kvxfer::{ErrorKind, Grant, GrantOptions, PoolLayout, PullOptions, PushOptions, Role};
use kvxfer_cases::common::*;

fn push(from: &Side, to: &kvxfer::Pool, key: &str) -> kvxfer::Result<()> {
    let blocks = tokens(16, [3]);
    fill(&from.pool, &blocks, key, 0);
    poison(to, &blocks);
    let granted = to.grant(blocks.clone(), GrantOptions::default())?;
    push_to(from, granted.grant())?;
    granted.arrived().wait(LONG)?;
    verify(to, &blocks, key, 0);
    Ok(())
}

fn push_to(from: &Side, grant: &Grant) -> kvxfer::Result<()> {
    let transfer = from
        .endpoint
        .push(&from.pool, tokens(16, [3]), grant, PushOptions::default())?;
    transfer.done().wait(LONG).map(drop)
}

fn regions(side: &Side) -> f64 {
    metric_sum(&side.endpoint, "kvxfer_rdma_regions", "")
}

#[test]
fn a_pool_registered_after_the_session_began_is_reached() {
    let (sender, receiver) = pair();
    push(&sender, &receiver.pool, "first").unwrap();
    let late = receiver.endpoint.allocate(layout(), Role::Receive).unwrap();
    push(&sender, &late, "second").unwrap();
    let source = Side {
        pool: sender.endpoint.allocate(layout(), Role::Serve).unwrap(),
        endpoint: sender.endpoint,
        used: sender.used,
    };
    push(&source, &late, "third").unwrap();
    assert_eq!(metric_sum(&source.endpoint, "kvxfer_links", "rdma"), 1.0);
}

#[test]
fn keys_go_with_their_pool() {
    let (sender, receiver) = pair();
    let before = regions(&receiver);
    let second = receiver.endpoint.allocate(layout(), Role::Receive).unwrap();
    assert!(regions(&receiver) > before);
    push(&sender, &second, "k").unwrap();
    let granted = second.grant(tokens(16, [3]), GrantOptions::default()).unwrap();
    // The peer holds a grant, on paper.
    let grant = Grant::from_bytes(&granted.grant().to_bytes().unwrap()).unwrap();
    assert_eq!(second.close().unwrap_err().kind(), ErrorKind::Busy);
    granted.cancel();
    assert_eq!(granted.arrived().wait(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
    second.close_wait(LONG).unwrap();
    assert_eq!(regions(&receiver), before);
    let image = snapshot(&second);
    fill(&sender.pool, &tokens(16, [3]), "late", 0);
    let error = push_to(&sender, &grant).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::NotRegistered | ErrorKind::Cancelled),
        "{error}"
    );
    assert_eq!(image, snapshot(&second));
    // The others are as they were.
    push(&sender, &receiver.pool, "l").unwrap();
}

#[test]
fn a_suspended_pool_is_not_reached_and_comes_back() {
    let (sender, receiver) = pair();
    push(&sender, &receiver.pool, "k").unwrap();
    for round in 0..5 {
        eventually("nothing refers to it", || receiver.pool.suspend().is_ok());
        assert_eq!(regions(&receiver), 0.0, "its memory may be remapped now");
        assert!(receiver.pool.grant(tokens(16, [3]), GrantOptions::default()).is_err());
        receiver.pool.resume().unwrap();
        push(&sender, &receiver.pool, &format!("round {round}")).unwrap();
        // The source too.
        eventually("nothing refers to it", || sender.pool.suspend().is_ok());
        assert_eq!(regions(&sender), 0.0);
        sender.pool.resume().unwrap();
    }
    push(&sender, &receiver.pool, "l").unwrap();
}

#[test]
fn a_pool_is_not_unregistered_under_what_is_under_way() {
    const BLOCKS: u32 = 64;
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(20);
    let side = |name| {
        let layout = PoolLayout::opaque(1 << 20, BLOCKS).unwrap();
        Side::with(name, config(), layout, Role::Both)
    };
    let (a, b) = (side("prefill"), side("decode"));
    a.endpoint.connect(&b.endpoint.address(), LONG).unwrap();
    let all = || kvxfer::Selection::single(0, BLOCKS, (0..BLOCKS).collect());
    for pull in [false, true] {
        let held = if pull {
            a.pool.serve(all(), GrantOptions::default()).unwrap()
        } else {
            b.pool.grant(all(), GrantOptions::default()).unwrap()
        };
        let (mover, transfer) = if pull {
            (
                &b,
                b.endpoint
                    .pull(held.grant(), &b.pool, all(), PullOptions::default())
                    .unwrap(),
            )
        } else {
            (
                &a,
                a.endpoint
                    .push(&a.pool, all(), held.grant(), PushOptions::default())
                    .unwrap(),
            )
        };
        let direction = if pull { "read" } else { "sent" };
        eventually("bytes are under way", || under_way(&mover.endpoint, direction) > 0.0);
        for side in [&a, &b] {
            assert_eq!(side.pool.close().unwrap_err().kind(), ErrorKind::Busy);
            assert_eq!(side.pool.suspend().unwrap_err().kind(), ErrorKind::Busy);
            let soon = side.pool.close_wait(Duration::from_millis(5));
            assert_eq!(soon.unwrap_err().kind(), ErrorKind::Busy);
        }
        assert!(
            under_way(&mover.endpoint, direction) > 0.0,
            "it was too fast for this test"
        );
        transfer.cancel();
        held.cancel();
        let _ = transfer.done().wait(LONG);
        let _ = held.arrived().wait(LONG);
        assert!(transfer.done().is_done() && held.arrived().is_done());
    }
    for side in [&a, &b] {
        side.pool.close_wait(LONG).unwrap();
        assert_eq!(regions(side), 0.0);
    }
}

#[test]
fn memory_that_may_not_be_locked_is_an_error_that_says_so() {
    let site = site::site();
    let Some(fabric) = &site.fabric else {
        println!("skipped: memory may be locked here");
        return;
    };
    let (sender, receiver) = pair();
    push(&sender, &receiver.pool, "k").unwrap();
    fabric.set_now("*", "memlock_bytes", "65536").unwrap();
    for _ in 0..3 {
        let error = receiver.endpoint.allocate(layout(), Role::Receive).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{error}");
        assert!(
            error.to_string().contains("ibv_reg_mr") && error.to_string().contains("ENOMEM"),
            "{error}"
        );
    }
    // What was registered stays in use, and nothing is left of what was refused.
    push(&sender, &receiver.pool, "l").unwrap();
    let before = regions(&receiver);
    fabric.set_now("*", "memlock_bytes", "1073741824").unwrap();
    let more = receiver.endpoint.allocate(layout(), Role::Receive).unwrap();
    push(&sender, &more, "m").unwrap();
    more.close_wait(LONG).unwrap();
    assert_eq!(regions(&receiver), before);
}
