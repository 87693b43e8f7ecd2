//! Events: what happened to handles that asked for it.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use kvxfer::{Endpoint, EventKind};

use crate::call::{Status, call};
use crate::endpoint::kvx_endpoint;
use crate::input::{self, grows};
use crate::output::{Out, OutStructs};
use crate::status::{KVX_OK, KVX_PENDING, code, kvx_status};
use crate::table;

/// What happened to a handle. Later versions may tell more kinds: skip those that you do not know.
pub type kvx_event_kind = u32;
/// A claim met its offer at all sources, or an offer got a claim.
pub const KVX_EVENT_MATCHED: kvx_event_kind = 1;
/// The offer was restarted: progress before is void.
pub const KVX_EVENT_RESTARTED: kvx_event_kind = 2;
/// The handle has ended. Always its last event.
pub const KVX_EVENT_ENDED: kvx_event_kind = 3;
/// A kind that this version of the interface has no number for.
pub const KVX_EVENT_OTHER: kvx_event_kind = 0;

/// Something that happened to a handle that was opened with events = 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_event {
    /// Set by the library, to the element size that the caller gave.
    pub struct_size: u32,
    /// What happened.
    pub kind: kvx_event_kind,
    /// The application's number from the handle's options.
    pub data: u64,
    /// The handle's number, as kvx_handle_id says.
    pub id: u64,
    /// Of KVX_EVENT_ENDED: KVX_OK, or the code of what ended the handle.
    pub error: kvx_status,
    /// 0.
    pub reserved: u32,
}
grows!(kvx_event, 32);

/// Events taken from the queue at once.
const BATCH: usize = 256;

/// Takes up to capacity events, oldest first, into elements of element_size bytes (sizeof(kvx_event)), and says in count
/// how many. KVX_OK even if there were none. All threads drain the same queue; an event is told once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_events_drain(
    endpoint: kvx_endpoint,
    events: *mut kvx_event,
    element_size: usize,
    capacity: usize,
    count: *mut usize,
) -> kvx_status {
    call(|| {
        let queue = table::get::<Endpoint>(endpoint)?.events();
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, total) = unsafe {
            (
                OutStructs::new(events, element_size, capacity)?,
                Out::new("count", count)?,
            )
        };
        let mut written = 0;
        let mut batch = Vec::new();
        while written < out.capacity() {
            batch.clear();
            if queue.drain(&mut batch, BATCH.min(out.capacity() - written)) == 0 {
                break;
            }
            for event in &batch {
                let (kind, error) = match event.kind {
                    EventKind::Matched => (KVX_EVENT_MATCHED, KVX_OK),
                    EventKind::Restarted => (KVX_EVENT_RESTARTED, KVX_OK),
                    EventKind::Ended { error } => (KVX_EVENT_ENDED, error.map_or(KVX_OK, code)),
                    _ => (KVX_EVENT_OTHER, KVX_OK),
                };
                let told = kvx_event {
                    struct_size: 0,
                    kind,
                    data: event.data,
                    id: event.handle.0,
                    error,
                    reserved: 0,
                };
                out.put(written, told);
                written += 1;
            }
        }
        total.put(written);
        Ok(())
    })
}

/// A descriptor that polls readable while events wait, for poll, epoll and the like. It belongs to the endpoint: do not
/// read or close it, and take it out of your poller before the endpoint is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_events_fd(endpoint: kvx_endpoint, fd: *mut c_int) -> kvx_status {
    call(|| {
        let queue = table::get::<Endpoint>(endpoint)?.events();
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::new("fd", fd)? };
        out.put(queue.fd().as_raw_fd());
        Ok(())
    })
}

/// Waits until an event waits to be drained. May block, up to timeout_ms; KVX_PENDING if none came.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_events_wait(endpoint: kvx_endpoint, timeout_ms: u64) -> kvx_status {
    call(|| {
        // Not the endpoint itself: it may be destroyed meanwhile.
        let queue = table::get::<Endpoint>(endpoint)?.events();
        let waits = queue.wait(input::timeout(timeout_ms));
        Ok(Status(if waits { KVX_OK } else { KVX_PENDING }))
    })
}
