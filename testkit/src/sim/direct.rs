//! The simulated one-sided link: each side's device writes into and reads from the other's memory by itself, whatever the
//! other's process does. What an engine for such devices must do is here (admission, revocation, closes, fences); the
//! decisions are core's (`LinkSender`, `SlotTable`, `Machine`).
//!
//! A lane is a pair of queue pairs. What a device has accepted lands in memory a little later, or much later, also after
//! its queue pair has failed: until that is fenced. What is still under way then is dropped. The two ends talk by link
//! messages, which the machines carry over their session; immediates come by the lane, and the two overtake each other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{ByteStream, Chunk, ChunkHeader, ChunkName, LaneName, OwnedGateGuard, SendPart, SendSpec};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{Error, ErrorKind, Generation, SlotId, Time};

use super::coverage::Point;
use super::lanes::LinkIndex;
use super::memory::Stamp;
use super::world::{Event, Life, NodeIndex, World};

mod fence;
mod transmit;
mod words;

pub(crate) use transmit::keys_of;
pub(crate) use words::Words;

pub(crate) type QpIndex = usize;
pub(crate) type Slot = (SlotId, Generation);
/// A close of a lane: its slot and its number.
pub(crate) type Close = (Slot, u8);

/// The name of the one-sided transport.
pub(crate) const DIRECT: &str = "direct";
/// A batch without completion for so long is given up, and its lane with it.
const PROGRESS: Duration = Duration::from_secs(1);
/// How long an answer to a revocation is awaited before the lanes are fenced.
const REVOKE_TIMEOUT: Duration = Duration::from_millis(400);

/// What a one-sided link has beside what every link has.
#[derive(Default)]
pub(crate) struct Direct {
    /// The queue pair of each lane, while there is one at this side.
    pub(crate) lanes: Vec<Option<QpIndex>>,
    /// Receiving side: slots that the peer may write.
    admitted: BTreeSet<Slot>,
    /// Receiving side: slots whose writer was told to stop, and whether it is being fenced for not answering.
    revoked: BTreeMap<Slot, bool>,
    /// Sending side: slots that the peer has admitted.
    permits: BTreeSet<Slot>,
    /// Sending side: what waits for that.
    held: BTreeMap<Slot, Vec<(SendSpec, Vec<SendPart>)>>,
    /// Sending side: slots whose receiver waits until nothing of them is outstanding.
    stopping: BTreeSet<Slot>,
    stepping: Vec<bool>,
}

/// The two ends of a lane: the dialer's, then the acceptor's.
pub(crate) struct QueuePair {
    pub(crate) name: LaneName,
    pub(crate) ends: [QpEnd; 2],
    /// The network between them is dead, and nobody is told.
    broken: bool,
}

/// One end: a queue pair of a device.
pub(crate) struct QpEnd {
    pub(crate) node: NodeIndex,
    pub(crate) life: Life,
    pub(crate) link: Option<LinkIndex>,
    pub(crate) state: QpState,
    /// Its lane was reported to the sender.
    sending: bool,
    posted: VecDeque<Batch>,
    next_batch: u64,
    next_close: BTreeMap<Slot, u8>,
    /// What is sent from here arrives in order.
    last_arrival: Time,
    /// Everything that this end's device has accepted is in memory by then.
    settled: Time,
    /// Immediates that the device has and the thread has not seen.
    unseen: Vec<Close>,
    /// Those without the message that says what they close. Kept beyond the fence: the message may come later.
    immediates: BTreeSet<Close>,
    announced: BTreeMap<Close, Vec<ChunkHeader>>,
    why: Option<Error>,
    fences: Vec<Vec<ChunkName>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QpState {
    New,
    Up,
    /// Nothing more is accepted; what was accepted still lands.
    Error,
    Gone,
}

/// Work requests that are closed together, or one read.
struct Batch {
    id: u64,
    close: Option<Close>,
    chunks: Vec<Posted>,
}

struct Posted {
    chunk: Chunk,
    /// The source's fence, or, for a read, the destination's.
    guard: Option<OwnedGateGuard>,
    into: Option<Place>,
}

/// Where bytes go.
#[derive(Clone)]
pub(crate) struct Place {
    stream: Arc<dyn ByteStream>,
    regions: Arc<[Arc<Region>]>,
}

/// What happens at devices and to the threads that drive them.
pub(crate) enum DeviceEvent {
    Dial {
        link: LinkIndex,
        index: u16,
    },
    DialTimeout {
        qp: QpIndex,
    },
    /// The engine looks for work.
    Step {
        link: LinkIndex,
        index: u16,
    },
    /// The device reads the source of a chunk.
    Transmit {
        qp: QpIndex,
        end: usize,
        batch: u64,
        chunk: usize,
    },
    /// Bytes reach a device.
    Arrive {
        qp: QpIndex,
        end: usize,
        bytes: Bytes,
    },
    /// They reach its memory.
    Land {
        qp: QpIndex,
        end: usize,
        bytes: Bytes,
    },
    /// The last of a batch reaches the other device, or this device's own read has ended.
    LastArrives {
        qp: QpIndex,
        end: usize,
        batch: u64,
        close: Close,
    },
    Immediate {
        qp: QpIndex,
        end: usize,
        close: Close,
    },
    ReadAtPeer {
        qp: QpIndex,
        end: usize,
        batch: u64,
    },
    Completed {
        qp: QpIndex,
        end: usize,
        batch: u64,
    },
    Deadline {
        qp: QpIndex,
        end: usize,
        batch: u64,
    },
    /// The network between the two is gone.
    Breaks {
        qp: QpIndex,
    },
    /// An end's device says so: a completion with an error.
    Noticed {
        qp: QpIndex,
        end: usize,
    },
    /// The queue pair's fence ends.
    Fenced {
        qp: QpIndex,
        end: usize,
    },
    RevokeTimeout {
        link: LinkIndex,
        slot: Slot,
    },
    Quiet {
        link: LinkIndex,
        slot: Slot,
    },
    /// The device of a node fails: its links cannot go on.
    DeviceFails {
        node: NodeIndex,
    },
}

/// Bytes on their way into a device's memory.
pub(crate) struct Bytes {
    place: Place,
    offset: u64,
    bytes: Vec<u8>,
    stamps: Vec<Stamp>,
    /// They were read by the device that places them; the batch that asked for them.
    read: Option<u64>,
}

impl std::fmt::Debug for DeviceEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DeviceEvent")
    }
}

impl QpEnd {
    fn new(node: NodeIndex, life: Life, link: Option<LinkIndex>) -> QpEnd {
        QpEnd {
            node,
            life,
            link,
            state: QpState::New,
            sending: false,
            posted: VecDeque::new(),
            next_batch: 0,
            next_close: BTreeMap::new(),
            last_arrival: Time::ZERO,
            settled: Time::ZERO,
            unseen: Vec::new(),
            immediates: BTreeSet::new(),
            announced: BTreeMap::new(),
            why: None,
            fences: Vec::new(),
        }
    }
}

impl Direct {
    pub(crate) fn new(lanes: u16) -> Direct {
        Direct {
            lanes: vec![None; lanes as usize],
            stepping: vec![false; lanes as usize],
            ..Direct::default()
        }
    }
}

impl World {
    pub(crate) fn device(&mut self, event: DeviceEvent) {
        match event {
            DeviceEvent::Dial { link, index } => self.qp_dial(link, index),
            DeviceEvent::DialTimeout { qp } => self.qp_dial_timeout(qp),
            DeviceEvent::Step { link, index } => self.qp_step(link, index),
            DeviceEvent::Transmit { qp, end, batch, chunk } => self.qp_transmit(qp, end, batch, chunk),
            DeviceEvent::Arrive { qp, end, bytes } => self.qp_arrive(qp, end, bytes),
            DeviceEvent::Land { qp, end, bytes } => self.qp_land(qp, end, bytes),
            DeviceEvent::LastArrives { qp, end, batch, close } => self.qp_last_arrives(qp, end, batch, close),
            DeviceEvent::Immediate { qp, end, close } => self.qp_immediate(qp, end, close),
            DeviceEvent::ReadAtPeer { qp, end, batch } => self.qp_read_at_peer(qp, end, batch),
            DeviceEvent::Completed { qp, end, batch } => self.qp_completed(qp, end, batch),
            DeviceEvent::Deadline { qp, end, batch } => self.qp_deadline(qp, end, batch),
            DeviceEvent::Breaks { qp } => self.qp_breaks(qp),
            DeviceEvent::Noticed { qp, end } => {
                let why = Error::new(ErrorKind::Transport, "a lane").because("the device gave up repeating");
                self.close_qp(qp, end, why);
            }
            DeviceEvent::Fenced { qp, end } => self.qp_fenced(qp, end),
            DeviceEvent::RevokeTimeout { link, slot } => self.revoke_timeout(link, slot),
            DeviceEvent::Quiet { link, slot } => self.slot_is_quiet(link, slot),
            DeviceEvent::DeviceFails { node } => self.device_fails(node),
        }
    }

    /// Whose thread must run for it; the device itself runs by itself.
    pub(crate) fn owner_of_device_event(&self, event: &DeviceEvent) -> Option<(NodeIndex, Life)> {
        let of_link = |link: LinkIndex| Some((self.links[link].node, self.links[link].life));
        let of_end = |qp: QpIndex, end: usize| Some((self.qps[qp].ends[end].node, self.qps[qp].ends[end].life));
        match event {
            DeviceEvent::Dial { link, .. }
            | DeviceEvent::Step { link, .. }
            | DeviceEvent::RevokeTimeout { link, .. }
            | DeviceEvent::Quiet { link, .. } => of_link(*link),
            DeviceEvent::DialTimeout { qp } => of_end(*qp, 0),
            DeviceEvent::Immediate { qp, end, .. }
            | DeviceEvent::Completed { qp, end, .. }
            | DeviceEvent::Deadline { qp, end, .. }
            | DeviceEvent::Noticed { qp, end }
            | DeviceEvent::Fenced { qp, end } => of_end(*qp, *end),
            DeviceEvent::Transmit { .. }
            | DeviceEvent::Arrive { .. }
            | DeviceEvent::Land { .. }
            | DeviceEvent::LastArrives { .. }
            | DeviceEvent::ReadAtPeer { .. }
            | DeviceEvent::Breaks { .. }
            | DeviceEvent::DeviceFails { .. } => None,
        }
    }

    fn device_at(&mut self, at: Time, event: DeviceEvent) {
        self.queue.push(at, Event::Device(Box::new(event)));
    }

    /// The thread sees what its device reports a little later.
    fn poll_delay(&mut self) -> Duration {
        Duration::from_micros(if self.rng.percent(10) {
            self.rng.within(20..3_000)
        } else {
            self.rng.within(1..20)
        })
    }

    fn direct(&mut self, link: LinkIndex) -> Option<&mut Direct> {
        self.links[link].direct.as_mut()
    }

    // ---------------------------------------------------------------------------------------------- set-up

    pub(crate) fn connect_direct(&mut self, link: LinkIndex) {
        if !self.links[link].peer.dials {
            return;
        }
        for index in 0..self.profile.lanes {
            let at = self.now + self.short_delay();
            self.device_at(at, DeviceEvent::Dial { link, index });
        }
    }

    fn qp_dial(&mut self, link: LinkIndex, index: u16) {
        let side = &mut self.links[link];
        let Some(direct) = side.direct.as_mut() else { return };
        if side.closed || direct.lanes[usize::from(index)].is_some() {
            return;
        }
        side.epochs[usize::from(index)] += 1;
        let name = LaneName {
            index,
            epoch: side.epochs[usize::from(index)],
        };
        let (node, life) = (side.node, side.life);
        let Some(other) = self.node_of(self.links[link].peer.incarnation) else {
            return;
        };
        let qp = self.qps.len();
        if let Some(direct) = self.direct(link) {
            direct.lanes[usize::from(index)] = Some(qp);
        }
        let other_life = self.nodes[other].life;
        self.qps.push(QueuePair {
            name,
            ends: [QpEnd::new(node, life, Some(link)), QpEnd::new(other, other_life, None)],
            broken: false,
        });
        self.say(link, Words::Connect { qp });
        self.device_at(self.now + PROGRESS, DeviceEvent::DialTimeout { qp });
    }

    fn qp_dial_timeout(&mut self, qp: QpIndex) {
        if self.qps[qp].ends[0].state == QpState::New {
            self.close_qp(
                qp,
                0,
                Error::new(ErrorKind::Transport, "a lane").because("nobody answers"),
            );
        }
    }

    /// The acceptor's side of a new lane.
    fn qp_accept(&mut self, link: LinkIndex, qp: QpIndex) {
        let name = self.qps[qp].name;
        let index = usize::from(name.index);
        let side = &mut self.links[link];
        let Some(direct) = side.direct.as_mut() else { return };
        if side.closed || name.epoch <= side.epochs[index] {
            return;
        }
        if let Some(older) = direct.lanes[index] {
            // The sender must hear of its end, after its device has let go of everything, before the next begins.
            let end = self.end_of_qp(older, link);
            let why = Error::new(ErrorKind::Transport, format!("lane {index}")).because("a newer one replaces it");
            self.close_qp(older, end, why);
            self.say(link, Words::LaneDown { qp });
            return;
        }
        side.epochs[index] = name.epoch;
        direct.lanes[index] = Some(qp);
        let (node, life) = (side.node, side.life);
        let end = &mut self.qps[qp].ends[1];
        (end.node, end.life, end.link) = (node, life, Some(link));
        end.state = QpState::Up;
        self.say(link, Words::Accept { qp });
    }

    fn qp_accepted(&mut self, link: LinkIndex, qp: QpIndex) {
        if self.qps[qp].ends[0].state != QpState::New {
            return;
        }
        self.qps[qp].ends[0].state = QpState::Up;
        self.say(link, Words::Ready { qp });
        self.qp_is_up(qp, 0);
        if self.rng.below(1000) < self.profile.lane_loss_permille {
            let life = Duration::from_micros(self.rng.within(50..self.profile.lane_life_us_max));
            self.device_at(self.now + life, DeviceEvent::Breaks { qp });
        }
    }

    fn qp_is_up(&mut self, qp: QpIndex, end: usize) {
        let side = &mut self.qps[qp].ends[end];
        let Some(link) = side.link.filter(|_| side.state == QpState::Up) else {
            return;
        };
        side.sending = true;
        let name = self.qps[qp].name;
        let side = &mut self.links[link];
        if side.closed {
            return;
        }
        side.sender.lane_up(name);
        if !side.up_reported {
            side.up_reported = true;
            self.report(link, LinkEvent::Up);
        }
        self.coverage.reach(Point::DirectLane);
        self.wake_direct(link);
    }

    /// Mostly the devices notice; if not, work without progress is.
    fn qp_breaks(&mut self, qp: QpIndex) {
        self.qps[qp].broken = true;
        for end in 0..2 {
            if self.rng.percent(85) {
                let at = self.now + Duration::from_micros(self.rng.within(1..4_000));
                self.device_at(at, DeviceEvent::Noticed { qp, end });
            }
        }
    }

    fn end_of_qp(&self, qp: QpIndex, link: LinkIndex) -> usize {
        usize::from(self.qps[qp].ends[0].link != Some(link))
    }

    /// Each lane with something to send gets its engine's turn.
    pub(crate) fn wake_direct(&mut self, link: LinkIndex) {
        let lanes = match self.direct(link) {
            Some(direct) => direct.lanes.len() as u16,
            None => return,
        };
        for index in 0..lanes {
            if !self.links[link].sender.has_work(index) {
                continue;
            }
            let Some(direct) = self.direct(link) else { return };
            if !std::mem::replace(&mut direct.stepping[usize::from(index)], true) {
                let at = self.now + Duration::from_nanos(self.rng.within(200..4_000));
                self.device_at(at, DeviceEvent::Step { link, index });
            }
        }
    }

    /// Its process is dead: its queue pairs go with it, and nobody is told. What is under way still arrives.
    pub(crate) fn kill_devices(&mut self, node: NodeIndex) {
        for qp in &mut self.qps {
            for end in qp.ends.iter_mut().filter(|end| end.node == node) {
                end.state = QpState::Gone;
                end.posted.clear();
            }
        }
    }

    /// Whether this process is still the one that the end belongs to.
    fn end_lives(&self, qp: QpIndex, end: usize) -> bool {
        let end = &self.qps[qp].ends[end];
        let node = &self.nodes[end.node];
        node.life == end.life && node.body.is_some()
    }
}
