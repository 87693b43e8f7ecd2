//! What was measured, and the figures of it.

use kvxfer_core::{Error, Result};

use crate::side::Mover;
use crate::statistics::{median, quantile};

/// Clean repetitions below which disturbed ones are used too.
pub(crate) const CLEAN_MIN: usize = 5;

/// One repetition.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rep {
    pub(crate) seconds: f64,
    /// The submitting call alone.
    pub(crate) post_seconds: f64,
    /// Processor time in it: without what other threads took of its core meanwhile.
    pub(crate) post_cpu_seconds: f64,
    pub(crate) cpu_initiator: f64,
    pub(crate) cpu_target: f64,
    pub(crate) disturbed: bool,
    pub(crate) late: bool,
    pub(crate) arrived: bool,
}

/// What a mover did in one workload.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) mover: Mover,
    pub(crate) reps: Vec<Rep>,
    /// What checking every byte said; `None` if it was not asked for.
    pub(crate) checked: Option<Result<(), Error>>,
    /// Highest resident memory of initiator and target during its repetitions.
    pub(crate) resident_peak: (u64, u64),
    /// Round trips of the ping-pong, per round, in seconds.
    pub(crate) rounds: Vec<Vec<f64>>,
}

impl Measured {
    pub(crate) fn new(mover: Mover) -> Self {
        Measured {
            mover,
            reps: Vec::new(),
            checked: None,
            resident_peak: (0, 0),
            rounds: Vec::new(),
        }
    }

    pub(crate) fn clean(&self) -> usize {
        if self.reps.is_empty() && !self.rounds.is_empty() {
            return CLEAN_MIN;
        }
        self.reps.iter().filter(|rep| !rep.disturbed).count()
    }

    /// The repetitions that count: the clean ones if there are enough.
    pub(crate) fn counted(&self) -> Vec<Rep> {
        let clean: Vec<Rep> = self.reps.iter().copied().filter(|rep| !rep.disturbed).collect();
        if clean.len() >= CLEAN_MIN {
            clean
        } else {
            self.reps.clone()
        }
    }

    /// Median seconds of a repetition (of a round trip for the ping-pong).
    pub(crate) fn seconds(&self) -> f64 {
        if self.rounds.is_empty() {
            median(&self.counted().iter().map(|rep| rep.seconds).collect::<Vec<_>>())
        } else {
            median(&self.rounds.iter().map(|round| median(round)).collect::<Vec<_>>())
        }
    }

    /// The 99th percentile: of round trips the median of the rounds', of repetitions the slowest.
    pub(crate) fn slow_seconds(&self) -> f64 {
        if self.rounds.is_empty() {
            quantile(&self.counted().iter().map(|rep| rep.seconds).collect::<Vec<_>>(), 1.0)
        } else {
            median(
                &self
                    .rounds
                    .iter()
                    .map(|round| quantile(round, 0.99))
                    .collect::<Vec<_>>(),
            )
        }
    }

    /// Median microseconds of the submitting call.
    pub(crate) fn post_us(&self) -> f64 {
        1e6 * median(&self.counted().iter().map(|rep| rep.post_seconds).collect::<Vec<_>>())
    }

    /// Processor seconds per GB: initiator, target.
    pub(crate) fn cpu_per_gb(&self, bytes: u64) -> (f64, f64) {
        let reps = self.counted();
        let gigabytes = bytes as f64 * reps.len() as f64 / 1e9;
        let sum = |of: fn(&Rep) -> f64| reps.iter().map(of).sum::<f64>() / gigabytes;
        (sum(|rep| rep.cpu_initiator), sum(|rep| rep.cpu_target))
    }

    /// Whether all bytes were right, and right in time, wherever that was checked.
    pub(crate) fn verified(&self) -> bool {
        self.reps.iter().all(|rep| rep.arrived && !rep.late) && !matches!(self.checked, Some(Err(_)))
    }

    /// Speed relative to another mover's: the ratio of the medians, and the quartiles of the ratios of neighbours.
    pub(crate) fn speed_over(&self, other: &Measured) -> (f64, [f64; 2]) {
        let pairs: Vec<f64> = if self.rounds.is_empty() {
            self.reps
                .iter()
                .zip(&other.reps)
                .map(|(a, b)| b.seconds / a.seconds)
                .collect()
        } else {
            let rounds = self.rounds.iter().zip(&other.rounds);
            rounds.map(|(a, b)| median(b) / median(a)).collect()
        };
        (
            other.seconds() / self.seconds(),
            [quantile(&pairs, 0.25), quantile(&pairs, 0.75)],
        )
    }
}
