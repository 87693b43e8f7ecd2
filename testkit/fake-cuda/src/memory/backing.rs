//! The bytes of device memory: a file in memory, mapped where only this library knows, while the address that the
//! driver hands out leads to nothing that the CPU may touch.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use parking_lot::RwLock;

/// The unit in which the driver reserves addresses and makes physical memory.
pub(crate) const BLOCK: u64 = 2 << 20;
/// A host page.
pub(crate) const PAGE: u64 = 4096;

/// The bytes of one physical allocation, shared with other processes by its file.
#[derive(Debug)]
pub(crate) struct Backing {
    file: File,
    bytes: Mapped,
    /// What network devices see instead, where their writes need a flush to be visible to the device.
    pub(crate) shadow: RwLock<Option<Shadow>>,
}

/// A second file with the same bytes: network devices map it, the device's own writes go to both, and what network
/// devices write reaches the device only when it is published.
#[derive(Debug)]
pub(crate) struct Shadow {
    file: File,
    bytes: Mapped,
}

#[derive(Debug)]
struct Mapped {
    base: *mut u8,
    length: usize,
}

// SAFETY: the bytes are touched by raw copies only, as a device would; the mapping stays as long as the value.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and used by nobody else any more.
        unsafe { libc::munmap(self.base.cast(), self.length) };
    }
}

fn map(file: &File, length: usize) -> io::Result<Mapped> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let descriptor = file.as_raw_fd();
    // SAFETY: a new mapping, wherever the system wants it.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            protection,
            libc::MAP_SHARED,
            descriptor,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(Mapped {
        base: base.cast(),
        length,
    })
}

fn memory_file(length: u64) -> io::Result<File> {
    // SAFETY: a C string; the result is checked.
    let descriptor = unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
    file.set_len(length)?;
    Ok(file)
}

/// A descriptor of its own of the same file, positioned at `offset`: the first byte that the descriptor stands for. (A
/// file cannot be cut; whoever maps it adds the position.)
fn reopen(file: &File, offset: u64) -> io::Result<OwnedFd> {
    use std::io::Seek;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut own = File::options().read(true).write(true).open(path)?;
    own.seek(io::SeekFrom::Start(offset))?;
    Ok(own.into())
}

impl Backing {
    /// Zeroed bytes; a whole number of blocks.
    pub(crate) fn new(length: u64) -> io::Result<Arc<Backing>> {
        Backing::of(memory_file(length)?)
    }

    /// The bytes that another process made.
    pub(crate) fn of(file: File) -> io::Result<Arc<Backing>> {
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let bytes = map(&file, length)?;
        Ok(Arc::new(Backing {
            file,
            bytes,
            shadow: RwLock::new(None),
        }))
    }

    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.bytes.length as u64
    }

    /// Where the byte at that offset really is. The offset lies inside.
    pub(crate) fn pointer(&self, offset: u64) -> *mut u8 {
        self.bytes.base.wrapping_add(offset as usize)
    }

    /// The file's number in this process and in the system, by which others open it.
    pub(crate) fn identity(&self) -> io::Result<(RawFd, u64)> {
        Ok((self.file.as_raw_fd(), self.file.metadata()?.ino()))
    }

    /// A descriptor of the bytes themselves.
    pub(crate) fn export(&self, offset: u64) -> io::Result<OwnedFd> {
        reopen(&self.file, offset)
    }

    /// A descriptor for network devices whose writes need a flush.
    pub(crate) fn export_shadowed(&self, offset: u64) -> io::Result<OwnedFd> {
        let mut shadow = self.shadow.write();
        let shadow = match &mut *shadow {
            Some(shadow) => shadow,
            none => {
                let file = memory_file(self.length())?;
                let bytes = map(&file, self.bytes.length)?;
                // SAFETY: both are mapped and as long; the lock keeps the device's writes away.
                unsafe { std::ptr::copy_nonoverlapping(self.bytes.base, bytes.base, bytes.length) };
                none.insert(Shadow { file, bytes })
            }
        };
        reopen(&shadow.file, offset)
    }

    /// Makes what network devices have written visible to the device.
    pub(crate) fn publish(&self) {
        let shadow = self.shadow.write();
        if let Some(shadow) = &*shadow {
            // Where the two differ, a network device has written: the device's own writes went to both.
            // SAFETY: both are mapped and as long; the lock keeps the device's writes away.
            unsafe { std::ptr::copy_nonoverlapping(shadow.bytes.base, self.bytes.base, self.bytes.length) };
        }
    }

    /// The device writes `length` bytes at `offset`: `write` is called with each place where they go.
    pub(crate) fn write(&self, offset: u64, write: impl Fn(*mut u8)) {
        let shadow = self.shadow.read();
        write(self.pointer(offset));
        if let Some(shadow) = &*shadow {
            write(shadow.bytes.base.wrapping_add(offset as usize));
        }
    }
}

/// Addresses that lead nowhere: touching one is a fault. A whole number of blocks, aligned to `alignment` (a power of
/// two).
pub(crate) fn reserve(length: u64, alignment: u64) -> io::Result<u64> {
    let whole = (length + alignment) as usize;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, wherever the system wants it.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), whole, libc::PROT_NONE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let first = base.addr() as u64;
    let aligned = first.next_multiple_of(alignment);
    for (from, to) in [(first, aligned), (aligned + length, first + whole as u64)] {
        if to > from {
            release(from, to - from);
        }
    }
    Ok(aligned)
}

/// Gives reserved addresses back.
pub(crate) fn release(address: u64, length: u64) {
    // SAFETY: addresses that `reserve` mapped and nobody can have touched.
    unsafe { libc::munmap(address as *mut libc::c_void, length as usize) };
}

/// Zeroed memory of the host's.
pub(crate) fn host(length: u64) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let length = length.next_multiple_of(PAGE) as usize;
    // SAFETY: a new mapping, wherever the system wants it.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(base.addr() as u64)
}

/// Whether all these addresses are mapped in the process.
pub(crate) fn is_mapped(address: u64, length: u64) -> bool {
    let first = address & !(PAGE - 1);
    let last = (address + length).next_multiple_of(PAGE);
    // SAFETY: asks about pages; touches none.
    unsafe { libc::msync(first as *mut libc::c_void, (last - first) as usize, libc::MS_ASYNC) == 0 }
}
