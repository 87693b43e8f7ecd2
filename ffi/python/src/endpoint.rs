//! The endpoint.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvxfer::config::Security;
use kvxfer::{ClaimOptions, Config, ErrorKind, OfferOptions, PeerState, PullOptions, PushOptions};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use rustix::event::{EventfdFlags, eventfd};

use crate::address::{EndpointAddress, Grant, Rank, address};
use crate::arguments::{Key, Seconds, U8, U16, U32, U64, U128, type_name};
use crate::error::{exception, invalid, raise};
use crate::events::Events;
use crate::exit::{self, without_lock};
use crate::fork::Local;
use crate::handle::{Claim, Offer, Transfer};
use crate::layout::Layout;
use crate::memory::{region, with_bytes};
use crate::pool::Pool;
use crate::selection::target;
use crate::warn;

/// What closing may take if nothing is said.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// What an exception waits for the endpoint that it leaves: enough for closing in all but bad cases.
const EXCEPTION_WAITS: Duration = Duration::from_millis(250);

/// An endpoint and what tells its end.
pub(crate) struct Core {
    pub(crate) endpoint: kvxfer::Endpoint,
    /// Readable once the endpoint is closed: what ends iterations over its events.
    pub(crate) closed_signal: OwnedFd,
    closed: AtomicBool,
}

impl Core {
    pub(crate) fn closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self, timeout: Duration) -> kvxfer::Result<()> {
        let result = self.endpoint.close(timeout);
        if !self.closed.swap(true, Ordering::AcqRel) {
            // The counter is 0: it cannot fail.
            let _ = rustix::io::write(&self.closed_signal, &1u64.to_ne_bytes());
        }
        result
    }
}

/// One process's half of the library, usually one tensor-parallel rank.
///
/// `config` is `None` (the defaults with the `KVXFER_*` variables over them), a TOML text, a `pathlib.Path` to a TOML
/// file, or a nested dict; the other arguments go over it. An endpoint that is collected while open is closed, with a
/// `ResourceWarning`; use it as a context manager or call `close`. If the body of `with` raised, its exception is not
/// kept waiting: closing goes on behind it.
#[pyclass(frozen, module = "kvxfer", name = "Endpoint", weakref)]
pub(crate) struct Endpoint {
    core: Local<Arc<Core>>,
    name: String,
    incarnation: String,
    address: EndpointAddress,
}

impl Endpoint {
    fn open(&self) -> PyResult<&kvxfer::Endpoint> {
        Ok(&self.core.get()?.endpoint)
    }

    /// What parts and pushes shall wait for.
    fn captured(&self, py: Python<'_>, event: Option<&Bound<'_, PyAny>>) -> PyResult<Option<kvxfer::After>> {
        let endpoint = self.open()?;
        // SAFETY: a live event, as the documentation asks for; null is refused.
        crate::cuda::after(py, event, |event| unsafe {
            endpoint.after_cuda_event(event as *mut c_void)
        })
    }

    /// Closes on a thread of its own, so that Ctrl-C is heard here; waits at most `patience`.
    fn begin_close(
        &self,
        py: Python<'_>,
        timeout: Duration,
        patience: Option<Duration>,
    ) -> PyResult<Option<kvxfer::Result<()>>> {
        let core = Arc::clone(self.core.get()?);
        exit::beside(py, patience, move || core.close(timeout))
    }
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (name = None, listen = None, transports = None, security = None, rank = None, config = None))]
    fn new(
        py: Python<'_>,
        name: Option<String>,
        listen: Option<&Bound<'_, PyAny>>,
        transports: Option<&Bound<'_, PyAny>>,
        security: Option<&Bound<'_, PyDict>>,
        rank: Option<&Bound<'_, Rank>>,
        config: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Endpoint> {
        let mut builder = kvxfer::Endpoint::builder();
        let mut settings = match config {
            None => Config::from_env().map_err(raise)?,
            Some(config) => read_config(config)?,
        };
        if let Some(security) = security {
            settings.security = read_security(security, settings.security)?;
        }
        builder = builder.config(settings);
        if let Some(name) = name {
            builder = builder.name(name);
        }
        for text in listen.map(texts).transpose()?.into_iter().flatten() {
            builder = builder.listen(text.parse().map_err(|_| {
                invalid(
                    format!("listen address {text:?}"),
                    "it is not an IP address with a port",
                    "write 127.0.0.1:7700, [::1]:0 or 0.0.0.0:7700",
                )
            })?);
        }
        if let Some(transports) = transports {
            builder = builder.transports(texts(transports)?);
        }
        if let Some(rank) = rank {
            builder = builder.rank(rank.get().inner);
        }
        let endpoint = without_lock(py, || builder.build()).map_err(raise)?;
        let closed_signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            raise(kvxfer::Error::new(ErrorKind::ResourceExhausted, "eventfd").because(errno.to_string()))
        })?;
        let (name, incarnation) = (endpoint.name().to_owned(), endpoint.incarnation().to_string());
        let address = EndpointAddress {
            inner: endpoint.address(),
        };
        let core = Arc::new(Core {
            endpoint,
            closed_signal,
            closed: AtomicBool::new(false),
        });
        exit::remember(&core);
        Ok(Endpoint {
            core: Local::new(core),
            name,
            incarnation,
            address,
        })
    }

    /// Its label.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Its identity, new at every start: 32 hexadecimal digits.
    #[getter]
    fn incarnation(&self) -> &str {
        &self.incarnation
    }

    /// What to publish so that others find this endpoint.
    #[getter]
    fn address(&self) -> EndpointAddress {
        self.address.clone()
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(self.core.get()?.closed.load(Ordering::Acquire))
    }

    /// Makes the session and the link to a peer ahead of the first transfer, and waits for them at most `timeout`
    /// seconds.
    #[pyo3(signature = (address, timeout = Seconds(Duration::from_secs(10))), text_signature = "($self, address, timeout=10.0)")]
    fn connect(&self, py: Python<'_>, address: &Bound<'_, PyAny>, timeout: Seconds) -> PyResult<()> {
        let address = crate::address::address(address)?;
        let core = Arc::clone(self.core.get()?);
        let connected = exit::beside(py, None, move || core.endpoint.connect(&address, timeout.0))?;
        let answered = connected.unwrap_or_else(|| {
            Err(kvxfer::Error::new(ErrorKind::Internal, "connecting").because("a wait without a limit was over"))
        });
        answered.map_err(raise)
    }

    /// The path to a peer in words: session, transport, rails, and why better ones were not taken.
    fn explain(&self, address: &Bound<'_, PyAny>) -> PyResult<String> {
        let address = crate::address::address(address)?;
        Ok(self.open()?.explain(&address))
    }

    /// What is known of peers with a session, and of those lost lately.
    fn peers(&self, py: Python<'_>) -> PyResult<Vec<PeerInfo>> {
        let peers = self.open()?.peers();
        peers.into_iter().map(|peer| PeerInfo::new(py, peer)).collect()
    }

    /// Counters, gauges and histograms as Prometheus text.
    fn metrics(&self) -> PyResult<String> {
        Ok(self.open()?.metrics())
    }

    /// The events of handles opened with `events=number`.
    #[getter]
    fn events(&self) -> PyResult<Events> {
        Ok(Events::new(self.core.get()?))
    }

    /// Makes memory of the caller's known as a pool: one region for each that the layout declares.
    ///
    /// A region is anything with the buffer protocol, a numpy array or torch tensor, anything with `__dlpack__` or
    /// `__cuda_array_interface__`, or `(address, length[, owner])`, or a `MemoryRegion`, whose `device` may be `"cuda"`. It is kept alive until the pool has gone. While transfers are under way other
    /// threads read it and, where claims and grants say so, write it.
    #[pyo3(signature = (layout, regions, role))]
    fn register(
        &self,
        py: Python<'_>,
        layout: &Bound<'_, Layout>,
        regions: &Bound<'_, PyAny>,
        role: &str,
    ) -> PyResult<Pool> {
        let role = crate::pool::role(role)?;
        let writable = role != kvxfer::Role::Serve;
        if !(regions.is_instance_of::<PyList>() || regions.is_instance_of::<PyTuple>()) {
            return Err(PyTypeError::new_err(format!(
                "regions are a list, one for each that the layout declares, not {}",
                type_name(regions)
            )));
        }
        let given = regions.try_iter()?;
        let given = given
            .map(|given| region(self.open()?, &given?, writable))
            .collect::<PyResult<Vec<_>>>()?;
        let endpoint = self.open()?;
        let declared = layout.get().inner.clone();
        // SAFETY: the regions keep their owners, so the memory stays mapped; what the application must not do to
        // blocks that are being moved is in the documentation of this call, as it is in Rust's.
        let pool = without_lock(py, || unsafe { endpoint.register(declared, given, role) }).map_err(raise)?;
        Ok(Pool::new(pool, layout, &self.name))
    }

    /// A pool in zeroed host memory of the library's own, of the sizes that the layout declares.
    #[pyo3(signature = (layout, role))]
    fn allocate(&self, py: Python<'_>, layout: &Bound<'_, Layout>, role: &str) -> PyResult<Pool> {
        let role = crate::pool::role(role)?;
        let endpoint = self.open()?;
        let declared = layout.get().inner.clone();
        let pool = without_lock(py, || endpoint.allocate(declared, role)).map_err(raise)?;
        Ok(Pool::new(pool, layout, &self.name))
    }

    /// Offers a request's KV under a key of at most 256 bytes, before or after it is claimed. `deadline` is in
    /// seconds; with `events=number` its events carry that number.
    #[pyo3(signature = (key, pool, readers = U16(1), deadline = None, priority = U8(0), checksum = false, events = None),
           text_signature = "($self, key, pool, readers=1, deadline=None, priority=0, checksum=False, events=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn offer(
        &self,
        py: Python<'_>,
        key: Key<'_>,
        pool: &Bound<'_, Pool>,
        readers: U16,
        deadline: Option<Seconds>,
        priority: U8,
        checksum: bool,
        events: Option<U64>,
    ) -> PyResult<Py<Offer>> {
        let options = OfferOptions {
            readers: readers.0,
            deadline: crate::arguments::deadline(deadline),
            priority: priority.0,
            checksum,
            events: events.map(|events| events.0),
        };
        let offer = self.open()?.offer(&key.0, pool.get().open()?, options).map_err(raise)?;
        Offer::new(py, offer)
    }

    /// `Offer.ready` for a whole step of several requests, with one look at the control plane: a list of
    /// `(offer, first_token, token_end, layers)`, where `layers` is `None` for all or `(first, end)`. Parts before a
    /// refused one are released, those after it are not.
    /// One `after` is for all of them, as `Offer.ready` takes it.
    #[pyo3(signature = (parts, *, after = None))]
    fn ready_many(&self, parts: &Bound<'_, PyAny>, after: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let endpoint = self.open()?;
        let mut offers = Vec::new();
        for part in parts.try_iter()? {
            let part = part?;
            let (offer, first, end, layers): (Bound<'_, Offer>, U32, U32, Option<(U16, U16)>) = part.extract()?;
            offers.push((offer, first.0..end.0, crate::handle::layer_range(layers)));
        }
        let offers = offers
            .iter()
            .map(|(offer, tokens, layers)| Ok((crate::handle::offer(offer)?, tokens.clone(), *layers)))
            .collect::<PyResult<Vec<_>>>()?;
        match self.captured(parts.py(), after)? {
            None => endpoint.ready_many(&offers),
            Some(after) => endpoint.ready_many_after(&offers, &after),
        }
        .map_err(raise)
    }

    /// Claims a request's KV from all endpoints that hold some of it (addresses or their texts), before or after they
    /// offer it. Ranks of one reader give the same `set`, their number as `member` and how many of them contact each
    /// offer as `members`. With `pull` the destination asks for the bytes instead of being sent them.
    #[pyo3(signature = (key, pool, sources, set = None, member = U16(0), members = U16(1), deadline = None, pull = false, events = None),
           text_signature = "($self, key, pool, sources, set=None, member=0, members=1, deadline=None, pull=False, events=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn claim(
        &self,
        py: Python<'_>,
        key: Key<'_>,
        pool: &Bound<'_, Pool>,
        sources: &Bound<'_, PyAny>,
        set: Option<U128>,
        member: U16,
        members: U16,
        deadline: Option<Seconds>,
        pull: bool,
        events: Option<U64>,
    ) -> PyResult<Py<Claim>> {
        if sources.is_instance_of::<PyString>() || sources.is_instance_of::<EndpointAddress>() {
            return Err(PyTypeError::new_err("sources are a list of addresses, not one"));
        }
        let sources = sources.try_iter()?;
        let sources = sources.map(|source| address(&source?)).collect::<PyResult<Vec<_>>>()?;
        let options = ClaimOptions {
            set: set.map(|set| set.0),
            member: member.0,
            members: members.0,
            deadline: crate::arguments::deadline(deadline),
            pull,
            events: events.map(|events| events.0),
        };
        let claim = self
            .open()?
            .claim(&key.0, pool.get().open()?, &sources, options)
            .map_err(raise)?;
        Claim::new(py, claim)
    }

    /// Writes blocks of ours into the blocks of a grant, with an optional message (bytes, at most 64 KiB); with `after`,
    /// once a CUDA event has happened, as `Offer.ready` takes it.
    #[pyo3(signature = (pool, source, grant, message = None, priority = U8(0), deadline = None, checksum = false, events = None, *, after = None),
           text_signature = "($self, pool, source, grant, message=None, priority=0, deadline=None, checksum=False, events=None, *, after=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn push(
        &self,
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        source: &Bound<'_, PyAny>,
        grant: &Bound<'_, Grant>,
        message: Option<&Bound<'_, PyAny>>,
        priority: U8,
        deadline: Option<Seconds>,
        checksum: bool,
        events: Option<U64>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<Transfer>> {
        let options = PushOptions {
            after: self.captured(py, after)?,
            message: message
                .map(|message| with_bytes(message, |bytes| Arc::from(bytes)))
                .transpose()?,
            priority: priority.0,
            deadline: crate::arguments::deadline(deadline),
            checksum,
            events: events.map(|events| events.0),
        };
        let source = target(source)?;
        let transfer = self
            .open()?
            .push(pool.get().open()?, source, &grant.get().inner, options)
            .map_err(raise)?;
        Transfer::new(py, transfer)
    }

    /// Reads the blocks of a grant to read into blocks of ours.
    #[pyo3(signature = (grant, pool, destination, priority = U8(0), deadline = None, checksum = false, events = None),
           text_signature = "($self, grant, pool, destination, priority=0, deadline=None, checksum=False, events=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn pull(
        &self,
        py: Python<'_>,
        grant: &Bound<'_, Grant>,
        pool: &Bound<'_, Pool>,
        destination: &Bound<'_, PyAny>,
        priority: U8,
        deadline: Option<Seconds>,
        checksum: bool,
        events: Option<U64>,
    ) -> PyResult<Py<Transfer>> {
        let options = PullOptions {
            priority: priority.0,
            deadline: crate::arguments::deadline(deadline),
            checksum,
            events: events.map(|events| events.0),
        };
        let destination = target(destination)?;
        let transfer = self
            .open()?
            .pull(&grant.get().inner, pool.get().open()?, destination, options)
            .map_err(raise)?;
        Transfer::new(py, transfer)
    }

    /// Takes no new work, tells peers so, and waits at most `timeout` seconds until what is open has ended.
    fn drain(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let endpoint = self.open()?;
        let drained = exit::wait(py, Some(timeout.0), |slice| match endpoint.drain(slice) {
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => None,
            result => Some(result),
        })?;
        match drained {
            Some(result) => result.map_err(raise),
            // Asked once more without waiting, for the message.
            None => endpoint.drain(Duration::ZERO).map_err(raise),
        }
    }

    /// Ends every handle with `Closed`, tells peers, and stops all threads; waits at most `timeout` seconds for what
    /// is under way. A second call does nothing.
    #[pyo3(signature = (timeout = Seconds(CLOSE_TIMEOUT)), text_signature = "($self, timeout=5.0)")]
    fn close(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        match self.begin_close(py, timeout.0, None)? {
            Some(result) => result.map_err(raise),
            None => Ok(()),
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if exit::raised(exception) {
            // What the body raised says more than how closing went.
            self.begin_close(py, CLOSE_TIMEOUT, Some(EXCEPTION_WAITS))?;
            return Ok(());
        }
        self.close(py, Seconds(CLOSE_TIMEOUT))
    }

    fn __repr__(&self) -> String {
        let state = match self.core.here() {
            None => " (of the parent process)",
            Some(core) if core.closed.load(Ordering::Acquire) => " (closed)",
            Some(_) => "",
        };
        format!("<kvxfer.Endpoint {} {}{state}>", self.name, self.address.inner)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let Some(core) = self.core.here() else { return };
        if core.closed.load(Ordering::Acquire) {
            return;
        }
        warn::resource(&format!(
            "endpoint {} was not closed: use it as a context manager or call close()",
            self.name
        ));
        // Its threads are stopped here, without the interpreter's lock: for at most what dropping takes in Rust.
        Python::attach(|py| without_lock(py, || core.close(Duration::from_secs(1)))).unwrap_or_default();
    }
}

/// A peer, for people.
#[pyclass(frozen, module = "kvxfer", name = "PeerInfo", get_all)]
pub(crate) struct PeerInfo {
    /// Its identity.
    incarnation: String,
    /// Its label.
    name: String,
    /// Where it listens, once it has said so.
    address: Option<EndpointAddress>,
    /// "ready", "interrupted", "draining" or "lost".
    state: &'static str,
    /// Why it is interrupted or lost, in words.
    reason: Option<String>,
    /// The error that it was lost with.
    error: Option<Py<PyAny>>,
    /// The transport taken.
    transport: Option<String>,
}

impl PeerInfo {
    fn new(py: Python<'_>, peer: kvxfer::PeerInfo) -> PyResult<PeerInfo> {
        let (state, reason, error) = match &peer.state {
            PeerState::Ready => ("ready", None, None),
            PeerState::Interrupted { why } => ("interrupted", Some(why.clone()), None),
            PeerState::Draining => ("draining", None, None),
            PeerState::Lost(error) => ("lost", Some(error.to_string()), Some(exception(py, error)?.unbind())),
            _ => ("other", None, None),
        };
        Ok(PeerInfo {
            incarnation: peer.incarnation.to_string(),
            name: peer.name,
            address: peer.address.map(|inner| EndpointAddress { inner }),
            state,
            reason,
            error,
            transport: peer.transport,
        })
    }
}

#[pymethods]
impl PeerInfo {
    fn __repr__(&self) -> String {
        format!("<kvxfer.PeerInfo {} ({}): {}>", self.name, self.incarnation, self.state)
    }
}

/// One text, or a list of them.
fn texts(object: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if object.is_instance_of::<PyString>() {
        return Ok(vec![object.extract()?]);
    }
    object.extract()
}

fn read_config(config: &Bound<'_, PyAny>) -> PyResult<Config> {
    if config.is_instance_of::<PyString>() {
        let text: String = config.extract()?;
        return Config::from_toml_str(&text).map_err(raise);
    }
    if let Ok(settings) = config.cast::<PyDict>() {
        let table = crate::settings::table(settings)?;
        return Config::from_toml_str(&table).map_err(raise);
    }
    if config.hasattr("__fspath__")? {
        let path: std::path::PathBuf = config.extract()?;
        return Config::from_toml_file(path).map_err(raise);
    }
    Err(PyTypeError::new_err(format!(
        "a configuration is a TOML text, a pathlib.Path or a dict, not {}",
        type_name(config)
    )))
}

fn read_security(given: &Bound<'_, PyDict>, mut security: Security) -> PyResult<Security> {
    for (key, value) in given {
        match key.extract::<String>()?.as_str() {
            "mode" => security.mode = value.extract()?,
            "off_loopback" => security.off_loopback = value.extract()?,
            other => {
                return Err(crate::layout::unknown(
                    "security setting",
                    other,
                    &["mode", "off_loopback"],
                ));
            }
        }
    }
    Ok(security)
}
