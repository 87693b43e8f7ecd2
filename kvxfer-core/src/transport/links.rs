//! The links that a transport has: one for each session, and not more than its limit.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::LinkPeer;
use crate::error::{Error, ErrorKind, Result};
use crate::id::Incarnation;

/// The links of a transport that have not ended. A link is one session's: a new session of the same peer is another link.
///
/// For a transport to keep behind a lock.
#[derive(Debug)]
pub struct Links<L> {
    transport: &'static str,
    links_max: usize,
    closed: bool,
    by_session: HashMap<(Incarnation, u128), Arc<L>>,
}

impl<L> Links<L> {
    /// None yet, of the transport of this name, and at most so many.
    pub fn new(transport: &'static str, links_max: usize) -> Links<L> {
        Links {
            transport,
            links_max,
            closed: false,
            by_session: HashMap::new(),
        }
    }

    /// Makes the link of a session, if there may be one.
    ///
    /// # Errors
    /// `Closed` after [`Links::close`], `Busy` at the limit, `InvalidArgument` if the session has a link already.
    pub fn begin(&mut self, peer: &LinkPeer, make: impl FnOnce() -> Arc<L>) -> Result<Arc<L>> {
        let count = self.by_session.len();
        let (kind, why, remedy) = match self.by_session.entry((peer.incarnation, peer.token)) {
            _ if self.closed => (
                ErrorKind::Closed,
                "the transport is shut down".to_owned(),
                "make a new endpoint",
            ),
            _ if count >= self.links_max => (
                ErrorKind::Busy,
                format!("there are {count} links already"),
                "close links, or raise the limit `links_max`",
            ),
            Entry::Occupied(_) => (
                ErrorKind::InvalidArgument,
                "this session has a link already".to_owned(),
                "use that link, or close it first",
            ),
            Entry::Vacant(place) => return Ok(place.insert(make()).clone()),
        };
        Err(Error::new(kind, format!("a link to {}", peer.incarnation))
            .at(self.transport)
            .because(why)
            .remedy(remedy))
    }

    /// A link has ended.
    pub fn end(&mut self, peer: &LinkPeer) {
        self.by_session.remove(&(peer.incarnation, peer.token));
    }

    /// No more links are begun. Those that there are.
    pub fn close(&mut self) -> Vec<Arc<L>> {
        self.closed = true;
        self.all()
    }

    /// Whether no more links are begun.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Lets go of all of them.
    pub fn clear(&mut self) {
        self.by_session.clear();
    }

    /// The link of the session with this peer that has this token.
    pub fn get(&self, peer: Incarnation, token: u128) -> Option<&Arc<L>> {
        self.by_session.get(&(peer, token))
    }

    /// Whether some session of this peer has a link.
    pub fn has_peer(&self, peer: Incarnation) -> bool {
        self.by_session.keys().any(|(other, _)| *other == peer)
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<L>> {
        self.by_session.values().cloned().collect()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.by_session.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_session.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(peer: u128, token: u128) -> LinkPeer {
        LinkPeer {
            incarnation: Incarnation::from_bits(peer),
            local: Incarnation::from_bits(1),
            addresses: Vec::new(),
            advert: Vec::new(),
            token,
            dials: true,
        }
    }

    #[test]
    fn a_link_for_each_session_up_to_the_limit() {
        let mut links = Links::new("tcp", 2);
        let begin = |links: &mut Links<u8>, peer, token| {
            let made = links.begin(&session(peer, token), || Arc::new(0));
            made.map(drop).map_err(|error| error.kind())
        };
        assert_eq!(begin(&mut links, 2, 7), Ok(()));
        assert_eq!(begin(&mut links, 2, 7), Err(ErrorKind::InvalidArgument));
        // A new session of the same peer.
        assert_eq!(begin(&mut links, 2, 8), Ok(()));
        assert_eq!(begin(&mut links, 3, 7), Err(ErrorKind::Busy));
        assert_eq!((links.len(), links.all().len()), (2, 2));
        links.end(&session(2, 7));
        assert!(links.get(Incarnation::from_bits(2), 7).is_none());
        assert!(links.get(Incarnation::from_bits(2), 8).is_some());
        assert!(links.has_peer(Incarnation::from_bits(2)) && !links.has_peer(Incarnation::from_bits(3)));
        assert_eq!(begin(&mut links, 3, 7), Ok(()));
        assert_eq!(links.close().len(), 2);
        links.clear();
        assert_eq!(begin(&mut links, 4, 7), Err(ErrorKind::Closed));
        assert!(links.is_empty() && links.is_closed());
    }
}
