//! Handles: offers, claims, grants, transfers.

use std::ffi::c_void;
use std::ops::Bound as End;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvxfer::{Completion, CompletionFuture, Destination, Error, ErrorKind, Verdict};
use pyo3::prelude::*;

use crate::address::Grant;
use crate::arguments::{Seconds, U16, U32};
use crate::error::{exception, raise, wait_timeout};
use crate::exit::{self, without_lock};
use crate::fork::Local;
use crate::warn;

/// The Rust handle behind a Python one.
pub(crate) enum Inner {
    Offer(kvxfer::Offer),
    Claim(kvxfer::Claim),
    Grant(kvxfer::GrantHandle),
    Transfer(kvxfer::Transfer),
}

/// How a handle ended well, of whatever kind.
#[derive(Clone)]
enum Outcome {
    Release(kvxfer::Release),
    Arrival(kvxfer::Arrival),
    Delivery(kvxfer::Delivery),
}

impl Inner {
    fn kind(&self) -> &'static str {
        match self {
            Inner::Offer(_) => "offer",
            Inner::Claim(_) => "claim",
            Inner::Grant(_) => "grant",
            Inner::Transfer(_) => "transfer",
        }
    }

    fn id(&self) -> u64 {
        match self {
            Inner::Offer(offer) => offer.id().0,
            Inner::Claim(claim) => claim.id().0,
            Inner::Grant(grant) => grant.id().0,
            Inner::Transfer(transfer) => transfer.id().0,
        }
    }

    fn is_done(&self) -> bool {
        match self {
            Inner::Offer(offer) => offer.released().is_done(),
            Inner::Claim(claim) => claim.arrived().is_done(),
            Inner::Grant(grant) => grant.arrived().is_done(),
            Inner::Transfer(transfer) => transfer.done().is_done(),
        }
    }

    fn poll(&self) -> Option<kvxfer::Result<Outcome>> {
        match self {
            Inner::Offer(offer) => offer.released().poll().map(|result| result.map(Outcome::Release)),
            Inner::Claim(claim) => claim.arrived().poll().map(|result| result.map(Outcome::Arrival)),
            Inner::Grant(grant) => grant.arrived().poll().map(|result| result.map(Outcome::Arrival)),
            Inner::Transfer(transfer) => transfer.done().poll().map(|result| result.map(Outcome::Delivery)),
        }
    }

    fn wait(&self, timeout: Duration) -> Option<kvxfer::Result<Outcome>> {
        fn ended<T: Clone>(
            completion: &Completion<T>,
            timeout: Duration,
            outcome: fn(T) -> Outcome,
        ) -> Option<kvxfer::Result<Outcome>> {
            completion.wait_timeout(timeout).map(|result| result.map(outcome))
        }
        match self {
            Inner::Offer(offer) => ended(offer.released(), timeout, Outcome::Release),
            Inner::Claim(claim) => ended(claim.arrived(), timeout, Outcome::Arrival),
            Inner::Grant(grant) => ended(grant.arrived(), timeout, Outcome::Arrival),
            Inner::Transfer(transfer) => ended(transfer.done(), timeout, Outcome::Delivery),
        }
    }

    fn cancel(&self) {
        match self {
            Inner::Offer(offer) => offer.cancel(),
            Inner::Claim(claim) => claim.cancel(),
            Inner::Grant(grant) => grant.cancel(),
            Inner::Transfer(transfer) => transfer.cancel(),
        }
    }

    fn waiting_on(&self) -> Option<kvxfer::WaitingOn> {
        match self {
            Inner::Offer(offer) => offer.waiting_on(),
            Inner::Claim(claim) => claim.waiting_on(),
            Inner::Grant(grant) => grant.waiting_on(),
            Inner::Transfer(transfer) => transfer.waiting_on(),
        }
    }

    fn detach(self) {
        match self {
            Inner::Offer(offer) => offer.detach(),
            Inner::Claim(claim) => claim.detach(),
            Inner::Grant(grant) => grant.detach(),
            Inner::Transfer(transfer) => transfer.detach(),
        }
    }

    /// A future that is woken at the end, whatever it is.
    pub(crate) fn ended(&self) -> Ended {
        match self {
            Inner::Offer(offer) => Ended::Release(offer.released().future()),
            Inner::Claim(claim) => Ended::Arrival(claim.arrived().future()),
            Inner::Grant(grant) => Ended::Arrival(grant.arrived().future()),
            Inner::Transfer(transfer) => Ended::Delivery(transfer.done().future()),
        }
    }
}

/// A future of a handle's end. Dropping it forgets its waker.
pub(crate) enum Ended {
    Release(CompletionFuture<kvxfer::Release>),
    Arrival(CompletionFuture<kvxfer::Arrival>),
    Delivery(CompletionFuture<kvxfer::Delivery>),
}

impl Ended {
    /// Registers the waker; whether the handle has ended already.
    pub(crate) fn watch(&mut self, context: &mut std::task::Context<'_>) -> bool {
        use std::future::Future;
        use std::pin::Pin;
        match self {
            Ended::Release(future) => Pin::new(future).poll(context).is_ready(),
            Ended::Arrival(future) => Pin::new(future).poll(context).is_ready(),
            Ended::Delivery(future) => Pin::new(future).poll(context).is_ready(),
        }
    }
}

/// Something that goes on: an offer, a claim, a grant or a transfer. It ends exactly once.
///
/// `poll`, `wait` and `await` are views of the same end and can be mixed. A handle that is collected while live is
/// cancelled, with a `ResourceWarning`; `detach` lets it go on.
#[pyclass(frozen, subclass, module = "kvxfer", name = "Handle", weakref)]
pub(crate) struct Handle {
    inner: Local<Option<Inner>>,
    id: u64,
    kind: &'static str,
    detached: AtomicBool,
}

impl Handle {
    fn new(inner: Inner) -> Handle {
        Handle {
            id: inner.id(),
            kind: inner.kind(),
            inner: Local::new(Some(inner)),
            detached: AtomicBool::new(false),
        }
    }

    pub(crate) fn live(&self) -> PyResult<&Inner> {
        self.inner.get()?.as_ref().ok_or_else(|| {
            // Taken only by the finaliser.
            raise(Error::new(ErrorKind::Closed, "a handle that was collected"))
        })
    }
}

#[pymethods]
impl Handle {
    /// The number that the handle's events carry.
    #[getter]
    fn id(&self) -> u64 {
        self.id
    }

    /// Whether the handle has ended.
    fn done(&self) -> PyResult<bool> {
        Ok(self.live()?.is_done())
    }

    /// The result if the handle has ended well, its error raised if it has not, `None` while it is open.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        match self.live()?.poll() {
            None => Ok(None),
            Some(result) => outcome(py, result).map(Some),
        }
    }

    /// Blocks until the handle ends, at most `timeout` seconds (`None`: for ever), and gives its result or raises its
    /// error. `WaitTimeout` (a `DeadlineExceeded`, a `TimeoutError`) if it is still open then: its blocks are in use.
    /// Other threads of Python run meanwhile.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Py<PyAny>> {
        let inner = self.live()?;
        if let Some(result) = inner.poll() {
            return outcome(py, result);
        }
        let timeout = timeout.map(|timeout| timeout.0);
        match exit::wait(py, timeout, |slice| inner.wait(slice))? {
            Some(result) => outcome(py, result),
            None => Err(wait_timeout(
                py,
                &Error::new(
                    ErrorKind::DeadlineExceeded,
                    format!("a wait of {} s", timeout.unwrap_or_default().as_secs_f64()),
                )
                .because("the handle is still open")
                .remedy("wait again, or cancel the handle and wait for its end before reusing its blocks")
                .destination_is(Destination::Quarantined),
            )),
        }
    }

    /// The error that the handle ended with; `None` while it is open and if it ended well.
    fn error(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        match self.live()?.poll() {
            Some(Err(error)) => exception(py, &error).map(|error| Some(error.unbind())),
            _ => Ok(None),
        }
    }

    /// Ends the handle with `Cancelled`. Its blocks may be reused once it has ended.
    fn cancel(&self) -> PyResult<()> {
        self.live()?.cancel();
        Ok(())
    }

    /// Lets it go on when this object is collected.
    fn detach(&self) -> PyResult<()> {
        self.live()?;
        self.detached.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// What the open handle waits for (offer, blocks, credit, peer, ...), and for how many seconds; `None` if it has
    /// ended.
    fn waiting_on(&self) -> PyResult<Option<(String, f64)>> {
        let Some(waiting) = self.live()?.waiting_on() else {
            return Ok(None);
        };
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now = now.tv_sec as f64 + now.tv_nsec as f64 / 1e9;
        Ok(Some((
            waiting.what,
            (now - waiting.since.as_nanos() as f64 / 1e9).max(0.0),
        )))
    }

    fn __repr__(&self) -> String {
        let state = match self.inner.here() {
            None => "of the parent process".to_owned(),
            Some(inner) => match inner.as_ref().map(Inner::poll) {
                Some(None) => "open".to_owned(),
                Some(Some(Ok(_))) => "ended well".to_owned(),
                Some(Some(Err(error))) => format!("ended {}", error.kind()),
                None => "gone".to_owned(),
            },
        };
        format!("<kvxfer {} {}, {state}>", self.kind, self.id)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let detached = self.detached.load(Ordering::Relaxed);
        let Some(inner) = self.inner.take_here().flatten() else {
            return;
        };
        if detached {
            return inner.detach();
        }
        if !inner.is_done() {
            warn::resource(&format!(
                "{} {} was collected while open and is cancelled: keep it, cancel() it, or detach() it",
                self.kind, self.id
            ));
        }
    }
}

fn outcome(py: Python<'_>, result: kvxfer::Result<Outcome>) -> PyResult<Py<PyAny>> {
    match result.map_err(raise)? {
        Outcome::Release(release) => Ok(Py::new(py, Release::new(py, release)?)?.into_any()),
        Outcome::Arrival(arrival) => {
            let message = arrival
                .message
                .map(|message| pyo3::types::PyBytes::new(py, &message).unbind());
            let bytes = arrival.bytes;
            Ok(Py::new(py, Arrival { bytes, message })?.into_any())
        }
        Outcome::Delivery(delivery) => Ok(Py::new(py, Delivery { bytes: delivery.bytes })?.into_any()),
    }
}

/// A request's KV, offered to whoever claims its key. It ends with a `Release`: the source blocks may be reused.
#[pyclass(frozen, extends = Handle, module = "kvxfer", name = "Offer")]
pub(crate) struct Offer;

/// The Rust offer behind a Python one.
pub(crate) fn offer<'a>(offer: &'a Bound<'_, Offer>) -> PyResult<&'a kvxfer::Offer> {
    match offer.as_super().get().live()? {
        Inner::Offer(offer) => Ok(offer),
        other => Err(mismatch("offer", other)),
    }
}

fn mismatch(expected: &str, found: &Inner) -> PyErr {
    raise(Error::new(
        ErrorKind::Internal,
        format!("a Python {expected} holds a {}", found.kind()),
    ))
}

impl Offer {
    pub(crate) fn new(py: Python<'_>, offer: kvxfer::Offer) -> PyResult<Py<Offer>> {
        let handle = Handle::new(Inner::Offer(offer));
        Py::new(py, PyClassInitializer::from(handle).add_subclass(Offer))
    }
}

#[pymethods]
impl Offer {
    /// Appends blocks: in each cache group, tokens go on where the last append ended.
    #[pyo3(signature = (selection))]
    fn append(slf: &Bound<'_, Self>, selection: &Bound<'_, PyAny>) -> PyResult<()> {
        let selection = crate::selection::selection(selection)?;
        offer(slf)?.append(&*selection).map_err(raise)
    }

    /// Releases a part for sending: these tokens of all layers, or of the layers `(first, end)`, counted in the
    /// layout's layers. With `after`, a CUDA event recorded behind the kernels that write them (its address, or an
    /// object with `cuda_event` or `ptr`), they are read once that has happened: the call takes the event as it is
    /// now, and waits for nothing.
    #[pyo3(signature = (first_token, token_end, layers = None, *, after = None))]
    fn ready(
        slf: &Bound<'_, Self>,
        first_token: U32,
        token_end: U32,
        layers: Option<(U16, U16)>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (offer, tokens) = (offer(slf)?, first_token.0..token_end.0);
        match captured(slf.py(), offer, after)? {
            None => offer.ready(tokens, layer_range(layers)),
            Some(after) => offer.ready_after(tokens, layer_range(layers), &after),
        }
        .map_err(raise)
    }

    /// No more blocks come: the request has `token_end` tokens. What has not been released is now, or `after` an event
    /// as `ready` takes it.
    #[pyo3(signature = (token_end, *, after = None))]
    fn finish(slf: &Bound<'_, Self>, token_end: U32, after: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let offer = offer(slf)?;
        match captured(slf.py(), offer, after)? {
            None => offer.finish(token_end.0),
            Some(after) => offer.finish_after(token_end.0, &after),
        }
        .map_err(raise)
    }

    /// Voids all progress: bytes of earlier attempts never count. Blocks are appended anew; those of earlier attempts
    /// may be overwritten once `voided` says so.
    fn restart(slf: &Bound<'_, Self>) -> PyResult<()> {
        offer(slf)?.restart().map_err(raise)
    }

    /// Whether no block of an earlier attempt is being read any more. Takes a few milliseconds at most.
    fn voided(slf: &Bound<'_, Self>) -> PyResult<bool> {
        Ok(offer(slf)?.voided())
    }

    /// Takes the blocks back: when this returns, nothing read from them later counts and they may be reused. Waits a
    /// bounded time (`deadlines.retract_ms_max`), other threads of Python running. The offer ends `Retracted`.
    #[pyo3(signature = (blocks))]
    fn retract(slf: &Bound<'_, Self>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = crate::arguments::blocks(blocks)?;
        let offer = offer(slf)?;
        without_lock(slf.py(), || offer.retract(&blocks)).map_err(raise)
    }
}

/// What the offer's parts shall wait for.
fn captured(
    py: Python<'_>,
    offer: &kvxfer::Offer,
    event: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<kvxfer::After>> {
    // SAFETY: a live event, as the documentation asks for; null is refused.
    crate::cuda::after(py, event, |event| unsafe {
        offer.after_cuda_event(event as *mut c_void)
    })
}

/// A layer range as Rust wants it; `None` stands for all layers.
pub(crate) fn layer_range(layers: Option<(U16, U16)>) -> (End<u16>, End<u16>) {
    match layers {
        None => (End::Unbounded, End::Unbounded),
        Some((first, end)) => (End::Included(first.0), End::Excluded(end.0)),
    }
}

/// A request's KV, wanted from the endpoints that offer its key. It ends with an `Arrival`.
#[pyclass(frozen, extends = Handle, module = "kvxfer", name = "Claim")]
pub(crate) struct Claim;

fn claim<'a>(claim: &'a Bound<'_, Claim>) -> PyResult<&'a kvxfer::Claim> {
    match claim.as_super().get().live()? {
        Inner::Claim(claim) => Ok(claim),
        other => Err(mismatch("claim", other)),
    }
}

impl Claim {
    pub(crate) fn new(py: Python<'_>, claim: kvxfer::Claim) -> PyResult<Py<Claim>> {
        let handle = Handle::new(Inner::Claim(claim));
        Py::new(py, PyClassInitializer::from(handle).add_subclass(Claim))
    }
}

#[pymethods]
impl Claim {
    /// Says where the bytes go: per cache group the tokens wanted and the blocks for them. Tokens that are held
    /// already are simply not selected. Once only.
    #[pyo3(signature = (selection))]
    fn fill(slf: &Bound<'_, Self>, selection: &Bound<'_, PyAny>) -> PyResult<()> {
        let selection = crate::selection::selection(selection)?.into_owned();
        claim(slf)?.fill(selection).map_err(raise)
    }

    /// Lets a CUDA stream (its address, or an object with `cuda_stream` or `ptr`) wait, from its present end on, until
    /// the claim has ended, arrived or not. Kernels queued behind it read the blocks after the arrival. What makes the
    /// claim end must not be queued behind it.
    fn hold_stream(slf: &Bound<'_, Self>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let (claim, stream) = (claim(slf)?, crate::cuda::stream(stream)?);
        // SAFETY: a live stream, as the documentation asks for; 0 is the default one.
        without_lock(slf.py(), || unsafe { claim.hold_stream(stream as *mut c_void) }).map_err(raise)
    }

    /// Ends the claim before it is filled: `Declined` at both sides. Does nothing after that.
    fn decline(slf: &Bound<'_, Self>) -> PyResult<()> {
        claim(slf)?.decline();
        Ok(())
    }
}

/// The owner's side of a grant. It ends with an `Arrival`: the blocks are written (or have been read), once.
#[pyclass(frozen, extends = Handle, module = "kvxfer", name = "GrantHandle")]
pub(crate) struct GrantHandle {
    grant: Py<Grant>,
}

impl GrantHandle {
    pub(crate) fn new(py: Python<'_>, handle: kvxfer::GrantHandle) -> PyResult<Py<GrantHandle>> {
        let inner = handle.grant().clone();
        let grant = Py::new(py, Grant { inner })?;
        let handle = Handle::new(Inner::Grant(handle));
        Py::new(py, PyClassInitializer::from(handle).add_subclass(GrantHandle { grant }))
    }
}

#[pymethods]
impl GrantHandle {
    /// What to hand to the peer that shall use it.
    #[getter]
    fn grant(&self, py: Python<'_>) -> Py<Grant> {
        self.grant.clone_ref(py)
    }
}

/// A push or a pull under way. It ends with a `Delivery`.
#[pyclass(frozen, extends = Handle, module = "kvxfer", name = "Transfer")]
pub(crate) struct Transfer;

impl Transfer {
    pub(crate) fn new(py: Python<'_>, transfer: kvxfer::Transfer) -> PyResult<Py<Transfer>> {
        let handle = Handle::new(Inner::Transfer(transfer));
        Py::new(py, PyClassInitializer::from(handle).add_subclass(Transfer))
    }
}

#[pymethods]
impl Transfer {
    /// The way the bytes take: transport and rails. `None` while there is no link to the peer.
    fn path(slf: &Bound<'_, Self>) -> PyResult<Option<Path>> {
        match slf.as_super().get().live()? {
            Inner::Transfer(transfer) => Ok(transfer.path().map(|path| Path {
                transport: path.transport,
                rails: path.rails,
                rails_down: path.rails_down,
                rails_configured: path.rails_configured,
            })),
            other => Err(mismatch("transfer", other)),
        }
    }
}

/// The way that bytes take.
#[pyclass(frozen, module = "kvxfer", name = "Path", get_all)]
pub(crate) struct Path {
    /// The transport's name.
    transport: String,
    /// Lanes or rails that are up, each by name.
    rails: Vec<String>,
    /// Why others are not up, as far as it is known.
    rails_down: Vec<String>,
    /// Of how many.
    rails_configured: usize,
}

#[pymethods]
impl Path {
    fn __repr__(&self) -> String {
        format!(
            "<kvxfer.Path {}, {} of {} rails up>",
            self.transport,
            self.rails.len(),
            self.rails_configured
        )
    }
}

/// How an offer ended well: its blocks may be reused.
#[pyclass(frozen, module = "kvxfer", name = "Release", get_all)]
pub(crate) struct Release {
    /// The verdict of each claim that was served.
    members: Vec<Py<Member>>,
}

impl Release {
    fn new(py: Python<'_>, release: kvxfer::Release) -> PyResult<Release> {
        let members = release.members.into_iter().map(|member| {
            let (verdict, error) = match &member.verdict {
                Verdict::Arrived => ("arrived", None),
                Verdict::Failed(error) => ("failed", Some(exception(py, error)?.unbind())),
                Verdict::Unknown => ("unknown", None),
            };
            Py::new(
                py,
                Member {
                    peer: member.peer.to_string(),
                    set: member.set,
                    member: member.member,
                    verdict,
                    error,
                },
            )
        });
        Ok(Release {
            members: members.collect::<PyResult<_>>()?,
        })
    }
}

#[pymethods]
impl Release {
    fn __repr__(&self, py: Python<'_>) -> String {
        let verdicts: Vec<&str> = self.members.iter().map(|member| member.get().verdict).collect();
        let _ = py;
        format!("<kvxfer.Release members: {}>", verdicts.join(", "))
    }
}

/// How one claim of an offer ended.
#[pyclass(frozen, module = "kvxfer", name = "Member", get_all)]
pub(crate) struct Member {
    /// The claimant's incarnation.
    peer: String,
    /// Its claim set.
    set: u128,
    /// Its number in the set.
    member: u16,
    /// "arrived", "failed" or "unknown".
    verdict: &'static str,
    /// The error of a failed one.
    error: Option<Py<PyAny>>,
}

#[pymethods]
impl Member {
    fn __repr__(&self) -> String {
        format!("<kvxfer.Member {} of {}: {}>", self.member, self.peer, self.verdict)
    }
}

/// How a claim or grant ended well: every byte is in place and visible.
#[pyclass(frozen, module = "kvxfer", name = "Arrival", get_all)]
pub(crate) struct Arrival {
    /// Bytes placed (or read, for a grant to read).
    bytes: u64,
    /// The message of the push.
    message: Option<Py<pyo3::types::PyBytes>>,
}

#[pymethods]
impl Arrival {
    fn __repr__(&self) -> String {
        let message = if self.message.is_some() { ", with a message" } else { "" };
        format!("<kvxfer.Arrival {} bytes{message}>", self.bytes)
    }
}

/// How a push or pull ended well: the bytes are in the destination's memory.
#[pyclass(frozen, module = "kvxfer", name = "Delivery", get_all)]
pub(crate) struct Delivery {
    /// Bytes placed.
    bytes: u64,
}

#[pymethods]
impl Delivery {
    fn __repr__(&self) -> String {
        format!("<kvxfer.Delivery {} bytes>", self.bytes)
    }
}
