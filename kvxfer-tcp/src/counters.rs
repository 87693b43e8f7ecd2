//! Per-lane counters: one padded group per lane, written by whoever moves the lane's bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use kvxfer_core::transport::Counter;

/// What happened on one lane, over all its connections.
#[derive(Debug, Default)]
pub(crate) struct LaneCounters {
    pub(crate) sent: DirectionCounters,
    pub(crate) received: DirectionCounters,
    /// Chunks of ours that the peer refused.
    pub(crate) refused: AtomicU64,
    /// Chunks of ours that were outstanding when a connection was lost.
    pub(crate) in_doubt: AtomicU64,
    /// Connections lost.
    pub(crate) losses: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct DirectionCounters {
    /// Payload bytes.
    pub(crate) bytes: AtomicU64,
    /// Whole chunks.
    pub(crate) chunks: AtomicU64,
    /// System calls.
    pub(crate) calls: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl LaneCounters {
    pub(crate) fn report(&self, peer: &str, rail: &str, out: &mut Vec<Counter>) {
        let mut push = |name, direction: &str, counter: &AtomicU64| {
            let mut labels = vec![
                ("peer", peer.to_string()),
                ("transport", "tcp".to_string()),
                ("rail", rail.to_string()),
            ];
            if !direction.is_empty() {
                labels.push(("direction", direction.to_string()));
            }
            out.push(Counter {
                name,
                labels,
                value: counter.load(Ordering::Relaxed) as f64,
            });
        };
        for (direction, counters) in [("sent", &self.sent), ("received", &self.received)] {
            push("rail_bytes_total", direction, &counters.bytes);
            push("rail_chunks_total", direction, &counters.chunks);
            push("rail_calls_total", direction, &counters.calls);
        }
        push("rail_refused_chunks_total", "", &self.refused);
        push("rail_in_doubt_chunks_total", "", &self.in_doubt);
        push("rail_losses_total", "", &self.losses);
    }
}
