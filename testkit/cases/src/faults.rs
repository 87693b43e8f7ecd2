//! Death, stops and restarts of real processes. The child is this test binary, started again.

use std::collections::HashMap;
use std::io::BufRead;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::{place, sibling};
use kvxfer::{
    Claim, ClaimOptions, Destination, EndpointAddress, ErrorKind, Grant, GrantHandle, GrantOptions, Offer,
    OfferOptions, PoolLayout, PushOptions, Role, Selection, Transfer,
};
use kvxfer_testkit::process::{ChildProcess, role};

suite!($ faults:
    #[ignore = "the child of the other tests"] child_main,
    a_killed_receiver_is_reported_in_time,
    a_killed_sender_is_reported_in_time_and_leaves_the_blocks_to_us,
    a_stopped_receiver_never_lets_the_sender_succeed,
    a_stopped_sender_cannot_write_into_reclaimed_blocks,
    a_killed_owner_of_what_is_read_is_reported_in_time_and_leaves_the_blocks_to_us,
    what_is_read_does_not_arrive_while_its_owner_stands_still,
    a_restarted_peer_is_stale_under_its_old_address,
    a_session_survives_a_short_stop,
);

/// A block of the pools here: big, so that a transfer takes long enough to be interrupted.
const BLOCK_BYTES: u32 = 1 << 20;
/// How many: fewer on wires that are slow on purpose.
fn big_blocks() -> u32 {
    if place().over == "rdma" { 96 } else { 192 }
}

/// A dead peer is reported within this time.
const REPORTED: Duration = Duration::from_secs(3);

fn big() -> PoolLayout {
    PoolLayout::opaque(BLOCK_BYTES, big_blocks()).unwrap()
}

fn all() -> Selection {
    Selection::single(0, big_blocks(), (0..big_blocks()).collect())
}

fn first() -> Selection {
    Selection::single(0, 1, vec![0])
}

fn big_side(name: &str) -> Side {
    Side::with(name, config_on(0), big(), Role::Both)
}

/// Bytes are under way for a while, where that must be arranged.
fn slow() -> Option<site::Delay> {
    (place().over == "rdma").then(|| site::site_with(site::SLOW).delay(10))
}

/// A cheap fill: one byte per block, everywhere.
fn mark(side: &Side, mark: u8) {
    let block = vec![mark; BLOCK_BYTES as usize];
    for n in 0..big_blocks() {
        put(&side.pool, 0, n, 0, &block).unwrap();
    }
}

/// How many blocks hold anything but this mark.
fn unlike(side: &Side, mark: u8) -> usize {
    let mut block = vec![0; BLOCK_BYTES as usize];
    let mut count = 0;
    for n in 0..big_blocks() {
        get(&side.pool, 0, n, 0, &mut block).unwrap();
        count += usize::from(block.iter().any(|&byte| byte != mark));
    }
    count
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|n| u8::from_str_radix(&text[2 * n..2 * n + 2], 16).unwrap())
        .collect()
}

// ------------------------------------------------------------------------------------------------ the child

enum Held {
    Offer(Offer),
    Claim(Claim),
    Grant(GrantHandle),
    Push(Transfer),
}

impl Held {
    fn outcome(&self) -> String {
        let show = |result: Option<kvxfer::Result<u64>>| match result {
            None => "open".to_owned(),
            Some(Ok(bytes)) => format!("ok {bytes}"),
            Some(Err(error)) => format!("{}", error.kind()),
        };
        match self {
            Held::Offer(offer) => show(offer.released().wait_timeout(LONG).map(|r| r.map(|_| 0))),
            Held::Claim(claim) => show(claim.arrived().wait_timeout(LONG).map(|r| r.map(|a| a.bytes))),
            Held::Grant(grant) => show(grant.arrived().wait_timeout(LONG).map(|r| r.map(|a| a.bytes))),
            Held::Push(push) => show(push.done().wait_timeout(LONG).map(|r| r.map(|d| d.bytes))),
        }
    }
}

#[allow(clippy::print_stdout)]
fn child_main() {
    if role().is_none() {
        return;
    }
    let mut config = config_on(1);
    if let Ok(port) = std::env::var("KVXTEST_LISTEN") {
        config.listen = vec![port.parse().unwrap()];
    } else {
        config.listen = vec![loopback()];
    }
    let side = Side::with("child", config, big(), Role::Both);
    println!("address {}", side.endpoint.address());
    let mut held: HashMap<String, Held> = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["mark", byte] => {
                mark(&side, byte.parse().unwrap());
                println!("marked");
            }
            ["grant", name] => {
                let grant = side.pool.grant(all(), GrantOptions::default()).unwrap();
                println!("grant {}", hex(&grant.grant().to_bytes().unwrap()));
                held.insert(name.into(), Held::Grant(grant));
            }
            ["push", name, grant] => {
                let grant = Grant::from_bytes(&unhex(grant)).unwrap();
                let push = side.endpoint.push(&side.pool, all(), &grant, PushOptions::default());
                held.insert(name.into(), Held::Push(push.unwrap()));
                println!("pushing");
            }
            ["offer", key] => {
                let offer = side.endpoint.offer(key, &side.pool, OfferOptions::default()).unwrap();
                offer.append(all()).unwrap();
                offer.finish(big_blocks()).unwrap();
                held.insert(key.into(), Held::Offer(offer));
                println!("offered");
            }
            ["claim", key, address] => {
                let address: EndpointAddress = address.parse().unwrap();
                let claim = side
                    .endpoint
                    .claim(key, &side.pool, &[address], ClaimOptions::default())
                    .unwrap();
                claim.fill(all()).unwrap();
                held.insert(key.into(), Held::Claim(claim));
                println!("claimed");
            }
            ["wait", name] => println!("ended {name} {}", held[name].outcome()),
            ["unlike", byte] => println!("unlike {}", unlike(&side, byte.parse().unwrap())),
            _ => println!("what? {line}"),
        }
    }
}

struct Peer {
    process: ChildProcess,
    address: EndpointAddress,
}

impl Peer {
    fn start(variables: &[(&str, &str)]) -> Peer {
        let site = [site::site().variables(), gpus::variables()].concat();
        let site = site.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let variables: Vec<_> = variables.iter().copied().chain(site).collect();
        let mut process = ChildProcess::test(&sibling("child_main"), "peer", &variables).unwrap();
        let line = process.expect_line("address ", LONG).unwrap();
        let address = line.strip_prefix("address ").unwrap().parse().unwrap();
        Peer { process, address }
    }

    fn ask(&mut self, say: &str, answer: &str) -> String {
        self.process.say(say).unwrap();
        let line = self.process.expect_line(answer, LONG).unwrap();
        line.strip_prefix(answer).unwrap().trim().to_owned()
    }
}

/// Waits until some bytes of a transfer into `side` are there, and not all.
fn begun(side: &Side, mark: u8) {
    eventually("the first bytes arrive", || {
        let mut byte = [0];
        (0..big_blocks()).any(|n| {
            get(&side.pool, 0, n, 0, &mut byte).unwrap();
            byte[0] == mark
        })
    });
}

// ------------------------------------------------------------------------------------------------ the tests

fn a_killed_receiver_is_reported_in_time() {
    let _slow = slow();
    let side = big_side("sender");
    let mut peer = Peer::start(&[]);
    side.endpoint.connect(&peer.address, LONG).unwrap();
    let grant = Grant::from_bytes(&unhex(&peer.ask("grant g", "grant "))).unwrap();
    let push = side
        .endpoint
        .push(&side.pool, all(), &grant, PushOptions::default())
        .unwrap();
    // And a claim that waits for an offer which the peer will never make.
    let claim = side
        .endpoint
        .claim("never", &side.pool, &[peer.address.clone()], ClaimOptions::default())
        .unwrap();
    claim.fill(first()).unwrap();
    peer.process.kill();
    let killed = Instant::now();
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert_ne!(error.destination(), Destination::Quarantined);
    // The push may have been done by then; if not, it fails, and says what is known.
    if let Err(error) = push.done().wait(LONG) {
        assert!(
            matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Unknown),
            "{error}"
        );
    }
    assert!(killed.elapsed() < REPORTED, "{:?}", killed.elapsed());
}

fn a_killed_sender_is_reported_in_time_and_leaves_the_blocks_to_us() {
    let _slow = slow();
    let side = big_side("receiver");
    mark(&side, 1);
    let mut peer = Peer::start(&[]);
    peer.ask("mark 7", "marked");
    peer.ask("offer k", "offered");
    let claim = side
        .endpoint
        .claim("k", &side.pool, &[peer.address.clone()], ClaimOptions::default())
        .unwrap();
    claim.fill(all()).unwrap();
    begun(&side, 7);
    peer.process.kill();
    let killed = Instant::now();
    match claim.arrived().wait(LONG) {
        Ok(arrival) => {
            // All of it was in the socket already: then it must be all there.
            assert_eq!(arrival.bytes, u64::from(BLOCK_BYTES) * u64::from(big_blocks()));
            assert_eq!(unlike(&side, 7), 0);
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert!(killed.elapsed() < REPORTED, "{:?}", killed.elapsed());
            mark(&side, 9);
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(unlike(&side, 9), 0, "a byte landed after the end");
        }
    }
}

fn a_stopped_receiver_never_lets_the_sender_succeed() {
    let _slow = slow();
    let side = big_side("sender");
    mark(&side, 7);
    let mut peer = Peer::start(&[]);
    side.endpoint.connect(&peer.address, LONG).unwrap();
    for attempt in 0..20 {
        peer.ask("mark 1", "marked");
        let name = format!("g{attempt}");
        let grant = Grant::from_bytes(&unhex(&peer.ask(&format!("grant {name}"), "grant "))).unwrap();
        let push = side
            .endpoint
            .push(&side.pool, all(), &grant, PushOptions::default())
            .unwrap();
        std::thread::sleep(Duration::from_millis(2 + attempt));
        peer.process.stop().unwrap();
        if push.done().is_done() {
            // It was faster than we are: not what is tested here. Again.
            peer.process.resume().unwrap();
            continue;
        }
        let until = Instant::now() + Duration::from_millis(1500);
        while Instant::now() < until {
            assert!(
                !matches!(push.done().poll(), Some(Ok(_))),
                "success was reported while the receiver stood still"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        peer.process.resume().unwrap();
        push.done().wait(LONG).unwrap();
        assert!(
            peer.ask(&format!("wait {name}"), &format!("ended {name}"))
                .starts_with("ok")
        );
        assert_eq!(peer.ask("unlike 7", "unlike "), "0");
        return;
    }
    panic!("no transfer of 20 was slow enough to be stopped in the middle");
}

fn a_stopped_sender_cannot_write_into_reclaimed_blocks() {
    let _slow = slow();
    let side = big_side("receiver");
    let mut peer = Peer::start(&[]);
    peer.ask("mark 7", "marked");
    side.endpoint.connect(&peer.address, LONG).unwrap();
    for attempt in 0..20 {
        mark(&side, 1);
        let granted = side.pool.grant(all(), GrantOptions::default()).unwrap();
        let name = format!("p{attempt}");
        let grant = hex(&granted.grant().to_bytes().unwrap());
        peer.ask(&format!("push {name} {grant}"), "pushing");
        begun(&side, 7);
        peer.process.stop().unwrap();
        granted.cancel();
        if granted.arrived().wait(LONG).is_ok() {
            // Everything had arrived before the stop. Again.
            peer.process.resume().unwrap();
            assert!(
                peer.ask(&format!("wait {name}"), &format!("ended {name}"))
                    .starts_with("ok")
            );
            continue;
        }
        // The end was reported: the blocks are ours again, at once.
        mark(&side, 9);
        peer.process.resume().unwrap();
        let ended = peer.ask(&format!("wait {name}"), &format!("ended {name}"));
        assert!(!ended.starts_with("ok") && ended != "open", "{ended}");
        assert_eq!(unlike(&side, 9), 0, "a byte landed after the end was reported");
        return;
    }
    panic!("no transfer of 20 was slow enough to be stopped in the middle");
}

/// A claim of everything that is read from the peer, once some of it is there.
fn pull_begun(side: &Side, peer: &mut Peer) -> Claim {
    mark(side, 1);
    peer.ask("mark 7", "marked");
    peer.ask("offer k", "offered");
    let options = ClaimOptions {
        pull: true,
        ..ClaimOptions::default()
    };
    let claim = side
        .endpoint
        .claim("k", &side.pool, std::slice::from_ref(&peer.address), options)
        .unwrap();
    claim.fill(all()).unwrap();
    begun(side, 7);
    claim
}

fn a_killed_owner_of_what_is_read_is_reported_in_time_and_leaves_the_blocks_to_us() {
    let _slow = slow();
    let side = big_side("reader");
    let mut peer = Peer::start(&[]);
    let claim = pull_begun(&side, &mut peer);
    peer.process.kill();
    let killed = Instant::now();
    match claim.arrived().wait(LONG) {
        Ok(_) => assert_eq!(unlike(&side, 7), 0),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert!(killed.elapsed() < REPORTED, "{:?}", killed.elapsed());
            assert_ne!(error.destination(), Destination::Quarantined, "{error}");
            mark(&side, 9);
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(unlike(&side, 9), 0, "a byte landed after the end");
        }
    }
}

fn what_is_read_does_not_arrive_while_its_owner_stands_still() {
    let _slow = slow();
    let side = big_side("reader");
    let mut peer = Peer::start(&[]);
    let claim = pull_begun(&side, &mut peer);
    peer.process.stop().unwrap();
    let stopped = Instant::now();
    // It may have arrived before.
    std::thread::sleep(Duration::from_millis(20));
    if claim.arrived().is_done() {
        panic!("it was too fast for this test: {:?}", claim.arrived().poll());
    }
    // The owner's device may go on and serve all of it: whether that counts is the owner's to say.
    match claim.arrived().wait(LONG) {
        Ok(_) => panic!(
            "it arrived after {:?}, and nobody can have said that it counts",
            stopped.elapsed()
        ),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert!(stopped.elapsed() < REPORTED, "{:?}", stopped.elapsed());
        }
    }
    mark(&side, 9);
    peer.process.resume().unwrap();
    let ended = peer.ask("wait k", "ended k");
    assert!(!ended.starts_with("ok") && ended != "open", "{ended}");
    assert_eq!(unlike(&side, 9), 0, "a byte landed after the end was reported");
}

fn a_restarted_peer_is_stale_under_its_old_address() {
    let _slow = slow();
    let side = big_side("decode");
    let mut peer = Peer::start(&[]);
    side.endpoint.connect(&peer.address, LONG).unwrap();
    let old = peer.address.clone();
    let old_grant = Grant::from_bytes(&unhex(&peer.ask("grant g", "grant "))).unwrap();
    peer.process.kill();
    let mut again = Peer::start(&[("KVXTEST_LISTEN", &old.sockets[0].to_string())]);
    assert_eq!(again.address.sockets, old.sockets);
    let began = Instant::now();
    let claim = side
        .endpoint
        .claim("k", &side.pool, &[old], ClaimOptions::default())
        .unwrap();
    claim.fill(first()).unwrap();
    let error = claim.arrived().wait(LONG).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::StalePeer | ErrorKind::PeerLost),
        "{error}"
    );
    assert!(began.elapsed() < REPORTED, "{:?}", began.elapsed());
    let pushed = side
        .endpoint
        .push(&side.pool, all(), &old_grant, PushOptions::default())
        .and_then(|push| push.done().wait(LONG));
    assert_eq!(pushed.unwrap_err().kind(), ErrorKind::StalePeer);
    again.ask("mark 3", "marked");
    again.ask("offer k", "offered");
    let claim = side
        .endpoint
        .claim("k", &side.pool, &[again.address.clone()], ClaimOptions::default())
        .unwrap();
    claim.fill(all()).unwrap();
    claim.arrived().wait(LONG).unwrap();
    assert_eq!(unlike(&side, 3), 0);
    assert!(again.ask("wait k", "ended k").starts_with("ok"));
}

fn a_session_survives_a_short_stop() {
    let _slow = slow();
    let side = big_side("decode");
    let mut peer = Peer::start(&[]);
    peer.ask("mark 5", "marked");
    let claim = side
        .endpoint
        .claim("later", &side.pool, &[peer.address.clone()], ClaimOptions::default())
        .unwrap();
    claim.fill(all()).unwrap();
    side.endpoint.connect(&peer.address, LONG).unwrap();
    peer.process.stop().unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    peer.process.resume().unwrap();
    assert!(claim.arrived().poll().is_none());
    peer.ask("offer later", "offered");
    claim.arrived().wait(LONG).unwrap();
    assert_eq!(unlike(&side, 5), 0);
}
