//! Regions as dmabufs.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use kvxfer_core::memory::{DmaBuf, Region};
use kvxfer_core::{Error, ErrorKind, Result};

use super::Domain;
use crate::driver::{Driver, Refused};
use crate::pointer;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMABUF: u32 = 1;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE` (12.8): a mapping that any PCIe device can use, also where the host and
/// the device share a coherent link.
const PCIE_MAPPING: u64 = 1;

impl Domain {
    /// One dmabuf for each mapping that the region has a part in.
    pub(super) fn export_dmabufs(&self, region: &Region) -> Result<Vec<DmaBuf>> {
        let known = self.known(region)?;
        let refused = |why: &str| {
            Error::new(ErrorKind::Unsupported, "no dmabufs")
                .at(format!("{}, {}", self.name, pointer::show(known.address, known.length)))
                .because(why)
        };
        if let Some(why) = self.facts.dmabuf_refusal() {
            return Err(refused(why));
        }
        if !known.refusal.is_empty() {
            let remedy = "make the memory with gpuDirectRDMACapable (PyTorch: without expandable_segments)";
            return Err(refused(&known.refusal).remedy(remedy));
        }
        let _current = self.enter()?;
        let page = page_bytes();
        let end = known.address + known.length;
        let mut dmabufs = Vec::with_capacity(known.mappings.len());
        for mapping in &known.mappings {
            let from = mapping.extent.base.max(known.address);
            let to = (mapping.extent.base + mapping.extent.length).min(end);
            let (first, last) = (from & !(page - 1), to.next_multiple_of(page));
            let fd = export(self.driver(), first, last - first).map_err(|refused| {
                let why = format!("{} of {}", refused, pointer::show(first, last - first));
                Error::from(self.failed(refused).because(why))
            })?;
            dmabufs.push(DmaBuf {
                fd,
                offset: from - first,
                length: to - from,
            });
        }
        Ok(dmabufs)
    }
}

/// A dmabuf of whole pages.
fn export(driver: &Driver, address: u64, length: u64) -> std::result::Result<OwnedFd, Refused> {
    let handle = |flags| {
        let mut fd: c_int = -1;
        // SAFETY: a handle of this kind is one integer; the range is only looked up.
        unsafe { driver.range_handle((&raw mut fd).cast(), address, length as usize, DMABUF, flags) }.map(|()| fd)
    };
    // A driver that does not know the flag, or a device that does not need it, refuses it.
    let fd = handle(PCIE_MAPPING).or_else(|_| handle(0))?;
    // SAFETY: the driver gave the descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The host's page size in bytes.
fn page_bytes() -> u64 {
    // SAFETY: reads a constant of the system's.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}
