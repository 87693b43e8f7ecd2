//! The endpoint: one process's half of the library.

mod builder;
mod cuda;
mod explain;

use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use kvxfer_core::layout::PoolLayout;
use kvxfer_core::machine::HandleId;
use kvxfer_core::memory::Region;
use kvxfer_core::plan::Target;
use kvxfer_core::wire::{Access, EndpointAddress, Grant};
use kvxfer_core::{Error, ErrorKind, Incarnation, PoolId, Result, Time};

use crate::after::{self, After};
use crate::completion::{Completer, Completion, Waiting};
use crate::config::Config;
use crate::control::{PeerState, Phase, Shared, State, closed};
use crate::events::Events;
use crate::handle::{Claim, Core, Entry, HandleKind, Offer, Sink, Transfer};
use crate::options::{ClaimOptions, OfferOptions, PullOptions, PushOptions};
use crate::pool::{Pool, Role};
use crate::{metrics, random};

pub use builder::Builder;

/// How long dropping an endpoint that was not closed may take at most, apart from the transports' own bound.
const DROP_LIMIT: Duration = Duration::from_secs(1);

/// One process's half of the library, usually one tensor-parallel rank.
///
/// All calls can be made from any thread. Dropping it closes it, within a bounded time.
pub struct Endpoint {
    shared: Arc<Shared>,
    control: Mutex<Option<JoinHandle<()>>>,
    closing: Mutex<Closing>,
    has_closed: Condvar,
}

/// How far an endpoint's end is.
#[derive(Debug, Clone)]
pub(crate) enum Closing {
    Open,
    /// This thread is at it.
    By(ThreadId),
    Closed(Result<()>),
}

/// A peer, for people.
#[derive(Debug, Clone)]
pub struct PeerInfo {
    /// Who.
    pub incarnation: Incarnation,
    /// Its label.
    pub name: String,
    /// Where it listens, once it has said so.
    pub address: Option<EndpointAddress>,
    /// How its session stands.
    pub state: PeerState,
    /// The transport taken.
    pub transport: Option<String>,
}

impl Endpoint {
    /// An endpoint to be configured and built.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// What to publish so that others find this endpoint.
    pub fn address(&self) -> EndpointAddress {
        self.shared.address.clone()
    }

    /// Its identity: new at every start.
    pub fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// Its label.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its settings.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Makes memory of the caller's known as a pool: one region for each that the layout declares.
    ///
    /// # Errors
    /// `InvalidArgument` and `OutOfBounds` if the regions are not what the layout declares, and whatever a transport
    /// refuses, with the limit and the need.
    ///
    /// # Safety
    /// While the pool lives and after that until all handles on it have ended, transports read and, where claims and
    /// grants say so, write the regions' memory on other threads. The caller must uphold the contract of
    /// [`Region::from_raw`] for as long, must not read blocks that are being written nor write blocks that are
    /// being read, and must treat a block as its own again only once the handle that named it has ended without
    /// [`Destination::Quarantined`](kvxfer_core::error::Destination::Quarantined).
    pub unsafe fn register(&self, layout: PoolLayout, regions: Vec<Arc<Region>>, role: Role) -> Result<Pool> {
        Pool::register(&self.shared, layout, regions, role)
    }

    /// A pool in zeroed host memory of ours, of the sizes that the layout declares.
    ///
    /// # Errors
    /// `ResourceExhausted` without memory; and as [`register`](Self::register).
    pub fn allocate(&self, layout: PoolLayout, role: Role) -> Result<Pool> {
        let regions = layout.region_lengths().iter().map(|&length| Region::allocate(length));
        let regions = regions.collect::<Result<Vec<_>>>()?;
        Pool::register(&self.shared, layout, regions, role)
    }

    /// Offers a request's KV under a key of at most 256 bytes, before or after it is claimed.
    ///
    /// A key is for one hand-over: ended keys are remembered for `deadlines.ended_keys_retention_ms`, so that a late claim
    /// hears how its offer ended, and a key used again meets that end. [`Offer::restart`] begins anew under the same key.
    ///
    /// # Errors
    /// `DuplicateKey` if a live offer has the key, `InvalidArgument` for the key or options, `Busy` at a limit.
    pub fn offer(&self, key: impl AsRef<[u8]>, pool: &Pool, options: OfferOptions) -> Result<Offer> {
        let id = self.own(pool)?;
        let core = self.open(HandleKind::Offer, options.events, Sink::Release, |state, now| {
            state.machine.offer(now, key.as_ref(), id, options.machine())
        })?;
        tracing::debug!(handle = core.id().0, key = %shown(key.as_ref()), "offer opened");
        Ok(Offer::new(core, Arc::clone(&pool.inner.layout)))
    }

    /// [`Offer::ready`] for a whole step of several requests, with one look at the control plane.
    ///
    /// # Errors
    /// `InvalidArgument`, and nothing is ready, if an offer is another endpoint's; else the first refusal: offers before
    /// it are ready, those after it are not.
    pub fn ready_many<L>(&self, parts: &[(&Offer, std::ops::Range<u32>, L)]) -> Result<()>
    where
        L: std::ops::RangeBounds<u16> + Clone,
    {
        self.ready_all(parts, None)
    }

    /// [`ready_many`](Self::ready_many) for bytes that are there once something has happened: the end of the step's
    /// kernels, say.
    ///
    /// # Errors
    /// As [`ready_many`](Self::ready_many).
    pub fn ready_many_after<L>(&self, parts: &[(&Offer, std::ops::Range<u32>, L)], after: &After) -> Result<()>
    where
        L: std::ops::RangeBounds<u16> + Clone,
    {
        after.check(&self.shared.reports)?;
        self.ready_all(parts, Some(after))
    }

    fn ready_all<L>(&self, parts: &[(&Offer, std::ops::Range<u32>, L)], after: Option<&After>) -> Result<()>
    where
        L: std::ops::RangeBounds<u16> + Clone,
    {
        // Handles are numbered per endpoint: another's number would mean another offer here.
        if let Some(index) = parts.iter().position(|(offer, ..)| !offer.is_of(&self.shared)) {
            return Err(Error::new(ErrorKind::InvalidArgument, "an offer of another endpoint")
                .at(format!("part {index}, endpoint {}", self.name()))
                .because("a call looks at one endpoint's control plane")
                .remedy("release the parts of each endpoint's offers in a call of its own"));
        }
        self.shared.call(|state, now| {
            parts.iter().try_for_each(|(offer, tokens, layers)| {
                let layers = offer.layer_range(layers.clone());
                after::ready(state, now, offer.id(), (tokens.start, tokens.end), layers, after)
            })
        })
    }

    /// Claims a request's KV from all endpoints that hold some of it, before or after they offer it. The library finds
    /// out which of them sends what.
    ///
    /// # Errors
    /// `InvalidArgument` for the key, addresses or options, `Busy` at a limit. What peers say ends the claim.
    pub fn claim(
        &self,
        key: impl AsRef<[u8]>,
        pool: &Pool,
        sources: &[EndpointAddress],
        options: ClaimOptions,
    ) -> Result<Claim> {
        let id = self.own(pool)?;
        let own_set = match options.set {
            Some(set) => set,
            None => random::bits()?,
        };
        let core = self.open(HandleKind::Claim, options.events, Sink::Arrival, |state, now| {
            state
                .machine
                .claim(now, key.as_ref(), id, sources, options.machine(own_set))
        })?;
        tracing::debug!(handle = core.id().0, key = %shown(key.as_ref()), ?sources, "claim opened");
        Ok(Claim::new(core))
    }

    /// Writes blocks of ours into the blocks of a grant, with an optional message.
    ///
    /// # Errors
    /// `InvalidArgument`, `GeometryMismatch`, `StalePeer` and the like for what does not fit, `Busy` at a limit.
    pub fn push(
        &self,
        pool: &Pool,
        source: impl Into<Target>,
        grant: &Grant,
        options: PushOptions,
    ) -> Result<Transfer> {
        access(grant, Access::Write)?;
        let id = self.own(pool)?;
        let source: Target = source.into();
        let heavy = is_heavy(&source);
        let held = options.after.as_ref();
        held.map_or(Ok(()), |held| held.check(&self.shared.reports))?;
        let core = self.open_with(heavy, HandleKind::Push, options.events, Sink::Delivery, |state, now| {
            after::call(held, state, now, |state, event| {
                state.machine.push(now, id, source, grant, options.machine(event))
            })
        })?;
        tracing::debug!(handle = core.id().0, grant = %grant.name, "push opened");
        Ok(Transfer::new(core, grant.name.incarnation))
    }

    /// Reads the blocks of a grant to read into blocks of ours.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn pull(
        &self,
        grant: &Grant,
        pool: &Pool,
        destination: impl Into<Target>,
        options: PullOptions,
    ) -> Result<Transfer> {
        access(grant, Access::Read)?;
        let id = self.own(pool)?;
        let destination: Target = destination.into();
        let core = self.open(HandleKind::Pull, options.events, Sink::Delivery, |state, now| {
            state.machine.pull(now, grant, id, destination, options.machine())
        })?;
        tracing::debug!(handle = core.id().0, grant = %grant.name, "pull opened");
        Ok(Transfer::new(core, grant.name.incarnation))
    }

    /// The events of handles opened with `events: Some(..)`.
    pub fn events(&self) -> Events {
        Events::new(Arc::clone(&self.shared.events))
    }

    /// What is known of peers with a session, and of those lost lately.
    pub fn peers(&self) -> Vec<PeerInfo> {
        let mut peers: Vec<PeerInfo> = self.shared.look(|state| {
            let described = state.peers.iter().map(|(incarnation, peer)| PeerInfo {
                incarnation: *incarnation,
                name: peer.name.clone(),
                address: peer.address.clone(),
                state: peer.state.clone(),
                transport: peer.transport.clone(),
            });
            described.collect()
        });
        peers.sort_by_key(|peer| peer.incarnation);
        peers
    }

    /// Counters, gauges and histograms as Prometheus text; `docs/metrics.md` defines them.
    pub fn metrics(&self) -> String {
        let mut text = String::with_capacity(16 << 10);
        let gauges = self.shared.look(|state| state.machine.gauges());
        metrics::write_gauges(&mut text, &gauges);
        metrics::write_gauges(&mut text, &[("events_waiting", self.shared.events.depth() as u64)]);
        self.shared.metrics.write(&mut text);
        metrics::write_counters(&mut text, self.shared.transports.counters());
        if let Some(cuda) = self.shared.loaded_cuda() {
            metrics::write_counters(&mut text, cuda.counters());
        }
        text
    }

    /// Takes no new work, tells peers so, and waits until what is open has ended.
    ///
    /// # Errors
    /// `DeadlineExceeded` with the number of handles that are still open; they go on.
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        self.shared.call(|state, now| {
            if state.phase == Phase::Open {
                state.phase = Phase::Draining;
                state.machine.drain(now);
            }
        });
        if self.shared.wait_for(timeout, |state| state.handles.is_empty()) {
            return Ok(());
        }
        let open = self.shared.look(|state| state.handles.len());
        Err(Error::new(
            ErrorKind::DeadlineExceeded,
            format!("draining endpoint {}", self.name()),
        )
        .because(format!("{open} handles are still open after {timeout:?}"))
        .remedy("drain again, or close, which ends them"))
    }

    /// Ends every handle with `Closed`, tells peers, and stops all threads; waits at most `timeout` for fences. A
    /// second call does nothing.
    ///
    /// # Errors
    /// `DeadlineExceeded` if something was not fenced in time: the endpoint is closed all the same, and the handles
    /// concerned ended as quarantined.
    ///
    /// Several threads may call it: all but the first wait for its result.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        let began = Instant::now();
        let this = std::thread::current().id();
        let mut closing = self.closing.lock();
        loop {
            match &*closing {
                Closing::Open => break,
                Closing::Closed(result) => return result.clone(),
                // A waker of this very call: there is nothing to wait for.
                Closing::By(thread) if *thread == this => return Ok(()),
                Closing::By(_) => {
                    let left = timeout.saturating_sub(began.elapsed());
                    if left.is_zero() || self.has_closed.wait_for(&mut closing, left).timed_out() {
                        return Err(Error::new(
                            ErrorKind::DeadlineExceeded,
                            format!("closing endpoint {}", self.name()),
                        )
                        .because(format!("another thread is still closing it after {timeout:?}"))
                        .remedy("do not reuse its blocks before one of the two calls has returned Ok"));
                    }
                }
            }
        }
        *closing = Closing::By(this);
        drop(closing);
        let result = self.close_once(began, timeout);
        *self.closing.lock() = Closing::Closed(result.clone());
        self.has_closed.notify_all();
        result
    }

    fn close_once(&self, began: Instant, timeout: Duration) -> Result<()> {
        let shared = &self.shared;
        shared.call(|state, now| {
            state.phase = Phase::Closed;
            state.machine.shutdown(now);
        });
        // This thread takes turns itself, so that it does not depend on a runtime that the application may have blocked.
        // Counted from the beginning: an end could lie beyond what the clock can say.
        let mut pause = Duration::from_micros(50);
        let quiet = loop {
            while shared.turn(false) {}
            if shared.look(|state| state.handles.is_empty() && state.machine.is_quiet()) {
                break true;
            }
            if began.elapsed() >= timeout {
                break false;
            }
            shared.pause(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        };
        shared.linger();
        shared.stop();
        shared.transports.shutdown();
        // Whatever the data threads said last.
        while shared.turn(false) {}
        let mut error = closed(self.name());
        if !quiet {
            error = error.destination_is(kvxfer_core::error::Destination::Quarantined);
        }
        let left = shared.end_all(&error);
        if let Some(control) = self.control.lock().take()
            && control.thread().id() != std::thread::current().id()
        {
            let _ = control.join();
        }
        tracing::info!(endpoint = self.name(), quiet, "closed");
        if quiet {
            return Ok(());
        }
        Err(
            Error::new(ErrorKind::DeadlineExceeded, format!("closing endpoint {}", self.name()))
                .because(format!(
                    "not everything was fenced within {timeout:?}; {left} handles ended quarantined"
                ))
                .remedy("do not reuse the blocks of those handles"),
        )
    }

    /// The number of a pool of this endpoint. Numbers are per endpoint: another's would name different memory here.
    fn own(&self, pool: &Pool) -> Result<PoolId> {
        if Arc::ptr_eq(&pool.inner.shared, &self.shared) {
            return pool.inner.id();
        }
        Err(Error::new(
            ErrorKind::NotRegistered,
            format!("a pool of endpoint {}", pool.inner.shared.name),
        )
        .at(format!("endpoint {}", self.name()))
        .because("a pool belongs to the endpoint that it was registered with")
        .remedy("pass a pool of this endpoint, or register the memory here too"))
    }

    /// Opens a handle: reserves its event places, lets the machine decide, and registers where its end goes.
    fn open<T>(
        &self,
        kind: HandleKind,
        events: Option<u64>,
        sink: impl FnOnce(Completer<T>) -> Sink,
        decide: impl FnOnce(&mut State, Time) -> Result<HandleId>,
    ) -> Result<Core<T>> {
        self.open_with(false, kind, events, sink, decide)
    }

    fn open_with<T>(
        &self,
        heavy: bool,
        kind: HandleKind,
        events: Option<u64>,
        sink: impl FnOnce(Completer<T>) -> Sink,
        decide: impl FnOnce(&mut State, Time) -> Result<HandleId>,
    ) -> Result<Core<T>> {
        let shared = &self.shared;
        let hurries = matches!(kind, HandleKind::Push).then(|| Arc::clone(&shared.reports));
        let (completion, completer) = Completion::new(hurries.clone());
        let source = events.map(|data| shared.events.reserve(data));
        let waiting = source.as_ref().and(hurries.as_ref()).map(Waiting::new);
        let reserved = source.is_some();
        let register = |state: &mut State, now: Time| {
            let id = decide(state, now)?;
            let entry = Entry {
                kind,
                sink: sink(completer),
                events: source,
                _waiting: waiting,
                streams: Vec::new(),
                opened: now,
            };
            state.handles.insert(id, entry);
            Ok(id)
        };
        let opened = match heavy {
            true => shared.begin_heavy(register),
            false => shared.begin(register),
        };
        let id = opened.inspect_err(|_| {
            if reserved {
                shared.events.unreserve();
            }
        })?;
        shared.metrics.handle_opened(kind);
        Ok(Core::new(Arc::clone(shared), id, completion))
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Err(error) = self.close(DROP_LIMIT) {
            tracing::warn!(endpoint = self.name(), %error, "dropped");
        }
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({} {:?})", self.name(), self.incarnation())
    }
}

/// A key in the log: text if it is, and not all of a long one.
fn shown(key: &[u8]) -> impl std::fmt::Display + '_ {
    key[..key.len().min(64)].escape_ascii()
}

/// Whether a push is large enough that one hop to the control thread does not matter to it.
fn is_heavy(source: &Target) -> bool {
    /// Blocks of one request: at 160 planes of 8 KiB each, 40 MB.
    const HEAVY_BLOCKS: usize = 32;
    match source {
        Target::Selection { selection, .. } => {
            selection.groups.iter().map(|group| group.blocks.len()).sum::<usize>() >= HEAVY_BLOCKS
        }
        Target::Descriptors(descriptors) => descriptors.len() >= HEAVY_BLOCKS,
    }
}

/// A grant is for one direction only.
fn access(grant: &Grant, wanted: Access) -> Result<()> {
    if grant.access == wanted {
        return Ok(());
    }
    let (what, remedy) = match wanted {
        Access::Write => (
            "pushing into a grant to read",
            "pull from it, or ask its owner for a grant to write",
        ),
        Access::Read => (
            "pulling from a grant to write",
            "push into it, or ask its owner for a grant to read",
        ),
    };
    Err(Error::new(ErrorKind::InvalidArgument, what)
        .at(format!("grant {}", grant.name))
        .remedy(remedy))
}
