//! Which generation of the configuration each context goes by: a number in a file that it holds locked as long as its
//! process lives.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const SUFFIX: &str = "seen";

/// A context's file.
#[derive(Debug)]
pub(crate) struct Seen(Option<File>);

impl Seen {
    /// Makes the file of context `number`.
    pub(crate) fn new(fabric: &Path, number: u32) -> io::Result<Seen> {
        let path = fabric.join(format!("{number}.{SUFFIX}"));
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        file.lock()?;
        Ok(Seen(Some(file)))
    }

    /// The context goes by this generation.
    pub(crate) fn record(&self, generation: u64) {
        if let Some(file) = &self.0 {
            // A full disk makes who waits for this time out, which says enough.
            let _ = file.write_all_at(&generation.to_le_bytes(), 0);
        }
    }

    /// The context goes by nothing any more.
    pub(crate) fn close(&mut self) {
        self.0 = None;
    }
}

/// Whether all contexts that live go by `generation` or a later one.
pub(crate) fn by_all(fabric: &Path, generation: u64) -> io::Result<bool> {
    for entry in std::fs::read_dir(fabric)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == SUFFIX) && !has_seen(&path, generation)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn has_seen(path: &Path, generation: u64) -> io::Result<bool> {
    let file = File::open(path)?;
    match file.try_lock_shared() {
        // Nobody holds it: its process is gone.
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => {
            let mut number = [0; 8];
            let written = file.read_exact_at(&mut number, 0).is_ok();
            Ok(written && u64::from_le_bytes(number) >= generation)
        }
        Err(TryLockError::Error(error)) => Err(error),
    }
}
