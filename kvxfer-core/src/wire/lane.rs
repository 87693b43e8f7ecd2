//! Headers on data lanes: a hello, then chunks, references and acknowledgements, both ways.

use crc_fast::{CrcAlgorithm, Digest};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

use super::crc::crc32c;
use super::reference::{REFERENCE_BYTES_MAX, RUN_BYTES};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{
    CHUNK_BYTES_MAX, ChunkHeader, ChunkName, ChunkState, LaneName, MESSAGE_BYTES_MAX, MESSAGE_PART, PartExtent,
};
use crate::id::{Generation, Incarnation, SlotId};
use crate::memory::EXPORT_BYTES_MAX;

/// Bytes of every header on a lane after the hello.
pub const HEADER_BYTES: usize = 56;
/// Bytes of a chunk's trailer.
pub const TRAILER_BYTES: usize = 16;
/// Bytes of a lane's hello and of its answer.
pub const HELLO_BYTES: usize = 80;
/// Version of the lane format.
pub const LANE_VERSION: u16 = 1;

const HELLO_MAGIC: [u8; 4] = *b"KVXL";
const HEADER_MAGIC: [u8; 4] = *b"KVXD";
const TRAILER_MAGIC: [u8; 4] = *b"KVXT";

const KIND_CHUNK: u8 = 1;
const KIND_ACK: u8 = 2;
const KIND_EXPORT: u8 = 3;
const KIND_IMPORTED: u8 = 4;
const KIND_REFERENCE: u8 = 5;
const KIND_DECLINED: u8 = 6;
const KIND_VALIDATE: u8 = 7;
const KIND_VALIDATED: u8 = 8;

const FLAG_STATES: u8 = 1;
const FLAG_MESSAGE: u8 = 2;
const FLAG_CHECKSUM: u8 = 4;
const FLAGS: u8 = FLAG_STATES | FLAG_MESSAGE | FLAG_CHECKSUM;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHello {
    magic: [u8; 4],
    version: U16,
    index: U16,
    epoch: U32,
    flags: U32,
    from: U128,
    to: U128,
    token: U128,
    reserved: [u8; 12],
    // Of everything before it, as in the header.
    crc: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    kind: u8,
    flags: u8,
    state: u8,
    reserved: u8,
    slot: U32,
    generation: U32,
    part: U32,
    length: U32,
    offset: U64,
    token_start: U32,
    token_end: U32,
    layer_start: U16,
    layer_end: U16,
    body: U32,
    reserved_tail: [u8; 4],
    crc: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawTrailer {
    magic: [u8; 4],
    valid: u8,
    reserved: [u8; 3],
    checksum: U64,
}

const _: () = assert!(size_of::<RawHello>() == HELLO_BYTES);
const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);
const _: () = assert!(size_of::<RawTrailer>() == TRAILER_BYTES);

/// What a dialer says first on a lane; the acceptor answers with its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneHello {
    /// Who speaks.
    pub from: Incarnation,
    /// Who is meant.
    pub to: Incarnation,
    /// The session's secret.
    pub token: u128,
    /// The lane.
    pub lane: LaneName,
}

impl LaneHello {
    /// Whether these first four bytes of a connection begin a lane (else a session).
    pub fn is_lane(magic: [u8; 4]) -> bool {
        magic == HELLO_MAGIC
    }

    /// Wire form.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut raw = RawHello {
            magic: HELLO_MAGIC,
            version: LANE_VERSION.into(),
            index: self.lane.index.into(),
            epoch: self.lane.epoch.into(),
            flags: 0.into(),
            from: self.from.bits().into(),
            to: self.to.bits().into(),
            token: self.token.into(),
            reserved: [0; 12],
            crc: 0.into(),
        };
        raw.crc = crc_before(raw.as_bytes()).into();
        transmute!(raw)
    }

    /// Parses.
    ///
    /// # Errors
    /// `Protocol` for a bad magic, flag or reserved byte, `Unsupported` for another version, `Corrupt` for a bad CRC.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<LaneHello> {
        let raw: RawHello = transmute!(*bytes);
        let what = "a lane's hello";
        if raw.magic != HELLO_MAGIC {
            return Err(broken(what, format!("it begins with {:02x?}, not KVXL", raw.magic)));
        }
        check_crc(what, bytes, raw.crc)?;
        if raw.version.get() != LANE_VERSION {
            return Err(Error::new(ErrorKind::Unsupported, what)
                .because(format!("its lanes are version {}, ours {LANE_VERSION}", raw.version))
                .remedy("run versions of kvxfer that meet"));
        }
        if raw.flags.get() != 0 || raw.reserved != [0; 12] {
            return Err(broken(
                what,
                format!("unknown flags {:#x} or reserved bytes", raw.flags),
            ));
        }
        Ok(LaneHello {
            from: Incarnation::from_bits(raw.from.get()),
            to: Incarnation::from_bits(raw.to.get()),
            token: raw.token.get(),
            lane: LaneName {
                index: raw.index.get(),
                epoch: raw.epoch.get(),
            },
        })
    }
}

/// A header on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneHeader {
    /// `length` bytes and a trailer follow.
    Chunk(ChunkHeader),
    /// Nothing follows.
    Ack(ChunkName, ChunkState),
    /// From the sender: `bytes` bytes follow, the description of a region that the receiver may map if it is on this host.
    Export {
        /// The sender's number of it on this link, never used again.
        number: u32,
        /// 1 to [`EXPORT_BYTES_MAX`].
        bytes: u32,
    },
    /// From the receiver: it has mapped this export, and takes references to it. Nothing follows.
    Imported {
        /// The sender's number of it.
        number: u32,
    },
    /// In place of a chunk's bytes: `bytes` bytes of [runs](super::reference) follow, and no trailer. The receiver copies by itself.
    Reference {
        /// The chunk.
        chunk: ChunkHeader,
        /// Bytes of its runs.
        bytes: u32,
    },
    /// From the receiver: it did not take this reference; the chunk's bytes are wanted. Nothing follows.
    Declined(ChunkName),
    /// From the receiver: it has copied what was referred to. Does it still count? Nothing follows.
    Validate(ChunkName),
    /// The answer: whether the source was not taken back before the question came. Nothing follows.
    Validated(ChunkName, bool),
}

impl LaneHeader {
    /// Wire form, with its CRC32C.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut raw = match self {
            LaneHeader::Chunk(chunk) => RawHeader::of_chunk(KIND_CHUNK, chunk),
            LaneHeader::Ack(name, state) => RawHeader {
                state: state_number(*state),
                ..RawHeader::named(KIND_ACK, name)
            },
            LaneHeader::Export { number, bytes } => RawHeader {
                body: (*bytes).into(),
                ..RawHeader::numbered(KIND_EXPORT, *number)
            },
            LaneHeader::Imported { number } => RawHeader::numbered(KIND_IMPORTED, *number),
            LaneHeader::Reference { chunk, bytes } => RawHeader {
                body: (*bytes).into(),
                ..RawHeader::of_chunk(KIND_REFERENCE, chunk)
            },
            LaneHeader::Declined(name) => RawHeader::named(KIND_DECLINED, name),
            LaneHeader::Validate(name) => RawHeader::named(KIND_VALIDATE, name),
            LaneHeader::Validated(name, counts) => RawHeader {
                state: u8::from(*counts),
                ..RawHeader::named(KIND_VALIDATED, name)
            },
        };
        raw.crc = crc_before(raw.as_bytes()).into();
        transmute!(raw)
    }

    /// Parses.
    ///
    /// # Errors
    /// `Protocol` for a bad magic, kind, flag or length, `Corrupt` for a bad CRC.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<LaneHeader> {
        let raw: RawHeader = transmute!(*bytes);
        let what = "a lane header";
        if raw.magic != HEADER_MAGIC {
            return Err(broken(what, format!("it begins with {:02x?}, not KVXD", raw.magic)));
        }
        check_crc(what, bytes, raw.crc)?;
        let has_body = matches!(raw.kind, KIND_EXPORT | KIND_REFERENCE);
        if raw.reserved != 0 || raw.reserved_tail != [0; 4] || (raw.body.get() != 0 && !has_body) {
            return Err(broken(what, "reserved bytes are not zero".into()));
        }
        match raw.kind {
            KIND_CHUNK => raw.chunk().map(LaneHeader::Chunk),
            KIND_ACK => raw.acknowledgement().map(|(name, state)| LaneHeader::Ack(name, state)),
            KIND_EXPORT => raw.export(),
            KIND_IMPORTED => raw.number().map(|number| LaneHeader::Imported { number }),
            KIND_REFERENCE => raw.reference(),
            KIND_DECLINED => raw
                .bare_name("a declined reference", 0)
                .map(|(name, _)| LaneHeader::Declined(name)),
            KIND_VALIDATE => raw
                .bare_name("a question", 0)
                .map(|(name, _)| LaneHeader::Validate(name)),
            KIND_VALIDATED => {
                let answer = raw.bare_name("an answer", 1);
                answer.map(|(name, state)| LaneHeader::Validated(name, state == 1))
            }
            kind => Err(broken(what, format!("kind {kind} is not known"))),
        }
    }
}

impl RawHeader {
    /// A header with a chunk's name and extent.
    fn of_chunk(kind: u8, chunk: &ChunkHeader) -> RawHeader {
        RawHeader {
            flags: flag(chunk.extent.states, FLAG_STATES)
                | flag(chunk.has_message, FLAG_MESSAGE)
                | flag(chunk.checksummed, FLAG_CHECKSUM),
            token_start: chunk.extent.token_start.into(),
            token_end: chunk.extent.token_end.into(),
            layer_start: chunk.extent.layer_start.into(),
            layer_end: chunk.extent.layer_end.into(),
            ..RawHeader::named(kind, &chunk.name())
        }
    }

    /// A header with an export's number, which stands where others have their slot, and nothing else.
    fn numbered(kind: u8, number: u32) -> RawHeader {
        let name = ChunkName {
            slot: SlotId(number),
            generation: Generation(0),
            part: 0,
            offset: 0,
            length: 0,
        };
        RawHeader::named(kind, &name)
    }

    /// A header with this name and nothing else.
    fn named(kind: u8, name: &ChunkName) -> RawHeader {
        RawHeader {
            magic: HEADER_MAGIC,
            kind,
            flags: 0,
            state: 0,
            reserved: 0,
            slot: name.slot.0.into(),
            generation: name.generation.0.into(),
            part: name.part.into(),
            length: name.length.into(),
            offset: name.offset.into(),
            token_start: 0.into(),
            token_end: 0.into(),
            layer_start: 0.into(),
            layer_end: 0.into(),
            body: 0.into(),
            reserved_tail: [0; 4],
            crc: 0.into(),
        }
    }

    fn name(&self) -> Result<ChunkName> {
        let name = ChunkName {
            slot: SlotId(self.slot.get()),
            generation: Generation(self.generation.get()),
            part: self.part.get(),
            offset: self.offset.get(),
            length: self.length.get(),
        };
        if name.length > CHUNK_BYTES_MAX || name.offset.checked_add(u64::from(name.length)).is_none() {
            return Err(broken(
                "a lane header",
                format!(
                    "{} bytes at offset {} are no chunk (at most {CHUNK_BYTES_MAX})",
                    name.length, name.offset
                ),
            ));
        }
        Ok(name)
    }

    fn chunk(&self) -> Result<ChunkHeader> {
        let what = "a chunk's header";
        let name = self.name()?;
        if self.flags & !FLAGS != 0 || self.state != 0 {
            return Err(broken(what, format!("unknown flags {:#x} or a state", self.flags)));
        }
        let extent = PartExtent {
            token_start: self.token_start.get(),
            token_end: self.token_end.get(),
            layer_start: self.layer_start.get(),
            layer_end: self.layer_end.get(),
            states: self.flags & FLAG_STATES != 0,
        };
        if extent.token_start > extent.token_end || extent.layer_start > extent.layer_end {
            return Err(broken(what, format!("its extent {extent:?} ends before it begins")));
        }
        let has_message = self.flags & FLAG_MESSAGE != 0;
        if name.part == MESSAGE_PART {
            let message_extent = PartExtent {
                token_start: 0,
                token_end: extent.token_end,
                layer_start: 0,
                layer_end: 0,
                states: false,
            };
            let inside = name.offset + u64::from(name.length) <= u64::from(extent.token_end);
            if !has_message || extent != message_extent || extent.token_end as usize > MESSAGE_BYTES_MAX || !inside {
                return Err(broken(what, "it is no piece of a user message".into()));
            }
        }
        Ok(ChunkHeader {
            slot: name.slot,
            generation: name.generation,
            part: name.part,
            extent,
            offset: name.offset,
            length: name.length,
            has_message,
            checksummed: self.flags & FLAG_CHECKSUM != 0,
        })
    }

    fn acknowledgement(&self) -> Result<(ChunkName, ChunkState)> {
        let what = "an acknowledgement";
        let (name, state) = self.bare_name(what, u8::MAX)?;
        match state_of(state) {
            Some(state) => Ok((name, state)),
            None => Err(broken(what, format!("state {state} is not known"))),
        }
    }

    /// A name and a state, without flags or an extent.
    fn bare_name(&self, what: &str, state_max: u8) -> Result<(ChunkName, u8)> {
        let name = self.name()?;
        let extent = (
            self.token_start.get(),
            self.token_end.get(),
            self.layer_start.get(),
            self.layer_end.get(),
        );
        if self.flags != 0 || extent != (0, 0, 0, 0) {
            return Err(broken(what, "it has flags or an extent".into()));
        }
        if self.state > state_max {
            return Err(broken(what, format!("state {} is not known", self.state)));
        }
        Ok((name, self.state))
    }

    /// A number and nothing else.
    fn number(&self) -> Result<u32> {
        let what = "an export's header";
        let (name, _) = self.bare_name(what, 0)?;
        if (name.generation.0, name.part, name.offset, name.length) != (0, 0, 0, 0) {
            return Err(broken(what, "it names a chunk".into()));
        }
        Ok(name.slot.0)
    }

    fn export(&self) -> Result<LaneHeader> {
        let (number, bytes) = (self.number()?, self.body.get());
        if bytes == 0 || bytes as usize > EXPORT_BYTES_MAX {
            return Err(broken(
                "an export's header",
                format!("its description has {bytes} bytes, which are 1 to {EXPORT_BYTES_MAX}"),
            ));
        }
        Ok(LaneHeader::Export { number, bytes })
    }

    fn reference(&self) -> Result<LaneHeader> {
        let what = "a reference's header";
        let (chunk, bytes) = (self.chunk()?, self.body.get());
        if chunk.part == MESSAGE_PART || chunk.checksummed {
            return Err(broken(
                what,
                "messages and what has a checksum are sent as bytes".into(),
            ));
        }
        if bytes == 0 || bytes as usize > REFERENCE_BYTES_MAX || !(bytes as usize).is_multiple_of(RUN_BYTES) {
            return Err(broken(
                what,
                format!(
                    "{bytes} bytes are no list of runs (of {RUN_BYTES} bytes, {REFERENCE_BYTES_MAX} in all at most)"
                ),
            ));
        }
        Ok(LaneHeader::Reference { chunk, bytes })
    }
}

/// What follows a chunk's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// The bytes are what the header says; false if the sender's gate closed midway and filler was sent.
    pub valid: bool,
    /// Payload checksum (CRC64-NVME) if the header announced one, else zero.
    pub checksum: u64,
}

impl Trailer {
    /// Wire form.
    pub fn encode(&self) -> [u8; TRAILER_BYTES] {
        transmute!(RawTrailer {
            magic: TRAILER_MAGIC,
            valid: u8::from(self.valid),
            reserved: [0; 3],
            checksum: self.checksum.into(),
        })
    }

    /// Parses.
    ///
    /// # Errors
    /// `Protocol` for anything but a trailer: the lane has lost its place.
    pub fn decode(bytes: &[u8; TRAILER_BYTES]) -> Result<Trailer> {
        let raw: RawTrailer = transmute!(*bytes);
        if raw.magic != TRAILER_MAGIC || raw.valid > 1 || raw.reserved != [0; 3] {
            return Err(broken(
                "a chunk's trailer",
                format!("{bytes:02x?} is none: the lane has lost its place"),
            ));
        }
        Ok(Trailer {
            valid: raw.valid == 1,
            checksum: raw.checksum.get(),
        })
    }
}

/// The opt-in checksum of a chunk's bytes: CRC64-NVME, taken piece by piece as they pass.
#[derive(Debug, Clone)]
pub struct PayloadChecksum(Digest);

impl PayloadChecksum {
    /// Of no bytes.
    pub fn new() -> Self {
        PayloadChecksum(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum so far.
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for PayloadChecksum {
    fn default() -> Self {
        PayloadChecksum::new()
    }
}

fn flag(set: bool, bit: u8) -> u8 {
    if set { bit } else { 0 }
}

fn state_number(state: ChunkState) -> u8 {
    match state {
        ChunkState::Applied => 1,
        ChunkState::Arrived => 2,
        ChunkState::Missing => 3,
        ChunkState::Refused => 4,
    }
}

fn state_of(number: u8) -> Option<ChunkState> {
    Some(match number {
        1 => ChunkState::Applied,
        2 => ChunkState::Arrived,
        3 => ChunkState::Missing,
        4 => ChunkState::Refused,
        _ => return None,
    })
}

/// CRC32C of everything before the last four bytes.
fn crc_before(bytes: &[u8]) -> u32 {
    crc32c(&[&bytes[..bytes.len() - size_of::<U32>()]])
}

fn check_crc(what: &str, bytes: &[u8], said: U32) -> Result<()> {
    let crc = crc_before(bytes);
    if said.get() == crc {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, what)
        .because(format!("its CRC is {said:#010x}, its bytes give {crc:#010x}"))
        .remedy("the lane is closed; if this repeats, look for a faulty link or host"))
}

fn broken(what: &str, why: String) -> Error {
    Error::new(ErrorKind::Protocol, what)
        .because(why)
        .remedy("the lane is closed; check that both ends are kvxfer, of versions that meet")
}

/// Makes the last four bytes the CRC of the rest, so that a fuzzer gets past it.
pub(super) fn mend(bytes: &mut [u8]) {
    if let Some(covered) = bytes.len().checked_sub(size_of::<U32>()) {
        let crc = crc_before(bytes);
        bytes[covered..].copy_from_slice(&crc.to_le_bytes());
    }
}
