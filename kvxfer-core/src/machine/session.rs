//! A session's bookkeeping: numbered messages, kept until acknowledged, repeated after a reconnect, dropped when they
//! come twice.

use std::collections::VecDeque;

use crate::error::{Error, ErrorKind, Result};
use crate::mutants::{self, Mutant};
use crate::wire::Message;

/// A resumable, reliable, ordered channel of messages between two incarnations. It outlives its connections.
#[derive(Debug)]
pub(super) struct Session {
    /// Its number, drawn by the dialer of its first connection.
    pub(super) number: u128,
    /// The secret that a lane of it knows.
    pub(super) token: u128,
    /// Whether this side dialed its first connection: it dials the lanes too.
    pub(super) dialer: bool,
    /// Whether the peer is known to have it: something was received on it.
    pub(super) confirmed: bool,
    /// Number of the last message received in order.
    pub(super) received: u64,
    /// Number of the last message received that the peer has been told of.
    pub(super) acknowledged_to_peer: u64,
    sent: u64,
    acknowledged: u64,
    unacknowledged: VecDeque<Message>,
}

/// What to do with a message that came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Receipt {
    /// It is the next one.
    New,
    /// It came before.
    Duplicate,
    /// One before it is missing.
    Gap,
}

impl Session {
    pub(super) fn new(number: u128, token: u128, dialer: bool) -> Session {
        Session {
            number,
            token,
            dialer,
            confirmed: !dialer,
            received: 0,
            acknowledged_to_peer: 0,
            sent: 0,
            acknowledged: 0,
            unacknowledged: VecDeque::new(),
        }
    }

    /// Numbers a message and keeps it until it is acknowledged.
    pub(super) fn push(&mut self, message: Message) -> u64 {
        self.sent += 1;
        self.unacknowledged.push_back(message);
        self.sent
    }

    /// The peer has received everything up to `number`.
    pub(super) fn acknowledge(&mut self, number: u64) -> Result<()> {
        if number > self.sent {
            return Err(
                Error::new(ErrorKind::Protocol, format!("acknowledgement of message {number}"))
                    .because(format!("only {} were sent", self.sent)),
            );
        }
        while self.acknowledged < number {
            self.acknowledged += 1;
            self.unacknowledged.pop_front();
        }
        Ok(())
    }

    /// A message with this number came.
    pub(super) fn receive(&mut self, number: u64) -> Receipt {
        if number <= self.received {
            return if mutants::is(Mutant::ReplayDuplicateMessage) {
                Receipt::New
            } else {
                Receipt::Duplicate
            };
        }
        if number > self.received + 1 && !mutants::is(Mutant::LoseUnacknowledged) {
            return Receipt::Gap;
        }
        self.received = number;
        Receipt::New
    }

    /// What is to be sent (again) on a new connection, with its number.
    pub(super) fn repeat(&mut self) -> Vec<(u64, Message)> {
        if mutants::is(Mutant::LoseUnacknowledged) {
            self.acknowledged = self.sent;
            self.unacknowledged.clear();
        }
        (self.acknowledged + 1..)
            .zip(self.unacknowledged.iter().cloned())
            .collect()
    }

    /// Whether the peer cannot have acted on anything this side sent in a way that this side knows of.
    pub(super) fn is_unheard(&self) -> bool {
        self.received == 0 && self.acknowledged == 0 && !self.confirmed
    }

    /// Messages kept for repetition.
    pub(super) fn kept(&self) -> usize {
        self.unacknowledged.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_kept_until_acknowledged() {
        let mut session = Session::new(1, 2, true);
        assert_eq!(session.push(Message::Draining), 1);
        assert_eq!(session.push(Message::Goodbye), 2);
        session.acknowledge(1).unwrap();
        assert_eq!(session.repeat(), vec![(2, Message::Goodbye)]);
        assert_eq!(session.acknowledge(3).unwrap_err().kind(), ErrorKind::Protocol);
        session.acknowledge(2).unwrap();
        session.acknowledge(1).unwrap();
        assert_eq!(session.kept(), 0);
    }

    #[test]
    fn messages_are_taken_once_and_in_order() {
        let mut session = Session::new(1, 2, false);
        assert_eq!(session.receive(1), Receipt::New);
        assert_eq!(session.receive(1), Receipt::Duplicate);
        assert_eq!(session.receive(3), Receipt::Gap);
        assert_eq!(session.receive(2), Receipt::New);
        assert_eq!(session.received, 2);
    }
}
