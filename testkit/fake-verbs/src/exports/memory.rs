//! Protection domains and memory regions.

use std::os::raw::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer_rdma::sys::{self, ibv_context, ibv_mr, ibv_pd};

use super::refuse;
use crate::counters::add;
use crate::memory::NewRegion;
use crate::objects::{FakeContext, FakeMr, FakePd};

/// ibv_alloc_pd.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(pointer: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return refuse(libc::EINVAL);
    };
    if let Some(errno) = fake.context.device.failure("alloc_pd") {
        return refuse(errno);
    }
    let raw = ibv_pd {
        context: pointer,
        handle: 0,
    };
    FakePd::leak(raw, fake.context.clone(), AtomicU32::new(0)).pointer()
}

/// ibv_dealloc_pd. EBUSY, and misuse, while something is in it.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pointer: *mut ibv_pd) -> c_int {
    // SAFETY: null, or a protection domain.
    let Some(fake) = (unsafe { FakePd::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("dealloc_pd") {
        return errno;
    }
    if fake.users.load(Ordering::Acquire) > 0 {
        fake.context
            .misuse("protection domain freed while regions or queue pairs are in it");
        return libc::EBUSY;
    }
    fake.mark.destroy();
    0
}

/// ibv_reg_mr.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    memory: *mut c_void,
    length: sys::size_t,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the verb's contract is the same.
    unsafe {
        register(
            pd,
            "reg_mr",
            memory,
            length,
            memory.addr() as u64,
            access as c_uint,
            None,
        )
    }
}

/// ibv_reg_mr_iova.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    memory: *mut c_void,
    length: sys::size_t,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the verb's contract is the same.
    unsafe { register(pd, "reg_mr", memory, length, iova, access as c_uint, None) }
}

/// ibv_reg_mr_iova2: as ibv_reg_mr_iova, and optional access flags are allowed.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    memory: *mut c_void,
    length: sys::size_t,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // Optional flags may be ignored, and are.
    let access = access & !OPTIONAL;
    // SAFETY: the verb's contract is the same.
    unsafe { register(pd, "reg_mr", memory, length, iova, access, None) }
}

/// ibv_reg_dmabuf_mr: any descriptor that can be mapped, if the key `dmabuf` is on. One of the fake CUDA driver's begins
/// at its position.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: sys::size_t,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: null, or a protection domain.
    let Some(fake) = (unsafe { FakePd::live(pd) }) else {
        return refuse(libc::EINVAL);
    };
    if !fake.context.device.settings().dmabuf {
        return refuse(libc::EOPNOTSUPP);
    }
    if let Some(errno) = fake.context.device.failure("reg_dmabuf_mr") {
        return refuse(errno);
    }
    // As the kernel demands: the same place in a page.
    if (offset ^ iova) & (PAGE - 1) != 0 || length == 0 {
        return refuse(libc::EINVAL);
    }
    let inside = (offset & (PAGE - 1)) as usize;
    let mapped = inside + length as usize;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let from = (offset - inside as u64) as libc::off_t + first_byte(fd);
    // SAFETY: a new mapping, wherever the system wants it.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, libc::MAP_SHARED, fd, from) };
    if base == libc::MAP_FAILED {
        return refuse(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
    }
    let memory = base.wrapping_byte_add(inside);
    // SAFETY: the memory was just mapped and stays until the region goes.
    unsafe {
        register(
            pd,
            "reg_mr",
            memory,
            length,
            iova,
            access as c_uint,
            Some((base, mapped)),
        )
    }
}

/// Where the first byte that a descriptor stands for is in its file: what the fake CUDA driver exports begins at the
/// position, since a file cannot be cut.
fn first_byte(fd: c_int) -> libc::off_t {
    let file = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
    if !file.starts_with("/memfd:fake-cuda (deleted)") {
        return 0;
    }
    // SAFETY: asks for the position; moves nothing.
    unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }
}

const PAGE: u64 = 4096;
const OPTIONAL: c_uint = 0x3ff0_0000;

/// # Safety
/// `pd` is null or a protection domain; the memory stays as long as the region, if it is registered.
unsafe fn register(
    pd: *mut ibv_pd,
    verb: &str,
    memory: *mut c_void,
    length: sys::size_t,
    iova: u64,
    access: c_uint,
    mapping: Option<(*mut c_void, usize)>,
) -> *mut ibv_mr {
    // SAFETY: the caller's promise.
    let Some(fake) = (unsafe { FakePd::live(pd) }) else {
        return refuse(libc::EINVAL);
    };
    let context = &fake.context;
    if let Some(errno) = context.device.failure(verb) {
        return refuse(errno);
    }
    let (memory, mapping) = match mapping {
        None if length > 0 && !is_readable(memory, length as usize) => {
            if !context.device.settings().peer_memory {
                return refuse(libc::EFAULT);
            }
            match second_mapping(memory, length as usize) {
                Some((own, mapping)) => (own, Some(mapping)),
                None => return refuse(libc::EFAULT),
            }
        }
        mapping => (memory, mapping),
    };
    let remote_write = access & (sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC) != 0;
    let known = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_READ;
    let rights_wrong = (remote_write && access & sys::IBV_ACCESS_LOCAL_WRITE == 0) || access & !known != 0;
    let mut state = context.state.lock();
    let refusal = if length == 0 || rights_wrong || length > state.settings.max_mr_size {
        Some(libc::EINVAL)
    } else if state.dead {
        Some(libc::EIO)
    } else if state.regions.registered.saturating_add(length) > state.settings.memlock {
        Some(libc::ENOMEM)
    } else {
        None
    };
    if let Some(errno) = refusal {
        if let Some((address, length)) = mapping {
            // SAFETY: mapped for this registration, and used by nobody else.
            unsafe { libc::munmap(address, length) };
        }
        return refuse(errno);
    }
    let (lkey, rkey) = state.regions.add(NewRegion {
        pd: fake,
        memory: memory.cast(),
        address: iova,
        length,
        access,
        mapping,
    });
    fake.users.fetch_add(1, Ordering::AcqRel);
    let raw = ibv_mr {
        context: fake_context(pd),
        pd,
        addr: memory,
        length,
        handle: lkey,
        lkey,
        rkey,
    };
    let region = FakeMr::leak(raw, context.clone(), fake);
    state.regions.name(region, lkey);
    region.pointer()
}

/// Whether the processor may read the first and the last byte. What cannot be found out is taken for readable.
fn is_readable(memory: *mut c_void, length: usize) -> bool {
    [memory, memory.wrapping_byte_add(length - 1)].into_iter().all(|byte| {
        let mut into = 0u8;
        let local = libc::iovec {
            iov_base: (&raw mut into).cast(),
            iov_len: 1,
        };
        let remote = libc::iovec {
            iov_base: byte,
            iov_len: 1,
        };
        // SAFETY: the kernel writes one byte to `into`; whether it can read the other is what it is asked.
        let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        read == 1 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
    })
}

/// Maps the pages of a shared mapping once more, so that they can be read and written: what another device's driver would
/// let this one do. Where the first byte is there, and the mapping.
fn second_mapping(memory: *mut c_void, length: usize) -> Option<(*mut c_void, (*mut c_void, usize))> {
    let inside = memory.addr() & (PAGE as usize - 1);
    let first = memory.wrapping_byte_sub(inside);
    let mapped = (inside + length).next_multiple_of(PAGE as usize);
    // SAFETY: with an old length of 0 nothing that exists is changed; a new mapping is made wherever the system wants it,
    // or refused if the pages are not shared.
    let own = unsafe { libc::mremap(first, 0, mapped, libc::MREMAP_MAYMOVE) };
    if own == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping that was just made.
    unsafe {
        if libc::mprotect(own, mapped, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            libc::munmap(own, mapped);
            return None;
        }
    }
    Some((own.wrapping_byte_add(inside), (own, mapped)))
}

/// The context that a live protection domain names.
fn fake_context(pd: *mut ibv_pd) -> *mut ibv_context {
    // SAFETY: callers have seen that it lives.
    unsafe { (*pd).context }
}

/// ibv_dereg_mr. Nothing is read or written through the region afterwards: what was accepted and is not in memory
/// is put there first.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(pointer: *mut ibv_mr) -> c_int {
    // SAFETY: null, or a memory region.
    let Some(fake) = (unsafe { FakeMr::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("dereg_mr") {
        return errno;
    }
    let mut state = fake.context.state.lock();
    if let Some((first, length)) = state.regions.extent(fake) {
        let placed = state.force_late(|late, _| late.to.addr().wrapping_sub(first) < length);
        add(&fake.context.device.counters.late_bytes_at_deregister, placed);
    }
    state.regions.remove(fake);
    drop(state);
    fake.mark.destroy();
    fake.pd.users.fetch_sub(1, Ordering::AcqRel);
    0
}
