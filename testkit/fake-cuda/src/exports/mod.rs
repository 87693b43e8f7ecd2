//! The C interface: functions with the driver's names and, as far as a caller can tell, signatures. Handles are numbers
//! here and enumerations their integers, since callers may pass what is neither. Nothing unwinds out: a panic in an
//! `extern "C"` function ends the process.
//!
//! None of these functions is called from inside the library, so that a real libcuda in the same process cannot take
//! their place.

// What is `no_mangle` is exported by name whatever its module's visibility.
#![allow(unreachable_pub, non_snake_case)]

/// Exports driver calls: each is counted, may be made to fail, and then runs its body, which answers `Answer`.
macro_rules! driver_calls {
    ($($name:ident($($arg:ident: $type:ty),*) |$driver:ident| $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the driver.")]
        ///
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> cudarc::driver::sys::CUresult {
            $crate::driver::call(stringify!($name), |$driver| $body)
        }
    )*};
}

mod capture;
mod context;
mod control;
mod copy;
mod device;
mod dmabuf;
mod event;
mod init;
mod ipc;
mod kernel;
mod memory;
mod pointer;
mod stream;
mod value;
mod vmm;

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::CUresult;

use crate::driver::Answer;

/// A driver object, as callers see it.
type Handle = usize;

/// An argument through which a call answers. It only comes from callers, who promise as for the driver's own functions
/// that it is null or can be written.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Answers.
    fn set(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promised.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Answers, if the caller wants to know.
    fn offer(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as above.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// The argument at that index of an array.
    fn nth(self, index: usize) -> Out<T> {
        Out(self.0.wrapping_add(index))
    }

    /// What is there now.
    fn get(self) -> Answer<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }
}

impl Out<c_char> {
    /// Answers with text in a buffer of that length, cut to fit.
    fn set_text(self, text: &str, length: i32) -> Answer {
        let room = usize::try_from(length).ok().and_then(|length| length.checked_sub(1));
        let room = room.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let bytes = &text.as_bytes()[..room.min(text.len())];
        for (index, byte) in bytes.iter().chain([&0]).enumerate() {
            self.nth(index).set(*byte as c_char)?;
        }
        Ok(())
    }
}

/// An argument that a call reads. It only comes from callers, who promise as for the driver's own functions that it is
/// null or can be read.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// The value.
    fn get(self) -> Answer<T> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promised.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The value at that index of an array.
    fn nth(self, index: usize) -> In<T> {
        In(self.0.wrapping_add(index))
    }

    /// So many values.
    fn list(self, count: usize) -> Answer<Vec<T>> {
        if count > 0 && self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        (0..count).map(|index| self.nth(index).get()).collect()
    }
}

impl In<c_char> {
    /// The text.
    fn text(self) -> Answer<String> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promised a C string.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// A device's number in range of what there can be.
fn device_number(device: i32) -> Answer<u32> {
    u32::try_from(device).map_err(|_| CUresult::CUDA_ERROR_INVALID_DEVICE)
}
