//! What a device reports by itself: ports, addresses, and objects that broke.

use super::context::Context;
use super::error::{VerbsError, last_errno};
use crate::sys;

/// One asynchronous event, already acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// What happened.
    pub kind: AsyncEventKind,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEventKind {
    /// The queue pair with this number went to its error state by itself.
    QpFatal(u32),
    /// The port can carry data.
    PortActive(u8),
    /// The port cannot carry data any more.
    PortDown(u8),
    /// The port's table of GIDs changed.
    GidChange(u8),
    /// The port's local identifier changed (InfiniBand).
    LidChange(u8),
    /// The port's table of partition keys changed.
    PkeyChange(u8),
    /// The device has failed or is going away.
    DeviceFatal,
    /// A completion queue overran or broke.
    CqError,
    /// An `ibv_event_type` that needs nothing done.
    Other(i32),
}

impl Context {
    /// Takes the next event and acknowledges it, without blocking; `None` if there is none.
    ///
    /// # Errors
    /// [`VerbsError::Refused`] if the device's event file fails (`EIO`, `ENODEV`: the device is gone).
    pub fn next_async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        // SAFETY: an integer and a union of pointers and an integer, for which zero is a value.
        let mut event: sys::ibv_async_event = unsafe { std::mem::zeroed() };
        loop {
            // SAFETY: the context is open while `self` lives; the library writes one event.
            if unsafe { self.verbs().ibv_get_async_event(self.raw(), &mut event) } == 0 {
                break;
            }
            match last_errno() {
                libc::EAGAIN => return Ok(None),
                libc::EINTR => continue,
                errno => return Err(self.refused("ibv_get_async_event", errno)),
            }
        }
        let kind = kind_of(&event);
        // SAFETY: the event was just taken and is acknowledged once. Nothing of it is used afterwards: the object it
        // points to may be destroyed from now on.
        unsafe { self.verbs().ibv_ack_async_event(&mut event) };
        Ok(Some(AsyncEvent { kind }))
    }
}

fn kind_of(event: &sys::ibv_async_event) -> AsyncEventKind {
    // SAFETY: (in every arm) the event's type says which member the library wrote.
    let port = || u8::try_from(unsafe { event.element.port_num }).unwrap_or(0);
    match event.event_type {
        sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: these types carry a queue pair, which cannot be destroyed before its event is acknowledged
            // (`ibv_destroy_qp` waits for that).
            AsyncEventKind::QpFatal(unsafe { (*event.element.qp).qp_num })
        }
        sys::IBV_EVENT_PORT_ACTIVE => AsyncEventKind::PortActive(port()),
        sys::IBV_EVENT_PORT_ERR => AsyncEventKind::PortDown(port()),
        sys::IBV_EVENT_GID_CHANGE => AsyncEventKind::GidChange(port()),
        sys::IBV_EVENT_LID_CHANGE => AsyncEventKind::LidChange(port()),
        sys::IBV_EVENT_PKEY_CHANGE => AsyncEventKind::PkeyChange(port()),
        sys::IBV_EVENT_DEVICE_FATAL => AsyncEventKind::DeviceFatal,
        sys::IBV_EVENT_CQ_ERR => AsyncEventKind::CqError,
        other => AsyncEventKind::Other(other as i32),
    }
}
