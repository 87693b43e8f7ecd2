//! Handles: what an application holds while something goes on.
//!
//! Each has one [`Completion`]. Dropping an open handle cancels it; [`detach`](Offer::detach) lets it go on without
//! its handle. Calls never block, except [`Offer::retract`], which waits a bounded time.

use std::ffi::c_void;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvxfer_core::error::Destination;
use kvxfer_core::flow::SlotWatcher;
use kvxfer_core::layout::{BlockId, PoolLayout, Selection};
use kvxfer_core::machine::{HandleId, MemberVerdict, Outcome, WaitingOn};
use kvxfer_core::transport::Path;
use kvxfer_core::wire::Grant;
use kvxfer_core::{Error, ErrorKind, Incarnation, Result, Time};
use kvxfer_cuda::StreamHold;

use crate::after::{self, After};
use crate::completion::{Completer, Completion, Waiting, Wakers};
use crate::control::{Shared, State, seen_to};
use crate::events::{EventQueue, EventSource};

/// How an offer ended well: its blocks may be reused.
#[derive(Debug, Clone)]
pub struct Release {
    /// The verdict of each claim that was served.
    pub members: Vec<MemberVerdict>,
}

/// How a claim or grant ended well: every byte is in place and visible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Bytes placed (or read, for a grant to read).
    pub bytes: u64,
    /// The user message of the push.
    pub message: Option<Arc<[u8]>>,
}

/// How a push or pull ended well: the bytes are in the destination's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Bytes placed.
    pub bytes: u64,
}

/// A request's KV, offered to whoever claims its key.
#[derive(Debug)]
pub struct Offer {
    core: Core<Release>,
    layout: Arc<PoolLayout>,
}

impl Offer {
    /// Appends blocks: in each cache group, tokens go on where the last append ended.
    ///
    /// # Errors
    /// `InvalidArgument` and `OutOfBounds` for a selection that does not fit the pool or does not go on; `Closed` after
    /// the end.
    pub fn append(&self, selection: impl std::borrow::Borrow<Selection>) -> Result<()> {
        let selection = selection.borrow();
        self.core
            .call(|state, now, id| state.machine.append(now, id, selection))
    }

    /// Releases a part for sending: these tokens of these layers (indices in the pool's layer list; `..` is all, and an
    /// end beyond the last layer means the last).
    ///
    /// # Errors
    /// `OutOfBounds` for empty ranges, a first layer there is not and tokens beyond those appended; `InvalidArgument`
    /// for tokens of a layer that were released before; `Busy` at the limit of parts; `Closed` after the end.
    pub fn ready(&self, tokens: Range<u32>, layers: impl RangeBounds<u16>) -> Result<()> {
        let layers = self.layer_range(layers);
        self.core
            .call(|state, now, id| state.machine.ready(now, id, (tokens.start, tokens.end), layers))
    }

    /// As [`ready`](Self::ready), for bytes that are there once something has happened: everything is checked now, and
    /// nothing of the part is read before. [`restart`](Self::restart) and every ending drop what waits.
    ///
    /// # Errors
    /// As [`ready`](Self::ready); `InvalidArgument` for an [`After`] of another endpoint. One that fails ends the offer
    /// with its error.
    pub fn ready_after(&self, tokens: Range<u32>, layers: impl RangeBounds<u16>, after: &After) -> Result<()> {
        after.check(&self.core.shared.reports)?;
        let layers = self.layer_range(layers);
        self.core
            .call(|state, now, id| after::ready(state, now, id, (tokens.start, tokens.end), layers, Some(after)))
    }

    /// No more blocks come: the request has `token_end` tokens. What has not been released is now, with state blocks.
    ///
    /// # Errors
    /// `OutOfBounds` if fewer tokens were appended; `InvalidArgument` if later tokens were released or it was finished; `Closed` after the end.
    pub fn finish(&self, token_end: u32) -> Result<()> {
        self.core
            .call(|state, now, id| state.machine.finish(now, id, token_end))
    }

    /// [`Endpoint::after_cuda_event`](crate::Endpoint::after_cuda_event) of the offer's endpoint.
    ///
    /// # Errors
    /// The same.
    ///
    /// # Safety
    /// The same: `event` is null or a live `CUevent` (or `cudaEvent_t`).
    pub unsafe fn after_cuda_event(&self, event: *mut c_void) -> Result<After> {
        // SAFETY: the caller's contract.
        unsafe { self.core.shared.after_cuda_event(event) }
    }

    /// As [`finish`](Self::finish), and what it releases, state blocks included, is not read before something has
    /// happened. Parts that were released before keep to what they wait for.
    ///
    /// # Errors
    /// As [`finish`](Self::finish) and [`ready_after`](Self::ready_after).
    pub fn finish_after(&self, token_end: u32, after: &After) -> Result<()> {
        after.check(&self.core.shared.reports)?;
        self.core.call(|state, now, id| {
            after::call(Some(after), state, now, |state, event| match event {
                Some(event) => state.machine.finish_after(now, id, token_end, event),
                None => state.machine.finish(now, id, token_end),
            })
        })
    }

    /// Voids all progress: bytes of earlier attempts never count. Blocks are appended anew. Those of earlier attempts
    /// may be overwritten once [`voided`](Self::voided) says so.
    ///
    /// # Errors
    /// `Closed` after the end.
    pub fn restart(&self) -> Result<()> {
        self.core.call(|state, now, id| state.machine.restart(now, id))
    }

    /// Whether no block of an earlier attempt is being read any more. Takes a few milliseconds at most.
    pub fn voided(&self) -> bool {
        let gates = self.core.shared.look(|state| state.machine.voided_gates(self.core.id));
        gates.iter().all(|gate| gate.fenced())
    }

    /// Takes the blocks back: when this returns, nothing read from them later counts and they may be reused. Waits, at
    /// most `deadlines.retract_ms_max`, for reads that are inside a system call. The offer ends `Retracted`.
    ///
    /// # Errors
    /// `InvalidArgument` if there are none or they are none of the offer's; `DeadlineExceeded` (quarantined) if a read did not
    /// end in time.
    pub fn retract(&self, blocks: &[BlockId]) -> Result<()> {
        let gate = self
            .core
            .call(|state, now, id| state.machine.retract(now, id, blocks))?;
        let limit = Duration::from_millis(self.core.shared.config.deadlines.retract_ms_max);
        let began = Instant::now();
        let mut looks = 0u32;
        while !gate.fenced() {
            if began.elapsed() >= limit {
                return Err(Error::new(ErrorKind::DeadlineExceeded, "retract")
                    .because(format!("a read of the blocks did not end within {limit:?}"))
                    .remedy("do not reuse the blocks until the offer has ended")
                    .destination_is(Destination::Quarantined));
            }
            // A read is one non-blocking call: yield first, then sleep.
            looks += 1;
            if looks < 64 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    /// Ends the offer `Cancelled`. Its blocks may be reused once [`released`](Self::released) says so.
    pub fn cancel(&self) {
        self.core.cancel();
    }

    /// The end: the source blocks may be reused, with each claim's verdict.
    pub fn released(&self) -> &Completion<Release> {
        &self.core.completion
    }

    /// Lets the offer go on without its handle.
    pub fn detach(self) {
        self.core.detach();
    }

    /// What the open offer waits for, and since when.
    pub fn waiting_on(&self) -> Option<WaitingOn> {
        self.core.waiting_on()
    }

    /// The number that the offer's events carry.
    pub fn id(&self) -> HandleId {
        self.core.id
    }

    pub(crate) fn new(core: Core<Release>, layout: Arc<PoolLayout>) -> Offer {
        Offer { core, layout }
    }

    pub(crate) fn is_of(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.core.shared, shared)
    }

    pub(crate) fn layer_range(&self, layers: impl RangeBounds<u16>) -> (u16, u16) {
        let count = u16::try_from(self.layout.layers().len()).unwrap_or(u16::MAX);
        let from = match layers.start_bound() {
            Bound::Included(&from) => from,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let to = match layers.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&to) => to,
            Bound::Unbounded => count,
        };
        (from, to)
    }
}

/// A request's KV, wanted from the endpoints that offer its key.
#[derive(Debug)]
pub struct Claim {
    core: Core<Arrival>,
}

impl Claim {
    /// Says where the bytes go: per cache group the tokens wanted and the blocks for them. Tokens that are held
    /// already are simply not selected.
    ///
    /// # Errors
    /// `InvalidArgument` and `OutOfBounds` for a selection that does not fit the pool, or a second call; `Busy` without
    /// a free slot.
    pub fn fill(&self, selection: Selection) -> Result<()> {
        self.core
            .call(|state, now, id| state.machine.claim_into(now, id, selection))
    }

    /// Ends the claim before it is filled: `Declined` at both sides. No-op after that.
    pub fn decline(&self) {
        // What it could refuse is a claim that has ended or is filled: then there is nothing to decline.
        let declined = self.core.call(|state, now, id| state.machine.decline(now, id));
        if let Err(error) = declined {
            tracing::debug!(%error, "decline");
        }
    }

    /// Ends the claim `Cancelled`. Its blocks may be reused once [`arrived`](Self::arrived) says so.
    pub fn cancel(&self) {
        self.core.cancel();
    }

    /// Lets a CUDA stream wait, from its present end on, until the claim has ended: arrived or not, which
    /// [`arrived`](Self::arrived) says. Kernels that are queued behind it read the blocks after the arrival. The stream
    /// goes on at once if the claim has ended, and in any case at its deadline or when the endpoint is closed.
    ///
    /// A stream that waits can hold up others of its context: the device has few queues. What makes the claim end must
    /// not be queued behind it.
    ///
    /// # Errors
    /// `InvalidArgument` inside a stream capture, `Unsupported` without a driver or one that has no such waits, `Busy` if
    /// too many streams wait.
    ///
    /// # Safety
    /// `stream` is a live `CUstream` (or `cudaStream_t`; null is the default stream).
    pub unsafe fn hold_stream(&self, stream: *mut c_void) -> Result<()> {
        if self.core.completion.ended() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        let hold = unsafe { self.core.shared.cuda()?.hold_stream(stream) }?;
        self.core.call(|state, _, id| {
            // Dropped, the stream goes on: the claim has ended meanwhile.
            if let Some(entry) = state.handles.get_mut(&id) {
                entry.streams.push(hold);
            }
        });
        Ok(())
    }

    /// The end: every byte selected is in place; or none lands any more.
    pub fn arrived(&self) -> &Completion<Arrival> {
        &self.core.completion
    }

    /// Lets the claim go on without its handle.
    pub fn detach(self) {
        self.core.detach();
    }

    /// What the open claim waits for, and since when.
    pub fn waiting_on(&self) -> Option<WaitingOn> {
        self.core.waiting_on()
    }

    /// The number that the claim's events carry.
    pub fn id(&self) -> HandleId {
        self.core.id
    }

    pub(crate) fn new(core: Core<Arrival>) -> Claim {
        Claim { core }
    }
}

/// The owner's side of a grant.
#[derive(Debug)]
pub struct GrantHandle {
    core: Core<Arrival>,
    grant: Grant,
}

impl GrantHandle {
    /// What to hand to the peer that shall use it: [`Grant::to_bytes`] makes it portable.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// The end: the blocks are written (or have been read), once.
    pub fn arrived(&self) -> &Completion<Arrival> {
        &self.core.completion
    }

    /// Ends the grant `Cancelled`. Its blocks may be reused once [`arrived`](Self::arrived) says so.
    pub fn cancel(&self) {
        self.core.cancel();
    }

    /// Lets the grant live on without its handle.
    pub fn detach(self) {
        self.core.detach();
    }

    /// What the open grant waits for, and since when.
    pub fn waiting_on(&self) -> Option<WaitingOn> {
        self.core.waiting_on()
    }

    /// The number that the grant's events carry.
    pub fn id(&self) -> HandleId {
        self.core.id
    }

    pub(crate) fn new(core: Core<Arrival>, grant: Grant) -> GrantHandle {
        GrantHandle { core, grant }
    }
}

/// A push or a pull under way.
#[derive(Debug)]
pub struct Transfer {
    core: Core<Delivery>,
    peer: Incarnation,
}

impl Transfer {
    /// The end: the bytes are in the destination's memory; or the transfer failed.
    pub fn done(&self) -> &Completion<Delivery> {
        &self.core.completion
    }

    /// Ends the transfer `Cancelled`.
    pub fn cancel(&self) {
        self.core.cancel();
    }

    /// The way the bytes take: transport and rails. `None` while there is no link to the peer.
    pub fn path(&self) -> Option<Path> {
        self.core.shared.path(self.peer)
    }

    /// Lets the transfer go on without its handle.
    pub fn detach(self) {
        self.core.detach();
    }

    /// What the open transfer waits for, and since when.
    pub fn waiting_on(&self) -> Option<WaitingOn> {
        self.core.waiting_on()
    }

    /// The number that the transfer's events carry.
    pub fn id(&self) -> HandleId {
        self.core.id
    }

    pub(crate) fn new(core: Core<Delivery>, peer: Incarnation) -> Transfer {
        Transfer { core, peer }
    }
}

/// The kinds of handles, for counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleKind {
    Offer,
    Claim,
    Grant,
    Push,
    Pull,
}

impl HandleKind {
    pub(crate) const ALL: [HandleKind; 5] = [
        HandleKind::Offer,
        HandleKind::Claim,
        HandleKind::Grant,
        HandleKind::Push,
        HandleKind::Pull,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            HandleKind::Offer => "offer",
            HandleKind::Claim => "claim",
            HandleKind::Grant => "grant",
            HandleKind::Push => "push",
            HandleKind::Pull => "pull",
        }
    }
}

/// An open handle, from the control plane's side.
pub(crate) struct Entry {
    pub(crate) kind: HandleKind,
    pub(crate) sink: Sink,
    pub(crate) events: Option<Arc<EventSource>>,
    /// An event is waited for as much as anything.
    pub(crate) _waiting: Option<Waiting>,
    /// Streams that go on when the handle ends, however it does.
    pub(crate) streams: Vec<StreamHold>,
    pub(crate) opened: Time,
}

/// Where an outcome goes.
pub(crate) enum Sink {
    Release(Completer<Release>),
    Arrival(Completer<Arrival>),
    Delivery(Completer<Delivery>),
}

impl Sink {
    /// Delivers. `None` if it had ended before.
    pub(crate) fn complete(&self, result: Result<Outcome>) -> Option<Wakers> {
        match self {
            Sink::Release(completer) => completer.complete(result.and_then(|outcome| match outcome {
                Outcome::Released { members } => Ok(Release { members }),
                other => Err(mismatch(&other)),
            })),
            Sink::Arrival(completer) => completer.complete(result.and_then(|outcome| match outcome {
                Outcome::Arrived { bytes } => Ok(Arrival { bytes, message: None }),
                Outcome::Granted { bytes, message } => Ok(Arrival { bytes, message }),
                other => Err(mismatch(&other)),
            })),
            Sink::Delivery(completer) => completer.complete(result.and_then(|outcome| match outcome {
                Outcome::Transferred { bytes } => Ok(Delivery { bytes }),
                other => Err(mismatch(&other)),
            })),
        }
    }
}

fn mismatch(outcome: &Outcome) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("a handle ended as another kind: {outcome:?}"),
    )
    .remedy("please report this")
}

/// Completes a grant on the data thread that placed its last byte: no hop through the control thread.
pub(crate) struct GrantWatcher {
    pub(crate) completer: Completer<Arrival>,
    pub(crate) bytes: u64,
    pub(crate) events: Option<GrantEvents>,
}

/// Where a grant's end is told.
pub(crate) struct GrantEvents {
    pub(crate) queue: Arc<EventQueue>,
    pub(crate) source: Arc<EventSource>,
    /// The handle's number, known only once the grant is open, which may be after its first byte.
    pub(crate) id: Arc<OnceLock<HandleId>>,
}

impl SlotWatcher for GrantWatcher {
    fn arrived(&self, message: Option<Arc<[u8]>>) {
        let wakers = self.completer.complete(Ok(Arrival {
            bytes: self.bytes,
            message,
        }));
        let Some(mut wakers) = wakers else { return };
        seen_to();
        wakers.release();
        if let Some(events) = &self.events
            && let Some(id) = events.id.get()
        {
            events.queue.ended(&events.source, *id, None);
        }
        wakers.wake();
    }
}

/// What all handles have.
pub(crate) struct Core<T> {
    shared: Arc<Shared>,
    id: HandleId,
    completion: Completion<T>,
    detached: AtomicBool,
}

impl<T> Core<T> {
    pub(crate) fn new(shared: Arc<Shared>, id: HandleId, completion: Completion<T>) -> Core<T> {
        Core {
            shared,
            id,
            completion,
            detached: AtomicBool::new(false),
        }
    }
}

impl<T> Core<T> {
    pub(crate) fn id(&self) -> HandleId {
        self.id
    }

    fn call<R>(&self, decide: impl FnOnce(&mut State, Time, HandleId) -> R) -> R {
        self.shared.call(|state, now| decide(state, now, self.id))
    }

    fn cancel(&self) {
        self.call(|state, now, id| state.machine.cancel(now, id));
    }

    fn waiting_on(&self) -> Option<WaitingOn> {
        self.shared.look(|state| state.machine.waiting_on(self.id))
    }

    fn detach(&self) {
        self.detached.store(true, Ordering::Relaxed);
    }
}

impl<T> Drop for Core<T> {
    fn drop(&mut self) {
        if !self.detached.load(Ordering::Relaxed) && !self.completion.ended() {
            self.cancel();
        }
    }
}

impl<T> std::fmt::Debug for Core<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?}", self.id, self.completion)
    }
}
