//! Functions of our own, by which tests in the same process control devices and look at them.

use std::ffi::CStr;
use std::os::raw::{c_char, c_int};

use crate::device;

/// Sets a key of a device (`fake0`, or `*` for all) in this process, above what the file says, at once. 0, or EINVAL
/// for an unknown key or a value that cannot be read, or ENODEV.
///
/// # Safety
/// Three C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_fake_set(device: *const c_char, key: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let texts = unsafe { [text(device), text(key), text(value)] };
    let [Some(device), Some(key), Some(value)] = texts else {
        return libc::EINVAL;
    };
    let devices = device::named(device);
    if devices.is_empty() {
        return libc::ENODEV;
    }
    let good = devices.iter().all(|device| device.device.set_here(key, value));
    if good { 0 } else { libc::EINVAL }
}

/// A counter of a device in this process (`*`: the sum over all); all ones if there is no such counter or device.
///
/// # Safety
/// Two C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_fake_counter(device: *const c_char, name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let texts = unsafe { [text(device), text(name)] };
    let [Some(device), Some(name)] = texts else {
        return u64::MAX;
    };
    let devices = device::named(device);
    let values: Option<Vec<u64>> = devices.iter().map(|device| device.device.counters.get(name)).collect();
    values
        .filter(|values| !values.is_empty())
        .map_or(u64::MAX, |values| values.iter().sum())
}

/// # Safety
/// Null or a C string that lives as long as the result is used.
unsafe fn text<'a>(pointer: *const c_char) -> Option<&'a str> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_str().ok()
}
