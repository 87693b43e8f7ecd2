//! What Python's libraries call their CUDA events and streams: a number, or an object that has it.

use kvxfer::After;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::type_name;
use crate::error::raise;
use crate::exit::without_lock;

/// The address of a CUDA event: an int, or an object with `cuda_event` (torch) or `ptr` (CuPy, cuda.core's handles).
fn event(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    address(object, "a CUDA event", &["cuda_event", "ptr", "handle"])
}

/// The address of a CUDA stream: an int, or an object with `cuda_stream` (torch) or `ptr` (CuPy).
pub(crate) fn stream(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    address(object, "a CUDA stream", &["cuda_stream", "ptr", "handle"])
}

fn address(object: &Bound<'_, PyAny>, what: &str, names: &[&str]) -> PyResult<usize> {
    // True is an int in Python, and no address.
    if !object.is_instance_of::<pyo3::types::PyBool>() {
        if let Ok(address) = object.extract::<usize>() {
            return Ok(address);
        }
        for name in names {
            if let Ok(value) = object.getattr(*name)
                && let Ok(address) = value.extract::<usize>()
            {
                return Ok(address);
            }
        }
    }
    Err(PyTypeError::new_err(format!(
        "{what} is its address (an int), or an object with {}, not {}",
        names[..2].join(" or "),
        type_name(object)
    )))
}

/// Captures the event, without the interpreter's lock: the driver may hold its own for a while.
pub(crate) fn after(
    py: Python<'_>,
    object: Option<&Bound<'_, PyAny>>,
    capture: impl Fn(usize) -> kvxfer::Result<After> + Send + Sync,
) -> PyResult<Option<After>> {
    let Some(object) = object else { return Ok(None) };
    let event = event(object)?;
    without_lock(py, || capture(event)).map(Some).map_err(raise)
}
