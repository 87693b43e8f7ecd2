//! The transport: its threads, its links, and connections that wait for their link.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvxfer_core::flow::SlotTable;
use kvxfer_core::memory::Region;
use kvxfer_core::transport::{
    Capabilities, Counter, Link, LinkEvent, LinkPeer, LinkWatcher, Links, RegionAccess, Registered, Transport,
};
use kvxfer_core::wire::lane::LaneHello;
use kvxfer_core::{Error, ErrorKind, Result, Time};
use parking_lot::Mutex;

use crate::config::{LANES_MAX, TcpConfig};
use crate::connect::check_hello;
use crate::error::TcpError;
use crate::exports::{ExportHold, ExportTable};
use crate::host;
use crate::link::{Lanes, LinkCore, TcpLink};
use crate::sys;
use crate::worker::{Worker, WorkerShared};

/// Version of the advert.
const ADVERT_VERSION: u8 = 1;
/// Connections that may wait for their link, and for how long: a peer may dial its lanes before this side has heard
/// that the session is ready.
const PARKED_MAX: usize = 64;
const PARKED_FOR: Duration = Duration::from_secs(2);

/// The TCP transport. See the crate's documentation.
pub struct TcpTransport {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What links and data threads share.
pub(crate) struct Shared {
    pub(crate) config: Arc<TcpConfig>,
    slots: Arc<SlotTable>,
    workers: Arc<[Arc<WorkerShared>]>,
    links: Mutex<Links<LinkCore>>,
    parked: Mutex<Vec<Parked>>,
    any_parked: AtomicBool,
    next_worker: AtomicUsize,
    exports: Arc<ExportTable>,
}

struct Parked {
    socket: OwnedFd,
    hello: LaneHello,
    expiry: Time,
}

impl TcpTransport {
    /// Starts the data threads.
    ///
    /// # Errors
    /// `InvalidArgument` for settings out of their bounds, `ResourceExhausted` if the system refuses descriptors or
    /// threads.
    pub fn new(config: TcpConfig, slots: Arc<SlotTable>) -> Result<TcpTransport> {
        config.check()?;
        let system = |call| move |source| Error::from(TcpError::System { call, source });
        let workers: Vec<_> = (0..config.data_threads)
            .map(|_| WorkerShared::new(&config))
            .collect::<std::io::Result<_>>()
            .map_err(system("epoll_create1"))?;
        let shared = Arc::new(Shared {
            links: Mutex::new(Links::new("tcp", config.links_max)),
            config: Arc::new(config),
            slots,
            workers: workers.into(),
            parked: Mutex::default(),
            any_parked: AtomicBool::new(false),
            next_worker: AtomicUsize::new(0),
            exports: Arc::default(),
        });
        let transport = TcpTransport {
            shared: shared.clone(),
            threads: Mutex::default(),
        };
        for (index, worker) in shared.workers.iter().enumerate() {
            let (worker, shared) = (worker.clone(), shared.clone());
            // If this fails, dropping `transport` ends the threads that were started.
            #[cfg(feature = "mutants")]
            let mutant = kvxfer_core::mutants::get();
            let thread = std::thread::Builder::new()
                .name(format!("kvx-data-{index}"))
                .spawn(move || {
                    #[cfg(feature = "mutants")]
                    kvxfer_core::mutants::set(mutant);
                    Worker::new(worker, shared, index == 0).run();
                })
                .map_err(system("spawning a data thread"))?;
            transport.threads.lock().push(thread);
        }
        Ok(transport)
    }

    /// Takes a connection that the endpoint's listener accepted and whose first bytes were this hello. Answers with a
    /// hello of this side, or closes it. A connection whose link is not known yet waits for it, for at most 2 s.
    ///
    /// # Errors
    /// `Unauthenticated` if the hello belongs to no link that could be meant (wrong token, incarnation, lane, or an
    /// epoch that is over), `Closed` after shutdown, `ResourceExhausted` if the socket cannot be set up.
    pub fn adopt(&self, stream: TcpStream, hello: LaneHello) -> Result<()> {
        self.shared.adopt(stream, hello).map_err(Error::from)
    }

    /// Links that have not ended.
    pub fn links(&self) -> usize {
        self.shared.links.lock().len()
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: false,
            staged: true,
        }
    }

    /// Nothing is registered with a device; but what is served of memory without a host view is exported, so that an endpoint
    /// on this host may copy out of it by itself.
    fn register(&self, regions: &[Arc<Region>], access: RegionAccess) -> Result<Registered> {
        let hold = ExportHold::of(&self.shared.exports, if access.serves { regions } else { &[] });
        let staged = |error: &Error| format!("staged for endpoints on this host, too: {error}");
        Ok(Registered {
            keys: Vec::new(),
            notes: hold.refused.iter().map(staged).collect(),
            exported: hold.exported(),
            hold: Box::new(hold),
        })
    }

    fn advertise(&self) -> Vec<u8> {
        let lanes = self.shared.config.lanes.to_le_bytes();
        let mut advert = vec![ADVERT_VERSION, lanes[0], lanes[1]];
        advert.extend_from_slice(&host::name());
        advert
    }

    fn connect(&self, peer: LinkPeer, events: Arc<dyn LinkWatcher>) -> Result<Arc<dyn Link>> {
        let shared = &self.shared;
        let count = shared.config.lanes.min(parse_advert(&peer)?);
        let lanes = Lanes {
            count,
            first_worker: shared.next_worker.fetch_add(usize::from(count), Ordering::Relaxed),
            workers: shared.workers.clone(),
        };
        // What it has appended to its advert says that it knows references, too.
        let here = peer.advert.get(3..).is_some_and(host::is_here);
        let core = shared.links.lock().begin(&peer, || {
            LinkCore::new(
                peer.clone(),
                shared.config.clone(),
                shared.slots.clone(),
                lanes,
                here.then(|| shared.exports.clone()),
                events,
            )
        })?;
        for parked in shared.unpark(&core) {
            if let Err(error) = deliver(&core, parked.socket, parked.hello) {
                tracing::debug!(%error, "a lane that had waited for its link was refused");
            }
        }
        for lane in &core.lanes {
            core.kick(lane);
        }
        Ok(Arc::new(TcpLink { core }))
    }

    fn counters(&self) -> Vec<Counter> {
        let mut out = Vec::new();
        let gauge = |name, value| Counter::of_transport(name, "tcp", value);
        let staging =
            |of: fn(&WorkerShared) -> usize| self.shared.workers.iter().map(|worker| of(worker)).sum::<usize>();
        out.push(gauge(
            "staging_allocated_bytes",
            staging(|worker| worker.staging.bytes()),
        ));
        out.push(gauge(
            "staging_buffers_in_use",
            staging(|worker| worker.staging.in_use()),
        ));
        let links = self.shared.links.lock().all();
        out.push(gauge("links", links.len()));
        for link in links {
            let peer = link.peer.incarnation.to_string();
            for lane in &link.lanes {
                lane.counters.report(&peer, &lane.index.to_string(), &mut out);
            }
        }
        out
    }

    fn shutdown(&self) {
        let links = self.shared.links.lock().close();
        for link in links {
            link.open.close();
        }
        self.shared.parked.lock().clear();
        for worker in self.shared.workers.iter() {
            worker.stop();
        }
        let this = std::thread::current().id();
        for thread in self.threads.lock().drain(..) {
            // A watcher may hold the last handle to the transport and drop it on a data thread.
            if thread.thread().id() != this && thread.join().is_err() {
                tracing::error!("a data thread had panicked");
            }
        }
        // What the threads could not end in time.
        self.shared.links.lock().clear();
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    /// A lane of this link has ended. With the last one the link has.
    pub(crate) fn lane_ended(&self, link: &Arc<LinkCore>) {
        if link.lanes_left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.links.lock().end(&link.peer);
            link.report();
            link.emit(LinkEvent::Closed);
        }
    }

    /// When the next waiting connection is given up.
    pub(crate) fn next_expiry(&self) -> Option<Time> {
        if !self.any_parked.load(Ordering::SeqCst) {
            return None;
        }
        self.parked.lock().iter().map(|parked| parked.expiry).min()
    }

    /// Gives up connections that have waited for too long.
    pub(crate) fn expire(&self, now: fn() -> Time) {
        if !self.any_parked.load(Ordering::SeqCst) {
            return;
        }
        let now = now();
        let mut parked = self.parked.lock();
        parked.retain(|parked| parked.expiry > now);
        self.any_parked.store(!parked.is_empty(), Ordering::SeqCst);
    }

    fn adopt(&self, stream: TcpStream, hello: LaneHello) -> Result<(), TcpError> {
        let system = |call| move |source| TcpError::System { call, source };
        let stray = |why| TcpError::Stray {
            from: hello.from,
            lane: hello.lane,
            why,
        };
        if self.links.lock().is_closed() {
            return Err(TcpError::Closed { peer: hello.from });
        }
        if hello.lane.index >= LANES_MAX {
            return Err(stray("no link has so many lanes"));
        }
        stream.set_nonblocking(true).map_err(system("fcntl"))?;
        let socket = OwnedFd::from(stream);
        sys::tune(&socket, self.config.send_buffer_bytes, self.config.receive_buffer_bytes)
            .map_err(system("setsockopt"))?;
        // Held to the end of parking, so that a link that comes meanwhile looks after it.
        let links = self.links.lock();
        if let Some(link) = links.get(hello.from, hello.token) {
            return deliver(link, socket, hello);
        }
        if links.has_peer(hello.from) {
            tracing::debug!(from = %hello.from, "a lane with another session's token waits for a link");
        }
        let mut parked = self.parked.lock();
        if parked.len() >= PARKED_MAX {
            return Err(stray("too many connections wait for a session"));
        }
        parked.push(Parked {
            socket,
            hello,
            expiry: sys::now() + PARKED_FOR,
        });
        self.any_parked.store(true, Ordering::SeqCst);
        drop(parked);
        drop(links);
        self.workers[0].wake();
        Ok(())
    }

    fn unpark(&self, link: &LinkCore) -> Vec<Parked> {
        let mut parked = self.parked.lock();
        let (mine, others) = std::mem::take(&mut *parked)
            .into_iter()
            .partition(|parked| parked.hello.from == link.peer.incarnation && parked.hello.token == link.peer.token);
        *parked = others;
        self.any_parked.store(!parked.is_empty(), Ordering::SeqCst);
        mine
    }
}

/// Gives a connection to its lane.
fn deliver(link: &Arc<LinkCore>, socket: OwnedFd, hello: LaneHello) -> Result<(), TcpError> {
    let stray = |why| TcpError::Stray {
        from: hello.from,
        lane: hello.lane,
        why,
    };
    check_hello(link, &hello).map_err(stray)?;
    if link.peer.dials {
        return Err(stray("this side dials the lanes of the session"));
    }
    if link.closed() {
        return Err(TcpError::Closed { peer: hello.from });
    }
    let lane = &link.lanes[usize::from(hello.lane.index)];
    let mut mail = lane.mail.lock();
    if hello.lane.epoch <= mail.epoch_floor {
        return Err(stray("its epoch is over"));
    }
    mail.epoch_floor = hello.lane.epoch;
    mail.adopted = Some((socket, hello));
    drop(mail);
    link.kick(lane);
    Ok(())
}

fn parse_advert(peer: &LinkPeer) -> Result<u16> {
    match peer.advert[..] {
        [] => Ok(LANES_MAX),
        // Later versions may append fields.
        [version, low, high, ..] if version >= ADVERT_VERSION => match u16::from_le_bytes([low, high]) {
            0 => Err(bad_advert(peer, "it offers no lane")),
            lanes => Ok(lanes),
        },
        _ => Err(bad_advert(peer, "its version or length is unknown")),
    }
}

fn bad_advert(peer: &LinkPeer, why: &str) -> Error {
    Error::new(ErrorKind::Protocol, "the tcp advert of a peer")
        .at(peer.incarnation.to_string())
        .because(why)
        .remedy("run the same version of kvxfer on both sides")
}
