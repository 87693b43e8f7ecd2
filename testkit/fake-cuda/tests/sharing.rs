//! Memory that others reach: mappings, dmabufs, other processes, other devices, network devices.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::fs::File;
use std::io::BufRead;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use common::{Driver, OK, host_bytes};
use cudarc::driver::sys::CUresult;
use kvxfer_fake_cuda::FakeCuda;
use kvxfer_testkit::process::{ChildProcess, role};

const BLOCK: usize = 2 << 20;
const PAGE: usize = 4096;

/// `CUipcMemHandle`.
#[repr(C)]
struct IpcHandle([u64; 8]);

/// What a network device has of a dmabuf: a mapping.
struct Mapped {
    base: *mut u8,
    length: usize,
}

impl Mapped {
    fn new(fd: &OwnedFd, offset: usize, length: usize) -> Mapped {
        use std::io::Seek;
        let first = File::from(fd.try_clone().unwrap()).stream_position().unwrap() as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let at = (first + offset) as libc::off_t;
        // SAFETY: a new mapping, wherever the system wants it.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                at,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        Mapped {
            base: base.cast(),
            length,
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.length);
        // SAFETY: inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(offset), bytes.len()) };
    }

    fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.length);
        // SAFETY: inside the mapping.
        unsafe { std::slice::from_raw_parts(self.base.add(offset), length) }.to_vec()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.base.cast(), self.length) };
    }
}

fn export(driver: &Driver, address: u64, length: usize, flags: u64) -> Result<OwnedFd, CUresult> {
    let mut fd = -1i32;
    let answer = cu!(driver, cuMemGetHandleForAddressRange(
        &raw mut fd => *mut i32, address => u64, length => usize, 1 => u32, flags => u64
    ));
    if answer == OK {
        // SAFETY: made for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    } else {
        Err(answer)
    }
}

#[test]
fn a_dmabuf_is_the_memory_itself() {
    let fake = FakeCuda::with(&[("gpu0", "alloc_offset", "512")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let device = driver.allocate(5 * PAGE);
    let first = device - 512;
    assert_eq!(
        export(&driver, device, PAGE, 0).unwrap_err(),
        CUresult::CUDA_ERROR_INVALID_VALUE,
        "not on a page"
    );
    let beyond = export(&driver, first, 2 * BLOCK, 0).unwrap_err();
    assert_eq!(beyond, CUresult::CUDA_ERROR_INVALID_VALUE);
    // Rounded out to pages, from its second page on.
    let fd = export(&driver, first + PAGE as u64, 5 * PAGE, 1).unwrap();
    let mapped = Mapped::new(&fd, 0, 5 * PAGE);
    drop(fd);
    mapped.write(10, b"network");
    assert_eq!(fake.read(first + PAGE as u64 + 10, 7).unwrap(), b"network");
    fake.write(first + PAGE as u64 + 100, b"device").unwrap();
    assert_eq!(mapped.read(100, 6), b"device");
    // The network device keeps what it has, whatever becomes of the addresses.
    assert_eq!(driver.free(device), OK);
    let again = driver.allocate(5 * PAGE);
    assert_eq!(again, device);
    mapped.write(0, b"late");
    assert_eq!(fake.read(first + PAGE as u64, 4).unwrap(), [0; 4]);
    fake.set("*", "dmabuf", "off").unwrap();
    assert_eq!(
        export(&driver, first, PAGE, 0).unwrap_err(),
        CUresult::CUDA_ERROR_NOT_SUPPORTED
    );
    fake.assert_clean();
}

#[test]
fn network_writes_are_seen_after_a_flush_where_they_need_one() {
    let fake = FakeCuda::with(&[("*", "writes_ordering", "none")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let (device, host, stream) = (driver.allocate(BLOCK), driver.host(PAGE), driver.stream());
    fake.write(device, b"before").unwrap();
    let fd = export(&driver, device, BLOCK, 0).unwrap();
    let mapped = Mapped::new(&fd, 0, BLOCK);
    assert_eq!(mapped.read(0, 6), b"before");
    mapped.write(PAGE, b"network");
    fake.write(device, b"after!").unwrap();
    assert_eq!(
        mapped.read(0, 6),
        b"after!",
        "the device's writes are seen by the network"
    );
    assert_eq!(driver.copy(host, device + PAGE as u64, 7, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(host_bytes(host, 7), [0; 7], "and not the reverse");
    let flush = || cu!(driver, cuFlushGPUDirectRDMAWrites(0 => u32, 100 => u32));
    assert_eq!(flush(), OK);
    assert_eq!(driver.copy(host, device + PAGE as u64, 7, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(host_bytes(host, 7), b"network");
    assert_eq!(fake.read(device, 6).unwrap(), b"after!");
    fake.set("*", "flush_options", "none").unwrap();
    assert_eq!(flush(), CUresult::CUDA_ERROR_NOT_SUPPORTED);
    fake.assert_clean();
}

#[test]
fn mappings_are_contiguous_addresses_of_several_memories() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let engine = fake.engine(0).unwrap();
    let lengths = [BLOCK, 2 * BLOCK, BLOCK];
    let start = engine.map(&lengths, true).unwrap();
    let inside = start + (BLOCK + 5) as u64;
    assert_eq!(
        driver.attribute::<u64>(inside, 11),
        Ok(start + BLOCK as u64),
        "its own mapping"
    );
    assert_eq!(driver.attribute::<u64>(inside, 12), Ok(2 * BLOCK as u64));
    assert_eq!(driver.attribute::<u64>(inside, 1), Ok(0), "of no context");
    assert_eq!(
        driver.attribute::<u8>(inside, 10),
        Ok(0),
        "not for other processes by legacy handles"
    );
    assert_eq!(driver.attribute::<u8>(inside, 15), Ok(1), "but for network devices");
    // A copy may cross them; a dmabuf may not.
    let (host, stream) = (driver.host(4 * BLOCK), driver.stream());
    fake.write(start + BLOCK as u64 - 2, &[1, 2, 3, 4]).unwrap();
    assert_eq!(driver.copy(host, start, 4 * BLOCK, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(host_bytes(host + BLOCK as u64 - 2, 4), [1, 2, 3, 4]);
    assert_eq!(
        export(&driver, start, 2 * BLOCK, 0).unwrap_err(),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    let fd = export(&driver, start + (2 * BLOCK) as u64, BLOCK, 0).unwrap();
    Mapped::new(&fd, 0, BLOCK).write(0, b"network");
    assert_eq!(fake.read(start + (2 * BLOCK) as u64, 7).unwrap(), b"network");
    engine.unmap(start, &lengths).unwrap();
    assert_eq!(
        driver.attribute::<u64>(inside, 11),
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    );
    // Without the flag, network devices do not reach it.
    let start = engine.map(&[BLOCK], false).unwrap();
    assert_eq!(
        export(&driver, start, BLOCK, 0).unwrap_err(),
        CUresult::CUDA_ERROR_NOT_SUPPORTED
    );
    // Nor does another device's work.
    driver.context(1);
    let stream = driver.stream();
    assert_eq!(
        driver.copy(host, start, PAGE, stream),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    engine.unmap(start, &[BLOCK]).unwrap();
}

#[test]
fn what_the_pool_gives_is_of_no_context() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let engine = fake.engine(0).unwrap();
    let address = engine.allocate_from_pool(PAGE, engine.stream().unwrap()).unwrap();
    assert_eq!(driver.attribute::<u64>(address, 1), Ok(0));
    assert_ne!(driver.attribute::<u64>(address, 17), Ok(0));
    assert_eq!(
        export(&driver, address, PAGE, 0).unwrap_err(),
        CUresult::CUDA_ERROR_NOT_SUPPORTED
    );
    let mut handle = [0u64; 8];
    let answer = cu!(driver, cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u64, address => u64));
    assert_eq!(answer, CUresult::CUDA_ERROR_INVALID_VALUE);
    engine.free(address).unwrap();
    let managed = engine.allocate_managed(PAGE).unwrap();
    assert_eq!(driver.attribute::<u8>(managed, 8), Ok(1));
    engine.free(managed).unwrap();
    fake.assert_clean();
}

#[test]
fn kernels_reach_other_devices_if_they_may() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    let other = driver.context(1);
    let far = driver.allocate(PAGE);
    let own = driver.context(0);
    let (near, stream) = (driver.allocate(PAGE), driver.stream());
    // Copies always do.
    fake.write(far, b"far").unwrap();
    assert_eq!(driver.copy(near, far, PAGE, stream), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(fake.read(near, 3).unwrap(), b"far");
    let peer = |to: u64, to_context: usize| {
        cu!(driver, cuMemcpyPeerAsync(
            to => u64, to_context => usize, far => u64, other => usize, PAGE => usize, stream => usize
        ))
    };
    assert_eq!(peer(near, own), OK);
    fake.assert_clean();
    assert_eq!(peer(near, other), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(fake.violations().len(), 1);
    assert_eq!(driver.drain(stream), OK);
    let write = || cu!(driver, cuStreamWriteValue32_v2(stream => usize, far => u64, 1 => u32, 0 => u32));
    assert_eq!(write(), CUresult::CUDA_ERROR_INVALID_VALUE);
    let mut can = 0i32;
    assert_eq!(
        cu!(driver, cuDeviceCanAccessPeer(&raw mut can => *mut i32, 0 => i32, 1 => i32)),
        OK
    );
    assert_eq!(can, 1);
    assert_eq!(cu!(driver, cuCtxEnablePeerAccess(other => usize, 0 => u32)), OK);
    assert_eq!(write(), OK);
    assert_eq!(driver.drain(stream), OK);
    assert_eq!(fake.read(far, 4).unwrap(), 1u32.to_le_bytes());
    let twice = cu!(driver, cuCtxEnablePeerAccess(other => usize, 0 => u32));
    assert_eq!(twice, CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    assert_eq!(cu!(driver, cuCtxDisablePeerAccess(other => usize)), OK);
    assert_eq!(write(), CUresult::CUDA_ERROR_INVALID_VALUE);
}

/// Opens memory of its parent, twice, reads it, writes it, and closes it.
#[test]
#[ignore = "started by the tests below"]
fn child_main() {
    if role().as_deref() != Some("importer") {
        return;
    }
    let fake = FakeCuda::attach(Path::new(&std::env::var("FAKE").unwrap())).unwrap();
    let driver = Driver::load(&fake);
    driver.context(1);
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let mut handle = [0u64; 8];
        for (word, text) in handle.iter_mut().zip(line.split(' ')) {
            *word = text.parse().unwrap();
        }
        let open = || {
            let mut address = 0u64;
            let answer = cu!(driver, cuIpcOpenMemHandle_v2(&raw mut address => *mut u64, IpcHandle(handle) => IpcHandle, 1 => u32));
            (answer, address)
        };
        let (answer, address) = open();
        if answer != OK {
            println!("refused {answer:?}");
            continue;
        }
        assert_eq!(open(), (OK, address));
        assert!(!common::is_readable(address));
        let close = || cu!(driver, cuIpcCloseMemHandle(address => u64));
        assert_eq!(close(), OK);
        println!("read {}", fake.read(address + 9, 1).unwrap()[0]);
        fake.write(address + 9, &[77]).unwrap();
        assert_eq!(close(), OK);
        assert_eq!(close(), CUresult::CUDA_ERROR_INVALID_VALUE);
        println!("closed");
    }
}

#[test]
fn another_process_opens_memory_until_it_is_freed() {
    let fake = FakeCuda::with(&[("*", "alloc_offset", "512")]).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let device = driver.allocate(PAGE);
    fake.write(device + 9, &[55]).unwrap();
    let mut handle = [0u64; 8];
    let answer = cu!(driver, cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u64, device + 100 => u64));
    assert_eq!(answer, OK);
    let own =
        cu!(driver, cuIpcOpenMemHandle_v2(&raw mut handle[7] => *mut u64, IpcHandle(handle) => IpcHandle, 1 => u32));
    assert_eq!(own, CUresult::CUDA_ERROR_INVALID_CONTEXT, "not in the same process");
    let directory = fake.directory().to_str().unwrap().to_owned();
    let mut child = ChildProcess::test("child_main", "importer", &[("FAKE", &directory)]).unwrap();
    let limit = Duration::from_secs(10);
    child.expect_line("ready", limit).unwrap();
    let text = handle.map(|word| word.to_string()).join(" ");
    child.say(&text).unwrap();
    assert_eq!(child.expect_line("read", limit).unwrap(), "read 55");
    child.expect_line("closed", limit).unwrap();
    assert_eq!(fake.read(device + 9, 1).unwrap(), [77]);
    assert!(!fake.violations().iter().any(|what| what.contains("have it open")));
    assert_eq!(driver.free(device), OK);
    child.say(&text).unwrap();
    assert_eq!(
        child.expect_line("refused", limit).unwrap(),
        "refused CUDA_ERROR_INVALID_VALUE"
    );
    // What the child did twice is known here too.
    assert!(fake.violations().iter().any(|what| what.contains("freed twice")));
}

/// Opens memory of its parent and keeps it.
#[test]
#[ignore = "started by the test below"]
fn child_that_keeps() {
    if role().as_deref() != Some("keeper") {
        return;
    }
    let fake = FakeCuda::attach(Path::new(&std::env::var("FAKE").unwrap())).unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let mut handle = [0u64; 8];
    let text = std::env::var("HANDLE").unwrap();
    for (word, text) in handle.iter_mut().zip(text.split(' ')) {
        *word = text.parse().unwrap();
    }
    let mut address = 0u64;
    let answer =
        cu!(driver, cuIpcOpenMemHandle_v2(&raw mut address => *mut u64, IpcHandle(handle) => IpcHandle, 1 => u32));
    assert_eq!(answer, OK);
    println!("opened");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn memory_that_another_process_has_open_may_not_be_freed() {
    let fake = FakeCuda::new().unwrap();
    let driver = Driver::load(&fake);
    driver.context(0);
    let directory = fake.directory().to_str().unwrap().to_owned();
    for killed in [true, false] {
        let device = driver.allocate(PAGE);
        let mut handle = [0u64; 8];
        let answer = cu!(driver, cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u64, device => u64));
        assert_eq!(answer, OK);
        let text = handle.map(|word| word.to_string()).join(" ");
        let variables = [("FAKE", directory.as_str()), ("HANDLE", text.as_str())];
        let mut child = ChildProcess::test("child_that_keeps", "keeper", &variables).unwrap();
        child.expect_line("opened", Duration::from_secs(10)).unwrap();
        if killed {
            child.kill();
        }
        assert_eq!(driver.free(device), OK);
        let noted = fake.violations().iter().any(|what| what.contains("have it open"));
        assert_eq!(noted, !killed);
    }
}
