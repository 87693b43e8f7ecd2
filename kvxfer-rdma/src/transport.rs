//! The transport: its devices, their engines, its links.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use kvxfer_core::flow::SlotTable;
use kvxfer_core::memory::Region;
use kvxfer_core::mutants;
use kvxfer_core::transport::{
    Capabilities, Counter, Link, LinkPeer, LinkWatcher, Links, RegionAccess, Registered, Transport,
};
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::advert::{Advert, PORTS_MAX, PortAdvert};
use crate::config::RdmaConfig;
use crate::device::Device;
use crate::engine::{Engine, EngineShared, Task};
use crate::link::{LinkCore, RailPlace, RdmaLink};
use crate::probe::{self, Level, ProbeOptions};
use crate::rails;
use crate::registry::{Registry, RegistryOptions};
use crate::staging::Staging;
use crate::topology::sysfs::{host_memory_place, nic_place};
use crate::topology::{Candidate, MemoryPlace, Spread, interface_subnets, rank};
use crate::verbs::Context;

/// The RDMA transport. See the crate's documentation.
pub struct RdmaTransport {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What links and engines share.
pub(crate) struct Shared {
    pub(crate) config: Arc<RdmaConfig>,
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) engines: Box<[Arc<EngineShared>]>,
    pub(crate) registry: Registry,
    pub(crate) ports: Vec<PortAdvert>,
    links: Mutex<Links<LinkCore>>,
    next_link: AtomicU64,
}

impl RdmaTransport {
    /// Opens all usable devices and starts an engine for each.
    ///
    /// # Errors
    /// `InvalidArgument` for settings out of their bounds; `Unsupported` with the reasons if there is no verbs library,
    /// no device, or none that can be used; `ResourceExhausted` for what the system or a device refuses.
    pub fn new(config: RdmaConfig, slots: Arc<SlotTable>) -> Result<RdmaTransport> {
        config.check()?;
        let config = Arc::new(config);
        let engines = open_devices(&config)?;
        let interfaces = interface_subnets();
        let ports: Vec<PortAdvert> = engines
            .iter()
            .flat_map(|engine| engine.device.adverts(&interfaces))
            .collect();
        let domains = engines.iter().map(|engine| engine.device.domain.clone()).collect();
        let registry = Registry::new(
            domains,
            RegistryOptions {
                registration_threads: config.registration_threads,
                chunk_bytes_max: config.registration_bytes_max.unwrap_or(u64::MAX),
                ..RegistryOptions::default()
            },
        )?;
        let shared = Arc::new(Shared {
            links: Mutex::new(Links::new("rdma", config.links_max)),
            config,
            slots,
            engines: engines.into(),
            registry,
            ports,
            next_link: AtomicU64::new(0),
        });
        let transport = RdmaTransport {
            shared: shared.clone(),
            threads: Mutex::default(),
        };
        #[cfg(feature = "mutants")]
        let mutant = mutants::get();
        #[cfg(not(feature = "mutants"))]
        let mutant: Option<mutants::Mutant> = None;
        for engine in &shared.engines {
            let device = engine.device.name.clone();
            let engine = Engine::new(engine.clone(), shared.clone())?;
            // If this fails, dropping `transport` ends the threads that were started.
            let thread = std::thread::Builder::new()
                .name(format!("kvx-rdma-{device}"))
                .spawn(move || engine.run(mutant))
                .map_err(|error| {
                    Error::new(ErrorKind::ResourceExhausted, "spawning an engine's thread")
                        .at(device)
                        .because(error.to_string())
                        .remedy("raise the limit of threads (`ulimit -u`)")
                })?;
            transport.threads.lock().push(thread);
        }
        Ok(transport)
    }

    /// Links that have not ended.
    pub fn links(&self) -> usize {
        self.shared.links.lock().len()
    }

    /// The ports in use, for people: device, port and address.
    pub fn ports(&self) -> Vec<String> {
        self.shared.ports.iter().map(PortAdvert::text).collect()
    }
}

/// Opens the devices that can be used, and says why not the others.
fn open_devices(config: &Arc<RdmaConfig>) -> Result<Vec<Arc<EngineShared>>> {
    let found = probe::probe(&ProbeOptions {
        library: config.library.clone(),
        devices: config.devices.clone(),
        gid_index: config.gid_index,
    });
    for line in found.lines() {
        match line.level {
            Level::Refused => tracing::warn!("{line}"),
            _ => tracing::debug!("{line}"),
        }
    }
    if let Some(error) = found.refusal() {
        return Err(error);
    }
    let mut usable: Vec<(&Context, Vec<u8>)> = Vec::new();
    for (_, facts, port) in found.usable() {
        match usable.last_mut() {
            Some((context, ports)) if context.name() == facts.context.name() => ports.push(port.number),
            _ => usable.push((&facts.context, vec![port.number])),
        }
    }
    let mut engines: Vec<Arc<EngineShared>> = Vec::new();
    let mut refused: Vec<String> = Vec::new();
    let mut next = 0u16;
    for (context, numbers) in usable {
        if usize::from(next) + numbers.len() > PORTS_MAX {
            refused.push(format!("{}: more than {PORTS_MAX} ports", context.name()));
            continue;
        }
        let ports = (next..).zip(numbers.iter().copied()).collect();
        match Device::new(engines.len(), context.clone(), ports, config)
            .and_then(|device| EngineShared::new(device, config))
        {
            Ok(engine) => {
                next += numbers.len() as u16;
                engines.push(engine);
            }
            Err(error) => {
                tracing::warn!(device = context.name(), %error, "a device is not used");
                refused.push(error.to_string());
            }
        }
    }
    if engines.is_empty() {
        return Err(Error::new(ErrorKind::Unsupported, "no RDMA device could be opened")
            .because(refused.join("; "))
            .remedy("run `kvxfer-bench doctor`"));
    }
    Ok(engines)
}

impl Transport for RdmaTransport {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            staged: true,
        }
    }

    fn register(&self, regions: &[Arc<Region>], access: RegionAccess) -> Result<Registered> {
        self.shared.registry.register(regions, access)
    }

    fn advertise(&self) -> Vec<u8> {
        // As they are now: addresses come and go.
        let interfaces = interface_subnets();
        let engines = self.shared.engines.iter();
        let ports = engines.flat_map(|engine| engine.device.adverts(&interfaces));
        Advert {
            ports: ports.take(PORTS_MAX).collect(),
        }
        .encode()
    }

    fn connect(&self, peer: LinkPeer, events: Arc<dyn LinkWatcher>) -> Result<Arc<dyn Link>> {
        let shared = &self.shared;
        let advert = Advert::parse(peer.incarnation, &peer.advert)?;
        let pairs = match peer.dials {
            true => {
                let near = shared.near_ports();
                rails::choose(
                    &shared.ports,
                    &advert.ports,
                    |port| near.contains(&port),
                    &shared.config,
                )?
            }
            false => Vec::new(),
        };
        let core = shared.links.lock().begin(&peer, || {
            let id = shared.next_link.fetch_add(1, Ordering::Relaxed);
            LinkCore::new(id, peer.clone(), advert, shared.clone(), events)
        })?;
        for (rail, (own_port, peer_port)) in core.rails.iter().zip(pairs) {
            let Some(engine) = shared.engine_of_port(own_port) else {
                continue;
            };
            let place = RailPlace {
                engine,
                own_port,
                peer_port,
            };
            core.attach(rail, place);
            core.kick(rail);
        }
        core.engine(0).push(Task::Watch(core.clone()));
        Ok(Arc::new(RdmaLink { core }))
    }

    fn counters(&self) -> Vec<Counter> {
        let mut out = Vec::new();
        let links = self.shared.links.lock().all();
        let gauge = |name, value| Counter::of_transport(name, "rdma", value);
        out.push(gauge("links", links.len()));
        out.push(gauge("rdma_regions", self.shared.registry.len()));
        let staging = |of: fn(&Staging) -> usize| self.shared.engines.iter().map(|engine| of(&engine.staging)).sum();
        out.push(gauge("staging_allocated_bytes", staging(Staging::bytes)));
        out.push(gauge("staging_buffers_in_use", staging(Staging::in_use)));
        out.push(gauge(
            "rdma_admitted_slots",
            links.iter().map(|link| link.inbound.count()).sum(),
        ));
        for link in links {
            let peer = link.peer.incarnation.to_string();
            for rail in link.rails.iter().filter(|rail| rail.place.get().is_some()) {
                rail.counters.report(&peer, &rail.index.to_string(), &mut out);
            }
        }
        out
    }

    fn shutdown(&self) {
        let links = self.shared.links.lock().close();
        for link in &links {
            link.begin_close();
        }
        // Queue pairs are given up in order, which takes as long as a fence; after that as they are.
        let limit = crate::clock::now() + self.shared.config.fence_limit * 2;
        while self.links() > 0 && crate::clock::now() < limit && !self.on_engine() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        for engine in &self.shared.engines {
            engine.stop();
        }
        let this = std::thread::current().id();
        for thread in self.threads.lock().drain(..) {
            // A watcher may hold the last handle to the transport and drop it on an engine's thread.
            if thread.thread().id() != this && thread.join().is_err() {
                tracing::error!("an engine's thread had panicked");
            }
        }
        // What the engines could not end in time.
        self.shared.links.lock().clear();
    }
}

impl RdmaTransport {
    fn on_engine(&self) -> bool {
        let this = std::thread::current().id();
        self.threads.lock().iter().any(|thread| thread.thread().id() == this)
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    /// The engine that has a port of our advert.
    pub(crate) fn engine_of_port(&self, port: u16) -> Option<usize> {
        self.engines
            .iter()
            .position(|engine| engine.device.port_number(port).is_some())
    }

    /// Ports that are near the memory registered so far, by index in our advert. All, if there is none.
    fn near_ports(&self) -> Vec<usize> {
        let regions: Vec<(MemoryPlace, u64)> = self
            .registry
            .regions()
            .iter()
            .map(|region| (host_memory_place(region.address(), region.length()), region.length()))
            .collect();
        let candidate = |port: &PortAdvert| {
            let device = &self.engines[usize::from(port.device)].device;
            Candidate {
                place: nic_place(&device.context),
                rate_mbps: device.context.port(port.number).map_or(0, |port| port.rate_mbps),
            }
        };
        let candidates: Vec<Candidate> = self.ports.iter().map(candidate).collect();
        let ranked = rank(&regions, &candidates, Spread::Nearest, candidates.len());
        for rank in &ranked {
            let port = self.ports[rank.port].text();
            tracing::debug!(
                port,
                distance = rank.distance.name(),
                used = rank.used,
                "distance to memory"
            );
        }
        ranked.iter().filter(|rank| rank.used).map(|rank| rank.port).collect()
    }

    /// Nothing is left of a link.
    pub(crate) fn link_ended(&self, link: &LinkCore) {
        self.links.lock().end(&link.peer);
    }
}
