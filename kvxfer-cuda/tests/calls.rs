//! What copies cost in calls of the driver's, and how their end is told.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Bench, Staging, pattern, segment, until, wait};
use kvxfer_core::memory::{CopyState, Segment};
use kvxfer_cuda::Gather;

const PIECE: u64 = 8 << 10;

/// Pieces between which is as much again, so that nothing merges.
fn apart(first: u64, count: u64, length: u64) -> Vec<Segment> {
    (0..count)
        .map(|index| segment(0, first + index * 2 * length, length))
        .collect()
}

fn expected(model: &[u8], segments: &[Segment]) -> Vec<u8> {
    let bytes = |part: &Segment| &model[part.offset as usize..][..part.length as usize];
    segments.iter().flat_map(bytes).copied().collect()
}

/// A hand-over of 20,480 blocks of 8 KiB, in staging buffers of 1 MiB, as TCP does it: at most so many at once.
fn w5(bench: &Bench, buffers: usize, out: bool) -> u64 {
    const BLOCKS: u64 = 20_480;
    const STAGING: u64 = 1 << 20;
    // Every second slot, so that nothing merges.
    let made = bench.region(2 * BLOCKS * PIECE);
    let domain = made.domain().clone();
    let regions = [made];
    let staging: Vec<Staging> = (0..buffers)
        .map(|_| Staging::pinned(&domain, STAGING).unwrap())
        .collect();
    // Streams and kernels are made with the first copy, once.
    regions[0].copy_in(0, &[1]).unwrap();
    let per_buffer = STAGING / PIECE;
    let before = bench.fake.count("*");
    let mut next = 0;
    let mut busy: Vec<Option<kvxfer_core::memory::CopyTicket>> = vec![None; buffers];
    while next < BLOCKS || busy.iter().any(Option::is_some) {
        for (ticket, buffer) in busy.iter_mut().zip(&staging) {
            if ticket.is_none() && next < BLOCKS {
                let blocks = next..(next + per_buffer).min(BLOCKS);
                let segments: Vec<Segment> = blocks.map(|block| segment(0, 2 * block * PIECE, PIECE)).collect();
                let started = match out {
                    true => domain.start_gather(&regions, &segments, buffer.view()),
                    false => domain.start_scatter(buffer.view(), &regions, &segments),
                };
                *ticket = Some(started.unwrap());
                next += per_buffer;
            }
        }
        for ticket in &mut busy {
            if ticket.is_some_and(|ticket| domain.poll_copy(ticket).unwrap() == CopyState::Done) {
                *ticket = None;
            }
        }
        std::thread::yield_now();
    }
    bench.fake.count("*") - before
}

#[test]
fn a_hand_over_of_w5_takes_few_driver_calls() {
    for (buffers, gather) in [(16, Gather::Auto), (32, Gather::Auto), (32, Gather::Batch)] {
        for out in [true, false] {
            let bench = Bench::with(&[], gather);
            // How much goes in one call depends on who gets a processor when.
            let calls = (0..3).map(|_| w5(&bench, buffers, out)).min().unwrap();
            let way = if out { "out" } else { "in" };
            eprintln!("{buffers} buffers of 1 MiB, {gather:?}, {way}: {calls} driver calls");
            let all = bench.fake.calls();
            assert!(
                calls <= 80,
                "{buffers} buffers, {gather:?}, {way}: {calls} calls: {all:?}"
            );
            assert_eq!(bench.fake.count("copies"), 3 * (20_480 + 1));
            let pinned = ((buffers as u64) << 20) + (4 << 20);
            assert!(bench.fake.count("pinned_peak") <= pinned);
            bench.end();
        }
    }
}

#[test]
fn what_is_started_before_a_poll_goes_in_one_call() {
    let bench = Bench::new();
    let made = bench.region(1 << 20);
    let domain = made.domain().clone();
    let regions = [made];
    let staging = Staging::pinned(&domain, 64 * 1024).unwrap();
    let tickets: Vec<_> = (0..64)
        .map(|index| {
            let view = staging.part(index * 1024, 1024);
            domain
                .start_gather(&regions, &[segment(0, index * 8192, 1024)], view)
                .unwrap()
        })
        .collect();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(
        bench.fake.count("copies"),
        0,
        "nothing is handed over before somebody polls"
    );
    for ticket in tickets {
        wait(&*domain, ticket).unwrap();
    }
    let calls = bench.fake.count("cuMemcpyBatchAsync") + bench.fake.count("cuLaunchKernel");
    assert_eq!((calls, bench.fake.count("copies")), (1, 64));
    drop((regions, domain, staging));
    bench.end();
}

/// The kernel writes the word by itself; behind copies the stream does.
#[test]
fn a_kernel_is_one_call_and_copies_behind_it_are_marked() {
    let bench = Bench::with(&[("*", "tear_us", "1000"), ("*", "stall", "copies")], Gather::Auto);
    let made = bench.region(4 << 20);
    let model = pattern(4 << 20, 9);
    bench.fake.write(made.address(), &model).unwrap();
    let domain = made.domain().clone();
    let staging = Staging::pinned(&domain, 2 << 20).unwrap();
    let regions = [made];
    let (small, large) = (apart(0, 64, PIECE), apart(2 << 20, 4, 256 << 10));
    let calls = |names: [&str; 4]| names.map(|name| bench.fake.count(name));
    let names = [
        "cuLaunchKernel",
        "cuMemcpyBatchAsync",
        "cuMemcpyAsync",
        "cuStreamWriteValue32_v2",
    ];
    let view = staging.part(0, 64 * PIECE);
    let alone = domain.start_gather(&regions, &small, view).unwrap();
    until("the copy is handed over", || {
        assert_eq!(domain.poll_copy(alone).unwrap(), CopyState::Running);
        calls(names)[0] == 1
    });
    bench.fake.set_now("*", "stall", "off").unwrap();
    wait(&*domain, alone).unwrap();
    assert!(staging.read()[..(64 * PIECE) as usize] == expected(&model, &small));
    assert_eq!(calls(names), [1, 0, 0, 0]);
    // Both kinds at once.
    bench.fake.set_now("*", "stall", "copies").unwrap();
    let first = domain.start_gather(&regions, &small, view).unwrap();
    let view = staging.part(1 << 20, 1 << 20);
    let second = domain.start_gather(&regions, &large, view).unwrap();
    until("the copies are handed over", || {
        assert_eq!(domain.poll_copy(first).unwrap(), CopyState::Running);
        assert_eq!(domain.poll_copy(second).unwrap(), CopyState::Running);
        calls(names)[3] == 1
    });
    bench.fake.set_now("*", "stall", "off").unwrap();
    wait(&*domain, second).unwrap();
    assert!(staging.read()[1 << 20..] == expected(&model, &large));
    assert_eq!(
        domain.poll_copy(first).unwrap(),
        CopyState::Done,
        "it was before the other"
    );
    assert!(staging.read()[..(64 * PIECE) as usize] == expected(&model, &small));
    assert_eq!(calls(names), [2, 1, 0, 1]);
    drop((regions, domain, staging));
    bench.end();
}

#[test]
fn a_kernel_that_cannot_be_launched_is_replaced_by_copies() {
    let bench = Bench::with(
        &[("*", "fail", "cuLaunchKernel:UNKNOWN:1:1"), ("*", "tear_us", "1000")],
        Gather::Auto,
    );
    let made = bench.region(64 * PIECE);
    let model = pattern(64 * PIECE as usize, 3);
    bench.fake.write(made.address(), &model).unwrap();
    let domain = made.domain().clone();
    let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
    let regions = [made];
    let segments = apart(0, 32, PIECE);
    for round in 0..3 {
        staging.memory.copy_in(0, &vec![0; 32 * PIECE as usize]).unwrap();
        let ticket = domain.start_gather(&regions, &segments, staging.view()).unwrap();
        wait(&*domain, ticket).unwrap();
        assert!(staging.read() == expected(&model, &segments), "{round}");
    }
    let counts = ["cuLaunchKernel", "cuStreamWriteValue32_v2"].map(|name| bench.fake.count(name));
    assert_eq!(counts, [2, 2]);
    let notes = bench.cuda.notes().join("\n");
    assert!(
        notes.contains("no copy kernels: cuLaunchKernel: CUDA_ERROR_UNKNOWN"),
        "{notes}"
    );
    drop((regions, domain, staging));
    bench.end();
}

/// The word begins again at zero after a few hand-overs.
#[test]
fn a_copy_is_not_over_before_it_is_when_numbers_begin_again() {
    for (gather, fail) in [
        (Gather::Auto, ""),
        (Gather::Batch, ""),
        (Gather::Batch, "cuStreamWriteValue32_v2:NOT_SUPPORTED"),
    ] {
        let bench = Bench::with(&[("*", "tear_us", "500"), ("*", "fail", fail)], gather);
        let made = bench.region(64 * PIECE);
        let domain = made.domain().clone();
        let (address, regions) = (made.address(), [made]);
        let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
        let segments = apart(0, 32, PIECE);
        for round in 0..12u8 {
            let model = pattern(64 * PIECE as usize, round);
            bench.fake.write(address, &model).unwrap();
            bench.fake.set_now("*", "stall", "own").unwrap();
            let ticket = domain.start_gather(&regions, &segments, staging.view()).unwrap();
            for _ in 0..5 {
                let state = domain.poll_copy(ticket).unwrap();
                assert_eq!(state, CopyState::Running, "{gather:?}, {round}");
                std::thread::sleep(Duration::from_millis(1));
            }
            bench.fake.set_now("*", "stall", "off").unwrap();
            wait(&*domain, ticket).unwrap();
            assert!(staging.read() == expected(&model, &segments), "{gather:?}, {round}");
        }
        drop((regions, domain, staging));
        bench.end();
    }
}
