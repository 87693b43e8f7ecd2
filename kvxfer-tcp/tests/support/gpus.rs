//! Fake GPUs as a kind of memory, through the production code that knows them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer_core::memory::Region;
use kvxfer_cuda::{Cuda, CudaConfig};
use kvxfer_fake_cuda::{Engine, FakeCuda};

use super::until;

/// Two devices whose work takes a while.
pub struct Gpus {
    pub fake: FakeCuda,
    /// None once everything has to be given back.
    cuda: Option<Cuda>,
    engines: [Arc<Engine>; 2],
    regions: AtomicU32,
    host_regions: AtomicU32,
}

/// Device memory; freed with its region.
struct Owned {
    engine: Arc<Engine>,
    address: u64,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.engine.free(self.address).unwrap();
    }
}

impl Gpus {
    pub fn new(settings: &[(&str, &str, &str)]) -> Gpus {
        let slow = [("*", "op_jitter_us", "300")];
        let fake = FakeCuda::with(&[&slow, settings].concat()).unwrap();
        let config = CudaConfig {
            library: fake.library_path().to_str().unwrap().into(),
            ..CudaConfig::default()
        };
        Gpus {
            cuda: Some(Cuda::load(&config).unwrap()),
            engines: [0, 1].map(|device| Arc::new(fake.engine(device).unwrap())),
            regions: AtomicU32::new(0),
            host_regions: AtomicU32::new(0),
            fake,
        }
    }

    /// Memory of one device, the next time of the other.
    pub fn region(&self, bytes: u64) -> Arc<Region> {
        let number = self.regions.fetch_add(1, Ordering::Relaxed);
        let engine = self.engines[number as usize % 2].clone();
        let address = engine.allocate(bytes as usize).unwrap();
        let owned = Owned { engine, address };
        // SAFETY: freed when the region is dropped.
        unsafe { self.cuda.as_ref().unwrap().region(address, bytes, Box::new(owned)) }.unwrap()
    }

    pub fn host_region(&self, bytes: u64) -> Arc<Region> {
        self.host_regions.fetch_add(1, Ordering::Relaxed);
        Region::allocate(bytes).unwrap()
    }

    /// How many regions were made on devices.
    pub fn regions(&self) -> u32 {
        self.regions.load(Ordering::Relaxed)
    }

    /// How many on the host.
    pub fn host_regions(&self) -> u32 {
        self.host_regions.load(Ordering::Relaxed)
    }

    /// No rule was broken, nothing waited for a device, and nothing is left.
    pub fn end_well(&mut self) {
        self.fake.assert_clean();
        assert!(self.fake.count("copies") > 0, "no copy was made");
        assert_eq!(self.fake.count("unpinned_copies"), 0);
        assert_eq!(self.fake.count("synchronising"), 0, "{:?}", self.fake.calls());
        self.cuda = None;
        until("everything to be given back", || self.fake.leaks().is_empty());
        self.fake.assert_clean();
    }
}
