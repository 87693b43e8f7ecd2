//! One session connection: a bounded queue of frames out, a parser of frames in, and the task that serves both.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoKind, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until};

use kvxfer_core::machine::ConnectionId;
use kvxfer_core::wire::{self, FRAME_HEADER_BYTES, Frame};
use kvxfer_core::{Error, ErrorKind, Result};

use super::Shared;

/// Bytes that may wait for a peer that does not read. Beyond, the connection is broken: the session's messages are
/// kept by the control plane and repeated on the next one.
const OUTBOX_BYTES_MAX: usize = 8 << 20;
/// How long frames that were queued before a disconnect may take to leave and to be taken by the peer.
pub(crate) const LINGER: Duration = Duration::from_millis(100);
/// Bytes asked of the socket at once.
const READ_BYTES: usize = 16 << 10;
/// Frames written with one call.
const WRITE_FRAMES_MAX: usize = 16;

/// A session connection. Any thread may queue and flush; one task reads.
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    stream: TcpStream,
    peer: SocketAddr,
    outbox: Mutex<Outbox>,
    /// Rung when the task has to look at the outbox: the socket is full, the connection closes or broke.
    kick: Notify,
}

#[derive(Default)]
struct Outbox {
    frames: VecDeque<Vec<u8>>,
    /// Bytes of the first frame that are out already.
    sent: usize,
    bytes: usize,
    closing: bool,
    broken: Option<Error>,
}

/// How the outbox stands after a flush.
enum Flushed {
    Empty,
    Waiting,
    Closing { empty: bool },
    Broken(Error),
}

impl Connection {
    pub(crate) fn new(id: ConnectionId, stream: TcpStream, peer: SocketAddr) -> Arc<Connection> {
        Arc::new(Connection {
            id,
            stream,
            peer,
            outbox: Mutex::new(Outbox::default()),
            kick: Notify::new(),
        })
    }

    /// Queues a frame. Never blocks; what goes wrong is told by the task as a broken connection.
    pub(crate) fn queue(&self, frame: &Frame) {
        let encoded = wire::encode(frame);
        let mut outbox = self.outbox.lock();
        match encoded {
            Ok(bytes) if outbox.bytes + bytes.len() <= OUTBOX_BYTES_MAX => {
                outbox.bytes += bytes.len();
                outbox.frames.push_back(bytes);
            }
            Ok(_) => self.fail(
                &mut outbox,
                Error::new(ErrorKind::Transport, "session connection")
                    .at(self.peer.to_string())
                    .because("the peer does not read its messages"),
            ),
            Err(error) => self.fail(&mut outbox, error),
        }
    }

    /// Writes what the socket takes now, on the calling thread: one hop less for every control message.
    pub(crate) fn flush(&self) {
        if matches!(self.write(), Flushed::Waiting | Flushed::Broken(_)) {
            self.kick.notify_one();
        }
    }

    /// Closes once what was queued is out, or after [`LINGER`].
    pub(crate) fn close(&self) {
        self.outbox.lock().closing = true;
        self.kick.notify_one();
    }

    fn fail(&self, outbox: &mut Outbox, error: Error) {
        outbox.broken.get_or_insert(error);
        self.kick.notify_one();
    }

    fn write(&self) -> Flushed {
        let mut outbox = self.outbox.lock();
        loop {
            if let Some(error) = &outbox.broken {
                return Flushed::Broken(error.clone());
            }
            if outbox.frames.is_empty() {
                return match outbox.closing {
                    true => Flushed::Closing { empty: true },
                    false => Flushed::Empty,
                };
            }
            let mut slices = [IoSlice::new(&[]); WRITE_FRAMES_MAX];
            let mut count = 0;
            for (slice, frame) in slices.iter_mut().zip(&outbox.frames) {
                let skip = if count == 0 { outbox.sent } else { 0 };
                *slice = IoSlice::new(&frame[skip..]);
                count += 1;
            }
            match self.send(&slices[..count]) {
                Ok(written) => outbox.advance(written),
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    return match outbox.closing {
                        true => Flushed::Closing { empty: false },
                        false => Flushed::Waiting,
                    };
                }
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => {
                    outbox.broken = Some(self.io_error(&error));
                }
            }
        }
    }

    /// A peer that is gone must be an error, not a `SIGPIPE`, which ends programs that are not written in Rust or Python.
    fn send(&self, slices: &[IoSlice<'_>]) -> std::io::Result<usize> {
        self.stream.try_io(Interest::WRITABLE, || {
            let mut control = SendAncillaryBuffer::default();
            Ok(sendmsg(&self.stream, slices, &mut control, SendFlags::NOSIGNAL)?)
        })
    }

    fn io_error(&self, error: &std::io::Error) -> Error {
        Error::new(ErrorKind::Transport, "session connection")
            .at(self.peer.to_string())
            .because(error.to_string())
    }
}

impl Outbox {
    fn advance(&mut self, mut written: usize) {
        self.bytes = self.bytes.saturating_sub(written);
        while let Some(front) = self.frames.front() {
            let left = front.len() - self.sent;
            if written < left {
                self.sent += written;
                return;
            }
            written -= left;
            self.sent = 0;
            self.frames.pop_front();
        }
    }
}

/// Serves a connection until it ends, and tells the control plane why it did. `begun` is what was read of it before.
/// `permit` is given back when its first frame is whole.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    begun: &[u8],
    permit: Option<OwnedSemaphorePermit>,
) {
    shared.served.fetch_add(1, Ordering::AcqRel);
    let _served = Served(&shared);
    let why = serve_until_it_ends(&shared, &connection, begun, permit).await;
    if let Some(why) = why {
        tracing::debug!(peer = %connection.peer, connection = connection.id.0, %why, "session connection ended");
        shared.connection_ended(connection.id, why);
    }
}

/// Counts a connection as served until its task has ended, or was ended.
struct Served<'a>(&'a Shared);

impl Drop for Served<'_> {
    fn drop(&mut self) {
        self.0.served.fetch_sub(1, Ordering::AcqRel);
    }
}

/// `None` if we closed it ourselves.
async fn serve_until_it_ends(
    shared: &Arc<Shared>,
    connection: &Connection,
    begun: &[u8],
    mut permit: Option<OwnedSemaphorePermit>,
) -> Option<Error> {
    let patience = Duration::from_millis(shared.config.deadlines.connect_ms);
    let mut reader = FrameReader::new(begun);
    // Until the first frame is whole, and whenever one has begun, the rest must come within this time.
    let mut frame_deadline = Some(Instant::now() + patience);
    let mut close_deadline = None;
    let mut half_closed = false;
    loop {
        let waiting = match connection.write() {
            Flushed::Empty => false,
            Flushed::Waiting => true,
            Flushed::Broken(error) => return Some(error),
            Flushed::Closing { empty: true } => {
                // Closing a socket with bytes unread resets it, and what we said last could be lost with it: say that
                // nothing more comes, and throw away what the peer says until it has closed too.
                if !std::mem::replace(&mut half_closed, true) {
                    let _ = rustix::net::shutdown(&connection.stream, rustix::net::Shutdown::Write);
                }
                close_deadline.get_or_insert(Instant::now() + LINGER);
                false
            }
            Flushed::Closing { empty: false } => {
                close_deadline.get_or_insert(Instant::now() + LINGER);
                true
            }
        };
        let deadline = [frame_deadline, close_deadline].into_iter().flatten().min();
        tokio::select! {
            biased;
            ready = connection.stream.readable(), if half_closed => {
                if ready.is_err() || reader.discard(&connection.stream) {
                    return None;
                }
            }
            ready = connection.stream.readable(), if close_deadline.is_none() => {
                if let Err(error) = ready {
                    return Some(connection.io_error(&error));
                }
                match reader.read(&connection.stream) {
                    Ok(Read::Some) => {}
                    Ok(Read::NothingYet) => continue,
                    Ok(Read::End) => {
                        return Some(Error::new(ErrorKind::Transport, "session connection")
                            .at(connection.peer.to_string())
                            .because("the peer closed it"));
                    }
                    Err(error) => return Some(connection.io_error(&error)),
                }
                let mut frames = Vec::new();
                let broken = loop {
                    match reader.frame() {
                        Ok(Some(frame)) => frames.push(frame),
                        Ok(None) => break None,
                        Err(error) => break Some(error.at(connection.peer.to_string())),
                    }
                };
                if !frames.is_empty() {
                    frame_deadline = None;
                    drop(permit.take());
                    shared.frames(connection.id, frames);
                }
                if let Some(error) = broken {
                    // Whoever speaks another version is told so, in ours: better than silence.
                    if error.kind() == ErrorKind::Unsupported {
                        connection.queue(&Frame::Refuse(error.clone()));
                        connection.flush();
                    }
                    return Some(error);
                }
                match (reader.partial(), frame_deadline) {
                    (true, None) => frame_deadline = Some(Instant::now() + patience),
                    (false, Some(_)) => frame_deadline = None,
                    _ => {}
                }
            }
            _ = connection.stream.writable(), if waiting => {}
            () = connection.kick.notified() => {}
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                if close_deadline.is_some() {
                    return None;
                }
                return Some(Error::new(ErrorKind::Protocol, "a session frame")
                    .at(connection.peer.to_string())
                    .because(format!("it was not whole within {patience:?}")));
            }
        }
    }
}

enum Read {
    Some,
    NothingYet,
    End,
}

/// Turns bytes into frames. Memory grows with what has come, never with what a header promises.
struct FrameReader {
    buffer: Vec<u8>,
    /// Bytes at the front that have been parsed.
    parsed: usize,
}

impl FrameReader {
    fn new(begun: &[u8]) -> FrameReader {
        FrameReader {
            buffer: begun.to_vec(),
            parsed: 0,
        }
    }

    fn read(&mut self, stream: &TcpStream) -> std::io::Result<Read> {
        self.buffer.drain(..self.parsed);
        self.parsed = 0;
        if self.buffer.is_empty() && self.buffer.capacity() > 4 * READ_BYTES {
            self.buffer = Vec::new();
        }
        self.buffer.reserve(READ_BYTES);
        match stream.try_read_buf(&mut self.buffer) {
            Ok(0) => Ok(Read::End),
            Ok(_) => Ok(Read::Some),
            Err(error) if matches!(error.kind(), IoKind::WouldBlock | IoKind::Interrupted) => Ok(Read::NothingYet),
            Err(error) => Err(error),
        }
    }

    /// Reads and forgets. True once there is nothing more to come.
    fn discard(&mut self, stream: &TcpStream) -> bool {
        self.buffer.clear();
        self.parsed = 0;
        !matches!(self.read(stream), Ok(Read::Some | Read::NothingYet))
    }

    fn frame(&mut self) -> Result<Option<Frame>> {
        let rest = &self.buffer[self.parsed..];
        let Some((header, after)) = rest.split_first_chunk::<FRAME_HEADER_BYTES>() else {
            return Ok(None);
        };
        let length = wire::body_length(header)?;
        let Some(body) = after.get(..length) else {
            return Ok(None);
        };
        let frame = wire::decode(header, body)?;
        self.parsed += FRAME_HEADER_BYTES + length;
        Ok(Some(frame))
    }

    fn partial(&self) -> bool {
        self.parsed < self.buffer.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    static RAISED: AtomicBool = AtomicBool::new(false);

    extern "C" fn note(_: libc::c_int) {
        RAISED.store(true, Ordering::SeqCst);
    }

    #[tokio::test]
    async fn a_peer_that_is_gone_raises_no_signal() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (there, peer) = listener.accept().await.unwrap();
        // Reset, and told so by a read: a write is EPIPE from here on, and a signal where that is not prevented.
        rustix::net::sockopt::set_socket_linger(&there, Some(Duration::ZERO)).unwrap();
        drop(there);
        here.readable().await.unwrap();
        assert!(here.try_read(&mut [0; 1]).is_err());

        // Rust programs begin with SIGPIPE ignored, others do not.
        // SAFETY: the handler only stores to an atomic; nothing else of this process depends on the signal.
        let before = unsafe { libc::signal(libc::SIGPIPE, note as *const () as libc::sighandler_t) };
        let connection = Connection::new(ConnectionId(1), here, peer);
        connection.queue(&Frame::Refuse(Error::new(ErrorKind::Closed, "a test")));
        assert!(matches!(connection.write(), Flushed::Broken(_)));
        // SAFETY: what was there before.
        unsafe { libc::signal(libc::SIGPIPE, before) };
        assert!(!RAISED.load(Ordering::SeqCst), "SIGPIPE");
    }
}
