//! What parts and pushes can wait for: something that has not happened yet, such as the end of a kernel.

use std::fmt;
use std::sync::{Arc, OnceLock};

use kvxfer_core::machine::{EventId, HandleId};
use kvxfer_core::{Error, ErrorKind, Result, Time};

use crate::control::{Reports, State};

/// Something that happens once, or fails. [`Endpoint::after`](crate::Endpoint::after) makes an [`After`] of it.
pub trait Happening: Send + 'static {
    /// Sees to it that `then` is called once: when it has happened, or with the error it failed with. On any thread,
    /// also before this returns; the call takes microseconds. If `then` is dropped instead, that is a failure.
    fn watch(self: Box<Self>, then: Box<dyn FnOnce(Result<()>) + Send>);
}

/// A CUDA event as it was when it was captured.
pub(crate) struct CudaHappening {
    pub(crate) cuda: kvxfer_cuda::Cuda,
    pub(crate) event: kvxfer_cuda::CapturedEvent,
}

impl Happening for CudaHappening {
    fn watch(self: Box<Self>, then: Box<dyn FnOnce(Result<()>) + Send>) {
        self.cuda.watch(self.event, then);
    }
}

/// What parts and pushes of one endpoint wait for. Clones are the same one, and any number of calls can take it.
///
/// A part that waits is released all the same: it is checked and counted, and no token of it can be released again. Its
/// bytes are read once this has happened. If it fails, the offers and pushes that wait for it end with its error; if it
/// never happens, they end at their deadlines.
#[derive(Clone)]
pub struct After {
    inner: Arc<Inner>,
}

struct Inner {
    event: EventId,
    /// Whose.
    reports: Arc<Reports>,
    outcome: OnceLock<Result<()>>,
}

impl After {
    pub(crate) fn new(reports: &Arc<Reports>, happening: Box<dyn Happening>) -> After {
        let after = After {
            inner: Arc::new(Inner {
                event: reports.next_event(),
                reports: Arc::clone(reports),
                outcome: OnceLock::new(),
            }),
        };
        let teller = Teller(Arc::clone(&after.inner));
        happening.watch(Box::new(move |result| teller.tell(result)));
        after
    }

    /// How it went; `None` while it has not happened.
    pub fn outcome(&self) -> Option<Result<()>> {
        self.inner.outcome.get().cloned()
    }

    /// Whether it is the endpoint's that has these reports.
    pub(crate) fn check(&self, reports: &Arc<Reports>) -> Result<()> {
        if Arc::ptr_eq(&self.inner.reports, reports) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidArgument, "what a part shall wait for")
            .because("it was made with another endpoint, which hears of it")
            .remedy("make it with the endpoint whose parts wait for it"))
    }

    /// What the machine is to be told to wait for; `None` if it has happened.
    pub(crate) fn event(&self) -> Option<EventId> {
        match self.inner.outcome.get() {
            Some(Ok(())) => None,
            _ => Some(self.inner.event),
        }
    }

    /// To be called with the control plane's lock that was held when something began to wait: what has failed before is
    /// told now; what has not happened is told by the control thread, which needs the lock for it.
    pub(crate) fn settle(&self, state: &mut State, now: Time) {
        if let Some(failed @ Err(_)) = self.inner.outcome.get() {
            state.machine.event_happened(now, self.inner.event, failed);
        }
    }
}

impl fmt::Debug for After {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "After({}, {:?})", self.inner.event.0, self.inner.outcome.get())
    }
}

/// Calls the machine for a part or a push that may have to wait.
pub(crate) fn call<R>(
    after: Option<&After>,
    state: &mut State,
    now: Time,
    decide: impl FnOnce(&mut State, Option<EventId>) -> Result<R>,
) -> Result<R> {
    let result = decide(state, after.and_then(After::event));
    if let Some(after) = after {
        after.settle(state, now);
    }
    result
}

/// Releases a part now or later.
pub(crate) fn ready(
    state: &mut State,
    now: Time,
    offer: HandleId,
    tokens: (u32, u32),
    layers: (u16, u16),
    after: Option<&After>,
) -> Result<()> {
    call(after, state, now, |state, event| match event {
        Some(event) => state.machine.ready_after(now, offer, tokens, layers, event),
        None => state.machine.ready(now, offer, tokens, layers),
    })
}

/// Tells how it went, once; dropped before, that it cannot be known.
struct Teller(Arc<Inner>);

impl Teller {
    fn tell(self, result: Result<()>) {
        self.set(result);
    }

    fn set(&self, result: Result<()>) {
        // First the outcome, then the report: whoever begins to wait in between is told by the report.
        if self.0.outcome.set(result.clone()).is_ok() {
            self.0.reports.happened(self.0.event, result);
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        if self.0.outcome.get().is_none() {
            let error = Error::new(ErrorKind::Closed, "what was to be waited for")
                .because("whoever watched it is gone and did not say how it went");
            self.set(Err(error));
        }
    }
}
