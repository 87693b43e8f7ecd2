//! By which transport and devices the endpoints of a measurement reach each other.

use std::net::{IpAddr, SocketAddr};

use kvxfer::{Config, Endpoint};
use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// One side's choice of transport, devices and rails.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Way {
    /// A transport by name, which is then taken or an error; or `auto`.
    pub(crate) transport: String,
    /// Devices that may be used; all if empty.
    pub(crate) devices: Vec<String>,
    /// Which of ours goes with which of theirs; left to the library if empty.
    pub(crate) pairs: Vec<String>,
    /// Rails, at most; the library's own number if not given.
    pub(crate) rails: Option<u16>,
}

impl Way {
    /// A transport by name, with all devices.
    pub(crate) fn by(transport: &str) -> Way {
        Way {
            transport: transport.to_owned(),
            ..Way::default()
        }
    }

    /// Ours and theirs from `--transport`, `--device` and `--rails`. A device is `rxe0` for both sides, or
    /// `rxe0=rxe1`: ours and theirs.
    pub(crate) fn both(transport: &str, devices: &[String], rails: Option<u16>) -> Result<(Way, Way)> {
        let mut ours = Way {
            rails,
            ..Way::by(transport)
        };
        let mut theirs = ours.clone();
        for device in devices {
            match device.split_once('=') {
                None => {
                    ours.devices.push(device.clone());
                    theirs.devices.push(device.clone());
                }
                Some((our, their)) if !our.is_empty() && !their.is_empty() && !their.contains('=') => {
                    ours.devices.push(our.to_owned());
                    theirs.devices.push(their.to_owned());
                    ours.pairs.push(format!("{our}={their}"));
                    theirs.pairs.push(format!("{their}={our}"));
                }
                Some(_) => {
                    return Err(Error::new(ErrorKind::InvalidArgument, format!("--device {device}"))
                        .because("it is neither a device nor two with an equals sign between them")
                        .remedy("give a device for both sides (mlx5_0), or ours and theirs (rxe0=rxe1)"));
                }
            }
        }
        if !ours.pairs.is_empty() && ours.pairs.len() != ours.devices.len() {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("--device {}", devices.join(",")))
                    .because("some are pairs and some are not")
                    .remedy("write all as ours=theirs, or none"),
            );
        }
        for way in [&mut ours, &mut theirs] {
            way.devices.sort_unstable();
            way.devices.dedup();
        }
        Ok((ours, theirs))
    }

    /// An endpoint that goes this way.
    pub(crate) fn endpoint(&self, name: &str, listen: IpAddr, insecure: bool) -> Result<Endpoint> {
        let mut config = Config::from_env()?;
        if insecure {
            config.security.off_loopback = "insecure-allowed".into();
        }
        if !self.devices.is_empty() {
            config.devices = self.devices.clone();
        }
        if !self.pairs.is_empty() {
            config.rdma.rail_pairs = self.pairs.clone();
        }
        if let Some(rails) = self.rails {
            config.rdma.rails_max = rails;
        }
        Endpoint::builder()
            .config(config)
            .name(name)
            .listen(SocketAddr::new(listen, 0))
            .transports([self.transport.as_str()])
            .build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_for_both_sides_or_for_each() {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (ours, theirs) = Way::both("rdma", &names(&["mlx5_0", "mlx5_1"]), Some(2)).unwrap();
        assert_eq!(ours, theirs);
        assert_eq!(ours.devices, ["mlx5_0", "mlx5_1"]);
        assert!(ours.pairs.is_empty() && ours.rails == Some(2));
        let (ours, theirs) = Way::both("rdma", &names(&["rxe2=rxe3", "rxe0=rxe1"]), None).unwrap();
        assert_eq!(ours.devices, ["rxe0", "rxe2"]);
        assert_eq!(theirs.devices, ["rxe1", "rxe3"]);
        assert_eq!(ours.pairs, ["rxe2=rxe3", "rxe0=rxe1"]);
        assert_eq!(theirs.pairs, ["rxe3=rxe2", "rxe1=rxe0"]);
        for bad in [&["a=b=c"][..], &["=b"], &["a="], &["a=b", "c"]] {
            let error = Way::both("rdma", &names(bad), None).unwrap_err().to_string();
            assert!(error.contains("--device") && error.contains(bad[0]), "{error}");
        }
    }
}
