//! Streams, and what is queued there beside copies.

use std::ffi::c_void;

use cudarc::driver::sys::CUresult;

use super::{Handle, Out};
use crate::config::Defect;
use crate::driver::{Answer, Driver};
use crate::stream::{Capture, HostCall, HostRun, Op, Stream};

driver_calls! {
    cuStreamCreate(out: Out<Handle>, flags: u32) |driver| {
        create(driver, out, flags, 0)
    }

    cuStreamCreateWithPriority(out: Out<Handle>, flags: u32, priority: i32) |driver| {
        create(driver, out, flags, priority.clamp(-5, 0))
    }

    cuStreamDestroy_v2(handle: Handle) |driver| {
        let stream = driver.world.lock().streams.remove(&handle);
        match stream {
            // What is queued is still done.
            Some(stream) => {
                stream.close();
                Ok(())
            }
            None => driver.bad_handle("stream", handle),
        }
    }

    cuStreamQuery(handle: Handle) |driver| {
        let stream = driver.stream(handle)?;
        driver.may_be_unsafe()?;
        if stream.capture.lock().is_some() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let (queued, done) = stream.progress();
        stream.context.sound()?;
        if done < queued { Err(CUresult::CUDA_ERROR_NOT_READY) } else { Ok(()) }
    }

    cuStreamSynchronize(handle: Handle) |driver| {
        let stream = driver.stream(handle)?;
        driver.may_be_unsafe()?;
        if stream.capture.lock().is_some() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        stream.finish();
        driver.vanished().map_or(Ok(()), Err)?;
        stream.context.sound()
    }

    cuStreamWaitEvent(handle: Handle, event: Handle, flags: u32) |driver| {
        if flags > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let stream = driver.stream_for_work(handle)?;
        let event = driver.event(event)?;
        if let Some(number) = event.capture() {
            return join_capture(driver, &stream, number);
        }
        if stream.capture.lock().is_some() {
            // What is captured may not depend on what is not.
            invalidate(&stream);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        }
        match event.last().filter(|_| !driver.has(Defect::NoEventWait)) {
            Some(signal) => driver.submit(&stream, Op::Wait(signal)),
            None => Ok(()),
        }
    }

    cuStreamGetCtx(handle: Handle, out: Out<Handle>) |driver| {
        out.set(driver.stream(handle)?.context.handle)
    }

    cuStreamGetDevice(handle: Handle, out: Out<i32>) |driver| {
        out.set(driver.stream(handle)?.context.device as i32)
    }

    cuStreamGetFlags(handle: Handle, out: Out<u32>) |driver| {
        out.set(driver.stream(handle)?.flags)
    }

    cuStreamGetPriority(handle: Handle, out: Out<i32>) |driver| {
        out.set(driver.stream(handle)?.priority)
    }

    cuStreamGetId(handle: Handle, out: Out<u64>) |driver| {
        out.set(driver.stream(handle)?.handle as u64)
    }

    cuLaunchHostFunc(handle: Handle, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void) |driver| {
        let run = HostRun::Plain(function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?);
        let stream = driver.stream_for_work(handle)?;
        driver.submit(&stream, Op::Host(HostCall { run, data }))
    }

    cuStreamAddCallback(handle: Handle, function: Option<unsafe extern "C" fn(usize, CUresult, *mut c_void)>, data: *mut c_void, flags: u32) |driver| {
        let function = function.filter(|_| flags == 0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let stream = driver.stream_for_work(handle)?;
        if stream.capture.lock().is_some() {
            invalidate(&stream);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let run = HostRun::Callback(function, handle);
        driver.submit(&stream, Op::Host(HostCall { run, data }))
    }
}

fn create(driver: &'static Driver, out: Out<Handle>, flags: u32, priority: i32) -> Answer {
    if flags > 1 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let stream = Stream::new(driver.new_handle(), driver.current()?, flags, priority, false);
    driver.world.lock().streams.insert(stream.handle, stream.clone());
    out.set(stream.handle)
}

fn invalidate(stream: &Stream) {
    if let Some(capture) = &mut *stream.capture.lock() {
        capture.invalid = true;
    }
}

/// A stream that waits for an event of a capture becomes part of it.
fn join_capture(driver: &'static Driver, stream: &Stream, number: usize) -> Answer {
    let streams: Vec<_> = driver.world.lock().streams.values().cloned().collect();
    let find = |other: &std::sync::Arc<Stream>| {
        let capture = other.capture.lock();
        capture
            .clone()
            .filter(|capture| capture.number == number && capture.origin)
    };
    let Some(capture) = streams.iter().find_map(find) else {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    };
    let mut own = stream.capture.lock();
    if own.as_ref().is_some_and(|own| own.number != number) {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    if own.is_none() {
        *own = Some(Capture {
            origin: false,
            ..capture
        });
    }
    Ok(())
}
