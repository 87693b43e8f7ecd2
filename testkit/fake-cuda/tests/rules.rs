//! What is refused, what is noticed, and what can be made to fail.

#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::{CStr, c_char, c_void};

use common::{Driver, OK, host_bytes};
use cudarc::driver::sys::CUresult;
use kvxfer_fake_cuda::FakeCuda;

const LENGTH: usize = 1 << 16;

fn noticed(fake: &FakeCuda, what: &str) -> bool {
    fake.violations().iter().any(|violation| violation.contains(what))
}

#[test]
fn devices_are_what_the_configuration_says() {
    let fake = FakeCuda::with(&[
        ("*", "devices", "3"),
        ("gpu1", "pci", "0001:8a:00.0"),
        ("gpu1", "dmabuf", "off"),
    ]);
    let fake = fake.unwrap();
    let driver = Driver::load_only(&fake);
    let mut count = 0i32;
    let early = cu!(driver, cuDeviceGetCount(&raw mut count => *mut i32));
    assert_eq!(early, CUresult::CUDA_ERROR_NOT_INITIALIZED);
    assert_eq!(cu!(driver, cuInit(0 => u32)), OK);
    assert_eq!(cu!(driver, cuDeviceGetCount(&raw mut count => *mut i32)), OK);
    assert_eq!(count, 3);
    let mut text = [0 as c_char; 32];
    assert_eq!(
        cu!(driver, cuDeviceGetPCIBusId(text.as_mut_ptr() => *mut c_char, 32 => i32, 1 => i32)),
        OK
    );
    // SAFETY: a text that the call made.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    assert_eq!(text.to_str(), Ok("0001:8A:00.0"));
    let attribute = |number: u32, device: i32| {
        let mut value = -1i32;
        let answer = cu!(driver, cuDeviceGetAttribute(&raw mut value => *mut i32, number => u32, device => i32));
        (answer, value)
    };
    assert_eq!((attribute(124, 0), attribute(124, 1)), ((OK, 1), (OK, 0)));
    assert_eq!(attribute(41, 2), (OK, 1), "unified addressing");
    assert_eq!(attribute(118, 0), (OK, 200));
    assert_eq!(attribute(5000, 0).0, CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(attribute(41, 3).0, CUresult::CUDA_ERROR_INVALID_DEVICE);
    let mut device = -1i32;
    let found =
        cu!(driver, cuDeviceGetByPCIBusId(&raw mut device => *mut i32, c"0001:8a:00.0".as_ptr() => *const c_char));
    assert_eq!((found, device), (OK, 1));
    assert_eq!(fake.count("contexts_created"), 0);
}

#[test]
fn without_devices_there_is_nothing_to_begin() {
    let fake = FakeCuda::with(&[("*", "devices", "0")]).unwrap();
    let driver = Driver::load_only(&fake);
    assert_eq!(cu!(driver, cuInit(0 => u32)), CUresult::CUDA_ERROR_NO_DEVICE);
}

#[test]
fn contexts_are_per_thread_and_work_needs_its_own() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    let first = driver.context(0);
    let (stream, device) = (driver.stream(), driver.allocate(LENGTH));
    let mut other = 0usize;
    assert_eq!(
        cu!(driver, cuDevicePrimaryCtxRetain(&raw mut other => *mut usize, 1 => i32)),
        OK
    );
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut current = 1usize;
            assert_eq!(cu!(driver, cuCtxGetCurrent(&raw mut current => *mut usize)), OK);
            assert_eq!(current, 0);
            let mut address = 0u64;
            let answer = cu!(driver, cuMemAlloc_v2(&raw mut address => *mut u64, 1 => usize));
            assert_eq!(answer, CUresult::CUDA_ERROR_INVALID_CONTEXT);
        });
    });
    assert!(noticed(&fake, "none is current"));
    assert_eq!(fake.violations().len(), 1);
    assert_eq!(cu!(driver, cuCtxPushCurrent_v2(other => usize)), OK);
    let answer = cu!(driver, cuMemsetD8Async(device => u64, 1 => u8, 8 => usize, stream => usize));
    assert_eq!(answer, OK, "the driver does it");
    assert!(noticed(
        &fake,
        "a stream of device 0 is queued while a context of device 1 is current"
    ));
    let event = driver.event();
    assert_eq!(driver.record(event, stream), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(cu!(driver, cuCtxPopCurrent_v2(std::ptr::null_mut() => *mut usize)), OK);
    let mut current = 0usize;
    assert_eq!(cu!(driver, cuCtxGetCurrent(&raw mut current => *mut usize)), OK);
    assert_eq!(current, first);
}

#[test]
fn pointers_tell_what_they_are() {
    let fake = FakeCuda::with(&[("*", "alloc_offset", "512")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let context = driver.context(1);
    let (device, host) = (driver.allocate(LENGTH), driver.host(LENGTH));
    assert_eq!(device % 4096, 512);
    assert_eq!(driver.attribute::<u32>(device + 5, 2), Ok(2), "device memory");
    assert_eq!(driver.attribute::<u32>(host, 2), Ok(1), "page-locked");
    assert_eq!(driver.attribute::<u32>(device, 9), Ok(1), "the device's number");
    assert_eq!(driver.attribute::<u64>(device, 1), Ok(context as u64));
    assert_eq!(driver.attribute::<u64>(device + 9, 11), Ok(device));
    assert_eq!(driver.attribute::<u64>(device + 9, 12), Ok(LENGTH as u64));
    let on_stack = 0u32;
    let stack = &raw const on_stack as u64;
    assert_eq!(
        driver.attribute::<u32>(stack, 2),
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    );
    let mut kind = 9u32;
    let mut ordinal = 9i32;
    let which = [2u32, 9];
    let mut data: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut ordinal).cast()];
    let all = cu!(driver, cuPointerGetAttributes(2 => u32, which.as_ptr() => *const u32, data.as_mut_ptr() => *mut *mut c_void, stack => u64));
    assert_eq!((all, kind, ordinal), (OK, 0, -2), "nothing that it knows");
    let on = 1u32;
    let set = cu!(driver, cuPointerSetAttribute(&raw const on => *const u32, 6 => u32, device => u64));
    assert_eq!((set, driver.attribute::<u8>(device, 6)), (OK, Ok(1)));
    // Freed and allocated anew: the same address, another buffer.
    let before = driver.attribute::<u64>(device, 7).unwrap();
    assert_eq!(driver.free(device), OK);
    assert!(driver.attribute::<u64>(device, 7).is_err());
    assert_eq!(driver.allocate(LENGTH), device);
    assert_ne!(driver.attribute::<u64>(device, 7).unwrap(), before);
    fake.assert_clean();
}

#[test]
fn registered_memory_is_page_locked_until_it_is_not() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let bytes = vec![1u8; LENGTH];
    let address = bytes.as_ptr() as u64;
    let register = |from: u64| cu!(driver, cuMemHostRegister_v2(from => u64, LENGTH => usize, 0 => u32));
    assert_eq!(register(address), OK);
    assert_eq!(
        register(address + 8),
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    );
    assert_eq!(register(1 << 20), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(fake.count("pinned_bytes"), LENGTH as u64);
    assert_eq!(driver.attribute::<u32>(address, 2), Ok(1));
    let mut device = 0u64;
    let answer = cu!(driver, cuMemHostGetDevicePointer_v2(&raw mut device => *mut u64, address => u64, 0 => u32));
    assert_eq!((answer, device), (OK, address));
    assert_eq!(fake.leaks().len(), 2, "{:?}", fake.leaks());
    let (target, stream) = (driver.allocate(LENGTH), driver.stream());
    fake.set("*", "stall", "copies").unwrap();
    assert_eq!(driver.copy(target, address, LENGTH, stream), OK);
    assert_eq!(cu!(driver, cuMemHostUnregister(address => u64)), OK);
    assert!(noticed(&fake, "while a copy of it is queued"));
    assert_eq!(
        cu!(driver, cuMemHostUnregister(address => u64)),
        CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    );
    assert_eq!(
        (fake.count("pinned_bytes"), fake.count("pinned_peak")),
        (0, LENGTH as u64)
    );
    fake.set("*", "stall", "off").unwrap();
    driver.drain(stream);
}

#[test]
fn freed_memory_is_noticed_and_breaks_the_context() {
    let fake = FakeCuda::with(&[("*", "stall", "copies")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host, stream) = (driver.allocate(LENGTH), driver.host(LENGTH), driver.stream());
    assert_eq!(driver.copy(host, device, LENGTH, stream), OK);
    assert_eq!(driver.free(device), OK);
    assert!(noticed(&fake, "while a copy of it is queued"));
    fake.set("*", "stall", "off").unwrap();
    assert_eq!(driver.drain(stream), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(noticed(&fake, "which was freed"));
    let mut address = 0u64;
    let after = cu!(driver, cuMemAlloc_v2(&raw mut address => *mut u64, 8 => usize));
    assert_eq!(
        after,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        "nothing works in the context any more"
    );
    assert_eq!(driver.free(device), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    // Another device's is sound.
    driver.context(1);
    let (device, stream) = (driver.allocate(LENGTH), driver.stream());
    assert_eq!(driver.free(device), OK);
    assert_eq!(
        driver.copy(host, device, LENGTH, stream),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(driver.free(device), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert!(noticed(&fake, "freed twice"));
}

#[test]
fn staging_that_two_streams_use_at_once_is_noticed() {
    let fake = FakeCuda::with(&[("*", "stall", "copies")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host) = (driver.allocate(LENGTH), driver.host(LENGTH));
    let (out, back) = (driver.stream(), driver.stream());
    assert_eq!(driver.copy(host, device, LENGTH, out), OK);
    assert_eq!(driver.copy(device, host + 100, 8, out), OK);
    fake.assert_clean();
    assert_eq!(driver.copy(device, host + 200, 8, back), OK);
    assert!(noticed(&fake, "while one on another stream uses it"));
    fake.set("*", "stall", "off").unwrap();
    driver.drain(out);
    driver.drain(back);
}

#[test]
fn objects_that_are_gone_and_left_over_are_noticed() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    assert!(fake.leaks().is_empty());
    driver.context(0);
    let (stream, event, device) = (driver.stream(), driver.event(), driver.allocate(LENGTH));
    assert_eq!(fake.leaks().len(), 4, "{:?}", fake.leaks());
    assert_eq!(driver.free(device), OK);
    assert_eq!(cu!(driver, cuEventDestroy_v2(event => usize)), OK);
    assert_eq!(driver.query(event), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert!(noticed(&fake, "event"));
    assert_eq!(cu!(driver, cuStreamDestroy_v2(stream => usize)), OK);
    assert_eq!(cu!(driver, cuDevicePrimaryCtxRelease_v2(0 => i32)), OK);
    assert!(fake.leaks().is_empty(), "{:?}", fake.leaks());
    let mut address = 0u64;
    let answer = cu!(driver, cuMemAlloc_v2(&raw mut address => *mut u64, 8 => usize));
    assert_eq!(answer, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

#[test]
fn each_call_can_fail_once_and_the_next_does_not() {
    let fake = FakeCuda::with(&[("*", "fail", "cuMemAlloc_v2:OUT_OF_MEMORY:1:1")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let allocate = || {
        let mut address = 0u64;
        cu!(driver, cuMemAlloc_v2(&raw mut address => *mut u64, 8 => usize))
    };
    assert_eq!(
        [allocate(), allocate(), allocate()],
        [OK, CUresult::CUDA_ERROR_OUT_OF_MEMORY, OK]
    );
    // Any call, the fourth from now.
    fake.set("*", "fail", "*:ECC_UNCORRECTABLE:1:3").unwrap();
    let mut version = 0i32;
    let answers: Vec<_> = (0..5)
        .map(|_| cu!(driver, cuDriverGetVersion(&raw mut version => *mut i32)))
        .collect();
    assert_eq!(answers.iter().position(|answer| *answer != OK), Some(3));
    assert_eq!(answers[4], OK);
    // The engine's calls do not fail.
    fake.set("*", "fail", "cuMemAlloc_v2:OUT_OF_MEMORY").unwrap();
    fake.engine(0).unwrap().allocate(8).unwrap();
}

#[test]
fn work_can_fail_on_the_device() {
    let fake = FakeCuda::with(&[("gpu0", "op_error", "ECC_UNCORRECTABLE:1:1")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host) = (driver.allocate(LENGTH), driver.host(LENGTH));
    let (stream, event) = (driver.stream(), driver.event());
    fake.write(device, &[7; LENGTH]).unwrap();
    assert_eq!(driver.copy(host, device, 8, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(driver.copy(host, device, LENGTH, stream), OK);
    assert_eq!(driver.record(event, stream), OK);
    assert_eq!(driver.wait(event), CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
    assert_ne!(host_bytes(host, LENGTH), [7; LENGTH]);
}

#[test]
fn a_driver_that_vanishes_answers_nothing_any_more() {
    let fake = FakeCuda::with(&[("*", "stall", "copies")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host, stream) = (driver.allocate(LENGTH), driver.host(LENGTH), driver.stream());
    fake.write(device, &[7; LENGTH]).unwrap();
    assert_eq!(driver.copy(host, device, LENGTH, stream), OK);
    fake.set("*", "vanish", "SYSTEM_NOT_READY").unwrap();
    fake.set("*", "stall", "off").unwrap();
    assert_eq!(
        cu!(driver, cuStreamQuery(stream => usize)),
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY
    );
    assert_eq!(cu!(driver, cuInit(0 => u32)), CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_ne!(host_bytes(host, LENGTH), [7; LENGTH]);
    fake.set("*", "vanish", "off").unwrap();
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(host_bytes(host, LENGTH), [7; LENGTH]);
}

#[test]
fn functions_are_found_by_name_and_version() {
    let fake = FakeCuda::new().unwrap();
    let find = |driver: &Driver, name: &CStr, version: i32| {
        let (mut function, mut status) = (std::ptr::null_mut::<c_void>(), 9u32);
        let answer = cu!(driver, cuGetProcAddress_v2(
            name.as_ptr() => *const c_char, &raw mut function => *mut *mut c_void, version => i32, 0 => u64,
            &raw mut status => *mut u32
        ));
        assert_eq!(answer, OK);
        (!function.is_null(), status)
    };
    let driver = Driver::load(&fake);
    assert_eq!(find(&driver, c"cuMemcpyBatchAsync", 12_080), (true, 0));
    assert_eq!(find(&driver, c"cuMemcpyBatchAsync", 12_020), (false, 2));
    assert_eq!(find(&driver, c"cuMemAlloc", 12_080), (true, 0));
    assert_eq!(find(&driver, c"cuStreamCreate", 12_080), (true, 0));
    assert_eq!(find(&driver, c"cuMemRoast", 12_080), (false, 1));
    fake.set("*", "driver_version", "12020").unwrap();
    assert_eq!(find(&driver, c"cuMemcpyBatchAsync", 12_080), (false, 1));
    // A library that never had it.
    let path = fake.library_without(&["cuMemcpyBatchAsync", "cuMemcpyAsync"]).unwrap();
    // SAFETY: a library made to be loaded.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    // SAFETY: not called.
    assert!(unsafe { library.get::<unsafe extern "C" fn()>(b"cuMemcpyBatchAsync\0") }.is_err());
    let lacking = Driver { library };
    fake.set("*", "driver_version", "12080").unwrap();
    assert_eq!(find(&lacking, c"cuMemcpyBatchAsync", 12_080), (false, 1));
    assert_eq!(find(&lacking, c"cuMemcpyAsync", 12_080), (false, 1));
    assert_eq!(find(&lacking, c"cuMemAlloc", 12_080), (true, 0));
}

#[test]
fn host_functions_may_call_nothing() {
    unsafe extern "C" fn misbehave(driver: *mut c_void) {
        // SAFETY: the test's driver, which outlives the stream's work.
        let driver = unsafe { &*driver.cast::<Driver>() };
        let mut version = 0i32;
        let answer = cu!(driver, cuDriverGetVersion(&raw mut version => *mut i32));
        assert_eq!(answer, CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    type Run = unsafe extern "C" fn(*mut c_void);
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let stream = driver.stream();
    let data = (&raw const driver).cast_mut().cast::<c_void>();
    let answer = cu!(driver, cuLaunchHostFunc(stream => usize, misbehave => Run, data => *mut c_void));
    assert_eq!(answer, OK);
    assert_eq!(driver.drain(stream), OK);
    assert!(noticed(&fake, "in a host function"));
}

#[test]
fn a_capture_is_broken_by_what_it_does_not_allow() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let engine = fake.engine(0).unwrap();
    let (captured, event, ours) = (engine.stream().unwrap(), engine.event().unwrap(), driver.event());
    let device = driver.allocate(LENGTH);
    let status = || {
        let mut status = 9u32;
        assert_eq!(
            cu!(driver, cuStreamIsCapturing(captured => usize, &raw mut status => *mut u32)),
            OK
        );
        status
    };
    assert_eq!(status(), 0);
    engine.begin_capture(captured).unwrap();
    assert_eq!(status(), 1);
    engine.fill(captured, device, 1, LENGTH).unwrap();
    engine.record(event, captured).unwrap();
    let stream = driver.stream();
    let wait = |stream: usize| cu!(driver, cuStreamWaitEvent(stream => usize, event => usize, 0 => u32));
    assert_eq!(wait(stream), OK, "which makes the stream part of the capture");
    engine.end_capture(captured).unwrap();
    assert_eq!(fake.read(device, 1).unwrap(), [0], "captured, not done");
    assert_eq!(driver.query(event), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    // A query of anything breaks a global capture, unless the thread says that it may.
    engine.begin_capture(captured).unwrap();
    let mut mode = 2u32;
    assert_eq!(
        cu!(driver, cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut u32)),
        OK
    );
    assert_eq!(driver.query(ours), OK);
    assert_eq!(mode, 0);
    assert_eq!(
        cu!(driver, cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut u32)),
        OK
    );
    fake.assert_clean();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(driver.query(ours), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    });
    assert!(noticed(&fake, "which breaks it"));
    assert_eq!(status(), 2);
    assert!(engine.end_capture(captured).is_err());
}
