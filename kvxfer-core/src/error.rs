//! Errors: one closed list of kinds with fixed numbers, and a message that says what, where, why and what to do.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What every fallible call of the kvxfer crates returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// The stable list of error kinds, the same in Rust, C and Python.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum ErrorKind {
            $($(#[$doc])* $name = $number,)*
        }

        impl ErrorKind {
            /// All kinds, in the order of their numbers.
            pub const ALL: &'static [ErrorKind] = &[$(ErrorKind::$name,)*];

            /// The kind's name as users see it.
            pub const fn name(self) -> &'static str {
                match self { $(ErrorKind::$name => stringify!($name),)* }
            }

            /// The kind with this number, if there is one.
            pub const fn from_number(number: u16) -> Option<ErrorKind> {
                match number { $($number => Some(ErrorKind::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// An argument is wrong in itself.
    InvalidArgument = 1,
    /// An index, offset or length lies outside what it indexes.
    OutOfBounds = 2,
    /// Two pools do not describe the same cache.
    GeometryMismatch = 3,
    /// The memory or pool is not registered here.
    NotRegistered = 4,
    /// This build, machine or peer cannot do that.
    Unsupported = 5,
    /// The peer did not prove who it is, or the configuration forbids it.
    Unauthenticated = 6,
    /// What was named belongs to an earlier incarnation of the peer.
    StalePeer = 7,
    /// No session with the peer was ever made.
    Unreachable = 8,
    /// The session with the peer ended and did not come back in time.
    PeerLost = 9,
    /// The key's offer has ended, or is not there and will not come.
    NotOffered = 10,
    /// No claim (or no offer) met this handle before its deadline.
    Unclaimed = 11,
    /// A live offer with this key exists.
    DuplicateKey = 12,
    /// The offer already has all the readers it was opened for.
    AlreadyClaimed = 13,
    /// The claim was ended by its owner before it was filled.
    Declined = 14,
    /// Ended by a call to cancel.
    Cancelled = 15,
    /// The source blocks were taken back.
    Retracted = 16,
    /// The deadline passed.
    DeadlineExceeded = 17,
    /// A configured limit is reached; it clears by itself.
    Busy = 18,
    /// The system or a device has no more of something.
    ResourceExhausted = 19,
    /// Bytes arrived that are not those that were sent.
    Corrupt = 20,
    /// A socket, queue pair or device failed.
    Transport = 21,
    /// The peer broke the protocol.
    Protocol = 22,
    /// The endpoint or handle is closed.
    Closed = 23,
    /// The outcome cannot be known any more.
    Unknown = 24,
    /// A defect of kvxfer.
    Internal = 25,
}

impl ErrorKind {
    /// The kind's fixed number.
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// Whether repeating the operation later can succeed without anything being changed by the caller.
    pub const fn retryable(self) -> bool {
        matches!(
            self,
            ErrorKind::Unreachable
                | ErrorKind::PeerLost
                | ErrorKind::Unclaimed
                | ErrorKind::DeadlineExceeded
                | ErrorKind::Busy
                | ErrorKind::ResourceExhausted
                | ErrorKind::Transport
                | ErrorKind::Corrupt
        )
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is known of the destination blocks after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Destination {
    /// No byte of them was written.
    Untouched,
    /// Some bytes may have been written; none will be written any more.
    Written,
    /// A device did not let go of them: they must not be reused.
    Quarantined,
}

/// An error: its kind, and what, where, why and what to do.
///
/// Built in one expression: `Error::new(ErrorKind::OutOfBounds, "block 900").at("pool 2, group 0")
/// .because("the pool has 768 blocks").remedy("use block ids below 768")`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    place: String,
    why: String,
    remedy: String,
    destination: Destination,
}

impl Error {
    /// An error of this kind about `what`.
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Error {
            kind,
            what: what.into(),
            place: String::new(),
            why: String::new(),
            remedy: String::new(),
            destination: Destination::Untouched,
        }
    }

    /// Adds where it happened: pool, peer, device, key, file.
    #[must_use]
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.place = place.into();
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn because(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    /// Adds what the reader can do about it.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    /// Says what is known of the destination blocks.
    #[must_use]
    pub fn destination_is(mut self, destination: Destination) -> Self {
        self.destination = destination;
        self
    }

    /// The kind, for programs.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What failed.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What is known of the destination blocks.
    pub fn destination(&self) -> Destination {
        self.destination
    }

    /// Whether repeating the operation can succeed; see [`ErrorKind::retryable`].
    pub fn retryable(&self) -> bool {
        self.kind.retryable()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.what)?;
        if !self.place.is_empty() {
            write!(f, " ({})", self.place)?;
        }
        if !self.why.is_empty() {
            write!(f, ": {}", self.why)?;
        }
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        if self.destination == Destination::Quarantined {
            f.write_str(" [quarantined: do not reuse the destination blocks]")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_dense_and_round_trip() {
        for (index, kind) in ErrorKind::ALL.iter().enumerate() {
            assert_eq!(kind.number() as usize, index + 1);
            assert_eq!(ErrorKind::from_number(kind.number()), Some(*kind));
        }
        assert_eq!(ErrorKind::from_number(0), None);
    }

    #[test]
    fn a_message_says_what_where_why_and_what_to_do() {
        let error = Error::new(ErrorKind::OutOfBounds, "block 900")
            .at("pool 2, group 0")
            .because("the pool has 768 blocks")
            .remedy("use block ids below 768");
        assert_eq!(
            error.to_string(),
            "OutOfBounds: block 900 (pool 2, group 0): the pool has 768 blocks; use block ids below 768"
        );
    }
}
