//! The transport against plain sockets: the same blocks moved by two blocking streams with vectored calls and one
//! thread each, and by a link; in one run, in turns, medians. Both ends are in this process.
//!
//! `cargo run --release -p kvxfer-tcp --example raw -- [--reps N] [--pool-mib N] [--only NAME] [setting=value ...]`
//!
//! Settings: `threads`, `lanes`, `buffer` (both socket buffers, bytes), `call` (bytes per call), `window` (bytes, least),
//! `window-max`, `spin` (µs), `inline` (bytes), `raw-buffer`.
#![allow(clippy::print_stdout, unsafe_code)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::memory::Region;
use kvxfer_tcp::TcpConfig;
use support::*;

struct Settings {
    repetitions: usize,
    pool: u64,
    only: Option<String>,
    raw_buffer: usize,
    config: TcpConfig,
}

fn settings() -> Settings {
    let mut settings = Settings {
        repetitions: 7,
        pool: 1 << 30,
        only: None,
        raw_buffer: 4 << 20,
        config: TcpConfig::default(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect("a value");
        match argument.as_str() {
            "--reps" => settings.repetitions = value().parse().expect("a number"),
            "--pool-mib" => settings.pool = value().parse::<u64>().expect("a number") << 20,
            "--only" => settings.only = Some(value()),
            other => {
                let (name, value) = other.split_once('=').expect("setting=value");
                let value: u64 = value.parse().expect("a number");
                let config = &mut settings.config;
                match name {
                    "threads" => config.data_threads = value as usize,
                    "lanes" => config.lanes = value as u16,
                    "buffer" => {
                        config.send_buffer_bytes = value as usize;
                        config.receive_buffer_bytes = value as usize;
                    }
                    "send-buffer" => config.send_buffer_bytes = value as usize,
                    "receive-buffer" => config.receive_buffer_bytes = value as usize,
                    "call" => config.call_bytes_max = value as u32,
                    "window" => config.window_bytes_min = value,
                    "window-max" => config.window_bytes_max = value,
                    "spin" => config.spin = Duration::from_micros(value),
                    "inline" => config.inline_bytes_max = value,
                    "raw-buffer" => settings.raw_buffer = value as usize,
                    _ => panic!("no setting {name}"),
                }
            }
        }
    }
    settings
}

/// CPU seconds of this process.
fn cpu() -> f64 {
    // SAFETY: all-zero is a valid `rusage`, and the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

struct Sample {
    seconds: f64,
    cpu: f64,
}

fn timed(act: impl FnOnce()) -> Sample {
    let (start, before) = (Instant::now(), cpu());
    act();
    Sample {
        seconds: start.elapsed().as_secs_f64(),
        cpu: cpu() - before,
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let settings = settings();
    let pool = settings.pool;
    let scaled = |count: u64| ((count * pool) >> 30) as usize;
    let workloads = [
        ("W2 64 KiB", 64 << 10, scaled(4096)),
        ("W3 4 KiB", 4 << 10, scaled(16_384)),
        ("W5 8 KiB", 8 << 10, scaled(20_480)),
        ("W1 one piece", pool, 1),
    ];
    let (source, destination) = (touched(pool, 1), touched(pool, 2));
    let pair = Pair::new(settings.config.clone()).up();
    let raw = RawStreams::new(settings.raw_buffer);
    println!(
        "{:<14} {:>9} {:>9} {:>6} {:>12} {:>12} {:>6}",
        "", "raw GB/s", "link GB/s", "ratio", "raw cpu/GB", "link cpu/GB", "ratio"
    );
    let mut id = 0;
    for (name, block, blocks) in workloads {
        if settings.only.as_ref().is_some_and(|only| !name.starts_with(only)) {
            continue;
        }
        let (mut of_raw, mut of_link) = (Vec::new(), Vec::new());
        for repetition in 0..settings.repetitions + 1 {
            let pieces = |seed| {
                if blocks == 1 {
                    Arc::new(Pieces {
                        region: 0,
                        offsets: vec![0],
                        length: block,
                    })
                } else {
                    Arc::new(random_pieces(seed, pool, blocks, block))
                }
            };
            let (from, to) = (pieces(2 * repetition as u64 + 1), pieces(2 * repetition as u64 + 2));
            let sample = timed(|| raw.put(&source[0], &from, &destination[0], &to));
            of_raw.push(sample);
            id += 1;
            let sample = timed(|| {
                let arrival = Arc::new(Arrival::default());
                let slot = pair.right.grant(to.clone(), &destination, Some(arrival.clone()));
                let Sent { id, .. } = Push::new(id, slot, &source, from.clone()).submit(&pair.left_link);
                arrival.wait(PATIENCE).expect("the arrival");
                pair.left_log.arrived(id);
                pair.left_link.forget(id);
                pair.right.slots.close(slot.0, slot.1);
                pair.right.slots.release(slot.0, slot.1);
            });
            of_link.push(sample);
        }
        let gigabytes = (block * blocks as u64) as f64 / 1e9;
        // The first of each warms up.
        let speed = |samples: &[Sample]| gigabytes / median(samples[1..].iter().map(|sample| sample.seconds));
        let cost = |samples: &[Sample]| median(samples[1..].iter().map(|sample| sample.cpu)) / gigabytes;
        println!(
            "{name:<14} {:>9.2} {:>9.2} {:>6.2} {:>12.3} {:>12.3} {:>6.2}",
            speed(&of_raw),
            speed(&of_link),
            speed(&of_link) / speed(&of_raw),
            cost(&of_raw),
            cost(&of_link),
            cost(&of_link) / cost(&of_raw),
        );
    }
    if settings.only.as_deref().is_none_or(|only| "W4".starts_with(only)) {
        ping_pong(&pair, settings.raw_buffer);
    }
}

fn touched(bytes: u64, seed: u64) -> Arc<[Arc<Region>]> {
    let regions = host(bytes);
    let chunk = support::pattern(seed, 1 << 20);
    for at in (0..bytes).step_by(1 << 20) {
        regions[0].copy_in(at, &chunk).expect("inside the pool");
    }
    regions
}

/// 4 KiB there and back, blocking sockets against the link (arrival wakes a waiting thread, which pushes back).
fn ping_pong(pair: &Pair, buffer: usize) {
    let rounds = 3000;
    let (near, far) = connected(buffer);
    let echo = std::thread::spawn(move || {
        let mut far = far;
        let mut bytes = [0; 4128];
        for _ in 0..rounds {
            far.read_exact(&mut bytes).expect("the ping");
            far.write_all(&bytes).expect("the pong");
        }
    });
    let mut near = near;
    let mut bytes = [7; 4128];
    let mut of_raw = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        near.write_all(&bytes).expect("the ping");
        near.read_exact(&mut bytes).expect("the pong");
        of_raw.push(start.elapsed().as_secs_f64());
    }
    echo.join().expect("the echo");

    let regions = [host(1 << 20), host(1 << 20)];
    let piece = || Arc::new(random_pieces(1, 1 << 20, 1, 4096));
    let arrivals: Vec<_> = (0..2 * rounds).map(|_| Arc::new(Arrival::default())).collect();
    // Grants are made ahead, as an engine would.
    let slots: Vec<_> = (0..2 * rounds)
        .map(|index| {
            let node = if index % 2 == 0 { &pair.right } else { &pair.left };
            node.grant(piece(), &regions[index % 2], Some(arrivals[index].clone()))
        })
        .collect();
    let pushes = |base: u64, odd: usize| -> Vec<Push> {
        (0..rounds)
            .map(|index| {
                Push::new(base + index as u64, slots[2 * index + odd], &regions[odd], piece()).message(b"ball")
            })
            .collect()
    };
    let (pings, pongs) = (pushes(1_000_000, 0), pushes(2_000_000, 1));
    let mut of_link = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (index, pong) in pongs.into_iter().enumerate() {
                arrivals[2 * index].wait(PATIENCE).expect("the ping");
                let Sent { id, .. } = pong.submit(&pair.right_link);
                if id.0 % 64 == 0 {
                    (id.0 - 64..id.0).for_each(|id| pair.right_link.forget(kvxfer_core::flow::TransferId(id)));
                }
            }
        });
        for (index, ping) in pings.into_iter().enumerate() {
            let start = Instant::now();
            ping.submit(&pair.left_link);
            arrivals[2 * index + 1].wait(PATIENCE).expect("the pong");
            of_link.push(start.elapsed().as_secs_f64());
        }
    });
    let (raw, link) = (median(of_raw.into_iter()) * 1e6, median(of_link.into_iter()) * 1e6);
    println!(
        "W4 4 KiB there and back: raw {raw:.1} µs, link {link:.1} µs, ratio {:.2}",
        link / raw
    );
}

/// Two blocking connections, each with a sending and a receiving thread per transfer.
struct RawStreams {
    streams: Vec<(TcpStream, TcpStream)>,
}

fn connected(buffer: usize) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
    let far = listener.accept().expect("its other end").0;
    for stream in [&near, &far] {
        stream.set_nodelay(true).expect("an option");
        if buffer > 0 {
            rustix::net::sockopt::set_socket_send_buffer_size(stream, buffer).expect("an option");
            rustix::net::sockopt::set_socket_recv_buffer_size(stream, buffer).expect("an option");
        }
    }
    (near, far)
}

impl RawStreams {
    fn new(buffer: usize) -> RawStreams {
        RawStreams {
            streams: (0..2).map(|_| connected(buffer)).collect(),
        }
    }

    fn put(&self, source: &Region, from: &Pieces, destination: &Region, to: &Pieces) {
        std::thread::scope(|scope| {
            for (index, (near, far)) in self.streams.iter().enumerate() {
                let (from, to) = (share(from, index as u64), share(to, index as u64));
                let (source, destination) = (source.address(), destination.address());
                scope.spawn(move || {
                    move_all(&from, source, |pieces| {
                        let mut message = header(pieces);
                        // SAFETY: the pieces lie in a live region.
                        unsafe { libc::sendmsg(near.as_raw_fd(), &raw mut message, libc::MSG_NOSIGNAL) }
                    });
                    let mut done = [0];
                    let mut near = near;
                    near.read_exact(&mut done).expect("the answer");
                });
                scope.spawn(move || {
                    move_all(&to, destination, |pieces| {
                        let mut message = header(pieces);
                        // SAFETY: the pieces lie in a live region nobody has references into.
                        unsafe { libc::recvmsg(far.as_raw_fd(), &raw mut message, 0) }
                    });
                    let mut far = far;
                    far.write_all(&[1]).expect("the answer");
                });
            }
        });
    }
}

/// Half of the blocks, or half of the only one.
fn share(pieces: &Pieces, index: u64) -> Pieces {
    if pieces.offsets.len() == 1 {
        let half = pieces.length / 2;
        return Pieces {
            region: 0,
            offsets: vec![pieces.offsets[0] + index * half],
            length: half,
        };
    }
    let half = pieces.offsets.len() / 2;
    let range = if index == 0 {
        0..half
    } else {
        half..pieces.offsets.len()
    };
    Pieces {
        region: 0,
        offsets: pieces.offsets[range].to_vec(),
        length: pieces.length,
    }
}

fn header(pieces: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len();
    message
}

/// Calls until all bytes are moved, with at most 1 MiB and 1,024 pieces a call.
fn move_all(pieces: &Pieces, base: u64, mut call: impl FnMut(&[libc::iovec]) -> isize) {
    let (mut index, mut inside) = (0, 0);
    let mut vector = Vec::with_capacity(1024);
    while index < pieces.offsets.len() {
        vector.clear();
        let (mut at, mut skip, mut bytes) = (index, inside, 0);
        while at < pieces.offsets.len() && vector.len() < 1024 && bytes < 1 << 20 {
            let length = (pieces.length - skip).min(1 << 20);
            vector.push(libc::iovec {
                iov_base: (base + pieces.offsets[at] + skip) as *mut libc::c_void,
                iov_len: length as usize,
            });
            bytes += length;
            skip += length;
            if skip < pieces.length {
                break;
            }
            (at, skip) = (at + 1, 0);
        }
        let moved = call(&vector);
        assert!(moved > 0, "a raw call failed: {}", std::io::Error::last_os_error());
        let mut moved = moved as u64;
        while moved > 0 {
            let step = moved.min(pieces.length - inside);
            inside += step;
            moved -= step;
            if inside == pieces.length {
                (index, inside) = (index + 1, 0);
            }
        }
    }
}
