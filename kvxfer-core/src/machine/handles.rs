//! What all kinds of handles have in common: limits, deadlines, completion; and the end of the endpoint.

use super::*;

impl Machine {
    /// After each input: reports the ends that it made possible.
    pub(super) fn settle(&mut self, now: Time) {
        if self.fences_changed {
            self.look_at_fences(now);
        }
        if self.shutdown.is_some() && !self.shutdown_over && self.open_handles().is_empty() {
            self.say_goodbye(now);
        }
    }

    pub(super) fn end_handle(&mut self, now: Time, handle: HandleId, error: Error) {
        if self.claims.contains_key(&handle) {
            self.end_claim(now, handle, error);
        } else if self.offers.contains_key(&handle) {
            self.end_offer(now, handle, error);
        } else if self.grants.contains_key(&handle) {
            self.end_grant(now, handle, error);
        } else if self.serves.contains_key(&handle) {
            self.end_serve(now, handle, error);
        } else if self.pushes.contains_key(&handle) {
            self.end_push(now, handle, error);
        } else if self.pulls.contains_key(&handle) {
            self.end_pull(now, handle, error);
        }
    }

    pub(super) fn on_deadline(&mut self, now: Time, handle: HandleId) {
        if self.claims.contains_key(&handle) {
            self.on_claim_deadline(now, handle);
        } else if self.offers.contains_key(&handle) {
            self.on_offer_deadline(now, handle);
        } else {
            let waits = self.waits_for(handle).map(|waiting| waiting.what).unwrap_or_default();
            let error = Error::new(ErrorKind::DeadlineExceeded, "the handle")
                .because(format!("it waited for: {waits}"))
                .remedy("allow more time, or look at the peer");
            self.end_handle(now, handle, error);
        }
    }

    pub(super) fn on_resolve_timer(&mut self, now: Time, socket: SocketAddr) {
        let liveness = self.config.liveness;
        let late = self
            .resolving
            .get(&socket)
            .filter(|resolving| now >= resolving.since + liveness)
            .map(|resolving| peers::unreachable(&resolving.address, resolving.last_error.as_ref()));
        match late {
            Some(error) => self.resolving_failed(now, socket, error),
            None => self.dial_resolving(now, socket),
        }
    }

    /// What a new session begins with: what waited for it, and what was undecided in the one before.
    pub(super) fn session_began(&mut self, now: Time, peer: Incarnation, undecided: Vec<Message>) {
        for message in undecided {
            self.send(now, peer, message);
        }
        if self.draining {
            self.send(now, peer, Message::Draining);
        }
        self.send_claims(now, peer);
        self.send_grant_ends(now, peer);
        self.start_transfers(now, peer);
    }

    /// What is to be asked for in the next session with a peer that lives but has forgotten this one.
    pub(super) fn undecided_with(&mut self, now: Time, peer: Incarnation) -> Vec<Message> {
        let mut messages = self.ask_for_members(peer);
        messages.extend(self.ask_for_pushes(now, peer));
        messages
    }

    /// Delivers the end of a handle.
    pub(super) fn complete(&mut self, handle: HandleId, result: Result<Outcome>) {
        if mutants::is(Mutant::DoubleComplete) {
            self.actions.push_back(Action::Complete {
                handle,
                result: result.clone(),
            });
        }
        self.fences_changed = true;
        self.actions.push_back(Action::Complete { handle, result });
    }

    pub(super) fn forget_timers(&mut self, handle: HandleId) {
        self.fencing.remove(&handle);
        for key in [
            TimerKey::Deadline(handle),
            TimerKey::Fence(handle),
            TimerKey::Bind(handle),
        ] {
            self.timers.clear(key);
        }
    }

    pub(super) fn open_handles(&self) -> Vec<HandleId> {
        let mut handles: Vec<HandleId> = self.offers.keys().copied().collect();
        handles.extend(self.claims.keys());
        handles.extend(self.grants.keys());
        handles.extend(self.serves.keys());
        handles.extend(self.pushes.keys());
        handles.extend(self.pulls.keys());
        handles
    }

    pub(super) fn handles(&self) -> usize {
        self.offers.len()
            + self.claims.len()
            + self.grants.len()
            + self.serves.len()
            + self.pushes.len()
            + self.pulls.len()
    }

    pub(super) fn new_handle(&mut self) -> HandleId {
        let id = HandleId(self.next_handle);
        self.next_handle += 1;
        id
    }

    pub(super) fn check_open(&self, what: &str) -> Result<()> {
        if self.shutdown.is_some() {
            return Err(Error::new(ErrorKind::Closed, what)
                .at(format!("endpoint {}", self.config.name))
                .because("the endpoint was closed"));
        }
        Ok(())
    }

    pub(super) fn check_new_handle(&self, what: &str) -> Result<()> {
        self.check_open(what)?;
        if self.draining {
            return Err(Error::new(ErrorKind::Closed, what)
                .at(format!("endpoint {}", self.config.name))
                .because("the endpoint is draining: it takes no new work"));
        }
        if self.handles() >= self.config.handles_max {
            return Err(Error::new(ErrorKind::Busy, what)
                .because(format!("{} handles are open, the limit", self.handles()))
                .remedy("wait until some have ended, or raise limits.handles_max"));
        }
        Ok(())
    }

    /// Whether a session has room for what a new handle says on it.
    pub(super) fn check_room_on_session(&self, peer: Incarnation) -> Result<()> {
        let session = self.peers.get(&peer).and_then(|peer| peer.session.as_ref());
        if session.is_some_and(|session| session.kept() >= self.config.unacknowledged_max) {
            return Err(Error::new(ErrorKind::Busy, format!("the session with endpoint {peer}"))
                .because(format!(
                    "{} messages wait for its acknowledgement",
                    self.config.unacknowledged_max
                ))
                .remedy("retry shortly"));
        }
        Ok(())
    }

    pub(super) fn tell_all(&mut self, now: Time, message: &Message) {
        let peers: Vec<Incarnation> = self.peers.keys().copied().collect();
        for peer in peers {
            self.send(now, peer, message.clone());
        }
    }

    /// All handles have ended: sessions and links go.
    pub(super) fn say_goodbye(&mut self, now: Time) {
        self.shutdown_over = true;
        self.timers.clear(TimerKey::Shutdown);
        let sockets: Vec<SocketAddr> = self.resolving.keys().copied().collect();
        for socket in sockets {
            self.resolving_failed(now, socket, Error::new(ErrorKind::Closed, "the endpoint"));
        }
        let peers: Vec<Incarnation> = self.peers.keys().copied().collect();
        for peer in peers {
            self.flush_verdict_acks(now, peer);
            self.send(now, peer, Message::Goodbye);
            let error = Error::new(ErrorKind::Closed, "the session").because("this endpoint was closed");
            self.end_peer(now, peer, error);
        }
        let connections: Vec<ConnectionId> = self.connections.keys().copied().collect();
        for connection in connections {
            self.drop_connection(connection);
        }
    }

    /// Not everything has ended by itself.
    pub(super) fn force_shutdown(&mut self, now: Time) {
        if !self.shutdown_over {
            self.say_goodbye(now);
        }
    }
}
