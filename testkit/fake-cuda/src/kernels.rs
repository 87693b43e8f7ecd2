//! Kernels: what they do here, found by their names. A module offers those of them that its image names.
//!
//! To add one: a function, and a line in [`KERNELS`].

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use cudarc::driver::sys::CUresult;

use crate::context::Context;
use crate::driver::{Answer, Driver};
use crate::memory::span::{Finder, Who};

/// A kernel that can be launched.
pub(crate) struct Kernel {
    /// As in the image.
    pub(crate) name: &'static str,
    /// Bytes of each parameter.
    pub(crate) parameters: &'static [usize],
    /// What the whole grid does.
    pub(crate) run: fn(&Arguments, &Machine<'_>) -> Answer,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All kernels.
const KERNELS: &[Kernel] = &[
    Kernel {
        name: "kvx_gather",
        parameters: &[8, 4, 8, 8, 4],
        run: |arguments, machine| pieces(arguments, machine, true),
    },
    Kernel {
        name: "kvx_scatter",
        parameters: &[8, 4, 8, 8, 4],
        run: |arguments, machine| pieces(arguments, machine, false),
    },
    Kernel {
        name: "kvx_fill",
        parameters: &[8, 8, 8, 4, 4, 8, 8],
        run: fill,
    },
    Kernel {
        name: "kvx_check",
        parameters: &[8, 8, 8, 4, 4, 8, 8],
        run: check,
    },
];

/// The kernel of that name.
pub(crate) fn find(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name)
}

/// A kernel of a loaded module.
#[derive(Debug)]
pub(crate) struct Function {
    /// What it does.
    pub(crate) kernel: &'static Kernel,
    /// Its module's handle.
    pub(crate) module: usize,
    /// Launches of it that run now: those that count their blocks in the module's own memory may not overlap.
    pub(crate) running: AtomicU32,
}

/// The parameters of a launch, as they were then.
#[derive(Debug)]
pub(crate) struct Arguments(pub(crate) Vec<[u8; 8]>);

impl Arguments {
    /// A pointer or another 64-bit parameter.
    pub(crate) fn u64(&self, index: usize) -> u64 {
        u64::from_le_bytes(self.0[index])
    }

    /// A 32-bit parameter.
    pub(crate) fn u32(&self, index: usize) -> u32 {
        self.u64(index) as u32
    }
}

/// What a kernel works on.
pub(crate) struct Machine<'a> {
    /// The driver.
    pub(crate) driver: &'a Driver,
    /// The context of the launch.
    pub(crate) context: &'a Arc<Context>,
    /// The test's engine launched it.
    pub(crate) engine: bool,
}

impl Machine<'_> {
    /// Reads memory.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Answer {
        let spans = {
            let world = self.driver.world.lock();
            self.finder().spans(&world.map, address, bytes.len() as u64)?
        };
        let mut rest = bytes;
        for span in spans {
            let (first, others) = rest.split_at_mut(span.length);
            span.get(first);
            rest = others;
        }
        Ok(())
    }

    /// Writes memory.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Answer {
        let spans = {
            let world = self.driver.world.lock();
            self.finder().spans(&world.map, address, bytes.len() as u64)?
        };
        let mut rest = bytes;
        for span in spans {
            let (first, others) = rest.split_at(span.length);
            span.put(first);
            rest = others;
        }
        Ok(())
    }

    /// Writes a word of 32 bits, which whoever polls it sees whole and after everything before it.
    pub(crate) fn write_word(&self, address: u64, value: u32) -> Answer {
        if !address.is_multiple_of(4) {
            return Err(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS);
        }
        let world = self.driver.world.lock();
        let span = self.finder().one(&world.map, address, 4)?;
        drop(world);
        span.put_word(u64::from(value));
        Ok(())
    }

    fn finder(&self) -> Finder<'_> {
        Finder::new(self.driver, self.context, Who::Kernel)
    }
}

/// `kvx_gather` and `kvx_scatter`: (pieces, count, staging, done, value). Copies every piece between device memory and
/// its place in staging, then writes `value` to `done`.
///
/// A piece is three words: device address, offset in staging (modulo 2^64), length.
fn pieces(arguments: &Arguments, machine: &Machine<'_>, gather: bool) -> Answer {
    const PIECE: usize = 24;
    let (list, count, staging) = (arguments.u64(0), arguments.u32(1) as usize, arguments.u64(2));
    let mut bytes = vec![0u8; count * PIECE];
    machine.read(list, &mut bytes)?;
    let mut copies = Vec::with_capacity(count);
    for piece in bytes.chunks_exact(PIECE) {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| piece[at * 8 + byte]));
        let (device, host, length) = (word(0), staging.wrapping_add(word(1)), word(2));
        let (to, from) = if gather { (host, device) } else { (device, host) };
        copies.push(crate::stream::Piece { to, from, length });
    }
    crate::work::copy(machine, Who::Kernel, &copies, true)?;
    machine.write_word(arguments.u64(3), arguments.u32(4))
}

/// Blocks as `kvx_fill` and `kvx_check` are told of them: (base, stride in words, list of 32-bit block ids, how many, words of
/// a block, seed, ...).
struct Blocks {
    addresses: Vec<u64>,
    words: u32,
    seed: u64,
}

impl Blocks {
    fn of(arguments: &Arguments, machine: &Machine<'_>) -> Answer<Blocks> {
        let mut list = vec![0; arguments.u32(3) as usize * 4];
        machine.read(arguments.u64(2), &mut list)?;
        let block = |id: &[u8]| u64::from(u32::from_le_bytes([id[0], id[1], id[2], id[3]]));
        let address = |id| arguments.u64(0) + 8 * arguments.u64(1) * block(id);
        Ok(Blocks {
            addresses: list.chunks_exact(4).map(address).collect(),
            words: arguments.u32(4),
            seed: arguments.u64(5),
        })
    }

    /// What a block has to hold.
    fn expected(&self, index: usize) -> Vec<u8> {
        let word = |word: u32| {
            let place = ((index as u64) << 32) + u64::from(word) + 1;
            let mut value = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(place));
            value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            value ^ (value >> 31)
        };
        (0..self.words).flat_map(|at| word(at).to_le_bytes()).collect()
    }
}

/// `kvx_fill`: fills blocks, after a wait of so many nanoseconds.
fn fill(arguments: &Arguments, machine: &Machine<'_>) -> Answer {
    std::thread::sleep(std::time::Duration::from_nanos(arguments.u64(6)));
    let blocks = Blocks::of(arguments, machine)?;
    for (index, &address) in blocks.addresses.iter().enumerate() {
        machine.write(address, &blocks.expected(index))?;
    }
    Ok(())
}

/// `kvx_check`: adds how many words of the blocks are wrong to a word of 64 bits.
fn check(arguments: &Arguments, machine: &Machine<'_>) -> Answer {
    let blocks = Blocks::of(arguments, machine)?;
    let mut wrong = 0u64;
    let mut found = vec![0; blocks.words as usize * 8];
    for (index, &address) in blocks.addresses.iter().enumerate() {
        machine.read(address, &mut found)?;
        let expected = blocks.expected(index);
        let pairs = found.chunks_exact(8).zip(expected.chunks_exact(8));
        wrong += pairs.filter(|(found, expected)| found != expected).count() as u64;
    }
    let mut count = [0; 8];
    machine.read(arguments.u64(6), &mut count)?;
    machine.write(arguments.u64(6), &(u64::from_le_bytes(count) + wrong).to_le_bytes())
}
