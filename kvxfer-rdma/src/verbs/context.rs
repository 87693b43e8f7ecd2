//! An opened device.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::{VerbsError, last_errno};
use super::library::{DeviceList, Library, listing, text};
use crate::sys;

/// An opened device. Cheap to clone; the last clone, or the last object made from it, closes it.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<sys::ibv_context>,
    name: String,
    character_device: String,
    sysfs_path: PathBuf,
    transport: TransportKind,
    attributes: DeviceAttributes,
    // After the context, which `drop` closes first.
    library: Library,
}

// SAFETY: libibverbs allows any thread to call any verb on a context; the fields beside the pointer are plain data.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What a device speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    /// InfiniBand or RoCE: what kvxfer uses.
    InfiniBand,
    /// iWARP: no writes with immediates, and connections only through the RDMA connection manager.
    Iwarp,
    /// Anything else (usNIC, EFA, …).
    Unknown,
}

impl TransportKind {
    pub(super) fn from_raw(transport: sys::ibv_transport_type, node: sys::ibv_node_type) -> TransportKind {
        match (transport, node) {
            (sys::IBV_TRANSPORT_IWARP, _) | (_, sys::IBV_NODE_RNIC) => TransportKind::Iwarp,
            (sys::IBV_TRANSPORT_IB, _) => TransportKind::InfiniBand,
            _ => TransportKind::Unknown,
        }
    }
}

/// What a device can do, as `ibv_query_device` says. Counts that a driver gives as negative are 0 here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Firmware version, as the vendor writes it; empty for software devices.
    pub firmware: String,
    /// Globally unique name of the device.
    pub node_guid: u64,
    /// PCI vendor.
    pub vendor_id: u32,
    /// The vendor's number of the model.
    pub vendor_part_id: u32,
    /// Bytes of the largest memory region.
    pub max_mr_size: u64,
    /// Memory regions.
    pub max_mr: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests outstanding on one queue of a queue pair.
    pub max_qp_wr: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Segments of a work request that is not a read.
    pub max_sge: u32,
    /// Segments of a read.
    pub max_sge_rd: u32,
    /// Reads and atomics outstanding at a queue pair as their target.
    pub max_qp_rd_atom: u32,
    /// Reads and atomics outstanding at a queue pair as their origin.
    pub max_qp_init_rd_atom: u32,
    /// Ports, numbered from 1.
    pub ports: u8,
    /// `IBV_DEVICE_*`.
    pub capability_flags: u32,
}

impl Context {
    /// Opens the device with this name.
    ///
    /// # Errors
    /// [`VerbsError::NoSuchDevice`]; [`VerbsError::Refused`] if it is there but may not be opened (`EACCES`, `EPERM`)
    /// or does not answer.
    pub fn open(library: &Library, name: &str) -> Result<Context, VerbsError> {
        let list = DeviceList::get(library)?;
        let Some((device, listing)) = list
            .iter()
            .map(|device| (device, listing(device)))
            .find(|(_, listing)| listing.name == name)
        else {
            return Err(VerbsError::NoSuchDevice {
                device: name.to_owned(),
                present: list.iter().map(|device| text(&device.name)).collect(),
            });
        };
        // SAFETY: `device` is in the list, which is held until this function returns; an opened context keeps what
        // it needs of its device by itself.
        let raw = unsafe { library.verbs().ibv_open_device(std::ptr::from_ref(device).cast_mut()) };
        let Some(raw) = NonNull::new(raw) else {
            let errno = last_errno();
            let error = VerbsError::refused("ibv_open_device", name, errno);
            return Err(match errno {
                libc::EPERM | libc::EACCES => error.because(format!(
                    "/dev/infiniband/{} may not be opened",
                    listing.character_device
                )),
                libc::ENOENT => error
                    .because(format!("/dev/infiniband/{} is not there", listing.character_device))
                    .with_remedy("in a container, pass /dev/infiniband; on a host, check that udev made the node"),
                _ => error,
            });
        };
        let close = CloseOnDrop { raw, library };
        let attributes = query_device(library, raw, name)?;
        set_non_blocking(close.async_fd(), name)?;
        std::mem::forget(close);
        Ok(Context {
            inner: Arc::new(Inner {
                raw,
                name: listing.name,
                character_device: listing.character_device,
                sysfs_path: listing.sysfs_path,
                transport: listing.transport,
                attributes,
                library: library.clone(),
            }),
        })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// What it can do.
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.inner.attributes
    }

    /// What it speaks.
    pub fn transport(&self) -> TransportKind {
        self.inner.transport
    }

    /// Its directory in sysfs, `/sys/class/infiniband/NAME`; may not exist for devices that are not the kernel's.
    pub fn sysfs_path(&self) -> &Path {
        &self.inner.sysfs_path
    }

    /// Its character device: `uverbs0`.
    pub fn character_device(&self) -> &str {
        &self.inner.character_device
    }

    /// The library it was opened through.
    pub fn library(&self) -> &Library {
        &self.inner.library
    }

    /// Becomes readable when [`next_async_event`](Self::next_async_event) has something. Non-blocking.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open while `self` lives, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    pub(super) fn verbs(&self) -> &sys::Libibverbs {
        self.inner.library.verbs()
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.inner.raw.as_ptr()
    }

    pub(super) fn refused(&self, verb: &'static str, errno: i32) -> VerbsError {
        VerbsError::refused(verb, self.name(), errno)
    }

    pub(super) fn unsupported(&self, verb: &'static str, why: impl Into<String>) -> VerbsError {
        VerbsError::Unsupported {
            verb,
            device: self.name().to_owned(),
            why: why.into(),
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.name())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: opened in `Context::open`, closed only here. Every object made from the context holds a clone of
        // it, so none is left.
        let code = unsafe { self.library.verbs().ibv_close_device(self.raw.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.name, code, "ibv_close_device failed");
        }
    }
}

/// Closes a context whose opening is not finished.
struct CloseOnDrop<'a> {
    raw: NonNull<sys::ibv_context>,
    library: &'a Library,
}

impl CloseOnDrop<'_> {
    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open until this value is dropped, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().async_fd) }
    }
}

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        // SAFETY: the context was just opened and nothing has been made from it.
        unsafe { self.library.verbs().ibv_close_device(self.raw.as_ptr()) };
    }
}

fn query_device(library: &Library, raw: NonNull<sys::ibv_context>, name: &str) -> Result<DeviceAttributes, VerbsError> {
    // SAFETY: a plain struct of integers and byte arrays, for which zero is a value.
    let mut attributes: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open; the library writes one `ibv_device_attr`.
    let code = unsafe { library.verbs().ibv_query_device(raw.as_ptr(), &mut attributes) };
    if code != 0 {
        return Err(VerbsError::refused("ibv_query_device", name, positive(code)));
    }
    let count = |value: i32| u32::try_from(value).unwrap_or(0);
    Ok(DeviceAttributes {
        firmware: text(&attributes.fw_ver),
        node_guid: u64::from_be(attributes.node_guid),
        vendor_id: attributes.vendor_id,
        vendor_part_id: attributes.vendor_part_id,
        max_mr_size: attributes.max_mr_size,
        max_mr: count(attributes.max_mr),
        max_qp: count(attributes.max_qp),
        max_qp_wr: count(attributes.max_qp_wr),
        max_cq: count(attributes.max_cq),
        max_cqe: count(attributes.max_cqe),
        max_sge: count(attributes.max_sge),
        max_sge_rd: count(attributes.max_sge_rd),
        max_qp_rd_atom: count(attributes.max_qp_rd_atom),
        max_qp_init_rd_atom: count(attributes.max_qp_init_rd_atom),
        ports: attributes.phys_port_cnt,
        capability_flags: attributes.device_cap_flags,
    })
}

/// Makes a descriptor of the library non-blocking: events are waited for with `epoll`, never inside a verb.
pub(super) fn set_non_blocking(fd: BorrowedFd<'_>, device: &str) -> Result<(), VerbsError> {
    rustix::fs::fcntl_getfl(fd)
        .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK))
        .map_err(|errno| VerbsError::refused("fcntl(O_NONBLOCK)", device, errno.raw_os_error()))
}

/// The errno in what a verb returned: some drivers return it negative, and some `-1` with `errno` set.
pub(super) fn positive(code: i32) -> i32 {
    match code {
        -1 => last_errno(),
        code => code.checked_abs().unwrap_or(libc::EIO),
    }
}
