//! The baseline: a plain pair of blocking sockets moving the same pieces, one thread per stream on either side.
//!
//! Wire: operation, number of pieces, bytes per piece, the other side's offsets (as `u64`), then the payload in that
//! order; one byte back when the last is placed. Vectored calls of at most 1 MiB straight from and into the pools.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::{Error, ErrorKind, Result};
use rustix::net::sockopt;

use crate::memory::Memory;

/// Streams, as many as the library has lanes by default.
pub const STREAMS: usize = 2;
/// Bytes per system call, at most.
const CALL_BYTES_MAX: usize = 1 << 20;
/// Pieces per system call, at most (the kernel's limit).
const CALL_PIECES_MAX: usize = 1024;
/// `SO_SNDBUF` and `SO_RCVBUF`.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

const PUT: u64 = 0;
const STOP: u64 = 1;
const GET: u64 = 2;

/// The memory of one side: what puts read or write, and what gets do.
#[derive(Clone)]
pub struct Pools {
    /// For [`Streams::put`] and pings.
    pub put: Arc<Memory>,
    /// For [`Streams::get`].
    pub get: Arc<Memory>,
}

/// The target's listening socket.
pub struct Listener(TcpListener);

impl Listener {
    /// Listens on a free port of the address.
    ///
    /// # Errors
    /// `Transport` with the system's reason.
    pub fn bind(address: SocketAddr) -> Result<Listener> {
        let socket = tcp_socket(address)?;
        let fail = |what: &str, errno: rustix::io::Errno| failed(what, &std::io::Error::from(errno));
        rustix::net::bind(&socket, &address).map_err(|errno| fail("binding the baseline's listener", errno))?;
        rustix::net::listen(&socket, 8).map_err(|errno| fail("listening for the baseline", errno))?;
        Ok(Listener(TcpListener::from(socket)))
    }

    /// The real address.
    ///
    /// # Errors
    /// `Transport` with the system's reason.
    pub fn address(&self) -> Result<SocketAddr> {
        self.0
            .local_addr()
            .map_err(|error| failed("reading the baseline's address", &error))
    }

    /// Accepts all streams and serves them, one thread each, until told to stop or the other side goes away.
    ///
    /// # Errors
    /// `Transport` with the system's reason.
    pub fn serve(&self, pools: &Pools) -> Result<Server> {
        let mut threads = Vec::new();
        for _ in 0..STREAMS {
            let (stream, _) = self.0.accept().map_err(|error| failed("accepting a stream", &error))?;
            tune(&stream)?;
            let pools = pools.clone();
            let thread = std::thread::Builder::new()
                .name("raw-serve".into())
                .spawn(move || serve(&stream, &pools))
                .map_err(|error| failed("starting a thread", &error))?;
            threads.push(thread);
        }
        Ok(Server { threads })
    }
}

/// The target's serving threads.
pub struct Server {
    threads: Vec<std::thread::JoinHandle<Result<()>>>,
}

impl Server {
    /// Waits until all streams have stopped.
    ///
    /// # Errors
    /// The first stream's error.
    pub fn join(self) -> Result<()> {
        for thread in self.threads {
            thread
                .join()
                .map_err(|_| Error::new(ErrorKind::Internal, "a thread of the baseline panicked"))??;
        }
        Ok(())
    }
}

/// The initiator's streams.
pub struct Streams {
    streams: Vec<TcpStream>,
    pools: Pools,
}

impl Streams {
    /// Connects all streams.
    ///
    /// # Errors
    /// `Unreachable` with the address and reason.
    pub fn connect(address: SocketAddr, pools: &Pools) -> Result<Streams> {
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            let socket = tcp_socket(address)?;
            rustix::net::connect(&socket, &address).map_err(|errno| {
                Error::new(ErrorKind::Unreachable, "the baseline's listener")
                    .at(address.to_string())
                    .because(errno.to_string())
                    .remedy("check that the other side runs and no firewall is between")
            })?;
            let stream = TcpStream::from(socket);
            tune(&stream)?;
            streams.push(stream);
        }
        Ok(Streams {
            streams,
            pools: pools.clone(),
        })
    }

    /// Writes our pieces into theirs: returns when the other side has placed the last byte.
    ///
    /// # Errors
    /// `Transport` with the system's reason.
    pub fn put(&self, ours: &[u64], theirs: &[u64], block: u64) -> Result<()> {
        // Before anything is sent: a request that stops half-way would leave the stream unusable.
        check(&self.pools.put, ours, block)?;
        self.each_stream(ours, theirs, block, |stream, ours, theirs, block| {
            send_header(stream, PUT, theirs, block)?;
            send_pieces(stream, &self.pools.put, ours, block)?;
            receive_exactly(stream, &mut [0])
        })
    }

    /// Reads their pieces into ours.
    ///
    /// # Errors
    /// `Transport` with the system's reason.
    pub fn get(&self, ours: &[u64], theirs: &[u64], block: u64) -> Result<()> {
        check(&self.pools.get, ours, block)?;
        self.each_stream(ours, theirs, block, |stream, ours, theirs, block| {
            send_header(stream, GET, theirs, block)?;
            receive_pieces(stream, &self.pools.get, ours, block)
        })
    }

    /// Tells the serving threads to end.
    ///
    /// # Errors
    /// `Transport` with the system's reason.
    pub fn stop(&self) -> Result<()> {
        self.streams
            .iter()
            .try_for_each(|stream| send_header(stream, STOP, &[], 0))
    }

    /// Round trips of one block each way on the first stream, seconds each; `rounds` of them.
    ///
    /// # Errors
    /// `Transport` with the system's reason, `Corrupt` if a block came back wrong.
    pub fn ping(&self, ours: u64, theirs: u64, block: u64, rounds: u32) -> Result<Vec<Duration>> {
        let stream = &self.streams[0];
        let mut times = Vec::with_capacity(rounds as usize);
        for round in 0..u64::from(rounds) {
            let begun = Instant::now();
            mark(&self.pools.put, ours, block, round);
            send_with_header(stream, &self.pools.put, ours, theirs, block)?;
            let (count, bytes, offset) = receive_header(stream)?.one()?;
            receive_pieces(stream, &self.pools.put, &[offset], bytes)?;
            times.push(begun.elapsed());
            if count != 1 || !is_marked(&self.pools.put, offset, bytes, round + PONG_MARK) {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("round trip {round} of the baseline"),
                ));
            }
        }
        Ok(times)
    }

    fn each_stream(
        &self,
        ours: &[u64],
        theirs: &[u64],
        block: u64,
        go: impl Fn(&TcpStream, &[u64], &[u64], u64) -> Result<()> + Sync,
    ) -> Result<()> {
        let lanes = self.streams.len();
        // Fewer pieces than streams: cut each into as many, so that all streams work.
        let (ours, theirs, block) = if ours.len() < lanes {
            let part = block / lanes as u64;
            let cut = |offsets: &[u64]| -> Vec<u64> {
                offsets
                    .iter()
                    .flat_map(|&offset| (0..lanes as u64).map(move |lane| offset + lane * part))
                    .collect()
            };
            (cut(ours), cut(theirs), part)
        } else {
            (ours.to_vec(), theirs.to_vec(), block)
        };
        let range = |lane: usize| ours.len() * lane / lanes..ours.len() * (lane + 1) / lanes;
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..lanes)
                .map(|lane| {
                    let (go, stream, range) = (&go, &self.streams[lane], range(lane));
                    let (ours, theirs) = (&ours[range.clone()], &theirs[range]);
                    scope.spawn(move || go(stream, ours, theirs, block))
                })
                .collect();
            let mut result = go(&self.streams[0], &ours[range(0)], &theirs[range(0)], block);
            for other in others {
                let joined = other
                    .join()
                    .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a thread of the baseline panicked")));
                result = result.and(joined);
            }
            result
        })
    }
}

/// Added to the round's number by the side that answers.
pub const PONG_MARK: u64 = 7;

/// Writes a number into the first and last word of a block.
pub fn mark(memory: &Memory, offset: u64, block: u64, number: u64) {
    memory.set_word(offset as usize, number);
    memory.set_word((offset + block - 8) as usize, number);
}

/// Whether a block's first and last word hold the number.
pub fn is_marked(memory: &Memory, offset: u64, block: u64, number: u64) -> bool {
    memory.word(offset as usize) == number && memory.word((offset + block - 8) as usize) == number
}

fn serve(stream: &TcpStream, pools: &Pools) -> Result<()> {
    loop {
        let header = match receive_header(stream) {
            Ok(header) => header,
            Err(error) if error.kind() == ErrorKind::PeerLost => return Ok(()),
            Err(error) => return Err(error),
        };
        match header.operation {
            STOP => return Ok(()),
            PUT if header.offsets.len() == 1 && header.block <= PING_BYTES_MAX && header.answer_to.is_some() => {
                answer_ping(stream, &pools.put, &header)?;
            }
            PUT => {
                receive_pieces(stream, &pools.put, &header.offsets, header.block)?;
                send_exactly(stream, &[1])?;
            }
            GET => send_pieces(stream, &pools.get, &header.offsets, header.block)?,
            other => {
                return Err(Error::new(ErrorKind::Protocol, format!("operation {other}"))
                    .at("the baseline's stream")
                    .because("the other side is no baseline of this version"));
            }
        }
    }
}

/// Blocks of the ping-pong are small.
const PING_BYTES_MAX: u64 = 64 << 10;

fn answer_ping(stream: &TcpStream, memory: &Memory, header: &Header) -> Result<()> {
    let (offset, answer) = (header.offsets[0], header.answer_to.unwrap_or(0));
    receive_pieces(stream, memory, &[offset], header.block)?;
    let number = memory.word(offset as usize);
    if !is_marked(memory, offset, header.block, number) {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!("ping {number} of the baseline is torn"),
        ));
    }
    mark(
        memory,
        answer_source(memory, header.block),
        header.block,
        number + PONG_MARK,
    );
    send_with_header(
        stream,
        memory,
        answer_source(memory, header.block),
        answer,
        header.block,
    )
}

/// Where the answering side keeps the block it sends: the pool's last.
fn answer_source(memory: &Memory, block: u64) -> u64 {
    (memory.length() as u64 / block - 1) * block
}

struct Header {
    operation: u64,
    block: u64,
    offsets: Vec<u64>,
    /// A ping: where the answer shall be placed.
    answer_to: Option<u64>,
}

impl Header {
    fn one(&self) -> Result<(usize, u64, u64)> {
        match self.offsets.as_slice() {
            [offset] => Ok((1, self.block, *offset)),
            _ => Err(Error::new(ErrorKind::Protocol, "a pong of several pieces")),
        }
    }
}

/// Set in the operation word of a ping; the word after the first offset then says where the answer goes.
const PING_FLAG: u64 = 1 << 32;
/// Operation, pieces, bytes per piece, the first offset, and where a ping's answer goes: one receive for a ping.
const HEAD_BYTES: usize = 40;

fn send_header(mut stream: &TcpStream, operation: u64, offsets: &[u64], block: u64) -> Result<()> {
    let (first, rest) = offsets
        .split_first()
        .map_or((0, offsets), |(first, rest)| (*first, rest));
    let mut bytes = Vec::with_capacity(HEAD_BYTES + 8 * rest.len());
    for word in [operation, offsets.len() as u64, block, first, 0].iter().chain(rest) {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    stream
        .write_all(&bytes)
        .map_err(|error| failed("sending on a stream", &error))
}

fn send_with_header(stream: &TcpStream, memory: &Memory, ours: u64, theirs: u64, block: u64) -> Result<()> {
    check(memory, &[ours], block)?;
    let mut words = [PUT | PING_FLAG, 1, block, theirs, ours];
    let mut pieces = [
        libc::iovec {
            iov_base: words.as_mut_ptr().cast(),
            iov_len: size_of_val(&words),
        },
        libc::iovec {
            iov_base: piece(memory, ours),
            iov_len: block as usize,
        },
    ];
    let total = size_of_val(&words) + block as usize;
    let sent = send_vectored(stream, &mut pieces)?;
    if sent == total {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::Transport, "a short send of a small block"))
    }
}

fn receive_header(stream: &TcpStream) -> Result<Header> {
    let mut head = [0u8; HEAD_BYTES];
    receive_exactly(stream, &mut head)?;
    let word = |bytes: &[u8], index: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
        u64::from_le_bytes(word)
    };
    let (operation, count, block) = (word(&head, 0), word(&head, 1), word(&head, 2));
    if count > PIECES_MAX {
        return Err(Error::new(ErrorKind::Protocol, format!("{count} pieces"))
            .at("the baseline's stream")
            .because(format!("at most {PIECES_MAX} are allowed")));
    }
    let mut offsets = Vec::with_capacity(count as usize);
    if count > 0 {
        offsets.push(word(&head, 3));
    }
    if count > 1 {
        let mut bytes = vec![0; 8 * (count as usize - 1)];
        receive_exactly(stream, &mut bytes)?;
        offsets.extend((0..count as usize - 1).map(|index| word(&bytes, index)));
    }
    Ok(Header {
        operation: operation & !PING_FLAG,
        block,
        offsets,
        answer_to: (operation & PING_FLAG != 0).then(|| word(&head, 4)),
    })
}

/// Pieces in one request, at most: 128 MiB of offsets.
const PIECES_MAX: u64 = 16 << 20;

fn send_pieces(stream: &TcpStream, memory: &Memory, offsets: &[u64], block: u64) -> Result<()> {
    walk(memory, offsets, block, |pieces| send_vectored(stream, pieces))
}

fn receive_pieces(stream: &TcpStream, memory: &Memory, offsets: &[u64], block: u64) -> Result<()> {
    walk(memory, offsets, block, |pieces| receive_vectored(stream, pieces))
}

/// Goes through the pieces in order, a call's worth at a time; `call` says how many bytes it moved.
fn walk(
    memory: &Memory,
    offsets: &[u64],
    block: u64,
    mut call: impl FnMut(&mut [libc::iovec]) -> Result<usize>,
) -> Result<()> {
    check(memory, offsets, block)?;
    let mut pieces = Vec::with_capacity(CALL_PIECES_MAX.min(offsets.len()));
    let (mut index, mut inside) = (0, 0);
    while index < offsets.len() {
        pieces.clear();
        let (mut at, mut from, mut bytes) = (index, inside, 0);
        while at < offsets.len() && pieces.len() < CALL_PIECES_MAX && bytes < CALL_BYTES_MAX {
            let length = (block - from).min(CALL_BYTES_MAX as u64);
            pieces.push(libc::iovec {
                iov_base: piece(memory, offsets[at] + from),
                iov_len: length as usize,
            });
            bytes += length as usize;
            from += length;
            if from < block {
                break;
            }
            (at, from) = (at + 1, 0);
        }
        let mut moved = call(&mut pieces)? as u64;
        while moved > 0 {
            let step = moved.min(block - inside);
            moved -= step;
            inside += step;
            if inside == block {
                (index, inside) = (index + 1, 0);
            }
        }
    }
    Ok(())
}

fn piece(memory: &Memory, offset: u64) -> *mut libc::c_void {
    memory.address().wrapping_add(offset as usize).cast()
}

fn check(memory: &Memory, offsets: &[u64], block: u64) -> Result<()> {
    let length = memory.length() as u64;
    match offsets
        .iter()
        .find(|&&offset| offset.checked_add(block).is_none_or(|end| end > length))
    {
        None => Ok(()),
        Some(offset) => Err(
            Error::new(ErrorKind::OutOfBounds, format!("{block} bytes at offset {offset}"))
                .at(format!("the baseline's pool of {length} bytes"))
                .remedy("run both sides with the same workload and --pool-bytes"),
        ),
    }
}

fn send_vectored(stream: &TcpStream, pieces: &mut [libc::iovec]) -> Result<usize> {
    let message = message(pieces);
    loop {
        // SAFETY: the descriptor is open for as long as `stream` is borrowed; each iovec was checked to lie inside the
        // mapping (or is a local array) and outlives the call.
        let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        if sent > 0 {
            return Ok(sent as usize);
        }
        again("sending on a stream")?;
    }
}

fn receive_vectored(stream: &TcpStream, pieces: &mut [libc::iovec]) -> Result<usize> {
    let mut message = message(pieces);
    loop {
        // SAFETY: as in `send_vectored`, with the kernel writing to the pieces.
        let received = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, 0) };
        match received {
            1.. => return Ok(received as usize),
            0 => return Err(gone()),
            _ => again("receiving on a stream")?,
        }
    }
}

fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: no name, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn again(what: &str) -> Result<()> {
    let error = std::io::Error::last_os_error();
    if error.kind() == std::io::ErrorKind::Interrupted {
        Ok(())
    } else {
        Err(failed(what, &error))
    }
}

fn send_exactly(mut stream: &TcpStream, bytes: &[u8]) -> Result<()> {
    stream
        .write_all(bytes)
        .map_err(|error| failed("sending on a stream", &error))
}

fn receive_exactly(mut stream: &TcpStream, bytes: &mut [u8]) -> Result<()> {
    stream.read_exact(bytes).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => gone(),
        _ => failed("receiving on a stream", &error),
    })
}

fn tcp_socket(address: SocketAddr) -> Result<std::os::fd::OwnedFd> {
    let family = if address.is_ipv4() {
        rustix::net::AddressFamily::INET
    } else {
        rustix::net::AddressFamily::INET6
    };
    let socket = rustix::net::socket_with(
        family,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|errno| failed("making a socket", &std::io::Error::from(errno)))?;
    buffers(&socket)?;
    Ok(socket)
}

fn buffers(socket: &impl std::os::fd::AsFd) -> Result<()> {
    let set = sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER_BYTES)
        .and_then(|()| sockopt::set_socket_recv_buffer_size(socket, SOCKET_BUFFER_BYTES));
    set.map_err(|errno| failed("setting socket buffers", &std::io::Error::from(errno)))
}

fn tune(stream: &TcpStream) -> Result<()> {
    buffers(stream)?;
    stream
        .set_nodelay(true)
        .map_err(|error| failed("setting TCP_NODELAY", &error))
}

fn gone() -> Error {
    Error::new(ErrorKind::PeerLost, "the baseline's other side")
        .because("it closed its stream")
        .remedy("look at its own error above")
}

fn failed(what: &str, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Transport, what)
        .at("the baseline's stream")
        .because(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stamps;
    use crate::work::{Named, Pattern, Work, custom};

    fn both(work: &Work, go: impl Fn(&Streams, &Arc<Memory>, &Arc<Memory>)) {
        let bytes = work.shape.bytes() as usize;
        let (ours, theirs) = (Memory::touched(bytes).unwrap(), Memory::touched(bytes).unwrap());
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.address().unwrap();
        let pools = |memory: &Arc<Memory>| Pools {
            put: Arc::clone(memory),
            get: Arc::clone(memory),
        };
        std::thread::scope(|scope| {
            let streams = scope.spawn(|| Streams::connect(address, &pools(&ours)).unwrap());
            let server = listener.serve(&pools(&theirs)).unwrap();
            let streams = streams.join().unwrap();
            go(&streams, &ours, &theirs);
            streams.stop().unwrap();
            server.join().unwrap();
        });
    }

    #[test]
    fn a_put_places_every_byte() {
        for work in [
            custom(4 << 20, 8192, 200, Pattern::Random).unwrap(),
            Named::W1.work(4 << 20).unwrap(),
        ] {
            both(&work, |streams, ours, theirs| {
                stamps::fill(ours, 5);
                stamps::poison(theirs);
                stamps::stamp(ours, &work, 0);
                streams
                    .put(
                        &work.source_offsets(),
                        &work.destination_offsets(),
                        work.shape.block_bytes,
                    )
                    .unwrap();
                stamps::check_everything(theirs, &work, 0, 5).unwrap();
            });
        }
    }

    #[test]
    fn a_get_places_every_byte() {
        let work = custom(4 << 20, 4096, 300, Pattern::Random).unwrap();
        both(&work, |streams, ours, theirs| {
            stamps::fill(theirs, 5);
            stamps::poison(ours);
            stamps::stamp(theirs, &work, 0);
            streams
                .get(
                    &work.destination_offsets(),
                    &work.source_offsets(),
                    work.shape.block_bytes,
                )
                .unwrap();
            stamps::check_everything(ours, &work, 0, 5).unwrap();
        });
    }

    #[test]
    fn pings_come_back() {
        let work = Named::W4.work(1 << 20).unwrap();
        both(&work, |streams, _, _| {
            assert_eq!(streams.ping(4096, 8192, 4096, 50).unwrap().len(), 50);
        });
    }

    #[test]
    fn offsets_outside_the_pool_are_refused() {
        let work = custom(1 << 20, 4096, 4, Pattern::Contiguous).unwrap();
        both(&work, |streams, _, _| {
            assert_eq!(
                streams.put(&[1 << 20], &[0], 4096).unwrap_err().kind(),
                ErrorKind::OutOfBounds
            );
        });
    }
}
