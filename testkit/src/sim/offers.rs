//! Prefill applications: offers opened, filled part by part, restarted, and finished.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::ErrorKind;
use kvxfer_core::layout::Selection;
use kvxfer_core::machine::{HandleId, OfferOptions};

use super::coverage::Point;
use super::ledger::{OfferRecord, Serial, Shape, What};
use super::workload::{AppEvent, Early, RETRIES_MAX, RETRY, Retract, Step};
use super::world::{NodeIndex, World};

impl World {
    pub(crate) fn open_offer(&mut self, node: NodeIndex, request: usize, source: usize, tries: u32) {
        let this = &self.workload.requests[request];
        let (key, tokens) = (this.key.clone(), this.tokens);
        let options = OfferOptions {
            readers: this.readers,
            deadline: this.deadline,
            priority: this.priority,
            checksum: this.checksum,
        };
        let live = self.ledger.iter().any(|record| {
            record.node == node
                && record.is_open()
                && record.life == self.nodes[node].life
                && matches!(&record.what, What::Offer(offer) if offer.key == key)
        });
        let Some(pool) = self.pool_id(node, 0) else {
            return;
        };
        let opened = self.with_machine(node, |machine, now| machine.offer(now, &key, pool, options));
        match opened {
            Some(Ok(handle)) => {
                if live {
                    self.fail("6 no stale peer", format!("node {node} has two live offers of one key"));
                    return;
                }
                let incarnation = match self.nodes[node].body.as_ref() {
                    Some(body) => body.incarnation,
                    None => return,
                };
                let what = What::Offer(OfferRecord {
                    request,
                    key,
                    incarnation,
                    attempt: 1,
                    readers: self.workload.requests[request].readers,
                    finished: false,
                    retracted: false,
                });
                let deadline = self.workload.requests[request].deadline;
                let limit = deadline.unwrap_or(self.profile.machine.hold_max + self.profile.machine.unmatched_deadline);
                let serial = self.record(node, 0, handle, what, Shape::Selection(Selection::default()), limit);
                self.write_script(serial, tokens);
                self.trace(|| format!("node {node} offers request {request} as #{serial}"));
                let at = self.now + self.step_delay();
                self.app_at(
                    at,
                    node,
                    AppEvent::OfferStep {
                        serial,
                        step: 0,
                        tries: 0,
                    },
                );
                self.meddle(node, serial);
            }
            Some(Err(error)) => {
                self.trace(|| format!("node {node} cannot offer request {request}: {error}"));
                match error.kind() {
                    ErrorKind::DuplicateKey if live => self.coverage.reach(Point::DuplicateKey),
                    ErrorKind::DuplicateKey => {
                        self.fail(
                            "internal",
                            format!("node {node}: {error}, and no live offer has that key"),
                        );
                        return;
                    }
                    kind => self.refused(node, kind, &error),
                }
                if tries < RETRIES_MAX {
                    let at = self.now + RETRY;
                    let tries = tries + 1;
                    self.app_at(at, node, AppEvent::OpenOffer { request, source, tries });
                } else {
                    self.workload.requests[request].disturbed = true;
                }
            }
            None => {}
        }
    }

    /// A limit may answer `Busy`, a drained endpoint `Closed`; anything else is not expected of an honest call.
    pub(crate) fn refused(&mut self, node: NodeIndex, kind: ErrorKind, error: &kvxfer_core::Error) {
        let draining = self.nodes[node].body.as_ref().is_some_and(|body| body.draining);
        match kind {
            ErrorKind::Busy if self.profile.tight_limits => self.coverage.reach(Point::Busy),
            ErrorKind::Closed if draining => {}
            _ => self.fail("internal", format!("node {node} refuses an honest call: {error}")),
        }
    }

    pub(crate) fn write_script(&mut self, serial: Serial, tokens: u32) {
        let (node, pool) = (self.ledger[serial as usize].node, self.ledger[serial as usize].pool);
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let layout = Arc::clone(&body.pools[pool].layout);
        let per_block = layout.cache_groups()[0].geometry.tokens_per_block;
        let layers = layout.layers().len() as u16;
        let mut steps = Vec::new();
        let restart_percent = self.profile.meddling_percent / 4;
        let rounds = if self.rng.percent(restart_percent) { 2 } else { 1 };
        for round in 0..rounds {
            let last_round = round + 1 == rounds;
            let mut start = 0;
            while start < tokens {
                let blocks = 1 + self.rng.below(3) as u32;
                let end = (start + blocks * per_block).min(tokens);
                steps.push(Step::Append(start..end));
                // The last tokens of a half-full block go with `finish`.
                if end.is_multiple_of(per_block) && self.rng.percent(75) {
                    let mut cuts: Vec<Range<u16>> = if layers > 1 && self.rng.percent(50) {
                        let cut = 1 + self.rng.below(u64::from(layers) - 1) as u16;
                        vec![0..cut, cut..layers]
                    } else {
                        std::iter::once(0..layers).collect()
                    };
                    self.rng.shuffle(&mut cuts);
                    for layers in cuts {
                        steps.push(Step::Ready {
                            tokens: start..end,
                            layers,
                            gated: self.rng.percent(self.profile.gated_percent),
                        });
                    }
                }
                start = end;
            }
            steps.push(if last_round {
                Step::Finish {
                    tokens,
                    gated: self.rng.percent(self.profile.gated_percent),
                }
            } else {
                Step::Restart
            });
        }
        if rounds == 1 && self.rng.percent(40) {
            // Parts in any order, once the blocks are there.
            let (mut ready, mut rest): (Vec<Step>, Vec<Step>) =
                steps.into_iter().partition(|step| matches!(step, Step::Ready { .. }));
            let finish = rest.split_off(rest.len() - 1);
            self.rng.shuffle(&mut ready);
            rest.extend(ready);
            rest.extend(finish);
            steps = rest;
        }
        self.workload.script_of.insert(serial, self.workload.scripts.len());
        self.workload.scripts.push(steps);
    }

    pub(crate) fn step_delay(&mut self) -> Duration {
        let span = *self.rng.pick(&[30u64, 1_000, 30_000]).unwrap_or(&1_000);
        Duration::from_micros(self.rng.below(span))
    }

    pub(crate) fn offer_step(&mut self, node: NodeIndex, serial: Serial, step: usize, tries: u32) {
        if !self.ledger[serial as usize].is_open() || self.ledger[serial as usize].ending {
            return;
        }
        let script = self.workload.script_of[&serial];
        let Some(what) = self.workload.scripts[script].get(step).cloned() else {
            return;
        };
        let handle = self.ledger[serial as usize].handle;
        let outcome = match what {
            Step::Append(tokens) => match self.append(node, serial, handle, tokens) {
                Some(outcome) => outcome,
                None => {
                    self.no_blocks(
                        node,
                        serial,
                        AppEvent::OfferStep {
                            serial,
                            step,
                            tries: tries + 1,
                        },
                        tries,
                    );
                    return;
                }
            },
            Step::Ready {
                tokens,
                layers,
                gated: true,
            } => {
                let range = (layers.start, layers.end);
                let asked = (tokens.start, tokens.end);
                self.after_event(node, serial, tokens, layers, |machine, now, event| {
                    machine.ready_after(now, handle, asked, range, event)
                })
            }
            Step::Ready { tokens, layers, .. } => {
                self.write_source(serial, tokens.clone(), layers.clone());
                let tokens = (tokens.start, tokens.end);
                self.with_machine(node, |machine, now| {
                    machine.ready(now, handle, tokens, (layers.start, layers.end))
                })
            }
            Step::Restart => self.restart_offer(node, serial, handle),
            Step::Finish { tokens, gated } => {
                if let What::Offer(offer) = &mut self.ledger[serial as usize].what {
                    offer.finished = true;
                }
                if gated {
                    self.after_event(node, serial, 0..u32::MAX, 0..u16::MAX, |machine, now, event| {
                        machine.finish_after(now, handle, tokens, event)
                    })
                } else {
                    self.write_source(serial, 0..u32::MAX, 0..u16::MAX);
                    self.with_machine(node, |machine, now| machine.finish(now, handle, tokens))
                }
            }
        };
        match outcome {
            Some(Ok(())) => {
                let at = self.now + self.step_delay();
                let step = step + 1;
                self.app_at(at, node, AppEvent::OfferStep { serial, step, tries: 0 });
            }
            // It is ending, for a reason that its completion will say.
            Some(Err(error)) if error.kind() == ErrorKind::Closed => {}
            Some(Err(error)) if error.kind() == ErrorKind::Busy && self.profile.tight_limits => {
                self.coverage.reach(Point::Busy);
                self.no_blocks(
                    node,
                    serial,
                    AppEvent::OfferStep {
                        serial,
                        step,
                        tries: tries + 1,
                    },
                    tries,
                );
            }
            Some(Err(error)) => {
                let who = self.describe(serial);
                self.fail("internal", format!("step {step} of {who} is refused: {error}"));
            }
            None => {}
        }
    }

    pub(crate) fn append(
        &mut self,
        node: NodeIndex,
        serial: Serial,
        handle: HandleId,
        tokens: Range<u32>,
    ) -> Option<Option<kvxfer_core::Result<()>>> {
        let states = matches!(&self.ledger[serial as usize].shape, Shape::Selection(whole) if whole.groups.is_empty());
        let selection = self.allocate_selection(node, self.ledger[serial as usize].pool, tokens, states)?;
        for (group, chosen) in selection.groups.iter().enumerate() {
            self.give_blocks(serial, group, &chosen.blocks);
        }
        if let Shape::Selection(whole) = &mut self.ledger[serial as usize].shape {
            if whole.groups.is_empty() {
                whole.clone_from(&selection);
            } else {
                for (whole, more) in whole.groups.iter_mut().zip(&selection.groups) {
                    whole.blocks.extend_from_slice(&more.blocks);
                    whole.token_end = whole.token_end.max(more.token_end);
                }
            }
        }
        Some(self.with_machine(node, |machine, now| machine.append(now, handle, &selection)))
    }

    /// There are no blocks now: later, or never.
    pub(crate) fn no_blocks(&mut self, node: NodeIndex, serial: Serial, again: AppEvent, tries: u32) {
        if tries < RETRIES_MAX {
            let at = self.now + RETRY;
            self.app_at(at, node, again);
        } else {
            self.disturb(serial);
            self.end_early(node, serial, Early::Cancel);
        }
    }

    pub(crate) fn restart_offer(
        &mut self,
        node: NodeIndex,
        serial: Serial,
        handle: HandleId,
    ) -> Option<kvxfer_core::Result<()>> {
        let outcome = self.with_machine(node, |machine, now| machine.restart(now, handle));
        if let Some(Ok(())) = &outcome
            && let What::Offer(offer) = &mut self.ledger[serial as usize].what
        {
            offer.attempt += 1;
            self.coverage.reach(Point::Restarted);
            // The engine computes it all again; the blocks of the earlier attempt go to whoever is next.
            let gates = self
                .with_machine(node, |machine, _| machine.voided_gates(handle))
                .unwrap_or_default();
            let record = &mut self.ledger[serial as usize];
            record.shape = Shape::Selection(Selection::default());
            let blocks = std::mem::take(&mut record.blocks);
            self.take_back_behind(Retract {
                node,
                serial,
                gates,
                blocks: Some(blocks),
            });
        }
        outcome
    }

    /// Gives blocks back once no thread can read them any more: at once, if nobody is inside their gates.
    pub(crate) fn take_back_behind(&mut self, retract: Retract) {
        if !retract.gates.iter().all(|gate| gate.fenced()) {
            self.coverage.reach(Point::RetractWaited);
            self.workload.retracts.push(retract);
            return;
        }
        match retract.blocks {
            Some(blocks) => self.free_blocks(retract.serial, &blocks),
            None => self.release_blocks(retract.serial),
        }
    }
}
