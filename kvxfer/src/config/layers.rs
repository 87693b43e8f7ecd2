//! Merging the layers of a configuration, and checking the result against the schema.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;

use serde::Deserialize;
use toml::{Table, Value};

use kvxfer_core::{Error, ErrorKind, Result};

use super::Config;
use super::schema::{KEYS, Key, Kind, Steps, nearest, variable};

/// Where each value that is not a default came from. Not part of what a configuration *is*: equality ignores it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources(BTreeMap<&'static str, (Value, String)>);

impl PartialEq for Sources {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// Bytes of a configuration file, at most: what is named by mistake may not end.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A configuration being put together, lowest layer first.
pub(crate) struct Layers {
    table: Table,
    sources: Sources,
}

impl Layers {
    pub(crate) fn new() -> Layers {
        Layers {
            table: Table::new(),
            sources: Sources::default(),
        }
    }

    pub(crate) fn file(self, path: &Path) -> Result<Layers> {
        let source = path.display().to_string();
        let refused = |why: String| {
            Error::new(ErrorKind::InvalidArgument, "the configuration file cannot be read")
                .at(source.clone())
                .because(why)
                .remedy("name a readable file of at most 1 MiB")
        };
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text))
            .map_err(|error| refused(error.to_string()))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(refused("it is longer than 1 MiB".into()));
        }
        self.file_text(&text, &source)
    }

    pub(crate) fn file_text(mut self, text: &str, source: &str) -> Result<Layers> {
        let table: Table = toml::from_str(text).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, "the configuration is not TOML")
                .at(source)
                .because(error.to_string().trim_end().to_owned())
                .remedy("correct the line that is shown")
        })?;
        self.add_table("", table, source)?;
        Ok(self)
    }

    pub(crate) fn variables(mut self, variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Layers> {
        for (name, text) in variables {
            let Some(name) = name.to_str().filter(|name| name.starts_with("KVXFER_")) else {
                continue;
            };
            let Some(key) = KEYS.iter().find(|key| variable(key.path) == name) else {
                let names: Vec<String> = KEYS.iter().map(|key| variable(key.path)).collect();
                return Err(unknown(
                    name,
                    "environment",
                    nearest(name, names.iter().map(String::as_str)),
                ));
            };
            let Some(text) = text.to_str() else {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("the value of {name}"))
                    .at("environment")
                    .because("it is not UTF-8"));
            };
            let value = from_text(key, text, name)?;
            self.set(key, value, name)?;
        }
        Ok(self)
    }

    pub(crate) fn finish(self) -> Result<Config> {
        let mut config = Config::deserialize(Value::Table(self.table)).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, "the configuration").because(error.to_string().trim_end().to_owned())
        })?;
        config.sources = self.sources;
        config.validate()?;
        Ok(config)
    }

    fn add_table(&mut self, prefix: &str, table: Table, source: &str) -> Result<()> {
        for (name, value) in table {
            let path = if prefix.is_empty() {
                name
            } else {
                format!("{prefix}.{name}")
            };
            if let Some(key) = KEYS.iter().find(|key| key.path == path) {
                self.set(key, value, source)?;
                continue;
            }
            let section = format!("{path}.");
            match value {
                Value::Table(inner) if KEYS.iter().any(|key| key.path.starts_with(&section)) => {
                    self.add_table(&path, inner, source)?;
                }
                _ => return Err(unknown(&path, source, nearest(&path, known_paths()))),
            }
        }
        Ok(())
    }

    fn set(&mut self, key: &'static Key, value: Value, source: &str) -> Result<()> {
        let value = shaped(key, value, source)?;
        check(key, &value, source)?;
        let mut table = &mut self.table;
        let (section, name) = key.path.rsplit_once('.').unwrap_or(("", key.path));
        if !section.is_empty() {
            let entry = table
                .entry(section.to_owned())
                .or_insert_with(|| Value::Table(Table::new()));
            let Value::Table(inner) = entry else {
                return Err(refuse(key, "a section", source, "its section is a plain value"));
            };
            table = inner;
        }
        table.insert(name.to_owned(), value.clone());
        self.sources.0.insert(key.path, (value, source.to_owned()));
        Ok(())
    }
}

/// One key of a configuration, from text.
pub(crate) fn set(config: &mut Config, path: &str, text: &str) -> Result<()> {
    const SOURCE: &str = "code";
    let Some(key) = KEYS.iter().find(|key| key.path == path) else {
        return Err(unknown(path, SOURCE, nearest(path, known_paths())));
    };
    let table = Table::try_from(&*config).map_err(not_whole)?;
    let sources = config.sources.clone();
    let mut layers = Layers { table, sources };
    layers.set(key, from_text(key, text, SOURCE)?, SOURCE)?;
    let mut changed = Config::deserialize(Value::Table(layers.table)).map_err(|error| {
        Error::new(ErrorKind::InvalidArgument, "the configuration").because(error.to_string().trim_end().to_owned())
    })?;
    changed.sources = layers.sources;
    *config = changed;
    Ok(())
}

/// A value as a variable gives it.
fn from_text(key: &'static Key, text: &str, source: &str) -> Result<Value> {
    match (key.kind, whole_number(text)) {
        (Kind::Integer { .. } | Kind::AutoOr { .. }, Some(number)) => Ok(Value::Integer(number)),
        (Kind::Integer { .. }, None) => Err(refuse(key, &format!("{text:?}"), source, "it is not a whole number")),
        (Kind::Flag, _) => match text.parse() {
            Ok(flag) => Ok(Value::Boolean(flag)),
            Err(_) => Err(refuse(
                key,
                &format!("{text:?}"),
                source,
                "it is neither true nor false",
            )),
        },
        _ => Ok(Value::String(text.to_owned())),
    }
}

/// A number that TOML cannot say.
fn not_whole(error: toml::ser::Error) -> Error {
    Error::new(ErrorKind::InvalidArgument, "the configuration")
        .at("code")
        .because(error.to_string())
        .remedy("keep numbers below 2^63")
}

/// A number as TOML writes them: decimal, or hexadecimal after `0x`.
fn whole_number(text: &str) -> Option<i64> {
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Keys and sections, for suggestions.
fn known_paths() -> impl Iterator<Item = &'static str> {
    let sections = KEYS
        .iter()
        .filter_map(|key| key.path.rsplit_once('.').map(|(section, _)| section));
    KEYS.iter().map(|key| key.path).chain(sections)
}

/// The value at a path.
pub(crate) fn lookup<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    match path.split_once('.') {
        Some((section, rest)) => lookup(table.get(section)?.as_table()?, rest),
        None => table.get(path),
    }
}

pub(crate) fn validate(config: &Config) -> Result<()> {
    let table = Table::try_from(config).map_err(not_whole)?;
    let defaults = Table::try_from(Config::default()).map_err(not_whole)?;
    for key in KEYS {
        let Some(value) = lookup(&table, key.path) else {
            continue;
        };
        let source = match config.sources.0.get(key.path) {
            Some((loaded, source)) if loaded == value => source,
            _ if lookup(&defaults, key.path) == Some(value) => "default",
            _ => "code",
        };
        check(key, value, source)?;
    }
    check_together(config)
}

/// What no single value shows.
fn check_together(config: &Config) -> Result<()> {
    let contradiction = |what: String, remedy: &str| Err(Error::new(ErrorKind::InvalidArgument, what).remedy(remedy));
    let deadlines = &config.deadlines;
    if deadlines.heartbeat_ms.saturating_mul(3) > deadlines.liveness_ms {
        return contradiction(
            format!(
                "deadlines.heartbeat_ms = {} with deadlines.liveness_ms = {}",
                deadlines.heartbeat_ms, deadlines.liveness_ms
            ),
            "make the heartbeat at most a third of the liveness, so that two lost ones do not lose the peer",
        );
    }
    if config.tcp.window_bytes_min > config.tcp.window_bytes_max {
        return contradiction(
            format!(
                "tcp.window_bytes_min = {} with tcp.window_bytes_max = {}",
                config.tcp.window_bytes_min, config.tcp.window_bytes_max
            ),
            "make the least window at most the greatest",
        );
    }
    config.rdma.check_together()?;
    if config.rdma.revoke_ms > deadlines.liveness_ms {
        return contradiction(
            format!(
                "rdma.revoke_ms = {} with deadlines.liveness_ms = {}",
                config.rdma.revoke_ms, deadlines.liveness_ms
            ),
            "make the time to stop at most the liveness, or a dead peer's blocks come back later than it is lost",
        );
    }
    if config.transports.len() > 1 && config.transports.iter().any(|name| name == "auto") {
        return contradiction(
            format!("transports = {:?}", config.transports),
            "`auto` stands alone: it tries all; or name the ones you want, in order",
        );
    }
    if config.transports.is_empty() {
        return contradiction("transports = []".into(), "name at least one, or \"auto\"");
    }
    Ok(())
}

/// Brings a value into the shape the schema has: lists may be written as one text with commas.
fn shaped(key: &'static Key, value: Value, source: &str) -> Result<Value> {
    match (key.kind, value) {
        (Kind::Addresses { .. } | Kind::Names { .. }, Value::String(text)) => Ok(Value::Array(
            text.split(',')
                .map(str::trim)
                .filter(|item| !item.is_empty())
                .map(|item| Value::String(item.to_owned()))
                .collect(),
        )),
        (Kind::Addresses { .. } | Kind::Names { .. }, list @ Value::Array(_))
        | (Kind::Integer { .. } | Kind::AutoOr { .. }, list @ Value::Integer(_))
        | (Kind::Flag, list @ Value::Boolean(_))
        | (Kind::Text { .. } | Kind::Choice(_) | Kind::AutoOr { .. }, list @ Value::String(_)) => Ok(list),
        (_, other) => Err(refuse(
            key,
            &other.to_string(),
            source,
            &format!("it is a {}", other.type_str()),
        )),
    }
}

fn check(key: &'static Key, value: &Value, source: &str) -> Result<()> {
    let shown = value.to_string();
    let refuse = |why: &str| Err(refuse(key, &shown, source, why));
    let items = |max: usize| -> std::result::Result<Vec<&str>, &'static str> {
        let list = value.as_array().ok_or("it is not a list")?;
        if list.len() > max {
            return Err("the list is too long");
        }
        list.iter()
            .map(|item| item.as_str().ok_or("its items are not all texts"))
            .collect()
    };
    match key.kind {
        Kind::Text { bytes_max } => match value.as_str() {
            Some(text) if text.len() <= bytes_max => Ok(()),
            _ => refuse("it is too long"),
        },
        Kind::Addresses { min, max } => match items(max) {
            Ok(list) if list.len() < min => refuse("the list is too short"),
            Ok(list) => match list.iter().find(|item| item.parse::<SocketAddr>().is_err()) {
                Some(item) => refuse(&format!(
                    "{item:?} is not an address with a port (127.0.0.1:7700, [::1]:0)"
                )),
                None => Ok(()),
            },
            Err(why) => refuse(why),
        },
        Kind::Names { max, known } => match items(max) {
            Ok(list) => match list
                .iter()
                .find(|item| item.is_empty() || !(known.is_empty() || known.contains(item)))
            {
                Some(item) => refuse(&match nearest(item, known.iter().copied()) {
                    Some(near) => format!("{item:?} is not known; did you mean {near:?}?"),
                    None if item.is_empty() => "a name is empty".to_owned(),
                    None => format!("{item:?} is not known"),
                }),
                None => Ok(()),
            },
            Err(why) => refuse(why),
        },
        Kind::Integer { min, max } => match value.as_integer().map(u64::try_from) {
            Some(Ok(number)) if (min..=max).contains(&number) => Ok(()),
            _ => refuse("it is out of range"),
        },
        Kind::AutoOr { min, max, steps } => match (value.as_str(), value.as_integer().map(u64::try_from)) {
            (Some("auto"), _) => Ok(()),
            (Some(_), _) => refuse("it is neither a number nor the word auto"),
            (None, Some(Ok(number))) if (min..=max).contains(&number) => match steps {
                Steps::All => Ok(()),
                Steps::PowersOfTwo if number.is_power_of_two() => Ok(()),
                Steps::PowersOfTwo => refuse("it is no power of two"),
            },
            _ => refuse("it is out of range"),
        },
        Kind::Choice(words) => match value.as_str() {
            Some(word) if words.contains(&word) => Ok(()),
            _ => refuse("it is none of the known words"),
        },
        Kind::Flag => match value.as_bool() {
            Some(_) => Ok(()),
            None => refuse("it is neither true nor false"),
        },
    }
}

fn refuse(key: &Key, value: &str, source: &str, why: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{} = {value}", key.path))
        .at(source)
        .because(why)
        .remedy(format!("it takes {}", key.kind.describe()))
}

fn unknown(name: &str, source: &str, near: Option<&str>) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("unknown setting {name}"))
        .at(source)
        .remedy(match near {
            Some(near) => format!("did you mean {near}?"),
            None => "see Config::reference()".to_owned(),
        })
}
