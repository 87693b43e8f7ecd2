//! Raw verbs for the tests of the fake: thin, panicking wrappers.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys::{self, Libibverbs};

pub const ALL_RIGHTS: u32 = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_READ;

/// A region's keys: local and remote.
pub fn keys(mr: *mut sys::ibv_mr) -> (u32, u32) {
    // SAFETY: tests ask about regions that live.
    unsafe { ((*mr).lkey, (*mr).rkey) }
}

pub fn load(fabric: &FakeFabric) -> Arc<Libibverbs> {
    // SAFETY: a library made to be loaded.
    Arc::new(unsafe { Libibverbs::new(fabric.library_path()) }.unwrap())
}

/// An opened device with a protection domain and one completion queue with a channel.
pub struct Device {
    pub verbs: Arc<Libibverbs>,
    pub context: *mut sys::ibv_context,
    pub pd: *mut sys::ibv_pd,
    pub channel: *mut sys::ibv_comp_channel,
    pub cq: *mut sys::ibv_cq,
}

impl Device {
    pub fn open(verbs: &Arc<Libibverbs>, name: &str) -> Device {
        Device::try_open(verbs, name).unwrap()
    }

    pub fn try_open(verbs: &Arc<Libibverbs>, name: &str) -> Option<Device> {
        // SAFETY: the calls of the C interface in their right order, here and below.
        unsafe {
            let mut count = 0;
            let list = verbs.ibv_get_device_list(&raw mut count);
            let devices = std::slice::from_raw_parts(list, count as usize);
            let device = *devices
                .iter()
                .find(|device| CStr::from_ptr(verbs.ibv_get_device_name(**device)).to_str() == Ok(name))
                .unwrap();
            let context = verbs.ibv_open_device(device);
            verbs.ibv_free_device_list(list);
            if context.is_null() {
                return None;
            }
            let pd = verbs.ibv_alloc_pd(context);
            let channel = verbs.ibv_create_comp_channel(context);
            let cq = verbs.ibv_create_cq(context, 4096, std::ptr::null_mut(), channel, 0);
            assert!(!pd.is_null() && !channel.is_null() && !cq.is_null());
            Some(Device {
                verbs: verbs.clone(),
                context,
                pd,
                channel,
                cq,
            })
        }
    }

    pub fn register(&self, memory: &mut [u8], access: u32) -> *mut sys::ibv_mr {
        // SAFETY: tests keep the memory until they deregister.
        let mr = unsafe {
            self.verbs
                .ibv_reg_mr(self.pd, memory.as_mut_ptr().cast(), memory.len() as u64, access as i32)
        };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        mr
    }

    pub fn deregister(&self, mr: *mut sys::ibv_mr) {
        // SAFETY: a region of ours.
        assert_eq!(unsafe { self.verbs.ibv_dereg_mr(mr) }, 0);
    }

    pub fn gid(&self, index: i32) -> [u8; 16] {
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        // SAFETY: a live context.
        let answer = unsafe { self.verbs.ibv_query_gid(self.context, 1, index, &raw mut gid) };
        assert_eq!(answer, 0);
        // SAFETY: every bit pattern is one.
        unsafe { gid.raw }
    }

    pub fn port(&self) -> sys::ibv_port_attr {
        // SAFETY: all zero is a valid one; a live context.
        unsafe {
            let mut port: sys::ibv_port_attr = std::mem::zeroed();
            assert_eq!(self.verbs.ibv_query_port(self.context, 1, (&raw mut port).cast()), 0);
            port
        }
    }

    /// Up to 64 completions that are there now.
    pub fn poll(&self) -> Vec<sys::ibv_wc> {
        // SAFETY: all zero is a valid one; the queue lives.
        unsafe {
            let mut out: [sys::ibv_wc; 64] = std::mem::zeroed();
            let count = ((*self.context).ops.poll_cq.unwrap())(self.cq, 64, out.as_mut_ptr());
            assert!(count >= 0);
            out[..count as usize].to_vec()
        }
    }

    /// Exactly `count` completions, within five seconds.
    pub fn wait(&self, count: usize) -> Vec<sys::ibv_wc> {
        let limit = Instant::now() + Duration::from_secs(5);
        let mut all = Vec::new();
        while all.len() < count {
            all.extend(self.poll());
            assert!(Instant::now() < limit, "{} completions instead of {count}", all.len());
            std::thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(all.len(), count);
        all
    }

    /// The next asynchronous event, within two seconds.
    pub fn event(&self) -> Option<u32> {
        // SAFETY: descriptors and pointers of a live context.
        unsafe {
            let mut entry = libc::pollfd {
                fd: (*self.context).async_fd,
                events: libc::POLLIN,
                revents: 0,
            };
            if libc::poll(&raw mut entry, 1, 2000) != 1 {
                return None;
            }
            let mut event: sys::ibv_async_event = std::mem::zeroed();
            assert_eq!(self.verbs.ibv_get_async_event(self.context, &raw mut event), 0);
            self.verbs.ibv_ack_async_event(&raw mut event);
            Some(event.event_type)
        }
    }

    pub fn close(self) {
        // SAFETY: the objects of this device, each once.
        unsafe {
            assert_eq!(self.verbs.ibv_destroy_cq(self.cq), 0);
            assert_eq!(self.verbs.ibv_destroy_comp_channel(self.channel), 0);
            assert_eq!(self.verbs.ibv_dealloc_pd(self.pd), 0);
            assert_eq!(self.verbs.ibv_close_device(self.context), 0);
        }
    }
}

/// How a queue pair is made and connected.
#[derive(Clone, Copy)]
pub struct Options {
    pub sends: u32,
    pub receives: u32,
    pub timeout: u8,
    pub retries: u8,
    pub not_ready_retries: u8,
    pub depth: u8,
    pub psn: u32,
    pub mtu: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            sends: 256,
            receives: 64,
            timeout: 14,
            retries: 7,
            not_ready_retries: 7,
            depth: 4,
            psn: 0x00ff_fff0,
            mtu: sys::IBV_MTU_1024,
        }
    }
}

/// A request to be posted.
#[derive(Clone, Default)]
pub struct Request {
    pub id: u64,
    pub opcode: u32,
    pub pieces: Vec<(u64, u32, u32)>,
    pub remote: u64,
    pub key: u32,
    pub immediate: u32,
    pub unsignalled: bool,
    pub fence: bool,
}

impl Request {
    pub fn write(id: u64, from: &[u8], local_key: u32, remote: u64, key: u32) -> Request {
        Request {
            id,
            opcode: sys::IBV_WR_RDMA_WRITE,
            pieces: vec![(from.as_ptr() as u64, from.len() as u32, local_key)],
            remote,
            key,
            ..Request::default()
        }
    }

    pub fn read(id: u64, to: &mut [u8], local_key: u32, remote: u64, key: u32) -> Request {
        Request {
            opcode: sys::IBV_WR_RDMA_READ,
            ..Request::write(id, to, local_key, remote, key)
        }
    }

    pub fn immediate(id: u64, immediate: u32) -> Request {
        Request {
            id,
            opcode: sys::IBV_WR_RDMA_WRITE_WITH_IMM,
            immediate,
            ..Request::default()
        }
    }

    pub fn unsignalled(self) -> Request {
        Request {
            unsignalled: true,
            ..self
        }
    }
}

/// Requests as the C interface wants them, linked.
pub struct Posted {
    list: Vec<sys::ibv_send_wr>,
    _pieces: Vec<Vec<sys::ibv_sge>>,
}

impl Posted {
    pub fn new(requests: &[Request]) -> Posted {
        let piece = |(addr, length, lkey): &(u64, u32, u32)| sys::ibv_sge {
            addr: *addr,
            length: *length,
            lkey: *lkey,
        };
        let mut pieces: Vec<Vec<_>> = requests
            .iter()
            .map(|request| request.pieces.iter().map(piece).collect())
            .collect();
        let mut list: Vec<_> = requests
            .iter()
            .zip(&mut pieces)
            .map(|(request, pieces)| {
                // SAFETY: all zero is a valid one.
                let mut wr: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
                wr.wr_id = request.id;
                wr.sg_list = pieces.as_mut_ptr();
                wr.num_sge = pieces.len() as i32;
                wr.opcode = request.opcode;
                wr.send_flags = if request.unsignalled { 0 } else { sys::IBV_SEND_SIGNALED };
                if request.fence {
                    wr.send_flags |= sys::IBV_SEND_FENCE;
                }
                wr.__bindgen_anon_1.imm_data = request.immediate.to_be();
                wr.wr.rdma.remote_addr = request.remote;
                wr.wr.rdma.rkey = request.key;
                wr
            })
            .collect();
        let first = list.as_mut_ptr();
        for index in 1..list.len() {
            list[index - 1].next = first.wrapping_add(index);
        }
        Posted { list, _pieces: pieces }
    }

    pub fn try_post(&self, pair: &Pair) -> (i32, usize) {
        let first = self.list.as_ptr().cast_mut();
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair; the list and what it points to live as long as `self`, and are only read.
        unsafe {
            let errno = ((*(*pair.qp).context).ops.post_send.unwrap())(pair.qp, first, &raw mut bad);
            (
                errno,
                if errno == 0 {
                    self.list.len()
                } else {
                    bad.offset_from(first) as usize
                },
            )
        }
    }

    pub fn post(&self, pair: &Pair) {
        assert_eq!(self.try_post(pair), (0, self.list.len()));
    }
}

pub struct Pair {
    pub verbs: Arc<Libibverbs>,
    pub qp: *mut sys::ibv_qp,
    pub options: Options,
}

impl Pair {
    pub fn new(device: &Device, options: Options) -> Pair {
        // SAFETY: all zero is a valid one; live objects.
        unsafe {
            let mut init: sys::ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = device.cq;
            init.recv_cq = device.cq;
            init.qp_type = sys::IBV_QPT_RC;
            init.cap = sys::ibv_qp_cap {
                max_send_wr: options.sends,
                max_recv_wr: options.receives,
                max_send_sge: 16,
                max_recv_sge: 1,
                max_inline_data: 0,
            };
            let qp = device.verbs.ibv_create_qp(device.pd, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            Pair {
                verbs: device.verbs.clone(),
                qp,
                options,
            }
        }
    }

    pub fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { (*self.qp).qp_num }
    }

    pub fn modify(&self, change: impl FnOnce(&mut sys::ibv_qp_attr), mask: u32) -> i32 {
        // SAFETY: all zero is a valid one; a live queue pair.
        unsafe {
            let mut attr: sys::ibv_qp_attr = std::mem::zeroed();
            change(&mut attr);
            self.verbs.ibv_modify_qp(self.qp, &raw mut attr, mask as i32)
        }
    }

    pub fn to(&self, state: u32) -> i32 {
        self.modify(|attr| attr.qp_state = state, sys::IBV_QP_STATE)
    }

    pub fn init(&self) -> i32 {
        self.modify(
            |attr| {
                attr.qp_state = sys::IBV_QPS_INIT;
                attr.port_num = 1;
                attr.qp_access_flags = ALL_RIGHTS;
            },
            sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS,
        )
    }

    pub fn ready_to_receive(&self, peer: u32, gid: [u8; 16]) -> i32 {
        self.modify(
            |attr| {
                attr.qp_state = sys::IBV_QPS_RTR;
                attr.path_mtu = self.options.mtu;
                attr.dest_qp_num = peer;
                attr.rq_psn = self.options.psn;
                attr.max_dest_rd_atomic = self.options.depth;
                attr.min_rnr_timer = 12;
                attr.ah_attr.is_global = 1;
                attr.ah_attr.port_num = 1;
                attr.ah_attr.grh.dgid.raw = gid;
                attr.ah_attr.grh.sgid_index = 1;
                attr.ah_attr.grh.hop_limit = 64;
            },
            sys::IBV_QP_STATE
                | sys::IBV_QP_AV
                | sys::IBV_QP_PATH_MTU
                | sys::IBV_QP_DEST_QPN
                | sys::IBV_QP_RQ_PSN
                | sys::IBV_QP_MAX_DEST_RD_ATOMIC
                | sys::IBV_QP_MIN_RNR_TIMER,
        )
    }

    pub fn ready_to_send(&self) -> i32 {
        self.modify(
            |attr| {
                attr.qp_state = sys::IBV_QPS_RTS;
                attr.sq_psn = self.options.psn;
                attr.timeout = self.options.timeout;
                attr.retry_cnt = self.options.retries;
                attr.rnr_retry = self.options.not_ready_retries;
                attr.max_rd_atomic = self.options.depth;
            },
            sys::IBV_QP_STATE
                | sys::IBV_QP_TIMEOUT
                | sys::IBV_QP_RETRY_CNT
                | sys::IBV_QP_RNR_RETRY
                | sys::IBV_QP_SQ_PSN
                | sys::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    pub fn connect(&self, peer: u32, gid: [u8; 16]) {
        assert_eq!(self.init(), 0);
        assert_eq!(self.ready_to_receive(peer, gid), 0);
        assert_eq!(self.ready_to_send(), 0);
    }

    /// Two connected queue pairs.
    pub fn connected(a: &Device, b: &Device, options: Options) -> (Pair, Pair) {
        let pair = (Pair::new(a, options), Pair::new(b, options));
        pair.0.connect(pair.1.number(), b.gid(1));
        pair.1.connect(pair.0.number(), a.gid(1));
        pair
    }

    /// Posts requests with one doorbell; the errno and how many were taken.
    pub fn try_post(&self, requests: &[Request]) -> (i32, usize) {
        Posted::new(requests).try_post(self)
    }

    pub fn post(&self, requests: &[Request]) {
        assert_eq!(self.try_post(requests), (0, requests.len()));
    }

    pub fn post_receives(&self, first: u64, count: u64) -> i32 {
        for id in first..first + count {
            // SAFETY: a live queue pair and one request.
            let errno = unsafe {
                let mut wr: sys::ibv_recv_wr = std::mem::zeroed();
                wr.wr_id = id;
                let mut bad = std::ptr::null_mut();
                ((*(*self.qp).context).ops.post_recv.unwrap())(self.qp, &raw mut wr, &raw mut bad)
            };
            if errno != 0 {
                return errno;
            }
        }
        0
    }

    pub fn destroy(self) {
        // SAFETY: a live queue pair.
        assert_eq!(unsafe { self.verbs.ibv_destroy_qp(self.qp) }, 0);
    }
}

/// Waits until something holds, for five seconds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(5);
    while !holds() {
        assert!(Instant::now() < limit, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Memory that the compiler does not think it knows.
pub fn peek(memory: &[u8], place: usize) -> u8 {
    // SAFETY: inside the slice.
    unsafe { memory.as_ptr().add(place).read_volatile() }
}
