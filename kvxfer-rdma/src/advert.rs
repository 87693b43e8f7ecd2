//! What an endpoint tells its peers of its ports, in the handshake of the session.

use kvxfer_core::wire::limits::ADVERT_BYTES_MAX;
use kvxfer_core::{Error, ErrorKind, Incarnation, Result};
use serde::{Deserialize, Serialize};

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
    /// The GID it would use, best first.
    pub(crate) gid: Option<[u8; 16]>,
}

impl PortAdvert {
    /// The port, for people.
    pub(crate) fn text(&self) -> String {
        let address = self.gid.map_or_else(|| format!("lid {}", self.lid), |gid| crate::gid::text(&gid));
        format!("{}:{} ({address})", self.name, self.number)
    }
}

impl Advert {
    /// The device of a port.
    pub(crate) fn device_of(&self, port: u16) -> usize {
        self.ports.get(usize::from(port)).map_or(0, |port| port.device.into())
    }

    pub(crate) fn gid_of(&self, port: u16) -> Option<[u8; 16]> {
        self.ports.get(usize::from(port)).and_then(|port| port.gid)
    }

    pub(crate) fn port_text(&self, port: u16) -> String {
        self.ports
            .get(usize::from(port))
            .map_or_else(|| format!("port {port}"), |port| format!("{}:{}", port.name, port.number))
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
            gid: Some([7; 16]),
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
