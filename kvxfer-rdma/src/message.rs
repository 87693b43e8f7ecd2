//! What the two ends of a link say to each other. The session carries it, in order, each message once.
//!
//! A body is a version byte and a list of messages in postcard form. Parsing is total and bounded: a body has at most
//! [`LINK_MESSAGE_BYTES_MAX`] bytes.

use kvxfer_core::flow::{CHUNK_BYTES_MAX, ChunkHeader, LaneName, MESSAGE_BYTES_MAX, PartExtent};
use kvxfer_core::wire::limits::LINK_MESSAGE_BYTES_MAX;
use kvxfer_core::{Error, ErrorKind, Generation, Result, SlotId};
use serde::{Deserialize, Serialize};

/// Version of the bodies. Another one is refused: both ends of a session speak the same.
const VERSION: u8 = 2;
/// Chunks of one close, at most.
pub(crate) const CLOSE_CHUNKS_MAX: usize = 64;
/// Pieces of one exposure, at most: what fits into one message.
pub(crate) const PIECES_MAX: usize = 4096;
/// Landings asked for, given or given back in one message, at most.
pub(crate) const LANDINGS_MAX: usize = 4096;
/// Text that a peer may send as a reason, in bytes; the rest is cut off when sending.
const REASON_BYTES_MAX: usize = 512;

/// A use of a slot of the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct SlotUse {
    pub(crate) slot: SlotId,
    pub(crate) generation: Generation,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LinkMessage {
    /// Dialer to acceptor: a queue pair for this lane is here; make yours.
    Connect(RailHello),
    /// Acceptor to dialer: it is made and ready to receive.
    Accept(RailHello),
    /// Either: the lane will not come up. The dialer tries again later.
    Reject { lane: LaneName, why: String },
    /// A write over the lane has been completed: it works in this direction.
    Ready { lane: LaneName },
    /// Sender to receiver: may I write into this slot?
    Admit(SlotUse),
    /// Receiver to sender: you may. Also unasked.
    Admitted(SlotUse),
    /// Receiver to sender: the slot is closed, gone, or another peer's.
    Refused(SlotUse),
    /// Receiver to sender: the slot is closed. Stop writing, and say when nothing is under way any more.
    Revoke(SlotUse),
    /// Sender to receiver: nothing of that slot is under way on any lane, and nothing will be.
    Revoked(SlotUse),
    /// Sender to receiver: what a close covers.
    Closing(Closing),
    /// Receiver to sender: so many more immediates may be sent on that lane.
    Credits { lane: LaneName, count: u32 },
    /// Receiver to sender: the slot has arrived.
    Arrived(SlotUse),
    /// Sender to receiver: the user message of the transfer into that slot.
    UserMessage { slot: SlotUse, bytes: Vec<u8> },
    /// Sender to receiver: I have so many more chunks for pools of yours that no device was given.
    LandingWanted { lane: LaneName, count: u32 },
    /// Receiver to sender: write such chunks here over that lane, each landing for one chunk, and name it in the close.
    Landings { lane: LaneName, landings: Vec<Landing> },
    /// Sender to receiver: these will not be closed, and nothing of mine is on its way to them any more.
    LandingsUnused { lane: LaneName, landings: Vec<u32> },
    /// Reader to owner: copy these pieces of pools that serve, densely, to where I can read them over that lane.
    Expose {
        lane: LaneName,
        number: u32,
        pieces: Vec<Piece>,
    },
    /// Owner to reader: they are there.
    Exposed { lane: LaneName, exposure: Landing },
    /// Owner to reader: they cannot be had.
    NotExposed { lane: LaneName, number: u32, why: String },
    /// Reader to owner: it is read, or not wanted any more, and no read of it is under way.
    ExposureDone { lane: LaneName, number: u32 },
    /// Either: a lane is lost here.
    LaneDown { lane: LaneName, why: String },
}

/// Memory of the receiver's that the sender may write one chunk to, densely and in stream order; or of an owner's that a
/// reader may read one from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Landing {
    /// Its number on its lane: never used again there.
    pub(crate) number: u32,
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// A run of a region of the owner's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Piece {
    /// The registration's number.
    pub(crate) region: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

/// One end of a lane, as the other end needs to know it to connect its queue pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RailHello {
    pub(crate) lane: LaneName,
    /// The speaker's port, as an index in its advert.
    pub(crate) own_port: u16,
    /// The other side's port, as an index in that side's advert.
    pub(crate) peer_port: u16,
    pub(crate) queue_pair: u32,
    pub(crate) packet_sequence: u32,
    pub(crate) lid: u16,
    pub(crate) gid: Option<[u8; 16]>,
    /// Path MTU in bytes that the speaker's port can do.
    pub(crate) mtu_bytes: u32,
    /// Reads that the speaker can serve at once.
    pub(crate) reads_served: u8,
    /// Reads that the speaker would start at once.
    pub(crate) reads_started: u8,
    /// Receives that are posted before the lane is ready: the other side's first credits.
    pub(crate) receives: u32,
    /// Where the other side may write to find out whether the lane works.
    pub(crate) probe_address: u64,
    pub(crate) probe_key: u32,
}

/// What was closed: which chunks are in place once it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Closing {
    pub(crate) lane: LaneName,
    pub(crate) slot: SlotUse,
    /// The close's number on its lane, modulo 256.
    pub(crate) close: u8,
    /// No immediate comes: the writes are complete already, and this message closes them.
    pub(crate) over_session: bool,
    /// The transfer has a user message.
    pub(crate) has_message: bool,
    /// CRC64-NVME of the chunks' bytes, in this order.
    pub(crate) checksum: Option<u64>,
    pub(crate) chunks: Vec<ClosedChunk>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClosedChunk {
    pub(crate) part: u32,
    pub(crate) extent: PartExtent,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// Its bytes are not in place, but in this landing.
    pub(crate) landing: Option<u32>,
}

impl SlotUse {
    pub(crate) const fn of(header: &ChunkHeader) -> SlotUse {
        SlotUse {
            slot: header.slot,
            generation: header.generation,
        }
    }

    /// Whether an immediate can name the slot.
    pub(crate) const fn fits_immediate(self) -> bool {
        self.slot.0 <= 0xffff
    }

    /// The immediate of a close of this slot: 16 bits slot, 8 bits generation, 8 bits close.
    pub(crate) const fn immediate(self, close: u8) -> u32 {
        (self.slot.0 & 0xffff) << 16 | (self.generation.0 & 0xff) << 8 | close as u32
    }
}

impl Closing {
    /// The immediate that belongs to it.
    pub(crate) const fn immediate(&self) -> u32 {
        self.slot.immediate(self.close)
    }

    /// Whether some of its bytes are still to be copied into their blocks.
    pub(crate) fn has_landings(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.landing.is_some())
    }

    pub(crate) fn headers(&self) -> impl Iterator<Item = ChunkHeader> + '_ {
        self.chunks.iter().map(|chunk| ChunkHeader {
            slot: self.slot.slot,
            generation: self.slot.generation,
            part: chunk.part,
            extent: chunk.extent,
            offset: chunk.offset,
            length: chunk.length,
            has_message: self.has_message,
            checksummed: self.checksum.is_some(),
        })
    }
}

/// A reason, cut to what is sent.
pub(crate) fn reason(why: impl Into<String>) -> String {
    let mut why = why.into();
    if why.len() > REASON_BYTES_MAX {
        let mut end = REASON_BYTES_MAX;
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        why.truncate(end);
    }
    why
}

/// Messages on their way into bodies.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    messages: Vec<LinkMessage>,
}

impl Outbox {
    pub(crate) fn push(&mut self, message: LinkMessage) {
        self.messages.push(message);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Takes everything out, in order, as bodies that keep the cap.
    pub(crate) fn bodies(&mut self) -> Vec<Vec<u8>> {
        let mut bodies = Vec::new();
        let mut body = vec![VERSION];
        for message in self.messages.drain(..) {
            let start = body.len();
            body = match postcard::to_extend(&message, body) {
                Ok(body) => body,
                Err(error) => {
                    // A message of ours is plain data; there is nothing in it that could fail.
                    tracing::error!(%error, "a link message could not be encoded");
                    vec![VERSION]
                }
            };
            if body.len() > LINK_MESSAGE_BYTES_MAX && start > 1 {
                let mut next = vec![VERSION];
                next.extend(body.drain(start..));
                bodies.push(std::mem::replace(&mut body, next));
            }
        }
        if body.len() > 1 {
            bodies.push(body);
        }
        bodies
    }
}

/// The messages of a body.
///
/// # Errors
/// `Protocol` for anything that no kvxfer of this version says.
pub(crate) fn parse(body: &[u8]) -> Result<Vec<LinkMessage>> {
    let bad = |why: String| {
        Error::new(ErrorKind::Protocol, "a link message")
            .at("rdma")
            .because(why)
            .remedy("run the same version of kvxfer on both sides")
    };
    let Some((&version, mut rest)) = body.split_first() else {
        return Err(bad("it is empty".into()));
    };
    if version != VERSION {
        return Err(bad(format!("its version is {version}, this side speaks {VERSION}")));
    }
    let mut messages = Vec::new();
    while !rest.is_empty() {
        let (message, left) = postcard::take_from_bytes(rest).map_err(|error| bad(error.to_string()))?;
        check(&message).map_err(bad)?;
        messages.push(message);
        rest = left;
    }
    Ok(messages)
}

fn check(message: &LinkMessage) -> std::result::Result<(), String> {
    match message {
        LinkMessage::Closing(closing) => {
            if closing.chunks.len() > CLOSE_CHUNKS_MAX {
                return Err(format!("{} chunks in a close", closing.chunks.len()));
            }
            match closing.chunks.iter().find(|chunk| chunk.length > CHUNK_BYTES_MAX) {
                Some(chunk) => Err(format!("a chunk of {} bytes", chunk.length)),
                None => Ok(()),
            }
        }
        LinkMessage::LandingWanted { count, .. } if *count as usize > LANDINGS_MAX => {
            Err(format!("{count} landings wanted at once"))
        }
        LinkMessage::Landings { landings, .. } if landings.len() > LANDINGS_MAX => {
            Err(format!("{} landings at once", landings.len()))
        }
        LinkMessage::Expose { pieces, .. } => {
            let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.length)).sum();
            match pieces.len() > PIECES_MAX || bytes > u64::from(CHUNK_BYTES_MAX) || bytes == 0 {
                true => Err(format!("{} pieces of {bytes} bytes to be exposed", pieces.len())),
                false => Ok(()),
            }
        }
        LinkMessage::LandingsUnused { landings, .. } if landings.len() > LANDINGS_MAX => {
            Err(format!("{} landings given back at once", landings.len()))
        }
        LinkMessage::UserMessage { bytes, .. } if bytes.len() > MESSAGE_BYTES_MAX => {
            Err(format!("a user message of {} bytes", bytes.len()))
        }
        LinkMessage::Connect(hello) | LinkMessage::Accept(hello) => {
            if hello.queue_pair > 0xff_ffff || hello.packet_sequence > 0xff_ffff {
                return Err("a queue pair or packet sequence number over 24 bits".into());
            }
            if hello.receives > 127 {
                return Err(format!("{} receives, at most 127 keep closes apart", hello.receives));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(slot: u32, generation: u32) -> SlotUse {
        SlotUse {
            slot: SlotId(slot),
            generation: Generation(generation),
        }
    }

    fn closing(chunks: usize) -> LinkMessage {
        LinkMessage::Closing(Closing {
            lane: LaneName { index: 1, epoch: 7 },
            slot: slot(3, 4),
            close: 9,
            over_session: false,
            has_message: true,
            checksum: Some(1),
            chunks: vec![
                ClosedChunk {
                    part: 2,
                    extent: PartExtent::WHOLE,
                    offset: 1 << 40,
                    length: 1 << 20,
                    landing: Some(u32::MAX),
                };
                chunks
            ],
        })
    }

    #[test]
    fn what_is_said_is_heard_in_order() {
        let said = vec![
            LinkMessage::Admit(slot(1, 2)),
            closing(CLOSE_CHUNKS_MAX),
            LinkMessage::UserMessage {
                slot: slot(0, 1),
                bytes: vec![7; MESSAGE_BYTES_MAX],
            },
            LinkMessage::UserMessage {
                slot: slot(0, 2),
                bytes: vec![8; MESSAGE_BYTES_MAX],
            },
            LinkMessage::Ready {
                lane: LaneName { index: 0, epoch: 1 },
            },
        ];
        let mut outbox = Outbox::default();
        said.iter().cloned().for_each(|message| outbox.push(message));
        let bodies = outbox.bodies();
        assert!(outbox.is_empty() && bodies.len() == 2, "{}", bodies.len());
        assert!(bodies.iter().all(|body| body.len() <= LINK_MESSAGE_BYTES_MAX));
        let heard: Vec<_> = bodies.iter().flat_map(|body| parse(body).unwrap()).collect();
        assert_eq!(heard, said);
    }

    #[test]
    fn nonsense_is_refused() {
        let encode = |message: LinkMessage| {
            let mut outbox = Outbox::default();
            outbox.push(message);
            outbox.bodies().remove(0)
        };
        assert!(parse(&[]).is_err());
        assert!(parse(&[VERSION + 1]).is_err());
        assert!(parse(&[VERSION, 200]).is_err());
        assert!(parse(&encode(closing(CLOSE_CHUNKS_MAX + 1))).is_err());
        let good = encode(closing(3));
        for end in 2..good.len() {
            assert!(parse(&good[..end]).is_err(), "{end}");
        }
    }

    proptest::proptest! {
        /// Whatever comes is refused or understood; what is understood would have been said with the same meaning.
        #[test]
        fn any_bytes_are_parsed_or_refused(
            mut bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300),
            versioned in proptest::prelude::any::<bool>(),
        ) {
            if versioned && !bytes.is_empty() {
                bytes[0] = VERSION;
            }
            if let Ok(messages) = parse(&bytes) {
                let mut outbox = Outbox::default();
                messages.iter().cloned().for_each(|message| outbox.push(message));
                let again: Vec<_> = outbox.bodies().iter().flat_map(|body| parse(body).unwrap()).collect();
                proptest::prop_assert_eq!(again, messages);
            }
        }

        /// A byte of a good body changed: still no panic, and never more than was sent.
        #[test]
        fn changed_bodies_are_parsed_or_refused(chunks in 0usize..CLOSE_CHUNKS_MAX, at in 1usize..5000, byte: u8) {
            let mut outbox = Outbox::default();
            outbox.push(closing(chunks));
            outbox.push(LinkMessage::LaneDown { lane: LaneName { index: 1, epoch: 7 }, why: "why".into() });
            let mut body = outbox.bodies().remove(0);
            let at = at % body.len();
            body[at] = byte;
            if let Ok(messages) = parse(&body) {
                proptest::prop_assert!(messages.len() <= body.len());
            }
        }
    }

    #[test]
    fn immediates_tell_closes_apart() {
        assert_eq!(slot(0xabcd, 0x1ef).immediate(0x23), 0xabcd_ef23);
        assert!(slot(0xffff, 1).fits_immediate() && !slot(0x1_0000, 1).fits_immediate());
    }

    #[test]
    fn reasons_are_cut_between_characters() {
        let long = reason("é".repeat(400));
        assert!(long.len() <= REASON_BYTES_MAX && long.chars().all(|c| c == 'é'));
    }
}
