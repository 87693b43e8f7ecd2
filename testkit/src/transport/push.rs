//! Transfers, as the control plane would ask a link for them.

use std::sync::Arc;

use kvxfer_core::flow::{ByteStream, Direction, Gate, PartExtent, Remote, SendPart, SendSpec, TransferId};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::Link;
use kvxfer_core::{Generation, PoolId, SlotId};

/// A transfer of one part, to submit.
pub struct Push {
    /// Its number.
    pub id: TransferId,
    /// The gate of this side's blocks.
    pub gate: Arc<Gate>,
    /// What the link is asked for.
    pub spec: SendSpec,
    /// All of its bytes.
    pub part: SendPart,
}

/// A transfer that was begun.
pub struct Sent {
    /// Its number.
    pub id: TransferId,
    /// The gate of this side's blocks.
    pub gate: Arc<Gate>,
}

impl Push {
    /// Of a stream of this side's regions, into a slot: without a message, a deadline, checksums or a remote side.
    pub fn new(id: u64, slot: (SlotId, Generation), regions: &Arc<[Arc<Region>]>, stream: Arc<dyn ByteStream>) -> Push {
        let spec = SendSpec {
            id: TransferId(id),
            slot: slot.0,
            generation: slot.1,
            gate: Gate::new(),
            regions: regions.clone(),
            message: None,
            priority: 0,
            deadline: None,
            checksum: false,
            remote: None,
        };
        Push {
            id: spec.id,
            gate: spec.gate.clone(),
            spec,
            part: SendPart {
                part: 0,
                extent: PartExtent::WHOLE,
                stream,
                remote: None,
            },
        }
    }

    /// One-sidedly: this side's device writes the peer's memory, or reads it, at this stream's places.
    pub fn one_sided(mut self, direction: Direction, keys: Arc<[u8]>, stream: Arc<dyn ByteStream>) -> Push {
        self.spec.remote = Some(Remote {
            direction,
            pool: PoolId(0),
            keys,
        });
        self.part.remote = Some(stream);
        self
    }

    /// With a message.
    pub fn message(mut self, message: &[u8]) -> Push {
        self.spec.message = Some(message.into());
        self
    }

    /// With checksums.
    pub fn checksum(mut self) -> Push {
        self.spec.checksum = true;
        self
    }

    /// Starts it.
    pub fn submit(self, link: &Arc<dyn Link>) -> Sent {
        link.submit(self.spec).unwrap();
        link.add_part(self.id, self.part);
        Sent {
            id: self.id,
            gate: self.gate,
        }
    }
}
