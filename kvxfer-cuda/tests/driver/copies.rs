//! Copies: what they move, when they are done, how few calls they take, and how they fail.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, Bench, PATIENCE, Staging, pattern, region, segment, until, wait};
use kvxfer_core::ErrorKind;
use kvxfer_core::memory::{CopyState, Region, Segment};
use kvxfer_cuda::Gather;
use proptest::prelude::*;

const PIECE: u64 = 8 << 10;

type Settings = Vec<(&'static str, &'static str, &'static str)>;

/// Every way in which pieces can go, by what is asked for and what the driver has.
fn ways() -> Vec<(&'static str, Gather, Settings)> {
    vec![
        ("auto", Gather::Auto, vec![]),
        ("kernel", Gather::Kernel, vec![]),
        ("batch", Gather::Batch, vec![]),
        ("loop", Gather::Loop, vec![]),
        (
            "old driver",
            Gather::Auto,
            vec![("*", "driver_version", "12010"), ("*", "compute", "5.2")],
        ),
        (
            "no words",
            Gather::Batch,
            vec![("*", "fail", "cuStreamWriteValue32_v2:NOT_SUPPORTED")],
        ),
        (
            "no words, no events",
            Gather::Loop,
            vec![(
                "*",
                "fail",
                "cuStreamWriteValue32_v2:NOT_SUPPORTED,cuEventRecord:NOT_SUPPORTED",
            )],
        ),
    ]
}

fn segments_of(count: usize, sizes: &[(usize, u64, u64)], lengths: &[u64]) -> Vec<Segment> {
    let segment_of = |&(which, at, length): &(usize, u64, u64)| {
        let which = which % count;
        let offset = at % lengths[which];
        segment(which as u32, offset, length.min(lengths[which] - offset))
    };
    sizes.iter().map(segment_of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, .. ProptestConfig::default() })]

    /// Gathered bytes are those of the pieces, in order and densely; nothing else of the staging changes.
    #[test]
    fn gathering_is_what_the_model_says(
        lengths in prop::collection::vec(1u64..200_000, 1..4),
        pieces in prop::collection::vec((0usize..4, 0u64..1 << 20, 1u64..20_000), 1..120),
        pinned in any::<bool>(),
        jitter in any::<bool>(),
    ) {
        for (name, gather, settings) in ways() {
            let bench = Bench::with(&settings, gather);
            if jitter {
                bench.fake.set_now("*", "op_jitter_us", "300").unwrap();
            }
            let regions: Vec<Arc<Region>> = lengths.iter().map(|length| bench.region(*length)).collect();
            let models: Vec<Vec<u8>> = lengths.iter().zip(0..).map(|(length, seed)| pattern(*length as usize, seed)).collect();
            for (made, model) in regions.iter().zip(&models) {
                bench.fake.write(made.address(), model).unwrap();
            }
            let segments = segments_of(regions.len(), &pieces, &lengths);
            let total: u64 = segments.iter().map(|segment| segment.length).sum();
            let domain = regions[0].domain().clone();
            let staging = match pinned {
                true => Staging::pinned(&domain, total + 64).unwrap(),
                false => Staging::unpinned(total + 64),
            };
            staging.memory.copy_in(0, &vec![0xee; total as usize + 64]).unwrap();
            let ticket = domain.start_gather(&regions, &segments, staging.part(0, total)).unwrap();
            wait(&*domain, ticket).unwrap();
            let mut expected = Vec::new();
            for part in &segments {
                let bytes = &models[part.region as usize][part.offset as usize..];
                expected.extend_from_slice(&bytes[..part.length as usize]);
            }
            expected.extend_from_slice(&[0xee; 64]);
            prop_assert!(staging.read() == expected, "{name}");
            drop((regions, domain, staging));
            bench.end();
        }
    }

    /// Scattered bytes are in their places, and no others change. Pieces do not overlap.
    #[test]
    fn scattering_is_what_the_model_says(
        cuts in prop::collection::btree_set(1u64..400_000, 2..150),
        pinned in any::<bool>(),
    ) {
        for (name, gather, settings) in ways() {
            let bench = Bench::with(&settings, gather);
            let made = bench.region(400_000);
            let mut model = pattern(400_000, 9);
            bench.fake.write(made.address(), &model).unwrap();
            // Every second run between the cuts, from the back.
            let cuts: Vec<u64> = cuts.iter().copied().collect();
            let runs = cuts.windows(2).step_by(2).rev();
            let segments: Vec<Segment> = runs.map(|pair| segment(0, pair[0], pair[1] - pair[0])).collect();
            let total: u64 = segments.iter().map(|segment| segment.length).sum();
            let domain = made.domain().clone();
            let staging = match pinned {
                true => Staging::pinned(&domain, total).unwrap(),
                false => Staging::unpinned(total),
            };
            let bytes = pattern(total as usize, 200);
            staging.memory.copy_in(0, &bytes).unwrap();
            let regions = [made];
            let ticket = domain.start_scatter(staging.view(), &regions, &segments).unwrap();
            wait(&*domain, ticket).unwrap();
            let mut at = 0;
            for part in &segments {
                let length = part.length as usize;
                model[part.offset as usize..][..length].copy_from_slice(&bytes[at..at + length]);
                at += length;
            }
            prop_assert!(bench.fake.read(regions[0].address(), 400_000).unwrap() == model, "{name}");
            drop((regions, domain, staging));
            bench.end();
        }
    }
}

#[test]
fn bytes_go_in_and_out_at_once() {
    let bench = Bench::new();
    let made = bench.region(1 << 20);
    let bytes = pattern(700_001, 3);
    made.copy_in(1_003, &bytes).unwrap();
    let mut out = vec![0; bytes.len()];
    made.copy_out(1_003, &mut out).unwrap();
    assert!(out == bytes);
    assert_eq!(made.copy_in(1 << 20, &[1]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    drop(made);
    bench.end();
}

#[test]
fn a_copy_is_not_done_before_it_is() {
    for (name, gather, settings) in ways() {
        let bench = Bench::with(&settings, gather);
        bench.fake.set_now("*", "tear_us", "2000").unwrap();
        let made = bench.region(64 * PIECE);
        let model = pattern(64 * PIECE as usize, 5);
        bench.fake.write(made.address(), &model).unwrap();
        let domain = made.domain().clone();
        let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
        let regions = [made];
        // What lies side by side is one piece: here nothing does.
        let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
        bench.fake.set_now("*", "stall", "own").unwrap();
        let ticket = domain.start_gather(&regions, &segments, staging.view()).unwrap();
        for _ in 0..50 {
            assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running, "{name}");
            std::thread::sleep(Duration::from_millis(1));
        }
        bench.fake.set_now("*", "stall", "off").unwrap();
        wait(&*domain, ticket).unwrap();
        let expected: Vec<u8> = model.chunks(PIECE as usize).step_by(2).flatten().copied().collect();
        assert!(staging.read() == expected, "{name}");
        assert_eq!(
            domain.poll_copy(ticket).unwrap_err().kind(),
            ErrorKind::Internal,
            "{name}"
        );
        drop((regions, domain, staging));
        bench.end();
    }
}

#[test]
fn copies_are_visible_to_kernels_that_are_started_after_them() {
    let bench = Bench::with(&[("*", "op_jitter_us", "500"), ("*", "tear_us", "500")], Gather::Auto);
    let made = bench.region(64 * PIECE);
    let (domain, address) = (made.domain().clone(), made.address());
    let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
    let regions = [made];
    let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
    let stream = bench.engine.stream().unwrap();
    let fake = Arc::new(kvxfer_fake_cuda::FakeCuda::attach(bench.fake.directory()).unwrap());
    for round in 1..20u8 {
        staging.memory.copy_in(0, &vec![round; 32 * PIECE as usize]).unwrap();
        let ticket = domain.start_scatter(staging.view(), &regions, &segments).unwrap();
        wait(&*domain, ticket).unwrap();
        let (seen, reader) = (Arc::new(parking_lot::Mutex::new(Vec::new())), fake.clone());
        let place = seen.clone();
        bench
            .engine
            .kernel(stream, move || {
                *place.lock() = reader.read(address, 64 * PIECE as usize).unwrap()
            })
            .unwrap();
        bench.engine.finish(stream).unwrap();
        let seen = seen.lock();
        assert!(
            seen.chunks(PIECE as usize)
                .step_by(2)
                .flatten()
                .all(|byte| *byte == round)
        );
    }
    bench.engine.destroy_stream(stream).unwrap();
    drop((regions, domain, staging, fake));
    bench.end();
}

/// What was handed over before a call failed is still under way: the failure is told when that has ended.
#[test]
fn a_copy_that_fails_half_way_is_told_when_nothing_of_it_is_under_way() {
    for (name, settings) in [
        ("words", "cuMemcpyAsync:UNKNOWN:1:9"),
        ("events", "cuMemcpyAsync:UNKNOWN:1:9,cuStreamWriteValue32_v2:UNKNOWN"),
        (
            "queries",
            "cuMemcpyAsync:UNKNOWN:1:9,cuStreamWriteValue32_v2:UNKNOWN,cuEventRecord:UNKNOWN",
        ),
    ] {
        let bench = Bench::with(&[("*", "stall", "copies"), ("*", "fail", settings)], Gather::Loop);
        let made = bench.region(64 * PIECE);
        let domain = made.domain().clone();
        let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
        let regions = [made];
        let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
        let ticket = domain.start_gather(&regions, &segments, staging.view()).unwrap();
        until("the copy is handed over", || {
            assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running, "{name}");
            bench.fake.count("cuMemcpyAsync") == 10
        });
        for _ in 0..30 {
            assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running, "{name}");
            std::thread::sleep(Duration::from_millis(1));
        }
        bench.fake.set_now("*", "stall", "off").unwrap();
        let error = wait(&*domain, ticket).unwrap_err();
        assert_eq!(bench.fake.count("copies_in_flight"), 0, "{name}");
        assert!(error.to_string().contains("cuMemcpyAsync failed"), "{name}: {error}");
        assert_eq!(error.destination(), kvxfer_core::error::Destination::Untouched);
        drop((regions, domain, staging));
        bench.end();
    }
}

/// Several threads copy out and in at once, on two devices, with everything late and out of order.
#[test]
fn many_threads_copy_at_once() {
    let bench = Bench::with(&[("*", "op_jitter_us", "400"), ("*", "tear_us", "50")], Gather::Auto);
    let other = bench.fake.engine(1).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..6u8 {
            let (bench, other) = (&bench, &other);
            scope.spawn(move || {
                let engine = if thread % 2 == 0 { &bench.engine } else { other };
                let address = engine.allocate(64 * PIECE as usize).unwrap();
                let made = region(&bench.cuda, address, 64 * PIECE).unwrap();
                let domain = made.domain().clone();
                let regions = [made];
                let (first, second) = (
                    Staging::pinned(&domain, 32 * PIECE).unwrap(),
                    Staging::pinned(&domain, 32 * PIECE).unwrap(),
                );
                for round in 0..30u8 {
                    let count = 1 + u64::from(round) % 32;
                    let segments: Vec<Segment> = (0..count).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
                    let bytes = pattern((count * PIECE) as usize, thread * 31 + round);
                    first.memory.copy_in(0, &bytes).unwrap();
                    let view = first.part(0, count * PIECE);
                    wait(&*domain, domain.start_scatter(view, &regions, &segments).unwrap()).unwrap();
                    let view = second.part(0, count * PIECE);
                    wait(&*domain, domain.start_gather(&regions, &segments, view).unwrap()).unwrap();
                    assert!(second.read()[..bytes.len()] == bytes, "thread {thread}, round {round}");
                }
            });
        }
    });
    bench.end();
}

#[test]
fn what_a_driver_lacks_is_said() {
    let settings = [("*", "driver_version", "12010"), ("*", "compute", "5.2")];
    let bench = Bench::with(&settings, Gather::Auto);
    let made = bench.region(64 * PIECE);
    let domain = made.domain().clone();
    let regions = [made];
    let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
    let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
    let ticket = domain.start_gather(&regions, &segments, staging.view()).unwrap();
    wait(&*domain, ticket).unwrap();
    let notes = bench.cuda.notes().join("\n");
    assert!(
        notes.contains("no copy kernels: cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU"),
        "{notes}"
    );
    assert!(notes.contains("no batched copies"), "{notes}");
    let copied = bench.cuda.counters().into_iter().find(|counter| {
        counter.name == "cuda_copied_bytes_total" && counter.labels.iter().any(|(_, value)| value == "out")
    });
    assert_eq!(copied.unwrap().value, (32 * PIECE) as f64);
    drop((regions, domain, staging));
    bench.end();
}

#[test]
fn staging_is_pinned_once_for_all_devices_and_undone_with_the_last() {
    let bench = Bench::new();
    let other = bench.fake.engine(1).unwrap();
    let first = bench.region(4096);
    let second = region(&bench.cuda, other.allocate(4096).unwrap(), 4096).unwrap();
    let pinned = |cuda: &kvxfer_cuda::Cuda| {
        let all = cuda.counters();
        all.iter()
            .find(|counter| counter.name == "cuda_pinned_bytes")
            .unwrap()
            .value as u64
    };
    let memory = Staging::unpinned(1 << 20);
    let before = pinned(&bench.cuda);
    // SAFETY: the memory is dropped after the pins.
    let pins = unsafe {
        [
            first.domain().pin_staging(memory.view()).unwrap(),
            second.domain().pin_staging(memory.view()).unwrap(),
            first.domain().pin_staging(memory.view()).unwrap(),
        ]
    };
    assert_eq!(bench.fake.count("cuMemHostRegister_v2"), 1);
    until("the copiers' own memory", || pinned(&bench.cuda) > before + (1 << 20));
    let [a, b, c] = pins;
    drop((a, b));
    assert_eq!(bench.fake.count("cuMemHostUnregister"), 0);
    drop(c);
    assert_eq!(bench.fake.count("cuMemHostUnregister"), 1);
    drop((first, second));
    bench.end();
}

#[test]
fn staging_that_somebody_else_pinned_is_used_as_it_is() {
    let bench = Bench::new();
    let again = kvxfer_cuda::Cuda::load(&common::config(&bench.fake, Gather::Auto)).unwrap();
    let made = bench.region(64 * PIECE);
    let address = bench.engine.allocate(64 * PIECE as usize).unwrap();
    let others = region(&again, address, 64 * PIECE).unwrap();
    let staging = Staging::pinned(made.domain(), 32 * PIECE).unwrap();
    // SAFETY: the staging outlives it.
    let pin = unsafe { others.domain().pin_staging(staging.view()) }.unwrap();
    assert!(pin.is_none());
    let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
    let domain = others.domain().clone();
    let regions = [others];
    let ticket = domain.start_gather(&regions, &segments, staging.view()).unwrap();
    wait(&*domain, ticket).unwrap();
    assert_eq!(
        bench.fake.count("cuLaunchKernel"),
        0,
        "a kernel needs memory that stays pinned"
    );
    drop((made, regions, domain, staging, again));
    bench.end();
}

#[test]
fn bad_segments_are_refused() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let domain = made.domain().clone();
    let staging = Staging::unpinned(4096);
    let regions = [made];
    for bad in [segment(1, 0, 1), segment(0, 4096, 1), segment(0, u64::MAX, 2)] {
        let error = domain.start_gather(&regions, &[bad], staging.view()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    }
    let long = [segment(0, 0, 4096), segment(0, 0, 1)];
    let error = domain.start_scatter(staging.view(), &regions, &long).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    drop((regions, domain));
    bench.end();
}

#[test]
fn memory_that_is_gone_fails_its_own_copy_only() {
    for gather in [Gather::Batch, Gather::Loop] {
        let bench = Bench::with(&[], gather);
        let kept = bench.region(64 * PIECE);
        let address = bench.engine.allocate(64 * PIECE as usize).unwrap();
        let freed = region(&bench.cuda, address, 64 * PIECE).unwrap();
        bench.engine.free(address).unwrap();
        let model = pattern(64 * PIECE as usize, 7);
        bench.fake.write(kept.address(), &model).unwrap();
        let domain = kept.domain().clone();
        let staging = Staging::pinned(&domain, 64 * PIECE).unwrap();
        let regions = [kept, freed];
        let segments =
            |which: u32| -> Vec<Segment> { (0..32).map(|index| segment(which, index * 2 * PIECE, PIECE)).collect() };
        let good = domain
            .start_gather(&regions, &segments(0), staging.part(0, 32 * PIECE))
            .unwrap();
        let bad = domain
            .start_gather(&regions, &segments(1), staging.part(32 * PIECE, 32 * PIECE))
            .unwrap();
        let error = wait(&*domain, bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        wait(&*domain, good).unwrap();
        let expected: Vec<u8> = model.chunks(PIECE as usize).step_by(2).flatten().copied().collect();
        assert!(staging.read()[..32 * PIECE as usize] == expected);
        drop((regions, domain, staging));
        drop(bench.cuda);
        assert_eq!(bench.fake.leaks(), [] as [String; 0]);
    }
}

#[test]
fn a_copy_that_fails_on_the_device_is_an_error_and_other_devices_go_on() {
    let bench = Bench::new();
    let other_engine = bench.fake.engine(1).unwrap();
    let made = bench.region(64 * PIECE);
    let other = region(&bench.cuda, other_engine.allocate(4096).unwrap(), 4096).unwrap();
    other.copy_in(0, &[4; 4096]).unwrap();
    let domain = made.domain().clone();
    let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
    let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
    let regions = [made];
    bench.fake.set_now("gpu0", "op_error", "ILLEGAL_ADDRESS:1").unwrap();
    let first = domain.start_gather(&regions, &segments, staging.view()).unwrap();
    let error = wait(&*domain, first).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    // Its context is broken, and that stays so.
    let later = domain.start_gather(&regions, &segments, staging.view());
    assert_eq!(later.unwrap_err().kind(), ErrorKind::Transport);
    let mut out = [0; 4096];
    other.copy_out(0, &mut out).unwrap();
    assert_eq!(out, [4; 4096]);
    drop((regions, domain, staging, other));
}

#[test]
fn a_driver_that_vanishes_is_an_error_in_bounded_time_and_is_not_waited_for() {
    let bench = Bench::new();
    let made = bench.region(64 * PIECE);
    let domain = made.domain().clone();
    let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
    let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
    let regions = [made];
    bench.fake.set_now("*", "stall", "own").unwrap();
    let ticket = domain.start_gather(&regions, &segments, staging.view()).unwrap();
    until("the copy is handed over", || {
        assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running);
        bench.fake.count("cuLaunchKernel") == 1
    });
    bench.fake.set_now("*", "vanish", "on").unwrap();
    let error = wait(&*domain, ticket).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
    let begun = std::time::Instant::now();
    std::mem::forget(staging);
    drop((regions, domain));
    drop(bench.cuda);
    assert!(begun.elapsed() < PIECE_OF_PATIENCE);
}

/// While the device may still write, a copy is not over, whatever the driver answers.
#[test]
fn a_device_that_cannot_be_asked_is_given_nothing_more_and_what_it_has_is_not_over_before_it_is() {
    let bench = Bench::new();
    let made = bench.region(64 * PIECE);
    let domain = made.domain().clone();
    let staging = Staging::pinned(&domain, 32 * PIECE).unwrap();
    let segments: Vec<Segment> = (0..32).map(|index| segment(0, index * 2 * PIECE, PIECE)).collect();
    let regions = [made];
    bench.fake.set_now("*", "fail", "cuStreamQuery:NOT_PERMITTED").unwrap();
    bench.fake.set_now("*", "stall", "own").unwrap();
    let first = domain.start_gather(&regions, &segments, staging.view()).unwrap();
    assert_eq!(domain.poll_copy(first).unwrap(), CopyState::Running);
    let other = Staging::unpinned(PIECE);
    until("the device is given up", || {
        assert_eq!(domain.poll_copy(first).unwrap(), CopyState::Running);
        bench.fake.count("cuStreamQuery") >= 10
    });
    until("nothing is started any more", || {
        match domain.start_gather(&regions, &segments[..1], other.view()) {
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
                assert!(error.to_string().contains("cuStreamQuery"), "{error}");
                true
            }
        }
    });
    assert_eq!(domain.poll_copy(first).unwrap(), CopyState::Running);
    bench.fake.set_now("*", "stall", "off").unwrap();
    wait(&*domain, first).unwrap();
    drop((regions, domain, staging));
}

const PIECE_OF_PATIENCE: Duration = Duration::from_secs(PATIENCE.as_secs() / 2);
