//! A link: the rails to one peer and what they share. Calls come from any thread and never block.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use kvxfer_core::flow::{
    Applied, ChunkHeader, ChunkName, ChunkState, LaneName, LinkSender, MESSAGE_PART, PartExtent, Placement, SendEvent,
    SendPart, SendSpec, SlotTable, TransferId,
};
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::transport::{Link, LinkEvent, LinkPeer, LinkWatcher, Path};
use kvxfer_core::{Error, ErrorKind, Generation, Result, SlotId, Time};
use parking_lot::Mutex;

use crate::advert::Advert;
use crate::clock;
use crate::config::RdmaConfig;
use crate::counters::RailCounters;
use crate::engine::{EngineShared, Task};
use crate::error::RdmaError;
use crate::inbound::Inbound;
use crate::message::{self, LinkMessage, Outbox, SlotUse};
use crate::outbound::{Outbound, TransferKeys, Wish};
use crate::transport::Shared;

/// Mail of one rail that its engine has not taken yet, at most: more means a peer that does not keep to the protocol.
const MAIL_MAX: usize = 65_536;

/// What the rails of a link share among them and with callers.
pub(crate) struct LinkCore {
    /// Its number, unique in the transport.
    pub(crate) id: u64,
    pub(crate) peer: LinkPeer,
    pub(crate) peer_advert: Advert,
    pub(crate) config: Arc<RdmaConfig>,
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) sender: Mutex<LinkSender>,
    pub(crate) rails: Box<[Rail]>,
    pub(crate) inbound: Inbound,
    pub(crate) outbound: Outbound,
    pub(crate) rails_up: AtomicUsize,
    /// Some rail was up once, and `Up` was said.
    pub(crate) was_up: AtomicBool,
    /// Until then a link without a rail is being made, or waits for one to come back; after it, it has failed.
    no_rail_limit: Mutex<Time>,
    life: Mutex<Life>,
    transport: Arc<Shared>,
    watcher: Arc<dyn LinkWatcher>,
    outbox: Mutex<Outbox>,
    // Bodies are emitted by one thread at a time, so that their order is kept.
    posting: Mutex<()>,
    // Sender events are reported by one thread at a time, so that their order is kept.
    reporting: Mutex<()>,
    report_due: AtomicBool,
    fences: Mutex<Fences>,
}

/// Which rails have an owner, and whether the link is closing.
#[derive(Default)]
struct Life {
    closing: bool,
    closed: bool,
    /// Rails that an engine looks after.
    attached: BTreeSet<u16>,
    /// Why rails are not up, by rail.
    failures: BTreeMap<u16, String>,
    /// Rails whose device is gone for good.
    dead: BTreeSet<u16>,
}

/// Queue pairs that exist, and who waits for which of them to be gone.
#[derive(Default)]
struct Fences {
    live: BTreeSet<LaneName>,
    /// Lanes whose fence did not finish: what they may write is never given back.
    unfinished: BTreeSet<LaneName>,
    waiting: Vec<(BTreeSet<LaneName>, Vec<SlotUse>)>,
}

/// One rail: a pair of ports, and the queue pair between them while there is one.
pub(crate) struct Rail {
    pub(crate) index: u16,
    /// Which engine owns it, and which port; the dialer knows at once, the acceptor when it is told.
    pub(crate) place: OnceLock<RailPlace>,
    pub(crate) kicked: AtomicBool,
    pub(crate) mail: Mutex<VecDeque<Mail>>,
    /// For people, while it is up.
    pub(crate) name: Mutex<Option<String>>,
    pub(crate) counters: RailCounters,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RailPlace {
    pub(crate) engine: usize,
    /// Index in our advert.
    pub(crate) own_port: u16,
    /// Index in the peer's advert.
    pub(crate) peer_port: u16,
}

/// What a rail's engine is told.
#[derive(Debug)]
pub(crate) enum Mail {
    Message(LinkMessage),
    /// The peer asks for the fence of a lane.
    Fence(LaneName, Vec<ChunkName>),
    /// The rail's device is to be flushed, for a slot that is written no more.
    Flush(Arc<Flushing>),
    /// Give the rail's queue pair up, whatever its epoch.
    Fail(Error),
}

/// A slot whose writer has stopped, and how many devices are still to be flushed.
#[derive(Debug)]
pub(crate) struct Flushing {
    slot: SlotUse,
    devices_left: AtomicUsize,
}

impl LinkCore {
    pub(crate) fn new(
        id: u64,
        peer: LinkPeer,
        peer_advert: Advert,
        transport: Arc<Shared>,
        watcher: Arc<dyn LinkWatcher>,
    ) -> Arc<LinkCore> {
        let config = transport.config.clone();
        let lanes = config.rails_max;
        Arc::new(LinkCore {
            id,
            sender: Mutex::new(LinkSender::new(config.sender(lanes))),
            rails: (0..lanes).map(Rail::new).collect(),
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            rails_up: AtomicUsize::new(0),
            was_up: AtomicBool::new(false),
            no_rail_limit: Mutex::new(clock::now() + config.setup_limit),
            life: Mutex::default(),
            slots: transport.slots.clone(),
            peer,
            peer_advert,
            config,
            transport,
            watcher,
            outbox: Mutex::default(),
            posting: Mutex::new(()),
            reporting: Mutex::new(()),
            report_due: AtomicBool::new(false),
            fences: Mutex::default(),
        })
    }

    pub(crate) fn engine(&self, index: usize) -> &Arc<EngineShared> {
        &self.transport.engines[index]
    }

    pub(crate) fn lane_place(&self, lane: LaneName) -> String {
        format!("rail {}.{} to {}", lane.index, lane.epoch, self.peer.incarnation)
    }

    /// Reports something, with no lock held that a caller of [`Link`] may wait for.
    pub(crate) fn emit(&self, event: LinkEvent) {
        self.watcher.link_event(self.peer.incarnation, event);
    }

    /// Leaves a message for the peer; [`flush`](Self::flush) sends it.
    pub(crate) fn tell(&self, message: LinkMessage) {
        self.outbox.lock().push(message);
    }

    /// Sends what was left for the peer, in order.
    pub(crate) fn flush(&self) {
        loop {
            if self.outbox.lock().is_empty() {
                return;
            }
            // Whoever is sending looks again after it has let go.
            let Some(posting) = self.posting.try_lock() else {
                return;
            };
            loop {
                let bodies = self.outbox.lock().bodies();
                if bodies.is_empty() {
                    break;
                }
                for body in bodies {
                    self.emit(LinkEvent::Message(body));
                }
            }
            drop(posting);
        }
    }

    /// Reports what the sender has to say, in order.
    pub(crate) fn report(&self) {
        self.report_due.store(true, Ordering::SeqCst);
        while self.report_due.load(Ordering::SeqCst) {
            let Some(_reporting) = self.reporting.try_lock() else {
                return;
            };
            while self.report_due.swap(false, Ordering::SeqCst) {
                loop {
                    let event = self.sender.lock().poll_event();
                    let Some(event) = event else { break };
                    if let SendEvent::Quiet(id) = event {
                        self.outbound.forget(id);
                    }
                    self.emit(LinkEvent::Send(event));
                }
            }
        }
    }

    pub(crate) fn closing(&self) -> bool {
        self.life.lock().closing
    }

    /// Has a rail's engine look at it.
    pub(crate) fn kick(self: &Arc<Self>, rail: &Rail) {
        if let Some(place) = rail.place.get()
            && !rail.kicked.swap(true, Ordering::SeqCst)
        {
            self.engine(place.engine).push(Task::Rail(self.clone(), rail.index));
        }
    }

    pub(crate) fn kick_all(self: &Arc<Self>) {
        for rail in &self.rails {
            self.kick(rail);
        }
    }

    pub(crate) fn kick_those_with_work(self: &Arc<Self>) {
        let sender = self.sender.lock();
        // A mask, so that the lock is not held while threads are woken.
        let work = self
            .rails
            .iter()
            .filter(|rail| sender.has_work(rail.index))
            .fold(0u64, |mask, rail| mask | 1 << rail.index);
        drop(sender);
        for rail in self.rails.iter().filter(|rail| work & (1 << rail.index) != 0) {
            self.kick(rail);
        }
    }

    /// Gives a rail its engine. False if the link is closing.
    pub(crate) fn attach(self: &Arc<Self>, rail: &Rail, place: RailPlace) -> bool {
        let mut life = self.life.lock();
        if life.closing {
            return false;
        }
        if rail.place.set(place).is_ok() {
            life.attached.insert(rail.index);
        }
        true
    }

    /// Whether the rail's engine has let go of it.
    pub(crate) fn detached(&self, rail: u16) -> bool {
        let life = self.life.lock();
        life.closing && !life.attached.contains(&rail)
    }

    /// Whether a rail is up, or the link has failed.
    pub(crate) fn settled(&self) -> bool {
        self.rails_up.load(Ordering::SeqCst) > 0 || self.closing()
    }

    /// When its revocations and its rails are to be looked at.
    pub(crate) fn next_look(&self, now: Time) -> Time {
        let late = self.inbound.next_revocation();
        let rails = (!self.settled()).then(|| *self.no_rail_limit.lock());
        late.into_iter()
            .chain(rails)
            .min()
            .unwrap_or(now + self.config.progress)
    }

    /// A rail is up.
    pub(crate) fn rail_up(&self, rail: u16) {
        self.life.lock().failures.remove(&rail);
        self.rails_up.fetch_add(1, Ordering::SeqCst);
        if !self.was_up.swap(true, Ordering::SeqCst) {
            self.emit(LinkEvent::Up);
        }
    }

    /// A rail is no longer up. The last one has some time to come back, or another.
    pub(crate) fn rail_down(self: &Arc<Self>) {
        // First the limit: whoever sees no rail goes by it.
        *self.no_rail_limit.lock() = clock::now() + self.config.outage_limit;
        if self.rails_up.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.engine(0).push(Task::Watch(self.clone()));
        }
    }

    /// An engine has let go of a rail, after the link began to close.
    pub(crate) fn detach(self: &Arc<Self>, rail: u16) {
        let mut life = self.life.lock();
        life.attached.remove(&rail);
        let last = life.closing && life.attached.is_empty() && !std::mem::replace(&mut life.closed, true);
        drop(life);
        if last {
            self.end();
        }
    }

    /// Nothing of the link is left: what it had admitted is quiet.
    fn end(self: &Arc<Self>) {
        let fenced = self.fences.lock().unfinished.is_empty();
        if fenced {
            let quiet = self.inbound.take_all();
            self.quiet(&quiet);
        }
        self.report();
        self.transport.link_ended(self);
        self.emit(LinkEvent::Closed);
    }

    /// A rail could not be made, or was lost.
    pub(crate) fn rail_failed(&self, lane: LaneName, why: &Error) {
        tracing::warn!(peer = %self.peer.incarnation, rail = lane.index, epoch = lane.epoch, error = %why, "rail failed");
        self.life.lock().failures.insert(lane.index, why.to_string());
    }

    /// Why rails are not up, for people.
    fn rails_down(&self) -> Vec<String> {
        let life = self.life.lock();
        let failures = life.failures.iter();
        failures.map(|(rail, why)| format!("rail {rail}: {why}")).collect()
    }

    /// If no rail came up in the time for it, or came back: the link has failed.
    pub(crate) fn check_rails(self: &Arc<Self>, now: Time) {
        if self.settled() || now < *self.no_rail_limit.lock() {
            return;
        }
        let what = match self.was_up.load(Ordering::SeqCst) {
            true => "no rail came back",
            false => "no rail came up",
        };
        let failures = self.rails_down().join("; ");
        let why = if failures.is_empty() {
            "the peer answered nothing".to_owned()
        } else {
            failures
        };
        self.fail(
            Error::new(ErrorKind::Transport, what)
                .at(format!("rdma to {}", self.peer.incarnation))
                .because(why)
                .remedy("run `kvxfer-bench doctor` on both machines; check that the ports are on one network"),
        );
    }

    /// A rail's device is gone for good. With the last of them the link has failed.
    pub(crate) fn rail_dead(self: &Arc<Self>, rail: u16, error: &Error) {
        let last = {
            let mut life = self.life.lock();
            life.dead.insert(rail) && !life.closing && life.attached.is_subset(&life.dead)
        };
        if last {
            self.fail(error.clone());
        }
    }

    /// The link cannot go on.
    pub(crate) fn fail(self: &Arc<Self>, error: Error) {
        if !self.closing() {
            self.emit(LinkEvent::Failed(error));
            self.begin_close();
        }
    }

    pub(crate) fn begin_close(self: &Arc<Self>) {
        let mut life = self.life.lock();
        if std::mem::replace(&mut life.closing, true) {
            return;
        }
        let alone = life.attached.is_empty() && !std::mem::replace(&mut life.closed, true);
        drop(life);
        if alone {
            // On an engine: the caller may hold what a report would take.
            self.engine(0).push(Task::EndLink(self.clone()));
        } else {
            self.kick_all();
        }
    }

    /// Ends a link that had no rail.
    pub(crate) fn end_alone(self: &Arc<Self>) {
        self.end();
    }

    // ------------------------------------------------------------------------------------------- fences

    pub(crate) fn lane_born(&self, lane: LaneName) {
        self.fences.lock().live.insert(lane);
    }

    /// A queue pair is destroyed; `flushed` if also everything it had accepted is in memory.
    pub(crate) fn lane_gone(&self, lane: LaneName, flushed: bool) {
        let mut quiet = Vec::new();
        {
            let mut fences = self.fences.lock();
            fences.live.remove(&lane);
            if !flushed {
                fences.unfinished.insert(lane);
                return;
            }
            fences.unfinished.remove(&lane);
            fences.waiting.retain_mut(|(lanes, slots)| {
                lanes.remove(&lane);
                if lanes.is_empty() {
                    quiet.append(slots);
                }
                !lanes.is_empty()
            });
        }
        self.inbound.forget(&quiet);
        self.quiet(&quiet);
    }

    /// Whether it cannot be said that nothing of a lane lands any more.
    pub(crate) fn is_unfinished(&self, lane: LaneName) -> bool {
        self.fences.lock().unfinished.contains(&lane)
    }

    /// Peers that did not confirm in time that they stopped writing: their queue pairs are fenced. Returns when to look
    /// again.
    pub(crate) fn check_revocations(self: &Arc<Self>, now: Time) -> Option<Time> {
        let (late, next) = self.inbound.late_revocations(now);
        if !late.is_empty() {
            let mut fences = self.fences.lock();
            let mut lanes = fences.live.clone();
            lanes.extend(fences.unfinished.iter().copied());
            let none = lanes.is_empty();
            if !none {
                fences.waiting.push((lanes, late.clone()));
            }
            drop(fences);
            tracing::warn!(peer = %self.peer.incarnation, slots = late.len(), "the peer did not confirm that it stopped writing: fencing its queue pairs");
            if none {
                self.inbound.forget(&late);
                self.quiet(&late);
            } else {
                let error = Error::new(ErrorKind::Transport, "the rail was fenced")
                    .at(format!("rdma to {}", self.peer.incarnation))
                    .because(format!(
                        "the peer did not confirm within {} ms that it stopped writing",
                        self.config.revoke.as_millis()
                    ));
                for rail in &self.rails {
                    rail.mail.lock().push_back(Mail::Fail(error.clone()));
                    self.kick(rail);
                }
            }
        }
        next
    }

    /// The peer writes no more into a slot. What it wrote has been handed over to our devices, which may still be on their
    /// way to memory with it: they are flushed, then the slot is quiet.
    fn flush_revoked(self: &Arc<Self>, slot: SlotUse) {
        let mut engines = BTreeSet::new();
        let first_of_engine = |rail: &&Rail| rail.place.get().is_some_and(|place| engines.insert(place.engine));
        let rails: Vec<&Rail> = self.rails.iter().filter(first_of_engine).collect();
        let flushing = Arc::new(Flushing {
            slot,
            devices_left: AtomicUsize::new(rails.len().max(1)),
        });
        for rail in &rails {
            rail.mail.lock().push_back(Mail::Flush(flushing.clone()));
            self.kick(rail);
        }
        if rails.is_empty() {
            self.device_flushed(&flushing);
        }
    }

    /// A device is flushed; with the last one the slot is quiet.
    pub(crate) fn device_flushed(&self, flushing: &Flushing) {
        if flushing.devices_left.fetch_sub(1, Ordering::SeqCst) == 1 && self.inbound.forget(&[flushing.slot]) > 0 {
            self.quiet(&[flushing.slot]);
        }
    }

    /// The held gates of these slots are let go.
    fn quiet(&self, slots: &[SlotUse]) {
        let mut any = false;
        for slot in slots {
            any |= self.slots.remote_quiet(slot.slot, slot.generation);
        }
        if any {
            self.emit(LinkEvent::SlotQuiet);
        }
    }

    /// Slots whose writing was revoked, and of which nothing is under way any more: the peer is told.
    pub(crate) fn confirm_revocations(&self) {
        if !self.outbound.any_revoking() {
            return;
        }
        let sender = self.sender.lock();
        let done = self.outbound.take_revoked(|slot| {
            sender.outstanding(slot.slot, slot.generation) == 0 || mutants::is(Mutant::RevokedEarly)
        });
        drop(sender);
        for slot in done {
            self.tell(LinkMessage::Revoked(slot));
        }
    }

    // ------------------------------------------------------------------------------------------ messages

    fn take(self: &Arc<Self>, message: LinkMessage) -> Result<()> {
        let rail = match &message {
            LinkMessage::Connect(hello) => return self.connect_asked(hello.clone()),
            LinkMessage::Accept(hello) => hello.lane.index,
            LinkMessage::Reject { lane, .. }
            | LinkMessage::Ready { lane }
            | LinkMessage::Credits { lane, .. }
            | LinkMessage::LaneDown { lane, .. } => lane.index,
            LinkMessage::Closing(closing) => closing.lane.index,
            LinkMessage::Admit(slot) => {
                self.admit_slot(*slot);
                return Ok(());
            }
            LinkMessage::Admitted(slot) => {
                self.begin_admitted(*slot)?;
                return Ok(());
            }
            LinkMessage::Refused(slot) => {
                self.refuse_slot(*slot);
                return Ok(());
            }
            LinkMessage::Revoke(slot) => {
                let waiting = {
                    // Together: a transfer is either refused here, or sees that the slot is being revoked.
                    let mut sender = self.sender.lock();
                    self.outbound.revoke(*slot);
                    sender.slot_refused(slot.slot, slot.generation);
                    self.outbound.refused(*slot)
                };
                self.refuse(waiting);
                self.confirm_revocations();
                self.kick_all();
                return Ok(());
            }
            LinkMessage::Revoked(slot) => {
                let news = self.inbound.confirmed(*slot);
                if news.map_err(|why| Error::from(RdmaError::peer(self, why.to_owned())))? {
                    self.flush_revoked(*slot);
                }
                return Ok(());
            }
            LinkMessage::Arrived(slot) => {
                self.outbound.slot_ended(*slot);
                self.sender.lock().slot_arrived(slot.slot, slot.generation);
                self.kick_those_with_work();
                return Ok(());
            }
            LinkMessage::UserMessage { slot, bytes } => return self.user_message(*slot, bytes),
        };
        let Some(rail) = self.rails.get(usize::from(rail)) else {
            return Err(RdmaError::peer(self, format!("rail {rail} does not exist")).into());
        };
        let mut mail = rail.mail.lock();
        if mail.len() >= MAIL_MAX {
            return Err(RdmaError::peer(
                self,
                format!("more than {MAIL_MAX} messages wait for rail {}", rail.index),
            )
            .into());
        }
        mail.push_back(Mail::Message(message));
        drop(mail);
        self.kick(rail);
        Ok(())
    }

    /// The dialer has made a queue pair for a lane: ours is made by the engine of the port that it names.
    fn connect_asked(self: &Arc<Self>, hello: crate::message::RailHello) -> Result<()> {
        if self.peer.dials {
            return Err(RdmaError::peer(self, "it dials rails, which is for this side to do".into()).into());
        }
        let Some(rail) = self.rails.get(usize::from(hello.lane.index)) else {
            self.tell(LinkMessage::Reject {
                lane: hello.lane,
                why: format!("this side has at most {} rails", self.rails.len()),
            });
            return Ok(());
        };
        let Some(engine) = self.transport.engine_of_port(hello.peer_port) else {
            self.tell(LinkMessage::Reject {
                lane: hello.lane,
                why: format!("port {} does not exist here", hello.peer_port),
            });
            return Ok(());
        };
        let place = RailPlace {
            engine,
            own_port: hello.peer_port,
            peer_port: hello.own_port,
        };
        if !self.attach(rail, place) {
            return Ok(());
        }
        rail.mail.lock().push_back(Mail::Message(LinkMessage::Connect(hello)));
        self.kick(rail);
        Ok(())
    }

    fn admit_slot(&self, slot: SlotUse) {
        if self.admit_here(slot) {
            self.tell(LinkMessage::Admitted(slot));
        } else {
            self.tell(LinkMessage::Refused(slot));
        }
    }

    /// Lets the peer write into a slot. False if the slot is closed, gone or another's, or the link has ended.
    fn admit_here(&self, slot: SlotUse) -> bool {
        if !self.slots.admit(self.peer.incarnation, slot.slot, slot.generation) {
            return false;
        }
        self.inbound.admit(slot);
        // Either the link's end sees the slot in the books, or this sees that it has ended.
        let ended = self.life.lock().closed;
        if ended && self.inbound.forget(&[slot]) > 0 && self.fences.lock().unfinished.is_empty() {
            self.quiet(&[slot]);
        }
        !ended
    }

    /// The receiver has admitted the slot: what waited for that begins.
    fn begin_admitted(self: &Arc<Self>, slot: SlotUse) -> Result<()> {
        let mut refused = Vec::new();
        {
            // Together: a part that is added meanwhile finds the transfer either waiting or with the sender.
            let mut sender = self.sender.lock();
            let waiting = self.outbound.admitted(slot);
            for wish in waiting.map_err(|why| Error::from(RdmaError::peer(self, why)))? {
                let Wish { spec, parts } = wish;
                let id = spec.id;
                match sender.submit(spec) {
                    Ok(()) => parts.into_iter().for_each(|part| sender.add_part(id, part)),
                    Err(error) => {
                        // It was let in when it was submitted; only a defect can refuse it now.
                        tracing::error!(%error, transfer = id.0, "an admitted transfer was refused");
                        refused.push(id);
                    }
                }
            }
        }
        for id in refused {
            self.outbound.forget(id);
            self.emit(LinkEvent::Send(SendEvent::Refused(id)));
        }
        self.kick_those_with_work();
        Ok(())
    }

    fn refuse_slot(&self, slot: SlotUse) {
        self.refuse(self.outbound.refused(slot));
        self.outbound.slot_ended(slot);
    }

    fn refuse(&self, wishes: Vec<Wish>) {
        for wish in wishes {
            self.outbound.forget(wish.spec.id);
            self.emit(LinkEvent::Send(SendEvent::Refused(wish.spec.id)));
        }
    }

    fn user_message(&self, slot: SlotUse, bytes: &[u8]) -> Result<()> {
        let length = bytes.len() as u32;
        let header = ChunkHeader {
            slot: slot.slot,
            generation: slot.generation,
            part: MESSAGE_PART,
            extent: PartExtent {
                token_start: 0,
                token_end: length,
                layer_start: 0,
                layer_end: 0,
                states: false,
            },
            offset: 0,
            length,
            has_message: true,
            checksummed: false,
        };
        if let Placement::Message = self.slots.begin(self.peer.incarnation, &header)?
            && self.slots.message_applied(&header, bytes) == Applied::Arrived
        {
            self.slot_arrived(slot);
        }
        Ok(())
    }

    /// The last byte of a slot is in place: its owner was told by the slot table, now the rest is.
    pub(crate) fn slot_arrived(&self, slot: SlotUse) {
        self.emit(LinkEvent::SlotArrived {
            slot: slot.slot,
            generation: slot.generation,
        });
        self.inbound.forget(&[slot]);
        self.tell(LinkMessage::Arrived(slot));
    }

    /// What a chunk's transfer needs to know of both sides' memory.
    pub(crate) fn keys(&self, id: TransferId) -> Option<Arc<TransferKeys>> {
        self.outbound.keys(id)
    }
}

impl Rail {
    fn new(index: u16) -> Rail {
        Rail {
            index,
            place: OnceLock::new(),
            kicked: AtomicBool::new(false),
            mail: Mutex::default(),
            name: Mutex::default(),
            counters: RailCounters::default(),
        }
    }
}

/// The handle that [`Transport::connect`](kvxfer_core::transport::Transport::connect) gives out.
pub(crate) struct RdmaLink {
    pub(crate) core: Arc<LinkCore>,
}

impl Link for RdmaLink {
    fn submit(&self, spec: SendSpec) -> Result<()> {
        let core = &self.core;
        if core.closing() {
            return Err(RdmaError::Closed {
                peer: core.peer.incarnation,
            }
            .into());
        }
        let limit = core.config.transfers_max as usize;
        let Some(remote) = &spec.remote else {
            return Err(Error::new(ErrorKind::Internal, format!("transfer {}", spec.id.0))
                .at("rdma")
                .because("it does not say where its bytes go at the peer"));
        };
        let keys = core.outbound.resolve(remote, &spec.regions, &core.transport.registry)?;
        let id = spec.id;
        // The sender's lock comes first, always: whoever moves a transfer from one to the other holds both.
        let mut sender = core.sender.lock();
        match core.outbound.submit(spec, keys, limit)? {
            // A read goes into a slot of this side; a slot that is admitted needs no question.
            crate::outbound::Entry::Now(spec) => {
                if let Err(error) = sender.submit(*spec) {
                    core.outbound.forget(id);
                    return Err(error);
                }
            }
            crate::outbound::Entry::Ask(slot) => {
                drop(sender);
                core.tell(LinkMessage::Admit(slot));
                core.flush();
            }
            crate::outbound::Entry::Wait => {}
        }
        Ok(())
    }

    fn add_part(&self, id: TransferId, part: SendPart) {
        let core = &self.core;
        if core.closing() {
            return;
        }
        let mut sender = core.sender.lock();
        if let Some(part) = core.outbound.add_part(id, part) {
            sender.add_part(id, part);
            drop(sender);
            core.kick_those_with_work();
        }
    }

    fn stop(&self, id: TransferId) {
        let core = &self.core;
        {
            let mut sender = core.sender.lock();
            core.outbound.withdraw(id);
            sender.stop(id);
        }
        // An engine reports: the caller may hold what a report would take.
        core.kick_all();
        core.engine(0).push(Task::Report(core.clone()));
    }

    fn forget(&self, id: TransferId) {
        let core = &self.core;
        {
            let mut sender = core.sender.lock();
            core.outbound.forget(id);
            sender.forget(id);
        }
        core.kick_those_with_work();
    }

    fn fence_lane(&self, lane: LaneName, chunks: Vec<ChunkName>) {
        let core = &self.core;
        let rail = core.rails.get(usize::from(lane.index));
        match rail.filter(|rail| rail.place.get().is_some()) {
            Some(rail) => {
                rail.mail.lock().push_back(Mail::Fence(lane, chunks));
                core.kick(rail);
            }
            // No such lane was ever made here: nothing of it was placed.
            None => core.engine(0).push(Task::AnswerFence(core.clone(), lane, chunks)),
        }
    }

    fn lane_fenced(&self, lane: LaneName, chunks: Vec<(ChunkName, ChunkState)>) {
        let core = &self.core;
        core.sender.lock().lane_fenced(lane, &chunks, clock::now());
        core.confirm_revocations();
        core.flush();
        core.kick_all();
        core.engine(0).push(Task::Report(core.clone()));
    }

    fn admit(&self, slot: SlotId, generation: Generation) {
        let core = &self.core;
        if core.closing() {
            return;
        }
        let slot = SlotUse { slot, generation };
        if core.admit_here(slot) {
            core.tell(LinkMessage::Admitted(slot));
            core.flush();
        }
    }

    fn revoke(&self, slot: SlotId, generation: Generation) {
        let core = &self.core;
        let slot = SlotUse { slot, generation };
        if core.inbound.revoke(slot, clock::now() + core.config.revoke) {
            core.tell(LinkMessage::Revoke(slot));
            core.flush();
            core.engine(0).push(Task::Watch(core.clone()));
        }
    }

    fn message(&self, body: Vec<u8>) {
        let core = &self.core;
        if core.closing() {
            return;
        }
        let taken = message::parse(&body).and_then(|messages| messages.into_iter().try_for_each(|one| core.take(one)));
        if let Err(error) = taken {
            core.fail(error);
        }
        core.flush();
        core.report();
    }

    fn close(&self) {
        self.core.begin_close();
    }

    fn path(&self) -> Path {
        let core = &self.core;
        Path {
            transport: "rdma".into(),
            rails: core.rails.iter().filter_map(|rail| rail.name.lock().clone()).collect(),
            rails_down: core.rails_down(),
            rails_configured: core.rails.iter().filter(|rail| rail.place.get().is_some()).count(),
        }
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        // Whoever lets go of a link without closing it must not leave its queue pairs behind.
        self.close();
    }
}
