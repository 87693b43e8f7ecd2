//! Endpoints.

use std::ffi::c_char;

use kvxfer::{Endpoint, PeerInfo, PeerState};

use crate::address::{kvx_address, kvx_id128};
use crate::call::call;
use crate::config::{Settings, kvx_config};
use crate::input::{self, grows};
use crate::output::{Out, OutStructs, OutText, field};
use crate::status::{KVX_OK, code, kvx_status};
use crate::table;

/// One process's half of the library, usually one tensor-parallel rank. Freed by kvx_endpoint_destroy.
pub type kvx_endpoint = u64;

/// How a session with a peer stands.
pub type kvx_peer_state = u32;
/// A state that this header does not name.
pub const KVX_PEER_OTHER: kvx_peer_state = 0;
/// The session is up.
pub const KVX_PEER_READY: kvx_peer_state = 1;
/// The connection broke and is being made anew.
pub const KVX_PEER_INTERRUPTED: kvx_peer_state = 2;
/// The peer takes no new work.
pub const KVX_PEER_DRAINING: kvx_peer_state = 3;
/// Lost: every handle with it has ended.
pub const KVX_PEER_LOST: kvx_peer_state = 4;

/// What is known of a peer. Texts end with a NUL and are cut where they do not fit.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_peer {
    /// Set by the library, to the element size that the caller gave.
    pub struct_size: u32,
    /// How its session stands.
    pub state: kvx_peer_state,
    /// Who.
    pub incarnation: kvx_id128,
    /// Of a lost peer: the KVX_ERR_... code.
    pub error: kvx_status,
    /// 0.
    pub reserved: u32,
    /// Its label.
    pub name: [c_char; 264],
    /// The transport taken; empty if none yet.
    pub transport: [c_char; 40],
    /// Where it listens, as text; empty until it has said so.
    pub address: [c_char; 128],
    /// Why it is interrupted or lost.
    pub why: [c_char; 512],
}
grows!(kvx_peer, 976);

/// Creates an endpoint: opens its transports and its listener and starts its threads. Config 0 stands for
/// kvx_config_create's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_endpoint_create(config: kvx_config, endpoint: *mut kvx_endpoint) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::handle("endpoint", endpoint)? };
        let mut builder = Endpoint::builder();
        if config != 0 {
            let (config, rank) = table::get::<Settings>(config)?.get();
            builder = builder.config(config).rank(rank);
        }
        out.put(table::insert(builder.build()?)?);
        Ok(())
    })
}

/// Its label. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_endpoint_name(endpoint: kvx_endpoint, buffer: *mut c_char, capacity: usize) -> i64 {
    call(|| {
        let endpoint = table::get::<Endpoint>(endpoint)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        Ok(out.put(endpoint.name()))
    })
}

/// Its identity: new at every start.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_endpoint_incarnation(endpoint: kvx_endpoint, incarnation: *mut kvx_id128) -> kvx_status {
    call(|| {
        let endpoint = table::get::<Endpoint>(endpoint)?;
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::new("incarnation", incarnation)? };
        out.put(kvx_id128::of(endpoint.incarnation().bits()));
        Ok(())
    })
}

/// What to publish so that others find it: a new address handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_endpoint_address(endpoint: kvx_endpoint, address: *mut kvx_address) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::handle("address", address)? };
        out.put(table::insert(table::get::<Endpoint>(endpoint)?.address())?);
        Ok(())
    })
}

/// Makes the session and the link to a peer ahead of the first transfer. May block, up to timeout_ms. Not needed: claims,
/// pushes and pulls connect by themselves.
/// KVX_ERR_UNREACHABLE if nobody answers; KVX_ERR_STALE_PEER if somebody else does; KVX_ERR_TRANSPORT if no transport comes up.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_endpoint_connect(endpoint: kvx_endpoint, address: kvx_address, timeout_ms: u64) -> kvx_status {
    call(|| {
        let address = table::get(address)?;
        table::get::<Endpoint>(endpoint)?.connect(&address, input::timeout(timeout_ms))
    })
}

/// The path to a peer in words: session, transport, rails, and why better ones were not taken. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_endpoint_explain(
    endpoint: kvx_endpoint,
    address: kvx_address,
    buffer: *mut c_char,
    capacity: usize,
) -> i64 {
    call(|| {
        let (endpoint, address) = (table::get::<Endpoint>(endpoint)?, table::get(address)?);
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        Ok(out.put(&endpoint.explain(&address)))
    })
}

/// What is known of peers with a session, and of those lost lately: at most capacity elements of element_size bytes
/// (sizeof(kvx_peer)), and in count how many there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_endpoint_peers(
    endpoint: kvx_endpoint,
    peers: *mut kvx_peer,
    element_size: usize,
    capacity: usize,
    count: *mut usize,
) -> kvx_status {
    call(|| {
        let endpoint = table::get::<Endpoint>(endpoint)?;
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, total) = unsafe {
            (
                OutStructs::new(peers, element_size, capacity)?,
                Out::new("count", count)?,
            )
        };
        let known = endpoint.peers();
        for (index, peer) in known.iter().enumerate().take(out.capacity()) {
            out.put(index, described(peer));
        }
        total.put(known.len());
        Ok(())
    })
}

/// Counters, gauges and histograms as Prometheus text; docs/metrics.md defines them. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_endpoint_metrics(endpoint: kvx_endpoint, buffer: *mut c_char, capacity: usize) -> i64 {
    call(|| {
        let endpoint = table::get::<Endpoint>(endpoint)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        Ok(out.put(&endpoint.metrics()))
    })
}

/// Takes no new work, tells peers so, and waits until what is open has ended. May block, up to timeout_ms.
/// KVX_ERR_DEADLINE_EXCEEDED with the number of handles that are still open; they go on.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_endpoint_drain(endpoint: kvx_endpoint, timeout_ms: u64) -> kvx_status {
    call(|| table::get::<Endpoint>(endpoint)?.drain(input::timeout(timeout_ms)))
}

/// Ends every handle with KVX_ERR_CLOSED, tells peers, and stops all threads. May block, up to timeout_ms, for what may
/// still write the application's memory. The handle stays: results can still be read. A second call does nothing.
/// KVX_ERR_DEADLINE_EXCEEDED if something still may: the endpoint is closed all the same, and the handles concerned ended
/// with KVX_DESTINATION_QUARANTINED.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_endpoint_close(endpoint: kvx_endpoint, timeout_ms: u64) -> kvx_status {
    call(|| table::get::<Endpoint>(endpoint)?.close(input::timeout(timeout_ms)))
}

/// Closes an endpoint as kvx_endpoint_close does, and frees it, whatever the status is (unless it was no endpoint). May
/// block, up to timeout_ms. Its pools, offers, claims, grants and transfers keep their handles, to be freed as ever.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_endpoint_destroy(endpoint: kvx_endpoint, timeout_ms: u64) -> kvx_status {
    call(|| table::remove::<Endpoint>(endpoint)?.close(input::timeout(timeout_ms)))
}

fn described(peer: &PeerInfo) -> kvx_peer {
    let (state, error, why) = match &peer.state {
        PeerState::Ready => (KVX_PEER_READY, KVX_OK, String::new()),
        PeerState::Interrupted { why } => (KVX_PEER_INTERRUPTED, KVX_OK, why.clone()),
        PeerState::Draining => (KVX_PEER_DRAINING, KVX_OK, String::new()),
        PeerState::Lost(error) => (KVX_PEER_LOST, code(error.kind()), error.to_string()),
        other => (KVX_PEER_OTHER, KVX_OK, format!("{other:?}")),
    };
    kvx_peer {
        struct_size: 0,
        state,
        incarnation: kvx_id128::of(peer.incarnation.bits()),
        error,
        reserved: 0,
        name: field(&peer.name),
        transport: field(peer.transport.as_deref().unwrap_or_default()),
        address: field(&peer.address.as_ref().map(ToString::to_string).unwrap_or_default()),
        why: field(&why),
    }
}
