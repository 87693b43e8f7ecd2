//! Promises checked as things happen: verdicts, deaths, deadlines, bounds, fairness.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::error::Destination;
use kvxfer_core::flow::{Chunk, Direction, Gate, Payload, SendSpec, TransferId};
use kvxfer_core::machine::{HandleId, MemberVerdict, Outcome, PeerChange};
use kvxfer_core::wire::Verdict;
use kvxfer_core::{Error, ErrorKind, GrantName, Incarnation, Time};

use super::coverage::Point;
use super::lanes::{LaneIndex, LinkIndex};
use super::ledger::{Serial, What};
use super::memory::{FILLER, Stamp, seconds};
use super::workload::AppEvent;
use super::world::{Check, Event, Life, NodeIndex, World};

/// The promise (by its number in the architecture document) or internal check that was broken.
pub type Promise = &'static str;

/// A dead peer is reported within this.
const DEATH_REPORTED: Duration = Duration::from_secs(3);
/// Chunks of another transfer of a link that a transfer may have to wait for, per chunk's worth of its own.
const CHUNKS_AHEAD_MAX: u32 = 4;

/// What the oracles remember.
#[derive(Default)]
pub(crate) struct Oracle {
    /// Pairs of nodes whose connection has died unnoticed by one of them.
    pub(crate) half_opened: BTreeSet<(NodeIndex, NodeIndex)>,
    /// Dials under way, from and to.
    pub(crate) dialing: BTreeMap<(NodeIndex, NodeIndex), u32>,
    /// Sessions that are ready or being resumed: by observer and peer.
    sessions: BTreeMap<(NodeIndex, Life, Incarnation), Session>,
    /// Transfers whose first chunk has not been sent yet.
    waiting: BTreeMap<(LinkIndex, TransferId), Waiting>,
    /// Sessions in which the device could not be used: by observer and peer.
    pub(crate) devices_failed: BTreeSet<(NodeIndex, Life, Incarnation)>,
    priorities: BTreeMap<(LinkIndex, TransferId), u8>,
}

#[derive(Debug, Clone, Copy)]
struct Session {
    lost: Option<Time>,
}

struct Waiting {
    priority: u8,
    gate: Arc<Gate>,
    /// It has something to send.
    has_work: bool,
    deadline: Option<Time>,
    chunks: u32,
    others: BTreeMap<TransferId, u32>,
}

impl World {
    /// A handle has ended: once, in time, and as the other side says.
    pub(crate) fn completed(&mut self, node: NodeIndex, handle: HandleId, result: Result<Outcome, Error>) {
        let Some(body) = self.nodes[node].body.as_mut() else {
            return;
        };
        let Some(serial) = body.handles.get(&handle).copied() else {
            if body.early_completions.insert(handle, result).is_some() {
                self.fail("4 one verdict", format!("node {node}'s {handle:?} ends twice"));
            }
            return;
        };
        self.trace(|| format!("node {node} #{serial} ends: {}", words_of(&result)));
        if self.ledger[serial as usize].ended.is_some() {
            let words = format!("{} ends again: {}", self.describe(serial), words_of(&result));
            self.fail("4 one verdict", words);
            return;
        }
        self.ledger[serial as usize].ended = Some((self.now, result.clone()));
        match &result {
            Ok(outcome) => self.ended_well(serial, outcome),
            Err(error) => self.ended_badly(serial, error),
        }
        if self.failed() {
            return;
        }
        self.give_back(node, serial, &result);
    }

    /// The application returns the blocks: at once, or after it has used them.
    fn give_back(&mut self, node: NodeIndex, serial: Serial, result: &Result<Outcome, Error>) {
        let quarantined = matches!(result, Err(error) if error.destination() == Destination::Quarantined);
        if quarantined {
            self.coverage.reach(Point::Quarantined);
            self.ledger[serial as usize].quarantined = true;
            if self.profile.stuck_permyriad == 0 && self.nodes[node].last_stall_end == Time::ZERO {
                let words = format!("{} is quarantined though nothing hung", self.describe(serial));
                self.fail("8 alive", words);
            }
            return;
        }
        if result.is_ok() && self.rng.percent(25) {
            let at = self.now + Duration::from_micros(self.rng.within(10..40_000));
            self.app_at(at, node, AppEvent::Release { serial });
            return;
        }
        self.release_blocks(serial);
    }

    fn ended_well(&mut self, serial: Serial, outcome: &Outcome) {
        let record = &self.ledger[serial as usize];
        match (&record.what, outcome) {
            (What::Claim(claim), Outcome::Arrived { .. }) => {
                let (pull, request, sources) = (claim.pull, claim.request, claim.sources.len());
                let held = self.workload.requests[request].held_of(claim.set);
                let restarted = claim.attempts_told.values().any(|attempt| *attempt > 1);
                if claim.stale_at_open {
                    let words = format!(
                        "{} arrived from an address of a dead incarnation",
                        self.describe(serial)
                    );
                    self.fail("6 no stale peer", words);
                    return;
                }
                self.verify_destination(serial);
                if pull {
                    self.must_be_validated(serial);
                }
                let came_from = &self.ledger[serial as usize].came_from;
                if !came_from.is_empty() && came_from.iter().all(|source| self.had_withheld(*source)) {
                    self.coverage.reach(Point::ArrivedAfterEvents);
                }
                self.coverage
                    .reach(if pull { Point::ClaimPulled } else { Point::ClaimArrived });
                for (reached, point) in [
                    (sources > 1, Point::SeveralSources),
                    (held > 0, Point::HeldPrefix),
                    (restarted, Point::ArrivedAfterRestart),
                    (self.profile.model.has_state(), Point::StateBlock),
                ] {
                    if reached {
                        self.coverage.reach(point);
                    }
                }
            }
            (What::Grant { .. }, Outcome::Granted { message, .. }) => {
                let message = message.clone();
                if record.arrived.is_none() {
                    self.grant_arrives(serial, message);
                }
            }
            (What::ReadGrant { .. }, Outcome::Granted { .. }) => {}
            (What::Push { grant, .. }, Outcome::Transferred { .. }) => {
                let grant = *grant;
                self.push_agreed(serial, grant);
            }
            (What::Pull { .. }, Outcome::Transferred { .. }) => {
                self.verify_destination(serial);
                self.must_be_validated(serial);
                self.coverage.reach(Point::PullArrived);
            }
            (What::Offer(_), Outcome::Released { members }) => {
                let members = members.clone();
                self.offer_released(serial, &members);
            }
            _ => {
                let words = format!("{} ends with {outcome:?}", self.describe(serial));
                self.fail("internal", words);
            }
        }
    }

    /// A pull arrives only after each of its sources has said that what was read was still what was meant.
    fn must_be_validated(&mut self, serial: Serial) {
        let record = &self.ledger[serial as usize];
        let claim = matches!(record.what, What::Claim(_));
        let Some(body) = self.nodes[record.node].body.as_ref() else {
            return;
        };
        let number = if claim {
            let known = body.claim_numbers.iter().find(|(_, own)| **own == serial);
            known.map(|(number, _)| *number)
        } else {
            Some(record.handle.0)
        };
        let unsaid = record.came_from.iter().copied().find(|source| {
            let source = &self.ledger[*source as usize];
            let incarnation = self.incarnations.get(&(source.node, source.life));
            !incarnation
                .is_some_and(|from| number.is_some_and(|number| body.validated.contains(&(claim, number, *from))))
        });
        if let Some(source) = unsaid {
            let words = format!(
                "{} has arrived without the word of {}",
                self.describe(serial),
                self.describe(source)
            );
            self.fail("3 no false read", words);
        }
    }

    fn ended_badly(&mut self, serial: Serial, error: &Error) {
        let arrived = self.ledger[serial as usize].arrived.is_some();
        let what = self.describe(serial);
        if error.destination() == Destination::Quarantined {
            return;
        }
        match error.kind() {
            ErrorKind::Internal | ErrorKind::Protocol | ErrorKind::OutOfBounds | ErrorKind::GeometryMismatch => {
                self.fail("internal", format!("{what}: {error}"));
                return;
            }
            ErrorKind::DeadlineExceeded | ErrorKind::Unclaimed => self.coverage.reach(Point::Expired),
            ErrorKind::Unknown => self.coverage.reach(Point::Unknown),
            ErrorKind::StalePeer => self.coverage.reach(Point::StaleAddress),
            ErrorKind::NotOffered => self.coverage.reach(Point::NotOffered),
            ErrorKind::AlreadyClaimed => self.coverage.reach(Point::AlreadyClaimed),
            ErrorKind::Declined => self.coverage.reach(Point::Declined),
            _ => {}
        }
        if arrived {
            self.fail("4 one verdict", format!("{what} had arrived, and ends with {error}"));
            return;
        }
        if self.profile.must_arrive() && !self.is_disturbed(serial) {
            self.fail("8 alive", format!("{what} fails though nothing went wrong: {error}"));
        }
    }

    /// Whether its application, or a lack of blocks, kept it from ending well.
    pub(crate) fn is_disturbed(&self, serial: Serial) -> bool {
        match &self.ledger[serial as usize].what {
            What::Offer(offer) => self.is_request_disturbed(offer.request),
            What::Claim(claim) => self.is_request_disturbed(claim.request),
            What::Grant { name, .. } | What::ReadGrant { name } => {
                // Nobody could use it.
                let name = *name;
                !self.ledger.iter().any(
                    |record| matches!(&record.what, What::Push { grant, .. } | What::Pull { grant } if *grant == name),
                )
            }
            What::Push { .. } | What::Pull { .. } => false,
        }
    }

    fn is_request_disturbed(&self, request: usize) -> bool {
        let this = &self.workload.requests[request];
        if this.disturbed {
            return true;
        }
        // A key in use twice at a time may match either way.
        self.workload
            .requests
            .iter()
            .enumerate()
            .any(|(other, request)| other != this.number && request.key == this.key)
    }

    /// A write grant's bytes are in place, says a data thread, or the control plane if it was first.
    pub(crate) fn grant_arrives(&mut self, serial: Serial, message: Option<Arc<[u8]>>) {
        let record = &mut self.ledger[serial as usize];
        if record.arrived.is_some() {
            let words = format!("{} arrives twice", self.describe(serial));
            self.fail("4 one verdict", words);
            return;
        }
        if matches!(&record.ended, Some((_, Err(_)))) {
            let words = format!("{} arrives after its end", self.describe(serial));
            self.fail("4 one verdict", words);
            return;
        }
        record.arrived = Some(self.now);
        let What::Grant { name, message: kept } = &mut record.what else {
            return;
        };
        let name = *name;
        kept.clone_from(&message);
        self.trace(|| format!("#{serial} has arrived"));
        self.coverage.reach(Point::PushArrived);
        let sent = self.ledger.iter().any(
            |record| matches!(&record.what, What::Push { grant, message: sent } if *grant == name && *sent == message),
        );
        if !sent {
            let words = format!("{} arrives with a message nobody sent it", self.describe(serial));
            self.fail("1 placed", words);
            return;
        }
        if message.is_some() {
            self.coverage.reach(Point::MessageDelivered);
        }
        self.verify_destination(serial);
        if self.rng.percent(50) {
            // The application need not wait for the control plane.
            self.release_blocks(serial);
        }
    }

    /// A push's success comes after the arrival, and a grant serves one push only.
    fn push_agreed(&mut self, serial: Serial, grant: GrantName) {
        let mut owner = None;
        let mut winners = 0;
        for (index, record) in self.ledger.iter().enumerate() {
            match &record.what {
                What::Grant { name, .. } if *name == grant => owner = Some(index),
                What::Push { grant: other, .. } if *other == grant && record.succeeded() => winners += 1,
                _ => {}
            }
        }
        let Some(owner) = owner else {
            self.fail(
                "4 one verdict",
                format!("push #{serial} succeeds on a grant that nobody gave"),
            );
            return;
        };
        if self.ledger[owner].arrived.is_none() {
            let words = format!(
                "push #{serial} succeeds, and {} has not arrived",
                self.describe(owner as Serial)
            );
            self.fail("1 placed", words);
        } else if winners > 1 {
            self.fail(
                "4 one verdict",
                format!("{winners} pushes succeed on one grant ({grant})"),
            );
        }
    }

    fn offer_released(&mut self, serial: Serial, members: &[MemberVerdict]) {
        let What::Offer(offer) = &self.ledger[serial as usize].what else {
            return;
        };
        let readers = offer.readers;
        let sets: BTreeSet<u128> = members.iter().map(|member| member.set).collect();
        if sets.len() > usize::from(readers) {
            let words = format!("{} served {} readers of {readers}", self.describe(serial), sets.len());
            self.fail("4 one verdict", words);
            return;
        }
        for member in members {
            let Verdict::Arrived = member.verdict else { continue };
            let ended = self
                .claim_of(member)
                .map(|claim| (claim, self.ledger[claim as usize].succeeded()));
            match ended {
                Some((_, true)) => {}
                Some((claim, false)) => {
                    let words = format!(
                        "{} says that {} has arrived",
                        self.describe(serial),
                        self.describe(claim)
                    );
                    self.fail("4 one verdict", words);
                    return;
                }
                None => {
                    self.fail(
                        "4 one verdict",
                        format!("offer #{serial} has a member that nobody opened"),
                    );
                    return;
                }
            }
        }
        if members.len() > 1 {
            self.coverage.reach(Point::SeveralMembers);
        }
        if readers > 1 {
            self.coverage.reach(Point::SeveralReaders);
        }
        if members.iter().any(|member| member.verdict == Verdict::Unknown) {
            self.coverage.reach(Point::Unknown);
        }
    }

    fn claim_of(&self, member: &MemberVerdict) -> Option<Serial> {
        let found = self.ledger.iter().position(|record| {
            matches!(&record.what, What::Claim(claim) if claim.set == member.set && claim.member == member.member)
        });
        found.map(|serial| serial as Serial)
    }

    pub(crate) fn peer_changed(&mut self, node: NodeIndex, peer: Incarnation, change: &PeerChange) {
        self.trace(|| format!("node {node} peer {peer:?}: {change:?}"));
        let key = (node, self.nodes[node].life, peer);
        match change {
            PeerChange::Ready { resumed, .. } => {
                if *resumed {
                    self.coverage.reach(Point::SessionResumed);
                }
                if !self.is_connected_to(node, peer) {
                    let words = format!("node {node} has a session with {peer:?}, who is not at the other end");
                    self.fail("6 no stale peer", words);
                }
                self.oracle.sessions.insert(key, Session { lost: None });
                if !*resumed {
                    self.oracle.devices_failed.remove(&key);
                }
            }
            PeerChange::Lost(_) => {
                self.coverage.reach(Point::PeerLost);
                self.oracle.sessions.insert(key, Session { lost: Some(self.now) });
            }
            PeerChange::Path {
                transport: Some(transport),
                refused,
            } => {
                if refused.iter().any(|(name, _)| name == super::direct::DIRECT) {
                    self.coverage.reach(Point::FellBack);
                }
                if transport == super::direct::DIRECT && self.oracle.devices_failed.contains(&key) {
                    let words = format!("node {node} takes a transport again that has failed in this session");
                    self.fail("8 alive", words);
                }
            }
            _ => {}
        }
    }

    /// A process has died, or was stopped for so long that it counts as dead: its peers must say so in time.
    pub(crate) fn expect_death_reports(&mut self, dead: NodeIndex, incarnation: Incarnation) {
        let observers: Vec<(NodeIndex, Life)> = self
            .oracle
            .sessions
            .iter()
            .filter(|((_, _, peer), session)| *peer == incarnation && session.lost.is_none())
            .map(|((node, life, _), _)| (*node, *life))
            .collect();
        for (observer, observer_life) in observers {
            let since = self.now;
            self.queue.push(
                self.now + DEATH_REPORTED,
                Event::Check(Check::DeathReported {
                    observer,
                    observer_life,
                    dead,
                    incarnation,
                    since,
                }),
            );
        }
    }

    pub(crate) fn check(&mut self, check: Check) {
        match check {
            Check::DeathReported {
                observer,
                observer_life,
                dead,
                incarnation,
                since,
            } => {
                // What was held up on the way still speaks for the dead when it comes through.
                let apart = self.partitions.get(&(observer.min(dead), observer.max(dead)));
                if let Some(until) = apart.copied().filter(|until| *until > since) {
                    let later = Check::DeathReported {
                        observer,
                        observer_life,
                        dead,
                        incarnation,
                        since: until,
                    };
                    self.queue.push(until + DEATH_REPORTED, Event::Check(later));
                    return;
                }
                if self.node_of(incarnation).is_some_and(|node| !self.nodes[node].stalled) {
                    // It has come back.
                    return;
                }
                let node = &self.nodes[observer];
                let watched = node.life == observer_life
                    && node.body.as_ref().is_some_and(|body| !body.closing)
                    && !node.stalled
                    && node.last_stall_end <= since;
                let reported = self
                    .oracle
                    .sessions
                    .get(&(observer, observer_life, incarnation))
                    .is_none_or(|session| session.lost.is_some());
                if watched && !reported {
                    self.fail(
                        "8 alive",
                        format!(
                            "node {observer} has not reported the death of node {dead} at {:.6}",
                            seconds(since)
                        ),
                    );
                }
            }
            Check::MustHaveEnded { serial } => self.must_have_ended(serial),
            Check::Quiet => self.must_be_quiet(),
            Check::Closed => self.must_be_closed(),
        }
    }

    fn must_have_ended(&mut self, serial: Serial) {
        let record = &self.ledger[serial as usize];
        if !record.is_open() || self.now < record.must_end {
            return;
        }
        let node = &self.nodes[record.node];
        let slack = Duration::from_millis(1_500);
        if node.stalled || node.last_stall_end > record.opened {
            let until = if node.stalled { self.now } else { node.last_stall_end };
            if self.now < until + slack || node.stalled {
                self.queue
                    .push(self.now + slack, Event::Check(Check::MustHaveEnded { serial }));
                return;
            }
        }
        let waiting = self.nodes[record.node]
            .body
            .as_ref()
            .and_then(|body| body.machine.waiting_on(record.handle));
        let words = format!(
            "{}, opened at {:.6}, should have ended by {:.6}; it waits for {waiting:?}",
            self.describe(serial),
            seconds(record.opened),
            seconds(record.must_end),
        );
        self.fail("8 alive", words);
    }

    // ---------------------------------------------------------------------------------------- data plane

    /// Whose bytes a transfer sends, learned from the first it reads.
    pub(crate) fn note_stamp(&mut self, link: LinkIndex, transfer: TransferId, stamp: Stamp) {
        let node = self.links[link].node;
        if let Some(body) = self.nodes[node].body.as_mut() {
            body.transfer_stamps.entry((link, transfer)).or_insert(stamp);
        }
    }

    pub(crate) fn stamp_of_transfer(&self, lane: LaneIndex, end: usize) -> Stamp {
        let side = &self.lanes[lane].ends[end];
        let (Some(link), Some(transfer)) = (side.link, side.sending_transfer()) else {
            return FILLER;
        };
        self.nodes[side.node]
            .body
            .as_ref()
            .and_then(|body| body.transfer_stamps.get(&(link, transfer)).copied())
            .unwrap_or(FILLER)
    }

    /// A transfer was given to a link: from now on it must get its turns.
    pub(crate) fn note_submit(&mut self, link: LinkIndex, spec: &SendSpec) {
        let length = spec.message.as_ref().map_or(0, |message| message.len() as u32);
        self.trace(|| {
            let (slot, generation) = (spec.slot, spec.generation);
            format!(
                "link {link} gets transfer {:?} for slot {slot}.{generation}, priority {}",
                spec.id, spec.priority
            )
        });
        self.oracle.priorities.insert((link, spec.id), spec.priority);
        self.oracle.waiting.insert(
            (link, spec.id),
            Waiting {
                priority: spec.priority,
                gate: Arc::clone(&spec.gate),
                has_work: spec.message.is_some(),
                deadline: spec.deadline,
                chunks: 1 + length.div_ceil(self.profile.chunk_bytes_max),
                others: BTreeMap::new(),
            },
        );
    }

    /// A part came: the wait is counted from here.
    pub(crate) fn note_part(&mut self, link: LinkIndex, transfer: TransferId, bytes: u64) {
        self.trace(|| format!("link {link} gets {bytes} bytes for {transfer:?}"));
        if let Some(waiting) = self.oracle.waiting.get_mut(&(link, transfer))
            && !waiting.has_work
            && bytes > 0
        {
            waiting.has_work = true;
            waiting.others.clear();
        }
    }

    pub(crate) fn note_gone(&mut self, link: LinkIndex, transfer: TransferId) {
        self.oracle.waiting.remove(&(link, transfer));
    }

    /// Promises 7 and 10 on the sending side: a lane's window holds, and nobody waits for more than a round.
    pub(crate) fn note_chunk(&mut self, link: LinkIndex, lane: u16, chunk: &Chunk) {
        let load = self.links[link].sender.lane_load(lane);
        let (bytes_max, chunks_max) = (
            self.profile.sender.window_bytes_max,
            self.profile.sender.window_chunks_max,
        );
        // A user message is one chunk, here often larger than the others may be.
        let beyond = u64::from(chunk.header.length.saturating_sub(self.profile.chunk_bytes_max));
        if load.chunks > chunks_max || (load.chunks > 1 && load.bytes > bytes_max + beyond) {
            self.fail(
                "7 bounded",
                format!("a lane has {} chunks of {} bytes in flight", load.chunks, load.bytes),
            );
            return;
        }
        let name = chunk.header.name();
        // A chunk that is read names a slot of this side's, one in doubt a slot of the peer's.
        let read = matches!(&chunk.payload, Payload::Stream { remote: Some((remote, _)), .. }
            if remote.direction == Direction::Read);
        if !read && self.links[link].doubts.values().any(|doubt| doubt.contains(&name)) {
            self.fail(
                "2 no late write",
                format!("{name:?} is sent again before the lane that it was on is fenced"),
            );
            return;
        }
        let id = chunk.transfer;
        let priority = self.oracle.priorities.get(&(link, id)).copied().unwrap_or(0);
        if let Some(waiting) = self.oracle.waiting.remove(&(link, id))
            && !waiting.others.is_empty()
        {
            self.coverage.reach(Point::SmallBesideLarge);
        }
        let now = self.now;
        let mut starved = None;
        for ((of_link, other), waiting) in self.oracle.waiting.range_mut((link, TransferId(0))..) {
            if *of_link != link {
                break;
            }
            let held = waiting.gate.is_closed() || waiting.deadline.is_some_and(|deadline| deadline <= now);
            if held || !waiting.has_work || waiting.priority < priority {
                continue;
            }
            let ahead = waiting.others.entry(id).or_default();
            // By bytes: a turn is a chunk's worth, which may be several small parts.
            *ahead += chunk.header.length.clamp(1, self.profile.chunk_bytes_max);
            if *ahead > CHUNKS_AHEAD_MAX * waiting.chunks * self.profile.chunk_bytes_max
                && self.links[link].sender.lane_load(lane).chunks > 0
            {
                starved = Some((*other, *ahead));
            }
        }
        if let Some((other, ahead)) = starved {
            self.fail(
                "10 fair",
                format!("transfer {other:?} waits while {id:?} has sent {ahead} bytes"),
            );
        }
    }

    /// Whether a chunk of this handle is being sent or placed just now.
    pub(crate) fn has_bytes_in_flight(&self, serial: Serial) -> bool {
        let record = &self.ledger[serial as usize];
        let Some(body) = self.nodes[record.node].body.as_ref() else {
            return false;
        };
        let owned = |stamp: &Stamp| {
            self.stamps
                .get(*stamp as usize)
                .is_some_and(|of| of.serial == serial || (of.serial != 0 && self.accepts(serial, *stamp)))
        };
        body.links.values().any(|link| {
            self.links[*link].lanes.iter().flatten().any(|lane| {
                self.lanes[*lane]
                    .pipes
                    .iter()
                    .any(|pipe| pipe.iter().any(|item| item.is_payload_of(&owned)))
            })
        })
    }
}

pub(crate) fn words_of(result: &Result<Outcome, Error>) -> String {
    match result {
        Ok(outcome) => format!("{outcome:?}"),
        Err(error) => error.to_string(),
    }
}
