//! The fuzz targets' seed corpus, replayed on stable Rust.
//!
//! `KVXFER_WRITE_SEEDS=1 cargo test -p kvxfer-core --test wire_corpus` writes the generated seeds anew.
#![allow(clippy::unwrap_used)]

mod wire_common;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use kvxfer_core::wire::{encode, fuzzing};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Generated seeds of each target.
const SEEDS: usize = 24;

fn targets() -> BTreeMap<&'static str, fn(&[u8]) -> bool> {
    BTreeMap::from([
        ("session_frame", fuzzing::session_frame as fn(&[u8]) -> bool),
        ("lane_bytes", fuzzing::lane_bytes),
        ("address", fuzzing::address),
        ("grant_bytes", fuzzing::grant_bytes),
        ("layout", fuzzing::layout),
    ])
}

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

/// The same values at each run.
fn generated() -> BTreeMap<(&'static str, String), Vec<u8>> {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut seeds = BTreeMap::new();
    let mut add = |target, index: usize, bytes| {
        seeds.insert((target, format!("seed-{index:02}")), bytes);
    };
    for index in 0..SEEDS {
        let frame = draw(&mut runner, wire_common::frame());
        add("session_frame", index, encode(&frame).unwrap());
        let hello = draw(&mut runner, wire_common::lane_hello()).encode();
        let header = draw(&mut runner, wire_common::lane_header()).encode();
        let trailer = draw(&mut runner, wire_common::trailer()).encode();
        let lane = match index % 3 {
            0 => hello.to_vec(),
            1 => header.to_vec(),
            _ => trailer.to_vec(),
        };
        add("lane_bytes", index, lane);
        let address = draw(&mut runner, wire_common::address());
        let address = match index % 2 {
            0 => address.to_string().into_bytes(),
            _ => address.to_bytes(),
        };
        add("address", index, address);
        let grant = draw(&mut runner, wire_common::grant());
        add("grant_bytes", index, grant.to_bytes().unwrap());
    }
    for (index, layout) in wire_common::layouts().iter().enumerate() {
        add("layout", index, postcard::to_allocvec(layout).unwrap());
    }
    seeds
}

fn draw<T: std::fmt::Debug>(runner: &mut TestRunner, strategy: impl Strategy<Value = T>) -> T {
    strategy.new_tree(runner).unwrap().current()
}

#[test]
fn every_file_of_the_corpus_is_survived() {
    if std::env::var_os("KVXFER_WRITE_SEEDS").is_some() {
        for ((target, name), bytes) in generated() {
            fs::create_dir_all(corpus().join(target)).unwrap();
            fs::write(corpus().join(target).join(name), bytes).unwrap();
        }
    }
    for (target, run) in targets() {
        let (mut seeds, mut parsed) = (0, 0);
        for entry in fs::read_dir(corpus().join(target)).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            // Shown if it fails.
            eprintln!("{}", path.display());
            let seed = path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"seed-"));
            seeds += usize::from(seed);
            parsed += usize::from(run(&bytes) && seed);
        }
        assert!(
            seeds >= 3 && parsed > seeds / 2,
            "{parsed} of {seeds} seeds of {target} are of this format: write them anew with KVXFER_WRITE_SEEDS=1"
        );
    }
}

#[test]
fn all_that_is_generated_is_parsed() {
    for ((target, name), bytes) in generated() {
        assert!(targets()[target](&bytes), "{target} {name}");
    }
}
