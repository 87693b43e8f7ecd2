//! What copies of a device are counted by.

use std::sync::atomic::{AtomicU64, Ordering};

use kvxfer_core::transport::Counter;

use super::gate::Way;
use super::job::Direction;

const WAYS: [(Way, &str); 4] = [
    (Way::Single, "single"),
    (Way::Batch, "batch"),
    (Way::Loop, "loop"),
    (Way::Kernel, "kernel"),
];

/// Per direction: hand-overs to the driver by way, and bytes.
#[derive(Debug, Default)]
pub(crate) struct CopyCounters {
    calls: [[AtomicU64; 4]; 2],
    bytes: [AtomicU64; 2],
}

impl CopyCounters {
    /// Counts calls of the driver's that were given bytes to copy.
    pub(super) fn count(&self, direction: Direction, way: Way, calls: u64, bytes: u64) {
        self.calls[direction as usize][way as usize].fetch_add(calls, Ordering::Relaxed);
        self.bytes[direction as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn report(&self, device: &str, out: &mut Vec<Counter>) {
        for (direction, name) in [(Direction::Out, "out"), (Direction::In, "in")] {
            let labels = || vec![("device", device.to_owned()), ("direction", name.to_owned())];
            for (way, way_name) in WAYS {
                let mut labels = labels();
                labels.push(("way", way_name.to_owned()));
                out.push(Counter {
                    name: "cuda_copy_calls_total",
                    labels,
                    value: self.calls[direction as usize][way as usize].load(Ordering::Relaxed) as f64,
                });
            }
            out.push(Counter {
                name: "cuda_copied_bytes_total",
                labels: labels(),
                value: self.bytes[direction as usize].load(Ordering::Relaxed) as f64,
            });
        }
    }
}
