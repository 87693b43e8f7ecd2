//! What a device has done in this process, counted per device name over all its contexts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// The counters of a device in this process. They only grow.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($(#[doc = $doc])* pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            /// The counter of that name, if there is one.
            pub(crate) fn get(&self, name: &str) -> Option<u64> {
                match name {
                    $(stringify!($name) => Some(self.$name.load(Ordering::Relaxed)),)*
                    _ => None,
                }
            }
        }
    };
}

counters! {
    /// WRITEs posted, with or without immediate.
    writes_posted,
    /// Bytes that arrived here in WRITEs and were placed.
    bytes_written,
    /// READs posted.
    reads,
    /// Bytes that READs of this side brought.
    bytes_read,
    /// WRITEs with an immediate posted.
    immediates,
    /// Immediates that consumed a receive here.
    immediates_received,
    /// Calls of post_send.
    doorbells,
    /// Calls of post_recv.
    receive_doorbells,
    /// Completions handed out by poll_cq.
    completions_polled,
    /// Completions lost because a queue pair was reset or destroyed before they were polled.
    completions_lost,
    /// Bytes placed late although their queue pair was in ERR or destroyed.
    late_bytes_placed_after_error,
    /// Late fragments placed after their queue pair was destroyed.
    writes_after_destroy,
    /// Bytes that are accepted and acknowledged, but were forced to memory by a READ.
    late_bytes_flushed,
    /// Bytes still waiting to be placed when their region was deregistered (placed at that moment).
    late_bytes_at_deregister,
    /// Moves to RESET with work outstanding.
    resets_with_outstanding,
    /// Queue pairs destroyed with work outstanding (allowed).
    destroys_with_outstanding,
    /// Packets that reached this device's port (those that are held or delayed included).
    packets_received,
    /// Packets thrown away: no such queue pair, wrong state, wrong address, port down.
    packets_dropped,
    /// Packets thrown away by `drop_percent`.
    packets_lost,
    /// Packets sent again after a timeout or a NAK.
    retransmissions,
    /// "Receiver not ready" answers given.
    rnr_naks,
    /// Requests refused for their key, bounds or rights.
    access_errors,
    /// Completion queues that overflowed.
    cq_overruns,
    /// Posts refused because a queue was full.
    queue_full,
    /// Asynchronous events raised.
    events,
    /// Calls that broke the rules of verbs: use after destroy, objects destroyed in use, unacknowledged events.
    misuse,
    /// Queue pairs made.
    qps_created,
    /// Queue pairs destroyed.
    qps_destroyed,
    /// Moves to ERR, by software or by the device.
    qps_to_error,
    /// Times the device thread woke up.
    wakeups,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
