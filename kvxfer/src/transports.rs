//! Which transports an endpoint has: what was asked for, what there is, and why not more.

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvxfer_core::flow::SlotTable;
use kvxfer_core::machine::TransportOffer;
use kvxfer_core::memory::{Exported, Region};
use kvxfer_core::transport::{Counter, RegionAccess, Registered, Transport};
use kvxfer_core::wire::lane::LaneHello;
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_rdma::{Pairing, RdmaConfig, RdmaTransport};
use kvxfer_tcp::{TcpConfig, TcpTransport};

use crate::config::{Config, split_pair};

/// An endpoint's transports, in order of preference.
pub(crate) struct Transports {
    list: Vec<Arc<dyn Transport>>,
    /// The one that takes accepted connections; also in `list`.
    tcp: Option<Arc<TcpTransport>>,
    /// What was considered and not taken, and why.
    pub(crate) refused: Vec<(String, String)>,
}

/// What the transports made of a pool's regions. Dropped once the pool is out of use.
#[derive(Default)]
pub(crate) struct PoolRegistration {
    /// For peers, by transport.
    pub(crate) keys: Vec<(String, Vec<u8>)>,
    /// What devices refused and what is done instead, for people.
    pub(crate) notes: Vec<String>,
    /// What others on this host may have mapped.
    pub(crate) exported: Vec<Arc<dyn Exported>>,
    holds: Vec<Box<dyn std::any::Any + Send + Sync>>,
}

impl PoolRegistration {
    /// Nothing but what others have not let go of yet.
    pub(crate) fn of_left_over(exported: Vec<Arc<dyn Exported>>) -> PoolRegistration {
        PoolRegistration {
            exported,
            ..PoolRegistration::default()
        }
    }
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
            tcp: None,
            refused: Vec::new(),
        };
        for name in wanted {
            if transports.list.iter().any(|have| have.name() == name) {
                return Err(
                    Error::new(ErrorKind::InvalidArgument, format!("transports names {name} twice"))
                        .remedy("name each once"),
                );
            }
            match transports.add(name, config, slots) {
                Ok(()) => {}
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

    /// What peers are offered, for the handshake.
    pub(crate) fn offers(&self) -> Vec<TransportOffer> {
        let offer = |transport: &Arc<dyn Transport>| TransportOffer {
            name: transport.name().to_owned(),
            advert: transport.advertise(),
            one_sided: transport.capabilities().one_sided,
        };
        self.list.iter().map(offer).collect()
    }

    /// Makes a pool's regions known to all transports.
    pub(crate) fn register(&self, regions: &[Arc<Region>], access: RegionAccess) -> Result<PoolRegistration> {
        let mut made = PoolRegistration::default();
        for transport in &self.list {
            let Registered {
                keys,
                notes,
                exported,
                hold,
            } = transport.register(regions, access)?;
            made.notes
                .extend(notes.into_iter().map(|note| format!("{}: {note}", transport.name())));
            if !keys.is_empty() {
                made.keys.push((transport.name().to_owned(), keys));
            }
            made.exported.extend(exported);
            made.holds.push(hold);
        }
        Ok(made)
    }

    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.list.iter().flat_map(|transport| transport.counters()).collect()
    }

    /// Gives an accepted lane to its transport.
    pub(crate) fn adopt(&self, stream: TcpStream, hello: LaneHello) -> Result<()> {
        match &self.tcp {
            Some(tcp) => tcp.adopt(stream, hello),
            None => Err(Error::new(ErrorKind::Unsupported, "a lane").because("the tcp transport is not open here")),
        }
    }

    /// Stops all of them; bounded by each.
    pub(crate) fn shutdown(&self) {
        for transport in &self.list {
            transport.shutdown();
        }
    }

    fn add(&mut self, name: &str, config: &Config, slots: &Arc<SlotTable>) -> Result<()> {
        match name {
            "tcp" => {
                let tcp = Arc::new(TcpTransport::new(tcp_config(config), Arc::clone(slots))?);
                self.list.push(Arc::clone(&tcp) as _);
                self.tcp = Some(tcp);
                Ok(())
            }
            "rdma" => {
                self.list
                    .push(Arc::new(RdmaTransport::new(rdma_config(config), Arc::clone(slots))?));
                Ok(())
            }
            _ => Err(Error::new(ErrorKind::Unsupported, format!("transport {name}"))
                .because("this build has no transport of that name")
                .remedy("use \"tcp\" or \"auto\"")),
        }
    }
}

fn rdma_config(config: &Config) -> RdmaConfig {
    let settings = &config.rdma;
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    RdmaConfig {
        library: (!settings.library.is_empty()).then(|| settings.library.clone().into()),
        devices: config.devices.clone(),
        rails_max: settings.rails_max,
        rail_pairs: rail_pairs(&settings.rail_pairs),
        gid_index: settings.gid_index,
        partition_key: settings.partition_key,
        service_level: settings.service_level,
        traffic_class: settings.traffic_class,
        hop_limit: settings.hop_limit,
        mtu: settings.mtu,
        timeout: settings.timeout,
        retry_count: settings.retry_count,
        rnr_retry: settings.rnr_retry,
        queue_depth: settings.queue_depth,
        receive_depth: settings.receive_depth,
        window_bytes_min: settings.window_bytes_min,
        window_bytes_max: settings.window_bytes_max,
        progress: Duration::from_millis(settings.progress_ms),
        outage_limit: Duration::from_millis(settings.outage_ms),
        revoke: Duration::from_millis(settings.revoke_ms),
        connect_timeout: Duration::from_millis(config.deadlines.connect_ms),
        setup_limit: Duration::from_millis(config.deadlines.connect_ms),
        backoff_max: Duration::from_millis(config.deadlines.backoff_max_ms),
        links_max: config.limits.peers_max as usize,
        registration_threads: settings.registration_threads.into(),
        registration_bytes_max: settings.registration_bytes_max,
        staging_bytes_max: settings.staging_bytes_max,
        // As with tcp: spinning takes a core that must be to spare.
        spin: match cores > 3 {
            true => Duration::from_micros(settings.spin_us.into()),
            false => Duration::ZERO,
        },
        ..RdmaConfig::default()
    }
}

/// Checked when the configuration was made: a word, or pairs.
fn rail_pairs(settings: &[String]) -> Pairing {
    match settings {
        [word] if word == "auto" => Pairing::Auto,
        [word] if word == "index" => Pairing::ByIndex,
        [word] if word == "subnet" => Pairing::BySubnet,
        pairs => Pairing::Explicit(
            pairs
                .iter()
                .filter_map(|pair| split_pair(pair))
                .map(|(own, their)| (own.to_owned(), their.to_owned()))
                .collect(),
        ),
    }
}

fn tcp_config(config: &Config) -> TcpConfig {
    let settings = &config.tcp;
    let defaults = TcpConfig::default();
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let data_threads = match settings.data_threads {
        0 => (cores / 2).clamp(1, 8),
        threads => usize::from(threads),
    };
    // Spinning steals the core that the application or the peer needs, unless there are cores to spare.
    let spin = match cores > data_threads + 2 {
        true => Duration::from_micros(settings.spin_us.into()),
        false => Duration::ZERO,
    };
    TcpConfig {
        data_threads,
        lanes: settings.lanes,
        spin,
        send_buffer_bytes: settings.send_buffer_bytes as usize,
        receive_buffer_bytes: settings.receive_buffer_bytes as usize,
        window_bytes_min: settings.window_bytes_min,
        window_bytes_max: settings.window_bytes_max,
        connect_timeout: Duration::from_millis(config.deadlines.connect_ms),
        backoff_max: Duration::from_millis(config.deadlines.backoff_max_ms),
        links_max: config.limits.peers_max as usize,
        ..defaults
    }
}
