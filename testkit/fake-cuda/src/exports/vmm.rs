//! Virtual memory management: addresses, physical memory, and mappings of the one to the other.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use parking_lot::Mutex;

use super::{In, Out, device_number};
use crate::driver::{Answer, Driver, is_engine};
use crate::memory::backing::{self, BLOCK, Backing};
use crate::memory::map::{Kind, Physical, Range};

const POSIX_FILE: u32 = 1;
const ON_DEVICE: u32 = 1;
const PINNED: u32 = 1;

/// `CUmemAllocationProp`, with integers for its enumerations.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    windows: usize,
    compression: u8,
    gpudirect: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemLocation`, likewise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: u32,
    id: i32,
}

/// `CUmemAccessDesc`, likewise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    location: Location,
    flags: u32,
}

impl Location {
    fn device(self, driver: &Driver) -> Answer<u32> {
        if self.kind != ON_DEVICE {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let device = device_number(self.id)?;
        if !driver.settings(device)?.vmm {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        Ok(device)
    }
}

driver_calls! {
    cuMemGetAllocationGranularity(out: Out<usize>, properties: In<Properties>, option: u32) |driver| {
        properties.get()?.location.device(driver)?;
        if option > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        out.set(BLOCK as usize)
    }

    cuMemAddressReserve(out: Out<u64>, length: usize, alignment: usize, wanted: u64, flags: u64) |driver| {
        // Where the caller wants it is only a wish.
        let _ = wanted;
        let length = length as u64;
        let alignment = (alignment as u64).max(BLOCK);
        if length == 0 || !length.is_multiple_of(BLOCK) || !alignment.is_power_of_two() || flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let start = backing::reserve(length, alignment).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        driver.world.lock().map.reserved.insert(start, (length, is_engine()));
        out.set(start)
    }

    cuMemAddressFree(start: u64, length: usize) |driver| {
        let mut world = driver.world.lock();
        let known = world.map.reserved.get(&start).is_some_and(|(own, _)| *own == length as u64);
        if !known || world.map.is_taken(start, length as u64) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        world.map.reserved.remove(&start);
        backing::release(start, length as u64);
        Ok(())
    }

    cuMemCreate(out: Out<u64>, length: usize, properties: In<Properties>, flags: u64) |driver| {
        let properties = properties.get()?;
        let device = properties.location.device(driver)?;
        let length = length as u64;
        if properties.kind != PINNED || length == 0 || !length.is_multiple_of(BLOCK) || flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let settings = driver.settings(device)?;
        if properties.gpudirect != 0 && !settings.gpudirect {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let mut world = driver.world.lock();
        let used = world.map.used.entry(device).or_default();
        if *used + length > settings.memory_bytes {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let backing = Backing::new(length).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        *used += length;
        let handle = driver.new_handle() as u64;
        let physical = Physical {
            backing,
            device,
            gpudirect: properties.gpudirect != 0,
            handle_types: properties.handle_types,
            imported: false,
            engine: is_engine(),
        };
        world.physicals.insert(handle, (Arc::new(physical), 1));
        out.set(handle)
    }

    cuMemRelease(handle: u64) |driver| {
        let mut world = driver.world.lock();
        let Some((physical, held)) = world.physicals.get_mut(&handle) else {
            drop(world);
            return driver.bad_handle("physical allocation", handle as usize);
        };
        *held -= 1;
        if *held == 0 {
            let physical = physical.clone();
            world.physicals.remove(&handle);
            // What was imported is counted where it was made.
            if !physical.imported {
                let used = world.map.used.entry(physical.device).or_default();
                *used = used.saturating_sub(physical.backing.length());
            }
        }
        Ok(())
    }

    cuMemMap(start: u64, length: usize, offset: usize, handle: u64, flags: u64) |driver| {
        let (length, offset) = (length as u64, offset as u64);
        let mut world = driver.world.lock();
        let Some((physical, _)) = world.physicals.get(&handle) else {
            drop(world);
            return driver.bad_handle("physical allocation", handle as usize);
        };
        let physical = physical.clone();
        let inside = |(first, (whole, _)): (&u64, &(u64, bool))| {
            *first <= start && start.checked_add(length).is_some_and(|end| end <= first + whole)
        };
        let reserved = world.map.reserved.range(..=start).next_back().is_some_and(inside);
        let aligned = start.is_multiple_of(BLOCK) && length.is_multiple_of(BLOCK) && length > 0 && offset == 0;
        if !reserved || !aligned || flags != 0 || offset + length > physical.backing.length() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if world.map.is_taken(start, length) {
            return Err(CUresult::CUDA_ERROR_ALREADY_MAPPED);
        }
        let device = physical.device;
        let id = world.map.new_id();
        world.map.add(Range {
            start,
            length,
            id,
            device,
            context: 0,
            engine: is_engine(),
            kind: Kind::Mapping {
                physical,
                offset,
                access: Mutex::new(HashMap::new()),
            },
            sync_memops: false.into(),
        });
        Ok(())
    }

    cuMemUnmap(start: u64, length: usize) |driver| {
        for range in mappings(driver, start, length as u64)? {
            driver.free_range(range)?;
        }
        Ok(())
    }

    cuMemSetAccess(start: u64, length: usize, list: In<Access>, count: usize) |driver| {
        let ranges = mappings(driver, start, length as u64)?;
        for access in list.list(count)? {
            let device = access.location.device(driver)?;
            if ![0, 1, 3].contains(&access.flags) {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            for range in &ranges {
                let peer = device == range.device || driver.settings(device)?.peer;
                let Kind::Mapping { access: allowed, .. } = &range.kind else { continue };
                if !peer {
                    return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
                }
                allowed.lock().insert(device, access.flags);
            }
        }
        Ok(())
    }

    cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: u64) |driver| {
        let device = location.get()?.device(driver)?;
        match driver.world.lock().map.holding(address).map(|range| &range.kind) {
            Some(Kind::Mapping { access, .. }) => {
                flags.set(u64::from(access.lock().get(&device).copied().unwrap_or(0)))
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuMemRetainAllocationHandle(out: Out<u64>, address: u64) |driver| {
        let mut world = driver.world.lock();
        let Some(range) = world.map.holding(address).cloned() else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let Kind::Mapping { physical, .. } = &range.kind else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        // Its handle may be gone while the mapping keeps the memory: then it gets a new one.
        let known = world.physicals.iter_mut().find(|(_, (other, _))| Arc::ptr_eq(other, physical));
        let handle = match known {
            Some((handle, (_, held))) => {
                *held += 1;
                *handle
            }
            None => {
                let handle = driver.new_handle() as u64;
                // Taken off again when the handle is released.
                if !physical.imported {
                    *world.map.used.entry(physical.device).or_default() += physical.backing.length();
                }
                world.physicals.insert(handle, (physical.clone(), 1));
                handle
            }
        };
        out.set(handle)
    }

    cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: u64) |driver| {
        let world = driver.world.lock();
        let Some((physical, _)) = world.physicals.get(&handle) else {
            drop(world);
            return driver.bad_handle("physical allocation", handle as usize);
        };
        out.set(Properties {
            kind: PINNED,
            handle_types: physical.handle_types,
            location: Location {
                kind: ON_DEVICE,
                id: physical.device as i32,
            },
            windows: 0,
            compression: 0,
            gpudirect: u8::from(physical.gpudirect),
            usage: 0,
            reserved: [0; 4],
        })
    }

    cuMemExportToShareableHandle(out: Out<i32>, handle: u64, kind: u32, flags: u64) |driver| {
        let known = driver.world.lock().physicals.get(&handle).map(|(physical, _)| physical.clone());
        let Some(physical) = known else {
            return driver.bad_handle("physical allocation", handle as usize);
        };
        if kind != POSIX_FILE || physical.handle_types & POSIX_FILE == 0 || flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // The position says which device it is on: nobody else uses it.
        let file = physical.backing.export(u64::from(physical.device));
        out.set(file.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?.into_raw_fd())
    }

    cuMemImportFromShareableHandle(out: Out<u64>, descriptor: *mut c_void, kind: u32) |driver| {
        use std::io::Seek;
        let invalid = |_| CUresult::CUDA_ERROR_INVALID_VALUE;
        let number = i32::try_from(descriptor.addr()).map_err(invalid)?;
        if kind != POSIX_FILE || number < 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller says that it is one of its descriptors; a wrong number is an error of `try_clone`.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        let invalid = |_| CUresult::CUDA_ERROR_INVALID_VALUE;
        let mut file = File::from(borrowed.try_clone_to_owned().map_err(invalid)?);
        let device = file.stream_position().map_err(invalid)? as u32;
        driver.settings(device)?;
        let physical = Physical {
            backing: Backing::of(file).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?,
            device,
            gpudirect: false,
            handle_types: POSIX_FILE,
            imported: true,
            engine: is_engine(),
        };
        let handle = driver.new_handle() as u64;
        driver.world.lock().physicals.insert(handle, (Arc::new(physical), 1));
        out.set(handle)
    }
}

/// The mappings that fill these addresses, from edge to edge.
fn mappings(driver: &Driver, start: u64, length: u64) -> Answer<Vec<Arc<Range>>> {
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    let end = start.checked_add(length).ok_or(invalid)?;
    let world = driver.world.lock();
    let mut next = start;
    let mut found = Vec::new();
    while next < end {
        let range = world
            .map
            .at(next)
            .filter(|range| matches!(range.kind, Kind::Mapping { .. }));
        let range = range.filter(|range| range.end() <= end).ok_or(invalid)?;
        next = range.end();
        found.push(range.clone());
    }
    Ok(found)
}
