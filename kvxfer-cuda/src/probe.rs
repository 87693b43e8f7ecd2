//! What this machine has: the driver and its devices, what each can do, and why not more. No context is made.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::path::PathBuf;

use cudarc::driver::sys::CUdevice;
use kvxfer_core::Error;

use crate::config::CudaConfig;
use crate::driver::{self, Code, Driver, Refused};
use crate::error::{CudaError, version};

/// What there is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Availability {
    /// The driver's library cannot be loaded.
    NoLibrary {
        /// What was asked of the dynamic loader.
        path: PathBuf,
        /// Its words.
        why: String,
    },
    /// The library lacks a function that kvxfer cannot do without.
    MissingSymbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The driver is too old.
    TooOld {
        /// The library.
        path: PathBuf,
        /// Its version: 12080 is 12.8.
        have: i32,
        /// The oldest that is used.
        need: i32,
    },
    /// The driver is there, but sees no device.
    NoDevice,
    /// The driver cannot be initialised or asked.
    Failed {
        /// The driver's function.
        call: &'static str,
        /// What it returned.
        code: Code,
    },
    /// There are devices.
    Available(Facts),
}

/// What the driver said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// What was loaded.
    pub library: PathBuf,
    /// The newest CUDA version that the driver supports: 12080 is 12.8.
    pub driver_version: i32,
    /// Its devices, by ordinal.
    pub devices: Vec<DeviceFacts>,
}

/// What a device can do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFacts {
    /// The driver's number for it, in this process.
    pub ordinal: i32,
    /// The driver's handle of it.
    pub(crate) handle: CUdevice,
    /// Its name.
    pub name: String,
    /// Its PCI address, `0000:17:00.0`: the same in every process.
    pub pci: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Its compute capability, major and minor.
    pub capability: (i32, i32),
    /// Whether it has GPUDirect RDMA at all.
    pub gpudirect: bool,
    /// Whether that works for memory of virtual memory management (`expandable_segments`).
    pub gpudirect_vmm: bool,
    /// Whether its memory can be exported as dmabufs.
    pub dmabuf: bool,
    /// Who sees network devices' writes in which order.
    pub write_ordering: WriteOrdering,
    /// Whether the host can flush network devices' writes.
    pub flush_from_host: bool,
    /// Whether a stream can.
    pub flush_from_stream: bool,
    /// Whether it has virtual memory management.
    pub vmm: bool,
    /// Whether it knows host memory that is page-locked afterwards by the host's own addresses.
    pub host_addresses: bool,
}

/// For whom writes of network devices into a device's memory are ordered and visible without a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteOrdering {
    /// For nobody: each arrival needs a flush.
    None,
    /// For the device that has the memory.
    Owner,
    /// For all devices.
    AllDevices,
}

impl DeviceFacts {
    /// Why network devices cannot be given this device's memory at all, if so.
    pub fn gpudirect_refusal(&self) -> Option<&'static str> {
        if !self.gpudirect {
            return Some("the device has no GPUDirect RDMA");
        }
        if self.settles_writes() && !self.flush_from_host {
            return Some("writes of network devices must be flushed, and the host cannot flush this device's");
        }
        None
    }

    /// Why its memory cannot be exported as dmabufs, if so; peer memory may still be possible.
    pub fn dmabuf_refusal(&self) -> Option<&'static str> {
        self.gpudirect_refusal().or_else(|| {
            let why =
                "the device or its driver cannot export dmabufs (the open kernel modules of driver 515 and later can)";
            (!self.dmabuf).then_some(why)
        })
    }

    /// Whether what network devices wrote must be flushed before the device's own kernels see it.
    pub(crate) fn settles_writes(&self) -> bool {
        self.write_ordering == WriteOrdering::None
    }
}

/// Looks at the machine.
pub fn probe(config: &CudaConfig) -> Availability {
    match Driver::load(&config.library).and_then(|driver| facts(&driver)) {
        Ok(facts) => Availability::Available(facts),
        Err(error) => Availability::from_error(error),
    }
}

impl Availability {
    fn from_error(error: CudaError) -> Availability {
        match error {
            CudaError::Load { path, why } => Availability::NoLibrary { path, why },
            CudaError::MissingSymbol { path, symbol } => Availability::MissingSymbol { path, symbol },
            CudaError::TooOld { path, have, need } => Availability::TooOld { path, have, need },
            CudaError::Call { call, code, .. } => Availability::Failed { call, code },
            _ => Availability::NoDevice,
        }
    }

    /// Why CUDA cannot be used, as an error for whoever asked for it; `None` if it can.
    pub fn refusal(&self) -> Option<Error> {
        self.as_error().map(Error::from)
    }

    fn as_error(&self) -> Option<CudaError> {
        Some(match self.clone() {
            Availability::NoLibrary { path, why } => CudaError::Load { path, why },
            Availability::MissingSymbol { path, symbol } => CudaError::MissingSymbol { path, symbol },
            Availability::TooOld { path, have, need } => CudaError::TooOld { path, have, need },
            Availability::NoDevice => CudaError::NoDevice,
            Availability::Failed { call, code } => CudaError::call(Refused { call, code }, ""),
            Availability::Available(_) => return None,
        })
    }

    /// The devices, if there are any.
    pub fn devices(&self) -> &[DeviceFacts] {
        match self {
            Availability::Available(facts) => &facts.devices,
            _ => &[],
        }
    }
}

/// One line for the driver, one for each device, each with what to do about what it cannot.
impl fmt::Display for Availability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.as_error(), self) {
            (Some(error), _) if error.remedy().is_empty() => writeln!(f, "driver: {error}"),
            (Some(error), _) => writeln!(f, "driver: {error}; {}", error.remedy()),
            (None, Availability::Available(facts)) => facts.fmt(f),
            (None, _) => Ok(()),
        }
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = version(self.driver_version);
        writeln!(f, "driver: {}, for CUDA {version}", self.library.display())?;
        self.devices.iter().try_for_each(|device| writeln!(f, "  {device}"))
    }
}

impl fmt::Display for DeviceFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.memory_bytes as f64 / (1u64 << 30) as f64;
        let (major, minor) = self.capability;
        write!(
            f,
            "device {}: {}, PCI {}, {gib:.0} GiB, compute {major}.{minor}; ",
            self.ordinal, self.name, self.pci
        )?;
        match self.dmabuf_refusal() {
            None => f.write_str("dmabufs, ")?,
            Some(why) => write!(f, "no dmabufs: {why}, ")?,
        }
        let vmm = match (self.vmm, self.gpudirect_vmm) {
            (false, _) => "no virtual memory management",
            (true, false) => "virtual memory management (without GPUDirect)",
            (true, true) => "virtual memory management",
        };
        write!(f, "{}, {vmm}", self.write_ordering)?;
        match (self.flush_from_host, self.flush_from_stream) {
            (true, _) => Ok(()),
            (false, true) => f.write_str(", flushes from streams only"),
            (false, false) => f.write_str(", no flush"),
        }
    }
}

impl fmt::Display for WriteOrdering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WriteOrdering::None => "network writes are flushed at arrival",
            WriteOrdering::Owner => "network writes are ordered for the device",
            WriteOrdering::AllDevices => "network writes are ordered for all devices",
        })
    }
}

/// What the driver says of its devices.
pub(crate) fn facts(driver: &Driver) -> Result<Facts, CudaError> {
    let mut count: c_int = 0;
    // SAFETY: writes one integer.
    unsafe { driver.device_count(&mut count) }.map_err(|refused| CudaError::call(refused, ""))?;
    if count <= 0 {
        return Err(CudaError::NoDevice);
    }
    let devices: Result<Vec<DeviceFacts>, CudaError> = (0..count)
        .map(|ordinal| {
            device_facts(driver, ordinal).map_err(|refused| CudaError::call(refused, format!("device {ordinal}")))
        })
        .collect();
    Ok(Facts {
        library: driver.path().to_owned(),
        driver_version: driver.version(),
        devices: devices?,
    })
}

/// Numbers of device attributes. (Their names differ between cudarc's bindings for different CUDA versions.)
mod attribute {
    pub(super) const CAPABILITY_MAJOR: i32 = 75;
    pub(super) const CAPABILITY_MINOR: i32 = 76;
    pub(super) const HOST_POINTER_FOR_REGISTERED: i32 = 91;
    pub(super) const VMM: i32 = 102;
    pub(super) const GPUDIRECT_VMM: i32 = 110;
    pub(super) const GPUDIRECT: i32 = 116;
    pub(super) const FLUSH_OPTIONS: i32 = 117;
    pub(super) const WRITE_ORDERING: i32 = 118;
    pub(super) const DMABUF: i32 = 124;
}

/// Bits of the flush options.
const FLUSH_HOST: i32 = 1;
const FLUSH_MEMOPS: i32 = 2;
/// Values of the write ordering.
const ORDERED_FOR_OWNER: i32 = 100;
const ORDERED_FOR_ALL: i32 = 200;

fn device_facts(driver: &Driver, ordinal: i32) -> Result<DeviceFacts, Refused> {
    let mut device = 0;
    // SAFETY: writes one integer.
    unsafe { driver.device(&mut device, ordinal) }?;
    let mut name = [0u8; 128];
    // SAFETY: the driver writes at most the given length, nul included.
    unsafe { driver.device_name(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, device) }?;
    let mut pci = [0u8; 32];
    // SAFETY: as above.
    unsafe { driver.device_pci(pci.as_mut_ptr().cast::<c_char>(), pci.len() as c_int, device) }?;
    let mut memory = 0usize;
    // SAFETY: writes one integer.
    unsafe { driver.device_memory(&mut memory, device) }?;
    // An attribute that an older driver does not know is one that it does not have.
    let attribute = |number| {
        let mut value: c_int = 0;
        // SAFETY: writes one integer.
        match unsafe { driver.device_attribute(&mut value, number, device) } {
            Err(Refused {
                code: Code::INVALID_VALUE,
                ..
            }) => Ok(0),
            result => result.map(|()| value),
        }
    };
    let flush = attribute(attribute::FLUSH_OPTIONS)?;
    Ok(DeviceFacts {
        ordinal,
        handle: device,
        name: driver::text(&name),
        pci: driver::text(&pci).to_ascii_lowercase(),
        memory_bytes: memory as u64,
        capability: (
            attribute(attribute::CAPABILITY_MAJOR)?,
            attribute(attribute::CAPABILITY_MINOR)?,
        ),
        gpudirect: attribute(attribute::GPUDIRECT)? != 0,
        gpudirect_vmm: attribute(attribute::GPUDIRECT_VMM)? != 0,
        dmabuf: attribute(attribute::DMABUF)? != 0,
        write_ordering: match attribute(attribute::WRITE_ORDERING)? {
            value if value >= ORDERED_FOR_ALL => WriteOrdering::AllDevices,
            value if value >= ORDERED_FOR_OWNER => WriteOrdering::Owner,
            _ => WriteOrdering::None,
        },
        flush_from_host: flush & FLUSH_HOST != 0,
        flush_from_stream: flush & FLUSH_MEMOPS != 0,
        vmm: attribute(attribute::VMM)? != 0,
        host_addresses: attribute(attribute::HOST_POINTER_FOR_REGISTERED)? != 0,
    })
}

#[cfg(test)]
mod tests {
    use kvxfer_core::ErrorKind;

    use super::*;

    fn device() -> DeviceFacts {
        DeviceFacts {
            ordinal: 0,
            handle: 0,
            name: "H".into(),
            pci: "0000:17:00.0".into(),
            memory_bytes: 80 << 30,
            capability: (9, 0),
            gpudirect: true,
            gpudirect_vmm: true,
            dmabuf: true,
            write_ordering: WriteOrdering::Owner,
            flush_from_host: true,
            flush_from_stream: true,
            vmm: true,
            host_addresses: true,
        }
    }

    #[test]
    fn no_driver_is_a_typed_answer_that_says_what_to_do() {
        let found = probe(&CudaConfig {
            library: "/nonexistent/libcuda.so.1".into(),
            ..CudaConfig::default()
        });
        assert!(matches!(found, Availability::NoLibrary { .. }), "{found:?}");
        assert_eq!(found.refusal().unwrap().kind(), ErrorKind::Unsupported);
        let text = found.to_string();
        assert!(
            text.contains("/nonexistent/libcuda.so.1") && text.contains("install"),
            "{text}"
        );
    }

    #[test]
    fn a_device_says_why_network_devices_cannot_have_its_memory() {
        assert_eq!(device().gpudirect_refusal(), None);
        assert_eq!(device().dmabuf_refusal(), None);
        let mut old = device();
        old.dmabuf = false;
        assert!(old.gpudirect_refusal().is_none() && old.dmabuf_refusal().is_some());
        assert!(old.to_string().contains("no dmabufs"), "{old}");
        let mut unordered = device();
        unordered.write_ordering = WriteOrdering::None;
        assert!(unordered.settles_writes() && unordered.gpudirect_refusal().is_none());
        unordered.flush_from_host = false;
        assert!(unordered.gpudirect_refusal().unwrap().contains("flush"));
        let mut consumer = device();
        consumer.gpudirect = false;
        assert!(consumer.dmabuf_refusal().unwrap().contains("no GPUDirect"));
    }
}
