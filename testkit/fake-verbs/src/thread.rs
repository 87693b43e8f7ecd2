//! The device thread: it runs beside the callers, takes what comes and sends what was posted.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvxfer_rdma::sys;
use parking_lot::MutexGuard;

use crate::context::Context;
use crate::counters::add;
use crate::event::Signal;
use crate::network::{Listener, Moved, receive};
use crate::packet::{FRAGMENT, Header};
use crate::requester::BURST;
use crate::state::State;
use crate::watch::Watch;

/// How many packets are taken from one peer, and sent to all, before others have their turn.
const PACKETS_AT_ONCE: u32 = 16;

/// Starts a context's device thread.
pub(crate) fn start(context: Arc<Context>, listener: Listener, doorbell: Arc<Signal>) -> io::Result<JoinHandle<()>> {
    let changes = Watch::new(&context.device.fabric);
    let name = format!("{}-{}", context.device.name, listener.number);
    std::thread::Builder::new().name(name).spawn(move || {
        let engine = Engine {
            context,
            listener,
            doorbell,
            changes,
            peers: Vec::new(),
            buffer: Box::new([0; FRAGMENT]),
            polled: Vec::new(),
        };
        // A panic here is a defect of the fake: the test must not go on with a device that stands still.
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| engine.run())).is_err() {
            std::process::abort();
        }
    })
}

struct Engine {
    context: Arc<Context>,
    listener: Listener,
    doorbell: Arc<Signal>,
    changes: Watch,
    /// Connections of peers to this context; they are only read from.
    peers: Vec<OwnedFd>,
    buffer: Box<[u8; FRAGMENT]>,
    polled: Vec<libc::pollfd>,
}

impl Engine {
    fn run(mut self) {
        let context = self.context.clone();
        loop {
            let mut state = context.state.lock();
            if state.stop {
                return;
            }
            let busy = self.work(&mut state);
            let wait = if busy {
                Some(Duration::ZERO)
            } else {
                next_deadline(&state)
            };
            state.sleeping = !busy;
            self.list_descriptors(&state);
            drop(state);
            self.wait(wait);
            context.state.lock().sleeping = false;
            self.take_signals();
            self.take_packets();
        }
    }

    /// One round of everything that needs no waiting; true if there may be more.
    fn work(&mut self, state: &mut MutexGuard<'_, State>) -> bool {
        let now = Instant::now();
        let mut busy = take_network(state, now);
        busy |= state.take_loopback(now);
        state.acknowledge_all();
        place_due(state, now);
        state.release_completions(now);
        look_after_queue_pairs(state, now);
        busy |= state.send_responses(now);
        if !state.dead {
            busy |= state.send_requests(PACKETS_AT_ONCE, now) > 0;
        }
        busy |= state.take_loopback(now);
        busy
    }

    fn list_descriptors(&mut self, state: &State) {
        let entry = |fd: RawFd, events: i16| libc::pollfd { fd, events, revents: 0 };
        self.polled.clear();
        self.polled.push(entry(self.doorbell.fd(), libc::POLLIN));
        self.polled.push(entry(self.changes.fd(), libc::POLLIN));
        self.polled.push(entry(self.listener.fd.as_raw_fd(), libc::POLLIN));
        self.polled
            .extend(self.peers.iter().map(|peer| entry(peer.as_raw_fd(), libc::POLLIN)));
        self.polled.extend(
            state
                .links
                .values()
                .filter_map(|link| link.waiting())
                .map(|fd| entry(fd, libc::POLLOUT)),
        );
    }

    fn wait(&mut self, limit: Option<Duration>) {
        let limit = match (limit, self.changes.limit()) {
            (Some(limit), Some(other)) => Some(limit.min(other)),
            (limit, other) => limit.or(other),
        };
        let limit = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: limit.subsec_nanos() as _,
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the list is writable for its length; the time is null or lives until the call returns.
        let ready = unsafe {
            libc::ppoll(
                self.polled.as_mut_ptr(),
                self.polled.len() as libc::nfds_t,
                limit,
                std::ptr::null(),
            )
        };
        add(&self.context.device.counters.wakeups, 1);
        if ready < 0 {
            // Interrupted: what the list says is not to be believed.
            self.polled.iter_mut().for_each(|entry| entry.revents = 0);
        }
    }

    fn take_signals(&mut self) {
        if self.polled[0].revents != 0 {
            // It can only be empty, which is as good.
            let _ = self.doorbell.take();
        }
        if self.changes.changed(self.polled[1].revents != 0) {
            self.context.device.refresh();
        }
        let mut state = self.context.state.lock();
        for entry in self
            .polled
            .iter()
            .skip(3 + self.peers.len())
            .filter(|entry| entry.revents != 0)
        {
            if let Some(link) = state.links.values_mut().find(|link| link.waiting() == Some(entry.fd)) {
                link.full = false;
            }
        }
    }

    /// Takes what peers have sent, and new peers.
    fn take_packets(&mut self) {
        let ready: Vec<usize> = (0..self.peers.len())
            .filter(|index| self.polled[3 + index].revents != 0)
            .rev()
            .collect();
        for index in ready {
            for _ in 0..PACKETS_AT_ONCE {
                match receive(self.peers[index].as_raw_fd(), &mut self.buffer) {
                    (Moved::Bytes(bytes), header) => self.take_packet(&header, bytes),
                    (Moved::WouldBlock, _) => break,
                    _ => {
                        self.peers.swap_remove(index);
                        break;
                    }
                }
            }
        }
        if self.polled[2].revents != 0 {
            while let Some(peer) = self.listener.accept() {
                self.peers.push(peer);
            }
        }
    }

    fn take_packet(&mut self, header: &Header, bytes: usize) {
        let mut state = self.context.state.lock();
        let percent = u64::from(state.settings.drop_percent);
        if percent > 0 && state.random(100) < percent {
            add(&state.device.counters.packets_lost, 1);
            return;
        }
        if !state.port_is_up() {
            add(&state.device.counters.packets_dropped, 1);
            return;
        }
        add(&state.device.counters.packets_received, 1);
        let payload = &self.buffer[..bytes];
        let now = Instant::now();
        if state.settings.hold || !state.settings.latency.is_zero() || !state.network.is_empty() {
            let due = now + state.settings.latency;
            state.network.push_back((due, (*header, payload.to_vec())));
        } else {
            state.take_packet(header, payload, now);
        }
    }
}

/// Takes packets that have been in the network for long enough.
fn take_network(state: &mut State, now: Instant) -> bool {
    let mut any = false;
    for _ in 0..PACKETS_AT_ONCE {
        if state.settings.hold || state.network.front().is_none_or(|(due, _)| *due > now) {
            break;
        }
        if let Some((_, (header, payload))) = state.network.pop_front() {
            state.take_packet(&header, &payload, now);
            any = true;
        }
    }
    any
}

fn place_due(state: &mut State, now: Instant) {
    if state.late.iter().any(|late| late.due <= now) {
        state.force_late(|late, _| late.due <= now);
    }
}

/// Flushes what is in ERR and looks for peers that are silent.
fn look_after_queue_pairs(state: &mut State, now: Instant) {
    for place in 0..state.live.len() {
        let local = state.live[place];
        let Some(qp) = state.queue_pairs[local as usize].as_deref() else {
            continue;
        };
        let idle = !qp.flush_due && (qp.state != sys::IBV_QPS_RTS || qp.sends.is_empty());
        if idle {
            continue;
        }
        if let Some(mut qp) = state.take(local) {
            if qp.flush_due {
                state.flush(&mut qp);
            } else {
                state.check_timer(&mut qp, now);
                if qp.flush_due {
                    state.flush(&mut qp);
                }
            }
            state.put(qp);
        }
    }
}

/// How long the thread may sleep if nobody wakes it; none: for ever.
fn next_deadline(state: &State) -> Option<Duration> {
    let now = Instant::now();
    let mut next: Option<Instant> = None;
    let mut consider = |time: Instant| next = Some(next.map_or(time, |next| next.min(time)));
    if let (Some((due, _)), false) = (state.network.front(), state.settings.hold) {
        consider(*due);
    }
    state.late.iter().for_each(|late| consider(late.due));
    state.release_at.iter().for_each(|due| consider(*due));
    let mut sending = false;
    for qp in state
        .live
        .iter()
        .filter_map(|local| state.queue_pairs[*local as usize].as_deref())
    {
        if qp.flush_due {
            consider(now);
        }
        if qp.state == sys::IBV_QPS_RTS && !qp.sends.is_empty() {
            sending = true;
            qp.timer.iter().for_each(|timer| consider(*timer));
            qp.paused_until
                .filter(|until| *until > now)
                .iter()
                .for_each(|until| consider(*until));
            if qp.timer.is_none() && state.links.get(&qp.route.context).is_some_and(|link| link.full) {
                consider(now + Duration::from_millis(10));
            }
        }
    }
    let answering = state.links.values().any(|link| !link.responses.is_empty());
    if (sending || answering) && state.settings.bandwidth > 0 && state.port_free > now + BURST {
        consider(state.port_free - BURST);
    }
    next.map(|next| next.saturating_duration_since(now))
}
