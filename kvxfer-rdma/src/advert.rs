//! What an endpoint tells its peers of its ports, in the handshake of the session.

use kvxfer_core::wire::limits::ADVERT_BYTES_MAX;
use kvxfer_core::{Error, ErrorKind, Incarnation, Result};
use serde::{Deserialize, Serialize};

use crate::gid::{self, PeerGid};
use crate::topology::Subnet;
use crate::verbs::GidKind;

const VERSION: u8 = 1;
/// Ports in an advert, at most.
pub(crate) const PORTS_MAX: usize = 16;

/// An endpoint's usable ports, best first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Advert {
    pub(crate) ports: Vec<PortAdvert>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PortAdvert {
    /// Index of its device in the keys of pools.
    pub(crate) device: u8,
    /// The device's name, for people and for explicit pairs.
    pub(crate) name: String,
    pub(crate) number: u8,
    /// RoCE, else InfiniBand.
    pub(crate) ethernet: bool,
    pub(crate) lid: u16,
    /// Its addresses, best first, at most [`GIDS_MAX`].
    pub(crate) gids: Vec<AdvertGid>,
    /// The network of the first.
    pub(crate) subnet: Option<Subnet>,
}

/// An address of a port: the GID, and whether it is RoCE of version 1 (or InfiniBand), or 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AdvertGid {
    pub(crate) gid: [u8; 16],
    pub(crate) version_2: bool,
}

/// Addresses of a port in an advert, at most.
pub(crate) const GIDS_MAX: usize = 3;

impl PortAdvert {
    fn peer_gids(&self) -> Vec<PeerGid> {
        let kind = |version_2| match (self.ethernet, version_2) {
            (false, _) => GidKind::Ib,
            (true, false) => GidKind::RoceV1,
            (true, true) => GidKind::RoceV2,
        };
        let gid = |gid: &AdvertGid| PeerGid {
            gid: gid.gid,
            kind: kind(gid.version_2),
        };
        self.gids.iter().map(gid).collect()
    }

    /// The port, for people.
    pub(crate) fn text(&self) -> String {
        let first = self.gids.first();
        let address = first.map_or_else(|| format!("lid {}", self.lid), |first| gid::show(first.gid));
        format!("{}:{} ({address})", self.name, self.number)
    }
}

impl Advert {
    /// The device of a port.
    pub(crate) fn device_of(&self, port: u16) -> usize {
        self.ports.get(usize::from(port)).map_or(0, |port| port.device.into())
    }

    /// The addresses of a port.
    pub(crate) fn gids_of(&self, port: u16) -> Vec<PeerGid> {
        let port = self.ports.get(usize::from(port));
        port.map_or_else(Vec::new, PortAdvert::peer_gids)
    }

    pub(crate) fn port_text(&self, port: u16) -> String {
        self.ports.get(usize::from(port)).map_or_else(
            || format!("port {port}"),
            |port| format!("{}:{}", port.name, port.number),
        )
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut advert = self.clone();
        loop {
            match postcard::to_extend(&advert, vec![VERSION]) {
                Ok(bytes) if bytes.len() <= ADVERT_BYTES_MAX => return bytes,
                // Fewer rails rather than none.
                _ if advert.ports.pop().is_some() => {}
                _ => return vec![VERSION, 0],
            }
        }
    }

    pub(crate) fn parse(peer: Incarnation, bytes: &[u8]) -> Result<Advert> {
        let bad = |why: String| {
            Error::new(ErrorKind::Protocol, "the rdma advert of a peer")
                .at(peer.to_string())
                .because(why)
                .remedy("run the same version of kvxfer on both sides")
        };
        let advert: Advert = match bytes {
            // Later versions may append fields.
            [version, rest @ ..] if *version >= VERSION => postcard::take_from_bytes(rest)
                .map(|(advert, _)| advert)
                .map_err(|error| bad(error.to_string()))?,
            _ => return Err(bad("its version is unknown".into())),
        };
        if let Some(port) = advert.ports.iter().find(|port| port.gids.len() > GIDS_MAX) {
            return Err(bad(format!("{} has {} addresses", port.name, port.gids.len())));
        }
        if advert.ports.is_empty() || advert.ports.len() > PORTS_MAX {
            return Err(bad(format!("it has {} ports", advert.ports.len())));
        }
        Ok(advert)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adverts_keep_their_cap() {
        let port = |index: usize| PortAdvert {
            device: index as u8,
            name: format!("mlx5_with_a_long_name_{index}_{}", "x".repeat(40)),
            number: 1,
            ethernet: true,
            lid: 0,
            gids: vec![
                AdvertGid {
                    gid: [7; 16],
                    version_2: true,
                };
                GIDS_MAX
            ],
            subnet: Some(Subnet::new([7; 16], 64)),
        };
        let advert = Advert {
            ports: (0..PORTS_MAX).map(port).collect(),
        };
        let bytes = advert.encode();
        assert!(bytes.len() <= ADVERT_BYTES_MAX);
        let parsed = Advert::parse(Incarnation::from_bits(1), &bytes).unwrap();
        assert!(!parsed.ports.is_empty() && advert.ports.starts_with(&parsed.ports));
        for end in 0..bytes.len() {
            let _ = Advert::parse(Incarnation::from_bits(1), &bytes[..end]);
        }
        assert!(Advert::parse(Incarnation::from_bits(1), &[0]).is_err());
        assert!(Advert::parse(Incarnation::from_bits(1), &[1, 0]).is_err());
    }
}
