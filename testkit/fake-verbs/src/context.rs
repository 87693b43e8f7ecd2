//! Contexts: an opened device with its lock, its events and its thread.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use kvxfer_rdma::sys;
use parking_lot::{Mutex, MutexGuard};

use crate::config::{self, Settings};
use crate::device::Device;
use crate::event::{EventQueue, Signal};
use crate::memory::Regions;
use crate::network::{Directory, LOCAL_BITS};
use crate::objects::FakeDevice;
use crate::seen::Seen;
use crate::state::State;
use crate::thread;

/// An opened device.
pub(crate) struct Context {
    pub(crate) device: &'static Device,
    pub(crate) state: Mutex<State>,
    pub(crate) events: Arc<EventQueue>,
    doorbell: Arc<Signal>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

static CONTEXTS: Mutex<Option<HashMap<u32, Weak<Context>>>> = Mutex::new(None);

/// The context of this process that a queue pair number belongs to.
pub(crate) fn numbered(queue_pair: u32) -> Option<Arc<Context>> {
    CONTEXTS.lock().as_ref()?.get(&(queue_pair >> LOCAL_BITS))?.upgrade()
}

/// Acknowledges an asynchronous event about the object at that address, in the context that has one open.
pub(crate) fn acknowledge_event(object: usize) {
    let contexts: Vec<_> = CONTEXTS
        .lock()
        .iter()
        .flatten()
        .filter_map(|(_, context)| context.upgrade())
        .collect();
    let taken = contexts.iter().any(|context| context.events.acknowledge(object));
    if !taken && let Some(context) = contexts.first() {
        context.misuse("an asynchronous event acknowledged that was not handed out");
    }
}

/// Opens a device: takes a number in the fabric and starts its thread.
pub(crate) fn open(device: &'static FakeDevice) -> io::Result<Arc<Context>> {
    let device = &device.device;
    device.refresh();
    let context = device.add_context(|settings, generation| {
        let directory = Directory::open(&device.fabric)?;
        let listener = directory.listen(&device.fabric)?;
        let number = listener.number;
        let seen = Seen::new(&device.fabric, number)?;
        seen.record(generation);
        let events = Arc::new(EventQueue::new()?);
        let doorbell = Arc::new(Signal::doorbell()?);
        let wrong = wrong_completion(&settings);
        let state = State {
            device,
            settings,
            events: events.clone(),
            number,
            directory,
            regions: Regions::default(),
            queue_pairs: std::iter::repeat_with(|| None).take(1 << LOCAL_BITS).collect(),
            live: Vec::new(),
            last_local: 0,
            completion_queues: Vec::new(),
            links: HashMap::new(),
            loopback: Default::default(),
            own_responses: Default::default(),
            network: Default::default(),
            late: Default::default(),
            release_at: None,
            owing: Vec::new(),
            port_free: Instant::now(),
            random: 0x9e37_79b9_7f4a_7c15 ^ u64::from(number) << 32 ^ u64::from(std::process::id()),
            sequence: 0,
            wrong,
            dead: false,
            seen,
            sleeping: false,
            stop: false,
        };
        let context = Arc::new(Context {
            device,
            state: Mutex::new(state),
            events,
            doorbell: doorbell.clone(),
            thread: Mutex::new(None),
        });
        let thread = thread::start(context.clone(), listener, doorbell)?;
        *context.thread.lock() = Some(thread);
        CONTEXTS
            .lock()
            .get_or_insert_default()
            .insert(number, Arc::downgrade(&context));
        Ok((Arc::downgrade(&context), context))
    })?;
    // What was changed before the thread began to watch.
    device.refresh();
    Ok(context)
}

fn wrong_completion(settings: &Settings) -> Option<config::WrongCompletion> {
    let plain = settings.complete_with.split('#').next().unwrap_or_default().trim();
    config::parse_complete_with(plain).flatten()
}

impl Context {
    /// Wakes the device thread, if it sleeps. Called with the state's lock, so that no wake is lost.
    pub(crate) fn wake(&self, state: &mut MutexGuard<'_, State>) {
        if state.sleeping {
            state.sleeping = false;
            self.doorbell.raise();
        }
    }

    /// Ends the device thread.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.stop = true;
        if let Some(contexts) = CONTEXTS.lock().as_mut() {
            contexts.remove(&state.number);
        }
        self.wake(&mut state);
        drop(state);
        if let Some(thread) = self.thread.lock().take() {
            // It aborts the process rather than panic, so there is nothing to learn from the result.
            let _ = thread.join();
        }
        self.doorbell.close();
        self.events.close();
        self.state.lock().let_go();
    }

    /// Takes changed settings: what they say of the past (events, withheld completions) happens now.
    pub(crate) fn apply(&self, settings: Arc<Settings>, generation: u64) {
        let mut state = self.state.lock();
        let old = std::mem::replace(&mut state.settings, settings);
        let new = state.settings.clone();
        if old.port_state != new.port_state {
            let up = new.port_state == sys::IBV_PORT_ACTIVE;
            state.raise_port(
                if up {
                    sys::IBV_EVENT_PORT_ACTIVE
                } else {
                    sys::IBV_EVENT_PORT_ERR
                },
                1,
            );
        }
        if old.gids != new.gids {
            state.raise_port(sys::IBV_EVENT_GID_CHANGE, 1);
        }
        if old.lid != new.lid {
            state.raise_port(sys::IBV_EVENT_LID_CHANGE, 1);
        }
        if old.complete_with != new.complete_with {
            state.wrong = wrong_completion(&new);
        }
        if old.event != new.event {
            let plain = new.event.split('#').next().unwrap_or_default().trim();
            if let Some((kind, argument)) = config::parse_event(plain).flatten() {
                raise(&mut state, kind, argument);
            }
        }
        if old.withhold && !new.withhold {
            for queue in &state.completion_queues {
                queue.release();
            }
        }
        state.seen.record(generation);
        self.wake(&mut state);
    }
}

fn raise(state: &mut State, kind: u32, argument: u32) {
    match kind {
        sys::IBV_EVENT_QP_FATAL => {
            let Some(mut qp) = state.take(argument) else { return };
            if qp.number == argument {
                state.move_to_error(&mut qp);
                state.raise_queue_pair(kind, &qp);
            }
            state.put(qp);
        }
        sys::IBV_EVENT_DEVICE_FATAL => {
            state.dead = true;
            for local in state.live.clone() {
                if let Some(mut qp) = state.take(local) {
                    state.move_to_error(&mut qp);
                    state.put(qp);
                }
            }
            state.raise_port(kind, 0);
        }
        _ => state.raise_port(kind, argument as i32),
    }
}
