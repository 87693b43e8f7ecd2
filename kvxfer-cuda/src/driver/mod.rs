//! The only way to the CUDA driver: `libcuda.so.1`, loaded at run time, as a table of typed functions.
//!
//! cudarc supplies the types. Its functions are not used: it finds the library by itself, so that no path can be
//! configured, and a library or a symbol that is not there is a panic. Here both are answers.
//!
//! Every function counts its calls, and every refusal names the function and its `CUresult`.

mod code;
mod functions;

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

pub use code::Code;

use crate::error::CudaError;
use functions::{Lookup, Table};

/// What is loaded when no path is configured.
const DEFAULT_LIBRARY: &str = "libcuda.so.1";

/// The oldest driver that is used: 11.4, which knows how to flush GPUDirect writes and lets streams be asked for their context.
pub(crate) const VERSION_MIN: i32 = 11_040;

/// A call that the driver refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    /// The function.
    pub(crate) call: &'static str,
    /// What it returned.
    pub(crate) code: Code,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.code)
    }
}

/// The driver, loaded and initialised.
pub(crate) struct Driver {
    path: PathBuf,
    version: i32,
    table: Table,
    // Never unmapped (RTLD_NODELETE): the driver has threads of its own.
    _library: libloading::os::unix::Library,
}

// SAFETY: the table holds addresses of functions, which the driver's documentation declares thread-safe, and counters.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

impl Driver {
    /// Loads and initialises the driver at `path` (a file, or a name for the dynamic loader; empty: `libcuda.so.1`).
    ///
    /// # Errors
    /// `Load`, `MissingSymbol`, `TooOld`, `NoDevice`, or the call that failed.
    pub(crate) fn load(path: &str) -> Result<Driver, CudaError> {
        let path = PathBuf::from(if path.is_empty() { DEFAULT_LIBRARY } else { path });
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: loading runs the library's initialisers. The path is the system's driver or one that the operator
        // configured; what its initialisers do is theirs to vouch for. It is never unmapped, so that no thread of the
        // driver's outlives its code.
        let library = unsafe { libloading::os::unix::Library::open(Some(&path), flags) }.map_err(|error| {
            // The loader's words mostly start with the path, which the error names already.
            let words = error.to_string();
            let why = words.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&words);
            CudaError::Load {
                path: path.clone(),
                why: why.to_owned(),
            }
        })?;
        let table = find_functions(&library, &path)?;
        let mut driver = Driver {
            path,
            version: 0,
            table,
            _library: library,
        };
        driver.version = driver.ask_version()?;
        // SAFETY: takes flags, which must be 0.
        unsafe { driver.init(0) }.map_err(|refused| match refused.code {
            Code::NO_DEVICE => CudaError::NoDevice,
            _ => CudaError::call(refused, ""),
        })?;
        Ok(driver)
    }

    fn ask_version(&self) -> Result<i32, CudaError> {
        let mut version: c_int = 0;
        // SAFETY: writes one integer.
        unsafe { self.driver_version(&mut version) }.map_err(|refused| CudaError::call(refused, ""))?;
        if version < VERSION_MIN {
            return Err(CudaError::TooOld {
                path: self.path.clone(),
                have: version,
                need: VERSION_MIN,
            });
        }
        Ok(version)
    }

    /// What was loaded.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The newest CUDA version that it supports: 12080 is 12.8.
    pub(crate) fn version(&self) -> i32 {
        self.version
    }

    /// How often each of its functions was called.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.table.counts()
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({}, {})", self.path.display(), self.version)
    }
}

fn find_functions(library: &libloading::os::unix::Library, path: &Path) -> Result<Table, CudaError> {
    let symbol = |name: &str| -> *mut c_void {
        // SAFETY: the address is only compared and stored here; who calls it gives it its type.
        unsafe { library.get::<*mut c_void>(name.as_bytes()) }.map_or(std::ptr::null_mut(), |found| *found)
    };
    let get_address = symbol("cuGetProcAddress_v2");
    let mut missing = None;
    let find = |name: &'static str, lookup: Lookup| match lookup {
        Lookup::Required => {
            let found = symbol(name);
            if found.is_null() && missing.is_none() {
                missing = Some(name);
            }
            found
        }
        Lookup::Optional => symbol(name),
        Lookup::Versioned(version) => versioned(get_address, name, version),
    };
    // SAFETY: a symbol of the driver's has the signature that the driver's headers give it, which the table repeats; a
    // symbol's ABI never changes under its exported name, and a versioned look-up states the ABI it wants.
    let table = unsafe { Table::fill(find) };
    match missing {
        None => Ok(table),
        Some(symbol) => Err(CudaError::MissingSymbol {
            path: path.to_owned(),
            symbol,
        }),
    }
}

/// The function `name` as of a CUDA version; null if the driver does not have it.
fn versioned(get_address: *mut c_void, name: &str, version: c_int) -> *mut c_void {
    type GetAddress =
        unsafe extern "C" fn(*const std::ffi::c_char, *mut *mut c_void, c_int, u64, *mut c_uint) -> c_uint;
    let Ok(name) = CString::new(name) else {
        return std::ptr::null_mut();
    };
    if get_address.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the address is that of `cuGetProcAddress_v2`, which has this signature.
    let get_address: GetAddress = unsafe { std::mem::transmute(get_address) };
    let (mut found, mut status) = (std::ptr::null_mut(), 0);
    // SAFETY: `name` ends in a nul byte; the two results are written before the call returns.
    let code = unsafe { get_address(name.as_ptr(), &mut found, version, 0, &mut status) };
    match (Code(code), status) {
        (Code::SUCCESS, 0) => found,
        _ => std::ptr::null_mut(),
    }
}

/// Text that the driver wrote into a buffer.
pub(crate) fn text(buffer: &[u8]) -> String {
    match CStr::from_bytes_until_nul(buffer) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(buffer).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_a_typed_answer() {
        let error = Driver::load("/nonexistent/libcuda.so.1").unwrap_err();
        assert!(matches!(error, CudaError::Load { .. }), "{error:?}");
        assert!(error.to_string().contains("/nonexistent/libcuda.so.1"), "{error}");
    }

    #[test]
    fn another_library_is_refused_by_the_first_symbol_it_lacks() {
        let error = Driver::load("libc.so.6").unwrap_err();
        let CudaError::MissingSymbol { symbol, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(symbol, "cuInit");
    }
}
