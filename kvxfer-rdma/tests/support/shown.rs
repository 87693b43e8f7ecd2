//! Memory that shows what devices have written only after it was settled, and that can turn out to be other memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvxfer_core::memory::{CopyState, CopyTicket, HostMemory, HostView, MemoryDomain, Region, Segment};
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// A domain of one region.
#[derive(Debug)]
pub struct Shown {
    shown: Mutex<Vec<u8>>,
    /// How often it was settled and looked at.
    pub settled: AtomicU64,
    pub verified: AtomicU64,
    /// Whether that fails.
    pub settle_fails: AtomicBool,
    pub verify_fails: AtomicBool,
}

impl Shown {
    pub fn allocate(length: u64) -> (Arc<Shown>, Arc<Region>) {
        let domain = Arc::new(Shown {
            shown: Mutex::new(vec![0; length as usize]),
            settled: AtomicU64::new(0),
            verified: AtomicU64::new(0),
            settle_fails: AtomicBool::new(false),
            verify_fails: AtomicBool::new(false),
        });
        let host = Region::allocate(length).unwrap();
        let base = host.address() as *mut u8;
        // SAFETY: the host region's memory, which it keeps.
        let region = unsafe { Region::from_raw(base, length, domain.clone(), Box::new(host)) };
        (domain, region.unwrap())
    }

    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::SeqCst)
    }

    pub fn verified(&self) -> u64 {
        self.verified.load(Ordering::SeqCst)
    }
}

impl MemoryDomain for Shown {
    fn name(&self) -> &str {
        "shown"
    }
    fn host_view(&self, region: &Region, offset: u64, length: u64) -> Option<HostView> {
        HostMemory.host_view(region, offset, length)
    }
    fn start_gather(&self, _: &[Arc<Region>], _: &[Segment], _: HostView) -> Result<CopyTicket> {
        Err(Error::new(ErrorKind::Internal, "it has a host view"))
    }
    fn start_scatter(&self, _: HostView, _: &[Arc<Region>], _: &[Segment]) -> Result<CopyTicket> {
        Err(Error::new(ErrorKind::Internal, "it has a host view"))
    }
    fn poll_copy(&self, _: CopyTicket) -> Result<CopyState> {
        Ok(CopyState::Done)
    }
    fn copy_in(&self, region: &Region, offset: u64, bytes: &[u8]) -> Result<()> {
        HostMemory.copy_in(region, offset, bytes)?;
        self.shown.lock()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn copy_out(&self, region: &Region, offset: u64, bytes: &mut [u8]) -> Result<()> {
        region.check(offset, bytes.len() as u64)?;
        bytes.copy_from_slice(&self.shown.lock()[offset as usize..][..bytes.len()]);
        Ok(())
    }
    fn settle_writes(&self, region: &Region) -> Result<()> {
        if self.settle_fails.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::ResourceExhausted, "it could not be settled"));
        }
        let mut shown = self.shown.lock();
        HostMemory.copy_out(region, 0, &mut shown)?;
        self.settled.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn verify(&self, _: &Region) -> Result<()> {
        self.verified.fetch_add(1, Ordering::SeqCst);
        match self.verify_fails.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::NotRegistered, "it is other memory")),
            false => Ok(()),
        }
    }
}
