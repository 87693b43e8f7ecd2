//! Pools in the memory of fake GPUs, where a binary's tests are about that. Each test has a driver of its own.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer::{Endpoint, GrantOptions, Pool, PoolLayout, PushOptions, Role};
use kvxfer_fake_cuda::FakeCuda;
use kvxfer_testkit::gpus::Gpus;

use crate::place;

/// Tells a child process which driver its parent uses.
const DIRECTORY: &str = "KVXTEST_CUDA";

/// Tells a child process how late its driver's work is, in µs.
const DELAY: &str = "KVXTEST_CUDA_DELAY_US";

/// A test's devices, with how many sides use them.
pub struct Shared {
    pub gpus: Gpus,
    users: AtomicU32,
}

thread_local! {
    static SHARED: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

/// This test's.
pub fn gpus() -> Arc<Shared> {
    let open = || match std::env::var_os(DIRECTORY) {
        Some(directory) => Gpus::of(FakeCuda::attach(Path::new(&directory)).unwrap()),
        None => {
            // What a network device writes is not there before it is flushed.
            let ordering = if place().direct { "none" } else { "all" };
            let delay = std::env::var(DELAY).unwrap_or_else(|_| "0".into());
            Gpus::new(&[("*", "writes_ordering", ordering), ("*", "op_delay_us", &delay)])
        }
    };
    let share = || {
        Arc::new(Shared {
            // Mapped by the other side, or staged for it.
            gpus: match place().mapped {
                true => open().shared(),
                false => open(),
            },
            users: AtomicU32::new(0),
        })
    };
    SHARED.with_borrow_mut(|shared| shared.get_or_insert_with(share).clone())
}

/// The next test makes its own.
pub(crate) fn forget() {
    SHARED.take();
}

/// What child processes must know.
pub fn variables() -> Vec<(String, String)> {
    if place().pools == "host" {
        return Vec::new();
    }
    let directory = gpus().gpus.fake.directory().to_str().unwrap().to_owned();
    vec![(DIRECTORY.to_owned(), directory)]
}

/// Whether the pools of an endpoint of that name are on a device: those who take, or those who give, or all.
fn on_device(name: &str) -> bool {
    match place().pools {
        "host" => false,
        "source" => !super::takes(name),
        "destination" => super::takes(name),
        _ => true,
    }
}

/// Where sides map each other's memory: has the second map the first one's, so that nothing is staged from here on.
pub fn map(from: &super::Side, to: &super::Side) {
    if !place().mapped {
        return;
    }
    let all = super::tokens(super::BLOCKS * super::PER_BLOCK, 0..super::BLOCKS);
    super::eventually("memory is mapped", || {
        let grant = to.pool.grant(all.clone(), GrantOptions::default()).unwrap();
        from.endpoint.connect(&to.endpoint.address(), super::LONG).unwrap();
        let push = from
            .endpoint
            .push(&from.pool, all.clone(), grant.grant(), PushOptions::default());
        push.unwrap().done().wait(super::LONG).unwrap();
        super::metric_sum(&to.endpoint, "kvxfer_rail_referred_bytes_total", "received") > 0.0
    });
}

/// Says at the end of a side, that nothing was wrong; at the end of the last, that nothing is left.
pub struct Used(Option<Arc<Shared>>);

impl Used {
    /// By an endpoint of that name.
    pub fn by(name: &str) -> Used {
        let shared = on_device(name).then(gpus);
        if let Some(shared) = &shared {
            shared.users.fetch_add(1, Ordering::SeqCst);
        }
        Used(shared)
    }

    /// A pool of that endpoint.
    pub fn pool(&self, endpoint: &Endpoint, layout: PoolLayout, role: Role) -> Pool {
        let Some(shared) = &self.0 else {
            return endpoint.allocate(layout, role).unwrap();
        };
        let lengths = layout.region_lengths().to_vec();
        let regions = lengths.into_iter().map(|length| shared.gpus.region(length)).collect();
        // SAFETY: the regions own their memory; tests touch it through them.
        unsafe { endpoint.register(layout, regions, role) }.unwrap()
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        let Some(shared) = &self.0 else { return };
        let last = shared.users.fetch_sub(1, Ordering::SeqCst) == 1;
        if std::thread::panicking() {
            return;
        }
        if last {
            shared.gpus.end_well();
        } else {
            shared.gpus.assert_clean();
        }
    }
}

/// Whether a test of this binary fails if calls of the driver are as if the library had this defect. It passes without.
pub fn fails_under(test: &str, defect: &str) -> bool {
    let passes = |defect: &str| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--test-threads=1"]);
        // Whoever does not wait for it is too early, however busy the machine is.
        command.env(DELAY, "2000");
        let output = command.env("KVXFER_FAKE_CUDA_DEFECT", defect).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        // A process that died, or ran nothing, has not caught anything.
        let ran = said.contains("1 passed") || said.contains("1 failed");
        assert!(ran, "{test} under {defect}: {}\n{said}", output.status);
        output.status.success()
    };
    passes("off") && !passes(defect)
}
