//! Session frames: a fixed header and a `postcard` body, under one CRC32C.

use serde::Serialize;
use serde::de::DeserializeOwned;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

use super::Frame;
use super::check::Check;
use super::crc::crc32c;
use super::limits::FRAME_BODY_BYTES_MAX;
use crate::error::{Error, ErrorKind, Result};

/// A session frame's header: bytes.
pub const FRAME_HEADER_BYTES: usize = 40;
/// Protocol versions that this build speaks, lowest and highest.
pub const PROTOCOL_VERSIONS: (u16, u16) = (1, 1);

/// Version of the header's layout. It never changes for Hello and Refuse, so that any two versions can part in peace.
const FRAME_VERSION: u16 = 1;
const MAGIC: [u8; 4] = *b"KVXS";

const KIND_HELLO: u8 = 1;
const KIND_REFUSE: u8 = 2;
const KIND_READY: u8 = 3;
const KIND_MESSAGE: u8 = 4;

/// Whoever does not know the kind may skip the frame.
const FLAG_OPTIONAL: u8 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: U16,
    kind: u8,
    flags: u8,
    length: U32,
    // Of the header, with this field zero, and the body.
    crc: U32,
    sequence: U64,
    acknowledged: U64,
    reserved: [u8; 8],
}

const _: () = assert!(size_of::<RawHeader>() == FRAME_HEADER_BYTES);

/// Whether these first four bytes of a connection begin a session.
pub fn is_session(magic: [u8; 4]) -> bool {
    magic == MAGIC
}

/// Encodes a frame, header and body.
///
/// # Errors
/// `InvalidArgument` if something in it is over its cap ([`super::limits`]) or the frame is [`Frame::Skipped`].
pub fn encode(frame: &Frame) -> Result<Vec<u8>> {
    let bad = |why: String| {
        Error::new(ErrorKind::InvalidArgument, format!("a {} frame", kind_name(frame)))
            .at("wire::encode")
            .because(why)
            .remedy("keep within the limits of the wire format")
    };
    frame.check().map_err(bad)?;
    let start = vec![0; FRAME_HEADER_BYTES];
    let (kind, sequence, acknowledged, bytes) = match frame {
        Frame::Hello(hello) => (KIND_HELLO, 0, 0, append(hello, start)),
        Frame::Refuse(error) => (KIND_REFUSE, 0, 0, append(error, start)),
        Frame::Ready {
            session,
            resumed,
            received,
        } => (KIND_READY, 0, 0, append(&(session, resumed, received), start)),
        Frame::Message {
            sequence,
            acknowledged,
            message,
        } => (KIND_MESSAGE, *sequence, *acknowledged, append(message, start)),
        Frame::Skipped => return Err(bad("it was skipped, not made".into())),
    };
    let mut bytes = bytes.map_err(|error| bad(error.to_string()))?;
    let length = bytes.len() - FRAME_HEADER_BYTES;
    if length > FRAME_BODY_BYTES_MAX {
        return Err(bad(format!(
            "its body has {length} bytes, at most {FRAME_BODY_BYTES_MAX}"
        )));
    }
    let mut header = RawHeader {
        magic: MAGIC,
        version: FRAME_VERSION.into(),
        kind,
        flags: 0,
        // Fits: capped above.
        length: (length as u32).into(),
        crc: 0.into(),
        sequence: sequence.into(),
        acknowledged: acknowledged.into(),
        reserved: [0; 8],
    };
    header.crc = header.crc_with(&bytes[FRAME_HEADER_BYTES..]).into();
    bytes[..FRAME_HEADER_BYTES].copy_from_slice(header.as_bytes());
    Ok(bytes)
}

/// Reads a header: how many body bytes follow.
///
/// # Errors
/// `Protocol` for a bad magic or a body over its cap, `Unsupported` for another version of the header.
pub fn body_length(header: &[u8; FRAME_HEADER_BYTES]) -> Result<usize> {
    let header: RawHeader = transmute!(*header);
    header.check()?;
    Ok(header.length.get() as usize)
}

/// Decodes a whole frame.
///
/// # Errors
/// `Corrupt` for a bad CRC, `Unsupported` for another version of the header, else `Protocol`.
pub fn decode(header: &[u8; FRAME_HEADER_BYTES], body: &[u8]) -> Result<Frame> {
    let header: RawHeader = transmute!(*header);
    header.check()?;
    if header.length.get() as usize != body.len() {
        return Err(header.broken(format!("{} bytes follow it", body.len())));
    }
    let crc = header.crc_with(body);
    if header.crc.get() != crc {
        return Err(Error::new(ErrorKind::Corrupt, header.describe())
            .at("session")
            .because(format!("its CRC is {:#010x}, its bytes give {crc:#010x}", header.crc))
            .remedy("the connection is made anew; if this repeats, look for a faulty link or host"));
    }
    if header.reserved != [0; 8] || header.flags & !FLAG_OPTIONAL != 0 {
        return Err(header.broken(format!("unknown flags {:#x} or reserved bytes", header.flags)));
    }
    let frame = match header.kind {
        // Later versions may append fields to these two.
        KIND_HELLO => Frame::Hello(Box::new(header.parse_front(body)?)),
        KIND_REFUSE => Frame::Refuse(header.parse_front(body)?),
        KIND_READY => {
            let (session, resumed, received) = header.parse(body)?;
            Frame::Ready {
                session,
                resumed,
                received,
            }
        }
        KIND_MESSAGE => Frame::Message {
            sequence: header.sequence.get(),
            acknowledged: header.acknowledged.get(),
            message: Box::new(header.parse(body)?),
        },
        _ if header.flags & FLAG_OPTIONAL != 0 => return Ok(Frame::Skipped),
        kind => return Err(header.broken(format!("kind {kind} is not known and not optional"))),
    };
    let numbered = (header.sequence.get(), header.acknowledged.get()) != (0, 0);
    if numbered && header.kind != KIND_MESSAGE {
        return Err(header.broken("frames of the handshake have no numbers".into()));
    }
    frame.check().map_err(|why| header.broken(why))?;
    Ok(frame)
}

impl RawHeader {
    /// What can be checked before the body is there.
    fn check(&self) -> Result<()> {
        if self.magic != MAGIC {
            return Err(self.broken(format!("it begins with {:02x?}, not KVXS", self.magic)));
        }
        if self.version.get() != FRAME_VERSION {
            return Err(Error::new(ErrorKind::Unsupported, self.describe())
                .at("session")
                .because(format!(
                    "its header is version {}, this build reads {FRAME_VERSION}",
                    self.version
                ))
                .remedy("run versions of kvxfer that meet"));
        }
        if self.length.get() as usize > FRAME_BODY_BYTES_MAX {
            return Err(self.broken(format!("a body has at most {FRAME_BODY_BYTES_MAX} bytes")));
        }
        Ok(())
    }

    fn crc_with(&self, body: &[u8]) -> u32 {
        let mut blank = *self;
        blank.crc = 0.into();
        crc32c(&[blank.as_bytes(), body])
    }

    /// A body that is exactly one value.
    fn parse<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T> {
        match postcard::take_from_bytes(body) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(self.broken(format!("{} bytes follow its value", rest.len()))),
            Err(error) => Err(self.broken(error.to_string())),
        }
    }

    /// A body that begins with a value.
    fn parse_front<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T> {
        match postcard::take_from_bytes(body) {
            Ok((value, _)) => Ok(value),
            Err(error) => Err(self.broken(error.to_string())),
        }
    }

    fn describe(&self) -> String {
        format!("a frame of kind {} with {} body bytes", self.kind, self.length)
    }

    fn broken(&self, why: String) -> Error {
        Error::new(ErrorKind::Protocol, self.describe())
            .at("session")
            .because(why)
            .remedy("the connection is closed; check that both ends are kvxfer, of versions that meet")
    }
}

fn append<T: Serialize>(value: &T, bytes: Vec<u8>) -> postcard::Result<Vec<u8>> {
    postcard::to_extend(value, bytes)
}

fn kind_name(frame: &Frame) -> &'static str {
    match frame {
        Frame::Hello(_) => "Hello",
        Frame::Refuse(_) => "Refuse",
        Frame::Ready { .. } => "Ready",
        Frame::Message { .. } => "Message",
        Frame::Skipped => "skipped",
    }
}

/// Makes magic, version, length and CRC of a frame right, so that a fuzzer gets past them.
pub(super) fn mend(bytes: &mut [u8]) {
    if let Ok((header, body)) = RawHeader::mut_from_prefix(bytes) {
        header.magic = MAGIC;
        header.version = FRAME_VERSION.into();
        header.length = u32::try_from(body.len()).unwrap_or(u32::MAX).into();
        header.crc = header.crc_with(body).into();
    }
}
