//! Carrying out what the machine wants: in order and under its lock when that is cheap, after it when not.

use std::sync::Arc;

use kvxfer_core::machine::{Action, HandleId, LinkCommand, Notice, Outcome};
use kvxfer_core::transport::{LinkEvent, LinkPeer};
use kvxfer_core::{Error, ErrorKind, Incarnation, Result, Time};

use crate::clock;
use crate::completion::Wakers;
use crate::events::EventSource;
use crate::handle::Entry;

use super::reports::{LAZY, Watcher};
use super::{Connection, LinkEntry, Shared, State, dial};

/// What has to wait until the lock is released.
#[derive(Default)]
pub(super) struct After {
    flush: Vec<Arc<Connection>>,
    wakers: Vec<Wakers>,
    events: Vec<Told>,
    progress: bool,
}

enum Told {
    Notice(Arc<EventSource>, HandleId, Notice),
    Ended(Arc<EventSource>, HandleId, Option<ErrorKind>),
}

impl After {
    /// Ends a handle. Whoever waits for it goes on after the lock, which it may need next.
    pub(super) fn ended(&mut self, shared: &Shared, id: HandleId, entry: Entry, result: Result<Outcome>, now: Time) {
        let error = result.as_ref().err().map(Error::kind);
        match &result {
            Ok(_) => tracing::debug!(handle = id.0, kind = entry.kind.name(), "handle ended"),
            Err(error) => tracing::debug!(handle = id.0, kind = entry.kind.name(), %error, "handle ended"),
        }
        shared
            .metrics
            .handle_ended(entry.kind, now.since(entry.opened), &result);
        self.progress = true;
        // `None`: a data thread was first.
        if let Some(wakers) = entry.sink.complete(result)
            && !wakers.is_empty()
        {
            self.wakers.push(wakers);
        }
        if let Some(source) = entry.events {
            self.events.push(Told::Ended(source, id, error));
        }
    }
}

fn now_lazy() -> Time {
    clock::now() + LAZY
}

impl Shared {
    pub(super) fn carry_out(self: &Arc<Self>, state: &mut State, after: &mut After) {
        while let Some(action) = state.machine.poll_action() {
            self.one(state, after, action);
        }
        after.progress |= std::mem::take(&mut state.progress);
        if after.progress && !state.orphans.is_empty() {
            let now = clock::now();
            let State { orphans, machine, .. } = state;
            orphans.retain(|(pool, _)| machine.remove_pool(now, *pool).is_err());
            while let Some(action) = state.machine.poll_action() {
                self.one(state, after, action);
            }
        }
        // Later than armed needs nothing: one early wake-up sets it right.
        if let Some(next) = state.machine.next_timer()
            && state.armed.is_none_or(|armed| next < armed)
        {
            self.timer.set(next);
            state.armed = Some(next);
            // The same timer may just have been set for these.
            if self.reports.has_lazy() {
                self.timer.set(next.min(now_lazy()));
            }
        }
    }

    pub(super) fn finish(self: &Arc<Self>, mut after: After) {
        for wakers in &mut after.wakers {
            wakers.release();
        }
        for connection in after.flush {
            connection.flush();
        }
        for told in after.events {
            match told {
                Told::Notice(source, handle, notice) => self.events.notice(&source, handle, &notice),
                Told::Ended(source, handle, error) => self.events.ended(&source, handle, error),
            }
        }
        for wakers in after.wakers {
            wakers.wake();
        }
        if after.progress {
            self.progress.notify_all();
        }
    }

    fn one(self: &Arc<Self>, state: &mut State, after: &mut After, action: Action) {
        match action {
            Action::Dial {
                connection,
                addresses,
                deadline,
            } => self.spawn(dial::dial(Arc::clone(self), connection, addresses, deadline)),
            Action::Send { connection, frame } => {
                if let Some(connection) = state.connections.get(&connection) {
                    connection.queue(&frame);
                    if !after.flush.iter().any(|other| Arc::ptr_eq(other, connection)) {
                        after.flush.push(Arc::clone(connection));
                    }
                }
            }
            Action::Disconnect { connection } => {
                if let Some(connection) = state.connections.remove(&connection) {
                    connection.close();
                }
            }
            Action::ConnectLink { transport, peer } => self.connect_link(state, &transport, peer),
            Action::CloseLink { peer } => match state.links.get_mut(&peer) {
                Some(entry) => {
                    entry.closing = true;
                    entry.link.close();
                }
                None => state.machine.link_event(clock::now(), peer, LinkEvent::Closed),
            },
            Action::Link { peer, command } => self.command(state, peer, command),
            Action::Complete { handle, result } => {
                if let Some(entry) = state.handles.remove(&handle) {
                    after.ended(self, handle, entry, result, clock::now());
                }
            }
            Action::Notice { handle, notice } => {
                if let Some(source) = state.handles.get(&handle).and_then(|entry| entry.events.as_ref()) {
                    after.events.push(Told::Notice(Arc::clone(source), handle, notice));
                }
            }
            Action::Peer { peer, change } => {
                state.peer_changed(clock::now(), peer, &change);
                after.progress = true;
            }
        }
    }

    fn connect_link(self: &Arc<Self>, state: &mut State, transport: &str, mut peer: LinkPeer) {
        // The peer says where it listens; what we may not talk to, we do not dial for it either.
        peer.addresses
            .retain(|address| dial::allowed(&self.config.security, address.ip()).is_ok());
        let number = state.next_link;
        state.next_link += 1;
        let incarnation = peer.incarnation;
        let watcher = Arc::new(Watcher {
            link: number,
            reports: Arc::clone(&self.reports),
        });
        let made = self
            .transports
            .by_name(transport)
            .and_then(|transport| transport.connect(peer, watcher));
        match made {
            Ok(link) => {
                let entry = LinkEntry {
                    number,
                    link,
                    up: false,
                    closing: false,
                };
                if let Some(previous) = state.links.insert(incarnation, entry) {
                    previous.link.close();
                }
            }
            Err(error) => {
                tracing::warn!(peer = %incarnation, %error, "no link");
                state.machine.link_failed(clock::now(), incarnation, error);
            }
        }
    }

    fn command(&self, state: &mut State, peer: Incarnation, command: LinkCommand) {
        let Some(entry) = state.links.get(&peer) else {
            if let LinkCommand::Submit(spec) = command {
                let error = Error::new(ErrorKind::Transport, "no link").at(format!("peer {peer}"));
                state.machine.submit_failed(clock::now(), peer, spec.id, error);
            }
            return;
        };
        match command {
            LinkCommand::Submit(spec) => {
                let id = spec.id;
                if let Err(error) = entry.link.submit(spec) {
                    state.machine.submit_failed(clock::now(), peer, id, error);
                }
            }
            LinkCommand::AddPart(id, part) => entry.link.add_part(id, part),
            LinkCommand::Stop(id) => entry.link.stop(id),
            LinkCommand::Forget(id) => entry.link.forget(id),
            LinkCommand::FenceLane(lane, chunks) => entry.link.fence_lane(lane, chunks),
            LinkCommand::LaneFenced(lane, chunks) => entry.link.lane_fenced(lane, chunks),
            LinkCommand::Admit(slot, generation) => entry.link.admit(slot, generation),
            LinkCommand::Revoke(slot, generation) => entry.link.revoke(slot, generation),
            LinkCommand::Message(body) => entry.link.message(body),
        }
    }
}
