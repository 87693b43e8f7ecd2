//! Arguments as Python gives them: numbers that are checked, times in seconds, keys, lists of block ids.

use std::time::Duration;

use kvxfer::{BlockId, Error, ErrorKind};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyFloat, PyList, PyString, PyTuple};
use pyo3::{Borrowed, ffi};

use crate::error::{invalid, raise};
use crate::memory::BufferView;

/// Whole numbers that are refused with the library's own error when they do not fit.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident($type:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) struct $name(pub(crate) $type);

        impl<'py> FromPyObject<'_, 'py> for $name {
            type Error = PyErr;

            fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
                if object.is_instance_of::<PyBool>() {
                    return Err(PyTypeError::new_err("a bool is no number"));
                }
                object.extract::<$type>().map($name).map_err(|error| {
                    match error.is_instance_of::<PyOverflowError>(object.py()) {
                        true => invalid(
                            format!("the number {}", object.to_owned()),
                            format!("it takes 0 to {}", <$type>::MAX),
                            "give a number in that range",
                        ),
                        false => error,
                    }
                })
            }
        }
    )*};
}

numbers! {
    /// Eight bits.
    U8(u8);
    /// Sixteen bits.
    U16(u16);
    /// Thirty-two bits.
    U32(u32);
    /// Sixty-four bits.
    U64(u64);
    /// A hundred and twenty-eight bits.
    U128(u128);
}

/// A time in seconds. Infinity is for ever.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seconds(pub(crate) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if !object.is_exact_instance_of::<PyFloat>() && ["bool", "bool_"].contains(&type_name(&object).as_str()) {
            return Err(PyTypeError::new_err("a time is a number of seconds, not bool"));
        }
        let seconds: f64 =
            object.extract().map_err(
                |error: PyErr| match error.is_instance_of::<PyOverflowError>(object.py()) {
                    true => invalid(
                        "a time",
                        "it has more seconds than a float can hold",
                        "give seconds as a number from 0 on, or None for no limit",
                    ),
                    false => error,
                },
            )?;
        if seconds.is_nan() || seconds < 0.0 {
            return Err(invalid(
                format!("{seconds} seconds"),
                "a time is not negative",
                "give seconds as a number from 0 on, or None",
            ));
        }
        // What is too long for the clock is for ever.
        Ok(Seconds(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)))
    }
}

/// The deadline that a caller gave.
pub(crate) fn deadline(seconds: Option<Seconds>) -> Option<Duration> {
    seconds.map(|seconds| seconds.0)
}

/// Text, or bytes: a key.
pub(crate) struct Key<'a>(pub(crate) std::borrow::Cow<'a, [u8]>);

impl<'a, 'py> FromPyObject<'a, 'py> for Key<'a> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyString>() {
            let text: String = object.extract()?;
            return Ok(Key(text.into_bytes().into()));
        }
        if object.is_instance_of::<PyBytes>() {
            let bytes: Vec<u8> = object.extract()?;
            return Ok(Key(bytes.into()));
        }
        Err(PyTypeError::new_err(format!(
            "a key is str or bytes, not {}",
            type_name(&object)
        )))
    }
}

/// The name of an object's type, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .name()
        .map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

/// Block ids: any sequence of integers, or a buffer of 32- or 64-bit ones.
pub(crate) fn blocks(object: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    if object.is_instance_of::<PyList>() {
        return from_items(object, ffi::PyList_Size, ffi::PyList_GetItem);
    }
    if object.is_instance_of::<PyTuple>() {
        return from_items(object, ffi::PyTuple_Size, ffi::PyTuple_GetItem);
    }
    if object.is_instance_of::<PyString>()
        || object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyByteArray>()
    {
        return Err(PyTypeError::new_err(format!(
            "block ids are integers, not {}",
            type_name(object)
        )));
    }
    if BufferView::supported_by(object) {
        return from_buffer(object);
    }
    // A tensor without the buffer protocol: one call that makes a list, instead of one per element.
    if let Ok(list) = object.call_method0("tolist")
        && list.is_instance_of::<PyList>()
    {
        return from_items(&list, ffi::PyList_Size, ffi::PyList_GetItem);
    }
    let iterator = object.try_iter().map_err(|_| {
        PyTypeError::new_err(format!(
            "block ids are a sequence of integers, not {}",
            type_name(object)
        ))
    })?;
    let mut blocks = Vec::new();
    for item in iterator {
        blocks.push(block(object.py(), item?.as_ptr())?);
    }
    Ok(blocks)
}

/// The ids in a list or tuple, without an object of ours per item.
fn from_items(
    object: &Bound<'_, PyAny>,
    size: unsafe extern "C" fn(*mut ffi::PyObject) -> isize,
    get: unsafe extern "C" fn(*mut ffi::PyObject, isize) -> *mut ffi::PyObject,
) -> PyResult<Vec<BlockId>> {
    let py = object.py();
    let length = |object: &Bound<'_, PyAny>| {
        // SAFETY: `size` is the list's or tuple's own function, as the callers' casts made sure.
        usize::try_from(unsafe { size(object.as_ptr()) }).unwrap_or(0)
    };
    let mut blocks = Vec::with_capacity(length(object));
    // The length is asked for again each time: `__index__` of an item is Python code, which may shorten a list.
    while blocks.len() < length(object) {
        // SAFETY: the index lies in the list; the reference is borrowed, and nothing runs before it is used below.
        let item = unsafe { get(object.as_ptr(), blocks.len() as isize) };
        blocks.push(block(py, item)?);
    }
    Ok(blocks)
}

/// One id. The item is borrowed: for what is no plain `int` it is held, since Python code runs.
fn block(py: Python<'_>, item: *mut ffi::PyObject) -> PyResult<BlockId> {
    // SAFETY: the item is alive, and the interpreter's lock is held.
    let number = unsafe {
        match ffi::PyLong_CheckExact(item) {
            0 => -1,
            _ => ffi::PyLong_AsLongLong(item),
        }
    };
    if let Ok(block) = BlockId::try_from(number) {
        return Ok(block);
    }
    // SAFETY: the item is alive.
    slow_block(&unsafe { Bound::from_borrowed_ptr(py, item) })
}

/// What is no plain `int` (a numpy scalar has `__index__`), and numbers that do not fit.
#[cold]
fn slow_block(item: &Bound<'_, PyAny>) -> PyResult<BlockId> {
    // A conversion that failed left its exception.
    drop(PyErr::take(item.py()));
    if item.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err("a block id is an integer, not bool"));
    }
    match item.extract::<u32>() {
        Ok(block) => Ok(block),
        Err(error) if error.is_instance_of::<PyOverflowError>(item.py()) => Err(no_block(&item.to_string())),
        Err(_) => Err(PyTypeError::new_err(format!(
            "a block id is an integer, not {}",
            type_name(item)
        ))),
    }
}

fn no_block(number: &str) -> PyErr {
    raise(
        Error::new(ErrorKind::OutOfBounds, format!("block {number}"))
            .because(format!("block ids are 0 to {}", u32::MAX))
            .remedy("give the ids of blocks of the pool"),
    )
}

fn from_buffer(object: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    let view = BufferView::new(object)?;
    let [length] = *view.shape() else {
        return Err(PyTypeError::new_err(format!(
            "block ids have one axis, this buffer has {}",
            view.shape().len()
        )));
    };
    let (format, size) = (view.format(), view.item_size());
    let signed = match format.trim_start_matches(['@', '=', '<']) {
        "i" | "l" | "q" | "n" => true,
        "I" | "L" | "Q" | "N" => false,
        _ => {
            return Err(PyTypeError::new_err(format!(
                "block ids are 32- or 64-bit integers of this machine's byte order, not {format:?}"
            )));
        }
    };
    let stride = view.strides().first().copied().unwrap_or(size as isize);
    let mut blocks = Vec::with_capacity(length);
    for index in 0..length {
        // SAFETY: the exporter says that `length` items lie `stride` bytes apart from its address on, and keeps them
        // while the view lives. They may be unaligned.
        let number = unsafe {
            let item = view.address().offset(index as isize * stride);
            match (size, signed) {
                (4, true) => i128::from(item.cast::<i32>().read_unaligned()),
                (4, false) => i128::from(item.cast::<u32>().read_unaligned()),
                (_, true) => i128::from(item.cast::<i64>().read_unaligned()),
                (_, false) => i128::from(item.cast::<u64>().read_unaligned()),
            }
        };
        blocks.push(BlockId::try_from(number).map_err(|_| no_block(&number.to_string()))?);
    }
    Ok(blocks)
}
