//! The benchmark's own memory: one mapping per process, in 4 KiB pages, touched before anything is timed.

use std::ptr::NonNull;
use std::sync::Arc;

use kvxfer_core::memory::{HostMemory, Region};
use kvxfer_core::{Error, ErrorKind, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// The page size that the figures are stated for.
pub const PAGE_BYTES: usize = 4096;

/// A mapping of whole pages, unmapped when the last user drops it.
///
/// It is read and written through raw copies only: a transfer may be writing into it, so no reference into it exists.
pub struct Memory {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: an address and a length; all access is by raw copies that tolerate concurrent writers.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Private memory of `length` bytes (rounded up to a page) in 4 KiB pages, every page touched.
    ///
    /// # Errors
    /// `InvalidArgument` for zero, `ResourceExhausted` if the system has no memory.
    pub fn touched(length: usize) -> Result<Arc<Memory>> {
        let length = rounded(length)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|errno| exhausted(length, errno))?;
        let memory = Memory::over(base, length)?;
        // SAFETY: the advice concerns our own mapping. A kernel without huge pages refuses it, and then has 4 KiB pages.
        let _ = unsafe { madvise(base, length, Advice::LinuxNoHugepage) };
        for offset in (0..length).step_by(PAGE_BYTES) {
            memory.set_word(offset, 1);
        }
        Ok(Arc::new(memory))
    }

    /// `length` bytes of address space that repeat the same `window` bytes of physical memory, touched.
    ///
    /// It stands in for a pool larger than the machine has room for: sender and receiver both repeat, with the same
    /// window, and every byte still crosses the socket.
    ///
    /// # Errors
    /// As for [`Memory::touched`].
    pub fn repeating(length: usize, window: usize) -> Result<Arc<Memory>> {
        let (length, window) = (rounded(length)?, rounded(window)?);
        let file = rustix::fs::memfd_create("kvxfer-bench", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|errno| exhausted(window, errno))?;
        rustix::fs::ftruncate(&file, window as u64).map_err(|errno| exhausted(window, errno))?;
        // SAFETY: reserves address space at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::empty(), MapFlags::PRIVATE) }
            .map_err(|errno| exhausted(length, errno))?;
        let memory = Memory::over(base, length)?;
        for offset in (0..length).step_by(window) {
            // SAFETY: replaces a part of the reservation made above, which nothing else uses.
            unsafe {
                mmap(
                    base.cast::<u8>().add(offset).cast(),
                    window.min(length - offset),
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE,
                    &file,
                    0,
                )
            }
            .map_err(|errno| exhausted(window, errno))?;
        }
        Ok(Arc::new(memory))
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The mapping as a region that keeps it alive.
    ///
    /// # Errors
    /// Those of [`Region::from_raw`].
    pub fn region(self: &Arc<Self>) -> Result<Arc<Region>> {
        // SAFETY: the mapping lives until the keepalive, a reference to it, is dropped with the region; nothing in this
        // crate holds a Rust reference into it.
        unsafe {
            Region::from_raw(
                self.address(),
                self.length as u64,
                Arc::new(HostMemory),
                Box::new(Arc::clone(self)),
            )
        }
    }

    /// Writes a word at a byte offset that is a multiple of 8.
    pub fn set_word(&self, offset: usize, value: u64) {
        assert!(
            offset.is_multiple_of(8) && offset + 8 <= self.length,
            "word at {offset}"
        );
        // SAFETY: checked to be inside the mapping and aligned.
        unsafe { self.address().add(offset).cast::<u64>().write_volatile(value) }
    }

    /// Reads the word at a byte offset that is a multiple of 8.
    pub fn word(&self, offset: usize) -> u64 {
        assert!(
            offset.is_multiple_of(8) && offset + 8 <= self.length,
            "word at {offset}"
        );
        // SAFETY: checked to be inside the mapping and aligned.
        unsafe { self.address().add(offset).cast::<u64>().read_volatile() }
    }

    /// Copies words out, from a byte offset that is a multiple of 8.
    pub fn read_words(&self, offset: usize, into: &mut [u64]) {
        assert!(offset.is_multiple_of(8) && into.len() * 8 <= self.length && offset <= self.length - into.len() * 8);
        // SAFETY: checked to be inside the mapping and aligned; `into` is a Rust slice and so cannot overlap it.
        unsafe {
            std::ptr::copy_nonoverlapping(self.address().add(offset).cast::<u64>(), into.as_mut_ptr(), into.len())
        }
    }

    /// Copies words in, to a byte offset that is a multiple of 8.
    pub fn write_words(&self, offset: usize, from: &[u64]) {
        assert!(offset.is_multiple_of(8) && from.len() * 8 <= self.length && offset <= self.length - from.len() * 8);
        // SAFETY: checked to be inside the mapping and aligned; `from` is a Rust slice and so cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.address().add(offset).cast::<u64>(), from.len()) }
    }

    fn over(base: *mut std::ffi::c_void, length: usize) -> Result<Memory> {
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the kernel mapped memory at address zero"))?;
        Ok(Memory { base, length })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by the constructors with this length, and unmapped only here. An error here leaks the mapping,
        // which is the safe side.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}

fn rounded(length: usize) -> Result<usize> {
    match length.checked_next_multiple_of(PAGE_BYTES) {
        Some(0) => Err(Error::new(ErrorKind::InvalidArgument, "a pool of 0 bytes").remedy("give at least one byte")),
        Some(rounded) if isize::try_from(rounded).is_ok() => Ok(rounded),
        _ => Err(
            Error::new(ErrorKind::InvalidArgument, format!("a pool of {length} bytes"))
                .because("it does not fit the address space")
                .remedy("give fewer --pool-bytes"),
        ),
    }
}

fn exhausted(length: usize, errno: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::ResourceExhausted, format!("{length} bytes of memory"))
        .because(errno.to_string())
        .remedy("free memory, or give fewer --pool-bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_go_in_and_out() {
        let memory = Memory::touched(10_000).unwrap();
        assert_eq!(memory.length(), 12_288);
        memory.write_words(8184, &[1, 2, 3]);
        let mut out = [0; 2];
        memory.read_words(8192, &mut out);
        assert_eq!(out, [2, 3]);
        assert_eq!(memory.word(8184), 1);
        assert_eq!(Memory::touched(0).err().unwrap().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_repeating_mapping_repeats() {
        let memory = Memory::repeating(5 * PAGE_BYTES, 2 * PAGE_BYTES).unwrap();
        memory.set_word(8, 77);
        assert_eq!(memory.word(2 * PAGE_BYTES + 8), 77);
        assert_eq!(memory.word(4 * PAGE_BYTES + 8), 77);
        assert_eq!(memory.word(PAGE_BYTES + 8), 0);
    }
}
