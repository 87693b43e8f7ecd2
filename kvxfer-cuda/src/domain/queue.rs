//! What is known of a device's copies: what is queued, what is under way, and when the device is given more.

use std::collections::{HashMap, VecDeque};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::gate::Shape;
use super::job::{DIRECTIONS, Direction, Job, Piece};
use super::progress::Progress;
use super::streams::{HandedOver, IN_FLIGHT_MAX, Mark};
use crate::error::CudaError;

/// Bytes that are worth a call by themselves. A stream that is busy is given no less: at 50 GB/s that lasts for 80 µs,
/// longer than it takes to see the end of what it is busy with.
const BATCH_BYTES: u64 = 4 << 20;
/// An idle stream is given less without waiting for more, if it is less than this: nobody sends much in small chunks.
const ALONE_BYTES_MAX: u64 = 512 << 10;
/// Or when somebody has looked so often at something queued: whoever has more to start does that between two looks, and
/// whoever has not looks again at once. No time is waited for, so that a busy processor makes no difference.
const LOOKS_MAX: u32 = 3;
/// Or so long after the last hand-over: what is queued is not one of many.
const APART: Duration = Duration::from_millis(5);
/// Lists of pieces that are kept for the next copies.
const SPARE_MAX: usize = 64;

/// A copy that somebody asked for and has not been told the end of.
#[derive(Debug)]
pub(super) enum Ticket {
    Queued {
        direction: Direction,
        /// How often somebody has looked at it.
        looks: u32,
    },
    HandedOver {
        direction: Direction,
        sequence: u64,
        /// Why it fails once everything of it has ended.
        refused: Option<CudaError>,
    },
    Failed(CudaError),
}

/// A hand-over that has not been seen to end.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) sequence: u64,
    pub(super) mark: Mark,
    pub(super) ask_at: Instant,
    pub(super) pause: Duration,
}

/// What waits for a direction's stream.
#[derive(Debug, Default)]
struct Queue {
    jobs: Vec<Job>,
    shape: Shape,
    /// Somebody looked often enough: it waits for nothing more.
    due: bool,
    /// When the last ones were taken.
    taken_at: Option<Instant>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    next_ticket: u64,
    pub(super) tickets: HashMap<u64, Ticket>,
    queues: [Queue; 2],
    pub(super) flights: [VecDeque<Flight>; 2],
    spare: Vec<Vec<Piece>>,
    /// Somebody polled: what is queued goes when there is room for it.
    pub(super) asked: bool,
    /// The streams are to be made before anything is queued.
    pub(super) warm: bool,
    pub(super) ending: bool,
    pub(super) ended: bool,
    pub(super) thread: Option<JoinHandle<()>>,
    pub(super) lost: Option<CudaError>,
    pub(super) notes: Vec<String>,
}

impl Queue {
    fn push(&mut self, job: Job) {
        self.shape = self.shape.and(job.shape);
        self.jobs.push(job);
    }

    fn take(&mut self, now: Instant) -> Vec<Job> {
        self.shape = Shape::default();
        self.due = false;
        self.taken_at = Some(now);
        std::mem::take(&mut self.jobs)
    }

    /// Whether it is worth a call while nothing is under way.
    fn is_enough_for_an_idle_stream(&self, now: impl FnOnce() -> Instant) -> bool {
        let alone = |taken_at| now().saturating_duration_since(taken_at) >= APART;
        self.due || !(ALONE_BYTES_MAX..BATCH_BYTES).contains(&self.shape.bytes) || self.taken_at.is_none_or(alone)
    }
}

impl State {
    /// Queues a copy. Returns its ticket.
    pub(super) fn queue(
        &mut self,
        direction: Direction,
        pieces: Vec<Piece>,
        shape: Shape,
        device_offset: Option<u64>,
    ) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.insert(ticket, Ticket::Queued { direction, looks: 0 });
        self.queues[direction as usize].push(Job {
            ticket,
            pieces,
            shape,
            device_offset,
        });
        ticket
    }

    /// An empty list of pieces.
    pub(super) fn list(&mut self) -> Vec<Piece> {
        self.spare.pop().unwrap_or_default()
    }

    /// Whether a copy is over, as somebody asks. `None`: there is none.
    pub(super) fn look(&mut self, ticket: u64, progress: Option<&Progress>) -> Option<bool> {
        Some(match self.tickets.get_mut(&ticket)? {
            Ticket::Queued { direction, looks } => {
                *looks += 1;
                self.queues[*direction as usize].due |= *looks >= LOOKS_MAX;
                false
            }
            Ticket::HandedOver {
                direction, sequence, ..
            } => reached(progress, *direction, *sequence),
            Ticket::Failed(_) => true,
        })
    }

    /// Whether anything waits for its stream.
    pub(super) fn any_queued(&self) -> bool {
        self.queues.iter().any(|queue| !queue.jobs.is_empty())
    }

    /// Whether any direction's stream is to be given what waits for it now.
    pub(super) fn any_ready(&self, progress: Option<&Progress>) -> bool {
        DIRECTIONS.iter().any(|way| self.ready(*way, progress, Instant::now))
    }

    fn ready(&self, direction: Direction, progress: Option<&Progress>, now: impl FnOnce() -> Instant) -> bool {
        let queue = &self.queues[direction as usize];
        if queue.jobs.is_empty() {
            return false;
        }
        let flights = self.flights[direction as usize].iter();
        let under_way = flights.filter(|flight| !reached(progress, direction, flight.sequence));
        match under_way.count() {
            0 => queue.is_enough_for_an_idle_stream(now),
            under_way => under_way < IN_FLIGHT_MAX && queue.shape.bytes >= BATCH_BYTES,
        }
    }

    /// Takes what is to be handed over now, by direction.
    pub(super) fn take_ready(&mut self, progress: Option<&Progress>, now: Instant) -> [Vec<Job>; 2] {
        let taken = DIRECTIONS.map(|way| match self.ready(way, progress, || now) {
            true => self.queues[way as usize].take(now),
            false => Vec::new(),
        });
        self.asked = self.any_queued();
        taken
    }

    pub(super) fn handed_over(&mut self, direction: Direction, handed: HandedOver, device: &str) {
        let refused = handed.refused.map(|refused| CudaError::call(refused, device));
        self.recycle(handed.pieces);
        self.tickets.insert(
            handed.ticket,
            Ticket::HandedOver {
                direction,
                sequence: handed.sequence,
                refused,
            },
        );
    }

    /// Jobs that found no room go before those that were queued meanwhile.
    pub(super) fn put_back(&mut self, direction: Direction, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let queue = &mut self.queues[direction as usize];
        let meanwhile = std::mem::replace(&mut queue.jobs, Vec::with_capacity(jobs.len()));
        queue.shape = Shape::default();
        // They have been waited for.
        queue.due = true;
        jobs.into_iter().chain(meanwhile).for_each(|job| queue.push(job));
        self.asked = true;
    }

    pub(super) fn recycle(&mut self, mut pieces: Vec<Piece>) {
        if self.spare.len() < SPARE_MAX {
            pieces.clear();
            self.spare.push(pieces);
        }
    }

    /// Jobs that were taken, or are queued, and will not be handed over.
    pub(super) fn fail(&mut self, jobs: impl IntoIterator<Item = Job>, error: &CudaError) {
        for job in jobs {
            self.tickets.insert(job.ticket, Ticket::Failed(error.clone()));
            self.recycle(job.pieces);
        }
    }

    pub(super) fn fail_queued(&mut self, error: &CudaError) {
        let now = Instant::now();
        for way in DIRECTIONS {
            let jobs = self.queues[way as usize].take(now);
            self.fail(jobs, error);
        }
    }

    /// Nothing is started any more, and the device is not asked any more: returns what it would have been asked for by.
    ///
    /// What was handed over fails if it has ended by that. If the device may still be at it, it goes on for whoever asks,
    /// until the device writes its number, or for ever: an error would say that nothing is written any more.
    pub(super) fn lose(&mut self, error: CudaError, ended: bool) -> Vec<Mark> {
        tracing::error!(%error, "no copies with this device any more");
        self.fail_queued(&error);
        let flights = self.flights.iter_mut().flat_map(|flights| flights.drain(..));
        let marks = flights.map(|flight| flight.mark).collect();
        for ticket in self.tickets.values_mut() {
            if ended && matches!(ticket, Ticket::HandedOver { .. }) {
                *ticket = Ticket::Failed(error.clone());
            }
        }
        self.lost = Some(error);
        marks
    }
}

/// Whether a hand-over has ended, as the device writes it.
fn reached(progress: Option<&Progress>, direction: Direction, sequence: u64) -> bool {
    progress.is_some_and(|progress| progress.reached(direction, sequence))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 1 << 20;
    const OUT: Direction = Direction::Out;

    fn queue(state: &mut State, bytes: u64) -> u64 {
        let shape = Shape { pieces: 1, bytes };
        state.queue(OUT, Vec::new(), shape, None)
    }

    /// Whether the stream is given something now, and how much of it.
    fn take(state: &mut State, now: Instant) -> usize {
        state.take_ready(None, now)[OUT as usize].len()
    }

    /// A state whose last hand-over was now, and has ended.
    fn after_another(now: Instant) -> State {
        let mut state = State::default();
        queue(&mut state, CHUNK);
        assert_eq!(take(&mut state, now), 1, "the first waits for nothing");
        state
    }

    #[test]
    fn a_chunk_behind_another_waits_for_more_until_it_has_been_looked_at_often_enough() {
        let now = Instant::now();
        let mut state = after_another(now);
        let ticket = queue(&mut state, CHUNK);
        for _ in 1..LOOKS_MAX {
            assert_eq!(state.look(ticket, None), Some(false));
            assert_eq!(take(&mut state, now), 0);
        }
        let later = queue(&mut state, CHUNK);
        assert_eq!(state.look(later, None), Some(false));
        assert_eq!(take(&mut state, now), 0, "the looks are those at one of them");
        assert_eq!(state.look(ticket, None), Some(false));
        assert_eq!(take(&mut state, now), 2);
        // That was for them alone.
        queue(&mut state, CHUNK);
        assert_eq!(take(&mut state, now), 0);
    }

    #[test]
    fn enough_for_a_call_little_and_what_comes_by_itself_wait_for_nothing() {
        let now = Instant::now();
        let mut state = after_another(now);
        for _ in 1..BATCH_BYTES / CHUNK {
            queue(&mut state, CHUNK);
            assert_eq!(take(&mut state, now), 0);
        }
        queue(&mut state, CHUNK);
        assert_eq!(take(&mut state, now), (BATCH_BYTES / CHUNK) as usize);
        queue(&mut state, ALONE_BYTES_MAX - 1);
        assert_eq!(take(&mut state, now), 1);
        queue(&mut state, CHUNK);
        assert_eq!(take(&mut state, now), 0);
        assert_eq!(take(&mut state, now + APART), 1);
    }

    #[test]
    fn a_busy_stream_is_given_what_is_worth_a_call_and_only_so_much() {
        let now = Instant::now();
        let mut state = after_another(now);
        let fly = |state: &mut State| {
            state.flights[OUT as usize].push_back(Flight {
                sequence: 1,
                mark: Mark::Word,
                ask_at: now,
                pause: Duration::ZERO,
            });
        };
        fly(&mut state);
        let ticket = queue(&mut state, BATCH_BYTES - 1);
        for _ in 0..=LOOKS_MAX {
            assert_eq!(state.look(ticket, None), Some(false));
        }
        assert_eq!(take(&mut state, now), 0);
        queue(&mut state, 1);
        assert_eq!(take(&mut state, now), 2);
        fly(&mut state);
        queue(&mut state, BATCH_BYTES);
        assert_eq!(take(&mut state, now), 0);
    }

    #[test]
    fn what_is_put_back_goes_first_and_waits_for_nothing_more() {
        let now = Instant::now();
        let mut state = after_another(now);
        let first = queue(&mut state, CHUNK);
        let now = now + APART;
        let [taken, _] = state.take_ready(None, now);
        queue(&mut state, CHUNK);
        state.put_back(OUT, taken);
        let [taken, _] = state.take_ready(None, now);
        assert_eq!((taken[0].ticket, taken.len()), (first, 2));
    }
}
