//! Fake GPUs as a kind of memory for tests of the layers above, through the production code that knows GPUs.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvxfer_core::memory::Region;
use kvxfer_cuda::{Cuda, CudaConfig};
use kvxfer_fake_cuda::{Engine, FakeCuda};
use parking_lot::Mutex;

use crate::touch::{Direct, Known};

/// How long everything may take to be given back.
const LIMIT: Duration = Duration::from_secs(10);

/// Two fake devices whose work takes a while, and who allocates on them.
#[derive(Debug)]
pub struct Gpus {
    /// The driver.
    pub fake: Arc<FakeCuda>,
    /// None while everything has to be given back.
    cuda: Mutex<Option<Cuda>>,
    share: bool,
    engines: [Arc<Engine>; 2],
    regions: AtomicU32,
}

/// Device memory; freed with its region.
struct Owned {
    engine: Arc<Engine>,
    address: u64,
    known: Option<Known>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.known = None;
        // Fails only where a test has broken the driver.
        let _ = self.engine.free(self.address);
    }
}

impl Gpus {
    /// With these settings of the driver.
    ///
    /// # Panics
    /// The driver cannot be made or loaded.
    pub fn new(settings: &[(&str, &str, &str)]) -> Gpus {
        let slow = [("*", "op_jitter_us", "300")];
        Gpus::of(FakeCuda::with(&[&slow, settings].concat()).expect("a fake driver"))
    }

    /// Those of a driver that a test or its parent has made.
    ///
    /// # Panics
    /// It has no two devices.
    pub fn of(fake: FakeCuda) -> Gpus {
        Gpus {
            cuda: Mutex::new(None),
            share: false,
            engines: [0, 1].map(|device| Arc::new(fake.engine(device).expect("an engine"))),
            regions: AtomicU32::new(0),
            fake: Arc::new(fake),
        }
    }

    /// The same, but endpoints map each other's memory: what goes from one to the other is not staged.
    pub fn shared(self) -> Gpus {
        Gpus { share: true, ..self }
    }

    /// The driver's library.
    pub fn library(&self) -> PathBuf {
        self.fake.library_path()
    }

    /// The production code's view of the driver.
    ///
    /// # Panics
    /// It cannot be loaded.
    pub fn cuda(&self) -> Cuda {
        let mut cuda = self.cuda.lock();
        let config = || CudaConfig {
            share: self.share,
            ..config(&self.fake)
        };
        let load = || Cuda::load(&config()).expect("the fake driver loads");
        cuda.get_or_insert_with(load).clone()
    }

    /// Who computes on a device.
    pub fn engine(&self, device: usize) -> &Arc<Engine> {
        &self.engines[device]
    }

    /// Memory of one device, the next time of the other.
    ///
    /// # Panics
    /// It is refused.
    pub fn region(&self, bytes: u64) -> Arc<Region> {
        let number = self.regions.fetch_add(1, Ordering::Relaxed);
        self.region_on(number as usize % 2, bytes)
    }

    /// Memory of a device.
    ///
    /// # Panics
    /// It is refused.
    pub fn region_on(&self, device: usize, bytes: u64) -> Arc<Region> {
        let engine = self.engines[device].clone();
        let address = engine.allocate(bytes as usize).expect("device memory");
        let known = Some(Known::new(address, bytes, self.fake.clone() as Arc<dyn Direct>));
        let owned = Owned { engine, address, known };
        // SAFETY: freed when the region is dropped.
        unsafe { self.cuda().region(address, bytes, Box::new(owned)) }.expect("a region of device memory")
    }

    /// How many regions were made.
    pub fn regions(&self) -> u32 {
        self.regions.load(Ordering::Relaxed)
    }

    /// No rule was broken, and nothing waited for a device.
    ///
    /// # Panics
    /// Else.
    pub fn assert_clean(&self) {
        self.fake.assert_clean();
        assert_eq!(self.fake.count("unpinned_copies"), 0);
        assert_eq!(self.fake.count("synchronising"), 0, "{:?}", self.fake.calls());
    }

    /// The same, and nothing is left. All regions and who used them are gone, or go.
    ///
    /// # Panics
    /// Else.
    pub fn end_well(&self) {
        self.assert_clean();
        *self.cuda.lock() = None;
        let end = Instant::now() + LIMIT;
        while !self.fake.leaks().is_empty() {
            assert!(Instant::now() < end, "left over: {:#?}", self.fake.leaks());
            std::thread::sleep(Duration::from_millis(1));
        }
        self.fake.assert_clean();
    }
}

/// As a kernel of the engine's sees memory: with what network devices have written if it was flushed.
impl Direct for FakeCuda {
    fn put(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.write(address, bytes)
    }

    fn get(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_into(address, bytes)
    }
}

/// The production code's settings for a fake driver.
pub fn config(fake: &FakeCuda) -> CudaConfig {
    CudaConfig {
        library: fake.library_path().to_string_lossy().into_owned(),
        ..CudaConfig::default()
    }
}
