//! Pools.

use std::time::Duration;

use kvxfer::GrantOptions;
use kvxfer::{ErrorKind, Incarnation, Role};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::arguments::{Seconds, U32, U64};
use crate::error::{invalid, raise};
use crate::exit;
use crate::fork::Local;
use crate::handle::GrantHandle;
use crate::layout::{Layout, unknown};
use crate::memory::with_bytes;

/// Memory with a layout, known to its endpoint's transports and told to its peers.
///
/// It keeps its memory alive, also when it is collected while something still refers to it. As a context manager it
/// is closed at the end, once nothing refers to it any more; if the body raised and something still does, it is left
/// open, and its memory is let go later.
#[pyclass(frozen, module = "kvxfer", name = "Pool", weakref)]
pub(crate) struct Pool {
    inner: Local<Option<kvxfer::Pool>>,
    layout: Py<Layout>,
    endpoint: String,
}

impl Pool {
    pub(crate) fn new(inner: kvxfer::Pool, layout: &Bound<'_, Layout>, endpoint: &str) -> Pool {
        Pool {
            inner: Local::new(Some(inner)),
            layout: layout.clone().unbind(),
            endpoint: endpoint.to_owned(),
        }
    }

    pub(crate) fn open(&self) -> PyResult<&kvxfer::Pool> {
        // Taken only by the finaliser.
        let gone = || raise(kvxfer::Error::new(ErrorKind::Closed, "a pool that was collected"));
        self.inner.get()?.as_ref().ok_or_else(gone)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(pool) = self.inner.take_here().flatten() {
            Python::attach(|py| exit::without_lock(py, || drop(pool)));
        }
    }
}

#[pymethods]
impl Pool {
    /// The layout.
    #[getter]
    fn layout(&self, py: Python<'_>) -> Py<Layout> {
        self.layout.clone_ref(py)
    }

    /// What peers may do with it: "serve", "receive" or "both".
    #[getter]
    fn role(&self) -> PyResult<&'static str> {
        Ok(role_name(self.open()?.role()))
    }

    /// The pool's number, as peers know it.
    #[getter]
    fn id(&self) -> PyResult<u32> {
        self.open()?.id().map(|id| id.0).map_err(raise)
    }

    /// Addresses and lengths of its regions.
    #[getter]
    fn regions(&self) -> PyResult<Vec<(u64, u64)>> {
        let regions = self.open()?.regions().iter();
        Ok(regions.map(|region| (region.address(), region.length())).collect())
    }

    /// Copies bytes (a contiguous buffer) into a block of a plane, from `offset` bytes on.
    fn copy_in(&self, plane: U32, block: U32, offset: U32, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let pool = self.open()?;
        with_bytes(data, |bytes| pool.copy_in(plane.0, block.0, offset.0, bytes))?.map_err(raise)
    }

    /// Copies `length` bytes of a block of a plane out, from `offset` bytes on.
    fn copy_out<'py>(
        &self,
        py: Python<'py>,
        plane: U32,
        block: U32,
        offset: U32,
        length: U32,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let pool = self.open()?;
        // Looked at before anything of that length is made.
        let planes = pool.layout().planes();
        if let Some(found) = planes.get(plane.0 as usize)
            && u64::from(length.0) > found.block_length
        {
            return Err(raise(
                kvxfer::Error::new(ErrorKind::OutOfBounds, format!("{} bytes", length.0))
                    .at(format!("plane {}", plane.0))
                    .because(format!("its blocks have {} bytes", found.block_length))
                    .remedy("keep offset plus length inside the block"),
            ));
        }
        pool.layout().plane_offset(plane.0 as usize, block.0).map_err(raise)?;
        PyBytes::new_with(py, length.0 as usize, |bytes| {
            pool.copy_out(plane.0, block.0, offset.0, bytes).map_err(raise)
        })
    }

    /// Permits a peer to write exactly these blocks, once. `holder` is the incarnation of the only peer that may.
    #[pyo3(signature = (target, deadline = None, holder = None, events = None))]
    fn grant(
        &self,
        py: Python<'_>,
        target: &Bound<'_, PyAny>,
        deadline: Option<Seconds>,
        holder: Option<&str>,
        events: Option<U64>,
    ) -> PyResult<Py<GrantHandle>> {
        let target = crate::selection::target(target)?;
        let options = options(deadline, holder, events)?;
        GrantHandle::new(py, self.open()?.grant(target, options).map_err(raise)?)
    }

    /// Permits a peer to read exactly these blocks, once. They must hold until the handle has ended.
    #[pyo3(signature = (target, deadline = None, holder = None, events = None))]
    fn serve(
        &self,
        py: Python<'_>,
        target: &Bound<'_, PyAny>,
        deadline: Option<Seconds>,
        holder: Option<&str>,
        events: Option<U64>,
    ) -> PyResult<Py<GrantHandle>> {
        let target = crate::selection::target(target)?;
        let options = options(deadline, holder, events)?;
        GrantHandle::new(py, self.open()?.serve(target, options).map_err(raise)?)
    }

    /// Takes the pool out of use. Its memory is free after that. `Busy` while something refers to it; also while other
    /// endpoints on this host have its GPU memory mapped: it is out of use then, they have been told to let go, and the
    /// memory must stay until another call returns (mostly within milliseconds).
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.open()?;
        // Devices may take their time to forget memory.
        exit::without_lock(py, || pool.close()).map_err(raise)
    }

    /// As `close`, waiting up to `timeout` seconds for what refers to the pool to end.
    fn close_wait(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let pool = self.open()?;
        let closed = exit::wait(py, Some(timeout.0), |slice| match pool.close_wait(slice) {
            Err(error) if error.kind() == ErrorKind::Busy => None,
            result => Some(result),
        })?;
        match closed {
            Some(result) => result.map_err(raise),
            None => self.close(py),
        }
    }

    /// Takes the pool out of use for a while, so that the engine may remap its memory: until `resume` nothing of it is
    /// read or written. `Busy` while a handle refers to it, and while other endpoints on this host have its GPU memory mapped,
    /// as with `close`: call it again then.
    fn suspend(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.open()?;
        exit::without_lock(py, || pool.suspend()).map_err(raise)
    }

    /// Puts a suspended pool into use again, with the same layout at the same addresses.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.open()?;
        exit::without_lock(py, || pool.resume()).map_err(raise)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if exit::raised(exception) {
            // What the body raised says more than `Busy`, which its open handles would make certain.
            let pool = self.open()?;
            let _ = exit::without_lock(py, || pool.close());
            return Ok(());
        }
        self.close_wait(py, Seconds(Duration::from_secs(5)))
    }

    fn __repr__(&self) -> String {
        let Some(Some(pool)) = self.inner.here() else {
            return format!("<kvxfer.Pool of {} (of the parent process)>", self.endpoint);
        };
        let id = match pool.id() {
            Ok(id) => id.0.to_string(),
            Err(error) => format!("({})", error.what()),
        };
        format!(
            "<kvxfer.Pool {id} of {}, {}, {} planes>",
            self.endpoint,
            role_name(pool.role()),
            pool.layout().planes().len()
        )
    }
}

fn options(deadline: Option<Seconds>, holder: Option<&str>, events: Option<U64>) -> PyResult<GrantOptions> {
    let holder = holder.map(incarnation).transpose()?;
    Ok(GrantOptions {
        deadline: crate::arguments::deadline(deadline),
        holder,
        events: events.map(|events| events.0),
    })
}

fn incarnation(digits: &str) -> PyResult<Incarnation> {
    let hex = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u128::from_str_radix(digits, 16)
        .ok()
        .filter(|_| hex)
        .map(Incarnation::from_bits)
        .ok_or_else(|| {
            invalid(
                format!("incarnation {digits:?}"),
                "it is not 32 hexadecimal digits",
                "pass what Endpoint.incarnation says",
            )
        })
}

/// A role by name.
pub(crate) fn role(name: &str) -> PyResult<Role> {
    match name {
        "serve" => Ok(Role::Serve),
        "receive" => Ok(Role::Receive),
        "both" => Ok(Role::Both),
        _ => Err(unknown("role", name, &["serve", "receive", "both"])),
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Serve => "serve",
        Role::Receive => "receive",
        Role::Both => "both",
    }
}
