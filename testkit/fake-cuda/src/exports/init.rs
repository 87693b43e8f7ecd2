//! Beginning, versions, errors by name, and functions by name.

use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;

use super::{In, Out};
use crate::driver::own_path;
use crate::names;

driver_calls! {
    cuInit(flags: u32) |driver| {
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        driver.initialise()
    }

    cuDriverGetVersion(version: Out<i32>) |driver| {
        version.set(driver.general().map_or(0, |settings| settings.driver_version))
    }

    cuGetErrorName(error: u32, text: Out<*const c_char>) |_driver| {
        let (name, _) = names::texts(error).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        text.set(name.as_ptr())
    }

    cuGetErrorString(error: u32, text: Out<*const c_char>) |_driver| {
        let (_, meaning) = names::texts(error).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        text.set(meaning.as_ptr())
    }

    cuGetProcAddress_v2(symbol: In<c_char>, function: Out<*mut c_void>, version: i32, flags: u64, status: Out<u32>) |driver| {
        const FOUND: u32 = 0;
        const NOT_FOUND: u32 = 1;
        const VERSION_NOT_SUFFICIENT: u32 = 2;
        let _ = flags;
        let name = symbol.text()?;
        let own = driver.general().map_or(0, |settings| settings.driver_version);
        let known = SINCE.iter().filter(|(base, ..)| *base == name);
        let (found, answer) = match known.clone().rfind(|(_, _, since)| *since <= version.min(own)) {
            Some((_, symbol, _)) => (address_of(symbol), FOUND),
            None if known.clone().any(|(_, _, since)| *since <= own) => (None, VERSION_NOT_SUFFICIENT),
            None if known.count() > 0 => (None, NOT_FOUND),
            // Of those that never had another version, all versions know.
            None => (address_of(&name), FOUND),
        };
        let answer = if found.is_none() && answer == FOUND { NOT_FOUND } else { answer };
        status.offer(answer);
        function.set(found.unwrap_or(std::ptr::null_mut()))
    }
}

/// Functions that have several versions or are younger than all drivers of interest: name, symbol, first version; the
/// versions of a name by age.
const SINCE: &[(&str, &str, i32)] = &[
    ("cuGetProcAddress", "cuGetProcAddress_v2", 12_000),
    ("cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3_020),
    ("cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11_040),
    ("cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11_000),
    ("cuCtxCreate", "cuCtxCreate_v2", 3_020),
    ("cuCtxDestroy", "cuCtxDestroy_v2", 4_000),
    ("cuCtxPushCurrent", "cuCtxPushCurrent_v2", 4_000),
    ("cuCtxPopCurrent", "cuCtxPopCurrent_v2", 4_000),
    ("cuMemGetInfo", "cuMemGetInfo_v2", 3_020),
    ("cuMemAlloc", "cuMemAlloc_v2", 3_020),
    ("cuMemFree", "cuMemFree_v2", 3_020),
    ("cuMemGetAddressRange", "cuMemGetAddressRange_v2", 3_020),
    ("cuMemAllocHost", "cuMemAllocHost_v2", 3_020),
    ("cuMemHostGetDevicePointer", "cuMemHostGetDevicePointer_v2", 3_020),
    ("cuMemHostRegister", "cuMemHostRegister_v2", 6_050),
    ("cuMemcpyHtoD", "cuMemcpyHtoD_v2", 3_020),
    ("cuMemcpyDtoH", "cuMemcpyDtoH_v2", 3_020),
    ("cuMemcpyDtoD", "cuMemcpyDtoD_v2", 3_020),
    ("cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", 3_020),
    ("cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", 3_020),
    ("cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", 3_020),
    ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12_080),
    ("cuMemsetD8", "cuMemsetD8_v2", 3_020),
    ("cuMemsetD32", "cuMemsetD32_v2", 3_020),
    ("cuStreamDestroy", "cuStreamDestroy_v2", 4_000),
    ("cuStreamBeginCapture", "cuStreamBeginCapture_v2", 10_010),
    ("cuStreamWaitValue32", "cuStreamWaitValue32_v2", 11_070),
    ("cuStreamWaitValue64", "cuStreamWaitValue64_v2", 11_070),
    ("cuStreamWriteValue32", "cuStreamWriteValue32_v2", 11_070),
    ("cuStreamWriteValue64", "cuStreamWriteValue64_v2", 11_070),
    ("cuEventDestroy", "cuEventDestroy_v2", 4_000),
    ("cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", 11_000),
    ("cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 11_070),
    ("cuFlushGPUDirectRDMAWrites", "cuFlushGPUDirectRDMAWrites", 11_030),
];

/// A function of this library, as the loader finds it: not one that a test has taken away.
fn address_of(symbol: &str) -> Option<*mut c_void> {
    static OWN: OnceLock<usize> = OnceLock::new();
    let own = *OWN.get_or_init(|| {
        let path = own_path().and_then(|path| CString::new(path.as_os_str().as_bytes()).ok());
        let Some(path) = path else { return 0 };
        // SAFETY: a C string; the library is loaded, so nothing runs.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.addr()
    });
    let symbol = CString::new(symbol).ok().filter(|_| own != 0)?;
    // SAFETY: a handle that stays, and a C string.
    let address = unsafe { libc::dlsym(own as *mut c_void, symbol.as_ptr()) };
    (!address.is_null()).then_some(address)
}
