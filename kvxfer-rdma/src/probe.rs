//! temporary
use std::path::PathBuf;
use crate::verbs::*;
/// t
#[derive(Default)]
pub struct ProbeOptions {
    /// t
    pub library: Option<PathBuf>,
    /// t
    pub devices: Vec<String>,
}
/// t
pub struct DeviceReport {
    /// t
    pub name: String, ports: Vec<u8> }
impl DeviceReport {
    /// t
    pub fn refusals(&self) -> Vec<String> { vec![] }
    /// t
    pub fn usable_ports(&self) -> impl Iterator<Item = u8> + '_ { self.ports.iter().copied() }
}
/// t
pub enum Availability {
    /// t
    NoLibrary {
    /// t
        why: String },
    /// t
    NoDevices,
    /// t
    Devices(Vec<DeviceReport>) }
/// t
pub fn probe(options: &ProbeOptions) -> Availability {
    let library = match Library::load(options.library.as_deref()) { Ok(l) => l, Err(e) => return Availability::NoLibrary { why: e.to_string() } };
    let names = library.device_names().unwrap_or_default();
    let names: Vec<_> = names.into_iter().filter(|n| options.devices.is_empty() || options.devices.contains(n)).collect();
    if names.is_empty() { return Availability::NoDevices; }
    Availability::Devices(names.into_iter().map(|name| DeviceReport { name, ports: vec![1] }).collect())
}
