//! Events of the engine's: captured as they are now, and watched without waiting for them in the driver.

use std::ffi::c_void;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUstream};
use kvxfer_core::transport::Counter;
use kvxfer_core::{ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::context::Primary;
use crate::driver::{Code, Driver, Refused};
use crate::error::CudaError;

/// Captured events of one device that have not been dropped.
const CAPTURED_MAX: usize = 4096;
/// Streams that wait for captured events, per device. Each waits for its events in order, so that events of different
/// engine streams should have different ones; but the device's queues are few, and a stream that waits occupies one.
const STREAMS_MAX: usize = 4;
/// Watched events are asked for after this long, then after twice as long, up to the second value; from the start again
/// when one has happened or is new.
const LOOK_AFTER: Duration = Duration::from_micros(20);
const LOOK_EVERY_MAX: Duration = Duration::from_millis(1);
/// `CU_STREAM_NON_BLOCKING`, `CU_EVENT_DISABLE_TIMING`.
const NON_BLOCKING: u32 = 1;
const NO_TIMING: u32 = 2;

/// What captures a device's events: streams of our own, which wait for the caller's, and events of our own behind them.
#[derive(Debug)]
pub(crate) struct Captures {
    primary: Arc<Primary>,
    device: String,
    pool: Mutex<Pool>,
    captured: AtomicU64,
}

#[derive(Debug, Default)]
struct Pool {
    streams: Vec<Waiting>,
    events: Vec<CUevent>,
    in_use: usize,
}

#[derive(Debug)]
struct Waiting {
    stream: CUstream,
    /// Captured events that wait in it.
    events: usize,
}

// SAFETY: handles that the driver allows on any thread.
unsafe impl Send for Pool {}

/// An event as it was when it was captured. Nothing of the caller's is kept: he may record or destroy his.
pub struct CapturedEvent {
    captures: Arc<Captures>,
    /// Ours, and the stream that it is in; `None`: his had happened.
    event: Option<(CUevent, usize)>,
}

// SAFETY: a handle that the driver allows on any thread.
unsafe impl Send for CapturedEvent {}
// SAFETY: as above; it is only asked.
unsafe impl Sync for CapturedEvent {}

impl Captures {
    pub(crate) fn new(primary: &Arc<Primary>, device: &str) -> Arc<Captures> {
        Arc::new(Captures {
            primary: Arc::clone(primary),
            device: device.to_owned(),
            pool: Mutex::default(),
            captured: AtomicU64::new(0),
        })
    }

    /// Captures an event of any context.
    ///
    /// # Safety
    /// A live `CUevent`.
    pub(crate) unsafe fn capture(
        self: &Arc<Captures>,
        event: CUevent,
    ) -> std::result::Result<CapturedEvent, CudaError> {
        let failed = |refused: Refused| self.unfit(refused);
        let driver = self.primary.driver();
        let _current = self.primary.enter().map_err(failed)?;
        // SAFETY: the caller vouches for the event.
        let event = match unsafe { driver.event_query(event) } {
            Ok(()) => None,
            Err(refused) if refused.code == Code::NOT_READY => {
                // SAFETY: as above.
                Some(unsafe { self.wait_for(driver, event) }?)
            }
            Err(refused) => return Err(failed(refused)),
        };
        self.captured.fetch_add(1, Ordering::Relaxed);
        Ok(CapturedEvent {
            captures: Arc::clone(self),
            event,
        })
    }

    /// Lets a stream of ours wait for the event, and records our own behind the wait.
    ///
    /// # Safety
    /// A live `CUevent`.
    unsafe fn wait_for(&self, driver: &Driver, event: CUevent) -> std::result::Result<(CUevent, usize), CudaError> {
        let failed = |refused: Refused| self.unfit(refused);
        let mut pool = self.pool.lock();
        if pool.in_use >= CAPTURED_MAX {
            return Err(CudaError::Limit {
                what: "captured events",
                limit: CAPTURED_MAX,
            });
        }
        let index = pool.stream(driver).map_err(failed)?;
        let stream = pool.streams[index].stream;
        let own = pool.event(driver).map_err(failed)?;
        // SAFETY: both are live; a stream may wait for an event of another context.
        let waited = unsafe { driver.stream_wait_event(stream, event, 0) };
        // SAFETY: both are ours and live.
        let recorded = waited.and_then(|()| unsafe { driver.event_record(own, stream) });
        if let Err(refused) = recorded {
            pool.events.push(own);
            return Err(failed(refused));
        }
        pool.streams[index].events += 1;
        pool.in_use += 1;
        Ok((own, index))
    }

    fn unfit(&self, refused: Refused) -> CudaError {
        if refused.code.is_capture() {
            return CudaError::Unfit {
                kind: ErrorKind::InvalidArgument,
                what: "a CUDA event that is recorded in a stream capture".into(),
                why: refused.to_string(),
                remedy: "pass it outside of the capture, recorded when the graph is launched: what is captured has not happened",
            };
        }
        CudaError::call(refused, self.device.clone())
    }

    pub(crate) fn report(&self, device: &str, out: &mut Vec<Counter>) {
        let counter = |name, value| Counter {
            name,
            labels: vec![("device", device.to_owned())],
            value,
        };
        let captured = self.captured.load(Ordering::Relaxed) as f64;
        out.push(counter("cuda_events_captured_total", captured));
        out.push(counter("cuda_events_waiting", self.pool.lock().in_use as f64));
    }
}

impl Pool {
    /// The stream with the fewest events, or a new one.
    fn stream(&mut self, driver: &Driver) -> std::result::Result<usize, Refused> {
        let idlest = (0..self.streams.len()).min_by_key(|index| self.streams[*index].events);
        match idlest {
            Some(index) if self.streams[index].events == 0 || self.streams.len() >= STREAMS_MAX => Ok(index),
            _ => {
                let mut stream = std::ptr::null_mut();
                // SAFETY: writes one handle.
                unsafe { driver.stream_create(&mut stream, NON_BLOCKING) }?;
                self.streams.push(Waiting { stream, events: 0 });
                Ok(self.streams.len() - 1)
            }
        }
    }

    fn event(&mut self, driver: &Driver) -> std::result::Result<CUevent, Refused> {
        if let Some(event) = self.events.pop() {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { driver.event_create(&mut event, NO_TIMING) }?;
        Ok(event)
    }
}

impl Drop for Captures {
    fn drop(&mut self) {
        let pool = self.pool.get_mut();
        if pool.streams.is_empty() && pool.events.is_empty() {
            return;
        }
        let driver = self.primary.driver();
        let Ok(_current) = self.primary.enter_to_give_back() else {
            return;
        };
        let streams = pool.streams.drain(..).map(|waiting| {
            // SAFETY: made by `Pool::stream`, destroyed once; a wait in it ends by itself.
            unsafe { driver.stream_destroy(waiting.stream) }
        });
        let events = pool.events.drain(..).map(|event| {
            // SAFETY: made by `Pool::event`, destroyed once; every captured event gave its own back, since it holds `self`.
            unsafe { driver.event_destroy(event) }
        });
        for refused in streams.chain(events).filter_map(std::result::Result::err) {
            tracing::warn!(%refused, device = self.device, "a stream or event was not destroyed");
        }
    }
}

impl CapturedEvent {
    /// Whether the event has happened.
    ///
    /// # Errors
    /// The device's, or the failure of what came before the event.
    pub fn happened(&self) -> Result<bool> {
        if self.event.is_none() {
            return Ok(true);
        }
        let failed = |refused| CudaError::call(refused, self.captures.device.clone());
        let _current = self.captures.primary.enter().map_err(failed)?;
        Ok(self.ask().map_err(failed)?)
    }

    /// The same while the context is current.
    fn ask(&self) -> std::result::Result<bool, Refused> {
        let Some((event, _)) = self.event else {
            return Ok(true);
        };
        // SAFETY: the event is ours, and live until it is given back.
        match unsafe { self.captures.primary.driver().event_query(event) } {
            Ok(()) => Ok(true),
            Err(refused) if refused.code == Code::NOT_READY => Ok(false),
            Err(refused) => Err(refused),
        }
    }
}

impl Drop for CapturedEvent {
    fn drop(&mut self) {
        if let Some((event, index)) = self.event {
            let mut pool = self.captures.pool.lock();
            // It may not have happened: it is recorded anew when it is used again.
            pool.events.push(event);
            pool.streams[index].events -= 1;
            pool.in_use -= 1;
        }
    }
}

impl fmt::Debug for CapturedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.event.is_none() { "happened" } else { "captured" };
        write!(f, "CapturedEvent({state}, {})", self.captures.device)
    }
}

/// What is called when an event has happened or failed.
pub(crate) type Then = Box<dyn FnOnce(Result<()>) + Send>;

/// The thread that asks for events; it starts with the first.
#[derive(Default)]
pub(crate) struct Watcher {
    shared: Arc<WatchShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct WatchShared {
    state: Mutex<WatchState>,
    wake: Condvar,
}

#[derive(Default)]
struct WatchState {
    new: Vec<Watched>,
    ending: bool,
}

struct Watched {
    event: CapturedEvent,
    then: Then,
}

const THREAD: &str = "kvx-cuda";

impl Watcher {
    pub(crate) fn watch(&self, event: CapturedEvent, then: Then) {
        if let Err(error) = self.start() {
            then(Err(error.into()));
            return;
        }
        self.shared.state.lock().new.push(Watched { event, then });
        self.shared.wake.notify_one();
    }

    fn start(&self) -> std::result::Result<(), CudaError> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new()
                .name(THREAD.into())
                .spawn(move || run(&shared));
            *thread = Some(started.map_err(|error| CudaError::Thread {
                name: THREAD.into(),
                why: error.to_string(),
            })?);
        }
        Ok(())
    }
}

impl Drop for Watcher {
    /// Ends the thread. What it still watches is told that it will not be.
    fn drop(&mut self) {
        self.shared.state.lock().ending = true;
        self.shared.wake.notify_one();
        let Some(thread) = self.thread.get_mut().take() else {
            return;
        };
        // Dropped by what an event called: the thread ends when that returns.
        if thread.thread().id() != std::thread::current().id() {
            // It catches what its callers' code panics with.
            let _ = thread.join();
        }
    }
}

fn run(shared: &WatchShared) {
    let mut watched: Vec<Watched> = Vec::new();
    let mut pause = LOOK_AFTER;
    loop {
        {
            let mut state = shared.state.lock();
            while state.new.is_empty() && !state.ending {
                if watched.is_empty() {
                    shared.wake.wait(&mut state);
                } else if shared.wake.wait_for(&mut state, pause).timed_out() {
                    break;
                }
            }
            if !state.new.is_empty() {
                pause = LOOK_AFTER;
                watched.append(&mut state.new);
            }
            if state.ending {
                drop(state);
                for Watched { event, then } in watched {
                    drop(event);
                    call(then, Err(CudaError::Closed.into()));
                }
                return;
            }
        }
        let over = look(&mut watched);
        pause = if over.is_empty() {
            (pause * 2).min(LOOK_EVERY_MAX)
        } else {
            LOOK_AFTER
        };
        for (then, result) in over {
            call(then, result);
        }
    }
}

/// Asks for every event, and takes out those that have happened or failed.
fn look(watched: &mut Vec<Watched>) -> Vec<(Then, Result<()>)> {
    let mut answers: Vec<Option<Result<()>>> = watched.iter().map(|_| None).collect();
    let mut asked = vec![false; watched.len()];
    while let Some(first) = asked.iter().position(|asked| !asked) {
        let captures = Arc::clone(&watched[first].event.captures);
        let current = captures.primary.enter();
        // In one stream they happen in order.
        let mut not_yet = [false; STREAMS_MAX];
        for (index, Watched { event, .. }) in watched.iter().enumerate() {
            if !Arc::ptr_eq(&event.captures, &captures) {
                continue;
            }
            asked[index] = true;
            let stream = event.event.map(|(_, stream)| stream);
            if stream.is_some_and(|stream| not_yet[stream]) {
                continue;
            }
            let answer = match &current {
                Ok(_) => event.ask(),
                Err(refused) => Err(*refused),
            };
            match answer {
                Ok(true) => answers[index] = Some(Ok(())),
                Ok(false) => stream.into_iter().for_each(|stream| not_yet[stream] = true),
                Err(refused) => answers[index] = Some(Err(CudaError::call(refused, captures.device.clone()).into())),
            }
        }
    }
    let mut over = Vec::new();
    for index in (0..watched.len()).rev() {
        if let Some(answer) = answers[index].take() {
            over.push((watched.remove(index).then, answer));
        }
    }
    // As they were given.
    over.reverse();
    over
}

fn call(then: Then, result: Result<()>) {
    if std::panic::catch_unwind(AssertUnwindSafe(|| then(result))).is_err() {
        tracing::error!("what was to be done after a CUDA event panicked");
    }
}

/// The caller's event, as the driver has it.
pub(crate) fn handle(event: *mut c_void) -> CUevent {
    event.cast()
}
