//! What several threads have to say, said in order.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Reports are made by one thread at a time, so that they come in the order in which they were taken.
#[derive(Debug, Default)]
pub struct InTurn {
    due: AtomicBool,
    turn: Mutex<()>,
}

impl InTurn {
    /// Reports what `next` gives until it gives nothing. Never waits: if another thread is reporting, that one looks again.
    pub fn report<T>(&self, next: impl Fn() -> Option<T>, report: impl Fn(T)) {
        self.due.store(true, Ordering::SeqCst);
        while self.due.load(Ordering::SeqCst) {
            // Whoever is reporting looks again after it has let go.
            let Some(_turn) = self.turn.try_lock() else {
                return;
            };
            while self.due.swap(false, Ordering::SeqCst) {
                while let Some(one) = next() {
                    report(one);
                }
            }
        }
    }
}
