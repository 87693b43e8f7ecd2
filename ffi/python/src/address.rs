//! What endpoints publish and hand to one another: addresses and grants.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use kvxfer::{Access, RankCoordinates};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::{U16, type_name};
use crate::error::raise;
use crate::memory::with_bytes;

/// Where an endpoint is found, and which one it is: socket addresses, incarnation and rank.
///
/// `str(address)` and `bytes(address)` are stable and short; `EndpointAddress(text)` and `EndpointAddress.from_bytes`
/// read them. A bare "host:port" means whoever listens there.
#[pyclass(frozen, module = "kvxfer", name = "EndpointAddress", eq)]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct EndpointAddress {
    pub(crate) inner: kvxfer::EndpointAddress,
}

#[pymethods]
impl EndpointAddress {
    #[new]
    fn new(text: &str) -> PyResult<EndpointAddress> {
        let inner = text.parse().map_err(raise)?;
        Ok(EndpointAddress { inner })
    }

    /// Reads what `bytes(address)` gave.
    #[staticmethod]
    fn from_bytes(data: &Bound<'_, PyAny>) -> PyResult<EndpointAddress> {
        let inner = with_bytes(data, kvxfer::EndpointAddress::from_bytes)?.map_err(raise)?;
        Ok(EndpointAddress { inner })
    }

    /// The incarnation as 32 hexadecimal digits; `None` in a bare address.
    #[getter]
    fn incarnation(&self) -> Option<String> {
        self.inner.incarnation.map(|incarnation| incarnation.to_string())
    }

    /// The socket addresses, as text.
    #[getter]
    fn sockets(&self) -> Vec<String> {
        self.inner.sockets.iter().map(ToString::to_string).collect()
    }

    /// Where the endpoint stands in its engine.
    #[getter]
    fn rank(&self) -> Rank {
        Rank { inner: self.inner.rank }
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.to_bytes())
    }

    fn __str__(&self) -> String {
        self.inner.to_string()
    }

    fn __repr__(&self) -> String {
        format!("kvxfer.EndpointAddress({:?})", self.inner.to_string())
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.inner.to_bytes().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, (String,)) {
        (slf.get_type().into_any(), (slf.get().inner.to_string(),))
    }
}

/// An address from its class or from text.
pub(crate) fn address(object: &Bound<'_, PyAny>) -> PyResult<kvxfer::EndpointAddress> {
    if let Ok(address) = object.cast::<EndpointAddress>() {
        return Ok(address.get().inner.clone());
    }
    if let Ok(text) = object.cast::<PyString>() {
        return text.to_cow()?.parse().map_err(raise);
    }
    Err(PyTypeError::new_err(format!(
        "an address is a kvxfer.EndpointAddress or its text, not {}",
        type_name(object)
    )))
}

/// Where an endpoint stands in its engine: `(rank, size)` of tensor and of pipeline parallelism.
#[pyclass(frozen, module = "kvxfer", name = "Rank", eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rank {
    pub(crate) inner: RankCoordinates,
}

impl Hash for Rank {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.inner.tensor, self.inner.pipeline).hash(state);
    }
}

#[pymethods]
impl Rank {
    #[new]
    #[pyo3(signature = (tensor = (U16(0), U16(1)), pipeline = (U16(0), U16(1))), text_signature = "(tensor=(0, 1), pipeline=(0, 1))")]
    fn new(tensor: (U16, U16), pipeline: (U16, U16)) -> Rank {
        Rank {
            inner: RankCoordinates {
                tensor: (tensor.0.0, tensor.1.0),
                pipeline: (pipeline.0.0, pipeline.1.0),
            },
        }
    }

    /// Tensor-parallel rank and size.
    #[getter]
    fn tensor(&self) -> (u16, u16) {
        self.inner.tensor
    }

    /// Pipeline-parallel rank and size.
    #[getter]
    fn pipeline(&self) -> (u16, u16) {
        self.inner.pipeline
    }

    fn __repr__(&self) -> String {
        format!(
            "kvxfer.Rank(tensor={:?}, pipeline={:?})",
            self.inner.tensor, self.inner.pipeline
        )
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, ((u16, u16), (u16, u16))) {
        let inner = slf.get().inner;
        (slf.get_type().into_any(), (inner.tensor, inner.pipeline))
    }
}

/// The permission to write (or read) certain blocks of an endpoint, once. `bytes(grant)` carries it to whoever shall
/// use it, `Grant.from_bytes` reads it there.
#[pyclass(frozen, module = "kvxfer", name = "Grant", eq)]
#[derive(PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) inner: kvxfer::Grant,
}

#[pymethods]
impl Grant {
    /// Reads what `bytes(grant)` gave.
    #[staticmethod]
    fn from_bytes(data: &Bound<'_, PyAny>) -> PyResult<Grant> {
        let inner = with_bytes(data, kvxfer::Grant::from_bytes)?.map_err(raise)?;
        Ok(Grant { inner })
    }

    /// Where its owner is found.
    #[getter]
    fn address(&self) -> EndpointAddress {
        EndpointAddress {
            inner: self.inner.address.clone(),
        }
    }

    /// What it permits: "write" or "read".
    #[getter]
    fn access(&self) -> &'static str {
        match self.inner.access {
            Access::Write => "write",
            Access::Read => "read",
        }
    }

    /// Seconds it is good for, counted from when it was made.
    #[getter]
    fn remaining(&self) -> f64 {
        self.inner.remaining_ms as f64 / 1000.0
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.inner.to_bytes().map_err(raise)?))
    }

    fn __repr__(&self) -> String {
        format!("<kvxfer.Grant {} to {}>", self.inner.name, self.access())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let bytes = slf.get().__bytes__(slf.py())?;
        Ok((slf.get_type().getattr("from_bytes")?, (bytes,)))
    }
}
