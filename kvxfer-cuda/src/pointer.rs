//! What an address is: the driver is asked, nothing is guessed from the number.

use std::ffi::{c_uint, c_void};
use std::fmt;
use std::mem::MaybeUninit;

use cudarc::driver::sys::{CUcontext, CUmemAllocationProp, CUmemLocation, CUmemLocationType};
use kvxfer_core::ErrorKind;

use crate::context::Primary;
use crate::driver::{Code, Driver, Refused};
use crate::error::CudaError;
use crate::probe::DeviceFacts;

/// What an address is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pointer {
    /// The address.
    pub address: u64,
    /// What kind of memory is there.
    pub kind: PointerKind,
    /// The allocation that the address is in, if the driver knows it. Of memory of virtual memory management: the mapping.
    pub allocation: Option<Extent>,
    /// Of device memory: the mapping that the address is in. Ordinary allocations are one mapping.
    pub mappings: Vec<Mapping>,
    /// The driver's number of the allocation, different for each one ever made in the process.
    pub buffer_id: Option<u64>,
}

/// A kind of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PointerKind {
    /// The driver does not know it: ordinary host memory, memory that was freed, or another process's.
    Host,
    /// Page-locked host memory.
    PinnedHost,
    /// Managed memory, which moves between host and devices by itself.
    Managed,
    /// A device's memory.
    Device {
        /// The driver's number of the device, in this process.
        ordinal: i32,
        /// The device's PCI address, `0000:17:00.0`.
        pci: String,
    },
}

impl fmt::Display for PointerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PointerKind::Host => f.write_str("not known to CUDA"),
            PointerKind::PinnedHost => f.write_str("page-locked host memory"),
            PointerKind::Managed => f.write_str("managed memory"),
            PointerKind::Device { ordinal, pci } => write!(f, "memory of device {ordinal} ({pci})"),
        }
    }
}

/// A range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Its first byte.
    pub base: u64,
    /// Bytes.
    pub length: u64,
}

/// A range of device memory that was allocated, or mapped, in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mapping {
    /// Where it is.
    pub extent: Extent,
    /// Whether it is a mapping of virtual memory management.
    pub vmm: bool,
    /// Whether it was made so that network devices may reach it.
    pub gpudirect: bool,
    /// Whether a mapping of virtual memory management was made so that other processes may be given a descriptor of it.
    pub shareable: bool,
    /// The driver's number of it; `None`: it gives none.
    pub buffer_id: Option<u64>,
}

impl Extent {
    fn end(&self) -> u64 {
        self.base.saturating_add(self.length)
    }

    fn contains(&self, address: u64) -> bool {
        self.base <= address && address < self.end()
    }
}

/// `CU_POINTER_ATTRIBUTE_…`
mod attribute {
    pub(super) const CONTEXT: u32 = 1;
    pub(super) const MEMORY_TYPE: u32 = 2;
    pub(super) const SYNC_MEMOPS: u32 = 6;
    pub(super) const BUFFER_ID: u32 = 7;
    pub(super) const IS_MANAGED: u32 = 8;
    pub(super) const DEVICE_ORDINAL: u32 = 9;
    pub(super) const RANGE_START: u32 = 11;
    pub(super) const RANGE_SIZE: u32 = 12;
}

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const TYPE_HOST: u32 = 1;
const TYPE_DEVICE: u32 = 2;

/// What the driver says of an address, as it says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Said {
    /// Null for memory of no context's: virtual memory management, pools.
    context: u64,
    memory_type: u32,
    managed: bool,
    ordinal: i32,
    buffer_id: u64,
}

fn ask(driver: &Driver, address: u64) -> Result<Said, Refused> {
    let [context, memory_type, managed, ordinal, buffer_id] = attributes(
        driver,
        address,
        [
            attribute::CONTEXT,
            attribute::MEMORY_TYPE,
            attribute::IS_MANAGED,
            attribute::DEVICE_ORDINAL,
            attribute::BUFFER_ID,
        ],
    )?;
    Ok(Said {
        context,
        memory_type: memory_type as u32,
        managed: managed as u8 != 0,
        ordinal: ordinal as u32 as i32,
        buffer_id,
    })
}

/// Several attributes. Their types are of 1 to 8 bytes; each has 8, which are zero where the driver writes fewer. All of
/// an address that the driver does not know are zero.
fn attributes<const N: usize>(driver: &Driver, address: u64, mut numbers: [u32; N]) -> Result<[u64; N], Refused> {
    let mut values = [0u64; N];
    let mut places = values
        .each_mut()
        .map(|value| std::ptr::from_mut(value).cast::<c_void>());
    // SAFETY: `numbers` and `places` have `N` entries each, and each place has room for any attribute's value.
    let asked = unsafe { driver.pointer_attributes(N as c_uint, numbers.as_mut_ptr(), places.as_mut_ptr(), address) };
    match asked {
        Ok(()) => Ok(values.map(u64::from_le)),
        Err(refused) if refused.code == Code::INVALID_VALUE => Ok([0; N]),
        Err(refused) => Err(refused),
    }
}

impl Said {
    fn kind(&self, devices: &[DeviceFacts]) -> PointerKind {
        match (self.managed, self.memory_type) {
            (true, _) => PointerKind::Managed,
            (false, TYPE_HOST) => PointerKind::PinnedHost,
            (false, TYPE_DEVICE) => {
                let device = devices.iter().find(|device| device.ordinal == self.ordinal);
                PointerKind::Device {
                    ordinal: self.ordinal,
                    pci: device.map_or_else(String::new, |device| device.pci.clone()),
                }
            }
            _ => PointerKind::Host,
        }
    }

    fn buffer_id(&self) -> Option<u64> {
        (self.buffer_id != 0).then_some(self.buffer_id)
    }
}

/// Classifies an address. Retains no context for longer than it takes, and makes none.
pub(crate) fn classify(
    driver: &std::sync::Arc<Driver>,
    devices: &[DeviceFacts],
    address: u64,
) -> Result<Pointer, CudaError> {
    let failed = |refused| CudaError::call(refused, format!("address {address:#x}"));
    let said = ask(driver, address).map_err(failed)?;
    let kind = said.kind(devices);
    let mut pointer = Pointer {
        address,
        allocation: None,
        mappings: Vec::new(),
        buffer_id: said.buffer_id(),
        kind,
    };
    if pointer.kind == PointerKind::Host {
        return Ok(pointer);
    }
    if let PointerKind::Device { ordinal, .. } = pointer.kind
        && Primary::exists(driver, ordinal).map_err(failed)?
    {
        let primary = Primary::retain(driver, ordinal).map_err(failed)?;
        let _current = primary.enter().map_err(failed)?;
        match mapping_at(driver, said, address) {
            Ok(mapping) => {
                pointer.allocation = Some(mapping.extent);
                pointer.mappings.push(mapping);
                return Ok(pointer);
            }
            Err(refused) if says_nothing_is_there(refused) => {}
            Err(refused) => return Err(failed(refused)),
        }
    }
    let [base, length] =
        attributes(driver, address, [attribute::RANGE_START, attribute::RANGE_SIZE]).map_err(failed)?;
    pointer.allocation = (length > 0).then_some(Extent { base, length });
    Ok(pointer)
}

/// Whether a refused look-up means that there is nothing to be found.
fn says_nothing_is_there(refused: Refused) -> bool {
    matches!(refused.code, Code::INVALID_VALUE | Code::NOT_FOUND)
}

/// The mapping at an address, with what is known of it. A context is current.
fn mapping_at(driver: &Driver, said: Said, address: u64) -> Result<Mapping, Refused> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: writes two integers.
    unsafe { driver.address_range(&mut base, &mut size, address) }?;
    let extent = Extent {
        base,
        length: size as u64,
    };
    if !extent.contains(address) {
        return Err(Refused {
            call: "cuMemGetAddressRange_v2",
            code: Code::NOT_FOUND,
        });
    }
    let made = how_made(driver, address)?;
    Ok(Mapping {
        extent,
        vmm: made.is_some(),
        gpudirect: made.is_none_or(|made| made.gpudirect),
        shareable: made.is_some_and(|made| made.shareable),
        buffer_id: said.buffer_id(),
    })
}

/// What a mapping of virtual memory management was made for.
#[derive(Debug, Clone, Copy)]
struct Made {
    gpudirect: bool,
    shareable: bool,
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, one bit of several.
pub(crate) const POSIX_DESCRIPTOR: u32 = 1;

/// What a mapping of virtual memory management was made for; `None` if the address is in no such mapping.
fn how_made(driver: &Driver, address: u64) -> Result<Option<Made>, Refused> {
    let mut handle = 0;
    // SAFETY: writes one handle; the address is only looked up.
    match unsafe { driver.mapping_retain(&mut handle, address as *mut c_void) } {
        Ok(()) => {}
        // An allocation of another kind; or a driver without virtual memory management.
        Err(refused)
            if matches!(
                refused.code,
                Code::INVALID_VALUE | Code::NOT_SUPPORTED | Code::NOT_FOUND | Code::ABSENT
            ) =>
        {
            return Ok(None);
        }
        Err(refused) => return Err(refused),
    }
    let mut properties = MaybeUninit::<CUmemAllocationProp>::zeroed();
    // SAFETY: the handle was just retained, and there is room for the properties.
    let asked = unsafe { driver.mapping_properties(properties.as_mut_ptr(), handle) };
    // SAFETY: retained above, released once.
    let released = unsafe { driver.mapping_release(handle) };
    asked?;
    released?;
    // SAFETY: one byte of a structure that was zeroed and then written. The whole is not read: it has enumerations, in
    // which a newer driver may have put values that the bindings do not know.
    let capable = unsafe { (&raw const (*properties.as_ptr()).allocFlags.gpuDirectRDMACapable).read() };
    // SAFETY: as above; the enumeration is read as the integer that it is.
    let handles = unsafe {
        (&raw const (*properties.as_ptr()).requestedHandleTypes)
            .cast::<u32>()
            .read()
    };
    Ok(Some(Made {
        gpudirect: capable != 0,
        shareable: handles & POSIX_DESCRIPTOR != 0,
    }))
}

/// The mappings of a range of one device's memory.
#[derive(Debug)]
pub(crate) struct Range {
    /// In order. The first and the last may reach beyond the range.
    pub(crate) mappings: Vec<Mapping>,
    /// Why the driver does not promise to finish copies of this memory that look synchronous; empty if it does.
    pub(crate) unsynced: String,
}

/// What is at the start of a range that was declared device memory: the device's ordinal, and the context that it was
/// allocated in (null for none).
pub(crate) fn owner(
    driver: &Driver,
    devices: &[DeviceFacts],
    address: u64,
    length: u64,
) -> Result<(i32, CUcontext), CudaError> {
    let shown = show(address, length);
    if length == 0 || address == 0 || address.checked_add(length).is_none() {
        return Err(CudaError::Unfit {
            kind: ErrorKind::InvalidArgument,
            what: shown,
            why: "no memory is there: the address is null, the length zero, or their sum overflows".into(),
            remedy: "pass the address and length of device memory",
        });
    }
    let said = ask(driver, address).map_err(|refused| CudaError::call(refused, shown.clone()))?;
    let kind = said.kind(devices);
    let remedy = match kind {
        PointerKind::Device { ordinal, ref pci } if !pci.is_empty() => {
            return Ok((ordinal, said.context as usize as CUcontext));
        }
        PointerKind::Device { .. } => "make the device visible to this process (CUDA_VISIBLE_DEVICES)",
        PointerKind::Host => {
            "pass memory of this process that is allocated on a device now; host memory is declared as host memory"
        }
        PointerKind::PinnedHost | PointerKind::Managed => "declare it as host memory: the CPU can reach it",
    };
    Err(CudaError::Unfit {
        kind: ErrorKind::InvalidArgument,
        what: format!("{shown}, declared as device memory"),
        why: format!("it is {kind}{}", hint(&kind)),
        remedy,
    })
}

fn hint(kind: &PointerKind) -> &'static str {
    match kind {
        PointerKind::Host => ": host memory, freed memory, or another process's",
        _ => "",
    }
}

/// Finds the mappings that a range of device memory has, and asks for what can be asked for. The device's primary context
/// is current.
pub(crate) fn walk(
    driver: &Driver,
    devices: &[DeviceFacts],
    ordinal: i32,
    address: u64,
    length: u64,
) -> Result<Range, CudaError> {
    let shown = show(address, length);
    let failed = |refused| CudaError::call(refused, shown.clone());
    let unfit = |kind, why: String, remedy| CudaError::Unfit {
        kind,
        what: shown.clone(),
        why,
        remedy,
    };
    let end = address + length;
    let mut range = Range {
        mappings: Vec::new(),
        unsynced: String::new(),
    };
    let mut at = address;
    while at < end {
        let said = ask(driver, at).map_err(failed)?;
        let kind = said.kind(devices);
        let found = match kind {
            PointerKind::Device { ordinal: found, .. } if found == ordinal => {
                mapping_at(driver, said, at).map_err(|refused| (says_nothing_is_there(refused), Some(refused)))
            }
            _ => Err((true, None)),
        };
        let mapping = match found {
            Ok(mapping) => mapping,
            Err((false, Some(refused))) => return Err(failed(refused)),
            Err((_, refused)) => {
                let rest = bytes(end - at);
                let why = match refused {
                    Some(refused) => format!("nothing is mapped in {rest} of it from {at:#x} on ({refused})"),
                    None => format!("{rest} of it from {at:#x} on: {kind}"),
                };
                let remedy = "keep the range inside one allocation, and map all of it, on one device";
                return Err(unfit(ErrorKind::OutOfBounds, why, remedy));
            }
        };
        // Two allocations that lie next to each other are not one pool; mappings are what one reservation is made of.
        if !mapping.vmm && (at != address || mapping.extent.end() < end) {
            let base = mapping.extent.base;
            let why = match end.checked_sub(mapping.extent.end()) {
                Some(beyond) if at == address => {
                    format!("the allocation at {base:#x} ends {} before it", bytes(beyond))
                }
                _ => format!("from {at:#x} on it is in another allocation, at {base:#x}"),
            };
            return Err(unfit(
                ErrorKind::OutOfBounds,
                why,
                "keep the range inside one allocation",
            ));
        }
        if mapping.vmm && !accessible(driver, ordinal, at).map_err(failed)? {
            let why = format!("the mapping at {at:#x} gives its device no access");
            return Err(unfit(
                ErrorKind::InvalidArgument,
                why,
                "give it access with cuMemSetAccess",
            ));
        }
        if range.unsynced.is_empty() {
            range.unsynced = sync_memory_operations(driver, at);
        }
        range.mappings.push(mapping);
        at = mapping.extent.end();
    }
    Ok(range)
}

/// Whether a device may read and write what is mapped at an address.
fn accessible(driver: &Driver, ordinal: i32, address: u64) -> Result<bool, Refused> {
    const READ_WRITE: u64 = 3;
    let mut flags = 0;
    let location = CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: ordinal,
    };
    // SAFETY: writes one integer; reads the location.
    match unsafe { driver.mapping_access(&mut flags, &location, address) } {
        Ok(()) => Ok(flags & READ_WRITE == READ_WRITE),
        Err(refused) if refused.code == Code::ABSENT => Ok(true),
        Err(refused) => Err(refused),
    }
}

/// Asks the driver that calls which look synchronous are, for this memory: a network device may read it at any time.
/// Says why not, if it refuses (as it does for memory of virtual memory management and of pools).
fn sync_memory_operations(driver: &Driver, address: u64) -> String {
    let on: c_uint = 1;
    // SAFETY: reads one integer.
    match unsafe { driver.pointer_set((&raw const on).cast(), attribute::SYNC_MEMOPS, address) } {
        Ok(()) => String::new(),
        Err(refused) => refused.to_string(),
    }
}

/// Whether a mapping that was found at `address` is still there.
pub(crate) fn still_there(driver: &Driver, mapping: &Mapping, address: u64) -> Result<bool, Refused> {
    if let Some(known) = mapping.buffer_id {
        let mut id = 0u64;
        // SAFETY: the attribute is an integer of 8 bytes.
        return match unsafe { driver.pointer_attribute((&raw mut id).cast(), attribute::BUFFER_ID, address) } {
            Ok(()) => Ok(id == known),
            Err(refused) if refused.code == Code::INVALID_VALUE => Ok(false),
            Err(refused) => Err(refused),
        };
    }
    // Without a number, what can be told is whether a mapping with the same edges is there.
    let [base, size] = attributes(driver, address, [attribute::RANGE_START, attribute::RANGE_SIZE])?;
    let inside = Extent { base, length: size };
    Ok(inside.contains(address))
}

/// `64 MiB at 0x7f…`, for errors.
pub(crate) fn show(address: u64, length: u64) -> String {
    format!("{} at {address:#x}", bytes(length))
}

pub(crate) fn bytes(count: u64) -> String {
    match count {
        _ if count >= 1 << 20 && count.is_multiple_of(1 << 20) => format!("{} MiB", count >> 20),
        _ if count >= 1 << 10 && count.is_multiple_of(1 << 10) => format!("{} KiB", count >> 10),
        _ => format!("{count} bytes"),
    }
}
