//! Copies and fills, asynchronous and not, and the flush of network devices' writes.

use std::sync::Arc;

use cudarc::driver::sys::{CUmemcpyAttributes, CUresult};

use super::{Handle, In, Out};
use crate::config::Defect;
use crate::driver::{Answer, Driver};
use crate::memory::map::Place;
use crate::stream::{Op, Piece, Stream};

driver_calls! {
    cuMemcpyAsync(to: u64, from: u64, length: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        one(driver, &stream, to, from, length)
    }

    cuMemcpyHtoDAsync_v2(to: u64, from: u64, length: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        device(driver, to)?;
        one(driver, &stream, to, from, length)
    }

    cuMemcpyDtoHAsync_v2(to: u64, from: u64, length: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        device(driver, from)?;
        one(driver, &stream, to, from, length)
    }

    cuMemcpyDtoDAsync_v2(to: u64, from: u64, length: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        device(driver, to)?;
        device(driver, from)?;
        one(driver, &stream, to, from, length)
    }

    cuMemcpyPeerAsync(to: u64, to_context: Handle, from: u64, from_context: Handle, length: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        for (address, context) in [(to, to_context), (from, from_context)] {
            if driver.context(context)?.device != device(driver, address)? {
                driver.wrong_context("a copy between devices names a context of another device than the memory's");
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
        }
        one(driver, &stream, to, from, length)
    }

    cuMemcpyBatchAsync(to: In<u64>, from: In<u64>, lengths: In<usize>, count: usize, attributes: In<CUmemcpyAttributes>, indices: In<usize>, attribute_count: usize, failed: Out<usize>, stream: Handle) |driver| {
        failed.offer(usize::MAX);
        if stream <= 2 || count == 0 || attribute_count == 0 || attribute_count > count {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if driver.general().is_some_and(|settings| settings.driver_version < 12_080) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let stream = driver.stream_for_work(stream)?;
        if stream.capture.lock().is_some() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        // Each attribute is for the copies from its index on; the first begins with the first.
        let indices = indices.list(attribute_count)?;
        let rising = indices.windows(2).all(|pair| pair[0] < pair[1]);
        if indices[0] != 0 || !rising || indices[attribute_count - 1] >= count {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        for index in 0..attribute_count {
            // As its first word only: the rest may be what no enumeration has.
            let order = In(attributes.nth(index).0.cast::<u32>()).get()?;
            if !(1..=3).contains(&order) {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
        }
        let mut pieces = Vec::with_capacity(count);
        for index in 0..count {
            let length = lengths.nth(index).get()? as u64;
            if length == 0 {
                failed.offer(index);
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            let (to, from) = (to.nth(index).get()?, from.nth(index).get()?);
            pieces.push(Piece { to, from, length });
        }
        driver.queue_copy(&stream, pieces, true)
    }

    cuMemcpy(to: u64, from: u64, length: usize) |driver| {
        now(driver, to, from, length)
    }

    cuMemcpyPeer(to: u64, to_context: Handle, from: u64, from_context: Handle, length: usize) |driver| {
        driver.context(to_context)?;
        driver.context(from_context)?;
        now(driver, to, from, length)
    }

    cuMemcpyHtoD_v2(to: u64, from: u64, length: usize) |driver| {
        device(driver, to)?;
        now(driver, to, from, length)
    }

    cuMemcpyDtoH_v2(to: u64, from: u64, length: usize) |driver| {
        device(driver, from)?;
        now(driver, to, from, length)
    }

    cuMemcpyDtoD_v2(to: u64, from: u64, length: usize) |driver| {
        device(driver, to)?;
        device(driver, from)?;
        now(driver, to, from, length)
    }

    cuMemsetD8_v2(to: u64, value: u8, count: usize) |driver| {
        let stream = driver.stream_for_work(0)?;
        fill(driver, &stream, to, u32::from(value), count as u64, 1)?;
        done(driver, &stream)
    }

    cuMemsetD32_v2(to: u64, value: u32, count: usize) |driver| {
        let stream = driver.stream_for_work(0)?;
        fill(driver, &stream, to, value, count as u64, 4)?;
        done(driver, &stream)
    }

    cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        fill(driver, &stream, to, u32::from(value), count as u64, 1)
    }

    cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        fill(driver, &stream, to, value, count as u64, 4)
    }

    cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) |driver| {
        const CURRENT: u32 = 0;
        if target != CURRENT || ![100, 200].contains(&scope) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let context = driver.current()?;
        if driver.settings(context.device)?.flush_options & 1 == 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        if !driver.has(Defect::NoFlush) {
            driver.publish(context.device);
        }
        Ok(())
    }
}

/// The device that memory is on, which has to be a device's.
fn device(driver: &Driver, address: u64) -> Answer<u32> {
    match driver.world.lock().map.place(address) {
        Place::Known(range) if !range.is_pinned() => Ok(range.device),
        Place::Freed => {
            let what = format!("a copy of memory at {address:#x}, which was freed");
            driver.checker.violation(&what);
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        }
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

fn one(driver: &'static Driver, stream: &Arc<Stream>, to: u64, from: u64, length: usize) -> Answer {
    if length == 0 {
        return Ok(());
    }
    let length = length as u64;
    driver.queue_copy(stream, vec![Piece { to, from, length }], false)
}

/// A copy that waits for itself, in the default stream.
fn now(driver: &'static Driver, to: u64, from: u64, length: usize) -> Answer {
    driver.may_be_unsafe()?;
    let stream = driver.stream_for_work(0)?;
    one(driver, &stream, to, from, length)?;
    done(driver, &stream)
}

fn done(driver: &'static Driver, stream: &Stream) -> Answer {
    stream.finish();
    driver.vanished().map_or(Ok(()), Err)?;
    stream.context.sound()
}

fn fill(driver: &'static Driver, stream: &Arc<Stream>, to: u64, value: u32, count: u64, width: u64) -> Answer {
    if !to.is_multiple_of(width) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    match driver.world.lock().map.place(to) {
        Place::Known(_) => {}
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
    let length = count * width;
    driver.submit(
        stream,
        Op::Fill {
            to,
            length,
            value,
            width,
        },
    )
}
