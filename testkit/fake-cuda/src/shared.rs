//! What the processes that share a configuration have in common in memory: the generation of the configuration.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const FILE: &str = "generation";
const LENGTH: usize = 4096;

/// A page that all processes of a directory map. Stays mapped for good.
#[derive(Debug)]
pub(crate) struct Generation(&'static AtomicU64);

impl Generation {
    /// Makes the page of a new directory.
    pub(crate) fn create(directory: &Path) -> io::Result<Generation> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(directory.join(FILE))?;
        file.set_len(LENGTH as u64)?;
        Generation::map(&file)
    }

    /// The page of a directory that another made.
    pub(crate) fn open(directory: &Path) -> io::Result<Generation> {
        let file = File::options().read(true).write(true).open(directory.join(FILE))?;
        Generation::map(&file)
    }

    fn map(file: &File) -> io::Result<Generation> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, wherever the system wants it, of a file that is as long.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LENGTH,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: mapped just now, aligned to a page, and never unmapped; other processes touch it atomically too.
        Ok(Generation(unsafe { &*page.cast::<AtomicU64>() }))
    }

    /// The configuration has changed.
    pub(crate) fn advance(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Which configuration it is.
    pub(crate) fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}
