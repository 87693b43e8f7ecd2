//! Streams: a queue of work and a thread that does it, for each.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;
use parking_lot::{Condvar, Mutex};

use crate::context::Context;
use crate::driver::{Answer, Driver, driver, host_function};
use crate::event::Signal;
use crate::kernels::{Arguments, Function};
use crate::work;

/// How often a thread that waits looks whether the driver is still there.
pub(crate) const LOOK: Duration = Duration::from_millis(1);

/// One piece of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) length: u64,
}

/// A function of the caller's with what it is called with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostCall {
    pub(crate) run: HostRun,
    pub(crate) data: *mut c_void,
}

/// Its two kinds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HostRun {
    /// cuLaunchHostFunc.
    Plain(unsafe extern "C" fn(*mut c_void)),
    /// cuStreamAddCallback: with the stream's handle.
    Callback(unsafe extern "C" fn(usize, CUresult, *mut c_void), usize),
}

// SAFETY: the caller of the driver hands the pointer over to the stream's thread.
unsafe impl Send for HostCall {}

/// Work of a stream.
#[derive(Debug)]
pub(crate) enum Op {
    /// Copies; in any order if it is a batch.
    Copy { pieces: Arc<Vec<Piece>>, batch: bool },
    /// A copy of host memory that was read when it was asked for.
    Put { bytes: Vec<u8>, to: u64 },
    /// Writes a pattern of `width` bytes again and again.
    Fill {
        to: u64,
        length: u64,
        value: u32,
        width: u64,
    },
    /// Writes a word of 4 or 8 bytes.
    WriteValue { to: u64, value: u64, width: u64 },
    /// Waits until a word compares as the flags say.
    WaitValue {
        from: u64,
        value: u64,
        width: u64,
        flags: u32,
    },
    /// An event's record.
    Record(Arc<Signal>),
    /// Waits for another's record.
    Wait(Arc<Signal>),
    /// Waits until another stream has done so many.
    WaitFor(Arc<Stream>, u64),
    /// A function of the caller's.
    Host(HostCall),
    /// A kernel.
    Launch {
        function: Arc<Function>,
        arguments: Arguments,
    },
    /// Frees memory in the stream's order.
    Free(u64),
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) context: Arc<Context>,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) engine: bool,
    /// The context's default stream, with which all blocking ones are ordered.
    pub(crate) legacy: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The capture that is going on.
    pub(crate) capture: Mutex<Option<Capture>>,
}

#[derive(Debug, Default)]
struct Queue {
    ops: VecDeque<Op>,
    queued: u64,
    done: u64,
    closed: bool,
    running: bool,
}

/// A capture.
#[derive(Debug, Clone)]
pub(crate) struct Capture {
    pub(crate) number: usize,
    pub(crate) mode: u32,
    pub(crate) thread: std::thread::ThreadId,
    pub(crate) invalid: bool,
    /// The stream that it began in.
    pub(crate) origin: bool,
}

/// The flag of streams that are not ordered with the default stream.
pub(crate) const NON_BLOCKING: u32 = 1;

impl Stream {
    /// A new one, idle.
    pub(crate) fn new(handle: usize, context: Arc<Context>, flags: u32, priority: i32, legacy: bool) -> Arc<Stream> {
        Arc::new(Stream {
            handle,
            context,
            flags,
            priority,
            engine: crate::driver::is_engine(),
            legacy,
            queue: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::new(None),
        })
    }

    /// Whether it is ordered with the default stream.
    pub(crate) fn is_blocking(&self) -> bool {
        self.flags & NON_BLOCKING == 0 && !self.legacy
    }

    /// Queues work; its number.
    pub(crate) fn push(self: &Arc<Stream>, op: Op) -> u64 {
        let mut queue = self.queue.lock();
        queue.ops.push_back(op);
        queue.queued += 1;
        let number = queue.queued;
        if !queue.running {
            queue.running = true;
            let own = self.clone();
            let thread = std::thread::Builder::new().name("fake-cuda".to_owned());
            thread
                .spawn(move || own.run())
                .expect("fake-cuda: the system makes no thread for a stream");
        }
        drop(queue);
        self.changed.notify_all();
        number
    }

    /// How many were queued, and how many are done.
    pub(crate) fn progress(&self) -> (u64, u64) {
        let queue = self.queue.lock();
        (queue.queued, queue.done)
    }

    /// Waits until everything that is queued now is done, or the driver vanishes.
    pub(crate) fn finish(&self) {
        let target = self.progress().0;
        while !self.wait_done(target) {
            if driver().vanished().is_some() {
                return;
            }
            driver().refresh();
        }
    }

    /// The same, at most that long.
    pub(crate) fn finish_within(&self, limit: Duration) {
        let (target, end) = (self.progress().0, Instant::now() + limit);
        while !self.wait_done(target) && Instant::now() < end {
            driver().refresh();
        }
    }

    /// Waits a moment for that many; whether they are done.
    pub(crate) fn wait_done(&self, target: u64) -> bool {
        let mut queue = self.queue.lock();
        if queue.done < target {
            self.changed.wait_for(&mut queue, LOOK);
        }
        queue.done >= target
    }

    /// No more work comes; its thread ends when it has done what is queued.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    fn run(self: Arc<Stream>) {
        let driver = driver();
        while let Some(op) = self.next() {
            driver.refresh();
            self.execute(driver, op);
            self.queue.lock().done += 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Op> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(op) = queue.ops.pop_front() {
                return Some(op);
            }
            if queue.closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn execute(&self, driver: &'static Driver, op: Op) {
        match op {
            Op::Record(signal) => signal.happen(self.context.sound().err()),
            Op::Wait(signal) => wait_until(driver, || signal.wait(LOOK)),
            Op::WaitFor(other, target) => wait_until(driver, || other.wait_done(target)),
            Op::Host(call) => {
                // To the engine it stands for a kernel.
                if self.engine {
                    work::pace(driver, self, &Op::Host(call));
                }
                host_function(|| call.run());
            }
            Op::WaitValue { .. } => self.outcome(work::wait_value(driver, self, &op)),
            other => {
                work::pace(driver, self, &other);
                let in_use = match &other {
                    Op::Copy { pieces, .. } => Some(pieces.clone()),
                    _ => None,
                };
                // Work behind a failed one is not done.
                if self.context.sound().is_ok() {
                    self.outcome(work::perform(driver, self, other));
                }
                if let Some(pieces) = in_use {
                    driver
                        .world
                        .lock()
                        .in_flight
                        .retain(|flight| !Arc::ptr_eq(&flight.pieces, &pieces));
                }
            }
        }
    }

    fn outcome(&self, answer: Answer) {
        if let Err(code) = answer {
            self.context.fail(code);
        }
    }
}

impl HostCall {
    fn run(self) {
        match self.run {
            // SAFETY: the caller of the driver said that this may be called with that, once.
            HostRun::Plain(function) => unsafe { function(self.data) },
            // SAFETY: as above.
            HostRun::Callback(function, stream) => unsafe { function(stream, CUresult::CUDA_SUCCESS, self.data) },
        }
    }
}

/// Waits for ever if the driver vanishes: what was queued is never done.
pub(crate) fn wait_until(driver: &Driver, mut done: impl FnMut() -> bool) {
    loop {
        if driver.vanished().is_none() && done() {
            return;
        }
        if driver.vanished().is_some() {
            std::thread::sleep(LOOK);
        }
        driver.refresh();
    }
}
