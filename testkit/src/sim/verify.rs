//! Promises 1 and 3 at an arrival: every byte of the destination, and whose it is.

use super::ledger::{Serial, Shape, What};
use super::memory::{SimPool, descriptor_byte, descriptor_runs};
use super::world::World;
use crate::pattern::{self, Run};

impl World {
    /// Promise 1: at an arrival every byte of the destination is right, and of one attempt per source that counts.
    pub(crate) fn verify_destination(&mut self, serial: Serial) {
        let record = &self.ledger[serial as usize];
        let (node, pool, shape) = (record.node, record.pool, record.shape.clone());
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let pool = &body.pools[pool];
        let mut wrong: Option<(&'static str, String)> = None;
        match &shape {
            Shape::Selection(selection) => {
                let mut bytes = Vec::new();
                pattern::for_each_run(&pool.layout, selection, 0..u32::MAX, 0..u16::MAX, |run| {
                    if wrong.is_none() {
                        wrong = self.wrong_run(serial, pool, run, &mut bytes);
                    }
                });
            }
            Shape::Descriptors(pieces) => wrong = self.wrong_descriptors(serial, pool, pieces),
        }
        let came_from = self.sources_of(serial);
        if wrong.is_none() && came_from.len() > 1 && !matches!(self.ledger[serial as usize].what, What::Claim(_)) {
            wrong = Some((
                "4 one verdict",
                format!("its bytes came from {} transfers", came_from.len()),
            ));
        }
        self.ledger[serial as usize].came_from = came_from;
        if let Some((promise, words)) = wrong {
            let who = self.describe(serial);
            self.fail(promise, format!("{who} has arrived, but {words}"));
        }
    }

    /// Whose bytes a destination holds.
    pub(crate) fn sources_of(&self, serial: Serial) -> std::collections::BTreeSet<Serial> {
        let record = &self.ledger[serial as usize];
        let mut sources = std::collections::BTreeSet::new();
        if let Some(body) = self.nodes[record.node].body.as_ref() {
            let pool = &body.pools[record.pool];
            for (group, blocks) in record.blocks.iter().enumerate() {
                for block in blocks {
                    for (region, offset, length) in pool.block_runs(group, *block) {
                        for stamp in &pool.stamp[region][offset..offset + length] {
                            sources.extend(
                                self.stamps
                                    .get(*stamp as usize)
                                    .map(|of| of.serial)
                                    .filter(|of| *of != 0),
                            );
                        }
                    }
                }
            }
        }
        sources
    }

    pub(crate) fn wrong_run(
        &self,
        serial: Serial,
        pool: &SimPool,
        run: &Run,
        bytes: &mut Vec<u8>,
    ) -> Option<(&'static str, String)> {
        let (region, offset, length) = (run.region as usize, run.offset as usize, run.length as usize);
        let stamps = &pool.stamp[region][offset..offset + length];
        let place = || {
            format!(
                "token {} of layer {}, head {}, kind {}",
                run.token,
                pool.layout.layers()[run.layer as usize],
                run.head,
                run.kind
            )
        };
        if let Some(other) = stamps.iter().find(|stamp| **stamp != stamps[0]) {
            return Some((
                "1 placed",
                format!(
                    "{} is half of {} and half of {}",
                    place(),
                    self.describe_stamp(stamps[0]),
                    self.describe_stamp(*other)
                ),
            ));
        }
        let Some(of) = self.stamps.get(stamps[0] as usize).copied().filter(|of| of.serial != 0) else {
            return Some(("1 placed", format!("nothing was placed at {}", place())));
        };
        if !self.accepts(serial, stamps[0]) {
            return Some((
                "3 no false read",
                format!("{} holds bytes of {}", place(), self.describe_stamp(stamps[0])),
            ));
        }
        if let (What::Claim(claim), What::Offer(offer)) = (
            &self.ledger[serial as usize].what,
            &self.ledger[of.serial as usize].what,
        ) && let Some(told) = claim.attempts_told.get(&offer.incarnation)
            && of.attempt < *told
        {
            return Some((
                "3 no false read",
                format!(
                    "{} is of attempt {}, and attempt {told} was announced",
                    place(),
                    of.attempt
                ),
            ));
        }
        bytes.resize(length, 0);
        if let Err(error) = pool.regions[region].copy_out(run.offset, bytes) {
            return Some(("1 placed", error.to_string()));
        }
        let content = self.content_of(of.serial, of.attempt);
        content.first_difference(&pool.layout, run, bytes).map(|at| {
            (
                "1 placed",
                format!(
                    "byte {at} of {} is not what {} holds",
                    place(),
                    self.describe_stamp(stamps[0])
                ),
            )
        })
    }

    pub(crate) fn wrong_descriptors(
        &self,
        serial: Serial,
        pool: &SimPool,
        pieces: &[kvxfer_core::layout::BlockDescriptor],
    ) -> Option<(&'static str, String)> {
        let mut position = 0;
        for (region, offset, length) in descriptor_runs(&pool.layout, pieces) {
            for index in 0..length {
                let at = (offset + index) as usize;
                let stamp = pool.stamp[region][at];
                let of = self.stamps.get(stamp as usize).copied().filter(|of| of.serial != 0);
                let Some(of) = of else {
                    return Some(("1 placed", format!("nothing was placed at byte {}", position + index)));
                };
                if !self.accepts(serial, stamp) {
                    let words = format!("byte {} is of {}", position + index, self.describe_stamp(stamp));
                    return Some(("3 no false read", words));
                }
                let mut byte = [0];
                let read = pool.regions[region].copy_out(at as u64, &mut byte);
                if read.is_err() || byte[0] != descriptor_byte(of.serial, position + index) {
                    return Some((
                        "1 placed",
                        format!("byte {} is not what its source holds", position + index),
                    ));
                }
            }
            position += length;
        }
        None
    }
}
