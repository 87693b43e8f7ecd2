//! The system calls that safe wrappers cannot express, and small helpers around the others.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use kvxfer_core::Time;
use rustix::event::epoll;
use rustix::fs::Timespec;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use rustix::time::ClockId;

/// Pieces of one vectored call, at most: the system's own limit.
pub(crate) const IOVECS_MAX: usize = 1024;

/// Sends what the pieces hold, without blocking and without `SIGPIPE`.
///
/// # Safety
/// Each piece must be readable memory for the duration of the call. It may change meanwhile.
pub(crate) unsafe fn send_vectored(fd: BorrowedFd<'_>, pieces: &[libc::iovec]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid `msghdr` (null pointers, zero lengths).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    loop {
        // SAFETY: the header points at `pieces`, which the caller vouches for; the kernel does not write to it.
        let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        if sent >= 0 {
            return Ok(sent as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Receives into the pieces, without blocking. `Ok(0)` is the end of the stream.
///
/// # Safety
/// Each piece must be writable memory for the duration of the call, to which no Rust reference exists.
pub(crate) unsafe fn receive_vectored(fd: BorrowedFd<'_>, pieces: &[libc::iovec]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    loop {
        // SAFETY: the header points at `pieces`, which the caller vouches for.
        let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        if received >= 0 {
            return Ok(received as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A non-blocking TCP socket for this address, not yet connected.
pub(crate) fn socket(address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    Ok(rustix::net::socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        Some(ipproto::TCP),
    )?)
}

/// Starts connecting. True if it is connected already.
pub(crate) fn start_connect(fd: &OwnedFd, address: &SocketAddr) -> io::Result<bool> {
    match rustix::net::connect(fd, address) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::INPROGRESS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Sets what a lane needs. Buffer sizes beyond the system's limits are cut by the system, silently and harmlessly.
pub(crate) fn tune(fd: &OwnedFd, send_buffer_bytes: usize, receive_buffer_bytes: usize) -> io::Result<()> {
    sockopt::set_tcp_nodelay(fd, true)?;
    if send_buffer_bytes > 0 {
        sockopt::set_socket_send_buffer_size(fd, send_buffer_bytes)?;
    }
    if receive_buffer_bytes > 0 {
        sockopt::set_socket_recv_buffer_size(fd, receive_buffer_bytes)?;
    }
    Ok(())
}

/// `local-remote` of a connected socket, for people.
pub(crate) fn endpoints(fd: &OwnedFd) -> String {
    let text = |address: Option<rustix::net::SocketAddrAny>| {
        address
            .and_then(|address| SocketAddr::try_from(address).ok())
            .map_or_else(|| "?".into(), |address| address.to_string())
    };
    let local = rustix::net::getsockname(fd).ok();
    let remote = rustix::net::getpeername(fd).ok().flatten();
    format!("{}-{}", text(local), text(remote))
}

/// Now, on the clock that deadlines use.
pub(crate) fn now() -> Time {
    let time = rustix::time::clock_gettime(ClockId::Boottime);
    Time::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// An epoll instance with an eventfd in it. The eventfd is edge-triggered, so that nobody ever has to read it.
pub(crate) struct Poller {
    epoll: OwnedFd,
    wake: OwnedFd,
}

/// What epoll said about one descriptor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ready {
    pub(crate) token: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The connection is ending: reading must go on until it says how.
    pub(crate) ending: bool,
}

/// The token of the eventfd.
pub(crate) const WAKE: u64 = u64::MAX;

impl Poller {
    pub(crate) fn new() -> io::Result<Poller> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)?;
        let interest = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), interest)?;
        Ok(Poller { epoll, wake })
    }

    /// Watches a socket, edge-triggered, for everything, until it is closed.
    pub(crate) fn add(&self, fd: &OwnedFd, token: u64) -> io::Result<()> {
        let interest =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), interest)?)
    }

    /// Wakes whoever waits. Only fails when the counter is full, in which case a wake-up is pending anyway.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Waits until something is ready or the time is over (`None`: for ever).
    pub(crate) fn wait(&self, buffer: &mut Vec<epoll::Event>, timeout: Option<Duration>) -> io::Result<()> {
        buffer.clear();
        let timeout = match timeout {
            // epoll_wait counts in milliseconds; pauses between polls of a copy are far shorter.
            Some(timeout) if !timeout.is_zero() && timeout < Duration::from_millis(1) => {
                return self.wait_briefly(buffer, timeout);
            }
            other => other.map(timespec),
        };
        match epoll::wait(
            self.epoll.as_fd(),
            rustix::buffer::spare_capacity(buffer),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn wait_briefly(&self, buffer: &mut Vec<epoll::Event>, timeout: Duration) -> io::Result<()> {
        let mut descriptors = [rustix::event::PollFd::new(&self.epoll, rustix::event::PollFlags::IN)];
        match rustix::event::poll(&mut descriptors, Some(&timespec(timeout))) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(()),
            Ok(_) => self.wait(buffer, Some(Duration::ZERO)),
            Err(error) => Err(error.into()),
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs() as _,
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

impl Ready {
    pub(crate) fn from_event(event: &epoll::Event) -> Ready {
        let flags = event.flags;
        let ending = flags.intersects(epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        Ready {
            token: event.data.u64(),
            readable: ending || flags.contains(epoll::EventFlags::IN),
            writable: ending || flags.contains(epoll::EventFlags::OUT),
            ending,
        }
    }
}
