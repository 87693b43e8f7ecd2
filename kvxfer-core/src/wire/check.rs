//! The caps and the sense of what frames carry, checked after decoding and before encoding.
//!
//! Layouts check themselves when they are decoded; everything else is here.

use super::limits::*;
use super::{ClaimMessage, EndpointAddress, Frame, Grant, Hello, Message, PoolAdvert, Verdict};
use crate::error::Error;
use crate::flow::{ChunkName, MESSAGE_PART, PartExtent};
use crate::layout::Selection;
use crate::plan::{Scope, Target};

/// What is wrong, as a sentence.
pub(super) type Checked = Result<(), String>;

/// Something whose parts have caps.
pub(super) trait Check {
    fn check(&self) -> Checked;
}

impl Check for Frame {
    fn check(&self) -> Checked {
        match self {
            Frame::Hello(hello) => hello.check(),
            Frame::Refuse(error) => error.check(),
            Frame::Ready { .. } | Frame::Skipped => Ok(()),
            Frame::Message { sequence, message, .. } => {
                if *sequence == 0 && !matches!(**message, Message::Heartbeat) {
                    return Err("only a heartbeat has no number".into());
                }
                message.check()
            }
        }
    }
}

impl Check for Hello {
    fn check(&self) -> Checked {
        let (lowest, highest) = self.versions;
        if lowest == 0 || lowest > highest {
            return Err(format!("its versions {lowest} to {highest} are no range"));
        }
        at_most("its name's bytes", self.name.len(), NAME_BYTES_MAX)?;
        EndpointAddress::check(&self.address)?;
        at_most("its transports", self.transports.len(), TRANSPORTS_MAX)?;
        for (name, advert) in &self.transports {
            at_most("a transport's name's bytes", name.len(), TRANSPORT_NAME_BYTES_MAX)?;
            at_most("a transport's advert's bytes", advert.len(), ADVERT_BYTES_MAX)?;
        }
        at_most("its pools", self.pools.len(), POOLS_MAX)?;
        for (index, pool) in self.pools.iter().enumerate() {
            pool.check()?;
            if self.pools[..index].iter().any(|other| other.id == pool.id) {
                return Err(format!("it has pool {} twice", pool.id));
            }
        }
        if self.liveness_ms == 0 || self.liveness_ms > LIVENESS_MS_MAX {
            return Err(format!(
                "its liveness of {} ms is not between 1 and {LIVENESS_MS_MAX}",
                self.liveness_ms
            ));
        }
        Ok(())
    }
}

impl Check for PoolAdvert {
    fn check(&self) -> Checked {
        at_most("its pool's transports", self.keys.len(), TRANSPORTS_MAX)?;
        for (name, keys) in &self.keys {
            at_most("a transport's name's bytes", name.len(), TRANSPORT_NAME_BYTES_MAX)?;
            at_most("a pool's keys' bytes", keys.len(), POOL_KEYS_BYTES_MAX)?;
        }
        Ok(())
    }
}

impl Check for Message {
    fn check(&self) -> Checked {
        match self {
            Message::PoolAdded(pool) => pool.check(),
            Message::Heartbeat
            | Message::PoolRemoved(_)
            | Message::Matched { .. }
            | Message::ClaimNothing { .. }
            | Message::ClaimEndedAck { .. }
            | Message::Restarted { .. }
            | Message::Validate { .. }
            | Message::Validated { .. }
            | Message::Ask { .. }
            | Message::ReadDirect { .. }
            | Message::Draining
            | Message::Goodbye => Ok(()),
            Message::Claim(claim) => claim.check(),
            Message::ClaimRefused { error, .. }
            | Message::SourceEnded { error, .. }
            | Message::ReadRefused { error, .. }
            | Message::GrantEnded { error, .. } => error.check(),
            Message::ClaimGrant { grant, .. } | Message::ClaimPull { grant, .. } => grant.check(),
            Message::Read { into, .. } => into.check(),
            Message::ClaimEnded { verdict, .. } | Message::Verdict { verdict, .. } => verdict.check(),
            Message::PartReady {
                part, extent, source, ..
            } => {
                part_number(*part)?;
                source.iter().try_for_each(Target::check_caps)?;
                extent.check()
            }
            Message::Link { transport, body } => {
                at_most(
                    "its transport's name's bytes",
                    transport.len(),
                    TRANSPORT_NAME_BYTES_MAX,
                )?;
                at_most("its body's bytes", body.len(), LINK_MESSAGE_BYTES_MAX)
            }
            Message::TransportFailed { transport, error } => {
                at_most(
                    "its transport's name's bytes",
                    transport.len(),
                    TRANSPORT_NAME_BYTES_MAX,
                )?;
                error.check()
            }
            Message::ReadPart { part, .. } => part_number(*part),
            Message::VerdictAck { grants } => at_most("its grants", grants.len(), VERDICTS_MAX),
            Message::FenceLane { chunks, .. } => {
                at_most("its chunks", chunks.len(), FENCE_CHUNKS_MAX)?;
                chunks.iter().try_for_each(Check::check)
            }
            Message::LaneFenced { chunks, .. } => {
                at_most("its chunks", chunks.len(), FENCE_CHUNKS_MAX)?;
                chunks.iter().try_for_each(|(chunk, _)| chunk.check())
            }
        }
    }
}

impl Check for ClaimMessage {
    fn check(&self) -> Checked {
        at_most("its key's bytes", self.key.len(), KEY_BYTES_MAX)?;
        if self.key.is_empty() {
            return Err("its key is empty".into());
        }
        if self.member >= self.members {
            return Err(format!("it is member {} of {}", self.member, self.members));
        }
        Ok(())
    }
}

impl Check for Grant {
    fn check(&self) -> Checked {
        EndpointAddress::check(&self.address)?;
        if self.address.incarnation != Some(self.name.incarnation) {
            return Err("its address is not its owner's".into());
        }
        self.target.check_caps()
    }
}

impl Target {
    fn check_caps(&self) -> Checked {
        match self {
            Target::Selection { selection, scope } => {
                selection.check()?;
                Check::check(scope)
            }
            Target::Descriptors(descriptors) => at_most("its descriptors", descriptors.len(), DESCRIPTORS_MAX),
        }
    }
}

impl Check for Selection {
    fn check(&self) -> Checked {
        at_most("its cache groups", self.groups.len(), GROUPS_MAX)?;
        for group in &self.groups {
            at_most("its blocks", group.blocks.len(), BLOCKS_MAX)?;
            if group.first_token > group.token_end {
                return Err(format!(
                    "its tokens {} to {} end before they begin",
                    group.first_token, group.token_end
                ));
            }
        }
        Ok(())
    }
}

impl Check for Scope {
    fn check(&self) -> Checked {
        at_most("its layers", self.layers.len(), LAYERS_MAX)?;
        if !self.layers.is_sorted_by(|before, after| before < after) {
            return Err("its layers do not ascend".into());
        }
        let heads = self.heads.as_deref().unwrap_or_default();
        at_most("its head ranges", heads.len(), GROUPS_MAX)?;
        match heads.iter().find(|range| range.start > range.end) {
            Some(range) => Err(format!("its heads {} to {} are no range", range.start, range.end)),
            None => Ok(()),
        }
    }
}

impl Check for Verdict {
    fn check(&self) -> Checked {
        match self {
            Verdict::Failed(error) => error.check(),
            Verdict::Arrived | Verdict::Unknown => Ok(()),
        }
    }
}

impl Check for Error {
    fn check(&self) -> Checked {
        at_most("its error's bytes", self.to_string().len(), ERROR_BYTES_MAX)
    }
}

impl Check for PartExtent {
    fn check(&self) -> Checked {
        if self.token_start > self.token_end || self.layer_start > self.layer_end {
            return Err(format!("its extent {self:?} ends before it begins"));
        }
        Ok(())
    }
}

impl Check for ChunkName {
    fn check(&self) -> Checked {
        if self.length > crate::flow::CHUNK_BYTES_MAX || self.offset.checked_add(u64::from(self.length)).is_none() {
            return Err(format!("{} bytes at {} are no chunk", self.length, self.offset));
        }
        Ok(())
    }
}

fn part_number(part: u32) -> Checked {
    if part == MESSAGE_PART {
        return Err(format!("{part} is no part's number"));
    }
    Ok(())
}

fn at_most(what: &str, count: usize, most: usize) -> Checked {
    if count > most {
        return Err(format!("{what} are {count}, at most {most}"));
    }
    Ok(())
}
