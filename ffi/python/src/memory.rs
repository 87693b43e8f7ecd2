//! Memory of Python objects: where it is, how it is laid out, and what keeps it alive.
//!
//! Tried in this order: `__cuda_array_interface__`, the buffer protocol, `__array_interface__`, a torch tensor's own
//! methods, `__dlpack__`. Which of them an object has decides nothing but how it is asked.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use kvxfer::cuda::PointerKind;
use kvxfer::memory::{HostMemory, Region};
use kvxfer::{Error, ErrorKind};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use pyo3::{ffi, intern};

use crate::arguments::{U64, type_name};
use crate::dlpack;
use crate::error::{invalid, raise};
use crate::exit::without_lock;

/// CPython's `Py_buffer`.
///
/// The limited API has it only from 3.11 on, and there as it had been since 3.0: same fields, same order. Every CPython
/// from 3.9 on exports the two functions below. So this is how one extension reads buffers on all of them, read-only
/// ones too, which ctypes cannot. [`check_buffers`] compares with what is known when the module is loaded.
#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
}

/// `PyBUF_FULL_RO`: strides, suboffsets and format are told; read-only memory is welcome.
const FULL_READ_ONLY: c_int = 0x0100 | 0x0010 | 0x0008 | 0x0004;

/// A buffer that an object exports, released when this goes. Holds the interpreter's lock by its lifetime.
pub(crate) struct BufferView<'py> {
    raw: Box<RawBuffer>,
    _lock: Python<'py>,
}

impl<'py> BufferView<'py> {
    /// Whether the object has the buffer protocol at all.
    pub(crate) fn supported_by(object: &Bound<'py, PyAny>) -> bool {
        // SAFETY: a live object, with the interpreter's lock held.
        unsafe { PyObject_CheckBuffer(object.as_ptr()) != 0 }
    }

    pub(crate) fn new(object: &Bound<'py, PyAny>) -> PyResult<BufferView<'py>> {
        // SAFETY: every field of the struct may be zero.
        let mut raw: Box<RawBuffer> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: a live object, with the lock held; the struct is the one that the interpreter fills (see above).
        match unsafe { PyObject_GetBuffer(object.as_ptr(), &mut *raw, FULL_READ_ONLY) } {
            0 => Ok(BufferView {
                raw,
                _lock: object.py(),
            }),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    pub(crate) fn address(&self) -> *const u8 {
        self.raw.buf.cast()
    }

    pub(crate) fn item_size(&self) -> usize {
        self.raw.itemsize.unsigned_abs()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        // SAFETY: `shape` has `ndim` sizes, none negative, for as long as the buffer is held; see `numbers`.
        unsafe { numbers(self.raw.shape.cast(), self.raw.ndim) }
    }

    pub(crate) fn strides(&self) -> &[isize] {
        // SAFETY: `strides` has `ndim` numbers for as long as the buffer is held.
        unsafe { numbers(self.raw.strides, self.raw.ndim) }
    }

    pub(crate) fn format(&self) -> String {
        if self.raw.format.is_null() {
            return "B".to_owned();
        }
        // SAFETY: a C string of the exporter's, alive while the buffer is held.
        unsafe { CStr::from_ptr(self.raw.format) }
            .to_string_lossy()
            .into_owned()
    }

    fn contiguous_length(&self) -> Option<usize> {
        let mut expected = self.raw.itemsize;
        for (&size, &stride) in self.shape().iter().zip(self.strides()).rev() {
            if size > 1 && stride != expected {
                return None;
            }
            expected = expected.checked_mul(isize::try_from(size).ok()?)?;
        }
        Some(self.raw.len.unsigned_abs())
    }
}

impl Drop for BufferView<'_> {
    fn drop(&mut self) {
        // SAFETY: filled by PyObject_GetBuffer, released once, with the lock held.
        unsafe { PyBuffer_Release(&mut *self.raw) }
    }
}

/// # Safety
/// `first` is null or points to `count` numbers that live as long as the result.
unsafe fn numbers<'a, T>(first: *const T, count: c_int) -> &'a [T] {
    match (first.is_null(), usize::try_from(count)) {
        // SAFETY: the caller's promise.
        (false, Ok(count)) if count > 0 => unsafe { std::slice::from_raw_parts(first, count) },
        _ => &[],
    }
}

/// Compares a buffer whose description is known with what the interpreter says, once.
pub(crate) fn check_buffers(py: Python<'_>) -> PyResult<()> {
    let bytes = pyo3::types::PyBytes::new(py, b"kvxfer");
    let view = BufferView::new(&bytes)?;
    let raw = &view.raw;
    let right = raw.len == 6
        && raw.itemsize == 1
        && raw.readonly == 1
        && raw.ndim == 1
        && raw.buf.cast_const().cast() == bytes.as_bytes().as_ptr()
        && view.shape() == [6]
        && view.strides() == [1]
        && raw.suboffsets.is_null();
    right.then_some(()).ok_or_else(|| {
        pyo3::exceptions::PyImportError::new_err("this interpreter's Py_buffer is not CPython's: kvxfer needs CPython")
    })
}

/// Bytes that an argument shows, in one piece.
pub(crate) fn with_bytes<T>(object: &Bound<'_, PyAny>, use_them: impl FnOnce(&[u8]) -> T) -> PyResult<T> {
    if !BufferView::supported_by(object) {
        return Err(PyTypeError::new_err(format!(
            "bytes or another buffer, not {}",
            type_name(object)
        )));
    }
    let view = BufferView::new(object)?;
    let length = view.contiguous_length().ok_or_else(|| {
        invalid(
            "a buffer that is not contiguous",
            "its bytes do not lie one after another",
            "copy it first, for example with bytes()",
        )
    })?;
    let address = match length {
        0 => ptr::dangling(),
        _ => view.address(),
    };
    // SAFETY: the exporter keeps `length` bytes from the address on while the view lives. Another Python thread could
    // write to them only with the interpreter's lock, which is held here.
    Ok(use_them(unsafe { std::slice::from_raw_parts(address, length) }))
}

/// The kind of memory an array says it is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// The CPU touches it.
    Host,
    /// CUDA's: the driver is asked which kind it is.
    Cuda,
    /// Something else, in words.
    Other(String),
}

impl Place {
    /// By the name that Python's libraries have for it.
    fn named(name: &str) -> Place {
        match name {
            "cpu" => Place::Host,
            "cuda" => Place::Cuda,
            other => Place::Other(other.to_owned()),
        }
    }

    fn name(&self) -> &str {
        match self {
            Place::Host => "cpu",
            Place::Cuda => "cuda",
            Place::Other(name) => name,
        }
    }
}

/// Where an array's elements are.
pub(crate) struct View {
    pub(crate) address: u64,
    pub(crate) item_size: u64,
    pub(crate) shape: Vec<u64>,
    /// In bytes.
    pub(crate) strides: Vec<i64>,
    pub(crate) read_only: bool,
    pub(crate) place: Place,
    /// The whole allocation, if the object tells: address and bytes.
    pub(crate) storage: Option<(u64, u64)>,
    /// Keeps the memory where it is.
    pub(crate) owner: Py<PyAny>,
}

impl View {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<View> {
        let py = object.py();
        if object.is_instance_of::<PyType>() {
            return Err(PyTypeError::new_err(format!(
                "memory is an array or another buffer, and {} is a class: give an object of it",
                object.repr()?
            )));
        }
        if object
            .getattr("dtype")
            .and_then(|dtype| dtype.getattr("hasobject")?.is_truthy())
            .unwrap_or(false)
        {
            return Err(of_objects(object));
        }
        if has(object, "__cuda_array_interface__") {
            return View::from_interface(object, "__cuda_array_interface__", Place::Cuda);
        }
        if has(object, "data_ptr") && has(object, "untyped_storage") {
            return View::from_torch(object);
        }
        if BufferView::supported_by(object) {
            match View::from_buffer(object) {
                // Element types that the buffer protocol has no letter for.
                Err(error)
                    if has(object, "__array_interface__")
                        && error.is_instance_of::<pyo3::exceptions::PyValueError>(py) => {}
                done => return done,
            }
        }
        if has(object, "__array_interface__") {
            return View::from_interface(object, "__array_interface__", Place::Host);
        }
        if has(object, "__dlpack__") {
            return dlpack::view(object);
        }
        Err(PyTypeError::new_err(format!(
            "memory is a buffer, an array (__array_interface__, __dlpack__, torch) or (address, length[, owner]), not {}",
            type_name(object)
        )))
    }

    fn from_buffer(object: &Bound<'_, PyAny>) -> PyResult<View> {
        let py = object.py();
        // A memoryview is the export's owner: a bytearray cannot be resized while it lives.
        // SAFETY: a live object; the result is a new reference or null with an exception set.
        let owner = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyMemoryView_FromObject(object.as_ptr()))? };
        let view = BufferView::new(&owner)?;
        if !view.raw.suboffsets.is_null() {
            return Err(PyBufferError::new_err("a buffer with suboffsets is in several pieces"));
        }
        // Names in a struct's format stand between colons.
        if view.format().split(':').step_by(2).any(|types| types.contains('O')) {
            return Err(of_objects(object));
        }
        let (shape, strides) = (view.shape().to_vec(), view.strides().to_vec());
        Ok(View {
            address: view.address() as u64,
            item_size: view.item_size() as u64,
            shape: shape.into_iter().map(|size| size as u64).collect(),
            strides: strides.into_iter().map(|stride| stride as i64).collect(),
            read_only: view.raw.readonly != 0,
            place: Place::Host,
            storage: numpy_storage(object),
            owner: owner.unbind(),
        })
    }

    fn from_interface(object: &Bound<'_, PyAny>, name: &str, place: Place) -> PyResult<View> {
        let described = object.getattr(name)?;
        let described = described.cast::<PyDict>()?;
        let field = |key: &str| -> PyResult<Bound<'_, PyAny>> {
            described
                .get_item(key)?
                .filter(|value| !value.is_none())
                .ok_or_else(|| PyTypeError::new_err(format!("{name} of {} without {key:?}", type_name(object))))
        };
        let (address, read_only): (u64, bool) = field("data")?.extract()?;
        let shape: Vec<u64> = field("shape")?.extract()?;
        let kind: String = field("typestr")?.extract()?;
        if matches!(kind.as_bytes().get(1), Some(b'O' | b'T')) {
            return Err(of_objects(object));
        }
        // A unit may follow, as in "<M8[ns]".
        let size = kind
            .get(2..)
            .and_then(|size| size.split('[').next()?.parse::<u64>().ok());
        let item_size = size
            // Of text, characters are counted.
            .and_then(|size| size.checked_mul(if kind.as_bytes()[1] == b'U' { 4 } else { 1 }))
            .ok_or_else(|| PyTypeError::new_err(format!("{name} of {} with typestr {kind:?}", type_name(object))))?;
        let strides: Option<Vec<i64>> = match described.get_item("strides")? {
            Some(strides) if !strides.is_none() => Some(strides.extract()?),
            _ => None,
        };
        let strides = strides.unwrap_or_else(|| dense_strides(&shape, item_size));
        if strides.len() != shape.len() {
            return Err(PyTypeError::new_err(format!(
                "{name} with {} strides for {} axes",
                strides.len(),
                shape.len()
            )));
        }
        Ok(View {
            address,
            item_size,
            shape,
            strides,
            read_only,
            place,
            storage: numpy_storage(object),
            owner: object.clone().unbind(),
        })
    }

    fn from_torch(tensor: &Bound<'_, PyAny>) -> PyResult<View> {
        let py = tensor.py();
        let item_size: u64 = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
        let shape: Vec<u64> = tensor.getattr("shape")?.extract()?;
        let strides: Vec<i64> = tensor.call_method0("stride")?.extract()?;
        let storage = tensor.call_method0("untyped_storage")?;
        let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
        Ok(View {
            address: tensor.call_method0("data_ptr")?.extract()?,
            item_size,
            shape,
            strides: strides
                .into_iter()
                .map(|stride| stride.saturating_mul(item_size as i64))
                .collect(),
            read_only: false,
            place: Place::named(&device),
            storage: Some((
                storage.call_method0("data_ptr")?.extract()?,
                storage.call_method0("nbytes")?.extract()?,
            )),
            // The tensor keeps its storage, which `resize_` of another tensor on it could still move: documented.
            owner: tensor.clone().unbind(),
        })
    }

    /// Bytes from the first to the last element: address and length; `None` if empty or on overflow.
    pub(crate) fn span(&self) -> Option<(u64, u64)> {
        let (mut low, mut high) = (0i64, i64::try_from(self.item_size).ok()?);
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = stride.checked_mul(i64::try_from(size.checked_sub(1)?).ok()?)?;
            match reach < 0 {
                true => low = low.checked_add(reach)?,
                false => high = high.checked_add(reach)?,
            }
        }
        let address = self.address.checked_add_signed(low)?;
        Some((address, u64::try_from(high.checked_sub(low)?).ok()?))
    }

    fn is_dense(&self) -> bool {
        let dense = dense_strides(&self.shape, self.item_size);
        let same = |((&size, &stride), &dense): ((&u64, &i64), &i64)| size <= 1 || stride == dense;
        self.shape.iter().zip(&self.strides).zip(&dense).all(same)
    }
}

/// What is refused: bytes that are pointers mean nothing elsewhere, and writing them crashes the interpreter.
fn of_objects(object: &Bound<'_, PyAny>) -> PyErr {
    invalid(
        format!("an array of Python objects ({})", type_name(object)),
        "its memory holds pointers of this process, no data",
        "use an array of numbers",
    )
}

fn has(object: &Bound<'_, PyAny>, name: &str) -> bool {
    object.hasattr(name).unwrap_or(false)
}

pub(crate) fn dense_strides(shape: &[u64], item_size: u64) -> Vec<i64> {
    let mut stride = item_size as i64;
    let mut strides: Vec<i64> = shape
        .iter()
        .rev()
        .map(|&size| {
            let this = stride;
            stride = stride.saturating_mul(i64::try_from(size).unwrap_or(i64::MAX));
            this
        })
        .collect();
    strides.reverse();
    strides
}

/// The allocation that a numpy view lies in: that of the array it is a view of.
fn numpy_storage(object: &Bound<'_, PyAny>) -> Option<(u64, u64)> {
    let mut root = object.clone();
    // Views of views are rare and short; a chain that does not end is nobody's array.
    for _ in 0..64 {
        match root.getattr("base") {
            Ok(base) if has(&base, "__array_interface__") => root = base,
            _ => break,
        }
    }
    let described = root.getattr("__array_interface__").ok()?;
    let (address, _): (u64, bool) = described.get_item("data").ok()?.extract().ok()?;
    let bytes: u64 = root.getattr("nbytes").ok()?.extract().ok()?;
    let dense: Bound<'_, PyAny> = described.get_item("strides").ok()?;
    (dense.is_none() && bytes > 0).then_some((address, bytes))
}

/// Keeps a Python object as long as a region. May be dropped by any thread: PyO3 gives the object back the next time
/// that a thread with the interpreter's lock enters the module.
struct Keepalive(#[expect(dead_code, reason = "held for its drop")] Py<PyAny>);

/// A region over memory that an argument names: a buffer or array, or `(address, length[, owner])`.
pub(crate) fn region(endpoint: &kvxfer::Endpoint, object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Arc<Region>> {
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return named_region(endpoint, tuple, writable);
    }
    let view = View::new(object)?;
    can_be_used(&view.place)?;
    if !view.is_dense() {
        return Err(invalid(
            format!("memory of shape {:?} with strides {:?}", view.shape, view.strides),
            "a region is one piece, in order",
            "register the whole allocation, and describe what is in it with a layout (layout_of does both)",
        ));
    }
    if writable && view.read_only {
        return Err(read_only(object));
    }
    let (address, length) = view.span().ok_or_else(|| {
        invalid(
            format!("memory of shape {:?}", view.shape),
            "it has no bytes, or more than there are addresses",
            "give memory that holds the pool",
        )
    })?;
    make(endpoint, object.py(), &view.place, address, length, view.owner)
}

fn named_region(endpoint: &kvxfer::Endpoint, tuple: &Bound<'_, PyTuple>, writable: bool) -> PyResult<Arc<Region>> {
    let count = tuple.len();
    if !(2..=5).contains(&count) {
        return Err(PyTypeError::new_err(format!(
            "memory by address is (address, length), (address, length, owner) or a MemoryRegion, not {count} values"
        )));
    }
    if count >= 4 && tuple.get_item(3)?.is_truthy()? && writable {
        return Err(read_only(tuple));
    }
    let place = match count {
        5 => Place::named(&tuple.get_item(4)?.extract::<String>()?),
        _ => Place::Host,
    };
    can_be_used(&place)?;
    let owner = match count {
        2 => tuple.py().None(),
        _ => tuple.get_item(2)?.unbind(),
    };
    make(
        endpoint,
        tuple.py(),
        &place,
        tuple.get_item(0)?.extract::<U64>()?.0,
        tuple.get_item(1)?.extract::<U64>()?.0,
        owner,
    )
}

fn read_only(object: &Bound<'_, PyAny>) -> PyErr {
    invalid(
        format!("read-only memory ({})", type_name(object)),
        "peers write into a pool of this role",
        "use writable memory, or the role \"serve\"",
    )
}

fn make(
    endpoint: &kvxfer::Endpoint,
    py: Python<'_>,
    place: &Place,
    address: u64,
    length: u64,
    owner: Py<PyAny>,
) -> PyResult<Arc<Region>> {
    if *place == Place::Cuda {
        // The driver may hold locks that a thread with the interpreter's lock waits for.
        let asked = without_lock(py, || {
            let cuda = endpoint.cuda()?;
            let kind = cuda.classify(address)?.kind;
            Ok((cuda, kind))
        });
        let (cuda, kind) = asked.map_err(raise)?;
        // The CPU touches page-locked and managed memory like any other.
        if !matches!(kind, PointerKind::PinnedHost | PointerKind::Managed) {
            let owner = Box::new(Keepalive(owner));
            // SAFETY: as below; the driver is asked what the address is, and refuses what is not a device's.
            return without_lock(py, || unsafe { cuda.region(address, length, owner) }).map_err(raise);
        }
    }
    host(address, length, owner)
}

fn host(address: u64, length: u64, owner: Py<PyAny>) -> PyResult<Arc<Region>> {
    let base = address as usize as *mut u8;
    // SAFETY: what the caller of `register` promises: the memory is there, and the owner keeps it there, until the
    // pool has gone. Nothing here makes a Rust reference into it.
    unsafe { Region::from_raw(base, length, Arc::new(HostMemory), Box::new(Keepalive(owner))) }.map_err(raise)
}

/// `Unsupported` for memory of devices that there is no driver for here.
fn can_be_used(place: &Place) -> PyResult<()> {
    match place {
        Place::Host | Place::Cuda => Ok(()),
        Place::Other(name) => Err(raise(
            Error::new(ErrorKind::Unsupported, format!("memory on {name}"))
                .because("this build moves host memory and CUDA memory")
                .remedy("keep the pool in one of them"),
        )),
    }
}

/// What `layout_of` needs to know of a tensor: address, item size, shape, strides in bytes, whether it is read-only,
/// the allocation it lies in, the span of its elements, what keeps it, and whether it is `cpu` or `cuda` memory.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "a tuple for Python, unpacked where it is used")]
pub(crate) fn _view(
    object: &Bound<'_, PyAny>,
) -> PyResult<(
    u64,
    u64,
    Vec<u64>,
    Vec<i64>,
    bool,
    Option<(u64, u64)>,
    Option<(u64, u64)>,
    Py<PyAny>,
    String,
)> {
    let view = View::new(object)?;
    can_be_used(&view.place)?;
    let span = view.span();
    Ok((
        view.address,
        view.item_size,
        view.shape,
        view.strides,
        view.read_only,
        view.storage,
        span,
        view.owner,
        view.place.name().to_owned(),
    ))
}
