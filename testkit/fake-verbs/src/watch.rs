//! Noticing that the configuration was written.

use std::fs::Metadata;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::device::CONFIG_FILE;

/// What tells of changes.
#[derive(Debug)]
pub(crate) enum Watch {
    /// The system does.
    Notified(OwnedFd),
    /// The system has no more instances for this user (often 128): one looks.
    Looking {
        /// The configuration file.
        file: PathBuf,
        /// As it was when one last looked.
        last: Option<Stamp>,
    },
}

/// Tells one written file from the next.
type Stamp = (u64, i64, i64, u64);

/// How often one looks.
const LOOK: Duration = Duration::from_millis(20);

impl Watch {
    /// Watches the configuration in a fabric's directory.
    pub(crate) fn new(fabric: &Path) -> Watch {
        match notified(fabric) {
            Ok(fd) => Watch::Notified(fd),
            Err(_) => {
                let file = fabric.join(CONFIG_FILE);
                let last = stamp(&file);
                Watch::Looking { file, last }
            }
        }
    }

    /// The descriptor that becomes readable, if there is one.
    pub(crate) fn fd(&self) -> RawFd {
        match self {
            Watch::Notified(fd) => fd.as_raw_fd(),
            // Not waited on.
            Watch::Looking { .. } => -1,
        }
    }

    /// How long one may sleep before [`Watch::changed`] is asked again.
    pub(crate) fn limit(&self) -> Option<Duration> {
        match self {
            Watch::Notified(_) => None,
            Watch::Looking { .. } => Some(LOOK),
        }
    }

    /// Whether there may be a change since it was last asked; `readable` is whether the descriptor is.
    pub(crate) fn changed(&mut self, readable: bool) -> bool {
        match self {
            Watch::Notified(fd) => {
                if readable {
                    drain(fd.as_raw_fd());
                }
                readable
            }
            Watch::Looking { file, last } => {
                let now = stamp(file);
                let changed = now != *last;
                *last = now;
                changed
            }
        }
    }
}

fn stamp(file: &Path) -> Option<Stamp> {
    let of = |metadata: Metadata| (metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.len());
    file.metadata().ok().map(of)
}

fn notified(directory: &Path) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked.
    let fd = unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let path = std::ffi::CString::new(directory.as_os_str().as_bytes())?;
    let mask = libc::IN_CLOSE_WRITE | libc::IN_MOVED_TO;
    // SAFETY: a C string that outlives the call.
    let watched = unsafe { libc::inotify_add_watch(fd.as_raw_fd(), path.as_ptr(), mask) };
    if watched < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(fd)
    }
}

fn drain(fd: RawFd) {
    let mut buffer = [0u8; 4096];
    // SAFETY: writable for its length; non-blocking, so it ends when there is nothing left.
    while unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) } > 0 {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_sees_a_file_that_was_moved_there() {
        let directory = std::env::temp_dir().join(format!("kvxfer-fake-{}-watch", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let file = directory.join(CONFIG_FILE);
        let mut watch = Watch::Looking {
            file: file.clone(),
            last: None,
        };
        assert!(!watch.changed(false));
        for text in ["a", "b"] {
            std::fs::write(directory.join("new"), text).unwrap();
            std::fs::rename(directory.join("new"), &file).unwrap();
            assert!(watch.changed(false));
            assert!(!watch.changed(false));
        }
        std::fs::remove_dir_all(directory).unwrap();
    }
}
