//! GPU memory: the driver, found when it is first needed, and what can wait for the engine's events.

use std::ffi::c_void;

use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_cuda::Cuda;

use crate::after::{After, CudaHappening, Happening};
use crate::control::Shared;

use super::Endpoint;

impl Endpoint {
    /// The CUDA driver, loaded when it is first asked for as `cuda.library` says. Its [`region`](Cuda::region) makes the
    /// regions of pools in GPU memory. A pool may mix host and device memory.
    ///
    /// # Errors
    /// `Unsupported` with the reason if there is none that can be used; asked again, it is looked for again.
    pub fn cuda(&self) -> Result<Cuda> {
        self.shared.cuda()
    }

    /// What parts and pushes can wait for, until this happens.
    pub fn after(&self, happening: impl Happening) -> After {
        After::new(&self.shared.reports, Box::new(happening))
    }

    /// Captures a CUDA event as it is now: what was recorded in it before this call, for parts and pushes to wait for.
    /// Nothing of the caller's is kept; the event may be recorded again or destroyed. No stream and no device is waited
    /// for.
    ///
    /// # Errors
    /// `InvalidArgument` for a null event, inside a stream capture, and where there is no device to do it on: no context
    /// is current and no CUDA memory is registered. `Unsupported` without a driver, `Busy` if too many events wait.
    ///
    /// # Safety
    /// `event` is null or a live `CUevent` (or `cudaEvent_t`).
    pub unsafe fn after_cuda_event(&self, event: *mut c_void) -> Result<After> {
        // SAFETY: the caller's contract.
        unsafe { self.shared.after_cuda_event(event) }
    }
}

impl Shared {
    pub(crate) fn cuda(&self) -> Result<Cuda> {
        let mut loaded = self.cuda.lock();
        if let Some(cuda) = &*loaded {
            return Ok(cuda.clone());
        }
        let cuda = Cuda::load(&self.config.cuda)?;
        tracing::info!(endpoint = self.name, ?cuda, "CUDA driver loaded");
        Ok(loaded.insert(cuda).clone())
    }

    /// # Safety
    /// `event` is null or a live `CUevent`.
    pub(crate) unsafe fn after_cuda_event(&self, event: *mut c_void) -> Result<After> {
        if event.is_null() {
            return Err(Error::new(ErrorKind::InvalidArgument, "a null CUDA event")
                .remedy("pass an event that was recorded behind what writes the blocks"));
        }
        let cuda = self.cuda()?;
        // SAFETY: the caller's contract.
        let event = unsafe { cuda.capture(event) }?;
        Ok(After::new(&self.reports, Box::new(CudaHappening { cuda, event })))
    }

    /// The driver, if it was needed so far.
    pub(crate) fn loaded_cuda(&self) -> Option<Cuda> {
        self.cuda.lock().clone()
    }
}
