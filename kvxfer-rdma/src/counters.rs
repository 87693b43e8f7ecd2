//! Per-rail counters, written by the rail's engine.

use std::sync::atomic::AtomicU64;

use kvxfer_core::transport::Counter;
use kvxfer_core::transport::counters::RailReport;

pub(crate) use kvxfer_core::transport::counters::add;

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

impl RailCounters {
    pub(crate) fn report(&self, peer: &str, rail: &str, out: &mut Vec<Counter>) {
        let mut report = RailReport::new("rdma", peer, rail, out);
        report.count_one_way("rail_bytes_total", "sent", &self.written_bytes);
        report.count_one_way("rail_bytes_total", "received", &self.received_bytes);
        report.count_one_way("rail_bytes_total", "read", &self.read_bytes);
        report.count_one_way("rail_posted_bytes_total", "sent", &self.posted_writes);
        report.count_one_way("rail_posted_bytes_total", "read", &self.posted_reads);
        report.count("rail_requests_total", &self.requests);
        report.count("rail_doorbells_total", &self.doorbells);
        report.count("rail_closes_total", &self.closes);
        report.count("rail_session_closes_total", &self.closes_over_session);
        report.count("rail_stray_closes_total", &self.stray_closes);
        report.count("rail_in_doubt_chunks_total", &self.in_doubt);
        report.count("rail_losses_total", &self.losses);
    }
}
