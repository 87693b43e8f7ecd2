//! Work of streams: it is done late, in its order, apart from other streams, and is seen to be done.

#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::c_void;
use std::time::Duration;

use common::{Driver, OK, host_bytes, is_readable, set_host, until};
use cudarc::driver::sys::CUresult;
use kvxfer_fake_cuda::FakeCuda;

const LENGTH: usize = 1 << 16;

#[test]
fn device_memory_is_out_of_the_cpus_reach_and_copies_move_it() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host, stream) = (driver.allocate(LENGTH), driver.host(LENGTH), driver.stream());
    assert!(!is_readable(device));
    assert!(is_readable(host));
    let pattern: Vec<u8> = (0..LENGTH).map(|byte| byte as u8).collect();
    set_host(host, &pattern);
    assert_eq!(driver.copy(device, host, LENGTH, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(fake.read(device, LENGTH).unwrap(), pattern);
    set_host(host, &[0; LENGTH]);
    assert_eq!(driver.copy(host + 100, device + 50, 1000, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(host_bytes(host + 100, 1000), pattern[50..1050]);
    assert_eq!(fake.count("copies"), 2);
    assert_eq!(fake.count("synchronising"), 0);
    fake.assert_clean();
}

#[test]
fn a_copys_result_is_not_there_before_its_event() {
    let fake = FakeCuda::with(&[("*", "stall", "copies")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host) = (driver.allocate(LENGTH), driver.host(LENGTH));
    let (stream, event) = (driver.stream(), driver.event());
    fake.write(device, &[7; LENGTH]).unwrap();
    set_host(host, &[7; LENGTH]);
    assert_eq!(driver.query(event), OK, "one that was never recorded has happened");
    assert_eq!(driver.copy(host, device, LENGTH, stream), OK);
    assert_eq!(driver.record(event, stream), OK);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.query(event), CUresult::CUDA_ERROR_NOT_READY);
    assert_eq!(fake.count("copies_in_flight"), 1);
    // Not even if the same bytes were there before.
    assert_ne!(host_bytes(host, LENGTH), [7; LENGTH]);
    fake.set("*", "stall", "off").unwrap();
    assert_eq!(driver.wait(event), OK);
    assert_eq!(host_bytes(host, LENGTH), [7; LENGTH]);
    assert_eq!(fake.count("copies_in_flight"), 0);
    fake.assert_clean();
}

#[test]
fn copies_of_host_memory_take_what_is_there_when_they_are_done() {
    let fake = FakeCuda::with(&[("*", "stall", "copies")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host, stream) = (driver.allocate(LENGTH), driver.host(LENGTH), driver.stream());
    set_host(host, &[1; LENGTH]);
    assert_eq!(driver.copy(device, host, LENGTH, stream), OK);
    set_host(host, &[2; LENGTH]);
    fake.set("*", "stall", "off").unwrap();
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(fake.read(device, LENGTH).unwrap(), [2; LENGTH]);
}

#[test]
fn a_copy_may_be_torn() {
    let fake = FakeCuda::with(&[("*", "tear_us", "100000")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host, stream) = (driver.allocate(LENGTH), driver.host(LENGTH), driver.stream());
    fake.write(device, &[7; LENGTH]).unwrap();
    assert_eq!(driver.copy(host, device, LENGTH, stream), OK);
    until(|| host_bytes(host, LENGTH).last() == Some(&7));
    assert_ne!(host_bytes(host, 1), [7]);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(host_bytes(host, LENGTH), [7; LENGTH]);
}

#[test]
fn streams_run_apart_and_events_order_them() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let engine = fake.engine(0).unwrap();
    let device = driver.allocate(LENGTH);
    let (slow, event) = (engine.stream().unwrap(), engine.event().unwrap());
    fake.set("*", "stall", "engine").unwrap();
    engine.fill(slow, device, 5, LENGTH).unwrap();
    engine.record(event, slow).unwrap();
    let (host, first, second) = (driver.host(LENGTH), driver.stream(), driver.stream());
    // This one does not wait for the engine.
    assert_eq!(driver.copy(host, device, LENGTH, first), OK);
    assert_eq!(driver.drain(first), OK);
    assert_eq!(host_bytes(host, LENGTH), [0; LENGTH]);
    // This one does: as the event was recorded when it was told to.
    assert_eq!(
        cu!(driver, cuStreamWaitEvent(second => usize, event => usize, 0 => u32)),
        OK
    );
    assert_eq!(driver.copy(host, device, LENGTH, second), OK);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(
        cu!(driver, cuStreamQuery(second => usize)),
        CUresult::CUDA_ERROR_NOT_READY
    );
    fake.set("*", "stall", "off").unwrap();
    assert_eq!(driver.drain(second), OK);
    assert_eq!(host_bytes(host, LENGTH), [5; LENGTH]);
    fake.assert_clean();
}

#[test]
fn batches_scatter_and_gather_in_any_order() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let count = 1500;
    let piece = 64;
    let (device, host, stream) = (
        driver.allocate(count * piece * 2),
        driver.host(count * piece),
        driver.stream(),
    );
    for index in 0..count {
        let bytes = vec![index as u8; piece];
        fake.write(device + (index * piece * 2) as u64, &bytes).unwrap();
    }
    let place = |index: usize| {
        (
            host + (index * piece) as u64,
            device + (index * piece * 2) as u64,
            piece,
        )
    };
    let gather: Vec<_> = (0..count).map(place).collect();
    assert_eq!(driver.batch(&gather, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    for index in 0..count {
        assert_eq!(
            host_bytes(host + (index * piece) as u64, piece),
            vec![index as u8; piece]
        );
    }
    assert_eq!(fake.count("cuMemcpyBatchAsync"), 1);
    assert_eq!(fake.count("copies"), count as u64);
    // Neither in the default stream nor of nothing.
    assert_eq!(driver.batch(&gather, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(
        driver.batch(&[(host, device, 0)], stream),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    fake.assert_clean();
}

#[test]
fn words_are_written_behind_copies_and_waited_for() {
    let fake = FakeCuda::with(&[("*", "stall", "copies")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host, word) = (driver.allocate(LENGTH), driver.host(LENGTH), driver.host(4096));
    let stream = driver.stream();
    fake.write(device, &[7; LENGTH]).unwrap();
    assert_eq!(driver.copy(host, device, LENGTH, stream), OK);
    let write = |value: u32| cu!(driver, cuStreamWriteValue32_v2(stream => usize, word => u64, value => u32, 0 => u32));
    assert_eq!(write(3), OK);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(host_bytes(word, 4), [0; 4]);
    fake.set("*", "stall", "off").unwrap();
    until(|| host_bytes(word, 4) == 3u32.to_le_bytes());
    assert_eq!(host_bytes(host, LENGTH), [7; LENGTH]);
    // The stream goes on once the word is at least 5, wherever it wraps.
    assert_eq!(
        cu!(driver, cuStreamWaitValue32_v2(stream => usize, word => u64, 5 => u32, 0 => u32)),
        OK
    );
    let event = driver.event();
    assert_eq!(driver.record(event, stream), OK);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(driver.query(event), CUresult::CUDA_ERROR_NOT_READY);
    set_host(word, &6u32.to_le_bytes());
    assert_eq!(driver.wait(event), OK);
    let misaligned = cu!(driver, cuStreamWriteValue32_v2(stream => usize, word + 2 => u64, 1 => u32, 0 => u32));
    assert_eq!(misaligned, CUresult::CUDA_ERROR_INVALID_VALUE);
    let unpinned = &raw const event as u64;
    let unreachable = cu!(driver, cuStreamWriteValue64_v2(stream => usize, unpinned => u64, 1 => u64, 0 => u32));
    assert_eq!(unreachable, CUresult::CUDA_ERROR_INVALID_VALUE);
    fake.assert_clean();
}

#[test]
fn kernels_gather_and_scatter() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let image = c".version 6.0\n.target sm_60\n.visible .entry kvx_gather(\n.visible .entry kvx_scatter(\n";
    let mut module = 0usize;
    let loaded = cu!(driver, cuModuleLoadData(&raw mut module => *mut usize, image.as_ptr() => *const i8));
    assert_eq!(loaded, OK);
    let function = |name: &std::ffi::CStr| {
        let mut function = 0usize;
        let answer = cu!(driver, cuModuleGetFunction(&raw mut function => *mut usize, module => usize, name.as_ptr() => *const i8));
        (answer, function)
    };
    assert_eq!(function(c"kvx_nothing").0, CUresult::CUDA_ERROR_NOT_FOUND);
    let stream = driver.stream();
    let (device, staging, list, done) = (
        driver.allocate(LENGTH),
        driver.host(LENGTH),
        driver.host(4096),
        driver.host(64),
    );
    fake.write(device, &[9; 100]).unwrap();
    let pieces: [u64; 6] = [device, 10, 30, device + 50, 40, 5];
    let bytes: Vec<u8> = pieces.iter().flat_map(|word| word.to_le_bytes()).collect();
    set_host(list, &bytes);
    let launch = |function: usize, value: u32| {
        let count = 2u32;
        let parameters: [*const c_void; 5] = [
            (&raw const list).cast(),
            (&raw const count).cast(),
            (&raw const staging).cast(),
            (&raw const done).cast(),
            (&raw const value).cast(),
        ];
        cu!(driver, cuLaunchKernel(
            function => usize, 2 => u32, 1 => u32, 1 => u32, 64 => u32, 1 => u32, 1 => u32, 0 => u32, stream => usize,
            parameters.as_ptr() => *const *const c_void, std::ptr::null() => *const c_void
        ))
    };
    assert_eq!(launch(function(c"kvx_gather").1, 1), OK);
    until(|| host_bytes(done, 4) == 1u32.to_le_bytes());
    let mut expected = [0u8; 60];
    expected[10..45].fill(9);
    assert_eq!(host_bytes(staging, 60), expected);
    set_host(staging, &[4; 60]);
    assert_eq!(launch(function(c"kvx_scatter").1, 2), OK);
    until(|| host_bytes(done, 4) == 2u32.to_le_bytes());
    assert_eq!(fake.read(device, 30).unwrap(), [4; 30]);
    assert_eq!(fake.read(device + 30, 20).unwrap(), [9; 20]);
    assert_eq!(fake.read(device + 50, 5).unwrap(), [4; 5]);
    assert_eq!(cu!(driver, cuModuleUnload(module => usize)), OK);
    fake.assert_clean();
}

#[test]
fn unpinned_memory_is_copied_at_once_and_counted() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, stream) = (driver.allocate(LENGTH), driver.stream());
    let mut bytes = vec![3u8; LENGTH];
    let address = bytes.as_mut_ptr() as u64;
    assert_eq!(driver.copy(device, address, LENGTH, stream), OK);
    bytes.fill(0);
    assert_eq!(driver.copy(address, device, LENGTH, stream), OK);
    assert_eq!(bytes, [3; LENGTH], "waited for");
    assert_eq!(fake.count("unpinned_copies"), 2);
    assert_eq!(
        driver.copy(device, 1 << 20, 8, stream),
        CUresult::CUDA_ERROR_INVALID_VALUE,
        "nothing is there"
    );
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    let fake = FakeCuda::with(&[("*", "op_delay_us", "3000")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let mut blocking = 0usize;
    assert_eq!(
        cu!(driver, cuStreamCreate(&raw mut blocking => *mut usize, 0 => u32)),
        OK
    );
    let device = driver.allocate(LENGTH);
    let fill = |value: u8, stream: usize| {
        let answer = cu!(driver, cuMemsetD8Async(device => u64, value => u8, LENGTH => usize, stream => usize));
        assert_eq!(answer, OK);
    };
    for round in 0..5u8 {
        fill(round, blocking);
        fill(round + 100, 0);
        fill(round + 200, blocking);
    }
    assert_eq!(cu!(driver, cuCtxSynchronize()), OK);
    assert_eq!(fake.read(device, LENGTH).unwrap(), [204; LENGTH]);
    assert_eq!(fake.count("synchronising"), 1);
    assert!(fake.violations().iter().any(|what| what.contains("default stream")));
}
