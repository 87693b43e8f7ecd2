//! Dialing a peer: its addresses in order, each a little after the one before, the first that answers taken.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use kvxfer_core::machine::ConnectionId;
use kvxfer_core::{Error, ErrorKind, Result, Time};

use crate::clock;
use crate::config::Security;

use super::{Shared, connection};

/// How long an address may stay silent before the next is tried beside it.
const HEAD_START: Duration = Duration::from_millis(100);

/// Dials, and serves the connection until it ends.
pub(super) async fn dial(shared: Arc<Shared>, id: ConnectionId, addresses: Vec<SocketAddr>, deadline: Time) {
    let patience = deadline.since(clock::now());
    let dialed = match timeout(patience, first_to_answer(&shared, &addresses)).await {
        Ok(dialed) => dialed,
        Err(_) => Err(unreachable(&addresses, &format!("no answer within {patience:?}"))),
    };
    match dialed {
        Ok((stream, to)) => {
            let connection = shared.dialed(id, stream, to);
            connection::serve(shared, connection, &[], None).await;
        }
        Err(error) => {
            tracing::debug!(connection = id.0, %error, "dial failed");
            shared.call(|state, now| state.machine.dial_failed(now, id, error));
        }
    }
}

async fn first_to_answer(shared: &Shared, addresses: &[SocketAddr]) -> Result<(TcpStream, SocketAddr)> {
    let mut attempts = JoinSet::new();
    for (index, &address) in addresses.iter().enumerate() {
        allowed(&shared.config.security, address.ip())?;
        let head_start = HEAD_START.saturating_mul(u32::try_from(index).unwrap_or(u32::MAX));
        attempts.spawn(async move {
            sleep(head_start).await;
            let stream = TcpStream::connect(address).await.and_then(|stream| {
                stream.set_nodelay(true)?;
                Ok(stream)
            });
            (stream, address)
        });
    }
    let mut why = String::from("it has no address");
    while let Some(attempt) = attempts.join_next().await {
        match attempt {
            Ok((Ok(stream), address)) => return Ok((stream, address)),
            Ok((Err(error), _)) => why = error.to_string(),
            Err(error) => why = error.to_string(),
        }
    }
    Err(unreachable(addresses, &why))
}

/// Whether the security settings let us talk to this address.
pub(super) fn allowed(security: &Security, address: IpAddr) -> Result<()> {
    if address.to_canonical().is_loopback() || security.off_loopback == "insecure-allowed" {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unauthenticated, format!("talking to {address}"))
        .because("security.mode is \"none\", which is refused off the loopback interface")
        .remedy("on a network that you trust, set security.off_loopback = \"insecure-allowed\""))
}

fn unreachable(addresses: &[SocketAddr], why: &str) -> Error {
    let listed: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    Error::new(ErrorKind::Unreachable, "the peer does not answer")
        .at(listed.join(", "))
        .because(why)
        .remedy("check that the peer runs, that the address is its published one, and that no firewall is between")
}
