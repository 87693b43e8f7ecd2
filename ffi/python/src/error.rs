//! Errors of the library as Python exceptions: one class per kind, defined in `kvxfer/_errors.py`.

use kvxfer::{Destination, Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

/// The classes by kind name.
static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

/// The exception for an error.
pub(crate) fn raise(error: Error) -> PyErr {
    Python::attach(|py| exception(py, &error).map_or_else(|failed| failed, PyErr::from_value))
}

/// The exception object for an error.
pub(crate) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let classes = CLASSES.get_or_try_init(py, || -> PyResult<Py<PyDict>> {
        let module = PyModule::import(py, "kvxfer._errors")?;
        Ok(module.getattr("_BY_KIND")?.cast_into::<PyDict>()?.unbind())
    })?;
    let kind = error.kind().name();
    let class = classes
        .bind(py)
        .get_item(kind)?
        .ok_or_else(|| pyo3::exceptions::PySystemError::new_err(format!("no exception class for {kind}: {error}")))?;
    // Python shows the class's name before the message.
    let text = error.to_string();
    let prefix = format!("{kind}: ");
    let message = text.strip_prefix(&prefix).unwrap_or(&text);
    class.call1((message, destination(error.destination())))
}

/// An `InvalidArgument`: what, why and what to do.
pub(crate) fn invalid(what: impl Into<String>, why: impl Into<String>, remedy: &str) -> PyErr {
    raise(Error::new(ErrorKind::InvalidArgument, what).because(why).remedy(remedy))
}

fn destination(destination: Destination) -> &'static str {
    match destination {
        Destination::Untouched => "untouched",
        Destination::Written => "written",
        Destination::Quarantined => "quarantined",
    }
}

/// All kinds with number and whether retrying makes sense: a test compares the classes with them.
#[pyfunction]
pub(crate) fn _kinds() -> Vec<(&'static str, u16, bool)> {
    let describe = |kind: &ErrorKind| (kind.name(), kind.number(), kind.retryable());
    ErrorKind::ALL.iter().map(describe).collect()
}
