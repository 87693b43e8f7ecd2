//! Stream capture: work of a capturing stream is not done, and what the capture does not allow ends it.

use std::cell::Cell;

use cudarc::driver::sys::CUresult;

use super::{Handle, Out};
use crate::driver::{Answer, Driver, is_engine};
use crate::stream::{Capture, Stream};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

driver_calls! {
    cuStreamBeginCapture_v2(handle: Handle, mode: u32) |driver| {
        if handle <= 1 {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if mode > RELAXED {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let stream = driver.stream(handle)?;
        let mut capture = stream.capture.lock();
        if capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        *capture = Some(Capture {
            number: driver.new_handle(),
            mode,
            thread: std::thread::current().id(),
            invalid: false,
            origin: true,
        });
        Ok(())
    }

    cuStreamEndCapture(handle: Handle, graph: Out<Handle>) |driver| {
        let stream = driver.stream(handle)?;
        let capture = stream.capture.lock().clone();
        let Some(capture) = capture.filter(|capture| capture.origin) else {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        };
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        for other in driver.world.lock().streams.values() {
            other.capture.lock().take_if(|other| other.number == capture.number);
        }
        graph.set(0)?;
        if capture.invalid {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let handle = driver.new_handle();
        driver.world.lock().graphs.insert(handle, is_engine());
        graph.set(handle)
    }

    cuStreamIsCapturing(handle: Handle, status: Out<u32>) |driver| {
        let stream = driver.stream(handle)?;
        let state = match &*stream.capture.lock() {
            None => 0,
            Some(capture) if !capture.invalid => 1,
            Some(_) => 2,
        };
        status.set(state)
    }

    cuThreadExchangeStreamCaptureMode(mode: Out<u32>) |_driver| {
        let wanted = mode.get()?;
        if wanted > RELAXED {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        mode.set(MODE.replace(wanted))
    }

    cuGraphDestroy(graph: Handle) |driver| {
        if driver.world.lock().graphs.remove(&graph).is_none() {
            return driver.bad_handle("graph", graph);
        }
        Ok(())
    }
}

impl Driver {
    /// Whether work of the stream is captured instead of done; an error if the capture was ended by something.
    pub(crate) fn is_capturing(&self, stream: &Stream) -> Answer<bool> {
        match &*stream.capture.lock() {
            None => Ok(false),
            Some(capture) if capture.invalid => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            Some(_) => Ok(true),
        }
    }

    /// Calls that may break a capture are refused during one, and break it: on all threads if it is a global one,
    /// unless the thread has said that it knows what it does.
    pub(crate) fn may_be_unsafe(&self) -> Answer {
        let mode = MODE.get();
        if mode == RELAXED {
            return Ok(());
        }
        let this = std::thread::current().id();
        let mut refused = false;
        for stream in self.world.lock().streams.values() {
            if let Some(capture) = &mut *stream.capture.lock()
                && capture.mode != RELAXED
                && (capture.thread == this || (capture.mode == GLOBAL && mode != THREAD_LOCAL))
            {
                capture.invalid = true;
                refused = true;
            }
        }
        if !refused {
            return Ok(());
        }
        if !is_engine() {
            self.checker
                .violation("a call that no capture allows is made while the engine captures a graph, which breaks it");
        }
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }
}
