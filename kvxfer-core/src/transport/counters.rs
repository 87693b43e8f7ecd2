//! Counters of transports: how they are counted and how they are reported.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter's value with its labels.
#[derive(Debug, Clone, PartialEq)]
pub struct Counter {
    /// Name without the `kvxfer_` prefix, `_total` and `_bytes` where they belong.
    pub name: &'static str,
    /// Label pairs (peer, transport, rail, direction).
    pub labels: Vec<(&'static str, String)>,
    /// Value.
    pub value: f64,
}

impl Counter {
    /// Of a transport as a whole.
    pub fn of_transport(name: &'static str, transport: &str, value: usize) -> Counter {
        Counter {
            name,
            labels: vec![("transport", transport.to_string())],
            value: value as f64,
        }
    }
}

/// Reports the counters of one rail, or lane.
pub struct RailReport<'a> {
    labels: [(&'static str, &'a str); 3],
    out: &'a mut Vec<Counter>,
}

impl<'a> RailReport<'a> {
    /// Of the rail of this name, of a link to this peer. What is reported goes to `out`.
    pub fn new(transport: &'a str, peer: &'a str, rail: &'a str, out: &'a mut Vec<Counter>) -> RailReport<'a> {
        RailReport {
            labels: [("peer", peer), ("transport", transport), ("rail", rail)],
            out,
        }
    }

    /// A counter of the rail.
    pub fn count(&mut self, name: &'static str, counter: &AtomicU64) {
        self.push(name, None, counter);
    }

    /// A counter of what went one way: `sent`, `received`, or `read`.
    pub fn count_one_way(&mut self, name: &'static str, direction: &str, counter: &AtomicU64) {
        self.push(name, Some(direction), counter);
    }

    fn push(&mut self, name: &'static str, direction: Option<&str>, counter: &AtomicU64) {
        let direction = direction.map(|direction| ("direction", direction));
        let labels = self.labels.into_iter().chain(direction);
        self.out.push(Counter {
            name,
            labels: labels.map(|(label, value)| (label, value.to_string())).collect(),
            value: counter.load(Ordering::Relaxed) as f64,
        });
    }
}

/// Adds to a counter, which orders nothing else.
#[inline]
pub fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
