//! The C interface. Nothing unwinds out of it: a panic in an `extern "C"` function ends the process.
//!
//! None of these functions is called from inside the library, so that a real libibverbs in the same process cannot
//! take their place.

// What is `no_mangle` is exported by name whatever its module's visibility.
#![allow(unreachable_pub)]

mod completion;
mod control;
mod device;
mod memory;
mod queue_pair;

use std::io;

/// Sets `errno`.
fn set_errno(errno: i32) {
    // SAFETY: the location belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// What a function that returns a pointer returns when it fails.
fn refuse<T>(errno: i32) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

/// The errno in an error of the system.
fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
