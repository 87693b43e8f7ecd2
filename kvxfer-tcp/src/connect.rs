//! Bringing a lane's connection up: dialing without blocking, and the exchange of hellos.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use kvxfer_core::Time;
use kvxfer_core::flow::LaneName;
use kvxfer_core::wire::lane::{HELLO_BYTES, LaneHello};
use rustix::net::{RecvFlags, SendFlags, sockopt};

use crate::error::TcpError;
use crate::link::LinkCore;
use crate::sys;

/// A connection that this side is making.
pub(crate) struct Dial {
    socket: OwnedFd,
    pub(crate) name: LaneName,
    pub(crate) deadline: Time,
    stage: Stage,
}

enum Stage {
    Connecting,
    /// Our hello is out; the answer comes in.
    Greeting {
        answer: [u8; HELLO_BYTES],
        got: usize,
    },
}

impl Dial {
    /// Starts connecting. The socket is not watched yet.
    pub(crate) fn start(link: &LinkCore, name: LaneName, address: &SocketAddr, now: Time) -> Result<Dial, TcpError> {
        let failed = |call| {
            move |source| TcpError::Call {
                call,
                place: link.place(name),
                source,
            }
        };
        let socket = sys::socket(address).map_err(failed("socket"))?;
        let config = &link.config;
        sys::tune(&socket, config.send_buffer_bytes, config.receive_buffer_bytes).map_err(failed("setsockopt"))?;
        sys::start_connect(&socket, address).map_err(failed("connect"))?;
        Ok(Dial {
            socket,
            name,
            deadline: now + config.connect_timeout,
            stage: Stage::Connecting,
        })
    }

    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(crate) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Moves on as far as the socket lets it. True once the peer has answered as it should.
    pub(crate) fn progress(&mut self, link: &LinkCore) -> Result<bool, TcpError> {
        let place = link.place(self.name);
        let failed = |call| {
            move |source: rustix::io::Errno| TcpError::Call {
                call,
                place,
                source: source.into(),
            }
        };
        if let Stage::Connecting = self.stage {
            sockopt::socket_error(&self.socket)
                .and_then(|error| error)
                .map_err(failed("connect"))?;
            let hello = own_hello(link, self.name).encode();
            match rustix::net::send(&self.socket, &hello, SendFlags::NOSIGNAL) {
                // The buffer of a new connection takes the whole hello or, before it is connected, nothing.
                Ok(HELLO_BYTES) => {}
                Ok(_) => {
                    return Err(failed("send")(rustix::io::Errno::MSGSIZE));
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN) => return Ok(false),
                Err(error) => return Err(failed("send")(error)),
            }
            self.stage = Stage::Greeting {
                answer: [0; HELLO_BYTES],
                got: 0,
            };
        }
        let Stage::Greeting { answer, got } = &mut self.stage else {
            return Ok(false);
        };
        // Not a byte more: what follows the answer is the reader's.
        while *got < HELLO_BYTES {
            match rustix::net::recv(&self.socket, &mut answer[*got..], RecvFlags::empty()) {
                Ok((0, _)) => return Err(TcpError::Ended { place }),
                Ok((length, _)) => *got += length,
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed("recv")(error)),
            }
        }
        let hello = LaneHello::decode(answer).map_err(|source| TcpError::Peer {
            place,
            source: Box::new(source),
        })?;
        check_hello(link, &hello).map_err(|why| TcpError::Hello { place, why })?;
        if hello.lane != self.name {
            return Err(TcpError::Hello {
                place,
                why: "it answers for another lane",
            });
        }
        Ok(true)
    }
}

/// What this side says on a lane.
pub(crate) fn own_hello(link: &LinkCore, lane: LaneName) -> LaneHello {
    LaneHello {
        from: link.peer.local,
        to: link.peer.incarnation,
        token: link.peer.token,
        lane,
    }
}

/// Answers an adopted connection's hello.
pub(crate) fn answer(link: &LinkCore, socket: &OwnedFd, lane: LaneName) -> Result<(), TcpError> {
    let hello = own_hello(link, lane).encode();
    let source = match rustix::net::send(socket, &hello, SendFlags::NOSIGNAL) {
        Ok(HELLO_BYTES) => return Ok(()),
        Ok(_) => io::Error::from_raw_os_error(libc::EMSGSIZE),
        Err(error) => error.into(),
    };
    Err(TcpError::Call {
        call: "send",
        place: link.place(lane),
        source,
    })
}

/// Whether a hello fits the link.
pub(crate) fn check_hello(link: &LinkCore, hello: &LaneHello) -> Result<(), &'static str> {
    if hello.token != link.peer.token {
        Err("its token is not the session's")
    } else if hello.from != link.peer.incarnation {
        Err("it comes from another incarnation")
    } else if hello.to != link.peer.local {
        Err("it is meant for another incarnation")
    } else if usize::from(hello.lane.index) >= link.lanes.len() {
        Err("the link has no such lane")
    } else {
        Ok(())
    }
}
