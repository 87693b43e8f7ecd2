//! Blocks that are reused as soon as an end was reported, under load, with bytes under way at the moment of the abort.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::*;
use crate::place;
use kvxfer::{
    ClaimOptions, ErrorKind, GrantOptions, OfferOptions, Pool, PoolLayout, PullOptions, PushOptions, Role, Selection,
};

suite!($ reuse:
    claims_are_aborted_and_their_blocks_reused,
    pulls_are_aborted_and_their_blocks_reused,
    grants_are_cancelled_and_their_blocks_reused,
    a_restart_while_bytes_are_under_way_never_mixes_attempts,
    deadlines_that_pass_while_bytes_are_under_way_leave_the_blocks_to_us,
    blocks_retracted_while_they_are_read_never_arrive,
    a_read_grant_that_is_taken_back_never_counts,
);

const BLOCK_BYTES: u32 = 64 << 10;
/// Blocks of a request.
const REQUEST: u32 = 16;
/// Requests that a pool holds: each is looked at again before its blocks have their next turn.
const TURNS: u32 = 4;
const OLD: u8 = 0x55;

fn side(name: &str) -> Side {
    let layout = PoolLayout::opaque(BLOCK_BYTES, REQUEST * TURNS).unwrap();
    Side::with(name, config(), layout, Role::Both)
}

/// The blocks of a turn.
fn blocks(turn: u32) -> Selection {
    let first = turn % TURNS * REQUEST;
    Selection::single(0, REQUEST, (first..first + REQUEST).collect())
}

fn mark(pool: &Pool, blocks: &Selection, mark: u8) {
    let bytes = vec![mark; BLOCK_BYTES as usize];
    for &block in &blocks.groups[0].blocks {
        put(pool, 0, block, 0, &bytes).unwrap();
    }
}

fn assert_marked(pool: &Pool, blocks: &Selection, mark: u8, when: &str) {
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    for &block in &blocks.groups[0].blocks {
        get(pool, 0, block, 0, &mut bytes).unwrap();
        let wrong = bytes.iter().position(|&byte| byte != mark);
        assert_eq!(
            wrong,
            None,
            "{when}: block {block} holds {:#x}",
            bytes[wrong.unwrap_or(0)]
        );
    }
}

/// Marks of new requests never look like the old one's bytes.
fn new_mark(n: u32) -> u8 {
    0x80 | (n % 120) as u8
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// How an old request moves its bytes.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Claim,
    ClaimPull,
    Grant,
}

fn aborted_and_reused(way: Way) {
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(2);
    let rounds = if place().pools == "host" {
        site.count(1200, 150)
    } else {
        150
    };
    let (prefill, decode) = (side("prefill"), side("decode"));
    let load = [&prefill, &decode].map(|side| {
        let layout = PoolLayout::opaque(BLOCK_BYTES, 4).unwrap();
        side.used.pool(&side.endpoint, layout, Role::Both)
    });
    for turn in 0..TURNS {
        mark(&prefill.pool, &blocks(turn), OLD);
        mark(&decode.pool, &blocks(turn), new_mark(turn + 120 - TURNS));
    }
    prefill.endpoint.connect(&decode.endpoint.address(), LONG).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Against the stream, so that what is under way of the old requests can be told from it; its own messages and
        // completions go over the same queue pairs.
        let loader = scope.spawn(|| {
            let some = Selection::single(0, 4, vec![0, 1, 2, 3]);
            let mut done = 0;
            while !over.load(Ordering::SeqCst) {
                let granted = load[0].grant(some.clone(), GrantOptions::default()).unwrap();
                let pushed = decode
                    .endpoint
                    .push(&load[1], some.clone(), granted.grant(), PushOptions::default())
                    .unwrap();
                pushed.done().wait(LONG).unwrap();
                done += 1;
            }
            done
        });
        // Also when what follows panics: the scope waits for its threads.
        let stop = Stop(&over);
        let (aborted, outstanding) = abort_all(way, rounds, &prefill, &decode);
        drop(stop);
        let loads: u32 = loader.join().unwrap();
        println!("{rounds} rounds: {aborted} aborted, {outstanding} with bytes under way, {loads} pushes against them");
        assert!(
            outstanding > rounds / 10,
            "only {outstanding} of {rounds} had bytes under way"
        );
        assert!(loads > 10);
    });
    if let Some(fabric) = &site.fabric {
        assert_eq!(fabric.counter("*", "misuse"), 0);
        assert_eq!(fabric.counter("*", "completions_lost"), 0);
    }
    for side in [&prefill, &decode] {
        assert_eq!(metric(&side.endpoint, "kvxfer_control_slots_quarantined"), 0.0);
        eventually("nothing is left", || {
            metric(&side.endpoint, "kvxfer_control_slots_in_use") == 0.0
                && metric_sum(&side.endpoint, "kvxfer_rdma_admitted_slots", "") == 0.0
        });
    }
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Returns how many were aborted, and how many of these while bytes of them were under way.
fn abort_all(way: Way, rounds: u32, prefill: &Side, decode: &Side) -> (u32, u32) {
    let sources = [prefill.endpoint.address()];
    let mut random = Random(0x9e37_79b9 + way as u64);
    let (mut aborted, mut outstanding) = (0, 0);
    let (mover, direction) = match way {
        Way::ClaimPull => (decode, "read"),
        _ => (prefill, "sent"),
    };
    for n in 0..rounds {
        let mine = blocks(n);
        assert_marked(&decode.pool, &mine, new_mark(n + 120 - TURNS), "a turn later");
        let key = format!("old-{n}");
        // Those who are aborted, and who aborts.
        let mut before = under_way(&mover.endpoint, direction);
        let (offer, claim, granted, pushed);
        match way {
            Way::Claim | Way::ClaimPull => {
                let options = ClaimOptions {
                    pull: way == Way::ClaimPull,
                    ..ClaimOptions::default()
                };
                let made = prefill
                    .endpoint
                    .offer(&key, &prefill.pool, OfferOptions::default())
                    .unwrap();
                made.append(blocks(n)).unwrap();
                made.finish(REQUEST).unwrap();
                let wants = decode.endpoint.claim(&key, &decode.pool, &sources, options).unwrap();
                wants.fill(mine.clone()).unwrap();
                (offer, claim, granted, pushed) = (Some(made), Some(wants), None, None);
            }
            Way::Grant => {
                let to = decode.pool.grant(mine.clone(), GrantOptions::default()).unwrap();
                let from = prefill
                    .endpoint
                    .push(&prefill.pool, blocks(n), to.grant(), PushOptions::default())
                    .unwrap();
                (offer, claim, granted, pushed) = (None, None, Some(to), Some(from));
            }
        }
        let over_already = || match (&claim, &granted) {
            (Some(claim), _) => claim.arrived().is_done(),
            (_, Some(granted)) => granted.arrived().is_done(),
            _ => true,
        };
        // Most when their bytes are under way, some before.
        if n % 8 != 0 {
            let until = Instant::now() + Duration::from_millis(200);
            while under_way(&mover.endpoint, direction) <= before && !over_already() && Instant::now() < until {
                std::hint::spin_loop();
            }
            std::thread::sleep(Duration::from_micros(random.below(1500)));
        }
        before = under_way(&mover.endpoint, direction) - before;
        let ended = match (&claim, &granted) {
            (Some(claim), _) => {
                claim.cancel();
                claim.arrived().wait(LONG)
            }
            (_, Some(granted)) => {
                granted.cancel();
                granted.arrived().wait(LONG)
            }
            _ => unreachable!("one of them was made"),
        };
        match ended {
            Ok(_) => assert_marked(&decode.pool, &mine, OLD, "arrived"),
            Err(error) => {
                assert_ne!(error.destination(), kvxfer::Destination::Quarantined, "{error}");
                aborted += 1;
                outstanding += u32::from(before > 0.0);
            }
        }
        // Ended: the blocks are another request's from this instant.
        mark(&decode.pool, &mine, new_mark(n));
        if let Some(offer) = &offer {
            let _ = offer.released().wait(LONG);
            assert!(offer.released().is_done());
        }
        if let Some(pushed) = &pushed {
            let _ = pushed.done().wait(LONG);
            assert!(pushed.done().is_done());
        }
        assert_marked(&decode.pool, &mine, new_mark(n), "at once");
    }
    std::thread::sleep(Duration::from_millis(50));
    for n in rounds - TURNS..rounds {
        assert_marked(&decode.pool, &blocks(n), new_mark(n), "in the end");
    }
    (aborted, outstanding)
}

fn claims_are_aborted_and_their_blocks_reused() {
    aborted_and_reused(Way::Claim);
}

fn pulls_are_aborted_and_their_blocks_reused() {
    aborted_and_reused(Way::ClaimPull);
}

fn grants_are_cancelled_and_their_blocks_reused() {
    aborted_and_reused(Way::Grant);
}

fn a_restart_while_bytes_are_under_way_never_mixes_attempts() {
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(2);
    let (prefill, decode) = (side("prefill"), side("decode"));
    let mut voided = 0;
    let rounds = site.count(200, 30);
    for n in 0..rounds {
        let key = format!("again-{n}");
        // Other blocks than the second attempt's: nothing waits for the first one's source.
        mark(&prefill.pool, &blocks(0), OLD);
        mark(&decode.pool, &blocks(2), 0xaa);
        let offer = prefill
            .endpoint
            .offer(&key, &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(blocks(0)).unwrap();
        // All but one: with all of them the first attempt could arrive, and an arrival stands.
        offer.ready(0..REQUEST - 1, ..).unwrap();
        let claim = decode
            .endpoint
            .claim(
                &key,
                &decode.pool,
                &[prefill.endpoint.address()],
                ClaimOptions::default(),
            )
            .unwrap();
        claim.fill(blocks(2)).unwrap();
        let until = Instant::now() + Duration::from_millis(100);
        while under_way(&prefill.endpoint, "sent") == 0.0 && Instant::now() < until {
            std::hint::spin_loop();
        }
        if under_way(&prefill.endpoint, "sent") > 0.0 && offer.restart().is_ok() {
            voided += 1;
            mark(&prefill.pool, &blocks(1), new_mark(n));
            offer.append(blocks(1)).unwrap();
            offer.finish(REQUEST).unwrap();
            claim.arrived().wait(LONG).unwrap();
            assert_marked(&decode.pool, &blocks(2), new_mark(n), "the second attempt");
            std::thread::sleep(Duration::from_millis(3));
            assert_marked(&decode.pool, &blocks(2), new_mark(n), "the second attempt, later");
        } else {
            offer.finish(REQUEST).unwrap();
            claim.arrived().wait(LONG).unwrap();
        }
        let _ = offer.released().wait(LONG);
        assert!(offer.released().is_done());
    }
    println!("{voided} of {rounds} were restarted while bytes were under way");
    assert!(voided > rounds / 4, "only {voided} of {rounds}");
}

fn deadlines_that_pass_while_bytes_are_under_way_leave_the_blocks_to_us() {
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(20);
    let (prefill, decode) = (side("prefill"), side("decode"));
    prefill.endpoint.connect(&decode.endpoint.address(), LONG).unwrap();
    let all = || Selection::single(0, REQUEST * TURNS, (0..REQUEST * TURNS).collect());
    mark(&prefill.pool, &all(), OLD);
    let mut exceeded = 0;
    // In the middle of a transfer, however busy the machine is: later if nothing was under way, earlier if all was there.
    let mut deadline_ms: u64 = if site.is_real() { 30 } else { 4 };
    let rounds = site.count(100, 20);
    for n in 0..rounds {
        let pull = n % 2 == 1;
        let offer = prefill
            .endpoint
            .offer(format!("late-{n}"), &prefill.pool, OfferOptions::default())
            .unwrap();
        offer.append(all()).unwrap();
        offer.finish(REQUEST * TURNS).unwrap();
        let options = ClaimOptions {
            pull,
            deadline: Some(Duration::from_millis(deadline_ms)),
            ..ClaimOptions::default()
        };
        let sources = [prefill.endpoint.address()];
        let claim = decode
            .endpoint
            .claim(format!("late-{n}"), &decode.pool, &sources, options)
            .unwrap();
        let _ = claim.fill(all());
        let (mover, direction) = if pull { (&decode, "read") } else { (&prefill, "sent") };
        let mut was_under_way = false;
        while !claim.arrived().is_done() {
            was_under_way |= under_way(&mover.endpoint, direction) > 0.0;
            std::thread::sleep(Duration::from_micros(100));
        }
        match claim.arrived().wait(LONG) {
            Ok(_) => {
                deadline_ms = (deadline_ms - 1).max(2);
                assert_marked(&decode.pool, &all(), OLD, "in time");
            }
            Err(error) => {
                // On a busy machine the time may be over before the claim has met its offer.
                assert!(
                    matches!(error.kind(), ErrorKind::DeadlineExceeded | ErrorKind::Unclaimed),
                    "{error}"
                );
                assert_ne!(error.destination(), kvxfer::Destination::Quarantined, "{error}");
                exceeded += u32::from(was_under_way);
                deadline_ms = (deadline_ms + u64::from(!was_under_way)).min(100);
                mark(&decode.pool, &all(), 0xaa);
                std::thread::sleep(Duration::from_millis(4));
                assert_marked(&decode.pool, &all(), 0xaa, "after the end");
            }
        }
        let _ = offer.released().wait(LONG);
        assert!(offer.released().is_done());
    }
    println!("{exceeded} of {rounds} deadlines passed while bytes were under way");
    assert!(exceeded > rounds / 4, "only {exceeded} of {rounds}");
}

fn blocks_retracted_while_they_are_read_never_arrive() {
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(2);
    let (owner, reader) = (side("owner"), side("reader"));
    let all = || Selection::single(0, REQUEST * TURNS, (0..REQUEST * TURNS).collect());
    let mut read = 0;
    let rounds = site.count(60, 20);
    for n in 0..rounds {
        let key = format!("retracted-{n}");
        mark(&owner.pool, &all(), OLD);
        let offer = owner
            .endpoint
            .offer(&key, &owner.pool, OfferOptions::default())
            .unwrap();
        offer.append(all()).unwrap();
        offer.finish(REQUEST * TURNS).unwrap();
        let options = ClaimOptions {
            pull: true,
            ..ClaimOptions::default()
        };
        let claim = reader
            .endpoint
            .claim(&key, &reader.pool, &[owner.endpoint.address()], options)
            .unwrap();
        claim.fill(all()).unwrap();
        eventually("it is being read", || {
            under_way(&reader.endpoint, "read") > 0.0 || claim.arrived().is_done()
        });
        let under_way = under_way(&reader.endpoint, "read");
        let retracted = offer.retract(&[7, 30]);
        // Somebody else's from here on.
        mark(&owner.pool, &all(), 0xee);
        match claim.arrived().wait(LONG) {
            Ok(_) => assert_marked(&reader.pool, &all(), OLD, "arrived before it was retracted"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Retracted, "{error}");
                retracted.unwrap();
                read += u32::from(under_way > 0.0);
            }
        }
        let _ = offer.released().wait(LONG);
        assert!(offer.released().is_done());
    }
    println!("{read} of {rounds} were retracted while they were read");
    assert!(read > rounds / 4, "only {read} of {rounds}");
}

fn a_read_grant_that_is_taken_back_never_counts() {
    let site = site::site_with(site::SLOW);
    let _delay = site.delay(2);
    let (owner, reader) = (side("owner"), side("reader"));
    let all = || Selection::single(0, REQUEST * TURNS, (0..REQUEST * TURNS).collect());
    mark(&owner.pool, &all(), OLD);
    let mut ended = 0;
    let rounds = site.count(60, 20);
    for _ in 0..rounds {
        let served = owner.pool.serve(all(), GrantOptions::default()).unwrap();
        let pull = reader
            .endpoint
            .pull(served.grant(), &reader.pool, all(), PullOptions::default())
            .unwrap();
        eventually("it is being read", || {
            under_way(&reader.endpoint, "read") > 0.0 || pull.done().is_done()
        });
        let under_way = under_way(&reader.endpoint, "read");
        served.cancel();
        let served = served.arrived().wait(LONG);
        let pulled = pull.done().wait(LONG);
        assert_eq!(served.is_ok(), pulled.is_ok(), "one verdict: {served:?}, {pulled:?}");
        match pulled {
            Ok(_) => assert_marked(&reader.pool, &all(), OLD, "pulled"),
            Err(_) => {
                ended += u32::from(under_way > 0.0);
                // Ended: these are ours again.
                mark(&reader.pool, &all(), 0xaa);
                std::thread::sleep(Duration::from_millis(5));
                assert_marked(&reader.pool, &all(), 0xaa, "after its end");
            }
        }
    }
    println!("{ended} of {rounds} were taken back while they were read");
    assert!(ended > rounds / 4, "only {ended} of {rounds}");
}
