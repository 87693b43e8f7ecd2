//! What waits for something outside to happen (a kernel to end, say): parts of offers, and pushes. The driver names the
//! event when it releases them, and says once how the event went.
//!
//! A part that is withheld is released as far as its owner is concerned: checked, counted, and no token of it can be
//! released again. Only its bytes are nobody's to read yet.

use std::collections::{BTreeMap, BTreeSet};

use super::Machine;
use super::released::PartRange;
use super::types::{EventId, HandleId};
use crate::error::{Error, ErrorKind, Result};
use crate::time::Time;

/// The parts of one offer's current attempt that are withheld, by the event they wait for.
#[derive(Debug, Default)]
pub(super) struct Withheld {
    parts: BTreeMap<EventId, Vec<PartRange>>,
}

impl Withheld {
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

/// Which handles wait for which event. An entry goes with its event, or with the last handle that waits for it.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    handles: BTreeMap<EventId, BTreeSet<HandleId>>,
}

impl Awaited {
    pub(super) fn len(&self) -> usize {
        self.handles.len()
    }

    pub(super) fn contains(&self, event: EventId) -> bool {
        self.handles.contains_key(&event)
    }

    pub(super) fn add(&mut self, event: EventId, handle: HandleId) {
        self.handles.entry(event).or_default().insert(handle);
    }

    pub(super) fn remove(&mut self, event: EventId, handle: HandleId) {
        if let Some(handles) = self.handles.get_mut(&event) {
            handles.remove(&handle);
            if handles.is_empty() {
                self.handles.remove(&event);
            }
        }
    }
}

impl Machine {
    /// As [`ready`](Self::ready), for bytes that are not there yet: the part is checked and counted now, and nothing of
    /// it is read before the event has happened. Events may be shared by calls. A restart voids what is withheld.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn ready_after(
        &mut self,
        now: Time,
        offer: HandleId,
        tokens: (u32, u32),
        layers: (u16, u16),
        event: EventId,
    ) -> Result<()> {
        let result = self.release_part(now, offer, tokens, layers, Some(event));
        self.settle(now);
        result
    }

    /// As [`finish`](Self::finish), and what it releases is withheld until the event has happened. What was released
    /// before keeps to its own event.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_after(&mut self, now: Time, offer: HandleId, token_end: u32, event: EventId) -> Result<()> {
        let result = self.finish_offer_input(now, offer, token_end, Some(event));
        self.settle(now);
        result
    }

    /// Says how an event went: what waits for it is sent, or ends with the error. Nothing does any more if it was
    /// restarted, cancelled or has ended.
    pub fn event_happened(&mut self, now: Time, event: EventId, result: &Result<()>) {
        self.on_event(now, event, result);
        self.settle(now);
    }

    /// Whether anything waits for the event.
    pub fn awaits(&self, event: EventId) -> bool {
        self.awaited.contains(event)
    }

    /// Keeps parts of an offer until the event has happened.
    pub(super) fn withhold_parts(&mut self, id: HandleId, event: EventId, parts: Vec<PartRange>) {
        if parts.is_empty() {
            return;
        }
        let Some(offer) = self.offers.get_mut(&id) else { return };
        offer.withheld.parts.entry(event).or_default().extend(parts);
        self.awaited.add(event, id);
    }

    /// Drops what is withheld of an offer: it restarts or ends, and its events come too late.
    pub(super) fn forget_withheld(&mut self, id: HandleId) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        for event in std::mem::take(&mut offer.withheld.parts).into_keys() {
            self.awaited.remove(event, id);
        }
    }

    /// What waited for the event goes on, or ends with its error.
    pub(super) fn on_event(&mut self, now: Time, event: EventId, result: &Result<()>) {
        for id in self.awaited.handles.remove(&event).unwrap_or_default() {
            if self.pushes.contains_key(&id) {
                self.push_event(now, id, result);
                continue;
            }
            let Some(offer) = self.offers.get_mut(&id) else {
                continue;
            };
            let Some(parts) = offer.withheld.parts.remove(&event) else {
                continue;
            };
            offer.since = now;
            match result {
                Ok(()) => self.give_parts(now, id, &parts),
                Err(error) => self.end_offer(now, id, failed(error)),
            }
        }
    }
}

/// The event that something waited for has failed: nothing was read of what it guards.
pub(super) fn failed(error: &Error) -> Error {
    // Of a handle `Unknown` would say that its bytes may have arrived.
    let kind = match error.kind() {
        ErrorKind::Unknown => ErrorKind::Transport,
        kind => kind,
    };
    Error::new(kind, "the event that the blocks waited for")
        .because(error.to_string())
        .remedy("look at what was queued before it; compute the blocks again")
}
