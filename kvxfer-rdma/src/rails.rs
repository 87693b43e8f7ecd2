//! Which ports of two endpoints are joined to rails.

use kvxfer_core::{Error, ErrorKind, Result};

use crate::advert::PortAdvert;
use crate::config::RdmaConfig;
use crate::topology::{RailPort, pair};

/// Pairs of ports, ours and theirs, by index in the adverts. Only ports of ours for which `wanted` holds are used.
///
/// # Errors
/// `Unsupported` if no pair can be made, with the reasons.
pub(crate) fn choose(
    ours: &[PortAdvert],
    theirs: &[PortAdvert],
    wanted: impl Fn(usize) -> bool,
    config: &RdmaConfig,
) -> Result<Vec<(u16, u16)>> {
    let own: Vec<usize> = (0..ours.len()).filter(|index| wanted(*index)).collect();
    let local: Vec<RailPort> = own.iter().map(|index| rail_port(&ours[*index])).collect();
    let remote: Vec<RailPort> = theirs.iter().map(rail_port).collect();
    let made = pair(&local, &remote, &config.rail_pairs);
    let mut reasons: Vec<String> = made.unpaired.iter().map(ToString::to_string).collect();
    let mut pairs = Vec::new();
    for pair in made.pairs {
        let (ours, theirs) = (&ours[own[pair.local]], &theirs[pair.remote]);
        if ours.ethernet == theirs.ethernet {
            pairs.push((own[pair.local] as u16, pair.remote as u16));
        } else {
            reasons.push(format!(
                "{} and {}: one is Ethernet, one InfiniBand",
                ours.text(),
                theirs.text()
            ));
        }
    }
    pairs.truncate(config.rails_max.into());
    for reason in &reasons {
        tracing::info!(reason, "a port is in no rail");
    }
    if pairs.is_empty() {
        return Err(Error::new(ErrorKind::Unsupported, "no rail between the two endpoints")
            .at("rdma")
            .because(reasons.join("; "))
            .remedy("set rdma.rail_pairs to pairs of ports that are on one network"));
    }
    Ok(pairs)
}

fn rail_port(port: &PortAdvert) -> RailPort {
    RailPort {
        name: format!("{}:{}", port.name, port.number),
        subnet: port.subnet,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Pairing;

    fn port(name: &str, ethernet: bool) -> PortAdvert {
        PortAdvert {
            device: 0,
            name: name.into(),
            number: 1,
            ethernet,
            lid: 0,
            gids: Vec::new(),
            subnet: None,
        }
    }

    #[test]
    fn only_wanted_ports_of_one_link_layer_are_joined() {
        let ours = [port("a0", true), port("a1", true), port("a2", false)];
        let theirs = [port("b0", true), port("b1", true)];
        let config = RdmaConfig {
            rail_pairs: Pairing::ByIndex,
            ..RdmaConfig::default()
        };
        assert_eq!(choose(&ours, &theirs, |_| true, &config).unwrap(), [(0, 0), (1, 1)]);
        assert_eq!(choose(&ours, &theirs, |own| own == 1, &config).unwrap(), [(1, 0)]);
        let error = choose(&ours, &theirs, |own| own == 2, &config).unwrap_err();
        assert!(error.to_string().contains("InfiniBand"), "{error}");
    }
}
