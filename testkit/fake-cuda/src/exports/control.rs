//! What tests call beside the driver's functions: settings, counts, notes, and the device's bytes.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::CUresult;

use crate::driver::{driver, set_engine};
use crate::memory::span::Finder;

/// Sets a key in this process; 0, or an errno.
///
/// # Safety
/// Three C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_fake_cuda_set(device: *const c_char, key: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let texts = [device, key, value].map(|text| unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default());
    if driver().set_here(texts[0], texts[1], texts[2]) {
        0
    } else {
        libc::EINVAL
    }
}

/// How often something was called or has happened.
///
/// # Safety
/// A C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_fake_cuda_count(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    driver().count(unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default())
}

/// Text of a kind (`violations`, `leaks`, `calls`) in a buffer, cut to fit; how long all of it is.
///
/// # Safety
/// A C string, and a buffer of that length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_fake_cuda_text(kind: *const c_char, buffer: *mut u8, length: usize) -> usize {
    let driver = driver();
    // SAFETY: the caller's promise.
    let text = match unsafe { CStr::from_ptr(kind) }.to_bytes() {
        b"violations" => driver.checker.violations(),
        b"leaks" => driver.world.lock().leaks(),
        b"calls" => driver.checker.calls(),
        _ => String::new(),
    };
    let count = length.min(text.len());
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, count) };
    text.len()
}

/// Says whether this thread plays the engine; what it was before.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_fake_cuda_engine(engine: bool) -> bool {
    set_engine(engine)
}

/// Reads or writes device memory as the test: at once, and wherever it is.
///
/// # Safety
/// Memory of that length, to be written if `write` is false.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_fake_cuda_bytes(address: u64, memory: *mut u8, length: usize, write: bool) -> CUresult {
    let driver = driver();
    let spans = {
        let world = driver.world.lock();
        Finder::for_test(driver).spans(&world.map, address, length as u64)
    };
    let spans = match spans {
        Ok(spans) => spans,
        Err(code) => return code,
    };
    let mut next = memory;
    for span in spans {
        if write {
            // SAFETY: the caller's promise; the spans are as long as the memory.
            span.put(unsafe { std::slice::from_raw_parts(next, span.length) });
        } else {
            // SAFETY: as above.
            span.get(unsafe { std::slice::from_raw_parts_mut(next, span.length) });
        }
        next = next.wrapping_add(span.length);
    }
    CUresult::CUDA_SUCCESS
}
