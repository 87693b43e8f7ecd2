//! The layer below: grants, pushes, pulls.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use crate::place;
use kvxfer::{BlockDescriptor, ErrorKind, Grant, GrantOptions, PoolLayout, PullOptions, PushOptions, Role, Selection};

suite!($ grants:
    a_push_places_its_bytes_and_delivers_its_message,
    a_large_message_arrives_whole,
    large_pushes_go_on_though_nobody_looks_at_them,
    a_pull_reads_what_is_served,
    explicit_pieces_go_where_they_are_told,
    a_cancelled_grant_takes_nothing,
    a_used_grant_is_not_used_again,
    a_grant_expires,
    only_the_holder_may_use_a_grant,
    what_does_not_fit_is_refused_at_once,
    slots_are_limited_and_come_back,
    the_same_grants_go_round_many_times,
);

fn a_push_places_its_bytes_and_delivers_its_message() {
    let (sender, receiver) = pair();
    let source = tokens(40, [1, 2, 3]);
    let destination = tokens(40, [9, 8, 7]);
    fill(&sender.pool, &source, "push", 0);
    poison(&receiver.pool, &destination);
    let granted = receiver
        .pool
        .grant(destination.clone(), GrantOptions::default())
        .unwrap();
    // As it travels between engines.
    let grant = Grant::from_bytes(&granted.grant().to_bytes().unwrap()).unwrap();
    let message: Arc<[u8]> = Arc::from(&b"the first token is 42"[..]);
    let options = PushOptions {
        message: Some(Arc::clone(&message)),
        ..PushOptions::default()
    };
    let transfer = sender.endpoint.push(&sender.pool, source, &grant, options).unwrap();
    let arrival = granted.arrived().wait(LONG).unwrap();
    assert_eq!(arrival.message, Some(message));
    assert_eq!(arrival.bytes, 40 * 8 * 8 * 2 * 2 * 4);
    verify(&receiver.pool, &destination, "push", 0);
    let delivery = transfer.done().wait(LONG).unwrap();
    assert_eq!(delivery.bytes, arrival.bytes);
    let path = transfer.path().unwrap();
    assert_eq!(path.transport, place().over);
    assert!(!path.rails.is_empty());
}

fn a_large_message_arrives_whole() {
    let (sender, receiver) = pair();
    let message: Arc<[u8]> = (0..64u32 << 10).map(|n| ((n * 7) >> 3) as u8).collect();
    for _ in 0..8 {
        let granted = receiver.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
        let options = PushOptions {
            message: Some(Arc::clone(&message)),
            ..PushOptions::default()
        };
        let transfer = sender
            .endpoint
            .push(&sender.pool, tokens(16, [1]), granted.grant(), options)
            .unwrap();
        transfer.done().wait(LONG).unwrap();
        assert_eq!(
            granted.arrived().wait(LONG).unwrap().message.as_deref(),
            Some(&message[..])
        );
    }
    let granted = receiver.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    let options = PushOptions {
        message: Some(vec![0; (64 << 10) + 1].into()),
        ..PushOptions::default()
    };
    let refused = sender
        .endpoint
        .push(&sender.pool, tokens(16, [1]), granted.grant(), options);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

fn large_pushes_go_on_though_nobody_looks_at_them() {
    // 64 blocks of 256 KiB: large enough to be planned by the control thread, which nobody wakes.
    let layout = || PoolLayout::opaque(256 << 10, 64).unwrap();
    // Nor does anything else wake it before this test gives up: not a heartbeat, nor the limit of a dial that is over.
    let mut quiet = config();
    quiet.deadlines.heartbeat_ms = 2 * LONG.as_millis() as u64;
    quiet.deadlines.liveness_ms = 3 * quiet.deadlines.heartbeat_ms;
    quiet.deadlines.connect_ms = quiet.deadlines.heartbeat_ms;
    let sender = Side::with("prefill", quiet.clone(), layout(), Role::Both);
    let receiver = Side::with("decode", quiet, layout(), Role::Both);
    sender.endpoint.connect(&receiver.endpoint.address(), LONG).unwrap();
    let blocks = |from: u32| Selection::whole_blocks(1, (from..from + 32).collect());
    let granted: Vec<_> = [0, 32]
        .map(|from| receiver.pool.grant(blocks(from), GrantOptions::default()).unwrap())
        .into();
    let pushed: Vec<_> = granted
        .iter()
        .zip([0, 32])
        .map(|(granted, from)| {
            sender
                .endpoint
                .push(&sender.pool, blocks(from), granted.grant(), PushOptions::default())
                .unwrap()
        })
        .collect();
    for granted in &granted {
        assert_eq!(granted.arrived().wait(LONG).unwrap().bytes, 8 << 20);
    }
    for pushed in pushed {
        assert_eq!(pushed.done().wait(LONG).unwrap().bytes, 8 << 20);
    }
}

fn a_pull_reads_what_is_served() {
    let (owner, reader) = pair();
    let source = tokens(32, [1, 2]);
    let destination = tokens(32, [5, 6]);
    fill(&owner.pool, &source, "served", 0);
    let served = owner.pool.serve(source.clone(), GrantOptions::default()).unwrap();
    let transfer = reader
        .endpoint
        .pull(
            served.grant(),
            &reader.pool,
            destination.clone(),
            PullOptions::default(),
        )
        .unwrap();
    let delivery = transfer.done().wait(LONG).unwrap();
    verify(&reader.pool, &destination, "served", 0);
    assert_eq!(served.arrived().wait(LONG).unwrap().bytes, delivery.bytes);
    // Once.
    let again = reader
        .endpoint
        .pull(
            served.grant(),
            &reader.pool,
            destination.clone(),
            PullOptions::default(),
        )
        .and_then(|again| again.done().wait(LONG));
    assert!(again.is_err());
}

fn explicit_pieces_go_where_they_are_told() {
    let sender = Side::with("sender", config(), PoolLayout::opaque(4096, 16).unwrap(), Role::Serve);
    let receiver = Side::with(
        "receiver",
        config(),
        PoolLayout::opaque(4096, 16).unwrap(),
        Role::Receive,
    );
    let piece = |block, offset, length| BlockDescriptor {
        plane: 0,
        block,
        offset,
        length,
    };
    let data: Vec<u8> = (0..300u32).map(|n| n as u8).collect();
    sender.pool.copy_in(0, 3, 100, &data).unwrap();
    let before = snapshot(&receiver.pool);
    let granted = receiver
        .pool
        .grant(
            vec![piece(7, 1, 100), piece(2, 4000, 96), piece(9, 0, 104)],
            GrantOptions::default(),
        )
        .unwrap();
    let transfer = sender
        .endpoint
        .push(
            &sender.pool,
            vec![piece(3, 100, 150), piece(3, 250, 150)],
            granted.grant(),
            PushOptions::default(),
        )
        .unwrap();
    transfer.done().wait(LONG).unwrap();
    granted.arrived().wait(LONG).unwrap();
    let mut expected = before;
    expected[7 * 4096 + 1..][..100].copy_from_slice(&data[..100]);
    expected[2 * 4096 + 4000..][..96].copy_from_slice(&data[100..196]);
    expected[9 * 4096..][..104].copy_from_slice(&data[196..]);
    assert_eq!(snapshot(&receiver.pool), expected);
}

fn a_cancelled_grant_takes_nothing() {
    let (sender, receiver) = pair();
    let granted = receiver.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    sender.endpoint.connect(&receiver.endpoint.address(), LONG).unwrap();
    let grant = granted.grant().clone();
    granted.cancel();
    assert_eq!(granted.arrived().wait(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
    let before = snapshot(&receiver.pool);
    fill(&sender.pool, &tokens(16, [1]), "late", 0);
    let transfer = sender
        .endpoint
        .push(&sender.pool, tokens(16, [1]), &grant, PushOptions::default())
        .unwrap();
    let error = transfer.done().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    assert_eq!(before, snapshot(&receiver.pool));
}

fn a_used_grant_is_not_used_again() {
    let (sender, receiver) = pair();
    let granted = receiver.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    let push = |key| {
        fill(&sender.pool, &tokens(16, [1]), key, 0);
        sender
            .endpoint
            .push(&sender.pool, tokens(16, [1]), granted.grant(), PushOptions::default())
            .and_then(|transfer| transfer.done().wait(LONG))
    };
    push("first").unwrap();
    granted.arrived().wait(LONG).unwrap();
    let second = push("second");
    assert!(second.is_err(), "{second:?}");
    verify(&receiver.pool, &tokens(16, [1]), "first", 0);
}

fn a_grant_expires() {
    let (sender, receiver) = pair();
    let options = GrantOptions {
        deadline: Some(Duration::from_millis(50)),
        ..GrantOptions::default()
    };
    let granted = receiver.pool.grant(tokens(16, [1]), options).unwrap();
    let error = granted.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    let late = sender
        .endpoint
        .push(&sender.pool, tokens(16, [1]), granted.grant(), PushOptions::default())
        .and_then(|transfer| transfer.done().wait(LONG));
    assert!(late.is_err());
}

fn only_the_holder_may_use_a_grant() {
    let (sender, receiver) = pair();
    let other = Side::new("other");
    let options = GrantOptions {
        holder: Some(sender.endpoint.incarnation()),
        ..GrantOptions::default()
    };
    let granted = receiver.pool.grant(tokens(16, [1]), options).unwrap();
    let before = snapshot(&receiver.pool);
    fill(&other.pool, &tokens(16, [1]), "thief", 0);
    let stolen = other
        .endpoint
        .push(&other.pool, tokens(16, [1]), granted.grant(), PushOptions::default())
        .and_then(|transfer| transfer.done().wait(LONG));
    assert!(stolen.is_err(), "{stolen:?}");
    assert_eq!(before, snapshot(&receiver.pool));
    fill(&sender.pool, &tokens(16, [1]), "holder", 0);
    let transfer = sender
        .endpoint
        .push(&sender.pool, tokens(16, [1]), granted.grant(), PushOptions::default())
        .unwrap();
    transfer.done().wait(LONG).unwrap();
    verify(&receiver.pool, &tokens(16, [1]), "holder", 0);
}

fn what_does_not_fit_is_refused_at_once() {
    let (sender, receiver) = pair();
    let kind = |result: kvxfer::Result<()>| result.unwrap_err().kind();
    let out = receiver.pool.grant(tokens(16, [BLOCKS]), GrantOptions::default());
    assert_eq!(kind(out.map(drop)), ErrorKind::OutOfBounds);
    let served = receiver.pool.serve(tokens(16, [1]), GrantOptions::default()).unwrap();
    let wrong_way = sender
        .endpoint
        .push(&sender.pool, tokens(16, [1]), served.grant(), PushOptions::default());
    assert_eq!(kind(wrong_way.map(drop)), ErrorKind::InvalidArgument);
    let serving = Side::with("serving", config(), layout(), Role::Serve);
    let refused = serving.pool.grant(tokens(16, [1]), GrantOptions::default());
    assert!(refused.is_err());
    let short = receiver
        .pool
        .grant(tokens(32, [1, 2]), GrantOptions::default())
        .unwrap();
    let uncovered = sender
        .endpoint
        .push(&sender.pool, tokens(16, [1]), short.grant(), PushOptions::default())
        .and_then(|transfer| transfer.done().wait(LONG));
    let error = uncovered.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}

fn slots_are_limited_and_come_back() {
    let mut small = config();
    small.limits.slots_max = 4;
    let receiver = Side::with("receiver", small, layout(), Role::Both);
    let sender = Side::new("sender");
    let grant = |block| receiver.pool.grant(tokens(16, [block]), GrantOptions::default());
    let held: Vec<_> = (0..4).map(|block| grant(block).unwrap()).collect();
    assert_eq!(grant(5).unwrap_err().kind(), ErrorKind::Busy);
    for granted in &held {
        let transfer = sender
            .endpoint
            .push(&sender.pool, tokens(16, [1]), granted.grant(), PushOptions::default())
            .unwrap();
        transfer.done().wait(LONG).unwrap();
        granted.arrived().wait(LONG).unwrap();
    }
    eventually("slots come back once their verdicts are acknowledged", || {
        grant(5).is_ok()
    });
}

fn the_same_grants_go_round_many_times() {
    let (a, b) = pair();
    // Painting and verifying device memory takes its time.
    let rounds: u32 = if place().pools == "host" { 300 } else { 40 };
    for round in 0..rounds {
        let key = format!("round-{round}");
        let (from, to) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let block = round % BLOCKS;
        let granted = to.pool.grant(tokens(16, [block]), GrantOptions::default()).unwrap();
        fill(&from.pool, &tokens(16, [block]), &key, 0);
        let options = PushOptions {
            message: Some(round.to_le_bytes().to_vec().into()),
            ..PushOptions::default()
        };
        let transfer = from
            .endpoint
            .push(&from.pool, tokens(16, [block]), granted.grant(), options)
            .unwrap();
        let arrival = granted.arrived().wait(LONG).unwrap();
        assert_eq!(arrival.message.as_deref(), Some(&round.to_le_bytes()[..]));
        verify(&to.pool, &tokens(16, [block]), &key, 0);
        transfer.done().wait(LONG).unwrap();
    }
}
