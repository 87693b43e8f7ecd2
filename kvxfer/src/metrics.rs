//! Counters and histograms of an endpoint, as Prometheus text. `docs/metrics.md` defines each name.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvxfer_core::machine::Outcome;
use kvxfer_core::transport::Counter;
use kvxfer_core::{ErrorKind, Result};

use crate::handle::HandleKind;

/// A counter on a cache line of its own, so that threads that count do not disturb each other.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram with buckets at powers of two: bucket `n` counts values of at most `2^n` units.
struct Histogram<const BUCKETS: usize> {
    buckets: [AtomicU64; BUCKETS],
    sum: AtomicU64,
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    fn new() -> Self {
        Histogram {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum: AtomicU64::new(0),
        }
    }

    fn record(&self, value: u64) {
        let bucket = match value {
            0 | 1 => 0,
            _ => (u64::BITS - (value - 1).leading_zeros()) as usize,
        };
        self.buckets[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Writes the series; a bucket's bound is `2^n * unit`. The last bucket has no bound.
    fn write(&self, out: &mut String, name: &str, labels: &str, unit: f64) {
        let mut total = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            total += bucket.load(Ordering::Relaxed);
            if index + 1 < BUCKETS {
                let bound = (1u64 << index) as f64 * unit;
                let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {total}");
            }
        }
        let sum = self.sum.load(Ordering::Relaxed) as f64 * unit;
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {total}");
        let _ = writeln!(out, "{name}_sum{{{labels}}} {sum}");
        let _ = writeln!(out, "{name}_count{{{labels}}} {total}");
    }
}

/// 1 µs to 2^26 µs, 67 s.
const LATENCY_BUCKETS: usize = 28;
/// 1 KiB to 2^24 KiB, 16 GiB.
const SIZE_BUCKETS: usize = 26;
/// Outcomes: well, and each error kind by its number.
const OUTCOMES: usize = ErrorKind::ALL.len() + 1;

struct PerKind {
    outcomes: [AtomicU64; OUTCOMES],
    /// Handles opened.
    opened: AtomicU64,
    /// Microseconds from opening to a good end.
    latency: Histogram<LATENCY_BUCKETS>,
    /// KiB of those that ended well.
    size: Histogram<SIZE_BUCKETS>,
    bytes: AtomicU64,
}

/// What an endpoint counts itself. Gauges come from the machine, byte counters from the transports.
pub(crate) struct Metrics {
    kinds: [PerKind; HandleKind::ALL.len()],
    /// Turns of the control thread.
    pub(crate) control_wakeups: Count,
    /// Accepted connections that never became a session or a lane.
    pub(crate) handshakes_refused: Count,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        Metrics {
            kinds: std::array::from_fn(|_| PerKind {
                outcomes: [const { AtomicU64::new(0) }; OUTCOMES],
                opened: AtomicU64::new(0),
                latency: Histogram::new(),
                size: Histogram::new(),
                bytes: AtomicU64::new(0),
            }),
            control_wakeups: Count::default(),
            handshakes_refused: Count::default(),
        }
    }

    pub(crate) fn handle_opened(&self, kind: HandleKind) {
        self.kinds[kind as usize].opened.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn handle_ended(&self, kind: HandleKind, took: Duration, result: &Result<Outcome>) {
        let of = &self.kinds[kind as usize];
        let outcome = result.as_ref().err().map_or(0, |error| error.kind().number() as usize);
        of.outcomes[outcome.min(OUTCOMES - 1)].fetch_add(1, Ordering::Relaxed);
        let Ok(ended) = result else { return };
        of.latency.record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        let bytes = match ended {
            Outcome::Arrived { bytes } | Outcome::Granted { bytes, .. } | Outcome::Transferred { bytes } => *bytes,
            _ => return,
        };
        of.size.record(bytes.div_ceil(1024));
        of.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What this endpoint counted, as text.
    pub(crate) fn write(&self, out: &mut String) {
        header(out, "kvxfer_handles_opened_total", "counter", "Handles opened.");
        for (kind, of) in self.by_kind() {
            let opened = of.opened.load(Ordering::Relaxed);
            let _ = writeln!(out, "kvxfer_handles_opened_total{{kind=\"{}\"}} {opened}", kind.name());
        }
        header(
            out,
            "kvxfer_handles_ended_total",
            "counter",
            "Handles ended, by outcome.",
        );
        for (kind, of) in self.by_kind() {
            for (number, count) in of.outcomes.iter().enumerate() {
                let count = count.load(Ordering::Relaxed);
                let outcome = match number {
                    0 => "ok",
                    _ => ErrorKind::ALL[number - 1].name(),
                };
                if number == 0 || count > 0 {
                    let _ = writeln!(
                        out,
                        "kvxfer_handles_ended_total{{kind=\"{}\",outcome=\"{outcome}\"}} {count}",
                        kind.name()
                    );
                }
            }
        }
        header(
            out,
            "kvxfer_handle_bytes_total",
            "counter",
            "Bytes of handles that ended well.",
        );
        for (kind, of) in self.by_kind() {
            let bytes = of.bytes.load(Ordering::Relaxed);
            let _ = writeln!(out, "kvxfer_handle_bytes_total{{kind=\"{}\"}} {bytes}", kind.name());
        }
        let seconds = "kvxfer_handle_duration_seconds";
        header(out, seconds, "histogram", "From opening a handle to its good end.");
        for (kind, of) in self.by_kind() {
            of.latency
                .write(out, seconds, &format!("kind=\"{}\"", kind.name()), 1e-6);
        }
        let bytes = "kvxfer_handle_size_bytes";
        header(out, bytes, "histogram", "Bytes of each handle that ended well.");
        for (kind, of) in self.by_kind() {
            of.size.write(out, bytes, &format!("kind=\"{}\"", kind.name()), 1024.0);
        }
        let name = "kvxfer_control_wakeups_total";
        header(out, name, "counter", "Turns of the control thread.");
        let _ = writeln!(out, "{name} {}", self.control_wakeups.value());
        let name = "kvxfer_handshakes_refused_total";
        header(
            out,
            name,
            "counter",
            "Accepted connections that became neither session nor lane.",
        );
        let _ = writeln!(out, "{name} {}", self.handshakes_refused.value());
    }

    fn by_kind(&self) -> impl Iterator<Item = (HandleKind, &PerKind)> {
        HandleKind::ALL.iter().copied().zip(&self.kinds)
    }
}

/// The lines before a metric's values.
pub(crate) fn header(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Gauges of the control plane.
pub(crate) fn write_gauges(out: &mut String, gauges: &[(&'static str, u64)]) {
    for (name, value) in gauges {
        let name = format!("kvxfer_control_{name}");
        header(out, &name, "gauge", "See docs/metrics.md.");
        let _ = writeln!(out, "{name} {value}");
    }
}

/// The transports' counters: series of one name together, as the format wants.
pub(crate) fn write_counters(out: &mut String, mut counters: Vec<Counter>) {
    counters.sort_by(|a, b| (a.name, &a.labels).cmp(&(b.name, &b.labels)));
    let mut previous = "";
    for counter in &counters {
        let name = format!("kvxfer_{}", counter.name);
        if counter.name != previous {
            let kind = if counter.name.ends_with("_total") {
                "counter"
            } else {
                "gauge"
            };
            header(out, &name, kind, "See docs/metrics.md.");
            previous = counter.name;
        }
        let labels: Vec<String> = counter
            .labels
            .iter()
            .map(|(label, value)| format!("{label}=\"{}\"", escape(value)))
            .collect();
        let _ = writeln!(out, "{name}{{{}}} {}", labels.join(","), counter.value);
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kinds_index_the_outcomes() {
        for kind in ErrorKind::ALL {
            assert_eq!(ErrorKind::ALL[kind.number() as usize - 1], *kind);
        }
    }

    #[test]
    fn buckets_are_powers_of_two() {
        let histogram = Histogram::<5>::new();
        for value in [0, 1, 2, 3, 4, 5, 8, 9, 1000] {
            histogram.record(value);
        }
        let counts: Vec<u64> = histogram.buckets.iter().map(|b| b.load(Ordering::Relaxed)).collect();
        // <=1, <=2, <=4, <=8, more
        assert_eq!(counts, [2, 1, 2, 2, 2]);
        let mut text = String::new();
        histogram.write(&mut text, "x", "a=\"b\"", 1.0);
        assert!(text.contains("x_bucket{a=\"b\",le=\"8\"} 7\n"), "{text}");
        assert!(text.contains("x_bucket{a=\"b\",le=\"+Inf\"} 9\n"), "{text}");
        assert!(text.contains("x_sum{a=\"b\"} 1032\n"), "{text}");
    }

    #[test]
    fn labels_are_escaped_and_names_grouped() {
        let counter = |name, value: &str| Counter {
            name,
            labels: vec![("rail", value.to_owned())],
            value: 1.0,
        };
        let mut text = String::new();
        let counters = vec![
            counter("b_total", "x"),
            counter("a_bytes_total", "q\"\\\n"),
            counter("b_total", "w"),
        ];
        write_counters(&mut text, counters);
        assert!(text.contains("kvxfer_a_bytes_total{rail=\"q\\\"\\\\\\n\"} 1"), "{text}");
        assert_eq!(text.matches("# TYPE kvxfer_b_total counter").count(), 1);
    }
}
