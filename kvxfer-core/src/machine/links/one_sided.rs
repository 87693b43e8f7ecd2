//! What links need that reach the peer's memory themselves: who may write into which slot, where the other side's bytes
//! are, and a way for the two ends to talk.

use super::*;
use crate::flow::Remote;

impl Machine {
    /// The link to this peer, if there is one that is not being closed and reaches memory by itself.
    fn one_sided_link(&self, incarnation: Incarnation) -> bool {
        self.links
            .get(&incarnation)
            .is_some_and(|link| link.one_sided && !link.closing)
    }

    /// How long the fence of what these peers may touch may take: their devices are fenced within the bound for
    /// liveness.
    pub(in crate::machine) fn fence_limit(&self, peers: impl IntoIterator<Item = Incarnation>) -> std::time::Duration {
        let one_sided = |peer| self.links.get(&peer).is_some_and(|link| link.one_sided);
        if peers.into_iter().any(one_sided) {
            self.config.fence_limit.max(self.config.liveness)
        } else {
            self.config.fence_limit
        }
    }

    // ------------------------------------------------------------------------------------------------ slots

    /// A slot was opened for this writer: its device may write into it, if it has one that can.
    pub(in crate::machine) fn admit_slot(&mut self, writer: Incarnation, slot: super::super::SlotKey) {
        if self.one_sided_link(writer) {
            self.actions.push_back(Action::Link {
                peer: writer,
                command: LinkCommand::Admit(slot.0, slot.1),
            });
        }
    }

    /// A slot was closed before it arrived: its writer's device is told to stop.
    pub(in crate::machine) fn revoke_slot(&mut self, writer: Incarnation, slot: super::super::SlotKey) {
        if self.one_sided_link(writer) && !mutants::is(Mutant::ForgetRevoke) {
            self.actions.push_back(Action::Link {
                peer: writer,
                command: LinkCommand::Revoke(slot.0, slot.1),
            });
        }
    }

    /// The slots open for this writer, on a new link.
    pub(super) fn admit_open_slots(&mut self, writer: Incarnation) {
        for slot in self.slots_written_by(writer) {
            self.admit_slot(writer, slot);
        }
    }

    /// The link to this peer has closed: its device writes into none of our slots any more.
    pub(super) fn slots_quiet(&mut self, writer: Incarnation) {
        for (slot, _) in self.slot_uses.iter().filter(|(_, used)| used.verdict.is_none()) {
            let progress = self.slots.progress(slot.0, slot.1);
            if progress.is_some_and(|progress| progress.admitted && progress.writer == Some(writer)) {
                self.slots.remote_quiet(slot.0, slot.1);
            }
        }
    }

    // --------------------------------------------------------------------------------------- the other side

    /// What a one-sided link needs to know of the other side's pool.
    pub(super) fn remote_for_link(&self, id: TransferId) -> Result<Option<Remote>> {
        let Some(transfer) = self.link_transfers.get(&id) else {
            return Ok(None);
        };
        let Some(link) = self.links.get(&transfer.peer).filter(|link| link.one_sided) else {
            return Ok(None);
        };
        let side = &transfer.remote;
        let owner = self.peers.get(&transfer.peer);
        let pool = owner.and_then(|owner| owner.pools.get(&side.pool));
        let Some(keys) = pool.and_then(|pool| pool.keys_of(&link.transport)) else {
            return Err(Error::new(
                ErrorKind::NotRegistered,
                format!("pool {} of endpoint {}", side.pool, transfer.peer),
            )
            .because(if pool.is_some() {
                format!("its owner has not registered it with {}", link.transport)
            } else {
                "its owner has closed it".to_string()
            })
            .remedy("register the pool at its owner's with the transport in use, or name another transport first"));
        };
        Ok(Some(Remote {
            direction: transfer.owner.direction(),
            pool: side.pool,
            keys,
        }))
    }

    /// The part, with the other side's segments if the link needs them.
    pub(super) fn part_for_link(&self, id: TransferId, mut part: SendPart) -> Result<SendPart> {
        let Some(transfer) = self.link_transfers.get(&id) else {
            return Ok(part);
        };
        if self.links.get(&transfer.peer).is_some_and(|link| link.one_sided)
            && let Some((layout, blocks)) = &transfer.remote.written
        {
            part.remote = Some(blocks.stream(layout, part.extent)?);
        }
        Ok(part)
    }

    /// What was to be read by this endpoint's device is on a link that cannot: the peer is asked to send it.
    pub(super) fn ask_instead_of_reading(&mut self, now: Time, id: TransferId) {
        let Some(transfer) = self.link_transfers.get(&id) else {
            return;
        };
        let parts: Vec<u32> = transfer.parts.iter().map(|part| part.part).collect();
        let owner = transfer.owner;
        self.transfer_is_over(now, id);
        match owner {
            TransferOwner::ClaimRead(handle, source) => {
                self.claim_read_over(handle, source, id);
                self.ask_for_parts(now, handle, source, &parts);
            }
            TransferOwner::PullRead(handle) => {
                self.pull_read_over(handle);
                self.ask_for_pull(now, handle);
            }
            TransferOwner::Member(..) | TransferOwner::Push(_) | TransferOwner::Serve(_) => {}
        }
    }

    // ------------------------------------------------------------------------------------------ its two ends

    /// This end of the link has something to say to the other.
    pub(super) fn tell_other_end(&mut self, now: Time, incarnation: Incarnation, body: Vec<u8>) {
        let Some(link) = self.links.get(&incarnation).filter(|link| !link.closing) else {
            return;
        };
        let transport = link.transport.clone();
        self.send(now, incarnation, Message::Link { transport, body });
    }

    /// The other end says something. What comes before this end is there is kept for it.
    pub(in crate::machine) fn link_message(
        &mut self,
        incarnation: Incarnation,
        transport: String,
        body: Vec<u8>,
    ) -> Result<()> {
        if self.speaks_of_an_earlier_link(incarnation) {
            return Ok(());
        }
        if let Some(link) = self.links.get(&incarnation).filter(|link| !link.closing) {
            if link.transport == transport {
                self.actions.push_back(Action::Link {
                    peer: incarnation,
                    command: LinkCommand::Message(body),
                });
            }
            return Ok(());
        }
        let Some(peer) = self.peers.get_mut(&incarnation) else {
            return Ok(());
        };
        if peer.pending_messages.len() >= MESSAGES_PENDING_MAX {
            return Err(Error::new(ErrorKind::Protocol, "messages of a link").because("too many are pending"));
        }
        if self.transports.iter().any(|own| own.name == transport) {
            peer.pending_messages.push((transport, body));
        }
        Ok(())
    }
}

impl TransferOwner {
    pub(super) fn direction(self) -> Direction {
        match self {
            TransferOwner::Member(..) | TransferOwner::Push(_) | TransferOwner::Serve(_) => Direction::Write,
            TransferOwner::ClaimRead(..) | TransferOwner::PullRead(_) => Direction::Read,
        }
    }
}

/// Messages of a link's other end kept while this one is being made, at most.
const MESSAGES_PENDING_MAX: usize = 1024;
