//! What is to be looked at when: one pending time per key, in order.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use super::slots::SlotKey;
use super::types::{ConnectionId, HandleId};
use crate::id::Incarnation;
use crate::time::Time;

/// What a timer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TimerKey {
    /// Dial the peer again.
    Redial(Incarnation),
    /// Dial an address whose endpoint is not known yet again.
    Resolve(SocketAddr),
    /// Say something to the peer.
    Heartbeat(Incarnation),
    /// Was the peer heard of?
    Liveness(Incarnation),
    /// Make the link anew, or offer it again what it had no room for.
    Link(Incarnation),
    /// A connection's handshake should be over.
    Handshake(ConnectionId),
    /// A handle's deadline.
    Deadline(HandleId),
    /// A handle's fence should be over.
    Fence(HandleId),
    /// A transfer that lasts: bind its grant to the session.
    Bind(HandleId),
    /// A verdict was kept for long enough.
    Retain(SlotKey),
    /// A peer's claim has waited for its offer for long enough.
    Waiting(Incarnation, u64),
    /// Ended keys may be forgotten.
    Keys,
    /// Claims that found no slot try again.
    Starved,
    /// Look at fences that no event announces.
    FencePoll,
    /// A shutdown should be over.
    Shutdown,
}

/// Pending times. Setting a key again replaces its time, so that nothing piles up.
#[derive(Debug, Default)]
pub(super) struct Timers {
    order: BTreeSet<(Time, TimerKey)>,
    times: BTreeMap<TimerKey, Time>,
}

impl Timers {
    /// Looks at `key` at this time, and no more at the time set before.
    pub(super) fn set(&mut self, key: TimerKey, at: Time) {
        if let Some(before) = self.times.insert(key, at) {
            self.order.remove(&(before, key));
        }
        self.order.insert((at, key));
    }

    /// As [`set`](Self::set), unless an earlier time is pending.
    pub(super) fn set_earlier(&mut self, key: TimerKey, at: Time) {
        if self.times.get(&key).is_none_or(|pending| *pending > at) {
            self.set(key, at);
        }
    }

    /// Forgets the key.
    pub(super) fn clear(&mut self, key: TimerKey) {
        if let Some(before) = self.times.remove(&key) {
            self.order.remove(&(before, key));
        }
    }

    /// Takes the next key whose time has come.
    pub(super) fn due(&mut self, now: Time) -> Option<TimerKey> {
        let &(at, key) = self.order.first()?;
        if at > now {
            return None;
        }
        self.order.pop_first();
        self.times.remove(&key);
        Some(key)
    }

    /// The earliest pending time.
    pub(super) fn next(&self) -> Option<Time> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Whether the key is pending.
    pub(super) fn is_set(&self, key: TimerKey) -> bool {
        self.times.contains_key(&key)
    }

    /// Keys pending.
    pub(super) fn len(&self) -> usize {
        self.times.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_time() {
        let at = Time::from_nanos;
        let mut timers = Timers::default();
        timers.set(TimerKey::Keys, at(5));
        timers.set(TimerKey::Keys, at(9));
        timers.set(TimerKey::Starved, at(7));
        timers.set_earlier(TimerKey::Starved, at(8));
        assert_eq!(timers.next(), Some(at(7)));
        assert_eq!(timers.due(at(6)), None);
        assert_eq!(timers.due(at(9)), Some(TimerKey::Starved));
        timers.clear(TimerKey::Keys);
        assert_eq!((timers.due(at(100)), timers.len()), (None, 0));
    }
}
