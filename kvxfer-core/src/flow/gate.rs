//! The fence that data threads pass around each non-blocking call.

use std::fmt;
use std::sync::Arc;

use super::sync::{AtomicUsize, Ordering};
use crate::mutants::{self, Mutant};

/// Set once the gate is closed; the other bits count who is inside.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// Admission to memory that may be taken back at any moment. One atomic word: open or closed, and how many are inside.
///
/// A data thread enters before each call that touches the memory and leaves after it. Once the gate is closed nobody
/// enters any more, and once nobody is inside it is *fenced*: no byte is read or written through it ever again.
///
/// # Memory ordering
/// * Entering is a compare-and-swap from an open word, so that a closed word's count only falls: a fenced gate stays
///   fenced. It acquires, so that no access of the memory moves up before it.
/// * Leaving releases, so that every access made inside happens before whoever sees the lower count: the closer, or
///   the last to leave. The leaves form one release sequence (all are read-modify-writes of the same word), so that
///   seeing the count at zero means having synchronised with *every* earlier leave, not only with the last. Leaving
///   also acquires, because the last to leave acts for all: it reports the fence, after which the blocks are reused.
/// * Closing acquires for the same reason (it may be the one that sees zero), and releases, so that a thread that finds
///   the gate closed also sees what was decided before closing it.
#[derive(Default)]
pub struct Gate {
    word: AtomicUsize,
}

impl Gate {
    /// An open gate.
    pub fn new() -> Arc<Gate> {
        Arc::new(Gate::default())
    }

    /// Enters, if the gate is open. The guard leaves when dropped; use [`GateGuard::leave`] to learn whether that made
    /// the fence.
    #[must_use]
    pub fn enter(&self) -> Option<GateGuard<'_>> {
        // Lazily: a guard that is made and dropped would leave a gate that was never entered.
        if self.try_enter() {
            Some(GateGuard { gate: self })
        } else {
            None
        }
    }

    /// The same, with a guard that can be kept: for copies that a device makes by itself.
    #[must_use]
    pub fn enter_owned(self: &Arc<Self>) -> Option<OwnedGateGuard> {
        self.try_enter().then(|| OwnedGateGuard {
            gate: Some(Arc::clone(self)),
        })
    }

    /// Closes. True if nobody is inside (fenced now); otherwise whoever leaves last is told so by
    /// [`GateGuard::leave`]. Closing again is harmless and answers anew.
    pub fn close(&self) -> bool {
        let before = self.word.fetch_or(CLOSED, Ordering::AcqRel);
        before & !CLOSED == 0 || mutants::is(Mutant::SkipFence)
    }

    /// Whether it is closed; somebody may still be inside.
    pub fn is_closed(&self) -> bool {
        self.word.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Whether it is closed and nobody is inside.
    pub fn fenced(&self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        word == CLOSED || (mutants::is(Mutant::SkipFence) && word & CLOSED != 0)
    }

    fn try_enter(&self) -> bool {
        // The first look needs no ordering: the exchange below decides.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            if seen & CLOSED != 0 {
                return false;
            }
            match self
                .word
                .compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
    }

    /// True if this was the last to leave a closed gate: it is fenced from here on.
    fn step_out(&self) -> bool {
        self.word.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.word.load(Ordering::Relaxed);
        let state = if word & CLOSED == 0 { "open" } else { "closed" };
        write!(f, "Gate({state}, {} inside)", word & !CLOSED)
    }
}

/// Being inside a [`Gate`]; leaves when dropped.
#[derive(Debug)]
#[must_use = "the gate is left at once if the guard is dropped"]
pub struct GateGuard<'a> {
    gate: &'a Gate,
}

impl GateGuard<'_> {
    /// Leaves. True if the gate is closed and this was the last inside: the caller made the fence and reports it.
    pub fn leave(self) -> bool {
        let gate = self.gate;
        std::mem::forget(self);
        gate.step_out()
    }
}

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        self.gate.step_out();
    }
}

/// Being inside a [`Gate`] that it keeps alive; leaves when dropped.
#[derive(Debug)]
#[must_use = "the gate is left at once if the guard is dropped"]
pub struct OwnedGateGuard {
    // `None` once left.
    gate: Option<Arc<Gate>>,
}

impl OwnedGateGuard {
    /// As [`GateGuard::leave`].
    pub fn leave(mut self) -> bool {
        self.gate.take().is_some_and(|gate| gate.step_out())
    }
}

impl Drop for OwnedGateGuard {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            gate.step_out();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn closing_an_empty_gate_fences_it() {
        let gate = Gate::new();
        assert!(!gate.fenced() && !gate.is_closed());
        assert!(gate.close());
        assert!(gate.fenced());
        assert!(gate.enter().is_none() && gate.enter_owned().is_none());
        assert!(gate.close(), "closing again answers anew");
    }

    #[test]
    fn the_last_to_leave_a_closed_gate_is_told() {
        let gate = Gate::new();
        let first = gate.enter().unwrap();
        let second = gate.enter_owned().unwrap();
        let third = gate.enter().unwrap();
        assert!(!third.leave(), "the gate is open");
        assert!(!gate.close());
        assert!(!gate.fenced());
        assert!(!first.leave());
        assert!(!gate.fenced());
        assert!(second.leave());
        assert!(gate.fenced());
    }

    #[test]
    fn dropped_guards_leave_exactly_once() {
        let gate = Gate::new();
        drop(gate.enter());
        drop(gate.enter_owned());
        assert!(gate.enter_owned().is_some_and(|guard| !guard.leave()));
        assert_eq!(Arc::strong_count(&gate), 1);
        assert!(gate.close() && gate.fenced());
    }
}
