//! The endpoint itself: start and stop, settings, strangers at the door, events, limits, metrics.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvxfer_cases::common::*;
use kvxfer_core::wire::{self, AuthOffer, FRAME_HEADER_BYTES, Frame, Hello};

use kvxfer::{
    ClaimOptions, Destination, Endpoint, EndpointAddress, ErrorKind, EventKind, GrantOptions, Incarnation,
    OfferOptions, PushOptions, RankCoordinates, Role,
};

#[test]
fn the_published_address_is_the_real_one() {
    let endpoint = Endpoint::builder()
        .config(config())
        .name("a")
        .listen(loopback())
        .rank(RankCoordinates {
            tensor: (1, 4),
            pipeline: (0, 1),
        })
        .build()
        .unwrap();
    let address = endpoint.address();
    assert_ne!(address.sockets[0].port(), 0);
    assert_eq!(address.incarnation, Some(endpoint.incarnation()));
    assert_eq!(address.rank.tensor, (1, 4));
    assert_eq!(address.to_string().parse::<EndpointAddress>().unwrap(), address);
    assert_eq!(endpoint.name(), "a");
}

#[test]
fn it_works_over_ipv6() {
    let build = |name: &str| {
        Endpoint::builder()
            .config(config())
            .name(name)
            .listen("[::1]:0".parse().unwrap())
            .build()
    };
    let (a, b) = match (build("a"), build("b")) {
        (Ok(a), Ok(b)) => (a, b),
        (Err(error), _) | (_, Err(error)) => {
            // Said, so that a run without IPv6 does not pass for one with it.
            println!("skipped: no IPv6 loopback here: {error}");
            return;
        }
    };
    assert!(b.address().sockets[0].is_ipv6());
    a.connect(&b.address(), LONG).unwrap();
}

#[test]
fn both_families_at_once_and_wildcards_publish_interfaces() {
    let mut both = config();
    both.listen = vec!["127.0.0.1:0".parse().unwrap(), "[::1]:0".parse().unwrap()];
    match Endpoint::builder().config(both).build() {
        Ok(endpoint) => assert_eq!(endpoint.address().sockets.len(), 2),
        Err(error) => println!("skipped: no IPv6 loopback here: {error}"),
    }
    let mut wild = config();
    wild.listen = vec!["0.0.0.0:0".parse().unwrap()];
    let error = Endpoint::builder().config(wild.clone()).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unauthenticated);
    assert!(error.to_string().contains("insecure-allowed"), "{error}");
    wild.security.off_loopback = "insecure-allowed".into();
    wild.interfaces = vec!["lo".into()];
    let endpoint = Endpoint::builder().config(wild).build().unwrap();
    assert!(endpoint.address().sockets[0].ip().is_loopback());
    assert_ne!(endpoint.address().sockets[0].port(), 0);
}

#[test]
fn wrong_settings_are_refused() {
    let refused = |config| Endpoint::builder().config(config).build().unwrap_err();
    let mut rdma = config();
    rdma.transports = vec!["rdma".into(), "tcp".into()];
    // Whatever this machine has.
    rdma.rdma.library = "/nonexistent/libibverbs.so.1".into();
    let error = refused(rdma);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("/nonexistent/libibverbs.so.1"), "{error}");
    let mut twice = config();
    twice.transports = vec!["tcp".into(), "tcp".into()];
    assert_eq!(refused(twice).kind(), ErrorKind::InvalidArgument);
    let mut zero = config();
    zero.limits.slots_max = 0;
    assert!(refused(zero).to_string().contains("limits.slots_max = 0"));
    let mut auto = config();
    auto.transports = vec!["auto".into()];
    auto.rdma.library = "/nonexistent/libibverbs.so.1".into();
    let endpoint = Endpoint::builder().config(auto).build().unwrap();
    let text = endpoint.explain(&endpoint.address());
    assert!(
        text.contains("transports here: tcp") && text.contains("not rdma"),
        "{text}"
    );
}

#[test]
fn a_port_in_use_is_said() {
    let taken = TcpListener::bind(loopback()).unwrap();
    let address = taken.local_addr().unwrap();
    let error = Endpoint::builder()
        .config(config())
        .listen(address)
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    assert!(error.to_string().contains("port 0"), "{error}");
}

#[test]
fn an_address_that_nobody_answers_is_unreachable() {
    let decode = Side::new("decode");
    // A port that was free a moment ago, and a listener that never speaks.
    let dead = TcpListener::bind(loopback()).unwrap().local_addr().unwrap();
    let silent = TcpListener::bind(loopback()).unwrap();
    for (socket, salt) in [(dead, 1), (silent.local_addr().unwrap(), 2)] {
        let address = EndpointAddress {
            sockets: vec![socket],
            incarnation: Some(Incarnation::from_bits(salt)),
            rank: RankCoordinates::default(),
        };
        let claim = decode
            .endpoint
            .claim(
                "nobody",
                &decode.pool,
                std::slice::from_ref(&address),
                ClaimOptions::default(),
            )
            .unwrap();
        claim.fill(tokens(16, [1])).unwrap();
        let began = Instant::now();
        let error = claim.arrived().wait(LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(began.elapsed() < Duration::from_secs(10));
        let began = Instant::now();
        let error = decode.endpoint.connect(&address, LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn an_earlier_incarnation_is_stale_at_once() {
    let prefill = Side::new("prefill");
    let mut config = config();
    config.listen = vec![loopback()];
    let before = Side::with("decode", config.clone(), layout(), Role::Both);
    let old = before.endpoint.address();
    let old_grant = before
        .pool
        .grant(tokens(16, [1]), GrantOptions::default())
        .unwrap()
        .grant()
        .clone();
    prefill.endpoint.connect(&old, LONG).unwrap();
    drop(before);
    config.listen = vec![old.sockets[0]];
    let after = Side::with("decode", config, layout(), Role::Both);
    assert_ne!(after.endpoint.incarnation(), old.incarnation.unwrap());
    let claim = prefill
        .endpoint
        .claim("key", &prefill.pool, &[old], ClaimOptions::default())
        .unwrap();
    claim.fill(tokens(16, [1])).unwrap();
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StalePeer, "{error}");
    let pushed = prefill
        .endpoint
        .push(&prefill.pool, tokens(16, [1]), &old_grant, PushOptions::default())
        .and_then(|transfer| transfer.done().wait(LONG));
    let error = pushed.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StalePeer, "{error}");
    prefill.endpoint.connect(&after.endpoint.address(), LONG).unwrap();
}

#[test]
fn random_bytes_at_the_door_do_no_harm() {
    let (prefill, decode) = pair();
    let door = prefill.endpoint.address().sockets[0];
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..300u64 {
        let mut stranger = TcpStream::connect(door).unwrap();
        let mut bytes: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
        // Some look like ours at first.
        let magic: &[u8] = [&b""[..], b"KVXL", b"KVXS", b"KVXD"][(round % 4) as usize];
        bytes.splice(0..0, magic.iter().copied());
        let _ = stranger.write_all(&bytes);
        if round % 3 == 0 {
            let _ = stranger.shutdown(std::net::Shutdown::Write);
        }
    }
    // Somebody who says nothing is shown out, and does not keep others out.
    let mut silent = TcpStream::connect(door).unwrap();
    silent.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(silent.read(&mut [0u8; 16]).unwrap_or(0), 0);
    fill(&prefill.pool, &tokens(16, [1]), "after", 0);
    let offer = prefill
        .endpoint
        .offer("after", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(tokens(16, [1])).unwrap();
    offer.finish(16).unwrap();
    let claim = decode
        .endpoint
        .claim(
            "after",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(tokens(16, [2])).unwrap();
    claim.arrived().wait(LONG).unwrap();
    assert!(metric(&prefill.endpoint, "kvxfer_handshakes_refused_total") > 0.0);
}

fn hello(versions: (u16, u16)) -> Frame {
    Frame::Hello(Box::new(Hello {
        versions,
        incarnation: Incarnation::from_bits(7),
        name: "stranger".into(),
        expects: None,
        address: EndpointAddress {
            sockets: vec!["127.0.0.1:9".parse().unwrap()],
            incarnation: Some(Incarnation::from_bits(7)),
            rank: RankCoordinates::default(),
        },
        resume: None,
        token: 1,
        transports: Vec::new(),
        pools: Vec::new(),
        auth: AuthOffer::None,
        liveness_ms: 2_500,
    }))
}

/// The next frame that the other side sends, if it sends one.
fn next_frame(stream: &mut TcpStream) -> Option<Frame> {
    let mut header = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let mut body = vec![0; wire::body_length(&header).unwrap()];
    stream.read_exact(&mut body).ok()?;
    Some(wire::decode(&header, &body).unwrap())
}

#[test]
fn a_peer_of_another_version_is_told_both_ranges() {
    let side = Side::new("prefill");
    let mut stranger = TcpStream::connect(side.endpoint.address().sockets[0]).unwrap();
    stranger.set_read_timeout(Some(LONG)).unwrap();
    stranger
        .write_all(&wire::encode(&hello((4_000, 4_001))).unwrap())
        .unwrap();
    let refusal = std::iter::from_fn(|| next_frame(&mut stranger))
        .find_map(|frame| match frame {
            Frame::Refuse(error) => Some(error),
            _ => None,
        })
        .expect("a refusal");
    assert_eq!(refusal.kind(), ErrorKind::Unsupported, "{refusal}");
    assert!(refusal.to_string().contains("4000"), "{refusal}");
}

#[test]
fn damaged_frames_do_no_harm() {
    let (prefill, decode) = pair();
    let door = prefill.endpoint.address().sockets[0];
    let whole = wire::encode(&hello((1, 1))).unwrap();
    for n in 0..200 {
        let mut stranger = TcpStream::connect(door).unwrap();
        let mut bytes = whole.clone();
        match n % 3 {
            // Truncated, damaged, and one that promises more than it may.
            0 => bytes.truncate(n * bytes.len() / 200),
            1 => {
                let at = n * bytes.len() / 200;
                bytes[at] ^= 1 << (n % 8);
            }
            _ => bytes[8 + n % 16..][..4].fill(0xff),
        }
        let _ = stranger.write_all(&bytes);
    }
    prefill.endpoint.connect(&decode.endpoint.address(), LONG).unwrap();
    decode.endpoint.connect(&prefill.endpoint.address(), LONG).unwrap();
    eventually("strangers are shown out", || {
        metric(&prefill.endpoint, "kvxfer_control_connections") <= 2.0
    });
}

#[test]
fn events_are_told_once_with_the_callers_number() {
    let (prefill, decode) = pair();
    let events = decode.endpoint.events();
    assert!(!events.wait(Duration::from_millis(1)));
    let options = ClaimOptions {
        events: Some(4711),
        ..ClaimOptions::default()
    };
    let claim = decode
        .endpoint
        .claim("told", &decode.pool, &[prefill.endpoint.address()], options)
        .unwrap();
    claim.fill(tokens(16, [2])).unwrap();
    fill(&prefill.pool, &tokens(16, [1]), "told", 0);
    let offer = prefill
        .endpoint
        .offer("told", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(tokens(16, [1])).unwrap();
    offer.finish(16).unwrap();
    let mut told = Vec::new();
    while !told
        .iter()
        .any(|event: &kvxfer::Event| matches!(event.kind, EventKind::Ended { .. }))
    {
        assert!(events.wait(LONG));
        events.drain(&mut told, 1);
    }
    assert!(
        told.iter()
            .all(|event| event.data == 4711 && event.handle == claim.id())
    );
    assert_eq!(
        told.iter().map(|event| event.kind).collect::<Vec<_>>(),
        [EventKind::Matched, EventKind::Ended { error: None }]
    );
    assert_eq!(claim.arrived().poll().unwrap().unwrap().bytes, 16 * 8 * 8 * 2 * 2 * 4);

    // A grant ends on a data thread: its event comes all the same, and the descriptor polls.
    let options = GrantOptions {
        events: Some(12),
        ..GrantOptions::default()
    };
    let granted = decode.pool.grant(tokens(16, [3]), options).unwrap();
    let transfer = prefill
        .endpoint
        .push(&prefill.pool, tokens(16, [1]), granted.grant(), PushOptions::default())
        .unwrap();
    let fd = events.fd();
    let mut polled = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let patience = rustix::time::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&patience)).unwrap(), 1);
    told.clear();
    assert_eq!(events.drain(&mut told, 10), 1);
    assert_eq!(
        (told[0].data, told[0].handle, told[0].kind),
        (12, granted.id(), EventKind::Ended { error: None })
    );
    transfer.done().wait(LONG).unwrap();
    assert!(!events.wait(Duration::from_millis(50)), "an end was told twice");
}

#[test]
fn handles_are_limited_and_come_back() {
    let mut small = config();
    small.limits.handles_max = 3;
    let side = Side::with("small", small, layout(), Role::Both);
    let open = |key: &str| side.endpoint.offer(key, &side.pool, OfferOptions::default());
    let offers: Vec<_> = ["a", "b", "c"].iter().map(|key| open(key).unwrap()).collect();
    let error = open("d").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.retryable());
    drop(offers);
    eventually("room again", || open("e").is_ok());
}

#[test]
fn pools_come_and_go() {
    let (prefill, decode) = pair();
    prefill.endpoint.connect(&decode.endpoint.address(), LONG).unwrap();
    let granted = decode.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    assert_eq!(decode.pool.close().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(decode.pool.suspend().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(
        decode.pool.close_wait(Duration::from_millis(30)).unwrap_err().kind(),
        ErrorKind::Busy
    );
    granted.cancel();
    assert!(granted.arrived().wait(LONG).is_err());
    eventually("the pool can be suspended", || decode.pool.suspend().is_ok());
    let refused = decode.pool.grant(tokens(16, [1]), GrantOptions::default());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotRegistered);
    decode.pool.resume().unwrap();
    let granted = decode.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    fill(&prefill.pool, &tokens(16, [4]), "resumed", 0);
    let transfer = prefill
        .endpoint
        .push(&prefill.pool, tokens(16, [4]), granted.grant(), PushOptions::default())
        .unwrap();
    transfer.done().wait(LONG).unwrap();
    verify(&decode.pool, &tokens(16, [1]), "resumed", 0);
    decode.pool.close_wait(LONG).unwrap();
    let refused = decode.pool.grant(tokens(16, [1]), GrantOptions::default());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(decode.pool.resume().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_dropped_pool_stays_until_its_last_handle_ends() {
    let (prefill, decode) = pair();
    let destination = decode.endpoint.allocate(layout(), Role::Receive).unwrap();
    let regions = destination.regions().to_vec();
    let granted = destination.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    drop(destination);
    fill(&prefill.pool, &tokens(16, [4]), "orphan", 0);
    let transfer = prefill
        .endpoint
        .push(&prefill.pool, tokens(16, [4]), granted.grant(), PushOptions::default())
        .unwrap();
    transfer.done().wait(LONG).unwrap();
    granted.arrived().wait(LONG).unwrap();
    drop(granted);
    // The control plane lets go of the memory by itself, without another call on the pool.
    eventually("the memory is free", || {
        let _ = decode.endpoint.offer("nudge", &decode.pool, OfferOptions::default());
        regions.iter().all(|region| std::sync::Arc::strong_count(region) == 1)
    });
}

/// Pools are numbered per endpoint, and the first of each has the same number: taken for ours, it would name other memory.
#[test]
fn another_endpoints_pool_is_refused_by_every_call() {
    let (prefill, decode) = pair();
    let (here, foreign) = (&prefill.endpoint, &decode.pool);
    let kind = |result: kvxfer::Result<()>| result.unwrap_err().kind();
    let offer = here.offer("foreign", foreign, OfferOptions::default());
    assert_eq!(kind(offer.map(drop)), ErrorKind::NotRegistered);
    let sources = [decode.endpoint.address()];
    let claim = here.claim("foreign", foreign, &sources, ClaimOptions::default());
    assert_eq!(kind(claim.map(drop)), ErrorKind::NotRegistered);
    let write = foreign.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    let push = here.push(foreign, tokens(16, [2]), write.grant(), PushOptions::default());
    assert_eq!(kind(push.map(drop)), ErrorKind::NotRegistered);
    let read = foreign.serve(tokens(16, [1]), GrantOptions::default()).unwrap();
    let pull = here.pull(read.grant(), foreign, tokens(16, [2]), kvxfer::PullOptions::default());
    assert_eq!(kind(pull.map(drop)), ErrorKind::NotRegistered);
}

/// "As long as it takes" is a timeout like any other, in every call that takes one and can wait.
#[test]
fn the_longest_timeout_is_no_panic() {
    let side = Side::new("patient");
    let grant = side.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    grant.cancel();
    assert!(grant.arrived().wait(Duration::MAX).is_err());
    side.pool.close_wait(Duration::MAX).unwrap();
    side.endpoint.drain(Duration::MAX).unwrap();
    side.endpoint.close(Duration::MAX).unwrap();
}

#[test]
fn draining_refuses_new_work_and_waits_for_the_old() {
    let (prefill, decode) = pair();
    fill(&prefill.pool, &tokens(16, [1]), "last", 0);
    let offer = prefill
        .endpoint
        .offer("last", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(tokens(16, [1])).unwrap();
    offer.finish(16).unwrap();
    let error = prefill.endpoint.drain(Duration::from_millis(30)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    let refused = prefill.endpoint.offer("new", &prefill.pool, OfferOptions::default());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed);
    let claim = decode
        .endpoint
        .claim(
            "last",
            &decode.pool,
            &[prefill.endpoint.address()],
            ClaimOptions::default(),
        )
        .unwrap();
    claim.fill(tokens(16, [2])).unwrap();
    claim.arrived().wait(LONG).unwrap();
    prefill.endpoint.drain(LONG).unwrap();
    prefill.endpoint.close(LONG).unwrap();
}

#[test]
fn closing_with_work_in_flight_is_bounded_and_ends_everything() {
    let (prefill, decode) = pair();
    let sources = [prefill.endpoint.address()];
    // So that the other side has heard of everything that is closed.
    decode.endpoint.connect(&sources[0], LONG).unwrap();
    let mut claims = Vec::new();
    let mut offers = Vec::new();
    for n in 0..BLOCKS {
        let key = format!("open-{n}");
        let claim = decode
            .endpoint
            .claim(&key, &decode.pool, &sources, ClaimOptions::default())
            .unwrap();
        claim.fill(tokens(16, [n])).unwrap();
        claims.push(claim);
        let offer = prefill
            .endpoint
            .offer(&key, &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(tokens(16, [n])).unwrap();
        if n % 2 == 0 {
            offer.ready(0..16, 0..2).unwrap();
        }
        if n % 4 == 0 {
            offer.finish(16).unwrap();
        }
        offers.push(offer);
    }
    let began = Instant::now();
    decode.endpoint.close(Duration::from_secs(5)).unwrap();
    assert!(began.elapsed() < Duration::from_secs(10));
    for claim in &claims {
        // Ended, each of them, without anybody waiting.
        match claim.arrived().poll().unwrap() {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                assert_ne!(error.destination(), Destination::Quarantined);
            }
        }
    }
    let refused = decode.endpoint.offer("late", &decode.pool, OfferOptions::default());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed);
    decode.endpoint.close(Duration::ZERO).unwrap();
    // The other side hears of it.
    for offer in &offers {
        let _ = offer.released().wait(LONG);
        assert!(offer.released().is_done());
    }
}

#[test]
fn whoever_closes_too_waits_for_the_end() {
    for _ in 0..20 {
        let (prefill, decode) = pair();
        let sources = [prefill.endpoint.address()];
        let claims: Vec<_> = (0..BLOCKS)
            .map(|n| {
                let key = format!("open-{n}");
                let claim = decode
                    .endpoint
                    .claim(&key, &decode.pool, &sources, ClaimOptions::default())
                    .unwrap();
                claim.fill(tokens(16, [n])).unwrap();
                claim
            })
            .collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    decode.endpoint.close(LONG).unwrap();
                    // `Ok` means that every block is free, whichever thread hears it.
                    assert!(claims.iter().all(|claim| claim.arrived().is_done()));
                });
            }
        });
    }
}

#[test]
fn metrics_count_what_happened() {
    let (prefill, decode) = pair();
    fill(&prefill.pool, &tokens(16, [1]), "counted", 0);
    let granted = decode.pool.grant(tokens(16, [1]), GrantOptions::default()).unwrap();
    let transfer = prefill
        .endpoint
        .push(&prefill.pool, tokens(16, [1]), granted.grant(), PushOptions::default())
        .unwrap();
    transfer.done().wait(LONG).unwrap();
    let bytes = granted.arrived().wait(LONG).unwrap().bytes;
    let text = prefill.endpoint.metrics();
    assert!(text.contains("kvxfer_handles_opened_total{kind=\"push\"} 1"), "{text}");
    assert!(
        text.contains("kvxfer_handles_ended_total{kind=\"push\",outcome=\"ok\"} 1"),
        "{text}"
    );
    assert!(
        text.contains(&format!("kvxfer_handle_bytes_total{{kind=\"push\"}} {bytes}")),
        "{text}"
    );
    assert!(
        text.contains("kvxfer_handle_duration_seconds_count{kind=\"push\"} 1"),
        "{text}"
    );
    // Every line is a comment, or a name with a value.
    for line in text.lines() {
        assert!(
            line.starts_with("# ") || line.rsplit_once(' ').unwrap().1.parse::<f64>().is_ok(),
            "{line}"
        );
    }
    // Every name that is exported is defined on its page.
    let page = include_str!("../../docs/metrics.md");
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(
            page.contains(&format!("`{name}`")),
            "docs/metrics.md does not define {name}"
        );
    }
}

#[test]
fn many_connects_are_one() {
    let (a, b) = pair();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| a.endpoint.connect(&b.endpoint.address(), LONG).unwrap());
            scope.spawn(|| b.endpoint.connect(&a.endpoint.address(), LONG).unwrap());
        }
    });
    assert_eq!(a.endpoint.peers().len(), 1);
    assert_eq!(a.endpoint.peers()[0].incarnation, b.endpoint.incarnation());
    assert_eq!(a.endpoint.peers()[0].name, "decode");
    // A bare address is for tools.
    let c = Side::new("tool");
    let bare = EndpointAddress::bare(b.endpoint.address().sockets[0]);
    c.endpoint.connect(&bare, LONG).unwrap();
    assert_eq!(c.endpoint.peers()[0].incarnation, b.endpoint.incarnation());
}

#[test]
fn it_runs_on_the_applications_runtime() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let a = Endpoint::builder()
        .config(config())
        .runtime(runtime.handle().clone())
        .build()
        .unwrap();
    let b = endpoint("b");
    a.connect(&b.address(), LONG).unwrap();
    b.connect(&a.address(), LONG).unwrap();
    a.close(LONG).unwrap();
}
