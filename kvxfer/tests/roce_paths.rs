//! Which path is taken over RDMA, that it is said, and that nothing else is taken in silence.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::time::{Duration, Instant};

use kvxfer::{Config, Endpoint, ErrorKind, GrantOptions, Path, PushOptions, Role};
use kvxfer_cases::common::*;
use kvxfer_fake_verbs::FakeFabric;

fn side(name: &str, config: Config) -> Side {
    Side::with(name, config, layout(), Role::Both)
}

fn named(transports: &[&str], side: usize) -> Config {
    let mut config = config_on(side);
    config.transports = transports.iter().map(|&name| name.into()).collect();
    // So that a rail that cannot come up is given up soon.
    config.deadlines.connect_ms = 500;
    config
}

/// Pushes a block and checks it; says over what.
fn push(from: &Side, to: &Side, key: &str) -> kvxfer::Result<Path> {
    let blocks = tokens(16, [3]);
    fill(&from.pool, &blocks, key, 0);
    poison(&to.pool, &blocks);
    let granted = to.pool.grant(blocks.clone(), GrantOptions::default()).unwrap();
    let transfer = from
        .endpoint
        .push(&from.pool, blocks.clone(), granted.grant(), PushOptions::default())?;
    transfer.done().wait(LONG)?;
    granted.arrived().wait(LONG)?;
    verify(&to.pool, &blocks, key, 0);
    Ok(transfer.path().unwrap())
}

#[test]
fn the_path_names_transport_devices_and_rails() {
    let (sender, receiver) = pair();
    let path = push(&sender, &receiver, "k").unwrap();
    assert_eq!(path.transport, "rdma");
    assert_eq!((path.rails.len(), path.rails_configured), (1, 1), "{path:?}");
    let (own, their) = (site::site().device(0), site::site().device(1));
    assert!(
        path.rails[0].contains(&own) && path.rails[0].contains(&their),
        "{path:?}"
    );
    for (from, to, device) in [(&sender, &receiver, &own), (&receiver, &sender, &their)] {
        let text = from.endpoint.explain(&to.endpoint.address());
        assert!(text.contains("path: rdma, 1 of 1 rails up"), "{text}");
        assert!(text.contains(device.as_str()), "{text}");
    }
}

#[test]
fn both_are_taken_in_the_order_they_are_named() {
    for (transports, taken, other) in [(["rdma", "tcp"], "rdma", "tcp"), (["tcp", "rdma"], "tcp", "rdma")] {
        let sender = side("sender", named(&transports, 0));
        let receiver = side("receiver", named(&transports, 1));
        assert_eq!(push(&sender, &receiver, "k").unwrap().transport, taken);
        let text = sender.endpoint.explain(&receiver.endpoint.address());
        assert!(text.contains(&format!("path: {taken}")), "{text}");
        assert!(!text.contains(&format!("not {other}")), "{text}");
    }
}

#[test]
fn what_the_peer_does_not_have_is_said() {
    let sender = side("sender", named(&["rdma", "tcp"], 0));
    let receiver = side("receiver", named(&["tcp"], 1));
    assert_eq!(push(&sender, &receiver, "k").unwrap().transport, "tcp");
    let text = sender.endpoint.explain(&receiver.endpoint.address());
    assert!(text.contains("not rdma: the other side does not have it"), "{text}");
}

#[test]
fn rails_that_cannot_come_up_are_left_for_the_next_named_and_the_reason_is_said() {
    let site = site::site();
    let sender = side("sender", named(&["rdma", "tcp"], 0));
    let receiver = side("receiver", named(&["rdma", "tcp"], 1));
    let down = site.down(&site.device(1));
    let began = Instant::now();
    assert_eq!(push(&sender, &receiver, "k").unwrap().transport, "tcp");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    for (from, to) in [(&sender, &receiver), (&receiver, &sender)] {
        let text = from.endpoint.explain(&to.endpoint.address());
        assert!(text.contains("path: tcp") && text.contains("not rdma: "), "{text}");
        assert!(text.contains("rail"), "{text}");
        assert_eq!(metric(&from.endpoint, "kvxfer_control_transports_failed"), 1.0);
    }
    drop(down);
}

#[test]
fn rdma_alone_is_never_replaced() {
    let site = site::site();
    let sender = side("sender", named(&["rdma"], 0));
    let receiver = side("receiver", named(&["rdma"], 1));
    let down = site.down(&site.device(1));
    let before = snapshot(&receiver.pool);
    let granted = receiver.pool.grant(tokens(16, [3]), GrantOptions::default()).unwrap();
    let transfer = sender
        .endpoint
        .push(&sender.pool, tokens(16, [3]), granted.grant(), PushOptions::default())
        .unwrap();
    let error = transfer.done().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
    assert!(error.to_string().contains("rdma"), "{error}");
    let began = Instant::now();
    let error = sender.endpoint.connect(&receiver.endpoint.address(), LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
    assert!(began.elapsed() < LONG / 2, "it is known before the time is up");
    let text = sender.endpoint.explain(&receiver.endpoint.address());
    assert!(text.contains("path: none") && text.contains("not rdma: "), "{text}");
    drop((granted, transfer));
    assert_eq!(before, snapshot(&receiver.pool));
    // Once it is mended it is found again.
    drop(down);
    eventually("the rail comes up", || {
        push(&sender, &receiver, "again").is_ok_and(|path| path.transport == "rdma")
    });
}

#[test]
fn rdma_that_is_named_and_not_there_is_an_error() {
    let refused = |config: Config| Endpoint::builder().config(config).build().unwrap_err();
    for transports in [&["rdma"][..], &["rdma", "tcp"]] {
        let mut config = named(transports, 0);
        config.rdma.library = "/nonexistent/libibverbs.so.1".into();
        let error = refused(config);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("/nonexistent/libibverbs.so.1"), "{error}");
        let mut config = named(transports, 0);
        config.devices = vec!["nope7".into()];
        let error = refused(config);
        assert!(
            matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidArgument),
            "{error}"
        );
        assert!(error.to_string().contains("nope7"), "{error}");
    }
    if site::site().is_real() {
        return;
    }
    for (key, value, words) in [
        ("devices", "0", "device"),
        ("port_state", "down", "the port is down"),
        ("gids", "none", "GID"),
    ] {
        let fabric = FakeFabric::with(&[("*", key, value)]).unwrap();
        let mut config = named(&["rdma"], 0);
        config.rdma.library = fabric.library_path().to_str().unwrap().into();
        config.devices = Vec::new();
        let error = refused(config);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains(words), "{key}: {error}");
    }
}

#[test]
fn auto_takes_what_there_is_and_says_so() {
    let mut with = named(&["auto"], 0);
    with.devices = vec![site::site().device(0)];
    let with = side("sender", with);
    let receiver = side("receiver", named(&["auto"], 1));
    assert_eq!(push(&with, &receiver, "k").unwrap().transport, "rdma");
    let mut without = named(&["auto"], 0);
    without.rdma.library = "/nonexistent/libibverbs.so.1".into();
    let without = side("sender", without);
    assert_eq!(push(&without, &receiver, "l").unwrap().transport, "tcp");
    let text = without.endpoint.explain(&receiver.endpoint.address());
    assert!(text.contains("transports here: tcp"), "{text}");
    assert!(
        text.contains("not rdma: ") && text.contains("/nonexistent/libibverbs.so.1"),
        "{text}"
    );
    let text = receiver.endpoint.explain(&without.endpoint.address());
    assert!(text.contains("path: tcp"), "{text}");
}
