//! Statuses, errors, versions.

use std::ffi::c_char;

use kvxfer::{Destination, Error, ErrorKind};

use crate::call::{self, Answer};
use crate::input::grows;
use crate::output::{OutStruct, OutText};

/// What most calls give back: KVX_OK, KVX_PENDING (not yet), or a negative KVX_ERR_... code.
pub type kvx_status = i32;

/// It worked.
pub const KVX_OK: kvx_status = 0;
/// Not yet: the handle is still open, no event waits.
pub const KVX_PENDING: kvx_status = 1;
/// An argument is wrong in itself: a null pointer, a handle that was freed, a struct of an unknown size.
pub const KVX_ERR_INVALID_ARGUMENT: kvx_status = -1;
/// An index, offset or length lies outside what it indexes.
pub const KVX_ERR_OUT_OF_BOUNDS: kvx_status = -2;
/// Two pools do not describe the same cache.
pub const KVX_ERR_GEOMETRY_MISMATCH: kvx_status = -3;
/// The memory or pool is not registered here.
pub const KVX_ERR_NOT_REGISTERED: kvx_status = -4;
/// This build, machine, process or peer cannot do that.
pub const KVX_ERR_UNSUPPORTED: kvx_status = -5;
/// The peer did not prove who it is, or the configuration forbids it.
pub const KVX_ERR_UNAUTHENTICATED: kvx_status = -6;
/// What was named belongs to an earlier incarnation of the peer.
pub const KVX_ERR_STALE_PEER: kvx_status = -7;
/// No session with the peer was ever made.
pub const KVX_ERR_UNREACHABLE: kvx_status = -8;
/// The session with the peer ended and did not come back in time.
pub const KVX_ERR_PEER_LOST: kvx_status = -9;
/// The key's offer has ended, or is not there and will not come.
pub const KVX_ERR_NOT_OFFERED: kvx_status = -10;
/// No claim (or no offer) met this handle before its deadline.
pub const KVX_ERR_UNCLAIMED: kvx_status = -11;
/// A live offer with this key exists.
pub const KVX_ERR_DUPLICATE_KEY: kvx_status = -12;
/// The offer already has all the readers it was opened for.
pub const KVX_ERR_ALREADY_CLAIMED: kvx_status = -13;
/// The claim was ended by its owner before it was filled.
pub const KVX_ERR_DECLINED: kvx_status = -14;
/// Ended by a call to cancel.
pub const KVX_ERR_CANCELLED: kvx_status = -15;
/// The source blocks were taken back.
pub const KVX_ERR_RETRACTED: kvx_status = -16;
/// The deadline passed.
pub const KVX_ERR_DEADLINE_EXCEEDED: kvx_status = -17;
/// A configured limit is reached; it clears by itself.
pub const KVX_ERR_BUSY: kvx_status = -18;
/// The system or a device has no more of something.
pub const KVX_ERR_RESOURCE_EXHAUSTED: kvx_status = -19;
/// Bytes arrived that are not those that were sent.
pub const KVX_ERR_CORRUPT: kvx_status = -20;
/// A socket, queue pair or device failed.
pub const KVX_ERR_TRANSPORT: kvx_status = -21;
/// The peer broke the protocol.
pub const KVX_ERR_PROTOCOL: kvx_status = -22;
/// The endpoint or handle is closed.
pub const KVX_ERR_CLOSED: kvx_status = -23;
/// The outcome cannot be known any more.
pub const KVX_ERR_UNKNOWN: kvx_status = -24;
/// A defect of kvxfer.
pub const KVX_ERR_INTERNAL: kvx_status = -25;

/// What is known of the destination blocks after a failure.
pub type kvx_destination = u32;
/// No byte of them was written.
pub const KVX_DESTINATION_UNTOUCHED: kvx_destination = 0;
/// Some bytes may have been written; none will be written any more.
pub const KVX_DESTINATION_WRITTEN: kvx_destination = 1;
/// A device did not let go of them: they must not be reused.
pub const KVX_DESTINATION_QUARANTINED: kvx_destination = 2;

/// An error, for programs. Its text comes from kvx_last_error_message or kvx_handle_error.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_error {
    /// sizeof(kvx_error), set by the caller.
    pub struct_size: u32,
    /// KVX_OK if there was no error yet, or its KVX_ERR_... code.
    pub status: kvx_status,
    /// 1 if repeating the operation later can succeed without a change by the caller.
    pub retryable: u32,
    /// What is known of the destination blocks.
    pub destination: kvx_destination,
}
grows!(kvx_error, 16);

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
/// Grows by one whenever functions or fields are added. A break would change the soname.
const ABI_VERSION: u32 = 2;

/// The version of the C interface that the library has: 1. It grows when functions or fields are added; a library works
/// with programs built for a version up to its own.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_abi_version() -> u32 {
    ABI_VERSION
}

/// The library's version, such as "0.1.0". Never null; not to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_version_string() -> *const c_char {
    VERSION.as_ptr().cast()
}

/// The name of a status, such as "StalePeer" for KVX_ERR_STALE_PEER; "Ok", "Pending", or "?" for a number that is none.
/// Never null; not to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_status_name(status: kvx_status) -> *const c_char {
    macro_rules! names {
        ($($kind:ident)*) => {
            match kind(status) {
                $(Some(ErrorKind::$kind) => concat!(stringify!($kind), "\0"),)*
                _ if status == KVX_OK => "Ok\0",
                _ if status == KVX_PENDING => "Pending\0",
                _ => "?\0",
            }
        };
    }
    let name: &'static str = names!(InvalidArgument OutOfBounds GeometryMismatch NotRegistered Unsupported Unauthenticated
        StalePeer Unreachable PeerLost NotOffered Unclaimed DuplicateKey AlreadyClaimed Declined Cancelled Retracted
        DeadlineExceeded Busy ResourceExhausted Corrupt Transport Protocol Closed Unknown Internal);
    name.as_ptr().cast()
}

/// 1 if repeating the operation later can succeed without a change by the caller, 0 if not (or if it is no error).
#[unsafe(no_mangle)]
pub extern "C" fn kvx_status_retryable(status: kvx_status) -> i32 {
    i32::from(kind(status).is_some_and(ErrorKind::retryable))
}

/// The message of this thread's last failed call: what, where, why, and what to do. A call that works does not clear it.
/// Empty if none failed. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_last_error_message(buffer: *mut c_char, capacity: usize) -> i64 {
    // Not through `call`: it answers in forked children too, and leaves the error as it is.
    // SAFETY: the caller's buffer, as the crate's contract says.
    match unsafe { OutText::new(buffer, capacity) } {
        Ok(out) => {
            let text = call::last().map(|error| error.to_string()).unwrap_or_default();
            out.put(&text).told()
        }
        Err(error) => i64::from(code(error.kind())),
    }
}

/// This thread's last error in numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_last_error(error: *mut kvx_error) -> kvx_status {
    // SAFETY: the caller's struct, as the crate's contract says.
    match unsafe { OutStruct::new(error) } {
        Ok(out) => {
            out.put(described(call::last().as_ref()));
            KVX_OK
        }
        Err(error) => code(error.kind()),
    }
}

/// Forgets this thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_clear_last_error() {
    call::forget();
}

/// The status of an error kind.
pub(crate) fn code(kind: ErrorKind) -> kvx_status {
    -i32::from(kind.number())
}

/// The kind of a status, if it is an error.
fn kind(status: kvx_status) -> Option<ErrorKind> {
    let number = status.checked_neg().and_then(|number| u16::try_from(number).ok())?;
    ErrorKind::from_number(number)
}

pub(crate) fn destination(destination: Destination) -> kvx_destination {
    match destination {
        Destination::Untouched => KVX_DESTINATION_UNTOUCHED,
        Destination::Written => KVX_DESTINATION_WRITTEN,
        Destination::Quarantined => KVX_DESTINATION_QUARANTINED,
    }
}

/// An error in numbers.
pub(crate) fn described(error: Option<&Error>) -> kvx_error {
    kvx_error {
        struct_size: 0,
        status: error.map_or(KVX_OK, |error| code(error.kind())),
        retryable: error.map_or(0, |error| u32::from(error.retryable())),
        destination: error.map_or(KVX_DESTINATION_UNTOUCHED, |error| destination(error.destination())),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn names_and_numbers_are_those_of_rust() {
        let name = |status| {
            // SAFETY: a text of ours that ends with a NUL.
            unsafe { CStr::from_ptr(kvx_status_name(status)) }.to_str().unwrap()
        };
        for kind in ErrorKind::ALL {
            let status = code(*kind);
            assert_eq!(status, -i32::from(kind.number()));
            assert_eq!(name(status), kind.name());
            assert_eq!(kvx_status_retryable(status) == 1, kind.retryable());
        }
        assert_eq!((name(0), name(1)), ("Ok", "Pending"));
        for no_status in [2, -26, i32::MIN, i32::MAX] {
            assert_eq!(name(no_status), "?");
            assert_eq!(kvx_status_retryable(no_status), 0);
        }
    }
}
