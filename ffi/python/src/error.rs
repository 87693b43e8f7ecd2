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
    made(&class, error)
}

/// The exception for a wait that is over while its handle is open: a class of its own, since a handle that ended at
/// its deadline is something else.
pub(crate) fn wait_timeout(py: Python<'_>, error: &Error) -> PyErr {
    let made = || made(&PyModule::import(py, "kvxfer._errors")?.getattr("WaitTimeout")?, error);
    made().map_or_else(|failed| failed, PyErr::from_value)
}

fn made<'py>(class: &Bound<'py, PyAny>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    // Python shows the class's name before the message.
    let text = error.to_string();
    let prefix = format!("{}: ", error.kind().name());
    let message = text.strip_prefix(&prefix).unwrap_or(&text);
    let made = class.call1((message,))?;
    if error.destination() != Destination::Untouched {
        made.setattr("destination", destination(error.destination()))?;
    }
    Ok(made)
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
