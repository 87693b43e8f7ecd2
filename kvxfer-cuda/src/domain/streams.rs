//! The streams of a device's copies, and how work is handed to them in few calls.
//!
//! Everything of a stream's is numbered: behind each hand-over its number is written to a word in page-locked memory, by
//! our kernel, or behind copies by the stream, so that whoever waits for it reads a word and calls nothing.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUevent, CUfunction, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUmodule,
    CUstream,
};

use super::counters::CopyCounters;
use super::gate::{self, BATCH_COPIES_MAX, Can, Shape, TABLE_PIECES, Way};
use super::job::{Direction, Job, Piece};
use super::pinned::{PinnedBlock, PinnedBytes};
use super::progress::{BEFORE_FIRST, Progress};
use crate::config::Gather;
use crate::context::Primary;
use crate::driver::{Code, Driver, Refused};
use crate::kernels;

/// Hand-overs that a stream is given before the first of them has ended: enough that it never runs dry, and few enough
/// that what comes meanwhile goes in one.
pub(super) const IN_FLIGHT_MAX: usize = 2;
/// One table can be filled while the others are read.
const TABLES: usize = IN_FLIGHT_MAX + 1;
/// `CU_STREAM_NON_BLOCKING`, `CU_EVENT_DISABLE_TIMING`.
const NON_BLOCKING: u32 = 1;
const NO_TIMING: u32 = 2;
/// Threads of a kernel's block, and the most blocks: few enough to leave the device to the engine, and enough for PCIe.
const BLOCK_THREADS: u32 = 512;
const BLOCKS_MAX: u32 = 32;

/// A piece as the kernels read it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct KernelPiece {
    device: u64,
    /// From the staging address that the kernel is given: the lowest of all that it serves.
    offset: u64,
    length: u64,
}

/// What tells that a hand-over has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// Its number in the word.
    Word,
    /// An event, since the stream cannot write the word.
    Event(usize),
    /// That the whole stream is done, since not even an event could be recorded.
    Stream,
}

/// How one job was handed over.
#[derive(Debug)]
pub(super) struct HandedOver {
    pub(super) ticket: u64,
    /// The number behind it.
    pub(super) sequence: u64,
    /// What the driver refused of it. Some of it may be under way: it has ended when the number is reached.
    pub(super) refused: Option<Refused>,
    /// Its list, to be used again.
    pub(super) pieces: Vec<Piece>,
}

/// What both directions share.
#[derive(Debug)]
pub(super) struct Streams {
    // In the order in which they go: streams before what their work reads.
    ways: [OneWay; 2],
    kernels: Option<Kernels>,
    /// The driver takes many copies in one call.
    batch: bool,
    /// The stream can write the word.
    word: bool,
    choice: Gather,
    events: Vec<CUevent>,
    scratch: Scratch,
    primary: Arc<Primary>,
    /// Why something is done in another way than the best.
    pub(super) notes: Vec<String>,
}

// SAFETY: handles that the driver allows on any thread; used by the one thread that owns the value.
unsafe impl Send for Streams {}

/// One direction.
#[derive(Debug)]
struct OneWay {
    stream: CUstream,
    /// The number of the last hand-over.
    sequence: u64,
    tables: VecDeque<Table>,
}

#[derive(Debug)]
struct Table {
    block: PinnedBlock,
    /// The number behind the last kernel that reads it.
    sequence: Option<u64>,
}

#[derive(Debug)]
struct Kernels {
    module: CUmodule,
    gather: CUfunction,
    scatter: CUfunction,
}

/// Lists for the driver's batched copies, kept so as not to be allocated.
#[derive(Debug, Default)]
struct Scratch {
    to: Vec<u64>,
    from: Vec<u64>,
    sizes: Vec<usize>,
}

impl Streams {
    /// Makes streams and loads kernels. The context is current, as it stays on this thread.
    pub(super) fn new(primary: &Arc<Primary>, choice: Gather, pinned: &PinnedBytes) -> Result<Streams, Refused> {
        let driver = primary.driver();
        let mut streams = Streams {
            ways: [
                OneWay::new(driver)?,
                // The first is destroyed if the second cannot be made: see below.
                OneWay {
                    stream: std::ptr::null_mut(),
                    sequence: BEFORE_FIRST,
                    tables: VecDeque::new(),
                },
            ],
            kernels: None,
            batch: true,
            word: true,
            choice,
            events: Vec::new(),
            scratch: Scratch::default(),
            primary: Arc::clone(primary),
            notes: Vec::new(),
        };
        streams.ways[1] = OneWay::new(driver)?;
        if matches!(choice, Gather::Auto | Gather::Kernel) {
            match streams.load_kernels(pinned) {
                Ok(()) => {}
                Err(refused) => streams.without_kernels(refused),
            }
        }
        Ok(streams)
    }

    fn load_kernels(&mut self, pinned: &PinnedBytes) -> Result<(), Refused> {
        for way in &mut self.ways {
            way.tables.clear();
            for _ in 0..TABLES {
                let bytes = TABLE_PIECES * size_of::<KernelPiece>();
                let block = PinnedBlock::allocate(&self.primary, bytes, pinned)?;
                way.tables.push_back(Table { block, sequence: None });
            }
        }
        self.kernels = Some(Kernels::load(self.primary.driver())?);
        Ok(())
    }

    fn without_kernels(&mut self, refused: Refused) {
        tracing::info!(%refused, "no copy kernels: the driver's copies are used");
        self.notes.push(format!("no copy kernels: {refused}"));
        if let Some(kernels) = self.kernels.take() {
            kernels.unload(self.primary.driver());
        }
    }

    /// Hands jobs of one direction to its stream. What does not fit this time is put back.
    ///
    /// Returns the number behind everything, and what tells that it is reached.
    pub(super) fn hand_over(
        &mut self,
        direction: Direction,
        jobs: &mut Vec<Job>,
        progress: &Progress,
        counters: &CopyCounters,
        handed: &mut Vec<HandedOver>,
    ) -> (u64, Mark) {
        let mut fit = Shape::default();
        let (mut small, mut large, mut later) = (Vec::new(), Vec::new(), Vec::new());
        for job in jobs.drain(..) {
            if !(job.device_offset.is_some() && gate::fits_kernel(job.shape, self.choice)) {
                large.push(job);
            } else if fit.pieces + job.shape.pieces <= TABLE_PIECES {
                fit = fit.and(job.shape);
                small.push(job);
            } else {
                later.push(job);
            }
        }
        *jobs = later;
        let can = Can {
            kernel: self.kernels.is_some(),
            batch: self.batch,
        };
        let mut mark = None;
        if !small.is_empty() && gate::choose(fit, true, can, self.choice) == Way::Kernel {
            match self.launch(direction, &small, progress) {
                Ok(sequence) => {
                    counters.count(direction, Way::Kernel, 1, fit.bytes);
                    handed.extend(small.drain(..).map(|job| HandedOver {
                        ticket: job.ticket,
                        sequence,
                        refused: None,
                        pieces: job.pieces,
                    }));
                    mark = Some((sequence, Mark::Word));
                }
                Err(refused) => self.without_kernels(refused),
            }
        }
        large.append(&mut small);
        if !large.is_empty() {
            mark = Some(self.copies(direction, large, counters, progress, handed));
        }
        mark.unwrap_or((self.ways[direction as usize].sequence, Mark::Word))
    }

    /// Starts one kernel for all the jobs, which fit a table. Returns its number.
    fn launch(&mut self, direction: Direction, jobs: &[Job], progress: &Progress) -> Result<u64, Refused> {
        let driver = self.primary.driver();
        let absent = Refused {
            call: "cuLaunchKernel",
            code: Code::NOT_FOUND,
        };
        let kernels = self.kernels.as_ref().ok_or(absent)?;
        let function = match direction {
            Direction::Out => kernels.gather,
            Direction::In => kernels.scatter,
        };
        let way = &mut self.ways[direction as usize];
        // At most `IN_FLIGHT_MAX` hand-overs are under way, so the oldest table has been read.
        let mut table = way.tables.pop_front().ok_or(absent)?;
        if table
            .sequence
            .is_some_and(|sequence| !progress.reached(direction, sequence))
        {
            way.tables.push_front(table);
            return Err(absent);
        }
        let base = jobs.iter().map(Job::staging_on_device).min().unwrap_or(0);
        let count = table.fill(jobs, base);
        let sequence = way.sequence + 1;
        let mut pieces = table.block.device();
        let mut count_argument = count as u32;
        let mut staging = base;
        let mut done = progress.device_word(direction);
        let mut value = sequence as u32;
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut pieces).cast(),
            (&raw mut count_argument).cast(),
            (&raw mut staging).cast(),
            (&raw mut done).cast(),
            (&raw mut value).cast(),
        ];
        let blocks = BLOCKS_MAX.min(count as u32).max(1);
        // SAFETY: the function takes these five parameters, which are copied during the call. The table stays as it is
        // until the number is reached (`tables`), the pieces and the staging by the contract of the domain's copies.
        let launched = unsafe {
            driver.launch(
                function,
                blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                way.stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if launched.is_ok() {
            way.sequence = sequence;
            table.sequence = Some(sequence);
        }
        way.tables.push_back(table);
        launched.map(|()| sequence)
    }

    /// Queues copies for all the jobs, and behind them the next number.
    fn copies(
        &mut self,
        direction: Direction,
        jobs: Vec<Job>,
        counters: &CopyCounters,
        progress: &Progress,
        handed: &mut Vec<HandedOver>,
    ) -> (u64, Mark) {
        let sequence = self.ways[direction as usize].sequence + 1;
        self.ways[direction as usize].sequence = sequence;
        let all = jobs.iter().fold(Shape::default(), |sum, job| sum.and(job.shape));
        let batched = self.choose(all) == Way::Batch && jobs.len() > 1 && {
            let pieces = jobs.iter().flat_map(|job| &job.pieces);
            self.batch(direction, pieces.copied(), counters).is_ok()
        };
        for job in jobs {
            // A job that others were refused with may be fit by itself. Copying some of it twice does no harm.
            let result = match batched {
                true => Ok(()),
                false => self.copy_one(direction, &job, counters),
            };
            handed.push(HandedOver {
                ticket: job.ticket,
                sequence,
                refused: result.err(),
                pieces: job.pieces,
            });
        }
        (sequence, self.mark(direction, sequence, progress))
    }

    fn choose(&self, shape: Shape) -> Way {
        let can = Can {
            kernel: false,
            batch: self.batch,
        };
        gate::choose(shape, false, can, self.choice)
    }

    fn copy_one(&mut self, direction: Direction, job: &Job, counters: &CopyCounters) -> Result<(), Refused> {
        if self.choose(job.shape) == Way::Batch {
            match self.batch(direction, job.pieces.iter().copied(), counters) {
                Err(refused) if self.batch => return Err(refused),
                Err(_) => {}
                Ok(()) => return Ok(()),
            }
        }
        let stream = self.ways[direction as usize].stream;
        for piece in &job.pieces {
            let (to, from) = piece.ends(direction);
            // SAFETY: both ends live and stay as they are until the copy has ended, by the contract of the domain's copies.
            unsafe { self.primary.driver().copy(to, from, piece.length as usize, stream) }?;
        }
        let way = match job.pieces.len() {
            0 | 1 => Way::Single,
            _ => Way::Loop,
        };
        counters.count(direction, way, job.pieces.len() as u64, job.shape.bytes);
        Ok(())
    }

    /// Queues copies, many in one call. A driver that has no such call, or does not do it, is not asked again.
    fn batch(
        &mut self,
        direction: Direction,
        pieces: impl Iterator<Item = Piece>,
        counters: &CopyCounters,
    ) -> Result<(), Refused> {
        let mut pieces = pieces.peekable();
        while pieces.peek().is_some() {
            self.scratch.clear();
            let mut bytes = 0;
            for piece in pieces.by_ref().take(BATCH_COPIES_MAX) {
                let (to, from) = piece.ends(direction);
                self.scratch.to.push(to);
                self.scratch.from.push(from);
                self.scratch.sizes.push(piece.length as usize);
                bytes += piece.length;
            }
            let stream = self.ways[direction as usize].stream;
            // SAFETY: as of the single copies.
            match unsafe { self.scratch.copy(self.primary.driver(), stream) } {
                Ok(()) => counters.count(direction, Way::Batch, 1, bytes),
                Err(refused) => {
                    if matches!(refused.code, Code::ABSENT | Code::NOT_SUPPORTED | Code::NOT_FOUND) {
                        self.batch = false;
                        self.notes.push(format!("no batched copies: {refused}"));
                    }
                    return Err(refused);
                }
            }
        }
        Ok(())
    }

    /// Lets the stream count a number behind what it was given.
    fn mark(&mut self, direction: Direction, sequence: u64, progress: &Progress) -> Mark {
        let driver = self.primary.driver();
        let stream = self.ways[direction as usize].stream;
        if self.word {
            let word = progress.device_word(direction);
            // SAFETY: the word is page-locked memory that lives as long as the stream. Without a flag the write comes
            // behind a fence for the whole system: who sees it sees what the copies wrote.
            match unsafe { driver.stream_write_value(stream, word, sequence as u32, 0) } {
                Ok(()) => return Mark::Word,
                Err(refused) => {
                    self.word = false;
                    self.notes.push(format!("copies are waited for by events: {refused}"));
                }
            }
        }
        match self.record(stream) {
            Ok(event) => Mark::Event(event as usize),
            Err(_) => Mark::Stream,
        }
    }

    fn record(&mut self, stream: CUstream) -> Result<CUevent, Refused> {
        let driver = self.primary.driver();
        let event = match self.events.pop() {
            Some(event) => event,
            None => {
                let mut event = std::ptr::null_mut();
                // SAFETY: writes one handle.
                unsafe { driver.event_create(&mut event, NO_TIMING) }?;
                event
            }
        };
        // SAFETY: both are live and of this context.
        let recorded = unsafe { driver.event_record(event, stream) };
        if recorded.is_err() {
            self.events.push(event);
        }
        recorded.map(|()| event)
    }

    /// Asks the driver whether a hand-over has ended: for its errors, and where there is no word. `Ok(true)` of a whole
    /// stream means that everything that it was given has.
    pub(super) fn ended(&mut self, direction: Direction, mark: Mark) -> Result<bool, Refused> {
        let driver = self.primary.driver();
        let asked = match mark {
            // SAFETY: the event is live: it goes back to `events` only below.
            Mark::Event(event) => unsafe { driver.event_query(event as CUevent) },
            // SAFETY: the stream is live.
            Mark::Word | Mark::Stream => unsafe { driver.stream_query(self.ways[direction as usize].stream) },
        };
        match asked {
            Ok(()) => Ok(true),
            Err(refused) if refused.code == Code::NOT_READY => Ok(false),
            Err(refused) => Err(refused),
        }
    }

    /// Takes back what a hand-over that has ended was marked with.
    pub(super) fn unmark(&mut self, mark: Mark) {
        if let Mark::Event(event) = mark {
            self.events.push(event as CUevent);
        }
    }

    /// Never frees what the device may still use.
    pub(super) fn keep_memory(&self) {
        let tables = self.ways.iter().flat_map(|way| &way.tables);
        tables.for_each(|table| table.block.keep());
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        let driver = self.primary.driver();
        for way in &mut self.ways {
            if !way.stream.is_null() {
                // SAFETY: made by `OneWay::new`, destroyed once. What is under way in it goes on and then it goes.
                report("a stream", unsafe { driver.stream_destroy(way.stream) });
            }
        }
        for event in self.events.drain(..) {
            // SAFETY: made by `record`, destroyed once.
            report("an event", unsafe { driver.event_destroy(event) });
        }
        if let Some(kernels) = self.kernels.take() {
            kernels.unload(driver);
        }
    }
}

fn report(what: &str, result: Result<(), Refused>) {
    if let Err(refused) = result {
        tracing::warn!(%refused, "{what} was not destroyed");
    }
}

impl OneWay {
    fn new(driver: &Driver) -> Result<OneWay, Refused> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes one handle. Not blocking: the engine's legacy stream and ours do not wait for each other.
        unsafe { driver.stream_create(&mut stream, NON_BLOCKING) }?;
        Ok(OneWay {
            stream,
            sequence: BEFORE_FIRST,
            tables: VecDeque::new(),
        })
    }
}

impl Table {
    /// Writes the jobs' pieces, which fit. Returns how many they are.
    fn fill(&mut self, jobs: &[Job], base: u64) -> usize {
        let room = self.block.length() / size_of::<KernelPiece>();
        // SAFETY: the block is `room` pieces long and aligned to pages; the device reads it only between a launch and the
        // number behind it, and the caller saw that number; `MaybeUninit` since what is there does not matter.
        let table =
            unsafe { std::slice::from_raw_parts_mut(self.block.host().cast::<MaybeUninit<KernelPiece>>(), room) };
        let mut places = table.iter_mut();
        let mut count = 0;
        for job in jobs {
            // Wraps, but together with the address does not: the base is the lowest of all.
            let to_offset = job.device_offset.unwrap_or(0).wrapping_sub(base);
            for (piece, place) in job.pieces.iter().zip(&mut places) {
                place.write(KernelPiece {
                    device: piece.device,
                    offset: piece.staging.wrapping_add(to_offset),
                    length: piece.length,
                });
                count += 1;
            }
        }
        count
    }
}

impl Kernels {
    fn load(driver: &Driver) -> Result<Kernels, Refused> {
        let image = kernels::image().ok_or(Refused {
            call: "cuModuleLoadData",
            code: Code::NOT_FOUND,
        })?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is text that ends in a nul byte.
        unsafe { driver.module_load(&mut module, image.as_ptr().cast()) }?;
        let function = |name: &std::ffi::CStr| {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module was just loaded; the name ends in a nul byte.
            unsafe { driver.module_function(&mut function, module, name.as_ptr()) }.map(|()| function)
        };
        let mut kernels = Kernels {
            module,
            gather: std::ptr::null_mut(),
            scatter: std::ptr::null_mut(),
        };
        match (function(kernels::GATHER), function(kernels::SCATTER)) {
            (Ok(gather), Ok(scatter)) => {
                kernels.gather = gather;
                kernels.scatter = scatter;
                Ok(kernels)
            }
            (Err(refused), _) | (_, Err(refused)) => {
                kernels.unload(driver);
                Err(refused)
            }
        }
    }

    fn unload(self, driver: &Driver) {
        // SAFETY: loaded by `load`, unloaded once; the driver lets kernels that are under way end first.
        report("a module", unsafe { driver.module_unload(self.module) });
    }
}

impl Scratch {
    fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.sizes.clear();
    }

    /// Queues the copies.
    ///
    /// # Safety
    /// Both ends of each live and stay as they are until it has ended.
    unsafe fn copy(&mut self, driver: &Driver, stream: CUstream) -> Result<(), Refused> {
        let nowhere = CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0usize, usize::MAX);
        // SAFETY: the three lists are equally long; one set of attributes holds from the first copy on; all are read
        // during the call. The rest is the caller's contract.
        unsafe {
            driver.copy_batch(
                self.to.as_mut_ptr(),
                self.from.as_mut_ptr(),
                self.sizes.as_mut_ptr(),
                self.to.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                stream,
            )
        }
    }
}
