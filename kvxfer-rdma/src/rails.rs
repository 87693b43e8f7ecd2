//! Which ports of two endpoints are joined to rails.

use kvxfer_core::{Error, ErrorKind, Result};

use crate::advert::PortAdvert;
use crate::config::{RailPairs, RdmaConfig};

/// Pairs of ports, ours and theirs, by index in the adverts.
///
/// # Errors
/// `Unsupported` if no pair can be made, with the reason.
pub(crate) fn pair(ours: &[PortAdvert], theirs: &[PortAdvert], config: &RdmaConfig) -> Result<Vec<(u16, u16)>> {
    let mut pairs = match &config.rail_pairs {
        RailPairs::Index => by_index(ours, theirs),
        RailPairs::Subnet => by_subnet(ours, theirs),
        RailPairs::Explicit(names) => by_name(ours, theirs, names),
        RailPairs::Auto => match by_subnet(ours, theirs) {
            pairs if pairs.len() == ours.len().min(theirs.len()) => pairs,
            _ => by_index(ours, theirs),
        },
    };
    pairs.truncate(config.rails_max.into());
    if pairs.is_empty() {
        let list = |ports: &[PortAdvert]| ports.iter().map(PortAdvert::text).collect::<Vec<_>>().join(", ");
        return Err(Error::new(ErrorKind::Unsupported, "no rail between the two endpoints")
            .at("rdma")
            .because(format!(
                "no ports go together: here [{}], there [{}], paired by {:?}",
                list(ours),
                list(theirs),
                config.rail_pairs
            ))
            .remedy("set rdma.rail_pairs to pairs of ports that are on one network"));
    }
    Ok(pairs)
}

fn same_layer(ours: &PortAdvert, theirs: &PortAdvert) -> bool {
    ours.ethernet == theirs.ethernet
}

fn by_index(ours: &[PortAdvert], theirs: &[PortAdvert]) -> Vec<(u16, u16)> {
    ours.iter()
        .zip(theirs)
        .enumerate()
        .filter(|(_, (own, their))| same_layer(own, their))
        .map(|(index, _)| (index as u16, index as u16))
        .collect()
}

/// Each of our ports with the first of theirs in the same subnet that is not taken.
fn by_subnet(ours: &[PortAdvert], theirs: &[PortAdvert]) -> Vec<(u16, u16)> {
    let mut taken = vec![false; theirs.len()];
    let mut pairs = Vec::new();
    for (own, port) in ours.iter().enumerate() {
        let Some(subnet) = subnet(port) else { continue };
        let found = theirs.iter().enumerate().position(|(index, their)| {
            !taken[index] && same_layer(port, their) && self::subnet(their) == Some(subnet)
        });
        if let Some(their) = found {
            taken[their] = true;
            pairs.push((own as u16, their as u16));
        }
    }
    pairs
}

/// What tells subnets apart: the first 24 bits of an IPv4 address, the first 64 of an IPv6 address or InfiniBand GID.
fn subnet(port: &PortAdvert) -> Option<[u8; 15]> {
    let gid = port.gid?;
    let mapped = gid[..10] == [0; 10] && gid[10..12] == [0xff, 0xff];
    let kept = if mapped { 15 } else { 8 };
    let mut subnet = [0; 15];
    subnet[..kept].copy_from_slice(&gid[..kept]);
    Some(subnet)
}

fn by_name(ours: &[PortAdvert], theirs: &[PortAdvert], names: &[(String, String)]) -> Vec<(u16, u16)> {
    let find = |ports: &[PortAdvert], name: &str| {
        ports
            .iter()
            .position(|port| port.name == name || format!("{}:{}", port.name, port.number) == name)
    };
    names
        .iter()
        .filter_map(|(own, their)| Some((find(ours, own)? as u16, find(theirs, their)? as u16)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, address: [u8; 4]) -> PortAdvert {
        let mut gid = [0; 16];
        gid[10] = 0xff;
        gid[11] = 0xff;
        gid[12..].copy_from_slice(&address);
        PortAdvert {
            device: 0,
            name: name.into(),
            number: 1,
            ethernet: true,
            lid: 0,
            gid: Some(gid),
        }
    }

    #[test]
    fn subnets_go_before_order_and_explicit_pairs_before_both() {
        let ours = [port("a0", [10, 0, 1, 1]), port("a1", [10, 0, 2, 1])];
        let theirs = [port("b0", [10, 0, 2, 9]), port("b1", [10, 0, 1, 9])];
        let config = |rail_pairs| RdmaConfig {
            rail_pairs,
            ..RdmaConfig::default()
        };
        let made = |pairs| pair(&ours, &theirs, &config(pairs)).unwrap();
        assert_eq!(made(RailPairs::Auto), [(0, 1), (1, 0)]);
        assert_eq!(made(RailPairs::Index), [(0, 0), (1, 1)]);
        let named = vec![("a1".to_owned(), "b1:1".to_owned())];
        assert_eq!(made(RailPairs::Explicit(named)), [(1, 1)]);
        let none = RailPairs::Explicit(vec![("a1".to_owned(), "c".to_owned())]);
        assert!(pair(&ours, &theirs, &config(none)).unwrap_err().to_string().contains("b0"));
    }

    #[test]
    fn link_layers_are_not_mixed() {
        let ours = [port("a0", [10, 0, 1, 1])];
        let mut theirs = [port("b0", [10, 0, 1, 2])];
        theirs[0].ethernet = false;
        assert!(pair(&ours, &theirs, &RdmaConfig::default()).is_err());
    }
}
