//! The network between two endpoints, as something that a test can stall and cut.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvxfer_testkit::transport::PATIENCE;
use parking_lot::Mutex;

/// A TCP relay between a dialing transport and a listener, which can stall and cut what it carries.
pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<ProxyState>,
    listener: Mutex<Option<TcpListener>>,
}

struct ProxyState {
    /// Bytes towards the listener that may pass, over all connections.
    allowance: AtomicU64,
    passed: AtomicU64,
    connections: Mutex<Vec<(TcpStream, TcpStream)>>,
    stopping: AtomicBool,
}

impl Proxy {
    pub fn new(ip: IpAddr) -> Proxy {
        let listener = TcpListener::bind((ip, 0)).unwrap();
        // Small buffers, so that a stalled relay really stalls the sender.
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 256 << 10).unwrap();
        Proxy {
            address: listener.local_addr().unwrap(),
            state: Arc::new(ProxyState {
                allowance: AtomicU64::new(u64::MAX),
                passed: AtomicU64::new(0),
                connections: Mutex::default(),
                stopping: AtomicBool::new(false),
            }),
            listener: Mutex::new(Some(listener)),
        }
    }

    /// Starts relaying to this address; gives the relay's own.
    pub fn to(&self, target: SocketAddr) -> SocketAddr {
        let listener = self.listener.lock().take().unwrap();
        let state = self.state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if state.stopping.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(client), Ok(server)) = (stream, TcpStream::connect(target)) else {
                    continue;
                };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let mut connections = state.connections.lock();
                connections.push((client.try_clone().unwrap(), server.try_clone().unwrap()));
                drop(connections);
                let (client2, server2, state2) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap(), state.clone());
                std::thread::spawn(move || state2.carry(client, server, true));
                let state2 = state.clone();
                std::thread::spawn(move || state2.carry(server2, client2, false));
            }
        });
        self.address
    }

    /// Lets this many more bytes pass towards the listener, then stalls.
    pub fn stall_after(&self, bytes: u64) {
        let passed = self.state.passed.load(Ordering::SeqCst);
        self.state.allowance.store(passed + bytes, Ordering::SeqCst);
    }

    pub fn resume(&self) {
        self.state.allowance.store(u64::MAX, Ordering::SeqCst);
    }

    pub fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::SeqCst)
    }

    /// Waits until the relay has stalled.
    pub fn stalled(&self) {
        let end = Instant::now() + PATIENCE;
        while self.passed() < self.state.allowance.load(Ordering::SeqCst) {
            assert!(Instant::now() < end, "nothing to stall");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Cuts all connections that there are.
    pub fn cut(&self) -> usize {
        let connections = std::mem::take(&mut *self.state.connections.lock());
        for (client, server) in &connections {
            let _ = client.shutdown(std::net::Shutdown::Both);
            let _ = server.shutdown(std::net::Shutdown::Both);
        }
        connections.len()
    }

    /// Cuts one connection.
    pub fn cut_one(&self) {
        let (client, server) = self.state.connections.lock().remove(0);
        let _ = client.shutdown(std::net::Shutdown::Both);
        let _ = server.shutdown(std::net::Shutdown::Both);
    }
}

impl ProxyState {
    fn carry(&self, mut from: TcpStream, mut to: TcpStream, counted: bool) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(length) = from.read(&mut bytes) {
            if length == 0 {
                break;
            }
            let mut sent = 0;
            while sent < length {
                let mut step = length - sent;
                if counted {
                    let left = self
                        .allowance
                        .load(Ordering::SeqCst)
                        .saturating_sub(self.passed.load(Ordering::SeqCst));
                    if left == 0 {
                        if self.stopping.load(Ordering::SeqCst) {
                            return;
                        }
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    step = step.min(left as usize);
                }
                if to.write_all(&bytes[sent..sent + step]).is_err() {
                    let _ = from.shutdown(std::net::Shutdown::Both);
                    return;
                }
                sent += step;
                if counted {
                    self.passed.fetch_add(step as u64, Ordering::SeqCst);
                }
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.stopping.store(true, Ordering::SeqCst);
        self.resume();
        self.cut();
        let _ = TcpStream::connect(self.address);
    }
}
