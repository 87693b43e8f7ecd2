//! The gate under loom's model checker: every interleaving that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kvxfer-core --test loom_gate --release`
#![cfg(loom)]

use std::sync::Arc;

use kvxfer_core::flow::Gate;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// Memory behind a gate. Loom reports any access that is not ordered with another.
struct Blocks {
    gate: Arc<Gate>,
    bytes: UnsafeCell<u32>,
    fences_made: AtomicUsize,
}

// SAFETY: the cell is guarded by the gate; that is what is being tested, and loom reports where it is not true.
unsafe impl Send for Blocks {}
// SAFETY: as above.
unsafe impl Sync for Blocks {}

fn blocks() -> loom::sync::Arc<Blocks> {
    loom::sync::Arc::new(Blocks {
        gate: Gate::new(),
        bytes: UnsafeCell::new(0),
        fences_made: AtomicUsize::new(0),
    })
}

impl Blocks {
    fn write(&self, value: u32) {
        // SAFETY: loom's cell checks that no other access is concurrent.
        self.bytes.with_mut(|bytes| unsafe { *bytes = value });
    }

    fn read(&self) -> u32 {
        // SAFETY: as in `write`.
        self.bytes.with(|bytes| unsafe { *bytes })
    }

    /// Writes the next request's bytes: nobody may be inside any more.
    fn reuse(&self) {
        self.write(9);
    }
}

/// One data thread writes, the control thread closes; whoever makes the fence reuses the blocks.
#[test]
fn nobody_writes_after_the_fence() {
    loom::model(|| {
        let blocks = blocks();
        let writer = {
            let blocks = blocks.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    let Some(guard) = blocks.gate.enter() else { return };
                    blocks.write(1);
                    if guard.leave() {
                        blocks.fences_made.fetch_add(1, Ordering::Relaxed);
                        blocks.reuse();
                    }
                }
            })
        };
        if blocks.gate.close() {
            blocks.fences_made.fetch_add(1, Ordering::Relaxed);
            blocks.reuse();
        }
        writer.join().unwrap();
        assert!(blocks.gate.fenced());
        assert_eq!(
            blocks.fences_made.load(Ordering::Relaxed),
            1,
            "the fence is made exactly once"
        );
        assert_eq!(blocks.read(), 9);
    });
}

/// Two data threads inside read what they read; only the last to leave may reuse the blocks, and it must be ordered
/// after the other one too.
#[test]
fn the_last_to_leave_is_after_all_the_others() {
    loom::model(|| {
        let blocks = blocks();
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let blocks = blocks.clone();
                thread::spawn(move || {
                    let Some(guard) = blocks.gate.enter_owned() else { return };
                    assert_eq!(blocks.read(), 0, "reused while somebody reads");
                    if guard.leave() {
                        blocks.fences_made.fetch_add(1, Ordering::Relaxed);
                        blocks.reuse();
                    }
                })
            })
            .collect();
        if blocks.gate.close() {
            blocks.fences_made.fetch_add(1, Ordering::Relaxed);
            blocks.reuse();
        }
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(blocks.fences_made.load(Ordering::Relaxed), 1);
    });
}

/// Somebody who only polls `fenced` is ordered after everybody inside.
#[test]
fn a_poller_that_sees_the_fence_may_reuse() {
    loom::model(|| {
        let blocks = blocks();
        let writer = {
            let blocks = blocks.clone();
            thread::spawn(move || {
                if let Some(_guard) = blocks.gate.enter() {
                    blocks.write(1);
                }
            })
        };
        blocks.gate.close();
        if blocks.gate.fenced() {
            blocks.reuse();
        }
        writer.join().unwrap();
    });
}
