//! Memory: regions, and the domains they live in.
//!
//! A [`Region`] never hands out slices, because a peer may be writing into it at any moment. Bytes get in and out
//! through [`Region::copy_in`] and [`Region::copy_out`], or through a transport, which sees the region only through
//! its [`MemoryDomain`].

pub mod staging;

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// A piece of a region: what a stream of bytes is gathered from or scattered into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index of the region in the pool's list of regions.
    pub region: u32,
    /// First byte, counted from the region's start.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Where the CPU can touch a run of a region: what an `iovec` is made of.
#[derive(Debug, Clone, Copy)]
pub struct HostView {
    /// First byte.
    pub pointer: *mut u8,
    /// Bytes.
    pub length: usize,
}

/// A run of a region as a file descriptor that device drivers can map: how memory that the CPU cannot touch is
/// registered with a network device.
#[derive(Debug)]
pub struct DmaBuf {
    /// The dmabuf. A registration keeps its own reference: the descriptor may be closed once it is made.
    pub fd: OwnedFd,
    /// Where the run's first byte is in it. Congruent to the run's address modulo the page size.
    pub offset: u64,
    /// Bytes of the run. A region's runs follow each other and cover it: memory of several mappings has one for each.
    pub length: u64,
}

/// A region that other endpoints on this host may map: what its domain made of it ([`MemoryDomain::export`]).
///
/// Dropped, it is recalled. The domain keeps the region until nobody has it mapped any more.
pub trait Exported: Send + Sync + fmt::Debug {
    /// What another endpoint's domain needs to map it: opaque, at most [`EXPORT_BYTES_MAX`] bytes. Whoever has it can
    /// reach what it names, as it can with a remote key of RDMA: the allocation is the trust boundary, not the block.
    fn description(&self) -> &[u8];

    /// Has all importers let go of it, and gives it to nobody any more. Returns at once.
    fn recall(&self);

    /// Importers that have it mapped, or may have. Zero after a recall: the memory may be freed.
    fn importers(&self) -> usize;
}

/// Bytes of [`Exported::description`], at most.
pub const EXPORT_BYTES_MAX: usize = 256;

/// Another endpoint's region, mapped for copies into a domain's own memory ([`MemoryDomain::import`]). Let go of when
/// dropped, and when its owner recalls it, after the copies under way.
pub trait Imported: Any + Send + Sync + fmt::Debug {
    /// How it stands. Never blocks.
    fn state(&self) -> ImportState;

    /// Bytes of the region. Meaningful once it is [`ImportState::Ready`].
    fn length(&self) -> u64;
}

/// How an import stands.
#[derive(Debug, Clone)]
pub enum ImportState {
    /// The owner is being asked, or the driver.
    Pending,
    /// Copies may be started.
    Ready,
    /// It never came about, or the owner has recalled it: no copy is started any more.
    Gone(Error),
}

/// A run of an imported region.
#[derive(Debug, Clone, Copy)]
pub struct ImportedRun<'a> {
    /// Of which region.
    pub region: &'a Arc<dyn Imported>,
    /// First byte, counted from the region's start.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Keeps a staging buffer fit for a domain's copies; see [`MemoryDomain::pin_staging`].
pub type StagingPin = Box<dyn Any + Send + Sync>;

/// A copy that a domain has started: its name for [`MemoryDomain::poll_copy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyTicket(pub u64);

/// How a started copy stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyState {
    /// Still running: both ends must stay as they are.
    Running,
    /// Finished: the bytes are in place and visible.
    Done,
}

/// The kind of memory a region is in, and how bytes get out of and into it.
///
/// The host domain is the identity: every run has a host view. A device domain has none, and moves bytes through
/// staging buffers with copies that run by themselves and are polled.
pub trait MemoryDomain: Send + Sync + fmt::Debug {
    /// The domain's name in logs and errors: `host`, `cuda:0000:17:00.0`, …
    fn name(&self) -> &str;

    /// The host's view of a run, if the CPU can touch it. The run lies inside the region.
    fn host_view(&self, region: &Region, offset: u64, length: u64) -> Option<HostView>;

    /// Makes a staging buffer fit for the domain's copies: page-locks it, say. The buffer stays as it is until the guard
    /// is dropped, which undoes it. Called once for each buffer and domain, before the buffer's first copy; may be slow.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system or the device refuses.
    ///
    /// # Safety
    /// `staging` is memory of the caller's that lives until the guard is dropped.
    unsafe fn pin_staging(&self, _staging: HostView) -> Result<Option<StagingPin>> {
        Ok(None)
    }

    /// Starts copying the segments, in order and densely, into `staging`. The caller keeps `staging` and the
    /// regions alive and untouched until [`poll_copy`](Self::poll_copy) says [`CopyState::Done`], or fails.
    ///
    /// A domain may hold the copy back, so as to give its device several at once, but not beyond a few calls of `poll_copy`
    /// with its ticket.
    fn start_gather(&self, regions: &[Arc<Region>], segments: &[Segment], staging: HostView) -> Result<CopyTicket>;

    /// Starts copying `staging`, in order and densely, into the segments; same contract.
    fn start_scatter(&self, staging: HostView, regions: &[Arc<Region>], segments: &[Segment]) -> Result<CopyTicket>;

    /// Lets other endpoints on this host map the region, so that they copy out of it without staging. May be slow: called
    /// when a pool is registered. `None`: not with this domain; an error: not with this memory, and why.
    fn export(&self, _region: &Arc<Region>) -> Option<Result<Arc<dyn Exported>>> {
        None
    }

    /// Begins to map another endpoint's region for copies into this domain's memory. Returns at once: the work is done on a
    /// thread of the domain's. The same description is mapped once, however often it is asked for. `None`: this domain
    /// does not do that.
    fn import(&self, _description: &[u8]) -> Option<Arc<dyn Imported>> {
        None
    }

    /// Starts copying the runs of imported regions, in order and densely, into the segments, which are as long in all;
    /// same contract as [`start_gather`](Self::start_gather). The regions stay mapped until the copy has ended.
    ///
    /// # Errors
    /// That of an import that is [`ImportState::Gone`], `Internal` for one that is of another domain, `OutOfBounds` for a
    /// run outside its region.
    fn start_import_copy(
        &self,
        _from: &[ImportedRun<'_>],
        _regions: &[Arc<Region>],
        _segments: &[Segment],
    ) -> Result<CopyTicket> {
        Err(Error::new(ErrorKind::Internal, "a copy of imported memory").because("this domain imports none"))
    }

    /// How the copy stands. After `Done` or an error the ticket is spent, and the copy touches nothing any more.
    ///
    /// `Done` of a scatter: the bytes are visible to whatever the device starts after it.
    fn poll_copy(&self, ticket: CopyTicket) -> Result<CopyState>;

    /// Copies bytes in at once (a slow path for callers and tests, never for transports).
    fn copy_in(&self, region: &Region, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Copies bytes out at once.
    fn copy_out(&self, region: &Region, offset: u64, bytes: &mut [u8]) -> Result<()>;

    /// The region as dmabufs, if the domain can make any. `None`: this domain has none; an error: it has, but not of this
    /// memory, and says why.
    fn dmabufs(&self, _region: &Region) -> Option<Result<Vec<DmaBuf>>> {
        None
    }

    /// Where a network device's driver may know the memory by its address alone, because the two drivers know each other
    /// (peer memory). `None`: only the host's view, if there is one.
    fn peer_address(&self, _region: &Region) -> Option<u64> {
        None
    }

    /// Makes what network devices have written into the region visible to whatever reads it from now on. One-sided links
    /// call it after their device's writes are in memory and before an arrival or a fence of them counts. Short.
    ///
    /// # Errors
    /// The device's. The bytes do not count then.
    fn settle_writes(&self, _region: &Region) -> Result<()> {
        Ok(())
    }

    /// Whether the region's address still is the memory that the region was made of: memory that was freed and allocated
    /// anew under it is not. Links ask once for each transfer or slot and region, on a thread of theirs.
    ///
    /// # Errors
    /// `NotRegistered` if it is other memory, or none.
    fn verify(&self, _region: &Region) -> Result<()> {
        Ok(())
    }
}

/// Ordinary host memory: every run has a host view, nothing is ever staged.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostMemory;

impl HostMemory {
    /// Its name.
    pub const NAME: &str = "host";
}

impl MemoryDomain for HostMemory {
    fn name(&self) -> &str {
        HostMemory::NAME
    }

    fn host_view(&self, region: &Region, offset: u64, length: u64) -> Option<HostView> {
        region.check(offset, length).ok()?;
        // SAFETY: the run was just checked to lie inside the region, so the sum stays inside one allocation.
        let pointer = unsafe { region.base.as_ptr().add(offset as usize) };
        Some(HostView {
            pointer,
            length: length as usize,
        })
    }

    fn start_gather(&self, _: &[Arc<Region>], _: &[Segment], _: HostView) -> Result<CopyTicket> {
        Err(Error::new(ErrorKind::Internal, "staging was asked of host memory").because("host memory has a host view"))
    }

    fn start_scatter(&self, _: HostView, _: &[Arc<Region>], _: &[Segment]) -> Result<CopyTicket> {
        Err(Error::new(ErrorKind::Internal, "staging was asked of host memory").because("host memory has a host view"))
    }

    fn poll_copy(&self, _: CopyTicket) -> Result<CopyState> {
        Ok(CopyState::Done)
    }

    fn copy_in(&self, region: &Region, offset: u64, bytes: &[u8]) -> Result<()> {
        region.check(offset, bytes.len() as u64)?;
        // SAFETY: the destination run lies inside the region (checked above); it is valid for writes by the contract
        // of `Region::from_raw`; `bytes` cannot overlap it, since no slice of a region is ever handed out.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), region.base.as_ptr().add(offset as usize), bytes.len());
        }
        Ok(())
    }

    fn copy_out(&self, region: &Region, offset: u64, bytes: &mut [u8]) -> Result<()> {
        region.check(offset, bytes.len() as u64)?;
        // SAFETY: as in `copy_in`, with the region as the source.
        unsafe {
            std::ptr::copy_nonoverlapping(
                region.base.as_ptr().add(offset as usize),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
        Ok(())
    }
}

/// One contiguous range of memory, with whatever keeps it alive.
pub struct Region {
    base: NonNull<u8>,
    length: u64,
    domain: Arc<dyn MemoryDomain>,
    // Dropped with the region, after the last transport has let go of it.
    _keepalive: Box<dyn Any + Send + Sync>,
}

// SAFETY: the region is only an address and a length; all access goes through raw copies and system calls that
// tolerate concurrent writers, and the memory outlives the region by the contract of `from_raw`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// A region over memory that exists elsewhere.
    ///
    /// # Errors
    /// `InvalidArgument` if the base is null, the length zero, or their sum overflows.
    ///
    /// # Safety
    /// From now until the region is dropped (which `keepalive` marks: it is dropped with it), `length` bytes at
    /// `base` must stay mapped in `domain`'s sense and valid for reads and writes, and the caller must not hold Rust
    /// references into them while a transfer may touch them.
    pub unsafe fn from_raw(
        base: *mut u8,
        length: u64,
        domain: Arc<dyn MemoryDomain>,
        keepalive: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<Region>> {
        let bad = |why: &str| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("region at {base:p} of {length} bytes"),
            )
            .because(why)
            .remedy("pass the address and length of memory that is mapped for as long as the pool lives")
        };
        let base = NonNull::new(base).ok_or_else(|| bad("the address is null"))?;
        if length == 0 {
            return Err(bad("the length is zero"));
        }
        if (base.as_ptr() as u64).checked_add(length).is_none() || isize::try_from(length).is_err() {
            return Err(bad("the address plus the length overflows"));
        }
        Ok(Arc::new(Region {
            base,
            length,
            domain,
            _keepalive: keepalive,
        }))
    }

    /// Zeroed host memory of our own, aligned to 4 KiB. Pages are touched by whoever first writes them.
    ///
    /// # Errors
    /// `InvalidArgument` for a zero or absurd length, `ResourceExhausted` if the system has no memory.
    pub fn allocate(length: u64) -> Result<Arc<Region>> {
        let exhausted = || {
            Error::new(ErrorKind::ResourceExhausted, format!("{length} bytes of host memory"))
                .because("the system refused the allocation")
                .remedy("free memory or allocate a smaller pool")
        };
        let size = usize::try_from(length).map_err(|_| exhausted())?;
        let layout = std::alloc::Layout::from_size_align(size, 4096).map_err(|_| exhausted())?;
        if size == 0 {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "a region of 0 bytes").remedy("allocate at least one byte")
            );
        }
        // SAFETY: the layout has a non-zero size.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        if base.is_null() {
            return Err(exhausted());
        }
        let owned = Owned { base, layout };
        // SAFETY: the allocation above is `length` bytes, and `owned` frees it only when the region is dropped.
        unsafe { Region::from_raw(base, length, Arc::new(HostMemory), Box::new(owned)) }
    }

    /// The address of the first byte, in the domain's address space.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The domain the memory is in.
    pub fn domain(&self) -> &Arc<dyn MemoryDomain> {
        &self.domain
    }

    /// Copies `bytes` to `offset`. What a concurrent transfer writes to the same bytes is undefined.
    ///
    /// # Errors
    /// `OutOfBounds` if the run does not lie inside the region.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len() as u64)?;
        self.domain.copy_in(self, offset, bytes)
    }

    /// Copies bytes from `offset` out.
    ///
    /// # Errors
    /// `OutOfBounds` if the run does not lie inside the region.
    pub fn copy_out(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len() as u64)?;
        self.domain.copy_out(self, offset, bytes)
    }

    /// The host's view of a run, if the CPU can touch it and it lies inside the region.
    pub fn host_view(&self, offset: u64, length: u64) -> Option<HostView> {
        self.check(offset, length).ok()?;
        self.domain.host_view(self, offset, length)
    }

    /// Whether the run lies inside the region.
    ///
    /// # Errors
    /// `OutOfBounds` if it does not.
    pub fn check(&self, offset: u64, length: u64) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length => Ok(()),
            _ => Err(
                Error::new(ErrorKind::OutOfBounds, format!("{length} bytes at offset {offset}"))
                    .at(format!("region of {} bytes in {}", self.length, self.domain.name()))
                    .remedy("keep offset plus length inside the region"),
            ),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Region({:#x}+{} in {})",
            self.address(),
            self.length,
            self.domain.name()
        )
    }
}

struct Owned {
    base: *mut u8,
    layout: std::alloc::Layout,
}

// SAFETY: the allocation is owned by this value alone and the global allocator may free from any thread.
unsafe impl Send for Owned {}
// SAFETY: no method takes `&Owned`.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated in `Region::allocate` with this very layout, and freed only here.
        unsafe { std::alloc::dealloc(self.base, self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_inside() {
        let region = Region::allocate(64).unwrap();
        region.copy_in(60, &[1, 2, 3, 4]).unwrap();
        let mut out = [9u8; 5];
        region.copy_out(59, &mut out).unwrap();
        assert_eq!(out, [0, 1, 2, 3, 4]);
        assert_eq!(region.copy_in(61, &[0; 4]).unwrap_err().kind(), ErrorKind::OutOfBounds);
        assert_eq!(
            region.copy_in(u64::MAX, &[0; 4]).unwrap_err().kind(),
            ErrorKind::OutOfBounds
        );
        assert!(region.host_view(60, 5).is_none());
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(Region::allocate(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
        // SAFETY: refused before any use.
        let null = unsafe { Region::from_raw(std::ptr::null_mut(), 1, Arc::new(HostMemory), Box::new(())) };
        assert_eq!(null.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
