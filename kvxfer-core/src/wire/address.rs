//! Endpoint addresses as text and as bytes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::limits::{ADDRESS_SOCKETS_MAX, ADDRESS_TEXT_MAX};
use super::{EndpointAddress, RankCoordinates};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Incarnation;

/// Before the readable text.
const READABLE: &str = "kvx1:";
/// Before the bytes in base32.
const PACKED: &str = "kvx1=";
/// First byte of the byte form.
const BYTES_VERSION: u8 = 1;
/// RFC 4648, lower case, unpadded.
const BASE32: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

const HAS_INCARNATION: u8 = 1;
const HAS_RANK: u8 = 2;
const TAG_V4: u8 = 4;
const TAG_V6: u8 = 6;
const TAG_V6_SCOPED: u8 = 7;

impl EndpointAddress {
    /// A bare address, for tools: whoever listens there.
    pub fn bare(socket: SocketAddr) -> Self {
        EndpointAddress {
            sockets: vec![socket],
            incarnation: None,
            rank: RankCoordinates::default(),
        }
    }

    /// The byte form: at most 73 bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let ranked = self.rank != RankCoordinates::default();
        let mut flags = 0;
        if self.incarnation.is_some() {
            flags |= HAS_INCARNATION;
        }
        if ranked {
            flags |= HAS_RANK;
        }
        let mut bytes = vec![BYTES_VERSION, flags];
        if let Some(incarnation) = self.incarnation {
            bytes.extend(incarnation.bits().to_be_bytes());
        }
        if ranked {
            let RankCoordinates { tensor, pipeline } = self.rank;
            for number in [tensor.0, tensor.1, pipeline.0, pipeline.1] {
                bytes.extend(number.to_be_bytes());
            }
        }
        for socket in self.sockets.iter().take(ADDRESS_SOCKETS_MAX) {
            match socket {
                SocketAddr::V4(v4) => {
                    bytes.push(TAG_V4);
                    bytes.extend(v4.ip().octets());
                }
                SocketAddr::V6(v6) if v6.scope_id() == 0 => {
                    bytes.push(TAG_V6);
                    bytes.extend(v6.ip().octets());
                }
                SocketAddr::V6(v6) => {
                    bytes.push(TAG_V6_SCOPED);
                    bytes.extend(v6.ip().octets());
                    bytes.extend(v6.scope_id().to_be_bytes());
                }
            }
            bytes.extend(socket.port().to_be_bytes());
        }
        bytes
    }

    /// Parses the byte form.
    ///
    /// # Errors
    /// `InvalidArgument`, naming what is wrong with it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |why: &str| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{} bytes as an endpoint address", bytes.len()),
            )
            .because(why)
            .remedy("pass on what `EndpointAddress::to_bytes` gave, unchanged")
        };
        let mut reader = Reader(bytes);
        let [version, flags] = reader.take().ok_or_else(|| bad("it is too short"))?;
        if version != BYTES_VERSION {
            return Err(bad(&format!(
                "its form is version {version}, this build reads {BYTES_VERSION}"
            )));
        }
        if flags & !(HAS_INCARNATION | HAS_RANK) != 0 {
            return Err(bad("it has unknown flags"));
        }
        let short = || bad("it ends early");
        let incarnation = match flags & HAS_INCARNATION {
            0 => None,
            _ => Some(Incarnation::from_bits(u128::from_be_bytes(
                reader.take().ok_or_else(short)?,
            ))),
        };
        let mut rank = RankCoordinates::default();
        if flags & HAS_RANK != 0 {
            let mut number = || reader.take().map(u16::from_be_bytes).ok_or_else(short);
            rank.tensor = (number()?, number()?);
            rank.pipeline = (number()?, number()?);
        }
        let mut sockets = Vec::new();
        while let Some([tag]) = reader.take() {
            let ip: IpAddr = match tag {
                TAG_V4 => Ipv4Addr::from(reader.take::<4>().ok_or_else(short)?).into(),
                TAG_V6 | TAG_V6_SCOPED => Ipv6Addr::from(reader.take::<16>().ok_or_else(short)?).into(),
                _ => return Err(bad(&format!("it has a socket of unknown kind {tag}"))),
            };
            let scope = match tag {
                TAG_V6_SCOPED => u32::from_be_bytes(reader.take().ok_or_else(short)?),
                _ => 0,
            };
            let port = u16::from_be_bytes(reader.take().ok_or_else(short)?);
            sockets.push(match ip {
                IpAddr::V4(v4) => SocketAddr::from((v4, port)),
                IpAddr::V6(v6) => SocketAddrV6::new(v6, port, 0, scope).into(),
            });
        }
        let address = EndpointAddress {
            sockets,
            incarnation,
            rank,
        };
        address.check().map_err(|why| bad(&why))?;
        Ok(address)
    }

    /// What is wrong with it, if something is.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.sockets.len() > ADDRESS_SOCKETS_MAX {
            return Err(format!(
                "it has {} sockets, at most {ADDRESS_SOCKETS_MAX}",
                self.sockets.len()
            ));
        }
        if self.incarnation.is_none() && self.sockets.is_empty() {
            return Err("it names neither an incarnation nor a socket".into());
        }
        for (name, (rank, size)) in [("tensor", self.rank.tensor), ("pipeline", self.rank.pipeline)] {
            if rank >= size {
                return Err(format!("its {name}-parallel rank {rank} is not below the size {size}"));
            }
        }
        Ok(())
    }

    fn readable(&self) -> String {
        let mut text = String::with_capacity(ADDRESS_TEXT_MAX + 1);
        if let Some(incarnation) = self.incarnation {
            text += &format!("{READABLE}{incarnation}@");
        }
        for (index, socket) in self.sockets.iter().take(ADDRESS_SOCKETS_MAX).enumerate() {
            if index > 0 {
                text.push(',');
            }
            text += &without_flow_label(*socket).to_string();
        }
        for (letter, place) in [('t', self.rank.tensor), ('p', self.rank.pipeline)] {
            if place != (0, 1) {
                text += &format!(";{letter}{}/{}", place.0, place.1);
            }
        }
        text
    }
}

impl fmt::Display for EndpointAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let readable = self.readable();
        if readable.len() <= ADDRESS_TEXT_MAX {
            f.write_str(&readable)
        } else {
            write!(f, "{PACKED}{}", to_base32(&self.to_bytes()))
        }
    }
}

impl FromStr for EndpointAddress {
    type Err = Error;

    /// Parses the text form, or a bare `host:port`.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            let shown: String = text.chars().take(ADDRESS_TEXT_MAX).collect();
            Error::new(ErrorKind::InvalidArgument, format!("endpoint address {shown:?}"))
                .because(why)
                .remedy("pass what `Endpoint::address` printed, or `ip:port` (`[ip]:port` for IPv6)")
        };
        if text.len() > ADDRESS_TEXT_MAX {
            return Err(bad(&format!("it has {} bytes, at most {ADDRESS_TEXT_MAX}", text.len())));
        }
        if let Some(packed) = text.strip_prefix(PACKED) {
            let bytes = from_base32(packed).ok_or_else(|| bad("it is not base32"))?;
            return EndpointAddress::from_bytes(&bytes);
        }
        let (incarnation, rest) = match text.strip_prefix(READABLE) {
            None => (None, text),
            Some(tail) => {
                let (digits, rest) = tail.split_once('@').ok_or_else(|| bad("there is no `@`"))?;
                let incarnation =
                    parse_incarnation(digits).ok_or_else(|| bad("the incarnation is not 32 hex digits"))?;
                (Some(incarnation), rest)
            }
        };
        let mut fields = rest.split(';');
        let sockets = parse_sockets(fields.next().unwrap_or_default()).map_err(|why| bad(&why))?;
        let mut rank = RankCoordinates::default();
        let (mut tensor_seen, mut pipeline_seen) = (false, false);
        for field in fields {
            let (place, seen) = match field.as_bytes().first() {
                Some(b't') => (&mut rank.tensor, &mut tensor_seen),
                Some(b'p') => (&mut rank.pipeline, &mut pipeline_seen),
                _ => return Err(bad(&format!("{field:?} is not `t<rank>/<size>` or `p<rank>/<size>`"))),
            };
            if std::mem::replace(seen, true) {
                return Err(bad("it has a rank twice"));
            }
            *place = parse_rank(&field[1..]).ok_or_else(|| bad(&format!("{field:?} is not a rank and a size")))?;
        }
        let address = EndpointAddress {
            sockets,
            incarnation,
            rank,
        };
        address.check().map_err(|why| bad(&why))?;
        Ok(address)
    }
}

/// As text in formats for people, as bytes in others: both keep an IPv6 address's scope, which serde's own form of a
/// socket address loses.
impl Serialize for EndpointAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_bytes(&self.to_bytes())
        }
    }
}

impl<'de> Deserialize<'de> for EndpointAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            deserializer.deserialize_str(AddressVisitor)
        } else {
            deserializer.deserialize_bytes(AddressVisitor)
        }
    }
}

struct AddressVisitor;

impl Visitor<'_> for AddressVisitor {
    type Value = EndpointAddress;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an endpoint address")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<EndpointAddress, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<EndpointAddress, E> {
        EndpointAddress::from_bytes(bytes).map_err(E::custom)
    }
}

fn parse_incarnation(digits: &str) -> Option<Incarnation> {
    let hex = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let bits = u128::from_str_radix(digits, 16).ok().filter(|_| hex)?;
    Some(Incarnation::from_bits(bits))
}

fn parse_sockets(list: &str) -> Result<Vec<SocketAddr>, String> {
    if list.is_empty() {
        return Ok(Vec::new());
    }
    let parse = |socket: &str| {
        socket.parse().map(without_flow_label).map_err(|_| {
            format!(
                "{socket:?} is not an IP address and a port (names are not looked up: give the address they stand for)"
            )
        })
    };
    list.split(',').map(parse).collect()
}

fn parse_rank(text: &str) -> Option<(u16, u16)> {
    let (rank, size) = text.split_once('/')?;
    Some((parse_u16(rank)?, parse_u16(size)?))
}

/// Decimal digits only: `u16::from_str` takes a `+`.
fn parse_u16(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

fn without_flow_label(mut socket: SocketAddr) -> SocketAddr {
    if let SocketAddr::V6(v6) = &mut socket {
        v6.set_flowinfo(0);
    }
    socket
}

fn to_base32(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(5) * 8);
    let (mut held, mut bits) = (0u32, 0);
    for &byte in bytes {
        held = held << 8 | u32::from(byte);
        bits += 8;
        while bits >= 5 {
            bits -= 5;
            text.push(char::from(BASE32[(held >> bits) as usize & 31]));
        }
    }
    if bits > 0 {
        text.push(char::from(BASE32[(held << (5 - bits)) as usize & 31]));
    }
    text
}

/// Exactly what [`to_base32`] gives for some bytes.
fn from_base32(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 5 / 8);
    let (mut held, mut bits) = (0u32, 0);
    for byte in text.bytes() {
        let digit = BASE32.iter().position(|&letter| letter == byte)?;
        held = held << 5 | digit as u32;
        bits += 5;
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits) as u8);
        }
    }
    let padding = held & ((1 << bits) - 1);
    (bits < 5 && padding == 0).then_some(bytes)
}

/// Takes fixed numbers of bytes off the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*front)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(sockets: &[&str], incarnation: Option<u128>, rank: RankCoordinates) -> EndpointAddress {
        EndpointAddress {
            sockets: sockets.iter().map(|socket| socket.parse().unwrap()).collect(),
            incarnation: incarnation.map(Incarnation::from_bits),
            rank,
        }
    }

    #[test]
    fn the_text_is_stable() {
        let rank = RankCoordinates {
            tensor: (3, 4),
            pipeline: (0, 2),
        };
        let full = address(&["10.0.0.1:7700", "[fe80::1]:7700"], Some(0xabc), rank);
        let text = "kvx1:00000000000000000000000000000abc@10.0.0.1:7700,[fe80::1]:7700;t3/4;p0/2";
        assert_eq!(full.to_string(), text);
        assert_eq!(text.parse::<EndpointAddress>().unwrap(), full);
        let bare = address(&["127.0.0.1:7700"], None, RankCoordinates::default());
        assert_eq!("127.0.0.1:7700".parse::<EndpointAddress>().unwrap(), bare);
        assert_eq!(bare.to_string(), "127.0.0.1:7700");
    }

    #[test]
    fn the_longest_address_fits() {
        let rank = RankCoordinates {
            tensor: (65534, 65535),
            pipeline: (65534, 65535),
        };
        let socket = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295]:65535";
        let longest = address(&[socket, socket], Some(u128::MAX), rank);
        let (text, bytes) = (longest.to_string(), longest.to_bytes());
        assert!(text.len() <= ADDRESS_TEXT_MAX && text.starts_with(PACKED), "{text}");
        assert!(bytes.len() < 128);
        assert_eq!(text.parse::<EndpointAddress>().unwrap(), longest);
        assert_eq!(EndpointAddress::from_bytes(&bytes).unwrap(), longest);
    }

    #[test]
    fn nonsense_is_an_error_that_helps() {
        for text in [
            "",
            "localhost:7700",
            "10.0.0.1",
            "kvx1:abc@10.0.0.1:1",
            "kvx1:00000000000000000000000000000abc",
            "10.0.0.1:1;t4/4",
            "10.0.0.1:1;t0/1;t0/1",
            "10.0.0.1:1;x",
            "10.0.0.1:1;t+1/2",
            "10.0.0.1:1,10.0.0.1:2,10.0.0.1:3",
            "kvx1=a",
            "kvx1=!",
            "kvx2:00000000000000000000000000000abc@10.0.0.1:1",
        ] {
            let error = text.parse::<EndpointAddress>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
            assert!(error.to_string().contains("; pass"), "{error}");
        }
    }
}
