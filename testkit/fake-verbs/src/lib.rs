//! A `libibverbs.so.1` of our own, for tests: its devices exist only in a directory, move bytes between processes,
//! and misbehave as the tests want them to.
//!
//! Production code loads it as it loads the real one, by its path. Tests make a [`FakeFabric`], hand
//! [`FakeFabric::library_path`] to the code under test, and change the devices' behaviour while it runs:
//!
//! ```no_run
//! use kvxfer_fake_verbs::FakeFabric;
//!
//! let fabric = FakeFabric::with(&[("*", "late_placement_us", "50000"), ("fake1", "gids", "none")])?;
//! let library = fabric.library_path(); // for the endpoint's configuration, here and in child processes
//! fabric.set_now("fake0", "completions", "withhold")?; // this process, at once
//! fabric.set_everywhere("*", "port_state", "down")?; // all processes
//! assert_eq!(fabric.counter("*", "misuse"), 0);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! A fabric is found by where the library lies: the file [`FakeFabric`] copied beside a `fabric.conf`. A library that
//! lies elsewhere takes the directory in `KVXFER_FAKE_VERBS`; without that there are no devices. Each copy is an
//! instance of its own, so tests of one process do not share anything.
//!
//! # Keys
//!
//! `fabric.conf` has lines `device.key = value`, the device being `fake0`, `fake1`, … or `*`. A line for the device
//! wins over one for all; what [`FakeFabric::set_now`] sets wins over the file. Whatever follows `#` in a value is
//! ignored, except that it makes the value a new one.
//!
//! | key | values | default | what |
//! | --- | --- | --- | --- |
//! | `devices` | count | 2 | devices in the list; read when it is asked for |
//! | `mode` | `normal`, `instant` | `normal` | `instant`: everything completes in post_send, nothing is checked or copied; immediates reach queue pairs of the same process. To count the instructions of the software above |
//! | `link_layer` | `ethernet`, `infiniband` | `ethernet` | InfiniBand is addressed by LID (set `lid`), Ethernet by GID |
//! | `transport` | `ib`, `iwarp` | `ib` | what the device list says; read when the device is first listed |
//! | `port_state` | `active`, `down`, `init`, `armed` | `active` | unless active, packets are lost in both directions (a connection of the context to itself goes on). A change raises PORT_ERR or PORT_ACTIVE |
//! | `gids` | `none`, or entries `IPv6/v1`, `/v2`, `/ib`, `empty` with commas | `fe80::200:ff:fe00:N/v2, ::ffff:10.99.0.N/v2`, N from 1 | the GID table. A change raises GID_CHANGE |
//! | `ifindex` | number | 0 | the network interface of each GID |
//! | `active_mtu` | 256 … 4096 | 4096 | also the most that modify_qp takes |
//! | `lid` | number | 0 | a change raises LID_CHANGE |
//! | `max_qp`, `max_qp_wr`, `max_sge`, `max_sge_rd`, `max_cqe`, `max_mr_size`, `max_qp_rd_atom`, `max_msg_sz` | number | 4096, 16384, 32, 32, 4194303, 2^64-1, 16, 2^30 | attributes, enforced |
//! | `pci_path` | path | `<fabric>/fakeN` | what the device list says the device's path in sysfs is; read when the device is first listed. [`FakeFabric::place`] puts there what says where the device sits |
//! | `memlock_bytes` | number | no limit | registering more in one context is ENOMEM |
//! | `dmabuf` | `on`, `off` | `off` | `on`: any descriptor that can be mapped is taken; `off`: EOPNOTSUPP |
//! | `peer_memory` | `on`, `off` | `off` | addresses that the processor cannot read: `on`: taken, if they are a shared mapping (as a driver takes those of a driver it knows); `off`: EFAULT |
//! | `bandwidth_bytes_per_s` | number, 0: no limit | 0 | what each context sends: WRITEs and answers to READs |
//! | `latency_us` | number | 0 | packets to this device arrive that much later |
//! | `order` | `in`, `shuffled` | `in` | across queue pairs: as posted, or at random, some falling behind by up to 1 ms |
//! | `network_hold` | `on`, `off` | `off` | packets to this device (requests and answers) stay in the network until it is off; then they meet the queue pair that has the number by then |
//! | `drop_percent` | 0 … 100 | 0 | packets to this device that are lost (and sent again, as reliable connections do) |
//! | `late_placement_us` | number | 0 | WRITEs are accepted and acknowledged, but put in memory only that much later: even if the queue pair is in ERR, reset or destroyed by then. Earlier only by a READ from the context to itself (all), a READ on the same queue pair (its own), a receive completed by an immediate on the same queue pair (its own), or dereg_mr (the region's) |
//! | `flush_scope` | `device`, `region` | `device` | `region`: a READ from the context to itself forces only what is late in the region that it reads, and in others that share addresses with it |
//! | `completions` | `deliver`, `withhold` | `deliver` | `withhold`: completions take room in the queue but are not seen until it is `deliver` |
//! | `completion_delay_us` | number | 0 | completions are seen that much later, in their order |
//! | `complete_with` | `STATUS[:count[:after]]`, `off` | `off` | the next requests fail with this status (`REM_OP_ERR`, `RETRY_EXC_ERR`, … or a number); `after`: they are carried out first |
//! | `retry_exceeded` | `on`, `off` | `on` | `off`: a silent peer is never reported, as with rxe |
//! | `min_timeout_us` | number | 50000 | the least time until a retry, whatever the queue pair's timeout, so that a busy machine does not look like a silent peer |
//! | `fail` | `verb:errno[:count[:skip]]` with commas | none | verbs that fail, `count` times, after `skip` calls that do not: `get_device_list`, `open_device`, `query_device`, `query_port`, `query_gid`, `query_gid_ex`, `alloc_pd`, `dealloc_pd`, `reg_mr`, `reg_dmabuf_mr`, `dereg_mr`, `create_comp_channel`, `create_cq`, `destroy_cq`, `create_qp`, `modify_qp` (`.init`, `.rtr`, `.rts`, `.err`, `.reset`), `query_qp`, `destroy_qp`, `post_send`, `post_send.one` (each request of a list), `post_recv`, `poll_cq`, `req_notify_cq`; errno by name or number |
//! | `event` | `port_down:1`, `port_active:1`, `gid_change:1`, `lid_change:1`, `pkey_change:1`, `sm_change:1`, `client_reregister:1`, `qp_fatal:QPN`, `device_fatal` | none | raises the event once for each change of the value (`port_down:1#2`), without changing the port. `device_fatal` also moves all queue pairs to ERR and makes verbs fail with EIO |
//!
//! Programs that are not in Rust call `kvx_fake_set(device, key, value)` and `kvx_fake_counter(device, name)` of the
//! library they have loaded, which is what [`FakeFabric`] does.
//!
//! # Counters
//!
//! [`FakeFabric::counter`] gives what the devices of this process have done: `writes_posted`, `bytes_written`,
//! `reads`, `bytes_read`, `immediates`, `immediates_received`, `doorbells`, `receive_doorbells`, `completions_polled`,
//! `completions_lost`, `late_bytes_placed_after_error`, `writes_after_destroy`, `late_bytes_flushed`,
//! `late_bytes_at_deregister`, `resets_with_outstanding`, `destroys_with_outstanding`, `packets_received`,
//! `packets_dropped`, `packets_lost`, `retransmissions`, `rnr_naks`, `access_errors`, `cq_overruns`, `queue_full`,
//! `events`, `qps_created`, `qps_destroyed`, `qps_to_error`, `wakeups`, and `misuse`: calls that break the rules of
//! verbs (an object used after it was destroyed, or destroyed while in use or with unacknowledged events). What was
//! misused is said on the standard error.
//!
//! # How it differs from hardware
//!
//! * A device is a thread of the process that opened it. If the process is stopped, so is the device: a real one goes
//!   on with what was posted, and goes on to place what peers send. If the process is killed, the device is silent at
//!   once, as a real one soon is.
//! * Only reliable connections with WRITE, WRITE_WITH_IMM and READ; no SEND, inline data, shared receive queues,
//!   atomics, memory windows, SQD, path migration or resizing.
//! * Packets carry up to 64 KiB whatever the MTU; one sequence number each.
//! * Send and receive slots are free again when a later completion was polled, as with a fast driver, not when the
//!   device is done.
//! * Remote keys are never equal to local ones, and both change with each registration.
//! * A context's number is part of its queue pairs' numbers; a fabric has 2047 contexts in its life, each with at
//!   most 8191 queue pairs at a time.
//! * Acknowledging an event of an object that is being destroyed is waited for 200 ms, not for ever; then destroying
//!   fails with EBUSY.
//! * Destroying a queue pair removes its completions from the completion queue, as some drivers do and others do not.

mod completion;
mod config;
mod context;
mod counters;
mod device;
mod event;
mod exports;
mod fabric;
mod memory;
mod network;
mod objects;
mod packet;
mod post;
mod queue_pair;
mod requester;
mod responder;
mod seen;
mod state;
mod thread;
mod watch;

pub use fabric::FakeFabric;
