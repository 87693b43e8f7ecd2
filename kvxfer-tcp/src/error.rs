//! What can fail on a lane, with the call, the error number, the peer and the lane.

use std::fmt;
use std::io;

use kvxfer_core::flow::LaneName;
use kvxfer_core::{Error, ErrorKind, Incarnation};

/// A lane and whom it goes to, as errors and counters name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LanePlace {
    /// The peer.
    pub peer: Incarnation,
    /// The lane.
    pub lane: LaneName,
}

impl fmt::Display for LanePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {}.{} to {}", self.lane.index, self.lane.epoch, self.peer)
    }
}

/// What fails in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// A system call on a lane failed.
    #[error("{call} failed on {place}: {source}")]
    Call {
        /// The call.
        call: &'static str,
        /// The lane.
        place: LanePlace,
        /// Its error number.
        source: io::Error,
    },
    /// A system call that belongs to no lane failed.
    #[error("{call} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Its error number.
        source: io::Error,
    },
    /// The peer closed the connection.
    #[error("{place} was closed by the peer")]
    Ended {
        /// The lane.
        place: LanePlace,
    },
    /// A lane did not come up in time.
    #[error("{place} did not come up within {limit_ms} ms")]
    TimedOut {
        /// The lane.
        place: LanePlace,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// A hello that does not fit the link.
    #[error("hello refused for {place}: {why}")]
    Hello {
        /// The lane.
        place: LanePlace,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A hello of a connection that belongs to no link.
    #[error("hello of {from} for lane {index}.{epoch} refused: {why}", index = lane.index, epoch = lane.epoch)]
    Stray {
        /// Who says it speaks.
        from: Incarnation,
        /// The lane it says it is.
        lane: LaneName,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The peer broke the protocol, or bytes are not what they should be.
    #[error("{source} on {place}")]
    Peer {
        /// The lane.
        place: LanePlace,
        /// What it did.
        source: Box<Error>,
    },
    /// A device copy failed.
    #[error("staging copy failed on {place}: {source}")]
    Copy {
        /// The lane.
        place: LanePlace,
        /// What the memory domain said.
        source: Box<Error>,
    },
    /// The peer's runtime fenced the lane.
    #[error("{place} was fenced at the peer's request")]
    Fenced {
        /// The lane.
        place: LanePlace,
    },
    /// A newer connection took the lane's place.
    #[error("{place} was replaced by a newer connection")]
    Replaced {
        /// The lane.
        place: LanePlace,
    },
    /// The link or the transport is closed.
    #[error("the link to {peer} is closed")]
    Closed {
        /// The peer.
        peer: Incarnation,
    },
}

impl TcpError {
    /// The kind it counts as.
    pub fn kind(&self) -> ErrorKind {
        match self {
            TcpError::System { .. } => ErrorKind::ResourceExhausted,
            TcpError::Call { .. } | TcpError::Ended { .. } | TcpError::TimedOut { .. } => ErrorKind::Transport,
            TcpError::Fenced { .. } | TcpError::Replaced { .. } => ErrorKind::Transport,
            TcpError::Hello { .. } => ErrorKind::Protocol,
            TcpError::Stray { .. } => ErrorKind::Unauthenticated,
            TcpError::Peer { source, .. } | TcpError::Copy { source, .. } => source.kind(),
            TcpError::Closed { .. } => ErrorKind::Closed,
        }
    }

    fn remedy(&self) -> &'static str {
        match self {
            TcpError::Call { .. } | TcpError::Ended { .. } | TcpError::TimedOut { .. } => {
                "nothing if the lane comes back by itself; else check the network and whether the peer lives"
            }
            TcpError::System { .. } => "raise the limit the call ran into (`ulimit -n`, memory) or close endpoints",
            TcpError::Hello { .. } | TcpError::Stray { .. } => {
                "check that both ends run kvxfer and that nothing else connects to this port"
            }
            TcpError::Peer { .. } => "check that both ends run the same version of kvxfer; report it if they do",
            TcpError::Copy { .. } => "check the device that the pool is in",
            TcpError::Fenced { .. } | TcpError::Replaced { .. } => "nothing: the lane is being replaced",
            TcpError::Closed { .. } => "open a new session with the peer",
        }
    }
}

impl From<TcpError> for Error {
    fn from(error: TcpError) -> Error {
        let (what, place, why) = match &error {
            TcpError::Call { call, place, source } => (format!("{call} failed"), place.to_string(), source.to_string()),
            TcpError::System { call, source } => (format!("{call} failed"), "tcp".into(), source.to_string()),
            TcpError::Ended { place } => ("a lane was lost".into(), place.to_string(), "the peer closed it".into()),
            TcpError::TimedOut { place, limit_ms } => (
                "a lane did not come up".into(),
                place.to_string(),
                format!("no answer within {limit_ms} ms"),
            ),
            TcpError::Hello { place, why } => ("a lane's hello".into(), place.to_string(), (*why).into()),
            TcpError::Stray { from, lane, why } => (
                format!("a hello for lane {}.{}", lane.index, lane.epoch),
                format!("from {from}"),
                (*why).into(),
            ),
            TcpError::Peer { place, source } => ("a lane was closed".into(), place.to_string(), source.to_string()),
            TcpError::Copy { place, source } => ("a staging copy".into(), place.to_string(), source.to_string()),
            TcpError::Fenced { place } => (
                "a lane was taken out of use".into(),
                place.to_string(),
                "the peer lost it and asked for the fence".into(),
            ),
            TcpError::Replaced { place } => (
                "a lane was lost".into(),
                place.to_string(),
                "the peer dialed a newer connection".into(),
            ),
            TcpError::Closed { peer } => ("the link".into(), format!("to {peer}"), "it is closed".into()),
        };
        Error::new(error.kind(), what)
            .at(place)
            .because(why)
            .remedy(error.remedy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_says_which_where_and_why() {
        let place = LanePlace {
            peer: Incarnation::from_bits(7),
            lane: LaneName { index: 1, epoch: 3 },
        };
        let error: Error = TcpError::Call {
            call: "recvmsg",
            place,
            source: io::Error::from_raw_os_error(libc::ECONNRESET),
        }
        .into();
        assert_eq!(error.kind(), ErrorKind::Transport);
        let text = error.to_string();
        for part in ["recvmsg", "lane 1.3", "reset", "check"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
