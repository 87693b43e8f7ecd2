//! The layer below: grants passed around by applications, pushed to and pulled from; pools that come and go; drains.

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::SlotWatcher;
use kvxfer_core::layout::{BlockDescriptor, PoolLayout, Selection};
use kvxfer_core::machine::{GrantOptions, HandleId, PoolSetup, TransferOptions};
use kvxfer_core::plan::Target;
use kvxfer_core::wire::{Access, Grant};
use kvxfer_core::{ErrorKind, GrantName, Incarnation, PoolId};
use parking_lot::Mutex;

use super::coverage::Point;
use super::ledger::{Serial, Shape, What};
use super::memory::SimPool;
use super::workload::AppEvent;
use super::world::{NodeIndex, World};

const RETRY: Duration = Duration::from_millis(7);
const RETRIES_MAX: u32 = 60;

/// A grant and its use.
pub(crate) struct Raw {
    /// Who grants.
    pub(crate) owner: NodeIndex,
    pub(crate) user: NodeIndex,
    access: Access,
    form: Form,
    message: Option<Arc<[u8]>>,
    priority: u8,
    checksum: bool,
    deadline: Option<Duration>,
    /// Used by a second transfer too, which must fail.
    twice: bool,
    /// In the second pool, if there is one.
    second_pool: bool,
    pub(crate) disturbed: bool,
}

/// How its blocks are named.
#[derive(Debug, Clone, Copy)]
enum Form {
    Tokens(u32),
    Bytes(u64),
}

/// Told of an arrival on a data thread.
struct Watcher {
    serial: Mutex<Option<Serial>>,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
}

/// An arrival as the data thread told of it.
pub(crate) type Arrival = (Serial, Option<Arc<[u8]>>);

impl SlotWatcher for Watcher {
    fn arrived(&self, message: Option<Arc<[u8]>>) {
        if let Some(serial) = *self.serial.lock() {
            self.arrivals.lock().push((serial, message));
        }
    }
}

impl World {
    pub(crate) fn make_raw(&mut self, owner: Option<NodeIndex>) -> Raw {
        let nodes = self.nodes.len() as u64;
        let drawn = self.rng.below(nodes) as usize;
        let owner = owner.unwrap_or(drawn);
        let user = (owner + 1 + self.rng.below(nodes - 1) as usize) % nodes as usize;
        let same = self.profile.rank_of(owner) == self.profile.rank_of(user);
        let large = self.rng.percent(30);
        let form = if same && self.rng.percent(60) {
            Form::Tokens(self.rng.within(1..if large { 20 } else { 6 }) as u32)
        } else {
            Form::Bytes(self.rng.within(1..if large { 900 } else { 60 }))
        };
        let access = if self.rng.percent(65) {
            Access::Write
        } else {
            Access::Read
        };
        let length = self.rng.below(60) as usize;
        let with_message = access == Access::Write && self.rng.percent(40);
        let meddle = self.profile.meddling_percent;
        Raw {
            owner,
            user,
            access,
            form,
            message: with_message.then(|| (0..length).map(|_| self.rng.next_u64() as u8).collect()),
            priority: self.rng.below(2) as u8,
            checksum: self.profile.corrupt_permyriad > 0 || self.rng.percent(20),
            deadline: (self.profile.short_deadlines && self.rng.percent(60))
                .then(|| Duration::from_millis(self.rng.within(1..1_500))),
            twice: meddle > 0 && self.rng.percent(25),
            second_pool: self.rng.percent(40),
            disturbed: false,
        }
    }

    /// The pool a node uses for this: its second one now and then, if it has one.
    fn raw_pool(&self, node: NodeIndex, raw: usize) -> usize {
        let second = self.workload.raws[raw].second_pool;
        let usable = self.nodes[node]
            .body
            .as_ref()
            .is_some_and(|body| body.pools.len() > 1 && !body.pools[1].removed);
        usize::from(second && usable)
    }

    /// Blocks for a raw transfer at one of its ends.
    fn raw_shape(&mut self, node: NodeIndex, pool: usize, form: Form) -> Option<(Shape, Vec<u32>)> {
        match form {
            Form::Tokens(tokens) => {
                let selection = self.allocate_selection(node, pool, 0..tokens, false)?;
                Some((Shape::Selection(selection), Vec::new()))
            }
            Form::Bytes(bytes) => {
                let per_block = {
                    let pool = &self.nodes[node].body.as_ref()?.pools[pool];
                    block_bytes(&pool.layout)
                };
                // A few blocks more than needed, so that pieces lie here and there.
                let count = bytes.div_ceil(per_block) as usize + 1;
                let body = self.nodes[node].body.as_mut()?;
                let (blocks, reused) = body.pools[pool].allocate(0, count)?;
                if reused {
                    self.coverage.reach(Point::BlocksReused);
                }
                let layout = Arc::clone(&self.nodes[node].body.as_ref()?.pools[pool].layout);
                let pieces = self.cut_pieces(&layout, &blocks, bytes);
                Some((Shape::Descriptors(pieces), blocks))
            }
        }
    }

    fn cut_pieces(&mut self, layout: &PoolLayout, blocks: &[u32], bytes: u64) -> Vec<BlockDescriptor> {
        let mut places: Vec<(u32, u32, u64)> = Vec::new();
        for (index, plane) in layout.planes().iter().enumerate() {
            if plane.group == 0 {
                places.extend(blocks.iter().map(|block| (index as u32, *block, plane.block_length)));
            }
        }
        self.rng.shuffle(&mut places);
        let mut left = bytes;
        let mut pieces = Vec::new();
        let mut spare: u64 = places.iter().map(|place| place.2).sum::<u64>() - bytes;
        for (plane, block, length) in places {
            if left == 0 {
                break;
            }
            let skip = self.rng.below(length.min(spare + 1));
            spare -= skip;
            let take = (length - skip).min(left);
            left -= take;
            pieces.push(BlockDescriptor {
                plane,
                block,
                offset: skip as u32,
                length: take as u32,
            });
        }
        pieces
    }

    /// The blocks of a shape become the handle's.
    fn own_shape(&mut self, serial: Serial, shape: &Shape, blocks: &[u32]) {
        match shape {
            Shape::Selection(selection) => {
                for (group, chosen) in selection.groups.iter().enumerate() {
                    self.give_blocks(serial, group, &chosen.blocks);
                }
            }
            Shape::Descriptors(_) => self.give_blocks(serial, 0, blocks),
        }
    }

    pub(crate) fn open_grant(&mut self, node: NodeIndex, raw: usize) {
        let pool = self.raw_pool(node, raw);
        let form = self.workload.raws[raw].form;
        let Some((shape, blocks)) = self.raw_shape(node, pool, form) else {
            self.workload.raws[raw].disturbed = true;
            return;
        };
        let Some(pool_id) = self.pool_id(node, pool) else {
            return;
        };
        let this = &self.workload.raws[raw];
        let (access, deadline, user, twice) = (this.access, this.deadline, this.user, this.twice);
        let limit = deadline.unwrap_or(
            self.profile
                .machine
                .hold_max
                .max(self.profile.machine.unmatched_deadline),
        );
        let nobody = GrantName {
            incarnation: Incarnation::from_bits(0),
            slot: kvxfer_core::SlotId(0),
            generation: kvxfer_core::Generation(0),
        };
        let what = match access {
            Access::Write => What::Grant {
                name: nobody,
                message: None,
            },
            Access::Read => What::ReadGrant { name: nobody },
        };
        let serial = self.record(node, pool, HandleId(u64::MAX), what, shape.clone(), limit);
        self.own_shape(serial, &shape, &blocks);
        if access == Access::Read {
            self.write_source(serial, 0..u32::MAX, 0..u16::MAX);
        }
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let watcher = Arc::new(Watcher {
            serial: Mutex::new(Some(serial)),
            arrivals: Arc::clone(&body.arrivals),
        });
        let watched = (access == Access::Write).then_some(watcher as Arc<dyn SlotWatcher>);
        let holder = if self.rng.percent(50) {
            self.nodes[user].body.as_ref().map(|body| body.incarnation)
        } else {
            None
        };
        let options = GrantOptions { deadline, holder };
        let target = target_of(&shape);
        let opened = self.with_machine(node, |machine, now| {
            machine.grant(now, pool_id, access, target, options, watched)
        });
        match opened {
            Some(Ok((handle, grant))) => {
                match &mut self.ledger[serial as usize].what {
                    What::Grant { name, .. } | What::ReadGrant { name } => *name = grant.name,
                    _ => {}
                }
                self.name_record(serial, handle);
                self.trace(|| format!("node {node} grants raw {raw} as #{serial} {}", grant.name));
                let grant = self.published(grant);
                let span = *self.rng.pick(&[300u64, 20_000, 600_000]).unwrap_or(&300);
                let at = self.now + Duration::from_micros(self.rng.below(span));
                let use_it = |grant: Grant| AppEvent::UseGrant {
                    raw,
                    grant: Box::new(grant),
                    tries: 0,
                };
                self.app_at(at, user, use_it(grant.clone()));
                if twice {
                    let again = at + Duration::from_micros(self.rng.below(span));
                    let by_another = self.rng.percent(50) && self.nodes.len() > 2;
                    let other = (0..self.nodes.len()).find(|other| *other != node && *other != user);
                    let second = other.filter(|_| by_another).unwrap_or(user);
                    self.app_at(again, second, use_it(grant));
                }
                self.meddle(node, serial);
            }
            Some(Err(error)) => {
                self.ledger[serial as usize].ended = Some((self.now, Err(error.clone())));
                self.release_blocks(serial);
                self.workload.raws[raw].disturbed = true;
                self.refused(node, error.kind(), &error);
            }
            None => {}
        }
    }

    /// What the application passes on: the grant's byte form.
    fn published(&mut self, grant: Grant) -> Grant {
        let bytes = grant.to_bytes();
        match bytes.and_then(|bytes| Grant::from_bytes(&bytes)) {
            Ok(back) if back == grant => back,
            Ok(_) => {
                self.fail("wire", "a grant came back as another".into());
                grant
            }
            Err(error) => {
                self.fail("wire", format!("a grant does not come back: {error}"));
                grant
            }
        }
    }

    pub(crate) fn use_grant(&mut self, node: NodeIndex, raw: usize, grant: Grant, tries: u32) {
        let pool = self.raw_pool(node, raw);
        let form = self.workload.raws[raw].form;
        let rank_differs = self.profile.rank_of(node) != self.profile.rank_of(self.workload.raws[raw].owner);
        if matches!(form, Form::Tokens(_)) && rank_differs {
            // A second user of another rank has no such selection.
            return;
        }
        let Some((shape, blocks)) = self.raw_shape(node, pool, form) else {
            if tries < RETRIES_MAX {
                let at = self.now + RETRY;
                let again = AppEvent::UseGrant {
                    raw,
                    grant: Box::new(grant),
                    tries: tries + 1,
                };
                self.app_at(at, node, again);
            } else {
                self.workload.raws[raw].disturbed = true;
            }
            return;
        };
        let Some(pool_id) = self.pool_id(node, pool) else {
            return;
        };
        let this = &self.workload.raws[raw];
        let push = this.access == Access::Write;
        let mut options = TransferOptions {
            deadline: this.deadline,
            message: this.message.clone().filter(|_| push),
            after: None,
            priority: this.priority,
            checksum: this.checksum,
        };
        let limit = this
            .deadline
            .unwrap_or(self.profile.machine.hold_max + self.profile.machine.unmatched_deadline);
        let what = if push {
            What::Push {
                grant: grant.name,
                message: options.message.clone(),
            }
        } else {
            What::Pull { grant: grant.name }
        };
        let serial = self.record(node, pool, HandleId(u64::MAX), what, shape.clone(), limit);
        self.own_shape(serial, &shape, &blocks);
        let target = target_of(&shape);
        if push && self.rng.percent(self.profile.gated_percent / 2) {
            options.after = Some(self.hold_push(node, serial));
        } else if push {
            self.write_source(serial, 0..u32::MAX, 0..u16::MAX);
        }
        let opened = self.with_machine(node, |machine, now| {
            if push {
                machine.push(now, pool_id, target, &grant, options)
            } else {
                machine.pull(now, &grant, pool_id, target, options)
            }
        });
        match opened {
            Some(Ok(handle)) => {
                self.name_record(serial, handle);
                self.trace(|| format!("node {node} uses {} as #{serial}", grant.name));
                self.meddle(node, serial);
            }
            Some(Err(error)) => {
                self.ledger[serial as usize].ended = Some((self.now, Err(error.clone())));
                self.release_blocks(serial);
                self.trace(|| format!("node {node} cannot use {}: {error}", grant.name));
                self.use_refused(node, raw, &grant, &error);
            }
            None => {}
        }
    }

    fn use_refused(&mut self, node: NodeIndex, raw: usize, grant: &Grant, error: &kvxfer_core::Error) {
        self.workload.raws[raw].disturbed = true;
        let used_before = self
            .ledger
            .iter()
            .filter(|record| self.uses(record.node, &record.what, grant.name))
            .count()
            > 1;
        let gone = self.node_of(grant.name.incarnation).is_none();
        let closed = self.node_of(grant.name.incarnation).is_none_or(|owner| {
            self.nodes[owner]
                .body
                .as_ref()
                .is_none_or(|body| body.pools.iter().any(|pool| pool.id == grant.pool && pool.removed))
        });
        if closed && error.kind() == ErrorKind::NotRegistered {
            return;
        }
        if gone && matches!(error.kind(), ErrorKind::StalePeer) {
            self.coverage.reach(Point::StaleAddress);
        } else if used_before && error.kind() != ErrorKind::Internal {
            self.coverage.reach(Point::GrantUsedTwice);
        } else {
            self.refused(node, error.kind(), error);
        }
    }

    fn uses(&self, _: NodeIndex, what: &What, name: GrantName) -> bool {
        matches!(what, What::Push { grant, .. } | What::Pull { grant } if *grant == name)
    }

    /// Data threads have told of arrivals: the applications hear of them at once, and may reuse the blocks at once.
    pub(crate) fn arrivals_seen(&mut self, node: NodeIndex) {
        let arrivals = match self.nodes[node].body.as_ref() {
            Some(body) => std::mem::take(&mut *body.arrivals.lock()),
            None => return,
        };
        for (serial, message) in arrivals {
            self.grant_arrives(serial, message);
        }
    }

    pub(crate) fn add_pool(&mut self, node: NodeIndex) {
        let rank = self.profile.rank_of(node);
        let count = match self.nodes[node].body.as_ref() {
            Some(body) if body.pools.len() < 3 && !body.draining => body.pools.len(),
            _ => return,
        };
        let model = self.profile.model.clone();
        let layout = match model.layout(&mut self.rng, rank) {
            Ok(layout) => layout,
            Err(error) => {
                self.fail("internal", format!("a layout is refused: {error}"));
                return;
            }
        };
        let pool = match SimPool::new(PoolId(count as u32), layout) {
            Ok(pool) => pool,
            Err(error) => {
                self.fail("internal", format!("a pool is refused: {error}"));
                return;
            }
        };
        let (id, layout, regions) = (pool.id, Arc::clone(&pool.layout), Arc::clone(&pool.regions));
        if let Some(body) = self.nodes[node].body.as_mut() {
            body.pools.push(pool);
        }
        self.coverage.reach(Point::PoolAdded);
        let keys = self.keys(node, id);
        let added = self.with_machine(node, |machine, now| {
            machine.add_pool(
                now,
                id,
                PoolSetup {
                    layout,
                    regions,
                    serves: true,
                    receives: true,
                    keys,
                },
            )
        });
        if let Some(Err(error)) = added {
            self.fail("internal", format!("a second pool is refused: {error}"));
        }
        let at = self.now + self.within_span();
        self.app_at(at, node, AppEvent::RemovePool { tries: 0 });
    }

    pub(crate) fn remove_pool(&mut self, node: NodeIndex, tries: u32) {
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let Some(index) = (1..body.pools.len()).find(|index| !body.pools[*index].removed) else {
            return;
        };
        let id = body.pools[index].id;
        let in_use = self.ledger.iter().any(|record| {
            record.node == node && record.life == self.nodes[node].life && record.pool == index && record.is_open()
        });
        match self.with_machine(node, |machine, now| machine.remove_pool(now, id)) {
            Some(Ok(())) if in_use => self.fail("2 no late write", format!("node {node} removed a pool in use")),
            Some(Ok(())) => {
                self.coverage.reach(Point::PoolRemoved);
                if let Some(body) = self.nodes[node].body.as_mut() {
                    body.pools[index].removed = true;
                }
            }
            Some(Err(error)) if error.kind() == ErrorKind::Busy => {
                if in_use {
                    self.coverage.reach(Point::PoolBusy);
                }
                if tries < RETRIES_MAX {
                    let at = self.now + Duration::from_millis(100);
                    self.app_at(at, node, AppEvent::RemovePool { tries: tries + 1 });
                }
            }
            Some(Err(error)) => self.fail("internal", format!("node {node} cannot remove a pool: {error}")),
            None => {}
        }
    }

    pub(crate) fn drain(&mut self, node: NodeIndex) {
        if let Some(body) = self.nodes[node].body.as_mut() {
            body.draining = true;
        }
        self.coverage.reach(Point::Drained);
        self.trace(|| format!("node {node} drains"));
        self.with_machine(node, |machine, now| machine.drain(now));
    }
}

/// What the library is told of a shape.
pub(crate) fn target_of(shape: &Shape) -> Target {
    match shape {
        Shape::Selection(selection) => Target::from(Selection::clone(selection)),
        Shape::Descriptors(pieces) => Target::from(pieces.clone()),
    }
}

/// Bytes of one block over all planes of the first cache group.
fn block_bytes(layout: &PoolLayout) -> u64 {
    layout
        .planes()
        .iter()
        .filter(|plane| plane.group == 0)
        .map(|plane| plane.block_length)
        .sum()
}
