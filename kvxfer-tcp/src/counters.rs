//! Per-lane counters: one padded group per lane, written by whoever moves the lane's bytes.

use std::sync::atomic::AtomicU64;

use kvxfer_core::transport::Counter;
use kvxfer_core::transport::counters::RailReport;

pub(crate) use kvxfer_core::transport::counters::add;

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
    /// Bytes that were referred to instead: sent, and copied by the receiver and found valid.
    pub(crate) referred: AtomicU64,
    /// Whole chunks.
    pub(crate) chunks: AtomicU64,
    /// System calls.
    pub(crate) calls: AtomicU64,
}

impl LaneCounters {
    pub(crate) fn report(&self, peer: &str, rail: &str, out: &mut Vec<Counter>) {
        let mut report = RailReport::new("tcp", peer, rail, out);
        for (direction, counters) in [("sent", &self.sent), ("received", &self.received)] {
            report.count_one_way("rail_bytes_total", direction, &counters.bytes);
            report.count_one_way("rail_referred_bytes_total", direction, &counters.referred);
            report.count_one_way("rail_chunks_total", direction, &counters.chunks);
            report.count_one_way("rail_calls_total", direction, &counters.calls);
        }
        report.count("rail_refused_chunks_total", &self.refused);
        report.count("rail_in_doubt_chunks_total", &self.in_doubt);
        report.count("rail_losses_total", &self.losses);
    }
}
