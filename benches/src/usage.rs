//! What a process uses: processor time, memory, threads, and what others use of the machine meanwhile.

use std::time::{Duration, Instant};

use kvxfer_core::{Error, ErrorKind, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Cores that others may use during a repetition before it counts as disturbed.
const FOREIGN_CORES_MAX: f64 = 0.25;

/// Processor time of this process so far, user and system, all threads.
pub(crate) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

/// Processor time of the calling thread so far.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

/// Nanoseconds on the machine's clock: the same in all of its processes.
pub(crate) fn clock_nanos() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Resident memory of this process in bytes, now.
pub(crate) fn resident_bytes() -> Result<u64> {
    status_kib("VmRSS").map(|kib| kib << 10)
}

/// Highest resident memory since [`reset_resident_peak`].
pub(crate) fn resident_peak_bytes() -> Result<u64> {
    status_kib("VmHWM").map(|kib| kib << 10)
}

/// Makes the peak start from now. Without the right to do so the peak is since the start of the process.
pub(crate) fn reset_resident_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

fn status_kib(key: &str) -> Result<u64> {
    let path = "/proc/self/status";
    let bad = |why: String| {
        Error::new(ErrorKind::Unsupported, format!("{key} of this process"))
            .at(path)
            .because(why)
    };
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| bad("the kernel does not say".into()))
}

/// Watches what others use of the machine, so that disturbed repetitions can be told and dropped.
pub(crate) struct Quiet {
    patience: Duration,
}

impl Quiet {
    /// Waits at most `patience` in all for the machine to become quiet.
    pub(crate) fn new(patience: Duration) -> Self {
        Quiet { patience }
    }

    /// Waits until hardly anybody else computes, as far as the patience reaches.
    pub(crate) fn wait(&mut self) {
        while !self.patience.is_zero() {
            let (busy, begun) = (busy_seconds(), Instant::now());
            std::thread::sleep(Duration::from_millis(50));
            let cores = (busy_seconds() - busy) / begun.elapsed().as_secs_f64();
            // Clock ticks are 10 ms: a fifth of this window.
            if cores < FOREIGN_CORES_MAX + 0.2 {
                return;
            }
            std::thread::sleep(Duration::from_millis(150));
            self.patience = self.patience.saturating_sub(begun.elapsed());
        }
    }

    /// Whether the patience is used up.
    pub(crate) fn exhausted(&self) -> bool {
        self.patience.is_zero()
    }
}

/// Whether others used so much in a window that its figures are not to be trusted.
pub(crate) fn disturbed(busy: f64, own: Duration, window: Duration) -> bool {
    // A clock tick on each of two samples, 10 ms each.
    (busy - own.as_secs_f64()).max(0.0) > FOREIGN_CORES_MAX * window.as_secs_f64() + 0.02
}

/// Processor seconds used by anyone since the machine started, all cores.
pub(crate) fn busy_seconds() -> f64 {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<f64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // user, nice, system, then irq, softirq and steal; idle and iowait are left out.
    [0, 1, 2, 5, 6, 7].iter().filter_map(|&at| fields.get(at)).sum::<f64>() / ticks
}

/// What an idle process costs.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Idle {
    /// Share of a core.
    pub(crate) cores: f64,
    /// Resident memory.
    pub(crate) resident: u64,
}

/// Sleeps, and says what that cost.
pub(crate) fn idle(seconds: f64) -> Result<Idle> {
    let (cpu, begun) = (processor_time(), Instant::now());
    std::thread::sleep(Duration::from_secs_f64(seconds.clamp(0.0, 60.0)));
    Ok(Idle {
        cores: (processor_time() - cpu).as_secs_f64() / begun.elapsed().as_secs_f64(),
        resident: resident_bytes()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_seen() {
        let (own, busy, begun) = (processor_time(), busy_seconds(), Instant::now());
        while begun.elapsed() < Duration::from_millis(60) {
            std::hint::spin_loop();
        }
        assert!(processor_time() - own > Duration::from_millis(5));
        assert!(busy_seconds() >= busy);
        assert!(resident_bytes().unwrap() > 1 << 20);
        assert!(resident_peak_bytes().unwrap() >= resident_bytes().unwrap() / 2);
    }

    #[test]
    fn foreign_work_disturbs_and_own_does_not() {
        let second = Duration::from_secs(1);
        assert!(disturbed(1.5, second, second));
        assert!(!disturbed(1.1, second, second));
    }
}
