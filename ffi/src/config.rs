//! Settings of an endpoint, before it is created.

use std::ffi::c_char;
use std::path::Path;

use kvxfer::{Config, RankCoordinates, Result};
use parking_lot::Mutex;

use crate::call::call;
use crate::input::{self, NAME_BYTES_MAX, TOML_BYTES_MAX, VALUE_BYTES_MAX};
use crate::output::{Out, OutText};
use crate::status::kvx_status;
use crate::table;

/// Settings of endpoints to be created. Used once or several times; freed by kvx_config_free.
pub type kvx_config = u64;

/// What is behind a config handle.
pub struct Settings(Mutex<(Config, RankCoordinates)>);

impl Settings {
    fn insert(config: Config, out: &Out<u64>) -> Result<()> {
        out.put(table::insert(Settings(Mutex::new((
            config,
            RankCoordinates::default(),
        ))))?);
        Ok(())
    }

    pub(crate) fn get(&self) -> (Config, RankCoordinates) {
        self.0.lock().clone()
    }
}

/// The defaults with the KVXFER_... environment variables over them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_config_create(config: *mut kvx_config) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::handle("config", config)? };
        Settings::insert(Config::from_env()?, &out)
    })
}

/// The settings in this TOML text (docs/configuration.md has all keys) over the defaults. The environment is not read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_config_from_toml(text: *const c_char, config: *mut kvx_config) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, text) = unsafe {
            (
                Out::handle("config", config)?,
                input::text("text", text, TOML_BYTES_MAX)?,
            )
        };
        Settings::insert(Config::from_toml_str(text)?, &out)
    })
}

/// The KVXFER_... environment variables over the settings in this TOML file over the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_config_load(path: *const c_char, config: *mut kvx_config) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, path) = unsafe {
            (
                Out::handle("config", config)?,
                input::text("path", path, VALUE_BYTES_MAX)?,
            )
        };
        Settings::insert(Config::load(Path::new(path))?, &out)
    })
}

/// Sets one key from text, over everything before: "name" to "decode-0", "listen" to "0.0.0.0:7700", "transports" to
/// "rdma,tcp", "security.off_loopback" to "insecure-allowed", "limits.slots_max" to "512". Values that contradict each
/// other are found when the endpoint is created.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_config_set(config: kvx_config, key: *const c_char, value: *const c_char) -> kvx_status {
    call(|| {
        let settings = table::get::<Settings>(config)?;
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (key, value) = unsafe {
            (
                input::text("key", key, NAME_BYTES_MAX)?,
                input::text("value", value, VALUE_BYTES_MAX)?,
            )
        };
        settings.0.lock().0.set(key, value)
    })
}

/// Says where the endpoint stands in its engine: its ranks, and how many there are (at least 1 each).
#[unsafe(no_mangle)]
pub extern "C" fn kvx_config_set_rank(
    config: kvx_config,
    tensor_rank: u16,
    tensor_size: u16,
    pipeline_rank: u16,
    pipeline_size: u16,
) -> kvx_status {
    call(|| {
        let settings = table::get::<Settings>(config)?;
        for (what, rank, size) in [
            ("tensor", tensor_rank, tensor_size),
            ("pipeline", pipeline_rank, pipeline_size),
        ] {
            if rank >= size {
                return Err(kvxfer::Error::new(
                    kvxfer::ErrorKind::InvalidArgument,
                    format!("{what} rank {rank} of {size}"),
                )
                .because("ranks count from 0 to size - 1")
                .remedy("give a rank below the size"));
            }
        }
        settings.0.lock().1 = RankCoordinates {
            tensor: (tensor_rank, tensor_size),
            pipeline: (pipeline_rank, pipeline_size),
        };
        Ok(())
    })
}

/// Checks all settings together, as kvx_endpoint_create does.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_config_check(config: kvx_config) -> kvx_status {
    call(|| table::get::<Settings>(config)?.get().0.validate())
}

/// Every key with its environment variable, default, range and meaning, as a Markdown table. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_config_reference(buffer: *mut c_char, capacity: usize) -> i64 {
    call(|| {
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        Ok(out.put(&Config::reference()))
    })
}

/// Frees a config. Endpoints made from it are not touched.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_config_free(config: kvx_config) -> kvx_status {
    call(|| table::remove::<Settings>(config).map(drop))
}
