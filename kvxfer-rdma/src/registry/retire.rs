//! Giving registrations up without making anybody wait.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};
use kvxfer_core::memory::Region;
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::verbs::MemoryRegion;

/// Hands what nobody uses any more to the thread that deregisters it. The thread ends with the last clone.
#[derive(Clone, Debug)]
pub(super) struct Retirement {
    queue: Sender<Retired>,
    pending: Arc<Pending>,
}

/// Dropped in the order of the fields: the registrations before the memory.
struct Retired {
    memory: Vec<MemoryRegion>,
    region: Arc<Region>,
}

#[derive(Debug, Default)]
struct Pending {
    count: Mutex<usize>,
    none: Condvar,
}

impl Retirement {
    pub(super) fn start() -> Result<Retirement> {
        let (queue, work) = unbounded();
        let pending = Arc::new(Pending::default());
        let shared = pending.clone();
        thread::Builder::new()
            .name("kvx-dereg".to_owned())
            .spawn(move || run(&work, &shared))
            .map_err(|error| {
                Error::new(
                    ErrorKind::ResourceExhausted,
                    "the thread that deregisters memory did not start",
                )
                .because(error.to_string())
                .remedy("raise the limit of threads (ulimit -u, pids.max)")
            })?;
        Ok(Retirement { queue, pending })
    }

    /// Takes them over. Returns at once.
    pub(super) fn retire(&self, memory: Vec<MemoryRegion>, region: Arc<Region>) {
        *self.pending.count.lock() += 1;
        // The thread lives as long as there is a sender, so this fails only if it has panicked; the value is then
        // dropped here, which is slow and right.
        if self.queue.send(Retired { memory, region }).is_err() {
            self.pending.done();
        }
    }

    /// Waits until all that was taken over is deregistered.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut count = self.pending.count.lock();
        while *count > 0 {
            if self.pending.none.wait_until(&mut count, deadline).timed_out() {
                return *count == 0;
            }
        }
        true
    }
}

impl Pending {
    fn done(&self) {
        let mut count = self.count.lock();
        *count -= 1;
        if *count == 0 {
            self.none.notify_all();
        }
    }
}

fn run(work: &Receiver<Retired>, pending: &Pending) {
    for Retired { memory, region } in work {
        drop(memory);
        drop(region);
        pending.done();
    }
}
