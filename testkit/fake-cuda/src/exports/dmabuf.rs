//! Memory as a file descriptor that network devices can map.

use std::os::fd::IntoRawFd;

use cudarc::driver::sys::CUresult;

use super::Out;
use crate::memory::attributes::is_gpudirect;
use crate::memory::backing::PAGE;
use crate::memory::map::{Kind, Place};

driver_calls! {
    cuMemGetHandleForAddressRange(out: Out<i32>, address: u64, length: usize, kind: u32, flags: u64) |driver| {
        const DMABUF: u32 = 1;
        const PCIE_MAPPING: u64 = 1;
        let length = length as u64;
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        if kind != DMABUF || flags & !PCIE_MAPPING != 0 || length == 0 {
            return Err(invalid);
        }
        let version = driver.general().map_or(0, |settings| settings.driver_version);
        if flags & PCIE_MAPPING != 0 && version < 12_080 {
            return Err(invalid);
        }
        if !address.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
            return Err(invalid);
        }
        let end = address.checked_add(length).ok_or(invalid)?;
        // Small allocations do not begin on a page; but their block does, and it is exported whole.
        let found = {
            let world = driver.world.lock();
            let mut found = None;
            for inside in [address, end - 1] {
                if let Place::Known(range) = world.map.place(inside) {
                    found = Some(range);
                }
            }
            let holds = |range: &std::sync::Arc<crate::memory::map::Range>| {
                let (first, last) = extent(range);
                first <= address && end <= last
            };
            let whole = |range: &&std::sync::Arc<crate::memory::map::Range>| holds(range) && range.backing().is_some();
            found.filter(|range| whole(&range)).or_else(|| world.map.all().find(whole).cloned())
        };
        let range = found.ok_or(invalid)?;
        let settings = driver.settings(range.device)?;
        if !settings.dmabuf || !is_gpudirect(driver, &range) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let Some((backing, offset)) = range.backing() else {
            return Err(invalid);
        };
        // Where the addresses begin in the bytes, which may be before the range does.
        let from = (offset + address).wrapping_sub(range.start);
        let descriptor = if settings.writes_ordering == 0 {
            backing.export_shadowed(from)
        } else {
            backing.export(from)
        };
        out.set(descriptor.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?.into_raw_fd())
    }
}

/// The addresses that belong to the same physical memory.
fn extent(range: &crate::memory::map::Range) -> (u64, u64) {
    match range.kind {
        Kind::Device {
            block, block_length, ..
        } => (block, block + block_length),
        _ => (range.start, range.end()),
    }
}
