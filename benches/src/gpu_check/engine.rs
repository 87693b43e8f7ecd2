//! What an inference engine does with its GPU, in small: allocates, runs kernels, records events. It calls the driver by
//! itself, beside kvxfer, as an engine does.
//!
//! It may wait for the device; kvxfer may not, and is checked not to.

use std::ffi::{CString, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;
use std::time::Instant;

use kvxfer_core::{Error, ErrorKind, Result};

/// The kernels of `blocks.cu`.
const KERNELS: &str = include_str!("blocks.ptx");
/// Thread blocks and threads of a launch: enough to fill and check blocks, without taking the device.
const GRID: c_uint = 64;
const THREADS: c_uint = 256;
/// `CU_STREAM_NON_BLOCKING`, `CU_EVENT_DISABLE_TIMING`.
const NON_BLOCKING: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;

macro_rules! driver {
    ($($name:ident = $symbol:literal ($($type:ty),*);)*) => {
        /// The functions used, by their exported names.
        struct Calls {
            $($name: unsafe extern "C" fn($($type),*) -> c_uint,)*
            _library: libloading::Library,
        }

        impl Calls {
            fn load(path: &str) -> Result<Calls> {
                let path = if path.is_empty() { "libcuda.so.1" } else { path };
                let bad = |what: String, error: libloading::Error| {
                    Error::new(ErrorKind::Unsupported, what).because(error.to_string()).remedy("install the NVIDIA driver")
                };
                // SAFETY: the system's driver, or what the operator named; its initialisers are theirs to vouch for.
                let library = unsafe { libloading::Library::new(path) }.map_err(|error| bad(format!("load {path}"), error))?;
                Ok(Calls {
                    $(
                        // SAFETY: the driver's headers give this symbol this signature.
                        $name: *unsafe { library.get($symbol.as_bytes()) }.map_err(|error| bad(format!("find {}", $symbol), error))?,
                    )*
                    _library: library,
                })
            }
        }
    };
}

driver! {
    init = "cuInit"(c_uint);
    device = "cuDeviceGet"(*mut c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut *mut c_void, c_int);
    release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    set_current = "cuCtxSetCurrent"(*mut c_void);
    push = "cuCtxPushCurrent_v2"(*mut c_void);
    pop = "cuCtxPopCurrent_v2"(*mut *mut c_void);
    alloc = "cuMemAlloc_v2"(*mut u64, usize);
    free = "cuMemFree_v2"(u64);
    host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost"(*mut c_void);
    stream_create = "cuStreamCreate"(*mut *mut c_void, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(*mut c_void);
    stream_synchronize = "cuStreamSynchronize"(*mut c_void);
    event_create = "cuEventCreate"(*mut *mut c_void, c_uint);
    event_record = "cuEventRecord"(*mut c_void, *mut c_void);
    event_destroy = "cuEventDestroy_v2"(*mut c_void);
    copy = "cuMemcpyAsync"(u64, u64, usize, *mut c_void);
    set = "cuMemsetD8Async"(u64, u8, usize, *mut c_void);
    module_load = "cuModuleLoadData"(*mut *mut c_void, *const c_void);
    module_unload = "cuModuleUnload"(*mut c_void);
    module_function = "cuModuleGetFunction"(*mut *mut c_void, *mut c_void, *const std::ffi::c_char);
    launch = "cuLaunchKernel"(
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void);
}

/// One device with its kernels. Its context is current on the thread that made it; others only free memory.
pub(super) struct Engine {
    calls: Calls,
    device: c_int,
    context: *mut c_void,
    module: *mut c_void,
    fill: *mut c_void,
    check: *mut c_void,
}

// SAFETY: handles and functions of the driver's, which may be used by any thread whose context is the handles'.
unsafe impl Send for Engine {}
// SAFETY: as above; nothing is changed after it is made.
unsafe impl Sync for Engine {}

impl Engine {
    /// The device with this ordinal, of the driver at this path (empty: the system's).
    pub(super) fn open(library: &str, ordinal: i32) -> Result<Arc<Engine>> {
        let calls = Calls::load(library)?;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: each call writes what it is given a place for; the retained context is released when the engine goes.
        unsafe {
            done("cuInit", (calls.init)(0))?;
            done("cuDeviceGet", (calls.device)(&mut device, ordinal))?;
            done("cuDevicePrimaryCtxRetain", (calls.retain)(&mut context, device))?;
            done("cuCtxSetCurrent", (calls.set_current)(context))?;
        }
        let mut engine = Engine {
            calls,
            device,
            context,
            module: std::ptr::null_mut(),
            fill: std::ptr::null_mut(),
            check: std::ptr::null_mut(),
        };
        let text = CString::new(KERNELS).map_err(|_| Error::new(ErrorKind::Internal, "kernels with a zero byte"))?;
        // SAFETY: the text ends in a zero byte; the functions live as long as the module.
        unsafe {
            done(
                "cuModuleLoadData",
                (engine.calls.module_load)(&mut engine.module, text.as_ptr().cast()),
            )?;
            let module = engine.module;
            let find = engine.calls.module_function;
            done(
                "cuModuleGetFunction",
                find(&mut engine.fill, module, c"kvx_fill".as_ptr()),
            )?;
            done(
                "cuModuleGetFunction",
                find(&mut engine.check, module, c"kvx_check".as_ptr()),
            )?;
        }
        Ok(Arc::new(engine))
    }

    /// Device memory.
    pub(super) fn allocate(self: &Arc<Self>, bytes: u64) -> Result<Memory> {
        let mut address = 0;
        // SAFETY: writes the address.
        unsafe { done("cuMemAlloc", (self.calls.alloc)(&mut address, bytes as usize)) }?;
        Ok(Memory {
            engine: self.clone(),
            address,
            bytes,
            pinned: false,
        })
    }

    /// Page-locked host memory.
    pub(super) fn pinned(self: &Arc<Self>, bytes: u64) -> Result<Memory> {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: writes the pointer. 1: for all contexts.
        unsafe {
            done(
                "cuMemHostAlloc",
                (self.calls.host_alloc)(&mut pointer, bytes as usize, 1),
            )
        }?;
        Ok(Memory {
            engine: self.clone(),
            address: pointer as u64,
            bytes,
            pinned: true,
        })
    }

    /// A stream.
    pub(super) fn stream(self: &Arc<Self>) -> Result<Stream> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes the handle.
        unsafe { done("cuStreamCreate", (self.calls.stream_create)(&mut raw, NON_BLOCKING)) }?;
        Ok(Stream {
            engine: self.clone(),
            raw,
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: memory, streams and events hold the engine, so that nothing of it is in use. Failures have no remedy.
        unsafe {
            if !self.module.is_null() {
                (self.calls.module_unload)(self.module);
            }
            (self.calls.release)(self.device);
        }
    }
}

/// Memory of the device, or page-locked memory of the host.
pub(super) struct Memory {
    engine: Arc<Engine>,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pinned: bool,
}

impl Memory {
    /// A word of page-locked memory.
    pub(super) fn word(&self, index: usize) -> u64 {
        assert!(self.pinned && (index as u64 + 1) * 8 <= self.bytes);
        // SAFETY: inside the allocation, which the processor sees; the device is not writing it, as the caller waited.
        unsafe { (self.address as *const u64).add(index).read_volatile() }
    }

    /// Sets a 32-bit word of page-locked memory.
    pub(super) fn set_u32(&self, index: usize, value: u32) {
        assert!(self.pinned && (index as u64 + 1) * 4 <= self.bytes);
        // SAFETY: as for `word`.
        unsafe { (self.address as *mut u32).add(index).write_volatile(value) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let calls = &self.engine.calls;
        let mut before = std::ptr::null_mut();
        // SAFETY: allocated by the engine, and given back once, by whatever thread lets go of it last: in the engine's
        // context. Failures have no remedy.
        unsafe {
            (calls.push)(self.engine.context);
            if self.pinned {
                (calls.host_free)(self.address as *mut c_void);
            } else {
                (calls.free)(self.address);
            }
            (calls.pop)(&mut before);
        }
    }
}

/// Blocks of one plane, named by a list that the device can read.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    /// Address of the plane's first block.
    pub(super) base: u64,
    /// Bytes of a block, which is also how far they are apart; a multiple of 8.
    pub(super) block_bytes: u64,
    /// Address of the list: 32 bits each.
    pub(super) list: u64,
    /// How many.
    pub(super) count: u32,
}

/// An engine's stream.
pub(super) struct Stream {
    engine: Arc<Engine>,
    pub(super) raw: *mut c_void,
}

impl Stream {
    /// Fills blocks with what `seed` says, after a wait on the device.
    pub(super) fn fill(&self, blocks: Blocks, seed: u64, wait_ns: u64) -> Result<()> {
        self.launch(self.engine.fill, blocks, seed, wait_ns)
    }

    /// Adds how many words are wrong to the word at the address `wrong`.
    pub(super) fn check(&self, blocks: Blocks, seed: u64, wrong: u64) -> Result<()> {
        self.launch(self.engine.check, blocks, seed, wrong)
    }

    // Both kernels differ in their last parameter's meaning only.
    fn launch(&self, kernel: *mut c_void, blocks: Blocks, seed: u64, last: u64) -> Result<()> {
        let (base, stride): (u64, c_ulonglong) = (blocks.base, blocks.block_bytes / 8);
        let (list, count, words) = (blocks.list, blocks.count, (blocks.block_bytes / 8) as c_uint);
        let mut parameters = [
            std::ptr::from_ref(&base).cast_mut().cast::<c_void>(),
            std::ptr::from_ref(&stride).cast_mut().cast(),
            std::ptr::from_ref(&list).cast_mut().cast(),
            std::ptr::from_ref(&count).cast_mut().cast(),
            std::ptr::from_ref(&words).cast_mut().cast(),
            std::ptr::from_ref(&seed).cast_mut().cast(),
            std::ptr::from_ref(&last).cast_mut().cast(),
        ];
        // SAFETY: the parameters have the kernel's types and are copied during the call.
        unsafe {
            let launched = (self.engine.calls.launch)(
                kernel,
                GRID,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.raw,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            );
            done("cuLaunchKernel", launched)
        }
    }

    /// Sets bytes.
    pub(super) fn set(&self, address: u64, byte: u8, bytes: u64) -> Result<()> {
        // SAFETY: memory of the engine's, by the callers in this module.
        unsafe {
            done(
                "cuMemsetD8Async",
                (self.engine.calls.set)(address, byte, bytes as usize, self.raw),
            )
        }
    }

    /// Copies between any two addresses.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        // SAFETY: memory of the engine's, by the callers in this module.
        unsafe {
            done(
                "cuMemcpyAsync",
                (self.engine.calls.copy)(to, from, bytes as usize, self.raw),
            )
        }
    }

    /// An event that happens when everything before it on the stream is done.
    pub(super) fn record(&self) -> Result<Event> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes the handle, which the event owns from then on.
        unsafe {
            done(
                "cuEventCreate",
                (self.engine.calls.event_create)(&mut raw, DISABLE_TIMING),
            )
        }?;
        let event = Event {
            engine: self.engine.clone(),
            raw,
        };
        // SAFETY: both are alive.
        unsafe { done("cuEventRecord", (self.engine.calls.event_record)(event.raw, self.raw)) }?;
        Ok(event)
    }

    /// Waits for everything on the stream, as only an engine may.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: a live stream.
        unsafe { done("cuStreamSynchronize", (self.engine.calls.stream_synchronize)(self.raw)) }
    }

    /// Seconds that the work takes, with the stream empty before and after.
    pub(super) fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.wait()?;
        let begun = Instant::now();
        work()?;
        self.wait()?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by the engine, and destroyed once.
        unsafe { (self.engine.calls.stream_destroy)(self.raw) };
    }
}

/// An engine's event.
pub(super) struct Event {
    engine: Arc<Engine>,
    pub(super) raw: *mut c_void,
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by the engine, and destroyed once.
        unsafe { (self.engine.calls.event_destroy)(self.raw) };
    }
}

/// The word `word` of a request's block `index`, as `blocks.cu` has it.
pub(super) fn expected(seed: u64, index: u32, word: u32) -> u64 {
    let place = (u64::from(index) << 32) + u64::from(word) + 1;
    let mut value = seed.wrapping_add(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(place));
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn done(call: &'static str, code: c_uint) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(Error::new(ErrorKind::Unsupported, call)
            .because(format!("the driver returned {code}"))
            .remedy("look the number up in cuda.h; check that the device is free and has memory")),
    }
}
