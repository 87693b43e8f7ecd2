//! The data plane's decisions, without its system calls: what may be placed, what is sent next, what is fenced.
//!
//! A transport (and the simulator) does the input and output around these. [`SlotTable`] is the receiving side: one
//! slot per live grant. [`LinkSender`] is the sending side of one link: transfers, chunks, windows, resumption.

mod extent;
mod gate;
mod interval;
mod lane_window;
mod sender;
mod slot;
mod sync;
mod table;
mod transfer;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::id::{Generation, Incarnation, PoolId, SlotId};
use crate::layout::PoolLayout;
use crate::memory::{Region, Segment};
use crate::plan::Target;
use crate::time::Time;

pub use gate::{Gate, GateGuard, OwnedGateGuard};
pub use interval::{Coverage, IntervalSet};
pub use sender::{LaneLoad, LinkSender};
pub use slot::{PARTS_PER_SLOT_MAX, SlotTarget};
pub use table::SlotTable;

/// A part of a hand-off: tokens, layers (indices in the grant's scope), and whether state blocks belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PartExtent {
    /// First token position.
    pub token_start: u32,
    /// One past the last token position.
    pub token_end: u32,
    /// First layer, as an index in the grant's scope.
    pub layer_start: u16,
    /// One past the last layer.
    pub layer_end: u16,
    /// Whether the state blocks of these layers belong to this part.
    pub states: bool,
}

impl PartExtent {
    /// Everything the grant covers.
    pub const WHOLE: PartExtent = PartExtent {
        token_start: 0,
        token_end: u32::MAX,
        layer_start: 0,
        layer_end: u16::MAX,
        states: true,
    };
}

/// A part's bytes in stream order, as segments of one side's regions. Expanding allocates nothing.
pub trait ByteStream: Send + Sync + fmt::Debug {
    /// Bytes in the stream.
    fn length(&self) -> u64;

    /// Appends to `out` the segments of `offset..offset + length` (clipped to the stream's end), adjacent ones
    /// merged, until `out` holds `segments_max`. Returns the bytes they cover.
    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64;
}

/// What a chunk header says (its wire form is in [`crate::wire::lane`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The receiver's slot.
    pub slot: SlotId,
    /// Which use of it.
    pub generation: Generation,
    /// The part's number, chosen by the sender; [`MESSAGE_PART`] for the user message.
    pub part: u32,
    /// The part's extent. Of the user message: `token_end` is its length in bytes, the rest is zero.
    pub extent: PartExtent,
    /// First byte in the part's stream.
    pub offset: u64,
    /// Bytes, at most [`CHUNK_BYTES_MAX`].
    pub length: u32,
    /// The transfer carries a user message: arrival waits for it too.
    pub has_message: bool,
    /// The trailer carries a payload checksum.
    pub checksummed: bool,
}

impl ChunkHeader {
    /// The chunk's name.
    pub const fn name(&self) -> ChunkName {
        ChunkName {
            slot: self.slot,
            generation: self.generation,
            part: self.part,
            offset: self.offset,
            length: self.length,
        }
    }
}

/// The part number of the user message.
pub const MESSAGE_PART: u32 = u32::MAX;
/// A chunk's bytes, at most: 1 MiB.
pub const CHUNK_BYTES_MAX: u32 = 1 << 20;
/// Chunks outstanding on one lane, at most, whatever the configuration says: they are named in one message when the lane
/// is lost.
pub const LANE_CHUNKS_MAX: u32 = 4096;
/// A user message's bytes, at most: 64 KiB.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

// ------------------------------------------------------------------------------------------------ receiving

/// What a slot is opened for.
pub struct SlotSpec {
    /// The pool's layout.
    pub layout: Arc<PoolLayout>,
    /// The pool's regions.
    pub regions: Arc<[Arc<Region>]>,
    /// The blocks.
    pub target: Arc<Target>,
    /// Only this peer may write, if given.
    pub writer: Option<Incarnation>,
    /// The pool, for errors.
    pub pool: PoolId,
    /// Told, on a data thread, at the instant the slot has arrived or is fenced. Must not block.
    pub watcher: Option<Arc<dyn SlotWatcher>>,
}

/// Whoever wants to know about one slot at once (the runtime's handle). Called without locks held.
pub trait SlotWatcher: Send + Sync {
    /// The last byte has been placed.
    fn arrived(&self, message: Option<Arc<[u8]>>);
}

/// What to do with a chunk whose header has been read.
#[derive(Debug)]
#[must_use]
pub enum Placement {
    /// Place it: enter `gate` around each read, scatter into the stream from the header's offset on. Then call exactly
    /// one of [`SlotTable::applied`] and [`SlotTable::abandon`] (or [`SlotTable::placed`], which chooses): until then
    /// no other copy of the chunk is let in.
    Place {
        /// The part's stream.
        stream: Arc<dyn ByteStream>,
        /// Regions the stream's segments index.
        regions: Arc<[Arc<Region>]>,
        /// The fence to pass around each call that may write.
        gate: Arc<Gate>,
    },
    /// The user message: read into a buffer and give it to [`SlotTable::message_applied`].
    Message,
    /// Read it into scrap and acknowledge it with this: it is applied already (`Applied`, `Arrived`), its slot is
    /// closed, gone, of another generation or another peer's (`Refused`), or another copy of it is being placed
    /// (`Missing`: it is sent again if that fails).
    Scrap(ChunkState),
}

/// What an applied chunk led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// Counted.
    Counted,
    /// Counted, and it was the last: the slot has arrived.
    Arrived,
    /// Not counted: the slot was closed meanwhile.
    Refused,
}

/// How a slot came to be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// It had already arrived: arrived wins over a crossing cancel.
    AlreadyArrived,
    /// Closed and fenced: no byte lands any more.
    Fenced,
    /// Closed; a data thread is inside, or the writer was admitted and is not known to be quiet. [`SlotTable::fenced`]
    /// turns true when it has left, and is.
    Waiting,
    /// No such slot or generation.
    Gone,
}

/// How far a slot is.
#[derive(Debug, Clone)]
pub struct SlotProgress {
    /// Bytes applied.
    pub applied_bytes: u64,
    /// Bytes of the whole grant.
    pub total_bytes: u64,
    /// All placed.
    pub arrived: bool,
    /// The user message, if it is whole.
    pub message: Option<Arc<[u8]>>,
    /// Who may write: given at opening, or the first that did or was admitted.
    pub writer: Option<Incarnation>,
    /// The writer's device may write by itself: [`SlotTable::admit`].
    pub admitted: bool,
}

/// A chunk by name, as in a lane fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChunkName {
    /// The receiver's slot.
    pub slot: SlotId,
    /// Which use of it.
    pub generation: Generation,
    /// The part.
    pub part: u32,
    /// First byte in the part's stream.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

/// What became of a chunk that was on a lost lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChunkState {
    /// Its bytes are in place.
    Applied,
    /// The slot as a whole has arrived.
    Arrived,
    /// Not applied, and never will be from that lane: send again.
    Missing,
    /// The slot is closed or gone.
    Refused,
}

// -------------------------------------------------------------------------------------------------- sending

/// A transfer on the sending side, unique in its endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// A lane of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LaneName {
    /// Index, below the link's lane count.
    pub index: u16,
    /// Which connection of it: grows at each reconnect.
    pub epoch: u32,
}

/// What a link is asked to send.
#[derive(Clone)]
pub struct SendSpec {
    /// The transfer.
    pub id: TransferId,
    /// The receiver's slot.
    pub slot: SlotId,
    /// Which use of it.
    pub generation: Generation,
    /// The source's fence: passed around each call that reads source blocks. Shared by all transfers of an offer.
    pub gate: Arc<Gate>,
    /// Regions that the parts' streams index.
    pub regions: Arc<[Arc<Region>]>,
    /// User message, delivered with the arrival.
    pub message: Option<Arc<[u8]>>,
    /// Higher goes first.
    pub priority: u8,
    /// No chunk is started after it.
    pub deadline: Option<Time>,
    /// Compute a payload checksum.
    pub checksum: bool,
    /// What a one-sided transport needs to know of the other side; `None` for transports whose receiver places.
    pub remote: Option<Remote>,
}

/// The other side's memory, as a one-sided transport sees it.
#[derive(Debug, Clone)]
pub struct Remote {
    /// Which way the bytes go.
    pub direction: Direction,
    /// The peer's pool.
    pub pool: PoolId,
    /// What the peer's transport said of that pool's regions when it registered them.
    pub keys: Arc<[u8]>,
}

/// Which way the bytes of a one-sided transfer go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From here into the peer's slot, which the spec names.
    Write,
    /// From the peer's blocks into a slot of this endpoint, which the spec names.
    Read,
}

/// A part to send.
#[derive(Debug, Clone)]
pub struct SendPart {
    /// Its number in the transfer, from 0.
    pub part: u32,
    /// Its extent.
    pub extent: PartExtent,
    /// This side's stream: the source's, or, for a read, the destination's.
    pub stream: Arc<dyn ByteStream>,
    /// The same bytes as segments of the peer's regions, if the spec has a [`Remote`].
    pub remote: Option<Arc<dyn ByteStream>>,
}

/// A chunk that a lane shall send now.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// The transfer.
    pub transfer: TransferId,
    /// Header to send.
    pub header: ChunkHeader,
    /// Source of the payload.
    pub payload: Payload,
}

/// Where a chunk's bytes come from.
#[derive(Debug, Clone)]
pub enum Payload {
    /// Segments of a stream, from the header's offset on, read inside the gate.
    Stream {
        /// The part's stream.
        stream: Arc<dyn ByteStream>,
        /// Regions.
        regions: Arc<[Arc<Region>]>,
        /// The source's fence.
        gate: Arc<Gate>,
        /// The same bytes on the other side, for a one-sided transport.
        remote: Option<(Remote, Arc<dyn ByteStream>)>,
    },
    /// A range of the user message.
    Message(Arc<[u8]>, Range<usize>),
}

/// What the sending side reports.
#[derive(Debug, Clone)]
pub enum SendEvent {
    /// The receiver says that the slot has arrived.
    Arrived(TransferId),
    /// The receiver's slot is closed, ended or unknown: nothing more is sent; ask for the verdict.
    Refused(TransferId),
    /// Every chunk of every part given so far has been acknowledged as applied. Reported again after more parts.
    Drained(TransferId),
    /// After a stop: no byte of the source is read any more and nothing is outstanding on any lane that is up. The
    /// transfer is forgotten. (Chunks in doubt on a lost lane do not hold it: their bytes have left the source.)
    Quiet(TransferId),
}

/// Settings of a [`LinkSender`].
#[derive(Debug, Clone)]
pub struct LinkSenderConfig {
    /// Lanes of the link.
    pub lanes: u16,
    /// Window per lane, at least, in bytes.
    pub window_bytes_min: u64,
    /// Window per lane, at most, in bytes.
    pub window_bytes_max: u64,
    /// Chunks outstanding per lane, at most.
    pub window_chunks_max: u32,
    /// Transfers that share the link at once; the rest queue.
    pub transfers_active_max: u32,
    /// Transfers queued, at most; `Busy` beyond.
    pub transfers_max: u32,
}

impl Default for LinkSenderConfig {
    fn default() -> Self {
        LinkSenderConfig {
            lanes: 2,
            window_bytes_min: 2 << 20,
            window_bytes_max: 64 << 20,
            window_chunks_max: 256,
            transfers_active_max: 64,
            transfers_max: 4096,
        }
    }
}

/// A failure of a lane, for reports.
#[derive(Debug, Clone)]
pub struct LaneLoss {
    /// Which.
    pub lane: LaneName,
    /// Why.
    pub error: Error,
}
