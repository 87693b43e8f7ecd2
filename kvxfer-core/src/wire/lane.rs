//! Headers on data lanes: a hello, then chunks and acknowledgements, both ways.
// SKELETON (owner: flow+wire).

use crate::error::Result;
use crate::flow::{ChunkHeader, ChunkName, ChunkState, LaneName};
use crate::id::Incarnation;

/// Bytes of every header on a lane after the hello.
pub const HEADER_BYTES: usize = 56;
/// Bytes of a chunk's trailer.
pub const TRAILER_BYTES: usize = 16;
/// Bytes of a lane's hello and of its answer.
pub const HELLO_BYTES: usize = 80;

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
    pub fn is_lane(_magic: [u8; 4]) -> bool {
        unimplemented!()
    }
    /// Wire form.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        unimplemented!()
    }
    /// Parses.
    pub fn decode(_bytes: &[u8; HELLO_BYTES]) -> Result<LaneHello> {
        unimplemented!()
    }
}

/// A header on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneHeader {
    /// `length` bytes and a trailer follow.
    Chunk(ChunkHeader),
    /// Nothing follows.
    Ack(ChunkName, ChunkState),
}

impl LaneHeader {
    /// Wire form, with its CRC32C.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        unimplemented!()
    }
    /// Parses; `Protocol` for a bad magic, kind, flag or length, `Corrupt` for a bad CRC.
    pub fn decode(_bytes: &[u8; HEADER_BYTES]) -> Result<LaneHeader> {
        unimplemented!()
    }
}

/// What follows a chunk's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// The bytes are what the header says; false if the sender's gate closed midway and filler was sent.
    pub valid: bool,
    /// Payload checksum (CRC64-NVME) if the header announced one.
    pub checksum: u64,
}

impl Trailer {
    /// Wire form.
    pub fn encode(&self) -> [u8; TRAILER_BYTES] {
        unimplemented!()
    }
    /// Parses.
    pub fn decode(_bytes: &[u8; TRAILER_BYTES]) -> Result<Trailer> {
        unimplemented!()
    }
}
