//! Listening: sockets and the addresses to publish for them, and telling lanes from sessions as they come in.

use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use kvxfer_core::wire::lane::{HELLO_BYTES, LaneHello};
use kvxfer_core::{Error, ErrorKind, Result};

use crate::config::{Config, Security};
use crate::interfaces;

use super::{Shared, connection, dial};

/// Connections the kernel keeps for us until we accept them.
const BACKLOG: i32 = 1024;
/// Pause after the system refused to accept (out of descriptors, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A lane can be a moment earlier than the last word of its session's handshake: how often, and how long apart, to look.
const LANE_LOOKS: u32 = 50;
const LANE_LOOK_PAUSE: Duration = Duration::from_millis(2);
/// Addresses that fit into a published endpoint address.
const SOCKETS_MAX: usize = 2;

/// Bound sockets, not yet served.
pub(crate) struct Listeners(Vec<StdListener>);

impl Listeners {
    pub(super) fn into_tokio(self) -> impl Iterator<Item = std::io::Result<TcpListener>> {
        self.0.into_iter().map(TcpListener::from_std)
    }
}

/// Binds what the configuration says; the sockets, and the addresses to publish, best first.
pub(crate) fn bind(config: &Config) -> Result<(Listeners, Vec<SocketAddr>)> {
    let mut listeners = Vec::new();
    let mut published = Vec::new();
    let both_families = config.listen.iter().any(SocketAddr::is_ipv4) && config.listen.iter().any(SocketAddr::is_ipv6);
    for &address in &config.listen {
        off_loopback(&config.security, address)?;
        let listener = bind_one(address, both_families)?;
        let bound = listener.local_addr().map_err(|error| bind_error(address, &error))?;
        if bound.ip().is_unspecified() {
            let dual = bound.is_ipv6() && !both_families;
            let found = interfaces::addresses(&config.interfaces)?;
            let usable = found.into_iter().filter(|ip| dual || ip.is_ipv4() == bound.is_ipv4());
            published.extend(usable.map(|ip| SocketAddr::new(ip, bound.port())));
        } else {
            published.push(bound);
        }
        listeners.push(listener);
    }
    published.truncate(SOCKETS_MAX);
    if published.is_empty() {
        return Err(Error::new(ErrorKind::InvalidArgument, "no address to publish")
            .at(format!("listen = {:?}", config.listen))
            .because(format!(
                "no interface of {:?} has one of that family",
                config.interfaces
            ))
            .remedy("listen on a concrete address, or allow an interface that has one"));
    }
    Ok((Listeners(listeners), published))
}

fn off_loopback(security: &Security, address: SocketAddr) -> Result<()> {
    dial::allowed(security, address.ip()).map_err(|_| {
        Error::new(ErrorKind::Unauthenticated, format!("listening on {address}"))
            .because("security.mode is \"none\", which is refused off the loopback interface")
            .remedy(
                "listen on 127.0.0.1 or [::1]; or, on a network that you trust, set security.off_loopback = \
                 \"insecure-allowed\"",
            )
    })
}

fn bind_one(address: SocketAddr, v6_only: bool) -> Result<StdListener> {
    let fail = |error: std::io::Error| bind_error(address, &error);
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd =
        rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(|errno| fail(errno.into()))?;
    sockopt::set_socket_reuseaddr(&socket, true).map_err(|errno| fail(errno.into()))?;
    if address.is_ipv6() && v6_only {
        sockopt::set_ipv6_v6only(&socket, true).map_err(|errno| fail(errno.into()))?;
    }
    rustix::net::bind(&socket, &address).map_err(|errno| fail(errno.into()))?;
    rustix::net::listen(&socket, BACKLOG).map_err(|errno| fail(errno.into()))?;
    Ok(StdListener::from(socket))
}

fn bind_error(address: SocketAddr, error: &std::io::Error) -> Error {
    let (kind, remedy) = match error.kind() {
        std::io::ErrorKind::AddrInUse => (
            ErrorKind::ResourceExhausted,
            "another process listens there: choose another port, or port 0 for a free one",
        ),
        std::io::ErrorKind::AddrNotAvailable => (
            ErrorKind::InvalidArgument,
            "no interface of this machine has that address: see `ip address`",
        ),
        std::io::ErrorKind::PermissionDenied => (ErrorKind::ResourceExhausted, "ports below 1024 need a privilege"),
        _ => (ErrorKind::ResourceExhausted, "see the cause"),
    };
    Error::new(kind, "the listener cannot be opened")
        .at(address.to_string())
        .because(error.to_string())
        .remedy(remedy)
}

/// Accepts until the endpoint stops.
pub(super) async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    let handshakes = Arc::new(Semaphore::new(shared.config.limits.handshakes_max as usize));
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                if let Err(error) = dial::allowed(&shared.config.security, from.ip()) {
                    tracing::warn!(%from, %error, "connection refused");
                    continue;
                }
                // Whoever floods us with half-open handshakes must not keep others out for longer than those last.
                match Arc::clone(&handshakes).try_acquire_owned() {
                    Ok(permit) => shared.spawn(greet(Arc::clone(&shared), stream, from, permit)),
                    Err(_) => {
                        shared.metrics.handshakes_refused.add(1);
                        tracing::warn!(%from, "connection refused: limits.handshakes_max are under way");
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, "accept");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Tells from the first four bytes what a connection is, and serves it.
async fn greet(shared: Arc<Shared>, mut stream: TcpStream, from: SocketAddr, permit: OwnedSemaphorePermit) {
    let patience = Duration::from_millis(shared.config.deadlines.connect_ms);
    let _ = stream.set_nodelay(true);
    let mut magic = [0u8; 4];
    let begun = timeout(patience, stream.read_exact(&mut magic)).await;
    if !matches!(begun, Ok(Ok(_))) {
        shared.metrics.handshakes_refused.add(1);
        tracing::debug!(%from, "a connection said nothing");
        return;
    }
    if !LaneHello::is_lane(magic) {
        let connection = shared.accepted(stream, from);
        connection::serve(shared, connection, &magic, Some(permit)).await;
        return;
    }
    let lane = timeout(patience, adopt(&shared, stream, magic)).await;
    let refused = match lane {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error,
        Err(_) => Error::new(ErrorKind::Protocol, "a lane's hello").because("it was not whole in time"),
    };
    shared.metrics.handshakes_refused.add(1);
    tracing::debug!(%from, error = %refused, "lane refused");
}

async fn adopt(shared: &Arc<Shared>, mut stream: TcpStream, magic: [u8; 4]) -> Result<()> {
    let broken = |error: std::io::Error| Error::new(ErrorKind::Transport, "a lane").because(error.to_string());
    let mut bytes = [0u8; HELLO_BYTES];
    bytes[..4].copy_from_slice(&magic);
    stream.read_exact(&mut bytes[4..]).await.map_err(broken)?;
    let hello = LaneHello::decode(&bytes)?;
    let stream = stream.into_std().map_err(broken)?;
    let mut looks = 0;
    while let Err(error) = shared.look(|state| state.machine.lane_allowed(&hello)) {
        if looks == LANE_LOOKS {
            return Err(error);
        }
        looks += 1;
        sleep(LANE_LOOK_PAUSE).await;
    }
    shared.transports.adopt(stream, hello)
}

/// Loopback last, then IPv4 before IPv6: the order in which addresses are published.
pub(crate) fn preference(address: &IpAddr) -> (bool, bool) {
    (address.is_loopback(), address.is_ipv6())
}
