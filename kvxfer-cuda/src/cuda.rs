//! The driver, ready for use: what the runtime and the transports hold.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::Counter;
use kvxfer_core::{ErrorKind, Result};
use parking_lot::Mutex;

use crate::config::CudaConfig;
use crate::context::{Primary, Relaxed};
use crate::domain::Domain;
use crate::domain::pinned::Pins;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::event::{self, CapturedEvent, Captures, Then, Watcher};
use crate::hold::{self, Holds, StreamHold};
use crate::pointer::{self, Pointer};
use crate::probe::{self, DeviceFacts, Facts};
use crate::share::Share;

/// The CUDA driver, loaded. Clones are the same one.
///
/// Nothing is made on a device before memory of it is registered (or an event of it captured, a stream of it held). Two of
/// these in one process know nothing of each other.
#[derive(Clone)]
pub struct Cuda {
    inner: Arc<Inner>,
}

struct Inner {
    // The first to go: what it watches may be of any device.
    watcher: Watcher,
    /// By ordinal. Regions keep theirs longer.
    domains: Mutex<BTreeMap<i32, Arc<Domain>>>,
    holds: Mutex<Option<Arc<Holds>>>,
    pins: Arc<Pins>,
    /// What goes from endpoint to endpoint on one host, if it may.
    share: Option<Arc<Share>>,
    config: CudaConfig,
    facts: Facts,
    driver: Arc<Driver>,
}

impl Cuda {
    /// Loads the driver.
    ///
    /// # Errors
    /// `Unsupported` with the reason that [`probe`](crate::probe()) gives: no library, one that lacks functions or is too
    /// old, no device. What the driver fails with.
    pub fn load(config: &CudaConfig) -> Result<Cuda> {
        let driver = Arc::new(Driver::load(&config.library)?);
        let facts = probe::facts(&driver)?;
        Ok(Cuda {
            inner: Arc::new(Inner {
                watcher: Watcher::default(),
                domains: Mutex::default(),
                holds: Mutex::default(),
                pins: Arc::default(),
                share: config.share.then(|| Share::new(&facts.devices)),
                config: config.clone(),
                facts,
                driver,
            }),
        })
    }

    /// What the driver says of itself and its devices.
    pub fn facts(&self) -> &Facts {
        &self.inner.facts
    }

    /// What an address is.
    ///
    /// # Errors
    /// The driver's. An address that it does not know is [`Host`](crate::PointerKind::Host).
    pub fn classify(&self, address: u64) -> Result<Pointer> {
        Ok(pointer::classify(
            &self.inner.driver,
            &self.inner.facts.devices,
            address,
        )?)
    }

    /// A region of device memory, `length` bytes at `address`. It is dropped by dropping what is returned, and
    /// `keepalive` with it.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not memory of a device of this process, allocated in the device's primary context (or
    /// in none, as memory of virtual memory management and of pools is). `OutOfBounds` if the range leaves its allocation,
    /// or some of it is not mapped. What the driver fails with.
    ///
    /// # Safety
    /// As [`Region::from_raw`]: the memory stays allocated, and mapped, until the region is dropped.
    pub unsafe fn region(
        &self,
        address: u64,
        length: u64,
        keepalive: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<Region>> {
        let devices = &self.inner.facts.devices;
        let (ordinal, owner) = pointer::owner(&self.inner.driver, devices, address, length)?;
        let domain = self.inner.domain(ordinal, owner)?;
        // SAFETY: the caller's contract.
        unsafe { domain.region(devices, address, length, keepalive) }
    }

    /// Captures an event as it is now: what was recorded in it before this call, and nothing that is recorded in it later.
    /// Nothing of the caller's is kept; he may destroy the event. An event that was never recorded has happened.
    ///
    /// # Errors
    /// `InvalidArgument` inside a stream capture, for which nothing has happened, and if there is no device to do it on:
    /// no context is current on this thread, and no memory is registered. `Busy` if too many events wait. What the driver
    /// fails with.
    ///
    /// # Safety
    /// `event` is a live `CUevent` (or `cudaEvent_t`).
    pub unsafe fn capture(&self, event: *mut c_void) -> Result<CapturedEvent> {
        let captures = self.inner.captures()?;
        // SAFETY: the caller's contract.
        Ok(unsafe { captures.capture(event::handle(event)) }?)
    }

    /// Calls `then` once, when the event has happened or failed: on the crate's one thread, `kvx-cuda`, which must not be
    /// held up. If the last of this driver's users goes before, `then` gets `Closed`.
    pub fn watch(&self, event: CapturedEvent, then: Then) {
        self.inner.watcher.watch(event, then);
    }

    /// Lets a stream wait, from its present end on, until the hold is released or dropped.
    ///
    /// The wait is the caller's to bound. A stream that waits may hold up others of its context, as the driver maps many
    /// streams to few queues of the device: do not let work that leads to the release depend on them.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream is being captured. `Unsupported` if the driver has no such waits. `Busy` if too
    /// many streams wait. What the driver fails with.
    ///
    /// # Safety
    /// `stream` is a live `CUstream` (or `cudaStream_t`).
    pub unsafe fn hold_stream(&self, stream: *mut c_void) -> Result<StreamHold> {
        let driver = &self.inner.driver;
        // SAFETY: the caller's contract.
        let held = unsafe { hold::look(driver, stream) }?;
        let holds = self.inner.holds(held.device, held.context)?;
        // SAFETY: the caller's contract, and the stream's context is current while `held` lives.
        Ok(unsafe { holds.hold(driver, held.stream) }?)
    }

    /// What is counted: the driver's calls by function, copies and their bytes by device and way, page-locked bytes, events,
    /// memory that is shared with other endpoints on this host.
    pub fn counters(&self) -> Vec<Counter> {
        let calls = self.inner.driver.calls().filter(|(_, count)| *count > 0);
        let mut counters: Vec<Counter> = calls
            .map(|(call, count)| Counter {
                name: "cuda_driver_calls_total",
                labels: vec![("call", call.to_owned())],
                value: count as f64,
            })
            .collect();
        counters.push(Counter {
            name: "cuda_pinned_bytes",
            labels: Vec::new(),
            value: self.inner.pins.bytes().load(std::sync::atomic::Ordering::Relaxed) as f64,
        });
        for domain in self.inner.domains.lock().values() {
            domain.report(&mut counters);
        }
        if let Some(share) = &self.inner.share {
            share.report(&mut counters);
        }
        counters
    }

    /// Why something is done in another way than the best, a line for each: no copy kernels, no batched copies, another
    /// endpoint's memory that could not be mapped.
    pub fn notes(&self) -> Vec<String> {
        let shared = self.inner.share.iter().flat_map(|share| share.notes());
        let domains = self.inner.domains.lock();
        domains
            .values()
            .flat_map(|domain| domain.notes())
            .chain(shared)
            .collect()
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.driver.fmt(f)
    }
}

impl Drop for Inner {
    /// What others have mapped is asked back: whose memory it is may free it when the driver's last user is gone.
    fn drop(&mut self) {
        if let Some(share) = &self.share {
            share.close();
        }
    }
}

impl Inner {
    /// The domain of a device that something of the caller's was found on, in the context `owner` (null if in none).
    fn domain(&self, ordinal: i32, owner: CUcontext) -> Result<Arc<Domain>, CudaError> {
        let mut domains = self.domains.lock();
        if let Some(domain) = domains.get(&ordinal) {
            domain.check_owner(owner)?;
            return Ok(Arc::clone(domain));
        }
        let facts = self.device(|device| device.ordinal == ordinal)?;
        let domain = Domain::open(&self.driver, facts, self.config.gather, &self.pins, &self.share, owner)?;
        domains.insert(ordinal, Arc::clone(&domain));
        Ok(domain)
    }

    fn device(&self, is_it: impl Fn(&DeviceFacts) -> bool) -> Result<&DeviceFacts, CudaError> {
        self.facts
            .devices
            .iter()
            .find(|device| is_it(device))
            .ok_or(CudaError::NoDevice)
    }

    /// The domain of a device that has a context of the caller's; or of another, if that context is not its primary one.
    fn domain_near(&self, device: CUdevice, context: CUcontext) -> Result<Arc<Domain>, CudaError> {
        let facts = self.device(|facts| facts.handle == device)?;
        if let Some(domain) = self.domains.lock().get(&facts.ordinal) {
            return Ok(Arc::clone(domain));
        }
        match self.domain(facts.ordinal, context) {
            Err(CudaError::Unfit { .. }) => self.any_domain(),
            result => result,
        }
    }

    fn any_domain(&self) -> Result<Arc<Domain>, CudaError> {
        let any = self.domains.lock().values().next().map(Arc::clone);
        any.ok_or_else(|| CudaError::Unfit {
            kind: ErrorKind::InvalidArgument,
            what: "a CUDA event or stream".into(),
            why: "no primary context is current on this thread, and no CUDA memory is registered: there is no device to use"
                .into(),
            remedy: "register memory of the device first, or call with its context current",
        })
    }

    /// Where events are captured: on the device of the thread's context, else on any that has memory of the caller's. A
    /// stream may wait for an event of any device.
    fn captures(&self) -> Result<Arc<Captures>, CudaError> {
        let failed = |refused| CudaError::call(refused, "the current context");
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.driver.context_current(&mut context) }.map_err(failed)?;
        let domain = if context.is_null() {
            self.any_domain()?
        } else {
            let _relaxed = Relaxed::new(&self.driver);
            let mut device = 0;
            // SAFETY: writes one integer.
            unsafe { self.driver.context_device(&mut device) }.map_err(failed)?;
            self.domain_near(device, context)?
        };
        Ok(Arc::clone(&domain.captures))
    }

    fn holds(&self, device: CUdevice, context: CUcontext) -> Result<Arc<Holds>, CudaError> {
        let mut holds = self.holds.lock();
        if let Some(holds) = &*holds {
            return Ok(Arc::clone(holds));
        }
        let primary: Arc<Primary> = Arc::clone(&self.domain_near(device, context)?.primary);
        let made =
            Holds::new(&primary, self.pins.bytes()).map_err(|refused| CudaError::call(refused, "stream holds"))?;
        *holds = Some(Arc::clone(&made));
        Ok(made)
    }
}
