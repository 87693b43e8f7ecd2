//! The owner's thread: it answers who connects, tells them what is recalled, and notices when they are gone.
//!
//! Nobody can hold it up: it only ever waits for something to happen, and whoever says nothing while it has nothing mapped is
//! sent away.

use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::memory::Region;
use rustix::event::{PollFd, PollFlags};

use super::channel::{self, Letter, Peer, Received};
use super::exporter::{Entry, Exporter, Memory};
use super::handles;
use super::wire::{self, Form, MAPPINGS_AT_ONCE, Part, Said, Token, Told};
use crate::driver::Refused;
use crate::pointer::Extent;

/// Importing processes at once; each has one connection for each of its drivers.
const CONNECTIONS_MAX: usize = 256;
/// Exports that one of them has mapped.
const HELD_MAX: usize = 1 << 16;
/// How long a connection that has nothing mapped may say nothing.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// A process that has closed its connection with something mapped is mostly about to end. If it does not within this time,
/// it has given its mappings up without saying so, by running another program, say.
const END_MAX: Duration = Duration::from_secs(2);
/// After a connection could not be accepted (too many files are open), none is for this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Messages taken from one connection before the others have their turn.
const MESSAGES_AT_ONCE: usize = 32;

/// An importing process.
struct Connection {
    /// `None`: closed, but its process may still have something mapped.
    socket: Option<OwnedFd>,
    peer: Peer,
    /// Readable once the process has ended. A connection alone is not enough: a process that it forked may hold it, and one that
    /// is killed may lose it before its mappings.
    process: Option<OwnedFd>,
    held: HashMap<u64, Held>,
    letters: VecDeque<Letter>,
    /// When it is sent away if it still has nothing mapped, or forgotten if it was closed.
    deadline: Instant,
}

struct Held {
    entry: Arc<Entry>,
    told: bool,
}

/// What becomes of a connection.
enum Next {
    Stay,
    /// It was closed, or broke a rule.
    Close,
    /// Its process has ended.
    Gone,
}

pub(super) fn run(exporter: &Arc<Exporter>, listener: OwnedFd) {
    let mut server = Server {
        exporter,
        listener: Some(listener),
        connections: Vec::new(),
        accept_at: None,
    };
    while server.turn() {}
}

struct Server<'a> {
    exporter: &'a Arc<Exporter>,
    /// `None`: nobody is given anything any more.
    listener: Option<OwnedFd>,
    connections: Vec<Connection>,
    accept_at: Option<Instant>,
}

impl Server<'_> {
    /// One round. False: it is over.
    fn turn(&mut self) -> bool {
        let (closing, left) = {
            let state = self.exporter.state.lock();
            (state.closing, state.exports.len())
        };
        if closing {
            self.listener = None;
            if left == 0 {
                return false;
            }
        }
        let Some(wake) = self.exporter.wake() else {
            return false;
        };
        let now = Instant::now();
        self.accept_at = self.accept_at.filter(|at| *at > now);
        for connection in &mut self.connections {
            connection.tell_recalls();
        }
        self.send_all();

        let mut polled = vec![PollFd::new(wake, PollFlags::IN)];
        let listens = self.listener.as_ref().filter(|_| self.accept_at.is_none());
        polled.extend(listens.map(|listener| PollFd::new(listener, PollFlags::IN)));
        let listens = listens.is_some();
        for connection in &self.connections {
            connection.poll(&mut polled);
        }
        let deadlines = self.connections.iter().filter_map(Connection::waits_until);
        let until = deadlines.chain(self.accept_at).min();
        channel::wait(&mut polled, until);
        let mut up = polled.iter().map(channel::is_up).collect::<Vec<_>>().into_iter();
        drop(polled);

        if up.next() == Some(true) {
            wake.rest();
        }
        let accepts = listens && up.next() == Some(true);
        let exporter = self.exporter;
        let now = Instant::now();
        let mut gone = Vec::new();
        self.connections.retain_mut(|connection| {
            let next = connection.look(exporter, &mut up, now, &mut gone);
            match next {
                Next::Stay => true,
                Next::Close => connection.close(now, exporter, &mut gone),
                Next::Gone => {
                    connection.release(exporter, &mut gone);
                    false
                }
            }
        });
        if accepts {
            self.accept(now);
        }
        // Last, as it may run anything: the end of what kept a region.
        drop(gone);
        true
    }

    fn accept(&mut self, now: Instant) {
        let Some(listener) = &self.listener else { return };
        let socket = match channel::accept_from(listener) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => return,
            Err(errno) => {
                tracing::warn!(%errno, "an importer of memory was not accepted");
                self.accept_at = Some(now + ACCEPT_PAUSE);
                return;
            }
        };
        // What is closed at once is refused: the importer sees the end of it.
        let Ok(peer) = Peer::of(&socket) else { return };
        if !peer.is_trusted() {
            tracing::warn!(user = peer.user(), "another user asked for memory that is shared");
            return;
        }
        if self.connections.len() >= CONNECTIONS_MAX {
            tracing::warn!(limit = CONNECTIONS_MAX, "too many processes import memory");
            return;
        }
        self.connections.push(Connection {
            process: peer.watch(),
            socket: Some(socket),
            peer,
            held: HashMap::new(),
            letters: VecDeque::new(),
            deadline: now + SILENCE_MAX,
        });
    }

    fn send_all(&mut self) {
        for connection in &mut self.connections {
            connection.send();
        }
    }
}

impl Connection {
    fn waits_until(&self) -> Option<Instant> {
        (self.socket.is_none() || self.held.is_empty()).then_some(self.deadline)
    }

    fn poll<'a>(&'a self, polled: &mut Vec<PollFd<'a>>) {
        if let Some(socket) = &self.socket {
            polled.push(PollFd::new(socket, channel::interest(!self.letters.is_empty())));
        }
        if let Some(process) = &self.process {
            polled.push(PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN));
        }
    }

    /// What has happened at it: `up` is asked for as many as it polled.
    fn look(
        &mut self,
        exporter: &Arc<Exporter>,
        up: &mut impl Iterator<Item = bool>,
        now: Instant,
        gone: &mut Vec<Arc<Region>>,
    ) -> Next {
        let heard = self.socket.is_some() && up.next() == Some(true);
        let ended = self.process.is_some() && up.next() == Some(true);
        if ended {
            return Next::Gone;
        }
        if heard && self.letters.is_empty() && !self.listen(exporter, now, gone) {
            return Next::Close;
        }
        match self.waits_until() {
            Some(deadline) if deadline <= now && self.socket.is_none() => Next::Gone,
            Some(deadline) if deadline <= now => Next::Close,
            _ => Next::Stay,
        }
    }

    /// Takes messages. False: there will be no more, or should not be.
    fn listen(&mut self, exporter: &Arc<Exporter>, now: Instant, gone: &mut Vec<Arc<Region>>) -> bool {
        for _ in 0..MESSAGES_AT_ONCE {
            let Some(socket) = &self.socket else { return false };
            let letter = match channel::receive(socket) {
                Ok(Received::Message(letter)) => letter,
                Ok(Received::Nothing) => return true,
                Ok(Received::Closed) | Err(_) => return false,
            };
            let Some(said) = wire::decode::<Said>(&letter.bytes) else {
                return false;
            };
            match said {
                Said::Map {
                    id,
                    token,
                    first,
                    device,
                } => {
                    let Some(answer) = self.map(exporter, id, token, first, &device) else {
                        return false;
                    };
                    self.letters.push_back(answer);
                    self.send();
                }
                Said::LetGo { id } => {
                    if let Some(held) = self.held.remove(&id) {
                        gone.extend(held.entry.take_back(&mut exporter.state.lock()));
                    }
                }
            }
            if self.held.is_empty() {
                self.deadline = now + SILENCE_MAX;
            }
            // Who does not take its answers is not listened to.
            if !self.letters.is_empty() {
                return true;
            }
        }
        true
    }

    /// The answer to a wish; `None` to one that makes no sense.
    fn map(&mut self, exporter: &Exporter, id: u64, token: Token, first: u32, device: &str) -> Option<Letter> {
        let refused = |why: &str| Some(Letter::new(wire::encode(&Told::refused(id, why))));
        let mut state = exporter.state.lock();
        let known = state.exports.get(&token).cloned();
        let full = self.held.len() >= HELD_MAX;
        let entry = match self.held.entry(id) {
            Slot::Occupied(held) => match known {
                Some(entry) if Arc::ptr_eq(&entry, &held.get().entry) => entry,
                // The same name for something else.
                _ => return None,
            },
            Slot::Vacant(place) => {
                let Some(entry) = known.filter(|entry| !full && entry.give(&mut state)) else {
                    return refused(match full {
                        true => "too much is mapped by one process",
                        false => "it is not shared (any more)",
                    });
                };
                place.insert(Held {
                    entry: Arc::clone(&entry),
                    told: false,
                });
                entry
            }
        };
        drop(state);
        match part(&entry, id, first, self.peer.is_here(), device) {
            Some(Ok(letter)) => Some(letter),
            // It stays counted until the importer lets go.
            Some(Err(why)) => refused(&format!("its owner cannot hand it over: {why}")),
            None => None,
        }
    }

    fn tell_recalls(&mut self) {
        for (id, held) in &mut self.held {
            if !held.told && held.entry.is_recalled() {
                held.told = true;
                let message = wire::encode(&Told::Recalled { id: *id });
                self.letters.push_back(Letter::new(message));
            }
        }
    }

    /// Sends what there is room for. A connection that is broken is noticed when it is polled.
    fn send(&mut self) {
        let Some(socket) = &self.socket else { return };
        while let Some(letter) = self.letters.front() {
            match channel::send(socket, letter) {
                Ok(true) => drop(self.letters.pop_front()),
                Ok(false) => break,
                Err(_) => self.letters.clear(),
            }
        }
    }

    /// Closes it. True: its process may still have something mapped, and is watched.
    fn close(&mut self, now: Instant, exporter: &Exporter, gone: &mut Vec<Arc<Region>>) -> bool {
        self.socket = None;
        self.letters.clear();
        if self.held.is_empty() || self.process.is_none() {
            self.release(exporter, gone);
            return false;
        }
        self.deadline = now + END_MAX;
        true
    }

    /// Nobody has anything mapped by it any more.
    fn release(&mut self, exporter: &Exporter, gone: &mut Vec<Arc<Region>>) {
        let mut state = exporter.state.lock();
        gone.extend(
            self.held
                .drain()
                .filter_map(|(_, held)| held.entry.take_back(&mut state)),
        );
    }
}

/// What an importer is told of an export: all of it, or its mappings from `first` on. `None`: it has none there.
fn part(entry: &Entry, id: u64, first: u32, is_here: bool, device: &str) -> Option<Result<Letter, Refused>> {
    let source = &entry.source;
    let mut descriptors = Vec::new();
    let (form, head) = match &source.memory {
        _ if is_here
            && first == 0
            && (device == source.device || matches!(source.memory, Memory::Allocation { .. })) =>
        {
            (Form::Here(source.address), 0)
        }
        Memory::Allocation { handle, length } if first == 0 => {
            let (handle, length) = (*handle, *length);
            (Form::Allocation { handle, length }, source.head)
        }
        Memory::Allocation { .. } => return None,
        Memory::Mappings(mappings) => {
            let rest = mappings.get(first as usize..).filter(|rest| !rest.is_empty())?;
            let these: &[Extent] = &rest[..rest.len().min(MAPPINGS_AT_ONCE)];
            for mapping in these {
                match handles::mapping_descriptor(&source.primary, mapping.base) {
                    Ok(descriptor) => descriptors.push(descriptor),
                    Err(refused) => return Some(Err(refused)),
                }
            }
            let form = Form::Mappings {
                total: mappings.len() as u32,
                first,
                lengths: these.iter().map(|mapping| mapping.length).collect(),
            };
            (form, source.head)
        }
    };
    let told = Told::Part(Part {
        id,
        device: source.device.clone(),
        length: source.length,
        head,
        form,
    });
    Some(Ok(Letter {
        bytes: wire::encode(&told),
        descriptors,
    }))
}
