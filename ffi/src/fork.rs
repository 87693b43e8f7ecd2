//! Whether this process is a forked child of the one that uses the library.
//!
//! A child has the parent's memory and none of its threads: locks may be held for ever, and sockets are shared. So a
//! child touches nothing. It is known by a page that the kernel clears in children, which costs one read per call; where
//! there is no such page, by the process id.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

const PAGE_BYTES: usize = 4096;

/// The page, once the library has been used. Its first byte is 1 in this process and 0 in its children.
static MARK: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// The process that uses the library, where there is no such page. 0: not asked yet.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Whether a parent of this process used the library before it forked.
#[inline]
pub(crate) fn is_child() -> bool {
    let mark = MARK.load(Ordering::Acquire);
    if mark.is_null() {
        return first_use();
    }
    // SAFETY: the page was mapped by `mark_page`, is never unmapped, and nobody writes it after it was published.
    unsafe { mark.read_volatile() == 0 }
}

#[cold]
fn first_use() -> bool {
    if OWNER.load(Ordering::Acquire) == 0
        && let Some(page) = mark_page()
    {
        if MARK
            .compare_exchange(null_mut(), page, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            // SAFETY: mapped above, with this length, and known to nobody else.
            unsafe { libc::munmap(page.cast(), PAGE_BYTES) };
        }
        return is_child();
    }
    let me = std::process::id();
    match OWNER.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => false,
        Err(owner) => owner != me,
    }
}

fn mark_page() -> Option<*mut u8> {
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory of ours.
    let page = unsafe {
        libc::mmap(
            null_mut(),
            PAGE_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping made above, with its length.
    if unsafe { libc::madvise(page, PAGE_BYTES, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: as above; nobody else knows of it.
        unsafe { libc::munmap(page, PAGE_BYTES) };
        return None;
    }
    let page = page.cast::<u8>();
    // SAFETY: the mapping made above is writable and at least one byte.
    unsafe { page.write_volatile(1) };
    Some(page)
}
