//! A link as callers have it: transfers to send, slots to admit and to revoke, and what the peer's end says.

use std::sync::Arc;

use kvxfer_core::flow::{ChunkName, ChunkState, LaneName, SendPart, SendSpec, TransferId};
use kvxfer_core::transport::{Link, Path};
use kvxfer_core::{Error, ErrorKind, Generation, Result, SlotId};

use super::{LinkCore, Mail};
use crate::clock;
use crate::engine::Task;
use crate::error::RdmaError;
use crate::message::{self, LinkMessage, SlotUse};
use crate::outbound::Entry;

/// The handle that [`Transport::connect`](kvxfer_core::transport::Transport::connect) gives out.
pub(crate) struct RdmaLink {
    pub(crate) core: Arc<LinkCore>,
}

impl Link for RdmaLink {
    fn submit(&self, spec: SendSpec) -> Result<()> {
        let core = &self.core;
        if core.closing() {
            return Err(RdmaError::Closed {
                peer: core.peer.incarnation,
            }
            .into());
        }
        let limit = core.config.transfers_max as usize;
        let Some(remote) = &spec.remote else {
            return Err(Error::new(ErrorKind::Internal, format!("transfer {}", spec.id.0))
                .at("rdma")
                .because("it does not say where its bytes go at the peer"));
        };
        let keys = core.outbound.resolve(remote, &spec.regions, &core.transport.registry)?;
        let id = spec.id;
        // The sender's lock comes first, always: whoever moves a transfer from one to the other holds both.
        let mut sender = core.sender.lock();
        match core.outbound.submit(spec, keys, limit)? {
            // A read goes into a slot of this side; a slot that is admitted needs no question.
            Entry::Now(spec) => {
                if let Err(error) = sender.submit(*spec) {
                    core.outbound.forget(id);
                    return Err(error);
                }
            }
            Entry::Ask(slot) => {
                drop(sender);
                core.tell(LinkMessage::Admit(slot));
                core.flush();
            }
            Entry::Wait => {}
        }
        Ok(())
    }

    fn add_part(&self, id: TransferId, part: SendPart) {
        let core = &self.core;
        if core.closing() {
            return;
        }
        let mut sender = core.sender.lock();
        if let Some(part) = core.outbound.add_part(id, part) {
            sender.add_part(id, part);
            drop(sender);
            core.kick_those_with_work();
        }
    }

    fn stop(&self, id: TransferId) {
        let core = &self.core;
        {
            let mut sender = core.sender.lock();
            core.outbound.withdraw(id);
            sender.stop(id);
        }
        // An engine reports: the caller may hold what a report would take.
        core.kick_all();
        core.engine(0).push(Task::Report(core.clone()));
    }

    fn forget(&self, id: TransferId) {
        let core = &self.core;
        {
            let mut sender = core.sender.lock();
            core.outbound.forget(id);
            sender.forget(id);
        }
        core.kick_those_with_work();
    }

    fn fence_lane(&self, lane: LaneName, chunks: Vec<ChunkName>) {
        let core = &self.core;
        let rail = core.rails.get(usize::from(lane.index));
        match rail.filter(|rail| rail.place.get().is_some()) {
            Some(rail) => {
                rail.mail.lock().push_back(Mail::Fence(lane, chunks));
                core.kick(rail);
            }
            // No such lane was ever made here: nothing of it was placed.
            None => core.engine(0).push(Task::AnswerFence(core.clone(), lane, chunks)),
        }
    }

    fn lane_fenced(&self, lane: LaneName, chunks: Vec<(ChunkName, ChunkState)>) {
        let core = &self.core;
        core.sender.lock().lane_fenced(lane, &chunks, clock::now());
        core.confirm_revocations();
        core.flush();
        core.kick_all();
        core.engine(0).push(Task::Report(core.clone()));
    }

    fn admit(&self, slot: SlotId, generation: Generation) {
        let core = &self.core;
        if core.closing() {
            return;
        }
        core.admit_slot(SlotUse { slot, generation }, false);
        core.flush();
    }

    fn revoke(&self, slot: SlotId, generation: Generation) {
        let core = &self.core;
        let slot = SlotUse { slot, generation };
        if core.inbound.revoke(slot, clock::now() + core.config.revoke) {
            core.tell(LinkMessage::Revoke(slot));
            core.flush();
            core.engine(0).push(Task::Watch(core.clone()));
        }
    }

    fn message(&self, body: Vec<u8>) {
        let core = &self.core;
        if core.closing() {
            return;
        }
        let taken = message::parse(&body).and_then(|messages| messages.into_iter().try_for_each(|one| core.take(one)));
        if let Err(error) = taken {
            core.fail(error);
        }
        core.flush();
        core.report();
    }

    fn close(&self) {
        self.core.begin_close();
    }

    fn path(&self) -> Path {
        let core = &self.core;
        Path {
            transport: "rdma".into(),
            rails: core.rails.iter().filter_map(|rail| rail.name.lock().clone()).collect(),
            rails_down: core.rails_down(),
            rails_configured: core.rails.iter().filter(|rail| rail.place.get().is_some()).count(),
            notes: core.transport.registry.notes(),
        }
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        // Whoever lets go of a link without closing it must not leave its queue pairs behind.
        self.close();
    }
}
