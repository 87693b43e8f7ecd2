//! What a link says: to the peer's end over the session, and to the control plane. Each in order, by one thread at a time.

use kvxfer_core::flow::SendEvent;
use kvxfer_core::transport::LinkEvent;

use super::LinkCore;
use crate::message::LinkMessage;

impl LinkCore {
    /// Leaves a message for the peer; [`flush`](Self::flush) sends it.
    pub(crate) fn tell(&self, message: LinkMessage) {
        self.outbox.lock().push(message);
    }

    /// Sends what was left for the peer, in order.
    pub(crate) fn flush(&self) {
        loop {
            if self.outbox.lock().is_empty() {
                return;
            }
            // Whoever is sending looks again after it has let go.
            let Some(posting) = self.posting.try_lock() else {
                return;
            };
            loop {
                let bodies = self.outbox.lock().bodies();
                if bodies.is_empty() {
                    break;
                }
                for body in bodies {
                    self.emit(LinkEvent::Message(body));
                }
            }
            drop(posting);
        }
    }

    /// Reports what the sender has to say, in order.
    pub(crate) fn report(&self) {
        self.reports.report(
            || self.sender.lock().poll_event(),
            |event| {
                if let SendEvent::Quiet(id) = event {
                    self.outbound.forget(id);
                }
                self.emit(LinkEvent::Send(event));
            },
        );
    }
}
