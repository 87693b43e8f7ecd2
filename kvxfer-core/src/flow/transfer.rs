//! One transfer on the sending side: what is still to be cut into chunks, what is to be sent again, what is out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::{
    ByteStream, Chunk, ChunkHeader, ChunkName, ChunkState, Direction, MESSAGE_PART, PartExtent, Payload, SendPart,
    SendSpec,
};
use crate::mutants::{self, Mutant};
use crate::time::Time;

/// A part is cut into smaller chunks so that all lanes get some of it, but not into smaller ones than this: 256 KiB.
const SHARE_BYTES_MIN: u64 = 256 << 10;
/// Chunks begin at multiples of this in a part's stream: 4 KiB.
const CUT_ALIGNMENT: u64 = 4 << 10;

/// A transfer.
pub(super) struct Transfer {
    pub(super) spec: SendSpec,
    /// The order of submission.
    pub(super) sequence: u64,
    /// The turn it has in its class, if any.
    pub(super) turn: Option<u64>,
    /// Bytes it may still send in this turn.
    pub(super) deficit: u64,
    /// Whether it has one of the link's places.
    pub(super) active: bool,
    /// Whether it waits for one.
    pub(super) queued: bool,
    /// Chunks on lanes that are up.
    pub(super) outstanding: u32,
    /// Chunks that were on lanes that are lost.
    pub(super) in_doubt: u32,
    /// `Arrived` or `Refused` has been reported.
    pub(super) ended: bool,
    /// [`LinkSender::stop`](super::LinkSender::stop) was called.
    pub(super) stopping: bool,
    // Its deadline has passed, its gate is closed or its memory has failed: it waits to be stopped.
    halted: bool,
    // Something was sent since the last `Drained`.
    undrained: bool,
    message_due: bool,
    resend: VecDeque<ChunkName>,
    // Parts that are not wholly cut yet, in the order in which they came.
    uncut: VecDeque<u32>,
    parts: HashMap<u32, PartState>,
}

struct PartState {
    extent: PartExtent,
    stream: Arc<dyn ByteStream>,
    remote: Option<Arc<dyn ByteStream>>,
    length: u64,
    cut: u64,
    // An empty part is one empty chunk.
    empty_due: bool,
    // Chunks cut and not yet known to be applied.
    unapplied: u32,
}

impl Transfer {
    pub(super) fn new(spec: SendSpec, sequence: u64) -> Transfer {
        Transfer {
            message_due: spec.message.is_some(),
            spec,
            sequence,
            turn: None,
            deficit: 0,
            active: false,
            queued: false,
            outstanding: 0,
            in_doubt: 0,
            ended: false,
            stopping: false,
            halted: false,
            undrained: false,
            resend: VecDeque::new(),
            uncut: VecDeque::new(),
            parts: HashMap::new(),
        }
    }

    pub(super) fn add_part(&mut self, part: SendPart) {
        if !self.is_open() || self.parts.contains_key(&part.part) {
            return;
        }
        let length = part.stream.length();
        // Only a grant of no bytes at all needs an empty chunk, to arrive by.
        let empty_due = length == 0 && part.extent == PartExtent::WHOLE;
        if length == 0 && !empty_due {
            return;
        }
        self.uncut.push_back(part.part);
        self.parts.insert(
            part.part,
            PartState {
                extent: part.extent,
                stream: part.stream,
                remote: part.remote,
                length,
                cut: 0,
                empty_due,
                unapplied: 0,
            },
        );
    }

    /// Whether its chunks are read into a slot of this endpoint, instead of written into the peer's.
    pub(super) fn is_read(&self) -> bool {
        self.spec
            .remote
            .as_ref()
            .is_some_and(|remote| remote.direction == Direction::Read)
    }

    /// Whether it takes new work: not ended, not stopped, not past its deadline.
    pub(super) fn is_open(&self) -> bool {
        !self.ended && !self.stopping && !self.halted
    }

    /// Whether a chunk could be sent.
    pub(super) fn has_work(&self) -> bool {
        self.is_open() && (self.message_due || !self.resend.is_empty() || !self.uncut.is_empty())
    }

    /// Looks whether chunks may still be started; if not, none ever will.
    pub(super) fn may_start(&mut self, now: Time) -> bool {
        let late = self.spec.deadline.is_some_and(|deadline| deadline <= now);
        if late || self.spec.gate.is_closed() {
            self.halted = true;
        }
        self.is_open()
    }

    /// Starts nothing more.
    pub(super) fn halt(&mut self) {
        self.halted = true;
        self.drop_work();
    }

    /// Its place among its class in a round: earliest deadline first, then first come.
    pub(super) fn urgency(&self) -> (u64, u64) {
        let deadline = self.spec.deadline.map_or(u64::MAX, Time::as_nanos);
        (deadline, self.sequence)
    }

    /// Bytes of the next chunk, if the transfer has work.
    pub(super) fn next_length(&self, lanes_up: u64, chunk_bytes_max: u32) -> u32 {
        if self.message_due {
            return self.message_length();
        }
        if let Some(chunk) = self.resend.front() {
            return chunk.length;
        }
        let part = self.uncut.front().and_then(|part| self.parts.get(part));
        part.map_or(0, |part| {
            let rest = part.length - part.cut;
            // A share of the rest for each lane, so that they end together; a whole chunk while there is plenty.
            let share = rest.div_ceil(lanes_up.max(1)).next_multiple_of(CUT_ALIGNMENT);
            let length = share.max(SHARE_BYTES_MIN).min(u64::from(chunk_bytes_max)).min(rest);
            u32::try_from(length).unwrap_or(chunk_bytes_max)
        })
    }

    /// Takes the next chunk, of the length that [`next_length`](Self::next_length) said.
    pub(super) fn take_chunk(&mut self, length: u32) -> Option<Chunk> {
        let chunk = if self.message_due {
            self.message_due = false;
            self.message_chunk()?
        } else if let Some(name) = self.resend.pop_front() {
            self.chunk_again(&name)?
        } else {
            self.cut_chunk(length)?
        };
        self.outstanding += 1;
        self.undrained = true;
        Some(chunk)
    }

    /// What became of one of its chunks. It is no longer outstanding or in doubt.
    pub(super) fn resolve(&mut self, chunk: &ChunkName, state: ChunkState) {
        match state {
            ChunkState::Applied | ChunkState::Arrived => self.applied(chunk),
            ChunkState::Missing if mutants::is(Mutant::DropInDoubt) => self.applied(chunk),
            ChunkState::Missing => {
                if self.is_open() {
                    self.resend.push_back(*chunk);
                }
            }
            ChunkState::Refused => {}
        }
    }

    /// Whether everything given so far has been applied, since this was last true.
    pub(super) fn drained(&mut self) -> bool {
        let done = self.undrained && self.is_open() && !self.has_work() && self.outstanding + self.in_doubt == 0;
        if done {
            self.undrained = false;
        }
        done
    }

    /// Nothing more is sent.
    pub(super) fn drop_work(&mut self) {
        self.message_due = false;
        self.resend.clear();
        self.uncut.clear();
        self.parts.clear();
    }

    fn applied(&mut self, chunk: &ChunkName) {
        let Some(part) = self.parts.get_mut(&chunk.part) else {
            return;
        };
        part.unapplied = part.unapplied.saturating_sub(1);
        if part.unapplied == 0 && part.cut == part.length && !part.empty_due {
            self.parts.remove(&chunk.part);
        }
    }

    fn cut_chunk(&mut self, length: u32) -> Option<Chunk> {
        let number = *self.uncut.front()?;
        let part = self.parts.get_mut(&number)?;
        let name = ChunkName {
            slot: self.spec.slot,
            generation: self.spec.generation,
            part: number,
            offset: part.cut,
            length,
        };
        part.cut += u64::from(length);
        part.empty_due = false;
        part.unapplied += 1;
        if part.cut == part.length {
            self.uncut.pop_front();
        }
        self.chunk_of_part(&name)
    }

    fn chunk_again(&self, name: &ChunkName) -> Option<Chunk> {
        if name.part == MESSAGE_PART {
            self.message_chunk()
        } else {
            self.chunk_of_part(name)
        }
    }

    fn chunk_of_part(&self, name: &ChunkName) -> Option<Chunk> {
        let part = self.parts.get(&name.part)?;
        Some(Chunk {
            transfer: self.spec.id,
            header: self.header(name, part.extent),
            payload: Payload::Stream {
                stream: Arc::clone(&part.stream),
                regions: Arc::clone(&self.spec.regions),
                gate: Arc::clone(&self.spec.gate),
                remote: self.spec.remote.clone().zip(part.remote.clone()),
            },
        })
    }

    fn message_chunk(&self) -> Option<Chunk> {
        let message = Arc::clone(self.spec.message.as_ref()?);
        let length = self.message_length();
        let name = ChunkName {
            slot: self.spec.slot,
            generation: self.spec.generation,
            part: MESSAGE_PART,
            offset: 0,
            length,
        };
        // The message's length travels where a part's last token does.
        let extent = PartExtent {
            token_start: 0,
            token_end: length,
            layer_start: 0,
            layer_end: 0,
            states: false,
        };
        Some(Chunk {
            transfer: self.spec.id,
            header: self.header(&name, extent),
            payload: Payload::Message(message, 0..length as usize),
        })
    }

    fn header(&self, name: &ChunkName, extent: PartExtent) -> ChunkHeader {
        ChunkHeader {
            slot: name.slot,
            generation: name.generation,
            part: name.part,
            extent,
            offset: name.offset,
            length: name.length,
            has_message: self.spec.message.is_some(),
            checksummed: self.spec.checksum,
        }
    }

    /// Checked at submission to be at most [`super::MESSAGE_BYTES_MAX`].
    fn message_length(&self) -> u32 {
        self.spec.message.as_ref().map_or(0, |message| message.len() as u32)
    }
}
