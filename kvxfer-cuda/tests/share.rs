//! Memory that endpoints on one host map of each other: both ends in this process.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::share::{bytes_of, copy, export, gone, ready, run, take_all};
use common::{Bench, config, pattern, region, segment, until, wait};
use kvxfer_core::ErrorKind;
use kvxfer_core::memory::{CopyState, ImportState, ImportedRun, Segment};
use kvxfer_cuda::{Cuda, CudaConfig, Gather};
use proptest::prelude::*;

const LENGTH: u64 = 1 << 20;
const BLOCK: usize = 2 << 20;
/// Long enough for what must not happen.
const MOMENT: Duration = Duration::from_millis(60);

#[test]
fn the_memory_itself_is_copied_from() {
    let bench = Bench::new();
    let (from, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let model = pattern(LENGTH as usize, 1);
    bench.fake.write(from.address(), &model).unwrap();
    let exported = export(&from).unwrap();
    assert_eq!(exported.importers(), 0);
    let import = take_all(&to, exported.description()).unwrap();
    assert!(bytes_of(&bench.fake, &to) == model);
    assert_eq!(exported.importers(), 1);
    assert_eq!(bench.fake.count("cuIpcOpenMemHandle_v2"), 0, "it is here already");

    // Many small pieces, which go by the kernel, in an order of their own.
    let small: Vec<_> = (0..64u64).rev().map(|index| run(&import, index * 8192, 4096)).collect();
    let places: Vec<_> = (0..64u64)
        .map(|index| segment(0, (index * 7 % 64) * 8192, 4096))
        .collect();
    copy(&to, &small, &places).unwrap();
    assert_eq!(bench.fake.count("cuLaunchKernel"), 1);
    let after = bytes_of(&bench.fake, &to);
    for (run, place) in small.iter().zip(&places) {
        let at = |start: u64| start as usize..start as usize + 4096;
        assert!(after[at(place.offset)] == model[at(run.offset)]);
    }
    let counted = |name: &str| {
        let counters = bench.cuda.counters();
        let found = counters.iter().filter(|counter| counter.name == name);
        found.map(|counter| counter.value as u64).sum::<u64>()
    };
    assert_eq!(counted("cuda_import_copies_total"), 2);
    assert_eq!(counted("cuda_import_bytes_total"), LENGTH + 64 * 4096);
    assert_eq!(
        [
            counted("cuda_exports"),
            counted("cuda_export_importers"),
            counted("cuda_imports")
        ],
        [1, 1, 1]
    );

    drop(import);
    until("it is let go of", || exported.importers() == 0);
    drop((exported, from, to));
    bench.end();
}

#[test]
fn what_is_asked_for_twice_is_mapped_once() {
    let bench = Bench::new();
    let (from, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&from).unwrap();
    let import = || to.domain().import(exported.description()).unwrap();
    let (first, second) = (import(), import());
    ready(&first);
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(exported.importers(), 1);
    drop(first);
    std::thread::sleep(MOMENT);
    assert_eq!(exported.importers(), 1, "the other is there");
    drop(second);
    until("both have let go", || exported.importers() == 0);
    // And again.
    let third = import();
    ready(&third);
    assert_eq!(exported.importers(), 1);
    drop((third, exported, from, to));
    bench.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// Runs of two imports and segments with other edges, against a model.
    #[test]
    fn runs_and_segments_may_have_any_edges(
        runs in prop::collection::vec((0usize..2, 0u64..4000, 0u64..3000), 1..40),
        gaps in prop::collection::vec((0u64..50, 1u64..5000), 1..60),
    ) {
        let bench = Bench::new();
        let sources = [bench.region(8192), bench.region(8192)];
        let to = bench.region(LENGTH);
        let models = [pattern(8192, 4), pattern(8192, 5)];
        let exported = sources.each_ref().map(|source| export(source).unwrap());
        let imports = exported.each_ref().map(|exported| to.domain().import(exported.description()).unwrap());
        for (index, import) in imports.iter().enumerate() {
            bench.fake.write(sources[index].address(), &models[index]).unwrap();
            ready(import);
        }
        let stream: Vec<u8> = runs
            .iter()
            .flat_map(|(which, offset, length)| &models[*which][*offset as usize..(*offset + *length) as usize])
            .copied()
            .collect();
        let (mut at, mut left) = (0, stream.len() as u64);
        let mut segments = Vec::new();
        for (gap, length) in gaps.iter().cycle() {
            let length = left.min(*length);
            segments.push(segment(0, at + gap, length));
            (at, left) = (at + gap + length, left - length);
            if left == 0 {
                break;
            }
        }
        let runs: Vec<_> = runs.iter().map(|(which, offset, length)| run(&imports[*which], *offset, *length)).collect();
        copy(&to, &runs, &segments).unwrap();
        let after = bytes_of(&bench.fake, &to);
        let taken: Vec<u8> = segments
            .iter()
            .flat_map(|segment| &after[segment.offset as usize..(segment.offset + segment.length) as usize])
            .copied()
            .collect();
        prop_assert!(taken == stream);
        let written: usize = after.iter().filter(|byte| **byte != 0).count();
        prop_assert!(written <= stream.len(), "nothing beside it");
        drop((imports, exported, sources, to));
        bench.end();
    }
}

#[test]
fn what_lies_outside_is_not_copied() {
    let bench = Bench::new();
    let (from, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&from).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    let refused = |runs: &[ImportedRun<'_>], segments: &[Segment]| {
        let error = copy(&to, runs, segments).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    };
    let inside = || segment(0, 0, 100);
    refused(&[run(&import, LENGTH - 99, 100)], &[inside()]);
    refused(&[run(&import, u64::MAX - 10, 100)], &[inside()]);
    refused(&[run(&import, 0, 100)], &[segment(0, LENGTH - 99, 100)]);
    refused(&[run(&import, 0, 100)], &[segment(1, 0, 100)]);
    refused(&[run(&import, 0, 99)], &[inside()]);
    refused(&[run(&import, 0, 101)], &[inside()]);
    copy(&to, &[run(&import, LENGTH - 100, 100)], &[inside()]).unwrap();
    // Another driver's import is none of this one's.
    let other = Cuda::load(&config(&bench.fake, Gather::Auto)).unwrap();
    let address = bench.engine.allocate(LENGTH as usize).unwrap();
    let there = region(&other, address, LENGTH).unwrap();
    let error = copy(&there, &[run(&import, 0, 100)], &[inside()]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    drop((there, other, exported, import, from, to));
    bench.end();
}

#[test]
fn another_device_reaches_the_memory_by_peer_access() {
    let bench = Bench::new();
    let other = bench.fake.engine(1).unwrap();
    let from = region(&bench.cuda, other.allocate(LENGTH as usize).unwrap(), LENGTH).unwrap();
    let to = bench.region(LENGTH);
    let model = pattern(LENGTH as usize, 2);
    bench.fake.write(from.address(), &model).unwrap();
    let exported = export(&from).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    assert!(bytes_of(&bench.fake, &to) == model);
    assert_eq!(bench.fake.count("cuCtxEnablePeerAccess"), 1);
    // Kernels need it more than copies do.
    let small: Vec<_> = (0..64u64).map(|index| run(&import, index * 8192, 4096)).collect();
    let places: Vec<_> = (0..64u64).map(|index| segment(0, (63 - index) * 8192, 4096)).collect();
    copy(&to, &small, &places).unwrap();
    assert!(bytes_of(&bench.fake, &to)[..4096] == model[63 * 8192..63 * 8192 + 4096]);
    drop((exported, import, from, to));
    bench.end();
}

#[test]
fn mappings_are_mapped_anew_for_another_device_and_used_as_they_are_on_their_own() {
    let bench = Bench::new();
    let other = bench.fake.engine(1).unwrap();
    let lengths = [BLOCK, 2 * BLOCK, BLOCK];
    let start = bench.engine.map(&lengths, true).unwrap();
    let (offset, length) = (BLOCK as u64 / 2, 3 * BLOCK as u64);
    let from = region(&bench.cuda, start + offset, length).unwrap();
    let model = pattern(length as usize, 6);
    bench.fake.write(from.address(), &model).unwrap();
    let exported = export(&from).unwrap();
    let near = bench.region(length);
    let far = region(&bench.cuda, other.allocate(length as usize).unwrap(), length).unwrap();
    let here = take_all(&near, exported.description()).unwrap();
    assert!(bytes_of(&bench.fake, &near) == model);
    assert_eq!(bench.fake.count("cuMemImportFromShareableHandle"), 0);
    let there = take_all(&far, exported.description()).unwrap();
    assert!(bytes_of(&bench.fake, &far) == model);
    assert_eq!(bench.fake.count("cuMemImportFromShareableHandle"), 3);
    assert_eq!(exported.importers(), 2, "one for each device");
    drop((here, there));
    until("both are let go of", || exported.importers() == 0);
    drop((exported, from, near, far));
    bench.engine.unmap(start, &lengths).unwrap();
    bench.end();
}

#[test]
fn memory_that_has_no_handle_for_others_is_refused_with_the_reason() {
    let bench = Bench::new();
    let stream = bench.engine.stream().unwrap();
    let pool = bench.engine.allocate_from_pool(LENGTH as usize, stream).unwrap();
    let mapped = bench.engine.map_private(&[BLOCK]).unwrap();
    for (address, why) in [(pool, "memory of a pool"), (mapped, "without descriptors")] {
        let made = region(&bench.cuda, address, LENGTH).unwrap();
        let error = export(&made).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(why), "{error}");
    }
    bench.engine.unmap(mapped, &[BLOCK]).unwrap();
    bench.end();
}

#[test]
fn without_peer_access_it_is_not_imported_and_the_reason_is_kept() {
    let bench = Bench::with(&[("gpu1", "peer", "off")], Gather::Auto);
    let other = bench.fake.engine(1).unwrap();
    let start = other.map(&[BLOCK], true).unwrap();
    for address in [other.allocate(BLOCK).unwrap(), start] {
        let from = region(&bench.cuda, address, LENGTH).unwrap();
        let to = bench.region(LENGTH);
        let exported = export(&from).unwrap();
        let error = take_all(&to, exported.description()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("does not reach"), "{error}");
        until("it is let go of", || exported.importers() == 0);
        let notes = bench.cuda.notes();
        assert!(notes.iter().any(|note| note.contains("does not reach")), "{notes:?}");
    }
    other.unmap(start, &[BLOCK]).unwrap();
    bench.end();
}

#[test]
fn a_recall_waits_for_the_copies_under_way_and_no_more_are_started() {
    let bench = Bench::new();
    let (from, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let model = pattern(LENGTH as usize, 7);
    bench.fake.write(from.address(), &model).unwrap();
    for by_drop in [false, true] {
        let mut exported = Some(export(&from).unwrap());
        let description = exported.as_ref().unwrap().description().to_vec();
        let import = take_all(&to, &description).unwrap();
        bench.fake.set_now("*", "stall", "own").unwrap();
        let (domain, all) = (to.domain(), [segment(0, 0, LENGTH)]);
        let regions = [to.clone()];
        let ticket = domain
            .start_import_copy(&[run(&import, 0, LENGTH)], &regions, &all)
            .unwrap();
        let running = || assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running);
        running();
        match by_drop {
            false => exported.as_ref().unwrap().recall(),
            true => drop(exported.take()),
        }
        let error = gone(&import);
        assert_eq!(error.kind(), ErrorKind::NotRegistered, "{error}");
        let again = domain.start_import_copy(&[run(&import, 0, 1)], &regions, &[segment(0, 0, 1)]);
        assert_eq!(again.unwrap_err().kind(), ErrorKind::NotRegistered);
        // Nor is it given to anybody else, though it is still there.
        let second = domain.import(&description).unwrap();
        let error = gone(&second);
        assert!(error.to_string().contains("not shared"), "{error}");
        std::thread::sleep(MOMENT);
        running();
        assert_eq!(exported.as_ref().map_or(1, |exported| exported.importers()), 1);
        if by_drop {
            assert!(Arc::strong_count(&from) > 1, "the region is kept");
        }
        bench.fake.set_now("*", "stall", "off").unwrap();
        wait(&**domain, ticket).unwrap();
        assert!(bytes_of(&bench.fake, &to) == model);
        if let Some(exported) = exported {
            until("it is let go of", || exported.importers() == 0);
        }
        until("the region is given back", || Arc::strong_count(&from) == 1);
        // Who asks now is too late.
        let late = to.domain().import(&description).unwrap();
        assert_eq!(gone(&late).kind(), ErrorKind::NotRegistered);
    }
    drop((from, to));
    bench.end();
}

#[test]
fn an_import_that_is_dropped_stays_mapped_until_its_copies_are_over() {
    let bench = Bench::new();
    let (from, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&from).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    bench.fake.set_now("*", "stall", "own").unwrap();
    let domain = to.domain();
    let all = [segment(0, 0, LENGTH)];
    let ticket = domain
        .start_import_copy(&[run(&import, 0, LENGTH)], std::slice::from_ref(&to), &all)
        .unwrap();
    assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running);
    drop(import);
    std::thread::sleep(MOMENT);
    assert_eq!(exported.importers(), 1);
    bench.fake.set_now("*", "stall", "off").unwrap();
    wait(&**domain, ticket).unwrap();
    until("it is let go of", || exported.importers() == 0);
    drop((exported, from, to));
    bench.end();
}

#[test]
fn the_end_of_the_owners_driver_takes_everything_back() {
    let bench = Bench::new();
    let (from, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let owner = Cuda::load(&config(&bench.fake, Gather::Auto)).unwrap();
    let theirs = region(&owner, from.address(), LENGTH).unwrap();
    let exported = export(&theirs).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    drop(owner);
    assert_eq!(exported.importers(), 0, "its end has waited for that");
    assert_eq!(gone(&import).kind(), ErrorKind::NotRegistered);
    assert_eq!(export(&theirs).unwrap_err().kind(), ErrorKind::Closed);
    drop((exported, theirs, import, from, to));
    bench.end();
}

#[test]
fn the_end_of_the_importers_driver_lets_go_of_everything() {
    let bench = Bench::new();
    let from = bench.region(LENGTH);
    let importer = Cuda::load(&config(&bench.fake, Gather::Auto)).unwrap();
    let address = bench.engine.allocate(LENGTH as usize).unwrap();
    let to = region(&importer, address, LENGTH).unwrap();
    let exported = export(&from).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    drop(importer);
    assert!(
        matches!(import.state(), ImportState::Ready),
        "the region keeps the domain"
    );
    drop(to);
    assert_eq!(gone(&import).kind(), ErrorKind::Closed);
    until("it is let go of", || exported.importers() == 0);
    drop((exported, import, from));
    bench.end();
}

#[test]
fn a_copy_that_never_ends_keeps_the_memory_mapped_for_good() {
    let bench = Bench::new();
    let from = bench.region(LENGTH);
    let importer = Cuda::load(&config(&bench.fake, Gather::Auto)).unwrap();
    let address = bench.engine.allocate(LENGTH as usize).unwrap();
    let to = region(&importer, address, LENGTH).unwrap();
    let exported = export(&from).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    bench.fake.set_now("*", "stall", "own").unwrap();
    let all = [segment(0, 0, LENGTH)];
    let domain = to.domain().clone();
    let calls = bench.fake.count("cuMemcpyAsync");
    let ticket = domain
        .start_import_copy(&[run(&import, 0, LENGTH)], std::slice::from_ref(&to), &all)
        .unwrap();
    until("the copy is handed over", || {
        domain.poll_copy(ticket).unwrap();
        bench.fake.count("cuMemcpyAsync") > calls
    });
    drop((import, to, domain, importer));
    std::thread::sleep(MOMENT);
    assert_eq!(exported.importers(), 1);
    bench.fake.set_now("*", "stall", "off").unwrap();
}

#[test]
fn what_is_switched_off_neither_gives_nor_takes() {
    let bench = Bench::new();
    let off = Cuda::load(&CudaConfig {
        share: false,
        ..config(&bench.fake, Gather::Auto)
    })
    .unwrap();
    let from = bench.region(LENGTH);
    let exported = export(&from).unwrap();
    let made = region(&off, from.address(), LENGTH).unwrap();
    assert!(made.domain().export(&made).is_none());
    assert!(made.domain().import(exported.description()).is_none());
    drop((made, off, exported, from));
    bench.end();
}
