//! The network: Unix sockets in the fabric's directory, one for each context.
//!
//! A context's number is the name of its socket and the upper part of its queue pairs' numbers. Numbers are taken by
//! binding and never used again, so that packets for a context that has gone find nobody.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use zerocopy::{FromZeros, IntoBytes};

use crate::packet::{FRAGMENT, Header};

/// Bits of a queue pair number that are the queue pair's place in its context.
pub(crate) const LOCAL_BITS: u32 = 13;
const CONTEXTS: u32 = 1 << (24 - LOCAL_BITS);

/// What a socket may hold in each direction; more lets a sender run ahead of a receiver that is not scheduled.
const SOCKET_BUFFER: i32 = 4 << 20;

/// A context's own socket.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Listening, non-blocking.
    pub(crate) fd: OwnedFd,
    /// The context's number.
    pub(crate) number: u32,
}

/// The fabric's directory, opened: paths through it are short enough for socket names.
#[derive(Debug)]
pub(crate) struct Directory(Option<OwnedFd>);

impl Directory {
    /// Opens it.
    pub(crate) fn open(path: &Path) -> io::Result<Directory> {
        Ok(Directory(Some(std::fs::File::open(path)?.into())))
    }

    /// Its descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Closes it.
    pub(crate) fn close(&mut self) {
        self.0 = None;
    }

    fn address(&self, number: u32) -> (libc::sockaddr_un, libc::socklen_t) {
        // SAFETY: all zero is a valid sockaddr_un.
        let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let path = format!("/proc/self/fd/{}/{number}.sock", self.fd());
        crate::device::copy_text(&mut address.sun_path, path.as_bytes());
        let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + path.len() + 1;
        (address, length as libc::socklen_t)
    }

    /// Takes the next free context number.
    pub(crate) fn listen(&self, path: &Path) -> io::Result<Listener> {
        let taken = std::fs::read_dir(path)?.flatten().filter_map(|entry| {
            entry
                .file_name()
                .to_str()
                .and_then(|name| name.strip_suffix(".sock"))
                .and_then(|name| name.parse().ok())
        });
        let mut number = taken.max().unwrap_or(0u32) + 1;
        let fd = socket()?;
        loop {
            if number >= CONTEXTS {
                return Err(io::Error::other("no context numbers left in this fabric"));
            }
            let (address, length) = self.address(number);
            // SAFETY: a socket address of that length.
            if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) } == 0 {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::AddrInUse {
                return Err(error);
            }
            number += 1;
        }
        // SAFETY: a bound socket.
        if unsafe { libc::listen(fd.as_raw_fd(), 1024) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Listener { fd, number })
    }

    fn connect(&self, number: u32) -> io::Result<OwnedFd> {
        let fd = socket()?;
        let (address, length) = self.address(number);
        // SAFETY: a socket address of that length.
        if unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(fd)
    }
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers; the result is checked.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Best effort: a smaller buffer is slower, not wrong.
    for option in [libc::SO_SNDBUF, libc::SO_SNDBUFFORCE] {
        let size = SOCKET_BUFFER;
        // SAFETY: an integer option with its size.
        unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const size).cast(),
                size_of::<i32>() as libc::socklen_t,
            );
        }
    }
    Ok(fd)
}

impl Listener {
    /// The next connection that waits, if there is one.
    pub(crate) fn accept(&self) -> Option<OwnedFd> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: a listening socket; no address is asked for.
        let fd = unsafe { libc::accept4(self.fd.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) };
        // SAFETY: if it is one, it was just made and is owned by nobody else.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// What came of a try to send or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// A message, with that many bytes of payload.
    Bytes(usize),
    /// Not now.
    WouldBlock,
    /// The memory to be sent is not there.
    Fault,
    /// The other end is gone.
    Gone,
}

/// Sends a header and the bytes that `payload` names. The memory may go away meanwhile (that is a fault, not a
/// crash), which is why it is named by addresses.
pub(crate) fn send(fd: RawFd, header: &Header, payload: &[libc::iovec]) -> Moved {
    let mut pieces = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; MOST_PIECES + 1];
    let bytes = header.as_bytes();
    pieces[0] = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let count = payload.len().min(MOST_PIECES);
    pieces[1..=count].copy_from_slice(&payload[..count]);
    // SAFETY: all zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = (count + 1) as _;
    // SAFETY: the header is readable; for the rest the kernel checks the addresses.
    let sent = unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    match usize::try_from(sent) {
        Ok(sent) => Moved::Bytes(sent - bytes.len()),
        Err(_) => match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM) => Moved::WouldBlock,
            Some(libc::EFAULT) => Moved::Fault,
            _ => Moved::Gone,
        },
    }
}

/// The most pieces of memory in one packet.
pub(crate) const MOST_PIECES: usize = 64;

/// Receives a message into `payload`, which has room for a whole one.
pub(crate) fn receive(fd: RawFd, payload: &mut [u8; FRAGMENT]) -> (Moved, Header) {
    let mut header = Header::new_zeroed();
    let mut pieces = [
        libc::iovec {
            iov_base: header.as_mut_bytes().as_mut_ptr().cast(),
            iov_len: size_of::<Header>(),
        },
        libc::iovec {
            iov_base: payload.as_mut_ptr().cast(),
            iov_len: payload.len(),
        },
    ];
    // SAFETY: all zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: both pieces are writable for their length.
    let got = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) };
    let moved = match usize::try_from(got) {
        Ok(got) if got >= size_of::<Header>() => Moved::Bytes(got - size_of::<Header>()),
        Ok(_) => Moved::Gone,
        Err(_) => match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Moved::WouldBlock,
            _ => Moved::Gone,
        },
    };
    (moved, header)
}

/// What waits to be answered to a peer, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Response {
    /// A packet without payload.
    Packet(Header),
    /// A READ's answer.
    Stream(Stream),
}

/// A READ's answer, made piece by piece as it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// The queue pair of this side that answers.
    pub(crate) queue_pair: u32,
    /// It counts among the READs that the peer may have open: it is no repetition.
    pub(crate) counted: bool,
    /// The header of its next packet; `total` is what is left, in bytes.
    pub(crate) next: Header,
}

/// The way to another context.
#[derive(Debug, Default)]
pub(crate) struct Link {
    socket: Option<OwnedFd>,
    /// The other end is gone, for ever.
    pub(crate) gone: bool,
    /// The socket is full: nothing more until it can be written to.
    pub(crate) full: bool,
    /// Answers, which go before requests.
    pub(crate) responses: VecDeque<Response>,
}

impl Link {
    /// The socket to context `number`, connected if it was not; none if that context is gone or cannot be reached now.
    pub(crate) fn socket(&mut self, directory: &Directory, number: u32) -> Option<RawFd> {
        if self.socket.is_none() && !self.gone {
            match directory.connect(number) {
                Ok(fd) => self.socket = Some(fd),
                // Its queue of connections is full; a stopped process does not take them.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => self.close(),
            }
        }
        self.socket.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// The socket, if it is connected and full.
    pub(crate) fn waiting(&self) -> Option<RawFd> {
        self.socket.as_ref().filter(|_| self.full).map(AsRawFd::as_raw_fd)
    }

    /// Nobody is there any more.
    pub(crate) fn close(&mut self) {
        self.gone = true;
        self.full = false;
        self.socket = None;
        self.responses.clear();
    }
}
