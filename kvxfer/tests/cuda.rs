//! Pools in GPU memory, ordering against the engine's kernels, and what is refused: with a driver of the test kit's.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvxfer::memory::HostMemory;
use kvxfer::{ClaimOptions, Config, Endpoint, ErrorKind, OfferOptions, Pool, PoolLayout, Region, Role, Selection};
use kvxfer_cases::common::*;
use kvxfer_fake_cuda::{Engine, FakeCuda};

const BLOCK: u32 = 64 << 10;
const BLOCKS_HERE: u32 = 16;
const BYTES: u64 = BLOCK as u64 * BLOCKS_HERE as u64;

fn with(fake: &FakeCuda) -> Config {
    let mut config = config();
    config.cuda.library = fake.library_path().to_str().unwrap().to_owned();
    config
}

fn opaque() -> PoolLayout {
    PoolLayout::opaque(BLOCK, BLOCKS_HERE).unwrap()
}

/// An endpoint with a pool in device memory, and where that is.
fn device_side(name: &str, fake: &FakeCuda, engine: &Engine) -> (Endpoint, Pool, u64) {
    let endpoint = endpoint_with(name, with(fake));
    let address = engine.allocate(BYTES as usize).unwrap();
    // SAFETY: the engine's, freed by none of these tests.
    let pool = unsafe {
        let region = endpoint.cuda().unwrap().region(address, BYTES, Box::new(())).unwrap();
        endpoint.register(opaque(), vec![region], Role::Both).unwrap()
    };
    (endpoint, pool, address)
}

fn handle(number: usize) -> *mut c_void {
    number as *mut c_void
}

#[test]
fn a_part_waits_for_its_kernel_and_a_kernel_for_its_claim() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let (prefill, source, from) = device_side("prefill", &fake, &engine);
    let (decode, destination, to) = device_side("decode", &fake, &engine);
    let offer = prefill.offer("r", &source, OfferOptions::default()).unwrap();
    offer.append(Selection::whole_blocks(1, vec![2])).unwrap();
    let claim = decode
        .claim("r", &destination, &[prefill.address()], ClaimOptions::default())
        .unwrap();
    claim.fill(Selection::whole_blocks(1, vec![5])).unwrap();
    // What consumes the block is queued before anything has come.
    let stream = engine.stream().unwrap();
    // SAFETY: a live stream of the driver's.
    unsafe { claim.hold_stream(handle(stream)) }.unwrap();
    let (seen, place) = (Arc::new(AtomicBool::new(false)), to + 5 * u64::from(BLOCK));
    let read = fake.read(place, 1).unwrap();
    assert_eq!(read, [0]);
    let fake = Arc::new(fake);
    let consumer = (Arc::clone(&seen), Arc::clone(&fake));
    engine
        .kernel(stream, move || {
            let bytes = consumer.1.read(place, BLOCK as usize).unwrap();
            consumer.0.store(bytes.iter().all(|byte| *byte == 77), Ordering::SeqCst);
        })
        .unwrap();
    // The producer is queued and does not run yet.
    fake.set_now("gpu0", "stall", "engine").unwrap();
    let producer = engine.stream().unwrap();
    engine
        .fill(producer, from + 2 * u64::from(BLOCK), 77, BLOCK as usize)
        .unwrap();
    let event = engine.event().unwrap();
    engine.record(event, producer).unwrap();
    // SAFETY: a live event.
    let after = engine
        .run(|| unsafe { prefill.after_cuda_event(handle(event)) })
        .unwrap()
        .unwrap();
    // It is the caller's again.
    engine.destroy_event(event).unwrap();
    offer.ready_after(0..1, .., &after).unwrap();
    offer.finish(1).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(offer.waiting_on().unwrap().what, "event");
    assert!(claim.arrived().poll().is_none() && !seen.load(Ordering::SeqCst));
    fake.set_now("gpu0", "stall", "off").unwrap();
    claim.arrived().wait(LONG).unwrap();
    offer.released().wait(LONG).unwrap();
    engine.finish(stream).unwrap();
    assert!(seen.load(Ordering::SeqCst), "the consumer ran after the arrival");
    assert_eq!(fake.count("synchronising"), 0);
    fake.assert_clean();
}

#[test]
fn a_stream_goes_on_however_its_claim_ends() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let (prefill, _source, _) = device_side("prefill", &fake, &engine);
    for how in ["cancel", "drop", "deadline", "declined", "close", "ended"] {
        let (decode, destination, _) = device_side("decode", &fake, &engine);
        let options = ClaimOptions {
            deadline: Some(Duration::from_millis(if how == "deadline" { 50 } else { 20_000 })),
            ..ClaimOptions::default()
        };
        let claim = decode.claim(how, &destination, &[prefill.address()], options).unwrap();
        if how == "ended" {
            claim.decline();
            let _ = claim.arrived().wait(LONG);
        }
        let stream = engine.stream().unwrap();
        // SAFETY: a live stream.
        unsafe { claim.hold_stream(handle(stream)) }.unwrap();
        let gone_on = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&gone_on);
        engine
            .kernel(stream, move || noted.store(true, Ordering::SeqCst))
            .unwrap();
        if !matches!(how, "ended" | "deadline") {
            std::thread::sleep(Duration::from_millis(10));
            assert!(!gone_on.load(Ordering::SeqCst), "{how}: it went on too early");
        }
        match how {
            "cancel" => claim.cancel(),
            "declined" => claim.decline(),
            "drop" => drop(claim),
            "close" => decode.close(LONG).unwrap(),
            _ => {}
        }
        engine.finish(stream).unwrap();
        assert!(gone_on.load(Ordering::SeqCst), "{how}");
        engine.destroy_stream(stream).unwrap();
    }
    fake.assert_clean();
}

#[test]
fn a_pool_mixes_host_and_device_memory() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let mixed = |name: &str, device_first: bool| {
        let endpoint = endpoint_with(name, with(&fake));
        let mut builder = PoolLayout::builder();
        let geometry = kvxfer::layout::Geometry::attention(
            kvxfer::layout::DType::Bf16,
            PER_BLOCK,
            8,
            8,
            kvxfer::layout::Sharding::Heads { rank: 0, size: 1 },
        );
        let group = builder.group("attention", geometry, BLOCKS);
        for (region, kind) in [kvxfer::layout::PlaneKind::Key, kvxfer::layout::PlaneKind::Value]
            .into_iter()
            .enumerate()
        {
            let plane = kvxfer::layout::PlaneSpec::new(group, "0", kind)
                .region(region as u32)
                .order(kvxfer::layout::InnerOrder::NHD);
            builder.plane(plane);
        }
        let layout = builder.build().unwrap();
        let regions = (0..2).map(|region| {
            let length = layout.region_lengths()[region];
            if (region == 0) == device_first {
                let address = engine.allocate(length as usize).unwrap();
                // SAFETY: the engine's, never freed.
                unsafe { endpoint.cuda().unwrap().region(address, length, Box::new(())) }.unwrap()
            } else {
                Region::allocate(length).unwrap()
            }
        });
        let regions = regions.collect();
        // SAFETY: as above.
        let pool = unsafe { endpoint.register(layout.clone(), regions, Role::Both) }.unwrap();
        Side {
            pool,
            endpoint,
            used: gpus::Used::by(""),
        }
    };
    let (prefill, decode) = (mixed("prefill", true), mixed("decode", false));
    let selection = tokens(40, [3, 1, 4]);
    fill(&prefill.pool, &selection, "r", 1);
    poison(&decode.pool, &selection);
    let offer = prefill
        .endpoint
        .offer("r", &prefill.pool, OfferOptions::default())
        .unwrap();
    offer.append(&selection).unwrap();
    offer.finish(40).unwrap();
    let sources = [prefill.endpoint.address()];
    let claim = decode
        .endpoint
        .claim("r", &decode.pool, &sources, ClaimOptions::default())
        .unwrap();
    claim.fill(selection.clone()).unwrap();
    claim.arrived().wait(LONG).unwrap();
    check(&decode.pool, &selection, "r", 1).unwrap();
    let metrics = decode.endpoint.metrics();
    assert!(metrics.contains("cuda_driver_calls_total"), "{metrics}");
    let page = include_str!("../../docs/metrics.md");
    for line in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(
            page.contains(&format!("`{name}`")),
            "docs/metrics.md does not define {name}"
        );
    }
    fake.assert_clean();
}

#[test]
fn memory_that_is_not_what_it_is_declared_as_is_refused() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let endpoint = endpoint_with("prefill", with(&fake));
    let cuda = endpoint.cuda().unwrap();
    let device = engine.allocate(BYTES as usize).unwrap();
    // SAFETY: refused before anything of it is touched.
    let declared = unsafe { Region::from_raw(device as *mut u8, BYTES, Arc::new(HostMemory), Box::new(())) }.unwrap();
    // SAFETY: as above.
    let error = unsafe { endpoint.register(opaque(), vec![declared], Role::Both) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let text = error.to_string();
    assert!(
        text.contains("declared as host memory") && text.contains("0000:17:00.0"),
        "{text}"
    );
    let host = Region::allocate(BYTES).unwrap();
    // SAFETY: refused.
    let error = unsafe { cuda.region(host.address(), BYTES, Box::new(())) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    // What is right goes on.
    // SAFETY: memory that lives.
    let pool = unsafe { endpoint.register(opaque(), vec![host], Role::Both) }.unwrap();
    pool.copy_in(0, 1, 0, &[1; 8]).unwrap();
    let text = endpoint.explain(&"127.0.0.1:1".parse().unwrap());
    assert!(
        text.contains("cuda driver: ") && text.contains("cuda device 0: Fake GPU 0"),
        "{text}"
    );
    fake.assert_clean();
}

#[test]
fn events_that_cannot_be_waited_for_are_refused() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let (prefill, _pool, _) = device_side("prefill", &fake, &engine);
    // SAFETY: null is refused.
    let error = unsafe { prefill.after_cuda_event(std::ptr::null_mut()) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let (stream, event) = (engine.stream().unwrap(), engine.event().unwrap());
    engine.begin_capture(stream).unwrap();
    engine.record(event, stream).unwrap();
    // SAFETY: a live event.
    let error = engine
        .run(|| unsafe { prefill.after_cuda_event(handle(event)) })
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    engine.end_capture(stream).unwrap();
    // Recorded again outside of it, it is good; and so is one that was never recorded.
    engine.record(event, stream).unwrap();
    for event in [event, engine.event().unwrap()] {
        // SAFETY: a live event.
        let after = engine
            .run(|| unsafe { prefill.after_cuda_event(handle(event)) })
            .unwrap()
            .unwrap();
        engine.finish(stream).unwrap();
        let began = std::time::Instant::now();
        while after.outcome().is_none() {
            assert!(began.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(1));
        }
        after.outcome().unwrap().unwrap();
    }
    fake.assert_clean();
}

#[test]
fn a_failed_kernel_ends_its_offer() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let (prefill, source, _) = device_side("prefill", &fake, &engine);
    fake.set_now("gpu0", "stall", "engine").unwrap();
    let (stream, event) = (engine.stream().unwrap(), engine.event().unwrap());
    engine.kernel(stream, || {}).unwrap();
    engine.record(event, stream).unwrap();
    // SAFETY: a live event.
    let after = engine
        .run(|| unsafe { prefill.after_cuda_event(handle(event)) })
        .unwrap()
        .unwrap();
    let offer = prefill.offer("r", &source, OfferOptions::default()).unwrap();
    offer.append(Selection::whole_blocks(1, vec![2])).unwrap();
    offer.ready_after(0..1, .., &after).unwrap();
    fake.set("*", "vanish", "on").unwrap();
    let error = offer.released().wait(LONG).unwrap_err();
    assert!(
        error.to_string().contains("the event that the blocks waited for"),
        "{error}"
    );
    // Its other pools are still served.
    let host = prefill.allocate(opaque(), Role::Both).unwrap();
    let offer = prefill.offer("s", &host, OfferOptions::default()).unwrap();
    offer.append(Selection::whole_blocks(1, vec![2])).unwrap();
    offer.finish(1).unwrap();
}

#[test]
fn without_a_driver_there_is_a_reason() {
    let mut config = config();
    config.cuda.library = "/nonexistent/libcuda.so.1".into();
    let endpoint = endpoint_with("prefill", config);
    let error = endpoint.cuda().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("/nonexistent/libcuda.so.1"), "{error}");
    let pool = endpoint.allocate(opaque(), Role::Both).unwrap();
    // SAFETY: nothing looks at it.
    let error = unsafe { endpoint.after_cuda_event(handle(8)) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let claim = endpoint
        .claim("r", &pool, &["127.0.0.1:1".parse().unwrap()], ClaimOptions::default())
        .unwrap();
    // SAFETY: as above.
    let error = unsafe { claim.hold_stream(handle(8)) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
