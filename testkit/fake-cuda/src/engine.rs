//! An engine for tests: who owns the device memory, and computes on streams of its own.

use std::ffi::c_void;
use std::io;
use std::sync::Arc;

use cudarc::driver::sys::{CUmemAllocationProp, CUresult};
use libloading::Library;

type Handle = usize;

/// Computes on one device. It holds the device's primary context, as PyTorch does.
///
/// Streams and events are the driver's handles as numbers, to be handed to the code under test.
#[derive(Debug)]
pub struct Engine {
    library: Arc<Library>,
    device: u32,
    context: Handle,
}

/// What makes one call of the driver.
macro_rules! call {
    ($engine:expr, $name:literal, ($($type:ty),*), $($argument:expr),*) => {{
        type Function = unsafe extern "C" fn($($type),*) -> CUresult;
        // SAFETY: the symbol has this type.
        let function = unsafe { $engine.library.get::<Function>(concat!($name, "\0").as_bytes()) };
        let function = function.map_err(io::Error::other)?;
        // SAFETY: pointers among the arguments are to locals that outlive the call.
        match unsafe { function($($argument),*) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(io::Error::other(format!("{}: {code:?}", $name))),
        }
    }};
}

/// A thread that is the engine's until this is dropped.
struct Playing<'a> {
    engine: &'a Engine,
    before: bool,
}

impl Drop for Playing<'_> {
    fn drop(&mut self) {
        let _ = self.engine.pop();
        self.engine.play(self.before);
    }
}

impl Engine {
    pub(crate) fn new(library: Arc<Library>, device: u32) -> io::Result<Engine> {
        let mut engine = Engine {
            library,
            device,
            context: 0,
        };
        let before = engine.play(true);
        let retained = engine.retain();
        engine.play(before);
        engine.context = retained?;
        Ok(engine)
    }

    fn retain(&self) -> io::Result<Handle> {
        let mut context = 0;
        call!(self, "cuInit", (u32), 0)?;
        let device = self.device as i32;
        call!(
            self,
            "cuDevicePrimaryCtxRetain",
            (*mut Handle, i32),
            &raw mut context,
            device
        )?;
        Ok(context)
    }

    fn play(&self, engine: bool) -> bool {
        type Play = extern "C" fn(bool) -> bool;
        // SAFETY: the symbol has this type.
        let play = unsafe { self.library.get::<Play>(b"kvx_fake_cuda_engine\0") };
        play.map(|play| play(engine)).unwrap_or(false)
    }

    fn pop(&self) -> io::Result<()> {
        let mut context: Handle = 0;
        call!(self, "cuCtxPopCurrent_v2", (*mut Handle), &raw mut context)
    }

    fn begin(&self) -> io::Result<Playing<'_>> {
        let before = self.play(true);
        if let Err(error) = call!(self, "cuCtxPushCurrent_v2", (Handle), self.context) {
            self.play(before);
            return Err(error);
        }
        Ok(Playing { engine: self, before })
    }

    /// Runs something as the engine, with its context current: calls that it makes through a table of its own do not
    /// count.
    ///
    /// # Errors
    /// The context cannot be made current.
    pub fn run<T>(&self, run: impl FnOnce() -> T) -> io::Result<T> {
        let _playing = self.begin()?;
        Ok(run())
    }

    /// The device's number.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Its context.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Device memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate(&self, length: usize) -> io::Result<u64> {
        let _playing = self.begin()?;
        let mut address = 0;
        call!(self, "cuMemAlloc_v2", (*mut u64, usize), &raw mut address, length)?;
        Ok(address)
    }

    /// Device memory from the device's pool, as stream-ordered allocators give it.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate_from_pool(&self, length: usize, stream: usize) -> io::Result<u64> {
        let _playing = self.begin()?;
        let mut address = 0;
        call!(
            self,
            "cuMemAllocAsync",
            (*mut u64, usize, Handle),
            &raw mut address,
            length,
            stream
        )?;
        Ok(address)
    }

    /// Page-locked host memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate_host(&self, length: usize) -> io::Result<u64> {
        let _playing = self.begin()?;
        let mut address = 0;
        call!(
            self,
            "cuMemHostAlloc",
            (*mut u64, usize, u32),
            &raw mut address,
            length,
            0
        )?;
        Ok(address)
    }

    /// Managed memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate_managed(&self, length: usize) -> io::Result<u64> {
        let _playing = self.begin()?;
        let mut address = 0;
        call!(
            self,
            "cuMemAllocManaged",
            (*mut u64, usize, u32),
            &raw mut address,
            length,
            1
        )?;
        Ok(address)
    }

    /// Frees device or managed memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn free(&self, address: u64) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuMemFree_v2", (u64), address)
    }

    /// Frees page-locked host memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn free_host(&self, address: u64) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuMemFreeHost", (u64), address)
    }

    /// Contiguous addresses of several mappings, as `expandable_segments` makes them: the length of each is a multiple
    /// of 2 MiB. Their physical memory has no other handles, and can be handed to other processes by descriptors.
    ///
    /// # Errors
    /// The driver's.
    pub fn map(&self, lengths: &[usize], gpudirect: bool) -> io::Result<u64> {
        self.map_with(lengths, gpudirect, true)
    }

    /// The same of memory that no other process can be handed.
    ///
    /// # Errors
    /// The driver's.
    pub fn map_private(&self, lengths: &[usize]) -> io::Result<u64> {
        self.map_with(lengths, true, false)
    }

    fn map_with(&self, lengths: &[usize], gpudirect: bool, shareable: bool) -> io::Result<u64> {
        use cudarc::driver::sys::CUmemAllocationHandleType as HandleType;
        let _playing = self.begin()?;
        let whole: usize = lengths.iter().sum();
        let mut start = 0u64;
        call!(
            self,
            "cuMemAddressReserve",
            (*mut u64, usize, usize, u64, u64),
            &raw mut start,
            whole,
            0,
            0,
            0
        )?;
        // SAFETY: all zero is a valid one: its enumerations have a 0, and are set below where they have to be.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = cudarc::driver::sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = cudarc::driver::sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = self.device as i32;
        properties.requestedHandleTypes = match shareable {
            true => HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            false => HandleType::CU_MEM_HANDLE_TYPE_NONE,
        };
        properties.allocFlags.gpuDirectRDMACapable = u8::from(gpudirect);
        let mut next = start;
        for length in lengths {
            let mut handle = 0u64;
            let given = &raw const properties;
            type P = *const CUmemAllocationProp;
            call!(
                self,
                "cuMemCreate",
                (*mut u64, usize, P, u64),
                &raw mut handle,
                *length,
                given,
                0
            )?;
            call!(
                self,
                "cuMemMap",
                (u64, usize, usize, u64, u64),
                next,
                *length,
                0,
                handle,
                0
            )?;
            call!(self, "cuMemRelease", (u64), handle)?;
            next += *length as u64;
        }
        // A device, its number, reading and writing.
        let access = [1u32, self.device, 3];
        call!(
            self,
            "cuMemSetAccess",
            (u64, usize, *const u32, usize),
            start,
            whole,
            access.as_ptr(),
            1
        )?;
        Ok(start)
    }

    /// Undoes [`Engine::map`].
    ///
    /// # Errors
    /// The driver's.
    pub fn unmap(&self, start: u64, lengths: &[usize]) -> io::Result<()> {
        let _playing = self.begin()?;
        let whole: usize = lengths.iter().sum();
        call!(self, "cuMemUnmap", (u64, usize), start, whole)?;
        call!(self, "cuMemAddressFree", (u64, usize), start, whole)
    }

    /// A stream, not ordered with the default one.
    ///
    /// # Errors
    /// The driver's.
    pub fn stream(&self) -> io::Result<usize> {
        let _playing = self.begin()?;
        let mut stream = 0;
        call!(self, "cuStreamCreate", (*mut Handle, u32), &raw mut stream, 1)?;
        Ok(stream)
    }

    /// Destroys a stream; what is queued is still done.
    ///
    /// # Errors
    /// The driver's.
    pub fn destroy_stream(&self, stream: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuStreamDestroy_v2", (Handle), stream)
    }

    /// An event.
    ///
    /// # Errors
    /// The driver's.
    pub fn event(&self) -> io::Result<usize> {
        let _playing = self.begin()?;
        let mut event = 0;
        call!(self, "cuEventCreate", (*mut Handle, u32), &raw mut event, 2)?;
        Ok(event)
    }

    /// Destroys an event.
    ///
    /// # Errors
    /// The driver's.
    pub fn destroy_event(&self, event: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuEventDestroy_v2", (Handle), event)
    }

    /// Records an event behind everything that is in the stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self, event: usize, stream: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuEventRecord", (Handle, Handle), event, stream)
    }

    /// Lets a stream wait for an event.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, stream: usize, event: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuStreamWaitEvent", (Handle, Handle, u32), stream, event, 0)
    }

    /// Fills memory in the stream's order.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill(&self, stream: usize, address: u64, value: u8, length: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(
            self,
            "cuMemsetD8Async",
            (u64, u8, usize, Handle),
            address,
            value,
            length,
            stream
        )
    }

    /// Runs anything in the stream's order, in the place of a kernel: it may read and write device memory with
    /// [`FakeCuda::read`](crate::FakeCuda::read) and [`write`](crate::FakeCuda::write), and calls no function of the
    /// driver.
    ///
    /// # Errors
    /// The driver's.
    pub fn kernel(&self, stream: usize, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        type Boxed = Box<dyn FnOnce() + Send>;
        unsafe extern "C" fn trampoline(data: *mut c_void) {
            // SAFETY: made below of such a box, and handed over once.
            let run = unsafe { Box::from_raw(data.cast::<Boxed>()) };
            run();
        }
        let _playing = self.begin()?;
        let data = Box::into_raw(Box::new(Box::new(run) as Boxed)).cast::<c_void>();
        type Run = unsafe extern "C" fn(*mut c_void);
        let queued = call!(
            self,
            "cuLaunchHostFunc",
            (Handle, Run, *mut c_void),
            stream,
            trampoline,
            data
        );
        if queued.is_err() {
            // SAFETY: nobody was given it.
            drop(unsafe { Box::from_raw(data.cast::<Boxed>()) });
        }
        queued
    }

    /// Waits until everything in the stream is done.
    ///
    /// # Errors
    /// The driver's.
    pub fn finish(&self, stream: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuStreamSynchronize", (Handle), stream)
    }

    /// Begins to capture a graph in the stream, as PyTorch does: no thread may do what breaks it.
    ///
    /// # Errors
    /// The driver's.
    pub fn begin_capture(&self, stream: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        call!(self, "cuStreamBeginCapture_v2", (Handle, u32), stream, 0)
    }

    /// Ends it.
    ///
    /// # Errors
    /// The driver's: that the capture was broken, for one.
    pub fn end_capture(&self, stream: usize) -> io::Result<()> {
        let _playing = self.begin()?;
        let mut graph = 0;
        call!(
            self,
            "cuStreamEndCapture",
            (Handle, *mut Handle),
            stream,
            &raw mut graph
        )?;
        call!(self, "cuGraphDestroy", (Handle), graph)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let before = self.play(true);
        let release = || call!(self, "cuDevicePrimaryCtxRelease_v2", (i32), self.device as i32);
        // Fails only if the driver is gone.
        let _: io::Result<()> = release();
        self.play(before);
    }
}
