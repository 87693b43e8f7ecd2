//! What is noticed and counted: calls by name, broken rules, objects that are left over.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Where all processes write what they notice.
pub(crate) const VIOLATIONS_FILE: &str = "violations.log";

/// Calls that wait for the device inside themselves, which a transfer path may not.
pub(crate) const SYNCHRONISING: &[&str] = &[
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemcpy",
    "cuMemcpyPeer",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoD_v2",
    "cuMemsetD8_v2",
    "cuMemsetD32_v2",
];

/// Counts and notes of this process.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    calls: Mutex<HashMap<&'static str, u64>>,
    violations: Mutex<Vec<String>>,
    log: Mutex<Option<File>>,
    /// Calls of the code under test.
    pub(crate) total: AtomicU64,
    /// Copies from or to host memory that is not page-locked.
    pub(crate) unpinned_copies: AtomicU64,
    /// Single copies that were asked for, those of a batch or a kernel included.
    pub(crate) copies: AtomicU64,
    /// Bytes that copies and kernels have moved.
    pub(crate) bytes: AtomicU64,
    /// Contexts that were made, primary ones included.
    pub(crate) contexts_created: AtomicU64,
    /// Bytes of host memory that the code under test has page-locked now.
    pub(crate) pinned_bytes: AtomicU64,
    /// The most that [`Checker::pinned_bytes`] ever was.
    pub(crate) pinned_peak: AtomicU64,
}

impl Checker {
    /// One that also writes into the directory's log.
    pub(crate) fn new(directory: Option<&Path>) -> Checker {
        let open = |directory: &Path| {
            let path = directory.join(VIOLATIONS_FILE);
            File::options().append(true).create(true).open(path).ok()
        };
        Checker {
            log: Mutex::new(directory.and_then(open)),
            ..Checker::default()
        }
    }

    /// A call of the code under test.
    pub(crate) fn called(&self, name: &'static str) {
        self.total.fetch_add(1, Ordering::Relaxed);
        *self.calls.lock().entry(name).or_default() += 1;
    }

    /// A rule was broken.
    pub(crate) fn violation(&self, what: &str) {
        eprintln!("fake-cuda: violation: {what}");
        if let Some(log) = &mut *self.log.lock() {
            // One write, so that lines of several processes do not mix. A full disk is noticed elsewhere.
            let _ = log.write_all(format!("process {}: {what}\n", std::process::id()).as_bytes());
        }
        self.violations.lock().push(what.to_owned());
    }

    /// What was noticed in this process, a line for each.
    pub(crate) fn violations(&self) -> String {
        self.violations
            .lock()
            .iter()
            .fold(String::new(), |text, what| text + what + "\n")
    }

    /// The code under test has page-locked or released host memory.
    pub(crate) fn pinned(&self, bytes: u64, now: bool) {
        if now {
            let all = self.pinned_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
            self.pinned_peak.fetch_max(all, Ordering::Relaxed);
        } else {
            self.pinned_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// The calls of that name, or what else is counted; `*` is all calls, `synchronising` those that wait.
    pub(crate) fn count(&self, name: &str) -> u64 {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        match name {
            "*" => of(&self.total),
            "synchronising" => {
                let calls = self.calls.lock();
                SYNCHRONISING.iter().filter_map(|name| calls.get(name)).sum()
            }
            "violations" => self.violations.lock().len() as u64,
            "unpinned_copies" => of(&self.unpinned_copies),
            "copies" => of(&self.copies),
            "bytes" => of(&self.bytes),
            "contexts_created" => of(&self.contexts_created),
            "pinned_bytes" => of(&self.pinned_bytes),
            "pinned_peak" => of(&self.pinned_peak),
            call => self.calls.lock().get(call).copied().unwrap_or(0),
        }
    }

    /// All calls with their counts, a line for each, by name.
    pub(crate) fn calls(&self) -> String {
        let mut calls: Vec<(&str, u64)> = self.calls.lock().iter().map(|(name, count)| (*name, *count)).collect();
        calls.sort_unstable();
        calls
            .iter()
            .fold(String::new(), |text, (name, count)| text + &format!("{name} {count}\n"))
    }
}
