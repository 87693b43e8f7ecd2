//! The importer's thread: it asks owners, maps what they hand over, and lets go of it.
//!
//! It never waits for one owner alone: each has its connection, and a time to answer.

use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvxfer_core::{Error, ErrorKind};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::channel::{self, Letter, Peer, Received};
use super::handles::{self, Handle, Mapped, Opened, Physical};
use super::importer::{Core, Destination, Shared, gone};
use super::wire::{self, Form, Part, Said, Token, Told};
use crate::context::Primary;
use crate::driver::Refused;

/// How long an owner has for each answer, and for room in its queue of connections.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// A connection for which there was no room is tried again after this long.
const CONNECT_AGAIN: Duration = Duration::from_millis(20);

pub(super) fn run(shared: &Arc<Shared>) {
    let mut client = Client {
        shared,
        owners: HashMap::new(),
        opened: HashMap::new(),
        waiting: Vec::new(),
        orphans: Vec::new(),
        next_id: 0,
    };
    while client.turn() {}
}

struct Client<'a> {
    shared: &'a Arc<Shared>,
    owners: HashMap<Token, Owner>,
    /// Allocations that are open: several regions may lie in one.
    opened: HashMap<(i32, Handle), Weak<Opened>>,
    /// Imports that found no room to connect, and until when they try.
    waiting: Vec<(Arc<Core>, Instant)>,
    /// What owners that are gone had handed over: unmapped after the copies.
    /// With each goes the connection, last: while it is open, an owner that is not gone after all counts us as having it.
    orphans: Vec<(Held, Arc<OwnedFd>)>,
    next_id: u64,
}

/// A process that lets us map memory.
struct Owner {
    socket: Arc<OwnedFd>,
    is_here: bool,
    /// Readable once the process has ended: a process that it forked may hold the connection.
    process: Option<OwnedFd>,
    letters: VecDeque<Letter>,
    held: HashMap<u64, Held>,
}

/// An import that its owner was asked for.
struct Held {
    core: Arc<Core>,
    mapping: Option<Mapping>,
    /// What was handed over so far of an export of several mappings.
    memory: Vec<Physical>,
    /// Until when an answer is waited for.
    deadline: Option<Instant>,
}

/// What is mapped, until it is dropped.
enum Mapping {
    /// This process's own. The other device's context stays as long as it is reached.
    Here {
        _other: Option<Primary>,
    },
    Opened {
        allocation: Arc<Opened>,
    },
    Mapped {
        _mapped: Mapped,
    },
}

impl Held {
    /// Unmaps it, unless others have the same. Memory behind descriptors may be freed by its owner whoever has it mapped; an
    /// allocation that is opened may not.
    ///
    /// False: it stays mapped, and the connection to its owner open, by which that counts us as having it for as long.
    fn let_go(self, socket: &Arc<OwnedFd>) -> bool {
        let closed = match self.mapping {
            Some(Mapping::Opened { allocation }) => Arc::into_inner(allocation).map_or(Ok(()), Opened::close),
            _ => Ok(()),
        };
        if let Err(refused) = &closed {
            tracing::error!(%refused, "another process's memory stays mapped: its owner waits for the end of this process");
            std::mem::forget(Arc::clone(socket));
        }
        closed.is_ok()
    }
}

impl Client<'_> {
    /// One round. False: it is over.
    fn turn(&mut self) -> bool {
        let (new, closing) = self.shared.take_new();
        let now = Instant::now();
        let mut begin: Vec<_> = new.into_iter().map(|core| (core, now + ANSWER_MAX)).collect();
        begin.append(&mut self.waiting);
        for (core, until) in begin {
            self.begin(core, until, now);
        }
        if closing {
            let all = self.owners.values().flat_map(|owner| owner.held.values());
            let cores = all
                .chain(self.orphans.iter().map(|(held, _)| held))
                .map(|held| &held.core)
                .chain(self.waiting.iter().map(|(core, _)| core));
            cores.for_each(|core| core.end(crate::CudaError::Closed.into()));
        }
        self.waiting.retain(|(core, _)| !core.is_over());
        self.owners.retain(|_, owner| owner.settle(closing));
        for (held, socket) in self.orphans.extract_if(.., |(held, _)| held.core.is_over()) {
            held.let_go(&socket);
        }
        self.opened.retain(|_, opened| opened.strong_count() > 0);
        if closing && self.owners.is_empty() && self.waiting.is_empty() && self.orphans.is_empty() {
            return false;
        }
        let Some(wake) = self.shared.wake() else {
            return false;
        };
        let names: Vec<Token> = self.owners.keys().copied().collect();
        let mut polled = vec![PollFd::new(wake, PollFlags::IN)];
        for name in &names {
            self.owners[name].poll(&mut polled);
        }
        let deadlines = self.owners.values().flat_map(Owner::deadlines);
        let again = (!self.waiting.is_empty()).then_some(now + CONNECT_AGAIN);
        channel::wait(&mut polled, deadlines.chain(again).min());
        let mut up = polled.iter().map(channel::is_up).collect::<Vec<_>>().into_iter();
        drop(polled);
        if up.next() == Some(true) {
            wake.rest();
        }
        let polled_at = Instant::now();
        for name in names {
            let Some(mut owner) = self.owners.remove(&name) else {
                continue;
            };
            let heard = up.next() == Some(true);
            let ended = owner.process.is_some() && up.next() == Some(true);
            if !heard {
                // Only now: what the driver took its time for may have kept an answer waiting.
                owner.expire(polled_at);
            }
            let open = !ended && (!heard || !owner.letters.is_empty() || self.listen(&mut owner));
            if open {
                self.owners.insert(name, owner);
            } else {
                self.lose(owner);
            }
        }
        true
    }

    /// Asks the owner for an import.
    fn begin(&mut self, core: Arc<Core>, until: Instant, now: Instant) {
        if core.is_over() {
            return;
        }
        let name = core.description.owner;
        let owner = match self.owners.entry(name) {
            Slot::Occupied(known) => known.into_mut(),
            Slot::Vacant(place) => match connect(&name, &core.destination.pci) {
                Ok(Some(owner)) => place.insert(owner),
                Ok(None) if now < until => return self.waiting.push((core, until)),
                Ok(None) => return core.end(late(&core)),
                Err(error) => return core.end(error),
            },
        };
        let id = self.next_id;
        self.next_id += 1;
        owner.ask(id, &core, 0);
        let held = Held {
            core,
            mapping: None,
            memory: Vec::new(),
            deadline: Some(now + ANSWER_MAX),
        };
        owner.held.insert(id, held);
    }

    /// Takes messages. False: there are no more.
    fn listen(&mut self, owner: &mut Owner) -> bool {
        loop {
            let letter = match channel::receive(&owner.socket) {
                Ok(Received::Message(letter)) => letter,
                Ok(Received::Nothing) => return true,
                Ok(Received::Closed) | Err(_) => return false,
            };
            let Some(told) = wire::decode::<Told>(&letter.bytes) else {
                return false;
            };
            match told {
                Told::Part(part) => {
                    // What is let go of already may still be answered.
                    let Some(held) = owner.held.get_mut(&part.id) else {
                        continue;
                    };
                    let is_here = owner.is_here;
                    match self.take(held, &part, &letter.descriptors, is_here) {
                        Ok(None) => held.deadline = None,
                        Ok(Some(next)) => {
                            held.deadline = Some(Instant::now() + ANSWER_MAX);
                            let core = Arc::clone(&held.core);
                            owner.ask(part.id, &core, next);
                        }
                        Err(error) => held.core.end(error),
                    }
                }
                Told::Refused { id, why } => {
                    if let Some(held) = owner.held.get(&id) {
                        let device = &held.core.destination.pci;
                        held.core.end(gone(ErrorKind::NotRegistered, device, why));
                    }
                }
                Told::Recalled { id } => {
                    if let Some(held) = owner.held.get(&id) {
                        let device = &held.core.destination.pci;
                        held.core
                            .end(gone(ErrorKind::NotRegistered, device, "its owner has taken it back"));
                    }
                }
            }
        }
    }

    /// Maps what an owner hands over. `Some`: there is more, from this mapping on.
    fn take(
        &mut self,
        held: &mut Held,
        part: &Part,
        descriptors: &[OwnedFd],
        is_here: bool,
    ) -> Result<Option<u32>, Error> {
        let core = Arc::clone(&held.core);
        let to = &core.destination;
        let nonsense = || gone(ErrorKind::Protocol, &to.pci, "what its owner says of it cannot be");
        if held.mapping.is_some() || !part.is_plausible(core.description.length, descriptors.len()) {
            return Err(nonsense());
        }
        let failed = |refused: Refused| {
            gone(
                ErrorKind::Unsupported,
                &to.pci,
                format!("the driver does not map it: {refused}"),
            )
        };
        let from = self.source(to, part)?;
        let (mapping, address) = match &part.form {
            Form::Here(_) if !is_here => return Err(nonsense()),
            Form::Here(address) => {
                let other = match from == to.ordinal {
                    true => None,
                    false => Some(reach_here(to, from)?),
                };
                (Mapping::Here { _other: other }, *address)
            }
            Form::Allocation { handle, .. } => {
                let key = (to.ordinal, *handle);
                let known = self.opened.get(&key).and_then(Weak::upgrade);
                let allocation = match known {
                    Some(allocation) => allocation,
                    None => Arc::new(Opened::new(&to.primary, handle).map_err(failed)?),
                };
                self.opened.insert(key, Arc::downgrade(&allocation));
                let address = allocation.address() + part.head;
                (Mapping::Opened { allocation }, address)
            }
            Form::Mappings { total, first, lengths } => {
                if *first as usize != held.memory.len() {
                    return Err(nonsense());
                }
                for (descriptor, length) in descriptors.iter().zip(lengths) {
                    held.memory
                        .push(Physical::import(&to.primary, descriptor, *length).map_err(failed)?);
                }
                let have = held.memory.len();
                if have < *total as usize {
                    return Ok(Some(have as u32));
                }
                // The handles go when it is mapped, or not.
                let memory = std::mem::take(&mut held.memory);
                let whole = memory.iter().try_fold(0u64, |sum, part| sum.checked_add(part.length()));
                let end = part.head.checked_add(part.length);
                if whole.zip(end).is_none_or(|(whole, end)| end > whole) {
                    return Err(nonsense());
                }
                let mapped = Mapped::new(&to.primary, to.ordinal, &memory).map_err(failed)?;
                let address = mapped.address() + part.head;
                (Mapping::Mapped { _mapped: mapped }, address)
            }
        };
        held.mapping = Some(mapping);
        core.ready(address);
        Ok(None)
    }

    /// The number here of the device that memory is on, if the destination reaches it.
    fn source(&self, to: &Destination, part: &Part) -> Result<i32, Error> {
        let find = |is_it: &dyn Fn(&crate::DeviceFacts) -> bool| self.shared.devices.iter().find(|facts| is_it(facts));
        let from = find(&|facts| facts.pci == part.device);
        let own = find(&|facts| facts.ordinal == to.ordinal);
        let (Some(from), Some(own)) = (from, own) else {
            let why = format!("it is on the device {}, which this process does not see", part.device);
            return Err(gone(ErrorKind::Unsupported, &to.pci, why)
                .remedy("make both devices visible to both processes (CUDA_VISIBLE_DEVICES)"));
        };
        match handles::reaches(to.primary.driver(), own.handle, from.handle) {
            Ok(true) => Ok(from.ordinal),
            Ok(false) => {
                let why = format!(
                    "it is on the device {}, whose memory this one does not reach",
                    part.device
                );
                Err(gone(ErrorKind::Unsupported, &to.pci, why)
                    .remedy("see `nvidia-smi topo -p2p r`; without peer access bytes go through staging"))
            }
            Err(refused) => Err(gone(ErrorKind::Unsupported, &to.pci, refused.to_string())),
        }
    }

    /// The owner is gone: nothing is started any more, and what is mapped is unmapped after the copies.
    fn lose(&mut self, mut owner: Owner) {
        for held in owner.held.values() {
            let device = &held.core.destination.pci;
            held.core.end(gone(
                ErrorKind::PeerLost,
                device,
                "its owner has ended, or refused the connection (it lets in only processes of its own user)",
            ));
        }
        let socket = owner.socket;
        let held = owner.held.drain().map(|(_, held)| (held, Arc::clone(&socket)));
        self.orphans.extend(held);
    }
}

impl Owner {
    fn ask(&mut self, id: u64, core: &Core, first: u32) {
        self.letters.push_back(Letter::new(wire::encode(&Said::Map {
            id,
            token: core.description.token,
            first,
            device: core.destination.pci.clone(),
        })));
        self.send();
    }

    /// Gives up what was not answered in time.
    fn expire(&mut self, now: Instant) {
        for held in self.held.values_mut() {
            if held.deadline.take_if(|deadline| *deadline <= now).is_some() {
                held.core.end(late(&held.core));
            }
        }
    }

    /// Lets go of what is over. False: nothing is left.
    fn settle(&mut self, closing: bool) -> bool {
        let over = self.held.extract_if(|_, held| held.core.is_over());
        let mut said: Vec<Letter> = Vec::new();
        for (id, held) in over {
            // First this, then the message: whoever gets it may free the memory.
            if held.let_go(&self.socket) {
                said.push(Letter::new(wire::encode(&Said::LetGo { id })));
            }
        }
        self.letters.extend(said);
        self.send();
        // The end of the connection says the same as what could not be sent.
        !self.held.is_empty() || !(self.letters.is_empty() || closing)
    }

    /// Sends what there is room for. A connection that is broken is noticed when it is polled.
    fn send(&mut self) {
        while let Some(letter) = self.letters.front() {
            match channel::send(&self.socket, letter) {
                Ok(true) => drop(self.letters.pop_front()),
                Ok(false) => break,
                Err(_) => self.letters.clear(),
            }
        }
    }

    fn poll<'a>(&'a self, polled: &mut Vec<PollFd<'a>>) {
        polled.push(PollFd::new(&self.socket, channel::interest(!self.letters.is_empty())));
        if let Some(process) = &self.process {
            polled.push(PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN));
        }
    }

    fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.held.values().filter_map(|held| held.deadline)
    }
}

/// Lets a device reach memory of this process that is on another.
fn reach_here(to: &Destination, from: i32) -> Result<Primary, Error> {
    let driver = to.primary.driver();
    let failed = |refused: Refused| gone(ErrorKind::Unsupported, &to.pci, refused.to_string());
    // Its memory is there, so that its context is; if it is not, none is made.
    if !Primary::exists(driver, from).map_err(failed)? {
        let why = format!("device {from} has no context any more");
        return Err(gone(ErrorKind::NotRegistered, &to.pci, why));
    }
    let other = Primary::retain(driver, from).map_err(failed)?;
    handles::enable_peer(&to.primary, &other).map_err(failed)?;
    Ok(other)
}

/// `None`: there is no room for a connection now.
fn connect(name: &Token, device: &str) -> Result<Option<Owner>, Error> {
    let socket = match channel::connect_to(name) {
        Ok(socket) => socket,
        Err(Errno::AGAIN) => return Ok(None),
        Err(Errno::CONNREFUSED) => {
            return Err(gone(
                ErrorKind::Unsupported,
                device,
                "its owner is not found: it has ended, or is in another network namespace (another container, say)",
            )
            .remedy("let both containers share the host's network, or one network namespace"));
        }
        Err(errno) => {
            let why = format!("its owner cannot be connected to: {errno}");
            return Err(gone(ErrorKind::Transport, device, why));
        }
    };
    let peer = Peer::of(&socket).map_err(|errno| gone(ErrorKind::Transport, device, errno.to_string()))?;
    if !peer.is_trusted() {
        let why = format!("its owner is another user's process (uid {})", peer.user());
        return Err(gone(ErrorKind::Unsupported, device, why).remedy("run both endpoints as the same user"));
    }
    Ok(Some(Owner {
        is_here: peer.is_here(),
        process: peer.watch(),
        socket: Arc::new(socket),
        letters: VecDeque::new(),
        held: HashMap::new(),
    }))
}

fn late(core: &Core) -> Error {
    let why = format!("its owner did not answer within {} s", ANSWER_MAX.as_secs());
    gone(ErrorKind::DeadlineExceeded, &core.destination.pci, why)
}
