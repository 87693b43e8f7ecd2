//! The driver's error codes by name, number and meaning.

use std::ffi::CStr;

use cudarc::driver::sys::CUresult;

const PREFIX: &str = "CUDA_ERROR_";

macro_rules! codes {
    ($($name:ident: $text:literal,)*) => {
        const CODES: &[(CUresult, &CStr, &CStr)] = &[$((
            CUresult::$name,
            // Both are literals that end in a nul byte.
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) { Ok(text) => text, Err(_) => c"" },
            match CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()) { Ok(text) => text, Err(_) => c"" },
        ),)*];
    };
}

codes! {
    CUDA_SUCCESS: "no error",
    CUDA_ERROR_INVALID_VALUE: "invalid argument",
    CUDA_ERROR_OUT_OF_MEMORY: "out of memory",
    CUDA_ERROR_NOT_INITIALIZED: "initialization error",
    CUDA_ERROR_DEINITIALIZED: "driver shutting down",
    CUDA_ERROR_STUB_LIBRARY: "CUDA driver is a stub library",
    CUDA_ERROR_NO_DEVICE: "no CUDA-capable device is detected",
    CUDA_ERROR_INVALID_DEVICE: "invalid device ordinal",
    CUDA_ERROR_INVALID_IMAGE: "device kernel image is invalid",
    CUDA_ERROR_INVALID_CONTEXT: "invalid device context",
    CUDA_ERROR_MAP_FAILED: "mapping of buffer object failed",
    CUDA_ERROR_UNMAP_FAILED: "unmapping of buffer object failed",
    CUDA_ERROR_ALREADY_MAPPED: "resource already mapped",
    CUDA_ERROR_NO_BINARY_FOR_GPU: "no kernel image is available for execution on the device",
    CUDA_ERROR_ECC_UNCORRECTABLE: "uncorrectable ECC error encountered",
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: "peer access is not supported between these two devices",
    CUDA_ERROR_INVALID_PTX: "a PTX JIT compilation failed",
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION: "the provided PTX was compiled with an unsupported toolchain.",
    CUDA_ERROR_OPERATING_SYSTEM: "OS call failed or operation not supported on this OS",
    CUDA_ERROR_INVALID_HANDLE: "invalid resource handle",
    CUDA_ERROR_ILLEGAL_STATE: "the operation cannot be performed in the present state",
    CUDA_ERROR_NOT_FOUND: "named symbol not found",
    CUDA_ERROR_NOT_READY: "device not ready",
    CUDA_ERROR_ILLEGAL_ADDRESS: "an illegal memory access was encountered",
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: "too many resources requested for launch",
    CUDA_ERROR_LAUNCH_TIMEOUT: "the launch timed out and was terminated",
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: "peer access is already enabled",
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: "peer access has not been enabled",
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE: "cannot set while device is active in this process",
    CUDA_ERROR_CONTEXT_IS_DESTROYED: "context is destroyed",
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: "part or all of the requested memory range is already mapped",
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: "pointer does not correspond to a registered memory region",
    CUDA_ERROR_MISALIGNED_ADDRESS: "misaligned address",
    CUDA_ERROR_LAUNCH_FAILED: "unspecified launch failure",
    CUDA_ERROR_NOT_PERMITTED: "operation not permitted",
    CUDA_ERROR_NOT_SUPPORTED: "operation not supported",
    CUDA_ERROR_SYSTEM_NOT_READY: "system not yet initialized",
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: "system has unsupported display driver / cuda driver combination",
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: "operation not permitted when stream is capturing",
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: "operation failed due to a previous error during capture",
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED: "capture was not initiated in this stream",
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED: "capturing stream has unjoined work",
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION: "dependency created on uncaptured work in another stream",
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: "operation would make the legacy stream depend on a capturing blocking stream",
    CUDA_ERROR_CAPTURED_EVENT: "operation not permitted on an event last recorded in a capturing stream",
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: "attempt to terminate a thread-local capture sequence from another thread",
    CUDA_ERROR_TIMEOUT: "wait operation timed out",
    CUDA_ERROR_UNKNOWN: "unknown error",
}

/// The code of that name, with or without its prefix, or of that number.
pub(crate) fn code(text: &str) -> Option<CUresult> {
    if let Ok(number) = text.parse::<u32>() {
        return from_number(number);
    }
    let full = format!("{PREFIX}{text}");
    CODES
        .iter()
        .find(|(_, name, _)| name.to_str().is_ok_and(|name| name == text || name == full))
        .map(|(code, _, _)| *code)
}

/// The code of that number, if this driver knows it.
pub(crate) fn from_number(number: u32) -> Option<CUresult> {
    CODES
        .iter()
        .map(|(code, _, _)| *code)
        .find(|code| *code as u32 == number)
}

/// Its name and what it means.
pub(crate) fn texts(number: u32) -> Option<(&'static CStr, &'static CStr)> {
    CODES
        .iter()
        .find(|(code, _, _)| *code as u32 == number)
        .map(|(_, name, text)| (*name, *text))
}
