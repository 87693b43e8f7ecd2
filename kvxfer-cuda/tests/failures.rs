//! Every call of the driver fails in turn: what comes of it is a typed error or the right bytes, nothing is leaked, and
//! another device goes on.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use common::share::{Child, bytes_of, export, take_all};
use common::{Staging, config, pattern, region, segment, until, wait};
use crossbeam::channel::unbounded;
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_cuda::{Cuda, Gather};
use kvxfer_fake_cuda::{Engine, FakeCuda};
use parking_lot::Mutex;

const PIECE: u64 = 1024;
const PIECES: u64 = 64;

/// What gives something back: when it fails, that is not given back, and nobody can do anything about it.
const GIVING_BACK: &[&str] = &[
    "cuCtxPopCurrent_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuIpcCloseMemHandle",
    "cuMemAddressFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
];

struct Machine {
    engines: [Engine; 2],
    pools: [u64; 2],
    mapped: u64,
    stream: usize,
    event: usize,
    /// The driver is too old for them.
    no_dmabufs: bool,
    /// What another process exports.
    theirs: Vec<u8>,
    fake: FakeCuda,
}

/// The other process: it exports a region of each machine. (Starting one for each would take too long.)
static OWNER: Mutex<Option<Child>> = Mutex::new(None);

fn theirs(fake: &FakeCuda) -> Vec<u8> {
    let mut owner = OWNER.lock();
    owner.get_or_insert_with(Child::owner).exports(fake, 0, SHARED)
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(owner) = &mut *OWNER.lock() {
            let directory = self.fake.directory().to_str().unwrap();
            owner.ask(&format!("drop {directory}"));
        }
    }
}

const SHARED: u64 = 64 << 10;

const MAPPINGS: [usize; 2] = [2 << 20, 2 << 20];

impl Machine {
    fn new(settings: &[(&str, &str, &str)]) -> Machine {
        let mut all = vec![("*", "writes_ordering", "none")];
        all.extend_from_slice(settings);
        let fake = FakeCuda::with(&all).unwrap();
        let engines = [fake.engine(0).unwrap(), fake.engine(1).unwrap()];
        Machine {
            pools: [0, 1].map(|device: usize| engines[device].allocate((2 * PIECES * PIECE) as usize).unwrap()),
            mapped: engines[0].map(&MAPPINGS, true).unwrap(),
            stream: engines[0].stream().unwrap(),
            event: engines[0].event().unwrap(),
            theirs: theirs(&fake),
            no_dmabufs: settings.iter().any(|(_, key, _)| *key == "driver_version"),
            engines,
            fake,
        }
    }
}

fn segments() -> Vec<Segment> {
    (0..PIECES).map(|index| segment(0, 2 * index * PIECE, PIECE)).collect()
}

#[test]
#[ignore = "started by the tests below"]
fn child_main() {
    common::share::child_main();
}

/// Out and in of one region, with the bytes checked.
fn copies(machine: &Machine, made: &Arc<Region>, seed: u8) -> Result<()> {
    let domain = made.domain();
    let model = pattern((2 * PIECES * PIECE) as usize, seed);
    machine.fake.write(made.address(), &model).unwrap();
    let picked: Vec<u8> = model.chunks(PIECE as usize).step_by(2).flatten().copied().collect();
    let staging = Staging::pinned(domain, PIECES * PIECE)?;
    let regions = [made.clone()];
    wait(&**domain, domain.start_gather(&regions, &segments(), staging.view())?)?;
    assert!(staging.read() == picked, "what is done is right");
    staging
        .memory
        .copy_in(0, &vec![seed; (PIECES * PIECE) as usize])
        .unwrap();
    wait(&**domain, domain.start_scatter(staging.view(), &regions, &segments())?)?;
    let after = machine.fake.read(made.address(), model.len()).unwrap();
    assert!(
        after
            .chunks(PIECE as usize)
            .step_by(2)
            .flatten()
            .all(|byte| *byte == seed)
    );
    made.copy_in(5, &[seed; 3000])?;
    let mut out = [0; 3000];
    made.copy_out(5, &mut out)?;
    assert_eq!(out, [seed; 3000]);
    domain.verify(made)
}

/// Everything once. Every failure is kept; what does not need what failed goes on.
fn everything(machine: &Machine, gather: Gather) -> (Option<Cuda>, Vec<Error>) {
    let mut errors = Vec::new();
    let mut keep = |result: Result<()>| errors.extend(result.err());
    let cuda = match Cuda::load(&config(&machine.fake, gather)) {
        Ok(cuda) => cuda,
        Err(error) => return (None, vec![error]),
    };
    keep(cuda.classify(machine.pools[0]).map(drop));
    for (pool, seed) in machine.pools.iter().zip(1..) {
        match region(&cuda, *pool, 2 * PIECES * PIECE) {
            Ok(made) => {
                keep(copies(machine, &made, seed));
                keep(made.domain().settle_writes(&made));
                keep(dmabufs(machine, &made));
            }
            Err(error) => keep(Err(error)),
        }
    }
    match region(&cuda, machine.mapped, 4 << 20) {
        Ok(made) => keep(dmabufs(machine, &made)),
        Err(error) => keep(Err(error)),
    }
    keep(shared(machine, &cuda));
    keep(events(machine, &cuda));
    (Some(cuda), errors)
}

/// A region of each kind goes from device to device, in this process and from another.
fn shared(machine: &Machine, cuda: &Cuda) -> Result<()> {
    let (mut first, mut unexpected) = (Ok(()), 0);
    let mut keep = |result: Result<()>| {
        unexpected += u32::from(result.is_err());
        if first.is_ok() {
            first = result;
        }
    };
    // The second lies in two mappings.
    for address in [machine.pools[0], machine.mapped + MAPPINGS[0] as u64 - SHARED / 2] {
        keep(take_from(machine, cuda, address));
    }
    let into = machine.engines[1].allocate(SHARED as usize).unwrap();
    keep(region(cuda, into, SHARED).and_then(|into| {
        let import = take_all(&into, &machine.theirs)?;
        assert!(
            bytes_of(&machine.fake, &into) == pattern(SHARED as usize, 9),
            "what is done is right"
        );
        drop(import);
        Ok(())
    }));
    assert!(unexpected <= 1, "one failure of a call ends one of them");
    first
}

fn take_from(machine: &Machine, cuda: &Cuda, address: u64) -> Result<()> {
    let from = region(cuda, address, SHARED)?;
    let into = region(cuda, machine.engines[1].allocate(SHARED as usize).unwrap(), SHARED)?;
    let model = pattern(SHARED as usize, 8);
    machine.fake.write(address, &model).unwrap();
    let exported = export(&from)?;
    let import = take_all(&into, exported.description())?;
    assert!(bytes_of(&machine.fake, &into) == model, "what is done is right");
    drop(import);
    until("it is let go of", || exported.importers() == 0);
    Ok(())
}

fn dmabufs(machine: &Machine, made: &Region) -> Result<()> {
    match made.domain().dmabufs(made).unwrap() {
        Err(error) if machine.no_dmabufs && error.kind() == ErrorKind::Unsupported => Ok(()),
        result => result.map(drop),
    }
}

fn events(machine: &Machine, cuda: &Cuda) -> Result<()> {
    let (engine, stream) = (&machine.engines[0], machine.stream);
    // SAFETY: a live stream.
    let hold = unsafe { cuda.hold_stream(stream as *mut c_void) };
    engine.record(machine.event, stream).unwrap();
    // SAFETY: a live event.
    let captured = unsafe { cuda.capture(machine.event as *mut c_void) };
    let asked = captured
        .as_ref()
        .map_err(Clone::clone)
        .and_then(|event| event.happened());
    if let (Ok(happened), Ok(_)) = (&asked, &hold) {
        assert!(!happened, "it is behind a stream that is held");
    }
    let (sender, told) = unbounded();
    if let Ok(event) = captured {
        cuda.watch(event, Box::new(move |result| drop(sender.send(result))));
    }
    let held = hold.map(kvxfer_cuda::StreamHold::release);
    engine.finish(stream).unwrap();
    asked?;
    told.recv_timeout(common::PATIENCE).unwrap()?;
    held
}

/// Runs everything with one failure; panics if something is wrong with what comes of it. True if an error came of it.
fn run(gather: Gather, settings: &[(&str, &str, &str)], call: &str, code: &str, skip: u64) -> bool {
    let machine = Machine::new(settings);
    let fail = format!("{call}:{code}:1:{skip}");
    let fixed = settings.iter().find(|(_, key, _)| *key == "fail");
    let fail = fixed.map_or(fail.clone(), |(_, _, fixed)| format!("{fixed},{fail}"));
    machine.fake.set_now("*", "fail", &fail).unwrap();
    let (cuda, errors) = everything(&machine, gather);
    for error in &errors {
        assert!(
            !matches!(error.kind(), ErrorKind::Internal | ErrorKind::DeadlineExceeded),
            "{fail}: {error}"
        );
        // "Nothing is there", and "no attribute of this driver's", are answers too.
        let nothing = [
            ErrorKind::OutOfBounds,
            ErrorKind::NotRegistered,
            ErrorKind::InvalidArgument,
        ];
        let answer = nothing.contains(&error.kind()) || call == "cuDeviceGetAttribute";
        let named = error.to_string().contains(call) || answer;
        assert!(named, "{fail}: {error}");
    }
    assert!(
        errors.len() <= 2,
        "{fail}: one failure of a call is not the end of everything: {errors:?}"
    );
    machine.fake.set_now("*", "fail", "").unwrap();
    if let Some(cuda) = cuda {
        let made = region(&cuda, machine.pools[1], 2 * PIECES * PIECE).unwrap();
        copies(&machine, &made, 77).unwrap_or_else(|error| panic!("{fail}: the other device: {error}"));
    }
    let leaks = machine.fake.leaks();
    assert!(leaks.is_empty() || GIVING_BACK.contains(&call), "{fail}: {leaks:?}");
    assert_eq!(machine.fake.count("synchronising"), 0, "{fail}");
    let violations = machine.fake.violations();
    assert!(
        violations.is_empty() || GIVING_BACK.contains(&call),
        "{fail}: {violations:?}"
    );
    machine.engines[0].unmap(machine.mapped, &MAPPINGS).unwrap();
    !errors.is_empty()
}

/// The first calls of each function, one from the middle, and the last.
fn chosen(count: u64) -> Vec<u64> {
    let mut chosen: Vec<u64> = [0, 1, 2, count / 2, count.saturating_sub(1)].into();
    chosen.retain(|skip| *skip < count);
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

fn every_call(gather: Gather, settings: &[(&str, &str, &str)], codes: &[&str]) {
    let machine = Machine::new(settings);
    for (_, key, value) in settings {
        if *key == "fail" {
            machine.fake.set_now("*", key, value).unwrap();
        }
    }
    let (cuda, errors) = everything(&machine, gather);
    assert!(errors.is_empty(), "{errors:?}");
    drop(cuda);
    let calls: BTreeMap<String, u64> = machine.fake.calls().into_iter().collect();
    assert!(machine.fake.leaks().is_empty());
    drop(machine);
    let (mut runs, mut failed) = (0, 0);
    for (call, count) in &calls {
        for code in codes {
            for skip in chosen(*count) {
                runs += 1;
                failed += u32::from(run(gather, settings, call, code, skip));
            }
        }
    }
    eprintln!(
        "{gather:?}: {} functions, {runs} runs, {failed} ended with an error",
        calls.len()
    );
    assert!(calls.len() > 30 && failed * 3 > runs, "the failures are noticed");
}

#[test]
fn every_call_fails_in_turn() {
    every_call(Gather::Auto, &[], &["UNKNOWN", "OUT_OF_MEMORY"]);
}

#[test]
fn every_call_fails_in_turn_without_kernels() {
    every_call(Gather::Batch, &[], &["INVALID_VALUE"]);
}

#[test]
fn every_call_fails_in_turn_with_the_oldest_driver() {
    let settings = [("*", "driver_version", "11040"), ("*", "compute", "5.2")];
    every_call(Gather::Auto, &settings, &["NOT_SUPPORTED"]);
}
