//! Warnings from finalisers.

use std::ffi::CString;

use pyo3::exceptions::PyResourceWarning;
use pyo3::prelude::*;

/// A `ResourceWarning` from a finaliser: never raised from it, and without touching an exception that is on its way.
pub(crate) fn resource(message: &str) {
    Python::attach(|py| {
        let pending = PyErr::take(py);
        let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
        let category = py.get_type::<PyResourceWarning>();
        if let Err(raised) = PyErr::warn(py, &category, &text, 1) {
            raised.write_unraisable(py, None);
        }
        if let Some(pending) = pending {
            pending.restore(py);
        }
    });
}
