//! Fork: what was made before it is of no use in the child, whose threads are gone.
//!
//! Objects note the generation they were made in; the child of a fork is the next one. In the child their calls raise,
//! and what they hold is leaked: giving it back would join threads that do not exist, or take locks that a thread of
//! the parent held.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::error::raise;

static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn forked() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Notes forks from now on. `pthread_atfork` rather than `os.register_at_fork`: it sees forks of C code too.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only adds to an atomic, which is safe between fork and exec; extension modules are
        // never unloaded, so it stays mapped.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
}

/// How many forks lie between this process and the one that loaded the module.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Something that belongs to the process it was made in. In a forked child it cannot be used and is leaked.
pub(crate) struct Local<T> {
    value: ManuallyDrop<T>,
    generation: u32,
}

impl<T> Local<T> {
    pub(crate) fn new(value: T) -> Local<T> {
        Local {
            value: ManuallyDrop::new(value),
            generation: generation(),
        }
    }

    /// Whether it was made before a fork.
    pub(crate) fn is_foreign(&self) -> bool {
        self.generation != generation()
    }

    /// The value; `Unsupported` in a forked child.
    pub(crate) fn get(&self) -> PyResult<&T> {
        if self.is_foreign() {
            return Err(refused(std::any::type_name::<T>()));
        }
        Ok(&self.value)
    }

    /// The value, if this is the process it was made in, leaving the default: for finalisers.
    pub(crate) fn take_here(&mut self) -> Option<T>
    where
        T: Default,
    {
        (!self.is_foreign()).then(|| std::mem::take(&mut *self.value))
    }

    /// The value, if this is the process it was made in.
    pub(crate) fn here(&self) -> Option<&T> {
        (!self.is_foreign()).then_some(&*self.value)
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        if !self.is_foreign() {
            // SAFETY: dropped once, here; nothing uses it after.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

fn refused(name: &str) -> PyErr {
    let name = name.rsplit("::").next().unwrap_or(name);
    raise(
        Error::new(ErrorKind::Unsupported, format!("an object ({name}) made before fork"))
            .because("its threads and connections stayed in the parent process")
            .remedy("use the start method spawn, or make a new endpoint in the child"),
    )
}
