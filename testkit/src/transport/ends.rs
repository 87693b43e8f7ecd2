//! The two ends of a link.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use kvxfer_core::transport::{Link, LinkEvent, LinkPeer, Transport};

use super::{Log, Node};

/// A link's two ends, each with its log, and what carries their words between them. When this goes, nothing is carried
/// any more; the link itself lives as long as its handles.
pub struct Ends {
    /// The left node's end.
    pub left_link: Arc<dyn Link>,
    /// The right node's end.
    pub right_link: Arc<dyn Link>,
    /// What the left end reports.
    pub left_log: Arc<Log>,
    /// What the right end reports.
    pub right_log: Arc<Log>,
    relays: Vec<JoinHandle<()>>,
}

impl Ends {
    /// Joins two nodes, each by its view of the other.
    ///
    /// # Panics
    /// If a transport refuses.
    pub fn join<T: Transport>(left: &Node<T>, to_right: LinkPeer, right: &Node<T>, to_left: LinkPeer) -> Ends {
        let (left_log, right_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
        let (from_left, from_right) = (said_by(&left_log), said_by(&right_log));
        let right_link = right.transport.connect(to_left, right_log.clone()).unwrap();
        let left_link = left.transport.connect(to_right, left_log.clone()).unwrap();
        let relays = vec![
            relay(from_left, right_link.clone()),
            relay(from_right, left_link.clone()),
        ];
        Ends {
            left_link,
            right_link,
            left_log,
            right_log,
            relays,
        }
    }

    /// Waits until both ends are up.
    pub fn up(&self) {
        self.left_log.up();
        self.right_log.up();
    }

    /// Closes both ends.
    pub fn close(&self) {
        self.left_link.close();
        self.right_link.close();
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        // Else each relay keeps the other's link alive.
        self.left_log.relay_to(None);
        self.right_log.relay_to(None);
        for relay in self.relays.drain(..) {
            let _ = relay.join();
        }
    }
}

fn said_by(log: &Log) -> mpsc::Receiver<LinkEvent> {
    let (sender, receiver) = mpsc::channel();
    log.relay_to(Some(sender));
    receiver
}

/// Carries what one end says to the other, as the control planes and their session do.
fn relay(from: mpsc::Receiver<LinkEvent>, to: Arc<dyn Link>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for event in from {
            match event {
                LinkEvent::Message(body) => to.message(body),
                LinkEvent::LaneLost { lane, chunks, .. } => to.fence_lane(lane, chunks),
                LinkEvent::LaneFenced { lane, chunks } => to.lane_fenced(lane, chunks),
                _ => {}
            }
        }
    })
}
