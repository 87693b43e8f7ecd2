//! What is written for the caller: values, structs that carry their size, texts, bytes.

use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use std::mem::size_of;

use kvxfer::Result;

use crate::call::Length;
use crate::input::{self, Grows, check_array};

/// Where one value goes.
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Checks the pointer.
    ///
    /// # Safety
    /// `pointer` is null or writable while this lives.
    pub(crate) unsafe fn new(what: &str, pointer: *mut T) -> Result<Out<T>> {
        check_array(what, pointer, 1)?;
        Ok(Out(pointer))
    }

    pub(crate) fn put(&self, value: T) {
        // SAFETY: not null and aligned, as `new` checked; writable, as its caller promised.
        unsafe { self.0.write(value) }
    }
}

impl Out<u64> {
    /// As [`new`](Self::new), for a handle: 0 until there is one, so that a failed call leaves no old one behind.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub(crate) unsafe fn handle(what: &str, pointer: *mut u64) -> Result<Out<u64>> {
        // SAFETY: the caller's word.
        let out = unsafe { Out::new(what, pointer)? };
        out.put(0);
        Ok(out)
    }
}

/// Where a struct that carries its size goes.
pub(crate) struct OutStruct<T> {
    to: *mut u8,
    size: usize,
    written: PhantomData<T>,
}

impl<T: Grows> OutStruct<T> {
    /// Checks the pointer and the size that the struct states.
    ///
    /// # Safety
    /// `pointer` is null, or points to as many writable bytes as its first four say.
    pub(crate) unsafe fn new(pointer: *mut T) -> Result<OutStruct<T>> {
        if pointer.is_null() {
            return Err(input::null(T::NAME));
        }
        // SAFETY: the caller's word.
        let size = unsafe { input::stated_size(pointer.cast_const())? };
        Ok(OutStruct {
            to: pointer.cast(),
            size,
            written: PhantomData,
        })
    }

    /// As [`new`](Self::new), where null says that the caller does not want it.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub(crate) unsafe fn optional(pointer: *mut T) -> Result<Option<OutStruct<T>>> {
        if pointer.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller's word.
        Ok(Some(unsafe { OutStruct::new(pointer)? }))
    }

    /// Writes as much of it as the caller knows, and zeros over what only the caller knows. The size stays.
    pub(crate) fn put(&self, value: T) {
        // SAFETY: `size` bytes are the caller's, as `new`'s caller promised.
        unsafe { write_struct(self.to, self.size, value) }
    }
}

/// # Safety
/// `size` bytes at `to` are writable.
unsafe fn write_struct<T: Grows>(to: *mut u8, size: usize, value: T) {
    let known = size.min(size_of::<T>());
    // SAFETY: both are at least that long; they cannot overlap, since `value` is ours.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(&value).cast::<u8>(), to, known);
        std::ptr::write_bytes(to.add(known), 0, size - known);
        // The caller's size, which is at most `STRUCT_BYTES_MAX`.
        to.cast::<u32>().write_unaligned(size as u32);
    }
}

/// Where an array of such structs goes.
pub(crate) struct OutStructs<T> {
    to: *mut u8,
    size: usize,
    capacity: usize,
    written: PhantomData<T>,
}

impl<T: Grows> OutStructs<T> {
    /// Checks the pointer and the element size.
    ///
    /// # Safety
    /// `pointer` is null, or points to `capacity` writable elements of `size` bytes.
    pub(crate) unsafe fn new(pointer: *mut T, size: usize, capacity: usize) -> Result<OutStructs<T>> {
        let size = input::element_size::<T>(size)?;
        check_array(T::NAME, pointer.cast::<u8>(), capacity.saturating_mul(size))?;
        Ok(OutStructs {
            to: pointer.cast(),
            size,
            capacity,
            written: PhantomData,
        })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Writes element `index`; nothing beyond the capacity.
    pub(crate) fn put(&self, index: usize, value: T) {
        if index < self.capacity {
            // SAFETY: inside the array that `new`'s caller promised.
            unsafe { write_struct(self.to.add(index * self.size), self.size, value) }
        }
    }
}

/// Where a text goes.
pub(crate) struct OutText {
    to: *mut u8,
    capacity: usize,
}

impl OutText {
    /// Checks the buffer. Null with capacity 0 only asks for the length.
    ///
    /// # Safety
    /// `buffer` is null, or points to `capacity` writable bytes.
    pub(crate) unsafe fn new(buffer: *mut c_char, capacity: usize) -> Result<OutText> {
        let to = buffer.cast::<u8>();
        check_array("buffer", to, capacity)?;
        Ok(OutText { to, capacity })
    }

    /// Writes as much as fits, by whole characters, and a NUL; gives the length of all of it.
    pub(crate) fn put(&self, text: &str) -> Length {
        if self.capacity > 0 {
            let mut length = text.len().min(self.capacity - 1);
            while !text.is_char_boundary(length) {
                length -= 1;
            }
            // SAFETY: `capacity` bytes are writable, as `new`'s caller promised, and `length` is less.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), self.to, length);
                self.to.add(length).write(0);
            }
        }
        Length(text.len())
    }
}

/// Where bytes go.
pub(crate) struct OutBytes {
    to: *mut u8,
    capacity: usize,
}

impl OutBytes {
    /// Checks the buffer. Null with capacity 0 only asks for the length.
    ///
    /// # Safety
    /// `buffer` is null, or points to `capacity` writable bytes.
    pub(crate) unsafe fn new(buffer: *mut c_void, capacity: usize) -> Result<OutBytes> {
        let to = buffer.cast::<u8>();
        check_array("buffer", to, capacity)?;
        Ok(OutBytes { to, capacity })
    }

    /// Writes them if they all fit, and gives their number.
    pub(crate) fn put(&self, bytes: &[u8]) -> Length {
        if bytes.len() <= self.capacity {
            // SAFETY: `capacity` bytes are writable, as `new`'s caller promised. With none the pointer is not used.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.to_or_dangling(), bytes.len()) };
        }
        Length(bytes.len())
    }

    fn to_or_dangling(&self) -> *mut u8 {
        match self.to.is_null() {
            true => std::ptr::NonNull::dangling().as_ptr(),
            false => self.to,
        }
    }
}

/// A text in a fixed field of a struct: as much as fits, by whole characters, and a NUL.
pub(crate) fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    let mut length = text.len().min(N - 1);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    for (to, from) in field.iter_mut().zip(&text.as_bytes()[..length]) {
        *to = *from as c_char;
    }
    field
}
