//! Events: captured as they are, watched without waiting; and streams that are held.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{self, Bench, config, until};
use crossbeam::channel::{Receiver, unbounded};
use kvxfer_core::{ErrorKind, Result};
use kvxfer_cuda::{CapturedEvent, Cuda, Gather};
use kvxfer_fake_cuda::FakeCuda;

const MOMENT: Duration = Duration::from_millis(30);

fn capture(cuda: &Cuda, event: usize) -> Result<CapturedEvent> {
    // SAFETY: the tests pass live events (or what stands for one that is none, which the fake driver refuses).
    unsafe { cuda.capture(event as *mut c_void) }
}

fn watch(cuda: &Cuda, event: CapturedEvent) -> Receiver<Result<()>> {
    let (sender, receiver) = unbounded();
    let then = move |result| sender.send(result).unwrap();
    cuda.watch(event, Box::new(then));
    receiver
}

#[test]
fn an_event_that_has_not_happened_is_waited_for_and_one_that_has_is_not() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let (stream, event) = (bench.engine.stream().unwrap(), bench.engine.event().unwrap());
    // Never recorded.
    assert!(capture(&bench.cuda, event).unwrap().happened().unwrap());
    bench.fake.set_now("*", "stall", "engine").unwrap();
    bench.engine.fill(stream, made.address(), 7, 4096).unwrap();
    bench.engine.record(event, stream).unwrap();
    let captured = capture(&bench.cuda, event).unwrap();
    assert!(!captured.happened().unwrap());
    let told = watch(&bench.cuda, capture(&bench.cuda, event).unwrap());
    assert!(told.recv_timeout(MOMENT).is_err());
    bench.fake.set_now("*", "stall", "off").unwrap();
    told.recv_timeout(common::PATIENCE).unwrap().unwrap();
    // It waits in a stream of its own, which may be a little behind the other's.
    common::until("the first has happened too", || captured.happened().unwrap());
    assert_eq!(bench.fake.read(made.address(), 1).unwrap(), [7]);
    let told = watch(&bench.cuda, capture(&bench.cuda, event).unwrap());
    told.recv_timeout(common::PATIENCE).unwrap().unwrap();
    drop((captured, made));
    bench.end();
}

#[test]
fn what_the_caller_does_with_his_event_afterwards_does_not_matter() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let (first, second) = (bench.engine.stream().unwrap(), bench.engine.stream().unwrap());
    let event = bench.engine.event().unwrap();
    bench.fake.set_now("*", "stall", "engine").unwrap();
    bench.engine.fill(first, made.address(), 1, 4096).unwrap();
    bench.engine.record(event, first).unwrap();
    let told = watch(&bench.cuda, capture(&bench.cuda, event).unwrap());
    // Recorded anew, behind what is held for ever, and destroyed.
    // SAFETY: a live stream.
    let hold = unsafe { bench.cuda.hold_stream(second as *mut c_void) }.unwrap();
    bench.engine.record(event, second).unwrap();
    bench.engine.destroy_event(event).unwrap();
    assert!(told.recv_timeout(MOMENT).is_err());
    bench.fake.set_now("*", "stall", "off").unwrap();
    told.recv_timeout(common::PATIENCE).unwrap().unwrap();
    hold.release();
    bench.engine.finish(second).unwrap();
    drop(made);
    bench.end();
}

#[test]
fn events_of_one_stream_do_not_wait_for_those_of_another() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let engine = &bench.engine;
    let (slow, fast) = (engine.stream().unwrap(), engine.stream().unwrap());
    let (late, early) = (engine.event().unwrap(), engine.event().unwrap());
    // SAFETY: a live stream.
    let hold = unsafe { bench.cuda.hold_stream(slow as *mut c_void) }.unwrap();
    engine.record(late, slow).unwrap();
    let waits = watch(&bench.cuda, capture(&bench.cuda, late).unwrap());
    bench.fake.set_now("*", "engine_delay_us", "5000").unwrap();
    engine.fill(fast, made.address(), 1, 4096).unwrap();
    engine.record(early, fast).unwrap();
    let goes = watch(&bench.cuda, capture(&bench.cuda, early).unwrap());
    goes.recv_timeout(common::PATIENCE).unwrap().unwrap();
    assert!(waits.try_recv().is_err());
    hold.release();
    waits.recv_timeout(common::PATIENCE).unwrap().unwrap();
    drop(made);
    bench.end();
}

#[test]
fn many_events_are_told_in_order_and_each_once() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let stream = bench.engine.stream().unwrap();
    let (sender, told) = unbounded();
    bench.fake.set_now("*", "stall", "engine").unwrap();
    for number in 0..200 {
        let event = bench.engine.event().unwrap();
        bench.engine.fill(stream, made.address(), number as u8, 4096).unwrap();
        bench.engine.record(event, stream).unwrap();
        let sender = sender.clone();
        let captured = capture(&bench.cuda, event).unwrap();
        bench.cuda.watch(
            captured,
            Box::new(move |result| sender.send((number, result.is_ok())).unwrap()),
        );
        bench.engine.destroy_event(event).unwrap();
    }
    drop(sender);
    bench.fake.set_now("*", "stall", "off").unwrap();
    let mut seen: Vec<(i32, bool)> = told.iter().collect();
    assert!(seen.iter().all(|(_, good)| *good));
    seen.sort_unstable();
    assert_eq!(seen.len(), 200);
    assert_eq!(seen.last(), Some(&(199, true)));
    let waiting = bench
        .cuda
        .counters()
        .into_iter()
        .find(|counter| counter.name == "cuda_events_waiting");
    assert_eq!(waiting.unwrap().value, 0.0);
    drop(made);
    bench.end();
}

#[test]
fn inside_a_stream_capture_an_event_is_refused() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let (stream, event) = (bench.engine.stream().unwrap(), bench.engine.event().unwrap());
    bench.engine.begin_capture(stream).unwrap();
    bench.engine.record(event, stream).unwrap();
    let error = capture(&bench.cuda, event).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains("capture"), "{error}");
    // SAFETY: a live stream.
    let error = unsafe { bench.cuda.hold_stream(stream as *mut c_void) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    bench.engine.end_capture(stream).unwrap();
    drop(made);
    bench.end();
}

/// An engine that captures a graph on its thread must not find it broken by what we do on ours, or on its.
#[test]
fn what_goes_on_meanwhile_does_not_break_an_engines_capture() {
    let bench = Bench::new();
    let made = bench.region(1 << 20);
    let (stream, other, event) = (
        bench.engine.stream().unwrap(),
        bench.engine.stream().unwrap(),
        bench.engine.event().unwrap(),
    );
    bench.fake.set_now("*", "engine_delay_us", "2000").unwrap();
    bench.engine.fill(other, made.address(), 3, 4096).unwrap();
    bench.engine.record(event, other).unwrap();
    bench.engine.begin_capture(stream).unwrap();
    let told = watch(&bench.cuda, capture(&bench.cuda, event).unwrap());
    told.recv_timeout(common::PATIENCE).unwrap().unwrap();
    made.copy_in(0, &[1; 100_000]).unwrap();
    let staging = common::Staging::pinned(made.domain(), 1 << 20).unwrap();
    made.domain().verify(&made).unwrap();
    assert_eq!(made.domain().dmabufs(&made).unwrap().unwrap().len(), 1);
    let again = common::region(&bench.cuda, made.address(), 4096).unwrap();
    drop((staging, again));
    bench.engine.end_capture(stream).unwrap();
    drop(made);
    bench.end();
}

#[test]
fn events_of_other_devices_and_threads_without_a_context_are_handled() {
    let bench = Bench::new();
    let other = bench.fake.engine(1).unwrap();
    let (stream, event) = (other.stream().unwrap(), other.event().unwrap());
    let memory = other.allocate(4096).unwrap();
    bench.fake.set_now("*", "engine_delay_us", "2000").unwrap();
    other.fill(stream, memory, 3, 4096).unwrap();
    other.record(event, stream).unwrap();
    // Nothing is registered, and no context is current: there is no device to do it on.
    let error = capture(&bench.cuda, event).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    // With the engine's context current there is.
    other.fill(stream, memory, 4, 4096).unwrap();
    other.record(event, stream).unwrap();
    let captured = with_context(&bench.fake, other.context(), || capture(&bench.cuda, event)).unwrap();
    watch(&bench.cuda, captured)
        .recv_timeout(common::PATIENCE)
        .unwrap()
        .unwrap();
    assert_eq!(bench.fake.count("active_gpu0"), 1, "the other engine's");
    assert_eq!(bench.fake.count("contexts_created"), 2);
    // With memory on one device only, an event of another one is waited for there.
    let cuda = Cuda::load(&config(&bench.fake, Gather::Auto)).unwrap();
    let address = bench.engine.allocate(4096).unwrap();
    let made = common::region(&cuda, address, 4096).unwrap();
    other.fill(stream, memory, 5, 4096).unwrap();
    other.record(event, stream).unwrap();
    let told = watch(&cuda, capture(&cuda, event).unwrap());
    told.recv_timeout(common::PATIENCE).unwrap().unwrap();
    assert_eq!(bench.fake.read(memory, 1).unwrap(), [5]);
    assert_eq!(capture(&cuda, 0x1234).unwrap_err().kind(), ErrorKind::InvalidArgument);
    drop((made, cuda));
    bench.end();
}

/// Runs with a context current on this thread, as code of the application's that is no engine thread does.
fn with_context<T>(fake: &FakeCuda, context: usize, run: impl FnOnce() -> T) -> T {
    type Push = unsafe extern "C" fn(usize) -> u32;
    type Pop = unsafe extern "C" fn(*mut usize) -> u32;
    // SAFETY: the library is loaded already; the symbols have these types.
    let library = unsafe { libloading::Library::new(fake.library_path()) }.unwrap();
    // SAFETY: a live context.
    let pushed = unsafe { library.get::<Push>(b"cuCtxPushCurrent_v2").unwrap()(context) };
    assert_eq!(pushed, 0);
    let result = run();
    let mut popped = 0;
    // SAFETY: writes one handle.
    let left = unsafe { library.get::<Pop>(b"cuCtxPopCurrent_v2").unwrap()(&mut popped) };
    assert_eq!(left, 0);
    assert_eq!(popped, context, "our contexts are not left on the caller's thread");
    result
}

#[test]
fn an_event_behind_work_that_failed_fails() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let (stream, event) = (bench.engine.stream().unwrap(), bench.engine.event().unwrap());
    bench.fake.set_now("*", "stall", "engine").unwrap();
    bench.engine.fill(stream, made.address(), 3, 4096).unwrap();
    bench.engine.record(event, stream).unwrap();
    let told = watch(&bench.cuda, capture(&bench.cuda, event).unwrap());
    bench.fake.set_now("*", "vanish", "ILLEGAL_ADDRESS").unwrap();
    let error = told.recv_timeout(common::PATIENCE).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
}

#[test]
fn what_is_still_watched_at_the_end_is_told_so() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let (stream, event) = (bench.engine.stream().unwrap(), bench.engine.event().unwrap());
    // SAFETY: a live stream.
    let hold = unsafe { bench.cuda.hold_stream(stream as *mut c_void) }.unwrap();
    bench.engine.record(event, stream).unwrap();
    let told = watch(&bench.cuda, capture(&bench.cuda, event).unwrap());
    let panics = capture(&bench.cuda, event).unwrap();
    bench.cuda.watch(panics, Box::new(|_| panic!("the caller's own")));
    drop(bench.cuda);
    assert_eq!(told.recv().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    hold.release();
    bench.engine.finish(stream).unwrap();
    drop(made);
    until("all is given back", || bench.fake.leaks().is_empty());
    bench.fake.assert_clean();
}

#[test]
fn the_last_user_may_go_in_what_an_event_calls() {
    let bench = Bench::new();
    let event = bench.engine.event().unwrap();
    let made = bench.region(4096);
    let captured = capture(&bench.cuda, event).unwrap();
    drop(made);
    let Bench { cuda, fake, engine } = bench;
    let (sender, told) = unbounded();
    let own = cuda.clone();
    cuda.watch(
        captured,
        Box::new(move |result| {
            std::thread::sleep(MOMENT);
            drop(own);
            sender.send(result).unwrap();
        }),
    );
    drop(cuda);
    told.recv().unwrap().unwrap();
    until("all is given back", || fake.leaks().is_empty());
    drop(engine);
    fake.assert_clean();
}

#[test]
fn a_held_stream_waits_until_it_is_released_or_the_hold_is_dropped() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let stream = bench.engine.stream().unwrap();
    for round in 1..6 {
        // SAFETY: a live stream.
        let hold = unsafe { bench.cuda.hold_stream(stream as *mut c_void) }.unwrap();
        let ran = Arc::new(AtomicUsize::new(0));
        let mark = ran.clone();
        bench
            .engine
            .kernel(stream, move || mark.store(1, Ordering::SeqCst))
            .unwrap();
        std::thread::sleep(MOMENT);
        assert_eq!(ran.load(Ordering::SeqCst), 0, "round {round}");
        if round % 2 == 0 {
            hold.release()
        } else {
            drop(hold)
        }
        bench.engine.finish(stream).unwrap();
        assert_eq!(ran.load(Ordering::SeqCst), 1, "round {round}");
    }
    drop(made);
    bench.end();
}

#[test]
fn holds_are_bounded_and_their_words_are_used_again() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let streams: Vec<usize> = (0..4).map(|_| bench.engine.stream().unwrap()).collect();
    // SAFETY: a live stream.
    let hold = |which: usize| unsafe { bench.cuda.hold_stream(streams[which % 4] as *mut c_void) };
    // Released before the streams come to their waits: the words are not used again before that.
    bench.fake.set_now("*", "stall", "engine").unwrap();
    let mut held = Vec::new();
    let mut released = 0;
    let error = loop {
        match hold(released + held.len()) {
            Ok(hold) if released < 1000 => {
                released += 1;
                hold.release();
            }
            Ok(hold) if released + held.len() < 5000 => held.push(hold),
            Ok(_) => panic!("words are used again while streams have not come to them"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(released + held.len(), 2048);
    drop(held);
    bench.fake.set_now("*", "stall", "off").unwrap();
    streams.iter().for_each(|stream| bench.engine.finish(*stream).unwrap());
    for round in 0..5000 {
        hold(round).unwrap().release();
        if round % 1000 == 0 {
            streams.iter().for_each(|stream| bench.engine.finish(*stream).unwrap());
        }
    }
    streams.iter().for_each(|stream| bench.engine.finish(*stream).unwrap());
    drop(made);
    bench.end();
}

#[test]
fn a_hold_needs_no_memory_of_ours_and_no_context_of_the_callers() {
    let bench = Bench::new();
    let stream = bench.engine.stream().unwrap();
    let other = std::thread::scope(|scope| {
        let run = || {
            // SAFETY: a live stream.
            let hold = unsafe { bench.cuda.hold_stream(stream as *mut c_void) }.unwrap();
            hold.release();
        };
        scope.spawn(run).join()
    });
    other.unwrap();
    bench.engine.finish(stream).unwrap();
    // SAFETY: the fake driver refuses what is no stream.
    let error = unsafe { bench.cuda.hold_stream(0x1234 as *mut c_void) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    bench.end();
}

#[test]
fn a_driver_without_waits_says_so() {
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let mut lacking = config(&fake, Gather::Auto);
    lacking.library = fake
        .library_without(&["cuStreamWaitValue32_v2"])
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    // A library of its own, with a driver of its own: its streams are not the engine's.
    let cuda = Cuda::load(&lacking).unwrap();
    drop((cuda, engine));
    let bench = Bench::with(&[("*", "fail", "cuStreamWaitValue32_v2:NOT_SUPPORTED")], Gather::Auto);
    let stream = bench.engine.stream().unwrap();
    // SAFETY: a live stream.
    let error = unsafe { bench.cuda.hold_stream(stream as *mut c_void) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    bench.end();
}
