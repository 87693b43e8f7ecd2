//! What the tests of every transport share: two endpoints without a control plane. Each is a transport with its slots;
//! a relay carries what the ends of a link say to each other, in order, as a session would.
//!
//! A transport's own tests add how its endpoints are made, and how the place they run in is changed under them.
// Helpers of tests unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod bytes;
mod ends;
mod node;
mod push;
mod streams;
mod watch;

use std::time::{Duration, Instant};

pub use bytes::{paint_stream, pattern, read_stream, write_stream};
pub use ends::Ends;
pub use node::{Memory, Node};
pub use push::{Push, Sent};
pub use streams::{Pieces, Scattered, Stream, StreamTarget, Window, pieces, random_pieces, range, scattered, tokens};
pub use watch::{Arrival, Log};

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until something is so.
///
/// # Panics
/// If it is not within [`PATIENCE`].
pub fn until(what: &str, so: impl FnMut() -> bool) {
    assert!(soon(PATIENCE, so), "{what}: not within {PATIENCE:?}");
}

/// Whether something becomes so in time.
pub fn soon(patience: Duration, mut so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + patience;
    while !so() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}
