//! A pool whose GPU memory another process on this host has mapped: it is closed only once that has let go.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvxfer::{ClaimOptions, Config, Endpoint, ErrorKind, OfferOptions, Pool, PoolLayout, Role, Selection};
use kvxfer_cases::common::*;
use kvxfer_fake_cuda::{Engine, FakeCuda};
use kvxfer_testkit::process::{ChildProcess, role};

const BLOCK: u32 = 64 << 10;
const BLOCKS_HERE: u32 = 16;
const BYTES: u64 = BLOCK as u64 * BLOCKS_HERE as u64;

fn with(fake: &FakeCuda) -> Config {
    let mut config = config();
    config.cuda.library = fake.library_path().to_str().unwrap().to_owned();
    config
}

/// Says when it is dropped.
struct Kept(Arc<AtomicBool>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn pool(endpoint: &Endpoint, engine: &Engine) -> (Pool, u64, Arc<AtomicBool>) {
    let address = engine.allocate(BYTES as usize).unwrap();
    let freed = Arc::new(AtomicBool::new(false));
    let kept = Box::new(Kept(Arc::clone(&freed)));
    // SAFETY: the engine's, freed by none of these tests before the keepalive is dropped.
    let pool = unsafe {
        let region = endpoint.cuda().unwrap().region(address, BYTES, kept).unwrap();
        let layout = PoolLayout::opaque(BLOCK, BLOCKS_HERE).unwrap();
        endpoint.register(layout, vec![region], Role::Both).unwrap()
    };
    (pool, address, freed)
}

fn imported(endpoint: &Endpoint) -> bool {
    let metrics = endpoint.metrics();
    let mut lines = metrics.lines();
    lines.any(|line| line.starts_with("kvxfer_cuda_import_bytes_total") && !line.ends_with(" 0"))
}

/// Claims what it is offered, and then waits to be killed.
#[test]
#[ignore = "started by the test below"]
fn child_main() {
    if role().as_deref() != Some("decode") {
        return;
    }
    let fake = FakeCuda::attach(Path::new(&std::env::var("FAKE").unwrap())).unwrap();
    let engine = fake.engine(1).unwrap();
    let decode = endpoint_with("decode", with(&fake));
    let (destination, _, _) = pool(&decode, &engine);
    let prefill = [std::env::var("PREFILL").unwrap().parse().unwrap()];
    let mut key = 0;
    // The first ones may be sent as bytes: nothing waits for the mapping.
    while !imported(&decode) {
        key += 1;
        println!("wants {key}");
        let claim = decode
            .claim(format!("r{key}"), &destination, &prefill, ClaimOptions::default())
            .unwrap();
        claim.fill(Selection::whole_blocks(1, vec![5])).unwrap();
        claim.arrived().wait(LONG).unwrap();
    }
    println!("copied");
    std::io::stdin().lines().for_each(drop);
}

#[test]
fn a_pool_is_closed_when_others_have_let_go_of_its_memory() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let prefill = endpoint_with("prefill", with(&fake));
    let (source, address, freed) = pool(&prefill, &engine);
    let directory = fake.directory().to_str().unwrap().to_owned();
    let at = prefill.address().to_string();
    let mut child = ChildProcess::test("child_main", "decode", &[("FAKE", &directory), ("PREFILL", &at)]).unwrap();
    loop {
        let line = child.expect_line("", LONG).unwrap();
        if line.contains("copied") {
            break;
        }
        let Some((_, key)) = line.split_once("wants ") else {
            continue;
        };
        let offer = prefill
            .offer(format!("r{key}"), &source, OfferOptions::default())
            .unwrap();
        offer.append(Selection::whole_blocks(1, vec![2])).unwrap();
        offer.ready(0..1, ..).unwrap();
        offer.finish(1).unwrap();
        offer.released().wait(LONG).unwrap();
    }
    child.stop().unwrap();
    // Nothing of it is under way: what refers to it is the other's mapping.
    let until_mapped_alone = |take_out: &dyn Fn() -> kvxfer::Result<()>| loop {
        match take_out() {
            Err(error) if error.to_string().contains("mapped") => break error,
            Err(error) if error.kind() == ErrorKind::Busy => std::thread::yield_now(),
            result => panic!("{result:?}"),
        }
    };
    let error = until_mapped_alone(&|| source.suspend());
    assert_eq!(error.kind(), ErrorKind::Busy);
    // In use again, it still counts who has not let go of what it was before.
    source.resume().unwrap();
    let error = until_mapped_alone(&|| source.close());
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(
        error
            .to_string()
            .contains("another endpoint on this host has it mapped"),
        "{error}"
    );
    assert_eq!(source.id().unwrap_err().kind(), ErrorKind::Closed, "it is out of use");
    assert_eq!(source.close().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(source.suspend().unwrap_err().kind(), ErrorKind::Closed);
    child.resume().unwrap();
    source.close_wait(LONG).unwrap();
    source.close().unwrap();
    assert!(!freed.load(Ordering::SeqCst), "the pool still has it");
    drop(source);
    eventually("what keeps the memory is dropped", || freed.load(Ordering::SeqCst));
    engine.free(address).unwrap();
    drop(child);
    drop(prefill);
    fake.assert_clean();
}
