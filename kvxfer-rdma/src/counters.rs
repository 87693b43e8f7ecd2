//! Per-rail counters, written by the rail's engine.

use std::sync::atomic::{AtomicU64, Ordering};

use kvxfer_core::transport::Counter;

/// What happened on one rail, over all its queue pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct RailCounters {
    /// Bytes written or read by this side, completed.
    pub(crate) written_bytes: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    /// Bytes of chunks given to the device, to be written or read: less those completed, what is under way.
    pub(crate) posted_writes: AtomicU64,
    pub(crate) posted_reads: AtomicU64,
    /// Bytes that the peer wrote and that were counted.
    pub(crate) received_bytes: AtomicU64,
    /// Work requests and doorbells.
    pub(crate) requests: AtomicU64,
    pub(crate) doorbells: AtomicU64,
    /// Closes sent by an immediate, and for want of a credit over the session.
    pub(crate) closes: AtomicU64,
    pub(crate) closes_over_session: AtomicU64,
    /// Immediates and closes for slots that had ended.
    pub(crate) stray_closes: AtomicU64,
    /// Chunks that were outstanding when the rail was lost.
    pub(crate) in_doubt: AtomicU64,
    /// Queue pairs lost.
    pub(crate) losses: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl RailCounters {
    pub(crate) fn report(&self, peer: &str, rail: &str, out: &mut Vec<Counter>) {
        let mut push = |name, direction: &str, counter: &AtomicU64| {
            let mut labels = vec![
                ("peer", peer.to_string()),
                ("transport", "rdma".to_string()),
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
        push("rail_bytes_total", "sent", &self.written_bytes);
        push("rail_bytes_total", "received", &self.received_bytes);
        push("rail_bytes_total", "read", &self.read_bytes);
        push("rail_posted_bytes_total", "sent", &self.posted_writes);
        push("rail_posted_bytes_total", "read", &self.posted_reads);
        push("rail_requests_total", "", &self.requests);
        push("rail_doorbells_total", "", &self.doorbells);
        push("rail_closes_total", "", &self.closes);
        push("rail_session_closes_total", "", &self.closes_over_session);
        push("rail_stray_closes_total", "", &self.stray_closes);
        push("rail_in_doubt_chunks_total", "", &self.in_doubt);
        push("rail_losses_total", "", &self.losses);
    }
}
