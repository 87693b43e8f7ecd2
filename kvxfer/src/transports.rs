//! Which transports an endpoint has: what was asked for, what there is, and why not more.

use std::net::TcpStream;
use std::sync::Arc;

use kvxfer_core::flow::SlotTable;
use kvxfer_core::memory::Region;
use kvxfer_core::transport::{Counter, Transport};
use kvxfer_core::wire::lane::LaneHello;
use kvxfer_core::{Error, ErrorKind, Result};

use crate::config::Config;

/// An endpoint's transports, in order of preference.
pub(crate) struct Transports {
    list: Vec<Arc<dyn Transport>>,
    /// What was considered and not taken, and why.
    pub(crate) refused: Vec<(String, String)>,
}

impl Transports {
    /// Makes what the configuration names. With `auto`, what cannot be made is noted and left out.
    pub(crate) fn build(config: &Config, slots: &Arc<SlotTable>) -> Result<Transports> {
        let automatic = config.transports.iter().any(|name| name == "auto");
        let wanted: Vec<&str> = match automatic {
            true => vec!["rdma", "tcp"],
            false => config.transports.iter().map(String::as_str).collect(),
        };
        let mut transports = Transports {
            list: Vec::new(),
            refused: Vec::new(),
        };
        for name in wanted {
            if transports.list.iter().any(|have| have.name() == name) {
                return Err(
                    Error::new(ErrorKind::InvalidArgument, format!("transports names {name} twice"))
                        .remedy("name each once"),
                );
            }
            match build_one(name, config, slots) {
                Ok(transport) => transports.list.push(transport),
                Err(error) if automatic => transports.refused.push((name.to_owned(), error.to_string())),
                Err(error) => {
                    transports.shutdown();
                    return Err(error);
                }
            }
        }
        if transports.list.is_empty() {
            return Err(Error::new(ErrorKind::Unsupported, "no transport can be used")
                .because(format!("{:?}", transports.refused))
                .remedy("see the causes"));
        }
        let taken: Vec<&str> = transports.list.iter().map(|transport| transport.name()).collect();
        tracing::info!(?taken, refused = ?transports.refused, "transports");
        Ok(transports)
    }

    pub(crate) fn by_name(&self, name: &str) -> Result<&Arc<dyn Transport>> {
        self.list
            .iter()
            .find(|transport| transport.name() == name)
            .ok_or_else(|| {
                Error::new(ErrorKind::Unsupported, format!("transport {name}")).because("it is not open here")
            })
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.list.iter().map(|transport| transport.name()).collect()
    }

    /// Names and adverts, for the handshake.
    pub(crate) fn adverts(&self) -> Vec<(String, Vec<u8>)> {
        self.list
            .iter()
            .map(|transport| (transport.name().to_owned(), transport.advertise()))
            .collect()
    }

    pub(crate) fn register(&self, region: &Arc<Region>) -> Result<()> {
        self.list.iter().try_for_each(|transport| transport.register(region))
    }

    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.list.iter().flat_map(|transport| transport.counters()).collect()
    }

    /// Gives an accepted lane to its transport.
    pub(crate) fn adopt(&self, _stream: TcpStream, _hello: LaneHello) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "a lane").because("the tcp transport is not open here"))
    }

    /// Stops all of them; bounded by each.
    pub(crate) fn shutdown(&self) {
        for transport in &self.list {
            transport.shutdown();
        }
    }
}

fn build_one(name: &str, _config: &Config, _slots: &Arc<SlotTable>) -> Result<Arc<dyn Transport>> {
    match name {
        "rdma" => Err(Error::new(ErrorKind::Unsupported, "transport rdma")
            .because("this build has no RDMA transport")
            .remedy("leave it out of `transports`, or use \"auto\", which takes tcp and says so")),
        _ => Err(Error::new(ErrorKind::Unsupported, format!("transport {name}"))
            .because("this build has no transport of that name")
            .remedy("use \"tcp\" or \"auto\"")),
    }
}
