//! Calls of the fake as production code makes them: through the loaded library, by symbols.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;
use kvxfer_fake_cuda::FakeCuda;
use libloading::Library;

pub const OK: CUresult = CUresult::CUDA_SUCCESS;

/// Calls a function by its symbol.
#[macro_export]
macro_rules! cu {
    ($driver:expr, $name:ident($($argument:expr => $type:ty),* $(,)?)) => {{
        type Function = unsafe extern "C" fn($($type),*) -> cudarc::driver::sys::CUresult;
        let library = &$driver.library;
        let name = concat!(stringify!($name), "\0");
        // SAFETY: tests give the types that the driver has.
        let symbol = unsafe { library.get::<Function>(name.as_bytes()) }.unwrap();
        // SAFETY: tests give pointers to what lives.
        #[allow(clippy::macro_metavars_in_unsafe)]
        unsafe {
            symbol($($argument),*)
        }
    }};
}

/// The loaded library, initialised.
pub struct Driver {
    pub library: Library,
}

impl Driver {
    pub fn load(fake: &FakeCuda) -> Driver {
        let driver = Driver::load_only(fake);
        assert_eq!(cu!(driver, cuInit(0 => u32)), OK);
        driver
    }

    pub fn load_only(fake: &FakeCuda) -> Driver {
        // SAFETY: a library made to be loaded.
        let library = unsafe { Library::new(fake.library_path()) }.unwrap();
        Driver { library }
    }

    /// The device's primary context, retained and current on this thread.
    pub fn context(&self, device: i32) -> usize {
        let mut context = 0usize;
        assert_eq!(
            cu!(self, cuDevicePrimaryCtxRetain(&raw mut context => *mut usize, device => i32)),
            OK
        );
        assert_eq!(cu!(self, cuCtxSetCurrent(context => usize)), OK);
        context
    }

    pub fn allocate(&self, length: usize) -> u64 {
        let mut address = 0u64;
        assert_eq!(
            cu!(self, cuMemAlloc_v2(&raw mut address => *mut u64, length => usize)),
            OK
        );
        address
    }

    pub fn free(&self, address: u64) -> CUresult {
        cu!(self, cuMemFree_v2(address => u64))
    }

    pub fn host(&self, length: usize) -> u64 {
        let mut address = 0u64;
        let answer = cu!(self, cuMemHostAlloc(&raw mut address => *mut u64, length => usize, 0 => u32));
        assert_eq!(answer, OK);
        address
    }

    pub fn stream(&self) -> usize {
        let mut stream = 0usize;
        assert_eq!(cu!(self, cuStreamCreate(&raw mut stream => *mut usize, 1 => u32)), OK);
        stream
    }

    pub fn event(&self) -> usize {
        let mut event = 0usize;
        assert_eq!(cu!(self, cuEventCreate(&raw mut event => *mut usize, 2 => u32)), OK);
        event
    }

    pub fn copy(&self, to: u64, from: u64, length: usize, stream: usize) -> CUresult {
        cu!(self, cuMemcpyAsync(to => u64, from => u64, length => usize, stream => usize))
    }

    pub fn batch(&self, pieces: &[(u64, u64, usize)], stream: usize) -> CUresult {
        let to: Vec<u64> = pieces.iter().map(|piece| piece.0).collect();
        let from: Vec<u64> = pieces.iter().map(|piece| piece.1).collect();
        let lengths: Vec<usize> = pieces.iter().map(|piece| piece.2).collect();
        // Order: stream; then two location hints and flags.
        let attributes = [1u32, 0, 0, 0, 0, 0];
        let (index, mut failed) = (0usize, 0usize);
        cu!(self, cuMemcpyBatchAsync(
            to.as_ptr() => *const u64, from.as_ptr() => *const u64, lengths.as_ptr() => *const usize,
            pieces.len() => usize, attributes.as_ptr() => *const u32, &raw const index => *const usize, 1 => usize,
            &raw mut failed => *mut usize, stream => usize
        ))
    }

    pub fn record(&self, event: usize, stream: usize) -> CUresult {
        cu!(self, cuEventRecord(event => usize, stream => usize))
    }

    pub fn query(&self, event: usize) -> CUresult {
        cu!(self, cuEventQuery(event => usize))
    }

    /// Queries the event until it has happened or failed, for ten seconds.
    pub fn wait(&self, event: usize) -> CUresult {
        until(|| self.query(event) != CUresult::CUDA_ERROR_NOT_READY);
        self.query(event)
    }

    /// Waits for everything that is in the stream now, without a synchronising call.
    pub fn drain(&self, stream: usize) -> CUresult {
        let idle = |answer| answer != CUresult::CUDA_ERROR_NOT_READY;
        until(|| idle(cu!(self, cuStreamQuery(stream => usize))));
        cu!(self, cuStreamQuery(stream => usize))
    }

    pub fn attribute<T: Default>(&self, address: u64, attribute: u32) -> Result<T, CUresult> {
        let mut value = T::default();
        let answer = cu!(self, cuPointerGetAttribute((&raw mut value).cast() => *mut std::ffi::c_void, attribute => u32, address => u64));
        if answer == OK { Ok(value) } else { Err(answer) }
    }
}

pub fn until(mut done: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < limit, "not within ten seconds");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Page-locked memory as the CPU sees it.
pub fn host_bytes(address: u64, length: usize) -> Vec<u8> {
    // SAFETY: tests ask for memory that they allocated.
    unsafe { std::slice::from_raw_parts(address as *const u8, length) }.to_vec()
}

pub fn set_host(address: u64, bytes: &[u8]) {
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

/// Whether the CPU may touch an address, without trying.
pub fn is_readable(address: u64) -> bool {
    let mut byte = [0u8; 1];
    let local = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let remote = libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: 1,
    };
    // SAFETY: the local memory is writable; the other is only tried.
    unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) == 1 }
}
