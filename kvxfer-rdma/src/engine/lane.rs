//! One rail's end on its engine: the queue pair while there is one, and what stage it is in.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{ChunkName, LaneName};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{Error, Time};

use crate::device::Device;
use crate::error::RdmaError;
use crate::link::{Flushing, LinkCore, Mail, RailPlace};
use crate::message::{Closing, LinkMessage, RailHello};
use crate::staging::Buffer;
use crate::verbs::{CompletionBuffer, CompletionQueue, Mtu, QueuePair};

use super::Turn;
use super::expose::Exposure;
use super::staged::{LaneCopy, StagedChunk};
use super::work::{Current, Marker, OpenClose};

/// Earlier epochs whose closes may still be told, at most: each goes when the peer asks for its fence.
const PAST_MAX: usize = 16;
/// Fences that wait for a flush, at most.
const FENCES_MAX: usize = 64;

/// A rail's end.
pub(super) struct Lane {
    pub(super) link: Arc<LinkCore>,
    pub(super) rail: u16,
    pub(super) place: RailPlace,
    /// Somebody wants it looked at.
    pub(super) kicked: bool,
    pub(super) stage: Stage,
    /// The queue pair's epoch, or that of the last one.
    pub(super) epoch: u32,
    /// Epochs up to here are over.
    pub(super) epoch_floor: u32,
    pub(super) pair: Option<Pair>,
    /// Fences that the peer has asked for and that wait for the queue pair to be gone.
    pub(super) fences: Vec<(LaneName, Vec<ChunkName>)>,
    /// A newer queue pair of the dialer's, which waits for ours to be gone.
    pub(super) next_hello: Option<RailHello>,
    /// When the dialer tries again.
    pub(super) retry_at: Option<Time>,
    pub(super) attempts: u32,
    /// What was received on earlier epochs and not matched yet.
    pub(super) past: VecDeque<(u32, Received)>,
    /// What waits for the device to be flushed, and has not asked for it yet.
    pub(super) unflushed: Unflushed,
    /// What was there when a flush was asked for: that flush is enough for these, and for no others.
    pub(super) flushing: Unflushed,
    pub(super) flush_asked: bool,
    /// The last queue pair could not be destroyed.
    pub(super) undestroyed: bool,
    /// Copies out of staging buffers that run.
    pub(super) copies: Vec<LaneCopy>,
    /// When copies are looked at again, and how long after that.
    pub(super) copies_due: Option<Time>,
    pub(super) copies_pause: Duration,
    /// The queue pair is destroyed, and whether the device was flushed then; copies are waited for until the limit.
    pub(super) destroyed: Option<(bool, Time)>,
    /// Landings of queue pairs that may still write to them, by epoch.
    pub(super) quarantined: Vec<(u32, Buffer)>,
    /// Fences that the peer has asked for, that are made, and that are answered once all copies have ended.
    pub(super) answers: Vec<(LaneName, Vec<ChunkName>)>,
    /// The last flush failed; the next is not asked for before this.
    pub(super) flush_again: Option<Time>,
    /// The device is gone for good: it is not flushed any more.
    pub(super) device_dead: bool,
}

pub(super) enum Stage {
    /// No queue pair.
    Idle,
    /// Dialer: the peer was told, its answer is awaited.
    Connecting { limit: Time },
    /// Connected; not both sides have found that it works.
    Probing { limit: Time },
    /// In use.
    Up,
    /// In the error state: completions are awaited, until the limit.
    Draining { error: Error, limit: Time },
    /// Destroyed; the device is being flushed.
    Flushing { error: Error, limit: Time },
    /// The link has closed and nothing is left.
    Ended,
}

/// A queue pair and what is on it.
pub(super) struct Pair {
    /// Until it is destroyed.
    pub(super) queue_pair: Option<QueuePair>,
    pub(super) mtu: Mtu,
    pub(super) completions: CompletionQueue,
    /// The next completion makes an event.
    pub(super) armed: bool,
    pub(super) peer: Option<RailHello>,
    /// Work requests that fit. Markers may overdraw it by a few, for which the queue has room.
    pub(super) room: i64,
    /// The number of the next work request.
    pub(super) next: u64,
    /// Work requests since the last signalled one.
    pub(super) unsignalled: u32,
    pub(super) markers: VecDeque<Marker>,
    /// Not all of a batch could be posted: completions cannot tell when the queue is empty.
    pub(super) torn: bool,
    /// Receives posted and not completed.
    pub(super) receives: u32,
    /// Receives to be posted again.
    pub(super) owed: u32,
    /// Immediates that we may send.
    pub(super) credits: u32,
    pub(super) next_close: u8,
    pub(super) received: Received,
    pub(super) current: Option<Current>,
    /// Chunks on their way through staging.
    pub(super) staged: VecDeque<StagedChunk>,
    /// Landings that the peer was asked for and has not given.
    pub(super) landings_asked: u32,
    /// Landings that the peer has asked for and was not given.
    pub(super) landings_wanted: u32,
    /// The number of the next landing that it is given.
    pub(super) next_landing: u32,
    /// What the peer reads or has asked to read, by its number for it.
    pub(super) exposures: BTreeMap<u32, Exposure>,
    /// The number of the next exposure that the peer is asked for.
    pub(super) next_exposure: u32,
    pub(super) open: Vec<OpenClose>,
    pub(super) last_progress: Time,
    pub(super) works_here: bool,
    pub(super) works_there: bool,
    /// Completed with an error, to be acted on in the lane's turn.
    pub(super) failure: Option<Error>,
    /// The work request that the peer did not let have its memory.
    pub(super) refused_request: Option<(u64, Error)>,
    /// Immediates that came, to be handled in the lane's turn.
    pub(super) immediates: Vec<u32>,
    /// Markers that completed, to be handled in the lane's turn.
    pub(super) completed: Vec<Marker>,
    /// Chunks whose work requests were flushed: outstanding until the pair is gone.
    pub(super) flushed: Vec<Marker>,
}

/// What the peer's closes have come to: immediates and the messages that say what they mean. Sets, not counts.
#[derive(Default)]
pub(super) struct Received {
    pub(super) immediates: HashSet<u32>,
    pub(super) closings: HashMap<u32, Closing>,
    /// Landings that the peer may write over that queue pair, by number.
    pub(super) landings: HashMap<u32, Buffer>,
}

/// What may still be on its way to memory.
#[derive(Default)]
pub(super) struct Unflushed {
    /// Closes without an immediate.
    pub(super) closings: Vec<Closing>,
    /// Slots that the peer writes no more.
    pub(super) revoked: Vec<Arc<Flushing>>,
    /// Queue pairs that are destroyed, after which the device could not be flushed.
    pub(super) lanes: Vec<LaneName>,
    /// Landings that the peer has given back.
    pub(super) landings: Vec<Buffer>,
}

impl Unflushed {
    pub(super) fn is_empty(&self) -> bool {
        self.closings.is_empty() && self.revoked.is_empty() && self.lanes.is_empty() && self.landings.is_empty()
    }

    /// Takes all of `other`, after what is here.
    pub(super) fn append(&mut self, other: &mut Unflushed) {
        self.closings.append(&mut other.closings);
        self.revoked.append(&mut other.revoked);
        self.lanes.append(&mut other.lanes);
        self.landings.append(&mut other.landings);
    }
}

impl Lane {
    pub(super) fn new(link: Arc<LinkCore>, rail: u16, place: RailPlace) -> Lane {
        let dials = link.peer.dials;
        Lane {
            link,
            rail,
            place,
            kicked: true,
            stage: Stage::Idle,
            epoch: 0,
            epoch_floor: 0,
            pair: None,
            fences: Vec::new(),
            next_hello: None,
            retry_at: dials.then_some(Time::ZERO),
            attempts: 0,
            past: VecDeque::new(),
            unflushed: Unflushed::default(),
            flushing: Unflushed::default(),
            flush_asked: false,
            copies: Vec::new(),
            copies_due: None,
            copies_pause: Duration::ZERO,
            destroyed: None,
            quarantined: Vec::new(),
            answers: Vec::new(),
            undestroyed: false,
            flush_again: None,
            device_dead: false,
        }
    }

    pub(super) fn name(&self) -> LaneName {
        LaneName {
            index: self.rail,
            epoch: self.epoch,
        }
    }

    pub(super) fn text(&self) -> String {
        self.link.lane_place(self.name())
    }

    pub(super) fn queue_pair(&self) -> Option<u32> {
        let pair = self.pair.as_ref()?;
        pair.queue_pair.as_ref().map(QueuePair::number)
    }

    /// The port's number on this device.
    pub(super) fn port(&self, device: &Device) -> Option<u8> {
        device.port_number(self.place.own_port)
    }

    pub(super) fn ended(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    /// The port is back: no need to wait for the next try.
    pub(super) fn try_now(&mut self) {
        if self.retry_at.is_some() {
            self.retry_at = Some(Time::ZERO);
            self.kicked = true;
        }
        if self.flush_again.is_some() {
            self.flush_again = Some(Time::ZERO);
        }
    }

    /// The device is gone for good: no verb on it comes to anything.
    pub(super) fn device_gone(&mut self, error: &Error) {
        self.device_dead = true;
        self.retry_at = None;
        self.next_hello = None;
        if matches!(self.stage, Stage::Connecting { .. } | Stage::Probing { .. } | Stage::Up) {
            self.fail(error.clone());
        } else if matches!(self.stage, Stage::Idle) {
            self.link.rail_dead(self.rail, error);
        }
    }

    /// Takes completions from the queue. True if there were any.
    pub(super) fn poll(&mut self, buffer: &mut CompletionBuffer, now: Time) -> bool {
        let Some(pair) = &mut self.pair else { return false };
        let mut any = false;
        loop {
            match pair.completions.poll(buffer) {
                Ok(0) => break,
                Ok(count) => {
                    any = true;
                    for completion in buffer.iter() {
                        pair.take(&completion, now, || {
                            self.link.lane_place(LaneName {
                                index: self.rail,
                                epoch: self.epoch,
                            })
                        });
                    }
                    if count < buffer.capacity() {
                        break;
                    }
                }
                Err(error) => {
                    pair.failure.get_or_insert_with(|| RdmaError::from(error).into());
                    break;
                }
            }
        }
        self.kicked |= any;
        any
    }

    /// Asks for an event at the next completion. True if that is news.
    pub(super) fn arm(&mut self) -> bool {
        let Some(pair) = self.pair.as_mut().filter(|pair| !pair.armed) else {
            return false;
        };
        match pair.completions.request_notify() {
            Ok(()) => pair.armed = true,
            Err(error) => {
                pair.failure.get_or_insert_with(|| RdmaError::from(error).into());
                self.kicked = true;
            }
        }
        true
    }

    pub(super) fn disarmed(&mut self) {
        if let Some(pair) = &mut self.pair {
            pair.armed = false;
        }
    }

    pub(super) fn wants_turn(&self, now: Time) -> bool {
        self.kicked || self.due(now).is_some_and(|due| due <= now)
    }

    /// When the lane wants a turn whatever happens.
    pub(super) fn due(&self, now: Time) -> Option<Time> {
        let others = self.flush_again.into_iter().chain(self.copies_due);
        self.stage_due(now).into_iter().chain(others).min()
    }

    fn stage_due(&self, now: Time) -> Option<Time> {
        match &self.stage {
            Stage::Idle => self.retry_at.map(|at| at.max(now)),
            Stage::Connecting { limit } | Stage::Probing { limit } => Some(*limit),
            Stage::Draining { limit, .. } => Some(*limit),
            Stage::Flushing { limit, .. } => Some(self.destroyed.map_or(*limit, |(_, limit)| limit)),
            Stage::Up => {
                let pair = self.pair.as_ref()?;
                (!pair.markers.is_empty()).then(|| pair.last_progress + self.link.config.progress)
            }
            Stage::Ended => None,
        }
    }

    /// Does whatever is to be done.
    pub(super) fn turn(&mut self, turn: &mut Turn<'_>) {
        self.kicked = false;
        self.take_completed(turn);
        self.take_mail(turn);
        if self.link.closing() {
            self.close();
        }
        self.check_limits(turn);
        self.poll_copies(turn);
        if matches!(self.stage, Stage::Up) {
            self.receive(turn);
            self.grant_landings(turn);
            self.advance_exposures(turn);
            self.fill(turn);
        } else {
            turn.staging.withdraw((self.link.id, self.rail));
        }
        self.advance(turn);
        self.answer_fences();
    }

    fn take_mail(&mut self, turn: &mut Turn<'_>) {
        loop {
            let mail = self.link.rails[usize::from(self.rail)].mail.lock().pop_front();
            match mail {
                None => return,
                Some(Mail::Flush(flushing)) => self.unflushed.revoked.push(flushing),
                Some(Mail::Fail(error)) => self.fail(error),
                Some(Mail::Fence(lane, chunks)) => self.fence_asked(lane, chunks),
                Some(Mail::Message(message)) => self.take_message(turn, message),
            }
        }
    }

    fn take_message(&mut self, turn: &mut Turn<'_>, message: LinkMessage) {
        match message {
            LinkMessage::Connect(hello) => self.connect_asked(turn, hello),
            LinkMessage::Accept(hello) => self.accepted(turn, hello),
            LinkMessage::Reject { lane, why }
                if lane == self.name() && matches!(self.stage, Stage::Connecting { .. } | Stage::Probing { .. }) =>
            {
                self.fail(
                    RdmaError::Lost {
                        place: self.text(),
                        why: format!("the peer refused it: {why}"),
                    }
                    .into(),
                );
            }
            LinkMessage::Ready { lane } => self.peer_ready(turn, lane),
            LinkMessage::Credits { lane, count } => {
                if lane == self.name()
                    && let Some(pair) = &mut self.pair
                {
                    pair.credits = pair.credits.saturating_add(count).min(crate::config::RECEIVE_DEPTH_MAX);
                }
            }
            LinkMessage::LandingWanted { lane, count } => self.landings_wanted(lane, count),
            LinkMessage::Landings { lane, landings } => self.landings_given(lane, landings),
            LinkMessage::LandingsUnused { lane, landings } => self.landings_given_back(lane, &landings),
            LinkMessage::Expose { lane, number, pieces } => self.exposure_asked(lane, number, pieces),
            LinkMessage::Exposed { lane, exposure } => self.exposed(lane, exposure),
            LinkMessage::NotExposed { lane, number, why } => self.not_exposed(turn, lane, number, &why),
            LinkMessage::ExposureDone { lane, number } => self.exposure_done(lane, number),
            LinkMessage::LaneDown { lane, why } if lane == self.name() && self.pair.is_some() => {
                self.fail(
                    RdmaError::Lost {
                        place: self.text(),
                        why: format!("the peer lost it: {why}"),
                    }
                    .into(),
                );
            }
            LinkMessage::Closing(closing) => self.closing_told(turn, closing),
            // Late ones, and those that are not a rail's.
            _ => {}
        }
    }

    /// The peer has lost a lane: it is taken out of use, and what became of these chunks is said.
    fn fence_asked(&mut self, lane: LaneName, chunks: Vec<ChunkName>) {
        let live = !matches!(self.stage, Stage::Idle | Stage::Ended);
        if live && lane.epoch == self.epoch {
            self.fences.push((lane, chunks));
            self.fail(
                RdmaError::Lost {
                    place: self.text(),
                    why: "the peer lost it".into(),
                }
                .into(),
            );
            return;
        }
        if self.link.is_unfinished(lane) {
            // What it may still write cannot be said to be over: no answer is better than a wrong one.
            if self.fences.len() < FENCES_MAX {
                self.fences.push((lane, chunks));
            }
            return;
        }
        // Gone already, or never made: a later try of that epoch is refused.
        self.epoch_floor = self.epoch_floor.max(lane.epoch);
        self.answers.push((lane, chunks));
        self.answer_fences();
    }

    /// Says what became of the chunks of lanes that are gone and flushed, once no copy runs any more that could make
    /// another truth of it.
    pub(super) fn answer_fences(&mut self) {
        if self.answers.is_empty() || self.copying() {
            return;
        }
        for (lane, chunks) in std::mem::take(&mut self.answers) {
            let of_lane = |closing: &&Closing| closing.lane.epoch == lane.epoch && closing.has_landings();
            let mut closings = self.unflushed.closings.iter().chain(&self.flushing.closings);
            match closings.any(|closing| of_lane(&closing)) {
                // Its landings are emptied first.
                true => self.answers.push((lane, chunks)),
                false => self.answer_fence(lane, chunks),
            }
        }
    }

    fn answer_fence(&mut self, lane: LaneName, chunks: Vec<ChunkName>) {
        while let Some(place) = self.past.iter().position(|(epoch, _)| *epoch == lane.epoch)
            && let Some((epoch, received)) = self.past.remove(place)
        {
            self.let_go_of(epoch, received);
        }
        let states = self.link.slots.chunk_states(self.link.peer.incarnation, &chunks);
        // Closes told on the session before the question are counted: what this says is the truth of now.
        self.link.flush();
        self.link.emit(LinkEvent::LaneFenced {
            lane,
            chunks: chunks.into_iter().zip(states).collect(),
        });
    }

    /// Keeps what was received on a queue pair that is gone, until the peer asks for its fence.
    pub(super) fn keep_received(&mut self, received: Received) {
        if self.past.len() == PAST_MAX
            && let Some((epoch, received)) = self.past.pop_front()
        {
            self.let_go_of(epoch, received);
        }
        self.past.push_back((self.epoch, received));
    }

    fn close(&mut self) {
        match self.stage {
            // What runs is waited for.
            Stage::Idle if self.copying() => {}
            Stage::Idle => self.stage = Stage::Ended,
            Stage::Connecting { .. } | Stage::Probing { .. } | Stage::Up => {
                let error = RdmaError::Closed {
                    peer: self.link.peer.incarnation,
                };
                self.fail(error.into());
            }
            _ => {}
        }
    }

    fn check_limits(&mut self, turn: &mut Turn<'_>) {
        let now = turn.now;
        if let Some(error) = self.pair.as_mut().and_then(|pair| pair.failure.take()) {
            self.fail(error);
        }
        match &self.stage {
            Stage::Connecting { limit } | Stage::Probing { limit } if *limit <= now => self.fail(
                RdmaError::TimedOut {
                    place: self.text(),
                    limit_ms: self.link.config.connect_timeout.as_millis() as u64,
                }
                .into(),
            ),
            Stage::Up => {
                let progress = self.link.config.progress;
                let stalled = self
                    .pair
                    .as_ref()
                    .is_some_and(|pair| !pair.markers.is_empty() && pair.last_progress + progress <= now);
                if stalled {
                    self.fail(
                        RdmaError::Stalled {
                            place: self.text(),
                            limit_ms: progress.as_millis() as u64,
                        }
                        .into(),
                    );
                }
            }
            Stage::Idle if !self.link.closing() && self.retry_at.is_some_and(|at| at <= now) => self.dial(turn),
            _ => {}
        }
    }

    /// Says that the rail is up, or no longer.
    pub(super) fn shown(&self, name: Option<String>) {
        let rail = &self.link.rails[usize::from(self.rail)];
        let up = name.is_some();
        let was = std::mem::replace(&mut *rail.name.lock(), name).is_some();
        if up && !was {
            self.link.rail_up(self.rail);
        } else if was && !up {
            self.link.rail_down();
        }
    }
}
