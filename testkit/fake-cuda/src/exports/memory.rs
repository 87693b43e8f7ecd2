//! Allocating, freeing and page-locking memory.

use std::ffi::c_void;

use cudarc::driver::sys::CUresult;

use super::{Handle, Out, device_number};
use crate::driver::{Answer, Driver};
use crate::memory::backing;
use crate::memory::map::{Kind, Place};
use crate::stream::Op;

const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;
/// The handle of a device's own pool is this and its number.
const DEFAULT_POOL: usize = 0x0fa4_ffff_0000_0000;

driver_calls! {
    cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |driver| {
        let device = driver.current()?.device;
        let all = driver.settings(device)?.memory_bytes;
        let used = driver.world.lock().map.used.get(&device).copied().unwrap_or(0);
        free.set((all - used.min(all)) as usize)?;
        total.set(all as usize)
    }

    cuMemAlloc_v2(out: Out<u64>, length: usize) |driver| {
        driver.may_be_unsafe()?;
        let context = driver.current()?;
        out.set(driver.new_device_memory(context.device, context.handle, length as u64, None)?)
    }

    cuMemFree_v2(address: u64) |driver| {
        if address == 0 {
            return Ok(());
        }
        driver.may_be_unsafe()?;
        driver.current()?;
        driver.free_device(address)
    }

    cuMemGetAddressRange_v2(base: Out<u64>, length: Out<usize>, address: u64) |driver| {
        driver.current()?;
        match driver.world.lock().map.place(address) {
            Place::Known(range) if !matches!(range.kind, Kind::HostRegistered { .. }) => {
                base.offer(range.start);
                length.offer(range.length as usize);
                Ok(())
            }
            Place::Known(_) | Place::Unknown => Err(CUresult::CUDA_ERROR_NOT_FOUND),
            Place::Freed | Place::Empty => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuMemAllocManaged(out: Out<u64>, length: usize, flags: u32) |driver| {
        if length == 0 || !(1..=2).contains(&flags) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let context = driver.current()?;
        let start = backing::host(length as u64).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        driver.add_range(start, length as u64, context.device, context.handle, Kind::Managed);
        out.set(start)
    }

    cuMemHostAlloc(out: Out<u64>, length: usize, flags: u32) |driver| {
        host_alloc(driver, out, length, flags)
    }

    cuMemAllocHost_v2(out: Out<u64>, length: usize) |driver| {
        host_alloc(driver, out, length, 0)
    }

    cuMemFreeHost(address: u64) |driver| {
        driver.may_be_unsafe()?;
        driver.current()?;
        let range = driver.world.lock().map.at(address).cloned();
        match range {
            Some(range) if matches!(range.kind, Kind::HostAllocated { .. }) => driver.free_range(range),
            _ => {
                driver.note_freed_twice("page-locked memory", address);
                Err(CUresult::CUDA_ERROR_INVALID_VALUE)
            }
        }
    }

    cuMemHostRegister_v2(address: u64, length: usize, flags: u32) |driver| {
        driver.may_be_unsafe()?;
        let context = driver.current()?;
        let length = length as u64;
        let end = address.checked_add(length);
        if address == 0 || length == 0 || end.is_none() || flags & !0xf != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        {
            let world = driver.world.lock();
            if world.map.is_taken(address, length) {
                return Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
            }
            let in_device = matches!(world.map.place(address), Place::Empty);
            if in_device || !backing::is_mapped(address, length) {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
        }
        let kind = Kind::HostRegistered { flags };
        driver.add_range(address, length, context.device, context.handle, kind);
        Ok(())
    }

    cuMemHostUnregister(address: u64) |driver| {
        driver.may_be_unsafe()?;
        driver.current()?;
        let range = driver.world.lock().map.at(address).cloned();
        match range {
            Some(range) if matches!(range.kind, Kind::HostRegistered { .. }) => driver.free_range(range),
            _ => Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        }
    }

    cuMemHostGetDevicePointer_v2(out: Out<u64>, address: u64, flags: u32) |driver| {
        driver.current()?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        match driver.world.lock().map.holding(address) {
            Some(range) if range.is_pinned() => out.set(address),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuMemHostGetFlags(out: Out<u32>, address: u64) |driver| {
        match driver.world.lock().map.holding(address).map(|range| &range.kind) {
            Some(Kind::HostAllocated { flags } | Kind::HostRegistered { flags }) => {
                out.set(flags | PORTABLE | DEVICE_MAP)
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuDeviceGetDefaultMemPool(out: Out<Handle>, device: i32) |driver| {
        let device = device_number(device)?;
        driver.settings(device)?;
        out.set(DEFAULT_POOL + device as usize)
    }

    cuMemPoolCreate(out: Out<Handle>, properties: *const c_void) |driver| {
        if properties.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let device = driver.device_of_current().unwrap_or(0);
        let handle = driver.new_handle();
        driver.world.lock().pools.insert(handle, device);
        out.set(handle)
    }

    cuMemPoolDestroy(pool: Handle) |driver| {
        if driver.world.lock().pools.remove(&pool).is_none() {
            return driver.bad_handle("memory pool", pool);
        }
        Ok(())
    }

    cuMemAllocAsync(out: Out<u64>, length: usize, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        let device = stream.context.device;
        pool_alloc(driver, out, device, length, DEFAULT_POOL + device as usize)
    }

    cuMemAllocFromPoolAsync(out: Out<u64>, length: usize, pool: Handle, stream: Handle) |driver| {
        driver.stream_for_work(stream)?;
        let device = match driver.world.lock().pools.get(&pool) {
            Some(device) => *device,
            None => u32::try_from(pool.wrapping_sub(DEFAULT_POOL)).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?,
        };
        pool_alloc(driver, out, device, length, pool)
    }

    cuMemFreeAsync(address: u64, stream: Handle) |driver| {
        let stream = driver.stream_for_work(stream)?;
        driver.submit(&stream, Op::Free(address))
    }
}

fn host_alloc(driver: &'static Driver, out: Out<u64>, length: usize, flags: u32) -> Answer {
    driver.may_be_unsafe()?;
    let context = driver.current()?;
    if length == 0 || flags & !7 != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let start = backing::host(length as u64).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
    let kind = Kind::HostAllocated { flags };
    driver.add_range(start, length as u64, context.device, context.handle, kind);
    out.set(start)
}

/// Memory of a pool belongs to no context, and may be used from now on by what is ordered behind the stream: here by all.
fn pool_alloc(driver: &'static Driver, out: Out<u64>, device: u32, length: usize, pool: usize) -> Answer {
    out.set(driver.new_device_memory(device, 0, length as u64, Some(pool))?)
}
