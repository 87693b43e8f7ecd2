//! Words written and waited for in a stream's order.

use cudarc::driver::sys::CUresult;

use super::Handle;
use crate::config::Defect;
use crate::driver::{Answer, Driver};
use crate::memory::span::{Finder, Who};
use crate::stream::Op;

driver_calls! {
    cuStreamWriteValue32_v2(stream: Handle, address: u64, value: u32, flags: u32) |driver| {
        write(driver, stream, address, u64::from(value), 4, flags)
    }

    cuStreamWriteValue64_v2(stream: Handle, address: u64, value: u64, flags: u32) |driver| {
        write(driver, stream, address, value, 8, flags)
    }

    cuStreamWaitValue32_v2(stream: Handle, address: u64, value: u32, flags: u32) |driver| {
        wait(driver, stream, address, u64::from(value), 4, flags)
    }

    cuStreamWaitValue64_v2(stream: Handle, address: u64, value: u64, flags: u32) |driver| {
        wait(driver, stream, address, value, 8, flags)
    }
}

fn write(driver: &'static Driver, stream: Handle, to: u64, value: u64, width: u64, flags: u32) -> Answer {
    const NO_MEMORY_BARRIER: u32 = 1;
    if flags & !NO_MEMORY_BARRIER != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let stream = driver.stream_for_work(stream)?;
    check(driver, &stream.context, to, width)?;
    if flags & NO_MEMORY_BARRIER != 0 && !stream.engine {
        let what = "a word is written without a barrier: it says nothing about the copies before it";
        driver.checker.violation(what);
    }
    if driver.has(Defect::NoCompletion) {
        let world = driver.world.lock();
        let span = Finder::new(driver, &stream.context, Who::Kernel).one(&world.map, to, width)?;
        drop(world);
        span.put_word(value);
    }
    driver.submit(&stream, Op::WriteValue { to, value, width })
}

fn wait(driver: &'static Driver, stream: Handle, from: u64, value: u64, width: u64, flags: u32) -> Answer {
    const FLUSH: u32 = 1 << 30;
    if flags & !(FLUSH | 3) != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let stream = driver.stream_for_work(stream)?;
    if flags & FLUSH != 0 && driver.settings(stream.context.device)?.flush_options & 2 == 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    check(driver, &stream.context, from, width)?;
    driver.submit(
        &stream,
        Op::WaitValue {
            from,
            value,
            width,
            flags,
        },
    )
}

/// The word is aligned, and the device reaches it.
fn check(driver: &Driver, context: &crate::context::Context, address: u64, width: u64) -> Answer {
    if !address.is_multiple_of(width) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let world = driver.world.lock();
    let found = Finder::new(driver, context, Who::Kernel).one(&world.map, address, width);
    found.map(|_| ()).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)
}
