//! Pools: what peers are told of them.

use super::Machine;
use super::types::PoolSetup;
use crate::error::{Error, ErrorKind, Result};
use crate::id::PoolId;
use crate::layout::PoolLayout;
use crate::time::Time;
use crate::wire::{Message, PoolAdvert};

impl Machine {
    /// Registers a pool and tells all peers.
    ///
    /// # Errors
    /// `InvalidArgument` if the id was used before, `Closed` after [`shutdown`](Self::shutdown).
    pub fn add_pool(&mut self, now: Time, id: PoolId, setup: PoolSetup) -> Result<()> {
        self.check_open("a pool")?;
        if self.pools.contains_key(&id) {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("pool {id}"))
                .because("there is one with this id")
                .remedy("number pools upwards"));
        }
        let advert = advert_of(&setup, id);
        self.pools.insert(id, setup);
        self.tell_all(now, &Message::PoolAdded(advert));
        Ok(())
    }

    /// Takes a pool back and tells all peers.
    ///
    /// # Errors
    /// `Busy` while anything refers to it (also blocks in quarantine, for ever), `NotRegistered` if it is not there.
    pub fn remove_pool(&mut self, now: Time, id: PoolId) -> Result<()> {
        self.pool(id)?;
        let users = self.users_of(id);
        if !users.is_empty() {
            return Err(Error::new(ErrorKind::Busy, format!("pool {id}"))
                .because(format!("it is used by {}", users.join(", ")))
                .remedy("end what uses it, or wait for it"));
        }
        self.pools.remove(&id);
        self.tell_all(now, &Message::PoolRemoved(id));
        Ok(())
    }

    pub(super) fn pool(&self, id: PoolId) -> Result<&PoolSetup> {
        self.pools.get(&id).ok_or_else(|| pool_unknown(id))
    }

    pub(super) fn pool_adverts(&self) -> Vec<PoolAdvert> {
        self.pools.iter().map(|(id, pool)| advert_of(pool, *id)).collect()
    }

    pub(super) fn users_of(&self, id: PoolId) -> Vec<String> {
        let quarantined = self.quarantined_pools.contains(&id)
            || self.slot_uses.values().any(|used| used.quarantined && used.pool == id);
        let counts = [
            ("offers", self.offers.values().filter(|offer| offer.pool == id).count()),
            ("claims", self.claims.values().filter(|claim| claim.pool == id).count()),
            (
                "grants",
                self.grants.values().filter(|grant| grant.pool == id).count()
                    + self.serves.values().filter(|serve| serve.pool == id).count(),
            ),
            (
                "transfers",
                self.pushes.values().filter(|push| push.pool == id).count()
                    + self.pulls.values().filter(|pull| pull.pool == id).count(),
            ),
            ("blocks in quarantine", usize::from(quarantined)),
        ];
        counts
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(what, count)| format!("{count} {what}"))
            .collect()
    }
}

pub(super) fn advert_of(pool: &PoolSetup, id: PoolId) -> PoolAdvert {
    PoolAdvert {
        id,
        layout: PoolLayout::clone(&pool.layout),
        serves: pool.serves,
        receives: pool.receives,
        keys: pool.keys.clone(),
    }
}

pub(super) fn pool_unknown(id: PoolId) -> Error {
    Error::new(ErrorKind::NotRegistered, format!("pool {id}"))
        .because("it is not registered with this endpoint")
        .remedy("register it first")
}

/// A grant is used only with the geometry it was made for.
pub(super) fn check_geometry(layout: &PoolLayout, hash: u64, pool: PoolId) -> Result<()> {
    if layout.geometry_hash() == hash {
        return Ok(());
    }
    Err(
        Error::new(ErrorKind::GeometryMismatch, format!("the grant's pool {pool}"))
            .because(format!(
                "its owner declares geometry {:016x}, the grant was made for {hash:016x}",
                layout.geometry_hash()
            ))
            .remedy("ask for a new grant"),
    )
}
