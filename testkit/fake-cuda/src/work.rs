//! Work of streams as it is done: copies, fills, words, kernels; and how it is asked for.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;

use crate::config::Stall;
use crate::driver::{Answer, Driver};
use crate::kernels::Machine;
use crate::memory::span::{Finder, Span, Who};
use crate::stream::{LOOK, Op, Piece, Stream};

/// How many pieces are looked up at a time.
const CHUNK: usize = 512;

/// One piece of work in so many waits at random.
const JITTERY: u64 = 8;

/// A number without rule.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Waits as the configuration says before work is done.
pub(crate) fn pace(driver: &Driver, stream: &Stream, op: &Op) {
    let device = stream.context.device;
    let Ok(settings) = driver.settings(device) else { return };
    let delay = if stream.engine {
        settings.engine_delay
    } else {
        settings.op_delay
    };
    let jitter = settings.op_jitter.as_micros() as u64;
    let dice = random();
    let jitter = if jitter == 0 || !dice.is_multiple_of(JITTERY) {
        Duration::ZERO
    } else {
        Duration::from_micros(dice / JITTERY % (jitter + 1))
    };
    let until = Instant::now() + delay + jitter;
    loop {
        let stalled = driver.settings(device).is_ok_and(|settings| match settings.stall {
            Stall::Off => false,
            Stall::All => true,
            Stall::Engine => stream.engine,
            Stall::Own => !stream.engine,
            Stall::Copies => matches!(op, Op::Copy { .. } | Op::Put { .. } | Op::Launch { .. }),
        });
        let now = Instant::now();
        if !stalled && now >= until && driver.vanished().is_none() {
            return;
        }
        let rest = until.saturating_duration_since(now);
        std::thread::sleep(if rest.is_zero() { LOOK } else { rest.min(LOOK) });
        driver.refresh();
    }
}

/// Does it.
pub(crate) fn perform(driver: &Driver, stream: &Stream, op: Op) -> Answer {
    let context = &stream.context;
    let machine = Machine {
        driver,
        context,
        engine: stream.engine,
    };
    let real_work = !matches!(op, Op::Free(_));
    if real_work
        && !stream.engine
        && let Some(code) = driver.op_error(context.device)
    {
        return Err(code);
    }
    match op {
        Op::Copy { pieces, batch } => copy(&machine, Who::Copy, &pieces, batch),
        Op::Put { bytes, to } => put(&machine, Who::Copy, to, &bytes),
        Op::Fill {
            to,
            length,
            value,
            width,
        } => fill(&machine, to, length, value, width),
        Op::WriteValue { to, value, width } => {
            let world = driver.world.lock();
            let span = Finder::new(driver, context, Who::Kernel).one(&world.map, to, width)?;
            drop(world);
            span.put_word(value);
            Ok(())
        }
        Op::Launch { function, arguments } => {
            if function.running.fetch_add(1, Ordering::AcqRel) > 0 {
                let what = format!("two launches of {} of one module run at once", function.kernel.name);
                driver.checker.violation(&what);
            }
            let answer = (function.kernel.run)(&arguments, &machine);
            function.running.fetch_sub(1, Ordering::AcqRel);
            answer
        }
        Op::Free(address) => driver.free_device(address),
        // Done by the stream itself.
        Op::Record(_) | Op::Wait(_) | Op::WaitFor(..) | Op::Host(_) | Op::WaitValue { .. } => Ok(()),
    }
}

/// Waits until a word compares as it should.
pub(crate) fn wait_value(driver: &Driver, stream: &Stream, op: &Op) -> Answer {
    const FLUSH: u32 = 1 << 30;
    let Op::WaitValue {
        from,
        value,
        width,
        flags,
    } = *op
    else {
        return Ok(());
    };
    let span = {
        let world = driver.world.lock();
        Finder::new(driver, &stream.context, Who::Kernel).one(&world.map, from, width)?
    };
    let bits = width * 8;
    let mask = if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
    loop {
        let word = span.word();
        let met = match flags & 3 {
            // As the driver has it: the difference, signed.
            0 => (word.wrapping_sub(value) & mask) >> (bits - 1) == 0,
            1 => word == value & mask,
            2 => word & value & mask != 0,
            _ => !(word | value) & mask != 0,
        };
        if met && driver.vanished().is_none() {
            if flags & FLUSH != 0 {
                driver.publish(stream.context.device);
            }
            return Ok(());
        }
        stream.context.sound()?;
        std::thread::sleep(Duration::from_micros(50));
        driver.refresh();
    }
}

fn put(machine: &Machine<'_>, who: Who, to: u64, bytes: &[u8]) -> Answer {
    let spans = {
        let world = machine.driver.world.lock();
        Finder::new(machine.driver, machine.context, who).spans(&world.map, to, bytes.len() as u64)?
    };
    let mut rest = bytes;
    for span in spans {
        let (first, others) = rest.split_at(span.length);
        span.put(first);
        rest = others;
    }
    Ok(())
}

fn fill(machine: &Machine<'_>, to: u64, length: u64, value: u32, width: u64) -> Answer {
    let word = value.to_le_bytes();
    let pattern: Vec<u8> = word[..width as usize].iter().copied().cycle().take(1 << 16).collect();
    let mut done = 0;
    while done < length {
        let now = (length - done).min(pattern.len() as u64);
        put(machine, Who::Kernel, to + done, &pattern[..now as usize])?;
        done += now;
    }
    Ok(())
}

/// Copies the pieces; in any order if the device may choose.
pub(crate) fn copy(machine: &Machine<'_>, who: Who, pieces: &[Piece], any_order: bool) -> Answer {
    let settings = machine.driver.settings(machine.context.device)?;
    let order = Order::new(pieces.len(), any_order && settings.shuffle);
    if settings.tear.is_zero() {
        copy_part(machine, who, pieces, &order, Part::Whole)?;
    } else {
        // Nobody says in which order the bytes of a copy are written.
        copy_part(machine, who, pieces, &order, Part::Second)?;
        std::thread::sleep(settings.tear);
        copy_part(machine, who, pieces, &order, Part::First)?;
    }
    if !machine.engine {
        let bytes = pieces.iter().map(|piece| piece.length).sum();
        machine
            .driver
            .checker
            .copies
            .fetch_add(pieces.len() as u64, Ordering::Relaxed);
        machine.driver.checker.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
    Ok(())
}

/// In which order pieces are done: as they come, or backwards from somewhere.
struct Order {
    count: usize,
    from: Option<usize>,
}

impl Order {
    fn new(count: usize, shuffled: bool) -> Order {
        Order {
            count,
            from: (shuffled && count > 1).then(|| (random() % count as u64) as usize),
        }
    }

    fn place(&self, number: usize) -> usize {
        self.from
            .map_or(number, |from| (from + self.count - number) % self.count)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Whole,
    First,
    Second,
}

fn copy_part(machine: &Machine<'_>, who: Who, pieces: &[Piece], order: &Order, part: Part) -> Answer {
    let mut next = 0;
    while next < pieces.len() {
        let end = (next + CHUNK).min(pieces.len());
        let mut pairs = Vec::with_capacity(CHUNK);
        {
            let world = machine.driver.world.lock();
            let mut to = Finder::new(machine.driver, machine.context, who);
            let mut from = Finder::new(machine.driver, machine.context, who);
            for number in next..end {
                let piece = half(pieces[order.place(number)], part);
                pairs.push((
                    to.spans(&world.map, piece.to, piece.length)?,
                    from.spans(&world.map, piece.from, piece.length)?,
                ));
            }
        }
        for (to, from) in pairs {
            move_bytes(to, from);
        }
        next = end;
    }
    Ok(())
}

fn half(piece: Piece, part: Part) -> Piece {
    let middle = piece.length / 2;
    match part {
        Part::Whole => piece,
        Part::First => Piece {
            length: middle,
            ..piece
        },
        Part::Second => Piece {
            to: piece.to + middle,
            from: piece.from + middle,
            length: piece.length - middle,
        },
    }
}

/// Both lists are as long, but may be cut at other places.
fn move_bytes(to: Vec<Span>, from: Vec<Span>) {
    let (mut to, mut from) = (to.into_iter(), from.into_iter());
    let (mut target, mut source) = (to.next(), from.next());
    while let (Some(here), Some(there)) = (&target, &source) {
        let length = here.length.min(there.length);
        let (here_now, here_rest) = here.split(length);
        let (there_now, there_rest) = there.split(length);
        here_now.copy_from(&there_now);
        target = if here_rest.length > 0 {
            Some(here_rest)
        } else {
            to.next()
        };
        source = if there_rest.length > 0 {
            Some(there_rest)
        } else {
            from.next()
        };
    }
}

/// A copy that is queued or runs.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) pieces: Arc<Vec<Piece>>,
    stream: usize,
    /// Page-locked host memory: first address, past the last, whether it is written.
    hosts: Vec<(u64, u64, bool)>,
}

impl Flight {
    /// Whether it touches any of these addresses.
    pub(crate) fn touches(&self, start: u64, end: u64) -> bool {
        let overlaps = |at: u64, length: u64| at < end && start < at + length;
        self.pieces
            .iter()
            .any(|piece| overlaps(piece.to, piece.length) || overlaps(piece.from, piece.length))
    }
}

/// What is known of a copy when it is asked for.
struct Survey {
    hosts: Vec<(u64, u64, bool)>,
    pageable_source: bool,
    pageable_target: bool,
}

impl Driver {
    /// Queues copies, which are done in any order if it is a batch.
    pub(crate) fn queue_copy(&self, stream: &Arc<Stream>, pieces: Vec<Piece>, batch: bool) -> Answer {
        let survey = self.survey(stream, &pieces)?;
        if survey.pageable_source || survey.pageable_target {
            if !stream.engine {
                self.checker
                    .unpinned_copies
                    .fetch_add(pieces.len() as u64, Ordering::Relaxed);
            }
            return self.queue_pageable(stream, &pieces, &survey);
        }
        if self.is_capturing(stream)? {
            return Ok(());
        }
        let pieces = Arc::new(pieces);
        self.note_flight(stream, &pieces, survey.hosts);
        self.submit(stream, Op::Copy { pieces, batch })
    }

    fn survey(&self, stream: &Stream, pieces: &[Piece]) -> Answer<Survey> {
        let world = self.world.lock();
        let mut survey = Survey {
            hosts: Vec::new(),
            pageable_source: false,
            pageable_target: false,
        };
        let mut to = Finder::new(self, &stream.context, Who::Copy);
        let mut from = Finder::new(self, &stream.context, Who::Copy);
        for piece in pieces {
            for (finder, address, written) in [(&mut to, piece.to, true), (&mut from, piece.from, false)] {
                let spans = finder.spans(&world.map, address, piece.length);
                let spans = spans.map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
                let pageable = spans.iter().any(Span::is_pageable);
                survey.pageable_target |= pageable && written;
                survey.pageable_source |= pageable && !written;
                if !pageable && spans.iter().all(Span::is_host) {
                    note_host(&mut survey.hosts, address, piece.length, written);
                }
            }
        }
        Ok(survey)
    }

    /// As the driver does: host memory that may move is read at once, and written before the call returns.
    fn queue_pageable(&self, stream: &Arc<Stream>, pieces: &[Piece], survey: &Survey) -> Answer {
        let mut queued = Vec::new();
        for piece in pieces {
            if survey.pageable_source {
                let mut bytes = vec![0; piece.length as usize];
                read_own(piece.from, &mut bytes)?;
                queued.push(Op::Put { bytes, to: piece.to });
            } else {
                queued.push(Op::Copy {
                    pieces: Arc::new(vec![*piece]),
                    batch: false,
                });
            }
        }
        for op in queued {
            self.submit(stream, op)?;
        }
        if survey.pageable_target {
            stream.finish();
        }
        Ok(())
    }

    fn note_flight(&self, stream: &Stream, pieces: &Arc<Vec<Piece>>, hosts: Vec<(u64, u64, bool)>) {
        let poison = self
            .settings(stream.context.device)
            .is_ok_and(|settings| settings.poison);
        let mut world = self.world.lock();
        let mut conflict = None;
        let mut busy = false;
        for flight in &world.in_flight {
            for (start, end, written) in &hosts {
                let hit = flight
                    .hosts
                    .iter()
                    .find(|(from, to, other)| from < end && start < to && (*written || *other));
                if hit.is_some() {
                    busy = true;
                    if flight.stream != stream.handle {
                        conflict = Some(*start);
                    }
                }
            }
        }
        if let Some(start) = conflict {
            let what = format!("host memory at {start:#x} is given to a copy while one on another stream uses it");
            self.checker.violation(&what);
        }
        if poison && !busy {
            poison_hosts(&world.map, &hosts);
        }
        world.in_flight.push(Flight {
            pieces: pieces.clone(),
            stream: stream.handle,
            hosts,
        });
    }
}

/// Until a copy is done, nobody knows what is in its destination: what was there before least of all.
fn poison_hosts(map: &crate::memory::map::Map, hosts: &[(u64, u64, bool)]) {
    const POISON: u8 = 0xd7;
    for (start, end, _) in hosts.iter().filter(|(_, _, written)| *written) {
        if map.holding(*start).is_some_and(|range| range.is_host()) {
            // SAFETY: page-locked memory of the process, given to the driver to be written.
            unsafe { std::ptr::write_bytes(*start as *mut u8, POISON, (end - start) as usize) };
        }
    }
}

/// Adds a run of host memory; runs that follow each other are one.
fn note_host(hosts: &mut Vec<(u64, u64, bool)>, start: u64, length: u64, written: bool) {
    match hosts
        .iter_mut()
        .rev()
        .take(2)
        .find(|(_, end, other)| *end == start && *other == written)
    {
        Some((_, end, _)) => *end += length,
        None => hosts.push((start, start + length, written)),
    }
}

/// Reads memory of this process that may not be there.
fn read_own(address: u64, bytes: &mut [u8]) -> Answer {
    let local = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: bytes.len(),
    };
    // SAFETY: the local memory is writable; the other is only tried.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    if usize::try_from(read) == Ok(bytes.len()) {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
