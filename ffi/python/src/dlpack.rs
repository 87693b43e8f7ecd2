//! DLPack: the one exchange format that arrays of any library have. Only the struct's first version is read, which
//! every producer gives when no other is asked for.

use std::ffi::c_void;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use crate::memory::{Place, View, dense_strides};

const DEVICE_CPU: i32 = 1;
/// Host memory that a device driver has pinned: the CPU touches it like any other.
const DEVICE_CUDA_HOST: i32 = 3;
const DEVICE_ROCM_HOST: i32 = 11;
const DEVICE_CUDA: i32 = 2;
/// Managed by the CUDA driver, for the CPU and devices.
const DEVICE_CUDA_MANAGED: i32 = 13;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    /// In elements; null for dense tensors.
    strides: *const i64,
    byte_offset: u64,
}

/// Reads the tensor. The capsule stays the owner: unconsumed, so its own destructor gives the tensor back.
pub(crate) fn view(object: &Bound<'_, PyAny>) -> PyResult<View> {
    let capsule = object.call_method0("__dlpack__")?;
    let capsule = capsule
        .cast::<PyCapsule>()
        .map_err(|_| PyTypeError::new_err("__dlpack__ gave no capsule"))?;
    let tensor = capsule.pointer_checked(Some(c"dltensor"))?.cast::<Tensor>();
    // SAFETY: a capsule of this name holds a DLManagedTensor, whose first field is the DLTensor; it lives as long as
    // the capsule, which nobody else has.
    let tensor = unsafe { tensor.as_ref() };
    let bits = u64::from(tensor.bits) * u64::from(tensor.lanes);
    if bits == 0 || !bits.is_multiple_of(8) {
        return Err(PyTypeError::new_err(format!("a tensor with elements of {bits} bits")));
    }
    let item_size = bits / 8;
    let axes = usize::try_from(tensor.ndim).unwrap_or(0);
    // SAFETY: `shape` has `ndim` sizes, and `strides` as many or is null; both live as long as the tensor.
    let (shape, strides) = unsafe {
        let read = |numbers: *const i64| match axes {
            0 => &[][..],
            _ => std::slice::from_raw_parts(numbers, axes),
        };
        (
            read(tensor.shape),
            (!tensor.strides.is_null()).then(|| read(tensor.strides)),
        )
    };
    let shape: Vec<u64> = shape.iter().map(|&size| u64::try_from(size).unwrap_or(0)).collect();
    let strides = match strides {
        Some(strides) => strides
            .iter()
            .map(|&stride| stride.saturating_mul(item_size as i64))
            .collect(),
        None => dense_strides(&shape, item_size),
    };
    let place = match tensor.device_type {
        DEVICE_CPU | DEVICE_CUDA_HOST | DEVICE_ROCM_HOST => Place::Host,
        DEVICE_CUDA | DEVICE_CUDA_MANAGED => Place::Cuda,
        kind => Place::Other(format!("device {}:{} (DLPack's numbers)", kind, tensor.device_id)),
    };
    Ok(View {
        address: (tensor.data as u64).wrapping_add(tensor.byte_offset),
        item_size,
        shape,
        strides,
        // The format's first version does not say; producers refuse to export what is read-only.
        read_only: false,
        place,
        storage: None,
        owner: capsule.clone().into_any().unbind(),
    })
}
