//! Flushing a device: writes that it has accepted may still be on their way to memory, also after their queue pair is
//! destroyed. A read that the device makes of its own, of each region that could have been written, cannot overtake them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::{Error, Result, Time};

use crate::clock;
use crate::device::Device;
use crate::error::RdmaError;
use crate::random;
use crate::registry::{RegionKeys, Registry};
use crate::staging::Staging;
use crate::verbs::{
    CompletionBuffer, CompletionChannel, CompletionQueue, InitState, Operation, PathAddress, QueuePair,
    QueuePairCapacity, ReceiveState, Request, SendBatch, SendState, Sge,
};

/// Reads posted at once.
const DEPTH: u32 = 64;

/// Who asks: a link's rail.
pub(super) type Asker = (u64, u16);

/// Two queue pairs of the device, joined to each other, and who waits for a flush.
pub(super) struct Flusher {
    pair: Option<Loop>,
    waiting: VecDeque<Asker>,
    running: Option<Running>,
    answers: HashMap<Asker, bool>,
    limit: Duration,
    // The last flush failed, which was said.
    failing: bool,
}

struct Loop {
    near: QueuePair,
    // The other end; only its being there matters.
    _far: QueuePair,
    completions: CompletionQueue,
    armed: bool,
}

struct Running {
    askers: Vec<Asker>,
    /// Regions still to be read.
    points: Vec<(u64, u32)>,
    /// So that the keys being read stay valid, whatever pool is given up meanwhile.
    _registrations: Vec<Arc<RegionKeys>>,
    outstanding: u32,
    failed: bool,
    limit: Time,
}

impl Flusher {
    pub(super) fn new(device: &Device, channel: &CompletionChannel, limit: Duration) -> Result<Flusher> {
        Ok(Flusher {
            pair: Some(Loop::new(device, channel)?),
            waiting: VecDeque::new(),
            running: None,
            answers: HashMap::new(),
            limit,
            failing: false,
        })
    }

    /// Wants everything that the device has accepted until now to be in memory.
    pub(super) fn ask(&mut self, asker: Asker) {
        if !self.waiting.contains(&asker) {
            self.waiting.push_back(asker);
        }
    }

    /// Wants it no more.
    pub(super) fn withdraw(&mut self, asker: Asker) {
        self.waiting.retain(|other| *other != asker);
        if let Some(running) = &mut self.running {
            running.askers.retain(|other| *other != asker);
        }
        self.answers.remove(&asker);
    }

    /// Answers without a flush: there is nothing that one could make sure of.
    pub(super) fn answer_without(&mut self, asker: Asker, done: bool) {
        self.answers.insert(asker, done);
    }

    /// Whether it was done, once that is known. An answer is given once.
    pub(super) fn answer(&mut self, asker: Asker) -> Option<bool> {
        self.answers.remove(&asker)
    }

    /// Takes completions. True if there were any.
    pub(super) fn poll(&mut self, buffer: &mut CompletionBuffer) -> bool {
        let Some(pair) = &mut self.pair else { return false };
        let mut any = false;
        while let Ok(count) = pair.completions.poll(buffer) {
            if count == 0 {
                break;
            }
            any = true;
            for completion in buffer.iter() {
                if let Some(running) = &mut self.running {
                    running.outstanding = running.outstanding.saturating_sub(1);
                    running.failed |= !completion.status.is_success();
                }
            }
        }
        any
    }

    /// Goes on with what waits.
    pub(super) fn advance(
        &mut self,
        device: &Device,
        channel: &CompletionChannel,
        (registry, staging): (&Registry, &Staging),
        now: Time,
    ) {
        if let Some(running) = &mut self.running
            && !running.failed
            && running.outstanding == 0
            && !running.points.is_empty()
            && let Some(pair) = &mut self.pair
        {
            running.failed = pair.read(device, running).is_err();
        }
        if let Some(running) = self.running.take_if(|running| {
            running.failed || running.limit <= now || (running.outstanding == 0 && running.points.is_empty())
        }) {
            let done = !running.failed && running.outstanding == 0 && running.points.is_empty();
            if !done && !std::mem::replace(&mut self.failing, true) {
                tracing::error!(
                    device = device.name,
                    "the device could not be flushed: it is tried again"
                );
            }
            self.failing = !done;
            if !done {
                // Its queue pair may be in the error state: the next flush makes a new one.
                self.pair = None;
            }
            for asker in running.askers {
                self.answers.insert(asker, done);
            }
        }
        if self.running.is_none() && !self.waiting.is_empty() {
            self.repair(device, channel);
            let registrations = registry.written_by_peers();
            let mut points: Vec<(u64, u32)> = registrations
                .iter()
                .flat_map(|keys| keys.flush_targets(device.index))
                .map(|target| (target.address, target.rkey))
                .collect();
            points.extend(staging.landings.flush_points());
            points.push(device.flush_page());
            let mut running = Running {
                askers: self.waiting.drain(..).collect(),
                points,
                _registrations: registrations,
                outstanding: 0,
                failed: false,
                limit: now + self.limit,
            };
            match &mut self.pair {
                Some(pair) => running.failed = pair.read(device, &mut running).is_err(),
                None => running.failed = true,
            }
            self.running = Some(running);
        }
    }

    /// Makes the queue pairs anew after a flush failed.
    fn repair(&mut self, device: &Device, channel: &CompletionChannel) {
        if self.pair.is_none() {
            match Loop::new(device, channel) {
                Ok(pair) => self.pair = Some(pair),
                Err(error) => tracing::debug!(device = device.name, %error, "no loopback queue pair"),
            }
        }
    }

    /// When to look again whatever happens.
    pub(super) fn due(&self) -> Option<Time> {
        match &self.running {
            Some(running) if running.failed => Some(clock::now()),
            Some(running) => Some(running.limit),
            None => (!self.waiting.is_empty()).then(clock::now),
        }
    }

    /// Whose answers wait.
    pub(super) fn answered(&self) -> Vec<Asker> {
        self.answers.keys().copied().collect()
    }

    pub(super) fn arm(&mut self) -> bool {
        match self.pair.as_mut().filter(|pair| !pair.armed) {
            Some(pair) => {
                pair.armed = pair.completions.request_notify().is_ok();
                true
            }
            None => false,
        }
    }

    pub(super) fn disarmed(&mut self) {
        if let Some(pair) = &mut self.pair {
            pair.armed = false;
        }
    }
}

impl Loop {
    fn new(device: &Device, channel: &CompletionChannel) -> Result<Loop> {
        let verbs = |error| Error::from(RdmaError::Verbs(error));
        let completions = CompletionQueue::new(&device.context, 2 * DEPTH + 4, Some(channel)).map_err(verbs)?;
        let capacity = QueuePairCapacity {
            send_requests: DEPTH,
            receive_requests: 1,
            send_segments: 1,
            receive_segments: 1,
            inline_bytes: 0,
        };
        let make = || QueuePair::new(&device.domain, &completions, &completions, capacity).map_err(verbs);
        let (near, far) = (make()?, make()?);
        let port = device.first_port()?;
        let way = device.gid_for(&port, &[])?;
        let sequences = (random::bits24(), random::bits24());
        for (this, other, own_sequence, other_sequence) in [
            (&near, &far, sequences.0, sequences.1),
            (&far, &near, sequences.1, sequences.0),
        ] {
            this.to_init(&InitState {
                port: port.number,
                pkey_index: 0,
                remote_write: false,
                remote_read: true,
            })
            .map_err(verbs)?;
            this.to_receive(&ReceiveState {
                peer_qp: other.number(),
                peer_psn: other_sequence,
                mtu: port.mtu,
                address: PathAddress {
                    lid: port.lid,
                    gid: way.routed.then_some(way.own.gid),
                    gid_index: way.own.index,
                    service_level: 0,
                    traffic_class: 0,
                    hop_limit: 1,
                    port: port.number,
                    flow_label: 0,
                },
                max_dest_rd_atomic: 1,
                min_rnr_timer: 12,
            })
            .map_err(verbs)?;
            this.to_send(&SendState {
                psn: own_sequence,
                timeout: 14,
                retry_count: 7,
                rnr_retry: 6,
                max_rd_atomic: 1,
            })
            .map_err(verbs)?;
        }
        Ok(Loop {
            near,
            _far: far,
            completions,
            armed: false,
        })
    }

    /// Posts reads of the next regions.
    fn read(&mut self, device: &Device, running: &mut Running) -> Result<(), ()> {
        let (address, _, lkey) = device.probe_source();
        let count = running.points.len().min(DEPTH as usize / 2);
        let mut batch = SendBatch::new(count, count);
        for (index, (remote_address, rkey)) in running.points.drain(..count).enumerate() {
            let request = Request {
                wr_id: index as u64,
                operation: Operation::Read,
                remote_address,
                rkey,
                signalled: true,
                fence: false,
            };
            batch.push(
                request,
                &[Sge {
                    address,
                    length: 1,
                    lkey,
                }],
            );
        }
        running.outstanding = count as u32;
        self.near.post_send(&mut batch).map_err(|error| {
            tracing::error!(device = device.name, error = %error.source, "a flush could not be posted");
        })
    }
}
