//! A link's life: its rails come and go, and with the last of them, or on request, the link ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvxfer_core::flow::LaneName;
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{Error, ErrorKind, Time};

use super::{LinkCore, Rail, RailPlace};
use crate::clock;
use crate::engine::Task;

/// Which rails have an owner, and whether the link is closing.
#[derive(Default)]
pub(super) struct Life {
    closing: bool,
    closed: bool,
    /// Rails that an engine looks after.
    attached: BTreeSet<u16>,
    /// Why rails are not up, by rail.
    failures: BTreeMap<u16, String>,
    /// Rails whose device is gone for good.
    dead: BTreeSet<u16>,
}

impl LinkCore {
    pub(crate) fn closing(&self) -> bool {
        self.life.lock().closing
    }

    /// Whether nothing of the link is left.
    pub(super) fn ended(&self) -> bool {
        self.life.lock().closed
    }

    /// Whether a rail is up, or the link has failed.
    pub(crate) fn settled(&self) -> bool {
        self.rails_up.load(Ordering::SeqCst) > 0 || self.closing()
    }

    /// When its revocations and its rails are to be looked at.
    pub(crate) fn next_look(&self, now: Time) -> Time {
        let late = self.inbound.next_revocation();
        let rails = (!self.settled()).then(|| *self.no_rail_limit.lock());
        late.into_iter()
            .chain(rails)
            .min()
            .unwrap_or(now + self.config.progress)
    }

    /// If no rail came up in the time for it, or came back: the link has failed.
    pub(crate) fn check_rails(self: &Arc<Self>, now: Time) {
        if self.settled() || now < *self.no_rail_limit.lock() {
            return;
        }
        let what = match self.was_up.load(Ordering::SeqCst) {
            true => "no rail came back",
            false => "no rail came up",
        };
        let failures = self.rails_down().join("; ");
        let why = if failures.is_empty() {
            "the peer answered nothing".to_owned()
        } else {
            failures
        };
        self.fail(
            Error::new(ErrorKind::Transport, what)
                .at(format!("rdma to {}", self.peer.incarnation))
                .because(why)
                .remedy("run `kvxfer-bench doctor` on both machines; check that the ports are on one network"),
        );
    }

    /// A rail's device is gone for good. With the last of them the link has failed.
    pub(crate) fn rail_dead(self: &Arc<Self>, rail: u16, error: &Error) {
        let last = {
            let mut life = self.life.lock();
            life.dead.insert(rail) && !life.closing && life.attached.is_subset(&life.dead)
        };
        if last {
            self.fail(error.clone());
        }
    }

    /// The link cannot go on.
    pub(crate) fn fail(self: &Arc<Self>, error: Error) {
        if !self.closing() {
            self.emit(LinkEvent::Failed(error));
            self.begin_close();
        }
    }

    pub(crate) fn begin_close(self: &Arc<Self>) {
        let mut life = self.life.lock();
        if std::mem::replace(&mut life.closing, true) {
            return;
        }
        let alone = life.attached.is_empty() && !std::mem::replace(&mut life.closed, true);
        drop(life);
        if alone {
            // On an engine: the caller may hold what a report would take.
            self.engine(0).push(Task::EndLink(self.clone()));
        } else {
            self.kick_all();
        }
    }

    /// Ends a link that had no rail.
    pub(crate) fn end_alone(self: &Arc<Self>) {
        self.end();
    }

    /// Nothing of the link is left: what it had admitted is quiet.
    pub(super) fn end(self: &Arc<Self>) {
        if self.all_fenced() {
            self.quiet(self.inbound.take_all());
        }
        self.report();
        self.transport.link_ended(self);
        self.emit(LinkEvent::Closed);
    }

    /// A rail is up.
    pub(crate) fn rail_up(&self, rail: u16) {
        self.life.lock().failures.remove(&rail);
        self.rails_up.fetch_add(1, Ordering::SeqCst);
        if !self.was_up.swap(true, Ordering::SeqCst) {
            self.emit(LinkEvent::Up);
        }
    }

    /// A rail is no longer up. The last one has some time to come back, or another.
    pub(crate) fn rail_down(self: &Arc<Self>) {
        // First the limit: whoever sees no rail goes by it.
        *self.no_rail_limit.lock() = clock::now() + self.config.outage_limit;
        if self.rails_up.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.engine(0).push(Task::Watch(self.clone()));
        }
    }

    /// A rail could not be made, or was lost.
    pub(crate) fn rail_failed(&self, lane: LaneName, why: &Error) {
        tracing::warn!(peer = %self.peer.incarnation, rail = lane.index, epoch = lane.epoch, error = %why, "rail failed");
        self.life.lock().failures.insert(lane.index, why.to_string());
    }

    /// Why rails are not up, for people.
    pub(super) fn rails_down(&self) -> Vec<String> {
        let life = self.life.lock();
        let failures = life.failures.iter();
        failures.map(|(rail, why)| format!("rail {rail}: {why}")).collect()
    }

    /// Gives a rail its engine. False if the link is closing.
    pub(crate) fn attach(self: &Arc<Self>, rail: &Rail, place: RailPlace) -> bool {
        let mut life = self.life.lock();
        if life.closing {
            return false;
        }
        if rail.place.set(place).is_ok() {
            life.attached.insert(rail.index);
        }
        true
    }

    /// Whether the rail's engine has let go of it.
    pub(crate) fn detached(&self, rail: u16) -> bool {
        let life = self.life.lock();
        life.closing && !life.attached.contains(&rail)
    }

    /// An engine has let go of a rail, after the link began to close.
    pub(crate) fn detach(self: &Arc<Self>, rail: u16) {
        let mut life = self.life.lock();
        life.attached.remove(&rail);
        let last = life.closing && life.attached.is_empty() && !std::mem::replace(&mut life.closed, true);
        drop(life);
        if last {
            self.end();
        }
    }
}
