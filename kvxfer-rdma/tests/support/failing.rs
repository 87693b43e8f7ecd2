//! Staged memory whose copies fail when they are told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvxfer_core::memory::{CopyState, CopyTicket, HostView, MemoryDomain, Region, Segment, StagingPin};
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_testkit::staged::StagedMemory;

/// A domain over another's regions.
#[derive(Debug)]
pub struct Failing {
    staged: Arc<StagedMemory>,
    /// Whether copies fail from now on, after they have ended.
    pub fails: AtomicBool,
}

impl Failing {
    pub fn allocate(staged: &Arc<StagedMemory>, length: u64) -> (Arc<Failing>, Arc<Region>) {
        let inner = staged.allocate(length).unwrap();
        let domain = Arc::new(Failing {
            staged: staged.clone(),
            fails: AtomicBool::new(false),
        });
        let base = inner.address() as *mut u8;
        // SAFETY: nobody touches the address; the inner region keeps what it stands for.
        let region = unsafe { Region::from_raw(base, length, domain.clone(), Box::new(inner)) };
        (domain, region.unwrap())
    }
}

impl MemoryDomain for Failing {
    fn name(&self) -> &str {
        "failing"
    }
    fn host_view(&self, _: &Region, _: u64, _: u64) -> Option<HostView> {
        None
    }
    unsafe fn pin_staging(&self, staging: HostView) -> Result<Option<StagingPin>> {
        // SAFETY: the caller's promise.
        unsafe { self.staged.pin_staging(staging) }
    }
    fn start_gather(&self, regions: &[Arc<Region>], segments: &[Segment], staging: HostView) -> Result<CopyTicket> {
        self.staged.start_gather(regions, segments, staging)
    }
    fn start_scatter(&self, staging: HostView, regions: &[Arc<Region>], segments: &[Segment]) -> Result<CopyTicket> {
        self.staged.start_scatter(staging, regions, segments)
    }
    fn poll_copy(&self, ticket: CopyTicket) -> Result<CopyState> {
        match self.staged.poll_copy(ticket)? {
            CopyState::Done if self.fails.load(Ordering::SeqCst) => {
                Err(Error::new(ErrorKind::ResourceExhausted, "the copy failed"))
            }
            state => Ok(state),
        }
    }
    fn copy_in(&self, region: &Region, offset: u64, bytes: &[u8]) -> Result<()> {
        self.staged.copy_in(region, offset, bytes)
    }
    fn copy_out(&self, region: &Region, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.staged.copy_out(region, offset, bytes)
    }
}
