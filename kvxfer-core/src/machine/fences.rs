//! Ends that wait for a fence: looked at after every input, reported when fenced, given up at the limit.

use super::Machine;
use super::config::FENCE_POLL;
use super::timers::TimerKey;
use super::types::HandleId;
use crate::error::Error;
use crate::id::Incarnation;
use crate::time::Time;

/// The decided end of a handle whose blocks may still be written.
#[derive(Debug)]
pub(super) struct Ending {
    /// What will be reported.
    pub(super) error: Error,
    /// Links that must be closed first.
    pub(super) links: Vec<(Incarnation, u64)>,
}

impl Machine {
    /// Reports all ends that are fenced by now.
    pub(super) fn look_at_fences(&mut self, now: Time) {
        // Each report can make others possible; every round that goes on has removed at least one handle.
        loop {
            self.fences_changed = false;
            let waiting: Vec<HandleId> = self.fencing.iter().copied().collect();
            for id in waiting {
                self.look_at_fence(now, id);
            }
            if !self.fences_changed {
                break;
            }
        }
        if !self.fencing.is_empty() {
            self.timers.set_earlier(TimerKey::FencePoll, now + FENCE_POLL);
        }
    }

    fn look_at_fence(&mut self, now: Time, id: HandleId) {
        if self.claims.contains_key(&id) {
            self.look_at_claim_fence(now, id);
        } else if self.offers.contains_key(&id) {
            self.check_offer(now, id);
        } else if self.grants.contains_key(&id) {
            self.look_at_grant_fence(now, id);
        } else if self.serves.contains_key(&id) {
            self.look_at_serve_fence(now, id);
        } else if self.pushes.contains_key(&id) {
            self.settle_push(now, id);
        } else if self.pulls.contains_key(&id) {
            self.look_at_pull_fence(now, id);
        } else {
            self.fencing.remove(&id);
        }
    }

    /// A handle's fence did not come within the limit.
    pub(super) fn on_fence_timer(&mut self, now: Time, id: HandleId) {
        self.look_at_fence(now, id);
        if !self.fencing.contains(&id) {
            return;
        }
        if self.claims.contains_key(&id) {
            self.claim_not_fenced(now, id);
        } else if self.offers.contains_key(&id) {
            self.offer_not_fenced(now, id);
        } else if self.grants.contains_key(&id) {
            self.grant_not_fenced(now, id);
        } else if self.serves.contains_key(&id) {
            self.serve_not_fenced(now, id);
        } else if self.pushes.contains_key(&id) {
            self.push_not_fenced(now, id);
        } else if self.pulls.contains_key(&id) {
            self.pull_not_fenced(now, id);
        }
    }
}
