//! GPU memory, events and streams through the C interface, with a CUDA driver of the test kit's.
#![allow(clippy::unwrap_used)] // The helpers of tests are tests.

#[macro_use]
mod support;

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::time::Duration;

use kvxfer_fake_cuda::{Engine, FakeCuda};
use kvxfer_ffi::*;
use support::*;

const BYTES: usize = BLOCK_BYTES as usize * BLOCKS as usize;

fn endpoint_with(name: &str, library: &str) -> kvx_endpoint {
    let (mut config, mut endpoint) = (0, 0);
    let (name, library) = (CString::new(name).unwrap(), CString::new(library).unwrap());
    c! {
        ok(kvx_config_from_toml(c"transports = [\"tcp\"]".as_ptr(), &mut config));
        ok(kvx_config_set(config, c"name".as_ptr(), name.as_ptr()));
        ok(kvx_config_set(config, c"cuda.library".as_ptr(), library.as_ptr()));
        ok(kvx_endpoint_create(config, &mut endpoint));
    }
    ok(kvx_config_free(config));
    endpoint
}

fn spec(address: u64, memory: kvx_memory, device: u32) -> kvx_region_spec {
    let mut spec: kvx_region_spec = sized();
    (spec.address, spec.length) = (address as *mut c_void, BYTES as u64);
    (spec.memory, spec.device) = (memory, device);
    spec
}

fn register(endpoint: kvx_endpoint, spec: &kvx_region_spec, pool: &mut kvx_pool) -> kvx_status {
    let layout = opaque();
    let status = c! { kvx_pool_register(endpoint, layout, spec, 1, KVX_ROLE_BOTH, pool) };
    ok(kvx_layout_free(layout));
    status
}

/// Two endpoints whose pools are in device memory, and where that is.
fn device_pair(fake: &FakeCuda, engine: &Engine) -> (Pair, [u64; 2]) {
    let library = fake.library_path();
    let library = library.to_str().unwrap();
    let endpoints = [endpoint_with("prefill-0", library), endpoint_with("decode-0", library)];
    let memory = [0; 2].map(|_: u64| engine.allocate(BYTES).unwrap());
    let mut pools = [0; 2];
    for at in 0..2 {
        ok(register(
            endpoints[at],
            &spec(memory[at], KVX_MEMORY_DEVICE, 1),
            &mut pools[at],
        ));
    }
    let pair = Pair {
        prefill: endpoints[0],
        decode: endpoints[1],
        source: pools[0],
        destination: pools[1],
        address: address(endpoints[0]),
    };
    (pair, memory)
}

fn handle(number: usize) -> *mut c_void {
    number as *mut c_void
}

#[test]
fn parts_wait_for_events_and_streams_for_claims() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let (pair, [from, to]) = device_pair(&fake, &engine);
    let mut info: kvx_region_info = sized();
    ok(c! { kvx_pool_region(pair.source, 0, &mut info) });
    assert_eq!((info.memory, info.address as u64), (KVX_MEMORY_DEVICE, from));
    let (offer, claim) = (pair.offer("request"), pair.claim("request"));
    ok(c! { kvx_claim_fill(claim, &blocks(0, &[7, 8, 9]), 1) });
    ok(c! { kvx_offer_append(offer, &blocks(0, &[1, 2, 3]), 1) });
    let (producer, consumer) = (engine.stream().unwrap(), engine.stream().unwrap());
    fake.set_now("gpu0", "stall", "engine").unwrap();
    let block = |address: u64, block: u64| address + block * u64::from(BLOCK_BYTES);
    engine
        .fill(producer, block(from, 1), 0x11, 3 * BLOCK_BYTES as usize)
        .unwrap();
    let event = engine.event().unwrap();
    engine.record(event, producer).unwrap();
    ok(c! { kvx_claim_hold_stream(claim, handle(consumer)) });
    // The consumer reads where the blocks will be, and keeps what it saw.
    let seen = engine.allocate(BLOCK_BYTES as usize).unwrap();
    fake.write(seen, &[0; 1]).unwrap();
    let status = engine
        .run(|| c! { kvx_offer_ready_after(offer, 0, 1, 0, 0, handle(event)) })
        .unwrap();
    ok(status);
    let mut part: kvx_part = sized();
    (part.offer, part.first_token, part.token_end) = (offer, 1, 2);
    ok(engine
        .run(|| c! { kvx_ready_many_after(pair.prefill, &part, 1, handle(event)) })
        .unwrap());
    let twice = engine.run(|| c! { kvx_ready_many_after(pair.prefill, &part, 1, handle(event)) });
    refused(twice.unwrap(), KVX_ERR_INVALID_ARGUMENT, "released before");
    ok(engine
        .run(|| c! { kvx_offer_finish_after(offer, 3, handle(event)) })
        .unwrap());
    engine.destroy_event(event).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let waits = text(|to, size| c! { kvx_handle_waiting_on(offer, to, size, null_mut()) });
    assert_eq!(waits, "event");
    assert_eq!(c! { kvx_handle_poll(claim, null_mut()) }, KVX_PENDING);
    fake.set_now("gpu0", "stall", "off").unwrap();
    ok(c! { kvx_handle_wait(claim, LONG_MS, null_mut()) });
    ok(c! { kvx_handle_wait(offer, LONG_MS, null_mut()) });
    engine.finish(consumer).unwrap();
    assert_eq!(fake.read(block(to, 9), 4).unwrap(), [0x11; 4]);

    // The same for a push.
    let mut grant_handle = 0;
    let mut grant = 0;
    let there = blocks(0, &[20]);
    ok(c! { kvx_pool_grant(pair.destination, &target(&there), null(), &mut grant_handle) });
    ok(c! { kvx_grant_handle_grant(grant_handle, &mut grant) });
    let event = engine.event().unwrap();
    engine
        .fill(producer, block(from, 4), 0x22, BLOCK_BYTES as usize)
        .unwrap();
    engine.record(event, producer).unwrap();
    let mut options: kvx_transfer_options = sized();
    options.after = handle(event);
    let (here, mut transfer) = (blocks(0, &[4]), 0);
    let pulled = c! { kvx_pull(pair.prefill, grant, pair.source, &target(&here), &options, &mut transfer) };
    refused(pulled, KVX_ERR_INVALID_ARGUMENT, "after");
    let pushed =
        engine.run(|| c! { kvx_push(pair.prefill, pair.source, &target(&here), grant, &options, &mut transfer) });
    ok(pushed.unwrap());
    ok(c! { kvx_handle_wait(transfer, LONG_MS, null_mut()) });
    assert_eq!(fake.read(block(to, 20), 4).unwrap(), [0x22; 4]);
    for handle in [claim, offer, grant_handle, transfer] {
        ok(kvx_handle_free(handle));
    }
    ok(kvx_grant_free(grant));
    assert_eq!(fake.count("synchronising"), 0);
    fake.assert_clean();
}

#[test]
fn what_is_wrong_is_refused_and_leaves_nothing() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(1).unwrap();
    let endpoint = endpoint_with("prefill", fake.library_path().to_str().unwrap());
    let device = engine.allocate(BYTES).unwrap();
    let host = vec![0u8; BYTES];
    let host = host.as_ptr() as u64;
    let mut pool = 0;
    let mut attempt = |spec: &kvx_region_spec, says: &str| {
        refused(register(endpoint, spec, &mut pool), KVX_ERR_INVALID_ARGUMENT, says);
        assert_eq!(pool, 0);
    };
    attempt(&spec(host, KVX_MEMORY_DEVICE, 0), "region 0");
    attempt(&spec(device, KVX_MEMORY_DEVICE, 1), "is of device 1");
    attempt(&spec(device, KVX_MEMORY_HOST, 0), "declared as host memory");
    attempt(&spec(0, KVX_MEMORY_DEVICE, 0), "region 0");
    attempt(&spec(device, 2, 0), "memory = 2");
    ok(register(endpoint, &spec(device, KVX_MEMORY_DEVICE, 2), &mut pool));
    let mut offer = 0;
    ok(c! { kvx_offer_open(endpoint, c"r".as_ptr().cast(), 1, pool, null(), &mut offer) });
    ok(c! { kvx_offer_append(offer, &blocks(0, &[1]), 1) });
    refused(
        c! { kvx_offer_ready_after(offer, 0, 1, 0, 0, null_mut()) },
        KVX_ERR_INVALID_ARGUMENT,
        "null CUDA event",
    );
    refused(
        c! { kvx_offer_finish_after(offer, 1, null_mut()) },
        KVX_ERR_INVALID_ARGUMENT,
        "null CUDA event",
    );
    refused(
        c! { kvx_ready_many_after(endpoint, null(), 0, null_mut()) },
        KVX_ERR_INVALID_ARGUMENT,
        "null CUDA event",
    );
    refused(
        c! { kvx_offer_ready_after(endpoint, 0, 1, 0, 0, handle(8)) },
        KVX_ERR_INVALID_ARGUMENT,
        "offer",
    );
    refused(
        c! { kvx_claim_hold_stream(offer, null_mut()) },
        KVX_ERR_INVALID_ARGUMENT,
        "claim",
    );
    // The offer is as it was.
    ok(kvx_offer_ready(offer, 0, 1, 0, 0));
    ok(kvx_handle_free(offer));
    ok(kvx_pool_free(pool));
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
    fake.assert_clean();
}

#[test]
fn without_a_driver_host_memory_is_served() {
    let endpoint = endpoint_with("prefill", "/nonexistent/libcuda.so.1");
    let mut refused_pool = 0;
    let spec = spec(4096, KVX_MEMORY_DEVICE, 0);
    refused(
        register(endpoint, &spec, &mut refused_pool),
        KVX_ERR_UNSUPPORTED,
        "/nonexistent/libcuda.so.1",
    );
    let pool = pool(endpoint, KVX_ROLE_BOTH);
    ok(kvx_pool_free(pool));
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
}
