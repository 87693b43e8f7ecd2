//! Events.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUresult;

use super::{Handle, Out};
use crate::config::Defect;
use crate::driver::{Answer, Driver, is_engine};
use crate::event::Event;
use crate::stream::{LOOK, Op};

const DISABLE_TIMING: u32 = 2;

driver_calls! {
    cuEventCreate(out: Out<Handle>, flags: u32) |driver| {
        if flags & !7 != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let event = Event::new(driver.current()?, is_engine(), flags & DISABLE_TIMING == 0);
        let handle = driver.new_handle();
        driver.world.lock().events.insert(handle, Arc::new(event));
        out.set(handle)
    }

    cuEventRecord(event: Handle, stream: Handle) |driver| {
        record(driver, event, stream)
    }

    cuEventRecordWithFlags(event: Handle, stream: Handle, flags: u32) |driver| {
        if flags > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        record(driver, event, stream)
    }

    cuEventQuery(event: Handle) |driver| {
        driver.may_be_unsafe()?;
        let event = driver.event(event)?;
        if event.capture().is_some() {
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
        }
        match event.last().map(|signal| signal.state()) {
            // One that was never recorded has happened.
            None => Ok(()),
            Some(None) if driver.has(Defect::NoCompletion) => Ok(()),
            Some(None) => {
                event.context.sound()?;
                Err(CUresult::CUDA_ERROR_NOT_READY)
            }
            Some(Some(outcome)) => outcome.map(|_| ()),
        }
    }

    cuEventSynchronize(event: Handle) |driver| {
        driver.may_be_unsafe()?;
        let event = driver.event(event)?;
        if event.capture().is_some() {
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
        }
        let Some(signal) = event.last() else { return Ok(()) };
        loop {
            if let Some(outcome) = signal.state() {
                return outcome.map(|_| ());
            }
            signal.wait(LOOK);
            driver.refresh();
            if let Some(code) = driver.vanished() {
                return Err(code);
            }
        }
    }

    cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) |driver| {
        let (start, end) = (driver.event(start)?, driver.event(end)?);
        if !start.timing || !end.timing {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let when = |event: &Event| {
            let signal = event.last().ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            signal.state().ok_or(CUresult::CUDA_ERROR_NOT_READY)?
        };
        let (from, to) = (when(&start)?, when(&end)?);
        let forward = to.saturating_duration_since(from).max(Duration::ZERO);
        milliseconds.set(forward.as_secs_f32() * 1000.0)
    }

    cuEventDestroy_v2(event: Handle) |driver| {
        if driver.world.lock().events.remove(&event).is_none() {
            return driver.bad_handle("event", event);
        }
        Ok(())
    }
}

fn record(driver: &'static Driver, event: Handle, stream: Handle) -> Answer {
    let event = driver.event(event)?;
    let stream = driver.stream_for_work(stream)?;
    if event.context.handle != stream.context.handle {
        driver.wrong_context("an event is recorded in a stream of another context");
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let capture = stream.capture.lock().as_ref().map(|capture| capture.number);
    if let Some(capture) = capture {
        driver.is_capturing(&stream)?;
        event.record_captured(capture);
        return Ok(());
    }
    driver.submit(&stream, Op::Record(event.record()))
}
