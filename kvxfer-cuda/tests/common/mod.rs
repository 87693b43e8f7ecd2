//! What the tests share: a driver with an engine on its first device, and copies that are waited for.

#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod share;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::Result;
use kvxfer_core::memory::{CopyState, CopyTicket, HostView, MemoryDomain, Region, Segment, StagingPin};
use kvxfer_cuda::{Cuda, CudaConfig, Gather};
use kvxfer_fake_cuda::{Engine, FakeCuda};

/// Longer than anything takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Bench {
    pub(crate) cuda: Cuda,
    pub(crate) engine: Engine,
    pub(crate) fake: FakeCuda,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::with(&[], Gather::Auto)
    }

    pub(crate) fn with(settings: &[(&str, &str, &str)], gather: Gather) -> Bench {
        let fake = FakeCuda::with(settings).unwrap();
        let engine = fake.engine(0).unwrap();
        Bench {
            cuda: Cuda::load(&config(&fake, gather)).unwrap(),
            engine,
            fake,
        }
    }

    /// A region of device memory of its own.
    pub(crate) fn region(&self, length: u64) -> Arc<Region> {
        region(&self.cuda, self.engine.allocate(length as usize).unwrap(), length).unwrap()
    }

    /// Everything of the driver's given back, and no rule broken.
    pub(crate) fn end(self) {
        let Bench { cuda, engine, fake } = self;
        drop(cuda);
        assert_eq!(fake.leaks(), [] as [String; 0]);
        drop(engine);
        assert_eq!(fake.count("synchronising"), 0);
        fake.assert_clean();
    }
}

pub(crate) fn config(fake: &FakeCuda, gather: Gather) -> CudaConfig {
    CudaConfig {
        library: fake.library_path().to_str().unwrap().to_owned(),
        gather,
        ..CudaConfig::default()
    }
}

pub(crate) fn region(cuda: &Cuda, address: u64, length: u64) -> Result<Arc<Region>> {
    // SAFETY: the memory is the engine's, and stays until the test has dropped the region (or is a bad address, which is
    // refused before any use).
    unsafe { cuda.region(address, length, Box::new(())) }
}

/// A staging buffer, page-locked.
pub(crate) struct Staging {
    pin: Option<StagingPin>,
    pub(crate) memory: Arc<Region>,
}

impl Staging {
    pub(crate) fn unpinned(length: u64) -> Staging {
        Staging {
            pin: None,
            memory: Region::allocate(length).unwrap(),
        }
    }

    pub(crate) fn pinned(domain: &Arc<dyn MemoryDomain>, length: u64) -> Result<Staging> {
        let mut staging = Staging::unpinned(length);
        // SAFETY: the memory is dropped after the pin.
        staging.pin = unsafe { domain.pin_staging(staging.view()) }?;
        Ok(staging)
    }

    pub(crate) fn view(&self) -> HostView {
        self.memory.host_view(0, self.memory.length()).unwrap()
    }

    pub(crate) fn part(&self, offset: u64, length: u64) -> HostView {
        self.memory.host_view(offset, length).unwrap()
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.length() as usize];
        self.memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }
}

pub(crate) fn wait(domain: &dyn MemoryDomain, ticket: CopyTicket) -> Result<()> {
    let begun = Instant::now();
    loop {
        match domain.poll_copy(ticket)? {
            CopyState::Done => return Ok(()),
            CopyState::Running => assert!(begun.elapsed() < PATIENCE, "a copy does not end"),
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub(crate) fn segment(region: u32, offset: u64, length: u64) -> Segment {
    Segment { region, offset, length }
}

/// Bytes that differ from place to place, also from block to block.
pub(crate) fn pattern(length: usize, seed: u8) -> Vec<u8> {
    let far = |index: usize| ((index >> 16) as u8).wrapping_mul(101) ^ (index >> 24) as u8;
    let byte = |index: usize| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ far(index) ^ seed;
    (0..length).map(byte).collect()
}
