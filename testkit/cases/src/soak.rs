//! Many hand-overs with random faults: every arrival is right, every handle ends, and nothing is left.

use std::collections::VecDeque;
use std::time::Duration;

use crate::common::*;
use crate::place;
use kvxfer::{Claim, ClaimOptions, ErrorKind, Offer, OfferOptions, Selection};
use kvxfer_testkit::pattern::Content;

suite!($ soak:
    ten_thousand_hand_overs_with_faults_leave_nothing,
    blocks_are_reused_at_once_after_an_abort_thousands_of_times,
);

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// How many rounds: real devices here are software of a machine with one processor.
fn rounds(many: u32, real: u32) -> u32 {
    if place().over == "rdma" {
        site::site().count(many, real)
    } else {
        many
    }
}

/// A hand-over under way.
struct Request {
    key: String,
    attempt: u32,
    offer: Offer,
    claim: Claim,
    decode: usize,
    source: u32,
    destination: u32,
    chosen: Selection,
}

fn ten_thousand_hand_overs_with_faults_leave_nothing() {
    let hand_overs = rounds(10_000, 1_500);
    const OPEN: usize = 16;
    let seed = std::env::var("KVXTEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(20_26);
    println!("KVXTEST_SEED={seed}");
    let mut random = Random(seed | 1);
    let prefill: Vec<Side> = (0..2).map(|n| Side::new(&format!("prefill-{n}"))).collect();
    let decode: Vec<Side> = (0..2).map(|n| Side::new(&format!("decode-{n}"))).collect();
    let mut open: VecDeque<Request> = VecDeque::new();
    let (mut arrived, mut failed) = (0u32, 0u32);
    let mut resident = 0;
    // Blocks two by two; each side's are used in turn, one request each.
    let pairs = BLOCKS / 2;
    for n in 0..hand_overs {
        if n == hand_overs / 3 {
            resident = resident_bytes();
        }
        let (from, to) = ((n % 2) as usize, (n / 2 % 2) as usize);
        let (source, destination) = (n % pairs * 2, (n * 7 + 3) % pairs * 2);
        let length = 17 + random.below(16) as u32;
        let key = format!("soak-{n}");
        let selection = tokens(length, [source, source + 1]);
        let chosen = tokens(length, [destination, destination + 1]);
        fill(&prefill[from].pool, &selection, &key, 0);
        poison(&decode[to].pool, &chosen);
        let fault = random.below(12);
        let soon = Duration::from_micros(random.below(3000));
        let offer = prefill[from]
            .endpoint
            .offer(
                &key,
                &prefill[from].pool,
                OfferOptions {
                    deadline: (fault == 1).then_some(soon),
                    checksum: random.below(4) == 0,
                    ..OfferOptions::default()
                },
            )
            .unwrap();
        let claim = decode[to]
            .endpoint
            .claim(
                &key,
                &decode[to].pool,
                &[prefill[from].endpoint.address()],
                ClaimOptions {
                    deadline: (fault == 2).then_some(soon),
                    pull: random.below(4) == 0,
                    ..ClaimOptions::default()
                },
            )
            .unwrap();
        // What follows may find that a deadline was faster.
        let _ = offer.append(&selection);
        let mut attempt = 0;
        match fault {
            3 => claim.decline(),
            4 => offer.cancel(),
            _ => {
                let _ = claim.fill(chosen.clone());
            }
        }
        let _ = offer.ready(0..16, 0..2);
        match fault {
            5 => claim.cancel(),
            6 => {
                let _ = offer.retract(&[source]);
                fill(&prefill[from].pool, &selection, "reused", 0);
            }
            7 if offer.restart().is_ok() => {
                attempt = 1;
                eventually("the first attempt is void", || offer.voided());
                fill(&prefill[from].pool, &selection, &key, 1);
                let _ = offer.append(&selection);
            }
            _ => {}
        }
        let _ = offer.finish(if fault == 8 { 16 } else { length });
        open.push_back(Request {
            key,
            attempt,
            offer,
            claim,
            decode: to,
            source,
            destination,
            chosen,
        });
        // A block is used again only after its last user has ended.
        while let Some(oldest) = open.front() {
            let clash = open
                .iter()
                .any(|other| other.source == (n + 1) % pairs * 2 || other.destination == ((n + 1) * 7 + 3) % pairs * 2);
            if open.len() < OPEN && !clash {
                break;
            }
            let end = oldest.claim.arrived().wait(LONG);
            match end {
                Ok(_) => {
                    arrived += 1;
                    let pool = &decode[oldest.decode].pool;
                    let content = Content::new(oldest.key.as_bytes(), oldest.attempt);
                    kvxfer_testkit::pattern::verify(
                        pool.layout(),
                        pool.regions(),
                        &oldest.chosen,
                        0..u32::MAX,
                        0..u16::MAX,
                        content,
                    )
                    .unwrap();
                }
                Err(error) => {
                    failed += 1;
                    assert!(
                        !matches!(
                            error.kind(),
                            ErrorKind::Internal
                                | ErrorKind::Protocol
                                | ErrorKind::PeerLost
                                | ErrorKind::Corrupt
                                | ErrorKind::Transport
                                | ErrorKind::Unknown
                        ),
                        "{}: {error}",
                        oldest.key
                    );
                }
            }
            let end = oldest.offer.released().wait(LONG);
            assert!(oldest.offer.released().is_done(), "{} is open: {end:?}", oldest.key);
            open.pop_front();
        }
    }
    drop(open);
    println!("{arrived} arrived, {failed} failed");
    assert!(arrived > hand_overs / 3 && failed > hand_overs / 10);
    for side in prefill.iter().chain(&decode) {
        eventually("everything is given back", || {
            [
                "offers",
                "claims",
                "grants",
                "transfers",
                "members",
                "waiting_claims",
                "link_transfers",
                "link_transfers_queued",
                "slots_in_use",
                "slots_retained",
                "slots_quarantined",
                "sources_quarantined",
                "messages_unacknowledged",
            ]
            .iter()
            .all(|name| metric(&side.endpoint, &format!("kvxfer_control_{name}")) == 0.0)
        });
        let pool = side.pool.clone();
        pool.close_wait(LONG).unwrap();
    }
    let grown = resident_bytes().saturating_sub(resident);
    assert!(grown < 24 << 20, "{grown} bytes more than after a third");
}

fn blocks_are_reused_at_once_after_an_abort_thousands_of_times() {
    let (prefill, decode) = pair();
    let sources = [prefill.endpoint.address()];
    let mut random = Random(7);
    let source = tokens(64, [1, 2, 3, 4]);
    let mine = tokens(64, [8, 9, 10, 11]);
    fill(&prefill.pool, &source, "the old request", 0);
    let mut aborted = 0;
    let rounds = rounds(2_000, 400);
    for n in 0..rounds {
        let key = format!("abort-{n}");
        let offer = prefill
            .endpoint
            .offer(&key, &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(&source).unwrap();
        let claim = decode
            .endpoint
            .claim(&key, &decode.pool, &sources, ClaimOptions::default())
            .unwrap();
        claim.fill(mine.clone()).unwrap();
        offer.finish(64).unwrap();
        for _ in 0..random.below(400) {
            std::hint::spin_loop();
        }
        if random.below(2) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(300)));
        }
        claim.cancel();
        if claim.arrived().wait(LONG).is_err() {
            aborted += 1;
        }
        // Ended: the blocks are another request's from this instant.
        fill(&decode.pool, &mine, "the new request", n);
        let _ = offer.released().wait(LONG);
        assert!(offer.released().is_done());
        check(&decode.pool, &mine, "the new request", n).unwrap();
    }
    assert!(aborted > rounds / 20, "only {aborted} of {rounds} were aborted in time");
}
