//! Looking at a machine: gauges, explanations, what handles wait for.

use std::net::SocketAddr;

use super::Machine;
use super::types::{HandleId, WaitingOn};
use crate::id::Incarnation;

impl Machine {
    pub(super) fn waits_for(&self, handle: HandleId) -> Option<WaitingOn> {
        let (what, since) = if let Some(claim) = self.claims.get(&handle) {
            (claim.waits_for(self), claim.since)
        } else if let Some(offer) = self.offers.get(&handle) {
            (offer.waits_for(), offer.since)
        } else if let Some(grant) = self.grants.get(&handle) {
            (grant.waits_for(), grant.since)
        } else if let Some(serve) = self.serves.get(&handle) {
            (serve.waits_for(), serve.since)
        } else if let Some(push) = self.pushes.get(&handle) {
            (self.or_rail(push.peer, push.waits_for()), push.since)
        } else if let Some(pull) = self.pulls.get(&handle) {
            (pull.waits_for(), pull.since)
        } else {
            return None;
        };
        Some(WaitingOn {
            what: what.to_string(),
            since,
        })
    }

    /// A transfer that is on its way waits for a rail if none is up, and for credit if it is queued.
    fn or_rail(&self, peer: Incarnation, what: &'static str) -> &'static str {
        if what != "acknowledgement" {
            return what;
        }
        if self.links.get(&peer).is_none_or(|link| !link.up) {
            return "rail";
        }
        if self
            .peers
            .get(&peer)
            .is_some_and(|peer| peer.active >= self.config.grants_per_peer_max)
        {
            return "credit";
        }
        what
    }

    pub(super) fn counts(&self) -> Vec<(&'static str, u64)> {
        let sessions = self.peers.values().filter(|peer| peer.session.is_some()).count();
        let kept: usize = self
            .peers
            .values()
            .filter_map(|peer| peer.session.as_ref())
            .map(|session| session.kept())
            .sum();
        let queued: usize = self.peers.values().map(|peer| peer.queue.len()).sum();
        [
            ("offers", self.offers.len()),
            ("claims", self.claims.len()),
            ("grants", self.grants.len() + self.serves.len()),
            ("transfers", self.pushes.len() + self.pulls.len()),
            ("pools", self.pools.len()),
            ("peers", self.peers.len()),
            ("sessions", sessions),
            ("connections", self.connections.len()),
            ("links", self.links.len()),
            ("transports_failed", self.transports_failed()),
            ("events_awaited", self.awaited.len()),
            ("link_transfers", self.link_transfers.len()),
            ("link_transfers_queued", queued),
            ("messages_unacknowledged", kept),
            ("members", self.remote_claims.len() - self.keys.waiting()),
            ("waiting_claims", self.keys.waiting()),
            ("ended_keys", self.keys.remembered()),
            ("slots_in_use", self.slots.in_use()),
            ("slots_retained", self.slots_retained()),
            ("slots_quarantined", self.slots_quarantined()),
            ("sources_quarantined", self.sources_quarantined),
            ("timers", self.timers.len()),
        ]
        .into_iter()
        .map(|(name, count)| (name, count as u64))
        .collect()
    }

    pub(super) fn explain_peer(&self, incarnation: Incarnation) -> Vec<String> {
        let Some(peer) = self.peers.get(&incarnation) else {
            return vec![format!("endpoint {incarnation}: no session, and none is being made")];
        };
        let sockets: Vec<String> = peer.address.sockets.iter().map(SocketAddr::to_string).collect();
        let mut lines = vec![format!(
            "endpoint {} ({incarnation}) at {}",
            peer.name,
            sockets.join(", ")
        )];
        let state = match (&peer.session, peer.connection) {
            (Some(_), Some(_)) => "ready".to_string(),
            (Some(_), None) => "interrupted, being resumed".to_string(),
            (None, _) => "being made".to_string(),
        };
        lines.push(format!("session: {state}"));
        if let Some(error) = &peer.last_error {
            lines.push(format!("last failure: {error}"));
        }
        if peer.draining {
            lines.push("it is draining: it takes no new work".to_string());
        }
        let up = match self.links.get(&incarnation) {
            Some(link) if link.closing => "closing",
            Some(link) if link.up => "up",
            Some(_) => "being made",
            None => "not made",
        };
        match &peer.transport {
            Some(transport) => lines.push(format!("transport: {transport}, {up}")),
            None => lines.push(format!("transport: none, {up}")),
        }
        for (transport, why) in &peer.transports_refused {
            lines.push(format!("not {transport}: {why}"));
        }
        for (id, pool) in &peer.pools {
            lines.push(format!(
                "pool {id}: {} layers, geometry {:016x}{}{}",
                pool.layout.layers().len(),
                pool.layout.geometry_hash(),
                if pool.serves { ", serves" } else { "" },
                if pool.receives { ", receives" } else { "" },
            ));
            lines.extend(self.compatibility(*id, pool));
        }
        lines.push(format!(
            "transfers: {} active, {} queued; messages unacknowledged: {}",
            peer.active,
            peer.queue.len(),
            peer.session.as_ref().map_or(0, |session| session.kept())
        ));
        let trust = match self.links.get(&incarnation) {
            Some(link) if link.one_sided => {
                "trust: the peer's device writes into and reads from pools by itself: whoever has a session can write into any pool registered for receiving and read any registered for serving"
            }
            _ => "trust: a peer writes only what a grant of ours names",
        };
        lines.push(format!(
            "{trust}; security is \"none\": whoever reaches the port is a peer"
        ));
        lines
    }

    /// How a peer's pool and ours fit.
    fn compatibility(&self, id: crate::id::PoolId, pool: &super::peers::PeerPool) -> Vec<String> {
        if !pool.serves {
            return Vec::new();
        }
        self.pools
            .iter()
            .filter(|(_, own)| own.receives)
            .map(
                |(own_id, own)| match crate::plan::assign(&[&pool.layout], &own.layout) {
                    Ok(_) => format!("pool {id} there can fill pool {own_id} here by itself"),
                    Err(error) => format!("pool {id} there cannot fill pool {own_id} here by itself: {error}"),
                },
            )
            .collect()
    }
}
