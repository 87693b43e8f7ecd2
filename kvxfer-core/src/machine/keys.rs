//! What is remembered of keys without a live offer: claims that wait, keys that ended, claims that ended early.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::error::Error;
use crate::id::Incarnation;
use crate::time::Time;
use crate::wire::{ClaimMessage, Verdict};

/// A claim of a peer that waits for its offer.
#[derive(Debug)]
pub(super) struct WaitingClaim {
    pub(super) peer: Incarnation,
    pub(super) claim: ClaimMessage,
}

/// A claim that ended before its offer was made.
#[derive(Debug)]
pub(super) struct EarlyEnd {
    pub(super) peer: Incarnation,
    pub(super) set: u128,
    pub(super) member: u16,
    pub(super) members: u16,
    pub(super) verdict: Verdict,
}

#[derive(Debug)]
struct Remembered {
    until: Time,
    // Why a late claim is refused, if the key's offer has ended.
    ended: Option<Error>,
    early: Vec<EarlyEnd>,
}

/// The memory of keys: bounded in number and in time.
#[derive(Debug)]
pub(super) struct Keys {
    waiting: BTreeMap<Vec<u8>, Vec<WaitingClaim>>,
    waiting_count: usize,
    remembered: BTreeMap<Vec<u8>, Remembered>,
    // In the order of their times; an entry whose key was remembered anew since is skipped.
    order: VecDeque<(Time, Vec<u8>)>,
    retention: Duration,
    remembered_max: usize,
    waiting_max: usize,
}

/// Early ends kept for one key, at most: more than any offer has members.
const EARLY_ENDS_MAX: usize = 1024;

impl Keys {
    pub(super) fn new(retention: Duration, remembered_max: usize, waiting_max: usize) -> Keys {
        Keys {
            waiting: BTreeMap::new(),
            waiting_count: 0,
            remembered: BTreeMap::new(),
            order: VecDeque::new(),
            retention,
            remembered_max: remembered_max.max(1),
            waiting_max,
        }
    }

    /// Keeps a claim until its offer comes. False if there are too many.
    pub(super) fn wait(&mut self, peer: Incarnation, claim: ClaimMessage) -> bool {
        if self.waiting_count >= self.waiting_max {
            return false;
        }
        self.waiting_count += 1;
        self.waiting
            .entry(claim.key.clone())
            .or_default()
            .push(WaitingClaim { peer, claim });
        true
    }

    /// Takes back one waiting claim.
    pub(super) fn stop_waiting(&mut self, key: &[u8], peer: Incarnation, claim: u64) -> Option<WaitingClaim> {
        let claims = self.waiting.get_mut(key)?;
        let index = claims
            .iter()
            .position(|waiting| waiting.peer == peer && waiting.claim.claim == claim)?;
        let waiting = claims.remove(index);
        if claims.is_empty() {
            self.waiting.remove(key);
        }
        self.waiting_count -= 1;
        Some(waiting)
    }

    /// The offer has come: the claims that waited for it, in the order in which they came.
    pub(super) fn take_waiting(&mut self, key: &[u8]) -> Vec<WaitingClaim> {
        let claims = self.waiting.remove(key).unwrap_or_default();
        self.waiting_count -= claims.len();
        claims
    }

    /// Claims waiting.
    pub(super) fn waiting(&self) -> usize {
        self.waiting_count
    }

    /// The key's offer has ended: what late claims are told.
    pub(super) fn ended(&mut self, now: Time, key: &[u8], told: Error) {
        let entry = self.remember(now, key);
        entry.ended = Some(told);
        entry.early.clear();
    }

    /// A claim ended before its offer came.
    pub(super) fn ended_early(&mut self, now: Time, key: &[u8], end: EarlyEnd) {
        let entry = self.remember(now, key);
        if entry.early.len() < EARLY_ENDS_MAX {
            entry.early.push(end);
        }
    }

    /// Why a late claim is refused, if the key's offer has ended.
    pub(super) fn refusal(&self, now: Time, key: &[u8]) -> Option<&Error> {
        self.remembered
            .get(key)
            .filter(|entry| entry.until > now)
            .and_then(|entry| entry.ended.as_ref())
    }

    /// A new offer with this key begins: its earlier life is forgotten, claims that ended early are handed over.
    pub(super) fn begin(&mut self, now: Time, key: &[u8]) -> Vec<EarlyEnd> {
        match self.remembered.remove(key) {
            Some(entry) if entry.until > now => entry.early,
            _ => Vec::new(),
        }
    }

    /// Forgets what is old. Returns when to come back.
    pub(super) fn forget(&mut self, now: Time) -> Option<Time> {
        while let Some((until, key)) = self.order.front() {
            let current = self.remembered.get(key).is_some_and(|entry| entry.until == *until);
            if current && *until > now {
                return Some(*until);
            }
            if current {
                self.remembered.remove(key);
            }
            self.order.pop_front();
        }
        None
    }

    /// Keys remembered.
    pub(super) fn remembered(&self) -> usize {
        self.remembered.len()
    }

    fn remember(&mut self, now: Time, key: &[u8]) -> &mut Remembered {
        while self.order.len() >= self.remembered_max.saturating_mul(2) || self.remembered.len() >= self.remembered_max
        {
            let Some((until, oldest)) = self.order.pop_front() else {
                break;
            };
            if self.remembered.get(&oldest).is_some_and(|entry| entry.until == until) {
                self.remembered.remove(&oldest);
            }
        }
        let until = now + self.retention;
        self.order.push_back((until, key.to_vec()));
        let entry = self.remembered.entry(key.to_vec()).or_insert(Remembered {
            until,
            ended: None,
            early: Vec::new(),
        });
        entry.until = until;
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn ended_keys_are_forgotten_by_time_and_number() {
        let mut keys = Keys::new(Duration::from_nanos(10), 2, 1);
        let error = || Error::new(ErrorKind::NotOffered, "x");
        let at = Time::from_nanos;
        keys.ended(at(0), b"a", error());
        assert!(keys.refusal(at(9), b"a").is_some());
        assert!(keys.refusal(at(10), b"a").is_none());
        keys.ended(at(1), b"b", error());
        keys.ended(at(2), b"c", error());
        assert!(keys.remembered() <= 2);
        assert!(keys.refusal(at(3), b"c").is_some());
        assert_eq!(keys.forget(at(5)), Some(at(11)));
        assert_eq!(keys.forget(at(50)), None);
        assert_eq!(keys.remembered(), 0);
    }
}
