//! Events.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvxfer::EventKind;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::{Seconds, U64};
use crate::endpoint::Core;
use crate::exit;
use crate::fork::Local;

/// The events of an endpoint: a queue that cannot overflow, drained in batches. All views of one endpoint drain the
/// same queue. `async for event in endpoint.events` ends when the endpoint is closed.
#[pyclass(frozen, module = "kvxfer", name = "Events")]
pub(crate) struct Events {
    core: Local<Arc<Core>>,
    events: Local<kvxfer::Events>,
}

impl Events {
    pub(crate) fn new(core: &Arc<Core>) -> Events {
        Events {
            core: Local::new(Arc::clone(core)),
            events: Local::new(core.endpoint.events()),
        }
    }
}

#[pymethods]
impl Events {
    /// Takes up to `max` events, oldest first.
    #[pyo3(signature = (max = U64(1024)), text_signature = "($self, max=1024)")]
    fn drain(&self, max: U64) -> PyResult<Vec<Event>> {
        let mut events = Vec::new();
        let max = usize::try_from(max.0).unwrap_or(usize::MAX);
        self.events.get()?.drain(&mut events, max);
        Ok(events.into_iter().map(Event::new).collect())
    }

    /// A descriptor that polls readable while events wait. Only for `select`, `epoll` and the like: do not read or
    /// close it. It is the endpoint's.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.events.get()?.fd().as_raw_fd())
    }

    /// Blocks until an event waits, at most `timeout` seconds (`None`: for ever); whether one does.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<bool> {
        let (core, events) = (self.core.get()?, self.events.get()?);
        let closed = || core.closed();
        let found = exit::wait(py, timeout.map(|timeout| timeout.0), |slice| {
            match events.wait(slice) {
                true => Some(true),
                // Of a closed endpoint nothing more comes.
                false => closed().then_some(false),
            }
        })?;
        Ok(found.unwrap_or(false))
    }

    fn __aiter__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let module = PyModule::import(slf.py(), "kvxfer._aio")?;
        Ok(module.getattr("EventIterator")?.call1((slf,))?.unbind())
    }

    /// Descriptors of one's own (to be closed) that are readable while events wait, and once the endpoint is closed.
    fn _signals(&self) -> PyResult<(i32, i32)> {
        let duplicate = |fd: BorrowedFd<'_>| {
            rustix::io::fcntl_dupfd_cloexec(fd, 3)
                .map(IntoRawFd::into_raw_fd)
                .map_err(|errno| PyRuntimeError::new_err(format!("duplicating a descriptor: {errno}")))
        };
        let events = duplicate(self.events.get()?.fd())?;
        match duplicate(self.core.get()?.closed_signal.as_fd()) {
            Ok(closed) => Ok((events, closed)),
            Err(error) => {
                // SAFETY: made above, owned by nobody else.
                drop(unsafe { OwnedFd::from_raw_fd(events) });
                Err(error)
            }
        }
    }

    #[getter]
    fn _closed(&self) -> PyResult<bool> {
        Ok(self.core.get()?.closed())
    }

    fn __repr__(&self) -> String {
        match self.events.here() {
            Some(events) => format!("<kvxfer.{events:?}>"),
            None => "<kvxfer.Events (of the parent process)>".into(),
        }
    }
}

/// What happened to a handle that was opened with `events=number`.
#[pyclass(frozen, module = "kvxfer", name = "Event", get_all)]
pub(crate) struct Event {
    /// The number that the handle was opened with.
    data: u64,
    /// The handle's `id`.
    handle: u64,
    /// "matched", "restarted" or "ended"; others may come.
    kind: &'static str,
    /// The kind of the error that an ended handle has, `None` if it ended well.
    error: Option<&'static str>,
}

impl Event {
    fn new(event: kvxfer::Event) -> Event {
        let (kind, error) = match event.kind {
            EventKind::Matched => ("matched", None),
            EventKind::Restarted => ("restarted", None),
            EventKind::Ended { error } => ("ended", error.map(|kind| kind.name())),
            _ => ("other", None),
        };
        Event {
            data: event.data,
            handle: event.handle.0,
            kind,
            error,
        }
    }
}

#[pymethods]
impl Event {
    fn __repr__(&self) -> String {
        let error = self.error.map(|error| format!(" {error}")).unwrap_or_default();
        format!(
            "<kvxfer.Event {} of handle {}: {}{error}>",
            self.data, self.handle, self.kind
        )
    }
}
