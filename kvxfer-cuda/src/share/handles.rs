//! The driver's side: what memory is handed over by, and what is opened and mapped of it. Each value gives back what it has
//! when it is dropped.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice, CUipcMemHandle, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemLocationType,
};

use crate::context::Primary;
use crate::driver::{Code, Driver, Refused};
use crate::pointer::POSIX_DESCRIPTOR;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: u32 = 1;
/// Bytes of the driver's handle of an allocation.
const HANDLE_BYTES: usize = 64;

/// The driver's handle of an allocation, in halves.
pub(super) type Handle = [[u8; HANDLE_BYTES / 2]; 2];

/// The handle of the allocation at `base`.
pub(super) fn allocation_handle(primary: &Primary, base: u64) -> Result<Handle, Refused> {
    let mut handle = CUipcMemHandle {
        reserved: [0; HANDLE_BYTES],
    };
    let _current = primary.enter()?;
    // SAFETY: writes one structure.
    unsafe { primary.driver().allocation_handle(&mut handle, base) }?;
    let bytes = handle.reserved.map(|byte| byte as u8);
    let half = |at: usize| std::array::from_fn(|byte| bytes[at + byte]);
    Ok([half(0), half(HANDLE_BYTES / 2)])
}

/// A descriptor of what is mapped at `base`.
pub(super) fn mapping_descriptor(primary: &Primary, base: u64) -> Result<OwnedFd, Refused> {
    let driver = primary.driver();
    let _current = primary.enter()?;
    let mut handle = 0;
    // SAFETY: writes one handle; the address is only looked up.
    unsafe { driver.mapping_retain(&mut handle, base as *mut c_void) }?;
    let mut descriptor: c_int = -1;
    // SAFETY: a handle of this kind is one integer; the driver's was just retained.
    let made = unsafe { driver.mapping_export((&raw mut descriptor).cast(), handle, POSIX_DESCRIPTOR, 0) };
    // SAFETY: the driver gave the descriptor to us.
    let made = made.map(|()| unsafe { OwnedFd::from_raw_fd(descriptor) });
    // SAFETY: retained above, released once.
    unsafe { driver.mapping_release(handle) }?;
    made
}

/// Whether a device can reach another's memory, or its own.
pub(super) fn reaches(driver: &Driver, device: CUdevice, other: CUdevice) -> Result<bool, Refused> {
    let mut can = c_int::from(device == other);
    if can == 0 {
        // SAFETY: writes one integer.
        unsafe { driver.peer_reachable(&mut can, device, other) }?;
    }
    Ok(can != 0)
}

/// Lets a device's context reach memory that was allocated in another's.
pub(super) fn enable_peer(primary: &Primary, other: &Primary) -> Result<(), Refused> {
    let _current = primary.enter()?;
    // SAFETY: both contexts are retained.
    match unsafe { primary.driver().peer_enable(other.context(), 0) } {
        // Once is enough, whoever did it; and it stays, since he may rely on it.
        Err(refused) if refused.code == Code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        result => result,
    }
}

/// Another process's allocation, opened in a device's context.
#[derive(Debug)]
pub(super) struct Opened {
    primary: Arc<Primary>,
    address: u64,
    open: bool,
}

impl Opened {
    pub(super) fn new(primary: &Arc<Primary>, handle: &Handle) -> Result<Opened, Refused> {
        let _current = primary.enter()?;
        let bytes = handle.as_flattened();
        let handle = CUipcMemHandle {
            reserved: std::array::from_fn(|at| bytes[at] as c_char),
        };
        let mut address = 0;
        // SAFETY: writes one address. What the handle says is the driver's to check.
        unsafe { primary.driver().allocation_open(&mut address, handle, LAZY_PEER_ACCESS) }?;
        Ok(Opened {
            primary: Arc::clone(primary),
            address,
            open: true,
        })
    }

    /// Closes it.
    pub(super) fn close(mut self) -> Result<(), Refused> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), Refused> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        let _current = self.primary.enter_to_give_back()?;
        // SAFETY: opened by `new`, closed once. Who owns the value keeps it while copies of it run.
        unsafe { self.primary.driver().allocation_close(self.address) }
    }

    /// Where it begins.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        report("another process's memory was not closed", self.give_back());
    }
}

fn report(what: &str, given_back: Result<(), Refused>) {
    if let Err(refused) = given_back {
        tracing::warn!(%refused, "{what}");
    }
}

/// Memory behind a descriptor: a handle that is released when it is dropped. What is mapped of it stays.
#[derive(Debug)]
pub(super) struct Physical {
    primary: Arc<Primary>,
    handle: u64,
    length: u64,
}

impl Physical {
    /// Of a descriptor, which may be closed then; `length` bytes of it are to be mapped.
    pub(super) fn import(primary: &Arc<Primary>, descriptor: &OwnedFd, length: u64) -> Result<Physical, Refused> {
        let _current = primary.enter()?;
        let number = descriptor.as_raw_fd() as usize as *mut c_void;
        let mut handle = 0;
        // SAFETY: writes one handle. The descriptor is open, and what it is the driver's to check.
        unsafe { primary.driver().mapping_import(&mut handle, number, POSIX_DESCRIPTOR) }?;
        Ok(Physical {
            primary: Arc::clone(primary),
            handle,
            length,
        })
    }

    /// Bytes of it that are to be mapped.
    pub(super) fn length(&self) -> u64 {
        self.length
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let released = self.primary.enter_to_give_back().and_then(|_current| {
            // SAFETY: imported by `import`, released once.
            unsafe { self.primary.driver().mapping_release(self.handle) }
        });
        report("the handle of another process's memory was not released", released);
    }
}

/// Memory of several handles, mapped one behind the other for a device.
#[derive(Debug)]
pub(super) struct Mapped {
    primary: Arc<Primary>,
    start: u64,
    length: usize,
    /// Where each mapping begins, and its bytes.
    mapped: Vec<(u64, usize)>,
}

impl Mapped {
    /// Maps all of it for the device, whose number is `device`.
    pub(super) fn new(primary: &Arc<Primary>, device: i32, memory: &[Physical]) -> Result<Mapped, Refused> {
        let driver = primary.driver();
        let _current = primary.enter()?;
        let too_long = Refused {
            call: "cuMemAddressReserve",
            code: Code::INVALID_VALUE,
        };
        let whole = memory.iter().try_fold(0u64, |sum, part| sum.checked_add(part.length));
        let length = whole.and_then(|whole| usize::try_from(whole).ok()).ok_or(too_long)?;
        let mut start = 0;
        // SAFETY: writes one address.
        unsafe { driver.addresses_reserve(&mut start, length, 0, 0, 0) }?;
        let mut mapped = Mapped {
            primary: Arc::clone(primary),
            start,
            length,
            mapped: Vec::with_capacity(memory.len()),
        };
        let mut at = start;
        for part in memory {
            let bytes = part.length as usize;
            // SAFETY: addresses that were reserved above and have nothing mapped; the handle is live.
            unsafe { driver.map(at, bytes, 0, part.handle, 0) }?;
            mapped.mapped.push((at, bytes));
            at += part.length;
        }
        let allowed = CUmemAccessDesc {
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: device,
            },
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: all of it is mapped now; reads one structure. (It is only read from. But not every driver has memory that
        // a device may only read.)
        unsafe { driver.mapping_allow(start, length, &allowed, 1) }?;
        Ok(mapped)
    }

    /// Where it begins.
    pub(super) fn address(&self) -> u64 {
        self.start
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let driver = self.primary.driver();
        let given_back = self.primary.enter_to_give_back().and_then(|_current| {
            let mut result = Ok(());
            for (at, bytes) in self.mapped.drain(..) {
                // SAFETY: mapped by `new`, unmapped once. Who owns the value keeps it while copies of it run.
                result = result.and(unsafe { driver.unmap(at, bytes) });
            }
            // SAFETY: reserved by `new`, given back once, and only when nothing is mapped there any more.
            result.and_then(|()| unsafe { driver.addresses_free(self.start, self.length) })
        });
        report("another process's memory was not unmapped", given_back);
    }
}
