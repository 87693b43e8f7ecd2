//! Contexts: the primary one of a device, retained while something of ours is on it, current only around our calls.

use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice};

use crate::driver::{Driver, Refused};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const CAPTURE_RELAXED: c_uint = 2;

/// A device's primary context, retained.
#[derive(Debug)]
pub(crate) struct Primary {
    driver: Arc<Driver>,
    device: CUdevice,
    context: CUcontext,
}

// SAFETY: the context is a handle that the driver allows on any thread; it is only ever made current by push and pop.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Primary {
    /// Retains the primary context of the device with this ordinal. Makes it, if nothing of the process had: ask only
    /// for a device that has memory of the caller's.
    pub(crate) fn retain(driver: &Arc<Driver>, ordinal: i32) -> Result<Primary, Refused> {
        let device = device_of(driver, ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { driver.primary_retain(&mut context, device) }?;
        Ok(Primary {
            driver: Arc::clone(driver),
            device,
            context,
        })
    }

    /// Whether the device with this ordinal has a primary context, made by whomever.
    pub(crate) fn exists(driver: &Driver, ordinal: i32) -> Result<bool, Refused> {
        let device = device_of(driver, ordinal)?;
        let (mut flags, mut active): (c_uint, c_int) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { driver.primary_state(device, &mut flags, &mut active) }?;
        Ok(active != 0)
    }

    /// The context's handle.
    pub(crate) fn context(&self) -> CUcontext {
        self.context
    }

    /// The driver.
    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Current<'_>, Refused> {
        Current::push(&self.driver, self.context)
    }

    /// The same, to give something back: what is not given back is lost, so it is tried twice.
    pub(crate) fn enter_to_give_back(&self) -> Result<Current<'_>, Refused> {
        self.enter().or_else(|_| self.enter())
    }

    /// Makes the context current on this thread, which is ours, until [`unsettle`](Self::unsettle).
    pub(crate) fn settle(&self) -> Result<(), Refused> {
        // SAFETY: the context is live: `self` retains it, and the thread keeps `self`.
        unsafe { self.driver.context_push(self.context) }?;
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: exchanges one integer. A driver without the call has no captures to disturb.
        let _ = unsafe { self.driver.capture_mode(&mut mode) };
        Ok(())
    }

    /// Undoes [`settle`](Self::settle) on this thread.
    pub(crate) fn unsettle(&self) {
        pop(&self.driver);
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`, released only here.
        if let Err(refused) = unsafe { self.driver.primary_release(self.device) } {
            tracing::warn!(%refused, "a primary context was not released");
        }
    }
}

fn device_of(driver: &Driver, ordinal: i32) -> Result<CUdevice, Refused> {
    let mut device = 0;
    // SAFETY: writes one integer.
    unsafe { driver.device(&mut device, ordinal) }?;
    Ok(device)
}

/// A context that is current on this thread; the one before it is again when this is dropped.
///
/// Meanwhile the thread may call what a capture on another thread would forbid: an engine may be recording a graph (in
/// "global" mode, PyTorch's default) while we query or copy, and a call of ours must not void its recording.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    mode: Option<c_uint>,
    // Current on this thread, so it must be dropped on it.
    _thread: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    /// Makes `context` current. It is live for as long as the guard is.
    pub(crate) fn push(driver: &'a Driver, context: CUcontext) -> Result<Current<'a>, Refused> {
        // SAFETY: the caller vouches for the context.
        unsafe { driver.context_push(context) }?;
        Ok(Current {
            driver,
            mode: relax(driver),
            _thread: PhantomData,
        })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        restore(self.driver, self.mode);
        pop(self.driver);
    }
}

/// Takes the context on top away, which is the one that we put there, since all that do so nest.
fn pop(driver: &Driver) {
    let mut popped = std::ptr::null_mut();
    // SAFETY: writes one handle.
    if let Err(refused) = unsafe { driver.context_pop(&mut popped) } {
        tracing::warn!(%refused, "a context stayed current");
    }
}

/// The same without a context of ours: for calls that take whichever is current, or none.
pub(crate) struct Relaxed<'a> {
    driver: &'a Driver,
    mode: Option<c_uint>,
    _thread: PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    pub(crate) fn new(driver: &'a Driver) -> Relaxed<'a> {
        Relaxed {
            driver,
            mode: relax(driver),
            _thread: PhantomData,
        }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        restore(self.driver, self.mode);
    }
}

fn relax(driver: &Driver) -> Option<c_uint> {
    let mut mode = CAPTURE_RELAXED;
    // SAFETY: exchanges one integer. A driver without the call has no captures to disturb.
    unsafe { driver.capture_mode(&mut mode) }.ok()?;
    Some(mode)
}

fn restore(driver: &Driver, mode: Option<c_uint>) {
    if let Some(mut mode) = mode {
        // SAFETY: as in `relax`.
        let _ = unsafe { driver.capture_mode(&mut mode) };
    }
}
