//! Sockets between the processes of one host, and what the system says of who is at the other end.
//!
//! The names are abstract: nothing is left behind in a file system, and who is in another network namespace does not find
//! them.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::wire::{MAPPINGS_AT_ONCE, MESSAGE_BYTES_MAX, Token};

/// Connections that the system keeps until they are accepted.
const BACKLOG: i32 = 64;

/// 128 random bits.
pub(super) fn random() -> Result<Token, Errno> {
    let mut token = [0; 16];
    let mut filled = 0;
    while filled < token.len() {
        match getrandom(&mut token[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(token)
}

fn address(name: &Token) -> Result<SocketAddrUnix, Errno> {
    let name = name
        .iter()
        .fold("kvxfer-".to_owned(), |text, byte| text + &format!("{byte:02x}"));
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// A socket that takes connections under this name.
pub(super) fn listen_at(name: &Token) -> Result<OwnedFd, Errno> {
    let socket = new_socket()?;
    bind(&socket, &address(name)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A connection to whoever listens under this name. At once: `AGAIN` if too many wait to be accepted.
pub(super) fn connect_to(name: &Token) -> Result<OwnedFd, Errno> {
    let socket = new_socket()?;
    rustix::net::connect(&socket, &address(name)?)?;
    Ok(socket)
}

/// The next connection, if there is one.
pub(super) fn accept_from(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
}

/// Who is at the other end of a connection: who connected, or who listened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peer {
    /// As seen from here; 0 if it is not seen.
    process: i32,
    user: u32,
}

impl Peer {
    pub(super) fn of(socket: &OwnedFd) -> Result<Peer, Errno> {
        let mut said = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // (Not rustix: there a process that cannot be seen, number 0, is not representable.)
        // SAFETY: writes one structure, of that length.
        let asked = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut said).cast(),
                &raw mut length,
            )
        };
        match asked {
            0 => Ok(Peer {
                process: said.pid,
                user: said.uid,
            }),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        }
    }

    /// Whether it may reach our memory anyway: it runs as the same user, or as root.
    pub(super) fn is_trusted(self) -> bool {
        self.user == 0 || self.user == rustix::process::geteuid().as_raw()
    }

    /// Whether it is this process.
    pub(super) fn is_here(self) -> bool {
        self.process == rustix::process::getpid().as_raw_pid()
    }

    pub(super) fn user(self) -> u32 {
        self.user
    }

    /// Something that can be polled and is readable once the process has ended. `None`: it cannot be seen from here, or is
    /// this one, or the system has no such thing.
    pub(super) fn watch(self) -> Option<OwnedFd> {
        let process = Pid::from_raw(self.process).filter(|_| !self.is_here())?;
        pidfd_open(process, PidfdFlags::empty()).ok()
    }
}

/// What a message is sent with: bytes, and descriptors that the receiver gets its own of.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Letter {
    pub(super) fn new(bytes: Vec<u8>) -> Letter {
        Letter {
            bytes,
            descriptors: Vec::new(),
        }
    }
}

/// How long nothing is sent when the system is short of what that takes.
const SHORTAGE_PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

/// Sends a message, whole or not at all. False: there is no room for it now.
pub(super) fn send(socket: &OwnedFd, letter: &Letter) -> Result<bool, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAPPINGS_AT_ONCE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = letter.descriptors.iter().map(AsFd::as_fd).collect();
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(
            socket,
            &[IoSlice::new(&letter.bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Ok(_) => return Ok(true),
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => {}
            // The system's, not the connection's, and over soon: what is to be said must not be lost for it. The socket has room,
            // so that polling it would not wait.
            Err(Errno::NOMEM | Errno::NOBUFS | Errno::TOOMANYREFS) => {
                std::thread::sleep(SHORTAGE_PAUSE);
                return Ok(false);
            }
            Err(errno) => return Err(errno),
        }
    }
}

/// What came of looking for a message.
#[derive(Debug)]
pub(super) enum Received {
    Message(Letter),
    Nothing,
    /// The other end has closed it, or its process has ended.
    Closed,
}

/// Takes one message. One that is too long, or has too many descriptors, is an error.
pub(super) fn receive(socket: &OwnedFd) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAPPINGS_AT_ONCE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0u8; MESSAGE_BYTES_MAX];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET) => return Ok(Received::Closed),
            result => break result?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    if got.bytes == 0 {
        return Ok(Received::Closed);
    }
    let cut = rustix::net::ReturnFlags::TRUNC | rustix::net::ReturnFlags::CTRUNC;
    if got.flags.intersects(cut) {
        return Err(Errno::MSGSIZE);
    }
    Ok(Received::Message(Letter {
        bytes: bytes[..got.bytes].to_vec(),
        descriptors,
    }))
}

/// Wakes a thread that polls.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

impl Wake {
    pub(super) fn new() -> Result<Wake, Errno> {
        Ok(Wake(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn wake(&self) {
        // It fails only when it is already counted to the brim: then the thread is woken anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets that it was woken.
    pub(super) fn rest(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until something happens at one of them, or until the time.
pub(super) fn wait(polled: &mut [PollFd<'_>], until: Option<Instant>) {
    let left = until.map(|until| {
        // A little longer, so that the time has come when it ends.
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    // Whatever it says, all are looked at.
    let _ = poll(polled, left.as_ref());
}

/// Whether polling found anything there.
pub(super) fn is_up(polled: &PollFd<'_>) -> bool {
    !polled.revents().is_empty()
}

/// What is waited for at a connection: room if something is to be sent, else a message.
pub(super) fn interest(has_letters: bool) -> PollFlags {
    if has_letters { PollFlags::OUT } else { PollFlags::IN }
}
