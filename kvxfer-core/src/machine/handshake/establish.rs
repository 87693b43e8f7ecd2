//! What makes a session of a handshake, and what then comes on it.

use super::*;

impl Machine {
    /// Whether a session with whoever says this is possible.
    pub(super) fn check_hello(&self, hello: &Hello) -> crate::error::Result<()> {
        let (low, high) = hello.versions;
        if low > VERSIONS.1 || high < VERSIONS.0 || low > high {
            return Err(Error::new(ErrorKind::Unsupported, "the protocol version")
                .at(format!("endpoint {}", self.config.name))
                .because(format!(
                    "this endpoint speaks {} to {}, the peer {low} to {high}",
                    VERSIONS.0, VERSIONS.1
                ))
                .remedy("upgrade the older side"));
        }
        if hello.auth != AuthOffer::None {
            return Err(Error::new(ErrorKind::Unauthenticated, "the peer's authentication")
                .because("this endpoint is configured for security \"none\"")
                .remedy("configure both sides alike"));
        }
        if let Some(expected) = hello.expects
            && expected != self.incarnation
            && !mutants::is(Mutant::AcceptOtherIncarnation)
        {
            return Err(stale(expected, self.incarnation, &self.config.name));
        }
        if hello.incarnation == self.incarnation {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "a session of an endpoint with itself")
                    .remedy("use the peer's address, not one's own"),
            );
        }
        if !self
            .transports
            .iter()
            .any(|ours| hello.transports.iter().any(|(theirs, _)| ours.name == *theirs))
        {
            let names = |list: &[(String, Vec<u8>)]| {
                list.iter()
                    .map(|(name, _)| name.as_str())
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            return Err(Error::new(ErrorKind::Unsupported, "a transport between two endpoints")
                .because(format!(
                    "this endpoint has [{}], the peer [{}]",
                    names(&self.transport_adverts()),
                    names(&hello.transports)
                ))
                .remedy("configure a transport that both sides have, for example tcp"));
        }
        if self.shutdown.is_some() {
            return Err(
                Error::new(ErrorKind::Closed, format!("endpoint {}", self.config.name)).because("it is shutting down")
            );
        }
        if !self.peers.contains_key(&hello.incarnation) && self.peers.len() >= self.config.peers_max {
            self.check_room_for_peer()?;
        }
        Ok(())
    }

    /// Another incarnation answers where a known peer was: the known one is gone.
    pub(super) fn note_restarts(&mut self, now: Time, hello: &Hello, from: Option<SocketAddr>) {
        let credible = |socket: &SocketAddr| {
            !socket.ip().is_unspecified() && socket.port() != 0 && from.is_none_or(|from| from.ip() == socket.ip())
        };
        let sockets: Vec<SocketAddr> = hello.address.sockets.iter().copied().filter(credible).collect();
        let gone: Vec<Incarnation> = self
            .peers
            .iter()
            .filter(|(incarnation, peer)| {
                **incarnation != hello.incarnation && peer.address.sockets.iter().any(|socket| sockets.contains(socket))
            })
            .map(|(incarnation, _)| *incarnation)
            .collect();
        for incarnation in gone {
            let error = stale(incarnation, hello.incarnation, &hello.name);
            self.end_peer(now, incarnation, error);
        }
    }

    /// Both sides are ready: the session begins or goes on.
    pub(super) fn establish(&mut self, now: Time, agreement: Agreement) {
        let Agreement {
            connection: id,
            peer: incarnation,
            hello,
            resumed,
            number,
            token,
            received,
            dialed,
        } = agreement;
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.stage = Stage::Established;
            connection.peer = Some(incarnation);
        }
        self.timers.clear(TimerKey::Handshake(id));
        self.timers.clear(TimerKey::Redial(incarnation));
        let heartbeat = self.config.heartbeat;
        let peer = self
            .peers
            .entry(incarnation)
            .or_insert_with(|| Peer::new(now, hello.address.clone(), heartbeat));
        let leftovers = [peer.connection.take(), peer.dial.take(), peer.parked.take()];
        for leftover in leftovers.into_iter().flatten().filter(|leftover| *leftover != id) {
            self.drop_connection(leftover);
        }
        let unheard = !resumed && self.take_over_unheard(incarnation, number, token, dialed);
        let fresh = !resumed && !unheard;
        let undecided = if fresh {
            self.session_replaced(now, incarnation)
        } else {
            Vec::new()
        };
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        peer.connection = Some(id);
        peer.established = now;
        peer.last_heard = now;
        peer.last_error = None;
        peer.backoff = crate::machine::config::BACKOFF_FIRST;
        peer.name = hello.name.chars().take(256).collect();
        peer.address.incarnation = Some(incarnation);
        if !hello.address.sockets.is_empty() {
            peer.address = hello.address.clone();
            peer.address.incarnation = Some(incarnation);
        }
        let quarter = std::time::Duration::from_millis(u64::from(hello.liveness_ms) / 4);
        peer.heartbeat = heartbeat.min(quarter.max(std::time::Duration::from_millis(10)));
        peer.transports = hello.transports;
        if !resumed {
            peer.draining = false;
            peer.pools = hello
                .pools
                .into_iter()
                .map(|advert| (advert.id, PeerPool::of(advert)))
                .collect();
            peer.pools_told = peer.pools.last_key_value().map(|(id, _)| *id);
        }
        if fresh {
            // Another session, another try of every transport.
            peer.failures.clear();
            peer.session = Some(Session::new(number, token, dialed));
        }
        let beat = peer.heartbeat;
        let change = PeerChange::Ready {
            name: peer.name.clone(),
            address: peer.address.clone(),
            resumed,
        };
        self.actions.push_back(Action::Peer {
            peer: incarnation,
            change,
        });
        self.timers.set(TimerKey::Heartbeat(incarnation), now + beat);
        self.timers
            .set(TimerKey::Liveness(incarnation), now + self.config.liveness / 2);
        self.open_link(now, incarnation);
        if fresh {
            self.send_heartbeat(now, incarnation);
            self.session_began(now, incarnation, undecided);
        } else {
            self.repeat_unacknowledged(now, incarnation, if resumed { received } else { 0 });
        }
        if !resumed {
            self.tell_pools_since_hello(now, id, incarnation);
        }
    }

    /// Pools that came or went between this end's hello and the beginning of the session.
    fn tell_pools_since_hello(&mut self, now: Time, id: ConnectionId, incarnation: Incarnation) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let said = connection.pools_said.clone();
        for gone in said
            .iter()
            .filter(|pool| !self.pools.contains_key(pool))
            .copied()
            .collect::<Vec<_>>()
        {
            self.send(now, incarnation, Message::PoolRemoved(gone));
        }
        for advert in self.pool_adverts() {
            if !said.contains(&advert.id) {
                self.send(now, incarnation, Message::PoolAdded(advert));
            }
        }
    }

    /// If nothing was ever heard on the session that we have, the peer knows nothing of it that matters: what was to
    /// be said on it is said on the new one.
    pub(super) fn take_over_unheard(
        &mut self,
        incarnation: Incarnation,
        number: u128,
        token: u128,
        dialed: bool,
    ) -> bool {
        let session = self
            .peers
            .get_mut(&incarnation)
            .and_then(|peer| peer.session.as_mut())
            .filter(|session| session.is_unheard());
        let Some(session) = session else { return false };
        session.number = number;
        session.token = token;
        session.dialer = dialed;
        session.confirmed = !dialed;
        true
    }

    /// The peer has forgotten the session: everything on it is lost, except that the outcome of what was being sent
    /// is asked for in the next.
    pub(super) fn session_replaced(&mut self, now: Time, incarnation: Incarnation) -> Vec<Message> {
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return Vec::new();
        };
        if peer.session.take().is_none() {
            return Vec::new();
        }
        peer.verdict_acks.clear();
        let error = lost(incarnation, &peer.name, "it came back without the session");
        let undecided = self.undecided_with(now, incarnation);
        self.end_handles_with(now, incarnation, &error, true);
        undecided
    }

    pub(super) fn repeat_unacknowledged(&mut self, now: Time, incarnation: Incarnation, received: u64) {
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        let (Some(session), Some(connection)) = (peer.session.as_mut(), peer.connection) else {
            return;
        };
        if let Err(error) = session.acknowledge(received) {
            self.protocol_broken(now, incarnation, error);
            return;
        }
        let acknowledged = session.received;
        session.acknowledged_to_peer = acknowledged;
        peer.last_sent = now;
        let messages = session.repeat();
        if messages.is_empty() {
            self.send_heartbeat(now, incarnation);
        }
        for (sequence, message) in messages {
            let frame = Frame::Message {
                sequence,
                acknowledged,
                message: Box::new(message),
            };
            self.actions.push_back(Action::Send { connection, frame });
        }
    }

    // ------------------------------------------------------------------------------------------- messages

    pub(super) fn message_frame(
        &mut self,
        now: Time,
        id: ConnectionId,
        sequence: u64,
        acknowledged: u64,
        message: Message,
    ) {
        let Some(incarnation) = self.connections.get(&id).and_then(|connection| connection.peer) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return;
        };
        if peer.connection != Some(id) {
            return;
        }
        peer.last_heard = now;
        let Some(session) = peer.session.as_mut() else { return };
        if let Err(error) = session.acknowledge(acknowledged) {
            self.protocol_broken(now, incarnation, error);
            return;
        }
        if !session.confirmed {
            session.confirmed = true;
            self.open_link(now, incarnation);
        }
        if sequence == 0 {
            if message != Message::Heartbeat {
                let error = Error::new(ErrorKind::Protocol, "a message without a number");
                self.protocol_broken(now, incarnation, error);
            }
            return;
        }
        let receipt = self
            .peers
            .get_mut(&incarnation)
            .and_then(|peer| peer.session.as_mut())
            .map(|session| session.receive(sequence));
        match receipt {
            None | Some(Receipt::Duplicate) => return,
            Some(Receipt::Gap) => {
                let why = Error::new(ErrorKind::Protocol, format!("message {sequence}"))
                    .because("the one before it did not come");
                self.give_up_connection(now, id, why);
                return;
            }
            Some(Receipt::New) => {}
        }
        if let Err(error) = self.message(now, incarnation, message) {
            self.protocol_broken(now, incarnation, error);
            return;
        }
        let behind = self
            .peers
            .get(&incarnation)
            .and_then(|peer| peer.session.as_ref())
            .is_some_and(|session| session.received - session.acknowledged_to_peer >= ACKNOWLEDGE_EVERY);
        if behind {
            self.send_heartbeat(now, incarnation);
        }
    }
}
