//! What the peer's end of a link says over the session.

use std::sync::Arc;

use kvxfer_core::flow::{Applied, ChunkHeader, MESSAGE_PART, PartExtent, Placement};
use kvxfer_core::{Error, Result};

use super::{LinkCore, Mail, RailPlace};
use crate::error::RdmaError;
use crate::message::{LinkMessage, RailHello, SlotUse};

/// Mail of one rail that its engine has not taken yet, at most: more means a peer that does not keep to the protocol.
const MAIL_MAX: usize = 65_536;

impl LinkCore {
    pub(super) fn take(self: &Arc<Self>, message: LinkMessage) -> Result<()> {
        let rail = match &message {
            LinkMessage::Connect(hello) => return self.connect_asked(hello.clone()),
            LinkMessage::Accept(hello) => hello.lane.index,
            LinkMessage::Reject { lane, .. }
            | LinkMessage::Ready { lane }
            | LinkMessage::Credits { lane, .. }
            | LinkMessage::LandingWanted { lane, .. }
            | LinkMessage::Landings { lane, .. }
            | LinkMessage::LandingsUnused { lane, .. }
            | LinkMessage::Expose { lane, .. }
            | LinkMessage::Exposed { lane, .. }
            | LinkMessage::NotExposed { lane, .. }
            | LinkMessage::ExposureDone { lane, .. }
            | LinkMessage::LaneDown { lane, .. } => lane.index,
            LinkMessage::Closing(closing) => closing.lane.index,
            LinkMessage::Admit(slot) => {
                self.admit_slot(*slot, true);
                return Ok(());
            }
            LinkMessage::Admitted(slot) => {
                self.begin_admitted(*slot)?;
                return Ok(());
            }
            LinkMessage::Refused(slot) => {
                self.refuse_slot(*slot);
                return Ok(());
            }
            LinkMessage::Revoke(slot) => {
                let waiting = {
                    // Together: a transfer is either refused here, or sees that the slot is being revoked.
                    let mut sender = self.sender.lock();
                    self.outbound.revoke(*slot);
                    sender.slot_refused(slot.slot, slot.generation);
                    self.outbound.refused(*slot)
                };
                self.refuse(waiting);
                self.confirm_revocations();
                self.kick_all();
                return Ok(());
            }
            LinkMessage::Revoked(slot) => {
                let news = self.inbound.confirmed(*slot);
                if news.map_err(|why| Error::from(RdmaError::peer(self, why.to_owned())))? {
                    self.flush_revoked(*slot);
                }
                return Ok(());
            }
            LinkMessage::Arrived(slot) => {
                self.outbound.slot_ended(*slot);
                self.sender.lock().slot_arrived(slot.slot, slot.generation);
                self.kick_those_with_work();
                return Ok(());
            }
            LinkMessage::UserMessage { slot, bytes } => return self.user_message(*slot, bytes),
        };
        let Some(rail) = self.rails.get(usize::from(rail)) else {
            return Err(RdmaError::peer(self, format!("rail {rail} does not exist")).into());
        };
        let mut mail = rail.mail.lock();
        if mail.len() >= MAIL_MAX {
            return Err(RdmaError::peer(
                self,
                format!("more than {MAIL_MAX} messages wait for rail {}", rail.index),
            )
            .into());
        }
        mail.push_back(Mail::Message(message));
        drop(mail);
        self.kick(rail);
        Ok(())
    }

    /// The dialer has made a queue pair for a lane: ours is made by the engine of the port that it names.
    pub(super) fn connect_asked(self: &Arc<Self>, hello: RailHello) -> Result<()> {
        if self.peer.dials {
            return Err(RdmaError::peer(self, "it dials rails, which is for this side to do".into()).into());
        }
        let Some(rail) = self.rails.get(usize::from(hello.lane.index)) else {
            self.tell(LinkMessage::Reject {
                lane: hello.lane,
                why: format!("this side has at most {} rails", self.rails.len()),
            });
            return Ok(());
        };
        let Some(engine) = self.transport.engine_of_port(hello.peer_port) else {
            self.tell(LinkMessage::Reject {
                lane: hello.lane,
                why: format!("port {} does not exist here", hello.peer_port),
            });
            return Ok(());
        };
        let place = RailPlace {
            engine,
            own_port: hello.peer_port,
            peer_port: hello.own_port,
        };
        if !self.attach(rail, place) {
            return Ok(());
        }
        rail.mail.lock().push_back(Mail::Message(LinkMessage::Connect(hello)));
        self.kick(rail);
        Ok(())
    }

    pub(super) fn user_message(&self, slot: SlotUse, bytes: &[u8]) -> Result<()> {
        let length = bytes.len() as u32;
        let header = ChunkHeader {
            slot: slot.slot,
            generation: slot.generation,
            part: MESSAGE_PART,
            extent: PartExtent {
                token_start: 0,
                token_end: length,
                layer_start: 0,
                layer_end: 0,
                states: false,
            },
            offset: 0,
            length,
            has_message: true,
            checksummed: false,
        };
        if let Placement::Message = self.slots.begin(self.peer.incarnation, &header)?
            && self.slots.message_applied(&header, bytes) == Applied::Arrived
        {
            self.slot_arrived(slot);
        }
        Ok(())
    }
}
