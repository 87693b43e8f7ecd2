//! Grants as bytes: what engines pass around.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Grant;
use super::check::Check;
use super::crc::crc32c;
use super::limits::GRANT_BYTES_MAX;
use crate::error::{Error, ErrorKind, Result};

const MAGIC: [u8; 4] = *b"KVXG";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = size_of::<GrantHeader>();

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct GrantHeader {
    magic: [u8; 4],
    version: U16,
    flags: U16,
    length: U32,
    // Of the header up to here and the body.
    crc: U32,
}

impl Grant {
    /// The byte form: a checked header and the grant. It holds for as long as the grant's owner lives.
    ///
    /// # Errors
    /// `InvalidArgument` if something in it is over its cap ([`super::limits`]).
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let bad = |why: String| {
            Error::new(ErrorKind::InvalidArgument, format!("grant {}", self.name))
                .at("Grant::to_bytes")
                .because(why)
                .remedy("grant fewer blocks at once")
        };
        self.check().map_err(bad)?;
        let mut bytes = postcard::to_extend(self, vec![0; HEADER_BYTES]).map_err(|error| bad(error.to_string()))?;
        if bytes.len() > GRANT_BYTES_MAX {
            return Err(bad(format!("it has {} bytes, at most {GRANT_BYTES_MAX}", bytes.len())));
        }
        let mut header = GrantHeader {
            magic: MAGIC,
            version: VERSION.into(),
            flags: 0.into(),
            // Fits: capped above.
            length: ((bytes.len() - HEADER_BYTES) as u32).into(),
            crc: 0.into(),
        };
        header.crc = header.crc_with(&bytes[HEADER_BYTES..]).into();
        bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        Ok(bytes)
    }

    /// Parses the byte form.
    ///
    /// # Errors
    /// `InvalidArgument` for anything but an unchanged grant, `Unsupported` for a version this build does not read.
    pub fn from_bytes(bytes: &[u8]) -> Result<Grant> {
        let bad = |why: String| {
            Error::new(ErrorKind::InvalidArgument, format!("{} bytes as a grant", bytes.len()))
                .at("Grant::from_bytes")
                .because(why)
                .remedy("pass on what `Grant::to_bytes` gave, unchanged")
        };
        let (header, body) = GrantHeader::ref_from_prefix(bytes)
            .map_err(|_| bad(format!("a grant has at least {HEADER_BYTES} bytes")))?;
        if header.magic != MAGIC {
            return Err(bad("it does not begin with KVXG".into()));
        }
        if header.version.get() != VERSION {
            return Err(
                Error::new(ErrorKind::Unsupported, format!("a grant of version {}", header.version))
                    .at("Grant::from_bytes")
                    .because(format!("this build reads version {VERSION}"))
                    .remedy("run the same version of kvxfer at both ends"),
            );
        }
        if header.length.get() as usize != body.len() || bytes.len() > GRANT_BYTES_MAX {
            return Err(bad(format!("its header says {} bytes after it", header.length)));
        }
        if header.crc.get() != header.crc_with(body) {
            return Err(bad("its checksum does not match".into()));
        }
        if header.flags.get() != 0 {
            return Err(bad(format!("it has unknown flags {:#x}", header.flags)));
        }
        match postcard::take_from_bytes::<Grant>(body) {
            Ok((grant, [])) => {
                grant.check().map_err(bad)?;
                Ok(grant)
            }
            Ok((_, rest)) => Err(bad(format!("{} bytes follow it", rest.len()))),
            Err(error) => Err(bad(error.to_string())),
        }
    }
}

impl GrantHeader {
    fn crc_with(&self, body: &[u8]) -> u32 {
        let covered = HEADER_BYTES - size_of::<U32>();
        crc32c(&[&self.as_bytes()[..covered], body])
    }
}

/// Makes length and checksum of a grant's bytes right, so that a fuzzer gets past them.
pub(super) fn mend(bytes: &mut [u8]) {
    if let Ok((header, body)) = GrantHeader::mut_from_prefix(bytes) {
        header.magic = MAGIC;
        header.length = u32::try_from(body.len()).unwrap_or(u32::MAX).into();
        header.crc = header.crc_with(body).into();
    }
}
