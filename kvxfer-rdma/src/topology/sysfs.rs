//! Reading places from sysfs, and the NUMA node of memory from the kernel. What cannot be read is unknown.

use std::fs;
use std::path::{Path, PathBuf};

use super::{MemoryPlace, NicPlace, PciAddress, PciPath};
use crate::verbs::Context;

/// Pages of a range that are asked for their node.
const SAMPLES: u64 = 16;

/// Where an opened RDMA device is.
pub fn nic_place(context: &Context) -> NicPlace {
    place_of(&context.sysfs_path().join("device"))
}

/// Where the device with this sysfs directory (`/sys/class/infiniband/mlx5_0/device`, `/sys/bus/pci/devices/…`) is.
pub fn place_of(device: &Path) -> NicPlace {
    let target: Option<PathBuf> = fs::canonicalize(device).ok();
    NicPlace {
        node: number(&device.join("numa_node")),
        pci: target.and_then(|path| PciPath::parse(&path.to_string_lossy())),
    }
}

/// Where the memory of the PCI device at this address is. `sysfs` is `/sys`, or a copy of it.
pub fn device_memory_place(sysfs: &Path, address: PciAddress) -> MemoryPlace {
    let NicPlace { node, pci } = place_of(&sysfs.join(format!("bus/pci/devices/{address}")));
    MemoryPlace::Device { node, pci }
}

/// The NUMA node of most of a few pages, spread over the range, of host memory. Unknown if no page was touched yet, or the
/// kernel does not say.
pub fn host_memory_place(address: u64, length: u64) -> MemoryPlace {
    let page = rustix::param::page_size() as u64;
    let pages = length.div_ceil(page).max(1);
    let step = pages.div_ceil(SAMPLES);
    let first = address - address % page;
    let samples: Vec<u64> = (0..pages)
        .step_by(step as usize)
        .map(|index| first + index * page)
        .collect();
    MemoryPlace::Host {
        node: most_frequent(&nodes_of(&samples)),
    }
}

/// The node of each page; less than 0 where there is none.
fn nodes_of(pages: &[u64]) -> Vec<i32> {
    let mut nodes = vec![-1i32; pages.len()];
    // SAFETY: with a null list of target nodes the call moves nothing: it reads `pages.len()` addresses, which need not
    // be mapped, and writes as many 32-bit results to `nodes`, which has that length.
    let code = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0 as libc::c_long,
            pages.len() as libc::c_ulong,
            pages.as_ptr(),
            std::ptr::null::<libc::c_int>(),
            nodes.as_mut_ptr(),
            0 as libc::c_long,
        )
    };
    if code == 0 { nodes } else { Vec::new() }
}

fn most_frequent(nodes: &[i32]) -> Option<u32> {
    let known = nodes.iter().filter_map(|&node| u32::try_from(node).ok());
    known.clone().max_by_key(|node| {
        let count = known.clone().filter(|other| other == node).count();
        (count, std::cmp::Reverse(*node))
    })
}

/// A number that is not negative; sysfs says -1 for "no node".
fn number(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory of its own below the build's temporary directory, removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("kvxfer-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn places_are_read_from_a_copy_of_sysfs() {
        let scratch = Scratch::new("sysfs");
        let device = scratch.0.join("devices/pci0000:16/0000:16:01.0/0000:17:00.0");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), "1\n").unwrap();
        let links = scratch.0.join("bus/pci/devices");
        fs::create_dir_all(&links).unwrap();
        symlink(&device, links.join("0000:17:00.0")).unwrap();
        let address = PciAddress::parse("17:00.0").unwrap();
        let MemoryPlace::Device { node, pci } = device_memory_place(&scratch.0, address) else {
            panic!("not a device");
        };
        assert_eq!(node, Some(1));
        assert_eq!(pci.unwrap().functions[1], address);
        fs::write(device.join("numa_node"), "-1\n").unwrap();
        assert_eq!(place_of(&device).node, None, "-1 is no node");
        assert_eq!(place_of(&scratch.0.join("nothing")), NicPlace::default());
    }

    #[test]
    fn touched_memory_has_a_node_where_the_kernel_says_so() {
        let memory = vec![1u8; 1 << 20];
        let place = host_memory_place(memory.as_ptr() as u64, memory.len() as u64);
        match place {
            MemoryPlace::Host { node: Some(node) } => assert!(node < 1024),
            other => assert_eq!(other, MemoryPlace::Host { node: None }),
        }
        assert_eq!(
            host_memory_place(0, 4096),
            MemoryPlace::Host { node: None },
            "not mapped"
        );
    }

    #[test]
    fn the_most_frequent_node_wins() {
        assert_eq!(most_frequent(&[0, 1, 1, -2, -2, -2]), Some(1));
        assert_eq!(most_frequent(&[1, 0]), Some(0));
        assert_eq!(most_frequent(&[-14]), None);
    }
}
