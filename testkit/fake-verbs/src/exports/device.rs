//! Devices, their attributes and asynchronous events.

use std::os::raw::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use kvxfer_rdma::sys::{self, ibv_async_event, ibv_context, ibv_device, ibv_device_attr, ibv_gid, ibv_gid_entry};

use super::{errno_of, refuse, set_errno};
use crate::config::link_layer;
use crate::context;
use crate::device;
use crate::objects::{FakeContext, FakeDevice};

/// ibv_get_device_list.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = device::list();
    if let Some(errno) = devices
        .first()
        .and_then(|first| first.device.failure("get_device_list"))
    {
        return refuse(errno);
    }
    // SAFETY: null, or writable by the verb's contract.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = devices.len() as c_int;
    }
    let mut list: Vec<_> = devices.iter().map(|device| device.pointer()).collect();
    list.push(std::ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

/// ibv_free_device_list.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    let mut length = 1;
    // SAFETY: the list ends with a null pointer.
    while unsafe { !(*list.add(length - 1)).is_null() } {
        length += 1;
    }
    // SAFETY: made by ibv_get_device_list as a boxed slice of that length.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, length)) });
}

/// ibv_get_device_name.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: null, or a device of the list.
    if unsafe { FakeDevice::any(device) }.is_none() {
        return std::ptr::null();
    }
    // SAFETY: just seen to be a device.
    unsafe { (&raw const (*device).name).cast() }
}

/// ibv_get_device_guid.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: null, or a device of the list.
    unsafe { FakeDevice::any(device) }.map_or(0, |device| guid(device.device.index))
}

fn guid(index: u32) -> u64 {
    (0x0200_00ff_fe00_0001u64 + u64::from(index)).to_be()
}

/// ibv_open_device.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: null, or a device of the list.
    let Some(fake) = (unsafe { FakeDevice::any(device) }) else {
        return refuse(libc::EINVAL);
    };
    if let Some(errno) = fake.device.failure("open_device") {
        return refuse(errno);
    }
    let context = match context::open(fake) {
        Ok(context) => context,
        Err(error) => {
            eprintln!("fake-verbs: {}: cannot be opened: {error}", fake.device.name);
            return refuse(errno_of(&error));
        }
    };
    // SAFETY: all zero is a valid ibv_context: no functions, null pointers, numbers.
    let mut raw: ibv_context = unsafe { std::mem::zeroed() };
    raw.device = device;
    raw.ops.poll_cq = Some(super::completion::poll_cq);
    raw.ops.req_notify_cq = Some(super::completion::req_notify_cq);
    raw.ops.post_send = Some(super::queue_pair::post_send);
    raw.ops.post_recv = Some(super::queue_pair::post_recv);
    raw.cmd_fd = context.state.lock().directory.fd();
    raw.async_fd = context.events.fd();
    raw.num_comp_vectors = 1;
    FakeContext::leak(raw, context).pointer()
}

/// ibv_close_device. EBUSY, and misuse, while something of the context exists.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(pointer: *mut ibv_context) -> c_int {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return libc::EINVAL;
    };
    let state = fake.context.state.lock();
    let busy = !state.live.is_empty() || !state.completion_queues.is_empty() || state.regions.registered > 0;
    drop(state);
    if busy {
        fake.context
            .misuse("device closed while queue pairs, completion queues or regions exist");
        return libc::EBUSY;
    }
    fake.mark.destroy();
    fake.context.stop();
    0
}

/// ibv_query_device.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(pointer: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("query_device") {
        return errno;
    }
    let settings = fake.context.device.settings();
    // SAFETY: all zero is a valid ibv_device_attr.
    let mut answer: ibv_device_attr = unsafe { std::mem::zeroed() };
    device::copy_text(&mut answer.fw_ver, b"fake");
    answer.node_guid = guid(fake.context.device.index);
    answer.sys_image_guid = answer.node_guid;
    answer.max_mr_size = settings.max_mr_size;
    answer.page_size_cap = 0xffff_f000;
    answer.vendor_id = 0x6661;
    answer.max_qp = settings.max_qp as c_int;
    answer.max_qp_wr = settings.max_qp_wr as c_int;
    answer.max_sge = settings.max_sge as c_int;
    answer.max_sge_rd = settings.max_sge_rd as c_int;
    answer.max_cq = 65_536;
    answer.max_cqe = settings.max_cqe as c_int;
    answer.max_mr = 1 << 20;
    answer.max_pd = 1 << 16;
    answer.max_qp_rd_atom = settings.max_qp_rd_atom as c_int;
    answer.max_res_rd_atom = (settings.max_qp_rd_atom * settings.max_qp) as c_int;
    answer.max_qp_init_rd_atom = settings.max_qp_rd_atom as c_int;
    answer.max_pkeys = 1;
    answer.phys_port_cnt = 1;
    // SAFETY: writable by the verb's contract.
    unsafe { attributes.write(answer) };
    0
}

/// ibv_query_port. The real one knows of the fields up to `flags`; the rest lies in its padding.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    pointer: *mut ibv_context,
    port: u8,
    attributes: *mut sys::_compat_ibv_port_attr,
) -> c_int {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("query_port") {
        return errno;
    }
    if port != 1 {
        return libc::EINVAL;
    }
    let settings = fake.context.device.settings();
    let infiniband = settings.link_layer == link_layer::INFINIBAND;
    // SAFETY: all zero is a valid ibv_port_attr.
    let mut answer: sys::ibv_port_attr = unsafe { std::mem::zeroed() };
    answer.state = settings.port_state;
    answer.max_mtu = sys::IBV_MTU_4096;
    answer.active_mtu = settings.active_mtu;
    answer.gid_tbl_len = settings.gids.len() as c_int;
    answer.max_msg_sz = settings.max_msg_sz;
    answer.pkey_tbl_len = 1;
    answer.lid = settings.lid;
    answer.sm_lid = u16::from(infiniband);
    answer.max_vl_num = 1;
    answer.active_width = 2;
    answer.active_speed = 32;
    answer.phys_state = if settings.port_state == sys::IBV_PORT_DOWN {
        3
    } else {
        5
    };
    answer.link_layer = settings.link_layer;
    // SAFETY: writable by the verb's contract; the structure is padded to the size of ibv_port_attr.
    unsafe { attributes.cast::<sys::ibv_port_attr>().write(answer) };
    0
}

/// ibv_query_gid.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(pointer: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return -1;
    };
    if let Some(errno) = fake.context.device.failure("query_gid") {
        set_errno(errno);
        return -1;
    }
    let settings = fake.context.device.settings();
    let entry = usize::try_from(index).ok().and_then(|index| settings.gids.get(index));
    let Some(entry) = entry.filter(|_| port == 1) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: writable by the verb's contract.
    unsafe { gid.write(ibv_gid { raw: entry.raw }) };
    0
}

/// _ibv_query_gid_ex, which the inline ibv_query_gid_ex calls. Empty entries are ENODATA.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    pointer: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: sys::size_t,
) -> c_int {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("query_gid_ex") {
        return errno;
    }
    let settings = fake.context.device.settings();
    if port != 1 || flags != 0 || size as usize != size_of::<ibv_gid_entry>() {
        return libc::EINVAL;
    }
    let Some(found) = settings.gids.get(index as usize) else {
        return libc::EINVAL;
    };
    if found.raw == [0; 16] {
        return libc::ENODATA;
    }
    let infiniband = settings.link_layer == link_layer::INFINIBAND;
    // SAFETY: writable by the verb's contract.
    unsafe {
        entry.write(ibv_gid_entry {
            gid: ibv_gid { raw: found.raw },
            gid_index: index,
            port_num: port,
            gid_type: if infiniband { sys::IBV_GID_TYPE_IB } else { found.kind },
            ndev_ifindex: settings.ifindex,
        });
    }
    0
}

/// ibv_query_pkey: one entry, the default key.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(pointer: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int {
    // SAFETY: null, or a context.
    let fake = unsafe { FakeContext::live(pointer) };
    if fake.is_none() || port != 1 || index != 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: writable by the verb's contract.
    unsafe { pkey.write(0xffff_u16.to_be()) };
    0
}

/// ibv_get_async_event.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(pointer: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    match fake.context.events.next() {
        Ok(next) => {
            // SAFETY: writable by the verb's contract.
            unsafe { event.write(next) };
            0
        }
        Err(error) => {
            set_errno(errno_of(&error));
            -1
        }
    }
}

/// ibv_ack_async_event.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event from ibv_get_async_event.
    let Some(event) = (unsafe { event.as_ref() }) else {
        return;
    };
    // SAFETY: the event's type says which member is active. Objects are never freed.
    let object = unsafe {
        match event.event_type {
            sys::IBV_EVENT_CQ_ERR => event.element.cq.addr(),
            sys::IBV_EVENT_QP_FATAL
            | sys::IBV_EVENT_QP_REQ_ERR
            | sys::IBV_EVENT_QP_ACCESS_ERR
            | sys::IBV_EVENT_COMM_EST
            | sys::IBV_EVENT_SQ_DRAINED
            | sys::IBV_EVENT_PATH_MIG
            | sys::IBV_EVENT_PATH_MIG_ERR
            | sys::IBV_EVENT_QP_LAST_WQE_REACHED => event.element.qp.addr(),
            _ => 0,
        }
    };
    // Events do not say of which context they are: the one that has such an event open takes it.
    context::acknowledge_event(object);
}

static FORK_INITIALIZED: AtomicBool = AtomicBool::new(false);

/// ibv_fork_init.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    FORK_INITIALIZED.store(true, Ordering::Relaxed);
    0
}

/// ibv_is_fork_initialized.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> sys::ibv_fork_status {
    if FORK_INITIALIZED.load(Ordering::Relaxed) {
        sys::IBV_FORK_ENABLED
    } else {
        sys::IBV_FORK_DISABLED
    }
}
