//! Protection domains and registered memory.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::context::Context;
use super::error::{VerbsError, describe, last_errno};
use super::explain::explain_registration;
use crate::sys;

/// What belongs together on a device: queue pairs reach only memory of their own domain. Cheap to clone.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<sys::ibv_pd>,
    // After the domain, which `drop` gives back first.
    context: Context,
}

// SAFETY: verbs may be called on a protection domain from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What a registration allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// The device may write it for us (receives, reads that land here). Verbs demand it wherever peers may write.
    pub local_write: bool,
    /// Peers that know the key may write it.
    pub remote_write: bool,
    /// Peers that know the key may read it.
    pub remote_read: bool,
    /// Writes may reach memory out of order within a work request; its completion still means that all are there.
    /// Left out where the library has no `ibv_reg_mr_iova2`, or the device no use for it.
    pub relaxed_ordering: bool,
}

impl Access {
    fn raw(self) -> u32 {
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        flag(self.local_write, sys::IBV_ACCESS_LOCAL_WRITE)
            | flag(self.remote_write, sys::IBV_ACCESS_REMOTE_WRITE)
            | flag(self.remote_read, sys::IBV_ACCESS_REMOTE_READ)
            | flag(self.relaxed_ordering, sys::IBV_ACCESS_RELAXED_ORDERING)
    }
}

/// Whether a device can register memory from a dmabuf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DmabufSupport {
    /// It can.
    Yes,
    /// It cannot, and why.
    No(String),
    /// It did not say, and what it said instead.
    Unknown(String),
}

impl std::fmt::Display for DmabufSupport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DmabufSupport::Yes => f.write_str("registers dmabufs"),
            DmabufSupport::No(why) => write!(f, "no dmabufs ({why})"),
            DmabufSupport::Unknown(why) => write!(f, "dmabufs unknown ({why})"),
        }
    }
}

/// Registered memory: keys that name it in work requests. Deregistered when dropped.
pub struct MemoryRegion {
    raw: NonNull<sys::ibv_mr>,
    lkey: u32,
    rkey: u32,
    // After the registration, which `drop` gives back first.
    domain: ProtectionDomain,
}

// SAFETY: verbs may be called on a memory region from any thread.
unsafe impl Send for MemoryRegion {}
// SAFETY: `&MemoryRegion` gives out two numbers.
unsafe impl Sync for MemoryRegion {}

impl ProtectionDomain {
    /// A new domain on the device.
    ///
    /// # Errors
    /// [`VerbsError::Refused`], `ENOMEM` or `ENOSPC` if the device has no more.
    pub fn new(context: &Context) -> Result<ProtectionDomain, VerbsError> {
        // SAFETY: the context is open while `context` lives, and the domain keeps a clone of it.
        let raw = unsafe { context.verbs().ibv_alloc_pd(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| context.refused("ibv_alloc_pd", last_errno()))?;
        Ok(ProtectionDomain {
            inner: Arc::new(Inner {
                raw,
                context: context.clone(),
            }),
        })
    }

    /// The device it is on.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Registers host memory: pins it and gives it keys. Slow (it touches every page).
    ///
    /// # Errors
    /// [`VerbsError::Refused`]; for `ENOMEM`, `EAGAIN` and `EPERM` with the limit of locked memory and the need.
    ///
    /// # Safety
    /// `length` bytes at `address` must be memory of the caller, and stay mapped there until the region is dropped:
    /// from now on the device, and with remote rights peers that know the key, read and write it.
    pub unsafe fn register(&self, address: u64, length: u64, access: Access) -> Result<MemoryRegion, VerbsError> {
        let context = self.context();
        let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
        let (verb, raw) = match (access.relaxed_ordering, &context.verbs().ibv_reg_mr_iova2) {
            (true, Ok(register)) => {
                // SAFETY: the domain is alive; the memory is the caller's by this function's contract.
                let raw = unsafe { register(self.raw(), pointer, length as sys::size_t, address, access.raw()) };
                ("ibv_reg_mr_iova2", raw)
            }
            _ => {
                let plain = Access {
                    relaxed_ordering: false,
                    ..access
                };
                // SAFETY: as above.
                let raw = unsafe {
                    context
                        .verbs()
                        .ibv_reg_mr(self.raw(), pointer, length as sys::size_t, plain.raw() as i32)
                };
                ("ibv_reg_mr", raw)
            }
        };
        self.registered(verb, raw, length, access)
    }

    /// Registers `length` bytes at `offset` of a dmabuf, to be named in work requests by addresses from `iova` on.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] if the library does not know dmabufs; [`VerbsError::Refused`], `EOPNOTSUPP` if the
    /// device or its driver does not.
    pub fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let context = self.context();
        let Ok(register) = &context.verbs().ibv_reg_dmabuf_mr else {
            return Err(context.unsupported(
                "ibv_reg_dmabuf_mr",
                "the verbs library does not have it (rdma-core 34 or later does)",
            ));
        };
        // SAFETY: the domain is alive and the descriptor open for the call. The device's mapping holds its own
        // reference to the buffer, so the memory outlives the descriptor; whether `offset` and `length` lie inside
        // the buffer is checked by the kernel.
        let raw = unsafe {
            register(
                self.raw(),
                offset,
                length as sys::size_t,
                iova,
                fd.as_raw_fd(),
                access.raw() as i32,
            )
        };
        self.registered("ibv_reg_dmabuf_mr", raw, length, access)
    }

    /// Whether the device can register dmabufs. Asked by offering it a descriptor that is none: a driver that can says
    /// that the descriptor is bad, one that cannot says so first.
    pub fn dmabuf_support(&self) -> DmabufSupport {
        let Ok(register) = &self.context().verbs().ibv_reg_dmabuf_mr else {
            return DmabufSupport::No("the verbs library does not know them".to_owned());
        };
        let access = sys::IBV_ACCESS_LOCAL_WRITE as i32;
        // SAFETY: the domain is alive. Descriptor -1 names nothing, so nothing can be registered; should a driver
        // return a registration all the same, it is given back below.
        let raw = unsafe { register(self.raw(), 0, 4096, 0, -1, access) };
        if !raw.is_null() {
            // SAFETY: just registered, and known to nobody else.
            unsafe { self.context().verbs().ibv_dereg_mr(raw) };
            return DmabufSupport::Unknown("it registered descriptor -1".to_owned());
        }
        match last_errno() {
            libc::EBADF => DmabufSupport::Yes,
            errno @ (libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS) => DmabufSupport::No(describe(errno)),
            errno => DmabufSupport::Unknown(describe(errno)),
        }
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.inner.raw.as_ptr()
    }

    fn registered(
        &self,
        verb: &'static str,
        raw: *mut sys::ibv_mr,
        length: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let Some(raw) = NonNull::new(raw) else {
            let errno = last_errno();
            return Err(explain_registration(self.context(), verb, errno, length, access));
        };
        // SAFETY: the library just returned this region; its keys do not change while it is registered.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        Ok(MemoryRegion {
            raw,
            lkey,
            rkey,
            domain: self.clone(),
        })
    }
}

impl std::fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ProtectionDomain({})", self.context().name())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: allocated in `ProtectionDomain::new`, given back only here. Memory regions and queue pairs hold a
        // clone of the domain, so none is left.
        let code = unsafe { self.context.verbs().ibv_dealloc_pd(self.raw.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.context.name(), code, "ibv_dealloc_pd failed");
        }
    }
}

impl MemoryRegion {
    /// Names the memory in our own work requests.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Names the memory in the work requests of peers.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The domain it is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }
}

impl std::fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("device", &self.domain.context().name())
            .field("lkey", &self.lkey)
            .field("rkey", &self.rkey)
            .finish()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let context = self.domain.context();
        // SAFETY: registered in `registered`, given back only here; the domain is still alive.
        let code = unsafe { context.verbs().ibv_dereg_mr(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(
                device = context.name(),
                code,
                "ibv_dereg_mr failed: the memory stays pinned and reachable"
            );
        }
    }
}
