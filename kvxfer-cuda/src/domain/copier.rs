//! The copies of one device: queued by whoever asks, handed to the device by a thread of its own.
//!
//! The thread is there because a driver call may take as long as the engine's next one holds the driver's locks; the
//! threads that move bytes of other pools must not wait for that, and neither must one device's failure be theirs. They
//! only queue, and read a word.
//!
//! Work is queued by `start` and handed over when somebody polls: what a caller starts before it polls goes in one call,
//! and so does what it starts between its first looks (`queue`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvxfer_core::memory::{CopyState, CopyTicket};
use parking_lot::{Condvar, Mutex};

use super::counters::CopyCounters;
use super::gate::Shape;
use super::job::{DIRECTIONS, Direction, Job, Piece};
use super::pinned::PinnedBytes;
use super::progress::Progress;
use super::queue::{Flight, State, Ticket};
use super::streams::{Mark, Streams};
use crate::config::Gather;
use crate::context::Primary;
use crate::driver::Refused;
use crate::error::CudaError;

/// Copies that are known at once.
const TICKETS_MAX: usize = 16 << 10;
/// A hand-over with a word is asked for its errors after this long, then after twice as long, up to the second value.
const ERRORS_AFTER: Duration = Duration::from_millis(5);
const ERRORS_EVERY_MAX: Duration = Duration::from_millis(100);
/// One without a word is asked for its end like that.
const END_AFTER: Duration = Duration::from_micros(20);
const END_EVERY_MAX: Duration = Duration::from_micros(500);
/// While work waits for a hand-over to end, the word is looked at this often, if nobody polls.
const ROOM_EVERY: Duration = Duration::from_micros(200);
/// A query that fails is repeated after this long. So many failures in a row, and the device is lost; after so few, if the
/// error says itself that the context is.
const STRIKE_PAUSE: Duration = Duration::from_millis(2);
const STRIKES_MAX: u32 = 10;
const STRIKES_BROKEN: u32 = 2;
/// How long the end waits for what is under way.
const END_WAIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Shared {
    device: String,
    primary: Arc<Primary>,
    choice: Gather,
    pinned: PinnedBytes,
    counters: CopyCounters,
    progress: OnceLock<Progress>,
    /// Something is under way that is not waited for any more.
    abandoned: Arc<AtomicBool>,
    state: Mutex<State>,
    wake: Condvar,
    over: Condvar,
}

/// The copies of one device. Its thread starts with the first and ends with this.
#[derive(Debug)]
pub(crate) struct Copier {
    shared: Arc<Shared>,
    ordinal: i32,
}

impl Copier {
    pub(crate) fn new(
        primary: &Arc<Primary>,
        ordinal: i32,
        device: &str,
        choice: Gather,
        pinned: &PinnedBytes,
    ) -> Copier {
        Copier {
            shared: Arc::new(Shared {
                device: device.to_owned(),
                primary: Arc::clone(primary),
                choice,
                pinned: Arc::clone(pinned),
                counters: CopyCounters::default(),
                progress: OnceLock::new(),
                abandoned: Arc::default(),
                state: Mutex::default(),
                wake: Condvar::new(),
                over: Condvar::new(),
            }),
            ordinal,
        }
    }

    /// Queues a copy of what `list` lists.
    ///
    /// # Errors
    /// The device is lost, too many copies are known, or the thread cannot be started. What `list` fails with.
    pub(crate) fn start<E: From<CudaError>>(
        &self,
        direction: Direction,
        device_offset: Option<u64>,
        list: impl FnOnce(&mut Vec<Piece>) -> Result<(), E>,
    ) -> Result<CopyTicket, E> {
        let mut pieces = {
            let mut state = self.shared.state.lock();
            self.usable(&mut state)?;
            state.list()
        };
        list(&mut pieces)?;
        let shape = Shape {
            pieces: pieces.len(),
            bytes: pieces.iter().map(|piece| piece.length).sum(),
        };
        let mut state = self.shared.state.lock();
        // It may have been lost meanwhile.
        self.usable(&mut state)?;
        let ticket = state.queue(direction, pieces, shape, device_offset);
        Ok(CopyTicket(ticket))
    }

    /// Makes streams and loads kernels now, so that the first copy does not wait for it.
    pub(crate) fn warm(&self) -> Result<(), CudaError> {
        let mut state = self.shared.state.lock();
        if self.shared.progress.get().is_none() {
            self.usable(&mut state)?;
            state.warm = true;
            self.shared.wake.notify_one();
        }
        Ok(())
    }

    fn usable(&self, state: &mut State) -> Result<(), CudaError> {
        if let Some(lost) = &state.lost {
            return Err(lost.clone());
        }
        if state.tickets.len() >= TICKETS_MAX {
            return Err(CudaError::Limit {
                what: "copies",
                limit: TICKETS_MAX,
            });
        }
        if state.thread.is_none() {
            let name = format!("kvx-copy-{}", self.ordinal);
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new()
                .name(name.clone())
                .spawn(move || run(&shared));
            state.thread = Some(started.map_err(|error| CudaError::Thread {
                name,
                why: error.to_string(),
            })?);
        }
        Ok(())
    }

    /// How a copy stands. Calls nothing of the driver's.
    ///
    /// # Errors
    /// The copy's: it is over then, and so is its ticket.
    pub(crate) fn poll(&self, ticket: CopyTicket) -> Result<CopyState, CudaError> {
        let shared = &*self.shared;
        let mut state = shared.state.lock();
        let progress = shared.progress.get();
        let over = state.look(ticket.0, progress).ok_or_else(|| unknown(ticket))?;
        // Without room the thread takes it when there is some, and whoever polls then tells it so at once.
        state.asked |= state.any_queued();
        if state.any_ready(progress) {
            shared.wake.notify_one();
        }
        if !over {
            return Ok(CopyState::Running);
        }
        match state.tickets.remove(&ticket.0) {
            Some(
                Ticket::Failed(error)
                | Ticket::HandedOver {
                    refused: Some(error), ..
                },
            ) => Err(error),
            _ => Ok(CopyState::Done),
        }
    }

    /// Whether the device may still be at copies that nobody waits for any more: what they use must stay for good.
    pub(crate) fn abandoned(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.abandoned)
    }

    /// What is counted.
    pub(crate) fn counters(&self) -> &CopyCounters {
        &self.shared.counters
    }

    /// Why something is done in another way than the best.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.shared.state.lock().notes.clone()
    }
}

fn unknown(ticket: CopyTicket) -> CudaError {
    CudaError::Unfit {
        kind: kvxfer_core::ErrorKind::Internal,
        what: format!("copy {}", ticket.0),
        why: "there is no such copy, or its end was told already".into(),
        remedy: "",
    }
}

impl Drop for Copier {
    /// Waits, but not for ever, for what is under way: who started it keeps its ends alive no longer.
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.ending = true;
        self.shared.wake.notify_one();
        let Some(thread) = state.thread.take() else {
            return;
        };
        let deadline = Instant::now() + END_WAIT;
        while !state.ended && !self.shared.over.wait_until(&mut state, deadline).timed_out() {}
        let ended = state.ended;
        drop(state);
        if ended {
            // Its last steps do not wait for anything. It does not panic; if it had, there is nothing to do.
            let _ = thread.join();
        } else {
            self.shared.abandoned.store(true, Ordering::Release);
            tracing::warn!(
                device = self.shared.device,
                "copies are still under way; their thread is left to itself"
            );
        }
    }
}

/// What the thread does next.
enum Work {
    End,
    Warm,
    HandOver([Vec<Job>; 2]),
    /// Ask the driver how a hand-over stands.
    Ask(Direction, Mark),
}

fn run(shared: &Arc<Shared>) {
    let mut thread = CopyThread {
        shared,
        streams: None,
        strikes: 0,
        settled: false,
    };
    loop {
        match thread.next() {
            Work::End => break,
            Work::Warm => {
                let _ = thread.make_streams();
            }
            Work::HandOver(jobs) => thread.hand_over(jobs),
            Work::Ask(direction, mark) => thread.ask(direction, mark),
        }
    }
    thread.end();
}

struct CopyThread<'a> {
    shared: &'a Arc<Shared>,
    streams: Option<Streams>,
    /// Queries that failed in a row.
    strikes: u32,
    /// The context is current.
    settled: bool,
}

impl CopyThread<'_> {
    fn next(&mut self) -> Work {
        let shared = self.shared;
        let mut state = shared.state.lock();
        loop {
            self.retire(&mut state);
            let idle = state.flights.iter().all(VecDeque::is_empty);
            if state.ending && idle {
                return Work::End;
            }
            if state.warm {
                state.warm = false;
                return Work::Warm;
            }
            if state.asked && !state.ending && state.any_ready(shared.progress.get()) {
                let jobs = state.take_ready(shared.progress.get(), Instant::now());
                return Work::HandOver(jobs);
            }
            if idle {
                shared.wake.wait(&mut state);
                continue;
            }
            let now = Instant::now();
            let mut until = now + ERRORS_EVERY_MAX;
            for way in DIRECTIONS {
                let Some(flight) = state.flights[way as usize].front_mut() else {
                    continue;
                };
                if flight.ask_at <= now {
                    let longest = match flight.mark {
                        Mark::Word => ERRORS_EVERY_MAX,
                        Mark::Event(_) | Mark::Stream => END_EVERY_MAX,
                    };
                    flight.pause = (flight.pause * 2).min(longest);
                    flight.ask_at = now + flight.pause;
                    return Work::Ask(way, flight.mark);
                }
                until = until.min(flight.ask_at);
            }
            if state.asked || state.ending {
                until = until.min(now + ROOM_EVERY);
            }
            shared.wake.wait_until(&mut state, until);
        }
    }

    /// Forgets hand-overs that have ended.
    fn retire(&mut self, state: &mut State) {
        for way in DIRECTIONS {
            let flights = &mut state.flights[way as usize];
            let reached = |flight: &mut Flight| {
                let progress = self.shared.progress.get();
                progress.is_some_and(|progress| progress.reached(way, flight.sequence))
            };
            while let Some(flight) = flights.pop_front_if(reached) {
                if let Some(streams) = &mut self.streams {
                    streams.unmark(flight.mark);
                }
            }
        }
    }

    fn make_streams(&mut self) -> Result<(), Refused> {
        if self.streams.is_some() {
            return Ok(());
        }
        let shared = self.shared;
        if !self.settled {
            shared.primary.settle()?;
            self.settled = true;
        }
        if shared.progress.get().is_none() {
            let progress = Progress::new(&shared.primary, &shared.pinned)?;
            // Only this thread sets it.
            let _ = shared.progress.set(progress);
        }
        self.streams = Some(Streams::new(&shared.primary, shared.choice, &shared.pinned)?);
        Ok(())
    }

    fn hand_over(&mut self, mut jobs: [Vec<Job>; 2]) {
        let shared = self.shared;
        let made = self.make_streams();
        let (Some(streams), Some(progress)) = (&mut self.streams, shared.progress.get()) else {
            let error = CudaError::call(
                made.err().unwrap_or(Refused {
                    call: "cuStreamCreate",
                    code: crate::driver::Code::ABSENT,
                }),
                shared.device.clone(),
            );
            let mut state = shared.state.lock();
            state.fail(jobs.into_iter().flatten(), &error);
            return;
        };
        for way in DIRECTIONS {
            let waiting = &mut jobs[way as usize];
            if waiting.is_empty() {
                continue;
            }
            let mut handed = Vec::with_capacity(waiting.len());
            let (sequence, mark) = streams.hand_over(way, waiting, progress, &shared.counters, &mut handed);
            let mut state = shared.state.lock();
            state.put_back(way, std::mem::take(waiting));
            let pause = match mark {
                Mark::Word => ERRORS_AFTER,
                Mark::Event(_) | Mark::Stream => END_AFTER,
            };
            state.flights[way as usize].push_back(Flight {
                sequence,
                mark,
                ask_at: Instant::now() + pause,
                pause,
            });
            handed
                .into_iter()
                .for_each(|handed| state.handed_over(way, handed, &shared.device));
        }
        let mut state = shared.state.lock();
        let new = streams.notes.drain(..);
        state.notes.extend(new);
    }

    /// Asks the driver how a direction's oldest hand-over stands: whether it has ended, where the device cannot say so in
    /// a word, and whether it failed.
    fn ask(&mut self, direction: Direction, mark: Mark) {
        let shared = self.shared;
        let (Some(streams), Some(progress)) = (&mut self.streams, shared.progress.get()) else {
            return;
        };
        let ended = streams.ended(direction, mark);
        let mut state = shared.state.lock();
        match ended {
            Ok(ended) => {
                self.strikes = 0;
                let flights = &state.flights[direction as usize];
                let last = match mark {
                    Mark::Event(_) => flights.front(),
                    // Nothing was added since it was asked: this thread adds.
                    Mark::Word | Mark::Stream => flights.back(),
                };
                if let Some(flight) = last.filter(|_| ended) {
                    progress.count(direction, flight.sequence);
                }
            }
            Err(refused) => {
                self.strikes += 1;
                let broken = refused.code.breaks_context();
                if self.strikes >= STRIKES_MAX || (broken && self.strikes >= STRIKES_BROKEN) {
                    let error = CudaError::Lost {
                        device: shared.device.clone(),
                        why: refused.to_string(),
                    };
                    let marks = state.lose(error, refused.code.ends_streams());
                    marks.into_iter().for_each(|mark| streams.unmark(mark));
                    if !refused.code.ends_streams() {
                        shared.abandoned.store(true, Ordering::Release);
                        streams.keep_memory();
                        progress.keep_memory();
                    }
                } else if let Some(flight) = state.flights[direction as usize].front_mut() {
                    flight.ask_at = Instant::now() + STRIKE_PAUSE;
                }
            }
        }
    }

    /// Destroys what this thread made, while the context is current.
    fn end(mut self) {
        self.streams = None;
        if self.settled {
            self.shared.primary.unsettle();
        }
        let mut state = self.shared.state.lock();
        state.fail_queued(&CudaError::Closed);
        state.ended = true;
        self.shared.over.notify_all();
    }
}
